"""The dashboards of Grafana as objects of Perses: `PersesDashboard`, perses.dev/v1alpha2.

They have the same panels, queries and texts. They are for one cluster: Perses cannot choose "no
value" for a label, so the matcher of `cluster` is left out. Some kinds of panels (bars, heatmaps,
timelines) need Perses plugins that not every installation has. They are tables and lines here.
Links to other dashboards are left out, because their address depends on the installation.
"""

import re
from collections.abc import Collection, Iterator
from typing import Any


Object = dict[str, Any]

WIDTH = 24
"""The width of the grid, in Grafana and in Perses."""
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
_LEGENDS = {"heatmap": "at most {} s"}
"""The legends of panels that are lines here, and need no legend in Grafana."""
_CLUSTER = re.compile(r'cluster=~"\$cluster"(?:, )?')
_GROUPED = re.compile(r"by \(([^)]*)\)")
_LABEL_VALUES = re.compile(r"label_values\((\w+)\{?.*, (\w+)\)")
_QUERY_RESULT = re.compile(r"query_result\((.*)\)")


def convert(board: Object) -> Object:
    """Convert the JSON of one of our Grafana dashboards to an object of Perses's operator."""
    panels = [panel for panel in board["panels"] if panel["type"] != "row"]
    repeated = {panel["repeat"] for panel in panels if "repeat" in panel}
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
                    _variable(variable, repeated)
                    for variable in board["templating"]["list"]
                    if variable["name"] not in {"datasource", "cluster"}
                ],
                "panels": {f"panel-{panel['id']}": _panel(panel) for panel in panels},
                "layouts": list(_layouts(board["panels"])),
            }
        },
    }


def _variable(variable: Object, repeated: Collection[str]) -> Object:
    """A variable whose values are those of a label, in a metric or in the result of a query.

    Perses repeats a panel for each value of "All" only if "All" has no value of its own.
    """
    values = _LABEL_VALUES.fullmatch(variable["query"])
    if values is not None:
        metric, label = values.groups()
        kind, spec = "PrometheusLabelValuesVariable", {"labelName": label, "matchers": [metric]}
    else:
        (query,) = _QUERY_RESULT.findall(variable["query"])
        kind = "PrometheusPromQLVariable"
        spec = {"expr": _CLUSTER.sub("", query), "labelName": variable["name"]}
    several = variable.get("multi", False)
    everything = None if variable["name"] in repeated else variable.get("allValue")
    return {
        "kind": "ListVariable",
        "spec": {
            "name": variable["name"],
            "display": {"name": variable["label"], "description": variable["description"]},
            "allowMultiple": several,
            "allowAllValue": several,
            **({"customAllValue": everything} if everything else {}),
            **({"defaultValue": ["$__all"]} if several else {}),
            "sort": "alphabetical-asc",
            "plugin": {"kind": kind, "spec": spec},
        },
    }


def _panel(panel: Object) -> Object:
    kinds = {"stat": _stat, "bargauge": _bars, "table": _table}
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
        spec["seriesNameFormat"] = _LEGENDS.get(panel["type"], "{}").format(target["legendFormat"])
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
    axis: Object = {"show": panel["type"] != "state-timeline", "format": _format(defaults["unit"])}
    axis |= {bound: defaults[bound] for bound in ("min", "max") if bound in defaults}
    custom = defaults.get("custom", {})
    if panel["type"] == "heatmap":
        axis["label"] = "evictions"
    elif custom.get("axisLabel"):
        axis["label"] = custom["axisLabel"]
    # Beside the lines a legend is 200 pixels wide, which is too much of a narrow panel and too
    # little for long names.
    position = "right" if 10 <= panel["gridPos"]["w"] < WIDTH else "bottom"
    spec: Object = {"legend": {"position": position, "mode": "list"}, "yAxis": axis}
    spec["visual"] = {"palette": {"mode": "categorical"}}
    if "stacking" in custom or panel["type"] == "state-timeline":
        spec["visual"] |= {"display": "bar", "stack": "all"}
    if len(defaults.get("thresholds", {}).get("steps", ())) > 1:
        spec["thresholds"] = _thresholds(defaults["thresholds"])
    return {"kind": "TimeSeriesChart", "spec": spec}


