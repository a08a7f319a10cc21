"""The committed dashboards: up to date, valid, and consistent with the metrics."""

import json
import re
from typing import Any, NamedTuple

import pytest
import yaml

from dashboards.build import FLEET, render
from exporter.metrics.exposition import FAMILIES
from tests.generate.rules import RUNBOOK_BASE, all_rules, load_groups
from tests.support.dashboards import (
    FOLDER,
    list_titles,
    load_dashboards,
    used_variables,
)
from tests.support.documents import REFERENCE, bare, table
from tests.support.foreign_metrics import FOREIGN, Foreign


ROOT = FOLDER.parent
DASHBOARDS = load_dashboards()
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
BUILT_IN = {"__rate_interval", "__range", "__url_time_range", "__data", "__value", "__all"}
"""Grafana's own variables."""
CHOSEN = {"job", "instance", "pod", "namespace", "name", "node", "cluster"}
"""Labels whose values differ from cluster to cluster."""

# A selector with its optional function and range, in the only form that the builder writes.
SELECTOR = re.compile(
    r"(?:(?P<function>\w+)\()?(?P<metric>[A-Za-z_][\w:]*)"
    r"\{(?P<matchers>[^}]*)\}(?:\[(?P<range>[^]]+)\])?"
)
MATCHER = re.compile(r'(\w+)(=~|!~|!=|=)"([^"]*)"')
AGGREGATION = re.compile(r"by \(([^)]*)\)")

METRICS = {family.name: family for family in FAMILIES}
SUFFIXES = ("_bucket", "_count", "_sum")
RECORDED = {rule["record"] for rule in all_rules(load_groups()) if "record" in rule}


class Panel(NamedTuple):
    json: dict[str, Any]

    @property
    def title(self) -> str:
        title: str = self.json["title"]
        return title

    @property
    def queries(self) -> list[str]:
        return [target["expr"] for target in self.json["targets"]]


PANELS = [
    Panel(panel)
    for board in DASHBOARDS.values()
    for panel in board["panels"]
    if panel["type"] != "row"
]
SELECTORS = [
    (panel, match)
    for panel in PANELS
    for query in panel.queries
    for match in SELECTOR.finditer(query)
]

NO_METRIC = Foreign("gauge", ())

each_dashboard = pytest.mark.parametrize("board", DASHBOARDS.values(), ids=DASHBOARDS)
each_panel = pytest.mark.parametrize("panel", PANELS, ids=[panel.title for panel in PANELS])


def is_recorded(match: re.Match[str]) -> bool:
    """Whether a selector reads the result of a recording rule."""
    return match["metric"] in RECORDED


def _family(metric: str) -> tuple[str, set[str]]:
    """The type and the labels of a metric; KeyError if there is no such metric."""
    if metric in FOREIGN:
        return FOREIGN[metric].type, {*FOREIGN[metric].labels}
    if metric in RECORDED:
        return "gauge", set()
    base = next((metric.removesuffix(s) for s in SUFFIXES if metric.endswith(s)), metric)
    family = METRICS.get(metric) or METRICS[base]
    if family.type == "histogram":
        assert metric != base, f"{metric} is a histogram"
        return "counter", {*family.labels, *(("le",) if metric.endswith("_bucket") else ())}
    assert metric == family.name
    return family.type, set(family.labels)


def test_the_json_is_what_the_code_builds() -> None:
    """The committed files are equal to the built files."""
    built = render()
    assert sorted(built) == sorted(FOLDER.rglob("*.json"))
    for path, text in built.items():
        assert path.read_text() == text, f"{path.name}: run python -m dashboards.build"


@each_dashboard
def test_a_dashboard_can_be_provisioned(board: dict[str, Any]) -> None:
    """Each dashboard can be provisioned: it has a uid and tags, has no id, and is read-only."""
    assert board["uid"] in DASHBOARDS
    assert re.fullmatch(r"[a-z-]{1,40}", board["uid"])
    assert board["id"] is None
    assert board["editable"] is False
    assert "kubevirt-eviction-exporter" in board["tags"]
    assert board["timezone"] == "utc"
    assert board["description"]
    assert "__inputs" not in board
    assert board["schemaVersion"] >= 42


