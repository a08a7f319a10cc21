"""The simulated cluster: controllers and nodes together, over their store."""

from __future__ import annotations

from datetime import datetime, timedelta
from itertools import pairwise

import pytest

from exporter.demo import node, objects
from exporter.demo.cluster import Cluster
from exporter.demo.controller import Rules
from exporter.demo.objects import Object
from exporter.demo.plan import Fate, Pace
from exporter.demo.store import MIGRATIONS, PODS, VMIS

from .facts import NOW, at
from .lab import Lab, Plan


def test_a_new_vmi_comes_up() -> None:
    """A created VMI gets its launcher pod, a node, and runs, migratable."""
    lab = Lab("db1")
    pod = lab.cluster.launcher("shop", "db1")

    assert objects.phase(lab.vmi()) == "Running"
    assert objects.is_true(lab.vmi(), "LiveMigratable")
    assert pod is not None
    assert objects.is_pod_ready(pod)
    assert objects.node_of(pod) == lab.vmi()["status"]["nodeName"] == "node-1"
    assert objects.labels(pod)[objects.CREATED_BY] == lab.vmi()["metadata"]["uid"]


def test_an_eviction_becomes_a_migration() -> None:
    """Marked, migrated to another node, unmarked; the old pod finishes with its annotation."""
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


def test_the_hand_off_leaves_a_hole() -> None:
    """Of a second migration there is a time when the VMI tells neither start nor end."""
    lab = Lab("db1")
    lab.cluster.evict_vmi("shop", "db1")
    lab.until(lambda: lab.phases() == ["Succeeded"])
    first = lab.state()["migrationUid"]
    lab.cluster.evict_vmi("shop", "db1")
    lab.until(lambda: lab.state()["migrationUid"] != first)
    hole = lab.state()
    lab.until(lambda: lab.phases() == ["Succeeded", "Succeeded"])

    assert "startTimestamp" not in hole
    assert "endTimestamp" not in hole
    assert "endTimestamp" in lab.state()


def test_watchers_see_each_situation_of_the_table() -> None:
    """Handed off, copying, finalising and succeeded each appear in the stream, in this order."""
    lab = Lab("db1")
    lab.cluster.evict_vmi("shop", "db1")
    lab.run(30)
    situations: list[tuple[bool, bool, bool, bool]] = []
    for vmi in lab.told():
        state = objects.state_of(vmi)
        if state is not None:
            situation = (
                "startTimestamp" in state,
                "endTimestamp" in state,
                "completed" in state,
                vmi["status"]["nodeName"] == "node-2",
            )
            if situation not in situations:
                situations.append(situation)

    assert situations == [
        (False, False, False, False),
        (True, False, False, False),
        (True, True, False, True),
        (True, True, True, True),
    ]


def test_a_failing_evacuation_is_retried_for_ever() -> None:
    """A new VMIM at once after each failure, waiting twice as long each time, up to 320 s."""
    lab = Lab("db1", fate=Fate("fails", 5.0, "broken"))
    lab.cluster.evict_vmi("shop", "db1", descheduler=True)
    lab.run(3600)
    waits = []
    seen = {migration["metadata"]["uid"]: migration for migration in lab.told(MIGRATIONS)}
    tries = [one for one in reversed(objects.newest_first(seen.values())) if objects.is_final(one)]
    for before, after in pairwise(tries):
        failed = objects.transition(before, "Failed")
        scheduled = objects.transition(after, "Scheduling")
        assert failed is not None
        assert scheduled is not None
        waits.append(round((scheduled - failed).total_seconds()))

    assert waits[:6] == [20, 40, 80, 160, 320, 320]
    assert set(waits[5:]) == {320}
    assert objects.evacuated_node(lab.vmi()) == "node-1"
    assert lab.state()["failed"] is True


def test_five_finished_migrations_are_kept() -> None:
    """However many have been, the newest five stay, beside the one that is open."""
    lab = Lab("db1", rules=Rules(faster=100), fate=Fate("fails", 1.0))
    lab.cluster.evict_vmi("shop", "db1")
    lab.run(120)
    lab.until(lambda: len(lab.migrations()) == 6)
    first = lab.told(MIGRATIONS)[0]["metadata"]["uid"]

    assert lab.phases().count("Failed") == 5
    assert len(lab.migrations()) == 6
    assert first not in {migration["metadata"]["uid"] for migration in lab.migrations()}


