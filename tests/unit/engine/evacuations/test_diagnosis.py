"""The diagnosis of evacuations, with states, stuck evacuations, backoff and divergence."""

from typing import Any

import pytest
from msgspec.structs import replace

from exporter.engine.evacuations.diagnosis import (
    Cause,
    Diagnosis,
    LastSeen,
    Move,
    diagnose,
    diagnose_move,
)
from exporter.engine.evacuations.situation import Backoff, compute_backoff
from exporter.engine.facts.evidence import Evidence, Marker
from exporter.engine.facts.history import Migration
from exporter.engine.facts.model import (
    MigrationLimits,
    MigrationState,
    Outcome,
    Priority,
    Resource,
    Trigger,
    Vmim,
)
from exporter.engine.facts.policy import StuckPolicy
from exporter.engine.facts.states import State
from exporter.engine.facts.trust import Contacts, NamespaceTrust
from exporter.engine.store.load import Load
from exporter.engine.store.requesters import Source
from tests.support.builders import (
    NOW,
    a_history,
    a_migration,
    a_pod,
    a_running_state,
    a_state,
    a_vmi,
    a_vmim,
    some_evidence,
)


STUCK = StuckPolicy()
ROOM = Load(running=1, outbound={"n1": 1}, limits=MigrationLimits())
FULL = Load(running=5, outbound={}, limits=MigrationLimits())
OUTBOUND_FULL = Load(running=2, outbound={"n1": 2}, limits=MigrationLimits())
OTHERS_FULL = Load(running=1, outbound={"n2": 1}, limits=MigrationLimits(5, 1))


def an_evacuation(
    *, age: float = 60.0, marker: dict[str, Any] | None = None, **overrides: Any
) -> Evidence:
    """A migratable VMI on n1 whose evacuation was requested a minute ago and has no attempt."""
    vmi = overrides.pop("vmi", {})
    fields: dict[str, Any] = {"node": "n1", "requested_at": NOW - age} | (marker or {})
    pods = overrides.pop("pods", (a_pod(eviction_in_progress=True),))
    movable = {"evacuation_node": "n1", "eviction_strategy": "LiveMigrate", "migratable": True}
    given: dict[str, Any] = {
        "vmi": a_vmi(**(movable | vmi)),
        "marker": Marker(**fields),
        "pods": pods,
        "launcher": pods[0] if pods else None,
    }
    return some_evidence(**(given | overrides))


def an_attempt(**overrides: Any) -> Vmim:
    """An evacuation VMIM that was created ten seconds ago and is Pending."""
    fields: dict[str, Any] = {
        "name": "kubevirt-evacuation-1",
        "uid": "e1",
        "created": NOW - 10,
        "evacuates": "n1",
        "trigger": Trigger.EVACUATION,
    }
    return a_vmim(**(fields | overrides))


def a_failed_attempt(number: int, ended: float, **overrides: Any) -> Vmim:
    """An evacuation VMIM that failed `ended` seconds ago."""
    fields: dict[str, Any] = {
        "name": f"kubevirt-evacuation-f{number}",
        "uid": f"f{number}",
        "created": NOW - ended - 60,
        "phase": "Failed",
        "finished": True,
        "finished_at": NOW - ended,
    }
    return an_attempt(**(fields | overrides))


def a_target(**overrides: Any) -> Any:
    """The target pod of an attempt, on n2."""
    fields: dict[str, Any] = {
        "name": "virt-launcher-db1-y",
        "uid": "uid-of-target",
        "node": "n2",
        "migration_uid": "e1",
    }
    return a_pod(**(fields | overrides))


VMIMS_UNSEEN = NamespaceTrust(frozenset({Resource.VMIMS}))
PODS_UNSEEN = NamespaceTrust(frozenset({Resource.PODS}))


def diagnosis(
    evidence: Evidence,
    *,
    stuck: StuckPolicy = STUCK,
    load: Load | None = ROOM,
    now: float = NOW,
    dead: Resource | None = None,
    contacts: Contacts | None = None,
) -> Diagnosis:
    """The diagnosis at `now`, which must exist."""
    if dead is not None:
        evidence = replace(evidence, trust=NamespaceTrust(dead=frozenset({dead})))
    diagnosis = diagnose(evidence, stuck, load, now, contacts=contacts or {})
    assert diagnosis is not None
    return diagnosis


def test_no_evacuation() -> None:
    """A VMI without a marker has no diagnosis."""
    assert diagnose(some_evidence(), STUCK, ROOM, NOW) is None


SOURCE = a_pod(eviction_in_progress=True)
THREE_FAILED = {"marker": {"failed": {f"f{n}": NOW - n for n in range(3)}}}
STALE = a_target(migration_uid="older")
STARTS = an_attempt(phase="Scheduling")
PREPARES = an_attempt(phase="PreparingTarget", handed_off=True)
RUNS = an_attempt(phase="Running", handed_off=True)
LASTED_500_S = a_history(m0=a_migration(start=NOW - 9600.0, end=NOW - 9100.0))
HANDED_OFF = a_state(uid="e1", start=None, end=None)


