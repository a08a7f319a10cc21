"""Polling until a condition holds."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar


T = TypeVar("T")

PATIENCE = 120.0
"""The longest wait in seconds. An idle machine needs a few seconds, a busy machine more."""
_PAUSE = 0.05


async def poll(
    attempt: Callable[[], Awaitable[T | None]], *, what: str, within: float = PATIENCE
) -> T:
    """Call `attempt` until its result is true, for at most `within` seconds; returns the result."""
    try:
        async with asyncio.timeout(within):
            # The condition is in another process, so there is no event to wait for.
            while not (answer := await attempt()):  # noqa: ASYNC110
                await asyncio.sleep(_PAUSE)
            return answer
    except TimeoutError:
        message = f"{what}: not within {within:g} s"
        raise TimeoutError(message) from None
