"""The set of blocked VMIs in the API's form, computed once for all callers.

The set is written from the entries of the verdict view, in slices. Other requests are answered
between two slices. The set is cached until the view or the freshness of the evidence changes.
Otherwise each of 10,000 waiting callers would go through 10,000 VMIs. If a VMI changes while the
set is written, the set has the VMI's state before or after that change.
"""

import asyncio
import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice, product
from time import perf_counter

import msgspec
from msgspec import structs

from exporter.engine.facts.model import Checkpoint, Instant, Seconds
from exporter.engine.verdicts.view import VMIS_AT_ONCE, Verdicts, VerdictView
from exporter.health import Health, Staleness
from exporter.server.api.schemas import BlockedVmi
from exporter.text import to_release


MOVES_EVERY: Seconds = 1.0
"""How often the set is written again while `notBefore` moves with our clock.

`notBefore` moves while the recorded end of a migration is in the future by our clock.
"""


@dataclass(frozen=True)
class Blocked:
    """The entries of one checkpoint (or of both), sorted.

    `encoded` are the parts of their JSON, which all callers share: 200 kB for 1,000 VMIs.

    `etag` covers the entries and `stale`, but no value that changes as time passes. The set was
    computed from the view at `revision`. It is valid from `computed_at` until `changes_at`, when it
    may change without an event. `reads` counts the calls of `BlockedSet.read` that had begun before
    it was computed.
    """

    entries: list[BlockedVmi]
    encoded: list[bytes]
    stale: bool
    etag: str
    freshness: tuple[bool, frozenset[str]]
    revision: int
    computed_at: Instant
    changes_at: Instant
    reads: int


@dataclass
class BlockedSet:
    """Writes the blocked set of each checkpoint; `cost` is how long the last computation took."""

    view: VerdictView
    health: Health
    clock: Callable[[], Instant]
    cost: Seconds = 0.0
    _sets: dict[Checkpoint | None, Blocked] = field(default_factory=dict)
    _reads: int = 0
    _computing: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def read(self, checkpoint: Checkpoint | None) -> Blocked:
        """The present set; concurrent callers share one computation."""
        self._reads += 1
        read, cached = self._reads, self.find_current(checkpoint)
        if cached is not None:
            return cached
        async with self._computing:
            cached = self._sets.get(checkpoint)
            if cached is None or (cached.reads < read and not self.is_current(cached)):
                began = perf_counter()
                cached = self._sets[checkpoint] = await self._compute(checkpoint)
                self.cost = perf_counter() - began
            return cached

    def find_current(self, checkpoint: Checkpoint | None) -> Blocked | None:
        """The present set if nothing has to be computed for it."""
        cached = self._sets.get(checkpoint)
        return cached if cached is not None and self.is_current(cached) else None

    def is_current(self, blocked: Blocked) -> bool:
        """Whether a set is still valid. The call updates at most one slice of the view."""
        now = self.clock()
        if not blocked.computed_at <= now < blocked.changes_at:
            return False
        verdicts = self.view.read(now, self.health.read_trust(now), most=VMIS_AT_ONCE)
        fresh = blocked.freshness == self._read_freshness(now)
        return fresh and not verdicts.is_behind and verdicts.revision == blocked.revision

    def _read_freshness(self, now: Instant) -> tuple[bool, frozenset[str]]:
        """Whether all evidence is stale, and the namespaces that may no longer be read."""
        health = self.health
        return health.staleness(now) is not Staleness.FRESH, health.lost_namespaces

    async def read_all(self) -> tuple[Instant, Verdicts]:
        """The verdicts of all VMIs, which are evaluated in slices, and their instant."""
        while True:
            now = self.clock()
            verdicts = self.view.read(now, self.health.read_trust(now), most=VMIS_AT_ONCE)
            if not verdicts.is_behind:
                return now, verdicts
            await asyncio.sleep(0)

    async def _compute(self, checkpoint: Checkpoint | None) -> Blocked:
        now, verdicts = await self.read_all()
        blocked_entries = verdicts.list_blocked()
        changes_at = min(verdicts.changes_at(), now + MOVES_EVERY if verdicts.moves else math.inf)
        reads, revision, freshness = self._reads, verdicts.revision, self._read_freshness(now)
        wanted = sorted(Checkpoint) if checkpoint is None else [checkpoint]
        entries: list[BlockedVmi] = []
        encoded: list[bytes] = []
        digest = hashlib.sha256()
        while some := [*islice(blocked_entries, VMIS_AT_ONCE)]:
            await asyncio.sleep(0)
            begin = len(entries)
            for entry, point in product(some, wanted):
                verdict, vmi = entry.verdict(point), entry.evidence.vmi
                if verdict.reason is not None:
                    end = verdict.not_before
                    blocked = BlockedVmi(
                        namespace=vmi.namespace,
                        name=vmi.name,
                        vmi_uid=vmi.uid,
                        node=vmi.node,
                        checkpoint=point,
                        reason=verdict.reason,
                        not_before=None if end is None else to_release(end),
                    )
                    entries.append(blocked)
                    # The ETag does not cover `not_before`, which can change as time passes.
                    identity = (*structs.astuple(blocked)[:-1], verdict.released_at)
                    digest.update(msgspec.json.encode(identity))
            if begin < len(entries):
                part = msgspec.json.encode(entries[begin:])[1:-1]
                encoded.append(b"," + part if begin else part)
        stale, lost = freshness
        stale = stale or bool(lost and any(entry.namespace in lost for entry in entries))
        digest.update(b"stale" if stale else b"")
        return Blocked(
            entries=entries,
            encoded=encoded,
            stale=stale,
            etag=f'"{digest.hexdigest()[:32]}"',
            freshness=freshness,
            revision=revision,
            computed_at=now,
            changes_at=changes_at,
            reads=reads,
        )
