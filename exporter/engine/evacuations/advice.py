"""What the person on call should do about an evacuation or another move: an action per obstacle.

`ACTIONS` is the only table: the API, `explain`, `status`, the page, the Events and the runbooks
take their sentences from it. The action depends on the last cause. It does not depend on the state
of the retries, which changes every few seconds.
"""

from enum import StrEnum
from shlex import quote

import msgspec
from msgspec import Struct

from exporter.engine.evacuations.diagnosis import (
    Diagnosis,
    Move,
    State,
    find_hand_off,
    find_target,
)
from exporter.engine.evacuations.ended_migrations import IMAGE_WORDS, classify_text
from exporter.engine.facts.evidence import Evidence
from exporter.engine.facts.model import DRAIN_TAINT, EndReason, Vmim, Why, WhySource
from exporter.engine.store.load import Load
from exporter.engine.store.reasons import SELECTORS, SOURCE_SILENT, TERMINATING


_STUCK = "KubeVirtEvacuationStuck"
_FAILING = "KubeVirtEvacuationFailingRepeatedly"
_BLOCKERS = frozenset({WhySource.POD_SCHEDULED, WhySource.MIGRATION_CONDITION})
_OWN_BLOCKERS = frozenset(
    {WhySource.DELETION, WhySource.POD_DISRUPTION_BUDGET, WhySource.LIVE_MIGRATABLE}
)
_BEFORE_HAND_OFF = frozenset({"", "Pending", "Scheduling"})
"""An attempt that fails in one of these phases gives no reason."""
BOTH_LIMITS = "parallelMigrationsPerCluster or parallelOutboundMigrationsPerNode"
"""What may be raised if it is not known which of KubeVirt's limits is reached."""


class Obstacle(StrEnum):
    """What keeps a VM from moving; each has one action."""

    LEFTOVER = "leftover"
    TAINT_LEFT = "taint_left"
    SHUTTING_DOWN = "shutting_down"
    SOURCE_SILENT = "source_silent"
    EXTERNAL = "external"
    STALE_MARKER = "stale_marker"
    STALLED = "stalled"
    HAND_OFF = "hand_off"
    POST_COPY = "post_copy"
    POST_COPY_LOST = "post_copy_lost"
    ZOMBIE_STATE = "zombie_state"
    NOT_MIGRATABLE = "not_migratable"
    MULTIPLE_ACTIVE_PODS = "multiple_active_pods"
    STALE_POD = "stale_pod"
    WAITING_FOR_SYNC = "waiting_for_sync"
    QUOTA = "quota"
    BACKUP = "backup"
    UTILITY_VOLUMES = "utility_volumes"
    UNSCHEDULABLE = "unschedulable"
    NO_TARGET_POD = "no_target_pod"
    ATTACHMENT = "attachment"
    TARGET_NOT_STARTED = "target_not_started"
    TARGET_LOST = "target_lost"
    TARGET_DELETED = "target_deleted"
    NOT_CONVERGING = "not_converging"
    MIGRATION_ERROR = "migration_error"
    CAPACITY = "capacity"
    NOT_VISIBLE = "not_visible"
    QUIET = "quiet"
    UNEXPLAINED = "unexplained"
    NONE = "none"
    """KubeVirt is working on the evacuation, and nothing is wrong."""


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

