"""What a drain of its node would do to one VM now, why, and by which diagnosis."""

from msgspec import Struct
from msgspec.structs import replace

from exporter.engine.evacuations.conditions import Conditions
from exporter.engine.evacuations.diagnosis import Diagnosis, Move
from exporter.engine.evacuations.drain_outcomes import (
    MOVED,
    OUTCOMES,
    DrainOutcome,
    Ground,
    decide_ground,
    measure_mobility,
)
from exporter.engine.evacuations.situation import is_ending
from exporter.engine.facts.evidence import Evidence, Marker
from exporter.engine.facts.model import Instant, NodeMobility, Why, WhySource
from exporter.engine.facts.states import NEEDS_PERSON, State


NO_OTHER_NODE = "NoOtherNode"
"""The reason word of a VM that no other node can take (source Node)."""


class Outlook(Struct, frozen=True):
    """The outcome of one VM and its ground.

    `diagnosis` is that of its evacuation or of the move that decides the outcome, or else that of
    the evacuation that a drain would request; None if a drain would simply do what the ground says.
    """

    ground: Ground
    diagnosis: Diagnosis | Move | None

    @property
    def outcome(self) -> DrainOutcome:
        """What would happen to the VM."""
        return OUTCOMES[self.ground]


class SettledOutcomes(dict[NodeMobility, DrainOutcome]):
    """The drain outcomes of settled VMIs (see `Evidence.unsettled`) under some conditions.

    But for budgets, all VMIs of one node and mobility have the same outcome, which is decided once.
    """

    def __init__(self, conditions: Conditions) -> None:
        self._conditions = conditions

    def __missing__(self, kind: NodeMobility) -> DrainOutcome:
        node, mobility = kind
        conditions = self._conditions
        ground = decide_ground(
            mobility,
            conditions.kubevirt,
            waits=Ground.LIMITS if conditions.is_full(node) else None,
            may_leave=conditions.may_leave(node, mobility.placement),
        )
        outcome = self[kind] = OUTCOMES[ground]
        return outcome

    def judge(self, evidence: Evidence, kind: NodeMobility) -> DrainOutcome:
        """The outcome of one settled VMI of this kind, with regard to budgets."""
        outcome = self[kind]
        if outcome is DrainOutcome.RESTARTS and self._conditions.find_budget(evidence):
            return DrainOutcome.STAYS
        return outcome


def judge(evidence: Evidence, conditions: Conditions, diagnosis: Diagnosis | None) -> Outlook:
    """The outlook of a VMI; `diagnosis` is that of its evacuation, if it has one."""
    outlook = _judge_alone(evidence, conditions, diagnosis)
    if outlook.outcome is DrainOutcome.RESTARTS and conditions.find_budget(evidence):
        return Outlook(Ground.BUDGET, diagnosis)
    return outlook


def _judge_alone(
    evidence: Evidence, conditions: Conditions, diagnosis: Diagnosis | None
) -> Outlook:
    """The outlook without regard to budgets."""
    now, settings = conditions.now, conditions.kubevirt
    if evidence.ends_at is not None and is_ending(evidence, conditions.nodes):
        is_late = now > evidence.ends_at + conditions.stuck.after
        ends = Ground.POD_DELETED if evidence.vmi.deleted_at is None else Ground.DELETED
        return Outlook(Ground.DELETION_HANGS if is_late else ends, diagnosis)
    evidence = evidence.believed_at(now)
    mobility = measure_mobility(evidence)
    finding: Diagnosis | Move | None = diagnosis
    if (
        diagnosis is None
        and evidence.unsettled
        and OUTCOMES[decide_ground(mobility, settings)] in MOVED
    ):
        move = conditions.diagnose_move(evidence)
        is_stuck = move is not None and move.stuck
        finding = move if is_stuck else conditions.diagnose(_ask(evidence, now))
    ground = decide_ground(
        mobility,
        settings,
        waits=_why_waiting(evidence, conditions, finding),
        fails=_why_failing(conditions, finding, is_asked=diagnosis is None),
        may_leave=conditions.may_leave(evidence.vmi.node, evidence.vmi.placement),
        is_moving=_is_moving(evidence),
    )
    is_shown = diagnosis is not None or ground in (Ground.MOVE, Ground.STATE, Ground.TWO_PODS)
    return Outlook(ground, finding if is_shown else None)


def _why_failing(
    conditions: Conditions, finding: Diagnosis | Move | None, *, is_asked: bool
) -> Ground | None:
    """Why no migration of the VMI can succeed; `is_asked`: a drain has yet to request it."""
    if finding is None:
        return None
    if isinstance(finding, Move):
        return Ground.MOVE
    limit = conditions.stuck.failed_attempts
    if not is_asked and (finding.stuck or finding.failed_attempts >= limit):
        return Ground.EVACUATION
    return Ground.STATE if finding.state in NEEDS_PERSON else None


def _why_waiting(
    evidence: Evidence, conditions: Conditions, finding: Diagnosis | Move | None
) -> Ground | None:
    """Why KubeVirt starts no migration of the VMI now."""
    vmi = evidence.vmi
    if finding is not None and finding.state is State.MULTIPLE_ACTIVE_PODS:
        return Ground.TWO_PODS
    if vmi.migratable_unknown and not _is_moving(evidence):
        return Ground.NO_CONDITION
    return Ground.LIMITS if conditions.is_full(vmi.node) else None


def _is_moving(evidence: Evidence) -> bool:
    """Whether a migration of the VMI is under way, so that it has a node to go to."""
    migration, attempt = evidence.vmi.migration, evidence.unfinished()
    if migration is not None and migration.running:
        return True
    if attempt is None:
        return False
    pods = (pod for pod in evidence.pods if pod.migration_uid == attempt.uid)
    return attempt.handed_off or any(pod.node for pod in pods)


def explain_no_node(evidence: Evidence, conditions: Conditions) -> Why:
    """Why no other node can take the VMI."""
    vmi, nodes = evidence.vmi, conditions.nodes
    message = "" if nodes is None else nodes.explain_refusals(vmi.node, vmi.placement)
    return Why(WhySource.NODE, NO_OTHER_NODE, message)


def _ask(evidence: Evidence, now: Instant) -> Evidence:
    """The evidence about a VMI as if it were asked to leave its node now."""
    marker = Marker(node=evidence.vmi.node, requested_at=now, seen_at=now)
    return replace(evidence, marker=marker)
