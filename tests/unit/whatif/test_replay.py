"""The replay counts the evictions that a policy refuses, and what follows from each refusal."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from exporter.engine.evacuations.diagnosis import Cause
from exporter.engine.facts.model import (
    EndReason,
    Fact,
    MigrationState,
    Outcome,
    Pod,
    Priority,
    Resource,
    Trigger,
    Vmi,
    Vmim,
)
from exporter.engine.facts.policy import Override, Policy, Reason
from exporter.engine.facts.states import State
from exporter.whatif.account import (
    BUILTIN,
    MAX_BINS,
    Account,
    Comparison,
    Contender,
    Distribution,
    TimeSeries,
    Touched,
)
from exporter.whatif.recording import Kind, Recorded
from exporter.whatif.stuck_timers import ALERT_FOR
from tests.generate.rules import all_alerts, load_groups
from tests.support.builders import NAME, NAMESPACE, NOW, a_pod, a_vmi, a_vmim
from tests.support.replaying import play


MINUTE = 60.0
HOUR = 3600.0
OURS = BUILTIN["ours"]
NONE = BUILTIN["none"]
RESOURCES: dict[type, Resource] = {Vmi: Resource.VMIS, Vmim: Resource.VMIMS, Pod: Resource.PODS}


class Tale:
    """Builds the events of a recording. Instants are seconds since `NOW`."""

    def __init__(self, *names: str) -> None:
        self.events: list[Recorded] = []
        self.vmis: dict[str, Vmi] = {}
        self.attempts = 0
        for name in names or (NAME,):
            vmi = a_vmi(
                name=name, uid=f"uid-{name}", migratable=True, eviction_strategy="LiveMigrate"
            )
            self.vmis[name] = vmi
            self.tell(0, vmi, Kind.ADDED)
            self.tell(0, a_pod(name=f"pod-{name}", vmi_uid=vmi.uid), Kind.ADDED)
        for resource in RESOURCES.values():
            self.events.append(Recorded(NOW, Kind.SYNCED, resource))

    def tell(self, at: float, fact: Fact, kind: Kind = Kind.MODIFIED) -> None:
        """Add or change an object."""
        self.events.append(Recorded(NOW + at, kind, RESOURCES[type(fact)], fact))

    def change(self, at: float, name: str = NAME, **changes: Any) -> None:
        """Change a VMI."""
        self.vmis[name] = replace(self.vmis[name], **changes)
        self.tell(at, self.vmis[name])

    def mark(self, at: float, name: str = NAME) -> None:
        """Set the VMI's evacuation marker."""
        requested = {"eviction_requested_at": NOW + at, "evicted_by_descheduler": True}
        self.change(at, name, evacuation_node=self.vmis[name].node, **requested)

    def attempt(
        self,
        at: float,
        name: str = NAME,
        *,
        lasts: float = MINUTE,
        fails: bool = False,
        by_hand: bool = False,
        priority: Priority | None = None,
    ) -> None:
        """Add the events of a migration from its VMIM to its end; a success clears the marker."""
        self.attempts += 1
        uid, vmi = f"m{self.attempts}", self.vmis[name]
        vmim = a_vmim(
            name=uid,
            uid=uid,
            vmi_name=name,
            created=NOW + at,
            evacuates="" if by_hand else vmi.node,
            trigger=Trigger.MANUAL if by_hand else Trigger.EVACUATION,
            priority=priority,
        )
        self.tell(at, vmim, Kind.ADDED)
        state = MigrationState(uid=uid)
        self.change(at + 1, name, migration=state)
        state = MigrationState(uid=uid, start=NOW + at + 2)
        self.change(at + 2, name, migration=state)
        outcome = Outcome.FAILED if fails else Outcome.SUCCEEDED
        ended = replace(state, ended=True, end=NOW + at + lasts, outcome=outcome)
        moved: dict[str, Any] = {"evacuation_node": "", "eviction_requested_at": None}
        moved["node"] = "n2" if vmi.node == "n1" else "n1"
        self.change(at + lasts, name, migration=ended, **({} if fails else moved))
        final = replace(
            vmim,
            phase="Failed" if fails else "Succeeded",
            finished=True,
            finished_at=NOW + at + lasts + 1,
            handed_off=True,
            start=state.start,
            end=ended.end,
            outcome=outcome,
        )
        self.tell(at + lasts + 1, final)

    def evict(self, at: float, name: str = NAME, **how: Any) -> None:
        """Mark the VMI for evacuation, and add a migration."""
        self.mark(at, name)
        self.attempt(at + 1, name, **how)

    def delete(self, at: float, resource: Resource, name: str = NAME, uid: str = "") -> None:
        """Delete an object."""
        gone = Recorded(NOW + at, Kind.DELETED, resource, namespace=NAMESPACE, name=name, uid=uid)
        self.events.append(gone)

    def end(self, at: float) -> None:
        """End the recording."""
        self.events.append(Recorded(NOW + at, Kind.ENDED))

    def played(self, end: float, *contenders: Contender) -> Comparison:
        """Replay the events for these contenders; the recording ends at `end`."""
        return play([*self.events, Recorded(NOW + end, Kind.ENDED)], contenders or (OURS,))

    def account(self, end: float, contender: Contender = OURS) -> Account:
        """Replay the events for one contender; the recording ends at `end`."""
        return self.played(end, contender).accounts[0]