def moving(state: MigrationState, *vmims: Vmim) -> Evidence:
    """An evacuation whose VMI has this `migrationState`."""
    return an_evacuation(vmi={"migration": state}, vmims=vmims)


def tried(*vmims: Vmim, **overrides: Any) -> Evidence:
    """An evacuation with these VMIMs."""
    return an_evacuation(vmims=vmims, **overrides)


def started(*, age: float = 60.0, **target: Any) -> Evidence:
    """An evacuation whose attempt has this target pod."""
    pod = a_target(**({"node": "", "ready": False} | target))
    return tried(STARTS, age=age, pods=(SOURCE, pod))


def finalised(ago: float) -> MigrationState:
    """A migration that began long ago and ended `ago` seconds ago."""
    return a_state(uid="e1", start=NOW - 9000, end=NOW - ago)


CASES = {
    "being-deleted": (
        State.SHUTTING_DOWN,
        an_evacuation(vmi={"deleted_at": NOW, "eviction_strategy": "External"}),
    ),
    "handed-off-long-ago": (
        State.MIGRATION_STALLED,
        tried(an_attempt(phase="TargetReady", scheduled_at=NOW - 1801, handed_off=True)),
    ),
    "handed-off-just-now": (
        State.MIGRATING,
        tried(an_attempt(phase="TargetReady", scheduled_at=NOW - 1800, handed_off=True)),
    ),
    "external": (State.EXTERNAL, an_evacuation(vmi={"eviction_strategy": "External"})),
    "left-already": (State.STALE_MARKER, an_evacuation(vmi={"node": "n2"})),
    "started-long-ago": (State.MIGRATION_STALLED, moving(a_running_state(start=NOW - 7201))),
    "longer-than-kubevirt-lets-it": (
        State.MIGRATION_STALLED,
        moving(a_running_state(start=NOW - 1201, time_limit=1200.0)),
    ),
    "as-long-as-kubevirt-lets-it": (
        State.MIGRATING,
        moving(a_running_state(start=NOW - 1200, time_limit=1200.0)),
    ),
    "slower-than-the-last-one": (
        State.MIGRATING,
        replace(moving(a_running_state(start=NOW - 1500, time_limit=1200.0)), history=LASTED_500_S),
    ),
    "much-slower-than-the-last-one": (
        State.MIGRATION_STALLED,
        replace(moving(a_running_state(start=NOW - 1501, time_limit=1200.0)), history=LASTED_500_S),
    ),
    "may-end-in-post-copy": (
        State.MIGRATING,
        moving(a_running_state(start=NOW - 1201, time_limit=1200.0, mode="PostCopy")),
    ),
    "as-long-as-a-paused-vm-may-take": (
        State.MIGRATING,
        moving(a_running_state(start=NOW - 2400, time_limit=1200.0, mode="Paused")),
    ),
    "longer-than-a-paused-vm-may-take": (
        State.MIGRATION_STALLED,
        moving(a_running_state(start=NOW - 2401, time_limit=1200.0, mode="Paused")),
    ),
    "never-finalised": (State.ENDED_NOT_FINISHED, moving(finalised(301), RUNS)),
    "started-not-too-long-ago": (State.MIGRATING, moving(a_running_state(start=NOW - 7200))),
    "finalised-just-in-time": (State.MIGRATING, moving(finalised(300), RUNS)),
    "waits-after-an-older-migration": (
        State.TARGET_NOT_READY,
        moving(replace(finalised(8000), uid="older"), an_attempt()),
    ),
    "copying": (State.MIGRATING, moving(a_running_state())),
    "handed-off": (State.MIGRATING, moving(HANDED_OFF, PREPARES)),
    "hand-off-never-ended": (
        State.ZOMBIE_STATE,
        moving(replace(HANDED_OFF, uid="f1"), a_failed_attempt(1, 100)),
    ),
    "hand-off-of-nobody": (State.ZOMBIE_STATE, moving(HANDED_OFF)),
    "not-migratable": (State.NOT_MIGRATABLE, an_evacuation(vmi={"migratable": False})),
    "a-stale-pod": (State.MULTIPLE_ACTIVE_PODS, an_evacuation(pods=(SOURCE, STALE))),
    "an-ended-pod-is-not-active": (
        State.NO_MIGRATION,
        an_evacuation(pods=(SOURCE, replace(STALE, phase="Succeeded"))),
    ),
    "waits-for-its-other-half": (
        State.WAITING_FOR_SYNC,
        tried(an_attempt(wait_reason=State.WAITING_FOR_SYNC, phase="Synchronizing")),
    ),
    "quota": (State.QUOTA, tried(an_attempt(wait_reason=State.QUOTA))),
    "backup": (State.BACKUP, tried(an_attempt(wait_reason=State.BACKUP))),
    "utility-volumes": (
        State.UTILITY_VOLUMES,
        tried(an_attempt(wait_reason=State.UTILITY_VOLUMES)),
    ),
    "backoff": (State.BACKOFF, tried(a_failed_attempt(1, 12), an_attempt())),
    "gated": (State.TARGET_GATED, started(gated=True)),
    "unschedulable": (State.TARGET_UNSCHEDULABLE, started(unschedulable=True)),
    "not-ready": (State.TARGET_NOT_READY, started(node="n2")),
    "no-pod-yet": (State.TARGET_NOT_READY, tried(STARTS)),
    "waits-with-room": (State.TARGET_NOT_READY, tried(an_attempt())),
    "nothing-begun": (State.NO_MIGRATION, an_evacuation()),
    "all-ended": (State.NO_MIGRATION, tried(a_failed_attempt(1, 5))),
    "vmims-not-seen": (State.UNKNOWN, an_evacuation(trust=VMIMS_UNSEEN)),
    "hand-off-and-vmims-not-seen": (State.UNKNOWN, replace(moving(HANDED_OFF), trust=VMIMS_UNSEEN)),
    "nothing-begun-and-pods-not-seen": (
        State.UNKNOWN,
        an_evacuation(pods=(), trust=PODS_UNSEEN),
    ),
    "pods-not-seen": (State.UNKNOWN, tried(an_attempt(), pods=(), trust=PODS_UNSEEN)),
}


