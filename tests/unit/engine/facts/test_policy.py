"""The table of the policy's values, from which all that people see of a policy is written."""

import pytest
from msgspec import structs

from exporter.engine.facts.policy import COOLDOWN_DURATIONS, COOLDOWN_VALUES, PolicyValues
from exporter.server.api.openapi import read_meanings


def test_each_value_of_a_cooldown_has_words() -> None:
    """A value that is neither a guard nor `block` is in the table, in the order of the fields."""
    fields = [
        field.name
        for field in structs.fields(PolicyValues)
        if not field.name.startswith("guard_") and field.name != "block"
    ]

    assert list(COOLDOWN_VALUES) == fields


@pytest.mark.parametrize("field", COOLDOWN_DURATIONS)
def test_the_meaning_says_what_0_means(field: str) -> None:
    """The description of a duration ends with the words for 0."""
    assert read_meanings(PolicyValues)[field].endswith(f"; 0: {COOLDOWN_VALUES[field].off}")
