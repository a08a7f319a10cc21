"""The file format of recordings: the watch events of a cluster as lines of JSON.

The first line is a header, each further one an event:

    {"format":"kubevirt-eviction-exporter/recording","version":2}
    {"at":"2026-01-05T10:00:00.25Z","type":"ADDED","resource":"pods","fact":{...}}

`fact` is the engine's value (`engine.facts.model`) as msgspec encodes it, as in the history file.
`type` is ADDED, MODIFIED or DELETED as in a watch. SYNCED follows a complete list of the resource
(objects that it lacks were DELETED before). REJECTED means that the resource may not be listed.
ENDED comes once, when the recorder is stopped. A fact has no cloud-init password, no image, no
volume and no user, and a pod no labels. A VMI has those `labels` whose keys the recorder's
`policy.overrides` use, and its `priorityClass` if one of them uses one. `reason` is why a migration
failed after its hand-off, as one of `EndReason`: KubeVirt's own text is not recorded. Gzip is
recognized by its first bytes.

Version 1 has an `object` of the cluster instead of a fact. It can still be read, and so can the
output of `kubectl get vmi -A -w -o json --output-watch-events`. There the resource is the kind of
the object. The instant is the latest in its metadata and status, except in annotations; with
`--show-managed-fields` it is exact. Bad lines are counted and skipped. A truncated file is read up
to its last complete line.
"""

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import StrEnum
from gzip import BadGzipFile, GzipFile
from io import BufferedReader
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from exporter.engine.facts.model import (
    EVIDENCE_RESOURCES,
    EndReason,
    Fact,
    Instant,
    KubeVirtSettings,
    Pod,
    Resource,
    Vmi,
    Vmim,
)
from exporter.errors import MALFORMED, CommandFailed, Exit
from exporter.kube.objects.instants import parse_instant
from exporter.kube.objects.kubevirt import Changed, Deleted, InvalidObject, Traits, parse_event
from exporter.text import write_instant


FORMAT = "kubevirt-eviction-exporter/recording"
VERSION = 2
MAX_MESSAGES = 20
"""How many faults are described; all are counted."""
LONGEST_LINE = 16 * 2**20
_GZIP_MAGIC = b"\x1f\x8b"
_KINDS = {
    "VirtualMachineInstance": Resource.VMIS,
    "VirtualMachineInstanceMigration": Resource.VMIMS,
    "Pod": Resource.PODS,
    "KubeVirt": Resource.KUBEVIRTS,
}
_REASONS = {str(reason): reason for reason in EndReason}
_RESOURCES = {str(resource): resource for resource in EVIDENCE_RESOURCES}


class Kind(StrEnum):
    """The type of a line."""

    ADDED = "ADDED"
    MODIFIED = "MODIFIED"
    DELETED = "DELETED"
    SYNCED = "SYNCED"
    REJECTED = "REJECTED"
    ENDED = "ENDED"


class Recorded(Struct, frozen=True, gc=False):
    """One event. It has the `fact` if the object exists, or the names if the object was deleted.

    `traits` choose the policy of a VMI; None if the line has none. `reason` is why a VMIM failed;
    OTHER if the line gives no reason.
    """

    at: Instant
    kind: Kind
    resource: Resource | None = None
    fact: Fact | None = None
    namespace: str = ""
    name: str = ""
    uid: str = ""
    traits: Traits | None = None
    reason: EndReason = EndReason.OTHER


class CannotRecord(CommandFailed):
    """The file of a recording cannot be written; the message says why."""

    exit_code = Exit.CANNOT_RECORD


class CannotReplay(CommandFailed):
    """There is nothing to replay, or the answer cannot be shown; the message says what helps."""

    exit_code = Exit.CANNOT_REPLAY


