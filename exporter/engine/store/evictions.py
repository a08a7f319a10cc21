"""Index of Evictions: who asks by EvictionRequests that a pod leaves."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import StrEnum

from msgspec.structs import replace

from exporter.engine.facts.changes import Key
from exporter.engine.facts.model import Eviction, Pod


class EvictionOutcome(StrEnum):
    """How an Eviction ended; these are the values in metrics."""

    EVICTED = "evicted"
    """The pod is gone."""
    CANCELLED = "cancelled"
    """Nobody asks any more."""
    FAILED = "failed"


class RequesterKind(StrEnum):
    """Who asked by an EvictionRequest; these are the values in metrics."""

    DESCHEDULER = "descheduler"
    OTHER = "other"


class EvictionIndex:
    """All Evictions by name, and by the UID of their pod.

    Of a pod that is there, the last one that was withdrawn is kept after its deletion: Kubernetes
    deletes an Eviction with its last EvictionRequest, but KubeVirt goes on moving the VM.
    `pods` are all launcher pods, and `deschedulers` the requesters who count as a descheduler.
    `record_end` is called once for each Eviction of a launcher pod that has ended.
    """

    def __init__(self, pods: Mapping[Key, Pod], deschedulers: Iterable[str] = ()) -> None:
        self._pods = pods
        self._deschedulers = frozenset(deschedulers)
        self._evictions: dict[Key, Eviction] = {}
        self._by_pod = defaultdict[str, dict[Key, Eviction]](dict)
        self._deleted: dict[str, Eviction] = {}
        """The withdrawn Eviction of a pod after its deletion, by the pod's UID."""
        self._launchers: set[str] = set()
        """The UIDs of the launcher pods among those in `_by_pod`."""
        self.record_end: Callable[[RequesterKind, EvictionOutcome], None] = lambda *_: None

    def __len__(self) -> int:
        return len(self._evictions)

    def __bool__(self) -> bool:
        return bool(self._evictions or self._deleted)

    def keys(self) -> Iterable[Key]:
        """The namespace and name of each."""
        return tuple(self._evictions)

    def put(self, eviction: Eviction) -> Eviction | None:
        """Add or replace an Eviction, and return it; None if it has not changed."""
        key = (eviction.namespace, eviction.name)
        if not self._deschedulers.isdisjoint(eviction.askers):
            eviction = replace(eviction, by_descheduler=True)
        known = self._evictions.get(key)
        if known == eviction:
            return None
        if known is not None and known.uid != eviction.uid:
            self.remove(key)
            known = None
        self._evictions[key] = eviction
        self._by_pod[eviction.pod_uid][key] = eviction
        pod = self._pods.get((eviction.namespace, eviction.pod))
        if pod is not None:
            self.record_pod(pod)
        if known is not None and known.is_open and not eviction.is_open:
            self._record_end(eviction)
        return eviction

    def remove(self, key: Key) -> Eviction | None:
        """Remove and return an Eviction; None if there is none."""
        known = self._evictions.pop(key, None)
        if known is not None:
            if known.is_open:
                self._record_end(known)
            del self._by_pod[known.pod_uid][key]
            if not self._by_pod[known.pod_uid]:
                del self._by_pod[known.pod_uid]
                self._launchers.discard(known.pod_uid)
            self._keep_withdrawn(known)
        return known

    def _keep_withdrawn(self, eviction: Eviction) -> None:
        pods = map(self._pods.get, map(_locate_pod, self._deleted.values()))
        uids = {pod.uid for pod in pods if pod is not None}
        self._deleted = {uid: kept for uid, kept in self._deleted.items() if uid in uids}
        pod = self._pods.get(_locate_pod(eviction))
        if pod is not None and pod.uid == eviction.pod_uid and eviction.is_withdrawn:
            self._deleted[pod.uid] = eviction

    def record_pod(self, pod: Pod) -> None:
        """Note a launcher pod, which may have Evictions."""
        if pod.uid in self._by_pod:
            self._launchers.add(pod.uid)

    def find(self, pods: Iterable[Pod]) -> Eviction | None:
        """The newest Eviction of these pods; one that has not ended comes first."""
        evictions = (
            eviction
            for pod in pods
            if not pod.finished
            for eviction in self._of_pod(pod)
            if not eviction.evicted
        )
        return max(evictions, default=None, key=lambda e: (e.is_open, e.created or 0.0, e.name))

    def list_turns(self, responder: str) -> list[Eviction]:
        """The Evictions of launcher pods in which this responder has to act now."""
        return [
            eviction
            for uid in self._launchers
            for eviction in self._by_pod[uid].values()
            if eviction.is_turn_of(responder)
        ]

    def _of_pod(self, pod: Pod) -> Iterator[Eviction]:
        yield from self._by_pod.get(pod.uid, {}).values()
        if pod.uid in self._deleted:
            yield self._deleted[pod.uid]

    def count_states(self) -> Counter[str]:
        """How many Evictions of launcher pods have not ended, by the state of their responder."""
        return Counter(
            eviction.state
            for uid in self._launchers
            for eviction in self._by_pod[uid].values()
            if eviction.is_open
        )

    def _record_end(self, eviction: Eviction) -> None:
        if eviction.pod_uid not in self._launchers:
            return
        if eviction.evicted:
            outcome = EvictionOutcome.EVICTED
        elif eviction.is_open or eviction.is_withdrawn:
            outcome = EvictionOutcome.CANCELLED
        else:
            outcome = EvictionOutcome.FAILED
        names = {requester.name for requester in eviction.requesters}
        is_other = self._deschedulers.isdisjoint(names)
        kind = RequesterKind.OTHER if is_other else RequesterKind.DESCHEDULER
        self.record_end(kind, outcome)


def _locate_pod(eviction: Eviction) -> Key:
    return (eviction.namespace, eviction.pod)
