"""A stored history reads back the same, and damage to it is detected."""

import gzip
import random
import struct
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from itertools import accumulate
from typing import Any
from uuid import UUID
from zlib import crc32

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.engine.facts.evidence import FAILURES_KEPT, Marker, Past, Remembered, RequestedThrough
from exporter.engine.facts.history import Migration
from exporter.engine.facts.model import EndReason, Outcome, Requester, Trigger
from exporter.history.format import (
    LONGEST_SHARD,
    SHARDS,
    VERSION,
    Damaged,
    UnknownVersion,
    encode,
    holds,
    seal,
    shard_of,
    split,
    unseal,
)
from tests.support.builders import NAMESPACE, NOW, UID, a_migration
from tests.support.stored_history import read_shard


WINDOW = 86_400.0
UUIDS = st.uuids().map(str)
UIDS = UUIDS | st.text(st.characters(codec="utf-8"), min_size=1, max_size=40)
INSTANTS = st.integers(0, 2**33).map(float) | st.floats(0, 1e10)
MIGRATIONS = st.builds(
    Migration,
    start=st.none() | INSTANTS,
    end=st.none() | INSTANTS,
    finished_at=st.none() | INSTANTS,
    outcome=st.sampled_from(Outcome),
    handed_off=st.booleans(),
    source_node=st.text(st.characters(codec="utf-8")),
    target_node=st.text(st.characters(codec="utf-8")),
    trigger=st.none() | st.sampled_from(Trigger),
    reason=st.none() | st.sampled_from(EndReason),
    requested_by=st.none() | st.builds(Requester, at=INSTANTS, user=st.text()),
)
MARKERS = st.builds(
    Marker,
    node=st.text(st.characters(codec="utf-8"), min_size=1),
    requested_at=INSTANTS,
    through=st.sampled_from(RequestedThrough),
    seen_at=INSTANTS,
    not_before=st.none() | INSTANTS,
    failed=st.dictionaries(UIDS, INSTANTS, max_size=FAILURES_KEPT),
    forgotten=st.integers(0, 2**40),
    asked_by=st.none() | st.builds(Requester, at=INSTANTS, user=st.text()),
    is_presumed=st.booleans(),
)
REMEMBERED = st.builds(
    Remembered,
    uid=UIDS,
    namespace=st.text(st.characters(codec="utf-8")),
    migrations=st.dictionaries(UIDS | st.just("@1800000000"), MIGRATIONS, max_size=8),
    marker=st.none() | MARKERS,
    past=st.none() | st.builds(Past, INSTANTS, INSTANTS, st.integers(0, 2**32 - 1)),
)


A_MOVE = {
    "source_node": "n1",
    "target_node": "n2",
    "trigger": Trigger.MANUAL,
    "reason": EndReason.LIBVIRT,
    "requested_by": Requester(NOW - 700.0, "alice"),
}


def remembered(**overrides: Any) -> Remembered:
    """A VMI that migrated once and is being evacuated."""
    fields: dict[str, Any] = {
        "uid": UID,
        "namespace": NAMESPACE,
        "migrations": {"m1": a_migration()},
        "marker": Marker(node="n1", requested_at=NOW - 60, seen_at=NOW - 50, failed={"e1": NOW}),
    } | overrides
    return Remembered(**fields)


def sealed(*listed: Remembered, now: float = NOW, window: float = float("inf")) -> bytes:
    """A shard with these entries."""
    return seal(encode(one, now=now, window=window) for one in listed)


@given(st.lists(REMEMBERED, max_size=5))
def test_comes_back_whole(listed: list[Remembered]) -> None:
    """A sealed shard reads back the same, with UIDs of any form."""
    assert read_shard(sealed(*listed, now=-1.0)) == listed


def test_the_same_content_is_the_same_bytes() -> None:
    """The order in which migrations were read does not change the bytes."""
    one, other = a_migration(), a_migration(end=NOW - 100.0)
    assert sealed(remembered(migrations={"m1": one, "m2": other})) == sealed(
        remembered(migrations={"m2": other, "m1": one})
    )


