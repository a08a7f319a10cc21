"""What the exporter knows about itself."""

from typing import Any

import pytest

from exporter.engine.model import CLUSTER_RESOURCES, Resource
from exporter.health import Health, Restart, Staleness, Watched
from tests.support.builders import NOW


def watched(resource: Resource, **overrides: Any) -> Watched:
    """A resource in all namespaces that is synced and was heard of a second ago."""
    fields: dict[str, Any] = {"namespace": None, "synced": True, "contact": NOW - 1.0} | overrides
    return Watched(resource=resource, **fields)


def health(*everything: Watched) -> Health:
    """Stale after three minutes, dead ten minutes later."""
    return Health(stale_after=180.0, dead_after=600.0, watched=list(everything))


@pytest.mark.parametrize(
    ("state", "ready", "waiting"),
    [
        pytest.param(health(), False, [], id="nothing-watched"),
        pytest.param(health(watched(Resource.VMIS)), True, [], id="vmis-alone"),
        pytest.param(
            health(watched(Resource.VMIS, synced=False)),
            False,
            ["virtualmachineinstances"],
            id="vmis-not-synced",
        ),
        pytest.param(
            health(watched(Resource.VMIS), watched(Resource.PODS, synced=False)),
            False,
            ["pods"],
            id="pods-not-synced",
        ),
        pytest.param(
            health(watched(Resource.VMIS), watched(Resource.PODS, synced=False, refused="403")),
            True,
            [],
            id="pods-refused",
        ),
        pytest.param(
            health(watched(Resource.VMIS, synced=False, refused="403")),
            False,
            [],
            id="vmis-refused",
        ),
        pytest.param(
            health(
                watched(Resource.VMIS, namespace="a"),
                watched(Resource.VMIS, namespace="b", synced=False),
            ),
            False,
            ["virtualmachineinstances in namespace b"],
            id="one-of-two-namespaces",
        ),
    ],
)
def test_ready(state: Health, waiting: list[str], *, ready: bool) -> None:
    """Ready is: VMIs are synced, every other resource is synced or refused."""
    assert state.ready is ready
    assert state.waiting_for() == waiting


def test_what_is_seen() -> None:
    """A resource is seen where it is synced and not refused, in one namespace at least."""
    state = health(
        watched(Resource.VMIS),
        watched(Resource.PODS, namespace="a"),
        watched(Resource.PODS, namespace="b", refused="403 no"),
        watched(Resource.VMIMS, synced=False),
    )
    assert [state.is_seen(r) for r in CLUSTER_RESOURCES] == [True, False, True, False]
    assert state.blind_namespaces(Resource.PODS) == {"b"}
    assert [state.is_refused(resource) for resource in CLUSTER_RESOURCES] == [
        False,
        False,
        True,
        False,
    ]
    assert state.refused_resources() == {"pods in namespace b": "403 no"}


@pytest.mark.parametrize(
    ("state", "observed"),
    [
        pytest.param(health(), None, id="nothing"),
        pytest.param(health(watched(Resource.VMIS, contact=None)), None, id="never-heard"),
        pytest.param(health(watched(Resource.VMIS, synced=False)), None, id="not-synced"),
        pytest.param(
            health(watched(Resource.VMIS), watched(Resource.PODS, contact=NOW - 9.0)),
            NOW - 1.0,
            id="quiet-pods",
        ),
        pytest.param(
            health(
                watched(Resource.VMIS, namespace="a"),
                watched(Resource.VMIS, namespace="b", contact=NOW - 9.0),
            ),
            NOW - 9.0,
            id="the-quietest-namespace",
        ),
    ],
)
def test_observed_at(state: Health, observed: float | None) -> None:
    """The last proof of contact is that of the VMIs' watch, the oldest where there are many."""
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
    """Evidence turns stale, and dead a while later, and it is known when."""
    state = health(watched(Resource.VMIS, contact=NOW - age))
    assert state.staleness(NOW) is staleness
    assert state.turns_at(NOW) == (None if turns_in is None else NOW + turns_in)


def test_staleness_before_the_first_contact() -> None:
    """What was never heard of is stale, and no instant changes that."""
    assert health().staleness(NOW) is Staleness.STALE
    assert health().turns_at(NOW) is None


def test_restarts_are_counted_by_reason() -> None:
    """Each resource counts why its watch was opened again."""
    one, other = watched(Resource.VMIS), watched(Resource.PODS)
    one.restarts[Restart.EXPIRED] += 1
    assert (one.restarts[Restart.EXPIRED], other.restarts[Restart.EXPIRED]) == (1, 0)
    assert one.settled
