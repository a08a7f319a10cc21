"""The requester of an evacuation, from the eviction that the webhook reviewed before."""

from typing import Any

import pytest

from exporter.engine.facts.changes import EvictionAdmitted
from exporter.engine.facts.evidence import (
    ASKED_WITHIN,
    Marker,
    RequestedThrough,
    SavedVmi,
)
from exporter.engine.facts.model import Eviction, EvictionRequester, Requester, Trigger
from exporter.engine.store.requesters import (
    SAME_REQUEST,
    VMIS_KEPT,
    Requesters,
    Source,
    find_requester,
    find_source,
    find_trigger,
    find_withdrawn,
)
from tests.support.builders import (
    NAME,
    NAMESPACE,
    NOW,
    UID,
    a_pod,
    a_state,
    a_store,
    a_vmi,
    a_vmim,
)
from tests.support.stores import ClockedStore


def admit(store: ClockedStore, user: str, at: float, pod: str = "virt-launcher-db1-x") -> None:
    """Let the webhook allow an eviction by this user."""
    store.apply(EvictionAdmitted(NAMESPACE, pod, user), at)


def mark(store: ClockedStore, at: float, **overrides: Any) -> None:
    """Let KubeVirt mark the VMI for evacuation."""
    store.now = at
    store.put(a_vmi(evacuation_node="n1", **overrides))


def requester_of(store: ClockedStore) -> Requester | None:
    """The requester of the only VMI's evacuation."""
    evidence = store.evidence(NAMESPACE, NAME)
    assert evidence is not None
    return evidence.requested_by


@pytest.fixture
def store() -> ClockedStore:
    """A VMI that is not marked, with its launcher pod."""
    return a_store(a_vmi(), a_pod(), now=NOW - 100)


LATE = ASKED_WITHIN + 1


@pytest.mark.parametrize(
    ("asked", "marked", "user"),
    [
        pytest.param({"alice": 0.0}, [(0.2, None)], "alice", id="counts-once-it-is-marked"),
        pytest.param({"alice": 0.7}, [(0.9, None), (1.1, 0.0)], "alice", id="its-date-follows"),
        pytest.param({"alice": 0.0, "bob": 1.0}, [(2.0, None)], "alice", id="the-first-counts"),
        pytest.param({"alice": 0.0}, [(ASKED_WITHIN, None)], "alice", id="marked-at-last"),
        pytest.param({"alice": 0.0}, [(LATE, None)], None, id="came-to-nothing"),
        pytest.param({"alice": 0.0, "bob": LATE}, [(LATE + 1, None)], "bob", id="the-next-counts"),
        pytest.param({"bob": 0.0}, [(1.0, -2 * ASKED_WITHIN)], None, id="began-long-before"),
    ],
)
def test_who_asked(
    store: ClockedStore,
    asked: dict[str, float],
    marked: list[tuple[float, float | None]],
    user: str | None,
) -> None:
    """The first user counts whose eviction was reviewed shortly before KubeVirt marked the VMI."""
    for name, at in asked.items():
        admit(store, name, NOW + at)
        assert requester_of(store) is None
    for at, dated in marked:
        mark(store, NOW + at, eviction_requested_at=None if dated is None else NOW + dated)
    admit(store, "carol", store.now + 1)
    assert requester_of(store) == (None if user is None else Requester(NOW + asked[user], user))


def test_an_evacuation_that_is_requested_anew(store: ClockedStore) -> None:
    """A new evacuation has its own requester, or none."""
    admit(store, "alice", NOW)
    mark(store, NOW + 1, eviction_requested_at=NOW)
    admit(store, "carol", NOW + 2)
    store.put(a_vmi())
    admit(store, "bob", NOW + 5)
    mark(store, NOW + 6, eviction_requested_at=NOW + 5)
    assert requester_of(store) == Requester(NOW + 5, "bob")
    mark(store, NOW + 7, eviction_requested_at=NOW + 7)
    assert requester_of(store) is None


def test_it_ends_with_the_evacuation(store: ClockedStore) -> None:
    """After a success there is no requester, and no marker to store."""
    admit(store, "alice", NOW)
    mark(store, NOW)
    store.put(a_vmi(node="n2", migration=a_state(end=NOW + 60)))
    assert requester_of(store) is None
    saved = store.save(UID)
    assert saved is None or saved.marker is None


@pytest.mark.parametrize(
    "pod",
    [
        a_pod(name="other", node="n2"),
        a_pod(name="other", phase="Succeeded"),
        a_pod(name="other", vmi_uid="unknown"),
    ],
    ids=["target", "finished", "not ours"],
)
def test_pods_for_which_kubevirt_marks_nothing(store: ClockedStore, pod: Any) -> None:
    """The eviction of a target pod, of a finished pod or of another VMI's pod is no request."""
    store.put(pod)
    admit(store, "alice", NOW, pod="other")
    mark(store, NOW)
    assert requester_of(store) is None


