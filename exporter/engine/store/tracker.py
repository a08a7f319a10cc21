"""Tracks evacuations: when each was requested, and which attempts have failed since then.

An evacuation is requested through an eviction, which sets `status.evacuationNodeName`, or through
KubeVirt's drain taint on the node: KubeVirt then migrates every VMI of the node whose strategy
allows it, and marks none of them (`vmisToMigrate` in its `evacuation.go`). If nodes cannot be read,
only the VMIMs that evacuate the node show such a drain.
"""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

from exporter.engine.facts.evidence import Marker, RequestedThrough
from exporter.engine.facts.history import settle
from exporter.engine.facts.model import (
    CLOCK_SKEW,
    Instant,
    KubeVirtSettings,
    Seconds,
    Vmi,
    Vmim,
)
from exporter.engine.store.evacuation_ends import EvacuationEnd, find_end
from exporter.engine.store.evictions import EvictionIndex
from exporter.engine.store.launchers import LauncherIndex
from exporter.engine.store.migrations import VmimIndex
from exporter.engine.store.node_drains import DrainEnd, DrainPart, NodeDrains, find_part
from exporter.engine.store.nodes import NodeIndex
from exporter.engine.store.requesters import Requesters, find_source, find_withdrawn
from exporter.engine.store.vmi_record import VmiIndex, VmiRecord


ENDS_AFTER: Seconds = 600.0
"""An evacuation that only its attempts show ends this long after the newest attempt has ended."""


class _Request(NamedTuple):
    """What requests the evacuation of a VMI now.

    `tainted_at`: when the drain taint of the node was added; None if that is unknown, or if there
    is no taint. `ends_at` is that of `Marker`. `not_before` is when the node was last seen without
    the taint.
    """

    node: str
    through: RequestedThrough
    tainted_at: Instant | None = None
    not_before: Instant | None = None
    ends_at: Instant | None = None


