"""The simulated API server: list, watch and write over real HTTP, and faults for tests to set.

Where it must choose, it does what kube-apiserver 1.36 does; the functions of `k8s.io/apiserver`
that a behaviour was read from are named beside it.
"""

from __future__ import annotations

import asyncio
import base64
import bisect
import contextlib
import math
import re
import zlib
from collections import deque
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import msgspec
from aiohttp import web

from exporter.demo import status
from exporter.demo.objects import Object
from exporter.demo.status import Refused, Resource
from exporter.demo.store import (
    NAMESPACES,
    PODS,
    RESOURCES,
    Change,
    Entry,
    Store,
    departed,
    encode,
)


USER = "system:anonymous"
MERGE_PATCH = "application/merge-patch+json"
INITIAL_EVENTS_END = {"k8s.io/initial-events-end": "true"}
GZIP_FROM_BYTES = 128 * 1024
"""Shorter answers are not compressed (`responsewriters/writers.go`)."""
BATCH = 500
"""Events per write: enough to be fast, few enough to let other watchers have their turn."""
DEFAULT_TIMEOUT_SECONDS = 1800.0
"""How long a watch lasts that names no timeout (kube-apiserver's `--min-request-timeout`)."""
BEFORE_TIMEOUT_SECONDS = 2.0
"""A last bookmark comes this long before a watch times out (`cache_watcher.go`)."""

VERBS = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}


@dataclass(frozen=True, slots=True)
class Asked:
    """One request as the server understood it."""

    method: str
    verb: str
    resource: Resource
    namespace: str | None
    name: str
    subresource: str
    query: Mapping[str, str]

    @property
    def has_path(self) -> bool:
        """Whether the resource has this subresource."""
        return self.subresource == "status" and self.resource.status


@dataclass(frozen=True, slots=True)
class Selector:
    """A label and field selection; empty selects everything."""

    labels: tuple[Callable[[Mapping[str, str]], bool], ...] = ()
    name: str | None = None
    namespace: str | None = None

    @property
    def everything(self) -> bool:
        """Nothing is selected by labels or name."""
        return not self.labels and self.name is None

    def wants(self, key: str, labels: Mapping[str, str] | None) -> bool:
        """Whether an object with this key and these labels is selected; None: it is gone."""
        if labels is None or not self.covers(key):
            return False
        return all(matches(labels) for matches in self.labels)

    def covers(self, key: str) -> bool:
        """Whether the namespace and the name are selected."""
        namespace, _, name = key.rpartition("/")
        if self.namespace is not None and namespace != self.namespace:
            return False
        return self.name is None or name == self.name

    def picks(self, entry: Entry) -> bool:
        """Whether an object at rest is selected."""
        # Labels are decoded from the stored bytes, so they are asked for only if selected by.
        return self.covers(entry.key) and (not self.labels or self.wants(entry.key, entry.labels))


@dataclass(slots=True)
class _Fault:
    status: int
    retry_after: int | None
    times: float
    verbs: Collection[str]


@dataclass(eq=False, slots=True)
class _Stream:
    """One open watch."""

    resource: Resource
    request: web.Request
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    synced: bool = False
    """Everything that was there at its start has been written."""


@dataclass(frozen=True, slots=True)
class _Watch:
    """What one watch asks for."""

    resource: Resource
    selector: Selector
    revision: int | None
    seconds: float
    initial: bool
    """The present state comes first."""
    streaming: bool
    """It is a streaming list: the end of the present state is told."""
    bookmarks: bool

    @classmethod
    def of(cls, asked: Asked) -> Self:
        query, revision = asked.query, _revision_of(asked.query)
        streaming = _is_true(query.get("sendInitialEvents"))
        return cls(
            resource=asked.resource,
            selector=select(asked),
            revision=revision,
            seconds=float(query.get("timeoutSeconds") or 0) or DEFAULT_TIMEOUT_SECONDS,
            # Without a version, or with 0, a watch starts with the present state too
            # (`watch_cache.go: getAllEventsSinceLocked`).
            initial=streaming or ("sendInitialEvents" not in query and not revision),
            streaming=streaming,
            bookmarks=_is_true(query.get("allowWatchBookmarks")),
        )


