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

from dashboards import one_vm, overview, perses
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
ONE_VM = "kubevirt-eviction-vm"


def build_overview(*, fleet: bool = False) -> Dashboard:
    """The dashboard of a cluster."""
    return _build(
        OVERVIEW,
        "KubeVirt evictions / Overview",
        "Which alerts fire, which evacuations are stuck, and which VMs must not be moved now.",
        [choose_cluster(hide=not fleet), choose_jobs(), choose_namespaces(), choose_nodes()],
        overview.sections(ONE_VM),
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
        for board in (build_overview(fleet=fleet).build(), build_one_vm(fleet=fleet).build())
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
        .time("now-6h", "now")
        .refresh("1m")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .link(others)
        .with_variable(choose_datasource())
    )
    for variable in variables:
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
