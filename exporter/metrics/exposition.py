"""What Prometheus scrapes: every metric in one table, every sample from one pure function.

Nothing else imports prometheus_client. The registry is our own, made per application, and the
samples are read from the store at scrape time: no series outlives its fact.

A scrape is of one instant and is written in slices, between which others are answered. So what
a slice reads must not change any more: everything else is sampled before the first of them.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Literal, TypeAlias, TypeVar

from msgspec import Struct
from msgspec.structs import force_setattr
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.utils import floatToGoString

from exporter import __version__
from exporter.counters import Counters, Histogram
from exporter.engine.diagnosis import Diagnosis, Load, Source, State, diagnose
from exporter.engine.evidence import Evidence
from exporter.engine.model import (
    CLUSTER_RESOURCES,
    DeadResources,
    Instant,
    Mismatch,
    Outcome,
    Policy,
    Reason,
    Resource,
    ReviewOutcome,
    StuckPolicy,
    Trigger,
    Vmi,
)
from exporter.engine.store import Store
from exporter.engine.verdict_index import ALLOWED, Cooling, VerdictIndex, VerdictSummary
from exporter.health import CheckpointFault, CheckpointHealth, Health, Restart


SLICE = 100
"""At so many VMIs a scrape looks in one turn, because that takes 2 ms where each is news."""
PART = 2**16
"""Bytes from which on what is written becomes a part of its own, to be sent in one turn."""


class Family(Struct, frozen=True, kw_only=True):
    """One metric: a row of the README's table."""

    name: str
    type: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()


class Sample(Struct, frozen=True, gc=False):
    """One value of a family; `labels` in the order of the family's, `suffix` for histograms."""

    labels: tuple[str, ...]
    value: float
    suffix: str = ""
    le: str = ""


class View(Struct, frozen=True, kw_only=True):
    """What a scrape reads, as one consistent picture at `now`.

    `index` is that of `store` under `policy`. At most `vmi_series` VMIs have series of their
    own.
    """

    store: Store
    index: VerdictIndex
    health: Health
    counters: Counters
    policy: Policy
    stuck: StuckPolicy
    vmi_series: int
    now: Instant

    @property
    def dead(self) -> DeadResources:
        """The resources whose evidence does not block any more."""
        return self.health.find_dead(self.now)


