"""Records the simulated cluster, in version 1 of the format of `python -m exporter replay`.

This does not use the exporter's own recorder, so that writer and reader share no mistake.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec

from exporter.demo import objects
from exporter.demo.cluster import Cluster
from exporter.demo.objects import Object
from exporter.demo.status import ApiResource
from exporter.demo.store import KUBEVIRTS, MIGRATIONS, PODS, VMIS, decode_body


_METADATA = dict.fromkeys(("namespace", "name", "uid", "creationTimestamp", "deletionTimestamp"))
_STATE = dict.fromkeys(
    (
        "migrationUid",
        "sourceNode",
        "targetNode",
        "failureReason",
        "startTimestamp",
        "endTimestamp",
        "completed",
        "failed",
        "mode",
    )
)
_CONDITIONS = dict.fromkeys(("type", "status", "lastTransitionTime"))
_FIELDS: Mapping[ApiResource, Mapping[str, Any]] = {
    VMIS: {
        "metadata": _METADATA | {"annotations": {objects.EVICTION_SOURCE: None}},
        "spec": {"evictionStrategy": None, "domain": {"memory": {"guest": None}}},
        "status": {
            "nodeName": None,
            "phase": None,
            "evacuationNodeName": None,
            "migrationMethod": None,
            "migrationState": _STATE
            | {"migrationConfiguration": {"completionTimeoutPerGiB": None}},
            "conditions": _CONDITIONS,
        },
    },
    MIGRATIONS: {
        "metadata": _METADATA
        | {"annotations": {objects.EVACUATION: None, objects.WORKLOAD_UPDATE: None}},
        "spec": {"vmiName": None, "priority": None},
        "status": {
            "phase": None,
            "phaseTransitionTimestamps": {"phase": None, "phaseTransitionTimestamp": None},
            "migrationState": _STATE,
            "conditions": _CONDITIONS,
        },
    },
    PODS: {
        "metadata": _METADATA
        | {
            "labels": {objects.CREATED_BY: None, objects.MIGRATION_JOB: None},
            "annotations": {objects.EVICTION_IN_PROGRESS: None},
        },
        "spec": {"nodeName": None},
        "status": {"phase": None, "conditions": {"type": None, "status": None}},
    },
    KUBEVIRTS: {
        "metadata": _METADATA,
        "spec": {"configuration": {"evictionStrategy": None, "migrations": None}},
    },
}
"""The recorded fields of each resource; None records the whole value."""


class ChangeRecorder:
    """Turns the store's changes into lines. A change outside the recorded fields gives no line."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._last: dict[tuple[ApiResource, str], bytes] = {}
        self._vmis: dict[str, Object] = {}
        self._lines: list[bytes] = []
        self._read = dict.fromkeys(_FIELDS, 0)

    def vmis(self) -> list[Object]:
        """Every VMI as last seen."""
        self._record_changes()
        return list(self._vmis.values())

    def begin(self) -> Iterator[bytes]:
        """The header and the initial state."""
        yield _encode({"format": "kubevirt-eviction-exporter/recording", "version": 1})
        self._cluster.store.listeners.add(self._record_changes)
        self._record_changes()
        self._lines.clear()
        self._last.clear()
        for resource in _FIELDS:
            for entry in self._cluster.store.caches[resource].all():
                self._add("ADDED", resource, entry.key, entry.body)
            self._lines.append(self._line("SYNCED", resource, None))
        yield from self.take()

    def take(self) -> Iterator[bytes]:
        """The lines since the last call."""
        lines, self._lines = self._lines, []
        yield from lines

    def end(self) -> bytes:
        """The last line."""
        return _encode({"at": _stamp(self._cluster.instant), "type": "ENDED"})

    def _record_changes(self) -> None:
        """Record what has changed in the store."""
        for resource in _FIELDS:
            changes = self._cluster.store.caches[resource].changes_since(self._read[resource])
            for change in changes or ():
                self._read[resource] = change.revision
                self._add(change.kind, resource, change.key, change.body)

    def _add(self, kind: str, resource: ApiResource, key: str, body: bytes) -> None:
        obj = decode_body(body)
        selected = _select(obj, _FIELDS[resource])
        if kind == "DELETED":
            self._last.pop((resource, key), None)
            self._vmis.pop(key, None) if resource is VMIS else None
            selected = {
                "metadata": _select(obj["metadata"], {"namespace": None, "name": None, "uid": None})
            }
        else:
            if resource is VMIS:
                self._vmis[key] = obj
            encoded = msgspec.json.encode(selected)
            if self._last.get((resource, key)) == encoded:
                return
            self._last[resource, key] = encoded
        self._lines.append(self._line(kind, resource, selected))

    def _line(self, kind: str, resource: ApiResource, obj: object) -> bytes:
        head = {"at": _stamp(self._cluster.instant), "type": kind, "resource": resource.plural}
        return _encode(head if obj is None else head | {"object": obj})


def _select(value: Any, fields: Mapping[str, Any] | None) -> Any:
    """The part of decoded JSON that is recorded; for a list, that part of each item."""
    if fields is None or value is None:
        return value
    if isinstance(value, list):
        return [_select(item, fields) for item in value]
    return {name: _select(value[name], below) for name, below in fields.items() if name in value}


def _encode(line: object) -> bytes:
    return msgspec.json.encode(line) + b"\n"


def _stamp(instant: datetime) -> str:
    return instant.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
