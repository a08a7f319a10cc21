"""Writes the metrics as text for a scrape, in slices, so that other tasks run in between.

Only this package imports prometheus_client. Gauges are read from the store at scrape time, so a
gauge ends when its VM or node is gone. Counters stay; see `Counters` for those of a node.
"""

import asyncio
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import chain
from typing import NamedTuple, TypeAlias, TypeVar

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.utils import floatToGoString

from exporter.engine.evacuations.conditions import read_conditions
from exporter.engine.evacuations.diagnosis import Move
from exporter.engine.evacuations.drain import (
    Diagnosed,
    OutcomeCount,
    Snapshot,
    take_snapshot,
)
from exporter.engine.facts.model import Instant, Vmi
from exporter.engine.facts.policy import Reason
from exporter.engine.verdicts.foreseen import BlockLabels
from exporter.engine.verdicts.rules import list_reasons
from exporter.engine.verdicts.view import Entry, VerdictSummary
from exporter.metrics.admitted import AdmittedVms
from exporter.metrics.families import (
    BLOCKS,
    COOLING,
    CORDONED,
    DENIED,
    DRAINS,
    EVACUATIONS,
    EXPORTER,
    FAILED_TARGETS,
    FAMILIES,
    LEFT_OUT,
    MIGRATIONS,
    MOVE_STATES,
    MOVES,
    NODE_DRAINS,
    PREVENTED,
    STUCK_EVACUATIONS,
    VMIS,
)
from exporter.metrics.family import CoolingFamily, Family, Sample, View
from exporter.metrics.samples import (
    find_denied,
    find_failed_targets,
    find_moves,
    forget_old_counts,
    read_blocks,
    sample_cordoned,
    sample_drains,
    sample_stuck,
    sample_verdicts,
)


NAMES = frozenset(family.name for family in FAMILIES)
SLICE = 75
"""How many VMIs are processed without yielding. This takes 1.5 ms if all of them have changed."""
ADMITTED_AT_ONCE = 5_000
"""How many VMIs are counted towards `limits.vmiSeries` without yielding."""
GZIP = 31
"""zlib's `wbits` for the largest window and a header of gzip."""
PART = 2**16
"""Each part of the body has at least this many bytes, except the last one."""


class Column:
    """The samples of `COOLING[place]` for some VMIs."""

    def __init__(self, place: int, cooling: Sequence[Entry]) -> None:
        self.place = place
        self.cooling = cooling

    def __iter__(self) -> Iterator[Sample]:
        return (_sample_cooling(COOLING[self.place], entry) for entry in self.cooling)


_Item = TypeVar("_Item")

Piece: TypeAlias = tuple[Family, Sequence[Sample] | Column]
"""Some samples of a family. All pieces of a family follow each other."""


class _Others(NamedTuple):
    """The VMIs of `DENIED` and of `FAILED_TARGETS`."""

    denied: Sequence[tuple[Vmi, Instant]]
    failed_targets: Sequence[tuple[Vmi, str]]


def sample(view: View) -> Iterator[Piece]:
    """The samples of all `FAMILIES`, in order.

    A family with many VMIs comes in several pieces. All data that may change are read before this
    function returns, so all pieces show the same instant.
    """
    trust = view.health.read_trust(view.now)
    conditions = read_conditions(view.store, view.stuck, trust, view.now)
    view.verdicts.advance(view.now, trust)
    summary = view.verdicts.summarize()
    snapshot = take_snapshot(view.store, conditions, view.verdicts.list_unsettled())
    others = _Others(find_denied(view), find_failed_targets(view))
    foreseen = summary.foreseen[: view.vmi_series]
    cooling = {namespace for reason, _, namespace in foreseen if reason is Reason.COOLDOWN}
    return chain(
        _sample_blocks(read_blocks(view), foreseen),
        [(family, family.sample(view.counters.prevented, cooling)) for family in PREVENTED],
        [(family, family.sample(view)) for family in EXPORTER],
        _sample_vmis(view, summary, snapshot, others),
        [(family, family.sample(view)) for family in MIGRATIONS],
    )


