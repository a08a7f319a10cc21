"""Which reasons the store holds for a VMI, for how long, and in which order."""

from itertools import permutations

import pytest
from msgspec.structs import replace

from exporter.engine.facts.model import (
    DRAIN_TAINT,
    Fact,
    Node,
    Resource,
    Taint,
    Vmi,
    Why,
    WhySource,
)
from tests.support.builders import NOW, a_pod, a_store, a_vmi, a_vmim
from tests.support.stores import ClockedStore


EVACUATING = a_vmi(evacuation_node="n1")
TARGET = a_pod(name="target", uid="p2", node="", migration_uid="m1", ready=False)
WAITING = a_vmim(evacuates="n1")
FAILED = a_vmim(evacuates="n1", phase="Failed", finished=True, finished_at=NOW - 10.0)
STAYS = Why(WhySource.LIVE_MIGRATABLE, "DisksNotLiveMigratable", "PVC disk is not shared")
FULL = Why(WhySource.POD_SCHEDULED, "Unschedulable", "0/3 nodes are available", NOW - 60.0)
PULL = Why(WhySource.TARGET_CONTAINER, "ImagePullBackOff", "Back-off pulling image")
FAILURE = Why(WhySource.FAILED_ATTEMPT, "Scheduling", "after Pending 1s, Scheduling 5m", NOW - 10.0)


def put(store: ClockedStore, fact: Fact, *reasons: Why) -> None:
    """Put an object with its reasons, as the watch does."""
    store.put(fact, reasons)


def reasons(store: ClockedStore) -> tuple[Why, ...]:
    """The reasons of the VMI."""
    return store.reasons(a_vmi())


def count_reasons(store: ClockedStore) -> int:
    """The number of entries in the table of reasons."""
    table = vars(vars(store)["_reasons"])
    return len(table["_present"]) + sum(map(len, table["_past"].values()))


@pytest.fixture
def store() -> ClockedStore:
    """An empty store."""
    return a_store(now=NOW)


def test_those_of_the_vmi_its_attempts_and_their_pods(store: ClockedStore) -> None:
    """Reasons come from the VMI, its VMIMs and pods; reasons without a date come first."""
    put(store, EVACUATING, STAYS)
    put(store, FAILED, FAILURE)
    put(store, TARGET, FULL)
    assert reasons(store) == (STAYS, FAILURE, FULL)


def test_a_later_version_replaces_them(store: ClockedStore) -> None:
    """A new version of an object replaces its reasons."""
    put(store, EVACUATING, STAYS)
    put(store, TARGET, FULL)
    put(store, EVACUATING)
    put(store, TARGET, PULL)
    assert reasons(store) == (PULL,)


def test_the_cause_outlives_its_pod(store: ClockedStore) -> None:
    """The reasons of a deleted target pod stay until the VM has moved."""
    put(store, EVACUATING)
    put(store, WAITING)
    put(store, TARGET, FULL, PULL)
    store.remove(Resource.PODS, "shop", "target")
    put(store, FAILED, FAILURE)
    put(store, a_vmim(name="mig-2", uid="m2", evacuates="n1"))
    put(store, replace(EVACUATING, phase="Running"))
    dated = Why(PULL.source, PULL.reason, PULL.message, NOW)
    assert reasons(store) == (dated, FAILURE, FULL)

    put(store, a_vmi(node="n2"))
    assert reasons(store) == ()


def test_a_deletion_that_is_over_is_no_reason(store: ClockedStore) -> None:
    """Of a target pod that was deleted, only what was wrong with it before is remembered."""
    put(store, EVACUATING)
    put(store, WAITING)
    put(
        store,
        replace(TARGET, deleted_at=NOW + 30.0),
        FULL,
        Why(WhySource.TARGET_CONTAINER, "Terminating", "target is being deleted"),
        Why(WhySource.DELETION, "DeletionByTaintManager", "the launcher pod is being deleted"),
    )
    store.remove(Resource.PODS, "shop", "target")
    assert reasons(store) == (FULL,)


def test_the_reasons_of_deleted_objects_end_with_the_evacuation(store: ClockedStore) -> None:
    """A later evacuation of the VMI does not have the reasons of an earlier one."""
    put(store, EVACUATING)
    put(store, WAITING)
    put(store, replace(TARGET, phase="Failed"), PULL)
    assert reasons(store) == (PULL,)
    store.remove(Resource.PODS, "shop", "target")
    put(store, a_vmi())
    store.now += 1.0
    put(store, EVACUATING)
    assert reasons(store) == ()


