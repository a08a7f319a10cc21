"""One function per kind of panel, so that panels of one kind look the same.

Each panel has a title, a unit, and a description. The description says how to read the panel and
what to do about it.
"""

from collections.abc import Mapping, Sequence
from typing import cast

from grafana_foundation_sdk.builders import (
    bargauge,
    common,
    dashboard,
    heatmap,
    stat,
    statetimeline,
    table,
    timeseries,
)
from grafana_foundation_sdk.builders.prometheus import Dataquery
from grafana_foundation_sdk.models import units
from grafana_foundation_sdk.models.common import (
    BarGaugeDisplayMode,
    BarGaugeNamePlacement,
    BigValueColorMode,
    BigValueGraphMode,
    DataSourceRef,
    GraphDrawStyle,
    LegendDisplayMode,
    LegendPlacement,
    SortOrder,
    StackingMode,
    TooltipDisplayMode,
    VisibilityMode,
    VizOrientation,
)
from grafana_foundation_sdk.models.dashboard import (
    DataTransformerConfig,
    DynamicConfigValue,
    FieldColorModeId,
    Threshold,
    ThresholdsMode,
    ValueMap,
    ValueMappingResult,
)
from grafana_foundation_sdk.models.heatmap import HeatmapColorMode
from grafana_foundation_sdk.models.prometheus import PromQueryFormat
from grafana_foundation_sdk.models.table import Options


DATASOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
SHORTEST_STEP = "1m"
"""Two scrape intervals. Shorter steps would show nothing new."""

PER_HOUR, PER_MINUTE = "suffix:/h", "suffix:/min"
GREEN, YELLOW, RED, BLUE = "green", "yellow", "red", "blue"
NARROWEST = 90
"""Pixels of the narrowest column of a table; ten columns then fit in a window of 1,280."""
Size = tuple[int, int]
"""Width and height in units of Grafana's grid, which is 24 wide."""
Answers = Mapping[int, tuple[str, str]]
"""Text and colour for each value, in a panel that shows words and not numbers."""
OUTCOMES = {"succeeded": GREEN, "failed": RED}
"""The colours of outcomes, whatever comes first in the legend."""
YES_IS_BAD: Answers = {0: ("no", GREEN), 1: ("yes", RED)}
Steps = Sequence[tuple[float | None, str]]
"""Lower limits, and the colour of the values from each limit on. The first limit is None."""
ONE_IS_RED: Steps = ((None, GREEN), (1, RED))


class Column:
    """One column of a table: its query and how it is shown. A column without a title is hidden."""

    def __init__(
        self,
        title: str | None,
        query: str,
        *,
        unit: str = units.Short,
        answers: Answers | None = None,
        steps: Steps | None = None,
    ) -> None:
        self.title = title
        self.query = query
        self.unit = unit
        self.answers = answers
        self.steps = steps

    def properties(self) -> list[DynamicConfigValue]:
        """The display settings of this column, which Grafana calls overrides."""
        properties = [DynamicConfigValue("unit", self.unit)]
        if self.answers is not None:
            properties.append(DynamicConfigValue("mappings", [_map(self.answers)]))
        if self.steps is not None:
            properties.append(DynamicConfigValue("thresholds", thresholds(*self.steps).build()))
        if self.answers is not None or self.steps is not None:
            cell = {"type": "color-text"}
            properties.append(DynamicConfigValue("custom.cellOptions", cell))
        return properties


def stat_panel(
    title: str,
    description: str,
    queries: Mapping[str, str],
    *,
    size: Size,
    unit: str,
    answers: Answers | None = None,
    steps: Steps = ((None, BLUE),),
    none: str = "none",
) -> stat.Panel:
    """The current values as big numbers or words. The keys of `queries` are legends."""
    panel = (
        stat.Panel()
        .title(title)
        .description(description)
        .span(size[0])
        .height(size[1])
        .datasource(DATASOURCE)
        .unit(unit)
        .no_value(none)
        .thresholds(thresholds(*steps))
        .color_mode(BigValueColorMode.VALUE)
        .graph_mode(BigValueGraphMode.NONE)
        .orientation(VizOrientation.AUTO)
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
    )
    if unit == units.DurationSeconds:
        panel.decimals(1)  # hours and minutes; otherwise 5 hours 59 minutes are "5 hours"
    if answers is not None:
        panel.mappings([_map(answers)])
    for ref, (legend, query) in zip("ABCDEF", queries.items(), strict=False):
        panel.with_target(_query(ref, query).instant().legend_format(legend))
    return panel


