"""The benchmark runs."""

from tests.bench.processes import build_tools
from tests.bench.report import describe, render
from tests.bench.rows import PARTS, SMALL, Bench
from tests.bench.test_bench import MACHINE, ROWS


def test_every_row_is_measured_at_a_tiny_size() -> None:
    """Every row can be measured, at a size that takes seconds."""
    build_tools()
    lines: list[str] = []
    bench = Bench(SMALL, lines.append)
    rows = bench.run()

    assert len(rows) == ROWS
    assert all(row.ours and row.target for row in rows)
    assert set(PARTS) < set(bench.raw)
    assert bench.raw["blocked"]["waiting"]["failed"] == 0
    assert "| 400 | 1,200 |" in describe(bench.raw)
    assert render(rows, MACHINE, bench.notes, minutes=1).count("\n| ") == 1 + len(rows)
