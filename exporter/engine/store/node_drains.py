"""Follows the drain of each node: which VMs are asked to leave it, and when other VMs left it.

A drain begins with the first evacuation from a node. It goes on while a VM is evacuating from the
node, and for `PAUSE` after that, because an evictor may evict one VM after the other. VMs that left
before the exporter started are not known.
"""

from collections import deque
from collections.abc import Iterable
from itertools import pairwise
from statistics import median

from msgspec import Struct, field

from exporter.engine.facts.model import Instant, Seconds


PAUSE: Seconds = 600.0
"""A drain is over after this long without an evacuation from the node."""
FEWEST_DEPARTURES = 3
"""A pace is computed only from at least this many departures."""
NODES_KEPT = 10_000
DEPARTURES_KEPT = 1_000
"""The pace uses at most this many departures, because a descheduler's evictions may never end."""


class NodeDrain(Struct, kw_only=True):
    """The drain of one node: when VMs left it, and how many are asked to leave it now.

    `began` is the earliest request of the VMs that have left, `left` is their number, and
    `departures` has the newest instants at which VMs left. `idle_since` is the instant since which
    no VM of the node is evacuating.
    """

    began: Instant | None = None
    left: int = 0
    departures: deque[Instant] = field(default_factory=lambda: deque(maxlen=DEPARTURES_KEPT))
    evacuating: set[str] = field(default_factory=set)
    idle_since: Instant | None = None

    def departed(self) -> "Departed":
        """Summarize the VMs that have left."""
        ends, pace = sorted(self.departures), None
        if len(ends) >= FEWEST_DEPARTURES:
            pace = median(later - earlier for earlier, later in pairwise(ends))
        return Departed(
            count=self.left,
            began=self.began,
            last_at=ends[-1] if ends else None,
            seconds_per_vmi=pace,
        )


class Departed(Struct, frozen=True, kw_only=True):
    """The VMs that have left a node: how many, the earliest request, and when the last one left.

    `seconds_per_vmi` is the median interval between departures; None below `FEWEST_DEPARTURES`.
    """

    count: int
    began: Instant | None
    last_at: Instant | None
    seconds_per_vmi: Seconds | None


class NodeDrains:
    """The present drains by node."""

    def __init__(self) -> None:
        self._drains: dict[str, NodeDrain] = {}

    def read(self) -> dict[str, Departed]:
        """For each node from which VMs are evacuating, the VMs that have already left it."""
        return {node: one.departed() for node, one in self._drains.items() if one.evacuating}

    def ask(self, node: str, vmi_uid: str, now: Instant) -> None:
        """Note that a VMI is asked to leave a node."""
        drain = self._drains.get(node)
        if drain is None or (drain.idle_since is not None and now - drain.idle_since > PAUSE):
            if len(self._drains) >= NODES_KEPT:
                self._drains = {n: one for n, one in self._drains.items() if one.evacuating}
            drain = self._drains[node] = NodeDrain()
        drain.evacuating.add(vmi_uid)
        drain.idle_since = None

    def leave(self, node: str, vmi_uid: str, requested_at: Instant, at: Instant) -> None:
        """Note that a VMI left the node that it was asked to leave, at the instant `at`."""
        drain = self._drains.get(node)
        if drain is not None and vmi_uid in drain.evacuating:
            drain.left += 1
            drain.departures.append(at)
            drain.began = requested_at if drain.began is None else min(drain.began, requested_at)
            self.cancel(node, vmi_uid, at)

    def cancel(self, node: str, vmi_uid: str, now: Instant) -> None:
        """Note that a VMI is no longer asked to leave a node."""
        drain = self._drains.get(node)
        if drain is None or vmi_uid not in drain.evacuating:
            return
        drain.evacuating.discard(vmi_uid)
        if not drain.evacuating:
            drain.idle_since = now


class DrainProgress(Struct, frozen=True, kw_only=True):
    """How far the drain of a node has come.

    `asked` are the VMs that have left and those that remain. `failing` and `external` are parts of
    `remaining`. `estimate` is None without a pace, or if a VM cannot leave by itself. `stuck`: a VM
    of a drained node is stuck, and no VM has left for as long as an evacuation may take.
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

    @property
    def asked(self) -> int:
        """How many VMs were asked to leave."""
        return self.left + self.remaining


def measure_progress(
    departed: Departed,
    requests: Iterable[Instant],
    *,
    failing: int,
    external: int,
    now: Instant,
    stuck_after: Seconds | None,
) -> DrainProgress:
    """The progress of a drain. `requests`: when each VM that remains was asked to leave.

    The drain is stuck if no VM has left within `stuck_after`. None means that it is never stuck.
    """
    asked = [*requests]
    began = [*asked, *(() if departed.began is None else (departed.began,))]
    pace, last = departed.seconds_per_vmi, departed.last_at
    estimate = None
    if pace is not None and last is not None and not failing and not external:
        estimate = max(0.0, last + pace * len(asked) - now)
    since = min(began, default=now)
    idle = now - (since if last is None else max(since, last))
    return DrainProgress(
        since=since,
        left=departed.count,
        remaining=len(asked),
        failing=failing,
        external=external,
        last_left_at=last,
        seconds_per_vmi=pace,
        estimate=estimate,
        stuck=stuck_after is not None and idle >= stuck_after,
    )
