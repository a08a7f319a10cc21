"""Admission reviews are read, judged and answered, without HTTP."""

import json
from dataclasses import replace
from typing import Any

import pytest

from exporter.counters import ReviewOutcome
from exporter.engine.facts.model import (
    DRAIN_TAINT,
    Eviction,
    Fact,
    Node,
    Outcome,
    Resource,
    Taint,
)
from exporter.engine.facts.policy import Policy, Reason
from exporter.engine.facts.trust import DEAD_AFTER
from exporter.engine.store.store import Store
from exporter.health import Health, Watched
from exporter.server.admission.reviews import (
    Judgement,
    NotAReview,
    judge,
    read_review,
    write_answer,
)
from exporter.settings import KUBERNETES_EVICTOR, AdmissionMode, AdmissionSettings
from tests.support import builders
from tests.support.builders import (
    KEEP,
    NOW,
    Json,
    a_pod,
    a_policy,
    a_running_state,
    a_state,
    a_vmi,
    a_vmim,
    an_ended_vmim,
)
from tests.support.reviews import (
    DESCHEDULER,
    ODD_VALUES,
    PODS_RESOURCE,
    REVIEW_UID,
    a_review,
)
from tests.support.stores import ClockedStore, a_verdict_view
from tests.support.verdicts import decide
from tests.unit.server.api.test_handlers import a_health


ENFORCE = AdmissionSettings(AdmissionMode.ENFORCE, (DESCHEDULER,), ("evictors",))
WARN = replace(ENFORCE, mode=AdmissionMode.WARN)
POLICY = a_policy()


def a_store(*facts: Fact, **vmi: Any) -> ClockedStore:
    """A store with db1, db1's pod and these facts; by default db1 cools down for five minutes."""
    db1 = a_vmi(**{"migration": a_state(), **vmi})
    return builders.a_store(db1, a_pod(), *facts, now=NOW)


def raw(review: Json) -> bytes:
    """The body of a review."""
    return json.dumps(review).encode()


def judged(
    review: Json,
    *,
    store: Store | None = None,
    admission: AdmissionSettings = ENFORCE,
    health: Health | None = None,
    policy: Policy = POLICY,
    responder: str = "",
) -> Judgement:
    """The judgement of a review; by default db1 is in its cooldown."""
    store = a_store() if store is None else store
    return judge(
        read_review(raw(review)),
        admission,
        store=store,
        view=a_verdict_view(store, policy),
        health=health or a_health(),
        now=NOW,
        responder=responder,
    )


def answered(review: Json | None = None, *, policy: Policy = POLICY, **options: Any) -> Json:
    """The response to a review."""
    asked = review or a_review()
    judgement = judged(asked, policy=policy, **options)
    answer: Json = json.loads(write_answer(read_review(raw(asked)), judgement, policy, NOW))
    assert answer.pop("kind") == "AdmissionReview"
    assert answer.pop("apiVersion") == "admission.k8s.io/v1"
    response: Json = answer.pop("response")
    assert not answer
    return response


def test_a_denial() -> None:
    """A denial is a 429 with the VMI, the reason, the cooldown's end and the migrations."""
    older = [
        an_ended_vmim(name=f"old-{uid}", uid=uid, start=end - 60, end=end)
        for uid, end in (("m01", NOW - 5000.0), ("m02", NOW - 10_000.0))
    ]
    assert answered(store=a_store(*older)) == {
        "uid": REVIEW_UID,
        "allowed": False,
        "status": {
            "code": 429,
            "reason": "TooManyRequests",
            "message": "kubevirt-eviction-exporter: VMI shop/db1: cooldown until 08:50:00Z"
            " (in 50m), after 3 migrations in 24h",
        },
    }


def test_a_warning() -> None:
    """In mode `warn` the eviction is allowed; the message is a warning and an audit annotation."""
    message = "VMI shop/db1: cooldown until 08:05:00Z (in 5m), after 1 migration in 24h"
    assert answered(admission=WARN) == {
        "uid": REVIEW_UID,
        "allowed": True,
        "warnings": [f"kubevirt-eviction-exporter would deny this eviction: {message}"],
        "auditAnnotations": {"would-deny": message},
    }


