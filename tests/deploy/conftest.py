"""The real API servers that the manifests are tried on."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.cluster import Client, RealCluster, poll
from tests.cluster.binaries import find_monitoring_crds
from tests.cluster.resources import CRDS
from tests.deploy.files import only, render
from tests.deploy.server import apply


MONITORED = ("PodMonitor", "PrometheusRule")


@pytest.fixture(scope="session")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RealCluster]:
    """A control plane with the Prometheus operator's CRDs and our namespace."""
    async with monitored(tmp_path_factory.mktemp("cluster")) as cluster:
        await apply(cluster.admin, [only(render("base"), "Namespace")])
        yield cluster


@pytest.fixture(scope="module")
async def fresh(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RealCluster]:
    """The same for one module, and without anything of ours."""
    async with monitored(tmp_path_factory.mktemp("fresh")) as cluster:
        yield cluster


@asynccontextmanager
async def monitored(directory: Path) -> AsyncIterator[RealCluster]:
    """A control plane with the Prometheus operator's CRDs."""
    async with RealCluster(directory) as cluster:
        for crd in json.loads(find_monitoring_crds().read_bytes()):
            await cluster.admin.create(CRDS, crd)
        await poll(lambda: serves_monitors(cluster.admin), within=60, what="monitors served")
        yield cluster


async def serves_monitors(client: Client) -> bool:
    """Whether the API server has taken the Prometheus operator's CRDs up, schemas included."""
    served = (await client.request("GET", "/openapi/v2"))["definitions"]
    return all(f"com.coreos.monitoring.v1.{kind}" in served for kind in MONITORED)


@pytest.fixture(scope="session")
async def paging(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RealCluster]:
    """A control plane that streams no lists, as those before Kubernetes 1.32."""
    directory = tmp_path_factory.mktemp("paging")
    async with RealCluster(directory, flags=["--feature-gates=WatchList=false"]) as cluster:
        await apply(cluster.admin, [only(render("base"), "Namespace")])
        yield cluster
