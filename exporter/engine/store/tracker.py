"""Tracks evacuations: when each was requested, and which attempts have failed since then."""

from collections.abc import Iterator

from exporter.engine.facts.evidence import Marker
from exporter.engine.facts.history import settle
from exporter.engine.facts.model import CLOCK_SKEW, Instant, Vmi, Vmim
from exporter.engine.store.launchers import LauncherIndex
from exporter.engine.store.migrations import VmimIndex
from exporter.engine.store.node_drains import NodeDrains
from exporter.engine.store.requesters import Requesters
from exporter.engine.store.vmi_record import VmiRecord


class EvacuationTracker:
    """Maintains the markers of the VMIs that are evacuating, and the drains of their nodes.

    `requesters`: who asked for the evictions of VMIs that KubeVirt has not marked yet. In all
    methods, `now` is the instant at which the fact was read.
    """

    def __init__(self, vmims: VmimIndex, launchers: LauncherIndex) -> None:
        self._vmims = vmims
        self._launchers = launchers
        self._records: dict[str, VmiRecord] = {}
        self.drains = NodeDrains()
        self.requesters = Requesters()

    def __iter__(self) -> Iterator[VmiRecord]:
        return iter(self._records.values())

    def __contains__(self, uid: str) -> bool:
        return uid in self._records

    def find_request(self, uid: str) -> Instant | None:
        """When the evacuation of a VMI was requested, or None if it is not evacuating."""
        record = self._records.get(uid)
        return None if record is None or record.marker is None else record.marker.requested_at

    def update(self, record: VmiRecord, before: Vmi | None, now: Instant) -> None:
        """Follow a change of the VMI's own evacuation fields."""
        vmi, known = record.vmi, record.marker
        if before is not None and _is_requested_again(before, vmi):
            record.marker = None
        if not vmi.evacuation_node or vmi.finished:
            record.marker = None
            self._records.pop(vmi.uid, None)
        else:
            marker = record.marker
            if marker is None or marker.node != vmi.evacuation_node:
                not_before = record.seen_at if vmi.eviction_requested_at is None else None
                marker = self._begin(record, now, not_before=not_before)
            self._date(marker, record, now)
            self.note_success(record, now)
            self.note_launcher(vmi.uid, now)
        if known is not None and known is not record.marker:
            self._end(vmi, known, now, left=vmi.finished or vmi.node != known.node)
        if record.marker is not None:
            self.drains.ask(record.marker.node, vmi.uid, now)

    def remove(self, uid: str, now: Instant) -> None:
        """Stop tracking a VMI that is gone."""
        record = self._records.pop(uid, None)
        if record is not None and record.marker is not None:
            self._end(record.vmi, record.marker, now, left=True)

    def _end(self, vmi: Vmi, marker: Marker, now: Instant, *, left: bool) -> None:
        """End an evacuation: its VMI has left the node, or KubeVirt has cleared the marker."""
        if left:
            end = settle(None if vmi.migration is None else vmi.migration.end, now)
            at = end if end is not None and end > marker.requested_at else now
            self.drains.leave(marker.node, vmi.uid, marker.requested_at, at)
        else:
            self.drains.cancel(marker.node, vmi.uid, now)

    def note_success(self, record: VmiRecord, now: Instant) -> None:
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
            self._begin(record, now, not_before=success)
        elif marker.note_success(success):
            self.note_attempts(record, now)

    def note_attempts(self, record: VmiRecord, now: Instant) -> None:
        """Apply all known VMIMs of the VMI again."""
        for vmim in self._vmims.owned_by(record.vmi):
            note_attempt(record, vmim, now)

    def note_launcher(self, uid: str, now: Instant) -> None:
        """Update the marker's `lacking_since` from the current launcher pod."""
        record = self._records.get(uid)
        if record is None or record.marker is None:
            return
        launcher = self._launchers.current(record.vmi)
        if launcher is None or launcher.eviction_in_progress:
            record.marker.lacking_since = None
        elif record.marker.lacking_since is None:
            record.marker.lacking_since = now

    def _date(self, marker: Marker, record: VmiRecord, now: Instant) -> None:
        """Apply the condition EvictionRequested, which KubeVirt sets soon after the marker.

        If the condition comes much later, an upgrade to KubeVirt 1.7 has added it. Then its time is
        not the time of the request.
        """
        requested = record.vmi.eviction_requested_at
        if requested is None:
            return
        if not marker.dated and now - marker.seen_at > CLOCK_SKEW:
            marker.note_request(requested)
        elif marker.date(requested):
            self.note_attempts(record, now)

    def _begin(self, record: VmiRecord, now: Instant, *, not_before: Instant | None) -> Marker:
        vmi = record.vmi
        marker = record.marker = Marker(
            node=vmi.evacuation_node,
            requested_at=now,
            seen_at=now,
            not_before=not_before,
            asked_by=self.requesters.take(vmi.uid, now),
        )
        self._records[vmi.uid] = record
        self.note_attempts(record, now)
        self.note_launcher(vmi.uid, now)
        return marker


def note_attempt(record: VmiRecord, vmim: Vmim, now: Instant) -> None:
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
            marker.note_request(vmim.created)
    if vmim.phase == "Failed" and not vmim.aborted:
        ends = (vmim.finished_at, vmim.end, vmim.created, now)
        marker.note_failure(vmim.uid or vmim.name, next(end for end in ends if end is not None))


def _is_requested_again(before: Vmi, vmi: Vmi) -> bool:
    """Whether KubeVirt's condition shows that the evacuation was cleared and requested again.

    A condition that was absent before proves nothing: KubeVirt 1.7 adds it to older requests.
    """
    known, requested = before.eviction_requested_at, vmi.eviction_requested_at
    return known is not None and (requested is None or requested > known)