ACTIONS = {
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
    Obstacle.SHUTTING_DOWN: Action(
        "Remove what holds the VM's deletion, such as a finalizer, or a node that does not answer:"
        " KubeVirt does not migrate a VM that is being deleted.",
        _VMI
        + """ -o jsonpath='{{.metadata.deletionTimestamp}} {{.metadata.finalizers}}{{"\\n"}}'""",
    ),
    Obstacle.SOURCE_SILENT: Action(
        "Repair or fence {node}: it does not answer, and the VM cannot be migrated from it.",
        "kubectl describe node {node}",
    ),
    Obstacle.EXTERNAL: Action(
        "Let the controller that manages this VM move or stop it: the VM's strategy is External, so"
        " KubeVirt does neither.",
        _VMI + " --show-labels",
    ),
    Obstacle.STALE_MARKER: Action(
        "Cancel the evacuation: the VM has left that node already.", "{cancel}"
    ),
    Obstacle.STALLED: Action(
        "Abort the migration by deleting its VMIM: it has run for longer than"
        " stuck.migrationTimeout, and is not post-copy.",
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
    Obstacle.ZOMBIE_STATE: Action(
        "Restart the VM, which interrupts it, or upgrade KubeVirt to 1.9: KubeVirt never ended the"
        " VM's last migration (KubeVirt #18087).",
        "virtctl -n {namespace} restart {name}",
    ),
    Obstacle.NOT_MIGRATABLE: Action(
        "Remove what makes the VM non-migratable, or shut it down so that its node can be emptied.",
        _VMI + _CONDITIONS,
    ),
    Obstacle.MULTIPLE_ACTIVE_PODS: Action(
        "Wait ten minutes; if more than one launcher pod is still active then, delete the stale"
        " pod, but never {launcher}, which runs the VM.",
        _PODS,
    ),
    Obstacle.STALE_POD: Action(
        "Make sure that the node of the stale pod is off, and then force-delete this pod, but never"
        " {launcher}, which runs the VM: the stale pod is being deleted, and does not end.",
        _PODS,
    ),
    Obstacle.WAITING_FOR_SYNC: Action(
        "Repair the other half of this migration, which is in another namespace or cluster: the"
        " VM waits for it.",
        _ATTEMPTS + " -o wide",
    ),
    Obstacle.QUOTA: Action(
        "Raise the ResourceQuota of the namespace: it refuses the target pod.",
        "kubectl -n {namespace} describe resourcequotas",
    ),
    Obstacle.BACKUP: Action(
        "Wait for the backup of this VM, or end it: until then KubeVirt does not migrate the VM.",
        _VMI + """ -o jsonpath='{{.status.changedBlockTracking}}{{"\\n"}}'""",
    ),
    Obstacle.UTILITY_VOLUMES: Action(
        "Detach the VM's utility volumes, or wait until they are detached: until then KubeVirt"
        " does not migrate the VM.",
        _VMI + """ -o jsonpath='{{.spec.utilityVolumes}}{{"\\n"}}'""",
    ),
    Obstacle.UNSCHEDULABLE: Action(
        "Make room on another node, or relax what the VM requires of a node: no node can take its"
        " target pod.",
        "kubectl describe nodes -l kubevirt.io/schedulable=true",
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
    Obstacle.CAPACITY: Action(
        "Wait for other migrations to end, because {limit}. If none ends, raise {setting}.",
        "kubectl get virtualmachineinstancemigrations -A",
        "KubeVirtEvacuationsStuckMany",
    ),
    Obstacle.NOT_VISIBLE: Action(
        "Give the exporter the permission that it lacks, or repair its watch: without {missing}, it"
        " is unknown what delays this VM.",
        "kubectl get pods -A -l app.kubernetes.io/name=kubevirt-eviction-exporter",
        "KubeVirtEvictionExporterBlindSpot",
    ),
    Obstacle.QUIET: Action(
        "Ask again in a minute: {missing} have not been read since the VM changed.", _ATTEMPTS
    ),
    Obstacle.UNEXPLAINED: Action(
        "Read the VM's events, because no object says why it does not move.", _EVENTS, _FAILING
    ),
    Obstacle.NONE: Action("Wait: KubeVirt is moving the VM.", _ATTEMPTS),
}


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
    source = _SOURCES.get(diagnosis.state)
    own = (one for one in why if one.source is source and one.reason not in SELECTORS)
    cause = next(own, find_cause(why))
    if diagnosis.state is State.MIGRATING:
        cause = next((one for one in why if one.reason == TERMINATING), cause)
    if diagnosis.stuck and diagnosis.state is not State.SHUTTING_DOWN:
        cause = next((one for one in why if one.reason == SOURCE_SILENT), cause)
    obstacle = _find_obstacle(evidence, diagnosis, cause)
    if obstacle is Obstacle.TARGET_NOT_STARTED and _is_target_lost(why):
        obstacle = Obstacle.TARGET_LOST
    if isinstance(diagnosis, Diagnosis):
        if diagnosis.leftover and diagnosis.tainted:
            obstacle = Obstacle.TAINT_LEFT
        elif diagnosis.given_up and may_cancel(evidence):
            obstacle = Obstacle.LEFTOVER
    action = ACTIONS[obstacle]
    limit = None if load is None else load.find_limit(evidence.vmi.node)
    vmi, attempt, launcher = evidence.vmi, diagnosis.attempt, evidence.launcher
    active = [pod for pod in evidence.pods if not pod.finished and pod.node == vmi.node]
    name = launcher.name if launcher is not None and active == [launcher] else "the one"
    target = None if attempt is None else find_target(attempt, evidence.pods)
    target_node = "" if target is None else target.node
    return Advice(
        action.sentence.format(
            launcher=f"{name} on {vmi.node}",
            missing=" and ".join(diagnosis.missing),
            node=diagnosis.node,
            taint=taint,
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
        action.runbook,
        cause,
    )


def find_cause(why: tuple[Why, ...]) -> Why | None:
    """The newest reason that says why attempts fail, or None.

    An attempt that failed before its hand-off gives no reason. Then the reason of the scheduler,
    the container or the condition counts, although it is older. After the hand-off the target's
    container ends because the migration has failed, so its reason counts only if KubeVirt says that
    the target was lost.
    """
    failed = next((one for one in why if one.source is WhySource.FAILED_ATTEMPT), None)
    bare = failed is None or failed.reason in _BEFORE_HAND_OFF
    sources = _BLOCKERS | {WhySource.TARGET_CONTAINER} if bare else _BLOCKERS
    since = 0.0 if failed is None or bare else failed.at or 0.0
    if _is_target_lost(why):
        ended = (one for one in why if one.source is WhySource.TARGET_CONTAINER)
        lost = next((one for one in ended if one.reason not in IMAGE_WORDS), None)
        if lost is not None:
            return lost
    others = (
        one
        for one in why
        if one.source in sources and one.reason not in SELECTORS and (one.at or since) >= since
    )
    return next(others, failed)


def _is_target_lost(why: tuple[Why, ...]) -> bool:
    """Whether the newest attempt failed because its target pod ended."""
    failed = (one.message for one in why if one.source is WhySource.FAILED_ATTEMPT)
    return classify_text(next(failed, "")) is EndReason.TARGET_LOST


def find_blocker(why: tuple[Why, ...]) -> Why | None:
    """Why a VM does not leave its node.

    The first of these that exists: its node does not answer, its deletion, a budget, the condition
    LiveMigratable, the cause of failed attempts.
    """
    own = (one for one in why if one.source in _OWN_BLOCKERS or one.reason == SOURCE_SILENT)
    return next(own, None) or find_cause(why)


def may_cancel(evidence: Evidence) -> bool:
    """Whether cancelling is safe: a post-copy migration must run to its end.

    The VM's memory is on both nodes then, so ending the migration kills the VM.
    """
    state = evidence.vmi.migration
    return state is None or not (state.running and state.mode == "PostCopy")


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


def _find_obstacle(evidence: Evidence, diagnosis: Diagnosis | Move, cause: Why | None) -> Obstacle:
    state, attempt = diagnosis.state, diagnosis.attempt
    if state is State.SHUTTING_DOWN:
        return Obstacle.SHUTTING_DOWN
    if cause is not None and cause.reason == SOURCE_SILENT and diagnosis.stuck:
        return Obstacle.SOURCE_SILENT
    if state is State.MIGRATION_STALLED:
        if not may_cancel(evidence):
            return Obstacle.POST_COPY
        if attempt is None:
            return Obstacle.UNEXPLAINED
        migration = evidence.vmi.migration
        is_copying = migration is not None and migration.running
        waits = not is_copying and find_hand_off(evidence, attempt) is not None
        return Obstacle.HAND_OFF if waits else Obstacle.STALLED
    if state is State.UNKNOWN and diagnosis.is_quiet:
        return Obstacle.QUIET if cause is None else _judge_cause(cause, state)
    return _OBSTACLES.get(state) or _find_hindrance(evidence, diagnosis, cause)


def _find_hindrance(evidence: Evidence, diagnosis: Diagnosis | Move, cause: Why | None) -> Obstacle:
    """The obstacle in a state whose obstacle depends on the target pod and the last cause."""
    state, attempt = diagnosis.state, diagnosis.attempt
    if state is State.TARGET_NOT_READY and attempt is not None:
        target = find_target(attempt, evidence.pods)
        if target is not None and target.ready and evidence.vmi.hotplugs_volumes:
            return Obstacle.ATTACHMENT
        is_bare = cause is None and not diagnosis.failed_attempts
        if target is None and is_bare and evidence.pods_seen and diagnosis.stuck:
            return Obstacle.NO_TARGET_POD
    if _is_lost(evidence, attempt):
        return Obstacle.POST_COPY_LOST
    if cause is not None:
        return _judge_cause(cause, state)
    if diagnosis.failed_attempts:
        return Obstacle.UNEXPLAINED
    is_moving = state is State.MIGRATING or not diagnosis.stuck
    return _WAITING.get(state, Obstacle.NONE if is_moving else Obstacle.UNEXPLAINED)


def _is_lost(evidence: Evidence, attempt: Vmim | None) -> bool:
    """Whether the VM's last migration failed in post-copy, when half its memory had moved."""
    migration = evidence.vmi.migration
    is_lost = migration is not None and migration.failure is EndReason.POST_COPY_LOST
    return is_lost and attempt is None


def _judge_cause(cause: Why, state: State) -> Obstacle:
    if cause.source is WhySource.POD_SCHEDULED:
        return Obstacle.UNSCHEDULABLE
    if cause.source is WhySource.TARGET_CONTAINER:
        if cause.reason != TERMINATING:
            return Obstacle.TARGET_NOT_STARTED
        is_stale = state is State.MULTIPLE_ACTIVE_PODS
        return Obstacle.STALE_POD if is_stale else Obstacle.TARGET_DELETED
    if cause.source is WhySource.NODE:
        return Obstacle.SOURCE_SILENT
    if cause.source is WhySource.MIGRATION_CONDITION:
        return _CONDITIONED.get(cause.reason, Obstacle.QUOTA)
    found = _ENDED.get(classify_text(cause.message))
    if found is not None:
        return found
    is_bare = cause.reason in _BEFORE_HAND_OFF
    return Obstacle.UNEXPLAINED if is_bare else Obstacle.MIGRATION_ERROR


_OBSTACLES = {
    State.EXTERNAL: Obstacle.EXTERNAL,
    State.STALE_MARKER: Obstacle.STALE_MARKER,
    State.ZOMBIE_STATE: Obstacle.ZOMBIE_STATE,
    State.NOT_MIGRATABLE: Obstacle.NOT_MIGRATABLE,
    State.WAITING_FOR_SYNC: Obstacle.WAITING_FOR_SYNC,
    State.QUOTA: Obstacle.QUOTA,
    State.BACKUP: Obstacle.BACKUP,
    State.UTILITY_VOLUMES: Obstacle.UTILITY_VOLUMES,
    State.TARGET_UNSCHEDULABLE: Obstacle.UNSCHEDULABLE,
    State.UNKNOWN: Obstacle.NOT_VISIBLE,
}
"""The states with an obstacle of their own, which does not depend on the last cause."""
_WAITING = {
    State.MULTIPLE_ACTIVE_PODS: Obstacle.MULTIPLE_ACTIVE_PODS,
    State.CAPACITY: Obstacle.CAPACITY,
}
"""The states that are obstacles only until an attempt fails. Then the cause of the failure is the
obstacle."""
_SOURCES = {
    State.SHUTTING_DOWN: WhySource.DELETION,
    State.NOT_MIGRATABLE: WhySource.LIVE_MIGRATABLE,
    State.WAITING_FOR_SYNC: WhySource.MIGRATION_CONDITION,
    State.QUOTA: WhySource.MIGRATION_CONDITION,
    State.BACKUP: WhySource.MIGRATION_CONDITION,
    State.UTILITY_VOLUMES: WhySource.MIGRATION_CONDITION,
    State.TARGET_UNSCHEDULABLE: WhySource.POD_SCHEDULED,
}
"""By state: the source whose newest reason explains it. Other states: the last cause does."""
_ENDED = {
    EndReason.TIMEOUT_PROGRESS: Obstacle.NOT_CONVERGING,
    EndReason.TIMEOUT_COMPLETION: Obstacle.NOT_CONVERGING,
    EndReason.TARGET_LOST: Obstacle.TARGET_LOST,
    EndReason.LIBVIRT: Obstacle.MIGRATION_ERROR,
}
"""The obstacles by what KubeVirt's text says of a failed attempt."""
_CONDITIONED = {
    "DecentralizedNotLiveMigratable": Obstacle.WAITING_FOR_SYNC,
    "BackupInProgress": Obstacle.BACKUP,
    "UtilityVolumesPresent": Obstacle.UTILITY_VOLUMES,
}
"""The obstacles by the reason of a VMIM's condition; the quota's condition has no reason."""
