"""Counts and histograms since the start, exposed as metrics."""

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Container, Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import accumulate

from exporter.engine.evacuations.events import EventOutcome, EventReason
from exporter.engine.facts.mappings import put_newest
from exporter.engine.facts.model import (
    Checkpoint,
    EndReason,
    Instant,
    Mismatch,
    Outcome,
    Seconds,
    Trigger,
    Vmi,
)
from exporter.engine.facts.policy import Reason
from exporter.engine.store.evacuation_ends import EvacuationEnd, EvacuationOutcome
from exporter.engine.store.evictions import EvictionOutcome, RequesterKind
from exporter.engine.store.node_drains import DrainEnd
from exporter.engine.store.requesters import Source
from exporter.engine.verdicts.cooldown import Cooldown, CooldownMark


COOLDOWN_BUCKETS: tuple[Seconds, ...] = (900, 1800, 3600, 7200, 14400, 21600)
MIGRATION_BUCKETS: tuple[Seconds, ...] = (5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200)
EVACUATION_BUCKETS: tuple[Seconds, ...] = (60, 300, 600, 1800, 3600, 7200, 21600)
"""Of evacuations, of drains and of holds."""
SERIES_KEPT_FOR: Seconds = 86_400.0
"""A node's series stays at least a day after its last increase, so `increase(...[1d])` is right."""
TARGET_FAILED_WITHIN: Seconds = 3_600.0
"""`failed_targets` has the failures of the last hour, as the alert KubeVirtTargetNodeFailing."""
REQUEST_BUCKETS: tuple[Seconds, ...] = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 1, 5)


@dataclass(slots=True)
class Histogram:
    """Observations by bucket; the last bucket has no upper bound."""

    bounds: tuple[Seconds, ...]
    buckets: list[int] = field(init=False)
    total: Seconds = 0.0

    def __post_init__(self) -> None:
        self.buckets = [0] * (len(self.bounds) + 1)

    def observe(self, value: Seconds) -> None:
        """Add an observation."""
        self.buckets[bisect_left(self.bounds, value)] += 1
        self.total += value

    @property
    def count(self) -> int:
        """The number of observations."""
        return sum(self.buckets)

    def cumulative(self) -> list[tuple[str, int]]:
        """Prometheus's buckets: pairs of `le` and the count up to it, `+Inf` last."""
        labels = [*(f"{float(bound)}" for bound in self.bounds), "+Inf"]
        return list(zip(labels, accumulate(self.buckets), strict=True))


VMIS_ASKED_FOR = 1_000
"""How many VMIs `BlockedEvictions` remembers."""
USERS_ASKING = 4
"""How many users `BlockedEvictions` remembers per VMI."""


@dataclass(slots=True)
class BlockedEviction:
    """An eviction that a rule blocks, as the admission webhook was asked.

    The user requested it `times` times, the last time at `at`. That one was `denied`, or let
    through with a warning: in mode `warn`, or after `admission.maxHold`.
    """

    user: str
    at: Instant
    reason: Reason
    denied: bool
    times: int = 1


class BlockedEvictions:
    """The last blocked evictions of each VMI, by the VMI's UID; the oldest are dropped."""

    def __init__(self) -> None:
        self._by_vmi: dict[str, dict[str, BlockedEviction]] = {}

    def record(self, vmi_uid: str, blocked: BlockedEviction) -> None:
        """Add a blocked eviction."""
        users = self._by_vmi.get(vmi_uid, {})
        before = users.get(blocked.user)
        if before is not None:
            blocked.times += before.times
        put_newest(users, blocked.user, blocked, most=USERS_ASKING)
        put_newest(self._by_vmi, vmi_uid, users, most=VMIS_ASKED_FOR)

    def of(self, vmi_uid: str) -> list[BlockedEviction]:
        """The blocked evictions of one VMI, newest first."""
        return [*reversed(self._by_vmi.get(vmi_uid, {}).values())]


HELD_VMIS = 10_000
"""How many VMIs `DenialPeriods` remembers: more than a drained node has."""
SHORTEST_PAUSE: Seconds = 900.0
"""A shorter pause in the denials of a VMI does not end its period."""


