"""Durations, instants and names as text."""

from datetime import datetime

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.text import (
    escape,
    to_datetime,
    to_release,
    write_count,
    write_instant,
    write_optional_release,
    write_span,
)


@pytest.mark.parametrize(
    ("count", "written"), [(0, "0 VMs"), (1, "1 VM"), (2, "2 VMs"), (20_000, "20,000 VMs")]
)
def test_a_count_has_the_plural_of_its_noun(count: int, written: str) -> None:
    """Only 1 has the singular; a large number has separators."""
    assert write_count(count, "VM") == written


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
def test_a_span_is_written_in_its_units(seconds: float, written: str) -> None:
    """A span is written in days, hours, minutes and seconds, without units that are zero."""
    assert write_span(seconds) == written


def test_a_span_in_two_units_is_cut_off() -> None:
    """A span in two units has the largest unit, and the next smaller unit if it is not zero."""
    assert [write_span(s, units=2) for s in (90_061.0, 86_461.0, 3725.0)] == ["1d1h", "1d", "1h2m"]


@pytest.mark.parametrize(
    ("instant", "written"),
    [
        pytest.param(1_800_000_000.0, "2027-01-15T08:00:00Z", id="whole-second"),
        pytest.param(1_800_000_000.25, "2027-01-15T08:00:00.250000Z", id="fraction"),
        pytest.param(1_799_999_999.9999999, "2027-01-15T08:00:00Z", id="rounded-up"),
        pytest.param(-5.0, "1969-12-31T23:59:55Z", id="before-1970"),
        pytest.param(1e18, "9999-12-31T23:59:59Z", id="after-the-last-year"),
    ],
)
def test_an_instant_is_rfc_3339_in_utc(instant: float, written: str) -> None:
    """Microseconds are left out if they are zero; after 9999 the last second of 9999 is written."""
    assert write_instant(instant) == written
    assert msgspec.json.encode(to_datetime(instant)) == f'"{written}"'.encode()


@given(st.floats(0.0, 4e9))
def test_a_release_is_never_too_early(instant: float) -> None:
    """Rounding never makes the time of a release earlier."""
    release = to_release(instant)

    assert instant <= release.timestamp() <= instant + 2e-6
    assert datetime.fromisoformat(write_optional_release(instant) or "") == release


def test_the_last_release_is_the_last_second() -> None:
    """The latest release that can be written is the last second of the year 9999."""
    assert write_optional_release(1e18) == "9999-12-31T23:59:59Z"


def test_invisible_characters_are_escaped() -> None:
    """Control characters, direction marks and line ends are escaped; letters are not."""
    assert escape("a\x1b[2J\u202eb\nc\x9b") == r"a\x1b[2J\u202eb\nc\x9b"
    assert escape("größer-名") == "größer-名"
