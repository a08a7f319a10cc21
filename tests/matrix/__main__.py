"""`make matrix` tests pairs of versions; `make matrix ONLY=1.7.0` only those with 1.7.0."""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from xml.etree import ElementTree as ET

from tests.matrix.document import write_document
from tests.matrix.pairs import ABOUT_KUBEVIRT, PAIRS, SUITES, Pair, Result, keep


ROOT = Path(__file__).parents[2]


def main(only: Sequence[str]) -> int:
    """Run the pairs that have one of these versions, or all; returns 1 if a test failed."""
    failed = False
    for pair in PAIRS:
        if only and not set(only) & set((pair.changed or pair.versions).values()):
            continue
        result = run(pair)
        print(f"{pair}: {result.verdict}", flush=True)
        for line in result.proven:
            print(f"  {line}")
        keep(result)
        write_document()
        failed = failed or bool(result.failed)
    return int(failed)


def run(pair: Pair) -> Result:
    """Build the versions that are not pinned, and run the pair's suites."""
    result = Result(pair.versions, date=datetime.now(UTC).date().isoformat(), commit=_describe())
    for part, version in pair.changed.items():
        command = [str(ROOT / "tests/tools/build"), f"{part}@{version}"]
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            result.unbuilt = reason(done.stderr)
            return result
    named = {part.replace("-", "_").upper(): one for part, one in pair.versions.items()}
    for suite in pair.suites:
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "report.xml"
            options = ["-q", "-m", "not soak", "--timeout", "900", f"--junitxml={report}"]
            subprocess.run(
                [sys.executable, "-X", "dev", "-m", "pytest", *options, SUITES[suite]],
                env=os.environ | named,
                stdout=sys.stderr,
                cwd=ROOT,
                check=False,
            )
            read_report(report, suite, result)
    return result


def read_report(report: Path, suite: str, result: Result) -> None:
    """Add the results of a suite from pytest's report."""
    if not report.exists():
        result.failed.append(f"{suite} did not run")
        return
    result.tests[suite] = []
    for case in ET.parse(report).iter("testcase"):  # noqa: S314 (written by pytest)
        skipped = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            result.failed.append(str(case.get("name")))
        elif skipped is not None:
            result.lacks.append(str(skipped.get("message")).partition(": no ")[2])
        else:
            result.tests[suite].append(str(case.get("name")))
            lines = [str(one.get("value")) for one in case.iter("property")]
            result.proven += [line for line in lines if line.startswith(ABOUT_KUBEVIRT)]


def _describe() -> str:
    """The checked out commit, with `+` if the checkout has changes."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--abbrev=12", "--exclude=*"]
    done = subprocess.run([*command, "--dirty=+"], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def reason(said: str) -> str:
    """The module that Go could not get, or the last line of Go's output."""
    refused = re.search(r"([\w./-]+@v[\w.+-]+)\)?: reading \S+: (.*)", said)
    return f"{refused[1]}: {refused[2]}" if refused else said.strip().splitlines()[-1]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
