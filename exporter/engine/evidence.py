"""What is known of one VMI, put together for the engine: its facts, its history, its marker."""

from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from exporter.engine.history import History, Migration
from exporter.engine.model import CLOCK_SKEW, Instant, Pod, Vmi, Vmim


FAILURES_KEPT = 64
"""How many failed attempts of an evacuation are known by their UID; older ones are a number."""


class Marker(Struct, kw_only=True):
    """An evacuation as we saw it: `status.evacuationNodeName`, since when, and what failed since.

    `requested_at` never moves later for the same VMI and node, but where a success turns out to
    lie between it and `seen_at`, the first sight. `not_before` is the last instant
    at which the field was seen empty or different: no attempt from before it is this one's.
    `failed` are the failed evacuation VMIMs by UID with their ends, `forgotten` is how many more
    there were. `lacking_since`: the launcher pod is known to lack the descheduler's annotation.
    """

    node: str
    requested_at: Instant
    seen_at: Instant = 0.0
    not_before: Instant | None = None
    failed: dict[str, Instant] = field(default_factory=dict)
    forgotten: int = 0
    lacking_since: Instant | None = None

    def note_request(self, instant: Instant) -> bool:
        """The evacuation was requested then, or earlier; True where that was news."""
        if instant >= self.requested_at:
            return False
        self.requested_at = instant
        return True

    def note_success(self, end: Instant) -> bool:
        """A migration succeeded then: what we took for a request before it was an older one's.

        True where the request is to be found anew, from the first sight on.
        """
        if end < self.requested_at or end >= self.seen_at:
            return False
        self.requested_at = self.seen_at
        return True

    def note_failure(self, uid: str, end: Instant) -> bool:
        """An attempt failed; True where that was news. Repetition changes nothing."""
        if uid in self.failed or not self._is_ours(end):
            return False
        if len(self.failed) >= FAILURES_KEPT:
            oldest = min(self.failed, key=self.failed.__getitem__)
            if end < self.failed[oldest]:
                return False
            self.forgotten += self.failed.pop(oldest) >= self.requested_at
        self.failed[uid] = end
        return True

    def join(self, other: "Marker") -> bool:
        """Take in what another watcher, or we in an earlier life, saw of the same evacuation.

        The request and the first sight are the earliest, the failures the union, both only of
        what is later than the last sight without a marker: where one of both had that sight, the
        other may have taken an older evacuation's attempts for this one's. The failures' number
        is what one counted and those of the other that it cannot have counted: the greater of the
        two ways. True where that was news.
        """
        before = (self.requested_at, self.seen_at, dict(self.failed), self.forgotten)
        self.seen_at = min(self.seen_at, other.seen_at)
        bounds = [b for b in (self.not_before, other.not_before) if b is not None]
        self.not_before = max((b for b in bounds if b <= self.seen_at), default=None)
        self.requested_at = min(
            (r for r in (self.requested_at, other.requested_at) if self._is_ours(r)),
            default=self.seen_at,
        )
        counted = max(
            _count_both(self, other, self.requested_at), _count_both(other, self, self.requested_at)
        )
        union = sorted((self.failed | other.failed).items(), key=_by_end)
        self.failed = {uid: end for uid, end in union[-FAILURES_KEPT:] if self._is_ours(end)}
        self.forgotten = counted - self._count_kept()
        return before != (self.requested_at, self.seen_at, self.failed, self.forgotten)

    def _is_ours(self, instant: Instant) -> bool:
        """Whether what happened then belongs to this evacuation."""
        return self.not_before is None or instant > self.not_before

    def is_over(self, vmi: Vmi, newest_success: Instant | None) -> bool:
        """Whether what the VMI says now cannot be this evacuation any more, but is a later one.

        It moved away since and is on that node again, or KubeVirt has set the condition
        EvictionRequested anew.
        """
        if vmi.evacuation_node != self.node:
            return True
        has_moved = newest_success is not None and newest_success >= self.seen_at
        if has_moved and vmi.node == self.node:
            return True
        requested = vmi.eviction_requested_at
        return requested is not None and requested > self.seen_at + CLOCK_SKEW

    def failed_since_request(self) -> int:
        """How many distinct attempts have failed since the request: a lower bound."""
        return self.forgotten + self._count_kept()

    def _count_kept(self) -> int:
        return sum(end >= self.requested_at for end in self.failed.values())


class Remembered(Struct, frozen=True, kw_only=True):
    """What is to outlive us of one VMI: its migrations by key (as in `History`), its marker."""

    uid: str
    namespace: str
    migrations: dict[str, Migration] = {}
    marker: Marker | None = None


class Evidence(Struct, frozen=True, kw_only=True, gc=False):
    """What is known of one VMI.

    `vmims` are the VMIMs that exist and belong to it; `vmims_seen` is false where VMIMs may not
    be watched. `launcher` is the current launcher pod, or None where there is none to be seen.
    `marker` is there while it evacuates, and then `pods` are all its launcher pods. `kept` is
    what `cooldown` has worked out of it.
    """

    vmi: Vmi
    history: History
    vmims: tuple[Vmim, ...] = ()
    vmims_seen: bool = True
    launcher: Pod | None = None
    marker: Marker | None = None
    pods: tuple[Pod, ...] = ()
    pods_seen: bool = True
    kept: Any = None

    def still(self) -> "Evidence":
        """The same for a diagnosis that is made later: its marker takes in no more news.

        `history`, which no diagnosis asks, goes on growing.
        """
        if self.marker is None:
            return self
        return replace(self, marker=replace(self.marker, failed=dict(self.marker.failed)))

    def unfinished(self) -> Vmim | None:
        """A VMIM of this VMI that has not ended, if there is one."""
        return next((vmim for vmim in self.vmims if not vmim.finished), None)


def _count_both(one: Marker, other: Marker, since: Instant) -> int:
    """What `one` counted, and of `other` what is later than all that `one` may have forgotten."""
    oldest = min(one.failed.values(), default=since) if one.forgotten else 0.0
    own = sum(end >= since for end in one.failed.values())
    new = sum(
        end >= since and end > oldest for uid, end in other.failed.items() if uid not in one.failed
    )
    return one.forgotten + own + new


def _by_end(failure: tuple[str, Instant]) -> tuple[Instant, str]:
    uid, end = failure
    return end, uid
