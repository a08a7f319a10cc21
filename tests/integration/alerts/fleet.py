"""Joins cases of one cluster into cases of two clusters in one Prometheus."""

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise, product

from tests.integration.alerts.scrapes import Case


EAST, WEST = "east", "west"
_FOREIGN = re.compile(r"up\{")
_OPENING = re.compile(r"^(\w+)(?:\{(.*)\})?$", re.DOTALL)


def is_firing(case: Case) -> bool:
    """Whether any alert fires in this case."""
    return any(alert["exp_alerts"] for alert in case["alert_rule_test"])


def pair_cases(cases: Sequence[Case]) -> Iterator[Case]:
    """Pair each firing case with itself and with silent cases, and silent cases with each other.

    Both cases of a pair test the same alert. A firing and a silent case also have a common metric.
    Cases without a series of the exporter are left out.
    """
    ours = [
        case
        for case in cases
        if not all(_FOREIGN.match(series["series"]) for series in case["input_series"])
    ]
    alerts = dict.fromkeys(alert for case in ours for alert in alerts_of(case))
    for alert in alerts:
        of_it = [case for case in ours if alert in alerts_of(case)]
        firing = [case for case in of_it if is_firing(case)]
        silent = [case for case in of_it if not is_firing(case)]
        for case in firing:
            yield join(case, case)
        for case, other in product(firing, silent):
            if metrics_of(case) & metrics_of(other):
                yield join(case, other)
        for case, other in pairwise([*silent, silent[0]]):
            if case is not other:
                yield join(case, other)


def alerts_of(case: Case) -> set[str]:
    """The names of the alerts that a case tests."""
    return {alert["alertname"] for alert in case["alert_rule_test"]}


def metrics_of(case: Case) -> set[str]:
    """The names of the metrics of a case."""
    return {series["series"].partition("{")[0] for series in case["input_series"]}


def join(east: Case, west: Case) -> Case:
    """A case with both clusters. The west has no firing alert, or the same series as the east."""
    clusters = (EAST, WEST) if west is east else (EAST,)
    return {
        **east,
        "name": f"{east['name']}; beside it: {west['name']}",
        "input_series": [
            {**series, "series": _label(series["series"], cluster)}
            for cluster, case in ((EAST, east), (WEST, west))
            for series in case["input_series"]
        ],
        "alert_rule_test": [
            {
                **test,
                "exp_alerts": [
                    _of_cluster(alert, name) for name in clusters for alert in test["exp_alerts"]
                ],
            }
            for test in east["alert_rule_test"]
        ],
    }


def _label(series: str, cluster: str) -> str:
    match = _OPENING.match(series)
    assert match is not None
    labels = [*([match[2]] if match[2] else []), f'cluster="{cluster}"']
    return f"{match[1]}{{{', '.join(labels)}}}"


def _of_cluster(alert: Case, cluster: str) -> Case:
    texts = alert["exp_annotations"]
    return {
        "exp_labels": {**alert["exp_labels"], "cluster": cluster},
        "exp_annotations": {
            **texts,
            "description": f"Cluster {cluster}: {texts['description']}",
        },
    }
