"""Reads from objects why a VMI does not move, in the words of KubeVirt and the scheduler.

These texts can be long, and everybody who may change a VM can change some of them. So they are cut
to `MESSAGE_LIMIT` or `WORD_LIMIT` characters, and invisible characters are escaped. Sources:
`types.go`; virt-handler's `calculateLiveMigrationCondition`; virt-controller's `migration.go`; the
conditions and container states of Kubernetes' pods.
"""

from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise
from sys import intern
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace

from exporter.engine.evacuations.ended_migrations import EndedMigration, classify_failure
from exporter.engine.facts.history import correct_end
from exporter.engine.facts.model import (
    EndReason,
    Instant,
    Outcome,
    Pod,
    Vmi,
    Vmim,
    Why,
    WhySource,
)
from exporter.engine.facts.states import VMIM_CONDITIONS
from exporter.engine.store.reasons import ADDED_NODE_SELECTOR, NODE_SELECTOR, TERMINATING
from exporter.errors import MALFORMED
from exporter.kube.objects import wire
from exporter.kube.objects.instants import parse_instant
from exporter.text import MESSAGE_LIMIT, clean, write_span


WORD_LIMIT = 64
NODE_LIMIT = 253
_PER_OBJECT = 8
_CONTAINERS = msgspec.json.Decoder(list[wire.Container])
_LABELS = msgspec.json.Decoder(dict[str, str])
_NAMES = msgspec.json.Decoder(list[Any])
_SECONDARY = "PodInitializing"
"""The reason of a container that waits for another container, or for the pod's network."""
SANDBOX = "PodReadyToStartContainers"
"""The condition of a pod that has its network and its volumes (since Kubernetes 1.29)."""
DISRUPTION = "DisruptionTarget"
"""The condition of a pod that says why it is being deleted."""
VCPU_CHANGE = "HotVCPUChange"
UNFINISHED = frozenset({VCPU_CHANGE, "HotMemoryChange", "MigrationRequired"})
"""While a VMI has one of these conditions, KubeVirt leaves its VMIM Running after the end."""

_Decoded = TypeVar("_Decoded")


def of_vmi(body: wire.VmiObject, vmi: Vmi) -> tuple[Why, ...]:
    """Why a VMI is not live-migratable, and why its last migration failed unless it was cancelled.

    It also says what holds the deletion of a VMI, and what keeps its ended migration from being
    finished. An idle VMI gets only the condition, so that many VMIs share one value.
    """
    status = body.status or wire.VmiStatus()
    state = status.migrationState
    is_followed = bool(vmi.evacuation_node) or vmi.deleted_at is not None
    hotplugs = _of_hotplugs(status, vmi)
    if vmi.migratable and not is_followed:
        return hotplugs
    condition = next(
        (c for c in status.conditions or () if c.type == "LiveMigratable" and c.status == "False"),
        None,
    )
    if not is_followed:
        return hotplugs if condition is None else (*hotplugs, *_share(condition))
    reasons = [*hotplugs]
    if vmi.deleted_at is not None:
        reasons.append(_of_deletion(body.metadata, vmi.deleted_at))
    if condition is not None:
        reasons.append(_of_condition(WhySource.LIVE_MIGRATABLE, condition))
    was_cancelled = state is not None and bool(state.abortRequested)
    if state and state.failed and not was_cancelled and (message := _text(state.failureReason)):
        at = parse_instant(state.endTimestamp)
        reasons.append(Why(WhySource.FAILED_ATTEMPT, _abort_status(state), message, at))
    spec = body.spec or wire.VmiSpec()
    return (*reasons, *_of_selector(NODE_SELECTOR, spec.nodeSelector))


def _of_hotplugs(status: wire.VmiStatus, vmi: Vmi) -> tuple[Why, ...]:
    """The conditions without which KubeVirt finishes no VMIM (`updateStatus` of `migration.go`)."""
    if vmi.migration is None or not vmi.migration.ended:
        return ()
    return tuple(
        _of_condition(WhySource.HOTPLUG, condition)
        for condition in status.conditions or ()
        if condition.type in UNFINISHED
        and (condition.status == "True" or condition.type == VCPU_CHANGE)
    )


