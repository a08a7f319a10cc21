"""Turns KubeVirt's migration metrics in Prometheus into recorded events.

This is for clusters without a recording. KubeVirt's gauges have each VM's last migration
(`vmistats_collector.go`) and the existing VMIMs by outcome (`migrationstats_collector.go`). A range
query over them shows when each migration began and ended. `REMARKS` says what they lack. Where
they leave a gap, these rules fill it:

- An evacuation is a migration that KubeVirt named `kubevirt-evacuation-...`. Its request is the
  start of its first migration, or the first sample of its first failed attempt. If it runs when
  the range begins, it was requested before that, and no policy decides about it.
- It goes on after a failure, because KubeVirt tries again. It is over if no attempt follows within
  `RETRIED_WITHIN`.
- A migration without an end ended at its last sample, at an unknown instant.
"""

import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path

import aiohttp
import msgspec
from msgspec import Struct
from msgspec.structs import replace

from exporter.credentials import (
    UnsafeUrl,
    UnusableFile,
    check_url,
    make_ssl_context,
    read_token,
)
from exporter.engine.changes import Key
from exporter.engine.model import (
    Instant,
    MigrationState,
    Outcome,
    Resource,
    Seconds,
    Trigger,
    Vmi,
    Vmim,
)
from exporter.text import write_instant
from exporter.whatif.recording import Kind, Recorded


STARTS = "kubevirt_vmi_migration_start_time_seconds"
ENDS = "kubevirt_vmi_migration_end_time_seconds"
SUCCEEDED = "kubevirt_vmi_migration_succeeded"
FAILED = "kubevirt_vmi_migration_failed"
METRICS = (STARTS, ENDS, SUCCEEDED, FAILED)

MAX_POINTS = 1_000
"""Points per series and query, to bound memory; Prometheus allows 11,000."""
TIMEOUT: Seconds = 120.0
RETRIED_WITHIN: Seconds = 900.0
"""KubeVirt waits at most 320 s between attempts (it keeps five failures), and an attempt that finds
no node lasts 300 s."""
KEPT_VMIMS = 5
"""How many finished VMIMs KubeVirt keeps per VM."""

_EXPECTED = "expected http://HOST:PORT or https://HOST:PORT"
_EVACUATION = "kubevirt-evacuation-"
_WORKLOAD_UPDATE = "kubevirt-workload-update-"

REMARKS = (
    """\
Played from Prometheus, which knows less than a recording:
- The source of an evacuation is unknown: each counts as the descheduler's, drains too.
- The time of its request is unknown: it counts from the start of its first migration, or from the
  first sample of an attempt that failed before it began.
- VMs are known by name only: a recreated VM counts as the old one, a VM that never migrated is
  missing, and so may be a migration shorter than the step.""",
)


class QueryFailed(Exception):
    """Prometheus did not answer, or not with data; the message says why."""


@dataclass(frozen=True)
class Prometheus:
    """The address of a Prometheus, with a token and a CA; `cluster`: the value of that label."""

    url: str
    cluster: str | None = None
    token_file: Path | None = None
    ca_file: Path | None = None


@dataclass
class Span:
    """One migration in the metrics; `vm` is the VM's name, `node` a node that it was on.

    `seen_at` and `last_seen_at` are its first and last sample.
    """

    namespace: str
    name: str
    vm: str
    seen_at: Instant
    last_seen_at: Instant
    node: str = ""
    start: Instant | None = None
    end: Instant | None = None
    outcome: Outcome = Outcome.UNKNOWN

    @property
    def evacuates(self) -> bool:
        """Whether KubeVirt's evacuation controller created it."""
        return self.name.startswith(_EVACUATION)

    @property
    def trigger(self) -> Trigger:
        """Why it was created, according to its name."""
        if self.evacuates:
            return Trigger.EVACUATION
        is_update = self.name.startswith(_WORKLOAD_UPDATE)
        return Trigger.WORKLOAD_UPDATE if is_update else Trigger.MANUAL


