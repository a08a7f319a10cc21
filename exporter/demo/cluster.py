"""The simulated cluster: controllers and nodes acting on the store, one due event after the other.

A discrete-event simulation: each event happens at its own instant, so what is written does not
depend on how often `step` is called. Controllers watch the store as informers do, so what a caller
writes through the API server is acted upon like everything else.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal, Protocol

from exporter.demo import controller, node, objects
from exporter.demo.controller import Eviction, Rules, Seen, Writes
from exporter.demo.objects import Object
from exporter.demo.status import Resource
from exporter.demo.store import MIGRATIONS, PODS, VMIS, Change, Store, decode_body, key_of


FINISHED_PODS_KEPT = 2
"""Finished pods kept per VMI, as a cluster with a low terminated-pod threshold would."""

Outcome = Literal["succeeds", "fails", "unschedulable", "loses target", "loses ready target"]


@dataclass(frozen=True, slots=True)
class Fate:
    """What becomes of one migration."""

    outcome: Outcome = "succeeds"
    copying: float = 5.0
    """Seconds from its start to its end."""
    reason: str = ""


class Plan(Protocol):
    """What the scenario decides for the cluster."""

    def fate(self, vmi: Object, attempt: int) -> Fate:
        """What becomes of the VMI's next migration, the first attempt being 0."""

    def choose_node(self, vmi: Object, free: Sequence[str]) -> str:
        """Where a pod of this VMI goes, of the nodes that are free for it."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How long each small step takes, in seconds; all divided by the speed."""

    speed: float = 1.0
    reconcile: float = 0.05
    schedule: float = 0.3
    start_pod: float = 1.5
    run_vmi: float = 0.5
    prepare: float = 0.6
    start: float = 0.5
    detect: float = 0.2
    finalise: float = 0.5
    clean_up: float = 0.5
    exit: float = 0.8
    abort: float = 1.0


