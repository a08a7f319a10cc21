"""Evacuations, drains and their ends in words: one row for each state, outcome and end."""

from typing import NamedTuple

from exporter.engine.evacuations.drain_outcomes import DrainOutcome, Ground
from exporter.engine.facts.model import Trigger
from exporter.engine.facts.states import NEEDS_PERSON, State
from exporter.engine.store.evacuation_ends import EvacuationOutcome
from exporter.engine.store.node_drains import DrainEnd
from exporter.words.commands import (
    ATTEMPTS,
    CONDITIONS,
    CONTROLLER_LOG,
    DESCRIBE_PODS,
    PODS,
    RESTART,
    VMI,
    Action,
)


class StateWords(NamedTuple):
    """The words for one state.

    `meaning` says what delays the VM, and may be Markdown. `action` is None if the state alone does
    not say what to do.
    """

    meaning: str
    action: Action | None = None


STATES = {
    State.SHUTTING_DOWN: StateWords(
        "the VMI or its launcher pod is being deleted, so KubeVirt does not migrate the VM;"
        " something may hold the deletion, such as a finalizer",
        Action(
            "Remove what holds the VM's deletion, such as a finalizer, or a node that does not"
            " answer: KubeVirt does not migrate a VM that is being deleted.",
            VMI + """ -o jsonpath='{{.metadata.deletionTimestamp}}"""
            """ {{.metadata.finalizers}}{{"\\n"}}'""",
        ),
    ),
    State.EXTERNAL: StateWords(
        "`evictionStrategy: External`, and no migration is under way: something other than"
        " KubeVirt must move the VM",
        Action(
            "Let the controller that manages this VM move or stop it: the VM's strategy is"
            " External, so KubeVirt does neither.",
            VMI + " --show-labels",
        ),
    ),
    State.ENDED_NOT_FINISHED: StateWords(
        "the VM's migration has ended, but KubeVirt does not finish its VMIM, and makes no other",
        Action(
            "Read virt-controller's log, and repair what it names, such as the PVC of the VM's"
            " backend storage: the migration has ended and the VM runs on {vm_node}, but KubeVirt"
            " cannot finish its VMIM, and deleting the VMIM does not help, because it then hangs at"
            " its finalizer.",
            CONTROLLER_LOG,
        ),
    ),
    State.STALE_MARKER: StateWords(
        "the VM has already left the node in `evacuationNodeName`",
        Action("Cancel the evacuation: the VM has left that node already.", "{cancel}"),
    ),
    State.MIGRATION_STALLED: StateWords(
        "a migration (1) has run for longer than the exporter's own limit,"
        " `stuck.migrationTimeout`; (2) is not in post-copy, and has taken longer than KubeVirt's"
        " limit (`completionTimeoutPerGiB` times the memory and the copied disks, and twice that"
        " while the VM is paused for it) and than three times the VM's last one; (3) has not begun"
        " within `stuck.after` since its hand-off to the target pod; (4) runs, but the VM's node"
        " has not answered for `stuck.after`",
    ),
    State.MIGRATING: StateWords(
        "nothing at the moment: a migration, or the next attempt, is under way",
    ),
    State.ZOMBIE_STATE: StateWords(
        "the VMI shows a migration that is over: its VMIM failed or was deleted (KubeVirt "
        "#18087), or ended longer than `kube.deadAfter` ago",
        Action(
            "Restart the VM, which interrupts it, or upgrade KubeVirt to 1.9: KubeVirt never"
            " ended the VM's last migration (KubeVirt #18087).",
            RESTART,
        ),
    ),
    State.NOT_MIGRATABLE: StateWords(
        "the VM's condition `LiveMigratable` is not True",
        Action(
            "Remove what makes the VM non-migratable, or shut it down so that its node can be"
            " emptied.",
            VMI + CONDITIONS,
        ),
    ),
    State.MULTIPLE_ACTIVE_PODS: StateWords(
        "more than one launcher pod of the VM is active, as for some minutes after a failed"
        " attempt",
        Action(
            "Wait ten minutes; if more than one launcher pod is still active then, delete the stale"
            " pod, but never {launcher}, which runs the VM.",
            PODS,
        ),
    ),
    State.WAITING_FOR_SYNC: StateWords(
        "a migration between namespaces or clusters waits for its other half",
        Action(
            "Repair the other half of this migration, which is in another namespace or cluster: the"
            " VM waits for it.",
            ATTEMPTS + " -o wide",
        ),
    ),
    State.QUOTA: StateWords(
        "a ResourceQuota refuses the target pod",
        Action(
            "Raise the ResourceQuota of the namespace: it refuses the target pod.",
            "kubectl -n {namespace} describe resourcequotas",
        ),
    ),
    State.BACKUP: StateWords(
        "a backup of the VM is running",
        Action(
            "Wait for the backup of this VM, or end it: until then KubeVirt does not migrate the"
            " VM.",
            VMI + """ -o jsonpath='{{.status.changedBlockTracking}}{{"\\n"}}'""",
        ),
    ),
    State.UTILITY_VOLUMES: StateWords(
        "utility volumes are attached",
        Action(
            "Detach the VM's utility volumes, or wait until they are detached: until then KubeVirt"
            " does not migrate the VM.",
            VMI + """ -o jsonpath='{{.spec.utilityVolumes}}{{"\\n"}}'""",
        ),
    ),
    State.BACKOFF: StateWords(
        "KubeVirt pauses after a failure, at most 320 s",
    ),
    State.TARGET_GATED: StateWords(
        "a scheduling gate holds the target pod, so no node was asked for it yet",
        Action(
            "Let the controller that has set the scheduling gate {gate} remove it from the target"
            " pod: until then no node is asked.",
            DESCRIBE_PODS,
        ),
    ),
    State.TARGET_UNSCHEDULABLE: StateWords(
        "no node can take the target pod",
        Action(
            "Make room on another node, uncordon one, or relax what the VM requires of a node: no"
            " node can take its target pod.",
            "kubectl describe nodes",
        ),
    ),
    State.TARGET_NOT_READY: StateWords(
        "the target pod is not running yet",
    ),
    State.CAPACITY: StateWords(
        "KubeVirt's limits on parallel migrations are reached; a VM that has just left a node"
        " still counts there",
        Action(
            "Wait for other migrations to end, because {limit}. If none ends, raise {setting}.",
            "kubectl get virtualmachineinstancemigrations -A",
            "KubeVirtEvacuationsStuckMany",
        ),
    ),
    State.NO_MIGRATION: StateWords(
        "KubeVirt has not created a migration",
    ),
    State.UNKNOWN: StateWords(
        "a permission is missing, or a watch that the state depends on has had no contact since"
        " the VMI changed; the next step names the resource",
        Action(
            "Give the exporter the permission that it lacks, or repair its watch: without"
            " {missing}, it is unknown what delays this VM.",
            "kubectl get pods -A -l app.kubernetes.io/name=kubevirt-eviction-exporter",
            "KubeVirtEvictionExporterBlindSpot",
        ),
    ),
}


