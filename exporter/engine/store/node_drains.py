"""Follows the drain of each node: since when it is drained, and which VMIs have left it since then.

A drain begins when the node is closed: cordoned, or tainted with KubeVirt's drain taint. What was
evacuated before belongs to it from then on. On an open node a drain begins with the first
evacuation that is known not to be the descheduler's, because rebalancing is no drain. `find_part`
says which drain an evacuation belongs to. From a closed node every VMI that leaves counts, whoever
moved or stopped it; from an open node only those that were asked to leave. A VMI counts once,
however often it comes back.

The drain of a closed node ends when no VMI is on the node, or when the node is open again. Another
drain ends when no VMI is asked to leave any more. VMIs that left before the exporter started are
not known.
"""

from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from enum import Enum, StrEnum, auto
from itertools import pairwise
from statistics import median

from msgspec import Struct, field

from exporter.engine.facts.evidence import Marker, RequestedThrough
from exporter.engine.facts.mappings import put_newest
from exporter.engine.facts.model import Instant, NodeMobility, Requester, Seconds, Vmi
from exporter.engine.store.nodes import NodeIndex
from exporter.engine.store.requesters import Source


FEWEST_DEPARTURES = 3
"""A pace is computed only from at least this many departures."""
LEFT_KEPT = 10_000
"""For how many VMIs of a drain the departure is kept."""


class DrainEnd(StrEnum):
    """How a drain ended; these are the values in metrics."""

    SUCCEEDED = "succeeded"
    CANCELLED = "cancelled"
    NODE_DELETED = "node_deleted"


class DrainPart(Enum):
    """Which drain of its node an evacuation belongs to."""

    OF_CLOSED = auto()
    """The drain of a node that is cordoned or tainted."""
    OF_OPEN = auto()
    """A drain of an open node, which consists of such evacuations alone."""
    NONE = auto()
    """None: the descheduler asked for it, or perhaps did, or the VMI has left the node."""
    LEFT_OVER = auto()
    """None any more: its drain is over, because the node is open again."""

    @property
    def is_drained(self) -> bool:
        """Whether the evacuation belongs to a drain."""
        return self in (DrainPart.OF_CLOSED, DrainPart.OF_OPEN)


def find_part(
    vmi: Vmi,
    marker: Marker,
    source: Source,
    nodes: NodeIndex | None,
    taint: str,
    *,
    is_withdrawn: bool,
) -> DrainPart:
    """Which drain an evacuation belongs to; `nodes` is None if nodes cannot be read.

    `taint` is the key of the drain taint. If an eviction is older than our first list of nodes, it
    is unknown whether its node was cordoned then. From an open node it is left over if it is known
    not to be the descheduler's, or if the node has the taint: whoever drains by evictions cordons
    the node first. `is_withdrawn`: whoever asked for it by EvictionRequests has withdrawn.
    """
    if vmi.node != marker.node:
        return DrainPart.NONE
    is_closed = nodes is not None and nodes.is_closed(marker.node, taint)
    if is_withdrawn and nodes is not None and not is_closed:
        return DrainPart.LEFT_OVER
    if nodes is not None and source is not Source.DESCHEDULER:
        is_tainted = nodes.find_taint(marker.node, taint) is not None
        is_older = nodes.known_since is not None and marker.requested_at <= nodes.known_since
        if marker.was_drained and not is_closed:
            return DrainPart.LEFT_OVER
        if (
            is_older
            and marker.through is RequestedThrough.EVICTION
            and not nodes.is_cordoned(marker.node)
            and (source is Source.OTHER or is_tainted)
        ):
            return DrainPart.LEFT_OVER
    if is_closed:
        return DrainPart.OF_CLOSED
    return DrainPart.OF_OPEN if source is Source.OTHER else DrainPart.NONE


class NodeDrain(Struct, kw_only=True):
    """The drain of one node.

    `since` is when it began; None if no VMI is to leave the node. `asked` are the VMIs that are
    evacuating, `left` are those that have left, and when. `counts`: a VMI was evacuating, so its
    end counts as that of a drain, and not only as that of a cordon.
    """

    closed: bool = False
    since: Instant | None = None
    asked: set[str] = field(default_factory=set)
    left: dict[str, Instant] = field(default_factory=dict)
    counts: bool = False


class Departed(Struct, frozen=True, kw_only=True):
    """The VMIs that have left a node, and when; the other fields are those of `NodeDrain`."""

    closed: bool
    since: Instant
    left: Mapping[str, Instant]


