"""What the responder answers to an Eviction."""

import pytest
from msgspec.structs import replace

from exporter.engine.evacuations.conditions import read_conditions
from exporter.engine.facts.model import (
    Eviction,
    EvictionRequester,
    KubeVirtSettings,
    Pod,
    Resource,
    Vmi,
)
from exporter.engine.facts.policy import Policy, Reason, StuckPolicy
from exporter.responder.responses import Response, Step, respond
from tests.support.builders import (
    NOW,
    a_pod,
    a_policy,
    a_running_state,
    a_state,
    a_vmi,
    a_vmim,
    an_ended_vmim,
    an_evacuating_vmi,
)
from tests.support.stores import ClockedStore, a_trust


HOLDS_FOR = 86_400.0
MIGRATABLE = {"eviction_strategy": "LiveMigrate", "migratable": True}


def answer(
    vmi: Vmi,
    *facts: object,
    pod: Pod | None = None,
    policy: Policy | None = None,
    dead: tuple[Resource, ...] = (),
    began: float = NOW - 60.0,
    evicts: bool = True,
) -> Response:
    """The response to the Eviction of a launcher pod of the VMI, which became ours at `began`."""
    store = ClockedStore(now=NOW)
    pod = pod or a_pod()
    for fact in (KubeVirtSettings(), vmi, a_pod(), pod, *facts):
        store.put(fact)  # type: ignore[arg-type]
    store.trust = a_trust(*dead)
    evidence = store.evidence(vmi.namespace, vmi.name)
    assert evidence is not None
    eviction = Eviction(
        namespace=pod.namespace,
        name=f"pod-1-{pod.name}",
        uid="e1",
        pod=pod.name,
        pod_uid=pod.uid,
        requesters=(EvictionRequester("example.com/drain", "Eviction"),),
        started_at=began,
    )
    return respond(
        eviction,
        pod,
        evidence,
        read_conditions(store, StuckPolicy(), store.trust, NOW),
        policy or a_policy(),
        why=(),
        longest_hold=HOLDS_FOR,
        evicts=evicts,
    )


def a_cooling_vmi(**fields: object) -> Vmi:
    """A migratable VMI whose last migration ended ten minutes ago."""
    return a_vmi(**{"migration": a_state(), **MIGRATABLE, **fields})


def test_a_cooldown_is_a_hold_with_a_reason_and_a_time() -> None:
    """The cooldown of 15 minutes ends five minutes from now."""
    response = answer(a_cooling_vmi())
    assert response.step is Step.HOLD
    assert response.expected_at == NOW + 300.0
    assert response.message == (
        "shop/db1 may not be moved now: it is cooling down after its last migration, until"
        " 2027-01-15T08:05:00Z."
    )
    assert response.verdict is not None
    assert response.verdict.reason is Reason.COOLDOWN


@pytest.mark.parametrize(("evicts", "step"), [(True, Step.EVICT), (False, Step.COMPLETE)])
def test_what_no_rule_blocks_is_evicted(*, evicts: bool, step: Step) -> None:
    """By the exporter, or by the next responder."""
    response = answer(a_vmi(**MIGRATABLE), evicts=evicts)
    assert response.step is step
    assert response.message == "If shop/db1 is evicted, it is migrated."


def test_a_hold_ends() -> None:
    """After `admission.maxHold`, the VM is evicted although a rule blocks it."""
    blocked = a_policy(block=True)
    assert answer(a_vmi(**MIGRATABLE), policy=blocked).step is Step.HOLD
    assert answer(a_vmi(**MIGRATABLE), policy=blocked, began=NOW - HOLDS_FOR).step is Step.EVICT


def test_nothing_is_held_without_believable_evidence() -> None:
    """While the watch of VMIs is dead, the cooldown may be of a VM that is no more."""
    assert answer(a_cooling_vmi(), dead=(Resource.VMIS,)).step is Step.EVICT


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"eviction_strategy": "None"}, "it goes down: its strategy is None."),
        (
            {"eviction_strategy": "LiveMigrateIfPossible"},
            "it goes down: LiveMigrateIfPossible, and it is not migratable.",
        ),
    ],
)
def test_a_vm_is_never_stopped_by_the_exporter(fields: dict[str, object], message: str) -> None:
    """The message says what an eviction does, and the next responder does it."""
    response = answer(a_vmi(**fields))
    assert (response.step, response.message) == (
        Step.COMPLETE,
        f"If shop/db1 is evicted, {message}",
    )


def test_a_vm_that_boots_is_held() -> None:
    """With LiveMigrateIfPossible, KubeVirt would stop a VM whose condition is not there yet."""
    vmi = a_vmi(eviction_strategy="LiveMigrateIfPossible", migratable_unknown=True)
    assert answer(vmi).step is Step.HOLD
    assert answer(vmi, began=NOW - HOLDS_FOR).step is Step.COMPLETE


def test_the_target_of_a_migration_waits() -> None:
    """Its eviction would move the VM a second time, as soon as it has arrived."""
    target = a_pod(name="virt-launcher-db1-y", uid="uid-of-target", node="n2", migration_uid="m1")
    moving = a_vmi(migration=a_running_state(source_node="n1"), **MIGRATABLE)
    response = answer(moving, a_vmim(phase="Running", handed_off=True), pod=target)
    assert response.step is Step.HOLD
    assert response.message == (
        "shop/db1 may not be moved now: it has a migration that has not ended."
    )


def test_an_evacuation_is_followed() -> None:
    """The message has its state and the next step, also while its migration runs."""
    response = answer(an_evacuating_vmi(age=60.0))
    assert response.step is Step.FOLLOW
    assert response.message.startswith("shop/db1 leaves n1: no_migration, failed attempts: 0. ")
    assert "Begin with: kubectl" in response.message


def test_a_running_migration_should_end_after_its_last_duration() -> None:
    """As long as the last one took; without one, nobody knows."""
    running = a_running_state(uid="m2", source_node="n1")
    vmim = a_vmim(name="mig-2", uid="m2", phase="Running", handed_off=True, evacuates="n1")
    vmi = an_evacuating_vmi(age=120.0, migration=running)
    last = an_ended_vmim(start=NOW - 1_000.0, end=NOW - 900.0)
    assert answer(vmi, last, vmim).expected_at == NOW + 40.0
    assert answer(vmi, vmim).expected_at is None


def test_a_vm_that_has_left_is_followed_until_its_pod_has_ended() -> None:
    """KubeVirt ends the old pod seconds after the migration."""
    moved = a_vmi(node="n2", migration=a_state(source_node="n1"), **MIGRATABLE)
    response = answer(moved)
    assert response.step is Step.FOLLOW
    assert response.message == "shop/db1 is on n2, and its pod on n1 has not ended yet."
    ended = answer(moved, pod=replace(a_pod(), phase="Succeeded"))
    assert (ended.step, ended.message) == (Step.COMPLETE, "shop/db1 has left n1.")


def test_a_vm_that_has_stopped_has_not_left() -> None:
    """Its pod has ended on the VM's own node."""
    response = answer(a_vmi(phase="Failed", **MIGRATABLE), pod=replace(a_pod(), phase="Failed"))
    assert (response.step, response.message) == (Step.COMPLETE, "shop/db1 has stopped on n1.")