BLOCKS = Family(
    name="descheduler_kubevirt_eviction_blocks_total",
    type="counter",
    help="Blocked answers to POST /v1/verdicts and denied evictions; node is the VMI's own.",
    labels=("reason", "node", "namespace"),
)
EFFECTIVE_COOLDOWN = Family(
    name="descheduler_kubevirt_effective_cooldown_seconds",
    type="histogram",
    help="Effective cooldown of each answer or eviction that was blocked by cooldown.",
)
BUILD_INFO = Family(
    name="kubevirt_eviction_exporter_build_info",
    type="gauge",
    help="1, with the version of this exporter.",
    labels=("version",),
)
SYNCED = Family(
    name="kubevirt_eviction_exporter_synced",
    type="gauge",
    help="1 if a whole list of the resource has been read, in every watched namespace.",
    labels=("resource",),
)
PERMISSION_MISSING = Family(
    name="kubevirt_eviction_exporter_permission_missing",
    type="gauge",
    help="1 if the API server refuses the resource, so that the exporter runs without it.",
    labels=("resource",),
)
LAST_CONTACT = Family(
    name="kubevirt_eviction_exporter_last_contact_timestamp_seconds",
    type="gauge",
    help="Last event, bookmark or list of the resource, where it may be seen; 0 without any.",
    labels=("resource",),
)
OBJECTS = Family(
    name="kubevirt_eviction_exporter_objects",
    type="gauge",
    help="Objects held in memory.",
    labels=("resource",),
)
LISTS = Family(
    name="kubevirt_eviction_exporter_lists_total",
    type="counter",
    help="Whole lists read; more than one per namespace means that the watch was interrupted.",
    labels=("resource",),
)
WATCH_RESTARTS = Family(
    name="kubevirt_eviction_exporter_watch_restarts_total",
    type="counter",
    help=(
        "Watches opened again, by why the one before ended; ended is the server's own time-out,"
        " no_progress a version that brought nothing."
    ),
    labels=("resource", "reason"),
)
REFUSED_OBJECTS = Family(
    name="kubevirt_eviction_exporter_refused_objects_total",
    type="counter",
    help="Objects and watch lines that could not be used; what was known of them is kept.",
    labels=("resource",),
)
UNKNOWN_CANDIDATES = Family(
    name="kubevirt_eviction_exporter_unknown_candidates_total",
    type="counter",
    help="Candidates asked about that are no VMI of this cluster: name unknown, or another UID.",
    labels=("reason",),
)
REQUEST_DURATION = Family(
    name="kubevirt_eviction_exporter_request_duration_seconds",
    type="histogram",
    help="Time to answer a request, by endpoint; blocked_wait holds requests open on purpose.",
    labels=("endpoint",),
)
REFUSED_CONNECTIONS = Family(
    name="kubevirt_eviction_exporter_refused_connections_total",
    type="counter",
    help="Connections closed at once because limits.connections were open.",
    labels=("listener",),
)
REFUSED_REQUESTS = Family(
    name="kubevirt_eviction_exporter_refused_requests_total",
    type="counter",
    help="Requests answered by an error, by HTTP status.",
    labels=("status",),
)
CHECKPOINT_WRITER = Family(
    name="kubevirt_eviction_exporter_checkpoint_writer",
    type="gauge",
    help="1 if this process writes the checkpoint: of the replicas one, the holder of the Lease.",
)
CHECKPOINT_WRITTEN = Family(
    name="kubevirt_eviction_exporter_checkpoint_written_timestamp_seconds",
    type="gauge",
    help="When this process last saw everything written, itself being the writer; 0 before.",
)
CHECKPOINT_UNWRITTEN = Family(
    name="kubevirt_eviction_exporter_checkpoint_unwritten_timestamp_seconds",
    type="gauge",
    help="Since when something waits to be written to the checkpoint; 0 if nothing does.",
)
CHECKPOINT_VMIS = Family(
    name="kubevirt_eviction_exporter_checkpoint_vmis",
    type="gauge",
    help="VMIs of which the checkpoint is to hold something.",
)
CHECKPOINT_BYTES = Family(
    name="kubevirt_eviction_exporter_checkpoint_bytes",
    type="gauge",
    help="The size of what the checkpoint is to hold.",
)
CHECKPOINT_FAULTS = Family(
    name="kubevirt_eviction_exporter_checkpoint_faults_total",
    type="counter",
    help="What went wrong with the checkpoint, each survived: damaged shards, failed writes.",
    labels=("fault",),
)
POLICY = Family(
    name="kubevirt_eviction_exporter_policy_seconds",
    type="gauge",
    help="The policy in force, by setting; 0 means off.",
    labels=("setting",),
)
MIGRATION_LIMIT = Family(
    name="kubevirt_eviction_exporter_migration_limit",
    type="gauge",
    help="Parallel migrations that KubeVirt allows, if its KubeVirt object may be read.",
    labels=("scope",),
)

