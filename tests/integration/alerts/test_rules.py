"""Tests of the rules: linters, promtool cases, and a comparison with the metrics."""

import json
import re
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from exporter.engine.facts.policy import Reason
from exporter.metrics.exposition import FAMILIES
from exporter.settings import Settings
from tests.cluster import find_binary
from tests.generate.rules import (
    CASES,
    PINT,
    PROMETHEUS_RULE,
    RULES,
    RUNBOOK_BASE,
    Groups,
    all_alerts,
    all_rules,
    derive_prometheus_rule,
    derive_rules,
    keep_alerts,
    load_groups,
    map_expressions,
    runbook_url,
)
from tests.integration.alerts.fleet import alerts_of, is_firing, pair_cases
from tests.integration.alerts.scrapes import SCRAPES, Case, Scrape
from tests.support.dashboards import EVERYTHING, panels
from tests.support.foreign_metrics import FOREIGN


ALERTS = all_alerts(load_groups())
LABELS = {
    **{family.name: set(family.labels) for family in FAMILIES},
    **{
        f"{family.name}_{suffix}": {*family.labels, *own}
        for family in FAMILIES
        if family.type == "histogram"
        for suffix, own in (("count", ()), ("bucket", ("le",)))
    },
    **{name: set(metric.labels) for name, metric in FOREIGN.items()},
}
PROMETHEUS = RULES.parent / "prometheus.yaml"
METRICS_PORT = Settings().listen.metrics[0].port
METRIC = re.compile(r"(?<![\w:])(?:kubevirt|descheduler|apiserver)_\w+(?![\w:])")
RECORDED = re.compile(r"\b\w+:\w+:\w+\b")
SERIES = re.compile(r"(\w+)(?:\{(.*)\})?$")
# With two clusters `make test` runs only this scrape, because its rules differ from the shipped
# rules. `make soak` runs the others.
BESIDE_ANOTHER = SCRAPES[-1]
PINT_LINT = ("--no-color", "--offline", "--config", str(PINT), "lint", "--fail-on", "info")


