"""The rig itself: what the real servers do for the tests that stand on them."""

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
import yaml

from . import (
    EXPORTER_READS,
    KUBEVIRTS,
    NAMESPACES,
    PATIENCE,
    PODS,
    VMIMS,
    VMIS,
    ApiError,
    ApiServer,
    Etcd,
    MissingBinaryError,
    RealCluster,
    Resource,
    ServerFailedError,
    find_binary,
    launcher_pod,
    vmi,
    vmim,
)
from .objects import Object
from .resources import CRDS


INITIAL_EVENTS = {
    "sendInitialEvents": "true",
    "resourceVersionMatch": "NotOlderThan",
    "allowWatchBookmarks": "true",
}


@pytest.fixture(scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RealCluster]:
    """One control plane for this module; each test has names of its own."""
    async with RealCluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


async def first_event(cluster: RealCluster, resource: Resource, version: str) -> Object:
    """The first event of a watch from a resourceVersion."""
    async with (
        asyncio.timeout(PATIENCE),
        cluster.admin.watch(resource, resourceVersion=version) as events,
    ):
        return await anext(events)


async def test_all_crds_are_served(cluster: RealCluster) -> None:
    """KubeVirt's own CRDs are there, and their resources can be listed."""
    crds = await cluster.admin.list(CRDS)
    kubevirts = await cluster.admin.list(KUBEVIRTS)

    assert len(crds["items"]) == 19
    assert kubevirts["kind"] == "KubeVirtList"


async def test_built_objects_are_kept_with_their_status(cluster: RealCluster) -> None:
    """A VMI, its migration and its pod are accepted and keep the status they were given."""
    space = await cluster.namespace("built")
    machine = await cluster.admin.create(
        VMIS, vmi("db1", space, status={"evacuationNodeName": "n1"})
    )
    migration = await cluster.admin.create(VMIMS, vmim("m1", space, of="db1", evacuates="n1"))
    pod = await cluster.admin.create(
        PODS, launcher_pod(machine, node="n2", migration=migration, evicting=True)
    )

    assert machine["status"]["evacuationNodeName"] == "n1"
    assert migration["status"]["phase"] == "Pending"
    assert pod["status"]["phase"] == "Running"
    assert pod["spec"]["nodeName"] == "n2"
    assert pod["metadata"]["labels"]["kubevirt.io/created-by"] == machine["metadata"]["uid"]


async def test_status_is_a_subresource_of_migrations_only(cluster: RealCluster) -> None:
    """A plain patch writes the status of a VMI, and leaves that of a migration alone."""
    space = await cluster.namespace("status")
    await cluster.admin.create(VMIS, vmi("db1", space))
    await cluster.admin.create(VMIMS, vmim("m1", space, of="db1"))

    patch = {"status": {"phase": "Failed"}}
    machine = await cluster.admin.merge(VMIS, space, "db1", patch)
    migration = await cluster.admin.merge(VMIMS, space, "m1", patch)

    assert (machine["status"]["phase"], machine["metadata"]["generation"]) == ("Failed", 2)
    assert (migration["status"]["phase"], migration["metadata"]["generation"]) == ("Pending", 1)


async def test_a_user_reads_what_was_granted_and_nothing_else(cluster: RealCluster) -> None:
    """Without permission for migrations the API server says 403, in the words of RBAC."""
    user = await cluster.user("no-migrations", [VMIS, PODS])

    async with cluster.client(user) as client:
        await client.list(VMIS)
        with pytest.raises(ApiError) as refusal:
            await client.list(VMIMS)

    assert refusal.value.code == 403
    assert refusal.value.status["reason"] == "Forbidden"
    assert "cannot list resource" in refusal.value.status["message"]


async def test_a_user_may_read_one_namespace(cluster: RealCluster) -> None:
    """A grant in a namespace is good there and nowhere else."""
    space = await cluster.namespace("granted")
    user = await cluster.user("one-namespace", [VMIS], [space])

    async with cluster.client(user) as client:
        await client.list(VMIS, space)
        with pytest.raises(ApiError) as refusal:
            await client.list(VMIS)

    assert refusal.value.code == 403


@pytest.mark.parametrize("proof", ["token", "certificate"])
async def test_the_exporter_reads_by_either_proof(cluster: RealCluster, proof: str) -> None:
    """By token or by client certificate the exporter lists its four resources, and no others."""
    user = {"token": cluster.exporter, "certificate": cluster.certified_exporter}[proof]

    async with cluster.client(user) as client:
        for resource in EXPORTER_READS:
            await client.list(resource)
        with pytest.raises(ApiError) as refusal:
            await client.list(NAMESPACES)

    assert 'User "exporter"' in refusal.value.status["message"]


