"""The history of a VMI's migrations: one record per migration, joined in any order."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.engine.facts.history import (
    Ending,
    History,
    Migration,
    complete_failure,
    join,
    settle,
)
from exporter.engine.facts.model import CLOCK_SKEW, EndReason, Outcome, Requester, Trigger
from exporter.engine.verdicts.cooldown import measure_cooldown
from tests.support.builders import (
    KEEP,
    NOW,
    a_history,
    a_migration,
    a_policy,
    a_state,
    a_vmi,
    some_evidence,
)


def migrations() -> st.SearchStrategy[Migration]:
    """A record of a migration. Its times are missing, in the last two days, or a little ahead."""
    instants = st.none() | st.integers(-172_800, 400).map(lambda ago: NOW + ago)
    return st.builds(
        Migration,
        start=instants,
        end=instants,
        finished_at=instants,
        outcome=st.sampled_from(Outcome),
        handed_off=st.booleans(),
        source_node=st.sampled_from(["", "n1", "n2"]),
        target_node=st.sampled_from(["", "n1", "n2"]),
        trigger=st.none() | st.sampled_from(Trigger),
        reason=st.none() | st.sampled_from(EndReason),
        requested_by=st.none()
        | st.builds(Requester, at=st.sampled_from([NOW, NOW - 9]), user=st.sampled_from("ab")),
    )


def recorded(*facts: tuple[str, Migration]) -> History:
    """A history of these records, put in this order."""
    history = History()
    for uid, migration in facts:
        history.put(uid, migration, keep=KEEP)
    return history


FACTS = st.lists(st.tuples(st.sampled_from(["", "m1", "m2", "m3"]), migrations()), max_size=8)


@pytest.mark.parametrize(
    ("field", "loses", "wins"),
    [
        pytest.param("start", 5.0, 3.0, id="earliest-start"),
        pytest.param("start", None, 5.0, id="start-from-one-source"),
        pytest.param("end", 5.0, 8.0, id="latest-end"),
        pytest.param("end", None, 8.0, id="end-from-one-source"),
        pytest.param("finished_at", 4.0, 9.0, id="latest-phase"),
        pytest.param("outcome", Outcome.UNKNOWN, Outcome.SUCCEEDED, id="succeeded-over-unknown"),
        pytest.param("outcome", Outcome.SUCCEEDED, Outcome.FAILED, id="failed-over-succeeded"),
        pytest.param("handed_off", False, True, id="handed-off-by-or"),
        pytest.param("target_node", "", "n2", id="node-from-one-source"),
        pytest.param("trigger", None, Trigger.MANUAL, id="trigger-from-one-source"),
        pytest.param(
            "trigger", Trigger.WORKLOAD_UPDATE, Trigger.HOTPLUG, id="hotplug-over-any-update"
        ),
        pytest.param("reason", EndReason.OTHER, EndReason.LIBVIRT, id="reason-over-none-given"),
        pytest.param("reason", EndReason.NONE, EndReason.OTHER, id="failure-over-success"),
        pytest.param(
            "requested_by", Requester(5.0, "bob"), Requester(3.0, "eve"), id="first-requester"
        ),
    ],
)
def test_records_join_field_by_field(field: str, loses: Any, wins: Any) -> None:
    """Each field of two records joins by its own rule, in either order of the records."""
    loser, winner = Migration(**{field: loses}), Migration(**{field: wins})
    assert join(loser, winner) == join(winner, loser) == winner


@given(first=migrations(), second=migrations(), third=migrations())
def test_join_is_a_join(first: Migration, second: Migration, third: Migration) -> None:
    """Joining is commutative, associative and idempotent."""
    assert join(first, second) == join(second, first)
    assert join(join(first, second), third) == join(first, join(second, third))
    assert join(first, first) == first


@given(facts=FACTS, data=st.data())
def test_order_and_repetition_change_nothing(
    facts: list[tuple[str, Migration]], data: st.DataObject
) -> None:
    """The same facts in any order and repeated give the same records."""
    repeated = data.draw(st.lists(st.sampled_from(facts), max_size=4)) if facts else []
    shuffled = data.draw(st.permutations(facts + repeated))
    assert recorded(*facts).records() == recorded(*shuffled).records()


def test_put_tells_whether_it_was_news() -> None:
    """`put` returns whether the history changed; `revision` grows only if so."""
    history = History()
    assert history.put("m1", a_migration(start=None), keep=KEEP)
    assert not history.put("m1", a_migration(start=None), keep=KEEP)
    assert history.put("m1", a_migration(), keep=KEEP)
    assert not history.put("m1", Migration(), keep=KEEP)
    assert (len(history), history.revision) == (1, 2)


def test_neither_uid_nor_end() -> None:
    """A record with neither UID nor end is not stored."""
    history = History()
    assert history.put("", Migration(start=NOW, handed_off=True), keep=KEEP) is False
    assert len(history) == 0


def test_nameless_endings_are_keyed_by_their_second() -> None:
    """Without UIDs two ends in the same second are one migration."""
    history = recorded(
        ("", a_migration(end=NOW - 60.0)),
        ("", a_migration(end=NOW - 59.5)),
        ("", a_migration(end=NOW - 58.0)),
    )
    assert [ending.end for ending in history.endings(NOW)] == [NOW - 59.5, NOW - 58.0]


@pytest.mark.parametrize("named_handed_off", [True, False], ids=["handed-off", "not-handed-off"])
def test_nameless_ending_yields_to_any_other_record(*, named_handed_off: bool) -> None:
    """A record without UID is ignored if another record has an end in the same second."""
    history = recorded(
        ("", a_migration(end=NOW - 60.0)),
        ("m1", a_migration(end=NOW - 60.0, handed_off=named_handed_off)),
    )
    assert len(history) == 2
    assert len(history.endings(NOW)) == int(named_handed_off)


def test_nameless_ending_yields_to_a_failure_that_is_left_out() -> None:
    """A record without UID is ignored even if the other record is a failure that does not count."""
    history = recorded(
        ("", a_migration(end=NOW - 60.0, outcome=Outcome.UNKNOWN)),
        ("m1", a_migration(end=NOW - 60.0, outcome=Outcome.FAILED)),
    )
    assert history.endings(NOW, count_failed=False) == []
    assert len(history.endings(NOW)) == 1


@pytest.mark.parametrize(
    ("migration", "counts"),
    [
        pytest.param({}, True, id="succeeded"),
        pytest.param({"outcome": Outcome.FAILED}, True, id="failed"),
        pytest.param({"outcome": Outcome.UNKNOWN}, True, id="unknown-outcome"),
        pytest.param({"handed_off": False}, False, id="not-handed-off"),
        pytest.param({"end": None}, False, id="running"),
        pytest.param({"end": None, "finished_at": NOW - 9.0}, True, id="final-phase-alone"),
        pytest.param({"end": NOW + CLOCK_SKEW}, True, id="a-little-ahead"),
        pytest.param({"end": NOW + CLOCK_SKEW + 1}, False, id="far-ahead"),
        pytest.param(
            {"end": NOW + CLOCK_SKEW + 1, "finished_at": NOW - 9.0}, True, id="far-ahead-but-final"
        ),
    ],
)
def test_what_is_an_ending(migration: dict[str, Any], *, counts: bool) -> None:
    """An ending is a migration that was handed off and has a usable end."""
    assert bool(a_history(m1=a_migration(**migration)).endings(NOW)) is counts


def test_endings_are_sorted() -> None:
    """Endings are sorted; one whose end is a little ahead of the clock has ended."""
    history = a_history(
        m1=a_migration(end=NOW + 20.0),
        m2=a_migration(end=NOW - 90.0),
        m3=a_migration(end=NOW - 30.0),
    )
    assert [ending.end for ending in history.endings(NOW)] == [NOW - 90.0, NOW - 30.0, NOW + 20.0]


@pytest.mark.parametrize(
    ("start", "duration"),
    [
        pytest.param(NOW - 100.0, 40.0, id="known"),
        pytest.param(None, 0.0, id="unknown-start"),
        pytest.param(NOW - 10.0, 0.0, id="end-before-start"),
    ],
)
def test_duration(start: float | None, duration: float) -> None:
    """A duration is end minus start, or 0 if the start is unknown or later."""
    assert Ending(end=NOW - 60.0, start=start).duration == duration


@pytest.mark.parametrize(
    ("end", "settled"),
    [
        pytest.param(None, None, id="none"),
        pytest.param(NOW - 1.0, NOW - 1.0, id="past"),
        pytest.param(NOW, NOW, id="now"),
        pytest.param(NOW + 1.0, NOW, id="a-little-ahead"),
        pytest.param(NOW + 300.0, NOW, id="five-minutes-ahead"),
        pytest.param(NOW + 300.001, None, id="further-ahead"),
    ],
)
def test_settle(end: float | None, settled: float | None) -> None:
    """An end up to five minutes ahead of the clock counts as now; a later end does not count."""
    assert settle(end, NOW) == settled


@given(facts=st.lists(st.tuples(st.integers(0, 60), migrations()), max_size=40))
def test_the_newest_endings_are_kept(facts: list[tuple[int, Migration]]) -> None:
    """The newest `keep` endings are stored, whether failures are counted or left out."""
    keep = 4
    bounded, whole = History(), History()
    for number, migration in facts:
        bounded.put(f"m{number}-{len(whole)}", migration, keep=keep)
        whole.put(f"m{number}-{len(whole)}", migration, keep=1_000)
    assert len(bounded) <= 3 * keep
    for count_failed in (True, False):
        ends = [
            sorted(
                (known.end, known.outcome)
                for known in history.endings(NOW, count_failed=count_failed)
            )
            for history in (bounded, whole)
        ]
        handed_off_only = all(migration.handed_off for _, migration in facts)
        if handed_off_only:
            assert ends[0][-keep:] == ends[1][-keep:]


def test_failures_push_out_no_success() -> None:
    """Many failures do not push a success that the policy needs out of the history."""
    history = History()
    history.put("won", a_migration(end=NOW - 9_000.0), keep=2)
    for number in range(9):
        failure = a_migration(end=NOW - 100.0 + number, outcome=Outcome.FAILED)
        history.put(f"lost-{number}", failure, keep=2)
    assert [ending.end for ending in history.endings(NOW, count_failed=False)] == [NOW - 9_000.0]
    assert [ending.end for ending in history.endings(NOW)][-2:] == [NOW - 93.0, NOW - 92.0]


@pytest.mark.parametrize(
    ("uid", "end", "outcome"),
    [
        pytest.param("m1", None, Outcome.FAILED, id="by-uid"),
        pytest.param("", NOW - 60.0, Outcome.SUCCEEDED, id="by-end"),
        pytest.param("m9", NOW - 60.0, Outcome.UNKNOWN, id="no-such-uid"),
        pytest.param("", None, Outcome.UNKNOWN, id="neither"),
    ],
)
def test_outcome(uid: str, end: float | None, outcome: Outcome) -> None:
    """A record is found by its UID or, without a UID, by its end."""
    history = recorded(
        ("m1", a_migration(outcome=Outcome.FAILED)),
        ("m1", a_migration(outcome=Outcome.UNKNOWN)),
        ("", a_migration(end=NOW - 60.0)),
    )
    assert history.find(uid, end).outcome is outcome


@pytest.mark.parametrize(
    ("end", "finished_at", "known"),
    [
        pytest.param(NOW - 60.0, None, NOW - 60.0, id="no-transition"),
        pytest.param(None, NOW - 60.0, NOW - 60.0, id="no-end"),
        pytest.param(NOW - 60.0, NOW - 60.0 + CLOCK_SKEW, NOW - 60.0, id="as-far-as-clocks-differ"),
        pytest.param(NOW - 60.0, NOW - 59.0 + CLOCK_SKEW, NOW - 59.0 + CLOCK_SKEW, id="behind"),
        pytest.param(NOW + 7_200.0, NOW - 60.0, NOW - 60.0, id="ahead"),
    ],
)
def test_an_end_by_a_wrong_clock_is_replaced(
    end: float | None, finished_at: float | None, known: float
) -> None:
    """An end more than five minutes from its VMIM's final transition is replaced by that time."""
    history = recorded(("m1", a_migration(end=end)), ("m1", Migration(finished_at=finished_at)))
    assert history.newest_success() == known
    assert list(history.known_ends()) == [known]
    assert [ending.end for ending in history.endings(NOW + CLOCK_SKEW)] == [known]
    assert history.last_duration() == (None if end is None else end - (NOW - 660.0))
    evidence = some_evidence(vmi=a_vmi(migration=a_state(end=end)), history=history)
    cooldown = measure_cooldown(evidence, a_policy(), NOW + CLOCK_SKEW)
    assert (cooldown and cooldown.end) == (None if end is None else known)


