"""How changes of VMIs, VMIMs and pods change the marker of an evacuation."""

import pytest

from exporter.engine.facts.model import Trigger, Vmim
from tests.support.builders import (
    NOW,
    a_pod,
    a_state,
    a_store,
    a_vmi,
    a_vmim,
)
from tests.unit.engine.facts.test_evidence import marker_of


def an_attempt(**overrides: object) -> Vmim:
    """A VMIM that moves the VMI off n1."""
    return a_vmim(evacuates="n1", trigger=Trigger.EVACUATION, **overrides)


def test_a_success_that_only_the_vmi_shows() -> None:
    """After a success that only the VMI shows, the marker is that of a new evacuation."""
    store = a_store(a_vmi(evacuation_node="n1"), now=NOW - 900)
    store.now = NOW
    store.put(a_vmi(evacuation_node="n1", migration=a_state(end=NOW - 600)))
    assert marker_of(store).seen_at == NOW


def test_a_request_before_a_success_that_only_the_vmi_shows() -> None:
    """Attempts before a success that only the VMI shows belong to the earlier evacuation."""
    attempt = an_attempt(uid="e1", created=NOW - 700)
    store = a_store(a_vmi(evacuation_node="n1"), attempt, now=NOW - 500)
    assert marker_of(store).requested_at == NOW - 700
    store.put(a_vmi(evacuation_node="n1", migration=a_state(end=NOW - 600)))
    assert marker_of(store).requested_at == NOW - 500


def test_an_attempt_of_the_second_of_a_success() -> None:
    """An attempt from the same second as a success belongs to the earlier evacuation."""
    vmi = a_vmi(evacuation_node="n1", migration=a_state(end=NOW - 600))
    store = a_store(vmi, now=NOW)
    store.put(an_attempt(uid="e1", created=NOW - 600))
    assert marker_of(store).requested_at == NOW


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param(("mig", "m1"), ("mig", "m2"), id="one-name-two-uids"),
        pytest.param(("mig-1", ""), ("mig-2", ""), id="two-names-no-uid"),
    ],
)
def test_each_failed_attempt_counts(first: tuple[str, str], second: tuple[str, str]) -> None:
    """Attempts are identified by UID, else by name."""
    store = a_store(a_vmi(evacuation_node="n1", eviction_requested_at=NOW - 60))
    for name, uid in (first, second):
        failed = {"phase": "Failed", "finished": True, "finished_at": NOW}
        store.put(an_attempt(name=name, uid=uid, **failed))
    assert marker_of(store).failed_since_request() == 2


@pytest.mark.parametrize(
    ("strategy", "created", "failed"),
    [("External", NOW - 60, 1), ("External", NOW - 61, 0), ("LiveMigrate", NOW - 60, 0)],
)
def test_any_vmim_since_the_request_is_an_attempt_of_external(
    strategy: str, created: float, failed: int
) -> None:
    """For a VMI with the strategy External, every VMIM since the request counts as an attempt."""
    vmi = a_vmi(evacuation_node="n1", eviction_strategy=strategy, eviction_requested_at=NOW - 60)
    ended = {"phase": "Failed", "finished": True, "finished_at": NOW}
    store = a_store(vmi, a_vmim(created=created, **ended))
    assert marker_of(store).failed_since_request() == failed


class TestLackingTheAnnotation:
    """The time since which the launcher pod has lacked the descheduler's annotation."""

    def test_the_vmi_moves_to_another_launcher(self) -> None:
        """After a VMI moves, `lacking_since` is that of the launcher pod on the new node."""
        store = a_store(
            a_pod(eviction_in_progress=True),
            a_pod(name="target", uid="target", node="n2"),
            a_vmi(evacuation_node="n1"),
        )
        assert marker_of(store).lacking_since is None
        store.now = NOW
        store.put(a_vmi(evacuation_node="n1", node="n2"))
        assert marker_of(store).lacking_since == NOW

    def test_an_evacuation_that_begins_again(self) -> None:
        """A success that a VMIM shows ends the evacuation, and `lacking_since` starts again."""
        store = a_store(a_pod(), a_vmi(evacuation_node="n1"), now=NOW - 900)
        assert marker_of(store).lacking_since == NOW - 900
        store.now = NOW
        success = {"phase": "Succeeded", "finished": True, "handed_off": True}
        store.put(a_vmim(end=NOW - 600, outcome=a_state().outcome, **success))
        assert marker_of(store).lacking_since == NOW