_EVACUATION = ("namespace", "name", "node")
EVACUATION_REQUESTED = Family(
    name="kubevirt_vmi_evacuation_requested_timestamp_seconds",
    type="gauge",
    help="When the evacuation of this VMI from this node was requested, or first seen.",
    labels=_EVACUATION,
)
EVACUATION_INFO = Family(
    name="kubevirt_vmi_evacuation_info",
    type="gauge",
    help="1 for each evacuating VMI, with its evictionStrategy and who asked.",
    labels=(*_EVACUATION, "strategy", "source"),
)
EVACUATION_STATE = Family(
    name="kubevirt_vmi_evacuation_state",
    type="gauge",
    help="1 for the present state of each evacuation: what it is held up by.",
    labels=(*_EVACUATION, "state"),
)
EVACUATION_STUCK = Family(
    name="kubevirt_vmi_evacuation_stuck",
    type="gauge",
    help="1 if the evacuation is older than stuck.after without migrating, or failed too often.",
    labels=_EVACUATION,
)
EVACUATION_DIVERGED = Family(
    name="kubevirt_vmi_evacuation_diverged",
    type="gauge",
    help="1 if the launcher pod lacks the descheduler's eviction-in-progress for two minutes.",
    labels=_EVACUATION,
)
EVACUATION_FAILED = Family(
    name="kubevirt_vmi_evacuation_failed_attempts",
    type="gauge",
    help="Evacuation migrations that failed since the request; a lower bound.",
    labels=_EVACUATION,
)
NOT_BEFORE = Family(
    name="kubevirt_vmi_eviction_not_before_timestamp_seconds",
    type="gauge",
    help="When the cooldown of this VMI ends; only while it holds.",
    labels=("namespace", "name", "node"),
)
COOLDOWN = Family(
    name="kubevirt_vmi_eviction_cooldown_seconds",
    type="gauge",
    help="Effective cooldown of this VMI; only while it holds.",
    labels=("namespace", "name", "node"),
)
IN_WINDOW = Family(
    name="kubevirt_vmi_migrations_in_window",
    type="gauge",
    help="Migrations of this VMI that ended inside the history window; only while it matters.",
    labels=("namespace", "name"),
)
COOLING = (NOT_BEFORE, COOLDOWN, IN_WINDOW)
STUCK_EVACUATIONS = Family(
    name="kubevirt_eviction_exporter_stuck_evacuations",
    type="gauge",
    help="Stuck evacuations, by who asked and what holds them up.",
    labels=("source", "state"),
)
VMIS = Family(
    name="descheduler_kubevirt_vmis",
    type="gauge",
    help="VMIs on each node, by what an eviction would be answered now: allowed or the reason.",
    labels=("verdict", "node"),
)
MIGRATIONS = Family(
    name="kubevirt_eviction_exporter_migrations_total",
    type="counter",
    help="Migrations that ended since this process started, by outcome and what they were for.",
    labels=("outcome", "trigger"),
)
ADMISSION_REVIEWS = Family(
    name="kubevirt_eviction_exporter_admission_reviews_total",
    type="counter",
    help="Evictions that the admission webhook was asked about, by outcome; dry runs left out.",
    labels=("outcome",),
)
LEFT_OUT = Family(
    name="kubevirt_eviction_exporter_vmis_left_out",
    type="gauge",
    help="VMIs without series of their own because limits.vmiSeries is reached.",
)

FAMILIES: tuple[Family, ...] = (
    BLOCKS,
    EFFECTIVE_COOLDOWN,
    BUILD_INFO,
    SYNCED,
    PERMISSION_MISSING,
    LAST_CONTACT,
    OBJECTS,
    LISTS,
    WATCH_RESTARTS,
    REFUSED_OBJECTS,
    UNKNOWN_CANDIDATES,
    REQUEST_DURATION,
    REFUSED_CONNECTIONS,
    REFUSED_REQUESTS,
    ADMISSION_REVIEWS,
    CHECKPOINT_WRITER,
    CHECKPOINT_WRITTEN,
    CHECKPOINT_UNWRITTEN,
    CHECKPOINT_VMIS,
    CHECKPOINT_BYTES,
    CHECKPOINT_FAULTS,
    POLICY,
    MIGRATION_LIMIT,
    VMIS,
    EVACUATION_REQUESTED,
    EVACUATION_INFO,
    EVACUATION_STATE,
    EVACUATION_STUCK,
    EVACUATION_DIVERGED,
    EVACUATION_FAILED,
    NOT_BEFORE,
    COOLDOWN,
    IN_WINDOW,
    STUCK_EVACUATIONS,
    LEFT_OUT,
    MIGRATIONS,
)


class Column:
    """The samples of one of the families of what cools down, `COOLING[place]`."""

    def __init__(self, place: int, cooling: Sequence[Cooling]) -> None:
        self._place = place
        self._cooling = cooling

    def __iter__(self) -> Iterator[Sample]:
        return (_sample_cooling(one)[self._place] for one in self._cooling)

    def write(self) -> str:
        """Their lines.

        Kept with what they tell of, because writing them takes 12 us for each VMI, and most cool
        down as they did at the last scrape: 0.1 us.
        """
        place = self._place
        return "".join([(one.written or _write_cooling(one))[place] for one in self._cooling])


_One = TypeVar("_One")
_Diagnosed: TypeAlias = tuple[Vmi, Diagnosis]
Piece: TypeAlias = tuple[Family, Sequence[Sample] | Column]
"""Samples of a family. Pieces of the same family follow each other."""


