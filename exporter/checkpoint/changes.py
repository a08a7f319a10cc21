"""What of the store a checkpoint has to hold, shard by shard, and what has changed since.

The store is the truth and the ledger follows it: only the VMIs that the store calls touched are
encoded anew. What a checkpoint held goes into the store first, joined with what is known there,
and from there into the ledger: so writers that know different things end up alike.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from exporter.checkpoint.format import SHARDS, encode, seal, shard_of, unseal
from exporter.engine.model import Instant, Seconds
from exporter.engine.store import Store


AWAITED_FOR: Seconds = 60.0
"""Longer than one replica can be behind another while both hear of the cluster."""


@dataclass
class Ledger:
    """The entries of every shard, as encoded; `window` is the policy's history window, seconds.

    `changed` are the shards whose content is not what was last written or read. `unwritten_since`
    is when the oldest change came that is not written yet.
    """

    store: Store
    window: Seconds
    changed: set[int] = field(default_factory=set)
    unwritten_since: Instant | None = None
    _entries: list[dict[str, bytes]] = field(default_factory=lambda: [{} for _ in range(SHARDS)])
    _awaited: dict[str, Instant] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.store.touched = set()

    def __len__(self) -> int:
        return sum(map(len, self._entries))

    @property
    def awaits(self) -> bool:
        """Whether a VMI that was told of has not been seen."""
        return bool(self._awaited)

    @property
    def size(self) -> int:
        """Bytes of all entries."""
        return sum(len(entry) for entries in self._entries for entry in entries.values())

    def take(self, raw: bytes) -> set[str]:
        """Read a sealed shard into the store; the UIDs that it holds.

        Raises `Damaged` or `UnknownVersion`.
        """
        listed = unseal(raw)
        for remembered in listed:
            self.store.recall(remembered)
        return {remembered.uid for remembered in listed}

    def keep_only(self, shard: int, uids: set[str]) -> None:
        """Who writes the shard has dropped the others from it: they are not waited for."""
        for remembered in self.store.recalled():
            if remembered.uid not in uids and shard_of(remembered.uid) == shard:
                self.store.forget(remembered.uid)

    def prune(self, seen_through: Callable[[str], Instant | None], now: Instant) -> None:
        """Drop what is known of VMIs that are gone.

        A VMI that nobody has seen is gone where its namespace is watched, has been listed, and
        was seen whole (`seen_through`, by namespace) for `AWAITED_FOR` since we learnt of it.
        """
        recalled = {remembered.uid: remembered.namespace for remembered in self.store.recalled()}
        self._awaited = {uid: self._awaited.get(uid, now) for uid in recalled}
        for uid, since in self._awaited.items():
            seen = seen_through(recalled[uid])
            if seen is not None and seen >= since + AWAITED_FOR:
                self.store.forget(uid)

    def follow(self, now: Instant) -> None:
        """Encode what the store has touched since; `changed` then tells what is to be written."""
        touched, self.store.touched = self.store.touched or set(), set()
        for uid in touched:
            remembered = self.store.remember(uid)
            entries = self._entries[shard_of(uid)]
            if remembered is None:
                is_news = entries.pop(uid, None) is not None
            else:
                entry = encode(remembered, now=now, window=self.window)
                is_news = entries.get(uid) != entry
                entries[uid] = entry
            if is_news:
                self.note_change(shard_of(uid), now)

    def note_change(self, shard: int, now: Instant) -> None:
        """What is kept of this shard is not what it should hold."""
        self.changed.add(shard)
        if self.unwritten_since is None:
            self.unwritten_since = now

    def note_written(self, shard: int) -> None:
        """What is kept of this shard is what it should hold."""
        self.changed.discard(shard)
        if not self.changed:
            self.unwritten_since = None

    def seal(self, shard: int) -> bytes:
        """The shard as it is to be written."""
        entries = self._entries[shard]
        return seal(entries[uid] for uid in sorted(entries))

    def is_empty(self, shard: int) -> bool:
        """Whether the shard holds nothing."""
        return not self._entries[shard]