@pytest.mark.parametrize(("state", "evidence"), CASES.values(), ids=CASES)
def test_state(state: State, evidence: Evidence) -> None:
    """Each situation has exactly one state."""
    assert diagnosis(evidence).state is state


def test_every_state_is_tried() -> None:
    """The table of situations has every state except `CAPACITY`, which has its own test."""
    assert {state for state, _ in CASES.values()} | {State.CAPACITY} == set(State)


@pytest.mark.parametrize(
    ("vmims", "load", "state"),
    [
        pytest.param((), FULL, State.CAPACITY, id="before-1.9-full"),
        pytest.param((), ROOM, State.NO_MIGRATION, id="before-1.9-room"),
        pytest.param((), OTHERS_FULL, State.NO_MIGRATION, id="before-1.9-another-node-is-full"),
        pytest.param((), None, State.NO_MIGRATION, id="before-1.9-not-to-be-seen"),
        pytest.param((an_attempt(),), FULL, State.CAPACITY, id="cluster-limit"),
        pytest.param((an_attempt(),), OUTBOUND_FULL, State.CAPACITY, id="node-limit"),
        pytest.param((an_attempt(),), ROOM, State.TARGET_NOT_READY, id="room"),
        pytest.param((an_attempt(),), None, State.UNKNOWN, id="not-to-be-seen"),
    ],
)
def test_capacity(vmims: tuple[Vmim, ...], load: Load | None, state: State) -> None:
    """A VM waits for capacity only while the known limits are reached.

    Up to KubeVirt 1.8 a VM that waits has no VMIM yet.
    """
    assert diagnosis(an_evacuation(vmims=vmims), load=load).state is state


def test_the_order() -> None:
    """If several states apply, the first in the order is reported."""
    held = an_attempt(wait_reason=State.QUOTA)
    pods = (SOURCE, STALE)
    everything: dict[str, Any] = {"vmims": (a_failed_attempt(1, 5), held), "pods": pods}
    vmi: dict[str, Any] = {"migratable": False, "eviction_strategy": "External", "node": "n2"}
    assert diagnosis(an_evacuation(vmi=vmi, pods=pods)).state is State.EXTERNAL
    assert diagnosis(an_evacuation(vmi=vmi, **everything)).state is State.STALE_MARKER
    vmi["node"] = "n1"
    assert diagnosis(an_evacuation(vmi=vmi, **everything)).state is State.NOT_MIGRATABLE
    vmi["migratable"] = True
    assert diagnosis(an_evacuation(vmi=vmi, **everything)).state is State.MULTIPLE_ACTIVE_PODS
    everything["pods"] = (SOURCE,)
    assert diagnosis(an_evacuation(vmi=vmi, **everything)).state is State.QUOTA