def sample(view: View) -> Iterator[Piece]:
    """Every family of `FAMILIES`, in order, with its samples as they are now.

    One that tells of more VMIs than a slice comes in several pieces. Whatever may change is read
    before this returns: the pieces are of that instant, however late they are asked for.
    """
    summary = view.index.read(view.now, dead=view.dead)
    evacuating = [evidence.snapshot() for evidence in view.store.evacuating()]
    return chain(
        list(_sample_exporter(view)),
        _sample_vmis(view, summary, evacuating, view.store.load()),
        list(_sample_migrations(view.store)),
    )


def _sample_exporter(view: View) -> Iterator[Piece]:
    health, counters = view.health, view.counters
    counters.forget_nodes(view.store.nodes, view.now)
    yield BLOCKS, [Sample(key, value) for key, value in sorted(counters.blocks.items())]
    yield EFFECTIVE_COOLDOWN, _sample_histogram((), counters.cooldowns)
    yield BUILD_INFO, [Sample((__version__,), 1)]
    watched = [r for r in Resource if r in CLUSTER_RESOURCES or health.of(r)]
    yield SYNCED, [Sample((r,), health.is_synced(r)) for r in watched]
    yield PERMISSION_MISSING, [Sample((r,), health.is_refused(r)) for r in watched]
    yield LAST_CONTACT, [Sample((r,), _last_contact(health, r)) for r in watched]
    yield OBJECTS, [Sample((r,), view.store.count(r)) for r in CLUSTER_RESOURCES]
    yield LISTS, [Sample((r,), sum(one.lists for one in health.of(r))) for r in watched]
    yield (
        WATCH_RESTARTS,
        [
            Sample((r, why), sum(one.restarts[why] for one in health.of(r)))
            for r in watched
            for why in Restart
        ],
    )
    yield (
        REFUSED_OBJECTS,
        [Sample((r,), sum(one.refused_objects for one in health.of(r))) for r in watched],
    )
    yield UNKNOWN_CANDIDATES, [Sample((m,), counters.unknown_candidates[m]) for m in Mismatch]
    yield (
        REQUEST_DURATION,
        [
            one
            for endpoint, histogram in sorted(counters.requests.items())
            for one in _sample_histogram((endpoint,), histogram)
        ],
    )
    yield (
        REFUSED_CONNECTIONS,
        [
            Sample((name,), counters.refused_connections[name])
            for name in ("query", "metrics", *(() if counters.reviews is None else ("admission",)))
        ],
    )
    yield (
        REFUSED_REQUESTS,
        [Sample((str(s),), count) for s, count in sorted(counters.refused_requests.items())],
    )
    reviews = counters.reviews
    yield (
        ADMISSION_REVIEWS,
        [] if reviews is None else [Sample((one,), reviews[one]) for one in ReviewOutcome],
    )
    yield from _sample_checkpoint(view)
    yield POLICY, _sample_policy(view.policy)
    yield MIGRATION_LIMIT, _sample_limits(view.store)


def _sample_migrations(store: Store) -> Iterator[Piece]:
    yield (
        MIGRATIONS,
        [
            Sample((outcome.name.lower(), trigger), store.finished[outcome, trigger])
            for outcome in (Outcome.SUCCEEDED, Outcome.FAILED)
            for trigger in Trigger
        ],
    )


class Exposition:
    """Renders the samples in the format that a scraper accepts.

    `read` gives the view of the moment; `process` adds the usual `process_*` metrics.
    """

    def __init__(self, read: Callable[[], View], *, process: bool = True) -> None:
        self._read = read
        self._rendering = asyncio.Lock()
        self._process = CollectorRegistry(auto_describe=False)
        if process:
            ProcessCollector(registry=self._process)

    async def render(self, accept: str) -> tuple[list[bytes], str]:
        """The body, in parts, and its content type: text 0.0.4, or OpenMetrics if accepted.

        In slices and one scrape at a time, so that a verdict waits for one slice at most. The
        samples' lines are our own: prometheus_client writes 20,000 of them in 180 ms at a stretch.
        """
        accept = narrow(accept)
        encode, content_type = choose_encoder(accept)
        async with self._rendering:
            parts, written = [], bytearray()
            for text in _write(await self._sample(), open_metrics=bool(accept)):
                written += text.encode()
                if len(written) >= PART:
                    parts.append(bytes(written))
                    written.clear()
                await asyncio.sleep(0)
            parts.append(bytes(written) + encode(self._process))
        return parts, content_type

    async def _sample(self) -> Iterator[Piece]:
        view = self._read()
        while view.index.catch_up(view.now, dead=view.dead, most=SLICE):
            await asyncio.sleep(0)
            view = self._read()
        return sample(view)


