"""Facts about single objects."""

from typing import Any

import msgspec
import pytest

from exporter.engine.facts.model import KILLED_WITHIN, Instant
from tests.support.builders import NOW, a_pod


@pytest.mark.parametrize(("bound", "beyond"), [(-62_135_596_800, -1), (253_402_300_799, 1)])
def test_a_stored_instant_is_in_the_calendar(bound: int, beyond: int) -> None:
    """RFC 3339 has the years 1 to 9999."""
    assert msgspec.convert(bound, Instant, strict=False) == bound
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(bound + beyond, Instant, strict=False)


@pytest.mark.parametrize(
    ("facts", "hangs"),
    [
        ({}, False),
        ({"deleted_at": NOW - KILLED_WITHIN}, False),
        ({"deleted_at": NOW - KILLED_WITHIN - 1.0}, True),
        ({"deleted_at": NOW - KILLED_WITHIN - 1.0, "phase": "Failed"}, False),
    ],
)
def test_a_pod_that_outlives_its_grace_period_hangs(facts: dict[str, Any], *, hangs: bool) -> None:
    """A kubelet that works kills its containers within a minute."""
    assert a_pod(**facts).hangs(NOW) is hangs
