"""The metrics that count what has happened: blocked evictions, migrations, evacuations, drains."""

from collections.abc import Iterator, Mapping, Sequence

from exporter.counters import Counters
from exporter.engine.facts.model import EndReason, Instant, Outcome, Resource, Trigger
from exporter.engine.store.evacuation_ends import EvacuationOutcome
from exporter.engine.store.evictions import EvictionOutcome, RequesterKind
from exporter.engine.store.node_drains import DrainEnd
from exporter.engine.store.requesters import Source
from exporter.engine.store.store import Store
from exporter.engine.verdicts.foreseen import BlockLabels
from exporter.metrics.family import (
    Family,
    HistogramFamily,
    Piece,
    PreventedFamily,
    Sample,
    Values,
    View,
    ViewFamily,
    cut,
)
from exporter.words import Stability


RESPONDER_STATES = ("Inactive", "Active", "Interrupted", "Canceled", "Completed")
"""The states of a responder, as Kubernetes writes them."""


def forget_old_counts(counters: Counters, store: Store, now: Instant) -> None:
    """Drop the counts of what has been gone for long enough, so that their series end."""
    counters.forget_blocks(store.nodes, store.keys(), now)
    counters.forget_targets(_list_nodes(store), now)
    counters.denial_periods.forget(now)
    counters.prevented.forget(now)


def _list_nodes(store: Store) -> set[str]:
    """The nodes that are watched or have VMIs."""
    return {*store.nodes, *store.node_index.names()}


def _read_targets(view: View) -> Values:
    """How many migrations to each node have ended, by outcome.

    Nodes that are watched or have VMIs have samples before their first migration, so that
    `increase` counts it.
    """
    nodes, counters = _list_nodes(view.store), view.counters
    return [
        ((node, outcome.name.lower()), counters.migrations_to_node[node, outcome])
        for node in sorted(nodes | counters.migrated_at.keys())
        if node
        for outcome in (Outcome.SUCCEEDED, Outcome.FAILED)
    ]


def _read_eviction_states(view: View) -> Values:
    """How many Evictions each state has; none if Evictions are not watched."""
    if not view.health.is_seen(Resource.EVICTIONS):
        return []
    counts = view.store.evictions.count_states()
    return sorted((dict.fromkeys(RESPONDER_STATES, 0) | counts).items())


def _read_ended_evictions(view: View) -> Values:
    """How many Evictions have ended in each way; none if Evictions are not watched."""
    if not view.health.is_seen(Resource.EVICTIONS):
        return []
    return [
        ((kind, outcome), view.counters.evictions[kind, outcome])
        for kind in RequesterKind
        for outcome in EvictionOutcome
    ]