def _write(pieces: Iterable[Piece], *, open_metrics: bool) -> Iterator[str]:
    """The pieces as text; the two formats differ in what they call a counter (and in the end)."""
    begun = None
    for family, samples in pieces:
        if family is not begun:
            begun = family
            name = family.name.removesuffix("_total") if open_metrics else family.name
            yield f"# HELP {name} {family.help}\n# TYPE {name} {family.type}\n"
        if isinstance(samples, Column):
            yield samples.write()
        else:
            for some in _cut(samples):
                yield "".join([_write_sample(family, one) for one in some])


def _write_cooling(one: Cooling) -> tuple[str, ...]:
    samples = zip(COOLING, _sample_cooling(one), strict=True)
    written = tuple(_write_sample(family, told) for family, told in samples)
    force_setattr(one, "written", written)
    return written


def _write_sample(family: Family, one: Sample) -> str:
    """One line, of any labels; sorted, as prometheus_client has them."""
    pairs = [*zip(family.labels, one.labels, strict=True), *([("le", one.le)] if one.le else [])]
    labels = ",".join(f'{name}="{_escape(value)}"' for name, value in sorted(pairs))
    braced = f"{{{labels}}}" if labels else ""
    value = floatToGoString(one.value)  # type: ignore[no-untyped-call]
    return f"{family.name}{one.suffix}{braced} {value}\n"


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def narrow(accept: str) -> str:
    """An Accept header reduced to what prometheus_client writes truly: OpenMetrics 1.0 or text.

    Given another version it would write 1.0 under that version's name, and fail on a version
    that is no number.
    """
    for part in accept.split(","):
        media, *parameters = (token.strip().lower() for token in part.split(";"))
        versions = [p.removeprefix("version=") for p in parameters if p.startswith("version=")]
        if _is_refused(parameters):
            continue
        if media == "application/openmetrics-text" and versions in ([], ["1.0.0"]):
            return "application/openmetrics-text; version=1.0.0"
    return ""


def _is_refused(parameters: list[str]) -> bool:
    """Whether the weight is 0, which means "not this" (RFC 9110, 12.4.2)."""
    return any(p.startswith("q=0") and not p.removeprefix("q=0").strip(".0") for p in parameters)


def _sample_histogram(labels: tuple[str, ...], histogram: Histogram) -> list[Sample]:
    buckets = [Sample(labels, count, "_bucket", le) for le, count in histogram.cumulative()]
    return [
        *buckets,
        Sample(labels, histogram.count, "_count"),
        Sample(labels, histogram.total, "_sum"),
    ]


def _sample_checkpoint(view: View) -> Iterator[tuple[Family, list[Sample]]]:
    """Without a checkpoint there are no samples, so that nothing alerts.

    What the store has heard since the checkpoint's keeper last looked is not written either.
    """
    kept = view.health.checkpoint
    is_kept = kept is not None
    kept = kept or CheckpointHealth()
    unwritten = kept.unwritten_since or (view.now if view.store.touched else 0.0)
    for family, value in (
        (CHECKPOINT_WRITER, float(kept.writes)),
        (CHECKPOINT_WRITTEN, kept.written_at or 0.0),
        (CHECKPOINT_UNWRITTEN, unwritten),
        (CHECKPOINT_VMIS, kept.vmis),
        (CHECKPOINT_BYTES, kept.size),
    ):
        yield family, [Sample((), value)] if is_kept else []
    faults = [Sample((fault,), kept.faults[fault]) for fault in CheckpointFault]
    yield CHECKPOINT_FAULTS, faults if is_kept else []


def _sample_policy(policy: Policy) -> list[Sample]:
    return [
        Sample(("migration_cooldown",), policy.migration_cooldown),
        Sample(("max_migration_cooldown",), policy.max_migration_cooldown),
        Sample(("migration_history_window",), policy.migration_history_window),
    ]


