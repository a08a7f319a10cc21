"""Builds the API's answers from verdicts, rules and history. Pure."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import TypeVar

from msgspec import Struct, convert, structs

from exporter import __version__
from exporter.counters import PreventedMoves
from exporter.engine.evacuations.advice import may_cancel
from exporter.engine.evacuations.causes import find_blocker
from exporter.engine.evacuations.conditions import Conditions
from exporter.engine.evacuations.diagnosis import Diagnosis, Move
from exporter.engine.evacuations.drain import DrainCandidate, Forecast, OutlivedPod, Snapshot
from exporter.engine.evacuations.drain_outcomes import DrainOutcome, Ground
from exporter.engine.evacuations.obstacles import Obstacle
from exporter.engine.evacuations.outlook import Outlook
from exporter.engine.facts.evidence import Evidence
from exporter.engine.facts.model import Instant, Seconds, Vmi, Vmim, Why
from exporter.engine.facts.policy import Reason, Verdict
from exporter.health import Health
from exporter.server.api.evacuation_schemas import (
    BackoffAnswer,
    CancelAnswer,
    DrainAnswer,
    DrainProgressAnswer,
    EvacuationAnswer,
    EvacuationsAnswer,
    MoveAnswer,
    NodeAnswer,
    NodeCandidate,
    NodesAnswer,
    ObstructionAnswer,
    OutlivedPodAnswer,
    PendingAnswer,
    StuckMove,
)
from exporter.server.api.schemas import (
    HistoryStatus,
    PreventedAnswer,
    ResourceAnswer,
    ResponderStatus,
    StatusAnswer,
    VerdictAnswer,
    VmiCounts,
)
from exporter.text import to_datetime, to_optional_datetime, to_release
from exporter.words.advice import (
    ACTIONS,
    Advice,
    choose_advice,
    choose_outlook_advice,
    write_action,
)
from exporter.words.commands import describe_cancel, write_cancel, write_cancel_path
from exporter.words.evacuations import GROUNDS


A = TypeVar("A", bound=Struct)

convert_attributes = partial(convert, from_attributes=True, strict=False)
"""Copies attributes of the same names; instants become datetimes.

