"""Malformed bytes from everything that the exporter reads, shown by the whole program."""

import asyncio
import json
from base64 import b64encode
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from exporter.history.format import seal
from tests.cluster.users import open_kubeconfig
from tests.support.api_servers import SimulatedStage
from tests.support.program import program
from tests.support.serving import serving
from tests.support.stored_history import keeping, until_fault


NESTED_JSON = b'{"x":' + b"[" * 100_000
INVALID_TEXT = b'{"spec":{"holderIdentity":"\xff"},"status":{"user":{"username":"\xff"}}}'
NESTED_SHARD = seal([b"\x91" * 100_000 + b"\xc0"])
"""A shard with a correct checksum, whose only entry is nested too deeply."""
LISTED = {
    "type": "BOOKMARK",
    "object": {
        "metadata": {"resourceVersion": "2", "annotations": {"k8s.io/initial-events-end": "true"}}
    },
}


@pytest.mark.parametrize("body", [NESTED_JSON, INVALID_TEXT], ids=["nested", "utf-8"])
async def test_malformed_answers_of_the_api_server(
    simulated: SimulatedStage, tmp_path: Path, body: bytes
) -> None:
    """A ConfigMap and a Lease are counted faults; a caller whose review is malformed gets 503."""
    shard = {
        "metadata": {"namespace": "kev", "name": "history-00", "resourceVersion": "1"},
        "binaryData": {"history": b64encode(NESTED_SHARD).decode()},
    }

    over = asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        if request.path.endswith(("/leases/history", "/tokenreviews")):
            return web.Response(body=body, content_type="application/json")
        if not request.path.endswith("/configmaps"):
            raise web.HTTPTemporaryRedirect(simulated.url + str(request.rel_url))
        response = web.StreamResponse()
        await response.prepare(request)
        for event in ({"type": "ADDED", "object": shard}, LISTED):
            await response.write(json.dumps(event).encode() + b"\n")
        await over.wait()
        return response

    app = web.Application(client_max_size=2**20)
    app.router.add_route("*", "/{path:.*}", answer)
    config = {**keeping("kev"), "auth": {"query": "kubernetes"}}
    async with serving(app) as url:
        login = open_kubeconfig(tmp_path / "login", url)
        async with program(tmp_path, "--kubeconfig", str(login), config=config) as exporter:
            await exporter.ready()
            await until_fault(exporter, "damaged")
            await until_fault(exporter, "lease_malformed")
            headers = {"Authorization": "Bearer token"}
            async with (
                aiohttp.ClientSession(headers=headers) as session,
                session.get(f"{exporter.query}/v1/status") as answered,
            ):
                assert answered.status == 503
            assert len(exporter.events("lease_unreachable")) == 1
            assert await exporter.end() == 0
        over.set()
