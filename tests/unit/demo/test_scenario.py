"""The demo's VMs, which reach many states and depend only on the seed."""

from __future__ import annotations

from datetime import timedelta

import pytest

from exporter.demo import objects
from exporter.demo.cluster import Cluster
from exporter.demo.controller import Rules
from exporter.demo.plan import Pace
from exporter.demo.scenario import ROLES, Role, Scenario, make_vms
from exporter.demo.store import MIGRATIONS, NODES, PODS, VMIS

from .facts import NOW, at
from .lab import sent


def play(seconds: float, *, seed: int = 1, vms: int = 24, nodes: int = 4) -> Cluster:
    """The cluster after this many seconds of the scenario."""
    scenario = Scenario(seed, vms)
    cluster = Cluster(NOW, scenario, nodes=nodes, seed=seed, rules=Rules(faster=10), pace=Pace())
    for _ in scenario.populate(cluster):
        pass
    cluster.step(at(seconds))
    return cluster


@pytest.fixture(scope="module")
def minutes() -> Cluster:
    """The default scenario after 3.5 minutes, that is, after its past and its first minute."""
    return play(210)


def test_a_seed_decides_everything() -> None:
    """The same seed gives the same objects, and another seed gives other objects."""
    first, again, other = (sent(play(60, seed=seed), VMIS, MIGRATIONS, PODS) for seed in (7, 7, 8))

    assert first == again
    assert first != other


def test_every_role_is_there_by_default() -> None:
    """The default scenario has a VM of every role."""
    assert {vm.role for vm in make_vms(1, 24)} == set(Role)
    assert len(ROLES) == 24


def test_it_is_lively() -> None:
    """In most seconds of the first minute, VMs migrate, wait, cool down and evacuate."""
    seen = {"running": 0, "pending": 0, "cooling": 0, "evacuating": 0}
    cluster = play(150)
    for second in range(150, 210):
        cluster.step(at(second))
        vmis = list(cluster.store.objects(VMIS))
        phases = [objects.phase(migration) for migration in cluster.store.objects(MIGRATIONS)]
        ends = [objects.state_of(vmi).get("endTimestamp") for vmi in vmis]
        seen["running"] += any(objects.is_migrating(vmi) for vmi in vmis)
        seen["pending"] += "Pending" in phases
        seen["cooling"] += any(end and objects.parse_time(end) > at(second - 20) for end in ends)
        seen["evacuating"] += sum(bool(objects.evacuated_node(vmi)) for vmi in vmis) >= 5

    assert min(seen.values()) >= 50


def test_recreated_vms_are_others_of_the_same_name(minutes: Cluster) -> None:
    """A recreated VM has the same name and a new UID."""
    uids = {
        vmi["metadata"]["uid"]
        for vmi in sent(minutes, VMIS)
        if vmi["metadata"]["name"] == "recreated-1"
    }

    assert len(uids) >= 2


def test_a_node_that_the_user_cordons_stays_cordoned() -> None:
    """The scenario's own drains uncordon only nodes that they have cordoned."""
    cluster = play(1.0)
    for name in cluster.nodes:
        cluster.cordon(name)
    cluster.step(cluster.instant + timedelta(seconds=180))
    nodes = [cluster.store.get(NODES, None, name) for name in cluster.nodes]
    assert all(node["spec"].get("unschedulable") for node in nodes)


def test_most_evictions_are_the_descheduler_s(minutes: Cluster) -> None:
    """Most evacuations have the priority by which KubeVirt marks those of a descheduler."""
    sources = [migration["spec"].get("priority") for migration in sent(minutes, MIGRATIONS)]

    assert sources.count("system-maintenance") > len(sources) / 2
