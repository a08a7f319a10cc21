"""The types of the query API's answers; those of its requests are in `requests`.

The same types encode answers and generate the schemas of the OpenAPI document.
"""

from msgspec import UNSET, Struct, UnsetType

from exporter.engine.evacuations.drain_outcomes import DrainOutcome
from exporter.engine.facts.model import Checkpoint, EndReason, Mismatch, Resource, Trigger
from exporter.engine.facts.policy import PolicyValues, Reason
from exporter.health import Staleness
from exporter.server.api.evacuation_schemas import (
    EvacuationAnswer,
    MoveAnswer,
    ObstructionAnswer,
    PendingAnswer,
    RequesterAnswer,
)
from exporter.server.fields import AsOf, BlindSpots, ObservedAt, Stale, Timestamp


class VerdictAnswer(Struct, rename="camel", kw_only=True, gc=False):
    """The verdict on one candidate."""

    namespace: str
    """as in the request"""
    name: str
    """as in the request"""
    known: bool
    """whether there is such a VMI; another one is `allowed`, because no rule can block it"""
    mismatch: Mismatch | None
    """why it is not known: no VMI has this name, or its UID differs"""
    allowed: bool
    """whether no rule blocks it at the requested checkpoint. A VMI that is being evacuated can be
    allowed too"""
    reason: Reason | None
    """why it is blocked"""
    not_before: Timestamp | None
    """the end of the cooldown that blocks the VM"""
    retry_after_seconds: float | None
    """if `reason` is cooldown: the time from asOf to notBefore; else null: ask again in the next
    cycle"""
    effective_cooldown_seconds: float | None
    """the cooldown after its last migration, even if it is over"""
    migrations_in_window: int
    """ended migrations that count; each after the first doubles the cooldown"""
    evacuating: bool
    """whether its evacuation has been requested already"""
    stuck: bool
    """whether its evacuation or its other move is stuck"""
    drain: DrainOutcome | None
    """what a drain of its node would do to it; null: it is unknown, or has stopped"""


class VerdictsAnswer(Struct, rename="camel", kw_only=True):
    """One verdict per candidate, in the order of the request."""

    as_of: AsOf
    observed_at: ObservedAt
    stale: Stale
    verdicts: list[VerdictAnswer]


class VmisAnswer(Struct, rename="camel", kw_only=True):
    """The VMIs of one name."""

    namespaces: list[str]
    """the namespaces that have a VMI of this name, sorted"""


class BlockedVmi(Struct, rename="camel", kw_only=True, frozen=True, gc=False):
    """A VMI and a checkpoint at which it is blocked."""

    namespace: str
    name: str
    vmi_uid: str
    node: str
    """the node it runs on"""
    checkpoint: Checkpoint
    """the checkpoint that blocks it"""
    reason: Reason
    """why it is blocked"""
    not_before: Timestamp | None
    """when the cooldown ends; null for other reasons"""


class BlockedAnswer(Struct, rename="camel", kw_only=True):
    """Every blocked VMI; a caller may treat all others as allowed for `maxAgeSeconds`."""

    as_of: AsOf
    stale: Stale
    max_age_seconds: float
    """how old a copy may become"""
    blocked: list[BlockedVmi]
    """sorted by namespace, name and checkpoint; a VMI can have one entry per checkpoint"""


class RuleAnswer(Struct, rename="camel", kw_only=True):
    """The result of one rule, even if an earlier rule blocks already."""

    rule: str
    """the name of the rule"""
    checkpoint: Checkpoint
    """the checkpoint it applies to"""
    reason: Reason
    """the reason it gives if it blocks"""
    enabled: bool
    """false: policy.guards switches the rule off"""
    silenced: bool
    """true: it cannot block, because of a resource without contact, or an object that cannot be
    read"""
    blocks: bool
    """whether it blocks now"""
    why: str
    """why it blocks or does not block, in words"""


class CooldownAnswer(Struct, rename="camel", kw_only=True):
    """How the cooldown is computed.

    effective = min(base * 2^(migrationsInWindow-1), cap); base = max(floor, duration).
    """

    ended_at: Timestamp
    """when the last migration ended"""
    duration_seconds: float
    """how long it took; 0: unknown"""
    migrations_in_window: int
    """how many ended migrations count"""
    base_seconds: float
    """the longer of the floor and the duration"""
    backed_off_seconds: float
    """the base, doubled for each further migration in the window"""
    effective_seconds: float
    """backedOffSeconds, but at most the cap"""
    not_before: Timestamp
    """endedAt plus effectiveSeconds, or earlier if older migrations leave the window before"""


