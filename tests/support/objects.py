"""Writes facts as objects of the cluster: the inverse of parsing."""

from typing import Any, assert_never

from exporter.engine.evacuations.ended_migrations import FAILURE_TEXTS
from exporter.engine.facts.model import (
    Budget,
    ConfigMap,
    EndReason,
    Fact,
    KubeVirtSettings,
    MigrationState,
    Node,
    Outcome,
    Pod,
    Trigger,
    Vmi,
    Vmim,
)
from exporter.engine.facts.states import VMIM_CONDITIONS
from exporter.kube.objects.facts import (
    CREATED_BY,
    EVACUATION,
    EVICTION_IN_PROGRESS,
    EVICTION_SOURCE,
    HOTPLUGS,
    MIGRATION_UID,
    VOLUME_UPDATE,
    WORKLOAD_UPDATE,
)
from exporter.text import write_instant, write_optional_instant


_UNREAD = "unreadable"
"""Written for a timestamp that was present but unreadable."""


def write_object(fact: Fact) -> dict[str, Any]:
    """Write the smallest object that is parsed as this fact.

    It has no users and no labels of pods, and of the text of a failure only the part that
    `classify_text` knows. Raises TypeError for nodes, budgets and ConfigMaps.
    """
    match fact:
        case Vmi():
            return _write_vmi(fact)
        case Vmim():
            return _write_vmim(fact)
        case Pod():
            return _write_pod(fact)
        case KubeVirtSettings():
            return _write_kubevirt(fact)
        case Node() | Budget() | ConfigMap():
            raise TypeError(f"there is no object for a {type(fact).__name__}")
        case _:
            assert_never(fact)


def _write_vmi(vmi: Vmi) -> dict[str, Any]:
    conditions = []
    if not vmi.migratable_unknown:
        conditions = [{"type": "LiveMigratable", "status": "True" if vmi.migratable else "False"}]
    if vmi.hotplugs:
        conditions.append({"type": HOTPLUGS[0], "status": "True"})
    if vmi.eviction_requested_at is not None:
        at = write_instant(vmi.eviction_requested_at)
        conditions.append({"type": "EvictionRequested", "status": "True", "lastTransitionTime": at})
    notes = {EVICTION_SOURCE: "descheduler"} if vmi.evicted_by_descheduler else {}
    state, domain = None, None
    if vmi.migration is not None:
        state = _write_state(vmi.migration, vmi.other_uids)
        limit = vmi.migration.time_limit
        if limit is not None:  # as that of a VM with 1 GB, because its size is not recorded
            state["migrationConfiguration"] = {"completionTimeoutPerGiB": round(limit)}
            domain = {"memory": {"guest": "1G"}}
    return _omit_empty(
        metadata=_write_metadata(vmi, annotations=notes),
        spec=_omit_empty(evictionStrategy=vmi.eviction_strategy, domain=domain),
        status=_omit_empty(
            phase=vmi.phase,
            nodeName=vmi.node,
            evacuationNodeName=vmi.evacuation_node,
            conditions=conditions,
        )
        | ({} if state is None else {"migrationState": state}),
    )


def _write_state(state: MigrationState, other_uids: tuple[str, ...] = ()) -> dict[str, Any]:
    halves = zip(("sourceState", "targetState"), other_uids, strict=False)
    return _omit_empty(
        migrationUid=state.uid,
        startTimestamp=write_optional_instant(state.start),
        endTimestamp=write_optional_instant(state.end)
        if state.end is not None or not state.ended
        else _UNREAD,
        completed=state.outcome is not Outcome.UNKNOWN,
        failed=state.outcome is Outcome.FAILED,
        mode=state.mode,
        sourceNode=state.source_node,
        targetNode=state.target_node,
        failureReason=next((text for text, one in FAILURE_TEXTS if one is state.failure), ""),
    ) | {half: {"migrationUID": uid} for half, uid in halves}


