"""The rig that files share if they leave nothing behind on it."""

from collections.abc import AsyncIterator

import pytest

from tests.cluster.rig import Rig


@pytest.fixture(scope="session")
async def rig() -> AsyncIterator[Rig]:
    """KubeVirt's servers and three nodes. Their start takes ten seconds of CPU time."""
    async with Rig.opened() as rig:
        yield rig
