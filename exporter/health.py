"""The health of the exporter: the state of each watch and of the history file.

These are plain values. The watches and the writer of the history set them; the API, the metrics and
the probes read them.
"""

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from msgspec.structs import replace

from exporter.engine.facts.model import (
    CLUSTER_RESOURCES,
    CLUSTER_SCOPED,
    EVIDENCE_RESOURCES,
    OPTIONAL_RESOURCES,
    Instant,
    Resource,
    Seconds,
)
from exporter.engine.facts.trust import NamespaceTrust, Trust


_VMIS = Resource.VMIS
"""Python 3.11 takes 50 ns to find a member of an enum, and each verdict needs this member often."""
_WATCHED = frozenset({*CLUSTER_RESOURCES, *OPTIONAL_RESOURCES})
_KUBEVIRTS = Resource.KUBEVIRTS
_HIDDEN = frozenset({Resource.VMIMS, Resource.PODS, *OPTIONAL_RESOURCES})
"""The resources that are hidden until they are listed. The other two are used as they come."""
_NONE = frozenset[Resource]()
"""Shared: each blocked VMI keeps a `NamespaceTrust`, and the garbage collector visits its sets."""


class Restart(StrEnum):
    """Why a watch was restarted."""

    ENDED = "ended"
    EXPIRED = "expired"
    NO_PROGRESS = "no_progress"
    SILENT = "silent"
    UNREACHABLE = "unreachable"
    OVERLOADED = "overloaded"
    DENIED = "denied"
    ABSENT = "absent"


class Staleness(StrEnum):
    """How recent the last contact with the API server about VMIs is."""

    FRESH = "fresh"
    STALE = "stale"
    DEAD = "dead"


@dataclass
class Watched:
    """The watch of one resource in one namespace (None: in all).

    `synced`: the resource was listed completely. `rejected`: why the list is rejected, or "".
    `contact`: when the last event, bookmark or list was read. `trouble`: the present error, or "".
    `is_wanted`: somebody misses the resource if it cannot be seen; if not, it is not reported then.
    """

    resource: Resource
    namespace: str | None
    synced: bool = False
    rejected: str = ""
    contact: Instant | None = None
    trouble: str = ""
    lists: int = 0
    restarts: Counter[Restart] = field(default_factory=Counter)
    invalid_objects: int = 0
    is_wanted: bool = True

    @property
    def settled(self) -> bool:
        """Whether the resource is synced or rejected."""
        return self.synced or bool(self.rejected)

    @property
    def used_contact(self) -> Instant | None:
        """The last contact; None if the objects of this watch are not used.

        The VMIs are used even if their watch is rejected.
        """
        is_used = self.synced and (not self.rejected or self.resource is _VMIS)
        return self.contact if is_used else None

    @property
    def is_awaited(self) -> bool:
        """Whether the exporter is not ready because of this watch."""
        return not self.settled and self.resource not in OPTIONAL_RESOURCES


def list_watches(
    namespaces: Iterable[str],
    resources: Iterable[Resource] = CLUSTER_RESOURCES,
    *,
    unwanted: Collection[Resource] = (),
) -> list[Watched]:
    """The watches of these resources, in these namespaces (in all namespaces if none is given).

    Those of `unwanted` are not reported where they cannot be seen.
    """
    scopes: list[str | None] = [*namespaces] or [None]
    return [
        Watched(resource, scope, is_wanted=resource not in unwanted)
        for resource in resources
        for scope in ([None] if resource in CLUSTER_SCOPED else scopes)
    ]


@dataclass
class HistoryHealth:
    """The history file: when it was last written, and with how many VMIs.

    `trouble`: why the last write failed, or "".
    """

    written_at: Instant | None = None
    vmis: int = 0
    trouble: str = ""


@dataclass
class ResponderHealth:
    """How many Evictions wait for this exporter's answer; None if another replica answers.

    `trouble`: why the last answer could not be written, or "".
    """

    turns: int | None = None
    trouble: str = ""


