"""CONTRIBUTING.md explains every dependency, and what runs weekly has not rotted."""

import re
import tomllib

from tests.mutants.__main__ import MODULES
from tests.support.documents import CONTRIBUTING, ROOT, chapters


def test_every_dependency_is_explained() -> None:
    """The rows in CONTRIBUTING.md are exactly the direct dependencies."""
    section = chapters(CONTRIBUTING)["Dependencies"]
    rows = re.findall(r"^\| (`.+?`(?:, `.+?`)*) \|", section, re.MULTILINE)
    explained = {name for row in rows for name in re.findall(r"`([^`]+)`", row)}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    wanted = {re.split(r"[<>=\[]", row)[0] for row in project["project"]["dependencies"]}
    for group in project["dependency-groups"].values():
        wanted |= {re.split(r"[<>=\[]", row)[0] for row in group if isinstance(row, str)}

    assert explained == wanted


def test_mutants_are_made_of_modules_that_exist() -> None:
    """`make mutants` runs once a week, so a module that was renamed is found here."""
    assert [module for module in MODULES if not (ROOT / module).is_file()] == []
