"""The stored history's format: shards of encoded VMIs, each with a checksum.

A stored history has `SHARDS` shards; a hash of the UID assigns each VMI to a shard. A sealed shard
is big-endian, and begins with the same header in every version:

    magic 4 bytes | version 2 | payload's length 4 | BLAKE2b of the rest, 16 | payload

The payload is a msgpack array with one entry per VMI, sorted by UID, so that equal content gives
equal bytes. UUIDs take 16 bytes, whole seconds are integers, and the names of nodes and users are
in one list per VMI, so a migration takes about 40 bytes. If a shard would not fit into a ConfigMap,
its payload is compressed with zlib. A file is the concatenation of its sealed shards; a ConfigMap
holds one shard. Damage in one shard does not affect the others.
"""

import hashlib
import struct
import zlib
from collections.abc import Iterable, Iterator
from sys import intern
from typing import Annotated, TypeAlias
from uuid import UUID

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from exporter.engine.facts.evidence import (
    FAILURES_KEPT,
    Marker,
    Past,
    Remembered,
    RequestedThrough,
)
from exporter.engine.facts.history import Migration, join
from exporter.engine.facts.model import (
    EndReason,
    Instant,
    Outcome,
    Requester,
    Seconds,
    Trigger,
)
from exporter.errors import MALFORMED, ExporterError


SHARDS = 64
"""Of 100,000 VMIs with 17 migrations each, even the largest shard fits into a ConfigMap (1 MiB)."""
VERSION = 1
LONGEST_SHARD = 2**20 - 2**13
"""The most bytes in one sealed shard. A ConfigMap may hold 1 MiB of data, including the keys."""
LONGEST_CONTENT = 64 * LONGEST_SHARD
"""The most bytes of a compressed shard's content, which has to fit into the memory."""

_MAGIC = b"KVEC"
_ARRAY, _ZLIB = b"\xdd", b"\x78"
"""The first byte of a plain payload, and of a compressed one (RFC 1950)."""
_HEAD = struct.Struct(">4sHI16s")
_UUID_BYTES = 16
_YEARS = Meta(ge=-62_135_596_800, lt=253_402_300_800)
"""The years 1 to 9999, because RFC 3339 allows no other years."""
_Instant: TypeAlias = Annotated[float, _YEARS]
_Time: TypeAlias = _Instant | None
_Place: TypeAlias = Annotated[int, Meta(ge=0)]
"""The place of a name in `_Entry.names`, counted from 1; 0 means that there is no name."""


class Damaged(ExporterError):
    """These bytes are not an intact shard. The message says why."""


class UnknownVersion(ExporterError):
    """An intact shard in another version of the format."""

    def __init__(self, version: int, raw: bytes) -> None:
        super().__init__(f"format version {version}, but this program reads {VERSION}")
        self.version = version
        self.raw = raw


class _Migration(Struct, array_like=True, gc=False):
    key: bytes
    start: _Time
    end: _Time
    finished_at: _Time
    flags: Annotated[int, Meta(ge=0)]
    source: _Place = 0
    target: _Place = 0
    asked_at: _Time = None
    asked_by: _Place = 0


class _Failure(Struct, array_like=True, gc=False):
    uid: bytes
    end: _Instant


class _Requester(Struct, array_like=True, gc=False):
    at: _Instant
    user: str


class _Marker(Struct, array_like=True):
    node: str
    requested_at: _Instant
    seen_at: _Instant
    not_before: _Time
    failed: Annotated[list[_Failure], Meta(max_length=FAILURES_KEPT)]
    forgotten: Annotated[int, Meta(ge=0)]
    asked_by: _Requester | None = None
    by_taint: bool = False
    is_presumed: bool = False


class _Past(Struct, array_like=True, gc=False):
    seen_at: _Instant
    ended_at: _Instant
    counted_by: int


class _Entry(Struct, array_like=True):
    uid: bytes
    namespace: str
    migrations: list[_Migration]
    marker: _Marker | None
    past: _Past | None = None
    names: list[str] = []


_TRIGGERS = (
    None,
    Trigger.EVACUATION,
    Trigger.WORKLOAD_UPDATE,
    Trigger.HOTPLUG,
    Trigger.VOLUME_UPDATE,
    Trigger.MANUAL,
)
_REASONS = (
    None,
    EndReason.NONE,
    EndReason.OTHER,
    EndReason.LIBVIRT,
    EndReason.SOURCE_LOST,
    EndReason.TARGET_LOST,
    EndReason.POST_COPY_LOST,
    EndReason.TIMEOUT_COMPLETION,
    EndReason.TIMEOUT_PROGRESS,
    EndReason.ABORTED,
    EndReason.QUOTA,
    EndReason.IMAGE,
    EndReason.UNSCHEDULABLE,
)
"""The stored number of a trigger or a reason is its place here, so new ones come at the end."""

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Entry)
_splitter = msgspec.msgpack.Decoder(list[msgspec.Raw])


