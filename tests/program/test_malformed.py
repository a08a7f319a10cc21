"""Malformed bytes from everything that the exporter reads, shown by the whole program."""

from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from tests.program.exporting import exporting
from tests.program.waiting import wait_until
from tests.support.api_servers import SimulatedStage
from tests.support.serving import serving


NESTED_JSON = b'{"x":' + b"[" * 100_000
INVALID_TEXT = b'{"spec":{"holderIdentity":"\xff"},"status":{"user":{"username":"\xff"}}}'


@pytest.mark.parametrize("body", [NESTED_JSON, INVALID_TEXT], ids=["nested", "utf-8"])
async def test_malformed_answers_of_the_api_server(
    simulated: SimulatedStage, tmp_path: Path, body: bytes
) -> None:
    """A malformed Lease is logged once; a caller whose review is malformed gets 503."""

    async def answer(request: web.Request) -> web.StreamResponse:
        if "/leases/" in request.path or request.path.endswith("/tokenreviews"):
            return web.Response(body=body, content_type="application/json")
        raise web.HTTPTemporaryRedirect(simulated.url + str(request.rel_url))

    app = web.Application(client_max_size=2**20)
    app.router.add_route("*", "/{path:.*}", answer)
    config = {"events": True, "auth": {"query": "kubernetes"}}
    async with serving(app) as url, exporting(url, tmp_path, **config) as exporter:
        await wait_until(lambda: exporter.events("lease_unreachable"), what="the Lease")
        headers = {"Authorization": "Bearer token"}
        async with (
            aiohttp.ClientSession(headers=headers) as session,
            session.get(f"{exporter.query}/v1/status") as answered,
        ):
            assert answered.status == 503
        assert len(exporter.events("lease_unreachable")) == 1
        assert await exporter.end() == 0
