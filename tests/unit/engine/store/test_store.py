"""The facts of the cluster: which objects belong together, and when they are forgotten."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from exporter.engine.evacuations.diagnosis import diagnose
from exporter.engine.evacuations.situation import Backoff
from exporter.engine.facts.changes import (
    Change,
    Listed,
    NodesSeen,
    Notice,
    NoticeKind,
    Observed,
    Removed,
    Unreadable,
)
from exporter.engine.facts.evidence import Marker, SavedVmi
from exporter.engine.facts.history import Migration
from exporter.engine.facts.model import (
    CLUSTER_RESOURCES,
    DRAIN_TAINT,
    Budget,
    Checkpoint,
    Eviction,
    Fact,
    KubeVirtSettings,
    MigrationLimits,
    MigrationState,
    Node,
    Outcome,
    Pod,
    Resource,
    Taint,
    Trigger,
    Vmi,
    Vmim,
)
from exporter.engine.facts.policy import StuckPolicy, Verdict
from exporter.engine.facts.states import State
from exporter.engine.facts.trust import DEAD_AFTER, NamespaceTrust, Trust
from exporter.engine.store.load import RUNNING_PHASES
from tests.support.builders import (
    NAME,
    NAMESPACE,
    NOW,
    UID,
    a_cordon,
    a_migration,
    a_pod,
    a_policy,
    a_running_state,
    a_state,
    a_store,
    a_vmi,
    a_vmim,
    an_ended_vmim,
    an_evacuating_vmi,
)
from tests.support.sizes import soaked
from tests.support.stores import ClockedStore, put
from tests.support.verdicts import decide
from tests.unit.engine.facts.test_evidence import marker_of, seen


OLD = NOW - 86_400.0
"""The creation time of `a_vmi`."""


def records(store: ClockedStore) -> dict[str, Migration]:
    """The migration records of the VMI."""
    return seen(store).history.records()


def saved(uid: str) -> SavedVmi:
    """What the history file has of a VMI that migrated once."""
    return SavedVmi(uid=uid, namespace=NAMESPACE, migrations={"m1": a_migration()})


# --- VMIs


@pytest.mark.parametrize("resource", [Resource.VMIS, Resource.VMIMS, Resource.PODS], ids=str)
def test_a_late_deletion_of_another_uid(resource: Resource) -> None:
    """The late deletion of an earlier object with the same name deletes nothing."""
    store = a_store(a_vmi(), a_vmim(), a_pod())
    names = {Resource.VMIS: NAME, Resource.VMIMS: "mig-1", Resource.PODS: "virt-launcher-db1-x"}
    before = seen(store)
    store.remove(resource, NAMESPACE, names[resource], "another-uid")
    store.remove(resource, NAMESPACE, "no-such-name")
    assert seen(store) == before


# --- VMIMs


@pytest.mark.parametrize(
    ("created", "born", "belongs"),
    [
        pytest.param(OLD + 1, OLD, True, id="younger"),
        pytest.param(OLD, OLD, True, id="of-the-same-second"),
        pytest.param(OLD - 1, OLD, False, id="older"),
        pytest.param(None, OLD, True, id="vmim-without-creation"),
        pytest.param(OLD, None, True, id="vmi-without-creation"),
    ],
)
@pytest.mark.parametrize("vmi_first", [True, False], ids=["vmi-first", "vmim-first"])
def test_belonging_by_creation(
    created: float | None, born: float | None, *, belongs: bool, vmi_first: bool
) -> None:
    """A VMIM belongs to the VMI that it names, unless the VMIM is older than the VMI."""
    facts = [a_vmi(created=born), an_ended_vmim(created=created)]
    store = a_store(*(facts if vmi_first else reversed(facts)))
    assert list(records(store)) == (["m1"] if belongs else [])
    assert bool(seen(store).vmims) is belongs


@pytest.mark.parametrize(
    "vmi",
    [
        pytest.param(a_vmi(migration=a_state(uid="m1")), id="its-own-state"),
        pytest.param(a_vmi(migration=a_state(uid="m9"), other_uids=("m1",)), id="one-half"),
    ],
)
@pytest.mark.parametrize("vmi_first", [True, False], ids=["vmi-first", "vmim-first"])
def test_belonging_by_proof(vmi: Vmi, *, vmi_first: bool) -> None:
    """A VMIM whose UID was in a VMI's state belongs to that VMI, even if the VMIM is older."""
    facts = [vmi, an_ended_vmim(created=OLD - 50.0, start=OLD)]
    store = a_store(*(facts if vmi_first else reversed(facts)))
    assert records(store)["m1"].start == OLD
    store.put(replace(vmi, migration=MigrationState(uid="m10"), other_uids=()))
    store.put(an_ended_vmim(created=OLD - 50.0, start=OLD - 9.0))
    assert records(store)["m1"].start == OLD - 9.0


def test_proofs_are_bounded() -> None:
    """Only the latest migration UIDs of a VMI are stored."""
    store = a_store(*(a_vmi(migration=MigrationState(uid=f"m{n}")) for n in range(9)), keep=2)
    old, new = (an_ended_vmim(name=uid, uid=uid, created=OLD - 1.0) for uid in ("m6", "m7"))
    store.put(old)
    store.put(new)
    assert [vmim.uid for vmim in seen(store).vmims] == ["m7"]


def test_a_proof_that_is_seen_again_is_the_newest() -> None:
    """A migration UID that is seen again counts as the newest, so it is kept."""
    states = [MigrationState(uid=uid) for uid in ("m1", "m2", "m1", "m3")]
    store = a_store(*(a_vmi(migration=state) for state in states), keep=2)
    for uid in ("m1", "m2"):
        store.put(an_ended_vmim(name=uid, uid=uid, created=OLD - 1.0))
    assert [vmim.uid for vmim in seen(store).vmims] == ["m1"]


def test_an_attempt_that_failed_before_its_hand_off() -> None:
    """A VMIM that was never handed off is not in the history."""
    failed = a_vmim(phase="Failed", finished=True, finished_at=NOW, outcome=Outcome.FAILED)
    store = a_store(a_vmi(), failed)
    assert records(store) == {}
    assert seen(store).vmims == (failed,)