def time_panel(
    title: str,
    description: str,
    queries: Mapping[str, str],
    *,
    size: Size,
    unit: str,
    axis: str = "",
    stacked: bool = False,
    beside: Sequence[str] = (),
    most: float | None = None,
    each_node: bool = False,
    bad: bool = False,
) -> timeseries.Panel:
    """Lines, or stacked bars, over the time range. The keys of `queries` are legends.

    `axis` says what the numbers count, if the unit does not. The legends in `beside` are lines that
    are not stacked. With `each_node` there is one such panel for each chosen node. `bad`: whatever
    it shows should not be.
    """
    panel = (
        timeseries.Panel()
        .title(title)
        .description(description)
        .span(size[0])
        .height(size[1])
        .datasource(DATASOURCE)
        .interval(SHORTEST_STEP)
        .unit(unit)
        .axis_label(axis)
        .min(0)
        .line_width(1)
        .fill_opacity(10)
        .show_points(VisibilityMode.NEVER)
        .legend(
            common.VizLegendOptions()
            .display_mode(LegendDisplayMode.LIST)
            .placement(LegendPlacement.BOTTOM)
            .show_legend(show_legend=True)
        )
        .tooltip(
            common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI).sort(SortOrder.DESCENDING)
        )
    )
    if most is not None:
        panel.max(most)
    if stacked:
        panel.draw_style(GraphDrawStyle.BARS).fill_opacity(70).stacking(
            common.StackingConfig().mode(StackingMode.NORMAL).group("A")
        )
    for legend in beside:
        panel.override_by_name(
            legend,
            [
                DynamicConfigValue("custom.drawStyle", "line"),
                DynamicConfigValue("custom.stacking", {"mode": "none", "group": "A"}),
            ],
        )
    if bad:
        panel.color_scheme(dashboard.FieldColor().mode(FieldColorModeId.SHADES).fixed_color(RED))
    if any("{{outcome}}" in legend for legend in queries):
        for word, color in OUTCOMES.items():
            fixed = {"mode": "fixed", "fixedColor": color}
            panel.override_by_regexp(f"/{word}/", [DynamicConfigValue("color", fixed)])
    if each_node:
        panel.repeat("node").repeat_direction("h").max_per_row(2)
    for ref, (legend, query) in zip("ABCDEF", queries.items(), strict=False):
        panel.with_target(_query(ref, query).range().legend_format(legend))
    return panel


def bars_panel(
    title: str,
    description: str,
    query: str,
    *,
    size: Size,
    legend: str,
    unit: str,
    steps: Steps = ((None, BLUE),),
) -> bargauge.Panel:
    """One horizontal bar per series, for its current value."""
    return (
        bargauge.Panel()
        .title(title)
        .description(description)
        .span(size[0])
        .height(size[1])
        .datasource(DATASOURCE)
        .unit(unit)
        .min(0)
        .no_value("none")
        .thresholds(thresholds(*steps))
        .display_mode(BarGaugeDisplayMode.BASIC)
        .name_placement(BarGaugeNamePlacement.TOP)
        .orientation(VizOrientation.HORIZONTAL)
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
        .with_target(_query("A", query).instant().legend_format(legend))
    )


