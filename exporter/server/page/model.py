"""The page model: everything the status page shows at one instant. Pure.

It is built by the API's own functions from one state of the store and one `now`, so that no row
contradicts another or the API.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from enum import StrEnum
from heapq import nsmallest
from itertools import groupby
from typing import Generic, TypeVar

from msgspec import Struct

from exporter.counters import HeldEvictions
from exporter.engine.diagnosis import State
from exporter.engine.drain import (
    DrainOutcome,
    count_outcomes,
    forecast_node,
    read_conditions,
    sum_outcomes,
)
from exporter.engine.evidence import Evidence
from exporter.engine.model import Instant, Policy, Reason, Resource, StuckPolicy
from exporter.engine.store import Store
from exporter.health import Health, Staleness
from exporter.server.answers import (
    count_held,
    describe_drain,
    describe_status,
    explain_vmi,
    list_evacuations,
)
from exporter.server.schemas import (
    BlockedVmi,
    CheckpointStatus,
    DrainAnswer,
    EvacuationAnswer,
    StatusAnswer,
    VmiAnswer,
)
from exporter.text import to_optional_datetime


T = TypeVar("T")

ROWS = 50
"""The most rows of a table."""
HINTS = 200
"""The most suggestions of a filter field."""
LONGEST_NAMESPACE, LONGEST_NODE, LONGEST_VM = 63, 253, 317

LOSSES = {
    Resource.VMIS: (
        "new VMs and migrations; after kube.deadAfter, what is known of that namespace no longer"
        " blocks, except for cooldowns"
    ),
    Resource.VMIMS: "pending migrations, failed attempts, and most states of an evacuation",
    Resource.PODS: (
        "the guard evacuations, diverged evacuations, and the states that depend on pods"
    ),
    Resource.KUBEVIRTS: "the state capacity",
    Resource.CONFIGMAPS: "the checkpoint: it is neither read nor written",
    Resource.LEASES: "the checkpoint: it is not written",
}
"""What does not work without a resource; the runbook has the same table."""


class Sort(StrEnum):
    """The sort order; TIME: stuck and longest evacuation first, or earliest release first."""

    TIME = "time"
    NAME = "name"
    NODE = "node"
    STATE = "state"


class PageFilter(Struct, frozen=True, kw_only=True):
    """The filter and sort order of the page's query. `ignored`: the invalid parameters, and why.

    `state` and `stuck` filter evacuations, `reason` filters held VMs; `vm`, a part of
    namespace/name, filters both, and finds all other VMs.
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
        """Whether it hides any row."""
        chosen = (self.vm, self.namespace, self.node, self.state, self.stuck, self.reason)
        return any(chosen)


class Rows(Struct, Generic[T], frozen=True, kw_only=True):
    """Rows shown, rows that match the filter, all rows."""

    shown: tuple[T, ...]
    matching: int
    total: int

    @property
    def more(self) -> int:
        """How many matching rows are not shown."""
        return self.matching - len(self.shown)


class WatchSummary(Struct, frozen=True, kw_only=True):
    """The watches of one resource, summed over all `places` (namespaces, or the cluster).

    `contact_at` is the oldest contact of a synced place. `trouble` is the present error, or "".
    """

    resource: Resource
    places: int
    synced: int
    refused: int
    objects: int
    contact_at: datetime | None
    trouble: str


class Loss(Struct, frozen=True, kw_only=True):
    """A resource that may not be read: `lost` is what does not work, `why` the error by place."""

    resource: Resource
    lost: str
    why: dict[str, str]


class PageStatus(Struct, frozen=True, kw_only=True):
    """The health of the exporter. `dies_at`: when it becomes DEAD without further contact.

    `checkpoint` is None without a checkpoint; `shared`: it is in ConfigMaps, not in a file.
    """

    version: str
    as_of: datetime
    ready: bool
    closing: bool
    staleness: Staleness
    observed_at: datetime | None
    dies_at: datetime | None
    waiting_for: tuple[str, ...]
    watching: tuple[WatchSummary, ...]
    losses: tuple[Loss, ...]
    checkpoint: CheckpointStatus | None
    shared: bool


class VmCounts(Struct, frozen=True, kw_only=True):
    """How many VMs there are, how many are held, by their first reason, and drain outcomes."""

    vmis: int
    held_by: dict[Reason, int]
    drain: dict[DrainOutcome, int]

    @property
    def held(self) -> int:
        """How many VMs may not be moved now."""
        return sum(self.held_by.values())

    @property
    def free(self) -> int:
        """How many VMs no rule holds; whether they can be moved is another question."""
        return self.vmis - self.held


