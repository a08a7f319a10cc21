"""Reading reasons from objects, and handling malicious texts."""

import json
from typing import Any

import pytest

from exporter.engine.facts.model import Resource, Why, WhySource
from exporter.kube.objects.kubevirt import Changed, parse_event, parse_object
from exporter.kube.objects.reasons import WORD_LIMIT
from exporter.text import MESSAGE_LIMIT
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
from tests.support.hostile import HOSTILE, hostile_json


def read(resource: Resource, value: Json) -> tuple[Why, ...]:
    """The reasons of an object, which are the same from a list and from a watch."""
    listed = parse_object(resource, hostile_json(value))
    watched = parse_event(resource, hostile_json({"type": "MODIFIED", "object": value}))
    assert isinstance(watched, Changed)
    assert watched.reasons == listed.reasons
    return listed.reasons


def a_condition(kind: str, status: str = "False", **fields: Any) -> Json:
    """A condition of any object."""
    return {"type": kind, "status": status} | fields


def an_evacuating_vmi(*conditions: Json, **status: Any) -> Json:
    """A VMI that must leave its node."""
    return a_vmi_json(evacuationNodeName="n1", conditions=list(conditions), **status)


def a_target(*conditions: Json, **status: Any) -> Json:
    """The target pod of an attempt."""
    labels = {"kubevirt.io/migrationJobUID": "m1"}
    return a_pod_json(labels=labels, phase="Pending", conditions=list(conditions), **status)


STAYS = a_condition(
    "LiveMigratable",
    reason="DisksNotLiveMigratable",
    message="cannot migrate VMI: PVC db1 is not shared",
    lastTransitionTime=None,
)


def test_why_a_vmi_is_not_migratable() -> None:
    """The reason and message of LiveMigratable are read, without a time."""
    why = Why(
        WhySource.LIVE_MIGRATABLE,
        "DisksNotLiveMigratable",
        "cannot migrate VMI: PVC db1 is not shared",
    )
    assert read(Resource.VMIS, an_evacuating_vmi(STAYS)) == (why,)


def test_idle_vmis_share_their_reason() -> None:
    """Idle VMIs that are not migratable for the same reason share one object for it."""
    (why,) = read(Resource.VMIS, a_vmi_json(conditions=[STAYS]))
    (other,) = read(Resource.VMIS, a_vmi_json(conditions=[STAYS], nodeName="n2"))
    assert why == Why(WhySource.LIVE_MIGRATABLE, STAYS["reason"], STAYS["message"])
    assert why is other


def test_an_idle_vmi_has_no_texts() -> None:
    """Without an evacuation, past failures and node selectors give no reasons."""
    value = a_vmi_json(
        conditions=[a_condition("LiveMigratable", "True")],
        migrationState=a_state_json(failed=True, failureReason="qemu crashed"),
    )
    value["spec"]["nodeSelector"] = {"zone": "a"}
    assert read(Resource.VMIS, value) == ()


def test_why_the_last_migration_failed() -> None:
    """An evacuating VMI gives its last migration's failure and its node selector as reasons."""
    state = a_state_json(failed=True, failureReason="qemu crashed", abortStatus="Succeeded")
    value = an_evacuating_vmi(migrationState=state)
    value["spec"]["nodeSelector"] = {"zone": "a", "disk": "ssd"}
    assert read(Resource.VMIS, value) == (
        Why(WhySource.FAILED_ATTEMPT, "AbortSucceeded", "qemu crashed", NOW - 600.0),
        Why(WhySource.POD_SCHEDULED, "NodeSelector", "disk=ssd, zone=a"),
    )