class NodeDrains:
    """The present drains by node.

    `mobilities` are those of `VmiIndex`. `record_end` is called with the end of each drain and how
    long the drain took.
    """

    def __init__(self, mobilities: Mapping[NodeMobility, int]) -> None:
        self._mobilities = mobilities
        self._drains: dict[str, NodeDrain] = {}
        self.record_end: Callable[[DrainEnd, Seconds], None] = lambda *_: None

    def read(self) -> dict[str, Departed]:
        """For each node that is drained, the VMIs that have left it."""
        return {
            node: Departed(closed=drain.closed, since=drain.since, left=drain.left.copy())
            for node, drain in self._drains.items()
            if drain.since is not None
        }

    def begin_drain(self, node: str, since: Instant) -> None:
        """Begin the drain of a node that is cordoned or tainted since `since`."""
        drain = self._drains.get(node)
        if drain is None or not drain.closed:
            self._drains[node] = NodeDrain(closed=True, since=since)

    def end_drain(self, node: str, now: Instant, end: DrainEnd = DrainEnd.CANCELLED) -> None:
        """End the drain of a node that is neither cordoned nor tainted any more."""
        drain = self._drains.get(node)
        if drain is not None and drain.closed:
            self._end(self._drains.pop(node), end, now)

    def record_arrival(self, node: str, at: Instant) -> None:
        """Begin a drain if the node that a VMI has come to is closed and was empty."""
        drain = self._drains.get(node)
        if drain is not None and drain.since is None:
            drain.since = at

    def record_evacuation(
        self, node: str, vmi_uid: str, requested_at: Instant, *, is_drained: bool
    ) -> None:
        """Count a VMI that is asked to leave its node, and begin the drain of an open node.

        `is_drained`: whether the evacuation belongs to a drain.
        """
        if not is_drained:
            self._forget(node, vmi_uid)
            return
        drain = self._drains.get(node)
        if drain is None:
            drain = self._drains[node] = NodeDrain()
        drain.asked.add(vmi_uid)
        drain.counts = True
        if drain.since is None or (not drain.closed and requested_at < drain.since):
            drain.since = requested_at

    def record_departure(self, node: str, vmi_uid: str, at: Instant) -> None:
        """Count a VMI that has left a node, at the instant `at`."""
        drain = self._drains.get(node)
        if drain is None or not (drain.closed or vmi_uid in drain.asked):
            return
        put_newest(drain.left, vmi_uid, at, most=LEFT_KEPT)
        drain.asked.discard(vmi_uid)
        if not drain.closed:
            if not drain.asked:
                self._end(self._drains.pop(node), DrainEnd.SUCCEEDED, at)
        elif all(place != node for place, _ in self._mobilities):
            self._end(drain, DrainEnd.SUCCEEDED, at)
            self._drains[node] = NodeDrain(closed=True)

    def record_cancel(self, node: str, vmi_uid: str, now: Instant) -> None:
        """Take out a VMI that is on the node, and is not asked to leave it any more."""
        over = self._forget(node, vmi_uid)
        if over is not None:
            self._end(over, DrainEnd.CANCELLED, now)

    def _forget(self, node: str, vmi_uid: str) -> NodeDrain | None:
        """Forget that a VMI is asked to leave; returns the drain of an open node if it was all."""
        drain = self._drains.get(node)
        if drain is None:
            return None
        drain.asked.discard(vmi_uid)
        return None if drain.asked or drain.closed else self._drains.pop(node)

    def _end(self, drain: NodeDrain, end: DrainEnd, at: Instant) -> None:
        if drain.counts and drain.since is not None:
            self.record_end(end, max(0.0, at - drain.since))


class DrainProgress(Struct, frozen=True, kw_only=True):
    """How far the drain of a node has come, in VMIs.

    `asked` are those that have left and those that remain. `failing` and `external` are parts of
    `remaining`. `estimate` is None without a pace, or if a VMI cannot leave by itself.
    `requested_by`: who asks by EvictionRequests, since the oldest of them.
    """

    since: Instant
    left: int
    remaining: int
    failing: int
    external: int
    last_left_at: Instant | None
    seconds_per_vmi: Seconds | None
    estimate: Seconds | None
    stuck: bool
    requested_by: Requester | None = None

    @property
    def asked(self) -> int:
        """How many VMIs were asked to leave."""
        return self.left + self.remaining


STUCK_IN_ANY_STATE = 4
"""A drain is stuck after this many times `stuck.after` without a departure, whatever the states."""


def measure_progress(
    departed: Departed,
    remaining: int,
    *,
    evacuating: AbstractSet[str],
    failing: int,
    external: int,
    needs_person: bool,
    stuck_after: Seconds,
    now: Instant,
    moved_at: Instant | None = None,
    watched_since: Instant | None = None,
    requested_by: Requester | None = None,
) -> DrainProgress:
    """The progress of a drain with `remaining` VMIs.

    `evacuating` are the UIDs of those that are asked to leave: a VMI that has come back is one of
    them, and has not left. `needs_person`: the state of a VMI that remains needs a person. Then the
    drain is stuck if no VMI has left within `stuck_after`. `moved_at`: when the newest successful
    migration out of the node ended, which this process may not have seen. `watched_since`: since
    when it sees nodes; earlier departures may be unknown.
    """
    ends = sorted(departed.left.values())
    known = (*ends, moved_at)
    last = max((at for at in known if at is not None and at >= departed.since), default=None)
    pace = estimate = None
    if len(ends) >= FEWEST_DEPARTURES:
        pace = median(later - earlier for earlier, later in pairwise(ends))
    if pace is not None and last is not None and not failing and not external:
        estimate = max(0.0, last + pace * remaining - now)
    idle = now - max(last or departed.since, watched_since or departed.since)
    return DrainProgress(
        since=departed.since,
        left=len(departed.left.keys() - evacuating),
        remaining=remaining,
        failing=failing,
        external=external,
        last_left_at=last,
        seconds_per_vmi=pace,
        estimate=estimate,
        stuck=idle >= (stuck_after if needs_person else STUCK_IN_ANY_STATE * stuck_after),
        requested_by=requested_by,
    )