class Node(VmCounts, frozen=True, kw_only=True):
    """A node with its VMs."""

    name: str


class Held(Struct, frozen=True, kw_only=True):
    """A VM that may not be moved now, with its entries in the blocked set."""

    entries: tuple[BlockedVmi, ...]
    vmi: VmiAnswer


class Vms(Struct, frozen=True, kw_only=True):
    """The tables of single VMs, and the namespaces to suggest in the filter.

    `found` are the VMs with the name that the filter asks for; None: it asks for none.
    """

    found: Rows[VmiAnswer] | None
    evacuations: Rows[VmiAnswer]
    held: Rows[Held]
    namespaces: tuple[str, ...]


class Cluster(VmCounts, frozen=True, kw_only=True):
    """The cluster in numbers; `vms` is None if the page may not name VMs.

    `drained` is the forecast of the node that the filter names, if it may name VMs.
    """

    evacuating: int
    stuck: int
    states: dict[State, int]
    nodes: Rows[Node]
    node_names: tuple[str, ...]
    drained: DrainAnswer | None
    vms: Vms | None


class PageModel(Struct, frozen=True, kw_only=True):
    """Everything the page shows; `cluster` is None until the exporter is ready."""

    status: PageStatus
    policy: Policy
    stuck: StuckPolicy
    filters: PageFilter
    cluster: Cluster | None


class HeldVms(Struct, frozen=True, kw_only=True):
    """The held VMs: counted by reason, and by node and reason; the `matching` rows of a filter.

    A VM's entries are together; `shown` has those of the first rows.
    """

    reasons: Counter[Reason]
    by_node: Counter[tuple[str, Reason]]
    namespaces: set[str]
    shown: tuple[tuple[BlockedVmi, ...], ...]
    matching: int
    total: int


class PageInputs(Struct, frozen=True, kw_only=True):
    """The inputs of the page model; `blocked` is the whole blocked set at that instant."""

    store: Store
    health: Health
    policy: Policy
    stuck: StuckPolicy
    blocked: list[BlockedVmi]
    held_evictions: HeldEvictions
    closing: bool = False


def summarize_held(blocked: list[BlockedVmi], filters: PageFilter) -> HeldVms:
    """Count, filter and sort the blocked set; 10,000 VMs take 30 ms."""
    # Sorted by VMI and checkpoint, so that a VMI's first entry has the reason of both checkpoints.
    held = [tuple(entries) for _, entries in groupby(blocked, key=_of_vmi)]
    matching = [entries for entries in held if _matches_held(filters, entries)]
    return HeldVms(
        reasons=count_held(blocked),
        by_node=Counter((entries[0].node, entries[0].reason) for entries in held),
        namespaces={entries[0].namespace for entries in held},
        shown=tuple(_first_held(matching, filters.sort)),
        matching=len(matching),
        total=len(held),
    )


def read_filter(query: Mapping[str, str]) -> PageFilter:
    """Read the filter from a URL's query; invalid parameters go to `ignored`."""
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
        node=name("node", LONGEST_NODE),
        state=State(state) if state else None,
        stuck=bool(choice("stuck", ("true",))),
        reason=Reason(reason) if reason else None,
        sort=Sort(choice("sort", Sort) or Sort.TIME),
        ignored=tuple(ignored),
    )


def build_page(
    inputs: PageInputs,
    filters: PageFilter,
    now: Instant,
    *,
    named: bool,
    held: HeldVms | None = None,
) -> PageModel:
    """Build the page model at `now`; it names single VMs only if `named`.

    `held`: what `summarize_held` returned for these inputs and filters, if it was called before.
    """
    held = held or summarize_held(inputs.blocked, filters)
    dead = inputs.health.find_dead(now)
    outcomes = count_outcomes(
        inputs.store,
        read_conditions(inputs.store, inputs.stuck, dead, now, inputs.health.find_contacts()),
    )
    status = describe_status(
        inputs.health,
        vmis=inputs.store.nodes.total(),
        drain=sum_outcomes(outcomes),
        held=held.reasons,
        now=now,
    )
    answers = status.ready and not inputs.closing
    return PageModel(
        status=_summarize_status(inputs, status, now, named=named),
        policy=inputs.policy,
        stuck=inputs.stuck,
        filters=filters,
        cluster=_summarize_cluster(inputs, filters, now, outcomes, held, named=named)
        if answers
        else None,
    )


