"""The values of the engine that are read from a cluster.

Instants are Unix seconds (UTC) and durations are seconds. Both are floats, because the engine
compares and adds millions of them. They are formatted for JSON and pages only.
"""

from enum import IntEnum, StrEnum
from typing import Annotated, NamedTuple, TypeAlias

from msgspec import Meta, Struct

from exporter.engine.facts.placement import Placement, Requirement
from exporter.engine.facts.states import State


Instant: TypeAlias = Annotated[float, Meta(ge=-62_135_596_800, lt=253_402_300_800)]
"""A stored instant is in the years 1 to 9999, because RFC 3339 allows no other years."""
Seconds: TypeAlias = float

DRAIN_TAINT = "kubevirt.io/drain"
"""KubeVirt's default of `spec.configuration.migrations.nodeDrainTaintKey`."""
CLOCK_SKEW: Seconds = 300.0
"""How far the end of a migration may lie ahead of our clock and still count as now."""


class Checkpoint(StrEnum):
    """An extension point of the descheduler: Filter or PreEvictionFilter."""

    FILTER = "filter"
    PRE_EVICTION = "preEviction"


class Mismatch(StrEnum):
    """Why a candidate is not a VMI of this cluster."""

    UNKNOWN = "unknown"
    UID = "uid"


class Outcome(IntEnum):
    """How a migration ended; if two sources differ, the greater value is right."""

    UNKNOWN = 0
    SUCCEEDED = 1
    FAILED = 2


class Priority(StrEnum):
    """The values of a VMIM's `spec.priority` (KubeVirt 1.9; since 1.7 behind a feature gate)."""

    SYSTEM_CRITICAL = "system-critical"
    SYSTEM_MAINTENANCE = "system-maintenance"


class Trigger(StrEnum):
    """Why a migration was created."""

    EVACUATION = "evacuation"
    WORKLOAD_UPDATE = "workload_update"
    HOTPLUG = "hotplug"
    """A workload update that changes the CPUs or memory of a VMI. The VMIM does not show this."""
    VOLUME_UPDATE = "volume_update"
    MANUAL = "manual"


class EndReason(StrEnum):
    """Why a migration failed, or `NONE`; these are the values in the log and in metrics."""

    UNSCHEDULABLE = "unschedulable"
    IMAGE = "image"
    QUOTA = "quota"
    ABORTED = "aborted"
    TIMEOUT_PROGRESS = "timeout_progress"
    TIMEOUT_COMPLETION = "timeout_completion"
    POST_COPY_LOST = "post_copy_lost"
    TARGET_LOST = "target_lost"
    SOURCE_LOST = "source_lost"
    LIBVIRT = "libvirt"
    OTHER = "other"
    NONE = "none"


class WhySource(StrEnum):
    """The field that a reason was read from."""

    LIVE_MIGRATABLE = "LiveMigratable"
    """The VMI's condition of this name, if it is false."""
    POD_SCHEDULED = "PodScheduled"
    """The condition of an attempt's target pod, if it is false; it has the scheduler's message.

    A reason that names the node selectors of the VMI and of the attempt has this source too.
    """
    TARGET_CONTAINER = "TargetContainer"
    """A container of an attempt's target pod that waits or has terminated."""
    TARGET_POD = "TargetPod"
    """A condition of an attempt's target pod, if it is false: its network and volumes, or its init
    containers."""
    HOTPLUG = "Hotplug"
    """A condition of the VMI that keeps KubeVirt from finishing a migration that has ended."""
    FAILED_ATTEMPT = "FailedAttempt"
    """A failed VMIM, or `migrationState.failureReason` of the VMI."""
    MIGRATION_CONDITION = "MigrationCondition"
    """A condition of the VMIM that keeps it Pending: quota, backup, utility volumes."""
    DELETION = "Deletion"
    """The finalizers that its deletion waits for, or why the VM's own pod is being deleted."""
    NODE = "Node"
    """The condition Ready of the VM's node or of the target's node, if it is Unknown; or why no
    other node can take the VM."""
    POD_DISRUPTION_BUDGET = "PodDisruptionBudget"
    """A budget that selects the VM's pod and allows no disruption; `reason` is its name."""


class Resource(StrEnum):
    """The resources that are watched or written, by their plural names."""

    VMIS = "virtualmachineinstances"
    VMIMS = "virtualmachineinstancemigrations"
    PODS = "pods"
    KUBEVIRTS = "kubevirts"
    NODES = "nodes"
    BUDGETS = "poddisruptionbudgets"
    EVICTIONS = "evictions"
    """The Evictions of lifecycle.k8s.io, and not the subresource of pods."""
    LEASES = "leases"


