"""A real Chromium, and a demo that is stopped when it shows many states."""

import asyncio
import os
import random
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

import aiohttp
from playwright.async_api import Browser, async_playwright

from exporter import app
from exporter.demo import Demo, shorten_settings
from exporter.kube.login import Login
from exporter.settings import Listen, read_settings
from exporter.settings.values import Address
from tests.cluster import poll


HASTE = 25.0
"""Seconds of the demo per real second, until it is stopped."""
EPOCH = datetime(2026, 8, 22, 10, 0, 0, tzinfo=UTC).timestamp()
LIVELY = 200.0
"""How many of its own seconds the demo runs before it may be stopped."""
ANYWHERE = (Address("127.0.0.1", 0),)


class NoChromium(Exception):
    """There is no Chromium on the PATH."""


@dataclass
class Clock:
    """A clock that runs `HASTE` times faster, until it is stopped."""

    stopped_at: float | None = None
    _began: float = field(default_factory=lambda: asyncio.get_running_loop().time())

    def __call__(self) -> float:
        """The current time."""
        if self.stopped_at is not None:
            return self.stopped_at
        return EPOCH + HASTE * (asyncio.get_running_loop().time() - self._began)

    def stop(self) -> None:
        """Stop the clock now."""
        self.stopped_at = self()


@dataclass(frozen=True)
class Still:
    """A stopped demo, with its clock and the URLs of its two listeners."""

    query: str
    metrics: str
    clock: Clock

    async def get(self, path: str) -> Any:
        """The decoded answer of the query listener to a GET."""
        async with aiohttp.ClientSession() as session, session.get(self.query + path) as answer:
            return await answer.json() if "json" in answer.content_type else await answer.text()


@asynccontextmanager
async def standing_demo(seed: int = 1) -> AsyncIterator[Still]:
    """Run the demo until it has many states, then stop its clock during the block."""
    clock = Clock()
    settings = read_settings(dict(shorten_settings()))
    settings = replace(settings, listen=Listen(query=ANYWHERE, metrics=ANYWHERE))
    listening: asyncio.Future[app.Listening] = asyncio.get_running_loop().create_future()
    stop, still = asyncio.Event(), asyncio.Event()
    cluster = Demo(lambda: datetime.fromtimestamp(clock(), tz=UTC), seed=seed)
    async with cluster:
        exporter = asyncio.create_task(
            app.run(
                settings,
                Login(url=cluster.url),
                stop,
                clock=clock,
                rng=random.Random(seed),
                on_listening=listening.set_result,
            )
        )
        try:
            urls = await listening
            demo = Still(urls.query[0], urls.metrics[0], clock)
            playing = asyncio.create_task(cluster.run(demo.query, still))
            await poll(lambda: _find_lively(demo), within=300, what="a lively moment")
            clock.stop()
            still.set()
            await playing
            await poll(lambda: _find_settled(demo), what="a store that has settled")
            yield demo
        finally:
            stop.set()
            await exporter


async def _find_lively(demo: Still) -> bool:
    """Whether there are evacuations in many states, some stuck, and VMs in cooldown."""
    if demo.clock() < EPOCH + LIVELY:
        return False
    evacuations = (await demo.get("/v1/evacuations")).get("evacuations", [])
    blocked = (await demo.get("/v1/blocked")).get("blocked", [])  # missing in a 503
    states = {evacuation["state"] for evacuation in evacuations}
    reasons = [vmi["reason"] for vmi in blocked]
    return (
        len(states) >= 4
        and any(evacuation["stuck"] for evacuation in evacuations)
        and any(evacuation["backoff"] for evacuation in evacuations)
        and reasons.count("cooldown") >= 4
        and len(set(reasons)) >= 2
    )


async def _find_settled(demo: Still) -> bool:
    """Whether the answers have not changed for half a second."""
    paths = ("/v1/evacuations", "/v1/blocked")
    before = [await demo.get(path) for path in paths]
    await asyncio.sleep(0.5)
    return before == [await demo.get(path) for path in paths]


@asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    """Run the Chromium of this machine during the block. Raises `NoChromium`."""
    executable = shutil.which("chromium") or shutil.which("chromium-browser")
    if executable is None:
        raise NoChromium("not run: there is no chromium on the PATH")
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=executable, args=arguments)
        try:
            yield browser
        finally:
            await browser.close()
