"""CONTRIBUTING.md, the import contract and the folders themselves name the same packages."""

import re
import tomllib
from pathlib import Path


ROOT = Path(__file__).parents[2]


def test_the_table_the_contract_and_the_folders_agree() -> None:
    """Every package and shared module has a row and a layer, and nothing else has."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = text.split("## Packages")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
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


def test_every_dependency_is_explained() -> None:
    """Each direct dependency has a row in CONTRIBUTING.md, and each row a dependency."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = text.split("## Dependencies")[1]
    rows = re.findall(r"^\| (`.+?`(?:, `.+?`)*) \|", section, re.MULTILINE)
    explained = {name for row in rows for name in re.findall(r"`([^`]+)`", row)}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    wanted = {re.split(r"[<>=\[]", one)[0] for one in project["project"]["dependencies"]}
    for group in project["dependency-groups"].values():
        wanted |= {re.split(r"[<>=\[]", one)[0] for one in group if isinstance(one, str)}

    assert explained == wanted


def test_no_file_names_a_registry_or_a_place_of_ours() -> None:
    """The requirements are hashes and names; no URL is in them."""
    for path in (ROOT / "requirements").glob("*.txt"):
        text = path.read_text(encoding="utf-8")
        assert "://" not in text
        assert "--hash=sha256:" in text
