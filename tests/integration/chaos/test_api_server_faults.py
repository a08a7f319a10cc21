"""The API server is killed, frozen or compacted, or its connections break."""

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeAlias

import aiohttp
import pytest

from exporter.app import LEASE
from tests.cluster import EXPORTER_READS, PATIENCE, VMIS, ApiError, poll, vmi
from tests.cluster.access import allow
from tests.cluster.resources import LEASES
from tests.integration.chaos.replica import Replica, replicas, until_alike, until_event
from tests.support.api_servers import RealStage
from tests.support.history_files import migrate, read_counts, until_counted
from tests.support.program import Program, program
from tests.support.relay import Gate


Prove: TypeAlias = Callable[[str], None]
Break: TypeAlias = Callable[["Scene"], Awaitable[None]]


class Scene:
    """Two replicas behind a relay, and one VM, `db`."""

    def __init__(self, real: RealStage, namespace: str, gate: Gate) -> None:
        self.real = real
        self.namespace = namespace
        self.gate = gate
        self.several: list[Replica] = []

    async def until_followed(self) -> None:
        """Wait until both replicas watch again; an object that is deleted earlier is never seen."""
        await self.real.admin.create(VMIS, vmi("back", self.namespace))
        for replica in self.several:
            path = f"/v1/vmis/{self.namespace}/back"
            await replica.now.until(path, lambda status, _: status == 200)


async def killed_and_compacted(scene: Scene) -> None:
    """Kill the server with SIGKILL, and restart it on a compacted store: watches get a 410."""
    await scene.real.stop()
    assert not scene.real.cluster.api.running
    await lost_by_both(scene)
    await scene.real.force_gone()
    for replica in scene.several:
        broke = await until_event(replica.now, "watch_broke", kind="expired")
        assert "410" in broke["why"]


async def frozen(scene: Scene) -> None:
    """Stop the server with SIGSTOP until both replicas have noticed."""
    scene.real.freeze()
    try:
        await lost_by_both(scene)
    finally:
        scene.real.thaw()


async def half_open(scene: Scene) -> None:
    """Keep every connection open without data until both replicas have noticed."""
    scene.gate.stall()
    await lost_by_both(scene)
    scene.gate.open()


async def cut(scene: Scene) -> None:
    """Break every connection, and refuse new ones for a while."""
    await scene.gate.shut()
    await lost_by_both(scene)
    scene.gate.open()


async def lost_by_both(scene: Scene) -> None:
    """Wait until both replicas have lost their watches."""
    for replica in scene.several:
        await until_event(replica.now, "watch_broke", resource=VMIS.plural)


@pytest.mark.parametrize("fault", [killed_and_compacted, frozen, half_open, cut])
async def test_the_watches_go_on_when_the_server_does(
    real: RealStage, tmp_path: Path, fault: Break
) -> None:
    """Migrations before and after the fault are counted, and both replicas agree."""
    namespace = await real.make_namespace()
    await real.admin.create(VMIS, vmi("db", namespace))
    async with Gate(real.url) as gate:
        login = real.login_at(gate.url).kubeconfig
        config = {"namespaces": [namespace], "kube": {"readTimeout": "10s"}}
        scene = Scene(real, namespace, gate)
        scene.several = [
            Replica(tmp_path, "--kubeconfig", str(login), config=config, name=name) for name in "ab"
        ]
        async with replicas(*scene.several):
            await migrate(real.admin, namespace, "db", ago=[400, 300, 200])
            for replica in scene.several:
                await until_counted(replica.now, namespace, "db", 3)
            await fault(scene)
            await scene.until_followed()
            await migrate(real.admin, namespace, "db", ago=[100, 50])
            for replica in scene.several:
                await until_counted(replica.now, namespace, "db", 5)
            first, other = scene.several
            await until_alike(first.now, other.now, [(namespace, "db")])


async def test_vmis_are_known_soon_after_a_restart(
    real: RealStage, tmp_path: Path, prove: Prove
) -> None:
    """After its API server was away, the exporter knows of a new VMI soon after the first 200.

    Until the server is ready, it refuses connections, and then answers with 403, 429 and 410.
    """
    namespace = await real.make_namespace()
    blind: list[float] = []
    async with program(tmp_path, "--kubeconfig", str(real.login.kubeconfig)) as exporter:
        await exporter.ready()
        for away in (1, 20):
            await real.stop()
            await asyncio.sleep(away)
            await real.cluster.api.start()

            async def is_created(name: str = f"after-{away}") -> bool:
                try:
                    await real.admin.create(VMIS, vmi(name, namespace))
                except (ApiError, aiohttp.ClientError):
                    return False
                return True

            await poll(is_created, what="a VMI created")
            created = time.monotonic()
            path = f"/v1/vmis/{namespace}/after-{away}"
            await exporter.until(path, lambda status, _: status == 200)
            blind.append(time.monotonic() - created)
    assert max(blind) < 8.0
    prove(f"VMIs known again {blind[0]:.1f} and {blind[1]:.1f} s after the API server's first 200")