def test_a_deleted_vmim() -> None:
    """A deleted VMIM is no longer pending, and its record stays."""
    store = a_store(a_vmi(), an_ended_vmim(), a_vmim(name="mig-2", uid="m2"))
    assert seen(store).unfinished() is not None
    store.remove(Resource.VMIMS, NAMESPACE, "mig-2", "m2")
    assert seen(store).unfinished() is None
    store.remove(Resource.VMIMS, NAMESPACE, "mig-1")
    assert seen(store).vmims == ()
    assert list(records(store)) == ["m1"]


def test_a_vmim_recreated_under_its_name() -> None:
    """A VMIM with a known name but another UID is another VMIM."""
    store = a_store(a_vmi(), an_ended_vmim(), an_ended_vmim(uid="m2", end=NOW - 60.0))
    assert sorted(records(store)) == ["m1", "m2"]
    assert [vmim.uid for vmim in seen(store).vmims] == ["m2"]


@pytest.mark.parametrize(
    ("moves", "visible", "namesakes"),
    [
        ([], True, []),
        ([a_vmim()], True, ["m0"]),
        ([an_ended_vmim()], True, []),
        ([an_evacuating_vmi(age=60.0)], True, ["m0"]),
        ([an_evacuating_vmi(age=60.0)], False, []),
    ],
    ids=["rests", "migrates", "migrated", "evacuates", "VMIMs invisible"],
)
def test_the_vmims_of_an_earlier_vmi(
    moves: list[Fact], visible: bool, namesakes: list[str]
) -> None:
    """VMIMs of an earlier VMI of that name are evidence while the VMI moves or is to move."""
    older = a_vmim(name="mig-0", uid="m0", created=NOW - 2 * 86_400.0)
    store = a_store(a_vmi(), older, *moves)
    hidden = frozenset[Resource]() if visible else frozenset({Resource.VMIMS})
    evidence = store.evidence(NAMESPACE, NAME, Trust(NamespaceTrust(hidden=hidden)))
    assert evidence is not None
    assert [vmim.uid for vmim in evidence.namesakes] == namesakes


def test_a_vmim_that_names_another_vmi() -> None:
    """A VMIM is pending for the VMI that it names now, and for no other VMI."""
    store = a_store(a_vmi(), a_vmi(name="db2", uid="2"), a_vmim(), a_vmim(vmi_name="db2"))
    assert seen(store).vmims == ()
    assert [vmim.uid for vmim in seen(store, "db2").vmims] == ["m1"]


def test_a_deleted_vmim_is_proven_later() -> None:
    """A deleted VMIM counts as soon as the VMI's `migrationState` has the VMIM's UID."""
    store = a_store(an_ended_vmim(created=OLD - 50.0))
    store.remove(Resource.VMIMS, NAMESPACE, "mig-1")
    store.put(a_vmi())
    assert records(store) == {}
    store.put(a_vmi(migration=MigrationState(uid="m1")))
    assert records(store)["m1"].end == NOW - 600.0


def test_a_deleted_vmim_is_the_next_ones() -> None:
    """A deleted VMIM also counts for a recreated VMI that was created before the VMIM."""
    store = a_store(a_vmi(), an_ended_vmim(created=NOW - 700.0))
    store.remove(Resource.VMIMS, NAMESPACE, "mig-1")
    store.put(a_vmi(migration=MigrationState(uid="m0")))
    store.put(a_vmi(uid="new", created=NOW - 800.0))
    assert list(records(store)) == ["m1"]


def test_what_waits_is_bounded() -> None:
    """The number of deleted VMIMs that wait for one VMI is bounded."""
    store = a_store(keep=2)
    for number in range(4):
        store.put(an_ended_vmim(name=f"mig-{number}", uid=f"m{number}"))
        store.remove(Resource.VMIMS, NAMESPACE, f"mig-{number}")
    store.put(a_vmi())
    assert sorted(records(store)) == ["m2", "m3"]


def test_a_vmim_moves_to_the_vmi_that_was_seen_late() -> None:
    """A VMIM moves to a recreated VMI that is older than the VMIM but was read later."""
    store = a_store(a_vmi(), a_vmim(created=NOW - 10.0, handed_off=True, phase="Scheduled"))
    store.put(a_vmim(created=NOW - 10.0, handed_off=True, phase="Running"))
    assert seen(store).vmims != ()
    store.put(a_vmi(uid="new", created=NOW - 20.0))
    assert [vmim.phase for vmim in seen(store).vmims] == ["Running"]
    assert list(records(store)) == ["m1"]


@pytest.mark.parametrize(
    ("created", "born"),
    [
        pytest.param(NOW - 30.0, NOW - 20.0, id="older-than-the-new-one"),
        pytest.param(NOW - 20.0, NOW - 20.0, id="finished-of-the-same-second"),
        pytest.param(None, NOW - 20.0, id="no-creation"),
        pytest.param(NOW - 10.0, None, id="vmi-without-creation"),
    ],
)
def test_a_vmim_stays_bound(created: float | None, born: float | None) -> None:
    """A finished VMIM moves to a new VMI only if that VMI is known to be older than the VMIM."""
    store = a_store(a_vmi(), an_ended_vmim(created=created), a_vmi(uid="new", created=born))
    assert seen(store).vmims == ()
    assert records(store) == {}


def test_an_unfinished_vmim_of_the_same_second_moves() -> None:
    """An unfinished VMIM created in the same second as the new VMI belongs to that VMI."""
    store = a_store(a_vmi(), a_vmim(created=NOW - 20.0), a_vmi(uid="new", created=NOW - 20.0))
    assert [vmim.uid for vmim in seen(store).vmims] == ["m1"]


def test_a_proven_vmim_stays_bound() -> None:
    """A VMIM whose UID was in the VMI's state stays with that VMI, whatever the creation times."""
    store = a_store(a_vmi(migration=MigrationState(uid="m1")), a_vmim(created=NOW - 10.0))
    store.put(a_vmi(uid="new", created=NOW - 20.0))
    assert seen(store).vmims == ()


# --- pods


