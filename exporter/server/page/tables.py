"""The rows of the status page's tables: which VMs and nodes they show, and in which order.

The rows are answers of the API. Filtering and sorting many of them runs in slices.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from datetime import datetime
from enum import StrEnum
from heapq import nsmallest
from itertools import groupby, islice
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

from msgspec import Struct

from exporter.engine.evacuations.drain import Forecast
from exporter.engine.evacuations.drain_outcomes import DrainOutcome
from exporter.engine.facts.model import Vmi
from exporter.engine.facts.policy import Reason
from exporter.engine.facts.states import State
from exporter.server.api.answers import write_node
from exporter.server.api.evacuation_schemas import (
    EvacuationAnswer,
    EvacuationsAnswer,
    NodeAnswer,
    StuckMove,
)
from exporter.server.api.schemas import BlockedVmi
from exporter.server.fields import LONGEST_NAME, LONGEST_NAMESPACE
from exporter.words.advice import shorten_step


T = TypeVar("T")
Moving: TypeAlias = EvacuationAnswer | StuckMove

ROWS = 50
"""The most rows of a table."""
SLICE = 100
"""How many VMs are filtered without yielding, which takes 1 ms."""
LONGEST_VM = LONGEST_NAMESPACE + len("/") + LONGEST_NAME


class Sort(StrEnum):
    """The sort order.

    It applies within a next step. TIME: the longest first; of the blocked VMs, the next to be
    released.
    """

    TIME = "time"
    NAME = "name"
    NODE = "node"
    STATE = "state"


class PageFilter(Struct, frozen=True, kw_only=True):
    """The filter and the sort order in the page's query.

    `state` and `stuck` filter evacuations and stuck moves, `reason` filters blocked VMs. `vm` is a
    part of namespace/name. It filters both tables, and selects the VMs of the table of found VMs.
    `ignored` says which parameters are invalid, and why.
    """

    vm: str = ""
    namespace: str = ""
    node: str = ""
    state: State | None = None
    stuck: bool = False
    reason: Reason | None = None
    sort: Sort = Sort.TIME
    ignored: tuple[str, ...] = ()

    @property
    def narrows(self) -> bool:
        """Whether the filter can hide rows."""
        return any((self.vm, self.namespace, self.node, self.state, self.stuck, self.reason))


class Rows(Struct, Generic[T], frozen=True, kw_only=True):
    """The rows of a table that are shown, how many match the filter, and how many there are."""

    shown: tuple[T, ...]
    matching: int
    total: int

    @property
    def more(self) -> int:
        """How many matching rows are not shown."""
        return self.matching - len(self.shown)


class Step(Struct, frozen=True, kw_only=True):
    """A next step, and how many evacuations and stuck moves that match the filter have it.

    `title` is its first clause, and `runbook` the step of a runbook that explains it.
    """

    title: str
    runbook: str
    stuck: bool
    count: int


class BlockedVms(Struct, frozen=True, kw_only=True):
    """The number of blocked VMs by reason, and by node and reason, and the `rows` of the table.

    A row has all entries of one VM in the blocked set. `placed` is the number of blocked VMs that
    match the filter, whatever their reason.
    """

    reasons: Counter[Reason]
    by_node: dict[str, Counter[Reason]]
    namespaces: set[str]
    placed: int
    rows: Rows[tuple[BlockedVmi, ...]]


def summarize_blocked(
    entries: list[BlockedVmi], filters: PageFilter
) -> Generator[None, None, BlockedVms]:
    """Count, filter and sort the blocked set. Yields after each slice: 10,000 VMs take 60 ms."""
    # The set is sorted by VMI and checkpoint. The reason in a VMI's first entry counts.
    blocked = (tuple(of_vmi) for _, of_vmi in groupby(entries, key=name_vm))
    by_node = defaultdict[str, Counter[Reason]](Counter)
    namespaces: set[str] = set()
    shown: list[tuple[BlockedVmi, ...]] = []
    total = placed = matching = 0
    while part := [*islice(blocked, SLICE)]:
        for first, *_ in part:
            by_node[first.node][first.reason] += 1
            namespaces.add(first.namespace)
        in_place = [of_vmi for of_vmi in part if _matches(filters, of_vmi[0])]
        matches = [
            of_vmi
            for of_vmi in in_place
            if filters.reason is None or any(entry.reason is filters.reason for entry in of_vmi)
        ]
        total += len(part)
        placed += len(in_place)
        matching += len(matches)
        shown = nsmallest(ROWS, [*shown, *matches], key=_BLOCKED_KEYS[filters.sort])
        yield
    return BlockedVms(
        reasons=sum(by_node.values(), Counter()),
        by_node=by_node,
        namespaces=namespaces,
        placed=placed,
        rows=Rows(shown=tuple(shown), matching=matching, total=total),
    )


def read_filter(query: Mapping[str, str]) -> PageFilter:
    """Read the filter from a URL's query; invalid parameters are added to `ignored`."""
    ignored: list[str] = []

    def name(key: str, longest: int) -> str:
        value = query.get(key, "").strip()
        if len(value) <= longest:
            return value
        ignored.append(f"{key}: at most {longest} characters")
        return ""

    def choice(key: str, choices: Iterable[str]) -> str:
        value, known = query.get(key, ""), tuple(choices)
        if not value or value in known:
            return value
        ignored.append(f"{key}: expected {' or '.join(known)}")
        return ""

    state, reason = choice("state", State), choice("reason", Reason)
    return PageFilter(
        vm=name("vm", LONGEST_VM),
        namespace=name("namespace", LONGEST_NAMESPACE),
        node=name("node", LONGEST_NAME),
        state=State(state) if state else None,
        stuck=bool(choice("stuck", ("true",))),
        reason=Reason(reason) if reason else None,
        sort=Sort(choice("sort", Sort) or Sort.TIME),
        ignored=tuple(ignored),
    )


