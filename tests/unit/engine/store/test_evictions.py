"""The index of Evictions, and what the store and its readers make of them."""

import json
from collections import Counter
from pathlib import Path

import pytest
from msgspec import json as msgspec_json
from msgspec.structs import replace

from exporter.engine.evacuations.conditions import read_conditions
from exporter.engine.evacuations.diagnosis import Diagnosis
from exporter.engine.evacuations.drain import forecast_node
from exporter.engine.facts.model import Eviction, EvictionRequester, Node, Requester, Resource
from exporter.engine.facts.policy import StuckPolicy
from exporter.engine.facts.trust import Trust
from exporter.engine.store.evictions import EvictionIndex, EvictionOutcome, RequesterKind
from exporter.engine.store.requesters import Source
from exporter.kube.objects.kubevirt import parse_object
from tests.support.builders import DRAIN, NOW, a_pod, a_vmi, an_eviction
from tests.support.stores import ClockedStore, a_trust


RECORDED = Path(__file__).parents[3] / "data" / "evictions"
BALANCE = EvictionRequester("example.com/descheduler", "Eviction")


@pytest.fixture
def store() -> ClockedStore:
    """A store with db1, its pod and its node, for which BALANCE is a descheduler."""
    store = ClockedStore(keep=8, deschedulers=(BALANCE.name,))
    for fact in (a_vmi(), a_pod(), Node(name="n1", schedulable=False, cordoned_at=NOW - 90.0)):
        store.put(fact)
    return store


def diagnosed(store: ClockedStore) -> Diagnosis:
    """The diagnosis of db1's evacuation."""
    (evidence,) = store.evacuating()
    diagnosis = read_conditions(store, StuckPolicy(), store.trust, NOW).diagnose(evidence)
    assert diagnosis is not None
    return diagnosis


def test_who_asks_is_known(store: ClockedStore) -> None:
    """The requesters with the intent Eviction have asked, since the Eviction was created."""
    withdrawn = EvictionRequester("example.com/other", "Withdrawn")
    store.put(an_eviction(DRAIN, BALANCE, withdrawn))
    evidence = store.evidence("shop", "db1")
    assert evidence is not None
    both = "example.com/drain, example.com/descheduler"
    assert evidence.requested_by == Requester(NOW - 60.0, both)
    assert not store.is_idle(("shop", "db1"))


@pytest.mark.parametrize(
    ("requesters", "source"),
    [((DRAIN,), Source.OTHER), ((DRAIN, BALANCE), Source.DESCHEDULER)],
)
def test_the_source_is_that_of_the_requesters(
    store: ClockedStore, requesters: tuple[EvictionRequester, ...], source: Source
) -> None:
    """A requester of the setting counts as a descheduler, and every other one does not."""
    store.put(an_eviction(*requesters))
    store.put(a_vmi(evacuation_node="n1", eviction_requested_at=NOW))
    diagnosis = diagnosed(store)
    assert diagnosis.source is source
    assert diagnosis.requested_at == NOW - 60.0
    assert diagnosis.due_at == NOW + StuckPolicy().after


def test_a_vm_that_is_not_marked_yet_counts_in_its_drain(store: ClockedStore) -> None:
    """On a cordoned node a VM is asked to leave as soon as somebody makes an EvictionRequest."""

    def progress() -> tuple[int, Requester | None] | None:
        conditions = read_conditions(store, StuckPolicy(), store.trust, NOW)
        progress = forecast_node(store, "n1", conditions)[0].progress
        return None if progress is None else (progress.asked, progress.requested_by)

    assert progress() is None
    store.put(an_eviction())
    assert progress() == (1, Requester(NOW - 60.0, DRAIN.name))

    store.put(a_vmi(name="db2", uid="2"))
    pod = a_pod(name="virt-launcher-db2-x", uid="p2", vmi_uid="2")
    store.put(pod)
    later = {"name": "e2", "uid": "e2", "pod": pod.name, "pod_uid": pod.uid, "created": NOW - 30.0}
    store.put(an_eviction(BALANCE, **later))
    assert progress() == (2, Requester(NOW - 60.0, f"{BALANCE.name}, {DRAIN.name}"))


@pytest.mark.parametrize(
    ("end", "outcome"),
    [
        ({"evicted": True}, EvictionOutcome.EVICTED),
        ({"failed": "CanceledDueToNoRequesters"}, EvictionOutcome.CANCELLED),
        ({"failed": "EvictionInvalid"}, EvictionOutcome.FAILED),
        (None, EvictionOutcome.CANCELLED),
    ],
    ids=["evicted", "cancelled", "failed", "deleted"],
)
def test_an_end_is_counted_once(
    store: ClockedStore, end: dict[str, object] | None, outcome: EvictionOutcome
) -> None:
    """An Eviction of a launcher pod that ends, or is deleted before, is counted once."""
    ends = Counter[tuple[RequesterKind, EvictionOutcome]]()
    store.evictions.record_end = lambda *key: ends.update([key])
    eviction = an_eviction(BALANCE)
    store.put(eviction)
    assert store.evictions.count_states() == {"Active": 1}
    if end is not None:
        store.put(replace(eviction, **end))
        assert store.evictions.count_states() == {}
    store.remove(Resource.EVICTIONS, eviction.namespace, eviction.name)
    assert ends == {(RequesterKind.DESCHEDULER, outcome): 1}