class MigrationAnswer(Struct, rename="camel", kw_only=True):
    """One recorded migration."""

    uid: str | None
    """the VMIM's UID"""
    start: Timestamp | None
    """when the migration started"""
    end: Timestamp | None
    """when it ended"""
    outcome: str
    """succeeded, failed or unknown"""
    handed_off: bool
    """whether it reached a target pod; only such migrations count"""
    in_window: bool
    """whether it counts: handed off, ended within policy.migrationHistoryWindow, and not failed if
    policy.countFailedMigrations is false"""
    source_node: str | None
    """the node that the VM left or was to leave"""
    target_node: str | None
    """the node that it went to"""
    trigger: Trigger | None
    """why the VMIM was created"""
    reason: EndReason | None
    """why it failed; `none` if it succeeded"""
    requested_by: RequesterAnswer | None
    """for an evacuation, whose eviction the webhook saw with admission.observe; for a manual
    migration, who created the VMIM (from KubeVirt 1.10 on)"""

    @property
    def is_under_way(self) -> bool:
        """Whether it is still running. A failed migration may have no end either."""
        return self.end is None and self.outcome == "unknown"


class LauncherAnswer(Struct, rename="camel", kw_only=True):
    """The VMI's current virt-launcher pod."""

    name: str
    """the pod's name"""
    node: str
    """the pod's node; empty: not scheduled yet"""
    phase: str
    """the pod's phase"""
    ready: bool
    """whether its condition Ready is True"""
    scheduled: bool
    """whether its condition PodScheduled is True"""
    eviction_in_progress: bool
    """whether it has the annotation eviction-in-progress"""


class PolicyAnswer(PolicyValues, rename=None, frozen=True, kw_only=True):
    """The policy in force; a setting of 0 is off."""

    override: str | UnsetType = UNSET
    """the name of the entry of policy.overrides that applies to this VM; absent: none applies"""


class CheckpointVerdicts(Struct, rename="camel", kw_only=True):
    """The verdict at each checkpoint."""

    filter: VerdictAnswer
    """may its pod be a candidate?"""
    pre_eviction: VerdictAnswer
    """may it be evicted now?"""


class BlockedEvictionAnswer(Struct, rename="camel", kw_only=True):
    """An eviction that the admission webhook denied, or in mode `warn` would have denied."""

    user: str
    """the user that requested it"""
    at: Timestamp
    """when it was last requested"""
    times: int
    """how often this user's evictions of the VMI were blocked"""
    reason: Reason
    """why it was last blocked"""
    denied: bool
    """whether the last one was denied; false: admission.mode is warn, or admission.maxHold is
    over"""

    @property
    def outcome(self) -> str:
        """What became of the last one, in words."""
        return "denied" if self.denied else "allowed with a warning"


class EvictionRequesterAnswer(Struct, rename="camel", kw_only=True):
    """Who has made an EvictionRequest for the pod."""

    name: str
    """the name in its `spec.requester`"""
    intent: str
    """Eviction, or Withdrawn"""


class EvictionRequestAnswer(Struct, rename="camel", kw_only=True):
    """The Eviction of lifecycle.k8s.io for the VM's launcher pod."""

    requesters: list[EvictionRequesterAnswer]
    """who has asked; those with the intent Withdrawn ask no more"""
    since: Timestamp | None
    """when the Eviction was created"""
    responder: str
    """the responder whose turn it is, or was last; empty: none yet"""
    state: str
    """the responder's state: Inactive, Active, Interrupted, Canceled or Completed; empty: none
    yet"""
    message: str
    """what the responder says, cut to 1,024 characters; empty: nothing"""
    expected_completion_time: Timestamp | None
    """when the responder expects to be done"""