class TestStuck:
    """An evacuation is stuck if it does not migrate within `stuck.after`, or fails too often."""

    @pytest.mark.parametrize(
        ("evidence", "causes"),
        [
            pytest.param(an_evacuation(age=1800), (), id="just-not-old"),
            pytest.param(an_evacuation(age=1801), (Cause.AGE,), id="old"),
            pytest.param(an_evacuation(age=600, **THREE_FAILED), (Cause.FAILURES,), id="failures"),
            pytest.param(
                an_evacuation(age=600, vmi={"migration": a_running_state()}, **THREE_FAILED),
                (Cause.FAILURES,),
                id="failures-and-migrating",
            ),
            pytest.param(
                an_evacuation(age=600, marker={"failed": {"f1": NOW, "f2": NOW, "f3": NOW - 601}}),
                (),
                id="a-failure-from-before-the-request",
            ),
        ],
    )
    def test_causes(self, evidence: Evidence, causes: tuple[Cause, ...]) -> None:
        """The causes of a stuck evacuation are its age and its failures since the request."""
        evacuation = diagnosis(evidence)
        assert evacuation.stuck_by == causes
        assert evacuation.stuck == bool(causes)

    @pytest.mark.parametrize(
        ("age", "made", "stuck"),
        [
            pytest.param(1801, 90, False, id="in-time"),
            pytest.param(4000, 90, True, id="a-new-attempt-does-not-clear-it"),
            pytest.param(4000, 3990, True, id="nor-one-that-waited-for-too-long-by-starting"),
        ],
    )
    def test_old_and_migrating(self, age: float, made: float, *, stuck: bool) -> None:
        """An evacuation that was stuck before its migration began stays stuck."""
        attempt = an_attempt(created=NOW - made, phase="Running")
        vmi = {"migration": a_running_state(start=NOW - 60)}
        assert diagnosis(an_evacuation(age=age, vmi=vmi, vmims=(attempt,))).stuck is stuck

    @pytest.mark.parametrize(
        ("made", "handed_off_at", "stuck"),
        [
            pytest.param(3990, NOW - 3000, False, id="in-time"),
            pytest.param(3990, NOW - 2200, False, id="at-the-last-moment"),
            pytest.param(3990, NOW - 2199, True, id="too-late"),
            pytest.param(2199, None, True, id="made-too-late"),
        ],
    )
    def test_handed_off(self, made: float, handed_off_at: float | None, *, stuck: bool) -> None:
        """An evacuation is not stuck while an attempt copies that was handed off in time."""
        attempt = an_attempt(
            created=NOW - made, scheduled_at=handed_off_at, phase="Running", start=NOW - 2000
        )
        assert diagnosis(an_evacuation(age=4000, vmims=(attempt,))).stuck is stuck

    @pytest.mark.parametrize("phase", ["Scheduled", "PreparingTarget", "TargetReady", "Running"])
    def test_a_hand_off_that_hangs(self, phase: str) -> None:
        """Without a start, a migration is stuck `stuck.after` after its hand-off."""
        for since, stuck in ((1800, False), (1801, True)):
            attempt = an_attempt(phase=phase, created=NOW - 3900, scheduled_at=NOW - since)
            assert diagnosis(an_evacuation(age=2000, vmims=(attempt,))).stuck is stuck

    @pytest.mark.parametrize(("ago", "stuck_by"), [(1800, ()), (1801, (Cause.AGE,))])
    def test_a_vmim_that_is_never_finished(self, ago: float, stuck_by: tuple[Cause, ...]) -> None:
        """A VMIM is stuck if KubeVirt does not finish it within `stuck.after` of its end."""
        assert diagnosis(moving(finalised(ago), RUNS)).stuck_by == stuck_by

    @pytest.mark.parametrize(("since", "stuck"), [(1800, False), (1801, True)])
    def test_a_deletion_that_hangs(self, since: float, *, stuck: bool) -> None:
        """A deletion is stuck `stuck.after` after its grace period; failures do not count."""
        failed = {f"f{number}": NOW - number for number in range(3)}
        vmi = {"deleted_at": NOW - since}
        assert diagnosis(an_evacuation(age=9000, vmi=vmi, marker={"failed": failed})).stuck is stuck

    @pytest.mark.parametrize(
        ("departure", "newest", "stuck"),
        [
            pytest.param(NOW - 1800, NOW - 1800, False, id="out-of-its-node"),
            pytest.param(NOW - 1801, NOW - 60, True, id="out-of-other-nodes-alone"),
            pytest.param(None, NOW - 60, True, id="never-out-of-its-node"),
        ],
    )
    def test_a_queue_of_a_node(
        self, departure: float | None, newest: float, *, stuck: bool
    ) -> None:
        """While VMs leave a node, an evacuation that waits for that node's limit is not stuck."""
        departures = {} if departure is None else {"n1": departure}
        load = replace(OUTBOUND_FULL, departures=departures, newest_success=newest)
        assert diagnosis(an_evacuation(age=9000), load=load).stuck == stuck
        waiting = an_evacuation(age=9000, vmims=(an_attempt(created=NOW - 8990),))
        assert diagnosis(waiting, load=load).stuck == stuck

    @pytest.mark.parametrize(("newest", "stuck"), [(NOW - 1800, False), (NOW - 1801, True)])
    def test_a_queue_of_the_cluster(self, newest: float, *, stuck: bool) -> None:
        """While the cluster's limit is reached, any migration counts as progress of the queue."""
        load = replace(FULL, departures={"n1": NOW - 9000}, newest_success=newest)
        assert diagnosis(an_evacuation(age=9000), load=load).stuck == stuck

    @pytest.mark.parametrize(
        ("seconds", "newest", "stuck"),
        [
            pytest.param(1799, NOW - 2000, True, id="the-queue-had-stopped-for-too-long"),
            pytest.param(1799, NOW - 1800, False, id="the-queue-moved-before-its-turn"),
            pytest.param(1800, NOW, False, id="the-queue-moves-on"),
            pytest.param(1801, NOW, True, id="its-turn-was-too-long-ago"),
        ],
    )
    def test_its_turn(self, seconds: float, newest: float, *, stuck: bool) -> None:
        """After a wait in the queue, the age counts from the VM's turn, not from the request."""
        load = replace(ROOM, newest_success=newest)
        target = a_target(created=NOW - seconds, scheduled=True)
        evacuation = an_evacuation(
            age=9000,
            vmims=(an_attempt(created=NOW - 8990, phase="Scheduling"),),
            pods=(SOURCE, target),
        )
        result = diagnosis(evacuation, load=load)
        assert (result.state, result.stuck) == (State.TARGET_NOT_READY, stuck)

    def test_it_migrates_after_the_queue(self) -> None:
        """A VM whose migration begins as soon as its turn has come is not stuck."""
        evacuation = an_evacuation(
            age=9000,
            vmi={"migration": a_running_state(start=NOW - 50)},
            vmims=(an_attempt(created=NOW - 60, scheduled_at=NOW - 55, phase="Running"),),
        )
        assert not diagnosis(evacuation, load=replace(ROOM, newest_success=NOW - 61)).stuck
        assert diagnosis(evacuation, load=ROOM).stuck

    def test_a_failure_is_a_turn(self) -> None:
        """A failed attempt counts as the VM's turn in the queue."""
        load = replace(ROOM, newest_success=NOW)
        for ended, stuck in ((1800.0, False), (1801.0, True)):
            failed = {"f1": NOW - ended, "f2": NOW - 60}
            evacuation = an_evacuation(age=9000, marker={"failed": failed})
            assert diagnosis(evacuation, load=load).stuck == stuck

    @pytest.mark.parametrize(("seconds", "stuck"), [(120.0, False), (121.0, True)])
    def test_between_two_turns(self, seconds: float, *, stuck: bool) -> None:
        """A short pause between two migrations does not end the queue."""
        moved = NOW - seconds
        load = replace(ROOM, newest_success=moved)
        for vmims in ((), (an_attempt(created=NOW - 8990),)):
            assert diagnosis(an_evacuation(age=9000, vmims=vmims), load=load).stuck == stuck
        left = a_state(uid="e1", start=moved - 9, end=moved, outcome=Outcome.SUCCEEDED)
        gone = diagnosis(an_evacuation(age=9000, vmi={"node": "n2", "migration": left}))
        assert (gone.state, gone.stuck) == (State.STALE_MARKER, stuck)

    @pytest.mark.parametrize(
        ("age", "attempts", "failures", "external", "stuck_by"),
        [
            pytest.param(60, 1, 0, None, (), id="tried-just-now"),
            pytest.param(3600, 1, 0, None, (Cause.AGE,), id="tried-for-long"),
            pytest.param(60, 1, 3, None, (Cause.FAILURES,), id="tried-often"),
            pytest.param(3600, 1, 3, None, (Cause.AGE, Cause.FAILURES), id="tried-long-and-often"),
            pytest.param(4000, 0, 1, None, (Cause.AGE,), id="its-vmim-is-gone"),
            pytest.param(86_400, 0, 0, None, (), id="never-tried"),
            pytest.param(86_400, 0, 0, 86_399.0, (Cause.AGE,), id="never-tried-within-external"),
            pytest.param(86_400, 0, 0, 86_400.0, (), id="never-tried-yet"),
        ],
    )
    def test_external(
        self,
        age: int,
        attempts: int,
        failures: int,
        external: float | None,
        stuck_by: tuple[Cause, ...],
    ) -> None:
        """Once somebody has created a VMIM, an External evacuation becomes stuck like any other.

        Without an attempt it is stuck only after `stuck.external`.
        """
        evidence = an_evacuation(
            age=age,
            vmi={"eviction_strategy": "External"},
            vmims=(an_attempt(trigger=Trigger.MANUAL, evacuates=""),) * attempts,
            marker={"failed": {f"f{n}": NOW - 30.0 for n in range(failures)}},
        )
        result = diagnosis(evidence, stuck=StuckPolicy(external=external))
        assert (result.state is State.EXTERNAL) is (not attempts)
        assert result.stuck_by == stuck_by