EVIDENCE_RESOURCES = (Resource.VMIS, Resource.VMIMS, Resource.PODS, Resource.KUBEVIRTS)
"""The resources that verdicts and diagnoses need."""
OPTIONAL_RESOURCES = (Resource.NODES, Resource.BUDGETS, Resource.EVICTIONS)
"""The resources that no verdict and no diagnosis needs."""
CLUSTER_RESOURCES = (*EVIDENCE_RESOURCES, Resource.NODES, Resource.BUDGETS)
"""The resources that are always watched. Evictions are watched unless a setting says no, and the
others are written."""
CLUSTER_SCOPED = frozenset({Resource.KUBEVIRTS, Resource.NODES})
"""The watched resources that have one watch for the whole cluster."""


class Requester(Struct, frozen=True, order=True, gc=False):
    """Who asked for an eviction or made a VMIM, and when."""

    at: Instant
    user: str


class MigrationState(Struct, frozen=True, gc=False, omit_defaults=True):
    """`status.migrationState`: the last migration that was handed off to a target pod.

    `ended` is true if there is an end timestamp, even one that cannot be parsed (then `end` is
    None). `source_node` is the node that the VMI left or is leaving. `failure` is why it failed, if
    it did; `OTHER` if KubeVirt does not say. `time_limit`: how long KubeVirt lets it copy; None if
    that is unknown, or if it has ended.
    """

    uid: str = ""
    start: Instant | None = None
    ended: bool = False
    end: Instant | None = None
    outcome: Outcome = Outcome.UNKNOWN
    mode: str = ""
    source_node: str = ""
    target_node: str = ""
    failure: EndReason = EndReason.OTHER
    time_limit: Seconds | None = None

    @property
    def running(self) -> bool:
        """Whether the migration has a start and no end."""
        return self.start is not None and not self.ended


class Mobility(Struct, frozen=True, gc=False):
    """The facts of a VMI that decide how a drain treats it.

    `strategy` is the VMI's own evictionStrategy, "" if it has none. `migrating`: the VMI has to
    wait, because it is being migrated, or KubeVirt has not yet set its condition LiveMigratable.
    `placement` is what it requires of a node.
    """

    strategy: str
    migratable: bool
    migrating: bool
    placement: Placement = Placement()


NodeMobility: TypeAlias = tuple[str, Mobility]
"""The node of a VMI and its mobility."""


class Why(Struct, frozen=True, gc=False):
    """A reason as a cluster object gives it, cleaned and shortened (`kube.objects.reasons`).

    `reason` is one word, from the field of that name; `message` is free text. `at` is the date of
    the reason in the cluster; None if it has no date, as for LiveMigratable.
    """

    source: WhySource
    reason: str = ""
    message: str = ""
    at: Instant | None = None


class Vmi(Struct, frozen=True, kw_only=True, gc=False, omit_defaults=True):
    """One VirtualMachineInstance: the fields that verdicts and diagnoses use.

    `other_uids` are the migration UIDs of a decentralised migration's two halves.
    `eviction_requested_at` is when its condition EvictionRequested was set (since KubeVirt 1.7).
    `evicted_by_descheduler`: it has the annotation eviction-source, which may be of an older
    request. `migratable_unknown`: it has no condition LiveMigratable yet, for example while it
    boots. `hotplugs`: its CPUs or memory are being changed. `deleted_at`: its deletionTimestamp,
    at which the grace period of its deletion ends. `hotplugs_volumes`: it has hot-plugged volumes,
    which pods of their own attach. `copies_disks`: a migration copies disks too, and not only
    memory. `override`: the name of the entry of `policy.overrides` that applies to it.
    """

    namespace: str
    name: str
    uid: str
    created: Instant | None = None
    node: str = ""
    evacuation_node: str = ""
    migration: MigrationState | None = None
    other_uids: tuple[str, ...] = ()
    eviction_strategy: str = ""
    eviction_requested_at: Instant | None = None
    evicted_by_descheduler: bool = False
    migratable: bool = False
    migratable_unknown: bool = False
    hotplugs: bool = False
    phase: str = ""
    deleted_at: Instant | None = None
    hotplugs_volumes: bool = False
    copies_disks: bool = False
    placement: Placement = Placement()
    paused: bool = False
    utility_volumes: tuple[str, ...] = ()
    override: str = ""

    @property
    def finished(self) -> bool:
        """Whether the VM has stopped for good; KubeVirt does not change its status any more."""
        return self.phase in ("Succeeded", "Failed")

    @property
    def unsettled(self) -> bool:
        """Whether it is being deleted, or its last migration has not ended."""
        state = self.migration
        return self.deleted_at is not None or (
            state is not None and bool(state.uid) and not state.ended
        )

    @property
    def is_external(self) -> bool:
        """Whether somebody other than KubeVirt has to evacuate the VMI."""
        return self.eviction_strategy == "External"

    def leaves_when_evicted(self, settings: "KubeVirtSettings") -> bool:
        """Whether KubeVirt migrates the VMI if its node is drained (`VMIMigratableOnEviction`)."""
        strategy = self.eviction_strategy or settings.eviction_strategy
        return strategy == "LiveMigrate" or (
            strategy == "LiveMigrateIfPossible" and self.migratable
        )

    @property
    def mobility(self) -> Mobility:
        """The facts in the VMI itself that decide how a drain treats it."""
        unknown = self.migratable_unknown
        migrating = self.migration is not None and self.migration.running
        return Mobility(
            self.eviction_strategy,
            self.migratable or unknown,
            migrating or unknown,
            self.placement,
        )


