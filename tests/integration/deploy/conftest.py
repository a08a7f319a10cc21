"""The real API servers to which the manifests are applied."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.cluster import Client, RealCluster, poll
from tests.cluster.binaries import find_added_crds
from tests.cluster.resources import CRDS
from tests.generate.manifests import only, render
from tests.integration.deploy.server import apply
from tests.support.admission import Pair, make_pair


ADDED = (
    "com.coreos.monitoring.v1.PodMonitor",
    "com.coreos.monitoring.v1.PrometheusRule",
    "io.cert-manager.v1.Certificate",
    "io.cert-manager.v1.Issuer",
)


@pytest.fixture(scope="session")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RealCluster]:
    """A control plane with the CRDs that deploy/ needs, and the exporter's namespace."""
    async with equipped(tmp_path_factory.mktemp("cluster")) as cluster:
        await apply(cluster.admin, [only(render("base"), "Namespace")])
        yield cluster


@pytest.fixture(scope="module")
async def fresh(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RealCluster]:
    """A control plane for one module, without any object of the exporter."""
    async with equipped(tmp_path_factory.mktemp("fresh")) as cluster:
        yield cluster


@asynccontextmanager
async def equipped(directory: Path) -> AsyncIterator[RealCluster]:
    """A control plane with the CRDs of the Prometheus operator and of cert-manager."""
    async with RealCluster(directory) as cluster:
        for crd in json.loads(find_added_crds().read_bytes()):
            await cluster.admin.create(CRDS, crd)
        await poll(lambda: serves_added(cluster.admin), what="further kinds served")
        yield cluster


async def serves_added(client: Client) -> bool:
    """Whether the API server serves the added CRDs with their schemas."""
    served = (await client.request("GET", "/openapi/v2"))["definitions"]
    return all(kind in served for kind in ADDED)


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """The content of the certificate's Secret, for the loopback address."""
    return make_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="session")
async def paging(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RealCluster]:
    """A control plane without streaming lists, as before Kubernetes 1.32."""
    directory = tmp_path_factory.mktemp("paging")
    async with RealCluster(directory, flags=["--feature-gates=WatchList=false"]) as cluster:
        await apply(cluster.admin, [only(render("base"), "Namespace")])
        yield cluster
