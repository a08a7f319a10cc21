"""The fields of Kubernetes and KubeVirt objects that are decoded, as they are in JSON.

Fields of type Any may have any JSON type. Texts are left undecoded (`msgspec.Raw`): only the module
`reasons` needs them, and an invalid text must not make its object unreadable. Source: KubeVirt
`staging/src/kubevirt.io/api/core/v1/types.go`.
"""

from typing import Any

import msgspec
from msgspec import Struct


NO_TEXT = msgspec.Raw()


class Metadata(Struct, gc=False):
    namespace: str | None = None
    name: str | None = None
    uid: str | None = None
    creationTimestamp: Any = None
    deletionTimestamp: Any = None
    resourceVersion: str | None = None
    annotations: dict[str, Any] | None = None


class Owner(Struct, gc=False):
    kind: str | None = None
    uid: str | None = None


class LabelledMetadata(Metadata, gc=False):
    labels: dict[str, Any] | None = None


class PodMetadata(LabelledMetadata, gc=False):
    ownerReferences: list[Owner] | None = None
    deletionGracePeriodSeconds: int | None = None


class LooseMetadata(Struct, gc=False):
    """The fields that identify an object; each may have any type."""

    namespace: Any = None
    name: Any = None
    uid: Any = None
    resourceVersion: Any = None
    annotations: Any = None


class Object(Struct, gc=False):
    metadata: Metadata


class HalfState(Struct, gc=False):
    migrationUID: str | None = None


class MigrationConfiguration(Struct, gc=False):
    completionTimeoutPerGiB: int | None = None


class ReportedState(Struct, gc=False):
    migrationUid: str | None = None
    startTimestamp: Any = None
    endTimestamp: Any = None
    completed: bool | None = None
    failed: bool | None = None
    mode: str | None = None
    failureReason: msgspec.Raw = NO_TEXT
    abortRequested: bool | None = None
    abortStatus: msgspec.Raw = NO_TEXT
    sourceNode: str | None = None
    targetNode: str | None = None
    sourceState: HalfState | None = None
    targetState: HalfState | None = None
    migrationConfiguration: MigrationConfiguration | None = None


class Condition(Struct, gc=False):
    type: str | None = None
    status: str | None = None
    lastTransitionTime: Any = None
    lastProbeTime: Any = None
    reason: msgspec.Raw = NO_TEXT
    message: msgspec.Raw = NO_TEXT


class VmiMetadata(Metadata, gc=False):
    labels: msgspec.Raw = NO_TEXT
    finalizers: msgspec.Raw = NO_TEXT


class GuestMemory(Struct, gc=False):
    guest: Any = None


class Resources(Struct, gc=False):
    requests: dict[str, Any] | None = None


class Domain(Struct, gc=False):
    memory: GuestMemory | None = None
    resources: Resources | None = None


class VmiSpec(Struct, gc=False):
    evictionStrategy: str | None = None
    priorityClassName: str | None = None
    nodeSelector: msgspec.Raw = NO_TEXT
    affinity: msgspec.Raw = NO_TEXT
    tolerations: msgspec.Raw = NO_TEXT
    utilityVolumes: msgspec.Raw = NO_TEXT
    domain: Domain | None = None


class HotplugVolume(Struct, gc=False):
    pass


class Volume(Struct, gc=False):
    hotplugVolume: HotplugVolume | None = None


class Claim(Struct, gc=False):
    capacity: dict[str, Any] | None = None
    requests: dict[str, Any] | None = None


class MigratedVolume(Struct, gc=False):
    sourcePVCInfo: Claim | None = None


class VmiStatus(Struct, gc=False):
    phase: str | None = None
    nodeName: str | None = None
    evacuationNodeName: str | None = None
    migrationMethod: str | None = None
    migrationState: ReportedState | None = None
    conditions: list[Condition] | None = None
    volumeStatus: list[Volume] | None = None
    migratedVolumes: list[MigratedVolume] | None = None


class VmiObject(Object, gc=False):
    metadata: VmiMetadata
    spec: VmiSpec | None = None
    status: VmiStatus | None = None


class PhaseTransition(Struct, gc=False):
    phase: str | None = None
    phaseTransitionTimestamp: Any = None


class VmimStatus(Struct, gc=False):
    phase: str | None = None
    migrationState: ReportedState | None = None
    phaseTransitionTimestamps: list[PhaseTransition] | None = None
    conditions: list[Condition] | None = None


class VmimSpec(Struct, gc=False):
    vmiName: str | None = None
    priority: str | None = None
    addedNodeSelector: msgspec.Raw = NO_TEXT


class VmimObject(Object, gc=False):
    metadata: LabelledMetadata
    spec: VmimSpec | None = None
    status: VmimStatus | None = None


class Named(Struct, gc=False):
    name: str | None = None