Spans = dict[Key, Span]


class _Series(Struct):
    metric: dict[str, str]
    values: list[tuple[float, str]]


class _Data(Struct, frozen=True):
    result: list[_Series] = []


class _QueryAnswer(Struct):
    status: str
    data: _Data = _Data()
    error: str = ""


def cut_windows(began: Instant, ended: Instant, step: Seconds) -> Iterator[tuple[Instant, Instant]]:
    """Cut the range into windows of at most `MAX_POINTS` points, without overlap."""
    at = began
    while at <= ended:
        until = min(at + (MAX_POINTS - 1) * step, ended)
        yield at, until
        at = until + step


async def fetch(
    prometheus: Prometheus,
    began: Instant,
    ended: Instant,
    *,
    step: Seconds,
    progress: Callable[[Instant], None] = lambda _now: None,
) -> Spans:
    """Read every migration of that time.

    `progress` is called with the instant read so far. Raises `QueryFailed`, also if there are
    several clusters and none is chosen: their VMs may have the same names.
    """
    spans: Spans = {}
    clusters: set[str] = set()
    chosen = "" if prometheus.cluster is None else f"{{cluster={_quote(prometheus.cluster)}}}"
    timeout = aiohttp.ClientTimeout(total=TIMEOUT)
    try:
        check_url(prometheus.url, _EXPECTED, with_token=prometheus.token_file is not None)
        context = make_ssl_context(prometheus.ca_file)
        headers = read_token(prometheus.token_file)
    except (UnsafeUrl, UnusableFile) as trouble:
        raise QueryFailed(str(trouble)) from None
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(ssl=context), headers=headers, timeout=timeout
    ) as session:
        for since, until in cut_windows(began, ended, step):
            for metric in METRICS:
                fields = {
                    "query": metric + chosen,
                    "start": write_instant(since),
                    "end": write_instant(until),
                    "step": f"{step:g}",
                }
                for series in await _ask(session, prometheus.url, fields):
                    clusters.add(series.metric.get("cluster", ""))
                    note_series(spans, metric, series.metric, series.values)
            if len(clusters) > 1:
                names = ", ".join(map(_quote, sorted(clusters)))
                raise QueryFailed(
                    f"{prometheus.url} has several clusters ({names}): choose one with --cluster"
                )
            progress(until)
    if not spans:
        raise QueryFailed(
            f"{prometheus.url} has no kubevirt_vmi_migration_* between {write_instant(began)} and"
            f" {write_instant(ended)}: does it scrape KubeVirt?"
        )
    return spans


def note_series(
    spans: Spans, metric: str, labels: Mapping[str, str], values: list[tuple[float, str]]
) -> None:
    """Add one series of one window; windows come in order."""
    namespace = labels.get("exported_namespace") or labels.get("namespace", "")
    by_vmim = metric in (SUCCEEDED, FAILED)
    name = labels.get("vmim" if by_vmim else "migration_name", "")
    vm = labels.get("vmi" if by_vmim else "name", "")
    if not name or not vm or not values:
        return
    seen_at, last_seen_at = values[0][0], values[-1][0]
    span = spans.setdefault((namespace, name), Span(namespace, name, vm, seen_at, last_seen_at))
    span.seen_at = min(span.seen_at, seen_at)
    span.last_seen_at = max(span.last_seen_at, last_seen_at)
    if metric == STARTS:
        span.start = _number(values[-1][1])
        span.node = span.node or labels.get("node", "")
    elif metric == ENDS:
        span.end = _number(values[-1][1])
        span.outcome = max(span.outcome, _STATUSES.get(labels.get("status", ""), span.outcome))
    elif any(_number(value) for _, value in values):
        found = Outcome.FAILED if metric == FAILED else Outcome.SUCCEEDED
        span.outcome = max(span.outcome, found)


