"""Samples of the metrics that are more than one value."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from exporter.counters import Histogram
from exporter.engine.diagnosis import Diagnosis, State
from exporter.engine.drain_outcomes import DrainOutcome
from exporter.engine.model import Reason
from exporter.engine.requesters import Source
from exporter.engine.verdicts import ALLOWED
from exporter.health import HistoryHealth
from exporter.metrics.family import Sample, View


_Part = TypeVar("_Part")


def sample_blocks(view: View) -> list[Sample]:
    """The samples of `BLOCKS`, without VMIs and nodes that are gone."""
    view.counters.forget_blocks(view.store.nodes, view.store.keys(), view.now)
    return [Sample(key, value) for key, value in sorted(view.counters.blocks.items())]


def sample_histogram(labels: tuple[str, ...], histogram: Histogram) -> list[Sample]:
    """The samples of one histogram with these label values."""
    buckets = [Sample(labels, count, "_bucket", le) for le, count in histogram.cumulative()]
    return [
        *buckets,
        Sample(labels, histogram.count, "_count"),
        Sample(labels, histogram.total, "_sum"),
    ]


def sample_part(
    find: Callable[[View], _Part | None], sample: Callable[[View, _Part], list[Sample]]
) -> Callable[[View], list[Sample]]:
    """A sampler of a part that may be off or invisible: then it has no samples, so none alerts."""

    def sample_part(view: View) -> list[Sample]:
        part = find(view)
        return [] if part is None else sample(view, part)

    return sample_part


def sample_history(
    read: Callable[[View, HistoryHealth], float],
) -> Callable[[View], list[Sample]]:
    """A sampler of one value of the stored history."""
    return sample_part(lambda view: view.health.history, lambda v, h: [Sample((), read(v, h))])


def sample_verdicts(
    verdicts: Mapping[tuple[str, str], int], reasons: Iterable[Reason]
) -> list[Sample]:
    """The samples of `VMIS`, from the counts by verdict and node, for these reasons."""
    possible = (ALLOWED, *reasons)
    nodes = sorted({node for _, node in verdicts if node})
    return [
        Sample((verdict, node), verdicts.get((verdict, node), 0))
        for node in nodes
        for verdict in possible
    ]


def sample_drains(counts: Mapping[str, Mapping[DrainOutcome, int]]) -> list[Sample]:
    """The samples of `DRAINS`."""
    return [
        Sample((node, outcome), outcomes.get(outcome, 0))
        for node, outcomes in counts.items()
        for outcome in DrainOutcome
    ]


def sample_stuck(diagnoses: Iterable[Diagnosis]) -> list[Sample]:
    """The samples of `STUCK_EVACUATIONS`."""
    stuck = Counter((one.source, one.state) for one in diagnoses if one.stuck)
    return [Sample((source, state), stuck[source, state]) for source in Source for state in State]
