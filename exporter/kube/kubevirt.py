"""Parses and writes Kubernetes and KubeVirt objects; the only module that knows field paths.

Raw JSON goes in; facts of `engine.model` come out, or `Refused` with the reason. Only fields in use
are decoded. Strings that many objects share (namespaces, nodes, a VMI's name in its VMIMs) are
interned, which saves 0.9 kB per VMI. An empty string, null and an absent field are equivalent.
Sources: KubeVirt `staging/src/kubevirt.io/api/core/v1/types.go`; the labels and annotations of
launcher pods from `pkg/virt-controller/services/template.go` and `watch/descheduler`.
"""

import re
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import lru_cache
from sys import intern
from typing import Any, Generic, TypeAlias, TypeVar, assert_never

import msgspec
from msgspec import Struct, field

from exporter.engine.model import (
    ConfigMap,
    Fact,
    Hold,
    Instant,
    KubeVirtSettings,
    MigrationLimits,
    MigrationState,
    Outcome,
    Pod,
    Priority,
    Resource,
    Trigger,
    Vmi,
    Vmim,
)


LAUNCHER_SELECTOR = "kubevirt.io=virt-launcher"
CHECKPOINT_LABEL = "kubevirt-eviction-exporter/checkpoint"
"""The label of our checkpoint's ConfigMaps; its value is the checkpoint's name."""
EVICTION_IN_PROGRESS = "descheduler.alpha.kubernetes.io/eviction-in-progress"
INITIAL_EVENTS_END = "k8s.io/initial-events-end"

_EVACUATION = "kubevirt.io/evacuationMigration"
_WORKLOAD_UPDATE = "kubevirt.io/workloadUpdateMigration"
_EVICTION_SOURCE = "kubevirt.io/eviction-source"
_CREATED_BY = "kubevirt.io/created-by"
_VMI_KIND = "VirtualMachineInstance"
_MIGRATION_UID = "kubevirt.io/migrationJobUID"

_FIRST = datetime(1, 1, 1, tzinfo=UTC).timestamp()
_LAST = datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC).timestamp()
"""Instants outside, possible by a time zone, could be read but not written."""
_UNREAD = "unreadable"
"""Written for a timestamp that was present but unreadable."""
_FINAL_PHASES = frozenset({"Succeeded", "Failed"})
_HANDED_OFF_PHASES = frozenset(
    {"Scheduled", "PreparingTarget", "TargetReady", "Running", "Succeeded"}
)
"""The phases that a VMIM reaches only after `handleTargetPodHandoff`."""

_PRIORITIES = {priority.value: priority for priority in Priority}
_HOLDS = {
    "migrationRejectedByResourceQuota": Hold.QUOTA,
    "migrationBlockedByBackup": Hold.BACKUP,
    "migrationBlockedByUtilityVolumes": Hold.UTILITY_VOLUMES,
}
"""A VMIM's conditions (types.go, `VirtualMachineInstanceMigrationConditionType`)."""

_RFC3339 = re.compile(
    r"(\d{4})-(\d\d)-(\d\d)[Tt](\d\d):(\d\d):(\d\d)(\.\d+)?([Zz]|[+-]\d\d:\d\d)", re.ASCII
)


class Refused(Exception):
    """An object that cannot be used; `why` says what was expected.

    `namespace` and `name` are None and `uid` is "" if they cannot be read either.
    """

    def __init__(
        self, why: str, *, namespace: str | None = None, name: str | None = None, uid: str = ""
    ) -> None:
        super().__init__(why)
        self.uid = uid
        self.why = why
        self.namespace = namespace
        self.name = name


class _Metadata(Struct, gc=False):
    namespace: str | None = None
    name: str | None = None
    uid: str | None = None
    creationTimestamp: Any = None  # noqa: N815
    deletionTimestamp: Any = None  # noqa: N815
    resourceVersion: str | None = None  # noqa: N815
    annotations: dict[str, Any] | None = None


class _Owner(Struct, gc=False):
    kind: str | None = None
    uid: str | None = None


class _PodMetadata(_Metadata, gc=False):
    labels: dict[str, Any] | None = None
    ownerReferences: list[_Owner] | None = None  # noqa: N815


class _LooseMetadata(Struct, gc=False):
    """The fields that identify an object, of any type."""

    namespace: Any = None
    name: Any = None
    uid: Any = None
    resourceVersion: Any = None  # noqa: N815
    annotations: Any = None


class _Wire(Struct, gc=False):
    metadata: _Metadata


