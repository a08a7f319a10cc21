"""docs/architecture.md names the packages of the import contract, and files that exist."""

import re
import tomllib
from pathlib import Path

import pytest

from tests.support.documents import ARCHITECTURE, CONTRIBUTING, ROOT, bare, read, table


def test_the_table_the_contract_and_the_folders_agree() -> None:
    """The rows and the layers are exactly the packages and shared modules."""
    rows = [bare(row[0]) for row in table(ARCHITECTURE, "Packages")]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = {one["id"]: one for one in project["tool"]["importlinter"]["contracts"]}
    layers = [re.split(r" [|:] ", layer) for layer in contracts["packages"]["layers"]]
    there = {path.stem for path in (ROOT / "exporter").glob("*.py")} - {"__init__"}
    there |= {path.parent.name for path in (ROOT / "exporter").glob("*/__init__.py")}

    assert contracts["packages"]["exhaustive"]
    assert set(rows) == there
    assert {name for layer in layers for name in layer} == there
    order = {name: number for number, layer in enumerate(layers) for name in layer}
    assert rows == sorted(rows, key=order.__getitem__), "listed from the top layer down"


@pytest.mark.parametrize("document", [ARCHITECTURE, CONTRIBUTING], ids=lambda path: path.name)
def test_the_files_named_exist(document: Path) -> None:
    """Every file and folder in backticks exists, relative to the root or to any package."""
    named = set(re.findall(r"`([\w./-]+(?:/|\.(?:py|j2|yaml|md|txt|toml)))`", read(document)))
    packages = [path.parent for path in (ROOT / "exporter").rglob("*/__init__.py")]
    places = [ROOT, ROOT / "exporter", *packages]

    assert len(named) > 5
    for name in named:
        assert any((place / name).exists() for place in places), name
