"""What the exporter knows about itself: what it watches, how that goes, and since when.

Plain values that the watch writes and that the API, the metrics and the probes read.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from exporter.engine.model import Instant, Resource, Seconds


class Restart(StrEnum):
    """Why a watch had to be opened again."""

    ENDED = "ended"
    EXPIRED = "expired"
    SILENT = "silent"
    UNREACHABLE = "unreachable"
    OVERLOADED = "overloaded"
    DENIED = "denied"
    ABSENT = "absent"


class Staleness(StrEnum):
    """How far the evidence can be trusted."""

    FRESH = "fresh"
    STALE = "stale"
    DEAD = "dead"


@dataclass
class Watched:
    """One resource in one namespace (None: in all).

    `synced`: a whole list has been read. `refused`: the reason for which the server does not
    let us see it, "" where it does. `contact`: the last event, bookmark, list or answered watch.
    `trouble`: what went wrong last, "" since it went well.
    """

    resource: Resource
    namespace: str | None
    synced: bool = False
    refused: str = ""
    contact: Instant | None = None
    trouble: str = ""
    lists: int = 0
    restarts: Counter[Restart] = field(default_factory=Counter)
    refused_objects: int = 0

    @property
    def settled(self) -> bool:
        """Whether there is nothing more to wait for."""
        return self.synced or bool(self.refused)


class CheckpointFault(StrEnum):
    """What went wrong with the checkpoint; each is counted and survived."""

    DAMAGED = "damaged"
    UNKNOWN_VERSION = "unknown_version"
    UNREADABLE = "unreadable"
    NOT_WRITTEN = "not_written"
    CONFLICT = "conflict"
    TOO_LARGE = "too_large"


def _never() -> bool:
    return False


def _nothing() -> None:
    return None


@dataclass
class CheckpointHealth:
    """How keeping the checkpoint goes.

    `may_write` is asked each time whether this process writes it, `find_unwritten` when the oldest
    change came that is not written. `written_at`: when it last was as it should be, by us. `vmis`
    and `size` (bytes) are what it holds.
    """

    may_write: Callable[[], bool] = _never
    find_unwritten: Callable[[], Instant | None] = _nothing
    written_at: Instant | None = None
    vmis: int = 0
    size: int = 0
    faults: Counter[CheckpointFault] = field(default_factory=Counter)

    @property
    def writes(self) -> bool:
        """Whether this process writes it at this moment."""
        return self.may_write()

    @property
    def unwritten_since(self) -> Instant | None:
        """When the oldest change came that is not written; None where everything is."""
        return self.find_unwritten()


@dataclass
class Health:
    """Everything that is watched, and the ages from which it is not to be believed any more.

    `stale_after` counts from the last contact, `dead_after` from the moment it turned stale.
    `checkpoint` is None where none is kept.
    """

    stale_after: Seconds
    dead_after: Seconds
    watched: list[Watched] = field(default_factory=list)
    checkpoint: CheckpointHealth | None = None

    def of(self, resource: Resource) -> list[Watched]:
        """The watches of one resource: one per namespace."""
        return [watched for watched in self.watched if watched.resource is resource]

    def is_synced(self, resource: Resource) -> bool:
        """Whether a whole list of it has been read, in every namespace watched."""
        watched = self.of(resource)
        return bool(watched) and all(one.synced for one in watched)

    def is_refused(self, resource: Resource) -> bool:
        """Whether it may not be seen, in one watched namespace at least."""
        return any(one.refused for one in self.of(resource))

    def is_seen(self, resource: Resource) -> bool:
        """Whether it can be seen, in one watched namespace at least."""
        return any(one.synced and not one.refused for one in self.of(resource))

    @property
    def ready(self) -> bool:
        """VMIs are synced, every other resource is synced or refused."""
        return self.is_synced(Resource.VMIS) and all(one.settled for one in self.watched)

    def seen_through(self, resource: Resource, namespace: str) -> Instant | None:
        """Up to when everything of it in a namespace has been seen; None where not watched."""
        return next(
            (
                one.contact
                for one in self.of(resource)
                if one.synced and one.namespace in (None, namespace)
            ),
            None,
        )

    def blind_namespaces(self, resource: Resource) -> frozenset[str]:
        """The watched namespaces in which it cannot be seen (yet)."""
        return frozenset(
            one.namespace
            for one in self.of(resource)
            if one.namespace is not None and (one.refused or not one.synced)
        )

    def waiting_for(self) -> list[str]:
        """What is neither synced nor refused yet, to be read by people."""
        return [_place(one) for one in self.watched if not one.settled]

    def refused_resources(self) -> dict[str, str]:
        """What may not be seen, and why."""
        return {_place(one): one.refused for one in self.watched if one.refused}

    @property
    def observed_at(self) -> Instant | None:
        """The last proof of contact with the API server, of the watch that verdicts rest on.

        That is the VMIs', in whichever watched namespace it is oldest: news of pods alone would
        make a dead watch of VMIs look alive.
        """
        contacts = [one.contact for one in self.of(Resource.VMIS) if one.synced]
        return min((contact for contact in contacts if contact is not None), default=None)

    def staleness(self, now: Instant) -> Staleness:
        """How far the evidence can be trusted at `now`."""
        observed = self.observed_at
        if observed is None:
            return Staleness.STALE
        age = now - observed
        if age < self.stale_after:
            return Staleness.FRESH
        return Staleness.STALE if age < self.stale_after + self.dead_after else Staleness.DEAD

    def turns_at(self, now: Instant) -> Instant | None:
        """When the staleness changes next if nothing is heard."""
        observed = self.observed_at
        if observed is None:
            return None
        turns = (observed + self.stale_after, observed + self.stale_after + self.dead_after)
        return min((turn for turn in turns if turn > now), default=None)


def _place(watched: Watched) -> str:
    scope = "" if watched.namespace is None else f" in namespace {watched.namespace}"
    return f"{watched.resource}{scope}"
