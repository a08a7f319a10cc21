"""Reads facts (`engine.facts.model`) from decoded objects; for an unusable one, returns a message.

Strings that many objects share (namespaces, nodes, a VMI's name in its VMIMs) are interned, which
saves 0.9 kB per VMI. An empty string, null and an absent field are equivalent. Sources: KubeVirt's
`staging/src/kubevirt.io/api/core/v1/types.go`; for the labels and annotations of launcher pods
`pkg/virt-controller/services/template.go` and `watch/descheduler`.
"""

import math
import re
from collections.abc import Set as AbstractSet
from functools import lru_cache
from sys import intern
from typing import Any

import msgspec

from exporter.engine.facts.model import (
    Budget,
    KubeVirtSettings,
    MigrationLimits,
    MigrationState,
    Outcome,
    Pod,
    Priority,
    Seconds,
    Trigger,
    Vmi,
    Vmim,
)
from exporter.engine.facts.placement import Requirement
from exporter.engine.facts.states import VMIM_CONDITIONS, State
from exporter.errors import MALFORMED
from exporter.kube.objects import wire
from exporter.kube.objects.instants import parse_instant
from exporter.kube.objects.places import read_placement
from exporter.text import clean


EVICTION_IN_PROGRESS = "descheduler.alpha.kubernetes.io/eviction-in-progress"
EVACUATION = "kubevirt.io/evacuationMigration"
WORKLOAD_UPDATE = "kubevirt.io/workloadUpdateMigration"
VOLUME_UPDATE = "kubevirt.io/volume-update-migration"
HOTPLUGS = ("HotVCPUChange", "HotMemoryChange")
"""A VMI has one of these conditions while a migration changes its CPUs or memory."""
MODIFIED_BY = "kubevirt.io/last-modified-by"
"""The user who made a VMIM; from KubeVirt 1.10 on, only virt-api may set it (VEP 373)."""
USER_LIMIT = 253
NAME_LIMIT = 63
EVICTION_SOURCE = "kubevirt.io/eviction-source"
CREATED_BY = "kubevirt.io/created-by"
MIGRATION_UID = "kubevirt.io/migrationJobUID"
_OWN_LABELS = frozenset({CREATED_BY, MIGRATION_UID, "kubevirt.io/nodeName"})
"""These labels differ from pod to pod. No user's PodDisruptionBudget selects by them."""
_VMI_KIND = "VirtualMachineInstance"
"""The end of the kind of a VMI, which may have a prefix (`KubeVirtNames`)."""
_HANDED_OFF_PHASES = frozenset(
    {"Scheduled", "PreparingTarget", "TargetReady", "Running", "Succeeded"}
)
"""A VMIM reaches these phases only after `handleTargetPodHandoff`."""
_SYNC_PHASES = frozenset({"WaitingForSync", "Synchronizing"})
"""In these phases the two halves of a decentralised migration wait for each other."""
_UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12} | {
    f"{prefix}i": 2 ** (10 * power) for power, prefix in enumerate("KMGT", 1)
}
_QUANTITY = re.compile(r"(\d+(?:\.\d*)?)([a-zA-Z]*)", re.ASCII)
_OUTCOMES = {"Succeeded": Outcome.SUCCEEDED, "Failed": Outcome.FAILED}
"""The final phases of a VMIM."""
_NAMED = msgspec.json.Decoder(list[wire.Named]).decode
_PRIORITIES = {priority.value: priority for priority in Priority}
_NO_VMI_STATUS, _NO_VMI_SPEC = wire.VmiStatus(), wire.VmiSpec()
_NO_VMIM_STATUS, _NO_STATE = wire.VmimStatus(), wire.ReportedState()
_NONE: frozenset[str] = frozenset()


