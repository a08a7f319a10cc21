"""Holds the content for the stored history, and knows which part is not written yet.

The content is encoded from the store: a VMI is encoded again only after a notice of `MEMORY`. A
stored history that is read is first merged into the store and then encoded from there. So replicas
that have seen different migrations store the same content in the end. Methods that take long are
generators that yield after each VMI.

Each end of an evacuation is counted once, by the process that writes it into the stored history. So
replicas do not count it twice, and no restart repeats or loses it: an end that is not written
yet is found again after the restart, because the stored history still has the evacuation. The entry
says which process has counted it, in case the answer to a write is lost.
"""

import secrets
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from msgspec import Struct
from msgspec.structs import replace

from exporter.engine.facts.changes import Forgotten, Notice
from exporter.engine.facts.model import Instant, Seconds
from exporter.engine.store.evacuation_ends import EvacuationEnd
from exporter.engine.store.store import Store
from exporter.history.format import (
    SHARDS,
    decode,
    encode,
    holds,
    shard_of,
)


AWAITED_FOR: Seconds = 60.0
"""The longest time by which one replica's watch can lag behind another's."""
_WHOLE = ""
"""Used instead of a UID in `_unwritten` if the content of a whole shard cannot be read."""


class _Unwritten(Struct, frozen=True, gc=False):
    """A VMI whose stored entry is outdated: since when, and that entry (empty if there is none)."""

    since: Instant
    stored: bytes


