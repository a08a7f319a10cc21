"""How each evacuation ends, and that its end is noted once."""

from typing import Any

import pytest
from msgspec.structs import replace

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


def a_marked_store(**vmi: Any) -> tuple[ClockedStore, list[EvacuationEnd]]:
    """A store whose VMI is evacuating, and the list of the ends that it notes."""
    store, ends = a_store(a_vmi(**MARKED | vmi), now=NOW - 600), list[EvacuationEnd]()
    store.evacuations.record_end = ends.append
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
        pytest.param(
            a_vmi(node="n2", phase="Failed"),
            EvacuationOutcome.VM_STOPPED,
            600,
            id="lost-at-the-end",
        ),
        pytest.param(
            replace(MOVED, phase="Succeeded"),
            EvacuationOutcome.SUCCEEDED,
            570,
            id="moved-and-ended",
        ),
        pytest.param(
            a_vmi(node="n2", phase="Succeeded"), EvacuationOutcome.VM_STOPPED, 600, id="ended-there"
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
    ("success", "duration"),
    [
        pytest.param(NOW - 30, 570, id="after-the-request"),
        pytest.param(NOW - 600, 0, id="at-the-request"),
        pytest.param(NOW - 9000, 600, id="of-an-earlier-move"),
        pytest.param(None, 600, id="unknown"),
    ],
)
def test_a_vm_has_left_when_its_migration_ended(success: float | None, duration: float) -> None:
    """Without a success since the request, a VM that is on another node has left it just now."""
    store, ends = a_marked_store()
    moved = None if success is None else a_state(start=success - 30, end=success)
    store.put(a_vmi(node="n2", migration=moved))
    (end,) = ends
    assert (end.outcome, end.duration) == (EvacuationOutcome.SUCCEEDED, duration)


def test_the_vmim_is_read_before_the_vmi() -> None:
    """A success that the VMIM shows first ends the evacuation once, although the VMI is marked."""
    store, ends = a_marked_store()
    success = {"phase": "Succeeded", "finished": True, "outcome": Outcome.SUCCEEDED}
    store.put(a_vmim(start=NOW - 60, end=NOW - 30, handed_off=True, **success))
    store.put(MOVED)
    assert [end.outcome for end in ends] == [EvacuationOutcome.SUCCEEDED]


@pytest.mark.parametrize("goes_on", [True, False])
def test_an_evacuation_that_only_a_success_shows_is_not_counted(*, goes_on: bool) -> None:
    """After a success the VMI is an evacuation's only if it is still marked when it is read."""
    store, ends = a_marked_store(eviction_requested_at=None)
    success = {"phase": "Succeeded", "finished": True, "outcome": Outcome.SUCCEEDED}
    store.put(a_vmim(start=NOW - 60, end=NOW - 30, handed_off=True, **success))
    store.put(Node(name="n1", schedulable=False))
    if goes_on:
        store.put(a_vmi(evacuation_node="n1", migratable=True))
    store.put(a_vmi())
    outcomes = [EvacuationOutcome.SUCCEEDED, EvacuationOutcome.CANCELLED]
    assert [end.outcome for end in ends] == outcomes[: 1 + goes_on]


def test_the_source_is_that_of_the_attempt() -> None:
    """The source of an end is the source of the evacuation."""
    store, ends = a_marked_store()
    store.put(a_vmi(**MARKED, evicted_by_descheduler=True))
    store.put(a_vmim(evacuates="n1", trigger=Trigger.EVACUATION))
    store.put(MOVED)
    assert [end.source for end in ends] == [Source.DESCHEDULER]


class TestRestart:
    """The history file has an evacuation."""

    def successor(self, now: float = NOW) -> tuple[ClockedStore, list[EvacuationEnd]]:
        """The store of the next process."""
        before, _ = a_marked_store()
        saved = before.save(UID)
        assert saved is not None
        store, ends = ClockedStore(saved, now=now), list[EvacuationEnd]()
        store.evacuations.record_end = ends.append
        return store, ends

    @pytest.mark.parametrize("vmi", [MOVED, a_vmi(), a_vmi(phase="Succeeded"), None])
    def test_it_ended_meanwhile(self, vmi: Any) -> None:
        """An evacuation that ended while this process did not run is not counted."""
        store, ends = self.successor()
        if vmi is not None:
            store.put(vmi)
        store.retain(Resource.VMIS, {NAMESPACE: {NAME}}, None)
        saved = store.save(UID)
        assert (saved is None or saved.marker is None, ends) == (True, [])

    def test_it_goes_on(self) -> None:
        """An evacuation that goes on ends once, and lasts since its request."""
        store, ends = self.successor()
        store.put(a_vmi(evacuation_node="n1"))
        assert ends == []
        store.put(MOVED)
        assert [(end.outcome, end.duration) for end in ends] == [(EvacuationOutcome.SUCCEEDED, 570)]

    def test_another_one_follows(self) -> None:
        """An evacuation that begins after the VMI was seen without one is new."""
        store, _ = self.successor()
        store.put(a_vmi())
        store.now = NOW + 5
        store.put(a_vmi(evacuation_node="n1"))
        assert store.evacuations.find_request(UID) == NOW + 5

    def test_another_one_began_meanwhile(self) -> None:
        """The saved evacuation is over if KubeVirt dates the present request much later."""
        store, ends = self.successor(NOW + 900)
        store.put(a_vmi(evacuation_node="n1", eviction_requested_at=NOW + 800))
        assert (store.evacuations.find_request(UID), ends) == (NOW + 800, [])
