"""When a VM last left each node."""

import pytest

from exporter.engine import departures
from exporter.engine.departures import Departures
from tests.support.builders import NOW


def test_the_newest_departure_of_each_node_counts() -> None:
    """An earlier one, or one without a known end, changes nothing."""
    noted = Departures()
    for node, end in (("n1", NOW - 50.0), ("n1", NOW - 90.0), ("n2", None), ("n2", NOW - 10.0)):
        noted.note(node, end, NOW)
    assert noted.latest == {"n1": NOW - 50.0, "n2": NOW - 10.0}


def test_the_node_that_was_left_the_longest_ago_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So many are kept; a further departure of a node makes it the latest one."""
    monkeypatch.setattr(departures, "NODES_KEPT", 2)
    noted = Departures()
    for seconds, node in enumerate(("n1", "n2", "n1", "n3")):
        noted.note(node, NOW + seconds - 9.0, NOW)
    assert list(noted.latest) == ["n1", "n3"]
