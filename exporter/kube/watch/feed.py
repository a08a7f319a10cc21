"""Where a reflector puts the objects that it reads, including objects that cannot be used."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import structlog
from msgspec.structs import replace

from exporter.engine.facts.changes import Change, Listed, Observed, Removed, Unreadable
from exporter.engine.facts.model import Instant, Vmi
from exporter.engine.facts.overrides import OverrideChooser
from exporter.engine.facts.policy import Policy
from exporter.health import Watched
from exporter.kube.objects.kubevirt import Changed, Deleted, InvalidObject
from exporter.logs import Throttle
from exporter.text import clean


NO_OVERRIDES = Policy()
"""A policy without overrides, so no override is chosen for a VMI."""


class FactSink(Protocol):
    """Receives the objects that a reflector reads; the `Store` is a sink."""

    def apply(self, change: Change, at: Instant) -> int:
        """Apply what was read at `at`; returns how many objects this changed.

        For `Unreadable`: 1 if the object could be read until now.
        """


ChangeListener: TypeAlias = Callable[[Changed], None]
"""Notes each object that is read, before the object is put into the sink."""


@dataclass
class Listing:
    """A list in progress: the names read so far, by namespace.

    `complete` is false if the name of an item could not be read.
    """

    names: defaultdict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    complete: bool = True
    began: Instant = 0.0

    def __len__(self) -> int:
        return sum(map(len, self.names.values()))


@dataclass
class Feed:
    """Puts one resource's objects into a sink, and logs objects that cannot be used."""

    sink: FactSink
    watched: Watched
    clock: Callable[[], Instant]
    listener: ChangeListener | None = None
    policy: Policy = NO_OVERRIDES

    def __post_init__(self) -> None:
        self._overrides = OverrideChooser(self.policy)
        self._read_at: Instant = 0.0
        self._invalid_logged = Throttle(1)
        place = self.watched.namespace
        scope = {} if place is None else {"in_namespace": place}
        self.log = structlog.stdlib.get_logger().bind(resource=str(self.watched.resource), **scope)

    def begin_batch(self, listing: Listing | None = None) -> None:
        """Set the instant of the next objects: now or, for a list, when the list was requested."""
        self._read_at = self.clock() if listing is None else listing.began

    def put(self, changed: Changed, listing: Listing | None) -> None:
        """Add or replace an object of a list or of the watch."""
        if listing is not None:
            listing.names[changed.namespace].add(changed.name)
        if self.listener is not None:
            self.listener(changed)
        fact = changed.fact
        if self.policy.overrides and isinstance(fact, Vmi) and changed.traits is not None:
            traits = changed.traits
            override = self._overrides.choose(
                fact.namespace, traits.read_labels(), traits.priority_class
            )
            fact = replace(fact, override=override)
        self.sink.apply(Observed(fact, changed.reasons), self._read_at)

    def remove(self, deleted: Deleted) -> None:
        """Remove an object."""
        place = (deleted.namespace, deleted.name, deleted.uid)
        self.sink.apply(Removed(self.watched.resource, *place), self._read_at)

    def retain(self, listing: Listing) -> int:
        """Remove the objects that a list lacks; an incomplete list removes nothing."""
        if not listing.complete:
            self.log.warning("no_object_removed", why="an item of the list has no readable name")
            return 0
        listed = Listed(self.watched.resource, listing.names, self.watched.namespace)
        return self.sink.apply(listed, self._read_at)

    def record_invalid(self, invalid: InvalidObject, listing: Listing | None) -> None:
        """Count and log an unusable object. Earlier facts about it are kept."""
        self.watched.invalid_objects += 1
        if listing is not None:
            if invalid.name is None:
                listing.complete = False
            else:
                listing.names[invalid.namespace or ""].add(invalid.name)
        is_new = False
        if invalid.name:
            place = (invalid.namespace or "", invalid.name, invalid.uid or "")
            unreadable = Unreadable(self.watched.resource, *place)
            is_new = bool(self.sink.apply(unreadable, self._read_at))
        if self._invalid_logged.lets_through("", self.clock()) or is_new:
            self.log.warning(
                "object_invalid",
                why=invalid.why,
                namespace=invalid.namespace and clean(invalid.namespace),
                name=invalid.name and clean(invalid.name),
                invalid_so_far=self.watched.invalid_objects,
            )