def test_a_cancelled_migration_is_no_reason() -> None:
    """A failed migration whose abort was requested gives no reason."""
    state = a_state_json(
        failed=True, failureReason="Live migration has been aborted", abortStatus="Succeeded"
    )
    requested = a_condition("migrationAbortRequested", "True")
    vmim = a_vmim_json(phase="Failed", conditions=[requested], migrationState=state)
    assert read(Resource.VMIMS, vmim) == ()
    vmi = an_evacuating_vmi(migrationState=state)
    assert len(read(Resource.VMIS, vmi)) == 1
    state["abortRequested"] = True
    assert read(Resource.VMIS, vmi) == ()


def test_a_failed_attempt_says_where_the_time_went() -> None:
    """The reason of a failed VMIM lists its phases with their durations."""
    value = a_vmim_json(
        phase="Failed",
        phaseTransitionTimestamps=transitions_json(
            Pending=NOW - 303.0, Scheduling=NOW - 300.0, Failed=NOW
        ),
    )
    assert read(Resource.VMIMS, value) == (
        Why(WhySource.FAILED_ATTEMPT, "Scheduling", "after Pending 3s, Scheduling 5m", NOW),
    )
    value["status"]["migrationState"] = a_state_json(
        failed=True, failureReason="qemu crashed", endTimestamp=rfc3339(NOW - 1.0)
    )
    assert read(Resource.VMIMS, value) == (
        Why(
            WhySource.FAILED_ATTEMPT,
            "Scheduling",
            "qemu crashed (after Pending 3s, Scheduling 5m)",
            NOW - 1.0,
        ),
    )


@pytest.mark.parametrize(
    ("condition", "why"),
    [
        (
            a_condition(
                "migrationRejectedByResourceQuota",
                "True",
                lastProbeTime=rfc3339(NOW),
                lastTransitionTime=None,
            ),
            Why(WhySource.MIGRATION_CONDITION, "migrationRejectedByResourceQuota", "", NOW),
        ),
        (
            a_condition(
                "migrationBlockedByBackup",
                "True",
                reason="BackupInProgress",
                message="backup b1 is in progress",
                lastProbeTime=rfc3339(NOW),
            ),
            Why(WhySource.MIGRATION_CONDITION, "BackupInProgress", "backup b1 is in progress", NOW),
        ),
        (
            a_condition(
                "decentralizedMigrationBlocked",
                "True",
                reason="DecentralizedNotLiveMigratable",
                message="waiting for incoming synchronization, unable to proceed",
            ),
            Why(
                WhySource.MIGRATION_CONDITION,
                "DecentralizedNotLiveMigratable",
                "waiting for incoming synchronization, unable to proceed",
            ),
        ),
    ],
    ids=["quota", "backup", "between-clusters"],
)
def test_what_keeps_an_attempt_pending(condition: Json, why: Why) -> None:
    """A pending VMIM gives its condition and its added node selector as reasons."""
    value = a_vmim_json(conditions=[condition])
    value["spec"]["addedNodeSelector"] = {"zone": "b"}
    added = Why(WhySource.POD_SCHEDULED, "AddedNodeSelector", "zone=b")
    assert read(Resource.VMIMS, value) == (why, added)
    assert read(Resource.VMIMS, a_vmim_json(phase="Succeeded", conditions=[condition])) == ()


def test_the_scheduler_s_message() -> None:
    """A target pod that cannot be scheduled gives the scheduler's message."""
    condition = a_condition(
        "PodScheduled",
        reason="Unschedulable",
        message="0/3 nodes are available: 3 Insufficient memory.",
        lastTransitionTime=rfc3339(NOW - 60.0),
    )
    why = Why(WhySource.POD_SCHEDULED, "Unschedulable", condition["message"], NOW - 60.0)
    assert read(Resource.PODS, a_target(condition)) == (why,)
    assert read(Resource.PODS, a_pod_json(conditions=[condition])) == ()