An instant outside the calendar is an error, but neither our clock nor `parse_instant` returns one.
"""


def fill(answer: type[A], *sources: object, **others: object) -> A:
    """An answer whose fields are the attributes of that name of the sources.

    The first source that has the attribute counts. `others` are the fields of other names.
    """
    for name in answer.__struct_fields__:
        if name not in others:
            for source in sources:
                if hasattr(source, name):
                    others[name] = getattr(source, name)
                    break
    filled: A = convert_attributes(SimpleNamespace(**others), answer)
    return filled


def write_verdict(
    namespace: str,
    name: str,
    verdict: Verdict,
    now: Instant,
    *,
    diagnosis: Diagnosis | Move | None = None,
    drain: DrainOutcome | None = None,
) -> VerdictAnswer:
    """The verdict at `now` in the API's form.

    `diagnosis` is that of the VMI's evacuation or other move. `drain` is None if the VMI is unknown
    or has ended.
    """
    # Each None is tested here without a helper function: a call would take 0.5 us per field.
    end, effective, reason = verdict.not_before, verdict.effective_cooldown, verdict.reason
    return VerdictAnswer(
        namespace=namespace,
        name=name,
        known=verdict.known,
        mismatch=verdict.mismatch,
        allowed=reason is None,
        reason=reason,
        not_before=None if end is None else to_release(end),
        # Rounded up, so that a caller that waits this long is not too early.
        retry_after_seconds=None if end is None else math.ceil(max(0.0, end - now) * 1000) / 1000,
        effective_cooldown_seconds=None if effective is None else round(effective, 3),
        migrations_in_window=verdict.migrations_in_window,
        evacuating=diagnosis is not None and isinstance(diagnosis, Diagnosis),
        stuck=diagnosis is not None and diagnosis.stuck,
        drain=drain,
    )


class EvacuationList:
    """Describes the evacuations of a snapshot and every other stuck move.

    Each step of the iteration visits one unsettled VMI; `answer` is complete after the last step.
    `reasons` is `Store.reasons`.
    """

    def __init__(
        self, snapshot: Snapshot, health: Health, *, reasons: Callable[[Vmi], tuple[Why, ...]]
    ) -> None:
        self._snapshot = snapshot
        self._health = health
        self._reasons = reasons
        # Those of an evacuation are dropped when it ends, which may be before it is visited.
        evacuating = (e.vmi for e in snapshot.unsettled if e.marker is not None)
        self._whys = {vmi.uid: reasons(vmi) for vmi in evacuating}
        self._evacuations: list[EvacuationAnswer] = []
        self._moves: list[StuckMove] = []

    def __iter__(self) -> Iterator[None]:
        conditions = self._snapshot.conditions
        for evidence in self._snapshot.unsettled:
            vmi = evidence.vmi
            if (diagnosis := conditions.diagnose(evidence)) is not None:
                why = self._whys[vmi.uid]
                self._evacuations.append(write_evacuation(evidence, diagnosis, conditions, why))
            elif (move := conditions.diagnose_move(evidence)) is not None and move.stuck:
                answer = write_move(evidence, move, conditions, self._reasons(vmi))
                fields = structs.asdict(answer)
                self._moves.append(
                    StuckMove(namespace=vmi.namespace, name=vmi.name, node=vmi.node, **fields)
                )
            yield

    def answer(self) -> EvacuationsAnswer:
        """The evacuations, the longest first, and the moves, the oldest first."""
        now = self._snapshot.conditions.now
        evacuations, moves, health = self._evacuations, self._moves, self._health
        evacuations.sort(key=lambda row: (-row.age_seconds, row.namespace, row.name))
        moves.sort(key=lambda row: (row.since or to_datetime(now), row.namespace, row.name))
        return EvacuationsAnswer(
            as_of=to_datetime(now),
            observed_at=to_optional_datetime(health.observed_at),
            stale=health.is_stale(now, (evacuation.namespace for evacuation in evacuations)),
            evacuations=evacuations,
            stuck_moves=moves,
            blind_spots=health.rejected_resources(),
        )


def list_nodes(
    forecasts: Iterable[Forecast], namespaces: Iterable[str], now: Instant, health: Health
) -> NodesAnswer:
    """The forecasts of all nodes, in the given order; `namespaces` are the namespaces with VMIs."""
    return NodesAnswer(
        as_of=to_datetime(now),
        stale=health.is_stale(now, namespaces),
        nodes=[write_node(forecast) for forecast in forecasts],
    )


def write_node(forecast: Forecast) -> NodeAnswer:
    """The API's form of a node's forecast."""
    progress, facts = forecast.progress, forecast.facts
    return NodeAnswer(
        node=forecast.node,
        vmis=forecast.vmis,
        **{outcome.value: forecast.outcomes.get(outcome, 0) for outcome in DrainOutcome},
        can_be_emptied=forecast.can_be_emptied,
        depends_on_others=forecast.depends_on_others,
        at_least_seconds=_round(forecast.at_least),
        schedulable=forecast.schedulable,
        outlived_pods=len(forecast.outlived),
        cordoned_at=to_optional_datetime(facts.cordoned_at if facts else None),
        conditions=facts.conditions if facts else (),
        drain=None
        if progress is None
        else fill(
            DrainProgressAnswer,
            progress,
            seconds_per_vmi=_round(progress.seconds_per_vmi),
            estimate_seconds=_round(progress.estimate),
        ),
    )


def describe_drain(
    forecast: Forecast,
    candidates: Sequence[DrainCandidate],
    conditions: Conditions,
    health: Health,
) -> DrainAnswer:
    """The forecast of one node and of each VMI on it."""
    now = conditions.now
    return DrainAnswer(
        as_of=to_datetime(now),
        stale=health.is_stale(now, (candidate.evidence.vmi.namespace for candidate in candidates)),
        candidates=[_write_candidate(candidate, conditions) for candidate in candidates],
        outlived=[_write_outlived(outlived, conditions) for outlived in forecast.outlived],
        **structs.asdict(write_node(forecast)),
    )


def _write_candidate(candidate: DrainCandidate, conditions: Conditions) -> NodeCandidate:
    advice = choose_outlook_advice(
        candidate.evidence, candidate.outlook, candidate.reasons, conditions
    )
    return fill(
        NodeCandidate,
        candidate,
        candidate.evidence.vmi,
        _write_advice(advice, candidate.reasons),
        reason=GROUNDS[candidate.outlook.ground],
        state=None if candidate.outlook.diagnosis is None else candidate.outlook.diagnosis.state,
        why=candidate.reasons,
        last_duration_seconds=_round(candidate.last_duration),
    )


def write_obstruction(
    evidence: Evidence, outlook: Outlook, conditions: Conditions, why: tuple[Why, ...]
) -> ObstructionAnswer | None:
    """Why a drain would not simply move a VMI; None if it would."""
    if outlook.ground is Ground.MIGRATES:
        return None
    advice = _write_advice(choose_outlook_advice(evidence, outlook, why, conditions), why)
    return fill(ObstructionAnswer, advice, reason=GROUNDS[outlook.ground])


def _write_advice(advice: Advice | None, why: tuple[Why, ...]) -> SimpleNamespace:
    """The fields of an answer for an advice; without one, only the cause."""
    if advice is None:
        cause = find_blocker(why)
        return SimpleNamespace(cause=cause, next_step=None, command=None, runbook=None)
    return SimpleNamespace(
        cause=advice.cause,
        next_step=advice.sentence,
        command=advice.command,
        runbook=advice.runbook,
    )


def _write_outlived(outlived: OutlivedPod, conditions: Conditions) -> OutlivedPodAnswer:
    hangs = outlived.pod.hangs(conditions.now)
    action = ACTIONS[Obstacle.STALE_POD if hangs else Obstacle.OUTLIVED_POD]
    sentence, command = write_action(action, outlived.evidence, conditions, outlived=outlived.pod)
    vmi = outlived.evidence.vmi
    return fill(OutlivedPodAnswer, vmi, pod=outlived.pod.name, next_step=sentence, command=command)


def describe_status(
    health: Health,
    *,
    drain: Mapping[DrainOutcome, int],
    blocked: Mapping[Reason, int],
    reasons: Iterable[Reason],
    prevented: PreventedMoves,
    started_at: Instant,
    now: Instant,
    vmis: int,
) -> StatusAnswer:
    """The exporter's health and VMI counts.

    `drain` has the number of VMIs by drain outcome. `blocked` has the number of blocked VMIs by
    reason; `reasons` are the possible reasons. `prevented` counts since `started_at`.
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
            fill(
                ResourceAnswer,
                watched,
                rejected=watched.rejected or None,
                trouble=watched.trouble or None,
                contact_at=watched.contact,
            )
            for watched in health.reported
        ],
        blind_spots=health.rejected_resources(),
        history=None
        if history is None
        else HistoryStatus(
            written_at=to_optional_datetime(history.written_at),
            vmis=history.vmis,
            trouble=history.trouble or None,
        ),
        responder=None
        if health.responder is None
        else ResponderStatus(
            turns=health.responder.turns, trouble=health.responder.trouble or None
        ),
        vmis=None
        if not health.ready
        else VmiCounts(
            known=vmis,
            allowed=vmis - sum(blocked.values()),
            blocked={reason: blocked.get(reason, 0) for reason in reasons},
            drain={outcome: drain.get(outcome, 0) for outcome in DrainOutcome},
        ),
        prevented=PreventedAnswer(
            since=to_datetime(started_at),
            moves=prevented.moves.total(),
            migration_seconds=sum(prevented.migration_seconds.values()),
        ),
    )


