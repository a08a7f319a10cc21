"""The objects of the simulated cluster: resource versions, the event window and paging; no I/O.

Versions are one counter over all resources, as etcd's revision is. An object is serialised once
per change and kept as bytes only, so that 100,000 of them and many watchers stay cheap.
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
from exporter.demo.objects import Object, stamp
from exporter.demo.status import Resource


VMIS = Resource("kubevirt.io", "v1", "virtualmachineinstances", "VirtualMachineInstance")
MIGRATIONS = Resource(
    "kubevirt.io",
    "v1",
    "virtualmachineinstancemigrations",
    "VirtualMachineInstanceMigration",
    status=True,
)
KUBEVIRTS = Resource("kubevirt.io", "v1", "kubevirts", "KubeVirt", status=True)
PODS = Resource("", "v1", "pods", "Pod", status=True)
NAMESPACES = Resource("", "v1", "namespaces", "Namespace", namespaced=False, status=True)
NODES = Resource("", "v1", "nodes", "Node", namespaced=False, status=True)
RESOURCES = (VMIS, MIGRATIONS, KUBEVIRTS, PODS, NAMESPACES, NODES)

NAME_ALPHABET = "bcdfghjklmnpqrstvwxz2456789"
"""The letters of generated names (apimachinery `util/rand`): no vowels, no look-alikes."""


class _Labelled(msgspec.Struct):
    labels: dict[str, str] | None = None


class _Metadata(msgspec.Struct):
    metadata: _Labelled


_read_labels = msgspec.json.Decoder(_Metadata).decode
_encode = msgspec.json.Encoder().encode
_encode_sorted = msgspec.json.Encoder(order="sorted").encode


@dataclass(frozen=True, slots=True)
class Entry:
    """An object at rest; `key` sorts as etcd's key does."""

    key: str
    revision: int
    body: bytes

    @property
    def labels(self) -> Mapping[str, str]:
        """Its labels, read off the stored bytes."""
        return _read_labels(self.body).metadata.labels or {}


@dataclass(frozen=True, slots=True)
class Change:
    """One change: what became of an object and what it was before, serialised once for all."""

    revision: int
    key: str
    kind: str
    body: bytes
    labels: Mapping[str, str] | None
    """None: the object is gone."""
    before: Entry | None
    labels_before: Mapping[str, str] | None


class Shelf:
    """All objects of one resource, and the window of its latest changes."""

    def __init__(self, resource: Resource, window: int) -> None:
        self.resource = resource
        self.keys: list[str] = []
        self.entries: dict[str, Entry] = {}
        self.changes: list[Change] = []
        self.oldest = 0
        """The oldest revision from which a new watch may start."""
        self._lost = 0
        """The newest revision whose change is kept for nobody, open watches included."""
        self._window = window

    def put(self, entry: Entry) -> None:
        """Add an object or replace it."""
        if entry.key not in self.entries:
            bisect.insort(self.keys, entry.key)
        self.entries[entry.key] = entry

    def remove(self, key: str) -> None:
        """Take an object away."""
        del self.entries[key]
        del self.keys[bisect.bisect_left(self.keys, key)]

    def remember(self, change: Change) -> None:
        """Add a change to the window."""
        self.changes.append(change)
        # Forgetting half at once makes the cost of it vanish in the appends.
        if len(self.changes) > 2 * self._window:
            self._lost = self.changes[-self._window - 1].revision
            self.changes = self.changes[-self._window :]
            self.forget(self._lost)

    def forget(self, revision: int) -> None:
        """Let no watch start from before this revision; those that are open go on."""
        self.oldest = max(self.oldest, revision)

    def check(self, revision: int) -> None:
        """Refuse a watch from a revision that is forgotten."""
        if revision < self.oldest:
            raise status.too_old(revision, self.oldest)

    def since(self, revision: int) -> list[Change] | None:
        """The changes after a revision; None where the window has moved past them."""
        if revision < self._lost:
            return None
        return self.changes[bisect.bisect(self.changes, revision, key=_revision) :]

    def all(self) -> tuple[Entry, ...]:
        """Every object, in the order of their keys."""
        return tuple(self.entries[key] for key in self.keys)


def _revision(change: Change) -> int:
    return change.revision


