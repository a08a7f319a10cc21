"""The descheduler's plugin: its Go tests under the race detector, its cost, and its image."""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest


FOLDER = Path(__file__).parents[3] / "deploy/descheduler"
DOCKERFILE = (FOLDER / "Dockerfile").read_text(encoding="utf-8")

# Compiling Kubernetes' libraries for the race detector takes minutes if nothing is cached.
pytestmark = pytest.mark.timeout(1800)


def run_go(*arguments: str, cgo: bool = False) -> str:
    """Run `go`; returns its output, or fails the test with that output.

    Without cgo the flags are those of `tests/tools/build`, so that its compiled packages are
    reused. `make check` runs `go vet`, so the tests do not.
    """
    flags = "-mod=readonly -buildvcs=false" if cgo else "-mod=readonly -trimpath -buildvcs=false"
    env = os.environ | {"CGO_ENABLED": str(int(cgo)), "GOWORK": "off", "GOFLAGS": flags}
    # With one thread the race detector would find less.
    del env["GOMAXPROCS"]
    done = subprocess.run(
        ["go", *arguments], cwd=FOLDER, env=env, capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.fail(f"go {' '.join(arguments)}:\n{done.stdout}{done.stderr}", pytrace=False)
    return done.stdout


def test_its_tests_pass_under_the_race_detector(prove: Callable[[str], None]) -> None:
    """The plugin's own tests pass, and the race detector finds no race.

    Without a C compiler the test is skipped, and in CI it fails.
    """
    compiler = run_go("env", "CC").strip()
    if shutil.which(compiler) is None:
        missing = (
            f"Go's race detector needs a C compiler and {compiler} is not on the PATH"
            " (Debian: gcc and libc6-dev; or set CC)"
        )
        if "CI" in os.environ:
            pytest.fail(missing, pytrace=False)
        pytest.skip(missing)
    output = run_go("test", "-race", "-vet=off", "-count=1", "-v", "./verdicts/...", cgo=True)
    passed = re.findall(r"^--- PASS: (\w+)", output, re.MULTILINE)
    assert "TestNewLeaksNothing" in passed
    prove(f"descheduler plugin: {len(passed)} tests passed under the race detector")
    for line in re.findall(r"proven: (.+)", output):
        prove(f"descheduler plugin: {line}")


def test_the_policy_is_one_that_the_descheduler_takes() -> None:
    """The descheduler's own loader accepts `policy.yaml`, with the plugin at both checkpoints."""
    run_go("test", "-vet=off", "-count=1", ".")


def test_an_allowed_pod_allocates_nothing(prove: Callable[[str], None]) -> None:
    """`Filter` for an allowed pod allocates nothing, with 5,000 blocked VMIs."""
    output = run_go("test", "-vet=off", "-run=^$", "-bench=FilterAllowed", "-count=3", "./verdicts")
    rows = re.findall(r"^Benchmark\S+\s+\d+\s+([\d.]+) ns/op\s+(\d+) B/op", output, re.MULTILINE)
    costs = [float(nanoseconds) for nanoseconds, _ in rows]
    assert len(costs) == 3, output
    assert {size for _, size in rows} == {"0"}
    prove(f"descheduler plugin: Filter of an allowed pod, 5000 blocked: {min(costs):g} ns, 0 bytes")


def test_its_image_stands_in_for_the_stock_one() -> None:
    """The binary has the stock image's path, and the user is not root."""
    entry = re.findall(r"^ENTRYPOINT (.+)", DOCKERFILE, re.MULTILINE)
    assert json.loads(entry[0]) == ["/bin/descheduler"]
    assert re.search(r"^USER [1-9]\d*:[1-9]\d*$", DOCKERFILE, re.MULTILINE)