class Exposition:
    """Renders the metrics in the format that a scraper accepts.

    `read` returns the present view; `process` adds the usual `process_*` metrics.
    """

    def __init__(self, read: Callable[[], View], *, process: bool = True) -> None:
        self._read = read
        self._rendering = asyncio.Lock()
        self._lines: dict[Entry, tuple[str, ...]] = {}
        self._process = CollectorRegistry(auto_describe=False)
        if process:
            ProcessCollector(registry=self._process)

    async def render(self, accept: str, *, gzip: bool = False) -> tuple[list[bytes], str]:
        """The body in parts and its content type: text 0.0.4, or OpenMetrics if accepted.

        `gzip`: compress each part in a thread, so that the whole text is never in memory.

        Other tasks run after each slice, and only one scrape runs at a time. So a verdict waits for
        at most one slice. prometheus_client would write 20,000 samples in 180 ms without yielding.
        """
        accept = narrow(accept)
        encode, content_type = choose_encoder(accept)
        deflate = zlib.compressobj(wbits=GZIP) if gzip else None
        async with self._rendering:
            view = self._read()
            while view.verdicts.advance(view.now, view.health.read_trust(view.now), most=SLICE):
                await asyncio.sleep(0)
                view = self._read()
            forget_old_counts(view)
            parts, written = [], bytearray()
            for text in self._write(sample(view), open_metrics=bool(accept)):
                written += text.encode()
                if len(written) >= PART:
                    parts.append(await _compress(deflate, bytes(written)))
                    written.clear()
                await asyncio.sleep(0)
            parts.append(await _compress(deflate, bytes(written) + encode(self._process)))
        if deflate is not None:
            parts.append(deflate.flush())
        return parts, content_type

    def _write(self, pieces: Iterable[Piece], *, open_metrics: bool) -> Iterator[str]:
        """The pieces as text."""
        begun, written = None, 0  # the present family, and how many lines `COOLING` has so far
        for family, samples in pieces:
            if family is not begun:
                begun = family
                yield _write_head(family, open_metrics=open_metrics)
            if isinstance(samples, Column):
                place, find = samples.place, self._lines.get
                yield "".join(
                    [(find(entry) or self._write_lines(entry))[place] for entry in samples.cooling]
                )
                written += len(samples.cooling)
            else:
                for some in _cut(samples):
                    yield "".join([_write_sample(family, sample) for sample in some])
        if len(self._lines) > 2 * written / len(COOLING):
            while self._lines:  # in slices: `clear` takes 30 ms
                self._lines.popitem()
                if len(self._lines) % SLICE == 0:
                    yield ""

    def _write_lines(self, entry: Entry) -> tuple[str, ...]:
        """The lines of a VMI, one for each family of `COOLING`.

        The lines are kept, because writing them takes 12 us, and most cooldowns are the same in the
        next scrape.
        """
        lines = tuple(_write_sample(family, _sample_cooling(family, entry)) for family in COOLING)
        self._lines[entry] = lines
        return lines


def _write_head(family: Family, *, open_metrics: bool) -> str:
    """The lines before the samples of a family.

    In OpenMetrics the name of a counter's family lacks `_total`. If another family has that name,
    the counter keeps its own, with the type unknown.
    """
    name, kind = family.name, str(family.type)
    if open_metrics and kind == "counter":
        short = name.removesuffix("_total")
        name, kind = (name, "unknown") if short in NAMES else (short, kind)
    return f"# HELP {name} {family.help_line}\n# TYPE {name} {kind}\n"


async def _compress(deflate: "zlib._Compress | None", part: bytes) -> bytes:
    return part if deflate is None else await asyncio.to_thread(deflate.compress, part)


def _sample_cooling(family: CoolingFamily, entry: Entry) -> Sample:
    if entry.cooldown is None:
        raise TypeError("this VMI is not cooling down")
    return family.sample(entry.evidence.vmi, entry.cooldown)


def _write_sample(family: Family, sample: Sample) -> str:
    """One line of the exposition."""
    names, values = family.labels, sample.labels
    if sample.le:
        names, values = (*names, "le"), (*values, sample.le)
    template, order = _find_template(family.name, sample.suffix, names)
    value = floatToGoString(sample.value)  # type: ignore[no-untyped-call]
    return template % (*[_escape(values[at]) for at in order], value)


@cache
def _find_template(name: str, suffix: str, labels: tuple[str, ...]) -> tuple[str, list[int]]:
    """A metric's line with `%s` for each value, and the order of the label values in the line.

    Labels are sorted as in prometheus_client. With the cache, a line takes 2 us instead of 5.
    """
    order = sorted(range(len(labels)), key=labels.__getitem__)
    braced = ",".join(f'{labels[at]}="%s"' for at in order)
    return f"{name}{suffix}{{{braced}}} %s\n" if braced else f"{name}{suffix} %s\n", order


def _escape(value: str) -> str:
    if "\\" in value or "\n" in value or '"' in value:
        return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
    return value


