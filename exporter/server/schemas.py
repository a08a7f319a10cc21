"""The types of the query API's answers; those of its requests are in `requests`.

The same types encode answers and generate the schemas of the OpenAPI document.
"""

from datetime import datetime
from typing import Annotated

from msgspec import UNSET, Meta, Struct, UnsetType

from exporter.engine.diagnosis import Cause, Source, State
from exporter.engine.drain import DrainOutcome
from exporter.engine.model import (
    Checkpoint,
    Mismatch,
    Reason,
    Resource,
    WhySource,
)
from exporter.health import HistoryFault, Staleness


Namespace = Annotated[str, Meta(min_length=1, max_length=63)]
Name = Annotated[str, Meta(min_length=1, max_length=253)]
Uid = Annotated[str, Meta(max_length=128)]
Remark = Annotated[str, Meta(max_length=253)]
Timestamp = Annotated[datetime, Meta(tz=True)]
"""Written as RFC 3339 in UTC, with microseconds unless the second is whole."""


def means(text: str) -> Meta:
    """A field's description in the OpenAPI document."""
    return Meta(description=text)


AsOf = Annotated[Timestamp, means("the instant of the answer, by the exporter's clock")]
ObservedAt = Annotated[
    Timestamp | None,
    means("the last proof of contact with the API server; null before the first"),
]
Stale = Annotated[
    bool,
    means(
        "no contact with the API server for kube.staleAfter, or one of these VMIs is in a"
        " namespace that the exporter may no longer read"
    ),
]
BlindSpots = Annotated[
    dict[str, str], means("the resources that the exporter may not read, and why")
]


class VerdictAnswer(Struct, rename="camel", kw_only=True, gc=False):
    """The verdict on one candidate."""

    namespace: Annotated[str, means("as in the request")]
    name: Annotated[str, means("as in the request")]
    known: Annotated[bool, means("whether there is such a VMI")]
    mismatch: Annotated[
        Mismatch | None,
        means("why it is unknown: no VMI has this name, or its UID differs; null: it is known"),
    ]
    allowed: Annotated[
        bool,
        means(
            "true if no rule blocks it at the requested checkpoint. A VMI that is being evacuated"
            " can be allowed too: see `evacuating`"
        ),
    ]
    reason: Annotated[Reason | None, means("why it is blocked; null: it is allowed")]
    not_before: Annotated[
        Timestamp | None, means("under cooldown: when it is allowed, if nothing else happens")
    ]
    retry_after_seconds: Annotated[
        float | None,
        means(
            "under cooldown: from asOf to notBefore; else null: the end of a migration or an"
            " evacuation is unknown, so ask again next cycle, or wait on GET /v1/blocked"
        ),
    ]
    effective_cooldown_seconds: Annotated[
        float | None,
        means("the cooldown after its last migration, even if it is over; null: none has ended"),
    ]
    migrations_in_window: Annotated[
        int, means("ended migrations that count; each after the first doubles the cooldown")
    ]
    evacuating: Annotated[
        bool, means("whether KubeVirt is to move it off a node already; false if it is unknown")
    ]
    stuck: Annotated[bool, means("whether that evacuation is stuck and needs a person")]
    drain: Annotated[
        DrainOutcome | None,
        means(
            "what a drain of its node would do to it; `stays` and `fails`: it does not leave;"
            " null: it is unknown"
        ),
    ]


class VerdictsAnswer(Struct, rename="camel", kw_only=True):
    """One verdict per candidate, in the order of the request."""

    as_of: AsOf
    observed_at: ObservedAt
    stale: Stale
    verdicts: list[VerdictAnswer]


class BlockedVmi(Struct, rename="camel", kw_only=True, frozen=True, gc=False):
    """A VMI and a checkpoint at which it is blocked."""

    namespace: str
    name: str
    vmi_uid: str
    node: Annotated[str, means("the node it runs on")]
    checkpoint: Annotated[Checkpoint, means("the checkpoint that blocks it")]
    reason: Annotated[Reason, means("why")]
    not_before: Annotated[Timestamp | None, means("when the cooldown ends; null for other reasons")]


class BlockedAnswer(Struct, rename="camel", kw_only=True):
    """Every blocked VMI; a caller may treat all others as allowed for `maxAgeSeconds`."""

    as_of: AsOf
    stale: Stale
    max_age_seconds: Annotated[
        float, means("how long a caller may treat VMIs outside the set as allowed")
    ]
    blocked: Annotated[
        list[BlockedVmi],
        means("sorted by namespace, name and checkpoint; a VMI can have one entry per checkpoint"),
    ]


