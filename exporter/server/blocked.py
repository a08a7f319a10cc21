"""The set of VMIs that are blocked now, kept current for callers that poll and that wait.

The set is a function of the store and the clock. It is computed when it is asked for and then
kept until the store changes or the clock reaches an instant at which a cooldown is released, an
end that was too far ahead of the clock comes to be believed, or the evidence turns stale or dead.

Those who wait for the set of a checkpoint to change wait together: one look for all of them when
something has changed, one timer for the clock. Most changes leave the set as it is, and to wake
10,000 callers for each of them, or all in one turn, would leave no time for verdicts.
"""

import asyncio
import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from time import perf_counter
from typing import NamedTuple

import msgspec

from exporter.engine.evidence import Evidence
from exporter.engine.history import settle
from exporter.engine.model import (
    CLOCK_SKEW,
    Checkpoint,
    DeadResources,
    Instant,
    Policy,
    Seconds,
    Verdict,
)
from exporter.engine.rules import decide
from exporter.engine.store import Store
from exporter.engine.verdict_index import VerdictIndex
from exporter.health import Health, Staleness
from exporter.server.schemas import BlockedVmi, write_optional_release


SETTLING: Seconds = 0.05
"""Changes are told to waiting callers at most this often: a storm of events is one change."""
SHARE = 10
"""And no oftener than leaves this many times as long for everything else as the set takes."""
LOOKING: Seconds = 1.0
"""How often to look again for what nobody tells: a sign of life after silence, and the
`notBefore` of an end ahead of our clock, which moves with it."""

WOKEN = 20
"""So many callers are woken in one turn, because each takes 0.1 ms of it to be answered."""


class _Picture(NamedTuple):
    """All that the set is a function of, but for the clock."""

    revision: int
    vmims_seen: bool
    pods_seen: bool
    stale: bool
    lost: frozenset[str]
    dead: DeadResources


@dataclass(frozen=True)
class Blocked:
    """The entries of one checkpoint (or of both), sorted.

    `etag` covers the entries and `stale` and nothing that ticks. It holds for `picture`, from
    `computed_at` until the clock alone changes it at `changes_at`.
    """

    entries: list[BlockedVmi]
    stale: bool
    etag: str
    picture: _Picture
    computed_at: Instant
    changes_at: Instant

    @cached_property
    def encoded(self) -> bytes:
        """The entries as JSON, once for all who are told of them: 200 kB for 1,000 VMIs."""
        return msgspec.json.encode(self.entries)


@dataclass
class _Queue:
    """Those who wait for the set of one checkpoint to have another ETag than `etag`."""

    etag: str
    callers: dict[asyncio.Future[None], None] = field(default_factory=dict)
    timer: asyncio.TimerHandle | None = None


