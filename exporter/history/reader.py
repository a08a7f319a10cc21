"""Merges the stored history's ConfigMaps into the store."""

import asyncio
from collections.abc import Callable, Iterator

from msgspec import Struct, field

from exporter.engine.changes import Change, Listed, Observed, Removed
from exporter.engine.model import ConfigMap, Instant
from exporter.health import HistoryFault, HistoryHealth, Watched
from exporter.history.changes import PendingChanges
from exporter.history.format import SHARDS, VERSION, Damaged, UnknownVersion
from exporter.history.writer import WriteSignal, note_fault
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

    `apply` only notes what to merge; `run` does it. `shards` are the ConfigMaps that exist, as far
    as they have been merged. `lock` is held while one of them is merged or written.
    """

    def __init__(
        self,
        changes: PendingChanges,
        watched: Watched,
        status: HistoryHealth,
        signal: WriteSignal,
        place: ConfigMaps,
        *,
        clock: Callable[[], Instant],
    ) -> None:
        self.shards: dict[int, Stored] = {}
        self.lock = asyncio.Lock()
        self._changes = changes
        self._signal = signal
        self._watched = watched
        self._status = status
        self.place = place
        self._clock = clock
        self._shard_by_name = {name_of(place, shard): shard for shard in range(SHARDS)}
        self._received: dict[int, ConfigMap | None] = {}
        self._awake = asyncio.Event()

    def apply(self, change: Change, at: Instant) -> int:
        """A ConfigMap was added, modified or deleted, has lost its label, or is not listed."""
        del at  # what it says is dated when it is merged
        found: dict[str, ConfigMap | None] = {}
        match change:
            case Observed(fact=ConfigMap() as fact):
                found = {fact.name: fact}
            case Removed():
                found = {change.name: None}
            case Listed():
                listed = change.names.get(self.place.namespace, ())
                known = self.shards.keys() | self._received.keys()
                names = (name_of(self.place, shard) for shard in known)
                found = {name: None for name in names if name not in listed}
            case _:
                pass
        shards = self._shard_by_name
        received = {shards[name]: one for name, one in found.items() if name in shards}
        self._received |= received
        self._awake.set()
        return len(received)

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
            self._signal.wake()

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


def name_of(place: ConfigMaps, shard: int) -> str:
    """The name of a shard's ConfigMap."""
    return f"{place.name}-{shard:02d}"


async def _finish(work: Iterator[None]) -> None:
    """Do it in slices, and let others run between them."""
    for _ in work:
        await asyncio.sleep(0)
