"""The simulated API server with faults: broken and silent streams, refusals, garbage, 410."""

import contextlib
import math
from asyncio import Event
from collections import deque
from collections.abc import AsyncGenerator, Callable, Collection
from dataclasses import dataclass
from datetime import datetime

from aiohttp import web

from exporter.demo import Demo, status
from exporter.demo.apiserver import SimulatedApiServer, respond_error, respond_not_found
from exporter.demo.requests import RequestInfo
from exporter.demo.status import ApiResource, StatusError
from exporter.demo.store import RESOURCES, ObjectStore
from exporter.demo.watches import Stream
from exporter.engine.facts.names import KUBEVIRT
from tests.cluster import poll


USER = "system:anonymous"
WATCHED_WITHIN = 30.0


@dataclass(slots=True)
class Fault:
    """A refusal of some verbs, for a number of requests."""

    code: int
    retry_after: int | None
    left: float
    verbs: Collection[str]


class FaultyApiServer(SimulatedApiServer):
    """A simulated API server with faults, which records its requests."""

    def __init__(
        self, store: ObjectStore, port: int = 0, *, bookmark_seconds: float = 60.0
    ) -> None:
        super().__init__(store, port=port, bookmark_seconds=bookmark_seconds)
        self.requests: deque[RequestInfo] = deque(maxlen=10_000)
        """The requests for resources, oldest first."""
        self.tokens: Collection[str] = ()
        """The bearer tokens that the server accepts; if there are none, no token is needed."""
        self.names = KUBEVIRT
        """Under which names KubeVirt's resources are served."""
        self._serves_streaming_lists = True
        self._faults: dict[ApiResource, Fault] = {}
        self._thawed = Event()
        self._thawed.set()

    def refuse_streaming_lists(self) -> None:
        """Refuse `sendInitialEvents`, as a server without the WatchList feature does."""
        self._serves_streaming_lists = False

    def cut(self, resource: str | None = None, *, mid_line: bool = False) -> int:
        """Break the open watches, with `mid_line` in the middle of a line; returns their number."""
        streams = self._streams_of(resource)
        for stream in streams:
            self.streams.discard(stream)
            transport = stream.http.transport
            if mid_line and transport is not None:
                transport.write(_chunk(b'{"type":"MODIFIED","object":{"apiVersion":"kubev'))
                transport.close()
            else:
                stream.abort()
        return len(streams)

    def compact(self, resource: str | None = None) -> None:
        """Answer 410 to watches and paged lists that continue from an earlier version."""
        self.store.compact(None if resource is None else _resource_named(resource))

    def freeze(self) -> None:
        """Stop answering; watches stay open without events, and requests hang."""
        self._thawed.clear()

    def thaw(self) -> None:
        """Continue after `freeze`."""
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
        """Answer these verbs on a resource with this code, `times` times or until `recover`."""
        left = math.inf if times is None else times
        self._faults[_resource_named(resource)] = Fault(code, retry_after, left, verbs)

    def recover(self, resource: str | None = None) -> None:
        """Undo `answer`, for one resource or for all."""
        for faulty in list(self._faults):
            if resource in (None, faulty.plural):
                del self._faults[faulty]

    def inject(self, raw: bytes, resource: str | None = None) -> int:
        """Write raw bytes into the open watches; returns the number of watches."""
        streams = self._streams_of(resource)
        for stream in streams:
            if stream.http.transport is not None:
                stream.http.transport.write(_chunk(raw))
        return len(streams)

    async def watched(self, resource: str) -> None:
        """Wait until a watch is open and the server has sent the initial state."""

        async def is_open() -> bool:
            streams = self._streams_of(resource)
            return any(stream.written_to is not None for stream in streams)

        await poll(is_open, within=WATCHED_WITHIN, what=f"watches of {resource}")

    async def _handle(self, http: web.Request) -> web.StreamResponse:
        """Serve KubeVirt's resources under `names`, and no longer under its own."""
        group, prefix = f"/apis/{self.names.api_group}/", self.names.resource_prefix.lower()
        path = http.path.replace(f"/apis/{KUBEVIRT.api_group}/", "/apis/absent/")
        if http.path.startswith(group):
            path = http.path.replace(group, f"/apis/{KUBEVIRT.api_group}/")
            path = path.replace(f"/{prefix}", "/") if prefix else path
        return await super()._handle(
            http.clone(rel_url=http.rel_url.with_path(path, keep_query=True))
        )

    async def respond(self, http: web.Request, request: RequestInfo) -> web.StreamResponse:
        """Refuse the request if a fault says so; else answer it."""
        await self._thawed.wait()
        if self.tokens and http.headers.get("Authorization", "")[7:] not in self.tokens:
            raise _error(401, request)
        self.requests.append(request)
        fault = self._faults.get(request.resource)
        if fault is not None and fault.left > 0 and request.verb in fault.verbs:
            fault.left -= 1
            return _refuse(fault, request)
        if "sendInitialEvents" in request.query and not self._serves_streaming_lists:
            message = (
                "Forbidden: sendInitialEvents is forbidden for watch unless the WatchList feature"
                " gate is enabled"
            )
            causes = [("FieldValueForbidden", "sendInitialEvents", message)]
            raise status.invalid("meta.k8s.io", "ListOptions", "", causes)
        return await super().respond(http, request)

    async def events(self, stream: Stream) -> AsyncGenerator[bytes]:
        """The events of a watch, held back while the server is frozen."""
        async with contextlib.aclosing(super().events(stream)) as events:
            async for data in events:
                await self._thawed.wait()
                yield data
        await self._thawed.wait()

    def _streams_of(self, resource: str | None) -> list[Stream]:
        return [stream for stream in self.streams if resource in (None, stream.resource.plural)]


