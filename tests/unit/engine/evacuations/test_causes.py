"""Which reason explains a state, by its source and its age."""

from typing import Any

import pytest

from exporter.engine.evacuations import causes
from exporter.engine.facts.model import Vmim, Why, WhySource
from exporter.engine.facts.states import State
from exporter.engine.store.reasons import NODE_SELECTOR, TERMINATING
from tests.support.builders import NOW, a_pod, a_vmim, some_evidence


TARGET_POD, CONTAINER = WhySource.TARGET_POD, WhySource.TARGET_CONTAINER
SCHEDULED, FAILED = WhySource.POD_SCHEDULED, WhySource.FAILED_ATTEMPT
SANDBOX = "PodReadyToStartContainers"


def a_why(source: WhySource, reason: str, ago: float | None = 10.0, message: str = "") -> Why:
    """A reason that was written `ago` seconds ago."""
    return Why(source, reason, message, None if ago is None else NOW - ago)


@pytest.mark.parametrize(
    ("ago", "is_kept"), [(119.0, False), (120.0, True), (121.0, True), (None, False)]
)
def test_a_pod_may_take_two_minutes_to_start(ago: float | None, *, is_kept: bool) -> None:
    """Only the conditions of a starting pod are young; another reason counts at once."""
    pod, container = a_why(TARGET_POD, SANDBOX, ago), a_why(CONTAINER, "ErrImagePull", ago)
    assert causes.drop_young((pod, container), NOW) == ((pod,) if is_kept else ()) + (container,)


def test_a_target_pod_that_does_not_start_has_its_own_reasons() -> None:
    """What an earlier target pod said does not explain the present one; creating is no cause."""
    target = a_pod(created=NOW - 300.0)
    earlier = a_why(CONTAINER, "ErrImagePull", 301.0)
    first = a_why(CONTAINER, causes.CREATING, 200.0)
    own = a_why(TARGET_POD, SANDBOX, 300.0)
    state = State.TARGET_NOT_READY
    assert causes.find_state_cause(state, (first, own, earlier), target) is own
    assert causes.find_state_cause(state, (first, earlier), target) is first
    assert causes.find_state_cause(state, (a_why(TARGET_POD, SANDBOX, None),), target) is not None
    refused = a_why(SCHEDULED, "Unschedulable", 400.0)
    assert causes.find_state_cause(state, (refused,), target) is refused
    assert causes.find_state_cause(state, (earlier,), None) is earlier


def test_a_state_has_its_own_source() -> None:
    """The newest reason of the state's source counts, then the last cause, but no selector."""
    selector = Why(SCHEDULED, NODE_SELECTOR, "zone=a", NOW)
    refused = a_why(SCHEDULED, "Unschedulable")
    attempt = a_why(FAILED, "Running")
    state = State.TARGET_UNSCHEDULABLE
    assert causes.find_state_cause(state, (selector, attempt, refused), None) is refused
    assert causes.find_state_cause(state, (attempt,), None) is attempt
    hotplug = a_why(WhySource.HOTPLUG, "HotVCPUChange")
    ended = State.ENDED_NOT_FINISHED
    assert causes.find_state_cause(ended, (attempt, hotplug), None) is hotplug
    assert causes.find_state_cause(ended, (attempt,), None) is None
    deleted = a_why(CONTAINER, TERMINATING)
    assert causes.find_state_cause(State.MIGRATING, (attempt, deleted), None) is deleted
    assert causes.find_state_cause(State.MIGRATING, (attempt,), None) is attempt


def test_after_the_hand_off_an_older_reason_explains_nothing() -> None:
    """A reason of the scheduler counts if it is not older than a failure after the hand-off."""
    attempt = a_why(FAILED, "Running", 60.0)
    for ago, is_newer in ((61.0, False), (60.0, True), (59.0, True)):
        refused = a_why(SCHEDULED, "Unschedulable", ago)
        cause = causes.find_cause((attempt, refused))
        assert cause is (refused if is_newer else attempt)
    early = a_why(FAILED, "Scheduling", 60.0)
    assert causes.find_cause((early, a_why(CONTAINER, "Error", 61.0))) != early
    assert causes.find_cause((attempt, a_why(CONTAINER, "Error", 59.0))) is attempt


LOST = "target pod is down"


@pytest.mark.parametrize(
    ("reason", "message", "is_cause"),
    [
        ("OOMKilled", "exit code 137", True),
        ("Error", "(exit code 1)", False),
        ("Error", "exit code 1", False),
        ("Error", "exit code 11", True),
        ("ErrImagePull", "no such image", False),
    ],
)
def test_a_lost_target_is_explained_by_what_killed_it(
    reason: str, message: str, *, is_cause: bool
) -> None:
    """The end of the target's container is the cause if it did not end by itself."""
    attempt = a_why(FAILED, "Running", 60.0, LOST)
    ended = a_why(CONTAINER, reason, 61.0, message)
    assert causes.is_target_lost((attempt, ended))
    assert causes.find_cause((attempt, ended)) is (ended if is_cause else attempt)


def a_failure(**overrides: Any) -> Vmim:
    """An attempt that failed after 300 s in Scheduling."""
    fields: dict[str, Any] = {
        "phase": "Failed",
        "finished": True,
        "scheduling_at": NOW - 400.0,
        "finished_at": NOW - 100.0,
    }
    return a_vmim(**(fields | overrides))


@pytest.mark.parametrize(
    ("limits", "seconds", "is_out"),
    [
        (causes.UNSCHEDULABLE_FOR, 289.0, False),
        (causes.UNSCHEDULABLE_FOR, 290.0, True),
        (causes.UNSCHEDULABLE_FOR, 420.0, True),
        (causes.UNSCHEDULABLE_FOR, 421.0, False),
        (causes.PENDING_FOR, 889.0, False),
        (causes.PENDING_FOR, 890.0, True),
        (causes.PENDING_FOR, 1200.0, True),
        (causes.PENDING_FOR, 1201.0, False),
    ],
)
def test_kubevirts_limits_for_target_pods(
    limits: tuple[float, float], seconds: float, *, is_out: bool
) -> None:
    """An attempt ended at a limit if it was in Scheduling for about this long."""
    failed = a_failure(scheduling_at=NOW - 100.0 - seconds)
    assert causes.timed_out(some_evidence(vmims=(failed,)), limits) is is_out


@pytest.mark.parametrize(
    "overrides",
    [
        {"scheduled_at": NOW - 300.0},
        {"handed_off": True},
        {"scheduling_at": None},
        {"finished_at": None},
        {"phase": "Pending", "finished": False},
    ],
)
def test_an_attempt_that_went_further_met_no_limit(overrides: dict[str, Any]) -> None:
    """The limits are for attempts that failed before their target pod was ready."""
    evidence = some_evidence(vmims=(a_failure(**overrides),))
    assert not causes.timed_out(evidence, causes.UNSCHEDULABLE_FOR)


@pytest.mark.parametrize(
    ("overrides", "has"),
    [
        ({"scheduled_at": NOW - 220.0}, True),
        ({"scheduled_at": NOW - 219.0}, False),
        ({}, False),
        ({"scheduled_at": NOW - 400.0, "finished_at": None}, False),
        ({"scheduled_at": NOW - 400.0, "phase": "Pending", "finished": False}, False),
    ],
)
def test_a_launcher_gives_up_after_minutes(overrides: dict[str, Any], *, has: bool) -> None:
    """A launcher that waited for two minutes after the hand-off has given up."""
    assert causes.gave_up(some_evidence(vmims=(a_failure(**overrides),))) is has
