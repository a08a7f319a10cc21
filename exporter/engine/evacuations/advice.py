"""Finds what keeps a VM from moving: its state, or an obstacle that the state does not show.

`STEPS` has the obstacles in the order in which they are tested; the first whose test holds counts.
What is found depends on the last cause. It does not depend on the state of the retries, which
changes every few seconds. `exporter.words.evacuations` has what the person on call should do.
"""

from collections.abc import Callable
from itertools import takewhile
from typing import TypeAlias

from msgspec import Struct

from exporter.engine.evacuations import causes
from exporter.engine.evacuations.conditions import Conditions
from exporter.engine.evacuations.diagnosis import Diagnosis, Move
from exporter.engine.evacuations.ended_migrations import classify_text
from exporter.engine.evacuations.obstacles import Obstacle
from exporter.engine.evacuations.situation import find_hand_off
from exporter.engine.facts.evidence import Evidence
from exporter.engine.facts.history import complete_failure
from exporter.engine.facts.model import (
    EndReason,
    Outcome,
    Pod,
    Resource,
    Trigger,
    Vmim,
    Why,
    WhySource,
)
from exporter.engine.facts.states import VMIM_CONDITIONS, State
from exporter.engine.store.nodes import NodeIndex
from exporter.engine.store.reasons import SOURCE_SILENT


class Doubt(Struct, frozen=True, gc=False):
    """What the tests of `STEPS` look at.

    `cause` is the reason that explains the state best, `target` the active target pod of the
    unfinished VMIM. `has_outlived`: a launcher pod is active on another node, and no migration uses
    it.
    """

    evidence: Evidence
    diagnosis: Diagnosis | Move
    why: tuple[Why, ...]
    cause: Why | None
    nodes: NodeIndex | None
    target: Pod | None
    has_outlived: bool

    @property
    def state(self) -> State:
        """The state of the evacuation or other move."""
        return self.diagnosis.state

    @property
    def attempt(self) -> Vmim | None:
        """The unfinished VMIM."""
        return self.diagnosis.attempt

    @property
    def reason(self) -> str:
        """The cause's reason word; "" if there is no cause."""
        return "" if self.cause is None else self.cause.reason

    @property
    def message(self) -> str:
        """The cause's message; "" if there is no cause."""
        return "" if self.cause is None else self.cause.message

    def has_cause(self, source: WhySource) -> bool:
        """Whether the cause is of this source, and says what to do in this state."""
        return self.cause is not None and self.cause.source is source and self.asks_cause

    @property
    def asks_cause(self) -> bool:
        """Whether the cause says what to do, and not the state."""
        return self.state in BY_CAUSE or (self.state is State.UNKNOWN and self.diagnosis.is_quiet)


def find_obstacle(
    evidence: Evidence,
    diagnosis: Diagnosis | Move,
    reasons: tuple[Why, ...],
    conditions: Conditions,
) -> tuple[State | Obstacle, Why | None]:
    """What keeps a VM from moving, and the cluster's reason for that, if there is one.

    `reasons` are those of the VMI, newest first.
    """
    now, target = conditions.now, evidence.find_target(diagnosis.attempt)
    reasons = causes.drop_young(reasons, now)
    reasons = causes.drop_target_deletions(reasons, target, diagnosis.state, evidence.pods, now)
    cause = causes.find_state_cause(diagnosis.state, reasons, target)
    if diagnosis.stuck and diagnosis.state is not State.SHUTTING_DOWN:
        cause = next((why for why in reasons if why.reason == SOURCE_SILENT), cause)
    outlived = evidence.find_outlived(now)
    has_outlived = any(pod.deleted_at is None for pod in outlived)
    doubt = Doubt(evidence, diagnosis, reasons, cause, conditions.nodes, target, has_outlived)
    step = next(step for applies, step in STEPS if applies(doubt))
    return (doubt.state if step is None else step), cause


def find_failing_target(evidence: Evidence) -> tuple[str, int] | None:
    """The node on which the last attempts failed, and how many of them; None if they are few."""
    failed = evidence.newest_failures()
    if not failed or not failed[0].target_node:
        return None
    node = failed[0].target_node
    there = sum(1 for _ in takewhile(lambda failure: failure.target_node == node, failed))
    return (node, there) if there >= FAILED_ON_ONE_NODE else None


def may_cancel(evidence: Evidence) -> bool:
    """Whether cancelling is safe: a post-copy migration must run to its end.

    The VM's memory is on both nodes then, so ending the migration kills the VM.
    """
    state = evidence.vmi.migration
    return state is None or not (state.running and state.mode == "PostCopy")


