"""The target's node without power in the middle of a migration; nothing runs after this."""

from collections.abc import Callable

import pytest

from tests.e2e.asking import Caller
from tests.e2e.cluster import Cluster
from tests.vms.kubevirt import SLOW, Machine
from tests.vms.test_failures import evacuation
from tests.vms.test_migration import look


@pytest.mark.timeout(2400)
def test_the_node_of_the_target_is_lost(
    cluster: Cluster,
    caller: Caller,
    machine: Callable[[str], Machine],
    prove: Callable[[str], None],
) -> None:
    """The attempt fails when KubeVirt gives it up; the VM stays, and no node can take it."""
    db = machine("db1")
    db.start("n1", copied=SLOW)
    db.evict()
    db.until_copying()
    db.nodes["n2"].power_off()
    cluster.kubectl("wait", "--for=condition=Ready=Unknown", "node/n2", "--timeout=300s")
    db.until(lambda: db.state().get("failed"), "given up")
    assert db.get()["status"]["phase"] == "Running"
    assert db.node == "n1"
    db.until(lambda: evacuation(caller, "db1")["failedAttempts"] == 1, "counted")
    states = set[str]()

    def is_unschedulable() -> bool:
        states.add(evacuation(caller, "db1")["state"])
        return "target_unschedulable" in states

    db.until(is_unschedulable, "the next attempt, for which there is no node")
    assert look(caller, "db1")["node"] == "n1"
    prove(f"a lost target: the VM stays; states until the next attempt: {sorted(states)}")
