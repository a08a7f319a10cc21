"""Forecasts the drain of a node: what would happen to each VM if the node were drained now.

The module `drain_outcomes` says what a drain does to one VM.

The counts of all nodes come from totals that the store updates with each change. So this visits
only VMIs that are not settled (`Evidence.unsettled`), or that a budget protects. A caller that must
not block its event loop takes a `Snapshot`, and counts its VMIs in slices.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from exporter.engine.evacuations.diagnosis import (
    Cause,
    Diagnosis,
    Move,
    diagnose,
    diagnose_move,
)
from exporter.engine.evacuations.drain_outcomes import (
    KEPT,
    MOVED,
    DrainOutcome,
    decide_outcome,
    measure_mobility,
)
from exporter.engine.facts.evidence import Evidence, Marker
from exporter.engine.facts.model import (
    DRAIN_TAINT,
    Instant,
    KubeVirtSettings,
    Mobility,
    Node,
    Resource,
    Seconds,
    Vmi,
    Why,
    WhySource,
)
from exporter.engine.facts.policy import StuckPolicy
from exporter.engine.facts.states import NEEDS_PERSON, State
from exporter.engine.facts.trust import Trust
from exporter.engine.store.budgets import Budgets
from exporter.engine.store.load import Load
from exporter.engine.store.node_drains import Departed, DrainProgress, measure_progress
from exporter.engine.store.nodes import NodeIndex
from exporter.engine.store.reasons import REASONS_SHOWN
from exporter.engine.store.store import Store


Diagnosed: TypeAlias = tuple[Vmi, Diagnosis]


class Conditions(Struct, frozen=True, kw_only=True):
    """Everything that decides the outcomes of VMIs, apart from their own evidence.

    `nodes` is None if nodes cannot be read. `budgets` is None if it is unknown what budgets allow.
    """

    kubevirt: KubeVirtSettings | None
    load: Load | None
    stuck: StuckPolicy
    trust: Trust
    now: Instant
    nodes: NodeIndex | None = None
    budgets: Budgets | None = None

    def diagnose(self, evidence: Evidence) -> Diagnosis | None:
        """The diagnosis of a VMI, or None if it is not evacuating."""
        if evidence.marker is None:
            return None
        return diagnose(
            self.update_trust(evidence),
            self.stuck,
            self.load,
            self.now,
            nodes=self.nodes,
            drain_taint=self.drain_taint,
        )

    def diagnose_move(self, evidence: Evidence) -> Move | None:
        """The move of a VMI that is not evacuating, or None if it is not being moved."""
        if evidence.marker is not None or all(v.phase == "Succeeded" for v in evidence.vmims):
            return None
        evidence = self.update_trust(evidence)
        return diagnose_move(evidence, self.stuck, self.load, self.now, nodes=self.nodes)

    def update_trust(self, evidence: Evidence) -> Evidence:
        """The evidence with the contacts at this instant, as those of an `Entry` may be older."""
        return replace(evidence, trust=self.trust.of(evidence.vmi.namespace))

    @property
    def drain_taint(self) -> str:
        """The key of the taint that makes KubeVirt evacuate a node."""
        return DRAIN_TAINT if self.kubevirt is None else self.kubevirt.drain_taint

    def is_schedulable(self, node: str) -> bool | None:
        """Whether pods can be scheduled onto a node; None if that is unknown."""
        return None if self.nodes is None else not self.nodes.is_cordoned(node)

    def find_budget(self, evidence: Evidence) -> str:
        """The budget that forbids the eviction of a VMI's pod; "" if none is known."""
        return "" if self.budgets is None else self.budgets.find(evidence.launcher)

    def is_full(self, node: str) -> bool:
        """Whether KubeVirt is known to start no migration out of this node now."""
        if self.load is None or not self.load.is_full(node):
            return False
        return self.trust.believes(Resource.VMIMS, Resource.PODS)


def read_conditions(store: Store, stuck: StuckPolicy, trust: Trust, now: Instant) -> Conditions:
    """The conditions at `now`."""
    return Conditions(
        kubevirt=store.kubevirt,
        load=store.load(trust),
        stuck=stuck,
        trust=trust,
        now=now,
        nodes=store.node_index if trust.believes(Resource.NODES) else None,
        budgets=store.budgets if trust.believes(Resource.BUDGETS) else None,
    )


class DrainCandidate(Struct, frozen=True, kw_only=True):
    """A VMI of the node and its outcome.

    `reasons` are those of `Store.reasons`; `failed_attempts` is a lower bound, as for evacuations.
    `last_duration` is how long its newest successful migration took; None if that is unknown.
    `diagnosis` is that of its evacuation or, if it does not leave, of the evacuation that a drain
    would request now; otherwise None.
    """

    evidence: Evidence
    outcome: DrainOutcome
    diagnosis: Diagnosis | None
    reasons: tuple[Why, ...]
    failed_attempts: int
    last_duration: Seconds | None