@dataclass
class Health:
    """All watches, and the ages at which their evidence becomes stale and dead.

    `stale_after` counts from the last contact, `dead_after` from the time at which the evidence is
    stale. `history` is None if there is no history file, and `responder` is None if
    EvictionRequests are not answered. `certificates`: when the certificate of each TLS listener
    expires.
    """

    stale_after: Seconds
    dead_after: Seconds
    watched: list[Watched] = field(default_factory=list)
    history: HistoryHealth | None = None
    responder: ResponderHealth | None = None
    certificates: dict[str, Instant] = field(default_factory=dict)

    def shift(self, step: Seconds) -> None:
        """Move the contacts with the wall clock, which somebody has set by `step`."""
        for watched in self.watched:
            if watched.contact is not None:
                watched.contact += step

    @property
    def reported(self) -> list[Watched]:
        """The watches that are shown: those that see their resource, or that somebody wants."""
        seen = {watch.resource for watch in self.watched if watch.synced and not watch.rejected}
        return [watch for watch in self.watched if watch.is_wanted or watch.resource in seen]

    @property
    def resources(self) -> list[Resource]:
        """The resources that are shown."""
        return [*dict.fromkeys(watch.resource for watch in self.reported)]

    def of(self, resource: Resource) -> list[Watched]:
        """The watches of one resource: one per namespace."""
        return [watched for watched in self.watched if watched.resource is resource]

    def is_rejected(self, resource: Resource) -> bool:
        """Whether the server rejects the resource in at least one watched namespace."""
        return any(watch.rejected for watch in self.of(resource))

    def is_seen(self, resource: Resource) -> bool:
        """Whether there is a watched namespace where the resource is synced and not rejected."""
        return any(watch.synced and not watch.rejected for watch in self.of(resource))

    @property
    def ready(self) -> bool:
        """Whether VMIs are synced in at least one namespace, and nothing else is awaited.

        Nodes and budgets do not count, because no verdict needs them.
        """
        return any(watch.synced for watch in self.of(_VMIS)) and not self.waiting_for()

    def waiting_for(self) -> list[str]:
        """The names of the watches that are not ready yet."""
        return [_place(watch) for watch in self.watched if watch.is_awaited]

    def rejected_resources(self) -> dict[str, str]:
        """The rejected resources, and why."""
        return {_place(watch): watch.rejected for watch in self.reported if watch.rejected}

    @property
    def observed_at(self) -> Instant | None:
        """The oldest of the last contacts with the VMIs of each namespace.

        Other resources do not count: if pod events counted, a dead VMI watch would seem alive.
        Rejected namespaces are left out.
        """
        contacts = [
            watch.contact
            for watch in self.watched
            if watch.contact is not None
            and watch.synced
            and not watch.rejected
            and watch.resource is _VMIS
        ]
        return min(contacts, default=None)

    def staleness(self, now: Instant) -> Staleness:
        """Whether the evidence is fresh, stale or dead; rejected namespaces do not count."""
        observed = self.observed_at
        if observed is None:
            return Staleness.STALE
        age = now - observed
        if age < self.stale_after:
            return Staleness.FRESH
        return Staleness.STALE if age < self._dead_age else Staleness.DEAD

    def is_stale(self, now: Instant, namespaces: Iterable[str]) -> bool:
        """Whether answers are stale, or the VMIs of one of these namespaces cannot be read."""
        if self.staleness(now) is not Staleness.FRESH:
            return True
        lost = self.lost_namespaces
        return bool(lost) and not lost.isdisjoint(namespaces)

    def read_trust(self, now: Instant) -> Trust:
        """What may be believed at `now` of each watched resource."""
        contacts: dict[str | None, dict[Resource, Instant]] = {None: {}}
        for watch in self.watched:
            if watch.resource in _WATCHED:
                place = contacts.setdefault(watch.namespace, {})
                if (contact := watch.used_contact) is not None:
                    place[watch.resource] = contact
        shared = contacts.pop(None)
        rejected = frozenset({_KUBEVIRTS}) if self.is_rejected(_KUBEVIRTS) else _NONE
        dead_age = self._dead_age

        def judge(contacts: dict[Resource, Instant]) -> NamespaceTrust:
            hidden, dead = _HIDDEN.difference(contacts) or _NONE, rejected
            if contacts and now - min(contacts.values()) >= dead_age:
                old = {
                    resource for resource, contact in contacts.items() if now - contact >= dead_age
                }
                hidden |= old.intersection(OPTIONAL_RESOURCES)
                dead |= old.difference(OPTIONAL_RESOURCES)
            return NamespaceTrust(hidden, dead, self.dead_after)

        everywhere = judge(shared)
        if not contacts:
            return Trust(everywhere, contacts_everywhere=shared)
        own = {str(namespace): shared | place for namespace, place in contacts.items()}
        places = {namespace: judge(place) for namespace, place in own.items()}
        hidden = frozenset.intersection(*(place.hidden for place in places.values()))
        return Trust(replace(everywhere, hidden=hidden), places, shared, own)

    def find_next_change(self, now: Instant) -> Instant | None:
        """When `staleness` or the trust in what verdicts need changes next without contact."""
        observed = self.observed_at
        turns = [] if observed is None else [observed + self.stale_after]
        contacts = (
            watch.used_contact for watch in self.watched if watch.resource in EVIDENCE_RESOURCES
        )
        turns += [contact + self._dead_age for contact in contacts if contact is not None]
        return min((turn for turn in turns if turn > now), default=None)

    def dies_at(self, now: Instant) -> Instant | None:
        """When `staleness` becomes DEAD without further contact; None if already or never DEAD."""
        observed = self.observed_at
        dies = now if observed is None else observed + self._dead_age
        return dies if dies > now else None

    @property
    def _dead_age(self) -> Seconds:
        return self.stale_after + self.dead_after

    @property
    def lost_namespaces(self) -> frozenset[str]:
        """The watched namespaces whose VMIs are rejected."""
        rejected = [
            watch.namespace for watch in self.watched if watch.rejected and watch.resource is _VMIS
        ]
        return frozenset([namespace for namespace in rejected if namespace is not None])


def _place(watched: Watched) -> str:
    scope = "" if watched.namespace is None else f" in namespace {watched.namespace}"
    return f"{watched.resource}{scope}"
