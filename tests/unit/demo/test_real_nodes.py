"""Simulated migrations, compared with recordings of real nodes."""

from pathlib import Path

import pytest

from exporter.demo import objects, webhooks
from exporter.demo.objects import Object
from exporter.demo.plan import Fate
from exporter.demo.store import MIGRATIONS, PODS, VMIS
from tests.support.sequences import find_written, read_sequence

from .lab import Lab, Plan


RECORDED = Path(__file__).parents[2] / "data" / "recorded" / "1.8.4-nodes"
LIBVIRT = "virError(Code=9, Domain=10, Message='operation failed: migration failed')"
BEGUN = ["migrationUid", "targetNodeAddress", "startTimestamp", "targetNodeDomainDetected"]
FAILED = ["endTimestamp", "failed", "failureReason"]
STATES = {
    "success": [*BEGUN, "endTimestamp", "completed"],
    "failure": [*BEGUN, *FAILED],
    "cancelled": [*BEGUN, "abortRequested", "abortStatus", *FAILED],
    "unschedulable": [],
}
"""The fields of `migrationState` that show its progress, in the order in which they are written."""
ONLY_REAL = {
    "cancelled": {"VMI.status.migrationState.migrationConfiguration.bandwidthPerMigration"},
    "unschedulable": {"pod.metadata.deletionGracePeriodSeconds", "pod.metadata.deletionTimestamp"},
}
"""Fields that the simulated cluster never writes."""


def simulate(name: str) -> list[Object]:
    """Repeat a recorded scenario in the simulated cluster; returns the versions of the objects."""
    lab = Lab("db1", fate=Fate("fails" if name == "failure" else "succeeds", 6.0, LIBVIRT))
    migrate(lab)
    lab.run(30)
    if name == "failure":
        migrate(lab)
        lab.until(lambda: lab.phases()[0] == "Scheduling")
        lab.run(0.5)
    before = {resource: len(lab.sent(resource)) for resource in (VMIS, MIGRATIONS, PODS)}
    match name:
        case "failure":
            pass
        case "success":
            lab.cluster.evict_vmi("shop", "db1", descheduler=True)
        case "cancelled":
            migrate(lab)
            lab.run(1)
            lab.until(lambda: lab.phases()[0] == "Running")
            lab.run(1)
            lab.store.delete(MIGRATIONS, "shop", lab.migrations()[0]["metadata"]["name"])
        case _:
            lab.cluster.fates.plan = Plan(Fate("unschedulable"))
            lab.cluster.evict_vmi("shop", "db1", descheduler=True)
            lab.run(5)
            lab.cluster.change_vmi("shop", "db1", webhooks.cancel_evacuation)
            lab.run(0.5)
            lab.store.delete(MIGRATIONS, "shop", lab.migrations()[0]["metadata"]["name"])
    lab.run(20)
    return [
        version
        for resource, seen in before.items()
        for version in _with_latest(lab.sent(resource), seen)
    ]


def migrate(lab: Lab) -> None:
    """Create a VMIM, as a user does."""
    migration = webhooks.admit_migration(objects.build_migration(lab.vmi()))
    lab.store.create(MIGRATIONS, migration)


def _with_latest(versions: list[Object], seen: int) -> list[Object]:
    """Each object's state after the first `seen` versions, and then all later versions."""
    latest = {version["metadata"]["uid"]: version for version in versions[:seen]}
    return [*latest.values(), *versions[seen:]]


def _comparable(versions: list[Object]) -> set[str]:
    """The written fields, except removals from `migrationState`."""
    return {path for path in find_written(versions) if "-VMI.status.migrationState" not in path}


@pytest.mark.parametrize("name", STATES)
def test_a_simulated_migration_writes_what_a_real_one_does(name: str) -> None:
    """The simulated nodes and controllers write exactly the same fields as the real ones."""
    recorded = read_sequence(RECORDED / f"{name}.jsonl")
    real = _comparable(recorded) - ONLY_REAL.get(name, set())
    simulated = _comparable(simulate(name))

    assert sorted(real - simulated) == []
    assert sorted(simulated - real) == []


@pytest.mark.parametrize("name", STATES)
def test_a_simulated_migration_writes_in_the_order_of_a_real_one(name: str) -> None:
    """The fields that show the progress are written in the same order as on real nodes."""
    for versions in (read_sequence(RECORDED / f"{name}.jsonl"), simulate(name)):
        vmis = [version for version in versions if version["kind"] == "VirtualMachineInstance"]
        written = [path.removeprefix("VMI.status.migrationState.") for path in find_written(vmis)]
        assert [field for field in written if field in STATES[name]] == STATES[name]


def test_a_pod_of_a_failed_migration_ends_succeeded() -> None:
    """No pod ends in phase Failed if the domain is on the target when the migration fails."""
    for versions in (read_sequence(RECORDED / "failure.jsonl"), simulate("failure")):
        assert "Failed" not in {
            objects.phase(version) for version in versions if version["kind"] == "Pod"
        }
