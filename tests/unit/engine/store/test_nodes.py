"""Cordons of nodes: leftover evacuations after an uncordon, and stuck drains."""

from typing import Any

import pytest
from msgspec.structs import replace

from exporter.engine.evacuations.conditions import Conditions, read_conditions
from exporter.engine.evacuations.diagnosis import Diagnosis
from exporter.engine.evacuations.drain import forecast_node, forecast_nodes
from exporter.engine.facts.changes import Change, Listed, Observed, Removed
from exporter.engine.facts.model import (
    DRAIN_TAINT,
    Instant,
    Node,
    Priority,
    Resource,
    Taint,
)
from exporter.engine.facts.policy import StuckPolicy
from exporter.engine.store.nodes import NodeIndex
from exporter.words.advice import choose_advice
from tests.support.builders import NOW, a_cordon, a_store, a_vmim
from tests.support.stores import ClockedStore, a_trust, count_outcomes
from tests.unit.engine.evacuations.test_drain import a_movable


REQUESTED = NOW - 3600.0


def drained(number: int, *, by: Priority | None = Priority.SYSTEM_CRITICAL) -> tuple[Any, ...]:
    """A VM of n1 whose evacuation was requested an hour ago, and its unfinished VMIM."""
    vmi = a_movable(number, evacuation_node="n1", eviction_requested_at=REQUESTED)
    vmim = a_vmim(
        name=f"evac-{number}",
        uid=f"evac-{number}",
        vmi_name=vmi.name,
        namespace=vmi.namespace,
        evacuates="n1",
        priority=by,
        created=REQUESTED,
    )
    return vmi, vmim


def a_listed_store(*facts: Any, at: float = NOW - 7200.0) -> ClockedStore:
    """A store that read the list of nodes at the time `at`."""
    store = a_store(now=at)
    store.retain(Resource.NODES, {}, None)
    for fact in facts:
        store.put(fact)
    return store


def conditions(store: ClockedStore, *, sees_nodes: bool = True) -> Conditions:
    """The conditions of the forecast at `NOW`."""
    trust = a_trust(hidden=() if sees_nodes else (Resource.NODES,))
    return read_conditions(store, StuckPolicy(), trust, NOW)


def diagnosis_of(store: ClockedStore, **seen: bool) -> Diagnosis:
    """The diagnosis of the only evacuation."""
    (evidence,) = store.evacuating()
    diagnosis = conditions(store, **seen).diagnose(evidence)
    assert diagnosis is not None
    return diagnosis


def test_a_node_is_cordoned_until_it_is_not() -> None:
    """The forecast shows a node as cordoned until the node is schedulable again."""
    store = a_listed_store(*drained(1))
    assert forecast_node(store, "n1", conditions(store))[0].schedulable is True
    store.put(a_cordon())
    forecast = forecast_node(store, "n1", conditions(store))[0]
    assert (forecast.schedulable, forecast.facts) == (False, a_cordon())
    nodes = forecast_nodes(count_outcomes(store, conditions(store)), {})
    assert [node.schedulable for node in nodes] == [False]
    store.put(a_cordon(schedulable=True, cordoned_at=None))
    assert forecast_node(store, "n1", conditions(store))[0].schedulable is True


def test_without_the_nodes_nothing_is_said_of_them() -> None:
    """Without permission for nodes, `schedulable` is unknown and no evacuation is a leftover."""
    store = a_listed_store(*drained(1), at=NOW)
    hidden = conditions(store, sees_nodes=False)
    assert forecast_node(store, "n1", hidden)[0].schedulable is None
    assert not diagnosis_of(store, sees_nodes=False).leftover


@pytest.mark.parametrize(
    "change",
    [
        Observed(a_cordon(schedulable=True, cordoned_at=None)),
        Removed(Resource.NODES, "", "n1"),
        Listed(Resource.NODES, {"": {"n2"}}, None),
    ],
    ids=["uncordoned", "removed", "not-listed"],
)
def test_an_evacuation_is_left_over_after_the_uncordon(change: Change) -> None:
    """After the uncordon, an evacuation that the descheduler did not request is a leftover."""
    store = a_listed_store(a_cordon(cordoned_at=REQUESTED - 60.0), *drained(1))
    assert not diagnosis_of(store).leftover
    store.apply(change, NOW - 60.0)
    assert diagnosis_of(store).leftover
    (evidence,) = store.evacuating()
    advice = choose_advice(evidence, diagnosis_of(store), (), conditions(store))
    assert advice.sentence.startswith("Cancel the evacuation if")
    store.put(a_cordon(cordoned_at=NOW - 30.0))
    assert not diagnosis_of(store).leftover