class TestSource:
    """The source of an evacuation."""

    @pytest.mark.parametrize(
        ("priorities", "annotated", "source"),
        [
            pytest.param([Priority.SYSTEM_MAINTENANCE], False, Source.DESCHEDULER, id="first"),
            pytest.param([Priority.SYSTEM_CRITICAL], True, Source.OTHER, id="old-annotation"),
            pytest.param(
                [Priority.SYSTEM_CRITICAL, Priority.SYSTEM_MAINTENANCE], False, Source.DESCHEDULER,
                id="newest-decides",
            ),
            pytest.param([None], True, Source.DESCHEDULER, id="annotation"),
            pytest.param([None], False, Source.UNKNOWN, id="neither"),
            pytest.param([], False, Source.UNKNOWN, id="before-1.7"),
        ],
    )  # fmt: skip
    def test_source(
        self,
        priorities: list[Priority | None],
        annotated: bool,
        source: Source,
    ) -> None:
        """The source comes from the newest attempt's priority, else from the annotation."""
        vmims = tuple(
            an_attempt(name=f"e{9 - n}", uid=f"e{n}", created=NOW - 50 + n, priority=priority)
            for n, priority in enumerate(priorities)
        )
        for some in (vmims, vmims[::-1]):
            evidence = an_evacuation(vmi={"evicted_by_descheduler": annotated}, vmims=some)
            assert diagnosis(evidence).source is source

    @pytest.mark.parametrize(
        ("created", "annotated", "source"),
        [
            pytest.param(NOW - 604_800, True, Source.DESCHEDULER, id="a-week-old"),
            pytest.param(NOW - 604_800, False, Source.UNKNOWN, id="a-week-old-and-nothing-else"),
            pytest.param(NOW - 66, True, Source.DESCHEDULER, id="older"),
            pytest.param(NOW - 65, True, Source.OTHER, id="made-before-the-condition"),
            pytest.param(NOW - 60, True, Source.OTHER, id="as-old"),
            pytest.param(None, True, Source.DESCHEDULER, id="of-unknown-age"),
        ],
    )
    def test_an_attempt_of_an_older_request(
        self, created: float | None, annotated: bool, source: Source
    ) -> None:
        """An attempt from before the request does not decide the source."""
        attempt = an_attempt(created=created, priority=Priority.SYSTEM_CRITICAL)
        evidence = an_evacuation(vmi={"evicted_by_descheduler": annotated}, vmims=(attempt,))
        assert diagnosis(evidence).source is source


