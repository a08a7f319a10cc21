"""Objects as KubeVirt writes them: names, builders, readers, and changed copies.

Objects are plain dicts. The functions here return changed copies, except `set_condition` and
`drop_condition`, which change an object in place.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec


Object = dict[str, Any]

# Labels
CREATED_BY = "kubevirt.io/created-by"
NODE_NAME = "kubevirt.io/nodeName"
MIGRATION_JOB = "kubevirt.io/migrationJobUID"
MIGRATION_TARGET_NODE = "kubevirt.io/migrationTargetNodeName"
VMI_NAME = "kubevirt.io/vmi-name"
# Annotations
DOMAIN = "kubevirt.io/domain"
EVACUATION = "kubevirt.io/evacuationMigration"
WORKLOAD_UPDATE = "kubevirt.io/workloadUpdateMigration"
EVICTION_SOURCE = "kubevirt.io/eviction-source"
MIGRATION_JOB_NAME = "kubevirt.io/migrationJobName"
OBSERVED_VERSION = "kubevirt.io/latest-observed-api-version"
STORAGE_VERSION = "kubevirt.io/storage-observed-api-version"
EVICT_ONLY = "descheduler.alpha.kubernetes.io/request-evict-only"
EVICTION_IN_PROGRESS = "descheduler.alpha.kubernetes.io/eviction-in-progress"
PREFER_NO_EVICTION = "descheduler.alpha.kubernetes.io/prefer-no-eviction"
TARGET_READY = "kubevirt.io/migration-target-ready-timestamp"
# A condition of launcher pods, and their readiness gate
UNPAUSED = "kubevirt.io/virtual-machine-unpaused"
# A taint of nodes
UNSCHEDULABLE = "node.kubernetes.io/unschedulable"
# Finalizers
MIGRATION_FINALIZER = "kubevirt.io/migrationJobFinalize"
VMI_FINALIZER = "kubevirt.io/foregroundDeleteVirtualMachine"

FINAL = ("Succeeded", "Failed")
PARALLEL_PER_CLUSTER = 5
PARALLEL_OUTBOUND_PER_NODE = 2
"""KubeVirt's built-in limits (`pkg/virt-config/virt-config.go`)."""

PRIORITIES = {"system-critical": 100, "user-triggered": 50, "system-maintenance": 20}
"""Queue weights (`pkg/util/migrations/migrations.go`); without a priority: 0."""


# Building


def build_kubevirt(namespace: str = "kubevirt", name: str = "kubevirt") -> Object:
    """The KubeVirt CR, with the built-in limits."""
    migrations = {
        "allowWorkloadDisruption": True,
        "parallelMigrationsPerCluster": PARALLEL_PER_CLUSTER,
        "parallelOutboundMigrationsPerNode": PARALLEL_OUTBOUND_PER_NODE,
    }
    return {
        "metadata": {"namespace": namespace, "name": name},
        "spec": {"configuration": {"evictionStrategy": "LiveMigrate", "migrations": migrations}},
    }


def build_list(kind: str, items: Sequence[Object]) -> Object:
    """A list of objects of this kind, as the API server answers it."""
    return {"kind": f"{kind}List", "apiVersion": "v1", "metadata": {}, "items": items}


def build_namespace(name: str) -> Object:
    """A namespace."""
    return {"metadata": {"name": name}}


def build_node(name: str) -> Object:
    """A node that can run VMs."""
    labels = {"kubernetes.io/hostname": name, "kubevirt.io/schedulable": "true"}
    return {"metadata": {"name": name, "labels": labels}, "spec": {}}


def build_budget(namespace: str, name: str) -> Object:
    """A PodDisruptionBudget that allows no disruption of a VM's pod."""
    return {
        "metadata": {"namespace": namespace, "name": name},
        "spec": {"maxUnavailable": 0, "selector": {"matchLabels": {"vm.kubevirt.io/name": name}}},
        "status": {"disruptionsAllowed": 0, "currentHealthy": 1, "desiredHealthy": 1},
    }


def build_vmi(
    namespace: str, name: str, *, strategy: str = "LiveMigrate", annotations: Mapping[str, str]
) -> Object:
    """A VMI as virt-api admits it: the strategy is in the spec (`setDefaultEvictionStrategy`)."""
    return {
        "metadata": {
            "namespace": namespace,
            "name": name,
            "labels": {"kubevirt.io/domain": name, "vm.kubevirt.io/name": name},
            "annotations": dict(annotations) | {OBSERVED_VERSION: "v1", STORAGE_VERSION: "v1"},
            "finalizers": [VMI_FINALIZER],
        },
        "spec": {
            "evictionStrategy": strategy,
            "domain": {"devices": {}, "memory": {"guest": "2Gi"}},
            "terminationGracePeriodSeconds": 30,
        },
        "status": {"phase": "Pending"},
    }