MESSAGES = {
    "running": (
        [a_vmi(migration=a_running_state())],
        "migration_in_progress since 2027-01-15T07:59:00Z",
    ),
    "pending": (
        [a_vmi(), a_vmim(phase="Scheduling")],
        "migration_in_progress: VMIM mig-1 is Scheduling",
    ),
    "long": (
        [a_vmi(migration=a_state(start=NOW - 100_000.0, end=NOW - 600.0))],
        "cooldown until 13:50:00Z (in 5h50m), after 1 migration in 24h",
    ),
}


@pytest.mark.parametrize(("facts", "message"), MESSAGES.values(), ids=MESSAGES)
def test_messages(facts: list[Any], message: str) -> None:
    """The message of each reason says why the VMI is blocked."""
    assert answered(store=a_store(*facts))["status"]["message"].endswith(f"VMI shop/db1: {message}")


def test_a_release_on_another_day_has_its_date() -> None:
    """A cooldown that ends on another day is written with the date."""
    policy = a_policy(max_migration_cooldown=0.0, migration_history_window=0.0)
    store = a_store(migration=a_state(start=NOW - 100_600.0, end=NOW - 600.0))
    assert answered(store=store, policy=policy)["status"]["message"].endswith(
        "cooldown until 2027-01-16T11:36:40Z (in 1d3h36m40s)"
    )


HOLD = "kubevirt-eviction-exporter.io/cooldown"
EVICTOR = "imperative-eviction.k8s.io/evictor"
JUDGED = {
    "listed": ({}, ReviewOutcome.DENIED),
    "unlisted": ({"userInfo": {"username": "system:admin"}}, ReviewOutcome.UNLISTED_USER),
    "by-group": (
        {"userInfo": {"username": "x", "groups": ["a", "evictors"]}},
        ReviewOutcome.DENIED,
    ),
    "nobody": ({"userInfo": None}, ReviewOutcome.UNLISTED_USER),
    "another-pod": ({"name": "virt-launcher-x"}, ReviewOutcome.UNKNOWN_POD),
    "another-namespace": ({"namespace": "bank"}, ReviewOutcome.UNKNOWN_POD),
    "another-subresource": ({"subResource": "exec"}, ReviewOutcome.UNKNOWN_POD),
    "the-pod-itself": ({"subResource": ""}, ReviewOutcome.UNKNOWN_POD),
    "another-operation": ({"operation": "DELETE"}, ReviewOutcome.UNKNOWN_POD),
    "another-resource": (
        {"resource": PODS_RESOURCE | {"resource": "nodes"}},
        ReviewOutcome.UNKNOWN_POD,
    ),
    "another-group": ({"resource": PODS_RESOURCE | {"group": "shop"}}, ReviewOutcome.UNKNOWN_POD),
}


@pytest.mark.parametrize(("request_fields", "outcome"), JUDGED.values(), ids=JUDGED)
def test_what_is_judged(request_fields: Json, outcome: ReviewOutcome) -> None:
    """Only the eviction of a known launcher pod by a listed user can be denied."""
    assert judged(a_review(**request_fields)).outcome is outcome


@pytest.mark.parametrize(
    ("responders", "outcome"),
    [((HOLD, EVICTOR), ReviewOutcome.ALLOWED), ((EVICTOR,), ReviewOutcome.DENIED)],
)
def test_what_the_responder_has_held_is_not_held_again(
    responders: tuple[str, ...], outcome: ReviewOutcome
) -> None:
    """Kubernetes' own responder is judged like every listed user, but not after our hold."""
    pod = a_pod()
    eviction = Eviction(
        namespace=pod.namespace,
        name="pod-1",
        uid="e1",
        pod=pod.name,
        pod_uid=pod.uid,
        responders=responders,
    )
    review = a_review(userInfo={"username": KUBERNETES_EVICTOR})
    admission = AdmissionSettings(AdmissionMode.ENFORCE, (KUBERNETES_EVICTOR,))
    store = a_store(eviction)
    assert judged(review, store=store, admission=admission, responder=HOLD).outcome is outcome
    assert judged(review, store=store, admission=admission).outcome is ReviewOutcome.DENIED


