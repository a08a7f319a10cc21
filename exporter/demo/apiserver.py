"""The simulated API server: get, list, watch and write over real HTTP.

If the API leaves a choice, this server does what kube-apiserver 1.37 does. Comments name the
functions of `k8s.io/apiserver` that define the behaviour.
"""

from __future__ import annotations

import asyncio
import contextlib
import zlib
from collections.abc import AsyncGenerator
from typing import Any, Self

import msgspec
from aiohttp import web

from exporter.demo import eviction_requests, status
from exporter.demo.lists import render_list
from exporter.demo.objects import Object
from exporter.demo.requests import RequestInfo, parse_request
from exporter.demo.status import StatusError
from exporter.demo.store import EVICTIONS, LEASES, NAMESPACES, PODS, ObjectStore, encode
from exporter.demo.watches import Stream


MERGE_PATCH = "application/merge-patch+json"
APPLY_PATCH = "application/apply-patch+yaml"
GZIP_FROM_BYTES = 128 * 1024
"""Shorter answers are not compressed (`responsewriters/writers.go`)."""


class SimulatedApiServer:
    """`async with SimulatedApiServer(store) as server` serves the store at `server.url`.

    At the end of the block, open watches are aborted, as if the server were killed. To restart the
    server, create a new one with the same store and port.
    """

    def __init__(
        self,
        store: ObjectStore,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        bookmark_seconds: float = 60.0,
    ) -> None:
        self.store = store
        self.host = host
        self.port = port
        self.bookmark_seconds = bookmark_seconds
        self.streams: set[Stream] = set()
        """The open watches."""
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        """The URL it listens on."""
        return f"http://{self.host}:{self.port}"

    async def __aenter__(self) -> Self:
        app = web.Application(client_max_size=16 * 2**20)
        app.router.add_route("*", "/{path:.*}", self._handle)
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
        # A new server has an empty watch cache, so a watch from an earlier version gets 410.
        self.store.expire()
        self.store.listeners.add(self._wake_streams)
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.store.listeners.discard(self._wake_streams)
        for stream in self.streams:
            stream.abort()
        if self._runner is not None:
            await self._runner.cleanup()

    async def respond(self, http: web.Request, request: RequestInfo) -> web.StreamResponse:
        """Answer a request for a resource."""
        match request.verb:
            case "watch":
                return await self._watch(http, request)
            case "list":
                return await self._list(http, request)
            case "get":
                entry = self.store.entry(request.resource, request.namespace, request.name)
                return respond_json(entry.body)
            case "patch" if request.resource is EVICTIONS and http.content_type == APPLY_PATCH:
                applied = _decode_body(await http.read())
                namespace, name = request.namespace or "", request.name
                made = eviction_requests.apply_status(self.store, namespace, name, applied)
                return respond_json(encode(EVICTIONS, made))
            case "patch" if http.content_type != MERGE_PATCH:
                message = (
                    "the body of the request was in an unknown format - accepted media types "
                    f"include: {MERGE_PATCH}"
                )
                raise StatusError(status.failure(415, "UnsupportedMediaType", message))
            case _:
                body = await http.read()
                return self._write(request, _decode_body(body) if body else {})

    def events(self, stream: Stream) -> AsyncGenerator[bytes]:
        """Everything to write to a watch, until it ends."""
        return stream.events(self.store, self.bookmark_seconds)

    def _wake_streams(self) -> None:
        for stream in self.streams:
            stream.changed.set()

    async def _handle(self, http: web.Request) -> web.StreamResponse:
        request = parse_request(http.method, http.path, dict(http.query))
        if request is None:
            return _respond_without_resource(http.path)
        try:
            if request.has_unknown_subresource:
                raise status.not_found(request.resource, request.name)
            return await self.respond(http, request)
        except StatusError as error:
            return respond_error(error)

    async def _list(self, http: web.Request, request: RequestInfo) -> web.Response:
        body = render_list(self.store, request)
        response = respond_json(body)
        if len(body) >= GZIP_FROM_BYTES and "gzip" in http.headers.get("Accept-Encoding", ""):
            response.body = await asyncio.to_thread(_compress, body)
            response.headers.update({"Content-Encoding": "gzip", "Vary": "Accept-Encoding"})
        return response

    async def _watch(self, http: web.Request, request: RequestInfo) -> web.StreamResponse:
        stream = Stream(http, request)
        response = web.StreamResponse(headers={"Cache-Control": "no-cache, private"})
        response.content_type = "application/json"
        response.enable_chunked_encoding()
        await response.prepare(http)
        self.streams.add(stream)
        try:
            async with contextlib.aclosing(self.events(stream)) as events:
                with contextlib.suppress(ConnectionError):
                    async for data in events:
                        if data:
                            await response.write(data)
                    await response.write_eof()
        finally:
            self.streams.discard(stream)
        return response

    def _write(self, request: RequestInfo, body: Object) -> web.Response:
        match request.verb:
            case "create":
                return self._create(request, body)
            case "delete":
                return self._delete(request, body)
            case "update":
                return self._update(request, body)
            case _:
                patched = self.store.patch(
                    request.resource,
                    request.namespace,
                    request.name,
                    body,
                    subresource=bool(request.subresource),
                )
                return respond_json(encode(request.resource, patched))

    def _create(self, request: RequestInfo, body: Object) -> web.Response:
        namespace = request.namespace
        if namespace and self.store.find(NAMESPACES, None, namespace) is None:
            raise status.not_found(NAMESPACES, namespace)
        created = self.store.create(request.resource, _default_from_path(request, body))
        return respond_json(encode(request.resource, created), 201)

    def _update(self, request: RequestInfo, body: Object) -> web.Response:
        resource = request.resource
        given = _default_from_path(request, body)
        if resource is LEASES and self.store.find(LEASES, request.namespace, request.name) is None:
            created = self.store.create(LEASES, given)
            return respond_json(encode(LEASES, created), 201)
        if (resource.custom or resource is LEASES) and not given["metadata"].get("resourceVersion"):
            message = "Invalid value: 0: must be specified for an update"
            causes = [("FieldValueInvalid", "metadata.resourceVersion", message)]
            raise status.invalid(resource.group, resource.plural, request.name, causes)
        updated = self.store.update(resource, given, subresource=bool(request.subresource))
        return respond_json(encode(resource, updated))

    def _delete(self, request: RequestInfo, body: Object) -> web.Response:
        resource, namespace, name = request.resource, request.namespace, request.name
        grace = request.query.get("gracePeriodSeconds", body.get("gracePeriodSeconds"))
        last = self.store.get(resource, namespace, name)
        left = self.store.delete(resource, namespace, name, None if grace is None else int(grace))
        if left is not None or resource is PODS:
            return respond_json(encode(resource, left or last))
        details = status.details_of(resource, name) | {"uid": last["metadata"]["uid"]}
        return respond_json(msgspec.json.encode(status.success(details)))


