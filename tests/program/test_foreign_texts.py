"""Texts of other programs are bounded and escaped where they come in, and logged once."""

import json
from pathlib import Path

import pytest
from aiohttp import web

from tests.cluster import VMIS, vmi
from tests.program.exporting import exporting
from tests.support.api_servers import SimulatedStage
from tests.support.serving import serving


HUGE = "\x1b[2J\r\n" + "x" * 5_000_000
STATUS = {"kind": "Status", "apiVersion": "v1", "code": 500, "reason": HUGE, "message": HUGE}
TRIES = 4


@pytest.mark.parametrize(
    ("status", "answer"),
    [
        pytest.param(500, STATUS, id="status"),
        pytest.param(200, {"type": "ERROR", "object": STATUS}, id="error-event"),
        pytest.param(
            200, {"type": "ADDED", "object": {"metadata": {"name": 5}, HUGE: 1}}, id="why"
        ),
        pytest.param(
            200, {"type": "ADDED", "object": {"metadata": {"name": HUGE}, "status": 5}}, id="name"
        ),
    ],
)
async def test_a_huge_text_is_logged_once_and_cut(
    simulated: SimulatedStage, tmp_path: Path, status: int, answer: object
) -> None:
    """A message of 5 MB that the server repeats is one short line of the log."""
    lies, asked = False, 0
    body = json.dumps(answer).encode() + b"\n"

    async def respond(request: web.Request) -> web.StreamResponse:
        nonlocal asked
        if lies and VMIS.plural in request.path:
            asked += 1
            return web.Response(status=status, body=body, content_type="application/json")
        raise web.HTTPTemporaryRedirect(simulated.url + str(request.rel_url))

    namespace = await simulated.make_namespace()
    await simulated.admin.create(VMIS, vmi("a", namespace))
    app = web.Application()
    app.router.add_get("/{path:.*}", respond)
    async with serving(app) as url, exporting(url, tmp_path) as exporter:
        before = len(exporter.output)
        lies = True
        simulated.server.cut(VMIS.plural)
        await exporter.until("/v1/status", lambda *_: asked >= TRIES)
        output = exporter.output[before:]

    assert len(output) < 10_000, "bytes of log"
    lines = [line for line in output.splitlines() if VMIS.plural in line and "warning" in line]
    assert 1 <= len(lines) <= 3
    assert r"\u001b" not in output