def copies_disks(evidence: Evidence, attempt: Vmim | None) -> bool:
    """Whether the VM's migrations copy disks, and not only memory."""
    is_update = attempt is not None and attempt.trigger is Trigger.VOLUME_UPDATE
    return evidence.vmi.copies_disks or is_update


def _is_left_over(doubt: Doubt) -> bool:
    diagnosis = doubt.diagnosis
    if not isinstance(diagnosis, Diagnosis) or diagnosis.state is State.ENDED_NOT_FINISHED:
        return False
    return diagnosis.given_up and may_cancel(doubt.evidence)


def _is_withdrawn(doubt: Doubt) -> bool:
    diagnosis = doubt.diagnosis
    return isinstance(diagnosis, Diagnosis) and bool(diagnosis.withdrawn) and _is_left_over(doubt)


def _is_taint_left(doubt: Doubt) -> bool:
    diagnosis = doubt.diagnosis
    return isinstance(diagnosis, Diagnosis) and diagnosis.leftover and diagnosis.tainted


def _is_cut_off(doubt: Doubt) -> bool:
    """The VM's node does not answer."""
    return doubt.reason == SOURCE_SILENT and doubt.diagnosis.stuck


def _says(source: WhySource) -> "_Test":
    return lambda doubt: doubt.has_cause(source)


def _is_unfinalized(doubt: Doubt) -> bool:
    """The target's virt-handler has not said that the migration is completed."""
    migration = doubt.evidence.vmi.migration
    is_open = migration is not None and migration.outcome is Outcome.UNKNOWN
    return doubt.state is State.ENDED_NOT_FINISHED and is_open


def _is_stalled(doubt: Doubt) -> bool:
    return doubt.state is State.MIGRATION_STALLED


def _waits_after_hand_off(doubt: Doubt) -> bool:
    migration = doubt.evidence.vmi.migration
    is_copying = migration is not None and migration.running
    is_open = find_hand_off(doubt.evidence, doubt.attempt) is not None
    return _is_stalled(doubt) and not is_copying and is_open


def _hangs_in(phase: str) -> "_Test":
    """The hand-off hangs in this phase, and the target pod is well, on a node that is Ready."""

    def test(doubt: Doubt) -> bool:
        if not _waits_after_hand_off(doubt) or doubt.attempt is None or doubt.nodes is None:
            return False
        pod = doubt.target
        node = None if pod is None else doubt.nodes.find(pod.node)
        is_well = pod is not None and pod.deleted_at is None and node is not None and node.is_ready
        return doubt.attempt.phase == phase and is_well

    return test


def _exceeds_limit(doubt: Doubt) -> bool:
    """KubeVirt should have ended the copy itself."""
    return _is_stalled(doubt) and doubt.attempt is not None and doubt.diagnosis.overdue


def _is_unscheduled(doubt: Doubt) -> bool:
    """The last thing that is known is that the scheduler found no node for the target pod."""
    if doubt.state is State.TARGET_UNSCHEDULABLE or doubt.has_cause(WhySource.POD_SCHEDULED):
        return True
    return doubt.has_cause(WhySource.FAILED_ATTEMPT) and causes.timed_out(
        doubt.evidence, causes.UNSCHEDULABLE_FOR
    )


def _lacks(text: tuple[str, ...]) -> "_Test":
    """The scheduler's message has one of these words."""
    return lambda doubt: _is_unscheduled(doubt) and any(word in doubt.message for word in text)


def _is_gated_by(prefix: str) -> "_Test":
    return lambda doubt: doubt.reason == causes.GATED and prefix in doubt.message


def _lacks_handlers(doubt: Doubt) -> bool:
    """No node matches, and KubeVirt has taken some out because their virt-handlers are silent."""
    nodes, node = doubt.nodes, doubt.evidence.vmi.node
    if not _is_unscheduled(doubt) or nodes is None or not nodes.find_without_handler(node):
        return False
    has_room = not any(word in doubt.message for word in _ROOM)
    return has_room or not nodes.may_leave(node, doubt.evidence.vmi.placement)


def _has_no_other_node(doubt: Doubt) -> bool:
    vmi = doubt.evidence.vmi
    is_closed = doubt.nodes is not None and not doubt.nodes.may_leave(vmi.node, vmi.placement)
    return is_closed and (doubt.state is State.CAPACITY or _is_unscheduled(doubt))


def _waits_for_attachment(doubt: Doubt) -> bool:
    target = doubt.target
    is_ready = target is not None and target.ready and doubt.evidence.vmi.hotplugs_volumes
    return doubt.state is State.TARGET_NOT_READY and is_ready


