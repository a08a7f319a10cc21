"""A cluster over simulated months: the demo's KubeVirt, with people who drain, move and break."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial

from exporter.demo import objects, webhooks
from exporter.demo.actions import Action
from exporter.demo.cluster import Cluster
from exporter.demo.controller import Rules
from exporter.demo.objects import Object
from exporter.demo.plan import Fate
from exporter.demo.store import KUBEVIRTS, MIGRATIONS, NAMESPACES, NODES, VMIS, decode_body


BEGAN = datetime(2026, 1, 5, tzinfo=UTC)
"""A Monday, midnight."""
WARM_UP = timedelta(minutes=10)
"""The VMs are started this long before the beginning."""
WINDOW = 50_000
"""How many changes the store keeps: a watch that was interrupted for hours continues."""
NAMESPACES_COUNT = 5
SIZES = ((4, 30), (8, 30), (16, 15), (32, 15), (64, 5), (128, 4), (256, 1))
"""GiB of a VM's memory, and how many VMs in a hundred have it."""
EVICT_AGAIN = 5.0
"""`kubectl drain` tries a refused eviction again after these seconds."""
REBOOT = 420.0
HOUR = 3600.0
DAY = 24 * HOUR


@dataclass(slots=True, eq=False)
class Vm:
    """A VM: its size, and how many seconds the copy of its memory takes."""

    namespace: str
    name: str
    gib: int
    copying: float
    strategy: str = "LiveMigrate"
    migratable: bool = True
    stopped: bool = False

    @property
    def key(self) -> str:
        """Namespace and name."""
        return f"{self.namespace}/{self.name}"


