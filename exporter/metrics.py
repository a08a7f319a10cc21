"""What Prometheus scrapes: every metric in one table, every sample from one pure function.

Nothing else imports prometheus_client. The registry is our own, made per application, and the
samples are read from the store at scrape time: no series outlives its fact.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from functools import lru_cache
from operator import itemgetter
from typing import Literal

from msgspec import Struct
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.utils import floatToGoString

from exporter import __version__
from exporter.cooldown import Cooldown, decide, is_quiet, measure_cooldown
from exporter.counters import Counters, Histogram
from exporter.evacuation import Diagnosis, Source, State, diagnose
from exporter.evidence import Evidence
from exporter.health import CheckpointFault, CheckpointHealth, Health, Restart, Staleness
from exporter.model import (
    CLUSTER_RESOURCES,
    Instant,
    Mismatch,
    Outcome,
    Policy,
    Reason,
    Resource,
    StuckPolicy,
    Trigger,
)
from exporter.store import Store


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

    At most `vmi_series` VMIs have series of their own.
    """

    store: Store
    health: Health
    counters: Counters
    policy: Policy
    stuck: StuckPolicy
    vmi_series: int
    now: Instant


BLOCKS = Family(
    name="descheduler_kubevirt_eviction_blocks_total",
    type="counter",
    help="Blocked answers to POST /v1/verdicts, dry runs left out; node is the VMI's own.",
    labels=("reason", "node", "namespace"),
)
EFFECTIVE_COOLDOWN = Family(
    name="descheduler_kubevirt_effective_cooldown_seconds",
    type="histogram",
    help="Effective cooldown of each answer that was blocked by cooldown.",
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
    help="Last proof of contact with the API server: an event, a bookmark, a list. 0 before.",
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
    help="Watches opened again, by why the one before ended; ended is the server's own time-out.",
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


def sample(view: View) -> Iterator[tuple[Family, list[Sample]]]:
    """Every family of `FAMILIES`, in order, with its samples as they are now."""
    health, counters = view.health, view.counters
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
        [Sample((name,), counters.refused_connections[name]) for name in ("query", "metrics")],
    )
    yield (
        REFUSED_REQUESTS,
        [Sample((str(s),), count) for s, count in sorted(counters.refused_requests.items())],
    )
    yield from _sample_checkpoint(view)
    yield POLICY, _sample_policy(view.policy)
    yield MIGRATION_LIMIT, _sample_limits(view.store)
    yield from _sample_vmis(view)
    yield (
        MIGRATIONS,
        [
            Sample((outcome.name.lower(), trigger), view.store.finished[outcome, trigger])
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
        self._process = CollectorRegistry(auto_describe=False)
        if process:
            ProcessCollector(registry=self._process)

    def render(self, accept: str) -> tuple[bytes, str]:
        """The body and its content type: text 0.0.4, or OpenMetrics where it is accepted.

        The samples' lines are our own, because nobody is answered while they are written: with
        20,000 series of 10,000 VMIs 43 ms, and 255 when prometheus_client wrote them.
        """
        accept = narrow(accept)
        encode, content_type = choose_encoder(accept)
        parts = [
            _write_family(family, samples, open_metrics=bool(accept))
            for family, samples in sample(self._read())
        ]
        return "".join(parts).encode() + encode(self._process), content_type


def _write_family(family: Family, samples: list[Sample], *, open_metrics: bool) -> str:
    """A family as text; the two formats differ in what they call a counter (and in the end)."""
    name = family.name.removesuffix("_total") if open_metrics else family.name
    head = f"# HELP {name} {family.help}\n# TYPE {name} {family.type}\n"
    if family.type == "histogram":
        return head + "".join(_write_sample(family, one) for one in samples)
    order = sorted(range(len(family.labels)), key=family.labels.__getitem__)
    labels = ",".join(f'{family.labels[i]}="%s"' for i in order)
    line = f"{family.name}{{{labels}}} %s\n" if order else f"{family.name} %s\n"
    pick = itemgetter(*order) if len(order) > 1 else tuple
    text = "".join([line % (*pick(one.labels), _write_value(one.value)) for one in samples])
    plain = (0, line.count('"') * len(samples), len(samples))
    if tuple(map(text.count, ("\\", '"', "\n"))) != plain:
        # Escaping is looked for once, because Kubernetes knows no name that needs it.
        text = "".join(_write_sample(family, one) for one in samples)
    return head + text


def _write_sample(family: Family, one: Sample) -> str:
    """One line, of any labels; sorted, as prometheus_client has them."""
    pairs = [*zip(family.labels, one.labels, strict=True), *([("le", one.le)] if one.le else [])]
    labels = ",".join(f'{name}="{_escape(value)}"' for name, value in sorted(pairs))
    braced = f"{{{labels}}}" if labels else ""
    return f"{family.name}{one.suffix}{braced} {_write_value(one.value)}\n"


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


_write_value = lru_cache(maxsize=2**15)(floatToGoString)
"""As Go writes a number. Kept, because the instants of a scrape are mostly those of the last."""


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


def _sample_vmis(view: View) -> Iterator[tuple[Family, list[Sample]]]:
    """What is told of single VMIs, those that evacuate first, and what is told of all."""
    verdicts: defaultdict[tuple[str, str], int] = defaultdict(int)
    cooling: list[tuple[Evidence, Cooldown]] = []
    silent = view.health.staleness(view.now) is Staleness.DEAD
    for evidence in view.store.all_evidence():
        node = evidence.vmi.node
        if is_quiet(evidence):
            verdicts["allowed", node] += 1
            continue
        verdict = decide(evidence, view.policy, view.now, silent=silent)
        verdicts[verdict.reason or "allowed", node] += 1
        cooldown = measure_cooldown(evidence, view.policy, view.now)
        if cooldown is not None and cooldown.blocks:
            cooling.append((evidence, cooldown))
    nodes = sorted({node for _, node in verdicts if node})
    yield (
        VMIS,
        [
            Sample((verdict, node), verdicts[verdict, node])
            for node in nodes
            for verdict in ("allowed", *Reason)
        ],
    )
    load = view.store.load()
    evacuating = [
        (evidence, diagnosis)
        for evidence in view.store.evacuating()
        if (diagnosis := diagnose(evidence, view.stuck, load, view.now)) is not None
    ]
    yield from _sample_evacuations(evacuating[: view.vmi_series])
    told = _Told(view.vmi_series, evacuating)
    yield from _sample_cooldowns([one for one in cooling if told.admits(one[0])])
    stuck = Counter((d.source, d.state) for _, d in evacuating if d.stuck)
    yield (
        STUCK_EVACUATIONS,
        [Sample((source, state), stuck[source, state]) for source in Source for state in State],
    )
    yield LEFT_OUT, [Sample((), told.left_out)]


class _Told:
    """Which VMIs have series of their own: those that evacuate first, up to a limit."""

    def __init__(self, most: int, evacuating: list[tuple[Evidence, Diagnosis]]) -> None:
        self._most = most
        self._uids = {evidence.vmi.uid for evidence, _ in evacuating[:most]}
        self._left = {evidence.vmi.uid for evidence, _ in evacuating[most:]}

    @property
    def left_out(self) -> int:
        """How many VMIs have none."""
        return len(self._left)

    def admits(self, evidence: Evidence) -> bool:
        """Whether this VMI has series; it is counted where it has none."""
        uid = evidence.vmi.uid
        if uid not in self._uids:
            if len(self._uids) >= self._most:
                self._left.add(uid)
                return False
            self._uids.add(uid)
        return True


def _sample_evacuations(
    evacuating: list[tuple[Evidence, Diagnosis]],
) -> Iterator[tuple[Family, list[Sample]]]:
    named = [((e.vmi.namespace, e.vmi.name, d.node), e.vmi, d) for e, d in evacuating]
    yield EVACUATION_REQUESTED, [Sample(key, d.requested_at) for key, _, d in named]
    yield (
        EVACUATION_INFO,
        [Sample((*key, vmi.eviction_strategy, d.source), 1) for key, vmi, d in named],
    )
    yield EVACUATION_STATE, [Sample((*key, d.state), 1) for key, _, d in named]
    yield EVACUATION_STUCK, [Sample(key, d.stuck) for key, _, d in named]
    yield EVACUATION_DIVERGED, [Sample(key, d.diverged) for key, _, d in named]
    yield EVACUATION_FAILED, [Sample(key, d.failed_attempts) for key, _, d in named]


def _sample_cooldowns(
    cooling: list[tuple[Evidence, Cooldown]],
) -> Iterator[tuple[Family, list[Sample]]]:
    named = [((e.vmi.namespace, e.vmi.name, e.vmi.node), cooldown) for e, cooldown in cooling]
    yield NOT_BEFORE, [Sample(key, cooldown.not_before) for key, cooldown in named]
    yield COOLDOWN, [Sample(key, cooldown.effective) for key, cooldown in named]
    yield IN_WINDOW, [Sample(key[:2], cooldown.migrations_in_window) for key, cooldown in named]


def _sample_limits(store: Store) -> list[Sample]:
    if store.limits is None:
        return []
    return [
        Sample(("cluster",), store.limits.cluster),
        Sample(("outbound_per_node",), store.limits.outbound_per_node),
    ]


def _last_contact(health: Health, resource: Resource) -> float:
    return min((one.contact or 0.0 for one in health.of(resource)), default=0.0)
