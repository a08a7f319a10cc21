"""The ways to scrape the exporter, and how each way changes the labels of a test case.

A case is written with the exporter's own labels. A scrape adds the labels of the target. If a
series and its target have the same label, honorLabels decides which of them keeps the name.
"""

import re
import subprocess
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from tests.cluster import find_binary
from tests.generate.rules import Groups, all_rules, map_expressions


Case: TypeAlias = dict[str, Any]

MONITORING = "monitoring"
"""The namespace of the exporter's own pods."""
_OF_OTHERS = ("apiserver_",)
"""Prefixes of metrics that another scrape collects. Their labels are not renamed."""
_LABEL = re.compile(r'(\w+)="([^"]*)"')


@dataclass(frozen=True)
class Scrape:
    """How the exporter's replicas are scraped.

    `target`: the labels that each replica gets. `enforced`: a tenancy feature lets every rule read
    and return only the namespace of the exporter's pods.
    """

    name: str
    honors_labels: bool = False
    enforced: bool = False
    target: dict[str, str] = field(default_factory=dict)
    replicas: tuple[str, ...] = ("a", "b")

    def case(self, case: Case) -> Case:
        """The case with the labels and replicas of this scrape."""
        return {
            **case,
            "input_series": [
                {**series, "series": text}
                for series in case["input_series"]
                for text in self._series(series["series"])
            ],
            "alert_rule_test": [
                {
                    **test,
                    "exp_alerts": [self._alert(alert) for alert in test["exp_alerts"]],
                }
                for test in case["alert_rule_test"]
            ],
        }

    def rules(self, groups: Groups) -> Groups:
        """The rules as this Prometheus evaluates them."""
        if not self.enforced:
            return groups
        changed = map_expressions(groups, _enforce)
        for rule in all_rules(changed):
            rule["labels"] = {**rule.get("labels", {}), "namespace": MONITORING}
        return changed

    def _series(self, series: str) -> list[str]:
        name, _, rest = series.partition("{")
        own = dict(_LABEL.findall(rest))
        replicas = (own.pop("instance"),) if "instance" in own else self.replicas
        texts = []
        for replica in replicas:
            target = {**self.target, "instance": replica}
            is_clear = name.startswith(_OF_OTHERS)
            labels = {**target, **own} if is_clear else self._join(own, target)
            texts.append(name + "{" + ",".join(f'{k}="{v}"' for k, v in labels.items()) + "}")
        return texts

    def _join(self, own: dict[str, str], target: dict[str, str]) -> dict[str, str]:
        if self.honors_labels:
            return {**target, **own}
        moved = {f"exported_{k}" if k in target else k: v for k, v in own.items()}
        return {**target, **moved}

    def _alert(self, alert: dict[str, Any]) -> dict[str, Any]:
        labels = dict(alert["exp_labels"])
        if "namespace" in self.target:
            if "name" in labels and not self.honors_labels:
                labels["exported_namespace"] = labels["namespace"]
            if self.enforced:
                labels["namespace"] = MONITORING
        return {**alert, "exp_labels": labels}


_POD = {
    "job": "monitoring/kubevirt-eviction-exporter",
    "namespace": MONITORING,
    "container": "exporter",
    "endpoint": "metrics",
}
SCRAPES = (
    Scrape("one static target", target={"job": "exporter"}, replicas=("localhost:9811",)),
    Scrape("PodMonitor with honorLabels", honors_labels=True, target=_POD),
    Scrape("PodMonitor without honorLabels", target=_POD),
    Scrape("labels of pod and node as well", target={**_POD, "node": "n9", "name": "exporter"}),
    Scrape(
        "the same with honorLabels",
        honors_labels=True,
        target={**_POD, "node": "n9", "name": "exporter"},
    ),
    Scrape("a tenant's rules, as of OpenShift's users", enforced=True, target=_POD),
)


def _enforce(expression: str) -> str:
    """The expression, limited to the series of one namespace."""
    command = ("--experimental", "promql", "label-matchers", "set")
    return subprocess.run(
        [find_binary("promtool"), *command, expression, "namespace", MONITORING],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
