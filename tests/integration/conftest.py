"""The stage of these tests, a real API server, and which files share the servers of a worker."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling  # type: ignore[import-untyped]

from tests.support.api_servers import RealStage, Stage, real_stage


TOGETHER = {
    f"tests/integration/{folder}/test_{name}.py": folder
    for folder, names in {
        "apiserver": ("access", "attacks", "both_servers", "events"),
        "deploy": ("callers", "descheduler", "install", "roles", "switch"),
        "kubevirt": ("migration_causes", "moves", "node_drains", "requesters", "taint_drains"),
    }.items()
    for name in names
}
"""Files that one worker runs one after another, because it starts their servers only once."""


class TogetherScheduling(LoadFileScheduling):  # type: ignore[misc]
    """Distributes files as `loadfile` does, except that some go to one worker."""

    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        return TOGETHER.get(file, file)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> TogetherScheduling | None:
    """Distribute the tests, if `loadfile` is chosen."""
    return TogetherScheduling(config, log) if config.getoption("dist") == "loadfile" else None


@pytest.fixture(scope="session")
async def real() -> AsyncIterator[RealStage]:
    """One real control plane for all tests of a worker."""
    async with real_stage() as stage:
        yield stage


@pytest.fixture
def stage(real: RealStage) -> Stage:
    """The real API server."""
    return real
