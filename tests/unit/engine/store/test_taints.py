"""Drains by KubeVirt's taint: when the evacuation of each VM of the node begins and ends."""

from typing import Any

import pytest

from exporter.engine.evacuations.conditions import Conditions, read_conditions
from exporter.engine.evacuations.diagnosis import Diagnosis
from exporter.engine.evacuations.drain import forecast_node
from exporter.engine.evacuations.drain_outcomes import DrainOutcome
from exporter.engine.facts.evidence import RequestedThrough, SavedVmi
from exporter.engine.facts.model import (
    DRAIN_TAINT,
    Instant,
    KubeVirtSettings,
    Node,
    Outcome,
    Pod,
    Resource,
    Taint,
    Vmi,
    Vmim,
)
from exporter.engine.facts.policy import Policy, StuckPolicy
from exporter.engine.facts.states import State
from exporter.engine.store.requesters import Source
from exporter.engine.store.tracker import ENDS_AFTER
from exporter.words.advice import choose_advice
from tests.support.builders import NOW, UID, a_pod, a_state, a_store, a_vmi, a_vmim
from tests.support.stores import ClockedStore, some_verdicts


TAINTED = NOW - 3600.0


def a_tainted(*, at: Instant | None = TAINTED, key: str = DRAIN_TAINT, **fields: Any) -> Node:
    """The node n1 with the taint that drains it."""
    return Node(name="n1", taints=(Taint(key, at),), **fields)


def a_movable(**fields: Any) -> Vmi:
    """A VMI of n1 that KubeVirt migrates if the node is drained."""
    return a_vmi(**{"eviction_strategy": "LiveMigrate", "migratable": True} | fields)


def an_attempt(number: int, *, created: Instant, phase: str = "Failed", **fields: Any) -> Vmim:
    """A VMIM that KubeVirt created to evacuate n1; a finished one ended 60 s later."""
    is_finished = phase in ("Failed", "Succeeded")
    ended = {"finished": True, "finished_at": created + 60.0} if is_finished else {}
    name = f"evac-{number}"
    fields = {"evacuates": "n1", **ended, **fields}
    return a_vmim(name=name, uid=name, created=created, phase=phase, **fields)


def see(store: ClockedStore) -> Conditions:
    """The conditions of the forecast at the store's present time."""
    return read_conditions(store, StuckPolicy(), store.trust, store.now)


def diagnose(store: ClockedStore) -> Diagnosis | None:
    """The diagnosis of the only evacuation, or None."""
    evacuating = list(store.evacuating())
    return see(store).diagnose(evacuating[0]) if evacuating else None


def diagnosed(store: ClockedStore) -> Diagnosis:
    """The diagnosis of the only evacuation, which must exist."""
    diagnosis = diagnose(store)
    assert diagnosis is not None
    return diagnosis


@pytest.mark.parametrize("node_is_first", [True, False])
def test_a_tainted_node_is_evacuated(*, node_is_first: bool) -> None:
    """Each VM of a tainted node that KubeVirt migrates is evacuating since the taint was added."""
    facts: list[Any] = [
        a_tainted(),
        a_movable(),
        *(an_attempt(n, created=TAINTED + n) for n in range(1, 4)),
    ]
    store = a_store(*(facts if node_is_first else facts[::-1]))
    diagnosis = diagnosed(store)
    assert (diagnosis.requested_at, diagnosis.through, diagnosis.source) == (
        TAINTED,
        RequestedThrough.TAINT,
        Source.OTHER,
    )
    assert (diagnosis.failed_attempts, diagnosis.stuck, diagnosis.tainted) == (3, True, True)
    forecast, (candidate,) = forecast_node(store, "n1", see(store))
    assert (candidate.outcome, forecast.can_be_emptied) == (DrainOutcome.FAILS, False)


NOT_DRAINED = {
    "other-key": (a_tainted(key="example.com/gpu"), {}),
    "external": (a_tainted(), {"eviction_strategy": "External"}),
    "none": (a_tainted(), {"eviction_strategy": "None"}),
    "if-possible": (
        a_tainted(),
        {"eviction_strategy": "LiveMigrateIfPossible", "migratable": False},
    ),
    "ended": (a_tainted(), {"phase": "Succeeded"}),
    "elsewhere": (a_tainted(), {"node": "n2"}),
    "not-running-yet": (a_tainted(), {"node": ""}),
}


