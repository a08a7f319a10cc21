"""When the entries of `view` expire."""

import math
from collections.abc import Iterator
from heapq import heappop, heappush

from exporter.engine.facts.changes import Key
from exporter.engine.facts.model import Instant


SPARE = 1_000
"""At least this many instants at which nothing expires any more are kept before they are dropped.

To drop them takes 12 ms if 100,000 VMIs expire at as many instants.
"""


class Expiries:
    """The keys of what expires, by the instant of its expiry; `math.inf` is never."""

    def __init__(self) -> None:
        self._keys: dict[Instant, set[Key]] = {}
        self._instants: list[Instant] = []  # a heap, which has each instant of `_keys`

    def replace(self, key: Key, before: Instant, after: Instant) -> None:
        """Let a key expire at `after`, and no longer at `before`."""
        if before in self._keys:
            self._keys[before].discard(key)
            if not self._keys[before]:
                del self._keys[before]
        if after < math.inf:
            if after not in self._keys:
                self._keys[after] = set()
                heappush(self._instants, after)
            self._keys[after].add(key)
        if len(self._instants) > 2 * len(self._keys) + SPARE:
            self._instants = sorted(self._keys)

    def pop(self, now: Instant) -> Iterator[Key]:
        """Remove and yield what expires by `now`."""
        while self._instants and (self._instants[0] <= now or self._instants[0] not in self._keys):
            yield from self._keys.pop(heappop(self._instants), ())

    @property
    def next(self) -> Instant:
        """When something expires next; it may be earlier if something was replaced since `pop`."""
        return self._instants[0] if self._instants else math.inf
