"""The Events that are due, and their limits per episode, per VM and for the whole program."""

from collections import Counter
from typing import Any

import pytest
from msgspec.structs import replace

from exporter.engine.evacuations.diagnosis import Diagnosis
from exporter.engine.evacuations.events import (
    BURST,
    MOST_BLOCKED,
    PER_VMI,
    REPEATED_AFTER,
    SLICE,
    Episode,
    EventOutcome,
    EventQueue,
    EventReason,
)
from exporter.engine.facts.evidence import RequestedThrough
from exporter.engine.facts.model import Vmi
from exporter.engine.facts.policy import Reason, Verdict
from exporter.engine.facts.states import State
from exporter.engine.store.node_drains import DrainPart
from exporter.engine.store.requesters import Source
from tests.support.builders import NOW, a_vmi


STUCK, ENDED, BLOCKED = EventReason
WRITTEN, EXISTING, REJECTED, UNREACHABLE, DROPPED = EventOutcome


def a_diagnosis(**overrides: Any) -> Diagnosis:
    """The diagnosis of an evacuation of n1 that is stuck because of its age."""
    fields: dict[str, Any] = {
        "node": "n1",
        "requested_at": NOW - 2000.0,
        "source": Source.UNKNOWN,
        "state": State.TARGET_UNSCHEDULABLE,
        "stuck_by": ("age",),
        "due_at": NOW - 200.0,
        "failed_attempts": 2,
        "backoff": None,
        "part": DrainPart.NONE,
        "given_up": False,
        "withdrawn": (),
        "diverged": False,
        "attempt": None,
        "through": RequestedThrough.EVICTION,
        "tainted": False,
        "missing": (),
        "is_quiet": False,
        "overdue": False,
        "last_seen": None,
    } | overrides
    return Diagnosis(**fields)


def a_hold(**overrides: Any) -> Verdict:
    """A verdict: blocked by a cooldown that ends in two hours."""
    fields: dict[str, Any] = {
        "known": True,
        "reason": Reason.COOLDOWN,
        "not_before": NOW + 7200.0,
        "released_at": NOW + 7200.0,
    } | overrides
    return Verdict(**fields)


RUNNING = a_hold(reason=Reason.MIGRATION_IN_PROGRESS, not_before=None, released_at=None)


def vmis(count: int) -> list[Vmi]:
    """Build `count` VMIs."""
    return [a_vmi(name=f"vm{n}", uid=f"u{n}") for n in range(count)]


class Queue(EventQueue):
    """A queue in which an Event counts as written as soon as it is taken."""

    def __init__(self) -> None:
        self.outcomes: Counter[tuple[EventReason, EventOutcome]] = Counter()
        super().__init__(self.outcomes)

    def find(self, stuck: list[tuple[Vmi, Diagnosis]], now: float) -> None:
        """Report exactly these evacuations as stuck at `now`."""
        for vmi, diagnosis in stuck:
            self.record_stuck(vmi, diagnosis, now)
        self.record_ended({vmi.uid for vmi, _ in stuck}, now)

    def write(self, now: float, outcome: EventOutcome = WRITTEN) -> list[Episode]:
        """Take every Event that is due at `now`, and note its outcome."""
        taken = []
        while (episode := self.take(now)) is not None:
            taken.append(replace(episode))
            self.record_outcome(episode, outcome, now)
        return taken


@pytest.fixture
def queue() -> Queue:
    """An empty queue."""
    return Queue()


def test_a_held_eviction_has_one_event(queue: Queue) -> None:
    """The first blocked eviction has an Event at once; later ones are only counted."""
    for second in range(10):
        queue.record_blocked(a_vmi(), a_hold(), NOW + second)

    (held,) = queue.write(NOW + 10)

    assert (held.reason, held.began, held.last, held.count) == (BLOCKED, NOW, NOW + 9, 10)
    queue.record_blocked(a_vmi(), a_hold(), NOW + 100)
    assert queue.write(NOW + 100) == []
    assert queue.outcomes == {(BLOCKED, WRITTEN): 1}


def test_a_hold_that_goes_on_is_a_series(queue: Queue) -> None:
    """After half an hour the next blocked eviction has an Event with the total count."""
    queue.record_blocked(a_vmi(), a_hold(), NOW)
    queue.write(NOW)
    queue.record_blocked(a_vmi(), a_hold(), NOW + REPEATED_AFTER - 1)
    assert queue.write(NOW + REPEATED_AFTER) == []

    queue.record_blocked(a_vmi(), a_hold(), NOW + REPEATED_AFTER)

    (again,) = queue.write(NOW + REPEATED_AFTER)
    assert (again.began, again.last, again.count) == (NOW, NOW + REPEATED_AFTER, 3)