def run(tool: str, *arguments: object) -> tuple[int, str]:
    """Run a tool; returns its exit code and its output."""
    done = subprocess.run(
        [find_binary(tool), *map(str, arguments)], capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout + done.stderr


def lint(path: Path) -> tuple[int, str]:
    """Run pint on a rule file."""
    return run("pint", *PINT_LINT, "--min-severity", "info", path)


def write(path: Path, document: object) -> Path:
    """Write a document to a YAML file, as JSON: vmalert-tool reads no YAML anchors."""
    path.write_text(json.dumps(document))
    return path


def cases() -> list[dict[str, Any]]:
    """Every promtool case."""
    return [case for path in CASES for case in yaml.safe_load(path.read_text())["tests"]]


def test_each_reason_counts_in_the_share_of_cooling_vms_or_is_left_out() -> None:
    """KubeVirtNodeCannotBeRelieved leaves out VMs that the descheduler cannot move anyway.

    A new reason must be in one of the two sets.
    """
    counted = {Reason.COOLDOWN, Reason.EVACUATION_IN_PROGRESS, Reason.PLATFORM_UPDATE}
    share = next(
        rule["expr"]
        for rule in all_rules(load_groups())
        if rule.get("record") == "node:descheduler_kubevirt_vmis_cooldown_ratio:max"
    )
    (left_out,) = re.findall(r'verdict!~"(.*)"', share)
    assert {*left_out.split("|"), *counted} == set(Reason), "say which of the two holds"


def test_promtool_accepts_the_rules() -> None:
    """`promtool check rules` passes with every lint."""
    code, output = run("promtool", "check", "rules", "--lint=all", "--lint-fatal", RULES)

    assert code == 0, output


def test_the_prometheus_of_make_alerts_scrapes_the_demo() -> None:
    """The configuration is valid and has the shipped rules and the exporter's default port."""
    code, output = run("promtool", "check", "config", PROMETHEUS)
    config = yaml.safe_load(PROMETHEUS.read_text())
    (scrape,) = config["scrape_configs"]

    assert code == 0, output
    assert "1 rule files found" in output
    assert [PROMETHEUS.parent / path for path in config["rule_files"]] == [RULES]
    assert scrape["static_configs"] == [{"targets": [f"127.0.0.1:{METRICS_PORT}"]}]
    assert scrape["honor_labels"] is True


def test_pint_has_nothing_to_say() -> None:
    """Pint reports nothing, of any severity."""
    code, output = lint(RULES)

    assert code == 0, output
    assert "problem" not in output.lower(), output


@pytest.mark.parametrize(
    ("wrong", "right", "complaint"),
    [
        (
            "max by (cluster, source, instance) (",
            "max by (cluster, source) (",
            "`instance` label should be removed",
        ),
        ("max by (source) (", "max by (cluster, source) (", "`cluster` label is required"),
        (
            "operator_health_impact: warning",
            "operator_health_impact: none",
            "operator_health_impact",
        ),
        ("runbooks/Other", "runbooks/KubeVirtVMChurning", "runbook_url"),
        ("severity: page", "severity: warning", "severity"),
        ("record: stuck", "record: vmi:kubevirt_vmi_evacuation_stuck:max", "rule/name"),
        ("for: 2h", "for: 30m", "maximum"),
        ("{{ $labels.pod }}", "{{ $labels.listener }}", "pod"),
    ],
)
def test_pint_sees_what_breaks_the_conventions(
    tmp_path: Path, wrong: str, right: str, complaint: str
) -> None:
    """Pint reports each of these violations of the conventions."""
    broken = tmp_path / "rules.yaml"
    broken.write_text(RULES.read_text().replace(right, wrong))
    code, output = lint(broken)

    assert code != 0
    assert complaint in output


@pytest.mark.parametrize(
    "path",
    # promtool evaluates all rules for each case. This takes several times as long as `hold`.
    [
        pytest.param(path, id=path.stem, marks=() if path is CASES[0] else pytest.mark.soak)
        for path in CASES
    ],
)
def test_cases_hold_as_they_are_written(path: Path) -> None:
    """`promtool test rules` passes on each file of cases."""
    code, output = run("promtool", "test", "rules", path)

    assert code == 0, output


def hold(directory: Path, rules: Groups, tests: list[Case]) -> tuple[int, str]:
    """Run promtool on these cases, each with the rules of its alerts only."""
    return run("promtool", "test", "rules", *write_cases(directory, rules, tests))


def write_cases(
    directory: Path, rules: Groups, tests: list[Case], interval: str = "1m"
) -> list[Path]:
    """Write a file of cases for each set of alerts, with their rules; returns the files."""
    files = []
    by_alerts: dict[frozenset[str], list[Case]] = {}
    for case in tests:
        by_alerts.setdefault(frozenset(alerts_of(case)), []).append(case)
    for number, (names, some) in enumerate(by_alerts.items()):
        kept = keep_alerts(rules, names)
        rule_file = write(directory / f"rules-{number}.yaml", kept)
        # A whole day at short intervals would take a third of all cases' CPU time. In vmalert, a
        # recorded sample counts for less than 5m.
        is_long = any(rule.get("for") == "1d" for rule in all_rules(kept))
        document = {
            "rule_files": [rule_file.name],
            "evaluation_interval": "4m" if is_long else interval,
            "tests": some,
        }
        files.append(write(directory / f"cases-{number}.yaml", document))
    return files


@pytest.mark.parametrize("scrape", SCRAPES, ids=lambda scrape: scrape.name)
def test_cases_hold_under_every_scrape(scrape: Scrape, tmp_path: Path) -> None:
    """Two replicas cause one alert, with and without honorLabels, and in a tenant's Prometheus."""
    tests = [scrape.case(case) for case in cases()]
    code, output = hold(tmp_path, scrape.rules(load_groups()), tests)

    assert code == 0, output


@pytest.mark.parametrize(
    "scrape",
    [
        pytest.param(
            scrape, id=scrape.name, marks=() if scrape is BESIDE_ANOTHER else pytest.mark.soak
        )
        for scrape in SCRAPES
    ],
)
def test_cases_hold_with_two_clusters_under_every_scrape(
    scrape: Scrape, tmp_path: Path, prove: Callable[[str], None]
) -> None:
    """An alert names its cluster, and another cluster neither causes nor silences it."""
    tests = [scrape.case(case) for case in pair_cases(cases())]
    code, output = hold(tmp_path, scrape.rules(load_groups()), tests)

    assert code == 0, output
    prove(f"rules: {len(tests)} cases with two clusters hold ({scrape.name})")


def test_an_alert_names_the_cluster_of_its_prometheus(tmp_path: Path) -> None:
    """If the series have no label `cluster`, the description has the external label `cluster`."""
    tests = json.loads(json.dumps(cases()))  # a copy without shared objects
    for case in tests:
        case["external_labels"] = {"cluster": "north"}
        for alert in (alert for test in case["alert_rule_test"] for alert in test["exp_alerts"]):
            texts = alert["exp_annotations"]
            texts["description"] = f"Cluster north: {texts['description']}"
    code, output = hold(tmp_path, load_groups(), tests)

    assert code == 0, output


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("by (cluster, ", "by ("),
        ("by (cluster)", "by ()"),
        ("on (cluster)", "on ()"),
    ],
)
def test_a_rule_that_mixes_clusters_would_be_seen(tmp_path: Path, right: str, wrong: str) -> None:
    """The cases with two clusters fail if a rule aggregates or compares without `cluster`."""
    firing = {min(alerts_of(case)): case for case in pair_cases(cases()) if is_firing(case)}
    code, _ = hold(tmp_path, replace_in_rules(right, wrong), [*firing.values()])

    assert code != 0


