"""The nodes: which of them are closed, because they are cordoned or have KubeVirt's drain taint."""

from exporter.engine.facts.model import Instant, Node, Taint
from exporter.engine.facts.newest import put_newest


NODES_KEPT = 10_000
"""For how many nodes it is kept when their taints changed."""


class NodeIndex:
    """All nodes by name. `known_since`: when the nodes were first listed, or None.

    A taint that stays after an uncordon is left behind, and closes its node no more.
    """

    def __init__(self) -> None:
        self.known_since: Instant | None = None
        self._nodes: dict[str, Node] = {}
        self._left_behind: dict[str, frozenset[Taint]] = {}
        self._tainted: dict[str, Instant] = {}

    def __len__(self) -> int:
        return len(self._nodes)

    def copy(self) -> "NodeIndex":
        """A copy, which later changes do not reach."""
        other = NodeIndex()
        other.known_since = self.known_since
        other._nodes = self._nodes.copy()
        other._left_behind, other._tainted = self._left_behind.copy(), self._tainted.copy()
        return other

    def names(self) -> tuple[str, ...]:
        """The names of all nodes."""
        return tuple(self._nodes)

    def note_list(self, at: Instant) -> bool:
        """Note that the nodes were listed; True if this was the first list."""
        is_first = self.known_since is None
        if is_first:
            self.known_since = at
        return is_first

    def put(self, node: Node, at: Instant) -> bool:
        """Apply a node that was read at `at`; True if that changed anything."""
        known = self._nodes.get(node.name)
        if known == node:
            return False
        self._nodes[node.name] = node
        behind = self._left_behind.pop(node.name, frozenset())
        if known is not None and not known.schedulable:
            behind = frozenset(known.taints)
        if node.schedulable and (behind := behind.intersection(node.taints)):
            self._left_behind[node.name] = behind
        if known is not None and node.taints != known.taints:
            put_newest(self._tainted, node.name, at, most=NODES_KEPT)
        return True

    def remove(self, name: str) -> bool:
        """Remove a node; True if it was known. A node that is not known is open."""
        self._left_behind.pop(name, None)
        return self._nodes.pop(name, None) is not None

    def find(self, name: str) -> Node | None:
        """The node of this name, or None."""
        return self._nodes.get(name)

    def is_cordoned(self, name: str) -> bool:
        """Whether a node is unschedulable; a node that is not known is schedulable."""
        node = self._nodes.get(name)
        return node is not None and not node.schedulable

    def is_closed(self, name: str, taint: str) -> bool:
        """Whether a node is to be emptied: it is cordoned, or has the drain taint with this key."""
        node = self._nodes.get(name)
        if node is None or not node.schedulable:
            return node is not None
        added = node.find_taint(taint)
        return added is not None and added not in self._left_behind.get(name, ())

    def find_taint(self, name: str, key: str) -> Taint | None:
        """The taint of a node with this key, or None."""
        node = self._nodes.get(name)
        return None if node is None else node.find_taint(key)

    def untainted_until(self, name: str) -> Instant | None:
        """When the taints of a node were last seen to change; None if they were never."""
        return self._tainted.get(name)
