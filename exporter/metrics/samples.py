"""Samplers of metrics that need more than one line."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from exporter.counters import Histogram
from exporter.engine.diagnosis import Diagnosis, State
from exporter.engine.drain_outcomes import DrainOutcome
from exporter.engine.model import Reason
from exporter.engine.requesters import Source
from exporter.engine.verdicts import ALLOWED
from exporter.health import HistoryHealth, Watched
from exporter.metrics.family import Sample, Sampler, View


_Part = TypeVar("_Part")


def sample_blocks(view: View) -> list[Sample]:
    """The samples of `BLOCKS`, without nodes and namespaces that are gone."""
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


def sample_histograms(histograms: Iterable[tuple[str, Histogram]]) -> list[Sample]:
    """The samples of histograms, each with the value of its only label."""
    return [one for label, own in histograms for one in sample_histogram((label,), own)]


def sample_watches(read: Callable[[list[Watched]], float]) -> Sampler:
    """A sampler of one value per resource, read from its watches of all namespaces."""
    return lambda view: [Sample((r,), read(view.health.of(r))) for r in view.watched]


def sample_part(
    find: Callable[[View], _Part | None], sample: Callable[[_Part], list[Sample]]
) -> Sampler:
    """A sampler of a part that may be off or invisible. Then it has no samples."""

    def sample_part(view: View) -> list[Sample]:
        part = find(view)
        return [] if part is None else sample(part)

    return sample_part


def sample_history(read: Callable[[HistoryHealth], float]) -> Sampler:
    """A sampler of one value of the stored history."""
    return sample_part(lambda view: view.health.history, lambda part: [Sample((), read(part))])


def sample_unwritten(view: View) -> list[Sample]:
    """The time of the oldest unwritten change. A change that is not encoded yet counts as new."""
    history = view.health.history
    if history is None:
        return []
    newest = view.now if history.has_outdated() else 0.0
    return [Sample((), history.find_unwritten() or newest)]


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