@pytest.fixture
def tale() -> Tale:
    """A recording of one VM."""
    return Tale()


class TestEvictions:
    """Which evictions a policy decides about, and what follows from the decision."""

    def test_a_second_within_the_cooldown_is_blocked(self, tale: Tale) -> None:
        """An eviction within the cooldown is blocked, and its migration does not happen."""
        tale.evict(10)
        tale.evict(10 * MINUTE)
        ours, none = tale.played(HOUR, OURS, NONE).accounts

        assert ours.blocked == {Reason.COOLDOWN: 1}
        assert (ours.allowed, ours.migrations.ended) == (1, 1)
        assert (none.allowed, none.migrations.ended) == (2, 2)

    def test_failed_attempts_are_counted_by_reason(self, tale: Tale) -> None:
        """Failed attempts are counted by their recorded reason, else by what the objects show."""
        tale.evict(10)
        tale.evict(10 * MINUTE, fails=True)
        tale.change(20 * MINUTE, evacuation_node="")
        tale.evict(HOUR, fails=True)
        tale.events[-1] = replace(tale.events[-1], reason=EndReason.LIBVIRT)
        tale.change(2 * HOUR, evacuation_node="")
        target = a_pod(
            name="target", vmi_uid=f"uid-{NAME}", migration_uid="late", unschedulable=True
        )
        waiting = a_vmim(name="late", uid="late", created=NOW + 8 * HOUR)
        for fact in (waiting, target):
            tale.tell(8 * HOUR, fact, Kind.ADDED)
        failed = {"phase": "Failed", "finished": True, "outcome": Outcome.FAILED}
        tale.tell(8 * HOUR + MINUTE, replace(waiting, **failed))
        ours, none = tale.played(9 * HOUR, OURS, NONE).accounts

        seen = {EndReason.LIBVIRT: 1, EndReason.UNSCHEDULABLE: 1}
        assert ours.migrations.reasons == seen
        assert none.migrations.reasons == seen | {EndReason.OTHER: 1}

    def test_a_later_reason_replaces_the_first_one(self, tale: Tale) -> None:
        """If the reason of a failed attempt changes, only the last reason is counted and listed."""
        waiting = a_vmim(name="late", uid="late", created=NOW + MINUTE)
        failed = replace(waiting, phase="Failed", finished=True, outcome=Outcome.FAILED)
        tale.tell(MINUTE, waiting, Kind.ADDED)
        tale.tell(2 * MINUTE, failed)
        tale.tell(3 * MINUTE, replace(failed, handed_off=True))
        tale.events[-1] = replace(tale.events[-1], reason=EndReason.LIBVIRT)

        assert dict(tale.account(HOUR).migrations.reasons) == {EndReason.LIBVIRT: 1}

    def test_an_exception_has_its_own_cooldown(self, tale: Tale) -> None:
        """VMs that match an override have its cooldown; their evictions are counted for the
        override.
        """
        own = Policy(migration_cooldown=MINUTE)
        tale.evict(10)
        tale.evict(10 * MINUTE)
        entries = tuple(
            Override(name=name, policy=own, namespaces=(namespace,))
            for name, namespace in (("short", NAMESPACE), ("unused", "elsewhere"))
        )
        account = tale.account(HOUR, Contender(name="own", policy=Policy(overrides=entries)))

        assert (account.allowed, account.cooldown_seconds) == (2, 3 * MINUTE)
        short, unused = account.touched["short"], account.touched["unused"]
        assert (short.vms, short.first_vms) == (1, [f"{NAMESPACE}/{NAME}"])
        assert (short.allowed, short.blocked) == (2, 0)
        assert unused == Touched("unused")

    def test_an_exception_that_blocks_refuses(self, tale: Tale) -> None:
        """An override with `block: true` refuses evictions, but not drains."""
        entry = Override(name="no", policy=Policy(block=True), namespaces=(NAMESPACE,))
        tale.evict(10)
        tale.evict(5 * MINUTE, priority=Priority.SYSTEM_CRITICAL)
        account = tale.account(HOUR, Contender(name="own", policy=Policy(overrides=(entry,))))

        assert (account.blocked[Reason.POLICY], account.others) == (1, 1)
        assert (account.touched["no"].allowed, account.touched["no"].blocked) == (0, 1)
        assert account.migrations.ended == 1

    def test_the_first_list_has_no_evictions(self, tale: Tale) -> None:
        """Evacuations that are in the first list are not counted as evictions."""
        first = tale.events.pop(0)
        assert isinstance(first.fact, Vmi)
        tale.events.insert(0, replace(first, fact=replace(first.fact, evacuation_node="n1")))

        assert tale.account(HOUR).asked == 0

    def test_another_node_is_another_eviction(self, tale: Tale) -> None:
        """Only a marker with a new node is a new eviction; other changes of the VMI are not."""
        tale.mark(10)
        tale.change(15, migratable=False)
        tale.change(20, evacuation_node="n9")

        assert tale.account(HOUR).asked == 2

    def test_a_blocked_evacuation_leaves_no_trace_of_its_failures(self, tale: Tale) -> None:
        """Failed VMIMs of a blocked evacuation are not counted."""
        tale.evict(10)
        tale.mark(5 * MINUTE)
        for minutes in (6, 10, 15, 25):
            tale.attempt(minutes * MINUTE, fails=True)
        ours, none = tale.played(3 * HOUR, OURS, NONE).accounts

        assert (ours.stuck.count, ours.migrations.ended) == (0, 1)
        assert (none.stuck.count, none.migrations.ended) == (1, 5)

    @pytest.mark.parametrize("late", [False, True], ids=["before", "after-its-vmi"])
    def test_a_migration_by_hand_during_a_blocked_evacuation_happens(
        self, tale: Tale, *, late: bool
    ) -> None:
        """A user's migration is counted, no matter if the VMIM or the changed VMI arrives first."""
        tale.evict(10)
        tale.mark(5 * MINUTE)
        tale.attempt(6 * MINUTE, by_hand=True)
        number = max(i for i, event in enumerate(tale.events) if event.kind is Kind.ADDED)
        tale.events.insert(number + 2 * late, tale.events.pop(number))

        assert tale.account(HOUR).migrations.ended == 2

    def test_a_decision_taken_back_hides_nothing(self, tale: Tale) -> None:
        """If a VMIM shows that a blocked eviction was a drain, the evacuation is counted."""
        tale.evict(10)
        tale.mark(5 * MINUTE)
        tale.attempt(6 * MINUTE, fails=True)
        vmim = a_vmim(name="drain", uid="drain", created=NOW + 480, evacuates=tale.vmis[NAME].node)
        vmim = replace(vmim, trigger=Trigger.EVACUATION, priority=Priority.SYSTEM_CRITICAL)
        tale.tell(8 * MINUTE, vmim, Kind.ADDED)
        for number in range(2):
            failed = replace(vmim, name=f"f{number}", uid=f"f{number}", phase="Failed")
            tale.tell(9 * MINUTE + number, replace(failed, finished=True), Kind.ADDED)
        account = tale.account(HOUR)

        assert (account.asked, account.others, account.blocked.total()) == (1, 1, 0)
        assert (account.migrations.ended, account.migrations.failed) == (2, 1)
        assert account.stuck.longest[0].stuck_at == NOW + 9 * MINUTE + 1
        assert account.stuck.longest[0].requested_at == NOW + 5 * MINUTE

    def test_a_migration_that_was_running_is_not_hidden_by_a_refusal(self, tale: Tale) -> None:
        """A migration that ran before a blocked eviction is counted."""
        tale.attempt(10, by_hand=True)
        tale.events = [event for event in tale.events if not isinstance(event.fact, Vmim)]
        marked = next(i for i, event in enumerate(tale.events) if _runs(event.fact)) + 1
        began = tale.events[marked - 1].fact
        assert isinstance(began, Vmi)
        mark = replace(began, evacuation_node="n1")
        tale.events.insert(marked, Recorded(NOW + 30, Kind.MODIFIED, Resource.VMIS, mark))
        account = tale.account(HOUR)

        assert account.blocked == {Reason.MIGRATION_IN_PROGRESS: 1}
        assert account.migrations.ended == 1

    def test_a_migration_after_a_blocked_evacuation_happens(self, tale: Tale) -> None:
        """A migration after a blocked evacuation is counted, even if the recording has no VMIMs."""
        tale.evict(10)
        tale.evict(5 * MINUTE)
        tale.attempt(HOUR, by_hand=True)
        tale.events = [event for event in tale.events if not isinstance(event.fact, Vmim)]
        account = tale.account(2 * HOUR)

        assert (account.blocked.total(), account.migrations.ended) == (1, 2)

    def test_a_drain_is_recognized_if_its_vmim_arrives_first(self, tale: Tale) -> None:
        """A drain is recognized even if its VMIM arrives before the marker."""
        tale.evict(10)
        tale.evict(5 * MINUTE, priority=Priority.SYSTEM_CRITICAL)
        _swap_marker_and_vmim(tale)

        assert tale.account(HOUR).others == 1

    def test_a_vmim_before_a_blocked_marker_is_hidden_again(self, tale: Tale) -> None:
        """A VMIM that arrives before the marker of its eviction does not block that eviction.

        If the eviction is blocked, the migration is not counted.
        """
        tale.evict(10)
        for minutes in (5, 40):
            tale.evict(minutes * MINUTE)
            _swap_marker_and_vmim(tale)
        account = tale.account(HOUR)

        assert account.blocked == {Reason.COOLDOWN: 1}
        assert account.migrations.ended == 2

    def test_the_guards_refuse_what_the_reference_allows(self, tale: Tale) -> None:
        """A VMIM that was pending before an eviction blocks the eviction only with the guard."""
        tale.tell(10, a_vmim(created=NOW + 10, vmi_name=NAME), Kind.ADDED)
        tale.mark(20)
        ours, reference = tale.played(HOUR, OURS, BUILTIN["reference"]).accounts

        assert ours.blocked == {Reason.MIGRATION_IN_PROGRESS: 1}
        assert reference.blocked == {}

    def test_a_recreated_vm_starts_clean(self, tale: Tale) -> None:
        """A recreated VM has no cooldown and no refusal from the deleted VM."""
        tale.evict(10)
        tale.mark(5 * MINUTE)
        tale.delete(6 * MINUTE, Resource.VMIS, uid=tale.vmis[NAME].uid)
        tale.vmis[NAME] = a_vmi(uid="new", created=NOW + 7 * MINUTE, migratable=True)
        tale.tell(7 * MINUTE, tale.vmis[NAME], Kind.ADDED)
        tale.evict(8 * MINUTE)
        comparison = tale.played(HOUR)

        assert (comparison.accounts[0].allowed, comparison.accounts[0].blocked.total()) == (2, 1)
        assert comparison.vms == 2


