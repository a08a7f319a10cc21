"""Builds the applications of the query and metrics listeners from the handlers.

Wraps handlers with authentication, request durations and problem+json errors.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from types import ModuleType
from typing import TypeAlias

import structlog
from aiohttp import hdrs, web
from aiohttp.typedefs import Middleware

from exporter.counters import Counters
from exporter.server.access import Access, AccessDenied, ReviewUnavailable, Unauthenticated
from exporter.server.api import Service
from exporter.server.openapi import ROUTES
from exporter.server.problems import answer_problem
from exporter.server.requests import RETRY_AFTER, Refusal, refuse_unwanted
from exporter.server.schemas import Problem


Handler: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]

BLOCKED_WAIT = "blocked_wait"
"""The metric label of long polls."""
METRICS_LISTENER = frozenset({"metrics", "livez", "readyz", "page"})

log = structlog.stdlib.get_logger()


def make_query_app(
    service: Service, access: Access | None = None, *, hosts: frozenset[str] | None = None
) -> web.Application:
    """The query listener's application: every route, for callers that `access` admits.

    `hosts`: the names by which it may be called, see `refuse_unwanted`.
    """
    pages = _make_pages(service, named=True, linked=True)
    return _make_app(service, access, pages, lambda _name: True, hosts)


def make_metrics_app(
    service: Service, access: Access | None = None, *, page: bool = False
) -> web.Application:
    """The metrics listener's application: metrics, probes and the page.

    `page`: show single VMs to unauthenticated callers too.
    """
    named = page or access is not None
    pages = _make_pages(service, named=named, linked=False)
    served = METRICS_LISTENER | {"vm"} if named else METRICS_LISTENER
    return _make_app(service, access, pages, served.__contains__)


def _make_app(
    service: Service,
    access: Access | None,
    pages: Mapping[str, Handler],
    serves: Callable[[str], bool],
    hosts: frozenset[str] | None = None,
) -> web.Application:
    app = web.Application(
        middlewares=[answering_problems(service.counters, hosts)],
        client_max_size=service.limits.body_bytes,
    )
    handlers: dict[str, Handler] = {
        "verdicts": service.answer_verdicts,
        "blocked": service.answer_blocked,
        "vmi": service.answer_vmi,
        "evacuations": service.answer_evacuations,
        "nodes": service.answer_nodes,
        "node": service.answer_node,
        "status": service.answer_status,
        "metrics": service.answer_metrics,
        "livez": service.answer_livez,
        "readyz": service.answer_readyz,
        "openapi": service.answer_openapi,
        **pages,
    }
    for route in ROUTES:
        if serves(route.name):
            handler = handlers[route.name]
            if access is not None and route.guarded:
                handler = _guarded(handler, access)
            timed = timed_handler(route.name, handler, service.counters)
            service.counters.expect_requests(route.name)
            if route.name == "blocked":
                service.counters.expect_requests(BLOCKED_WAIT)
            if route.method == "GET":
                app.router.add_get(route.path, timed)
            else:
                app.router.add_route(route.method, route.path, timed)
    return app


def _make_pages(service: Service, *, named: bool, linked: bool) -> dict[str, Handler]:
    """The handlers of the pages, imported in a thread when one is first opened."""

    async def answer_page(request: web.Request) -> web.StreamResponse:
        pages = await asyncio.to_thread(_import_pages)
        answer: web.Response = await pages.answer_page(service, request, named=named, linked=linked)
        return answer

    async def answer_vm_page(request: web.Request) -> web.StreamResponse:
        pages = await asyncio.to_thread(_import_pages)
        answer: web.Response = await pages.answer_vm_page(service, request, linked=linked)
        return answer

    return {"page": answer_page, "vm": answer_vm_page}


def _import_pages() -> ModuleType:
    from exporter.server.page import handlers

    return handlers


def timed_handler(name: str, handler: Handler, counters: Counters) -> Handler:
    """Wrap a handler to observe the duration of each request under `name`."""

    async def timed(request: web.Request) -> web.StreamResponse:
        loop = asyncio.get_running_loop()
        began = loop.time()
        label = BLOCKED_WAIT if name == "blocked" and "wait" in request.query else name
        try:
            return await handler(request)
        finally:
            counters.count_request(label, loop.time() - began)

    return timed


def _guarded(handler: Handler, access: Access) -> Handler:
    async def guarded(request: web.Request) -> web.StreamResponse:
        try:
            await access.check(
                request.headers.get(hdrs.AUTHORIZATION),
                request.method,
                request.path,
                peer=request.remote or "",
            )
        except Unauthenticated as refusal:
            challenge: dict[str, str] = {hdrs.WWW_AUTHENTICATE: "Bearer"}
            raise Refusal(401, "Unauthenticated", str(refusal), challenge) from None
        except AccessDenied as refusal:
            raise Refusal(403, "Not allowed", str(refusal)) from None
        except ReviewUnavailable as trouble:
            retry: dict[str, str] = {hdrs.RETRY_AFTER: str(RETRY_AFTER)}
            raise Refusal(503, "API server unavailable", str(trouble), retry) from None
        return await handler(request)

    return guarded


def answering_problems(counters: Counters, hosts: frozenset[str] | None = None) -> Middleware:
    """Middleware that turns refusals and errors into problem+json, and counts them.

    It refuses what no listener answers; `hosts` as for `refuse_unwanted`.
    """

    @web.middleware
    async def answer_problems(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            refuse_unwanted(request, hosts)
            response = await handler(request)
        except Refusal as refusal:
            response = answer_problem(refusal.problem, refusal.headers)
        except web.HTTPException as error:
            if error.status < 400:
                raise
            response = answer_problem(
                Problem(
                    title=error.reason,
                    status=error.status,
                    detail=_DETAILS.get(error.status, error.reason),
                ),
                {str(hdrs.ALLOW): error.headers[hdrs.ALLOW]}
                if hdrs.ALLOW in error.headers
                else None,
            )
        except Exception:
            log.exception("request_failed", method=request.method, path=request.path)
            response = answer_problem(
                Problem(
                    title="Internal error",
                    status=500,
                    detail="the exporter failed to answer this request; its log says why",
                )
            )
        if response.status >= 400:
            counters.refused_requests[response.status] += 1
        return response

    return answer_problems


_DETAILS = {
    404: "there is no such endpoint; /openapi.json lists those of the query listener",
    405: "this endpoint does not take that method; see the Allow header",
}
