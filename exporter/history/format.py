"""The stored history's format: shards of encoded VMIs, each with a checksum.

A stored history has `SHARDS` shards; a hash of the UID assigns each VMI to a shard. A sealed shard
is one gzip member, with gzip's checksum, of a msgpack array: the format's version, and an array
with one entry per VMI, sorted by UID, so that equal content gives equal bytes. A file is the
concatenation of its sealed shards, so `zcat` reads it too; a ConfigMap holds one shard. Damage in
one shard does not affect the others.

An entry has the engine's own values as msgspec encodes them. Only the UIDs of migrations are packed
into 16 bytes each: as text they would make a shard a fifth longer. A field that is added needs a
default, and in a `Migration`, which is an array, it comes last. Any other change needs a new
`VERSION`, also a new trigger or reason: a program that does not know it keeps the shard for others.
"""

import gzip
import struct
import zlib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from sys import intern
from typing import Annotated
from uuid import UUID

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import force_setattr, replace

from exporter.engine.facts.evidence import Marker, Past, Remembered
from exporter.engine.facts.history import Migration, join
from exporter.engine.facts.model import Instant, Outcome, Seconds
from exporter.errors import MALFORMED, ExporterError


SHARDS = 64
"""Of 100,000 VMIs with 17 migrations each, even the largest shard fits into a ConfigMap (1 MiB)."""
VERSION = 1
LONGEST_SHARD = 2**20 - 2**13
"""The most bytes in one sealed shard. A ConfigMap may hold 1 MiB of data, including the keys."""
LONGEST_CONTENT = 64 * LONGEST_SHARD
"""The most bytes of a shard's content, which has to fit into the memory."""

_MAGIC = b"\x1f\x8b\x08\0\0\0\0\0"
"""How a sealed shard begins (RFC 1952): gzip without flags and without a time."""
_LEVELS = (1, 6)
"""How hard a shard is compressed: the second level takes four times as long, and is for a shard
that does not fit into a ConfigMap otherwise."""
_UUID_BYTES = 16


class Damaged(ExporterError):
    """These bytes are not an intact shard. The message says why."""


class UnknownVersion(ExporterError):
    """An intact shard in another version of the format."""

    def __init__(self, version: int, raw: bytes) -> None:
        super().__init__(f"format version {version}, but this program reads {VERSION}")
        self.version = version
        self.raw = raw


class _Entry(Struct, array_like=True):
    """One VMI. `uids` are the UIDs of `migrations`; `others` are those that have no UUID."""

    uid: str
    namespace: str
    uids: bytes
    migrations: Annotated[list[Migration], Meta(max_length=2**10)]
    others: Annotated[dict[str, Migration], Meta(max_length=2**10)]
    marker: Marker | None = None
    past: Past | None = None


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Entry)
_read_content = msgspec.msgpack.Decoder(tuple[int, msgspec.Raw]).decode
_split_entries = msgspec.msgpack.Decoder(
    Annotated[list[msgspec.Raw], Meta(max_length=2**16)]
).decode


def shard_of(uid: str) -> int:
    """The shard of a VMI; stable across processes and versions."""
    return zlib.crc32(uid.encode()) % SHARDS


def encode(remembered: Remembered, *, now: Instant, window: Seconds) -> bytes:
    """Encode one VMI with the migrations that can still matter at `now`.

    These are the unfinished migrations and those that ended inside `window`. Two migrations matter
    at any age: the last one that ended (used if `migrationState` is empty), and the last success
    (a request before it was for an earlier evacuation). What the control plane's clock gives is
    omitted if it changes neither start nor end. Of a marker, what the next process sees for itself
    is omitted.
    """
    migrations, marker = remembered.migrations, remembered.marker
    ended = [(end, key) for key, m in migrations.items() if (end := m.known_end) is not None]
    succeeded = [one for one in ended if migrations[one[1]].outcome is Outcome.SUCCEEDED]
    last = {max(some)[1] for some in (ended, succeeded) if some}
    over = {key for end, key in ended if end <= now - window} - last
    if marker is not None:
        failed = dict(sorted(marker.failed.items()))
        marker = replace(marker, failed=failed, lacking_since=None, dated=False, ends_at=None)
    entry = _Entry(remembered.uid, remembered.namespace, b"", [], {}, marker, remembered.past)
    for key in sorted(migrations.keys() - over):
        migration, packed = _omit_transition(migrations[key], now), _pack_uid(key)
        if packed is not None:
            entry.uids += packed
            entry.migrations.append(migration)
        else:
            entry.others[key] = migration
    return _encoder.encode(entry)


