"""Requests and answers between callers and aiohttp: their order, ends and memory."""

import asyncio
import json
import socket
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Self

import pytest
from aiohttp import web

from exporter.counters import Counters
from exporter.server.http import budget, protocol
from exporter.server.http.answers import LONGEST_REPEATED, Parts, Repeatable
from exporter.server.http.budget import BUDGET, ConnectionBudget
from exporter.server.http.certificates import Certificates
from exporter.server.http.connections import MOST_HEADERS, Connections
from exporter.server.http.protocol import LONGEST_LINE
from exporter.settings import Limits
from tests.cluster import PATIENCE
from tests.program.waiting import wait_until


Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]

LARGE = BUDGET // 4
"""The bytes of a large answer: three fit into the budget."""


async def answer(request: web.BaseRequest) -> web.Response:
    """Answer with the path and the body, or with many bytes."""
    if request.path == "/large":
        return web.Response(body=bytes(LARGE))
    if request.path == "/parts":
        return web.Response(body=Parts([bytes(LARGE)], "text/plain"))
    if request.path == "/fail":
        raise ValueError("a fault of ours")
    return web.Response(text=f"<{request.path} {(await request.read()).decode()}>")


async def answer_in_pieces(request: web.BaseRequest) -> web.StreamResponse:
    """Answer with many bytes, but do not end the answer."""
    response = web.StreamResponse()
    await response.prepare(request)
    await response.write(bytes(LARGE))
    await asyncio.Event().wait()
    return response


async def answer_much(_request: web.BaseRequest) -> web.Response:
    """Answer with more bytes than the buffers of a connection hold."""
    return web.Response(body=bytes(LARGE // 2))


async def refuse(_request: web.BaseRequest) -> web.Response:
    """Answer before the body was read."""
    return web.Response(status=413)


@asynccontextmanager
async def serving(
    counters: Counters,
    handler: Handler = answer,
    certificates: Certificates | None = None,
    **limits: float,
) -> AsyncIterator[tuple[Connections, int]]:
    """Serve `handler` during the block; yields also the port."""
    server = web.Server(handler)
    connections = Connections("query", server, Limits(**limits), ConnectionBudget(counters))  # type: ignore[arg-type]
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(0.0)
        accepting = asyncio.create_task(connections.accept(listening, certificates))
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


@pytest.mark.parametrize("path", ["/large", "/parts"])
async def test_answers_that_nobody_reads_have_one_bound(path: str) -> None:
    """What an answer holds counts until it is read. Beyond the budget a connection is closed."""
    counters = Counters()
    async with serving(counters) as (_, port), AsyncExitStack() as stack:
        for _ in range(4):
            caller = stack.enter_context(
                socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)
            )
            caller.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())

        await wait_until(
            lambda: counters.rejected_connections["query"] > 0,
            what="an end of one connection",
            within=10,
        )


@pytest.mark.parametrize("handler", [answer, answer_in_pieces])
async def test_what_was_read_does_not_count(handler: Handler) -> None:
    """Connections may stay open after any number of large answers, ended or not."""
    counters = Counters()
    async with serving(counters, handler) as (_, port), AsyncExitStack() as stack:
        for _ in range(5):
            caller = await stack.enter_async_context(Caller(port))
            await caller.ask(b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n")
            await caller.read(LARGE)
    assert not counters.rejected_connections["query"]


async def test_half_requests_have_one_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """What has arrived of a request counts before it is whole."""
    monkeypatch.setattr(budget, "BUDGET", 2**20)
    counters = Counters()
    async with serving(counters) as (_, port), AsyncExitStack() as stack:
        for _ in range(4):
            caller = await stack.enter_async_context(Caller(port))
            await caller.send(post(bytes(400_000), length=500_000))

        await wait_until(
            lambda: counters.rejected_connections["query"] > 0, what="an end of one connection"
        )


async def test_the_limits_of_aiohttp() -> None:
    """If aiohttp does not know a keyword argument, it drops all, and only warns."""
    async with serving(Counters()) as (connections, _):
        handler = connections.http()
    assert handler.keepalive_timeout == Limits().idle_timeout
    assert (handler.max_line_size, handler.max_field_size) == (8190, 8190), "aiohttp's own limits"
    assert handler.max_headers == MOST_HEADERS


class Caller:
    """A connection to a server, and what it sends there."""

    def __init__(self, port: int) -> None:
        self.port = port

    async def __aenter__(self) -> Self:
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self.port)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writer.close()

    async def send(self, request: bytes) -> None:
        """Send a request, and give the server time to read it."""
        self._writer.write(request)
        await asyncio.sleep(0.02)

    async def ask(self, *parts: bytes) -> bytes:
        """Send a request in these parts; returns the head of the answer."""
        for part in parts:
            self._writer.write(part)
            await self._writer.drain()
            await asyncio.sleep(0.01 if len(parts) > 1 else 0)
        return await asyncio.wait_for(self._reader.readuntil(b"\r\n\r\n"), PATIENCE)

    async def read(self, count: int) -> bytes:
        """These many bytes of the answer's body."""
        return await asyncio.wait_for(self._reader.readexactly(count), PATIENCE)

    async def read_late(self, request: bytes, count: int) -> None:
        """Send a request, and read its answer, whose body has these many bytes, after a pause."""
        await self.send(request)
        await self.ask()
        await self.read(count)

    async def read_all(self) -> bytes:
        """What arrives until the server closes the connection."""
        return await asyncio.wait_for(self._reader.read(), PATIENCE)


