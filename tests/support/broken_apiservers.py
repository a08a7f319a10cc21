"""API servers that are broken, each in its own way, in the place of a sound one."""

import asyncio
import json
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Self, TypeAlias

from aiohttp import web

from exporter.demo.apiserver import respond_error, respond_not_found
from exporter.demo.status import StatusError, failure
from tests.support.serving import serving


Answer: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]

LARGE = 5_000_000
"""Bytes of a text that nobody should keep or log, and of a line that never ends."""
NESTED = 100_000


class ApiServerAddress:
    """An address that redirects to the server at `sound`, or has a `broken` server in its place."""

    def __init__(self, sound: str) -> None:
        self.sound = sound
        self.broken: Answer | None = None
        self.url = ""
        self._answering: set[asyncio.Task[object]] = set()

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[Self]:
        """Serve at `self.url` during the block."""
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        async with serving(app) as self.url:
            yield self

    async def repair(self) -> None:
        """Put the sound server back, and break the connections to the broken one."""
        self.broken = None
        answering = [*self._answering]
        for task in answering:
            task.cancel()
        await asyncio.gather(*answering, return_exceptions=True)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if self.broken is not None:
            task = asyncio.current_task()
            assert task is not None
            self._answering.add(task)
            try:
                return await self.broken(request)
            finally:
                self._answering.discard(task)
        raise web.HTTPTemporaryRedirect(self.sound + str(request.rel_url))


def _line(event: object, /, **fields: object) -> bytes:
    return json.dumps({"type": event, "object": fields}).encode() + b"\n"


def _refusing(code: int, reason: str, message: str = "broken", **headers: str) -> Answer:
    """Answers every request with this Status."""

    async def answer(_: web.Request) -> web.StreamResponse:
        response = respond_error(StatusError(failure(code, reason, message)))
        response.headers.update({name.replace("_", "-"): text for name, text in headers.items()})
        return response

    return answer


def _saying(body: bytes, kind: str = "application/json", **headers: str) -> Answer:
    """Answers every request with 200 and this body."""

    async def answer(_: web.Request) -> web.StreamResponse:
        sent = {name.replace("_", "-"): text for name, text in headers.items()}
        return web.Response(body=body, content_type=kind, headers=sent)

    return answer


def _streaming(first: bytes, drop: bytes = b"", pause: float = 0.1) -> Answer:
    """Answers every request with these bytes, then with `drop` again and again, and never ends."""

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        response.content_type = "application/json"
        await response.prepare(request)
        await response.write(first)
        while True:
            await response.write(drop)
            await asyncio.sleep(pause)

    return answer


def _writing(*parts: bytes) -> Answer:
    """Writes these bytes without a head of its own, and closes the connection."""

    async def answer(request: web.Request) -> web.StreamResponse:
        transport = request.transport
        if transport is not None:
            for part in parts:
                transport.write(part)
            transport.close()
        return web.Response()

    return answer


async def _abort(request: web.Request) -> web.StreamResponse:
    if request.transport is not None:
        request.transport.abort()
    return web.Response()


async def _hang(_: web.Request) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError


async def _be_absent(_: web.Request) -> web.StreamResponse:
    return respond_not_found()


async def _redirect_to_itself(request: web.Request) -> web.StreamResponse:
    raise web.HTTPTemporaryRedirect(str(request.rel_url))


async def _be_empty(request: web.Request) -> web.StreamResponse:
    """A cluster without any object, at an early resourceVersion."""
    metadata = {"resourceVersion": "1"}
    if "watch" not in request.query:
        return web.json_response({"metadata": metadata, "items": []})
    annotations = {"k8s.io/initial-events-end": "true"}
    bookmark = _line("BOOKMARK", metadata=metadata | {"annotations": annotations})
    return await _streaming(bookmark, bookmark, 1.0)(request)


_NAMED = {"metadata": {"name": "vm", "namespace": "ns0", "uid": "u"}}
_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"

BROKEN: Mapping[str, Answer] = {
    "closes connections": _abort,
    "does not answer": _hang,
    "answers 400": _refusing(400, "BadRequest"),
    "answers 401": _refusing(401, "Unauthorized"),
    "answers 403": _refusing(403, "Forbidden"),
    "answers 404": _be_absent,
    "answers 410": _refusing(410, "Expired"),
    "answers 429": _refusing(429, "TooManyRequests", Retry_After="1"),
    "answers 500 with a long text": _refusing(500, "InternalError", "\x1b[31m" + "x" * LARGE),
    "answers 503": _refusing(503, "ServiceUnavailable"),
    "redirects to itself": _redirect_to_itself,
    "answers with a page": _saying(b"<html>\n<body>Please log in</body>\n</html>\n", "text/html"),
    "answers nothing": _saying(b""),
    "answers with other JSON": _saying(b'{"hello":"world"}\n'),
    "answers with nested JSON": _saying(b"[" * NESTED),
    "answers with broken UTF-8": _saying(b'{"type":"ADDED","object":"\xff\xfe"}\n'),
    "answers with broken gzip": _saying(b"\x1f\x8bnonsense", Content_Encoding="gzip"),
    "answers with inflated gzip": _saying(
        zlib.compress(bytes(LARGE), 1), Content_Encoding="deflate"
    ),
    "sends unknown events": _streaming(_line("SHRUGGED", **_NAMED), _line("SHRUGGED", **_NAMED)),
    "sends objects without a version": _streaming(_line("ADDED", **_NAMED)),
    "sends an error": _saying(_line("ERROR", kind="Status", code=500, message="x" * LARGE)),
    "sends no event": _streaming(b""),
    "sends white space": _streaming(b"", b"\n \n"),
    "sends a line without end": _streaming(b'{"type":"', b"x" * 100_000, 0.01),
    "ends within a line": _writing(_HEAD + b"Content-Length: 100\r\n\r\n", b'{"type":"MODI'),
    "ends within a chunk": _writing(_HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"64\r\n{"),
    "sends no HTTP": _writing(b"\x16\x03\x01\x02\x00 nonsense\r\n\r\n"),
    "is empty": _be_empty,
}
"""What takes the place of the API server, by how it is broken."""
