"""The layout of the output on terminals and in pipes, also with malicious names."""

import fcntl
import os
import re
import struct
import termios
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from exporter.cli.explain import show_vmi
from exporter.cli.layout import Screen, detect_terminal
from exporter.engine.facts.model import Why, WhySource
from exporter.text import escape
from tests.support.builders import (
    NOW,
)
from tests.support.hostile import HOSTILE
from tests.unit.cli.answers import (
    COLORED,
    COLORS,
    NARROW,
    PIPED,
    cooling,
    held,
    status_of,
    stuck,
)
from tests.unit.engine.evacuations.test_diagnosis import an_evacuation
from tests.unit.server.api.test_answers import explained


@pytest.mark.parametrize("screen", [NARROW, COLORED], ids=["plain", "colored"])
def test_nothing_is_wider_than_the_terminal(screen: Screen) -> None:
    """Every line fits into 80 columns, also with long names; only commands are not wrapped."""
    long = {"namespace": "a" * 63, "name": "b" * 253, "node": "n" * 63}
    evidence = stuck(**long, evacuation_node="n" * 63)
    texts = [
        show_vmi(explained(evidence), screen),
        show_vmi(explained(cooling()), screen),
        status_of(evidence, stuck(), blocked=(held("c" * 253, until=NOW + 60.0),), screen=screen),
    ]

    for line in COLORS.sub("", "".join(texts)).splitlines():
        assert cell_len(line) <= 80 or line.startswith(("    echo ", "    kubectl ")), line


def test_a_pipe_gets_a_line_each() -> None:
    """In a pipe nothing is wrapped, coloured or padded."""
    texts = (show_vmi(explained(stuck(name="b" * 253)), PIPED), status_of(stuck()))
    for text in texts:
        assert text.replace("\n", "").isprintable()
        assert not re.search(r" +$", text, re.MULTILINE)
    row, step = (line for line in texts[1].splitlines() if "shop/db1" in line)
    assert row.split() == ["shop/db1", "n1", "2h", "quota", "1"]
    assert step.split(maxsplit=1)[0] == "shop/db1:"


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_a_reason_is_only_text(text: str) -> None:
    """The cluster's messages cannot move the cursor or change colours."""
    why = (Why(WhySource.LIVE_MIGRATABLE, text[:64], text[:1024]),)
    evidence = an_evacuation(vmi={"migratable": False}, age=7200.0)
    for screen in (PIPED, COLORED):
        shown = show_vmi(explained(evidence, why=why), screen)
        shown += status_of(evidence, screen=screen, why=why)
        assert all(c == "\n" or c.isprintable() for c in COLORS.sub("", shown)), shown


@settings(max_examples=30)
@given(
    name=st.text(min_size=1, max_size=40) | st.sampled_from(["[bold]x[/bold]", "[/]", ":smile:"])
)
def test_a_name_is_only_text(name: str) -> None:
    """A name with control characters, markup or emoji codes is shown as plain text."""
    evidence = stuck(namespace="shop", name=name, node=name, evacuation_node=name)
    for screen in (PIPED, COLORED):
        text = show_vmi(explained(evidence), screen) + status_of(evidence, screen=screen)
        assert all(c == "\n" or c.isprintable() for c in COLORS.sub("", text)), text
    assert f"shop/{escape(name)} may" in show_vmi(explained(evidence), PIPED)


TERMINALS = {
    "terminal": ({"TERM": "xterm"}, 100, Screen(100, colored=True)),
    "no-color": ({"TERM": "xterm", "NO_COLOR": "1"}, 100, Screen(100)),
    "unset": ({"TERM": "xterm", "NO_COLOR": ""}, 100, Screen(100, colored=True)),
    "dumb": ({"TERM": "dumb"}, 100, Screen(100)),
    "no-term": ({}, 100, Screen(100)),
    "unknown-width": ({"TERM": "xterm"}, 0, Screen(80, colored=True)),
    "tiny": ({"TERM": "xterm"}, 7, Screen(40, colored=True)),
    "columns": ({"TERM": "xterm", "COLUMNS": "120"}, 100, Screen(120, colored=True)),
    "no-columns": ({"TERM": "xterm", "COLUMNS": "0"}, 100, Screen(100, colored=True)),
    "bad-columns": ({"TERM": "xterm", "COLUMNS": "wide"}, 100, Screen(100, colored=True)),
}


@pytest.mark.parametrize(("environment", "columns", "screen"), TERMINALS.values(), ids=TERMINALS)
def test_a_terminal_is_looked_at(
    environment: Mapping[str, str], columns: int, screen: Screen
) -> None:
    """The width of a terminal, and whether it has colours, are detected."""
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    with os.fdopen(ours, "rb"), os.fdopen(theirs, "w") as terminal:
        assert detect_terminal(terminal, environment) == screen
