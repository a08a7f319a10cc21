"""What is said of outcomes and of stuck moves depends on the facts."""

import pytest

from exporter.engine.evacuations.drain_outcomes import DrainOutcome
from exporter.engine.facts.model import Trigger
from exporter.engine.facts.states import NEEDS_PERSON, State
from exporter.words.evacuations import OUTCOMES, describe_stuck_move


def test_the_outcome_fails_names_the_states_that_need_a_person() -> None:
    """A state is named if it fails from the start, and only then."""
    text = OUTCOMES[DrainOutcome.FAILS].meaning
    assert {state for state in State if f"`{state}`" in text} == NEEDS_PERSON


@pytest.mark.parametrize(
    ("failed", "text"),
    [(0, "manual migration does not end"), (1, "last migration failed"), (2, "2 migrations")],
)
def test_a_stuck_move_hangs_or_has_failed(failed: int, text: str) -> None:
    """A move without failures hangs; otherwise its failures are counted."""
    assert text in describe_stuck_move(Trigger.MANUAL, failed)
