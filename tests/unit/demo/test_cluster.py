"""The simulated cluster: controllers and nodes work together on one store."""

from __future__ import annotations

import pytest

from exporter.demo import objects
from exporter.demo.controller import Rules
from exporter.demo.objects import Object
from exporter.demo.plan import Fate, Pace
from exporter.demo.store import MIGRATIONS, PODS, VMIS

from .facts import at
from .lab import Lab


def test_an_eviction_becomes_a_migration() -> None:
    """An eviction marks the VMI. The migration clears the mark, and the old pod finishes."""
    lab = Lab("db1")
    old = lab.cluster.launcher("shop", "db1") or {}
    answer = lab.cluster.evict_vmi("shop", "db1", descheduler=True)
    lab.run(1)
    marked = lab.vmi()
    lab.run(20)
    (migration,) = lab.migrations()

    assert answer is not None
    assert answer.code == 429
    assert objects.is_true(marked, "EvictionRequested")
    assert objects.phase(migration) == "Succeeded"
    assert migration["status"]["migrationState"] == lab.state()
    assert lab.state()["migrationUid"] == migration["metadata"]["uid"]
    assert lab.vmi()["status"]["nodeName"] == "node-2"
    assert objects.evacuated_node(lab.vmi()) == ""
    assert objects.EVICTION_SOURCE not in objects.annotations(lab.vmi())
    assert objects.condition(lab.vmi(), "EvictionRequested") is None
    finished = lab.store.get(PODS, "shop", old["metadata"]["name"])
    assert objects.phase(finished) == "Succeeded"
    assert objects.annotations(finished)[objects.EVICTION_IN_PROGRESS] == "true"


def test_the_more_urgent_goes_first() -> None:
    """A drain's migration gets the next free slot before an earlier migration of a descheduler."""
    names = ("db1", "db2", "db3", "db4")
    lab = Lab(*names, rules=Rules(per_cluster=1), fate=Fate("succeeds", 10.0))
    lab.cluster.evict_vmi("shop", "db1")
    lab.run(2)
    lab.cluster.evict_vmi("shop", "db2", descheduler=True)
    lab.run(1)
    lab.cluster.evict_vmi("shop", "db3")
    lab.until(lambda: lab.phases("db1") == ["Succeeded"])
    lab.run(1)

    assert lab.phases("db2") == ["Pending"]
    assert lab.phases("db3") == ["Scheduling"]


def test_a_migration_that_is_cancelled_too_late_succeeds() -> None:
    """A migration succeeds if it is cancelled just before its end."""
    lab = Lab("db1", fate=Fate("succeeds", 3.0))
    lab.cluster.evict_vmi("shop", "db1")
    lab.until(lambda: lab.phases() == ["Running"])
    lab.run(2.5)
    (first,) = lab.migrations()
    lab.store.delete(MIGRATIONS, "shop", first["metadata"]["name"])
    lab.until(lambda: "completed" in lab.state())
    lab.run(3)

    assert lab.state()["abortRequested"] is True
    assert "failed" not in lab.state()
    assert lab.vmi()["status"]["nodeName"] == lab.state()["targetNode"]
    assert lab.sent(MIGRATIONS)[-1]["status"]["phase"] == "Succeeded"


def test_a_namesake_starts_clean() -> None:
    """A recreated VMI has no state and no migrations of its predecessor."""
    lab = Lab("db1", fate=Fate("fails", 5.0))
    first = lab.vmi()["metadata"]["uid"]
    lab.cluster.evict_vmi("shop", "db1")
    lab.run(60)
    lab.cluster.delete_vmi("shop", "db1")
    lab.run(10)
    lab.create("db1")
    lab.run(10)

    assert lab.vmi()["metadata"]["uid"] != first
    assert objects.phase(lab.vmi()) == "Running"
    assert not objects.state_of(lab.vmi())
    assert objects.evacuated_node(lab.vmi()) == ""
    assert lab.migrations() == []


def test_finished_pods_do_not_pile_up() -> None:
    """Only the last two finished pods of a VM are kept."""
    lab = Lab("db1")
    for _ in range(6):
        lab.cluster.evict_vmi("shop", "db1")
        lab.run(20)

    assert len(list(lab.store.objects(PODS))) == 3


def test_the_stream_does_not_depend_on_the_steps() -> None:
    """The events do not depend on the size of the time steps."""

    def play(step: float) -> list[Object]:
        lab = Lab("db1", "db2", fate=Fate("fails", 3.0))
        lab.cluster.evict_vmi("shop", "db1")
        lab.cluster.evict_vmi("shop", "db2")
        while lab.cluster.instant < at(120):
            lab.run(step)
        return lab.sent(VMIS, MIGRATIONS, PODS)

    assert play(5.0) == play(0.25)


def test_speed_divides_every_duration() -> None:
    """At ten times the speed an evacuation takes a tenth of the time."""
    lasted: dict[float, float] = {}
    for speed in (1.0, 10.0):
        lab = Lab("db1", pace=Pace(speed=speed))
        lab.cluster.evict_vmi("shop", "db1")
        begun = lab.cluster.instant
        while "completed" not in lab.state():
            lab.run(0.001)
        lasted[speed] = (lab.cluster.instant - begun).total_seconds()

    assert lasted[1.0] == pytest.approx(10 * lasted[10.0], abs=0.02)
