"""The stored history in ConfigMaps of the cluster, one per shard."""

import asyncio
from base64 import b64encode
from collections import Counter
from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass, field

import structlog

from exporter.engine.facts.model import ConfigMap, Resource
from exporter.health import HistoryFault
from exporter.history.format import LONGEST_SHARD, seal
from exporter.history.reader import DATA_KEY, ConfigMapReader, Stored, name_of
from exporter.history.writer import HistoryWriter, note_fault
from exporter.kube.client import (
    Absent,
    ApiError,
    ApiServer,
    Conflict,
    Overloaded,
    Silent,
    Unreachable,
)
from exporter.kube.lease import Lease
from exporter.kube.objects.kubevirt import HISTORY_LABEL, InvalidObject, parse_object


REJECTIONS = 3
"""After this many shards that could not be written, the others wait for the next interval."""
MISSED_AFTER = 2
"""After this many intervals another replica writes a change that the holder of the Lease missed."""
OWNER = "kubevirt-eviction-exporter"
"""Our field manager for server-side apply."""

log = structlog.stdlib.get_logger()


@dataclass
class ConfigMapWriter(HistoryWriter):
    """Writes the stored history to ConfigMaps, one per shard, while this process holds `lease`.

    Without the Lease it writes only changes that the holder has not written for `MISSED_AFTER`
    intervals. The holder then merges them. Every write depends on the version that `reader` has
    merged, so no replica overwrites data that it does not know.
    """

    api: ApiServer
    _: KW_ONLY
    reader: ConfigMapReader
    lease: Lease
    _rejections: Counter[int] = field(default_factory=Counter)

    async def close(self) -> None:
        """Write the pending changes at shutdown, including those that only this replica knows."""
        await self.flush()
        if self.status.loaded and not self.lease.held:
            now = self.clock()
            missed = list(self.changes.find_missed(now, lambda _: now, now))
            await self._write_shards(missed, is_holder=False)

    async def _write(self) -> None:
        if not self.status.loaded:
            return
        if self.lease.held:
            await self._write_shards(self.changes.unwritten, is_holder=True)
            return
        now = self.clock()
        before = now - MISSED_AFTER * self.interval
        missed = list(self.changes.find_missed(before, self._seen_through, now))
        if missed:
            log.info("holder_missed_changes", shards=missed)
            await self._write_shards(missed, is_holder=False)

    async def _write_shards(self, shards: Iterable[int], *, is_holder: bool) -> None:
        """Write these shards, existing ConfigMaps first: a quota prevents only new ConfigMaps.

        If `REJECTIONS` shards cannot be written, the others wait. Next time they are written first.
        """
        rejected: list[ApiError | InvalidObject] = []
        known = self.reader.shards
        for shard in sorted(shards, key=lambda one: (self._rejections[one], one not in known, one)):
            if self.reader.is_behind(shard):
                continue
            try:
                async with self.reader.lock:
                    await self._write_shard(shard, is_holder=is_holder)
            except (ApiError, InvalidObject) as error:
                self._rejections[shard] += 1
                rejected.append(error)
                is_away = isinstance(error, Unreachable | Silent | Overloaded)
                if is_away or len(rejected) >= REJECTIONS:
                    break
            else:
                del self._rejections[shard]
        if rejected:
            note_fault(self.status, HistoryFault.NOT_WRITTEN, str(rejected[0]))

    async def _write_shard(self, shard: int, *, is_holder: bool) -> None:
        """Write one shard. After a conflict, merge the other replica's version and retry once.

        If the watch has not delivered the ConfigMap, it is read first: it may exist without our
        label. Then an apply without a resourceVersion would overwrite another replica's data.
        Raises `ApiError`, or `InvalidObject` if the response is not a ConfigMap.
        """
        is_hidden = shard not in self.reader.shards
        if is_hidden:
            await self._read_again(shard)
        for _ in range(2):
            if is_holder and not self.lease.held:
                return
            if not is_hidden and shard not in self.changes.unwritten:
                return
            try:
                await self._apply(shard)
            except Conflict as conflict:
                note_fault(self.status, HistoryFault.CONFLICT, str(conflict), shard=shard)
                await self._read_again(shard)
            else:
                return

    async def _apply(self, shard: int) -> None:
        place, stored = self.reader.place, self.reader.shards.get(shard, Stored(""))
        sealed = await asyncio.to_thread(seal, self.changes.entries(shard))
        data = {DATA_KEY: sealed} | stored.others
        size = sum(map(len, data.values()))
        if size > LONGEST_SHARD:
            why = f"it has {size} bytes, but a ConfigMap can hold {LONGEST_SHARD}"
            note_fault(self.status, HistoryFault.TOO_LARGE, why, shard=shard)
            return
        name = name_of(place, shard)
        based_on = {"resourceVersion": stored.version} if stored.version else {}
        body = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {
                "namespace": place.namespace,
                "name": name,
                "labels": {HISTORY_LABEL: place.name},
                **based_on,
            },
            "binaryData": {key: b64encode(value).decode() for key, value in data.items()},
        }
        answer = await self.api.apply(Resource.CONFIGMAPS, place.namespace, name, body, owner=OWNER)
        version = parse_object(Resource.CONFIGMAPS, answer).resource_version
        self.reader.shards[shard] = Stored(version, stored.others)
        self.changes.note_written(shard)

    async def _read_again(self, shard: int) -> None:
        place = self.reader.place
        try:
            name = name_of(place, shard)
            answer = await self.api.read(Resource.CONFIGMAPS, place.namespace, name)
        except Absent:
            await self.reader.merge(shard, None)
            return
        fact = parse_object(Resource.CONFIGMAPS, answer).fact
        if isinstance(fact, ConfigMap):
            await self.reader.merge(shard, fact)