def read_vmi(body: wire.VmiObject) -> Vmi | str:
    """A VMI. A condition counts only if it is True, except for `migratable_unknown`."""
    metadata = body.metadata
    if not metadata.uid:
        return "metadata.uid: expected a UID, there is none"
    status, spec = body.status or _NO_VMI_STATUS, body.spec or _NO_VMI_SPEC
    state, reported = status.migrationState, status.conditions or ()
    conditions = {c.type: c for c in reported if c.status == "True"}
    requested = conditions.get("EvictionRequested")
    annotations = metadata.annotations or {}
    migratable = "LiveMigratable" in conditions
    disks = status.volumeStatus or ()
    return Vmi(
        namespace=intern(metadata.namespace or ""),
        name=intern(metadata.name or ""),
        uid=metadata.uid,
        created=parse_instant(metadata.creationTimestamp),
        node=intern(status.nodeName or ""),
        evacuation_node=intern(status.evacuationNodeName or ""),
        migration=None if state is None else _read_state(state, spec, status),
        other_uids=() if state is None else _other_uids(state),
        eviction_strategy=intern(spec.evictionStrategy or ""),
        eviction_requested_at=(
            None if requested is None else parse_instant(requested.lastTransitionTime)
        ),
        evicted_by_descheduler=annotations.get(EVICTION_SOURCE) == "descheduler",
        migratable=migratable,
        migratable_unknown=not migratable and all(c.type != "LiveMigratable" for c in reported),
        hotplugs=not conditions.keys().isdisjoint(HOTPLUGS),
        phase=intern(status.phase or ""),
        deleted_at=parse_instant(metadata.deletionTimestamp),
        hotplugs_volumes=bool(disks) and any(disk.hotplugVolume is not None for disk in disks),
        copies_disks=_copies_disks(status),
        placement=read_placement(spec),
        paused="Paused" in conditions,
        utility_volumes=_read_names(spec.utilityVolumes),
    )


def _copies_disks(status: wire.VmiStatus) -> bool:
    return status.migrationMethod == "BlockMigration" or bool(status.migratedVolumes)


def _read_names(raw: msgspec.Raw) -> tuple[str, ...]:
    """The names in a list of objects that have names; empty if it cannot be read."""
    try:
        named = _NAMED(raw) if raw else None
    except MALFORMED:
        return ()
    return tuple(clean(entry.name or "", NAME_LIMIT) for entry in named or ())


def _read_time_limit(
    state: wire.ReportedState, spec: wire.VmiSpec, status: wire.VmiStatus
) -> Seconds | None:
    """How long KubeVirt lets a migration copy the VM's memory and disks.

    `completionTimeoutPerGiB` for each GB, rounded up (`live-migration-source.go`,
    `getVMIMigrationDataSize`). None if a size is unknown, as that of a container disk's changes.
    """
    configuration = state.migrationConfiguration
    if spec.domain is None or configuration is None or not configuration.completionTimeoutPerGiB:
        return None
    memory, resources = spec.domain.memory, spec.domain.resources
    size = None if memory is None else _read_quantity(memory.guest)
    if size is None and resources is not None:
        size = _read_quantity((resources.requests or {}).get("memory"))
    disks = _measure_disks(status)
    if size is None or disks is None:
        return None
    return float(configuration.completionTimeoutPerGiB * math.ceil((size + disks) / _UNITS["G"]))


def _measure_disks(status: wire.VmiStatus) -> float | None:
    """The bytes of the disks that a migration copies (`GetTotalSizeMigratedVolumes`)."""
    if not status.migratedVolumes:
        return None if _copies_disks(status) else 0.0
    total = 0.0
    for volume in status.migratedVolumes:
        claim = volume.sourcePVCInfo or wire.Claim()
        sizes = (claim.capacity or {}).get("storage"), (claim.requests or {}).get("storage")
        known = [size for size in map(_read_quantity, sizes) if size is not None]
        if not known:
            return None
        total += min(known)
    return total


@lru_cache(maxsize=1024)
def _parse_quantity(quantity: str) -> float | None:
    """A Kubernetes quantity as a number, or None if it is not one with a suffix of `_UNITS`."""
    match = _QUANTITY.fullmatch(quantity)
    if match is None or match[2] not in _UNITS:
        return None
    return float(match[1]) * float(_UNITS[match[2]])


def _read_quantity(quantity: Any) -> float | None:
    """A quantity of memory in bytes, or None if it is no such quantity."""
    if isinstance(quantity, int) and not isinstance(quantity, bool):
        return float(quantity)
    return _parse_quantity(quantity) if isinstance(quantity, str) else None


