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

from exporter.engine.evacuations.conditions import Conditions
from exporter.engine.evacuations.diagnosis import Cause, Diagnosis
from exporter.engine.evacuations.drain_outcomes import (
    KEPT,
    OUTCOMES,
    DrainOutcome,
    Ground,
    decide_ground,
    find_duration,
)
from exporter.engine.evacuations.outlook import Outlook, SettledOutcomes, judge
from exporter.engine.facts.evidence import Evidence
from exporter.engine.facts.model import (
    Eviction,
    Instant,
    Node,
    NodeMobility,
    Pod,
    Requester,
    Seconds,
    Vmi,
    Why,
    WhySource,
)
from exporter.engine.facts.states import State
from exporter.engine.store.node_drains import Departed, DrainProgress, measure_progress
from exporter.engine.store.reasons import REASONS_SHOWN
from exporter.engine.store.store import Store


Diagnosed: TypeAlias = tuple[Vmi, Diagnosis]


class DrainCandidate(Struct, frozen=True, kw_only=True):
    """A VMI of the node and its outlook.

    `reasons` are those of `Store.reasons`; `failed_attempts` is a lower bound, as for evacuations.
    `last_duration` is how long its newest successful migration took; None if that is unknown.
    """

    evidence: Evidence
    outlook: Outlook
    reasons: tuple[Why, ...]
    failed_attempts: int
    last_duration: Seconds | None

    @property
    def outcome(self) -> DrainOutcome:
        """What would happen to it."""
        return self.outlook.outcome


class OutlivedPod(Struct, frozen=True, kw_only=True):
    """An active launcher pod on a node that its VMI has left."""

    pod: Pod
    evidence: Evidence


class Request(Struct, frozen=True, kw_only=True):
    """An Eviction of a VMI; `is_counted`: the VMI is evacuating or kept, so its drain knows it."""

    eviction: Eviction
    is_counted: bool


class Forecast(Struct, frozen=True, kw_only=True):
    """The outcomes of draining one node.

    `at_least` is the least time that the migrations take; None if that is unknown, or if the node
    cannot be emptied. `progress` is None if no VM is asked to leave the node.
    `schedulable` is None if that is unknown. `facts` is None if the node cannot be read. `outlived`
    are the launcher pods that are still on the node after their VMIs have left it.
    """

    node: str
    outcomes: Mapping[DrainOutcome, int]
    at_least: Seconds | None
    progress: DrainProgress | None
    schedulable: bool | None
    facts: Node | None
    outlived: Sequence[OutlivedPod] = ()

    @property
    def vmis(self) -> int:
        """How many VMIs are on the node."""
        return sum(self.outcomes.values())

    @property
    def can_be_emptied(self) -> bool:
        """Whether no VM has an outcome of `KEPT`, and no pod has outlived its VM's move."""
        return _can_be_emptied(self.outcomes) and not self.outlived

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
    mobilities: Mapping[NodeMobility, int]
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
        outcome = OUTCOMES[decide_ground(vmi.mobility, conditions.kubevirt)]
        if outcome is DrainOutcome.RESTARTS:
            evidence = store.evidence(vmi.namespace, vmi.name, conditions.trust)
            if evidence is not None and not evidence.unsettled and evidence.launcher == pod:
                yield vmi


class OutcomeCount:
    """Counts the drain outcomes of the VMIs of a snapshot.

    Each step of the iteration visits the settled VMIs of one node and mobility, or one unsettled
    VMI. After the last step `counts` has the number of VMIs by node and outcome, sorted by node,
    `evacuations` has each evacuation with the outcome of its VMI, `outlived` the pods by node that
    have outlived their VM's move, and `requests` the Evictions by node that ask for VMs there.
    """

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        self.evacuations: list[tuple[Diagnosed, DrainOutcome]] = []
        self.counts: dict[str, Counter[DrainOutcome]] = {
            node: Counter() for node in sorted({node for node, _ in snapshot.mobilities if node})
        }
        self.outlived = defaultdict[str, list[OutlivedPod]](list)
        self.requests = defaultdict[str, list[Request]](list)
        self._settled = SettledOutcomes(snapshot.conditions)

    def __iter__(self) -> Iterator[None]:
        snapshot, conditions = self.snapshot, self.snapshot.conditions
        for (node, mobility), vmis in snapshot.mobilities.items():
            if node:
                self.counts[node][self._settled[node, mobility]] += vmis
            yield
        for vmi in snapshot.guarded:
            self.counts[vmi.node][DrainOutcome.RESTARTS] -= 1
            self.counts[vmi.node][DrainOutcome.STAYS] += 1
        for evidence in snapshot.unsettled:
            vmi, diagnosis = evidence.vmi, conditions.diagnose(evidence)
            outcome = judge(evidence, conditions, diagnosis).outcome
            for pod in evidence.find_outlived(conditions.now):
                self.outlived[pod.node].append(OutlivedPod(pod=pod, evidence=evidence))
            if vmi.node:
                self.counts[vmi.node][self._settled[vmi.node, vmi.mobility]] -= 1
                self.counts[vmi.node][outcome] += 1
            if diagnosis is not None:
                self.evacuations.append(((vmi, diagnosis), outcome))
            self.requests[vmi.node] += _find_requests(evidence, outcome)
            yield

    def follow_drains(self) -> dict[str, DrainProgress]:
        """The progress of each drain, by node."""
        snapshot = self.snapshot
        return follow_drains(
            snapshot.drains,
            self.counts,
            self.evacuations,
            snapshot.conditions,
            outlived=self.outlived,
            requests=self.requests,
        )


