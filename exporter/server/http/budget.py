"""Limits what callers may hold: connections, and bytes of unanswered requests.

Nobody needs a token to open a connection or to send half a request. So a connection is closed when
a listener has too many, or when the connections of all listeners hold more than `BUDGET` bytes. The
peer that holds the most loses the connection whose last complete request is the oldest.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain

from exporter.counters import Counters
from exporter.engine.facts.model import Seconds
from exporter.memory import trim_memory


BUDGET = 128 * 2**20
"""The most bytes that all connections may hold.

docs/reference.md derives the memory limit of the manifests from this number.
"""
TRIMMED_BELOW = BUDGET // 4
"""When the held bytes fall below this, freed memory is returned to the system."""
TRIMMED_AFTER: Seconds = 2.0
"""The pause before memory is returned, in which the closed connections are freed."""


@dataclass(eq=False, slots=True)
class Connection:
    """An open connection, with the number of bytes that it holds.

    `peer` is an IP address, or "" for a unix socket. `cost` is what counts even without
    unanswered requests: the bytes of buffers and one parsed request head. `since` is when the last
    request was complete or, before the first one, when the connection began (event loop's clock).
    """

    listener: str
    peer: str
    cost: int
    since: Seconds = 0.0
    held: int = 0
    transport: asyncio.Transport | None = None

    def abort(self) -> None:
        """Close the connection at once, without an answer."""
        if self.transport is not None:
            self.transport.abort()


class ConnectionBudget:
    """The open connections of all listeners, also those in a TLS handshake."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._open: dict[str, dict[Connection, None]] = {}
        self._held = 0

    def add(self, connection: Connection, *, most: int) -> None:
        """Add a connection. If its listener already has `most`, another connection is closed."""
        of_listener = self._open.setdefault(connection.listener, {})
        if len(of_listener) >= most:
            self._close_one(of_listener, lambda _: 1)
        of_listener[connection] = None
        self.hold(connection, connection.cost)

    def hold(self, connection: Connection, count: int) -> None:
        """Count more bytes for a connection. Above the budget, connections are closed."""
        if connection not in self._open[connection.listener]:
            return
        connection.held += count
        if self._held >= TRIMMED_BELOW > self._held + count:
            asyncio.get_running_loop().call_later(TRIMMED_AFTER, trim_memory)
        self._held += count
        while self._held > BUDGET:
            self._close_one(chain(*self._open.values()), lambda one: one.held)

    def settle(self, connection: Connection) -> None:
        """Count only `cost` for a connection, because all its requests are answered."""
        self.hold(connection, connection.cost - connection.held)

    def remove(self, connection: Connection) -> None:
        """Remove a closed connection."""
        self.hold(connection, -connection.held)
        self._open[connection.listener].pop(connection, None)

    def _close_one(
        self, connections: Iterable[Connection], weigh: Callable[[Connection], int]
    ) -> None:
        candidates = [*connections]
        totals: Counter[str] = Counter()
        for one in candidates:
            totals[one.peer] += weigh(one)
        most = max(totals.values())
        chosen = min(
            (one for one in candidates if totals[one.peer] == most), key=lambda one: one.since
        )
        self.remove(chosen)
        self._counters.rejected_connections[chosen.listener] += 1
        chosen.abort()
