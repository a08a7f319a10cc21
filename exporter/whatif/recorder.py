"""Records a cluster: the exporter's own watch, with each change of the store written to a file.

Only changes of the store are written. So a relist writes no event twice, and an object that the new
list lacks is recorded as deleted.
"""

import asyncio
import math
import random
import zlib
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

import structlog

from exporter.engine.evacuations.ended_migrations import find_reason
from exporter.engine.facts.changes import Change, Key, Listed, Observed, Removed
from exporter.engine.facts.model import (
    EVIDENCE_RESOURCES,
    EndReason,
    Fact,
    Instant,
    KubeVirtSettings,
    Outcome,
    Pod,
    Resource,
    Seconds,
    Vmi,
    Vmim,
)
from exporter.engine.facts.policy import Policy
from exporter.engine.store.store import Store
from exporter.health import Health, list_watches
from exporter.kube.client import ApiServer
from exporter.kube.login import Login
from exporter.kube.objects.kubevirt import Changed
from exporter.kube.watch.feed import NO_OVERRIDES
from exporter.kube.watch.informers import Informers
from exporter.settings import Settings
from exporter.whatif import recording
from exporter.whatif.recording import CannotRecord, Kind


FLUSHED_EVERY: Seconds = 5.0
"""How often the file is flushed: a crash loses at most the events of this time."""
Traits: TypeAlias = dict[str, object]
_RESOURCES: dict[type, Resource] = {
    Vmi: Resource.VMIS,
    Vmim: Resource.VMIMS,
    Pod: Resource.PODS,
    KubeVirtSettings: Resource.KUBEVIRTS,
}

log = structlog.stdlib.get_logger()