def _summarize_status(
    inputs: PageInputs, status: StatusAnswer, now: Instant, *, named: bool
) -> PageStatus:
    """As GET /v1/status; unless `named`, by resource instead of by namespace."""
    resources = dict.fromkeys(one.resource for one in status.resources)
    unsettled = (one.resource for one in status.resources if not (one.synced or one.refused))
    return PageStatus(
        version=status.version,
        as_of=status.as_of,
        ready=status.ready,
        closing=inputs.closing,
        staleness=status.staleness,
        observed_at=status.observed_at,
        dies_at=to_optional_datetime(inputs.health.dies_at(now)),
        waiting_for=tuple(status.waiting_for if named else dict.fromkeys(unsettled)),
        watching=tuple(
            _summarize_watch(inputs.store, status, one, named=named) for one in resources
        ),
        losses=tuple(
            _describe_loss(status, one, named=named) for one in resources if _is_lost(status, one)
        ),
        checkpoint=status.checkpoint,
        shared=Resource.CONFIGMAPS in resources,
    )


def _summarize_watch(
    store: Store, status: StatusAnswer, resource: Resource, *, named: bool
) -> WatchSummary:
    watched = [one for one in status.resources if one.resource is resource]
    contacts = [one.contact_at for one in watched if one.synced and one.contact_at is not None]
    trouble = next((one.trouble for one in watched if one.trouble and not one.refused), "")
    return WatchSummary(
        resource=resource,
        places=len(watched),
        synced=sum(one.synced and not one.refused for one in watched),
        refused=sum(one.refused is not None for one in watched),
        objects=store.count(resource),
        contact_at=min(contacts, default=None),
        trouble=trouble if named or not trouble else "failing: see the log",
    )


def _describe_loss(status: StatusAnswer, resource: Resource, *, named: bool) -> Loss:
    why = {
        one.namespace or "in the cluster": one.refused
        for one in status.resources
        if one.resource is resource and one.refused is not None
    }
    return Loss(resource=resource, lost=LOSSES[resource], why=why if named else {})


def _is_lost(status: StatusAnswer, resource: Resource) -> bool:
    return any(one.refused for one in status.resources if one.resource is resource)


def _summarize_cluster(
    inputs: PageInputs,
    filters: PageFilter,
    now: Instant,
    outcomes: dict[str, Counter[DrainOutcome]],
    held: HeldVms,
    *,
    named: bool,
) -> Cluster:
    store = inputs.store
    evacuations = list_evacuations(
        store.evacuating(), inputs.stuck, store.load(), now, inputs.health, reasons=store.reasons
    ).evacuations
    states = Counter(one.state for one in evacuations)
    nodes = _list_nodes(store, held.by_node, outcomes)
    total = sum_outcomes(outcomes)
    drained = None
    if named and filters.node in outcomes:
        conditions = read_conditions(
            store, inputs.stuck, inputs.health.find_dead(now), now, inputs.health.find_contacts()
        )
        forecast, candidates = forecast_node(store, filters.node, conditions)
        drained = describe_drain(forecast, candidates, now, inputs.health)
    return Cluster(
        vmis=store.nodes.total(),
        held_by={reason: held.reasons[reason] for reason in Reason},
        drain={one: total[one] for one in DrainOutcome},
        evacuating=len(evacuations),
        stuck=sum(one.stuck for one in evacuations),
        states={state: states[state] for state in State if states[state]},
        nodes=_cut([node for node in nodes if filters.node in ("", node.name)], len(nodes)),
        node_names=tuple(sorted(node.name for node in nodes if node.name)[:HINTS]),
        drained=drained,
        vms=_list_vms(inputs, filters, now, evacuations, held) if named else None,
    )


def _list_nodes(
    store: Store,
    reasons: Counter[tuple[str, Reason]],
    outcomes: Mapping[str, Mapping[DrainOutcome, int]],
) -> list[Node]:
    """Every node that has VMs; most held VMs first."""
    nodes = [
        Node(
            name=name,
            vmis=vmis,
            held_by={r: reasons[name, r] for r in Reason},
            drain={one: outcomes.get(name, {}).get(one, 0) for one in DrainOutcome},
        )
        for name, vmis in store.nodes.items()
    ]
    return sorted(nodes, key=lambda node: (-node.held, node.name))


