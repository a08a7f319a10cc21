"""Each table of words has every value that people see, in the order of the program."""

from collections.abc import Iterable, Mapping
from typing import Any

import pytest

from exporter.engine.evacuations.advice import BY_CAUSE, WAITING
from exporter.engine.evacuations.drain_outcomes import DrainOutcome
from exporter.engine.evacuations.obstacles import Obstacle
from exporter.engine.facts.model import Resource
from exporter.engine.facts.policy import Reason
from exporter.engine.facts.states import State
from exporter.engine.store.evacuation_ends import EvacuationOutcome
from exporter.engine.store.node_drains import DrainEnd
from exporter.engine.verdicts.rules import RULES
from exporter.words import advice, evacuations, health, verdicts


@pytest.mark.parametrize(
    ("table", "values"),
    [
        pytest.param(verdicts.REASONS, Reason, id="reasons"),
        pytest.param(evacuations.OUTCOMES, DrainOutcome, id="outcomes"),
        pytest.param(health.LOSSES, Resource, id="losses"),
        pytest.param(evacuations.STATES, State, id="states"),
        pytest.param(evacuations.DRAIN_ENDS, DrainEnd, id="ends-of-drains"),
        pytest.param(evacuations.EVACUATION_ENDS, EvacuationOutcome, id="ends-of-evacuations"),
        pytest.param(verdicts.EXPLANATIONS, [rule.name for rule in RULES], id="rules"),
    ],
)
def test_every_value_has_its_words(table: Mapping[str, Any], values: Iterable[str]) -> None:
    """A value without words is found here, and not by the person who would have read them."""
    assert list(table) == list(values)


def test_every_obstacle_has_its_action() -> None:
    """There is an action for each obstacle, and for each state that says by itself what to do."""
    assert set(advice.ACTIONS) == set(State) - (BY_CAUSE - WAITING) | set(Obstacle)