def heatmap_panel(
    title: str, description: str, query: str, *, size: Size, unit: str
) -> heatmap.Panel:
    """A histogram over time, from its cumulative buckets."""
    return (
        heatmap.Panel()
        .title(title)
        .description(description)
        .span(size[0])
        .height(size[1])
        .datasource(DATASOURCE)
        .interval(SHORTEST_STEP)
        .unit(units.Short)
        .calculate(calculate=False)
        .color(
            heatmap.HeatmapColorOptions()
            .mode(HeatmapColorMode.SCHEME)
            .scheme("Oranges")
            .exponent(0.5)
            .steps(64)
        )
        .y_axis(heatmap.YAxisConfig().unit(unit))
        .cell_values(heatmap.CellValues().unit(units.Short))
        .with_target(
            _query("A", query).range().format(PromQueryFormat.HEATMAP).legend_format("{{le}}")
        )
    )


def timeline_panel(
    title: str, description: str, query: str, *, size: Size, legend: str, answers: Answers
) -> statetimeline.Panel:
    """The value of each series over time, as coloured bars."""
    return (
        statetimeline.Panel()
        .title(title)
        .description(description)
        .span(size[0])
        .height(size[1])
        .datasource(DATASOURCE)
        .interval(SHORTEST_STEP)
        .unit(units.Short)
        .mappings([_map(answers)])
        .show_value(VisibilityMode.NEVER)
        .merge_values(merge_values=True)
        .with_target(_query("A", query).range().legend_format(legend))
    )


def table_panel(
    title: str,
    description: str,
    columns: Sequence[Column],
    *,
    size: Size,
    labels: Mapping[str, str],
    sort_by: str,
    links: Mapping[str, tuple[str, str]] | None = None,
    widths: Mapping[str, int] | None = None,
) -> table.Panel:
    """One row per combination of values of the labels that all columns share.

    `labels` maps labels to the titles of their columns, which come first. `links` maps the title of
    a column to the text and the URL of its link, and `widths` to its pixels.
    """
    panel = (
        table.Panel()
        .title(title)
        .description(description)
        .span(size[0])
        .height(size[1])
        .datasource(DATASOURCE)
        .unit(units.Short)
        .no_value("")
        .filterable(filterable=True)
        .min_width(NARROWEST)
        .sort_by([common.TableSortByFieldState().display_name(sort_by).desc(desc=True)])
    )
    # The SDK gives a footer to every table, which Grafana no longer knows.
    cast("Options", panel.build().options).footer = None
    # With one query Grafana names its column "Value", with several "Value #A" and so on.
    refs = "ABCDEFGH"[: len(columns)]
    fields = ["Value"] if len(columns) == 1 else [f"Value #{ref}" for ref in refs]
    names = dict(labels)
    hidden = {"Time": True, "cluster": True}
    for ref, field, column in zip(refs, fields, columns, strict=True):
        panel.with_target(_query(ref, column.query).instant().format(PromQueryFormat.TABLE))
        if column.title is None:
            hidden[field] = True
        else:
            names[field] = column.title
            panel.override_by_name(column.title, column.properties())
    for name, (text, url) in (links or {}).items():
        link = {"title": text, "url": url}
        panel.override_by_name(name, [DynamicConfigValue("links", [link])])
    for name, width in (widths or {}).items():
        panel.override_by_name(name, [DynamicConfigValue("custom.width", width)])
    panel.with_transformation(DataTransformerConfig("merge", options={}))
    panel.with_transformation(
        DataTransformerConfig(
            "organize",
            options={
                "excludeByName": hidden,
                "includeByName": {},
                "indexByName": {field: position for position, field in enumerate(names)},
                "renameByName": names,
            },
        )
    )
    return panel


def thresholds(*steps: tuple[float | None, str]) -> dashboard.ThresholdsConfig:
    """The steps as Grafana's thresholds."""
    return (
        dashboard.ThresholdsConfig()
        .mode(ThresholdsMode.ABSOLUTE)
        .steps([Threshold(value=value, color=color) for value, color in steps])
    )


def _map(answers: Answers) -> ValueMap:
    return ValueMap(
        {
            str(value): ValueMappingResult(text=text, color=color, index=index)
            for index, (value, (text, color)) in enumerate(answers.items())
        }
    )


def _query(ref: str, expression: str) -> Dataquery:
    return Dataquery().ref_id(ref).datasource(DATASOURCE).expr(expression)
