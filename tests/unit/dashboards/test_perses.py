"""The dashboards for Perses: its command line accepts them, and the pictures show them."""

import json
import re
from pathlib import Path

import pytest

from tests.support.dashboards import FOLDER


IMAGES = FOLDER.parent / "docs" / "images"
BOARDS = sorted((FOLDER / "perses").glob("*.json"))


@pytest.mark.parametrize("path", BOARDS, ids=lambda path: path.stem)
def test_the_picture_is_of_this_dashboard(path: Path) -> None:
    """The documents' picture of a dashboard has its panels, in their order."""
    config = json.loads(path.read_text())["spec"]["config"]
    shown = (IMAGES / f"dashboard-{path.stem.rpartition('-')[2]}.txt").read_text().splitlines()
    titles = [
        config["panels"][item["content"]["$ref"].rpartition("/")[2]]["spec"]["display"]["name"]
        for grid in config["layouts"]
        for item in grid["spec"]["items"]
    ]

    assert [re.sub(r"node-\d+", "$node", title) for title in shown] == titles, (
        "run `make screenshots`"
    )
