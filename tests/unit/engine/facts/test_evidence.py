"""The store's evidence of evacuations: request, failures and pods."""

from functools import partial
from itertools import permutations
from typing import Any

import pytest
from msgspec.structs import replace

from exporter.engine.facts.evidence import FAILURES_KEPT, OUTLIVES_AFTER, Evidence, Marker
from exporter.engine.facts.history import Migration
from exporter.engine.facts.model import (
    CLOCK_SKEW,
    EvictionRequester,
    Fact,
    KubeVirtSettings,
    MigrationLimits,
    MigrationState,
    Outcome,
    Pod,
    Resource,
    Trigger,
    Vmim,
)
from exporter.engine.facts.trust import DEAD_AFTER, NamespaceTrust, Trust
from exporter.engine.store.load import Load
from exporter.engine.store.store import Store
from tests.support.builders import (
    NAME,
    NAMESPACE,
    NOW,
    a_history,
    a_migration,
    a_pod,
    a_running_state,
    a_state,
    a_vmi,
    a_vmim,
    an_ended_vmim,
    an_eviction,
    some_evidence,
)
from tests.support.builders import a_store as a_new_store
from tests.support.stores import ClockedStore, a_trust, put


a_store = partial(a_new_store, now=NOW)


def marker_of(store: Store) -> Marker:
    """The marker of the only VMI, which must exist."""
    marker = seen(store).marker
    assert marker is not None
    return marker


def seen(store: Store, name: str = NAME) -> Evidence:
    """The evidence of a VMI, which must exist."""
    trust = store.trust if isinstance(store, ClockedStore) else Trust()
    evidence = store.evidence(NAMESPACE, name, trust)
    assert evidence is not None
    return evidence


def an_attempt(number: int, *, created: float | None, failed_at: float | None = None) -> Vmim:
    """A pending or failed VMIM that evacuates the VMI from n1."""
    return a_vmim(
        name=f"kubevirt-evacuation-{number}",
        uid=f"e{number}",
        created=created,
        evacuates="n1",
        trigger=Trigger.EVACUATION,
        phase="Pending" if failed_at is None else "Failed",
        finished=failed_at is not None,
        finished_at=failed_at,
        outcome=Outcome.UNKNOWN if failed_at is None else Outcome.FAILED,
    )