def test_an_unschedulable_target_never_hands_off() -> None:
    """It fails after 300 s in Scheduling, and the VMI's `migrationState` stays absent."""
    lab = Lab("db1", fate=Fate("unschedulable"))
    lab.cluster.evict_vmi("shop", "db1")
    lab.until(lambda: "Failed" in lab.phases())
    failed = lab.migrations()[-1]
    scheduling = objects.transition(failed, "Scheduling")
    ended = objects.transition(failed, "Failed")

    assert scheduling is not None
    assert ended is not None
    assert 299 <= (ended - scheduling).total_seconds() <= 302
    assert objects.state_of(lab.vmi()) is None
    assert list(failed["status"]["migrationState"]) == ["sourcePod"]


def test_a_lost_target_ends_when_it_starts() -> None:
    """The target pod fails before the start: virt-controller writes start and end as one."""
    lab = Lab("db1", fate=Fate("loses target"))
    lab.cluster.evict_vmi("shop", "db1")
    lab.until(lambda: lab.phases()[-1:] == ["Failed"])

    assert lab.state()["startTimestamp"] == lab.state()["endTimestamp"]
    assert lab.state()["failed"] is True


def test_a_zombie_is_handed_off_and_never_ends() -> None:
    """With bug #18087 the VMI names a VMIM that has failed, and knows neither start nor end."""
    lab = Lab("db1", rules=Rules(leaves_zombies=True), fate=Fate("loses ready target"))
    migration = objects.build_migration(lab.vmi())
    lab.store.create(MIGRATIONS, migration)
    lab.run(120)

    assert lab.phases() == ["Failed"]
    assert lab.state()["migrationUid"] == lab.migrations()[0]["metadata"]["uid"]
    assert "endTimestamp" not in lab.state()


@pytest.mark.parametrize("strategy", ["External"])
def test_an_external_vmi_waits_for_ever(strategy: str) -> None:
    """Marked, annotated, and no VMIM is ever created."""
    lab = Lab("db1", strategy=strategy)
    lab.cluster.evict_vmi("shop", "db1", descheduler=True)
    lab.run(3600)

    assert lab.migrations() == []
    assert objects.evacuated_node(lab.vmi()) == "node-1"
    pod = lab.cluster.launcher("shop", "db1") or {}
    assert objects.annotations(pod)[objects.EVICTION_IN_PROGRESS] == "true"


def test_two_leave_a_node_at_a_time() -> None:
    """Of four evictions from one node two run and two wait Pending; in the end all have moved."""
    names = ("db1", "db2", "db3", "db4")
    lab = Lab(*names, fate=Fate("succeeds", 20.0))
    for name in names:
        lab.cluster.evict_vmi("shop", name)
    lab.run(10)
    early = [lab.phases(name)[0] for name in names]
    lab.run(60)

    assert sorted(early) == ["Pending", "Pending", "Running", "Running"]
    assert [lab.phases(name) for name in names] == [["Succeeded"]] * 4


def test_five_run_in_the_cluster() -> None:
    """Whatever nodes they leave, never more than five run at once."""
    names = [f"db{number}" for number in range(1, 10)]
    lab = Lab(*names, rules=Rules(per_node=9), fate=Fate("succeeds", 20.0))
    for name in names:
        lab.cluster.evict_vmi("shop", name)
    running = []
    for _ in range(100):
        lab.run(1)
        open_ones = [lab.phases(name)[0] for name in names]
        running.append(sum(phase not in ("Pending", "Succeeded", "") for phase in open_ones))

    assert max(running) == 5
    assert [lab.phases(name) for name in names] == [["Succeeded"]] * 9


def test_the_more_urgent_goes_first() -> None:
    """When a place becomes free, a drain's migration overtakes a descheduler's."""
    names = ("db1", "db2", "db3", "db4")
    lab = Lab(*names, rules=Rules(per_cluster=1), fate=Fate("succeeds", 10.0))
    lab.cluster.evict_vmi("shop", "db1")
    lab.run(2)
    lab.cluster.evict_vmi("shop", "db2", descheduler=True)
    lab.run(2)
    lab.cluster.evict_vmi("shop", "db3")
    lab.until(lambda: lab.phases("db1") == ["Succeeded"])
    lab.run(3)

    assert lab.phases("db2") == ["Pending"]
    assert lab.phases("db3") != ["Pending"]


