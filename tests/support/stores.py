"""A store with a clock, and the view that subscribes to it."""

from collections.abc import Iterable, Iterator

from exporter.engine.evacuations.conditions import Conditions
from exporter.engine.evacuations.drain import OutcomeCount, take_snapshot
from exporter.engine.facts.changes import (
    Listed,
    NamesByNamespace,
    NodesSeen,
    NoticeKind,
    Observed,
    Removed,
    Unreadable,
)
from exporter.engine.facts.evidence import Evidence, SavedVmi
from exporter.engine.facts.model import Fact, Instant, Resource, Why
from exporter.engine.facts.policy import Policy
from exporter.engine.facts.trust import NamespaceTrust, Trust
from exporter.engine.store.load import Load
from exporter.engine.store.store import Store
from exporter.engine.verdicts.view import Verdicts, VerdictView


READ_AT: Instant = 1_800_000_000.0


class ClockedStore(Store):
    """A store to which changes are applied at `now`, and which is read with `trust`.

    At first all resources are believed. `saved` is what a history file has. The methods return what
    `apply` returns.
    """

    def __init__(
        self,
        *saved: SavedVmi,
        keep: int = 64,
        now: Instant = 0.0,
        sees_nodes: bool | None = True,
        deschedulers: Iterable[str] = (),
    ) -> None:
        awaited = {vmi.uid: vmi for vmi in saved}
        super().__init__(endings_kept=keep, awaited=awaited, deschedulers=deschedulers)
        self.now = now
        self.trust = Trust()
        self.evacuations.sees_nodes = sees_nodes

    def hide(self, *resources: Resource) -> None:
        """Set which resources the exporter cannot see."""
        self.trust = a_trust(hidden=resources)
        self.apply(NodesSeen(Resource.NODES not in resources), self.now)

    def evidence(self, namespace: str, name: str, trust: Trust | None = None) -> Evidence | None:
        """Like `Store.evidence`."""
        return super().evidence(namespace, name, trust or self.trust)

    def all_evidence(self, trust: Trust | None = None) -> Iterator[Evidence]:
        """Like `Store.all_evidence`."""
        return super().all_evidence(trust or self.trust)

    def evacuating(self, trust: Trust | None = None) -> Iterator[Evidence]:
        """Like `Store.evacuating`."""
        return super().evacuating(trust or self.trust)

    def on_node(self, node: str, trust: Trust | None = None) -> list[Evidence]:
        """Like `Store.on_node`."""
        return super().on_node(node, trust or self.trust)

    def load(self, trust: Trust | None = None) -> Load | None:
        """Like `Store.load`."""
        return super().load(trust or self.trust)

    def put(self, fact: Fact, reasons: tuple[Why, ...] = ()) -> int:
        """Add or modify an object."""
        return self.apply(Observed(fact, reasons), self.now)

    def remove(self, resource: Resource, namespace: str, name: str, uid: str = "") -> int:
        """Delete an object."""
        return self.apply(Removed(resource, namespace, name, uid), self.now)

    def retain(self, resource: Resource, names: NamesByNamespace, namespace: str | None) -> int:
        """Apply a complete list."""
        return self.apply(Listed(resource, names, namespace), self.now)

    def record_unreadable(self, resource: Resource, namespace: str, name: str) -> int:
        """Mark an object as unreadable."""
        return self.apply(Unreadable(resource, namespace, name), self.now)


def a_trust(*dead: Resource, hidden: Iterable[Resource] = ()) -> Trust:
    """All resources are believed except these, in all namespaces."""
    return Trust(NamespaceTrust(frozenset(hidden), frozenset(dead)))


def put(store: Store, *facts: Fact, at: Instant = READ_AT) -> None:
    """Add or modify objects."""
    for fact in facts:
        store.apply(Observed(fact), at)


def remove(
    store: Store, resource: Resource, namespace: str, name: str, *, at: Instant = READ_AT
) -> None:
    """Delete an object."""
    store.apply(Removed(resource, namespace, name), at)


def a_verdict_view(store: Store, policy: Policy) -> VerdictView:
    """The verdict view of a store."""
    view = VerdictView(store, policy)
    store.subscribe(view.record_change, *NoticeKind)
    return view


def some_verdicts(store: Store, policy: Policy) -> Verdicts:
    """The verdicts of a store, of no instant yet."""
    verdicts = Verdicts(store, policy)
    store.subscribe(verdicts.record_change, *NoticeKind)
    return verdicts


def count_outcomes(store: Store, conditions: Conditions) -> OutcomeCount:
    """The drain outcomes of all VMIs of a store, without a pause."""
    verdicts = VerdictView(store, Policy()).read(conditions.now, conditions.trust)
    count = OutcomeCount(take_snapshot(store, conditions, verdicts.list_unsettled()))
    for _ in count:
        pass
    return count
