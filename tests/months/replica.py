"""One replica of the exporter in this process: built as the program builds it, without HTTP."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from functools import partial

from exporter.app import build_service
from exporter.counters import Counters, ReviewOutcome
from exporter.demo.status import ApiResource
from exporter.demo.store import (
    BUDGETS,
    KUBEVIRTS,
    MIGRATIONS,
    NODES,
    PODS,
    VMIS,
    Change,
)
from exporter.engine.facts.changes import NodesSeen
from exporter.engine.facts.evidence import SavedVmi
from exporter.engine.facts.model import CLUSTER_RESOURCES, Checkpoint, Resource
from exporter.engine.facts.policy import Policy
from exporter.engine.store.store import Store
from exporter.health import Health, Restart, list_watches
from exporter.kube.migration_log import MigrationLog
from exporter.kube.objects.kubevirt import Changed, Deleted, parse_event
from exporter.kube.watch.feed import Feed, Listing
from exporter.metrics.counts import forget_old_counts
from exporter.settings import Settings
from tests.months.cluster import World


SYNC = 2.0
"""A start lists each resource within these seconds."""
BOOKMARKS = (50.0, 65.0)
"""The API server sends a bookmark after so many quiet seconds."""
WATCHED: dict[Resource, ApiResource] = {
    Resource.VMIS: VMIS,
    Resource.VMIMS: MIGRATIONS,
    Resource.KUBEVIRTS: KUBEVIRTS,
    Resource.PODS: PODS,
    Resource.NODES: NODES,
    Resource.BUDGETS: BUDGETS,
}


class Replica:
    """A replica that watches the world's cluster, with a history that outlives its container."""

    def __init__(
        self,
        world: World,
        name: str,
        *,
        policy: Policy | None = None,
        webhook: bool = False,
    ) -> None:
        self.name = name
        # Its own, so that what an exporter watches does not change what happens in the world.
        self._chance = random.Random(world.chance.random())
        self.offset = self._chance.uniform(1, 29)
        """When within a scrape interval it is scraped."""
        self.up = False
        self.polls = False
        """Whether a plugin asks for its verdicts."""
        self.counts = False
        """Whether it counts the verdicts for which it is asked."""
        self._world = world
        self._saved: dict[str, SavedVmi] = {}
        self._webhook = webhook
        self._settings = Settings(policy=policy or Policy())
        self._cut: set[Resource] = set()
        self._read: dict[Resource, int] = {}
        self._bookmark_at: dict[Resource, float] = {}
        world.cluster.store.listeners.add(self._receive)

    def _now(self) -> float:
        return self._world.cluster.instant.timestamp()

    # The process

    def start(self) -> None:
        """Start the process with what the one before has saved."""
        settings, policy = self._settings, self._settings.policy
        self._store = Store(endings_kept=policy.endings_kept, awaited=self._saved)
        kube = settings.kube
        self.health = Health(kube.stale_after, kube.dead_after, list_watches(()))
        reviews = Counter(dict.fromkeys(ReviewOutcome, 0)) if self._webhook else None
        self.counters = Counters(reviews=reviews)
        self._service = build_service(
            settings, self._store, self.health, counters=self.counters, events=None, clock=self._now
        )
        self._store.drains.record_end = self.counters.count_drain
        log = MigrationLog(
            self._store, self.counters, started_at=self._now(), window=policy.longest_window
        )
        self._store.evacuations.record_end = self.counters.count_evacuation
        self._feeds = {
            watch.resource: Feed(self._store, watch, self._now, log.record, policy)
            for watch in self.health.watched
        }
        for endpoint in ("verdicts", "blocked", "blocked_wait") if self.polls else ():
            self.counters.expect_requests(endpoint)
        self.up = True
        self._cut = set(WATCHED)
        for resource in CLUSTER_RESOURCES:
            after = self._chance.uniform(0.3, SYNC)
            self._world.cluster.after(after, partial(self.list_again, resource))

    def stop(self) -> None:
        """End the process, which saves its history first."""
        if self.up:
            uids = {*self._store.uids(), *self._store.awaited}
            saved = {uid: self._store.save(uid) for uid in uids}
            self._saved = {uid: vmi for uid, vmi in saved.items() if vmi is not None}
        self.up = False

    def restart(self, down: float = 25.0) -> None:
        """Restart the container."""
        self.stop()
        self._world.cluster.after(down, self.start)

    # The watches

    def interrupt(self, resources: Iterable[Resource], why: Restart | None = None) -> None:
        """Interrupt the watches of these resources; without a reason they are only silent."""
        self._cut |= set(resources)
        if why is not None:
            self.count_restart(why)

    def count_restart(self, why: Restart) -> None:
        """Each interrupted watch was started again, in vain."""
        for resource in self._cut:
            for watch in self.health.of(resource):
                watch.restarts[why] += 1

    def resume(self, *, lists: bool) -> None:
        """Continue the interrupted watches, from where they were or with a list."""
        for resource in list(self._cut):
            if lists:
                self.list_again(resource)
            else:
                self._cut.discard(resource)
                self._record_contact(resource)
        self._receive()

    def forbid(self, resource: Resource) -> None:
        """The API server forbids to list and watch a resource."""
        for watch in self.health.of(resource):
            watch.rejected = "forbidden"
            watch.restarts[Restart.DENIED] += 7
        self._cut.add(resource)
        self._settle()

    def lose(self, namespace: str, names: Iterable[str]) -> None:
        """Miss that these VMIs exist."""
        feed = self._feeds[Resource.VMIS]
        for name in names:
            feed.remove(Deleted(namespace, name, "", ""))

    def list_again(self, resource: Resource) -> None:
        """List a resource, and watch it from there."""
        if not self.up:
            return
        self._cut.discard(resource)
        cache = self._world.cluster.store.caches[WATCHED[resource]]
        feed, listing = self._feeds[resource], Listing(began=self._now())
        feed.begin_batch(listing)
        for entry in cache.all():
            event = parse_event(resource, _line("ADDED", entry.body))
            if isinstance(event, Changed):
                feed.put(event, listing)
        feed.begin_batch()
        feed.retain(listing)
        self._read[resource] = self._world.cluster.store.revision
        self._record_contact(resource, synced=True)
        self._settle()

    def _receive(self) -> None:
        """Read what has changed from all watches that are not interrupted."""
        if not self.up:
            return
        for resource, kind in WATCHED.items():
            if resource in self._cut:
                continue
            cache = self._world.cluster.store.caches[kind]
            if cache.changes and cache.changes[-1].revision <= self._read[resource]:
                continue
            for change in cache.changes_since(self._read[resource]) or ():
                self._read[resource] = change.revision
                self._apply(resource, change)

    def _apply(self, resource: Resource, change: Change) -> None:
        feed = self._feeds[resource]
        feed.begin_batch()
        event = parse_event(resource, _line(change.kind, change.body))
        if isinstance(event, Changed):
            feed.put(event, None)
        elif isinstance(event, Deleted):
            feed.remove(event)
        self._record_contact(resource)

    def _record_contact(self, resource: Resource, *, synced: bool = False) -> None:
        for watch in self.health.of(resource):
            watch.contact = self._now()
            if synced:
                watch.synced, watch.rejected = True, ""
                watch.lists += 1
        self._bookmark_at[resource] = self._now() + self._chance.uniform(*BOOKMARKS)

    def _settle(self) -> None:
        if self.health.is_seen(Resource.NODES):
            self._store.apply(NodesSeen(seen=True), self._now())

    # Callers

    async def scrape(self) -> bytes:
        """The body of a scrape."""
        for resource, at in self._bookmark_at.items():
            if self._now() >= at and resource not in self._cut:
                self._record_contact(resource)
        if self.polls:
            self.counters.count_request("blocked", 0.002)
        forget_old_counts(self.counters, self._store, self._now())
        parts, _ = await self._service.render_metrics("")
        return b"".join(parts)

    def allows(self, namespace: str, name: str) -> bool:
        """Whether a VM may be evicted; this counts as the descheduler's question."""
        verdicts = self._service.view.read(self._now(), self.health.read_trust(self._now()))
        entry = verdicts.find(namespace, name)
        if entry is None:
            return True
        verdict = entry.verdict(None)
        if self.counts:
            self.counters.verdicts[Checkpoint.PRE_EVICTION, verdict.allowed] += 1
            if verdict.reason is not None:
                vmi = entry.evidence.vmi
                self._service.judge.count_blocked(vmi, verdict, verdict.reason, self._now())
        return verdict.reason is None


def _line(kind: str, body: bytes) -> bytes:
    return b'{"type":"%s","object":%s}' % (kind.encode(), body)