def _has_no_target(doubt: Doubt) -> bool:
    if doubt.state is not State.TARGET_NOT_READY or doubt.attempt is None:
        return False
    is_bare = doubt.cause is None and not doubt.diagnosis.failed_attempts
    sees = doubt.evidence.trust.sees(Resource.PODS)
    return doubt.target is None and is_bare and sees and doubt.diagnosis.stuck


def _is_lost_in_post_copy(doubt: Doubt) -> bool:
    """The VM's last migration failed in post-copy, when half its memory had moved."""
    migration = doubt.evidence.vmi.migration
    is_lost = migration is not None and migration.failure is EndReason.POST_COPY_LOST
    return is_lost and doubt.attempt is None and doubt.state in BY_CAUSE


def _is_deleted(doubt: Doubt) -> bool:
    return doubt.asks_cause and doubt.cause is not None and causes.is_target_deletion(doubt.cause)


def _is_target_deleted(doubt: Doubt) -> bool:
    return _is_deleted(doubt) and doubt.target is not None and doubt.target.deleted_at is not None


def _was_killed(doubt: Doubt) -> bool:
    return doubt.has_cause(WhySource.TARGET_CONTAINER) and causes.is_target_lost(doubt.why)


def _does_not_start(doubt: Doubt) -> bool:
    """A target pod is there, or was for KubeVirt's limit, and nothing else is known to be wrong."""
    if doubt.has_cause(WhySource.TARGET_POD) or doubt.has_cause(WhySource.TARGET_CONTAINER):
        return True
    is_bare = doubt.cause is None or _failed_before_hand_off(doubt)
    if not doubt.asks_cause or not is_bare:
        return False
    if doubt.cause is not None and causes.timed_out(doubt.evidence, causes.PENDING_FOR):
        return True
    target = doubt.target
    waits = target is not None and not target.ready
    is_late = doubt.diagnosis.stuck or bool(doubt.diagnosis.failed_attempts)
    return doubt.state is State.TARGET_NOT_READY and waits and is_late


def _is_not_handed_off(doubt: Doubt) -> bool:
    """The target pod is ready, and virt-controller does not go on."""
    target = doubt.target
    is_ready = target is not None and target.ready
    return doubt.state is State.TARGET_NOT_READY and is_ready and doubt.diagnosis.stuck


def _failed_before_hand_off(doubt: Doubt) -> bool:
    return (
        doubt.has_cause(WhySource.FAILED_ATTEMPT)
        and doubt.reason in causes.BEFORE_HAND_OFF
        and classify_text(doubt.message) is EndReason.OTHER
    )


def _failed_in(phase: str) -> "_Test":
    """The last attempt failed in this phase, and no text of libvirt says why."""

    def test(doubt: Doubt) -> bool:
        if not doubt.has_cause(WhySource.FAILED_ATTEMPT) or doubt.reason != phase:
            return False
        reason = _find_end(doubt)
        is_given_up = reason is EndReason.TARGET_LOST and causes.gave_up(doubt.evidence)
        return reason is EndReason.OTHER or is_given_up

    return test


def _find_end(doubt: Doubt) -> EndReason:
    """Why the last attempt failed, as the list of migrations and the metrics have it."""
    failed = next(iter(doubt.evidence.newest_failures()), None)
    reason = classify_text(doubt.message)
    return (
        reason
        if failed is None
        else complete_failure(reason, failed.start, failed.end, source_lost=False)
    )


def _ended_by(*reasons: EndReason, disks: bool | None = None) -> "_Test":
    def test(doubt: Doubt) -> bool:
        if not doubt.has_cause(WhySource.FAILED_ATTEMPT):
            return False
        newest = next(iter(doubt.evidence.newest_failures()), doubt.attempt)
        is_kind = disks is None or copies_disks(doubt.evidence, newest) is disks
        return is_kind and _find_end(doubt) in reasons

    return test


def _waits_for(reason: str) -> "_Test":
    """The VMIM's condition with this reason delayed the last attempt."""
    source = WhySource.MIGRATION_CONDITION
    return lambda doubt: doubt.has_cause(source) and doubt.reason == reason


