"""The log line of each migration that ends, and the counts of migrations."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import structlog

from exporter.counters import Counters
from exporter.engine.facts.changes import EvictionAdmitted
from exporter.engine.facts.model import Outcome, Resource, Trigger
from exporter.kube import migration_log
from exporter.kube.migration_log import MigrationLog
from exporter.kube.objects.kubevirt import parse_object
from tests.program.waiting import wait_until
from tests.support.builders import (
    NOW,
    Json,
    a_pod_json,
    a_state_json,
    a_vmi_json,
    a_vmim_json,
    rfc3339,
    transitions_json,
)
from tests.support.stores import ClockedStore


RECORDED = Path(__file__).parents[2] / "data" / "recorded" / "1.8.4-nodes"
RESOURCES = {
    "VirtualMachineInstance": Resource.VMIS,
    "VirtualMachineInstanceMigration": Resource.VMIMS,
    "Pod": Resource.PODS,
}


class Watcher:
    """Passes objects to the migration log before the store, as the watch does."""

    def __init__(self, *, started_at: float = 0.0, store: ClockedStore | None = None) -> None:
        self.store = store or ClockedStore(keep=16)
        self.counters = Counters()
        self.log = MigrationLog(self.store, self.counters, started_at=started_at, window=86_400.0)

    def see(self, resource: Resource, document: Json) -> None:
        changed = parse_object(resource, json.dumps(document).encode())
        self.log.record(changed)
        self.store.put(changed.fact, changed.reasons)

    def count(self) -> dict[tuple[str, str], int]:
        """The number of counted migrations by trigger and reason."""
        return {(trigger, why): n for (_, trigger, why), n in self.counters.migrations.items()}


def a_succeeded_vmim_json(at: float = NOW, **overrides: Any) -> Json:
    """A VMIM of db1 that KubeVirt finished at this time, with its copy of `migrationState`."""
    phases = transitions_json(Scheduled=at - 300, Running=at - 300, Succeeded=at)
    return a_vmim_json(
        phase="Succeeded",
        migrationState=a_state_json(),
        phaseTransitionTimestamps=phases,
        **overrides,
    )


def read_recording(name: str) -> list[tuple[Resource, Json]]:
    """The objects of a recording of real nodes, in order."""
    documents = (json.loads(line) for line in (RECORDED / f"{name}.jsonl").read_text().splitlines())
    return [(RESOURCES[document["kind"]], document) for document in documents]


def play(name: str) -> tuple[Watcher, list[dict[str, Any]]]:
    """Replay a recording of real nodes; returns the watcher, and the `migration_ended` lines."""

    async def run() -> Watcher:
        watcher = Watcher()
        for resource, document in read_recording(name):
            watcher.see(resource, document)
        return watcher

    with structlog.testing.capture_logs() as lines:
        watcher = asyncio.run(run())
    return watcher, [dict(line) for line in lines if line["event"] == "migration_ended"]


@pytest.mark.parametrize(
    ("recording", "trigger", "reason", "phase", "message"),
    [
        ("success", "evacuation", "none", "Running", ""),
        ("failure", "manual", "libvirt", "Running", "virError(Code=9"),
        ("timeout", "manual", "timeout_completion", "Running", "Live migration is not"),
        ("cancelled", "manual", "aborted", "Running", "Live migration aborted"),
        ("unschedulable", "evacuation", "unschedulable", "Scheduling", "0/2 nodes"),
        ("target-deleted", "manual", "none", "Running", ""),
    ],
)
def test_a_migration_of_real_nodes(
    recording: str, trigger: str, reason: str, phase: str, message: str
) -> None:
    """Each recorded migration is logged as one line, with trigger, outcome and reason."""
    watcher, (line,) = play(recording)
    assert line["kubevirt.migration.trigger"] == trigger
    outcome = "succeeded" if reason == "none" else "failed"
    assert line["kubevirt.migration.outcome"] == outcome
    assert line["kubevirt.migration.phase"] == phase
    assert line["error.type"] == reason
    assert line["error.message"].startswith(message)
    assert line["kubevirt.migration.source_node"] in ("n1", "n2")
    assert line["kubevirt.operation.duration_ms"] > 0
    assert [*line["kubevirt.migration.phase_seconds"]][-1] == phase
    assert watcher.count() == {(trigger, reason): 1}


def test_a_success_names_both_nodes_and_is_timed() -> None:
    """The line of a success has both nodes. Its duration excludes the time in the queue."""
    watcher, (line,) = play("success")
    assert line["kubevirt.migration.source_node"] == "n1"
    assert line["kubevirt.migration.target_node"] == "n2"
    assert line["kubevirt.migration.mode"] == "PreCopy"
    assert line["kubevirt.operation.duration_ms"] == 4000
    durations = watcher.counters.migration_durations[Trigger.EVACUATION]
    assert (durations.count, durations.total) == (1, 4.0)


@pytest.mark.parametrize(
    ("recording", "phase", "reason"),
    [("success", "completed", "SuccessfulMigration"), ("failure", "failed", "FailedMigration")],
)
def test_a_line_has_the_names_of_kubevirt_s_own_records(
    recording: str, phase: str, reason: str
) -> None:
    """Who filters KubeVirt's records by the names of VEP 373 finds these lines too."""
    _, (line,) = play(recording)
    names = ("operation.type", "operation.phase", "migration.name")
    assert [line[f"kubevirt.{name}"] for name in names] == [
        "migration",
        phase,
        line["k8s.object.name"],
    ]
    assert line["k8s.object.kind"] == "VirtualMachineInstanceMigration"
    assert line["k8s.event.reason"] == reason
    assert line["k8s.event.reporter.name"] == "kubevirt-eviction-exporter"
    assert line["user.name"] == ""


