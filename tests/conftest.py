"""Fixtures for all tests, and the summary of long tests with their sizes."""

import gc
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
from coverage import Coverage
from hypothesis import Phase, settings

from tests.needs import count_workers
from tests.support.api_servers import SimulatedStage
from tests.support.odd_certificates import write_certificates


# A background job of a script ignores SIGINT, and programs that a test starts would inherit this.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Each setting saves the servers in Go about a sixth of their CPU time. GOGC doubles their memory.
os.environ.setdefault("GOGC", "300")
os.environ.setdefault("GOMAXPROCS", "1")

IS_WORKER = "PYTEST_XDIST_WORKER" in os.environ
MEASURED_SECONDS = 0.3
"""CPU time of a test after which its coverage is not measured any more."""


def exclude_started_programs() -> None:
    """Measure coverage in the tests' own processes, and not in the programs that they start.

    With these, the tests would take almost twice as long, and show one percent more.
    """
    os.environ.pop("COVERAGE_PROCESS_CONFIG", None)


if IS_WORKER:
    exclude_started_programs()

# These tests need more than Python: CONTRIBUTING.md names the commands that run them.
collect_ignore = ["integration", "e2e", "vms"]

SOAK = bool(os.environ.get("SOAK"))

settings.register_profile("test", derandomize=True, deadline=None, max_examples=50)
# Any failing example is enough to notice a mutant, so Hypothesis need not shrink it.
settings.register_profile(
    "mutants",
    settings.get_profile("test"),
    max_examples=100,
    phases=[Phase.explicit, Phase.generate],
)
settings.register_profile("soak", deadline=None, max_examples=5000)
settings.load_profile("soak" if SOAK else "test")


def pytest_xdist_auto_num_workers() -> int:
    """The number of processes if pytest is called with `-n auto`."""
    return count_workers()


def pytest_collection_finish() -> None:
    """Spare the garbage collector what was imported, which saves a thirtieth of the time."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Iterator[None]:
    """Stop measuring coverage once a test has used `MEASURED_SECONDS` of CPU time.

    Such a test mostly repeats itself, and with coverage it takes two to four times as long.
    """
    coverage, is_stopped = Coverage.current() if IS_WORKER else None, False

    def stop(*_: object) -> None:
        nonlocal is_stopped
        if coverage:
            coverage.stop()
            is_stopped = True

    if coverage:
        signal.signal(signal.SIGVTALRM, stop)
        signal.setitimer(signal.ITIMER_VIRTUAL, MEASURED_SECONDS)
    try:
        return (yield)
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        if coverage and is_stopped:
            coverage.start()
            exclude_started_programs()  # `start` includes them again


@pytest.fixture(scope="session", autouse=True)
def temporary_files(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Temporary files go where pytest removes them, because killed programs leave theirs."""
    folder = str(tmp_path_factory.mktemp("files"))
    os.environ["TMPDIR"] = tempfile.tempdir = folder


@pytest.fixture
def prove(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Report a test's result and its size, to be printed at the end of the run."""

    def report(line: str) -> None:
        request.node.user_properties.append(("proven", line))

    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the results of the long tests, with their sizes."""
    terminalreporter.section("proven, with sizes")
    for report in terminalreporter.getreports("passed"):
        for name, line in report.user_properties:
            if name == "proven" and report.when == "call":
                terminalreporter.write_line(str(line))


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with certificates of `odd_certificates`."""
    folder = tmp_path_factory.mktemp("certificates")
    write_certificates(folder)
    return folder


@pytest.fixture
async def simulated() -> AsyncIterator[SimulatedStage]:
    """A simulated API server for one test."""
    async with SimulatedStage.opened() as stage:
        yield stage
