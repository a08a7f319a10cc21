"""Diagnoses an evacuation or another move: what holds it up, and whether it is stuck.

`status.evacuationNodeName`, or a taint on the node, makes KubeVirt move a VMI off its node.
KubeVirt then creates evacuation VMIMs until one succeeds, the evacuation is cancelled or the VMI is
gone. It retries forever, keeps five finished VMIMs, and raises no alert. People and controllers
create VMIMs too; such a move has the same states (`diagnose_move`). The module `situation` finds
the state. While the watch of VMIs is dead, nothing is stuck.

An evacuation is stuck if it is older than `stuck.after` and not migrating, or if it has failed
`stuck.failedAttempts` times since the request. (A success ends an evacuation, so these are failures
in a row.) A stuck evacuation stays stuck, although no state is stored: the number of failures only
grows, and if an attempt began to migrate after `stuck.after`, the evacuation was stuck before that.
A VMI with the strategy External is moved by somebody else. The VMIMs that somebody else created
since the request are its attempts. As long as there is no attempt, the evacuation is stuck only if
`stuck.external` sets an age.

A VM that waits for KubeVirt's migration limits is in a queue, and is not stuck while migrations of
others succeed. Its age counts from the end of the last successful migration out of its node. If the
limit of the cluster is reached, it counts from the end of the last successful migration in the
cluster. In the states of `_IN_TURN`, it counts from when the limits first allowed an attempt, or
from the end of the last successful migration in the cluster if that was earlier.
"""

from enum import StrEnum

from msgspec import Struct
from msgspec.structs import replace

from exporter.engine.evacuations.situation import Backoff, assess, find_unfinished_end
from exporter.engine.facts.evidence import Evidence, Marker, RequestedThrough
from exporter.engine.facts.model import (
    DRAIN_TAINT,
    Instant,
    Outcome,
    Resource,
    Seconds,
    Trigger,
    Vmim,
)
from exporter.engine.facts.policy import StuckPolicy
from exporter.engine.facts.states import State
from exporter.engine.facts.trust import UP_TO_DATE, Contacts
from exporter.engine.store.load import Load
from exporter.engine.store.node_drains import DrainPart, find_part
from exporter.engine.store.nodes import NodeIndex
from exporter.engine.store.requesters import (
    SAME_REQUEST,
    Source,
    find_source,
    find_withdrawn,
)


DIVERGED_AFTER: Seconds = 120.0
"""How long marker and annotation may differ, because KubeVirt writes them one after the other."""
NEXT_ATTEMPT: Seconds = 120.0
"""KubeVirt may take this long to start the next migration after one has ended, or to clear the
marker of a VMI that has left its node."""
FAILED_WITHIN: Seconds = 3600.0
"""A move without an unfinished VMIM is over this long after its last failure."""


class Cause(StrEnum):
    """Why an evacuation counts as stuck."""

    AGE = "age"
    FAILURES = "failures"


class LastSeen(Struct, frozen=True):
    """An evacuation as it was when its VMI could last be seen."""

    at: Instant
    state: State
    stuck: bool


class Diagnosis(Struct, frozen=True, kw_only=True):
    """The state of one evacuation.

    `through`: how it was requested. `tainted`: its node has KubeVirt's drain taint, so KubeVirt
    refuses to cancel it. `failed_attempts` is a lower bound: KubeVirt may have deleted failed VMIMs
    before the exporter started. `backoff` is None if there is none, or if it is unknown. `due_at`
    is when the age of the evacuation makes it stuck; None means never. `part`: which drain of its
    node it belongs to. `given_up`: it is a leftover, and an exporter saw how its drain ended, or
    that its requesters withdrew. `withdrawn`: who asked by EvictionRequests, if all have withdrawn.
    `missing` are the resources without which the state is unknown; `is_quiet`: they are visible,
    but have not been read since the VMI changed. `overdue`: the VM's memory has been copied for
    longer than KubeVirt allows. `last_seen` is set while the VMI's data are too old.
    """

    node: str
    requested_at: Instant
    source: Source
    state: State
    stuck_by: tuple[Cause, ...]
    due_at: Instant | None
    failed_attempts: int
    backoff: Backoff | None
    part: DrainPart
    given_up: bool
    withdrawn: tuple[str, ...]
    diverged: bool
    attempt: Vmim | None
    through: RequestedThrough
    tainted: bool
    missing: tuple[Resource, ...]
    is_quiet: bool
    overdue: bool
    last_seen: LastSeen | None

    @property
    def stuck(self) -> bool:
        """Whether the evacuation is stuck, so that a person has to act."""
        return bool(self.stuck_by)

    @property
    def leftover(self) -> bool:
        """Whether it was for a drain that is over, because its node is open again."""
        return self.part is DrainPart.LEFT_OVER


