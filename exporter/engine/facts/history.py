"""The migrations of a VMI: one record per migration, merged from all sources.

The key of a record is the migration's UID (the VMIM's UID, `migrationState.migrationUid`), so that
the same idempotent `put` serves lists, watches, replays and restarts. Without a UID the key is the
end in whole seconds.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from msgspec import Struct, field

from exporter.engine.facts.model import (
    CLOCK_SKEW,
    EndReason,
    Instant,
    Outcome,
    Requester,
    Seconds,
    Trigger,
)


_Value = TypeVar("_Value")


class Migration(Struct, frozen=True, gc=False, array_like=True):
    """One migration, which is stored as an array of its fields, because there are many.

    The source's clock gives `start`, and the target's clock gives `end`. The control plane's clock
    gives `scheduled_at` and `finished_at`, the VMIM's transitions to Scheduled and to its final
    phase. The nodes are "" and the other fields None where they are not known.
    """

    start: Instant | None = None
    end: Instant | None = None
    finished_at: Instant | None = None
    outcome: Outcome = Outcome.UNKNOWN
    handed_off: bool = False
    source_node: str = ""
    target_node: str = ""
    trigger: Trigger | None = None
    reason: EndReason | None = None
    requested_by: Requester | None = None
    scheduled_at: Instant | None = None

    @property
    def known_end(self) -> Instant | None:
        """When the migration ended; None if no end is known."""
        return correct_end(self.end, self.finished_at)

    @property
    def known_start(self) -> Instant | None:
        """When the migration started, by the clock of `known_end`; None if that is unknown.

        It took as long as the nodes say. If only one of their clocks is wrong, that is too long;
        the control plane saw it begin after `scheduled_at` and end before `finished_at`.
        """
        end = self.known_end
        if self.start is None or end is None:
            return self.start
        if self.end is None:
            return None
        start = self.start + (end - self.end)
        if self.scheduled_at is None or self.finished_at is None:
            return start
        return max(start, end - (self.finished_at - self.scheduled_at))


class Ending(Struct, frozen=True, gc=False):
    """A migration that has ended; one clock gives `start` and `end`.

    `end` may be up to `CLOCK_SKEW` ahead of our clock.
    """

    end: Instant
    start: Instant | None = None
    outcome: Outcome = Outcome.UNKNOWN

    @property
    def duration(self) -> Seconds:
        """How long the migration took; 0 if the start is unknown or later than the end."""
        return 0.0 if self.start is None else max(0.0, self.end - self.start)


def settle(end: Instant | None, now: Instant) -> Instant | None:
    """Return `end`, or `now` if `end` is up to `CLOCK_SKEW` later, or None if it is even later."""
    if end is None or end > now + CLOCK_SKEW:
        return None
    return min(end, now)


def correct_end(end: Instant | None, finished_at: Instant | None) -> Instant | None:
    """When a migration ended, by a node's clock, or else by the control plane's clock.

    If both are known and differ by more than `CLOCK_SKEW`, the node's clock counts as wrong.
    """
    if end is None or (finished_at is not None and abs(end - finished_at) > CLOCK_SKEW):
        return finished_at
    return end


def complete_failure(
    failure: EndReason, start: Instant | None, end: Instant | None, *, source_lost: bool
) -> EndReason:
    """Why a migration failed after its hand-off, if KubeVirt gives no reason (`OTHER`) either.

    `source_lost`: its VM has stopped. If the target pod is gone, virt-controller writes an end that
    equals the start.
    """
    if failure is not EndReason.OTHER:
        return failure
    if source_lost:
        return EndReason.SOURCE_LOST
    return EndReason.TARGET_LOST if start is not None and start == end else EndReason.OTHER


def join(first: Migration, other: Migration) -> Migration:
    """Merge two records of one migration; this is commutative, associative and idempotent."""
    return Migration(
        start=_choose(min, first.start, other.start),
        end=_choose(max, first.end, other.end),
        finished_at=_choose(max, first.finished_at, other.finished_at),
        outcome=max(first.outcome, other.outcome),
        handed_off=first.handed_off or other.handed_off,
        source_node=max(first.source_node, other.source_node),
        target_node=max(first.target_node, other.target_node),
        trigger=_choose_latest(_TRIGGERS, first.trigger, other.trigger),
        reason=_choose_latest(_REASONS, first.reason, other.reason),
        requested_by=_choose(min, first.requested_by, other.requested_by),
        scheduled_at=_choose(min, first.scheduled_at, other.scheduled_at),
    )


def is_end_key(key: str) -> bool:
    """Whether a record's key is its end instead of a UID."""
    return key.startswith("@")