class TestTime:
    """What is counted over time, with the recording's clock."""

    def test_a_cooldown_is_counted_from_its_beginning_to_its_end(self, tale: Tale) -> None:
        """A cooldown is counted from the end of its migration to the end of the cooldown."""
        tale.evict(10)
        comparison = tale.played(HOUR)

        assert comparison.accounts[0].cooldown_seconds == pytest.approx(900)
        assert comparison.vm_seconds == HOUR
        assert sum(comparison.accounts[0].cooling_over_time.bins) == pytest.approx(900)

    def test_a_cooldown_that_outlasts_the_recording_is_counted_to_its_end(self, tale: Tale) -> None:
        """A cooldown that outlasts the recording is counted to the recording's end."""
        tale.evict(10)

        assert tale.account(71 + 100).cooldown_seconds == pytest.approx(100)

    def test_a_cooldown_goes_on_after_a_failed_hand_off(self, tale: Tale) -> None:
        """A cooldown pauses from the hand-off of the next migration until its VMIM fails."""
        tale.evict(10)
        handed = a_vmim(uid="m9", name="m9", created=NOW + 150, phase="Scheduled", handed_off=True)
        tale.tell(150, handed, Kind.ADDED)
        tale.change(180, migration=MigrationState(uid="m9"))
        tale.tell(240, replace(handed, phase="Failed", finished=True))

        assert tale.account(HOUR).cooldown_seconds == pytest.approx((180 - 71) + (71 + 900 - 240))

    def test_time_begins_when_the_first_list_is_over(self, tale: Tale) -> None:
        """The replay begins after the first list, whose objects have older times."""
        tale.events = [event for event in tale.events if event.kind is not Kind.SYNCED]
        tale.events[0] = replace(tale.events[0], at=NOW - 30 * 24 * HOUR)
        tale.evict(10)
        comparison = tale.played(HOUR)

        assert (comparison.began, comparison.ended) == (NOW + 10, NOW + HOUR)
        assert comparison.vm_seconds == HOUR - 10

    def test_a_late_event_does_not_turn_the_clock_back(self, tale: Tale) -> None:
        """An event with an earlier time does not set the clock back."""
        tale.evict(10)
        tale.tell(-HOUR, a_vmi(name="late", uid="late"), Kind.ADDED)

        assert tale.played(HOUR).vm_seconds == 2 * HOUR - 72

    def test_vms_at_the_cap_are_counted_once(self) -> None:
        """A VM whose cooldown reaches the cap with several migrations is counted once."""
        tale = Tale("busy", "calm")
        for number in range(8):
            tale.attempt(number * 5 * MINUTE + 10, "busy", by_hand=True)

        assert tale.account(HOUR).vms_at_cap == 1

    def test_migrations_per_vm_outlive_their_vms(self) -> None:
        """The migrations of deleted VMs are counted too."""
        tale = Tale("gone", "still")
        for number in range(3):
            tale.attempt(number * 5 * MINUTE + 10, "gone", by_hand=True)
        tale.attempt(10, "still", by_hand=True)
        tale.delete(HOUR, Resource.VMIS, "gone")

        assert tale.account(2 * HOUR).migrations.per_vm == {3: 1, 1: 1}

    def test_vms_that_only_fail_are_counted_apart(self) -> None:
        """A VM whose migrations all failed does not hide how often the others were moved."""
        tale = Tale("broken", "flaky")
        for number in range(4):
            tale.attempt(number * 5 * MINUTE + 10, "broken", by_hand=True, fails=True)
        tale.attempt(10, "flaky", by_hand=True, fails=True)
        tale.attempt(5 * MINUTE, "flaky", by_hand=True)
        migrations = tale.account(HOUR).migrations

        assert (migrations.per_vm, migrations.per_failing_vm) == ({2: 1}, {4: 1})


