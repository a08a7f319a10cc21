"""Merges the migrations in VMIs and VMIMs into the records of the VMIs."""

from exporter.engine.facts.history import Migration, complete_failure, settle
from exporter.engine.facts.mappings import put_newest
from exporter.engine.facts.model import (
    EndReason,
    Instant,
    MigrationState,
    Outcome,
    Vmi,
    Vmim,
)
from exporter.engine.store.migrations import Binding, VmimIndex
from exporter.engine.store.requesters import find_requester, find_trigger
from exporter.engine.store.tracker import EvacuationTracker, record_attempt
from exporter.engine.store.vmi_record import VmiRecord


NODES_KEPT = 10_000
"""For how many nodes a departure is kept: limited, because autoscaling creates new nodes."""


class Departures:
    """The end of the newest successful migration out of each node; "" is an unknown node."""

    def __init__(self) -> None:
        self._latest: dict[str, Instant] = {}

    def record(self, node: str, end: Instant | None, now: Instant) -> None:
        """Note a successful migration out of a node, read at `now`; `end` is None if unknown."""
        end = settle(end, now)
        if end is not None and end > self._latest.get(node, 0.0):
            put_newest(self._latest, node, end, most=NODES_KEPT)

    def read_newest(self) -> tuple[dict[str, Instant], Instant | None]:
        """The newest end for each node, and the newest end of all nodes (None if there is none)."""
        return self._latest.copy(), max(self._latest.values(), default=None)


class HistoryMerger:
    """Merges records into histories; `keep` is that of `History.put`.

    `departures`: when VMs last left each node.
    """

    def __init__(self, vmims: VmimIndex, evacuations: EvacuationTracker, *, keep: int) -> None:
        self.departures = Departures()
        self._vmims = vmims
        self._evacuations = evacuations
        self._keep = keep

    def merge_vmi(self, record: VmiRecord, before: Vmi | None, at: Instant) -> None:
        """Merge the `migrationState` of a new or changed VMI, and bind its VMIMs if necessary."""
        vmi, state = record.vmi, record.vmi.migration
        uids = _migration_uids(vmi)
        names_others = before is None or _migration_uids(before) != uids
        if names_others:
            record.handed_off_at = at
            record.prove(uids, keep=self._keep)
        if state is not None:
            migration = Migration(
                start=state.start,
                end=state.end,
                outcome=state.outcome,
                handed_off=True,
                source_node=state.source_node,
                target_node=state.target_node,
                reason=_find_reason(record, state.uid, state),
            )
            record.history.put(state.uid, migration, keep=self._keep)
            self._record_departure(record, at)
        if names_others:
            for binding in self._vmims.bind_all(record):
                self.merge_vmim(binding, record, at)

    def merge_vmim(self, binding: Binding, record: VmiRecord, at: Instant) -> None:
        """Merge a VMIM that belongs to this VMI."""
        vmim = binding.vmim
        if vmim.handed_off or binding.proven:
            migration = Migration(
                start=vmim.start,
                end=vmim.end,
                scheduled_at=vmim.scheduled_at,
                finished_at=vmim.finished_at,
                outcome=vmim.outcome,
                handed_off=vmim.handed_off,
                source_node=vmim.source_node or vmim.evacuates,
                target_node=vmim.target_node,
                trigger=find_trigger(vmim, record.vmi),
                reason=_find_reason(record, vmim.uid, vmim),
                requested_by=find_requester(vmim, record.marker),
            )
            record.history.put(vmim.uid, migration, keep=self._keep)
            self._record_departure(record, at)
        record_attempt(record, vmim, at)
        self._evacuations.record_success(record, at)

    def _record_departure(self, record: VmiRecord, at: Instant) -> None:
        state = record.vmi.migration
        if state is not None and state.outcome is Outcome.SUCCEEDED:
            end = record.history.find(state.uid, state.end).known_end
            self.departures.record(state.source_node, end, at)


def _find_reason(record: VmiRecord, uid: str, ended: MigrationState | Vmim) -> EndReason | None:
    """Why a migration failed; None if it has not ended.

    A VM that stops later is no reason, so this matters only when the end is first read.
    """
    if ended.outcome is Outcome.SUCCEEDED:
        return EndReason.NONE
    if ended.outcome is Outcome.UNKNOWN:
        return None
    is_new = record.history.find(uid, ended.end).reason is None
    source_lost = is_new and record.vmi.finished
    return complete_failure(ended.failure, ended.start, ended.end, source_lost=source_lost)


def _migration_uids(vmi: Vmi) -> tuple[str, ...]:
    own = (vmi.migration.uid,) if vmi.migration is not None and vmi.migration.uid else ()
    return own + vmi.other_uids