class _HalfState(Struct, gc=False):
    migrationUID: str | None = None  # noqa: N815


class _State(Struct, gc=False):
    migrationUid: str | None = None  # noqa: N815
    startTimestamp: Any = None  # noqa: N815
    endTimestamp: Any = None  # noqa: N815
    completed: bool | None = None
    failed: bool | None = None
    mode: str | None = None
    sourceNode: str | None = None  # noqa: N815
    sourceState: _HalfState | None = None  # noqa: N815
    targetState: _HalfState | None = None  # noqa: N815


class _Condition(Struct, gc=False):
    type: str | None = None
    status: str | None = None
    lastTransitionTime: Any = None  # noqa: N815


class _VmiSpec(Struct, gc=False):
    evictionStrategy: str | None = None  # noqa: N815


class _VmiStatus(Struct, gc=False):
    phase: str | None = None
    nodeName: str | None = None  # noqa: N815
    evacuationNodeName: str | None = None  # noqa: N815
    migrationState: _State | None = None  # noqa: N815
    conditions: list[_Condition] | None = None


class _VmiObject(_Wire, gc=False):
    spec: _VmiSpec | None = None
    status: _VmiStatus | None = None


class _PhaseTransition(Struct, gc=False):
    phase: str | None = None
    phaseTransitionTimestamp: Any = None  # noqa: N815


class _VmimStatus(Struct, gc=False):
    phase: str | None = None
    migrationState: _State | None = None  # noqa: N815
    phaseTransitionTimestamps: list[_PhaseTransition] | None = None  # noqa: N815
    conditions: list[_Condition] | None = None


class _VmimSpec(Struct, gc=False):
    vmiName: str | None = None  # noqa: N815
    priority: str | None = None


class _VmimObject(_Wire, gc=False):
    spec: _VmimSpec | None = None
    status: _VmimStatus | None = None


class _PodSpec(Struct, gc=False):
    nodeName: str | None = None  # noqa: N815


class _PodStatus(Struct, gc=False):
    phase: str | None = None
    conditions: list[_Condition] | None = None


class _PodObject(_Wire, gc=False):
    metadata: _PodMetadata
    spec: _PodSpec | None = None
    status: _PodStatus | None = None


class _Migrations(Struct, gc=False):
    parallelMigrationsPerCluster: int | None = None  # noqa: N815
    parallelOutboundMigrationsPerNode: int | None = None  # noqa: N815


class _KubeVirtConfiguration(Struct, gc=False):
    evictionStrategy: str | None = None  # noqa: N815
    migrations: _Migrations | None = None


class _KubeVirtSpec(Struct, gc=False):
    configuration: _KubeVirtConfiguration | None = None


class _ConfigMapObject(_Wire, gc=False):
    binaryData: dict[str, bytes] | None = None  # noqa: N815


class _KubeVirtObject(_Wire, gc=False):
    spec: _KubeVirtSpec | None = None


class _Named(Struct, gc=False):
    metadata: _LooseMetadata


_Object = TypeVar("_Object", bound=_Wire)


class _Event(Struct, Generic[_Object], gc=False):
    type: str
    object: _Object


class _Envelope(Struct, gc=False):
    type: str
    object: msgspec.Raw = field(default_factory=msgspec.Raw)


class _ErrorStatus(Struct, gc=False):
    code: int | None = None
    reason: str | None = None
    message: str | None = None


class _Page(Struct, gc=False):
    metadata: "_PageMetadata"
    items: list[msgspec.Raw] | None = None


class _PageMetadata(Struct, gc=False):
    resourceVersion: str | None = None  # noqa: N815
    continue_: str | None = field(name="continue", default=None)


class Changed(Struct, frozen=True, gc=False):
    """An object was added or modified, or is an item of a list."""

    fact: Fact
    namespace: str
    name: str
    resource_version: str
    modified: bool = False


class Deleted(Struct, frozen=True, gc=False):
    """An object was deleted. `uid` is empty if it could not be read."""

    namespace: str
    name: str
    uid: str
    resource_version: str


class Bookmark(Struct, frozen=True, gc=False):
    """Everything up to this resourceVersion was sent; `listed` marks the end of a streamed list."""

    resource_version: str
    listed: bool


class Failed(Struct, frozen=True, gc=False):
    """The server ended the watch with an `ERROR` event, which holds a Status."""

    code: int
    reason: str
    message: str


Event: TypeAlias = Changed | Deleted | Bookmark | Failed


