"""An event loop with simulated time, which passes only while all tasks wait.

Durations that a test measures in this loop are exact, also on a busy machine.
"""

import asyncio
from collections.abc import Callable, Coroutine
from functools import wraps
from selectors import DefaultSelector, SelectorKey
from typing import Any, ParamSpec


class _Selector(DefaultSelector):
    """A selector that skips all waiting time."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[SelectorKey, int]]:
        self.now += timeout or 0.0
        return super().select(0)


class Loop(asyncio.SelectorEventLoop):
    """An event loop whose time passes only while all its tasks wait."""

    def __init__(self) -> None:
        self.selector = _Selector()
        super().__init__(self.selector)

    def time(self) -> float:
        return self.selector.now


P = ParamSpec("P")


def in_its_own_time(story: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Run a test in simulated time."""

    @wraps(story)
    def play(*arguments: P.args, **named: P.kwargs) -> None:
        with asyncio.Runner(loop_factory=Loop) as runner:
            runner.run(story(*arguments, **named))

    return play


def now() -> float:
    """The loop's time, 0 at the beginning of a test."""
    return asyncio.get_running_loop().time()
