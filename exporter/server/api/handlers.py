"""The HTTP handlers of the query API, the metrics and the probes.

Answers are computed from the store at request time; only the blocked set is cached. Every error is
a problem+json (RFC 9457) that says what was expected.
"""

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter

import msgspec
from aiohttp import hdrs, web

from exporter.counters import Counters
from exporter.engine.evacuations.conditions import Conditions, read_conditions
from exporter.engine.evacuations.drain import (
    Forecast,
    OutcomeCount,
    Snapshot,
    forecast_node,
    forecast_nodes,
    sum_outcomes,
    take_snapshot,
)
from exporter.engine.evacuations.drain_outcomes import DrainOutcome, find_duration
from exporter.engine.facts.changes import Key
from exporter.engine.facts.model import Checkpoint, Instant, Seconds, Vmi
from exporter.engine.facts.policy import Policy, Reason, StuckPolicy, Verdict
from exporter.engine.store.store import Store
from exporter.engine.verdicts.rules import list_reasons
from exporter.engine.verdicts.view import VerdictView
from exporter.health import Health
from exporter.server.api.answers import (
    EvacuationList,
    describe_drain,
    describe_status,
    list_nodes,
)
from exporter.server.api.blocked_set import BlockedSet
from exporter.server.api.evacuation_schemas import DrainAnswer, EvacuationsAnswer
from exporter.server.api.explanation import explain_vmi
from exporter.server.api.judge import Judge
from exporter.server.api.long_polls import LongPolls
from exporter.server.api.openapi import write_openapi
from exporter.server.api.requests import (
    accepts_gzip,
    read_asked_name,
    read_body,
    read_checkpoint,
    read_etags,
    read_name,
    read_wait,
)
from exporter.server.api.schemas import (
    BlockedAnswer,
    StatusAnswer,
    VmiAnswer,
    VmisAnswer,
)
from exporter.server.fields import LONGEST_NAME, LONGEST_NAMESPACE
from exporter.server.http.answers import Parts, Repeatable
from exporter.server.http.problems import RETRY_SOON, Refusal
from exporter.settings import Limits, Links
from exporter.tasks import run_in_slices
from exporter.text import to_datetime


MAX_AGE: Seconds = 90.0
"""How long a caller may use a copy of the blocked set. No long poll lasts that long."""
SHARED_FROM = 2**12
"""Answers share an encoded blocked set of at least this many bytes. A smaller one is copied."""
SLICE = 500
"""How many VMIs are read without yielding. This takes 2 ms if all of them have migrated."""
DIAGNOSED = 10
"""How many VMIs are diagnosed without yielding. This takes 1 ms."""


