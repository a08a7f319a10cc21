"""Text for people."""

import pytest

from exporter.text import escape, write_span


@pytest.mark.parametrize(
    ("seconds", "written"),
    [
        (0.0, "0s"),
        (0.44, "0.4s"),
        (59.0, "59s"),
        (192.0, "3m12s"),
        (192.4, "3m12s"),
        (1280.0, "21m20s"),
        (3600.0, "1h"),
        (5400.0, "1h30m"),
        (90_061.0, "1d1h1m1s"),
        (1e300, "over 100 years"),
    ],
)
def test_a_span_is_as_one_writes_it(seconds: float, written: str) -> None:
    """In days, hours, minutes and seconds, those that are there."""
    assert write_span(seconds) == written


def test_a_rough_span_is_cut_off() -> None:
    """Of two units the second is the next smaller one, or none."""
    assert [write_span(s, units=2) for s in (90_061.0, 86_461.0, 3725.0)] == ["1d1h", "1d", "1h2m"]


def test_what_names_hide_is_shown() -> None:
    """Escapes, bidirectional marks and line ends are written out."""
    assert escape("a\x1b[2J\u202eb\nc\x9b") == r"a\x1b[2J\u202eb\nc\x9b"
    assert escape("größer-名") == "größer-名"
