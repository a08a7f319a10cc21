"""Every metric: its name, type, help and labels beside the function that samples it.

To add a metric, add an entry to the table of its data source.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from exporter import __version__
from exporter.counters import Histogram
from exporter.engine.diagnosis import Diagnosis, Source, State
from exporter.engine.drain import DrainOutcome
from exporter.engine.ended_migrations import EndReason
from exporter.engine.model import (
    CLUSTER_RESOURCES,
    DEFAULT_POLICY,
    EventOutcome,
    EventReason,
    Mismatch,
    Outcome,
    Reason,
    Resource,
    ReviewOutcome,
    Trigger,
)
from exporter.engine.verdicts import ALLOWED
from exporter.health import Health, HistoryFault, HistoryHealth, Restart
from exporter.metrics.family import (
    CoolingFamily,
    DrainFamily,
    EvacuationFamily,
    Family,
    Sample,
    View,
    ViewFamily,
)


def _sample_blocks(view: View) -> list[Sample]:
    view.counters.forget_blocks(view.store.nodes, view.store.keys(), view.now)
    return [Sample(key, value) for key, value in sorted(view.counters.blocks.items())]


def _sample_histogram(labels: tuple[str, ...], histogram: Histogram) -> list[Sample]:
    buckets = [Sample(labels, count, "_bucket", le) for le, count in histogram.cumulative()]
    return [
        *buckets,
        Sample(labels, histogram.count, "_count"),
        Sample(labels, histogram.total, "_sum"),
    ]


def _sample_policies(view: View) -> list[Sample]:
    policies = {DEFAULT_POLICY: view.policy}
    policies |= {one.name: one.policy for one in view.policy.overrides}
    settings = ("migration_cooldown", "max_migration_cooldown", "migration_history_window")
    return [
        Sample((name, setting), getattr(policy, setting))
        for name, policy in policies.items()
        for setting in settings
    ]


def _last_contact(health: Health, resource: Resource) -> float:
    """The oldest contact of a resource, without refused namespaces."""
    contacts = (one.contact or 0.0 for one in health.of(resource) if not one.refused)
    return min(contacts, default=0.0)


def _sample_refused_connections(view: View) -> list[Sample]:
    counters = view.counters
    listeners = ("query", "metrics", *(() if counters.reviews is None else ("admission",)))
    return [Sample((name,), counters.refused_connections[name]) for name in listeners]


def _sample_reviews(view: View) -> list[Sample]:
    reviews = view.counters.reviews
    return [] if reviews is None else [Sample((one,), reviews[one]) for one in ReviewOutcome]


def _sample_holds(view: View) -> list[Sample]:
    """Of VMIs that a migration in progress has held for longer than `stuck.migrationTimeout`."""
    return [
        Sample((one.namespace, one.name, one.node), one.since)
        for one in view.counters.holds.open(view.now)
        if one.reason is Reason.MIGRATION_IN_PROGRESS
        and view.now - one.since > view.stuck.migration_timeout
    ]


def _sample_events(view: View) -> list[Sample]:
    events = view.counters.events
    if events is None:
        return []
    return [
        Sample((reason, outcome), events[reason, outcome])
        for reason in EventReason
        for outcome in EventOutcome
    ]


def _of_history(read: Callable[[HistoryHealth], float]) -> Callable[[View], list[Sample]]:
    """Without a stored history there are no samples, so that nothing alerts."""

    def sample(view: View) -> list[Sample]:
        kept = view.health.history
        return [] if kept is None else [Sample((), read(kept))]

    return sample


def _sample_unwritten(view: View) -> list[Sample]:
    """Changes that the stored history's writer has not collected yet are unwritten too."""
    kept = view.health.history
    if kept is None:
        return []
    return [Sample((), kept.unwritten_since or (view.now if kept.has_outdated() else 0.0))]


def _sample_faults(view: View) -> list[Sample]:
    kept = view.health.history
    return [] if kept is None else [Sample((f,), kept.faults[f]) for f in HistoryFault]


