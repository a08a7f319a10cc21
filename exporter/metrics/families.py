"""Every metric: its name, type, help and labels, with the function that reads it.

To add a metric, add an entry to the table of its data source.
"""

from collections import Counter

from msgspec.structs import asdict

from exporter import __version__
from exporter.engine.evacuations.events import EventOutcome, EventReason
from exporter.engine.facts.model import (
    Checkpoint,
    EndReason,
    Mismatch,
    Outcome,
    Trigger,
)
from exporter.engine.facts.policy import COOLDOWN_DURATIONS, DEFAULT_POLICY
from exporter.engine.store.evacuation_ends import EvacuationOutcome
from exporter.engine.store.node_drains import DrainEnd
from exporter.engine.store.requesters import Source
from exporter.health import Restart
from exporter.metrics.family import (
    ONE_VMI,
    CoolingFamily,
    DrainFamily,
    EvacuationFamily,
    Family,
    HistogramFamily,
    PreventedFamily,
    Sample,
    ViewFamily,
)
from exporter.metrics.samples import (
    read_ended_evictions,
    read_eviction_states,
    read_targets,
    read_watches,
)
from exporter.words.stability import Stability


BLOCKS = Family(
    name="descheduler_kubevirt_eviction_blocks_total",
    stability=Stability.STABLE,
    help=(
        "How often a verdict, the webhook or the responder blocked an eviction; node is the VMI's"
        " node."
    ),
    labels=("reason", "node", "namespace"),
)
PREVENTED: tuple[PreventedFamily, ...] = (
    PreventedFamily(
        name="kubevirt_eviction_exporter_moves_prevented_total",
        stability=Stability.EXPERIMENTAL,
        help=(
            "VMs that were asked for within their cooldown, once per cooldown; each replica counts"
            " what it is asked."
        ),
        read=lambda prevented: prevented.moves,
    ),
    PreventedFamily(
        name="kubevirt_eviction_exporter_prevented_migration_seconds_total",
        stability=Stability.EXPERIMENTAL,
        help=(
            "How long the last migrations of the VMs in"
            " kubevirt_eviction_exporter_moves_prevented_total took, each time that one counts."
        ),
        read=lambda prevented: prevented.migration_seconds,
    ),
)
"""What the cooldowns have prevented."""
EXPORTER: tuple[ViewFamily | HistogramFamily, ...] = (
    HistogramFamily(
        name="descheduler_kubevirt_effective_cooldown_seconds",
        stability=Stability.STABLE,
        help="Effective cooldowns of VMIs, one for each eviction that a cooldown blocked.",
        read=lambda view: [((), view.counters.cooldowns)],
    ),
    ViewFamily(
        name="kubevirt_eviction_exporter_build_info",
        stability=Stability.STABLE,
        help="Always 1; the label is the version of this exporter.",
        labels=("version",),
        read=lambda _view: [(__version__, 1)],
    ),
    ViewFamily(
        name="kubevirt_eviction_exporter_synced",
        stability=Stability.STABLE,
        help="1 if a complete list of the resource has been read in every watched namespace.",
        labels=("resource",),
        read=read_watches(lambda watches: bool(watches) and all(watch.synced for watch in watches)),
    ),
    ViewFamily(
        name="kubevirt_eviction_exporter_permission_missing",
        stability=Stability.STABLE,
        help=(
            "1 if the exporter lacks permission for the resource in at least one watched "
            "namespace, and works without it there."
        ),
        labels=("resource",),
        read=read_watches(lambda watches: any(watch.rejected for watch in watches)),
    ),
    ViewFamily(
        name="kubevirt_eviction_exporter_last_contact_timestamp_seconds",
        stability=Stability.STABLE,
        help=(
            "Time of the last event, bookmark or list of the resource, of several namespaces the "
            "oldest; 0 before the first contact, and without permission."
        ),
        labels=("resource",),
        read=read_watches(
            lambda watches: min(
                (watch.contact or 0.0 for watch in watches if not watch.rejected), default=0.0
            )
        ),
    ),
    ViewFamily(
        name="kubevirt_eviction_exporter_objects",
        stability=Stability.STABLE,
        help="Objects in memory, by resource.",
        labels=("resource",),
        read=lambda view: [
            (resource, view.store.count(resource)) for resource in view.health.resources
        ],
    ),
    ViewFamily(
        name="kubevirt_eviction_exporter_lists_total",
        stability=Stability.STABLE,
        help="Complete lists read; more than one per namespace means that a watch was interrupted.",
        labels=("resource",),
        read=read_watches(lambda watches: sum(watch.lists for watch in watches)),
    ),
    ViewFamily(
        name="kubevirt_eviction_exporter_watch_restarts_total",
        stability=Stability.STABLE,
        help=(
            "Watch restarts by reason; 'ended' means the server's own timeout, 'no_progress' that"
            " several watches in a row received nothing."
        ),
        labels=("resource", "reason"),
        read=lambda view: [
            ((resource, why), sum(watch.restarts[why] for watch in view.health.of(resource)))
            for resource in view.health.resources
            for why in Restart
        ],
    ),
    ViewFamily(
        name="kubevirt_eviction_exporter_invalid_objects_total",
        stability=Stability.STABLE,
        help=(
            "Invalid objects and watch lines; the exporter keeps the last valid version of an "
            "object."
        ),
        labels=("resource",),
        read=read_watches(lambda watches: sum(watch.invalid_objects for watch in watches)),
    ),
    ViewFamily(
        name="kubevirt_eviction_exporter_task_failures_total",
        stability=Stability.STABLE,
        help=(
            "Unexpected errors of background tasks, which then went on (the log event task_failed"
            " has the traceback), and errors of the history file (task history)."
        ),
        labels=("task",),
        read=lambda view: sorted(view.counters.task_failures.items()),
    ),
    ViewFamily(
        name="kubevirt_eviction_exporter_unknown_candidates_total",
        stability=Stability.STABLE,
        help=(
            "Verdicts that were requested about unknown VMIs, by reason: unknown name, or "
            "different UID."
        ),
        labels=("reason",),
        read=lambda view: [
            (mismatch, view.counters.unknown_candidates[mismatch]) for mismatch in Mismatch
        ],
    ),
    ViewFamily(
        name="kubevirt_eviction_exporter_verdicts_total",
        stability=Stability.STABLE,
        help=(
            "Verdicts about evictions, without dry runs, by checkpoint ('all' for the webhook and "
            "for requests without one) and by whether the verdict allows the eviction."
        ),
        labels=("checkpoint", "allowed"),
        read=lambda view: [
            (
                (checkpoint or "all", str(allowed).lower()),
                view.counters.verdicts[checkpoint, allowed],
            )
            for checkpoint in (*Checkpoint, None)
            for allowed in (True, False)
        ],
    ),
    HistogramFamily(
        name="kubevirt_eviction_exporter_request_duration_seconds",
        stability=Stability.STABLE,
        help="Time to answer a request, by endpoint; blocked_wait is slow on purpose (long poll).",
        labels=("endpoint",),
        read=lambda view: sorted(view.counters.requests.items()),
    ),
    ViewFamily(
        name="kubevirt_eviction_exporter_rejected_connections_total",
        stability=Stability.STABLE,
        help="Connections closed because of limits.connections or the memory limit, by listener.",
        labels=("listener",),
        read=lambda view: view.counters.rejected_connections.items(),
    ),
    ViewFamily(
        name="kubevirt_eviction_exporter_rejected_requests_total",
        stability=Stability.STABLE,
        help="Requests answered with an error, by HTTP status.",
        labels=("status",),
        read=lambda view: [
            (str(status), count)
            for status, count in sorted(view.counters.rejected_requests.items())
        ],
    ),
    ViewFamily(
        name="kubevirt_eviction_exporter_certificate_not_after_timestamp_seconds",
        stability=Stability.STABLE,
        help="Time at which the certificate of a TLS listener expires.",
        labels=("listener",),
        read=lambda view: view.health.certificates.items(),
    ),
    ViewFamily(
        name="kubevirt_eviction_exporter_admission_reviews_total",
        stability=Stability.STABLE,
        help="Evictions that the admission webhook reviewed, by outcome, without dry runs.",
        labels=("outcome",),
        read=lambda view: (view.counters.reviews or Counter()).items(),
    ),
    ViewFamily(
        name="kubevirt_eviction_exporter_events_total",
        stability=Stability.STABLE,
        help="Kubernetes Events about VMIs, by reason and outcome; absent if events are off.",
        labels=("reason", "outcome"),
        read=lambda view: [
            ((reason, outcome), view.counters.events[reason, outcome])
            for reason in EventReason
            for outcome in EventOutcome
            if view.counters.events is not None
        ],
    ),
    ViewFamily(
        name="kubevirt_eviction_exporter_policy_seconds",
        stability=Stability.STABLE,
        help="Value of each setting of the policy and of each entry of policy.overrides; 0 means"
        " off.",
        labels=("policy", "setting"),
        read=lambda view: [
            ((name, setting), getattr(policy, setting))
            for name, policy in (
                (DEFAULT_POLICY, view.policy),
                *((override.name, override.policy) for override in view.policy.overrides),
            )
            for setting in COOLDOWN_DURATIONS
        ],
    ),
    ViewFamily(
        name="kubevirt_eviction_exporter_migration_limit",
        stability=Stability.STABLE,
        help="Parallel migrations that KubeVirt allows; absent without permission for kubevirts.",
        labels=("scope",),
        read=lambda view: (
            None if view.store.kubevirt is None else asdict(view.store.kubevirt.limits).items()
        ),
    ),
)
"""The metrics of the exporter itself and of the cluster's settings."""
VMIS = Family(
    name="descheduler_kubevirt_vmis",
    stability=Stability.STABLE,
    help="VMIs per node and current verdict: allowed, or the reason of the block.",
    labels=("verdict", "node"),
)
DRAINS = Family(
    name="kubevirt_eviction_exporter_node_drain_vmis",
    stability=Stability.STABLE,
    help="VMIs of the node, by what would happen to them if the node were drained now (outcome).",
    labels=("node", "outcome"),
)
CORDONED = Family(
    name="kubevirt_node_cordoned_vmis",
    stability=Stability.STABLE,
    help=(
        "VMIs on a node that is cordoned or has the drain taint, whether or not anybody drains it; "
        "absent for other nodes."
    ),
    labels=("node",),
)
NODE_DRAINS: tuple[DrainFamily, ...] = (
    DrainFamily(
        name="kubevirt_node_drain_started_timestamp_seconds",
        stability=Stability.STABLE,
        help="Time at which the drain of the node began; absent without a drain.",
        read=lambda drain: drain.since,
    ),
    DrainFamily(
        name="kubevirt_node_drain_last_departure_timestamp_seconds",
        stability=Stability.STABLE,
        help="Time at which a VM most recently left the drained node; absent if none has left.",
        read=lambda drain: drain.last_left_at,
    ),
    DrainFamily(
        name="kubevirt_node_drain_left_vmis",
        stability=Stability.STABLE,
        help="VMIs that have left the node since its drain began, each counted once.",
        read=lambda drain: drain.left,
    ),
    DrainFamily(
        name="kubevirt_node_drain_remaining_vmis",
        stability=Stability.STABLE,
        help=(
            "VMIs of the drained node that are being evacuated, or have the drain outcome 'fails' "
            "or 'stays'."
        ),
        read=lambda drain: drain.remaining,
    ),
    DrainFamily(
        name="kubevirt_node_drain_failing_vmis",
        stability=Stability.STABLE,
        help="VMIs of the drained node with the drain outcome 'fails' or 'stays'.",
        read=lambda drain: drain.failing,
    ),
    DrainFamily(
        name="kubevirt_node_drain_stuck",
        stability=Stability.STABLE,
        help="1 if the drain of the node is stuck: no VM leaves it.",
        read=lambda drain: drain.stuck,
    ),
)
EVACUATIONS: tuple[EvacuationFamily, ...] = (
    EvacuationFamily(
        name="kubevirt_vmi_evacuation_requested_timestamp_seconds",
        stability=Stability.STABLE,
        help="Time at which the evacuation of the VMI from the node was requested or first seen.",
        sample=lambda key, _vmi, d: Sample(key, d.requested_at),
    ),
    EvacuationFamily(
        name="kubevirt_vmi_evacuation_info",
        stability=Stability.STABLE,
        help=(
            "1 for each evacuating VMI, with its evictionStrategy and who requested the "
            "evacuation (source)."
        ),
        labels=(*ONE_VMI, "strategy", "source"),
        sample=lambda key, vmi, d: Sample((*key, vmi.eviction_strategy, d.source), 1),
    ),
    EvacuationFamily(
        name="kubevirt_vmi_evacuation_state",
        stability=Stability.STABLE,
        help="1 for the current state of each evacuation; the state says what delays it.",
        labels=(*ONE_VMI, "state"),
        sample=lambda key, _vmi, d: Sample((*key, d.state), 1),
    ),
    EvacuationFamily(
        name="kubevirt_vmi_evacuation_stuck",
        stability=Stability.STABLE,
        help=(
            "1 if the evacuation is stuck: it exceeded stuck.after without a migration, or "
            "failed stuck.failedAttempts times."
        ),
        sample=lambda key, _vmi, d: Sample(key, d.stuck),
    ),
    EvacuationFamily(
        name="kubevirt_vmi_evacuation_diverged",
        stability=Stability.STABLE,
        help=(
            "1 if the launcher pod has lacked the annotation eviction-in-progress for two minutes."
        ),
        sample=lambda key, _vmi, d: Sample(key, d.diverged),
    ),
    EvacuationFamily(
        name="kubevirt_vmi_evacuation_failed_attempts",
        stability=Stability.STABLE,
        help="Migrations that failed since the evacuation was requested; a lower bound.",
        sample=lambda key, _vmi, d: Sample(key, d.failed_attempts),
    ),
)
MOVES = Family(
    name="kubevirt_vmi_migration_stuck",
    stability=Stability.STABLE,
    help=(
        "1 if a migration of a VMI that is not being evacuated is stuck; present while such a "
        "migration goes on."
    ),
    labels=(*ONE_VMI, "trigger"),
)
MOVE_STATES = Family(
    name="kubevirt_vmi_migration_state",
    stability=Stability.STABLE,
    help=(
        "1 for the state of a migration of a VMI that is not being evacuated; present while such a "
        "migration goes on."
    ),
    labels=(*ONE_VMI, "state"),
)
DENIED = Family(
    name="kubevirt_vmi_eviction_denied_timestamp_seconds",
    stability=Stability.STABLE,
    help=(
        "When the webhook began to deny evictions of the VMI. Present only if this "
        "time is more than stuck.migrationTimeout ago, and the last denial was because of a "
        "migration."
    ),
    labels=ONE_VMI,
)
FAILED_TARGETS = Family(
    name="kubevirt_vmi_failed_target",
    stability=Stability.STABLE,
    help=(
        "1 if a migration of the VMI to the node (target), and to no other node, failed within "
        "the last hour; absent otherwise."
    ),
    labels=("namespace", "name", "target"),
)
COOLING: tuple[CoolingFamily, ...] = (
    CoolingFamily(
        name="kubevirt_vmi_eviction_not_before_timestamp_seconds",
        stability=Stability.STABLE,
        help="Time at which the cooldown of the VMI ends; absent if it has no cooldown.",
        sample=lambda vmi, c: Sample((vmi.namespace, vmi.name, vmi.node), c.not_before),
    ),
    CoolingFamily(
        name="kubevirt_vmi_eviction_cooldown_seconds",
        stability=Stability.STABLE,
        help=(
            "Effective cooldown of the VMI; absent if it has none. The label 'policy' has the "
            "name of the entry of policy.overrides that applies, or 'default'."
        ),
        labels=(*ONE_VMI, "policy"),
        sample=lambda vmi, c: Sample(
            (vmi.namespace, vmi.name, vmi.node, vmi.override or DEFAULT_POLICY), c.effective
        ),
    ),
    CoolingFamily(
        name="kubevirt_vmi_migrations_in_window",
        stability=Stability.STABLE,
        help=(
            "Migrations of the VMI that ended inside migrationHistoryWindow; absent if it has no "
            "cooldown."
        ),
        labels=("namespace", "name"),
        sample=lambda vmi, c: Sample((vmi.namespace, vmi.name), c.migrations_in_window),
    ),
)
STUCK_EVACUATIONS = Family(
    name="kubevirt_eviction_exporter_stuck_evacuations",
    stability=Stability.STABLE,
    help="Stuck evacuations, by who requested them (source) and what delays them (state).",
    labels=("source", "state"),
)
LEFT_OUT = Family(
    name="kubevirt_eviction_exporter_vmis_left_out",
    stability=Stability.STABLE,
    help="VMIs that have no series of their own because limits.vmiSeries is reached.",
)
MIGRATIONS: tuple[ViewFamily | HistogramFamily, ...] = (
    ViewFamily(
        name="kubevirt_eviction_exporter_migrations_total",
        stability=Stability.STABLE,
        help="Ended migrations, by outcome, purpose (trigger) and cause of failure (reason).",
        labels=("outcome", "trigger", "reason"),
        read=lambda view: [
            (
                (outcome.name.lower(), trigger, reason),
                view.counters.migrations[outcome, trigger, reason],
            )
            for outcome in (Outcome.SUCCEEDED, Outcome.FAILED)
            for trigger in Trigger
            for reason in EndReason
            if (reason is EndReason.NONE) == (outcome is Outcome.SUCCEEDED)
        ],
    ),
    HistogramFamily(
        name="kubevirt_eviction_exporter_cooldown_duration_seconds",
        stability=Stability.STABLE,
        help="Effective cooldowns, each observed once, when it begins.",
        read=lambda view: [((), view.counters.begun_cooldowns)],
    ),
    HistogramFamily(
        name="kubevirt_eviction_exporter_migration_duration_seconds",
        stability=Stability.STABLE,
        help="How long successful migrations took, without their time in the queue.",
        labels=("trigger",),
        read=lambda view: view.counters.migration_durations.items(),
    ),
    ViewFamily(
        name="kubevirt_eviction_exporter_returned_migrations_total",
        stability=Stability.STABLE,
        help="Successful migrations that brought a VM back to a node that it had left within the"
        " history window.",
        read=lambda view: view.counters.returned_migrations,
    ),
    ViewFamily(
        name="kubevirt_eviction_exporter_migrations_to_node_total",
        stability=Stability.STABLE,
        help="Ended migrations that had a target node, by this node (node) and outcome.",
        labels=("node", "outcome"),
        read=read_targets,
    ),
    ViewFamily(
        name="kubevirt_eviction_exporter_evacuations_total",
        stability=Stability.STABLE,
        help=(
            "Evacuations that ended, by who requested them (source) and how they ended (outcome); "
            "each replica counts what it saw."
        ),
        labels=("source", "outcome"),
        read=lambda view: [
            ((source, outcome), view.counters.evacuations[source, outcome])
            for source in Source
            for outcome in EvacuationOutcome
        ],
    ),
    HistogramFamily(
        name="kubevirt_eviction_exporter_evacuation_duration_seconds",
        stability=Stability.STABLE,
        help="Time from request to end of the evacuations that succeeded, by who requested them.",
        labels=("source",),
        read=lambda view: view.counters.evacuation_durations.items(),
    ),
    ViewFamily(
        name="kubevirt_eviction_exporter_drains_total",
        stability=Stability.STABLE,
        help="Drains of nodes that ended, by how they ended (outcome).",
        labels=("outcome",),
        read=lambda view: [(end, view.counters.drains[end]) for end in DrainEnd],
    ),
    HistogramFamily(
        name="kubevirt_eviction_exporter_drain_duration_seconds",
        stability=Stability.STABLE,
        help="How long the drains of nodes took that succeeded.",
        read=lambda view: [((), view.counters.drain_durations)],
    ),
    ViewFamily(
        name="kubevirt_eviction_exporter_eviction_requests",
        stability=Stability.EXPERIMENTAL,
        help="Evictions of launcher pods that have not ended, by the state of their responder.",
        labels=("state",),
        read=read_eviction_states,
    ),
    ViewFamily(
        name="kubevirt_eviction_exporter_eviction_requests_total",
        stability=Stability.EXPERIMENTAL,
        help=(
            "Evictions of launcher pods that have ended, by who asked (requester_kind) and how they"
            " ended (outcome)."
        ),
        labels=("requester_kind", "outcome"),
        read=read_ended_evictions,
    ),
    HistogramFamily(
        name="kubevirt_eviction_exporter_eviction_request_hold_seconds",
        stability=Stability.EXPERIMENTAL,
        help="How long the responder held the Evictions that it does not hold any more.",
        read=lambda view: (
            [] if view.health.responder is None else [((), view.counters.held_evictions)]
        ),
    ),
)
FAMILIES: tuple[Family, ...] = (
    BLOCKS,
    *PREVENTED,
    *EXPORTER,
    VMIS,
    DRAINS,
    CORDONED,
    *NODE_DRAINS,
    *EVACUATIONS,
    MOVES,
    MOVE_STATES,
    DENIED,
    FAILED_TARGETS,
    *COOLING,
    STUCK_EVACUATIONS,
    LEFT_OUT,
    *MIGRATIONS,
)
"""Every metric, in the order of the exposition."""