@dataclass
class Service:
    """The handlers and what they share.

    `answer_NAME` handles the route NAME of `openapi.ROUTES`. `render_metrics` is
    `Exposition.render`. `record_blocked`, if set, is called for each blocked eviction.
    """

    store: Store
    view: VerdictView
    health: Health
    counters: Counters
    policy: Policy
    stuck: StuckPolicy
    limits: Limits
    clock: Callable[[], Instant]
    render_metrics: Callable[..., Awaitable[tuple[list[bytes], str]]]
    record_blocked: Callable[[Vmi, Verdict, Instant], None] | None = None
    links: Links = field(default_factory=Links)
    closing: bool = False
    started_at: Instant = field(init=False)
    blocked: BlockedSet = field(init=False)
    polls: LongPolls = field(init=False)
    judge: Judge = field(init=False)

    def __post_init__(self) -> None:
        self.started_at = self.clock()
        self.blocked = BlockedSet(self.view, self.health, self.clock)
        self.polls = LongPolls(self.blocked, self.counters.task_failures)
        self.judge = Judge(
            self.view,
            self.health,
            self.counters,
            self.limits,
            self.clock,
            self.read_conditions,
            self.record_blocked,
        )

    def close(self) -> None:
        """Answer all long polls now, and refuse later requests.

        Admission reviews are still answered, but each answer closes its connection.
        """
        self.closing = True
        self.polls.close()

    async def answer_verdicts(self, request: web.Request) -> web.Response:
        """POST /v1/verdicts."""
        self._require_ready()
        answer = self.judge.answer(await read_body(request, self.limits))
        again = partial(self._answer_again, "verdicts", self.judge.answer)
        return Repeatable(again, body=answer, content_type="application/json")

    def _answer_again(
        self, name: str, write: Callable[[bytes], bytes | None], body: bytes
    ) -> bytes | None:
        """The body of the next answer of an endpoint, see `Repeatable`. Counts the request."""
        began = perf_counter()
        if self.closing or not self.health.ready:
            return None
        answer = write(body)
        if answer is not None:
            self.counters.count_request(name, perf_counter() - began)
        return answer

    async def answer_blocked(self, request: web.Request) -> web.Response:
        """GET /v1/blocked."""
        self._require_ready()
        checkpoint = read_checkpoint(request)
        wait = read_wait(request)
        known = read_etags(request)
        blocked = await self.blocked.read(checkpoint)
        if wait and blocked.etag in known:
            blocked = await self.polls.wait(checkpoint, blocked.etag, wait)
        headers: dict[str, str] = {hdrs.ETAG: blocked.etag, hdrs.CACHE_CONTROL: "no-cache"}
        if blocked.etag in known or "*" in known:
            if wait:
                return web.Response(status=304, headers=headers)
            write = partial(self._write_unchanged, checkpoint, blocked.etag)
            again = partial(self._answer_again, "blocked", write)
            return Repeatable(again, status=304, headers=headers)
        empty = BlockedAnswer(
            as_of=to_datetime(self.clock()),
            stale=blocked.stale,
            max_age_seconds=MAX_AGE,
            blocked=[],
        )
        # The entries come last, and are encoded once for all callers.
        parts = [msgspec.json.encode(empty).removesuffix(b"]}"), *blocked.encoded, b"]}"]
        if sum(map(len, parts)) < SHARED_FROM:
            return web.Response(
                body=b"".join(parts), content_type="application/json", headers=headers
            )
        return web.Response(body=Parts(parts, "application/json", shared=True), headers=headers)

    def _write_unchanged(
        self, checkpoint: Checkpoint | None, etag: str, _body: bytes
    ) -> bytes | None:
        """The body of a 304, which has none; None if the blocked set is another one now."""
        blocked = self.blocked.find_current(checkpoint)
        return b"" if blocked is not None and blocked.etag == etag else None

    async def answer_vmis(self, request: web.Request) -> web.Response:
        """GET /v1/vmis?name=NAME."""
        self._require_ready()
        name = read_asked_name(request)
        namespaces = sorted(namespace for namespace, vmi in self.store.keys() if vmi == name)  # noqa: SIM118 (a Store is no mapping)
        return _json(VmisAnswer(namespaces=namespaces))

    async def answer_vmi(self, request: web.Request) -> web.Response:
        """GET /v1/vmis/{namespace}/{name}."""
        return _json(self.explain(request))

    def explain(self, request: web.Request) -> VmiAnswer:
        """Everything known about the VMI in the path. Raises `Refusal`."""
        self._require_ready()
        namespace, name = (
            read_name(request, "namespace", LONGEST_NAMESPACE),
            read_name(request, "name", LONGEST_NAME),
        )
        answer = self.describe_vmi(namespace, name, self.clock())
        if answer is None:
            raise Refusal(404, "No such VMI", f"no VMI {name!r} in namespace {namespace!r}")
        return answer

    def describe_vmi(self, namespace: str, name: str, now: Instant) -> VmiAnswer | None:
        """Everything known about one VMI, or None if there is no such VMI."""
        conditions = self.read_conditions(now)
        entry = self.view.read(now, conditions.trust).find(namespace, name)
        if entry is None:
            return None
        vmi = entry.evidence.vmi
        return explain_vmi(
            entry,
            self.policy,
            conditions,
            self.health,
            why=self.store.reasons(vmi),
            blocked_evictions=self.counters.blocked_evictions.of(vmi.uid),
        )

    async def describe_vmis(self, keys: Iterable[Key]) -> dict[Key, VmiAnswer]:
        """`describe_vmi` for those of these VMIs that exist. Other tasks run after each VMI, so
        each is described at an instant of its own.
        """
        answers = {}
        for key in keys:
            answer = self.describe_vmi(*key, self.clock())
            if answer is not None:
                answers[key] = answer
            await asyncio.sleep(0)
        return answers

    async def answer_evacuations(self, _request: web.Request) -> web.Response:
        """GET /v1/evacuations."""
        self._require_ready()
        return _json(await self.describe_evacuations(await self.take_snapshot()))

    async def take_snapshot(self) -> Snapshot:
        """What decides the drain outcomes of all VMIs now."""
        now, verdicts = await self.blocked.read_all()
        return take_snapshot(self.store, self.read_conditions(now), verdicts.list_unsettled())

    async def describe_evacuations(self, snapshot: Snapshot) -> EvacuationsAnswer:
        """Every evacuation with its diagnosis, and every other stuck move."""
        evacuations = EvacuationList(snapshot, self.health, reasons=self.store.reasons)
        await run_in_slices(evacuations, most=DIAGNOSED)
        return evacuations.answer()

    async def count_outcomes(self, snapshot: Snapshot) -> OutcomeCount:
        """The drain outcomes of all VMIs."""
        count = OutcomeCount(snapshot)
        await run_in_slices(count, most=DIAGNOSED)
        return count

    async def forecast_nodes(
        self, count: OutcomeCount, durations: Mapping[str, list[Seconds]]
    ) -> list[Forecast]:
        """The forecast of every node with VMIs, sorted by name."""
        forecasts: list[Forecast] = []
        work = map(forecasts.append, forecast_nodes(count, durations))
        await run_in_slices(work, most=DIAGNOSED)
        return forecasts

    async def answer_nodes(self, _request: web.Request) -> web.Response:
        """GET /v1/nodes."""
        self._require_ready()
        durations = await self._read_durations()
        count = await self.count_outcomes(await self.take_snapshot())
        now = count.snapshot.conditions.now
        forecasts = await self.forecast_nodes(count, durations)
        # A generator, because `list_nodes` reads it only if a namespace cannot be read any more.
        namespaces = (namespace for namespace, _ in self.store.keys())  # noqa: SIM118 (a Store is no mapping)
        return _json(list_nodes(forecasts, namespaces, now, self.health))

    async def answer_node(self, request: web.Request) -> web.Response:
        """GET /v1/nodes/{node}."""
        self._require_ready()
        node = read_name(request, "node", LONGEST_NAME)
        answer = self.describe_node(node, self.clock())
        if not answer.vmis and not answer.outlived:
            raise Refusal(404, "No such node", f"no VMI is on a node {node!r}")
        return _json(answer)

    def describe_node(self, node: str, now: Instant) -> DrainAnswer:
        """What a drain of a node would do to each of its VMs."""
        conditions = self.read_conditions(now)
        return describe_drain(*forecast_node(self.store, node, conditions), conditions, self.health)

    async def answer_status(self, _request: web.Request) -> web.Response:
        """GET /v1/status."""
        snapshot = await self.take_snapshot()
        verdicts = self.view.read(snapshot.conditions.now, snapshot.conditions.trust)
        ready = self.health.ready
        blocked = verdicts.summarize().count_by_reason() if ready else dict[Reason, int]()
        count = await self.count_outcomes(snapshot)
        return _json(self.describe_status(blocked, count.counts, snapshot.conditions.now))

    def describe_status(
        self,
        blocked: Mapping[Reason, int],
        outcomes: Mapping[str, Mapping[DrainOutcome, int]],
        now: Instant,
    ) -> StatusAnswer:
        """The exporter's health and VMI counts.

        `blocked` has the number of blocked VMIs by reason, `outcomes` the drain outcomes by node.
        """
        status = describe_status(
            self.health,
            vmis=self.store.nodes.total(),
            drain=sum_outcomes(outcomes),
            blocked=blocked,
            reasons=list_reasons(self.policy),
            prevented=self.counters.prevented,
            started_at=self.started_at,
            now=now,
        )
        status.ready = status.ready and not self.closing
        return status

    async def answer_metrics(self, request: web.Request) -> web.Response:
        """GET /metrics."""
        accept = ",".join(request.headers.getall(hdrs.ACCEPT, []))
        gzip = accepts_gzip(request)
        parts, content_type = await self.render_metrics(accept, gzip=gzip)
        headers = {hdrs.CONTENT_ENCODING: "gzip"} if gzip else None
        return web.Response(body=Parts(parts, content_type), headers=headers)

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

    def read_conditions(self, now: Instant) -> Conditions:
        """The conditions at `now` on which every diagnosis and drain outcome depends."""
        return read_conditions(self.store, self.stuck, self.health.read_trust(now), now)

    async def _read_durations(self) -> dict[str, list[Seconds]]:
        """The results of `find_duration` for all VMIs, by node; yields after each slice.

        A VMI that changes meanwhile is read before or after its change. Both are good enough for a
        lower bound.
        """
        durations, trust = defaultdict(list), self.health.read_trust(self.clock())
        for count, key in enumerate(list(self.store.keys())):
            if count % SLICE == 0:
                await asyncio.sleep(0)
            evidence = self.store.evidence(*key, trust)
            if evidence is None or evidence.vmi.finished or not evidence.history:
                continue
            duration = find_duration(evidence, self.store.kubevirt)
            if duration is not None:
                durations[evidence.vmi.node].append(duration)
        return durations

    def _require_ready(self) -> None:
        if self.closing:
            raise Refusal(503, "Shutting down", "this process is shutting down", RETRY_SOON)
        if not self.health.ready:
            waiting = ", ".join(self.health.waiting_for())
            raise Refusal(503, "Not synced yet", f"waiting for {waiting}", RETRY_SOON)


def _json(answer: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(answer), content_type="application/json")
