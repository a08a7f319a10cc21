"""The target's node loses power during a migration. This test runs last."""

from collections.abc import Callable

import pytest

from tests.e2e.asking import Caller
from tests.e2e.cluster import Cluster, Object
from tests.vms.answers import ask_evacuation, ask_vmi
from tests.vms.kubevirt import SLOW, Machine
from tests.vms.test_failures import until_state


@pytest.mark.timeout(2400)
def test_the_node_of_the_target_is_lost(
    cluster: Cluster,
    caller: Caller,
    machine: Callable[[str], Machine],
    prove: Callable[[str], None],
    quote: Callable[[Object], str],
) -> None:
    """The attempt fails when KubeVirt gives up, and the VM stays.

    The pod on the lost node ends when the Node object is deleted. Only then KubeVirt tries again.
    """
    db = machine("db1")
    db.start("n1", copied=SLOW)
    db.evict()
    db.until_copying()
    db.nodes["n2"].power_off()
    try:
        cluster.kubectl("wait", "--for=condition=Ready=Unknown", "node/n2", "--timeout=300s")
        db.until(lambda: db.state().get("failed"), "given up")
        assert db.get()["status"]["phase"] == "Running"
        assert db.node == "n1"
        # Libvirt's own error: the connection to the target is closed.
        assert quote(db.migrations()[0]) == "libvirt"
        db.until(lambda: ask_evacuation(caller, "db1")["failedAttempts"] == 1, "counted")
        until_state(caller, db, "multiple_active_pods")
    finally:
        cluster.kubectl("delete", "node", "n2")
    until_state(caller, db, "target_unschedulable")
    assert ask_vmi(caller, "db1")["node"] == "n1"
    prove("a lost target: the VM stays, and the next attempt comes once the node is deleted")