class TestBackoff:
    """KubeVirt's backoff is 20 s, and doubles with each further failure since the last success."""

    @pytest.mark.parametrize(
        ("failures", "seconds"), [(1, 20), (2, 40), (3, 80), (4, 160), (5, 320)]
    )
    def test_doubles(self, failures: int, seconds: float) -> None:
        """The backoff after n failures is 20 s * 2^(n-1) from the last failure."""
        failed = [a_failed_attempt(n, 10 + 100 * n) for n in range(failures)]
        backoff = compute_backoff((*failed, an_attempt(created=NOW)), 20.0)
        assert backoff == Backoff(seconds=seconds, next_try=NOW - 10 + seconds)

    @pytest.mark.parametrize(
        ("failed", "attempt"),
        [
            pytest.param({}, {"phase": "Scheduling"}, id="not-pending"),
            pytest.param({"trigger": Trigger.MANUAL}, {}, id="users-own-failed"),
            pytest.param({"deleting": True}, {}, id="deleted"),
            pytest.param({"phase": "Succeeded"}, {}, id="succeeded-before"),
            pytest.param({"finished_at": None}, {}, id="unknown-when"),
        ],
    )
    def test_none(self, failed: dict[str, Any], attempt: dict[str, Any]) -> None:
        """There is no backoff without a Pending attempt and a failed evacuation VMIM before it."""
        vmims = (a_failed_attempt(1, 10, **failed), an_attempt(**attempt))
        assert [compute_backoff(some, 20.0) for some in (vmims, vmims[1:], ())] == [None] * 3

    def test_a_success_resets_it(self) -> None:
        """Failures before the last success do not count for the backoff."""
        older = a_failed_attempt(2, 900)
        success = a_failed_attempt(1, 500, phase="Succeeded")
        newer = a_failed_attempt(0, 10)
        backoff = compute_backoff((older, success, newer, an_attempt(created=NOW)), 20.0)
        assert backoff is not None
        assert backoff.seconds == 20

    @pytest.mark.parametrize("ago", [20, 21])
    def test_over(self, ago: float) -> None:
        """A backoff that has ended is not reported any more."""
        evacuation = diagnosis(an_evacuation(vmims=(a_failed_attempt(1, ago), an_attempt())))
        assert (evacuation.backoff, evacuation.state) == (None, State.TARGET_NOT_READY)


