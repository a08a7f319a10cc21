"""Reads the metrics that need more than one line of code."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

from exporter.engine.evacuations.conditions import Conditions
from exporter.engine.evacuations.diagnosis import Diagnosis, Move
from exporter.engine.evacuations.drain_outcomes import DrainOutcome
from exporter.engine.facts.evidence import Evidence
from exporter.engine.facts.model import Instant, Outcome, Resource, Vmi
from exporter.engine.facts.policy import Reason
from exporter.engine.facts.states import State
from exporter.engine.store.evictions import EvictionOutcome, RequesterKind
from exporter.engine.store.node_drains import Departed
from exporter.engine.store.requesters import Source
from exporter.engine.verdicts.foreseen import BlockLabels
from exporter.engine.verdicts.view import ALLOWED
from exporter.health import Watched
from exporter.metrics.family import Sample, Values, View


Reader: TypeAlias = Callable[[View], Values]


RESPONDER_STATES = ("Inactive", "Active", "Interrupted", "Canceled", "Completed")
"""The states of a responder, as Kubernetes writes them."""


def forget_old_counts(view: View) -> None:
    """Drop the counts that are no longer shown; all other functions here change nothing."""
    counters, now = view.counters, view.now
    counters.forget_blocks(view.store.nodes, view.store.keys(), now)
    counters.forget_targets(_list_nodes(view), now)
    counters.denial_periods.forget(now)
    counters.prevented.forget(now)


def _list_nodes(view: View) -> set[str]:
    """The nodes that are watched or have VMIs."""
    return {*view.store.nodes, *view.store.node_index.names()}


def read_blocks(view: View) -> dict[BlockLabels, int]:
    """The counts of `BLOCKS`."""
    return dict(sorted(view.counters.blocks.items()))


def read_targets(view: View) -> Values:
    """How many migrations to each node have ended, by outcome.

    Nodes that are watched or have VMIs have samples before their first migration, so that
    `increase` counts it.
    """
    nodes, counters = _list_nodes(view), view.counters
    return [
        ((node, outcome.name.lower()), counters.migrations_to_node[node, outcome])
        for node in sorted(nodes | counters.migrated_at.keys())
        if node
        for outcome in (Outcome.SUCCEEDED, Outcome.FAILED)
    ]


def read_watches(read: Callable[[list[Watched]], float]) -> Reader:
    """Make a reader that computes a value per resource, from its watches in all namespaces."""
    return lambda view: [
        (resource, read(view.health.of(resource))) for resource in view.health.resources
    ]


def read_eviction_states(view: View) -> Values:
    """How many Evictions each state has; none if Evictions are not watched."""
    if not view.health.is_seen(Resource.EVICTIONS):
        return []
    counts = view.store.evictions.count_states()
    return sorted((dict.fromkeys(RESPONDER_STATES, 0) | counts).items())


def read_ended_evictions(view: View) -> Values:
    """How many Evictions have ended in each way; none if Evictions are not watched."""
    if not view.health.is_seen(Resource.EVICTIONS):
        return []
    return [
        ((kind, outcome), view.counters.evictions[kind, outcome])
        for kind in RequesterKind
        for outcome in EvictionOutcome
    ]


def sample_verdicts(
    verdicts: Mapping[tuple[str, str], int], reasons: Sequence[Reason]
) -> list[Sample]:
    """The samples of `VMIS`: how many VMIs of each node are allowed, or blocked by each reason."""
    return [
        Sample((verdict, node), verdicts.get((verdict, node), 0))
        for node in sorted({node for _, node in verdicts if node})
        for verdict in (ALLOWED, *reasons)
    ]


def sample_drains(counts: Mapping[str, Mapping[DrainOutcome, int]]) -> list[Sample]:
    """The samples of `DRAINS`."""
    return [
        Sample((node, outcome), outcomes.get(outcome, 0))
        for node, outcomes in counts.items()
        for outcome in DrainOutcome
    ]


def sample_cordoned(
    drains: Mapping[str, Departed], counts: Mapping[str, Mapping[DrainOutcome, int]]
) -> list[Sample]:
    """The samples of `CORDONED`, from the drains and the outcomes of all VMIs by node."""
    return [
        Sample((node,), sum(outcomes.values()))
        for node, outcomes in counts.items()
        if node in drains and drains[node].closed
    ]


def find_moves(some: Iterable[Evidence], conditions: Conditions) -> Iterator[tuple[Vmi, Move]]:
    """The moves of these VMIs, as far as they have one."""
    for evidence in some:
        move = conditions.diagnose_move(evidence)
        if move is not None:
            yield evidence.vmi, move


def find_denied(view: View) -> list[tuple[Vmi, Instant]]:
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


def find_failed_targets(view: View) -> list[tuple[Vmi, str]]:
    """The VMIs of `FAILED_TARGETS`, each with its node."""
    failed = (
        (view.store.find_present(uid), node)
        for uid, node in view.counters.list_failed_targets(view.now)
    )
    return [(vmi, node) for vmi, node in failed if vmi is not None]


def sample_stuck(diagnoses: Iterable[Diagnosis]) -> list[Sample]:
    """The samples of `STUCK_EVACUATIONS`."""
    stuck = Counter(
        (diagnosis.source, diagnosis.state) for diagnosis in diagnoses if diagnosis.stuck
    )
    return [Sample((source, state), stuck[source, state]) for source in Source for state in State]
