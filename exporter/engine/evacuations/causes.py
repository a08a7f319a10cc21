"""Finds which of the cluster's reasons says why a VM does not move."""

from collections.abc import Iterable

from exporter.engine.evacuations.ended_migrations import IMAGE_WORDS, classify_text
from exporter.engine.facts.evidence import Evidence
from exporter.engine.facts.model import EndReason, Instant, Pod, Seconds, Why, WhySource
from exporter.engine.facts.states import VMIM_CONDITIONS, State
from exporter.engine.store.reasons import SELECTORS, SOURCE_SILENT, TERMINATING


STARTS_WITHIN: Seconds = 120.0
"""A pod may take this long to get its network, its volumes and its init containers."""
UNSCHEDULABLE_FOR: tuple[Seconds, Seconds] = (290.0, 420.0)
"""KubeVirt deletes a target pod that is unschedulable for 300 s; it looks again after some time."""
PENDING_FOR: tuple[Seconds, Seconds] = (890.0, 1_200.0)
"""KubeVirt deletes a target pod that is Pending for 900 s, whatever the reason."""
GIVES_UP_AFTER: Seconds = 120.0
"""A launcher to which no domain comes exits after four to six minutes; one that fails, earlier."""
BEFORE_HAND_OFF = frozenset({"", "Pending", "Scheduling"})
"""An attempt that fails in one of these phases gives no reason."""
GATED = "SchedulingGated"
"""The reason of the condition PodScheduled of a pod with scheduling gates."""
GAVE_UP = "exit code 1"
"""What a launcher leaves that was not killed, but ended because nothing came."""
CREATING = "ContainerCreating"
"""The reason of a container that waits for its image, or for the pod's network and volumes."""

_BLOCKERS = frozenset({WhySource.POD_SCHEDULED, WhySource.MIGRATION_CONDITION})
_OWN_BLOCKERS = frozenset(
    {WhySource.DELETION, WhySource.POD_DISRUPTION_BUDGET, WhySource.LIVE_MIGRATABLE}
)
_OF_TARGETS = frozenset({WhySource.TARGET_CONTAINER, WhySource.TARGET_POD})


def find_state_cause(state: State, reasons: tuple[Why, ...], target: Pod | None) -> Why | None:
    """The reason that explains a state; `target` is the active target pod."""
    if state is State.MIGRATING:
        return next(filter(is_target_deletion, reasons), find_cause(reasons))
    if state is State.TARGET_NOT_READY and target is not None:
        # An earlier attempt may have failed for another reason.
        since = target.created or 0.0
        own = [why for why in reasons if why.source in _OF_TARGETS and (why.at or since) >= since]
        cause = next((why for why in own if why.reason != CREATING), next(iter(own), None))
        return find_cause(reasons) if cause is None else cause
    source = _SOURCES.get(state)
    own = [why for why in reasons if why.source is source and why.reason not in SELECTORS]
    if state is State.ENDED_NOT_FINISHED:
        return next(iter(own), None)
    return next(iter(own), find_cause(reasons))


def drop_young(reasons: tuple[Why, ...], now: Instant) -> tuple[Why, ...]:
    """The reasons without those of a pod that may still be starting."""
    return tuple(
        why
        for why in reasons
        if why.source is not WhySource.TARGET_POD or now - (why.at or now) >= STARTS_WITHIN
    )


def drop_target_deletions(
    reasons: tuple[Why, ...], target: Pod | None, state: State, pods: Iterable[Pod], now: Instant
) -> tuple[Why, ...]:
    """The reasons without the deletion of a target pod that nobody has to act on.

    That of the present attempt's `target` ends the VM. A pod that hangs keeps the VM in the state
    `multiple_active_pods`. Every other one, such as that of an earlier attempt, just goes.
    """
    is_deleted = target is not None and target.deleted_at is not None
    is_held_up = state is State.MULTIPLE_ACTIVE_PODS and any(pod.hangs(now) for pod in pods)
    if is_deleted or is_held_up:
        return reasons
    return tuple(why for why in reasons if not is_target_deletion(why))


