"""Parsing the API server's objects of KubeVirt and Kubernetes into facts."""

import json
import random
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from exporter.engine.facts.model import (
    Budget,
    EndReason,
    Fact,
    KubeVirtSettings,
    MigrationLimits,
    MigrationState,
    Node,
    Outcome,
    Pod,
    Resource,
    Taint,
    Trigger,
    Vmi,
    Vmim,
)
from exporter.engine.facts.placement import UNSCHEDULABLE, Requirement
from exporter.engine.facts.states import VMIM_CONDITIONS, State
from exporter.kube.client import split_lines
from exporter.kube.objects.facts import EVICTION_IN_PROGRESS
from exporter.kube.objects.instants import parse_instant
from exporter.kube.objects.kubevirt import (
    INITIAL_EVENTS_END,
    Bookmark,
    Changed,
    Deleted,
    Failed,
    InvalidObject,
    parse_event,
    parse_object,
    parse_page,
    parse_status_message,
)
from tests.support.builders import (
    NAME,
    NAMESPACE,
    NOW,
    UID,
    Json,
    a_cordon,
    a_metadata_json,
    a_pod_json,
    a_state_json,
    a_vmi_json,
    a_vmim_json,
    rfc3339,
    transitions_json,
)
from tests.support.sizes import soaked


DEEP = b"[" * 100_000
LIMITS = {"parallelMigrationsPerCluster": 0, "parallelOutboundMigrationsPerNode": 1}
KINDS = (b"ADDED", b"MODIFIED", b"DELETED", b"BOOKMARK", b"ERROR", b"OTHER")


def raw(value: Any) -> bytes:
    """A JSON value as the API server sends it."""
    return json.dumps(value).encode()


def read(resource: Resource, value: Json) -> Fact:
    """The fact that is parsed from a listed object."""
    return parse_object(resource, raw(value)).fact


def read_vmi(value: Json) -> Vmi:
    """The fact that is parsed from a listed VMI."""
    return cast("Vmi", read(Resource.VMIS, value))


def read_vmim(value: Json) -> Vmim:
    """The fact that is parsed from a listed VMIM."""
    return cast("Vmim", read(Resource.VMIMS, value))


def read_pod(value: Json) -> Pod:
    """The fact that is parsed from a listed pod."""
    return cast("Pod", read(Resource.PODS, value))


def a_kubevirt_json(**spec: Any) -> Json:
    """A KubeVirt object; the keywords are fields of its spec."""
    return {"metadata": a_metadata_json(namespace="kubevirt", name="kubevirt"), "spec": spec}


# --- instants


@pytest.mark.parametrize(
    ("written", "instant"),
    [
        pytest.param("2027-01-15T08:00:00Z", NOW, id="utc"),
        pytest.param("2027-01-15t08:00:00z", NOW, id="lower-case"),
        pytest.param("2027-01-15T09:30:00+01:30", NOW, id="east"),
        pytest.param("2027-01-15T04:30:00-03:30", NOW, id="west"),
        pytest.param("2027-01-15T08:00:00+00:00", NOW, id="no-offset"),
        pytest.param("2027-01-15T08:00:00.250Z", NOW + 0.25, id="fraction"),
        pytest.param("2027-01-15T08:00:00.123456789Z", NOW + 0.123456789, id="nanoseconds"),
        pytest.param("0001-01-01T00:00:00Z", -62_135_596_800.0, id="year-1"),
        pytest.param("9999-12-31T23:59:59Z", 253_402_300_799.0, id="year-9999"),
        pytest.param("2024-02-29T00:00:00Z", 1_709_164_800.0, id="leap-day"),
    ],
)
def test_instants(written: str, instant: float) -> None:
    """Every form of an RFC 3339 timestamp is read."""
    assert parse_instant(written) == pytest.approx(instant, abs=1e-6)


@pytest.mark.parametrize(
    "written",
    [
        None,
        "",
        0,
        1_700_000_000,
        1.5,
        True,
        [],
        {},
        "not-a-valid-timestamp",
        "2027-01-15",
        "2027-01-15T08:00:00",
        "2027-01-15 08:00:00Z",
        "2027-01-15T08:00Z",
        "2027-13-15T08:00:00Z",
        "2027-02-29T08:00:00Z",
        "2027-01-15T24:00:00Z",
        "2027-01-15T08:00:60Z",
        "2027-01-15T08:00:00+24:00",
        "2027-01-15T08:00:00+01:60",
        "2027-01-15T08:00:00+0100",
        "2027-01-15T08:00:00,5Z",
        "2027-01-15T08:00:00.Z",
        "0000-01-01T00:00:00Z",
        "0001-01-01T00:00:00+00:01",
        "9999-12-31T23:59:59-00:01",
        "٢٠٢٧-01-15T08:00:00Z",
        " 2027-01-15T08:00:00Z",
        "2027-01-15T08:00:00Z\n",
        "2026-08-22 10:00:00 +0000 UTC",
    ],
    ids=repr,
)
def test_what_is_no_instant(written: object) -> None:
    """Any other value is read as `None`, without an error."""
    assert parse_instant(written) is None


# --- VMIs


