"""Finds what delays a VM, whoever moves it: its `State`.

`ORDER` has the states in the order in which they are tested; the first whose test holds counts:

1. KubeVirt does not retry: the VM ends, somebody else has to act, or its migration has ended.
2. A migration is running. It is stalled `stuck.after` after its hand-off if it has not started, or
   `stuck.after` after the VM's node stopped answering.
3. Something prevents every attempt.
4. Something delays the present attempt.

A state that depends on an invisible resource is not guessed: without permission for VMIMs or pods,
or while their watch is dead, it is `unknown`. A missing VMIM or pod counts as absent only if its
watch has had contact since the VMI changed. While the watch of VMIs is dead, every state is
`unknown`.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from msgspec import Struct

from exporter.engine.facts.evidence import Evidence
from exporter.engine.facts.model import Instant, MigrationState, Pod, Resource, Seconds, Vmim
from exporter.engine.facts.policy import StuckPolicy
from exporter.engine.facts.states import VMIM_CONDITIONS, State
from exporter.engine.facts.trust import Contacts
from exporter.engine.store.load import RUNNING_PHASES, Load
from exporter.engine.store.nodes import NodeIndex


FINISHES_WITHIN: Seconds = 300.0
"""KubeVirt may take this long to finish the VMIM of a migration that has ended."""
TIMES_THE_LAST = 3
"""A migration stalls only after this many times the duration of the VM's last one."""
_COPYING_PHASES = RUNNING_PHASES - {"Scheduling"}


class Backoff(Struct, frozen=True):
    """KubeVirt's pause before it tries a failed evacuation again.

    `migration.go: handleMigrationBackoff`: the newest evacuation or workload-update VMIM of a VMI
    stays Pending for 20 s * 2^(n-1) after the last failure, with n failures since the last success.
    """

    seconds: Seconds
    next_try: Instant


class Situation(NamedTuple):
    """What delays a VM; the fields are those of `Diagnosis`."""

    state: State
    attempt: Vmim | None
    backoff: Backoff | None
    missing: tuple[Resource, ...]
    is_quiet: bool
    overdue: bool


class Case(NamedTuple):
    """What the tests of `ORDER` look at.

    `attempt` is the unfinished VMIM, `backoff` its pause, `target` its active target pod.
    """

    evidence: Evidence
    attempt: Vmim | None
    stuck: StuckPolicy
    now: Instant
    load: Load | None
    contacts: Contacts
    backoff: Backoff | None
    nodes: NodeIndex | None
    target: Pod | None

    def knows_absent(self, resource: Resource, since: Instant | None = None) -> bool:
        """Whether an object of this resource that is missing does not exist.

        Its watch must have had contact `since` an instant (None: when the VMI changed).
        """
        since = self.evidence.changed_at if since is None else since
        is_current = self.contacts.get(resource, since) >= since
        return is_current and self.evidence.trust.believes(resource)


def assess(
    evidence: Evidence,
    stuck: StuckPolicy,
    load: Load | None,
    now: Instant,
    *,
    contacts: Contacts,
    nodes: NodeIndex | None,
) -> Situation:
    """The situation of a VMI by evidence without dead resources."""
    attempt = evidence.unfinished()
    backoff = compute_backoff((*evidence.vmims, *evidence.namesakes), stuck.retry_backoff)
    holds = backoff if backoff is not None and now < backoff.next_try else None
    target = evidence.find_target(attempt)
    case = Case(evidence, attempt, stuck, now, load, contacts, holds, nodes, target)
    state = next(state for applies, state in ORDER if applies(case))
    missing = _find_missing(case) if state is State.UNKNOWN else ()
    return Situation(
        state,
        attempt,
        holds,
        missing,
        is_quiet=bool(missing)
        and Resource.KUBEVIRTS not in missing
        and all(map(evidence.trust.believes, missing)),
        overdue=_is_overdue(evidence.vmi.migration, now),
    )


def compute_backoff(vmims: tuple[Vmim, ...], first: Seconds) -> Backoff | None:
    """The backoff of a Pending attempt, even if it has passed already.

    `first` is KubeVirt's first pause (20 s). None if the newest attempt is not Pending, if no
    attempt failed before it, or if the time of that failure is unknown.
    """
    eligible = sorted(
        (vmim for vmim in vmims if vmim.retried),
        key=lambda vmim: (vmim.created or 0.0, vmim.name),
        reverse=True,
    )
    if len(eligible) < 2 or eligible[0].phase != "Pending":
        return None
    failures = 0
    for vmim in eligible[1:]:
        if vmim.phase == "Succeeded":
            break
        if vmim.phase == "Failed" and not vmim.deleting:
            failures += 1
    last = eligible[1]
    if not failures or last.phase != "Failed" or last.finished_at is None:
        return None
    seconds = first * 2.0 ** min(failures - 1, 32)
    return Backoff(seconds=seconds, next_try=last.finished_at + seconds)


