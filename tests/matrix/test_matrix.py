"""What `make matrix` makes of a run, and where it keeps it."""

from pathlib import Path

import pytest

from tests.matrix.__main__ import read_report, reason
from tests.matrix.pairs import PAIRS, Result, keep, read_results


REPORT = """<testsuites><testsuite>
<testcase name="test_a">
<properties><property name="proven" value="rig: KubeVirt waits 20 s"/>
<property name="proven" value="rig: a wait of 3 s"/></properties>
</testcase>
<testcase name="test_b"><failure message="no"/></testcase>
<testcase name="test_c"><error message="no fixture"/></testcase>
<testcase name="test_d"><skipped message="KubeVirt 1.7.0: no backup"/></testcase>
</testsuite></testsuites>"""


def test_a_run_replaces_the_last_one_of_its_pair(tmp_path: Path) -> None:
    """The other results stay, in the order of the pairs."""
    path = tmp_path / "results.json"
    old, new = PAIRS[1].versions, PAIRS[0].versions
    for result in (Result(old, failed=["a"]), Result(new), Result(old, passed={"rig": 2})):
        keep(result, path)

    assert [(one.versions, one.failed, one.passed) for one in read_results(path)] == [
        (new, [], {}),
        (old, [], {"rig": 2}),
    ]


def test_what_pytest_reports(tmp_path: Path) -> None:
    """Failures and errors are named, reasons for skipping kept, and measurements of KubeVirt."""
    report = tmp_path / "report.xml"
    report.write_text(REPORT, encoding="utf-8")
    result = Result({})
    read_report(report, "rig", result)

    assert result.verdict == "passed: rig 1; failed: test_b, test_c; not there: backup"
    assert result.proven == ["rig: KubeVirt waits 20 s"]


def test_a_suite_that_reported_nothing_has_failed(tmp_path: Path) -> None:
    """A pytest that did not start is a failure too."""
    result = Result({})
    read_report(tmp_path / "report.xml", "rig", result)

    assert result.failed == ["rig did not run"]


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (
            (
                "go: downloading a.io/b v1.0.0\n/home/x/main.go:74:2: c.io/d@v2.0.0: reading "
                "https://proxy.example/c.io/d.zip: 403 Forbidden\n\tserver response: not served\n"
            ),
            "c.io/d@v2.0.0: 403 Forbidden",
        ),
        (
            (
                "go: e.io/f@v1.2.1 (replaced by e.io/f@v1.5.0): reading "
                "https://proxy.example/e.io/f.mod: 403 Forbidden\n"
            ),
            "e.io/f@v1.5.0: 403 Forbidden",
        ),
        ("# g.io/h\nmain.go:3: undefined: x\n", "main.go:3: undefined: x"),
    ],
    ids=["module", "replaced", "source"],
)
def test_why_a_version_cannot_be_built(said: str, why: str) -> None:
    """Which module is missing, without the address of a registry; else Go's last line."""
    assert reason(said) == why