@pytest.mark.parametrize(
    ("vmi", "facts", "namespace", "outcome"),
    [
        pytest.param({"evacuation_node": "n1"}, [], "shop", ReviewOutcome.EVACUATING, id="leaves"),
        pytest.param(
            {"eviction_strategy": "LiveMigrate"},
            [Node(name="n1", taints=(Taint(DRAIN_TAINT),))],
            "shop",
            ReviewOutcome.EVACUATING,
            id="leaves-by-a-taint",
        ),
        pytest.param({"migration": None}, [], "shop", ReviewOutcome.ALLOWED, id="no-rule-blocks"),
        pytest.param({}, [a_pod(phase="Succeeded")], "shop", ReviewOutcome.ALLOWED, id="pod-ended"),
        pytest.param(
            {}, [a_pod(namespace="bank")], "bank", ReviewOutcome.UNKNOWN_POD, id="vmi-elsewhere"
        ),
        pytest.param({}, [], "unseen", ReviewOutcome.UNAVAILABLE, id="pods-not-seen"),
    ],
)
def test_what_is_allowed(
    vmi: dict[str, Any], facts: list[Any], namespace: str, outcome: ReviewOutcome
) -> None:
    """An eviction is allowed if the VM is evacuating, no rule blocks, or the pod is unknown."""
    store = a_store(*facts, **vmi)
    seen = [
        Watched(resource, None, synced=True, contact=NOW)
        for resource in (Resource.VMIS, Resource.VMIMS)
    ]
    seen += [
        Watched(Resource.PODS, namespace, synced=True, contact=NOW)
        for namespace in ("shop", "bank")
    ]
    health = a_health(*seen, Watched(Resource.PODS, "unseen", rejected="403"))
    judgement = judged(a_review(namespace=namespace), store=store, health=health)
    assert judgement.outcome is outcome
    nobody = judged(a_review(namespace=namespace), store=store, admission=AdmissionSettings())
    assert nobody.outcome is ReviewOutcome.UNLISTED_USER


@pytest.mark.parametrize("evacuation_node", ["", "n1"])
@pytest.mark.parametrize(
    ("vmi", "facts", "outcome"),
    [
        pytest.param({"migration": a_running_state()}, [], ReviewOutcome.DENIED, id="copying"),
        pytest.param({"migration": None}, [a_vmim()], ReviewOutcome.DENIED, id="handed-off"),
        pytest.param(
            {"migration": None}, [an_ended_vmim()], ReviewOutcome.ALLOWED, id="migration-has-ended"
        ),
    ],
)
def test_the_target_pod_of_a_migration_is_held(
    evacuation_node: str, vmi: dict[str, Any], facts: list[Any], outcome: ReviewOutcome
) -> None:
    """The eviction of a target pod is denied until its migration is finished."""
    target = a_pod(name="virt-launcher-db1-target", uid="p2", node="n2", migration_uid="m1")
    store = a_store(*facts, target, **vmi, evacuation_node=evacuation_node)
    judgement = judged(a_review(name=target.name), store=store)

    if outcome is ReviewOutcome.ALLOWED and evacuation_node:
        outcome = ReviewOutcome.EVACUATING
    assert judgement.outcome is outcome
    if outcome is ReviewOutcome.DENIED:
        assert judgement.verdict is not None
        assert judgement.verdict.reason is Reason.MIGRATION_IN_PROGRESS


@pytest.mark.parametrize(
    ("ago", "outcome"),
    [(DEAD_AFTER - 1.0, ReviewOutcome.DENIED), (DEAD_AFTER, ReviewOutcome.ALLOWED)],
)
def test_a_vmim_that_cannot_be_read_holds_no_target_pod(ago: float, outcome: ReviewOutcome) -> None:
    """A VMIM that has been unreadable for `dead_after` denies no eviction of its target pod."""
    target = a_pod(name="virt-launcher-db1-target", uid="p2", node="n2", migration_uid="m1")
    store = a_store(a_vmim(), target, migration=None)
    store.now = NOW - ago
    store.record_unreadable(Resource.VMIMS, "shop", "mig-1")

    assert judged(a_review(name=target.name), store=store).outcome is outcome


def test_the_target_pod_of_an_earlier_migration_is_not_held_by_a_later_one() -> None:
    """The target pod of a finished migration may be evicted during a later migration."""
    old = a_pod(name="virt-launcher-db1-old", uid="p2", node="n2", migration_uid="m1")
    store = a_store(a_vmim(uid="m2"), old, migration=None, evacuation_node="n1")

    assert judged(a_review(name=old.name), store=store).outcome is ReviewOutcome.EVACUATING


