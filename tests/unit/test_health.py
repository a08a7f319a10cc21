"""The exporter's health."""

from collections.abc import Set as AbstractSet
from typing import Any

import pytest

from exporter.engine.facts.model import EVIDENCE_RESOURCES, Resource
from exporter.health import (
    Health,
    Staleness,
    Watched,
    list_watches,
)
from tests.support.builders import NOW


def watched(resource: Resource, **overrides: Any) -> Watched:
    """A synced watch of all namespaces with contact a second ago."""
    fields: dict[str, Any] = {"namespace": None, "synced": True, "contact": NOW - 1.0} | overrides
    return Watched(resource=resource, **fields)


def health(*everything: Watched) -> Health:
    """A health whose evidence is stale after three minutes, and dead ten minutes later."""
    return Health(stale_after=180.0, dead_after=600.0, watched=list(everything))


def dead_in(state: Health, namespace: str = "any", *, now: float = NOW) -> AbstractSet[Resource]:
    """The dead resources in a namespace."""
    return state.read_trust(now).of(namespace).dead


READY = {
    "nothing-watched": (health(), False, []),
    "vmis-alone": (health(watched(Resource.VMIS)), True, []),
    "vmis-not-synced": (
        health(watched(Resource.VMIS, synced=False)),
        False,
        ["virtualmachineinstances"],
    ),
    "pods-not-synced": (
        health(watched(Resource.VMIS), watched(Resource.PODS, synced=False)),
        False,
        ["pods"],
    ),
    "pods-rejected": (
        health(watched(Resource.VMIS), watched(Resource.PODS, synced=False, rejected="403")),
        True,
        [],
    ),
    "vmis-rejected": (health(watched(Resource.VMIS, synced=False, rejected="403")), False, []),
    "vmis-rejected-in-one-of-two-namespaces": (
        health(
            watched(Resource.VMIS, namespace="a"),
            watched(Resource.VMIS, namespace="b", synced=False, rejected="403"),
        ),
        True,
        [],
    ),
    "one-of-two-namespaces": (
        health(
            watched(Resource.VMIS, namespace="a"),
            watched(Resource.VMIS, namespace="b", synced=False),
        ),
        False,
        ["virtualmachineinstances in namespace b"],
    ),
}


@pytest.mark.parametrize(("state", "ready", "waiting"), READY.values(), ids=READY)
def test_ready(state: Health, waiting: list[str], *, ready: bool) -> None:
    """The exporter is ready when VMIs are synced in some namespace, and all other watches are
    synced or forbidden.
    """
    assert state.ready is ready
    assert state.waiting_for() == waiting


def test_what_is_seen() -> None:
    """A resource is visible if there is a namespace in which it is synced and not forbidden."""
    state = health(
        watched(Resource.VMIS),
        watched(Resource.PODS, namespace="a"),
        watched(Resource.PODS, namespace="b", rejected="403 no"),
        watched(Resource.VMIMS, synced=False),
    )
    assert [state.is_seen(r) for r in EVIDENCE_RESOURCES] == [True, False, True, False]
    trust = state.read_trust(NOW)
    assert [trust.of(name).sees(Resource.PODS) for name in ("a", "b", "c")] == [True, False, True]
    assert [state.is_rejected(resource) for resource in EVIDENCE_RESOURCES] == [
        False,
        False,
        True,
        False,
    ]
    assert state.rejected_resources() == {"pods in namespace b": "403 no"}


OBSERVED_AT = {
    "nothing": (health(), None),
    "never-heard": (health(watched(Resource.VMIS, contact=None)), None),
    "not-synced": (health(watched(Resource.VMIS, synced=False)), None),
    "quiet-pods": (
        health(watched(Resource.VMIS), watched(Resource.PODS, contact=NOW - 9.0)),
        NOW - 1.0,
    ),
    "the-quietest-namespace": (
        health(
            watched(Resource.VMIS, namespace="a"),
            watched(Resource.VMIS, namespace="b", contact=NOW - 9.0),
        ),
        NOW - 9.0,
    ),
    "a-lost-namespace-is-left-out": (
        health(
            watched(Resource.VMIS, namespace="a"),
            watched(Resource.VMIS, namespace="b", contact=NOW - 9.0, rejected="403"),
        ),
        NOW - 1.0,
    ),
}


@pytest.mark.parametrize(("state", "observed"), OBSERVED_AT.values(), ids=OBSERVED_AT)
def test_observed_at(state: Health, observed: float | None) -> None:
    """Of the last contacts of the synced VMI watches that are not rejected, the oldest counts."""
    assert state.observed_at == observed


