"""Builds the applications of the query listener and the metrics listener.

The applications add authentication, request durations and problem+json errors to the handlers.
"""

import asyncio
import gc
from collections.abc import Awaitable, Callable, Container
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import TypeAlias

import structlog
from aiohttp import hdrs, web
from aiohttp.typedefs import Middleware

from exporter.counters import Counters
from exporter.server.api.handlers import Service
from exporter.server.api.openapi import PROBLEMS, ROUTES
from exporter.server.api.requests import refuse_unwanted
from exporter.server.http.access import Access
from exporter.server.http.problems import Refusal


Handler: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]

BLOCKED_WAIT = "blocked_wait"
"""The metric label of long polls."""
METRICS_LISTENER = frozenset({"metrics", "livez", "readyz", "page", "runbooks", "runbook"})

log = structlog.stdlib.get_logger()


def make_query_app(
    service: Service, access: Access | None = None, *, hosts: frozenset[str] | None = None
) -> web.Application:
    """The query listener's application, with every route. `access` checks the callers.

    `hosts`: the names that `Host` may have, see `refuse_unwanted`.
    """
    served = {route.name for route in ROUTES}
    return _make_app(service, access, served, named=True, linked=True, hosts=hosts)


def make_metrics_app(
    service: Service, access: Access | None = None, *, page: bool = False
) -> web.Application:
    """The metrics listener's application: metrics, probes, the page and the runbooks.

    `page`: the page shows single VMs to unauthenticated callers too.
    """
    named = page or access is not None
    served = METRICS_LISTENER | {"vm"} if named else METRICS_LISTENER
    return _make_app(service, access, served, named=named, linked=False)


def _make_app(
    service: Service,
    access: Access | None,
    served: Container[str],
    *,
    named: bool,
    linked: bool,
    hosts: frozenset[str] | None = None,
) -> web.Application:
    """An application with the routes whose names are in `served`.

    `named`: the page names VMs. `linked`: the pages link to the API.
    """
    app = web.Application(
        middlewares=[answering_problems(service.counters, hosts)],
        client_max_size=service.limits.body_bytes,
    )
    pages = {
        "page": _make_page(service, "handlers", "answer_page", named=named, linked=linked),
        "vm": _make_page(service, "handlers", "answer_vm_page", linked=linked),
        "runbooks": _make_page(service, "runbooks", "answer_list"),
        "runbook": _make_page(service, "runbooks", "answer_runbook"),
    }
    for route in ROUTES:
        if route.name in served:
            handler = pages.get(route.name) or getattr(service, f"answer_{route.name}")
            if access is not None and route.guarded:
                handler = _guarded(handler, access)
            add = app.router.add_get if route.method == "GET" else app.router.add_post
            add(route.path, timed_handler(route.name, handler, service.counters))
    return app


def _make_page(service: Service, module: str, name: str, **options: bool) -> Handler:
    """The handler `name` of a module of `page`. A thread imports it at the first request."""

    async def answer_page(request: web.Request) -> web.StreamResponse:
        pages = await asyncio.to_thread(_import_pages, module)
        answer: web.Response = await getattr(pages, name)(service, request, **options)
        return answer

    return answer_page


@cache
def _import_pages(module: str) -> ModuleType:
    """Import a module of `page`, and exempt what that creates from garbage collections.

    Without this, a collection would hold the interpreter's lock for 15 ms instead of 7.
    """
    pages = import_module(f"exporter.server.page.{module}")
    gc.freeze()
    return pages


def timed_handler(name: str, handler: Handler, counters: Counters) -> Handler:
    """Wrap a handler to observe the duration of each request under `name`."""
    counters.expect_requests(name)
    if name == "blocked":
        counters.expect_requests(BLOCKED_WAIT)

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
        await access.check(
            request.headers.get(hdrs.AUTHORIZATION),
            request.method,
            request.path,
            peer=request.remote or "",
        )
        return await handler(request)

    return guarded


def answering_problems(counters: Counters, hosts: frozenset[str] | None = None) -> Middleware:
    """Middleware that answers refusals and errors with problem+json, and counts them.

    It also calls `refuse_unwanted`, with `hosts`.
    """
    for status in PROBLEMS:
        counters.rejected_requests[status] += 0  # so that `increase` sees the first one

    @web.middleware
    async def answer_problems(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            refuse_unwanted(request, hosts)
            response = await handler(request)
        except Refusal as refusal:
            response = refusal.answer()
        except web.HTTPException as error:
            detail = _DETAILS.get(error.status, error.reason)
            allowed = {name: value for name, value in error.headers.items() if name == hdrs.ALLOW}
            response = Refusal(error.status, error.reason, detail, allowed).answer()
        except Exception:
            log.exception("request_failed", method=request.method, path=request.path)
            detail = "the exporter failed to answer this request; its log says why"
            response = Refusal(500, "Internal error", detail).answer()
        if response.status >= 400:
            counters.rejected_requests[response.status] += 1
        return response

    return answer_problems


_DETAILS = {
    404: "there is no such endpoint; /openapi.json lists the endpoints of the query listener",
    405: "this endpoint does not take that method; see the Allow header",
}