def test_another_reason_or_another_cooldown_is_another_episode(queue: Queue) -> None:
    """Another reason or another cooldown begins a new series."""
    queue.record_blocked(a_vmi(), RUNNING, NOW)
    queue.write(NOW)
    queue.record_blocked(a_vmi(), a_hold(not_before=NOW + 900), NOW + 60)
    (cooling,) = queue.write(NOW + 60)
    queue.record_blocked(a_vmi(), a_hold(not_before=NOW + 9000), NOW + 900)
    (next_one,) = queue.write(NOW + 900)
    queue.record_blocked(a_vmi(), RUNNING, NOW + 1000)
    queue.write(NOW + 1000)
    queue.record_blocked(a_vmi(), RUNNING, NOW + 1000 + REPEATED_AFTER)
    (late,) = queue.write(NOW + 1000 + REPEATED_AFTER)

    assert [event.count for event in (cooling, next_one, late)] == [1, 1, 1]
    assert late.began == NOW + 1000 + REPEATED_AFTER


def test_a_stuck_evacuation_has_one_event_and_its_end_another(queue: Queue) -> None:
    """A stuck evacuation has an Event when it becomes stuck, every half hour, and at its end."""
    written = []
    for now in range(int(NOW), int(NOW + 2 * REPEATED_AFTER), 15):
        queue.find([(a_vmi(), a_diagnosis())], float(now))
        written += queue.write(float(now))
    queue.find([], NOW + 4000)
    written += queue.write(NOW + 4000)

    assert [(event.reason, event.count, event.last - NOW) for event in written] == [
        (STUCK, 1, 0),
        (STUCK, 2, REPEATED_AFTER),
        (ENDED, 1, 4000),
    ]
    queue.find([], NOW + 8000)
    assert queue.write(NOW + 8000) == []


def test_an_evacuation_that_was_requested_again_is_another_one(queue: Queue) -> None:
    """An evacuation that is requested again has new Events."""
    queue.find([(a_vmi(), a_diagnosis())], NOW)
    queue.write(NOW)
    queue.find([(a_vmi(), a_diagnosis(requested_at=NOW - 3000))], NOW + 60)
    assert queue.write(NOW + 60) == []

    queue.find([(a_vmi(), a_diagnosis(requested_at=NOW + 1))], NOW + 120)

    reasons = [event.reason for n in (2, 3) for event in queue.write(NOW + n * PER_VMI)]
    assert reasons == [STUCK, ENDED]


def test_an_end_without_a_report_is_not_reported(queue: Queue) -> None:
    """If an evacuation ends before its Event was written, the Event is dropped and counted."""
    queue.find([(a_vmi(), a_diagnosis())], NOW)
    queue.find([], NOW + 15)

    assert queue.write(NOW + 15) == []
    assert queue.outcomes == {(STUCK, DROPPED): 1}


def test_of_one_vm_at_most_one_a_minute(queue: Queue) -> None:
    """A VM has at most one Event a minute; other Events about it wait."""
    queue.record_blocked(a_vmi(), a_hold(), NOW)
    queue.find([(a_vmi(), a_diagnosis())], NOW)

    assert [event.reason for event in queue.write(NOW)] == [STUCK]
    assert queue.write(NOW + PER_VMI - 1) == []
    assert [event.reason for event in queue.write(NOW + PER_VMI)] == [BLOCKED]


def test_a_flood_is_written_within_the_bucket(queue: Queue) -> None:
    """Of 10,000 Events at once, 100 are written, then one a second; stuck VMs come first."""
    for vmi in vmis(10_000):
        queue.record_blocked(vmi, a_hold(), NOW)
    first = queue.write(NOW)
    queue.find([(vmi, a_diagnosis()) for vmi in vmis(10_100)[10_000:]], NOW)
    hour = [event for second in range(1, 3601) for event in queue.write(NOW + second)]

    assert len(first) == BURST
    assert len(hour) == 3600
    assert {e.reason for e in hour[:100]} == {STUCK}
    assert len({e.vmi.uid for e in first + hour if e.reason is BLOCKED}) == BURST + 3600 - 100
    list(queue.prune(NOW + 7200))
    assert queue.outcomes[BLOCKED, DROPPED] == 10_000 - BURST - 3600 + 100
    assert queue.write(NOW + 7200) == []


def test_what_is_held_anew_while_others_are_dropped_stays(queue: Queue) -> None:
    """If a VM is blocked again while waiting Events are dropped, its new Event is kept."""
    for vmi in vmis(SLICE + 1):
        queue.record_blocked(vmi, a_hold(), NOW)
    dropping = queue.prune(NOW + 7200)
    next(dropping)
    last = vmis(SLICE + 1)[-1]
    queue.record_blocked(last, a_hold(not_before=NOW + 9000), NOW + 7200)
    list(dropping)

    assert [event.vmi.uid for event in queue.write(NOW + 7200)] == [last.uid]
    assert queue.outcomes[BLOCKED, DROPPED] == SLICE + 1


