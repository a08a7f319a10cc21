"""The connections of a listener: accepted, counted before their TLS handshake, and limited."""

import asyncio
import logging
import socket
import ssl
from collections.abc import Awaitable
from dataclasses import dataclass, field

import structlog
from aiohttp import web
from aiohttp.http import HttpProcessingError

from exporter.engine.facts.model import Seconds
from exporter.server.http.budget import Connection, ConnectionBudget
from exporter.server.http.certificates import Certificates
from exporter.server.http.protocol import (
    LINGERING,
    LONGEST_LINE,
    RECEIVED_AT_ONCE,
    ConnectionProtocol,
    find_protocol,
)
from exporter.settings import Limits


MOST_HEADERS = 64
PLAIN_COST = 2**16
TLS_COST = 2**18 + 2**17
"""The bytes counted for an open connection. With TLS, asyncio's buffer has 256 KiB of them."""
HANDSHAKE: Seconds = 10.0
PAUSE: Seconds = 0.1
"""The pause before accepting again when the process is out of file descriptors."""

log = structlog.stdlib.get_logger()


@dataclass
class Connections:
    """Accepts connections for `server`, at most `limits.connections` at a time.

    Beyond that, `budget` closes another connection for each new one. A connection is also closed
    after `limits.idleTimeout` without a complete request head, and if its caller does not read an
    answer within `limits.requestTimeout`. Invalid HTTP is answered with problem+json, and logged
    nowhere. Bodies are not decompressed.
    """

    listener: str
    server: web.Server
    limits: Limits
    budget: ConnectionBudget
    http: web.Server = field(init=False)

    def __post_init__(self) -> None:
        self.budget.open(self.listener)
        logger = logging.getLogger(__name__)
        logger.addFilter(_is_own)
        self.http = web.Server(
            self._answer,
            request_factory=self.server.request_factory,
            handler_cancellation=True,
            logger=logger,
            access_log=None,
            keepalive_timeout=self.limits.idle_timeout,
            lingering_time=0,
            auto_decompress=False,
            max_line_size=LONGEST_LINE,
            max_field_size=LONGEST_LINE,
            max_headers=MOST_HEADERS,
        )

    async def accept(self, listening: socket.socket, certificates: Certificates | None) -> None:
        """Accept connections on a socket until cancelled. `certificates` is None without TLS."""
        loop = asyncio.get_running_loop()
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVED_AT_ONCE)
        async with asyncio.TaskGroup() as handshakes:
            while True:
                try:
                    accepted, address = await loop.sock_accept(listening)
                except OSError as error:
                    log.warning("connection_not_accepted", listener=self.listener, why=str(error))
                    await asyncio.sleep(PAUSE)
                    continue
                peer = address[0] if address else ""
                tls = None if certificates is None else certificates.context
                handshakes.create_task(self._admit(accepted, peer, tls))
                await asyncio.sleep(0)  # until it is counted

    async def close(self, within: Seconds) -> None:
        """Close all connections. Running requests have this long, and then once more as long."""
        self.http.pre_shutdown()
        await self.http.shutdown(within)

    async def _admit(self, accepted: socket.socket, peer: str, tls: ssl.SSLContext | None) -> None:
        """Count a connection, and serve it after its TLS handshake."""
        loop, this = asyncio.get_running_loop(), asyncio.current_task()
        if this is None:
            raise RuntimeError("a connection is admitted by a task")
        cost = PLAIN_COST if tls is None else TLS_COST
        connection = Connection(
            self.listener, peer, tls is not None, cost, abort=this.cancel, since=loop.time()
        )
        self.budget.add(connection, most=self.limits.connections)
        protocol = ConnectionProtocol(
            self.http, self.budget, connection, patience=self.limits.request_timeout
        )
        try:
            await loop.connect_accepted_socket(
                lambda: protocol,
                accepted,
                ssl=tls,
                ssl_handshake_timeout=None if tls is None else HANDSHAKE,
                ssl_shutdown_timeout=None if tls is None else LINGERING,
            )
        except (OSError, asyncio.CancelledError) as error:
            error.__traceback__ = None  # its frames are in a reference cycle with the connection
            accepted.close()
        finally:
            if not protocol.is_made:
                self.budget.remove(connection)

    def _answer(self, request: web.BaseRequest) -> Awaitable[web.StreamResponse]:
        return find_protocol(request).answer(request, self.server.request_handler)


def _is_own(record: logging.LogRecord) -> bool:
    """Whether an error of aiohttp is ours, and not caused by a caller."""
    error = record.exc_info[1] if record.exc_info else None
    if not isinstance(error, HttpProcessingError | ConnectionError):
        return True
    error.__traceback__ = None  # its frames are in a reference cycle with the connection
    return False