class Page(Struct, frozen=True):
    """One page of a list. Items are raw, so that a bad one does not affect the others."""

    items: list[msgspec.Raw]
    resource_version: str
    continue_token: str


def parse_instant(value: object) -> Instant | None:
    """Parse RFC 3339 to Unix seconds; None if absent or invalid."""
    return _parse_instant(value) if isinstance(value, str) else None


@lru_cache(maxsize=4096)
def _parse_instant(text: str) -> Instant | None:
    """Cached, because one object repeats an instant up to three times.

    A VMIM takes a third of the time, and equal instants share one float.
    """
    if len(text) == 20 and text[4::3] == "--T::Z" and text[11:13] != "24":
        # KubeVirt's own format: the C parser takes a quarter of the time of the pattern below.
        try:
            return datetime.fromisoformat(text).timestamp()
        except ValueError:
            return None
    match = _RFC3339.fullmatch(text)
    if match is None:
        return None
    year, month, day, hour, minute, second, fraction, zone = match.groups()
    try:
        whole = datetime(
            int(year), int(month), int(day), int(hour), int(minute), int(second), tzinfo=UTC
        ).timestamp()
    except ValueError:
        return None
    if zone not in "Zz":
        if int(zone[1:3]) > 23 or int(zone[4:6]) > 59:
            return None
        offset = int(zone[1:3]) * 3600.0 + int(zone[4:6]) * 60.0
        whole -= offset if zone[0] == "+" else -offset
    instant = whole + float(fraction) if fraction else whole
    return instant if _FIRST <= instant <= _LAST else None


