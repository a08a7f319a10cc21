"""Polling until a condition holds."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar


T = TypeVar("T")

PATIENCE = 120.0
"""The longest wait in seconds; an idle machine needs a few, a busy one more."""
_PAUSE = 0.05


async def poll(
    attempt: Callable[[], Awaitable[T | None]], *, what: str, within: float = PATIENCE
) -> T:
    """Repeat for `within` seconds until the result is true, and return it."""
    try:
        async with asyncio.timeout(within):
            # The condition is in another process, so there is no event to wait for.
            while not (answer := await attempt()):  # noqa: ASYNC110
                await asyncio.sleep(_PAUSE)
            return answer
    except TimeoutError:
        message = f"{what}: not within {within:g} s"
        raise TimeoutError(message) from None