class Store:
    """What the API server keeps, for the server and for the simulated controllers alike."""

    def __init__(
        self,
        clock: Callable[[], datetime],
        seed: int = 1,
        window: int = 10_000,
        snapshots: int = 8,
    ) -> None:
        self.revision = 1
        self.clock = clock
        self.shelves = {resource: Shelf(resource, window) for resource in RESOURCES}
        self.listeners: set[Callable[[], None]] = set()
        self._random = random.Random(seed)
        self._snapshots: OrderedDict[tuple[str, int], tuple[Entry, ...]] = OrderedDict()
        self._snapshots_kept = snapshots

    # Reading

    def get(self, resource: Resource, namespace: str | None, name: str) -> Object:
        """One object, or a refusal."""
        return decode(self.entry(resource, namespace, name))

    def find(self, resource: Resource, namespace: str | None, name: str) -> Object | None:
        """One object, or None."""
        entry = self.shelves[resource].entries.get(key_of(namespace, name))
        return None if entry is None else decode(entry)

    def entry(self, resource: Resource, namespace: str | None, name: str) -> Entry:
        """One object as it is stored, or a refusal."""
        entry = self.shelves[resource].entries.get(key_of(namespace, name))
        if entry is None:
            raise status.not_found(resource, name)
        return entry

    def objects(self, resource: Resource, namespace: str | None = None) -> Iterator[Object]:
        """Every object of a resource, or of a namespace."""
        for entry in self.shelves[resource].all():
            if namespace is None or entry.key.startswith(f"{namespace}/"):
                yield decode(entry)

    def keep(self, resource: Resource, entries: tuple[Entry, ...]) -> None:
        """Remember the list as it is now, so that later pages tell the same story."""
        self._snapshots[resource.plural, self.revision] = entries
        if len(self._snapshots) > self._snapshots_kept:
            self._snapshots.popitem(last=False)

    def kept(self, resource: Resource, revision: int) -> tuple[Entry, ...] | None:
        """The list as it was at a revision, if that is known."""
        if revision == self.revision:
            return self.shelves[resource].all()
        return self._snapshots.get((resource.plural, revision))

    # Writing

    def create(self, resource: Resource, given: Object) -> Object:
        """Create an object, with all that the server owns in it."""
        metadata = dict(given.get("metadata") or {})
        namespace = metadata.get("namespace") if resource.namespaced else None
        if not metadata.get("name"):
            if not metadata.get("generateName"):
                message = "Required value: name or generateName is required"
                causes = [("FieldValueRequired", "metadata.name", message)]
                raise status.invalid(resource.group, resource.kind, "", causes)
            suffix = "".join(self._random.choices(NAME_ALPHABET, k=5))
            metadata["name"] = metadata["generateName"] + suffix
        if key_of(namespace, metadata["name"]) in self.shelves[resource].entries:
            raise status.already_exists(resource, metadata["name"])
        metadata["uid"] = str(uuid.UUID(int=self._random.getrandbits(128), version=4))
        metadata["creationTimestamp"] = stamp(self.clock())
        metadata.pop("deletionTimestamp", None)
        if resource.counts_generations:
            metadata["generation"] = 1
        made = {**given, "metadata": metadata}
        if resource.status:
            made.pop("status", None)
        if resource is PODS:
            made["status"] = {"phase": "Pending", "qosClass": "BestEffort"}
        return self._write(resource, made, None)

    def update(self, resource: Resource, given: Object, *, subresource: bool = False) -> Object:
        """Replace an object, or with `subresource` its status alone, as PUT does."""
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
            # A write that changes nothing is not written, so no event follows it.
            return before
        last_touch = after["metadata"].get("deletionTimestamp") and resource is not PODS
        if last_touch and not after["metadata"].get("finalizers"):
            return self._remove(resource, old, after)
        return self._write(resource, after, old)

    def patch(
        self,
        resource: Resource,
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
        self, resource: Resource, namespace: str | None, name: str, grace: int | None = None
    ) -> Object | None:
        """Delete an object; what is left while it still waits for its finalizers or its kubelet."""
        old = self.entry(resource, namespace, name)
        now = decode(old)
        metadata = now["metadata"]
        seconds = _grace(resource, now, grace)
        if metadata.get("finalizers") or seconds > 0:
            if "deletionTimestamp" in metadata:
                return now
            metadata["deletionTimestamp"] = stamp(self.clock())
            metadata["deletionGracePeriodSeconds"] = seconds
            if resource.counts_generations:
                metadata["generation"] = metadata.get("generation", 1) + 1
            return self._write(resource, now, old)
        self._remove(resource, old, now)
        return None

    def forget(self, resource: Resource | None = None) -> None:
        """Let no watch start from before now, as a fresh watch cache does."""
        for shelf in self.shelves.values():
            if resource is None or shelf.resource is resource:
                shelf.forget(self.revision)

    def compact(self, resource: Resource | None = None) -> None:
        """Forget the past, paged lists under way included, as etcd's compaction does."""
        self.forget(resource)
        for kept in list(self._snapshots):
            if resource is None or kept[0] == resource.plural:
                del self._snapshots[kept]

    def _write(self, resource: Resource, made: Object, old: Entry | None) -> Object:
        self.revision += 1
        made["metadata"]["resourceVersion"] = str(self.revision)
        entry = Entry(
            key_of(made["metadata"].get("namespace"), made["metadata"]["name"]),
            self.revision,
            encode(resource, made),
        )
        labels = dict(made["metadata"].get("labels") or {})
        kind = "ADDED" if old is None else "MODIFIED"
        before = None if old is None else old.labels
        self.shelves[resource].put(entry)
        change = Change(self.revision, entry.key, kind, entry.body, labels, old, before)
        self._tell(resource, change)
        return decode(entry)

    def _remove(self, resource: Resource, old: Entry, last: Object) -> Object:
        self.revision += 1
        self.shelves[resource].remove(old.key)
        body = departed(resource, old, self.revision)
        change = Change(self.revision, old.key, "DELETED", body, None, old, old.labels)
        self._tell(resource, change)
        return last

    def _tell(self, resource: Resource, change: Change) -> None:
        self.shelves[resource].remember(change)
        for listener in tuple(self.listeners):
            listener()


