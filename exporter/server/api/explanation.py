"""Explains one VMI: the result of each rule with its cause, and its history. Pure."""

from collections import Counter
from collections.abc import Sequence

from msgspec import UNSET, structs

from exporter.counters import BlockedEviction
from exporter.engine.evacuations.conditions import Conditions
from exporter.engine.evacuations.outlook import judge
from exporter.engine.facts.history import Ending, History
from exporter.engine.facts.model import Checkpoint, Instant, Outcome, Why
from exporter.engine.facts.policy import Policy
from exporter.engine.verdicts.cooldown import list_counted
from exporter.engine.verdicts.rules import evaluate_rules
from exporter.engine.verdicts.view import Entry
from exporter.health import Health
from exporter.server.api.answers import (
    convert_attributes,
    fill,
    write_evacuation,
    write_move,
    write_obstruction,
    write_verdict,
    write_vmim,
)
from exporter.server.api.evacuation_schemas import RequesterAnswer
from exporter.server.api.schemas import (
    BlockedEvictionAnswer,
    CheckpointVerdicts,
    CooldownAnswer,
    EvictionRequestAnswer,
    LauncherAnswer,
    MigrationAnswer,
    PolicyAnswer,
    RuleAnswer,
    VerdictAnswer,
    VmiAnswer,
)
from exporter.text import to_datetime, to_optional_datetime, to_release
from exporter.words.verdicts import explain_rule


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
    values = policy.of(vmi)
    diagnosis = conditions.diagnose(evidence)
    move = conditions.diagnose_move(evidence)
    outlook = None if vmi.finished else judge(evidence, conditions, diagnosis)
    drain = None if outlook is None else outlook.outcome

    def verdict(checkpoint: Checkpoint) -> VerdictAnswer:
        answer = entry.verdict(checkpoint)
        return write_verdict(
            vmi.namespace, vmi.name, answer, now, diagnosis=diagnosis or move, drain=drain
        )

    return fill(
        VmiAnswer,
        vmi,
        as_of=to_datetime(now),
        observed_at=to_optional_datetime(health.observed_at),
        stale=health.is_stale(now, (vmi.namespace,)),
        unreadable_since=to_optional_datetime(
            min((since for _, since in evidence.unreadable), default=None)
        ),
        vmi_uid=vmi.uid,
        created_at=to_optional_datetime(vmi.created),
        evacuation_node_name=vmi.evacuation_node or None,
        eviction_request=None
        if evidence.eviction is None
        else fill(
            EvictionRequestAnswer,
            evidence.eviction,
            since=evidence.eviction.created,
            expected_completion_time=evidence.eviction.expected_at,
        ),
        evacuation=None
        if diagnosis is None
        else write_evacuation(evidence, diagnosis, conditions, why),
        move=None if move is None else write_move(evidence, move, conditions, why),
        drain=drain,
        obstruction=None
        if outlook is None
        else write_obstruction(evidence, outlook, conditions, why),
        verdicts=CheckpointVerdicts(
            filter=verdict(Checkpoint.FILTER), pre_eviction=verdict(Checkpoint.PRE_EVICTION)
        ),
        rules=[
            RuleAnswer(**structs.asdict(result), why=explain_rule(result, evidence, cooldown))
            for result in evaluate_rules(evidence, values, now)
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
        migrations=_write_history(evidence.history, list_counted(evidence, values, now)),
        pending_migrations=[write_vmim(vmim) for vmim in evidence.vmims if not vmim.finished],
        launcher=convert_attributes(evidence.launcher, LauncherAnswer | None),
        blocked_evictions=convert_attributes(blocked_evictions, list[BlockedEvictionAnswer]),
        policy=structs.replace(
            convert_attributes(values, PolicyAnswer), override=vmi.override or UNSET
        ),
        blind_spots=health.rejected_resources(),
    )


def _write_history(history: History, in_window: list[Ending]) -> list[MigrationAnswer]:
    counted: Counter[tuple[Instant | None, Instant | None, Outcome]] = Counter(
        (e.end, e.start, e.outcome) for e in in_window
    )
    dated = []
    # Records without a UID come last. If two records are of the same ending, only the first counts.
    for key, record in sorted(history.records().items(), key=lambda item: item[0].startswith("@")):
        start, end = record.known_start, record.known_end
        if end is None and start is None:
            continue  # handed off, but not begun
        ending = (end, start, record.outcome)
        counts = record.handed_off and counted[ending] > 0
        counted[ending] -= counts
        answer = MigrationAnswer(
            uid=None if key.startswith("@") else key,
            start=to_optional_datetime(start),
            end=to_optional_datetime(end),
            outcome=record.outcome.name.lower(),
            handed_off=record.handed_off,
            in_window=counts,
            source_node=record.source_node or None,
            target_node=record.target_node or None,
            trigger=record.trigger,
            reason=record.reason,
            requested_by=convert_attributes(record.requested_by, RequesterAnswer | None),
        )
        dated.append((end or start or 0.0, answer))
    dated.sort(key=lambda pair: pair[0])
    return [answer for _, answer in dated]
