"""Connections of a listener: how many, how long, and what they get that speak no right HTTP."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import structlog
from aiohttp import web

from exporter.counters import Counters
from exporter.model import Seconds
from exporter.settings import Limits
from exporter.wire import Problem


LONGEST_LINE = 8190
"""Bytes of a request's first line, and of each of its headers."""
MOST_HEADERS = 64
LINGERING: Seconds = 1.0
"""For how long the rest of a body is read that was refused, so that the refusal is heard."""

log = structlog.stdlib.get_logger()


@dataclass(frozen=True)
class Connections:
    """Makes the protocol of each connection to `server`, at most `limits.connections` at a time.

    One more is closed at once, and counted under `listener`. A connection is closed once it has
    been idle, or has not ended a request's head, for `limits.idleTimeout`.
    """

    listener: str
    server: web.Server
    limits: Limits
    counters: Counters

    def __call__(self) -> asyncio.Protocol:
        """The protocol of the next connection."""
        if len(self.server.connections) >= self.limits.connections:
            return _Refused(self._count)
        return _Connection(
            self.server,
            loop=asyncio.get_running_loop(),
            access_log=None,  # type: ignore[arg-type]  # what AppRunner passes for none
            keepalive_timeout=self.limits.idle_timeout,
            max_line_size=LONGEST_LINE,
            max_field_size=LONGEST_LINE,
            max_headers=MOST_HEADERS,
            lingering_time=LINGERING,
        )

    def _count(self) -> None:
        self.counters.refused_connections[self.listener] += 1


class _Refused(asyncio.Protocol):
    def __init__(self, count: Callable[[], None]) -> None:
        self._count = count

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._count()
        if isinstance(transport, asyncio.Transport):
            transport.abort()


class _Connection(web.RequestHandler):
    """aiohttp's own, but for the answer to what is no HTTP: a problem+json, and no traceback."""

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        if request.writer.output_size > 0:
            raise ConnectionError("the answer has begun already")
        if status >= 500:
            log.error("request_failed", method=request.method, exc_info=exc)
        title = "Not HTTP as it is taken here" if status < 500 else "Internal error"
        detail = (message or "").splitlines()[0:1]
        problem = Problem(
            title=title,
            status=status,
            detail=(detail[0] if detail and status < 500 else title)[:200],
        )
        response = web.Response(
            status=status,
            body=msgspec.json.encode(problem),
            content_type="application/problem+json",
        )
        response.force_close()
        return response
