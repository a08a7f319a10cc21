"""What the store keeps of evacuations: since when, what failed since, what the pods show."""

from itertools import permutations

import pytest

from exporter.engine.diagnosis import Load
from exporter.engine.evidence import FAILURES_KEPT, Evidence, Marker
from exporter.engine.model import Fact, MigrationLimits, Outcome, Resource, Trigger, Vmim
from exporter.engine.store import Store
from tests.support.builders import (
    KEEP,
    NAME,
    NAMESPACE,
    NOW,
    UID,
    a_pod,
    a_vmi,
    a_vmim,
    an_ended_vmim,
)


def a_store(*, sees_all: bool = True, started_at: float = 0.0) -> Store:
    """An empty store that may see everything."""
    store = Store(endings_kept=KEEP, sees_all=sees_all, started_at=started_at)
    store.vmims_seen = store.pods_seen = True
    store.heard_at = NOW
    return store


def marker_of(store: Store) -> Marker:
    """The marker of the one VMI, which must be there."""
    marker = seen(store).marker
    assert marker is not None
    return marker


def seen(store: Store) -> Evidence:
    """The evidence of the one VMI."""
    evidence = store.evidence(NAMESPACE, NAME)
    assert evidence is not None
    return evidence


def an_attempt(number: int, *, created: float, failed_at: float | None = None) -> Vmim:
    """An evacuation VMIM off n1, pending or failed."""
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
    """When the evacuation was requested: it never moves later until it is cleared."""

    def test_first_seen(self) -> None:
        """Without a condition and without an attempt it is when we first saw it."""
        store = a_store()
        store.put(a_vmi(evacuation_node="n1"))
        store.heard_at = NOW + 60
        store.put(a_vmi(evacuation_node="n1", migratable=True))
        assert marker_of(store).requested_at == NOW

    def test_condition(self) -> None:
        """The condition's transition, where KubeVirt writes it."""
        store = a_store()
        store.put(a_vmi(evacuation_node="n1", eviction_requested_at=NOW - 500))
        store.put(an_attempt(1, created=NOW - 900))
        assert marker_of(store).requested_at == NOW - 500

    @pytest.mark.parametrize("vmi_first", [True, False], ids=["vmi-first", "vmims-first"])
    def test_oldest_attempt(self, *, vmi_first: bool) -> None:
        """Before 1.7 the oldest attempt off this node tells more than our first sight."""
        store = a_store()
        vmi = a_vmi(evacuation_node="n1")
        attempts = [an_attempt(n, created=NOW - 100 * n) for n in (1, 3, 2)]
        facts: list[Fact] = [vmi, *attempts] if vmi_first else [*attempts, vmi]
        for fact in facts:
            store.put(fact)
        assert marker_of(store).requested_at == NOW - 300

    def test_attempts_of_an_older_evacuation(self) -> None:
        """What is older than the newest success, or than a sight without marker, is not its."""
        store = a_store()
        store.put(a_vmi())
        store.put(an_ended_vmim(uid="ok", name="ok", end=NOW - 1000.0, finished_at=NOW - 999.0))
        store.heard_at = NOW - 500
        store.put(a_vmi(migratable=True))
        store.heard_at = NOW
        store.put(a_vmi(evacuation_node="n1"))
        store.put(an_attempt(1, created=NOW - 2000))
        store.put(an_attempt(2, created=NOW - 700))
        store.put(an_attempt(3, created=NOW - 400))
        assert marker_of(store).requested_at == NOW - 400

    @pytest.mark.parametrize("order", list(permutations("acs")), ids="".join)
    def test_any_order_of_attempts_and_success(self, order: tuple[str, ...]) -> None:
        """An attempt from before a success is not this evacuation's, whichever is heard first."""
        store = a_store()
        store.put(a_vmi(evacuation_node="n1"))
        told = {
            "a": an_attempt(1, created=NOW - 300, failed_at=NOW - 250),
            "s": an_ended_vmim(uid="ok", name="ok", end=NOW - 150.0, finished_at=NOW - 149.0),
            "c": an_attempt(2, created=NOW - 60, failed_at=NOW - 50),
        }
        for key in order:
            store.put(told[key])
        assert marker_of(store).requested_at == NOW - 60
        assert marker_of(store).failed_since_request() == 1

    def test_another_node(self) -> None:
        """A marker for another node is another evacuation."""
        store = a_store()
        store.put(a_vmi(evacuation_node="n1"))
        store.put(an_attempt(1, created=NOW - 50, failed_at=NOW - 10))
        store.heard_at = NOW + 60
        store.put(a_vmi(node="n2", evacuation_node="n2"))
        assert marker_of(store).requested_at == NOW + 60
        assert marker_of(store).failed_since_request() == 0

    def test_cleared_and_set_again(self) -> None:
        """Cancelled and asked for again it begins anew."""
        store = a_store()
        store.put(a_vmi(evacuation_node="n1"))
        store.heard_at = NOW + 10
        store.put(a_vmi())
        assert seen(store).marker is None
        assert list(store.evacuating()) == []
        store.heard_at = NOW + 20
        store.put(a_vmi(evacuation_node="n1"))
        assert marker_of(store).requested_at == NOW + 20

    @pytest.mark.parametrize("how", ["deleted", "recreated"])
    def test_gone_with_the_vmi(self, how: str) -> None:
        """A deleted VMI evacuates no more, a recreated one anew."""
        store = a_store()
        store.put(a_vmi(evacuation_node="n1"))
        if how == "deleted":
            store.remove(Resource.VMIS, NAMESPACE, NAME, UID)
        else:
            store.put(a_vmi(uid="another"))
        assert list(store.evacuating()) == []


