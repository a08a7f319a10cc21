"""A node is lost: the other replica answers, and the lost replica is replaced."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.asking import Load, let_in
from tests.e2e.cluster import ONLY_FULL, Cluster, wait_for
from tests.e2e.node import Node, joined
from tests.generate.manifests import NAMESPACE


pytestmark = ONLY_FULL


@pytest.fixture
def second(cluster: Cluster) -> Iterator[Node]:
    """A second node, Ready."""
    with joined(cluster.node, cluster.directory) as node:
        cluster.wait_for_node(node.name)
        yield node


@pytest.mark.timeout(600)
def test_a_node_that_goes(
    cluster: Cluster, second: Node, scratch: Path, prove: Callable[[str], None]
) -> None:
    """When one of two nodes is lost, no answer is wrong, and the history is kept."""
    with let_in(cluster, scratch) as (_, caller):
        assert {pod["spec"]["nodeName"] for pod in cluster.pods()} == {"n1", second.name}
        before = wait_for(lambda: caller.history("shop", "db1"), "history")

        with Load(caller, "shop", "db1") as load:
            second.power_off()
            lost = f"node/{second.name}"
            cluster.kubectl("wait", "--for=condition=Ready=Unknown", lost, "--timeout=120s")
            cluster.kubectl("delete", lost)
            wait_for(lambda: on_first_node(cluster), "both replicas on the first node")
            assert caller.history("shop", "db1") == before
        with Load(caller, "shop", "db1") as afterwards:
            wait_for(lambda: afterwards.answers.total() > 20, "answers")
        print(cluster.kubectl("-n", NAMESPACE, "get", "pods", "-o", "wide"))

    wrong = {answer for answer in load.answers if answer != "cooldown" and "rror" not in answer}
    assert not wrong
    assert set(afterwards.answers) == {"cooldown"}
    prove(f"a node that goes: {dict(load.answers)} meanwhile, {dict(afterwards.answers)} after it")


def on_first_node(cluster: Cluster) -> bool:
    """Whether two replicas are ready on the first node."""
    ready = [
        pod
        for pod in cluster.pods()
        if pod["spec"].get("nodeName") == cluster.node.name
        and all(row["ready"] for row in pod["status"].get("containerStatuses", [{"ready": False}]))
    ]
    return len(ready) == 2