def test_a_target_that_is_deleted() -> None:
    """A pod gives the reason of its deletion, and what that means if it is a migration's target."""
    pod = a_target(a_condition("Ready", "True"))
    assert read(Resource.PODS, pod) == ()

    pod["metadata"] |= {"name": "virt-launcher-db1-x", "deletionTimestamp": rfc3339(NOW)}
    message = "virt-launcher-db1-x is being deleted"
    why = Why(WhySource.TARGET_CONTAINER, "Terminating", message)
    assert read(Resource.PODS, pod) == (
        why,
        Why(WhySource.DELETION, "Terminating", f"the launcher pod {message}"),
    )


def test_the_deletion_of_a_launcher_pod() -> None:
    """A launcher pod that is being deleted says who wants that, and how long it may take."""
    pod = a_pod_json(
        metadata={"deletionTimestamp": rfc3339(NOW), "deletionGracePeriodSeconds": 3600},
        conditions=[
            a_condition(
                "DisruptionTarget",
                "True",
                reason="PreemptionByScheduler",
                message="preempting to accommodate a higher priority pod",
                lastTransitionTime=rfc3339(NOW - 60.0),
            )
        ],
    )
    message = (
        "the launcher pod virt-launcher-db1-x is being deleted, and ends within 1h: preempting to"
        " accommodate a higher priority pod"
    )
    why = Why(WhySource.DELETION, "PreemptionByScheduler", message, NOW - 60.0)
    assert read(Resource.PODS, pod) == (why,)
    pod["status"]["phase"] = "Succeeded"
    assert read(Resource.PODS, pod) == ()


@pytest.mark.parametrize(
    ("sandbox", "initialized", "init", "why"),
    [
        pytest.param(
            "False",
            "False",
            {"waiting": {"reason": "PodInitializing"}},
            ("PodReadyToStartContainers", "its network or a volume is not ready"),
            id="no-volume",
        ),
        pytest.param(
            "True",
            "False",
            {"running": {"startedAt": rfc3339(NOW)}},
            ("Initialized", "its init container setup is still running"),
            id="runs",
        ),
        pytest.param(
            None,
            "False",
            {"waiting": {"reason": "PodInitializing"}},
            ("Initialized", "containers with incomplete status: [setup]"),
            id="an-older-kubelet",
        ),
        pytest.param("True", "True", {"waiting": {"reason": "PodInitializing"}}, None, id="well"),
    ],
)
def test_a_target_that_does_not_start(
    sandbox: str | None, initialized: str, init: Json, why: tuple[str, str] | None
) -> None:
    """A scheduled target pod has a reason by its conditions, with their date."""
    stamp = {"lastTransitionTime": rfc3339(NOW - 60.0)}
    conditions = [
        a_condition("PodScheduled", "True"),
        a_condition(
            "Initialized",
            initialized,
            message="containers with incomplete status: [setup]",
            **stamp,
        ),
    ]
    if sandbox is not None:
        conditions.append(a_condition("PodReadyToStartContainers", sandbox, **stamp))
    pod = a_target(
        *conditions,
        initContainerStatuses=[{"name": "setup", "state": init}],
        containerStatuses=[
            {"name": "compute", "state": {"waiting": {"reason": "PodInitializing"}}}
        ],
    )
    expected = () if why is None else (Why(WhySource.TARGET_POD, *why, NOW - 60.0),)
    assert read(Resource.PODS, pod) == expected


def test_the_containers_of_a_target() -> None:
    """Waiting and failed containers give reasons, except those that wait for another container."""
    value = a_target(
        a_condition("PodScheduled", "True"),
        initContainerStatuses=[
            {
                "name": "disk",
                "state": {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}},
            }
        ],
        containerStatuses=[
            {"name": "compute", "state": {"waiting": {"reason": "PodInitializing"}}},
            {"name": "done", "state": {"terminated": {"exitCode": 0, "reason": "Completed"}}},
            {
                "name": "log",
                "state": {
                    "terminated": {"exitCode": 2, "reason": "Error", "finishedAt": rfc3339(NOW)}
                },
            },
        ],
    )
    assert read(Resource.PODS, value) == (
        Why(WhySource.TARGET_CONTAINER, "ImagePullBackOff", "no such image"),
        Why(WhySource.TARGET_CONTAINER, "Error", "exit code 2", NOW),
    )


