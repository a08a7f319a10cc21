"""The nodes: which are cordoned or tainted, and since when the others are schedulable."""

from exporter.engine.facts.model import Instant, Node, Taint
from exporter.engine.facts.newest import put_newest


NODES_KEPT = 10_000
"""For how many nodes the end of the cordon is kept."""


class NodeIndex:
    """All nodes by name. `known_since`: when the nodes were first listed, or None."""

    def __init__(self) -> None:
        self.known_since: Instant | None = None
        self._nodes: dict[str, Node] = {}
        self._uncordoned: dict[str, Instant] = {}
        self._tainted: dict[str, Instant] = {}

    def __len__(self) -> int:
        return len(self._nodes)

    def copy(self) -> "NodeIndex":
        """A copy, which later changes do not reach."""
        other = NodeIndex()
        other.known_since = self.known_since
        other._nodes = self._nodes.copy()
        other._uncordoned, other._tainted = self._uncordoned.copy(), self._tainted.copy()
        return other

    def names(self) -> tuple[str, ...]:
        """The names of all nodes."""
        return tuple(self._nodes)

    def note_list(self, at: Instant) -> None:
        """Note that the nodes were listed."""
        if self.known_since is None:
            self.known_since = at

    def put(self, node: Node, at: Instant) -> bool:
        """Apply a node that was read at `at`; True if that changed anything."""
        known = self._nodes.get(node.name)
        if known == node:
            return False
        self._nodes[node.name] = node
        if known is not None and node.schedulable and not known.schedulable:
            put_newest(self._uncordoned, node.name, at, most=NODES_KEPT)
        if known is not None and node.taints != known.taints:
            put_newest(self._tainted, node.name, at, most=NODES_KEPT)
        return True

    def remove(self, name: str, at: Instant) -> bool:
        """Remove a node; True if it was known. A node that comes back is schedulable."""
        node = self._nodes.pop(name, None)
        if node is not None and not node.schedulable:
            put_newest(self._uncordoned, name, at, most=NODES_KEPT)
        return node is not None

    def find(self, name: str) -> Node | None:
        """The node of this name, or None."""
        return self._nodes.get(name)

    def is_cordoned(self, name: str) -> bool:
        """Whether a node is unschedulable; a node that is not known is schedulable."""
        node = self._nodes.get(name)
        return node is not None and not node.schedulable

    def find_taint(self, name: str, key: str) -> Taint | None:
        """The taint of a node with this key, or None."""
        node = self._nodes.get(name)
        return None if node is None else node.find_taint(key)

    def untainted_until(self, name: str) -> Instant | None:
        """When the taints of a node were last seen to change; None if they were never."""
        return self._tainted.get(name)

    def uncordoned_at(self, name: str) -> Instant | None:
        """When the cordon of a node was seen to end; None if it is cordoned, or no end was seen."""
        return None if self.is_cordoned(name) else self._uncordoned.get(name)

    def schedulable_since(self, name: str) -> Instant | None:
        """Since when a node has been schedulable; None if it is cordoned, or if that is unknown."""
        return None if self.is_cordoned(name) else self._uncordoned.get(name, self.known_since)
