"""When a VM last left each node."""

import pytest

from exporter.engine.facts.model import KubeVirtSettings, Outcome
from exporter.engine.store import merging
from exporter.engine.store.merging import Departures
from tests.support.builders import NOW, a_state, a_vmi, a_vmim
from tests.support.stores import ClockedStore


def test_the_newest_departure_of_each_node_counts() -> None:
    """`read_newest` has the newest departure of each node and of all; unknown ends are ignored."""
    noted = Departures()
    for node, end in (("n1", NOW - 50.0), ("n1", NOW - 90.0), ("n2", None), ("n2", NOW - 10.0)):
        noted.record(node, end, NOW)
    assert noted.read_newest() == ({"n1": NOW - 50.0, "n2": NOW - 10.0}, NOW - 10.0)


def test_the_node_that_was_left_the_longest_ago_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A bounded number of nodes is stored; the node with the oldest departure is dropped."""
    monkeypatch.setattr(merging, "NODES_KEPT", 2)
    noted = Departures()
    for seconds, node in enumerate(("n1", "n2", "n1", "n3")):
        noted.record(node, NOW + seconds - 9.0, NOW)
    assert list(noted.read_newest()[0]) == ["n1", "n3"]
    noted.record("n1", NOW - 7.0, NOW)  # the same end again, so n1 is still the oldest
    noted.record("n4", NOW, NOW)
    assert list(noted.read_newest()[0]) == ["n3", "n4"]


def test_an_end_ahead_of_our_clock_counts_later() -> None:
    """When our clock has reached it, the next migration of the VM shows it, without its VMI."""
    store = ClockedStore(now=NOW)
    store.put(KubeVirtSettings())
    state = a_state(end=NOW + 600.0, source_node="n1", outcome=Outcome.SUCCEEDED)
    store.put(a_vmi(node="n2", migration=state))
    store.now = NOW + 700.0
    assert (load := store.load())
    assert load.newest_success is None
    store.put(a_vmim(uid="m2", phase="Scheduled", handed_off=True))
    assert (load := store.load())
    assert load.newest_success == NOW + 600.0
