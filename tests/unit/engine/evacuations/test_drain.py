"""What a drain of a node would do to each VM on it."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from exporter.engine.evacuations.conditions import Conditions, read_conditions
from exporter.engine.evacuations.drain import (
    OutcomeCount,
    forecast_node,
    forecast_nodes,
    sum_outcomes,
    take_snapshot,
)
from exporter.engine.evacuations.drain_outcomes import (
    DrainOutcome,
    Ground,
    decide_ground,
    find_duration,
)
from exporter.engine.facts.model import (
    OPTIONAL_RESOURCES,
    Fact,
    KubeVirtSettings,
    MigrationLimits,
    MigrationState,
    Mobility,
    Outcome,
    Resource,
    Vmi,
    Vmim,
)
from exporter.engine.facts.policy import Policy, StuckPolicy
from exporter.engine.facts.states import NEEDS_PERSON, VMIM_CONDITIONS, State
from exporter.engine.facts.trust import DEAD_AFTER, NamespaceTrust, Trust
from exporter.engine.verdicts.view import VerdictView
from tests.support.builders import (
    NAMESPACE,
    NOW,
    a_pod,
    a_running_state,
    a_state,
    a_store,
    a_vmi,
    a_vmim,
    an_ended_vmim,
)
from tests.support.sizes import soaked
from tests.support.stores import ClockedStore, a_trust, count_outcomes


LEAVES, WAITS, FAILS = DrainOutcome.LEAVES, DrainOutcome.WAITS, DrainOutcome.FAILS
RESTARTS, STAYS, EXTERNAL = DrainOutcome.RESTARTS, DrainOutcome.STAYS, DrainOutcome.EXTERNAL


def a_movable(number: int = 1, **overrides: Any) -> Vmi:
    """A live-migratable VMI on node n1."""
    fields = {"eviction_strategy": "LiveMigrate", "migratable": True} | overrides
    return a_vmi(name=f"db{number}", uid=f"uid-{number}", **fields)


def a_moved(number: int, seconds: float, **overrides: Any) -> Vmi:
    """A live-migratable VMI whose last migration took this long."""
    state = a_state(uid=f"m{number}", start=NOW - 600.0 - seconds)
    return a_movable(number, migration=state, **overrides)


def now_in(store: ClockedStore, *dead: Resource) -> Conditions:
    """The present conditions, on which all outcomes depend, without nodes and budgets."""
    return read_conditions(store, StuckPolicy(), a_trust(*dead, hidden=OPTIONAL_RESOURCES), NOW)


def outcomes_of(store: ClockedStore, node: str = "n1") -> dict[str, DrainOutcome]:
    """The outcome of each VMI on a node, by name."""
    _, candidates = forecast_node(store, node, now_in(store))
    return {candidate.evidence.vmi.name: candidate.outcome for candidate in candidates}


def bound_of(store: ClockedStore, node: str = "n1") -> float | None:
    """The least duration of a node's drain; `forecast_nodes` must give the same."""
    forecast, _ = forecast_node(store, node, now_in(store))
    durations = [find_duration(evidence, store.kubevirt) for evidence in store.on_node(node)]
    known = {node: [duration for duration in durations if duration is not None]}
    assert forecast in forecast_nodes(count_outcomes(store, now_in(store)), known)
    return forecast.at_least


@pytest.mark.parametrize(
    ("own", "cluster", "migratable", "outcome"),
    [
        ("LiveMigrate", "", True, LEAVES),
        ("LiveMigrate", "None", False, STAYS),
        ("LiveMigrateIfPossible", "", True, LEAVES),
        ("LiveMigrateIfPossible", "LiveMigrate", False, RESTARTS),
        ("None", "LiveMigrate", True, RESTARTS),
        ("External", "", True, EXTERNAL),
        ("External", "", False, EXTERNAL),
        ("", "LiveMigrate", True, LEAVES),
        ("", "LiveMigrate", False, STAYS),
        ("", "LiveMigrateIfPossible", False, RESTARTS),
        ("", "External", True, EXTERNAL),
        ("", "", True, RESTARTS),
        ("SomethingNew", "LiveMigrate", True, RESTARTS),
    ],
)
def test_the_strategy_decides(
    own: str, cluster: str, *, migratable: bool, outcome: DrainOutcome
) -> None:
    """The VMI's own eviction strategy decides, else that of the KubeVirt object, else `None`."""
    store = a_store(
        a_movable(eviction_strategy=own, migratable=migratable),
        KubeVirtSettings(eviction_strategy=cluster),
    )
    assert outcomes_of(store) == {"db1": outcome}


