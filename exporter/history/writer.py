"""When the stored history is written; the subclasses in `file` and `configmap` define where.

A writer first reads the stored history and merges it into the store. Then it writes what has
changed: the first change at once, further ones at most once per interval, and the rest at shutdown.
Every failure is logged, counted and retried; verdicts do not depend on it.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import chain

import structlog

from exporter.engine.model import Instant, Resource, Seconds
from exporter.health import Health, HistoryFault, HistoryHealth
from exporter.history.changes import PendingChanges


log = structlog.stdlib.get_logger()


def note_fault(status: HistoryHealth, fault: HistoryFault, why: str, **place: object) -> None:
    """Count and log a fault of the stored history."""
    status.faults[fault] += 1
    log.warning("history_fault", fault=str(fault), why=why, **place)


class WriteSignal:
    """Wakes the writer: `awake` when there may be something to write, `urgent` to write at once."""

    def __init__(self) -> None:
        self.awake = asyncio.Event()
        self.urgent = asyncio.Event()

    def wake(self) -> None:
        """Have changes written once the interval has passed."""
        self.awake.set()

    def hurry(self) -> None:
        """Have them written without waiting for the interval."""
        self.urgent.set()
        self.awake.set()


class HistoryWriter:
    """Writes changed shards, at most once per `interval` seconds.

    A subclass implements `_write`, which marks each shard that it has written.
    """

    def __init__(
        self,
        changes: PendingChanges,
        health: Health,
        status: HistoryHealth,
        signal: WriteSignal,
        *,
        interval: Seconds,
        clock: Callable[[], Instant],
    ) -> None:
        self._changes = changes
        self._signal = signal
        self._seen_through = partial(health.seen_through, Resource.VMIS)
        self._interval = interval
        self._clock = clock
        self._status = status

    async def run(self) -> None:
        """Write changes until cancelled."""
        while True:
            await self._signal.awake.wait()
            self._signal.awake.clear()
            await self.flush()
            if self._changes.unwritten or self._changes.awaits_vmis:
                self._signal.awake.set()
            with suppress(TimeoutError):
                async with asyncio.timeout(self._interval):
                    await self._signal.urgent.wait()
                self._signal.urgent.clear()

    async def flush(self) -> None:
        """Write the pending changes now, if this process may write."""
        changes, now = self._changes, self._clock()
        for _ in chain(changes.prune(self._seen_through, now), changes.encode_changed(now)):
            await asyncio.sleep(0)
        await self._write()
        self._status.vmis = len(changes)
        self._status.size = changes.size
        if self._status.may_write() and not changes.unwritten:
            self._status.written_at = now

    async def close(self) -> None:
        """Write what is still pending, at shutdown."""
        await self.flush()

    async def _write(self) -> None:
        raise NotImplementedError