class Cluster:
    """KubeVirt's controllers, the scheduler, the kubelets and the virt-handlers over one store."""

    def __init__(
        self,
        start: datetime,
        plan: Plan,
        *,
        nodes: int = 4,
        seed: int = 1,
        rules: Rules | None = None,
        pace: Pace | None = None,
        window: int = 10_000,
    ) -> None:
        self.instant = start
        self.store = Store(lambda: self.instant, seed, window)
        self.nodes = [f"node-{number}" for number in range(1, nodes + 1)]
        self.plan = plan
        self.rules = rules or Rules()
        self.pace = pace or Pace()
        self.random = random.Random(seed)
        self._due: list[tuple[datetime, int, str, Callable[[], object]]] = []
        self._queued: dict[str, datetime] = {}
        self._order = 0
        self._observed = dict.fromkeys((VMIS, MIGRATIONS, PODS), 0)
        # Dictionaries, not sets: their order is the same in every process.
        self._migrations_of: dict[str, dict[str, None]] = {}
        self._pods_of: dict[str, dict[str, None]] = {}
        self._open: dict[str, None] = {}
        self._begun: dict[str, None] = {}
        """Those of the open ones that have had a target pod: few, where many wait."""
        self._held: dict[str, None] = {}
        """Migrations whose finalizer is not gone yet: those that are still reconciled."""
        self._fates: dict[str, Fate] = {}
        self._attempts: dict[str, int] = {}
        self._handled: dict[str, str] = {}
        self._addresses = 0

    # Time

    def step(self, now: datetime) -> None:
        """Let everything happen that is due until now."""
        self._observe()
        while self._due and self._due[0][0] <= now:
            due, _, key, action = heapq.heappop(self._due)
            if key:
                if self._queued.get(key) != due:
                    continue
                del self._queued[key]
            self.instant = max(self.instant, due)
            action()
            self._observe()
        self.instant = max(self.instant, now)

    def after(self, seconds: float, action: Callable[[], object], key: str = "") -> None:
        """Let something happen in so many seconds, at the cluster's speed."""
        self._at(self.instant + timedelta(seconds=seconds / self.pace.speed), action, key)

    def _at(self, due: datetime, action: Callable[[], object], key: str = "") -> None:
        """With a key it is queued once, at the earliest instant asked for, as in a work queue."""
        if key:
            queued = self._queued.get(key)
            if queued is not None and queued <= due:
                return
            self._queued[key] = due
        self._order += 1
        heapq.heappush(self._due, (due, self._order, key, action))

    # Callers: users, operators, the descheduler

    def create_vmi(self, vmi: Object) -> Object:
        """Create a VMI, as a user does."""
        created = self.store.create(VMIS, vmi)
        # Observed at once, so that a population of any size fits the window of changes.
        self._observe()
        return created

    def delete_vmi(self, namespace: str, name: str) -> None:
        """Delete a VMI, if it is there."""
        if self.vmi(namespace, name) is not None:
            self.store.delete(VMIS, namespace, name)

    def vmi(self, namespace: str, name: str) -> Object | None:
        """One VMI, if it is there."""
        return self.store.find(VMIS, namespace, name)

    def launcher(self, namespace: str, name: str) -> Object | None:
        """The current pod of a VMI."""
        vmi = self.vmi(namespace, name)
        if vmi is None:
            return None
        return objects.current_pod(vmi, self._pods(vmi))

    def evict(self, namespace: str, pod_name: str, *, descheduler: bool = False) -> Eviction:
        """Ask for the eviction of a pod, as through the API server and KubeVirt's webhook."""
        pod = self.store.find(PODS, namespace, pod_name)
        if pod is None:
            return Eviction(404, f'pods "{pod_name}" not found')
        vmi = self.vmi(namespace, objects.notes(pod)[objects.DOMAIN])
        if vmi is None:
            return Eviction(429, "kubevirt failed getting the vmi")
        answer = controller.admit_eviction(vmi, pod, descheduler=descheduler)
        if answer.vmi is not None:
            self._write(VMIS, vmi, answer.vmi)
        if answer.code == 200:
            self.store.delete(PODS, namespace, pod_name)
        return answer

    def evict_vmi(self, namespace: str, name: str, *, descheduler: bool = False) -> Eviction | None:
        """Ask for the eviction of a VMI's current pod, if it has one."""
        pod = self.launcher(namespace, name)
        if pod is None:
            return None
        return self.evict(namespace, pod["metadata"]["name"], descheduler=descheduler)

    def change_vmi(self, namespace: str, name: str, change: Callable[[Object], Object]) -> None:
        """Change a VMI past all controllers."""
        vmi = self.vmi(namespace, name)
        if vmi is not None:
            self._write(VMIS, vmi, change(vmi))

    # Watching the store

    def _observe(self) -> None:
        for resource in self._observed:
            changes = self.store.caches[resource].changes_since(self._observed[resource])
            if changes is None:
                raise RuntimeError(f"the window of {resource.plural} is too small")
            for change in changes:
                self._observed[resource] = change.revision
                self._notice(resource, change)

    def _notice(self, resource: Resource, change: Change) -> None:
        seen = decode_body(change.body)
        namespace = seen["metadata"]["namespace"]
        is_gone = change.kind == "DELETED"
        if resource is VMIS:
            owner = change.key
            if is_gone:
                self._handled.pop(seen["metadata"]["uid"], None)
            else:
                self._handle(seen)
        elif resource is MIGRATIONS:
            owner = f"{namespace}/{seen['spec']['vmiName']}"
            self._index(self._migrations_of, owner, change.key, is_gone=is_gone)
            self._notice_migration(change.key, seen, is_gone=is_gone)
        else:
            owner = f"{namespace}/{objects.notes(seen).get(objects.DOMAIN, '')}"
            self._index(self._pods_of, owner, change.key, is_gone=is_gone)
            if not is_gone:
                self._keep_pod(seen)
        self._enqueue("vmi", owner, self._reconcile_vmi)
        is_orphaned = resource is VMIS and is_gone
        for migration in self._migrations_of.get(owner, {}):
            # One that is final and released would be written as it is.
            if migration in self._held or is_orphaned:
                self._enqueue("migration", migration, self._reconcile_migration)

    def _notice_migration(self, key: str, migration: Object, *, is_gone: bool) -> None:
        is_held = not is_gone and (
            not objects.is_final(migration) or "finalizers" in migration["metadata"]
        )
        if is_held:
            self._held[key] = None
        else:
            self._held.pop(key, None)
        if not is_gone and not objects.is_final(migration):
            self._open[key] = None
            if objects.phase(migration) not in controller.PRE_TARGET:
                self._begun[key] = None
        elif key in self._open:
            del self._open[key]
            self._begun.pop(key, None)
            self._fates.pop(migration["metadata"]["uid"], None)
            self._wake_pending()

    def _wake_pending(self) -> None:
        """A place is free: those of the highest priority first, then the oldest."""
        waiting = [self._migration(key) for key in self._open]
        pending = [one for one in waiting if one is not None and objects.phase(one) == "Pending"]
        oldest = reversed(objects.newest_first(pending))
        for migration in sorted(oldest, key=objects.priority, reverse=True):
            self._enqueue("migration", objects.key(migration), self._reconcile_migration)

    @staticmethod
    def _index(index: dict[str, dict[str, None]], owner: str, key: str, *, is_gone: bool) -> None:
        if not is_gone:
            index.setdefault(owner, {})[key] = None
            return
        index.get(owner, {}).pop(key, None)
        if not index.get(owner):
            index.pop(owner, None)

    def _enqueue(self, kind: str, key: str, reconcile: Callable[[str], None]) -> None:
        self.after(self.pace.reconcile, lambda: reconcile(key), f"{kind} {key}")

    # virt-controller

    def _reconcile_migration(self, key: str) -> None:
        migration = self._migration(key)
        if migration is None:
            return
        namespace, vmi_name = key.split("/", 1)[0], migration["spec"]["vmiName"]
        vmi = self.vmi(namespace, vmi_name)
        seen = Seen(
            migration,
            vmi,
            [] if vmi is None else self._pods(vmi),
            self._siblings(key_of(namespace, vmi_name)),
            *self._running(vmi),
        )
        writes = controller.reconcile_migration(seen, self.instant, self.rules)
        self._apply(seen, writes)
        if writes.look_again is not None:
            self._at(
                max(writes.look_again, self.instant + timedelta(milliseconds=1)),
                lambda: self._reconcile_migration(key),
                f"migration {key}",
            )

    def _apply(self, seen: Seen, writes: Writes) -> None:
        if writes.vmi is not None and seen.vmi is not None:
            self._write(VMIS, seen.vmi, writes.vmi)
        if writes.create_pod is not None:
            self.store.create(PODS, writes.create_pod)
            self._begun[objects.key(seen.migration)] = None
        for pod in writes.delete_pods:
            self.store.delete(PODS, pod["metadata"]["namespace"], pod["metadata"]["name"])
        if writes.migration is not None:
            self._write(MIGRATIONS, seen.migration, writes.migration)
        for migration in writes.delete_migrations:
            metadata = migration["metadata"]
            self.store.delete(MIGRATIONS, metadata["namespace"], metadata["name"])

    def _running(self, vmi: Object | None) -> tuple[int, int]:
        """How many migrations run in the cluster, and how many of them leave this VMI's node."""
        running, outbound = 0, 0
        source = "" if vmi is None else vmi["status"].get("nodeName", "")
        for key in self._begun:
            migration = self._migration(key)
            if migration is None:
                continue
            other = self.vmi(key.split("/", 1)[0], migration["spec"]["vmiName"])
            if other is None:
                continue
            if objects.phase(migration) in controller.PRE_TARGET and not any(
                objects.is_target_of(pod, migration) for pod in self._pods(other)
            ):
                continue
            running += 1
            state = objects.state_of(other) or {}
            outbound += source in (other["status"].get("nodeName"), state.get("sourceNode"))
        return running, outbound

    def _reconcile_vmi(self, key: str) -> None:
        namespace, name = key.split("/")
        vmi = self.vmi(namespace, name)
        if vmi is None:
            return
        pods = self._pods(vmi)
        if objects.is_deleting(vmi):
            self._take_down(vmi, pods)
            return
        if objects.phase(vmi) == "Pending" and not pods:
            self.store.create(PODS, objects.build_launcher_pod(vmi))
            return
        synced = controller.sync_vmi(vmi, pods, self.instant)
        self._write(VMIS, vmi, synced)
        pod = objects.current_pod(synced, pods)
        if pod is not None:
            self._write(PODS, pod, controller.sync_pod(synced, pod))
        self._collect_pods(pods)
        siblings = self._siblings(key)
        if controller.needs_evacuation(synced, siblings, pods):
            evacuation = controller.admit_migration(objects.build_evacuation(synced))
            self.store.create(MIGRATIONS, evacuation)

    def _take_down(self, vmi: Object, pods: Sequence[Object]) -> None:
        for pod in pods:
            if not objects.is_deleting(pod):
                self.store.delete(PODS, pod["metadata"]["namespace"], pod["metadata"]["name"])
        if not pods and not objects.is_final(vmi):
            # Its open migrations fail on seeing this, and let go of their finalizers.
            stopped = objects.changed(vmi, lambda made: made["status"].update(phase="Succeeded"))
            self._write(VMIS, vmi, stopped)
        elif not pods:
            released = objects.changed(vmi, lambda made: made["metadata"].pop("finalizers", None))
            self._write(VMIS, vmi, released)

    def _collect_pods(self, pods: Sequence[Object]) -> None:
        finished = [pod for pod in pods if objects.is_final(pod) and not objects.is_deleting(pod)]
        finished.sort(key=lambda pod: int(pod["metadata"]["resourceVersion"]))
        for pod in finished[:-FINISHED_PODS_KEPT]:
            self.store.delete(PODS, pod["metadata"]["namespace"], pod["metadata"]["name"])

    # Scheduler and kubelets

    def _keep_pod(self, pod: Object) -> None:
        namespace, name = pod["metadata"]["namespace"], pod["metadata"]["name"]
        waiting = objects.phase(pod) == "Pending" and not objects.is_deleting(pod)
        if objects.is_deleting(pod):
            self._pod_step(pod, "gone", self.pace.exit, lambda: self._end_pod(namespace, name))
        elif waiting and objects.node_of(pod):
            self._pod_step(
                pod, "start", self.pace.start_pod, lambda: self._start_pod(namespace, name)
            )
        elif waiting and not objects.is_unschedulable(pod):
            self._pod_step(pod, "bind", self.pace.schedule, lambda: self._bind(namespace, name))

    def _pod_step(
        self, pod: Object, stage: str, seconds: float, action: Callable[[], object]
    ) -> None:
        self.after(seconds, action, f"{stage} {pod['metadata']['uid']}")

    def _bind(self, namespace: str, name: str) -> None:
        pod = self.store.find(PODS, namespace, name)
        vmi = None if pod is None else self.vmi(namespace, objects.notes(pod)[objects.DOMAIN])
        if pod is None or vmi is None or objects.node_of(pod):
            return
        job = objects.labels(pod).get(objects.MIGRATION_JOB)
        if job is not None and self._fate(vmi, job).outcome == "unschedulable":
            bound = node.leave_unscheduled(pod, len(self.nodes), self.instant)
        else:
            taken = [
                objects.node_of(other) for other in self._pods(vmi) if not objects.is_final(other)
            ]
            free = [host for host in self.nodes if host not in taken]
            if not free:
                bound = node.leave_unscheduled(pod, len(self.nodes), self.instant)
            else:
                bound = node.bind_pod(pod, self.plan.choose_node(vmi, free), self.instant)
        self._write(PODS, pod, bound)

    def _start_pod(self, namespace: str, name: str) -> None:
        pod = self.store.find(PODS, namespace, name)
        if pod is None or objects.phase(pod) != "Pending" or objects.is_deleting(pod):
            return
        self._addresses = self._addresses % 65_000 + 1
        address = f"10.244.{self._addresses // 250}.{self._addresses % 250 + 1}"
        self._write(PODS, pod, node.start_pod(pod, address, self.instant))

    def _end_pod(self, namespace: str, name: str) -> None:
        if self.store.find(PODS, namespace, name) is not None:
            self.store.delete(PODS, namespace, name, grace=0)

    def _exit_pod(self, namespace: str, name: str, phase: str) -> None:
        pod = self.store.find(PODS, namespace, name)
        if pod is not None and not objects.is_final(pod) and not objects.is_deleting(pod):
            self._write(PODS, pod, node.finish_pod(pod, phase, self.instant))

    # virt-handlers

    def _fate(self, vmi: Object, migration_uid: str) -> Fate:
        """Decided when the migration's target first needs it, once."""
        if migration_uid not in self._fates:
            owner = objects.key(vmi)
            attempt = self._attempts.get(owner, 0)
            self._attempts[owner] = attempt + 1
            self._fates[migration_uid] = self.plan.fate(vmi, attempt)
        return self._fates[migration_uid]

    def _handle(self, vmi: Object) -> None:
        """Start what a virt-handler begins on seeing the VMI like this."""
        key, uid = objects.key(vmi), vmi["metadata"]["uid"]
        if objects.phase(vmi) == "Scheduled":
            self.after(self.pace.run_vmi, lambda: self._run(key), f"run {uid}")
        state = objects.state_of(vmi)
        if state is None or "endTimestamp" in state:
            return
        job = state["migrationUid"]
        if state.get("abortRequested"):
            self.after(self.pace.abort, lambda: self._abort(key, job), f"abort {job}")
        elif self._handled.get(uid) != job and "startTimestamp" not in state:
            self._handled[uid] = job
            self._play(key, job, self._fate(vmi, job))

    def _run(self, key: str) -> None:
        namespace, name = key.split("/")
        vmi = self.vmi(namespace, name)
        if vmi is not None and objects.phase(vmi) == "Scheduled":
            running = node.run_vmi(vmi, self.instant)
            self._write(VMIS, vmi, running)

    def _play(self, key: str, job: str, fate: Fate) -> None:
        """One handed-off migration from the target's preparation to its end."""
        pace = self.pace
        if fate.outcome == "loses target":
            self.after(pace.prepare, lambda: self._lose_target(key, job))
            return
        ports = {str(self.random.randrange(30_000, 60_000)): port for port in (0, 49152, 49153)}
        host = f"192.168.10.{self.random.randrange(2, 250)}"
        self.after(
            pace.prepare,
            lambda: self._touch(key, job, lambda vmi: node.prepare_target(vmi, host, ports)),
        )
        if fate.outcome == "loses ready target":
            self.after(pace.prepare + pace.start, lambda: self._lose_target(key, job))
            return
        begun = pace.prepare + pace.start
        self.after(
            begun,
            lambda: self._touch(key, job, lambda vmi: node.start_migration(vmi, self.instant)),
        )
        self.after(begun + pace.detect, lambda: self._touch(key, job, node.detect_domain))
        ended = begun + max(fate.copying, pace.detect)
        if fate.outcome == "fails":
            self.after(ended, lambda: self._fail(key, job, fate.reason, None))
        else:
            self.after(ended, lambda: self._end(key, job))

    def _lose_target(self, key: str, job: str) -> None:
        namespace, name = key.split("/")
        vmi = self.vmi(namespace, name)
        state = (objects.state_of(vmi) if vmi else None) or {}
        if state.get("migrationUid") == job:
            self._exit_pod(namespace, state["targetPod"], "Failed")

    def _end(self, key: str, job: str) -> None:
        ended = self._touch(key, job, lambda vmi: node.end_migration(vmi, self.instant))
        if ended is None:
            return
        namespace = key.split("/", 1)[0]
        source = ended["status"]["migrationState"].get("sourcePod", "")
        self.after(self.pace.exit, lambda: self._exit_pod(namespace, source, "Succeeded"))
        self.after(
            self.pace.finalise,
            lambda: self._touch(key, job, node.finalise_migration, ended=True),
        )
        self._clean_up_later(key, job, self.pace.finalise + self.pace.clean_up)

    def _abort(self, key: str, job: str) -> None:
        self._fail(key, job, "Live migration has been aborted", "Succeeded")

    def _fail(self, key: str, job: str, reason: str, abort_status: str | None) -> None:
        failed = self._touch(
            key, job, lambda vmi: node.fail_migration(vmi, self.instant, reason, abort_status)
        )
        if failed is None:
            return
        namespace = key.split("/", 1)[0]
        target = failed["status"]["migrationState"]["targetPod"]
        self.after(self.pace.exit, lambda: self._exit_pod(namespace, target, "Failed"))
        self._clean_up_later(key, job, self.pace.clean_up)

    def _clean_up_later(self, key: str, job: str, seconds: float) -> None:
        self.after(seconds, lambda: self._touch(key, job, node.clean_up_target, ended=True))

    def _touch(
        self, key: str, job: str, change: Callable[[Object], Object], *, ended: bool = False
    ) -> Object | None:
        """Change the VMI if it is still at this migration, and ended or not as expected."""
        namespace, name = key.split("/")
        vmi = self.vmi(namespace, name)
        if vmi is None or objects.is_deleting(vmi):
            return None
        state = objects.state_of(vmi) or {}
        if state.get("migrationUid") != job or ("endTimestamp" in state) != ended:
            return None
        after = change(vmi)
        self._write(VMIS, vmi, after)
        return after

    # The store

    def _migration(self, key: str) -> Object | None:
        return self.store.find(MIGRATIONS, *key.split("/"))

    def _siblings(self, owner: str) -> list[Object]:
        found = [self._migration(key) for key in self._migrations_of.get(owner, {})]
        return [migration for migration in found if migration is not None]

    def _pods(self, vmi: Object) -> list[Object]:
        """The pods of this very VMI; a namesake before it may still have some."""
        keys = self._pods_of.get(objects.key(vmi), {})
        found = [self.store.find(PODS, *key.split("/")) for key in keys]
        uid = vmi["metadata"]["uid"]
        return [pod for pod in found if pod and objects.labels(pod)[objects.CREATED_BY] == uid]

    def _write(self, resource: Resource, before: Object, after: Object) -> None:
        """Write what changed, a status of its own first and apart, as KubeVirt does."""
        after = objects.changed(after, lambda made: made["metadata"].pop("resourceVersion", None))
        if resource.status and after.get("status") != before.get("status"):
            self.store.update(resource, after, subresource=True)
        rest = {field: value for field, value in after.items() if field != "status"}
        was = {field: value for field, value in before.items() if field != "status"}
        was["metadata"] = {**was["metadata"]}
        was["metadata"].pop("resourceVersion", None)
        if rest != was or not resource.status:
            self.store.update(resource, after)