class TestRequest:
    """The time at which the evacuation was requested."""

    @pytest.mark.parametrize("vmi_first", [True, False], ids=["vmi-first", "vmims-first"])
    def test_oldest_attempt(self, *, vmi_first: bool) -> None:
        """Without the condition (before KubeVirt 1.7) the request dates from its oldest attempt."""
        store = a_store()
        facts: list[Fact] = [an_attempt(n, created=NOW - 100 * n) for n in (1, 3, 2)]
        facts.insert(0 if vmi_first else 3, a_vmi(evacuation_node="n1"))
        put(store, *facts)
        assert marker_of(store).requested_at == NOW - 300

    def test_attempts_of_an_older_evacuation(self) -> None:
        """Attempts before the newest success, or before the VMI was last read without a marker, are
        ignored.
        """
        store = a_store(a_vmi())
        store.put(an_ended_vmim(uid="ok", name="ok", end=NOW - 1000.0, finished_at=NOW - 999.0))
        put(store, a_vmi(migratable=True), at=NOW - 500)
        put(store, a_vmi(evacuation_node="n1"))
        put(store, *(an_attempt(n, created=NOW - ago) for n, ago in enumerate((2000, 700, 400))))
        assert marker_of(store).requested_at == NOW - 400

    @pytest.mark.parametrize("order", list(permutations("acs")), ids="".join)
    def test_any_order_of_attempts_and_success(self, order: tuple[str, ...]) -> None:
        """Attempts from before a success do not count, in any order of the events."""
        store = a_store(a_vmi(evacuation_node="n1"))
        stored = {
            "a": an_attempt(1, created=NOW - 300, failed_at=NOW - 250),
            "s": an_ended_vmim(uid="ok", name="ok", end=NOW - 150.0, finished_at=NOW - 149.0),
            "c": an_attempt(2, created=NOW - 60, failed_at=NOW - 50),
        }
        put(store, *(stored[key] for key in order))
        assert marker_of(store).requested_at == NOW - 60
        assert marker_of(store).failed_since_request() == 1

    def test_another_node(self) -> None:
        """A marker for another node is a new evacuation."""
        store = a_store(a_vmi(evacuation_node="n1"))
        store.put(an_attempt(1, created=NOW - 50, failed_at=NOW - 10))
        put(store, a_vmi(node="n2", evacuation_node="n2"), at=NOW + 60)
        assert marker_of(store).requested_at == NOW + 60
        assert marker_of(store).failed_since_request() == 0

    def test_cleared_and_set_again(self) -> None:
        """A marker that was cleared and set again is a new evacuation."""
        store = a_store(a_vmi(evacuation_node="n1"))
        put(store, a_vmi(), at=NOW + 10)
        assert seen(store).marker is None
        assert list(store.evacuating()) == []
        put(store, a_vmi(evacuation_node="n1"), at=NOW + 20)
        assert marker_of(store).requested_at == NOW + 20

    def test_requested_anew_in_a_gap(self) -> None:
        """A later transition of the condition is a new request."""
        store = a_store(a_pod(), a_vmi(evacuation_node="n1", eviction_requested_at=NOW - 5))
        store.put(an_attempt(1, created=NOW, failed_at=NOW + 20))
        put(store, a_vmi(evacuation_node="n1", eviction_requested_at=NOW + 30), at=NOW + 60)
        assert marker_of(store).requested_at == NOW + 30
        assert marker_of(store).seen_at == NOW + 60
        assert marker_of(store).lacking_since == NOW + 60
        assert marker_of(store).failed_since_request() == 0
        store.put(an_attempt(2, created=NOW + 31, failed_at=NOW + 40))
        assert marker_of(store).failed_since_request() == 1
        assert len(list(store.evacuating())) == 1

    def test_a_condition_that_has_gone(self) -> None:
        """If the condition is gone, the marker counts as cleared and set again."""
        store = a_store(a_vmi(evacuation_node="n1", eviction_requested_at=NOW - 500))
        put(store, a_vmi(evacuation_node="n1"), at=NOW + 60)
        assert marker_of(store).requested_at == NOW + 60
        put(store, a_vmi(evacuation_node="n1", eviction_requested_at=NOW + 55), at=NOW + 61)
        assert marker_of(store).requested_at == NOW + 55

    @pytest.mark.parametrize("ahead", [-2400.0, 120.0])
    def test_a_condition_that_comes_soon(self, ahead: float) -> None:
        """The date of the condition replaces the date from our own clock."""
        store = a_store()
        store.now = NOW + ahead - 1
        store.put(a_vmi())
        store.now += 1
        store.put(a_vmi(evacuation_node="n1"))
        store.put(an_attempt(1, created=NOW + 1, failed_at=NOW + 2))
        store.put(a_vmi(evacuation_node="n1", eviction_requested_at=NOW))
        assert marker_of(store).requested_at == NOW
        assert marker_of(store).failed_since_request() == 1
        store.now += 3600
        store.put(a_vmi(evacuation_node="n1", eviction_requested_at=NOW - 5))
        assert marker_of(store).requested_at == NOW - 5

    def test_a_condition_that_comes_late_and_is_earlier(self) -> None:
        """A condition that comes late counts if its date is earlier than the known request. An
        attempt without creation time gives no date.
        """
        store = a_store(a_vmi(evacuation_node="n1"), an_attempt(1, created=None))
        assert marker_of(store).requested_at == NOW
        put(store, a_vmi(evacuation_node="n1", eviction_requested_at=NOW - 450), at=NOW + 3600)
        assert marker_of(store).requested_at == NOW - 450

    @pytest.mark.parametrize("before", [None, NOW - 500], ids=["came", "unchanged"])
    def test_a_condition_that_is_no_new_request(self, before: float | None) -> None:
        """A condition that stays, or that an upgrade of KubeVirt adds, is not a new request."""
        store = a_store(a_vmi(evacuation_node="n1", eviction_requested_at=before))
        store.put(an_attempt(1, created=NOW - 400, failed_at=NOW - 300))
        marker = marker_of(store)
        at = NOW + 3000 if before is None else before
        again = a_vmi(evacuation_node="n1", eviction_requested_at=at, migratable=True)
        put(store, again, at=NOW + 3600)
        assert marker_of(store) is marker
        assert marker.requested_at == (NOW - 400 if before is None else before)
        assert marker.failed_since_request() == 1

    @pytest.mark.parametrize("shown_by", ["vmi", "vmim-first", "vmim-last"])
    def test_back_on_its_node_after_a_gap(self, shown_by: str) -> None:
        """Before KubeVirt 1.7, a success that is later than `seen_at` ends the evacuation."""
        store = a_store(a_vmi(evacuation_node="n1"))
        store.put(an_attempt(1, created=NOW + 1, failed_at=NOW + 20))
        success: dict[str, Any] = {"uid": "ok", "start": NOW + 90, "end": NOW + 100}
        moved = an_ended_vmim(name="ok", created=NOW + 80, finished_at=NOW + 101, **success)
        later = [
            an_attempt(2, created=NOW + 210, failed_at=NOW + 220),
            an_attempt(3, created=NOW + 200, failed_at=NOW + 205),
        ]
        state = MigrationState(ended=True, outcome=Outcome.SUCCEEDED, **success)
        vmi = a_vmi(
            evacuation_node="n1", migratable=True, migration=state if shown_by == "vmi" else None
        )
        store.now = NOW + 300
        facts: dict[str, list[Fact]] = {
            "vmi": [vmi, *later],
            "vmim-first": [moved, *later, vmi],
            "vmim-last": [vmi, *later, moved],
        }
        for fact in facts[shown_by]:
            store.put(fact)
        marker = marker_of(store)
        assert marker.requested_at == NOW + 200
        assert marker.failed_since_request() == 2
        assert (marker.seen_at, marker.not_before) == (NOW + 300, NOW + 100)
        put(store, vmi, an_attempt(4, created=NOW + 305), at=NOW + 310)
        assert marker_of(store) is marker

    def test_a_success_ahead_of_our_clock(self) -> None:
        """A success ahead of our clock ends an evacuation only once, not again with each event."""
        store = a_store(an_ended_vmim(uid="ok", name="ok", end=NOW + 100, finished_at=NOW + 101))
        store.put(a_vmi(evacuation_node="n1"))
        marker = marker_of(store)
        assert marker.requested_at == NOW
        put(store, a_vmi(evacuation_node="n1", migratable=True), at=NOW + 50)
        assert marker_of(store) is marker

    @pytest.mark.parametrize("phase", ["Succeeded", "Failed"])
    def test_a_vmi_that_has_ended(self, phase: str) -> None:
        """A VMI that has ended is not evacuating, although its `evacuationNodeName` stays."""
        store = a_store(a_vmi(evacuation_node="n1"), a_vmi(evacuation_node="n1", phase=phase))
        assert seen(store).marker is None
        assert list(store.evacuating()) == []
        restarted = a_store(a_vmi(evacuation_node="n1", phase=phase))
        assert list(restarted.evacuating()) == []


