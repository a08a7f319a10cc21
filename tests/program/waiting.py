"""Waiting for what this process can see by itself."""

from collections.abc import Callable
from typing import TypeVar

from tests.cluster import PATIENCE, poll


T = TypeVar("T")


async def wait_until(holds: Callable[[], T | None], *, what: str, within: float = PATIENCE) -> T:
    """Call `holds` until its result is true; returns the result."""

    async def attempt() -> T | None:
        return holds()

    return await poll(attempt, what=what, within=within)
