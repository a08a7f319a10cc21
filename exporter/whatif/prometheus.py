"""Turns KubeVirt's migration metrics in Prometheus into recorded events.

This is for clusters without a recording. KubeVirt's gauges have each VM's last migration
(`vmistats_collector.go`) and the existing VMIMs by outcome (`migrationstats_collector.go`). A range
query over them shows when each migration began and ended. `REMARKS` says what the gauges lack.
These rules fill the gaps:

- An evacuation consists of migrations that KubeVirt named `kubevirt-evacuation-...`. It was
  requested at the start of the first one, or at the first sample of the first failed attempt. If an
  evacuation runs when the range begins, it was requested before, and no policy decides about it.
- An evacuation continues after a failure, because KubeVirt tries again. It is over if no attempt
  follows within `RETRIED_WITHIN`.
- A migration without an end ended at its last sample. Such an end starts no cooldown.
"""

import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

import aiohttp
import msgspec
from msgspec import Struct
from msgspec.structs import replace

from exporter.credentials import CannotAsk, check_url, make_ssl_context, read_token
from exporter.engine.facts.changes import Key
from exporter.engine.facts.model import (
    Instant,
    MigrationState,
    Outcome,
    Resource,
    Seconds,
    Trigger,
    Vmi,
    Vmim,
)
from exporter.errors import MALFORMED
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
"""KubeVirt's pause between attempts doubles with each failed VMIM that it keeps. It keeps five, so
the pause is at most 320 s. An attempt that finds no node lasts 300 s."""
KEPT_VMIMS = 5
"""How many finished VMIMs KubeVirt keeps per VM."""

_EXPECTED = "expected http://HOST:PORT or https://HOST:PORT"
_EVACUATION = "kubevirt-evacuation-"
_WORKLOAD_UPDATE = "kubevirt-workload-update-"

REMARKS = (
    """\
Replayed from Prometheus, which has less information than a recording:
- Who requested an evacuation is unknown: every one counts as the descheduler's, even a drain.
- The time of its request is unknown: the start of its first migration counts. If that migration
  failed before it started, its first sample counts.
- VMs are known by name only: a recreated VM counts as the old one. VMs that never migrated are
  missing, and migrations that are shorter than the step may be missing.""",
)


@dataclass(frozen=True)
class Prometheus:
    """The URL of a Prometheus, the files for its connection, and a value of the label `cluster`."""

    url: str
    cluster: str | None = None
    token_file: Path | None = None
    ca_file: Path | None = None


