"""The progress of a node's drain, measured from the VMs in the store."""

from typing import Any

import pytest

from exporter.engine.evacuations.conditions import Conditions, read_conditions
from exporter.engine.evacuations.drain import forecast_node, forecast_nodes
from exporter.engine.facts.model import (
    Fact,
    KubeVirtSettings,
    MigrationLimits,
    MigrationState,
    Mobility,
    Outcome,
    Priority,
    Resource,
    Vmi,
    Vmim,
)
from exporter.engine.facts.policy import StuckPolicy
from exporter.engine.facts.states import State
from exporter.engine.facts.trust import Trust
from exporter.engine.store import node_drains
from exporter.engine.store.node_drains import (
    Departed,
    DrainEnd,
    DrainProgress,
    NodeDrains,
    measure_progress,
)
from tests.support.builders import (
    NAMESPACE,
    NOW,
    a_cordon,
    a_running_state,
    a_state,
    a_store,
    a_vmim,
)
from tests.support.stores import ClockedStore, a_trust, count_outcomes
from tests.unit.engine.evacuations.test_drain import a_failure, a_movable


def now_in(store: ClockedStore) -> Conditions:
    """The present conditions, with nodes."""
    return read_conditions(store, StuckPolicy(), Trust(), NOW)


def asked(number: int, **overrides: object) -> Vmi:
    """A VM on n1 whose evacuation was requested ten minutes ago."""
    fields = {"evacuation_node": "n1", "eviction_requested_at": NOW - 600.0} | overrides
    return a_movable(number, **fields)


def by_a_person(number: int) -> Vmim:
    """An attempt that says that a person asked for the evacuation of the VM with this number."""
    return a_vmim(
        name=f"evac-{number}",
        uid=f"evac-{number}",
        vmi_name=asked(number).name,
        evacuates="n1",
        priority=Priority.SYSTEM_CRITICAL,
        created=NOW,
    )


def gone(number: int, left_at: float) -> Vmi:
    """The VM with this number after its migration to n2."""
    state = a_state(end=left_at, outcome=Outcome.SUCCEEDED)
    return a_movable(number, node="n2", migration=state)


def ends_of(drains: NodeDrains) -> list[Any]:
    """The ends that these drains note from now on."""
    ends: list[Any] = []
    drains.record_end = lambda *end: ends.append(end)
    return ends


def drain_of(store: ClockedStore, node: str = "n1") -> DrainProgress:
    """The progress of a node's drain, which must be the same in both forecasts."""
    conditions = now_in(store)
    by_name = {
        row.node: row.progress for row in forecast_nodes(count_outcomes(store, conditions), {})
    }
    single = forecast_node(store, node, conditions)[0].progress
    assert by_name.get(node) == single
    assert single is not None
    return single


def a_drain(*left_at: float, remaining: int) -> ClockedStore:
    """A drain of n1; some VMs left the node at the times `left_at`."""
    vmis = len(left_at) + remaining
    cordon = a_cordon(cordoned_at=NOW - 600.0)
    store = a_store(cordon, *(asked(number) for number in range(vmis)), now=NOW - 600.0)
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


def test_what_counts_in_a_drain() -> None:
    """A VM whose evacuation was cancelled does not count; one that was deleted has left.

    With fewer than three departures there is no pace.
    """
    store = a_drain(NOW - 60, remaining=3)
    store.put(a_movable(2))
    drain = drain_of(store)
    assert (drain.asked, drain.left, drain.remaining) == (3, 1, 2)
    store.remove(Resource.VMIS, NAMESPACE, asked(3).name)
    drain = drain_of(store)
    assert (drain.asked, drain.left, drain.remaining) == (3, 2, 1)
    assert (drain.last_left_at, drain.seconds_per_vmi, drain.estimate) == (NOW, None, None)


