"""The long polls of `/v1/blocked`: callers that wait until the blocked set changes.

Callers that wait for the same checkpoint share one queue with one timer. After a change, the set is
computed once for all of them. They are woken only if the set differs, and in batches: to wake
10,000 callers at once, or for every change, would leave no time for verdicts.
"""

import asyncio
import math
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from exporter.engine.model import Checkpoint, Seconds
from exporter.server.blocked_set import Blocked, BlockedSet


SETTLING: Seconds = 0.05
"""How long changes are collected before the set is computed for the waiting callers."""
SHARE = 10
"""The pause before a computation is at least this many times as long as the last computation."""
CHECK_EVERY: Seconds = 1.0
"""How often to check whether lost contact is back: there is no notification of that."""
BATCH = 20
"""How many callers are woken at once; answering each takes 0.1 ms."""


@dataclass
class _Queue:
    """The callers that wait until the set of one checkpoint differs from `etag`."""

    etag: str
    callers: dict[asyncio.Future[None], None] = field(default_factory=dict)
    timer: asyncio.TimerHandle | None = None


@dataclass
class LongPolls:
    """Wakes the `waiting` callers when the blocked set changes."""

    blocked: BlockedSet
    waiting: int = 0
    _queues: dict[Checkpoint | None, _Queue] = field(default_factory=dict)
    _settling: asyncio.TimerHandle | None = None
    _closed: bool = False
    _checks: set[asyncio.Task[None]] = field(default_factory=set)

    async def wait(self, checkpoint: Checkpoint | None, etag: str, wait: Seconds) -> Blocked:
        """Wait until the set differs from `etag`, for at most `wait` seconds; returns the set."""
        loop = asyncio.get_running_loop()
        until = loop.time() + wait
        while True:
            blocked = await self.blocked.read(checkpoint)
            left = until - loop.time()
            if blocked.etag != etag or left <= 0 or self._closed:
                return blocked
            await self._queue_up(checkpoint, blocked, left)

    def note_change(self) -> None:
        """Check soon whether the set has changed, because the store or the health has."""
        if self._queues and self._settling is None:
            loop = asyncio.get_running_loop()
            pause = max(SETTLING, SHARE * self.blocked.cost)
            self._settling = loop.call_later(pause, self._start, self._check_all)

    def close(self) -> None:
        """Answer all waiting callers now."""
        self._closed = True
        for check in self._checks:
            check.cancel()
        for checkpoint in list(self._queues):
            self._release(checkpoint)

    async def _queue_up(
        self, checkpoint: Checkpoint | None, blocked: Blocked, left: Seconds
    ) -> None:
        """Wait until the set changes, at most `left` seconds."""
        queue = self._queues.get(checkpoint)
        if queue is not None and queue.etag != blocked.etag:
            self._release(checkpoint)
            queue = None
        if queue is None:
            queue = self._queues[checkpoint] = _Queue(blocked.etag)
            self._schedule_check(checkpoint, queue, blocked)
        if not self.blocked.is_current(blocked):
            # There was a change during the computation, when there was no queue to check.
            self.note_change()
        caller = asyncio.get_running_loop().create_future()
        queue.callers[caller] = None
        self.waiting += 1
        try:
            async with asyncio.timeout(left):
                await caller
        except TimeoutError:
            pass
        finally:
            self.waiting -= 1
            queue.callers.pop(caller, None)

    def _start(self, check: Callable[..., Coroutine[None, None, None]], *of: Any) -> None:
        """Begin a check in a task of its own."""
        task = asyncio.get_running_loop().create_task(check(*of))
        self._checks.add(task)
        task.add_done_callback(self._checks.discard)

    async def _check_all(self) -> None:
        self._settling = None
        for checkpoint in list(self._queues):
            await self._check(checkpoint)

    async def _check(self, checkpoint: Checkpoint | None) -> None:
        """Wake the callers if the set has changed, else check again later."""
        queue = self._queues.get(checkpoint)
        if queue is None:
            return
        if queue.callers:
            blocked = await self.blocked.read(checkpoint)
            if self._queues.get(checkpoint) is not queue:
                return  # the callers of this queue were woken meanwhile
            if blocked.etag == queue.etag:
                self._schedule_check(checkpoint, queue, blocked)
                return
        self._release(checkpoint)

    def _schedule_check(
        self, checkpoint: Checkpoint | None, queue: _Queue, blocked: Blocked
    ) -> None:
        """Schedule the next check for the time at which the clock alone may change the set."""
        if queue.timer is not None:
            queue.timer.cancel()
        health, now = self.blocked.health, self.blocked.clock()
        turns = (blocked.changes_at, health.turns_at(now) or math.inf)
        is_silent = blocked.stale or health.find_dead(now)
        pause = min(*(turn - now for turn in turns), CHECK_EVERY if is_silent else math.inf)
        if pause < math.inf:
            loop = asyncio.get_running_loop()
            delay = max(pause, 0.001)
            queue.timer = loop.call_later(delay, self._start, self._check, checkpoint)

    def _release(self, checkpoint: Checkpoint | None) -> None:
        queue = self._queues.pop(checkpoint)
        if queue.timer is not None:
            queue.timer.cancel()
        _wake(queue.callers)


def _wake(callers: dict[asyncio.Future[None], None]) -> None:
    """Wake all callers, `BATCH` per turn of the event loop."""
    for caller in list(islice(callers, BATCH)):
        del callers[caller]
        if not caller.done():
            caller.set_result(None)
    if callers:
        asyncio.get_running_loop().call_soon(_wake, callers)