WITHDRAWN = {"failed": "CanceledDueToNoRequesters", "failed_at": NOW + 100.0}


def test_who_has_withdrawn_is_known_after_the_deletion(store: ClockedStore) -> None:
    """Until its pod is gone, because KubeVirt goes on moving the VM."""
    eviction = an_eviction(EvictionRequester(DRAIN.name, "Withdrawn"), **WITHDRAWN)
    store.put(eviction)
    store.put(Node(name="n1"))
    store.put(a_vmi(evacuation_node="n1", eviction_requested_at=NOW))

    def find_withdrawn() -> tuple[str, ...]:
        diagnosis = diagnosed(store)
        assert diagnosis.leftover is bool(diagnosis.withdrawn)
        return diagnosis.withdrawn

    assert find_withdrawn() == (DRAIN.name,)
    store.remove(Resource.EVICTIONS, eviction.namespace, eviction.name)
    assert find_withdrawn() == (DRAIN.name,)
    store.remove(Resource.PODS, eviction.namespace, eviction.pod)
    store.put(a_pod(name="another", uid="another"))
    assert find_withdrawn() == ()
    store.put(an_eviction(**WITHDRAWN, pod="another", pod_uid="another"))
    store.remove(Resource.EVICTIONS, eviction.namespace, eviction.name)
    assert find_withdrawn() == (DRAIN.name,)


@pytest.mark.parametrize(
    ("changes", "requested_at", "is_withdrawn"),
    [
        pytest.param({}, NOW - 66.0, False, id="marked-before"),
        pytest.param({}, NOW - 65.0, True, id="marked-as-soon-as-asked"),
        pytest.param({}, NOW + 105.0, True, id="marked-at-the-last"),
        pytest.param({}, NOW + 106.0, False, id="marked-after"),
        pytest.param({"failed": ""}, NOW, False, id="still-asked"),
        pytest.param({"failed": "EvictionInvalid"}, NOW, False, id="failed"),
        pytest.param({"created": None}, NOW, False, id="asked-at-an-unknown-instant"),
        pytest.param({"failed_at": None}, NOW, False, id="withdrawn-at-an-unknown-instant"),
    ],
)
def test_somebody_else_may_have_asked(
    store: ClockedStore, changes: dict[str, object], requested_at: float, *, is_withdrawn: bool
) -> None:
    """An evacuation is withdrawn only if KubeVirt marked the VM while the requesters asked."""
    store.put(an_eviction(**{**WITHDRAWN, **changes}))
    store.put(a_vmi(evacuation_node="n1", eviction_requested_at=requested_at))
    assert diagnosed(store).withdrawn == ((DRAIN.name,) if is_withdrawn else ())


def test_on_a_cordoned_node_the_drain_still_asks(store: ClockedStore) -> None:
    """What is withdrawn belongs to the drain of its node, as long as that is cordoned."""
    store.put(an_eviction(**WITHDRAWN))
    store.put(a_vmi(evacuation_node="n1", eviction_requested_at=NOW))
    assert not diagnosed(store).leftover


def test_whose_turn_it_is(store: ClockedStore) -> None:
    """A responder answers the Evictions in which it is active, and no others."""
    store.put(an_eviction())
    assert store.evictions.list_turns("example.com/hold") == []
    mine = an_eviction(responder="example.com/hold")
    store.put(mine)
    assert store.evictions.list_turns("example.com/hold") == [mine]
    for change in ({"state": "Interrupted"}, {"evicted": True}):
        store.put(replace(mine, **change))
        assert store.evictions.list_turns("example.com/hold") == []


@pytest.mark.parametrize(
    "trust",
    [
        pytest.param(a_trust(hidden=[Resource.EVICTIONS]), id="unseen"),
        pytest.param(a_trust(Resource.EVICTIONS), id="dead"),
        pytest.param(a_trust(hidden=[Resource.PODS]), id="pods-unseen"),
    ],
)
def test_an_eviction_that_is_not_believed_says_nothing(store: ClockedStore, trust: Trust) -> None:
    """Without Evictions, or without pods, nobody is known to ask."""
    store.put(an_eviction())
    evidence = store.evidence("shop", "db1", trust)
    assert evidence is not None
    assert evidence.requested_by is None


def test_other_pods_do_not_count(store: ClockedStore) -> None:
    """An Eviction of a pod that is no launcher pod is no VM's."""
    index: EvictionIndex = store.evictions
    store.put(an_eviction(pod="web-1", pod_uid="other"))
    assert index.count_states() == {}
    evidence = store.evidence("shop", "db1")
    assert evidence is not None
    assert evidence.eviction is None


@pytest.mark.parametrize("path", sorted(RECORDED.glob("*.json")), ids=lambda path: path.stem)
def test_recorded_evictions_can_be_read(path: Path) -> None:
    """What Kubernetes' own controllers wrote is read: pod, requesters, responder and end."""
    recorded = json.loads(path.read_text(encoding="utf-8"))
    evictions = [
        parse_object(Resource.EVICTIONS, msgspec_json.encode(value)).fact
        for value in recorded["evictions"]
    ]
    assert evictions
    for eviction in evictions:
        assert isinstance(eviction, Eviction)
        assert eviction.pod_uid
        assert eviction.requesters
        assert eviction.responder
        assert eviction.state
        assert eviction.created is not None