@pytest.mark.parametrize(
    ("source_ahead", "target_ahead", "virt_controller_away", "took"),
    [
        pytest.param(0.0, 0.0, 0.0, 40.0, id="right"),
        pytest.param(-2700.0, -2700.0, 0.0, 40.0, id="both-slow"),
        pytest.param(7200.0, 7200.0, 0.0, 40.0, id="both-fast"),
        pytest.param(0.0, 0.0, 7200.0, 40.0, id="virt-controller-away"),
        pytest.param(-2700.0, 0.0, 0.0, 50.0, id="source-slow"),
        pytest.param(0.0, 2700.0, 0.0, 50.0, id="target-fast"),
        pytest.param(2700.0, 0.0, 0.0, 0.0, id="source-fast"),
        pytest.param(0.0, -2700.0, 0.0, 0.0, id="target-slow"),
    ],
)
def test_a_duration_is_of_one_clock(
    source_ahead: float, target_ahead: float, virt_controller_away: float, took: float
) -> None:
    """A copy of 40 s takes no longer because a clock is wrong or its end was noted late.

    With one wrong clock of two, it took at most as long as the control plane saw.
    """
    begun = NOW - 9000.0
    migration = Migration(
        start=begun + source_ahead,
        end=begun + 40.0 + target_ahead,
        scheduled_at=begun - 8.0,
        finished_at=begun + 42.0 + virt_controller_away,
        outcome=Outcome.SUCCEEDED,
        handed_off=True,
    )
    history = recorded(("m1", migration))
    (ending,) = history.endings(NOW)
    assert (history.last_duration(), ending.duration) == (took, took)