@pytest.mark.parametrize(
    ("pods", "current"),
    [
        pytest.param([], None, id="none"),
        pytest.param([a_pod()], "virt-launcher-db1-x", id="one"),
        pytest.param([a_pod(vmi_uid="another")], None, id="of-another-vmi"),
        pytest.param([a_pod(namespace="other")], None, id="of-another-namespace"),
        pytest.param([a_pod(node="n2")], None, id="on-another-node"),
        pytest.param(
            [a_pod(name="b", created=NOW), a_pod(name="c", created=NOW - 9.0)], "b", id="newest"
        ),
        pytest.param([a_pod(name="b", created=None), a_pod(name="c")], "c", id="unknown-creation"),
        pytest.param(
            [a_pod(name="b"), a_pod(name="c", phase="Succeeded")], "b", id="running-before-ended"
        ),
        pytest.param([a_pod(name="b"), a_pod(name="c")], "c", id="by-name-at-last"),
    ],
)
def test_the_current_launcher(pods: list[Pod], current: str | None) -> None:
    """The current launcher is the newest pod of the VMI on the VMI's node."""
    for order in (pods, pods[::-1]):
        launcher = seen(a_store(a_vmi(), *order)).launcher
        assert (launcher and launcher.name) == current


def test_pods_change_and_go() -> None:
    """The current launcher is up to date after a pod changes, changes its VMI or is deleted."""
    store = a_store(a_vmi(), a_pod(), a_pod(eviction_in_progress=True))
    assert seen(store).launcher == a_pod(eviction_in_progress=True)
    store.put(a_pod(vmi_uid="another"))
    assert seen(store).launcher is None
    store.put(a_pod())
    store.remove(Resource.PODS, NAMESPACE, "virt-launcher-db1-x", "uid-of-pod")
    assert seen(store).launcher is None


def test_a_pod_of_another_namespace_changes_nothing() -> None:
    """A pod does not belong to a VMI of another namespace."""
    store = a_store(a_vmi(evacuation_node="n1"), a_pod(), now=NOW)
    before = seen(store)
    foreign = a_pod(namespace="other", created=NOW, eviction_in_progress=True)
    store.put(foreign)
    assert seen(store) == before
    assert store.find_pod("other", foreign.name) is None
    assert before.pods == (a_pod(),)
    assert before.marker is not None
    assert before.marker.lacking_since == NOW
    store.put(a_pod(namespace="other", vmi_uid="another"))
    store.remove(Resource.PODS, "other", foreign.name)
    assert seen(store) == before


@pytest.mark.parametrize(
    ("pod", "known"),
    [
        pytest.param(a_pod(), True, id="its-launcher"),
        pytest.param(a_pod(name="another"), False, id="another-name"),
        pytest.param(a_pod(vmi_uid="another"), False, id="of-no-vmi"),
    ],
)
def test_the_vmi_of_a_pod(pod: Pod, *, known: bool) -> None:
    """The store finds a pod and its VMI by the pod's name, if both exist."""
    store = a_store(a_vmi(), pod)
    pair = store.find_pod(NAMESPACE, "virt-launcher-db1-x")
    assert pair == ((pod, seen(store).vmi) if known else None)


def test_pods_that_may_not_be_seen() -> None:
    """A VMI has no launcher without permission for pods, or if the VMI has no node."""
    store = a_store(a_vmi(), a_vmi(name="db2", uid="2", node=""), a_pod(vmi_uid="2", node=""))
    assert seen(store, "db2").launcher is None
    store.put(a_pod())
    store.hide(Resource.PODS)
    assert seen(store).launcher is None


# --- limits and lists


def test_objects_are_counted() -> None:
    """Objects are counted by resource."""
    budget = Budget(namespace=NAMESPACE, name="none", forbids=True)
    others = (a_pod(), KubeVirtSettings(), a_cordon(), budget)
    filled = a_store(a_vmi(), a_vmim(), a_vmim(name="mig-2"), *others)
    assert [a_store().count(resource) for resource in CLUSTER_RESOURCES] == [0] * 6
    assert [filled.count(resource) for resource in CLUSTER_RESOURCES] == [1, 2, 1, 1, 1, 1]


def test_a_vmim_is_found_by_its_name() -> None:
    """The store has the last version of each VMIM."""
    store = a_store(a_vmim(), a_vmim(phase="Scheduled"))
    assert store.vmim(NAMESPACE, "mig-1") == a_vmim(phase="Scheduled")
    assert store.vmim(NAMESPACE, "mig-2") is None


def test_whose_a_vmim_is() -> None:
    """The owner of a VMIM is the VMI that it names, unless that is younger or unknown."""
    store = a_store(a_vmi())
    assert store.find_owner(a_vmim()) == a_vmi()
    assert store.find_owner(a_vmim(created=OLD - 1)) is None
    assert store.find_owner(a_vmim(vmi_name="unknown")) is None


def test_whether_nodes_are_seen_is_news_once() -> None:
    """A lost or new permission for nodes is a change, and the same one is none."""
    store = a_store()
    assert [store.apply(NodesSeen(seen=seen), NOW) for seen in (False, False, True)] == [1, 0, 1]


def test_limits() -> None:
    """The limits are known while the KubeVirt object exists; the same limits are no news."""
    store = a_store(KubeVirtSettings(MigrationLimits(3, 2)))
    assert store.put(KubeVirtSettings(MigrationLimits(3, 1)))
    assert not store.put(KubeVirtSettings(MigrationLimits(3, 1)))
    assert store.kubevirt == KubeVirtSettings(MigrationLimits(3, 1))
    store.retain(Resource.KUBEVIRTS, {"kubevirt": {"kubevirt"}}, None)
    assert store.kubevirt == KubeVirtSettings(MigrationLimits(3, 1))
    store.remove(Resource.KUBEVIRTS, "kubevirt", "kubevirt")
    assert store.kubevirt is None
    store.put(KubeVirtSettings(MigrationLimits(3, 1)))
    assert store.retain(Resource.KUBEVIRTS, {}, None) == 1
    assert store.kubevirt is None