def shard_of(uid: str) -> int:
    """The shard of a VMI; stable across processes and versions."""
    return zlib.crc32(uid.encode()) % SHARDS


def encode(remembered: Remembered, *, now: Instant, window: Seconds) -> bytes:
    """Encode one VMI with the migrations that can still matter at `now`.

    These are the unfinished migrations and those that ended inside `window`. Two migrations matter
    at any age: the last one that ended (used if `migrationState` is empty), and the last success
    (a request before it was for an earlier evacuation). `finished_at` is omitted if the end is
    known and correct.
    """
    migrations, past = remembered.migrations, remembered.past
    ended = [(end, key) for key, m in migrations.items() if (end := m.known_end) is not None]
    succeeded = [one for one in ended if migrations[one[1]].outcome is Outcome.SUCCEEDED]
    last = {max(some)[1] for some in (ended, succeeded) if some}
    over = {key for end, key in ended if end <= now - window} - last
    names: dict[str, int] = {"": 0}
    entry = (
        _pack_uid(remembered.uid),
        remembered.namespace,
        [
            _pack_migration(key, migration, names, now)
            for key, migration in sorted(migrations.items())
            if key not in over
        ],
        None if remembered.marker is None else _pack_marker(remembered.marker),
        None if past is None else _pack_past(past),
    )
    return _encoder.encode((*entry, [*names][1:]) if len(names) > 1 else entry)


def seal(entries: Iterable[bytes]) -> bytes:
    """Seal encoded entries, given in the order of their UIDs.

    Compressing 2 MB takes 25 ms.
    """
    listed = list(entries)
    payload = b"".join((_ARRAY, struct.pack(">I", len(listed)), *listed))
    if _HEAD.size + len(payload) > LONGEST_SHARD:
        payload = zlib.compress(payload, level=1)
    digest = _digest(VERSION, payload)
    return _HEAD.pack(_MAGIC, VERSION, len(payload), digest) + payload


def unseal(raw: bytes) -> list[bytes]:
    """The encoded entries of a sealed shard. Raises `Damaged` or `UnknownVersion`."""
    if len(raw) < _HEAD.size:
        raise Damaged(f"too short: expected a header of {_HEAD.size} bytes, got {len(raw)}")
    magic, version, length, digest = _HEAD.unpack_from(raw)
    if magic != _MAGIC:
        raise Damaged(f"expected a stored history, which begins with {_MAGIC!r}, got {magic!r}")
    payload = raw[_HEAD.size :]
    if len(payload) != length:
        raise Damaged(f"expected {length} bytes after the header, got {len(payload)}")
    if _digest(version, payload) != digest:
        raise Damaged("the checksum does not match the content")
    if version != VERSION:
        raise UnknownVersion(version, raw)
    try:
        if payload.startswith(_ZLIB):
            payload = _decompress(payload)
        return [bytes(entry) for entry in _splitter.decode(payload)]
    except (*MALFORMED, zlib.error) as error:
        raise Damaged(f"the content cannot be read: {error}") from error


def decode(entry: bytes) -> Remembered:
    """Decode the entry of one VMI. Raises `Damaged`."""
    try:
        wire = _decoder.decode(entry)
        return Remembered(
            uid=_read_uid(wire.uid),
            namespace=wire.namespace,
            migrations={
                _read_uid(one.key): _read_migration(one, ["", *wire.names])
                for one in wire.migrations
            },
            marker=None if wire.marker is None else _read_marker(wire.marker),
            past=None if wire.past is None else _read_past(wire.past),
        )
    except (*MALFORMED, ValueError, IndexError) as error:
        raise Damaged(f"an entry cannot be read: {error}") from error


def holds(stored: bytes, entry: bytes, now: Instant) -> bool:
    """Whether a stored entry has everything that `entry` has, even if its encoding differs.

    Both are empty or valid. The stored entry may have more migrations, which no longer matter.
    """
    if stored == entry:
        return True
    if not stored or not entry:
        return False
    one, other = decode(stored), decode(entry)
    if one.marker != other.marker or one.past != other.past:
        return False
    for key, migration in other.migrations.items():
        known = one.migrations.get(key)
        if known is None:
            return False
        joined = join(known, migration)
        if _find_transition(joined, now) is None:
            joined = replace(joined, finished_at=known.finished_at)  # superfluous
        if joined != known:
            return False
    return True


def split(raw: bytes) -> Iterator[bytes]:
    """Split a file into its sealed shards. The damaged parts between them are yielded too."""
    position = 0
    while position < len(raw):
        following = raw.find(_MAGIC, position + 1)
        end = len(raw) if following < 0 else following
        if raw.startswith(_MAGIC, position) and len(raw) - position >= _HEAD.size:
            _, version, length, digest = _HEAD.unpack_from(raw, position)
            begin = position + _HEAD.size
            payload = raw[begin : begin + length] if begin + length <= len(raw) else None
            if payload is not None and _digest(version, payload) == digest:
                end = begin + length
        yield raw[position:end]
        position = end


