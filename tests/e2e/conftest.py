"""The cluster of all e2e tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.cluster import Cluster
from tests.e2e.node import inside_network, prepare, running


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A Ready cluster of one node; the tests are in its network."""
    directory = tmp_path_factory.mktemp("cluster")
    config = prepare(directory)
    with running("node1", directory) as node, inside_network(node):
        cluster = Cluster(directory, node, config)
        cluster.wait_until_ready()
        yield cluster


@pytest.fixture(scope="session")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for what commands leave behind."""
    return tmp_path_factory.mktemp("scratch")
