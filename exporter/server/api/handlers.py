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
import structlog
from aiohttp import hdrs, web

from exporter.counters import Counters
from exporter.engine.evacuations.conditions import Conditions, read_conditions
from exporter.engine.evacuations.diagnosis import Diagnosis, Move
from exporter.engine.evacuations.drain import (
    Forecast,
    OutcomeCount,
    Snapshot,
    find_duration,
    forecast_node,
    forecast_nodes,
    sum_outcomes,
    take_snapshot,
)
from exporter.engine.evacuations.drain_outcomes import DrainOutcome
from exporter.engine.evacuations.outlook import SettledOutcomes, judge
from exporter.engine.facts.changes import Key
from exporter.engine.facts.model import Checkpoint, Instant, Mismatch, Seconds, Vmi
from exporter.engine.facts.policy import Policy, Reason, StuckPolicy, Verdict
from exporter.engine.store.store import Store
from exporter.engine.verdicts.cooldown import mark_cooldown
from exporter.engine.verdicts.rules import list_reasons, not_ours
from exporter.engine.verdicts.view import Entry, VerdictView
from exporter.health import Health
from exporter.logs import Throttle
from exporter.server.api.answers import (
    EvacuationList,
    describe_drain,
    describe_status,
    list_nodes,
    write_verdict,
)
from exporter.server.api.blocked_set import BlockedSet
from exporter.server.api.evacuation_schemas import DrainAnswer, EvacuationsAnswer
from exporter.server.api.explanation import explain_vmi
from exporter.server.api.long_polls import LongPolls
from exporter.server.api.openapi import write_openapi
from exporter.server.api.requests import (
    Candidate,
    VerdictRequest,
    accepts_gzip,
    decode_verdicts,
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
    VerdictAnswer,
    VerdictsAnswer,
    VmiAnswer,
    VmisAnswer,
)
from exporter.server.fields import LONGEST_NAME, LONGEST_NAMESPACE
from exporter.server.http.answers import Parts, Repeatable
from exporter.server.http.problems import RETRY_SOON, Refusal
from exporter.settings import Limits, Links
from exporter.tasks import run_in_slices
from exporter.text import to_datetime, to_optional_datetime, write_optional_release


MAX_AGE: Seconds = 90.0
"""How long a caller may use a copy of the blocked set. No long poll lasts that long."""
SHARED_FROM = 2**12
"""Answers share an encoded blocked set of at least this many bytes. A smaller one is copied."""
BLOCKS_REMEMBERED = 20_000
SLICE = 500
"""How many VMIs are read without yielding. This takes 2 ms if all of them have migrated."""
DIAGNOSED = 10
"""How many VMIs are diagnosed without yielding. This takes 1 ms."""

