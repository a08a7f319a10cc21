"""The queries of the committed dashboards, with their variables filled in."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from tests.support.documents import ROOT


FOLDER = ROOT / "dashboards"
VARIABLE = re.compile(r"\$(?:(?P<plain>[A-Za-z_]\w*)|\{(?P<braced>\w+)(?::\w+)?\})")
"""A Grafana variable, but not the `$1` of `label_replace`."""
EVERYTHING = {
    "cluster": "",
    "job": ".+",
    "namespace": ".*",
    "node": ".+",
    "name": "db1",
    "__rate_interval": "2m",
    "__range": "6h",
}
"""Values of the variables; except `name`, they select everything."""


class Query(NamedTuple):
    """One query of a panel, with its variables filled in."""

    dashboard: str
    panel: str
    ref: str
    expression: str


def load_dashboards() -> dict[str, dict[str, Any]]:
    """The committed dashboards, by file name."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))}


def list_titles(dashboard: Mapping[str, Any]) -> list[str]:
    """The titles of the panels, without those of the sections."""
    return [panel["title"] for panel in dashboard["panels"] if panel["type"] != "row"]


def panels(values: Mapping[str, str], uid: str | None = None) -> Iterator[Query]:
    """The queries of all panels, or of the panels of one dashboard, with their variables filled in.

    Raises KeyError for a variable that has no value.
    """
    for dashboard in load_dashboards().values():
        if uid not in {None, dashboard["uid"]}:
            continue
        for panel in dashboard["panels"]:
            for target in panel.get("targets", ()):
                expression = fill(target["expr"], values)
                yield Query(dashboard["uid"], panel["title"], target["refId"], expression)


def perses_dashboards() -> dict[str, dict[str, Any]]:
    """The committed dashboards for Perses, by file name."""
    paths = sorted((FOLDER / "perses").glob("*.json"))
    return {path.stem: json.loads(path.read_text())["spec"]["config"] for path in paths}


def perses_panels(
    values: Mapping[str, str], uid: str, config: Mapping[str, Any]
) -> Iterator[Query]:
    """The queries of all panels of a Perses dashboard, with their variables filled in."""
    for panel in config["panels"].values():
        for number, query in enumerate(panel["spec"]["queries"], 1):
            expression = fill(query["spec"]["plugin"]["spec"]["query"], values)
            yield Query(uid, panel["spec"]["display"]["name"], f"{number}", expression)


def variables(values: Mapping[str, str]) -> Iterator[Query]:
    """The queries of the variables whose values come from a query."""
    for dashboard in load_dashboards().values():
        for variable in dashboard["templating"]["list"]:
            inner = re.fullmatch(r"query_result\((.*)\)", variable["query"])
            if inner is not None:
                expression = fill(inner[1], values)
                yield Query(dashboard["uid"], f"variable {variable['name']}", "A", expression)


def fill(text: str, values: Mapping[str, str]) -> str:
    """Replace the variables by their values."""
    return VARIABLE.sub(lambda match: values[match["plain"] or match["braced"]], text)


def used_variables(text: str) -> set[str]:
    """The variables that a text uses."""
    return {match["plain"] or match["braced"] for match in VARIABLE.finditer(text)}
