"""Watch streams: the initial state, the changes as they come, and bookmarks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable

import msgspec
from aiohttp import web

from exporter.demo import status
from exporter.demo.objects import Object
from exporter.demo.requests import (
    RequestInfo,
    Selector,
    is_true,
    parse_revision,
    parse_selector,
)
from exporter.demo.status import ApiResource, StatusError
from exporter.demo.store import PODS, Change, ObjectStore, encode, encode_deleted


INITIAL_EVENTS_END = {"k8s.io/initial-events-end": "true"}
BATCH = 500
"""Events per write. More would be faster, but would let other watches wait longer."""
DEFAULT_TIMEOUT_SECONDS = 1800.0
"""Length of a watch without `timeoutSeconds` (kube-apiserver's `--min-request-timeout`)."""
BEFORE_TIMEOUT_SECONDS = 2.0
"""A last bookmark comes this long before a watch times out (`cache_watcher.go`)."""


class Stream:
    """One open watch: its connection, its options, and how far it has been written."""

    def __init__(self, http: web.Request, request: RequestInfo) -> None:
        query = request.query
        self.http = http
        self.resource = request.resource
        self.changed = asyncio.Event()
        """Set when the store has changed."""
        self.written_to: int | None = None
        """The revision up to which everything has been written; None before the first write."""
        self._selector = parse_selector(request)
        self._revision = parse_revision(query)
        self._seconds = float(query.get("timeoutSeconds") or 0) or DEFAULT_TIMEOUT_SECONDS
        self._is_streaming_list = is_true(query.get("sendInitialEvents"))
        # Without a version, or with 0, a watch starts with the present state too
        # (`watch_cache.go: getAllEventsSinceLocked`).
        self._sends_initial = self._is_streaming_list or (
            "sendInitialEvents" not in query and not self._revision
        )
        self._sends_bookmarks = is_true(query.get("allowWatchBookmarks"))

    def abort(self) -> None:
        """Break the connection."""
        if self.http.transport is not None:
            self.http.transport.abort()

    async def events(self, store: ObjectStore, bookmark_seconds: float) -> AsyncGenerator[bytes]:
        """Everything to write to the client, until the watch ends."""
        deadline = asyncio.get_running_loop().time() + self._seconds
        try:
            start = self._check_start(store)
        except StatusError as error:
            # The response has begun, so only an ERROR event can refuse the watch: "once we have
            # passed authn/authz/admission, other errors must fail with a watch event"
            # (`cacher.go: Watch`).
            yield _encode_event("ERROR", msgspec.json.encode(error.status))
            return
        if self._sends_initial:
            present = store.caches[self.resource].all()
            for position in range(0, len(present), BATCH):
                selected = filter(
                    self._selector.matches_entry, present[position : position + BATCH]
                )
                yield b"".join(_encode_event("ADDED", entry.body) for entry in selected)
            if self._is_streaming_list and self._sends_bookmarks:
                yield _encode_bookmark(self.resource, start, ends_initial=True)
        async for data in self._follow(store, start, deadline, bookmark_seconds):
            yield data

    def _check_start(self, store: ObjectStore) -> int:
        """The revision to watch from. Raises `StatusError` if it is too old or in the future."""
        if not self._sends_initial:
            revision = self._revision or store.revision
            store.caches[self.resource].check(revision)
            return revision
        if self._revision and self._revision > store.revision:
            raise status.too_large(self._revision, store.revision)
        return store.revision

    async def _follow(
        self, store: ObjectStore, start: int, deadline: float, bookmark_seconds: float
    ) -> AsyncGenerator[bytes]:
        """The changes after a revision as they come, and bookmarks while nothing changes."""
        clock = asyncio.get_running_loop().time
        due = _next_bookmark(clock(), deadline, bookmark_seconds)
        while True:
            self.changed.clear()
            latest = store.revision
            changes = store.caches[self.resource].changes_since(start)
            if changes is None:
                # The client is too slow for the window: the real server ends such a watch without
                # an event.
                return
            for position in range(0, len(changes), BATCH):
                batch = changes[position : position + BATCH]
                yield b"".join(_encode_changes(self.resource, batch, self._selector))
            self.written_to = start = max(start, latest)
            try:
                until = min(due, deadline) if self._sends_bookmarks else deadline
                async with asyncio.timeout_at(until):
                    await self.changed.wait()
            except TimeoutError:
                if clock() >= deadline:
                    return
                if self._sends_bookmarks and not self.changed.is_set():
                    yield _encode_bookmark(self.resource, start)
                due = _next_bookmark(clock(), deadline, bookmark_seconds)


def _encode_changes(
    resource: ApiResource, changes: Iterable[Change], selector: Selector
) -> Iterable[bytes]:
    """Changes as events for one selector (`cache_watcher.go: convertToWatchEvent`)."""
    for change in changes:
        is_in = selector.matches(change.key, change.labels)
        was_in = selector.matches(change.key, change.labels_before)
        if is_in:
            yield _encode_event("MODIFIED" if was_in else "ADDED", change.body)
        elif was_in and change.kind == "DELETED":
            yield _encode_event("DELETED", change.body)
        elif was_in and change.before is not None:
            yield _encode_event("DELETED", encode_deleted(resource, change.before, change.revision))


def _encode_event(kind: str, body: bytes) -> bytes:
    return b'{"type":"%s","object":%s}\n' % (kind.encode(), body)


def _encode_bookmark(resource: ApiResource, revision: int, *, ends_initial: bool = False) -> bytes:
    metadata: Object = {"resourceVersion": str(revision)}
    if ends_initial:
        metadata["annotations"] = INITIAL_EVENTS_END
    bookmark: Object = {"metadata": metadata}
    if resource is PODS:
        # A typed object is written with all required fields, even if they are empty.
        bookmark |= {"spec": {"containers": None}, "status": {}}
    return _encode_event("BOOKMARK", encode(resource, bookmark))


def _next_bookmark(now: float, deadline: float, interval: float) -> float:
    """When the next bookmark is due; the last one comes shortly before the end."""
    last = deadline - BEFORE_TIMEOUT_SECONDS
    return last if now < last < now + interval else now + interval
