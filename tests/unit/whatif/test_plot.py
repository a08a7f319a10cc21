"""The plot of a comparison."""

from pathlib import Path

import pytest

from exporter.whatif.plot import COLORS, draw
from exporter.whatif.recording import CannotReplay
from tests.support.builders import NOW
from tests.unit.whatif.test_comparison import a_comparison
from tests.unit.whatif.test_replay import Tale


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_equal_comparisons_are_equal_files(tmp_path: Path, suffix: str) -> None:
    """Equal comparisons give equal files."""
    files = [tmp_path / f"{name}{suffix}" for name in "ab"]
    for file in files:
        draw(a_comparison(), file)

    assert files[0].read_bytes() == files[1].read_bytes()
    assert files[0].stat().st_size > 10_000


def test_panels_are_labelled(tmp_path: Path) -> None:
    """Each panel has a title, and each policy has a colour."""
    file = tmp_path / "plot.svg"
    draw(a_comparison(), file)
    text = file.read_text()

    assert text.count("<!-- VMs under cooldown -->") == 1
    for color in COLORS[:4]:
        assert color.lower() in text


def test_a_recording_in_which_nothing_moved_can_be_drawn(tmp_path: Path) -> None:
    """A recording without migrations can be drawn."""
    draw(Tale().played(60), tmp_path / "plot.png")

    assert (tmp_path / "plot.png").stat().st_size > 1000


def test_a_year_beyond_the_calendar_is_an_error(tmp_path: Path) -> None:
    """A recording that ends after the last year of the calendar is an error."""
    with pytest.raises(CannotReplay, match=r"9987-.* is too late"):
        draw(Tale().played(253_000_000_000.0 - NOW), tmp_path / "plot.png")


def test_a_missing_directory_is_an_error(tmp_path: Path) -> None:
    """A missing directory is an error with the system's message."""
    with pytest.raises(FileNotFoundError):
        draw(a_comparison(), tmp_path / "nowhere" / "plot.png")
