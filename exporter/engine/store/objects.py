"""The VMIs, VMIMs, launcher pods and nodes, and what is known about each VMI."""

from collections.abc import Iterable
from typing import Protocol

from exporter.engine.facts.changes import Key, Listed, Removed
from exporter.engine.facts.evidence import Evidence
from exporter.engine.facts.model import Instant, Pod, Resource, Vmi, Vmim
from exporter.engine.facts.trust import Trust
from exporter.engine.store.budgets import Budgets
from exporter.engine.store.evictions import EvictionIndex
from exporter.engine.store.launchers import LauncherIndex
from exporter.engine.store.migrations import VmimIndex
from exporter.engine.store.nodes import NodeIndex
from exporter.engine.store.vmi_record import VmiIndex, VmiRecord


class UnreadableObjects:
    """Objects that could be read earlier but not now. Their last readable version still counts."""

    def __init__(self) -> None:
        self._since: dict[tuple[Resource, str, str], Instant] = {}

    def record(self, resource: Resource, namespace: str, name: str, at: Instant) -> bool:
        """Note that an object cannot be read; False if that was known."""
        key = (resource, namespace, name)
        is_news = key not in self._since
        self._since.setdefault(key, at)
        return is_news

    def forget(self, resource: Resource, namespace: str, name: str) -> bool:
        """Note that an object can be read again, or is gone; True if it was noted as unreadable."""
        return bool(self._since) and self._since.pop((resource, namespace, name), None) is not None

    def find(
        self, vmi: Vmi, vmims: Iterable[Vmim], launcher: Pod | None
    ) -> tuple[tuple[Resource, Instant], ...]:
        """Which of a VMI, its unfinished VMIMs and its launcher cannot be read, and since when."""
        if not self._since:
            return ()
        objects: list[tuple[Resource, Vmi | Vmim | Pod]] = [(Resource.VMIS, vmi)]
        objects += [(Resource.VMIMS, vmim) for vmim in vmims if not vmim.finished]
        objects += [] if launcher is None else [(Resource.PODS, launcher)]
        instants = (
            (kind, self._since.get((kind, fact.namespace, fact.name))) for kind, fact in objects
        )
        return tuple((kind, since) for kind, since in instants if since is not None)


class _Keyed(Protocol):
    """The objects of one resource."""

    def __len__(self) -> int: ...

    def keys(self) -> Iterable[Key]:
        """The namespace and name of each object."""


class ClusterObjects:
    """The indexes of all objects, and which of them cannot be read any more."""

    def __init__(self, *, keep: int, deschedulers: Iterable[str] = ()) -> None:
        self.vmis = VmiIndex()
        self.vmims = VmimIndex(keep=keep)
        self.launchers = LauncherIndex()
        self.nodes = NodeIndex()
        self.budgets = Budgets(self.launchers.pods)
        self.evictions = EvictionIndex(self.launchers.pods, deschedulers)
        self.unreadable = UnreadableObjects()

    def of(self, resource: Resource) -> _Keyed:
        """The objects of a watched resource, which is not KubeVirt."""
        objects: dict[Resource, _Keyed] = {
            Resource.VMIS: self.vmis.by_key,
            Resource.VMIMS: self.vmims,
            Resource.PODS: self.launchers.pods,
            Resource.NODES: self.nodes,
            Resource.BUDGETS: self.budgets,
            Resource.EVICTIONS: self.evictions,
        }
        return objects[resource]

    def find(self, resource: Resource, key: Key) -> tuple[bool, VmiRecord | None]:
        """Whether an object is known, and the VMI that it is or belongs to."""
        match resource:
            case Resource.VMIS:
                record = self.vmis.by_key.get(key)
                return record is not None, record
            case Resource.VMIMS if (binding := self.vmims.find(*key)) is not None:
                return True, self.vmis.by_uid.get(binding.owner)
            case Resource.PODS if (pod := self.launchers.pods.get(key)) is not None:
                return True, self.vmis.find_owner(pod)
            case _:
                return False, None

    def find_unlisted(self, listed: Listed) -> list[Removed]:
        """The `Removed` changes of all known objects that a complete list does not contain."""
        known = self.of(listed.resource).keys()
        return [
            Removed(listed.resource, namespace, name)
            for namespace, name in known
            if name not in listed.names.get(namespace, ()) and listed.namespace in (None, namespace)
        ]

    def gather_evidence(
        self, record: VmiRecord, trust: Trust, *, platform_updating: bool
    ) -> Evidence:
        """Gather what is known about a VMI; this takes 3 us."""
        vmi, marker = record.vmi, record.marker
        here = trust.of(vmi.namespace)
        vmims_seen, pods_seen = here.sees(Resource.VMIMS), here.sees(Resource.PODS)
        vmims = tuple(self.vmims.owned_by(vmi)) if vmims_seen else ()
        launcher = self.launchers.current(vmi) if pods_seen else None
        moves = marker is not None or any(not vmim.finished for vmim in vmims)
        named = self.vmims.naming(record.key) if moves and vmims_seen else ()
        return Evidence(
            vmi=vmi,
            history=record.history,
            trust=here,
            vmims=vmims,
            launcher=launcher,
            changed_at=record.changed_at,
            handed_off_at=record.handed_off_at,
            platform_updating=platform_updating,
            unreadable=self.unreadable.find(vmi, vmims, launcher),
            namesakes=tuple(binding.vmim for binding in named if binding.owner != vmi.uid),
            marker=marker,
            eviction=self.evictions.find(self.launchers.of(vmi))
            if self.evictions and pods_seen and here.believes(Resource.EVICTIONS)
            else None,
            pods=self.launchers.of(vmi)
            if pods_seen and (moves or vmi.uid in self.launchers.crowded)
            else (),
        )