class TestFailures:
    """The number of distinct attempts that failed since the request, without aborted ones."""

    def test_counted_once_and_beyond_collection(self) -> None:
        """Each failed UID counts once, also after KubeVirt has deleted the VMIM."""
        store = a_store(a_vmi(evacuation_node="n1", eviction_requested_at=NOW - 1000))
        for number in range(12):
            attempt = an_attempt(number, created=NOW - 990, failed_at=NOW - 900 + number)
            put(store, attempt, attempt)
            if number >= 5:
                store.remove(Resource.VMIMS, NAMESPACE, f"kubevirt-evacuation-{number - 5}")
        assert len(seen(store).vmims) == 5
        assert marker_of(store).failed_since_request() == 12

    def test_what_does_not_count(self) -> None:
        """A VMIM does not count if it was aborted, is no evacuation, or belongs to another node or
        an older request.
        """
        store = a_store(a_vmi(evacuation_node="n1", eviction_requested_at=NOW - 100))
        failed = {"phase": "Failed", "finished": True, "finished_at": NOW - 50.0}
        store.put(a_vmim(uid="1", name="1", evacuates="n1", aborted=True, **failed))
        store.put(a_vmim(uid="2", name="2", **failed))
        store.put(a_vmim(uid="3", name="3", evacuates="n9", **failed))
        store.put(an_attempt(4, created=NOW - 900, failed_at=NOW - 101))
        store.put(an_attempt(5, created=NOW - 90))
        assert marker_of(store).failed_since_request() == 0

    def test_a_failure_that_came_before_everything(self) -> None:
        """A failure that is not later than `not_before` does not count."""
        marker = Marker(node="n1", requested_at=NOW, not_before=NOW - 10)
        marker.record_failure("old", NOW - 10)
        marker.record_failure("new", NOW)
        assert marker.failed == {"new": NOW}

    def test_an_earlier_request_counts_more(self) -> None:
        """If the request turns out to be earlier, failures since that earlier time count."""
        marker = Marker(node="n1", requested_at=NOW)
        marker.record_failure("e1", NOW - 10)
        assert marker.failed_since_request() == 0
        marker.record_request(NOW - 60)
        marker.record_request(NOW)
        assert marker.requested_at == NOW - 60
        assert marker.failed_since_request() == 1


