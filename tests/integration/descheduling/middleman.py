"""A relay between a descheduler and the exporter that counts and changes requests."""

from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Self

import aiohttp
from aiohttp import web

from tests.support.serving import serving


VERDICTS = "/v1/verdicts"
Tamper = Callable[[web.Request, bytes], web.Response | None]
"""Answers a request in the exporter's place; after None the request is forwarded."""
_HEADERS = ("Content-Type", "ETag", "If-None-Match", "Retry-After")
_TIMEOUT = aiohttp.ClientTimeout(total=90)


class Middleman:
    """`async with Middleman(url) as middle` forwards requests from `middle.url` to `url`.

    `requests` counts the requests by path. `on_request` is called first. Then `tamper` may answer
    the request.
    """

    def __init__(self, url: str) -> None:
        self._target = url
        self.requests: Counter[str] = Counter()
        self.tamper: Tamper = lambda _request, _body: None
        self.on_request: Callable[[web.Request], None] = lambda _request: None

    async def __aenter__(self) -> Self:
        self._running = AsyncExitStack()
        self._session = await self._running.enter_async_context(
            aiohttp.ClientSession(timeout=_TIMEOUT)
        )
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._pass)
        self.url = await self._running.enter_async_context(serving(app))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._running.aclose()

    async def _pass(self, request: web.Request) -> web.StreamResponse:
        self.requests[request.path] += 1
        self.on_request(request)
        body = await request.read()
        tampered = self.tamper(request, body)
        if tampered is not None:
            return tampered
        kept = {key: request.headers[key] for key in _HEADERS if key in request.headers}
        try:
            async with self._session.request(
                request.method, self._target + request.path_qs, data=body, headers=kept
            ) as answer:
                passed = {key: answer.headers[key] for key in _HEADERS if key in answer.headers}
                return web.Response(status=answer.status, body=await answer.read(), headers=passed)
        except aiohttp.ClientError:
            # Close the connection without an answer, as a killed exporter would.
            if request.transport is not None:
                request.transport.abort()
            return web.Response(status=502)