def parse_object(resource: Resource, raw: bytes | msgspec.Raw) -> Changed:
    """Parse one object. Raises `Refused`."""
    try:
        fact, metadata = _DECODERS[resource].object(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _refusal(raw, error) from None
    return _changed(fact, metadata)


def parse_event(resource: Resource, line: bytes) -> Event:
    """Parse one line of a watch. Raises `Refused`."""
    decoder = _DECODERS[resource]
    try:
        kind, fact, metadata = decoder.event(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        return _parse_other(line, error)
    if kind in ("ADDED", "MODIFIED"):
        return _changed(fact, metadata, modified=kind == "MODIFIED")
    return _parse_other(line, None)


def parse_page(body: bytes) -> Page:
    """Parse the response to a list. Raises `Refused` if it is not a list."""
    try:
        page = msgspec.json.decode(body, type=_Page)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Refused(f"not a Kubernetes list: {error}") from None
    return Page(
        items=page.items or [],
        resource_version=page.metadata.resourceVersion or "",
        continue_token=page.metadata.continue_ or "",
    )


def write_object(fact: Fact) -> dict[str, Any]:
    """The inverse of parsing: the smallest object that parses to this fact.

    It contains no user data, such as the cloud-init passwords in a VMI's spec. Raises TypeError
    for a checkpoint's ConfigMap.
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
        case ConfigMap():
            raise TypeError("a checkpoint's ConfigMap is not a fact about VMIs")
        case _:
            assert_never(fact)


def stamp(instant: Instant) -> str:
    """Format Unix seconds as RFC 3339, whole seconds as KubeVirt does."""
    text = datetime.fromtimestamp(instant, tz=UTC).isoformat()
    return text.replace("+00:00", "Z")


def parse_status_message(body: bytes) -> str:
    """The message of a Kubernetes `Status`, or "" if the body is not one."""
    try:
        return msgspec.json.decode(body, type=_ErrorStatus).message or ""
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return ""


def _changed(fact: Fact | str, metadata: _Metadata, *, modified: bool = False) -> Changed:
    namespace, name = metadata.namespace or "", metadata.name
    if isinstance(fact, str):
        raise Refused(fact, namespace=namespace if name else None, name=name or None)
    return Changed(
        fact=fact,
        namespace=namespace,
        name=name or "",
        resource_version=metadata.resourceVersion or "",
        modified=modified,
    )


def _parse_other(line: bytes, error: Exception | None) -> Event:
    """Parse a line that is not an ADDED or MODIFIED event of the expected shape."""
    try:
        envelope = msgspec.json.decode(line, type=_Envelope)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as broken:
        raise Refused(f"not a watch event: {broken}") from None
    if envelope.type == "ERROR":
        return _parse_failure(envelope.object)
    if envelope.type not in ("DELETED", "BOOKMARK"):
        if error is not None:
            raise _refusal(envelope.object, error)
        raise Refused(f"unknown watch event type {envelope.type[:40]!r}")
    try:
        metadata = msgspec.json.decode(envelope.object, type=_Named).metadata
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as broken:
        raise Refused(f"{envelope.type} without readable metadata: {broken}") from None
    if envelope.type == "BOOKMARK":
        annotations = metadata.annotations if isinstance(metadata.annotations, dict) else {}
        return Bookmark(
            resource_version=_text(metadata.resourceVersion),
            listed=annotations.get(INITIAL_EVENTS_END) == "true",
        )
    if not _text(metadata.name):
        raise Refused("DELETED without metadata.name")
    return Deleted(
        namespace=_text(metadata.namespace),
        name=_text(metadata.name),
        uid=_text(metadata.uid),
        resource_version=_text(metadata.resourceVersion),
    )


def _parse_failure(raw: msgspec.Raw) -> Failed:
    try:
        status = msgspec.json.decode(raw, type=_ErrorStatus)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        status = _ErrorStatus()
    return Failed(code=status.code or 0, reason=status.reason or "", message=status.message or "")


def _refusal(raw: bytes | msgspec.Raw, error: Exception) -> Refused:
    """The refusal of an object, with its name if that can be read."""
    try:
        metadata = msgspec.json.decode(raw, type=_Named).metadata
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return Refused(str(error))
    if not _text(metadata.name):
        return Refused(str(error))
    return Refused(
        str(error),
        namespace=_text(metadata.namespace),
        name=_text(metadata.name),
        uid=_text(metadata.uid),
    )


def _read_vmi(wire: _VmiObject) -> Vmi | str:
    metadata = wire.metadata
    if not metadata.uid:
        return "metadata.uid: expected a UID, there is none"
    if not metadata.name:
        return "metadata.name: expected a name, there is none"
    status = wire.status or _VmiStatus()
    state = status.migrationState
    conditions = {c.type: c for c in status.conditions or [] if c.status == "True"}
    requested = conditions.get("EvictionRequested")
    annotations = metadata.annotations or {}
    return Vmi(
        namespace=intern(metadata.namespace or ""),
        name=intern(metadata.name),
        uid=metadata.uid,
        created=parse_instant(metadata.creationTimestamp),
        node=intern(status.nodeName or ""),
        evacuation_node=intern(status.evacuationNodeName or ""),
        migration=None if state is None else _read_state(state),
        other_uids=() if state is None else _other_uids(state),
        eviction_strategy=intern((wire.spec.evictionStrategy if wire.spec else None) or ""),
        eviction_requested_at=(
            None if requested is None else parse_instant(requested.lastTransitionTime)
        ),
        evicted_by_descheduler=annotations.get(_EVICTION_SOURCE) == "descheduler",
        migratable="LiveMigratable" in conditions,
        phase=intern(status.phase or ""),
    )


def _read_state(state: _State) -> MigrationState:
    end = state.endTimestamp
    return MigrationState(
        uid=state.migrationUid or "",
        start=parse_instant(state.startTimestamp),
        ended=end is not None and end != "",
        end=parse_instant(end),
        outcome=_state_outcome(state),
        mode=intern(state.mode or ""),
        source_node=intern(state.sourceNode or ""),
    )


def _state_outcome(state: _State) -> Outcome:
    """`completed` means ended, not succeeded: a failed migration has it too."""
    if state.failed:
        return Outcome.FAILED
    return Outcome.SUCCEEDED if state.completed else Outcome.UNKNOWN


def _other_uids(state: _State) -> tuple[str, ...]:
    halves = (state.sourceState, state.targetState)
    uids = (half.migrationUID for half in halves if half is not None and half.migrationUID)
    return tuple(uid for uid in uids if uid != state.migrationUid)


def _read_vmim(wire: _VmimObject) -> Vmim | str:
    metadata, spec = wire.metadata, wire.spec or _VmimSpec()
    if not metadata.name:
        return "metadata.name: expected a name, there is none"
    if not spec.vmiName:
        return "spec.vmiName: expected the name of a VMI, there is none"
    status = wire.status or _VmimStatus()
    state = status.migrationState or _State()
    phase = status.phase or ""
    # The first transition to a phase counts.
    transitions = reversed(status.phaseTransitionTimestamps or ())
    entered = {t.phase: t.phaseTransitionTimestamp for t in transitions}
    annotations = metadata.annotations or {}
    met = {c.type for c in status.conditions or () if c.status == "True"}
    return Vmim(
        namespace=intern(metadata.namespace or ""),
        name=metadata.name,
        uid=metadata.uid or "",
        vmi_name=intern(spec.vmiName),
        created=parse_instant(metadata.creationTimestamp),
        phase=intern(phase),
        finished=phase in _FINAL_PHASES,
        finished_at=parse_instant(entered.get(phase)) if phase in _FINAL_PHASES else None,
        scheduled_at=parse_instant(entered.get("Scheduled")),
        handed_off=_was_handed_off(metadata.uid, {phase, *entered}, state),
        start=parse_instant(state.startTimestamp),
        end=parse_instant(state.endTimestamp),
        outcome=max(_state_outcome(state), _phase_outcome(phase)),
        evacuates=intern(_text(annotations.get(_EVACUATION))),
        trigger=_read_trigger(annotations),
        priority=_PRIORITIES.get(spec.priority or ""),
        hold=next((hold for kind, hold in _HOLDS.items() if kind in met), None) if met else None,
        aborted="migrationAbortRequested" in met,
        deleting=bool(metadata.deletionTimestamp),
    )


def _read_trigger(annotations: dict[str, Any]) -> Trigger:
    """An annotation with an empty value counts: workload updates have one."""
    if _EVACUATION in annotations:
        return Trigger.EVACUATION
    return Trigger.WORKLOAD_UPDATE if _WORKLOAD_UPDATE in annotations else Trigger.OTHER


def _was_handed_off(uid: str | None, phases: set[str | None], state: _State) -> bool:
    """A VMIM's `migrationState` is copied from the VMI's, which exists after hand-off."""
    if not _HANDED_OFF_PHASES.isdisjoint(phases):
        return True
    if uid and state.migrationUid == uid:
        return True
    return parse_instant(state.endTimestamp) is not None


def _phase_outcome(phase: str) -> Outcome:
    match phase:
        case "Succeeded":
            return Outcome.SUCCEEDED
        case "Failed":
            return Outcome.FAILED
        case _:
            return Outcome.UNKNOWN


def _read_pod(wire: _PodObject) -> Pod | str:
    metadata, status = wire.metadata, wire.status or _PodStatus()
    labels, annotations = metadata.labels or {}, metadata.annotations or {}
    if not metadata.name:
        return "metadata.name: expected a name, there is none"
    met = {c.type: c.status for c in status.conditions or []}
    return Pod(
        namespace=intern(metadata.namespace or ""),
        name=metadata.name,
        uid=metadata.uid or "",
        vmi_uid=_owner_uid(metadata) or _text(labels.get(_CREATED_BY)),
        node=intern((wire.spec.nodeName if wire.spec else None) or ""),
        phase=intern(status.phase or ""),
        created=parse_instant(metadata.creationTimestamp),
        ready=met.get("Ready") == "True",
        scheduled=met.get("PodScheduled") == "True",
        unschedulable=met.get("PodScheduled") == "False",
        eviction_in_progress=EVICTION_IN_PROGRESS in annotations,
        migration_uid=_text(labels.get(_MIGRATION_UID)),
    )


def _owner_uid(metadata: _PodMetadata) -> str:
    """The UID of the VMI that owns the pod, or ""."""
    owners = metadata.ownerReferences or ()
    return next((one.uid for one in owners if one.kind == _VMI_KIND and one.uid), "")


def _read_kubevirt(wire: _KubeVirtObject) -> KubeVirtSettings | str:
    configuration = (wire.spec or _KubeVirtSpec()).configuration or _KubeVirtConfiguration()
    migrations = configuration.migrations or _Migrations()
    defaults = MigrationLimits()
    cluster = migrations.parallelMigrationsPerCluster
    per_node = migrations.parallelOutboundMigrationsPerNode
    return KubeVirtSettings(
        MigrationLimits(
            cluster=defaults.cluster if cluster is None else cluster,
            outbound_per_node=defaults.outbound_per_node if per_node is None else per_node,
        ),
        intern(configuration.evictionStrategy or ""),
    )


def _read_config_map(wire: _ConfigMapObject) -> ConfigMap | str:
    metadata = wire.metadata
    if not metadata.name:
        return "metadata.name: expected a name, there is none"
    return ConfigMap(
        namespace=metadata.namespace or "",
        name=metadata.name,
        version=metadata.resourceVersion or "",
        data=wire.binaryData or {},
    )


def _write_vmi(vmi: Vmi) -> dict[str, Any]:
    conditions = [{"type": "LiveMigratable", "status": "True"}] if vmi.migratable else []
    if vmi.eviction_requested_at is not None:
        requested = {"type": "EvictionRequested", "status": "True"}
        conditions.append(requested | {"lastTransitionTime": stamp(vmi.eviction_requested_at)})
    notes = {_EVICTION_SOURCE: "descheduler"} if vmi.evicted_by_descheduler else {}
    state = None if vmi.migration is None else _write_state(vmi.migration, vmi.other_uids)
    return _omit_empty(
        metadata=_write_metadata(vmi, annotations=notes),
        spec=_omit_empty(evictionStrategy=vmi.eviction_strategy),
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
        startTimestamp=_stamp_or_none(state.start),
        endTimestamp=_stamp_or_none(state.end)
        if state.end is not None or not state.ended
        else _UNREAD,
        completed=state.outcome is not Outcome.UNKNOWN,
        failed=state.outcome is Outcome.FAILED,
        mode=state.mode,
        sourceNode=state.source_node,
    ) | {half: {"migrationUID": uid} for half, uid in halves}


def _write_vmim(vmim: Vmim) -> dict[str, Any]:
    notes = {_EVACUATION: vmim.evacuates} if vmim.trigger is Trigger.EVACUATION else {}
    if vmim.trigger is Trigger.WORKLOAD_UPDATE:
        notes = {_WORKLOAD_UPDATE: ""}
    met = ["migrationAbortRequested"] if vmim.aborted else []
    met += [kind for kind, hold in _HOLDS.items() if hold is vmim.hold]
    entered = {"Scheduled": _stamp_or_none(vmim.scheduled_at)} if vmim.handed_off else {}
    if vmim.scheduled_at is not None:
        entered["Scheduled"] = stamp(vmim.scheduled_at)
    if vmim.finished:
        entered[vmim.phase] = _stamp_or_none(vmim.finished_at)
    state = MigrationState(
        start=vmim.start, ended=vmim.end is not None, end=vmim.end, outcome=vmim.outcome
    )
    metadata = _write_metadata(vmim, annotations=notes)
    if vmim.deleting:
        # Any timestamp will do: facts only say that there is one.
        metadata["deletionTimestamp"] = stamp(vmim.created or 0.0)
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
    labels = _omit_empty(**{_CREATED_BY: pod.vmi_uid, _MIGRATION_UID: pod.migration_uid})
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
    return {"metadata": {}, "spec": {"configuration": configuration}}


def _write_metadata(fact: Vmi | Vmim | Pod, **maps: dict[str, str]) -> dict[str, Any]:
    return _omit_empty(
        namespace=fact.namespace,
        name=fact.name,
        uid=fact.uid,
        creationTimestamp=_stamp_or_none(fact.created),
        **maps,
    )


def _omit_empty(**fields: Any) -> dict[str, Any]:
    """The fields with a value: empty, false and None are equivalent to absent."""
    return {name: value for name, value in fields.items() if value or name == "metadata"}


def _stamp_or_none(instant: Instant | None) -> str | None:
    return None if instant is None else stamp(instant)


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


class _Decoder(Generic[_Object]):
    """Decodes one kind of object into a fact."""

    def __init__(self, wire: type[_Object], read: Callable[[_Object], Fact | str]) -> None:
        self._objects: msgspec.json.Decoder[_Object] = msgspec.json.Decoder(wire)
        self._events: msgspec.json.Decoder[_Event[_Object]] = msgspec.json.Decoder(
            _Event[wire]  # type: ignore[valid-type]
        )
        self._read: Callable[[_Object], Fact | str] = read

    def object(self, raw: bytes | msgspec.Raw) -> tuple[Fact | str, _Metadata]:
        wire = self._objects.decode(raw)
        return self._read(wire), wire.metadata

    def event(self, line: bytes) -> tuple[str, Fact | str, _Metadata]:
        event = self._events.decode(line)
        return event.type, self._read(event.object), event.object.metadata


_DECODERS: Mapping[Resource, _Decoder[Any]] = {
    Resource.VMIS: _Decoder(_VmiObject, _read_vmi),
    Resource.VMIMS: _Decoder(_VmimObject, _read_vmim),
    Resource.PODS: _Decoder(_PodObject, _read_pod),
    Resource.KUBEVIRTS: _Decoder(_KubeVirtObject, _read_kubevirt),
    Resource.CONFIGMAPS: _Decoder(_ConfigMapObject, _read_config_map),
}