@pytest.mark.parametrize("phase", ["Succeeded", "Failed"])
def test_vmis_are_counted_by_node(phase: str) -> None:
    """A VMI is counted on its node until it ends; a node without VMIs is not listed."""
    store = a_store(a_vmi(), a_vmi(name="db2", uid="2"), a_vmi(name="db3", uid="3", node="n2"))
    for vmi, nodes in (
        (a_vmi(name="db3", uid="3", node="n1"), {"n1": 3}),
        (a_vmi(name="db2", uid="new", node="n3"), {"n1": 2, "n3": 1}),
        (a_vmi(phase=phase), {"n1": 1, "n3": 1}),
        (a_vmi(phase=phase, node="n2"), {"n1": 1, "n3": 1}),
    ):
        store.put(vmi)
        assert dict(store.nodes) == nodes
    assert [vmi.name for vmi in store.vmis()] == [NAME, "db3", "db2"]
    assert [evidence.vmi.name for evidence in store.on_node("n1")] == ["db3"]
    assert store.on_node("n2") == []
    store.put(a_vmi(uid="new"))
    for name, nodes in (("db2", {"n1": 2}), ("db3", {"n1": 1}), (NAME, {})):
        store.remove(Resource.VMIS, NAMESPACE, name)
        assert dict(store.nodes) == nodes


PHASES = ("", "Pending", "Scheduling", "Scheduled", "Running", "Succeeded", "Failed")


LOADED: list[Vmim | Pod | tuple[Resource, str]] = [
    *(a_vmim(name=f"mig-{i}", uid=f"m{i}", phase=phase) for i in (1, 2, 3) for phase in PHASES),
    *(a_pod(name=name, migration_uid=uid) for name in "ab" for uid in ("", "m1", "m2")),
    *((Resource.VMIMS, f"mig-{i}") for i in (1, 2, 3)),
    *((Resource.PODS, name) for name in "ab"),
]


@given(st.lists(st.sampled_from(LOADED), max_size=20))
def test_the_load_is_that_of_all_that_is_there(
    news: list[Vmim | Pod | tuple[Resource, str]],
) -> None:
    """Migrations are counted as KubeVirt counts them."""
    store = a_store(a_vmi(), KubeVirtSettings())
    there: dict[str, Vmim | Pod] = {}
    for change in news:
        if isinstance(change, tuple):
            store.remove(change[0], NAMESPACE, change[1])
            there.pop(change[1], None)
        else:
            store.put(change)
            there[change.name] = change
    targets = {pod.migration_uid for pod in there.values() if isinstance(pod, Pod)}
    running = sum(
        vmim.phase in RUNNING_PHASES or (vmim.phase == "Pending" and vmim.uid in targets)
        for vmim in there.values()
        if isinstance(vmim, Vmim)
    )
    load = store.load()

    assert load is not None
    assert (load.running, load.outbound.get("n1", 0)) == (running, running)


@pytest.mark.parametrize("namespace", [None, NAMESPACE], ids=["all", "one-namespace"])
def test_a_list_replaces(namespace: str | None) -> None:
    """Objects that a list lacks are removed, but only in the namespace of the list."""
    store = a_store()
    for where in (NAMESPACE, "elsewhere"):
        put(store, a_vmi(namespace=where), a_vmi(namespace=where, name="db2", uid="2"))
        put(store, a_vmim(namespace=where), a_pod(namespace=where, vmi_uid="2"))
    kept = {NAMESPACE: {NAME}} | ({"elsewhere": {NAME}} if namespace is None else {})
    gone = 1 if namespace else 2
    assert store.retain(Resource.VMIS, kept, namespace) == gone
    assert store.retain(Resource.VMIMS, {}, namespace) == gone
    assert store.retain(Resource.PODS, {}, namespace) == gone
    assert len(store.keys()) == (3 if namespace else 2)
    assert seen(store).vmims == ()


EVICTION = Eviction(namespace=NAMESPACE, name="e", uid="e", pod=a_pod().name, pod_uid=a_pod().uid)


@pytest.mark.parametrize(
    ("change", "is_news"),
    [
        pytest.param(Observed(a_vmi()), False, id="same-vmi"),
        pytest.param(Observed(a_vmim()), False, id="same-vmim"),
        pytest.param(Observed(a_pod()), False, id="same-pod"),
        pytest.param(Removed(Resource.VMIS, NAMESPACE, "none"), False, id="no-such-vmi"),
        pytest.param(Removed(Resource.EVICTIONS, NAMESPACE, "none"), False, id="no-such-eviction"),
        pytest.param(Observed(EVICTION), True, id="eviction"),
        pytest.param(Observed(a_vmi(node="n2")), True, id="vmi"),
        pytest.param(Observed(a_vmim(phase="Scheduled")), True, id="vmim"),
        pytest.param(Observed(a_pod(phase="Failed")), True, id="pod"),
        pytest.param(Observed(a_pod(vmi_uid="another")), True, id="another-vmis-pod"),
        pytest.param(Removed(Resource.VMIS, NAMESPACE, NAME), True, id="vmi-gone"),
        pytest.param(Removed(Resource.VMIMS, NAMESPACE, "mig-1"), True, id="vmim-gone"),
        pytest.param(Removed(Resource.PODS, NAMESPACE, a_pod().name), True, id="pod-gone"),
        pytest.param(Unreadable(Resource.VMIS, NAMESPACE, NAME), True, id="vmi-unreadable"),
        pytest.param(NodesSeen(seen=True), False, id="nodes-seen-as-before"),
    ],
)
def test_what_is_news(change: Change, *, is_news: bool) -> None:
    """A change that could alter an answer is counted, and subscribers are notified."""
    store = a_store(a_vmi(), a_vmim(), a_pod())
    notices: list[Notice] = []
    store.subscribe(notices.append, *NoticeKind)
    assert (bool(store.apply(change, NOW)), bool(notices)) == (is_news, is_news)


@pytest.mark.parametrize(
    ("change", "uids"),
    [
        pytest.param(Observed(a_vmi()), {"gone", "elsewhere"}, id="read"),
        pytest.param(Listed(Resource.VMIS, {}, NAMESPACE), {"elsewhere"}, id="not-listed"),
        pytest.param(Listed(Resource.VMIS, {}, None), set(), id="listed-nowhere"),
        pytest.param(Listed(Resource.VMIMS, {}, None), {UID, "gone", "elsewhere"}, id="vmims"),
    ],
)
def test_what_is_saved_is_kept_until_its_vmi_is_listed(change: Change, uids: set[str]) -> None:
    """What the history file has waits for its VMI, or for a complete list without that VMI."""
    elsewhere = replace(saved("elsewhere"), namespace="elsewhere")
    store = ClockedStore(saved(UID), saved("gone"), elsewhere)
    store.apply(change, NOW)
    assert store.awaited.keys() == uids
    assert all(store.save(uid) for uid in uids)