def test_a_vmi() -> None:
    """A VMI is read with its identity, its nodes and its migration state."""
    changed = parse_object(
        Resource.VMIS, raw(a_vmi_json(evacuationNodeName="n1", migrationState=a_state_json()))
    )
    assert changed == Changed(
        fact=Vmi(
            namespace=NAMESPACE,
            name=NAME,
            uid=UID,
            created=NOW - 86_400.0,
            node="n1",
            evacuation_node="n1",
            migration=MigrationState(
                uid="m1",
                start=NOW - 660.0,
                ended=True,
                end=NOW - 600.0,
                outcome=Outcome.SUCCEEDED,
                source_node="n1",
                target_node="n2",
            ),
            eviction_strategy="LiveMigrate",
            migratable_unknown=True,
            phase="Running",
        ),
        namespace=NAMESPACE,
        name=NAME,
        resource_version="7",
        traits=changed.traits,
    )


BARE_VMI = {
    "no-status": {"metadata": {"name": NAME, "uid": UID}},
    "null-status": {"metadata": {"name": NAME, "uid": UID}, "status": None},
    "empty-status": {"metadata": {"name": NAME, "uid": UID}, "status": {}},
    "null-fields": {
        "metadata": {
            "name": NAME,
            "uid": UID,
            "namespace": None,
            "creationTimestamp": None,
            "resourceVersion": None,
        },
        "status": {"nodeName": None, "evacuationNodeName": "", "migrationState": None},
    },
}


@pytest.mark.parametrize("vmi", BARE_VMI.values(), ids=BARE_VMI)
def test_a_bare_vmi(vmi: Json) -> None:
    """An empty string, null and an absent field mean the same."""
    assert read_vmi(vmi) == Vmi(namespace="", name=NAME, uid=UID, migratable_unknown=True)


@pytest.mark.parametrize(
    ("phase", "finished"),
    [
        *((phase, False) for phase in ("", "Pending", "Scheduling", "Scheduled", "Running")),
        *((phase, False) for phase in ("WaitingForSync", "Unknown")),
        *((phase, True) for phase in ("Succeeded", "Failed")),
    ],
)
def test_finished(phase: str, *, finished: bool) -> None:
    """A VMI or a pod is finished only in phase Succeeded or Failed."""
    for fact in (read_vmi(a_vmi_json(phase=phase)), read_pod(a_pod_json(phase=phase))):
        assert (fact.phase, fact.finished) == (phase, finished)


MIGRATION_STATES = {
    "emptied": ({}, MigrationState()),
    "handed-off": ({"migrationUid": "m2"}, MigrationState(uid="m2")),
    "not-there": (
        {"migrationUid": "m2", "startTimestamp": "", "endTimestamp": None},
        MigrationState(uid="m2"),
    ),
    "started-without-uid": ({"startTimestamp": rfc3339(NOW)}, MigrationState(start=NOW)),
    "malformed-start": ({"startTimestamp": "bad"}, MigrationState()),
    "start-of-another-type": ({"startTimestamp": 5}, MigrationState()),
    "malformed-end": ({"endTimestamp": "bad"}, MigrationState(ended=True)),
    "end-of-another-type": ({"endTimestamp": 5}, MigrationState(ended=True)),
    "end-is-false": ({"endTimestamp": False}, MigrationState(ended=True)),
    "completed-and-failed": (
        {"endTimestamp": rfc3339(NOW), "completed": True, "failed": True},
        MigrationState(ended=True, end=NOW, outcome=Outcome.FAILED),
    ),
    "ended-not-completed": ({"endTimestamp": rfc3339(NOW)}, MigrationState(ended=True, end=NOW)),
}


@pytest.mark.parametrize(("state", "read"), MIGRATION_STATES.values(), ids=MIGRATION_STATES)
def test_migration_states(state: Json, read: MigrationState) -> None:
    """An invalid start is ignored, but an invalid end still means that the migration has ended."""
    assert read_vmi(a_vmi_json(migrationState=state)).migration == read


@pytest.mark.parametrize(
    ("halves", "uids"),
    [
        pytest.param({}, (), id="local"),
        pytest.param(
            {"sourceState": {"migrationUID": "m8"}, "targetState": {"migrationUID": "m9"}},
            ("m8", "m9"),
            id="decentralised",
        ),
        pytest.param(
            {"sourceState": {"migrationUID": "m1"}, "targetState": {"migrationUID": "m9"}},
            ("m9",),
            id="one-half-is-its-own",
        ),
        pytest.param({"sourceState": {}, "targetState": None}, (), id="empty-halves"),
    ],
)
def test_other_uids(halves: Json, uids: tuple[str, ...]) -> None:
    """The UIDs of both halves of a decentralised migration are read."""
    assert read_vmi(a_vmi_json(migrationState=a_state_json(**halves))).other_uids == uids


# --- VMIMs


