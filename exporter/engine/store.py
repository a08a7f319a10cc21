"""The facts about the watched cluster, indexed for verdicts.

Objects are added as they are listed and watched, in any order and any number of times, and
read as `Evidence`. Reads never change anything. A VMI is identified by its UID: its history is
dropped with it, and a VMI recreated under the same name starts clean. `migrations` says which VMIMs
belong to a VMI, `launchers` which pods, and `evacuations` follows the evacuations.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import Protocol, TypeAlias

from exporter.engine.departures import Departures
from exporter.engine.diagnosis import Load
from exporter.engine.evacuations import EvacuationTracker, note_attempt
from exporter.engine.evidence import DEAD_AFTER, Evidence, Remembered
from exporter.engine.history import Migration, is_end_key
from exporter.engine.launchers import LauncherIndex
from exporter.engine.migrations import Binding, VmimIndex, bind
from exporter.engine.model import (
    ConfigMap,
    Fact,
    Instant,
    KubeVirtSettings,
    MigrationState,
    Mobility,
    Outcome,
    Pod,
    Resource,
    Seconds,
    Vmi,
    Vmim,
    Why,
)
from exporter.engine.node_drains import NodeDrains
from exporter.engine.reasons import ReasonTable
from exporter.engine.vmi_record import VmiRecord


Key: TypeAlias = tuple[str, str]
"""Namespace and name."""
Names: TypeAlias = Mapping[str, AbstractSet[str]]
"""Names by namespace. A `Key` for each object of a list would fragment the memory."""


class Observer(Protocol):
    """Is notified when the evidence of a VMI changes."""

    def note_change(self, key: Key) -> None:
        """The evidence of this VMI may have changed."""

    def note_end(self, key: Key) -> None:
        """The VMI is gone."""


class Store:
    """Every fact that was read from the cluster.

    An object that cannot be read any more is believed for `dead_after`.
    `endings_kept` bounds the history of each VMI (`Policy.endings_kept`), `sees_all` is false if
    only some namespaces are watched.

    `revision` grows with every change that could change an answer. `read_at` is when the objects of
    the current batch were read; the caller sets it. `vmims_seen` and `pods_seen` are true if these
    resources are visible at all, `blind` lists the namespaces where they are not. `touched`
    collects the UIDs of VMIs whose history entry may have changed; it is None if no history
    is written. `mobilities` counts the VMIs by node and mobility, without ended ones. `observers`
    are notified of changed evidence, except when `vmims_seen`, `pods_seen` or `blind` change, which
    affects all VMIs.
    """

    def __init__(
        self,
        *,
        endings_kept: int,
        sees_all: bool = True,
        dead_after: Seconds = DEAD_AFTER,
    ) -> None:
        self.revision = 0
        self.read_at: Instant = 0.0
        self.touched: set[str] | None = None
        self.mobilities: Counter[tuple[str, Mobility]] = Counter()
        self.observers: list[Observer] = []
        self.kubevirt: KubeVirtSettings | None = None
        self.vmims_seen = False
        self.pods_seen = False
        self.blind: Mapping[Resource, frozenset[str]] = {}
        self._sees_all = sees_all
        self._keep = endings_kept
        self._dead_after = dead_after
        self._unreadable_since: dict[tuple[Resource, str, str], Instant] = {}
        self._load: tuple[tuple[int, bool, bool] | None, Load | None] = (None, None)
        self._departures = Departures()
        self._vmis: dict[Key, VmiRecord] = {}
        self._by_uid: dict[str, VmiRecord] = {}
        self._recalled: dict[str, Remembered] = {}
        self._vmims = VmimIndex(keep=endings_kept)
        self._launchers = LauncherIndex()
        self._evacuations = EvacuationTracker(self._vmims, self._launchers)
        self._reasons = ReasonTable(self._vmims, self._launchers, self._evacuations)

    def __len__(self) -> int:
        return len(self._vmis)

    @property
    def drains(self) -> NodeDrains:
        """The drains of nodes that are under way."""
        return self._evacuations.drains

    def keys(self) -> AbstractSet[Key]:
        """The keys of all VMIs."""
        return self._vmis.keys()

    def count(self, resource: Resource) -> int:
        """The number of objects of a resource."""
        match resource:
            case Resource.VMIS:
                return len(self._vmis)
            case Resource.VMIMS:
                return len(self._vmims)
            case Resource.PODS:
                return len(self._launchers.pods)
            case Resource.KUBEVIRTS:
                return int(self.kubevirt is not None)
            case Resource.CONFIGMAPS | Resource.LEASES:
                return 0

    def evidence(self, namespace: str, name: str) -> Evidence | None:
        """The evidence about one VMI, or None if there is none of that name."""
        record = self._vmis.get((namespace, name))
        return None if record is None else self._evidence(record)

    def is_idle(self, key: Key) -> bool:
        """Whether no rule can block this VMI, whatever the policy and time: true for most."""
        record = self._vmis.get(key)
        if record is None or record.vmi.finished:
            return True
        vmi = record.vmi
        return vmi.migration is None and not vmi.evacuation_node and not self._vmims.naming(key)

    def find_pod(self, namespace: str, name: str) -> tuple[Pod, Vmi] | None:
        """A launcher pod and its VMI, or None if either is unknown."""
        pod = self._launchers.pods.get((namespace, name))
        record = None if pod is None else self._owner(pod)
        return None if pod is None or record is None else (pod, record.vmi)

    def sees_pods_of(self, namespace: str) -> bool:
        """Whether the launcher pods of a namespace are visible."""
        return self.pods_seen and namespace not in self.blind.get(Resource.PODS, ())

    def all_evidence(self) -> Iterator[Evidence]:
        """The evidence about every VMI."""
        return map(self._evidence, self._vmis.values())

    def evacuating(self) -> Iterator[Evidence]:
        """The evidence about every VMI that is evacuating."""
        return map(self._evidence, self._evacuations)

    def on_node(self, node: str) -> list[Evidence]:
        """The evidence about every VMI on a node, without ended ones."""
        records = self._vmis.values()
        return [
            self._evidence(one) for one in records if one.vmi.node == node and not one.vmi.finished
        ]

    def waiting(self) -> Iterator[Evidence]:
        """The evidence about every VMI with an unfinished VMIM, without ended ones."""
        for key in {binding.vmi_key for binding in self._vmims.unfinished}:
            record = self._vmis.get(key)
            if record is None or record.vmi.finished:
                continue
            evidence = self._evidence(record)
            if evidence.unfinished() is not None:
                yield evidence

    def reasons(self, vmi: Vmi) -> tuple[Why, ...]:
        """The reasons in cluster objects why a VMI does not move, newest first; see `reasons`.

        If it is not evacuating: only the word why it is not live-migratable.
        """
        return self._reasons.of(vmi)

    @property
    def nodes(self) -> Counter[str]:
        """The number of VMIs on each node, without ended ones."""
        nodes: Counter[str] = Counter()
        for (node, _), vmis in self.mobilities.items():
            nodes[node] += vmis
        return nodes

    @property
    def reason_count(self) -> int:
        """How many entries the table of reasons has."""
        return len(self._reasons)

    def load(self) -> Load | None:
        """How many migrations run, or None if not all of them are visible."""
        measured, load = self._load
        basis = (self.revision, self.vmims_seen, self.pods_seen)
        if measured != basis:
            load = self._measure_load()
            self._load = (basis, load)
        return load

    def put(self, fact: Fact, reasons: tuple[Why, ...] = ()) -> None:
        """Add or update an object, and replace its reasons, which change no verdict."""
        match fact:
            case Vmi():
                self.put_vmi(fact)
                self._reasons.put(fact, reasons)
            case Vmim():
                self.put_vmim(fact)
                self._reasons.put(fact, reasons)
            case Pod():
                self.put_pod(fact)
                self._reasons.put(fact, reasons)
            case KubeVirtSettings():
                if fact != self.kubevirt:
                    self.kubevirt = fact
                    self.revision += 1
            case ConfigMap():
                raise TypeError("a stored history's ConfigMap is not a fact about VMIs")

    def remove(self, resource: Resource, namespace: str, name: str, uid: str = "") -> None:
        """Remove an object."""
        match resource:
            case Resource.VMIS:
                self.remove_vmi(namespace, name, uid)
            case Resource.VMIMS:
                self.remove_vmim(namespace, name, uid)
            case Resource.PODS:
                self.remove_pod(namespace, name, uid)
            case Resource.KUBEVIRTS:
                self.kubevirt = None
                self.revision += 1
            case Resource.CONFIGMAPS | Resource.LEASES:
                pass

    def retain(self, resource: Resource, names: Names, namespace: str | None) -> int:
        """Remove what a complete list of `namespace` (None: of all) lacks; returns how many."""
        known: Iterable[Key] = ()
        match resource:
            case Resource.VMIS:
                known = self._vmis
            case Resource.VMIMS:
                known = self._vmims.keys()
            case Resource.PODS:
                known = self._launchers.pods
            case Resource.KUBEVIRTS:
                if self.kubevirt is not None and not names:
                    self.remove(resource, "", "")
            case Resource.CONFIGMAPS | Resource.LEASES:
                pass
        gone = [
            (place, name)
            for place, name in known
            if name not in names.get(place, ()) and namespace in (None, place)
        ]
        for key in gone:
            self.remove(resource, *key)
        return len(gone)

    def put_vmi(self, vmi: Vmi) -> None:
        """Add or update a VMI."""
        key = (vmi.namespace, vmi.name)
        self._note_readable(Resource.VMIS, *key)
        record = self._vmis.get(key)
        if record is None or record.vmi.uid != vmi.uid:
            if record is not None:
                self._forget(record)
            record = self._vmis[key] = self._by_uid[vmi.uid] = VmiRecord(vmi)
            self._enter_node(vmi)
            migration_uids_changed = True
            before = None
        elif record.vmi == vmi:
            record.seen_at = self.read_at
            return
        else:
            before = record.vmi
            migration_uids_changed = _migration_uids(before) != _migration_uids(vmi)
            self._leave_node(before)
            self._enter_node(vmi)
            record.vmi = vmi
        record.changed_at = self.read_at
        if migration_uids_changed:
            record.handed_off_at = self.read_at
        self._drop_evidence(record)
        self.revision += 1
        if migration_uids_changed:
            record.prove(_migration_uids(vmi), keep=self._keep)
        if vmi.migration is not None:
            record.history.put(vmi.migration.uid, _migration_of_vmi(vmi.migration), keep=self._keep)
            self._note_departure(record)
        if migration_uids_changed:
            self._bind_all(record)
        was_evacuating = before is None or record.marker is not None
        self._evacuations.update(record, before, self.read_at)
        if was_evacuating and record.marker is None:
            self._reasons.end(vmi)
        record.seen_at = self.read_at
        recalled = self._recalled.pop(vmi.uid, None)
        if recalled is not None:
            self._recall(record, recalled)
        self._touch(vmi.uid)

    def remove_vmi(self, namespace: str, name: str, uid: str = "") -> None:
        """Remove a VMI with its history, unless the UID is that of an earlier VMI."""
        record = self._vmis.get((namespace, name))
        if record is None or (uid and record.vmi.uid != uid):
            return
        del self._vmis[namespace, name]
        self._unreadable_since.pop((Resource.VMIS, namespace, name), None)
        self._forget(record)
        self.revision += 1

    def vmi(self, key: Key) -> Vmi | None:
        """A VMI, or None if there is none of that name."""
        record = self._vmis.get(key)
        return None if record is None else record.vmi

    @property
    def platform_updating(self) -> bool:
        """Whether KubeVirt reports VMIs that it has still to update."""
        return self.kubevirt is not None and self.kubevirt.updating

    def vmim(self, namespace: str, name: str) -> Vmim | None:
        """A VMIM, or None if there is none of that name."""
        binding = self._vmims.find(namespace, name)
        return None if binding is None else binding.vmim

    def put_vmim(self, vmim: Vmim) -> None:
        """Add or update a VMIM."""
        self._note_readable(Resource.VMIMS, vmim.namespace, vmim.name)
        known = self._vmims.find(vmim.namespace, vmim.name)
        if known is not None and not _is_same(known.vmim, vmim):
            self.remove_vmim(vmim.namespace, vmim.name)
            known = None
        if known is not None and known.vmim == vmim:
            return
        binding = self._vmims.put(vmim)
        self.revision += 1
        record = self._vmis.get(binding.vmi_key)
        if record is not None:
            self._drop_evidence(record)
            if bind(binding, record):
                self._apply_vmim(binding, record)

    def remove_vmim(self, namespace: str, name: str, uid: str = "") -> None:
        """Remove a VMIM. What it added to the history stays."""
        binding = self._vmims.find(namespace, name)
        if binding is None or (uid and binding.vmim.uid and binding.vmim.uid != uid):
            return
        self._vmims.remove(binding)
        self._unreadable_since.pop((Resource.VMIMS, namespace, name), None)
        self._reasons.remove(binding.vmim, binding.owner, self.read_at)
        self._drop_evidence(self._vmis.get(binding.vmi_key))
        self.revision += 1

    def put_pod(self, pod: Pod) -> None:
        """Add or update a launcher pod."""
        self._note_readable(Resource.PODS, pod.namespace, pod.name)
        known = self._launchers.pods.get((pod.namespace, pod.name))
        if known == pod:
            return
        if known is not None and known.vmi_uid != pod.vmi_uid:
            self._drop_evidence(self._owner(known))
        self._launchers.put(pod)
        self._note_pod_change(pod)

    def remove_pod(self, namespace: str, name: str, uid: str = "") -> None:
        """Remove a launcher pod."""
        pod = self._launchers.pods.get((namespace, name))
        if pod is None or (uid and pod.uid and pod.uid != uid):
            return
        self._launchers.remove(pod)
        self._unreadable_since.pop((Resource.PODS, namespace, name), None)
        owner = self._owner(pod)
        self._reasons.remove(pod, "" if owner is None else owner.vmi.uid, self.read_at)
        self._note_pod_change(pod)

    def note_refused(self, resource: Resource, namespace: str, name: str) -> bool:
        """A known object cannot be read any more; True if it could until now."""
        key = (resource, namespace, name)
        if not self._knows(*key) or key in self._unreadable_since:
            return False
        self._unreadable_since[key] = self.read_at
        self._drop_evidence(self._record_of(*key))
        self.revision += 1
        return True

    def remember(self, uid: str) -> Remembered | None:
        """What the stored history has to store of a VMI, or None if there is nothing."""
        record = self._by_uid.get(uid)
        if record is None:
            return self._recalled.get(uid)
        migrations = record.history.records()
        if not migrations and record.marker is None:
            return None
        return Remembered(
            uid=uid,
            namespace=record.vmi.namespace,
            migrations=migrations,
            marker=record.marker,
        )

    def recall(self, remembered: Remembered) -> None:
        """Merge what a stored history stored of a VMI, or keep it until that VMI is seen."""
        uid = remembered.uid
        record = self._by_uid.get(uid)
        if record is not None:
            if self._recall(record, remembered):
                self._touch(uid)
            return
        known = self._recalled.get(uid)
        joined = remembered if known is None else known.join(remembered)
        if joined != known:
            self._recalled[uid] = joined
            self._touch(uid)

    def recalled(self, uid: str) -> Remembered | None:
        """What was recalled about a VMI that has not been seen yet."""
        return self._recalled.get(uid)

    def forget(self, uid: str) -> None:
        """Drop what was recalled about a VMI that has not been seen."""
        if self._recalled.pop(uid, None) is not None:
            self._touch(uid)

    def _recall(self, record: VmiRecord, remembered: Remembered) -> bool:
        """Merge what was recalled about a VMI; True if that changed anything."""
        migrations = remembered.migrations
        record.prove((key for key in migrations if not is_end_key(key)), keep=self._keep)
        changed = [
            record.history.put("" if is_end_key(key) else key, migration, keep=self._keep)
            for key, migration in migrations.items()
        ]
        marker, vmi = record.marker, record.vmi
        recalled = remembered.marker
        if (
            marker is not None
            and recalled is not None
            and not recalled.is_over(vmi, record.history.newest_success())
        ):
            changed.append(marker.join(recalled))
        if not any(changed):
            return False
        self._drop_evidence(record)
        self._bind_all(record)
        self._evacuations.note_success(record, self.read_at)
        self._evacuations.note_attempts(record, self.read_at)
        self.revision += 1
        return True

    def _touch(self, uid: str) -> None:
        if self.touched is not None:
            self.touched.add(uid)

    def _forget(self, record: VmiRecord) -> None:
        uid = record.vmi.uid
        self._leave_node(record.vmi)
        for observer in self.observers:
            observer.note_end((record.vmi.namespace, record.vmi.name))
        self._by_uid.pop(uid, None)
        self._evacuations.remove(uid, self.read_at)
        self._reasons.remove_vmi(record.vmi)
        self._touch(uid)

    def _evidence(self, record: VmiRecord) -> Evidence:
        """Gather what is known about a VMI: takes 3 us."""
        vmi = record.vmi
        vmims_seen = self.vmims_seen and not self._is_blind(Resource.VMIMS, vmi)
        pods_seen = self.pods_seen and not self._is_blind(Resource.PODS, vmi)
        vmims = tuple(self._vmims.owned_by(vmi)) if vmims_seen else ()
        launcher = self._launchers.current(vmi) if pods_seen else None
        named = self._vmims.naming(record.key) if record.marker is not None and vmims_seen else ()
        return Evidence(
            vmi=vmi,
            history=record.history,
            vmims=vmims,
            vmims_seen=vmims_seen,
            launcher=launcher,
            changed_at=record.changed_at,
            handed_off_at=record.handed_off_at,
            platform_updating=self.platform_updating,
            refused=tuple(self._find_refused(vmi, vmims, launcher))
            if self._unreadable_since
            else (),
            dead_after=self._dead_after,
            namesakes=tuple(one.vmim for one in named if one.owner != vmi.uid),
            marker=record.marker,
            pods=self._launchers.of(vmi) if record.marker is not None and pods_seen else (),
            pods_seen=pods_seen,
        )

    def _drop_evidence(self, record: VmiRecord | None) -> None:
        if record is None:
            return
        for observer in self.observers:
            observer.note_change((record.vmi.namespace, record.vmi.name))

    def _enter_node(self, vmi: Vmi) -> None:
        if not vmi.finished:
            self.mobilities[vmi.node, vmi.mobility] += 1

    def _leave_node(self, vmi: Vmi) -> None:
        if vmi.finished:
            return
        kind = (vmi.node, vmi.mobility)
        self.mobilities[kind] -= 1
        if not self.mobilities[kind]:
            del self.mobilities[kind]

    def _is_blind(self, resource: Resource, vmi: Vmi) -> bool:
        return vmi.namespace in self.blind.get(resource, ())

    def _owner(self, pod: Pod) -> VmiRecord | None:
        """The VMI of a pod: one in the pod's own namespace, whatever its labels say."""
        record = self._by_uid.get(pod.vmi_uid)
        if record is None or record.vmi.namespace != pod.namespace:
            return None
        return record

    def _note_pod_change(self, pod: Pod) -> None:
        self._drop_evidence(self._owner(pod))
        self._evacuations.note_launcher(pod.vmi_uid, self.read_at)
        self.revision += 1

    def _bind_all(self, record: VmiRecord) -> None:
        for binding in self._vmims.bind_all(record):
            self._apply_vmim(binding, record)

    def _apply_vmim(self, binding: Binding, record: VmiRecord) -> None:
        """Update the VMI that a VMIM belongs to."""
        vmim = binding.vmim
        if vmim.handed_off or binding.proven:
            record.history.put(vmim.uid, _migration_of_vmim(vmim), keep=self._keep)
            self._note_departure(record)
        note_attempt(record, vmim, self.read_at)
        self._evacuations.note_success(record, self.read_at)
        self._touch(record.vmi.uid)

    def _note_departure(self, record: VmiRecord) -> None:
        state = record.vmi.migration
        if state is not None and state.outcome is Outcome.SUCCEEDED:
            end = record.history.find(state.uid, state.end).known_end
            self._departures.note(state.source_node, end, self.read_at)

    def _note_readable(self, resource: Resource, namespace: str, name: str) -> None:
        if (
            self._unreadable_since
            and self._unreadable_since.pop((resource, namespace, name), None) is not None
        ):
            self._drop_evidence(self._record_of(resource, namespace, name))
            self.revision += 1

    def _knows(self, resource: Resource, namespace: str, name: str) -> bool:
        match resource:
            case Resource.VMIS:
                return (namespace, name) in self._vmis
            case Resource.VMIMS:
                return self._vmims.find(namespace, name) is not None
            case Resource.PODS:
                return (namespace, name) in self._launchers.pods
            case _:
                return False

    def _record_of(self, resource: Resource, namespace: str, name: str) -> VmiRecord | None:
        """The VMI that a known object is, or belongs to."""
        match resource:
            case Resource.VMIS:
                return self._vmis.get((namespace, name))
            case Resource.VMIMS:
                binding = self._vmims.find(namespace, name)
                return None if binding is None else self._by_uid.get(binding.owner)
            case Resource.PODS:
                pod = self._launchers.pods.get((namespace, name))
                return None if pod is None else self._owner(pod)
            case _:
                return None

    def _find_refused(
        self, vmi: Vmi, vmims: Iterable[Vmim], launcher: Pod | None
    ) -> Iterator[tuple[Resource, Instant]]:
        """Since when the objects that rules rest on cannot be read any more."""
        objects: list[tuple[Resource, Vmi | Vmim | Pod]] = [(Resource.VMIS, vmi)]
        objects += [(Resource.VMIMS, vmim) for vmim in vmims if not vmim.finished]
        objects += [] if launcher is None else [(Resource.PODS, launcher)]
        for resource, one in objects:
            since = self._unreadable_since.get((resource, one.namespace, one.name))
            if since is not None:
                yield resource, since

    def _measure_load(self) -> Load | None:
        if not (self._sees_all and self.vmims_seen and self.pods_seen) or self.kubevirt is None:
            return None
        running, outbound = self._vmims.count_running(self._launchers, self.vmi)
        departures = self._departures.latest.copy()
        newest = max(departures.values(), default=None)
        return Load(running, outbound, self.kubevirt.limits, departures, newest)


def _migration_uids(vmi: Vmi) -> tuple[str, ...]:
    own = (vmi.migration.uid,) if vmi.migration is not None and vmi.migration.uid else ()
    return own + vmi.other_uids


def _is_same(one: Vmim, other: Vmim) -> bool:
    return one.uid == other.uid and one.vmi_name == other.vmi_name


def _migration_of_vmi(state: MigrationState) -> Migration:
    return Migration(start=state.start, end=state.end, outcome=state.outcome, handed_off=True)


def _migration_of_vmim(vmim: Vmim) -> Migration:
    return Migration(
        start=vmim.start,
        end=vmim.end,
        finished_at=vmim.finished_at,
        outcome=vmim.outcome,
        handed_off=vmim.handed_off,
    )