def test_a_whole_migration() -> None:
    """From the VMIM's creation to the end of the cooldown the VMI is always blocked."""
    store = a_store(a_vmi(migration=a_state(uid="m0", end=NOW - 5_000.0, start=NOW - 5_060.0)))

    def reason() -> str:
        return decide(seen(store), a_policy(), NOW).reason or ""

    story: list[tuple[Fact, str]] = [
        (a_vmim(), "migration_in_progress"),
        (a_vmim(phase="Scheduled", handed_off=True), "migration_in_progress"),
        (a_vmi(migration=MigrationState(uid="m1")), "migration_in_progress"),
        (a_vmi(migration=a_running_state()), "migration_in_progress"),
        (a_vmi(migration=a_state(end=NOW - 1.0), node="n2"), "migration_in_progress"),
        (an_ended_vmim(end=None, start=None, created=NOW - 120.0), "cooldown"),
        (an_ended_vmim(end=NOW - 1.0, created=NOW - 120.0), "cooldown"),
    ]
    assert reason() == ""
    for fact, expected in story:
        store.put(fact)
        assert reason() == expected
    assert len(seen(store).history) == 2


def test_the_backoff_counts_the_failures_of_an_earlier_vmi_of_that_name() -> None:
    """The backoff also counts failed VMIMs of an earlier VMI with the same name."""
    store = a_store(a_vmi(uid="old", migration=MigrationState(uid="m1")))
    failed = {"phase": "Failed", "finished": True, "finished_at": NOW}
    store.put(a_vmim(uid="m1", trigger=Trigger.WORKLOAD_UPDATE, **failed))
    store.put(a_vmi(evacuation_node="n1", created=NOW + 1, migratable=True))
    next_try = a_vmim(name="mig-2", uid="m2", created=NOW + 5, trigger=Trigger.EVACUATION)
    store.put(next_try)
    diagnosis = diagnose(seen(store), StuckPolicy(), store.load(), NOW + 6)
    assert diagnosis is not None
    assert (diagnosis.state, diagnosis.backoff) == (State.BACKOFF, Backoff(20.0, NOW + 20))
    assert diagnosis.failed_attempts == 0


@pytest.mark.parametrize(
    ("resource", "fact"),
    [(Resource.VMIS, a_vmi()), (Resource.VMIMS, a_vmim()), (Resource.PODS, a_pod())],
)
def test_an_object_that_cannot_be_read_any_more(resource: Resource, fact: Vmi | Vmim | Pod) -> None:
    """The evidence has the time since which an object has been invalid."""
    store = a_store(a_vmi(), a_vmim(), a_pod(), now=NOW)
    assert seen(store).unreadable == ()
    assert store.record_unreadable(resource, NAMESPACE, fact.name)
    assert seen(store).unreadable == ((resource, NOW),)
    store.put(fact)
    assert seen(store).unreadable == ()


@pytest.mark.parametrize(
    "fact",
    [
        pytest.param(a_vmi(migration=a_state()), id="has-migrated"),
        pytest.param(a_vmi(evacuation_node="n2"), id="marked"),
        pytest.param(a_vmi(deleted_at=NOW), id="deleted"),
        pytest.param(a_vmim(), id="vmim"),
        pytest.param(Node(name="n1", taints=(Taint(DRAIN_TAINT),)), id="node-tainted"),
        pytest.param(a_pod(name="other", uid="other"), id="two-pods"),
        pytest.param(a_pod(deleted_at=NOW), id="pod-deleted"),
        pytest.param(EVICTION, id="eviction"),
    ],
)
def test_who_is_idle(fact: Fact) -> None:
    """A VMI is idle until it is to move, or it or its pod is to end; so is one that has ended."""
    key, vmi = (NAMESPACE, NAME), a_vmi(eviction_strategy="LiveMigrate")
    store = a_store(vmi, a_pod())
    assert (store.is_idle(key), store.is_idle((NAMESPACE, "none"))) == (True, True)
    store.put(fact)
    assert not store.is_idle(key)
    store.put(a_vmi(phase="Failed"))
    assert store.is_idle(key)


def test_a_vmim_that_cannot_be_read_any_more_before_its_vmi_is_known() -> None:
    """An invalid VMIM stops blocking its VMI after `DEAD_AFTER`."""
    store = a_store(a_vmim(), now=NOW)
    assert store.record_unreadable(Resource.VMIMS, NAMESPACE, "mig-1")
    assert not store.record_unreadable(Resource.VMIMS, NAMESPACE, "mig-1")
    store.put(a_vmi())
    assert not decide(seen(store), a_policy(), NOW + DEAD_AFTER - 1).allowed
    assert decide(seen(store), a_policy(), NOW + DEAD_AFTER).allowed


# --- any order that a cluster can produce


News: TypeAlias = Vmi | Vmim | Removed | Unreadable


