"""The project's documents, and readers for their chapters, tables, code blocks and anchors."""

import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path


ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
API = ROOT / "docs" / "api.md"
ARCHITECTURE = ROOT / "docs" / "architecture.md"
CONTRIBUTING = ROOT / "CONTRIBUTING.md"
DEPLOY = ROOT / "deploy" / "README.md"
HOLD_EVICTIONS = ROOT / "docs" / "hold-evictions.md"
INSTALL = ROOT / "docs" / "install.md"
OPERATE = ROOT / "docs" / "operate.md"
PERFORMANCE = ROOT / "docs" / "performance.md"
REFERENCE = ROOT / "docs" / "reference.md"
SECURITY = ROOT / "SECURITY.md"
CLAIMS = ROOT / "tests" / "integration" / "deploy" / "claims.md"
VERSIONS = ROOT / "docs" / "versions.md"
MATRIX_RESULTS = ROOT / "tests" / "matrix" / "results.md"
GATE_RESULTS = ROOT / "tests" / "integration" / "descheduling" / "results.md"
WHAT_IF = ROOT / "docs" / "what-if.md"

DOCUMENTS = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "deploy/**/*.md", "exporter/**/*.md", "tests/**/*.md")
    for path in ROOT.glob(pattern)
)


def read(document: Path) -> str:
    """The text of a document."""
    return document.read_text(encoding="utf-8")


def chapters(document: Path) -> dict[str, str]:
    """The text below each `##` heading, by heading."""
    parts = re.split(r"^## (.*)\n", read(document), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def table(document: Path, heading: str) -> list[list[str]]:
    """The cells of the first table below a heading, without the header row."""
    rows = tables(document, heading)
    assert rows, f"{document.name} has no table below ## {heading}"
    return rows[0]


def tables(document: Path, heading: str) -> list[list[list[str]]]:
    """The cells of each table below a heading, without the header row."""
    matches = re.findall(
        r"^\|.*\n\|[-:|]+\|\n((?:\|.*\n)*)", chapters(document)[heading], re.MULTILINE
    )
    return [
        [[cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]] for row in rows.splitlines()]
        for rows in matches
    ]


def bare(cell: str) -> str:
    """The text of a cell that is one word in backticks."""
    match = re.fullmatch(r"`([^`]+)`", cell)
    assert match is not None, f"{cell!r} is not one word in backticks"
    return match[1]


def code_blocks(text: str, language: str) -> list[str]:
    """The code blocks of one language, without the indentation of a list."""
    blocks = re.findall(rf"^ *```{language}\n(.*?)^ *```$", text, re.DOTALL | re.MULTILINE)
    return [textwrap.dedent(block) for block in blocks]


def anchors(document: Path) -> set[str]:
    """The anchors that GitHub gives the headings."""
    prose = re.sub(r"^ *```.*?^ *```$", "", read(document), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def ways_to_install() -> dict[str, list[str]]:
    """The lines that install the exporter, by way: docs/install.md has a row for each way."""
    heading = "In at most five lines"
    by_helm, by_kustomize, stop = code_blocks(chapters(INSTALL)[heading], "bash")
    ways: dict[str, list[str]] = {}
    for way, _, value, folder in table(INSTALL, heading):
        first = stop.splitlines() if way == "Sidecar" else []
        applied = by_kustomize.replace("deploy/base", bare(folder)).splitlines()
        if way == "Plain metrics":
            applied = [line for line in applied if "cert-manager" not in line]
        installed = by_helm.replace("mode=metrics", bare(value)).splitlines()
        ways |= {f"{way}, by Helm": first + installed, f"{way}, by kustomize": first + applied}
    return ways


def fill(text: str, contents: Mapping[str, str]) -> str:
    """Put each content into a document, between the two comments with its name."""
    for name, content in contents.items():
        head, opened, rest = text.partition(f"<!-- {name} -->\n")
        _, closed, tail = rest.partition(f"<!-- /{name} -->\n")
        if not closed:
            raise ValueError(f"no pair of markers {name}")
        text = head + opened + content + closed + tail
    return text


def build_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [f"| {' | '.join(line)} |" for line in (head, *rows)]
    lines.insert(1, "|---" * len(head) + "|")
    return "".join(f"{line}\n" for line in lines)