def diagnose(
    evidence: Evidence,
    stuck: StuckPolicy,
    load: Load | None,
    now: Instant,
    *,
    contacts: Contacts = UP_TO_DATE,
    nodes: NodeIndex | None = None,
    drain_taint: str = DRAIN_TAINT,
) -> Diagnosis | None:
    """The diagnosis at `now`, or None if the VMI is not evacuating.

    From dead resources, the diagnosis takes only who requested the evacuation. `contacts` are those
    with the watches of the VMI's namespace. `nodes` is None if nodes cannot be read. `drain_taint`
    is the key of KubeVirt's drain taint.
    """
    marker = evidence.marker
    if marker is None or (marker.ends_at is not None and now >= marker.ends_at):
        return None
    source = find_source(evidence.vmi, evidence.vmims, marker, evidence.eviction)
    seen, evidence = evidence, evidence.believed_at(now)
    is_alive = evidence.trust.believes(Resource.VMIS)
    situation = assess(evidence, stuck, load, now, contacts=contacts, nodes=nodes)
    state, attempt = situation.state, situation.attempt
    tainted = nodes is not None and nodes.find_taint(marker.node, drain_taint) is not None
    withdrawn = find_withdrawn(marker, seen.eviction)
    part = find_part(evidence.vmi, marker, source, nodes, drain_taint, is_withdrawn=bool(withdrawn))
    launcher, lacking_since = evidence.launcher, marker.lacking_since
    failed = marker.failed_since_request()
    due = _find_due(evidence, marker, attempt, stuck, state=state, load=load)
    return Diagnosis(
        node=marker.node,
        requested_at=_find_request(seen, marker),
        through=marker.through,
        tainted=marker.through is RequestedThrough.TAINT or tainted,
        source=source,
        state=state,
        stuck_by=_find_causes(evidence, attempt, stuck, now, state=state, due=due, failed=failed)
        if is_alive
        else (),
        due_at=due,
        failed_attempts=failed,
        backoff=situation.backoff,
        part=part,
        given_up=part is DrainPart.LEFT_OVER and (marker.was_drained or bool(withdrawn)),
        withdrawn=withdrawn,
        diverged=launcher is not None
        and not launcher.eviction_in_progress
        and lacking_since is not None
        and now - lacking_since >= DIVERGED_AFTER,
        attempt=attempt,
        missing=situation.missing,
        is_quiet=situation.is_quiet,
        overdue=situation.overdue,
        last_seen=None if is_alive else _find_last_seen(seen, contacts, stuck, load),
    )


def _find_request(evidence: Evidence, marker: Marker) -> Instant:
    """When the VM was first asked to leave.

    An EvictionRequest may be held for long before its eviction is tried and KubeVirt marks the VMI.
    How long the evacuation may take counts from the marker.
    """
    eviction = evidence.eviction
    if eviction is None or not eviction.askers or eviction.created is None:
        return marker.requested_at
    return min(marker.requested_at, eviction.created)


class Move(Struct, frozen=True, kw_only=True):
    """The state of a move without an evacuation: a user's, or a controller's.

    `since`: when the unfinished VMIM was created, or else the first of those that failed one after
    the other; None if that is unknown. `failed_attempts` is their number, a lower bound, because
    KubeVirt keeps five finished VMIMs. `stuck`: a person has to act.
    """

    node: str
    state: State
    trigger: Trigger
    since: Instant | None
    stuck: bool
    failed_attempts: int
    attempt: Vmim | None
    missing: tuple[Resource, ...]
    is_quiet: bool
    overdue: bool


def diagnose_move(
    evidence: Evidence,
    stuck: StuckPolicy,
    load: Load | None,
    now: Instant,
    *,
    contacts: Contacts = UP_TO_DATE,
    nodes: NodeIndex | None = None,
) -> Move | None:
    """The move at `now` of a VMI that is not evacuating; None if it is not being moved.

    It is being moved if it has an unfinished VMIM, or if its newest `stuck.failedAttempts` VMIMs
    failed one after the other, one of them within `FAILED_WITHIN`. A move is stuck if it has failed
    that often (with an unfinished VMIM: up to the creation of this VMIM), if its VMIM is older than
    `stuck.migrationTimeout`, or if it hangs after its hand-off. The arguments are those of
    `diagnose`.
    """
    evidence = evidence.believed_at(now)
    is_alive = evidence.trust.believes(Resource.VMIS)
    if evidence.vmi.finished or not evidence.vmims or not is_alive:
        return None
    attempt, failures = evidence.unfinished(), evidence.newest_failures()
    until = now if attempt is None or attempt.created is None else attempt.created
    has_failed = len(failures) >= stuck.failed_attempts and any(
        until - (vmim.finished_at or vmim.created or 0.0) <= FAILED_WITHIN for vmim in failures
    )
    if attempt is None and not has_failed:
        return None
    situation = assess(evidence, stuck, load, now, contacts=contacts, nodes=nodes)
    begun = failures[-1] if attempt is None else attempt
    created = begun.created
    is_old = attempt is not None and created is not None and now - created > stuck.migration_timeout
    return Move(
        node=evidence.vmi.node,
        state=situation.state,
        trigger=begun.trigger,
        since=created,
        stuck=is_old
        or has_failed
        or situation.state is State.MIGRATION_STALLED
        or _hangs(evidence, situation.state, stuck, now),
        failed_attempts=len(failures),
        attempt=attempt,
        missing=situation.missing,
        is_quiet=situation.is_quiet,
        overdue=situation.overdue,
    )