def _bars(panel: Object) -> Object:
    """A table with the labels of each bar and its value."""
    (target,) = panel["targets"]
    defaults = panel["fieldConfig"]["defaults"]
    columns: list[Object] = [
        {"name": label, "header": label.capitalize(), "enableSorting": True}
        for label in re.findall(r"{{(\w+)}}", target["legendFormat"])
    ]
    columns.append(
        {
            "name": "value",
            "header": "Now",
            "format": _format(defaults["unit"]),
            "cellSettings": list(_cells(defaults["thresholds"])),
            "enableSorting": True,
            "sort": "desc",
        }
    )
    columns += [{"name": name, "hide": True} for name in ("timestamp", "cluster")]
    return {"kind": "Table", "spec": {"density": "compact", "columnSettings": columns}}


def _table(panel: Object) -> Object:
    """One row per value of the labels that all queries have, as in Grafana."""
    _, organize = panel["transformations"]
    several = len(panel["targets"]) > 1
    labels = [_GROUPED.findall(target["expr"])[0].split(", ") for target in panel["targets"]]
    shared = [label for label in labels[0] if all(label in of_query for of_query in labels)]
    overrides = {
        override["matcher"]["options"]: {
            item["id"]: item["value"] for item in override["properties"]
        }
        for override in panel["fieldConfig"]["overrides"]
    }
    sort = panel["options"]["sortBy"][0]["displayName"]
    columns: list[Object] = []
    for field, title in organize["options"]["renameByName"].items():
        column: Object = {
            "name": _column(field, several),
            "header": title,
            "enableSorting": True,
        }
        properties = overrides.get(title, {})
        if "unit" in properties:
            column["format"] = _format(properties["unit"])
        if properties.get("mappings"):
            column["cellSettings"] = [
                {"condition": {"kind": "Value", "spec": {"value": value}}, **_cell(result)}
                for value, result in _answers(properties["mappings"])
            ]
        if "thresholds" in properties:
            column["cellSettings"] = list(_cells(properties["thresholds"]))
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
        spec["transforms"] = [
            # Perses names the labels of each query apart, such as "node #1" and "node #2".
            *(
                {"kind": "MergeIndexedColumns", "spec": {"column": label}}
                for label in dict.fromkeys(label for of_query in labels for label in of_query)
            ),
            {"kind": "JoinByColumnValue", "spec": {"columns": joined}},
        ]
    return {"kind": "Table", "spec": spec}


def _column(field: str, several: bool) -> str:  # noqa: FBT001 -- the one choice there is
    """The name of a column in Perses, where queries have numbers instead of letters."""
    if field == "Value" and not several:
        return "value"
    if field.startswith("Value #"):
        return f"value #{ord(field[-1]) - ord('A') + 1}"
    return field


def _layouts(panels: list[Object]) -> Iterator[Object]:
    """One grid for each row of Grafana, and one for the panels that are repeated for each value."""
    title, above, repeated = "", list[Object](), list[Object]()
    for panel in [*panels, {"type": "row", "title": ""}]:
        if panel["type"] != "row":
            (repeated if "repeat" in panel else above).append(panel)
            continue
        if above:
            yield _grid(title, above)
        if repeated:
            variable = repeated[0]["repeat"]
            yield _grid(f"{title}: ${variable}", repeated, repeatVariable=variable)
        title, above, repeated = panel["title"], [], []


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


def _cells(thresholds: Object) -> Iterator[Object]:
    """The colours of a column's values, as conditions of which the first that holds is used."""
    lowest, *steps = thresholds["steps"]
    for step in reversed(steps):
        at_least = {"kind": "Range", "spec": {"min": step["value"]}}
        yield {"condition": at_least, "textColor": COLOURS[step["color"]]}
    # A range without a lower limit is not valid.
    any_other = {"kind": "Regex", "spec": {"expr": "."}}
    yield {"condition": any_other, "textColor": COLOURS[lowest["color"]]}


def _answers(mappings: list[Object]) -> Iterator[tuple[str, Object]]:
    for mapping in mappings:
        yield from mapping["options"].items()


def _shown(result: Object) -> Object:
    return {"value": result["text"], "color": COLOURS[result["color"]]}


def _cell(result: Object) -> Object:
    return {"text": result["text"], "textColor": COLOURS[result["color"]]}
