"""Reads the files of `alerts/`, and derives prometheusrule.yaml and the runbook URLs.

`python -m tests.generate.rules` (`make rules`) writes prometheusrule.yaml, and the runbook URLs in
rules.yaml, which all begin with `RUNBOOK_BASE`.
"""

import copy
import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from exporter.runbooks import NAMES, read_runbook


Rule: TypeAlias = dict[str, Any]
Groups: TypeAlias = dict[str, list[dict[str, Any]]]


RUNBOOK_BASE = "https://kubevirt-eviction-exporter.kubevirt-eviction-exporter.svc:9811/runbooks"
"""The runbooks that the exporter serves, on the Service of our manifests."""
ALERTS = Path(__file__).parents[2] / "alerts"
RULES = ALERTS / "rules.yaml"
PROMETHEUS_RULE = ALERTS / "prometheusrule.yaml"
PINT = ALERTS / "pint.hcl"
CASES = sorted((Path(__file__).parents[1] / "integration" / "alerts").glob("*.yaml"))

_HEAD = """\
# Derived from rules.yaml by `make rules`: edit that file. The labels are those of KubeVirt's own
# PrometheusRule. Add the labels by which your Prometheus selects rules.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: kubevirt-eviction-exporter
  labels:
    app.kubernetes.io/name: kubevirt-eviction-exporter
    k8s-app: kubevirt
    prometheus.kubevirt.io: "true"
spec:
"""
_ALERT = re.compile(r"^ +- alert: (\w+)$|^( +runbook_url: )>-\n +.+$", re.MULTILINE)


def load_groups(path: Path = RULES) -> Groups:
    """Read a rule file."""
    groups: Groups = yaml.safe_load(path.read_text())
    return groups


def all_rules(groups: Groups) -> list[Rule]:
    """Every rule of a rule file, in order."""
    return [rule for group in groups["groups"] for rule in group["rules"]]


def all_alerts(groups: Groups) -> dict[str, Rule]:
    """The alerts of a rule file by name."""
    return {rule["alert"]: rule for rule in all_rules(groups) if "alert" in rule}


def keep_alerts(groups: Groups, names: Collection[str]) -> Groups:
    """These alerts, and the recording rules that they need."""
    kept: list[Rule] = []
    for rule in reversed(all_rules(groups)):
        read = (str([rule["expr"], rule.get("annotations")]) for rule in kept)
        if rule.get("alert") in names or any(rule.get("record", "\0") in text for text in read):
            kept.insert(0, rule)
    return {"groups": [{"name": "kept", "rules": kept}]}


def map_expressions(groups: Groups, change: Callable[[str], str]) -> Groups:
    """The rules with every expression changed."""
    changed = copy.deepcopy(groups)
    for rule in all_rules(changed):
        rule["expr"] = change(rule["expr"])
    return changed


def load_runbooks() -> dict[str, str]:
    """The text of each runbook by its name."""
    return {name: read_runbook(name) for name in NAMES}


def fenced(text: str, language: str) -> list[str]:
    """The contents of a runbook's code fences of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def list_causes(rule: Rule) -> list[str]:
    """The values of the label `cause` of an alert."""
    return re.findall(r'"cause", "(\w+)"', rule["expr"])


def runbook_url(rule: Rule) -> str:
    """The URL of an alert's runbook: of the step for its cause, if it has a label `cause`."""
    step = "#{{$labels.cause}}" if list_causes(rule) else ""
    return f"{RUNBOOK_BASE}/{rule['alert']}{step}"


def derive_rules(text: str) -> str:
    """The text of rules.yaml with every runbook URL derived from the base."""
    alerts, alert = all_alerts(yaml.safe_load(text)), ""

    def replace(match: re.Match[str]) -> str:
        nonlocal alert
        if match[1]:
            alert = match[1]
            return match[0]
        indent = " " * (len(match[2]) - len(match[2].lstrip()) + 2)
        return f"{match[2]}>-\n{indent}{runbook_url(alerts[alert])}"

    return _ALERT.sub(replace, text)


def derive_prometheus_rule(text: str) -> str:
    """The text of prometheusrule.yaml: rules.yaml with its comments, and a head."""
    groups = text[text.index("groups:\n") :]
    return _HEAD + re.sub(r"^(?=.)", "  ", groups, flags=re.MULTILINE)


def main() -> None:
    """Write the derived files."""
    RULES.write_text(derive_rules(RULES.read_text()))
    PROMETHEUS_RULE.write_text(derive_prometheus_rule(RULES.read_text()))


if __name__ == "__main__":
    main()
