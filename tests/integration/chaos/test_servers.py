"""The API server is killed, frozen or compacted, or refuses writes, while history is stored."""

import asyncio
import signal
import time
from base64 import b64encode
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeAlias

import aiohttp
import pytest

from exporter.history.reader import DATA_KEY
from tests.cluster import PATIENCE, VMIS, poll, vmi
from tests.cluster.resources import CONFIG_MAPS, LEASES
from tests.integration.chaos.kept import counted, remembered, shard_bytes, shards
from tests.integration.chaos.proxy import Proxy
from tests.integration.chaos.replica import (
    Replica,
    replicas,
    until_alike,
    until_event,
    until_fault,
    writer_of,
)
from tests.support.api_servers import RealStage
from tests.support.program import Program, program
from tests.support.relay import Gate
from tests.support.stored_history import (
    FAULTS,
    NAME,
    UNWRITTEN,
    WRITER,
    a_keeper,
    keeping,
    migrate,
    until_counted,
    until_written,
)


Prove: TypeAlias = Callable[[str], None]
Break: TypeAlias = Callable[["Scene"], Awaitable[None]]


class Scene:
    """Two replicas with one history, behind a relay and a proxy, and one VM, `db`."""

    def __init__(self, real: RealStage, namespace: str, gate: Gate, proxy: Proxy) -> None:
        self.real = real
        self.namespace = namespace
        self.gate = gate
        self.proxy = proxy
        self.several: list[Replica] = []

    async def until_followed(self) -> None:
        """Wait until both replicas watch again; an object that is deleted earlier is never seen."""
        await self.real.admin.create(VMIS, vmi("back", self.namespace))
        for one in self.several:
            path = f"/v1/vmis/{self.namespace}/back"
            await one.now.until(path, lambda status, _: status == 200)

    async def until_kept(self, migrations: int) -> None:
        """Wait until the cluster's ConfigMaps have this many migrations."""

        async def held() -> bool:
            listed = await self.real.admin.list(CONFIG_MAPS, self.namespace)
            return [
                number
                for raw in shard_bytes(listed["items"]).values()
                for number in counted(raw).values()
            ] == [migrations]

        await poll(held, what=f"{migrations} migrations in the stored history")


async def killed_and_compacted(scene: Scene) -> None:
    """Kill the server with SIGKILL, and restart it on a compacted store: watches get a 410."""
    await scene.real.stop()
    assert not scene.real.cluster.api.running
    await lost_by_both(scene)
    await scene.real.force_gone()
    for one in scene.several:
        broke = await until_event(one.now, "watch_broke", resource="configmaps", kind="expired")
        assert "410" in broke["why"]


async def frozen(scene: Scene) -> None:
    """Stop the server with SIGSTOP for longer than the Lease lasts."""
    scene.real.freeze()
    try:
        await lost_by_both(scene)
    finally:
        scene.real.thaw()


async def half_open(scene: Scene) -> None:
    """Keep every connection open without data for longer than the Lease lasts."""
    scene.gate.stall()
    await lost_by_both(scene)
    scene.gate.open()


async def cut(scene: Scene) -> None:
    """Break every connection, and refuse new ones for a while."""
    await scene.gate.shut()
    await lost_by_both(scene)
    scene.gate.open()


async def lost_by_both(scene: Scene) -> None:
    """Wait until no replica reports that it is the writer, because none can renew the Lease."""

    async def lost() -> bool:
        return not any([await one.now.sample(WRITER) for one in scene.several])

    await poll(lost, what="no writer")
    for one in scene.several:
        await until_event(one.now, "lease_unreachable")


@pytest.mark.parametrize("fault", [killed_and_compacted, frozen, half_open, cut])
async def test_the_history_goes_on_when_the_server_does(
    real: RealStage, tmp_path: Path, fault: Break
) -> None:
    """Migrations before and after the fault are stored, and both replicas agree."""
    namespace = await real.make_namespace()
    await real.admin.create(VMIS, vmi("db", namespace))
    async with Gate(real.url) as gate:
        login = await login_at(real, tmp_path, namespace, gate.url)
        config = {**keeping(namespace, readTimeout="10s"), "namespaces": [namespace]}
        scene = Scene(real, namespace, gate, Proxy(real.cluster))
        scene.several = [
            Replica(tmp_path, "--kubeconfig", str(login), config=config, name=name) for name in "ab"
        ]
        async with replicas(*scene.several):
            await writer_of(*scene.several)
            await migrate(real.admin, namespace, "db", ago=[400, 300, 200])
            await scene.until_kept(3)
            await fault(scene)
            await scene.until_followed()
            await migrate(real.admin, namespace, "db", ago=[100, 50])
            await scene.until_kept(5)
            await writer_of(*scene.several)
            one, other = scene.several
            await until_alike(one.now, other.now, [(namespace, "db")])
            for one in scene.several:
                await until_counted(one.now, namespace, "db", 5)
                assert await one.now.sample(FAULTS, fault="damaged") == 0


