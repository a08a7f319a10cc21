"""The clock of the simulation, and the actions that are due."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from datetime import datetime, timedelta


Action = Callable[[], object]


class ActionQueue:
    """Actions with the instants at which they are due, and the simulated time."""

    def __init__(self, start: datetime, speed: float) -> None:
        self.now = start
        self._speed = speed
        self._heap: list[tuple[datetime, int, str, Action]] = []
        self._order = itertools.count()
        self._due_of: dict[str, datetime] = {}
        """When the action of each key is due."""

    def after(self, seconds: float, action: Action, key: str = "") -> None:
        """Queue an action that is due after `seconds`, divided by the speed."""
        self.at(self.now + timedelta(seconds=seconds / self._speed), action, key)

    def at(self, due: datetime, action: Action, key: str = "") -> None:
        """Queue an action. For each key, only the earliest action is queued, as in a work queue."""
        if key:
            queued = self._due_of.get(key)
            if queued is not None and queued <= due:
                return
            self._due_of[key] = due
        heapq.heappush(self._heap, (due, next(self._order), key, action))

    def pop(self, until: datetime) -> Action | None:
        """Take the next action that is due by `until`, and set the clock to its instant."""
        while self._heap and self._heap[0][0] <= until:
            due, _, key, action = heapq.heappop(self._heap)
            if key:
                if self._due_of.get(key) != due:
                    # Replaced by an earlier one.
                    continue
                del self._due_of[key]
            self.advance(due)
            return action
        return None

    def advance(self, to: datetime) -> None:
        """Set the clock, but never to an earlier time."""
        self.now = max(self.now, to)