def test_a_drain_begins_with_the_cordon() -> None:
    """The drain of a cordoned node begins with the cordon, and counts every VM that leaves."""
    store = a_store(a_cordon(cordoned_at=NOW - 900.0), *map(a_movable, range(4)), now=NOW - 900.0)
    assert forecast_node(store, "n1", now_in(store))[0].progress is None
    store.now = NOW
    store.put(asked(0, evicted_by_descheduler=True))
    store.put(asked(1))
    store.put(gone(2, NOW - 30.0))
    store.remove(Resource.VMIS, NAMESPACE, a_movable(3).name)
    drain = drain_of(store)
    assert (drain.since, drain.asked, drain.left, drain.remaining) == (NOW - 900.0, 4, 2, 2)
    assert drain.last_left_at == NOW


def test_a_vm_that_comes_back_and_leaves_again_is_one() -> None:
    """A drain counts VMs, not departures."""
    store = a_drain(remaining=2)
    for left_at in (NOW - 300.0, NOW - 200.0, NOW - 100.0):
        store.put(gone(0, left_at))
        drain = drain_of(store)
        assert (drain.asked, drain.left, drain.remaining) == (2, 1, 1)
        store.put(asked(0))
        drain = drain_of(store)
        assert (drain.asked, drain.left, drain.remaining) == (2, 0, 2)


@pytest.mark.parametrize("priority", [None, Priority.SYSTEM_MAINTENANCE])
def test_rebalancing_is_no_drain(priority: Priority | None) -> None:
    """What the descheduler moves away from a schedulable node is no drain of it."""
    vmi = asked(1, evicted_by_descheduler=priority is None)
    vmim = a_vmim(
        name="evac", uid="evac", vmi_name=vmi.name, evacuates="n1", priority=priority, created=NOW
    )
    store = a_store(a_movable(2), vmi, vmim, now=NOW)
    assert store.drains.read() == {}
    assert forecast_node(store, "n1", now_in(store))[0].progress is None
    store.put(gone(1, NOW))
    for fact in (asked(2), by_a_person(2)):
        store.put(fact)
    drain = drain_of(store)
    assert (drain.asked, drain.left) == (1, 0)


def test_an_eviction_by_nobody_knows_whom_is_no_drain() -> None:
    """Before KubeVirt 1.7, nothing says whether the descheduler evicts from an open node."""
    store = a_store(asked(1), a_vmim(vmi_name=asked(1).name, evacuates="n1"), now=NOW)
    ends = ends_of(store.drains)
    assert forecast_node(store, "n1", now_in(store))[0].progress is None
    store.put(gone(1, NOW))
    assert ends == []
    store.put(a_cordon())
    store.put(asked(2))
    assert drain_of(store).asked == 1


def test_a_cordon_inherits_no_age() -> None:
    """What was evacuated before the cordon is in its drain, which begins with the cordon."""
    old = NOW - 86_400.0
    requested = asked(1, eviction_requested_at=old)
    attempt = a_vmim(
        vmi_name=requested.name, evacuates="n1", priority=Priority.SYSTEM_CRITICAL, created=old
    )
    store = a_store(requested, attempt, a_movable(2), now=old)
    ends = ends_of(store.drains)
    store.now = NOW
    assert drain_of(store).since == old
    store.put(a_cordon(cordoned_at=NOW - 10.0))
    drain = drain_of(store)
    assert (drain.since, drain.asked, drain.stuck) == (NOW - 10.0, 1, False)
    store.put(a_movable(1, node="n2"))
    store.put(a_movable(2, node="n2"))
    assert ends == [(DrainEnd.SUCCEEDED, 10.0)]


def test_a_cordoned_node_with_vms_that_stay_is_drained() -> None:
    """KubeVirt refuses the eviction of a VM that stays without marking it; yet it remains."""
    store = a_store(a_cordon(), a_movable(1, migratable=False), a_movable(2))
    drain = drain_of(store)
    assert (drain.asked, drain.remaining, drain.failing) == (1, 1, 1)
    assert not drain.stuck
    store.put(a_cordon(schedulable=True, cordoned_at=None))
    assert forecast_node(store, "n1", now_in(store))[0].progress is None