HEAD = b'GET /v1/blocked HTTP/1.1\r\nHost: x\r\nIf-None-Match: "1"\r\n'
SAME = HEAD + b"\r\n"


class Unmodified:
    """A handler that answers 304, which `is_current` for as long as a test says."""

    def __init__(self) -> None:
        self.handled = self.repeated = 0
        self.current = True

    async def __call__(self, _request: web.BaseRequest) -> web.Response:
        """Answer 304."""
        self.handled += 1
        return Repeatable(self.answer_again, status=304, headers={"ETag": f'"{self.handled}"'})

    def answer_again(self, body: bytes) -> bytes | None:
        """Count the repeated answer."""
        assert not body
        self.repeated += self.current
        return b"" if self.current else None


async def test_the_same_head_gets_the_same_bytes_without_the_handler() -> None:
    """The answer to a repeated head is byte for byte the last one, while it is current."""
    handler = Unmodified()
    async with serving(Counters(), handler) as (_, port), Caller(port) as caller:
        first = await caller.ask(SAME)
        again = [await caller.ask(SAME) for _ in range(3)]
        assert (handler.handled, handler.repeated) == (1, 3)
        handler.current = False
        later = await caller.ask(SAME)
    assert first.startswith(b"HTTP/1.1 304 ")
    assert again == [first] * 3
    assert (b'ETag: "2"' in later, handler.handled) == (True, 2)


@pytest.mark.parametrize(
    "parts",
    [
        pytest.param([HEAD + b"Accept: x\r\n\r\n"], id="another-header"),
        pytest.param([SAME[:20], SAME[20:]], id="in-two-parts"),
        pytest.param([SAME.replace(b"GET", b"HEAD")], id="another-method"),
        pytest.param([HEAD + b"A: " + bytes(LONGEST_REPEATED) + b"\r\n\r\n"], id="too-long"),
    ],
)
async def test_another_head_gets_the_handler(parts: list[bytes]) -> None:
    """The handler sees every request that is not the same as the one before, in one piece."""
    handler = Unmodified()
    sent = [part.replace(b"\0", b"x") for part in parts]
    async with serving(Counters(), handler) as (_, port), Caller(port) as caller:
        await caller.ask(SAME)
        await caller.ask(*sent)
        await caller.ask(SAME)
    assert (handler.handled, handler.repeated) == (3, 0)


async def test_two_heads_at_once_are_two_requests() -> None:
    """Pipelined requests are never taken for one repeated head."""
    handler = Unmodified()
    async with serving(Counters(), handler) as (_, port), Caller(port) as caller:
        for _ in range(2):
            await caller.ask(SAME + SAME)
            await caller.ask()
    assert (handler.handled, handler.repeated) == (4, 0)


async def test_no_request_overtakes_the_one_that_is_being_answered() -> None:
    """A repeated head that arrives while another request is handled waits for its turn."""
    begun, may_end = asyncio.Queue[int](), [asyncio.Event() for _ in range(3)]
    handler = Unmodified()

    async def answer_late(request: web.BaseRequest) -> web.Response:
        response = await handler(request)
        begun.put_nowait(handler.handled)
        await may_end[handler.handled - 1].wait()
        return response

    async with serving(Counters(), answer_late) as (_, port), Caller(port) as caller:
        await caller.send(SAME)
        assert await begun.get() == 1
        await caller.send(SAME)
        may_end[0].set()
        assert await begun.get() == 2
        await caller.send(SAME)
        assert b'ETag: "1"' in await caller.ask()
        may_end[1].set()
        may_end[2].set()
        assert [b'ETag: "%d"' % n in await caller.ask() for n in (2, 3)] == [True, True]


