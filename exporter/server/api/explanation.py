"""Explains one VMI: the result of each rule with its cause, and its history. Pure."""

from collections import Counter
from collections.abc import Callable, Sequence

from msgspec import UNSET, structs

from exporter.counters import BlockedEviction
from exporter.engine.evacuations.drain import Conditions, find_outcome
from exporter.engine.facts.evidence import Evidence
from exporter.engine.facts.history import History
from exporter.engine.facts.model import Checkpoint, Instant, Outcome, Resource, Why
from exporter.engine.facts.policy import Policy
from exporter.engine.verdicts.cooldown import Cooldown, count_in_window
from exporter.engine.verdicts.rules import RuleResult, explain
from exporter.engine.verdicts.view import Entry
from exporter.health import Health
from exporter.server.api.answers import (
    convert_attributes,
    write_evacuation,
    write_move,
    write_verdict,
    write_vmim,
)
from exporter.server.api.evacuation_schemas import RequesterAnswer
from exporter.server.api.schemas import (
    BlockedEvictionAnswer,
    CheckpointVerdicts,
    CooldownAnswer,
    LauncherAnswer,
    MigrationAnswer,
    PolicyAnswer,
    RuleAnswer,
    VerdictAnswer,
    VmiAnswer,
)
from exporter.text import to_datetime, to_optional_datetime, to_release, write_instant, write_span


def explain_vmi(
    entry: Entry,
    policy: Policy,
    conditions: Conditions,
    health: Health,
    *,
    why: tuple[Why, ...] = (),
    blocked_evictions: Sequence[BlockedEviction] = (),
) -> VmiAnswer:
    """Everything known about one VMI, and the result of each rule; `why` is `Store.reasons`."""
    evidence, cooldown, now = entry.evidence, entry.cooldown, conditions.now
    vmi = evidence.vmi
    policy = policy.of(vmi)
    dead = conditions.dead.of(vmi.namespace)
    diagnosis = conditions.diagnose(evidence)
    moved = diagnosis or conditions.diagnose_move(evidence)
    drain = None if vmi.finished else find_outcome(evidence, conditions, diagnosis)

    def verdict(checkpoint: Checkpoint) -> VerdictAnswer:
        answer = entry.verdict(checkpoint)
        return write_verdict(vmi.namespace, vmi.name, answer, now, diagnosis=moved, drain=drain)

    return VmiAnswer(
        as_of=to_datetime(now),
        observed_at=to_optional_datetime(health.seen_through(Resource.VMIS, vmi.namespace)),
        stale=health.is_stale(now, (vmi.namespace,)),
        unreadable_since=to_optional_datetime(
            min((since for _, since in evidence.unreadable), default=None)
        ),
        namespace=vmi.namespace,
        name=vmi.name,
        vmi_uid=vmi.uid,
        node=vmi.node,
        phase=vmi.phase,
        created_at=to_optional_datetime(vmi.created),
        evacuation_node_name=vmi.evacuation_node or None,
        evacuation=write_evacuation(evidence, conditions, why),
        move=write_move(evidence, conditions, why),
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
        pending_migrations=[write_vmim(vmim) for vmim in evidence.vmims if not vmim.finished],
        launcher=convert_attributes(evidence.launcher, LauncherAnswer | None),
        blocked_evictions=convert_attributes(blocked_evictions, list[BlockedEvictionAnswer]),
        policy=PolicyAnswer(
            migration_cooldown_seconds=policy.migration_cooldown,
            max_migration_cooldown_seconds=policy.max_migration_cooldown,
            migration_history_window_seconds=policy.migration_history_window,
            count_failed_migrations=policy.count_failed_migrations,
            guard_pending_migrations=policy.guard_pending_migrations,
            guard_evacuations=policy.guard_evacuations,
            override=vmi.override or UNSET,
        ),
        blind_spots=health.rejected_resources(),
    )


def _explain_rule(result: RuleResult, evidence: Evidence, cooldown: Cooldown | None) -> str:
    if not result.enabled:
        return "switched off by policy.guards"
    if result.silenced:
        return "a watch it needs is dead, or an object cannot be read, so this rule cannot block"
    if evidence.vmi.finished:
        return f"the VMI has stopped (phase {evidence.vmi.phase}): nothing is left to move"
    why = _WHY[result.rule](evidence, cooldown)
    if result.rule == "running_migration" and evidence.contradicted_at and not result.blocks:
        return f"{why}, but its VMIM ended longer than kube.deadAfter ago"
    return why


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
        return "the exporter cannot watch VMIMs"
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
        return f"pod {launcher.name} has eviction-in-progress: the descheduler knows of this"
    return f"evacuationNodeName is set and pod {launcher.name} lacks eviction-in-progress"


def _why_cooldown(evidence: Evidence, cooldown: Cooldown | None) -> str:
    if cooldown is None:
        migration = evidence.vmi.migration
        if migration is not None and migration.running:
            return "it is not asked while a migration runs"
        return "no migration has ended"
    base, backed, effective = cooldown.base, cooldown.backed, cooldown.effective
    said = f"migrations in the window: {cooldown.migrations_in_window}; base {write_span(base)}"
    if backed > base:
        said += f", backed off to {write_span(backed)}"
    if effective < backed:
        said += f", capped to {write_span(effective)}"
    return f"{said}, from {write_instant(cooldown.end)} on"


def _write_history(history: History, policy: Policy, now: Instant) -> list[MigrationAnswer]:
    endings = history.endings(now, count_failed=policy.count_failed_migrations)
    counted: Counter[tuple[Instant | None, Instant | None, Outcome]] = Counter(
        (e.written_end, e.start, e.outcome) for e in count_in_window(endings, policy, now)
    )
    dated = []
    # Records without a UID come last. If two records are of the same ending, only the first counts.
    for key, record in sorted(history.records().items(), key=lambda one: one[0].startswith("@")):
        end = record.known_end
        if end is None and record.start is None:
            continue  # handed off, but not begun
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
            source_node=record.source_node or None,
            target_node=record.target_node or None,
            trigger=record.trigger,
            reason=record.reason,
            requested_by=convert_attributes(record.requested_by, RequesterAnswer | None),
        )
        dated.append((end or record.start or 0.0, answer))
    dated.sort(key=lambda one: one[0])
    return [answer for _, answer in dated]


_WHY: dict[str, Callable[[Evidence, Cooldown | None], str]] = {
    "running_migration": _why_running,
    "pending_migration": _why_pending,
    "requested_evacuation": _why_requested,
    "platform_update": lambda evidence, _: (
        "KubeVirt reports VMs that it still has to update"
        if evidence.platform_updating
        else "KubeVirt reports no VM that it still has to update"
    ),
    "policy": lambda evidence, _: f"policy.overrides has block: true for {evidence.vmi.override}",
    "cooldown": _why_cooldown,
}
