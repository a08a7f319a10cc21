"""A recording: what a cluster said while it was watched, as lines of JSON. Bytes in, bytes out.

The first line is a header, each further one an event:

    {"format":"kubevirt-eviction-exporter/recording","version":1}
    {"at":"2026-01-05T10:00:00.25Z","type":"ADDED","resource":"pods","object":{...}}

`type` is ADDED, MODIFIED or DELETED as in a watch; SYNCED where a whole list of the resource has
been read (what it lacked was DELETED before); REFUSED where it may not be seen; ENDED, once, where
the recorder was told to end. An object is written from the fact that was read off it and so holds
nothing else: no cloud-init password, no image, no volume. `.gz` is read by its first bytes.

What `kubectl get vmi -A -w -o json --output-watch-events` writes is read too: the resource is the
object's kind, and the instant the latest that its metadata or status tells, annotations left out
(with `--show-managed-fields` that is exact). A line that cannot be used is counted and told, and
the rest is read on; a torn end is the end.
"""

import zlib
from collections.abc import Iterable, Iterator
from enum import StrEnum
from typing import Any

import msgspec
from msgspec import Struct

from exporter.engine.model import CLUSTER_RESOURCES, Fact, Instant, Resource
from exporter.kube.kubevirt import (
    Changed,
    Deleted,
    Refused,
    parse_event,
    parse_instant,
    stamp,
    write_object,
)


FORMAT = "kubevirt-eviction-exporter/recording"
VERSION = 1
FAULTS_TOLD = 20
"""How many faults are told in full; all are counted."""
LONGEST_LINE = 16 * 2**20
_GZIP_MAGIC = b"\x1f\x8b"
_KINDS = {
    "VirtualMachineInstance": Resource.VMIS,
    "VirtualMachineInstanceMigration": Resource.VMIMS,
    "Pod": Resource.PODS,
    "KubeVirt": Resource.KUBEVIRTS,
}
_RESOURCES = {str(resource): resource for resource in CLUSTER_RESOURCES}


class Kind(StrEnum):
    """What a line says of its resource."""

    ADDED = "ADDED"
    MODIFIED = "MODIFIED"
    DELETED = "DELETED"
    SYNCED = "SYNCED"
    REFUSED = "REFUSED"
    ENDED = "ENDED"


class Recorded(Struct, frozen=True, gc=False):
    """One event: `fact` is there where the object exists, its names where it is gone."""

    at: Instant
    kind: Kind
    resource: Resource | None = None
    fact: Fact | None = None
    namespace: str = ""
    name: str = ""
    uid: str = ""


class UnknownFormat(Exception):
    """Not a recording that this version can read; the text says what it is."""


class Faults(Struct):
    """The lines that could not be used: how many, and the first of them by number.

    `torn` is whether the end was torn away, which costs no whole line.
    """

    count: int = 0
    told: list[str] = []
    torn: bool = False

    def note(self, number: int, why: str) -> None:
        """Line `number`, counted from 1, could not be used."""
        self.count += 1
        if len(self.told) < FAULTS_TOLD:
            self.told.append(f"line {number}: {why}")


class _KindOf(Struct, gc=False):
    kind: Any = None


class _Line(Struct, gc=False):
    """What of a line is ours; the rest is a watch event, and `kubevirt` reads it."""

    at: Any = None
    type: Any = None
    resource: Any = None
    format: Any = None
    version: Any = None
    object: _KindOf | None = None


class _DatedMetadata(Struct, frozen=True, rename="camel", gc=False):
    """What of the metadata is the API server's own: annotations may hold any date."""

    creation_timestamp: Any = None
    deletion_timestamp: Any = None
    deletion_grace_period_seconds: float | None = None
    managed_fields: Any = None


class _Dated(Struct, frozen=True, gc=False):
    """Where in an object its own instants stand."""

    metadata: _DatedMetadata = _DatedMetadata()
    status: Any = None


class _DatedLine(Struct, gc=False):
    object: _Dated = _Dated()


_read_line = msgspec.json.Decoder(_Line).decode
_read_dates = msgspec.json.Decoder(_DatedLine).decode
_encode = msgspec.json.Encoder().encode


def write_header() -> bytes:
    """A recording's first line."""
    return _encode({"format": FORMAT, "version": VERSION}) + b"\n"


def write_fact(at: Instant, kind: Kind, resource: Resource, fact: Fact) -> bytes:
    """The line of an object that exists."""
    return _write(at, kind, resource, write_object(fact))


def write_deletion(
    at: Instant, resource: Resource, namespace: str, name: str, uid: str = ""
) -> bytes:
    """The line of an object that is gone."""
    metadata = {"namespace": namespace, "name": name} | ({"uid": uid} if uid else {})
    return _write(at, Kind.DELETED, resource, {"metadata": metadata})


def write_note(at: Instant, kind: Kind, resource: Resource | None = None) -> bytes:
    """The line of what is said of a whole resource, or (ENDED) of none."""
    return _write(at, kind, resource, None)


