"""How each evacuation ends, and that its end is noted once."""

from typing import Any

import pytest

from exporter.engine.facts.model import Node, Outcome, Resource, Trigger
from exporter.engine.store.evacuation_ends import EvacuationEnd, EvacuationOutcome
from exporter.engine.store.requesters import Source
from tests.support.builders import (
    NAME,
    NAMESPACE,
    NOW,
    UID,
    a_state,
    a_store,
    a_vmi,
    a_vmim,
)
from tests.support.stores import ClockedStore


MARKED: dict[str, Any] = {"evacuation_node": "n1", "eviction_requested_at": NOW - 600}
MOVED = a_vmi(node="n2", migration=a_state(start=NOW - 60, end=NOW - 30))


def a_marked_store() -> tuple[ClockedStore, list[EvacuationEnd]]:
    """A store whose VMI is evacuating, and the list of the ends that it notes."""
    store, ends = a_store(a_vmi(**MARKED), now=NOW - 600), list[EvacuationEnd]()
    store.evacuations.note_end = ends.append
    store.now = NOW
    return store, ends


@pytest.mark.parametrize(
    ("after", "outcome", "duration"),
    [
        pytest.param(MOVED, EvacuationOutcome.SUCCEEDED, 570, id="it-moved"),
        pytest.param(a_vmi(), EvacuationOutcome.CANCELLED, 600, id="cancelled"),
        pytest.param(
            a_vmi(**MARKED, phase="Succeeded"), EvacuationOutcome.VM_STOPPED, 600, id="final-phase"
        ),
        pytest.param(None, EvacuationOutcome.VM_DELETED, 600, id="deleted"),
        pytest.param(a_vmi(uid="new"), EvacuationOutcome.VM_DELETED, 600, id="recreated"),
        pytest.param(
            a_vmi(evacuation_node="n1", eviction_requested_at=NOW - 1),
            EvacuationOutcome.CANCELLED,
            600,
            id="requested-again",
        ),
    ],
)
def test_each_outcome(after: Any, outcome: EvacuationOutcome, duration: float) -> None:
    """Each evacuation ends once, with its outcome, and the time since its request."""
    store, ends = a_marked_store()
    for _ in range(2):
        if after is None:
            store.remove(Resource.VMIS, NAMESPACE, NAME)
        else:
            store.put(after)
    (end,) = ends
    goes_on = (
        after is not None and after.uid == UID and after.evacuation_node and not after.finished
    )
    assert (UID in store.evacuations) is bool(goes_on)
    assert (end.vmi_uid, end.node, end.outcome, end.duration) == (UID, "n1", outcome, duration)


@pytest.mark.parametrize(
    ("success", "duration", "over_at"),
    [
        pytest.param(NOW - 30, 570, NOW - 30, id="after-the-request"),
        pytest.param(NOW - 600, 0, NOW, id="at-the-request"),
        pytest.param(NOW - 9000, 600, NOW, id="of-an-earlier-move"),
        pytest.param(None, 600, NOW, id="unknown"),
    ],
)
def test_a_vm_has_left_when_its_migration_ended(
    success: float | None, duration: float, over_at: float
) -> None:
    """Without a success since the request, a VM that is on another node has left it just now."""
    store, ends = a_marked_store()
    moved = None if success is None else a_state(start=success - 30, end=success)
    store.put(a_vmi(node="n2", migration=moved))
    (end,) = ends
    assert (end.outcome, end.duration) == (EvacuationOutcome.SUCCEEDED, duration)
    assert (end.past.seen_at, end.past.ended_at) == (NOW - 600, over_at)


def test_the_vmim_is_read_before_the_vmi() -> None:
    """A success that the VMIM shows first ends the evacuation once, although the VMI is marked."""
    store, ends = a_marked_store()
    success = {"phase": "Succeeded", "finished": True, "outcome": Outcome.SUCCEEDED}
    store.put(a_vmim(start=NOW - 60, end=NOW - 30, handed_off=True, **success))
    store.put(MOVED)
    assert [end.outcome for end in ends] == [EvacuationOutcome.SUCCEEDED]


@pytest.mark.parametrize("is_read", [True, False])
def test_another_replica_has_read_the_next_evacuation(*, is_read: bool) -> None:
    """The end of an evacuation that only a success shows counts if any replica has read it."""
    store, ends = a_store(a_vmi(evacuation_node="n1"), now=NOW - 600), list[EvacuationEnd]()
    store.evacuations.note_end = ends.append
    store.now = NOW
    success = {"phase": "Succeeded", "finished": True, "outcome": Outcome.SUCCEEDED}
    store.put(a_vmim(start=NOW - 60, end=NOW - 30, handed_off=True, **success))
    if is_read:
        other = a_store(a_vmi(evacuation_node="n1"), now=NOW - 600)
        other.now = NOW - 25
        other.put(a_vmi())
        other.now = NOW - 20
        other.put(a_vmi(evacuation_node="n1"))
        remembered = other.remember(UID)
        assert remembered is not None
        store.recall(remembered)
    store.put(Node(name="n1", schedulable=False))
    store.put(a_vmi())
    outcomes = [EvacuationOutcome.SUCCEEDED, EvacuationOutcome.CANCELLED]
    assert [end.outcome for end in ends] == outcomes[: 1 + is_read]