class Vmim(Struct, frozen=True, kw_only=True, gc=False, omit_defaults=True):
    """One VirtualMachineInstanceMigration: an attempt to move the VMI that it names.

    `finished` is true in the phases Succeeded and Failed, `finished_at` is when it reached that
    phase, and `scheduling_at` and `scheduled_at` are when it reached Scheduling and Scheduled.
    `handed_off`: KubeVirt has handed the
    migration off to its target pod. `evacuates` is the node that the VMIM evacuates, "" if it is no
    evacuation. `aborted`: it was deleted before it ended; `deleting`: it has a deletion timestamp.
    `source_node`, `target_node` and `failure` are those of its copy of the VMI's `migrationState`.
    `wait_reason`: what a condition or its phase says it waits for. `modified_by` is the user who
    made it, if KubeVirt says so (since 1.10).
    """

    namespace: str
    name: str
    uid: str = ""
    vmi_name: str
    created: Instant | None = None
    phase: str = ""
    finished: bool = False
    finished_at: Instant | None = None
    scheduling_at: Instant | None = None
    scheduled_at: Instant | None = None
    handed_off: bool = False
    start: Instant | None = None
    end: Instant | None = None
    outcome: Outcome = Outcome.UNKNOWN
    evacuates: str = ""
    trigger: Trigger = Trigger.MANUAL
    priority: Priority | None = None
    wait_reason: State | None = None
    aborted: bool = False
    deleting: bool = False
    source_node: str = ""
    target_node: str = ""
    failure: EndReason = EndReason.OTHER
    modified_by: str = ""

    @property
    def retried(self) -> bool:
        """Whether KubeVirt's retry backoff applies (`handleMigrationBackoff`)."""
        return self.trigger is not Trigger.MANUAL


KILLED_WITHIN: Seconds = 60.0
"""A kubelet kills within seconds what still runs at the end of a pod's grace period."""


class Pod(Struct, frozen=True, kw_only=True, gc=False, omit_defaults=True):
    """One virt-launcher pod. `vmi_uid` is the VMI that owns it, in the pod's own namespace.

    `gated`: a scheduling gate keeps the scheduler from looking at it; `unschedulable`: the
    scheduler has found no node for it. `deleted_at` is its deletionTimestamp, at which its grace
    period ends.
    `labels` are the pod's labels by which a budget may select the pod.
    """

    namespace: str
    name: str
    uid: str
    vmi_uid: str
    node: str = ""
    phase: str = ""
    created: Instant | None = None
    ready: bool = False
    scheduled: bool = False
    unschedulable: bool = False
    gated: bool = False
    deleted_at: Instant | None = None
    eviction_in_progress: bool = False
    migration_uid: str = ""
    labels: tuple[tuple[str, str], ...] = ()

    @property
    def finished(self) -> bool:
        """Whether all containers have terminated."""
        return self.phase in ("Succeeded", "Failed")

    def hangs(self, now: Instant) -> bool:
        """Whether it is being deleted, and goes on after the end of its grace period."""
        is_late = self.deleted_at is not None and now - self.deleted_at > KILLED_WITHIN
        return is_late and not self.finished


class MigrationLimits(Struct, frozen=True, gc=False, omit_defaults=True):
    """How many migrations KubeVirt runs at once (`KubeVirt.spec.configuration.migrations`).

    The defaults are KubeVirt's own (`pkg/virt-config/virt-config.go`).
    """

    cluster: int = 5
    outbound_per_node: int = 2


