"""The next step for a person whose VM does not move, with the cause in the cluster's own words."""

from exporter.engine.diagnosis import Cause, Diagnosis, State
from exporter.engine.evidence import Evidence
from exporter.engine.model import Why, WhySource
from exporter.engine.reasons import SELECTORS


QUOTED = 240
"""The longest quotation in a sentence; `why` of the API has the whole text."""

_BLOCKERS = frozenset({WhySource.POD_SCHEDULED, WhySource.MIGRATION_CONDITION})
_BEFORE_HAND_OFF = frozenset({"", "Pending", "Scheduling"})
"""An attempt that fails in one of these phases gives no reason."""


def advise(evidence: Evidence, diagnosis: Diagnosis, why: tuple[Why, ...] = ()) -> str:
    """The next step, in a few sentences; `why` are the VMI's reasons, newest first.

    Retries change the state every few seconds, so if the evacuation is stuck by failures, these
    are described first and the present state after them.
    """
    step = _step(evidence, diagnosis, why)
    if Cause.FAILURES not in diagnosis.stuck_by:
        return step
    cause = _quote(find_cause(why))
    words = f"The last cause: {cause}." if cause else _UNKNOWN_CAUSE
    failed = f"Failed attempts: at least {diagnosis.failed_attempts}. {words}"
    return f"{failed} {_MEANWHILE.get(diagnosis.state, step)}"


def find_cause(why: tuple[Why, ...]) -> Why | None:
    """The newest reason that says why attempts fail, or None.

    An attempt that failed before its hand-off gives no reason: that of the scheduler, container or
    condition counts, although it is older. After the hand-off the target's container ends because
    the migration has failed, so its reason does not count.
    """
    failed = next((one for one in why if one.source is WhySource.FAILED_ATTEMPT), None)
    bare = failed is None or failed.reason in _BEFORE_HAND_OFF
    sources = _BLOCKERS | {WhySource.TARGET_CONTAINER} if bare else _BLOCKERS
    since = 0.0 if failed is None or bare else failed.at or 0.0
    others = (
        one
        for one in why
        if one.source in sources and one.reason not in SELECTORS and (one.at or since) >= since
    )
    return next(others, failed)


def may_cancel(evidence: Evidence) -> bool:
    """Whether cancelling is safe: a post-copy migration must run to its end.

    Its memory is on both nodes, so ending it kills the VM.
    """
    state = evidence.vmi.migration
    return state is None or not (state.running and state.mode == "PostCopy")


def _step(evidence: Evidence, diagnosis: Diagnosis, why: tuple[Why, ...]) -> str:
    state = diagnosis.state
    source = _SOURCES.get(state)
    cause = find_cause(why)
    if source is not None:
        found = (one for one in why if one.source is source and one.reason not in SELECTORS)
        cause = next(found, None)
    words = _quote(cause)
    match state:
        case State.MULTIPLE_ACTIVE_PODS:
            return f"{_ADVICE[state]} ({_place(evidence)})."
        case State.MIGRATION_STALLED if not may_cancel(evidence):
            return _POST_COPY
        case State.MIGRATING if evidence.vmi.migration is not None and evidence.vmi.migration.mode:
            return f"Wait: a migration is under way ({evidence.vmi.migration.mode})."
    if not words or state not in _QUOTING:
        return _ADVICE[state]
    return _QUOTING[state].format(words)


def _quote(why: Why | None) -> str:
    """A reason as a quotation, or ""."""
    text = "" if why is None else ": ".join(part for part in (why.reason, why.message) if part)
    if not text:
        return ""
    return f'"{text if len(text) <= QUOTED else text[: QUOTED - 1] + "…"}"'


def _place(evidence: Evidence) -> str:
    """Where the VM runs: the pod if it is unambiguous, else only the node."""
    node, launcher = evidence.vmi.node, evidence.launcher
    active = [pod for pod in evidence.pods if not pod.finished and pod.node == node]
    return (
        f"on {node}" if launcher is None or active != [launcher] else f"{launcher.name} on {node}"
    )


_SOURCES = {
    State.NOT_MIGRATABLE: WhySource.LIVE_MIGRATABLE,
    State.QUOTA: WhySource.MIGRATION_CONDITION,
    State.BACKUP: WhySource.MIGRATION_CONDITION,
    State.UTILITY_VOLUMES: WhySource.MIGRATION_CONDITION,
    State.TARGET_UNSCHEDULABLE: WhySource.POD_SCHEDULED,
    State.TARGET_NOT_READY: WhySource.TARGET_CONTAINER,
}
"""The source to quote for a state; other states quote the last cause."""

