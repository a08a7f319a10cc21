"""Draws the overview for the documents: the results of the panels' queries, with Matplotlib.

The picture is not a screenshot, because Grafana cannot run here. Its data come from the exporter on
the simulated cluster, through a real Prometheus, as in the live test of the dashboards.

`python -m tests.generate.dashboards` writes the picture in three minutes.
"""

import asyncio
import re
import tempfile
from pathlib import Path
from typing import Any, TypeAlias

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dashboards.build import OVERVIEW
from tests.support.dashboards import Query, fill, load_dashboards
from tests.system.test_dashboards_live import HONORED, Watched, watching


FOLDER = Path(__file__).parents[2] / "docs" / "images"
PICTURE = FOLDER / "dashboard-overview.png"
PANELS = (
    "Time since the last contact",
    "Stuck evacuations",
    "Stuck evacuations by state",
    "Migrations and KubeVirt's limits",
    "Blocked VMs by reason",
    "VMs that may leave each node",
    "Migrations that ended",
    "Requests for verdicts",
    "Blocked evictions by reason",
)
"""The panels of the overview in the picture, three in a row."""
COLUMNS = 3
DPI = 110
Shown: TypeAlias = list[tuple[str, list[float], list[float]]]


async def ask(watched: Watched, panel: dict[str, Any]) -> Shown:
    """The legend, the seconds of the run and the values of each series of a panel."""
    shown: Shown = []
    for target in panel["targets"]:
        expression = fill(target["expr"], watched.values(HONORED))
        query = Query(OVERVIEW, panel["title"], target["refId"], expression)
        for series in await watched.ask(query):
            instants = [float(at) - watched.start for at, _ in series["values"]]
            values = [float(value) for _, value in series["values"]]
            shown.append((_legend(target["legendFormat"], series["metric"]), instants, values))
    return shown


def draw(axes: Axes, panel: dict[str, Any], shown: Shown) -> None:
    """Draw a panel under its title."""
    axes.set_title(panel["title"], loc="left", fontsize=9, fontweight="bold")
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=7)
    match panel["type"]:
        case "stat":
            _draw_stat(axes, panel, shown)
        case "bargauge":
            axes.barh([name for name, _, _ in shown], [values[-1] for *_, values in shown])
            axes.set_xlabel(_unit(panel), fontsize=7)
        case _:
            _draw_lines(axes, panel, shown)


def _draw_stat(axes: Axes, panel: dict[str, Any], shown: Shown) -> None:
    axes.set_axis_off()
    (mappings,) = panel["fieldConfig"]["defaults"].get("mappings") or [{"options": {}}]
    lines = []
    for name, _, values in shown:
        answer = mappings["options"].get(f"{values[-1]:g}", {"text": f"{values[-1]:g}"})
        lines.append(f"{name}: {answer['text']}" if name else answer["text"])
    nothing = panel["fieldConfig"]["defaults"].get("noValue", "")
    axes.text(0.5, 0.5, "\n".join(lines) or nothing, ha="center", va="center", fontsize=22)


def _draw_lines(axes: Axes, panel: dict[str, Any], shown: Shown) -> None:
    bars = panel["fieldConfig"]["defaults"]["custom"].get("drawStyle") == "bars"
    if bars:
        instants = sorted({at for _, some, _ in shown for at in some})
        stacked = [
            [dict(zip(some, values, strict=True)).get(at, 0.0) for at in instants]
            for _, some, values in shown
        ]
        axes.stackplot(instants, stacked, labels=[name for name, *_ in shown], step="post")
    else:
        for name, some, values in shown:
            axes.plot(some, values, label=name, linewidth=1)
    axes.set_ylim(bottom=0)
    axes.set_ylabel(_unit(panel), fontsize=7)
    axes.set_xlabel("seconds of the run", fontsize=7)
    axes.legend(fontsize=6, frameon=False, loc="upper left")


def _unit(panel: dict[str, Any]) -> str:
    unit: str = panel["fieldConfig"]["defaults"]["unit"]
    return {"short": "", "s": "seconds", "dtdurations": "seconds", "percentunit": "share"}.get(
        unit, unit.removeprefix("suffix:")
    )


def _legend(template: str, labels: dict[str, str]) -> str:
    return re.sub(r"\{\{(\w+)\}\}", lambda match: labels.get(match[1], ""), template)


async def main() -> None:
    """Write the picture."""
    by_title = {panel["title"]: panel for panel in load_dashboards()[OVERVIEW]["panels"]}
    rows = -(-len(PANELS) // COLUMNS)
    figure = Figure(figsize=(14, 3 * rows), layout="constrained")
    places = figure.subplots(rows, COLUMNS, squeeze=False).flat
    with tempfile.TemporaryDirectory() as directory:
        async with watching(Path(directory)) as watched:
            for title, axes in zip(PANELS, places, strict=True):
                draw(axes, by_title[title], await ask(watched, by_title[title]))
    figure.savefig(PICTURE, dpi=DPI)
    print(f"{PICTURE.name}: {PICTURE.stat().st_size} bytes")


if __name__ == "__main__":
    asyncio.run(main())
