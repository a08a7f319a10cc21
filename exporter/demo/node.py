"""What the scheduler, the kubelet, and virt-handler with its launcher write.

These pure functions are separate from `controller.py`, because tests also run them against
KubeVirt's real virt-controller. As in KubeVirt, the timestamps of `migrationState` are written
here, except those of a migration that never started.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Literal

from exporter.demo import objects
from exporter.demo.objects import Object


ABORTED = "Live migration aborted "
"""The failure reason of a cancelled migration, as virt-launcher 1.8.4 writes it."""


# Scheduler and kubelet


def bind_pod(pod: Object, node: str, now: datetime) -> Object:
    """The scheduler binds the pod to a node, whose kubelet has not started it yet."""
    waiting = {
        "reason": "ContainersNotReady",
        "message": "containers with unready status: [compute]",
    }

    def bind(obj: Object) -> None:
        obj["spec"]["nodeName"] = node
        objects.set_condition(obj, _condition("PodScheduled", "True", now))
        objects.set_condition(obj, _condition("Ready", "False", now) | waiting)

    return objects.changed(pod, bind)


def leave_unscheduled(pod: Object, nodes: int, now: datetime) -> Object:
    """The scheduler finds no node: the VMI runs on one node, and all others are cordoned."""
    others = nodes - 1
    message = (
        f"0/{nodes} nodes are available: 1 node(s) didn't match pod anti-affinity rules, {others} "
        f"node(s) were unschedulable. no new claims to deallocate, preemption: 0/{nodes} nodes are "
        "available: 1 No preemption victims found for incoming pod, "
        f"{others} Preemption is not helpful for scheduling."
    )
    refused = _condition("PodScheduled", "False", now)
    refused |= {"reason": "Unschedulable", "message": message}
    return objects.changed(pod, lambda obj: objects.set_condition(obj, refused))


def start_pod(pod: Object, address: str, now: datetime) -> Object:
    """The compute container runs; the pod is Ready only once its readiness gates are met."""

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
        for kind in ("Initialized", "ContainersReady"):
            objects.set_condition(obj, _condition(kind, "True", now))
        gate = f'corresponding condition of pod readiness gate "{objects.UNPAUSED}" does not exist.'
        unmet = {"reason": "ReadinessGatesNotReady", "message": gate}
        objects.set_condition(obj, _condition("Ready", "False", now) | unmet)

    return objects.changed(pod, start)


def meets_readiness_gates(pod: Object) -> bool:
    """Whether a running pod becomes Ready, because virt-controller says that its VM is unpaused."""
    return (
        objects.is_pod_ready(pod)
        and objects.is_true(pod, objects.UNPAUSED)
        and not objects.is_true(pod, "Ready")
    )


def ready_pod(pod: Object, now: datetime) -> Object:
    """The kubelet sees that the readiness gates are met."""
    ready = _condition("Ready", "True", now)
    return objects.changed(pod, lambda obj: objects.set_condition(obj, ready))


def finish_pod(pod: Object, phase: str, now: datetime) -> Object:
    """The launcher exits, and the pod gets the phase `Succeeded` or `Failed`."""
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


# virt-handler: a new VMI on its node

BRIDGE = (
    "cannot migrate VMI which does not use masquerade or a migratable plugin to connect to the "
    "pod network"
)
"""Why a VMI with a bridge interface cannot be migrated."""


def run_vmi(vmi: Object, now: datetime, *, migratable: bool = True) -> Object:
    """The VM's domain runs."""

    def run(obj: Object) -> None:
        obj["status"] |= {
            "phase": "Running",
            "migrationMethod": "LiveMigration",
            "migrationTransport": "Unix",
            "guestOSInfo": {},
            "machine": {"type": "pc-q35-10.0"},
            "qosClass": "Burstable",
            # Without this, virt-controller creates no target pod (`setTargetPodSELinuxLevel`).
            "selinuxContext": "none",
        }
        passed = obj["status"].setdefault("phaseTransitionTimestamps", [])
        passed.append({"phase": "Running", "phaseTransitionTimestamp": objects.format_time(now)})

    return set_migratable(objects.changed(vmi, run), migratable=migratable)