@pytest.mark.parametrize(
    ("begin", "cancel"),
    [
        pytest.param(EVACUATING, a_vmi(), id="eviction"),
        pytest.param(Node(name="n1", taints=(Taint(DRAIN_TAINT),)), Node(name="n1"), id="taint"),
    ],
)
def test_a_cancelled_evacuation_leaves_the_reasons_of_repeated_failures(
    store: ClockedStore, begin: Fact, cancel: Fact
) -> None:
    """They say why the VM's last migrations failed, as after a restart; those of others go."""
    put(store, a_vmi(eviction_strategy="LiveMigrate", migratable=True))
    put(store, begin)
    put(store, WAITING)
    put(store, TARGET, PULL)
    store.remove(Resource.PODS, "shop", "target")
    put(store, FAILED)
    put(store, cancel)
    assert count_reasons(store) == 0

    put(store, begin)
    for name, uid in (("mig-1", "m1"), ("mig-2", "m2")):
        put(store, replace(FAILED, name=name, uid=uid), FAILURE)
    put(store, cancel)
    assert reasons(store) == (FAILURE,)
    put(store, a_vmim(name="mig-3", uid="m3", phase="Succeeded", finished=True))
    assert count_reasons(store) == 0


def test_a_deleted_vmim_is_remembered_too(store: ClockedStore) -> None:
    """The reasons of a deleted VMIM stay during the evacuation."""
    put(store, EVACUATING)
    put(store, FAILED, FAILURE)
    store.remove(Resource.VMIMS, "shop", "mig-1")
    assert reasons(store) == (FAILURE,)


def test_idle_vmis_have_none(store: ClockedStore) -> None:
    """For a VMI that is not evacuating, the store has no reasons of finished attempts."""
    put(store, EVACUATING)
    put(store, FAILED, FAILURE)
    put(store, a_vmi())
    assert (reasons(store), count_reasons(store)) == ((), 0)

    put(store, FAILED, FAILURE)
    assert count_reasons(store) == 0


def test_the_reasons_of_a_user_s_move_end_with_its_success(store: ClockedStore) -> None:
    """The reasons of a move without an evacuation outlive a failed attempt, but not a success."""
    put(store, a_vmi())
    put(store, a_vmim())
    put(store, TARGET, FULL)
    store.remove(Resource.PODS, "shop", "target")
    put(store, a_vmim(phase="Failed", finished=True))
    put(store, a_vmim(name="mig-2", uid="m2"))
    assert reasons(store) == (FULL,)
    put(store, a_vmim(name="mig-2", uid="m2", phase="Succeeded", finished=True))
    assert (reasons(store), count_reasons(store)) == ((), 0)


@pytest.mark.parametrize("vmi", [EVACUATING, a_vmi()], ids=["evacuating", "moved-by-its-user"])
@pytest.mark.parametrize("order", list(permutations("imp")), ids="".join)
def test_whatever_comes_first(store: ClockedStore, vmi: Vmi, order: tuple[str, ...]) -> None:
    """Reasons do not depend on the order in which VMI, VMIM and target pod are read."""
    for kind in order:
        match kind:
            case "i":
                put(store, vmi)
            case "m":
                put(store, a_vmim())
            case _:
                put(store, TARGET, FULL)
    assert reasons(store) == (FULL,)


def test_what_has_ended_may_be_read_before_its_vmi(store: ClockedStore) -> None:
    """A failed VMIM and its target pod give reasons to a VMI that is read later."""
    put(store, replace(TARGET, phase="Failed"), PULL)
    put(store, FAILED, FAILURE)
    put(store, EVACUATING)
    assert reasons(store) == (PULL, FAILURE)


def test_the_finished_pod_of_an_idle_vmi_gives_none(store: ClockedStore) -> None:
    """A target pod that has ended gives no reason to a VMI that is not being moved."""
    put(store, a_vmi())
    put(store, replace(TARGET, phase="Failed"), PULL)
    assert count_reasons(store) == 0


def test_the_finished_pod_of_an_unknown_vmi_gives_none(store: ClockedStore) -> None:
    """A pod that is no target and has ended gives no reason, if its VMI is not there."""
    put(store, replace(TARGET, migration_uid="", phase="Failed"), PULL)
    assert count_reasons(store) == 0


def test_the_deletion_of_the_vm_s_own_pod_is_a_reason(store: ClockedStore) -> None:
    """The VM ends with its own pod, so the pod is no target that terminates."""
    ends = Why(WhySource.DELETION, "Terminating", "the pod is being deleted", NOW)
    goes = Why(WhySource.TARGET_CONTAINER, "Terminating", "the pod is being deleted", NOW)
    put(store, EVACUATING)
    put(store, WAITING)
    put(store, a_pod(), ends, goes)
    put(store, TARGET, ends, goes)
    assert reasons(store) == (ends, goes)
    store.remove(Resource.PODS, "shop", TARGET.name)
    assert reasons(store) == (ends,)


def test_two_failures_give_reasons_without_a_request(store: ClockedStore) -> None:
    """From the second failed VMIM on, a VMI that nobody evacuates has the reason of the failure."""
    failed = {"phase": "Failed", "finished": True}
    put(store, a_vmi())
    put(store, a_vmim(**failed), FAILURE)
    assert reasons(store) == ()
    put(store, a_vmim(name="mig-2", uid="m2", **failed), FAILURE)
    put(store, a_vmi(phase="Running"))
    assert reasons(store) == (FAILURE,)