class RuleAnswer(Struct, rename="camel", kw_only=True):
    """The result of one rule, even if an earlier rule blocks already."""

    rule: Annotated[str, means("its name")]
    checkpoint: Annotated[Checkpoint, means("the checkpoint it applies to")]
    reason: Annotated[Reason, means("the reason it gives if it blocks")]
    enabled: Annotated[bool, means("false: policy.guards switches it off")]
    silenced: Annotated[
        bool, means("true: it cannot block, because the watch of a resource it needs is dead")
    ]
    blocks: Annotated[bool, means("whether it blocks now")]
    why: Annotated[str, means("what it found, in words")]


class CooldownAnswer(Struct, rename="camel", kw_only=True):
    """effective = min(base * 2^(migrationsInWindow-1), cap); base = max(floor, duration)."""

    ended_at: Annotated[Timestamp, means("when the last migration ended")]
    duration_seconds: Annotated[float, means("how long it took; 0: unknown")]
    migrations_in_window: Annotated[int, means("how many ended migrations count")]
    base_seconds: Annotated[float, means("the longer of the floor and the duration")]
    backed_off_seconds: Annotated[
        float, means("the base, doubled for each further migration in the window")
    ]
    effective_seconds: Annotated[float, means("the same, at most the cap")]
    not_before: Annotated[
        Timestamp,
        means("endedAt plus effectiveSeconds; earlier if older migrations leave the window first"),
    ]


class MigrationAnswer(Struct, rename="camel", kw_only=True):
    """One recorded migration."""

    uid: Annotated[str | None, means("the VMIM's UID; null: only its end is known")]
    start: Annotated[Timestamp | None, means("null: not known")]
    end: Annotated[Timestamp | None, means("null: it has not ended, or the time is unknown")]
    outcome: Annotated[str, means("succeeded, failed or unknown")]
    handed_off: Annotated[
        bool, means("whether it reached a target pod; only such migrations count")
    ]
    in_window: Annotated[
        bool, means("whether it counts: handed off, and ended within policy.migrationHistoryWindow")
    ]


class PendingAnswer(Struct, rename="camel", kw_only=True):
    """An unfinished VMIM of this VMI."""

    name: Annotated[str, means("the VMIM's name")]
    uid: Annotated[str, means("the VMIM's UID")]
    phase: Annotated[str, means("its phase; empty: none yet")]
    created_at: Annotated[Timestamp | None, means("when the VMIM was created")]
    handed_off: Annotated[bool, means("whether it has reached a target pod")]


class LauncherAnswer(Struct, rename="camel", kw_only=True):
    """The VMI's current virt-launcher pod."""

    name: Annotated[str, means("the pod's name")]
    node: Annotated[str, means("empty: not scheduled yet")]
    phase: Annotated[str, means("the pod's phase")]
    ready: Annotated[bool, means("its condition Ready")]
    scheduled: Annotated[bool, means("its condition PodScheduled")]
    eviction_in_progress: Annotated[
        bool, means("whether it has the annotation eviction-in-progress: the descheduler counts it")
    ]


class PolicyAnswer(Struct, rename="camel", kw_only=True):
    """The policy in force; 0 means off."""

    migration_cooldown_seconds: Annotated[float, means("the floor of a cooldown")]
    max_migration_cooldown_seconds: Annotated[float, means("the cap of a cooldown")]
    migration_history_window_seconds: Annotated[float, means("how long an ended migration counts")]
    count_failed_migrations: Annotated[bool, means("whether failed migrations count too")]
    guard_pending_migrations: Annotated[bool, means("whether an unfinished VMIM blocks")]
    guard_evacuations: Annotated[
        bool, means("whether an evacuation that the descheduler does not count blocks")
    ]
    override: Annotated[
        str | UnsetType,
        means("the name of the entry of policy.overrides that is for this VM; absent: none is"),
    ] = UNSET


class CheckpointVerdicts(Struct, rename="camel", kw_only=True):
    """The verdict at each checkpoint."""

    filter: Annotated[VerdictAnswer, means("may its pod be a candidate?")]
    pre_eviction: Annotated[VerdictAnswer, means("may it be evicted now?")]


class BackoffAnswer(Struct, rename="camel", kw_only=True):
    """KubeVirt's present pause before the next attempt."""

    seconds: Annotated[float, means("how long the pause is")]
    next_try_at: Annotated[Timestamp, means("when it ends")]


class CancelAnswer(Struct, rename="camel", kw_only=True):
    """The request that cancels an evacuation (KubeVirt 1.7); a running attempt goes on."""

    method: Annotated[str, means("the HTTP method")]
    path: Annotated[str, means("the path on the API server")]
    body: Annotated[dict[str, str], means("the JSON body; it must match the stored value")]
    command: Annotated[str, means("the same as a shell command with kubectl")]