class SimulatedApiServer:
    """`async with SimulatedApiServer(store) as server` serves the store at `server.url`.

    Leaving the block ends it as a kill would: open streams break off. A new server over the same
    store and port is the restarted one.
    """

    def __init__(
        self,
        store: Store,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        bookmark_seconds: float = 60.0,
        tokens: Collection[str] = (),
    ) -> None:
        self.store = store
        self.host = host
        self.port = port
        self.bookmark_seconds = bookmark_seconds
        self.tokens = frozenset(tokens)
        """The bearer tokens let in; none given: everybody is."""
        self.requests: deque[Asked] = deque(maxlen=10_000)
        """What was asked, oldest first."""
        self.serves_streaming_lists = True
        self._streams: set[_Stream] = set()
        self._faults: dict[Resource, _Fault] = {}
        self._thawed = asyncio.Event()
        self._thawed.set()
        self._opened = asyncio.Condition()
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://{self.host}:{self.port}"

    async def __aenter__(self) -> Self:
        app = web.Application(client_max_size=16 * 2**20)
        app.router.add_route("*", "/{path:.*}", self._serve)
        runner = web.AppRunner(
            app, access_log=None, handler_cancellation=True, shutdown_timeout=0.05
        )
        await runner.setup()
        try:
            site = web.TCPSite(runner, self.host, self.port)
            await site.start()
        except BaseException:
            await runner.cleanup()
            raise
        self.port = runner.addresses[0][1]
        self._runner = runner
        # A server that starts lists etcd afresh, so a watch from before its start gets 410.
        self.store.forget()
        self.store.listeners.add(self._notice)
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.store.listeners.discard(self._notice)
        self.cut()
        if self._runner is not None:
            await self._runner.cleanup()

    # Faults

    def refuse_streaming_lists(self) -> None:
        """Answer `sendInitialEvents` as a server without the WatchList feature does."""
        self.serves_streaming_lists = False

    def cut(self, resource: str | None = None, *, mid_line: bool = False) -> int:
        """Break off the open streams, on request in the middle of a line; says how many."""
        cut = self._open_streams(resource)
        for stream in cut:
            transport = stream.request.transport
            self._streams.discard(stream)
            if transport is None:
                continue
            if mid_line:
                transport.write(_chunk(b'{"type":"MODIFIED","object":{"apiVersion":"kubev'))
                transport.close()
            else:
                transport.abort()
        return len(cut)

    def compact(self, resource: str | None = None) -> None:
        """Forget the past: resuming a watch or a paged list from before answers 410."""
        self.store.compact(None if resource is None else _resource_named(resource))

    def freeze(self) -> None:
        """Say nothing any more: streams stay open and silent, requests hang."""
        self._thawed.clear()

    def thaw(self) -> None:
        """Go on where `freeze` stopped."""
        self._thawed.set()

    def answer(
        self,
        resource: str,
        code: int,
        *,
        retry_after: int | None = None,
        times: int | None = None,
        verbs: Collection[str] = ("list", "watch"),
    ) -> None:
        """Refuse these verbs on a resource with a code, `times` times or until `recover`."""
        left = math.inf if times is None else times
        self._faults[_resource_named(resource)] = _Fault(code, retry_after, left, verbs)

    def recover(self, resource: str | None = None) -> None:
        """End the answers that `answer` set."""
        for refused in list(self._faults):
            if resource is None or refused.plural == resource:
                del self._faults[refused]

    def inject(self, raw: bytes, resource: str | None = None) -> int:
        """Write raw bytes into the open streams; says into how many."""
        told = self._open_streams(resource)
        for stream in told:
            if stream.request.transport is not None:
                stream.request.transport.write(_chunk(raw))
        return len(told)

    def watchers(self, resource: str | None = None) -> int:
        """How many streams are open."""
        return len(self._open_streams(resource))

    async def watched(self, resource: str, count: int = 1) -> None:
        """Wait until this many streams are open and have written what was there before them."""
        async with self._opened:
            await self._opened.wait_for(
                lambda: sum(stream.synced for stream in self._open_streams(resource)) >= count
            )

    def _open_streams(self, resource: str | None) -> list[_Stream]:
        return [
            stream
            for stream in self._streams
            if resource is None or stream.resource.plural == resource
        ]

    def _notice(self) -> None:
        for stream in self._streams:
            stream.changed.set()

    # Requests

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        await self._thawed.wait()
        if self.tokens and request.headers.get("Authorization", "")[7:] not in self.tokens:
            return _refusal(status.unauthorized())
        asked = understand(request)
        if asked is None:
            return _answer_apart(request.path)
        if asked.subresource and not asked.has_path:
            return _refusal(status.not_found(asked.resource, asked.name))
        self.requests.append(asked)
        fault = self._faults.get(asked.resource)
        if fault is not None and fault.times > 0 and asked.verb in fault.verbs:
            fault.times -= 1
            return _faulty(fault, asked)
        try:
            return await self._answer(request, asked)
        except Refused as refused:
            return _refusal(refused)

    async def _answer(self, request: web.Request, asked: Asked) -> web.StreamResponse:
        if asked.verb == "watch":
            return await self._watch(request, asked)
        if asked.verb == "list":
            return await self._list(request, asked)
        if asked.verb == "get":
            entry = self.store.entry(asked.resource, asked.namespace, asked.name)
            return _json(entry.body)
        if asked.verb == "patch" and request.content_type != MERGE_PATCH:
            message = (
                "the body of the request was in an unknown format - accepted media types include: "
                f"{MERGE_PATCH}"
            )
            raise Refused(status.failure(415, "UnsupportedMediaType", message))
        body = await request.read()
        return self._change(asked, _decode_request(body) if body else {})

    def _change(self, asked: Asked, given: Object) -> web.Response:
        store, resource = self.store, asked.resource
        subresource = asked.subresource == "status"
        if asked.verb == "create":
            if asked.namespace and store.find(NAMESPACES, None, asked.namespace) is None:
                raise status.not_found(NAMESPACES, asked.namespace)
            made = store.create(resource, _placed(asked, given))
            return _json(encode(resource, made), 201)
        if asked.verb == "update":
            placed = _placed(asked, given)
            if resource.custom and not placed["metadata"].get("resourceVersion"):
                message = "Invalid value: 0: must be specified for an update"
                causes = [("FieldValueInvalid", "metadata.resourceVersion", message)]
                raise status.invalid(resource.group, resource.plural, asked.name, causes)
            return _json(encode(resource, store.update(resource, placed, subresource=subresource)))
        if asked.verb == "patch":
            patched = store.patch(
                resource, asked.namespace, asked.name, given, subresource=subresource
            )
            return _json(encode(resource, patched))
        grace = asked.query.get("gracePeriodSeconds", given.get("gracePeriodSeconds"))
        last = store.get(resource, asked.namespace, asked.name)
        left = store.delete(
            resource, asked.namespace, asked.name, None if grace is None else int(grace)
        )
        if left is not None or resource is PODS:
            return _json(encode(resource, left or last))
        return _json(
            msgspec.json.encode(status.success(resource, asked.name, last["metadata"]["uid"]))
        )

    # Lists

    async def _list(self, request: web.Request, asked: Asked) -> web.Response:
        _check_list(asked.query)
        selector = select(asked)
        entries, revision = self._listed(asked)
        limit = int(asked.query.get("limit") or 0)
        if asked.query.get("resourceVersion") == "0":
            # Served from the watch cache, which does not page (`cacher.go: computeListLimit`).
            limit = 0
        page: list[Entry] = []
        token, remaining = "", None
        for position, entry in enumerate(entries):
            if not selector.picks(entry):
                continue
            if limit and len(page) == limit:
                token = _encode_token(revision, page[-1].key + "\0")
                if selector.everything:
                    remaining = sum(map(selector.picks, entries[position:]))
                break
            page.append(entry)
        if token and revision == self.store.revision:
            self.store.keep(asked.resource, self.store.shelves[asked.resource].all())
        body = _list_body(asked.resource, page, revision, token, remaining)
        if len(body) >= GZIP_FROM_BYTES and "gzip" in request.headers.get("Accept-Encoding", ""):
            packed = await asyncio.to_thread(_gzip, body)
            headers = {"Content-Encoding": "gzip", "Vary": "Accept-Encoding"}
            return web.Response(body=packed, content_type="application/json", headers=headers)
        return _json(body)

    def _listed(self, asked: Asked) -> tuple[Sequence[Entry], int]:
        """The objects a list or its next page may show, and the revision they are of."""
        query, store = asked.query, self.store
        if token := query.get("continue"):
            return self._continued(asked.resource, token)
        revision = _revision_of(query)
        if revision is not None and revision > store.revision:
            raise status.too_large(revision, store.revision)
        match = query.get("resourceVersionMatch")
        # With a limit, a version that is asked for without a match is meant exactly
        # (`cacher/delegator: ShouldDelegateList`).
        if revision and (match == "Exact" or (not match and query.get("limit"))):
            kept = store.kept(asked.resource, revision)
            if kept is None:
                raise status.expired(status.TOO_OLD_LIST)
            return kept, revision
        return store.shelves[asked.resource].all(), store.revision

    def _continued(self, resource: Resource, token: str) -> tuple[Sequence[Entry], int]:
        revision, start = _decode_token(token)
        # -1 is the way on that an expired token is answered with: the rest as it is now.
        if revision == -1:
            kept, revision = self.store.shelves[resource].all(), self.store.revision
        else:
            found = self.store.kept(resource, revision)
            if found is None:
                raise status.expired(status.TOO_OLD_CONTINUE, _encode_token(-1, start))
            kept = found
        return kept[bisect.bisect_left(kept, start, key=lambda entry: entry.key) :], revision

    # Watches

    async def _watch(self, request: web.Request, asked: Asked) -> web.StreamResponse:
        _check_watch(asked.query, streaming_lists=self.serves_streaming_lists)
        watch = _Watch.of(asked)
        response = web.StreamResponse(headers={"Cache-Control": "no-cache, private"})
        response.content_type = "application/json"
        response.enable_chunked_encoding()
        await response.prepare(request)
        stream = _Stream(asked.resource, request)
        self._streams.add(stream)
        lines = self._lines(stream, watch)
        try:
            async with contextlib.aclosing(lines):
                with contextlib.suppress(ConnectionError):
                    await self._write_all(response, stream, lines)
                    await response.write_eof()
        finally:
            self._streams.discard(stream)
        return response

    async def _write_all(
        self, response: web.StreamResponse, stream: _Stream, lines: AsyncGenerator[bytes]
    ) -> None:
        async for data in lines:
            await self._thawed.wait()
            if data:
                await response.write(data)
            if stream.synced:
                async with self._opened:
                    self._opened.notify_all()

    async def _lines(self, stream: _Stream, watch: _Watch) -> AsyncGenerator[bytes]:
        """All that one watch is told, until it ends."""
        store = self.store
        seen = store.revision if watch.initial or not watch.revision else watch.revision
        deadline = asyncio.get_running_loop().time() + watch.seconds
        try:
            # The stream is open by now, so only an ERROR event can refuse it: "once we have
            # passed authn/authz/admission, other errors must fail with a watch event"
            # (`cacher.go: Watch`).
            if not watch.initial:
                store.shelves[watch.resource].check(seen)
            elif watch.revision and watch.revision > store.revision:
                raise status.too_large(watch.revision, store.revision)
        except Refused as refused:
            yield _event("ERROR", _status_body(refused))
            return
        if watch.initial:
            present = store.shelves[watch.resource].all()
            for start in range(0, len(present), BATCH):
                picked = filter(watch.selector.picks, present[start : start + BATCH])
                yield b"".join(_event("ADDED", entry.body) for entry in picked)
            if watch.streaming and watch.bookmarks:
                yield _event("BOOKMARK", _bookmark(watch.resource, seen, ends_initial=True))
        async for data in self._changes(stream, watch, seen, deadline):
            yield data

    async def _changes(
        self, stream: _Stream, watch: _Watch, seen: int, deadline: float
    ) -> AsyncGenerator[bytes]:
        """The changes after a revision as they come, and bookmarks where it is quiet."""
        clock = asyncio.get_running_loop().time
        due = _next_bookmark(clock(), deadline, self.bookmark_seconds)
        while True:
            stream.changed.clear()
            upto = self.store.revision
            changes = self.store.shelves[watch.resource].since(seen)
            if changes is None:
                # Too slow for the window: the real server ends such a stream without a word.
                return
            for start in range(0, len(changes), BATCH):
                batch = changes[start : start + BATCH]
                yield b"".join(_told(watch.resource, batch, watch.selector))
            seen = max(seen, upto)
            if not stream.synced:
                stream.synced = True
                yield b""
            try:
                async with asyncio.timeout_at(min(due, deadline) if watch.bookmarks else deadline):
                    await stream.changed.wait()
            except TimeoutError:
                await self._thawed.wait()
                if clock() >= deadline:
                    return
                if watch.bookmarks and not stream.changed.is_set():
                    yield _event("BOOKMARK", _bookmark(watch.resource, seen))
                due = _next_bookmark(clock(), deadline, self.bookmark_seconds)


