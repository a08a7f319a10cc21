"""Runs scenarios one after another: `python -m tests.months [NAME ...] --seeds 1 2 3`.

With `--write` the results replace the earlier ones of the same scenarios in `results.json`, and
docs/alerts.md shows them.
"""

from __future__ import annotations

import argparse
import logging
import time
from pathlib import Path

import structlog

from tests.generate.rules import RULES
from tests.months.bench import Bench
from tests.months.report import Result, Run, format_run, read
from tests.months.results import write_results
from tests.months.scenarios import SCENARIOS


def run_scenario(name: str, seed: int, rules: Path = RULES) -> Run:
    """Run one scenario."""
    scenario = SCENARIOS[name]
    bench = Bench(seed, scenario.setup)
    scenario.fill(bench)
    return read(seed, bench.run(rules), bench.faults, bench.truth, lists=scenario.lists)


def main() -> None:
    """Run what the command line names."""
    parser = argparse.ArgumentParser(prog="python -m tests.months")
    parser.add_argument("names", nargs="*", metavar="NAME", help="scenarios; all if none is given")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1])
    parser.add_argument("--rules", type=Path, default=RULES, help="another file of rules")
    parser.add_argument("--write", action="store_true", help="write docs/alerts.md")
    given = parser.parse_args()
    unknown = sorted(set(given.names) - set(SCENARIOS))
    if unknown:
        parser.error(f"no such scenario: {', '.join(unknown)}; there are {', '.join(SCENARIOS)}")
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    for name in given.names or SCENARIOS:
        results: list[Result] = []
        for seed in given.seeds:
            began = time.monotonic()
            run = run_scenario(name, seed, given.rules)
            print(*format_run(name, run), sep="\n")
            print(f"  took {time.monotonic() - began:.0f} s", flush=True)
            results.append(run.result)
        if given.write:
            write_results(name, results)


if __name__ == "__main__":
    main()
