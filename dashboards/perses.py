"""The dashboards of Grafana as objects of Perses: `PersesDashboard`, perses.dev/v1alpha2.

They have the same panels, queries and texts. They are for one cluster: Perses cannot choose "no
value" for a label, so the matcher of `cluster` is left out. Some kinds of panels (bars, heatmaps,
timelines) need Perses plugins that not every installation has. They are numbers and lines here.
Links to other dashboards are left out, because their address depends on the installation.
"""

import re
from collections.abc import Iterator
from typing import Any


Object = dict[str, Any]

UNITS: dict[str, Object] = {
    "s": {"unit": "seconds"},
    "dtdurations": {"unit": "seconds"},
    "percentunit": {"unit": "percent-decimal"},
    "reqps": {"unit": "requests/sec"},
}
"""The unit of Perses for each unit of Grafana. All other units become decimal numbers."""
COLOURS = {
    "green": "#73bf69",
    "yellow": "#fade2a",
    "orange": "#ff9830",
    "red": "#f2495c",
    "blue": "#5794f2",
}
"""Perses accepts colours only as such numbers, and not by name."""
_CLUSTER = re.compile(r'cluster=~"\$cluster"(?:, )?')
_GROUPED = re.compile(r"by \(([^)]*)\)")
_LABEL_VALUES = re.compile(r"label_values\((\w+)\{?.*, (\w+)\)")
_QUERY_RESULT = re.compile(r"query_result\((.*)\)")


def convert(board: Object) -> Object:
    """Convert the JSON of one of our Grafana dashboards to an object of Perses's operator."""
    panels = [panel for panel in board["panels"] if panel["type"] != "row"]
    return {
        "apiVersion": "perses.dev/v1alpha2",
        "kind": "PersesDashboard",
        "metadata": {"name": board["uid"]},
        "spec": {
            "config": {
                "display": {"name": board["title"], "description": board["description"]},
                "duration": board["time"]["from"].removeprefix("now-"),
                "refreshInterval": board["refresh"],
                "variables": [
                    _variable(variable)
                    for variable in board["templating"]["list"]
                    if variable["name"] not in {"datasource", "cluster"}
                ],
                "panels": {f"panel-{panel['id']}": _panel(panel) for panel in panels},
                "layouts": list(_layouts(board["panels"])),
            }
        },
    }


def _variable(variable: Object) -> Object:
    """A variable whose values are those of a label, in a metric or in the result of a query."""
    values = _LABEL_VALUES.fullmatch(variable["query"])
    if values is not None:
        metric, label = values.groups()
        kind, spec = "PrometheusLabelValuesVariable", {"labelName": label, "matchers": [metric]}
    else:
        (query,) = _QUERY_RESULT.findall(variable["query"])
        kind = "PrometheusPromQLVariable"
        spec = {"expr": _CLUSTER.sub("", query), "labelName": variable["name"]}
    several = variable.get("multi", False)
    return {
        "kind": "ListVariable",
        "spec": {
            "name": variable["name"],
            "display": {"name": variable["label"], "description": variable["description"]},
            "allowMultiple": several,
            "allowAllValue": several,
            **({"customAllValue": variable["allValue"]} if "allValue" in variable else {}),
            **({"defaultValue": ["$__all"]} if several else {}),
            "sort": "alphabetical-asc",
            "plugin": {"kind": kind, "spec": spec},
        },
    }


def _panel(panel: Object) -> Object:
    kinds = {"stat": _stat, "bargauge": _stat, "table": _table}
    queries = [_query(target, panel) for target in panel["targets"]]
    return {
        "kind": "Panel",
        "spec": {
            "display": {"name": panel["title"], "description": panel["description"]},
            "plugin": kinds.get(panel["type"], _lines)(panel),
            "queries": queries,
        },
    }


def _query(target: Object, panel: Object) -> Object:
    spec = {"query": _CLUSTER.sub("", target["expr"])}
    if target.get("legendFormat"):
        spec["seriesNameFormat"] = target["legendFormat"]
    if "interval" in panel:
        spec["minStep"] = panel["interval"]
    plugin = {"kind": "PrometheusTimeSeriesQuery", "spec": spec}
    return {"kind": "TimeSeriesQuery", "spec": {"plugin": plugin}}


def _stat(panel: Object) -> Object:
    defaults = panel["fieldConfig"]["defaults"]
    spec: Object = {
        "calculation": "last-number",
        "format": _format(defaults["unit"]),
        "thresholds": _thresholds(defaults["thresholds"]),
    }
    if defaults.get("mappings"):
        spec["mappings"] = [
            {"kind": "Value", "spec": {"value": value, "result": _shown(result)}}
            for value, result in _answers(defaults["mappings"])
        ]
    return {"kind": "StatChart", "spec": spec}


