"""CONTRIBUTING.md's map, the import contract and the files themselves name the same rooms."""

import re
import tomllib
from pathlib import Path


ROOT = Path(__file__).parent.parent


def test_the_map_the_contract_and_the_files_agree() -> None:
    """Every module is on the map and in a layer, and nothing else is."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = text.split("## The map")[1].split("\n\nOne door")[0]
    drawn = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = {one["id"]: one for one in project["tool"]["importlinter"]["contracts"]}
    layers = [layer.split(" | ") for layer in contracts["rooms"]["layers"]]
    there = {path.stem for path in (ROOT / "exporter").glob("*.py")} - {"__init__"}
    there |= {path.parent.name for path in (ROOT / "exporter").glob("*/__init__.py")}

    assert contracts["rooms"]["exhaustive"]
    assert set(drawn) == there
    assert {room for layer in layers for room in layer} == there
    assert [layer for layer in layers if layer[0] in drawn] == layers
    order = {room: number for number, layer in enumerate(layers) for room in layer}
    assert drawn == sorted(drawn, key=order.__getitem__), "drawn in import order"


def test_the_simulated_cluster_may_import_no_room() -> None:
    """The contract that keeps it independent names every room but itself and the entry."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = {one["id"]: one for one in project["tool"]["importlinter"]["contracts"]}
    rooms = {path.stem for path in (ROOT / "exporter").glob("*.py")} - {"__init__", "__main__"}

    assert set(contracts["independent-demo"]["forbidden_modules"]) == {
        f"exporter.{room}" for room in rooms
    }


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
