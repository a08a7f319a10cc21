"""Keeps the checkpoint where the operator wants it: in a file, or in the cluster's ConfigMaps.

Both do the same: read what is kept and join it with what is known, then write what has changed,
at once after a quiet time and at most once per interval else, and at the end. Whatever fails is
logged, counted and tried again; the verdicts go on without.
"""

import asyncio
import os
from base64 import b64encode
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from functools import partial
from pathlib import Path

import structlog
from msgspec import Struct, field

from exporter.checkpoint.changes import Ledger
from exporter.checkpoint.format import (
    LONGEST_SHARD,
    SHARDS,
    VERSION,
    Damaged,
    UnknownVersion,
    split,
)
from exporter.engine.model import ConfigMap, Fact, Instant, Resource, Seconds
from exporter.engine.store import Key, Store
from exporter.health import CheckpointFault, CheckpointHealth, Health
from exporter.kube.client import Absent, ApiError, ApiServer, Conflict
from exporter.kube.kubevirt import CHECKPOINT_LABEL, Refused, parse_object
from exporter.kube.lease import Lease
from exporter.settings import ConfigMaps


DATA_KEY = "checkpoint"
"""The key of `binaryData` that holds a shard. One of another version is kept beside it, under
this and its version, as in `checkpoint.v2`."""
OWNER = "kubevirt-eviction-exporter"
"""Our field manager."""

log = structlog.stdlib.get_logger()


class CannotKeep(Exception):
    """The checkpoint can never be written where it should be; the text says why."""


class Keeper:
    """Writes what has changed; where to is up to `_write`, which clears `ledger.changed`.

    `interval` is the least time between two writes, in seconds.
    """

    def __init__(
        self, ledger: Ledger, health: Health, *, interval: Seconds, clock: Callable[[], Instant]
    ) -> None:
        self._ledger = ledger
        self._health = health
        self._interval = interval
        self._clock = clock
        self._awake = asyncio.Event()
        self._hurried = asyncio.Event()
        self._status = health.checkpoint = CheckpointHealth(
            find_unwritten=lambda: ledger.unwritten_since
        )

    def note_change(self) -> None:
        """There may be something to write."""
        self._awake.set()

    async def run(self) -> None:
        """Write what changes, for ever."""
        while True:
            await self._awake.wait()
            self._awake.clear()
            await self.flush()
            if self._ledger.changed or self._ledger.awaits:
                self._awake.set()
            await self._rest()

    async def flush(self) -> None:
        """Write what is not written yet, where that is ours to do."""
        ledger, now = self._ledger, self._clock()
        ledger.prune(partial(self._health.seen_through, Resource.VMIS), now)
        ledger.follow(now)
        await self._write()
        self._status.vmis = len(ledger)
        self._status.size = ledger.size
        if self._status.writes and not ledger.changed:
            self._status.written_at = now

    async def close(self) -> None:
        """Write what is left to write."""
        await self.flush()

    def _hurry(self) -> None:
        """Something else than news has changed: there is no interval to be waited for."""
        self._hurried.set()
        self._awake.set()

    async def _rest(self) -> None:
        try:
            async with asyncio.timeout(self._interval):
                await self._hurried.wait()
        except TimeoutError:
            return
        self._hurried.clear()

    async def _write(self) -> None:
        raise NotImplementedError

    def _note_fault(self, fault: CheckpointFault, why: str, **place: object) -> None:
        self._status.faults[fault] += 1
        log.warning("checkpoint_fault", fault=str(fault), why=why, **place)


