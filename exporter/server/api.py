"""HTTP: the query API, the metrics, the probes and the page, on two listeners.

Every answer is computed from the store when it is asked for, by the same pure functions that
the metrics use. Every error is a problem+json (RFC 9457) that says what was expected.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

import msgspec
import structlog
from aiohttp import hdrs, web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.payload import Payload
from aiohttp.typedefs import Middleware

from exporter.counters import Counters
from exporter.engine.evidence import Evidence
from exporter.engine.model import (
    Checkpoint,
    Instant,
    Mismatch,
    Policy,
    Reason,
    Seconds,
    StuckPolicy,
    Verdict,
)
from exporter.engine.rules import decide, not_ours
from exporter.engine.store import Store
from exporter.health import Health
from exporter.server.access import Access, CannotTell, Forbidden, Unauthenticated
from exporter.server.answers import describe_status, explain_vmi, list_evacuations, write_verdict
from exporter.server.blocked import Blocked, BlockedSet
from exporter.server.page.model import Scene, read_wish, set_up
from exporter.server.page.render import PAGE_HEADERS, render_page
from exporter.server.problems import answer_problem
from exporter.server.schemas import (
    ROUTES,
    BlockedAnswer,
    Candidate,
    Problem,
    VerdictAnswer,
    VerdictRequest,
    VerdictsAnswer,
    write_instant,
    write_openapi,
    write_optional_instant,
    write_optional_release,
)
from exporter.settings import LONGEST_WAIT, Limits


Handler: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]

MAX_AGE: Seconds = 90.0
"""How long a caller may use a snapshot of the blocked set: a long poll and some."""
SHARED_FROM = 2**12
"""Bytes from which on the entries of the blocked set are not copied into each answer."""
RETRY_AFTER = 2
BLOCKS_LOGGED_EVERY: Seconds = 60.0
BLOCKS_REMEMBERED = 20_000
BLOCKED_WAIT = "blocked_wait"
"""The metric label of requests that are held open on purpose."""
METRICS_LISTENER = frozenset({"metrics", "livez", "readyz", "page"})

_SECONDS = re.compile(r"[0-9]{1,9}(\.[0-9]*)?([eE][-+]?[0-9]{1,3})?", re.ASCII)
"""A JSON number, as the OpenAPI document promises."""

_CHECKPOINTS = " or ".join(Checkpoint)

log = structlog.stdlib.get_logger()
_requests = msgspec.json.Decoder(VerdictRequest)


class Refusal(Exception):
    """A request that is not answered, with its status and what was expected."""

    def __init__(
        self, status: int, title: str, detail: str, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(detail)
        self.problem = Problem(title=title, status=status, detail=detail)
        self.headers = headers or {}


class _Parts(Payload):
    """A body in parts, each sent in a turn of its own: 2 MB at once would take 4 ms of one.

    Parts can be shared: aiohttp keeps a connection's last answer until the next, so that 10,000
    who wait for the blocked set of 1,000 VMIs to change would have 2 GB of copies of it.
    """

    _autoclose = True

    def __init__(self, parts: list[bytes], content_type: str) -> None:
        super().__init__(parts, content_type=content_type)
        self._size = sum(map(len, parts))

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        return b"".join(self._value).decode(encoding, errors)

    async def write(self, writer: AbstractStreamWriter) -> None:
        for part in self._value:
            await writer.write(part)
            await asyncio.sleep(0)


@dataclass
class Service:
    """What the endpoints share. `render_metrics` takes an Accept header."""

    store: Store
    health: Health
    counters: Counters
    policy: Policy
    stuck: StuckPolicy
    limits: Limits
    blocked: BlockedSet
    clock: Callable[[], Instant]
    render_metrics: Callable[[str], Awaitable[tuple[list[bytes], str]]]
    closing: bool = False
    _logged: dict[tuple[str, str, Reason], Instant] = field(default_factory=dict)

    async def answer_verdicts(self, request: web.Request) -> web.Response:
        """POST /v1/verdicts."""
        self._require_ready()
        asked = _decode(await read_body(request, self.limits))
        candidates = asked.candidates or []
        if len(candidates) > self.limits.candidates:
            raise Refusal(
                422,
                "Too many candidates",
                f"candidates: {len(candidates)} of them, at most"
                f" {self.limits.candidates} are taken (limits.candidates)",
            )
        now = self.clock()
        return _json(
            VerdictsAnswer(
                as_of=write_instant(now),
                observed_at=write_optional_instant(self.health.observed_at),
                stale=self.health.is_stale(now, (one.namespace for one in candidates)),
                verdicts=self._judge(asked, candidates, now),
            )
        )

    async def answer_blocked(self, request: web.Request) -> web.Response:
        """GET /v1/blocked."""
        self._require_ready()
        checkpoint = _read_checkpoint(request)
        wait = _read_wait(request)
        known = [tag.strip().removeprefix("W/") for tag in _if_none_match(request)]
        blocked = self.blocked.read(checkpoint)
        if wait and blocked.etag in known:
            blocked = await self.blocked.wait(checkpoint, blocked.etag, wait)
        headers: dict[str, str] = {hdrs.ETAG: blocked.etag, hdrs.CACHE_CONTROL: "no-cache"}
        if blocked.etag in known or "*" in known:
            return web.Response(status=304, headers=headers)
        parts = _write_blocked(blocked, self.clock())
        if len(blocked.encoded) < SHARED_FROM:
            return web.Response(
                body=b"".join(parts), content_type="application/json", headers=headers
            )
        return web.Response(body=_Parts(parts, "application/json"), headers=headers)

    async def answer_vmi(self, request: web.Request) -> web.Response:
        """GET /v1/vmis/{namespace}/{name}."""
        self._require_ready()
        namespace, name = request.match_info["namespace"], request.match_info["name"]
        for field_name, value, most in (("namespace", namespace, 63), ("name", name, 253)):
            if len(value) > most:
                raise Refusal(422, "Too long", f"{field_name}: at most {most} characters")
        evidence = self.store.evidence(namespace, name)
        if evidence is None:
            raise Refusal(404, "No such VMI", f"no VMI {name!r} in namespace {namespace!r}")
        return _json(
            explain_vmi(
                evidence,
                self.policy,
                self.stuck,
                load=self.store.load(),
                now=self.clock(),
                health=self.health,
                held_evictions=self.counters.held_evictions.of(evidence.vmi.uid),
            )
        )

    async def answer_evacuations(self, _request: web.Request) -> web.Response:
        """GET /v1/evacuations."""
        self._require_ready()
        return _json(
            list_evacuations(
                self.store.evacuating(), self.stuck, self.store.load(), self.clock(), self.health
            )
        )

    async def answer_status(self, _request: web.Request) -> web.Response:
        """GET /v1/status."""
        now = self.clock()
        blocked = self.blocked.read(None, now).entries if self.health.ready else []
        status = describe_status(
            self.health, vmis=self.store.nodes.total(), blocked=blocked, now=now
        )
        status.ready = status.ready and not self.closing
        return _json(status)

    async def answer_metrics(self, request: web.Request) -> web.Response:
        """GET /metrics."""
        accept = ",".join(request.headers.getall(hdrs.ACCEPT, []))
        parts, content_type = await self.render_metrics(accept)
        response = web.Response(body=_Parts(parts, content_type))
        if request.method == hdrs.METH_GET:  # to a HEAD aiohttp would send the end of the body
            response.enable_compression()
        return response

    async def answer_livez(self, _request: web.Request) -> web.Response:
        """GET /livez."""
        return web.Response(text="ok\n")

    async def answer_readyz(self, _request: web.Request) -> web.Response:
        """GET /readyz."""
        self._require_ready()
        return web.Response(text="ok\n")

    async def answer_openapi(self, _request: web.Request) -> web.Response:
        """GET /openapi.json."""
        return _json(write_openapi())

    async def answer_page(self, request: web.Request, *, named: bool, linked: bool) -> web.Response:
        """GET /. `named`: it tells of single VMs; `linked`: it links to the API."""
        now = self.clock()
        scene = Scene(
            store=self.store,
            health=self.health,
            policy=self.policy,
            stuck=self.stuck,
            blocked=self.blocked.read(None, now).entries if self.health.ready else [],
            held_evictions=self.counters.held_evictions,
            closing=self.closing,
        )
        board = set_up(scene, read_wish(request.query), now, named=named)
        # Others are answered before it is rendered: a board does not change any more.
        await asyncio.sleep(0)
        response = web.Response(
            text=render_page(board, linked=linked),
            content_type="text/html",
            charset="utf-8",
            headers=PAGE_HEADERS,
        )
        response.enable_compression()
        return response

    def _require_ready(self) -> None:
        if self.closing or not self.health.ready:
            waiting = ", ".join(self.health.waiting_for())
            raise Refusal(
                503,
                "Shutting down" if self.closing else "Not synced yet",
                "this process is ending" if self.closing else f"waiting for {waiting}",
                {hdrs.RETRY_AFTER: str(RETRY_AFTER)},
            )

    def _judge(
        self, asked: VerdictRequest, candidates: list[Candidate], now: Instant
    ) -> list[VerdictAnswer]:
        """All in one loop, because of 1,000 candidates each call that is made for each counts."""
        find, policy, checkpoint = self.store.evidence, self.policy, asked.checkpoint
        dead = self.health.find_dead(now)
        answers = []
        for candidate in candidates:
            namespace, name, uid = candidate.namespace, candidate.name, candidate.vmi_uid
            evidence = find(namespace, name)
            if evidence is None:
                verdict = not_ours(Mismatch.UNKNOWN)
            elif uid and uid != evidence.vmi.uid:
                verdict = not_ours(Mismatch.UID)
            else:
                dead_here = dead.of(namespace)
                verdict = decide(evidence, policy, now, checkpoint=checkpoint, dead=dead_here)
            if not asked.dry_run and (verdict.reason is not None or not verdict.known):
                self._count(candidate, evidence, verdict, now)
            answers.append(write_verdict(namespace, name, verdict, now))
        return answers

    def _count(
        self, candidate: Candidate, evidence: Evidence | None, verdict: Verdict, now: Instant
    ) -> None:
        if verdict.mismatch is not None:
            self.counters.unknown_candidates[verdict.mismatch] += 1
        if verdict.reason is None or evidence is None:
            return
        vmi = evidence.vmi
        self.counters.count_block(
            verdict.reason, vmi.node, vmi.namespace, verdict.effective_cooldown, now=now
        )
        key = (vmi.namespace, vmi.name, verdict.reason)
        if now - self._logged.get(key, 0.0) < BLOCKS_LOGGED_EVERY:
            return
        self._logged.pop(key, None)
        self._logged[key] = now
        if len(self._logged) > BLOCKS_REMEMBERED:
            del self._logged[next(iter(self._logged))]
        log.info(
            "eviction_blocked",
            namespace=vmi.namespace,
            name=vmi.name,
            node=vmi.node,
            pod=candidate.pod,
            reason=str(verdict.reason),
            not_before=write_optional_release(verdict.not_before),
        )


def make_query_app(service: Service, access: Access | None = None) -> web.Application:
    """The application of the query listener: every route, for whom `access` lets pass."""
    page = partial(service.answer_page, named=True, linked=True)
    return _make_app(service, access, page, lambda _name: True)


def make_metrics_app(
    service: Service, access: Access | None = None, *, page: bool = False
) -> web.Application:
    """The application of the metrics listener: metrics, probes and the page.

    With `page` that tells of single VMs even to those who were not asked who they are.
    """
    shown = partial(service.answer_page, named=page or access is not None, linked=False)
    return _make_app(service, access, shown, METRICS_LISTENER.__contains__)


def _make_app(
    service: Service, access: Access | None, page: Handler, serves: Callable[[str], bool]
) -> web.Application:
    app = web.Application(
        middlewares=[answering_problems(service.counters)],
        client_max_size=service.limits.body_bytes,
    )
    handlers: dict[str, Handler] = {
        "verdicts": service.answer_verdicts,
        "blocked": service.answer_blocked,
        "vmi": service.answer_vmi,
        "evacuations": service.answer_evacuations,
        "status": service.answer_status,
        "metrics": service.answer_metrics,
        "livez": service.answer_livez,
        "readyz": service.answer_readyz,
        "openapi": service.answer_openapi,
        "page": page,
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


def timed_handler(name: str, handler: Handler, counters: Counters) -> Handler:
    """The handler, with the duration of each request counted under `name`."""

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
                request.headers.get(hdrs.AUTHORIZATION), request.method, request.path
            )
        except Unauthenticated as refusal:
            challenge: dict[str, str] = {hdrs.WWW_AUTHENTICATE: "Bearer"}
            raise Refusal(401, "Who are you?", str(refusal), challenge) from None
        except Forbidden as refusal:
            raise Refusal(403, "Not allowed", str(refusal)) from None
        except CannotTell as trouble:
            retry: dict[str, str] = {hdrs.RETRY_AFTER: str(RETRY_AFTER)}
            raise Refusal(503, "Nobody to ask", str(trouble), retry) from None
        return await handler(request)

    return guarded


def answering_problems(counters: Counters) -> Middleware:
    """Middleware that turns refusals and errors into problem+json, and counts them."""

    @web.middleware
    async def answer_problems(request: web.Request, handler: Handler) -> web.StreamResponse:
        response = await _answer(request, handler)
        if response.status >= 400:
            counters.refused_requests[response.status] += 1
        return response

    return answer_problems


async def _answer(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except Refusal as refusal:
        return answer_problem(refusal.problem, refusal.headers)
    except web.HTTPException as error:
        if error.status < 400:
            raise
        headers: dict[str, str] = {}
        if hdrs.ALLOW in error.headers:
            headers[hdrs.ALLOW] = error.headers[hdrs.ALLOW]
        detail = _DETAILS.get(error.status, error.reason)
        return answer_problem(
            Problem(title=error.reason, status=error.status, detail=detail), headers
        )
    except Exception:
        log.exception("request_failed", method=request.method, path=request.path)
        return answer_problem(
            Problem(
                title="Internal error",
                status=500,
                detail="the exporter failed to answer this; its log says why",
            )
        )


_DETAILS = {
    404: "there is no such endpoint; /openapi.json lists those of the query listener",
    405: "this endpoint does not take that method; see the Allow header",
}


def _write_blocked(blocked: Blocked, now: Instant) -> list[bytes]:
    """A `BlockedAnswer` as JSON; only what comes before its entries, which end it, is new."""
    empty = BlockedAnswer(
        as_of=write_instant(now), stale=blocked.stale, max_age_seconds=MAX_AGE, blocked=[]
    )
    return [msgspec.json.encode(empty).removesuffix(b"[]}"), blocked.encoded, b"}"]


def _json(answer: object, headers: Mapping[str, str] | None = None) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(answer), content_type="application/json", headers=headers
    )


async def read_body(request: web.Request, limits: Limits) -> bytes:
    """The whole body. Raises `Refusal` where it is too large, too slow or broken."""
    try:
        if request.content.is_eof():
            # What has come with the head is not waited for: a timeout takes 7 of the 30 us.
            return await request.read()
        async with asyncio.timeout(limits.request_timeout):
            return await request.read()
    except TimeoutError:
        raise Refusal(
            408,
            "Too slow",
            f"the body did not come within {limits.request_timeout:g} s (limits.requestTimeout)",
            {hdrs.CONNECTION: "close"},
        ) from None
    except web.HTTPRequestEntityTooLarge:
        raise Refusal(
            413,
            "Body too large",
            f"the body may have {limits.body_bytes} bytes at most (limits.bodyBytes)",
        ) from None
    except web.RequestPayloadError:
        raise Refusal(
            400, "Broken body", "the body is not encoded as the request's headers say"
        ) from None


def _decode(body: bytes) -> VerdictRequest:
    try:
        return _requests.decode(body)
    except msgspec.ValidationError as error:
        detail = str(error)
        if detail.startswith("Invalid enum value"):
            # It does not say what is valid; the checkpoint is the only enum of a request.
            detail += f": expected {_CHECKPOINTS}"
        raise Refusal(422, "Not a verdict request", detail) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Refusal(400, "Not JSON", f"the body is not JSON: {error}") from None


def _read_checkpoint(request: web.Request) -> Checkpoint | None:
    value = request.query.get("checkpoint")
    if value is None:
        return None
    try:
        return Checkpoint(value)
    except ValueError:
        raise Refusal(422, "No such checkpoint", f"checkpoint: expected {_CHECKPOINTS}") from None


def _read_wait(request: web.Request) -> Seconds:
    value = request.query.get("wait")
    if value is None:
        return 0.0
    expected = f"wait: expected seconds from 0 to {LONGEST_WAIT:g}"
    if not _SECONDS.fullmatch(value):
        raise Refusal(422, "Not a number of seconds", expected)
    wait = float(value)
    if not 0 <= wait <= LONGEST_WAIT:
        raise Refusal(422, "Out of range", expected)
    return wait


def _if_none_match(request: web.Request) -> list[str]:
    return ",".join(request.headers.getall(hdrs.IF_NONE_MATCH, [])).split(",")