class Faults(Struct):
    """The lines that could not be used: their count, and messages about the first of them.

    `truncated`: the file ends in the middle of a line or of its gzip data.
    """

    count: int = 0
    messages: list[str] = []
    truncated: bool = False

    def record(self, number: int, why: str) -> None:
        """Count a fault of line `number`; the first line is 1."""
        self.count += 1
        if len(self.messages) < MAX_MESSAGES:
            self.messages.append(f"line {number}: {why}")


class _KindOf(Struct, gc=False):
    kind: Any = None


class _Line(Struct, gc=False):
    """The fields of a line that are read here; `kubevirt` parses the watch event."""

    at: Any = None
    type: Any = None
    resource: Any = None
    reason: Any = None
    format: Any = None
    version: Any = None
    object: _KindOf | None = None
    fact: msgspec.Raw = msgspec.Raw()
    labels: msgspec.Raw = msgspec.Raw()
    priority_class: str = msgspec.field(name="priorityClass", default="")


class _DatedMetadata(Struct, frozen=True, rename="camel", gc=False):
    """The metadata without annotations, because an annotation may have any instant."""

    creation_timestamp: Any = None
    deletion_timestamp: Any = None
    deletion_grace_period_seconds: float | None = None
    managed_fields: Any = None


class _Dated(Struct, frozen=True, gc=False):
    """The parts of an object in which its instants are."""

    metadata: _DatedMetadata = _DatedMetadata()
    status: Any = None


class _DatedLine(Struct, gc=False):
    object: _Dated = _Dated()


_read_line = msgspec.json.Decoder(_Line).decode
_read_dates = msgspec.json.Decoder(_DatedLine).decode
_read_fact: Mapping[Resource, Callable[[msgspec.Raw], Fact]] = {
    Resource.VMIS: msgspec.json.Decoder(Vmi).decode,
    Resource.VMIMS: msgspec.json.Decoder(Vmim).decode,
    Resource.PODS: msgspec.json.Decoder(Pod).decode,
    Resource.KUBEVIRTS: msgspec.json.Decoder(KubeVirtSettings).decode,
}
_encode = msgspec.json.Encoder().encode


def write_header() -> bytes:
    """The first line of a recording."""
    return _encode({"format": FORMAT, "version": VERSION}) + b"\n"


def write_event(
    at: Instant, kind: Kind, resource: Resource | None = None, **fields: object
) -> bytes:
    """The line of an event with these further fields; for DELETED `object` has the names."""
    line: dict[str, object] = {"at": write_instant(round(at, 3)), "type": kind}
    if resource is not None:
        line["resource"] = resource
    return _encode(line | fields) + b"\n"


def strip(fact: Fact) -> Fact:
    """The fact as it may be recorded: without users, a pod's labels, and our settings."""
    match fact:
        case Vmi():
            return replace(fact, override="")
        case Vmim():
            return replace(fact, modified_by="")
        case Pod():
            return replace(fact, labels=())
        case _:
            return fact


def split(file: BufferedReader, faults: Faults) -> Iterator[bytes]:
    """Split a file, plain or gzip, into lines without their line ends.

    A last line without a line end is used if it is valid JSON. Otherwise it is dropped, and
    `faults` notes that the file is truncated. A line longer than `LONGEST_LINE` becomes empty.
    """
    is_gzip = file.peek(2).startswith(_GZIP_MAGIC)
    stream = GzipFile(fileobj=file) if is_gzip else file
    is_too_long = False
    try:
        while piece := stream.readline(LONGEST_LINE):
            if piece.endswith(b"\n"):
                yield b"" if is_too_long else piece[:-1]
                is_too_long = False
            elif len(piece) == LONGEST_LINE:
                is_too_long = True
            elif is_too_long or not _is_json(piece):
                faults.truncated = bool(piece.strip())
            else:
                yield piece
    except EOFError:
        faults.truncated = True
    except (BadGzipFile, zlib.error) as error:
        raise CannotReplay(f"damaged gzip: {error}") from None
    faults.truncated = faults.truncated or is_too_long