def replace_in_rules(right: str, wrong: str) -> Groups:
    """The rules, with this text replaced in all expressions."""
    return map_expressions(load_groups(), lambda text: text.replace(right, wrong))


def test_each_alert_fires_and_each_stays_silent_for_a_reason() -> None:
    """Every alert has a case in which it fires, and a case whose name starts with "silent"."""
    fired: set[str] = set()
    silent: set[str] = set()
    for case in cases():
        names = {alert["alertname"] for alert in case["alert_rule_test"]}
        firing = {alert["alertname"] for alert in case["alert_rule_test"] if alert["exp_alerts"]}
        assert bool(firing) != case["name"].startswith("silent, because "), case["name"]
        fired |= firing
        silent |= names - firing

    assert fired == set(ALERTS)
    assert silent == set(ALERTS)


def test_every_metric_in_a_rule_exists() -> None:
    """Rules only read metrics and labels that exist."""
    recorded = {rule["record"] for rule in all_rules(load_groups()) if "record" in rule}
    for rule in all_rules(load_groups()):
        expression = rule["expr"]
        texts = [expression, *rule.get("annotations", {}).values()]
        assert {name for text in texts for name in RECORDED.findall(text)} <= recorded
        for name in METRIC.findall(expression):
            assert name in LABELS, f"{rule.get('alert', rule.get('record'))}: {name}"
        for name, matchers in re.findall(r"(?<!:)\b(\w+)\{([^}]*)\}", expression):
            labels = set(re.findall(r"(\w+)\s*[!=]", matchers))
            assert {label.removeprefix("exported_") for label in labels} <= LABELS[name], name


def test_a_group_has_at_most_20_rules() -> None:
    """Mimir refuses larger groups by default."""
    sizes = {group["name"]: len(group["rules"]) for group in load_groups()["groups"]}

    assert max(sizes.values()) <= 20, sizes


def test_a_rule_reads_scraped_or_recorded_series() -> None:
    """No rule compares both, because only the recorded ones may have an external label."""
    for rule in all_rules(load_groups()):
        expression = rule["expr"]
        scraped, recorded = METRIC.findall(expression), RECORDED.findall(expression)
        assert not (scraped and recorded), rule.get("alert", rule.get("record"))


def test_only_recording_rules_restore_labels() -> None:
    """The series that an alert reads have the exporter's own labels already."""
    restoring = [rule for rule in all_rules(load_groups()) if '"exported_' in rule["expr"]]

    assert restoring
    assert [rule["alert"] for rule in restoring if "alert" in rule] == []


def test_every_series_in_a_case_is_one_of_the_exporter() -> None:
    """Each series of a case has the labels of its metric."""
    for case in cases():
        for series in case["input_series"]:
            match = SERIES.match(series["series"])
            assert match is not None
            labels = set(re.findall(r'(\w+)="', match[2] or "")) - {"instance", "job"}
            assert labels == LABELS[match[1]], series["series"]


def test_each_recording_rule_is_read() -> None:
    """Each recording rule is used by an alert, a rule or a panel."""
    texts = [
        *(rule["expr"] for rule in all_rules(load_groups())),
        *(text for alert in ALERTS.values() for text in alert["annotations"].values()),
        *(query.expression for query in panels(EVERYTHING)),
    ]
    for rule in all_rules(load_groups()):
        if "record" in rule:
            assert any(rule["record"] in text for text in texts), rule["record"]


def test_files_are_derived_from_one_source_and_one_base_url() -> None:
    """`make rules` changes nothing, and all runbook URLs have the same base."""
    text = RULES.read_text()

    assert derive_rules(text) == text
    assert derive_prometheus_rule(text) == PROMETHEUS_RULE.read_text()
    assert text.count(RUNBOOK_BASE) == len(ALERTS)
    for alert in ALERTS.values():
        assert alert["annotations"]["runbook_url"] == runbook_url(alert)


def test_a_rule_that_keeps_replicas_apart_would_be_seen(tmp_path: Path) -> None:
    """The cases with two replicas fail if a rule returns one result per replica."""
    scrape = next(scrape for scrape in SCRAPES if scrape.honors_labels)
    apart = replace_in_rules("max by (", "max by (instance, ")
    firing = [case for case in cases() if is_firing(case)]
    code, output = hold(tmp_path, apart, [scrape.case(case) for case in firing])

    assert code != 0
    assert "KubeVirtEvacuationStuck" in output


def test_two_clusters_hold_the_same_names() -> None:
    """Each alert has a firing case and a silent case that share a series."""
    shared = set()
    for case in pair_cases(cases()):
        series = Counter(
            re.sub(r',? ?(cluster|instance)="\w+"', "", series["series"])
            for series in case["input_series"]
        )
        beside_silent = "; beside it: silent" in case["name"] and is_firing(case)
        if beside_silent and max(series.values()) > 1:
            shared |= alerts_of(case)

    assert shared == set(ALERTS)