def _of_deletion(metadata: wire.VmiMetadata, deleted_at: Instant) -> Why:
    names = [name for name in _decode(metadata.finalizers, _NAMES) or () if isinstance(name, str)]
    waits = f"waits for {', '.join(names)}" if names else "waits, and names no finalizer"
    message = clean(f"the deletion {waits}", MESSAGE_LIMIT)
    return Why(WhySource.DELETION, "Finalizers", message, deleted_at)


def of_vmim(body: wire.VmimObject, vmim: Vmim) -> tuple[Why, ...]:
    """Why an attempt failed, or what keeps it Pending and restricts its target.

    For a failed attempt, `reason` is its last phase, or the result of its abort. The message ends
    with the duration of each phase, because before the hand-off KubeVirt writes no `failureReason`.
    A cancelled attempt gives no reason: KubeVirt 1.9 describes it like an attempt that took too
    long.
    """
    if vmim.phase == "Succeeded":
        return ()
    status = body.status or wire.VmimStatus()
    reasons = [
        _of_condition(WhySource.MIGRATION_CONDITION, condition)
        for condition in status.conditions or ()
        if condition.type in VMIM_CONDITIONS and condition.status == "True"
    ]
    if vmim.finished and not vmim.aborted:
        state = status.migrationState or wire.ReportedState()
        phases = _time_phases(status)
        reason = _abort_status(state) or (phases[-1][0] if phases else "")
        after = ", ".join(f"{phase} {write_span(seconds)}" for phase, seconds in phases)
        message = _text(state.failureReason, MESSAGE_LIMIT - len(after) - 9)
        if after:
            message = f"{message} (after {after})" if message else f"after {after}"
        at = correct_end(vmim.end, vmim.finished_at)
        reasons.append(Why(WhySource.FAILED_ATTEMPT, reason, message, at))
    elif not vmim.finished:
        spec = body.spec or wire.VmimSpec()
        reasons += _of_selector(ADDED_NODE_SELECTOR, spec.addedNodeSelector)
    return tuple(reasons[-_PER_OBJECT:])


def add_vmi_failure(body: wire.VmiObject, vmi: Vmi) -> Vmi:
    """Add why the VMI's last migration failed, if it did."""
    state, wired = vmi.migration, body.status.migrationState if body.status else None
    if state is None or wired is None or state.outcome is not Outcome.FAILED:
        return vmi
    failure = _classify(wired, aborted=bool(wired.abortRequested))
    return replace(vmi, migration=replace(state, failure=failure))


def add_vmim_failure(body: wire.VmimObject, vmim: Vmim) -> Vmim:
    """Add why the migration failed, if it did."""
    if vmim.outcome is not Outcome.FAILED:
        return vmim
    wired = (body.status.migrationState if body.status else None) or wire.ReportedState()
    return replace(vmim, failure=_classify(wired, aborted=vmim.aborted))


def _classify(state: wire.ReportedState, *, aborted: bool) -> EndReason:
    return classify_failure(state.mode or "", _text(state.failureReason), aborted=aborted)


def read_end(body: wire.VmimObject, vmim: Vmim) -> EndedMigration | None:
    """The record of a migration that has ended; None if it has not."""
    if not vmim.finished:
        return None
    status = body.status or wire.VmimStatus()
    state = status.migrationState or wire.ReportedState()
    return EndedMigration(
        vmim=vmim,
        source_node=clean(state.sourceNode or "", NODE_LIMIT),
        target_node=clean(state.targetNode or "", NODE_LIMIT),
        mode=clean(state.mode or "", WORD_LIMIT),
        message=_text(state.failureReason),
        phases=tuple(_time_phases(status)),
        has_state=parse_instant(state.endTimestamp) is not None,
    )