class TestStuck:
    """Stuck evacuations, and when the alert would have fired."""

    def test_the_clock_alone_makes_it_stuck(self, tale: Tale) -> None:
        """An evacuation is stuck after 30 minutes without any event, and then the alert fires."""
        tale.mark(10)
        (evacuation,) = tale.account(2 * HOUR).stuck.longest

        assert evacuation.requested_at == NOW + 10
        assert evacuation.stuck_at == NOW + 10 + 1800
        assert evacuation.alerted_at == NOW + 10 + 1800 + ALERT_FOR
        assert evacuation.ended_at is None
        assert evacuation.stuck_by == (Cause.AGE,)

    def test_its_state_is_from_when_the_alert_fires(self, tale: Tale) -> None:
        """A stuck evacuation is counted by its state when the alert fires."""
        tale.mark(10)
        vmim = a_vmim(created=NOW + 1900, evacuates="n1", trigger=Trigger.EVACUATION)
        tale.tell(1900, replace(vmim, wait_reason=State.QUOTA), Kind.ADDED)

        assert tale.account(2 * HOUR).stuck.by_state == {State.QUOTA: 1}

    def test_is_stuck_at_the_third_failure(self, tale: Tale) -> None:
        """An evacuation is stuck after `stuck.failedAttempts`, even before `stuck.after`."""
        tale.mark(10)
        for minutes in (1, 4, 7):
            tale.attempt(minutes * MINUTE, fails=True)
        (evacuation,) = tale.account(HOUR).stuck.longest

        assert evacuation.stuck_at == NOW + 8 * MINUTE + 1
        assert evacuation.stuck_by == (Cause.FAILURES,)

    def test_ends_with_the_evacuation(self, tale: Tale) -> None:
        """The time from the alert to the end of the evacuation is counted in minutes."""
        tale.mark(10)
        tale.attempt(90 * MINUTE + 11)
        stuck = tale.account(3 * HOUR).stuck

        assert (stuck.count, stuck.alerted, stuck.open_at_end) == (1, 1, 0)
        assert stuck.minutes_to_alert == {35: 1}
        assert stuck.minutes_alerting == {56: 1}
        assert stuck.longest[0].ended_at == NOW + 90 * MINUTE + 10 + 61

    def test_requested_again_is_another_evacuation(self, tale: Tale) -> None:
        """A later EvictionRequested is another evacuation, and ends the alert of the first one."""
        tale.mark(10)
        tale.mark(90 * MINUTE + 10)
        stuck = tale.account(3 * HOUR).stuck

        assert (stuck.count, stuck.alerted, stuck.open_at_end) == (2, 2, 1)
        assert stuck.minutes_to_alert == {35: 2}
        assert [row.requested_at for row in stuck.longest] == [NOW + 10, NOW + 90 * MINUTE + 10]

    def test_that_ends_before_the_alert_is_not_alerted(self, tale: Tale) -> None:
        """An evacuation that ends within the rule's `for` causes no alert."""
        tale.mark(10)
        tale.change(33 * MINUTE, evacuation_node="", eviction_requested_at=None)
        stuck = tale.account(HOUR).stuck

        assert (stuck.count, stuck.alerted) == (1, 0)
        assert stuck.longest[0].alerted_at is None

    def test_the_longest_are_listed_and_all_are_counted(self) -> None:
        """Only the longest stuck evacuations are listed, but all are counted."""
        names = [f"vm{number:03}" for number in range(150)]
        tale = Tale(*names)
        for number, name in enumerate(names):
            tale.mark(number + 1.0, name)
        stuck = tale.account(2 * HOUR).stuck

        assert stuck.count == 150
        assert [evacuation.name for evacuation in stuck.longest] == names[:100]


