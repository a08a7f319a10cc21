"""The stored history in ConfigMaps of the cluster, one per shard."""

from base64 import b64encode
from collections import Counter
from collections.abc import Callable, Iterable

import structlog

from exporter.engine.model import ConfigMap, Instant, Resource, Seconds
from exporter.health import Health, HistoryFault, HistoryHealth
from exporter.history.changes import PendingChanges
from exporter.history.format import LONGEST_SHARD
from exporter.history.reader import DATA_KEY, ConfigMapReader, Stored, name_of
from exporter.history.writer import HistoryWriter, WriteSignal, note_fault
from exporter.kube.client import (
    Absent,
    ApiError,
    ApiServer,
    Conflict,
    Overloaded,
    Silent,
    Unreachable,
)
from exporter.kube.kubevirt import HISTORY_LABEL, Refused, parse_object
from exporter.kube.lease import Lease


REFUSALS = 3
"""After this many refused shards the rest waits for the next interval."""
MISSED_AFTER = 2
"""After this many intervals the holder of the Lease is not going to write a change any more."""
OWNER = "kubevirt-eviction-exporter"
"""Our field manager for server-side apply."""

log = structlog.stdlib.get_logger()


class ConfigMapWriter(HistoryWriter):
    """Writes the stored history to ConfigMaps, one per shard, while this process holds `lease`.

    Without the Lease it writes only what its holder has missed for `MISSED_AFTER` intervals: the
    holder merges that. Every write depends on the version that `reader` has merged, so that no
    replica overwrites what it does not know.
    """

    def __init__(
        self,
        changes: PendingChanges,
        health: Health,
        status: HistoryHealth,
        signal: WriteSignal,
        api: ApiServer,
        *,
        reader: ConfigMapReader,
        lease: Lease,
        interval: Seconds,
        clock: Callable[[], Instant],
    ) -> None:
        super().__init__(changes, health, status, signal, interval=interval, clock=clock)
        self._api = api
        self._place = reader.place
        self._reader = reader
        self._lease = lease
        self._refusals: Counter[int] = Counter()

    async def close(self) -> None:
        """Write what is still pending or only we know."""
        await self.flush()
        if self._status.loaded and not self._lease.held:
            now = self._clock()
            missed = list(self._changes.find_missed(now, lambda _: now, now))
            await self._write_shards(missed, is_holder=False)

    async def _write(self) -> None:
        if not self._status.loaded:
            return
        if self._lease.held:
            await self._write_shards(self._changes.unwritten, is_holder=True)
            return
        now = self._clock()
        before = now - MISSED_AFTER * self._interval
        missed = list(self._changes.find_missed(before, self._seen_through, now))
        if missed:
            log.info("holder_missed_changes", shards=missed)
            await self._write_shards(missed, is_holder=False)

    async def _write_shards(self, shards: Iterable[int], *, is_holder: bool) -> None:
        """Write these shards, existing ConfigMaps first: a quota only prevents new ones.

        After `REFUSALS` refused ones the rest waits, and comes before those the next time.
        """
        refused: list[ApiError | Refused] = []
        known = self._reader.shards
        for shard in sorted(shards, key=lambda one: (self._refusals[one], one not in known, one)):
            if self._reader.is_behind(shard):
                continue
            try:
                async with self._reader.lock:
                    await self._write_shard(shard, is_holder=is_holder)
            except (ApiError, Refused) as error:
                self._refusals[shard] += 1
                refused.append(error)
                is_away = isinstance(error, Unreachable | Silent | Overloaded)
                if is_away or len(refused) >= REFUSALS:
                    break
            else:
                del self._refusals[shard]
        if refused:
            note_fault(self._status, HistoryFault.NOT_WRITTEN, str(refused[0]))

    async def _write_shard(self, shard: int, *, is_holder: bool) -> None:
        """Write one shard; after a conflict, merge what another replica wrote and retry once.

        A ConfigMap that the watch has not delivered is read first, because an apply without a
        resourceVersion would overwrite another replica's data; it may lack only our label. Raises
        `ApiError`, or `Refused` if the response is not a ConfigMap.
        """
        is_hidden = shard not in self._reader.shards
        if is_hidden:
            await self._read_again(shard)
        for _ in range(2):
            if is_holder and not self._lease.held:
                return
            if not is_hidden and shard not in self._changes.unwritten:
                return
            raw = self._changes.seal(shard)
            stored = self._reader.shards.get(shard)
            others = {} if stored is None else stored.others
            size = len(raw) + sum(map(len, others.values()))
            if size > LONGEST_SHARD:
                why = f"{size} bytes, and a ConfigMap takes {LONGEST_SHARD}"
                note_fault(self._status, HistoryFault.TOO_LARGE, why, shard=shard)
                return
            try:
                await self._apply(shard, {DATA_KEY: raw} | others)
            except Conflict as conflict:
                note_fault(self._status, HistoryFault.CONFLICT, str(conflict), shard=shard)
                await self._read_again(shard)
            else:
                return

    async def _apply(self, shard: int, data: dict[str, bytes]) -> None:
        name, stored = name_of(self._place, shard), self._reader.shards.get(shard)
        based_on = {} if stored is None else {"resourceVersion": stored.version}
        body = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {
                "namespace": self._place.namespace,
                "name": name,
                "labels": {HISTORY_LABEL: self._place.name},
                **based_on,
            },
            "binaryData": {key: b64encode(value).decode() for key, value in data.items()},
        }
        answer = await self._api.apply(
            Resource.CONFIGMAPS, self._place.namespace, name, body, owner=OWNER
        )
        others = {key: raw for key, raw in data.items() if key != DATA_KEY}
        fact = parse_object(Resource.CONFIGMAPS, answer).fact
        version = fact.version if isinstance(fact, ConfigMap) else ""
        self._reader.shards[shard] = Stored(version, others)
        self._changes.note_written(shard)

    async def _read_again(self, shard: int) -> None:
        try:
            answer = await self._api.read(
                Resource.CONFIGMAPS, self._place.namespace, name_of(self._place, shard)
            )
        except Absent:
            await self._reader.merge(shard, None)
            return
        fact = parse_object(Resource.CONFIGMAPS, answer).fact
        if isinstance(fact, ConfigMap):
            await self._reader.merge(shard, fact)