class WhyAnswer(Struct, rename="camel", kw_only=True):
    """A reason in the cluster's own words, with invisible characters as escapes."""

    source: Annotated[WhySource, means("the condition or object that gives it")]
    reason: Annotated[str, means("a word, such as Unschedulable; empty: none is given")]
    message: Annotated[
        str, means("at most 1,024 characters; empty: none is given, or the VMI is not evacuating")
    ]
    at: Annotated[Timestamp | None, means("when the cluster dated it; null: undated, and true now")]


class LastSeenAnswer(Struct, rename="camel", kw_only=True):
    """An evacuation as it was when its VMI could last be seen."""

    at: Annotated[Timestamp, means("the last contact with the VMIs of its namespace")]
    state: Annotated[State, means("what held it up then")]
    stuck: Annotated[bool, means("whether it was stuck then")]


class RequesterAnswer(Struct, rename="camel", kw_only=True):
    """The user whose eviction began the evacuation."""

    user: Annotated[str, means("the name as the API server has it; groups are not kept")]
    at: Annotated[Timestamp, means("when the eviction was reviewed")]


class EvacuationAnswer(Struct, rename="camel", kw_only=True):
    """One evacuation with its diagnosis."""

    namespace: str
    name: str
    vmi_uid: str
    node: Annotated[str, means("the node it runs on")]
    evacuation_node_name: Annotated[str, means("the node it is to leave")]
    eviction_strategy: Annotated[str, means("the VMI's own; empty: the cluster's default")]
    source: Annotated[
        Source,
        means(
            "who requested it, by the priority of the newest VMIM (system-maintenance:"
            " `descheduler`, system-critical: `other`), else by the VMI's annotation"
            " kubevirt.io/eviction-source (`descheduler`); `unknown`: neither is set, as"
            " always before KubeVirt 1.7"
        ),
    ]
    requested_at: Annotated[Timestamp, means("the earliest known time of the request")]
    requested_by: Annotated[
        RequesterAnswer | None, means("who requested it, with `admission.observe`; null: unknown")
    ]
    age_seconds: Annotated[float, means("from requestedAt to asOf")]
    state: Annotated[State, means("what holds it up")]
    stuck: Annotated[bool, means("whether it needs attention")]
    stuck_by: Annotated[list[Cause], means("why it counts as stuck; empty: it does not")]
    failed_attempts: Annotated[int, means("failed migrations since the request; a lower bound")]
    backoff: Annotated[
        BackoffAnswer | None, means("KubeVirt's present pause; null: none, or unknown")
    ]
    leftover: Annotated[
        bool,
        means(
            "whether its drain is over: it is not the descheduler's, and its node is schedulable"
            " again"
        ),
    ]
    diverged: Annotated[
        bool, means("KubeVirt still evacuates it, but the descheduler thinks it is over")
    ]
    attempt: Annotated[PendingAnswer | None, means("the unfinished VMIM; null: none")]
    mode: Annotated[
        str | None,
        means(
            "how the running migration copies memory: PreCopy, PostCopy or Paused; null: none runs."
            " Its progress is in virt-handler's metrics kubevirt_vmi_migration_*"
        ),
    ]
    why: Annotated[
        list[WhyAnswer], means("what the cluster itself says about it, newest first; at most eight")
    ]
    cause: Annotated[
        WhyAnswer | None,
        means("the one of `why` that nextStep follows from; null: the cluster gives none"),
    ]
    next_step: Annotated[str, means("what to do, in one sentence")]
    command: Annotated[str, means("the shell command to begin with, for this VM")]
    runbook: Annotated[str, means("the name of the runbook that has more")]
    last_seen: Annotated[
        LastSeenAnswer | None,
        means("what it was when its VMI could last be seen; null: the VMI is seen"),
    ]
    cancel: Annotated[
        CancelAnswer | None, means("the request that cancels it; null if that could harm the VM")
    ]


class EvacuationsAnswer(Struct, rename="camel", kw_only=True):
    """Every evacuation, the longest first."""

    as_of: AsOf
    observed_at: ObservedAt
    stale: Stale
    evacuations: list[EvacuationAnswer]
    blind_spots: BlindSpots