class TestSums:
    """Histograms and timelines."""

    @pytest.mark.parametrize(("share", "value"), [(0.0, 1), (0.5, 2), (0.75, 3), (1.0, 9)])
    def test_quantiles(self, share: float, value: int) -> None:
        """A quantile is the first value, in sorted order, at which `share` of all is reached."""
        assert Distribution([9, 1, 2, 3]).quantile(share) == value

    def test_an_empty_histogram_is_zero(self) -> None:
        """The quantiles and the mean of an empty histogram are 0."""
        assert (Distribution().quantile(0.5), Distribution().mean) == (0, 0)

    def test_a_timeline_keeps_its_sums_as_it_gets_longer(self) -> None:
        """A timeline has a bounded number of bins, and its sum stays correct."""
        timeline = TimeSeries(NOW)
        for number in range(5000):
            timeline.add(NOW + number * HOUR, 1)
        timeline.spread(NOW + 10, NOW + 1000 * HOUR)

        assert len(timeline.bins) <= MAX_BINS
        assert sum(timeline.bins) == pytest.approx(5000 + 1000 * HOUR - 10)
        assert timeline.bins[0] == pytest.approx(timeline.width / HOUR + timeline.width - 10, 0.01)


STEPS = ("mark", "cancel", "succeed", "fail", "by hand", "drain", "recreate", "forget")