def test_a_free_place_is_taken_at_once() -> None:
    """Who waits for a place does not wait for its next look, five seconds later."""
    lab = Lab("db1", "db2", rules=Rules(per_cluster=1), fate=Fate("succeeds", 10.0))
    lab.cluster.evict_vmi("shop", "db1")
    lab.run(1)
    lab.cluster.evict_vmi("shop", "db2")
    lab.until(lambda: lab.phases("db1") == ["Succeeded"])
    lab.run(1)

    assert lab.phases("db2") == ["Scheduling"]


def test_deleting_a_running_migration_aborts_it() -> None:
    """The launcher aborts, the VMIM goes, and once the target pod has ended the next one comes."""
    lab = Lab("db1", fate=Fate("succeeds", 60.0))
    lab.cluster.evict_vmi("shop", "db1")
    lab.until(lambda: lab.phases() == ["Running"])
    (first,) = lab.migrations()
    lab.store.delete(MIGRATIONS, "shop", first["metadata"]["name"])
    lab.until(lambda: lab.state().get("abortStatus") == "Aborting")
    assert "failed" not in lab.state()
    lab.until(lambda: lab.state().get("abortStatus") == "Succeeded")
    state = lab.state()
    lab.run(12)

    assert state["abortRequested"] is True
    assert state["failureReason"] == node.ABORTED
    assert [one["metadata"]["uid"] == first["metadata"]["uid"] for one in lab.migrations()] == [
        False
    ]


def test_a_migration_that_is_cancelled_too_late_succeeds() -> None:
    """It ends before the abort does: the VM has moved, and the deleted VMIM has succeeded."""
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
    assert lab.told(MIGRATIONS)[-1]["status"]["phase"] == "Succeeded"


def test_a_deleted_vmi_takes_everything_with_it() -> None:
    """Its pods, its migrations, the finished and the open, and then itself."""
    lab = Lab("db1", fate=Fate("fails", 5.0))
    lab.cluster.evict_vmi("shop", "db1")
    lab.run(60)
    assert len(lab.migrations()) > 1
    lab.cluster.delete_vmi("shop", "db1")
    lab.run(10)

    assert lab.cluster.vmi("shop", "db1") is None
    assert lab.migrations() == []
    assert list(lab.store.objects(PODS)) == []


def test_a_namesake_starts_clean() -> None:
    """A VMI created again under the same name is another one: nothing of the first is left."""
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
    assert objects.state_of(lab.vmi()) is None
    assert objects.evacuated_node(lab.vmi()) == ""
    assert lab.migrations() == []


def test_finished_pods_do_not_pile_up() -> None:
    """Of the pods that a VM has left only the last two stay."""
    lab = Lab("db1")
    for _ in range(6):
        lab.cluster.evict_vmi("shop", "db1")
        lab.run(20)

    assert len(list(lab.store.objects(PODS))) == 3


def test_the_stream_does_not_depend_on_the_steps() -> None:
    """However often the clock is looked at, the same things happen at the same instants."""

    def play(step: float) -> list[Object]:
        lab = Lab("db1", "db2", fate=Fate("fails", 3.0))
        lab.cluster.evict_vmi("shop", "db1")
        lab.cluster.evict_vmi("shop", "db2")
        while lab.cluster.instant < at(120):
            lab.run(step)
        return [seen for kind in (VMIS, MIGRATIONS, PODS) for seen in lab.told(kind)]

    assert play(5.0) == play(0.25)


def test_speed_divides_every_duration() -> None:
    """At ten times the speed the same evacuation takes a tenth of the time."""
    lasted: dict[float, float] = {}
    for speed in (1.0, 10.0):
        cluster = Cluster(NOW, Plan(Fate()), pace=Pace(speed=speed))
        cluster.create_vmi(objects.build_vmi("shop", "db1", strategy="LiveMigrate", annotations={}))
        cluster.step(at(5))
        cluster.evict_vmi("shop", "db1")
        begun: datetime = cluster.instant
        while not objects.state_of(cluster.vmi("shop", "db1") or {"status": {}}) or (
            "completed" not in (objects.state_of(cluster.vmi("shop", "db1") or {}) or {})
        ):
            cluster.step(cluster.instant + timedelta(milliseconds=1))
        lasted[speed] = (cluster.instant - begun).total_seconds()

    assert lasted[1.0] == pytest.approx(10 * lasted[10.0], abs=0.02)
