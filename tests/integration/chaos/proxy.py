"""An HTTP proxy before the API server that refuses requests and holds back watches."""

import asyncio
from collections import Counter
from contextlib import AsyncExitStack
from typing import Self

import aiohttp
from aiohttp import web

from tests.cluster import RealCluster
from tests.support.serving import serving


_KEPT = ("Authorization", "Content-Type", "Accept")
_NO_LIMIT = aiohttp.ClientTimeout(total=None)


class Proxy:
    """`async with Proxy(cluster) as proxy` forwards requests to `proxy.url` to the server.

    `refusals` has the status codes to answer with, by method and part of the path. `rejected`
    counts these answers. `held` has parts of paths: a watch whose path has such a part gets no data
    until the part is removed from the set.
    """

    def __init__(self, cluster: RealCluster) -> None:
        self._cluster = cluster
        self.url = ""
        self.refusals: dict[tuple[str, str], int] = {}
        self.rejected: Counter[int] = Counter()
        self.held: set[str] = set()

    async def __aenter__(self) -> Self:
        self._running = AsyncExitStack()
        self._session = await self._running.enter_async_context(
            aiohttp.ClientSession(
                self._cluster.api.url,
                connector=aiohttp.TCPConnector(ssl=self._cluster.api.trust, limit=0),
                timeout=_NO_LIMIT,
            )
        )
        app = web.Application(client_max_size=16 * 2**20)
        app.router.add_route("*", "/{path:.*}", self._pass)
        self.url = await self._running.enter_async_context(serving(app))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._running.aclose()

    async def _pass(self, request: web.Request) -> web.StreamResponse:
        for (method, part), code in self.refusals.items():
            if request.method == method and part in request.path:
                self.rejected[code] += 1
                return _refusal(code)
        headers = {key: request.headers[key] for key in _KEPT if key in request.headers}
        try:
            async with self._session.request(
                request.method, request.path_qs, data=await request.read(), headers=headers
            ) as answer:
                response = web.StreamResponse(status=answer.status)
                response.content_type = answer.content_type
                await response.prepare(request)
                async for chunk in answer.content.iter_any():
                    await self._let_through(request)
                    await response.write(chunk)
                await response.write_eof()
                return response
        except (aiohttp.ClientError, ConnectionError):
            if request.transport is not None:
                request.transport.abort()
            return web.Response(status=502)

    async def _let_through(self, request: web.Request) -> None:
        if "watch" in request.query:
            # The proxy must poll, because a change of a plain set sends no signal.
            while any(part in request.path for part in self.held):  # noqa: ASYNC110
                await asyncio.sleep(0.05)


def _refusal(code: int) -> web.Response:
    reasons = {429: "TooManyRequests", 500: "InternalError", 503: "ServiceUnavailable"}
    reason = reasons[code]
    status = {
        "kind": "Status",
        "apiVersion": "v1",
        "status": "Failure",
        "message": f"rejected by the test: {reason}",
        "reason": reason,
        "code": code,
    }
    return web.json_response(status, status=code, headers={"Retry-After": "1"})
