"""Each table of words has every value that people see, in the order of the program."""

from collections.abc import Iterable, Mapping
from string import Formatter
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


WAITS = "waiting for the next attempt"


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


def test_the_first_clause_of_a_step_is_the_same_for_many_vms() -> None:
    """It is short, and of what differs by VM it has only nodes, the gate and what is copied."""
    shared = {"node", "vm_node", "target", "taint", "handlers", "gate", "copied"}
    for obstacle, action in advice.ACTIONS.items():
        clause = advice.shorten_step(action.sentence)
        assert {name for _, name, _, _ in Formatter().parse(clause) if name} <= shared, obstacle
        assert 4 <= len(clause) <= 90, clause


@pytest.mark.parametrize(
    ("state", "failed", "delay"),
    [
        (State.QUOTA, 0, "quota"),
        (State.QUOTA, 3, "quota"),
        (State.BACKOFF, 3, WAITS),
        (State.CAPACITY, 0, WAITS),
        (State.MIGRATING, 3, WAITS),
        (State.MIGRATING, 0, "migrating"),
    ],
)
def test_what_passes_within_seconds_is_no_delay(state: State, failed: int, delay: str) -> None:
    """A stuck VM whose state changes with each attempt waits for the next; another has its state.

    A migration without a failure before it may be one that does not end.
    """
    assert evacuations.describe_delay(state, failed) == delay


def test_every_obstacle_has_its_action() -> None:
    """There is an action for each obstacle, and for each state that says by itself what to do."""
    assert set(advice.ACTIONS) == set(State) - (BY_CAUSE - WAITING) | set(Obstacle)
