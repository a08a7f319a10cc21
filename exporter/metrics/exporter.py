"""The metrics of the exporter itself: its watches, requests, listeners and settings."""

from collections import Counter
from collections.abc import Callable

from msgspec.structs import asdict

from exporter import __version__
from exporter.engine.evacuations.events import EventOutcome, EventReason
from exporter.engine.facts.model import Checkpoint, Mismatch
from exporter.engine.facts.policy import COOLDOWN_DURATIONS, DEFAULT_POLICY
from exporter.health import Restart, Watched
from exporter.metrics.family import HistogramFamily, Values, View, ViewFamily
from exporter.words import Stability


def _read_watches(read: Callable[[list[Watched]], float]) -> Callable[[View], Values]:
    """A reader that computes a value per resource, from its watches in all namespaces."""
    return lambda view: [
        (resource, read(view.health.of(resource))) for resource in view.health.resources
    ]


EXPORTER: tuple[ViewFamily | HistogramFamily, ...] = (
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
        read=_read_watches(
            lambda watches: bool(watches) and all(watch.synced for watch in watches)
        ),
    ),
    ViewFamily(
        name="kubevirt_eviction_exporter_permission_missing",
        stability=Stability.STABLE,
        help=(
            "1 if the exporter lacks permission for the resource in at least one watched "
            "namespace, and works without it there."
        ),
        labels=("resource",),
        read=_read_watches(lambda watches: any(watch.rejected for watch in watches)),
    ),
    ViewFamily(
        name="kubevirt_eviction_exporter_last_contact_timestamp_seconds",
        stability=Stability.STABLE,
        help=(
            "Time of the last event, bookmark or list of the resource, of several namespaces the "
            "oldest; 0 before the first contact, and without permission."
        ),
        labels=("resource",),
        read=_read_watches(
            lambda watches: min(
                (watch.contact or 0.0 for watch in watches if not watch.rejected), default=0.0
            )
        ),
    ),
    ViewFamily(
        name="kubevirt_eviction_exporter_objects",
        stability=Stability.STABLE,
        help=(
            "Objects in memory, by resource; of the PodDisruptionBudgets only those that forbid an "
            "eviction."
        ),
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
        read=_read_watches(lambda watches: sum(watch.lists for watch in watches)),
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
        read=_read_watches(lambda watches: sum(watch.invalid_objects for watch in watches)),
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