def test_a_drain_whose_node_cannot_be_seen() -> None:
    """Only the VMs that are asked to leave remain: whether the node is still closed is unknown."""
    store = a_store(a_cordon(), a_movable(1, migratable=False), asked(2), by_a_person(2))
    assert drain_of(store).remaining == 2
    conditions = read_conditions(store, StuckPolicy(), a_trust(hidden=[Resource.NODES]), NOW)
    progress = forecast_node(store, "n1", conditions)[0].progress
    assert progress is not None
    assert (progress.remaining, progress.failing, progress.stuck) == (1, 0, False)


@pytest.mark.parametrize(
    ("hours", "stays", "stuck"), [(1, True, True), (1, False, False), (3, False, True)]
)
def test_when_a_drain_is_stuck(hours: int, *, stays: bool, stuck: bool) -> None:
    """Without a departure a drain is stuck, at the latest after four times `stuck.after`."""
    since = NOW - hours * 3600.0
    limits = {"eviction_strategy": "External"}
    vmi = a_movable(1, migratable=False) if stays else asked(1, **limits)
    assert drain_of(a_store(a_cordon(cordoned_at=since), vmi)).stuck is stuck


@pytest.mark.parametrize(
    ("failures", "hours", "stuck"), [(0, 1, False), (0, 3, True), (3, 1, True)]
)
def test_a_queue_behind_full_limits_needs_nobody(failures: int, hours: int, *, stuck: bool) -> None:
    """An evacuation that only waits for KubeVirt's limits makes a drain stuck as any other state.

    It needs a person if it has also failed too often.
    """
    since = NOW - hours * 3600.0
    vmim = a_vmim(vmi_name="db1", phase="Pending", created=NOW - 60.0)
    failed = [a_failure(number, NOW - 900.0 + number, created=since) for number in range(failures)]
    vmi = asked(1, eviction_requested_at=since)
    limits = KubeVirtSettings(MigrationLimits(0, 2))
    store = a_store(a_cordon(cordoned_at=since), limits, vmi, *failed, vmim, now=since)
    store.now = NOW
    forecast, (candidate,) = forecast_node(store, "n1", now_in(store))
    diagnosis = candidate.outlook.diagnosis
    assert diagnosis is not None
    assert (diagnosis.state, diagnosis.stuck) == (State.CAPACITY, True)
    assert forecast.progress is not None
    assert forecast.progress.stuck is stuck


def test_an_uncordon_ends_the_drain() -> None:
    """The evacuations that an uncordon leaves behind are no drain, but later ones are."""
    store = a_store(a_cordon(), asked(1), asked(2), now=NOW - 60.0)
    store.put(a_cordon(schedulable=True, cordoned_at=None))
    store.put(asked(2, hotplugs=True))
    assert store.drains.read() == {}
    store.now = NOW
    for fact in (asked(3, eviction_requested_at=NOW), by_a_person(3)):
        store.put(fact)
    drain = drain_of(store)
    assert (drain.since, drain.asked) == (NOW, 1)


ENDS = {
    "all-have-left": (
        [a_cordon(cordoned_at=NOW - 600.0), asked(1), asked(2)],
        [gone(1, NOW - 60.0), gone(2, NOW - 10.0)],
        (DrainEnd.SUCCEEDED, 590.0),
    ),
    "uncordoned": (
        [a_cordon(cordoned_at=NOW - 600.0), asked(1)],
        [a_cordon(schedulable=True)],
        (DrainEnd.CANCELLED, 600.0),
    ),
    "without-a-cordon": (
        [asked(1), by_a_person(1)],
        [gone(1, NOW - 10.0)],
        (DrainEnd.SUCCEEDED, 590.0),
    ),
    "cancelled": ([asked(1), by_a_person(1)], [a_movable(1)], (DrainEnd.CANCELLED, 600.0)),
    "a-cordon-alone": ([a_cordon(), a_movable(1)], [a_cordon(schedulable=True)], None),
    "goes-on": ([a_cordon(), asked(1), a_movable(2)], [gone(1, NOW - 10.0)], None),
}