def test_another_replica_missed_the_end_of_the_last_one() -> None:
    """An evacuation ends once more, although another replica takes it for the one before."""
    store, ends = a_store(a_vmi(evacuation_node="n1"), now=NOW - 600), list[EvacuationEnd]()
    store.evacuations.note_end = ends.append
    remembered = store.remember(UID)
    assert remembered is not None
    for vmi in (a_vmi(), a_vmi(evacuation_node="n1")):
        store.now += 100
        store.put(vmi)
    store.recall(remembered)
    store.put(a_vmi())
    assert [end.outcome for end in ends] == [EvacuationOutcome.CANCELLED] * 2


def test_the_source_is_that_of_the_attempt() -> None:
    """The source of an end is the source of the evacuation."""
    store, ends = a_marked_store()
    store.put(a_vmi(**MARKED, evicted_by_descheduler=True))
    store.put(a_vmim(evacuates="n1", trigger=Trigger.EVACUATION))
    store.put(MOVED)
    assert [end.source for end in ends] == [Source.DESCHEDULER]


class TestRestart:
    """The stored history has an evacuation, and the VMI is not evacuating any more."""

    def successor(self, *, reads_past: bool = False) -> tuple[ClockedStore, list[EvacuationEnd]]:
        """The store of the next process; `reads_past`: the end was stored too."""
        before, _ = a_marked_store()
        if reads_past:
            before.put(MOVED)
        remembered = before.remember(UID)
        assert remembered is not None
        store, ends = a_store(now=NOW), list[EvacuationEnd]()
        store.evacuations.note_end = ends.append
        store.recall(remembered)
        return store, ends

    @pytest.mark.parametrize(
        ("vmi", "outcome"),
        [
            (MOVED, EvacuationOutcome.SUCCEEDED),
            (a_vmi(), EvacuationOutcome.CANCELLED),
            (a_vmi(phase="Succeeded"), EvacuationOutcome.VM_STOPPED),
            (None, EvacuationOutcome.VM_DELETED),
        ],
    )
    def test_it_ended_meanwhile(self, vmi: Any, outcome: EvacuationOutcome) -> None:
        """An evacuation that ended while no exporter ran is found, once the watch is believed."""
        store, ends = self.successor()
        if vmi is not None:
            store.put(vmi)
        assert ends == []
        forgotten = [store.forget(UID, is_gone=True) for _ in range(2)]
        assert forgotten == [True, False]
        assert [end.outcome for end in ends] == [outcome]
        remembered = store.remember(UID)
        assert remembered is None or remembered.marker is None

    def test_the_vmi_is_deleted_at_once(self) -> None:
        """If the VMI is deleted before the watch is believed, the evacuation has ended with it."""
        store, ends = self.successor()
        store.put(a_vmi())
        store.remove(Resource.VMIS, NAMESPACE, NAME)
        assert [end.outcome for end in ends] == [EvacuationOutcome.VM_DELETED]

    def test_our_clock_is_behind_the_request(self) -> None:
        """No evacuation lasts less than no time."""
        store, ends = self.successor()
        store.now = NOW - 9000
        store.forget(UID, is_gone=True)
        assert [end.duration for end in ends] == [0.0]

    def test_it_goes_on(self) -> None:
        """An evacuation that goes on ends once, and lasts since its request."""
        store, ends = self.successor()
        store.put(a_vmi(evacuation_node="n1"))
        store.forget(UID, is_gone=True)
        assert ends == []
        store.put(MOVED)
        assert [(end.outcome, end.duration) for end in ends] == [(EvacuationOutcome.SUCCEEDED, 570)]

    def test_another_one_follows(self) -> None:
        """If the VMI is evacuated again after the restart, the stored evacuation has ended."""
        store, ends = self.successor()
        store.put(a_vmi())
        store.now = NOW + 5
        store.put(a_vmi(evacuation_node="n1"))
        assert [end.outcome for end in ends] == [EvacuationOutcome.CANCELLED]

    def test_another_one_was_read_before_the_history(self) -> None:
        """A stored evacuation has ended if KubeVirt dates the present request much later."""
        before, _ = a_marked_store()
        remembered = before.remember(UID)
        assert remembered is not None
        store, ends = a_store(now=NOW + 900), list[EvacuationEnd]()
        store.evacuations.note_end = ends.append
        store.put(a_vmi(evacuation_node="n1", eviction_requested_at=NOW + 800))
        store.recall(remembered)
        assert [end.outcome for end in ends] == [EvacuationOutcome.CANCELLED]

    def test_another_replica_has_seen_its_end(self) -> None:
        """An evacuation whose end another replica has stored is not awaited any more."""
        store, ends = self.successor()
        store.put(a_vmi())
        assert store.awaits(UID)
        other, _ = a_marked_store()
        other.put(a_vmi())
        remembered = other.remember(UID)
        assert remembered is not None
        store.recall(remembered)
        assert not store.awaits(UID)
        assert (store.forget(UID, is_gone=True), ends) == (False, [])