@dataclass
class BlockedSet:
    """Answers what is blocked, and tells those who wait (so many: `waiting`) when that changes.

    `index` knows of whom there is something to tell.
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

    def __post_init__(self) -> None:
        self.index = VerdictIndex(self.store, self.policy)

    def read(self, checkpoint: Checkpoint | None, now: Instant | None = None) -> Blocked:
        """The set as it is `now`, which is the clock's where none is given."""
        now = self.clock() if now is None else now
        store = self.store
        picture = _Picture(
            store.revision,
            store.vmims_seen,
            store.pods_seen,
            stale=self.health.staleness(now) is not Staleness.FRESH,
            lost=self.health.lost_namespaces,
            dead=self.health.find_dead(now),
        )
        kept = self._kept.get(checkpoint)
        if kept is None or kept.picture != picture or not kept.computed_at <= now < kept.changes_at:
            began = perf_counter()
            kept = self._kept[checkpoint] = self._compute(checkpoint, now, picture)
            self._cost = perf_counter() - began
        return kept

    async def wait(self, checkpoint: Checkpoint | None, etag: str, wait: Seconds) -> Blocked:
        """The set once it differs from `etag`, or as it is after `wait` seconds."""
        loop = asyncio.get_running_loop()
        until = loop.time() + wait
        while True:
            blocked = self.read(checkpoint)
            left = until - loop.time()
            if blocked.etag != etag or left <= 0 or self._closed:
                return blocked
            await self._queue_up(checkpoint, blocked, left)

    def note_change(self) -> None:
        """The store or the health has changed; those who wait hear of it soon."""
        if self._settling is None:
            loop = asyncio.get_running_loop()
            pause = max(SETTLING, SHARE * self._cost)
            self._settling = loop.call_later(pause, self._tell)

    def close(self) -> None:
        """Let everybody who waits have an answer now."""
        self._closed = True
        for checkpoint in list(self._queues):
            self._release(checkpoint)

    async def _queue_up(
        self, checkpoint: Checkpoint | None, blocked: Blocked, left: Seconds
    ) -> None:
        """Until the set is another one, or for `left` seconds."""
        queue = self._queues.get(checkpoint)
        if queue is None:
            queue = self._queues[checkpoint] = _Queue(blocked.etag)
            self._look_later(checkpoint, queue, blocked)
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

    def _next_look(self, blocked: Blocked) -> Seconds:
        """How long the set surely stays as it is, if nothing is told."""
        now = self.clock()
        turns_at = self.health.turns_at(now)
        turns = (blocked.changes_at, math.inf if turns_at is None else turns_at)
        unheard = blocked.stale or blocked.picture.dead
        return min(*(turn - now for turn in turns), LOOKING if unheard else math.inf)

    def _tell(self) -> None:
        self._settling = None
        for checkpoint in list(self._queues):
            self._look(checkpoint)

    def _look(self, checkpoint: Checkpoint | None) -> None:
        """Release those who wait if the set has become another; stop looking if nobody does."""
        queue = self._queues[checkpoint]
        if queue.callers:
            blocked = self.read(checkpoint)
            if blocked.etag == queue.etag:
                self._look_later(checkpoint, queue, blocked)
                return
        self._release(checkpoint)

    def _look_later(self, checkpoint: Checkpoint | None, queue: _Queue, blocked: Blocked) -> None:
        """When the clock alone may make another set of it."""
        if queue.timer is not None:
            queue.timer.cancel()
        pause = self._next_look(blocked)
        if pause < math.inf:
            loop = asyncio.get_running_loop()
            queue.timer = loop.call_later(max(pause, 0.001), self._look, checkpoint)

    def _release(self, checkpoint: Checkpoint | None) -> None:
        queue = self._queues.pop(checkpoint)
        if queue.timer is not None:
            queue.timer.cancel()
        _wake(queue.callers)

    def _compute(self, checkpoint: Checkpoint | None, now: Instant, picture: _Picture) -> Blocked:
        wanted = tuple(Checkpoint) if checkpoint is None else (checkpoint,)
        dead = picture.dead
        found: list[tuple[BlockedVmi, Instant | None]] = []
        changes_at = math.inf
        for evidence in self.index.find_blocked_or_changing(now, dead=dead):
            changes_at = min(changes_at, *_beliefs(evidence, now))
            dead_here = dead.of(evidence.vmi.namespace)
            for one in wanted:
                verdict = decide(evidence, self.policy, now, checkpoint=one, dead=dead_here)
                entry = _write_entry(evidence, one, verdict)
                if entry is not None:
                    found.append((entry, verdict.released_at))
                    changes_at = min(changes_at, _changes_at(verdict, now))
        found.sort(key=lambda entry: (entry[0].namespace, entry[0].name, entry[0].checkpoint))
        stale = picture.stale or any(entry.namespace in picture.lost for entry, _ in found)
        return Blocked(
            entries=[entry for entry, _ in found],
            stale=stale,
            etag=_tag(found, stale=stale),
            picture=picture,
            computed_at=now,
            changes_at=changes_at,
        )


def _wake(callers: dict[asyncio.Future[None], None]) -> None:
    """All of them, some in each turn."""
    for caller in list(islice(callers, WOKEN)):
        del callers[caller]
        if not caller.done():
            caller.set_result(None)
    if callers:
        asyncio.get_running_loop().call_soon(_wake, callers)


def _beliefs(evidence: Evidence, now: Instant) -> Iterator[Instant]:
    """When ends that are too far ahead to be believed at `now` will be, and never."""
    yield math.inf
    state = evidence.vmi.migration
    written = [] if state is None else [state.end]
    for record in evidence.history.records().values():
        written += (record.end, record.finished_at)
    for end in written:
        if end is not None and settle(end, now) is None:
            yield end - CLOCK_SKEW


def _changes_at(verdict: Verdict, now: Instant) -> Instant:
    """When the clock alone changes this entry."""
    if verdict.not_before is None or verdict.released_at is None:
        return math.inf
    if verdict.not_before != verdict.released_at:
        return min(verdict.released_at, now + LOOKING)
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
        not_before=write_optional_release(verdict.not_before),
    )


def _tag(found: list[tuple[BlockedVmi, Instant | None]], *, stale: bool) -> str:
    """`released_at` stands for `not_before`, which moves while an end lies ahead of our clock."""
    body = msgspec.json.encode(
        [
            stale,
            [
                (e.namespace, e.name, e.vmi_uid, e.node, e.checkpoint, e.reason, released)
                for e, released in found
            ],
        ]
    )
    return f'"{hashlib.sha256(body).hexdigest()[:32]}"'
