"""The demo's VMs and what happens to each: the same for the same seed.

Each VM is named after its role, so that a reader of the status page knows what the VM demonstrates.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from functools import partial

from exporter.demo import node, objects
from exporter.demo.cluster import Cluster
from exporter.demo.objects import Object
from exporter.demo.plan import Fate
from exporter.demo.store import BUDGETS


class Role(StrEnum):
    """What happens to a VM in the demo."""

    CHURN = "churn"
    """Under high load: two deschedulers evict it again and again, and one of them does not ask."""
    QUEUED = "queued"
    """All VMs of this role are drained together, so some migrations wait for a free slot."""
    SLOW = "slow"
    """Its migrations take long."""
    FAILING = "failing"
    """Its migrations fail after their start, and KubeVirt retries them with backoff.

    The second such VM is on a node that is drained and then uncordoned: its evacuation continues.
    """
    UNSCHEDULABLE = "unschedulable"
    """Its target pods are unschedulable, so its migrations fail before hand-off."""
    FLAKY = "flaky"
    """Its first migration loses its target, the next one fails, and the third one succeeds."""
    EXTERNAL = "external"
    """It has the strategy External, and nobody reacts to its eviction."""
    PINNED = "pinned"
    """It becomes non-migratable just after its eviction."""
    RECREATED = "recreated"
    """It is migrated, and then recreated with the same name."""
    GUARDED = "guarded"
    """It has the strategy None, but a PodDisruptionBudget forbids its eviction, so it stays."""
    STEADY = "steady"
    """It is never migrated."""


ROLES = (
    *(Role.CHURN, Role.FAILING, Role.QUEUED, Role.QUEUED, Role.UNSCHEDULABLE, Role.EXTERNAL),
    *(Role.SLOW, Role.CHURN, Role.RECREATED, Role.PINNED, Role.FLAKY, Role.STEADY),
    *(Role.QUEUED, Role.CHURN, Role.CHURN, Role.QUEUED, Role.FAILING, Role.STEADY),
    *(Role.CHURN, Role.QUEUED, Role.SLOW, Role.CHURN, Role.GUARDED, Role.STEADY),
)
"""The roles of the first VMs, the most interesting first."""
FURTHER_ROLES = (Role.STEADY, Role.STEADY, Role.STEADY, Role.CHURN)
"""The roles of further VMs, in turn."""
STRATEGIES = {Role.EXTERNAL: "External", Role.GUARDED: "None"}
"""The evictionStrategy by role; VMs of all other roles have LiveMigrate."""
BUSY_VMS = 200
"""All later VMs are steady, because more migrations would only wait due to KubeVirt's limits."""
NAMESPACE_NAMES = ("shop", "bank", "lab")

FIRST_MOVE_SECONDS = 6.0
DRAIN_SECONDS = 75.0
"""How often the queued VMs are drained."""
CORDON_SECONDS = 50.0
"""How long a drain keeps their node cordoned."""
REPEAT_SECONDS = {
    Role.CHURN: 90.0,
    Role.SLOW: 200.0,
    Role.FLAKY: 90.0,
    Role.RECREATED: 30.0,
}
"""How often a descheduler that does not ask the exporter evicts a VM of this role."""
RECREATE_SECONDS = 70.0
COPYING_SECONDS = {
    Role.CHURN: (3.0, 6.0),
    Role.QUEUED: (8.0, 12.0),
    Role.SLOW: (45.0, 80.0),
    Role.FAILING: (4.0, 6.0),
    Role.RECREATED: (4.0, 8.0),
}
BROKEN = (
    "virError(Code=9, Domain=10, "
    "Message='operation failed: migration out job: unexpectedly failed')"
)
FLAKY_FATES = (Fate("loses target"), Fate("fails", 5.0, BROKEN), Fate("succeeds", 6.0))


