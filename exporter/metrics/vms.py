"""The metrics of single VMs: their evacuations, migrations and cooldowns."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from exporter.engine.evacuations.diagnosis import Diagnosis, Move
from exporter.engine.evacuations.drain import OutcomeCount
from exporter.engine.facts.model import Instant, Vmi
from exporter.engine.facts.policy import DEFAULT_POLICY, Reason
from exporter.engine.facts.states import State
from exporter.engine.store.requesters import Source
from exporter.engine.verdicts.view import Entry
from exporter.metrics.family import (
    ONE_VMI,
    SLICE,
    Column,
    CoolingFamily,
    EvacuationFamily,
    Family,
    Piece,
    Sample,
    View,
    cut,
)
from exporter.words import Stability


ADMITTED_AT_ONCE = 5_000
"""How many VMIs are counted towards `limits.vmiSeries` without yielding."""

EVACUATIONS: tuple[EvacuationFamily, ...] = (
    EvacuationFamily(
        name="kubevirt_vmi_evacuation_requested_timestamp_seconds",
        stability=Stability.STABLE,
        help="Time at which the evacuation of the VMI from the node was requested or first seen.",
        sample=lambda key, _vmi, d: Sample(key, d.requested_at),
    ),
    EvacuationFamily(
        name="kubevirt_vmi_evacuation_info",
        stability=Stability.STABLE,
        help=(
            "1 for each evacuating VMI, with its evictionStrategy and who requested the "
            "evacuation (source)."
        ),
        labels=(*ONE_VMI, "strategy", "source"),
        sample=lambda key, vmi, d: Sample((*key, vmi.eviction_strategy, d.source), 1),
    ),
    EvacuationFamily(
        name="kubevirt_vmi_evacuation_state",
        stability=Stability.STABLE,
        help="1 for the current state of each evacuation; the state says what delays it.",
        labels=(*ONE_VMI, "state"),
        sample=lambda key, _vmi, d: Sample((*key, d.state), 1),
    ),
    EvacuationFamily(
        name="kubevirt_vmi_evacuation_stuck",
        stability=Stability.STABLE,
        help=(
            "1 if the evacuation is stuck: it exceeded stuck.after without a migration, its "
            "migration is stalled or does not finish, or it failed stuck.failedAttempts times."
        ),
        sample=lambda key, _vmi, d: Sample(key, d.stuck),
    ),
    EvacuationFamily(
        name="kubevirt_vmi_evacuation_diverged",
        stability=Stability.STABLE,
        help=(
            "1 if the launcher pod has lacked the annotation eviction-in-progress for two minutes."
        ),
        sample=lambda key, _vmi, d: Sample(key, d.diverged),
    ),
    EvacuationFamily(
        name="kubevirt_vmi_evacuation_failed_attempts",
        stability=Stability.STABLE,
        help="Migrations that failed since the evacuation was requested; a lower bound.",
        sample=lambda key, _vmi, d: Sample(key, d.failed_attempts),
    ),
)
MOVES = Family(
    name="kubevirt_vmi_migration_stuck",
    stability=Stability.STABLE,
    help=(
        "1 if a migration of a VMI that is not being evacuated is stuck; present while such a "
        "migration goes on."
    ),
    labels=(*ONE_VMI, "trigger"),
)
MOVE_STATES = Family(
    name="kubevirt_vmi_migration_state",
    stability=Stability.STABLE,
    help=(
        "1 for the state of a migration of a VMI that is not being evacuated; present while such a "
        "migration goes on."
    ),
    labels=(*ONE_VMI, "state"),
)
DENIED = Family(
    name="kubevirt_vmi_eviction_denied_timestamp_seconds",
    stability=Stability.STABLE,
    help=(
        "When the webhook began to deny evictions of the VMI. Present only if this "
        "time is more than stuck.migrationTimeout ago, and the last denial was because of a "
        "migration."
    ),
    labels=ONE_VMI,
)
FAILED_TARGETS = Family(
    name="kubevirt_vmi_failed_target",
    stability=Stability.STABLE,
    help=(
        "1 if a migration of the VMI to the node (target), and to no other node, failed within "
        "the last hour; absent otherwise."
    ),
    labels=("namespace", "name", "target"),
)
COOLING: tuple[CoolingFamily, ...] = (
    CoolingFamily(
        name="kubevirt_vmi_eviction_not_before_timestamp_seconds",
        stability=Stability.STABLE,
        help="Time at which the cooldown of the VMI ends; absent if it has no cooldown.",
        read=lambda vmi, c: Sample((vmi.namespace, vmi.name, vmi.node), c.not_before),
    ),
    CoolingFamily(
        name="kubevirt_vmi_eviction_cooldown_seconds",
        stability=Stability.STABLE,
        help=(
            "Effective cooldown of the VMI; absent if it has none. The label 'policy' has the "
            "name of the entry of policy.overrides that applies, or 'default'."
        ),
        labels=(*ONE_VMI, "policy"),
        read=lambda vmi, c: Sample(
            (vmi.namespace, vmi.name, vmi.node, vmi.override or DEFAULT_POLICY), c.effective
        ),
    ),
    CoolingFamily(
        name="kubevirt_vmi_migrations_in_window",
        stability=Stability.STABLE,
        help=(
            "Migrations of the VMI that ended inside migrationHistoryWindow; absent if it has no "
            "cooldown."
        ),
        labels=("namespace", "name"),
        read=lambda vmi, c: Sample((vmi.namespace, vmi.name), c.migrations_in_window),
    ),
)
STUCK_EVACUATIONS = Family(
    name="kubevirt_eviction_exporter_stuck_evacuations",
    stability=Stability.STABLE,
    help="Stuck evacuations, by who requested them (source) and what delays them (state).",
    labels=("source", "state"),
)
LEFT_OUT = Family(
    name="kubevirt_eviction_exporter_vmis_left_out",
    stability=Stability.STABLE,
    help="VMIs that have no series of their own because limits.vmiSeries is reached.",
)
VMS: tuple[Family, ...] = (
    *EVACUATIONS,
    MOVES,
    MOVE_STATES,
    DENIED,
    FAILED_TARGETS,
    *COOLING,
    STUCK_EVACUATIONS,
    LEFT_OUT,
)


class AdmittedVms:
    """All VMs but those that are added after `most` others; each VM counts once.

    If there are at most `most` VMs, none need be added.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._admitted: set[str] = set()
        self._left_out: set[str] = set()

    def add(self, vmis: Iterable[Vmi]) -> None:
        """Add VMs that would have series if there were no limit."""
        for vmi in vmis:
            if vmi.uid not in self._admitted:
                is_full = len(self._admitted) >= self._most
                (self._left_out if is_full else self._admitted).add(vmi.uid)

    def __contains__(self, vmi: Vmi) -> bool:
        return vmi.uid not in self._left_out

    @property
    def left_out(self) -> int:
        """How many VMs have no series because of the limit."""
        return len(self._left_out)


