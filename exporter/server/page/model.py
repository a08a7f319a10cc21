"""The page model: everything the status page shows at one instant.

The model consists of the API's answers. Its counts are those of one instant, and a VM has the same
answer in each table, so that no row contradicts another row or the API.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from datetime import datetime
from enum import StrEnum
from heapq import nsmallest
from itertools import groupby, islice
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

from msgspec import Struct, structs

from exporter.engine.evacuations.drain import Forecast
from exporter.engine.evacuations.drain_outcomes import DrainOutcome
from exporter.engine.facts.model import Instant, Resource, Vmi
from exporter.engine.facts.policy import Policy, Reason, StuckPolicy
from exporter.engine.facts.states import State
from exporter.server.api.answers import write_node
from exporter.server.api.evacuation_schemas import (
    DrainAnswer,
    EvacuationAnswer,
    EvacuationsAnswer,
    NodeAnswer,
    StuckMove,
)
from exporter.server.api.handlers import Service
from exporter.server.api.schemas import BlockedVmi, StatusAnswer, VmiAnswer
from exporter.server.fields import LONGEST_NAME, LONGEST_NAMESPACE
from exporter.text import to_optional_datetime
from exporter.words.advice import shorten_step


T = TypeVar("T")
Moving: TypeAlias = EvacuationAnswer | StuckMove

ROWS = 50
"""The most rows of a table."""
HINTS = 200
"""The most suggestions of a filter field."""
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


class Vms(Struct, frozen=True, kw_only=True, weakref=True):
    """The tables of single VMs, and the namespaces to suggest in the filter.

    `moving` has the VMs with an evacuation or a stuck move, in the order of their next steps.
    `blocked` has each VM with its entries in the blocked set. `found` has the VMs whose
    namespace/name contains the filter's `vm`; it is None if that filter is empty.
    """

    found: Rows[VmiAnswer] | None
    moving: Rows[tuple[Step, VmiAnswer]]
    blocked: Rows[tuple[tuple[BlockedVmi, ...], VmiAnswer]]
    namespaces: tuple[str, ...]


class Figures(Struct, frozen=True, kw_only=True):
    """How many VMs match the filter: all, those that no rule blocks, and the others.

    `stuck` counts evacuations and other moves.
    The filter's `state`, `stuck` and `reason` narrow only the figures that they are about.
    """

    vmis: int = 0
    free: int = 0
    blocked: int = 0
    evacuating: int = 0
    stuck: int = 0


class PageModel(Struct, frozen=True, kw_only=True, weakref=True):
    """Everything that the page shows. Fields with a default are set only if `status.ready`.

    - `objects`: the number of objects of each resource.
    - `dies_at`: when `status.staleness` becomes DEAD if there is no contact until then.
    - `closing`: this process is shutting down.
    - `steps`: the first next steps, those of stuck VMs first, and then those of the most VMs.
    - `blocked_by`: the number of blocked VMs by node and by their first reason.
    - `drained`: the drain of the filter's node, if the page may name VMs.
    - `vms`: None if the page may not name VMs.
    """

    status: StatusAnswer
    objects: dict[Resource, int]
    dies_at: datetime | None
    closing: bool
    policy: Policy
    stuck: StuckPolicy
    filters: PageFilter
    steps: tuple[Step, ...] = ()
    figures: Figures = Figures()
    nodes: Rows[NodeAnswer] = Rows(shown=(), matching=0, total=0)
    node_names: tuple[str, ...] = ()
    blocked_by: dict[str, Counter[Reason]] = {}
    drained: DrainAnswer | None = None
    vms: Vms | None = None


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
    blocked = (tuple(of_vmi) for _, of_vmi in groupby(entries, key=_of_vmi))
    by_node = defaultdict[str, Counter[Reason]](Counter)
    namespaces: set[str] = set()
    shown: list[tuple[BlockedVmi, ...]] = []
    total = placed = matching = 0
    while some := [*islice(blocked, SLICE)]:
        for first, *_ in some:
            by_node[first.node][first.reason] += 1
            namespaces.add(first.namespace)
        here = [of_vmi for of_vmi in some if _matches(filters, of_vmi[0])]
        found = [
            of_vmi
            for of_vmi in here
            if filters.reason is None or any(entry.reason is filters.reason for entry in of_vmi)
        ]
        total, placed, matching = total + len(some), placed + len(here), matching + len(found)
        shown = nsmallest(ROWS, [*shown, *found], key=_BLOCKED_KEYS[filters.sort])
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
        found = [
            vmi for vmi in vmis[at : at + SLICE] if filters.vm in f"{vmi.namespace}/{vmi.name}"
        ]
        matching += sum(not vmi.finished and _matches(filters, vmi) for vmi in found)
        named += len(found)
        first = nsmallest(ROWS, [*first, *((vmi.namespace, vmi.name) for vmi in found)])
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
    counted = _choose_counted(filters, named=named)
    moving = [
        move
        for move in _list_moving(described)
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


async def build_page(
    service: Service,
    blocked: BlockedVms,
    filters: PageFilter,
    now: Instant,
    *,
    described: EvacuationsAnswer,
    tables: PageTables,
    searched: FoundVms,
    named: bool,
) -> PageModel:
    """Build the page model at `now`; it names single VMs only if `named`.

    `blocked` and `tables` are the results of `summarize_blocked` and `build_tables` with these
    filters. `searched` is the result of `search_vms` if the filters name VMs or a namespace. Other
    tasks run between the descriptions of single VMs.
    """
    outcomes, nodes, moving = tables
    status = service.describe_status(blocked.reasons, outcomes, now)
    shown = status
    if not named:
        # Omit namespaces. Omit errors too, because an error may name a namespace.
        waiting = dict.fromkeys(
            row.resource for row in status.resources if not (row.synced or row.rejected)
        )
        shown = structs.replace(
            status,
            waiting_for=list(waiting or status.waiting_for),
            resources=[
                structs.replace(
                    row,
                    namespace=None,
                    rejected=row.rejected and "see the log",
                    trouble=row.trouble and "failing: see the log",
                )
                for row in status.resources
            ],
            blind_spots={},
        )
    page = PageModel(
        status=shown,
        objects={row.resource: service.store.count(row.resource) for row in status.resources},
        dies_at=to_optional_datetime(service.health.dies_at(now)),
        closing=service.closing,
        policy=service.policy,
        stuck=service.stuck,
        filters=filters,
    )
    if not status.ready:
        return page
    counted = _choose_counted(filters, named=named)
    placed = blocked.placed if named else blocked.rows.total
    held = blocked.rows.matching if named else blocked.rows.total
    vmis = service.store.nodes[counted.node] if counted.node else service.store.nodes.total()
    if counted.vm or counted.namespace:
        vmis = searched.matching
    return structs.replace(
        page,
        steps=tuple(dict.fromkeys(step for step, _ in moving))[:ROWS],
        figures=Figures(
            vmis=vmis,
            free=vmis - placed,
            blocked=held,
            evacuating=sum(isinstance(move, EvacuationAnswer) for _, move in moving),
            stuck=sum(move.stuck for _, move in moving),
        ),
        nodes=Rows(shown=tuple(nodes[:ROWS]), matching=len(nodes), total=len(outcomes)),
        node_names=tuple(outcomes)[:HINTS],
        blocked_by=blocked.by_node,
        drained=_describe_drain(service, filters.node, now) if named and filters.node else None,
        vms=await _list_vms(
            service, blocked, filters, moving=moving, described=described, searched=searched
        )
        if named
        else None,
    )


def _describe_drain(service: Service, node: str, now: Instant) -> DrainAnswer | None:
    """The drain of a node; None if neither a VM nor a pod that has outlived its move is on it."""
    answer = service.describe_node(node, now)
    return answer if answer.vmis or answer.outlived else None


async def _list_vms(
    service: Service,
    blocked: BlockedVms,
    filters: PageFilter,
    *,
    moving: list[tuple[Step, Moving]],
    described: EvacuationsAnswer,
    searched: FoundVms,
) -> Vms:
    every = _list_moving(described)
    steps = {_of_vmi(move): step for step, move in moving[:ROWS]}
    named = searched.first if filters.vm else ()
    blocks = [entries[0] for entries in blocked.rows.shown]
    keys = [
        *named,
        *steps,
        *map(_of_vmi, blocks),
    ]
    answers = await service.describe_vmis(dict.fromkeys(keys))
    found = None
    if filters.vm:
        found = Rows(
            shown=tuple(answers[key] for key in named if key in answers),
            matching=searched.named,
            total=service.store.count(Resource.VMIS),
        )
    return Vms(
        found=found,
        moving=Rows(
            shown=tuple(
                (step, answers[key])
                for key, step in steps.items()
                if key in answers and (answers[key].evacuation or answers[key].move) is not None
            ),
            matching=len(moving),
            total=len(every),
        ),
        blocked=Rows(
            shown=tuple(
                (entries, answers[key])
                for entries in blocked.rows.shown
                if (key := _of_vmi(entries[0])) in answers
            ),
            matching=blocked.rows.matching,
            total=blocked.rows.total,
        ),
        namespaces=tuple(sorted({move.namespace for move in every} | blocked.namespaces)[:HINTS]),
    )


def _list_moving(described: EvacuationsAnswer) -> list[Moving]:
    return [*described.evacuations, *described.stuck_moves]


def _choose_counted(filters: PageFilter, *, named: bool) -> PageFilter:
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


def _of_vmi(vmi: BlockedVmi | Moving) -> tuple[str, str]:
    return vmi.namespace, vmi.name


_MOVING_KEYS: dict[Sort, Callable[[Moving], Any]] = {
    Sort.TIME: _begin,
    Sort.NAME: _of_vmi,
    Sort.NODE: lambda move: move.node,
    Sort.STATE: lambda move: move.state,
}
"""The sort keys of evacuations and moves. Those with equal keys keep their order."""
_BLOCKED_KEYS: dict[Sort, Callable[[tuple[BlockedVmi, ...]], Any]] = {
    Sort.TIME: _release,
    Sort.NAME: lambda entries: _of_vmi(entries[0]),
    Sort.NODE: lambda entries: (entries[0].node, _release(entries)),
    Sort.STATE: lambda entries: (entries[0].reason, _release(entries)),
}
"""The sort keys of blocked VMs. Those with equal keys keep their order: by name."""
