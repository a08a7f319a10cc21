"""Variants of the field reports: other members of each kind get the step of their kind.

Each row changes the objects of a report (`tests/data/field`) before they are read, and has parts of
what `explain` or `node` must say, and must not say.
"""

from collections.abc import Callable
from typing import Any

import pytest

from exporter.cli.drain import show_drain
from exporter.cli.explain import show_vmi
from exporter.cli.layout import Screen
from tests.program.test_field import RIGHT, name_vm
from tests.support.builders import NOW
from tests.support.field import read_steps, serve


Edit = Callable[[str, dict[str, Any]], None]
"""Changes one object of this resource."""


def play(report: str, edit: Edit) -> str:
    """What `explain` and `node` say about the VM and the node of a report after the change."""
    objects = []
    asked: dict[str, Any] = {}
    for step in read_steps(report, NOW):
        if "ask" in step:
            asked = step
            continue
        edit(step["apply"], step["object"])
        if not step["object"].get("gone"):
            objects.append((step["apply"], step["object"]))
    service = serve(objects, NOW)
    namespace, name = name_vm(asked["ask"]).split("/")
    vmi = service.describe_vmi(namespace, name, NOW)
    assert vmi is not None
    text = show_vmi(vmi, Screen())
    if "node" not in asked:
        return text
    return text + show_drain(service.describe_node(asked["node"], NOW), Screen())


def of(resource: str, name: str, **fields: Any) -> Edit:
    """Replaces fields, given as `spec__taints=…`, of the objects whose name contains `name`."""

    def edit(kind: str, value: dict[str, Any]) -> None:
        if kind != resource or name not in value["metadata"]["name"]:
            return
        for path, new in fields.items():
            *parents, last = path.split("__")
            place = value
            for parent in parents:
                place = place.setdefault(parent, {})
            place[last] = new

    return edit


def message(text: str) -> Edit:
    """Replaces the scheduler's message of the target pod."""

    def edit(kind: str, value: dict[str, Any]) -> None:
        if kind == "pods" and value["metadata"]["name"].endswith("-tgt"):
            value["status"]["conditions"][0]["message"] = text

    return edit


def both(*edits: Edit) -> Edit:
    """All of these changes."""

    def edit(kind: str, value: dict[str, Any]) -> None:
        for edit in edits:
            edit(kind, value)

    return edit


def ended_in(phase: str) -> Edit:
    """The attempts of `source-handler-down` end in another phase."""

    def edit(kind: str, value: dict[str, Any]) -> None:
        state = value.get("status", {})
        if kind == "virtualmachineinstancemigrations" and state["phase"] == "Failed":
            entered = state["phaseTransitionTimestamps"]
            last = [transition["phase"] for transition in entered].index(phase)
            state["phaseTransitionTimestamps"] = [*entered[: last + 1], entered[-1]]

    return edit


