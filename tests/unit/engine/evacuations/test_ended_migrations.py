"""Why a migration failed after its hand-off."""

import pytest

from exporter.engine.evacuations.ended_migrations import EndedMigration, find_reason
from exporter.engine.facts.model import EndReason, Outcome
from tests.support.builders import a_vmi, an_ended_vmim


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
