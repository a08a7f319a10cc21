"""The set of VMIs that are blocked now, kept current for callers that poll and that wait.

The set is a function of the store and the clock. It is computed when it is asked for and then
kept until the store changes or the clock reaches an instant at which a cooldown is released, an
end that was too far ahead of the clock comes to be believed, or the evidence turns stale.
"""

import asyncio
import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from time import perf_counter
from typing import TypeAlias

import msgspec

from exporter.cooldown import decide, is_quiet
from exporter.evidence import Evidence
from exporter.health import Health, Staleness
from exporter.history import settle
from exporter.model import CLOCK_SKEW, Checkpoint, Instant, Policy, Seconds, Verdict
from exporter.store import Store
from exporter.wire import BlockedVmi, write_optional_release


SETTLING: Seconds = 0.05
"""Changes are told to waiting callers at most this often: a storm of events is one change."""
SHARE = 10
"""And no oftener than leaves this many times as long for everything else as the set takes."""
LOOKING: Seconds = 1.0
"""How often to look again for what nobody tells: a sign of life after silence, and the
`notBefore` of an end ahead of our clock, which moves with it."""

_Picture: TypeAlias = tuple[int, bool, bool, Staleness]
"""All that the set is a function of, but for the clock."""


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


@dataclass
class BlockedSet:
    """Answers what is blocked, and tells those who wait (so many: `waiting`) when that changes."""

    store: Store
    health: Health
    policy: Policy
    clock: Callable[[], Instant]
    waiting: int = 0
    _cost: Seconds = 0.0
    _kept: dict[Checkpoint | None, Blocked] = field(default_factory=dict)
    _news: asyncio.Event = field(default_factory=asyncio.Event)
    _settling: asyncio.TimerHandle | None = None
    _closed: bool = False

    def read(self, checkpoint: Checkpoint | None) -> Blocked:
        """The set as it is now."""
        now = self.clock()
        store = self.store
        staleness = self.health.staleness(now)
        picture = (store.revision, store.vmims_seen, store.pods_seen, staleness)
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
            news = self._news
            blocked = self.read(checkpoint)
            left = until - loop.time()
            if blocked.etag != etag or left <= 0 or self._closed:
                return blocked
            pause = min(left, self._next_look(blocked))
            self.waiting += 1
            try:
                async with asyncio.timeout(max(pause, 0.001)):
                    await news.wait()
            except TimeoutError:
                pass
            finally:
                self.waiting -= 1

    def note_change(self) -> None:
        """The store or the health has changed; those who wait hear of it soon."""
        if self._settling is None:
            loop = asyncio.get_running_loop()
            pause = max(SETTLING, SHARE * self._cost)
            self._settling = loop.call_later(pause, self._tell)

    def close(self) -> None:
        """Let everybody who waits have an answer now."""
        self._closed = True
        self._tell()

    def _next_look(self, blocked: Blocked) -> Seconds:
        """How long the set surely stays as it is, if nothing is told."""
        now = self.clock()
        turns_at = self.health.turns_at(now)
        turns = (blocked.changes_at, math.inf if turns_at is None else turns_at)
        return min(*(turn - now for turn in turns), LOOKING if blocked.stale else math.inf)

    def _tell(self) -> None:
        self._settling = None
        self._news.set()
        self._news = asyncio.Event()

    def _compute(self, checkpoint: Checkpoint | None, now: Instant, picture: _Picture) -> Blocked:
        wanted = tuple(Checkpoint) if checkpoint is None else (checkpoint,)
        staleness = picture[-1]
        silent = staleness is Staleness.DEAD
        found: list[tuple[BlockedVmi, Instant | None]] = []
        changes_at = math.inf
        for evidence in self.store.all_evidence():
            if is_quiet(evidence):
                continue
            changes_at = min(changes_at, *_beliefs(evidence, now))
            for one in wanted:
                verdict = decide(evidence, self.policy, now, checkpoint=one, silent=silent)
                entry = _write_entry(evidence, one, verdict)
                if entry is not None:
                    found.append((entry, verdict.released_at))
                    changes_at = min(changes_at, _changes_at(verdict, now))
        found.sort(key=lambda entry: (entry[0].namespace, entry[0].name, entry[0].checkpoint))
        stale = staleness is not Staleness.FRESH
        return Blocked(
            entries=[entry for entry, _ in found],
            stale=stale,
            etag=_tag(found, stale=stale),
            picture=picture,
            computed_at=now,
            changes_at=changes_at,
        )


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
