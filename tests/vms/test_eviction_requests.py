"""A drain by EvictionRequests, with Kubernetes' controllers, KubeVirt and VMs."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

import pytest

from exporter.demo.objects import parse_time
from tests.cluster.eviction_requests import (
    NEEDS_CONTROLLERS,
    build_request,
    condition_of,
    message_of,
    state_of,
)
from tests.e2e.asking import Caller
from tests.e2e.cluster import Cluster, Object, wait_for
from tests.vms.answers import ask_node, ask_vmi
from tests.vms.kubevirt import PATIENCE, SPACE, Machine


pytestmark = NEEDS_CONTROLLERS

COUNT = 5
MOVED = 2
"""How many of the VMs have just been moved, so that they cool down."""
DRAIN = "example.com/drain"
COOLING = "may not be moved now: it is cooling down"
RESPONDER = "kubevirt-eviction-exporter.io/cooldown"


@dataclass(frozen=True)
class Asked:
    """A VM, and the pod whose eviction is asked for."""

    vm: Machine
    pod: Object

    @property
    def eviction(self) -> Object:
        """The Eviction of the pod; without a status if there is none yet."""
        evictions = self.vm.cluster.get("-n", SPACE, "evictions.lifecycle.k8s.io")["items"]
        uid = self.pod["metadata"]["uid"]
        mine = (entry for entry in evictions if entry["spec"]["target"]["pod"]["uid"] == uid)
        return next(mine, {"status": {}})

    @property
    def message(self) -> str:
        """What our responder wrote last."""
        return message_of(self.eviction, RESPONDER)

    def until_evicted(self) -> None:
        """Wait until the VM has left n2, and Kubernetes and our responder know it."""
        self.vm.until_moved("n2")
        self.vm.until(lambda: state_of(self.eviction, RESPONDER) == "Completed", "completed")
        assert condition_of(self.eviction, "TargetEvicted") == ("True", "PodTerminal")

    def asked_at(self) -> datetime:
        """When KubeVirt made the first migration away from n2, the second one of the VM."""
        return parse_time(self.vm.migrations()[1]["metadata"]["creationTimestamp"])


def ask(machine: Machine) -> Asked:
    """Ask for the eviction of a VM's pod."""
    pod = machine.cluster.get("-n", SPACE, "pod", machine.launcher())
    assert pod["spec"]["evictionResponders"] == [{"name": RESPONDER, "priority": 20000}]
    request = json.dumps(build_request(pod, DRAIN))
    machine.cluster.kubectl("create", "-f", "-", given=request)
    return Asked(machine, pod)


@pytest.mark.timeout(2400)
def test_a_drain(
    cluster: Cluster,
    caller: Caller,
    machine: Callable[[str], Machine],
    prove: Callable[[str], None],
) -> None:
    """All five are asked for; two are held until their cooldown is over; then all have left."""
    machines = [machine(f"vm{number}") for number in range(COUNT)]
    moved, others = machines[:MOVED], machines[MOVED:]
    for vm in machines:
        vm.start("n1" if vm in moved else "n2", fill=8)
    for vm in moved:
        vm.migrate()
    for vm in moved:
        vm.until_moved("n1")

    cluster.kubectl("cordon", "n2")
    held, messages, ends = [], [], []
    for vm in moved:
        held.append(asked := ask(vm))
        messages.append(wait_for(lambda: asked.message, "held", PATIENCE))
        cooldown = ask_vmi(caller, vm.name)["cooldown"] or {}
        ends.append(datetime.fromisoformat(cooldown["notBefore"]))
    free = [ask(vm) for vm in others]

    def find_drain() -> Object | None:
        drain: Object | None = ask_node(caller, "n2")["drain"]
        return drain if drain and drain["asked"] == COUNT else None

    drain = wait_for(find_drain, "all asked for", PATIENCE) or {}
    shown = cluster.kubectl("-n", SPACE, "get", "evictions.lifecycle.k8s.io", "-o", "wide")
    for asked in (*free, *held):
        asked.until_evicted()
    late = [(asked.asked_at() - end).total_seconds() for asked, end in zip(held, ends, strict=True)]
    wait_for(lambda: caller.ask("GET", "/v1/nodes/n2")[0] == 404, "no VM on n2", PATIENCE)
    cluster.kubectl("uncordon", "n2")

    assert drain["requestedBy"]["user"] == DRAIN
    assert min(late) >= -1, late
    prove(
        f"a drain by EvictionRequests of {DRAIN}: {COUNT} asked, {MOVED} held and evicted"
        f" {', '.join(f'{seconds:.0f} s' for seconds in late)} after their cooldowns, all left."
        f" Meanwhile of n2: {drain['asked']} asked, {drain['left']} left,"
        f" {drain['remaining']} remaining:\n{shown}"
    )