def _sample_vmis(
    view: View, summary: VerdictSummary, evacuating: Sequence[Evidence], load: Load | None
) -> Iterator[Piece]:
    """What is told of single VMIs, those that evacuate first, and what is told of all.

    Of the view only what never changes is read.
    """
    verdicts = summary.verdicts
    nodes = sorted({node for _, node in verdicts if node})
    yield (
        VMIS,
        [
            Sample((verdict, node), verdicts.get((verdict, node), 0))
            for node in nodes
            for verdict in (ALLOWED, *Reason)
        ],
    )
    diagnosed: list[_Diagnosed] = []
    for some in _cut(evacuating):
        if diagnosed:
            yield VMIS, ()
        for evidence in some:
            diagnosis = diagnose(evidence, view.stuck, load, view.now)
            if diagnosis is not None:
                diagnosed.append((evidence.vmi, diagnosis))
    yield from _sample_evacuations(diagnosed[: view.vmi_series])
    cooling, left_out = _admit(view.vmi_series, diagnosed, summary.cooling)
    for place, family in enumerate(COOLING):
        yield from ((family, Column(place, some)) for some in _cut(cooling))
    stuck = Counter((d.source, d.state) for _, d in diagnosed if d.stuck)
    yield (
        STUCK_EVACUATIONS,
        [Sample((source, state), stuck[source, state]) for source in Source for state in State],
    )
    yield LEFT_OUT, [Sample((), left_out)]


def _cut(whole: Sequence[_One]) -> Iterator[Sequence[_One]]:
    """Slices of it; one, which is empty, of nothing."""
    return (whole[at : at + SLICE] for at in range(0, max(1, len(whole)), SLICE))


def _admit(
    most: int, diagnosed: Sequence[_Diagnosed], cooling: Sequence[Cooling]
) -> tuple[list[Cooling], int]:
    """Those that cool down and have series of their own, and how many VMIs have none.

    `most` have series: the first that evacuate, and where these are fewer, others that cool down.
    """
    told = {vmi.uid for vmi, _ in diagnosed[:most]}
    evacuating = {vmi.uid for vmi, _ in diagnosed}
    others = cooling
    if evacuating:
        others = [one for one in cooling if one.vmi.uid not in evacuating]
    left_out = len(evacuating) - len(told) + max(0, len(others) - (most - len(told)))
    admitted = [one for one in cooling if one.vmi.uid in told] if told else []
    return [*admitted, *others[: most - len(told)]], left_out


def _sample_evacuations(diagnosed: Sequence[_Diagnosed]) -> Iterator[Piece]:
    for family, tell in _EVACUATIONS:
        for some in _cut(diagnosed):
            yield family, [tell((vmi.namespace, vmi.name, d.node), vmi, d) for vmi, d in some]


_EVACUATIONS: tuple[tuple[Family, Callable[[tuple[str, ...], Vmi, Diagnosis], Sample]], ...] = (
    (EVACUATION_REQUESTED, lambda key, _vmi, d: Sample(key, d.requested_at)),
    (EVACUATION_INFO, lambda key, vmi, d: Sample((*key, vmi.eviction_strategy, d.source), 1)),
    (EVACUATION_STATE, lambda key, _vmi, d: Sample((*key, d.state), 1)),
    (EVACUATION_STUCK, lambda key, _vmi, d: Sample(key, d.stuck)),
    (EVACUATION_DIVERGED, lambda key, _vmi, d: Sample(key, d.diverged)),
    (EVACUATION_FAILED, lambda key, _vmi, d: Sample(key, d.failed_attempts)),
)


def _sample_cooling(one: Cooling) -> tuple[Sample, ...]:
    """Of each family of `COOLING` the one sample."""
    vmi, cooldown = one.vmi, one.cooldown
    key = (vmi.namespace, vmi.name, vmi.node)
    return (
        Sample(key, cooldown.not_before),
        Sample(key, cooldown.effective),
        Sample(key[:2], cooldown.migrations_in_window),
    )


def _sample_limits(store: Store) -> list[Sample]:
    if store.limits is None:
        return []
    return [
        Sample(("cluster",), store.limits.cluster),
        Sample(("outbound_per_node",), store.limits.outbound_per_node),
    ]


def _last_contact(health: Health, resource: Resource) -> float:
    """The oldest contact of a resource, where it may be seen."""
    contacts = (one.contact or 0.0 for one in health.of(resource) if not one.refused)
    return min(contacts, default=0.0)