class TestFailures:
    """Distinct attempts that failed since the request, aborted ones left out."""

    def test_counted_once_and_beyond_collection(self) -> None:
        """Each UID counts once, and goes on counting when its VMIM is collected."""
        store = a_store()
        store.put(a_vmi(evacuation_node="n1", eviction_requested_at=NOW - 1000))
        for number in range(12):
            attempt = an_attempt(number, created=NOW - 990, failed_at=NOW - 900 + number)
            store.put(attempt)
            store.put(attempt)
            if number >= 5:
                store.remove(Resource.VMIMS, NAMESPACE, f"kubevirt-evacuation-{number - 5}")
        assert len(seen(store).vmims) == 5
        assert marker_of(store).failed_since_request() == 12

    def test_what_does_not_count(self) -> None:
        """Not what was aborted, what another made, what is for another node, what is older."""
        store = a_store()
        store.put(a_vmi(evacuation_node="n1", eviction_requested_at=NOW - 100))
        failed = {"phase": "Failed", "finished": True, "finished_at": NOW - 50.0}
        store.put(a_vmim(uid="1", name="1", evacuates="n1", aborted=True, **failed))
        store.put(a_vmim(uid="2", name="2", **failed))
        store.put(a_vmim(uid="3", name="3", evacuates="n9", **failed))
        store.put(an_attempt(4, created=NOW - 900, failed_at=NOW - 101))
        store.put(an_attempt(5, created=NOW - 90))
        assert marker_of(store).failed_since_request() == 0

    def test_a_failure_that_came_before_everything(self) -> None:
        """An end from before the last sight without the marker is not this evacuation's."""
        marker = Marker(node="n1", requested_at=NOW, not_before=NOW - 10)
        assert not marker.note_failure("old", NOW - 10)
        assert marker.note_failure("new", NOW)

    def test_late_news_of_an_old_failure(self) -> None:
        """When as many newer ones are known by name, an older one is not counted twice."""
        marker = Marker(node="n1", requested_at=NOW)
        for number in range(FAILURES_KEPT):
            marker.note_failure(f"e{number}", NOW + 10 + number)
        assert not marker.note_failure("older", NOW + 1)
        assert marker.failed_since_request() == FAILURES_KEPT

    def test_an_earlier_request_counts_more(self) -> None:
        """A request that turns out to be older has what failed since then."""
        marker = Marker(node="n1", requested_at=NOW)
        marker.note_failure("e1", NOW - 10)
        assert marker.failed_since_request() == 0
        assert marker.note_request(NOW - 60)
        assert not marker.note_request(NOW)
        assert marker.failed_since_request() == 1