@pytest.mark.parametrize(
    ("age", "staleness", "turns_in"),
    [
        pytest.param(0.0, Staleness.FRESH, 180.0, id="fresh"),
        pytest.param(179.0, Staleness.FRESH, 1.0, id="just-fresh"),
        pytest.param(180.0, Staleness.STALE, 600.0, id="stale"),
        pytest.param(779.0, Staleness.STALE, 1.0, id="just-stale"),
        pytest.param(780.0, Staleness.DEAD, None, id="dead"),
    ],
)
def test_staleness(age: float, staleness: Staleness, turns_in: float | None) -> None:
    """Evidence becomes stale and later dead, at known times."""
    state = health(watched(Resource.VMIS, contact=NOW - age))
    assert state.staleness(NOW) is staleness
    assert state.find_next_change(NOW) == (None if turns_in is None else NOW + turns_in)
    assert state.dies_at(NOW) == (None if staleness is Staleness.DEAD else NOW - age + 780.0)
    assert state.is_stale(NOW, ()) is (staleness is not Staleness.FRESH)
    dead = {Resource.VMIS} if staleness is Staleness.DEAD else set()
    assert dead_in(state) == dead


def test_staleness_before_the_first_contact() -> None:
    """Before the first contact evidence is stale."""
    assert health().staleness(NOW) is Staleness.STALE
    assert health().find_next_change(NOW) is None
    assert health().dies_at(NOW) is None
    assert not health(watched(Resource.VMIS, contact=None)).read_trust(NOW).has_dead


@pytest.mark.parametrize("resource", [Resource.VMIMS, Resource.PODS])
def test_each_resource_dies_alone(resource: Resource) -> None:
    """Each resource becomes dead independently; only the watch of VMIs makes answers stale."""
    state = health(watched(Resource.VMIS), watched(resource, contact=NOW - 779.0))
    assert state.staleness(NOW) is Staleness.FRESH
    assert (dead_in(state), state.find_next_change(NOW)) == (set(), NOW + 1.0)
    assert not state.read_trust(NOW).has_dead
    assert dead_in(state, now=NOW + 1.0) == {resource}
    assert state.read_trust(NOW + 1.0).has_dead
    assert state.find_next_change(NOW + 1.0) == NOW + 179.0


@pytest.mark.parametrize(
    ("resource", "unused"),
    [
        (Resource.PODS, {"rejected": "403"}),
        (Resource.PODS, {"synced": False}),
        (Resource.NODES, {}),
    ],
)
def test_a_watch_that_no_verdict_uses_turns_nothing(
    resource: Resource, unused: dict[str, Any]
) -> None:
    """Verdicts do not change when a watch dies that is rejected, not synced or optional."""
    state = health(watched(Resource.VMIS), watched(resource, contact=NOW - 779.0, **unused))
    assert state.find_next_change(NOW) == NOW + 179.0


def test_there_is_a_watch_for_each_namespace() -> None:
    """Nodes have one watch for the cluster; other resources have one for each namespace."""

    def places(*namespaces: str) -> list[tuple[Resource, str | None]]:
        watches = list_watches(namespaces, (Resource.VMIS, Resource.NODES))
        return [(watch.resource, watch.namespace) for watch in watches]

    assert places() == [(Resource.VMIS, None), (Resource.NODES, None)]
    assert places("a", "b") == [
        (Resource.VMIS, "a"),
        (Resource.VMIS, "b"),
        (Resource.NODES, None),
    ]


def test_a_step_of_the_wall_clock_moves_the_contacts() -> None:
    """After the clock was set, the last contacts are as long ago as before."""
    state = health(watched(Resource.VMIS), watched(Resource.PODS, synced=False, contact=None))
    state.shift(-60.0)
    assert [watch.contact for watch in state.watched] == [NOW - 61.0, None]


@pytest.mark.parametrize("missing", [{"contact": NOW - 9999.0}, {"rejected": "403"}])
def test_a_kubevirt_object_that_cannot_be_seen_is_dead(missing: dict[str, Any]) -> None:
    """The KubeVirt object is dead if it is forbidden or its last contact is too old."""
    state = health(watched(Resource.KUBEVIRTS, **missing))
    assert dead_in(state) == {Resource.KUBEVIRTS}