def narrow(accept: str) -> str:
    """Reduce an Accept header to OpenMetrics 1.0, or to "" for the text format.

    For another version, prometheus_client may fail, or write 1.0 but declare that version.
    """
    for part in accept.split(","):
        media, *parameters = (token.strip().lower() for token in part.split(";"))
        versions = [p.removeprefix("version=") for p in parameters if p.startswith("version=")]
        # The weight 0 means "not acceptable" (RFC 9110, 12.4.2).
        if any(p.startswith("q=0") and not p.removeprefix("q=0").strip(".0") for p in parameters):
            continue
        if media == "application/openmetrics-text" and versions in ([], ["1.0.0"]):
            return "application/openmetrics-text; version=1.0.0"
    return ""


def _sample_blocks(
    counts: Mapping[BlockLabels, int], foreseen: Sequence[BlockLabels]
) -> Iterator[Piece]:
    """The counts, and a 0 for each block that was not counted yet and may be counted soon."""
    samples = [Sample(labels, count) for labels, count in counts.items()]
    for some in _cut(foreseen):
        samples += [Sample(labels, 0) for labels in some if labels not in counts]
        yield BLOCKS, samples
        samples = []


def _sample_vmis(
    view: View, summary: VerdictSummary, snapshot: Snapshot, others: _Others
) -> Iterator[Piece]:
    """The samples of single VMIs, and of their totals.

    Because this runs in slices, it reads only data that cannot change.
    """
    yield VMIS, sample_verdicts(summary.verdicts, list_reasons(view.policy))
    count = OutcomeCount(snapshot)
    for number, _ in enumerate(count, 1):
        if number % SLICE == 0:
            yield VMIS, ()
    moves: list[tuple[Vmi, Move]] = []
    for some in _cut([evidence for evidence in snapshot.unsettled if evidence.marker is None]):
        moves += find_moves(some, snapshot.conditions)
        if len(some) == SLICE:
            yield VMIS, ()
    yield DRAINS, sample_drains(count.counts)
    yield CORDONED, sample_cordoned(snapshot.drains, count.counts)
    progress = count.follow_drains()
    for drained in NODE_DRAINS:
        yield drained, drained.sample(progress)
    diagnosed = [evacuation for evacuation, _ in count.evacuations]
    groups: tuple[Sequence[tuple[Vmi, object]], ...] = (
        diagnosed,
        moves,
        others.denied,
        others.failed_targets,
    )
    admitted = AdmittedVms(view.vmi_series)
    if sum(map(len, groups)) + len(summary.cooling) > view.vmi_series:
        for group in groups:
            admitted.add(vmi for vmi, _ in group)
        for entries in _cut(summary.cooling, ADMITTED_AT_ONCE):
            admitted.add(entry.evidence.vmi for entry in entries)
            yield NODE_DRAINS[-1], ()
    yield from _sample_admitted(admitted, diagnosed, moves, others, summary.cooling)
    yield STUCK_EVACUATIONS, sample_stuck(diagnosis for _, diagnosis in diagnosed)
    yield LEFT_OUT, [Sample((), admitted.left_out)]


def _sample_admitted(
    admitted: AdmittedVms,
    diagnosed: Sequence[Diagnosed],
    moves: Iterable[tuple[Vmi, Move]],
    others: _Others,
    cooling: Sequence[Entry],
) -> Iterator[Piece]:
    """The samples of those VMIs that may have series."""
    for family in EVACUATIONS:
        for part in _cut([(vmi, d) for vmi, d in diagnosed if vmi in admitted]):
            yield family, [family.sample(_name(vmi, d.node), vmi, d) for vmi, d in part]
    yield (
        MOVES,
        [Sample((*_name(v, v.node), m.trigger), m.stuck) for v, m in moves if v in admitted],
    )
    yield (
        MOVE_STATES,
        [Sample((*_name(v, v.node), m.state), 1) for v, m in moves if v in admitted],
    )
    yield DENIED, [Sample(_name(v, v.node), since) for v, since in others.denied if v in admitted]
    yield (
        FAILED_TARGETS,
        [Sample(_name(v, node), 1) for v, node in others.failed_targets if v in admitted],
    )
    for place, column in enumerate(COOLING):
        for entries in _cut(cooling):
            if not admitted.left_out:
                yield column, Column(place, entries)
            else:
                mine = [entry for entry in entries if entry.evidence.vmi in admitted]
                yield column, Column(place, mine)


def _name(vmi: Vmi, node: str) -> tuple[str, str, str]:
    """The labels of a VMI and a node."""
    return vmi.namespace, vmi.name, node


def _cut(whole: Sequence[_Item], most: int = SLICE) -> Iterator[Sequence[_Item]]:
    """Cut a sequence into slices; an empty sequence gives one empty slice."""
    return (whole[at : at + most] for at in range(0, max(1, len(whole)), most))