class EvacuationTracker:
    """Maintains the markers of the VMIs that are evacuating, and the drains of their nodes.

    `requesters`: who asked for the evictions of VMIs that KubeVirt has not marked yet. `kubevirt`:
    KubeVirt's settings. `sees_nodes`: whether nodes can be read; None if that is not known yet.
    `record_end` is called once for each evacuation that has ended, before the change that ended it
    is applied completely. In all methods, `now` is the instant at which the fact was read.
    """

    def __init__(
        self,
        vmis: VmiIndex,
        vmims: VmimIndex,
        launchers: LauncherIndex,
        nodes: NodeIndex,
        evictions: EvictionIndex,
    ) -> None:
        self._vmims = vmims
        self._launchers = launchers
        self._nodes = nodes
        self._evictions = evictions
        self._records: dict[str, VmiRecord] = {}
        self.kubevirt = KubeVirtSettings()
        self.sees_nodes: bool | None = None
        self._next_end = math.inf
        self.drains = NodeDrains(vmis.mobilities)
        self.requesters = Requesters()
        self.record_end: Callable[[EvacuationEnd], None] = lambda _: None

    def __iter__(self) -> Iterator[VmiRecord]:
        return iter(self._records.values())

    def __contains__(self, uid: str) -> bool:
        return uid in self._records

    def find_request(self, uid: str) -> Instant | None:
        """When the evacuation of a VMI was requested, or None if it is not evacuating."""
        record = self._records.get(uid)
        return None if record is None or record.marker is None else record.marker.requested_at

    def update(self, record: VmiRecord, before: Vmi | None, now: Instant) -> bool:
        """Follow what requests the VMI's evacuation; True if an evacuation began or ended.

        `before` is the VMI before a change of its own; None if it is new or has not changed.
        """
        vmi, known = record.vmi, record.marker
        if before is not None and _is_requested_again(before, vmi):
            self._end(record, now)
        if before is not None and before.evacuation_node and not vmi.evacuation_node:
            record.cancelled_at = now
        request = self._find_request(record, now)
        if request is None:
            self._end(record, now)
            self._records.pop(vmi.uid, None)
            saved = record.saved
            if saved and (saved.through is RequestedThrough.EVICTION or self.sees_nodes):
                record.saved = None  # it ended while this process did not run
        else:
            self._follow(record, request, now)
            if record.marker is not None and before is not None:
                record.marker.is_presumed = False
        self._follow_node(record, before, now)
        if known is not None and known is not record.marker:
            self.drains.record_cancel(known.node, vmi.uid, now)
        return known is not record.marker

    def _follow_node(self, record: VmiRecord, before: Vmi | None, now: Instant) -> None:
        """Note in the drains of nodes that a VMI has left one or come to one."""
        vmi = record.vmi
        if before is not None and not before.finished:
            if vmi.node != before.node:
                self.drains.record_departure(
                    before.node, vmi.uid, _find_departure(record, before, now)
                )
            elif vmi.finished:
                self.drains.record_departure(vmi.node, vmi.uid, now)
        if not vmi.finished and (before is None or vmi.node != before.node):
            self.drains.record_arrival(vmi.node, now)

    def record_in_drain(self, record: VmiRecord) -> None:
        """Count a VMI that is evacuating in the drain of its node, and record who requested it."""
        vmi, marker = record.vmi, record.marker
        if marker is None or vmi.node != marker.node:
            return
        eviction = self._evictions.find(self._launchers.of(vmi)) if self._evictions else None
        record.source = find_source(vmi, self._vmims.owned_by(vmi), marker, eviction)
        part = find_part(
            vmi,
            marker,
            record.source,
            self._nodes,
            self.kubevirt.drain_taint,
            is_withdrawn=bool(find_withdrawn(marker, eviction)),
        )
        if part is DrainPart.OF_CLOSED:
            marker.was_drained = True
        self.drains.record_evacuation(
            vmi.node, vmi.uid, marker.requested_at, is_drained=part.is_drained
        )

    def record_node(self, name: str, now: Instant) -> None:
        """Begin or end the drain of a node that has changed or is gone."""
        node = self._nodes.find(name)
        if node is None:
            self.drains.end_drain(name, now, DrainEnd.NODE_DELETED)
            return
        if not self._nodes.is_closed(name, self.kubevirt.drain_taint):
            self.drains.end_drain(name, now)
            return
        taint = node.find_taint(self.kubevirt.drain_taint)
        dates = (node.cordoned_at, None if taint is None else taint.added)
        since = min((at for at in dates if at is not None), default=now)
        # KubeVirt dates a request in whole seconds. It must not seem to be before the cordon.
        self.drains.begin_drain(name, math.floor(since))

    def _follow(self, record: VmiRecord, request: _Request, now: Instant) -> None:
        """Begin the evacuation, or update it."""
        vmi, marker = record.vmi, record.marker
        if marker is None or marker.node != request.node:
            not_before = None if vmi.eviction_requested_at else request.not_before
            marker = self._begin(record, request, now, not_before=not_before)
        marker.through, marker.ends_at = request.through, request.ends_at
        if marker.ends_at is not None:
            self._next_end = min(self._next_end, marker.ends_at)
        if request.tainted_at is not None:
            since = _find_arrival(record, request.tainted_at)
            if vmi.eviction_requested_at is not None:
                since = min(since, vmi.eviction_requested_at)
            if marker.date(since):
                self.record_attempts(record, now)
        else:
            self._date(marker, record, now)
            self.record_success(record, now)
        self.record_launcher(vmi.uid, now)

    def _find_request(self, record: VmiRecord, now: Instant) -> _Request | None:
        vmi = record.vmi
        if vmi.finished:
            return None
        taint = None
        if vmi.node and vmi.leaves_when_evicted(self.kubevirt):
            if self.sees_nodes is False and not vmi.evacuation_node:
                return self._find_attempts(record, now)
            taint = self._nodes.find_taint(vmi.node, self.kubevirt.drain_taint)
        added = None if taint is None else taint.added
        if vmi.evacuation_node:
            added = added if vmi.evacuation_node == vmi.node else None
            return _Request(vmi.evacuation_node, RequestedThrough.EVICTION, added, record.seen_at)
        if taint is None:
            return None
        since = self._nodes.untainted_until(vmi.node)
        return _Request(vmi.node, RequestedThrough.TAINT, added, since)

    def _find_attempts(self, record: VmiRecord, now: Instant) -> _Request | None:
        """The request that the attempts to evacuate the VMI's node show, if nodes are not seen.

        Attempts before the VMI's newest success, or before an eviction was cancelled, show nothing.
        """
        vmi = record.vmi
        bounds = (record.history.newest_success(), record.cancelled_at)
        since = max((instant for instant in bounds if instant is not None), default=None)
        attempts = [
            vmim
            for vmim in self._vmims.owned_by(vmi)
            if vmim.evacuates == vmi.node
            and (since is None or (vmim.created is not None and vmim.created > since))
        ]
        if not attempts:
            return None
        newest = max(attempts, key=lambda vmim: (not vmim.finished, vmim.created or 0.0))
        request = _Request(vmi.node, RequestedThrough.TAINT, not_before=since)
        if not newest.finished:
            return request
        ends = (newest.finished_at, newest.end, newest.created, now)
        ends_at = next(end for end in ends if end is not None) + ENDS_AFTER
        return request._replace(ends_at=ends_at) if now < ends_at else None

    def find_expired(self, now: Instant) -> list[VmiRecord]:
        """The VMIs whose evacuation ends now, because no attempt shows it any more."""
        if now < self._next_end:
            return []
        ends = {
            uid: record.marker.ends_at
            for uid, record in self._records.items()
            if record.marker is not None and record.marker.ends_at is not None
        }
        self._next_end = min((end for end in ends.values() if end > now), default=math.inf)
        return [self._records[uid] for uid, end in ends.items() if end <= now]

    def remove(self, record: VmiRecord, now: Instant) -> None:
        """Stop tracking a VMI that is gone."""
        vmi = record.vmi
        self._records.pop(vmi.uid, None)
        self._end(record, now, is_deleted=True)
        if not vmi.finished:
            self.drains.record_departure(vmi.node, vmi.uid, now)

    def record_success(self, record: VmiRecord, now: Instant) -> None:
        """Apply the newest success; older attempts may have been read before it.

        If it came after the marker was first seen, it ended that evacuation. If the VMI has a
        marker nevertheless, KubeVirt has set it again, for a new evacuation.
        """
        marker, vmi = record.marker, record.vmi
        if marker is None or vmi.eviction_requested_at is not None:
            return
        success = record.history.newest_success()
        if success is None:
            return
        if marker.was_left(vmi, success):
            if settle(success, now) is None:  # a clock is wrong, so this may be an earlier success
                record.marker = None
            request = _Request(marker.node, marker.through)
            self._begin(record, request, now, not_before=success).is_presumed = True
        elif marker.record_success(success):
            self.record_attempts(record, now)

    def record_attempts(self, record: VmiRecord, now: Instant) -> None:
        """Apply all known VMIMs of the VMI again."""
        for vmim in self._vmims.owned_by(record.vmi):
            record_attempt(record, vmim, now)

    def record_launcher(self, uid: str, now: Instant) -> None:
        """Update the marker's `lacking_since` from the current launcher pod."""
        record = self._records.get(uid)
        if record is None or record.marker is None:
            return
        launcher = self._launchers.current(record.vmi)
        if launcher is None or launcher.eviction_in_progress:
            record.marker.lacking_since = None
        elif record.marker.lacking_since is None:
            record.marker.lacking_since = now

    def _end(self, record: VmiRecord, now: Instant, *, is_deleted: bool = False) -> None:
        """End the evacuation of a VMI, if it has one."""
        marker, record.marker = record.marker, None
        if marker is not None and not marker.is_presumed:
            self.record_end(find_end(record, marker, now, is_deleted=is_deleted))

    def _date(self, marker: Marker, record: VmiRecord, now: Instant) -> None:
        """Apply the condition EvictionRequested, which KubeVirt sets soon after the marker.

        If the condition comes much later, an upgrade to KubeVirt 1.7 has added it. Then its time is
        not the time of the request.
        """
        requested = record.vmi.eviction_requested_at
        if requested is None:
            return
        if not marker.dated and now - marker.seen_at > CLOCK_SKEW:
            marker.record_request(requested)
        elif marker.date(requested):
            self.record_attempts(record, now)

    def _begin(
        self, record: VmiRecord, request: _Request, now: Instant, *, not_before: Instant | None
    ) -> Marker:
        self._end(record, now)
        uid, asked_by = record.vmi.uid, self.requesters.take(record.vmi.uid, now)
        marker = self._take_saved(record, now)
        if marker is None:
            marker = Marker(
                node=request.node,
                requested_at=now,
                through=request.through,
                seen_at=now,
                not_before=not_before,
                asked_by=asked_by,
            )
        record.marker = marker
        self._records[uid] = record
        self.record_attempts(record, now)
        self.record_launcher(uid, now)
        return marker

    def _take_saved(self, record: VmiRecord, now: Instant) -> Marker | None:
        """The marker of the history file, if the evacuation that begins is that one."""
        saved, record.saved = record.saved, None
        if (
            saved is None
            or saved.is_over(record.vmi, record.history.newest_success())
            or (saved.ends_at is not None and now >= saved.ends_at)
        ):
            return None
        saved.is_presumed = False
        return saved


