"""The connections of a listener: their limits and time-outs, and the answer to broken HTTP."""

import asyncio
import socket
import ssl
from asyncio.sslproto import SSLProtocol
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, cast

import structlog
from aiohttp import hdrs, web
from aiohttp.helpers import DEFAULT_CHUNK_SIZE
from aiohttp.http import HttpProcessingError, HttpRequestParser, RawRequestMessage
from aiohttp.streams import EMPTY_PAYLOAD, StreamReader

from exporter.engine.facts.model import Seconds
from exporter.server.http.budget import Connection, ConnectionBudget
from exporter.server.http.certificates import Certificates
from exporter.server.http.problems import Refusal
from exporter.settings import Limits


LONGEST_LINE = 8190
"""The most bytes of a request's first line, and of each header."""
MOST_HEADERS = 64
MOST_QUEUED = 2
"""The most pipelined requests of a connection that are parsed before their turn."""
LONGEST_HEAD = 2**14
"""The most bytes of a request's first line and headers together."""
RECEIVED_AT_ONCE = 2**15
"""The size of a TLS connection's buffer. By default asyncio's buffer has 256 KiB."""
PLAIN_COST = 2**16
TLS_COST = 2**17
"""The bytes counted for an open connection. Its parsed heads and TLS buffers take less."""
LINGERING: Seconds = 1.0
"""How long a caller has to read a refusal that was sent before the request's body had ended."""
HANDSHAKE: Seconds = 10.0
SERVER = "kubevirt-eviction-exporter"
PAUSE: Seconds = 0.1
"""The pause before accepting again when the process is out of file descriptors."""

log = structlog.stdlib.get_logger()


@dataclass(frozen=True)
class Connections:
    """Accepts connections for `server`, at most `limits.connections` at a time.

    Beyond that, `budget` closes another connection for each new one. A connection is also closed
    after `limits.idleTimeout` without a complete request head, and if its caller does not read an
    answer within `limits.requestTimeout`.
    """

    listener: str
    server: web.Server
    limits: Limits
    budget: ConnectionBudget

    async def accept(self, listening: socket.socket, certificates: Certificates | None) -> None:
        """Accept connections on a socket until cancelled. `certificates` is None without TLS."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, address = await loop.sock_accept(listening)
            except OSError as error:
                log.warning("connection_not_accepted", listener=self.listener, why=str(error))
                await asyncio.sleep(PAUSE)
                continue
            peer = address[0] if address else ""
            tls = None if certificates is None else certificates.context
            try:
                await loop.connect_accepted_socket(
                    partial(self._make_protocol, peer, tls), accepted
                )
            except OSError:
                accepted.close()

    def _make_protocol(self, peer: str, tls: ssl.SSLContext | None) -> asyncio.BaseProtocol:
        connection = Connection(self.listener, peer, PLAIN_COST if tls is None else TLS_COST)
        handler = _Handler(self.server, self.limits, self.budget, connection)
        return handler if tls is None else _Tls(handler, tls)


class _Tls(SSLProtocol):
    """asyncio's TLS with smaller buffers. The connection is counted before the handshake."""

    max_size = RECEIVED_AT_ONCE

    def __init__(self, handler: "_Handler", context: ssl.SSLContext) -> None:
        super().__init__(
            asyncio.get_running_loop(),
            handler,
            context,
            None,  # type: ignore[arg-type]  # nobody waits for the handshake
            server_side=True,
            ssl_handshake_timeout=HANDSHAKE,  # type: ignore[arg-type]  # seconds
            ssl_shutdown_timeout=LINGERING,
        )
        self._handler = handler
        self._app_transport.set_read_buffer_limits(RECEIVED_AT_ONCE)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._handler.enter(cast("asyncio.Transport", transport))
        super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._handler.leave()
        _end_cycle(exc)
        super().connection_lost(exc)


class _Parser(HttpRequestParser):
    """aiohttp's parser with a limit for the whole head; aiohttp limits only each line.

    The parser gets at most `LONGEST_HEAD` bytes at a time, so it never holds much more of an
    unfinished head. After an error it gets no more bytes. `whole` is called when a request and its
    body are complete.
    """

    def __init__(self, handler: "_Handler", whole: Callable[[], None], **options: Any) -> None:
        super().__init__(handler, asyncio.get_running_loop(), DEFAULT_CHUNK_SIZE, **options)
        self._whole = whole
        self._body: StreamReader = EMPTY_PAYLOAD
        self._unfinished = 0
        self._is_broken = False

    def feed_data(  # type: ignore[override]  # the parser in C takes no options
        self, data: bytes
    ) -> tuple[list[tuple[RawRequestMessage, StreamReader]], bool, bytes]:
        if self._is_broken:
            return [], False, b""
        try:
            if len(data) <= LONGEST_HEAD:
                return self._feed(data)
            fed: list[tuple[RawRequestMessage, StreamReader]] = []
            for end in range(LONGEST_HEAD, len(data) + LONGEST_HEAD, LONGEST_HEAD):
                messages, upgraded, tail = self._feed(data[end - LONGEST_HEAD : end])
                fed += messages
                if upgraded:
                    return fed, True, tail + data[end:]
        except HttpProcessingError:
            self._is_broken = True
            raise
        return fed, False, b""

    def _feed(self, part: bytes) -> tuple[Any, bool, bytes]:
        in_body = not self._body.is_eof()
        messages, upgraded, tail = super().feed_data(part)
        if messages:
            self._body = messages[-1][1]
        self._unfinished = 0 if messages or in_body else self._unfinished + len(part)
        heads = [len(one.path) + sum(map(len, chain(*one.raw_headers))) for one, _ in messages]
        if max([self._unfinished, *heads]) > LONGEST_HEAD:
            detail = f"first line and headers may have at most {LONGEST_HEAD} bytes together"
            raise HttpProcessingError(code=431, message=detail)
        if (messages or in_body) and self._body.is_eof():
            self._whole()
        return messages, upgraded, tail