def _sample_limits(view: View) -> list[Sample]:
    kubevirt = view.store.kubevirt
    if kubevirt is None:
        return []
    limits = kubevirt.limits
    return [
        Sample(("cluster",), limits.cluster),
        Sample(("outbound_per_node",), limits.outbound_per_node),
    ]


def _sample_migrations(view: View) -> list[Sample]:
    return [
        Sample((outcome.name.lower(), trigger, reason), view.counters.migrations[key])
        for outcome in (Outcome.SUCCEEDED, Outcome.FAILED)
        for trigger in Trigger
        for reason in EndReason
        if (reason is EndReason.NONE) == (outcome is Outcome.SUCCEEDED)
        for key in [(outcome, trigger, reason)]
    ]


_EVACUATION = ("namespace", "name", "node")

BLOCKS = ViewFamily(
    name="descheduler_kubevirt_eviction_blocks_total",
    type="counter",
    help="Blocked answers to POST /v1/verdicts and denied evictions; node is the VMI's node.",
    labels=("reason", "node", "namespace"),
    sample=_sample_blocks,
)
EXPORTER: tuple[ViewFamily, ...] = (
    BLOCKS,
    ViewFamily(
        name="descheduler_kubevirt_effective_cooldown_seconds",
        type="histogram",
        help="Effective cooldown of the VMI, for each answer or eviction that a cooldown blocked.",
        sample=lambda view: _sample_histogram((), view.counters.cooldowns),
    ),
    ViewFamily(
        name="kubevirt_eviction_exporter_build_info",
        type="gauge",
        help="Always 1; the label is the version of this exporter.",
        labels=("version",),
        sample=lambda _view: [Sample((__version__,), 1)],
    ),
    ViewFamily(
        name="kubevirt_eviction_exporter_synced",
        type="gauge",
        help="1 if a complete list of the resource has been read in every watched namespace.",
        labels=("resource",),
        sample=lambda view: [Sample((r,), view.health.is_synced(r)) for r in view.watched],
    ),
    ViewFamily(
        name="kubevirt_eviction_exporter_permission_missing",
        type="gauge",
        help="1 if the exporter lacks permission for the resource and runs without it.",
        labels=("resource",),
        sample=lambda view: [Sample((r,), view.health.is_refused(r)) for r in view.watched],
    ),
    ViewFamily(
        name="kubevirt_eviction_exporter_last_contact_timestamp_seconds",
        type="gauge",
        help="Time of the last event, bookmark or list of the resource; 0 if none.",
        labels=("resource",),
        sample=lambda view: [Sample((r,), _last_contact(view.health, r)) for r in view.watched],
    ),
    ViewFamily(
        name="kubevirt_eviction_exporter_objects",
        type="gauge",
        help="Objects in memory, by resource.",
        labels=("resource",),
        sample=lambda view: [Sample((r,), view.store.count(r)) for r in CLUSTER_RESOURCES],
    ),
    ViewFamily(
        name="kubevirt_eviction_exporter_lists_total",
        type="counter",
        help="Complete lists read; more than one per namespace means that a watch was interrupted.",
        labels=("resource",),
        sample=lambda view: [
            Sample((r,), sum(one.lists for one in view.health.of(r))) for r in view.watched
        ],
    ),
    ViewFamily(
        name="kubevirt_eviction_exporter_watch_restarts_total",
        type="counter",
        help=(
            "Watch restarts by reason; ended is the server's own timeout, no_progress means that"
            " several watches in a row received nothing."
        ),
        labels=("resource", "reason"),
        sample=lambda view: [
            Sample((r, why), sum(one.restarts[why] for one in view.health.of(r)))
            for r in view.watched
            for why in Restart
        ],
    ),
    ViewFamily(
        name="kubevirt_eviction_exporter_refused_objects_total",
        type="counter",
        help="Invalid objects and watch lines; the last valid version of an object is kept.",
        labels=("resource",),
        sample=lambda view: [
            Sample((r,), sum(one.refused_objects for one in view.health.of(r)))
            for r in view.watched
        ],
    ),
    ViewFamily(
        name="kubevirt_eviction_exporter_unknown_candidates_total",
        type="counter",
        help="Requested verdicts about unknown VMIs, by reason: unknown name, or different UID.",
        labels=("reason",),
        sample=lambda view: [Sample((m,), view.counters.unknown_candidates[m]) for m in Mismatch],
    ),
    ViewFamily(
        name="kubevirt_eviction_exporter_request_duration_seconds",
        type="histogram",
        help="Time to answer a request, by endpoint; blocked_wait is slow on purpose (long poll).",
        labels=("endpoint",),
        sample=lambda view: [
            one
            for endpoint, histogram in sorted(view.counters.requests.items())
            for one in _sample_histogram((endpoint,), histogram)
        ],
    ),
    ViewFamily(
        name="kubevirt_eviction_exporter_refused_connections_total",
        type="counter",
        help="Connections closed because of limits.connections or the memory limit, by listener.",
        labels=("listener",),
        sample=_sample_refused_connections,
    ),
    ViewFamily(
        name="kubevirt_eviction_exporter_refused_requests_total",
        type="counter",
        help="Requests answered with an error, by HTTP status.",
        labels=("status",),
        sample=lambda view: [
            Sample((str(status),), count)
            for status, count in sorted(view.counters.refused_requests.items())
        ],
    ),
    ViewFamily(
        name="kubevirt_eviction_exporter_certificate_not_after_timestamp_seconds",
        type="gauge",
        help="Time at which the certificate of a TLS listener expires.",
        labels=("listener",),
        sample=lambda view: [
            Sample((listener,), end) for listener, end in view.health.certificates.items()
        ],
    ),
    ViewFamily(
        name="kubevirt_eviction_exporter_admission_reviews_total",
        type="counter",
        help="Evictions that the admission webhook reviewed, by outcome, without dry runs.",
        labels=("outcome",),
        sample=_sample_reviews,
    ),
    ViewFamily(
        name="kubevirt_vmi_eviction_held_timestamp_seconds",
        type="gauge",
        help=(
            "Time of the first denial, for VMIs that the webhook has denied because of a migration"
            " for longer than stuck.migrationTimeout."
        ),
        labels=("namespace", "name", "node"),
        sample=_sample_holds,
    ),
    ViewFamily(
        name="kubevirt_eviction_exporter_events_total",
        type="counter",
        help="Kubernetes Events about VMIs, by reason and outcome; absent if events are off.",
        labels=("reason", "outcome"),
        sample=_sample_events,
    ),
    ViewFamily(
        name="kubevirt_eviction_exporter_history_writer",
        type="gauge",
        help="1 if this replica writes the stored history; with several, the holder of the Lease.",
        sample=_of_history(lambda kept: float(kept.writes)),
    ),
    ViewFamily(
        name="kubevirt_eviction_exporter_history_written_timestamp_seconds",
        type="gauge",
        help="Time at which the stored history was last complete; 0 if another replica writes it.",
        sample=_of_history(lambda kept: kept.written_at or 0.0),
    ),
    ViewFamily(
        name="kubevirt_eviction_exporter_history_unwritten_timestamp_seconds",
        type="gauge",
        help="Time of the oldest change that is not written to the stored history; 0 if none.",
        sample=_sample_unwritten,
    ),
    ViewFamily(
        name="kubevirt_eviction_exporter_history_vmis",
        type="gauge",
        help="VMIs with history to store in the stored history.",
        sample=_of_history(lambda kept: kept.vmis),
    ),
    ViewFamily(
        name="kubevirt_eviction_exporter_history_bytes",
        type="gauge",
        help="Size of the history to store in the stored history.",
        sample=_of_history(lambda kept: kept.size),
    ),
    ViewFamily(
        name="kubevirt_eviction_exporter_history_faults_total",
        type="counter",
        help="Errors of the stored history, such as damaged shards and failed writes, by kind.",
        labels=("fault",),
        sample=_sample_faults,
    ),
    ViewFamily(
        name="kubevirt_eviction_exporter_policy_seconds",
        type="gauge",
        help="Value of each setting of the policy and of each entry of policy.overrides; 0 means"
        " off.",
        labels=("policy", "setting"),
        sample=_sample_policies,
    ),
    ViewFamily(
        name="kubevirt_eviction_exporter_migration_limit",
        type="gauge",
        help="Parallel migrations that KubeVirt allows; absent without permission for kubevirts.",
        labels=("scope",),
        sample=_sample_limits,
    ),
)
"""The metrics of the exporter itself and of the cluster's settings."""
VMIS = Family(
    name="descheduler_kubevirt_vmis",
    type="gauge",
    help="VMIs per node and current verdict: allowed, or the reason why it is blocked.",
    labels=("verdict", "node"),
)
DRAINS = Family(
    name="kubevirt_eviction_exporter_node_drain_vmis",
    type="gauge",
    help="VMIs per node and outcome, if the node were drained now.",
    labels=("node", "outcome"),
)
NODE_DRAINS: tuple[DrainFamily, ...] = (
    DrainFamily(
        name="kubevirt_node_drain_started_timestamp_seconds",
        type="gauge",
        help="Time at which the first VM was asked to leave the node; absent without evacuations.",
        read=lambda drain: drain.since,
    ),
    DrainFamily(
        name="kubevirt_node_drain_last_departure_timestamp_seconds",
        type="gauge",
        help="Time at which the last VM left the node; absent if none has left.",
        read=lambda drain: drain.last_left_at,
    ),
    DrainFamily(
        name="kubevirt_node_drain_left_vmis",
        type="gauge",
        help="VMIs that have left the node since its drain began.",
        read=lambda drain: drain.left,
    ),
    DrainFamily(
        name="kubevirt_node_drain_remaining_vmis",
        type="gauge",
        help="VMIs that were asked to leave the node and are still there.",
        read=lambda drain: drain.remaining,
    ),
    DrainFamily(
        name="kubevirt_node_drain_failing_vmis",
        type="gauge",
        help="VMIs that were asked to leave the node and fail or stay.",
        read=lambda drain: drain.failing,
    ),
    DrainFamily(
        name="kubevirt_node_drain_stuck",
        type="gauge",
        help="1 if no VM has left the node for stuck.after, one of them is stuck, and the node is"
        " cordoned or somebody other than the descheduler requested it.",
        read=lambda drain: drain.stuck,
    ),
)
EVACUATIONS: tuple[EvacuationFamily, ...] = (
    EvacuationFamily(
        name="kubevirt_vmi_evacuation_requested_timestamp_seconds",
        type="gauge",
        help="Time at which the evacuation of the VMI from the node was requested or first seen.",
        labels=_EVACUATION,
        sample=lambda key, _vmi, d: Sample(key, d.requested_at),
    ),
    EvacuationFamily(
        name="kubevirt_vmi_evacuation_info",
        type="gauge",
        help="1 for each evacuating VMI, with its evictionStrategy and who requested it.",
        labels=(*_EVACUATION, "strategy", "source"),
        sample=lambda key, vmi, d: Sample((*key, vmi.eviction_strategy, d.source), 1),
    ),
    EvacuationFamily(
        name="kubevirt_vmi_evacuation_state",
        type="gauge",
        help="1 for the current state of each evacuation; the state is what delays it.",
        labels=(*_EVACUATION, "state"),
        sample=lambda key, _vmi, d: Sample((*key, d.state), 1),
    ),
    EvacuationFamily(
        name="kubevirt_vmi_evacuation_stuck",
        type="gauge",
        help="1 if the evacuation exceeded stuck.after without migrating, or failed too often.",
        labels=_EVACUATION,
        sample=lambda key, _vmi, d: Sample(key, d.stuck),
    ),
    EvacuationFamily(
        name="kubevirt_vmi_evacuation_diverged",
        type="gauge",
        help="1 if the launcher pod has lacked eviction-in-progress for two minutes.",
        labels=_EVACUATION,
        sample=lambda key, _vmi, d: Sample(key, d.diverged),
    ),
    EvacuationFamily(
        name="kubevirt_vmi_evacuation_failed_attempts",
        type="gauge",
        help="Evacuation migrations that failed since the request; there may have been more.",
        labels=_EVACUATION,
        sample=lambda key, _vmi, d: Sample(key, d.failed_attempts),
    ),
)
COOLING: tuple[CoolingFamily, ...] = (
    CoolingFamily(
        name="kubevirt_vmi_eviction_not_before_timestamp_seconds",
        type="gauge",
        help="Time at which the cooldown of the VMI ends; absent if it has none.",
        labels=("namespace", "name", "node"),
        sample=lambda vmi, c: Sample((vmi.namespace, vmi.name, vmi.node), c.not_before),
    ),
    CoolingFamily(
        name="kubevirt_vmi_eviction_cooldown_seconds",
        type="gauge",
        help="Effective cooldown of the VMI, and the policy it is by; absent if it has none.",
        labels=("namespace", "name", "node", "policy"),
        sample=lambda vmi, c: Sample(
            (vmi.namespace, vmi.name, vmi.node, vmi.override or DEFAULT_POLICY), c.effective
        ),
    ),
    CoolingFamily(
        name="kubevirt_vmi_migrations_in_window",
        type="gauge",
        help="Migrations of the VMI that ended inside the window; absent without a cooldown.",
        labels=("namespace", "name"),
        sample=lambda vmi, c: Sample((vmi.namespace, vmi.name), c.migrations_in_window),
    ),
)
STUCK_EVACUATIONS = Family(
    name="kubevirt_eviction_exporter_stuck_evacuations",
    type="gauge",
    help="Stuck evacuations, by who requested them (source) and what delays them (state).",
    labels=("source", "state"),
)
LEFT_OUT = Family(
    name="kubevirt_eviction_exporter_vmis_left_out",
    type="gauge",
    help="VMIs that have no series of their own because limits.vmiSeries is reached.",
)
MIGRATIONS = ViewFamily(
    name="kubevirt_eviction_exporter_migrations_total",
    type="counter",
    help="Migrations that ended since this process started: outcome, what they were for, and why"
    " they failed.",
    labels=("outcome", "trigger", "reason"),
    sample=_sample_migrations,
)
DURATIONS = ViewFamily(
    name="kubevirt_eviction_exporter_migration_duration_seconds",
    type="histogram",
    help="How long successful migrations took, without their time in the queue.",
    labels=("trigger",),
    sample=lambda view: [
        sample
        for trigger, durations in view.counters.migration_durations.items()
        for sample in _sample_histogram((trigger,), durations)
    ],
)
RETURNED = ViewFamily(
    name="kubevirt_eviction_exporter_returned_migrations_total",
    type="counter",
    help="Successful migrations that brought a VM back to a node that it had left within the"
    " history window.",
    sample=lambda view: [Sample((), view.counters.returned_migrations)],
)
FAMILIES: tuple[Family, ...] = (
    *EXPORTER,
    VMIS,
    DRAINS,
    *NODE_DRAINS,
    *EVACUATIONS,
    *COOLING,
    STUCK_EVACUATIONS,
    LEFT_OUT,
    MIGRATIONS,
    DURATIONS,
    RETURNED,
)
"""Every metric, in the order of the exposition."""


def sample_verdicts(
    verdicts: Mapping[tuple[str, str], int], reasons: Iterable[Reason]
) -> list[Sample]:
    """The samples of `VMIS`, from the counts by verdict and node, for these reasons."""
    possible = (ALLOWED, *reasons)
    nodes = sorted({node for _, node in verdicts if node})
    return [
        Sample((verdict, node), verdicts.get((verdict, node), 0))
        for node in nodes
        for verdict in possible
    ]


def sample_drains(counts: Mapping[str, Mapping[DrainOutcome, int]]) -> list[Sample]:
    """The samples of `DRAINS`."""
    return [
        Sample((node, outcome), outcomes.get(outcome, 0))
        for node, outcomes in counts.items()
        for outcome in DrainOutcome
    ]


def sample_stuck(diagnoses: Iterable[Diagnosis]) -> list[Sample]:
    """The samples of `STUCK_EVACUATIONS`."""
    stuck = Counter((one.source, one.state) for one in diagnoses if one.stuck)
    return [Sample((source, state), stuck[source, state]) for source in Source for state in State]