class Forecast(Struct, frozen=True, kw_only=True):
    """The outcomes of draining one node.

    `at_least` is the least time that the migrations take; None if that is unknown, or if the node
    cannot be emptied. `progress` is None if no VM is asked to leave the node.
    `schedulable` is None if that is unknown. `facts` is None if the node cannot be read.
    """

    node: str
    outcomes: Mapping[DrainOutcome, int]
    at_least: Seconds | None
    progress: DrainProgress | None
    schedulable: bool | None
    facts: Node | None

    @property
    def vmis(self) -> int:
        """How many VMIs are on the node."""
        return sum(self.outcomes.values())

    @property
    def can_be_emptied(self) -> bool:
        """Whether no VM has an outcome of `KEPT`."""
        return _can_be_emptied(self.outcomes)

    @property
    def depends_on_others(self) -> bool:
        """Whether somebody else must move or stop a VM."""
        return bool(self.outcomes.get(DrainOutcome.EXTERNAL))


class Snapshot(Struct, frozen=True, kw_only=True):
    """What decides the drain outcomes of all VMIs, as of one instant. Nothing in it changes.

    `mobilities` counts the VMIs that have not ended, by node. `unsettled` is the evidence about
    each VMI whose outcome depends on more than its mobility. `guarded` are the settled VMIs that
    would restart if no budget forbade it. `drains` are those of the store.
    """

    conditions: Conditions
    mobilities: Mapping[tuple[str, Mobility], int]
    unsettled: Sequence[Evidence]
    guarded: Sequence[Vmi]
    drains: Mapping[str, Departed]


def take_snapshot(store: Store, conditions: Conditions, unsettled: Sequence[Evidence]) -> Snapshot:
    """The snapshot of a store; `unsettled` is `VerdictView.list_unsettled`."""
    nodes, budgets = conditions.nodes, conditions.budgets
    return Snapshot(
        conditions=replace(
            conditions,
            nodes=None if nodes is None else nodes.copy(),
            budgets=None if budgets is None else budgets.copy(),
        ),
        mobilities=dict(store.mobilities),
        unsettled=unsettled,
        guarded=[*_find_guarded(store, conditions)],
        drains=store.drains.read(),
    )


def _find_guarded(store: Store, conditions: Conditions) -> Iterator[Vmi]:
    """The settled VMIs that a drain would restart if no budget forbade it."""
    if conditions.budgets is None:
        return
    for key in conditions.budgets.guarded():
        pod, vmi = store.find_pod(*key) or (None, None)
        if vmi is None or vmi.finished or not vmi.node:
            continue
        if decide_outcome(vmi.mobility, conditions.kubevirt) is DrainOutcome.RESTARTS:
            evidence = store.evidence(vmi.namespace, vmi.name, conditions.trust)
            if evidence is not None and not evidence.unsettled and evidence.launcher == pod:
                yield vmi


class OutcomeCount:
    """Counts the drain outcomes of the VMIs of a snapshot.

    Each step of the iteration visits one unsettled VMI. After the last step `counts` has the number
    of VMIs by node and outcome, sorted by node, and `evacuations` has each evacuation with the
    outcome of its VMI.
    """

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        self.evacuations: list[tuple[Diagnosed, DrainOutcome]] = []
        nodes = sorted({node for node, _ in snapshot.mobilities if node})
        self.counts: dict[str, Counter[DrainOutcome]] = {node: Counter() for node in nodes}
        self._full = {node for node in nodes if snapshot.conditions.is_full(node)}
        for (node, mobility), vmis in snapshot.mobilities.items():
            if node:
                self.counts[node][self._decide(node, mobility)] += vmis
        for vmi in snapshot.guarded:
            self.counts[vmi.node][DrainOutcome.RESTARTS] -= 1
            self.counts[vmi.node][DrainOutcome.STAYS] += 1

    def __iter__(self) -> Iterator[None]:
        conditions = self.snapshot.conditions
        for evidence in self.snapshot.unsettled:
            vmi, diagnosis = evidence.vmi, conditions.diagnose(evidence)
            outcome = find_outcome(evidence, conditions, diagnosis)
            if vmi.node:
                self.counts[vmi.node][self._decide(vmi.node, vmi.mobility)] -= 1
                self.counts[vmi.node][outcome] += 1
            if diagnosis is not None:
                self.evacuations.append(((vmi, diagnosis), outcome))
            yield

    def follow_drains(self) -> dict[str, DrainProgress]:
        """The progress of each drain, by node."""
        snapshot = self.snapshot
        return follow_drains(snapshot.drains, self.counts, self.evacuations, snapshot.conditions)

    def _decide(self, node: str, mobility: Mobility) -> DrainOutcome:
        kubevirt = self.snapshot.conditions.kubevirt
        return decide_outcome(mobility, kubevirt, waits=node in self._full)