@pytest.mark.parametrize("is_handed_off", [True, False])
async def test_a_line_names_who_asked_for_a_migration(*, is_handed_off: bool) -> None:
    """The user is the one who made the VMIM, also if it failed before its hand-off."""
    watcher = Watcher()
    made = a_vmim_json(
        metadata={"annotations": {"kubevirt.io/last-modified-by": "alice"}},
        phase="Failed",
        migrationState=a_state_json(failed=True) if is_handed_off else None,
        phaseTransitionTimestamps=transitions_json(Failed=NOW),
    )
    with structlog.testing.capture_logs() as lines:
        watcher.see(Resource.VMIS, a_vmi_json())
        watcher.see(Resource.VMIMS, made)
    (line,) = lines
    assert line["user.name"] == "alice"


async def test_a_line_names_who_asked_for_an_evacuation() -> None:
    """The user whose eviction the webhook saw is named, also when the evacuation is over."""
    watcher = Watcher()
    watcher.store.now = NOW - 300.0
    watcher.see(Resource.VMIS, a_vmi_json())
    watcher.see(Resource.PODS, a_pod_json())
    watcher.store.apply(EvictionAdmitted("shop", "virt-launcher-db1-x", "bob"), NOW - 130.0)
    watcher.store.now = NOW - 129.0
    made: Json = {"annotations": {"kubevirt.io/evacuationMigration": "n1"}}
    with structlog.testing.capture_logs() as lines:
        for resource, document in (
            (Resource.VMIS, a_vmi_json(evacuationNodeName="n1")),
            (Resource.VMIMS, a_vmim_json(phase="Scheduled", metadata=made)),
            (Resource.VMIS, a_vmi_json(nodeName="n2")),
            (Resource.VMIMS, a_succeeded_vmim_json(metadata=made)),
        ):
            watcher.see(resource, document)
    (line,) = (line for line in lines if line["event"] == "migration_ended")
    assert line["user.name"] == "bob"


@pytest.mark.parametrize(
    ("recording", "counted"),
    [
        ("success", {("n2", Outcome.SUCCEEDED): 1}),
        ("failure", {("n2", Outcome.FAILED): 1}),
        ("unschedulable", {}),
    ],
)
def test_a_migration_is_counted_by_its_target(
    recording: str, counted: dict[tuple[str, Outcome], int]
) -> None:
    """A migration is counted by the node that it went to; one without a target is not counted."""
    watcher, _ = play(recording)
    assert watcher.counters.migrations_to_node == counted
    failed = [node for node, outcome in counted if outcome is Outcome.FAILED]
    last = max(watcher.counters.migrated_at.values(), default=0.0)
    assert [node for *_, node in watcher.counters.list_failed_targets(last)] == failed


