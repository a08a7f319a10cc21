"""The progress of a node's drain, measured from the VMs in the store."""

import pytest

from exporter.engine.evacuations.drain import forecast_node, forecast_nodes
from exporter.engine.facts.model import Outcome, Resource, Vmi
from exporter.engine.store import node_drains
from exporter.engine.store.node_drains import (
    PAUSE,
    Departed,
    DrainProgress,
    NodeDrains,
    measure_progress,
)
from tests.support.builders import NAMESPACE, NOW, a_state, a_store
from tests.support.stores import ClockedStore
from tests.unit.engine.evacuations.test_drain import a_movable, now_in


def asked(number: int, **overrides: object) -> Vmi:
    """A VM on n1 whose evacuation was requested ten minutes ago."""
    fields = {"evacuation_node": "n1", "eviction_requested_at": NOW - 600.0} | overrides
    return a_movable(number, **fields)


def gone(number: int, left_at: float) -> Vmi:
    """The VM with this number after its migration to n2."""
    state = a_state(end=left_at, outcome=Outcome.SUCCEEDED)
    return a_movable(number, node="n2", migration=state)


def drain_of(store: ClockedStore, node: str = "n1") -> DrainProgress:
    """The progress of a node's drain, which must be the same in both forecasts."""
    conditions = now_in(store)
    by_name = {one.node: one.progress for one in forecast_nodes(store, conditions, {})}
    single = forecast_node(store, node, conditions)[0].progress
    assert by_name.get(node) == single
    assert single is not None
    return single


def a_drain(*left_at: float, remaining: int) -> ClockedStore:
    """A drain of n1; some VMs left the node at the times `left_at`."""
    vmis = len(left_at) + remaining
    store = a_store(*(asked(number) for number in range(vmis)), now=NOW - 600.0)
    store.now = NOW
    for number, instant in enumerate(left_at):
        store.put(gone(number, instant))
    return store


def test_a_drain_is_followed_from_its_first_request() -> None:
    """The progress of a drain has its departures, their median interval and an estimate."""
    drain = drain_of(a_drain(NOW - 300, NOW - 200, NOW - 60, remaining=2))
    assert (drain.since, drain.asked, drain.left, drain.remaining) == (NOW - 600, 5, 3, 2)
    assert (drain.last_left_at, drain.seconds_per_vmi) == (NOW - 60, 120.0)
    assert drain.estimate == 180.0


@pytest.mark.parametrize("stays", [{"migratable": False}, {"eviction_strategy": "External"}])
def test_there_is_no_estimate_where_a_vm_does_not_leave(stays: dict[str, object]) -> None:
    """While a VM stays or must be moved by somebody else, there is no estimate."""
    store = a_drain(NOW - 300, NOW - 200, NOW - 60, remaining=2)
    store.put(asked(4, **stays))
    drain = drain_of(store)
    assert drain.failing + drain.external == 1
    assert drain.estimate is None


def test_two_departures_are_no_pace() -> None:
    """With fewer than three departures there is no estimate."""
    drain = drain_of(a_drain(NOW - 300, NOW - 60, remaining=1))
    assert (drain.left, drain.seconds_per_vmi, drain.estimate) == (2, None, None)


def test_a_cancelled_evacuation_is_not_asked_any_more() -> None:
    """A VM whose evacuation was cancelled is no longer counted in the drain."""
    store = a_drain(NOW - 60, remaining=2)
    store.put(a_movable(2))
    drain = drain_of(store)
    assert (drain.asked, drain.left, drain.remaining) == (2, 1, 1)


def test_a_vm_that_is_deleted_has_left() -> None:
    """A deleted VM counts as one that has left the node."""
    store = a_drain(remaining=2)
    store.remove(Resource.VMIS, NAMESPACE, asked(0).name)
    drain = drain_of(store)
    assert (drain.left, drain.remaining, drain.last_left_at) == (1, 1, NOW)


