"""Follows the cluster: lists, then watches, for ever, and puts what it reads into the store.

One `Follower` per resource and namespace. Its loops are nested, one concern each: `run` opens
again and again and waits between (backoff), `_follow` lists and then watches until something
ends it, `_take` reads lines. A list replaces what was known, so that a deletion that was missed
heals. The version to resume from is only ever one that was read; when it has expired, or none
was read, a new list is made.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Protocol, assert_never

import structlog

from exporter.engine.model import (
    CLUSTER_RESOURCES,
    Fact,
    Instant,
    MigrationState,
    Resource,
    Seconds,
    Vmi,
)
from exporter.engine.store import Key, Store
from exporter.health import Health, Restart, Watched
from exporter.kube.client import (
    Absent,
    ApiError,
    ApiServer,
    Denied,
    Expired,
    Overloaded,
    Silent,
    Unreachable,
    Unsupported,
    error_of,
)
from exporter.kube.kubevirt import (
    Bookmark,
    Changed,
    Deleted,
    Event,
    Failed,
    Refused,
    parse_event,
    parse_object,
    parse_page,
)
from exporter.settings import KubeSettings


LIST_SILENCE: Seconds = 8.0
"""How long a streamed list may pause before it is asked for in pages instead.

A server that does not know `sendInitialEvents` and does not say so never ends its list.
"""
SHORT_LIVED: Seconds = 5.0
"""A watch that the server ended sooner than this is not opened again at once."""
BELIEVED_AFTER = 4
"""How many 403s or 404s in a row are believed: an API server that has just started tells some,
until it has read its own roles and custom resources."""
ABSENCE_PAUSE: Seconds = 5.0
"""The longest pause between two looks for a resource that is not there (yet)."""
BELIEVED_AFTER_SYNC = 7
"""The same of a resource that has been seen before: some 20 s of backoff."""
REFUSALS_LOGGED_EVERY: Seconds = 60.0

log = structlog.stdlib.get_logger()


class NotSynced(Exception):
    """The VMIs could not be listed in time."""


class KubeVirtMissing(Exception):
    """The API server knows no VirtualMachineInstances."""


class Backoff:
    """Jittered exponential pauses: each between half of and the whole of a doubling bound."""

    def __init__(self, rng: random.Random, *, first: Seconds = 0.2, most: Seconds = 30.0) -> None:
        self._rng = rng
        self._first = first
        self._most = most
        self._bound = first

    def next(self) -> Seconds:
        """The pause before the next attempt."""
        bound = self._bound
        self._bound = min(self._most, bound * 2)
        return bound * self._rng.uniform(0.5, 1.0)

    def reset(self) -> None:
        """It went well: the next pause is the first again."""
        self._bound = self._first


@dataclass
class _Listing:
    """A list under way: the objects read, and whether each could at least be named."""

    keys: set[Key] = field(default_factory=set)
    complete: bool = True
    began: Instant = 0.0


class Facts(Protocol):
    """Where facts are put; told as in `Store`, which is one."""

    heard_at: Instant

    @property
    def revision(self) -> int:
        """Grows with every change that could change an answer."""

    def put(self, fact: Fact) -> None:
        """An object exists and says this."""

    def remove(self, resource: Resource, namespace: str, name: str, uid: str = "") -> None:
        """An object is gone."""

    def retain(self, resource: Resource, keys: AbstractSet[Key], namespace: str | None) -> int:
        """A complete list held just these; returns how many of the others were forgotten."""


class Follower:
    """Follows one resource in one namespace (or in all)."""

    def __init__(
        self,
        api: ApiServer,
        watched: Watched,
        store: Facts,
        settings: KubeSettings,
        *,
        clock: Callable[[], Instant],
        rng: random.Random,
        changed: Callable[[], None],
    ) -> None:
        self._api = api
        self._watched = watched
        self._store = store
        self._settings = settings
        self._clock = clock
        self._rng = rng
        self._changed = changed
        self._backoff = Backoff(rng)
        self._version: str | None = None
        self._streams_lists = True
        self._refusals = 0
        self._refusal_logged_at: Instant | None = None
        scope = {} if watched.namespace is None else {"in_namespace": watched.namespace}
        self._log = log.bind(resource=str(watched.resource), **scope)

    async def run(self) -> None:
        """Follow for ever. Raises `KubeVirtMissing` for VMIs alone, before the first list."""
        while True:
            began = self._clock()
            try:
                await self._follow()
            except ApiError as error:
                pause = await self._recover(error)
            else:
                self._watched.restarts[Restart.ENDED] += 1
                lived = self._clock() - began
                pause = 0.0 if lived >= SHORT_LIVED else self._backoff.next()
            await asyncio.sleep(pause)

    async def _follow(self) -> None:
        """List if need be, then watch until the server ends the stream."""
        if self._version is None:
            if self._streams_lists:
                await self._stream_list_and_watch()
                return
            await self._read_pages()
        seconds = self._watch_seconds()
        async with self._api.watch(
            self._watched.resource,
            self._watched.namespace,
            resource_version=self._version,
            seconds=seconds,
        ) as batches:
            self._touch()
            await self._take(batches, None)

    async def _stream_list_and_watch(self) -> None:
        listing = _Listing(began=self._clock())
        try:
            async with self._api.watch(
                self._watched.resource,
                self._watched.namespace,
                resource_version=None,
                seconds=self._watch_seconds(),
            ) as batches:
                await self._take(batches, listing)
        except Unsupported as refusal:
            self._streams_lists = False
            self._log.info("streaming_list_refused", why=str(refusal))
            await self._read_pages()

    async def _read_pages(self) -> None:
        listing = _Listing(began=self._clock())
        token = ""
        while True:
            body = await self._api.list_page(
                self._watched.resource,
                self._watched.namespace,
                limit=self._settings.page_size,
                token=token,
            )
            try:
                page = parse_page(body)
            except Refused as refusal:
                raise Unreachable(refusal.why) from refusal
            self._touch()
            self._store.heard_at = self._clock()
            for raw in page.items:
                try:
                    changed = parse_object(self._watched.resource, raw)
                except Refused as refusal:
                    self._refuse(refusal, listing)
                else:
                    self._store.put(changed.fact)
                    listing.keys.add((changed.namespace, changed.name))
            token = page.continue_token
            if not token:
                break
        self._version = page.resource_version
        self._end_list(listing, how="pages")

    async def _take(self, batches: AsyncIterator[list[bytes]], listing: _Listing | None) -> None:
        """Read lines until the stream ends; `listing` is the list that they begin with."""
        while (lines := await self._next_batch(batches, listing)) is not None:
            revision = self._store.revision
            self._store.heard_at = self._clock()
            for line in lines:
                try:
                    event = parse_event(self._watched.resource, line)
                except Refused as refusal:
                    self._refuse(refusal, listing)
                else:
                    listing = self._apply(event, listing)
            self._touch()
            if self._store.revision != revision:
                self._changed()
        if listing is not None:
            self._streams_lists = False
            raise Unreachable("the server ended the streamed list before it was complete")

    def _apply(self, event: Event, listing: _Listing | None) -> _Listing | None:
        """Take one event; returns the list that is still under way, if any."""
        match event:
            case Changed():
                if listing is not None and event.modified:
                    raise _ignored("MODIFIED")
                self._put(event, listing)
            case Deleted():
                if listing is not None:
                    raise _ignored("DELETED")
                self._remove(event)
            case Bookmark(listed=True) if listing is not None:
                self._version = event.resource_version
                self._end_list(listing, how="stream")
                return None
            case Bookmark() if listing is not None:
                raise _ignored("BOOKMARK")
            case Bookmark():
                self._version = event.resource_version or self._version
            case Failed():
                raise _as_error(event)
            case _:
                assert_never(event)
        return listing

    def _put(self, event: Changed, listing: _Listing | None) -> None:
        if listing is not None:
            listing.keys.add((event.namespace, event.name))
        else:
            if isinstance(event.fact, Vmi):
                self._tell_migration(event.fact)
            self._version = event.resource_version or self._version
        self._store.put(event.fact)

    def _remove(self, event: Deleted) -> None:
        self._version = event.resource_version or self._version
        self._store.remove(self._watched.resource, event.namespace, event.name, event.uid)

    def _end_list(self, listing: _Listing, *, how: str) -> None:
        self._store.heard_at = self._clock()
        gone = self._forget_unlisted(listing)
        watched = self._watched
        watched.lists += 1
        if watched.refused:
            self._log.info("resource_permitted")
        watched.synced, watched.refused, watched.trouble = True, "", ""
        self._refusals = 0
        self._backoff.reset()
        self._touch()
        self._log.info(
            "listed",
            objects=len(listing.keys),
            gone=gone,
            how=how,
            seconds=round(self._clock() - listing.began, 3),
        )
        self._changed()

    def _forget_unlisted(self, listing: _Listing) -> int:
        """What a whole list lacks is gone; a list with an item that has no name proves nothing."""
        if not listing.complete:
            self._log.warning("list_not_used_to_forget", why="an item could not be read at all")
            return 0
        return self._store.retain(self._watched.resource, listing.keys, self._watched.namespace)

    def _refuse(self, refusal: Refused, listing: _Listing | None) -> None:
        self._watched.refused_objects += 1
        if listing is not None:
            if refusal.name is None:
                listing.complete = False
            else:
                listing.keys.add((refusal.namespace or "", refusal.name))
        self._know_of(refusal)
        now = self._clock()
        last = self._refusal_logged_at
        if last is None or now - last >= REFUSALS_LOGGED_EVERY:
            self._refusal_logged_at = now
            self._log.warning(
                "object_refused",
                why=refusal.why,
                namespace=refusal.namespace,
                name=refusal.name,
                refused_so_far=self._watched.refused_objects,
            )

    def _know_of(self, refusal: Refused) -> None:
        """A VMI of which no more than its name and UID can be read exists all the same."""
        if self._watched.resource is not Resource.VMIS or not refusal.name or not refusal.uid:
            return
        namespace = refusal.namespace or ""
        known = self._known(namespace, refusal.name)
        if known is None or known.uid != refusal.uid:
            self._store.put(Vmi(namespace=namespace, name=refusal.name, uid=refusal.uid))

    def _known(self, namespace: str, name: str) -> Vmi | None:
        """What is known of a VMI so far."""
        store = self._store
        evidence = store.evidence(namespace, name) if isinstance(store, Store) else None
        return None if evidence is None else evidence.vmi

    async def _next_batch(
        self, batches: AsyncIterator[list[bytes]], listing: _Listing | None
    ) -> list[bytes] | None:
        """The next lines, or None at the end. Raises `Silent` where a list takes too long."""
        if listing is None:
            return await anext(batches, None)
        bound = self._settings.sync_timeout
        left = bound / 2 - (self._clock() - listing.began)
        silence = min(LIST_SILENCE, bound / 3, max(left, 0.001))
        try:
            async with asyncio.timeout(silence):
                return await anext(batches, None)
        except TimeoutError:
            self._streams_lists = False
            raise Silent("the streamed list did not end; pages are asked for instead") from None

    async def _recover(self, error: ApiError) -> Seconds:
        """Note what broke, and say how long to wait before the next attempt."""
        watched = self._watched
        watched.trouble = str(error)
        restart = _restart_of(error)
        watched.restarts[restart] += 1
        if isinstance(error, Expired | Unsupported | Silent):
            # A server restored from a backup watches a version that it has not reached yet in
            # silence, without a bookmark: resuming from there again would never end.
            self._forget_version()
        elif isinstance(error, Denied | Absent):
            await self._api.renew()
            self._refusals += 1
            if self._refusals >= (BELIEVED_AFTER_SYNC if watched.synced else BELIEVED_AFTER):
                if watched.resource is not Resource.VMIS:
                    return self._go_without(error)
                if isinstance(error, Absent) and not watched.synced:
                    self._miss_kubevirt(error)
        pause = self._backoff.next()
        if isinstance(error, Overloaded):
            pause = max(pause, error.retry_after)
        if isinstance(error, Absent):
            pause = min(pause, ABSENCE_PAUSE)
        self._log.warning(
            "watch_broke", why=str(error), kind=str(restart), retry_in=round(pause, 2)
        )
        return pause

    def _forget_version(self) -> None:
        self._version = None

    def _go_without(self, error: ApiError) -> Seconds:
        """An optional resource may not be seen: say so once, go on, and ask again now and then."""
        self._forget_version()
        if not self._watched.refused:
            self._log.warning(
                "resource_refused",
                why=str(error),
                consequence=_CONSEQUENCES[self._watched.resource],
                retry_in=self._settings.refused_retry,
            )
        self._watched.refused = str(error)
        self._changed()
        return self._settings.refused_retry

    def _miss_kubevirt(self, error: ApiError) -> None:
        if not self._settings.wait_for_kubevirt:
            raise KubeVirtMissing(
                "the API server has no virtualmachineinstances.kubevirt.io (404): is KubeVirt"
                " installed? Set kube.waitForKubeVirt: true to wait for it."
            )
        if self._refusals == BELIEVED_AFTER:
            self._log.warning("waiting_for_kubevirt", why=str(error))

    def _touch(self) -> None:
        self._watched.contact = self._clock()

    def _watch_seconds(self) -> int:
        """Spread over the second half of the bound, so that not all watches end together."""
        bound = self._settings.watch_timeout
        return max(1, int(self._rng.uniform(bound / 2, bound)))

    def _tell_migration(self, vmi: Vmi) -> None:
        """One log line when a migration begins and one when it has ended."""
        known = self._known(vmi.namespace, vmi.name)
        before = known.migration if known is not None and known.uid == vmi.uid else None
        state = vmi.migration
        if state is None or state == before:
            return
        if state.running and not (_is_same_migration(before, state) and _has_begun(before)):
            log.info(
                "migration_began", namespace=vmi.namespace, name=vmi.name, node=vmi.node,
                migration=state.uid,
            )  # fmt: skip
        if state.ended and not (_is_same_migration(before, state) and before and before.ended):
            log.info(
                "migration_ended", namespace=vmi.namespace, name=vmi.name, node=vmi.node,
                migration=state.uid, failed=state.outcome.name == "FAILED",
                seconds=None if None in (state.start, state.end) else state.end - state.start,  # type: ignore[operator]
            )  # fmt: skip


class Watch:
    """All followers together."""

    def __init__(
        self,
        api: ApiServer,
        store: Store,
        health: Health,
        settings: KubeSettings,
        *,
        namespaces: tuple[str, ...],
        clock: Callable[[], Instant],
        changed: Callable[[], None],
        rng: random.Random,
        follower: type[Follower] = Follower,
    ) -> None:
        self._store = store
        self._health = health
        self._settings = settings
        self._notify = changed
        self._synced = asyncio.Event()
        self._followers = []
        for resource in CLUSTER_RESOURCES:
            everywhere = not namespaces or resource is Resource.KUBEVIRTS
            for namespace in (None,) if everywhere else namespaces:
                watched = Watched(resource, namespace)
                health.watched.append(watched)
                self._followers.append(
                    follower(
                        api,
                        watched,
                        store,
                        settings,
                        clock=clock,
                        rng=rng,
                        changed=self._changed,
                    )
                )

    async def run(self) -> None:
        """Follow everything. Raises `NotSynced` or `KubeVirtMissing`; never returns."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for follower in self._followers:
                    tasks.create_task(follower.run())
                tasks.create_task(self._expect_sync())
        except* (NotSynced, KubeVirtMissing) as group:
            raise group.exceptions[0] from None

    async def _expect_sync(self) -> None:
        while not self._synced.is_set():
            try:
                async with asyncio.timeout(self._settings.sync_timeout):
                    await self._synced.wait()
            except TimeoutError:
                self._judge_delay()

    def _judge_delay(self) -> None:
        vmis = self._health.of(Resource.VMIS)
        if self._settings.wait_for_kubevirt and any(one.restarts[Restart.ABSENT] for one in vmis):
            return
        troubles = sorted({one.trouble for one in vmis if not one.synced and one.trouble})
        raise NotSynced(
            f"virtualmachineinstances were not synced within {self._settings.sync_timeout:g} s"
            f" (kube.syncTimeout): {'; '.join(troubles) or 'the list did not end'}"
        )

    def _changed(self) -> None:
        store, health = self._store, self._health
        store.vmims_seen = health.is_seen(Resource.VMIMS)
        store.pods_seen = health.is_seen(Resource.PODS)
        blind = {r: health.blind_namespaces(r) for r in (Resource.VMIMS, Resource.PODS)}
        if blind != store.blind:
            store.blind = blind
            store.revision += 1
        if self._health.is_synced(Resource.VMIS):
            self._synced.set()
        self._notify()


