"""A rule blocks only while the resource that it reads is watched.

The tests run the exporter as a process, against a real API server if that can produce the fault.
"""

import asyncio
import shutil
import time
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.cluster import (
    PODS,
    VMIMS,
    VMIS,
    RealCluster,
    Resource,
    launcher_pod,
    poll,
    vmi,
    vmim,
)
from tests.cluster.access import binding
from tests.cluster.resources import ROLE_BINDINGS
from tests.cluster.users import open_kubeconfig
from tests.support.api_servers import RealStage, SimulatedStage
from tests.support.builders import rfc3339
from tests.support.certificates import write_certificate
from tests.support.program import Program, program


RESTARTS = "kubevirt_eviction_exporter_watch_restarts_total"
MISSING = "kubevirt_eviction_exporter_permission_missing"
READS = (VMIS, VMIMS, PODS)


def migrating(namespace: str, name: str = "db") -> dict[str, Any]:
    """A VMI whose migration runs."""
    state = {"migrationUid": f"of-{name}", "startTimestamp": rfc3339(int(time.time()))}
    return vmi(name, namespace, status={"migrationState": state})


def short_lived(*namespaces: str) -> dict[str, Any]:
    """A configuration in which watches end, and data becomes stale, after a few seconds."""
    kube = {"staleAfter": "3s", "deadAfter": "3s", "rejectedRetry": "1s", "watchTimeout": "12s"}
    return {"namespaces": list(namespaces), "kube": kube}


class Beat:
    """Changes a VMI five times a second, because real servers send few bookmarks."""

    def __init__(self, real: RealStage, namespace: str) -> None:
        self._real = real
        self._namespace = namespace

    async def __aenter__(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        for number in range(10_000):
            patch = {"metadata": {"annotations": {"beat": str(number)}}}
            await self._real.admin.merge(VMIS, self._namespace, "db", patch)
            await asyncio.sleep(0.2)


class TestLostNamespace:
    """One of two watched namespaces is forbidden (403)."""

    async def test_a_namespace_that_is_lost_goes_blind_alone(
        self, real: RealStage, tmp_path: Path
    ) -> None:
        """If a RoleBinding is deleted, the rules stop blocking in its namespace and in no other."""
        healthy, lost = await real.make_namespace(), await real.make_namespace()
        for namespace in (healthy, lost):
            await real.admin.create(VMIS, migrating(namespace))
        user = await real.cluster.user("loses-one", READS, (healthy, lost))
        login = str(real.cluster.kubeconfig(user))
        config = short_lived(healthy, lost)
        async with (
            Beat(real, healthy),
            program(tmp_path, "--kubeconfig", login, config=config) as exporter,
        ):
            await exporter.ready()
            for namespace in (healthy, lost):
                await exporter.until_verdict(namespace, "db", "filter", "migration_in_progress")

            await real.admin.delete(ROLE_BINDINGS, lost, "loses-one")
            refused = f"virtualmachineinstances in namespace {lost}"
            await exporter.until(
                "/v1/status", lambda _, body: refused in body["blindSpots"], within=90
            )
            await exporter.until_verdict(lost, "db", "filter", None)
            _, there = await exporter.get(f"/v1/vmis/{lost}/db")
            assert there["stale"]
            assert there["rules"][0]["silenced"]
            _, here = await exporter.get(f"/v1/vmis/{healthy}/db")
            assert here["verdicts"]["filter"]["reason"] == "migration_in_progress"
            assert (await exporter.get("/readyz"))[0] == 200
            assert await exporter.sample(MISSING, resource=VMIS.plural) == 1
            _, status = await exporter.get("/v1/status")
            assert status["staleness"] == "fresh"
            assert not here["stale"]

            await real.admin.create(ROLE_BINDINGS, binding("loses-one", user.name, lost))
            await exporter.until_verdict(lost, "db", "filter", "migration_in_progress")
            _, back = await exporter.get(f"/v1/vmis/{lost}/db")
            assert not back["stale"]

    async def test_a_start_with_one_lost_namespace_serves_the_other(
        self, real: RealStage, tmp_path: Path
    ) -> None:
        """A namespace that is forbidden from the start is reported; the other one is served."""
        healthy, lost = await real.make_namespace(), await real.make_namespace()
        await real.admin.create(VMIS, migrating(healthy))
        user = await real.cluster.user("sees-one", READS, (healthy,))
        login = str(real.cluster.kubeconfig(user))
        config = {"namespaces": [healthy, lost]}
        async with program(tmp_path, "--kubeconfig", login, config=config) as exporter:
            await exporter.ready()
            await exporter.until_verdict(healthy, "db", "filter", "migration_in_progress")
            _, status = await exporter.get("/v1/status")
        assert f"virtualmachineinstances in namespace {lost}" in status["blindSpots"]
        assert (status["ready"], status["staleness"]) == (True, "fresh")


@pytest.mark.parametrize(
    ("resource", "reason"),
    [(VMIMS, "migration_in_progress"), (PODS, "evacuation_in_progress")],
    ids=["migrations", "pods"],
)
async def test_a_watch_that_is_dead_silences_its_own_rule(
    simulated: SimulatedStage, tmp_path: Path, resource: Resource, reason: str
) -> None:
    """While VMIMs or pods cannot be watched (5xx), only the rule that reads them stops blocking."""
    namespace = await simulated.make_namespace()
    admin = simulated.admin
    await admin.create(VMIS, migrating(namespace, "running"))
    made = await admin.create(
        VMIS,
        vmi("db", namespace, status={"evacuationNodeName": "n1" if resource is PODS else ""}),
    )
    await admin.create(PODS, launcher_pod(made))
    if resource is VMIMS:
        await admin.create(VMIMS, vmim("pending", namespace, of="db"))
    login = str(open_kubeconfig(tmp_path / "kubeconfig", simulated.url))
    config = {"kube": {"staleAfter": "2s", "deadAfter": "2s"}}
    async with program(tmp_path, "--kubeconfig", login, config=config) as exporter:
        await exporter.ready()
        await exporter.until_verdict(namespace, "db", "filter", reason)
        url, etag = f"{exporter.query}/v1/blocked?checkpoint=filter", await tag(exporter)
        waiting = asyncio.create_task(ask_blocked(f"{url}&wait=30", etag))

        simulated.server.answer(resource.plural, 500)
        simulated.server.cut(resource.plural)
        await exporter.until_verdict(namespace, "db", "filter", None)
        released = await waiting
        running = await exporter.verdict(namespace, "running", "filter", dryRun=True)
        _, explained = await exporter.get(f"/v1/vmis/{namespace}/db")
        simulated.server.recover()
        await exporter.until_verdict(namespace, "db", "filter", reason)

    assert released == ["running"]
    assert running["reason"] == "migration_in_progress"
    assert not explained["stale"], "the VMIs are still watched"
    silenced = {rule["rule"] for rule in explained["rules"] if rule["silenced"]}
    rule = "pending_migration" if resource is VMIMS else "requested_evacuation"
    assert silenced == {rule}


async def tag(exporter: Program) -> str:
    """The ETag of the VMIs that are blocked at `filter`."""
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"{exporter.query}/v1/blocked?checkpoint=filter") as response,
    ):
        return response.headers["ETag"]