@pytest.mark.parametrize(("node", "vmi"), NOT_DRAINED.values(), ids=NOT_DRAINED)
def test_kubevirt_migrates_no_others(node: Node, vmi: dict[str, Any]) -> None:
    """Only the VMs that KubeVirt migrates because of the taint are evacuating."""
    assert diagnose(a_store(node, a_movable(**vmi))) is None


def test_the_strategy_and_the_key_of_the_cluster_count() -> None:
    """The KubeVirt object names the taint, and the strategy of VMIs without one."""
    store = a_store(a_tainted(key="example.com/drain"), a_movable(eviction_strategy=""))
    assert diagnose(store) is None
    store.put(KubeVirtSettings(drain_taint="example.com/drain"))
    assert diagnose(store) is None
    store.put(KubeVirtSettings(drain_taint="example.com/drain", eviction_strategy="LiveMigrate"))
    assert diagnose(store) is not None
    store.remove(Resource.KUBEVIRTS, "", "")
    assert diagnose(store) is None


def test_it_ends_with_the_taint() -> None:
    """Without the taint, or without the node, nothing is evacuating."""
    store = a_store(a_tainted(), a_movable())
    assert diagnose(store) is not None
    store.put(Node(name="n1"))
    assert diagnose(store) is None
    store.put(a_tainted())
    assert diagnose(store) is not None
    store.retain(Resource.NODES, {"": {"n2"}}, None)
    assert diagnose(store) is None


def test_it_ends_when_the_vm_has_left() -> None:
    """A VM that has left the tainted node is no longer evacuating, and counts as left."""
    store = a_store(a_tainted(), a_movable(), a_movable(name="db2", uid="u2"), now=NOW)
    assert not store.drains.read()["n1"].left
    state = a_state(end=NOW - 5.0, outcome=Outcome.SUCCEEDED, source_node="n1")
    store.put(a_movable(node="n2", migration=state))
    assert [evidence.vmi.name for evidence in store.evacuating()] == ["db2"]
    assert store.drains.read()["n1"].left == {UID: NOW - 5.0}


@pytest.mark.parametrize(
    ("seen_open", "added", "requested_at", "failed"),
    [
        pytest.param(False, None, NOW - 900.0, 1, id="without-a-date-the-oldest-attempt-counts"),
        pytest.param(True, NOW - 950.0, NOW - 950.0, 1, id="its-date-counts-and-not-our-clock"),
        pytest.param(True, None, NOW, 0, id="older-attempts-belong-to-another-drain"),
    ],
)
def test_when_a_taint_was_added(
    seen_open: bool, added: Instant | None, requested_at: Instant, failed: int
) -> None:
    """A taint without `timeAdded` is as old as the oldest attempt, unless we saw it appear."""
    store = a_store(*([Node(name="n1")] if seen_open else []), now=NOW - 60.0)
    for fact in (a_movable(), an_attempt(1, created=NOW - 900.0)):
        store.put(fact)
    store.now = NOW
    store.put(a_tainted(at=added))
    diagnosis = diagnosed(store)
    assert (diagnosis.requested_at, diagnosis.failed_attempts) == (requested_at, failed)


def test_the_earlier_of_cordon_and_taint_begins_the_drain() -> None:
    """A node that is cordoned and tainted is drained since the first of the two."""
    for cordoned_at, since in ((TAINTED - 60.0, TAINTED - 60.0), (TAINTED + 60.0, TAINTED)):
        store = a_store(a_tainted(schedulable=False, cordoned_at=cordoned_at))
        assert store.drains.read()["n1"].since == since


def test_a_vm_that_comes_later_is_asked_later() -> None:
    """A VM that came to the node after the taint is evacuating since it came."""
    state = a_state(end=NOW - 100.0, outcome=Outcome.SUCCEEDED, source_node="n2")
    store = a_store(a_tainted(), a_movable(migration=state))
    assert diagnosed(store).requested_at == NOW - 100.0


