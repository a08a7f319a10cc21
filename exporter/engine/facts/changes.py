"""The changes that are applied to the store, and the notices that it sends to its subscribers."""

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from enum import IntEnum, auto
from typing import TypeAlias

from msgspec import Struct

from exporter.engine.facts.model import Fact, Resource, Why


Key: TypeAlias = tuple[str, str]
"""Namespace and name."""
NamesByNamespace: TypeAlias = Mapping[str, AbstractSet[str]]
"""Names by namespace. A `Key` for each object of a list would fragment the memory."""


class Observed(Struct, frozen=True, gc=False):
    """An object was added or modified; its reasons replace the earlier ones."""

    fact: Fact
    reasons: tuple[Why, ...] = ()


class Removed(Struct, frozen=True, gc=False):
    """An object was deleted; if `uid` is set, the object is removed only if it has that UID."""

    resource: Resource
    namespace: str
    name: str
    uid: str = ""


class Listed(Struct, frozen=True):
    """A complete list of one namespace (None: all). An object not in the list no longer exists."""

    resource: Resource
    names: NamesByNamespace
    namespace: str | None


class Unreadable(Struct, frozen=True):
    """An object cannot be read; `uid` is "" if the UID cannot be read either."""

    resource: Resource
    namespace: str
    name: str
    uid: str = ""


class EvictionAdmitted(Struct, frozen=True):
    """A user's eviction of a pod was allowed, so KubeVirt may mark the VMI."""

    namespace: str
    pod: str
    user: str


class NodesSeen(Struct, frozen=True):
    """Whether nodes can be read; without them, only VMIMs show evacuations by a taint."""

    seen: bool


Change: TypeAlias = Observed | Removed | Listed | Unreadable | EvictionAdmitted | NodesSeen


class NoticeKind(IntEnum):  # hashed in C, unlike an Enum; each change hashes it twice
    """What has changed in the store.

    `EVIDENCE`: the evidence of one VMI. `GONE`: the VMI with this key and UID does not exist any
    more. `EVERYTHING`: the evidence of all VMIs, because KubeVirt began or ended an update, or our
    clock was set.
    """

    EVIDENCE = auto()
    GONE = auto()
    EVERYTHING = auto()


class Notice(Struct, frozen=True, gc=False):
    """Something may have changed; key and UID are empty for `EVERYTHING`."""

    kind: NoticeKind
    key: Key = ("", "")
    uid: str = ""