class FoundVms(NamedTuple):
    """The VMs that a filter finds.

    `matching` is the number of those that have not ended. `named` is the number with a matching
    name, ended ones included, and `first` the keys of the first `ROWS` of them.
    """

    matching: int = 0
    named: int = 0
    first: Sequence[tuple[str, str]] = ()


def search_vms(vmis: list[Vmi], filters: PageFilter) -> Generator[None, None, FoundVms]:
    """Find VMs by name, namespace and node. Yields after each slice."""
    first: list[tuple[str, str]] = []
    matching = named = 0
    for at in range(0, len(vmis), SLICE):
        matches = [
            vmi for vmi in vmis[at : at + SLICE] if filters.vm in f"{vmi.namespace}/{vmi.name}"
        ]
        matching += sum(not vmi.finished and _matches(filters, vmi) for vmi in matches)
        named += len(matches)
        first = nsmallest(ROWS, [*first, *((vmi.namespace, vmi.name) for vmi in matches)])
        yield
    return FoundVms(matching=matching, named=named, first=first)


class PageTables(NamedTuple):
    """The drain outcomes by node, and the rows that match a filter.

    `moving` has evacuations and stuck moves with their next steps.
    """

    outcomes: dict[str, Mapping[DrainOutcome, int]]
    nodes: list[NodeAnswer]
    moving: list[tuple[Step, Moving]]


def build_tables(
    blocked: BlockedVms,
    filters: PageFilter,
    described: EvacuationsAnswer,
    forecasts: list[Forecast],
    *,
    named: bool,
) -> PageTables:
    """Filter and sort nodes, evacuations and stuck moves, from what is known of one snapshot.

    The nodes with the most blocked VMs come first.
    """
    nodes = [write_node(forecast) for forecast in forecasts if filters.node in ("", forecast.node)]
    nodes.sort(key=lambda node: -blocked.by_node.get(node.node, Counter[Reason]()).total())
    counted = choose_counted(filters, named=named)
    moving = [
        move
        for move in list_moving(described)
        if _matches(counted, move)
        and counted.state in (None, move.state)
        and (move.stuck or not counted.stuck)
    ]
    moving.sort(key=_MOVING_KEYS[filters.sort])
    return PageTables(
        {forecast.node: forecast.outcomes for forecast in forecasts}, nodes, sort_by_step(moving)
    )


def sort_by_step(moving: Iterable[Moving]) -> list[tuple[Step, Moving]]:
    """Sort by next step: the stuck first, then the step of the most VMs. Keeps the order within."""
    by_step = defaultdict[tuple[bool, str, str], list[Moving]](list)
    for move in moving:
        by_step[move.stuck, shorten_step(move.next_step), move.runbook].append(move)
    steps = {
        Step(title=title, runbook=runbook, stuck=stuck, count=len(moves)): moves
        for (stuck, title, runbook), moves in by_step.items()
    }
    order = sorted(steps, key=lambda step: (not step.stuck, -step.count, step.title, step.runbook))
    return [(step, move) for step in order for move in steps[step]]


def list_moving(described: EvacuationsAnswer) -> list[Moving]:
    """All evacuations and stuck moves."""
    return [*described.evacuations, *described.stuck_moves]


def choose_counted(filters: PageFilter, *, named: bool) -> PageFilter:
    """The filter of all counts. Without names, none: a count would say whether a VM matches."""
    return filters if named else PageFilter()


def _matches(filters: PageFilter, vmi: BlockedVmi | Moving | Vmi) -> bool:
    return (
        filters.vm in f"{vmi.namespace}/{vmi.name}"
        and filters.namespace in ("", vmi.namespace)
        and filters.node in ("", vmi.node)
    )


def _release(entries: tuple[BlockedVmi, ...]) -> tuple[bool | datetime, ...]:
    """The sort key of the release time; VMs without a known release come last."""
    known = sorted(entry.not_before for entry in entries if entry.not_before is not None)
    return len(known) < len(entries), *known[-1:]


def _begin(move: Moving) -> tuple[bool, datetime | None]:
    """The sort key of an evacuation's request or a move's begin; an unknown one comes last."""
    since = move.requested_at if isinstance(move, EvacuationAnswer) else move.since
    return since is None, since


def name_vm(vmi: BlockedVmi | Moving) -> tuple[str, str]:
    """The namespace and the name of a VM."""
    return vmi.namespace, vmi.name


_MOVING_KEYS: dict[Sort, Callable[[Moving], Any]] = {
    Sort.TIME: _begin,
    Sort.NAME: name_vm,
    Sort.NODE: lambda move: move.node,
    Sort.STATE: lambda move: move.state,
}
"""The sort keys of evacuations and moves. Those with equal keys keep their order."""
_BLOCKED_KEYS: dict[Sort, Callable[[tuple[BlockedVmi, ...]], Any]] = {
    Sort.TIME: _release,
    Sort.NAME: lambda entries: name_vm(entries[0]),
    Sort.NODE: lambda entries: (entries[0].node, _release(entries)),
    Sort.STATE: lambda entries: (entries[0].reason, _release(entries)),
}
"""The sort keys of blocked VMs. Those with equal keys keep their order: by name."""
