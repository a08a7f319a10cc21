"""Which nodes are cordoned, and since when others are schedulable.

Only cordoned nodes are watched: a node that is not listed, or not any more, is schedulable.
"""

from exporter.engine.model import Instant, Node


NODES_KEPT = 10_000
"""Of how many nodes the end of a cordon is kept."""


class Cordons:
    """The cordoned nodes."""

    def __init__(self) -> None:
        self._known_since: Instant | None = None
        self._since: dict[str, Instant | None] = {}
        self._ended: dict[str, Instant] = {}

    def __len__(self) -> int:
        return len(self._since)

    def __contains__(self, node: str) -> bool:
        return node in self._since

    def names(self) -> tuple[str, ...]:
        """The names of the cordoned nodes."""
        return tuple(self._since)

    def note_list(self, at: Instant) -> None:
        """The cordoned nodes were listed."""
        if self._known_since is None:
            self._known_since = at

    def put(self, node: Node, at: Instant) -> bool:
        """Apply a node that was read at `at`; True if that changed anything."""
        if node.schedulable:
            return self.remove(node.name, at)
        is_news = node.name not in self._since or self._since[node.name] != node.cordoned_at
        self._since[node.name] = node.cordoned_at
        return is_news

    def remove(self, node: str, at: Instant) -> bool:
        """A node is not cordoned any more; True if it was."""
        if node not in self._since:
            return False
        del self._since[node]
        self._ended[node] = at
        if len(self._ended) > NODES_KEPT:
            del self._ended[next(iter(self._ended))]
        return True

    def cordoned_at(self, node: str) -> Instant | None:
        """When a node was cordoned; None if it is not, or if the node does not have that time."""
        return self._since.get(node)

    def uncordoned_at(self, node: str) -> Instant | None:
        """When a node was seen to become schedulable; None if it is not, or always was."""
        return None if node in self._since else self._ended.get(node)

    def schedulable_since(self, node: str) -> Instant | None:
        """Since when a node has been seen schedulable; None if it is not, or if that is unknown."""
        return None if node in self._since else self._ended.get(node, self._known_since)
