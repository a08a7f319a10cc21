"""May this VMI be evicted now? The rules, in the order in which they speak.

Theory. A verdict is a function of what the cluster showed (`Evidence`), the operator's policy and
an instant. Nothing here reads a clock. What was worked out is kept with the evidence, for as long
as working it out again would give the same. Everything that is unknown is allowed: blocking needs
evidence.

Two checkpoints, as in the descheduler: `filter` asks whether a pod may be a candidate at all,
`preEviction` whether it may be evicted right now. Asked with neither, all rules apply. The first
rule that blocks gives the reason:

1. running migration (filter): `status.migrationState` has a start and no end. An end that is
   written but cannot be read means "ended": neither running nor cooling down.
2. pending migration (filter, guard): an unfinished VMIM belongs to the VMI. It covers the time
   before hand-off, and that between hand-off and start, when KubeVirt's `handleTargetPodHandoff`
   has put a fresh struct in the place of the old one and start and end are gone.
3. requested evacuation (filter, guard): `status.evacuationNodeName` is set and is the node that
   the VMI is on, and its launcher pod is known not to carry the descheduler's own
   `eviction-in-progress`. With that annotation the answer is "allowed": the descheduler's request
   cache counts the pod already, and hiding it would make it pick another VM instead.
4. cooldown (preEviction): the last migration ended less than the effective cooldown ago.

    base      = max(migrationCooldown, duration of the last ended migration)
    backed    = base * 2^(n-1) for n >= 1, else base
    effective = min(backed, maxMigrationCooldown)           (0 = no cap)

n counts the VMI's handed-off migrations that ended inside the sliding window, this one included.
n falls as endings leave the window, so a VMI can be released before its ending's age reaches the
cooldown that holds now: `not_before` looks ahead through those steps.

The last ended migration is the VMI's own `migrationState`. Where a hand-off has emptied that
struct there is no end and the cooldown is silent, as in the reference plugin; but with the guard
on, an emptied struct whose VMIM is not unfinished any more (it failed, it was deleted, KubeVirt's
zombie state) falls back to the newest ending of the history. So does a failure that the policy
leaves out: it does not wipe out the cooldown of the success before it.

A VMI that has ended (phase Succeeded or Failed) is allowed by every rule: nothing is left to move,
and KubeVirt leaves the status of its last migration and its evacuation as they were.

Each rule names the resources that it `needs`. Once the API server has been silent about one of them
for too long (it is in `dead`), the rule answers "allowed": dead evidence does not block. The
cooldown needs no news to run out.
"""

import math
from collections.abc import Callable, Iterator

from msgspec import Struct
from msgspec.structs import force_setattr

from exporter.engine.evidence import Evidence
from exporter.engine.history import Ending, settle
from exporter.engine.model import (
    CLOCK_SKEW,
    Checkpoint,
    Instant,
    Mismatch,
    Outcome,
    Policy,
    Reason,
    Resource,
    Seconds,
    Verdict,
)


