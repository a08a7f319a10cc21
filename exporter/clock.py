"""The wall clock of this machine, and what happens if somebody sets it.

The cluster's timestamps are compared with the wall clock. Ages of what was read, such as the last
contact with a watch, must not change when the clock is set. They are kept as instants of the wall
clock, and a step of the clock moves them before the new time is used for the first time.
"""

import time
from collections.abc import Callable

import structlog

from exporter.engine.facts.model import Instant, Seconds


STEP: Seconds = 2.0
"""The clock was set if it moved this much more than time has passed; NTP slews by less."""

log = structlog.stdlib.get_logger()


def read_elapsed() -> Seconds:
    """The seconds since the machine started, including the time for which it was suspended."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class WallClock:
    """The wall clock: a call returns the time. `on_step` are called with each step, in seconds."""

    def __init__(
        self,
        wall: Callable[[], Instant],
        elapsed: Callable[[], Seconds] = read_elapsed,
    ) -> None:
        self.on_step: list[Callable[[Seconds], None]] = []
        self._wall = wall
        self._elapsed = elapsed
        self._began = wall() - elapsed()

    def __call__(self) -> Instant:
        """The time now."""
        now = self._wall()
        began = now - self._elapsed()
        step = began - self._began
        self._began = began
        if abs(step) > STEP:
            log.warning("clock_stepped", seconds=round(step, 3))
            for move in self.on_step:
                move(step)
        return now