async def test_an_answer_is_repeated_only_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the handler sees the request, so that its caller is checked and the date is right."""
    monkeypatch.setattr(protocol, "REPEATED_FOR", 0.0)
    handler = Unmodified()
    async with serving(Counters(), handler) as (_, port), Caller(port) as caller:
        await caller.ask(SAME)
        await caller.ask(SAME)
    assert (handler.handled, handler.repeated) == (2, 0)


def post(body: bytes, length: int | None = None) -> bytes:
    """A request with this body; `length`: a wrong Content-Length."""
    head = b"POST /v1/verdicts HTTP/1.1\r\nContent-Length: %d\r\nHost: x\r\n\r\n"
    return head % (len(body) if length is None else length) + body


class Reversing:
    """A handler that answers with the body of the request, reversed."""

    def __init__(self, *, in_parts: bool = False) -> None:
        """`in_parts`: the answer's body is sent in two parts."""
        self.handled = self.repeated = 0
        self.in_parts = in_parts

    async def __call__(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer through aiohttp."""
        self.handled += 1
        body = (await request.read())[::-1]
        sent = Parts([body[:1], body[1:]], "text/plain") if self.in_parts else body
        return Repeatable(self.answer_again, body=sent)

    def answer_again(self, body: bytes) -> bytes:
        """Answer without aiohttp."""
        if body == b"broken":
            raise ValueError(body)
        self.repeated += 1
        return body[::-1]


async def test_another_body_under_the_same_head_is_answered_without_the_handler() -> None:
    """The answer differs from the one before only in its body and in Content-Length."""
    handler = Reversing()
    async with serving(Counters(), handler) as (_, port), Caller(port) as caller:
        first = await caller.ask(post(b"abc"))
        assert await caller.read(3) == b"cba"
        again = await caller.ask(post(b"0123456789"))
        assert await caller.read(10) == b"9876543210"
    assert (handler.handled, handler.repeated) == (1, 1)
    assert again == first.replace(b"Content-Length: 3\r\n", b"Content-Length: 10\r\n")


@pytest.mark.parametrize(
    ("parts", "answer"),
    [
        pytest.param([post(b"broken")], b"nekorb", id="not-answered-again"),
        pytest.param([post(b"12345")[:-2], b"45"], b"54321", id="in-two-parts"),
        pytest.param([post(b"1234", length=2) + post(b"x")], b"21", id="more-than-its-length"),
        pytest.param([post(b"x" * LONGEST_REPEATED)], b"x" * LONGEST_REPEATED, id="too-long"),
        pytest.param(
            [post(b"ab").replace(b"Host: x", b"host: x")], b"ba", id="a-header-is-written-otherwise"
        ),
    ],
)
async def test_a_body_that_does_not_fit_gets_the_handler(parts: list[bytes], answer: bytes) -> None:
    """The handler sees a request that is not whole, too long, or not the same in its head."""
    handler = Reversing()
    async with serving(Counters(), handler) as (_, port), Caller(port) as caller:
        await caller.ask(post(b"abc"))
        await caller.read(3)
        await caller.ask(*parts)
        assert await caller.read(len(answer)) == answer
    assert (handler.handled, handler.repeated) == (2, 0)


async def test_an_answer_that_was_sent_in_parts_is_one_answer() -> None:
    """The next answer has its head, and nothing of its body."""
    handler = Reversing(in_parts=True)
    async with serving(Counters(), handler) as (_, port), Caller(port) as caller:
        for body in (b"abc", b"defg"):
            await caller.ask(post(body))
            assert await caller.read(len(body)) == body[::-1]


async def test_a_request_may_be_cut_anywhere() -> None:
    """Wherever the end of a head is cut, the body and the next request are found."""
    sent, answered = post(b"ok"), b"</v1/verdicts ok>"
    async with serving(Counters()) as (_, port), Caller(port) as caller:
        for cut in range(len(sent) - 8, len(sent)):
            await caller.ask(sent[:cut], sent[cut:])
            assert await caller.read(len(answered)) == answered


async def test_an_answer_is_repeated_with_its_own_head() -> None:
    """Nothing of the answer before is in it, if that one may not be repeated."""
    handler = Unmodified()

    async def answer_first(request: web.BaseRequest) -> web.Response:
        return await handler(request) if request.path == "/v1/blocked" else web.Response(status=204)

    async with serving(Counters(), answer_first) as (_, port), Caller(port) as caller:
        await caller.ask(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        first, again = await caller.ask(SAME), await caller.ask(SAME)
    assert (again, handler.repeated) == (first, 1)


async def test_the_longest_request_that_is_answered_again() -> None:
    """It has exactly as many bytes as are kept."""
    longest = HEAD + b"A: %b\r\n\r\n" % (b"x" * (LONGEST_REPEATED - len(HEAD) - 7))
    assert len(longest) == LONGEST_REPEATED
    handler = Unmodified()
    async with serving(Counters(), handler) as (_, port), Caller(port) as caller:
        await caller.ask(longest)
        await caller.ask(longest)
    assert (handler.handled, handler.repeated) == (1, 1)


async def test_a_long_answer_is_not_kept() -> None:
    """The handler sees each request whose answer is longer than what is kept of it."""
    handled = 0

    async def answer_long(_request: web.BaseRequest) -> web.Response:
        nonlocal handled
        handled += 1
        return Repeatable(lambda _: b"again", body=bytes(LONGEST_REPEATED))

    async with serving(Counters(), answer_long) as (_, port), Caller(port) as caller:
        for _ in range(2):
            await caller.ask(SAME)
            await caller.read(LONGEST_REPEATED)
    assert handled == 2


async def test_after_a_long_answer_the_next_one_is_repeated() -> None:
    """A long answer that was read holds nothing back."""
    handler = Unmodified()

    async def answer_long_first(request: web.BaseRequest) -> web.Response:
        return await (handler if request.path == "/v1/blocked" else answer_much)(request)

    async with serving(Counters(), answer_long_first) as (_, port), Caller(port) as caller:
        await caller.read_late(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", LARGE // 2)
        await caller.ask(SAME)
        await caller.ask(SAME)
    assert (handler.handled, handler.repeated) == (1, 1)


async def test_a_connection_outlives_the_time_of_its_answer() -> None:
    """Once an answer was read, its time limit ends nothing."""
    async with (
        serving(Counters(), answer_much, request_timeout=3.0) as (_, port),
        Caller(port) as caller,
    ):
        await caller.read_late(SAME, LARGE // 2)
        await asyncio.sleep(3.2)
        await caller.ask(SAME)


async def test_a_caller_far_ahead_gets_all_answers() -> None:
    """It is not read for a while: its requests, and the body that is read late, arrive whole."""
    may_read, requests = asyncio.Event(), 400

    async def answer_late(request: web.BaseRequest) -> web.Response:
        await may_read.wait()
        return web.Response(text=f"{len(await request.read()):06}")

    async with serving(Counters(), answer_late) as (_, port), Caller(port) as caller:
        await caller.send(post(bytes(900_000)))
        await caller.send(post(bytes(1000)) * requests)
        may_read.set()
        for length in [900_000] + [1000] * requests:
            await caller.ask()
            assert int(await caller.read(6)) == length


async def test_each_answer_has_its_time() -> None:
    """An answer may be read late; the next one, which nobody reads, is given up all the same."""
    async with (
        serving(Counters(), answer_much, request_timeout=4.0) as (connections, port),
        Caller(port) as caller,
    ):
        await caller.read_late(SAME, LARGE // 2)
        await caller.send(SAME)

        await wait_until(lambda: not connections.http.connections, what="the end of the connection")


async def test_an_early_answer_can_be_read() -> None:
    """The connection of a caller who still sends stays open while the answer is read."""
    async with serving(Counters(), refuse) as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(post(b"", length=1_000_000))
        assert b" 413 " in await asyncio.wait_for(reader.read(), PATIENCE)
        for _ in range(5):
            writer.write(b"x")
            await writer.drain()
            await asyncio.sleep(0.02)
        assert not writer.transport.is_closing()
        writer.close()


async def test_nothing_is_read_after_an_early_answer() -> None:
    """A caller who goes on sending is not read while it may read its answer."""
    async with serving(Counters(), refuse) as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(post(b"", length=10**9))
        assert b" 413 " in await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), PATIENCE)
        sent = 0
        with suppress(ConnectionError, TimeoutError):
            async with asyncio.timeout(0.5):
                while sent < 10**8:
                    writer.write(bytes(10**5))
                    await writer.drain()
                    sent += 10**5
        writer.transport.abort()
    assert sent < 3 * 10**7


async def test_an_answer_that_was_sent_is_not_kept() -> None:
    """A connection that stays open has nothing of the answer before."""
    bodies: list[weakref.ref[Parts]] = []

    async def answer_in_parts(_request: web.BaseRequest) -> web.Response:
        parts = Parts([b"one", b"two"], "text/plain")
        bodies.append(weakref.ref(parts))
        return web.Response(body=parts)

    async with serving(Counters(), answer_in_parts) as (_, port), Caller(port) as caller:
        await caller.ask(SAME)
        await caller.read(6)
        await wait_until(lambda: bodies[0]() is None, what="the end of the body")


@pytest.mark.parametrize(("size", "status"), [(2**14, b" 200 "), (2**14 + 1, b" 431 ")])
async def test_the_longest_head(size: int, status: bytes) -> None:
    """A head may have exactly 16 KiB."""
    sent = b"GET / HTTP/1.1\r\nHost: x\r\n" + b"A: %b\r\n" % (b"x" * 7000) + b"B: \r\n\r\n"
    sent = sent.replace(b"B: ", b"B: " + b"x" * 5000 + b"\r\nC: ")
    sent = sent[:-4] + b"x" * (size - len(sent)) + sent[-4:]
    async with serving(Counters()) as (_, port), Caller(port) as caller:
        assert status in await caller.ask(sent)


async def test_a_head_of_the_longest_lines_is_too_long_in_all() -> None:
    """Its lines have as many bytes as a line may have, so the answer blames no line."""
    lines = b"".join(b"%b: %b\r\n" % (name, b"x" * (LONGEST_LINE - 3)) for name in (b"A", b"B"))
    async with serving(Counters()) as (_, port), Caller(port) as caller:
        assert b" 431 " in await caller.ask(b"GET / HTTP/1.1\r\nHost: x\r\n%b\r\n" % lines)


async def test_requests_that_were_answered_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection may send more than the budget, one request after the other."""
    monkeypatch.setattr(budget, "BUDGET", 2**19)
    async with serving(Counters()) as (_, port), Caller(port) as caller:
        for _ in range(10):
            await caller.ask(post(b"x" * 100_000))
            await caller.read(len("</v1/verdicts >") + 100_000)


async def test_a_head_that_begins_with_the_last_body() -> None:
    """The end of a head is found, although its beginning came together with another request."""
    sent, answered = post(b"ok"), b"</v1/verdicts ok>"
    async with serving(Counters()) as (_, port), Caller(port) as caller:
        for cut in range(len(sent) - 8, len(sent)):
            await caller.ask(sent + sent[:cut])
            assert await caller.read(len(answered)) == answered
            await caller.ask(sent[cut:])
            assert await caller.read(len(answered)) == answered


async def test_connections_that_have_ended_do_not_count() -> None:
    """A listener with two connections at most serves any number of them one after the other."""
    counters = Counters()
    async with serving(counters, connections=2) as (connections, port):
        for _ in range(4):
            async with Caller(port) as caller:
                await caller.ask(SAME)
            await wait_until(lambda: not connections.http.connections, what="the connection's end")
    assert not counters.rejected_connections["query"]


async def test_an_answer_that_is_repeated_is_the_last_request() -> None:
    """The connection that asked last stays open, whether or not a handler saw its request."""
    async with (
        serving(Counters(), Unmodified(), connections=2) as (_, port),
        Caller(port) as first,
        Caller(port) as second,
    ):
        await first.ask(SAME)
        await second.ask(SAME)
        await first.ask(SAME)
        async with Caller(port) as third:
            await third.ask(SAME)
            assert await second.read_all() == b""
            await first.ask(SAME)


async def test_a_stream_that_nobody_reads_counts() -> None:
    """What the connection holds counts, also if the size of the answer is not known."""
    counters = Counters()
    async with serving(counters, answer_in_pieces) as (_, port), AsyncExitStack() as stack:
        for _ in range(5):
            caller = await stack.enter_async_context(Caller(port))
            await caller.send(SAME)
        await wait_until(
            lambda: counters.rejected_connections["query"] > 0, what="an end of one connection"
        )


async def test_a_body_that_nobody_reads_is_not_taken() -> None:
    """While a handler does not read the body, less than a megabyte of it reaches aiohttp."""

    async def count_late(request: web.BaseRequest) -> web.Response:
        await asyncio.sleep(0.2)
        return web.Response(text=f"{request.content.total_bytes:07}")

    async with serving(Counters(), count_late) as (_, port), Caller(port) as caller:
        await caller.send(post(bytes(4_000_000)))
        await caller.ask()
        assert 0 < int(await caller.read(7)) < 1_000_000


async def test_a_caller_far_ahead_is_not_read() -> None:
    """While a request is handled, few bytes of the next ones are taken from the network."""
    may_end = asyncio.Event()

    async def answer_late(_request: web.BaseRequest) -> web.Response:
        await may_end.wait()
        return web.Response()

    async with serving(Counters(), answer_late) as (_, port):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(SAME + post(bytes(1000)) * 20_000)
        for _ in range(20):
            await asyncio.sleep(0.02)
        assert writer.transport.get_write_buffer_size() > 2**20
        writer.transport.abort()
        may_end.set()