def test_an_eviction_from_a_tainted_node() -> None:
    """An eviction from a tainted node continues its evacuation; neither can be cancelled."""
    store = a_store(a_tainted(), a_movable(), an_attempt(1, created=TAINTED + 60.0))
    store.put(a_movable(evacuation_node="n1", eviction_requested_at=NOW - 60.0))
    diagnosis = diagnosed(store)
    assert (diagnosis.through, diagnosis.tainted) == (RequestedThrough.EVICTION, True)
    assert (diagnosis.requested_at, diagnosis.failed_attempts) == (TAINTED, 1)
    store.put(Node(name="n1"))
    store.put(a_movable(evacuation_node="n1", eviction_requested_at=NOW - 60.0, phase="Running"))
    diagnosis = diagnosed(store)
    assert (diagnosis.tainted, diagnosis.requested_at) == (False, NOW - 60.0)


@pytest.mark.parametrize("evicted", [True, False])
def test_a_taint_that_was_left_behind(*, evicted: bool) -> None:
    """After an uncordon, the next step is to remove the taint, with the command that removes it."""
    asked = {"evacuation_node": "n1", "eviction_requested_at": TAINTED} if evicted else {}
    vmi = a_movable(**asked)
    store = a_store(a_tainted(schedulable=False), vmi, a_pod(), now=NOW - 60.0)
    assert not diagnosed(store).leftover
    store.now = NOW
    store.put(a_tainted(schedulable=True))
    diagnosis = diagnosed(store)
    if evicted:
        assert diagnosis.source is Source.UNKNOWN
    assert diagnosis.leftover
    advice = choose_advice(next(store.evacuating()), diagnosis, (), see(store))
    assert "Remove the taint kubevirt.io/drain from n1" in advice.sentence
    assert advice.command == "kubectl taint nodes n1 kubevirt.io/drain:NoSchedule-"


def test_a_taint_alone_is_no_left_over() -> None:
    """A taint on a node that nobody cordoned drains it, and is not left over."""
    store = a_store(now=NOW - 7200.0)
    store.retain(Resource.NODES, {"": {"n1"}}, None)
    store.now = NOW
    for fact in (a_tainted(), a_movable()):
        store.put(fact)
    assert not diagnosed(store).leftover


class TestNodesNotSeen:
    """Without permission for nodes, the attempts of KubeVirt show a drain by a taint."""

    def a_blind_store(self, *facts: Vmi | Vmim | Pod) -> ClockedStore:
        """A store that cannot see nodes."""
        store = a_store(now=NOW)
        store.hide(Resource.NODES)
        for fact in facts:
            store.put(fact)
        return store

    def test_attempts_show_it(self) -> None:
        """It begins with the oldest attempt for the VM's present node."""
        store = self.a_blind_store(
            an_attempt(1, created=NOW - 900.0),
            a_movable(),
            an_attempt(2, created=NOW - 60.0, phase="Pending"),
        )
        diagnosis = diagnosed(store)
        assert (diagnosis.requested_at, diagnosis.through) == (NOW - 900.0, RequestedThrough.TAINT)
        assert (diagnosis.failed_attempts, diagnosis.tainted) == (1, True)
        store.now = NOW + 86_400.0
        assert diagnose(store) is not None

    @pytest.mark.parametrize(
        "vmim",
        [
            an_attempt(1, created=NOW - 60.0, phase="Pending", evacuates="n2"),
            an_attempt(1, created=NOW - 60.0, phase="Pending", evacuates=""),
            an_attempt(1, created=NOW - 661.0),
        ],
        ids=["another-node", "no-evacuation", "ended-long-ago"],
    )
    def test_other_migrations_show_nothing(self, vmim: Vmim) -> None:
        """Only recent attempts to evacuate the VM's present node count."""
        assert diagnose(self.a_blind_store(a_movable(), vmim)) is None

    def test_several_end_one_after_the_other(self) -> None:
        """Each evacuation ends at its own time, and one by an eviction goes on."""
        store = self.a_blind_store(
            a_movable(),
            a_movable(name="db2", uid="u2"),
            an_attempt(1, created=NOW - 60.0),
            an_attempt(2, created=NOW - 30.0, vmi_name="db2"),
            a_movable(name="db3", uid="u3"),
            an_attempt(3, created=NOW - 9.0, vmi_name="db3"),
            a_movable(name="db4", uid="u4", evacuation_node="n1"),
        )
        left = []
        for at in (NOW + 599.0, NOW + 600.0, NOW + 629.0, NOW + 630.0, NOW + 651.0):
            store.now = at
            store.put(a_pod(name="other", uid=f"{at}", vmi_uid="other"))
            left.append([vm.vmi.name for vm in store.evacuating() if vm.vmi.name != "db4"])
        assert left == [["db1", "db2", "db3"], ["db2", "db3"], ["db2", "db3"], ["db3"], []]
        assert [evidence.vmi.name for evidence in store.evacuating()] == ["db4"]

    def test_a_new_attempt_keeps_it_open(self) -> None:
        """The next attempt continues the evacuation."""
        store = self.a_blind_store(a_movable(), an_attempt(1, created=NOW - 60.0))
        store.now = NOW + 300.0
        store.put(an_attempt(2, created=NOW + 300.0, phase="Pending"))
        store.now = NOW + 1200.0
        store.put(an_attempt(2, created=NOW + 300.0))
        assert diagnose(store) is None
        store.put(an_attempt(3, created=NOW + 1190.0, phase="Scheduling"))
        assert diagnose(store) is not None

    def test_a_success_ends_it(self) -> None:
        """Attempts before the newest success show nothing."""
        state = a_state(end=NOW - 10.0, outcome=Outcome.SUCCEEDED, source_node="n2")
        store = self.a_blind_store(
            a_movable(migration=state), an_attempt(1, created=NOW - 60.0, phase="Pending")
        )
        assert diagnose(store) is None

    def test_a_cancelled_eviction_is_no_drain(self) -> None:
        """The attempts of an eviction that was cancelled do not show a drain by a taint."""
        store = self.a_blind_store(
            a_movable(evacuation_node="n1"), an_attempt(1, created=NOW - 60.0, phase="Pending")
        )
        assert diagnose(store) is not None
        store.put(a_movable())
        assert diagnose(store) is None