def test_nothing_else_delays_a_movable_vm() -> None:
    """Unless something else is known, a movable VM leaves."""
    movable = Mobility("LiveMigrate", migratable=True, migrating=False)
    assert decide_ground(movable, None) is Ground.MIGRATES


def test_full_limits_are_waited_for() -> None:
    """A VM waits while KubeVirt's limit of migrations from its node is reached."""
    busy = a_movable(2, migration=a_running_state(uid="m2"))
    running = a_vmim(name="mig-2", uid="m2", vmi_name="db2", phase="Running")
    store = a_store(a_movable(), busy, running, KubeVirtSettings(MigrationLimits(5, 2)))
    assert outcomes_of(store) == {"db1": LEAVES, "db2": WAITS}

    store.put(KubeVirtSettings(MigrationLimits(5, 1)))
    assert outcomes_of(store) == {"db1": WAITS, "db2": WAITS}


def test_what_has_stopped_or_has_no_node_is_left_out() -> None:
    """VMIs that have ended or have no node are not counted."""
    store = a_store(a_movable(1), a_movable(2, phase="Succeeded"), a_movable(3, node=""))

    assert outcomes_of(store) == {"db1": LEAVES}
    assert [row.node for row in forecast_nodes(count_outcomes(store, now_in(store)), {})] == ["n1"]


def test_a_count_pauses() -> None:
    """Other tasks run after the settled VMs of each node, and after each other VM."""
    store = a_store(
        *(a_movable(number, node=f"n{number}") for number in (1, 2, 3)),
        a_movable(4, evacuation_node="n1"),
    )
    conditions = now_in(store)
    unsettled = VerdictView(store, Policy()).read(NOW, conditions.trust).list_unsettled()
    assert len([*OutcomeCount(take_snapshot(store, conditions, unsettled))]) == 4


def test_pods_that_were_left_behind_are_sorted() -> None:
    """The forecast of a node has the pods of VMs that have left it, by name."""
    pods = [
        a_pod(name=f"{place}-{number}", uid=f"{place}-{number}", vmi_uid=f"uid-{number}", node=node)
        for number in (5, 4, 3, 2, 1)
        for place, node in (("here", "n2"), ("left", "n1"))
    ]
    store = a_store(*(a_movable(number, node="n2") for number in range(1, 6)), *pods)
    forecast, _ = forecast_node(store, "n1", now_in(store))
    names = [outlived.pod.name for outlived in forecast.outlived]
    assert names == [f"left-{number}" for number in range(1, 6)]


def test_a_node_is_emptied_unless_a_vm_stays() -> None:
    """A VM that stays prevents a node from being emptied; a VM that restarts does not."""
    store = a_store(a_moved(1, 60.0), a_movable(2, node="n2"))
    store.put(a_movable(3, eviction_strategy="None"))
    forecast, _ = forecast_node(store, "n1", now_in(store))
    assert (forecast.can_be_emptied, forecast.depends_on_others) == (True, False)

    store.put(a_movable(4, eviction_strategy="External"))
    forecast, _ = forecast_node(store, "n1", now_in(store))
    assert (forecast.can_be_emptied, forecast.depends_on_others) == (True, True)
    assert forecast.at_least == 60.0

    store.put(a_movable(5, migratable=False))
    forecast, _ = forecast_node(store, "n1", now_in(store))
    assert (forecast.can_be_emptied, forecast.at_least) == (False, None)
    nodes = [*forecast_nodes(count_outcomes(store, now_in(store)), {"n1": [60.0]})]
    assert [(node.can_be_emptied, node.at_least) for node in nodes] == [(False, None), (True, None)]
    assert [node.vmis for node in nodes] == [4, 1]
    total = sum_outcomes(count_outcomes(store, now_in(store)).counts)
    assert total == {LEAVES: 2, RESTARTS: 1, EXTERNAL: 1, STAYS: 1}


