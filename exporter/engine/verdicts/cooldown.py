"""How long a VMI cools down after a migration.

    base      = max(migrationCooldown, duration of the last ended migration)
    backed    = base * 2^(n-1) for n >= 1, else base
    effective = min(backed, maxMigrationCooldown)           (0 = no cap)

n is the number of the VMI's handed-off migrations that ended inside the sliding window, including
the last one. n falls as endings leave the window, so a VMI can be released before the present
cooldown has passed. `not_before` takes these later values of n into account.

The last ended migration is the VMI's own `migrationState`. If a hand-off has emptied that struct,
there is no end and no cooldown, as in the reference plugin. The newest ending of the history is
used instead in three cases:

- `guard_pending_migrations` is on, the struct is empty, and its VMIM is finished or deleted;
- `guard_pending_migrations` is on, the VMI has a start and no end, and its VMIM finished at least
  `kube.deadAfter` ago;
- the last migration failed, and the policy does not count failures.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from msgspec import Struct

from exporter.engine.facts.evidence import Evidence
from exporter.engine.facts.history import Ending, settle
from exporter.engine.facts.model import Instant, Outcome, Resource, Seconds
from exporter.engine.facts.policy import PolicyValues


LONGEST_COOLDOWN: Seconds = float(2**63 // 10**9)
"""Go's longest duration (292 years); the reference plugin also stops doubling there."""


class Length(NamedTuple):
    """The length of a cooldown, before the backoff, after it, and after the cap."""

    base: Seconds
    backed: Seconds
    effective: Seconds


class Cooldown(Struct, frozen=True, kw_only=True, gc=False):
    """The cooldown of one VMI at one instant.

    `blocks` is true while the cooldown runs. `not_before` and `released_at` are those of `Verdict`.
    `moves`: the last end lies ahead of our clock and counts as now, so `end` and `not_before` get
    later as time passes.
    """

    end: Instant
    duration: Seconds
    migrations_in_window: int
    base: Seconds
    backed: Seconds
    effective: Seconds
    not_before: Instant
    released_at: Instant
    blocks: bool
    moves: bool


class CooldownMark(Struct, frozen=True, gc=False):
    """Tells the cooldowns of a VMI apart: its last ended migration, and the end that counts.

    Each new cooldown has another migration and another end. Another end alone is one that was
    corrected, or that lies ahead of our clock; another migration alone is a failure that the policy
    does not count.
    """

    migration: str = ""
    end: Instant = 0.0

    def is_new_after(self, known: "CooldownMark") -> bool:
        """Whether this is another cooldown than the `known` one."""
        return self.migration != known.migration and self.end != known.end


def mark_cooldown(evidence: Evidence, cooldown: Cooldown) -> CooldownMark:
    """The mark of a VMI's cooldown. A migration without a UID is identified by its end.

    A cooldown without an end in the VMI is by an end in the history, see `_last_ended`.
    """
    state = evidence.vmi.migration
    if state is not None and state.ended:
        return CooldownMark(state.uid or f"@{state.end}", cooldown.end)
    ended = (
        (record.known_end, key)
        for key, record in evidence.history.records().items()
        if record.known_end is not None
    )
    return CooldownMark(max(ended)[1], cooldown.end)


def known_ends(evidence: Evidence) -> Iterator[Instant]:
    """All ends of migrations in the VMI and its history, including those ahead of our clock."""
    if (end := evidence.migration_end) is not None:
        yield end
    yield from evidence.history.known_ends()


def measure_cooldown(evidence: Evidence, policy: PolicyValues, now: Instant) -> Cooldown | None:
    """The cooldown after the last ended migration, or None if no end is known."""
    endings = _list_endings(evidence, policy, now)
    last = _last_ended(evidence, policy, endings, now)
    if last is None:
        return None
    in_window = len(count_in_window(endings, policy, now))
    length = measure_cooldown_length(last, in_window, policy)
    end = min(last.end, now)
    not_before = released_at = _release(end, last, endings, policy, now)
    if last.end > end:
        released_at = _release(last.end, last, endings, policy, now)
    return Cooldown(
        end=end,
        duration=last.duration,
        migrations_in_window=in_window,
        base=length.base,
        backed=length.backed,
        effective=length.effective,
        not_before=not_before,
        released_at=released_at,
        blocks=now < not_before,
        moves=last.end > end,
    )


