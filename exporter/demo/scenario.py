"""The population of the demo, and who plays which part: the same for the same seed.

Each VM is named after its part, so that a reader of the status page knows what to expect of it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from exporter.demo import node, objects
from exporter.demo.cluster import Cluster, Fate
from exporter.demo.objects import Object
from exporter.demo.store import KUBEVIRTS, NAMESPACES, NODES


class Part(StrEnum):
    """What a VM is there to show."""

    CHURN = "churn"
    """Hot: the descheduler wants to move it again and again, and an operator does too."""
    QUEUED = "queued"
    """Drained together with its like, so that the limits let some of them wait Pending."""
    SLOW = "slow"
    """Migrates for long."""
    FAILING = "failing"
    """Fails after its start and is retried for ever, with KubeVirt's backoff between."""
    UNSCHEDULABLE = "unschedulable"
    """Its target pod finds no node: fails before hand-off, for ever."""
    FLAKY = "flaky"
    """Loses its target, then fails, then succeeds."""
    EXTERNAL = "external"
    """Marked for somebody else to act, who never does."""
    PINNED = "pinned"
    """Became not migratable just after its evacuation had been asked for."""
    RECREATED = "recreated"
    """Moved, then deleted and created again under the same name."""
    STEADY = "steady"
    """Never moves."""


CAST = (
    *(Part.CHURN, Part.FAILING, Part.QUEUED, Part.QUEUED, Part.UNSCHEDULABLE, Part.EXTERNAL),
    *(Part.SLOW, Part.CHURN, Part.RECREATED, Part.PINNED, Part.FLAKY, Part.STEADY),
    *(Part.QUEUED, Part.CHURN, Part.CHURN, Part.QUEUED, Part.FAILING, Part.STEADY),
    *(Part.CHURN, Part.QUEUED, Part.SLOW, Part.CHURN, Part.STEADY, Part.STEADY),
)
"""The parts of the first VMs, the most telling ones first; further VMs churn or stay."""
FURTHER = (Part.STEADY, Part.STEADY, Part.STEADY, Part.CHURN)
NAMESPACE_NAMES = ("shop", "bank", "lab")

FIRST_MOVE_SECONDS = 6.0
DRAIN_SECONDS = 75.0
"""How often the queued VMs are drained, and on to the next node."""
REPEAT_SECONDS = {
    Part.CHURN: 90.0,
    Part.SLOW: 200.0,
    Part.FLAKY: 90.0,
    Part.RECREATED: 30.0,
}
"""How often an operator evicts a VM of this part, whatever the descheduler does."""
RECREATE_SECONDS = 70.0
COPYING_SECONDS = {
    Part.CHURN: (3.0, 6.0),
    Part.QUEUED: (8.0, 12.0),
    Part.SLOW: (45.0, 80.0),
    Part.FAILING: (4.0, 6.0),
    Part.RECREATED: (4.0, 8.0),
}
BROKEN = (
    "virError(Code=9, Domain=10, "
    "Message='operation failed: migration out job: unexpectedly failed')"
)
FLAKY_FATES = (Fate("loses target"), Fate("fails", 5.0, BROKEN), Fate("succeeds", 6.0))


@dataclass(frozen=True, slots=True)
class Vm:
    """One VM of the population."""

    namespace: str
    name: str
    part: Part
    load: float
    """Its mean load, in cores."""
    swing: float
    """How far the load swings about its mean."""
    period: float
    """Seconds of one swing at speed 1."""
    shift: float


def cast_vms(seed: int, vms: int) -> list[Vm]:
    """The population of a seed."""
    chance = random.Random(f"population {seed}")
    numbers: dict[Part, int] = {}
    cast = []
    for position in range(vms):
        part = (
            CAST[position]
            if position < len(CAST)
            else FURTHER[(position - len(CAST)) % len(FURTHER)]
        )
        numbers[part] = numbers.get(part, 0) + 1
        is_hot = part is Part.CHURN
        cast.append(
            Vm(
                namespace=NAMESPACE_NAMES[chance.randrange(len(NAMESPACE_NAMES))],
                name=f"{part}-{numbers[part]}",
                part=part,
                load=chance.uniform(2.0, 4.0) if is_hot else chance.uniform(0.3, 1.0),
                swing=0.6 if is_hot else 0.2,
                period=chance.uniform(60.0, 150.0),
                shift=chance.uniform(0.0, math.tau),
            )
        )
    return cast


