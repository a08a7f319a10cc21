"""How an evacuation ended, and how long it took."""

from enum import StrEnum

from msgspec import Struct

from exporter.engine.facts.evidence import Marker
from exporter.engine.facts.history import settle
from exporter.engine.facts.model import Instant, Seconds
from exporter.engine.store.requesters import Source
from exporter.engine.store.vmi_record import VmiRecord


class EvacuationOutcome(StrEnum):
    """How an evacuation ended; these are the values in metrics and in the log."""

    SUCCEEDED = "succeeded"
    CANCELLED = "cancelled"
    VM_STOPPED = "vm_stopped"
    VM_DELETED = "vm_deleted"


class EvacuationEnd(Struct, frozen=True, kw_only=True):
    """One evacuation that has ended; `duration` is the time since its request."""

    vmi_uid: str
    namespace: str
    name: str
    node: str
    source: Source
    outcome: EvacuationOutcome
    duration: Seconds


def find_end(
    record: VmiRecord,
    marker: Marker,
    now: Instant,
    *,
    is_deleted: bool,
) -> EvacuationEnd:
    """How the evacuation of a VMI ended that is over at `now`.

    A success ended it when the migration ended; anything else ended it now. A VM that is lost at
    the end of its migration may have the new node already.
    """
    vmi, end = record.vmi, now
    success = settle(record.history.newest_success(), now)
    moved_at = success if success is not None and success >= marker.requested_at else None
    is_lost = vmi.finished and (vmi.phase == "Failed" or moved_at is None)
    is_elsewhere = bool(vmi.node) and vmi.node != marker.node
    if not is_lost and (is_elsewhere or marker.was_left(vmi, success)):
        outcome = EvacuationOutcome.SUCCEEDED
        end = now if moved_at is None else moved_at
    elif vmi.finished:
        outcome = EvacuationOutcome.VM_STOPPED
    elif is_deleted:
        outcome = EvacuationOutcome.VM_DELETED
    else:
        outcome = EvacuationOutcome.CANCELLED
    return EvacuationEnd(
        vmi_uid=vmi.uid,
        namespace=vmi.namespace,
        name=vmi.name,
        node=marker.node,
        source=record.source,
        outcome=outcome,
        duration=max(0.0, end - marker.requested_at),
    )
