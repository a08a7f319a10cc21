"""The exporter alone, by the commands of docs/install.md."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.cluster import Cluster, wait_for
from tests.e2e.documents import type_section
from tests.e2e.terminal import Terminal
from tests.generate.manifests import NAMESPACE


@pytest.fixture(scope="module")
def terminal(cluster: Cluster, scratch: Path) -> Iterator[Terminal]:
    """Somebody who has installed the exporter alone."""
    with cluster.terminal(scratch) as terminal:
        type_section(terminal, "A certificate first")
        type_section(terminal, "Metrics, by kustomize", without="cert-manager| rollout | exec ")
        cluster.rolled_out()
        yield terminal


def test_it_is_ready(cluster: Cluster, terminal: Terminal) -> None:
    """One pod of ours runs, all of its containers ready."""
    del terminal
    (pod,) = cluster.pods()
    assert [one["ready"] for one in pod["status"]["containerStatuses"]] == [True]
    print(cluster.kubectl("-n", NAMESPACE, "get", "pods", "-o", "wide"))


def test_it_answers_by_exec(cluster: Cluster, terminal: Terminal) -> None:
    """`status` in the pod says that the exporter is healthy."""
    del terminal
    said = wait_for(lambda: cluster.exec("python", "-m", "exporter", "status"), "status")
    print(said)
    assert "Healthy" in said
