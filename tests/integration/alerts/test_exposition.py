"""promtool's opinion of the metrics."""

import subprocess

import pytest

from exporter.metrics.exposition import Exposition
from exporter.metrics.family import View
from tests.cluster import find_binary
from tests.unit.metrics.test_exposition import a_view, an_empty_view, scraped


def check_metrics(text: str) -> str:
    """The complaints of promtool about an exposition; "" if it has none."""
    done = subprocess.run(
        [find_binary("promtool"), "check", "metrics"],
        input=text,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout + done.stderr + (f"exit {done.returncode}" if done.returncode else "")


@pytest.mark.parametrize("view", [an_empty_view(), a_view()], ids=["at-the-start", "later"])
def test_promtool_finds_nothing(view: View) -> None:
    """Promtool has no complaint about the metrics."""
    assert check_metrics(scraped(Exposition(lambda: view))[0].decode()) == ""


def test_promtool_finds_something() -> None:
    """Promtool complains about a wrong metric name, so no complaint means valid metrics."""
    assert "counter metrics should" in check_metrics("# HELP a b\n# TYPE a counter\na 1\n")