@pytest.mark.parametrize(
    ("resource", "document"),
    [
        (Resource.VMIS, a_vmi_json(migrationState=a_state_json(endTimestamp=None))),
        (
            Resource.PODS,
            a_pod_json(labels={"kubevirt.io/migrationJobUID": "m1"}, node="n2", conditions=[]),
        ),
    ],
    ids=["state", "target-pod"],
)
def test_a_migration_is_expected_by_its_target(resource: Resource, document: Json) -> None:
    """The counters of a node exist from the moment at which a migration goes there."""
    watcher = Watcher()
    watcher.see(resource, document)
    assert watcher.counters.migrated_at.keys() == {"n2"}
    assert not watcher.counters.migrations_to_node


async def test_a_failure_of_an_earlier_vm_of_that_name_is_not_the_present_vm_s() -> None:
    """A migration that an earlier VM of that name left behind is no failed target of this VM."""
    watcher = Watcher()
    failed = a_vmim_json(
        phase="Failed",
        migrationState=a_state_json(completed=True, failed=True),
        phaseTransitionTimestamps=transitions_json(Scheduled=NOW - 100, Failed=NOW),
    )
    watcher.see(Resource.VMIS, a_vmi_json(metadata={"creationTimestamp": rfc3339(NOW - 60)}))
    watcher.see(Resource.VMIMS, failed)
    assert watcher.counters.migrations_to_node == {("n2", Outcome.FAILED): 1}
    assert watcher.counters.list_failed_targets(NOW) == []


async def test_a_migration_is_logged_once() -> None:
    """A migration is logged once. If it ended before our start, it is not logged."""
    recording = read_recording("failure")
    watcher = Watcher()
    for resource, document in recording + recording[-1:]:
        watcher.see(resource, document)
    again = MigrationLog(watcher.store, watcher.counters, started_at=0.0, window=0.0)
    again.record(parse_object(recording[-1][0], json.dumps(recording[-1][1]).encode()))
    late = Watcher(started_at=4e9)
    for resource, document in recording:
        late.see(resource, document)
    assert watcher.count() == {("manual", "libvirt"): 1}
    assert late.count() == {}


@pytest.mark.parametrize("ahead", [-120.0, 0.0, 120.0])
@pytest.mark.parametrize(("finished_at", "count"), [(-30.0, 0), (30.0, 1)])
async def test_a_restart_counts_each_migration_once(
    ahead: float, finished_at: float, count: int
) -> None:
    """Whether it ended before our start is decided by the VMIM's time, not by a node's clock."""
    vmim = a_succeeded_vmim_json(NOW + finished_at)
    vmim["status"]["migrationState"]["endTimestamp"] = rfc3339(NOW + finished_at + ahead)
    watcher = Watcher(started_at=NOW)
    watcher.see(Resource.VMIMS, vmim)
    assert sum(watcher.counters.migrations.values()) == count


async def test_a_record_waits_for_the_copied_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The log line waits for the VMIM's copy of `migrationState`, but only for a limited time."""
    monkeypatch.setattr(migration_log, "WAIT_FOR_STATE", 0.01)
    watcher = Watcher()
    final = [
        (resource, document)
        for resource, document in read_recording("failure")
        if resource is Resource.VMIMS and "endTimestamp" not in str(document["status"])
    ]
    for resource, document in final:
        watcher.see(resource, document)
    assert watcher.count() == {}

    await wait_until(watcher.count, what="the count")
    assert watcher.count() == {("manual", "other"): 1}


async def test_a_hotplug_is_known_by_the_condition_of_the_vmi() -> None:
    """A workload update counts as a hotplug if the VMI had a hotplug condition."""
    watcher = Watcher()
    update: Json = {"annotations": {"kubevirt.io/workloadUpdateMigration": ""}}
    hotplug = [{"type": "HotVCPUChange", "status": "True"}]
    for resource, document in (
        (Resource.VMIS, a_vmi_json(conditions=hotplug)),
        (Resource.VMIMS, a_vmim_json(phase="Running", metadata=update)),
        (Resource.VMIS, a_vmi_json()),
        (Resource.VMIMS, a_succeeded_vmim_json(metadata=update)),
    ):
        watcher.see(resource, document)
    assert watcher.count() == {("hotplug", "none"): 1}