def _decompress(payload: bytes) -> bytes:
    """Decompress a shard. Raises `Damaged` if it is cut off or longer than `LONGEST_CONTENT`."""
    decompressor = zlib.decompressobj()
    content = decompressor.decompress(payload, LONGEST_CONTENT)
    if not decompressor.eof or decompressor.unused_data:
        raise Damaged(f"expected at most {LONGEST_CONTENT} bytes, compressed as a whole")
    return content


def _digest(version: int, payload: bytes) -> bytes:
    head = struct.pack(">4sHI", _MAGIC, version, len(payload))
    return hashlib.blake2b(head + payload, digest_size=16).digest()


def _pack_uid(uid: str) -> bytes:
    """Pack a UUID into 16 bytes. Other text gets a prefix, and never has 16 bytes."""
    try:
        packed = UUID(uid)
    except ValueError:
        packed = None
    if packed is not None and str(packed) == uid:
        return packed.bytes
    text = uid.encode()
    return (b"\xff\xff" if len(text) == _UUID_BYTES - 1 else b"\xff") + text


def _read_uid(uid: bytes) -> str:
    return str(UUID(bytes=uid)) if len(uid) == _UUID_BYTES else uid.lstrip(b"\xff").decode()


def _pack_time(instant: Instant | None) -> _Time:
    return None if instant is None else _pack_instant(instant)


def _pack_instant(instant: Instant) -> _Instant:
    """Pack whole seconds, as KubeVirt writes them, as an integer: 5 bytes instead of 9."""
    return int(instant) if float(instant).is_integer() else instant


def _pack_migration(
    key: str, migration: Migration, names: dict[str, int], now: Instant
) -> tuple[object, ...]:
    """The fields of a `_Migration`, without empty ones at the end.

    `names` has the names of the entry and their places, and gets those of this migration.
    """
    asked = migration.requested_by
    packed = (
        _pack_uid(key),
        _pack_time(migration.start),
        _pack_time(migration.end),
        _pack_time(_find_transition(migration, now)),
        migration.outcome
        | migration.handed_off << 2
        | _TRIGGERS.index(migration.trigger) << 3
        | _REASONS.index(migration.reason) << 6,
    )
    moved = (migration.source_node, migration.target_node)
    nodes = [names.setdefault(node, len(names)) for node in moved]
    if asked is not None:
        user = names.setdefault(asked.user, len(names))
        return (*packed, *nodes, _pack_instant(asked.at), user)
    return (*packed, *nodes) if any(nodes) else packed


def _read_migration(wire: _Migration, names: list[str]) -> Migration:
    """Read a migration. A trigger or a reason of a later release is read as unknown."""
    trigger, reason = wire.flags >> 3 & 7, wire.flags >> 6
    return Migration(
        start=wire.start,
        end=wire.end,
        finished_at=wire.finished_at,
        outcome=Outcome(wire.flags & 3),
        handed_off=bool(wire.flags & 4),
        source_node=intern(names[wire.source]),
        target_node=intern(names[wire.target]),
        trigger=_TRIGGERS[trigger] if trigger < len(_TRIGGERS) else None,
        reason=_REASONS[reason] if reason < len(_REASONS) else None,
        requested_by=None
        if wire.asked_at is None
        else Requester(wire.asked_at, intern(names[wire.asked_by])),
    )


def _pack_marker(marker: Marker) -> _Marker:
    asked = marker.asked_by
    return _Marker(
        marker.node,
        _pack_instant(marker.requested_at),
        _pack_instant(marker.seen_at),
        _pack_time(marker.not_before),
        [
            _Failure(_pack_uid(uid), _pack_instant(end))
            for uid, end in sorted(marker.failed.items())
        ],
        marker.forgotten,
        None if asked is None else _Requester(_pack_instant(asked.at), asked.user),
        marker.through is RequestedThrough.TAINT,
        marker.is_presumed,
    )


def _read_marker(wire: _Marker) -> Marker:
    asked = wire.asked_by
    return Marker(
        node=wire.node,
        through=RequestedThrough.TAINT if wire.by_taint else RequestedThrough.EVICTION,
        requested_at=wire.requested_at,
        seen_at=wire.seen_at,
        not_before=wire.not_before,
        failed={_read_uid(one.uid): one.end for one in wire.failed},
        forgotten=wire.forgotten,
        asked_by=None if asked is None else Requester(asked.at, asked.user),
        is_presumed=wire.is_presumed,
    )


def _pack_past(past: Past) -> _Past:
    return _Past(_pack_instant(past.seen_at), _pack_instant(past.ended_at), past.counted_by)


def _read_past(wire: _Past) -> Past:
    return Past(wire.seen_at, wire.ended_at, wire.counted_by)


def _find_transition(migration: Migration, now: Instant) -> Instant | None:
    """The time of the transition to the final phase; None if the end makes it superfluous."""
    end = migration.end
    if end is not None and end <= now and migration.known_end == end:
        return None
    return migration.finished_at
