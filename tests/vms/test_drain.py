"""Drains of a real node: forecast, progress, budgets, External VMs."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from exporter.engine.facts.model import DRAIN_TAINT
from exporter.kube.objects.instants import parse_instant
from tests.cluster.kubevirt import DESCHEDULER
from tests.conftest import SOAK
from tests.e2e.asking import Caller
from tests.e2e.cluster import Cluster, Object, wait_for
from tests.e2e.test_webhook import EVICTOR
from tests.vms.answers import ask_evacuation, ask_node, ask_vmi
from tests.vms.kubevirt import PATIENCE, SLOW, SPACE, Machine


COUNT = 5
REBALANCED = 2
"""How many of the VMs a descheduler moves before the drain."""
MINUTES = 10 if SOAK else 0
"""How long it moves them; at 0 each moves away and back once."""


def progress(caller: Caller, **least: int) -> Object:
    """The answer about the node n2; empty until its drain has at least these counts."""
    status, answer = caller.ask("GET", "/v1/nodes/n2")
    document: Object = answer
    drain = document["drain"] if status == 200 else None
    is_there = drain and all(drain[name] >= count for name, count in least.items())
    return document if is_there else {}


@pytest.mark.timeout(2400 + 60 * MINUTES)
def test_a_drain(
    cluster: Cluster,
    caller: Caller,
    machine: Callable[[str], Machine],
    prove: Callable[[str], None],
) -> None:
    """All five VMs leave as forecast; if a listed user drains, VMs leave after their cooldowns.

    Before the drain a descheduler moves two of the VMs away and back: no drain counts these moves.
    """
    five = [machine(f"vm{number}") for number in range(COUNT)]
    for vm in five:
        vm.start("n2", fill=8)
    rebalanced, others = five[:REBALANCED], five[REBALANCED:]
    departures = move_away_and_back(rebalanced)
    wait_for(lambda: ask_node(caller, "n2")["leaves"] == COUNT, "the forecast", PATIENCE)
    expected = ask_node(caller, "n2")
    assert expected["canBeEmptied"]
    assert expected["drain"] is None

    began = time.monotonic()
    drain = ("--ignore-daemonsets", "--delete-emptydir-data", "--timeout=600s")
    with ThreadPoolExecutor(1) as pool:
        draining = pool.submit(cluster.kubectl, "drain", "n2", *drain)
        asked = wait_for(lambda: progress(caller, asked=COUNT), "all asked to leave", PATIENCE)
        paced = wait_for(lambda: progress(caller, left=3), "three have left", PATIENCE)
        estimated_at = time.monotonic() - began
        draining.result()
    seconds = time.monotonic() - began
    now = paced["drain"]
    assert asked["schedulable"] is False
    assert now["asked"] == now["left"] + now["remaining"] == COUNT
    assert estimated_at + now["estimateSeconds"] < 3 * seconds
    cluster.kubectl("uncordon", "n2")
    assert seconds >= (expected["atLeastSeconds"] or 0)
    for vm in five:
        vm.until_moved("n2")
        assert {vmim["status"]["phase"] for vmim in vm.migrations()} == {"Succeeded"}
    for other in others:
        other.until(lambda: len(caller.history(SPACE, other.name)) == 1, "on record")  # noqa: B023
    prove(
        f"a drain after {departures} departures by a descheduler: {COUNT} of {COUNT} VMs left in"
        f" {seconds:.0f} s, as forecast; after {estimated_at:.0f} s: asked {now['asked']}, left"
        f" {now['left']}, remaining {now['remaining']}, one every {now['secondsPerVmi']:.0f} s,"
        f" {now['estimateSeconds']:.0f} s to go"
    )

    account = f"--user={EVICTOR}"
    cluster.kubectl("create", "clusterrolebinding", "drain", "--clusterrole=cluster-admin", account)
    before = {other.name: caller.verdict(SPACE, other.name)["notBefore"] for other in others}
    # The cooldowns of the VMs that were rebalanced for long are too long to wait for.
    left_out = ",".join(vm.name for vm in rebalanced)
    selected = f"--pod-selector=kubevirt.io=virt-launcher,vm notin ({left_out})"
    ended = cluster.try_kubectl("drain", "n1", *drain, selected, f"--as={EVICTOR}")
    cluster.kubectl("uncordon", "n1")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    held = 0
    for other in others:
        other.until_moved("n1")
        requested = min(
            parse_instant(two["metadata"]["creationTimestamp"]) or 0.0
            for two in other.migrations()[1:]
        )
        if before[other.name] is not None:
            held += 1
            assert requested >= (parse_instant(before[other.name]) or 0.0) - 1
            assert f"VMI {SPACE}/{other.name}: cooldown until" in ended.stderr
            assert {two["user"] for two in ask_vmi(caller, other.name)["blockedEvictions"]} <= {
                EVICTOR
            }
    assert held
    prove(f"a drain by a listed user: {held} VMs cooled down, none of them moved before its end")


def move_away_and_back(machines: Sequence[Machine]) -> int:
    """Evict VMs of n2 as a descheduler does, until they are back; returns how often one left n2."""
    ends, departures = time.monotonic() + MINUTES * 60, 0
    while departures == 0 or time.monotonic() < ends:
        for source in ("n2", "n1"):
            left = [(machine, machine.pods()[0]) for machine in machines]
            for machine in machines:
                assert "Eviction triggered evacuation" in machine.evict(annotations=DESCHEDULER)
            for vm, pod in left:
                vm.until_moved(source)
                vm.until_unmounted(source, pod)
        departures += len(machines)
    return departures


def test_a_drain_by_taint(
    cluster: Cluster,
    caller: Caller,
    machine: Callable[[str], Machine],
    prove: Callable[[str], None],
) -> None:
    """KubeVirt's drain taint is a drain from the start to the last VM, without an eviction."""
    two = [machine(f"vm{number}") for number in range(2)]
    for vm in two:
        vm.start("n2", copied=SLOW)
    wait_for(lambda: ask_node(caller, "n2")["leaves"] == len(two), "the forecast", PATIENCE)
    cluster.kubectl("taint", "nodes", "n2", f"{DRAIN_TAINT}=draining:NoSchedule")
    try:
        wait_for(lambda: progress(caller, asked=len(two)), "both asked to leave", PATIENCE)
        now = [ask_evacuation(caller, vm.name) for vm in two]
        assert [(row["requestedThrough"], row["cancel"]) for row in now] == [("taint", None)] * 2
        assert not [vm for vm in two if "evacuationNodeName" in vm.get()["status"]]
        for vm in two:
            vm.until_copying()
            vm.label(copied="fast")
        for vm in two:
            vm.until_moved("n2")
        wait_for(lambda: caller.ask("GET", "/v1/nodes/n2")[0] == 404, "no VM on n2", PATIENCE)
    finally:
        cluster.kubectl("taint", "nodes", "n2", f"{DRAIN_TAINT}-")
    for vm in two:
        vm.until(lambda: not ask_evacuation(caller, vm.name), "over")  # noqa: B023
        (moved,) = ask_vmi(caller, vm.name)["migrations"]
        assert (moved["sourceNode"], moved["targetNode"], moved["trigger"]) == (
            "n2",
            "n1",
            "evacuation",
        )
    prove(f"a drain by {DRAIN_TAINT}: {len(two)} of {len(two)} VMs left without an eviction")


