"""When a VM last left each node by a successful migration."""

from exporter.engine.facts.history import settle
from exporter.engine.facts.model import Instant
from exporter.engine.facts.newest import put_newest


NODES_KEPT = 10_000
"""For how many nodes a departure is kept: limited, because autoscaling creates new nodes."""


class Departures:
    """The end of the newest successful migration out of each node; "" is an unknown node."""

    def __init__(self) -> None:
        self._latest: dict[str, Instant] = {}

    def record(self, node: str, end: Instant | None, now: Instant) -> None:
        """Note a successful migration out of a node, read at `now`; `end` is None if unknown."""
        end = settle(end, now)
        if end is not None and end > self._latest.get(node, 0.0):
            put_newest(self._latest, node, end, most=NODES_KEPT)

    def read_newest(self) -> tuple[dict[str, Instant], Instant | None]:
        """The newest end for each node, and the newest end of all nodes (None if there is none)."""
        return self._latest.copy(), max(self._latest.values(), default=None)
