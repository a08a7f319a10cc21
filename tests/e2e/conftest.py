"""The cluster of all e2e tests."""

import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.cluster import namespace, vmi
from tests.cluster.binaries import find_added_crds, find_crds
from tests.e2e.cluster import Cluster, Object
from tests.e2e.images import IMAGES
from tests.e2e.kubevirt import KubeVirt, installed
from tests.e2e.node import inside_network, prepare, running
from tests.e2e.terminal import TYPED
from tests.support.builders import rfc3339


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A Ready cluster of one node; the tests run in its network."""
    directory = tmp_path_factory.mktemp("cluster")
    config = prepare(directory, IMAGES)
    with running("n1", directory) as node, inside_network(node):
        cluster = Cluster(directory, node, config)
        cluster.wait_until_ready(find_crds(), find_added_crds())
        cluster.apply([namespace("shop"), just_moved()])
        yield cluster


@pytest.fixture(scope="session")
async def kubevirt(cluster: Cluster) -> AsyncIterator[KubeVirt]:
    """KubeVirt on the cluster, and a pod with virt-controller's label."""
    cluster.kubectl("-n", "shop", "delete", "virtualmachineinstances", "--all")
    async with installed(cluster) as kubevirt:
        cluster.run_pause("kubevirt", "virt-controller", kubevirt_io="virt-controller")
        yield kubevirt


def just_moved() -> Object:
    """A VM that was migrated half a minute ago: shop/db1."""
    now = int(time.time())
    state = {"migrationUid": "m", "startTimestamp": rfc3339(now - 60)}
    return vmi(
        "db1", "shop", status={"migrationState": state | {"endTimestamp": rfc3339(now - 30)}}
    )


@pytest.fixture(scope="session")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for the files that commands write."""
    return tmp_path_factory.mktemp("scratch")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print every command of the documents that was run, in order."""
    terminalreporter.section(
        f"{len(TYPED)} commands of the documents typed, {len(set(TYPED))} of them different"
    )
    for command in dict.fromkeys(TYPED):
        terminalreporter.write_line(command)
