"""The benchmark's tables, for the terminal, the results file and docs/performance.md."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tests.bench.processes import ROOT
from tests.bench.rows import Row, show_mib, show_micro, show_milli, show_seconds
from tests.support.documents import PERFORMANCE, fill


RESULTS = ROOT / "tests/bench/results.md"
_HEAD = """\
# Results of `make bench`

[docs/performance.md](../../docs/performance.md) explains what is compared, and has the table of \
scale.
"""
_VERDICTS = {True: "met", False: "**missed**", None: "unknown"}


def render(
    rows: Sequence[Row], machine: Mapping[str, str], notes: Sequence[str], *, minutes: float
) -> str:
    """Write the machine, the rows and the remarks as Markdown."""
    lines = [
        (
            f"{machine['cpu']}, {machine['cores']} cores, Linux {machine['kernel']}, Python"
            f" {machine['python']}, Go {machine['go']}, {machine['date']}; load at the end"
            f" {machine['load']}, {minutes:.0f} minutes. Medians, ± half the distance between the"
            " lowest and the highest."
        ),
        "",
        "| what | target | ours | compared with | ratio | |",
        "|---|---|---|---|---|---|",
        *(
            f"| {row.what} | {row.target} | {row.ours} | {row.theirs} | {row.ratio}"
            f" | {_VERDICTS[row.met]} |"
            for row in rows
        ),
        "",
        *(f"- {note}" for note in notes),
    ]
    return "\n".join(lines).rstrip() + "\n"


GROWING: Mapping[str, tuple[str, Callable[[float], str]]] = {
    "start to ready": ("ready", show_seconds),
    "CPU until then": ("cpu", show_seconds),
    "RSS": ("rss_used", show_mib),
    "first scrape": ("first_scrape", show_milli),
    "later ones": ("scrape", show_milli),
    "one verdict": ("verdict", show_micro),
}
"""The columns of the second table: the measured value, and how it is written."""


def describe(raw: Mapping[str, Any]) -> str:
    """Describe how the cost grows with the cluster: a line per size, and the exponents.

    The exponent says how a cost grows from about a tenth of the VMIs to all of them: 1 is linear.
    """
    sizes: Mapping[int, Mapping[str, float]] = raw.get("scale", {})
    lines = [
        f"| VMIs | VMIMs | {' | '.join(GROWING)} |",
        f"|---|---|{'---|' * len(GROWING)}",
    ]
    for vmis, times in sizes.items():
        written = (show(times[name]) for name, show in GROWING.values())
        lines.append(f"| {vmis:,} | {3 * vmis:,} | {' | '.join(written)} |")
    if sizes:
        many = max(sizes)
        before = max(vmis for vmis in sizes if vmis <= many / 10)
        grown = (
            math.log(sizes[many][name] / sizes[before][name]) / math.log(many / before)
            for name, _ in GROWING.values()
        )
        exponents = " | ".join(f"{exponent:.2f}" for exponent in grown)
        lines.append(f"| exponent, {before:,} to {many:,} | | {exponents} |")
    return "\n".join(lines) + "\n"


def write_document(table: str, scale: str) -> None:
    """Write the first table into the results file, and the second into the document."""
    RESULTS.write_text(f"{_HEAD}\n{table}", encoding="utf-8")
    text = PERFORMANCE.read_text(encoding="utf-8")
    PERFORMANCE.write_text(fill(text, {"bench:scale": scale}), encoding="utf-8")