def sum_outcomes(counts: Mapping[str, Mapping[DrainOutcome, int]]) -> Counter[DrainOutcome]:
    """The counts of all nodes together."""
    total: Counter[DrainOutcome] = Counter()
    for outcomes in counts.values():
        total.update(outcomes)
    return total


def forecast_nodes(
    count: OutcomeCount, durations: Mapping[str, list[Seconds]]
) -> Iterator[Forecast]:
    """The forecast of every node with VMIs or their pods, sorted by name, from a complete count.

    `durations`: the results of `find_duration`, by node.
    """
    progress, conditions = count.follow_drains(), count.snapshot.conditions
    return (
        _forecast(
            node,
            count.counts.get(node, Counter()),
            durations.get(node, ()),
            conditions,
            progress=progress.get(node),
            outlived=count.outlived.get(node, ()),
        )
        for node in sorted({*count.counts, *count.outlived})
    )


def forecast_node(
    store: Store, node: str, conditions: Conditions
) -> tuple[Forecast, list[DrainCandidate]]:
    """The forecast of one node and its VMIs, sorted by namespace and name."""
    vms = store.on_node(node, conditions.trust)
    vms.sort(key=lambda evidence: (evidence.vmi.namespace, evidence.vmi.name))
    diagnoses = [conditions.diagnose(evidence) for evidence in vms]
    candidates = [
        DrainCandidate(
            evidence=evidence,
            outlook=judge(evidence, conditions, diagnosis),
            reasons=_find_reasons(store, evidence, conditions),
            failed_attempts=_count_failures(evidence),
            last_duration=evidence.history.last_duration(),
        )
        for evidence, diagnosis in zip(vms, diagnoses, strict=True)
    ]
    durations = (find_duration(evidence, conditions.kubevirt) for evidence in vms)
    known = [duration for duration in durations if duration is not None]
    outcomes = Counter(candidate.outcome for candidate in candidates)
    evacuating = (
        ((candidate.evidence.vmi, diagnosis), candidate.outcome)
        for candidate, diagnosis in zip(candidates, diagnoses, strict=True)
        if diagnosis is not None
    )
    pods = [
        OutlivedPod(pod=pod, evidence=evidence)
        for evidence in store.crowded(conditions.trust)
        for pod in evidence.find_outlived(conditions.now)
        if pod.node == node
    ]
    pods.sort(key=lambda outlived: (outlived.pod.namespace, outlived.pod.name))
    drains = store.drains.read()
    own = {node: drains[node]} if node in drains else {}
    requests = {
        node: [
            request
            for candidate in candidates
            for request in _find_requests(candidate.evidence, candidate.outcome)
        ]
    }
    progress = follow_drains(
        own, {node: outcomes}, evacuating, conditions, outlived={node: pods}, requests=requests
    )
    forecast = _forecast(
        node, outcomes, known, conditions, progress=progress.get(node), outlived=pods
    )
    return forecast, candidates


def _find_reasons(store: Store, evidence: Evidence, conditions: Conditions) -> tuple[Why, ...]:
    """The reasons of a VMI. If only a budget keeps it from restarting, the budget comes first."""
    reasons = store.reasons(evidence.vmi)
    budget = conditions.find_budget(evidence)
    if budget and judge(evidence, conditions, None).ground is Ground.BUDGET:
        return (Why(WhySource.POD_DISRUPTION_BUDGET, budget), *reasons)[:REASONS_SHOWN]
    return reasons


