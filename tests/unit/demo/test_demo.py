"""The whole demo: its server, its clock, its descheduler, and its end."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest
from aiohttp import web
from structlog.testing import capture_logs

from exporter.demo import Demo, shorten_settings
from tests.cluster import PATIENCE, PODS, VMIMS, VMIS
from tests.support.serving import serving

from .facts import NOW


pytestmark = pytest.mark.asyncio


async def test_it_is_seeded_before_it_serves() -> None:
    """The first list of the demo's API server already has VMs, pods and past migrations."""
    async with Demo(lambda: NOW) as demo, aiohttp.ClientSession(demo.url) as session:
        counts = []
        for resource in (VMIS, PODS, VMIMS):
            async with session.get(resource.path()) as response:
                counts.append(len((await response.json())["items"]))

    vmis, pods, migrations = counts
    assert vmis == 24
    assert pods >= 24
    assert migrations >= 20


async def test_it_can_be_stopped_while_it_is_built() -> None:
    """A stop during a large build takes effect after the current batch."""
    stop = asyncio.Event()
    built: list[int] = []

    def show(count: int) -> None:
        built.append(count)
        if count == 300:
            stop.set()

    demo = Demo(lambda: NOW, vms=20_000, progress=show)
    await demo.build(stop)

    assert built == [100, 200, 300]


async def test_it_asks_nobody_any_more_once_it_is_stopped() -> None:
    """After a stop, the demo neither asks the exporter again nor logs an error."""
    questions = 0
    stop, asked = asyncio.Event(), asyncio.Event()

    async def answer(_: web.Request) -> web.Response:
        nonlocal questions
        questions += 1
        asked.set()
        await stop.wait()
        return web.Response(status=503)

    app = web.Application()
    app.router.add_post("/v1/verdicts", answer)
    async with serving(app) as exporter, Demo(lambda: NOW, speed=50.0) as demo:
        with capture_logs() as logs:
            running = asyncio.create_task(demo.run(exporter, stop))
            async with asyncio.timeout(PATIENCE):
                await asked.wait()
                stop.set()
                await running

    assert questions == 1
    assert logs == []


async def test_the_settings_fit_the_speed() -> None:
    """Cooldowns and backoff are Go durations. A higher speed makes them shorter."""
    assert shorten_settings()["policy"] == {
        "migrationCooldown": "20s",
        "maxMigrationCooldown": "160s",
        "migrationHistoryWindow": "1200s",
    }
    assert shorten_settings(8)["policy"]["migrationCooldown"] == "2.5s"
    assert shorten_settings(2)["kube"] == {"retryBackoff": "1s"}