class KubeVirtSettings(Struct, frozen=True, gc=False, omit_defaults=True):
    """The settings and the status that are read from the KubeVirt object.

    `eviction_strategy` is for VMIs without one; "" is KubeVirt's own default, None. `drain_taint`:
    the key of the taint that makes KubeVirt evacuate a node. `updating`: KubeVirt reports VMIs that
    it still has to update (`outdatedVirtualMachineInstanceWorkloads`).
    """

    limits: MigrationLimits = MigrationLimits()
    eviction_strategy: str = ""
    drain_taint: str = DRAIN_TAINT
    updating: bool = False
    namespace: str = ""


class Taint(NamedTuple):
    """A taint that keeps pods away, and when it was added; None if that is unknown."""

    key: str
    added: Instant | None = None
    value: str = ""


class Node(Struct, frozen=True, kw_only=True, gc=False):
    """One node. `cordoned_at`: when it was made unschedulable (the taint's `timeAdded`).

    `taints` has all other taints with the effect NoSchedule, `evicting` those with NoExecute.
    `conditions` has the conditions about drains (Kubernetes 1.37) that are true. `is_ready` is
    false if its condition Ready is not True. `is_silent`: that condition is Unknown, because its
    kubelet does not answer; `silent_since` is since when, if that is known. `takes_vms` is false if
    KubeVirt has marked it with `kubevirt.io/schedulable=false`, for example because its
    virt-handler does not answer.
    """

    name: str
    schedulable: bool = True
    cordoned_at: Instant | None = None
    taints: tuple[Taint, ...] = ()
    evicting: tuple[Taint, ...] = ()
    conditions: tuple[str, ...] = ()
    is_ready: bool = True
    is_silent: bool = False
    silent_since: Instant | None = None
    takes_vms: bool = True
    labels: tuple[tuple[str, str], ...] = ()

    def find_taint(self, key: str) -> Taint | None:
        """The taint with this key, or None."""
        return next((taint for taint in self.taints if taint.key == key), None)


class Budget(Struct, frozen=True, kw_only=True, gc=False):
    """One PodDisruptionBudget; `forbids`: it allows no disruption of the pods that it selects."""

    namespace: str
    name: str
    forbids: bool = False
    selector: tuple[Requirement, ...] = ()

    def selects(self, pod: Pod) -> bool:
        """Whether the budget selects a pod of its namespace; an empty `selector` selects all."""
        labels = dict(pod.labels)
        return all(requirement.is_met(labels) for requirement in self.selector)


class EvictionRequester(Struct, frozen=True, gc=False):
    """Who has made an EvictionRequest, and its intent: Eviction or Withdrawn."""

    name: str
    intent: str


class Eviction(Struct, frozen=True, kw_only=True, gc=False, omit_defaults=True):
    """One Eviction of lifecycle.k8s.io: the EvictionRequests for one pod, and their responders.

    `responders` are the names of all. `responder` is the one whose turn it is, or was last, in the
    `state` that the controller wrote; its turn began at `started_at`, and it last wrote at
    `heartbeat_at`. `message` is what it says, and `expected_at` when it expects to be done.
    `failed` is the reason of the condition Failed if it is true, and `failed_at` since when it is.
    `evicted`: the pod is gone. `by_descheduler`: one of the requesters is a descheduler, according
    to the settings.
    """

    namespace: str
    name: str
    uid: str
    pod: str
    pod_uid: str
    created: Instant | None = None
    requesters: tuple[EvictionRequester, ...] = ()
    responders: tuple[str, ...] = ()
    responder: str = ""
    state: str = ""
    started_at: Instant | None = None
    heartbeat_at: Instant | None = None
    message: str = ""
    expected_at: Instant | None = None
    evicted: bool = False
    failed: str = ""
    failed_at: Instant | None = None
    by_descheduler: bool = False

    @property
    def is_open(self) -> bool:
        """Whether it has not ended."""
        return not self.evicted and not self.failed

    @property
    def askers(self) -> tuple[str, ...]:
        """The requesters who still want the pod evicted."""
        wanted = (requester.name for requester in self.requesters if requester.intent == "Eviction")
        return tuple(wanted) if self.is_open else ()

    @property
    def is_withdrawn(self) -> bool:
        """Whether it ended because nobody asks any more."""
        return self.failed == "CanceledDueToNoRequesters"

    def is_turn_of(self, responder: str) -> bool:
        """Whether this responder has to act now."""
        return self.is_open and self.responder == responder and self.state == "Active"


Fact: TypeAlias = Vmi | Vmim | Pod | KubeVirtSettings | Node | Budget | Eviction
"""A value that is read from one object of the cluster."""