def a_marker(**overrides: Any) -> Marker:
    """An evacuation that was requested at 90 and first seen at 100."""
    fields: dict[str, Any] = {"node": "n1", "requested_at": 90.0, "seen_at": 100.0} | overrides
    return Marker(**fields)


class TestMarker:
    """What a marker takes in."""

    def test_what_is_forgotten_counts_from_the_request_on(self) -> None:
        """Failures whose UIDs were dropped still count if they are not older than the request."""
        marker = a_marker(failed={f"e{n}": 89.0 + n for n in range(FAILURES_KEPT)})
        assert marker.failed_since_request() == FAILURES_KEPT - 1
        marker.record_failure("new", 300.0)
        assert (marker.forgotten, marker.failed_since_request()) == (0, FAILURES_KEPT)
        marker.record_failure("newer", 301.0)
        assert (marker.forgotten, marker.failed_since_request()) == (1, FAILURES_KEPT + 1)
        marker.record_failure("newer", 301.0)
        marker.record_failure("as-old-as-the-oldest", 91.0)
        assert (marker.forgotten, len(marker.failed)) == (2, FAILURES_KEPT)

    @pytest.mark.parametrize(
        ("end", "requested_at"),
        [(89.5, 90.0), (90.0, 100.0), (99.5, 100.0), (100.0, 90.0), (100.5, 90.0)],
    )
    def test_a_success_before_the_first_sight(self, end: float, requested_at: float) -> None:
        """A success between `requested_at` and `seen_at` shows that the request belongs to an
        earlier evacuation.
        """
        marker = a_marker()
        assert marker.record_success(end) == (requested_at != 90.0)
        assert marker.requested_at == requested_at

    @pytest.mark.parametrize(
        ("vmi", "success", "over"),
        [
            pytest.param({}, None, False, id="the-same"),
            pytest.param({"evacuation_node": "n2", "node": "n2"}, None, True, id="another-node"),
            pytest.param({"evacuation_node": ""}, None, True, id="cleared"),
            pytest.param({}, 99.5, False, id="older-success"),
            pytest.param({}, 100.0, True, id="back-again"),
            pytest.param({"node": "n2"}, 100.0, False, id="has-just-left"),
            pytest.param({"eviction_requested_at": 400.0}, None, False, id="clocks-differ"),
            pytest.param({"eviction_requested_at": 400.5}, None, True, id="requested-anew"),
        ],
    )
    def test_is_over(self, vmi: dict[str, Any], success: float | None, over: bool) -> None:
        """A marker of the history file is over if the VMI shows no evacuation, or a later one."""
        now = a_vmi(**({"evacuation_node": "n1"} | vmi))
        assert a_marker().is_over(now, success) is over

    def test_a_date_is_news_once(self) -> None:
        """A new date of the condition is a change; the same date again is none."""
        marker = a_marker(not_before=50.0)
        assert [marker.date(at) for at in (70.0, 70.0, 60.0)] == [True, False, True]
        assert (marker.requested_at, marker.not_before, marker.dated) == (60.0, None, True)

    def test_a_diagnosis_made_later_takes_in_no_news(self) -> None:
        """A snapshot of the marker and the history does not change later."""
        marker = a_marker()
        evidence = some_evidence(marker=marker)
        still = evidence.snapshot()
        marker.record_failure("e1", 120.0)
        marker.record_request(10.0)
        evidence.history.put("m1", Migration(end=NOW), keep=1)
        assert (still.marker, len(still.history)) == (a_marker(), 0)
        moving = some_evidence()
        still = moving.snapshot()
        moving.history.put("m1", Migration(end=NOW), keep=1)
        assert (still.marker, len(still.history)) == (None, 0)