def measure_cooldown_length(last: Ending, migrations: int, policy: PolicyValues) -> Length:
    """The length of the cooldown after `last`, with this number of migrations in the window."""
    base = max(policy.migration_cooldown, last.duration)
    backed = back_off(base, migrations)
    return Length(base, backed, cap(backed, policy))


def list_counted(evidence: Evidence, policy: PolicyValues, now: Instant) -> list[Ending]:
    """The VMI's ended migrations that count towards the backoff at `now`, oldest first."""
    return count_in_window(_list_endings(evidence, policy, now), policy, now)


def list_cooldowns(
    endings: Iterable[Ending], policy: PolicyValues
) -> Iterator[tuple[Instant, Seconds]]:
    """When each cooldown of a VMI began, and its length then; `endings` are handed off."""
    counted = [ending for ending in endings if _counts(ending.outcome, policy)]
    for last in counted:
        earlier = [ending for ending in counted if ending.end <= last.end]
        in_window = len(count_in_window(earlier, policy, last.end))
        yield last.end, measure_cooldown_length(last, in_window, policy).effective


def count_in_window(endings: list[Ending], policy: PolicyValues, now: Instant) -> list[Ending]:
    """The endings that count towards the backoff: those less than a window old.

    An end ahead of our clock counts as now.
    """
    window = policy.migration_history_window
    return [ending for ending in endings if now < min(ending.end, now) + window]


def back_off(base: Seconds, migrations: int) -> Seconds:
    """`base * 2^(migrations-1)`, at most `LONGEST_COOLDOWN`."""
    doublings = min(max(migrations - 1, 0), 64)
    return min(base * 2.0**doublings, LONGEST_COOLDOWN)


def cap(cooldown: Seconds, policy: PolicyValues) -> Seconds:
    """Limit a cooldown to the policy's cap; 0 means no cap."""
    limit = policy.max_migration_cooldown
    return min(cooldown, limit) if limit else cooldown


def _counts(outcome: Outcome, policy: PolicyValues) -> bool:
    return policy.count_failed_migrations or outcome is not Outcome.FAILED


def _list_endings(evidence: Evidence, policy: PolicyValues, now: Instant) -> list[Ending]:
    return evidence.history.endings(now, count_failed=policy.count_failed_migrations)


def _last_ended(
    evidence: Evidence, policy: PolicyValues, endings: list[Ending], now: Instant
) -> Ending | None:
    state = evidence.vmi.migration
    if state is None or evidence.vmi.finished:
        return None
    if state.ended:
        outcome = max(state.outcome, evidence.history.find(state.uid, state.end).outcome)
        if not _counts(outcome, policy):
            return endings[-1] if endings else None
        end = evidence.migration_end
        if end is None or settle(end, now) is None:
            return None
        return Ending(end=end, start=evidence.migration_start, outcome=outcome)
    is_over = evidence.is_contradicted(now)
    if state.start is None and evidence.trust.sees(Resource.VMIMS):
        # A hand-off emptied the struct. That migration is over if its VMIM is finished or deleted.
        is_over |= all(v.finished or (state.uid and v.uid != state.uid) for v in evidence.vmims)
    return endings[-1] if endings and is_over and policy.guard_pending_migrations else None


def _release(
    end: Instant, last: Ending, endings: list[Ending], policy: PolicyValues, now: Instant
) -> Instant:
    """When the cooldown that began at `end` is over, if nothing else happens.

    The cooldown shrinks whenever an ending leaves the window and is constant in between, so each
    of these intervals is tried in turn. `endings` are sorted, oldest first.
    """
    counted = count_in_window(endings, policy, now)
    free_at = end + measure_cooldown_length(last, len(counted), policy).effective
    for gone, oldest in enumerate(counted, start=1):
        leaves_at = oldest.end + policy.migration_history_window
        if free_at <= leaves_at:
            break
        length = measure_cooldown_length(last, len(counted) - gone, policy)
        free_at = max(leaves_at, end + length.effective)
    return free_at