def test_a_budget_of_zero(
    cluster: Cluster,
    caller: Caller,
    machine: Callable[[str], Machine],
    prove: Callable[[str], None],
) -> None:
    """With a budget of 0 a VM that would restart stays, and a VM that KubeVirt migrates leaves."""
    restarts, leaves = machine("restarts"), machine("leaves")
    restarts.start("n2", strategy="None")
    leaves.start("n2")
    for vm in (restarts, leaves):
        chosen = {"minAvailable": 1, "selector": {"matchLabels": {"vm": vm.name}}}
        metadata = {"name": vm.name, "namespace": SPACE}
        budget = {"kind": "PodDisruptionBudget", "metadata": metadata, "spec": chosen}
        cluster.apply([{"apiVersion": "policy/v1", **budget}])
    try:
        node = wait_for(lambda: counted(caller, stays=1, leaves=1), "the forecast", PATIENCE)
        assert not node["canBeEmptied"]
        (stays,) = (row for row in node["candidates"] if row["outcome"] == "stays")
        assert stays["name"] == "restarts"
        assert stays["cause"]["source"] == "PodDisruptionBudget"
        output = restarts.evict()
        assert "violate the pod's disruption budget" in output
        assert "Eviction triggered evacuation" in leaves.evict()
        leaves.until_moved("n2")
    finally:
        cluster.kubectl("-n", SPACE, "delete", "poddisruptionbudgets", "--all")
    prove("a budget of 0: the VM that would restart stays, the other one is migrated")


def counted(caller: Caller, **counts: int) -> Object:
    """The forecast of the node n2; empty until it has these counts."""
    node = ask_node(caller, "n2")
    return node if all(node[name] == count for name, count in counts.items()) else {}


@pytest.mark.timeout(1200)
def test_an_external_vm_that_somebody_moves(
    caller: Caller, machine: Callable[[str], Machine], prove: Callable[[str], None]
) -> None:
    """Migrations of an External VM are attempts of its evacuation: two fail, one succeeds."""
    db = machine("db1")
    db.start("n1", copied=SLOW, strategy="External")
    db.evict()
    states = []
    for failed in (1, 2):
        vmim = db.migrate()
        db.until_copying()
        states.append(ask_evacuation(caller, "db1")["state"])
        db.kill_qemu("n2")
        assert db.until_ended(vmim)["status"]["phase"] == "Failed"
        db.until(lambda: ask_evacuation(caller, "db1")["failedAttempts"] == failed, "counted")  # noqa: B023
        db.until(lambda: ask_evacuation(caller, "db1")["state"] == "external", "waits for others")
        db.until(lambda: len(db.pods()) == 1, "one pod")
    db.label(copied="fast")
    db.migrate()
    db.until_moved("n1")
    db.until(lambda: not ask_evacuation(caller, "db1"), "over")
    assert states == ["migrating", "migrating"]
    prove("an External VM moved by plain migrations: two fail and count, the third ends it")
