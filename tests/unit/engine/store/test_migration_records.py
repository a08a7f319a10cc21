"""What the history has of each migration: where it went, why, and who asked for it."""

from typing import Any

import pytest

from exporter.engine.facts.changes import EvictionAdmitted
from exporter.engine.facts.history import Migration
from exporter.engine.facts.model import EndReason, Outcome, Requester, Resource, Trigger
from tests.support.builders import (
    NAME,
    NAMESPACE,
    NOW,
    a_pod,
    a_running_state,
    a_state,
    a_store,
    a_vmi,
    a_vmim,
    an_ended_vmim,
)
from tests.support.stores import ClockedStore


NODES = {"source_node": "n1", "target_node": "n2"}
FAILED = {"phase": "Failed", "outcome": Outcome.FAILED}


def record_of(store: ClockedStore) -> Migration:
    """The only record of the only VMI."""
    evidence = store.evidence(NAMESPACE, NAME)
    assert evidence is not None
    (record,) = evidence.history.records().values()
    return record


def test_a_manual_migration() -> None:
    """A VMIM gives the nodes, the trigger, the reason and its author; they outlive the VMIM."""
    vmim = an_ended_vmim(**FAILED, **NODES, failure=EndReason.LIBVIRT, modified_by="alice")
    store = a_store(a_vmi(), vmim)
    for is_deleted in (False, True):
        if is_deleted:
            assert store.remove(Resource.VMIMS, NAMESPACE, vmim.name)
        record = record_of(store)
        assert (record.source_node, record.target_node) == ("n1", "n2")
        assert (record.trigger, record.reason) == (Trigger.MANUAL, EndReason.LIBVIRT)
        assert record.requested_by == Requester(NOW - 120.0, "alice")


def test_a_vmi_alone() -> None:
    """A VMI without its VMIM gives the nodes and the reason, but no trigger."""
    record = record_of(a_store(a_vmi(node="n2", migration=a_state(**NODES))))
    assert (record.source_node, record.target_node) == ("n1", "n2")
    assert (record.trigger, record.reason, record.requested_by) == (None, EndReason.NONE, None)


def test_a_running_migration() -> None:
    """A migration that has not ended has no reason yet."""
    running = a_vmi(migration=a_running_state(**NODES))
    record = record_of(a_store(running, a_vmim(phase="Running", handed_off=True)))
    assert (record.target_node, record.trigger, record.reason) == ("n2", Trigger.MANUAL, None)


def test_a_hotplug() -> None:
    """A workload update of a VMI with a hotplug condition is a hotplug, also after its end."""
    update = {"trigger": Trigger.WORKLOAD_UPDATE, "handed_off": True}
    store = a_store(a_vmi(hotplugs=True), a_vmim(phase="Running", **update))
    store.put(a_vmi())
    store.put(an_ended_vmim(**update))
    assert record_of(store).trigger is Trigger.HOTPLUG


@pytest.mark.parametrize(
    ("attempt", "user"),
    [
        ({"evacuates": "n1"}, "bob"),
        ({"evacuates": "n9"}, None),
        ({"evacuates": "n1", "created": NOW - 400.0}, None),
        ({"evacuates": "n1", "created": None}, None),
    ],
    ids=["own", "another-node", "an-earlier-one", "undated"],
)
def test_the_requester_of_an_evacuation(attempt: dict[str, Any], user: str | None) -> None:
    """A migration of an evacuation has the user who asked for that, also when it is over."""
    store = a_store(a_vmi(), a_pod(), now=NOW - 300.0)
    store.apply(EvictionAdmitted(NAMESPACE, "virt-launcher-db1-x", "bob"), NOW - 130.0)
    store.now = NOW - 129.0
    store.put(a_vmi(evacuation_node="n1"))
    made = {"trigger": Trigger.EVACUATION, "created": NOW - 120.0} | attempt
    store.put(a_vmim(phase="Scheduled", handed_off=True, **made))
    store.put(a_vmi(node="n2", migration=a_state(**NODES, start=NOW - 90.0, end=NOW - 60.0)))
    store.put(an_ended_vmim(**made, start=NOW - 90.0, end=NOW - 60.0))
    record = record_of(store)
    assert record.trigger is Trigger.EVACUATION
    assert (record.requested_by.user if record.requested_by else None) == user


def test_the_author_of_a_vmim_of_kubevirt_is_no_requester() -> None:
    """KubeVirt's own VMIMs are annotated with its service account, which asked for nothing."""
    made = {"trigger": Trigger.EVACUATION, "evacuates": "n1", "modified_by": "system:sa:kubevirt"}
    assert record_of(a_store(a_vmi(), an_ended_vmim(**made))).requested_by is None


def test_a_vm_that_stopped_during_its_migration() -> None:
    """The source is lost if the VM has stopped when the failure is first read, but not later."""
    stopped, failed = a_vmi(phase="Failed"), an_ended_vmim(**FAILED)
    assert record_of(a_store(stopped, failed)).reason is EndReason.SOURCE_LOST
    store = a_store(a_vmi(), failed)
    store.put(stopped)
    store.put(an_ended_vmim(**FAILED, **NODES))
    assert record_of(store).reason is EndReason.OTHER


def test_a_target_that_was_lost() -> None:
    """If the target pod is gone, KubeVirt writes an end that equals the start."""
    failed = an_ended_vmim(**FAILED, start=NOW - 600.0, end=NOW - 600.0)
    assert record_of(a_store(a_vmi(), failed)).reason is EndReason.TARGET_LOST
