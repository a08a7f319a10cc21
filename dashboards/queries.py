"""Builds the PromQL of the panels.

Replicas: each replica watches the whole cluster. So gauges, and counters of events in the cluster,
are aggregated with max, and the time of a first event with min. Counters of a replica's own callers
are summed.

Scrapes without honorLabels: Prometheus replaces the VM's `namespace` (and, if the scrape sets one,
`node`) by its own and keeps the VM's as `exported_namespace`. Queries work with and without
honorLabels.

Clusters: every selector has the chosen `cluster`, and every aggregation keeps the label. If no
series has the label, the chosen value is empty, and selects the series without the label.
"""

from collections.abc import Sequence


RATE = "$__rate_interval"
RANGE = "$__range"
VM = ("namespace", "name")
BLOCKS = "descheduler_kubevirt_eviction_blocks_total"
COOLDOWNS = "descheduler_kubevirt_effective_cooldown_seconds"
VMIS = "descheduler_kubevirt_vmis"
POLICY = "kubevirt_eviction_exporter_policy_seconds"
REQUESTS = "kubevirt_eviction_exporter_request_duration_seconds"
STUCK = "kubevirt_eviction_exporter_stuck_evacuations"
DAY, MONTH = "[1d]", "[28d]"
"""Ranges of queries that count with recording rules."""
_UNAME = ("instance", "nodename")
_CLUSTER = 'cluster=~"$cluster"'
_JOB = 'job=~"$job"'


def select(metric: str, *matchers: str) -> str:
    """The series of a metric of the chosen exporters."""
    return select_other(metric, _JOB, *matchers)


def select_other(metric: str, *matchers: str) -> str:
    """The series of a metric of another program, or of a recording rule."""
    return f"{metric}{{{', '.join((_CLUSTER, *matchers))}}}"


def select_by(chosen: str, metric: str, *matchers: str, range_function: str = "") -> str:
    """The series whose VM has a chosen `namespace` or `node`.

    `range_function` is a template that is applied to both selectors.
    """
    renamed = select(metric, f'exported_{chosen}=~"${chosen}"', *matchers)
    plain = select(metric, f'exported_{chosen}=""', f'{chosen}=~"${chosen}"', *matchers)
    if range_function:
        renamed, plain = range_function.format(renamed), range_function.format(plain)
    return f"{rename(renamed, chosen)} or {plain}"


def rename(vector: str, label: str) -> str:
    """Rename `exported_LABEL`, if a series has it, to `LABEL`."""
    return f'label_replace({vector}, "{label}", "$1", "exported_{label}", "(.+)")'


def each(labels: Sequence[str], vector: str, how: str = "max") -> str:
    """One series per cluster and value of these labels, aggregated over the replicas."""
    return f"{how} by ({', '.join(('cluster', *labels))}) ({vector})"


def each_vm(metric: str, *matchers: str, by: Sequence[str] = VM, how: str = "max") -> str:
    """One series per VM of the chosen namespaces."""
    vector = select_by("namespace", metric, *matchers)
    return each(by, rename(vector, "node") if "node" in by else vector, how)


def rate(counter: str, *matchers: str) -> str:
    """The growth of a counter per second."""
    return f"rate({select(counter, *matchers)}[{RATE}])"


def rate_other(counter: str, *matchers: str) -> str:
    """The growth of another program's counter per second."""
    return f"rate({select_other(counter, *matchers)}[{RATE}])"


def increase(counter: str, *matchers: str) -> str:
    """The growth of a counter between two points of a panel."""
    return f"increase({select(counter, *matchers)}[{RATE}])"


def of_endpoints(series: str, endpoints: str) -> str:
    """The growth per second of a metric about requests, for these endpoints, by endpoint.

    The scrape of a PodMonitor adds its own label `endpoint`, so ours may be `exported_endpoint`.
    """
    plain = rate(series, f'endpoint=~"{endpoints}"')
    renamed = rate(series, f'exported_endpoint=~"{endpoints}"')
    return rename(f"{plain} or {renamed}", "endpoint")


def count_within(within: str, recorded: str) -> str:
    """The count within a range, from a recording rule that has a rate once a minute.

    An average would be wrong, because a counter has no series before its first event.
    """
    return f"60 * sum_over_time({select_other(recorded)}{within})"


def link_to_vm(uid: str) -> str:
    """The URL of the dashboard `uid` for the VM of a table's row."""
    return (
        f"/d/{uid}?${{__url_time_range}}&${{datasource:queryparam}}&${{cluster:queryparam}}"
        "&${job:queryparam}&var-namespace=${__data.fields.namespace}&var-name=${__data.fields.name}"
    )


def of_node(vector: str) -> str:
    """A vector of node_exporter, with the chosen node's name instead of `instance`."""
    names = select_other("node_uname_info", 'nodename=~"$node"')
    joined = f"{vector} * on (cluster, instance) group_left (nodename) {each(_UNAME, names)}"
    return each(("node",), f'label_replace({joined}, "node", "$1", "nodename", "(.+)")')
