"""The dashboards for Perses: its command line accepts them."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.binaries import find_binary
from tests.cluster.perses import write_plugins
from tests.support.dashboards import FOLDER


BOARDS = sorted((FOLDER / "perses").glob("*.json"))


@pytest.fixture(scope="module")
def plugins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The plugin folder of Perses."""
    return write_plugins(tmp_path_factory.mktemp("plugins"))


def lint(config: dict[str, Any], plugins: Path, place: Path) -> subprocess.CompletedProcess[str]:
    """Run `percli lint`, which makes the same checks as the server for a new dashboard."""
    metadata = {"name": "checked", "project": "kubevirt"}
    file = place / "dashboard.json"
    file.write_text(json.dumps({"kind": "Dashboard", "metadata": metadata, "spec": config}))
    return subprocess.run(
        [find_binary("percli"), "lint", "-f", file, "--plugin.path", plugins],
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("path", BOARDS, ids=lambda path: path.stem)
def test_perses_accepts_a_dashboard(path: Path, plugins: Path, tmp_path: Path) -> None:
    """Perses accepts the variables, panels, queries and layouts of each dashboard."""
    done = lint(json.loads(path.read_text())["spec"]["config"], plugins, tmp_path)

    assert "your resources look good" in done.stdout, done.stderr


def test_perses_refuses_an_unknown_unit(plugins: Path, tmp_path: Path) -> None:
    """The check rejects a unit that Perses does not have, so it uses the plugins."""
    config = json.loads(BOARDS[0].read_text())["spec"]["config"]
    panels = (panel["spec"]["plugin"]["spec"] for panel in config["panels"].values())
    next(spec for spec in panels if "format" in spec)["format"] = {"unit": "furlongs"}

    assert "furlongs" in lint(config, plugins, tmp_path).stderr