def _write_vmim(vmim: Vmim) -> dict[str, Any]:
    notes = {EVACUATION: vmim.evacuates} if vmim.trigger is Trigger.EVACUATION else {}
    if vmim.trigger in (Trigger.WORKLOAD_UPDATE, Trigger.VOLUME_UPDATE):
        notes = {WORKLOAD_UPDATE: ""}
    labels = {VOLUME_UPDATE: vmim.vmi_name} if vmim.trigger is Trigger.VOLUME_UPDATE else {}
    met = ["migrationAbortRequested"] if vmim.aborted else []
    met += [kind for kind, wait in VMIM_CONDITIONS.items() if wait.state is vmim.wait_reason]
    entered: dict[str, str | None] = {}
    if vmim.handed_off or vmim.scheduled_at is not None:
        entered["Scheduled"] = write_optional_instant(vmim.scheduled_at)
    if vmim.finished:
        entered[vmim.phase] = write_optional_instant(vmim.finished_at)
    state = MigrationState(
        start=vmim.start,
        ended=vmim.end is not None,
        end=vmim.end,
        outcome=vmim.outcome,
        source_node=vmim.source_node,
        target_node=vmim.target_node,
        mode="PostCopy" if vmim.failure is EndReason.POST_COPY_LOST else "",
        failure=vmim.failure,
    )
    metadata = _write_metadata(vmim, annotations=notes, labels=labels)
    if vmim.deleting:
        # Any timestamp is right: the fact only says that there is one.
        metadata["deletionTimestamp"] = write_instant(vmim.created or 0.0)
    return _omit_empty(
        metadata=metadata,
        spec=_omit_empty(vmiName=vmim.vmi_name, priority=vmim.priority),
        status=_omit_empty(
            phase=vmim.phase,
            migrationState=_write_state(state),
            phaseTransitionTimestamps=[
                _omit_empty(phase=phase, phaseTransitionTimestamp=at)
                for phase, at in entered.items()
            ],
            conditions=[{"type": kind, "status": "True"} for kind in met],
        ),
    )


def _write_pod(pod: Pod) -> dict[str, Any]:
    labels = _omit_empty(**{CREATED_BY: pod.vmi_uid, MIGRATION_UID: pod.migration_uid})
    conditions = [{"type": "Ready", "status": "True"}] if pod.ready else []
    if pod.scheduled or pod.unschedulable:
        conditions.append({"type": "PodScheduled", "status": str(pod.scheduled)})
    notes = {EVICTION_IN_PROGRESS: "true"} if pod.eviction_in_progress else {}
    return _omit_empty(
        metadata=_write_metadata(pod, annotations=notes, labels=labels),
        spec=_omit_empty(nodeName=pod.node),
        status=_omit_empty(phase=pod.phase, conditions=conditions),
    )


def _write_kubevirt(settings: KubeVirtSettings) -> dict[str, Any]:
    migrations = {
        "parallelMigrationsPerCluster": settings.limits.cluster,
        "parallelOutboundMigrationsPerNode": settings.limits.outbound_per_node,
    }
    configuration = _omit_empty(migrations=migrations, evictionStrategy=settings.eviction_strategy)
    return _omit_empty(
        metadata={},
        spec={"configuration": configuration},
        status=_omit_empty(outdatedVirtualMachineInstanceWorkloads=int(settings.updating)),
    )


def _write_metadata(fact: Vmi | Vmim | Pod, **maps: dict[str, str]) -> dict[str, Any]:
    return _omit_empty(
        namespace=fact.namespace,
        name=fact.name,
        uid=fact.uid,
        creationTimestamp=write_optional_instant(fact.created),
        **maps,
    )


def _omit_empty(**fields: Any) -> dict[str, Any]:
    """Leave out empty fields, false and None: they mean the same as an absent field."""
    return {name: value for name, value in fields.items() if value or name == "metadata"}
