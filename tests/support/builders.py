"""Builders of facts, and of the JSON objects from which facts are parsed.

Each builder has valid defaults; a test overrides the fields that matter for the test.
"""

from datetime import UTC, datetime
from typing import Any, TypeAlias

from exporter.engine.facts.evidence import Evidence
from exporter.engine.facts.history import History, Migration
from exporter.engine.facts.model import (
    Eviction,
    EvictionRequester,
    Fact,
    Instant,
    MigrationState,
    Node,
    Outcome,
    Pod,
    Vmi,
    Vmim,
)
from exporter.engine.facts.policy import Policy
from tests.support.stores import ClockedStore


Json: TypeAlias = dict[str, Any]

NOW: Instant = 1_800_000_000.0
NAMESPACE = "shop"
NAME = "db1"
UID = "uid-of-db1"
KEEP = 64
DRAIN = EvictionRequester("example.com/drain", "Eviction")


def rfc3339(instant: Instant) -> str:
    """An instant as Kubernetes writes it, in whole seconds and UTC."""
    return datetime.fromtimestamp(instant, tz=UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def a_policy(**overrides: Any) -> Policy:
    """A policy; by default a floor of 15 min, a cap of 6 h, a window of 24 h and both guards."""
    return Policy(**overrides)


def a_state(**overrides: Any) -> MigrationState:
    """A migration that took a minute and succeeded ten minutes ago."""
    fields: Json = {
        "uid": "m1",
        "start": NOW - 660.0,
        "end": NOW - 600.0,
        "outcome": Outcome.SUCCEEDED,
    } | overrides
    fields.setdefault("ended", fields["end"] is not None)
    return MigrationState(**fields)


def a_running_state(**overrides: Any) -> MigrationState:
    """A migration that began a minute ago."""
    fields: Json = {"uid": "m1", "start": NOW - 60.0} | overrides
    return MigrationState(**fields)


def a_cordon(**overrides: Any) -> Node:
    """The node n1, which was cordoned five minutes ago."""
    fields: Json = {"name": "n1", "schedulable": False, "cordoned_at": NOW - 300.0} | overrides
    return Node(**fields)


def a_vmi(**overrides: Any) -> Vmi:
    """A VMI on node n1 that was created a day ago and never migrated."""
    fields: Json = {
        "namespace": NAMESPACE,
        "name": NAME,
        "uid": UID,
        "created": NOW - 86_400.0,
        "node": "n1",
    } | overrides
    return Vmi(**fields)


def an_evacuating_vmi(*, age: float, **overrides: Any) -> Vmi:
    """A migratable VMI whose evacuation from n1 was requested `age` seconds ago."""
    fields: Json = {
        "evacuation_node": "n1",
        "eviction_strategy": "LiveMigrate",
        "eviction_requested_at": NOW - age,
        "migratable": True,
    }
    return a_vmi(**(fields | overrides))


def a_vmim(**overrides: Any) -> Vmim:
    """A VMIM of db1 that has been waiting for two minutes."""
    fields: Json = {
        "namespace": NAMESPACE,
        "name": "mig-1",
        "uid": "m1",
        "vmi_name": NAME,
        "created": NOW - 120.0,
        "phase": "Pending",
    } | overrides
    return Vmim(**fields)


def an_ended_vmim(**overrides: Any) -> Vmim:
    """A VMIM of db1 that was handed off, took a minute, and succeeded ten minutes ago."""
    fields: Json = {
        "phase": "Succeeded",
        "finished": True,
        "handed_off": True,
        "start": NOW - 660.0,
        "end": NOW - 600.0,
        "outcome": Outcome.SUCCEEDED,
    } | overrides
    end = fields["end"]
    fields.setdefault("finished_at", NOW - 599.0 if end is None else end + 1.0)
    return a_vmim(**fields)


def a_pod(**overrides: Any) -> Pod:
    """The launcher pod of db1, running on n1."""
    fields: Json = {
        "namespace": NAMESPACE,
        "name": "virt-launcher-db1-x",
        "uid": "uid-of-pod",
        "vmi_uid": UID,
        "node": "n1",
        "phase": "Running",
        "created": NOW - 86_400.0,
        "ready": True,
        "scheduled": True,
    } | overrides
    return Pod(**fields)


def an_eviction(*requesters: EvictionRequester, **overrides: Any) -> Eviction:
    """An Eviction of db1's launcher pod, which has not ended."""
    pod = a_pod()
    fields: Json = {
        "namespace": pod.namespace,
        "name": f"pod-1-{pod.name}",
        "uid": "e1",
        "pod": pod.name,
        "pod_uid": pod.uid,
        "created": NOW - 60.0,
        "requesters": requesters or (DRAIN,),
        "responder": "imperative-eviction.k8s.io/evictor",
        "state": "Active",
    } | overrides
    return Eviction(**fields)


def a_migration(**overrides: Any) -> Migration:
    """A handed-off migration that took a minute and succeeded ten minutes ago."""
    fields: Json = {
        "start": NOW - 660.0,
        "end": NOW - 600.0,
        "outcome": Outcome.SUCCEEDED,
        "handed_off": True,
    } | overrides
    return Migration(**fields)


def a_history(**migrations: Migration) -> History:
    """A history of these migrations, each under its UID."""
    history = History()
    for uid, migration in migrations.items():
        history.put(uid, migration, keep=KEEP)
    return history


def some_evidence(**overrides: Any) -> Evidence:
    """Evidence of a VMI that never migrated, with VMIMs and pods visible."""
    fields: Json = {"vmi": a_vmi(), "history": History(), "launcher": a_pod()} | overrides
    return Evidence(**fields)


def a_metadata_json(**overrides: Any) -> Json:
    """The metadata of a namespaced object, created a day ago."""
    return {
        "namespace": NAMESPACE,
        "name": NAME,
        "uid": UID,
        "creationTimestamp": rfc3339(NOW - 86_400.0),
        "resourceVersion": "7",
    } | overrides


def a_state_json(**overrides: Any) -> Json:
    """`migrationState` of a migration that took a minute and succeeded ten minutes ago."""
    return {
        "migrationUid": "m1",
        "sourceNode": "n1",
        "targetNode": "n2",
        "startTimestamp": rfc3339(NOW - 660.0),
        "endTimestamp": rfc3339(NOW - 600.0),
        "completed": True,
    } | overrides


def a_vmi_json(*, metadata: Json | None = None, **status: Any) -> Json:
    """A VMI on node n1; keyword arguments go into its status."""
    return {
        "apiVersion": "kubevirt.io/v1",
        "kind": "VirtualMachineInstance",
        "metadata": a_metadata_json() | (metadata or {}),
        "spec": {"evictionStrategy": "LiveMigrate"},
        "status": {"phase": "Running", "nodeName": "n1"} | status,
    }


def a_vmim_json(*, metadata: Json | None = None, vmi_name: str = NAME, **status: Any) -> Json:
    """A VMIM of db1 that has been waiting for two minutes; keyword arguments go into its status."""
    own = {"name": "mig-1", "uid": "m1", "creationTimestamp": rfc3339(NOW - 120.0)}
    return {
        "apiVersion": "kubevirt.io/v1",
        "kind": "VirtualMachineInstanceMigration",
        "metadata": a_metadata_json() | own | (metadata or {}),
        "spec": {"vmiName": vmi_name},
        "status": {"phase": "Pending"} | status,
    }


def a_pod_json(
    *,
    metadata: Json | None = None,
    labels: Json | None = None,
    annotations: Json | None = None,
    node: str = "n1",
    **status: Any,
) -> Json:
    """The launcher pod of db1; further keyword arguments go into its status."""
    own = {
        "name": "virt-launcher-db1-x",
        "uid": "uid-of-pod",
        "labels": {"kubevirt.io": "virt-launcher", "kubevirt.io/created-by": UID} | (labels or {}),
        "annotations": {"kubevirt.io/domain": NAME} | (annotations or {}),
    }
    conditions = [
        {"type": "PodScheduled", "status": "True"},
        {"type": "Ready", "status": "True"},
    ]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": a_metadata_json() | own | (metadata or {}),
        "spec": {"nodeName": node},
        "status": {"phase": "Running", "conditions": conditions} | status,
    }


def transitions_json(**instants: Instant) -> list[Json]:
    """`phaseTransitionTimestamps`, one entry per keyword."""
    return [
        {"phase": phase, "phaseTransitionTimestamp": rfc3339(instant)}
        for phase, instant in instants.items()
    ]


def a_store(*facts: Fact, keep: int = KEEP, now: Instant = 0.0) -> ClockedStore:
    """A store that sees everything, with these facts, added in this order."""
    store = ClockedStore(keep=keep, now=now)
    for fact in facts:
        store.put(fact)
    return store
