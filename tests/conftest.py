"""What all tests share: the two API servers, the sizes of long proofs, and what they proved."""

import os
from collections.abc import AsyncIterator, Callable

import pytest
from hypothesis import Phase, settings

from tests.support.api_servers import RealStage, SimulatedStage, Stage, real_stage


SOAK = bool(os.environ.get("SOAK"))

settings.register_profile("test", derandomize=True, deadline=None, max_examples=100)
# A mutant need not be shown by the smallest example.
settings.register_profile(
    "mutants", settings.get_profile("test"), phases=[Phase.explicit, Phase.generate]
)
settings.register_profile("soak", deadline=None, max_examples=5000)
settings.load_profile("soak" if SOAK else "test")


@pytest.fixture
def prove(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Say what was proven and at which size: the run ends with all that was said."""

    def say(line: str) -> None:
        request.node.user_properties.append(("proven", line))

    return say


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what the long proofs have proven, with their sizes."""
    terminalreporter.section("proven, with sizes")
    for report in terminalreporter.getreports("passed"):
        for name, line in report.user_properties:
            if name == "proven" and report.when == "call":
                terminalreporter.write_line(str(line))


@pytest.fixture(scope="session")
async def real() -> AsyncIterator[RealStage]:
    """One real control plane for the whole run."""
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
