"""The results that docs/alerts.md shows; `make alert-months MONTHS=--write` renews them."""

from __future__ import annotations

import fcntl
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from tests.months.report import Result, format_table
from tests.months.scenarios import SCENARIOS


RESULTS = Path(__file__).with_name("results.json")
DOCUMENT = Path(__file__).parents[2] / "docs" / "alerts.md"
BEGIN, END = "<!-- alert-months -->\n", "<!-- /alert-months -->\n"


def read_results() -> Mapping[str, Sequence[Result]]:
    """The results of each scenario, one per seed."""
    return msgspec.json.decode(RESULTS.read_bytes(), type=dict[str, list[Result]])


def write_results(name: str, results: Sequence[Result]) -> None:
    """Replace the results of a scenario, also while another process runs another scenario."""
    with RESULTS.open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        known = msgspec.json.decode(file.read(), type=dict[str, list[Result]]) | {name: results}
        ordered = {scenario: known[scenario] for scenario in SCENARIOS if scenario in known}
        file.seek(0)
        file.truncate()
        file.write(msgspec.json.format(msgspec.json.encode(ordered)) + b"\n")
        file.flush()
        DOCUMENT.write_text(render(DOCUMENT.read_text(), ordered))


def render(document: str, results: Mapping[str, Sequence[Result]]) -> str:
    """The document with the tables of these results between its marks."""
    head, _, _ = document.partition(BEGIN)
    _, _, tail = document.partition(END)
    abouts = {name: scenario.about for name, scenario in SCENARIOS.items()}
    table = "\n".join(format_table(abouts, results))
    return f"{head}{BEGIN}\n{table}\n\n{END}{tail}"