class TestContact:
    """Missing objects and old states count only while their watch has contact to the API server."""

    @pytest.mark.parametrize(
        ("evidence", "late", "state"),
        [
            pytest.param(an_evacuation(), Resource.VMIMS, State.UNKNOWN, id="no-vmim"),
            pytest.param(an_evacuation(), Resource.PODS, State.UNKNOWN, id="no-pods"),
            pytest.param(
                an_evacuation(vmims=(an_attempt(),)), Resource.PODS, State.UNKNOWN, id="no-target"
            ),
            pytest.param(moving(HANDED_OFF), Resource.VMIMS, State.MIGRATING, id="just-handed-off"),
        ],
    )
    def test_older_than_the_change(self, evidence: Evidence, late: Resource, state: State) -> None:
        """A missing attempt or pod counts only if its watch had contact after the VMI changed."""
        changed = replace(evidence, changed_at=NOW - 5, handed_off_at=NOW - 5)
        contacts = {Resource.VMIMS: NOW, Resource.PODS: NOW}
        behind = diagnosis(changed, contacts=contacts | {late: NOW - 6})
        caught_up = diagnosis(changed, contacts=contacts | {late: NOW - 5})
        assert behind.state is state
        assert behind.missing == ((late,) if state is State.UNKNOWN else ())
        assert (caught_up.state, caught_up.missing) == (diagnosis(evidence).state, ())

    def test_an_attempt_that_is_there(self) -> None:
        """An attempt that exists counts, even if its watch had no contact after the VMI changed."""
        evidence = an_evacuation(vmims=(an_attempt(wait_reason=State.QUOTA),))
        changed = replace(evidence, changed_at=NOW)
        assert diagnosis(changed, contacts={Resource.VMIMS: NOW - 99}).state is State.QUOTA

    @pytest.mark.parametrize("age", [60.0, 4000.0])
    def test_dead_vmis(self, age: float) -> None:
        """While the VMI watch is dead no evacuation is stuck; `last_seen` has the last state."""
        evidence = an_evacuation(age=age, marker={"failed": {"f1": NOW - 50}})
        dead, contacts = Resource.VMIS, {Resource.VMIS: NOW - 30}
        evacuation = diagnosis(evidence, dead=dead, contacts=contacts)
        assert (evacuation.state, evacuation.stuck) == (State.UNKNOWN, False)
        assert evacuation.missing == (Resource.VMIS,)
        assert evacuation.last_seen == LastSeen(NOW - 30, State.NO_MIGRATION, stuck=age > 1800)
        assert diagnosis(evidence).last_seen is None
        assert diagnosis(evidence, dead=dead).last_seen is None

    def test_a_vmi_that_cannot_be_read_any_more(self) -> None:
        """The state of a VMI that has been invalid for `dead_after` is unknown."""
        evidence = an_evacuation(unreadable=((Resource.VMIS, NOW - 600),))
        assert diagnosis(evidence, now=NOW - 1).state is State.NO_MIGRATION
        assert diagnosis(evidence).state is State.UNKNOWN
        for contacts in ({}, {Resource.VMIS: NOW - 30}):
            last_seen = diagnosis(evidence, contacts=contacts).last_seen
            assert last_seen == LastSeen(NOW - 600, State.NO_MIGRATION, stuck=False)

    def test_a_start_that_its_vmim_contradicts(self) -> None:
        """A started migration is a zombie once its VMIM has been finished for `dead_after`."""
        vmi = {"migration": a_running_state(start=NOW - 9000)}
        final = a_history(m1=Migration(finished_at=NOW - 600))
        evidence = an_evacuation(vmi=vmi, history=final)
        assert diagnosis(evidence, now=NOW - 1).state is State.MIGRATION_STALLED
        assert diagnosis(evidence).state is State.ZOMBIE_STATE

    @pytest.mark.parametrize(("ago", "stuck"), [(60.0, False), (240.0, True)])
    def test_a_departure_by_a_wrong_clock(self, ago: float, *, stuck: bool) -> None:
        """If the VMI's end is from a wrong clock, the VM left the node when its VMIM ended."""
        left = a_state(end=NOW - 7200)
        final = a_history(m1=a_migration(end=left.end, finished_at=NOW - ago))
        gone = an_evacuation(age=9000, vmi={"node": "n2", "migration": left}, history=final)
        assert (diagnosis(gone).state, diagnosis(gone).stuck) == (State.STALE_MARKER, stuck)


class TestDivergence:
    """An evacuation has diverged if the VMI's pod lacks the descheduler's annotation."""

    @pytest.mark.parametrize(
        ("since", "annotated", "diverged"),
        [
            pytest.param(119.0, False, False, id="not-yet"),
            pytest.param(120.0, False, True, id="two-minutes"),
            pytest.param(500.0, True, False, id="annotated"),
            pytest.param(None, False, False, id="since-unknown"),
        ],
    )
    def test_diverged(self, since: float | None, annotated: bool, diverged: bool) -> None:
        """An evacuation has diverged after two minutes without the annotation."""
        marker = {"lacking_since": None if since is None else NOW - since}
        pods = (a_pod(eviction_in_progress=annotated),)
        assert diagnosis(an_evacuation(marker=marker, pods=pods)).diverged is diverged

    def test_pods_that_are_not_known(self) -> None:
        """Without permission for pods, or while their watch is dead, nothing has diverged."""
        marker = {"lacking_since": NOW - 500}
        evidence = an_evacuation(marker=marker, pods=(a_pod(),))
        assert diagnosis(evidence).diverged
        assert not diagnosis(evidence, dead=Resource.PODS).diverged
        assert not diagnosis(an_evacuation(marker=marker, pods=(), trust=PODS_UNSEEN)).diverged


