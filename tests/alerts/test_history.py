"""Tests of the recording rules for long time ranges, in promtool."""

from pathlib import Path
from typing import Any

import pytest

from tests.alerts.scrapes import SCRAPES, Scrape
from tests.alerts.test_rules import run, write
from tests.generate.rules import load_groups


REQUESTED = "kubevirt_vmi_evacuation_requested_timestamp_seconds"
EXPORTER = "kubevirt_eviction_exporter"


def an_hour(cluster: str, *, restarts: bool = False, ends: bool = True) -> dict[str, str]:
    """The series of a cluster with two VMs, whose evacuations begin in the first minute.

    If the evacuations end (`ends`), db1 leaves after ten minutes and db2 after 45. With `restarts`
    the exporter is down from the 20th to the 25th minute.
    """
    labels = f', cluster="{cluster}"' if cluster else ""
    vm = f'{REQUESTED}{{namespace="shop",name="%s",node="n1"{labels}}}'
    whole = "1x19 stale _x4 1x35" if restarts else "1x60"
    return {
        vm % "db1": "0x10 stale" if ends else "0x60",
        vm % "db2": ("0x19 stale _x4 0x20 stale" if restarts else "0x45 stale") if ends else "0x60",
        f'{EXPORTER}_synced{{resource="virtualmachineinstances"{labels}}}': whole,
        f'{EXPORTER}_build_info{{version="1"{labels}}}': "1x60",
        **{
            f'{EXPORTER}_migrations_total{{outcome="failed",trigger="evacuation",'
            f'reason="{reason}"{labels}}}': "0+3x60"
            for reason in ("timeout", "other")
        },
        f'{EXPORTER}_stuck_evacuations{{source="other",state="backoff"{labels}}}': "2x60",
        f'{EXPORTER}_stuck_evacuations{{source="unknown",state="quota"{labels}}}': "1x60",
    }


def expect(clusters: dict[str, float], expression: str) -> dict[str, Any]:
    """A check of the value of an expression in each cluster, at the end of the hour."""
    return {
        "expr": f"sum by (cluster) ({expression})",
        "eval_time": "60m",
        "exp_samples": [
            {"labels": f'{{cluster="{name}"}}' if name else "{}", "value": value}
            for name, value in clusters.items()
        ],
    }


@pytest.mark.parametrize("scrape", SCRAPES, ids=lambda scrape: scrape.name)
@pytest.mark.parametrize("clusters", [("",), ("east", "west")], ids=["one", "two"])
def test_an_hour_is_recorded(scrape: Scrape, clusters: tuple[str, ...], tmp_path: Path) -> None:
    """Each ended evacuation counts once, in time or late. A restart of the exporter adds none."""
    series: dict[str, str] = {}
    for cluster, restarts in zip(clusters, (False, True), strict=False):
        series |= an_hour(cluster, restarts=restarts)
    each = dict.fromkeys(clusters, 1.0)
    expected = [
        expect(
            dict.fromkeys(clusters, 2.0),
            "sum_over_time(cluster:kubevirt_vmi_evacuations_ended:count1m[1h])",
        ),
        expect(each, "sum_over_time(cluster:kubevirt_vmi_evacuations_ended_in_time:count1m[1h])"),
        expect(
            dict.fromkeys(clusters, 0.1),
            "round(cluster:kubevirt_eviction_exporter_migrations:rate5m, 0.001)",
        ),
        expect(
            dict.fromkeys(clusters, 3.0),
            "cluster:kubevirt_eviction_exporter_stuck_evacuations:max",
        ),
    ]
    code, said = evaluate(tmp_path, scrape, series, expected)

    assert code == 0, said


def test_one_cluster_ends_nothing_in_another(tmp_path: Path) -> None:
    """An ended evacuation counts, even if another cluster still evacuates a VM of the same name."""
    scrape = SCRAPES[0]
    series = {**an_hour("east"), **an_hour("west", ends=False)}
    ended = "sum_over_time(cluster:kubevirt_vmi_evacuations_ended:count1m[1h])"
    expected = [expect({"east": 2.0}, ended)]
    code, said = evaluate(tmp_path, scrape, series, expected)

    assert code == 0, said


def evaluate(
    directory: Path, scrape: Scrape, series: dict[str, str], expected: list[dict[str, Any]]
) -> tuple[int, str]:
    """Run promtool on these series with all rules."""
    values = [{"series": name, "values": values} for name, values in series.items()]
    case = scrape.case({"interval": "1m", "input_series": values, "alert_rule_test": []})
    case["promql_expr_test"] = expected
    write(directory / "rules.yaml", scrape.rules(load_groups()))
    document = {"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": [case]}
    return run("promtool", "test", "rules", write(directory / "cases.yaml", document))