@given(
    st.lists(
        st.tuples(st.sampled_from(STEPS), st.sampled_from("ab"), st.floats(1, 3000)), max_size=40
    )
)
def test_whatever_happens_the_sums_agree(steps: list[tuple[str, str, float]]) -> None:
    """For any events of two VMs, totals are the sums of their parts; refusals add no migrations."""
    tale, at = Tale("a", "b"), 10.0
    for step, name, pause in steps:
        at += pause
        _take_step(tale, step, name, at)
        at += 70
    accounts = tale.played(at + 10, *BUILTIN.values()).accounts
    reference, _, ours, recommended, _, none = accounts
    real = [
        event
        for event in tale.events
        if isinstance(event.fact, Vmi) and event.fact.migration and event.fact.migration.ended
    ]

    assert none.blocked.total() == 0
    assert none.migrations.ended == len({e.fact.migration.uid for e in real})  # type: ignore[union-attr]
    assert none.asked + none.others == ours.asked + ours.others
    assert reference.others == ours.others == recommended.others == none.others
    for account in (reference, ours, recommended):
        assert account.migrations.ended <= none.migrations.ended
        per_vm = (account.migrations.per_vm, account.migrations.per_failing_vm)
        moves = sum(each * vms for counts in per_vm for each, vms in counts.items())
        assert moves == account.migrations.ended
        assert sum(account.allowed_over_time.bins) == account.allowed
        assert sum(account.blocked_over_time.bins) == account.blocked.total()
        assert sum(account.cooling_over_time.bins) == pytest.approx(account.cooldown_seconds)


