"""What counts as contact with the API server, shown by the whole program behind a lying proxy."""

from datetime import UTC, datetime
from pathlib import Path

import pytest
from aiohttp import web

from tests.cluster import VMIS, vmi
from tests.program.exporting import exporting
from tests.support.api_servers import SimulatedStage
from tests.support.serving import serving


MOST_TRIES = 60
"""Six watches with a backoff try less often than this while the evidence becomes stale."""


@pytest.mark.parametrize(
    "body",
    [
        b"<html>\n<body>Please log in</body>\n</html>\n",
        b"<html>Please log in</html>",
        b'{"hello":"world"}\n',
        b'{"type":"SHRUGGED","object":{"metadata":{"name":"x"}}}\n',
    ],
    ids=["html", "html-without-newline", "json", "unknown-type"],
)
async def test_an_answer_that_is_no_watch_is_no_contact(
    simulated: SimulatedStage, tmp_path: Path, body: bytes
) -> None:
    """Watches answered with 200 and something else: trouble, a log line, and stale evidence."""
    lies = False

    async def answer(request: web.Request) -> web.StreamResponse:
        if lies:
            return web.Response(body=body, content_type="text/html")
        raise web.HTTPTemporaryRedirect(simulated.url + str(request.rel_url))

    namespace = await simulated.make_namespace()
    await simulated.admin.create(VMIS, vmi("a", namespace))
    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    config = {"kube": {"staleAfter": "3s", "readTimeout": "2s"}}
    async with serving(app) as url, exporting(url, tmp_path, **config) as exporter:
        lies = True
        simulated.server.cut()
        began = datetime.now(UTC)
        state = await exporter.until("/v1/status", lambda _, seen: seen["staleness"] != "fresh")
        (vmis,) = (row for row in state["resources"] if row["resource"] == VMIS.plural)
        assert datetime.fromisoformat(vmis["contactAt"]) <= began
        assert vmis["trouble"]
        tries = len(exporter.events("watch_broke"))
        assert 0 < tries < MOST_TRIES, "there is a backoff"
