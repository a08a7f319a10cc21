"""What the exporter has counted since its start."""

import pytest

from exporter.counters import (
    HELD_VMIS,
    MARKED_VMIS,
    SERIES_KEPT_FOR,
    Counters,
    DenialPeriods,
    Histogram,
    PreventedMoves,
)
from exporter.engine.facts.model import Instant, Outcome
from exporter.engine.facts.policy import Reason
from exporter.engine.verdicts.cooldown import Cooldown, CooldownMark
from tests.support.builders import NOW, a_vmi


@pytest.mark.parametrize(
    ("value", "first"),
    [
        pytest.param(0.0, "1.0", id="below"),
        pytest.param(1.0, "1.0", id="on-a-bound"),
        pytest.param(1.5, "2.0", id="between"),
        pytest.param(9.0, "+Inf", id="above"),
    ],
)
def test_a_value_is_in_every_bucket_whose_bound_it_does_not_exceed(
    value: float, first: str
) -> None:
    """Buckets are cumulative, their bounds are inclusive, and the last bucket has no bound."""
    histogram = Histogram((1, 2))
    histogram.observe(value)
    counted = [le for le, count in histogram.cumulative() if count]

    assert [le for le, _ in histogram.cumulative()] == ["1.0", "2.0", "+Inf"]
    assert counted[0] == first
    assert counted[-1] == "+Inf"
    assert (histogram.count, histogram.total) == (1, value)


def test_an_expected_endpoint_has_a_histogram() -> None:
    """An endpoint has a histogram before its first request."""
    counters = Counters()
    counters.expect_requests("verdicts")
    before = counters.requests["verdicts"].count
    counters.count_request("verdicts", 0.2)
    counters.expect_requests("verdicts")

    assert before == 0
    assert counters.requests["verdicts"].count == 1


def test_blocks_end_a_day_after_their_node_or_namespace_has_gone() -> None:
    """The counts of a node or namespace without VMIs are dropped a day after the last block."""
    counters = Counters()
    for node in ("kept", "gone"):
        counters.count_block(Reason.COOLDOWN, node, "shop", 900.0, now=NOW)
        counters.count_block(Reason.COOLDOWN, node, "web", 900.0, now=NOW)
    left = [("shop", "db1")]
    counters.forget_blocks({"kept"}, left, NOW + SERIES_KEPT_FOR - 1)
    assert len(counters.blocks) == 4

    for days in (1, 2, 3):
        counters.forget_blocks({"kept"}, left, NOW + days * SERIES_KEPT_FOR)
        assert set(counters.blocks) == {(Reason.COOLDOWN, "kept", "shop")}
        assert len(counters.blocked_at) == 1
    counters.count_block(Reason.COOLDOWN, "gone", "shop", 900.0, now=NOW + 3 * SERIES_KEPT_FOR)
    assert counters.blocks[Reason.COOLDOWN, "gone", "shop"] == 1
    assert counters.cooldowns.count == 5


def a_cooldown(released_at: Instant = NOW + 900.0) -> Cooldown:
    """The cooldown after a migration that took a minute."""
    return Cooldown(
        end=NOW,
        duration=60.0,
        migrations_in_window=1,
        base=900.0,
        backed=900.0,
        effective=900.0,
        not_before=released_at,
        released_at=released_at,
        blocks=True,
        moves=False,
    )


def test_prevented_moves_end_a_day_after_their_namespace_has_gone() -> None:
    """The counts of a namespace without VMs are dropped a day after its last block."""
    counters = Counters()
    for namespace in ("shop", "gone"):
        counters.count_block(Reason.COOLDOWN, "n1", namespace, 900.0, now=NOW)
        vmi = a_vmi(namespace=namespace, uid=namespace)
        counters.prevented.count(vmi, a_cooldown(), CooldownMark("m1", NOW))
    left = [("shop", "db1")]
    for late in (-1, 0):
        assert len(counters.prevented.moves) == 2
        counters.forget_blocks({"n1"}, left, NOW + SERIES_KEPT_FOR + late)

    assert counters.prevented.moves == {"shop": 1}
    assert counters.prevented.migration_seconds == {"shop": 60.0}