def test_an_eviction_from_a_node_that_nobody_cordoned_is_not_left_over() -> None:
    """Without a cordon an evacuation is a leftover only if it is older than our list of nodes."""
    assert not diagnosis_of(a_listed_store(*drained(1))).leftover
    assert diagnosis_of(a_listed_store(*drained(1), at=REQUESTED)).leftover
    store = a_listed_store(*drained(1), at=NOW)
    (evidence,) = store.evacuating()
    assert diagnosis_of(store).leftover
    advice = choose_advice(evidence, diagnosis_of(store), (), conditions(store))
    assert "Cancel" not in advice.sentence


def test_an_unknown_source_is_left_over_if_the_uncordon_was_seen() -> None:
    """An evacuation without a priority (KubeVirt 1.7) is a leftover if the uncordon was seen."""
    store = a_listed_store(a_cordon(cordoned_at=REQUESTED - 60.0), *drained(1, by=None))
    assert not diagnosis_of(store).leftover
    store.now = NOW - 60.0
    store.put(a_cordon(schedulable=True, cordoned_at=None))
    assert diagnosis_of(store).leftover
    assert diagnosis_of(store).given_up
    assert not diagnosis_of(a_listed_store(*drained(1, by=None), at=NOW)).leftover


def test_the_descheduler_s_evacuations_are_never_left_over() -> None:
    """An evacuation that the descheduler requested is never a leftover."""
    store = a_listed_store(*drained(1, by=Priority.SYSTEM_MAINTENANCE), at=NOW)
    assert not diagnosis_of(store).leftover


def test_only_a_change_is_news() -> None:
    """A node that is cordoned or schedulable as before is no news."""
    known = NodeIndex()
    nodes = [a_cordon(), a_cordon(), a_cordon(schedulable=True), a_cordon(schedulable=True)]
    news = [(known.put(node, NOW), len(known)) for node in nodes]
    assert news == [(True, 1), (False, 1), (True, 1), (False, 1)]
    store = a_store()
    assert [store.put(node) for node in nodes] == [1, 0, 1, 0]


def a_node(*, schedulable: bool, taint: Instant | None = None) -> Node:
    """The node n1, with a drain taint that was added at `taint`."""
    taints = () if taint is None else (Taint(DRAIN_TAINT, taint),)
    return Node(name="n1", schedulable=schedulable, taints=taints)


CORDONED, OPEN = a_node(schedulable=False), a_node(schedulable=True)
BOTH, TAINTED = a_node(schedulable=False, taint=NOW), a_node(schedulable=True, taint=NOW)
TAINTED_AGAIN = a_node(schedulable=True, taint=NOW + 60.0)


@pytest.mark.parametrize(
    ("seen", "closed"),
    [
        ([OPEN], False),
        ([CORDONED], True),
        ([CORDONED, OPEN], False),
        ([TAINTED], True),
        ([BOTH, TAINTED], False),
        ([BOTH, TAINTED, replace(TAINTED, is_silent=True)], False),
        ([BOTH, TAINTED, BOTH], True),
        ([BOTH, TAINTED, TAINTED_AGAIN], True),
        ([BOTH, TAINTED, OPEN, TAINTED], True),
        ([CORDONED, TAINTED], True),
    ],
)
def test_when_a_node_is_closed(seen: list[Node], *, closed: bool) -> None:
    """A node is closed by a cordon or by the drain taint, unless an uncordon left it behind."""
    nodes = NodeIndex()
    for node in seen:
        nodes.put(node, NOW)
    assert nodes.is_closed("n1", DRAIN_TAINT) is closed
    assert nodes.copy().is_closed("n1", DRAIN_TAINT) is closed
    assert nodes.remove("n1")
    assert not nodes.remove("n1")
    assert not nodes.is_closed("n1", DRAIN_TAINT)
    nodes.put(TAINTED, NOW)
    assert nodes.is_closed("n1", DRAIN_TAINT)


def is_stuck(store: ClockedStore) -> bool:
    """Whether the drain of n1 is stuck."""
    progress = forecast_node(store, "n1", conditions(store))[0].progress
    return progress is not None and progress.stuck


@pytest.mark.parametrize("by", list(Priority))
@pytest.mark.parametrize("cordoned", [True, False])
def test_a_drain_is_stuck_if_nothing_leaves(by: Priority, *, cordoned: bool) -> None:
    """Stuck VMs make a drain stuck, unless the descheduler evicts them without a cordon."""
    store = a_listed_store(*drained(1, by=by), *drained(2, by=by))
    if cordoned:
        store.put(a_cordon(cordoned_at=REQUESTED))
    assert is_stuck(store) is (cordoned or by is Priority.SYSTEM_CRITICAL)