@pytest.mark.parametrize(
    ("failure", "start", "end", "source_lost", "reason"),
    [
        (EndReason.OTHER, NOW - 9.0, NOW, False, EndReason.OTHER),
        (EndReason.OTHER, NOW, NOW, False, EndReason.TARGET_LOST),
        (EndReason.OTHER, None, None, False, EndReason.OTHER),
        (EndReason.OTHER, NOW, NOW, True, EndReason.SOURCE_LOST),
        (EndReason.LIBVIRT, NOW, NOW, True, EndReason.LIBVIRT),
    ],
)
def test_why_a_migration_failed(
    failure: EndReason,
    start: float | None,
    end: float | None,
    source_lost: bool,
    reason: EndReason,
) -> None:
    """If KubeVirt gives no reason, a VM that has stopped does, or an end that equals the start."""
    assert complete_failure(failure, start, end, source_lost=source_lost) is reason


def test_reads_never_change_it() -> None:
    """Changing the returned records or endings does not change the history."""
    history = a_history(m1=a_migration())
    history.records().clear()
    history.endings(NOW).clear()
    assert list(history.records()) == ["m1"]
    assert len(history.endings(NOW)) == 1


def test_newest_success() -> None:
    """`newest_success` is the latest end of a success, or else the time of its final phase."""
    history = a_history(
        m1=a_migration(end=NOW - 90.0),
        m2=a_migration(end=None, finished_at=NOW - 60.0),
        m3=a_migration(end=NOW - 30.0, outcome=Outcome.FAILED),
        m4=a_migration(end=NOW - 20.0, outcome=Outcome.UNKNOWN),
        m5=a_migration(end=None),
    )
    assert len([*history.known_ends()]) == 4
    assert history.newest_success() == NOW - 60.0
    assert a_history(m5=a_migration(end=None)).newest_success() is None


def test_a_duration_is_measured_to_the_end_as_written() -> None:
    """An end a little ahead of our clock counts as now, but the duration uses the written end."""
    (ending,) = a_history(m1=a_migration(start=NOW - 60.0, end=NOW + 20.0)).endings(NOW)
    assert (ending.end, ending.duration) == (NOW + 20.0, 80.0)


def test_what_nobody_told_is_not_handed_off() -> None:
    """A migration with an end but without a hand-off does not count."""
    assert recorded(("m1", Migration(end=NOW - 60.0))).endings(NOW) == []


def test_a_record_as_old_as_the_bound_is_kept() -> None:
    """Exactly `keep` records are stored of each kind: failed, ended in another way, not ended."""
    history = History()
    for kind, migration in (
        ("lost", a_migration(end=NOW - 60.0, outcome=Outcome.FAILED)),
        ("won", a_migration(end=None, finished_at=NOW - 60.0)),
        ("open", a_migration(end=None)),
    ):
        for number in range(3):
            history.put(f"{kind}-{number}", migration, keep=2)
    assert sorted(history.records()) == ["lost-1", "lost-2", "open-1", "open-2", "won-1", "won-2"]
