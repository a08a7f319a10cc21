"""Builds the API's answers from verdicts, rules and history. Pure."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from msgspec import UNSET, convert, structs

from exporter import __version__
from exporter.counters import HeldEviction
from exporter.engine.advice import advise, find_blocker, may_cancel, write_cancel
from exporter.engine.cooldown import Cooldown, count_in_window
from exporter.engine.diagnosis import Diagnosis
from exporter.engine.drain import (
    Conditions,
    DrainCandidate,
    DrainOutcome,
    Forecast,
    find_outcome,
)
from exporter.engine.evidence import Evidence
from exporter.engine.history import History
from exporter.engine.model import (
    Checkpoint,
    Instant,
    Outcome,
    Policy,
    Reason,
    Resource,
    Seconds,
    Verdict,
    Vmi,
    Vmim,
    Why,
)
from exporter.engine.rules import RuleResult, explain
from exporter.engine.verdicts import Entry
from exporter.health import Health
from exporter.server.schemas import (
    BackoffAnswer,
    CancelAnswer,
    CheckpointVerdicts,
    CooldownAnswer,
    DrainAnswer,
    DrainProgressAnswer,
    EvacuationAnswer,
    EvacuationsAnswer,
    HeldEvictionAnswer,
    HistoryStatus,
    LastSeenAnswer,
    LauncherAnswer,
    MigrationAnswer,
    NodeAnswer,
    NodeCandidate,
    NodesAnswer,
    PendingAnswer,
    PolicyAnswer,
    RequesterAnswer,
    ResourceAnswer,
    RuleAnswer,
    StatusAnswer,
    VerdictAnswer,
    VmiAnswer,
    VmiCounts,
    WhyAnswer,
)
from exporter.text import to_datetime, to_optional_datetime, to_release, write_instant, write_span


_convert = partial(convert, from_attributes=True, strict=False)
"""Copies attributes of the same names; instants by our own clock become datetimes."""


def write_verdict(
    namespace: str,
    name: str,
    verdict: Verdict,
    now: Instant,
    *,
    diagnosis: Diagnosis | None = None,
    drain: DrainOutcome | None = None,
) -> VerdictAnswer:
    """The API's form of a verdict that was made at `now`; `drain` is None if the VMI is unknown."""
    # Nulls are tested here and not in helpers: most fields are null, and each call takes 0.5 us.
    end, effective, reason = verdict.not_before, verdict.effective_cooldown, verdict.reason
    return VerdictAnswer(
        namespace=namespace,
        name=name,
        known=verdict.known,
        mismatch=verdict.mismatch,
        allowed=reason is None,
        reason=reason,
        not_before=None if end is None else to_release(end),
        # Rounded up, so that waiting that long is enough.
        retry_after_seconds=None if end is None else math.ceil(max(0.0, end - now) * 1000) / 1000,
        effective_cooldown_seconds=None if effective is None else _round(effective),
        migrations_in_window=verdict.migrations_in_window,
        evacuating=diagnosis is not None,
        stuck=diagnosis is not None and diagnosis.stuck,
        drain=drain,
    )


def list_evacuations(
    evacuating: Iterable[Evidence],
    conditions: Conditions,
    health: Health,
    *,
    reasons: Callable[[Vmi], tuple[Why, ...]],
) -> EvacuationsAnswer:
    """Every evacuation with its diagnosis, the longest first; `reasons` are the store's."""
    now = conditions.now
    answers = [
        _write_evacuation(evidence, conditions, reasons(evidence.vmi)) for evidence in evacuating
    ]
    found = [answer for answer in answers if answer is not None]
    found.sort(key=lambda one: (-one.age_seconds, one.namespace, one.name))
    return EvacuationsAnswer(
        as_of=to_datetime(now),
        observed_at=to_optional_datetime(health.observed_at),
        stale=health.is_stale(now, (one.namespace for one in found)),
        evacuations=found,
        blind_spots=health.refused_resources(),
    )


def list_nodes(
    forecasts: Iterable[Forecast], namespaces: Iterable[str], now: Instant, health: Health
) -> NodesAnswer:
    """The forecasts of all nodes, in their order; `namespaces` are those of their VMIs."""
    return NodesAnswer(
        as_of=to_datetime(now),
        stale=health.is_stale(now, namespaces),
        nodes=[write_node(one) for one in forecasts],
    )


def write_node(forecast: Forecast) -> NodeAnswer:
    """The API's form of a node's forecast."""
    return NodeAnswer(**_write_forecast(forecast))


