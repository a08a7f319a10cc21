"""Polling until a condition holds."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar


T = TypeVar("T")

PATIENCE = 120.0
"""Seconds for what comes within a few on an idle machine; a busy one may take its time."""
_PAUSE = 0.05


async def poll(
    attempt: Callable[[], Awaitable[T | None]], *, what: str, within: float = PATIENCE
) -> T:
    """Repeat for `within` seconds until the result is true, and return it."""
    try:
        async with asyncio.timeout(within):
            # No event to wait for: what is awaited is in another process.
            while not (answer := await attempt()):  # noqa: ASYNC110
                await asyncio.sleep(_PAUSE)
            return answer
    except TimeoutError:
        message = f"{what}: not within {within:g} s"
        raise TimeoutError(message) from None
