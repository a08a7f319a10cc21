"""Decides which Kubernetes Events about VMIs are due, and limits their number.

An Event is about one of three things: a stuck evacuation, the end of an evacuation that was
reported as stuck, or evictions of a VMI that were blocked for one reason. Each of these is an
`Episode`. An Event is written when an episode begins. While the episode goes on, another Event
follows every `REPEATED_AFTER`, with the count of the series.

There are two limits: one Event per minute about each VMI, and for all VMIs together `BURST` Events
at once, and after them `PER_SECOND` Events per second. So at most 3,700 Events are written in one
hour. The API server keeps Events for that long by default (`--event-ttl`). If more Events are due,
they wait; those about stuck evacuations are written first. If an episode is over before its Event
is written, the Event is dropped and counted.
"""

import math
from collections import Counter
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from enum import StrEnum
from typing import TypeAlias

from msgspec import Struct

from exporter.engine.evacuations.diagnosis import Diagnosis
from exporter.engine.facts.evidence import Marker
from exporter.engine.facts.model import Instant, Seconds, Vmi
from exporter.engine.facts.policy import Verdict


REPEATED_AFTER: Seconds = 1800.0
"""The interval of client-go (`tools/events`, `refreshTime`), shorter than an Event's lifetime."""
PER_VMI: Seconds = 60.0
BURST = 100
PER_SECOND = 1.0
MOST_BLOCKED = 20_000
"""How many VMIs can have a `BlockedEpisode` at once."""
SLICE = 500
"""How many episodes are checked without yielding, which takes about 1 ms."""


class EventReason(StrEnum):
    """The `reason` of the Kubernetes Events that we write, most urgent first."""

    EVACUATION_STUCK = "EvacuationStuck"
    EVACUATION_ENDED = "EvacuationEnded"
    EVICTION_BLOCKED = "EvictionBlocked"


class EventOutcome(StrEnum):
    """What happened to an Event that was due."""

    WRITTEN = "written"
    EXISTING = "existing"
    """Another replica, or this replica before a restart, has written the Event already."""
    REJECTED = "rejected"
    UNREACHABLE = "unreachable"
    """The API server did not answer, or was overloaded; the Event is tried again."""
    DROPPED = "dropped"
    """The Event was out of date before it could be written, or there were too many episodes."""


class _Episode(Struct, kw_only=True):
    """The subject of one Event, or of a series of Events.

    It was observed from `began` to `last`; `count` is the count of the series.
    """

    reason: EventReason
    vmi: Vmi
    began: Instant
    last: Instant
    count: int = 1
    written_at: Instant | None = None


class EvacuationEpisode(_Episode, kw_only=True):
    """A stuck evacuation, or its end; `count` is how often it was reported."""

    diagnosis: Diagnosis

    def identify(self, now: Instant) -> str:
        """The ID consists of the node, the request and the half hour."""
        requested_at = self.diagnosis.requested_at
        half_hour = (now - requested_at) // REPEATED_AFTER
        return f"{self.diagnosis.node} {requested_at:.0f} {half_hour:.0f}"

    def is_same(self, other: Diagnosis | Marker) -> bool:
        """Whether `other` is the same evacuation, perhaps with an earlier time of the request."""
        own = self.diagnosis
        return other.node == own.node and other.requested_at <= own.requested_at


class BlockedEpisode(_Episode, kw_only=True):
    """Evictions of a VMI that were blocked for one reason; `count` is their number."""

    verdict: Verdict

    def identify(self, now: Instant) -> str:
        """The ID consists of the reason, the end of the block (if known) and the half hour."""
        released_at = self.verdict.released_at or 0.0
        half_hour = (released_at - now) // REPEATED_AFTER
        return f"{self.verdict.reason} {released_at:.0f} {half_hour:.0f}"

    def is_over(self, now: Instant) -> bool:
        """Whether the block is over.

        If its end is unknown, it is over 30 minutes after the last eviction.
        """
        until = self.verdict.not_before
        return now - self.last >= REPEATED_AFTER if until is None else now >= until


Episode: TypeAlias = EvacuationEpisode | BlockedEpisode
"""The subject of an Event; `identify` gives its ID in a half hour, the same in all replicas."""


