"""The objects of the simulated cluster: resource versions, watch caches, snapshots. No I/O.

All resources share one version counter, like etcd's revision. An object is encoded once per change
and stored as bytes only, so that 100,000 objects and many watches stay cheap.
"""

from __future__ import annotations

import bisect
import random
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import msgspec

from exporter.demo import status
from exporter.demo.objects import Object, format_time
from exporter.demo.status import ApiResource


VMIS = ApiResource("kubevirt.io", "v1", "virtualmachineinstances", "VirtualMachineInstance")
MIGRATIONS = ApiResource(
    "kubevirt.io",
    "v1",
    "virtualmachineinstancemigrations",
    "VirtualMachineInstanceMigration",
    status=True,
)
KUBEVIRTS = ApiResource("kubevirt.io", "v1", "kubevirts", "KubeVirt", status=True)
PODS = ApiResource("", "v1", "pods", "Pod", status=True)
NAMESPACES = ApiResource("", "v1", "namespaces", "Namespace", namespaced=False, status=True)
NODES = ApiResource("", "v1", "nodes", "Node", namespaced=False, status=True)
BUDGETS = ApiResource("policy", "v1", "poddisruptionbudgets", "PodDisruptionBudget", status=True)
EVICTIONS = ApiResource("lifecycle.k8s.io", "v1alpha1", "evictions", "Eviction", status=True)
EVICTION_REQUESTS = ApiResource(
    "lifecycle.k8s.io", "v1alpha1", "evictionrequests", "EvictionRequest", status=True
)
LEASES = ApiResource("coordination.k8s.io", "v1", "leases", "Lease")
RESOURCES = (
    VMIS,
    MIGRATIONS,
    KUBEVIRTS,
    PODS,
    NAMESPACES,
    NODES,
    BUDGETS,
    EVICTIONS,
    EVICTION_REQUESTS,
    LEASES,
)

NAME_ALPHABET = "bcdfghjklmnpqrstvwxz2456789"
"""The characters of generated names (apimachinery `util/rand`)."""


UNSCHEDULABLE_FIELD = "spec.unschedulable"
"""A field of nodes for field selectors; it is kept with the labels of an entry."""


class _Labelled(msgspec.Struct):
    labels: dict[str, str] | None = None


class _NodeSpec(msgspec.Struct):
    unschedulable: bool = False


class _Selectable(msgspec.Struct):
    metadata: _Labelled
    spec: _NodeSpec | None = None


_read_selectable = msgspec.json.Decoder(_Selectable).decode
_encode = msgspec.json.Encoder().encode
_encode_sorted = msgspec.json.Encoder(order="sorted").encode


@dataclass(frozen=True, slots=True)
class StoredObject:
    """A stored object; keys sort as in etcd."""

    key: str
    revision: int
    body: bytes

    @property
    def labels(self) -> Mapping[str, str]:
        """The labels and fields that selectors can use, decoded from the stored bytes."""
        selectable = _read_selectable(self.body)
        labels = selectable.metadata.labels or {}
        is_cordoned = selectable.spec is not None and selectable.spec.unschedulable
        return labels | {UNSCHEDULABLE_FIELD: "true"} if is_cordoned else labels


@dataclass(frozen=True, slots=True)
class Change:
    """One change of an object: before and after, encoded once for all watches."""

    revision: int
    key: str
    kind: str
    body: bytes
    labels: Mapping[str, str] | None
    """None if the object was deleted."""
    before: StoredObject | None
    labels_before: Mapping[str, str] | None