def find_hand_off(evidence: Evidence, attempt: Vmim | None) -> Instant | None:
    """When an attempt was handed off that has not begun to copy; None if it is not in between."""
    if attempt is None or attempt.phase not in _COPYING_PHASES or attempt.start is not None:
        return None
    state = evidence.vmi.migration
    own = () if state is None or state.start is None else (state.uid, *evidence.vmi.other_uids)
    if attempt.uid in own:
        return None
    return attempt.created if attempt.scheduled_at is None else attempt.scheduled_at


def is_ending(evidence: Evidence, nodes: NodeIndex | None) -> bool:
    """Whether the VMI is being deleted, or its own pod on a node that answers.

    A silent node ends no pod: Kubernetes deletes its pods, and they stay until it is back.
    """
    if evidence.vmi.deleted_at is not None:
        return True
    node = None if nodes is None else nodes.find(evidence.vmi.node)
    return evidence.ends_at is not None and (node is None or not node.is_silent)


def find_unfinished_end(evidence: Evidence) -> Instant | None:
    """When the migration of an unfinished VMIM ended, as its VMI says; None if it has not ended."""
    attempt, state = evidence.unfinished(), evidence.vmi.migration
    if attempt is None or attempt.phase not in _COPYING_PHASES or state is None or not state.ended:
        return None
    is_own = attempt.uid in (state.uid, *evidence.vmi.other_uids)
    return evidence.migration_end if is_own else None


def _find_missing(case: Case) -> tuple[Resource, ...]:
    """The missing resources that make the state unknown; the KubeVirt object if no other is."""
    if not case.evidence.trust.believes(Resource.VMIS):
        return (Resource.VMIS,)
    needed = (Resource.VMIMS, Resource.PODS)
    missing = (resource for resource in needed if not case.knows_absent(resource))
    return tuple(missing) or (Resource.KUBEVIRTS,)


def _has_left(case: Case) -> bool:
    marker = case.evidence.marker
    return marker is not None and marker.node != case.evidence.vmi.node


def _is_external(case: Case) -> bool:
    evidence = case.evidence
    return evidence.marker is not None and evidence.vmi.is_external and case.attempt is None


def _has_ended(case: Case) -> bool:
    """KubeVirt does not finish the VMIM of a migration that has ended."""
    end = find_unfinished_end(case.evidence)
    return end is not None and case.now - end > FINISHES_WITHIN


def _is_stalled(case: Case) -> bool:
    evidence, state, now = case.evidence, case.evidence.vmi.migration, case.now
    handed_off_at = find_hand_off(evidence, case.attempt)
    if handed_off_at is not None and now - handed_off_at > case.stuck.after:
        return True
    if state is None or state.start is None or state.ended or evidence.is_contradicted(now):
        return False
    source = None if case.nodes is None else case.nodes.find(evidence.vmi.node)
    if source is not None and source.is_silent:
        return now - max(state.start, source.silent_since or state.start) > case.stuck.after
    return now - state.start > _find_time_limit(evidence, state, case.stuck)


def _find_time_limit(evidence: Evidence, state: MigrationState, stuck: StuckPolicy) -> Seconds:
    """How long a migration may run before it counts as stalled.

    KubeVirt aborts a copy after its own limit, unless its virt-handler hangs or may continue in
    post-copy. A slow network makes honest migrations slow, but not so much slower than the last.
    """
    limit = _find_kubevirts_limit(state)
    if limit is None or state.mode == "PostCopy":
        return stuck.migration_timeout
    last = evidence.history.last_duration() or 0.0
    return min(stuck.migration_timeout, max(limit, TIMES_THE_LAST * last))


def _is_overdue(state: MigrationState | None, now: Instant) -> bool:
    """Whether a copy has run for longer than KubeVirt allows, so that its own end of it failed."""
    limit = None if state is None or not state.running else _find_kubevirts_limit(state)
    if state is None or state.start is None or limit is None:
        return False
    return now - state.start > limit