def understand(request: web.Request) -> Asked | None:
    """What a request's path and query ask for; None where the real server has no such path."""
    match request.path.strip("/").split("/"):
        case ["api", "v1", *rest]:
            group = ""
        case ["apis", group, "v1", *rest]:
            pass
        case _:
            return None
    namespace: str | None = None
    match rest:
        case ["namespaces", inside, _, *_] if rest[2:] != ["status"]:
            namespace, rest = inside, rest[2:]
    plural, name, subresource, *more = [*rest, "", "", ""][: max(3, len(rest))]
    resource = _RESOURCES_BY_PATH.get((group, plural))
    if resource is None or more or (namespace is not None and not resource.namespaced):
        return None
    query = dict(request.query)
    if request.method == "GET":
        watching = not name and _is_true(query.get("watch"))
        verb = "watch" if watching else "get" if name else "list"
    elif request.method in VERBS and (request.method == "POST") != bool(name):
        verb = VERBS[request.method]
    else:
        return None
    if resource.namespaced and namespace is None and (name or verb == "create"):
        return None
    return Asked(request.method, verb, resource, namespace, name, subresource, query)


def select(asked: Asked) -> Selector:
    """The selection a query makes: equality and existence of labels, and metadata fields."""
    terms = filter(None, re.split(r",(?![^(]*\))", asked.query.get("labelSelector", "")))
    requirements = tuple(_requirement(term.strip()) for term in terms)
    name, namespace = None, asked.namespace
    for term in filter(None, asked.query.get("fieldSelector", "").split(",")):
        label, _, value = term.partition("=")
        if label == "metadata.name":
            name = value.lstrip("=")
        elif label == "metadata.namespace" and asked.namespace is None:
            namespace = value.lstrip("=")
        else:
            raise status.bad_request(f"field label not supported: {label}")
    return Selector(requirements, name, namespace)