@pytest.mark.parametrize(
    ("age", "failures", "overrides", "outcome"),
    [
        pytest.param(1800.0, 2, {}, LEAVES, id="not-yet"),
        pytest.param(1801.0, 0, {}, FAILS, id="too-old"),
        pytest.param(600.0, 3, {}, FAILS, id="too-many-failures"),
        pytest.param(600.0, 3, {"migration": a_running_state()}, FAILS, id="and-migrating"),
        pytest.param(600.0, 3, {"eviction_strategy": "External"}, EXTERNAL, id="external"),
        pytest.param(600.0, 3, {"migratable": False}, STAYS, id="not-migratable"),
    ],
)
def test_a_vm_whose_evacuation_is_stuck_fails(
    age: float, failures: int, overrides: dict[str, Any], outcome: DrainOutcome
) -> None:
    """A VM with a stuck evacuation has the outcome `fails`, so the node cannot be emptied."""
    store = a_store(a_movable(1, evacuation_node="n1", **overrides), now=NOW - age)
    for number in range(failures):
        store.put(a_failure(number, NOW - 500.0 + number, created=NOW - 550.0))
    forecast, (candidate,) = forecast_node(store, "n1", now_in(store))

    assert candidate.outcome is outcome
    assert candidate.outlook.diagnosis is not None
    assert candidate.outlook.diagnosis.failed_attempts == failures
    assert forecast.can_be_emptied == (outcome in (LEAVES, EXTERNAL))


def test_what_a_dead_watch_showed_is_not_waited_for() -> None:
    """While the watch of VMIMs is dead, an unfinished VMIM does not give the outcome `waits`."""
    store = a_store(a_movable(1), a_vmim(vmi_name="db1"), KubeVirtSettings(MigrationLimits(0, 2)))

    assert count_outcomes(store, now_in(store)).counts == {"n1": Counter({WAITS: 1})}
    assert count_outcomes(store, now_in(store, Resource.VMIMS)).counts == {
        "n1": Counter({LEAVES: 1})
    }


def test_what_cannot_be_read_is_not_waited_for() -> None:
    """An unfinished VMIM gives the outcome `waits` until it was unreadable for `dead_after`."""
    for ago, outcome in ((DEAD_AFTER - 1.0, WAITS), (DEAD_AFTER, LEAVES)):
        store = a_store(a_movable(1), a_vmim(vmi_name="db1"), now=NOW - ago)
        store.record_unreadable(Resource.VMIMS, NAMESPACE, "mig-1")
        assert outcomes_of(store) == {"db1": outcome}


def test_too_many_failures_count_while_the_watch_of_vmis_is_dead() -> None:
    """An evacuation that failed too often has the outcome `fails`, even with a dead VMI watch."""
    store = a_store(a_movable(1, evacuation_node="n1"), now=NOW - 600.0)
    for number in range(3):
        store.put(a_failure(number, NOW - 500.0 + number, created=NOW - 550.0))

    assert count_outcomes(store, now_in(store, Resource.VMIS)).counts == {"n1": Counter({FAILS: 1})}


@pytest.mark.parametrize(
    ("limits", "bound"),
    [
        pytest.param((5, 2), 150.0, id="two-at-once"),
        pytest.param((1, 2), 300.0, id="the-smaller-limit"),
        pytest.param((5, 5), 100.0, id="the-longest"),
        pytest.param((0, 0), 300.0, id="none-allowed"),
    ],
)
def test_the_bound_is_what_the_limits_allow(limits: tuple[int, int], bound: float) -> None:
    """The bound is the sum of the durations divided by the limit, but at least the longest one."""
    store = a_store(*(a_moved(n, 100.0) for n in (1, 2, 3)))
    store.put(KubeVirtSettings(MigrationLimits(*limits)))
    assert bound_of(store) == bound


def test_without_limits_the_bound_is_the_longest() -> None:
    """Without the KubeVirt object the bound is the duration of the longest migration."""
    assert bound_of(a_store(a_moved(1, 100.0), a_moved(2, 70.0))) == 100.0


def test_only_what_has_yet_to_migrate_counts() -> None:
    """The bound counts only VMs that still have to migrate and have migrated before."""
    running = a_running_state(uid="n2")
    store = a_store(
        a_moved(1, 500.0, eviction_strategy="External"),
        a_moved(2, 500.0),
        a_moved(3, 500.0, eviction_strategy="None"),
        a_movable(4),
    )
    store.put(a_movable(2, migration=running))
    assert bound_of(store) is None

    store.put(a_moved(5, 40.0))
    assert bound_of(store) == 40.0