def describe_drain(
    forecast: Forecast, candidates: Sequence[DrainCandidate], now: Instant, health: Health
) -> DrainAnswer:
    """The forecast of one node and of each VMI on it."""
    return DrainAnswer(
        as_of=to_datetime(now),
        stale=health.is_stale(now, (one.evidence.vmi.namespace for one in candidates)),
        candidates=[
            NodeCandidate(
                namespace=one.evidence.vmi.namespace,
                name=one.evidence.vmi.name,
                outcome=one.outcome,
                why=[write_why(why) for why in one.reasons],
                cause=None if cause is None else write_why(cause),
                failed_attempts=one.failed_attempts,
                last_duration_seconds=_round(one.last_duration),
            )
            for one in candidates
            for cause in [find_blocker(one.reasons)]
        ],
        **_write_forecast(forecast),
    )


def describe_status(
    health: Health,
    *,
    drain: Mapping[DrainOutcome, int],
    blocked: Mapping[Reason, int],
    reasons: Iterable[Reason],
    now: Instant,
    vmis: int,
) -> StatusAnswer:
    """The exporter's health and VMI counts.

    `drain` has the number of VMIs by outcome, and `blocked` that of blocked ones by reason, of
    which `reasons` are possible.
    """
    history = health.history
    return StatusAnswer(
        version=__version__,
        as_of=to_datetime(now),
        observed_at=to_optional_datetime(health.observed_at),
        staleness=health.staleness(now),
        ready=health.ready,
        waiting_for=health.waiting_for(),
        resources=[
            ResourceAnswer(
                resource=watched.resource,
                namespace=watched.namespace,
                synced=watched.synced,
                refused=watched.refused or None,
                trouble=watched.trouble or None,
                contact_at=to_optional_datetime(watched.contact),
                refused_objects=watched.refused_objects,
            )
            for watched in health.watched
        ],
        blind_spots=health.refused_resources(),
        history=None
        if history is None
        else HistoryStatus(
            writes=history.writes,
            written_at=to_optional_datetime(history.written_at),
            unwritten_since=to_optional_datetime(history.unwritten_since),
            vmis=history.vmis,
            bytes=history.size,
            faults={fault: count for fault, count in history.faults.items() if count},
        ),
        vmis=VmiCounts(
            known=vmis,
            allowed=vmis - sum(blocked.values()),
            held={reason: blocked.get(reason, 0) for reason in reasons},
            drain={outcome: drain.get(outcome, 0) for outcome in DrainOutcome},
        )
        if health.ready
        else None,
    )


def explain_vmi(
    entry: Entry,
    policy: Policy,
    conditions: Conditions,
    health: Health,
    *,
    why: tuple[Why, ...] = (),
    held_evictions: Iterable[HeldEviction] = (),
) -> VmiAnswer:
    """Everything known about one VMI, with the result of each rule; `why` are its reasons."""
    evidence, cooldown, now = entry.evidence, entry.cooldown, conditions.now
    vmi = evidence.vmi
    policy = policy.of(vmi)
    dead = conditions.dead.of(vmi.namespace)
    diagnosis = conditions.diagnose(evidence)
    drain = find_outcome(evidence, conditions, diagnosis)

    def verdict(checkpoint: Checkpoint) -> VerdictAnswer:
        answer = entry.verdict(checkpoint)
        return write_verdict(vmi.namespace, vmi.name, answer, now, diagnosis=diagnosis, drain=drain)

    return VmiAnswer(
        as_of=to_datetime(now),
        observed_at=to_optional_datetime(health.seen_through(Resource.VMIS, vmi.namespace)),
        stale=health.is_stale(now, (vmi.namespace,)),
        unreadable_since=to_optional_datetime(
            min((since for _, since in evidence.refused), default=None)
        ),
        namespace=vmi.namespace,
        name=vmi.name,
        vmi_uid=vmi.uid,
        node=vmi.node,
        phase=vmi.phase,
        created_at=to_optional_datetime(vmi.created),
        evacuation_node_name=vmi.evacuation_node or None,
        evacuation=_write_evacuation(evidence, conditions, why),
        drain=drain,
        verdicts=CheckpointVerdicts(
            filter=verdict(Checkpoint.FILTER), pre_eviction=verdict(Checkpoint.PRE_EVICTION)
        ),
        rules=[
            RuleAnswer(**structs.asdict(result), why=_explain_rule(result, evidence, cooldown))
            for result in explain(evidence, policy, now, dead=dead)
        ],
        cooldown=None
        if cooldown is None
        else CooldownAnswer(
            ended_at=to_datetime(cooldown.end),
            duration_seconds=round(cooldown.duration, 3),
            migrations_in_window=cooldown.migrations_in_window,
            base_seconds=round(cooldown.base, 3),
            backed_off_seconds=round(cooldown.backed, 3),
            effective_seconds=round(cooldown.effective, 3),
            not_before=to_release(cooldown.not_before),
        ),
        migrations=_write_history(evidence.history, policy, now),
        pending_migrations=[_write_vmim(vmim) for vmim in evidence.vmims if not vmim.finished],
        launcher=_convert(evidence.launcher, LauncherAnswer | None),
        held_evictions=[_convert(one, HeldEvictionAnswer) for one in held_evictions],
        policy=PolicyAnswer(
            migration_cooldown_seconds=policy.migration_cooldown,
            max_migration_cooldown_seconds=policy.max_migration_cooldown,
            migration_history_window_seconds=policy.migration_history_window,
            count_failed_migrations=policy.count_failed_migrations,
            guard_pending_migrations=policy.guard_pending_migrations,
            guard_evacuations=policy.guard_evacuations,
            override=vmi.override or UNSET,
        ),
        blind_spots=health.refused_resources(),
    )