def build_launcher_pod(vmi: Object, migration: Object | None = None) -> Object:
    """The pod of a VMI, or of its migration's target (`services/template.go`, `createTargetPod`).

    A target pod inherits the VMI's annotations, such as `eviction-source`, but not the
    eviction-in-progress annotation, which belongs to a pod.
    """
    owner = vmi["metadata"]
    inherited = {
        key: value
        for key, value in owner.get("annotations", {}).items()
        if key not in (OBSERVED_VERSION, STORAGE_VERSION)
    }
    pod: Object = {
        "metadata": {
            "generateName": f"virt-launcher-{owner['name']}-",
            "namespace": owner["namespace"],
            "labels": owner.get("labels", {})
            | {
                "kubevirt.io": "virt-launcher",
                CREATED_BY: owner["uid"],
                "vmi.kubevirt.io/id": owner["name"],
            },
            "annotations": inherited | {DOMAIN: owner["name"], EVICT_ONLY: ""},
            "ownerReferences": [
                {
                    "apiVersion": "kubevirt.io/v1",
                    "kind": "VirtualMachineInstance",
                    "name": owner["name"],
                    "uid": owner["uid"],
                    "controller": True,
                    "blockOwnerDeletion": True,
                }
            ],
        },
        "spec": {
            "containers": [{"name": "compute", "image": "virt-launcher"}],
            "nodeSelector": {"kubevirt.io/schedulable": "true"},
            "readinessGates": [{"conditionType": UNPAUSED}],
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 45,
        },
    }
    pod["metadata"]["labels"].pop(MIGRATION_TARGET_NODE, None)
    if migration is not None:
        pod["metadata"]["labels"][MIGRATION_JOB] = migration["metadata"]["uid"]
        pod["metadata"]["annotations"][MIGRATION_JOB_NAME] = migration["metadata"]["name"]
        pod["spec"]["affinity"] = {
            "podAntiAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": [
                    {
                        "labelSelector": {"matchLabels": {CREATED_BY: owner["uid"]}},
                        "topologyKey": "kubernetes.io/hostname",
                    }
                ]
            }
        }
    return pod


def build_migration(vmi: Object, generate_name: str = "kubevirt-migrate-vm-") -> Object:
    """A migration created by hand: no priority, no annotation."""
    return {
        "metadata": {"generateName": generate_name, "namespace": vmi["metadata"]["namespace"]},
        "spec": {"vmiName": vmi["metadata"]["name"]},
    }


def build_evacuation(vmi: Object) -> Object:
    """The evacuation controller's migration (`evacuation.go: GenerateNewMigration`)."""
    migration = build_migration(vmi, "kubevirt-evacuation-")
    source = vmi["metadata"].get("annotations", {}).get(EVICTION_SOURCE)
    migration["metadata"]["annotations"] = {EVACUATION: vmi["status"]["nodeName"]}
    migration["spec"]["priority"] = (
        "system-maintenance" if source == "descheduler" else "system-critical"
    )
    return migration


# Reading


def key(obj: Object) -> str:
    """Namespace and name."""
    return f"{obj['metadata']['namespace']}/{obj['metadata']['name']}"


def owner_key(obj: Object) -> str:
    """Namespace and name of the VMI that a migration or launcher pod belongs to."""
    name = obj["spec"].get("vmiName") or annotations(obj).get(DOMAIN, "")
    return f"{obj['metadata']['namespace']}/{name}"


def labels(obj: Object) -> Mapping[str, str]:
    """The labels of an object."""
    pairs: Mapping[str, str] = obj["metadata"].get("labels") or {}
    return pairs


def annotations(obj: Object) -> Mapping[str, str]:
    """The annotations of an object."""
    pairs: Mapping[str, str] = obj["metadata"].get("annotations") or {}
    return pairs


def phase(obj: Object) -> str:
    """The phase of an object; empty if it has none."""
    return str(obj.get("status", {}).get("phase") or "")


def is_final(obj: Object) -> bool:
    """Whether a VMI, VMIM or pod has succeeded or failed."""
    return phase(obj) in FINAL


def is_deleting(obj: Object) -> bool:
    """Whether an object has a deletion timestamp."""
    return "deletionTimestamp" in obj["metadata"]


def state_of(obj: Object) -> Object:
    """`status.migrationState` of a VMI or migration; empty if there is none.

    On a VMI, it is about the last migration that was handed off.
    """
    state: Object = obj.get("status", {}).get("migrationState") or {}
    return state


def is_migrating(vmi: Object) -> bool:
    """Whether a migration has started and not ended (`migrations.go: IsMigrating`)."""
    state = state_of(vmi)
    return "startTimestamp" in state and "endTimestamp" not in state


def evacuated_node(vmi: Object) -> str:
    """The node that the VMI is evacuated from; empty if none."""
    return str(vmi.get("status", {}).get("evacuationNodeName") or "")