def to_events(spans: Spans, began: Instant, ended: Instant) -> Iterator[Recorded]:
    """The events of these migrations from `began` to `ended`, in order."""
    by_vm: dict[Key, list[Span]] = {}
    for span in spans.values():
        by_vm.setdefault((span.namespace, span.vm), []).append(span)
    histories = [_VmHistory(key, by_vm[key], began, ended) for key in sorted(by_vm)]
    for history in histories:
        yield from history.first_list()
    yield Recorded(began, Kind.SYNCED, Resource.VMIS)
    yield Recorded(began, Kind.SYNCED, Resource.VMIMS)
    yield from heapq.merge(*(history.events() for history in histories), key=lambda event: event.at)
    yield Recorded(ended, Kind.ENDED)


@dataclass
class _VmHistory:
    """The migrations of one VM, and the VMI and VMIMs as they change."""

    key: Key
    spans: list[Span]
    began: Instant
    ended: Instant
    vmi: Vmi = field(init=False)
    vmims: list[str] = field(default_factory=list)
    running: Span | None = None

    def __post_init__(self) -> None:
        namespace, name = self.key
        self.spans.sort(key=lambda span: (_begin_of(span), span.name))
        node = next((span.node for span in self.spans if span.node), "")
        self.vmi = Vmi(
            namespace=namespace,
            name=name,
            uid=f"{namespace}/{name}",
            node=node,
            eviction_strategy="LiveMigrate",
            migratable=True,
        )

    def first_list(self) -> Iterator[Recorded]:
        """The objects that exist when the range begins."""
        for span in self._spans_before():
            self.vmims.append(span.name)
            yield self._event(self.began, _vmim(span, ended=True), Kind.ADDED)
            self.vmi = replace(self.vmi, migration=_state(span, ended=True))
        running = self._find_running()
        if running is not None and running.evacuates:
            self.vmi = self._mark(running)
        if running is not None and self._began_before(running):
            self.running = running
            yield self._event(self.began, self._with_node(_vmim(running, ended=False)), Kind.ADDED)
            self.vmi = replace(self.vmi, migration=_state(running, ended=False))
        yield self._event(self.began, self.vmi, Kind.ADDED)

    def events(self) -> Iterator[Recorded]:
        """The changes after that."""
        before = self._spans_before()
        spans = [span for span in self.spans if span not in before]
        for span, following in zip_longest(spans, spans[1:]):
            begins, ends = _begin_of(span), self._end_of(span)
            if begins > self.ended:
                return
            if span.evacuates and not self.vmi.evacuation_node:
                yield self._put(begins, self._mark(span))
            if span.start is not None and span is not self.running:
                yield self._event(begins, self._with_node(_vmim(span, ended=False)), Kind.ADDED)
                yield self._put(begins, replace(self.vmi, migration=_state(span, ended=False)))
            if ends is None:
                return
            yield from self._finish(span, ends)
            over_at = ends + RETRIED_WITHIN
            if self.vmi.evacuation_node and (
                following is None or not following.evacuates or _begin_of(following) > over_at
            ):
                if over_at > self.ended:
                    return
                until = over_at if following is None else min(over_at, _begin_of(following))
                yield self._put(until, replace(self.vmi, evacuation_node=""))

    def _finish(self, span: Span, ends: Instant) -> Iterator[Recorded]:
        """The migration ended: its VMIM is final, and if handed off, the VMI says so."""
        yield self._event(ends, self._with_node(_vmim(span, ended=True)), Kind.MODIFIED)
        changed = self.vmi
        if span.start is not None:
            changed = replace(changed, migration=_state(span, ended=True))
        if span.outcome is not Outcome.FAILED:
            changed = replace(changed, evacuation_node="")
        yield self._put(ends, changed)
        self.vmims.append(span.name)
        while len(self.vmims) > KEPT_VMIMS:
            yield Recorded(
                ends,
                Kind.DELETED,
                Resource.VMIMS,
                namespace=span.namespace,
                name=self.vmims.pop(0),
            )

    def _spans_before(self) -> list[Span]:
        """The migrations that ended before the range begins."""
        return [
            span
            for span in self.spans
            if (span.seen_at if span.start is None else span.end or math.inf) <= self.began
        ]

    def _find_running(self) -> Span | None:
        """The migration that runs when the range begins, or the next attempt of its evacuation."""
        before = self._spans_before()
        span = next((span for span in self.spans if span not in before), None)
        if span is None or self._began_before(span):
            return span
        last = before[-1] if before else None
        if last is None or last.end is None or last.outcome is not Outcome.FAILED:
            return None
        is_retry = last.evacuates and span.evacuates
        return span if is_retry and _begin_of(span) <= last.end + RETRIED_WITHIN else None

    def _began_before(self, span: Span) -> bool:
        return span.start is not None and span.start < self.began

    def _mark(self, span: Span) -> Vmi:
        """The VMI with the evacuation's marker."""
        node = span.node or self.vmi.node or "unknown"
        return replace(self.vmi, evacuation_node=node, node=node)

    def _end_of(self, span: Span) -> Instant | None:
        """When the migration ended, None if it still runs."""
        if span.end is not None:
            return max(span.end, _begin_of(span))
        if span.start is None:
            return span.seen_at
        return None if span.last_seen_at >= self.ended else span.last_seen_at

    def _with_node(self, vmim: Vmim) -> Vmim:
        """An evacuation VMIM names the marker's node."""
        return replace(vmim, evacuates=self.vmi.evacuation_node) if vmim.evacuates else vmim

    def _put(self, at: Instant, vmi: Vmi) -> Recorded:
        self.vmi = vmi
        return self._event(at, vmi, Kind.MODIFIED)

    @staticmethod
    def _event(at: Instant, fact: Vmi | Vmim, kind: Kind) -> Recorded:
        resource = Resource.VMIS if isinstance(fact, Vmi) else Resource.VMIMS
        return Recorded(at, kind, resource, fact)


