"""The metrics of each node: its VMIs by verdict, and what a drain does or would do to them."""

from collections.abc import Iterator, Mapping, Sequence

from exporter.engine.evacuations.drain import OutcomeCount
from exporter.engine.evacuations.drain_outcomes import DrainOutcome
from exporter.engine.facts.policy import Reason
from exporter.engine.store.node_drains import Departed
from exporter.engine.verdicts.view import ALLOWED, Tally
from exporter.metrics.family import SLICE, DrainFamily, Family, Piece, Sample
from exporter.words import Stability


VMIS = Family(
    name="descheduler_kubevirt_vmis",
    stability=Stability.STABLE,
    help="VMIs per node and current verdict: allowed, or the reason of the block.",
    labels=("verdict", "node"),
)
DRAINS = Family(
    name="kubevirt_eviction_exporter_node_drain_vmis",
    stability=Stability.STABLE,
    help="VMIs of the node, by what would happen to them if the node were drained now (outcome).",
    labels=("node", "outcome"),
)
CORDONED = Family(
    name="kubevirt_node_cordoned_vmis",
    stability=Stability.STABLE,
    help=(
        "VMIs on a node that is cordoned or has the drain taint, whether or not anybody drains it; "
        "absent for other nodes."
    ),
    labels=("node",),
)
NODE_DRAINS: tuple[DrainFamily, ...] = (
    DrainFamily(
        name="kubevirt_node_drain_started_timestamp_seconds",
        stability=Stability.STABLE,
        help="Time at which the drain of the node began; absent without a drain.",
        read=lambda drain: drain.since,
    ),
    DrainFamily(
        name="kubevirt_node_drain_last_departure_timestamp_seconds",
        stability=Stability.STABLE,
        help="Time at which a VM most recently left the drained node; absent if none has left.",
        read=lambda drain: drain.last_left_at,
    ),
    DrainFamily(
        name="kubevirt_node_drain_left_vmis",
        stability=Stability.STABLE,
        help="VMIs that have left the node since its drain began, each counted once.",
        read=lambda drain: drain.left,
    ),
    DrainFamily(
        name="kubevirt_node_drain_remaining_vmis",
        stability=Stability.STABLE,
        help=(
            "VMIs of the drained node that are being evacuated, or have the drain outcome 'fails' "
            "or 'stays'."
        ),
        read=lambda drain: drain.remaining,
    ),
    DrainFamily(
        name="kubevirt_node_drain_failing_vmis",
        stability=Stability.STABLE,
        help="VMIs of the drained node with the drain outcome 'fails' or 'stays'.",
        read=lambda drain: drain.failing,
    ),
    DrainFamily(
        name="kubevirt_node_drain_stuck",
        stability=Stability.STABLE,
        help="1 if the drain of the node is stuck: no VM leaves it.",
        read=lambda drain: drain.stuck,
    ),
)
NODES: tuple[Family, ...] = (VMIS, DRAINS, CORDONED, *NODE_DRAINS)
"""In the order of the exposition, as in each module that has metrics."""


def sample_nodes(
    verdicts: Tally, reasons: Sequence[Reason], count: OutcomeCount
) -> Iterator[Piece]:
    """The samples of all nodes. This completes the count, in slices."""
    yield VMIS, _sample_verdicts(verdicts, reasons)
    for number, _ in enumerate(count, 1):
        if number % SLICE == 0:
            yield VMIS, ()
    yield DRAINS, _sample_drains(count.counts)
    yield CORDONED, _sample_cordoned(count.snapshot.drains, count.counts)
    progress = count.follow_drains()
    for family in NODE_DRAINS:
        yield family, family.sample(progress)


def _sample_verdicts(verdicts: Tally, reasons: Sequence[Reason]) -> list[Sample]:
    """The samples of `VMIS`: how many VMIs of each node are allowed, or blocked by each reason."""
    return [
        Sample((verdict, node), verdicts.get((verdict, node), 0))
        for node in sorted({node for _, node in verdicts if node})
        for verdict in (ALLOWED, *reasons)
    ]


def _sample_drains(counts: Mapping[str, Mapping[DrainOutcome, int]]) -> list[Sample]:
    """The samples of `DRAINS`."""
    return [
        Sample((node, outcome), outcomes.get(outcome, 0))
        for node, outcomes in counts.items()
        for outcome in DrainOutcome
    ]


def _sample_cordoned(
    drains: Mapping[str, Departed], counts: Mapping[str, Mapping[DrainOutcome, int]]
) -> list[Sample]:
    """The samples of `CORDONED`, from the drains and the outcomes of all VMIs by node."""
    return [
        Sample((node,), sum(outcomes.values()))
        for node, outcomes in counts.items()
        if node in drains and drains[node].closed
    ]
