"""The stored history's format: shards of encoded VMIs, each with a checksum.

A stored history has `SHARDS` shards; a hash of the UID assigns each VMI to a shard. A sealed shard
is big-endian, and begins with the same header in every version:

    magic 4 bytes | version 2 | payload's length 4 | BLAKE2b of the rest, 16 | payload

The payload is a msgpack array with one entry per VMI, sorted by UID, so that equal content gives
equal bytes. UUIDs take 16 bytes and whole seconds are integers, so a migration takes about 30
bytes. A file is the concatenation of its sealed shards; a ConfigMap holds one shard. Damage in one
shard does not affect the others.
"""

import hashlib
import struct
import zlib
from collections.abc import Iterable, Iterator
from typing import Annotated, TypeAlias
from uuid import UUID

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from exporter.decoding import MALFORMED
from exporter.engine.facts.evidence import (
    FAILURES_KEPT,
    Marker,
    Past,
    Remembered,
    RequestedThrough,
    Requester,
)
from exporter.engine.facts.history import Migration, join
from exporter.engine.facts.model import Instant, Outcome, Seconds


SHARDS = 64
"""100,000 VMIs with 17 migrations each take 56 MB. With 64 shards, even the largest shard fits into
a ConfigMap, which holds 1 MiB."""
VERSION = 1
LONGEST_SHARD = 2**20 - 2**13
"""The most bytes in one sealed shard. A ConfigMap may hold 1 MiB of data, including the keys."""

_MAGIC = b"KVEC"
_HEAD = struct.Struct(">4sHI16s")
_UUID_BYTES = 16
_YEARS = Meta(ge=-62_135_596_800, lt=253_402_300_800)
"""The years 1 to 9999, because RFC 3339 allows no other years."""
_Instant: TypeAlias = Annotated[float, _YEARS]
_Time: TypeAlias = _Instant | None


class Damaged(Exception):
    """These bytes are not an intact shard. The message says why."""


class UnknownVersion(Exception):
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
    flags: int


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
    return _encoder.encode(
        _Entry(
            _pack_uid(remembered.uid),
            remembered.namespace,
            [
                _Migration(
                    _pack_uid(key),
                    _pack_time(migration.start),
                    _pack_time(migration.end),
                    _pack_time(_find_transition(migration, now)),
                    migration.outcome | migration.handed_off << 2,
                )
                for key, migration in sorted(migrations.items())
                if key not in over
            ],
            None if remembered.marker is None else _pack_marker(remembered.marker),
            None if past is None else _pack_past(past),
        )
    )


def seal(entries: Iterable[bytes]) -> bytes:
    """Seal encoded entries, given in the order of their UIDs."""
    listed = list(entries)
    payload = b"".join((b"\xdd", struct.pack(">I", len(listed)), *listed))
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
        return [bytes(entry) for entry in _splitter.decode(payload)]
    except MALFORMED as error:
        raise Damaged(f"the content cannot be read: {error}") from error


def decode(entry: bytes) -> Remembered:
    """Decode the entry of one VMI. Raises `Damaged`."""
    try:
        wire = _decoder.decode(entry)
        return Remembered(
            uid=_read_uid(wire.uid),
            namespace=wire.namespace,
            migrations={
                _read_uid(one.key): Migration(
                    start=one.start,
                    end=one.end,
                    finished_at=one.finished_at,
                    outcome=Outcome(one.flags & 3),
                    handed_off=bool(one.flags & 4),
                )
                for one in wire.migrations
            },
            marker=None if wire.marker is None else _read_marker(wire.marker),
            past=None if wire.past is None else _read_past(wire.past),
        )
    except (*MALFORMED, ValueError) as error:
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
