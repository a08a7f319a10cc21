"""The benchmark compares, and writes its results."""

from pathlib import Path

import pytest

from tests.bench import report
from tests.bench.report import RESULTS
from tests.bench.rows import Row, compare, show_seconds
from tests.support.documents import PERFORMANCE


ROWS = 40
MACHINE = dict.fromkeys(("cpu", "cores", "kernel", "python", "go", "date", "load"), "x")


def test_results_are_written_where_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The document gets the table of scale, and the results file has all rows of the last run."""
    kept, document = tmp_path / "results.md", tmp_path / "performance.md"
    rows = RESULTS.read_text(encoding="utf-8").count("\n| ") - 1
    document.write_text(PERFORMANCE.read_text(encoding="utf-8"), encoding="utf-8")
    monkeypatch.setattr(report, "RESULTS", kept)
    monkeypatch.setattr(report, "PERFORMANCE", document)

    report.write_document("the rows\n", "| the scale |\n")
    head, _, written = kept.read_text(encoding="utf-8").rpartition("\n\n")

    assert rows == ROWS
    assert written == "the rows\n"
    assert RESULTS.read_text(encoding="utf-8").startswith(head)
    assert "\n| the scale |\n<!-- /bench:scale -->" in document.read_text(encoding="utf-8")


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
