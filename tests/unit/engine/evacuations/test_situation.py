"""When a copy has run for longer than KubeVirt allows, and what a pause before a retry holds."""

import pytest
from msgspec.structs import replace

from exporter.engine.evacuations.situation import assess, find_hand_off, is_ending
from exporter.engine.facts.model import MigrationState, Node
from exporter.engine.facts.policy import StuckPolicy
from exporter.engine.facts.states import State
from exporter.engine.store.nodes import NodeIndex
from tests.support.builders import NOW, a_pod, a_running_state, a_state, a_vmi, some_evidence
from tests.unit.engine.evacuations.test_diagnosis import (
    ROOM,
    an_attempt,
    an_evacuation,
)


STUCK = StuckPolicy()


def running(seconds: float, mode: str = "PreCopy") -> MigrationState:
    """A copy that KubeVirt allows ten minutes."""
    return a_running_state(start=NOW - seconds, time_limit=600.0, mode=mode)


@pytest.mark.parametrize(
    ("state", "is_over"),
    [
        pytest.param(running(600.0), False, id="in-time"),
        pytest.param(running(601.0), True, id="too-long"),
        pytest.param(running(1200.0, "Paused"), False, id="paused"),
        pytest.param(running(1201.0, "Paused"), True, id="paused-too-long"),
        pytest.param(a_state(start=NOW - 9000.0, time_limit=600.0), False, id="ended"),
        pytest.param(a_running_state(start=None, time_limit=600.0), False, id="not-started"),
        pytest.param(a_running_state(start=NOW - 9000.0), False, id="no-limit"),
        pytest.param(None, False, id="no-migration"),
    ],
)
def test_a_copy_beyond_kubevirts_limit(state: MigrationState | None, *, is_over: bool) -> None:
    """KubeVirt should have ended the copy after its limit, or twice that if it paused the VM."""
    evidence = an_evacuation(vmi={"migration": state})
    assert assess(evidence, STUCK, ROOM, NOW, contacts={}, nodes=None).overdue is is_over


def test_a_hand_off_lasts_until_the_copy_begins() -> None:
    """An attempt that is handed off counts from then, or from its creation if that is unknown."""
    handed = an_attempt(phase="PreparingTarget", scheduled_at=NOW - 5.0)
    assert find_hand_off(an_evacuation(), handed) == NOW - 5.0
    assert find_hand_off(an_evacuation(), replace(handed, scheduled_at=None)) == NOW - 10.0
    assert find_hand_off(an_evacuation(), replace(handed, phase="Scheduling")) is None
    assert find_hand_off(an_evacuation(), replace(handed, start=NOW)) is None
    assert find_hand_off(an_evacuation(), None) is None
    for start, since in ((None, NOW - 5.0), (NOW - 1.0, None)):
        evidence = an_evacuation(vmi={"migration": a_running_state(uid="e1", start=start)})
        assert find_hand_off(evidence, handed) == since
    other = an_evacuation(vmi={"migration": a_running_state(uid="m9", start=NOW - 1.0)})
    assert find_hand_off(other, handed) == NOW - 5.0


def test_a_silent_node_ends_no_pod() -> None:
    """A pod ends with its deletion on a node that answers, and a VMI on every node."""
    launcher = a_pod(deleted_at=NOW)
    evidence = some_evidence(launcher=launcher, pods=(launcher,))
    for silent in (False, True):
        index = NodeIndex()
        index.put(Node(name="n1", is_silent=silent), NOW)
        assert is_ending(evidence, index) is not silent
        assert is_ending(some_evidence(vmi=a_vmi(deleted_at=NOW)), index)
        assert not is_ending(some_evidence(), index)
    assert is_ending(evidence, None)


@pytest.mark.parametrize(
    ("began", "silent_since", "state"),
    [
        (3000.0, 1700.0, State.MIGRATING),
        (3000.0, 1900.0, State.MIGRATION_STALLED),
        (1700.0, 1900.0, State.MIGRATING),
        (1900.0, None, State.MIGRATION_STALLED),
    ],
)
def test_a_copy_from_a_silent_node_stalls(
    began: float, silent_since: float | None, state: State
) -> None:
    """It stalls `stuck.after` (1,800 s) after its begin and the node's last answer, not later."""
    index = NodeIndex()
    since = None if silent_since is None else NOW - silent_since
    index.put(Node(name="n1", is_silent=True, silent_since=since), NOW)
    evidence = an_evacuation(vmi={"migration": a_running_state(start=NOW - began)})
    assert assess(evidence, STUCK, ROOM, NOW, contacts={}, nodes=index).state is state