@pytest.mark.parametrize(
    ("state", "duration"),
    [
        pytest.param(a_state(), 60.0, id="succeeded"),
        pytest.param(a_state(outcome=Outcome.FAILED), None, id="failed"),
        pytest.param(a_state(start=None), None, id="no-start"),
        pytest.param(a_state(start=NOW), 0.0, id="ends-before-it-starts"),
    ],
)
def test_the_last_duration_is_of_a_success(state: Any, duration: float | None) -> None:
    """Only successful migrations have a duration for the bound."""
    store = a_store(a_movable(migration=state))
    _, (candidate,) = forecast_node(store, "n1", now_in(store))
    assert candidate.last_duration == duration


def test_the_newest_success_has_the_duration() -> None:
    """The last duration is that of the newest success, also if a later migration failed."""
    store = a_store(a_moved(1, 60.0))
    ended = {"vmi_name": "db1", "name": "mig-0", "uid": "m0"}
    store.put(an_ended_vmim(**ended, start=NOW - 9000.0, end=NOW - 8000.0))
    failed = an_ended_vmim(
        vmi_name="db1", uid="m9", phase="Failed", outcome=Outcome.FAILED, start=NOW - 20.0, end=NOW
    )
    store.put(failed)
    _, (candidate,) = forecast_node(store, "n1", now_in(store))

    assert candidate.last_duration == 60.0


def a_failure(number: int, at: float, **overrides: Any) -> Vmim:
    """A failed evacuation VMIM of db1."""
    fields = {"phase": "Failed", "finished": True, "finished_at": at, "evacuates": "n1"}
    fields |= {"vmi_name": "db1"} | overrides
    return a_vmim(name=f"f{number}", uid=f"f{number}", **fields)


def test_failed_attempts() -> None:
    """`failed_attempts` counts the failures since the last success, without aborted ones."""
    store = a_store(
        a_moved(1, 60.0),
        a_failure(1, NOW - 700.0),
        a_failure(2, NOW - 500.0),
        a_failure(3, NOW - 400.0),
        a_failure(4, NOW - 300.0, aborted=True),
    )
    _, (candidate,) = forecast_node(store, "n1", now_in(store))
    assert candidate.failed_attempts == 2


def test_failed_attempts_of_an_evacuation() -> None:
    """During an evacuation, failed attempts count even after KubeVirt has deleted their VMIMs."""
    store = a_store(a_movable(evacuation_node="n1"), now=NOW - 1000.0)
    for number in range(7):
        store.put(a_failure(number, NOW - 900.0 + number, created=NOW - 950.0))
        store.remove(Resource.VMIMS, NAMESPACE, f"f{number}")
    _, (candidate,) = forecast_node(store, "n1", now_in(store))
    assert candidate.failed_attempts == 7


vmis = st.builds(
    a_movable,
    st.integers(1, 4),
    node=st.sampled_from(("", "n1", "n2")),
    eviction_strategy=st.sampled_from(("", "None", "LiveMigrate", "External")),
    migratable=st.booleans(),
    migratable_unknown=st.booleans(),
    migration=st.sampled_from(
        (
            None,
            a_running_state(),
            a_state(),
            a_running_state(start=NOW - 9000.0),
            MigrationState(uid="m-1"),
            MigrationState(uid="m-9"),
        )
    ),
    deleted_at=st.sampled_from((None, None, NOW - 9000.0, NOW - 60.0)),
    evacuation_node=st.sampled_from(("", "n1")),
    phase=st.sampled_from(("Running", "Failed")),
)
vmims = st.builds(
    lambda number, again, phase, reason: a_vmim(
        name=f"mig-{number}{again}",
        uid=f"m-{number}{again}",
        vmi_name=f"db{number}",
        phase=phase,
        finished=phase in ("Succeeded", "Failed"),
        created=NOW - 600.0,
        wait_reason=reason if phase == "Pending" else None,
    ),
    st.integers(1, 4),
    st.sampled_from(("", "b", "c", "d")),
    st.sampled_from(("", "Pending", "Running", "Succeeded", "Failed", "Failed")),
    st.sampled_from((None, *(condition.state for condition in VMIM_CONDITIONS.values()))),
)
pods = st.builds(
    lambda number, again, phase: a_pod(
        name=f"launcher-{number}{again}", uid=again, vmi_uid=f"uid-{number}", phase=phase
    ),
    st.integers(1, 4),
    st.sampled_from(("", "b", "c")),
    st.sampled_from(("Running", "Running", "Succeeded")),
)
settings = st.builds(
    KubeVirtSettings,
    st.builds(MigrationLimits, st.integers(0, 3), st.integers(0, 2)),
    st.sampled_from(("", "LiveMigrate", "LiveMigrateIfPossible")),
)
gone = st.tuples(
    st.sampled_from((Resource.VMIS, Resource.VMIMS, Resource.PODS, Resource.KUBEVIRTS)),
    st.integers(1, 4),
)