@dataclass
class Cluster:
    """The events of one VM, in the order in which KubeVirt writes them."""

    now: float = NOW - 40_000.0
    born: int = 0
    attempts: int = 0
    vmi: Vmi = field(default_factory=a_vmi)
    vmims: dict[str, Vmim] = field(default_factory=dict)
    news: list[News] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.create_vmi()

    def create_vmi(self) -> None:
        self.born += 1
        self.write(Vmi(namespace=NAMESPACE, name=NAME, uid=f"u{self.born}", created=self.now))

    def write(self, fact: Vmi | Vmim) -> None:
        self.news.append(fact)
        if isinstance(fact, Vmi):
            self.vmi = fact
        else:
            self.vmims[fact.name] = fact
        self.now += 7.0

    def change(self, vmim: Vmim, **changes: object) -> Vmim:
        changed = replace(vmim, **changes)
        self.write(changed)
        return changed

    def make_final(self, vmim: Vmim, phase: str, outcome: Outcome) -> Vmim:
        return self.change(vmim, phase=phase, finished=True, finished_at=self.now, outcome=outcome)

    def unfinished(self) -> Vmim | None:
        return next((vmim for vmim in self.vmims.values() if not vmim.finished), None)

    def attempt(self) -> Vmim:
        """The unfinished VMIM, or a new one if there is none."""
        if (vmim := self.unfinished()) is not None:
            return vmim
        self.attempts += 1
        number = self.attempts
        self.write(a_vmim(name=f"mig-{number}", uid=f"m{number}", created=self.now))
        return self.vmims[f"mig-{number}"]

    def hand_off(self) -> Vmim:
        """Empty the VMI's `migrationState` except for the UID."""
        vmim = self.attempt()
        if not vmim.handed_off:
            vmim = self.change(vmim, phase="Scheduled", handed_off=True)
            self.write(replace(self.vmi, migration=MigrationState(uid=vmim.uid)))
        return vmim

    def start(self) -> tuple[Vmim, float]:
        """Write the start of the migration."""
        vmim, state = self.hand_off(), self.vmi.migration
        assert state is not None
        if state.start is None:
            state = replace(state, start=self.now)
            self.write(replace(self.vmi, migration=state))
            vmim = self.change(vmim, phase="Running")
        assert state.start is not None
        return vmim, state.start

    def succeed(self, off: float = 0.0) -> None:
        """Write the end, then `completed`, and last the VMIM's copy of the state.

        `off`: how many seconds ahead the clock of the writing node is.
        """
        vmim, start = self.start()
        end = self.now + off
        state = MigrationState(uid=vmim.uid, start=start, ended=True, end=end)
        self.write(replace(self.vmi, migration=state, node=f"n{self.attempts}"))
        self.finish(vmim, replace(state, outcome=Outcome.SUCCEEDED), "Succeeded")

    def fail(self) -> None:
        """Write the end together with the failure."""
        self.end_badly(*self.start())

    def fail_unstarted(self) -> None:
        """Let a migration fail before its start, with equal start and end."""
        vmim = self.hand_off()
        if self.vmi.migration == MigrationState(uid=vmim.uid):
            self.end_badly(vmim, self.now)

    def end_badly(self, vmim: Vmim, start: float) -> None:
        """Let a migration that began at `start` fail."""
        state = a_state(uid=vmim.uid, start=start, end=self.now, outcome=Outcome.FAILED)
        self.finish(vmim, state, "Failed")

    def finish(self, vmim: Vmim, state: MigrationState, phase: str) -> None:
        """Write the VMI's end, then the VMIM's final phase, then its copy of the state."""
        self.write(replace(self.vmi, migration=state))
        vmim = self.make_final(vmim, phase, state.outcome)
        self.change(vmim, start=state.start, end=state.end)

    def lose_the_end(self) -> None:
        """Finish the VMIM, without an end on the VMI."""
        vmim, _ = self.start()
        self.make_final(vmim, "Failed", Outcome.FAILED)

    def spoil(self, resource: Resource) -> None:
        """Make the VMI or its unfinished VMIM invalid."""
        vmim = self.unfinished()
        if resource is Resource.VMIS:
            self.news.append(Unreadable(resource, NAMESPACE, NAME))
        elif vmim is not None:
            self.news.append(Unreadable(resource, NAMESPACE, vmim.name))

    def fail_early(self) -> None:
        """Fail the VMIM before hand-off, without a change of the VMI."""
        vmim = self.attempt()
        if not vmim.handed_off:
            self.make_final(vmim, "Failed", Outcome.FAILED)

    def become_a_zombie(self) -> None:
        """Fail the VMIM after hand-off; the VMI's `migrationState` stays empty."""
        vmim = self.hand_off()
        if self.vmi.migration == MigrationState(uid=vmim.uid):
            self.make_final(vmim, "Failed", Outcome.FAILED)

    def give_up(self) -> None:
        if (vmim := self.unfinished()) is not None:
            self.delete(vmim)

    def collect(self) -> None:
        finished = (vmim for vmim in self.vmims.values() if vmim.finished)
        if (vmim := next(finished, None)) is not None:
            self.delete(vmim)

    def delete(self, vmim: Vmim) -> None:
        del self.vmims[vmim.name]
        self.news.append(Removed(Resource.VMIMS, NAMESPACE, vmim.name, vmim.uid))
        self.now += 3.0

    def recreate(self) -> None:
        """Recreate the VM, and delete the unfinished VMIM of the old VM."""
        self.news.append(Removed(Resource.VMIS, NAMESPACE, NAME, self.vmi.uid))
        self.now += 2.0
        left = self.unfinished()
        self.create_vmi()
        if left is not None:
            failed = self.change(left, phase="Failed", finished=True, finished_at=self.now)
            self.delete(failed)


STEPS: dict[str, Callable[[Cluster], object]] = {
    "succeed": Cluster.succeed,
    "fail": Cluster.fail,
    "fail unstarted": Cluster.fail_unstarted,
    "fail early": Cluster.fail_early,
    "zombie": Cluster.become_a_zombie,
    "wait": Cluster.attempt,
    "hand off": Cluster.hand_off,
    "start": Cluster.start,
    "give up": Cluster.give_up,
    "recreate": Cluster.recreate,
    "collect": Cluster.collect,
    "succeed by a slow clock": lambda cluster: cluster.succeed(-7200.0),
    "succeed by a fast clock": lambda cluster: cluster.succeed(7200.0),
    "lose the end": Cluster.lose_the_end,
    "spoil the VMI": lambda cluster: cluster.spoil(Resource.VMIS),
    "spoil the VMIM": lambda cluster: cluster.spoil(Resource.VMIMS),
}
RNGS = st.integers(0, 2**32).map(random.Random)
LOSSLESS = sorted(STEPS.keys() - {"collect", "spoil the VMI", "spoil the VMIM"})
"""Steps after which the final objects still show everything that counts for a verdict."""


def lived(steps: list[str]) -> Cluster:
    """A cluster after these steps."""
    cluster = Cluster()
    for step in steps:
        STEPS[step](cluster)
    return cluster


def deliver(store: ClockedStore, news: News) -> None:
    """Apply one event of a watch."""
    store.apply(Observed(news) if isinstance(news, Vmi | Vmim) else news, store.now)


