"""Polling until a condition holds."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar


T = TypeVar("T")

PATIENCE = 120.0
"""The longest wait in seconds. An idle machine needs a few seconds, a busy machine more."""
_PAUSES = (0.05, 0.25)
"""The shortest and the longest pause between two attempts, in seconds."""


def pause_since(began: float) -> float:
    """How long to wait before the next attempt, if the first one was at this monotonic time.

    Each attempt takes CPU time of the servers under test. So a long wait asks less often, and takes
    at most a tenth longer than it must.
    """
    shortest, longest = _PAUSES
    return min(longest, max(shortest, (time.monotonic() - began) / 10))


async def poll(
    attempt: Callable[[], Awaitable[T | None]], *, what: str, within: float = PATIENCE
) -> T:
    """Call `attempt` until its result is true, for at most `within` seconds; returns the result."""
    began = time.monotonic()
    try:
        async with asyncio.timeout(within):
            # The condition is in another process, so there is no event to wait for.
            while not (answer := await attempt()):  # noqa: ASYNC110
                await asyncio.sleep(pause_since(began))
            return answer
    except TimeoutError:
        message = f"{what}: not within {within:g} s"
        raise TimeoutError(message) from None
