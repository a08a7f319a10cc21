"""Finds what keeps a VM from moving: its state, or an obstacle that the state does not show.

It depends on the last cause. It does not depend on the state of the retries, which changes every
few seconds. `exporter.words.evacuations` has what the person on call should do about it.
"""

from enum import StrEnum
from itertools import takewhile

from exporter.engine.evacuations.diagnosis import (
    Diagnosis,
    Move,
    find_hand_off,
    find_target,
)
from exporter.engine.evacuations.ended_migrations import IMAGE_WORDS, classify_text
from exporter.engine.facts.evidence import Evidence
from exporter.engine.facts.model import EndReason, Resource, Vmim, Why, WhySource
from exporter.engine.facts.states import VMIM_CONDITIONS, State
from exporter.engine.store.reasons import SELECTORS, SOURCE_SILENT, TERMINATING


_BLOCKERS = frozenset({WhySource.POD_SCHEDULED, WhySource.MIGRATION_CONDITION})
_OWN_BLOCKERS = frozenset(
    {WhySource.DELETION, WhySource.POD_DISRUPTION_BUDGET, WhySource.LIVE_MIGRATABLE}
)
_BEFORE_HAND_OFF = frozenset({"", "Pending", "Scheduling"})
"""An attempt that fails in one of these phases gives no reason."""


class Obstacle(StrEnum):
    """What keeps a VM from moving, where its state alone does not say what to do."""

    LEFTOVER = "leftover"
    TAINT_LEFT = "taint_left"
    SOURCE_SILENT = "source_silent"
    STALLED = "stalled"
    HAND_OFF = "hand_off"
    POST_COPY = "post_copy"
    POST_COPY_LOST = "post_copy_lost"
    STALE_POD = "stale_pod"
    NO_TARGET_POD = "no_target_pod"
    ATTACHMENT = "attachment"
    TARGET_NOT_STARTED = "target_not_started"
    TARGET_LOST = "target_lost"
    TARGET_DELETED = "target_deleted"
    NOT_CONVERGING = "not_converging"
    MIGRATION_ERROR = "migration_error"
    QUIET = "quiet"
    UNEXPLAINED = "unexplained"
    NONE = "none"
    """KubeVirt is working on the evacuation, and nothing is wrong."""


def find_obstacle(
    evidence: Evidence, diagnosis: Diagnosis | Move, why: tuple[Why, ...]
) -> tuple[State | Obstacle, Why | None]:
    """What keeps a VM from moving, and the cluster's reason for that, if there is one.

    `why` are the VMI's reasons, newest first.
    """
    source = _SOURCES.get(diagnosis.state)
    own = (one for one in why if one.source is source and one.reason not in SELECTORS)
    cause = next(own, find_cause(why))
    if diagnosis.state is State.MIGRATING:
        cause = next((one for one in why if one.reason == TERMINATING), cause)
    if diagnosis.stuck and diagnosis.state is not State.SHUTTING_DOWN:
        cause = next((one for one in why if one.reason == SOURCE_SILENT), cause)
    obstacle = _judge(evidence, diagnosis, cause)
    if obstacle is Obstacle.TARGET_NOT_STARTED and _is_target_lost(why):
        obstacle = Obstacle.TARGET_LOST
    if isinstance(diagnosis, Diagnosis):
        if diagnosis.leftover and diagnosis.tainted:
            obstacle = Obstacle.TAINT_LEFT
        elif diagnosis.given_up and may_cancel(evidence):
            obstacle = Obstacle.LEFTOVER
    return obstacle, cause


def find_failing_target(evidence: Evidence) -> tuple[str, int] | None:
    """The node on which the last attempts failed, and how many of them; None if they are few."""
    failed = evidence.newest_failures()
    if not failed or not failed[0].target_node:
        return None
    node = failed[0].target_node
    there = sum(1 for _ in takewhile(lambda one: one.target_node == node, failed))
    return (node, there) if there >= FAILED_ON_ONE_NODE else None


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