class TestLacking:
    """The time since which the current launcher lacks the descheduler's annotation."""

    def test_comes_and_goes(self) -> None:
        """`lacking_since` is set while the launcher pod exists without the annotation."""
        store = a_store(a_pod(), a_vmi(evacuation_node="n1"))
        assert marker_of(store).lacking_since == NOW
        store.now = NOW + 30
        store.put(a_pod(ready=False))
        assert marker_of(store).lacking_since == NOW
        store.put(a_pod(eviction_in_progress=True))
        assert marker_of(store).lacking_since is None
        store.put(a_pod())
        assert marker_of(store).lacking_since == NOW + 30
        store.remove(Resource.PODS, NAMESPACE, "virt-launcher-db1-x")
        assert marker_of(store).lacking_since is None

    def test_pods_only_while_it_evacuates(self) -> None:
        """The evidence lists a VMI's launcher pods only during an evacuation."""
        store = a_store(a_vmi(), a_pod())
        assert seen(store).pods == ()
        store.put(a_vmi(evacuation_node="n1"))
        assert seen(store).pods == (a_pod(),)
        store.hide(Resource.PODS)
        assert (seen(store).pods, seen(store).trust.sees(Resource.PODS)) == ((), False)


class TestBlind:
    """A forbidden namespace does not affect the evidence of other namespaces."""

    @pytest.mark.parametrize("resource", [Resource.VMIMS, Resource.PODS])
    def test_by_namespace(self, resource: Resource) -> None:
        """A resource that is forbidden in one namespace is missing only in the evidence there."""
        store = a_store(a_vmi(evacuation_node="n1"), a_vmim(), a_pod())
        hidden = NamespaceTrust(frozenset({resource}))
        store.trust = Trust(in_namespace={"elsewhere": hidden})
        assert seen(store).trust == NamespaceTrust()
        store.trust = Trust(in_namespace={NAMESPACE: hidden})
        assert seen(store).trust == hidden
        assert (seen(store).vmims == ()) == (resource is Resource.VMIMS)
        assert (seen(store).launcher is None) == (resource is Resource.PODS)