def _read_state(
    state: wire.ReportedState, spec: wire.VmiSpec, status: wire.VmiStatus
) -> MigrationState:
    end = state.endTimestamp
    ended = end is not None and end != ""
    return MigrationState(
        uid=state.migrationUid or "",
        start=parse_instant(state.startTimestamp),
        ended=ended,
        end=parse_instant(end),
        outcome=_state_outcome(state),
        mode=intern(state.mode or ""),
        source_node=intern(state.sourceNode or ""),
        target_node=intern(state.targetNode or ""),
        time_limit=None if ended else _read_time_limit(state, spec, status),
    )


def _state_outcome(state: wire.ReportedState) -> Outcome:
    """The outcome of a migration; `completed` is true even if it failed."""
    if state.failed:
        return Outcome.FAILED
    return Outcome.SUCCEEDED if state.completed else Outcome.UNKNOWN


def _other_uids(state: wire.ReportedState) -> tuple[str, ...]:
    halves = (state.sourceState, state.targetState)
    uids = [half.migrationUID for half in halves if half is not None and half.migrationUID]
    return tuple([uid for uid in uids if uid != state.migrationUid])


def read_vmim(body: wire.VmimObject) -> Vmim | str:
    """A VMIM."""
    metadata, spec = body.metadata, body.spec or wire.VmimSpec()
    if not spec.vmiName:
        return "spec.vmiName: expected the name of a VMI, there is none"
    status = body.status or _NO_VMIM_STATUS
    state = status.migrationState or _NO_STATE
    phase = status.phase or ""
    outcome = _OUTCOMES.get(phase)
    # The first transition to a phase counts.
    transitions = reversed(status.phaseTransitionTimestamps or ())
    entered = {t.phase: t.phaseTransitionTimestamp for t in transitions}
    annotations = metadata.annotations or {}
    # Most VMIMs are final and have no conditions.
    met = {c.type for c in status.conditions if c.status == "True"} if status.conditions else _NONE
    end = parse_instant(state.endTimestamp)
    return Vmim(
        namespace=intern(metadata.namespace or ""),
        name=metadata.name or "",
        uid=metadata.uid or "",
        vmi_name=intern(spec.vmiName),
        created=parse_instant(metadata.creationTimestamp),
        phase=intern(phase),
        finished=outcome is not None,
        finished_at=None if outcome is None else parse_instant(entered.get(phase)),
        scheduling_at=parse_instant(entered.get("Scheduling")),
        scheduled_at=parse_instant(entered.get("Scheduled")),
        # KubeVirt copies `migrationState` from the VMI, which has it only after the hand-off.
        handed_off=end is not None
        or phase in _HANDED_OFF_PHASES
        or not _HANDED_OFF_PHASES.isdisjoint(entered)
        or bool(metadata.uid and state.migrationUid == metadata.uid),
        start=parse_instant(state.startTimestamp),
        end=end,
        outcome=max(_state_outcome(state), outcome or Outcome.UNKNOWN),
        evacuates=intern(text_of(annotations.get(EVACUATION))),
        trigger=_read_trigger(annotations, metadata.labels or {}),
        priority=_PRIORITIES.get(spec.priority or ""),
        wait_reason=_read_wait_reason(phase, met),
        aborted="migrationAbortRequested" in met,
        deleting=bool(metadata.deletionTimestamp),
        source_node=intern(state.sourceNode or ""),
        target_node=intern(state.targetNode or ""),
        modified_by=(
            intern(clean(text_of(annotations[MODIFIED_BY]), USER_LIMIT))
            if MODIFIED_BY in annotations
            else ""
        ),
    )


def _read_wait_reason(phase: str, met: AbstractSet[str | None]) -> State | None:
    if phase in _SYNC_PHASES:
        return State.WAITING_FOR_SYNC
    if not met:
        return None
    return next((wait.state for kind, wait in VMIM_CONDITIONS.items() if kind in met), None)


