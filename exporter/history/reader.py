"""Merges the stored history's ConfigMaps into the store."""

import asyncio
from collections.abc import Callable, Iterator

from msgspec import Struct, field

from exporter.engine.model import ConfigMap, Fact, Instant, Resource, Why
from exporter.engine.store import Names
from exporter.health import HistoryFault, HistoryHealth, Watched
from exporter.history.changes import PendingChanges
from exporter.history.format import SHARDS, VERSION, Damaged, UnknownVersion
from exporter.history.writer import note_fault
from exporter.settings import ConfigMaps


DATA_KEY = "history"
"""The key in `binaryData` that holds the shard. A shard of another format version stays beside it,
under a key with that version, such as `history.v2`."""


class Stored(Struct):
    """One ConfigMap as last merged or written; `others` are its shards of other format versions."""

    version: str
    others: dict[str, bytes] = field(default_factory=dict)


class ConfigMapReader:
    """Merges every ConfigMap that a `Reflector` delivers, in slices.

    `put`, `remove` and `retain` only note what to merge; `run` does it, and calls `merged` after
    it. `shards` are the ConfigMaps that exist, as far as they have been merged. `lock` is held
    while one of them is merged or written.
    """

    def __init__(
        self,
        changes: PendingChanges,
        watched: Watched,
        status: HistoryHealth,
        place: ConfigMaps,
        *,
        clock: Callable[[], Instant],
    ) -> None:
        self.shards: dict[int, Stored] = {}
        self.lock = asyncio.Lock()
        self.merged: Callable[[], None] = _do_nothing
        self.revision = 0
        self.read_at: Instant = 0.0
        self._changes = changes
        self._watched = watched
        self._status = status
        self.place = place
        self._clock = clock
        self._shard_by_name = {name_of(place, shard): shard for shard in range(SHARDS)}
        self._received: dict[int, ConfigMap | None] = {}
        self._awake = asyncio.Event()
        status.loaded = False

    def put(self, fact: Fact, _reasons: tuple[Why, ...] = ()) -> None:
        """A ConfigMap was added or modified."""
        if isinstance(fact, ConfigMap) and fact.name in self._shard_by_name:
            self._receive(self._shard_by_name[fact.name], fact)

    def remove(self, resource: Resource, namespace: str, name: str, uid: str = "") -> None:
        """A ConfigMap was deleted, or has lost its label."""
        del resource, namespace, uid
        if name in self._shard_by_name:
            self._receive(self._shard_by_name[name], None)

    def retain(self, resource: Resource, names: Names, namespace: str | None) -> int:
        """Remove ConfigMaps that a complete list lacks; returns how many."""
        listed = names.get(self.place.namespace, ())
        gone = [
            name
            for name, shard in self._shard_by_name.items()
            if (shard in self.shards or shard in self._received) and name not in listed
        ]
        for name in gone:
            self.remove(resource, namespace or "", name)
        return len(gone)

    def wake(self) -> None:
        """Merge what was delivered."""
        self._awake.set()

    async def run(self) -> None:
        """Merge what is delivered until cancelled."""
        while True:
            await self._awake.wait()
            self._awake.clear()
            while self._received:
                async with self.lock:
                    shard = next(iter(self._received), None)
                    if shard is not None:
                        await self.merge(shard, self._received.pop(shard))
            self._status.loaded = self._status.loaded or self._watched.synced
            self.merged()

    def is_behind(self, shard: int) -> bool:
        """Whether a newer version of this ConfigMap has been delivered and not merged yet."""
        return shard in self._received

    async def merge(self, shard: int, found: ConfigMap | None) -> None:
        """Merge one ConfigMap into the store; None: there is none. Needs `lock`."""
        known, now = self.shards.get(shard), self._clock()
        if found is None:
            self.shards.pop(shard, None)
            await _finish(self._changes.note_missing(shard, now))
            return
        if known is not None and known.version == found.version:
            return
        others = dict(found.data)
        raw, leftover = others.pop(DATA_KEY, None), others.pop(f"{DATA_KEY}.v{VERSION}", None)
        self._changes.store.read_at = now
        if leftover is not None:
            await self._try(self._changes.merge(leftover, now), shard, others)
        load = self._changes.load(shard, raw or b"", now, replaces=known is not None)
        if raw is None or not await self._try(load, shard, others):
            is_unreadable = raw is not None
            await _finish(self._changes.note_missing(shard, now, unreadable=is_unreadable))
        self.shards[shard] = Stored(found.version, others)

    async def _try(self, merging: Iterator[None], shard: int, others: dict[str, bytes]) -> bool:
        """Merge a shard if it is readable; one of another format version is put into `others`."""
        try:
            await _finish(merging)
        except UnknownVersion as unknown:
            key = f"{DATA_KEY}.v{unknown.version}"
            others[key] = unknown.raw
            fault = HistoryFault.UNKNOWN_VERSION
            note_fault(self._status, fault, str(unknown), shard=shard, kept=key)
        except Damaged as damage:
            note_fault(self._status, HistoryFault.DAMAGED, str(damage), shard=shard)
        else:
            return True
        return False

    def _receive(self, shard: int, found: ConfigMap | None) -> None:
        self._received[shard] = found
        self.revision += 1


def name_of(place: ConfigMaps, shard: int) -> str:
    """The name of a shard's ConfigMap."""
    return f"{place.name}-{shard:02d}"


async def _finish(work: Iterator[None]) -> None:
    """Do it in slices, and let others run between them."""
    for _ in work:
        await asyncio.sleep(0)


def _do_nothing() -> None:
    pass
