"""The encoded content of the checkpoint, and which shards still have to be written.

The store is the source: only VMIs in `store.touched` are encoded again. A checkpoint that is read
is merged into the store first and encoded from there, so that replicas which have seen different
things end up with the same content.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice

from exporter.checkpoint.format import SHARDS, encode, seal, shard_of, unseal
from exporter.engine.model import Instant, Seconds
from exporter.engine.store import Store


AWAITED_FOR: Seconds = 60.0
"""Longer than the watch of one replica can lag behind that of another."""


@dataclass
class PendingChanges:
    """The encoded entries of every shard; `window` is the policy's history window in seconds.

    `changed` holds the shards that differ from what was last written or read, `unwritten_since`
    the time of the oldest change that is not written, and `size` the bytes of all entries.
    """

    store: Store
    window: Seconds
    changed: set[int] = field(default_factory=set)
    unwritten_since: Instant | None = None
    size: int = 0
    _entries: list[dict[str, bytes]] = field(default_factory=lambda: [{} for _ in range(SHARDS)])
    _awaited: dict[str, Instant] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.store.touched = set()

    def __len__(self) -> int:
        return sum(map(len, self._entries))

    @property
    def awaits_vmis(self) -> bool:
        """Whether the checkpoint named VMIs that the watch has not shown yet."""
        return bool(self._awaited)

    def load_shard(self, raw: bytes) -> set[str]:
        """Merge a sealed shard into the store and return its UIDs.

        Raises `Damaged` or `UnknownVersion`.
        """
        listed = unseal(raw)
        for remembered in listed:
            self.store.recall(remembered)
        return {remembered.uid for remembered in listed}

    def keep_only(self, shard: int, uids: set[str]) -> None:
        """Forget unseen VMIs that the writer has dropped from this shard."""
        for remembered in self.store.recalled():
            if remembered.uid not in uids and shard_of(remembered.uid) == shard:
                self.store.forget(remembered.uid)

    def prune(self, seen_through: Callable[[str], Instant | None], now: Instant) -> None:
        """Forget VMIs that are in the checkpoint but no longer in the cluster.

        A VMI is gone if `AWAITED_FOR` after the checkpoint named it, the watch of its namespace
        still has contact (`seen_through`) and has not shown it.
        """
        recalled = {remembered.uid: remembered.namespace for remembered in self.store.recalled()}
        self._awaited = {uid: self._awaited.get(uid, now) for uid in recalled}
        for uid, since in self._awaited.items():
            seen = seen_through(recalled[uid])
            if seen is not None and seen >= since + AWAITED_FOR:
                self.store.forget(uid)

    def encode_touched(self, now: Instant, *, most: int | None = None) -> bool:
        """Encode the VMIs that the store has touched, and mark the shards that differ.

        At most `most`, 10 us each; True if some are left.
        """
        touched = self.store.touched or set()
        for uid in list(islice(touched, most)):
            touched.discard(uid)
            remembered = self.store.remember(uid)
            entries = self._entries[shard_of(uid)]
            known = entries.pop(uid, b"")
            entry = b""
            if remembered is not None:
                entry = entries[uid] = encode(remembered, now=now, window=self.window)
            self.size += len(entry) - len(known)
            if entry != known:
                self.note_change(shard_of(uid), now)
        return bool(touched)

    def note_change(self, shard: int, now: Instant) -> None:
        """Mark a shard as different from what is stored."""
        self.changed.add(shard)
        if self.unwritten_since is None:
            self.unwritten_since = now

    def note_written(self, shard: int) -> None:
        """Mark a shard as equal to what is stored."""
        self.changed.discard(shard)
        if not self.changed:
            self.unwritten_since = None

    def seal(self, shard: int) -> bytes:
        """The sealed content of a shard."""
        entries = self._entries[shard]
        return seal(entries[uid] for uid in sorted(entries))

    def is_empty(self, shard: int) -> bool:
        """Whether the shard has no entries."""
        return not self._entries[shard]