class Stream:
    """The watch of one resource, up to the event that was read last."""

    def __init__(self, resource: Resource, news: list[News], rng: random.Random) -> None:
        self.resource = resource
        self.news = news
        self.rng = rng
        self.read = 0

    def step(self, store: ClockedStore, *, lossy: bool) -> None:
        """Read an event, read events again, relist, or miss events and relist."""
        match self.rng.randrange(8):
            case 0:
                self.read_again(store)
            case 1:
                self.relist(store)
            case 2 if lossy:
                self.read = min(len(self.news), self.read + self.rng.randint(1, 6))
                self.relist(store)
            case _ if self.read < len(self.news):
                deliver(store, self.news[self.read])
                self.read += 1
            case _:
                pass

    def read_again(self, store: ClockedStore) -> None:
        """Read the last events again, but none from before a deletion."""
        again: list[News] = []
        for news in reversed(self.news[max(0, self.read - self.rng.randint(0, 4)) : self.read]):
            if isinstance(news, Removed):
                break
            again.append(news)
        for news in reversed(again):
            deliver(store, news)

    def relist(self, store: ClockedStore) -> None:
        """Read a complete list of the present objects."""
        there: dict[str, Vmi | Vmim | Unreadable] = {}
        for news in self.news[: self.read]:
            if isinstance(news, Removed):
                there.pop(news.name, None)
            else:
                there[news.name] = news
        listed = list(there.values())
        self.rng.shuffle(listed)
        for news in listed:
            deliver(store, news)
        store.retain(self.resource, {NAMESPACE: there.keys()}, None)


def watched(cluster: Cluster, rng: random.Random, *, lossy: bool) -> ClockedStore:
    """A store after two watches have read all events, each at its own speed."""
    store = a_store()
    vmis: list[News] = []
    vmims: list[News] = []
    for news in cluster.news:
        is_vmi = isinstance(news, Vmi) or (not isinstance(news, Vmim) and news.name == NAME)
        (vmis if is_vmi else vmims).append(news)
    streams = [Stream(Resource.VMIS, vmis, rng), Stream(Resource.VMIMS, vmims, rng)]
    while any(stream.read < len(stream.news) for stream in streams):
        rng.choice(streams).step(store, lossy=lossy)
        if rng.randrange(10) == 0:
            rng.shuffle(streams)
            for _ in range(rng.randrange(12)):
                streams[0].step(store, lossy=lossy)
    return store


def verdicts_of(store: ClockedStore, cluster: Cluster) -> list[Verdict]:
    """The verdicts after these events, under several policies and at several times."""
    return [
        decide(seen(store), policy, cluster.now + later, checkpoint=checkpoint)
        for policy in (
            a_policy(),
            a_policy(count_failed_migrations=False),
            a_policy(guard_pending_migrations=False, migration_history_window=120.0),
        )
        for later in (0.0, 60.0, 1_000.0)
        for checkpoint in Checkpoint
    ]


@soaked(10_000)
@given(
    steps=st.lists(st.sampled_from(sorted(STEPS)), max_size=14),
    rng=RNGS,
)
def test_any_interleaving_of_two_watches(steps: list[str], rng: random.Random) -> None:
    """Any interleaving and repetition of the events of two watches gives the same verdicts."""
    cluster = lived(steps)
    in_order = a_store()
    for news in cluster.news:
        deliver(in_order, news)
    store = watched(cluster, rng, lossy=False)
    assert verdicts_of(store, cluster) == verdicts_of(in_order, cluster)
    assert seen(store).history.endings(cluster.now) == seen(in_order).history.endings(cluster.now)


@given(steps=st.lists(st.sampled_from(sorted(STEPS)), max_size=14), rng=RNGS)
def test_asking_after_every_news_changes_nothing(steps: list[str], rng: random.Random) -> None:
    """Computing verdicts after each event does not change the final answers."""
    cluster = lived(steps)
    asked, unasked = a_store(), a_store()
    pods = [a_pod(vmi_uid=cluster.vmi.uid, eviction_in_progress=on) for on in (True, False)]
    for news in cluster.news:
        for store in (asked, unasked):
            deliver(store, news)
        if rng.randrange(3) == 0:
            hidden, pod = rng.choice(((), (Resource.VMIMS,))), rng.choice(pods)
            for store in (asked, unasked):
                store.hide(*hidden)
                store.put(pod)
        if asked.evidence(NAMESPACE, NAME) is not None:
            verdicts_of(asked, cluster)
    if asked.evidence(NAMESPACE, NAME) is not None:
        kept, fresh = seen(asked), seen(unasked)
        assert verdicts_of(asked, cluster) == verdicts_of(unasked, cluster)
        assert (kept.vmi, kept.vmims, kept.trust) == (fresh.vmi, fresh.vmims, fresh.trust)
        assert (kept.launcher, kept.pods) == (fresh.launcher, fresh.pods)


@given(
    steps=st.lists(st.sampled_from(LOSSLESS), max_size=14),
    rng=RNGS,
)
def test_a_final_list_says_it_all(steps: list[str], rng: random.Random) -> None:
    """After missed events and a relist, the verdicts depend only on the listed objects."""
    cluster = lived(steps)
    final: list[Fact] = [cluster.vmi, *cluster.vmims.values()]
    rng.shuffle(final)
    assert verdicts_of(watched(cluster, rng, lossy=True), cluster) == verdicts_of(
        a_store(*final), cluster
    )


@given(
    before=st.lists(st.sampled_from(sorted(STEPS)), max_size=10),
    rng=RNGS,
)
def test_a_vm_recreated_starts_clean(before: list[str], rng: random.Random) -> None:
    """After any events a recreated VM has no history, and its eviction is allowed."""
    cluster = lived([*before, "recreate"])
    store = watched(cluster, rng, lossy=True)
    assert seen(store).vmi.uid == cluster.vmi.uid
    assert records(store) == {}
    assert decide(seen(store), a_policy(), cluster.now) == Verdict(known=True)