async def ask_blocked(url: str, etag: str) -> list[str]:
    """The names of the blocked VMIs, after the set has changed."""
    async with (
        aiohttp.ClientSession() as session,
        session.get(url, headers={"If-None-Match": etag}) as response,
    ):
        assert response.status == 200
        return [vmi["name"] for vmi in (await response.json())["blocked"]]


async def test_an_api_server_with_a_new_authority_is_trusted_again(tmp_path: Path) -> None:
    """After the server's CA was rotated, the watch resumes once the kubeconfig has the new CA."""
    async with RealCluster(tmp_path / "cluster") as cluster:
        await cluster.namespace("shop")
        await cluster.admin.create(VMIS, vmi("old", "shop"))
        login = cluster.kubeconfig(cluster.exporter)
        async with program(tmp_path, "--kubeconfig", str(login)) as exporter:
            await exporter.ready()

            await rotate(cluster)
            async with cluster.client(cluster.administrator) as admin:
                await admin.create(VMIS, vmi("new", "shop"))

                async def distrusted() -> bool:
                    events = exporter.events("watch_broke")
                    return any("certificate verify failed" in event["why"] for event in events)

                await poll(distrusted, within=30, what="a certificate that is not trusted")
                cluster.kubeconfig(cluster.exporter)
                await exporter.until("/v1/vmis/shop/new", lambda status, _: status == 200)


async def rotate(cluster: RealCluster) -> None:
    """Restart the API server with a certificate of another CA; kubeconfig files do not change."""
    cluster.api.kill()
    kept = cluster.directory / "kept"
    kept.mkdir()
    for name in ("ca.crt", "ca.key", "server.crt", "server.key"):
        shutil.move(cluster.directory / name, kept / name)
    write_certificate(cluster.directory, "server")
    cluster.api.trust.load_verify_locations(cluster.directory / "ca.crt")
    await cluster.api.start()