LONGEST_COOLDOWN: Seconds = float(2**63 // 10**9)
"""Go's longest duration (292 years), where the reference's doubling saturates too."""


class Cooldown(Struct, frozen=True, kw_only=True, gc=False):
    """The arithmetic of one VMI's cooldown at one instant.

    `blocks` says whether it holds; `not_before` and `released_at` as in `Verdict`.
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


class Rule(Struct, frozen=True, kw_only=True):
    """One line of the table of rules. It is silent while a resource that it `needs` is dead."""

    name: str
    reason: Reason
    checkpoint: Checkpoint
    needs: frozenset[Resource] = frozenset()
    enabled: Callable[[Policy], bool] = lambda _policy: True
    blocks: Callable[[Evidence, Cooldown | None, Instant], bool]


class Finding(Struct, frozen=True, kw_only=True):
    """What one rule said of one VMI, for the person who asks why."""

    rule: str
    reason: Reason
    checkpoint: Checkpoint
    enabled: bool
    silenced: bool
    blocks: bool


class _Standing(Struct, gc=False):
    """What was worked out of an Evidence under `policy`, and holds from `since` to before `until`.

    `revision` is that of its history. The verdicts are those of both checkpoints, of filter and of
    preEviction, once asked for.
    """

    policy: Policy
    revision: int
    since: Instant
    until: Instant
    cooldown: Cooldown | None
    migrations_in_window: int
    both: Verdict | None = None
    filter: Verdict | None = None
    pre_eviction: Verdict | None = None


_SLOTS = {None: "both", Checkpoint.FILTER: "filter", Checkpoint.PRE_EVICTION: "pre_eviction"}


def decide(
    evidence: Evidence,
    policy: Policy,
    now: Instant,
    *,
    checkpoint: Checkpoint | None = None,
    dead: frozenset[Resource] = frozenset(),
) -> Verdict:
    """The verdict at `now`, for one checkpoint or (None) for both.

    `dead` are the resources that are dead in the VMI's namespace.
    """
    standing = _stand(evidence, policy, now)
    if dead:
        return _judge(evidence, standing, now, checkpoint, dead)
    slot = _SLOTS[checkpoint]
    verdict: Verdict | None = getattr(standing, slot)
    if verdict is None:
        verdict = _judge(evidence, standing, now, checkpoint, dead)
        setattr(standing, slot, verdict)
    return verdict


def _stand(evidence: Evidence, policy: Policy, now: Instant) -> _Standing:
    """What holds at `now`, kept with the evidence while it does.

    Because the arithmetic takes 10 us for each VMI, and a scrape, the blocked set and a
    descheduler's next round ask for it again while nothing has changed: 0.2 us.
    """
    kept: _Standing | None = evidence.kept
    if (
        kept is not None
        and kept.since <= now < kept.until
        and kept.revision == evidence.history.revision
        and kept.policy is policy
    ):
        return kept
    cooldown = work_out_cooldown(evidence, policy, now)
    standing = _Standing(
        policy=policy,
        revision=evidence.history.revision,
        since=now,
        until=_stands_until(evidence, cooldown, policy, now),
        cooldown=cooldown,
        migrations_in_window=(
            cooldown.migrations_in_window
            if cooldown is not None
            else len(count_in_window(_counted(evidence, policy, now), policy, now))
        ),
    )
    force_setattr(evidence, "kept", standing)
    return standing


def _stands_until(
    evidence: Evidence, cooldown: Cooldown | None, policy: Policy, now: Instant
) -> Instant:
    """When the clock alone may change the arithmetic: at once where an end lies just ahead."""
    until = math.inf
    if cooldown is not None and cooldown.blocks:
        until = cooldown.not_before
    for end in _written_ends(evidence):
        if end > now + CLOCK_SKEW:
            until = min(until, end - CLOCK_SKEW)
        elif end > now:
            return now
        elif end + policy.migration_history_window > now:
            until = min(until, end + policy.migration_history_window)
    return until


def _written_ends(evidence: Evidence) -> Iterator[Instant]:
    state = evidence.vmi.migration
    if state is not None and state.end is not None:
        yield state.end
    yield from evidence.history.written_ends()


def _judge(
    evidence: Evidence,
    standing: _Standing,
    now: Instant,
    checkpoint: Checkpoint | None,
    dead: frozenset[Resource],
) -> Verdict:
    cooldown, policy = standing.cooldown, standing.policy
    effective = None if cooldown is None else cooldown.effective
    for rule in RULES:
        if checkpoint is not None and rule.checkpoint is not checkpoint:
            continue
        if not _applies(rule, policy, dead) or not rule.blocks(evidence, cooldown, now):
            continue
        held = cooldown if rule.reason is Reason.COOLDOWN else None
        return Verdict(
            known=True,
            checkpoint=rule.checkpoint,
            reason=rule.reason,
            not_before=None if held is None else held.not_before,
            released_at=None if held is None else held.released_at,
            effective_cooldown=effective,
            migrations_in_window=standing.migrations_in_window,
        )
    return Verdict(
        known=True,
        effective_cooldown=effective,
        migrations_in_window=standing.migrations_in_window,
    )


def is_quiet(evidence: Evidence) -> bool:
    """Whether no rule could speak: most VMIs, most of the time."""
    vmi = evidence.vmi
    if vmi.finished:
        return True
    return vmi.migration is None and not vmi.evacuation_node and not evidence.vmims


def not_ours(mismatch: Mismatch) -> Verdict:
    """The verdict on a candidate that is none of the cluster's VMIs: allowed."""
    return Verdict(known=False, mismatch=mismatch)


def explain(
    evidence: Evidence,
    policy: Policy,
    now: Instant,
    *,
    dead: frozenset[Resource] = frozenset(),
) -> list[Finding]:
    """What each rule says, in order, whether or not an earlier one has blocked already."""
    cooldown = measure_cooldown(evidence, policy, now)
    return [
        Finding(
            rule=rule.name,
            reason=rule.reason,
            checkpoint=rule.checkpoint,
            enabled=rule.enabled(policy),
            silenced=not rule.needs.isdisjoint(dead),
            blocks=_applies(rule, policy, dead) and rule.blocks(evidence, cooldown, now),
        )
        for rule in RULES
    ]


def measure_cooldown(evidence: Evidence, policy: Policy, now: Instant) -> Cooldown | None:
    """The cooldown of the last ended migration, or None where no such end is to be read."""
    return _stand(evidence, policy, now).cooldown


def holds_until(evidence: Evidence, policy: Policy, now: Instant) -> Instant:
    """When the clock alone may change what is decided and measured at `now`: maybe at once."""
    return _stand(evidence, policy, now).until


def work_out_cooldown(evidence: Evidence, policy: Policy, now: Instant) -> Cooldown | None:
    """`measure_cooldown` without a memory."""
    endings = _counted(evidence, policy, now)
    last = _last_ended(evidence, policy, endings, now)
    if last is None:
        return None
    in_window = len(count_in_window(endings, policy, now))
    base = max(policy.migration_cooldown, last.duration)
    backed = back_off(base, in_window)
    not_before = _release(last.end, base, endings, policy, now)
    ahead = last.written_end > last.end
    return Cooldown(
        end=last.end,
        duration=last.duration,
        migrations_in_window=in_window,
        base=base,
        backed=backed,
        effective=cap(backed, policy),
        not_before=not_before,
        released_at=(
            _release(last.written_end, base, endings, policy, now) if ahead else not_before
        ),
        blocks=now < not_before,
    )


def count_in_window(endings: list[Ending], policy: Policy, now: Instant) -> list[Ending]:
    """Those that count towards backoff: `now - window < end <= now`."""
    window = policy.migration_history_window
    return [ending for ending in endings if ending.end <= now < ending.end + window]


def back_off(base: Seconds, migrations: int) -> Seconds:
    """`base * 2^(migrations-1)`, never beyond `LONGEST_COOLDOWN`."""
    if migrations <= 1:
        return min(base, LONGEST_COOLDOWN)
    return min(base * 2.0 ** min(migrations - 1, 64), LONGEST_COOLDOWN)


def cap(cooldown: Seconds, policy: Policy) -> Seconds:
    """The cooldown under the policy's cap; a cap of 0 is none."""
    limit = policy.max_migration_cooldown
    return min(cooldown, limit) if limit else cooldown


def _applies(rule: Rule, policy: Policy, dead: frozenset[Resource]) -> bool:
    return rule.enabled(policy) and rule.needs.isdisjoint(dead)


def _counted(evidence: Evidence, policy: Policy, now: Instant) -> list[Ending]:
    return evidence.history.endings(now, count_failed=policy.count_failed_migrations)


def _last_ended(
    evidence: Evidence, policy: Policy, endings: list[Ending], now: Instant
) -> Ending | None:
    state = evidence.vmi.migration
    if state is None or evidence.vmi.finished:
        return None
    if state.ended:
        outcome = max(state.outcome, evidence.history.outcome(state.uid, state.end))
        if outcome is Outcome.FAILED and not policy.count_failed_migrations:
            return endings[-1] if endings else None
        end = settle(state.end, now)
        if end is None or state.end is None:
            return None
        return Ending(end=end, written_end=state.end, start=state.start, outcome=outcome)
    if state.start is None and policy.guard_pending_migrations and _was_abandoned(evidence):
        return endings[-1] if endings else None
    return None


def _was_abandoned(evidence: Evidence) -> bool:
    """Whether the VMIM that emptied the struct is known to be unfinished no longer."""
    if not evidence.vmims_seen or evidence.vmi.migration is None:
        return False
    uid = evidence.vmi.migration.uid
    return not any(not vmim.finished and (not uid or vmim.uid == uid) for vmim in evidence.vmims)


def _release(
    end: Instant, base: Seconds, endings: list[Ending], policy: Policy, now: Instant
) -> Instant:
    """When the cooldown that began at `end` stops holding, if nothing else happens.

    Between two endings leaving the window it is constant, so each such stretch of time is
    tried in turn; `endings` are sorted, oldest first.
    """
    counted = count_in_window(endings, policy, now)
    free_at = end + cap(back_off(base, len(counted)), policy)
    for left, oldest in enumerate(counted, start=1):
        leaves_at = oldest.written_end + policy.migration_history_window
        if free_at <= leaves_at:
            break
        free_at = max(leaves_at, end + cap(back_off(base, len(counted) - left), policy))
    return free_at


def _runs(evidence: Evidence, _cooldown: Cooldown | None, _now: Instant) -> bool:
    state = evidence.vmi.migration
    return state is not None and state.running and not evidence.vmi.finished


def _is_pending(evidence: Evidence, _cooldown: Cooldown | None, _now: Instant) -> bool:
    return evidence.unfinished() is not None and not evidence.vmi.finished


def _is_requested(evidence: Evidence, _cooldown: Cooldown | None, _now: Instant) -> bool:
    vmi, launcher = evidence.vmi, evidence.launcher
    if not vmi.evacuation_node or vmi.evacuation_node != vmi.node or vmi.finished:
        return False
    return launcher is not None and not launcher.eviction_in_progress


def _cools_down(_evidence: Evidence, cooldown: Cooldown | None, _now: Instant) -> bool:
    return cooldown is not None and cooldown.blocks


RULES: tuple[Rule, ...] = (
    Rule(
        name="running_migration",
        reason=Reason.MIGRATION_IN_PROGRESS,
        checkpoint=Checkpoint.FILTER,
        needs=frozenset({Resource.VMIS}),
        blocks=_runs,
    ),
    Rule(
        name="pending_migration",
        reason=Reason.MIGRATION_IN_PROGRESS,
        checkpoint=Checkpoint.FILTER,
        needs=frozenset({Resource.VMIS, Resource.VMIMS}),
        enabled=lambda policy: policy.guard_pending_migrations,
        blocks=_is_pending,
    ),
    Rule(
        name="requested_evacuation",
        reason=Reason.EVACUATION_IN_PROGRESS,
        checkpoint=Checkpoint.FILTER,
        needs=frozenset({Resource.VMIS, Resource.PODS}),
        enabled=lambda policy: policy.guard_evacuations,
        blocks=_is_requested,
    ),
    Rule(
        name="cooldown",
        reason=Reason.COOLDOWN,
        checkpoint=Checkpoint.PRE_EVICTION,
        blocks=_cools_down,
    ),
)