async def test_a_kubeconfig_holds_all_it_needs(cluster: RealCluster) -> None:
    """The file of a certified user names the server and carries the key pair itself."""
    path = cluster.kubeconfig(cluster.certified_exporter)

    document = yaml.safe_load(path.read_text())

    assert document["clusters"][0]["cluster"]["server"] == cluster.api.url
    assert set(document["users"][0]["user"]) == {"client-certificate-data", "client-key-data"}


async def test_initial_events_end_in_a_bookmark(cluster: RealCluster) -> None:
    """A streaming list gives every object as ADDED, then a bookmark that says it was all."""
    space = await cluster.namespace("streamed")
    for name in ("a", "b"):
        await cluster.admin.create(VMIS, vmi(name, space))

    async with cluster.admin.watch(VMIS, space, **INITIAL_EVENTS) as events:
        first, second, end = [await anext(events) for _ in range(3)]

    assert [first["type"], second["type"], end["type"]] == ["ADDED", "ADDED", "BOOKMARK"]
    assert end["object"]["metadata"]["annotations"] == {"k8s.io/initial-events-end": "true"}


async def test_a_killed_server_returns_with_its_data(cluster: RealCluster) -> None:
    """After SIGKILL both servers come back on their ports, and what was written is there."""
    space = await cluster.namespace("kept")
    before = await cluster.admin.create(VMIS, vmi("db1", space))

    cluster.api.kill()
    assert not cluster.api.running
    with pytest.raises(aiohttp.ClientConnectorError):
        await cluster.admin.list(VMIS, space)
    await cluster.etcd.restart()
    await cluster.api.restart()

    assert await cluster.admin.get(VMIS, space, "db1") == before


async def test_a_frozen_server_keeps_silent(cluster: RealCluster) -> None:
    """While frozen the API server answers nothing; thawed, it answers what was asked meanwhile."""
    cluster.api.freeze()
    question = asyncio.create_task(cluster.admin.list(NAMESPACES))
    answered, _ = await asyncio.wait({question}, timeout=0.5)
    cluster.api.thaw()

    assert not answered
    assert (await question)["kind"] == "NamespaceList"


@pytest.mark.parametrize("resource", EXPORTER_READS, ids=lambda one: one.plural)
async def test_an_old_version_is_gone(cluster: RealCluster, resource: Resource) -> None:
    """A watch from before the history was lost opens with 200, and says 410 in its only event."""
    version = (await cluster.admin.list(resource))["metadata"]["resourceVersion"]

    await cluster.force_gone()
    event = await first_event(cluster, resource, version)

    assert event["type"] == "ERROR"
    assert (event["object"]["code"], event["object"]["reason"]) == (410, "Expired")
    assert event["object"]["message"].startswith(f"too old resource version: {version} (")


async def test_a_continued_list_is_gone(cluster: RealCluster) -> None:
    """The next page of a list from before the history was lost is refused with HTTP 410."""
    page = await cluster.admin.list(CRDS, limit=1)

    await cluster.force_gone()
    with pytest.raises(ApiError) as refusal:
        await cluster.admin.list(CRDS, limit=1, **{"continue": page["metadata"]["continue"]})

    assert (refusal.value.code, refusal.value.status["reason"]) == (410, "Expired")


async def test_compaction_is_enough_without_a_watch_cache(tmp_path: Path) -> None:
    """Where nothing is cached the same 410 comes from the store, in other words."""
    async with RealCluster(tmp_path, watch_cache=False) as cluster:
        version = (await cluster.admin.list(VMIS))["metadata"]["resourceVersion"]
        await cluster.etcd.compact()
        event = await first_event(cluster, VMIS, version)

    assert event["object"]["code"] == 410
    assert event["object"]["message"] == "The resourceVersion for the provided watch is too old."


async def test_a_failed_start_shows_the_log(cluster: RealCluster, tmp_path: Path) -> None:
    """A server that ends while starting raises at once, with the end of what it said."""
    (tmp_path / "ca.crt").write_bytes((cluster.directory / "ca.crt").read_bytes())
    server = ApiServer(tmp_path, Etcd(tmp_path))

    with pytest.raises(ServerFailedError, match="no such file or directory"):
        await server.start()


async def test_a_missing_binary_names_the_remedy() -> None:
    """Whoever has not built the servers is told how."""
    with pytest.raises(MissingBinaryError, match="make tools"):
        find_binary("no-such-server")


async def test_another_version_is_never_replaced_by_the_pinned_one() -> None:
    """If the version that is asked for is not built, the error says how to build that one."""
    done = subprocess.run(
        [sys.executable, "-c", "from tests.cluster import find_binary; find_binary('virt-api')"],
        env=os.environ | {"KUBEVIRT": "0.1.0"},
        capture_output=True,
        text=True,
        check=False,
    )

    assert "run `tests/tools/build kubevirt@0.1.0`" in done.stderr
