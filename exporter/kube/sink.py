"""Where a reflector puts the objects that it reads, the unusable ones included."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import structlog
from msgspec.structs import replace

from exporter.engine.model import Fact, Instant, Policy, Resource, Seconds, Vmi, Why
from exporter.engine.overrides import OverrideChooser
from exporter.engine.store import Names, Store
from exporter.health import Watched
from exporter.kube.kubevirt import Changed, Deleted, Refused


REFUSALS_LOGGED_EVERY: Seconds = 60.0
NO_OVERRIDES = Policy()
"""For watches whose VMIs get no policy of their own."""


class FactSink(Protocol):
    """Receives facts; the `Store` is one."""

    read_at: Instant

    @property
    def revision(self) -> int:
        """Grows with every change that could change an answer."""

    def put(self, fact: Fact, reasons: tuple[Why, ...] = ()) -> None:
        """Add or replace an object and its reasons."""

    def remove(self, resource: Resource, namespace: str, name: str, uid: str = "") -> None:
        """Remove an object."""

    def retain(self, resource: Resource, names: Names, namespace: str | None) -> int:
        """Remove all objects but these; returns how many."""


class Listener(Protocol):
    """Notes each object that is read, before the sink has it."""

    def note(self, changed: Changed) -> None:
        """Note an object of a list or of a watch."""


@dataclass
class Listing:
    """A list in progress: the names read so far, by namespace.

    `complete` is false if an item was so broken that not even its name could be read.
    """

    names: defaultdict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    complete: bool = True
    began: Instant = 0.0

    def __len__(self) -> int:
        return sum(map(len, self.names.values()))


class Feed:
    """Puts one resource's objects into a sink, and logs unusable ones."""

    def __init__(
        self,
        sink: FactSink,
        watched: Watched,
        clock: Callable[[], Instant],
        listener: Listener | None = None,
        policy: Policy = NO_OVERRIDES,
    ) -> None:
        self._sink = sink
        self._policy = policy
        self._overrides = OverrideChooser(policy)
        self._listener = listener
        self._watched = watched
        self._clock = clock
        self._refusal_logged_at: Instant | None = None
        scope = {} if watched.namespace is None else {"in_namespace": watched.namespace}
        self.log = structlog.stdlib.get_logger().bind(resource=str(watched.resource), **scope)

    @property
    def revision(self) -> int:
        """The revision of the sink."""
        return self._sink.revision

    def begin_batch(self, listing: Listing | None = None) -> None:
        """Record as of when the next objects are read: of a list, when it was requested."""
        self._sink.read_at = self._clock() if listing is None else listing.began

    def put(self, changed: Changed, listing: Listing | None) -> None:
        """Add or replace an object of a list or of the watch."""
        if listing is not None:
            listing.names[changed.namespace].add(changed.name)
        if self._listener is not None:
            self._listener.note(changed)
        fact = changed.fact
        if self._policy.overrides and isinstance(fact, Vmi) and changed.traits is not None:
            traits = changed.traits
            override = self._overrides.choose(
                fact.namespace, traits.read_labels(), traits.priority_class
            )
            fact = replace(fact, override=override)
        self._sink.put(fact, changed.reasons)

    def remove(self, deleted: Deleted) -> None:
        """Remove an object."""
        self._sink.remove(self._watched.resource, deleted.namespace, deleted.name, deleted.uid)

    def retain(self, listing: Listing) -> int:
        """Remove what a list lacks; an incomplete list removes nothing."""
        if not listing.complete:
            self.log.warning("list_not_used_to_forget", why="an item could not be read at all")
            return 0
        return self._sink.retain(self._watched.resource, listing.names, self._watched.namespace)

    def refuse(self, refusal: Refused, listing: Listing | None) -> None:
        """Count and log an unusable object. Earlier facts about it are kept."""
        self._watched.refused_objects += 1
        if listing is not None:
            if refusal.name is None:
                listing.complete = False
            else:
                listing.names[refusal.namespace or ""].add(refusal.name)
        is_new = self._note_refused(refusal)
        self._put_bare_vmi(refusal)
        now = self._clock()
        last = self._refusal_logged_at
        if is_new or last is None or now - last >= REFUSALS_LOGGED_EVERY:
            self._refusal_logged_at = now
            self.log.warning(
                "object_refused",
                why=refusal.why,
                namespace=refusal.namespace,
                name=refusal.name,
                refused_so_far=self._watched.refused_objects,
            )

    def _note_refused(self, refusal: Refused) -> bool:
        """Note that a known object cannot be read any more; True if it could until now."""
        sink = self._sink
        if not isinstance(sink, Store) or not refusal.name:
            return False
        return sink.note_refused(self._watched.resource, refusal.namespace or "", refusal.name)

    def _put_bare_vmi(self, refusal: Refused) -> None:
        """Add a new VMI of which only name and UID are readable, so that it is known to exist."""
        if self._watched.resource is not Resource.VMIS or not refusal.name or not refusal.uid:
            return
        namespace = refusal.namespace or ""
        known = self._known(namespace, refusal.name)
        if known is None or known.uid != refusal.uid:
            bare = Vmi(
                namespace=namespace, name=refusal.name, uid=refusal.uid, migratable_unknown=True
            )
            self._sink.put(bare)

    def _known(self, namespace: str, name: str) -> Vmi | None:
        """The VMI as known so far."""
        sink = self._sink
        evidence = sink.evidence(namespace, name) if isinstance(sink, Store) else None
        return None if evidence is None else evidence.vmi
