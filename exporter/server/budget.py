"""What the callers of all listeners may hold: connections, and bytes of unanswered requests.

Nobody needs a token to open a connection or to send half a request. So when a listener has as many
connections as it may have, or all of them together hold more than `BUDGET`, one is closed: of the
peer that holds the most, the one whose last whole request is the longest ago.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain

from exporter.counters import Counters
from exporter.engine.model import Seconds


BUDGET = 128 * 2**20
"""Bytes; docs/reference.md derives the memory limit of the manifests from it."""
KEPT = BUDGET // 4
"""Once all hold fewer bytes than this again, freed memory is returned to the system."""
TRIMMED_AFTER: Seconds = 2.0
"""Until then the closed connections are freed."""


@dataclass(eq=False, slots=True)
class Connection:
    """An open connection: whose it is, when it last sent a whole request, and what it holds.

    `cost`: the bytes that it counts as even without a request, for its buffers and one parsed
    request head. `peer` is an IP address; "" for a unix socket.
    """

    listener: str
    peer: str
    cost: int
    since: Seconds = 0.0
    held: int = 0
    transport: asyncio.Transport | None = None

    def abort(self) -> None:
        """Close it at once, without a word."""
        if self.transport is not None:
            self.transport.abort()


class ConnectionBudget:
    """The open connections of all listeners, from the first byte of the TLS handshake."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._open: dict[str, dict[Connection, None]] = {}
        self._held = 0

    def add(self, connection: Connection, *, most: int) -> None:
        """Add a new connection; if its listener has `most` already, one of those is closed."""
        of_listener = self._open.setdefault(connection.listener, {})
        if len(of_listener) >= most:
            self._close_one(of_listener, lambda _: 1)
        of_listener[connection] = None
        self.hold(connection, connection.cost)

    def hold(self, connection: Connection, count: int) -> None:
        """Count further bytes that a connection holds; close others, or it, above the budget."""
        if connection not in self._open[connection.listener]:
            return
        connection.held += count
        if self._held >= KEPT > self._held + count:
            asyncio.get_running_loop().call_later(TRIMMED_AFTER, _trim_memory)
        self._held += count
        while self._held > BUDGET:
            self._close_one(chain(*self._open.values()), lambda one: one.held)

    def settle(self, connection: Connection) -> None:
        """Forget the bytes of a connection: its requests are answered."""
        self.hold(connection, connection.cost - connection.held)

    def remove(self, connection: Connection) -> None:
        """Forget a closed connection."""
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
        self._counters.refused_connections[chosen.listener] += 1
        chosen.abort()


def _trim_memory() -> None:
    """Give freed memory back; glibc by itself keeps all below its highest block in use."""
    import ctypes

    with suppress(AttributeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)