def objects(text: str) -> dict[Resource, Json]:
    """One object of each kind, with this text in each field that becomes a reason."""
    words = {"reason": text, "message": text}
    vmi = an_evacuating_vmi(
        a_condition("LiveMigratable", **words),
        migrationState=a_state_json(failed=True, failureReason=text, abortStatus=text),
    )
    vmi["spec"]["nodeSelector"] = {text: text}
    vmi["metadata"] |= {"deletionTimestamp": rfc3339(NOW), "finalizers": [text]}
    vmim = a_vmim_json(
        phase="Failed",
        conditions=[a_condition("migrationBlockedByBackup", "True", **words)],
        migrationState=a_state_json(failed=True, failureReason=text, abortStatus=text),
        phaseTransitionTimestamps=transitions_json(**{text: NOW - 9.0, "Failed": NOW}),
    )
    pod = a_target(
        a_condition("PodScheduled", **words),
        initContainerStatuses=[{"name": text, "state": {"waiting": words}}],
        containerStatuses=[{"name": text, "state": {"terminated": words | {"exitCode": 1}}}],
    )
    vmi["status"]["conditions"].append(a_condition("HotVCPUChange", **words))
    return {Resource.VMIS: vmi, Resource.VMIMS: vmim, Resource.PODS: pod}


@pytest.mark.parametrize("text", [*HOSTILE.values(), "BROKEN-UTF-8"], ids=[*HOSTILE, "utf-8"])
def test_hostile_texts(text: str) -> None:
    """An object with a malicious text can be read; the text is cut and made printable."""
    reasons = [why for resource, value in objects(text).items() for why in read(resource, value)]
    without = {WhySource.POD_DISRUPTION_BUDGET, WhySource.NODE, WhySource.TARGET_POD}
    assert {why.source for why in reasons} == {*WhySource} - without
    for why in reasons:
        assert len(why.reason) <= WORD_LIMIT + len("Abort")
        assert len(why.message) <= MESSAGE_LIMIT
        assert f"{why.reason}{why.message}".isprintable()
        assert json.loads(json.dumps([why.reason, why.message]))
        assert why.message.encode()


def test_a_cut_shows() -> None:
    """A text that is cut ends with an ellipsis."""
    value = an_evacuating_vmi(a_condition("LiveMigratable", message="x" * 1025))
    (why,) = read(Resource.VMIS, value)
    assert why.message == "x" * 1023 + "…"


def test_escapes_are_readable() -> None:
    """Invisible characters are written as escapes."""
    text = "a\x1b[31m\u202eb\ud800c\n"
    value = an_evacuating_vmi(a_condition("LiveMigratable", message=text))
    (why,) = read(Resource.VMIS, value)
    assert why.message == r"a\x1b[31m\u202eb\ud800c"


@pytest.mark.parametrize("wrong", [None, 1, True, [], {}, [[]], "x" * 3], ids=repr)
def test_other_types_are_no_texts(wrong: object) -> None:
    """A reason or message that is not a string is read as empty."""
    words: Json = {"reason": wrong, "message": wrong}
    value = an_evacuating_vmi(
        a_condition("LiveMigratable", **words),
        migrationState=a_state_json(failed=True, failureReason=wrong, abortStatus=wrong),
    )
    value["spec"]["nodeSelector"] = wrong
    text = wrong if isinstance(wrong, str) else ""
    (why, *_) = read(Resource.VMIS, value)
    assert why == Why(WhySource.LIVE_MIGRATABLE, text or "LiveMigratable", text)

    pod = a_target(a_condition("PodScheduled", **words), containerStatuses=wrong)
    assert read(Resource.PODS, pod) == (Why(WhySource.POD_SCHEDULED, text or "PodScheduled", text),)
