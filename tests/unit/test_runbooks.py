"""The runbooks, and the steps in them that answers name."""

import pytest

from exporter.engine.evacuations.obstacles import Obstacle
from exporter.engine.facts.states import State
from exporter.runbooks import NAMES, read_runbook
from exporter.words.advice import ACTIONS, name_step
from tests.generate.rules import all_alerts, list_causes, load_groups


ALERTS = all_alerts(load_groups())


def test_every_alert_has_its_runbook() -> None:
    """Each alert has a runbook of its name, and each runbook has an alert."""
    assert set(NAMES) == set(ALERTS)
    for name in NAMES:
        assert read_runbook(name).startswith(f"# {name}\n")


@pytest.mark.parametrize("obstacle", ACTIONS)
def test_every_action_names_a_step(obstacle: State | Obstacle) -> None:
    """The step that an answer names is the section with that heading, and no more."""
    step = read_runbook(name_step(obstacle))

    assert step.startswith(f"### {obstacle}\n")
    assert step.count("\n##") == 0


@pytest.mark.parametrize("name", ALERTS)
def test_every_cause_of_an_alert_is_a_step(name: str) -> None:
    """The runbook has the step to which the URL of an alert with a cause leads."""
    for cause in list_causes(ALERTS[name]):
        assert read_runbook(f"{name}#{cause}").startswith(f"### {cause}\n")


def test_a_command_with_a_comment_is_no_heading() -> None:
    """A step goes on after a block that begins with a comment of the shell."""
    step = read_runbook("KubeVirtEvacuationStuck#ended_not_finished")

    assert "\n# on a real cluster only\nkubectl" in step


@pytest.mark.parametrize(
    ("reference", "text"),
    [
        ("Unknown", f"no runbook 'Unknown', only {', '.join(NAMES)}"),
        ("../runbooks/KubeVirtVMChurning", "no runbook '../runbooks/KubeVirtVMChurning', only"),
        (
            "KubeVirtEvacuationsStuckMany#x",
            "KubeVirtEvacuationsStuckMany has no step 'x', only cap",
        ),
        ("KubeVirtVMChurning#x", "KubeVirtVMChurning has no step 'x', only a whole text"),
    ],
)
def test_what_does_not_exist_is_answered_with_what_does(reference: str, text: str) -> None:
    """The error names the runbooks, or the steps of this one."""
    with pytest.raises(ValueError, match=r"^no runbook|has no step") as error:
        read_runbook(reference)

    assert str(error.value).startswith(text)