class WatchCache:
    """All objects of one resource, and the window of its latest changes."""

    def __init__(self, window: int) -> None:
        self.keys: list[str] = []
        self.entries: dict[str, StoredObject] = {}
        self.changes: list[Change] = []
        self.oldest = 0
        """The oldest revision from which a watch may start."""
        self._lost = 0
        """The newest revision whose change was dropped. A watch that has not sent it ends."""
        self._window = window

    def put(self, entry: StoredObject) -> None:
        """Add or replace an object."""
        if entry.key not in self.entries:
            bisect.insort(self.keys, entry.key)
        self.entries[entry.key] = entry

    def remove(self, key: str) -> None:
        """Remove an object."""
        del self.entries[key]
        del self.keys[bisect.bisect_left(self.keys, key)]

    def record(self, change: Change) -> None:
        """Add a change to the window."""
        self.changes.append(change)
        # Dropping half of the list at a time keeps the cost per change constant.
        if len(self.changes) > 2 * self._window:
            self._lost = self.changes[-self._window - 1].revision
            self.changes = self.changes[-self._window :]
            self.expire(self._lost)

    def expire(self, revision: int) -> None:
        """Refuse new watches from before this revision; open ones continue."""
        self.oldest = max(self.oldest, revision)

    def check(self, revision: int) -> None:
        """Refuse a watch from an expired revision."""
        if revision < self.oldest:
            raise status.too_old(revision, self.oldest)

    def changes_since(self, revision: int) -> list[Change] | None:
        """The changes after a revision; None if some have left the window."""
        if revision < self._lost:
            return None
        return self.changes[bisect.bisect(self.changes, revision, key=_revision) :]

    def all(self) -> tuple[StoredObject, ...]:
        """Every object, sorted by key."""
        return tuple(self.entries[key] for key in self.keys)


def _revision(change: Change) -> int:
    return change.revision


