"""Requests and answers between callers and aiohttp: their order, ends and memory."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from aiohttp import web

from exporter.counters import Counters
from exporter.server.http.budget import BUDGET, ConnectionBudget
from exporter.server.http.connections import MOST_HEADERS, Connections
from exporter.server.http.protocol import LONGEST_LINE
from exporter.settings import Limits
from tests.cluster import PATIENCE, poll


LARGE = BUDGET // 4
"""The bytes of a large answer: three fit into the budget."""


async def answer(request: web.BaseRequest) -> web.Response:
    """Answer with the path and the body, or with many bytes."""
    if request.path == "/large":
        return web.Response(body=bytes(LARGE))
    if request.path == "/fail":
        raise ValueError("a fault of ours")
    return web.Response(text=f"<{request.path} {(await request.read()).decode()}>")


@asynccontextmanager
async def serving(counters: Counters) -> AsyncIterator[tuple[Connections, int]]:
    """Serve `answer` during the block; yields the port."""
    server = web.Server(answer)
    connections = Connections("query", server, Limits(), ConnectionBudget(counters))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(0.0)
        accepting = asyncio.create_task(connections.accept(listening, None))
        try:
            yield connections, listening.getsockname()[1]
        finally:
            accepting.cancel()
            await asyncio.gather(accepting, return_exceptions=True)
            await connections.close(0.0)


LAST = b"Host: x\r\nConnection: close\r\n"


@pytest.mark.parametrize(
    ("sent", "answered"),
    [
        pytest.param(
            b"POST /a HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\none"
            b"\r\n\r\nPOST /b HTTP/1.1\r\n%bContent-Length: 6\r\n\r\n\r\n\r\nok" % LAST,
            ["</a one>", "</b \r\n\r\nok>"],
            id="pipelined-bodies",
        ),
        pytest.param(
            b"POST /a HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
            b"3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n",
            ["</a onetwo>"],
            id="a-chunked-body-is-the-last",
        ),
        pytest.param(
            b"POST /a HTTP/1.1\r\n%bExpect: 100-continue\r\nContent-Length: 2\r\n\r\nok" % LAST,
            ["</a ok>"],
            id="expect",
        ),
    ],
)
@pytest.mark.parametrize("at_once", [1, 7, 10_000])
async def test_requests_and_their_bodies(sent: bytes, answered: list[str], at_once: int) -> None:
    """Each request gets its own body, however the bytes arrive."""
    async with serving(Counters()) as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for at in range(0, len(sent), at_once):
            writer.write(sent[at : at + at_once])
            await writer.drain()
            await asyncio.sleep(0)
        read = (await asyncio.wait_for(reader.read(), PATIENCE)).decode()
        writer.close()
    assert [f"<{piece.partition('>')[0]}>" for piece in read.split("<")[1:]] == answered


async def test_a_fault_of_ours() -> None:
    """An exception of a handler is answered with a problem that does not show it."""
    async with serving(Counters()) as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /fail HTTP/1.1\r\nHost: x\r\n\r\n")
        head, _, body = (await asyncio.wait_for(reader.read(), PATIENCE)).partition(b"\r\n\r\n")
        writer.close()
    assert b" 500 " in head.splitlines()[0]
    assert json.loads(body)["detail"] == "Internal error"


async def test_answers_that_nobody_reads_have_one_bound() -> None:
    """What an answer holds counts until it is read. Beyond the budget a connection is closed."""
    counters = Counters()
    async with serving(counters) as (_, port), AsyncExitStack() as stack:
        for _ in range(4):
            caller = stack.enter_context(
                socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)
            )
            caller.sendall(b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n")

        async def is_closed() -> bool:
            return counters.rejected_connections["query"] > 0

        await poll(is_closed, what="an end of one connection", within=10)


async def test_the_limits_of_aiohttp() -> None:
    """If aiohttp does not know a keyword argument, it drops all, and only warns."""
    async with serving(Counters()) as (connections, _):
        handler = connections.http()
    assert handler.keepalive_timeout == Limits().idle_timeout
    assert (handler.max_line_size, handler.max_field_size) == (LONGEST_LINE, LONGEST_LINE)
    assert handler.max_headers == MOST_HEADERS