def _take_step(tale: Tale, step: str, name: str, at: float) -> None:
    match step:
        case "mark":
            tale.mark(at, name)
        case "cancel":
            tale.change(at, name, evacuation_node="", eviction_requested_at=None)
        case "succeed":
            tale.evict(at, name)
        case "fail":
            tale.evict(at, name, fails=True)
        case "by hand":
            tale.attempt(at, name, by_hand=True)
        case "drain":
            tale.evict(at, name, priority=Priority.SYSTEM_CRITICAL)
        case "recreate":
            tale.delete(at, Resource.VMIS, name)
            tale.vmis[name] = a_vmi(
                name=name, uid=f"{name}-{at}", created=NOW + at, migratable=True
            )
            tale.tell(at, tale.vmis[name], Kind.ADDED)
        case _:
            tale.delete(at, Resource.VMIMS, f"m{tale.attempts}")


def test_no_cooldown_means_none(tale: Tale) -> None:
    """The policy `none` allows an eviction right after a long migration."""
    tale.evict(10, lasts=HOUR)
    tale.evict(HOUR + 15)
    account = tale.account(3 * HOUR, NONE)

    assert (account.allowed, account.cooldown_seconds) == (2, 0)


def test_the_alert_s_delay_is_the_rule_s() -> None:
    """`ALERT_FOR` is the `for` of the alert KubeVirtEvacuationStuck."""
    assert all_alerts(load_groups())["KubeVirtEvacuationStuck"]["for"] == f"{ALERT_FOR / 60:.0f}m"