class ObjectStore:
    """All objects of the cluster, for the API server and the simulated controllers."""

    def __init__(
        self,
        clock: Callable[[], datetime],
        seed: int = 1,
        window: int = 10_000,
        snapshots: int = 8,
    ) -> None:
        self.revision = 1
        self.clock = clock
        self.caches = {resource: WatchCache(window) for resource in RESOURCES}
        self.listeners: set[Callable[[], None]] = set()
        self._random = random.Random(seed)
        self._snapshots: OrderedDict[tuple[ApiResource, int], tuple[StoredObject, ...]] = (
            OrderedDict()
        )
        self._snapshots_kept = snapshots

    # Reading

    def get(self, resource: ApiResource, namespace: str | None, name: str) -> Object:
        """Get an object; 404 if it does not exist."""
        return decode(self.entry(resource, namespace, name))

    def find(self, resource: ApiResource, namespace: str | None, name: str) -> Object | None:
        """Get an object, or None."""
        entry = self.caches[resource].entries.get(key_of(namespace, name))
        return None if entry is None else decode(entry)

    def entry(self, resource: ApiResource, namespace: str | None, name: str) -> StoredObject:
        """Get a stored object; 404 if it does not exist."""
        entry = self.caches[resource].entries.get(key_of(namespace, name))
        if entry is None:
            raise status.not_found(resource, name)
        return entry

    def objects(self, resource: ApiResource, namespace: str | None = None) -> Iterator[Object]:
        """Every object of a resource, or of one namespace."""
        for entry in self.caches[resource].all():
            if namespace is None or entry.key.startswith(f"{namespace}/"):
                yield decode(entry)

    def keep_snapshot(self, resource: ApiResource) -> None:
        """Keep the present objects, so that later pages show the same list."""
        self._snapshots[resource, self.revision] = self.caches[resource].all()
        if len(self._snapshots) > self._snapshots_kept:
            self._snapshots.popitem(last=False)

    def snapshot(self, resource: ApiResource, revision: int) -> tuple[StoredObject, ...] | None:
        """The objects at a revision, if it is the present one or was kept; else None."""
        if revision == self.revision:
            return self.caches[resource].all()
        return self._snapshots.get((resource, revision))

    # Writing

    def create(self, resource: ApiResource, given: Object) -> Object:
        """Create an object; the server sets uid, timestamps, version and generation."""
        metadata = dict(given.get("metadata") or {})
        namespace = metadata.get("namespace") if resource.namespaced else None
        if not metadata.get("name"):
            if not metadata.get("generateName"):
                message = "Required value: name or generateName is required"
                causes = [("FieldValueRequired", "metadata.name", message)]
                raise status.invalid(resource.group, resource.kind, "", causes)
            suffix = "".join(self._random.choices(NAME_ALPHABET, k=5))
            metadata["name"] = metadata["generateName"] + suffix
        if key_of(namespace, metadata["name"]) in self.caches[resource].entries:
            raise status.already_exists(resource, metadata["name"])
        metadata["uid"] = str(uuid.UUID(int=self._random.getrandbits(128), version=4))
        metadata["creationTimestamp"] = format_time(self.clock())
        metadata.pop("deletionTimestamp", None)
        if resource.counts_generations:
            metadata["generation"] = 1
        obj = {**given, "metadata": metadata}
        if resource.status:
            obj.pop("status", None)
        if resource is PODS:
            obj["status"] = {"phase": "Pending", "qosClass": "BestEffort"}
        return self._write(resource, obj, None)

    def update(self, resource: ApiResource, given: Object, *, subresource: bool = False) -> Object:
        """Replace an object as PUT does; with `subresource` only its status."""
        metadata = given.get("metadata") or {}
        namespace = metadata.get("namespace") if resource.namespaced else None
        old = self.entry(resource, namespace, metadata.get("name", ""))
        before = decode(old)
        version = metadata.get("resourceVersion")
        if version and version != str(old.revision):
            raise status.conflict(resource, metadata["name"])
        if metadata.get("uid", before["metadata"]["uid"]) != before["metadata"]["uid"]:
            why = (
                f"Precondition failed: UID in precondition: {metadata['uid']}, "
                f"UID in object meta: {before['metadata']['uid']}"
            )
            raise status.conflict(resource, metadata["name"], why)
        after = _merge_update(resource, before, given, subresource=subresource)
        after["metadata"]["resourceVersion"] = str(old.revision)
        if after == before:
            # An update without a difference causes no event.
            return before
        last_touch = after["metadata"].get("deletionTimestamp") and resource is not PODS
        if last_touch and not after["metadata"].get("finalizers"):
            return self._remove(resource, old, after)
        return self._write(resource, after, old)

    def patch(
        self,
        resource: ApiResource,
        namespace: str | None,
        name: str,
        changes: Object,
        *,
        subresource: bool = False,
    ) -> Object:
        """Apply a merge patch (RFC 7396)."""
        merged = merge(self.get(resource, namespace, name), changes)
        version = (changes.get("metadata") or {}).get("resourceVersion")
        if not version:
            merged["metadata"].pop("resourceVersion", None)
        return self.update(resource, merged, subresource=subresource)

    def delete(
        self, resource: ApiResource, namespace: str | None, name: str, grace: int | None = None
    ) -> Object | None:
        """Delete an object; returns it if it waits for its finalizers or the kubelet."""
        old = self.entry(resource, namespace, name)
        now = decode(old)
        metadata = now["metadata"]
        seconds = _grace(resource, now, grace)
        if metadata.get("finalizers") or seconds > 0:
            if "deletionTimestamp" in metadata:
                return now
            metadata["deletionTimestamp"] = format_time(self.clock())
            metadata["deletionGracePeriodSeconds"] = seconds
            if resource.counts_generations:
                metadata["generation"] = metadata.get("generation", 1) + 1
            return self._write(resource, now, old)
        self._remove(resource, old, now)
        return None

    def expire(self, resource: ApiResource | None = None) -> None:
        """Refuse new watches from earlier revisions, as a new watch cache does."""
        for cached, cache in self.caches.items():
            if resource in (None, cached):
                cache.expire(self.revision)

    def compact(self, resource: ApiResource | None = None) -> None:
        """Expire watches and paged lists of earlier revisions, as etcd's compaction does."""
        self.expire(resource)
        for snapshot in list(self._snapshots):
            if resource in (None, snapshot[0]):
                del self._snapshots[snapshot]

    def _write(self, resource: ApiResource, obj: Object, old: StoredObject | None) -> Object:
        self.revision += 1
        obj["metadata"]["resourceVersion"] = str(self.revision)
        entry = StoredObject(
            key_of(obj["metadata"].get("namespace"), obj["metadata"]["name"]),
            self.revision,
            encode(resource, obj),
        )
        kind = "ADDED" if old is None else "MODIFIED"
        before = None if old is None else old.labels
        self.caches[resource].put(entry)
        change = Change(self.revision, entry.key, kind, entry.body, entry.labels, old, before)
        self._publish(resource, change)
        return decode(entry)

    def _remove(self, resource: ApiResource, old: StoredObject, last: Object) -> Object:
        self.revision += 1
        self.caches[resource].remove(old.key)
        body = encode_deleted(resource, old, self.revision)
        change = Change(self.revision, old.key, "DELETED", body, None, old, old.labels)
        self._publish(resource, change)
        return last

    def _publish(self, resource: ApiResource, change: Change) -> None:
        self.caches[resource].record(change)
        for listener in tuple(self.listeners):
            listener()