def departed(resource: Resource, entry: Entry, revision: int) -> bytes:
    """The object as a watcher last saw it, at the revision at which it went.

    The version is that of the deletion (`storage/cacher: convertToWatchEvent`).
    """
    last = decode(entry)
    last["metadata"]["resourceVersion"] = str(revision)
    return encode(resource, last)


def key_of(namespace: str | None, name: str) -> str:
    """The key of an object, which sorts as the one in etcd."""
    return f"{namespace}/{name}" if namespace else name


def encode(resource: Resource, made: Object) -> bytes:
    """The object as it goes over the wire, its kind first where a list leaves the kind out."""
    bare = {field: value for field, value in made.items() if field not in ("apiVersion", "kind")}
    if resource.custom:
        return _encode_sorted({"apiVersion": resource.api_version, "kind": resource.kind} | bare)
    return _encode({"kind": resource.kind, "apiVersion": resource.api_version} | bare)


def decode(entry: Entry) -> Object:
    """The object at rest."""
    return decode_body(entry.body)


def decode_body(body: bytes) -> Object:
    """The object in these bytes."""
    decoded: Object = msgspec.json.decode(body)
    return decoded


def merge(target: Any, changes: Any) -> Any:
    """A JSON merge patch applied (RFC 7396): null removes, objects merge, all else replaces."""
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
    resource: Resource, before: Object, given: Object, *, subresource: bool
) -> Object:
    """What an update may change: the status alone, or all but the status where it has its own."""
    if subresource:
        after = {**before, "metadata": dict(before["metadata"])}
        after.pop("status", None)
        return after | ({"status": given["status"]} if "status" in given else {})
    after = {**given, "metadata": dict(given["metadata"])}
    if resource.status:
        after.pop("status", None)
        after |= {"status": before["status"]} if "status" in before else {}
    # What belongs to the server stays as it was, whatever the caller sends.
    for owned in ("uid", "creationTimestamp", "generation", "deletionTimestamp", "generateName"):
        after["metadata"].pop(owned, None)
        if owned in before["metadata"]:
            after["metadata"][owned] = before["metadata"][owned]
    after |= {"apiVersion": resource.api_version, "kind": resource.kind}
    if resource.counts_generations and _spec(resource, after) != _spec(resource, before):
        after["metadata"]["generation"] = before["metadata"].get("generation", 1) + 1
    return after


def _spec(resource: Resource, made: Object) -> Object:
    """What a generation counts: everything but metadata, and but a status of its own."""
    left_out = {"metadata", "status"} if resource.status else {"metadata"}
    return {field: value for field, value in made.items() if field not in left_out}


def _grace(resource: Resource, made: Object, asked: int | None) -> int:
    """Only a running pod that is bound to a node waits for its kubelet (`pod/strategy.go`)."""
    if resource is not PODS or not made.get("spec", {}).get("nodeName"):
        return 0
    if made.get("status", {}).get("phase") in ("Succeeded", "Failed"):
        return 0
    default = made.get("spec", {}).get("terminationGracePeriodSeconds", 30)
    return int(default if asked is None else asked)