def sum_outcomes(counts: Mapping[str, Mapping[DrainOutcome, int]]) -> Counter[DrainOutcome]:
    """The counts of all nodes together."""
    total: Counter[DrainOutcome] = Counter()
    for outcomes in counts.values():
        total.update(outcomes)
    return total


def forecast_nodes(
    count: OutcomeCount, durations: Mapping[str, list[Seconds]]
) -> Iterator[Forecast]:
    """The forecast of every node with VMIs, sorted by name, from a complete count.

    `durations`: the results of `find_duration`, by node.
    """
    progress, conditions = count.follow_drains(), count.snapshot.conditions
    return (
        _forecast(node, outcomes, durations.get(node, ()), conditions, progress.get(node))
        for node, outcomes in count.counts.items()
    )


def forecast_node(
    store: Store, node: str, conditions: Conditions
) -> tuple[Forecast, list[DrainCandidate]]:
    """The forecast of one node and its VMIs, sorted by namespace and name."""
    found = store.on_node(node, conditions.trust)
    found.sort(key=lambda one: (one.vmi.namespace, one.vmi.name))
    diagnoses = [conditions.diagnose(evidence) for evidence in found]
    candidates = [
        DrainCandidate(
            evidence=evidence,
            outcome=(outcome := find_outcome(evidence, conditions, diagnosis)),
            diagnosis=_find_obstruction(evidence, conditions, diagnosis, outcome),
            reasons=_find_reasons(store, evidence, conditions),
            failed_attempts=_count_failures(evidence),
            last_duration=evidence.history.last_duration(),
        )
        for evidence, diagnosis in zip(found, diagnoses, strict=True)
    ]
    durations = (find_duration(evidence, conditions.kubevirt) for evidence in found)
    known = [one for one in durations if one is not None]
    outcomes = Counter(one.outcome for one in candidates)
    evacuating = (
        ((candidate.evidence.vmi, diagnosis), candidate.outcome)
        for candidate, diagnosis in zip(candidates, diagnoses, strict=True)
        if diagnosis is not None
    )
    drains = store.drains.read()
    own = {node: drains[node]} if node in drains else {}
    progress = follow_drains(own, {node: outcomes}, evacuating, conditions).get(node)
    return _forecast(node, outcomes, known, conditions, progress), candidates


def _find_obstruction(
    evidence: Evidence,
    conditions: Conditions,
    diagnosis: Diagnosis | None,
    outcome: DrainOutcome,
) -> Diagnosis | None:
    if diagnosis is None and outcome is DrainOutcome.FAILS:
        return conditions.diagnose(_ask(evidence, conditions.now))
    return diagnosis


def _find_reasons(store: Store, evidence: Evidence, conditions: Conditions) -> tuple[Why, ...]:
    """The reasons of a VMI. If only a budget keeps it from restarting, the budget comes first."""
    reasons = store.reasons(evidence.vmi)
    budget = conditions.find_budget(evidence)
    if budget and _find_own_outcome(evidence, conditions, None) is DrainOutcome.RESTARTS:
        return (Why(WhySource.POD_DISRUPTION_BUDGET, budget), *reasons[: REASONS_SHOWN - 1])
    return reasons


def follow_drains(
    drains: Mapping[str, Departed],
    counts: Mapping[str, Mapping[DrainOutcome, int]],
    evacuating: Iterable[tuple[Diagnosed, DrainOutcome]],
    conditions: Conditions,
) -> dict[str, DrainProgress]:
    """The progress of each drain of `drains`, the drains in the store by node.

    `counts` are the outcomes of all VMIs of these nodes, `evacuating` all evacuations of VMIs. The
    evacuations that belong to the drain remain. On a closed node, so does a VMI that stays or fails
    and is not evacuating: KubeVirt may have refused its eviction without marking it.
    """
    remaining = defaultdict[str, list[tuple[Diagnosed, DrainOutcome]]](list)
    others = {node: Counter(counts.get(node, {})) for node in drains}
    for (vmi, diagnosis), outcome in evacuating:
        if vmi.node in others:
            others[vmi.node][outcome] -= 1
        if diagnosis.part.is_drained:
            remaining[vmi.node].append(((vmi, diagnosis), outcome))
    progress = {}
    for node, departed in drains.items():
        mine = remaining[node]
        outcomes = Counter(outcome for _, outcome in mine)
        is_closed = departed.closed and conditions.nodes is not None
        refused = sum(others[node][one] for one in KEPT) if is_closed else 0
        failing = refused + sum(outcomes[one] for one in KEPT)
        present = refused + len(mine)
        queued = sum(_is_queued(one) for (_, one), outcome in mine if outcome in KEPT)
        if present:
            progress[node] = measure_progress(
                departed,
                present,
                evacuating={vmi.uid for (vmi, _), _ in mine},
                failing=failing,
                external=outcomes[DrainOutcome.EXTERNAL],
                needs_person=failing > queued
                or any(one.stuck and not _is_queued(one) for (_, one), _ in mine),
                stuck_after=conditions.stuck.after,
                now=conditions.now,
            )
    return progress


