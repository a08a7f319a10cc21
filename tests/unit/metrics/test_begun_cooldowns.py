"""Which cooldowns count as begun."""

import pytest

from exporter.counters import Histogram
from exporter.engine.facts.changes import NoticeKind
from exporter.engine.facts.model import CLUSTER_RESOURCES, Outcome, Resource, Seconds
from exporter.engine.facts.policy import Override, Policy
from exporter.health import Health, Watched
from exporter.metrics.begun_cooldowns import BegunCooldowns
from tests.support.builders import (
    NAME,
    NAMESPACE,
    NOW,
    a_policy,
    a_running_state,
    a_state,
    a_vmi,
    a_vmim,
    an_ended_vmim,
)
from tests.support.stores import ClockedStore


class Observed:
    """A store, whose first lists are complete, and the cooldowns that have begun."""

    def __init__(self, policy: Policy | None = None, *, synced: bool = True) -> None:
        self.store = ClockedStore()
        watches = [Watched(resource, None, synced=synced) for resource in CLUSTER_RESOURCES]
        self.health = Health(180.0, 600.0, watches)
        self.lengths = Histogram((900, 1800))
        begun = BegunCooldowns(
            self.store, policy or a_policy(), self.health, self.lengths, lambda: NOW
        )
        self.store.subscribe(begun.record_change, NoticeKind.EVIDENCE, NoticeKind.GONE)

    @property
    def begun(self) -> tuple[int, Seconds]:
        """How many cooldowns have begun, and how long they are together."""
        return self.lengths.count, self.lengths.total


def test_changes_of_a_known_ending_begin_no_cooldown() -> None:
    """A corrected end, another node, a VMIM that finishes: the cooldown is the same."""
    observed = Observed()
    observed.store.put(a_vmim())
    observed.store.put(a_vmi(migration=a_running_state()))
    assert observed.begun == (0, 0.0)
    observed.store.put(a_vmi(migration=a_state()))
    observed.store.put(an_ended_vmim(finished_at=NOW - 1_000.0))
    observed.store.put(a_vmi(node="n2", migration=a_state(end=NOW - 590.0)))
    assert observed.begun == (1, 900.0)


def test_the_first_lists_begin_no_cooldown() -> None:
    """What was there before the first lists were complete has begun earlier."""
    observed = Observed(synced=False)
    observed.store.put(a_vmi(migration=a_state()))
    for watched in observed.health.watched:
        watched.synced = True
    observed.store.put(a_vmi(node="n2", migration=a_state()))
    assert observed.begun == (0, 0.0)
    observed.store.put(a_vmi(migration=a_state(uid="m2", end=NOW - 60.0)))
    assert observed.begun == (1, 1800.0)


def test_a_failure_that_does_not_count_begins_no_cooldown() -> None:
    """With `countFailedMigrations: false` the cooldown of the last success goes on."""
    observed = Observed(a_policy(count_failed_migrations=False))
    observed.store.put(a_vmi(migration=a_state()))
    failed = a_state(uid="m2", end=NOW - 60.0, outcome=Outcome.FAILED)
    observed.store.put(a_vmi(migration=failed))
    assert observed.begun == (1, 900.0)


def test_a_failure_that_does_not_count_begins_none_after_the_first_lists() -> None:
    """The cooldown of a success that the first lists showed goes on, too."""
    observed = Observed(a_policy(count_failed_migrations=False), synced=False)
    observed.store.put(a_vmi(migration=a_state()))
    for watched in observed.health.watched:
        watched.synced = True
    failed = a_state(uid="m2", end=NOW - 60.0, outcome=Outcome.FAILED)
    observed.store.put(a_vmi(migration=failed))
    assert observed.begun == (0, 0.0)


def test_the_shortest_cooldown_is_observed() -> None:
    """A cooldown of half a second counts."""
    observed = Observed(a_policy(migration_cooldown=0.0))
    observed.store.put(a_vmi(migration=a_state(start=NOW - 600.5)))
    assert observed.begun == (1, 0.5)


def test_a_vm_without_a_cooldown_is_not_observed() -> None:
    """Neither a cooldown of 0 nor an unreadable end begins a cooldown, nor does no migration."""
    observed = Observed(a_policy(migration_cooldown=0.0))
    observed.store.put(a_vmi())
    observed.store.put(a_vmi(migration=a_state(start=NOW - 600.0)))
    observed.store.put(a_vmi(migration=a_state(uid="m2", end=None, ended=True)))
    assert observed.begun == (0, 0.0)


def test_the_length_is_that_of_the_vm_s_own_policy() -> None:
    """An exception's cooldown is observed for its VMs."""
    long = a_policy(migration_cooldown=3_600.0)
    policy = a_policy(overrides=(Override(name="dbs", policy=long, namespaces=(NAMESPACE,)),))
    observed = Observed(policy)
    observed.store.put(a_vmi(override="dbs", migration=a_state()))
    assert observed.begun == (1, 3_600.0)


@pytest.mark.parametrize("uid", ["m1", ""])
def test_the_next_vm_of_a_name_begins_its_own_cooldown(uid: str) -> None:
    """After the VM was deleted nothing of it is kept."""
    observed = Observed()
    for vm in ("1", "2"):
        observed.store.put(a_vmi(uid=vm, migration=a_state(uid=uid)))
        observed.store.put(a_vmi(uid=vm, node="n2", migration=a_state(uid=uid)))
        observed.store.remove(Resource.VMIS, NAMESPACE, NAME)
    assert observed.begun == (2, 1_800.0)


@pytest.mark.parametrize(
    ("floor", "cap", "steps"),
    [
        (900.0, 21_600.0, (900.0, 1800.0, 3600.0, 7200.0, 14_400.0, 21_600.0)),
        (600.0, 600.0, (600.0,)),
        (60.0, 0.0, tuple(60.0 * 2**step for step in range(10))),
        (0.0, 5120.0, tuple(10.0 * 2**step for step in range(10))),
        (0.0, 0.0, ()),
    ],
)
def test_the_steps_of_a_policy(floor: Seconds, cap: Seconds, steps: tuple[Seconds, ...]) -> None:
    """Cooldowns double from the floor to the cap; without a floor the steps end at the cap."""
    policy = a_policy(migration_cooldown=floor, max_migration_cooldown=cap)
    assert policy.cooldown_steps == steps
