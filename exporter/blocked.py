"""The set of VMIs that are blocked now, kept current for callers that poll and that wait.

The set is a function of the store and the clock. It is computed when it is asked for and then
kept until the store changes or the clock reaches an instant at which a cooldown is released or
the evidence turns stale.
"""

import asyncio
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from exporter.cooldown import Evidence, decide
from exporter.health import Health, Staleness
from exporter.model import Checkpoint, Instant, Policy, Seconds
from exporter.store import Store
from exporter.wire import BlockedVmi, write_optional_instant


SETTLING: Seconds = 0.05
"""Changes are told to waiting callers at most this often: a storm of events is one change."""


@dataclass(frozen=True)
class Blocked:
    """The entries of one checkpoint (or of both), sorted.

    `etag` covers the entries and `stale` and nothing that ticks; `changes_at` is when the clock
    alone changes the set, or None.
    """

    entries: list[BlockedVmi]
    stale: bool
    etag: str
    revision: int
    staleness: Staleness
    changes_at: Instant | None


@dataclass
class BlockedSet:
    """Answers what is blocked, and tells those who wait when that changes."""

    store: Store
    health: Health
    policy: Policy
    clock: Callable[[], Instant]
    _kept: dict[Checkpoint | None, Blocked] = field(default_factory=dict)
    _news: asyncio.Event = field(default_factory=asyncio.Event)
    _settling: asyncio.TimerHandle | None = None
    _closed: bool = False

    def read(self, checkpoint: Checkpoint | None) -> Blocked:
        """The set as it is now."""
        now = self.clock()
        staleness = self.health.staleness(now)
        kept = self._kept.get(checkpoint)
        if (
            kept is None
            or kept.revision != self.store.revision
            or kept.staleness is not staleness
            or (kept.changes_at is not None and now >= kept.changes_at)
        ):
            kept = self._kept[checkpoint] = self._compute(checkpoint, now, staleness)
        return kept

    async def wait(self, checkpoint: Checkpoint | None, etag: str, wait: Seconds) -> Blocked:
        """The set once it differs from `etag`, or as it is after `wait` seconds."""
        until = self.clock() + wait
        while True:
            news = self._news
            blocked = self.read(checkpoint)
            now = self.clock()
            if blocked.etag != etag or now >= until or self._closed:
                return blocked
            turns = (until, blocked.changes_at, self.health.turns_at(now))
            pause = min(turn for turn in turns if turn is not None) - now
            try:
                async with asyncio.timeout(max(pause, 0.001)):
                    await news.wait()
            except TimeoutError:
                pass

    def note_change(self) -> None:
        """The store or the health has changed; those who wait hear of it soon."""
        if self._settling is None:
            loop = asyncio.get_running_loop()
            self._settling = loop.call_later(SETTLING, self._tell)

    def close(self) -> None:
        """Let everybody who waits have an answer now."""
        self._closed = True
        self._tell()

    def _tell(self) -> None:
        self._settling = None
        self._news.set()
        self._news = asyncio.Event()

    def _compute(
        self, checkpoint: Checkpoint | None, now: Instant, staleness: Staleness
    ) -> Blocked:
        wanted = tuple(Checkpoint) if checkpoint is None else (checkpoint,)
        found: list[tuple[BlockedVmi, Instant | None]] = []
        for evidence in self.store.all_evidence():
            if _is_quiet(evidence):
                continue
            found += _blocked_at(evidence, self.policy, wanted, now, staleness)
        found.sort(key=lambda entry: (entry[0].namespace, entry[0].name, entry[0].checkpoint))
        stale = staleness is not Staleness.FRESH
        releases = [release for _, release in found if release is not None and release > now]
        return Blocked(
            entries=[entry for entry, _ in found],
            stale=stale,
            etag=_tag(found, stale=stale),
            revision=self.store.revision,
            staleness=staleness,
            changes_at=min(releases, default=None),
        )


def _is_quiet(evidence: Evidence) -> bool:
    """Whether no rule could speak: most VMIs, most of the time."""
    vmi = evidence.vmi
    return vmi.migration is None and not vmi.evacuation_node and not evidence.vmims


def _blocked_at(
    evidence: Evidence,
    policy: Policy,
    checkpoints: tuple[Checkpoint, ...],
    now: Instant,
    staleness: Staleness,
) -> list[tuple[BlockedVmi, Instant | None]]:
    entries = []
    for checkpoint in checkpoints:
        silent = staleness is Staleness.DEAD
        verdict = decide(evidence, policy, now, checkpoint=checkpoint, silent=silent)
        if verdict.reason is None:
            continue
        entry = BlockedVmi(
            namespace=evidence.vmi.namespace,
            name=evidence.vmi.name,
            vmi_uid=evidence.vmi.uid,
            node=evidence.vmi.node,
            checkpoint=checkpoint,
            reason=verdict.reason,
            not_before=write_optional_instant(verdict.not_before),
        )
        entries.append((entry, verdict.released_at))
    return entries


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
