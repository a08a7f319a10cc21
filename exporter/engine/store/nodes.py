"""The nodes: which of them are closed, because they are cordoned or have KubeVirt's drain taint,
and which of them can take a VM.
"""

from collections import Counter
from collections.abc import Iterable
from copy import copy

from exporter.engine.facts.mappings import put_newest
from exporter.engine.facts.model import Instant, Node, Taint
from exporter.engine.facts.placement import (
    HOSTNAME,
    NO_EXECUTE,
    NO_SCHEDULE,
    UNSCHEDULABLE,
    Placement,
)


NODES_KEPT = 10_000
"""For how many nodes it is kept when their taints changed."""
REFUSALS_NAMED = 3
"""How many nodes a sentence names that cannot take a VM."""
NO_OTHER = "no other node exists"


class NodeIndex:
    """All nodes by name. `known_since`: when the nodes were first listed, or None.

    A taint that stays after an uncordon is left behind, and closes its node no more.
    """

    def __init__(self) -> None:
        self.known_since: Instant | None = None
        self._nodes: dict[str, Node] = {}
        self._left_behind: dict[str, frozenset[Taint]] = {}
        self._tainted: dict[str, Instant] = {}
        self._by_hostname: dict[str, frozenset[str]] = {}
        self._places: dict[Placement, tuple[str, ...]] = {}

    def __len__(self) -> int:
        return len(self._nodes)

    def copy(self) -> "NodeIndex":
        """A copy, which later changes do not reach."""
        other = NodeIndex()
        vars(other).update({name: copy(value) for name, value in vars(self).items()})
        return other

    def names(self) -> tuple[str, ...]:
        """The names of all nodes."""
        return tuple(self._nodes)

    def keys(self) -> list[tuple[str, str]]:
        """The names with an empty namespace."""
        return [("", name) for name in self._nodes]

    def record_list(self, at: Instant) -> bool:
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
        self._replace(known, node)
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
        node = self._nodes.get(name)
        self._replace(node, None)
        return node is not None

    def _replace(self, known: Node | None, node: Node | None) -> None:
        if known is not None:
            del self._nodes[known.name]
            self._rename(_find_hostname(known), frozenset({known.name}), frozenset())
        if node is not None:
            self._nodes[node.name] = node
            self._rename(_find_hostname(node), frozenset(), frozenset({node.name}))
        self._places.clear()

    def _rename(self, hostname: str, old: frozenset[str], new: frozenset[str]) -> None:
        names = self._by_hostname.pop(hostname, frozenset()) - old | new
        if names:
            self._by_hostname[hostname] = names

    def may_leave(self, name: str, placement: Placement) -> bool:
        """Whether some other node may take a VM of this node; true if no node was listed yet."""
        if self.known_since is None:
            return True
        places = self._places.get(placement)
        if places is None:
            places = self._places[placement] = self._find_places(placement)
        return any(place != name for place in places)

    def _find_places(self, placement: Placement) -> tuple[str, ...]:
        """The first two nodes that may take a VM, because it is on one node at most."""
        hostname, places = placement.hostname, list[str]()
        names: Iterable[str] = self._nodes
        if hostname:  # so that many VMs that are bound to one node each cost little
            names = self._by_hostname.get(hostname, ())
        for name in names:
            if not find_refusal(self._nodes[name], placement):
                places.append(name)
                if len(places) > 1:
                    break
        return tuple(places)

    def explain_refusals(self, name: str, placement: Placement) -> str:
        """Why no other node can take a VM of this node: "n2 is cordoned, n3 is not Ready"."""
        others = [node for node in self._nodes.values() if node.name != name]
        if not others:
            return NO_OTHER
        refusals = {node.name: find_refusal(node, placement) for node in others}
        if len(others) <= REFUSALS_NAMED:
            return ", ".join(f"{node} {why}" for node, why in sorted(refusals.items()))
        counts = Counter(refusals.values()).most_common(REFUSALS_NAMED)
        return "; ".join(f"of {count} nodes each {why}" for why, count in counts)

    def find_without_handler(self, name: str) -> list[str]:
        """The other nodes that are open, but that KubeVirt has marked because of virt-handler."""
        return sorted(
            node.name
            for node in self._nodes.values()
            if node.name != name and node.schedulable and node.is_ready and not node.takes_vms
        )

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


def find_refusal(node: Node, placement: Placement) -> str:
    """Why a node cannot take a VM, to complete "the node ..."; "" if it may take the VM."""
    if not node.schedulable and not placement.tolerates(UNSCHEDULABLE, "", NO_SCHEDULE):
        return "is cordoned"
    if not node.is_ready:
        return "is not Ready"
    for taints, effect in ((node.taints, NO_SCHEDULE), (node.evicting, NO_EXECUTE)):
        for taint in taints:
            if not placement.tolerates(taint.key, taint.value, effect):
                return f"has the taint {taint.key}:{effect}"
    if not node.takes_vms:
        return "has kubevirt.io/schedulable=false"
    if not placement.matches(node.name, node.labels):
        return "does not have the labels that the VM requires"
    return ""


def _find_hostname(node: Node) -> str:
    return next((value for key, value in node.labels if key == HOSTNAME), "")
