"""What the person on call should do about a VM that does not move.

`ACTIONS` has every action: the API, `explain`, `status`, the page, the Events and the runbooks take
their sentences from it.
"""

import re
from collections.abc import Mapping
from functools import lru_cache
from shlex import quote

from msgspec import Struct

from exporter.engine.evacuations.advice import (
    copies_disks,
    find_failing_target,
    find_obstacle,
)
from exporter.engine.evacuations.causes import GATED, find_blocker
from exporter.engine.evacuations.conditions import Conditions
from exporter.engine.evacuations.diagnosis import Diagnosis, Move
from exporter.engine.evacuations.drain_outcomes import Ground
from exporter.engine.evacuations.obstacles import OF_AN_ATTEMPT, Obstacle
from exporter.engine.evacuations.outlook import Outlook, explain_no_node
from exporter.engine.facts.evidence import Evidence
from exporter.engine.facts.model import Pod, Why
from exporter.engine.facts.states import State
from exporter.words.commands import (
    ATTEMPTS,
    CONTROLLER_LOG,
    DESCRIBE_PODS,
    EVENTS,
    FAILING_RUNBOOK,
    FIND_KUBEVIRT,
    HANDLERS,
    LAUNCHER_LOG,
    MIGRATION_SETTINGS,
    PODS,
    RESTART,
    VMI,
    VMIM_EVENTS,
    Action,
    write_cancel,
)
from exporter.words.evacuations import STATES


_CLAUSE_END = re.compile(r"[:,;]|\.$")
BOTH_LIMITS = "parallelMigrationsPerCluster or parallelOutboundMigrationsPerNode"
"""What may be raised if it is not known which of KubeVirt's limits is reached."""
_FAILING_TARGET = (
    "the last {failures} attempts failed on {failing}: if those of other VMs fail there too, cordon"
    " it, and check its virt-handler."
)
"""What is added if the last attempts of a VM failed on one node."""


class Advice(Struct, frozen=True):
    """The action for one VM. `cause` is the cluster's reason for the action, if there is one.

    `runbook` is the name of the runbook and of the step in it: KubeVirtEvacuationStuck#quota.
    """

    sentence: str
    command: str
    runbook: str
    cause: Why | None


