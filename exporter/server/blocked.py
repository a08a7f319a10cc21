"""The set of VMIs that are blocked now, cached, with long polls for its changes.

The set is a function of the store and the clock. It is computed on demand and cached until the
store changes or the clock changes it: a cooldown ends, an end in the future comes within
`CLOCK_SKEW`, or the evidence turns stale or dead.

It is computed in slices, between which other requests are answered: 20 us per blocked VMI, so
10,000 of them take 200 ms. A VMI that changes meanwhile is in the set as before or as after that.

Long polls for a checkpoint share one queue with one timer. After a change the set is computed once
for all of them, and they are woken, in batches, only if it differs: waking 10,000 callers at once
or for every change would leave no time for verdicts.
"""

import asyncio
import hashlib
import math
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from time import perf_counter
from typing import Any, NamedTuple

import msgspec

from exporter.engine.cooldown import written_ends
from exporter.engine.evidence import Evidence
from exporter.engine.history import settle
from exporter.engine.model import (
    CLOCK_SKEW,
    Checkpoint,
    DeadResources,
    Instant,
    Policy,
    Reason,
    Seconds,
    Verdict,
)
from exporter.engine.rules import decide
from exporter.engine.store import Store
from exporter.engine.verdict_index import VerdictIndex
from exporter.health import Health, Staleness
from exporter.server.answers import count_held
from exporter.server.schemas import BlockedVmi
from exporter.text import to_release


SETTLING: Seconds = 0.05
"""Changes are collected for this long before the set is computed for waiting callers."""
SHARE = 10
"""The pause before the next computation is at least this many times the length of the last."""
CHECK_EVERY: Seconds = 1.0
"""How often to check for changes without an event: contact after silence, and the `notBefore` of an
end ahead of our clock, which moves with it."""

SLICE = 100
"""How many VMIs are evaluated without yielding: 2 ms, and 10 ms if all of them have changed."""
BATCH = 20
"""How many callers are woken at once; answering each takes 0.1 ms."""


class _Inputs(NamedTuple):
    """Everything but the clock that the set depends on."""

    revision: int
    vmims_seen: bool
    pods_seen: bool
    stale: bool
    lost: frozenset[str]
    dead: DeadResources


@dataclass(frozen=True)
class Blocked:
    """The entries of one checkpoint (or of both), sorted.

    `etag` covers the entries and `stale`, but nothing that changes all the time. The set is valid
    for `inputs` from `computed_at` until `changes_at`, when the clock alone changes it. `reads` is
    how many calls of `BlockedSet.read` had begun before it was computed.
    """

    entries: list[BlockedVmi]
    stale: bool
    etag: str
    inputs: _Inputs
    computed_at: Instant
    changes_at: Instant
    reads: int

    @cached_property
    def encoded(self) -> bytes:
        """The entries as JSON, encoded once for all callers: 200 kB for 1,000 VMIs."""
        return msgspec.json.encode(self.entries)

    @cached_property
    def held(self) -> Counter[Reason]:
        """The number of VMIs by reason, counted once for all callers."""
        return count_held(self.entries)


@dataclass
class _Queue:
    """The callers that wait for the set of one checkpoint to differ from `etag`."""

    etag: str
    callers: dict[asyncio.Future[None], None] = field(default_factory=dict)
    timer: asyncio.TimerHandle | None = None