def _read_trigger(annotations: dict[str, Any], labels: dict[str, Any]) -> Trigger:
    """Why a VMIM was created. The annotation of a workload update is present, but empty."""
    if EVACUATION in annotations:
        return Trigger.EVACUATION
    if VOLUME_UPDATE in labels:
        return Trigger.VOLUME_UPDATE
    return Trigger.WORKLOAD_UPDATE if WORKLOAD_UPDATE in annotations else Trigger.MANUAL


def read_pod(body: wire.PodObject) -> Pod:
    """A launcher pod."""
    metadata, status = body.metadata, body.status or wire.PodStatus()
    labels, annotations = metadata.labels or {}, metadata.annotations or {}
    met = {c.type: c.status for c in status.conditions or []}
    gated = bool(body.spec and body.spec.schedulingGates) and met.get("PodScheduled") != "True"
    owners = (
        owner.uid
        for owner in metadata.ownerReferences or ()
        if (owner.kind or "").endswith(_VMI_KIND) and owner.uid
    )
    return Pod(
        namespace=intern(metadata.namespace or ""),
        name=metadata.name or "",
        uid=metadata.uid or "",
        vmi_uid=next(owners, None) or text_of(labels.get(CREATED_BY)),
        node=intern((body.spec.nodeName if body.spec else None) or ""),
        phase=intern(status.phase or ""),
        created=parse_instant(metadata.creationTimestamp),
        ready=met.get("Ready") == "True",
        scheduled=met.get("PodScheduled") == "True",
        unschedulable=met.get("PodScheduled") == "False" and not gated,
        gated=gated,
        deleted_at=parse_instant(metadata.deletionTimestamp),
        eviction_in_progress=EVICTION_IN_PROGRESS in annotations,
        migration_uid=text_of(labels.get(MIGRATION_UID)),
        labels=_share_labels(
            tuple(
                (intern(key), intern(value))
                for key, value in labels.items()
                if key not in _OWN_LABELS and isinstance(value, str)
            )
        ),
    )


@lru_cache(maxsize=4096)
def _share_labels(labels: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
    """Return the same tuple for all pods with the same labels."""
    return labels


def read_kubevirt(body: wire.KubeVirtObject) -> KubeVirtSettings:
    """The migration limits (if not set, KubeVirt's defaults) and the evictionStrategy."""
    spec = body.spec or wire.KubeVirtSpec()
    configuration = spec.configuration or wire.KubeVirtConfiguration()
    migrations = configuration.migrations or wire.Migrations()
    defaults = MigrationLimits()
    cluster = migrations.parallelMigrationsPerCluster
    per_node = migrations.parallelOutboundMigrationsPerNode
    return KubeVirtSettings(
        MigrationLimits(
            cluster=defaults.cluster if cluster is None else cluster,
            outbound_per_node=defaults.outbound_per_node if per_node is None else per_node,
        ),
        intern(configuration.evictionStrategy or ""),
        drain_taint=migrations.nodeDrainTaintKey or KubeVirtSettings().drain_taint,
        updating=bool(body.status and body.status.outdatedVirtualMachineInstanceWorkloads),
        namespace=intern(body.metadata.namespace or ""),
    )


def read_budget(body: wire.BudgetObject) -> Budget:
    """A PodDisruptionBudget. Without a selector it selects no pod, so it forbids nothing.

    KubeVirt's own budgets count as forbidding nothing: they are for VMs that KubeVirt migrates.
    """
    metadata, selector = body.metadata, body.spec.selector if body.spec else None
    wanted = selector or wire.LabelSelector()
    requirements = [Requirement(k, "In", (v,)) for k, v in (wanted.matchLabels or {}).items()]
    requirements += [
        Requirement(expression.key, expression.operator, tuple(expression.values or ()))
        for expression in wanted.matchExpressions or ()
    ]
    is_kubevirt_s = any(requirement.key == CREATED_BY for requirement in requirements)
    allowed = body.status.disruptionsAllowed if body.status else None
    return Budget(
        namespace=intern(metadata.namespace or ""),
        name=metadata.name or "",
        forbids=selector is not None and allowed == 0 and not is_kubevirt_s,
        selector=tuple(requirements),
    )


def text_of(value: object) -> str:
    """The value if it is a string, else ""."""
    return value if isinstance(value, str) else ""