def _find_kubevirts_limit(state: MigrationState) -> Seconds | None:
    """How long KubeVirt lets a migration copy; None if that is unknown.

    KubeVirt doubles the time of a VM that it has paused for the rest of the copy.
    """
    limit = state.time_limit
    return limit if limit is None or state.mode != "Paused" else 2 * limit


def _is_migrating(case: Case) -> bool:
    state = case.evidence.vmi.migration
    if state is not None and state.running and not case.evidence.is_contradicted(case.now):
        return True
    return case.attempt is not None and case.attempt.phase in _COPYING_PHASES


def _find_handed_off(case: Case) -> MigrationState | None:
    """A hand-off that has not begun to copy, if VMIMs can be read."""
    state = case.evidence.vmi.migration
    if state is None or not state.uid or state.start is not None or state.ended:
        return None
    return state if case.evidence.trust.believes(Resource.VMIMS) else None


def _is_zombie(case: Case) -> bool:
    """A migration that can never end, because its VMIM has failed or is gone (#18087)."""
    evidence = case.evidence
    if evidence.is_contradicted(case.now):
        return True
    state = _find_handed_off(case)
    if state is None:
        return False
    owner = next((vmim for vmim in evidence.vmims if vmim.uid == state.uid), None)
    if owner is not None:
        return owner.phase == "Failed"
    return case.knows_absent(Resource.VMIMS, since=evidence.handed_off_at)


def _is_handed_off(case: Case) -> bool:
    """The VMIM of a hand-off is not known yet."""
    state = _find_handed_off(case)
    return state is not None and all(vmim.uid != state.uid for vmim in case.evidence.vmims)


def _lacks_vmims(case: Case) -> bool:
    return case.attempt is None and not case.knows_absent(Resource.VMIMS)


def _is_crowded(case: Case) -> bool:
    uid = "" if case.attempt is None else case.attempt.uid
    active = (pod for pod in case.evidence.pods if not pod.finished)
    return sum(not uid or pod.migration_uid != uid for pod in active) > 1


def _is_full(case: Case) -> bool:
    return case.load is not None and case.load.is_full(case.evidence.vmi.node)


def _waits_for(state: State) -> "_Test":
    return lambda case: case.attempt is not None and case.attempt.wait_reason is state


_Test: TypeAlias = Callable[[Case], bool]
ORDER: tuple[tuple[_Test, State], ...] = (
    (lambda case: not case.evidence.trust.believes(Resource.VMIS), State.UNKNOWN),
    (lambda case: is_ending(case.evidence, case.nodes), State.SHUTTING_DOWN),
    (_is_external, State.EXTERNAL),
    (_has_ended, State.ENDED_NOT_FINISHED),
    (_has_left, State.STALE_MARKER),
    (_is_stalled, State.MIGRATION_STALLED),
    (_is_migrating, State.MIGRATING),
    (_is_zombie, State.ZOMBIE_STATE),
    (_is_handed_off, State.MIGRATING),
    (lambda case: not case.evidence.vmi.migratable, State.NOT_MIGRATABLE),
    (_lacks_vmims, State.UNKNOWN),
    (_is_crowded, State.MULTIPLE_ACTIVE_PODS),
    # Up to 1.8, KubeVirt creates no VMIM while its limits are reached (`evacuation.go`, with the
    # gate MigrationPriorityQueue off, which is the default).
    (lambda case: case.attempt is None and not case.knows_absent(Resource.PODS), State.UNKNOWN),
    (lambda case: case.attempt is None and _is_full(case), State.CAPACITY),
    (lambda case: case.attempt is None, State.NO_MIGRATION),
    *((_waits_for(wait.state), wait.state) for wait in VMIM_CONDITIONS.values()),
    (lambda case: case.backoff is not None, State.BACKOFF),
    (lambda case: case.target is not None and case.target.gated, State.TARGET_GATED),
    (
        lambda case: case.target is not None and case.target.unschedulable,
        State.TARGET_UNSCHEDULABLE,
    ),
    (lambda case: case.target is not None, State.TARGET_NOT_READY),
    (lambda case: not case.knows_absent(Resource.PODS), State.UNKNOWN),
    (
        lambda case: case.attempt is not None and case.attempt.phase == "Scheduling",
        State.TARGET_NOT_READY,
    ),
    (lambda case: case.load is None, State.UNKNOWN),
    (_is_full, State.CAPACITY),
    (lambda _: True, State.TARGET_NOT_READY),
)
"""The tests, and the state of the first that holds."""
