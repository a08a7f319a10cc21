"""virt-controller, working on the store; what it decides is in `controller.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta

from exporter.demo import controller, objects, webhooks
from exporter.demo.actions import ActionQueue
from exporter.demo.client import Client
from exporter.demo.controller import MigrationView, Rules, Writes
from exporter.demo.objects import Object
from exporter.demo.plan import Fates, Pace
from exporter.demo.store import MIGRATIONS, PODS, VMIS


FINISHED_PODS_KEPT = 2
"""Finished pods kept per VMI, as in a cluster with a low terminated-pod threshold."""


class VirtController:
    """Reconciles VMIs and migrations."""

    def __init__(
        self, client: Client, queue: ActionQueue, fates: Fates, pace: Pace, rules: Rules
    ) -> None:
        self._client = client
        self._queue = queue
        self._fates = fates
        self._pace = pace
        self._rules = rules
        # Dictionaries, not sets: their order is the same in every process.
        self._open: dict[str, None] = {}
        """Migrations that are not final."""
        self._with_target: dict[str, None] = {}
        """Open migrations that have or had a target pod: few, even if many wait."""
        self._held: dict[str, None] = {}
        """Migrations that are still reconciled: not final, or with their finalizer."""
        self._missed: dict[tuple[str, str], Callable[[str], None]] | None = None
        """What was not reconciled since `stop_reconciling`; None if virt-controller runs."""

    def stop_reconciling(self) -> None:
        """Reconcile nothing until `start_reconciling`."""
        self._missed = {}

    def start_reconciling(self) -> None:
        """Reconcile what has changed since `stop_reconciling`."""
        missed, self._missed = self._missed or {}, None
        for (kind, key), reconcile in missed.items():
            self._enqueue(kind, key, reconcile)

    def enqueue(self, owner: str, *, is_gone: bool) -> None:
        """Reconcile a VMI and its migrations in `_held`, or all of them if the VMI is gone."""
        self._enqueue("vmi", owner, self._reconcile_vmi)
        for migration in self._client.migration_keys(owner):
            # A reconcile would not change a final migration without finalizer.
            if migration in self._held or is_gone:
                self._enqueue("migration", migration, self._reconcile_migration)

    def record_migration(self, key: str, migration: Object, *, is_gone: bool) -> None:
        """Update the sets of migrations after a migration has changed."""
        is_open = not is_gone and not objects.is_final(migration)
        if is_open or (not is_gone and "finalizers" in migration["metadata"]):
            self._held[key] = None
        else:
            self._held.pop(key, None)
        if is_open:
            self._open[key] = None
            if objects.phase(migration) not in controller.PRE_TARGET:
                self._with_target[key] = None
        elif key in self._open:
            del self._open[key]
            self._with_target.pop(key, None)
            self._fates.drop(migration["metadata"]["uid"])
            self._wake_pending()

    def _wake_pending(self) -> None:
        """A slot is free: reconcile pending migrations, highest priority first, then oldest."""
        migrations = map(self._client.migration, self._open)
        pending = [
            migration
            for migration in migrations
            if migration and objects.phase(migration) == "Pending"
        ]
        oldest = reversed(objects.newest_first(pending))
        for migration in sorted(oldest, key=objects.priority, reverse=True):
            self._enqueue("migration", objects.key(migration), self._reconcile_migration)

    def _enqueue(self, kind: str, key: str, reconcile: Callable[[str], None]) -> None:
        if self._missed is not None:
            self._missed[kind, key] = reconcile
            return
        self._queue.after(self._pace.reconcile, lambda: reconcile(key), f"{kind} {key}")

    def _reconcile_migration(self, key: str) -> None:
        migration = self._client.migration(key)
        if migration is None:
            return
        owner = objects.owner_key(migration)
        vmi = self._client.vmi(owner)
        view = MigrationView(
            migration,
            vmi,
            [] if vmi is None else self._client.pods(vmi),
            self._client.migrations(owner),
            *self._count_running(vmi),
        )
        writes = controller.reconcile_migration(view, self._queue.now, self._rules)
        self._apply(view, writes)
        if writes.requeue_at is not None:
            self._queue.at(
                max(writes.requeue_at, self._queue.now + timedelta(milliseconds=1)),
                lambda: self._reconcile_migration(key),
                f"migration {key}",
            )

    def _apply(self, view: MigrationView, writes: Writes) -> None:
        if writes.vmi is not None and view.vmi is not None:
            self._client.write(VMIS, view.vmi, writes.vmi)
        if writes.create_pod is not None:
            self._client.create_pod(writes.create_pod)
            self._with_target[objects.key(view.migration)] = None
        for pod in writes.delete_pods:
            self._client.delete(PODS, pod)
        if writes.migration is not None:
            self._client.write(MIGRATIONS, view.migration, writes.migration)
        for migration in writes.delete_migrations:
            self._client.delete(MIGRATIONS, migration)

    def _count_running(self, vmi: Object | None) -> tuple[int, int]:
        """The migrations that run in the cluster, and those that leave this VMI's node."""
        running, outbound = 0, 0
        source = "" if vmi is None else vmi["status"].get("nodeName", "")
        for key in self._with_target:
            migration = self._client.migration(key)
            other = migration and self._client.vmi(objects.owner_key(migration))
            if not migration or not other:
                continue
            if objects.phase(migration) in controller.PRE_TARGET and not any(
                objects.is_target_of(pod, migration) for pod in self._client.pods(other)
            ):
                continue
            running += 1
            state = objects.state_of(other)
            outbound += source in (other["status"].get("nodeName"), state.get("sourceNode"))
        return running, outbound

    def _is_full(self, vmi: Object) -> bool:
        """Whether KubeVirt starts no migration of this VMI now."""
        running, outbound = self._count_running(vmi)
        return running >= self._rules.per_cluster or outbound >= self._rules.per_node

    def _reconcile_vmi(self, key: str) -> None:
        vmi = self._client.vmi(key)
        if vmi is None:
            return
        pods = self._client.pods(vmi)
        if objects.is_deleting(vmi):
            self._take_down(vmi, pods)
            return
        if objects.phase(vmi) == "Pending" and not pods:
            self._client.create_pod(objects.build_launcher_pod(vmi))
            return
        synced = controller.sync_vmi(vmi, pods, self._queue.now)
        self._client.write(VMIS, vmi, synced)
        pod = objects.current_pod(synced, pods)
        if pod is not None:
            self._client.write(PODS, pod, controller.sync_pod(synced, pod, self._queue.now))
        self._collect_pods(pods)
        if controller.needs_evacuation(synced, self._client.migrations(key), pods):
            if not self._rules.queues and self._is_full(synced):
                pause = self._rules.wait(controller.CAPACITY_RETRY).total_seconds()
                self._queue.after(pause, lambda: self._reconcile_vmi(key), f"vmi {key}")
                return
            evacuation = webhooks.admit_migration(objects.build_evacuation(synced))
            self._client.store.create(MIGRATIONS, evacuation)

    def _take_down(self, vmi: Object, pods: Sequence[Object]) -> None:
        for pod in pods:
            if not objects.is_deleting(pod):
                self._client.delete(PODS, pod)
        if not pods and not objects.is_final(vmi):
            # Its open migrations then fail and lose their finalizers.
            stopped = objects.changed(vmi, lambda obj: obj["status"].update(phase="Succeeded"))
            self._client.write(VMIS, vmi, stopped)
        elif not pods:
            released = objects.changed(vmi, lambda obj: obj["metadata"].pop("finalizers", None))
            self._client.write(VMIS, vmi, released)

    def _collect_pods(self, pods: Sequence[Object]) -> None:
        finished = [pod for pod in pods if objects.is_final(pod) and not objects.is_deleting(pod)]
        finished.sort(key=lambda pod: int(pod["metadata"]["resourceVersion"]))
        for pod in finished[:-FINISHED_PODS_KEPT]:
            self._client.delete(PODS, pod)