class DrainProgressAnswer(Struct, rename="camel", kw_only=True):
    """How far the drain of a node has come, as far as the exporter has seen it."""

    since: Annotated[Timestamp, means("the earliest request of the VMs that left or remain")]
    asked: Annotated[int, means("VMs that were asked to leave: `left` and `remaining`")]
    left: Annotated[int, means("VMs that have left")]
    remaining: Annotated[int, means("VMs that were asked to leave and are still there")]
    failing: Annotated[int, means("those of `remaining` that do not leave: they fail or stay")]
    external: Annotated[int, means("those of `remaining` that somebody else must move or stop")]
    last_left_at: Annotated[Timestamp | None, means("when the last one left; null: none has")]
    seconds_per_vmi: Annotated[
        float | None, means("the median interval between departures; null: fewer than three")
    ]
    estimate_seconds: Annotated[
        float | None,
        means("until the last one has left, at that pace; null: no pace, or one does not leave"),
    ]


class NodeAnswer(Struct, rename="camel", kw_only=True):
    """What a drain of a node would do to its VMs, without those that have stopped."""

    node: Annotated[str, means("its name")]
    vmis: Annotated[int, means("VMs on it; the six counts below add up to this")]
    leaves: Annotated[int, means("VMs that would be migrated")]
    waits: Annotated[
        int, means("VMs whose migration is in progress, or KubeVirt's migration limits are reached")
    ]
    fails: Annotated[
        int,
        means(
            "VMs whose evacuation is stuck, or has failed `stuck.failedAttempts` times since it was"
            " requested"
        ),
    ]
    restarts: Annotated[
        int,
        means("VMs that would go down: strategy None, or LiveMigrateIfPossible and not migratable"),
    ]
    stays: Annotated[
        int, means("VMs that would never leave: strategy LiveMigrate, and not migratable")
    ]
    external: Annotated[int, means("VMs that somebody else must move or stop: strategy External")]
    can_be_emptied: Annotated[bool, means("false while `stays` or `fails` is above 0")]
    depends_on_others: Annotated[bool, means("true while `external` is above 0")]
    at_least_seconds: Annotated[
        float | None,
        means(
            "a lower bound of how long the migrations take, if each takes as long as the VM's last"
            " successful one; null: no such time is known, or the node cannot be emptied"
        ),
    ]
    schedulable: Annotated[
        bool | None, means("false: it is cordoned; null: the exporter may not see nodes")
    ]
    cordoned_at: Annotated[
        Timestamp | None, means("since when it is cordoned; null: it is not, or that is not known")
    ]
    conditions: Annotated[
        tuple[str, ...],
        means(
            "which of the conditions `DrainInProgress`, `Drained` and `MaintenancePlanned` of"
            " Kubernetes 1.37 are true; read of cordoned nodes only"
        ),
    ]
    drain: Annotated[DrainProgressAnswer | None, means("null: no VM is asked to leave it")]


class NodesAnswer(Struct, rename="camel", kw_only=True):
    """Every node that has VMs."""

    as_of: AsOf
    stale: Stale
    nodes: Annotated[list[NodeAnswer], means("sorted by name")]


class NodeCandidate(Struct, rename="camel", kw_only=True):
    """A VM of the node, and what a drain would do to it."""

    namespace: str
    name: str
    outcome: Annotated[DrainOutcome, means("what would happen to it")]
    why: Annotated[
        list[WhyAnswer],
        means(
            "what the cluster itself says about it, newest first, at most eight; of a VM that is"
            " not evacuating only a word why it is not migratable"
        ),
    ]
    cause: Annotated[
        WhyAnswer | None, means("the one of `why` that counts; null: the cluster gives none")
    ]
    failed_attempts: Annotated[
        int,
        means(
            "failed migrations since its evacuation was requested, else since its last success; a"
            " lower bound"
        ),
    ]
    last_duration_seconds: Annotated[
        float | None, means("how long its last successful migration took; null: not known")
    ]


class DrainAnswer(NodeAnswer, kw_only=True):
    """What a drain of a node would do to each of its VMs."""

    as_of: AsOf
    stale: Stale
    candidates: Annotated[list[NodeCandidate], means("sorted by namespace and name")]


class HeldEvictionAnswer(Struct, rename="camel", kw_only=True):
    """An eviction that the admission webhook denied, or in mode `warn` would have denied."""

    user: Annotated[str, means("the user that requested it")]
    at: Annotated[Timestamp, means("when it was last requested")]
    times: Annotated[int, means("how often this user's evictions of the VMI were held")]
    reason: Annotated[Reason, means("why it was last held")]
    denied: Annotated[bool, means("false: admission.mode is warn, so the eviction was let through")]


