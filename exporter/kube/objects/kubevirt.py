"""Parses Kubernetes and KubeVirt objects and watch events.

It turns raw JSON into facts (`engine.facts.model`) and reasons, or raises `InvalidObject`. Only
fields in use are decoded: `wire` defines them, `facts` and `reasons` read them, and `writing`
writes them. No other module knows field paths.
"""

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Generic, TypeAlias, TypeVar

import msgspec
from msgspec import Struct, field

from exporter.engine.evacuations.ended_migrations import EndedMigration
from exporter.engine.facts.model import Fact, KubeVirtSettings, Resource, Vmi, Vmim, Why
from exporter.errors import MALFORMED, ExporterError
from exporter.kube.objects import evictions, facts, places, reasons, wire
from exporter.kube.objects.facts import text_of
from exporter.text import clean


LAUNCHER_SELECTOR = "kubevirt.io=virt-launcher"
INITIAL_EVENTS_END = "k8s.io/initial-events-end"

_ESCAPE = re.compile(rb"\\(?:u[dD][89abAB]..\\u[dD][c-fC-F]..|(u[dD][89a-fA-F]..)|.)", re.DOTALL)
"""An escape in JSON; the group is half a surrogate pair."""


class InvalidObject(ExporterError):
    """An object that cannot be used; `why` says what was expected, in bounded text.

    `namespace` and `name` are None and `uid` is "" if they cannot be read either.
    """

    def __init__(
        self, why: str, *, namespace: str | None = None, name: str | None = None, uid: str = ""
    ) -> None:
        super().__init__(clean(why))
        self.uid = uid
        self.why = str(self)
        self.namespace = namespace
        self.name = name


class NoEvent(InvalidObject):
    """A line of a watch that is no watch event, such as HTML or an event of an unknown type."""


class _Named(Struct, gc=False):
    metadata: wire.LooseMetadata


_Object = TypeVar("_Object", bound=wire.Object)
_Fact = TypeVar("_Fact", bound=Fact)


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


class Traits(Struct, frozen=True, gc=False):
    """The parts of a VMI that an override of the policy can match; the labels are still JSON."""

    labels: msgspec.Raw
    priority_class: str

    def read_labels(self) -> dict[str, object]:
        """The labels; an empty dict if they cannot be read."""
        try:
            return msgspec.json.decode(self.labels, type=dict[str, object] | None) or {}
        except MALFORMED:
            return {}


def _read_no_end() -> None:
    """The record of an object that is no finished VMIM."""


class Changed(Struct, frozen=True, gc=False):
    """An object was added or modified, or is an item of a list.

    `reasons` were read by the module `reasons`. `read_end` reads the record of a finished VMIM,
    which most lists need of none. The `traits` of a VMI choose its policy.
    """

    fact: Fact
    namespace: str
    name: str
    resource_version: str
    modified: bool = False
    reasons: tuple[Why, ...] = ()
    read_end: Callable[[], EndedMigration | None] = _read_no_end
    traits: Traits | None = None


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
    """One page of a list. Items are raw, so that an invalid item does not affect the others."""

    items: list[msgspec.Raw]
    resource_version: str
    continue_token: str


def parse_object(resource: Resource, raw: bytes | msgspec.Raw) -> Changed:
    """Parse one object. Raises `InvalidObject`."""
    decoder = _DECODERS[resource]
    try:
        return decoder.changed(decoder.object(raw))
    except MALFORMED as error:
        mended = _mend(raw)
        if mended is None:
            raise _invalid(raw, error) from None
    return parse_object(resource, mended)


def parse_event(resource: Resource, line: bytes) -> Event:
    """Parse one line of a watch. Raises `NoEvent` or another `InvalidObject`."""
    decoder = _DECODERS[resource]
    try:
        event = decoder.event(line)
    except MALFORMED as error:
        mended = _mend(line)
        return _parse_other(line, error) if mended is None else parse_event(resource, mended)
    if event.type in ("ADDED", "MODIFIED"):
        return decoder.changed(event.object, modified=event.type == "MODIFIED")
    return _parse_other(line, None)


def parse_page(body: bytes) -> Page:
    """Parse the response to a list. Raises `InvalidObject` if it is not a list."""
    try:
        page = msgspec.json.decode(body, type=_Page)
    except MALFORMED as error:
        raise InvalidObject(f"not a Kubernetes list: {error}") from None
    return Page(
        items=page.items or [],
        resource_version=page.metadata.resourceVersion or "",
        continue_token=page.metadata.continue_ or "",
    )


def parse_status_message(body: bytes) -> str:
    """The message of a Kubernetes `Status`, or "" if the body is not a `Status`."""
    return _read_status(body).message or ""


def _read_status(raw: bytes | msgspec.Raw) -> _ErrorStatus:
    try:
        return msgspec.json.decode(raw, type=_ErrorStatus)
    except MALFORMED:
        return _ErrorStatus()


def _mend(raw: bytes | msgspec.Raw) -> bytes | None:
    """Repair broken text in JSON, such as half a surrogate pair; None if nothing is broken.

    Half a pair becomes the plain text of its escape; invalid UTF-8 becomes the replacement
    character.
    """
    text = bytes(raw).decode(errors="replace").encode()
    mended = _ESCAPE.sub(lambda match: rb"\\" + match[1] if match[1] else match[0], text)
    return mended if mended != bytes(raw) else None