dead_sets = st.frozensets(st.sampled_from((Resource.VMIS, Resource.VMIMS, Resource.PODS)))
contacts = st.dictionaries(
    st.sampled_from((Resource.VMIS, Resource.VMIMS, Resource.PODS)),
    st.sampled_from((NOW - 3000.0, NOW)),
)
optional = st.just(frozenset(OPTIONAL_RESOURCES))
places = st.builds(NamespaceTrust, optional, dead_sets)
alive = st.builds(Trust, st.builds(NamespaceTrust, optional), contacts_everywhere=contacts)
trusts = st.builds(
    Trust,
    places,
    st.dictionaries(st.just(NAMESPACE), places),
    contacts,
    st.dictionaries(st.just(NAMESPACE), contacts),
)


changes = st.one_of(vmis, vmims, pods, settings, gone)


def play(news: list[Any]) -> ClockedStore:
    """A store after these changes."""
    store = a_store(now=NOW - 2000.0)
    for change in news:
        if isinstance(change, tuple):
            resource, number = change
            names = {Resource.VMIS: f"db{number}", Resource.PODS: f"launcher-{number}"}
            store.remove(resource, NAMESPACE, names.get(resource, f"mig-{number}"))
        else:
            store.put(change)
    return store


NOBODY_ENDS = {
    *NEEDS_PERSON,
    State.EXTERNAL,
    State.STALE_MARKER,
    State.NOT_MIGRATABLE,
    State.MULTIPLE_ACTIVE_PODS,
}


@soaked(10_000)
@given(st.lists(changes, max_size=25), alive)
def test_a_drain_only_brings_what_was_forecast(news: list[Any], trust: Trust) -> None:
    """The eviction of a VM that `leaves` never brings it into a state that a person has to end."""
    store = play(news)
    conditions = read_conditions(store, StuckPolicy(), trust, NOW)
    for node in ("n1", "n2"):
        _, candidates = forecast_node(store, node, conditions)
        for candidate in candidates:
            vmi = candidate.evidence.vmi
            if candidate.outcome is not LEAVES or vmi.evacuation_node:
                continue
            store.now = NOW
            store.put(replace(vmi, evacuation_node=node, eviction_requested_at=NOW))
            evidence = store.evidence(vmi.namespace, vmi.name)
            assert evidence is not None
            diagnosis = conditions.diagnose(evidence)
            assert diagnosis is not None
            assert diagnosis.state not in NOBODY_ENDS
            assert not diagnosis.stuck


def waits_for(state: State) -> list[Fact]:
    """A VM whose VMIM waits for this."""
    return [a_movable(1), a_vmim(vmi_name="db1", phase="Pending", wait_reason=state)]


def beside(phase: str) -> list[Fact]:
    """A VM whose pod has another one beside it, in this phase."""
    launcher = a_pod(vmi_uid="uid-1")
    return [a_movable(1), launcher, replace(launcher, name="other", uid="o", phase=phase)]


