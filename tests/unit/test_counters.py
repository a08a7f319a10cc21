"""What is counted since the start."""

import pytest

from exporter.counters import COOLDOWN_BUCKETS, Counters, Histogram
from exporter.engine.model import Reason


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
    """Buckets are cumulative and their bounds inclusive, the last has none."""
    histogram = Histogram((1, 2))
    histogram.observe(value)
    counted = [le for le, count in histogram.cumulative() if count]

    assert [le for le, _ in histogram.cumulative()] == ["1.0", "2.0", "+Inf"]
    assert counted[0] == first
    assert counted[-1] == "+Inf"
    assert (histogram.count, histogram.total) == (1, value)


def test_the_cooldown_buckets_are_the_plugin_s() -> None:
    """The bounds are those that other people's dashboards query."""
    assert COOLDOWN_BUCKETS == (900, 1800, 3600, 7200, 14400, 21600)


@pytest.mark.parametrize(
    ("reason", "observed"),
    [
        pytest.param(Reason.COOLDOWN, 1, id="cooldown"),
        pytest.param(Reason.MIGRATION_IN_PROGRESS, 0, id="migration-in-progress"),
        pytest.param(Reason.EVACUATION_IN_PROGRESS, 0, id="evacuation-in-progress"),
    ],
)
def test_only_cooldowns_are_observed(reason: Reason, observed: int) -> None:
    """Every block is counted by its labels; the histogram moves for `cooldown` alone."""
    counters = Counters()
    counters.count_block(reason, "n1", "shop", 1800.0)

    assert counters.blocks == {(reason, "n1", "shop"): 1}
    assert counters.cooldowns.count == observed


def test_an_expected_endpoint_has_a_histogram() -> None:
    """An endpoint's histogram is there before its first request and kept by later ones."""
    counters = Counters()
    counters.expect_requests("verdicts")
    before = counters.requests["verdicts"].count
    counters.count_request("verdicts", 0.2)
    counters.expect_requests("verdicts")

    assert before == 0
    assert counters.requests["verdicts"].count == 1
