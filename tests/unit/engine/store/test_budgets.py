"""The effect of PodDisruptionBudgets on a drain."""

from typing import Any

import pytest
from msgspec.structs import replace

from exporter.engine.evacuations.conditions import Conditions, read_conditions
from exporter.engine.evacuations.drain import forecast_node
from exporter.engine.evacuations.drain_outcomes import DrainOutcome
from exporter.engine.evacuations.outlook import SettledOutcomes
from exporter.engine.facts.changes import Change, Listed, Observed, Removed
from exporter.engine.facts.model import (
    Budget,
    Pod,
    Resource,
    Why,
    WhySource,
)
from exporter.engine.facts.placement import Requirement
from exporter.engine.facts.policy import StuckPolicy
from exporter.engine.store.budgets import Budgets
from tests.support.builders import NAMESPACE, NOW, a_pod, a_store, a_vmim
from tests.support.stores import ClockedStore, a_trust, count_outcomes
from tests.unit.engine.evacuations.test_drain import a_movable


WEB = (("app", "web"),)


def a_budget(*selector: Requirement, **overrides: Any) -> Budget:
    """A budget that allows no disruption of the pods with app=web."""
    fields: dict[str, Any] = {
        "namespace": NAMESPACE,
        "name": "web",
        "forbids": True,
        "selector": selector or (Requirement("app", "In", ("web",)),),
    }
    return Budget(**fields | overrides)


def a_launcher(number: int, **overrides: Any) -> Pod:
    """The pod of a VM, with the label app=web."""
    fields = {"name": f"launcher-{number}", "uid": f"pod-{number}", "vmi_uid": f"uid-{number}"}
    return a_pod(**fields | {"labels": WEB} | overrides)


def conditions(store: ClockedStore, *, sees: bool = True) -> Conditions:
    """The conditions of the forecast at `NOW`."""
    trust = a_trust(hidden=() if sees else (Resource.BUDGETS,))
    return read_conditions(store, StuckPolicy(), trust, NOW)


def outcomes(store: ClockedStore, **sees: bool) -> dict[str, DrainOutcome]:
    """The outcome of each VM on n1; `count_outcomes` and `SettledOutcomes` must agree."""
    now = conditions(store, **sees)
    settled = SettledOutcomes(now)
    forecast, candidates = forecast_node(store, "n1", now)
    assert +count_outcomes(store, now).counts["n1"] == forecast.outcomes
    for candidate in candidates:
        evidence, vmi = candidate.evidence, candidate.evidence.vmi
        if not evidence.unsettled:
            assert settled.judge(evidence, (vmi.node, vmi.mobility)) is candidate.outcome
    return {candidate.evidence.vmi.name: candidate.outcome for candidate in candidates}


def test_a_budget_that_says_nothing_new_is_no_change() -> None:
    """A budget counts as a change only when it starts or stops forbidding disruptions."""
    budgets, allowing = Budgets({}), a_budget(forbids=False)
    changes = [
        budgets.put(budget) for budget in (allowing, a_budget(), a_budget(), allowing, allowing)
    ]
    assert changes == [False, True, False, True, False]
    assert [budgets.put(a_budget()), len(budgets)] == [True, 1]
    assert [budgets.remove(NAMESPACE, "web") for _ in range(2)] == [True, False]
    assert len(budgets) == 0


def test_a_copy_has_the_budgets_of_its_instant() -> None:
    """A copy knows the budgets that were read before it, and no later ones."""
    launcher = a_launcher(1)
    budgets = Budgets({(launcher.namespace, launcher.name): launcher})
    before = budgets.copy()
    budgets.put(a_budget())
    assert [index.find(launcher) for index in (before, budgets.copy())] == ["", "web"]


def test_the_first_of_two_budgets_is_named() -> None:
    """If several budgets forbid an eviction, the first of them by name is found."""
    launcher = a_launcher(1)
    store = a_store(a_movable(1), launcher, a_budget(name="web-2"), a_budget(name="web-1"))
    assert [*store.budgets.guarded()] == [(NAMESPACE, launcher.name)]
    assert store.budgets.find(launcher) == "web-1"


