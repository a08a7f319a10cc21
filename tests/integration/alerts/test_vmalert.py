"""The promtool cases in vmalert-tool, which evaluates and stores as VictoriaMetrics does."""

import re
from pathlib import Path

import pytest
import yaml

from tests.generate.rules import CASES, load_groups
from tests.integration.alerts.scaling import read_duration, write_duration
from tests.integration.alerts.scrapes import Case
from tests.integration.alerts.test_rules import cases, run, write_cases


EVERY = "20s"
"""How often vmalert evaluates."""
LATER = "40s"
"""How much later an alert may change: vmalert reads recorded series one evaluation later, and there
are two layers of recording rules."""
FROM_2000 = "vmalert-tool's clock begins in 2000, promtool's in 1970"
DIFFERENT = {
    "migrations to n33 fail, of three VMs, and again after a restart of the exporter": (
        "increase() counts the first sample of a series as an increase from 0"
    ),
    "a certificate is valid for less than 14 days from the tenth minute on, until it is renewed": (
        FROM_2000
    ),
    "silent, because cert-manager renews the certificate a month before it expires": FROM_2000,
}
"""The cases that do not hold, and why."""


def postpone(case: Case) -> Case:
    """The case with each expectation later by `LATER`."""

    def later(time: str) -> str:
        return write_duration(read_duration(time) + read_duration(LATER))

    tests = [{**test, "eval_time": later(test["eval_time"])} for test in case["alert_rule_test"]]
    return {**case, "alert_rule_test": tests}


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_the_cases_hold_in_vmalert(path: Path, tmp_path: Path) -> None:
    """Each alert fires and ends as in Prometheus, at most two evaluations later."""
    tests = [postpone(case) for case in yaml.safe_load(path.read_text())["tests"]]
    failed: set[str] = set()
    for file in write_cases(tmp_path, load_groups(), tests, EVERY):
        code, output = run("vmalert-tool", "unittest", "--disableAlertgroupLabel", "--files", file)
        names = set(re.findall(r"^testGroupName: (.*),$", output, re.MULTILINE))
        assert bool(code) == bool(names), output
        failed |= names

    assert failed == {case["name"] for case in tests} & set(DIFFERENT)


def test_each_difference_is_of_a_case() -> None:
    """A case that does not hold still exists."""
    assert {case["name"] for case in cases()} >= set(DIFFERENT)