def _list_vms(
    inputs: PageInputs,
    filters: PageFilter,
    now: Instant,
    evacuations: list[EvacuationAnswer],
    held: HeldVms,
) -> Vms:
    def explained(one: EvacuationAnswer | BlockedVmi) -> Iterator[VmiAnswer]:
        evidence = inputs.store.evidence(one.namespace, one.name)
        if evidence is not None:
            yield _explain(inputs, evidence, now)

    moving = _sort_evacuations(
        [e for e in evacuations if _matches_evacuation(filters, e)], filters.sort
    )
    namespaces = {one.namespace for one in evacuations} | held.namespaces
    return Vms(
        found=_find_vms(inputs, filters, now) if filters.vm else None,
        evacuations=Rows(
            shown=tuple(vmi for one in moving[:ROWS] for vmi in explained(one)),
            matching=len(moving),
            total=len(evacuations),
        ),
        held=Rows(
            shown=tuple(
                Held(entries=one, vmi=vmi) for one in held.shown for vmi in explained(one[0])
            ),
            matching=held.matching,
            total=held.total,
        ),
        namespaces=tuple(sorted(namespaces)[:HINTS]),
    )


def _find_vms(inputs: PageInputs, filters: PageFilter, now: Instant) -> Rows[VmiAnswer]:
    known = inputs.store.keys()
    keys = [key for key in known if filters.vm in "/".join(key)]
    evidences = (inputs.store.evidence(*key) for key in nsmallest(ROWS, keys))
    shown = tuple(_explain(inputs, one, now) for one in evidences if one is not None)
    return Rows(shown=shown, matching=len(keys), total=len(inputs.store))


def _explain(inputs: PageInputs, evidence: Evidence, now: Instant) -> VmiAnswer:
    return explain_vmi(
        evidence,
        inputs.policy,
        inputs.stuck,
        load=inputs.store.load(),
        now=now,
        health=inputs.health,
        kubevirt=inputs.store.kubevirt,
        why=inputs.store.reasons(evidence.vmi),
        held_evictions=inputs.held_evictions.of(evidence.vmi.uid),
    )


def _matches_evacuation(filters: PageFilter, one: EvacuationAnswer) -> bool:
    return (
        filters.vm in f"{one.namespace}/{one.name}"
        and filters.namespace in ("", one.namespace)
        and filters.node in ("", one.node)
        and filters.state in (None, one.state)
        and (one.stuck or not filters.stuck)
    )


def _matches_held(filters: PageFilter, entries: tuple[BlockedVmi, ...]) -> bool:
    return (
        filters.vm in f"{entries[0].namespace}/{entries[0].name}"
        and filters.namespace in ("", entries[0].namespace)
        and filters.node in ("", entries[0].node)
        and (filters.reason is None or any(one.reason is filters.reason for one in entries))
    )


def _sort_evacuations(rows: list[EvacuationAnswer], sort: Sort) -> list[EvacuationAnswer]:
    """`rows` are the longest first, and stay so among equals."""
    match sort:
        case Sort.TIME:
            return sorted(rows, key=lambda one: not one.stuck)
        case Sort.NAME:
            return sorted(rows, key=_of_vmi)
        case Sort.NODE:
            return sorted(rows, key=lambda one: one.node)
        case Sort.STATE:
            return sorted(rows, key=lambda one: one.state)


def _first_held(rows: list[tuple[BlockedVmi, ...]], sort: Sort) -> Iterable[tuple[BlockedVmi, ...]]:
    """The first `ROWS` of `rows`, which are sorted by NAME.

    Sorting all of them would hold the interpreter's lock for 50 ms with 10,000 VMs.
    """
    match sort:
        case Sort.TIME:
            return nsmallest(ROWS, rows, key=_release)
        case Sort.NAME:
            return rows[:ROWS]
        case Sort.NODE:
            return nsmallest(ROWS, rows, key=lambda one: (one[0].node, _release(one)))
        case Sort.STATE:
            return nsmallest(ROWS, rows, key=lambda one: (one[0].reason, _release(one)))


def _release(entries: tuple[BlockedVmi, ...]) -> tuple[bool | datetime, ...]:
    """The sort key of the release time; VMs without a known release come last."""
    known = sorted(one.not_before for one in entries if one.not_before is not None)
    return len(known) < len(entries), *known[-1:]


def _of_vmi(one: BlockedVmi | EvacuationAnswer) -> tuple[str, str]:
    return one.namespace, one.name


def _cut(rows: list[T], total: int) -> Rows[T]:
    return Rows(shown=tuple(rows[:ROWS]), matching=len(rows), total=total)
