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
    """The attempt fails when KubeVirt gives it up, and the VM stays.

    The pod on the lost node ends only with the Node object, and only then comes the next attempt.
    """
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
    reached(db, caller, "multiple_active_pods")
    cluster.kubectl("delete", "node", "n2")
    reached(db, caller, "target_unschedulable")
    assert look(caller, "db1")["node"] == "n1"
    prove("a lost target: the VM stays, and the next attempt comes once the node is deleted")


def reached(machine: Machine, caller: Caller, state: str) -> None:
    """Wait until the exporter says that a VM's evacuation is in a state."""
    machine.until(lambda: evacuation(caller, machine.name).get("state") == state, state)