@asynccontextmanager
async def holding(
    real: RealStage, directory: Path, namespace: str, ago: list[int]
) -> AsyncIterator[Program]:
    """The holder of the Lease, with migrations of `db` that are not in its history file yet."""
    user = await real.cluster.user(f"holder-{namespace}", EXPORTER_READS)
    rule = {"apiGroups": [LEASES.group], "resources": [LEASES.plural]}
    rule |= {"verbs": ["get", "create", "update"], "resourceNames": [LEASE]}
    await allow(real.admin, user, f"holder-{namespace}-lease", rule, namespace=user.namespace)
    login = real.cluster.kubeconfig(user)
    await real.admin.create(VMIS, vmi("db", namespace))
    config = {
        "namespaces": [namespace],
        "events": True,
        "history": f"file:{directory / 'history'}",
        "kube": {"historyInterval": "1h"},
    }
    async with program(directory, "--kubeconfig", str(login), config=config) as exporter:
        await exporter.ready()
        await until_event(exporter, "lease_taken")
        await migrate(real.admin, namespace, "db", ago=ago)
        await until_counted(exporter, namespace, "db", len(ago))
        yield exporter


async def test_sigterm(real: RealStage, tmp_path: Path) -> None:
    """On SIGTERM the exporter answers its long polls, writes, releases the Lease and exits with 0.

    Meanwhile it is not ready. The API server is frozen for a while, so that the end takes as long
    as the test needs.
    """
    namespace = await real.make_namespace()
    async with holding(real, tmp_path, namespace, ago=[300, 200, 100]) as exporter:
        assert not read_counts(tmp_path / "history")
        asked = asyncio.Event()
        polling = asyncio.create_task(long_poll(exporter, asked))
        await asked.wait()
        # When this request is answered, the exporter has already read the long poll.
        assert (await exporter.get("/readyz"))[0] == 200
        assert not polling.done()
        real.freeze()
        try:
            exporter.process.send_signal(signal.SIGTERM)
            await until_event(exporter, "stopping")
            status, _ = await exporter.get("/readyz")
            assert status == 503
            assert await asyncio.wait_for(polling, PATIENCE) in (200, 304)
            assert exporter.process.returncode is None, "it still has the Lease"
        finally:
            real.thaw()
        assert await asyncio.wait_for(exporter.process.wait(), PATIENCE) == 0
        assert exporter.events("lease_released")
    assert list(read_counts(tmp_path / "history").values()) == [3]


async def test_sigterm_without_a_server(real: RealStage, tmp_path: Path, prove: Prove) -> None:
    """Without a server the exporter cannot release the Lease, logs this, and exits with 0."""
    namespace = await real.make_namespace()
    async with holding(real, tmp_path, namespace, ago=[100]) as exporter:
        real.freeze()
        try:
            began = time.monotonic()
            assert await exporter.end() == 0
            seconds = time.monotonic() - began
        finally:
            real.thaw()
        assert exporter.events("not_closed")
    assert list(read_counts(tmp_path / "history").values()) == [1]
    prove(f"SIGTERM while the API server is frozen: exit 0 after {seconds:.1f} s")


async def long_poll(exporter: Program, asked: asyncio.Event) -> int:
    """Send a long poll, set `asked` when it is sent, and return the status of its answer."""

    async def sent(
        _session: object, _context: object, sent: aiohttp.TraceRequestHeadersSentParams
    ) -> None:
        if "wait" in sent.url.query:
            asked.set()

    tracing = aiohttp.TraceConfig()
    tracing.on_request_headers_sent.append(sent)
    async with aiohttp.ClientSession(exporter.query, trace_configs=[tracing]) as session:
        async with session.get("/v1/blocked") as answer:
            tag = answer.headers["ETag"]
        headers = {"If-None-Match": tag}
        async with session.get("/v1/blocked?wait=60", headers=headers) as answer:
            return answer.status