def _requirement(term: str) -> Callable[[Mapping[str, str]], bool]:
    if members := re.fullmatch(r"(\S+) (in|notin) \(([^()]*)\)", term):
        label, operator, values = members.groups()
        chosen = {value.strip() for value in values.split(",")}
        return lambda labels: (labels.get(label) in chosen) == (operator == "in")
    if " " in term or "(" in term:
        raise status.bad_request(f"unable to parse requirement: {term}")
    if "!=" in term:
        label, _, unwanted = term.partition("!=")
        return lambda labels: labels.get(label) != unwanted
    if "=" in term:
        label, _, wanted = term.partition("=")
        wanted = wanted.removeprefix("=")
        return lambda labels: labels.get(label) == wanted
    if term.startswith("!"):
        return lambda labels: term[1:] not in labels
    return lambda labels: term in labels


def _told(resource: Resource, changes: Iterable[Change], selector: Selector) -> Iterable[bytes]:
    """The changes as a selecting watcher is told them (`cache_watcher.go: convertToWatchEvent`)."""
    for change in changes:
        is_in = selector.wants(change.key, change.labels)
        was_in = selector.wants(change.key, change.labels_before)
        if is_in:
            yield _event("MODIFIED" if was_in else "ADDED", change.body)
        elif was_in and change.kind == "DELETED":
            yield _event("DELETED", change.body)
        elif was_in and change.before is not None:
            yield _event("DELETED", departed(resource, change.before, change.revision))


