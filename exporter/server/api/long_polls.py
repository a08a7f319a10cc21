"""The long polls of `/v1/blocked`: callers that wait until the blocked set changes.

Callers that wait for the same checkpoint share one queue with one task. After a change, the task
computes the set once for all of them. It wakes them only if the set differs, and in batches. To
wake 10,000 callers at once, or after every change, would leave no time for verdicts.
"""

import asyncio
import math
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice

from exporter.engine.facts.model import Checkpoint, Seconds
from exporter.server.api.blocked_set import Blocked, BlockedSet
from exporter.tasks import noting_failure


SETTLING: Seconds = 0.05
"""For how long changes are collected before the set is computed for the waiting callers."""
SHARE = 10
"""The pause before a computation is at least this many times as long as the last computation."""
CHECK_EVERY: Seconds = 1.0
"""How often to check whether lost contact is restored, because no event reports it."""
TASK = "long_polls"
BATCH = 20
"""How many callers are woken at once; answering each takes 0.1 ms."""


@dataclass
class _Queue:
    """The callers that wait until the set of one checkpoint differs from `etag`."""

    etag: str
    callers: dict[asyncio.Future[None], None] = field(default_factory=dict)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None


@dataclass
class LongPolls:
    """Wakes the `waiting` callers when the blocked set changes.

    `failures` counts unexpected exceptions by task.
    """

    blocked: BlockedSet
    failures: Counter[str] = field(default_factory=Counter)
    waiting: int = 0
    _queues: dict[Checkpoint | None, _Queue] = field(default_factory=dict)
    _closed: bool = False

    def __post_init__(self) -> None:
        self.failures[TASK] += 0  # a series from the start

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

    def record_change(self) -> None:
        """Check soon whether the set has changed, because the store or the health has changed."""
        for queue in self._queues.values():
            queue.changed.set()

    def close(self) -> None:
        """Answer all waiting callers now."""
        self._closed = True
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
            pause = self._seconds_until_change(blocked)
            queue.task = asyncio.create_task(self._watch(checkpoint, queue, pause))
        if not self.blocked.is_current(blocked):
            # The set may have changed during its computation, before this queue existed.
            queue.changed.set()
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

    async def _watch(self, checkpoint: Checkpoint | None, queue: _Queue, pause: Seconds) -> None:
        """Wake the callers of a queue once the set differs from the queue's `etag`.

        `pause` is the first result of `_seconds_until_change`.
        """
        try:
            with noting_failure(TASK, self.failures):
                while True:
                    with suppress(TimeoutError):
                        async with asyncio.timeout(pause):
                            await queue.changed.wait()
                            await asyncio.sleep(max(SETTLING, SHARE * self.blocked.cost))
                    queue.changed.clear()
                    if not queue.callers:
                        break
                    blocked = await self.blocked.read(checkpoint)
                    if blocked.etag != queue.etag:
                        break
                    pause = self._seconds_until_change(blocked)
        finally:
            if self._queues.get(checkpoint) is queue:
                self._release(checkpoint)

    def _seconds_until_change(self, blocked: Blocked) -> Seconds:
        """How long until the set may change without an event."""
        health, now = self.blocked.health, self.blocked.clock()
        turns = (blocked.changes_at, health.find_next_change(now) or math.inf)
        is_silent = blocked.stale or health.read_trust(now).has_dead
        pause = min(*(turn - now for turn in turns), CHECK_EVERY if is_silent else math.inf)
        return max(pause, 0.001)

    def _release(self, checkpoint: Checkpoint | None) -> None:
        """Wake the callers of a queue, and end its task."""
        queue = self._queues.pop(checkpoint)
        if queue.task is not None:
            queue.task.cancel()
        _wake(queue.callers)


def _wake(callers: dict[asyncio.Future[None], None]) -> None:
    """Wake all callers, `BATCH` per turn of the event loop."""
    for caller in list(islice(callers, BATCH)):
        del callers[caller]
        if not caller.done():
            caller.set_result(None)
    if callers:
        asyncio.get_running_loop().call_soon(_wake, callers)