class VmiAnswer(Struct, rename="camel", kw_only=True):
    """Everything known about one VMI."""

    as_of: AsOf
    observed_at: ObservedAt
    stale: Stale
    unreadable_since: Annotated[
        Timestamp | None,
        means(
            "since when the VMI, its unfinished VMIM or its launcher pod cannot be read any more;"
            " after kube.deadAfter rules without an expiry do not block; null: all can be read"
        ),
    ]
    namespace: str
    name: str
    vmi_uid: str
    node: Annotated[str, means("the node it runs on; empty: none yet")]
    phase: Annotated[
        str,
        means(
            "KubeVirt's phase; Succeeded or Failed: the VM has stopped, so nothing is left to move"
        ),
    ]
    created_at: Timestamp | None
    evacuation_node_name: Annotated[str | None, means("the node it is to leave; null: none")]
    evacuation: Annotated[EvacuationAnswer | None, means("null: it is not being evacuated")]
    drain: Annotated[DrainOutcome, means("what a drain of its node would do to it")]
    verdicts: CheckpointVerdicts
    rules: Annotated[
        list[RuleAnswer],
        means("in the order of evaluation; the first that blocks gives the reason"),
    ]
    cooldown: Annotated[
        CooldownAnswer | None,
        means("how the cooldown is computed, even if it is over; null: no migration has ended"),
    ]
    migrations: Annotated[
        list[MigrationAnswer], means("recorded migrations by their end, the oldest first")
    ]
    pending_migrations: Annotated[list[PendingAnswer], means("its unfinished VMIMs")]
    launcher: Annotated[LauncherAnswer | None, means("null: not found, or pods may not be read")]
    held_evictions: Annotated[
        list[HeldEvictionAnswer],
        means(
            "the last evictions of this VMI that this replica's admission webhook held, newest"
            " first, one per user; lost at a restart"
        ),
    ]
    policy: Annotated[PolicyAnswer, means("the policy in force")]
    blind_spots: BlindSpots


class ResourceAnswer(Struct, rename="camel", kw_only=True):
    """One watched resource, in one namespace or in all."""

    resource: Annotated[Resource, means("its plural name")]
    namespace: Annotated[str | None, means("null: all namespaces")]
    synced: Annotated[bool, means("whether it has been listed completely")]
    refused: Annotated[str | None, means("why the API server refuses it; null: it does not")]
    trouble: Annotated[str | None, means("the present error; null: none")]
    contact_at: Annotated[Timestamp | None, means("the last event, bookmark or list")]
    refused_objects: Annotated[int, means("unreadable objects since the start")]


class HistoryStatus(Struct, rename="camel", kw_only=True):
    """The state of the stored history."""

    writes: Annotated[bool, means("whether this process writes it")]
    written_at: Annotated[Timestamp | None, means("when this process last saw it fully written")]
    unwritten_since: Annotated[
        Timestamp | None, means("when the oldest unwritten change was made; null: none")
    ]
    vmis: Annotated[int, means("how many VMIs it holds")]
    bytes: Annotated[int, means("its size")]
    faults: Annotated[
        dict[HistoryFault, int],
        means("how often each fault occurred since the start; without zeros"),
    ]


class VmiCounts(Struct, rename="camel", kw_only=True):
    """How many VMIs there are, how many no rule blocks, and what evicting them would do."""

    known: Annotated[int, means("VMIs, without those in phase Succeeded or Failed")]
    allowed: Annotated[int, means("VMIs that no rule blocks at either checkpoint")]
    held: Annotated[dict[Reason, int], means("blocked VMIs, by their first reason")]
    drain: Annotated[
        dict[DrainOutcome, int],
        means("VMIs with a node, blocked or not, by what a drain of it would do to them"),
    ]


class StatusAnswer(Struct, rename="camel", kw_only=True):
    """The health of this exporter, and how many VMIs it knows."""

    version: str
    as_of: AsOf
    observed_at: ObservedAt
    staleness: Annotated[
        Staleness,
        means(
            "dead: without contact for so long that only cooldowns, which end by themselves, block"
        ),
    ]
    ready: Annotated[bool, means("whether it answers verdicts")]
    waiting_for: Annotated[list[str], means("what must be listed before it is ready")]
    resources: list[ResourceAnswer]
    blind_spots: BlindSpots
    history: Annotated[HistoryStatus | None, means("null: none is stored")]
    vmis: Annotated[VmiCounts | None, means("null until it is ready")]


class Problem(Struct, kw_only=True):
    """An error (RFC 9457, application/problem+json)."""

    title: Annotated[str, means("the kind of error")]
    status: Annotated[int, means("the HTTP status")]
    detail: Annotated[str, means("what is wrong, where, and what was expected")]
    type: Annotated[str, means("always about:blank")] = "about:blank"