def _event(kind: str, body: bytes) -> bytes:
    return b'{"type":"%s","object":%s}\n' % (kind.encode(), body)


def _bookmark(resource: Resource, revision: int, *, ends_initial: bool = False) -> bytes:
    metadata: Object = {"resourceVersion": str(revision)}
    if ends_initial:
        metadata["annotations"] = INITIAL_EVENTS_END
    empty: Object = {"metadata": metadata}
    if resource is PODS:
        # A typed object is written with its required fields, empty as they are.
        empty |= {"spec": {"containers": None}, "status": {}}
    return encode(resource, empty)


def _next_bookmark(now: float, deadline: float, interval: float) -> float:
    """Every interval, and a last one shortly before the end (`cache_watcher.go`)."""
    last = deadline - BEFORE_TIMEOUT_SECONDS
    return last if now < last < now + interval else now + interval


def _check_list(query: Mapping[str, str]) -> None:
    """`metainternalversion/validation: ValidateListOptions`."""
    causes: list[tuple[str, str]] = []
    if query.get("resourceVersionMatch") and not query.get("resourceVersion"):
        message = "resourceVersionMatch is forbidden unless resourceVersion is provided"
        causes.append(("resourceVersionMatch", message))
    if "sendInitialEvents" in query:
        causes.append(("sendInitialEvents", "sendInitialEvents is forbidden for list"))
    if causes:
        raise status.invalid_options(causes)


