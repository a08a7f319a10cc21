"""`python -m dashboards.build` writes the JSON of every dashboard.

The dashboards in `fleet/` are for several clusters in one data source. They show the variable
`cluster`. Those in `perses/` are objects for the operator of Perses.
"""

import json
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path

from grafana_foundation_sdk.builders.dashboard import (
    Dashboard,
    DashboardLink,
    QueryVariable,
    Row,
)
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DashboardLinkType,
    Panel,
)

from dashboards import one_vm, overview, perses, trends
from dashboards.variables import (
    choose_cluster,
    choose_datasource,
    choose_jobs,
    choose_name,
    choose_namespace,
    choose_namespaces,
    choose_nodes,
)


HERE = Path(__file__).parent
FLEET = HERE / "fleet"
PERSES = HERE / "perses"
TAG = "kubevirt-eviction-exporter"
OVERVIEW = "kubevirt-eviction-overview"
TRENDS = "kubevirt-eviction-trends"
ONE_VM = "kubevirt-eviction-vm"


def build_overview(*, fleet: bool = False) -> Dashboard:
    """The dashboard of a cluster."""
    return _build(
        OVERVIEW,
        "KubeVirt evictions / Overview",
        "Whether anything needs you, and what to do: alerts, evacuations and blocked VMs, now.",
        [choose_cluster(hide=not fleet), choose_jobs(), choose_namespaces(), choose_nodes()],
        overview.sections(ONE_VM),
    )


def build_trends(*, fleet: bool = False) -> Dashboard:
    """The dashboard of the days and weeks of a cluster."""
    return _build(
        TRENDS,
        "KubeVirt evictions / Trends",
        "Days and weeks: whether evacuations are fast enough, which VMs are moved most, and how "
        "many evictions are blocked.",
        [choose_cluster(hide=not fleet), choose_jobs(), choose_namespaces(), choose_nodes()],
        trends.sections(ONE_VM),
        since="now-7d",
    )


def build_one_vm(*, fleet: bool = False) -> Dashboard:
    """The dashboard of one VM."""
    return _build(
        ONE_VM,
        "KubeVirt evictions / VM",
        "One VM: whether its eviction is blocked, whether it is evacuating, since when, and why.",
        [choose_cluster(hide=not fleet), choose_jobs(), choose_namespace(), choose_name()],
        one_vm.sections(),
    )


def render() -> dict[Path, str]:
    """The text of every file, by its path."""
    files = {
        folder / f"{board.uid}.json": _encode(board)
        for folder, fleet in ((HERE, False), (FLEET, True))
        for build in (build_overview, build_trends, build_one_vm)
        for board in (build(fleet=fleet).build(),)
    }
    boards = [json.loads(text) for path, text in files.items() if path.parent == HERE]
    return files | {
        PERSES / f"{board['uid']}.json": json.dumps(perses.convert(board), indent=2) + "\n"
        for board in boards
    }


def rewrite(text: str) -> str:
    """Read a dashboard with the SDK's model, and return it as the model writes it."""
    register_default_plugins()
    return _encode(models.Dashboard.from_json(json.loads(text)))


def _encode(model: models.Dashboard) -> str:
    # Grafana requires that a provisioned dashboard has no id.
    return JSONEncoder(indent=2).encode({"id": None, **model.to_json()}) + "\n"


def _build(
    uid: str,
    title: str,
    description: str,
    variables: Sequence[QueryVariable],
    sections: Mapping[str, Sequence[Builder[Panel]]],
    *,
    since: str = "now-6h",
) -> Dashboard:
    """A dashboard whose uid and panel ids are fixed, so links to it continue to work."""
    others = (
        DashboardLink("KubeVirt evictions")
        .type(DashboardLinkType.DASHBOARDS)
        .tags([TAG])
        .include_vars(include_vars=True)
        .keep_time(keep_time=True)
    )
    board = (
        Dashboard(title)
        .uid(uid)
        .description(description)
        .tags(["kubevirt", TAG])
        .readonly()
        .timezone("utc")
        .time(since, "now")
        .refresh("1m")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .link(others)
    )
    for variable in (choose_datasource(), *variables):
        model = variable.build()
        # The SDK gives these to every variable, but in Grafana only an interval has them.
        model.auto = model.auto_min = model.auto_count = None
        board.with_variable(variable)
    numbers = count(1)
    for section, panels in sections.items():
        board.with_row(Row(section).id(next(numbers)))
        for panel in panels:
            panel.build().id_val = next(numbers)
            board.with_panel(panel)
    return board


def main() -> None:
    """Write every file."""
    for path, text in render().items():
        path.write_text(text)


if __name__ == "__main__":
    main()