def seal(entries: Iterable[bytes]) -> bytes:
    """Seal encoded entries, given in the order of their UIDs.

    This takes 50 ms per megabyte of entries, so it is done in a thread.
    """
    listed = list(entries)
    head = struct.pack(">BBBI", 0x92, VERSION, 0xDD, len(listed))  # two: the version, an array
    content = b"".join((head, *listed))
    raw = b""
    for level in _LEVELS:
        raw = gzip.compress(content, level, mtime=0)
        if len(raw) <= LONGEST_SHARD:
            break
    return raw


def unseal(raw: bytes) -> list[bytes]:
    """The encoded entries of a sealed shard. Raises `Damaged` or `UnknownVersion`."""
    if not raw.startswith(_MAGIC):
        raise Damaged(f"expected gzip, which begins with {_MAGIC!r}, got {raw[: len(_MAGIC)]!r}")
    content, rest = _decompress(raw)
    if rest:
        raise Damaged(f"{len(rest)} bytes follow the content")
    try:
        version, entries = _read_content(content)
        if version != VERSION:
            raise UnknownVersion(version, raw)
        return [bytes(entry) for entry in _split_entries(entries)]
    except MALFORMED as error:
        raise Damaged(f"the content cannot be read: {error}") from error


def decode(entry: bytes) -> Remembered:
    """Decode the entry of one VMI. Raises `Damaged`."""
    try:
        wire = _decoder.decode(entry)
        places = range(0, len(wire.uids), _UUID_BYTES)
        uids = [str(UUID(bytes=wire.uids[place : place + _UUID_BYTES])) for place in places]
        migrations = dict(zip(uids, wire.migrations, strict=True)) | wire.others
        for migration in migrations.values():
            for name in ("source_node", "target_node"):  # each node once in the memory
                force_setattr(migration, name, intern(getattr(migration, name)))
        return Remembered(
            uid=wire.uid,
            namespace=wire.namespace,
            migrations=migrations,
            marker=wire.marker,
            past=wire.past,
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
        if _omit_transition(joined, now) != joined:
            joined = replace(joined, scheduled_at=known.scheduled_at, finished_at=known.finished_at)
        if joined != known:
            return False
    return True


def split(raw: bytes) -> Iterator[bytes]:
    """Split a file into its sealed shards. The damaged parts between them are yielded too."""
    begin, *shards = raw.split(_MAGIC)
    if begin:
        yield begin
    for shard in shards:
        piece, rest = _MAGIC + shard, b""
        with suppress(Damaged):
            _, rest = _decompress(piece)
        yield piece.removesuffix(rest)
        if rest:
            yield rest


def _decompress(raw: bytes) -> tuple[bytes, bytes]:
    """The content of a shard, and the bytes that follow the shard.

    Raises `Damaged` if the shard is cut off, or if the content is longer than `LONGEST_CONTENT`.
    """
    decompressor = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
    try:
        content = decompressor.decompress(raw, LONGEST_CONTENT)
    except zlib.error as error:
        raise Damaged(f"the content cannot be decompressed: {error}") from error
    if not decompressor.eof:
        raise Damaged(f"cut off, or the content is longer than {LONGEST_CONTENT} bytes")
    return content, decompressor.unused_data


def _pack_uid(uid: str) -> bytes | None:
    """Pack a UUID into 16 bytes; None if this is no UUID as Kubernetes writes it."""
    try:
        packed = UUID(uid)
    except ValueError:
        return None
    return packed.bytes if str(packed) == uid else None


def _omit_transition(migration: Migration, now: Instant) -> Migration:
    """The migration without its transitions, if its start and end are known and correct."""
    start, end = migration.start, migration.end
    if end is None or end > now or (migration.known_start, migration.known_end) != (start, end):
        return migration
    return replace(migration, scheduled_at=None, finished_at=None)