def _judge(evidence: Evidence, diagnosis: Diagnosis | Move, cause: Why | None) -> State | Obstacle:
    state, attempt = diagnosis.state, diagnosis.attempt
    if state is State.SHUTTING_DOWN:
        return State.SHUTTING_DOWN
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
    return _find_hindrance(evidence, diagnosis, cause) if state in BY_CAUSE else state


def _find_hindrance(
    evidence: Evidence, diagnosis: Diagnosis | Move, cause: Why | None
) -> State | Obstacle:
    """The obstacle in a state whose obstacle depends on the target pod and the last cause."""
    state, attempt = diagnosis.state, diagnosis.attempt
    if state is State.TARGET_NOT_READY and attempt is not None:
        target = find_target(attempt, evidence.pods)
        if target is not None and target.ready and evidence.vmi.hotplugs_volumes:
            return Obstacle.ATTACHMENT
        is_bare = cause is None and not diagnosis.failed_attempts
        if target is None and is_bare and evidence.trust.sees(Resource.PODS) and diagnosis.stuck:
            return Obstacle.NO_TARGET_POD
    if _is_lost(evidence, attempt):
        return Obstacle.POST_COPY_LOST
    if cause is not None:
        return _judge_cause(cause, state)
    if diagnosis.failed_attempts:
        return Obstacle.UNEXPLAINED
    if state in WAITING:
        return state
    is_moving = state is State.MIGRATING or not diagnosis.stuck
    return Obstacle.NONE if is_moving else Obstacle.UNEXPLAINED


def _is_lost(evidence: Evidence, attempt: Vmim | None) -> bool:
    """Whether the VM's last migration failed in post-copy, when half its memory had moved."""
    migration = evidence.vmi.migration
    is_lost = migration is not None and migration.failure is EndReason.POST_COPY_LOST
    return is_lost and attempt is None


def _judge_cause(cause: Why, state: State) -> State | Obstacle:
    if cause.source is WhySource.POD_SCHEDULED:
        return State.TARGET_UNSCHEDULABLE
    if cause.source is WhySource.TARGET_CONTAINER:
        if cause.reason != TERMINATING:
            return Obstacle.TARGET_NOT_STARTED
        is_stale = state is State.MULTIPLE_ACTIVE_PODS
        return Obstacle.STALE_POD if is_stale else Obstacle.TARGET_DELETED
    if cause.source is WhySource.NODE:
        return Obstacle.SOURCE_SILENT
    if cause.source is WhySource.MIGRATION_CONDITION:
        return _CONDITIONED.get(cause.reason, State.QUOTA)
    found = _ENDED.get(classify_text(cause.message))
    if found is not None:
        return found
    is_bare = cause.reason in _BEFORE_HAND_OFF
    return Obstacle.UNEXPLAINED if is_bare else Obstacle.MIGRATION_ERROR


FAILED_ON_ONE_NODE = 3
"""If this many attempts in a row fail on one node, the node may be the cause, and not the VM."""
OF_AN_ATTEMPT = frozenset({Obstacle.MIGRATION_ERROR, Obstacle.UNEXPLAINED, Obstacle.TARGET_LOST})
"""The obstacles that a node can cause to every VM that comes."""
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
_SOURCES = {
    State.SHUTTING_DOWN: WhySource.DELETION,
    State.NOT_MIGRATABLE: WhySource.LIVE_MIGRATABLE,
    State.TARGET_UNSCHEDULABLE: WhySource.POD_SCHEDULED,
} | dict.fromkeys((wait.state for wait in VMIM_CONDITIONS.values()), WhySource.MIGRATION_CONDITION)
"""By state: the source whose newest reason explains it. Other states: the last cause does."""
_ENDED = {
    EndReason.TIMEOUT_PROGRESS: Obstacle.NOT_CONVERGING,
    EndReason.TIMEOUT_COMPLETION: Obstacle.NOT_CONVERGING,
    EndReason.TARGET_LOST: Obstacle.TARGET_LOST,
    EndReason.LIBVIRT: Obstacle.MIGRATION_ERROR,
}
"""The obstacles by what KubeVirt's text says of a failed attempt."""
_CONDITIONED = {wait.reason: wait.state for wait in VMIM_CONDITIONS.values()}