class _Handler(web.RequestHandler):
    """aiohttp's handler of one connection, which also counts the bytes that the connection holds.

    Invalid HTTP is answered with problem+json, and logs no traceback. Bodies are not decompressed.
    A caller has `limits.requestTimeout` to read an answer, which is in memory meanwhile. If an
    answer is sent before the request's body has ended, nothing more is read.
    """

    def __init__(
        self,
        server: web.Server,
        limits: Limits,
        budget: ConnectionBudget,
        connection: Connection,
    ) -> None:
        loop = asyncio.get_running_loop()
        bounds: dict[str, Any] = {
            "max_line_size": LONGEST_LINE,
            "max_field_size": LONGEST_LINE,
            "max_headers": MOST_HEADERS,
        }
        super().__init__(
            server,
            loop=loop,
            access_log=None,  # type: ignore[arg-type]  # none is written
            keepalive_timeout=limits.idle_timeout,
            lingering_time=0,
            **bounds,
        )
        # While one request is answered, aiohttp would parse the next 32.
        self._max_msg_queue_size, self._msg_queue_resume_size = MOST_QUEUED, 0
        self._parser = _Parser(
            self,
            self._note_whole,
            payload_exception=web.RequestPayloadError,
            auto_decompress=False,
            max_msg_queue_size=MOST_QUEUED,
            **bounds,
        )
        self._budget = budget
        self._limits = limits
        self._connection = connection
        self._abort: asyncio.TimerHandle | None = None

    def enter(self, transport: asyncio.Transport) -> None:
        """Count the connection, whose data `transport` carries. A second call does nothing."""
        if self._connection.transport is None:
            self._connection.transport = transport
            self._note_whole()
            self._budget.add(self._connection, most=self._limits.connections)

    def leave(self) -> None:
        """Stop counting the connection."""
        self._budget.remove(self._connection)
        if self.transport is None:
            # After a failed handshake, nothing else breaks the cycle of parser and handler.
            self._parser = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.enter(cast("asyncio.Transport", transport))
        super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        self.leave()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if data:  # empty when aiohttp goes on with data that is already counted
            self._budget.hold(self._connection, len(data))
        super().data_received(data)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._abort_later()

    def _abort_later(self) -> None:
        """Abort the connection if the rest of the answer is not read within `requestTimeout`."""
        if self._abort is None:
            after = self._limits.request_timeout
            self._abort = self._loop.call_later(after, self._connection.abort)

    def _note_whole(self) -> None:
        self._connection.since = self._loop.time()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        if request.writer.output_size > 0:
            raise ConnectionError("the response has already begun")
        if status >= 500:
            log.error("request_failed", method=request.method, exc_info=exc)
            title = detail = "Internal error"
        else:
            title = "Invalid HTTP"
            # In aiohttp's messages the first line ends in a colon, and invalid bytes follow it.
            detail = message.splitlines()[0][:200].rstrip(": ") if message else title
            if isinstance(exc, HttpProcessingError):
                status = exc.code or status
        _end_cycle(exc)
        response = Refusal(status, title, detail).answer()
        response.force_close()
        return response

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        # By default aiohttp sends its own name and Python's, with their versions.
        resp.headers.setdefault(hdrs.SERVER, SERVER)
        is_early = not request.content.is_eof()
        if is_early or resp.headers.get(hdrs.CONNECTION) == "close":
            resp.force_close()
        if self.writing_paused:
            self._abort_later()
        try:
            answered = await super().finish_response(request, resp, start_time)
        finally:
            if self._abort is not None:
                self._abort.cancel()
                self._abort = None
        if is_early and self.transport is not None:
            # The caller may still read the answer, but nothing more is read from the caller.
            self.transport.pause_reading()
            if self.transport.can_write_eof():
                self.transport.write_eof()
            await asyncio.sleep(LINGERING)
            self._connection.abort()
        if not self._messages:
            self._budget.settle(self._connection)
        return answered


def _end_cycle(error: BaseException | None) -> None:
    """Drop the traceback, because its frames are in a reference cycle with the connection."""
    if error is not None:
        error.__traceback__ = None