def read(lines: Iterable[bytes], faults: Faults) -> Iterator[Recorded]:
    """The events of a recording or of kubectl's output; bad lines are noted in `faults`.

    Raises `CannotReplay`.
    """
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            if line == b"":
                faults.record(number, "empty, or too long for an object")
            continue
        try:
            event = _read_event(line, is_first=number == 1)
        except MALFORMED as error:
            faults.record(number, f"not an event: {error}")
        except InvalidObject as invalid:
            faults.record(number, invalid.why)
        else:
            if event is not None:
                yield event


def _read_event(line: bytes, *, is_first: bool) -> Recorded | None:
    """The event of one line, None for the header. Raises `InvalidObject`."""
    head = _read_line(line)
    if head.format is not None:
        if head.format != FORMAT or head.version not in (1, VERSION):
            raise CannotReplay(
                f"format {str(head.format)[:60]!r} version {head.version!r}: expected {FORMAT!r}"
                f" version {VERSION}"
            )
        return None
    if is_first and head.type is None:
        raise CannotReplay("neither a recording nor watch events: the first line has no type")
    at = parse_instant(head.at) if head.at is not None else _latest_instant(line)
    if at is None:
        raise InvalidObject("no instant: expected `at` as RFC 3339, or an object with an instant")
    if head.type == Kind.ENDED:
        return Recorded(at, Kind.ENDED)
    resource = _find_resource(head)
    if head.type in (Kind.SYNCED, Kind.REJECTED):
        return Recorded(at, Kind(head.type), resource)
    return _read_change(head, line, resource, at)


def _read_change(head: _Line, line: bytes, resource: Resource, at: Instant) -> Recorded | None:
    reason = _REASONS.get(str(head.reason), EndReason.OTHER)
    if bytes(head.fact):
        if head.type not in (Kind.ADDED, Kind.MODIFIED):
            raise InvalidObject(f"unknown watch event {str(head.type)[:60]!r} of a fact")
        known = _read_fact[resource](head.fact)
        traits = _find_traits(Traits(head.labels, head.priority_class))
        return Recorded(at, Kind(head.type), resource, known, traits=traits, reason=reason)
    match parse_event(resource, line):
        case Changed(fact=fact, modified=modified, traits=traits):
            kind = Kind.MODIFIED if modified else Kind.ADDED
            traits = None if traits is None else _find_traits(traits)
            return Recorded(at, kind, resource, fact, traits=traits, reason=reason)
        case Deleted(namespace=namespace, name=name, uid=uid):
            return Recorded(at, Kind.DELETED, resource, namespace=namespace, name=name, uid=uid)
        case _:
            return None


def _find_traits(traits: Traits) -> Traits | None:
    """The traits; None if the line has none."""
    return traits if bytes(traits.labels) or traits.priority_class else None


def _find_resource(head: _Line) -> Resource:
    kind = "" if head.object is None else head.object.kind
    resource = _RESOURCES.get(str(head.resource)) or _KINDS.get(str(kind))
    if resource is None:
        raise InvalidObject(f"unknown resource {str(head.resource or kind)[:60]!r}")
    return resource


def _latest_instant(line: bytes) -> Instant | None:
    made = _read_dates(line).object
    metadata = made.metadata
    instants: list[Instant] = []
    left = [metadata.creation_timestamp, metadata.managed_fields, made.status]
    while left:
        value = left.pop()
        if isinstance(value, dict):
            left.extend(value.values())
        elif isinstance(value, list):
            left.extend(value)
        elif isinstance(value, str) and "T" in value[:12]:
            instant = parse_instant(value)
            if instant is not None:
                instants.append(instant)
    gone_at = parse_instant(metadata.deletion_timestamp)
    if gone_at is not None:  # this is the end of the grace period, not the request to delete
        instants.append(gone_at - (metadata.deletion_grace_period_seconds or 0.0))
    return max(instants, default=None)


def _is_json(text: bytes) -> bool:
    try:
        msgspec.json.decode(text)
    except MALFORMED:
        return False
    return True