def test_the_reference_is_the_plugin_s_defaults() -> None:
    """`reference` has the plugin's defaults, and `ours` has the defaults of the exporter."""
    assert BUILTIN["reference"].policy == Policy(
        migration_history_window=48 * HOUR, guard_pending_migrations=False, guard_evacuations=False
    )
    assert BUILTIN["ours"].policy == Policy()
    assert BUILTIN["recommended"].policy == Policy(migration_history_window=48 * HOUR)
    assert BUILTIN["successes"].policy == Policy(
        migration_history_window=48 * HOUR, count_failed_migrations=False
    )


_PLAY = """
import sys
from exporter.whatif.account import BUILTIN
from tests.support.replaying import play
from exporter.cli.replay import peak_mebibytes
from tests.unit.whatif.test_replay import endless
found = play(endless(int(sys.argv[1])), BUILTIN.values())
assert found.events == int(sys.argv[1]), found.events
print(peak_mebibytes())
"""


def endless(events: int, vms: int = 50) -> Iterator[Recorded]:
    """Generate `events` events of the same VMs, which are evicted again and again."""
    tale = Tale(*(f"vm{number}" for number in range(vms)))
    at, taken = 0.0, 0
    while True:
        for event in tale.events:
            yield event
            taken += 1
            if taken == events:
                return
        tale.events.clear()
        for name in tale.vmis:
            at += 5.0
            tale.evict(at, name, lasts=4.0, fails=tale.attempts % 7 == 0)
            if tale.attempts > 5 * vms:
                tale.delete(at, Resource.VMIMS, f"m{tale.attempts - 5 * vms}")
        tale.events.sort(key=lambda event: event.at)


@pytest.mark.parametrize(
    ("few", "many"),
    [
        pytest.param(2_000, 20_000, id="small"),
        pytest.param(
            200_000, 2_000_000, id="soak", marks=[pytest.mark.soak, pytest.mark.timeout(3600)]
        ),
    ],
)
def test_memory_is_that_of_the_vms_and_not_of_the_events(
    few: int, many: int, prove: Callable[[str], None]
) -> None:
    """A replay of ten times as many events of the same VMs needs at most 5 MiB more memory."""
    mebibytes = [_peak_of(events) for events in (few, many)]
    prove(f"replay: {few:,} events in {mebibytes[0]} MiB, {many:,} in {mebibytes[1]} MiB")

    assert mebibytes[1] < mebibytes[0] + 5


def _peak_of(events: int) -> float:
    done = subprocess.run(
        [sys.executable, "-c", _PLAY, str(events)], capture_output=True, text=True, check=True
    )
    return round(float(done.stdout), 1)


def _swap_marker_and_vmim(tale: Tale) -> None:
    """Move the last evacuation's VMIM right before its marker, in the same second."""
    number = max(i for i, event in enumerate(tale.events) if event.kind is Kind.ADDED)
    vmim, marker = tale.events.pop(number), tale.events[number - 1]
    tale.events.insert(number - 1, replace(vmim, at=marker.at))


def _runs(fact: Fact | None) -> bool:
    return isinstance(fact, Vmi) and fact.migration is not None and fact.migration.running