class OutcomeWords(NamedTuple):
    """The words for what a drain of its node does to a VM.

    `meaning` completes "the outcome is this if" and is Markdown. `summary` completes "in a drain
    it". `counted` completes "three VMs".
    """

    meaning: str
    summary: str
    counted: str


_BY_PERSON = [f"`{state}`" for state in State if state in NEEDS_PERSON]
OUTCOMES = {
    DrainOutcome.LEAVES: OutcomeWords(
        "the VM is migrated: `LiveMigrate` or `LiveMigrateIfPossible`, and its condition"
        " `LiveMigratable` is True",
        "is migrated",
        "would be migrated",
    ),
    DrainOutcome.WAITS: OutcomeWords(
        "like `leaves`, but a migration of the VM is in progress, KubeVirt's migration limits are"
        " reached, more than one launcher pod of it is active, or the VM has no condition"
        " `LiveMigratable` yet",
        "waits: it migrates already, has no LiveMigratable yet, or KubeVirt's limits are reached",
        "would be migrated later",
    ),
    DrainOutcome.FAILS: OutcomeWords(
        "the VM does not leave until somebody acts: its evacuation or other move is"
        " [stuck](#evacuation-states), or has failed `stuck.failedAttempts` times. In the states"
        f" {', '.join(_BY_PERSON[:-1])} and {_BY_PERSON[-1]} it fails from the start, also before"
        " anybody drains the node, and so does a VM that no other node can take: every other one is"
        " cordoned, not Ready, has a taint that the VM does not tolerate or"
        " `kubevirt.io/schedulable=false`, or lacks the labels that the VM requires",
        "does not migrate until somebody acts, has failed too often, or no other node can take it",
        "would not leave until somebody acts",
    ),
    DrainOutcome.RESTARTS: OutcomeWords(
        "the VM goes down: `None`, or `LiveMigrateIfPossible` and not migratable",
        "goes down: strategy None, or LiveMigrateIfPossible and not migratable",
        "would go down",
    ),
    DrainOutcome.STAYS: OutcomeWords(
        "the VM never leaves: `LiveMigrate` and not migratable, so KubeVirt refuses its eviction;"
        " or it would restart, but a [budget](#drains) forbids the eviction of its pod; or its"
        " deletion takes longer than `stuck.after` beyond its grace period",
        "never leaves: not migratable, a budget forbids it, or its deletion hangs",
        "would never leave",
    ),
    DrainOutcome.EXTERNAL: OutcomeWords(
        "`External`: something other than KubeVirt must move or stop the VM",
        "waits for somebody else to move or stop it: strategy External",
        "would wait for somebody else",
    ),
    DrainOutcome.ENDS: OutcomeWords(
        "the VMI or its launcher pod is being deleted",
        "is deleted anyway",
        "are being deleted",
    ),
}
GROUNDS = {
    Ground.MIGRATES: "is migrated",
    Ground.MIGRATING: "waits: it migrates already",
    Ground.NO_CONDITION: "waits: KubeVirt has not said yet whether it can be migrated",
    Ground.LIMITS: "waits: KubeVirt's migration limits are reached",
    Ground.TWO_PODS: "waits: it cannot migrate while more than one of its launcher pods is active",
    Ground.EVACUATION: "does not leave until somebody acts: its evacuation is stuck or fails",
    Ground.MOVE: "does not leave until somebody acts: another migration of it is stuck or fails",
    Ground.STATE: "does not leave until somebody acts",
    Ground.NO_NODE: "does not leave: no other node can take it",
    Ground.NO_STRATEGY: "goes down: its strategy is None",
    Ground.IF_POSSIBLE: "goes down: LiveMigrateIfPossible, and it is not migratable",
    Ground.NOT_MIGRATABLE: "never leaves: it is not migratable, and KubeVirt refuses its eviction",
    Ground.BUDGET: "never leaves: a budget forbids the eviction of its pod",
    Ground.DELETION_HANGS: "never leaves: it is being deleted, and its deletion hangs",
    Ground.EXTERNAL: "waits for somebody else to move or stop it: strategy External",
    Ground.DELETED: "ends: it is being deleted anyway",
    Ground.POD_DELETED: "ends: its launcher pod is being deleted, and the VM stops with it",
}
"""What a drain does to a VM, and the one reason for that, to complete "in a drain it ..."."""
DRAIN_ENDS = {
    DrainEnd.SUCCEEDED: "the last VM has left: all of a cordoned or tainted node, or on another"
    " node all that were asked to leave",
    DrainEnd.CANCELLED: "the node was schedulable again, or the last evacuation was cancelled",
    DrainEnd.NODE_DELETED: "the node was deleted",
}
"""When a drain ends in this way."""
EVACUATION_ENDS = {
    EvacuationOutcome.SUCCEEDED: "the VM has left the node by a migration",
    EvacuationOutcome.CANCELLED: "the VM is still on the node, and nothing requests its evacuation"
    " any more",
    EvacuationOutcome.VM_STOPPED: "the VMI reached a final phase on the node",
    EvacuationOutcome.VM_DELETED: "the VMI was deleted on the node before it was seen in a final"
    " phase",
}
"""When an evacuation ends in this way."""
BY_TAINT = "the drain taint of the node"
"""How an evacuation was requested that nobody's eviction began."""
LEFT_OVER = "nobody asks for it any more: its node is schedulable, and no EvictionRequest is left"
DIVERGED = "the descheduler considers it over, KubeVirt does not"


_BEFORE_ATTEMPT = frozenset({State.BACKOFF, State.CAPACITY, State.NO_MIGRATION})
_IN_ATTEMPT = frozenset({State.MIGRATING, State.TARGET_NOT_READY})


def describe_delay(state: State, failed_attempts: int) -> str:
    """What delays a stuck evacuation or move: its state, unless that changes with each attempt.

    While attempts fail one after the other, the states before and in an attempt follow each other
    within seconds, and none says what the VM needs.
    """
    is_passing = state in _BEFORE_ATTEMPT or (failed_attempts > 0 and state in _IN_ATTEMPT)
    return "waiting for the next attempt" if is_passing else state


def describe_stuck_move(trigger: Trigger, failed_attempts: int) -> str:
    """Why a move without an evacuation is stuck."""
    if not failed_attempts:
        return f"its {trigger} migration does not end"
    if failed_attempts == 1:
        return "its last migration failed"
    return f"its last {failed_attempts} migrations failed"