def of_pod(body: wire.PodObject, pod: Pod) -> tuple[Why, ...]:
    """Why the target pod of an attempt does not run, or that a pod is being deleted.

    After the deletion, KubeVirt 1.8.4 goes on with the migration: it fails, or the VM moves to that
    pod and is killed with it.
    """
    status = body.status or wire.PodStatus()
    deleted = _of_deleted_pod(pod, status, body.metadata.deletionGracePeriodSeconds)
    if pod.ready or not pod.migration_uid:
        return deleted
    reasons = []
    if word := _word(status.reason):
        changes = (parse_instant(c.lastTransitionTime) for c in status.conditions or ())
        at = max((instant for instant in changes if instant is not None), default=pod.created)
        reasons.append(Why(WhySource.TARGET_CONTAINER, word, _text(status.message), at))
    spec = body.spec or wire.PodSpec()
    for condition in status.conditions or ():
        if condition.type == "PodScheduled" and condition.status == "False":
            reasons.append(_of_scheduler(spec, condition))
            reasons += _of_selector(NODE_SELECTOR, spec.nodeSelector)
    reasons += _of_containers(status.initContainerStatuses)
    reasons += _of_containers(status.containerStatuses)
    if not pod.finished and not deleted:
        reasons += _of_start(status)
    return (*reasons[: _PER_OBJECT - len(deleted)], *(() if pod.finished else deleted))


def _of_deleted_pod(pod: Pod, status: wire.PodStatus, grace: int | None) -> tuple[Why, ...]:
    """That a pod is being deleted: a target, or, with the reason of its deletion, the VM's own.

    `grace` is the seconds that the pod has to end.
    """
    if pod.deleted_at is None:
        return ()
    name = clean(pod.name, MESSAGE_LIMIT - 64)
    reasons = [Why(WhySource.TARGET_CONTAINER, TERMINATING, f"{name} is being deleted")]
    if not pod.migration_uid:
        reasons = []
    if not pod.finished:
        target = next(
            (c for c in status.conditions or () if c.type == DISRUPTION), wire.Condition()
        )
        cause = _text(target.message)
        why = f": {cause}" if cause else ""
        within = "" if grace is None else f", and ends within {write_span(grace)}"
        text = f"the launcher pod {name} is being deleted{within}{why}"
        message = clean(text, MESSAGE_LIMIT)
        at = parse_instant(target.lastTransitionTime)
        reasons.append(Why(WhySource.DELETION, _word(target.reason) or TERMINATING, message, at))
    return tuple(reasons)


def _of_scheduler(spec: wire.PodSpec, condition: wire.Condition) -> Why:
    """The scheduler's message, or the names of the scheduling gates, which it waits for."""
    why = _of_condition(WhySource.POD_SCHEDULED, condition)
    gates = ", ".join(gate.name for gate in spec.schedulingGates or () if gate.name)
    return replace(why, message=clean(gates, MESSAGE_LIMIT)) if gates else why


def _of_start(status: wire.PodStatus) -> Iterator[Why]:
    """What keeps a scheduled pod from starting, as its conditions say.

    While its network or volumes are missing, the kubelet writes `PodInitializing` or
    `ContainerCreating` for every container, and no reason in the condition.
    """
    conditions = {condition.type: condition for condition in status.conditions or ()}
    bound, sandbox = conditions.get("PodScheduled"), conditions.get(SANDBOX)
    if bound is None or bound.status != "True":
        return
    if sandbox is not None and sandbox.status == "False":
        message = "its network or a volume is not ready"
        at = parse_instant(sandbox.lastTransitionTime)
        yield Why(WhySource.TARGET_POD, SANDBOX, message, at)
        return
    initialized = conditions.get("Initialized")
    if initialized is not None and initialized.status == "False":
        at = parse_instant(initialized.lastTransitionTime)
        message = _of_init_containers(status) or _text(initialized.message)
        yield Why(WhySource.TARGET_POD, "Initialized", message, at)