def test_a_vmim() -> None:
    """A VMIM is read with its VMI's name, its phase, and its copy of `migrationState`."""
    vmim = a_vmim_json(
        phase="Succeeded",
        migrationState=a_state_json(),
        phaseTransitionTimestamps=transitions_json(Scheduled=NOW - 700.0, Succeeded=NOW - 598.0),
    )
    assert read_vmim(vmim) == Vmim(
        namespace=NAMESPACE,
        name="mig-1",
        uid="m1",
        vmi_name=NAME,
        created=NOW - 120.0,
        phase="Succeeded",
        finished=True,
        finished_at=NOW - 598.0,
        scheduled_at=NOW - 700.0,
        handed_off=True,
        start=NOW - 660.0,
        end=NOW - 600.0,
        outcome=Outcome.SUCCEEDED,
        source_node="n1",
        target_node="n2",
    )


@pytest.mark.parametrize(
    ("state", "aborted", "failure"),
    [
        ({}, False, EndReason.OTHER),
        (
            {"failureReason": "Live migration stuck for 9 s"},
            False,
            EndReason.TIMEOUT_PROGRESS,
        ),
        ({"failureReason": 7}, False, EndReason.OTHER),
        ({"failureReason": "virError(Code=9)"}, True, EndReason.ABORTED),
        ({"mode": "PostCopy"}, True, EndReason.POST_COPY_LOST),
    ],
)
def test_why_a_migration_failed(state: Json, aborted: bool, failure: EndReason) -> None:
    """A VMIM and the VMI say the same of a failure, in a word."""
    failed = a_state_json(failed=True) | state
    met = [{"type": "migrationAbortRequested", "status": "True"}] if aborted else []
    vmim = read_vmim(a_vmim_json(phase="Failed", migrationState=failed, conditions=met))
    vmi = read_vmi(a_vmi_json(migrationState=failed | {"abortRequested": aborted}))
    assert vmi.migration is not None
    assert (vmim.failure, vmi.migration.failure) == (failure, failure)


@pytest.mark.parametrize(
    ("user", "read"), [("alice", "alice"), (7, ""), ("a\nb", "a\\nb"), ("x" * 300, "x" * 252 + "…")]
)
def test_who_made_a_vmim(user: object, read: str) -> None:
    """The user who made a VMIM is read from KubeVirt's annotation."""
    vmim = read_vmim(a_vmim_json(metadata={"annotations": {"kubevirt.io/last-modified-by": user}}))
    assert vmim.modified_by == read


@pytest.mark.parametrize("status", [None, {}, {"phase": None}], ids=["null", "empty", "no-phase"])
def test_a_new_vmim(status: Json | None) -> None:
    """A VMIM without a phase is neither handed off nor finished."""
    vmim = read_vmim(
        {"metadata": {"name": "m", "uid": "u"}, "spec": {"vmiName": NAME}} | {"status": status}
    )
    assert vmim == Vmim(namespace="", name="m", uid="u", vmi_name=NAME)


@pytest.mark.parametrize(
    ("phase", "handed_off", "finished", "outcome"),
    [
        ("", False, False, Outcome.UNKNOWN),
        ("Pending", False, False, Outcome.UNKNOWN),
        ("WaitingForSync", False, False, Outcome.UNKNOWN),
        ("Synchronizing", False, False, Outcome.UNKNOWN),
        ("Scheduling", False, False, Outcome.UNKNOWN),
        ("Scheduled", True, False, Outcome.UNKNOWN),
        ("PreparingTarget", True, False, Outcome.UNKNOWN),
        ("TargetReady", True, False, Outcome.UNKNOWN),
        ("Running", True, False, Outcome.UNKNOWN),
        ("Succeeded", True, True, Outcome.SUCCEEDED),
        ("Failed", False, True, Outcome.FAILED),
        ("SomePhaseToCome", False, False, Outcome.UNKNOWN),
    ],
    ids=lambda value: value or "none" if isinstance(value, str) else None,
)
def test_phases(phase: str, *, handed_off: bool, finished: bool, outcome: Outcome) -> None:
    """The phase decides whether a VMIM was handed off, whether it is finished, and its outcome."""
    vmim = read_vmim(a_vmim_json(phase=phase))
    assert (vmim.handed_off, vmim.finished, vmim.outcome) == (handed_off, finished, outcome)


@pytest.mark.parametrize(
    ("status", "handed_off"),
    [
        pytest.param({}, False, id="failed-before"),
        pytest.param(
            {"phaseTransitionTimestamps": transitions_json(Pending=NOW, Scheduling=NOW)},
            False,
            id="got-no-further-than-scheduling",
        ),
        pytest.param(
            {"phaseTransitionTimestamps": transitions_json(Pending=NOW, Scheduled=NOW)},
            True,
            id="was-scheduled",
        ),
        pytest.param({"migrationState": {"sourcePod": "p"}}, False, id="source-pod-alone"),
        pytest.param({"migrationState": {"migrationUid": "m1"}}, True, id="its-own-uid"),
        pytest.param({"migrationState": {"migrationUid": "m2"}}, False, id="another-uid"),
        pytest.param({"migrationState": {"endTimestamp": rfc3339(NOW)}}, True, id="an-end"),
        pytest.param({"migrationState": {"endTimestamp": "bad"}}, False, id="a-malformed-end"),
    ],
)
def test_failed_vmims(status: Json, *, handed_off: bool) -> None:
    """A failed VMIM was handed off if its transitions or its `migrationState` show it."""
    assert read_vmim(a_vmim_json(phase="Failed", **status)).handed_off is handed_off