class EventQueue:
    """The Events that wait to be written. `outcomes` counts the Events by outcome."""

    def __init__(self, outcomes: Counter[tuple[EventReason, EventOutcome]]) -> None:
        self._outcomes = outcomes
        self._stuck: dict[str, EvacuationEpisode] = {}
        self._blocked: dict[str, BlockedEpisode] = {}
        self._due: dict[EventReason, dict[str, Episode]] = {reason: {} for reason in EventReason}
        self._taken_at: dict[str, Instant] = {}
        self._tokens = float(BURST)
        self._filled_at = -math.inf

    def record_blocked(self, vmi: Vmi, verdict: Verdict, now: Instant) -> None:
        """Count a blocked eviction of this VMI; queue its Event if due."""
        known = self._blocked.get(vmi.uid)
        if known is not None and (known.is_over(now) or known.verdict.reason != verdict.reason):
            self._drop_blocked(known)
            known = None
        if known is not None:
            known.vmi, known.verdict, known.last = vmi, verdict, now
            known.count += 1
            if _is_repeated(known, now):
                self._due[known.reason][vmi.uid] = known
        elif len(self._blocked) < MOST_BLOCKED:
            reason = EventReason.EVICTION_BLOCKED
            blocked = BlockedEpisode(reason=reason, vmi=vmi, began=now, last=now, verdict=verdict)
            self._blocked[vmi.uid] = self._due[reason][vmi.uid] = blocked
        else:
            self._outcomes[EventReason.EVICTION_BLOCKED, EventOutcome.DROPPED] += 1

    def record_stuck(self, vmi: Vmi, diagnosis: Diagnosis, now: Instant) -> None:
        """Note a stuck evacuation at `now`; queue its Event if due."""
        reason = EventReason.EVACUATION_STUCK
        known = self._stuck.get(vmi.uid)
        if known is not None and not known.is_same(diagnosis):
            self._end_evacuation(known, now)
            known = None
        if known is None:
            known = EvacuationEpisode(
                reason=reason, vmi=vmi, began=now, last=now, diagnosis=diagnosis
            )
            self._stuck[vmi.uid] = self._due[reason][vmi.uid] = known
        known.vmi, known.diagnosis = vmi, diagnosis
        if _is_repeated(known, now) and vmi.uid not in self._due[reason]:
            known.last = now
            known.count += 1
            self._due[reason][vmi.uid] = known

    def record_ended(self, stuck: AbstractSet[str], now: Instant) -> None:
        """End every reported evacuation of a VMI whose UID is not in `stuck`."""
        for uid in self._stuck.keys() - stuck:
            self._end_evacuation(self._stuck[uid], now)

    def forget_evacuations(self) -> None:
        """Drop all evacuations, because another replica reports them."""
        self._stuck.clear()
        self._due[EventReason.EVACUATION_STUCK].clear()
        self._due[EventReason.EVACUATION_ENDED].clear()

    def prune(self, now: Instant) -> Iterator[None]:
        """Drop episodes that are over; yields after each `SLICE`, so that other tasks can run."""
        taken = self._taken_at.items()
        self._taken_at = {uid: at for uid, at in taken if 0 <= now - at < PER_VMI}
        for count, blocked in enumerate(list(self._blocked.values()), 1):
            if blocked.is_over(now) and self._blocked.get(blocked.vmi.uid) is blocked:
                self._drop_blocked(blocked)
            if count % SLICE == 0:
                yield

    def take(self, now: Instant) -> Episode | None:
        """The most urgent episode whose Event may be written now; then call `record_outcome`."""
        self._tokens = min(BURST, self._tokens + max(0.0, now - self._filled_at) * PER_SECOND)
        self._filled_at = now
        if self._tokens < 1:
            return None
        for due in self._due.values():
            for uid, episode in due.items():
                if not 0 <= now - self._taken_at.get(uid, -math.inf) < PER_VMI:
                    self._tokens -= 1
                    self._taken_at[uid] = now
                    return episode
        return None

    def record_outcome(self, episode: Episode, outcome: EventOutcome, now: Instant) -> None:
        """Count an Event's outcome; an Event that did not reach the API server stays due."""
        self._outcomes[episode.reason, outcome] += 1
        due = self._due[episode.reason]
        if outcome is EventOutcome.UNREACHABLE:
            return
        episode.written_at = now
        if due.get(episode.vmi.uid) is episode:
            del due[episode.vmi.uid]

    def _end_evacuation(self, stuck: EvacuationEpisode, now: Instant) -> None:
        """Report the end of an evacuation if it was reported as stuck."""
        uid, reason = stuck.vmi.uid, EventReason.EVACUATION_ENDED
        del self._stuck[uid]
        self._due[stuck.reason].pop(uid, None)
        if stuck.written_at is None:
            self._outcomes[stuck.reason, EventOutcome.DROPPED] += 1
            return
        self._due[reason][uid] = EvacuationEpisode(
            reason=reason, vmi=stuck.vmi, began=now, last=now, diagnosis=stuck.diagnosis
        )

    def _drop_blocked(self, blocked: BlockedEpisode) -> None:
        del self._blocked[blocked.vmi.uid]
        self._due[blocked.reason].pop(blocked.vmi.uid, None)
        if blocked.written_at is None:
            self._outcomes[blocked.reason, EventOutcome.DROPPED] += 1


def _is_repeated(episode: Episode, now: Instant) -> bool:
    """Whether another Event is due, `REPEATED_AFTER` after the episode's last one."""
    return episode.written_at is not None and now - episode.written_at >= REPEATED_AFTER
