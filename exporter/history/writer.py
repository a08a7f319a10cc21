"""Decides when the stored history is written. The subclasses in `file` and `configmap` write it.

The first change is written at once, further changes at most once per interval, and the rest at
shutdown. Every failure is logged, counted and retried. Verdicts do not depend on the writing.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from functools import partial
from itertools import chain

import structlog

from exporter.engine.facts.model import Instant, Resource, Seconds
from exporter.health import Health, HistoryFault, HistoryHealth
from exporter.history.changes import PendingChanges
from exporter.tasks import run_in_slices


SLICE = 25
"""How many VMIs are processed without yielding: this takes 1 ms, 3 ms with 17 migrations each."""

log = structlog.stdlib.get_logger()


def note_fault(
    status: HistoryHealth, fault: HistoryFault, why: str, *, times: int = 1, **place: object
) -> None:
    """Count a fault of the stored history `times` times, and log it once."""
    status.faults[fault] += times
    log.warning("history_fault", fault=str(fault), why=why, **place)


class WriteSignal:
    """Wakes the writer: `awake` when there may be something to write, `urgent` to write at once."""

    def __init__(self) -> None:
        self.awake = asyncio.Event()
        self.urgent = asyncio.Event()

    def hurry(self) -> None:
        """Let the writer write now, without waiting for its interval."""
        self.urgent.set()
        self.awake.set()


@dataclass
class HistoryWriter:
    """Writes changed shards, at most once per `interval`.

    A subclass implements `_write`, which marks each shard that it has written.
    """

    changes: PendingChanges
    health: Health
    status: HistoryHealth
    signal: WriteSignal
    _: KW_ONLY
    interval: Seconds
    clock: Callable[[], Instant]

    def __post_init__(self) -> None:
        self._seen_through = partial(self.health.seen_through, Resource.VMIS)

    async def run(self) -> None:
        """Write changes until cancelled."""
        self.signal.awake.set()
        while True:
            await self.signal.awake.wait()
            self.signal.awake.clear()
            await self.flush()
            if self.changes.unwritten or self.changes.awaits_vmis:
                self.signal.awake.set()
            with suppress(TimeoutError):
                async with asyncio.timeout(self.interval):
                    await self.signal.urgent.wait()
                self.signal.urgent.clear()

    async def flush(self) -> None:
        """Write the pending changes now, if this process may write."""
        changes, now = self.changes, self.clock()
        pruning = changes.prune(self._seen_through, now)
        await run_in_slices(chain(pruning, changes.encode_changed(now)), most=SLICE)
        await self._write()
        if self.status.loaded:
            changes.settle_ends(is_writer=self.status.may_write())
        self.status.vmis = len(changes)
        self.status.size = changes.size
        if self.status.may_write() and not changes.unwritten:
            self.status.written_at = now

    async def close(self) -> None:
        """Write the pending changes at shutdown."""
        await self.flush()

    async def _write(self) -> None:
        raise NotImplementedError
