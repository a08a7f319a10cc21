"""Everything that is known about one VMI: its objects, its history, its evacuation."""

from collections.abc import Iterator
from enum import StrEnum
from itertools import takewhile
from typing import Annotated

from msgspec import Meta, Struct, field
from msgspec.structs import replace

from exporter.engine.facts.history import History, Migration, correct_end
from exporter.engine.facts.model import (
    CLOCK_SKEW,
    Eviction,
    Instant,
    Pod,
    Requester,
    Resource,
    Seconds,
    Vmi,
    Vmim,
)
from exporter.engine.facts.trust import NamespaceTrust


ASKED_WITHIN: Seconds = 30.0
"""The longest time between the webhook's review of an eviction and the evacuation's request, in
either order. A webhook's timeout is never longer, and the two clocks may differ."""
OUTLIVES_AFTER: Seconds = 600.0
"""The launcher pod of a migration that has ended may run for this long, also after a failure."""
FAILURES_KEPT = 64
"""How many failed attempts of an evacuation are kept by UID; older ones are only counted."""


class RequestedThrough(StrEnum):
    """How an evacuation was requested."""

    EVICTION = "eviction"
    """`status.evacuationNodeName` of the VMI, which KubeVirt's webhook sets."""
    TAINT = "taint"
    """The node has KubeVirt's drain taint (`spec.configuration.migrations.nodeDrainTaintKey`)."""


class Marker(Struct, kw_only=True, omit_defaults=True):
    """An evacuation: its node, its request and its failed attempts.

    `seen_at` is when the marker was first seen. `requested_at` only moves to earlier instants,
    unless KubeVirt dates it, or a success is found between it and `seen_at`. `not_before` is the
    last instant at which the marker was absent or different, or at which a success ended an earlier
    evacuation. Attempts before that instant do not belong to this evacuation. `failed` has the ends
    of the failed evacuation VMIMs by UID, and `forgotten` counts the failures that are no longer
    kept.
    `lacking_since` is when the launcher pod was first seen without the descheduler's annotation.
    `dated`: `requested_at` is the time in KubeVirt's condition EvictionRequested, so our clock does
    not change it. `asked_by` is who asked for the first eviction that the webhook reviewed;
    use `requested_by`, which checks that this was near the request. `ends_at`: when the evacuation
    ends without a further attempt, because only attempts show it; None if it does not.
    `is_presumed`: a success ended the evacuation after the VMI was last read, so the VMI may have
    no evacuation any more. `was_drained`: the node was cordoned or tainted during the evacuation,
    which is left over once the node is open again.
    """

    node: str
    requested_at: Instant
    through: RequestedThrough = RequestedThrough.EVICTION
    seen_at: Instant = 0.0
    not_before: Instant | None = None
    failed: Annotated[dict[str, Instant], Meta(max_length=FAILURES_KEPT)] = field(
        default_factory=dict
    )
    forgotten: Annotated[int, Meta(ge=0)] = 0
    lacking_since: Instant | None = None
    dated: bool = False
    asked_by: Requester | None = None
    ends_at: Instant | None = None
    is_presumed: bool = False
    was_drained: bool = False

    @property
    def requested_by(self) -> Requester | None:
        """Who requested the evacuation, or None if that is unknown."""
        asked = self.asked_by
        is_near = asked is not None and abs(self.requested_at - asked.at) <= ASKED_WITHIN
        return asked if is_near else None

    def date(self, instant: Instant) -> bool:
        """Use KubeVirt's date of the request; True if that changed anything.

        `not_before` is dropped: it comes from our clock, which may be wrong.
        """
        is_news = not self.dated or self.requested_at != instant
        self.requested_at, self.not_before, self.dated = instant, None, True
        return is_news

    def record_request(self, instant: Instant) -> None:
        """Note that the evacuation was requested at this instant or earlier."""
        if not self.dated:
            self.requested_at = min(self.requested_at, instant)

    def record_success(self, end: Instant) -> bool:
        """Note that a migration succeeded: a request before its end was for an earlier evacuation.

        True if that resets `requested_at` to `seen_at`.
        """
        if end < self.requested_at or end >= self.seen_at:
            return False
        self.requested_at = self.seen_at
        return True

    def record_failure(self, uid: str, end: Instant) -> None:
        """Record a failed attempt, unless it is recorded already."""
        if uid in self.failed or not self._is_ours(end):
            return
        if len(self.failed) >= FAILURES_KEPT:
            oldest = min(self.failed, key=self.failed.__getitem__)
            if end < self.failed[oldest]:
                return
            self.forgotten += self.failed.pop(oldest) >= self.requested_at
        self.failed[uid] = end

    def _is_ours(self, instant: Instant) -> bool:
        """Whether an event at this instant belongs to this evacuation."""
        return self.not_before is None or instant > self.not_before

    def is_over(self, vmi: Vmi, newest_success: Instant | None) -> bool:
        """Whether the VMI's present marker belongs to a later evacuation than this one.

        It does if the VMI's marker names another node, if the VMI has left the node and come back,
        or if KubeVirt has set the condition EvictionRequested again.
        """
        is_by_taint = self.through is RequestedThrough.TAINT
        present = vmi.node if is_by_taint else vmi.evacuation_node
        if present != self.node or self.was_left(vmi, newest_success):
            return True
        requested = vmi.eviction_requested_at
        known = max(self.seen_at, self.requested_at)
        return requested is not None and requested > known + CLOCK_SKEW

    def was_left(self, vmi: Vmi, newest_success: Instant | None) -> bool:
        """Whether the VMI has left the node since `seen_at` and is back on it."""
        if newest_success is None or vmi.node != self.node:
            return False
        return newest_success >= self.seen_at and self._is_ours(newest_success)

    def failed_since_request(self) -> int:
        """The number of attempts that failed since the request: a lower bound."""
        return self.forgotten + len(self.failures_since_request())

    def failures_since_request(self) -> list[Instant]:
        """The ends of the failed attempts that are kept and belong to this request."""
        return [end for end in self.failed.values() if end >= self.requested_at]