class TestLoad:
    """The number of running migrations, counted as KubeVirt counts them."""

    def test_counts(self) -> None:
        """A migration counts against the VMI's node from Scheduling on, or if it is Pending with a
        target pod.
        """
        limits = MigrationLimits(cluster=3, outbound_per_node=2)
        store = a_store(KubeVirtSettings(limits), a_vmi(), a_pod(name="target", migration_uid="c"))
        for uid, phase in (("a", "Running"), ("b", "Pending"), ("c", "Pending")):
            store.put(a_vmim(uid=uid, name=uid, phase=phase))
        store.put(a_vmim(uid="d", name="d", vmi_name="unknown", phase="Scheduling"))
        load = Load(3, {"n1": 2}, limits, movers={"n1": ("shop/db1", "shop/db1")})
        assert store.load() == load
        assert load.is_full("n2")
        assert not replace(load, running=2).is_full("n2")

    def test_the_source_of_a_migration(self) -> None:
        """After a move from n1 to n2, a migration counts against both until its VMIM has ended."""
        store = a_store(KubeVirtSettings())
        state = MigrationState(uid="a", source_node="n1")
        store.put(a_vmi(node="n2", migration=state))
        store.put(a_vmi(name="db2", uid="2", node="n2", migration=MigrationState(source_node="n2")))
        store.put(a_vmim(uid="a", name="a", phase="Running"))
        store.put(a_vmim(uid="b", name="b", vmi_name="db2", phase="Running"))
        movers = {"n1": ("shop/db1",), "n2": ("shop/db1", "shop/db2")}
        assert store.load() == Load(2, {"n1": 1, "n2": 2}, MigrationLimits(), movers=movers)
        store.put(an_ended_vmim(uid="a", name="a"))
        movers = {"n2": ("shop/db2",)}
        assert store.load() == Load(1, {"n2": 1}, MigrationLimits(), movers=movers)

    def test_departures(self) -> None:
        """The newest departure from each node stays known after the VMI migrates again."""
        store = a_store(KubeVirtSettings())

        def migrated(uid: str, source: str, end: float, outcome: Outcome) -> None:
            state = MigrationState(
                uid=uid, start=NOW - 900, ended=True, end=end, outcome=outcome, source_node=source
            )
            store.put(a_vmi(node="n3", migration=state))

        migrated("a", "n1", NOW - 60, Outcome.SUCCEEDED)
        migrated("b", "n2", NOW - 30, Outcome.SUCCEEDED)
        migrated("c", "n1", NOW - 10, Outcome.FAILED)
        migrated("d", "n1", NOW - 90, Outcome.SUCCEEDED)
        migrated("e", "n1", NOW + CLOCK_SKEW + 1, Outcome.SUCCEEDED)
        departures = {"n1": NOW - 60, "n2": NOW - 30}
        assert store.load() == Load(0, {}, MigrationLimits(), departures, NOW - 30)
        migrated("f", "n1", NOW + CLOCK_SKEW, Outcome.SUCCEEDED)
        assert store.load() == Load(0, {}, MigrationLimits(), departures | {"n1": NOW}, NOW)

    def test_a_target_pod_of_another_namespace(self) -> None:
        """A pod of another namespace is never a target pod."""
        store = a_store(KubeVirtSettings(), a_vmi(), a_vmim(uid="a", name="a", phase="Pending"))
        store.put(a_pod(namespace="other", migration_uid="a"))
        assert store.load() == Load(0, {}, MigrationLimits())

    @pytest.mark.parametrize(
        ("facts", "trust"),
        [
            pytest.param([KubeVirtSettings()], a_trust(hidden=[Resource.VMIMS]), id="vmims"),
            pytest.param([KubeVirtSettings()], a_trust(hidden=[Resource.PODS]), id="pods"),
            pytest.param([], Trust(), id="limits"),
            pytest.param(
                [KubeVirtSettings()], Trust(in_namespace={"a": NamespaceTrust()}), id="namespaced"
            ),
        ],
    )
    def test_not_to_be_seen(self, facts: list[Fact], trust: Trust) -> None:
        """Without a permission, a namespace or KubeVirt's limits, the load is unknown."""
        assert a_store(*facts).load(trust) is None


def test_when_an_unreadable_object_is_not_believed_any_more() -> None:
    """The last facts about an invalid object are trusted for `dead_after`."""
    store = a_store(a_vmi())
    store.record_unreadable(Resource.VMIS, NAMESPACE, NAME)
    assert list(seen(store).distrusted_from()) == [NOW + DEAD_AFTER]