_Test: TypeAlias = Callable[[Doubt], bool]
_ROOM = ("Insufficient ", "Too many pods", "free ports", "max volume count")
"""Words of the scheduler about a node that matches, but has no room."""
_MATCH = ("node affinity", "node selector")
"""Words of the scheduler about a node without the labels that a pod requires."""
FAILED_ON_ONE_NODE = 3
"""If this many attempts in a row fail on one node, the node may be the cause, and not the VM."""
BY_CAUSE = frozenset(
    {
        State.MIGRATION_STALLED,
        State.MIGRATING,
        State.MULTIPLE_ACTIVE_PODS,
        State.BACKOFF,
        State.TARGET_NOT_READY,
        State.CAPACITY,
        State.NO_MIGRATION,
    }
)
"""The states in which the last cause says what to do; in every other one, the state does."""
WAITING = frozenset({State.MULTIPLE_ACTIVE_PODS, State.CAPACITY})
"""The states that say what to do until an attempt fails."""
_TIMEOUTS = (EndReason.TIMEOUT_PROGRESS, EndReason.TIMEOUT_COMPLETION)
STEPS: tuple[tuple[_Test, State | Obstacle | None], ...] = (
    (_is_taint_left, Obstacle.TAINT_LEFT),
    (_is_withdrawn, Obstacle.WITHDRAWN),
    (_is_left_over, Obstacle.LEFTOVER),
    (lambda d: d.state is State.SHUTTING_DOWN, None),
    (_is_cut_off, Obstacle.SOURCE_SILENT),
    (lambda d: d.state is State.ENDED_NOT_FINISHED and d.cause is not None, Obstacle.HOTPLUG_HANGS),
    (_is_unfinalized, Obstacle.NOT_FINALIZED),
    (lambda d: _is_stalled(d) and not may_cancel(d.evidence), Obstacle.POST_COPY),
    (_hangs_in("Scheduled"), Obstacle.HAND_OFF_REFUSED),
    (_hangs_in("PreparingTarget"), Obstacle.TARGET_HANDLER),
    (_hangs_in("TargetReady"), Obstacle.SOURCE_HANDLER),
    (_waits_after_hand_off, Obstacle.HAND_OFF),
    (_exceeds_limit, Obstacle.STALLED),
    (_is_stalled, Obstacle.LONG_COPY),
    (_is_gated_by("ApplicationAwareQuota"), Obstacle.QUOTA_GATE),
    (_is_gated_by("kueue.x-k8s.io"), Obstacle.QUEUE_GATE),
    (_is_gated_by(""), State.TARGET_GATED),
    (_lacks_handlers, Obstacle.HANDLERS_DOWN),
    (_has_no_other_node, Obstacle.NO_OTHER_NODE),
    (_lacks(_ROOM), State.TARGET_UNSCHEDULABLE),
    (_lacks(_MATCH), Obstacle.NO_NODE_MATCHES),
    (_is_unscheduled, State.TARGET_UNSCHEDULABLE),
    (lambda d: not d.asks_cause, None),
    (_waits_for_attachment, Obstacle.ATTACHMENT),
    (_is_not_handed_off, Obstacle.HAND_OFF_REFUSED),
    (_has_no_target, Obstacle.NO_TARGET_POD),
    (_is_lost_in_post_copy, Obstacle.POST_COPY_LOST),
    (_is_target_deleted, Obstacle.TARGET_DELETED),
    (_is_deleted, Obstacle.STALE_POD),
    (_was_killed, Obstacle.TARGET_LOST),
    (_does_not_start, Obstacle.TARGET_NOT_STARTED),
    *((_waits_for(wait.reason), wait.state) for wait in VMIM_CONDITIONS.values()),
    (_says(WhySource.MIGRATION_CONDITION), State.QUOTA),
    (_ended_by(*_TIMEOUTS, disks=True), Obstacle.DISK_COPY_SLOW),
    (_ended_by(*_TIMEOUTS), Obstacle.NOT_CONVERGING),
    (_ended_by(EndReason.LIBVIRT), Obstacle.MIGRATION_ERROR),
    (_failed_in("Scheduled"), Obstacle.HAND_OFF_REFUSED),
    (_failed_in("PreparingTarget"), Obstacle.TARGET_HANDLER),
    (_failed_in("TargetReady"), Obstacle.SOURCE_HANDLER),
    (_ended_by(EndReason.TARGET_LOST), Obstacle.TARGET_LOST),
    (_failed_before_hand_off, Obstacle.UNEXPLAINED),
    (_says(WhySource.FAILED_ATTEMPT), Obstacle.MIGRATION_ERROR),
    (lambda d: d.state is State.UNKNOWN, Obstacle.QUIET),
    (lambda d: bool(d.diagnosis.failed_attempts), Obstacle.UNEXPLAINED),
    (lambda d: d.state in WAITING and d.has_outlived, Obstacle.OUTLIVED_POD),
    (lambda d: d.state in WAITING, None),
    (lambda d: not d.diagnosis.stuck, Obstacle.NONE),
    (lambda d: d.state is State.MIGRATING, Obstacle.LONG_COPY),
    (lambda _: True, Obstacle.UNEXPLAINED),
)
"""The tests, and the obstacle of the first that holds; None: the state itself."""