class SavedVmi(Struct, gc=False, frozen=True, kw_only=True, omit_defaults=True):
    """What the history file has of one VMI: its migrations by key (as in `History`), its marker."""

    uid: str
    namespace: str
    migrations: dict[str, Migration] = {}
    marker: Marker | None = None


class Evidence(Struct, frozen=True, kw_only=True, gc=False):
    """What is known about one VMI.

    The VMI last changed at `changed_at`, and its present migration was first seen at
    `handed_off_at`, both by our clock. `unreadable` says which of the VMI, its unfinished VMIMs and
    its launcher pod cannot be read any more, and since when. Their last versions are believed for
    `trust.dead_after`, and so is a running migration whose VMIM has finished. `vmims` are its
    existing VMIMs. `launcher` is the current launcher pod, or None if none is visible. Only an
    evacuating VMI has a `marker`. An evacuating VMI, or one with an unfinished VMIM, has its
    launcher pods in `pods`, and in `namesakes` the VMIMs of an earlier VMI of that name. A VMI with
    more than one active launcher pod has `pods` too. `eviction`: the newest Eviction of its pods.
    Resources that `trust` does not see are empty.
    """

    vmi: Vmi
    history: History
    trust: NamespaceTrust = NamespaceTrust()
    vmims: tuple[Vmim, ...] = ()
    launcher: Pod | None = None
    marker: Marker | None = None
    eviction: Eviction | None = None
    pods: tuple[Pod, ...] = ()
    changed_at: Instant = 0.0
    handed_off_at: Instant = 0.0
    unreadable: tuple[tuple[Resource, Instant], ...] = ()
    namesakes: tuple[Vmim, ...] = ()
    platform_updating: bool = False

    @property
    def migration_end(self) -> Instant | None:
        """When the VMI's last migration ended, corrected by its VMIM; None if it has no end."""
        state = self.vmi.migration
        if state is None or state.end is None:
            return None
        return correct_end(state.end, self.history.find(state.uid, state.end).finished_at)

    @property
    def migration_start(self) -> Instant | None:
        """When the VMI's last migration started, by the clock of its end; None if unknown."""
        state = self.vmi.migration
        if state is None:
            return None
        known = self.history.find(state.uid, state.end)
        return replace(known, start=state.start, end=state.end).known_start

    @property
    def requested_by(self) -> Requester | None:
        """Who asks that the VM leaves, by EvictionRequests or an eviction; None if unknown."""
        eviction = self.eviction
        if eviction is not None and eviction.askers:
            return Requester(eviction.created or 0.0, ", ".join(eviction.askers))
        return None if self.marker is None else self.marker.requested_by

    @property
    def ends_at(self) -> Instant | None:
        """When the grace period of the VM's deletion ends: of its VMI's, or else of its own pod's.

        None if neither is being deleted, or if the pod is the target of a migration.
        """
        if self.vmi.deleted_at is not None:
            return self.vmi.deleted_at
        pod = self.launcher
        if pod is None or pod.finished or pod.deleted_at is None:
            return None
        attempt = self.unfinished()
        is_target = attempt is not None and attempt.uid == pod.migration_uid
        return None if is_target else pod.deleted_at

    def find_outlived(self, now: Instant) -> Iterator[Pod]:
        """The active launcher pods on other nodes than the VMI's that no migration uses.

        KubeVirt ends a source within seconds after the migration, and the target of a failed one
        within minutes, so they have `OUTLIVES_AFTER`.
        """
        attempt, state = self.unfinished(), self.vmi.migration
        is_open = state is not None and bool(state.uid) and not state.ended
        if is_open or not self.vmi.node or (attempt is not None and attempt.handed_off):
            return
        ends = (self.migration_end, *(vmim.finished_at for vmim in self.vmims))
        if any(end is not None and now - end <= OUTLIVES_AFTER for end in ends):
            return
        uid = "" if attempt is None else attempt.uid
        for pod in self.pods:
            is_used = bool(uid) and pod.migration_uid == uid
            if not pod.finished and not is_used and pod.node not in ("", self.vmi.node):
                yield pod

    @property
    def contradicted_at(self) -> Instant | None:
        """When a start without an end is no longer believed; None if its VMIM has not finished."""
        state = self.vmi.migration
        if state is None or not state.running or not state.uid:
            return None
        final = self.history.find(state.uid, None).finished_at
        return None if final is None else final + self.trust.dead_after

    def is_contradicted(self, now: Instant) -> bool:
        """Whether the VMI still shows a running migration whose VMIM finished long ago."""
        return self.contradicted_at is not None and now >= self.contradicted_at

    def dead_at(self, now: Instant) -> frozenset[Resource]:
        """The resources that are dead for this VMI: everywhere here, or because of an object."""
        if not self.unreadable:
            return self.trust.dead
        old = (
            resource for resource, since in self.unreadable if now >= since + self.trust.dead_after
        )
        return self.trust.dead.union(old)

    def distrusted_from(self) -> Iterator[Instant]:
        """The instants at which a fact becomes too old to be believed."""
        if self.contradicted_at is not None:
            yield self.contradicted_at
        for _, since in self.unreadable:
            yield since + self.trust.dead_after

    def snapshot(self) -> "Evidence":
        """A copy for a later diagnosis, with a marker and history that do not change any more."""
        marker = self.marker
        if marker is not None:
            marker = replace(marker, failed=dict(marker.failed))
        return replace(self, marker=marker, history=History(self.history.records()))

    def believed_at(self, now: Instant) -> "Evidence":
        """The evidence without dead VMIMs or pods, as if these could not be watched."""
        dead = self.dead_at(now)
        if not dead:
            return self
        believed = replace(self, trust=replace(self.trust, dead=dead))
        if Resource.VMIMS in dead:
            believed = replace(believed, vmims=(), namesakes=())
        if Resource.PODS in dead:
            believed = replace(believed, launcher=None, pods=())
        return believed

    @property
    def unsettled(self) -> bool:
        """Whether more than its mobility and budgets decides what a drain would do to the VMI."""
        vmi = self.vmi
        if vmi.finished:
            return False
        if self.marker is not None or vmi.unsettled or self.ends_at is not None:
            return True
        if self.eviction is not None and self.eviction.askers:
            return True
        for vmim in self.vmims:  # not `any`: this is asked about each VMI that changes
            if not vmim.finished or vmim.phase == "Failed":
                return True
        return len(self.pods) > 1 and sum(not pod.finished for pod in self.pods) > 1

    def unfinished(self) -> Vmim | None:
        """An unfinished VMIM of this VMI, if there is one."""
        for vmim in self.vmims:
            if not vmim.finished:
                return vmim
        return None

    def find_target(self, attempt: Vmim | None) -> Pod | None:
        """The active target pod of an attempt, or None."""
        if attempt is None:
            return None
        mine = (pod for pod in self.pods if pod.migration_uid == attempt.uid and not pod.finished)
        return next(mine, None)

    def is_target(self, pod: Pod) -> bool:
        """Whether a pod is the target of the VMI's unfinished migration.

        KubeVirt refuses its eviction, and moves the VM away again as soon as it has arrived. If the
        VMI is evacuating, it would answer as if the pod were the source pod, and a descheduler
        would wait ten minutes for the target pod.
        """
        state, vmim = self.vmi.migration, self.unfinished()
        if pod.finished or pod.node == self.vmi.node:
            return False
        # Once the VM runs on the target's node, the pod on the old node is the source.
        if state is not None and state.running and pod.node and pod.node == state.source_node:
            return False
        present = {vmim.uid} if vmim is not None else set()
        if state is not None and state.running:
            present.add(state.uid)
        return bool(present) and (not pod.migration_uid or pod.migration_uid in present)

    def newest_failures(self) -> list[Vmim]:
        """The failed VMIMs that are newer than the last successful one, newest first.

        Aborted VMIMs are left out.
        """
        finished = (vmim for vmim in self.vmims if vmim.finished and not vmim.aborted)
        newest = sorted(finished, key=lambda vmim: vmim.created or 0.0, reverse=True)
        return list(takewhile(lambda vmim: vmim.phase == "Failed", newest))