def _of_init_containers(status: wire.PodStatus) -> str:
    """The init container for which the pod waits, and what it does; "" if none has started."""
    for container in _decode(status.initContainerStatuses, _CONTAINERS) or ():
        state = container.state or wire.ContainerState()
        name = _word(container.name)
        if state.terminated is not None and state.terminated.exitCode:
            return f"its init container {name} fails with exit code {state.terminated.exitCode}"
        if state.running is not None and not container.started:
            return f"its init container {name} is still running"
        if state.waiting is not None and (word := _word(state.waiting.reason)) != _SECONDARY:
            return f"its init container {name} waits: {word}"
    return ""


def _of_condition(source: WhySource, condition: wire.Condition) -> Why:
    """The reason in a condition.

    Some conditions have only a probe time. The quota's condition has no reason, so its type is
    used.
    """
    at = parse_instant(condition.lastTransitionTime)
    if at is None:
        at = parse_instant(condition.lastProbeTime)
    reason = _word(condition.reason) or clean(condition.type or "", WORD_LIMIT)
    return Why(source, reason, _text(condition.message), at)


def _of_containers(raw: msgspec.Raw) -> Iterator[Why]:
    for container in _decode(raw, _CONTAINERS) or ():
        state = container.state or wire.ContainerState()
        waiting, ended = state.waiting, state.terminated
        if waiting is not None and (reason := _word(waiting.reason)) != _SECONDARY:
            yield Why(WhySource.TARGET_CONTAINER, reason, _text(waiting.message))
        if ended is not None and ended.exitCode:
            code = f"exit code {ended.exitCode}"
            text = _text(ended.message, MESSAGE_LIMIT - len(code) - 3)
            message = f"{text} ({code})" if text else code
            at = parse_instant(ended.finishedAt)
            yield Why(WhySource.TARGET_CONTAINER, _word(ended.reason), message, at)


def _of_selector(reason: str, raw: msgspec.Raw) -> Iterator[Why]:
    labels = _decode(raw, _LABELS)
    if labels:
        message = ", ".join(f"{key}={value}" for key, value in sorted(labels.items()))
        yield Why(WhySource.POD_SCHEDULED, reason, clean(message, MESSAGE_LIMIT))


def _decode(raw: msgspec.Raw, decoder: msgspec.json.Decoder[_Decoded]) -> _Decoded | None:
    """The decoded value; None if there is none or it cannot be read."""
    try:
        return decoder.decode(raw) if raw else None
    except MALFORMED:
        return None


def _abort_status(state: wire.ReportedState) -> str:
    status = _word(state.abortStatus)
    return f"Abort{status}" if status else ""


def _time_phases(status: wire.VmimStatus) -> list[tuple[str, float]]:
    """The phases of a finished VMIM in order, each with its duration in seconds.

    A phase begins at the first transition to it.

    The final phase has no duration and is left out.
    """
    entered: dict[str, Instant] = {}
    for transition in status.phaseTransitionTimestamps or ():
        at = parse_instant(transition.phaseTransitionTimestamp)
        if at is not None and transition.phase:
            entered.setdefault(transition.phase, at)
    return [
        (clean(phase, WORD_LIMIT), max(0.0, end - at))
        for (phase, at), (_, end) in pairwise(entered.items())
    ][-_PER_OBJECT:]


def _word(raw: msgspec.Raw) -> str:
    return intern(_text(raw, WORD_LIMIT))


def _share(condition: wire.Condition) -> tuple[Why, ...]:
    """The reason in a condition; the same value for all VMIs with these texts."""
    return _share_texts(_word(condition.reason), _text(condition.message))


@lru_cache(maxsize=1024)
def _share_texts(word: str, message: str) -> tuple[Why, ...]:
    return (Why(WhySource.LIVE_MIGRATABLE, word, message),)


def _text(raw: msgspec.Raw, most: int = MESSAGE_LIMIT) -> str:
    """A string, cleaned and cut; "" if there is none."""
    try:
        value = msgspec.json.decode(bytes(raw).decode(errors="replace")) if raw else ""
    except MALFORMED:
        return ""
    return clean(value, most) if isinstance(value, str) else ""
