"""`kubectl drain` of a node with five VMs, beside its forecast; and by a user who is held."""

import time
from collections.abc import Callable

import pytest

from exporter.kube.instants import parse_instant
from tests.e2e.asking import Caller
from tests.e2e.cluster import Cluster, Object, wait_for
from tests.e2e.test_webhook import EVICTOR
from tests.vms.kubevirt import PATIENCE, SPACE, Machine
from tests.vms.test_migration import look


COUNT = 5


def forecast(caller: Caller, node: str) -> Object:
    """What a drain of a node would do."""
    status, answer = caller.ask("GET", f"/v1/nodes/{node}")
    assert status == 200, answer
    found: Object = answer
    return found


@pytest.mark.timeout(2400)
def test_a_drain(
    cluster: Cluster,
    caller: Caller,
    machine: Callable[[str], Machine],
    prove: Callable[[str], None],
) -> None:
    """All five leave, as forecast; for a listed user each of them only after its cooldown."""
    five = [machine(f"vm{number}") for number in range(COUNT)]
    for one in five:
        one.start("n2", fill=8)
    wait_for(lambda: forecast(caller, "n2")["leaves"] == COUNT, "the forecast", PATIENCE)
    expected = forecast(caller, "n2")
    assert expected["canBeEmptied"]

    began = time.monotonic()
    drain = ("--ignore-daemonsets", "--delete-emptydir-data", "--timeout=600s")
    cluster.kubectl("drain", "n2", *drain)
    seconds = time.monotonic() - began
    cluster.kubectl("uncordon", "n2")
    assert seconds >= (expected["atLeastSeconds"] or 0)
    for one in five:
        one.until_moved("n2")
        assert [vmim["status"]["phase"] for vmim in one.migrations()] == ["Succeeded"]
        one.until(lambda: len(caller.history(SPACE, one.name)) == 1, "on record")  # noqa: B023
    prove(f"a drain: {COUNT} of {COUNT} VMs left in {seconds:.0f} s, as forecast")

    account = f"--user={EVICTOR}"
    cluster.kubectl("create", "clusterrolebinding", "drain", "--clusterrole=cluster-admin", account)
    before = {one.name: caller.verdict(SPACE, one.name)["notBefore"] for one in five}
    selected = "--pod-selector=kubevirt.io=virt-launcher"
    ended = cluster.try_kubectl("drain", "n1", *drain, selected, f"--as={EVICTOR}")
    cluster.kubectl("uncordon", "n1")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    held = 0
    for one in five:
        one.until_moved("n1")
        requested = min(
            parse_instant(two["metadata"]["creationTimestamp"]) or 0.0
            for two in one.migrations()[1:]
        )
        if before[one.name] is not None:
            held += 1
            assert requested >= (parse_instant(before[one.name]) or 0.0) - 1
            assert f"VMI {SPACE}/{one.name}: cooldown until" in ended.stderr
            assert {two["user"] for two in look(caller, one.name)["heldEvictions"]} <= {EVICTOR}
    assert held
    prove(f"a drain by a listed user: {held} VMs cooled down, none of them moved before its end")
