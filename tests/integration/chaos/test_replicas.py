"""Two replicas answer while one is killed, or while clocks differ."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from exporter.app import Listening, run
from exporter.kube.login import Login
from exporter.settings import read_settings
from tests.cluster import VMIS, vmi
from tests.integration.chaos import SEED
from tests.integration.chaos.load import load
from tests.integration.chaos.replica import (
    Replica,
    instant,
    replicas,
    until_alike,
)
from tests.integration.chaos.stream import Stream
from tests.support.api_servers import RealStage
from tests.support.history_files import BRISK, migrate, until_counted, until_saved
from tests.support.program import ANYWHERE, Program


Prove: TypeAlias = Callable[[str], None]


@asynccontextmanager
async def playing(stream: Stream) -> AsyncIterator[None]:
    """Run the stream during the block."""

    async def play() -> None:
        while True:
            await stream.play(3)

    task = asyncio.create_task(play())
    try:
        yield
    finally:
        task.cancel()
        done = (await asyncio.gather(task, return_exceptions=True))[0]
        assert isinstance(done, asyncio.CancelledError), done


async def test_a_killed_replica_under_load(real: RealStage, tmp_path: Path, prove: Prove) -> None:
    """While a replica is killed and starts again, every request is answered by the other one.

    Afterwards both give the same answers about VMs with at most five migrations.
    """
    namespace = await real.make_namespace()
    login = ("--kubeconfig", str(real.login.kubeconfig))
    config = {"namespaces": [namespace]}
    first, other = (Replica(tmp_path, *login, config=config, name=name) for name in "ab")
    stream = Stream(real.admin, namespace, SEED, lasting=3, brief=1)
    await stream.play(5)
    async with replicas(first, other):
        async with load(lambda: (first, other), stream.candidates()) as requests:
            async with playing(stream):
                await first.kill()
                await first.start()
                await first.now.ready()
            await until_alike(first.now, other.now, stream.candidates(brief_alone=True))
        assert requests["failed"] == 0
    prove(f"replica killed: {requests['answered']} requests, {requests['retried']} retried")


class _Within(Program):
    """The exporter within this process, without signals and without a log of its own."""

    def __init__(self, listening: Listening) -> None:
        self.query, self.metrics = listening.query[0], listening.metrics[0]


@asynccontextmanager
async def in_process(
    login: Login, config: dict[str, Any], clock: Callable[[], float]
) -> AsyncIterator[Program]:
    """Run the exporter within this process, with a clock of its own."""
    stop, listening = asyncio.Event(), asyncio.get_running_loop().create_future()
    settings = read_settings({**ANYWHERE, **config})
    running = asyncio.create_task(
        run(
            settings,
            login,
            stop,
            clock=clock,
            on_listening=listening.set_result,
        )
    )
    asking = _Within(await listening)
    try:
        await asking.until("/readyz", lambda status, _: status == 200)
        yield asking
    finally:
        stop.set()
        await running


async def test_clocks_that_differ(real: RealStage) -> None:
    """Two replicas whose clocks differ by three seconds report the same `notBefore` and cooldown.

    Only the values that come from a replica's own clock differ, by about three seconds.
    """
    namespace = await real.make_namespace()
    login = real.login
    await real.admin.create(VMIS, vmi("db", namespace))
    await real.admin.create(VMIS, vmi("web", namespace))
    apart = 3.0
    async with (
        in_process(login, {"namespaces": [namespace]}, time.time) as behind,
        in_process(login, {"namespaces": [namespace]}, lambda: time.time() + apart) as ahead,
    ):
        await migrate(real.admin, namespace, "db", ago=[100, 200, 300])
        evacuated = {"status": {"evacuationNodeName": "n1"}}
        await real.admin.merge(VMIS, namespace, "web", evacuated)
        for exporter in (behind, ahead):
            await until_counted(exporter, namespace, "db", 3)
        left, right = await asyncio.gather(
            *(e.verdict(namespace, "db", dryRun=True) for e in (behind, ahead))
        )
        assert left["notBefore"] == right["notBefore"]
        assert left["effectiveCooldownSeconds"] == right["effectiveCooldownSeconds"] == 3600
        assert abs(left["retryAfterSeconds"] - right["retryAfterSeconds"]) == pytest.approx(
            apart, abs=1
        )
        evacuations = [
            await e.until("/v1/evacuations", lambda _, body: body["evacuations"])
            for e in (behind, ahead)
        ]
        early, late = (instant(answer["evacuations"][0]["requestedAt"]) for answer in evacuations)
        assert 0 <= late - early < apart + 1


async def test_a_clock_that_jumps(real: RealStage, tmp_path: Path) -> None:
    """If the clock jumps, the verdicts follow the new time, and the history file is kept."""
    namespace = await real.make_namespace()
    login = real.login
    path = tmp_path / "history"
    config = {"namespaces": [namespace], "kube": BRISK, "history": f"file:{path}"}
    uid = (await real.admin.create(VMIS, vmi("db", namespace)))["metadata"]["uid"]
    hour = 3600.0
    ahead = 0.0
    async with in_process(login, config, lambda: time.time() + ahead) as exporter:
        await migrate(real.admin, namespace, "db", ago=[100, 200])
        await until_counted(exporter, namespace, "db", 2)
        before = await exporter.verdict(namespace, "db", dryRun=True)
        assert (before["reason"], before["effectiveCooldownSeconds"]) == ("cooldown", 1800)
        await until_saved(path, uid, 2)

        ahead = hour
        assert (await exporter.verdict(namespace, "db", dryRun=True))["allowed"]
        await migrate(real.admin, namespace, "db", ago=[50])
        await until_counted(exporter, namespace, "db", 3)

        ahead = -hour
        # The ends are now further in the future than clocks may differ, so they do not count.
        await until_counted(exporter, namespace, "db", 0)
        assert (await exporter.verdict(namespace, "db", dryRun=True))["allowed"]
        await migrate(real.admin, namespace, "db", ago=[40])
        await real.admin.create(VMIS, vmi("web", namespace))
        await exporter.until(f"/v1/vmis/{namespace}/web", lambda status, _: status == 200)

        ahead = 0.0
        await until_counted(exporter, namespace, "db", 4)
        after = await exporter.verdict(namespace, "db", dryRun=True)
        assert (after["reason"], after["effectiveCooldownSeconds"]) == ("cooldown", 7200)
        await until_saved(path, uid, 4)