def test_titles_and_ids_are_unique() -> None:
    """Titles of dashboards, and titles and ids of panels, are unique."""
    assert len({board["title"] for board in DASHBOARDS.values()}) == len(DASHBOARDS)
    for board in DASHBOARDS.values():
        titles = [panel["title"] for panel in board["panels"]]
        assert len(set(titles)) == len(titles)
        ids = [panel["id"] for panel in board["panels"]]
        assert len(set(ids)) == len(ids)
        assert 0 not in ids


@each_panel
def test_a_panel_asks_the_chosen_data_source(panel: Panel) -> None:
    """Each panel and each query use the data source variable."""
    assert panel.json["datasource"] == DATASOURCE
    assert all(target["datasource"] == DATASOURCE for target in panel.json["targets"])


@each_dashboard
def test_variables_are_defined_and_used(board: dict[str, Any]) -> None:
    """All used variables are defined, and all defined variables are used."""
    defined = {variable["name"] for variable in board["templating"]["list"]}
    used = used_variables(json.dumps(board))
    # A link names the variables of the dashboard that it leads to.
    assert used - BUILT_IN <= defined
    assert defined <= used


@each_panel
def test_a_query_selects_everything_by_braces(panel: Panel) -> None:
    """Every metric in a query has a selector in braces, so that the other tests find it."""
    for query in panel.queries:
        rest = SELECTOR.sub("", query)
        assert not re.search(r"kubevirt_|descheduler_|node_|apiserver_", rest), rest


def test_rates_are_of_counters_and_of_counters_alone() -> None:
    """rate() and increase() are applied to every counter and to nothing else."""
    for panel, match in SELECTORS:
        kind, _ = _family(match["metric"])
        is_rate = match["function"] in {"rate", "increase"}
        assert is_rate == (kind == "counter"), (panel.title, match[0])
        if not is_recorded(match):
            assert (match["range"] is not None) == is_rate


def test_ranges_follow_the_view() -> None:
    """Rates use $__rate_interval, and totals use $__range."""
    for panel, match in SELECTORS:
        if match["range"] is not None:
            expected = {"1d", "28d"} if is_recorded(match) else {"$__rate_interval", "$__range"}
            assert match["range"] in expected, panel.title
        if match["range"] == "$__range":
            assert all(target["instant"] for target in panel.json["targets"])


def test_nothing_of_any_cluster_is_written_down() -> None:
    """Jobs, namespaces, nodes and names come only from variables."""
    for panel, match in SELECTORS:
        for label, _, value in MATCHER.findall(match["matchers"]):
            is_chosen = label.removeprefix("exported_") in CHOSEN
            if is_chosen and label not in FOREIGN.get(match["metric"], NO_METRIC).labels:
                assert value == "" or used_variables(value), (panel.title, match[0])


def test_every_selector_keeps_to_the_chosen_cluster_and_jobs() -> None:
    """Every selector has the chosen cluster; a selector of our own metrics also has the chosen job.

    Recording rules have no job, and other programs have their own job.
    """
    for panel, match in SELECTORS:
        matchers = match["matchers"]
        assert matchers.startswith('cluster=~"$cluster"'), (panel.title, match[0])
        is_other = is_recorded(match) or match["metric"] in FOREIGN
        if not is_other:
            assert 'job=~"$job"' in matchers, (panel.title, match[0])


@each_panel
def test_a_query_keeps_clusters_apart(panel: Panel) -> None:
    """Every aggregation and every join keeps the label `cluster`."""
    for query in panel.queries:
        for labels in re.findall(r"\b(?:by|on) \(([^)]*)\)", query):
            assert labels.split(", ")[0] == "cluster", query
        assert not re.search(r"\b(?:sum|min|max|avg|count|group|scalar)\(", query), query


def test_the_cluster_is_shown_for_a_fleet() -> None:
    """The files in `fleet/` differ only because they show the variable `cluster`."""
    for path in FOLDER.glob("*.json"):
        hidden, shown = (json.loads((folder / path.name).read_text()) for folder in (FOLDER, FLEET))
        assert shown["templating"]["list"][1].pop("hide", 0) == 0
        assert hidden["templating"]["list"][1].pop("hide") == 2
        assert shown == hidden


