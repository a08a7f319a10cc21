"""Fixtures for all tests, the summary of long tests with their sizes, and the mark `quick`."""

import inspect
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import CodeType, FunctionType

import pytest
from hypothesis import Phase, settings

from tests.support.api_servers import RealStage, SimulatedStage, Stage, real_stage


# A background job of a script ignores SIGINT, and programs that a test starts would inherit this.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Each setting saves the servers in Go about a sixth of their CPU time. GOGC doubles their memory.
os.environ.setdefault("GOGC", "300")
os.environ.setdefault("GOMAXPROCS", "1")

# These tests need root, containerd and built images. Only `make e2e` and `make vms` run them.
collect_ignore = ["e2e", "vms"]

QUICK = ("unit", "docs", "support")
FIRST = (
    "integration/descheduling/test_webhook.py",
    "integration/alerts/test_rules.py",
    "integration/kubevirt/test_rig.py",
    "integration/deploy/test_from_nothing.py",
    "integration/descheduling/test_scenes.py",
    "integration/alerts/test_practice.py",
    "integration/descheduling/test_gate.py",
    "integration/alerts/test_dashboards_live.py",
    "program/test_crowds.py",
    "integration/apiserver/test_events.py",
    "integration/apiserver/test_admission_live.py",
    "integration/alerts/test_alerts_live.py",
    "integration/deploy/test_admission.py",
    "integration/kubevirt/test_node_drains.py",
    "integration/kubevirt/test_requesters.py",
    "program/test_sequences.py",
    "integration/apiserver/test_stored_history.py",
    "integration/kubevirt/test_drains.py",
    "integration/deploy/test_chart.py",
    "integration/apiserver/test_access.py",
    "integration/deploy/test_install.py",
    "program/test_browser.py",
    "integration/chaos/test_dead_sources.py",
    "integration/alerts/test_runbooks.py",
)
"""The files that run first, in this order: those that mostly wait (the longest first), alternating
with those that mostly compute. So the cores are rarely idle, and no worker has a long file at the
end."""
SOAK = bool(os.environ.get("SOAK"))

settings.register_profile("test", derandomize=True, deadline=None, max_examples=100)
# Any failing example is enough to notice a mutant, so Hypothesis need not shrink it.
settings.register_profile(
    "mutants", settings.get_profile("test"), phases=[Phase.explicit, Phase.generate]
)
settings.register_profile("soak", deadline=None, max_examples=5000)
settings.load_profile("soak" if SOAK else "test")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort `FIRST` to the start, and mark as quick what is in `QUICK` and uses no built tool."""
    places = {name: place for place, name in enumerate(FIRST)}
    here = Path(__file__).parent
    items.sort(key=lambda item: places.get(str(item.path.relative_to(here)), len(FIRST)))
    reached: dict[object, bool] = {}
    for item in items:
        folder = item.path.relative_to(Path(__file__).parent).parts[0]
        if folder in QUICK and isinstance(item, pytest.Function):
            definitions = item._fixtureinfo.name2fixturedefs.values()  # noqa: SLF001
            fixtures = [definition.func for group in definitions for definition in group]
            if not any(_reaches_tools(start, reached) for start in (item.function, *fixtures)):
                item.add_marker(pytest.mark.quick)


def _reaches_tools(code: object, reached: dict[object, bool]) -> bool:
    """Whether a function or class of the tests can call into `tests.cluster.binaries`."""
    code = inspect.unwrap(code) if callable(code) else code
    if not isinstance(code, FunctionType | type) or not code.__module__.startswith("tests."):
        return False
    if code.__module__ == "tests.cluster.binaries" and isinstance(code, FunctionType):
        return True
    if code not in reached:
        reached[code] = False
        reached[code] = any(_reaches_tools(used, reached) for used in _find_used(code))
    return reached[code]


def _find_used(code: FunctionType | type) -> Iterator[object]:
    """The globals that a function names, or the members of a class."""
    if isinstance(code, type):
        for member in vars(code).values():
            yield getattr(member, "fget", None) or getattr(member, "__func__", member)
        return
    for name in _find_names(code.__code__):
        yield code.__globals__.get(name)


def _find_names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _find_names(constant)


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
async def real() -> AsyncIterator[RealStage]:
    """One real control plane for all tests."""
    async with real_stage() as stage:
        yield stage


@pytest.fixture
async def simulated() -> AsyncIterator[SimulatedStage]:
    """A simulated API server for one test."""
    async with SimulatedStage.opened() as stage:
        yield stage


@pytest.fixture(params=["simulated", "real"])
def stage(request: pytest.FixtureRequest) -> Stage:
    """Each of the two API servers in turn."""
    chosen = request.getfixturevalue(request.param)
    assert isinstance(chosen, Stage)
    return chosen