def _explain_rule(result: RuleResult, evidence: Evidence, cooldown: Cooldown | None) -> str:
    if not result.enabled:
        return "switched off by policy.guards"
    if result.silenced:
        return "a watch it needs is dead, or an object cannot be read, so this rule cannot block"
    if evidence.vmi.finished:
        return f"the VMI has stopped (phase {evidence.vmi.phase}): nothing is left to move"
    return _WHY[result.rule](evidence, cooldown)


def _why_running(evidence: Evidence, _cooldown: Cooldown | None) -> str:
    state = evidence.vmi.migration
    if state is None:
        return "the VMI has no migrationState: it has never migrated"
    if state.ended:
        end = "unreadable" if state.end is None else write_instant(state.end)
        return f"the last migration has ended: endTimestamp is {end}"
    if state.start is None:
        return "migrationState has no startTimestamp"
    return f"startTimestamp is {write_instant(state.start)} and there is no endTimestamp"


def _why_pending(evidence: Evidence, _cooldown: Cooldown | None) -> str:
    if not evidence.vmims_seen:
        return "VMIMs may not be watched"
    vmim = evidence.unfinished()
    if vmim is None:
        return "no unfinished VMIM belongs to this VMI"
    return f"VMIM {vmim.name} is {vmim.phase or 'new'}"


def _why_requested(evidence: Evidence, _cooldown: Cooldown | None) -> str:
    vmi, launcher = evidence.vmi, evidence.launcher
    if not vmi.evacuation_node:
        return "evacuationNodeName is not set"
    if vmi.evacuation_node != vmi.node:
        return f"evacuationNodeName is {vmi.evacuation_node}, the VMI is on {vmi.node}"
    if launcher is None:
        return "evacuationNodeName is set, but the launcher pod is unknown"
    if launcher.eviction_in_progress:
        return f"pod {launcher.name} has eviction-in-progress: the descheduler counts it"
    return f"evacuationNodeName is set and pod {launcher.name} lacks eviction-in-progress"


def _why_cooldown(_evidence: Evidence, cooldown: Cooldown | None) -> str:
    if cooldown is None:
        return "no migration has ended"
    base, backed, effective = cooldown.base, cooldown.backed, cooldown.effective
    said = f"{cooldown.migrations_in_window} ended in the window: base {write_span(base)}"
    if backed > base:
        said += f", backed off to {write_span(backed)}"
    if effective < backed:
        said += f", capped to {write_span(effective)}"
    return f"{said}, from {write_instant(cooldown.end)} on"


_WHY: dict[str, Callable[[Evidence, Cooldown | None], str]] = {
    "running_migration": _why_running,
    "pending_migration": _why_pending,
    "requested_evacuation": _why_requested,
    "platform_update": lambda evidence, _: (
        "KubeVirt reports VMs that it has still to update"
        if evidence.platform_updating
        else "KubeVirt reports no VM that it has still to update"
    ),
    "policy": lambda evidence, _: f"policy.overrides has block: true for {evidence.vmi.override}",
    "cooldown": _why_cooldown,
}


def _write_history(history: History, policy: Policy, now: Instant) -> list[MigrationAnswer]:
    endings = history.endings(now, count_failed=policy.count_failed_migrations)
    counted: Counter[tuple[Instant | None, Instant | None, Outcome]] = Counter(
        (e.written_end, e.start, e.outcome) for e in count_in_window(endings, policy, now)
    )
    dated = []
    # Records without a UID come last, so that an end known by UID too counts once.
    for key, record in sorted(history.records().items(), key=lambda one: one[0].startswith("@")):
        end = record.known_end
        ending = (end, record.start, record.outcome)
        in_window = record.handed_off and counted[ending] > 0
        counted[ending] -= in_window
        answer = MigrationAnswer(
            uid=None if key.startswith("@") else key,
            start=to_optional_datetime(record.start),
            end=to_optional_datetime(end),
            outcome=record.outcome.name.lower(),
            handed_off=record.handed_off,
            in_window=in_window,
        )
        dated.append((end or record.start or 0.0, answer))
    dated.sort(key=lambda one: one[0])
    return [answer for _, answer in dated]


