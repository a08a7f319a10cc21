"""The stage of these tests: the simulated API server."""

import pytest

from tests.support.api_servers import SimulatedStage, Stage


@pytest.fixture
def stage(simulated: SimulatedStage) -> Stage:
    """The simulated API server."""
    return simulated