@pytest.mark.parametrize(("before", "after", "end"), ENDS.values(), ids=ENDS)
def test_how_a_drain_ends(before: list[Fact], after: list[Fact], end: object) -> None:
    """Each drain ends once, with its outcome and its duration."""
    store = a_store(now=NOW)
    ends = ends_of(store.drains)
    for fact in (*before, *after, *after):
        store.put(fact)
    assert ends == ([] if end is None else [end])


def test_a_node_that_is_deleted() -> None:
    """The drain of a node that is deleted before it is empty has an outcome of its own."""
    store = a_store(a_cordon(), asked(1))
    ends = ends_of(store.drains)
    store.remove(Resource.NODES, "", "n1")
    assert [end for end, _ in ends] == [DrainEnd.NODE_DELETED]


def test_an_earlier_request_dates_an_open_node_only() -> None:
    """The drain of an open node begins with its earliest request, that of a closed one does not."""
    drains = NodeDrains({})
    drains.begin_drain("n2", NOW - 60.0)
    for node in ("n1", "n2"):
        for uid, requested_at in (("a", NOW), ("b", NOW - 90.0), ("c", NOW - 30.0)):
            drains.record_evacuation(node, uid, requested_at, is_drained=True)
    assert {node: drain.since for node, drain in drains.read().items()} == {
        "n1": NOW - 90.0,
        "n2": NOW - 60.0,
    }


def test_a_change_of_an_open_node_ends_no_drain() -> None:
    """A change of a node that was not closed leaves its drain as it is."""
    drains = NodeDrains({})
    ends = ends_of(drains)
    drains.record_evacuation("n1", "a", NOW, is_drained=True)
    drains.end_drain("n1", NOW)
    assert drains.read()["n1"].since == NOW
    drains.record_departure("n1", "a", NOW - 5.0)
    assert (drains.read(), ends) == ({}, [(DrainEnd.SUCCEEDED, 0.0)])


@pytest.mark.parametrize("cancelled", [True, False])
def test_the_next_drain_of_an_open_node_is_another_one(*, cancelled: bool) -> None:
    """Nothing of a drain that is over counts in the next one."""
    drains = NodeDrains({})
    drains.record_evacuation("n1", "a", NOW - 900.0, is_drained=True)
    drains.record_evacuation("n1", "b", NOW - 900.0, is_drained=True)
    drains.record_departure("n1", "a", NOW - 800.0)
    if cancelled:
        drains.record_cancel("n1", "b", NOW - 700.0)
    else:
        drains.record_departure("n1", "b", NOW - 700.0)
    assert drains.read() == {}
    drains.record_evacuation("n1", "c", NOW, is_drained=True)
    assert drains.read()["n1"] == Departed(closed=False, since=NOW, left={})


def test_a_closed_node_that_was_emptied_is_still_closed() -> None:
    """A VM that comes to a cordoned node later, and is moved away, is drained."""
    drains = NodeDrains({})
    drains.begin_drain("n1", NOW - 900.0)
    drains.record_departure("n1", "a", NOW - 800.0)
    assert drains.read() == {}
    drains.record_evacuation("n1", "b", NOW, is_drained=True)
    assert drains.read()["n1"] == Departed(closed=True, since=NOW, left={})


@pytest.mark.parametrize("known", [True, False])
def test_a_vm_that_comes_to_an_emptied_node_is_drained(*, known: bool) -> None:
    """A VM that comes to a closed node after its last VM has left, and stays, is a new drain."""
    store = a_store(a_cordon(cordoned_at=NOW - 900.0), asked(1), now=NOW - 800.0)
    if known:
        store.put(a_movable(2, migratable=False, node="n2"))
    store.put(a_movable(1, node="n2"))
    assert store.drains.read() == {}
    store.now = NOW
    store.put(a_movable(2, migratable=False))
    drain = drain_of(store)
    assert (drain.since, drain.remaining, drain.failing) == (NOW, 1, 1)