class PodSpec(Struct, gc=False):
    nodeName: str | None = None
    nodeSelector: msgspec.Raw = NO_TEXT
    schedulingGates: list[Named] | None = None


class Waiting(Struct, gc=False):
    reason: msgspec.Raw = NO_TEXT
    message: msgspec.Raw = NO_TEXT


class Terminated(Waiting, gc=False):
    exitCode: int | None = None
    finishedAt: Any = None


class Running(Struct, gc=False):
    startedAt: Any = None


class ContainerState(Struct, gc=False):
    waiting: Waiting | None = None
    running: Running | None = None
    terminated: Terminated | None = None


class Container(Struct, gc=False):
    name: msgspec.Raw = NO_TEXT
    ready: bool | None = None
    started: bool | None = None
    state: ContainerState | None = None


class PodStatus(Struct, gc=False):
    phase: str | None = None
    reason: msgspec.Raw = NO_TEXT
    message: msgspec.Raw = NO_TEXT
    conditions: list[Condition] | None = None
    initContainerStatuses: msgspec.Raw = NO_TEXT
    containerStatuses: msgspec.Raw = NO_TEXT


class PodObject(Object, gc=False):
    metadata: PodMetadata
    spec: PodSpec | None = None
    status: PodStatus | None = None


class Migrations(Struct, gc=False):
    nodeDrainTaintKey: str | None = None
    parallelMigrationsPerCluster: int | None = None
    parallelOutboundMigrationsPerNode: int | None = None


class KubeVirtConfiguration(Struct, gc=False):
    evictionStrategy: str | None = None
    migrations: Migrations | None = None


class KubeVirtSpec(Struct, gc=False):
    configuration: KubeVirtConfiguration | None = None


class Taint(Struct, gc=False):
    key: str | None = None
    effect: str | None = None
    timeAdded: Any = None
    value: str | None = None


class NodeSpec(Struct, gc=False):
    unschedulable: bool | None = None
    taints: list[Taint] | None = None


class NodeStatus(Struct, gc=False):
    conditions: list[Condition] | None = None


class NodeObject(Object, gc=False):
    metadata: LabelledMetadata
    spec: NodeSpec | None = None
    status: NodeStatus | None = None


class Expression(Struct, gc=False):
    key: str = ""
    operator: str = ""
    values: list[str] | None = None


class AffinityTerm(Struct, gc=False):
    matchExpressions: list[Expression] | None = None
    matchFields: list[Expression] | None = None


class RequiredNodes(Struct, gc=False):
    nodeSelectorTerms: list[AffinityTerm] | None = None


class NodeAffinity(Struct, gc=False):
    requiredDuringSchedulingIgnoredDuringExecution: RequiredNodes | None = None


class Affinity(Struct, gc=False):
    nodeAffinity: NodeAffinity | None = None


class Toleration(Struct, gc=False):
    key: str | None = None
    operator: str | None = None
    value: str | None = None
    effect: str | None = None


class LabelSelector(Struct, gc=False):
    matchLabels: dict[str, str] | None = None
    matchExpressions: list[Expression] | None = None


class BudgetSpec(Struct, gc=False):
    selector: LabelSelector | None = None


class BudgetStatus(Struct, gc=False):
    disruptionsAllowed: int | None = None


class BudgetObject(Object, gc=False):
    spec: BudgetSpec | None = None
    status: BudgetStatus | None = None


class PodReference(Struct, gc=False):
    name: str | None = None
    uid: str | None = None


class EvictionTarget(Struct, gc=False):
    pod: PodReference | None = None


class EvictionSpec(Struct, gc=False):
    target: EvictionTarget | None = None


class EvictionRequester(Struct, gc=False):
    name: str | None = None
    intent: str | None = None


class TargetResponder(Struct, gc=False):
    name: str | None = None
    state: str | None = None


class Responder(Struct, gc=False):
    name: str | None = None
    startTime: Any = None
    heartbeatTime: Any = None
    message: Any = None
    expectedCompletionTime: Any = None


class EvictionCondition(Struct, gc=False):
    type: str | None = None
    status: str | None = None
    reason: Any = None
    lastTransitionTime: Any = None


class EvictionStatus(Struct, gc=False):
    requesters: list[EvictionRequester] | None = None
    targetResponders: list[TargetResponder] | None = None
    responders: list[Responder] | None = None
    conditions: list[EvictionCondition] | None = None


class EvictionObject(Object, gc=False):
    spec: EvictionSpec | None = None
    status: EvictionStatus | None = None


class KubeVirtStatus(Struct, gc=False):
    outdatedVirtualMachineInstanceWorkloads: int | None = None


class KubeVirtObject(Object, gc=False):
    spec: KubeVirtSpec | None = None
    status: KubeVirtStatus | None = None