def set_migratable(vmi: Object, *, migratable: bool) -> Object:
    """`calculateLiveMigrationCondition`; its `lastTransitionTime` is always null."""
    reasons = {
        "LiveMigratable": {"reason": "InterfaceNotLiveMigratable", "message": BRIDGE},
        "StorageLiveMigratable": {
            "reason": "NotMigratable",
            "message": f"InterfaceNotLiveMigratable: {BRIDGE}",
        },
    }

    def judge(obj: Object) -> None:
        for kind, why in reasons.items():
            judged: Object = {
                "type": kind,
                "status": str(migratable),
                "lastProbeTime": None,
                "lastTransitionTime": None,
            }
            objects.set_condition(obj, judged if migratable else judged | why)

    return objects.changed(vmi, judge)


# virt-handler: a migration that was handed to it


def prepare_target(vmi: Object, address: str, ports: Mapping[str, int]) -> Object:
    """The target node listens (`migration-target.go: updateStatus`)."""
    published = {"targetNodeAddress": address, "targetDirectMigrationNodePorts": dict(ports)}
    return _with_state(vmi, published)


def start_migration(vmi: Object, now: datetime) -> Object:
    """The source's launcher starts to copy (reported by `setMigrationProgressStatus`)."""
    return _with_state(vmi, {"startTimestamp": objects.format_time(now), "mode": "PreCopy"})


def detect_domain(vmi: Object) -> Object:
    """The target node sees the domain."""
    return _with_state(vmi, {"targetNodeDomainDetected": True})


def pause_guest(vmi: Object) -> Object:
    """The guest is paused, so that the copy can end (`allowWorkloadDisruption`)."""
    return _with_state(vmi, {"mode": "Paused"})


def ready_domain(vmi: Object, now: datetime) -> Object:
    """The domain runs on the target."""
    return _with_state(vmi, {"targetNodeDomainReadyTimestamp": objects.format_time(now)})


def end_migration(vmi: Object, now: datetime) -> Object:
    """The target takes the VMI over (`ackMigrationCompletion`); `completed` comes later.

    This ends the evacuation: `evacuationNodeName` and the eviction source are removed.
    """
    target = objects.state_of(vmi).get("targetNode", "")

    def move(obj: Object) -> None:
        obj["status"]["nodeName"] = target
        obj["status"].pop("evacuationNodeName", None)
        # virt-controller writes the version of the new launcher.
        obj["status"].pop("launcherContainerImageVersion", None)
        obj["metadata"].setdefault("labels", {})[objects.NODE_NAME] = target
        obj["metadata"].get("annotations", {}).pop(objects.EVICTION_SOURCE, None)

    return objects.changed(_with_state(vmi, {"endTimestamp": objects.format_time(now)}), move)


def finalise_migration(vmi: Object) -> Object:
    """One reconcile after the end (>= 1.6): `finalizeMigration`."""
    return _with_state(vmi, {"completed": True})


def clean_up_target(vmi: Object) -> Object:
    """`finalCleanup`: remove the label by which the target's virt-handler selects the VMI."""

    def clean(obj: Object) -> None:
        obj["metadata"].get("labels", {}).pop(objects.MIGRATION_TARGET_NODE, None)

    return objects.changed(vmi, clean)


def begin_abort(vmi: Object) -> Object:
    """The source's launcher is asked to abort."""
    return _with_state(vmi, {"abortStatus": "Aborting"})


def fail_migration(
    vmi: Object, now: datetime, reason: str, abort_status: str | None = None
) -> Object:
    """The migration fails after its start (source virt-handler); the evacuation continues.

    `completed` is never written for such a failure.
    """
    broken: Object = {
        "endTimestamp": objects.format_time(now),
        "failed": True,
        "failureReason": reason,
    }
    if abort_status is not None:
        broken["abortStatus"] = abort_status
    return _with_state(vmi, broken)


def phase_of_failed_target(vmi: Object) -> Literal["Succeeded", "Failed"]:
    """How the target pod of a failed migration ends: `Failed` if the domain never arrived."""
    return "Succeeded" if objects.state_of(vmi).get("targetNodeDomainDetected") else "Failed"


def _with_state(vmi: Object, fields: Object) -> Object:
    return objects.changed(
        vmi, lambda obj: obj["status"].setdefault("migrationState", {}).update(fields)
    )