def count_entries(part: object) -> int:
    """The number of entries in all containers of a store and of its parts."""
    inside = vars(part).values()
    containers = sum(len(value) for value in inside if isinstance(value, dict | set | list))
    parts = (value for value in inside if hasattr(value, "__dict__") and not callable(value))
    return containers + sum(map(count_entries, parts))


@pytest.mark.parametrize("lives", [100, pytest.param(10_000, marks=pytest.mark.soak)])
def test_a_churn_leaves_nothing(lives: int, prove: Callable[[str], None]) -> None:
    """After all VMIs are deleted, every container of the store is empty."""
    store, rng = a_store(keep=4), random.Random(lives)
    most = 0
    for life in range(lives):
        cluster = Cluster(born=100 * life, attempts=100 * life)
        for step in rng.choices(sorted(STEPS), k=14):
            STEPS[step](cluster)
        for news in cluster.news:
            deliver(store, news)
        most = max(most, count_entries(store))
        store.record_unreadable(Resource.VMIS, NAMESPACE, NAME)
        store.remove(Resource.VMIS, NAMESPACE, NAME)
        for name in cluster.vmims:
            store.remove(Resource.VMIMS, NAMESPACE, name)
    left = count_entries(store)
    prove(f"churn of the store: {lives} lives, {most} entries at most, {left} at last")
    assert most < 50
    assert left == 0


def test_an_unchanged_vmi_was_seen_without_a_marker() -> None:
    """A marker's `not_before` is the last time at which the VMI was read without a marker, even if
    the VMI had not changed.
    """
    store = a_store(a_vmi(), now=NOW)
    store.now = NOW + 60
    store.put(a_vmi())
    store.now = NOW + 120
    store.put(a_vmi(evacuation_node="n1"))
    assert marker_of(store).not_before == NOW + 60


def test_a_saved_request_from_before_a_success_is_not_the_present_one() -> None:
    """A request that the history file dates before a success counts from its first sight on."""
    marker = Marker(node="n1", requested_at=NOW - 200, seen_at=NOW - 50)
    store = ClockedStore(SavedVmi(uid=UID, namespace=NAMESPACE, marker=marker), now=NOW)
    store.put(a_vmi(evacuation_node="n1", migration=a_state(end=NOW - 100)))
    assert marker_of(store).requested_at == NOW - 50


def test_an_object_that_can_be_read_again_is_a_change() -> None:
    """An object that can be read again counts as a change once, even if it is unchanged."""
    store = a_store(a_vmi(), a_vmi(name="db2", uid="2"))
    store.apply(Unreadable(Resource.VMIS, NAMESPACE, NAME, UID), NOW)
    others = store.apply(Observed(a_vmi(name="db2", uid="2")), NOW)
    again = [store.apply(Observed(a_vmi()), NOW) for _ in range(2)]
    assert (others, again) == (0, [1, 0])


def test_a_change_of_a_vmi_has_its_instant() -> None:
    """`changed_at` is the time of the VMI's last change, not of the last time it was read."""
    store = a_store(a_vmi())
    store.now += 60.0
    store.put(a_vmi(phase="Running"))
    store.now += 60.0
    store.put(a_vmi(phase="Running"))
    assert seen(store).changed_at == store.now - 60.0


def test_a_step_of_our_clock_moves_what_it_has_dated() -> None:
    """After our clock was set, the changes of a VMI are as long ago as before."""
    store = a_store(a_vmi(migration=a_running_state()), now=NOW)
    store.shift(-60.0)
    assert (seen(store).changed_at, seen(store).handed_off_at) == (NOW - 60.0, NOW - 60.0)


@pytest.mark.parametrize(("uid", "kept"), [(UID, UID), ("another", "another"), ("", UID)])
def test_a_vmi_that_cannot_be_read_is_known_by_its_uid(uid: str, kept: str) -> None:
    """An invalid VMI with a new UID is a new VMI; otherwise the last facts count."""
    store = a_store(a_vmi(phase="Running"))
    store.apply(Unreadable(Resource.VMIS, NAMESPACE, NAME, uid), store.now)
    vmi = store.vmi((NAMESPACE, NAME))
    assert vmi is not None
    assert (vmi.uid, vmi.phase) == (kept, "Running" if kept == UID else "")
    assert store.vmi((NAMESPACE, "new")) is None
    store.apply(Unreadable(Resource.VMIS, NAMESPACE, "new", "u"), store.now)
    assert store.vmi((NAMESPACE, "new")) is not None


def test_a_migration_of_the_vmi_was_handed_off_when_it_was_seen() -> None:
    """A migration in `migrationState` was handed off; `handed_off_at` is when it was first seen."""
    store = a_store(a_vmi())
    store.now += 60.0
    store.put(a_vmi(migration=a_running_state()))
    store.now += 60.0
    store.put(a_vmi(migration=a_running_state(), phase="Running"))
    assert seen(store).handed_off_at == store.now - 60.0
    assert records(store)["m1"].handed_off


def test_a_saved_history_proves_whose_a_migration_is() -> None:
    """A VMIM older than a VMI belongs to that VMI if the history file says so."""
    old = SavedVmi(uid=UID, namespace=NAMESPACE, migrations={"old": a_migration()})
    store = ClockedStore(old)
    put(store, a_vmi(), a_vmim(uid="old", created=NOW - 90_000.0))
    assert [vmim.uid for vmim in seen(store).vmims] == ["old"]


def test_a_departure_is_dated_by_the_vmim_if_the_clock_of_the_node_is_wrong() -> None:
    """If the end in the VMI is an hour ahead, the VM left its node when its VMIM ended."""
    store = a_store(
        a_vmi(migration=a_state(end=NOW + 3600.0, source_node="n9")), KubeVirtSettings(), now=NOW
    )
    store.put(an_ended_vmim(uid="m1", end=None, finished_at=NOW - 5.0))
    load = store.load()
    assert load is not None
    assert load.departures == {"n9": NOW - 5.0}


@pytest.mark.parametrize("resource", [Resource.NODES, Resource.BUDGETS, Resource.EVICTIONS])
def test_an_unreadable_object_of_no_vm_is_no_news(resource: Resource) -> None:
    """Only VMIs, VMIMs and pods that cannot be read any more are kept and shown."""
    assert ClockedStore().record_unreadable(resource, NAMESPACE, NAME) == 0