def test_the_number_of_marked_cooldowns_is_bounded() -> None:
    """The oldest mark is dropped, and those of cooldowns that have ended."""
    prevented = PreventedMoves()
    for number in range(MARKED_VMIS + 1):
        vmi = a_vmi(uid=f"u{number}")
        prevented.count(vmi, a_cooldown(NOW + number), CooldownMark("m1", NOW))
    mark = CooldownMark("m1", NOW)
    prevented.count(a_vmi(uid="u1"), a_cooldown(), mark)
    assert prevented.moves.total() == MARKED_VMIS + 1, "u1 is marked"
    prevented.count(a_vmi(uid="u0"), a_cooldown(), mark)
    assert prevented.moves.total() == MARKED_VMIS + 2, "u0 is not marked any more"
    prevented.forget(NOW + 900.0)
    prevented.count(a_vmi(uid="u900"), a_cooldown(), mark)
    assert prevented.moves.total() == MARKED_VMIS + 3
    prevented.count(a_vmi(uid="u901"), a_cooldown(), mark)
    assert prevented.moves.total() == MARKED_VMIS + 3


def test_the_target_of_a_migration_ends_a_day_after_its_last_one() -> None:
    """The counts of a target node without VMIs are dropped a day after its last migration."""
    counters = Counters()
    for node in ("kept", "gone"):
        counters.count_migration_to(node, "u1", Outcome.FAILED, NOW)
    counters.count_migration_to("gone", "u1", Outcome.SUCCEEDED, NOW - 60)
    counters.forget_targets({"kept"}, NOW + SERIES_KEPT_FOR - 1)
    assert len(counters.migrations_to_node) == 3

    counters.forget_targets({"kept"}, NOW + SERIES_KEPT_FOR)
    assert counters.migrations_to_node == {("kept", Outcome.FAILED): 1}
    assert counters.migrated_at == {"kept": NOW}


def test_vms_that_failed_to_reach_one_node_are_known_for_an_hour() -> None:
    """The VMs that failed to migrate to one node within the last hour, each with this node."""
    counters = Counters()
    for uid, ago in (("u1", 3_000.0), ("u1", 60.0), ("u2", 3_500.0), ("u3", 3_600.0), ("", 60.0)):
        counters.count_migration_to("n1", uid, Outcome.FAILED, NOW - ago)
    counters.count_migration_to("n2", "u1", Outcome.SUCCEEDED, NOW)
    assert counters.list_failed_targets(NOW) == [("u1", "n1"), ("u2", "n1")]
    counters.count_migration_to("n2", "u2", Outcome.FAILED, NOW)
    assert counters.list_failed_targets(NOW) == [("u1", "n1")], "u2 fails on n2, too"
    assert counters.list_failed_targets(NOW + 3_600.0) == []
    assert counters.failed_targets, "to read them changes nothing"
    counters.forget_targets({"n1", "n2"}, NOW + 3_600.0)
    assert counters.failed_targets == {}


class TestDenialPeriods:
    """How long evictions of a VMI have been denied."""

    def test_a_period_begins_with_its_first_denial(self) -> None:
        """Denials within the cooldown extend a period; after a longer pause a new period begins."""
        periods, vmi = DenialPeriods(), a_vmi(node="n1")
        for at in (0, 1000, 2500):
            periods.extend(vmi, Reason.COOLDOWN, 1800.0, NOW + at)
        period = periods.find(vmi, NOW + 2500 + 1800)
        assert period is not None
        assert period.since == NOW

        periods.extend(vmi, Reason.COOLDOWN, 1800.0, NOW + 2500 + 1801)
        period = periods.find(vmi, NOW + 2500 + 1801)
        assert period is not None
        assert period.since == NOW + 2500 + 1801

    def test_a_vmi_that_has_moved_has_a_new_period(self) -> None:
        """A period belongs to one VMI on one node."""
        periods = DenialPeriods()
        periods.extend(a_vmi(node="n1"), Reason.COOLDOWN, 1800.0, NOW)

        assert periods.find(a_vmi(node="n2"), NOW) is None

    def test_the_number_of_periods_is_bounded(self) -> None:
        """The number of periods is bounded; the oldest is dropped."""
        periods = DenialPeriods()
        for number in range(HELD_VMIS + 1):
            periods.extend(a_vmi(uid=f"u{number}"), Reason.COOLDOWN, 900.0, NOW)

        assert len(periods.open(NOW)) == HELD_VMIS
        assert periods.find(a_vmi(uid="u0"), NOW) is None