class LineFile:
    """A new file of lines, compressed if its name ends in .gz. Raises `CannotRecord`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._file = path.open("xb")
        except FileExistsError:
            raise CannotRecord(f"{path}: exists already, and is not overwritten") from None
        except OSError as error:
            raise CannotRecord(f"{path}: {error.strerror}") from error
        # GzipFile would write a name and a time in the header. Equal lines must give equal bytes.
        self._deflate = (
            zlib.compressobj(wbits=16 + zlib.MAX_WBITS) if path.suffix == ".gz" else None
        )
        self.size = 0
        self.lines = 0

    def write(self, line: bytes) -> None:
        """Add a line, which includes its line end."""
        self.lines += 1
        self._add(line if self._deflate is None else self._deflate.compress(line))

    def flush(self) -> None:
        """Write everything so far to the file, so that it can be read already."""
        if self._deflate is not None:
            self._add(self._deflate.flush(zlib.Z_SYNC_FLUSH))
        self._reporting(self._file.flush)

    def close(self) -> None:
        """Complete the file."""
        if self._deflate is not None:
            self._add(self._deflate.flush())
        self._reporting(self._file.close)

    def discard(self) -> None:
        """Close and delete the file."""
        with suppress(OSError):  # the last write may have failed
            self._file.close()
        self._path.unlink(missing_ok=True)

    def _add(self, body: bytes) -> None:
        self.size += len(body)
        self._reporting(lambda: self._file.write(body))

    def _reporting(self, act: Callable[[], object]) -> None:
        try:
            act()
        except OSError as error:
            raise CannotRecord(f"{self._path}: {error.strerror}") from error


class Recorder:
    """Writes each change of `store` to `file`; `counts` are the events by resource and kind.

    It writes a VMI's labels whose keys overrides of `policy` use, and its priority class if an
    override uses one.
    """

    def __init__(self, store: Store, file: LineFile, policy: Policy = NO_OVERRIDES) -> None:
        store.record_applied = self.record_applied
        self._store = store
        self._objects: Counter[Resource] = Counter()
        self.counts: Counter[tuple[Resource, Kind]] = Counter()
        self._lines = file
        self._rejected: set[str] = set()
        self._written_at: Instant = 0.0
        self._policy = policy
        self._matched: Traits = {}
        self._reason = EndReason.OTHER
        self._matched_of: dict[Key, Traits] = {}
        file.write(recording.write_header())

    def record(self, changed: Changed) -> None:
        """Keep, for the next change, the labels that overrides use, or why a VMIM failed."""
        ended = changed.read_end()
        self._reason = EndReason.OTHER
        if ended and ended.vmim.handed_off and ended.vmim.outcome is Outcome.FAILED:
            self._reason = find_reason(ended, None, ())
        if self._policy.overrides and changed.traits is not None:
            keys, labels = self._policy.matched_labels, changed.traits.read_labels()
            matched = {key: value for key, value in labels.items() if key in keys}
            self._matched = {"labels": matched} if matched else {}
            priority_class = changed.traits.priority_class
            if priority_class and any(entry.priority_classes for entry in self._policy.overrides):
                self._matched["priorityClass"] = priority_class

    def record_applied(self, change: Change, at: Instant, changed: int) -> None:
        """Record a change that the store has applied if it changed the store."""
        if isinstance(change, Observed):
            self._record_fact(change.fact, at, is_news=bool(changed))
        elif isinstance(change, Removed) and changed:
            self._objects[change.resource] = self._store.count(change.resource)
            if change.resource is Resource.VMIS:
                self._matched_of.pop((change.namespace, change.name), None)
            names = {"namespace": change.namespace, "name": change.name}
            metadata = names | ({"uid": change.uid} if change.uid else {})
            self._write(at, Kind.DELETED, change.resource, object={"metadata": metadata})
        elif isinstance(change, Listed):
            self._rejected.discard(change.resource)
            self._write(at, Kind.SYNCED, change.resource)

    def _record_fact(self, fact: Fact, at: Instant, *, is_news: bool) -> None:
        """Record an object if it is news, or if other overrides match it now."""
        resource = _RESOURCES[type(fact)]
        known, self._objects[resource] = self._objects[resource], self._store.count(resource)
        matched, self._matched = self._matched, {}
        if isinstance(fact, Vmi) and self._policy.overrides:
            key = (fact.namespace, fact.name)
            is_news = is_news or self._matched_of.get(key, {}) != matched
            self._matched_of[key] = matched
        if is_news:
            kind = Kind.ADDED if self._objects[resource] > known else Kind.MODIFIED
            why = {} if self._reason is EndReason.OTHER else {"reason": self._reason}
            self._write(at, kind, resource, fact=recording.strip(fact), **matched, **why)

    def record_rejections(self, health: Health, now: Instant) -> None:
        """Record each resource that can be listed in no watched namespace, but not twice."""
        for resource in EVIDENCE_RESOURCES:
            is_unseen = health.is_rejected(resource) and not health.is_seen(resource)
            if is_unseen and resource not in self._rejected:
                self._rejected.add(resource)
                self._write(now, Kind.REJECTED, resource)

    def end(self, now: Instant) -> None:
        """Record when the recording was stopped, which may be long after its last event."""
        self._lines.write(recording.write_event(now, Kind.ENDED))

    def _write(self, at: Instant, kind: Kind, resource: Resource, **fields: object) -> None:
        """Write and count an event. Its instant is never before that of the last event."""
        self.counts[resource, kind] += 1
        self._written_at = max(self._written_at, at)
        self._lines.write(recording.write_event(self._written_at, kind, resource, **fields))


async def record(
    settings: Settings,
    login: Login,
    stop: asyncio.Event,
    *,
    path: Path,
    clock: Callable[[], Instant],
    lasts: Seconds | None = None,
) -> None:
    """Record the cluster to a file until `stop` is set, or for `lasts` seconds.

    Raises `CannotRecord`, `NotSynced`, `KubeVirtMissing` or `NoCredentials`. If no VMI could be
    listed, nothing is recorded, which is `NotSynced` too.
    """
    file = LineFile(path)
    store = Store(endings_kept=Policy().endings_kept)
    recorder = Recorder(store, file, settings.policy)
    watches = list_watches(settings.namespaces, EVIDENCE_RESOURCES)
    health = Health(settings.kube.stale_after, settings.kube.dead_after, watches)
    try:
        timeout, names = settings.kube.read_timeout, settings.kubevirt
        async with ApiServer(login, read_timeout=timeout, names=names) as api:
            watch = Informers(
                api,
                store,
                health,
                settings.kube,
                clock=clock,
                settled=lambda: recorder.record_rejections(health, clock()),
                listener=recorder.record,
                rng=random.Random(),  # noqa: S311 (jitter)
            )

            async def log_in_and_watch() -> None:
                await api.log_in()
                log.info("recording", file=str(path), lasts=lasts)
                await watch.run()

            await _run_until(log_in_and_watch(), file, stop, clock=clock, lasts=lasts)
            if not health.is_seen(Resource.VMIS):
                recorder.counts.clear()
                raise watch.not_synced("before the end of the recording")
        recorder.end(clock())
    finally:
        if recorder.counts:
            file.close()
        else:
            file.discard()
    events = {f"{kind} {resource}": n for (resource, kind), n in sorted(recorder.counts.items())}
    invalid = sum(watched.invalid_objects for watched in health.watched)
    log.info("recorded", file=str(path), size=file.size, invalid_objects=invalid, **events)


async def _run_until(
    watching: Coroutine[None, None, None],
    file: LineFile,
    stop: asyncio.Event,
    *,
    clock: Callable[[], Instant],
    lasts: Seconds | None,
) -> None:
    """Watch until `stop` is set or the time is over, and flush regularly."""
    ends = math.inf if lasts is None else clock() + lasts
    tasks = {asyncio.create_task(watching), asyncio.create_task(stop.wait())}
    try:
        done: set[asyncio.Task[object]] = set()
        while not done and (left := ends - clock()) > 0:
            done, _ = await asyncio.wait(
                tasks, timeout=min(left, FLUSHED_EVERY), return_when=asyncio.FIRST_COMPLETED
            )
            file.flush()
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