@dataclass(slots=True)
class DenialPeriod:
    """Evictions of a VMI that the admission webhook has denied without a pause.

    `since` is the first denial. The period is over at `until` if no other denial follows.
    """

    vmi: Vmi
    since: Instant
    until: Instant
    reason: Reason


class DenialPeriods:
    """The present period of each VMI, by UID; if there are too many, the oldest is dropped."""

    def __init__(self) -> None:
        self._by_vmi: dict[str, DenialPeriod] = {}

    def find(self, vmi: Vmi, now: Instant) -> DenialPeriod | None:
        """The VMI's period, if that has not ended. A period ends when the VMI leaves its node."""
        period = self._by_vmi.get(vmi.uid)
        return period if period and period.vmi.node == vmi.node and now <= period.until else None

    def extend(self, vmi: Vmi, reason: Reason, cooldown: Seconds, now: Instant) -> None:
        """Begin or extend the VMI's period, because an eviction is denied."""
        present = self.find(vmi, now)
        since = now if present is None else present.since
        until = now + max(cooldown, SHORTEST_PAUSE)
        put_newest(self._by_vmi, vmi.uid, DenialPeriod(vmi, since, until, reason), most=HELD_VMIS)

    def end(self, vmi: Vmi) -> None:
        """End the VMI's period, because the VMI is being evacuated."""
        self._by_vmi.pop(vmi.uid, None)

    def open(self, now: Instant) -> list[DenialPeriod]:
        """The periods that have not ended."""
        return [period for period in self._by_vmi.values() if now <= period.until]

    def forget(self, now: Instant) -> None:
        """Drop the periods that have ended."""
        self._by_vmi = {uid: period for uid, period in self._by_vmi.items() if now <= period.until}


MARKED_VMIS = 50_000
"""How many VMIs `PreventedMoves` remembers: more than are asked for within their cooldowns."""


class PreventedMoves:
    """VMIs that were asked for within their cooldown, by namespace.

    A VMI counts once in each cooldown, however often it is asked for; after a restart, perhaps once
    more. `migration_seconds` has how long the last migrations of these VMIs took.
    """

    def __init__(self) -> None:
        self.moves: Counter[str] = Counter()
        self.migration_seconds: defaultdict[str, Seconds] = defaultdict(float)
        self._counted: dict[str, tuple[CooldownMark, Instant]] = {}

    def count(self, vmi: Vmi, cooldown: Cooldown, mark: CooldownMark) -> None:
        """Count the move that this cooldown prevents, unless it was counted already."""
        known, _ = self._counted.get(vmi.uid, (CooldownMark(), 0.0))
        put_newest(self._counted, vmi.uid, (mark, cooldown.released_at), most=MARKED_VMIS)
        if mark.is_new_after(known):
            self.moves[vmi.namespace] += 1
            self.migration_seconds[vmi.namespace] += cooldown.duration

    def forget(self, now: Instant) -> None:
        """Drop the marks of the cooldowns that have ended; the counts stay."""
        self._counted = {uid: counted for uid, counted in self._counted.items() if now < counted[1]}

    def keep_namespaces(self, namespaces: Container[str]) -> None:
        """Drop the counts of all other namespaces."""
        for namespace in [namespace for namespace in self.moves if namespace not in namespaces]:
            del self.moves[namespace], self.migration_seconds[namespace]


class ReviewOutcome(StrEnum):
    """The result of an admission review of an eviction."""

    UNLISTED_USER = "unlisted_user"
    UNKNOWN_POD = "unknown_pod"
    UNAVAILABLE = "unavailable"
    EVACUATING = "evacuating"
    HELD_TOO_LONG = "held_too_long"
    ALLOWED = "allowed"
    DENIED = "denied"
    WARNED = "warned"