FINISHED_AT = {
    "failed": ("Failed", transitions_json(Running=NOW - 9, Failed=NOW), NOW),
    "succeeded": ("Succeeded", transitions_json(Succeeded=NOW), NOW),
    "running": ("Running", transitions_json(Running=NOW), None),
    "no-entry": ("Failed", transitions_json(Running=NOW), None),
    "no-entries": ("Failed", None, None),
    "no-instant": ("Failed", [{"phase": "Failed"}], None),
    "malformed-instant": ("Failed", [{"phase": "Failed", "phaseTransitionTimestamp": "bad"}], None),
}


@pytest.mark.parametrize(
    ("phase", "transitions", "finished_at"), FINISHED_AT.values(), ids=FINISHED_AT
)
def test_finished_at(phase: str, transitions: list[Json] | None, finished_at: float | None) -> None:
    """`finished_at` is the time of a VMIM's transition to its final phase."""
    vmim = read_vmim(a_vmim_json(phase=phase, phaseTransitionTimestamps=transitions))
    assert vmim.finished_at == finished_at


# --- pods and the KubeVirt CR


def test_a_pod() -> None:
    """A launcher pod is read with its VMI, its node, its phase and two conditions."""
    labels = {"kubevirt.io/migrationJobUID": "m1", "kubevirt.io/nodeName": "n1", "app": "web"}
    assert read_pod(a_pod_json(labels=labels)) == Pod(
        namespace=NAMESPACE,
        name="virt-launcher-db1-x",
        uid="uid-of-pod",
        vmi_uid=UID,
        node="n1",
        phase="Running",
        created=NOW - 86_400.0,
        ready=True,
        scheduled=True,
        migration_uid="m1",
        labels=(("kubevirt.io", "virt-launcher"), ("app", "web")),
    )


@pytest.mark.parametrize(
    ("owners", "vmi_uid"),
    [
        pytest.param(None, UID, id="null"),
        pytest.param([], UID, id="none"),
        pytest.param([{"kind": "ReplicaSet", "uid": "other"}], UID, id="of-another-kind"),
        pytest.param([{"kind": "VirtualMachineInstance"}], UID, id="without-uid"),
        pytest.param([{"kind": "VirtualMachineInstance", "uid": "other"}], "other", id="a-vmi"),
        pytest.param(
            [{"kind": "Pod", "uid": "p"}, {"kind": "VirtualMachineInstance", "uid": "other"}],
            "other",
            id="a-vmi-among-others",
        ),
    ],
)
def test_the_owner_of_a_pod(owners: Json, vmi_uid: str) -> None:
    """A pod's VMI comes from its ownerReferences, else from its label."""
    assert read_pod(a_pod_json(metadata={"ownerReferences": owners})).vmi_uid == vmi_uid


@pytest.mark.parametrize("value", ["true", ""], ids=["true", "empty"])
def test_eviction_in_progress(value: str) -> None:
    """The annotation `EVICTION_IN_PROGRESS` counts with any value."""
    pod = read_pod(a_pod_json(annotations={EVICTION_IN_PROGRESS: value}))
    assert pod.eviction_in_progress


BARE_POD = {
    "bare": {"metadata": {"name": "p"}},
    "nulls": {"metadata": {"name": "p", "labels": None, "annotations": None}, "spec": {}},
    "not-ready": {
        "metadata": {"name": "p", "labels": {"kubevirt.io/created-by": 5}},
        "status": {"conditions": [{"type": "Ready", "status": "False"}, {}]},
    },
}


@pytest.mark.parametrize("pod", BARE_POD.values(), ids=BARE_POD)
def test_a_bare_pod(pod: Json) -> None:
    """Missing fields of a pod get their defaults."""
    assert read_pod(pod) == Pod(namespace="", name="p", uid="", vmi_uid="")


@pytest.mark.parametrize(
    ("spec", "settings"),
    [
        pytest.param({}, KubeVirtSettings(namespace="kubevirt"), id="defaults"),
        pytest.param(
            {"configuration": {"migrations": {}}},
            KubeVirtSettings(namespace="kubevirt"),
            id="empty",
        ),
        pytest.param(
            {"configuration": {"migrations": LIMITS, "evictionStrategy": "LiveMigrate"}},
            KubeVirtSettings(MigrationLimits(0, 1), "LiveMigrate", namespace="kubevirt"),
            id="set",
        ),
    ],
)
def test_kubevirt_settings(spec: Json, settings: KubeVirtSettings) -> None:
    """The migration limits and the strategy are read; missing limits get KubeVirt's defaults."""
    assert read(Resource.KUBEVIRTS, a_kubevirt_json(**spec)) == settings


@pytest.mark.parametrize(("outdated", "updating"), [(2, True), (0, False), (None, False)])
def test_an_update_of_kubevirt(outdated: int | None, *, updating: bool) -> None:
    """KubeVirt is being updated while its status counts VMIs of the earlier version."""
    status = {"outdatedVirtualMachineInstanceWorkloads": outdated}
    document = a_kubevirt_json() | {"status": status}
    assert read(Resource.KUBEVIRTS, document) == KubeVirtSettings(
        updating=updating, namespace="kubevirt"
    )