class History(Struct, gc=False):
    """The migrations of one VMI, by key. `revision` grows with every change."""

    _records: dict[str, Migration] = field(default_factory=dict)
    revision: int = 0

    def __len__(self) -> int:
        return len(self._records)

    def put(self, uid: str, migration: Migration, *, keep: int) -> bool:
        """Merge a record; True if that changed anything.

        Keeps the newest `keep` failures, the newest `keep` other endings, and `keep` unfinished
        migrations. Failures are limited separately, because some policies do not count them. A
        record with neither UID nor end cannot be identified and is ignored.
        """
        key = uid or _end_key(migration.end)
        if not key:
            return False
        known = self._records.get(key)
        joined = migration if known is None else join(known, migration)
        if joined == known:
            return False
        self._records[key] = joined
        self.revision += 1
        if len(self._records) > keep:
            self._forget(keep)
        return True

    def find(self, uid: str, end: Instant | None) -> Migration:
        """The record with this UID, or with this end if the UID is empty; empty if unknown."""
        return self._records.get(uid or _end_key(end), _UNKNOWN)

    def newest_success(self) -> Instant | None:
        """The latest end of a successful migration."""
        ends = (r.known_end for r in self._records.values() if r.outcome is Outcome.SUCCEEDED)
        return max((end for end in ends if end is not None), default=None)

    def last_duration(self) -> Seconds | None:
        """How long the newest successful migration took; None if no duration is known."""
        timed = (
            (end, end - start)
            for record in self._records.values()
            if record.outcome is Outcome.SUCCEEDED
            and (end := record.known_end) is not None
            and (start := record.known_start) is not None
        )
        _, duration = max(timed, default=(0.0, None))
        return None if duration is None else max(0.0, duration)

    def records(self) -> dict[str, Migration]:
        """A copy of all records by key."""
        return dict(self._records)

    def known_ends(self) -> Iterator[Instant]:
        """All ends in the records, including those too far ahead of our clock."""
        ends = (record.known_end for record in self._records.values())
        return (end for end in ends if end is not None)

    def endings(self, now: Instant, *, count_failed: bool = True) -> list[Ending]:
        """The handed-off migrations that have ended by `now`, oldest first.

        `count_failed=False` excludes failures.
        """
        settled = []
        named_seconds = set()
        for key, record in self._records.items():
            end = record.known_end
            if end is None or settle(end, now) is None:
                continue
            if not is_end_key(key):
                named_seconds.add(int(end))
            settled.append((key, record, Ending(end, record.known_start, record.outcome)))
        endings = []
        for key, record, ending in settled:
            if not record.handed_off or (record.outcome is Outcome.FAILED and not count_failed):
                continue
            if is_end_key(key) and int(ending.end) in named_seconds:
                continue
            endings.append(ending)
        endings.sort(key=lambda ending: ending.end)
        return endings

    def _forget(self, keep: int) -> None:
        failed: list[tuple[Instant, str]] = []
        ended: list[tuple[Instant, str]] = []
        unfinished: list[str] = []
        for key, record in self._records.items():
            end = record.known_end
            if end is None:
                unfinished.append(key)
            elif record.outcome is Outcome.FAILED:
                failed.append((end, key))
            else:
                ended.append((end, key))
        for _, key in sorted(failed)[:-keep] + sorted(ended)[:-keep]:
            del self._records[key]
        for key in unfinished[:-keep]:
            del self._records[key]


_UNKNOWN = Migration()
_TRIGGERS = tuple(Trigger)
_REASONS = tuple(reversed(EndReason))
"""If two sources differ, the later trigger or reason is right: it says more."""


def _end_key(end: Instant | None) -> str:
    return "" if end is None else f"@{int(end)}"


def _choose(
    choose: Callable[[_Value, _Value], _Value], first: _Value | None, other: _Value | None
) -> _Value | None:
    """The lesser (`min`) or greater (`max`) of two values, of which either may be unknown."""
    if first is None or other is None:
        return other if first is None else first
    return choose(first, other)


def _choose_latest(
    order: Sequence[_Value], first: _Value | None, other: _Value | None
) -> _Value | None:
    """The value that comes later in the order, of two that may be unknown."""
    if first is other or other is None:
        return first
    return other if first is None else max(first, other, key=order.index)