@pytest.mark.parametrize("uid", ["123456789012345", "1234567890123456", "x", str(UUID(int=7))])
def test_uids_of_any_length(uid: str) -> None:
    """A UID of any length reads back the same, even one of 16 bytes like a packed UUID."""
    assert read_shard(sealed(remembered(uid=uid)))[0].uid == uid


class TestWhatIsKept:
    """Only migrations that can still matter are stored."""

    def test_endings_inside_the_window(self) -> None:
        """Migrations that ended before the window are not stored."""
        kept = {"m1": a_migration(), "m2": a_migration(end=NOW - WINDOW + 1)}
        older = {"m3": a_migration(end=NOW - WINDOW), "m4": a_migration(end=NOW - 2 * WINDOW)}
        shard = sealed(remembered(migrations=kept | older), window=WINDOW)
        assert read_shard(shard)[0].migrations == kept

    def test_the_newest_ending_and_the_newest_success(self) -> None:
        """The last migration and the last success are stored, whatever their age."""
        failed = a_migration(end=NOW - 2 * WINDOW, outcome=Outcome.FAILED)
        succeeded = a_migration(end=NOW - 3 * WINDOW)
        older = a_migration(end=NOW - 4 * WINDOW)
        migrations = {"m1": older, "m2": succeeded, "m3": failed}
        shard = sealed(remembered(migrations=migrations), window=WINDOW)
        assert read_shard(shard)[0].migrations == {"m2": succeeded, "m3": failed}

    def test_one_end_of_each(self) -> None:
        """The final transition is not stored if the end agrees with it."""
        migrations = {
            "m1": a_migration(finished_at=NOW - 599.0),
            "m2": a_migration(end=None, finished_at=NOW),
            "m3": a_migration(end=NOW - 7_200.0, finished_at=NOW),
        }
        kept = read_shard(sealed(remembered(migrations=migrations), window=WINDOW))[0].migrations
        assert kept == {**migrations, "m1": a_migration()}

    def test_what_has_not_ended(self) -> None:
        """Unfinished migrations are stored."""
        running = {"m1": Migration(start=NOW - 60.0, handed_off=True)}
        shard = sealed(remembered(migrations=running), window=WINDOW)
        assert read_shard(shard)[0].migrations == running


def test_what_a_shard_has() -> None:
    """A shard is gzip and msgpack, with the engine's fields by name; migrations are arrays.

    A change here needs a new `VERSION`, unless it is a further field with a default.
    """
    marker = Marker(
        node="n1",
        requested_at=NOW - 60,
        through=RequestedThrough.TAINT,
        seen_at=NOW - 50,
        failed={"e1": NOW},
        lacking_since=NOW,
        dated=True,
        ends_at=NOW,
    )
    migrations = {str(UUID(int=1)): a_migration(**A_MOVE), "m2": Migration(start=NOW)}
    past = Past(NOW - 90, NOW - 80, 7)
    shard = sealed(remembered(migrations=migrations, marker=marker, past=past))
    version, ((uid, namespace, uids, named, others, evacuation, last),) = msgspec.msgpack.decode(
        gzip.decompress(shard)
    )
    assert (version, uid, namespace, uids) == (VERSION, UID, NAMESPACE, UUID(int=1).bytes)
    requester = {"at": NOW - 700.0, "user": "alice"}
    assert named == [
        [NOW - 660.0, NOW - 600.0, None, 1, True, "n1", "n2", "manual", "libvirt", requester, None]
    ]
    assert others == {"m2": [NOW, None, None, 0, False, "", "", None, None, None, None]}
    assert evacuation == {
        "node": "n1",
        "requested_at": NOW - 60,
        "through": "taint",
        "seen_at": NOW - 50,
        "failed": {"e1": NOW},
    }
    assert last == {"seen_at": NOW - 90, "ended_at": NOW - 80, "counted_by": 7}


def test_what_the_cluster_holds() -> None:
    """The place of a VMI, the number of shards and the version are what stored histories have."""
    assert (shard_of(UID), SHARDS, VERSION) == (crc32(UID.encode()) % 64, 64, 1)
    assert LONGEST_SHARD + len("history") < 2**20, "a ConfigMap has at most 1 MiB"


