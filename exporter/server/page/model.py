"""Everything that the page says at one instant, put together by the API's own functions. Pure.

One look at the store and one `now`: what stands in one row cannot contradict another, nor what
the API answers at that instant.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from enum import StrEnum
from itertools import groupby
from typing import Generic, TypeVar

from msgspec import Struct

from exporter.counters import HeldEvictions
from exporter.engine.diagnosis import State
from exporter.engine.evidence import Evidence
from exporter.engine.model import Instant, Policy, Reason, Resource, StuckPolicy
from exporter.engine.store import Store
from exporter.health import Health, Staleness
from exporter.server.answers import describe_status, explain_vmi, list_evacuations
from exporter.server.schemas import (
    BlockedVmi,
    CheckpointStatus,
    EvacuationAnswer,
    StatusAnswer,
    VmiAnswer,
)


T = TypeVar("T")

ROWS = 50
"""How many rows a table has at most: what a person reads, and what rendering may cost."""
HINTS = 200
"""How many names a filter's field suggests."""
LONGEST_NAMESPACE, LONGEST_NODE = 63, 253

LOSSES = {
    Resource.VMIS: (
        "new VMs and migrations: what was known of that namespace blocks no more after"
        " kube.deadAfter, but for cooldowns"
    ),
    Resource.VMIMS: "pending migrations, failed attempts, and most states of an evacuation",
    Resource.PODS: "the guard evacuations, diverged evacuations, the states that rest on pods",
    Resource.KUBEVIRTS: "the state capacity",
    Resource.CONFIGMAPS: "the checkpoint: it is neither read nor written",
    Resource.LEASES: "the checkpoint: it is not written",
}
"""What is lost where a resource may not be seen; the runbook has the same table."""


class Sort(StrEnum):
    """By what the rows are sorted; TIME: the longest evacuation, the soonest release first."""

    TIME = "time"
    NAME = "name"
    NODE = "node"
    STATE = "state"


class Wish(Struct, frozen=True, kw_only=True):
    """What a reader wants to see. `ignored` says what of the query made no sense, and why.

    `state` and `stuck` are about evacuations, `reason` about VMs that are held.
    """

    namespace: str = ""
    node: str = ""
    state: State | None = None
    stuck: bool = False
    reason: Reason | None = None
    sort: Sort = Sort.TIME
    ignored: tuple[str, ...] = ()

    @property
    def narrows(self) -> bool:
        """Whether it leaves anything out."""
        return bool(self.namespace or self.node or self.state or self.stuck or self.reason)


class Rows(Struct, Generic[T], frozen=True, kw_only=True):
    """The rows of a table: those `shown`, of so many `matching` the wish, of a `total`."""

    shown: tuple[T, ...]
    matching: int
    total: int

    @property
    def more(self) -> int:
        """How many match and are not shown."""
        return self.matching - len(self.shown)


class Watching(Struct, frozen=True, kw_only=True):
    """How watching one resource goes, over all the `places` (namespaces, or the cluster) watched.

    `contact_at` is the oldest of the synced places'. `trouble` is "" where there is none now.
    """

    resource: Resource
    places: int
    synced: int
    refused: int
    objects: int
    contact_at: str | None
    trouble: str


class Loss(Struct, frozen=True, kw_only=True):
    """A resource that may not be seen: what is `lost` by that, and `why`, by place."""

    resource: Resource
    lost: str
    why: dict[str, str]


class Trust(Struct, frozen=True, kw_only=True):
    """How far what is told can be trusted. `dies_at`: when it is DEAD if nothing is heard.

    `checkpoint` is None where none is kept; `shared`: it is kept in ConfigMaps, and not in a file.
    """

    version: str
    as_of: str
    ready: bool
    closing: bool
    staleness: Staleness
    observed_at: str | None
    dies_at: Instant | None
    waiting_for: tuple[str, ...]
    watching: tuple[Watching, ...]
    losses: tuple[Loss, ...]
    checkpoint: CheckpointStatus | None
    shared: bool


class Tally(Struct, frozen=True, kw_only=True):
    """How many VMs there are, and how many of them are held, each by its first reason."""

    vmis: int
    held_by: dict[Reason, int]

    @property
    def held(self) -> int:
        """How many VMs may not be moved now."""
        return sum(self.held_by.values())

    @property
    def movable(self) -> int:
        """How many VMs may be moved now."""
        return self.vmis - self.held


class Node(Tally, frozen=True, kw_only=True):
    """A node with its VMs."""

    name: str


class Held(Struct, frozen=True, kw_only=True):
    """A VM that may not be moved now: its entries in the blocked set, and all that is known."""

    entries: tuple[BlockedVmi, ...]
    vmi: VmiAnswer


