"""Keeps the store equal to one resource of the API server, by list and watch.

`Reflector.run` reconnects with backoff until it is cancelled. One connection (`_list_and_watch`)
lists if needed and then watches until the server ends the stream or an error occurs. A list
replaces all known objects, which repairs missed deletions. The watch resumes from the last
resourceVersion that was read; if that has expired, or there is none, the resource is listed again.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from dataclasses import KW_ONLY, dataclass

from exporter.engine.facts.model import Instant, Resource, Seconds
from exporter.engine.facts.policy import Policy
from exporter.errors import CommandFailed, Exit
from exporter.health import Restart, Watched
from exporter.kube.client import (
    Absent,
    ApiError,
    ApiServer,
    Forbidden,
    Overloaded,
    Silent,
    Unreachable,
    Unsupported,
)
from exporter.kube.objects.kubevirt import (
    Bookmark,
    Changed,
    Deleted,
    Event,
    Failed,
    InvalidObject,
    NoEvent,
    parse_event,
    parse_object,
    parse_page,
)
from exporter.kube.watch.feed import NO_OVERRIDES, ChangeListener, FactSink, Feed, Listing
from exporter.kube.watch.recovery import (
    ExponentialBackoff,
    error_of_status,
    recovery_from,
    unexpected_in_list,
)
from exporter.settings import KubeSettings


LIST_SILENCE: Seconds = 8.0
"""The longest pause within a streamed list; after it, the list is requested in pages instead.

A server that ignores `sendInitialEvents` never ends its list.
"""
SHORT_LIVED: Seconds = 5.0
"""A watch that the server ended sooner than this is reopened with a backoff. An event after this
time resets the backoff."""
FUTILE_TRIES = 8
"""List again after this many watches in a row that the API server answered without an event (about
20 s of backoff)."""
PAGE_SIZE = 500
"""Objects per page of a list that the API server cannot stream, as in client-go's pager."""
FINAL_AFTER = 4
"""After this many errors 401, 403 or 404 in a row, the error counts as final. An API server that
has just started returns such errors until it has loaded its roles and custom resources."""
FINAL_AFTER_SYNC = 7
"""The same for a resource that was listed before. With the backoff it takes about 20 s."""


class KubeVirtMissing(CommandFailed):
    """The API server has no resource virtualmachineinstances."""

    exit_code = Exit.KUBEVIRT_MISSING


