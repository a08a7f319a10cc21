"""docs/architecture.md names the packages of the import contract, and code that exists."""

import ast
import re
import tomllib
from functools import cache
from pathlib import Path
from pkgutil import resolve_name

import pytest

from tests.support.documents import ARCHITECTURE, CONTRIBUTING, ROOT, bare, read, table


def test_the_table_the_contract_and_the_folders_agree() -> None:
    """The rows and the layers are exactly the packages and shared modules."""
    rows = [bare(row[0]) for row in table(ARCHITECTURE, "Packages")]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = {row["id"]: row for row in project["tool"]["importlinter"]["contracts"]}
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


PACKAGE = ROOT / "exporter"


def names_in(module: Path) -> set[str]:
    """The identifiers and the strings of a module; its comments and docstrings do not count."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(read(module))):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.keyword(arg=str(name)):
                names.add(name)
            case ast.arg(arg=name) | ast.alias(name=name) | ast.Constant(value=str(name)):
                names.add(name)
            case _:
                pass
    return names


@cache
def read_modules() -> dict[str, set[str]]:
    """The names in each module of the package except the demo, which has no part of it."""
    return {
        path.relative_to(PACKAGE).as_posix(): names_in(path)
        for path in PACKAGE.rglob("*.py")
        if path.relative_to(PACKAGE).parts[0] != "demo"
    }


@pytest.mark.parametrize("row", table(ARCHITECTURE, "How to add"), ids=lambda row: row[0])
def test_the_files_to_change(row: list[str]) -> None:
    """The modules listed are all that name the example, and the other files name it too."""
    example = bare(row[1])
    field = re.sub(r"(?<=[a-z])([A-Z])", r"_\1", example).lower()
    forms = {example, field, field.upper()}
    listed = set(re.findall(r"`([\w/.]+\.\w+)`", row[2]))

    modules = read_modules()

    assert listed & set(modules) == {path for path, names in modules.items() if names & forms}
    for path in listed - set(modules):
        assert example in read(ROOT / path), path


@pytest.mark.parametrize(
    "row", table(ARCHITECTURE, "Where the contract lives"), ids=lambda row: row[0]
)
def test_the_functions_of_the_contract_exist(row: list[str]) -> None:
    """Each function named is a public name of the package, at the place where it is defined."""
    functions = re.findall(r"`([\w.]+)`", row[1])

    assert functions
    for function in functions:
        value = resolve_name(f"exporter.{function}")
        module = getattr(value, "__module__", "")
        assert not module or f"exporter.{function}".startswith(module), function
        assert not any(part.startswith("_") for part in function.split("."))
