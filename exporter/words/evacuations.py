"""Evacuations and other moves in words: their states, and what the person on call should do.

`ACTIONS` has every action: the API, `explain`, `status`, the page, the Events and the runbooks take
their sentences from it.
"""

from collections.abc import Mapping
from shlex import quote
from typing import NamedTuple

import msgspec
from msgspec import Struct

from exporter.engine.evacuations.advice import (
    OF_AN_ATTEMPT,
    Obstacle,
    find_failing_target,
    find_obstacle,
)
from exporter.engine.evacuations.diagnosis import Diagnosis, Move, find_target
from exporter.engine.evacuations.drain_outcomes import DrainOutcome
from exporter.engine.facts.evidence import Evidence
from exporter.engine.facts.model import DRAIN_TAINT, Trigger, Why
from exporter.engine.facts.states import NEEDS_PERSON, State
from exporter.engine.store.evacuation_ends import EvacuationOutcome
from exporter.engine.store.load import Load
from exporter.engine.store.node_drains import DrainEnd


_STUCK = "KubeVirtEvacuationStuck"
_FAILING = "KubeVirtEvacuationFailingRepeatedly"
_MOVE = "KubeVirtMigrationStuck"
"""The runbook of every move without an evacuation: that of the only alert about it."""
BOTH_LIMITS = "parallelMigrationsPerCluster or parallelOutboundMigrationsPerNode"
"""What may be raised if it is not known which of KubeVirt's limits is reached."""


_FAILING_TARGET = (
    "the last {failures} attempts failed on {failing}: if those of other VMs fail there too, cordon"
    " it, and check its virt-handler."
)
"""What is added if the last attempts of a VM failed on one node."""


class Action(Struct, frozen=True):
    """A sentence that says what to do, a shell command, and the runbook with the details.

    Templates: `{namespace}` and `{name}` of the VM, `{attempt}` (its unfinished VMIM), `{uid}` (the
    VMIM's UID), `{cancel}` (the command that cancels), `{node}` (the node that the VM is to leave),
    `{taint}` (the key of KubeVirt's drain taint) and, in the sentence, `{launcher}` (the pod that
    runs the VM), `{missing}` (the resources that are not seen), `{target}` (the target pod's node),
    `{limit}` (the limit of migrations that is reached, and who uses it) and `{setting}` (its name).
    """

    sentence: str
    command: str
    runbook: str = _STUCK


class Advice(Struct, frozen=True):
    """The action for one VM. `cause` is the cluster's reason for the action, if there is one."""

    sentence: str
    command: str
    runbook: str
    cause: Why | None


class StateWords(NamedTuple):
    """The words for one state.

    `meaning` says what delays the VM, and may be Markdown. `action` is None if the state alone does
    not say what to do.
    """

    meaning: str
    action: Action | None = None


_VMI = "kubectl -n {namespace} get virtualmachineinstance {name}"
_ATTEMPTS = (
    "kubectl -n {namespace} get virtualmachineinstancemigrations -l kubevirt.io/vmi-name={name}"
)
_CONDITIONS = (
    """ -o jsonpath='{{range .status.conditions[?(@.status=="False")]}}"""
    """{{.type}} {{.reason}}: {{.message}}{{"\\n"}}{{end}}'"""
)
_EVENTS = "kubectl -n {namespace} get events --field-selector involvedObject.name={name}"
_LOG = "kubectl -n {namespace} logs -l vmi.kubevirt.io/id={name} -c compute --tail=200 --prefix"
_PODS = "kubectl -n {namespace} get pods -l vmi.kubevirt.io/id={name} -o wide"