def _is_queued(diagnosis: Diagnosis) -> bool:
    """Whether an evacuation only waits for KubeVirt's limits, even if it is stuck by its age."""
    return diagnosis.state is State.CAPACITY and Cause.FAILURES not in diagnosis.stuck_by


def find_outcome(
    evidence: Evidence, conditions: Conditions, diagnosis: Diagnosis | None
) -> DrainOutcome:
    """What would happen to a VMI with this diagnosis if its node were drained."""
    outcome = _find_own_outcome(evidence, conditions, diagnosis)
    if outcome is DrainOutcome.RESTARTS and conditions.find_budget(evidence):
        return DrainOutcome.STAYS
    return outcome


def _find_own_outcome(
    evidence: Evidence, conditions: Conditions, diagnosis: Diagnosis | None
) -> DrainOutcome:
    """The outcome without regard to budgets."""
    vmi, now = evidence.vmi, conditions.now
    if vmi.deleted_at is not None:
        is_late = now > vmi.deleted_at + conditions.stuck.after
        return DrainOutcome.STAYS if is_late else DrainOutcome.ENDS
    fails, waits = False, conditions.is_full(vmi.node)
    evidence = evidence.believed_at(now)
    mobility = measure_mobility(evidence)
    if diagnosis is not None:
        limit = conditions.stuck.failed_attempts
        fails = diagnosis.stuck or diagnosis.failed_attempts >= limit
    elif evidence.unsettled and decide_outcome(mobility, conditions.kubevirt) in MOVED:
        move = conditions.diagnose_move(evidence)
        fails = move is not None and move.stuck
        diagnosis = conditions.diagnose(_ask(evidence, now))
    if diagnosis is not None:
        fails = fails or diagnosis.state in NEEDS_PERSON
        waits = waits or diagnosis.state is State.MULTIPLE_ACTIVE_PODS
    return decide_outcome(mobility, conditions.kubevirt, waits=waits, fails=fails)


def _ask(evidence: Evidence, now: Instant) -> Evidence:
    """The evidence about a VMI as if it were asked to leave its node now."""
    marker = Marker(node=evidence.vmi.node, requested_at=now, seen_at=now)
    return replace(evidence, marker=marker)


def find_duration(evidence: Evidence, settings: KubeVirtSettings | None) -> Seconds | None:
    """How long this VMI's migration in a drain should take: as long as its last successful one.

    None if no success is known, if the drain does not migrate the VMI, or if the VMI is already
    migrating, because the progress of that migration is unknown.
    """
    mobility = measure_mobility(evidence)
    outcome = decide_outcome(mobility, settings)
    if mobility.migrating or outcome not in MOVED or evidence.vmi.deleted_at is not None:
        return None
    return evidence.history.last_duration()


def _forecast(
    node: str,
    outcomes: Mapping[DrainOutcome, int],
    durations: Iterable[Seconds],
    conditions: Conditions,
    progress: DrainProgress | None,
) -> Forecast:
    """The forecast of a node.

    Its bound is the longest duration, or the sum of the durations divided by KubeVirt's parallel
    limit, whichever is longer.
    """
    known = tuple(durations) if _can_be_emptied(outcomes) else ()
    bound = max(known, default=None)
    if bound is not None and conditions.kubevirt is not None:
        limits = conditions.kubevirt.limits
        parallel = max(1, min(limits.cluster, limits.outbound_per_node))
        bound = max(bound, sum(known) / parallel)
    return Forecast(
        node=node,
        outcomes=outcomes,
        at_least=bound,
        progress=progress,
        schedulable=conditions.is_schedulable(node),
        facts=None if conditions.nodes is None else conditions.nodes.find(node),
    )


def _can_be_emptied(outcomes: Mapping[DrainOutcome, int]) -> bool:
    return not any(outcomes.get(outcome) for outcome in KEPT)


def _count_failures(evidence: Evidence) -> int:
    """How many attempts failed since the request; without a request, since the last success."""
    if evidence.marker is not None:
        return evidence.marker.failed_since_request()
    succeeded: Instant = evidence.history.newest_success() or 0.0
    failed = (v for v in evidence.vmims if v.phase == "Failed" and not v.aborted)
    return sum((vmim.finished_at or vmim.created or 0.0) >= succeeded for vmim in failed)
