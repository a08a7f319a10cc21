"""Background tasks. They go on after an unexpected exception, which is logged and counted.

Each task of the program that runs until it is cancelled runs in `keep_running`. A task that ends by
itself, but whose exception nobody would retrieve, uses `noting_failure`.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import structlog

from exporter.engine.facts.model import Seconds


T = TypeVar("T")

FIRST_PAUSE: Seconds = 1.0
LONGEST_PAUSE: Seconds = 60.0
"""A task that fails again and again pauses for twice as long each time, up to this."""

log = structlog.stdlib.get_logger()


async def keep_running(
    name: str,
    job: Callable[[], Awaitable[None]],
    failures: Counter[str],
    *,
    fatal: tuple[type[Exception], ...] = (),
) -> None:
    """Run `job` until it is cancelled; run it again after an exception, except the `fatal` ones.

    A failure is counted by `name`. Raises what is `fatal`.
    """
    failures[name] += 0  # a series from the start, so that `increase` sees the first failure
    loop, pause = asyncio.get_running_loop(), FIRST_PAUSE
    while True:
        began = loop.time()
        with noting_failure(name, failures, fatal=fatal):
            await job()
        if loop.time() - began > LONGEST_PAUSE:
            pause = FIRST_PAUSE
        await asyncio.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)


async def run_in_slices(work: Iterable[None], *, most: int) -> None:
    """Run work that yields after each object. Let other tasks run after every `most` objects."""
    for number, _ in enumerate(work, 1):
        if number % most == 0:
            await asyncio.sleep(0)


async def complete(work: Generator[None, None, T]) -> T:
    """Run work that yields after each slice, and let other tasks run there; returns its result."""
    while True:
        try:
            next(work)
        except StopIteration as done:
            result: T = done.value
            return result
        await asyncio.sleep(0)


@contextmanager
def noting_failure(
    name: str, failures: Counter[str], *, fatal: tuple[type[Exception], ...] = ()
) -> Iterator[None]:
    """Log and count an exception of the block, and go on after it. Raises what is `fatal`."""
    try:
        yield
    except fatal:
        raise
    except Exception:
        failures[name] += 1
        log.exception("task_failed", task=name)