def respond_json(body: bytes, code: int = 200) -> web.Response:
    """A response with a JSON body."""
    headers = {"Cache-Control": "no-cache, private"}
    return web.Response(body=body, status=code, content_type="application/json", headers=headers)


def respond_error(error: StatusError) -> web.Response:
    """A response with a failure Status."""
    response = respond_json(msgspec.json.encode(error.status), error.code)
    if error.retry_after is not None:
        response.headers["Retry-After"] = str(error.retry_after)
    return response


def respond_not_found() -> web.Response:
    """The plain-text 404 of a path that no API group or CRD defines."""
    return web.Response(status=404, text="404 page not found\n")


def _respond_without_resource(path: str) -> web.Response:
    """Answer on a path that names no resource: version, health checks, or 404."""
    if path == "/version":
        return web.json_response({"major": "1", "minor": "37", "gitVersion": "v1.37.2"})
    if path in ("/readyz", "/livez", "/healthz"):
        return web.Response(text="ok")
    if path.startswith("/api/v1/"):
        # The core group is built in, and answers with a Status.
        return respond_error(status.no_such_resource())
    return respond_not_found()


def _default_from_path(request: RequestInfo, body: Object) -> Object:
    """The sent object; it gets namespace and name from the path unless it has them."""
    metadata = dict(body.get("metadata") or {})
    namespace = request.namespace
    if namespace and metadata.setdefault("namespace", namespace) != namespace:
        raise status.bad_request(
            "the namespace of the provided object does not match the namespace sent on the request"
        )
    if request.name and metadata.setdefault("name", request.name) != request.name:
        raise status.bad_request(
            f"the name of the object ({metadata['name']}) does not match the name on the URL "
            f"({request.name})"
        )
    return {**body, "metadata": metadata}


def _decode_body(body: bytes) -> Object:
    try:
        return msgspec.json.decode(body, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise status.bad_request(f"the object provided is unrecognized: {error}") from None


def _compress(body: bytes) -> bytes:
    compressor = zlib.compressobj(level=1, wbits=31)
    return compressor.compress(body) + compressor.flush()
