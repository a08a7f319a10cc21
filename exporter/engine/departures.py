"""When a VM last left each node by a successful migration."""

from exporter.engine.history import settle
from exporter.engine.model import Instant, MigrationState, Outcome


NODES_KEPT = 10_000
"""Of how many nodes a departure is kept; clusters with autoscaling have had more than they have."""


class Departures:
    """The end of the newest successful migration out of each node; "" is an unknown node."""

    def __init__(self) -> None:
        self.latest: dict[str, Instant] = {}

    def note(self, migration: MigrationState, now: Instant) -> None:
        """Apply a VMI's last migration, which was read at `now`."""
        end = settle(migration.end, now) if migration.outcome is Outcome.SUCCEEDED else None
        node = migration.source_node
        if end is None or end <= self.latest.get(node, 0.0):
            return
        self.latest.pop(node, None)
        self.latest[node] = end
        if len(self.latest) > NODES_KEPT:
            del self.latest[next(iter(self.latest))]