NODES = {
    "schedulable": ({}, Node(name="n1")),
    "no-taint-yet": ({"unschedulable": True}, Node(name="n1", schedulable=False)),
    "cordoned": (
        {
            "unschedulable": True,
            "taints": [
                {"key": "other", "timeAdded": rfc3339(NOW - 9.0)},
                {"key": UNSCHEDULABLE, "timeAdded": rfc3339(NOW - 300.0)},
            ],
        },
        a_cordon(),
    ),
    "drained-by-a-taint": (
        {
            "taints": [
                {"key": "kubevirt.io/drain", "effect": "NoSchedule", "timeAdded": rfc3339(NOW)},
                {"key": "kubevirt.io/drain", "effect": "NoExecute", "timeAdded": rfc3339(NOW)},
            ]
        },
        Node(
            name="n1",
            taints=(Taint("kubevirt.io/drain", NOW),),
            evicting=(Taint("kubevirt.io/drain", NOW),),
        ),
    ),
    "the-taint-alone": ({"taints": [{"key": UNSCHEDULABLE}]}, Node(name="n1")),
}


@pytest.mark.parametrize(("spec", "node"), NODES.values(), ids=NODES)
def test_nodes(spec: Json, node: Node) -> None:
    """`spec.unschedulable` makes a node unschedulable; the taint has the time of the cordon."""
    assert read(Resource.NODES, {"metadata": {"name": "n1"}, "spec": spec}) == node


def test_conditions_of_a_drained_node() -> None:
    """A node's conditions about a drain are read if they are true."""
    conditions = [
        {"type": "Ready", "status": "True"},
        {"type": "MaintenancePlanned", "status": "True"},
        {"type": "MaintenanceInProgress", "status": "True"},
        {"type": "DrainInProgress", "status": "True"},
        {"type": "Drained", "status": "False"},
    ]
    status = {"conditions": conditions}
    node = read(Resource.NODES, {"metadata": {"name": "n1"}, "status": status})
    assert node == Node(
        name="n1",
        conditions=("DrainInProgress", "MaintenanceInProgress", "MaintenancePlanned"),
    )


BUDGETS = {
    "labels": (
        {"selector": {"matchLabels": {"app": "web"}}},
        {"disruptionsAllowed": 0},
        {"forbids": True, "selector": (Requirement("app", "In", ("web",)),)},
    ),
    "expressions": (
        {"selector": {"matchExpressions": [{"key": "app", "operator": "Exists"}]}},
        {"disruptionsAllowed": 0},
        {"forbids": True, "selector": (Requirement("app", "Exists", ()),)},
    ),
    "all-pods": ({"selector": {}}, {"disruptionsAllowed": 0}, {"forbids": True}),
    "allows-one": ({"selector": {}}, {"disruptionsAllowed": 1}, {}),
    "not-known-yet": ({"selector": {}}, {}, {}),
    "selects-nothing": ({}, {"disruptionsAllowed": 0}, {}),
    "of-kubevirt": (
        {"selector": {"matchLabels": {"kubevirt.io/created-by": "u"}}},
        {"disruptionsAllowed": 0},
        {"selector": (Requirement("kubevirt.io/created-by", "In", ("u",)),)},
    ),
}


@pytest.mark.parametrize(("spec", "status", "budget"), BUDGETS.values(), ids=BUDGETS)
def test_budgets(spec: Json, status: Json, budget: Json) -> None:
    """A budget that allows no disruption of its pods forbids evictions, unless it is KubeVirt's."""
    document = {"metadata": {"namespace": "shop", "name": "b"}, "spec": spec, "status": status}
    assert read(Resource.BUDGETS, document) == Budget(namespace="shop", name="b", **budget)


# --- invalid objects


INVALID: dict[str, tuple[Resource, Any, str, bool]] = {
    "no-uid": (Resource.VMIS, a_vmi_json(metadata={"uid": None}), "metadata.uid", True),
    "empty-uid": (Resource.VMIS, a_vmi_json(metadata={"uid": ""}), "metadata.uid", True),
    "no-name": (Resource.VMIS, a_vmi_json(metadata={"name": ""}), "metadata.name", False),
    "name-of-a-type": (Resource.VMIS, a_vmi_json(metadata={"name": 5}), ".metadata.name", False),
    "state": (Resource.VMIS, a_vmi_json(migrationState="x"), ".status.migrationState", True),
    "null-metadata": (Resource.VMIS, {"metadata": None}, ".metadata", False),
    "no-metadata": (Resource.VMIS, {}, "metadata", False),
    "no-object": (Resource.VMIS, [], "object", False),
    "vmim-without-vmi": (Resource.VMIMS, a_vmim_json(vmi_name=""), "spec.vmiName", True),
    "vmim-nameless": (Resource.VMIMS, a_vmim_json(metadata={"name": None}), "metadata.name", False),
    "pod-nameless": (Resource.PODS, a_pod_json(metadata={"name": None}), "metadata.name", False),
}


