"""The benchmark's table, as it is printed and as it stands in docs/performance.md."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from tests.bench.processes import ROOT
from tests.bench.rows import Row, show_mib, show_micro, show_milli, show_seconds
from tests.support.documents import PERFORMANCE


RESULTS = ROOT / "tests/bench/results.md"
_VERDICTS = {True: "met", False: "**missed**", None: "not to be said here"}


def render(
    rows: Sequence[Row], machine: Mapping[str, str], notes: Sequence[str], *, minutes: float
) -> str:
    """Markdown: the machine, the rows, the remarks."""
    lines = [
        (
            f"{machine['cpu']}, {machine['cores']} cores, Linux {machine['kernel']}, Python"
            f" {machine['python']}, Go {machine['go']}, {machine['date']}; load at the end"
            f" {machine['load']}, {minutes:.0f} minutes. Medians, ± half the distance between the"
            " lowest and the highest."
        ),
        "",
        "| what | target | ours | beside it | ratio | |",
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


def describe(raw: Mapping[str, Any]) -> str:
    """How cost grows with the cluster: one line per size."""
    sizes: Mapping[int, Mapping[str, float]] = raw.get("scale", {})
    lines = [
        (
            "| VMIs | VMIMs | start to ready | CPU until then | RSS | first scrape | later ones"
            " | one verdict |"
        ),
        "|---|---|---|---|---|---|---|---|",
    ]
    for vmis, one in sizes.items():
        lines.append(
            f"| {vmis:,} | {3 * vmis:,} | {show_seconds(one['ready'])}"
            f" | {show_seconds(one['cpu'])} | {show_mib(one['rss_used'])}"
            f" | {show_milli(one['first_scrape'])} | {show_milli(one['scrape'])}"
            f" | {show_micro(one['verdict'])} |"
        )
    return "\n".join(lines) + "\n"


def write_document(table: str, scale: str) -> None:
    """Put both between their markers in the document, and into the file it is compared with."""
    RESULTS.write_text(f"## Speed\n\n{table}\n## Scale\n\n{scale}", encoding="utf-8")
    text = PERFORMANCE.read_text(encoding="utf-8")
    for name, content in (("speed", table), ("scale", scale)):
        text = fill(text, name, content)
    PERFORMANCE.write_text(text, encoding="utf-8")


def fill(text: str, name: str, content: str) -> str:
    """The text with the content between the two markers of that name."""
    pattern = rf"(<!-- bench:{name} -->\n).*?(<!-- /bench:{name} -->)"
    filled, count = re.subn(
        pattern, lambda found: f"{found[1]}{content}{found[2]}", text, flags=re.DOTALL
    )
    if count != 1:
        raise ValueError(f"expected one pair of markers bench:{name}, found {count}")
    return filled