@dataclass
class Counters:
    """Counts of blocked answers (by reason, node, namespace), of requests and of reviews.

    Rejected connections are counted by listener, rejected requests by status. `cooldowns` has the
    cooldown of each blocked answer, `begun_cooldowns` each cooldown once. `blocked_at`: for
    each node and namespace, when the last answer was blocked, or when VMIs were last found there.
    `reviews` is None without an admission webhook, `events` is None if no Events are written.
    `returned_migrations` counts migrations that brought a VM back to a node that it had left within
    the history window. `migrations_to_node` counts migrations by the node that they went to;
    `migrated_at` has the last beginning or end for each of these nodes, and `failed_targets` for
    each of them the UIDs of the VMIs whose migration there failed, and when. `drains` counts drains
    of nodes by how they ended, `evacuations` counts evacuations by who requested them and how they
    ended. Durations are those of drains and evacuations that succeeded. `evictions` counts
    Evictions of launcher pods by who asked and how they ended, and `held_evictions` has how long
    the responder held each of them. `verdicts` counts verdicts by checkpoint (None: all rules) and
    by whether they allow the eviction. `task_failures` counts unexpected exceptions of background
    tasks, by the task's name. `prevented` has the moves that a cooldown prevented.
    """

    blocks: Counter[tuple[Reason, str, str]] = field(default_factory=Counter)
    blocked_at: dict[tuple[str, str], Instant] = field(default_factory=dict)
    cooldowns: Histogram = field(default_factory=lambda: Histogram(COOLDOWN_BUCKETS))
    begun_cooldowns: Histogram = field(default_factory=lambda: Histogram(COOLDOWN_BUCKETS))
    unknown_candidates: Counter[Mismatch] = field(default_factory=Counter)
    requests: dict[str, Histogram] = field(default_factory=dict)
    rejected_connections: Counter[str] = field(default_factory=Counter)
    rejected_requests: Counter[int] = field(default_factory=Counter)
    reviews: Counter[ReviewOutcome] | None = None
    events: Counter[tuple[EventReason, EventOutcome]] | None = None
    migrations: Counter[tuple[Outcome, Trigger, EndReason]] = field(default_factory=Counter)
    migration_durations: dict[Trigger, Histogram] = field(
        default_factory=lambda: {trigger: Histogram(MIGRATION_BUCKETS) for trigger in Trigger}
    )
    returned_migrations: int = 0
    migrations_to_node: Counter[tuple[str, Outcome]] = field(default_factory=Counter)
    migrated_at: dict[str, Instant] = field(default_factory=dict)
    failed_targets: dict[str, dict[str, Instant]] = field(default_factory=dict)
    drains: Counter[DrainEnd] = field(default_factory=Counter)
    drain_durations: Histogram = field(default_factory=lambda: Histogram(EVACUATION_BUCKETS))
    evacuations: Counter[tuple[Source, EvacuationOutcome]] = field(default_factory=Counter)
    evacuation_durations: dict[Source, Histogram] = field(
        default_factory=lambda: {source: Histogram(EVACUATION_BUCKETS) for source in Source}
    )
    evictions: Counter[tuple[RequesterKind, EvictionOutcome]] = field(default_factory=Counter)
    held_evictions: Histogram = field(default_factory=lambda: Histogram(EVACUATION_BUCKETS))
    verdicts: Counter[tuple[Checkpoint | None, bool]] = field(default_factory=Counter)
    task_failures: Counter[str] = field(default_factory=Counter)
    blocked_evictions: BlockedEvictions = field(default_factory=BlockedEvictions)
    denial_periods: DenialPeriods = field(default_factory=DenialPeriods)
    prevented: PreventedMoves = field(default_factory=PreventedMoves)

    def count_block(
        self,
        reason: Reason,
        node: str,
        namespace: str,
        cooldown: Seconds | None,
        *,
        now: Instant,
    ) -> None:
        """Count a blocked answer, and observe its cooldown if the cooldown is the reason."""
        self.blocks[reason, node, namespace] += 1
        self.blocked_at[node, namespace] = now
        if reason is Reason.COOLDOWN and cooldown is not None:
            self.cooldowns.observe(cooldown)

    def forget_blocks(
        self, nodes: Container[str], vmis: Iterable[tuple[str, str]], now: Instant
    ) -> None:
        """Drop the counts of a node and a namespace `SERIES_KEPT_FOR` after their last block.

        `vmis` are the namespaces and names of all VMIs. If the node and the namespace still have
        VMIs, the counts are kept for another `SERIES_KEPT_FOR`.
        """
        old = {pair for pair, at in self.blocked_at.items() if now - at >= SERIES_KEPT_FOR}
        if not old:
            return
        namespaces = {namespace for namespace, _ in vmis}
        gone = {pair for pair in old if pair[0] not in nodes or pair[1] not in namespaces}
        self.blocks = Counter({key: n for key, n in self.blocks.items() if key[1:] not in gone})
        self.blocked_at |= dict.fromkeys(old, now)
        for pair in gone:
            del self.blocked_at[pair]
        self.prevented.keep_namespaces(namespaces | {pair[1] for pair in self.blocked_at})

    def count_migration_to(
        self, node: str, vmi_uid: str, outcome: Outcome, ended_at: Instant
    ) -> None:
        """Count a migration of a VMI ("" if that is gone) by the node that it went to."""
        self.migrations_to_node[node, outcome] += 1
        self.migrated_at[node] = max(ended_at, self.migrated_at.get(node, ended_at))
        if outcome is Outcome.FAILED and vmi_uid:
            self.failed_targets[node] = self._find_recent(node, ended_at) | {vmi_uid: ended_at}

    def expect_migration_to(self, node: str, at: Instant) -> None:
        """Note that a migration to a node has begun, so that its counts exist before its end."""
        self.migrated_at[node] = max(at, self.migrated_at.get(node, at))

    def list_failed_targets(self, now: Instant) -> list[tuple[str, str]]:
        """The UIDs of VMIs that failed to migrate to a node within `TARGET_FAILED_WITHIN`, and to
        no other node, each with that node. A VMI that fails on several nodes says nothing about
        one of them.
        """
        recent = {node: self._find_recent(node, now) for node in self.failed_targets}
        nodes = Counter(uid for vmis in recent.values() for uid in vmis)
        return [
            (uid, node) for node, vmis in sorted(recent.items()) for uid in vmis if nodes[uid] == 1
        ]

    def _find_recent(self, node: str, now: Instant) -> dict[str, Instant]:
        failed = self.failed_targets.get(node, {})
        return {uid: at for uid, at in failed.items() if now - at < TARGET_FAILED_WITHIN}

    def forget_targets(self, nodes: Container[str], now: Instant) -> None:
        """Drop the counts of targets without VMIs `SERIES_KEPT_FOR` after their last migration, and
        the failures that are older than `TARGET_FAILED_WITHIN`.
        """
        recent = {node: self._find_recent(node, now) for node in self.failed_targets}
        self.failed_targets = {node: vmis for node, vmis in recent.items() if vmis}
        for node, at in list(self.migrated_at.items()):
            if node not in nodes and now - at >= SERIES_KEPT_FOR:
                del self.migrated_at[node]
                for outcome in Outcome:
                    del self.migrations_to_node[node, outcome]

    def count_drain(self, end: DrainEnd, duration: Seconds) -> None:
        """Count a drain that has ended; the duration counts if it succeeded."""
        self.drains[end] += 1
        if end is DrainEnd.SUCCEEDED:
            self.drain_durations.observe(duration)

    def count_evacuation(self, end: EvacuationEnd) -> None:
        """Count an evacuation that has ended; the duration counts if it succeeded."""
        self.evacuations[end.source, end.outcome] += 1
        if end.outcome is EvacuationOutcome.SUCCEEDED:
            self.evacuation_durations[end.source].observe(end.duration)

    def count_eviction(self, kind: RequesterKind, outcome: EvictionOutcome) -> None:
        """Count an Eviction of a launcher pod that has ended."""
        self.evictions[kind, outcome] += 1

    def count_request(self, endpoint: str, duration: Seconds) -> None:
        """Count an answered request."""
        self.expect_requests(endpoint)
        self.requests[endpoint].observe(duration)

    def expect_requests(self, endpoint: str) -> None:
        """Create an endpoint's histogram before its first request."""
        if endpoint not in self.requests:
            self.requests[endpoint] = Histogram(REQUEST_BUCKETS)
