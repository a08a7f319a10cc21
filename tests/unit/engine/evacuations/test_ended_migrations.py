"""One migration that has ended: its phase, its duration, and why it failed."""

from typing import Any

import pytest

from exporter.engine.evacuations import ended_migrations
from exporter.engine.evacuations.ended_migrations import EndedMigration, NodesLeft, find_reason
from exporter.engine.facts.model import EndReason, Outcome, Vmi, Why, WhySource
from exporter.engine.facts.states import State
from tests.support.builders import NOW, a_vmi, an_ended_vmim


FAILED: dict[str, Any] = {"outcome": Outcome.FAILED, "phase": "Failed"}
STOPPED = a_vmi(phase="Failed")
NO_IMAGE = Why(WhySource.TARGET_CONTAINER, "ImagePullBackOff")
CRASHED = Why(WhySource.TARGET_CONTAINER, "OOMKilled")
NO_NODE = Why(WhySource.POD_SCHEDULED, "Unschedulable")


@pytest.mark.parametrize(
    ("message", "aborted", "reason"),
    [
        pytest.param(
            "Live migration is not completed after 30 seconds and has been aborted",
            False,
            EndReason.TIMEOUT_COMPLETION,
            id="too slow",
        ),
        pytest.param(
            "Live migration stuck for 150 seconds and has been aborted",
            False,
            EndReason.TIMEOUT_PROGRESS,
            id="no progress",
        ),
        pytest.param(
            "Live migration has been aborted", False, EndReason.TIMEOUT_COMPLETION, id="given up"
        ),
        pytest.param("Live migration has been aborted", True, EndReason.ABORTED, id="cancelled"),
        pytest.param("Live migration aborted ", False, EndReason.ABORTED, id="cancelled before"),
        pytest.param("virError(Code=9, Domain=10)", False, EndReason.LIBVIRT, id="libvirt"),
        pytest.param("Target pod is down", False, EndReason.TARGET_LOST, id="target"),
        pytest.param("KubeVirt says something new", False, EndReason.OTHER, id="other"),
    ],
)
def test_kubevirts_words(message: str, *, aborted: bool, reason: EndReason) -> None:
    """KubeVirt's message gives the reason; if two reasons share a message, `aborted` decides."""
    vmim = an_ended_vmim(outcome=Outcome.FAILED, phase="Failed", aborted=aborted)
    ended = EndedMigration(vmim=vmim, message=message, has_state=True)
    assert find_reason(ended, a_vmi(), []) is reason


@pytest.mark.parametrize(
    ("why", "vmim", "vmi", "reason"),
    [
        pytest.param((NO_NODE, NO_IMAGE), {}, a_vmi(), EndReason.IMAGE, id="image"),
        pytest.param((CRASHED, NO_NODE), {}, a_vmi(), EndReason.UNSCHEDULABLE, id="no-node"),
        pytest.param(
            (CRASHED,),
            {"wait_reason": State.QUOTA, "aborted": True},
            a_vmi(),
            EndReason.QUOTA,
            id="quota",
        ),
        pytest.param((CRASHED,), {"aborted": True}, None, EndReason.ABORTED, id="aborted"),
        pytest.param((CRASHED,), {}, None, EndReason.SOURCE_LOST, id="no-vmi"),
        pytest.param((CRASHED,), {}, STOPPED, EndReason.SOURCE_LOST, id="vm-stopped"),
        pytest.param((CRASHED,), {}, a_vmi(), EndReason.TARGET_LOST, id="target"),
        pytest.param((), {}, a_vmi(), EndReason.OTHER, id="nothing-says-why"),
    ],
)
def test_a_failure_before_the_hand_off(
    why: tuple[Why, ...], vmim: dict[str, Any], vmi: Vmi | None, reason: EndReason
) -> None:
    """Without a hand-off, the first cause in this order is the reason."""
    ended = EndedMigration(vmim=an_ended_vmim(**FAILED, handed_off=False, **vmim))
    assert find_reason(ended, vmi, why) is reason