@dataclass
class Span:
    """One migration in the metrics: `name` is its VMIM, `vm` its VM, and `node` the VM's node.

    `seen_at` and `last_seen_at` are the instants of its first and last sample.
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
    def uid(self) -> str:
        """A UID for the VMIM; the metrics have none."""
        return f"{self.namespace}/{self.name}"

    @property
    def began(self) -> Instant:
        """When the migration began; if it never began, when it was first seen."""
        return self.seen_at if self.start is None else self.start

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
    """Read every migration from `began` to `ended`.

    `progress` is called with the instant up to which all is read. Raises `CannotAsk`, also if
    there are several clusters and none is chosen, because their VMs may have the same names.
    """
    spans: Spans = {}
    clusters: set[str] = set()
    chosen = "" if prometheus.cluster is None else f"{{cluster={_quote(prometheus.cluster)}}}"
    timeout = aiohttp.ClientTimeout(total=TIMEOUT)
    check_url(prometheus.url, _EXPECTED, with_token=prometheus.token_file is not None)
    context = make_ssl_context(prometheus.ca_file)
    headers = read_token(prometheus.token_file)
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
                    record_series(spans, metric, series.metric, series.values)
            if len(clusters) > 1:
                names = ", ".join(map(_quote, sorted(clusters)))
                raise CannotAsk(
                    f"{prometheus.url} has several clusters ({names}): choose one with --cluster"
                )
            progress(until)
    if not spans:
        raise CannotAsk(
            f"{prometheus.url} has no kubevirt_vmi_migration_* between {write_instant(began)} and"
            f" {write_instant(ended)}: does it scrape KubeVirt?"
        )
    return spans


def record_series(
    spans: Spans, metric: str, labels: Mapping[str, str], values: list[tuple[float, str]]
) -> None:
    """Add one series of one window; the windows are given in order."""
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
        outcome = Outcome.FAILED if metric == FAILED else Outcome.SUCCEEDED
        span.outcome = max(span.outcome, outcome)


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


class _VmHistory:
    """The migrations of one VM, and the VMI and VMIMs as they change."""

    def __init__(self, key: Key, spans: list[Span], began: Instant, ended: Instant) -> None:
        namespace, name = key
        spans.sort(key=lambda span: (span.began, span.name))
        self._began = began
        self._ended = ended
        self._before = [span for span in spans if _is_over(span, began)]
        self._spans = [span for span in spans if not _is_over(span, began)]
        self._running: Span | None = None
        self._kept = [span.name for span in self._before]
        self._vmi = Vmi(
            namespace=namespace,
            name=name,
            uid=f"{namespace}/{name}",
            node=next((span.node for span in spans if span.node), ""),
            eviction_strategy="LiveMigrate",
            migratable=True,
        )

    def first_list(self) -> Iterator[Recorded]:
        """The objects that exist when the range begins."""
        for span in self._before:
            yield Recorded(self._began, Kind.ADDED, Resource.VMIMS, _vmim(span, ended=True))
            self._vmi = replace(self._vmi, migration=_state(span, ended=True))
        first = self._spans[0] if self._spans else None
        is_running = first is not None and first.start is not None and first.start < self._began
        if first is not None and first.evacuates and (is_running or self._is_retry(first)):
            self._vmi = self._mark(first)
        if first is not None and is_running:
            self._running = first
            yield self._put_vmim(self._began, first, ended=False)
            self._vmi = replace(self._vmi, migration=_state(first, ended=False))
        yield Recorded(self._began, Kind.ADDED, Resource.VMIS, self._vmi)

    def events(self) -> Iterator[Recorded]:
        """The changes after the first list."""
        for span, following in zip_longest(self._spans, self._spans[1:]):
            begins, ends = span.began, self._end_of(span)
            if begins > self._ended:
                return
            if span.evacuates and not self._vmi.evacuation_node:
                yield self._put(begins, self._mark(span))
            if span.start is not None and span is not self._running:
                yield self._put_vmim(begins, span, ended=False)
                yield self._put(begins, replace(self._vmi, migration=_state(span, ended=False)))
            if ends is None:
                return
            yield from self._finish(span, ends)
            over_at = ends + RETRIED_WITHIN
            if self._vmi.evacuation_node and (
                following is None or not following.evacuates or following.began > over_at
            ):
                if over_at > self._ended:
                    return
                until = over_at if following is None else min(over_at, following.began)
                yield self._put(until, replace(self._vmi, evacuation_node=""))

    def _finish(self, span: Span, ends: Instant) -> Iterator[Recorded]:
        """The migration ended: its VMIM is final, and if it was handed off, the VMI shows it."""
        yield self._put_vmim(ends, span, ended=True)
        changed = self._vmi
        if span.start is not None:
            changed = replace(changed, migration=_state(span, ended=True))
        if span.outcome is not Outcome.FAILED:
            changed = replace(changed, evacuation_node="")
        yield self._put(ends, changed)
        self._kept.append(span.name)
        while len(self._kept) > KEPT_VMIMS:
            gone = self._kept.pop(0)
            yield Recorded(ends, Kind.DELETED, Resource.VMIMS, namespace=span.namespace, name=gone)

    def _is_retry(self, span: Span) -> bool:
        """Whether this attempt follows one that failed before the range begins."""
        last = self._before[-1] if self._before else None
        if last is None or last.end is None or last.outcome is not Outcome.FAILED:
            return False
        return last.evacuates and span.began <= last.end + RETRIED_WITHIN

    def _mark(self, span: Span) -> Vmi:
        """The VMI with the evacuation's marker."""
        node = span.node or self._vmi.node or "unknown"
        return replace(self._vmi, evacuation_node=node, node=node)

    def _end_of(self, span: Span) -> Instant | None:
        """When the migration ended, None if it still runs."""
        if span.end is not None:
            return max(span.end, span.began)
        if span.start is None:
            return span.seen_at
        return None if span.last_seen_at >= self._ended else span.last_seen_at

    def _put(self, at: Instant, vmi: Vmi) -> Recorded:
        self._vmi = vmi
        return Recorded(at, Kind.MODIFIED, Resource.VMIS, vmi)

    def _put_vmim(self, at: Instant, span: Span, *, ended: bool) -> Recorded:
        """A VMIM that begins or ends. If it evacuates, it names the marker's node."""
        vmim = _vmim(span, ended=ended)
        if span.evacuates:
            vmim = replace(vmim, evacuates=self._vmi.evacuation_node)
        return Recorded(at, Kind.MODIFIED if ended else Kind.ADDED, Resource.VMIMS, vmim)


def _is_over(span: Span, at: Instant) -> bool:
    """Whether a migration had ended at an instant."""
    return (span.seen_at if span.start is None else span.end or math.inf) <= at


def _vmim(span: Span, *, ended: bool) -> Vmim:
    phase = "Running"
    if ended:
        phase = "Failed" if span.outcome is Outcome.FAILED else "Succeeded"
    state = _state(span, ended=ended)
    return Vmim(
        namespace=span.namespace,
        name=span.name,
        uid=span.uid,
        vmi_name=span.vm,
        created=span.began,
        phase=phase,
        finished=ended,
        finished_at=(span.seen_at if span.start is None else span.end) if ended else None,
        handed_off=span.start is not None,
        start=span.start,
        end=state.end,
        outcome=state.outcome,
        evacuates=span.node if span.evacuates else "",
        trigger=span.trigger,
    )


def _state(span: Span, *, ended: bool) -> MigrationState:
    return MigrationState(
        uid=span.uid,
        start=span.start,
        ended=ended,
        end=span.end if ended else None,
        outcome=span.outcome if ended else Outcome.UNKNOWN,
    )


_STATUSES = {"succeeded": Outcome.SUCCEEDED, "failed": Outcome.FAILED}


def _quote(text: str) -> str:
    """A string literal of PromQL."""
    return msgspec.json.encode(text).decode()


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if abs(value) < 1e11 else None  # false for NaN too


async def _ask(
    session: aiohttp.ClientSession, url: str, fields: Mapping[str, str]
) -> Iterable[_Series]:
    where = f"{url.rstrip('/')}/api/v1/query_range"
    try:
        async with session.post(where, data=fields) as response:
            body = await response.read()
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
        raise CannotAsk(f"{where}: {str(error) or type(error).__name__}") from error
    try:
        answer = msgspec.json.decode(body, type=_QueryAnswer)
    except MALFORMED:
        raise CannotAsk(f"{where}: {response.status}, no answer of Prometheus's API") from None
    if answer.status != "success":
        raise CannotAsk(f"{where}: {response.status} {answer.error}")
    return answer.data.result