ACTIONS: Mapping[State | Obstacle, Action] = {
    **{state: words.action for state, words in STATES.items() if words.action is not None},
    Obstacle.LEFTOVER: Action(
        "Cancel the evacuation if nobody drains {node} any more: the node is schedulable again, but"
        " KubeVirt still tries to migrate the VM.",
        "{cancel}",
    ),
    Obstacle.WITHDRAWN: Action(
        "Cancel the evacuation: {withdrawn} asked for it by an EvictionRequest, and nobody asks any"
        " more, but KubeVirt still tries to migrate the VM.",
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
    Obstacle.HOTPLUG_HANGS: Action(
        "Restart the VM, which interrupts it: its migration has ended, but the hotplug that needed"
        " it has not, and until then KubeVirt neither finishes the VMIM nor lets it be deleted.",
        RESTART,
    ),
    Obstacle.NOT_FINALIZED: Action(
        "Read the log of virt-handler on {target}, and check its pod: the migration has ended, but"
        " virt-handler there does not report that it is completed.",
        HANDLERS + "{on_target}",
    ),
    Obstacle.STALLED: Action(
        "Abort the migration by deleting its VMIM: it has run for longer than KubeVirt's own limit,"
        " at which KubeVirt should have ended it, and it is not post-copy.",
        "kubectl -n {namespace} delete virtualmachineinstancemigration {attempt}",
    ),
    Obstacle.LONG_COPY: Action(
        "Look whether the copy of the VM's {copied} makes progress, and let it run if it does:"
        " kubevirt_vmi_migration_data_remaining_bytes falls then, and KubeVirt itself ends a copy"
        " after completionTimeoutPerGiB for each GB, or after progressTimeout without progress;"
        " stuck.migrationTimeout is only the exporter's own limit.",
        VMI + """ -o jsonpath='{{.status.migrationState}}{{"\\n"}}'""",
    ),
    Obstacle.HAND_OFF: Action(
        "Bring back or fence {target}, or force-delete the target pod and delete the VMIM: the"
        " migration was handed off, and has not begun since then.",
        "kubectl -n {namespace} describe pods -l kubevirt.io/migrationJobUID={uid}",
    ),
    Obstacle.HAND_OFF_REFUSED: Action(
        "Read the VMIM's events (such as FailedHandOver), and virt-controller's log: it does not"
        " hand the migration off to the target pod, so nothing has begun in either launcher.",
        VMIM_EVENTS,
    ),
    Obstacle.TARGET_HANDLER: Action(
        "Check the target's virt-handler, on {target} (its pod and its log): the migration does not"
        " get beyond PreparingTarget, in which virt-handler there has to act.",
        HANDLERS + "{on_target}",
    ),
    Obstacle.SOURCE_HANDLER: Action(
        "Check virt-handler on the VM's own node {vm_node} (its pod and its log): the target was"
        " ready, and virt-handler on the source did not begin the migration.",
        HANDLERS + "{on_source}",
    ),
    Obstacle.POST_COPY_LOST: Action(
        "Restart the VM: its migration failed in post-copy, so the VM's memory is lost.",
        RESTART,
        FAILING_RUNBOOK,
    ),
    Obstacle.POST_COPY: Action(
        "Let the migration end, and read the launcher's log: the migration has run for longer"
        " than stuck.migrationTimeout, but it is post-copy, and aborting it kills the VM.",
        LAUNCHER_LOG,
    ),
    Obstacle.STALE_POD: Action(
        "Make sure that the node of the stale pod is off, and then force-delete this pod, but never"
        " {launcher}, which runs the VM: the stale pod is being deleted, and does not end.",
        PODS,
    ),
    Obstacle.OUTLIVED_POD: Action(
        "Delete the pod that the VM has left, {pod}: KubeVirt refuses its eviction for ever, so a"
        " drain of its node does not end, and the VM cannot migrate while two of its pods are"
        " active.",
        "kubectl -n {namespace} delete pod {pod} --ignore-not-found",
    ),
    Obstacle.NO_TARGET_POD: Action(
        "Read the VM's events (such as FailedCreate), and virt-controller's log: KubeVirt has made"
        " no target pod, but its limits are free.",
        CONTROLLER_LOG,
    ),
    Obstacle.QUOTA_GATE: Action(
        "Raise the ApplicationAwareResourceQuota of the namespace: its controller holds the target"
        " pod with the scheduling gate {gate}, so no node was asked yet.",
        "kubectl -n {namespace} describe applicationawareresourcequotas",
    ),
    Obstacle.QUEUE_GATE: Action(
        "Make room in Kueue's queue of the namespace, whose scheduling gate {gate} keeps the target"
        " pod from every node.",
        "kubectl -n {namespace} describe workloads.kueue.x-k8s.io",
    ),
    Obstacle.HANDLERS_DOWN: Action(
        "Repair virt-handler on {handlers}: it does not answer, so KubeVirt has set"
        " kubevirt.io/schedulable=false there, and no VM can go there.",
        HANDLERS,
    ),
    Obstacle.NO_OTHER_NODE: Action(
        "Add or open a node that may run the VM, because none can take it: {refusals}.",
        "kubectl get nodes -L kubevirt.io/schedulable",
    ),
    Obstacle.NO_NODE_MATCHES: Action(
        "Give another node the labels that the target pod selects, or restart a VM with a host"
        " model, which then loses the labels of its first node: no other node matches, and neither"
        " does one whose virt-handler is down (kubevirt.io/schedulable=false).",
        "kubectl -n {namespace} get pods -l vmi.kubevirt.io/id={name} -o"
        """ jsonpath='{{range .items[*]}}{{.metadata.name}} {{.spec.nodeSelector}}"""
        """{{"\\n"}}{{end}}'""",
    ),
    Obstacle.ATTACHMENT: Action(
        "Repair the pods that attach the VM's hot-plugged volumes: the target pod is ready, and"
        " waits for them.",
        "kubectl -n {namespace} describe pods -l kubevirt.io=hotplug-disk",
    ),
    Obstacle.TARGET_NOT_STARTED: Action(
        "Repair what keeps the target pod from starting, such as its network, a volume, an image or"
        " an init container: the kubelet's events are on the pod.",
        DESCRIBE_PODS,
    ),
    Obstacle.TARGET_DELETED: Action(
        "Abort the migration at once by deleting its VMIM: the target pod is being deleted, and the"
        " VM is killed if it moves to this pod.",
        "kubectl -n {namespace} delete virtualmachineinstancemigration {attempt}",
    ),
    Obstacle.TARGET_LOST: Action(
        "Repair what ended the target pod, such as its memory limit or its node: it was lost before"
        " the VM had moved.",
        DESCRIBE_PODS,
        FAILING_RUNBOOK,
    ),
    Obstacle.NOT_CONVERGING: Action(
        "Allow auto-converge or post-copy with a MigrationPolicy, or give migrations more"
        " bandwidth: the VM writes memory faster than it is copied.",
        MIGRATION_SETTINGS,
        FAILING_RUNBOOK,
    ),
    Obstacle.DISK_COPY_SLOW: Action(
        "Raise completionTimeoutPerGiB in the KubeVirt object or in a MigrationPolicy, or give"
        " migrations more bandwidth: the VM's disks are copied too, and that takes longer than"
        " KubeVirt allows.",
        MIGRATION_SETTINGS,
        FAILING_RUNBOOK,
    ),
    Obstacle.MIGRATION_ERROR: Action(
        "Read the launcher's log around the error of libvirt or QEMU, and repair what it names.",
        LAUNCHER_LOG,
        FAILING_RUNBOOK,
    ),
    Obstacle.BUDGET: Action(
        "Let the budget allow a disruption, or shut the VM down: it forbids the eviction of the"
        " VM's pod.",
        "kubectl -n {namespace} describe poddisruptionbudgets",
    ),
    Obstacle.QUIET: Action(
        "Ask again in a minute: {missing} have not been read since the VM changed.", ATTEMPTS
    ),
    Obstacle.UNEXPLAINED: Action(
        "Read the events of the VMIM and of its pod, because no object says why the VM does not"
        " move.",
        EVENTS,
        FAILING_RUNBOOK,
    ),
    Obstacle.NONE: Action("Wait: KubeVirt is moving the VM.", ATTEMPTS),
}


def choose_advice(
    evidence: Evidence,
    diagnosis: Diagnosis | Move,
    why: tuple[Why, ...],
    conditions: Conditions,
) -> Advice:
    """What to do about an evacuation or another move; `why` are the VMI's reasons, newest first."""
    obstacle, cause = find_obstacle(evidence, diagnosis, why, conditions)
    action = ACTIONS[obstacle]
    failing = find_failing_target(evidence) if obstacle in OF_AN_ATTEMPT else None
    node, failures = failing or ("", 0)
    sentence = action.sentence if failing is None else f"{action.sentence[:-1]}; {_FAILING_TARGET}"
    sentence, command = write_action(
        Action(sentence, action.command),
        evidence,
        conditions,
        diagnosis=diagnosis,
        cause=cause,
        failing=node,
        failures=failures,
        withdrawn=" and ".join(diagnosis.withdrawn) if isinstance(diagnosis, Diagnosis) else "",
    )
    return Advice(sentence, command, name_step(obstacle), cause)


def choose_outlook_advice(
    evidence: Evidence, outlook: Outlook, why: tuple[Why, ...], conditions: Conditions
) -> Advice | None:
    """What to do about a VM that a drain does not simply move; None if there is nothing to do."""
    obstacle = _find_outlook_step(evidence, outlook, conditions)
    if obstacle is None:
        diagnosis = outlook.diagnosis
        return None if diagnosis is None else choose_advice(evidence, diagnosis, why, conditions)
    cause = find_blocker(why)
    if outlook.ground is Ground.NO_NODE:
        cause = explain_no_node(evidence, conditions)
    elif outlook.ground is Ground.TWO_PODS:
        cause = None
    sentence, command = write_action(ACTIONS[obstacle], evidence, conditions, cause=cause)
    return Advice(sentence, command, name_step(obstacle), cause)


@lru_cache(maxsize=1024)
def shorten_step(sentence: str) -> str:
    """What a next step asks for, without how and why: the first clause of its sentence.

    It names no single VM, so that VMs with the same next step have the same clause. The results
    are cached, because 10,000 evacuations have few different steps.
    """
    clause = _CLAUSE_END.split(sentence, maxsplit=1)[0]
    return clause[:1].lower() + clause[1:]


def name_step(obstacle: State | Obstacle) -> str:
    """The runbook of an action, and the step in it."""
    return f"{ACTIONS[obstacle].runbook}#{obstacle}"


def _find_outlook_step(
    evidence: Evidence, outlook: Outlook, conditions: Conditions
) -> State | Obstacle | None:
    """The step that an outlook asks for by itself, and not by its diagnosis."""
    match outlook.ground:
        case Ground.NO_NODE:
            nodes, node = conditions.nodes, evidence.vmi.node
            is_down = nodes is not None and nodes.find_without_handler(node)
            return Obstacle.HANDLERS_DOWN if is_down else Obstacle.NO_OTHER_NODE
        case Ground.TWO_PODS if any(evidence.find_outlived(conditions.now)):
            return Obstacle.OUTLIVED_POD
        case Ground.NOT_MIGRATABLE:
            return State.NOT_MIGRATABLE
        case Ground.BUDGET:
            return Obstacle.BUDGET
        case Ground.DELETION_HANGS:
            return State.SHUTTING_DOWN
        case _:
            return None


def write_action(
    action: Action,
    evidence: Evidence,
    conditions: Conditions,
    *,
    diagnosis: Diagnosis | Move | None = None,
    cause: Why | None = None,
    outlived: Pod | None = None,
    **others: object,
) -> tuple[str, str]:
    """The sentence and the command of an action for one VM.

    `outlived` is a pod that the VM has left, by default the first. `others` are further templates.
    """
    vmi, launcher = evidence.vmi, evidence.launcher
    attempt = evidence.unfinished() if diagnosis is None else diagnosis.attempt
    node = vmi.node if diagnosis is None else diagnosis.node
    newest = attempt or next(iter(evidence.newest_failures()), None)
    target = evidence.find_target(attempt)
    tried = [
        vmim.target_node for vmim in (attempt, *evidence.newest_failures()) if vmim is not None
    ]
    target_node = next(filter(None, ("" if target is None else target.node, *tried)), "")
    load, nodes, names = conditions.load, conditions.nodes, conditions.names
    limit = None if load is None else load.find_limit(vmi.node)
    active = [pod for pod in evidence.pods if not pod.finished and pod.node == vmi.node]
    name = launcher.name if launcher is not None and active == [launcher] else "the one"
    outlived = outlived or next(iter(evidence.find_outlived(conditions.now)), None)
    kubevirt, taint = conditions.kubevirt, conditions.drain_taint
    handlers = [] if nodes is None else nodes.find_without_handler(vmi.node)
    return (
        names.translate(action.sentence).format(
            launcher=f"{name} on {vmi.node}",
            missing="" if diagnosis is None else " and ".join(diagnosis.missing),
            node=node,
            vm_node=vmi.node,
            pod=outlived.name if outlived is not None else "the stale pod",
            taint=taint,
            target=f"{target_node}, the target's node" if target_node else "the target's node",
            limit="KubeVirt's limits are reached" if limit is None else limit.text,
            setting=BOTH_LIMITS if limit is None else limit.setting,
            copied="memory and disks" if copies_disks(evidence, newest) else "memory",
            gate=cause.message.replace(", ", " and ")
            if cause is not None and cause.reason == GATED
            else "",
            handlers=" and ".join(handlers),
            refusals=""
            if nodes is None
            else names.translate(nodes.explain_refusals(vmi.node, vmi.placement)),
            **others,
        ),
        names.translate(action.command).format(
            namespace=quote(vmi.namespace),
            name=quote(vmi.name),
            attempt=quote("" if attempt is None else attempt.name),
            vmim=quote(vmi.name if newest is None else newest.name),
            uid=quote("" if attempt is None else attempt.uid),
            node=quote(node),
            pod=quote("" if outlived is None else outlived.name),
            taint=quote(taint),
            kubevirt=quote(kubevirt.namespace)
            if kubevirt is not None and kubevirt.namespace
            else names.translate(FIND_KUBEVIRT),
            on_source=_select_on(vmi.node),
            on_target=_select_on(target_node),
            cancel=write_cancel(vmi.namespace, vmi.name, node),
        ),
    )


def _select_on(node: str) -> str:
    """The option of kubectl that selects the pods on a node; "" if the node is unknown."""
    return f" --field-selector spec.nodeName={quote(node)}" if node else ""