def encode_deleted(resource: ApiResource, entry: StoredObject, revision: int) -> bytes:
    """The last state of an object, with the version of its deletion.

    `storage/cacher: convertToWatchEvent` does the same.
    """
    last = decode(entry)
    last["metadata"]["resourceVersion"] = str(revision)
    return encode(resource, last)


def key_of(namespace: str | None, name: str) -> str:
    """The key of an object; keys sort as in etcd."""
    return f"{namespace}/{name}" if namespace else name


def encode(resource: ApiResource, obj: Object) -> bytes:
    """Encode an object for the wire; built-in kinds start with kind and version.

    Lists of built-in kinds cut that prefix off.
    """
    bare = {field: value for field, value in obj.items() if field not in ("apiVersion", "kind")}
    if resource.custom:
        return _encode_sorted({"apiVersion": resource.api_version, "kind": resource.kind} | bare)
    return _encode({"kind": resource.kind, "apiVersion": resource.api_version} | bare)


def decode(entry: StoredObject) -> Object:
    """Decode a stored object."""
    return decode_body(entry.body)


def decode_body(body: bytes) -> Object:
    """Decode an object."""
    decoded: Object = msgspec.json.decode(body)
    return decoded


def merge(target: Any, changes: Any) -> Any:
    """Apply a JSON merge patch (RFC 7396)."""
    if not isinstance(changes, dict):
        return changes
    merged = dict(target) if isinstance(target, dict) else {}
    for field, value in changes.items():
        if value is None:
            merged.pop(field, None)
        else:
            merged[field] = merge(merged.get(field), value)
    return merged


def _merge_update(
    resource: ApiResource, before: Object, given: Object, *, subresource: bool
) -> Object:
    """The object after an update; a status subresource is updated separately."""
    if subresource:
        after = {**before, "metadata": dict(before["metadata"])}
        after.pop("status", None)
        return after | ({"status": given["status"]} if "status" in given else {})
    after = {**given, "metadata": dict(given["metadata"])}
    if resource.status:
        after.pop("status", None)
        after |= {"status": before["status"]} if "status" in before else {}
    # Fields that the server owns stay, whatever the caller sends.
    for owned in ("uid", "creationTimestamp", "generation", "deletionTimestamp", "generateName"):
        after["metadata"].pop(owned, None)
        if owned in before["metadata"]:
            after["metadata"][owned] = before["metadata"][owned]
    after |= {"apiVersion": resource.api_version, "kind": resource.kind}
    if resource.counts_generations and _spec(resource, after) != _spec(resource, before):
        after["metadata"]["generation"] = before["metadata"].get("generation", 1) + 1
    return after


def _spec(resource: ApiResource, obj: Object) -> Object:
    """The fields whose changes count as a new generation."""
    left_out = {"metadata", "status"} if resource.status else {"metadata"}
    return {field: value for field, value in obj.items() if field not in left_out}


def _grace(resource: ApiResource, obj: Object, asked: int | None) -> int:
    """Seconds that a deletion waits: 0, except for an unfinished pod on a node (`strategy.go`)."""
    if resource is not PODS or not obj.get("spec", {}).get("nodeName"):
        return 0
    if obj.get("status", {}).get("phase") in ("Succeeded", "Failed"):
        return 0
    default = obj.get("spec", {}).get("terminationGracePeriodSeconds", 30)
    return int(default if asked is None else asked)