def _write(at: Instant, kind: Kind, resource: Resource | None, made: object) -> bytes:
    line: dict[str, object] = {"at": stamp(round(at, 3)), "type": kind}
    if resource is not None:
        line["resource"] = resource
    if made is not None:
        line["object"] = made
    return _encode(line) + b"\n"


def split(chunks: Iterable[bytes], faults: Faults | None = None) -> Iterator[bytes]:
    """The lines of a file that is read in chunks, plain or gzip, without their ends.

    A last line without an end is left out where it is no JSON: whoever wrote it was torn away, as
    where a gzip has no end, and `faults` say so. A line longer than `LONGEST_LINE` comes as an
    empty one.
    """
    faults = Faults() if faults is None else faults
    rest = bytearray()
    lost = False
    for chunk in _unzip(chunks, faults):
        *lines, tail = chunk.split(b"\n")
        for line in lines:
            yield b"" if lost else bytes(rest) + line
            rest.clear()
            lost = False
        rest += tail
        if len(rest) > LONGEST_LINE:
            rest.clear()
            lost = True
    if rest and _is_json(rest):
        yield bytes(rest)
    elif lost or rest.strip():
        faults.torn = True


def read(lines: Iterable[bytes], faults: Faults) -> Iterator[Recorded]:
    """The events of a recording, or of kubectl's lines. Raises `UnknownFormat` for no such thing.

    What is wrong with a line goes to `faults`.
    """
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            if line == b"":
                faults.note(number, "empty, or longer than any object")
            continue
        try:
            event = _read_event(line, is_first=number == 1)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            faults.note(number, f"not an event: {error}")
        except Refused as refusal:
            faults.note(number, refusal.why)
        else:
            if event is not None:
                yield event


def _read_event(line: bytes, *, is_first: bool) -> Recorded | None:
    """One line's event, None for the header. Raises `Refused`."""
    head = _read_line(line)
    if head.format is not None:
        if head.format != FORMAT or head.version != VERSION:
            raise UnknownFormat(
                f"format {str(head.format)[:60]!r} version {head.version!r}: expected {FORMAT!r}"
                f" version {VERSION}"
            )
        return None
    if is_first and head.type is None:
        raise UnknownFormat("neither a recording nor watch events: the first line has no type")
    at = parse_instant(head.at) if head.at is not None else _latest_instant(line)
    if at is None:
        raise Refused("no instant: expected `at` as RFC 3339, or an object that tells one")
    if head.type == Kind.ENDED:
        return Recorded(at, Kind.ENDED)
    resource = _find_resource(head)
    if head.type in (Kind.SYNCED, Kind.REFUSED):
        return Recorded(at, Kind(head.type), resource)
    match parse_event(resource, line):
        case Changed(fact=fact, modified=modified):
            return Recorded(at, Kind.MODIFIED if modified else Kind.ADDED, resource, fact)
        case Deleted(namespace=namespace, name=name, uid=uid):
            return Recorded(at, Kind.DELETED, resource, namespace=namespace, name=name, uid=uid)
        case _:
            return None


def _find_resource(head: _Line) -> Resource:
    kind = "" if head.object is None else head.object.kind
    found = _RESOURCES.get(str(head.resource)) or _KINDS.get(str(kind))
    if found is None:
        raise Refused(f"unknown resource {str(head.resource or kind)[:60]!r}")
    return found


def _latest_instant(line: bytes) -> Instant | None:
    made = _read_dates(line).object
    metadata = made.metadata
    told = list(_instants(metadata.creation_timestamp, metadata.managed_fields, made.status))
    gone_at = parse_instant(metadata.deletion_timestamp)
    if gone_at is not None:  # which is when the grace is over, and not when it began
        told.append(gone_at - (metadata.deletion_grace_period_seconds or 0.0))
    return max(told, default=None)


def _instants(*values: object) -> Iterator[Instant]:
    """Every instant that stands anywhere in decoded JSON."""
    left = list(values)
    while left:
        value = left.pop()
        if isinstance(value, dict):
            left.extend(value.values())
        elif isinstance(value, list):
            left.extend(value)
        elif isinstance(value, str) and "T" in value[:12]:
            instant = parse_instant(value)
            if instant is not None:
                yield instant


def _unzip(chunks: Iterable[bytes], faults: Faults) -> Iterator[bytes]:
    """The chunks, decompressed where the first begins as gzip does; a torn end is the end."""
    inflate = None
    for number, chunk in enumerate(chunks):
        if number == 0 and chunk.startswith(_GZIP_MAGIC):
            inflate = _inflater()
        if inflate is None:
            yield chunk
            continue
        left = chunk
        while left:
            if inflate.eof:
                inflate = _inflater()
            try:
                yield inflate.decompress(left)
            except zlib.error as error:
                raise UnknownFormat(f"damaged gzip: {error}") from None
            left = inflate.unused_data
    if inflate is not None and not inflate.eof:
        faults.torn = True


def _inflater() -> "zlib._Decompress":
    return zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)


def _is_json(line: bytearray) -> bool:
    try:
        msgspec.json.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False
    return True