@pytest.mark.parametrize(("resource", "value", "why", "named"), INVALID.values(), ids=INVALID)
def test_invalid_objects(resource: Resource, value: Any, why: str, *, named: bool) -> None:
    """The error for an invalid object says what is wrong, and has the object's name if known."""
    with pytest.raises(InvalidObject) as listed:
        parse_object(resource, raw(value))
    with pytest.raises(InvalidObject) as watched:
        parse_event(resource, raw({"type": "MODIFIED", "object": value}))
    for invalid in (listed.value, watched.value):
        assert why in invalid.why
        assert (invalid.name is not None) is named
        assert (invalid.namespace == NAMESPACE) is named


@pytest.mark.parametrize(
    "body", [b"", b"{", b"\xff\xfe", b'"\xff"', DEEP, b'{"metadata":' + DEEP], ids=range(6)
)
def test_garbage(body: bytes) -> None:
    """Bytes that are not a valid object raise an error."""
    for resource in WHOLE:
        with pytest.raises(InvalidObject):
            parse_object(resource, body)
        with pytest.raises(InvalidObject):
            parse_event(resource, body)
        with pytest.raises(InvalidObject):
            parse_event(resource, b'{"type":"ADDED","object":' + body + b"}")
    with pytest.raises(InvalidObject, match="not a Kubernetes list"):
        parse_page(body)
    assert parse_status_message(body) == ""


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of a JSON value and of all values inside it."""
    yield path
    inner: dict[Any, Any] = {}
    if isinstance(value, dict | list):
        inner = value if isinstance(value, dict) else dict(enumerate(value))
    for key, item in inner.items():
        yield from leaves(item, (*path, key))


def replaced(value: Any, path: tuple[Any, ...], by: Any) -> Any:
    """A copy of a JSON value with the value at one path replaced."""
    if not path:
        return by
    key, *rest = path
    if isinstance(value, dict):
        return value | {key: replaced(value[key], tuple(rest), by)}
    return [replaced(item, tuple(rest), by) if at == key else item for at, item in enumerate(value)]


SAID: Json = {"reason": "x", "message": "y", "lastProbeTime": rfc3339(NOW)}
WHOLE = {
    Resource.VMIS: a_vmi_json(
        evacuationNodeName="n1",
        conditions=[{"type": "LiveMigratable", "status": "False", **SAID}],
        migrationState=a_state_json(
            failed=True,
            failureReason="qemu crashed",
            abortStatus="Succeeded",
            sourceState={"migrationUID": "m8", "node": "n1"},
            targetState={"migrationUID": "m9"},
        ),
    ),
    Resource.VMIMS: a_vmim_json(
        phase="Failed",
        conditions=[{"type": "migrationBlockedByBackup", "status": "True", **SAID}],
        migrationState=a_state_json(failed=True, failureReason="qemu crashed"),
        phaseTransitionTimestamps=transitions_json(Scheduled=NOW - 9, Failed=NOW),
    ),
    Resource.PODS: a_pod_json(
        metadata={"ownerReferences": [{"kind": "VirtualMachineInstance", "uid": UID}]},
        labels={"kubevirt.io/migrationJobUID": "m1"},
        annotations={EVICTION_IN_PROGRESS: "true"},
        conditions=[{"type": "PodScheduled", "status": "False", **SAID}],
        containerStatuses=[{"name": "compute", "state": {"waiting": {"reason": "x"}}}],
    ),
    Resource.KUBEVIRTS: a_kubevirt_json(configuration={"migrations": LIMITS}),
}
WRONG: tuple[Any, ...] = (
    None,
    True,
    0,
    -1,
    2**70,
    1e300,
    0.5,
    "",
    "x",
    "\ud800",
    "\x00",
    rfc3339(NOW),
    [],
    [None],
    [[]],
    ["x"],
    [{}],
    {},
    {"x": 1},
    {"": None},
)


def attempt(resource: Resource, body: bytes) -> list[Fact]:
    """Parse the bytes in every way. Returns the facts; only `InvalidObject` may be raised."""
    facts = []
    lines = [b'{"type":"%s","object":%s}' % (kind, body) for kind in KINDS]
    for value in (body, msgspec.Raw(body)):
        with suppress(InvalidObject):
            facts.append(parse_object(resource, value).fact)
    for line in (*lines, body):
        with suppress(InvalidObject):
            event = parse_event(resource, line)
            if isinstance(event, Changed):
                facts.append(event.fact)
    with suppress(InvalidObject):
        parse_page(body)
    return facts


@pytest.mark.parametrize("resource", WHOLE, ids=str)
def test_every_wrong_type_in_every_place(resource: Resource) -> None:
    """Any wrong value in any field raises only `InvalidObject`."""
    whole = WHOLE[resource]
    assert len(attempt(resource, raw(whole))) == 4
    for path in leaves(whole):
        for wrong in WRONG:
            facts = attempt(resource, raw(replaced(whole, path, wrong)))
            assert len(facts) in (0, 4)


@soaked(100_000)
@given(seed=st.integers(0, 2**32), resource=st.sampled_from(sorted(WHOLE)))
def test_mutated_objects(seed: int, resource: Resource) -> None:
    """Several wrong values or changed bytes raise only `InvalidObject`."""
    rng = random.Random(seed)
    value: Any = WHOLE[resource]
    for _ in range(rng.randint(1, 4)):
        value = replaced(value, rng.choice(list(leaves(value))), rng.choice(WRONG))
    attempt(resource, raw(value))
    line = bytearray(raw(value))
    for _ in range(rng.randint(1, 4)):
        line[rng.randrange(len(line))] = rng.randrange(256)
    attempt(resource, bytes(line[: rng.randint(0, len(line))]))


# --- events


def event(kind: str, value: Any) -> bytes:
    """One line of a watch."""
    return raw({"type": kind, "object": value})


@pytest.mark.parametrize("kind", ["ADDED", "MODIFIED"])
def test_changes(kind: str) -> None:
    """ADDED and MODIFIED events are read in the same way."""
    changed = parse_event(Resource.VMIS, event(kind, a_vmi_json()))
    assert isinstance(changed, Changed)
    assert changed.modified == (kind == "MODIFIED")
    assert replace(changed, modified=False) == parse_object(Resource.VMIS, raw(a_vmi_json()))


DELETIONS = {
    "whole": (a_vmi_json(), Deleted(NAMESPACE, NAME, UID, "7")),
    "malformed": (a_vmi_json(migrationState=5), Deleted(NAMESPACE, NAME, UID, "7")),
    "no-uid": ({"metadata": {"name": NAME, "uid": 5}}, Deleted("", NAME, "", "")),
}


@pytest.mark.parametrize(("value", "deleted"), DELETIONS.values(), ids=DELETIONS)
def test_deletions(value: Json, deleted: Deleted) -> None:
    """A DELETED event is valid if the object's name can be read."""
    assert parse_event(Resource.VMIS, event("DELETED", value)) == deleted