STATES = {
    State.SHUTTING_DOWN: StateWords(
        "the VMI is being deleted, so KubeVirt does not migrate the VM; something may hold the"
        " deletion, such as a finalizer",
        Action(
            "Remove what holds the VM's deletion, such as a finalizer, or a node that does not"
            " answer: KubeVirt does not migrate a VM that is being deleted.",
            _VMI + """ -o jsonpath='{{.metadata.deletionTimestamp}}"""
            """ {{.metadata.finalizers}}{{"\\n"}}'""",
        ),
    ),
    State.EXTERNAL: StateWords(
        "`evictionStrategy: External`, and no migration is under way: something other than"
        " KubeVirt must move the VM",
        Action(
            "Let the controller that manages this VM move or stop it: the VM's strategy is"
            " External, so KubeVirt does neither.",
            _VMI + " --show-labels",
        ),
    ),
    State.STALE_MARKER: StateWords(
        "the VM has already left the node in `evacuationNodeName`",
        Action("Cancel the evacuation: the VM has left that node already.", "{cancel}"),
    ),
    State.MIGRATION_STALLED: StateWords(
        "a migration (1) has run for longer than `stuck.migrationTimeout`; (2) is in pre-copy, and"
        " has taken longer than KubeVirt's limit (`completionTimeoutPerGiB` times the memory) and"
        " than three times the VM's last one; (3) has ended, but its VMIM is still `Running` after"
        " `stuck.migrationTimeout`; (4) has not begun within `stuck.after` since its hand-off to"
        " the target pod; (5) runs, but the VM's node has not answered for `stuck.after`",
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
            "virtctl -n {namespace} restart {name}",
        ),
    ),
    State.NOT_MIGRATABLE: StateWords(
        "the VM's condition `LiveMigratable` is not True",
        Action(
            "Remove what makes the VM non-migratable, or shut it down so that its node can be"
            " emptied.",
            _VMI + _CONDITIONS,
        ),
    ),
    State.MULTIPLE_ACTIVE_PODS: StateWords(
        "more than one launcher pod of the VM is active, as for some minutes after a failed"
        " attempt",
        Action(
            "Wait ten minutes; if more than one launcher pod is still active then, delete the stale"
            " pod, but never {launcher}, which runs the VM.",
            _PODS,
        ),
    ),
    State.WAITING_FOR_SYNC: StateWords(
        "a migration between namespaces or clusters waits for its other half",
        Action(
            "Repair the other half of this migration, which is in another namespace or cluster: the"
            " VM waits for it.",
            _ATTEMPTS + " -o wide",
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
            _VMI + """ -o jsonpath='{{.status.changedBlockTracking}}{{"\\n"}}'""",
        ),
    ),
    State.UTILITY_VOLUMES: StateWords(
        "utility volumes are attached",
        Action(
            "Detach the VM's utility volumes, or wait until they are detached: until then KubeVirt"
            " does not migrate the VM.",
            _VMI + """ -o jsonpath='{{.spec.utilityVolumes}}{{"\\n"}}'""",
        ),
    ),
    State.BACKOFF: StateWords(
        "KubeVirt pauses after a failure, at most 320 s",
    ),
    State.TARGET_UNSCHEDULABLE: StateWords(
        "no node can take the target pod",
        Action(
            "Make room on another node, or relax what the VM requires of a node: no node can"
            " take its target pod.",
            "kubectl describe nodes -l kubevirt.io/schedulable=true",
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
ACTIONS: Mapping[State | Obstacle, Action] = {
    **{state: words.action for state, words in STATES.items() if words.action is not None},
    Obstacle.LEFTOVER: Action(
        "Cancel the evacuation if nobody drains {node} any more: the node is schedulable again, but"
        " KubeVirt still tries to migrate the VM.",
        "{cancel}",
    ),
    Obstacle.TAINT_LEFT: Action(
        "Remove the taint {taint} from {node} if nobody drains it any more: the node is schedulable"
        " again, but KubeVirt still migrates its VMs.",
        "kubectl taint nodes {node} {taint}:NoSchedule-",
    ),
    Obstacle.SOURCE_SILENT: Action(
        "Repair or fence {node}: it does not answer, and the VM cannot be migrated from it.",
        "kubectl describe node {node}",
    ),
    Obstacle.STALLED: Action(
        "Abort the migration by deleting its VMIM: it has run for longer than"
        " it may, and is not post-copy.",
        "kubectl -n {namespace} delete virtualmachineinstancemigration {attempt}",
    ),
    Obstacle.HAND_OFF: Action(
        "Bring back or fence {target}, or force-delete the target pod and delete the VMIM: the"
        " migration was handed off, and has not begun since then.",
        "kubectl -n {namespace} describe pods -l kubevirt.io/migrationJobUID={uid}",
    ),
    Obstacle.POST_COPY_LOST: Action(
        "Restart the VM: its migration failed in post-copy, so the VM's memory is lost.",
        "virtctl -n {namespace} restart {name}",
        _FAILING,
    ),
    Obstacle.POST_COPY: Action(
        "Let the migration end, and read the launcher's log: the migration has run for longer"
        " than stuck.migrationTimeout, but it is post-copy, and aborting it kills the VM.",
        _LOG,
    ),
    Obstacle.STALE_POD: Action(
        "Make sure that the node of the stale pod is off, and then force-delete this pod, but never"
        " {launcher}, which runs the VM: the stale pod is being deleted, and does not end.",
        _PODS,
    ),
    Obstacle.NO_TARGET_POD: Action(
        "Read virt-controller's log: KubeVirt has made no target pod, but its limits are free.",
        "kubectl -n kubevirt logs -l kubevirt.io=virt-controller --tail=-1 --prefix"
        " | sed -n /{name}/p",
    ),
    Obstacle.ATTACHMENT: Action(
        "Repair the pods that attach the VM's hot-plugged volumes: the target pod is ready, and"
        " waits for them.",
        "kubectl -n {namespace} describe pods -l kubevirt.io=hotplug-disk",
    ),
    Obstacle.TARGET_NOT_STARTED: Action(
        "Repair what keeps the target pod from starting, such as its image or a volume.",
        "kubectl -n {namespace} describe pods -l vmi.kubevirt.io/id={name}",
    ),
    Obstacle.TARGET_DELETED: Action(
        "Abort the migration at once by deleting its VMIM: the target pod is being deleted, and the"
        " VM is killed if it moves to this pod.",
        "kubectl -n {namespace} delete virtualmachineinstancemigration {attempt}",
    ),
    Obstacle.TARGET_LOST: Action(
        "Repair what ended the target pod, such as its memory limit or its node: it was lost before"
        " the VM had moved.",
        "kubectl -n {namespace} describe pods -l vmi.kubevirt.io/id={name}",
        _FAILING,
    ),
    Obstacle.NOT_CONVERGING: Action(
        "Allow auto-converge or post-copy with a MigrationPolicy, or give migrations more"
        " bandwidth: the VM writes memory faster than it is copied.",
        "kubectl get kubevirts -A"
        """ -o jsonpath='{{.items[*].spec.configuration.migrations}}{{"\\n"}}'""",
        _FAILING,
    ),
    Obstacle.MIGRATION_ERROR: Action(
        "Read the launcher's log around the error of libvirt or QEMU, and repair what it names.",
        _LOG,
        _FAILING,
    ),
    Obstacle.QUIET: Action(
        "Ask again in a minute: {missing} have not been read since the VM changed.", _ATTEMPTS
    ),
    Obstacle.UNEXPLAINED: Action(
        "Read the VM's events, because no object says why it does not move.", _EVENTS, _FAILING
    ),
    Obstacle.NONE: Action("Wait: KubeVirt is moving the VM.", _ATTEMPTS),
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
        " anybody drains the node",
        "does not migrate until somebody acts, or has failed too often",
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
        "the VMI is being deleted",
        "is deleted anyway",
        "are being deleted",
    ),
}
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
LEFT_OVER = "its node is schedulable again, so its drain is over"
DIVERGED = "the descheduler considers it over, KubeVirt does not"


def describe_stuck_move(trigger: Trigger, failed_attempts: int) -> str:
    """Why a move without an evacuation is stuck."""
    if not failed_attempts:
        return f"its {trigger} migration does not end"
    if failed_attempts == 1:
        return "its last migration failed"
    return f"its last {failed_attempts} migrations failed"


def advise(
    evidence: Evidence,
    diagnosis: Diagnosis | Move,
    why: tuple[Why, ...] = (),
    *,
    load: Load | None = None,
    taint: str = DRAIN_TAINT,
) -> Advice:
    """What to do about an evacuation or another move; `why` are the VMI's reasons, newest first.

    `taint` is the key of KubeVirt's drain taint.
    """
    obstacle, cause = find_obstacle(evidence, diagnosis, why)
    action = ACTIONS[obstacle]
    limit = None if load is None else load.find_limit(evidence.vmi.node)
    vmi, attempt, launcher = evidence.vmi, diagnosis.attempt, evidence.launcher
    active = [pod for pod in evidence.pods if not pod.finished and pod.node == vmi.node]
    name = launcher.name if launcher is not None and active == [launcher] else "the one"
    target = None if attempt is None else find_target(attempt, evidence.pods)
    target_node = "" if target is None else target.node
    failing = find_failing_target(evidence) if obstacle in OF_AN_ATTEMPT else None
    sentence = action.sentence if failing is None else f"{action.sentence[:-1]}; {_FAILING_TARGET}"
    node, failures = failing or ("", 0)
    return Advice(
        sentence.format(
            launcher=f"{name} on {vmi.node}",
            missing=" and ".join(diagnosis.missing),
            node=diagnosis.node,
            taint=taint,
            failing=node,
            failures=failures,
            target=f"{target_node}, the target's node" if target_node else "the target's node",
            limit="KubeVirt's limits are reached" if limit is None else limit.text,
            setting=BOTH_LIMITS if limit is None else limit.setting,
        ),
        action.command.format(
            namespace=quote(vmi.namespace),
            name=quote(vmi.name),
            attempt=quote("" if attempt is None else attempt.name),
            uid=quote("" if attempt is None else attempt.uid),
            node=quote(diagnosis.node),
            taint=quote(taint),
            cancel=write_cancel(vmi.namespace, vmi.name, diagnosis.node),
        ),
        _MOVE if isinstance(diagnosis, Move) else action.runbook,
        cause,
    )


def write_cancel(namespace: str, name: str, node: str) -> str:
    """The shell command that cancels an evacuation from a node."""
    body = msgspec.json.encode({"evacuationNodeName": node}).decode()
    path = write_cancel_path(namespace, name)
    return f"echo {quote(body)} | kubectl replace --raw {quote(path)} -f -"


def write_cancel_path(namespace: str, name: str) -> str:
    """The path of KubeVirt's API that cancels the evacuation of a VMI."""
    return (
        f"/apis/subresources.kubevirt.io/v1/namespaces/{namespace}"
        f"/virtualmachineinstances/{name}/evacuate/cancel"
    )
