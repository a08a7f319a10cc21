"""The variables at the top of the dashboards."""

from grafana_foundation_sdk.builders.dashboard import DatasourceVariable, QueryVariable
from grafana_foundation_sdk.models.dashboard import (
    VariableHide,
    VariableOption,
    VariableRefresh,
    VariableSort,
)

from dashboards.looks import DATASOURCE
from dashboards.queries import RANGE, each, rename, select, select_by


# A VM that is in cooldown or evacuating has one of these series. A user can choose the VMs that had
# such a series within the time range.
_VMS = ("kubevirt_vmi_eviction_cooldown_seconds", "kubevirt_vmi_evacuation_info")
_SEEN = f"last_over_time({{}}[{RANGE}])"


def choose_datasource() -> DatasourceVariable:
    """Chooses the Prometheus."""
    return DatasourceVariable("datasource").label("Data source").type("prometheus")


def choose_cluster(*, hide: bool) -> QueryVariable:
    """Chooses a single cluster, because two clusters may have nodes and VMs of the same name.

    If no series has the label, nothing can be chosen, and the empty value selects everything.
    Grafana cannot hide a variable only because it has one value, so some files show the variable,
    and others hide it.
    """
    query = "label_values(kubevirt_eviction_exporter_build_info, cluster)"
    variable = _choose("cluster", "Cluster", "Clusters with an exporter.", query)
    return variable.hide(VariableHide.HIDE_VARIABLE if hide else VariableHide.DONT_HIDE)


def choose_jobs() -> QueryVariable:
    """Chooses scrape jobs of the exporter. "All" means the jobs that this query finds, not any job.

    The descheduler's plugin KubevirtMigrationAware has metrics of the same names in another job.
    """
    query = 'label_values(kubevirt_eviction_exporter_build_info{cluster=~"$cluster"}, job)'
    return _allow_several(_choose("job", "Job", "Scrape jobs of the exporter.", query))


def choose_namespaces() -> QueryVariable:
    """Chooses namespaces of VMs."""
    return _allow_several(choose_namespace()).all_value(".*")


def choose_nodes() -> QueryVariable:
    """Chooses nodes. A VM that is not scheduled yet has no node."""
    nodes = rename(select("descheduler_kubevirt_vmis"), "node")
    return _allow_several(_choose_label("node", "Node", "Nodes with a VM.", nodes)).all_value(".+")


def choose_namespace() -> QueryVariable:
    """Chooses the namespace of one VM."""
    seen = " or ".join(rename(_SEEN.format(select(metric)), "namespace") for metric in _VMS)
    description = "Namespaces of VMs that were in cooldown or evacuating within the time range."
    return _choose_label("namespace", "Namespace", description, seen)


def choose_name() -> QueryVariable:
    """Chooses the name of one VM."""
    seen = " or ".join(select_by("namespace", m, range_function=_SEEN) for m in _VMS)
    description = "VMs of the namespace that were in cooldown or evacuating within the time range."
    return _choose_label("name", "VM", description, seen)


def _choose_label(name: str, label: str, description: str, vector: str) -> QueryVariable:
    """Chooses a value of a label. Grafana reads the values from the text of the series."""
    query = f"query_result({each((name,), vector, 'group')})"
    return _choose(name, label, description, query).regex(f'/{name}="([^"]+)"/')


def _choose(name: str, label: str, description: str, query: str) -> QueryVariable:
    return (
        QueryVariable(name)
        .label(label)
        .description(description)
        .datasource(DATASOURCE)
        .query(query)
        .definition(query)
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(VariableSort.ALPHABETICAL_ASC)
    )


def _allow_several(variable: QueryVariable) -> QueryVariable:
    everything = VariableOption(selected=True, text=["All"], value=["$__all"])
    return variable.multi(multi=True).include_all(include_all=True).current(everything)