@pytest.mark.parametrize(
    ("annotations", "listed"),
    [
        pytest.param({INITIAL_EVENTS_END: "true"}, True, id="end-of-the-list"),
        pytest.param({INITIAL_EVENTS_END: "false"}, False, id="not-true"),
        pytest.param({}, False, id="none"),
        pytest.param(None, False, id="null"),
        pytest.param([], False, id="another-type"),
    ],
)
@pytest.mark.parametrize("resource", WHOLE, ids=str)
def test_bookmarks(resource: Resource, annotations: Any, *, listed: bool) -> None:
    """A bookmark has a resourceVersion. An annotation marks the end of a streamed list."""
    value = {
        "kind": "X",
        "metadata": {
            "resourceVersion": "9",
            "creationTimestamp": None,
            "annotations": annotations,
        },
        "spec": {},
    }
    assert parse_event(resource, event("BOOKMARK", value)) == Bookmark("9", listed=listed)


@pytest.mark.parametrize(
    ("value", "failed"),
    [
        pytest.param(
            {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"},
            Failed(410, "Expired", "too old"),
            id="status",
        ),
        pytest.param({}, Failed(0, "", ""), id="empty"),
        pytest.param("x", Failed(0, "", ""), id="another-type"),
    ],
)
def test_errors(value: Any, failed: Failed) -> None:
    """An ERROR event ends the watch, even if its Status cannot be read."""
    assert parse_event(Resource.PODS, event("ERROR", value)) == failed


@pytest.mark.parametrize(
    ("line", "why"),
    [
        pytest.param(event("SOMETHING", a_vmi_json()), "'SOMETHING'", id="unknown-type"),
        pytest.param(event("SOMETHING", 5), "Expected `object`", id="unknown-type-and-object"),
        pytest.param(event("DELETED", {"metadata": {}}), "DELETED without", id="nameless-deletion"),
        pytest.param(event("DELETED", 5), "DELETED without", id="deletion-of-nothing"),
        pytest.param(event("BOOKMARK", {}), "BOOKMARK without", id="empty-bookmark"),
        pytest.param(raw({"type": "ADDED"}), "", id="no-object"),
        pytest.param(raw({"object": a_vmi_json()}), "not a watch event", id="no-type"),
        pytest.param(raw({"type": 5, "object": {}}), "not a watch event", id="type-of-type"),
        pytest.param(raw("ADDED"), "not a watch event", id="no-event"),
    ],
)
def test_invalid_events(line: bytes, why: str) -> None:
    """A line that is not a valid event raises an error."""
    with pytest.raises(InvalidObject) as invalid:
        parse_event(Resource.VMIS, line)
    assert why in invalid.value.why


# --- lists


def test_a_page() -> None:
    """A page is read with its items, its version and the token of the next page."""
    page = parse_page(
        raw({"metadata": {"resourceVersion": "5", "continue": "t"}, "items": [{"a": 1}, 2]})
    )
    assert [bytes(item) for item in page.items] == [b'{"a": 1}', b"2"]
    assert (page.resource_version, page.continue_token) == ("5", "t")


@pytest.mark.parametrize("items", [{}, {"items": None}, {"items": []}], ids=str)
@pytest.mark.parametrize("token", [{}, {"continue": None}], ids=str)
def test_the_last_page(items: Json, token: Json) -> None:
    """A page without a token is the last one. Items that are null are read as an empty list."""
    page = parse_page(raw({"metadata": {"resourceVersion": "5"} | token} | items))
    assert (page.items, page.resource_version, page.continue_token) == ([], "5", "")


def test_the_message_of_a_status() -> None:
    """The message of a Status is read; null is an empty message."""
    assert parse_status_message(raw({"message": "no"})) == "no"
    assert parse_status_message(raw({"message": None})) == ""


# --- lines


@given(
    lines=st.lists(st.binary(max_size=12).map(lambda line: line.replace(b"\n", b"")), max_size=6),
    tail=st.binary(max_size=6).map(lambda line: line.replace(b"\n", b"")),
    data=st.data(),
)
def test_any_chunking_gives_the_same_lines(
    lines: list[bytes], tail: bytes, data: st.DataObject
) -> None:
    """The lines do not depend on how the bytes are divided. Blank lines are dropped."""
    stream = b"".join(line + b"\n" for line in lines) + tail
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    got: list[bytes] = []
    rest = b""
    for begin, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        complete, rest = split_lines(rest, stream[begin:end])
        got += complete
    assert got == [line for line in lines if line.strip()]
    assert rest == tail


def a_disk(capacity: str, asked: str = "") -> Json:
    """A volume that a migration copies."""
    claim = {"capacity": {"storage": capacity}, "requests": {"storage": asked} if asked else None}
    return {"volumeName": "root", "sourcePVCInfo": claim}


@pytest.mark.parametrize(("status", "unknown"), [("True", False), ("False", False), (None, True)])
def test_whether_it_is_known_if_a_vm_can_migrate(status: str | None, *, unknown: bool) -> None:
    """It is unknown only without the condition LiveMigratable, as right after the start."""
    conditions = [] if status is None else [{"type": "LiveMigratable", "status": status}]
    vmi = read_vmi(a_vmi_json(conditions=conditions))
    assert (vmi.migratable, vmi.migratable_unknown) == (status == "True", unknown)


@pytest.mark.parametrize("kind", VMIM_CONDITIONS)
def test_what_a_vmim_waits_for(kind: str) -> None:
    """A condition of a VMIM that waits gives its state, and so does the missing other half."""
    vmim = read_vmim(a_vmim_json(conditions=[{"type": kind, "status": "True"}]))
    assert vmim.wait_reason is VMIM_CONDITIONS[kind].state
    assert read_vmim(a_vmim_json(phase="WaitingForSync")).wait_reason is State.WAITING_FOR_SYNC
    assert read_vmim(a_vmim_json()).wait_reason is None


@pytest.mark.parametrize(
    ("annotations", "labels", "trigger"),
    [
        ({"kubevirt.io/evacuationMigration": "n1"}, {}, Trigger.EVACUATION),
        ({"kubevirt.io/workloadUpdateMigration": ""}, {}, Trigger.WORKLOAD_UPDATE),
        ({}, {"kubevirt.io/volume-update-migration": "u1"}, Trigger.VOLUME_UPDATE),
        ({}, {}, Trigger.MANUAL),
    ],
)
def test_why_a_vmim_was_created(annotations: Json, labels: Json, trigger: Trigger) -> None:
    """KubeVirt's annotations and labels say it; a VMIM without them is a user's."""
    metadata = {"annotations": annotations, "labels": labels}
    assert read_vmim(a_vmim_json(metadata=metadata)).trigger is trigger


@pytest.mark.parametrize(
    ("spec", "status", "limit"),
    [
        ({"memory": {"guest": "8Gi"}}, {}, 1350.0),
        ({"memory": {"guest": "8G"}}, {}, 1200.0),
        ({"memory": {"guest": 8_000_000_000}}, {}, 1200.0),
        ({"resources": {"requests": {"memory": "512Mi"}}}, {}, 150.0),
        ({"memory": {"guest": "1000000000"}}, {}, 150.0),
        ({"memory": {"guest": "2000000k"}}, {}, 300.0),
        ({"memory": {"guest": "2000M"}}, {}, 300.0),
        ({"memory": {"guest": "1T"}}, {}, 150_000.0),
        ({"memory": {"guest": "1000000Ki"}}, {}, 300.0),
        ({"memory": {"guest": "1Ti"}}, {}, 165_000.0),
        ({"memory": {"guest": "1G"}}, {"migratedVolumes": [a_disk("1G"), a_disk("2G")]}, 600.0),
        ({"memory": {"guest": "1G"}}, {"migratedVolumes": [a_disk("3G", "1G")]}, 300.0),
        ({"memory": {"guest": "1G"}}, {"migratedVolumes": [{}]}, None),
        ({"memory": {"guest": "much"}}, {}, None),
        ({"memory": {"guest": "8Gi"}}, {"migrationMethod": "BlockMigration"}, None),
        ({}, {}, None),
    ],
)
def test_the_time_that_kubevirt_lets_a_copy_take(
    spec: Json, status: Json, limit: float | None
) -> None:
    """`completionTimeoutPerGiB` for each GB, rounded up; none if disks are copied, too, or at the
    end.
    """
    configuration = {"completionTimeoutPerGiB": 150}
    for end, expected in ((None, limit), ("2026-09-16T08:05:00Z", None)):
        state = a_state_json(migrationConfiguration=configuration, endTimestamp=end)
        vmi = a_vmi_json(migrationState=state, **status)
        vmi["spec"] = {"domain": spec}
        migration = read_vmi(vmi).migration
        assert migration is not None
        assert migration.time_limit == expected