def is_target_deletion(why: Why) -> bool:
    """Whether a reason is that a pod which was or is a migration's target is being deleted."""
    return why.source is WhySource.TARGET_CONTAINER and why.reason == TERMINATING


def find_cause(reasons: tuple[Why, ...]) -> Why | None:
    """The newest reason that says why attempts fail, or None.

    An attempt that failed before its hand-off gives no reason. Then the reason of the scheduler,
    the pod or the condition counts, although it is older. After the hand-off the target's container
    ends because the migration has failed, so its reason counts only if KubeVirt says that the
    target was lost, and if the container did not end by itself.
    """
    failed = next((why for why in reasons if why.source is WhySource.FAILED_ATTEMPT), None)
    bare = failed is None or failed.reason in BEFORE_HAND_OFF
    sources = _BLOCKERS | _OF_TARGETS if bare else _BLOCKERS
    since = 0.0 if failed is None or bare else failed.at or 0.0
    if is_target_lost(reasons):
        lost = next((why for why in reasons if _was_killed(why)), None)
        if lost is not None:
            return lost
    others = (
        why
        for why in reasons
        if why.source in sources and why.reason not in SELECTORS and (why.at or since) >= since
    )
    return next(others, failed)


def is_target_lost(reasons: tuple[Why, ...]) -> bool:
    """Whether the newest attempt failed because its target pod ended."""
    failed = (why.message for why in reasons if why.source is WhySource.FAILED_ATTEMPT)
    return classify_text(next(failed, "")) is EndReason.TARGET_LOST


def _was_killed(why: Why) -> bool:
    return (
        why.source is WhySource.TARGET_CONTAINER
        and why.reason not in IMAGE_WORDS
        and not why.message.removesuffix(")").endswith(GAVE_UP)
    )


def find_blocker(reasons: tuple[Why, ...]) -> Why | None:
    """Why a VM does not leave its node.

    The first of these that exists: its node does not answer, its deletion, a budget, the condition
    LiveMigratable, the cause of failed attempts.
    """
    own = (why for why in reasons if why.source in _OWN_BLOCKERS or why.reason == SOURCE_SILENT)
    return next(own, None) or find_cause(reasons)


def timed_out(evidence: Evidence, limits: tuple[Seconds, Seconds]) -> bool:
    """Whether the newest failed attempt ended at one of KubeVirt's limits for target pods."""
    failed = next(iter(evidence.newest_failures()), None)
    if (
        failed is None
        or failed.scheduled_at is not None
        or failed.handed_off
        or failed.scheduling_at is None
        or failed.finished_at is None
    ):
        return False
    least, most = limits
    return least <= failed.finished_at - failed.scheduling_at <= most


def gave_up(evidence: Evidence) -> bool:
    """Whether the launcher of the newest failed attempt waited for minutes after the hand-off."""
    failed = next(iter(evidence.newest_failures()), None)
    if failed is None or failed.scheduled_at is None or failed.finished_at is None:
        return False
    return failed.finished_at - failed.scheduled_at >= GIVES_UP_AFTER


_SOURCES = {
    State.SHUTTING_DOWN: WhySource.DELETION,
    State.ENDED_NOT_FINISHED: WhySource.HOTPLUG,
    State.NOT_MIGRATABLE: WhySource.LIVE_MIGRATABLE,
    State.TARGET_GATED: WhySource.POD_SCHEDULED,
    State.TARGET_UNSCHEDULABLE: WhySource.POD_SCHEDULED,
} | dict.fromkeys((wait.state for wait in VMIM_CONDITIONS.values()), WhySource.MIGRATION_CONDITION)
"""By state: the source whose newest reason explains it. Other states: the last cause does."""
