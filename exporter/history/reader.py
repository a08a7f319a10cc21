"""Merges the stored history's ConfigMaps into the store."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass, field
from functools import partial

import msgspec
from msgspec import Struct

from exporter.engine.facts.changes import Change, Listed, Observed, Removed
from exporter.engine.facts.model import ConfigMap, Instant
from exporter.health import HistoryFault, HistoryHealth, Watched
from exporter.history.changes import PendingChanges
from exporter.history.format import SHARDS, VERSION, Damaged, UnknownVersion, unseal
from exporter.history.writer import SLICE, WriteSignal, note_fault
from exporter.settings import ConfigMaps
from exporter.tasks import run_in_slices


DATA_KEY = "history"
"""The key in `binaryData` that holds the shard. A shard of another format version is kept under a
key with that version, such as `history.v2`."""


class Stored(Struct):
    """One ConfigMap as it was last merged or written; `others`: shards of other format versions."""

    version: str
    others: dict[str, bytes] = msgspec.field(default_factory=dict)


@dataclass
class ConfigMapReader:
    """Merges every ConfigMap that a `Reflector` delivers, in slices.

    `apply` only notes what to merge; `run` merges it. `shards` are the ConfigMaps that exist, as
    they were last merged or written. `lock` is held while a ConfigMap is merged or written.
    """

    changes: PendingChanges
    watched: Watched
    status: HistoryHealth
    signal: WriteSignal
    place: ConfigMaps
    _: KW_ONLY
    clock: Callable[[], Instant]
    shards: dict[int, Stored] = field(default_factory=dict, init=False)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)

    def __post_init__(self) -> None:
        self._shard_by_name = {name_of(self.place, shard): shard for shard in range(SHARDS)}
        self._received: dict[int, ConfigMap | None] = {}
        self._awake = asyncio.Event()

    def apply(self, change: Change, at: Instant) -> int:
        """Note which ConfigMaps to merge: new versions, and those that are gone or not listed."""
        del at  # `merge` reads the clock itself
        shards, found = self._shard_by_name, dict[str, ConfigMap | None]()
        match change:
            case Observed(fact=ConfigMap() as fact):
                found = {fact.name: fact}
            case Removed():
                found = {change.name: None}
            case Listed():
                known = self.shards.keys() | self._received.keys()
                listed = change.names.get(self.place.namespace, ())
                found = {name: None for name in shards.keys() - listed if shards[name] in known}
            case _:
                pass
        received = {shards[name]: one for name, one in found.items() if name in shards}
        self._received |= received
        self._awake.set()
        return len(received)

    async def run(self) -> None:
        """Merge the noted ConfigMaps until cancelled."""
        self._awake.set()
        while True:
            await self._awake.wait()
            self._awake.clear()
            while self._received:
                async with self.lock:
                    shard = next(iter(self._received), None)
                    if shard is not None:
                        await self.merge(shard, self._received.pop(shard))
            self.status.loaded = self.status.loaded or self.watched.synced
            self.signal.awake.set()

    def is_behind(self, shard: int) -> bool:
        """Whether a newer version of this ConfigMap has been delivered and not merged yet."""
        return shard in self._received

    async def merge(self, shard: int, found: ConfigMap | None) -> None:
        """Merge one ConfigMap, or note that it does not exist (None). The caller holds `lock`."""
        known, now = self.shards.get(shard), self.clock()
        if found is None:
            self.shards.pop(shard, None)
            await run_in_slices(self.changes.note_missing(shard, now), most=SLICE)
            return
        if known is not None and known.version == found.version:
            return
        others = dict(found.data)
        raw, leftover = others.pop(DATA_KEY, None), others.pop(f"{DATA_KEY}.v{VERSION}", None)
        if leftover is not None:
            await self._try(leftover, partial(self.changes.merge, now=now), shard, others)
        load = partial(self.changes.load, shard, now=now, replaces=known is not None)
        if raw is None or not await self._try(raw, load, shard, others):
            is_unreadable = raw is not None
            await run_in_slices(
                self.changes.note_missing(shard, now, unreadable=is_unreadable), most=SLICE
            )
        self.shards[shard] = Stored(found.version, others)

    async def _try(
        self,
        raw: bytes,
        merge: Callable[[list[bytes]], Iterator[None]],
        shard: int,
        others: dict[str, bytes],
    ) -> bool:
        """Merge a shard; returns whether it was readable.

        A shard of another format version is put into `others`.
        """
        try:
            await run_in_slices(merge(await asyncio.to_thread(unseal, raw)), most=SLICE)
        except UnknownVersion as unknown:
            key = f"{DATA_KEY}.v{unknown.version}"
            others[key] = unknown.raw
            fault = HistoryFault.UNKNOWN_VERSION
            note_fault(self.status, fault, str(unknown), shard=shard, kept=key)
        except Damaged as damage:
            note_fault(self.status, HistoryFault.DAMAGED, str(damage), shard=shard)
        else:
            return True
        return False


def name_of(place: ConfigMaps, shard: int) -> str:
    """The name of a shard's ConfigMap."""
    return f"{place.name}-{shard:02d}"
