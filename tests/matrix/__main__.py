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
from tests.matrix.pairs import ABOUT_KUBEVIRT, PAIRS, SUITES, TESTED, Pair, Result, keep


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
    named = {part.replace("-", "_").upper(): version for part, version in pair.versions.items()}
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        options = ["-q", "-m", "not soak", "--timeout", "900", f"--junitxml={report}"]
        workers = ["-n", str(len(pair.suites)), "--dist", "loadfile"]
        suites = [SUITES[suite] for suite in pair.suites]
        subprocess.run(
            [sys.executable, "-X", "dev", "-m", "pytest", *options, *workers, *suites],
            env=os.environ | named,
            stdout=sys.stderr,
            cwd=ROOT,
            check=False,
        )
        read_report(report, pair.suites, result)
    return result


def read_report(report: Path, suites: Sequence[str], result: Result) -> None:
    """Add the results of these suites from pytest's report."""
    cases = list(ET.parse(report).iter("testcase")) if report.exists() else []  # noqa: S314 (written by pytest)
    for suite in suites:
        module = SUITES[suite].removesuffix(".py").replace("/", ".")
        of_suite = [case for case in cases if case.get("classname") == module]
        if not of_suite:
            result.failed.append(f"{suite} did not run")
            continue
        result.tests[suite] = []
        for case in of_suite:
            skipped = case.find("skipped")
            if case.find("failure") is not None or case.find("error") is not None:
                result.failed.append(str(case.get("name")))
            elif skipped is not None:
                result.lacks.append(str(skipped.get("message")).partition(": no ")[2])
            else:
                result.tests[suite].append(str(case.get("name")))
                lines = [str(field.get("value")) for field in case.iter("property")]
                result.proven += [line for line in lines if line.startswith(ABOUT_KUBEVIRT)]


def _describe() -> str:
    """The checked out commit, with `+` if what is tested has changes."""
    git = ["git", "-C", str(ROOT)]
    head = subprocess.check_output([*git, "rev-parse", "--short=12", "HEAD"], text=True).strip()
    changed = subprocess.check_output([*git, "status", "--porcelain", "--", *TESTED])
    return f"{head}+" if changed else head


def reason(output: str) -> str:
    """The module that Go could not get, or the last line of Go's output."""
    refused = re.search(r"([\w./-]+@v[\w.+-]+)\)?: reading \S+: (.*)", output)
    return f"{refused[1]}: {refused[2]}" if refused else output.strip().splitlines()[-1]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
