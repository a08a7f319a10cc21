"""Which nodes are cordoned, and since when the other nodes are schedulable.

Only cordoned nodes are watched, so every node that is not in the list is schedulable.
"""

from exporter.engine.facts.model import Instant, Node
from exporter.engine.facts.newest import put_newest


NODES_KEPT = 10_000
"""For how many nodes the end of the cordon is kept."""


class Cordons:
    """The cordoned nodes."""

    def __init__(self) -> None:
        self._known_since: Instant | None = None
        self._cordoned: dict[str, Node] = {}
        self._ended: dict[str, Instant] = {}

    def __len__(self) -> int:
        return len(self._cordoned)

    def __contains__(self, node: str) -> bool:
        return node in self._cordoned

    def names(self) -> tuple[str, ...]:
        """The names of the cordoned nodes."""
        return tuple(self._cordoned)

    def note_list(self, at: Instant) -> None:
        """Note that the cordoned nodes were listed."""
        if self._known_since is None:
            self._known_since = at

    def put(self, node: Node, at: Instant) -> bool:
        """Apply a node that was read at `at`; True if that changed anything."""
        if node.schedulable:
            return self.remove(node.name, at)
        is_news = self._cordoned.get(node.name) != node
        self._cordoned[node.name] = node
        return is_news

    def remove(self, node: str, at: Instant) -> bool:
        """Note that a node is not cordoned; True if it was cordoned until now."""
        if node not in self._cordoned:
            return False
        del self._cordoned[node]
        put_newest(self._ended, node, at, most=NODES_KEPT)
        return True

    def find(self, node: str) -> Node | None:
        """The node if it is cordoned, or else None."""
        return self._cordoned.get(node)

    def uncordoned_at(self, node: str) -> Instant | None:
        """When the cordon of a node was seen to end; None if it is cordoned, or no end was seen."""
        return None if node in self._cordoned else self._ended.get(node)

    def schedulable_since(self, node: str) -> Instant | None:
        """Since when a node has been schedulable; None if it is cordoned, or if that is unknown."""
        return None if node in self._cordoned else self._ended.get(node, self._known_since)