def write_evacuation(
    evidence: Evidence, diagnosis: Diagnosis, conditions: Conditions, why: tuple[Why, ...]
) -> EvacuationAnswer:
    """The evacuation of a VMI; `why` are the reasons in the cluster's own words."""
    vmi, backoff, now = evidence.vmi, diagnosis.backoff, conditions.now
    advice = choose_advice(evidence, diagnosis, why, conditions)
    return fill(
        EvacuationAnswer,
        vmi,
        diagnosis,
        advice,
        vmi_uid=vmi.uid,
        evacuation_node_name=diagnosis.node,
        requested_through=diagnosis.through,
        requested_by=evidence.requested_by,
        age_seconds=round(max(0.0, now - diagnosis.requested_at), 3),
        backoff=None
        if backoff is None
        else BackoffAnswer(seconds=backoff.seconds, next_try_at=to_datetime(backoff.next_try)),
        attempt=None if diagnosis.attempt is None else write_vmim(diagnosis.attempt),
        mode=(vmi.migration.mode or None) if vmi.migration and vmi.migration.running else None,
        why=why,
        next_step=advice.sentence,
        cancel=CancelAnswer(
            method="PUT",
            path=write_cancel_path(vmi.namespace, vmi.name),
            # KubeVirt compares the body with the VMI (`pkg/virt-api/rest/evacuate_cancel.go`).
            body={"evacuationNodeName": diagnosis.node},
            command=write_cancel(vmi.namespace, vmi.name, diagnosis.node),
            needs=describe_cancel(evidence),
        )
        # KubeVirt refuses to cancel while the node has the taint (`validateEvacuationNode`).
        if may_cancel(evidence) and not diagnosis.tainted
        else None,
    )


def write_move(
    evidence: Evidence, move: Move, conditions: Conditions, why: tuple[Why, ...]
) -> MoveAnswer:
    """The move of a VMI without an evacuation; `why` are the cluster's reasons."""
    advice = choose_advice(evidence, move, why, conditions)
    by = evidence.requested_by
    return fill(MoveAnswer, move, advice, why=why, next_step=advice.sentence, requested_by=by)


def write_vmim(vmim: Vmim) -> PendingAnswer:
    """An unfinished VMIM."""
    return fill(PendingAnswer, vmim, created_at=vmim.created)


def _round(seconds: Seconds | None) -> Seconds | None:
    """Seconds rounded to the millisecond."""
    return None if seconds is None else round(seconds, 3)