@dataclass
class BlockedSet:
    """Computes the blocked set, and wakes the `waiting` callers when it changes.

    `index` indexes the VMIs that may be blocked.
    """

    store: Store
    health: Health
    policy: Policy
    clock: Callable[[], Instant]
    waiting: int = 0
    index: VerdictIndex = field(init=False)
    _cost: Seconds = 0.0
    _kept: dict[Checkpoint | None, Blocked] = field(default_factory=dict)
    _queues: dict[Checkpoint | None, _Queue] = field(default_factory=dict)
    _settling: asyncio.TimerHandle | None = None
    _closed: bool = False
    _reads: int = 0
    _computing: asyncio.Lock = field(default_factory=asyncio.Lock)
    _checks: set[asyncio.Task[None]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.index = VerdictIndex(self.store, self.policy)

    async def read(self, checkpoint: Checkpoint | None) -> Blocked:
        """The set as it is now; callers at the same time share one computation."""
        self._reads += 1
        read = self._reads
        if (kept := self._find_kept(checkpoint)) is not None:
            return kept
        async with self._computing:
            kept = self._kept.get(checkpoint)
            if kept is None or kept.reads < read:
                kept = self._find_kept(checkpoint)
            if kept is None:
                began = perf_counter()
                kept = self._kept[checkpoint] = await self._compute(checkpoint)
                self._cost = perf_counter() - began
            return kept

    def _find_kept(self, checkpoint: Checkpoint | None) -> Blocked | None:
        """The last set that was computed, if it is still valid."""
        kept, now = self._kept.get(checkpoint), self.clock()
        if kept is None or not kept.computed_at <= now < kept.changes_at:
            return None
        return kept if kept.inputs == self._read_inputs(now) else None

    def _read_inputs(self, now: Instant) -> _Inputs:
        store = self.store
        return _Inputs(
            store.revision,
            store.vmims_seen,
            store.pods_seen,
            stale=self.health.staleness(now) is not Staleness.FRESH,
            lost=self.health.lost_namespaces,
            dead=self.health.find_dead(now),
        )

    async def wait(self, checkpoint: Checkpoint | None, etag: str, wait: Seconds) -> Blocked:
        """The set once it differs from `etag`, but after `wait` seconds at the latest."""
        loop = asyncio.get_running_loop()
        until = loop.time() + wait
        while True:
            blocked = await self.read(checkpoint)
            left = until - loop.time()
            if blocked.etag != etag or left <= 0 or self._closed:
                return blocked
            await self._queue_up(checkpoint, blocked, left)

    def note_change(self) -> None:
        """The store or the health has changed: check soon whether the set has."""
        if self._settling is None:
            loop = asyncio.get_running_loop()
            pause = max(SETTLING, SHARE * self._cost)
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
        if blocked.inputs != self._read_inputs(self.clock()):
            # It changed while the set was computed. The check for that may have found no queue.
            self.note_change()
        if queue is None:
            queue = self._queues[checkpoint] = _Queue(blocked.etag)
            self._schedule_check(checkpoint, queue, blocked)
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

    def _time_to_check(self, blocked: Blocked) -> Seconds:
        """Seconds until the set may change without a call of `note_change`."""
        now = self.clock()
        turns_at = self.health.turns_at(now)
        turns = (blocked.changes_at, math.inf if turns_at is None else turns_at)
        silent = blocked.stale or blocked.inputs.dead
        return min(*(turn - now for turn in turns), CHECK_EVERY if silent else math.inf)

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
            blocked = await self.read(checkpoint)
            if self._queues.get(checkpoint) is not queue:
                return  # its callers were woken meanwhile
            if blocked.etag == queue.etag:
                self._schedule_check(checkpoint, queue, blocked)
                return
        self._release(checkpoint)

    def _schedule_check(
        self, checkpoint: Checkpoint | None, queue: _Queue, blocked: Blocked
    ) -> None:
        """Schedule the next check, for when the clock alone may change the set."""
        if queue.timer is not None:
            queue.timer.cancel()
        pause = self._time_to_check(blocked)
        if pause < math.inf:
            loop = asyncio.get_running_loop()
            delay = max(pause, 0.001)
            queue.timer = loop.call_later(delay, self._start, self._check, checkpoint)

    def _release(self, checkpoint: Checkpoint | None) -> None:
        queue = self._queues.pop(checkpoint)
        if queue.timer is not None:
            queue.timer.cancel()
        _wake(queue.callers)

    async def _compute(self, checkpoint: Checkpoint | None) -> Blocked:
        now = self.clock()
        while self.index.catch_up(now, dead=self.health.find_dead(now), most=SLICE):
            await asyncio.sleep(0)
            now = self.clock()
        reads, inputs = self._reads, self._read_inputs(now)
        dead = inputs.dead
        wanted = sorted(Checkpoint) if checkpoint is None else [checkpoint]
        entries: list[BlockedVmi] = []
        digest = hashlib.sha256()
        changes_at = math.inf
        for count, key in enumerate(self.index.find_blocked(now, dead=dead), start=1):
            if count % SLICE == 0:
                await asyncio.sleep(0)
            evidence = self.store.evidence(*key)
            if evidence is None:
                continue
            changes_at = min(changes_at, *_credible_from(evidence, now))
            dead_here = dead.of(evidence.vmi.namespace)
            for one in wanted:
                verdict = decide(evidence, self.policy, now, checkpoint=one, dead=dead_here)
                entry = _write_entry(evidence, one, verdict)
                if entry is not None:
                    entries.append(entry)
                    digest.update(_identify(entry, verdict.released_at))
                    changes_at = min(changes_at, _changes_at(verdict, now))
        stale = inputs.stale or any(entry.namespace in inputs.lost for entry in entries)
        digest.update(b"stale" if stale else b"")
        return Blocked(
            entries=entries,
            stale=stale,
            etag=f'"{digest.hexdigest()[:32]}"',
            inputs=inputs,
            computed_at=now,
            changes_at=changes_at,
            reads=reads,
        )


def _wake(callers: dict[asyncio.Future[None], None]) -> None:
    """Wake all callers, `BATCH` per turn of the event loop."""
    for caller in list(islice(callers, BATCH)):
        del callers[caller]
        if not caller.done():
            caller.set_result(None)
    if callers:
        asyncio.get_running_loop().call_soon(_wake, callers)


def _credible_from(evidence: Evidence, now: Instant) -> Iterator[Instant]:
    """When ends that are too far in the future at `now` become credible; and infinity.

    Also when something is not believed any more.
    """
    yield math.inf
    yield from (at for at in evidence.distrusted_from() if at > now)
    for end in written_ends(evidence):
        if settle(end, now) is None:
            yield end - CLOCK_SKEW


def _changes_at(verdict: Verdict, now: Instant) -> Instant:
    """When the clock alone changes this entry."""
    if verdict.not_before is None or verdict.released_at is None:
        return math.inf
    if verdict.not_before != verdict.released_at:
        return min(verdict.released_at, now + CHECK_EVERY)
    return verdict.released_at


def _write_entry(evidence: Evidence, checkpoint: Checkpoint, verdict: Verdict) -> BlockedVmi | None:
    if verdict.reason is None:
        return None
    vmi = evidence.vmi
    return BlockedVmi(
        namespace=vmi.namespace,
        name=vmi.name,
        vmi_uid=vmi.uid,
        node=vmi.node,
        checkpoint=checkpoint,
        reason=verdict.reason,
        not_before=None if verdict.not_before is None else to_release(verdict.not_before),
    )


def _identify(entry: BlockedVmi, released_at: Instant | None) -> bytes:
    """What the ETag covers: not `not_before`, which moves while an end lies ahead of our clock."""
    e = entry
    return msgspec.json.encode(
        (e.namespace, e.name, e.vmi_uid, e.node, e.checkpoint, e.reason, released_at)
    )