_CONSEQUENCES = {
    Resource.VMIS: "nothing works",
    Resource.VMIMS: "pending migrations do not block, and history begins now",
    Resource.PODS: "requested evacuations do not block",
    Resource.KUBEVIRTS: "KubeVirt's migration limits are unknown",
    Resource.CONFIGMAPS: "no checkpoint is read or written",
}


def _ignored(event: str) -> Unsupported:
    return Unsupported(f"a {event} before the list's end: sendInitialEvents was ignored")


def _as_error(failed: Failed) -> ApiError:
    code = 410 if failed.reason in ("Expired", "Gone") else failed.code
    return error_of(code, f"{failed.reason} {failed.message}".strip())


def _restart_of(error: ApiError) -> Restart:
    match error:
        case Expired():
            return Restart.EXPIRED
        case Silent():
            return Restart.SILENT
        case Denied():
            return Restart.DENIED
        case Absent():
            return Restart.ABSENT
        case Overloaded():
            return Restart.OVERLOADED
        case _:
            return Restart.UNREACHABLE


def _has_begun(state: MigrationState | None) -> bool:
    return state is not None and (state.start is not None or state.ended)


def _is_same_migration(before: MigrationState | None, state: MigrationState) -> bool:
    return before is not None and before.uid == state.uid and before.start == state.start