@dataclass(frozen=True, slots=True)
class Vm:
    """One VM of the demo."""

    namespace: str
    name: str
    role: Role
    load: float
    """Its mean load, in cores."""
    swing: float
    """How far the load swings about its mean."""
    period: float
    """Seconds of one swing at speed 1."""
    shift: float


def make_vms(seed: int, vms: int) -> list[Vm]:
    """The VMs of a seed."""
    chance = random.Random(f"population {seed}")
    numbers: dict[Role, int] = {}
    made = []
    for position in range(vms):
        role = _choose_role(position)
        numbers[role] = numbers.get(role, 0) + 1
        is_hot = role is Role.CHURN
        made.append(
            Vm(
                namespace=NAMESPACE_NAMES[chance.randrange(len(NAMESPACE_NAMES))],
                name=f"{role}-{numbers[role]}",
                role=role,
                load=chance.uniform(2.0, 4.0) if is_hot else chance.uniform(0.3, 1.0),
                swing=0.6 if is_hot else 0.2,
                period=chance.uniform(60.0, 150.0),
                shift=chance.uniform(0.0, math.tau),
            )
        )
    return made


def _choose_role(position: int) -> Role:
    if position < len(ROLES):
        return ROLES[position]
    if position >= BUSY_VMS:
        return Role.STEADY
    return FURTHER_ROLES[(position - len(ROLES)) % len(FURTHER_ROLES)]


