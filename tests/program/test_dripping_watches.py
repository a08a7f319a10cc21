"""Watches that send bytes but no events, or that the server does not end."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from aiohttp import web

from exporter.engine.facts.model import Resource
from exporter.health import Restart
from exporter.kube import client
from exporter.kube.login import Login
from exporter.settings import KubeSettings
from tests.cluster import VMIS, vmi
from tests.support.api_servers import SimulatedStage
from tests.support.serving import serving
from tests.support.watching import QUICK, Following, following


BOOKMARK = {
    "type": "BOOKMARK",
    "object": {"kind": "VirtualMachineInstance", "metadata": {"resourceVersion": "9"}},
}
EVENT = json.dumps(BOOKMARK).encode() + b"\n"


@asynccontextmanager
async def dripping(
    stage: SimulatedStage, drop: bytes, *, first: bytes = b"", settings: KubeSettings
) -> AsyncIterator[tuple[Following, list[float]]]:
    """Follow a server whose watches of VMIs send `first`, then `drop` every 0.1 s, and never end.

    Yields the watch, and the times at which such a watch was opened.
    """
    opened: list[float] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        is_watch = "watch" in request.query and "sendInitialEvents" not in request.query
        if not is_watch or VMIS.plural not in request.path:
            raise web.HTTPTemporaryRedirect(stage.url + str(request.rel_url))
        opened.append(time.monotonic())
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(first)
        while True:
            await response.write(drop)
            await asyncio.sleep(0.1)

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    namespace = await stage.make_namespace()
    await stage.admin.create(VMIS, vmi("a", namespace))
    async with serving(app) as url, following(Login(url=url), settings=settings) as watch:
        await watch.ready()
        stage.server.cut(VMIS.plural)
        await watch.until(lambda: opened, what="the dripping watch")
        yield watch, opened


@pytest.mark.parametrize(
    ("first", "drop"), [(b"", b" \n"), (EVENT, b" \n"), (EVENT, b"{}\n")], ids=["", "later", "junk"]
)
async def test_other_bytes_are_silence(
    simulated: SimulatedStage, first: bytes, drop: bytes
) -> None:
    """A watch that sends white space or junk is given up after the read timeout."""
    settings = replace(QUICK, read_timeout=1.0)
    async with dripping(simulated, drop, first=first, settings=settings) as (watch, opened):
        await watch.until(lambda: watch.restarts(Resource.VMIS).get(Restart.SILENT), what="silence")
        assert time.monotonic() - opened[0] >= 1.0
        assert "no event for 1 s" in watch.health.of(Resource.VMIS)[0].trouble


async def test_a_watch_that_the_server_does_not_end(
    simulated: SimulatedStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A watch that goes on after its `timeoutSeconds` is ended by the client."""
    monkeypatch.setattr(client, "WATCH_GRACE", 0.5)
    settings = replace(QUICK, watch_timeout=1.0)
    async with dripping(simulated, EVENT, settings=settings) as (watch, opened):
        await watch.until(lambda: len(opened) > 1, what="another watch")
        assert opened[1] - opened[0] >= 1.5
        assert watch.restarts(Resource.VMIS)[Restart.ENDED] >= 1