def follow_drains(
    drains: Mapping[str, Departed],
    counts: Mapping[str, Mapping[DrainOutcome, int]],
    evacuating: Iterable[tuple[Diagnosed, DrainOutcome]],
    conditions: Conditions,
    *,
    outlived: Mapping[str, Sequence[OutlivedPod]],
    requests: Mapping[str, Sequence[Request]],
) -> dict[str, DrainProgress]:
    """The progress of each drain of `drains`, the drains in the store by node.

    `counts` are the outcomes of all VMIs of these nodes, `evacuating` all evacuations of VMIs. The
    evacuations that belong to the drain remain. On a closed node, so does a VMI that stays or fails
    and is not evacuating: KubeVirt may have refused its eviction without marking it; and a pod of
    `outlived`, which has outlived its VM's move; and a VMI of `requests` that somebody has asked
    for and that KubeVirt has not marked yet.
    """
    remaining = defaultdict[str, list[tuple[Diagnosed, DrainOutcome]]](list)
    others = {node: Counter(counts.get(node, {})) for node in drains}
    for (vmi, diagnosis), outcome in evacuating:
        if vmi.node in others:
            others[vmi.node][outcome] -= 1
        if diagnosis.part.is_drained:
            remaining[vmi.node].append(((vmi, diagnosis), outcome))
    progress = {}
    departures = {} if conditions.load is None else conditions.load.departures
    for node, departed in drains.items():
        mine = remaining[node]
        outcomes = Counter(outcome for _, outcome in mine)
        is_closed = departed.closed and conditions.nodes is not None
        asked, refused, unmarked = requests.get(node, ()), 0, 0
        if is_closed:
            refused = sum(others[node][outcome] for outcome in KEPT) + len(outlived.get(node, ()))
            unmarked = sum(not request.is_counted for request in asked)
        failing = refused + sum(outcomes[outcome] for outcome in KEPT)
        present = refused + unmarked + len(mine)
        queued = sum(_is_queued(diagnosis) for (_, diagnosis), outcome in mine if outcome in KEPT)
        if present:
            progress[node] = measure_progress(
                departed,
                present,
                evacuating={vmi.uid for (vmi, _), _ in mine},
                failing=failing,
                external=outcomes[DrainOutcome.EXTERNAL],
                needs_person=failing > queued
                or any(diagnosis.stuck and not _is_queued(diagnosis) for (_, diagnosis), _ in mine),
                stuck_after=conditions.stuck.after,
                now=conditions.now,
                moved_at=departures.get(node),
                watched_since=None if conditions.nodes is None else conditions.nodes.known_since,
                requested_by=_join([request.eviction for request in asked]),
            )
    return progress


def _find_requests(evidence: Evidence, outcome: DrainOutcome) -> Iterator[Request]:
    """The request for the VMI, if somebody asks for it by an EvictionRequest."""
    eviction = evidence.eviction
    if eviction is not None and eviction.askers and evidence.vmi.node:
        is_counted = evidence.marker is not None or outcome in KEPT
        yield Request(eviction=eviction, is_counted=is_counted)


def _join(evictions: Sequence[Eviction]) -> Requester | None:
    """Everybody who asks, since the oldest Eviction."""
    names = sorted({name for eviction in evictions for name in eviction.askers})
    if not names:
        return None
    return Requester(min(eviction.created or 0.0 for eviction in evictions), ", ".join(names))


def _is_queued(diagnosis: Diagnosis) -> bool:
    """Whether an evacuation only waits for KubeVirt's limits, even if it is stuck by its age."""
    return diagnosis.state is State.CAPACITY and Cause.FAILURES not in diagnosis.stuck_by


def _forecast(
    node: str,
    outcomes: Mapping[DrainOutcome, int],
    durations: Iterable[Seconds],
    conditions: Conditions,
    *,
    progress: DrainProgress | None,
    outlived: Sequence[OutlivedPod],
) -> Forecast:
    """The forecast of a node.

    Its bound is the longest duration, or the sum of the durations divided by KubeVirt's parallel
    limit, whichever is longer.
    """
    known = tuple(durations) if _can_be_emptied(outcomes) and not outlived else ()
    bound = max(known, default=None)
    if bound is not None and conditions.kubevirt is not None:
        limits = conditions.kubevirt.limits
        parallel = max(1, min(limits.cluster, limits.outbound_per_node))
        bound = max(bound, sum(known) / parallel)
    nodes = conditions.nodes
    return Forecast(
        node=node,
        outcomes=outcomes,
        outlived=tuple(outlived),
        at_least=bound,
        progress=progress,
        schedulable=None if nodes is None else not nodes.is_cordoned(node),
        facts=None if nodes is None else nodes.find(node),
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