@pytest.mark.parametrize("code", [429, 500])
async def test_writes_that_are_rejected(real: RealStage, tmp_path: Path, code: int) -> None:
    """Writes that fail with 429 or 500 are counted and repeated until they succeed."""
    namespace = await real.make_namespace()
    async with (
        Proxy(real.cluster) as proxy,
        program(
            tmp_path,
            "--kubeconfig",
            str(await login_at(real, tmp_path, namespace, proxy.url)),
            config={**keeping(namespace), "namespaces": [namespace]},
        ) as exporter,
    ):
        await exporter.ready()
        await until_event(exporter, "lease_taken")
        await real.admin.create(VMIS, vmi("db", namespace))
        proxy.refusals["PATCH", "/configmaps/"] = code
        await migrate(real.admin, namespace, "db", ago=[300, 200])
        await until_counted(exporter, namespace, "db", 2)
        assert await until_fault(exporter, "not_written")
        assert str(code) in exporter.events("history_fault")[0]["why"]
        assert await exporter.sample(UNWRITTEN) > 0
        assert proxy.rejected[code]
        proxy.refusals.clear()
        await until_written(exporter)
        assert await exporter.end() == 0
    kept = shard_bytes((await real.admin.list(CONFIG_MAPS, namespace))["items"])
    assert [list(counted(raw).values()) for raw in kept.values()] == [[2]]


async def test_another_writer_is_not_written_over(real: RealStage, tmp_path: Path) -> None:
    """A replica whose watch is behind gets a conflict, and merges what it missed.

    This happens to a holder that was frozen and does not know yet that it has lost the Lease.
    """
    namespace = await real.make_namespace()
    made = await real.admin.create(VMIS, vmi("db", namespace))
    config = {**keeping(namespace), "namespaces": [namespace]}
    async with Proxy(real.cluster) as proxy:
        login = await login_at(real, tmp_path, namespace, proxy.url)
        async with program(tmp_path, "--kubeconfig", str(login), config=config) as exporter:
            await exporter.ready()
            await migrate(real.admin, namespace, "db", ago=[400])
            await until_counted(exporter, namespace, "db", 1)
            await until_written(exporter)
            proxy.held.add("/configmaps")
            [name] = shard_bytes((await real.admin.list(CONFIG_MAPS, namespace))["items"])
            kept = await real.admin.get(CONFIG_MAPS, namespace, name)
            theirs = b"".join(shards([remembered(made, 4)]).values())
            kept["binaryData"] = {DATA_KEY: b64encode(theirs).decode()}
            await real.admin.replace(CONFIG_MAPS, kept)
            await migrate(real.admin, namespace, "db", ago=[20])
            assert await until_fault(exporter, "conflict")
            await until_counted(exporter, namespace, "db", 6)
            await until_written(exporter)
            proxy.held.clear()
            assert await exporter.end() == 0
    kept = await real.admin.get(CONFIG_MAPS, namespace, name)
    assert list(counted(shard_bytes([kept])[name]).values()) == [6]


async def login_at(real: RealStage, directory: Path, namespace: str, url: str) -> Path:
    """The kubeconfig of a replica that reaches the API server at this URL."""
    user = await a_keeper(real.cluster, namespace)
    path = directory / "elsewhere.kubeconfig"
    path.write_text(user.read_text().replace(real.url, url))
    return path


@asynccontextmanager
async def holding(
    real: RealStage, directory: Path, namespace: str, ago: list[int]
) -> AsyncIterator[Program]:
    """The holder of the Lease, with migrations of `db` that it has not written yet."""
    login = await a_keeper(real.cluster, namespace)
    await real.admin.create(VMIS, vmi("db", namespace))
    unhurried = keeping(namespace, historyInterval="1h", leaseDuration="15s")
    config = {**unhurried, "namespaces": [namespace]}
    async with program(directory, "--kubeconfig", str(login), config=config) as exporter:
        await exporter.ready()
        await until_event(exporter, "lease_taken")
        await migrate(real.admin, namespace, "db", ago=ago)
        await until_counted(exporter, namespace, "db", len(ago))
        yield exporter


async def test_sigterm(real: RealStage, tmp_path: Path) -> None:
    """On SIGTERM the exporter answers its long polls, writes, releases the Lease and exits with 0.

    Meanwhile it is not ready. The API server is frozen for a while, so that the flush takes as long
    as the test needs.
    """
    namespace = await real.make_namespace()
    async with holding(real, tmp_path, namespace, ago=[300, 200, 100]) as exporter:
        assert await exporter.sample(UNWRITTEN) > 0
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
            assert exporter.process.returncode is None, "it still has something to write"
        finally:
            real.thaw()
        assert await asyncio.wait_for(exporter.process.wait(), PATIENCE) == 0
        assert exporter.events("lease_released")
    kept = shard_bytes((await real.admin.list(CONFIG_MAPS, namespace))["items"])
    assert [list(counted(raw).values()) for raw in kept.values()] == [[3]]
    lease = await real.admin.get(LEASES, namespace, NAME)
    assert not lease["spec"].get("holderIdentity")


async def test_sigterm_without_a_server(real: RealStage, tmp_path: Path, prove: Prove) -> None:
    """Without a server the exporter cannot write the history, logs this, and exits with 0."""
    namespace = await real.make_namespace()
    async with holding(real, tmp_path, namespace, ago=[100]) as exporter:
        real.freeze()
        try:
            began = time.monotonic()
            assert await exporter.end() == 0
            seconds = time.monotonic() - began
        finally:
            real.thaw()
        assert exporter.events("history_not_flushed")
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