class TestRestart:
    """The history file has evacuations by a taint too."""

    def save(self) -> SavedVmi:
        """What is saved of an evacuation with more failures than KubeVirt keeps VMIMs."""
        store = a_store(a_tainted(), a_movable())
        for number in range(1, 9):
            store.put(an_attempt(number, created=TAINTED + number))
            store.remove(Resource.VMIMS, "shop", f"evac-{number}")
        saved = store.save(UID)
        assert saved is not None
        assert saved.marker is not None
        return saved

    def test_the_nodes_come_last(self) -> None:
        """Failed attempts are not forgotten, although the nodes are listed after the VMIs."""
        saved = self.save()
        store = ClockedStore(saved, now=NOW, sees_nodes=None)
        store.put(a_movable())
        assert diagnose(store) is None
        assert store.save(UID) == saved
        store.put(a_tainted())
        store.hide()
        diagnosis = diagnosed(store)
        assert (diagnosis.requested_at, diagnosis.failed_attempts) == (TAINTED, 8)

    def test_the_taint_is_gone(self) -> None:
        """An evacuation whose taint was removed while the exporter was down is over."""
        store = ClockedStore(self.save(), now=NOW, sees_nodes=None)
        store.put(a_movable())
        store.hide()
        store.now = NOW + 60.0
        saved = store.save(UID)
        assert saved is None or saved.marker is None
        store.put(a_tainted(at=None))
        diagnosis = diagnosed(store)
        assert (diagnosis.failed_attempts, diagnosis.state) == (0, State.NO_MIGRATION)

    def test_only_attempts_show_it(self) -> None:
        """Without nodes, an attempt within ten minutes of the last one continues an evacuation."""
        for pause, failed_attempts in ((ENDS_AFTER - 1, 3), (ENDS_AFTER, 1)):
            before = ClockedStore(now=NOW, sees_nodes=False)
            before.put(a_movable())
            for number in (1, 2):
                before.put(an_attempt(number, created=NOW - 60.0))
            saved = before.save(UID)
            assert saved is not None
            store = ClockedStore(saved, now=NOW + pause, sees_nodes=False)
            store.put(a_movable())
            store.put(an_attempt(3, created=store.now - 60.0))
            assert diagnosed(store).failed_attempts == failed_attempts


def test_the_view_has_the_present_date_of_a_request() -> None:
    """A taint that gets a date, or a step of our clock, also changes the evidence of the view."""
    store = a_store(a_tainted(at=None), a_movable())
    view = some_verdicts(store, Policy())

    def check() -> None:
        (kept,), (present,) = view.list_unsettled(), store.evacuating()
        assert (kept.marker, kept.changed_at) == (present.marker, present.changed_at)

    check()
    store.put(a_tainted())
    check()
    store.shift(60.0)
    check()
    store.put(Node(name="n1"))
    assert view.list_unsettled() == []