def _lines(panel: Object) -> Object:
    defaults = panel["fieldConfig"]["defaults"]
    axis = {"format": _format(defaults["unit"])}
    axis |= {bound: defaults[bound] for bound in ("min", "max") if bound in defaults}
    spec: Object = {"legend": {"position": "bottom", "mode": "list"}, "yAxis": axis}
    if defaults.get("custom", {}).get("stacking"):
        spec["visual"] = {"display": "bar", "stack": "all"}
    if len(defaults.get("thresholds", {}).get("steps", ())) > 1:
        spec["thresholds"] = _thresholds(defaults["thresholds"])
    return {"kind": "TimeSeriesChart", "spec": spec}


def _table(panel: Object) -> Object:
    """One row per value of the labels that all queries have, as in Grafana."""
    _, organize = panel["transformations"]
    several = len(panel["targets"]) > 1
    labels = [_GROUPED.findall(target["expr"])[0].split(", ") for target in panel["targets"]]
    shared = [label for label in labels[0] if all(label in one for one in labels)]
    overrides = {
        override["matcher"]["options"]: {one["id"]: one["value"] for one in override["properties"]}
        for override in panel["fieldConfig"]["overrides"]
    }
    sort = panel["options"]["sortBy"][0]["displayName"]
    columns: list[Object] = []
    for field, title in organize["options"]["renameByName"].items():
        column: Object = {"name": _column(field, several), "header": title}
        properties = overrides.get(title, {})
        if "unit" in properties:
            column["format"] = _format(properties["unit"])
        if properties.get("mappings"):
            column["cellSettings"] = [
                {"condition": {"kind": "Value", "spec": {"value": value}}, **_cell(result)}
                for value, result in _answers(properties["mappings"])
            ]
        for link in properties.get("links", ()):
            if link["url"].startswith("https:"):
                url = link["url"].replace("${__value.text}", f'${{__data.fields["{field}"]}}')
                column["dataLink"] = {"url": url, "title": link["title"], "openNewTab": True}
        if title == sort:
            column["sort"] = "desc"
        columns.append(column)
    hidden = ["timestamp" if one == "Time" else one for one in organize["options"]["excludeByName"]]
    columns += [{"name": _column(field, several), "hide": True} for field in hidden]
    spec: Object = {"density": "compact", "enableFiltering": True, "columnSettings": columns}
    if several:
        joined = [label for label in shared if label != "cluster"]
        spec["transforms"] = [{"kind": "JoinByColumnValue", "spec": {"columns": joined}}]
    return {"kind": "Table", "spec": spec}


def _column(field: str, several: bool) -> str:  # noqa: FBT001 -- the one choice there is
    """The name of a column in Perses, where queries have numbers instead of letters."""
    if field == "Value" and not several:
        return "value"
    if field.startswith("Value #"):
        return f"value #{ord(field[-1]) - ord('A') + 1}"
    return field


def _layouts(panels: list[Object]) -> Iterator[Object]:
    """One grid for each row of Grafana, and one for each panel that is repeated."""
    title, grid = "", list[Object]()
    for panel in [*panels, {"type": "row", "title": ""}]:
        if panel["type"] == "row" or "repeat" in panel:
            if grid:
                yield _grid(title, grid)
            grid = []
        if panel["type"] == "row":
            title = panel["title"]
        elif "repeat" in panel:
            yield _grid(panel["title"], [panel], repeatVariable=panel["repeat"])
            title = ""
        else:
            grid.append(panel)


def _grid(title: str, panels: list[Object], **more: str) -> Object:
    top = min(panel["gridPos"]["y"] for panel in panels)
    items = [
        {
            "x": at["x"],
            "y": at["y"] - top,
            "width": at["w"],
            "height": at["h"],
            "content": {"$ref": f"#/spec/panels/panel-{panel['id']}"},
        }
        for panel in panels
        for at in [panel["gridPos"]]
    ]
    return {"kind": "Grid", "spec": {"display": {"title": title}, "items": items, **more}}


def _format(unit: str) -> Object:
    return UNITS.get(unit, {"unit": "decimal", "shortValues": True})


def _thresholds(thresholds: Object) -> Object:
    lowest, *steps = thresholds["steps"]
    return {
        "mode": "absolute",
        "defaultColor": COLOURS[lowest["color"]],
        "steps": [{"value": one["value"], "color": COLOURS[one["color"]]} for one in steps],
    }


def _answers(mappings: list[Object]) -> Iterator[tuple[str, Object]]:
    for mapping in mappings:
        yield from mapping["options"].items()


def _shown(result: Object) -> Object:
    return {"value": result["text"], "color": COLOURS[result["color"]]}


def _cell(result: Object) -> Object:
    return {"text": result["text"], "textColor": COLOURS[result["color"]]}