def test_the_pod_of_another_namespace_gives_none(store: ClockedStore) -> None:
    """A pod gives no reason to a VMI of another namespace."""
    put(store, EVACUATING)
    put(store, replace(TARGET, namespace="evil"), FULL)
    assert reasons(store) == ()
    store.remove(Resource.PODS, "evil", "target")
    assert reasons(store) == ()


def test_an_attempt_from_before_the_request_is_no_reason(store: ClockedStore) -> None:
    """Attempts from before the request give no reason."""
    put(store, a_vmi())
    put(store, FAILED, FAILURE)
    put(store, a_vmi(evacuation_node="n1", eviction_requested_at=NOW - 5.0))
    assert reasons(store) == ()
    put(store, FAILED, FAILURE)
    assert reasons(store) == ()
    store.remove(Resource.VMIMS, "shop", "mig-1")
    assert reasons(store) == ()
    at_the_request = replace(FAILURE, at=NOW - 5.0)
    put(store, FAILED, at_the_request)
    assert reasons(store) == (at_the_request,)


def test_a_list_of_idle_vmis_leaves_nothing(store: ClockedStore) -> None:
    """Reasons that were read before their VMI are dropped if the VMI is not evacuating."""
    put(store, FAILED, FAILURE)
    assert count_reasons(store) == 1
    put(store, a_vmi())
    assert count_reasons(store) == 0


def test_an_idle_vmi_says_why_it_stays(store: ClockedStore) -> None:
    """The reason of the condition LiveMigratable is listed even if the VMI is not evacuating."""
    word = Why(WhySource.LIVE_MIGRATABLE, "DisksNotLiveMigratable")
    put(store, a_vmi(), word)
    assert reasons(store) == (word,)


def test_a_vmi_that_goes_takes_its_reasons_along(store: ClockedStore) -> None:
    """The reasons of a deleted VMI are removed."""
    put(store, EVACUATING, STAYS)
    put(store, TARGET, FULL)
    store.remove(Resource.PODS, "shop", "target")
    other = a_vmi(uid="another", evacuation_node="n1")
    store.put(other)
    assert store.reasons(other) == reasons(store) == ()
    put(store, other, STAYS)
    store.remove(Resource.VMIS, "shop", "db1")
    assert count_reasons(store) == 0


def test_the_newest_eight_without_repetitions(store: ClockedStore) -> None:
    """At most eight reasons are listed; repeated messages and failures are listed once."""
    on_vmi = Why(WhySource.FAILED_ATTEMPT, "", "qemu crashed", NOW)
    on_vmim = Why(WhySource.FAILED_ATTEMPT, "", "qemu crashed (after Running 2m)", NOW)
    put(store, EVACUATING, STAYS, on_vmi)
    put(store, a_vmim(evacuates="n1", phase="Failed", finished=True), on_vmim)
    for age in range(1, 20):
        uid = f"m{age}"
        again = Why(FULL.source, FULL.reason, FULL.message, NOW - age)
        other = Why(WhySource.FAILED_ATTEMPT, "Scheduling", "", NOW - age)
        put(store, a_pod(name=uid, uid=uid, migration_uid=uid, ready=False), again, other)
    listed = reasons(store)

    assert listed[:2] == (STAYS, on_vmim)
    assert [why.at for why in listed if why.source is WhySource.POD_SCHEDULED] == [NOW - 1]
    assert len(listed) == 8
    assert on_vmi not in listed


def test_node_selectors_explain_the_scheduler_s_message(store: ClockedStore) -> None:
    """Node selectors are listed only if there is a message of the scheduler."""
    selector = Why(WhySource.POD_SCHEDULED, "NodeSelector", "zone=a")
    added = Why(WhySource.POD_SCHEDULED, "AddedNodeSelector", "disk=ssd")
    put(store, EVACUATING, selector)
    put(store, WAITING, added)
    assert reasons(store) == ()

    put(store, FAILED, FAILURE)
    put(store, a_vmim(name="mig-2", uid="m2", evacuates="n1"), added)
    put(store, TARGET, FULL, PULL)
    assert reasons(store) == (PULL, FAILURE, FULL, selector, added)


def test_node_selectors_follow_the_newest_message_of_the_scheduler(store: ClockedStore) -> None:
    """Node selectors are listed after the newest message of the scheduler."""
    selector = Why(WhySource.POD_SCHEDULED, "NodeSelector", "zone=a")
    older = replace(FULL, message="0/2 nodes are available", at=NOW - 600.0)
    put(store, EVACUATING, selector)
    put(store, TARGET, FULL, older)
    assert reasons(store) == (FULL, selector, older)


def test_reasons_change_no_verdict(store: ClockedStore) -> None:
    """New reasons alone do not count as a change, because they alter no verdict."""
    store.put(EVACUATING)
    assert not store.put(EVACUATING, (STAYS,))
