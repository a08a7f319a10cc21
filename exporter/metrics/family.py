"""The definition of a metric: its name, type, help and labels, and how its samples are read.

To add a metric, add a row where its subject is: in `exporter`, `counts`, `nodes` or `vms`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Literal, TypeAlias, TypeVar

from msgspec import Struct

from exporter.counters import Counters, Histogram, PreventedMoves
from exporter.engine.evacuations.diagnosis import Diagnosis
from exporter.engine.facts.model import Instant, Vmi
from exporter.engine.facts.policy import Policy, StuckPolicy
from exporter.engine.store.node_drains import DrainProgress
from exporter.engine.store.store import Store
from exporter.engine.verdicts.cooldown import Cooldown
from exporter.engine.verdicts.view import Entry, VerdictView
from exporter.health import Health
from exporter.words import Stability


SLICE = 75
"""How many samples are written, or VMIs diagnosed, without yielding."""

_Item = TypeVar("_Item")


class Sample(Struct, frozen=True, gc=False):
    """One value of a family; `labels` are in the family's order, `suffix` is for histograms."""

    labels: tuple[str, ...]
    value: float
    suffix: str = ""
    le: str = ""


class View(Struct, frozen=True, kw_only=True):
    """The data that a scrape reads at `now`.

    `verdicts` are those of `store` under `policy`. At most `vmi_series` VMIs have series of their
    own.
    """

    store: Store
    verdicts: VerdictView
    health: Health
    counters: Counters
    policy: Policy
    stuck: StuckPolicy
    vmi_series: int
    now: Instant


LabelValues: TypeAlias = tuple[str, ...]
SampleKey: TypeAlias = str | LabelValues
"""The label values of a sample; a string if there is one label."""
Values: TypeAlias = float | Iterable[tuple[SampleKey, float]] | None
"""One value without labels, or a value for each key; None if there is nothing to read."""
ONE_VMI = ("namespace", "name", "node")
"""The labels of most metrics about single VMIs."""


class Family(Struct, frozen=True, kw_only=True):
    """One metric. If and only if its name ends with `_total`, it is a counter."""

    name: str
    stability: Stability
    help: str
    labels: tuple[str, ...] = ()

    @property
    def type(self) -> Literal["counter", "gauge", "histogram"]:
        """The metric's type."""
        return "counter" if self.name.endswith("_total") else "gauge"

    @property
    def help_line(self) -> str:
        """The text of `# HELP`, which ends with the stability."""
        return f"{self.help} [{self.stability}]"


class ViewFamily(Family, frozen=True, kw_only=True):
    """A metric of the exporter itself or of the whole cluster. All its values are read at once."""

    read: Callable[[View], Values]

    def sample(self, view: View) -> list[Sample]:
        """A sample for each value."""
        values = self.read(view)
        if values is None:
            return []
        if isinstance(values, int | float):
            return [Sample((), values)]
        return [Sample(_list_labels(key), value) for key, value in values]


class HistogramFamily(Family, frozen=True, kw_only=True):
    """A metric that has a histogram for each key."""

    read: Callable[[View], Iterable[tuple[SampleKey, Histogram]]]

    @property
    def type(self) -> Literal["histogram"]:
        """Always a histogram."""
        return "histogram"

    def sample(self, view: View) -> list[Sample]:
        """The buckets, the count and the sum of each histogram."""
        samples = []
        for key, histogram in self.read(view):
            labels = _list_labels(key)
            samples += [
                Sample(labels, count, "_bucket", le) for le, count in histogram.cumulative()
            ]
            samples += [
                Sample(labels, histogram.count, "_count"),
                Sample(labels, histogram.total, "_sum"),
            ]
        return samples


class PreventedFamily(Family, frozen=True, kw_only=True):
    """A metric about prevented moves, by namespace."""

    labels: tuple[str, ...] = ("namespace",)
    read: Callable[[PreventedMoves], Mapping[str, float]]

    def sample(self, prevented: PreventedMoves, possible: set[str]) -> list[Sample]:
        """The value of each namespace, and a 0 for each other one in which it is `possible`."""
        values = self.read(prevented)
        return [
            Sample((namespace,), values.get(namespace, 0))
            for namespace in sorted(possible | values.keys())
        ]


class DrainFamily(Family, frozen=True, kw_only=True):
    """A metric with one sample per node that has evacuations."""

    labels: tuple[str, ...] = ("node",)
    read: Callable[[DrainProgress], float | None]

    def sample(self, drains: Mapping[str, DrainProgress]) -> list[Sample]:
        """The samples of the nodes that have a value, sorted by node."""
        values = ((node, self.read(drain)) for node, drain in sorted(drains.items()))
        return [Sample((node,), value) for node, value in values if value is not None]


class EvacuationFamily(Family, frozen=True, kw_only=True):
    """A metric with one sample per evacuation."""

    labels: tuple[str, ...] = ONE_VMI
    sample: Callable[[LabelValues, Vmi, Diagnosis], Sample]


class CoolingFamily(Family, frozen=True, kw_only=True):
    """A metric with one sample per VMI that cools down."""

    labels: tuple[str, ...] = ONE_VMI
    read: Callable[[Vmi, Cooldown], Sample]

    def sample(self, entry: Entry) -> Sample:
        """The sample of a VMI that cools down."""
        if entry.cooldown is None:
            raise TypeError("this VMI is not cooling down")
        return self.read(entry.evidence.vmi, entry.cooldown)


class Column(Struct, frozen=True):
    """The samples of a family for some VMIs that cool down, computed only when they are read."""

    family: CoolingFamily
    cooling: Sequence[Entry]

    def __iter__(self) -> Iterator[Sample]:
        return map(self.family.sample, self.cooling)


Piece: TypeAlias = tuple[Family, Sequence[Sample] | Column]
"""Some samples of a family. All pieces of a family follow each other."""


def cut(whole: Sequence[_Item], most: int = SLICE) -> Iterator[Sequence[_Item]]:
    """Cut a sequence into slices; an empty sequence gives one empty slice."""
    return (whole[at : at + most] for at in range(0, max(1, len(whole)), most))


def _list_labels(key: SampleKey) -> LabelValues:
    return (key,) if isinstance(key, str) else key