@pytest.mark.parametrize(
    ("before", "ago", "left"),
    [
        pytest.param(a_state(end=NOW - 5000.0), 5000.0, 0.0, id="no-new-migration"),
        pytest.param(a_running_state(), 30.0, 30.0, id="its-migration-has-ended"),
        pytest.param(None, 360.0, 360.0, id="ended-before-it-was-last-seen"),
        pytest.param(None, 361.0, 0.0, id="ended-by-a-wrong-clock"),
    ],
)
def test_when_a_vm_has_left(before: MigrationState | None, ago: float, left: float) -> None:
    """A VM has left when its migration ended, or now if none has ended since it was last seen."""
    cordon, vmi = a_cordon(cordoned_at=NOW - 9000.0), asked(1, migration=before)
    store = a_store(cordon, vmi, asked(2), now=NOW - 60.0)
    store.now = NOW
    ended = a_state(end=NOW - ago, outcome=Outcome.SUCCEEDED)
    store.put(asked(1, node="n2", migration=ended))
    assert drain_of(store).last_left_at == NOW - left


def test_an_evacuation_that_turns_out_to_be_rebalancing_is_no_drain() -> None:
    """An open node whose last evacuation is the descheduler's is not drained; no drain has ended.

    On a node that is drained nevertheless, the VM does not count as one that was asked to leave.
    """
    drains = NodeDrains({})
    ends = ends_of(drains)
    for uid in ("a", "b"):
        drains.record_evacuation("n1", uid, NOW, is_drained=True)
    drains.record_evacuation("n1", "a", NOW, is_drained=False)
    drains.record_departure("n1", "a", NOW)
    assert drains.read()["n1"].left == {}
    drains.record_evacuation("n1", "b", NOW, is_drained=False)
    assert (drains.read(), ends) == ({}, [])


def test_only_a_vm_that_was_asked_to_leave_counts() -> None:
    """The departure of another VM from an open node changes nothing."""
    drains = NodeDrains({})
    drains.record_departure("n1", "other", NOW)
    drains.record_cancel("n1", "other", NOW)
    assert drains.read() == {}
    drains.record_evacuation("n1", "a", NOW, is_drained=True)
    drains.record_departure("n1", "other", NOW)
    drains.record_cancel("n1", "other", NOW)
    assert drains.read()["n1"].left == {}


def measure(*left_at: float, since: float = NOW - 9000.0, **overrides: Any) -> DrainProgress:
    """The progress of a drain with these departures, in which a VM needs a person."""
    fields: dict[str, Any] = {
        "evacuating": set(),
        "failing": 0,
        "external": 0,
        "needs_person": True,
        "stuck_after": 60.0,
        "now": NOW,
    }
    left = {f"vm-{number}": at for number, at in enumerate(left_at)}
    departed = Departed(closed=True, since=since, left=left)
    return measure_progress(departed, 1, **fields | overrides)


def test_a_drain_is_stuck_from_the_very_end_of_its_time() -> None:
    """A drain is stuck as soon as no VM has left within `stuck_after`; an overdue estimate is 0."""
    for ago, needs_person, stuck in (
        (60.0, True, True),
        (59.0, True, False),
        (240.0, False, True),
        (239.0, False, False),
    ):
        last = NOW - ago
        drain = measure(last - 20.0, last - 10.0, last, needs_person=needs_person)
        assert (drain.stuck, drain.estimate) == (stuck, 0.0)


def test_a_restart_within_a_drain() -> None:
    """After a restart, the newest success counts, and the time before the start does not."""
    assert measure().stuck
    assert not measure(watched_since=NOW - 59.0).stuck
    assert measure(watched_since=NOW - 60.0).stuck
    assert not measure(moved_at=NOW - 59.0).stuck
    for ago, last in ((59.0, NOW - 59.0), (9000.0, NOW - 9000.0), (9001.0, None)):
        assert measure(moved_at=NOW - ago).last_left_at == last


def test_so_many_departures_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a drain without an end, the newest departures are kept."""
    monkeypatch.setattr(node_drains, "LEFT_KEPT", 2)
    drains = NodeDrains({("n1", Mobility("", migratable=True, migrating=False)): 1})
    drains.begin_drain("n1", NOW)
    for number in range(3):
        drains.record_departure("n1", f"vm-{number}", NOW + number)
    assert drains.read()["n1"].left == {"vm-1": NOW + 1, "vm-2": NOW + 2}