class FileKeeper(Keeper):
    """Keeps the checkpoint in one file, which only one process may write.

    The file is always whole: it is written under another name and put in place once it is on the
    disk. What another version wrote is put aside, as in `history.v2`, for that version to find.
    """

    def __init__(
        self,
        ledger: Ledger,
        health: Health,
        path: Path,
        *,
        interval: Seconds,
        clock: Callable[[], Instant],
    ) -> None:
        super().__init__(ledger, health, interval=interval, clock=clock)
        self._path = path
        self._ours_aside = _aside(path, VERSION)
        self._writing: asyncio.Future[None] | None = None
        self._status.may_write = lambda: True

    def read(self) -> None:
        """Read the file, as far as it is there and whole. Raises `CannotKeep`."""
        if not self._path.parent.is_dir():
            raise CannotKeep(f"checkpoint: file:{self._path}: there is no such directory")
        found = [path for path in (self._path, self._ours_aside) if path.exists()]
        for path in found:
            self._read(path)
        self._ledger.follow(self._clock())
        if not found:
            log.info("checkpoint_missing", path=str(self._path))
            return
        log.info("checkpoint_read", path=str(self._path), vmis=len(self._ledger))
        self.note_change()

    def _read(self, path: Path) -> None:
        try:
            raw = path.read_bytes()
        except OSError as error:
            self._note_fault(CheckpointFault.UNREADABLE, str(error), path=str(path))
            return
        for piece in split(raw):
            try:
                self._ledger.take(piece)
            except UnknownVersion as unknown:
                aside = _aside(path, unknown.version)
                self._note_fault(
                    CheckpointFault.UNKNOWN_VERSION, str(unknown), path=str(path), kept=str(aside)
                )
                self._put_aside(aside, raw)
                return
            except Damaged as damage:
                self._note_fault(CheckpointFault.DAMAGED, str(damage), path=str(path))

    def _put_aside(self, path: Path, raw: bytes) -> None:
        try:
            path.write_bytes(raw)
        except OSError as error:
            self._note_fault(CheckpointFault.NOT_WRITTEN, str(error), path=str(path))

    async def _write(self) -> None:
        ledger = self._ledger
        if not ledger.changed:
            return
        content = bytearray()
        for shard in range(SHARDS):
            if not ledger.is_empty(shard):
                content += ledger.seal(shard)
                await asyncio.sleep(0)  # because a shard of 1,500 VMIs takes a millisecond
        try:
            if self._writing is not None:
                await asyncio.wait([self._writing])
            self._writing = asyncio.ensure_future(asyncio.to_thread(self._replace, bytes(content)))
            await asyncio.shield(self._writing)
        except OSError as error:
            self._note_fault(CheckpointFault.NOT_WRITTEN, str(error), path=str(self._path))
            return
        for shard in range(SHARDS):
            ledger.note_written(shard)

    def _replace(self, content: bytes) -> None:
        """As whole as POSIX can make it: the file is either the old one or the new one."""
        part = self._path.with_name(f"{self._path.name}.part")
        try:
            with open(part, "wb", opener=_open_private) as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            part.replace(self._path)
        except OSError:
            part.unlink(missing_ok=True)
            raise
        directory = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
        self._ours_aside.unlink(missing_ok=True)


class _Kept(Struct):
    """One ConfigMap as last read or written; `aside` are the shards of other versions."""

    version: str
    raw: bytes | None
    aside: dict[str, bytes] = field(default_factory=dict)