class World:
    """The cluster, and what happens to it; it is the plan that the demo's cluster asks."""

    def __init__(self, seed: int, nodes: int, vms: int, rules: Rules) -> None:
        self.chance = random.Random(f"months {seed}")
        self.cluster = Cluster(
            BEGAN - WARM_UP, self, nodes=nodes, seed=seed, rules=rules, window=WINDOW
        )
        self.nodes = self.cluster.nodes
        self.cordoned: set[str] = set()
        self.slowness = 1.0
        """By what the time of each copy is multiplied."""
        self.decide: Callable[[Vm, str], Fate | None] = lambda _vm, _target: None
        """How the migration of a VM to a node ends; None: it succeeds."""
        self.prefer: Callable[[Vm], str | None] = lambda _: None
        """The node that the scheduler chooses for a VM; None: one with few VMs."""
        self.drained = 0
        self.vms: dict[str, Vm] = {}
        self._vmis: dict[str, Object] = {}
        self._targets: dict[str, str] = {}
        self._seen = 0
        store = self.cluster.store
        store.listeners.add(self._observe)
        for number in range(NAMESPACES_COUNT):
            store.create(NAMESPACES, objects.build_namespace(f"tenant-{number}"))
        store.create(NAMESPACES, objects.build_namespace("kubevirt"))
        for node in self.nodes:
            store.create(NODES, objects.build_node(node))
        store.create(KUBEVIRTS, objects.build_kubevirt())
        sizes = [gib for gib, share in SIZES for _ in range(share)]
        for number in range(vms):
            self.add(f"vm-{number:04d}", sizes[number % len(sizes)], number % NAMESPACES_COUNT)
        self.cluster.step(BEGAN)

    # Time

    @property
    def now(self) -> float:
        """Seconds since the beginning."""
        return (self.cluster.instant - BEGAN).total_seconds()

    def at(self, seconds: float, action: Action) -> None:
        """Do something these seconds after the beginning."""
        self.cluster.after(seconds - self.now, action)

    def every(self, seconds: float, action: Action, until: float = float("inf")) -> None:
        """Do something again and again, until so many seconds after the beginning."""

        def again() -> None:
            if self.now <= until:
                action()
                self.cluster.after(seconds, again)

        self.cluster.after(seconds, again)

    # What the demo's cluster asks

    def fate(self, vmi: Object, attempt: int) -> Fate:  # noqa: ARG002 (all attempts are alike)
        """How a VM's next migration ends; its target is chosen here, too."""
        vm = self.vms[objects.key(vmi)]
        target = self._choose(vm, [node for node in self._free() if node != self.node_of(vm)])
        self._targets[vm.key] = target
        fate = self.decide(vm, target)
        return fate or Fate("succeeds", vm.copying * self.slowness)

    def choose_node(self, vmi: Object, free: Sequence[str]) -> str:
        """The node that `fate` has chosen, if it is still free."""
        vm = self.vms[objects.key(vmi)]
        chosen = self._targets.pop(vm.key, "")
        return chosen if chosen in free else self._choose(vm, list(free))

    def _free(self) -> list[str]:
        return [node for node in self.nodes if node not in self.cordoned]

    def _choose(self, vm: Vm, free: list[str]) -> str:
        preferred = self.prefer(vm)
        if preferred in free:
            return preferred
        if not free:
            return ""
        counts = dict.fromkeys(free, 0)
        for vmi in self._vmis.values():
            node = vmi["status"].get("nodeName")
            if node in counts:
                counts[node] += 1
        return min(free, key=lambda node: counts[node] + self.chance.uniform(0, 3))

    # VMs

    def add(self, name: str, gib: int, namespace: int = 0) -> Vm:
        """Create a VM."""
        copying = 12 + gib * self.chance.lognormvariate(1.0, 0.5)
        vm = Vm(f"tenant-{namespace}", name, gib, min(max(copying, 20.0), 2400.0))
        self.vms[vm.key] = vm
        self.start(vm)
        return vm

    def start(self, vm: Vm) -> None:
        """Start a VM."""
        vm.stopped = False
        vmi = objects.build_vmi(vm.namespace, vm.name, strategy=vm.strategy, annotations={})
        vmi["spec"]["domain"]["memory"]["guest"] = f"{vm.gib}Gi"
        self.cluster.create_vmi(vmi)

    def stop(self, vm: Vm) -> None:
        """Stop a VM."""
        vm.stopped = True
        self.cluster.delete_vmi(vm.namespace, vm.name)

    def node_of(self, vm: Vm) -> str:
        """The node of a VM; empty if it has none."""
        vmi = self._vmis.get(vm.key)
        return "" if vmi is None else str(vmi["status"].get("nodeName") or "")

    def on(self, node: str) -> list[Vm]:
        """The VMs of a node."""
        return [
            self.vms[key]
            for key, vmi in self._vmis.items()
            if vmi["status"].get("nodeName") == node and objects.phase(vmi) == "Running"
        ]

    def of_size(self, gib: int) -> list[Vm]:
        """The VMs of this size, in a fixed order."""
        return [vm for vm in self.vms.values() if vm.gib == gib]

    def is_leaving(self, vm: Vm, *, by_descheduler: bool = False) -> bool:
        """Whether a VM is being evacuated (because of the descheduler)."""
        vmi = self._vmis.get(vm.key)
        if vmi is None or not objects.evacuated_node(vmi):
            return False
        return not by_descheduler or objects.EVICTION_SOURCE in objects.annotations(vmi)

    def is_migrating(self, vm: Vm) -> bool:
        """Whether a VM has an unfinished migration."""
        return bool(self._attempts(vm))

    def set_strategy(self, vm: Vm, strategy: str) -> None:
        """Change a VM's evictionStrategy."""
        vm.strategy = strategy

        def change(vmi: Object) -> None:
            vmi["spec"]["evictionStrategy"] = strategy

        self._change(vm, change)

    def set_migratable(self, vm: Vm, *, migratable: bool) -> None:
        """Give a VM a device that no other node has, or take it away."""
        vm.migratable = migratable
        self._change(vm, partial(_set_migratable, migratable=migratable))

    def plug_cpus(self, vm: Vm, *, hangs: bool) -> None:
        """Give a VM CPUs that its guest does not take until this is called again."""
        self._change(vm, partial(_set_plugging, plugging=hangs))

    def _change(self, vm: Vm, change: Callable[[Object], None]) -> None:
        self.cluster.change_vmi(vm.namespace, vm.name, lambda vmi: objects.changed(vmi, change))

    def _attempts(self, vm: Vm) -> list[Object]:
        migrations = self.cluster.store.objects(MIGRATIONS, vm.namespace)
        return [
            migration
            for migration in migrations
            if migration["spec"]["vmiName"] == vm.name and not objects.is_final(migration)
        ]

    # Callers

    def evict(self, vm: Vm, *, descheduler: bool = False) -> str:
        """Request an eviction; returns the message of the answer."""
        answer = self.cluster.evict_vmi(vm.namespace, vm.name, descheduler=descheduler)
        return "" if answer is None else answer.message

    def cancel(self, vm: Vm) -> None:
        """Cancel the evacuation of a VM."""
        self.cluster.change_vmi(vm.namespace, vm.name, webhooks.cancel_evacuation)

    def abort(self, vm: Vm) -> None:
        """Delete the unfinished migrations of a VM."""
        for attempt in self._attempts(vm):
            name = attempt["metadata"]["name"]
            self.cluster.store.delete(MIGRATIONS, vm.namespace, name)

    def migrate(self, vm: Vm, *, update: bool = False) -> None:
        """Create a migration by hand, or as the workload updater of a KubeVirt upgrade does."""
        vmi = self.cluster.vmi(vm.namespace, vm.name)
        if vmi is None or self.is_leaving(vm) or self.is_migrating(vm):
            return
        migration = objects.build_migration(vmi)
        if update:
            migration["metadata"]["annotations"] = {objects.WORKLOAD_UPDATE: ""}
            migration["spec"]["priority"] = "system-maintenance"
        self.cluster.store.create(MIGRATIONS, webhooks.admit_migration(migration))

    def waiting(self) -> int:
        """How many migrations wait for a free slot."""
        migrations = self.cluster.store.objects(MIGRATIONS)
        return sum(objects.phase(migration) in ("", "Pending") for migration in migrations)

    def cordon(self, node: str) -> None:
        """Cordon a node."""
        self.cordoned.add(node)
        self.cluster.cordon(node)

    def uncordon(self, node: str) -> None:
        """Uncordon a node."""
        self.cordoned.discard(node)
        self.cluster.uncordon(node)

    def drain(self, node: str, then: Action = lambda: None, gives_up: float = float("inf")) -> None:
        """Evict all VMs of a node as `kubectl drain` does, then reboot and uncordon it."""
        began = self.now
        self.cordon(node)

        def evict() -> None:
            if self.now - began > gives_up:
                return
            here = self.on(node)
            for vm in here:
                if not self.is_leaving(vm):
                    self.evict(vm)
            if here:
                self.cluster.after(EVICT_AGAIN, evict)
            else:
                self.drained += 1
                self.cluster.after(REBOOT, end)

        def end() -> None:
            self.uncordon(node)
            then()

        evict()

    def roll(self, nodes: Iterable[str], parallel: int) -> None:
        """Drain these nodes, so many at a time."""
        left = iter(list(nodes))

        def drain_next() -> None:
            node = next(left, None)
            if node is not None:
                self.drain(node, drain_next)

        for _ in range(parallel):
            drain_next()

    # Informers

    def _observe(self) -> None:
        changes = self.cluster.store.caches[VMIS].changes_since(self._seen)
        for change in changes or ():
            self._seen = change.revision
            if change.kind == "DELETED":
                self._vmis.pop(change.key, None)
                continue
            vmi = decode_body(change.body)
            before = self._vmis.get(change.key)
            self._vmis[change.key] = vmi
            vm = self.vms[change.key]
            if objects.phase(vmi) == "Failed" and not vm.stopped and not objects.is_deleting(vmi):
                self.cluster.after(
                    1.0,
                    partial(
                        self.cluster.recreate_vmi, vm.namespace, vm.name, partial(self.start, vm)
                    ),
                )
            is_new = before is None or objects.phase(before) != "Running"
            if is_new and objects.phase(vmi) == "Running" and not vm.migratable:
                self.cluster.after(0.0, partial(self.set_migratable, vm, migratable=False))


def _set_plugging(vmi: Object, *, plugging: bool) -> None:
    if plugging:
        objects.set_condition(vmi, {"type": "HotVCPUChange", "status": "True"})
    else:
        objects.drop_condition(vmi, "HotVCPUChange")


def _set_migratable(vmi: Object, *, migratable: bool) -> None:
    status = "True" if migratable else "False"
    reason = {} if migratable else {"reason": "HostDeviceNotLiveMigratable"}
    objects.set_condition(vmi, {"type": "LiveMigratable", "status": status} | reason)
