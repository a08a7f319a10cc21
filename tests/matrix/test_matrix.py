"""How `make matrix` reads the results of a run."""

import re
import subprocess
from pathlib import Path

import pytest

from tests.cluster import versions
from tests.generate.release import find_stale
from tests.matrix.__main__ import read_report
from tests.matrix.pairs import SUITES, Result
from tests.support.documents import ROOT


RIG = SUITES["rig"].removesuffix(".py").replace("/", ".")
REPORT = f"""<testsuites><testsuite>
<testcase classname="{RIG}" name="test_a">
<properties><property name="proven" value="rig: KubeVirt waits 20 s"/>
<property name="proven" value="rig: a wait of 3 s"/></properties>
</testcase>
<testcase classname="{RIG}" name="test_b"><failure message="no"/></testcase>
<testcase classname="{RIG}" name="test_c"><error message="no fixture"/></testcase>
<testcase classname="{RIG}" name="test_d">
<skipped message="KubeVirt 1.7.0: no backup"/></testcase>
</testsuite></testsuites>"""


def test_what_pytest_reports(tmp_path: Path) -> None:
    """A report gives failed tests, reasons for skipping, and measurements of KubeVirt."""
    report = tmp_path / "report.xml"
    report.write_text(REPORT, encoding="utf-8")
    result = Result({})
    read_report(report, ["rig"], result)

    assert result.verdict == "passed: rig 1; failed: test_b, test_c; missing: backup"
    assert result.proven == ["rig: KubeVirt waits 20 s"]


def test_a_row_is_stale_if_what_it_tested_has_changed() -> None:
    """`make release-check` names stale rows, and the command that runs them again."""
    command = ["git", "-C", str(ROOT), "rev-list", "--max-parents=0", "HEAD"]
    first = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[0]
    versions = {"kubevirt": "1.7.0", "kube-apiserver": "1.36.3"}
    unbuilt = Result(versions, unbuilt="no module")
    rows = [Result(versions, commit=commit) for commit in ("HEAD", first, "", "unknown")]

    changed, without, unknown = find_stale([*rows, unbuilt])
    assert re.fullmatch(
        r"kubevirt 1\.7\.0, kube-apiserver 1\.36\.3: \S+ and \d+ more files changed after"
        rf" {first}: run make matrix ONLY=1\.7\.0",
        changed,
    )
    assert "commit unknown is not in this history" in without
    assert "commit unknown is not in this history" in unknown


def test_a_suite_that_reported_nothing_has_failed(tmp_path: Path) -> None:
    """A suite without a case in the report counts as failed, and so does one without a report."""
    result = Result({})
    read_report(tmp_path / "report.xml", ["rig"], result)

    assert result.failed == ["rig did not run"]

    report = tmp_path / "report.xml"
    report.write_text(REPORT, encoding="utf-8")
    result = Result({})
    read_report(report, ["rig", "watch"], result)

    assert result.failed == ["test_b", "test_c", "watch did not run"]
    assert result.tests == {"rig": ["test_a"]}


def test_a_pre_release_has_the_features_of_its_release(monkeypatch: pytest.MonkeyPatch) -> None:
    """1.38.0-beta.0 is at least 1.38 and 1.37, and not 1.39."""
    monkeypatch.setitem(versions.RUNNING, "kube-apiserver", "1.38.0-beta.0")
    assert versions.is_kubernetes_at_least("1.38")
    assert versions.is_kubernetes_at_least("1.37.2")
    assert not versions.is_kubernetes_at_least("1.39")
