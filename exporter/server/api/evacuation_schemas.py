"""The types of the query API's answers about evacuations and about nodes."""

from typing import Annotated

from msgspec import Struct

from exporter.engine.evacuations.diagnosis import Cause
from exporter.engine.evacuations.drain_outcomes import DrainOutcome
from exporter.engine.facts.evidence import RequestedThrough
from exporter.engine.facts.model import Trigger, WhySource
from exporter.engine.facts.states import State
from exporter.engine.store.requesters import Source
from exporter.server.fields import AsOf, BlindSpots, ObservedAt, Stale, Timestamp, means


class PendingAnswer(Struct, rename="camel", kw_only=True):
    """An unfinished VMIM of this VMI."""

    name: str
    """the VMIM's name"""
    uid: str
    """the VMIM's UID"""
    phase: str
    """its phase; empty: none yet"""
    created_at: Timestamp | None
    """when the VMIM was created"""
    handed_off: bool
    """whether KubeVirt has handed it off to a target pod"""


class BackoffAnswer(Struct, rename="camel", kw_only=True):
    """KubeVirt's present pause before the next attempt."""

    seconds: float
    """how long the pause is"""
    next_try_at: Timestamp
    """when it ends"""


class CancelAnswer(Struct, rename="camel", kw_only=True):
    """The request that cancels an evacuation, from KubeVirt 1.7 on. A running attempt continues."""

    method: str
    """the HTTP method"""
    path: str
    """the path on the API server"""
    body: dict[str, str]
    """the JSON body; evacuationNodeName must be the value in the VMI's status"""
    command: str
    """the same request as a shell command with kubectl"""
    needs: str
    """what has to be done and permitted before that, in a sentence"""


class WhyAnswer(Struct, rename="camel", kw_only=True):
    """A reason in the cluster's own words, with invisible characters as escapes."""

    source: WhySource
    """the condition or object that gives the reason"""
    reason: str
    """a word, such as Unschedulable; empty: none"""
    message: str
    """the message, cut to 1,024 characters; empty: none"""
    at: Timestamp | None
    """since when; null: the cluster does not say, and the reason applies now"""


class LastSeenAnswer(Struct, rename="camel", kw_only=True):
    """The evacuation as it was when the exporter could last read its VMI."""

    at: Timestamp
    """the last contact about VMIs of its namespace"""
    state: State
    """what delayed it then"""
    stuck: bool
    """whether it was stuck then"""


class RequesterAnswer(Struct, rename="camel", kw_only=True):
    """Who asked for an eviction, by EvictionRequests or as a user, or who created a VMIM."""

    user: str
    """the name that the API server sent, without groups; or the requesters, with commas"""
    at: Timestamp
    """when the Eviction or the VMIM was created, or the eviction was reviewed"""


# The fields that evacuations and other moves share.
Reasons = Annotated[
    list[WhyAnswer],
    means("what the cluster says about it, newest first; at most eight entries"),
]
BestReason = Annotated[
    WhyAnswer | None,
    means("the entry of `why` that best explains why the VM does not move; null: there is none"),
]
Delay = Annotated[State, means("what delays it")]
IsStuck = Annotated[bool, means("whether it is stuck, and somebody must act")]
NextStep = Annotated[str, means("what to do, in one sentence")]
FirstCommand = Annotated[str, means("the shell command to begin with, for this VM")]
Runbook = Annotated[str, means("the runbook and its step: KubeVirtEvacuationStuck#quota")]


class EvacuationAnswer(Struct, rename="camel", kw_only=True):
    """One evacuation with its diagnosis."""

    namespace: str
    name: str
    vmi_uid: str
    node: str
    """the node it runs on"""
    evacuation_node_name: str
    """the node that it must leave"""
    eviction_strategy: str
    """the VMI's strategy; empty: the cluster's default"""
    source: Source
    """who requested it. Through a taint: `other`. Else by the EvictionRequest for its pod; without
    one, by the newest VMIM's priority (system-maintenance: `descheduler`, system-critical:
    `other`), or without a priority the VMI's annotation kubevirt.io/eviction-source
    (`descheduler`). `unknown`: none of these, as for evictions before KubeVirt 1.7"""
    requested_through: RequestedThrough
    """`eviction`: the VMI has evacuationNodeName. `taint`: its node has KubeVirt's drain taint"""
    requested_at: Timestamp
    """the earliest known time of the request"""
    requested_by: RequesterAnswer | None
    """who requested it: the requesters of an Eviction, or with `admission.observe` a user"""
    age_seconds: float
    """from requestedAt to asOf"""
    state: Delay
    stuck: IsStuck
    stuck_by: list[Cause]
    """why it counts as stuck; empty: it is not stuck"""
    failed_attempts: int
    """failed migrations since the request; a lower bound"""
    backoff: BackoffAnswer | None
    """KubeVirt's present pause"""
    leftover: bool
    """true: it remains from a drain that is over"""
    diverged: bool
    """true: KubeVirt still evacuates the VM, but the descheduler considers the eviction done"""
    attempt: PendingAnswer | None
    """the unfinished VMIM"""
    mode: str | None
    """how the running migration copies memory: PreCopy, PostCopy or Paused"""
    why: Reasons
    cause: BestReason
    next_step: NextStep
    command: FirstCommand
    runbook: Runbook
    last_seen: LastSeenAnswer | None
    """its state before its VMI became unreadable; null: it can be read"""
    cancel: CancelAnswer | None
    """the request that cancels it; null: KubeVirt would refuse it, or it could harm the VM"""