def _parse_other(line: bytes, error: Exception | None) -> Event:
    """Parse a line that is not an ADDED or MODIFIED event of the expected shape."""
    try:
        envelope = msgspec.json.decode(line, type=_Envelope)
    except MALFORMED as broken:
        raise NoEvent(f"not a watch event: {broken}") from None
    if envelope.type == "ERROR":
        status = _read_status(envelope.object)
        return Failed(status.code or 0, status.reason or "", status.message or "")
    if envelope.type not in ("DELETED", "BOOKMARK"):
        if error is not None:
            raise _invalid(envelope.object, error)
        raise NoEvent(f"unknown watch event type {envelope.type[:40]!r}")
    try:
        metadata = msgspec.json.decode(envelope.object, type=_Named).metadata
    except MALFORMED as broken:
        raise InvalidObject(f"{envelope.type} without readable metadata: {broken}") from None
    if envelope.type == "BOOKMARK":
        annotations = metadata.annotations if isinstance(metadata.annotations, dict) else {}
        return Bookmark(
            resource_version=text_of(metadata.resourceVersion),
            listed=annotations.get(INITIAL_EVENTS_END) == "true",
        )
    if not text_of(metadata.name):
        raise InvalidObject("DELETED without metadata.name")
    return Deleted(
        namespace=text_of(metadata.namespace),
        name=text_of(metadata.name),
        uid=text_of(metadata.uid),
        resource_version=text_of(metadata.resourceVersion),
    )


def _invalid(raw: bytes | msgspec.Raw, error: Exception) -> InvalidObject:
    """The error about an object, with its name if that can be read."""
    metadata = wire.LooseMetadata()
    with suppress(*MALFORMED):
        metadata = msgspec.json.decode(raw, type=_Named).metadata
    if not text_of(metadata.name):
        return InvalidObject(str(error))
    return InvalidObject(
        str(error),
        namespace=text_of(metadata.namespace),
        name=text_of(metadata.name),
        uid=text_of(metadata.uid),
    )


class _Decoder(Generic[_Object, _Fact]):
    """Decodes one kind of object, and reads the fact and its reasons from it."""

    def __init__(
        self,
        wire: type[_Object],
        read: Callable[[_Object], _Fact | str],
        explain: Callable[[_Object, _Fact], tuple[Why, ...]] = lambda *_: (),
        read_end: Callable[[_Object, _Fact], EndedMigration | None] | None = None,
        read_traits: Callable[[_Object], Traits | None] = lambda _: None,
    ) -> None:
        self._read = read
        self._explain = explain
        self._read_end = read_end
        self._read_traits = read_traits
        self.object = msgspec.json.Decoder(wire).decode
        self.event = msgspec.json.Decoder(_Event[wire]).decode  # type: ignore[valid-type]

    def changed(self, body: _Object, *, modified: bool = False) -> Changed:
        """The `Changed` for a decoded object. Raises `InvalidObject`."""
        metadata, fact, read_end = body.metadata, self._read(body), self._read_end
        namespace, name = metadata.namespace or "", metadata.name or ""
        if isinstance(fact, str):
            raise InvalidObject(fact, namespace=namespace if name else None, name=name or None)
        if not name and not isinstance(fact, KubeVirtSettings):
            raise InvalidObject("metadata.name: expected a name, there is none")
        return Changed(
            fact=fact,
            namespace=namespace,
            name=name,
            resource_version=metadata.resourceVersion or "",
            modified=modified,
            reasons=self._explain(body, fact),
            read_end=_read_no_end if read_end is None else partial(read_end, body, fact),
            traits=self._read_traits(body),
        )


def _read_vmi(body: wire.VmiObject) -> Vmi | str:
    vmi = facts.read_vmi(body)
    return vmi if isinstance(vmi, str) else reasons.add_vmi_failure(body, vmi)


def _read_vmim(body: wire.VmimObject) -> Vmim | str:
    vmim = facts.read_vmim(body)
    return vmim if isinstance(vmim, str) else reasons.add_vmim_failure(body, vmim)


def _read_traits(body: wire.VmiObject) -> Traits:
    priority_class = body.spec.priorityClassName if body.spec else None
    return Traits(body.metadata.labels, priority_class or "")


_DECODERS: Mapping[Resource, _Decoder[Any, Any]] = {
    Resource.VMIS: _Decoder(wire.VmiObject, _read_vmi, reasons.of_vmi, read_traits=_read_traits),
    Resource.VMIMS: _Decoder(wire.VmimObject, _read_vmim, reasons.of_vmim, reasons.read_end),
    Resource.PODS: _Decoder(wire.PodObject, facts.read_pod, reasons.of_pod),
    Resource.KUBEVIRTS: _Decoder(wire.KubeVirtObject, facts.read_kubevirt),
    Resource.NODES: _Decoder(wire.NodeObject, places.read_node),
    Resource.BUDGETS: _Decoder(wire.BudgetObject, facts.read_budget),
    Resource.EVICTIONS: _Decoder(wire.EvictionObject, evictions.read_eviction),
}