@dataclass
class PendingChanges:
    """The encoded entries of every shard; `window` is the policy's history window.

    `note_change` must be subscribed to the store's notices of `MEMORY`, and `note_end` to the ends
    of evacuations. `count_end` is called for each end that this process has written. `size` counts
    the bytes of all entries. `writer` is a random number that identifies this process.
    """

    store: Store
    window: Seconds
    count_end: Callable[[EvacuationEnd], None] = lambda _: None
    size: int = 0
    writer: int = field(default_factory=lambda: secrets.randbits(32))
    _entries: list[dict[str, bytes]] = field(default_factory=lambda: [{} for _ in range(SHARDS)])
    _unwritten: list[dict[str, _Unwritten]] = field(
        default_factory=lambda: [{} for _ in range(SHARDS)]
    )
    _awaited: dict[str, Instant] = field(default_factory=dict)
    _outdated: set[str] = field(default_factory=set)
    _ends: dict[str, list[EvacuationEnd]] = field(default_factory=dict)
    _encoded_ends: dict[str, list[EvacuationEnd]] = field(default_factory=dict)

    def __len__(self) -> int:
        return sum(map(len, self._entries))

    def note_change(self, notice: Notice) -> None:
        """Encode this VMI again later, because its history may have changed."""
        self._outdated.add(notice.uid)

    def note_end(self, end: EvacuationEnd) -> None:
        """Count this end of an evacuation once it is written."""
        self._ends.setdefault(end.vmi_uid, []).append(end)
        self._outdated.add(end.vmi_uid)

    @property
    def has_outdated(self) -> bool:
        """Whether the history of a VMI has changed and is not encoded yet."""
        return bool(self._outdated)

    @property
    def awaits_vmis(self) -> bool:
        """Whether the stored history has VMIs or evacuations that the watch has not shown yet."""
        return bool(self._awaited)

    @property
    def unwritten(self) -> list[int]:
        """The shards that differ from the stored shards."""
        return [shard for shard in range(SHARDS) if self._unwritten[shard]]

    @property
    def unwritten_since(self) -> Instant | None:
        """The time of the oldest change that is not stored."""
        oldest = (next(iter(shard.values())) for shard in self._unwritten if shard)
        return min((one.since for one in oldest), default=None)

    def merge(
        self,
        entries: Iterable[bytes],
        now: Instant,
        *,
        known: Mapping[bytes, str] = {},
        replaces: bool = False,
    ) -> Generator[None, None, dict[str, bytes]]:
        """Merge the encoded entries of a shard into the store, and return them by UID.

        `known` has the entries that the store already has, with their UIDs. `replaces`: this is a
        newer version of a shard, so it takes precedence for VMIs that we do not see. Raises
        `Damaged` before anything is merged.
        """
        listed: dict[str, bytes] = {}
        news = []
        for entry in entries:
            uid = known.get(entry)
            if uid is None:
                remembered = decode(entry)
                news.append(remembered)
                uid = remembered.uid
            listed[uid] = entry
            yield
        for remembered in news:
            uid = remembered.uid
            if replaces:
                self.store.apply(Forgotten(uid), now)
            self.store.apply(remembered, now)
            if self.store.awaits(uid):
                self._awaited.setdefault(uid, now)
            yield
        return listed

    def load(
        self, shard: int, entries: Iterable[bytes], now: Instant, *, replaces: bool = False
    ) -> Iterator[None]:
        """Merge a stored shard into the store, and note which VMIs have an outdated stored entry.

        Raises `Damaged` before anything is merged.
        """
        ours = self._entries[shard]
        known = {entry: uid for uid, entry in ours.items()}
        listed = yield from self.merge(entries, now, known=known, replaces=replaces)
        if replaces:
            for uid in ours.keys() - listed.keys():
                self.store.apply(Forgotten(uid), now)
        yield from self._compare_all(shard, listed, now)

    def note_missing(self, shard: int, now: Instant, *, unreadable: bool = False) -> Iterator[None]:
        """Note that this shard is not stored, or that its content is `unreadable`."""
        yield from self._compare_all(shard, {}, now)
        if unreadable:
            self._unwritten[shard].setdefault(_WHOLE, _Unwritten(now, b""))

    def note_written(self, shard: int) -> None:
        """Note that this process has written the shard, and count the ends in it."""
        self._unwritten[shard].clear()
        for uid in [uid for uid in self._encoded_ends if shard_of(uid) == shard]:
            self._count_ends(uid)

    def settle_ends(self, *, is_writer: bool) -> None:
        """Count the ends that change no stored entry; another replica than the writer drops them.

        These are evacuations that began and ended between two writes, and whose VMI never had an
        entry and is deleted.
        """
        for uid in [uid for uid in self._encoded_ends if uid not in self._unwritten[shard_of(uid)]]:
            if is_writer:
                self._count_ends(uid)
            else:
                del self._encoded_ends[uid]

    def prune(self, seen_through: Callable[[str], Instant | None], now: Instant) -> Iterator[None]:
        """Forget VMIs and evacuations of the stored history that do not exist any more.

        A VMI is gone if the watch of its namespace has not shown it, and had its last contact
        (`seen_through`) at least `AWAITED_FOR` after we read the VMI from the stored history. In
        the same way, a stored evacuation has ended.
        """
        for uid, since in list(self._awaited.items()):
            yield
            remembered = self.store.remember(uid)
            if remembered is not None and self.store.awaits(uid):
                seen = seen_through(remembered.namespace)
                if seen is None or seen < since + AWAITED_FOR:
                    continue
                self.store.apply(Forgotten(uid, is_gone=True), now)
            if not self.store.awaits(uid):
                del self._awaited[uid]

    def encode_changed(self, now: Instant) -> Iterator[None]:
        """Encode the VMIs whose history has changed, which takes 10 us for each."""
        while self._outdated:
            uid = self._outdated.pop()
            known = self._encode(uid, now)
            shard = shard_of(uid)
            if known != self._entries[shard].get(uid, b""):
                unwritten = self._unwritten[shard].get(uid)
                self._compare(shard, uid, known if unwritten is None else unwritten.stored, now)
            yield

    def find_missed(
        self, before: Instant, seen_through: Callable[[str], Instant | None], now: Instant
    ) -> Iterator[int]:
        """The stored shards without some change that this replica already knew at `before`.

        A VMI counts only if its watch has had contact (`seen_through`) after the change, or at most
        `AWAITED_FOR` before it. Otherwise the VMI may be gone, and the writer may know that.
        """
        for shard, unwritten in enumerate(self._unwritten):
            for uid, one in list(unwritten.items()):
                if one.since > before:
                    break
                if uid not in self._entries[shard] or self.store.unseen(uid) is not None:
                    continue
                remembered = self.store.remember(uid)
                seen = None if remembered is None else seen_through(remembered.namespace)
                is_seen = seen is not None and seen + AWAITED_FOR >= one.since
                if not is_seen:
                    continue
                # The stored entry may contain the change by now.
                if one.stored:
                    self.store.apply(decode(one.stored), now)
                self._encode(uid, now)
                self._compare(shard, uid, one.stored, now)
                if uid in unwritten:
                    yield shard
                    break

    def entries(self, shard: int) -> list[bytes]:
        """The encoded entries of a shard, in the order of their UIDs."""
        entries = self._entries[shard]
        return [entries[uid] for uid in sorted(entries)]

    def _encode(self, uid: str, now: Instant) -> bytes:
        """Encode the history of a VMI from the store; returns the entry that this replaces."""
        entries = self._entries[shard_of(uid)]
        known = entries.pop(uid, b"")
        remembered = self.store.remember(uid)
        entry = b""
        if remembered is not None:
            past = remembered.past
            if past is not None and not past.counted_by:
                counted = replace(past, counted_by=self.writer)
                remembered = replace(remembered, past=counted)
            entry = entries[uid] = encode(remembered, now=now, window=self.window)
        self.size += len(entry) - len(known)
        if uid in self._ends:
            self._encoded_ends.setdefault(uid, []).extend(self._ends.pop(uid))
        return known

    def _count_ends(self, uid: str) -> None:
        for end in self._encoded_ends.pop(uid):
            self.count_end(end)

    def _drop_counted(self, uid: str, before: bytes, stored: bytes) -> None:
        """Drop the ends that are in the stored entry, and count those that we have stored.

        `before` is the entry that was stored before. If it has an evacuation that ended before the
        last one in `stored`, whoever replaced that entry has counted both.
        """
        last = decode(stored).past if stored else None
        if last is None:
            return
        marker, left = decode(before).marker if before else None, []
        for end in self._encoded_ends.pop(uid):
            is_last, is_older = last.is_same(end.past), end.past.ended_at <= last.seen_at
            if last.counted_by == self.writer and (is_last or is_older):
                self.count_end(end)  # the answer to our write was lost
            elif is_older and marker is not None and end.past.covers(marker.seen_at):
                marker = None
            elif not is_last:
                left.append(end)
        if left:
            self._encoded_ends[uid] = left

    def _compare_all(self, shard: int, listed: Mapping[str, bytes], now: Instant) -> Iterator[None]:
        """Compare every VMI of a shard with its stored entry."""
        uids: Collection[str] = (
            listed.keys() | self._entries[shard].keys() | self._unwritten[shard].keys()
        )
        for uid in uids:
            stored, unwritten = listed.get(uid, b""), self._unwritten[shard].get(uid)
            known = self._entries[shard].get(uid, b"") if unwritten is None else unwritten.stored
            if uid in self._outdated:
                self._outdated.remove(uid)
                self._encode(uid, now)
            if uid in self._encoded_ends:
                self._drop_counted(uid, known, stored)
            self._compare(shard, uid, stored, now)
            yield

    def _compare(self, shard: int, uid: str, stored: bytes, now: Instant) -> None:
        """Compare the stored entry of a VMI with the entry that should be stored."""
        unwritten, entry = self._unwritten[shard], self._entries[shard].get(uid, b"")
        if holds(stored, entry, now):
            unwritten.pop(uid, None)
        else:
            known = unwritten.get(uid)
            unwritten[uid] = _Unwritten(now if known is None else known.since, stored)