FORECAST: dict[str, tuple[list[Fact], DrainOutcome]] = {
    "no-strategy": ([a_movable(eviction_strategy="")], RESTARTS),
    "running": ([a_movable(migration=a_running_state())], WAITS),
    "pending": ([a_movable(), a_vmim(vmi_name="db1")], WAITS),
    "new": ([a_movable(), a_vmim(vmi_name="db1", phase="")], WAITS),
    "boots": ([a_movable(migratable=False, migratable_unknown=True)], WAITS),
    "ended": ([a_moved(1, 60.0), an_ended_vmim(vmi_name="db1")], LEAVES),
    "not-migratable": ([a_movable(migratable=False, migration=a_running_state())], STAYS),
    "none": ([a_movable(eviction_strategy="None"), a_vmim(vmi_name="db1")], RESTARTS),
    "zombie": ([a_movable(1, migration=MigrationState(uid="gone"))], FAILS),
    "stalled": ([a_movable(1, migration=a_running_state(start=NOW - 9000.0))], FAILS),
    "quota": (waits_for(State.QUOTA), FAILS),
    "peer": (waits_for(State.WAITING_FOR_SYNC), FAILS),
    "backup": (waits_for(State.BACKUP), WAITS),
    "two-pods": (beside("Running"), WAITS),
    "an-ended-pod": (beside("Succeeded"), LEAVES),
    "ends": ([a_movable(1, deleted_at=NOW - 1800.0)], DrainOutcome.ENDS),
    "never-ends": ([a_movable(1, deleted_at=NOW - 1801.0)], STAYS),
    "restarts": (
        [a_movable(1, eviction_strategy="None", migration=MigrationState(uid="gone"))],
        RESTARTS,
    ),
}


@pytest.mark.parametrize(("facts", "outcome"), FORECAST.values(), ids=FORECAST)
def test_what_counts_before_anybody_drains(facts: list[Fact], outcome: DrainOutcome) -> None:
    """A VM waits while it migrates, or until it is known whether it is migratable.

    A state that does not depend on an evacuation decides the outcome before there is one.
    """
    store = a_store(*facts, now=NOW - 4000.0)
    assert outcomes_of(store) == {"db1": outcome}
    _, (candidate,) = forecast_node(store, "n1", now_in(store))
    is_explained = outcome is FAILS or candidate.outlook.ground is Ground.TWO_PODS
    assert (candidate.outlook.diagnosis is not None) is is_explained


@pytest.mark.parametrize(
    ("ends", "newest", "outcome"),
    [
        ([3500.0, 5000.0, 9000.0], "Failed", FAILS),
        ([3601.0, 5000.0, 9000.0], "Failed", LEAVES),
        ([3500.0, 5000.0], "Failed", LEAVES),
        ([3500.0, 5000.0, 9000.0], "Succeeded", LEAVES),
        ([100.0, 200.0, 300.0, 400.0], "Succeeded", LEAVES),
    ],
    ids=["fails", "long-ago", "too-few", "succeeded", "succeeded-lately"],
)
def test_migrations_that_fail_one_after_the_other(
    ends: list[float], newest: str, outcome: DrainOutcome
) -> None:
    """A VM whose newest migrations all failed, the last one lately, would fail in a drain."""
    failed = [
        an_ended_vmim(
            name=f"f{number}",
            uid=f"f{number}",
            vmi_name="db1",
            phase="Failed" if number else newest,
            created=NOW - age - 60.0,
            finished_at=NOW - age,
        )
        for number, age in enumerate(ends)
    ]
    unfinished = a_vmim(vmi_name="db1", phase="Scheduling", created=NOW)
    aborted = {"phase": "Failed", "finished": True, "finished_at": NOW, "aborted": True}
    cancelled = a_vmim(name="c", uid="c", vmi_name="db1", created=NOW - 9.0, **aborted)
    for some in (failed, failed[::-1], [cancelled, *failed]):
        assert outcomes_of(a_store(a_movable(1), *some, now=NOW)) == {"db1": outcome}
    waits = WAITS if outcome is LEAVES else outcome
    assert outcomes_of(a_store(a_movable(1), unfinished, *failed, now=NOW)) == {"db1": waits}


@soaked(10_000)
@given(st.lists(changes, max_size=25), trusts)
def test_the_counts_are_those_of_the_single_vms(news: list[Any], trust: Trust) -> None:
    """After any sequence of changes `count_outcomes` agrees with the outcomes of the single VMs."""
    store = play(news)
    conditions = read_conditions(store, StuckPolicy(), trust, NOW)
    expected = {n: forecast_node(store, n, conditions)[0].outcomes for n in sorted(store.nodes)}
    expected.pop("", None)

    assert count_outcomes(store, conditions).counts == expected