class VmiAnswer(Struct, rename="camel", kw_only=True):
    """Everything known about one VMI."""

    as_of: AsOf
    observed_at: ObservedAt
    stale: Stale
    unreadable_since: Timestamp | None
    """since when the VMI, its unfinished VMIM or its launcher pod cannot be read. After
    kube.deadAfter, the rules that need such an object do not block"""
    namespace: str
    name: str
    vmi_uid: str
    node: str
    """the node it runs on; empty: none yet"""
    phase: str
    """KubeVirt's phase; Succeeded or Failed: the VM has stopped"""
    created_at: Timestamp | None
    evacuation_node_name: str | None
    """the node that the VM must leave"""
    evacuation: EvacuationAnswer | None
    """its evacuation"""
    move: MoveAnswer | None
    """its move without an evacuation: an unfinished VMIM, or `stuck.failedAttempts` failures in a
    row"""
    drain: DrainOutcome | None
    """the outcome of a drain of its node; null: it has stopped"""
    eviction_request: EvictionRequestAnswer | None
    """the Eviction of its launcher pod, for which EvictionRequests ask; null: none is known"""
    obstruction: ObstructionAnswer | None
    """why a drain would not simply move it; null: it would, or the VM has stopped"""
    paused: bool
    """whether its guest is paused"""
    utility_volumes: tuple[str, ...]
    """its utility volumes: KubeVirt does not migrate it while they are attached"""
    verdicts: CheckpointVerdicts
    rules: list[RuleAnswer]
    """in the order of evaluation; the first that blocks gives the reason"""
    cooldown: CooldownAnswer | None
    """how the cooldown is computed, even if it is over"""
    migrations: list[MigrationAnswer]
    """recorded migrations by their end, the oldest first"""
    pending_migrations: list[PendingAnswer]
    """its unfinished VMIMs"""
    launcher: LauncherAnswer | None
    """its launcher pod; null: not found, or not readable"""
    blocked_evictions: list[BlockedEvictionAnswer]
    """the last evictions that this replica's webhook blocked, newest first, one per user; lost at a
    restart"""
    policy: PolicyAnswer
    """the policy in force"""
    blind_spots: BlindSpots


class ResourceAnswer(Struct, rename="camel", kw_only=True):
    """One watched resource, in one namespace or in all."""

    resource: Resource
    """its plural name"""
    namespace: str | None
    """the watched namespace"""
    synced: bool
    """whether it has been listed completely"""
    rejected: str | None
    """why the API server rejects the list or watch (HTTP 4xx)"""
    trouble: str | None
    """the present error of its watch"""
    contact_at: Timestamp | None
    """when the last event, bookmark or list arrived"""
    invalid_objects: int
    """how many objects could not be read since the start"""


class HistoryStatus(Struct, rename="camel", kw_only=True):
    """The state of the history file."""

    written_at: Timestamp | None
    """when this process last wrote it"""
    vmis: int
    """how many VMIs were in it then"""
    trouble: str | None
    """why the last write failed"""


class ResponderStatus(Struct, rename="camel", kw_only=True):
    """How EvictionRequests are answered."""

    turns: int | None
    """how many Evictions wait for an answer of the exporter; null: another replica answers"""
    trouble: str | None
    """why the last answer could not be written"""


class VmiCounts(Struct, rename="camel", kw_only=True):
    """How many VMIs there are, how many are blocked, and what drains would do to them."""

    known: int
    """VMIs, except those in phase Succeeded or Failed"""
    allowed: int
    """VMIs that no rule blocks at either checkpoint"""
    blocked: dict[Reason, int]
    """blocked VMIs, by their first reason"""
    drain: dict[DrainOutcome, int]
    """VMIs by the outcome of a drain of their node"""


class PreventedAnswer(Struct, rename="camel", kw_only=True):
    """Moves that cooldowns have prevented, as far as this exporter was asked."""

    since: Timestamp
    """when this exporter started"""
    moves: int
    """VMs that were asked for within their cooldown, once per cooldown"""
    migration_seconds: float
    """how long the last migrations of these VMs took, in total"""


class StatusAnswer(Struct, rename="camel", kw_only=True):
    """The health of this exporter, and how many VMIs it knows."""

    version: str
    as_of: AsOf
    observed_at: ObservedAt
    staleness: Staleness
    """stale: no contact about VMIs for kube.staleAfter; dead: for another kube.deadAfter"""
    ready: bool
    """whether it answers requests for verdicts"""
    waiting_for: list[str]
    """what the exporter must read before it is ready"""
    resources: list[ResourceAnswer]
    blind_spots: BlindSpots
    history: HistoryStatus | None
    """the history file; null: there is none"""
    responder: ResponderStatus | None
    """null: EvictionRequests are not answered"""
    vmis: VmiCounts | None
    """null until the exporter is ready"""
    prevented: PreventedAnswer