def _refuse(fault: Fault, request: RequestInfo) -> web.Response:
    match fault.code:
        case 404:
            response = respond_not_found()
        case 429:
            text = "Too many requests, please try again later.\n"
            response = web.Response(status=429, text=text)
        case code:
            response = respond_error(_error(code, request))
    if fault.retry_after is not None:
        response.headers["Retry-After"] = str(fault.retry_after)
    return response


def _error(code: int, request: RequestInfo) -> StatusError:
    match code:
        case 401:
            failure = status.failure(401, "Unauthorized", "Unauthorized")
        case 403:
            details = status.details_of(request.resource, request.name)
            failure = status.failure(403, "Forbidden", _forbidden_message(request), details)
        case _:
            why = "etcdserver: request timed out"
            message, causes = f"Internal error occurred: {why}", [{"message": why}]
            failure = status.failure(code, "InternalError", message, {"causes": causes})
    return StatusError(failure)


def _forbidden_message(request: RequestInfo) -> str:
    resource = request.resource
    named = f'{resource.qualified} "{request.name}"' if request.name else resource.qualified
    where = (
        f'in the namespace "{request.namespace}"' if request.namespace else "at the cluster scope"
    )
    return (
        f'{named} is forbidden: User "{USER}" cannot {request.verb} resource "{resource.plural}" '
        f'in API group "{resource.group}" {where}'
    )


def _chunk(raw: bytes) -> bytes:
    """One chunk of a chunked body, to be written directly to the transport."""
    return b"%x\r\n%s\r\n" % (len(raw), raw)


def _resource_named(plural: str) -> ApiResource:
    return next(resource for resource in RESOURCES if resource.plural == plural)


class FaultyDemo(Demo):
    """The demo's cluster with an API server that has faults."""

    server: FaultyApiServer

    def __init__(self, clock: Callable[[], datetime], *, speed: float, nodes: int = 4) -> None:
        super().__init__(clock, speed=speed, nodes=nodes)
        self.server = FaultyApiServer(self.cluster.store)