def _check_watch(query: Mapping[str, str], *, streaming_lists: bool) -> None:
    """`metainternalversion/validation: validateWatchOptions`."""
    match = query.get("resourceVersionMatch", "")
    causes: list[tuple[str, str]] = []
    if "sendInitialEvents" in query:
        if match != "NotOlderThan":
            message = "sendInitialEvents requires setting resourceVersionMatch to NotOlderThan"
            causes.append(("resourceVersionMatch", message))
        if not streaming_lists:
            message = (
                "sendInitialEvents is forbidden for watch unless the WatchList feature gate "
                "is enabled"
            )
            causes.append(("sendInitialEvents", message))
    elif match:
        message = "resourceVersionMatch is forbidden for watch unless sendInitialEvents is provided"
        causes.append(("resourceVersionMatch", message))
    if causes:
        raise status.invalid_options(causes)


def _revision_of(query: Mapping[str, str]) -> int | None:
    given = query.get("resourceVersion", "")
    if not given:
        return None
    if not given.isdecimal():
        message = f'Invalid value: "{given}": strconv.ParseUint: parsing "{given}": invalid syntax'
        raise status.bad_version(f"resourceVersion: {message}", watch=_is_true(query.get("watch")))
    return int(given)


def _encode_token(revision: int, start: str) -> str:
    token = msgspec.json.encode({"v": "meta.k8s.io/v1", "rv": revision, "start": start})
    return base64.urlsafe_b64encode(token).rstrip(b"=").decode()


def _decode_token(token: str) -> tuple[int, str]:
    try:
        decoded = msgspec.json.decode(base64.urlsafe_b64decode(token + "=" * (-len(token) % 4)))
        return int(decoded["rv"]), str(decoded["start"])
    except (ValueError, KeyError, TypeError) as error:
        message = f"invalid continue token: continue key is not valid: {error}"
        raise status.bad_request(message) from None