@dataclass
class Reflector:
    """Lists and watches one resource in one namespace, or in all.

    `settled` is called after every complete list, and when a rejection of the resource counts as
    final. `is_optional`: whether the exporter can go on if VMIs are forbidden here.
    """

    api: ApiServer
    watched: Watched
    sink: FactSink
    settings: KubeSettings
    _: KW_ONLY
    clock: Callable[[], Instant]
    rng: random.Random
    settled: Callable[[], None] = lambda: None
    is_optional: Callable[[], bool] = lambda: True
    listener: ChangeListener | None = None
    policy: Policy = NO_OVERRIDES

    def __post_init__(self) -> None:
        self._feed = Feed(self.sink, self.watched, self.clock, self.listener, self.policy)
        self._backoff = ExponentialBackoff(self.rng)
        self._futile = 0
        self._events = 0
        self._silent_at: Seconds = 0.0
        self._version: str | None = None
        self._streams_lists = True
        self._rejections = 0
        self._connected_at = self.clock()
        self._fault: dict[str, str] = {}
        self._answer: type[ApiError] | None = None
        self._log = self._feed.log

    async def run(self) -> None:
        """List, and watch until cancelled. It may be run again after an unexpected exception.

        Raises `KubeVirtMissing` if the API server has no resource virtualmachineinstances before
        the first list, and `wait_for_kubevirt` is off.
        """
        self._forget_version()  # an event may have been lost
        while True:
            self._connected_at = self.clock()
            try:
                await self._list_and_watch()
            except ApiError as error:
                pause = await self._recover(error)
            else:
                self._record_restart(Restart.ENDED)
                lived = self.clock() - self._connected_at
                pause = 0.0 if lived >= SHORT_LIVED else self._backoff.next()
            await asyncio.sleep(pause)

    async def _list_and_watch(self) -> None:
        if self._version is None and not self._streams_lists:
            await self._list_pages()
        listing = Listing(began=self.clock()) if self._version is None else None
        bound = self.settings.watch_timeout
        try:
            async with self.api.watch(
                self.watched.resource,
                self.watched.namespace,
                resource_version=self._version,
                # Random, so that watches do not end together.
                seconds=max(1, int(self.rng.uniform(bound / 2, bound))),
            ) as batches:
                await self._read_events(batches, listing)
        except Unsupported as refusal:
            if listing is None:
                raise
            self._streams_lists = False
            self._log.info("streaming_list_rejected", why=str(refusal))
            await self._list_pages()

    async def _list_pages(self) -> None:
        listing = Listing(began=self.clock())
        token = ""
        while True:
            body = await self.api.list_page(
                self.watched.resource,
                self.watched.namespace,
                limit=PAGE_SIZE,
                token=token,
            )
            try:
                page = parse_page(body)
            except InvalidObject as invalid:
                raise Unreachable(invalid.why) from invalid
            self._feed.begin_batch(listing)
            for raw in page.items:
                try:
                    changed = parse_object(self.watched.resource, raw)
                except InvalidObject as invalid:
                    self._feed.record_invalid(invalid, listing)
                else:
                    self._feed.put(changed, listing)
            token = page.continue_token
            if not token:
                break
        self._version = page.resource_version
        self._end_list(listing, how="pages")

    async def _read_events(
        self, batches: AsyncIterator[list[bytes]], listing: Listing | None
    ) -> None:
        """Read events until the stream ends; `listing` is the list that it begins with.

        Raises `Unreachable` if the stream begins with something else, or ends at once without an
        event: something between us and the API server may have answered instead of it.
        """
        self._events = 0
        self._record_event()
        while (lines := await self._next_batch(batches, listing)) is not None:
            self._feed.begin_batch(listing)
            before = self._events
            try:
                for line in lines:
                    listing = self._read_line(line, listing)
            finally:
                if self._events > before:
                    self._record_event()
                    self._end_batch(listing)
        if listing is not None:
            self._streams_lists = False
            raise Unreachable("the server ended the streamed list before it was complete")
        if not self._events and self.clock() - self._connected_at < SHORT_LIVED:
            raise Unreachable("the server ended the watch at once, without an event")

    def _read_line(self, line: bytes, listing: Listing | None) -> Listing | None:
        """Process one line; returns the list that is still in progress, if any."""
        try:
            event = parse_event(self.watched.resource, line)
        except NoEvent as invalid:
            self._feed.record_invalid(invalid, listing)
            if not self._events:
                self._streams_lists &= listing is None
                raise Unreachable(f"the answer is no watch: {invalid.why}") from None
            return listing
        except InvalidObject as invalid:
            self._feed.record_invalid(invalid, listing)
        else:
            listing = self._apply(event, listing)
        self._events += 1
        return listing

    def _record_event(self) -> None:
        """Begin to measure the silence of the watch."""
        self._silent_at = asyncio.get_running_loop().time() + self.settings.read_timeout

    def _end_batch(self, listing: Listing | None) -> None:
        """Note progress, unless a list is unfinished.

        Until a list ends, the objects that it has not reached may be out of date.
        """
        if listing is None:
            self._record_progress()
            if self.clock() - self._connected_at >= SHORT_LIVED:
                self._backoff.reset()

    def _apply(self, event: Event, listing: Listing | None) -> Listing | None:
        """Process one event; returns the list that is still in progress, if any."""
        match event:
            case Changed() if listing is None or not event.modified:
                self._feed.put(event, listing)
            case Deleted() if listing is None:
                self._feed.remove(event)
            case Failed():
                raise error_of_status(event)
            case Bookmark(listed=True) if listing is not None:
                self._version = event.resource_version
                self._end_list(listing, how="stream")
                return None
            case _:
                if listing is not None:
                    raise unexpected_in_list(event)
        if listing is None:
            self._version = event.resource_version or self._version
        return listing

    def _end_list(self, listing: Listing, *, how: str) -> None:
        self._feed.begin_batch()
        gone, objects = self._feed.retain(listing), len(listing)
        listing.names.clear()  # to free memory: the caller refers to `listing` until the watch ends
        watched = self.watched
        watched.lists += 1
        if watched.rejected:
            self._log.info("resource_permitted")
        watched.synced, watched.rejected = True, ""
        self._record_progress()
        self._backoff.reset()
        self._log.info(
            "listed",
            objects=objects,
            gone=gone,
            how=how,
            seconds=round(self.clock() - listing.began, 3),
        )
        self.settled()

    async def _next_batch(
        self, batches: AsyncIterator[list[bytes]], listing: Listing | None
    ) -> list[bytes] | None:
        """The next lines, or None at the end.

        Raises `Silent` if a list takes too long, or if no event arrives within the read timeout:
        other bytes, such as white space, are not a sign of life.
        """
        if listing is None:
            silent_at = self._silent_at
        else:
            bound = self.settings.sync_timeout
            left = max(bound / 2 - (self.clock() - listing.began), 0.001)
            silence = min(LIST_SILENCE, bound / 3, left)
            silent_at = asyncio.get_running_loop().time() + silence
        try:
            async with asyncio.timeout_at(silent_at):
                return await anext(batches, None)
        except TimeoutError:
            if listing is None:
                raise Silent(f"no event for {self.settings.read_timeout:g} s") from None
            self._streams_lists = False
            raise Silent("the streamed list did not end; listing in pages instead") from None

    async def _recover(self, error: ApiError) -> Seconds:
        """Prepare for the next attempt, and return the pause before it."""
        self.watched.trouble = str(error)
        recovery = recovery_from(error)
        restart = self._record_restart(recovery.restart, judges_version=recovery.judges_version)
        if recovery.relist:
            self._forget_version()
        if recovery.log_in:
            await self.api.renew()
            self._rejections += 1
            if self._rejections >= (FINAL_AFTER_SYNC if self.watched.synced else FINAL_AFTER):
                # VMIs are required, unless they are forbidden here and visible in another
                # namespace.
                is_required = self.watched.resource is Resource.VMIS
                if not is_required or (isinstance(error, Forbidden) and self.is_optional()):
                    return self._go_without(error)
                if isinstance(error, Absent) and not self.watched.synced:
                    if not self.settings.wait_for_kubevirt:
                        names = self.api.names
                        vmis = f"{names.write_resource(Resource.VMIS)}.{names.api_group}"
                        raise KubeVirtMissing(
                            f"the API server has no {vmis} (404): is KubeVirt installed? Set"
                            " kube.waitForKubeVirt: true to wait for it."
                        )
                    if self._rejections == FINAL_AFTER:
                        self._log.warning("waiting_for_kubevirt", why=str(error))
        if type(error) is not self._answer:
            self._backoff.shorten()
        self._answer = type(error)
        pause = self._backoff.next(recovery.longest_pause)
        if isinstance(error, Overloaded):
            pause = max(pause, error.retry_after)
        fault = {"why": str(error), "kind": str(restart)}
        is_old = fault == self._fault or not self.watched.is_wanted
        say = self._log.debug if is_old else self._log.warning
        say("watch_broke", **fault, retry_in=round(pause, 2))
        self._fault = fault
        return pause

    def _record_restart(self, why: Restart, *, judges_version: bool = True) -> Restart:
        """Count a restart; returns its reason, NO_PROGRESS after too many futile attempts."""
        if self._version is not None and judges_version:
            self._futile += 1
            if self._futile >= FUTILE_TRIES:
                self._futile = 0
                self._forget_version()
                self._backoff.reset()
                why = Restart.NO_PROGRESS
        self.watched.restarts[why] += 1
        return why

    def _forget_version(self) -> None:
        self._version = None

    def _go_without(self, error: ApiError) -> Seconds:
        """Mark the resource as not visible, and log that once; returns the pause."""
        self._forget_version()
        if not self.watched.rejected:
            say = self._log.warning if self.watched.is_wanted else self._log.info
            say(
                "resource_rejected",
                why=str(error),
                consequence=_CONSEQUENCES[self.watched.resource],
                retry_in=self.settings.rejected_retry,
            )
        self.watched.rejected = str(error)
        self.settled()
        return self.settings.rejected_retry

    def _record_progress(self) -> None:
        self.watched.contact = self.clock()
        self.watched.trouble = ""
        self._fault = {}
        self._rejections = self._futile = 0


_CONSEQUENCES = {
    Resource.VMIS: "VMIs of this namespace are not updated, and later only a cooldown blocks them",
    Resource.VMIMS: "pending migrations do not block, and VMIMs add nothing to the history",
    Resource.PODS: "requested evacuations do not block",
    Resource.KUBEVIRTS: "KubeVirt's migration limits are unknown",
    Resource.NODES: "whether a node is cordoned or tainted is unknown",
    Resource.EVICTIONS: "who asks by EvictionRequests that a VM leaves is unknown",
    Resource.BUDGETS: "whether a budget forbids the eviction of a VM is unknown",
}