class MoveAnswer(Struct, rename="camel", kw_only=True):
    """A move without an evacuation, which a user or a controller has requested."""

    state: Delay
    trigger: Trigger
    """why its VMIM was created"""
    since: Timestamp | None
    """when the unfinished VMIM was created, or else the first of those that failed one after the
    other"""
    stuck: IsStuck
    requested_by: RequesterAnswer | None
    """who asks for it by EvictionRequests; null: nobody, or it is unknown"""
    failed_attempts: int
    """VMIMs that failed one after the other, up to the newest; a lower bound"""
    why: Reasons
    cause: BestReason
    next_step: NextStep
    command: FirstCommand
    runbook: Runbook


class StuckMove(MoveAnswer, kw_only=True):
    """A stuck move with its VMI."""

    namespace: str
    name: str
    node: str
    """the node it runs on"""


class EvacuationsAnswer(Struct, rename="camel", kw_only=True):
    """Every evacuation, the oldest first."""

    as_of: AsOf
    observed_at: ObservedAt
    stale: Stale
    evacuations: list[EvacuationAnswer]
    stuck_moves: list[StuckMove]
    """of VMIs that are not being evacuated, the oldest first"""
    blind_spots: BlindSpots


class DrainProgressAnswer(Struct, rename="camel", kw_only=True):
    """The progress of a node's drain, as the exporter has observed it."""

    since: Timestamp
    """when it began"""
    asked: int
    """VMs of this drain, each counted once, and pods of VMs that have left: `left` plus
    `remaining`"""
    left: int
    """VMs that have left since then"""
    remaining: int
    """VMs still on the node that are being evacuated, or fail or stay, and pods that have outlived
    the move of their VM"""
    failing: int
    """how many of `remaining` fail or stay"""
    external: int
    """how many of `remaining` are external"""
    last_left_at: Timestamp | None
    """when a VM last left; null: none has left in this drain"""
    seconds_per_vmi: float | None
    """the median interval between departures, once three VMs have left"""
    estimate_seconds: float | None
    """how long until all have left at that interval; null: one of them does not leave"""
    requested_by: RequesterAnswer | None
    """who asks for its VMs by EvictionRequests, and since when; null: nobody, or it is unknown"""


class NodeAnswer(Struct, rename="camel", kw_only=True):
    """What a drain of a node would do to its VMs; VMs that have stopped are not counted."""

    # `words.evacuations.OUTCOMES` describes the counts by outcome.
    node: str
    """its name"""
    vmis: int
    """VMs on the node; the sum of the next seven counts, one for each drain outcome"""
    leaves: int
    waits: int
    fails: int
    restarts: int
    stays: int
    external: int
    ends: int
    can_be_emptied: bool
    """false while `stays`, `fails` or `outlivedPods` is above 0"""
    depends_on_others: bool
    """true while `external` is above 0"""
    at_least_seconds: float | None
    """a lower bound of how long the migrations take; null: no duration is known, or the node cannot
    be emptied"""
    schedulable: bool | None
    """false: it is cordoned; null: the exporter may not read nodes"""
    cordoned_at: Timestamp | None
    """since when the node is cordoned"""
    outlived_pods: int
    """launcher pods that are active on the node although their VMs have left it"""
    conditions: tuple[str, ...]
    """which of DrainInProgress, Drained, MaintenanceInProgress and MaintenancePlanned (Kubernetes
    1.37) are true"""
    drain: DrainProgressAnswer | None
    """the progress of its drain"""


class NodesAnswer(Struct, rename="camel", kw_only=True):
    """Every node that has VMs or their launcher pods."""

    as_of: AsOf
    stale: Stale
    nodes: list[NodeAnswer]
    """sorted by name"""


class NodeCandidate(Struct, rename="camel", kw_only=True):
    """A VM of the node, and what a drain would do to it."""

    namespace: str
    name: str
    outcome: DrainOutcome
    """what would happen to the VM"""
    reason: str
    """why, to complete "in a drain it ..."; one of the sentences of `explain`"""
    state: State | None
    """the state of its evacuation, of the move that the outcome comes from, or of the evacuation
    that a drain would request"""
    why: list[WhyAnswer]
    """as in an evacuation; without one, why the VM, its moves or its deletion do not go on"""
    cause: WhyAnswer | None
    """the entry of `why` that best explains the outcome"""
    failed_attempts: int
    """failed migrations since its evacuation was requested, or else since its last success; a lower
    bound"""
    last_duration_seconds: float | None
    """how long its last successful migration took"""
    next_step: str | None
    """what to do; null: nothing"""
    command: str | None
    """the command to begin with; null: nothing to do"""
    runbook: str | None
    """the runbook and its step; null: nothing to do"""


class ObstructionAnswer(Struct, rename="camel", kw_only=True):
    """Why a drain would not simply move the VM, and what to do."""

    reason: str
    """why, to complete "in a drain it ..."; the same as in `/v1/nodes/{node}`"""
    cause: BestReason
    next_step: str | None
    """what to do; null: nothing"""
    command: str | None
    """the command to begin with; null: nothing to do"""
    runbook: str | None
    """the runbook and its step; null: nothing to do"""


class OutlivedPodAnswer(Struct, rename="camel", kw_only=True):
    """A launcher pod that is active on the node although its VM has left it."""

    namespace: str
    name: str
    """the VM's name"""
    pod: str
    """the pod's name"""
    node: str
    """the node on which the VM runs now"""
    next_step: NextStep
    command: FirstCommand


class DrainAnswer(NodeAnswer, kw_only=True):
    """What a drain of a node would do to each of its VMs."""

    as_of: AsOf
    stale: Stale
    candidates: list[NodeCandidate]
    """sorted by namespace and name"""
    outlived: list[OutlivedPodAnswer]
    """sorted by namespace and pod"""
