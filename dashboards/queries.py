"""PromQL as the panels need it.

Replicas: each watches the whole cluster and says the same of it, so gauges, and counters of what
happened to the cluster, are aggregated with max, and instants with min, which is the first sight;
what a replica counted of its own callers is summed.

Scrapes without honorLabels: Prometheus then puts its own `namespace` (and, where the scrape sets
one, `node`) over the VM's and keeps the VM's as `exported_namespace`; queries survive both.
"""

from collections.abc import Sequence


RATE = "$__rate_interval"
RANGE = "$__range"
VM = ("namespace", "name")
_JOB = 'job=~"$job"'


def select(metric: str, *matchers: str) -> str:
    """The series of a metric of the chosen exporters."""
    return f"{metric}{{{', '.join((_JOB, *matchers))}}}"


def select_by(chosen: str, metric: str, *matchers: str, range_function: str = "") -> str:
    """The series whose VM has a chosen `namespace` or `node`.

    `range_function` is a template of what is done to the two selectors.
    """
    renamed = select(metric, f'exported_{chosen}=~"${chosen}"', *matchers)
    plain = select(metric, f'exported_{chosen}=""', f'{chosen}=~"${chosen}"', *matchers)
    if range_function:
        renamed, plain = range_function.format(renamed), range_function.format(plain)
    return f"{rename(renamed, chosen)} or {plain}"


def rename(vector: str, label: str) -> str:
    """The VM's own label under its own name."""
    return f'label_replace({vector}, "{label}", "$1", "exported_{label}", "(.+)")'


def each(labels: Sequence[str], vector: str, how: str = "max") -> str:
    """One series per value of these labels, the replicas aggregated away."""
    return f"{how} by ({', '.join(labels)}) ({vector})"


def each_vm(metric: str, *matchers: str, by: Sequence[str] = VM, how: str = "max") -> str:
    """One series per VM of the chosen namespaces."""
    vector = select_by("namespace", metric, *matchers)
    return each(by, rename(vector, "node") if "node" in by else vector, how)


def rate(counter: str, *matchers: str) -> str:
    """The growth of a counter per second."""
    return f"rate({select(counter, *matchers)}[{RATE}])"


def increase(counter: str, *matchers: str) -> str:
    """The growth of a counter from point to point."""
    return f"increase({select(counter, *matchers)}[{RATE}])"