def test_a_budget_forbids_what_would_restart_alone() -> None:
    """A budget that forbids disruptions prevents the restart of a VM, but not its migration."""
    store = a_store(
        a_movable(4, eviction_strategy="None"),
        a_movable(2, eviction_strategy="LiveMigrateIfPossible", migratable=False),
        a_movable(3),
        a_movable(1, eviction_strategy="None"),
        *(a_launcher(number) for number in (1, 2, 3)),
        a_launcher(4, labels=()),
    )
    assert outcomes(store)["db1"] is DrainOutcome.RESTARTS
    store.put(a_budget())
    assert outcomes(store) == {
        "db1": DrainOutcome.STAYS,
        "db2": DrainOutcome.STAYS,
        "db3": DrainOutcome.LEAVES,
        "db4": DrainOutcome.RESTARTS,
    }
    assert outcomes(store, sees=False)["db1"] is DrainOutcome.RESTARTS
    reasons = [candidate.reasons for candidate in forecast_node(store, "n1", conditions(store))[1]]
    budget = (Why(WhySource.POD_DISRUPTION_BUDGET, "web"),)
    assert reasons == [budget, budget, (), ()]


def test_a_budget_adds_no_ended_vm_and_no_other_pod() -> None:
    """A VM that has ended and a pod without a VM do not count, even if a budget selects them."""
    store = a_store(
        a_movable(1, eviction_strategy="None"),
        a_movable(2, eviction_strategy="None", phase="Succeeded"),
        *(a_launcher(number) for number in (1, 2, 3)),
        a_budget(),
    )
    assert outcomes(store) == {"db1": DrainOutcome.STAYS}


@pytest.mark.parametrize(
    "change",
    [
        Observed(a_budget(forbids=False)),
        Removed(Resource.BUDGETS, NAMESPACE, "web"),
        Listed(Resource.BUDGETS, {"other": {"web"}}, None),
        Observed(a_launcher(1, labels=())),
        Removed(Resource.PODS, NAMESPACE, "launcher-1"),
    ],
    ids=["allows", "removed", "not-listed", "other-labels", "pod-gone"],
)
def test_a_budget_forbids_until_it_does_not(change: Change) -> None:
    """Once no budget forbids disruptions of the VM's pod, the VM would restart."""
    store = a_store(a_movable(1, eviction_strategy="None"), a_budget(), a_launcher(1))
    assert outcomes(store) == {"db1": DrainOutcome.STAYS}
    assert store.apply(change, NOW) == 1
    assert outcomes(store) == {"db1": DrainOutcome.RESTARTS}


def test_a_budget_of_another_namespace_selects_nothing_here() -> None:
    """A budget selects only pods of its own namespace."""
    store = a_store(a_movable(1, eviction_strategy="None"), a_launcher(1))
    store.put(a_budget(namespace="other"))
    assert outcomes(store) == {"db1": DrainOutcome.RESTARTS}


def test_a_vm_that_is_moved_by_hand_is_counted_once() -> None:
    """A VM with an unfinished VMIM is counted once, and its budget is respected."""
    store = a_store(
        a_movable(1, eviction_strategy="None"),
        a_launcher(1),
        a_vmim(vmi_name="db1", phase="Scheduling"),
        a_budget(),
    )
    assert outcomes(store) == {"db1": DrainOutcome.STAYS}


def test_a_budget_selects_by_all_its_requirements() -> None:
    """A budget without a selector selects every pod, and else those that meet each requirement."""
    web, db = (Requirement("app", "In", (name,)) for name in ("web", "db"))
    assert a_budget(web).selects(a_launcher(1))
    assert not a_budget(web, db).selects(a_launcher(1))
    assert replace(a_budget(), selector=()).selects(a_launcher(1))
