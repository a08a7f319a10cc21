"""Tests of the recording rules for long time ranges, in promtool."""

from pathlib import Path
from typing import Any

import pytest

from tests.generate.rules import load_groups
from tests.integration.alerts.scrapes import SCRAPES, Scrape
from tests.integration.alerts.test_rules import run, write


EXPORTER = "kubevirt_eviction_exporter"
DURATION = f"{EXPORTER}_evacuation_duration_seconds"


def an_hour(cluster: str, *, succeeded: float = 4.0) -> dict[str, str]:
    """The series of a cluster in which `succeeded` evacuations end each minute, half of them late.

    Every replica counts those that it sees end: one replica misses half of them. An agent between
    the exporter and Prometheus may write a bucket's bound without `.0`. A drain ends every two
    minutes.
    """
    labels = f', cluster="{cluster}"' if cluster else ""
    return {
        **{
            f'{DURATION}_{name}source="other", instance="{instance}"{labels}}}': f"0+{count}x60"
            for instance, seen, bound in (("a", succeeded, "1800"), ("b", succeeded / 2, "1800.0"))
            for name, count in (("count{", seen), (f'bucket{{le="{bound}", ', seen / 2))
        },
        **{
            f'{EXPORTER}_migrations_total{{outcome="failed",trigger="evacuation",'
            f'reason="{reason}"{labels}}}': "0+3x60"
            for reason in ("timeout", "other")
        },
        f'{EXPORTER}_drains_total{{outcome="cancelled"{labels}}}': "0+0.5x60",
        f'{EXPORTER}_stuck_evacuations{{source="other",state="backoff"{labels}}}': "2x60",
        f'{EXPORTER}_stuck_evacuations{{source="unknown",state="quota"{labels}}}': "1x60",
        f'{EXPORTER}_synced{{resource="virtualmachineinstances"{labels}}}': "1x60",
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
    """The rates of each cluster are those of its own series, whatever the scrape."""
    series: dict[str, str] = {}
    for cluster in clusters:
        series |= an_hour(cluster)
    every = {
        f"60 * source:{EXPORTER}_evacuations_succeeded:rate5m": 4.0,
        f"60 * source:{EXPORTER}_evacuations_in_time:rate5m": 2.0,
        f"cluster:{EXPORTER}_migrations:rate5m": 0.1,
        f"60 * cluster:{EXPORTER}_drains:rate5m": 0.5,
        f"cluster:{EXPORTER}_stuck_evacuations:max": 3.0,
    }
    expected = [
        expect(dict.fromkeys(clusters, value), f"round({rate}, 0.001)")
        for rate, value in every.items()
    ]
    code, output = evaluate(tmp_path, scrape, series, expected)

    assert code == 0, output


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