@pytest.mark.parametrize(
    ("vmim", "mode", "vmi", "reason"),
    [
        pytest.param({}, "PreCopy", STOPPED, EndReason.NONE, id="succeeded"),
        pytest.param(FAILED, "PostCopy", STOPPED, EndReason.POST_COPY_LOST, id="post-copy"),
        pytest.param(FAILED, "PreCopy", STOPPED, EndReason.SOURCE_LOST, id="vm-stopped"),
        pytest.param(FAILED, "PreCopy", None, EndReason.OTHER, id="vm-deleted-later"),
    ],
)
def test_an_end_after_the_hand_off(
    vmim: dict[str, Any], mode: str, vmi: Vmi | None, reason: EndReason
) -> None:
    """A failed migration has lost its target in post-copy, or its source if the VM has stopped."""
    ended = EndedMigration(vmim=an_ended_vmim(**vmim), mode=mode)
    assert find_reason(ended, vmi, []) is reason


@pytest.mark.parametrize(
    ("created", "finished_at", "duration"),
    [
        (NOW - 90.0, NOW, 90.0),
        (NOW - 0.5, NOW, 0.5),
        (NOW, NOW - 9.0, 0.0),
        (None, NOW, None),
        (NOW, None, None),
    ],
)
def test_the_duration(
    created: float | None, finished_at: float | None, duration: float | None
) -> None:
    """The duration is from the creation to the final phase, and never negative."""
    vmim = an_ended_vmim(created=created, finished_at=finished_at)
    assert EndedMigration(vmim=vmim).duration == duration


def test_the_phase_is_the_last_one_before_the_final_one() -> None:
    """A migration that reached its final phase at once has no phase."""
    vmim = an_ended_vmim()
    assert EndedMigration(vmim=vmim).phase == ""
    ended = EndedMigration(vmim=vmim, phases=(("Pending", 1.0), ("Running", 59.0)))
    assert ended.phase == "Running"


@pytest.mark.parametrize(
    ("handed_off", "has_state", "is_whole"),
    [(True, False, False), (True, True, True), (False, False, True)],
)
def test_kubevirt_adds_the_state_after_the_end(
    *, handed_off: bool, has_state: bool, is_whole: bool
) -> None:
    """After a hand-off, the VMIM is complete only with its copy of the VMI's `migrationState`."""
    vmim = an_ended_vmim(handed_off=handed_off)
    assert EndedMigration(vmim=vmim, has_state=has_state).is_whole is is_whole


@pytest.mark.parametrize(("window", "returned"), [(600.0, True), (599.0, False)])
def test_a_vm_that_comes_back_within_the_window_has_returned(
    window: float, *, returned: bool
) -> None:
    """A VM returns if it left the target node at most a window ago."""
    nodes = NodesLeft()
    assert not nodes.record("a", "n1", "n2", NOW, window)
    assert nodes.record("a", "n2", "n1", NOW + 600.0, window) is returned


@pytest.mark.parametrize(
    ("vmi_uid", "source", "target"), [("", "n2", "n1"), ("a", "", "n1"), ("a", "n2", "")]
)
def test_a_move_between_unknown_nodes_is_no_return(vmi_uid: str, source: str, target: str) -> None:
    """Without the VMI and both nodes, it is unknown whether a VM returns."""
    nodes = NodesLeft()
    nodes.record("a", "n1", "n2", NOW, 600.0)
    assert not nodes.record(vmi_uid, source, target, NOW, 600.0)


def test_the_vmis_that_moved_last_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """If too many VMIs move, the one that moved longest ago is forgotten."""
    monkeypatch.setattr(ended_migrations, "VMIS_KEPT", 2)
    nodes = NodesLeft()
    for vmi in ("a", "b", "c"):
        nodes.record(vmi, "n1", "n2", NOW, 600.0)
    assert [nodes.record(vmi, "n2", "n1", NOW, 600.0) for vmi in ("b", "c", "a")] == [
        True,
        True,
        False,
    ]