def sample_vms(view: View, count: OutcomeCount, cooling: Sequence[Entry]) -> Iterator[Piece]:
    """The samples of single VMs, in slices, from a `count` that is complete by then.

    What may change is read before this function returns.
    """
    denied, failed_targets = _find_denied(view), _find_failed_targets(view)
    return _sample_in_slices(count, cooling, denied, failed_targets, most=view.vmi_series)


def _sample_in_slices(
    count: OutcomeCount,
    cooling: Sequence[Entry],
    denied: Sequence[tuple[Vmi, Instant]],
    failed_targets: Sequence[tuple[Vmi, str]],
    *,
    most: int,
) -> Iterator[Piece]:
    moves: list[tuple[Vmi, Move]] = []
    conditions = count.snapshot.conditions
    unmarked = [evidence for evidence in count.snapshot.unsettled if evidence.marker is None]
    for candidates in cut(unmarked):
        pairs = ((evidence.vmi, conditions.diagnose_move(evidence)) for evidence in candidates)
        moves += [(vmi, move) for vmi, move in pairs if move is not None]
        if len(candidates) == SLICE:
            yield EVACUATIONS[0], ()
    diagnosed = [evacuation for evacuation, _ in count.evacuations]
    groups: tuple[Sequence[tuple[Vmi, object]], ...] = (diagnosed, moves, denied, failed_targets)
    admitted = AdmittedVms(most)
    if sum(map(len, groups)) + len(cooling) > most:
        for group in groups:
            admitted.add(vmi for vmi, _ in group)
        for entries in cut(cooling, ADMITTED_AT_ONCE):
            admitted.add(entry.evidence.vmi for entry in entries)
            yield EVACUATIONS[0], ()
    for evacuation in EVACUATIONS:
        for part in cut([(vmi, d) for vmi, d in diagnosed if vmi in admitted]):
            yield evacuation, [evacuation.sample(_name(vmi, d.node), vmi, d) for vmi, d in part]
    shown = [(_name(vmi, vmi.node), move) for vmi, move in moves if vmi in admitted]
    yield MOVES, [Sample((*name, move.trigger), move.stuck) for name, move in shown]
    yield MOVE_STATES, [Sample((*name, move.state), 1) for name, move in shown]
    yield DENIED, [Sample(_name(vmi, vmi.node), since) for vmi, since in denied if vmi in admitted]
    yield (
        FAILED_TARGETS,
        [Sample(_name(vmi, node), 1) for vmi, node in failed_targets if vmi in admitted],
    )
    yield from _sample_cooling(cooling, admitted)
    yield STUCK_EVACUATIONS, _sample_stuck(diagnosis for _, diagnosis in diagnosed)
    yield LEFT_OUT, [Sample((), admitted.left_out)]


def _sample_cooling(cooling: Sequence[Entry], admitted: AdmittedVms) -> Iterator[Piece]:
    for family in COOLING:
        for entries in cut(cooling):
            if not admitted.left_out:
                yield family, Column(family, entries)
            else:
                allowed = [entry for entry in entries if entry.evidence.vmi in admitted]
                yield family, Column(family, allowed)


def _name(vmi: Vmi, node: str) -> tuple[str, str, str]:
    """The labels of a VMI and a node."""
    return vmi.namespace, vmi.name, node


def _find_denied(view: View) -> list[tuple[Vmi, Instant]]:
    """The VMIs of `DENIED`, and when the webhook began to deny their evictions."""
    periods = (
        (view.store.find_present(period.vmi.uid), period)
        for period in view.counters.denial_periods.open(view.now)
        if period.reason is Reason.MIGRATION_IN_PROGRESS
        and view.now - period.since > view.stuck.migration_timeout
    )
    return [
        (vmi, period.since)
        for vmi, period in periods
        if vmi is not None and vmi.node == period.vmi.node
    ]


def _find_failed_targets(view: View) -> list[tuple[Vmi, str]]:
    """The VMIs of `FAILED_TARGETS`, each with its node."""
    failed = (
        (view.store.find_present(uid), node)
        for uid, node in view.counters.list_failed_targets(view.now)
    )
    return [(vmi, node) for vmi, node in failed if vmi is not None]


def _sample_stuck(diagnoses: Iterable[Diagnosis]) -> list[Sample]:
    """The samples of `STUCK_EVACUATIONS`."""
    stuck = Counter(
        (diagnosis.source, diagnosis.state) for diagnosis in diagnoses if diagnosis.stuck
    )
    return [Sample((source, state), stuck[source, state]) for source in Source for state in State]