def test_when_a_running_migration_is_not_believed_any_more() -> None:
    """A migration without an end is not believed ten minutes after its VMIM has finished."""
    running = a_vmi(migration=a_running_state())
    history = a_history(m1=a_migration(end=None, finished_at=NOW))

    assert list(some_evidence(vmi=running).distrusted_from()) == []
    finished = some_evidence(vmi=running, history=history)
    assert list(finished.distrusted_from()) == [NOW + DEAD_AFTER]


@pytest.mark.parametrize(
    ("facts", "unsettled"),
    [
        pytest.param({}, False, id="idle"),
        pytest.param({"vmims": (an_ended_vmim(),)}, False, id="has-moved"),
        pytest.param({"vmims": (a_vmim(),)}, True, id="moves"),
        pytest.param({"vmims": (an_attempt(1, created=NOW, failed_at=NOW),)}, True, id="failed"),
        pytest.param({"marker": Marker(node="n1", requested_at=NOW)}, True, id="evacuating"),
        pytest.param({"pods": (a_pod(), a_pod(name="second"))}, True, id="two-active-pods"),
        pytest.param({"pods": (a_pod(), a_pod(phase="Failed"))}, False, id="one-active-pod"),
        pytest.param({"vmi": a_vmi(deleted_at=NOW)}, True, id="is-deleted"),
        pytest.param({"eviction": an_eviction()}, True, id="asked-to-leave"),
        pytest.param(
            {"eviction": an_eviction(EvictionRequester("drain", "Withdrawn"))},
            False,
            id="not-asked-any-more",
        ),
        pytest.param(
            {"vmi": a_vmi(phase="Failed", deleted_at=NOW), "vmims": (a_vmim(),)},
            False,
            id="has-stopped",
        ),
    ],
)
def test_whether_more_than_its_mobility_decides(facts: dict[str, Any], unsettled: bool) -> None:
    """A settled VMI has stopped, or has no marker, no move, no failure and one active pod."""
    assert some_evidence(**facts).unsettled is unsettled


ELSEWHERE = a_pod(name="elsewhere", uid="elsewhere", node="n2")


@pytest.mark.parametrize(
    ("pod", "facts", "outlived"),
    [
        pytest.param(ELSEWHERE, {}, True, id="no-migration-uses-it"),
        pytest.param(a_pod(), {}, False, id="the-vms-own"),
        pytest.param(replace(ELSEWHERE, node=""), {}, False, id="not-scheduled"),
        pytest.param(replace(ELSEWHERE, phase="Failed"), {}, False, id="finished"),
        pytest.param(ELSEWHERE, {"vmi": a_vmi(node="")}, False, id="the-vm-is-nowhere"),
        pytest.param(
            replace(ELSEWHERE, migration_uid="m1"),
            {"vmims": (a_vmim(uid="m1"),)},
            False,
            id="the-target-of-an-unfinished-attempt",
        ),
        pytest.param(
            replace(ELSEWHERE, migration_uid="m0"),
            {"vmims": (a_vmim(uid="m1"),)},
            True,
            id="the-target-of-an-earlier-attempt",
        ),
        pytest.param(
            ELSEWHERE,
            {"vmims": (a_vmim(uid="m1", handed_off=True),)},
            False,
            id="while-an-attempt-is-handed-off",
        ),
        pytest.param(
            ELSEWHERE, {"vmi": a_vmi(migration=a_running_state())}, False, id="while-it-migrates"
        ),
        pytest.param(
            ELSEWHERE,
            {"vmi": a_vmi(migration=a_state(end=NOW - OUTLIVES_AFTER))},
            False,
            id="ten-minutes-after-a-migration",
        ),
        pytest.param(
            ELSEWHERE,
            {"vmi": a_vmi(migration=a_state(end=NOW - OUTLIVES_AFTER - 1.0))},
            True,
            id="later",
        ),
    ],
)
def test_which_pods_have_outlived_their_migration(
    pod: Pod, facts: dict[str, Any], outlived: bool
) -> None:
    """An active pod on another node has outlived its migration if none uses it for ten minutes."""
    evidence = some_evidence(pods=(pod,), **facts)

    assert list(evidence.find_outlived(NOW)) == [pod] * outlived