BLOCKS = Family(
    name="descheduler_kubevirt_eviction_blocks_total",
    stability=Stability.STABLE,
    help=(
        "How often a verdict, the webhook or the responder blocked an eviction; node is the VMI's"
        " node."
    ),
    labels=("reason", "node", "namespace"),
)
PREVENTED: tuple[PreventedFamily, ...] = (
    PreventedFamily(
        name="kubevirt_eviction_exporter_moves_prevented_total",
        stability=Stability.EXPERIMENTAL,
        help=(
            "VMs that were asked for within their cooldown, once per cooldown; each replica counts"
            " what it is asked."
        ),
        read=lambda prevented: prevented.moves,
    ),
    PreventedFamily(
        name="kubevirt_eviction_exporter_prevented_migration_seconds_total",
        stability=Stability.EXPERIMENTAL,
        help=(
            "How long the last migrations of the VMs in"
            " kubevirt_eviction_exporter_moves_prevented_total took, each time that one counts."
        ),
        read=lambda prevented: prevented.migration_seconds,
    ),
)
"""What the cooldowns have prevented."""
BLOCKED_COOLDOWNS = HistogramFamily(
    name="descheduler_kubevirt_effective_cooldown_seconds",
    stability=Stability.STABLE,
    help="Effective cooldowns of VMIs, one for each eviction that a cooldown blocked.",
    read=lambda view: [((), view.counters.cooldowns)],
)
MIGRATIONS: tuple[ViewFamily | HistogramFamily, ...] = (
    ViewFamily(
        name="kubevirt_eviction_exporter_migrations_total",
        stability=Stability.STABLE,
        help="Ended migrations, by outcome, purpose (trigger) and cause of failure (reason).",
        labels=("outcome", "trigger", "reason"),
        read=lambda view: [
            (
                (outcome.name.lower(), trigger, reason),
                view.counters.migrations[outcome, trigger, reason],
            )
            for outcome in (Outcome.SUCCEEDED, Outcome.FAILED)
            for trigger in Trigger
            for reason in EndReason
            if (reason is EndReason.NONE) == (outcome is Outcome.SUCCEEDED)
        ],
    ),
    HistogramFamily(
        name="kubevirt_eviction_exporter_cooldown_duration_seconds",
        stability=Stability.STABLE,
        help="Effective cooldowns, each observed once, when it begins.",
        read=lambda view: [((), view.counters.begun_cooldowns)],
    ),
    HistogramFamily(
        name="kubevirt_eviction_exporter_migration_duration_seconds",
        stability=Stability.STABLE,
        help="How long successful migrations took, without their time in the queue.",
        labels=("trigger",),
        read=lambda view: view.counters.migration_durations.items(),
    ),
    ViewFamily(
        name="kubevirt_eviction_exporter_returned_migrations_total",
        stability=Stability.STABLE,
        help="Successful migrations that brought a VM back to a node that it had left within the"
        " history window.",
        read=lambda view: view.counters.returned_migrations,
    ),
    ViewFamily(
        name="kubevirt_eviction_exporter_migrations_to_node_total",
        stability=Stability.STABLE,
        help="Ended migrations that had a target node, by this node (node) and outcome.",
        labels=("node", "outcome"),
        read=_read_targets,
    ),
    ViewFamily(
        name="kubevirt_eviction_exporter_evacuations_total",
        stability=Stability.STABLE,
        help=(
            "Evacuations that ended, by who requested them (source) and how they ended (outcome); "
            "each replica counts what it saw."
        ),
        labels=("source", "outcome"),
        read=lambda view: [
            ((source, outcome), view.counters.evacuations[source, outcome])
            for source in Source
            for outcome in EvacuationOutcome
        ],
    ),
    HistogramFamily(
        name="kubevirt_eviction_exporter_evacuation_duration_seconds",
        stability=Stability.STABLE,
        help="Time from request to end of the evacuations that succeeded, by who requested them.",
        labels=("source",),
        read=lambda view: view.counters.evacuation_durations.items(),
    ),
    ViewFamily(
        name="kubevirt_eviction_exporter_drains_total",
        stability=Stability.STABLE,
        help="Drains of nodes that ended, by how they ended (outcome).",
        labels=("outcome",),
        read=lambda view: [(end, view.counters.drains[end]) for end in DrainEnd],
    ),
    HistogramFamily(
        name="kubevirt_eviction_exporter_drain_duration_seconds",
        stability=Stability.STABLE,
        help="How long the drains of nodes took that succeeded.",
        read=lambda view: [((), view.counters.drain_durations)],
    ),
    ViewFamily(
        name="kubevirt_eviction_exporter_eviction_requests",
        stability=Stability.EXPERIMENTAL,
        help="Evictions of launcher pods that have not ended, by the state of their responder.",
        labels=("state",),
        read=_read_eviction_states,
    ),
    ViewFamily(
        name="kubevirt_eviction_exporter_eviction_requests_total",
        stability=Stability.EXPERIMENTAL,
        help=(
            "Evictions of launcher pods that have ended, by who asked (requester_kind) and how they"
            " ended (outcome)."
        ),
        labels=("requester_kind", "outcome"),
        read=_read_ended_evictions,
    ),
    HistogramFamily(
        name="kubevirt_eviction_exporter_eviction_request_hold_seconds",
        stability=Stability.EXPERIMENTAL,
        help="How long the responder held the Evictions that it does not hold any more.",
        read=lambda view: (
            [] if view.health.responder is None else [((), view.counters.held_evictions)]
        ),
    ),
)


def sample_blocks(
    counts: Mapping[BlockLabels, int], foreseen: Sequence[BlockLabels]
) -> Iterator[Piece]:
    """The counts, and a 0 for each block that was not counted yet and may be counted soon."""
    samples = [Sample(labels, count) for labels, count in counts.items()]
    for part in cut(foreseen):
        samples += [Sample(labels, 0) for labels in part if labels not in counts]
        yield BLOCKS, samples
        samples = []