_ADVICE = {
    State.EXTERNAL: "Strategy External: whoever drains the node must move or stop this VM;"
    " KubeVirt never will.",
    State.STALE_MARKER: "The VM has left that node already; cancel the evacuation to clear the"
    " marker.",
    State.MIGRATION_STALLED: "The migration under way has outlived stuck.migrationTimeout: look at"
    " its VMIM and at the launcher's log; abort it by deleting the VMIM, unless it is post-copy.",
    State.MIGRATING: "Wait: a migration is under way.",
    State.ZOMBIE_STATE: "The last hand-off was never ended (KubeVirt #18087): only stopping and"
    " starting the VM helps, or KubeVirt 1.9.",
    State.NOT_MIGRATABLE: "The VM cannot be migrated, and KubeVirt gives no reason. Shut it down,"
    " or cancel the evacuation.",
    State.MULTIPLE_ACTIVE_PODS: "More than one launcher pod of this VM is active. Between attempts"
    " that passes by itself: wait, and delete nothing. Only if it stays so for ten minutes, delete"
    " the stale one, and never the one that runs the VM",
    State.QUOTA: "A ResourceQuota refuses the target pod: raise it, or cancel the evacuation.",
    State.BACKUP: "A backup of this VM is running: wait for it, or end it.",
    State.UTILITY_VOLUMES: "Utility volumes are attached: detach them, or wait for their owner.",
    State.BACKOFF: "KubeVirt pauses after a failure and tries again by itself. It gives no reason"
    " for the failure: see the VM's events.",
    State.TARGET_UNSCHEDULABLE: "No node can take the target pod (resources, affinity, CPU model,"
    " node selectors), and the scheduler has not said why yet.",
    State.TARGET_NOT_READY: "The target pod is not running yet: look at its events (images,"
    " volumes).",
    State.CAPACITY: "KubeVirt's migration limits are reached: wait for other migrations, or raise"
    " parallelMigrationsPerCluster or parallelOutboundMigrationsPerNode.",
    State.NO_MIGRATION: "Nothing moves this VM now. After a failure KubeVirt may take two minutes"
    " to try again; if it stays so, look at virt-controller and at the VM's events.",
    State.UNKNOWN: "The exporter may not see what it would need to tell: see its blind"
    " spots, and whether it watches only some namespaces.",
}
_QUOTING = {
    State.NOT_MIGRATABLE: "The VM cannot be migrated: {}. Change that, shut it down, or cancel the"
    " evacuation.",
    State.BACKUP: "A backup of this VM is running: {}. Wait for it, or end it.",
    State.UTILITY_VOLUMES: "Utility volumes are attached: {}. Detach them, or wait for their"
    " owner.",
    State.BACKOFF: "KubeVirt pauses after a failure and tries again by itself. The last cause: {}.",
    State.TARGET_UNSCHEDULABLE: "No node can take the target pod: {}. Make room, or change what"
    " the VM requires.",
    State.TARGET_NOT_READY: "The target pod is not running yet: {}.",
    State.NO_MIGRATION: "Nothing moves this VM now. After a failure KubeVirt may take two minutes"
    " to try again; if it stays so, look at virt-controller and at the VM's events. The last"
    " cause: {}.",
}
"""The same with the cluster's words."""
_POST_COPY = (
    "The migration under way has outlived stuck.migrationTimeout. It is post-copy: aborting it"
    " kills the VM, so let it end, and look at the launcher's log."
)
_UNKNOWN_CAUSE = (
    "KubeVirt gives no reason: the events do, see the runbook KubeVirtEvacuationFailingRepeatedly."
)
_MEANWHILE = {
    State.MIGRATING: "Now the next attempt is under way.",
    State.BACKOFF: "Now KubeVirt pauses before the next attempt.",
    State.TARGET_NOT_READY: "Now the next attempt waits for its target pod.",
    State.CAPACITY: "Now the next attempt waits for others: KubeVirt's migration limits are"
    " reached.",
    State.NO_MIGRATION: "Now there is no attempt; KubeVirt may take two minutes to make the next.",
}
"""The states of a retry, added to the description of the failures."""