def _write_evacuation(
    evidence: Evidence, conditions: Conditions, why: tuple[Why, ...]
) -> EvacuationAnswer | None:
    diagnosis, now = conditions.diagnose(evidence), conditions.now
    if diagnosis is None:
        return None
    vmi, backoff = evidence.vmi, diagnosis.backoff
    advice = advise(evidence, diagnosis, why)
    return EvacuationAnswer(
        namespace=vmi.namespace,
        name=vmi.name,
        vmi_uid=vmi.uid,
        node=vmi.node,
        evacuation_node_name=diagnosis.node,
        eviction_strategy=vmi.eviction_strategy,
        source=diagnosis.source,
        requested_at=to_datetime(diagnosis.requested_at),
        requested_by=_convert(evidence.requested_by, RequesterAnswer | None),
        age_seconds=round(max(0.0, now - diagnosis.requested_at), 3),
        state=diagnosis.state,
        stuck=diagnosis.stuck,
        stuck_by=list(diagnosis.stuck_by),
        failed_attempts=diagnosis.failed_attempts,
        backoff=None
        if backoff is None
        else BackoffAnswer(seconds=backoff.seconds, next_try_at=to_datetime(backoff.next_try)),
        leftover=diagnosis.leftover,
        diverged=diagnosis.diverged,
        attempt=None if diagnosis.attempt is None else _write_vmim(diagnosis.attempt),
        mode=(vmi.migration.mode or None) if vmi.migration and vmi.migration.running else None,
        why=[write_why(one) for one in why],
        cause=None if advice.cause is None else write_why(advice.cause),
        next_step=advice.sentence,
        command=advice.command,
        runbook=advice.runbook,
        last_seen=_convert(diagnosis.last_seen, LastSeenAnswer | None),
        cancel=CancelAnswer(
            method="PUT",
            path=f"/apis/subresources.kubevirt.io/v1/namespaces/{vmi.namespace}"
            f"/virtualmachineinstances/{vmi.name}/evacuate/cancel",
            # It must match the stored value (`pkg/virt-api/rest/evacuate_cancel.go`).
            body={"evacuationNodeName": diagnosis.node},
            command=write_cancel(vmi.namespace, vmi.name, diagnosis.node),
        )
        if may_cancel(evidence)
        else None,
    )


def _write_forecast(forecast: Forecast) -> dict[str, Any]:
    """The fields of a `NodeAnswer`."""
    progress, cordon = forecast.progress, forecast.cordon
    return {
        "node": forecast.node,
        "vmis": forecast.vmis,
        **{outcome.value: forecast.outcomes.get(outcome, 0) for outcome in DrainOutcome},
        "can_be_emptied": forecast.can_be_emptied,
        "depends_on_others": forecast.depends_on_others,
        "at_least_seconds": _round(forecast.at_least),
        "schedulable": forecast.schedulable,
        "cordoned_at": to_optional_datetime(cordon.cordoned_at if cordon else None),
        "conditions": cordon.conditions if cordon else (),
        "drain": None
        if progress is None
        else DrainProgressAnswer(
            since=to_datetime(progress.since),
            asked=progress.asked,
            left=progress.left,
            remaining=progress.remaining,
            failing=progress.failing,
            external=progress.external,
            last_left_at=to_optional_datetime(progress.last_left_at),
            seconds_per_vmi=_round(progress.seconds_per_vmi),
            estimate_seconds=_round(progress.estimate),
        ),
    }


def write_why(why: Why) -> WhyAnswer:
    """The API's form of a reason."""
    return WhyAnswer(
        source=why.source,
        reason=why.reason,
        message=why.message,
        at=to_optional_datetime(why.at),
    )


def _write_vmim(vmim: Vmim) -> PendingAnswer:
    return PendingAnswer(
        name=vmim.name,
        uid=vmim.uid,
        phase=vmim.phase,
        created_at=to_optional_datetime(vmim.created),
        handed_off=vmim.handed_off,
    )


def _round(seconds: Seconds | None) -> Seconds | None:
    """Seconds rounded to the millisecond."""
    return None if seconds is None else round(seconds, 3)