def a_move(*vmims: Vmim, **overrides: Any) -> Evidence:
    """A migratable VMI on n1 that is not being evacuated, with these VMIMs."""
    vmi = a_vmi(node="n1", migratable=True, eviction_strategy="LiveMigrate")
    return some_evidence(**({"vmi": vmi, "vmims": vmims, "pods": (a_pod(),)} | overrides))


def a_failure(number: int, *, ago: float, **overrides: Any) -> Vmim:
    """A manual migration that failed."""
    fields = {"trigger": Trigger.MANUAL, "evacuates": "", "phase": "Failed", "finished": True}
    return an_attempt(
        name=f"m{number}",
        uid=f"m{number}",
        **(fields | {"created": NOW - ago - 9, "finished_at": NOW - ago} | overrides),
    )


class TestMoves:
    """Moves without an evacuation."""

    @staticmethod
    def find(evidence: Evidence) -> Move | None:
        """The move at `NOW`."""
        return diagnose_move(evidence, STUCK, ROOM, NOW)

    def found(self, evidence: Evidence) -> Move:
        """The move at `NOW`, which must exist."""
        move = self.find(evidence)
        assert move is not None
        return move

    def test_an_idle_vmi_has_none(self) -> None:
        """A VMI without VMIMs, or whose newest VMIM succeeded, is not being moved."""
        done = an_attempt(phase="Succeeded", finished=True, created=NOW - 5)
        failures = [a_failure(number, ago=60 + number) for number in range(3)]
        assert self.find(a_move()) is None
        assert self.find(a_move(*failures, done)) is None
        assert self.find(a_move(an_attempt(), vmi=a_vmi(phase="Succeeded"))) is None
        dead = NamespaceTrust(dead=frozenset({Resource.VMIS}))
        assert self.find(a_move(an_attempt(), trust=dead)) is None

    @pytest.mark.parametrize(
        ("overrides", "state"),
        [
            ({"wait_reason": State.QUOTA}, State.QUOTA),
            ({"wait_reason": State.WAITING_FOR_SYNC}, State.WAITING_FOR_SYNC),
            ({"phase": "Running", "start": NOW - 10}, State.MIGRATING),
            ({"phase": "Scheduled", "scheduled_at": NOW - 1801}, State.MIGRATION_STALLED),
        ],
        ids=lambda value: str(value) if isinstance(value, State) else "",
    )
    def test_it_has_the_states_of_an_evacuation(
        self, overrides: dict[str, Any], state: State
    ) -> None:
        """The state of a user's VMIM is that of an attempt to evacuate."""
        vmim = an_attempt(trigger=Trigger.MANUAL, evacuates="", **overrides)
        move = self.found(a_move(vmim))
        assert (move.state, move.trigger) == (state, Trigger.MANUAL)
        assert move.stuck is (state is State.MIGRATION_STALLED)

    @pytest.mark.parametrize(("age", "stuck"), [(7200, False), (7201, True)])
    def test_an_old_vmim_is_stuck(self, age: float, *, stuck: bool) -> None:
        """An unfinished VMIM is stuck after `stuck.migrationTimeout`."""
        vmim = an_attempt(wait_reason=State.QUOTA, created=NOW - age)
        move = self.found(a_move(vmim))
        assert (move.stuck, move.since) == (stuck, NOW - age)

    @pytest.mark.parametrize(
        ("newest", "number", "moved"),
        [
            pytest.param(3600, 3, True, id="within-the-hour"),
            pytest.param(3601, 3, False, id="long-ago"),
            pytest.param(60, 2, False, id="too-few"),
        ],
    )
    def test_failures_in_a_row(self, newest: float, number: int, *, moved: bool) -> None:
        """Without an unfinished VMIM, `stuck.failedAttempts` recent failures are a stuck move."""
        failures = [a_failure(n, ago=newest + 100 * n) for n in range(number)]
        move = self.find(a_move(*failures))
        assert (move is not None and move.stuck) is moved
        if move is not None:
            assert (move.failed_attempts, move.since) == (3, failures[-1].created)

    def test_an_aborted_vmim_is_no_failure(self) -> None:
        """A VMIM that its user deleted neither counts nor ends a row of failures."""
        failures = [a_failure(number, ago=60 + number) for number in range(3)]
        aborted = a_failure(9, ago=10, aborted=True)
        assert self.found(a_move(aborted, *failures)).failed_attempts == 3

    @pytest.mark.parametrize(
        ("ago", "stuck"),
        [
            pytest.param(10 + 3600, True, id="retried-within-the-hour"),
            pytest.param(11 + 3600, False, id="retried-later"),
        ],
    )
    def test_a_new_attempt_after_failures(self, ago: float, *, stuck: bool) -> None:
        """Failures make a new attempt stuck if it was made at most an hour after the newest."""
        failures = [a_failure(number, ago=ago + 100 * number) for number in range(3)]
        attempt = an_attempt(trigger=Trigger.MANUAL, evacuates="", created=NOW - 10)
        move = self.found(a_move(attempt, *failures))
        assert (move.stuck, move.failed_attempts) == (stuck, 3)