def _vmim(span: Span, *, ended: bool) -> Vmim:
    phase = "Running"
    if ended:
        phase = "Failed" if span.outcome is Outcome.FAILED else "Succeeded"
    return Vmim(
        namespace=span.namespace,
        name=span.name,
        uid=f"{span.namespace}/{span.name}",
        vmi_name=span.vm,
        created=_begin_of(span),
        phase=phase,
        finished=ended,
        finished_at=(span.seen_at if span.start is None else span.end) if ended else None,
        handed_off=span.start is not None,
        start=span.start,
        end=span.end if ended else None,
        outcome=span.outcome if ended else Outcome.UNKNOWN,
        evacuates=span.node if span.evacuates else "",
        trigger=span.trigger,
    )


def _state(span: Span, *, ended: bool) -> MigrationState:
    return MigrationState(
        uid=f"{span.namespace}/{span.name}",
        start=span.start,
        ended=ended,
        end=span.end if ended else None,
        outcome=span.outcome if ended else Outcome.UNKNOWN,
    )


def _begin_of(span: Span) -> Instant:
    return span.seen_at if span.start is None else span.start


_STATUSES = {"succeeded": Outcome.SUCCEEDED, "failed": Outcome.FAILED}


def _quote(text: str) -> str:
    """A string literal of PromQL."""
    return msgspec.json.encode(text).decode()


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if value == value and abs(value) < 1e11 else None  # noqa: PLR0124 (NaN)


async def _ask(
    session: aiohttp.ClientSession, url: str, fields: Mapping[str, str]
) -> Iterable[_Series]:
    where = f"{url.rstrip('/')}/api/v1/query_range"
    try:
        async with session.post(where, data=fields) as response:
            body = await response.read()
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
        raise QueryFailed(f"{where}: {str(error) or type(error).__name__}") from error
    try:
        answer = msgspec.json.decode(body, type=_QueryAnswer)
    except msgspec.MsgspecError:
        raise QueryFailed(f"{where}: {response.status}, no answer of Prometheus's API") from None
    if answer.status != "success":
        raise QueryFailed(f"{where}: {response.status} {answer.error}")
    return answer.data.result