class Scenario:
    """Creates the VMs in a cluster, and decides what happens to them."""

    def __init__(self, seed: int = 1, vms: int = 24) -> None:
        self.vms = make_vms(seed, vms)
        self._by_key = {f"{vm.namespace}/{vm.name}": vm for vm in self.vms}
        self._chance = random.Random(f"events {seed}")
        self._next_node = 0

    # The cluster's plan

    def fate(self, vmi: Object, attempt: int) -> Fate:
        """How a VM's migration ends, which depends on the VM's role."""
        match self._role(vmi):
            case Role.UNSCHEDULABLE:
                return Fate("unschedulable")
            case Role.FLAKY:
                return FLAKY_FATES[attempt % len(FLAKY_FATES)]
            case role:
                shortest, longest = COPYING_SECONDS.get(role, (5.0, 10.0))
                copying = self._chance.uniform(shortest, longest)
                if role is Role.FAILING:
                    return Fate("fails", copying, BROKEN)
                return Fate("succeeds", copying, pauses=role is Role.SLOW)

    def choose_node(self, vmi: Object, free: Sequence[str]) -> str:
        """Choose any free node, but the same one for all queued VMs."""
        if self._role(vmi) is Role.QUEUED:
            # They stay together, so that a drain moves them together.
            return free[self._next_node % len(free)]
        return self._chance.choice(list(free))

    def _role(self, vmi: Object) -> Role:
        vm = self._by_key.get(objects.key(vmi))
        return Role.STEADY if vm is None else vm.role

    def load(self, vm: Vm, seconds: float) -> float:
        """A VM's load, `seconds` after the start of the simulation at speed 1."""
        return vm.load * (1 + vm.swing * math.sin(math.tau * seconds / vm.period + vm.shift))

    # What happens in the cluster

    def populate(self, cluster: Cluster) -> Iterator[None]:
        """Create everything in the cluster and queue what happens; yields after each VM."""
        cluster.set_up("kubevirt", "default", *NAMESPACE_NAMES)
        for vm in self.vms:
            self._create(cluster, vm)
            self._queue_events(cluster, vm)
            yield
        queued = [vm for vm in self.vms if vm.role is Role.QUEUED]
        if queued:
            self._every(
                cluster, FIRST_MOVE_SECONDS, DRAIN_SECONDS, lambda: self._drain(cluster, queued)
            )

    def _create(self, cluster: Cluster, vm: Vm) -> None:
        strategy = STRATEGIES.get(vm.role, "LiveMigrate")
        is_still = vm.role in (Role.STEADY, Role.GUARDED)
        notes = {objects.PREFER_NO_EVICTION: "true"} if is_still else {}
        if vm.role is Role.GUARDED:
            cluster.store.create(BUDGETS, objects.build_budget(vm.namespace, vm.name))
        cluster.create_vmi(
            objects.build_vmi(vm.namespace, vm.name, strategy=strategy, annotations=notes)
        )

    def _queue_events(self, cluster: Cluster, vm: Vm) -> None:
        """Queue what happens to a VM besides the descheduler's evictions."""
        first = FIRST_MOVE_SECONDS + self._chance.uniform(0.0, 4.0)
        match vm.role:
            case Role.CHURN | Role.SLOW | Role.FLAKY | Role.RECREATED:
                # Spread over an interval, so that some VM is always migrating.
                first += self._chance.uniform(0.0, REPEAT_SECONDS[vm.role] / 2)
                self._every(
                    cluster,
                    first,
                    REPEAT_SECONDS[vm.role],
                    lambda: self._evict(cluster, vm, descheduler=True),
                )
            case Role.FAILING if vm.name.endswith("-2"):
                cluster.after(first, lambda: self._drain(cluster, [vm]))
            case Role.FAILING | Role.UNSCHEDULABLE | Role.EXTERNAL:
                by_descheduler = vm.name.endswith("-1")
                cluster.after(first, lambda: self._evict(cluster, vm, descheduler=by_descheduler))
            case Role.PINNED:
                cluster.after(first, lambda: self._pin(cluster, vm))
            case Role.QUEUED | Role.GUARDED | Role.STEADY:
                pass
        if vm.role is Role.RECREATED:
            self._every(
                cluster, RECREATE_SECONDS, RECREATE_SECONDS, lambda: self._recreate(cluster, vm)
            )

    def _every(
        self, cluster: Cluster, first: float, interval: float, action: Callable[[], object]
    ) -> None:
        """Repeat an action, at intervals that vary by 20 %."""

        def again() -> None:
            action()
            cluster.after(interval * self._chance.uniform(0.8, 1.2), again)

        cluster.after(first, again)

    def _evict(self, cluster: Cluster, vm: Vm, *, descheduler: bool = False) -> None:
        cluster.evict_vmi(vm.namespace, vm.name, descheduler=descheduler)

    def _drain(self, cluster: Cluster, vms: list[Vm]) -> None:
        """Cordon the nodes of these VMs, evict the VMs, and uncordon the nodes later."""
        self._next_node += 1
        vmis = (cluster.vmi(vm.namespace, vm.name) for vm in vms)
        nodes = {vmi["status"].get("nodeName") or "" for vmi in vmis if vmi is not None}
        for name in sorted(nodes - {""}):
            if cluster.cordon(name):
                cluster.after(CORDON_SECONDS, partial(cluster.uncordon, name))
        for vm in vms:
            self._evict(cluster, vm)

    def _pin(self, cluster: Cluster, vm: Vm) -> None:
        self._evict(cluster, vm, descheduler=True)
        cluster.change_vmi(
            vm.namespace, vm.name, lambda vmi: node.set_migratable(vmi, migratable=False)
        )

    def _recreate(self, cluster: Cluster, vm: Vm) -> None:
        cluster.recreate_vmi(vm.namespace, vm.name, lambda: self._create(cluster, vm))


def node_loads(
    scenario: Scenario, cluster: Cluster, start: datetime, now: datetime
) -> dict[str, float]:
    """The load of each node: the sum over its VMs."""
    seconds = (now - start).total_seconds() * cluster.pace.speed
    loads = dict.fromkeys(cluster.nodes, 0.0)
    for vm in scenario.vms:
        vmi = cluster.vmi(vm.namespace, vm.name)
        where = "" if vmi is None else vmi["status"].get("nodeName", "")
        if where in loads:
            loads[where] += scenario.load(vm, seconds)
    return loads