def condition(obj: Object, kind: str) -> Object | None:
    """A condition, or None."""
    for row in obj.get("status", {}).get("conditions", []):
        if row["type"] == kind:
            return dict(row)
    return None


def is_true(obj: Object, kind: str) -> bool:
    """Whether a condition is True."""
    row = condition(obj, kind) or {}
    return str(row.get("status")) == "True"


def is_target_of(pod: Object, migration: Object) -> bool:
    """Whether the pod was created for this migration."""
    return labels(pod).get(MIGRATION_JOB) == str(migration["metadata"]["uid"])


def is_pod_ready(pod: Object) -> bool:
    """Whether the compute container runs and the pod is not being deleted (`IsPodReady`)."""
    if is_final(pod) or is_deleting(pod):
        return False
    containers: list[Object] = pod.get("status", {}).get("containerStatuses", [])
    return any("running" in container.get("state", {}) for container in containers)


def is_cordoned(node: Object) -> bool:
    """Whether no pod can be scheduled onto a node."""
    return bool(node["spec"].get("unschedulable"))


def cordon(node: Object, now: datetime) -> Object:
    """The node after `kubectl cordon`, with the taint of the node lifecycle controller."""
    taint = {"key": UNSCHEDULABLE, "effect": "NoSchedule", "timeAdded": format_time(now)}
    return node | {"spec": node["spec"] | {"unschedulable": True, "taints": [taint]}}


def uncordon(node: Object) -> Object:
    """The same node after `kubectl uncordon`."""
    return node | {"spec": {}}


def is_unschedulable(pod: Object) -> bool:
    """Whether the scheduler has found no node for the pod."""
    row = condition(pod, "PodScheduled") or {}
    return str(row.get("reason")) == "Unschedulable"


def node_of(pod: Object) -> str:
    """The node that a pod is bound to; empty if none."""
    return str(pod.get("spec", {}).get("nodeName") or "")


def current_pod(vmi: Object, pods: Iterable[Object]) -> Object | None:
    """The newest of the VMI's pods on its node (`controller.go: CurrentVMIPod`)."""
    node = vmi.get("status", {}).get("nodeName")
    here = [pod for pod in pods if not node or node_of(pod) == node]
    return max(here, key=lambda pod: pod["metadata"]["creationTimestamp"], default=None)


def active_pods(pods: Iterable[Object]) -> int:
    """Pods of the VMI that have not finished (`controller.go: VMIActivePodsCount`)."""
    return sum(not is_final(pod) for pod in pods)


def priority(migration: Object) -> int:
    """The priority of a migration as a number."""
    return PRIORITIES.get(migration["spec"].get("priority", ""), 0)


def transition(migration: Object, to: str) -> datetime | None:
    """When a migration entered a phase; None if it did not."""
    for entry in migration.get("status", {}).get("phaseTransitionTimestamps", []):
        if entry["phase"] == to:
            return parse_time(entry["phaseTransitionTimestamp"])
    return None


def newest_first(migrations: Iterable[Object]) -> list[Object]:
    """Sort by creation; within the same second, unfinished migrations count as newer."""

    def age(migration: Object) -> tuple[str, bool, str]:
        metadata = migration["metadata"]
        return metadata["creationTimestamp"], not is_final(migration), metadata["name"]

    return sorted(migrations, key=age, reverse=True)


# Transforming


def copy(obj: Object) -> Object:
    """A deep copy, by a round trip through JSON: faster than `copy.deepcopy`."""
    copied: Object = msgspec.json.decode(msgspec.json.encode(obj))
    return copied


def changed(obj: Object, *changes: Callable[[Object], None]) -> Object:
    """A copy with changes applied."""
    copied = copy(obj)
    for change in changes:
        change(copied)
    return copied


def set_condition(obj: Object, new: Object) -> None:
    """Add or replace a condition, in place; `lastTransitionTime` is when its status changed."""
    status = obj.setdefault("status", {})
    old = condition(obj, new["type"]) or {}
    if new.get("lastTransitionTime") and old.get("status") == new["status"]:
        new = new | {"lastTransitionTime": old["lastTransitionTime"]}
    others = [row for row in status.get("conditions", []) if row["type"] != new["type"]]
    status["conditions"] = [*others, new]


def drop_condition(obj: Object, kind: str) -> None:
    """Remove a condition, in place."""
    status = obj.setdefault("status", {})
    left = [row for row in status.get("conditions", []) if row["type"] != kind]
    status.pop("conditions", None)
    if left:
        status["conditions"] = left


def format_time(instant: datetime) -> str:
    """An instant as `metav1.Time` writes it: UTC, whole seconds."""
    return instant.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def parse_time(text: str) -> datetime:
    """Parse an instant that `format_time` has written."""
    return datetime.strptime(text, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)
