"""The stage of these tests: a real API server."""

from collections.abc import AsyncIterator

import pytest

from tests.support.api_servers import RealStage, Stage, real_stage


@pytest.fixture(scope="session")
async def real() -> AsyncIterator[RealStage]:
    """One real control plane for all tests of a worker."""
    async with real_stage() as stage:
        yield stage


@pytest.fixture
def stage(real: RealStage) -> Stage:
    """The real API server."""
    return real