class TestLacking:
    """Since when the current launcher lacks the descheduler's annotation."""

    def test_comes_and_goes(self) -> None:
        """From the first sight of marker and pod together, until the annotation or the end."""
        store = a_store()
        store.put(a_pod())
        store.put(a_vmi(evacuation_node="n1"))
        assert marker_of(store).lacking_since == NOW
        store.heard_at = NOW + 30
        store.put(a_pod(ready=False))
        assert marker_of(store).lacking_since == NOW
        store.put(a_pod(eviction_in_progress=True))
        assert marker_of(store).lacking_since is None
        store.put(a_pod())
        assert marker_of(store).lacking_since == NOW + 30
        store.remove(Resource.PODS, NAMESPACE, "virt-launcher-db1-x")
        assert marker_of(store).lacking_since is None

    def test_pods_only_while_it_evacuates(self) -> None:
        """All launcher pods are told of an evacuating VMI alone."""
        store = a_store()
        store.put(a_vmi())
        store.put(a_pod())
        assert seen(store).pods == ()
        store.put(a_vmi(evacuation_node="n1"))
        assert seen(store).pods == (a_pod(),)
        store.pods_seen = False
        assert (seen(store).pods, seen(store).pods_seen) == ((), False)


class TestBlind:
    """What may not be seen in one namespace says nothing of another."""

    @pytest.mark.parametrize("resource", [Resource.VMIMS, Resource.PODS])
    def test_by_namespace(self, resource: Resource) -> None:
        """Only the VMIs of the blind namespace are without it."""
        store = a_store()
        store.put(a_vmi(evacuation_node="n1"))
        store.put(a_vmim())
        store.put(a_pod())
        store.blind = {resource: frozenset({"elsewhere"})}
        assert (seen(store).vmims_seen, seen(store).pods_seen) == (True, True)
        store.blind = {resource: frozenset({NAMESPACE})}
        assert seen(store).vmims_seen == (resource is not Resource.VMIMS)
        assert seen(store).pods_seen == (resource is not Resource.PODS)
        assert (seen(store).vmims == ()) == (resource is Resource.VMIMS)
        assert (seen(store).launcher is None) == (resource is Resource.PODS)


class TestLoad:
    """How many migrations run, as KubeVirt counts them, where all can be seen."""

    def test_counts(self) -> None:
        """From Scheduling on, and Pending with a target pod; out of the VMI's node."""
        store = a_store()
        store.put(MigrationLimits(cluster=3, outbound_per_node=2))
        store.put(a_vmi())
        store.put(a_vmim(uid="a", name="a", phase="Running"))
        store.put(a_vmim(uid="b", name="b", phase="Pending"))
        store.put(a_vmim(uid="c", name="c", phase="Pending"))
        store.put(a_pod(name="target", uid="t", node="n2", migration_uid="c"))
        store.put(a_vmim(uid="d", name="d", vmi_name="unknown", phase="Scheduling"))
        store.put(an_ended_vmim(uid="e", name="e"))
        load = store.load()
        assert load == Load(3, {"n1": 2}, MigrationLimits(cluster=3, outbound_per_node=2))
        assert load.is_full("n2")
        store.remove(Resource.VMIMS, NAMESPACE, "d")
        load = store.load()
        assert load is not None
        assert (load.is_full("n1"), load.is_full("n2")) == (True, False)

    @pytest.mark.parametrize("blind", ["vmims", "pods", "limits", "namespaced"])
    def test_not_to_be_seen(self, blind: str) -> None:
        """Without any of what it is counted from nothing is said."""
        store = a_store(sees_all=blind != "namespaced")
        store.vmims_seen = blind != "vmims"
        store.pods_seen = blind != "pods"
        if blind != "limits":
            store.put(MigrationLimits())
        assert store.load() is None


class TestFinished:
    """Migrations that ended later than our start, once each."""

    def test_counts(self) -> None:
        """By outcome and by what they were for; not what had ended before, not twice."""
        store = a_store(started_at=NOW - 1000)
        store.put(an_attempt(1, created=NOW - 50))
        store.put(an_attempt(1, created=NOW - 50, failed_at=NOW))
        store.put(an_attempt(1, created=NOW - 51, failed_at=NOW))
        store.put(an_ended_vmim(uid="u", name="u", trigger=Trigger.WORKLOAD_UPDATE))
        store.put(an_ended_vmim(uid="v", name="v", end=NOW - 1001, finished_at=NOW - 1000))
        store.put(an_attempt(2, created=NOW - 50))
        assert store.finished == {
            (Outcome.FAILED, Trigger.EVACUATION): 1,
            (Outcome.SUCCEEDED, Trigger.WORKLOAD_UPDATE): 1,
        }
