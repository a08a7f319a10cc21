"""Limits what is held for callers: connections, unanswered requests and unread answers.

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
TRIMMED_EVERY = BUDGET // 4
"""When this many bytes were released, freed memory is returned to the system."""
TRIMMED_AFTER: Seconds = 2.0
"""The pause before memory is returned, in which the closed connections are freed."""


@dataclass(eq=False, slots=True)
class Connection:
    """An open connection, with the number of bytes that it holds.

    `peer` is an IP address, or "" for a unix socket. `cost` is what counts even without requests
    and answers: the bytes of buffers and one parsed request head. `abort` closes the connection at
    once, without an answer. `since` is when the last request was complete or, before the first one,
    when the connection began (event loop's clock).
    """

    listener: str
    peer: str
    is_tls: bool
    cost: int
    abort: Callable[[], object]
    since: Seconds
    held: int = 0


class ConnectionBudget:
    """The open connections of all listeners, also those in a TLS handshake."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._open: dict[str, dict[Connection, None]] = {}
        self._held = 0
        self._released = 0  # since memory was last returned

    def open(self, listener: str) -> None:
        """Count the closed connections of a listener from 0 on."""
        self._counters.rejected_connections[listener] += 0

    def add(self, connection: Connection, *, most: int) -> None:
        """Add a connection. If its listener already has `most`, another connection is closed."""
        of_listener = self._open.setdefault(connection.listener, {})
        if len(of_listener) >= most:
            self._close_one(of_listener, lambda _: 1)
        of_listener[connection] = None
        self.hold(connection, 0)

    def hold(self, connection: Connection, count: int) -> None:
        """Set how many bytes a connection holds beyond its `cost`.

        Above the budget, connections are closed.
        """
        if connection in self._open[connection.listener]:
            self._count(connection, connection.cost + count)
            while self._held > BUDGET:
                self._close_one(chain(*self._open.values()), lambda connection: connection.held)

    def remove(self, connection: Connection) -> None:
        """Remove a closed connection. A second call does nothing."""
        self._count(connection, 0)
        self._open[connection.listener].pop(connection, None)

    def _count(self, connection: Connection, held: int) -> None:
        self._held += held - connection.held
        self._released += max(0, connection.held - held)
        connection.held = held
        if self._released >= TRIMMED_EVERY:
            self._released = 0
            asyncio.get_running_loop().call_later(TRIMMED_AFTER, trim_memory)

    def _close_one(
        self, connections: Iterable[Connection], weigh: Callable[[Connection], int]
    ) -> None:
        candidates = [*connections]
        totals: Counter[str] = Counter()
        for connection in candidates:
            totals[connection.peer] += weigh(connection)
        most = max(totals.values())
        chosen = min(
            (connection for connection in candidates if totals[connection.peer] == most),
            key=lambda connection: connection.since,
        )
        self.remove(chosen)
        self._counters.rejected_connections[chosen.listener] += 1
        chosen.abort()