def test_a_failed_migration_counts_as_in_a_verdict() -> None:
    """After a failed migration, an eviction has the same verdict as a query without checkpoint."""
    store = a_store(migration=a_state(outcome=Outcome.FAILED))
    judgement = judged(a_review(), store=store)
    evidence = store.evidence("shop", "db1")
    assert evidence is not None
    assert judgement.verdict == decide(evidence, POLICY, NOW)


@pytest.mark.parametrize(
    ("health", "store", "outcome"),
    [
        pytest.param(a_health(contact=NOW - 700), None, ReviewOutcome.DENIED, id="stale"),
        pytest.param(a_health(contact=NOW - 781), None, ReviewOutcome.UNAVAILABLE, id="dead"),
        pytest.param(a_health(synced=False), None, ReviewOutcome.UNAVAILABLE, id="not-ready"),
        pytest.param(
            a_health(synced=False),
            ClockedStore(keep=KEEP),
            ReviewOutcome.UNAVAILABLE,
            id="not-ready-and-empty",
        ),
        pytest.param(
            a_health(Watched(Resource.VMIS, None, synced=True, contact=NOW)),
            Store(endings_kept=KEEP),
            ReviewOutcome.UNAVAILABLE,
            id="no-pods-seen",
        ),
    ],
)
def test_without_evidence(health: Health, store: Store | None, outcome: ReviewOutcome) -> None:
    """Without evidence, or with dead evidence, the eviction is allowed."""
    assert judged(a_review(), store=store, health=health).outcome is outcome


@pytest.mark.parametrize(
    ("review", "dry_run"),
    [
        pytest.param(a_review(), False, id="for-real"),
        pytest.param(a_review(dryRun=True), True, id="of-the-request"),
        pytest.param(
            a_review(eviction={"deleteOptions": {"dryRun": ["All"]}}), True, id="of-the-eviction"
        ),
        pytest.param(a_review(eviction={"deleteOptions": {"dryRun": "All"}}), False, id="odd"),
        pytest.param(a_review(eviction={"deleteOptions": None}), False, id="null"),
    ],
)
def test_dry_runs(review: Json, dry_run: bool) -> None:
    """A dry run is recognized by the options of the request and of the Eviction."""
    assert read_review(raw(review)).dry_run is dry_run


@pytest.mark.parametrize(
    ("version", "answered_in"),
    [
        ("admission.k8s.io/v1beta1", "admission.k8s.io/v1beta1"),
        ("admission.k8s.io/v2", "admission.k8s.io/v1"),
        (None, "admission.k8s.io/v1"),
    ],
)
def test_another_version_is_allowed(version: str | None, answered_in: str) -> None:
    """A review of another version is allowed, and answered in that version if it is v1beta1."""
    review = read_review(raw(a_review(review={"apiVersion": version})))
    judgement = judged(a_review(review={"apiVersion": version}))
    answer = json.loads(write_answer(review, judgement, POLICY, NOW))
    assert judgement.outcome is ReviewOutcome.UNKNOWN_POD
    assert answer == {
        "apiVersion": answered_in,
        "kind": "AdmissionReview",
        "response": {"uid": REVIEW_UID, "allowed": True},
    }


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"no json",
        b"[]",
        b"null",
        b"{}",
        b'{"request": null}',
        b'{"request": {"uid": ""}}',
        b'{"request": {"uid": 7}}',
        b'{"request": {"uid": "\\ud800"}}',
        b'{"request": {"uid": "\xff"}}',
        b'{"request":' * 5000,
        b"[" * 100_000,
    ],
)
def test_what_has_no_uid(body: bytes) -> None:
    """A review without a UID is an error."""
    with pytest.raises(NotAReview, match=r"JSON|request\.uid"):
        read_review(body)


def test_any_field_may_be_odd() -> None:
    """A review with any value in any field is answered with its UID."""
    for field in a_review()["request"]:
        for odd in ODD_VALUES:
            if field != "uid":
                answer = answered(a_review(**{field: odd}))
                assert answer["uid"] == REVIEW_UID