HOTPLUG = [
    {"type": "LiveMigratable", "status": "True"},
    {"type": "HotMemoryChange", "status": "True", "message": "memory is being plugged"},
]
CRASH = [{"name": "setup", "state": {"terminated": {"exitCode": 3, "reason": "Error"}}}]
INITIALIZING = [
    {"type": "PodScheduled", "status": "True"},
    {"type": "PodReadyToStartContainers", "status": "True"},
    {"type": "Initialized", "status": "False", "lastTransitionTime": "2027-01-15T07:40:00Z"},
]
TARGETS_GONE = [of("pods", f"-t{number}", gone=True) for number in range(4)]
SCHEDULED = {
    "phase": "Scheduled",
    "phaseTransitionTimestamps": [
        {"phase": "Pending", "phaseTransitionTimestamp": "2027-01-15T07:10:00Z"},
        {"phase": "Scheduling", "phaseTransitionTimestamp": "2027-01-15T07:10:01Z"},
        {"phase": "Scheduled", "phaseTransitionTimestamp": "2027-01-15T07:10:11Z"},
    ],
}
OF_THE_LAST = {
    "kubevirt.io": "virt-launcher",
    "kubevirt.io/created-by": "u-rke2-pool1",
    "kubevirt.io/migrationJobUID": "m-kubevirt-evacuation-9",
}
READY = {
    "phase": "Running",
    "conditions": [
        {"type": "Ready", "status": "True"},
        {"type": "PodScheduled", "status": "True"},
    ],
}
KUEUE = [{"name": "kueue.x-k8s.io/admission"}]
NO_EXECUTE = [{"key": "dedicated", "value": "gpu", "effect": "NoExecute"}]
ZONE = {"topology.kubernetes.io/zone": "a"}
VARIANTS: dict[str, tuple[str, Edit, tuple[str, ...], tuple[str, ...]]] = {
    "an-init-container-fails": (
        "target-waits-for-volume",
        of("pods", "-tgt", status__conditions=INITIALIZING, status__initContainerStatuses=CRASH),
        ("Error: exit code 3", "Repair what keeps the target pod from starting"),
        ("Read the events",),
    ),
    "no-condition-of-the-sandbox": (
        "target-waits-for-volume",
        of("pods", "-tgt", status__conditions=INITIALIZING),
        ("TargetPod", "Initialized", "describe pods"),
        ("Read the events",),
    ),
    "a-hotplug-hangs": (
        "ended-but-running",
        of("virtualmachineinstances", "win", status__conditions=HOTPLUG),
        ("Restart the VM", "HotMemoryChange: memory is being plugged", "virtctl"),
        ("Abort", "Wait"),
    ),
    "not-completed": (
        "ended-but-running",
        of("virtualmachineinstances", "win", status__migrationState__completed=False),
        ("Read the log of virt-handler on n2",),
        ("Abort", "Wait"),
    ),
    "no-other-node-is-ready": (
        "stale-source-pod",
        of("nodes", "n1", status__conditions=[{"type": "Ready", "status": "False"}]),
        ("delete pod virt-launcher-testvmi-src",),
        (),
    ),
    "a-second-node-is-closed-by-a-taint": (
        "not-migratable-strategies",
        of("nodes", "n2", spec__taints=NO_EXECUTE),
        ("default/ok fails", "n2 has the taint dedicated:NoExecute"),
        ("default/ok leaves",),
    ),
    "a-second-node-is-tolerated": (
        "not-migratable-strategies",
        both(
            of("nodes", "n2", spec__taints=NO_EXECUTE),
            of("virtualmachineinstances", "ok", spec__tolerations=[{"operator": "Exists"}]),
        ),
        ("1  is migrated",),
        ("default/ok fails",),
    ),
    "a-vm-that-selects-a-zone": (
        "not-migratable-strategies",
        of("virtualmachineinstances", "ok", spec__nodeSelector=ZONE),
        ("n2 does not have the labels that the VM requires",),
        (),
    ),
    "a-zone-that-another-node-has": (
        "not-migratable-strategies",
        both(
            of("nodes", "n2", metadata__labels=ZONE),
            of("virtualmachineinstances", "ok", spec__nodeSelector=ZONE),
        ),
        ("1  is migrated",),
        ("default/ok fails",),
    ),
    "if-possible-goes-down": (
        "not-migratable-strategies",
        of("virtualmachineinstances", "win11", spec__evictionStrategy="LiveMigrateIfPossible"),
        ("in a drain it goes down: LiveMigrateIfPossible, and it is not migratable",),
        ("a budget forbids it, or",),
    ),
    "strategy-none": (
        "not-migratable-strategies",
        of("virtualmachineinstances", "win11", spec__evictionStrategy="None"),
        ("in a drain it goes down: its strategy is None",),
        (),
    ),
    "another-namespace-of-kubevirt": (
        "pod-refused-at-creation",
        of("kubevirts", "kubevirt", metadata__namespace="kubevirt-hyperconverged"),
        ("kubectl -n kubevirt-hyperconverged logs",),
        ("-n kubevirt logs", "-n openshift-cnv"),
    ),
    "an-unknown-namespace-of-kubevirt": (
        "pod-refused-at-creation",
        of("kubevirts", "kubevirt", metadata__namespace=""),
        ("kubectl get kubevirts -A",),
        ("-n kubevirt logs", "Wait:"),
    ),
    "disks-by-a-volume-update-alone": (
        "disk-copy-times-out",
        of("virtualmachineinstances", "db", status__migrationMethod="LiveMigration"),
        ("Raise completionTimeoutPerGiB",),
        ("auto-converge", "post-copy"),
    ),
    "memory-alone-does-not-converge": (
        "disk-copy-times-out",
        both(
            of(
                "virtualmachineinstances",
                "db",
                status__migrationMethod="LiveMigration",
                status__migratedVolumes=[],
            ),
            of("virtualmachineinstancemigrations", "", metadata__labels={}),
        ),
        ("Allow auto-converge or post-copy",),
        ("Raise completionTimeoutPerGiB",),
    ),
    "memory-within-kubevirts-limit": (
        "long-copy-under-way",
        of("virtualmachineinstances", "big", status__migrationMethod="LiveMigration"),
        ("Look whether the copy", "makes progress"),
        ("Abort the migration", "longer than it may"),
    ),
    "memory-beyond-kubevirts-limit": (
        "long-copy-under-way",
        both(
            of("virtualmachineinstances", "big", status__migrationMethod="LiveMigration"),
            of("virtualmachineinstances", "big", spec__domain__memory__guest="4Gi"),
        ),
        ("Abort the migration by deleting its VMIM: it has run for longer than KubeVirt's own",),
        (),
    ),
    "kueue": (
        "scheduling-gate",
        of("pods", "-tgt", spec__schedulingGates=KUEUE),
        ("Make room in Kueue's queue", "describe workloads.kueue.x-k8s.io"),
        ("no node can take", "ApplicationAware"),
    ),
    "an-unknown-gate": (
        "scheduling-gate",
        of("pods", "-tgt", spec__schedulingGates=[{"name": "example.com/hold"}]),
        ("the scheduling gate example.com/hold",),
        ("no node can take",),
    ),
    "no-room": (
        "handlers-down-elsewhere",
        both(
            of("nodes", "n2", metadata__labels={"kubevirt.io/schedulable": "true"}),
            of("nodes", "n3", metadata__labels={"kubevirt.io/schedulable": "true"}),
            message(
                "0/3 nodes are available: 1 node(s) were unschedulable, 2 Insufficient memory."
            ),
        ),
        ("Make room on another node", "kubectl describe nodes\n"),
        ("kubevirt.io/schedulable=true", "virt-handler"),
    ),
    "one-handler-down-and-no-node-that-matches": (
        "handlers-down-elsewhere",
        of("nodes", "n2", metadata__labels={"kubevirt.io/schedulable": "true"}),
        ("Repair virt-handler on n3",),
        ("Make room on",),
    ),
    "one-handler-down-and-no-room": (
        "handlers-down-elsewhere",
        both(
            of("nodes", "n2", metadata__labels={"kubevirt.io/schedulable": "true"}),
            message("0/3 nodes are available: 1 Insufficient memory."),
        ),
        ("Make room on another node",),
        ("Repair virt-handler",),
    ),
    "all-handlers-down-and-no-room": (
        "handlers-down-elsewhere",
        message("0/3 nodes are available: 1 Insufficient memory."),
        ("Repair virt-handler on n2 and n3",),
        ("Make room on",),
    ),
    "the-pod-selects-more-than-the-vm": (
        "handlers-down-elsewhere",
        both(
            of("nodes", "n2", metadata__labels={"kubevirt.io/schedulable": "true"}),
            of("nodes", "n3", metadata__labels={"kubevirt.io/schedulable": "true"}),
        ),
        ("restart a VM with a host model", ".spec.nodeSelector"),
        ("Make room on",),
    ),
    "ended-in-preparing-target": (
        "source-handler-down",
        ended_in("PreparingTarget"),
        ("Check the target's virt-handler, on n3",),
        ("launcher's log", "fence"),
    ),
    "ended-in-scheduled": (
        "source-handler-down",
        ended_in("Scheduled"),
        ("FailedHandOver",),
        ("launcher's log", "fence"),
    ),
    "the-refused-targets-are-gone": (
        "hand-off-refused",
        both(*TARGETS_GONE),
        ("FailedHandOver",),
        ("launcher's log", "fence"),
    ),
    "a-hand-off-that-hangs": (
        "hand-off-refused",
        both(
            of("virtualmachineinstancemigrations", "-9", status=SCHEDULED),
            of("pods", "-t3", metadata__labels=OF_THE_LAST, status=READY),
        ),
        ("migration_stalled", "FailedHandOver"),
        ("launcher's log", "fence"),
    ),
    "refused-by-the-scheduler-before": (
        "hand-off-refused",
        both(ended_in("Scheduling"), *TARGETS_GONE),
        ("Make room on another node",),
        ("FailedHandOver", "launcher's log", "fence"),
    ),
    "a-vm-that-goes-down-needs-no-node": (
        "one-node",
        of("virtualmachineinstances", "idle", spec__evictionStrategy="None"),
        ("in a drain it goes down: its strategy is None", "none can take it: no other node exists"),
        ("default/idle fails",),
    ),
    "a-vm-that-cannot-migrate-needs-no-node": (
        "one-node",
        of(
            "virtualmachineinstances",
            "idle",
            status__conditions=[
                {
                    "type": "LiveMigratable",
                    "status": "False",
                    "reason": "HostDeviceNotLiveMigratable",
                }
            ],
        ),
        ("in a drain it never leaves: it is not migratable", "HostDeviceNotLiveMigratable"),
        ("default/idle fails",),
    ),
    "the-launcher-is-deleted-by-hand": (
        "launcher-preempted",
        of("pods", "app", status__conditions=[{"type": "PodScheduled", "status": "True"}]),
        ("in a drain it ends", "is being deleted"),
        ("is migrated",),
    ),
    "a-stale-pod-that-has-ended": (
        "stale-source-pod",
        of("pods", "-src", status__phase="Succeeded"),
        ("no other node can take it", "n1 is cordoned"),
        ("delete pod",),
    ),
    "a-paused-vm-with-utility-volumes": (
        "launcher-preempted",
        both(
            of("pods", "app", gone=True),
            of(
                "virtualmachineinstances",
                "app",
                status__conditions=[
                    {"type": "Paused", "status": "True"},
                    {"type": "LiveMigratable", "status": "True"},
                ],
                spec__utilityVolumes=[{"name": "backup-1"}],
            ),
        ),
        ("paused", "backup-1: KubeVirt does not migrate the VM"),
        (),
    ),
}


@pytest.mark.parametrize(("report", "edit", "texts", "unsaid"), VARIANTS.values(), ids=VARIANTS)
def test_a_variant_is_answered(
    report: str, edit: Edit, texts: tuple[str, ...], unsaid: tuple[str, ...]
) -> None:
    """Another member of a kind gets the cause and the step of that kind."""
    text = play(report, edit)
    for part in texts:
        assert part in text
    for part in unsaid:
        assert part not in text


@pytest.mark.parametrize("report", [name for name, rights in RIGHT.items() if len(rights) == 1])
def test_the_report_itself_is_answered(report: str) -> None:
    """Without a change, the cause and the step are those that the whole program gives."""
    (right,) = RIGHT[report]
    text = play(report, lambda _kind, _value: None)
    for part in right.explain:
        assert part in text
