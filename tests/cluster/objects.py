"""Builders of objects as KubeVirt writes them; a real API server accepts these objects.

An override is a top-level field (`metadata`, `spec`, `status`) that is merged into the default
field. The server sets `uid`, `creationTimestamp` and `resourceVersion`.
"""

from typing import Any

from exporter.demo.store import merge

from .resources import NAMESPACES, PODS, VMIMS, VMIS, Resource


Object = dict[str, Any]

_EVICTION = "descheduler.alpha.kubernetes.io"


def overlay(under: Object, over: Object) -> Object:
    """Merge one object into another, key by key; lists and plain values are replaced."""
    result: Object = merge(under, over)
    return result


def namespace(name: str) -> Object:
    """A namespace."""
    return _object(NAMESPACES, {"name": name})


def vmi(name: str, namespace: str = "default", *, node: str = "n1", **overrides: Any) -> Object:
    """A running, live-migratable VMI; `status={"evacuationNodeName": node}` marks it."""
    migratable = [_condition("LiveMigratable"), _condition("StorageLiveMigratable")]
    made = _object(
        VMIS,
        {"name": name, "namespace": namespace, "labels": {"kubevirt.io/nodeName": node}},
        spec={
            "evictionStrategy": "LiveMigrate",
            "domain": {"devices": {}, "resources": {"requests": {"memory": "64Mi"}}},
        },
        status={
            "phase": "Running",
            "nodeName": node,
            "migrationMethod": "LiveMigration",
            "migrationTransport": "Unix",
            "conditions": migratable,
        },
    )
    return overlay(made, overrides)


def vmim(
    name: str,
    namespace: str = "default",
    *,
    of: str,
    evacuates: str | None = None,
    **overrides: Any,
) -> Object:
    """A pending migration of a VMI; with `evacuates` it is like those of virt-controller.

    It has no finalizer, because nothing here would remove a finalizer at the end.
    """
    made = _object(
        VMIMS,
        {"name": name, "namespace": namespace, "labels": {"kubevirt.io/vmi-name": of}},
        spec={"vmiName": of},
        status={"phase": "Pending"},
    )
    if evacuates is not None:
        made["metadata"]["annotations"] = {"kubevirt.io/evacuationMigration": evacuates}
        made["spec"]["priority"] = "system-critical"
    return overlay(made, overrides)


def launcher_pod(
    vmi: Object,
    *,
    node: str | None = None,
    migration: Object | None = None,
    evicting: bool = False,
    **overrides: Any,
) -> Object:
    """The ready virt-launcher pod of a created VMI, or the target pod of one of its migrations."""
    owner = vmi["metadata"]
    node = node or vmi["status"]["nodeName"]
    metadata = {
        "generateName": f"virt-launcher-{owner['name']}-",
        "namespace": owner["namespace"],
        "labels": {
            "kubevirt.io": "virt-launcher",
            "kubevirt.io/created-by": owner["uid"],
            "kubevirt.io/nodeName": node,
            "vmi.kubevirt.io/id": owner["name"],
        },
        "annotations": {
            "kubevirt.io/domain": owner["name"],
            f"{_EVICTION}/request-evict-only": "",
        },
        "ownerReferences": [_owned_by(vmi)],
    }
    if migration is not None:
        metadata["labels"]["kubevirt.io/migrationJobUID"] = migration["metadata"]["uid"]
        metadata["annotations"]["kubevirt.io/migrationJobName"] = migration["metadata"]["name"]
    if evicting:
        metadata["annotations"][f"{_EVICTION}/eviction-in-progress"] = "true"
    made = _object(
        PODS,
        metadata,
        spec={
            "nodeName": node,
            "restartPolicy": "Never",
            "containers": [{"name": "compute", "image": "virt-launcher"}],
        },
        status={
            "phase": "Running",
            "conditions": [
                {"type": kind, "status": "True"}
                for kind in ("PodScheduled", "Initialized", "ContainersReady", "Ready")
            ],
        },
    )
    return overlay(made, overrides)


def _object(resource: Resource, metadata: Object, **fields: Any) -> Object:
    head = {"apiVersion": resource.api_version, "kind": resource.kind, "metadata": metadata}
    return {**head, **fields}


def _condition(kind: str) -> Object:
    # KubeVirt leaves both times of these conditions null.
    return {"type": kind, "status": "True", "lastProbeTime": None, "lastTransitionTime": None}


def _owned_by(vmi: Object) -> Object:
    return {
        "apiVersion": VMIS.api_version,
        "kind": VMIS.kind,
        "name": vmi["metadata"]["name"],
        "uid": vmi["metadata"]["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }
