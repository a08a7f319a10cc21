"""How `make matrix` reads the results of a run."""

from pathlib import Path

from tests.matrix.__main__ import read_report
from tests.matrix.pairs import Result


REPORT = """<testsuites><testsuite>
<testcase name="test_a">
<properties><property name="proven" value="rig: KubeVirt waits 20 s"/>
<property name="proven" value="rig: a wait of 3 s"/></properties>
</testcase>
<testcase name="test_b"><failure message="no"/></testcase>
<testcase name="test_c"><error message="no fixture"/></testcase>
<testcase name="test_d"><skipped message="KubeVirt 1.7.0: no backup"/></testcase>
</testsuite></testsuites>"""


def test_what_pytest_reports(tmp_path: Path) -> None:
    """A report gives failed tests, reasons for skipping, and measurements of KubeVirt."""
    report = tmp_path / "report.xml"
    report.write_text(REPORT, encoding="utf-8")
    result = Result({})
    read_report(report, "rig", result)

    assert result.verdict == "passed: rig 1; failed: test_b, test_c; missing: backup"
    assert result.proven == ["rig: KubeVirt waits 20 s"]


def test_a_suite_that_reported_nothing_has_failed(tmp_path: Path) -> None:
    """A suite without a report counts as failed, because pytest did not start."""
    result = Result({})
    read_report(tmp_path / "report.xml", "rig", result)

    assert result.failed == ["rig did not run"]
