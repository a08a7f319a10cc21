"""The benchmark runs, and docs/performance.md has its last results."""

import re

import pytest

from tests.bench.processes import build_tools
from tests.bench.report import RESULTS, describe, render
from tests.bench.rows import PARTS, SMALL, Bench, Row, compare, show_seconds
from tests.support.documents import PERFORMANCE, fill


MACHINE = dict.fromkeys(("cpu", "cores", "kernel", "python", "go", "date", "load"), "x")


def test_every_row_is_measured_at_a_tiny_size() -> None:
    """Every row can be measured, at a size that takes seconds."""
    build_tools()
    said: list[str] = []
    bench = Bench(SMALL, said.append)
    rows = bench.run()

    assert len(rows) == 36
    assert all(row.ours and row.target for row in rows)
    assert set(PARTS) < set(bench.raw)
    assert bench.raw["blocked"]["waiting"]["failed"] == 0
    assert "| 400 | 1,200 |" in describe(bench.raw)
    assert render(rows, MACHINE, bench.notes, minutes=1).count("\n| ") == 1 + len(rows)


def test_the_document_has_the_last_results() -> None:
    """Both tables of the document are those of `tests/bench/results.md`."""
    text, results = PERFORMANCE.read_text(encoding="utf-8"), RESULTS.read_text(encoding="utf-8")
    speed, scale = re.split(r"^## \w+\n\n", results, flags=re.MULTILINE)[1:]

    tables = {"bench:speed": speed.rstrip("\n") + "\n", "bench:scale": scale}
    assert fill(text, tables) == text


@pytest.mark.parametrize(
    ("ours", "theirs", "kind", "met"),
    [
        pytest.param(1.0, 10.0, {"at_least": 10}, True, id="ten-times-faster"),
        pytest.param(1.1, 10.0, {"at_least": 10}, False, id="not-ten-times"),
        pytest.param(2.0, 1.0, {"at_most": 2}, True, id="twice-as-slow"),
        pytest.param(2.1, 1.0, {"at_most": 2}, False, id="slower"),
        pytest.param(9.0, 10.0, {"at_least": 1, "more": True}, False, id="fewer"),
    ],
)
def test_a_verdict_is_of_the_medians(
    ours: float, theirs: float, kind: dict[str, float], *, met: bool
) -> None:
    """Only the medians decide whether a row meets its target, not the extremes."""
    row = compare(
        "x", "y", [ours, ours, 1e9], [theirs, theirs, 0.0], show_seconds,
        at_least=kind.get("at_least"), at_most=kind.get("at_most"), more=bool(kind.get("more")),
    )  # fmt: skip

    assert isinstance(row, Row)
    assert row.met is met
