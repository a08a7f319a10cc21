"""A store with a clock, and the view and pending changes that subscribe to it."""

from collections.abc import Mapping
from collections.abc import Set as AbstractSet

from exporter.engine.facts.changes import (
    Forgotten,
    Listed,
    Names,
    NoticeKind,
    Observed,
    Removed,
    Unreadable,
    Visibility,
)
from exporter.engine.facts.evidence import Remembered
from exporter.engine.facts.model import Fact, Instant, Resource, Why
from exporter.engine.facts.policy import Policy
from exporter.engine.store.store import Store
from exporter.engine.verdicts.view import VerdictView
from exporter.history.changes import PendingChanges


READ_AT: Instant = 1_800_000_000.0


class ClockedStore(Store):
    """A store with full visibility, to which changes are applied at `now`.

    The methods return what `apply` returns.
    """

    def __init__(self, *, keep: int = 64, sees_all: bool = True, now: Instant = 0.0) -> None:
        super().__init__(endings_kept=keep, sees_all=sees_all)
        self.now = now
        self.see()

    def see(
        self,
        *,
        vmims: bool = True,
        pods: bool = True,
        blind: Mapping[Resource, AbstractSet[str]] | None = None,
        nodes: bool | None = True,
    ) -> None:
        """Set which resources the exporter can see."""
        self.apply(Visibility(vmims, pods, blind or {}, nodes), self.now)

    def put(self, fact: Fact, reasons: tuple[Why, ...] = ()) -> int:
        """Add or modify an object."""
        return self.apply(Observed(fact, reasons), self.now)

    def remove(self, resource: Resource, namespace: str, name: str, uid: str = "") -> int:
        """Delete an object."""
        return self.apply(Removed(resource, namespace, name, uid), self.now)

    def retain(self, resource: Resource, names: Names, namespace: str | None) -> int:
        """Apply a complete list."""
        return self.apply(Listed(resource, names, namespace), self.now)

    def note_unreadable(self, resource: Resource, namespace: str, name: str) -> int:
        """Mark an object as unreadable."""
        return self.apply(Unreadable(resource, namespace, name), self.now)

    def recall(self, remembered: Remembered) -> int:
        """Apply a VMI's entry from a stored history."""
        return self.apply(remembered, self.now)

    def forget(self, uid: str, *, is_gone: bool = False) -> int:
        """Remove a VMI's entry from a stored history."""
        return self.apply(Forgotten(uid, is_gone), self.now)


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
    store.subscribe(view.note_change, NoticeKind.EVIDENCE, NoticeKind.GONE, NoticeKind.EVERYTHING)
    return view


def pending_changes(store: Store, window: float = 86_400.0) -> PendingChanges:
    """The pending changes of a store."""
    changes = PendingChanges(store, window)
    store.subscribe(changes.note_change, NoticeKind.MEMORY)
    store.evacuations.note_end = changes.note_end
    return changes