def test_requests_are_no_news(store: ClockedStore) -> None:
    """A request alone does not count as a change of the store."""
    assert store.apply(EvictionAdmitted(NAMESPACE, "virt-launcher-db1-x", "alice"), NOW) == 0


def test_the_memory_is_bounded() -> None:
    """The number and the age of the stored requests are bounded."""
    requesters = Requesters()
    for number in range(VMIS_KEPT + 1):
        requesters.record(f"u{number}", Requester(NOW, "alice"))
    assert requesters.take("u0", NOW) is None
    assert requesters.take("u1", NOW) == Requester(NOW, "alice")
    requesters.record("later", Requester(NOW + 1, "alice"))
    assert requesters.take("u2", NOW + ASKED_WITHIN + 1) is None
    assert len(requesters._first) == 1  # noqa: SLF001
    assert requesters.take("later", NOW + ASKED_WITHIN + 1) == Requester(NOW + 1, "alice")


def test_the_source_of_a_drain_by_a_taint() -> None:
    """A taint is no descheduler's request, and nobody withdraws it by an EvictionRequest."""
    marker = Marker(node="n1", requested_at=NOW, seen_at=NOW, through=RequestedThrough.TAINT)
    assert find_source(a_vmi(evicted_by_descheduler=True), (), marker, None) is Source.OTHER
    gone: Any = {"failed": "CanceledDueToNoRequesters", "created": NOW, "failed_at": NOW}
    withdrawn = EvictionRequester("example.com/drain", "Withdrawn")
    names: Any = dict.fromkeys(("namespace", "name", "uid", "pod", "pod_uid"), "e")
    eviction = Eviction(**names, **gone, requesters=(withdrawn,))
    assert find_withdrawn(marker, eviction) == ()
    marker.through = RequestedThrough.EVICTION
    assert find_withdrawn(marker, eviction) == ("example.com/drain",)


@pytest.mark.parametrize(
    ("vmim", "vmi", "trigger"),
    [
        ({"trigger": Trigger.WORKLOAD_UPDATE}, {"hotplugs": True}, Trigger.HOTPLUG),
        ({"trigger": Trigger.WORKLOAD_UPDATE}, {}, Trigger.WORKLOAD_UPDATE),
        (
            {"trigger": Trigger.WORKLOAD_UPDATE, "finished": True},
            {"hotplugs": True},
            Trigger.WORKLOAD_UPDATE,
        ),
        ({"trigger": Trigger.MANUAL}, {"hotplugs": True}, Trigger.MANUAL),
    ],
)
def test_a_hotplug_is_known_while_it_lasts(vmim: Any, vmi: Any, trigger: Trigger) -> None:
    """Only an unfinished workload update of a VMI that hotplugs is a hotplug."""
    assert find_trigger(a_vmim(**vmim), a_vmi(**vmi)) is trigger


def test_the_user_of_a_manual_migration() -> None:
    """The user who made a manual VMIM is its requester; a VMIM of KubeVirt has none."""
    manual = {"created": NOW, "trigger": Trigger.MANUAL}
    asked = find_requester(a_vmim(**manual, modified_by="alice"), None)
    assert asked == Requester(NOW, "alice")
    assert find_requester(a_vmim(**manual), None) is None
    evacuation = a_vmim(created=NOW, trigger=Trigger.EVACUATION, modified_by="virt-controller")
    assert find_requester(evacuation, None) is None


@pytest.mark.parametrize(
    ("created", "belongs"),
    [(-SAME_REQUEST - 0.1, False), (-SAME_REQUEST, True), (0.0, True), (600.0, True)],
)
def test_an_attempt_belongs_to_the_request_before_it(created: float, belongs: bool) -> None:
    """An attempt has the evacuation's requester unless it is clearly older than the request."""
    alice = Requester(NOW, "alice")
    marker = Marker(node="n1", requested_at=NOW, seen_at=NOW, asked_by=alice)
    attempt = a_vmim(trigger=Trigger.EVACUATION, evacuates="n1", created=NOW + created)
    assert find_requester(attempt, marker) == (alice if belongs else None)


class TestRestart:
    """The history file has who requested the evacuation."""

    def restored(self, **marker: Any) -> ClockedStore:
        """The store of a process that finds the evacuation of alice in its history file."""
        fields: dict[str, Any] = {"node": "n1", "requested_at": NOW, "seen_at": NOW} | marker
        saved = Marker(asked_by=Requester(fields["seen_at"] - 1, "alice"), **fields)
        return ClockedStore(SavedVmi(uid=UID, namespace=NAMESPACE, marker=saved), now=NOW + 60)

    def test_the_evacuation_goes_on(self) -> None:
        """The requester is still known."""
        store = self.restored()
        mark(store, NOW + 60, eviction_requested_at=NOW)
        assert requester_of(store) == Requester(NOW - 1, "alice")

    def test_the_evacuation_before(self) -> None:
        """The requester of an earlier, cancelled evacuation does not count."""
        store = self.restored(requested_at=NOW - 900, seen_at=NOW - 900)
        mark(store, NOW + 60, eviction_requested_at=NOW)
        assert requester_of(store) is None
