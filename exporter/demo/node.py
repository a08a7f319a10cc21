"""What the scheduler, the kubelet, and virt-handler with its launcher write.

Pure, and apart from `controller.py`, because tests also run these functions against KubeVirt's
real virt-controller. All timestamps of `migrationState` are written here, as in KubeVirt.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime

from exporter.demo import objects
from exporter.demo.objects import Object


# Scheduler and kubelet


def bind_pod(pod: Object, node: str, now: datetime) -> Object:
    """The scheduler binds the pod to a node."""

    def bind(obj: Object) -> None:
        obj["spec"]["nodeName"] = node
        obj["metadata"].setdefault("labels", {})[objects.NODE_NAME] = node
        objects.set_condition(obj, _condition("PodScheduled", "True", now))

    return objects.changed(pod, bind)


def leave_unscheduled(pod: Object, nodes: int, now: datetime) -> Object:
    """The scheduler finds no node."""
    message = (
        f"0/{nodes} nodes are available: {nodes} node(s) didn't match Pod's node "
        f"affinity/selector. preemption: 0/{nodes} nodes are available: {nodes} Preemption is "
        "not helpful for scheduling."
    )
    refused = _condition("PodScheduled", "False", now)
    refused |= {"reason": "Unschedulable", "message": message}
    return objects.changed(pod, lambda obj: objects.set_condition(obj, refused))


def start_pod(pod: Object, address: str, now: datetime) -> Object:
    """The compute container runs and is ready."""

    def start(obj: Object) -> None:
        obj["status"] |= {
            "phase": "Running",
            "podIP": address,
            "startTime": objects.format_time(now),
            "containerStatuses": [
                {
                    "name": "compute",
                    "ready": True,
                    "started": True,
                    "restartCount": 0,
                    "image": "virt-launcher",
                    "imageID": "",
                    "state": {"running": {"startedAt": objects.format_time(now)}},
                }
            ],
        }
        for kind in ("Initialized", "Ready", "ContainersReady"):
            objects.set_condition(obj, _condition(kind, "True", now))

    return objects.changed(pod, start)


def finish_pod(pod: Object, phase: str, now: datetime) -> Object:
    """The launcher exits: `Succeeded` after a migration to another node, `Failed` after a crash."""
    code = 0 if phase == "Succeeded" else 1
    reason = "PodCompleted" if phase == "Succeeded" else "PodFailed"

    def finish(obj: Object) -> None:
        obj["status"]["phase"] = phase
        for container in obj["status"].get("containerStatuses", []):
            ended = {"exitCode": code, "finishedAt": objects.format_time(now)}
            container |= {"ready": False, "started": False, "state": {"terminated": ended}}
        for kind in ("Ready", "ContainersReady"):
            objects.set_condition(obj, _condition(kind, "False", now) | {"reason": reason})

    return objects.changed(pod, finish)


def _condition(kind: str, status: str, now: datetime) -> Object:
    stamped = objects.format_time(now)
    return {
        "type": kind,
        "status": status,
        "lastProbeTime": None,
        "lastTransitionTime": stamped,
    }


# virt-handler: a VMI of its own


def run_vmi(vmi: Object, now: datetime, *, migratable: bool = True) -> Object:
    """The VM's domain runs."""

    def run(obj: Object) -> None:
        obj["status"] |= {
            "phase": "Running",
            "migrationMethod": "LiveMigration",
            "migrationTransport": "Unix",
            "guestOSInfo": {},
            "qosClass": "Burstable",
            # Without it virt-controller creates no target pod (`setTargetPodSELinuxLevel`).
            "selinuxContext": "none",
        }
        passed = obj["status"].setdefault("phaseTransitionTimestamps", [])
        passed.append({"phase": "Running", "phaseTransitionTimestamp": objects.format_time(now)})
        objects.set_condition(obj, _condition("Ready", "True", now))

    return set_migratable(objects.changed(vmi, run), migratable=migratable)


def set_migratable(vmi: Object, *, migratable: bool) -> Object:
    """`calculateLiveMigrationCondition`; its `lastTransitionTime` is always null."""
    found: Object = {
        "type": "LiveMigratable",
        "status": "True" if migratable else "False",
        "lastProbeTime": None,
        "lastTransitionTime": None,
    }
    if not migratable:
        found |= {
            "reason": "DisksNotLiveMigratable",
            "message": (
                "cannot migrate VMI: PVC data is not shared, live migration requires that all "
                "PVCs must be shared (using ReadWriteMany access mode)"
            ),
        }
    shared = {
        "type": "StorageLiveMigratable",
        "status": "True",
        "lastProbeTime": None,
        "lastTransitionTime": None,
    }

    def judge(obj: Object) -> None:
        objects.set_condition(obj, found)
        objects.set_condition(obj, shared)

    return objects.changed(vmi, judge)


# virt-handler: a migration that was handed to it


def prepare_target(vmi: Object, address: str, ports: Mapping[str, int]) -> Object:
    """The target node listens (`migration-target.go: updateStatus`)."""
    published = {"targetNodeAddress": address, "targetDirectMigrationNodePorts": dict(ports)}
    return _with_state(vmi, published)


def start_migration(vmi: Object, now: datetime) -> Object:
    """The copy starts (source launcher, copied by `setMigrationProgressStatus`)."""
    return _with_state(vmi, {"startTimestamp": objects.format_time(now), "mode": "PreCopy"})


def detect_domain(vmi: Object) -> Object:
    """The target node sees the domain."""
    return _with_state(vmi, {"targetNodeDomainDetected": True})


def end_migration(vmi: Object, now: datetime) -> Object:
    """The VMI runs on its target (`ackMigrationCompletion`); `completed` comes later.

    This ends the evacuation: `evacuationNodeName` and the eviction source are removed.
    """
    state = objects.state_of(vmi)
    target = "" if state is None else str(state["targetNode"])
    ended = _with_state(
        vmi,
        {
            "targetNodeDomainDetected": True,
            "targetNodeDomainReadyTimestamp": objects.format_time(now),
            "endTimestamp": objects.format_time(now),
        },
    )

    def move(obj: Object) -> None:
        obj["status"]["nodeName"] = target
        obj["status"].pop("evacuationNodeName", None)
        obj["metadata"].setdefault("labels", {})[objects.NODE_NAME] = target
        obj["metadata"].get("annotations", {}).pop(objects.EVICTION_SOURCE, None)

    return objects.changed(ended, move)


def finalise_migration(vmi: Object) -> Object:
    """One reconcile after the end (>= 1.6): `finalizeMigration`."""
    return _with_state(vmi, {"completed": True})


def clean_up_target(vmi: Object) -> Object:
    """`finalCleanup`: remove the label by which the target's virt-handler selects the VMI."""

    def clean(obj: Object) -> None:
        obj["metadata"].get("labels", {}).pop(objects.MIGRATION_TARGET_NODE, None)

    return objects.changed(vmi, clean)


def fail_migration(
    vmi: Object, now: datetime, reason: str, abort_status: str | None = None
) -> Object:
    """The migration fails after its start (source virt-handler); the evacuation goes on."""
    broken: Object = {
        "endTimestamp": objects.format_time(now),
        "completed": True,
        "failed": True,
        "failureReason": reason,
    }
    if abort_status is not None:
        broken["abortStatus"] = abort_status
    return _with_state(vmi, broken)


def _with_state(vmi: Object, fields: Object) -> Object:
    return objects.changed(
        vmi, lambda obj: obj["status"].setdefault("migrationState", {}).update(fields)
    )