def test_the_bucket_fills_up_to_its_size(queue: Queue) -> None:
    """After a long pause, at most `BURST` Events are written at once."""
    queue.record_blocked(a_vmi(), a_hold(), NOW)
    queue.write(NOW)
    later = NOW + 7000
    for vmi in vmis(1000):
        queue.record_blocked(vmi, a_hold(), later)

    assert len(queue.write(later)) == BURST


def test_the_vms_that_wait_are_bounded(queue: Queue) -> None:
    """At most 20,000 blocked VMs wait; others are counted as dropped."""
    for vmi in vmis(MOST_BLOCKED + 5):
        queue.record_blocked(vmi, a_hold(), NOW)

    assert queue.outcomes == {(BLOCKED, DROPPED): 5}


def test_what_did_not_arrive_is_tried_again(queue: Queue) -> None:
    """An unwritten Event is tried again a minute later, unless the API server rejected it."""
    queue.record_blocked(a_vmi(), a_hold(), NOW)

    assert len(queue.write(NOW, UNREACHABLE)) == 1
    assert queue.write(NOW + PER_VMI - 1) == []
    assert len(queue.write(NOW + PER_VMI, REJECTED)) == 1
    assert queue.write(NOW + 600) == []
    queue.record_blocked(a_vmi(), a_hold(), NOW + 3000)
    assert len(queue.write(NOW + 3000, EXISTING)) == 1
    assert queue.outcomes == {(BLOCKED, error): 1 for error in (UNREACHABLE, REJECTED, EXISTING)}


@pytest.mark.parametrize("ended", [False, True])
def test_another_replica_takes_over(queue: Queue, *, ended: bool) -> None:
    """A replica that loses the Lease forgets evacuations and ends, but not blocked evictions."""
    queue.find([(a_vmi(), a_diagnosis())], NOW)
    queue.write(NOW)
    queue.record_blocked(a_vmi(), a_hold(), NOW)
    if ended:
        queue.find([], NOW + 15)
    queue.forget_evacuations()
    queue.find([], NOW + 60)

    assert [event.reason for event in queue.write(NOW + 60)] == [BLOCKED]


def test_what_begins_while_an_event_is_being_written_is_due(queue: Queue) -> None:
    """If the reason changes while an Event is being written, the new reason still has its Event."""
    queue.record_blocked(a_vmi(), RUNNING, NOW)
    taken = queue.take(NOW)
    assert taken is not None
    queue.record_blocked(a_vmi(), a_hold(), NOW)
    queue.record_outcome(taken, WRITTEN, NOW)

    assert [event.reason for event in queue.write(NOW + 60)] == [BLOCKED]


def test_a_clock_that_goes_back_stops_nothing(queue: Queue) -> None:
    """If the clock goes back, Events are still written."""
    queue.record_blocked(a_vmi(), a_hold(), NOW)
    queue.write(NOW)
    queue.find([(a_vmi(), a_diagnosis())], NOW - 3600)

    assert [event.reason for event in queue.write(NOW - 3600)] == [STUCK]


def test_two_replicas_identify_an_episode_alike() -> None:
    """Two replicas give the same episode the same Event name."""
    longer = a_hold(released_at=NOW + 9000, not_before=NOW + 9000)

    def identify(verdict: Verdict, asked: float, now: float) -> str:
        queue = Queue()
        queue.record_blocked(a_vmi(), verdict, asked)
        (episode,) = queue.write(asked)
        return episode.identify(now)

    def identify_stuck(since: float, now: float, **fields: Any) -> str:
        queue = Queue()
        queue.find([(a_vmi(), a_diagnosis(**fields))], since)
        (episode,) = queue.write(since)
        return episode.identify(now)

    assert identify(a_hold(), NOW, NOW + 90) == identify(a_hold(), NOW + 30, NOW + 60)
    assert identify_stuck(NOW, NOW + 60) == identify_stuck(NOW + 30, NOW + 90)
    others = [
        identify(a_hold(), NOW, NOW),
        identify(a_hold(), NOW, NOW + REPEATED_AFTER),
        identify(longer, NOW, NOW),
        identify(RUNNING, NOW, NOW),
        identify_stuck(NOW, NOW),
        identify_stuck(NOW, NOW + REPEATED_AFTER),
        identify_stuck(NOW, NOW, node="n2"),
        identify_stuck(NOW, NOW, requested_at=NOW - 1900),
    ]
    assert len(set(others)) == len(others)