log = structlog.stdlib.get_logger()


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
    _logged: Throttle = field(default_factory=lambda: Throttle(BLOCKS_REMEMBERED))

    def __post_init__(self) -> None:
        self.started_at = self.clock()
        self.blocked = BlockedSet(self.view, self.health, self.clock)
        self.polls = LongPolls(self.blocked, self.counters.task_failures)

    def close(self) -> None:
        """Answer all long polls now, and refuse later requests.

        Admission reviews are still answered, but each answer closes its connection.
        """
        self.closing = True
        self.polls.close()

    async def answer_verdicts(self, request: web.Request) -> web.Response:
        """POST /v1/verdicts."""
        self._require_ready()
        answer = self._write_verdicts(await read_body(request, self.limits))
        again = partial(self._answer_again, "verdicts", self._write_verdicts)
        return Repeatable(again, body=answer, content_type="application/json")

    def _write_verdicts(self, body: bytes) -> bytes:
        """The answer to a verdict request with this body. Raises `Refusal`."""
        asked = decode_verdicts(body)
        candidates = asked.candidates or []
        if len(candidates) > self.limits.candidates:
            raise Refusal(
                422,
                "Too many candidates",
                f"candidates: got {len(candidates)}, at most {self.limits.candidates} are allowed"
                " (limits.candidates)",
            )
        now = self.clock()
        return msgspec.json.encode(
            VerdictsAnswer(
                as_of=to_datetime(now),
                observed_at=to_optional_datetime(self.health.observed_at),
                stale=self.health.is_stale(now, (candidate.namespace for candidate in candidates)),
                verdicts=self._judge(asked, candidates, now),
            )
        )

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

    def _judge(
        self, asked: VerdictRequest, candidates: list[Candidate], now: Instant
    ) -> list[VerdictAnswer]:
        """Judge all candidates in one loop: 1,000 more function calls would take too long."""
        checkpoint, is_counted = asked.checkpoint, not asked.dry_run
        conditions = self.read_conditions(now)
        settled = SettledOutcomes(conditions)
        find = self.view.read(now, conditions.trust).find
        answers, allowed = [], 0
        for candidate in candidates:
            namespace, name, uid = candidate.namespace, candidate.name, candidate.vmi_uid
            entry = find(namespace, name)
            diagnosis: Diagnosis | Move | None = None
            drain: DrainOutcome | None = None
            if entry is None:
                verdict = not_ours(Mismatch.UNKNOWN)
            elif uid and uid != entry.evidence.vmi.uid:
                verdict = not_ours(Mismatch.UID)
            else:
                verdict, evidence = entry.verdict(checkpoint), entry.evidence
                if entry.settled is not None:
                    drain = settled.judge(evidence, entry.settled)
                else:
                    evacuation = conditions.diagnose(evidence)
                    diagnosis = evacuation or conditions.diagnose_move(evidence)
                    if not evidence.vmi.finished:
                        drain = judge(evidence, conditions, evacuation).outcome
            if verdict.reason is None:
                allowed += 1
            if is_counted and (verdict.reason is not None or not verdict.known):
                self._count(candidate, entry, verdict, now)
            answers.append(
                write_verdict(namespace, name, verdict, now, diagnosis=diagnosis, drain=drain)
            )
        if is_counted:
            self.counters.verdicts[checkpoint, True] += allowed
            self.counters.verdicts[checkpoint, False] += len(candidates) - allowed
        return answers

    def count_blocked(
        self,
        vmi: Vmi,
        verdict: Verdict,
        reason: Reason,
        now: Instant,
        *,
        entry: Entry | None = None,
    ) -> None:
        """Count an eviction that a verdict has blocked, the webhook denied or the responder held.

        `entry` is the VMI's, if the caller has it.
        """
        self.counters.count_block(
            reason, vmi.node, vmi.namespace, verdict.effective_cooldown, now=now
        )
        if entry is None and reason is Reason.COOLDOWN:
            verdicts = self.view.read(now, self.health.read_trust(now))
            entry = verdicts.find(vmi.namespace, vmi.name)
        if reason is Reason.COOLDOWN and entry is not None and entry.cooldown is not None:
            mark = mark_cooldown(entry.evidence, entry.cooldown)
            self.counters.prevented.count(vmi, entry.cooldown, mark)
        if self.record_blocked is not None:
            self.record_blocked(vmi, verdict, now)

    def _count(
        self, candidate: Candidate, entry: Entry | None, verdict: Verdict, now: Instant
    ) -> None:
        if verdict.mismatch is not None:
            self.counters.unknown_candidates[verdict.mismatch] += 1
        if verdict.reason is None or entry is None:
            return
        vmi = entry.evidence.vmi
        self.count_blocked(vmi, verdict, verdict.reason, now, entry=entry)
        if self._logged.lets_through((vmi.namespace, vmi.name, verdict.reason), now):
            log_blocked("eviction_blocked", vmi, verdict, pod=candidate.pod)


def log_blocked(event: str, vmi: Vmi, verdict: Verdict, **request: str | None) -> None:
    """Log an eviction that a rule blocks, or would block."""
    log.info(
        event,
        **request,
        namespace=vmi.namespace,
        name=vmi.name,
        node=vmi.node,
        reason=str(verdict.reason),
        not_before=write_optional_release(verdict.not_before),
    )


def _json(answer: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(answer), content_type="application/json")