def _find_last_seen(
    evidence: Evidence, contacts: Contacts, stuck: StuckPolicy, load: Load | None
) -> LastSeen | None:
    read = (*evidence.unreadable, *contacts.items())
    at = min((at for resource, at in read if resource is Resource.VMIS), default=None)
    if at is None:
        return None
    as_it_was = replace(evidence.trust, dead=frozenset())
    diagnosis = diagnose(replace(evidence, trust=as_it_was), stuck, load, at)
    return None if diagnosis is None else LastSeen(at, diagnosis.state, diagnosis.stuck)


def _hangs(evidence: Evidence, state: State, stuck: StuckPolicy, now: Instant) -> bool:
    """Whether KubeVirt has not finished a VMIM within `stuck.after` since the migration's end."""
    end = find_unfinished_end(evidence)
    return state is State.ENDED_NOT_FINISHED and end is not None and now - end > stuck.after


def _find_causes(
    evidence: Evidence,
    attempt: Vmim | None,
    stuck: StuckPolicy,
    now: Instant,
    *,
    state: State,
    due: Instant | None,
    failed: int,
) -> tuple[Cause, ...]:
    """Why the evacuation is stuck."""
    # When the attempt began to migrate.
    began, migration = None, evidence.vmi.migration
    if migration is not None and migration.running:
        began = migration.start
    elif attempt is not None:
        began = attempt.created if attempt.scheduled_at is None else attempt.scheduled_at
    is_late = due is not None and now > due
    if state is State.SHUTTING_DOWN:
        return (Cause.AGE,) if is_late else ()
    in_time = state is State.MIGRATING and (began is None or due is None or began <= due)
    is_old = state is State.MIGRATION_STALLED or _hangs(evidence, state, stuck, now)
    is_old |= is_late and not in_time
    causes = {Cause.AGE: is_old, Cause.FAILURES: failed >= stuck.failed_attempts}
    return tuple(cause for cause, applies in causes.items() if applies)


def _find_due(
    evidence: Evidence,
    marker: Marker,
    attempt: Vmim | None,
    stuck: StuckPolicy,
    *,
    state: State,
    load: Load | None,
) -> Instant | None:
    """When the evacuation's age makes it stuck, if nothing changes until then; None for never."""
    is_ending = evidence.vmi.deleted_at is not None or state is State.SHUTTING_DOWN
    if is_ending and evidence.ends_at is not None:
        return evidence.ends_at + stuck.after
    since = marker.requested_at - SAME_REQUEST
    made = any(vmim.created is None or vmim.created >= since for vmim in evidence.vmims)
    if evidence.vmi.is_external and not made and not marker.failed_since_request():
        return None if stuck.external is None else marker.requested_at + stuck.external
    due = marker.requested_at + stuck.after
    moved: Instant | None = None
    allowed = stuck.after
    if state is State.STALE_MARKER:
        left = evidence.vmi.migration
        if left is not None and left.outcome is Outcome.SUCCEEDED:
            moved, allowed = evidence.migration_end, NEXT_ATTEMPT
    elif state is State.CAPACITY and load is not None:
        moved = load.find_last_departure(evidence.vmi.node)
    elif state in _IN_TURN and load is not None and load.newest_success is not None:
        turn = _find_turn(evidence, marker, attempt)
        if turn is None:
            moved, allowed = load.newest_success, NEXT_ATTEMPT
        else:
            moved = min(load.newest_success, turn)
    return due if moved is None else max(due, moved + allowed)


def _find_turn(evidence: Evidence, marker: Marker, attempt: Vmim | None) -> Instant | None:
    """When KubeVirt's limits first allowed an attempt; None if never, or if that is unknown."""
    turns = marker.failures_since_request()
    if attempt is not None:
        target = evidence.find_target(attempt)
        if target is not None and target.created is not None:
            turns.append(target.created)
        elif attempt.phase != "Pending" and attempt.created is not None:
            turns.append(attempt.created)
    return min(turns, default=None)


_IN_TURN = frozenset({State.NO_MIGRATION, State.TARGET_NOT_READY, State.MIGRATING})
"""The states of a VM that does not wait for KubeVirt's limits any more."""