class ConfigMapKeeper(Keeper):
    """Keeps the checkpoint in ConfigMaps, one per shard; only the holder of `lease` writes.

    Every replica follows the ConfigMaps (`put`, `remove` and `retain` are what a `Follower` asks
    for), joins what the others wrote with what it knows, and would write what they lack.
    """

    def __init__(
        self,
        ledger: Ledger,
        health: Health,
        api: ApiServer,
        place: ConfigMaps,
        *,
        lease: Lease,
        interval: Seconds,
        clock: Callable[[], Instant],
    ) -> None:
        super().__init__(ledger, health, interval=interval, clock=clock)
        self._api = api
        self._namespace = place.namespace
        self._name = place.name
        self._lease = lease
        lease.changed = self._hurry
        self._status.may_write = lambda: lease.held
        self._shards = {self._name_of(shard): shard for shard in range(SHARDS)}
        self._kept: dict[int, _Kept] = {}
        self._store: Store = ledger.store

    async def run(self) -> None:
        """Campaign for the Lease, and write what changes while it is held, for ever."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._lease.run())
            tasks.create_task(super().run())

    async def close(self) -> None:
        """Write what is left to write, and let another replica go on."""
        await self.flush()
        await self._lease.release()

    @property
    def revision(self) -> int:
        """The store's: what is read from a checkpoint changes answers too."""
        return self._store.revision

    @property
    def heard_at(self) -> Instant:
        """When what is put next was heard."""
        return self._store.heard_at

    @heard_at.setter
    def heard_at(self, instant: Instant) -> None:
        self._store.heard_at = instant

    def put(self, fact: Fact) -> None:
        """A ConfigMap exists and says this."""
        if not isinstance(fact, ConfigMap) or fact.name not in self._shards:
            return
        shard = self._shards[fact.name]
        kept = self._kept.get(shard)
        if kept is not None and kept.version == fact.version:
            return
        raw = fact.data.get(DATA_KEY)
        aside = {key: data for key, data in fact.data.items() if key != DATA_KEY}
        self._kept[shard] = _Kept(fact.version, raw, aside)
        ours_aside = aside.pop(f"{DATA_KEY}.v{VERSION}", None)
        uids = None if raw is None else self._take(shard, raw, aside)
        if ours_aside is not None:
            self._take(shard, ours_aside, aside)
        elif uids is not None and kept is not None:
            self._ledger.keep_only(shard, uids)
        self._ledger.follow(self._clock())
        self._compare(shard)
        self.note_change()

    def remove(self, resource: Resource, namespace: str, name: str, uid: str = "") -> None:
        """A ConfigMap is gone: what it held is written again."""
        del resource, namespace, uid
        shard = self._shards.get(name)
        if shard is not None and self._kept.pop(shard, None) is not None:
            self._compare(shard)
            self.note_change()

    def retain(self, resource: Resource, keys: AbstractSet[Key], namespace: str | None) -> int:
        """A whole list held just these: the others are gone. Returns how many that were."""
        listed = {name for _, name in keys}
        gone = [n for n, shard in self._shards.items() if shard in self._kept and n not in listed]
        for name in gone:
            self.remove(resource, namespace or "", name)
        return len(gone)

    def _name_of(self, shard: int) -> str:
        """The ConfigMap that holds a shard."""
        return f"{self._name}-{shard:02d}"

    def _take(self, shard: int, raw: bytes, aside: dict[str, bytes]) -> set[str] | None:
        """The UIDs of a whole shard, or None where it cannot be read."""
        try:
            return self._ledger.take(raw)
        except UnknownVersion as unknown:
            key = f"{DATA_KEY}.v{unknown.version}"
            aside[key] = raw
            self._note_fault(CheckpointFault.UNKNOWN_VERSION, str(unknown), shard=shard, kept=key)
        except Damaged as damage:
            self._note_fault(CheckpointFault.DAMAGED, str(damage), shard=shard)
        return None

    def _compare(self, shard: int) -> bool:
        """Whether the ConfigMap holds what it should; the ledger is told."""
        kept, ledger = self._kept.get(shard), self._ledger
        raw = kept.raw if kept is not None else None
        if raw == ledger.seal(shard) or (raw is None and ledger.is_empty(shard)):
            ledger.note_written(shard)
            return True
        ledger.note_change(shard, self._clock())
        return False

    async def _write(self) -> None:
        if not (self._lease.held and self._health.is_synced(Resource.CONFIGMAPS)):
            return
        try:
            for shard in sorted(self._ledger.changed):
                await self._write_shard(shard)
        except (ApiError, Refused) as error:
            self._note_fault(CheckpointFault.NOT_WRITTEN, str(error))

    async def _write_shard(self, shard: int) -> None:
        """Write one shard; where the watch is behind, once more on what another wrote.

        Raises `ApiError`, or `Refused` where the server answers with no ConfigMap.
        """
        for _ in range(2):
            if not self._lease.held or self._compare(shard):
                return
            raw = self._ledger.seal(shard)
            if len(raw) > LONGEST_SHARD:
                why = f"{len(raw)} bytes, and a ConfigMap takes {LONGEST_SHARD}"
                self._note_fault(CheckpointFault.TOO_LARGE, why, shard=shard)
                return
            try:
                await self._apply(shard, raw)
            except Conflict as conflict:
                self._note_fault(CheckpointFault.CONFLICT, str(conflict), shard=shard)
                await self._read_again(shard)

    async def _apply(self, shard: int, raw: bytes) -> None:
        name, kept = self._name_of(shard), self._kept.get(shard)
        aside = kept.aside if kept is not None else {}
        data = {DATA_KEY: raw} | aside
        version = {"resourceVersion": kept.version} if kept is not None else {}
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
        self._kept[shard] = _Kept(_version_of(answer), raw, aside)
        self._compare(shard)

    async def _read_again(self, shard: int) -> None:
        try:
            answer = await self._api.read(
                Resource.CONFIGMAPS, self._namespace, self._name_of(shard)
            )
        except Absent:
            self._kept.pop(shard, None)
        else:
            self.put(parse_object(Resource.CONFIGMAPS, answer).fact)


def _version_of(answer: bytes) -> str:
    fact = parse_object(Resource.CONFIGMAPS, answer).fact
    return fact.version if isinstance(fact, ConfigMap) else ""


def _aside(path: Path, version: int) -> Path:
    return path.with_name(f"{path.name}.v{version}")


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