def _list_body(
    resource: Resource, page: Iterable[Entry], revision: int, token: str, remaining: int | None
) -> bytes:
    metadata: Object = {"resourceVersion": str(revision)}
    if token or resource.custom:
        # Unstructured lists write it even where there is nothing to continue with.
        metadata["continue"] = token
    if remaining:
        metadata["remainingItemCount"] = remaining
    head = msgspec.json.encode(metadata, order="sorted" if resource.custom else None)
    if resource.custom:
        items = b",".join(entry.body for entry in page)
        names = (resource.api_version.encode(), items, resource.kind.encode(), head)
        return b'{"apiVersion":"%s","items":[%s],"kind":"%sList","metadata":%s}\n' % names
    # The items of a typed list do not name their kind, which stands first in the stored bytes.
    named = len(b'"kind":"%s","apiVersion":"%s",') - 4
    named += len(resource.kind) + len(resource.api_version)
    items = b",".join(b"{" + entry.body[1 + named :] for entry in page)
    names = (resource.kind.encode(), resource.api_version.encode(), head, items)
    return b'{"kind":"%sList","apiVersion":"%s","metadata":%s,"items":[%s]}\n' % names


def _placed(asked: Asked, given: Object) -> Object:
    """The object sent, in the namespace and under the name that the path says."""
    metadata = dict(given.get("metadata") or {})
    if asked.namespace and metadata.setdefault("namespace", asked.namespace) != asked.namespace:
        raise status.bad_request(
            "the namespace of the provided object does not match the namespace sent on the request"
        )
    if asked.name and metadata.setdefault("name", asked.name) != asked.name:
        raise status.bad_request(
            f"the name of the object ({metadata['name']}) does not match the name on the URL "
            f"({asked.name})"
        )
    return {**given, "metadata": metadata}


def _answer_apart(path: str) -> web.Response:
    """Paths without a resource: the few that the server has, and 404 in plain text."""
    if path == "/version":
        return web.json_response({"major": "1", "minor": "36", "gitVersion": "v1.36.3"})
    if path in ("/readyz", "/livez", "/healthz"):
        return web.Response(text="ok")
    if path.startswith("/api/v1/"):
        # The core group is served by the server itself, which answers in its own way.
        return _refusal(status.no_such_resource())
    return web.Response(status=404, text="404 page not found\n")


def _faulty(fault: _Fault, asked: Asked) -> web.Response:
    resource, namespace, name = asked.resource, asked.namespace, asked.name
    headers = {} if fault.retry_after is None else {"Retry-After": str(fault.retry_after)}
    match fault.status:
        case 401:
            refused = status.unauthorized()
        case 403:
            refused = status.forbidden(resource, asked.verb, USER, namespace, name)
        case 404:
            # What a resource answers that no CRD defines: not a Status.
            return web.Response(status=404, text="404 page not found\n", headers=headers)
        case 410:
            refused = status.expired(status.TOO_OLD_LIST)
        case 429:
            text = "Too many requests, please try again later.\n"
            return web.Response(status=429, text=text, headers=headers)
        case 503:
            refused = status.unavailable("apiserver not ready")
        case code:
            refused = status.internal_error("etcdserver: request timed out")
            refused.status["code"] = code
    return _refusal(refused, headers)


def _refusal(refused: Refused, headers: Mapping[str, str] | None = None) -> web.Response:
    given = dict(headers or {})
    if refused.retry_after is not None:
        given.setdefault("Retry-After", str(refused.retry_after))
    response = _json(_status_body(refused), refused.code)
    response.headers.update(given)
    return response


def _status_body(refused: Refused) -> bytes:
    return msgspec.json.encode(refused.status)


def _json(body: bytes, code: int = 200) -> web.Response:
    headers = {"Cache-Control": "no-cache, private"}
    return web.Response(body=body, status=code, content_type="application/json", headers=headers)


def _decode_request(body: bytes) -> Object:
    try:
        return msgspec.json.decode(body, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise status.bad_request(f"the object provided is unrecognized: {error}") from None


def _gzip(body: bytes) -> bytes:
    packer = zlib.compressobj(level=1, wbits=31)
    return packer.compress(body) + packer.flush()


def _chunk(raw: bytes) -> bytes:
    """One chunk of a chunked body, for writing behind the response's back."""
    return b"%x\r\n%s\r\n" % (len(raw), raw)


def _is_true(value: str | None) -> bool:
    return value in ("1", "true", "True", "t", "T", "TRUE")


_RESOURCES_BY_PATH = {(resource.group, resource.plural): resource for resource in RESOURCES}


def _resource_named(plural: str) -> Resource:
    return next(resource for resource in RESOURCES if resource.plural == plural)
