"""`make bench` measures, prints a table and stores the raw numbers; --write fills the document."""

import argparse
import json
import platform
import subprocess
import sys
import time
import traceback
from datetime import UTC, datetime
from pathlib import Path

from tests.bench.processes import ROOT, build_tools
from tests.bench.report import describe, render, write_document
from tests.bench.rows import PARTS, SMALL, Bench, Row, Sizes


def main() -> int:
    """Measure the named rows; returns how many failed. A missed target is no failure."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], help="the rows; default: all")
    parser.add_argument(
        "--small", action="store_true", help="tiny sizes, whose results mean nothing"
    )
    parser.add_argument("--repeats", type=int, help="how often each row is measured")
    parser.add_argument(
        "--write", action="store_true", help="write the results into their two documents"
    )
    arguments = parser.parse_args()
    sizes = SMALL if arguments.small else Sizes()
    if arguments.repeats:
        sizes = Sizes(repeats=arguments.repeats)
    build_tools()
    began = time.monotonic()
    bench = Bench(sizes, say=lambda line: print(line, file=sys.stderr, flush=True))
    rows: list[Row] = []
    broken: list[str] = []
    for part in arguments.parts or PARTS:
        try:
            rows += bench.run([part])
        except Exception:  # noqa: BLE001 (the other rows are kept)
            traceback.print_exc()
            broken.append(part)
    machine = describe_machine()
    table = render(rows, machine, bench.notes, minutes=(time.monotonic() - began) / 60)
    print(table)
    keep(bench, machine, table)
    if arguments.write and not broken:
        write_document(table, describe(bench.raw))
    return len(broken)


def describe_machine() -> dict[str, str]:
    """Describe the machine that measures."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    go = subprocess.run(["go", "env", "GOVERSION"], check=True, capture_output=True, text=True)
    load = Path("/proc/loadavg").read_text(encoding="utf-8").split()[0]
    return {
        "cpu": (models or ["unknown"])[0],
        "cores": str(len(models)),
        "python": platform.python_version(),
        "go": go.stdout.strip().removeprefix("go"),
        "kernel": platform.release(),
        "load": load,
        "date": datetime.now(UTC).date().isoformat(),
    }


def keep(bench: Bench, machine: dict[str, str], table: str) -> None:
    """Write the raw numbers and the table of this run to a folder that git ignores."""
    folder = ROOT / ".bench"
    folder.mkdir(exist_ok=True)
    name = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    raw = {"machine": machine, "raw": bench.raw, "notes": bench.notes}
    (folder / f"{name}.json").write_text(json.dumps(raw, indent=1), encoding="utf-8")
    (folder / f"{name}.md").write_text(table, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
