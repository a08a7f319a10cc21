"""The connections of a listener: their limit and time-outs, and the answer to broken HTTP."""

import asyncio
import socket
import ssl
from typing import Any

import structlog
from aiohttp import hdrs, web
from aiohttp.http_exceptions import ContentEncodingError

from exporter.counters import Counters
from exporter.engine.model import Seconds
from exporter.server.certificates import Certificates
from exporter.server.problems import answer_problem
from exporter.server.schemas import Problem
from exporter.settings import Limits


LONGEST_LINE = 8190
"""The most bytes of a request's first line, and of each header."""
MOST_HEADERS = 64
LINGERING: Seconds = 1.0
"""How long to go on reading a refused body, so that the caller reads the refusal."""
HANDSHAKE: Seconds = 10.0
ENCODINGS = "identity, gzip, deflate"
"""The content encodings of a request that can be read."""
SERVER = "kubevirt-eviction-exporter"
PAUSE: Seconds = 0.1
"""The pause before accepting again when the process is out of file descriptors."""

log = structlog.stdlib.get_logger()


class Connections:
    """Accepts connections for `server`, at most `limits.connections` at a time.

    Any more are counted and closed at once, before they cost a TLS handshake with 256 kB of
    buffers. A connection that is idle or has not sent a complete request head for
    `limits.idleTimeout` is closed, and so is one that does not take its answer within
    `limits.requestTimeout`.
    """

    def __init__(
        self, listener: str, server: web.Server, limits: Limits, counters: Counters
    ) -> None:
        self._listener = listener
        self._server = server
        self._limits = limits
        self._counters = counters
        self._greeted: set[asyncio.Task[None]] = set()

    async def accept(self, listening: socket.socket, certificates: Certificates | None) -> None:
        """Accept connections on a listening socket until cancelled; None: without TLS."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(listening)
            except OSError as error:
                log.warning("connection_not_accepted", listener=self._listener, why=str(error))
                await asyncio.sleep(PAUSE)
                continue
            if len(self._server.connections) + len(self._greeted) >= self._limits.connections:
                connection.close()
                self._counters.refused_connections[self._listener] += 1
                continue
            tls = None if certificates is None else certificates.context
            greeting = loop.create_task(self._greet(connection, tls))
            self._greeted.add(greeting)
            greeting.add_done_callback(self._greeted.discard)

    async def _greet(self, connection: socket.socket, tls: ssl.SSLContext | None) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                self._make_protocol,
                connection,
                ssl=tls,
                ssl_handshake_timeout=None if tls is None else HANDSHAKE,
            )
        except (OSError, TimeoutError):
            connection.close()

    def _make_protocol(self) -> asyncio.Protocol:
        return _Connection(
            self._server,
            answered_within=self._limits.request_timeout,
            loop=asyncio.get_running_loop(),
            access_log=None,
            keepalive_timeout=self._limits.idle_timeout,
            max_line_size=LONGEST_LINE,
            max_field_size=LONGEST_LINE,
            max_headers=MOST_HEADERS,
            lingering_time=LINGERING,
        )


class _Connection(web.RequestHandler):
    """aiohttp's handler, but broken HTTP gets a problem+json and no traceback in the log.

    It answers 415 to a content encoding that it cannot read, with those that it can. A caller has
    `answered_within` to read an answer, which is kept in memory meanwhile.
    """

    def __init__(self, server: web.Server, *, answered_within: Seconds, **options: Any) -> None:
        super().__init__(server, **options)
        self._answered_within = answered_within

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
        headers: dict[str, str] = {}
        title = detail = "Internal error"
        if isinstance(exc, ContentEncodingError):
            status, title = 415, "Unsupported encoding"
            detail = f"Content-Encoding: expected one of {ENCODINGS}"
            headers[hdrs.ACCEPT_ENCODING] = ENCODINGS
        elif status < 500:
            title = "Invalid HTTP"
            # aiohttp quotes what is wrong below a first line that ends in a colon.
            detail = message.splitlines()[0][:200].rstrip(": ") if message else title
        response = answer_problem(Problem(title=title, status=status, detail=detail), headers)
        response.force_close()
        return response

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        # Otherwise aiohttp names itself and Python, with their versions.
        resp.headers.setdefault(hdrs.SERVER, SERVER)
        try:
            async with asyncio.timeout(self._answered_within):
                return await super().finish_response(request, resp, start_time)
        except TimeoutError:
            if self.transport is not None:
                self.transport.abort()
            return resp, True
