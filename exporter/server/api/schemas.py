"""The types of the query API's answers; those of its requests are in `requests`.

The same types encode answers and generate the schemas of the OpenAPI document.
"""

from typing import Annotated

from msgspec import UNSET, Struct, UnsetType

from exporter.engine.evacuations.drain_outcomes import DrainOutcome
from exporter.engine.facts.model import (
    Checkpoint,
    EndReason,
    Mismatch,
    Reason,
    Resource,
    Trigger,
)
from exporter.health import HistoryFault, Staleness
from exporter.server.api.evacuation_schemas import (
    EvacuationAnswer,
    MoveAnswer,
    PendingAnswer,
    RequesterAnswer,
)
from exporter.server.fields import AsOf, BlindSpots, ObservedAt, Stale, Timestamp, means


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
        Timestamp | None,
        means("the end of the cooldown that blocks the VM; null: no cooldown blocks it"),
    ]
    retry_after_seconds: Annotated[
        float | None,
        means(
            "during a cooldown: the time from asOf to notBefore; else null. The end of a migration"
            " or an evacuation cannot be predicted: ask again in the next cycle, or wait on GET"
            " /v1/blocked"
        ),
    ]
    effective_cooldown_seconds: Annotated[
        float | None,
        means(
            "the cooldown after its last migration, even if it is over; null: no migration has"
            " ended"
        ),
    ]
    migrations_in_window: Annotated[
        int, means("ended migrations that count; each of them after the first doubles the cooldown")
    ]
    evacuating: Annotated[
        bool,
        means("whether its evacuation has been requested already; false if the VMI is unknown"),
    ]
    stuck: Annotated[
        bool,
        means("whether its evacuation or its other move is stuck, so that somebody must act"),
    ]
    drain: Annotated[
        DrainOutcome | None,
        means(
            "what a drain of its node would do to it; `stays` and `fails` mean that it does not"
            " leave; null: the VMI is unknown, or the VM has stopped"
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
    reason: Annotated[Reason, means("why it is blocked")]
    not_before: Annotated[Timestamp | None, means("when the cooldown ends; null for other reasons")]


class BlockedAnswer(Struct, rename="camel", kw_only=True):
    """Every blocked VMI; a caller may treat all others as allowed for `maxAgeSeconds`."""

    as_of: AsOf
    stale: Stale
    max_age_seconds: Annotated[
        float, means("how long a caller may treat VMIs that are not in the set as allowed")
    ]
    blocked: Annotated[
        list[BlockedVmi],
        means("sorted by namespace, name and checkpoint; a VMI can have one entry per checkpoint"),
    ]


class RuleAnswer(Struct, rename="camel", kw_only=True):
    """The result of one rule, even if an earlier rule blocks already."""

    rule: Annotated[str, means("the name of the rule")]
    checkpoint: Annotated[Checkpoint, means("the checkpoint it applies to")]
    reason: Annotated[Reason, means("the reason it gives if it blocks")]
    enabled: Annotated[bool, means("false: policy.guards switches the rule off")]
    silenced: Annotated[
        bool,
        means(
            "true: it cannot block, because a resource that it needs has had no contact for too"
            " long, or an object that it needs cannot be read"
        ),
    ]
    blocks: Annotated[bool, means("whether it blocks now")]
    why: Annotated[str, means("why it blocks or does not block, in words")]


class CooldownAnswer(Struct, rename="camel", kw_only=True):
    """How the cooldown is computed.

    effective = min(base * 2^(migrationsInWindow-1), cap); base = max(floor, duration).
    """

    ended_at: Annotated[Timestamp, means("when the last migration ended")]
    duration_seconds: Annotated[float, means("how long it took; 0: unknown")]
    migrations_in_window: Annotated[int, means("how many ended migrations count")]
    base_seconds: Annotated[float, means("the longer of the floor and the duration")]
    backed_off_seconds: Annotated[
        float, means("the base, doubled for each further migration in the window")
    ]
    effective_seconds: Annotated[float, means("backedOffSeconds, but at most the cap")]
    not_before: Annotated[
        Timestamp,
        means(
            "endedAt plus effectiveSeconds; earlier if older migrations leave the window before"
            " that, because fewer migrations count then"
        ),
    ]


class MigrationAnswer(Struct, rename="camel", kw_only=True):
    """One recorded migration."""

    uid: Annotated[str | None, means("the VMIM's UID; null: not known")]
    start: Annotated[Timestamp | None, means("when the migration started; null: not known")]
    end: Annotated[
        Timestamp | None, means("when it ended; null: it has not ended, or the time is unknown")
    ]
    outcome: Annotated[str, means("succeeded, failed or unknown")]
    handed_off: Annotated[
        bool, means("whether it reached a target pod; only such migrations count")
    ]
    in_window: Annotated[
        bool,
        means(
            "whether it counts: handed off, ended within policy.migrationHistoryWindow, and not"
            " failed if policy.countFailedMigrations is false"
        ),
    ]
    source_node: Annotated[
        str | None, means("the node that the VM left or was to leave; null: not known")
    ]
    target_node: Annotated[str | None, means("the node that it went to; null: not known")]
    trigger: Annotated[Trigger | None, means("why the VMIM was created; null: not known")]
    reason: Annotated[
        EndReason | None,
        means("why it failed, `none` if it succeeded; null: it has not ended, or not known"),
    ]
    requested_by: Annotated[
        RequesterAnswer | None,
        means(
            "who asked for it, null if not known: for an evacuation, whose eviction the webhook saw"
            " with admission.observe; for a manual migration, the user who created the VMIM (from"
            " KubeVirt 1.10 on)"
        ),
    ]


class LauncherAnswer(Struct, rename="camel", kw_only=True):
    """The VMI's current virt-launcher pod."""

    name: Annotated[str, means("the pod's name")]
    node: Annotated[str, means("the pod's node; empty: not scheduled yet")]
    phase: Annotated[str, means("the pod's phase")]
    ready: Annotated[bool, means("whether its condition Ready is True")]
    scheduled: Annotated[bool, means("whether its condition PodScheduled is True")]
    eviction_in_progress: Annotated[
        bool,
        means(
            "whether it has the annotation eviction-in-progress, so the descheduler counts it as"
            " being evicted"
        ),
    ]


class PolicyAnswer(Struct, rename="camel", kw_only=True):
    """The policy in force; a setting of 0 is off."""

    migration_cooldown_seconds: Annotated[float, means("the floor of a cooldown")]
    max_migration_cooldown_seconds: Annotated[float, means("the cap of a cooldown")]
    migration_history_window_seconds: Annotated[float, means("how long an ended migration counts")]
    count_failed_migrations: Annotated[bool, means("whether failed migrations count too")]
    guard_pending_migrations: Annotated[bool, means("whether an unfinished VMIM blocks")]
    guard_evacuations: Annotated[
        bool,
        means(
            "whether a requested evacuation blocks, unless the launcher pod has the annotation"
            " eviction-in-progress"
        ),
    ]
    override: Annotated[
        str | UnsetType,
        means(
            "the name of the entry of policy.overrides that applies to this VM; absent: none"
            " applies"
        ),
    ] = UNSET


class CheckpointVerdicts(Struct, rename="camel", kw_only=True):
    """The verdict at each checkpoint."""

    filter: Annotated[VerdictAnswer, means("may its pod be a candidate?")]
    pre_eviction: Annotated[VerdictAnswer, means("may it be evicted now?")]


class BlockedEvictionAnswer(Struct, rename="camel", kw_only=True):
    """An eviction that the admission webhook denied, or in mode `warn` would have denied."""

    user: Annotated[str, means("the user that requested it")]
    at: Annotated[Timestamp, means("when it was last requested")]
    times: Annotated[int, means("how often this user's evictions of the VMI were blocked")]
    reason: Annotated[Reason, means("why it was last blocked")]
    denied: Annotated[bool, means("false: admission.mode is warn, so the eviction was allowed")]


class VmiAnswer(Struct, rename="camel", kw_only=True):
    """Everything known about one VMI."""

    as_of: AsOf
    observed_at: ObservedAt
    stale: Stale
    unreadable_since: Annotated[
        Timestamp | None,
        means(
            "since when the VMI, its unfinished VMIM or its launcher pod cannot be read; null: all"
            " can be read. After kube.deadAfter, the rules that need such an object do not block"
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
    evacuation_node_name: Annotated[
        str | None, means("the node that the VM must leave; null: none")
    ]
    evacuation: Annotated[
        EvacuationAnswer | None, means("its evacuation; null: it is not being evacuated")
    ]
    move: Annotated[
        MoveAnswer | None,
        means(
            "its move without an evacuation; null: it is being evacuated, or it has no unfinished"
            " VMIM and has not just failed `stuck.failedAttempts` times"
        ),
    ]
    drain: Annotated[
        DrainOutcome | None,
        means("what a drain of its node would do to it; null: the VM has stopped"),
    ]
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
    launcher: Annotated[
        LauncherAnswer | None,
        means("its launcher pod; null: not found, or the exporter may not read pods"),
    ]
    blocked_evictions: Annotated[
        list[BlockedEvictionAnswer],
        means(
            "the last evictions of this VMI that this replica's admission webhook blocked, newest"
            " first, one per user; lost at a restart"
        ),
    ]
    policy: Annotated[PolicyAnswer, means("the policy in force")]
    blind_spots: BlindSpots


class ResourceAnswer(Struct, rename="camel", kw_only=True):
    """One watched resource, in one namespace or in all."""

    resource: Annotated[Resource, means("its plural name")]
    namespace: Annotated[str | None, means("the watched namespace; null: all namespaces")]
    synced: Annotated[bool, means("whether it has been listed completely")]
    rejected: Annotated[
        str | None,
        means("why the API server rejects the list or watch (HTTP 4xx); null: it does not"),
    ]
    trouble: Annotated[str | None, means("the present error of its watch; null: none")]
    contact_at: Annotated[
        Timestamp | None, means("when the last event, bookmark or list arrived; null: none yet")
    ]
    invalid_objects: Annotated[int, means("how many objects could not be read since the start")]


class HistoryStatus(Struct, rename="camel", kw_only=True):
    """The state of the stored history."""

    writes: Annotated[bool, means("whether this process is the writer")]
    written_at: Annotated[
        Timestamp | None,
        means(
            "the last time at which this process was the writer and every change was written;"
            " null: never"
        ),
    ]
    unwritten_since: Annotated[
        Timestamp | None, means("when the oldest unwritten change was made; null: none")
    ]
    vmis: Annotated[int, means("how many VMIs belong in it, including those not written yet")]
    bytes: Annotated[int, means("the size in bytes, including what is not written yet")]
    faults: Annotated[
        dict[HistoryFault, int],
        means(
            "how often each fault has occurred since the start; faults that have not occurred"
            " are left out"
        ),
    ]


class VmiCounts(Struct, rename="camel", kw_only=True):
    """How many VMIs there are, how many are blocked, and what drains would do to them."""

    known: Annotated[int, means("VMIs, except those in phase Succeeded or Failed")]
    allowed: Annotated[int, means("VMIs that no rule blocks at either checkpoint")]
    blocked: Annotated[dict[Reason, int], means("blocked VMIs, by their first reason")]
    drain: Annotated[
        dict[DrainOutcome, int],
        means("VMIs with a node, blocked or not, by the outcome of a drain of that node"),
    ]


class StatusAnswer(Struct, rename="camel", kw_only=True):
    """The health of this exporter, and how many VMIs it knows."""

    version: str
    as_of: AsOf
    observed_at: ObservedAt
    staleness: Annotated[
        Staleness,
        means(
            "stale: no contact about VMIs for kube.staleAfter; dead: no contact for"
            " kube.staleAfter plus kube.deadAfter, so the rules that need VMIs do not block"
        ),
    ]
    ready: Annotated[bool, means("whether it answers requests for verdicts")]
    waiting_for: Annotated[list[str], means("what the exporter must read before it is ready")]
    resources: list[ResourceAnswer]
    blind_spots: BlindSpots
    history: Annotated[
        HistoryStatus | None, means("the state of the stored history; null: no history is stored")
    ]
    vmis: Annotated[VmiCounts | None, means("counts of VMIs; null until the exporter is ready")]
