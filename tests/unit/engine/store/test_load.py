"""Which limit of KubeVirt keeps a VM waiting, and who uses it up."""

import pytest

from exporter.engine.facts.model import MigrationLimits
from exporter.engine.store.load import Limit, Load


CLUSTER = "parallelMigrationsPerCluster"
NODE = "parallelOutboundMigrationsPerNode"
BOTH = ("shop/db1", "shop/db2")


@pytest.mark.parametrize(
    ("load", "limit"),
    [
        pytest.param({"running": 4, "outbound": {"n1": 1}}, None, id="room"),
        pytest.param({"running": 4, "outbound": {"n2": 2}}, None, id="another-node-is-full"),
        pytest.param(
            {"running": 2, "outbound": {"n1": 2}, "movers": {"n1": BOTH}},
            Limit("n1's limit of outbound migrations (2) is reached by shop/db1, shop/db2", NODE),
            id="node",
        ),
        pytest.param(
            {"running": 3, "outbound": {"n1": 3}, "movers": {"n1": (*BOTH, "shop/came-from-n1")}},
            Limit("n1's limit of outbound migrations (2) is reached by shop/db1, shop/db2", NODE),
            id="node-and-a-vm-that-left-it-before",
        ),
        pytest.param(
            {"running": 5, "outbound": {"n1": 1}},
            Limit("the cluster's limit of migrations (5) is reached", CLUSTER),
            id="cluster",
        ),
        pytest.param(
            {"running": 6, "outbound": {}},
            Limit("the cluster's limit of migrations (5) is reached", CLUSTER),
            id="cluster-lowered-meanwhile",
        ),
        pytest.param(
            {"running": 5, "outbound": {"n1": 2}},
            Limit("n1's limit of outbound migrations (2) is reached", NODE),
            id="both",
        ),
    ],
)
def test_the_limit_that_is_reached(load: dict[str, object], limit: Limit | None) -> None:
    """The node's limit is named before the cluster's, because raising the other would not help."""
    limits = MigrationLimits(cluster=5, outbound_per_node=2)
    load_of_node = Load(limits=limits, **load)  # type: ignore[arg-type]

    assert load_of_node.find_limit("n1") == limit
    assert load_of_node.is_full("n1") is (limit is not None)


def test_a_node_that_nothing_leaves_has_all_its_slots() -> None:
    """A node without running migrations is not full, even if its limit is one."""
    load = Load(running=1, outbound={"n2": 1}, limits=MigrationLimits(5, 1))

    assert load.find_limit("n1") is None
    assert load.find_limit("n2") is not None