def _running(**state: Any) -> dict[str, Any]:
    return {"vmi": a_vmi(migration=a_running_state(source_node="n1", target_node="n2", **state))}


@pytest.mark.parametrize(
    ("pod", "facts", "is_target"),
    [
        pytest.param(ELSEWHERE, {}, False, id="no-migration"),
        pytest.param(ELSEWHERE, {"vmims": (a_vmim(),)}, True, id="of-no-named-attempt"),
        pytest.param(ELSEWHERE, _running(), True, id="while-it-runs-without-its-vmim"),
        pytest.param(
            replace(ELSEWHERE, migration_uid="m1"), _running(), True, id="of-this-attempt"
        ),
        pytest.param(
            replace(ELSEWHERE, migration_uid="m0"), _running(), False, id="of-an-earlier-attempt"
        ),
        pytest.param(replace(ELSEWHERE, phase="Failed"), _running(), False, id="finished"),
        pytest.param(a_pod(), _running(), False, id="the-source"),
        pytest.param(
            a_pod(),
            {"vmi": a_vmi(node="n2", migration=a_running_state(source_node="n1"))},
            False,
            id="the-source-once-the-vm-has-arrived",
        ),
        pytest.param(
            a_pod(),
            {"vmi": a_vmi(node="n2", migration=a_state(source_node="n1"))},
            False,
            id="the-source-of-an-ended-migration",
        ),
        pytest.param(replace(ELSEWHERE, node=""), _running(), True, id="not-scheduled"),
    ],
)
def test_which_pod_is_the_target(pod: Pod, facts: dict[str, Any], is_target: bool) -> None:
    """The target of an unfinished migration is an active pod that is not on the VM's node."""
    assert some_evidence(pods=(pod,), **facts).is_target(pod) is is_target


@pytest.mark.parametrize(
    ("facts", "ends_at"),
    [
        pytest.param({}, None, id="not-deleted"),
        pytest.param({"vmi": a_vmi(deleted_at=NOW)}, NOW, id="the-vmi-is-deleted"),
        pytest.param({"launcher": a_pod(deleted_at=NOW)}, NOW, id="its-pod-is-deleted"),
        pytest.param(
            {"launcher": a_pod(deleted_at=NOW), "vmims": (a_vmim(uid="m1"),)},
            NOW,
            id="its-pod-is-deleted-while-it-moves",
        ),
        pytest.param(
            {"launcher": a_pod(deleted_at=NOW, migration_uid="m1"), "vmims": (a_vmim(uid="m1"),)},
            None,
            id="the-target-is-deleted",
        ),
        pytest.param(
            {"launcher": a_pod(deleted_at=NOW, phase="Failed")}, None, id="its-pod-has-finished"
        ),
        pytest.param({"launcher": None}, None, id="no-pod"),
    ],
)
def test_when_a_vm_ends(facts: dict[str, Any], ends_at: float | None) -> None:
    """A VM ends with its VMI or with its own pod, and not with the target of its migration."""
    assert some_evidence(**facts).ends_at == ends_at


def test_when_the_last_migration_started() -> None:
    """Where the end is corrected, so is the start: the duration stays that of the nodes."""
    late = a_vmi(migration=a_state(start=NOW - 660.0, end=NOW - 600.0))
    history = a_history(m1=a_migration(finished_at=NOW - 700.0))

    assert some_evidence().migration_start is None
    assert some_evidence(vmi=late).migration_start == NOW - 660.0
    corrected = some_evidence(vmi=late, history=history)
    assert corrected.migration_end is not None
    assert corrected.migration_start == corrected.migration_end - 60.0