def test_each_node_is_in_the_memory_once() -> None:
    """Migrations that are read from two entries share the names of their nodes."""
    shard = sealed(*(remembered(migrations={"m1": a_migration(**A_MOVE)}) for _ in range(2)))
    one, other = (entry.migrations["m1"] for entry in read_shard(shard))
    assert (one.source_node, one.target_node) == ("n1", "n2")
    assert one.source_node is other.source_node
    assert one.target_node is other.target_node


def test_a_migration_that_is_stored_with_less() -> None:
    """A stored entry lacks something if it knows less about one of the migrations."""
    less, more = (
        encode(remembered(migrations={"m1": one}), now=NOW, window=WINDOW)
        for one in (a_migration(), a_migration(**A_MOVE))
    )
    assert holds(more, less, NOW)
    assert not holds(less, more, NOW)


class TestDamage:
    """Any damage to a shard raises an error, and no shard expands without limit."""

    LISTED = (remembered(), remembered(uid=str(UUID(int=3))))
    WHOLE = sealed(*LISTED)

    def test_every_byte(self) -> None:
        """Each changed bit is detected, unless gzip does not use the bit."""
        unused = 0
        for position in range(len(self.WHOLE)):
            for bit in range(8):
                damaged = bytearray(self.WHOLE)
                damaged[position] ^= 1 << bit
                try:
                    assert read_shard(bytes(damaged)) == list(self.LISTED)
                    unused += 1
                except Damaged:
                    continue
        assert unused <= 16 + 7, "the bytes XFL and OS, and bits after the compressed data"

    def test_every_length(self) -> None:
        """A shard that is too short or too long is damaged."""
        for length in range(len(self.WHOLE)):
            with pytest.raises(Damaged):
                read_shard(self.WHOLE[:length])
        with pytest.raises(Damaged, match="1 bytes follow"):
            read_shard(self.WHOLE + b"x")

    @pytest.mark.parametrize("entries", [b"", b"\xdd\0\0\0\1"], ids=["shard", "entry"])
    def test_nested_content_with_a_correct_checksum(self, entries: bytes) -> None:
        """Arrays that are nested too deeply to decode are damage."""
        with pytest.raises(Damaged):
            read_shard(of_version(VERSION, entries + b"\x91" * 100_000 + b"\xc0"))

    def test_content_that_is_too_long(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Content is decompressed up to a limit."""
        monkeypatch.setattr("exporter.history.format.LONGEST_CONTENT", 100)
        with pytest.raises(Damaged, match="longer than 100 bytes"):
            read_shard(self.WHOLE)

    def test_too_many_entries(self) -> None:
        """More entries than any cluster has VMIs are damage, and are not decoded."""
        most = 2**16
        assert unseal(seal([b"\xc0"] * most)) == [b"\xc0"] * most
        with pytest.raises(Damaged, match="length <= 65536"):
            unseal(seal([b"\xc0"] * (most + 1)))

    @pytest.mark.parametrize("place", [3, 4])
    def test_too_many_migrations(self, place: int) -> None:
        """More migrations of one VMI than are ever kept are damage, and are not decoded."""
        entry = msgspec.msgpack.decode(encode(remembered(), now=NOW, window=WINDOW))
        entry[place] = [[]] * 1_025 if place == 3 else {str(number): [] for number in range(1_025)}
        with pytest.raises(Damaged, match="length <= 1024"):
            read_shard(seal([msgspec.msgpack.encode(entry)]))

    @pytest.mark.parametrize("uids", [b"x" * 15, b"x" * 17, b"x" * 16])
    def test_uids_that_do_not_fit_the_migrations(self, uids: bytes) -> None:
        """Each packed UID has 16 bytes and one migration."""
        entry = msgspec.msgpack.decode(encode(remembered(), now=NOW, window=WINDOW))
        entry[2] = uids
        with pytest.raises(Damaged, match="an entry cannot be read"):
            read_shard(seal([msgspec.msgpack.encode(entry)]))

    def test_a_shard_that_would_not_fit(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A shard is compressed harder if a ConfigMap could not hold it otherwise."""
        listed = [remembered(uid=str(UUID(int=number))) for number in range(50)]
        quick = sealed(*listed)
        monkeypatch.setattr("exporter.history.format.LONGEST_SHARD", len(quick))
        assert sealed(*listed) == quick
        monkeypatch.setattr("exporter.history.format.LONGEST_SHARD", len(quick) - 1)
        assert len(sealed(*listed)) < len(quick)
        assert read_shard(sealed(*listed)) == listed

    @given(st.binary(max_size=200))
    def test_invalid_content_with_a_correct_checksum(self, payload: bytes) -> None:
        """Invalid content with a correct checksum raises no error other than `Damaged`."""
        with suppress(Damaged):
            read_shard(of_version(VERSION, payload))

    @pytest.mark.parametrize(
        "marker",
        [
            Marker(node="n", requested_at=NOW, forgotten=-1),
            Marker(node="n", requested_at=NOW, failed={str(n): NOW for n in range(65)}),
        ],
        ids=["negative", "too-many"],
    )
    def test_failures_that_cannot_be(self, marker: Marker) -> None:
        """Impossible numbers of failures are detected as damage."""
        with pytest.raises(Damaged):
            read_shard(sealed(remembered(marker=marker)))

    @pytest.mark.parametrize(
        "instant", [float("nan"), float("inf"), 1e300, 253_402_300_800.0, -62_135_596_801.0]
    )
    @pytest.mark.parametrize("place", range(8))
    def test_an_instant_that_cannot_be(self, place: int, instant: float) -> None:
        """A time outside the years 1 to 9999 is detected as damage."""
        times = [NOW + 0.5 if place == number else NOW for number in range(8)]
        migration = Migration(start=times[0], end=None, finished_at=times[1])
        ended = Migration(end=times[2])
        marker = Marker(
            node="n", requested_at=times[3], seen_at=times[4], not_before=times[5],
            failed={"f": times[6]}, asked_by=Requester(times[7], "alice"),
        )  # fmt: skip
        one = remembered(migrations={"m1": migration, "m2": ended}, marker=marker)
        entry = encode(one, now=NOW, window=WINDOW)
        assert read_shard(seal([entry])) == [one]
        wrong = entry.replace(struct.pack(">d", NOW + 0.5), struct.pack(">d", instant))
        with pytest.raises(Damaged):
            read_shard(seal([wrong]))


def test_a_history_of_an_older_release() -> None:
    """A field that is not stored has its default."""
    entry = msgspec.msgpack.decode(encode(remembered(), now=NOW, window=WINDOW))
    (migration,) = entry[4].values()
    del migration[5:], entry[6:]
    assert read_shard(seal([msgspec.msgpack.encode(entry)])) == [remembered()]


def test_a_history_of_a_newer_release() -> None:
    """Further fields are ignored."""
    one = remembered(migrations={"m1": a_migration(**A_MOVE)})
    entry = msgspec.msgpack.decode(encode(one, now=NOW, window=WINDOW))
    entry[4]["m1"].append("new")
    entry[5]["new"] = "new"
    assert read_shard(seal([msgspec.msgpack.encode([*entry, "new"])])) == [one]


@pytest.mark.parametrize(
    ("place", "wrong"),
    [(0, "then"), (3, 9), (4, "yes"), (5, 7), (6, None), (7, "new"), (8, "new"), (9, [NOW])],
)
def test_a_move_that_cannot_be(place: int, wrong: object) -> None:
    """A wrong type, or a word that this version does not know, is detected as damage."""
    one = remembered(migrations={"m1": a_migration(**A_MOVE)})
    entry = msgspec.msgpack.decode(encode(one, now=NOW, window=WINDOW))
    entry[4]["m1"][place] = wrong
    with pytest.raises(Damaged):
        read_shard(seal([msgspec.msgpack.encode(entry)]))


@pytest.mark.parametrize(
    "asked_by",
    ["alice", {"at": NOW}, {"at": NOW, "user": 7}, {"at": "alice", "user": "alice"}],
)
def test_a_requester_that_cannot_be(asked_by: object) -> None:
    """A requester with wrong types is detected as damage."""
    entry = msgspec.msgpack.decode(encode(remembered(), now=NOW, window=WINDOW))
    entry[5]["asked_by"] = asked_by
    with pytest.raises(Damaged):
        read_shard(seal([msgspec.msgpack.encode(entry)]))


def of_version(version: int, payload: bytes = b"\xc0") -> bytes:
    """A shard of this format version, built from the description of the format."""
    return gzip.compress(b"\x92" + msgspec.msgpack.encode(version) + payload, mtime=0)


@pytest.mark.parametrize("version", [0, VERSION + 1, 65_535])
def test_another_version(version: int) -> None:
    """The error for a shard of another version has the shard's bytes, so that they can be kept."""
    raw = of_version(version)
    with pytest.raises(UnknownVersion, match=f"version {version}") as unknown:
        read_shard(raw)
    assert (unknown.value.version, unknown.value.raw) == (version, raw)


class TestFile:
    """A file is a sequence of shards, and damage to one does not affect the others."""

    SHARDS = tuple(sealed(remembered(uid=str(UUID(int=n)))) for n in range(4))
    ENDS = tuple(accumulate(map(len, SHARDS)))

    def test_whole(self) -> None:
        """A file's shards are read as they were written."""
        assert list(split(b"".join(self.SHARDS))) == list(self.SHARDS)
        assert list(split(b"")) == []

    def test_every_byte(self) -> None:
        """After any byte is changed, all other shards can still be read."""
        whole = b"".join(self.SHARDS)
        for position in range(len(whole)):
            damaged = bytearray(whole)
            damaged[position] ^= 0xFF
            hit = bisect_right(self.ENDS, position)
            others = [s for n, s in enumerate(self.SHARDS) if n != hit]
            assert set(others) <= set(self.readable(bytes(damaged)))

    def test_between(self) -> None:
        """Bytes between the shards are pieces of their own."""
        one, other, *_ = self.SHARDS
        assert list(split(b"a" + one + b"b" + other + b"c")) == [b"a", one, b"b", other, b"c"]

    def test_every_length(self) -> None:
        """In a truncated file all complete shards can still be read."""
        whole = b"".join(self.SHARDS)
        for length in range(len(whole)):
            complete = bisect_right(self.ENDS, length)
            assert self.readable(whole[:length]) == list(self.SHARDS[:complete])

    @given(st.binary(max_size=300))
    def test_garbage(self, raw: bytes) -> None:
        """Any bytes are split into pieces, and no byte is lost."""
        assert b"".join(split(raw)) == raw

    @staticmethod
    def readable(raw: bytes) -> list[bytes]:
        """The shards of a file that can be read."""
        whole = []
        for piece in split(raw):
            try:
                read_shard(piece)
            except Damaged:
                continue
            whole.append(piece)
        return whole


def test_a_hundred_thousand_vmis_fit(prove: Callable[[str], None]) -> None:
    """100,000 VMIs with 17 migrations each, between 2,000 nodes, fit into the ConfigMaps."""
    draw = random.Random(5)
    nodes = [f"worker-{draw.randrange(16**6):06x}.dc1.example.com" for _ in range(2_000)]
    counts = Counter(shard_of(str(UUID(int=draw.getrandbits(128)))) for _ in range(100_000))
    entries = [an_entry(draw, nodes, endings=17) for _ in range(max(counts.values()))]
    fullest = seal(entries)
    prove(
        f"a stored history takes {len(an_entry(draw, nodes, endings=1))} bytes of a VMI with one"
        f" ending, {len(entries[0])} with 17; 100,000 of the latter make shards of at most"
        f" {len(fullest)} bytes"
    )
    assert len(counts) == SHARDS
    assert len(fullest) < LONGEST_SHARD
    assert unseal(fullest) == entries


def an_entry(draw: random.Random, nodes: list[str], *, endings: int) -> bytes:
    """An entry as in a real cluster: UUIDs, a namespace, nodes, and times in whole seconds."""
    uids = [str(UUID(int=draw.getrandbits(128))) for _ in range(endings + 1)]
    end, target, migrations = NOW, draw.choice(nodes), {}
    for uid in uids[1:]:
        source = draw.choice(nodes)
        migrations[uid] = a_migration(
            start=end - draw.randrange(20, 400),
            end=end,
            finished_at=end + 1,
            source_node=source,
            target_node=target,
            trigger=Trigger.EVACUATION,
            reason=EndReason.NONE,
        )
        end, target = end - draw.randrange(900, 5_000), source
    vmi = remembered(uid=uids[0], namespace="production", migrations=migrations, marker=None)
    return encode(vmi, now=NOW, window=WINDOW)