class Vms(Struct, frozen=True, kw_only=True):
    """What is told of single VMs, and the namespaces that a filter may suggest."""

    evacuations: Rows[VmiAnswer]
    held: Rows[Held]
    namespaces: tuple[str, ...]


class Cluster(Tally, frozen=True, kw_only=True):
    """What is told of the cluster; `vms` is None where single VMs are not to be told."""

    evacuating: int
    stuck: int
    states: dict[State, int]
    nodes: Rows[Node]
    node_names: tuple[str, ...]
    vms: Vms | None


class Board(Struct, frozen=True, kw_only=True):
    """Everything that the page says at `now`; `cluster` is None until verdicts are answered."""

    now: Instant
    trust: Trust
    policy: Policy
    stuck: StuckPolicy
    wish: Wish
    cluster: Cluster | None


class Scene(Struct, frozen=True, kw_only=True):
    """What a board is put together from; `blocked` is the whole blocked set at the instant."""

    store: Store
    health: Health
    policy: Policy
    stuck: StuckPolicy
    blocked: list[BlockedVmi]
    held_evictions: HeldEvictions
    closing: bool = False


def read_wish(query: Mapping[str, str]) -> Wish:
    """What the query of a URL asks for; what makes no sense in it is named and left out."""
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
    return Wish(
        namespace=name("namespace", LONGEST_NAMESPACE),
        node=name("node", LONGEST_NODE),
        state=State(state) if state else None,
        stuck=bool(choice("stuck", ("true",))),
        reason=Reason(reason) if reason else None,
        sort=Sort(choice("sort", Sort) or Sort.TIME),
        ignored=tuple(ignored),
    )


def read_instant(text: str) -> Instant:
    """The instant that the API's types hold as text."""
    return datetime.fromisoformat(text).timestamp()


def set_up(scene: Scene, wish: Wish, now: Instant, *, named: bool) -> Board:
    """The board at `now`; with `named` it tells of single VMs, else of their numbers only."""
    status = describe_status(
        scene.health, vmis=scene.store.nodes.total(), blocked=scene.blocked, now=now
    )
    answers = status.ready and not scene.closing
    return Board(
        now=now,
        trust=_judge(scene, status, now, named=named),
        policy=scene.policy,
        stuck=scene.stuck,
        wish=wish,
        cluster=_survey(scene, wish, now, named=named) if answers else None,
    )


def _judge(scene: Scene, status: StatusAnswer, now: Instant, *, named: bool) -> Trust:
    """What GET /v1/status says; without names it is told by resource and not by namespace."""
    resources = dict.fromkeys(one.resource for one in status.resources)
    unsettled = (one.resource for one in status.resources if not (one.synced or one.refused))
    return Trust(
        version=status.version,
        as_of=status.as_of,
        ready=status.ready,
        closing=scene.closing,
        staleness=status.staleness,
        observed_at=status.observed_at,
        dies_at=scene.health.dies_at(now),
        waiting_for=tuple(status.waiting_for if named else dict.fromkeys(unsettled)),
        watching=tuple(_watch(scene.store, status, one, named=named) for one in resources),
        losses=tuple(_lose(status, one, named=named) for one in resources if _is_lost(status, one)),
        checkpoint=status.checkpoint,
        shared=Resource.CONFIGMAPS in resources,
    )


def _watch(store: Store, status: StatusAnswer, resource: Resource, *, named: bool) -> Watching:
    watched = [one for one in status.resources if one.resource is resource]
    contacts = [one.contact_at for one in watched if one.synced and one.contact_at is not None]
    trouble = next((one.trouble for one in watched if one.trouble and not one.refused), "")
    return Watching(
        resource=resource,
        places=len(watched),
        synced=sum(one.synced and not one.refused for one in watched),
        refused=sum(one.refused is not None for one in watched),
        objects=store.count(resource),
        contact_at=min(contacts, key=read_instant, default=None),
        trouble=trouble if named or not trouble else "in trouble: the log says which",
    )


def _lose(status: StatusAnswer, resource: Resource, *, named: bool) -> Loss:
    why = {
        one.namespace or "in the cluster": one.refused
        for one in status.resources
        if one.resource is resource and one.refused is not None
    }
    return Loss(resource=resource, lost=LOSSES[resource], why=why if named else {})


def _is_lost(status: StatusAnswer, resource: Resource) -> bool:
    return any(one.refused for one in status.resources if one.resource is resource)