def test_a_namespace_dies_alone() -> None:
    """A resource can be dead in one namespace and alive in the others."""
    state = health(
        watched(Resource.VMIS, namespace="a"),
        watched(Resource.VMIS, namespace="b", contact=NOW - 780.0, rejected="403"),
        watched(Resource.PODS, namespace="a"),
        watched(Resource.PODS, namespace="b", contact=NOW - 780.0),
        watched(Resource.VMIMS, contact=NOW - 780.0),
    )
    assert dead_in(state, "a") == dead_in(state, "elsewhere") == {Resource.VMIMS}
    assert dead_in(state, "b") == {Resource.VMIS, Resource.VMIMS, Resource.PODS}
    assert state.read_trust(NOW).has_dead


def test_what_the_store_goes_without_is_not_dead() -> None:
    """Forbidden pods do not count as dead: they are not seen."""
    state = health(watched(Resource.PODS, contact=NOW - 9999.0, rejected="403"))
    assert not state.read_trust(NOW).has_dead
    assert not state.read_trust(NOW).of("any").sees(Resource.PODS)


def test_a_lost_namespace_makes_answers_about_it_stale() -> None:
    """Answers about a forbidden namespace are stale; all other answers are fresh."""
    state = health(
        watched(Resource.VMIS, namespace="a"),
        watched(Resource.VMIS, namespace="b", rejected="403"),
    )
    asked: list[tuple[str, ...]] = [(), ("a",), ("a", "elsewhere"), ("b",), ("a", "b")]
    assert state.staleness(NOW) is Staleness.FRESH
    assert [state.is_stale(NOW, names) for names in asked] == [False, False, False, True, True]
    assert state.lost_namespaces == {"b"}


def test_what_has_not_begun() -> None:
    """A new watch is not synced and has no counts."""
    fresh = Watched(Resource.VMIS, None)
    assert (fresh.synced, fresh.settled, fresh.lists, fresh.invalid_objects) == (False, False, 0, 0)


def test_optional_resources_are_seen_while_they_are_up_to_date() -> None:
    """An optional resource is visible while all its watches are synced, allowed and not dead."""
    state = health(watched(Resource.VMIS), watched(Resource.NODES))
    assert state.read_trust(NOW).believes(Resource.NODES)
    assert state.read_trust(NOW + 778.0).believes(Resource.NODES)
    assert not state.read_trust(NOW + 779.0).believes(Resource.NODES)
    assert dead_in(state, now=NOW + 779.0) == {Resource.VMIS}
    assert not state.read_trust(NOW).believes(Resource.BUDGETS)
    for fields in ({"synced": False}, {"rejected": "403"}):
        assert (
            not health(watched(Resource.NODES, **fields)).read_trust(NOW).believes(Resource.NODES)
        )
    both = [watched(Resource.BUDGETS, namespace=name) for name in ("a", "b")]
    assert health(*both).read_trust(NOW).believes(Resource.BUDGETS)
    both[1].rejected = "403"
    assert not health(*both).read_trust(NOW).believes(Resource.BUDGETS)


def test_contacts_by_namespace() -> None:
    """The contacts of a namespace are those of its own watches."""
    state = health(watched(Resource.KUBEVIRTS), watched(Resource.VMIS, namespace="a"))
    trust = state.read_trust(NOW)
    assert trust.contacts_everywhere == {Resource.KUBEVIRTS: NOW - 1.0}
    assert trust.contacts_of("a") == {Resource.KUBEVIRTS: NOW - 1.0, Resource.VMIS: NOW - 1.0}


def test_what_is_seen_in_each_namespace() -> None:
    """A resource is hidden where it is forbidden or not listed, and elsewhere if it is nowhere."""
    state = health(
        watched(Resource.NODES),
        watched(Resource.VMIS, namespace="a", rejected="403"),
        watched(Resource.VMIMS, namespace="a"),
        watched(Resource.PODS, namespace="a", synced=False),
        watched(Resource.VMIMS, namespace="b", rejected="403"),
        watched(Resource.PODS, namespace="b", synced=False),
    )
    trust, unwatched = state.read_trust(NOW), {Resource.BUDGETS, Resource.EVICTIONS}
    assert trust.of("a").hidden == {Resource.PODS, *unwatched}
    assert trust.of("b").hidden == {Resource.VMIMS, Resource.PODS, *unwatched}
    assert trust.of("elsewhere").hidden == {Resource.PODS, *unwatched}
    assert set(trust.in_namespace) == {"a", "b"}
    assert trust.of("a").dead_after == 600.0