@each_panel
def test_replicas_are_aggregated_away(panel: Panel) -> None:
    """No query keeps `job`, `instance` or `pod`, except queries of metrics of node_exporter."""
    for query in panel.queries:
        grouped = AGGREGATION.findall(query)
        assert grouped
        labels = {label.strip() for names in grouped for label in names.split(",")}
        assert not labels & {"job", "instance", "pod"} or "node_" in query


@each_panel
def test_a_legend_names_labels_of_the_result(panel: Panel) -> None:
    """A legend only has labels that its query groups by."""
    for target in panel.json["targets"]:
        labels = {
            label.strip()
            for names in AGGREGATION.findall(target["expr"])
            for label in names.split(",")
        }
        assert set(re.findall(r"\{\{(\w+)\}\}", target.get("legendFormat", ""))) <= labels


@pytest.mark.parametrize(
    "panel",
    [panel for panel in PANELS if panel.json["type"] == "table"],
    ids=lambda panel: panel.title,
)
def test_a_table_shows_columns_that_there_are(panel: Panel) -> None:
    """Every column and every override of a table belongs to a label or a query."""
    targets = panel.json["targets"]
    assert all(target["instant"] and target["format"] == "table" for target in targets)
    several = len(targets) > 1
    values = {f"Value #{target['refId']}" if several else "Value" for target in targets}
    labels = {
        label.strip()
        for query in panel.queries
        for label in AGGREGATION.findall(query)[0].split(",")
    }
    merge, organize = panel.json["transformations"]
    shown, hidden = organize["options"]["renameByName"], organize["options"]["excludeByName"]
    assert merge["id"] == "merge"
    assert set(shown) | set(hidden) == values | labels | {"Time"}
    assert list(organize["options"]["indexByName"]) == list(shown)
    overridden = {entry["matcher"]["options"] for entry in panel.json["fieldConfig"]["overrides"]}
    assert overridden <= set(shown.values())
    assert panel.json["options"]["sortBy"][0]["displayName"] in shown.values()


def test_the_alerts_lead_to_their_runbooks() -> None:
    """The table of alerts links to the URLs of the runbooks."""
    (url,) = re.findall(r"https://[^\"\\]+", json.dumps(DASHBOARDS))
    assert url == f"{RUNBOOK_BASE}/${{__value.text}}"


def test_links_lead_to_dashboards_that_there_are() -> None:
    """Links lead to existing dashboards, and set only variables of these dashboards."""
    urls = re.findall(r"/d/[^\"\\]+", json.dumps(DASHBOARDS))
    assert urls
    for url in urls:
        uid, _, query = url.removeprefix("/d/").partition("?")
        there = {variable["name"] for variable in DASHBOARDS[uid]["templating"]["list"]}
        assert set(re.findall(r"var-(\w+)=", query)) <= there
        assert set(re.findall(r"\$\{(\w+):queryparam\}", query)) <= there


def test_descriptions_name_alerts_and_settings_that_there_are() -> None:
    """Alerts and settings that a description names exist."""
    texts = " ".join(panel.json["description"] for panel in PANELS)
    rules = yaml.safe_load((ROOT / "alerts" / "rules.yaml").read_text())["groups"]
    alerts = {rule["alert"] for group in rules for rule in group["rules"] if "alert" in rule}
    assert set(re.findall(r"\bKubeVirt[A-Z]\w+", texts)) <= alerts
    settings = {bare(row[0]) for row in table(REFERENCE, "Settings")}
    for setting in re.findall(r"\b(?:policy|stuck|kube|limits)\.[a-z]\w+", texts):
        assert setting in settings, setting


@pytest.mark.parametrize("name", DASHBOARDS)
def test_the_picture_is_of_this_dashboard(name: str) -> None:
    """The documents' picture of a dashboard has its panels, in their order."""
    picture = ROOT / "docs" / "images" / f"dashboard-{name.rpartition('-')[2]}.txt"
    shown = [re.sub(r"node-\d+", "$node", title) for title in picture.read_text().splitlines()]

    assert list(dict.fromkeys(shown)) == list_titles(DASHBOARDS[name]), "run `make screenshots`"
