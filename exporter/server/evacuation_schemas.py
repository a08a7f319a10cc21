"""The types of the query API's answers about evacuations and about nodes."""

from typing import Annotated

from msgspec import Struct

from exporter.engine.diagnosis import Cause, State
from exporter.engine.drain_outcomes import DrainOutcome
from exporter.engine.model import WhySource
from exporter.engine.requesters import Source
from exporter.server.fields import AsOf, BlindSpots, ObservedAt, Stale, Timestamp, means


class PendingAnswer(Struct, rename="camel", kw_only=True):
    """An unfinished VMIM of this VMI."""

    name: Annotated[str, means("the VMIM's name")]
    uid: Annotated[str, means("the VMIM's UID")]
    phase: Annotated[str, means("its phase; empty: none yet")]
    created_at: Annotated[Timestamp | None, means("when the VMIM was created")]
    handed_off: Annotated[bool, means("whether it has reached a target pod")]


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
        means("the entry of `why` that says best why the VM does not move; null: there is none"),
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