class Scenario:
    """Creates the population in a cluster, and decides there what befalls it."""

    def __init__(self, seed: int = 1, vms: int = 24) -> None:
        self.vms = cast_vms(seed, vms)
        self._by_key = {f"{vm.namespace}/{vm.name}": vm for vm in self.vms}
        self._chance = random.Random(f"events {seed}")
        self._next_node = 0

    # What the cluster asks

    def fate(self, vmi: Object, attempt: int) -> Fate:
        """What becomes of a VM's migration: it depends on its part."""
        match self._part(vmi):
            case Part.UNSCHEDULABLE:
                return Fate("unschedulable")
            case Part.FLAKY:
                return FLAKY_FATES[attempt % len(FLAKY_FATES)]
            case part:
                shortest, longest = COPYING_SECONDS.get(part, (5.0, 10.0))
                copying = self._chance.uniform(shortest, longest)
                if part is Part.FAILING:
                    return Fate("fails", copying, BROKEN)
                return Fate("succeeds", copying)

    def choose_node(self, vmi: Object, free: Sequence[str]) -> str:
        """Anywhere that is free; the queued ones together."""
        if self._part(vmi) is Part.QUEUED:
            # They stay together, so that they leave one node together.
            return free[self._next_node % len(free)]
        return self._chance.choice(list(free))

    def _part(self, vmi: Object) -> Part:
        vm = self._by_key.get(objects.key(vmi))
        return Part.STEADY if vm is None else vm.part

    def load(self, vm: Vm, seconds: float) -> float:
        """A VM's load so many seconds (at speed 1) after the start."""
        return vm.load * (1 + vm.swing * math.sin(math.tau * seconds / vm.period + vm.shift))

    # What it does to the cluster

    def populate(self, cluster: Cluster) -> None:
        """Create all that is in the cluster, and plan what befalls it."""
        for name in ("kubevirt", "default", *NAMESPACE_NAMES):
            cluster.store.create(NAMESPACES, objects.build_namespace(name))
        for name in cluster.nodes:
            cluster.store.create(NODES, objects.build_node(name))
        cluster.store.create(KUBEVIRTS, objects.build_kubevirt())
        for vm in self.vms:
            self._create(cluster, vm)
            self._direct(cluster, vm)
        if any(vm.part is Part.QUEUED for vm in self.vms):
            self._every(cluster, FIRST_MOVE_SECONDS, DRAIN_SECONDS, lambda: self._drain(cluster))

    def _create(self, cluster: Cluster, vm: Vm) -> None:
        strategy = "External" if vm.part is Part.EXTERNAL else "LiveMigrate"
        notes = {objects.PREFER_NO_EVICTION: "true"} if vm.part is Part.STEADY else {}
        cluster.create_vmi(
            objects.build_vmi(vm.namespace, vm.name, strategy=strategy, annotations=notes)
        )

    def _direct(self, cluster: Cluster, vm: Vm) -> None:
        """Plan what happens to one VM apart from the descheduler."""
        first = FIRST_MOVE_SECONDS + self._chance.uniform(0.0, 4.0)
        match vm.part:
            case Part.CHURN | Part.SLOW | Part.FLAKY | Part.RECREATED:
                # Spread over one interval, so that something is always going on.
                first += self._chance.uniform(0.0, REPEAT_SECONDS[vm.part] / 2)
                self._every(
                    cluster, first, REPEAT_SECONDS[vm.part], lambda: self._evict(cluster, vm)
                )
            case Part.FAILING | Part.UNSCHEDULABLE | Part.EXTERNAL:
                by_descheduler = vm.name.endswith("-1")
                cluster.after(first, lambda: self._evict(cluster, vm, descheduler=by_descheduler))
            case Part.PINNED:
                cluster.after(first, lambda: self._pin(cluster, vm))
            case Part.QUEUED | Part.STEADY:
                pass
        if vm.part is Part.RECREATED:
            self._every(
                cluster, RECREATE_SECONDS, RECREATE_SECONDS, lambda: self._recreate(cluster, vm)
            )

    def _every(
        self, cluster: Cluster, first: float, interval: float, action: Callable[[], object]
    ) -> None:
        """Do something for ever, at intervals that vary by a fifth."""

        def again() -> None:
            action()
            cluster.after(interval * self._chance.uniform(0.8, 1.2), again)

        cluster.after(first, again)

    def _evict(self, cluster: Cluster, vm: Vm, *, descheduler: bool = False) -> None:
        cluster.evict_vmi(vm.namespace, vm.name, descheduler=descheduler)

    def _drain(self, cluster: Cluster) -> None:
        self._next_node += 1
        for vm in self.vms:
            if vm.part is Part.QUEUED:
                self._evict(cluster, vm)

    def _pin(self, cluster: Cluster, vm: Vm) -> None:
        self._evict(cluster, vm, descheduler=True)
        cluster.change_vmi(
            vm.namespace, vm.name, lambda vmi: node.set_migratable(vmi, migratable=False)
        )

    def _recreate(self, cluster: Cluster, vm: Vm) -> None:
        cluster.delete_vmi(vm.namespace, vm.name)
        self._create_when_gone(cluster, vm)

    def _create_when_gone(self, cluster: Cluster, vm: Vm) -> None:
        def look() -> None:
            if cluster.vmi(vm.namespace, vm.name) is None:
                self._create(cluster, vm)
            else:
                self._create_when_gone(cluster, vm)

        cluster.after(1.0, look)


def node_loads(
    scenario: Scenario, cluster: Cluster, start: datetime, now: datetime
) -> dict[str, float]:
    """The load of each node: the sum over the VMs that run there."""
    seconds = (now - start).total_seconds() * cluster.pace.speed
    loads = dict.fromkeys(cluster.nodes, 0.0)
    for vm in scenario.vms:
        vmi = cluster.vmi(vm.namespace, vm.name)
        where = "" if vmi is None else vmi["status"].get("nodeName", "")
        if where in loads:
            loads[where] += scenario.load(vm, seconds)
    return loads