@pytest.mark.parametrize(("pause", "left"), [(PAUSE - 1, 1), (PAUSE + 1, 0)])
def test_evictions_one_by_one_are_one_drain(pause: float, left: int) -> None:
    """An eviction soon after the last departure belongs to the same drain."""
    store = a_drain(NOW, remaining=0)
    assert forecast_node(store, "n1", now_in(store))[0].progress is None
    store.put(a_movable(7))
    store.now = NOW + pause
    store.put(asked(7, eviction_requested_at=NOW + pause))
    drain = drain_of(store)
    assert drain.left == left


def test_a_drain_began_with_its_earliest_request() -> None:
    """A drain begins with its earliest request, also if the VM of that request has left already."""
    drains = NodeDrains()
    for uid in ("a", "b", "c"):
        drains.ask("n1", uid, NOW)
    for uid, requested_at in (("a", NOW - 50.0), ("b", NOW - 90.0)):
        drains.leave("n1", uid, requested_at, NOW)
    assert drains.read()["n1"].began == NOW - 90.0
    assert measure(drains.read()["n1"], NOW - 20.0).since == NOW - 90.0


def test_a_drain_that_goes_on_is_not_idle() -> None:
    """A request within `PAUSE` after the last departure continues a drain. Cancelling the request
    of a VM that has left changes nothing.
    """
    drains = NodeDrains()
    drains.ask("n1", "a", NOW)
    drains.leave("n1", "a", NOW, NOW)
    drains.ask("n1", "b", NOW + PAUSE)
    drains.cancel("n1", "a", NOW + PAUSE)
    drains.ask("n1", "c", NOW + 3 * PAUSE)
    assert drains.read()["n1"].count == 1


def test_only_a_vm_that_was_asked_to_leave_counts() -> None:
    """The departure of another VM changes nothing, whether or not the node is being drained."""
    drains = NodeDrains()
    drains.leave("n1", "other", NOW, NOW)
    drains.cancel("n1", "other", NOW)
    assert drains.read() == {}
    drains.ask("n1", "a", NOW)
    drains.leave("n1", "other", NOW, NOW)
    assert drains.read()["n1"].count == 0


def test_drains_that_are_over_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """When `NODES_KEPT` nodes are stored, those without evacuations are dropped."""
    monkeypatch.setattr(node_drains, "NODES_KEPT", 2)
    drains = NodeDrains()
    for node in ("n1", "n2"):
        drains.ask(node, node, NOW)
        drains.leave(node, node, NOW, NOW)
    drains.ask("n1", "again", NOW)
    assert drains.read()["n1"].count == 1
    drains.ask("n3", "c", NOW)
    drains.ask("n2", "again", NOW)
    assert {node: one.count for node, one in drains.read().items()} == {"n1": 1, "n2": 0, "n3": 0}


def test_a_drain_is_stuck_from_the_very_end_of_its_time() -> None:
    """A drain is stuck as soon as no VM has left within `stuck_after`; an overdue estimate is 0."""
    assert measure(a_departure(NOW - 60.0), NOW - 90.0).stuck
    assert not measure(a_departure(NOW - 59.0), NOW - 90.0).stuck
    assert measure(a_departure(NOW - 60.0), NOW - 90.0).estimate == 0.0


def a_departure(at: float) -> Departed:
    """Three departures with ten seconds between them, the last one at `at`."""
    return Departed(count=3, began=None, last_at=at, seconds_per_vmi=10.0)


def measure(departed: Departed, *requests: float) -> DrainProgress:
    """The progress at `NOW`; a drain is stuck after a minute without a departure."""
    return measure_progress(departed, requests, failing=0, external=0, now=NOW, stuck_after=60.0)


def test_the_pace_is_that_of_the_newest_departures(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long drain counts all departures, but only the newest ones give its pace."""
    monkeypatch.setattr(node_drains, "DEPARTURES_KEPT", 3)
    drains = NodeDrains()
    drains.ask("n1", "remains", NOW)
    for number, seconds in enumerate((0.0, 100.0, 200.0, 210.0, 220.0)):
        drains.ask("n1", f"vm-{number}", NOW)
        drains.leave("n1", f"vm-{number}", NOW, NOW + seconds)
    departed = drains.read()["n1"]

    assert (departed.count, departed.last_at) == (5, NOW + 220.0)
    assert departed.seconds_per_vmi == 10.0
