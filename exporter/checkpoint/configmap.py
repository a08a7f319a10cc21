"""The checkpoint in ConfigMaps of the cluster, one per shard."""

import asyncio
from base64 import b64encode
from collections.abc import Callable

from msgspec import Struct, field

from exporter.checkpoint.changes import PendingChanges
from exporter.checkpoint.format import LONGEST_SHARD, SHARDS, VERSION, Damaged, UnknownVersion
from exporter.checkpoint.writer import CheckpointWriter
from exporter.engine.model import ConfigMap, Fact, Instant, Resource, Seconds, Why
from exporter.engine.store import Names, Store
from exporter.health import CheckpointFault, Health
from exporter.kube.client import (
    Absent,
    ApiError,
    ApiServer,
    Conflict,
    Overloaded,
    Silent,
    Unreachable,
)
from exporter.kube.kubevirt import CHECKPOINT_LABEL, Refused, parse_object
from exporter.kube.lease import Lease
from exporter.settings import ConfigMaps


DATA_KEY = "checkpoint"
"""The key in `binaryData` that holds the shard. A shard of another format version stays beside it,
under a key with that version, such as `checkpoint.v2`."""
REFUSALS = 3
"""After this many refused shards the rest waits for the next interval."""
OWNER = "kubevirt-eviction-exporter"
"""Our field manager for server-side apply."""


class _Stored(Struct):
    """One ConfigMap as last read or written; `others` are its shards of other format versions."""

    version: str
    raw: bytes | None
    others: dict[str, bytes] = field(default_factory=dict)