def record_attempt(record: VmiRecord, vmim: Vmim, now: Instant) -> None:
    """Apply an attempt to evacuate: count its failure, or date the request by its creation.

    Only a VMIM that KubeVirt created says when the request was made. For the strategy External,
    any VMIM after the request is an attempt.
    """
    marker = record.marker
    if marker is None:
        return
    is_own = vmim.evacuates == marker.node
    is_later = vmim.created is not None and vmim.created >= marker.requested_at
    if not is_own and not (record.vmi.is_external and is_later):
        return
    if is_own and record.vmi.eviction_requested_at is None and vmim.created is not None:
        succeeded = record.history.newest_success()
        since = [instant for instant in (marker.not_before, succeeded) if instant is not None]
        if all(vmim.created > instant for instant in since):
            marker.record_request(vmim.created)
    if vmim.phase == "Failed" and not vmim.aborted:
        ends = (vmim.finished_at, vmim.end, vmim.created, now)
        marker.record_failure(vmim.uid or vmim.name, next(end for end in ends if end is not None))


def _find_departure(record: VmiRecord, before: Vmi, now: Instant) -> Instant:
    """When a VMI left its node: the end of the migration that moved it, if that is known.

    An end long before the VMI was last seen there is by a wrong clock.
    """
    was, state = before.migration, record.vmi.migration
    if state is None or (was is not None and was.uid == state.uid and was.end == state.end):
        return now
    end = settle(record.history.find(state.uid, state.end).known_end, now)
    if end is None or record.seen_at is None or end < record.seen_at - CLOCK_SKEW:
        return now
    return end


def _find_arrival(record: VmiRecord, tainted_at: Instant) -> Instant:
    """When a taint first applied to a VMI, which may have come to the node after the taint."""
    arrived = (record.vmi.created, record.history.newest_success())
    return max((tainted_at, *(instant for instant in arrived if instant is not None)))


def _is_requested_again(before: Vmi, vmi: Vmi) -> bool:
    """Whether KubeVirt's condition shows that the evacuation was cleared and requested again.

    A condition that was absent before proves nothing: KubeVirt 1.7 adds it to older requests.
    """
    known, requested = before.eviction_requested_at, vmi.eviction_requested_at
    return known is not None and (requested is None or requested > known)