def _survey(scene: Scene, wish: Wish, now: Instant, *, named: bool) -> Cluster:
    store = scene.store
    evacuations = list_evacuations(
        store.evacuating(), scene.stuck, store.load(), now, scene.health
    ).evacuations
    # The set is sorted by VMI and checkpoint: the first entry has the reason of both asked at once.
    held = [tuple(entries) for _, entries in groupby(scene.blocked, key=_of_vmi)]
    reasons = Counter(entries[0].reason for entries in held)
    states = Counter(one.state for one in evacuations)
    nodes = _list_nodes(store, held)
    return Cluster(
        vmis=store.nodes.total(),
        held_by={reason: reasons[reason] for reason in Reason},
        evacuating=len(evacuations),
        stuck=sum(one.stuck for one in evacuations),
        states={state: states[state] for state in State if states[state]},
        nodes=_cut([node for node in nodes if wish.node in ("", node.name)], len(nodes)),
        node_names=tuple(sorted(node.name for node in nodes if node.name)[:HINTS]),
        vms=_tell_vms(scene, wish, now, evacuations, held) if named else None,
    )


def _list_nodes(store: Store, held: list[tuple[BlockedVmi, ...]]) -> list[Node]:
    """Every node that has VMs, those with the most VMs held first."""
    reasons = Counter((entries[0].node, entries[0].reason) for entries in held)
    nodes = [
        Node(name=name, vmis=vmis, held_by={r: reasons[name, r] for r in Reason})
        for name, vmis in store.nodes.items()
    ]
    return sorted(nodes, key=lambda node: (-node.held, node.name))


def _tell_vms(
    scene: Scene,
    wish: Wish,
    now: Instant,
    evacuations: list[EvacuationAnswer],
    held: list[tuple[BlockedVmi, ...]],
) -> Vms:
    def explained(one: EvacuationAnswer | BlockedVmi) -> Iterator[VmiAnswer]:
        evidence = scene.store.evidence(one.namespace, one.name)
        if evidence is not None:
            yield _explain(scene, evidence, now)

    moving = _sort_evacuations([e for e in evacuations if _wants_evacuation(wish, e)], wish.sort)
    resting = _sort_held([entries for entries in held if _wants_held(wish, entries)], wish.sort)
    namespaces = {one.namespace for one in evacuations} | {one[0].namespace for one in held}
    return Vms(
        evacuations=Rows(
            shown=tuple(vmi for one in moving[:ROWS] for vmi in explained(one)),
            matching=len(moving),
            total=len(evacuations),
        ),
        held=Rows(
            shown=tuple(
                Held(entries=one, vmi=vmi) for one in resting[:ROWS] for vmi in explained(one[0])
            ),
            matching=len(resting),
            total=len(held),
        ),
        namespaces=tuple(sorted(namespaces)[:HINTS]),
    )


def _explain(scene: Scene, evidence: Evidence, now: Instant) -> VmiAnswer:
    return explain_vmi(
        evidence,
        scene.policy,
        scene.stuck,
        load=scene.store.load(),
        now=now,
        health=scene.health,
        held_evictions=scene.held_evictions.of(evidence.vmi.uid),
    )


def _wants_evacuation(wish: Wish, one: EvacuationAnswer) -> bool:
    return (
        wish.namespace in ("", one.namespace)
        and wish.node in ("", one.node)
        and wish.state in (None, one.state)
        and (one.stuck or not wish.stuck)
    )


def _wants_held(wish: Wish, entries: tuple[BlockedVmi, ...]) -> bool:
    return (
        wish.namespace in ("", entries[0].namespace)
        and wish.node in ("", entries[0].node)
        and (wish.reason is None or any(one.reason is wish.reason for one in entries))
    )


def _sort_evacuations(rows: list[EvacuationAnswer], sort: Sort) -> list[EvacuationAnswer]:
    """They come sorted by TIME, and a sort by another thing keeps that among its equals."""
    match sort:
        case Sort.TIME:
            return rows
        case Sort.NAME:
            return sorted(rows, key=_of_vmi)
        case Sort.NODE:
            return sorted(rows, key=lambda one: one.node)
        case Sort.STATE:
            return sorted(rows, key=lambda one: one.state)


def _sort_held(rows: list[tuple[BlockedVmi, ...]], sort: Sort) -> list[tuple[BlockedVmi, ...]]:
    """They come sorted by NAME."""
    by_release = sorted(rows, key=_release)
    match sort:
        case Sort.TIME:
            return by_release
        case Sort.NAME:
            return rows
        case Sort.NODE:
            return sorted(by_release, key=lambda entries: entries[0].node)
        case Sort.STATE:
            return sorted(by_release, key=lambda entries: entries[0].reason)


def _release(entries: tuple[BlockedVmi, ...]) -> tuple[bool, Instant]:
    """When the VM is released; what waits for news and not for the clock comes last."""
    releases = [one.not_before for one in entries]
    known = [read_instant(release) for release in releases if release is not None]
    return len(known) < len(releases), max(known, default=0.0)


def _of_vmi(one: BlockedVmi | EvacuationAnswer) -> tuple[str, str]:
    return one.namespace, one.name


def _cut(rows: list[T], total: int) -> Rows[T]:
    return Rows(shown=tuple(rows[:ROWS]), matching=len(rows), total=total)