class ConfigMapWriter(CheckpointWriter):
    """Writes the checkpoint to ConfigMaps, one per shard, while this process holds `lease`.

    Every replica watches the ConfigMaps: `put`, `remove` and `retain` are called by a `Reflector`.
    It merges what the others wrote into its store, and writes what they lack once it holds the
    Lease.
    """

    def __init__(
        self,
        changes: PendingChanges,
        health: Health,
        api: ApiServer,
        place: ConfigMaps,
        *,
        lease: Lease,
        interval: Seconds,
        clock: Callable[[], Instant],
    ) -> None:
        super().__init__(changes, health, interval=interval, clock=clock)
        self._api = api
        self._namespace = place.namespace
        self._name = place.name
        self._lease = lease
        lease.changed = self._hurry
        self._status.may_write = lambda: lease.held
        self._shard_by_name = {self._name_of(shard): shard for shard in range(SHARDS)}
        self._stored: dict[int, _Stored] = {}
        self._store: Store = changes.store

    async def run(self) -> None:
        """Compete for the Lease, and write changes while holding it, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._lease.run())
            tasks.create_task(super().run())

    async def close(self) -> None:
        """Write what is still pending and release the Lease."""
        await self.flush()
        await self._lease.release()

    @property
    def revision(self) -> int:
        """The store's revision: reading a checkpoint can change answers too."""
        return self._store.revision

    @property
    def read_at(self) -> Instant:
        """When the next objects to be put were read."""
        return self._store.read_at

    @read_at.setter
    def read_at(self, instant: Instant) -> None:
        self._store.read_at = instant

    def put(self, fact: Fact, _reasons: tuple[Why, ...] = ()) -> None:
        """Merge a ConfigMap that was added or modified."""
        if not isinstance(fact, ConfigMap) or fact.name not in self._shard_by_name:
            return
        shard = self._shard_by_name[fact.name]
        stored = self._stored.get(shard)
        if stored is not None and stored.version == fact.version:
            return
        raw = fact.data.get(DATA_KEY)
        others = {key: data for key, data in fact.data.items() if key != DATA_KEY}
        self._stored[shard] = _Stored(fact.version, raw, others)
        ours = others.pop(f"{DATA_KEY}.v{VERSION}", None)
        uids = None if raw is None else self._merge(shard, raw, others)
        if ours is not None:
            self._merge(shard, ours, others)
        elif uids is not None and stored is not None:
            self._changes.keep_only(shard, uids)
        self._changes.encode_touched(self._clock())
        self._compare(shard)
        self.note_change()

    def remove(self, resource: Resource, namespace: str, name: str, uid: str = "") -> None:
        """A ConfigMap was deleted: write its content again."""
        del resource, namespace, uid
        shard = self._shard_by_name.get(name)
        if shard is not None and self._stored.pop(shard, None) is not None:
            self._compare(shard)
            self.note_change()

    def retain(self, resource: Resource, names: Names, namespace: str | None) -> int:
        """Drop ConfigMaps that a complete list lacks; returns how many."""
        listed = names.get(self._namespace, ())
        gone = [
            n
            for n, shard in self._shard_by_name.items()
            if shard in self._stored and n not in listed
        ]
        for name in gone:
            self.remove(resource, namespace or "", name)
        return len(gone)

    def _name_of(self, shard: int) -> str:
        return f"{self._name}-{shard:02d}"

    def _merge(self, shard: int, raw: bytes, others: dict[str, bytes]) -> set[str] | None:
        """Merge a shard into the store. Returns its UIDs, or None if it is unreadable."""
        try:
            return self._changes.load_shard(raw)
        except UnknownVersion as unknown:
            key = f"{DATA_KEY}.v{unknown.version}"
            others[key] = raw
            self._note_fault(CheckpointFault.UNKNOWN_VERSION, str(unknown), shard=shard, kept=key)
        except Damaged as damage:
            self._note_fault(CheckpointFault.DAMAGED, str(damage), shard=shard)
        return None

    def _compare(self, shard: int) -> bool:
        """Whether the ConfigMap is up to date; marks the shard as written or changed."""
        stored, changes = self._stored.get(shard), self._changes
        raw = stored.raw if stored is not None else None
        if raw == changes.seal(shard) or (raw is None and changes.is_empty(shard)):
            changes.note_written(shard)
            return True
        changes.note_change(shard, self._clock())
        return False

    async def _write(self) -> None:
        if not self._health.is_synced(Resource.CONFIGMAPS):
            return
        if not self._lease.held:
            await self._compare_changed()
            return
        await self._write_changed()

    async def _write_changed(self) -> None:
        """Write what has changed, existing ConfigMaps first: a quota only prevents new ones.

        One refused shard does not keep the others waiting; after `REFUSALS` the rest waits.
        """
        refused: list[ApiError | Refused] = []
        for shard in sorted(self._changes.changed, key=lambda one: (one not in self._stored, one)):
            try:
                await self._write_shard(shard)
            except (ApiError, Refused) as error:
                refused.append(error)
                is_away = isinstance(error, Unreachable | Silent | Overloaded)
                if is_away or len(refused) >= REFUSALS:
                    break
        if refused:
            self._note_fault(CheckpointFault.NOT_WRITTEN, str(refused[0]))

    async def _compare_changed(self) -> None:
        """Find what the holder of the Lease wrote before our own watch showed it."""
        for shard in sorted(self._changes.changed):
            self._compare(shard)
            await asyncio.sleep(0)

    async def _write_shard(self, shard: int) -> None:
        """Write one shard; after a conflict, merge what another replica wrote and retry once.

        A ConfigMap that the watch has not delivered is read first, because an apply without a
        resourceVersion would overwrite another replica's data. Raises `ApiError`, or `Refused` if
        the response is not a ConfigMap.
        """
        if shard not in self._stored:
            await self._read_again(shard)
        for _ in range(2):
            if not self._lease.held or self._compare(shard):
                return
            raw = self._changes.seal(shard)
            size = len(raw) + self._measure_others(shard)
            if size > LONGEST_SHARD:
                why = f"{size} bytes, and a ConfigMap takes {LONGEST_SHARD}"
                self._note_fault(CheckpointFault.TOO_LARGE, why, shard=shard)
                return
            try:
                await self._apply(shard, raw)
            except Conflict as conflict:
                self._note_fault(CheckpointFault.CONFLICT, str(conflict), shard=shard)
                await self._read_again(shard)

    def _measure_others(self, shard: int) -> int:
        """The size of what a ConfigMap has for other versions of the format."""
        stored = self._stored.get(shard)
        return 0 if stored is None else sum(map(len, stored.others.values()))

    async def _apply(self, shard: int, raw: bytes) -> None:
        name, stored = self._name_of(shard), self._stored.get(shard)
        others = stored.others if stored is not None else {}
        data = {DATA_KEY: raw} | others
        version = {"resourceVersion": stored.version} if stored is not None else {}
        body = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {
                "namespace": self._namespace,
                "name": name,
                "labels": {CHECKPOINT_LABEL: self._name},
                **version,
            },
            "binaryData": {key: b64encode(value).decode() for key, value in data.items()},
        }
        answer = await self._api.apply(
            Resource.CONFIGMAPS, self._namespace, name, body, owner=OWNER
        )
        self._stored[shard] = _Stored(_version_of(answer), raw, others)
        self._compare(shard)

    async def _read_again(self, shard: int) -> None:
        try:
            answer = await self._api.read(
                Resource.CONFIGMAPS, self._namespace, self._name_of(shard)
            )
        except Absent:
            self._stored.pop(shard, None)
        else:
            self.put(parse_object(Resource.CONFIGMAPS, answer).fact)


def _version_of(answer: bytes) -> str:
    fact = parse_object(Resource.CONFIGMAPS, answer).fact
    return fact.version if isinstance(fact, ConfigMap) else ""
