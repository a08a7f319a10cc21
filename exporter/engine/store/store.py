"""The facts about the watched cluster, indexed for verdicts.

Objects are applied as they are listed and watched, in any order and any number of times, and read
as `Evidence`. Reads never change anything. A VMI is identified by its UID: its history is dropped
with it, and a VMI recreated under the same name starts without a history. The module `changes` has
the changes that are applied and the notices that are sent. `migrations` finds the VMIMs of a VMI,
`launchers` finds its pods, `merging` merges its history, and `evacuations` follows its evacuations.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet

from exporter.engine.facts.changes import (
    Change,
    EvictionAdmitted,
    Key,
    Listed,
    NodesSeen,
    Notice,
    NoticeKind,
    Observed,
    Removed,
    Unreadable,
)
from exporter.engine.facts.evidence import Evidence, SavedVmi
from exporter.engine.facts.model import (
    Eviction,
    Fact,
    Instant,
    KubeVirtSettings,
    Node,
    NodeMobility,
    Pod,
    Requester,
    Resource,
    Seconds,
    Vmi,
    Vmim,
    Why,
)
from exporter.engine.facts.names import KUBEVIRT, KubeVirtNames
from exporter.engine.facts.trust import Trust
from exporter.engine.store.load import Load
from exporter.engine.store.merging import HistoryMerger
from exporter.engine.store.migrations import Binding, bind
from exporter.engine.store.objects import ClusterObjects
from exporter.engine.store.reasons import ReasonTable
from exporter.engine.store.tracker import EvacuationTracker
from exporter.engine.store.vmi_record import VmiRecord


class Store:
    """Every fact that was read from the cluster.

    `endings_kept` bounds the history of each VMI (`Policy.endings_kept`). `awaited` has what the
    history file has of VMIs that have not been read yet, by UID. A complete list of the namespace
    drops what is left of it there. `names`: under which names the cluster serves KubeVirt.

    Only `apply` and `shift` change the store, and `subscribe` registers a subscriber; all other
    methods only read. `deschedulers`: which requesters of Evictions are a descheduler. `mobilities`
    counts the VMIs by node and mobility, without VMIs that have ended. `evacuations` follows the
    evacuations, `drains` has the present drains, `node_index` the nodes, and `budgets` the launcher
    pods that no one may evict. `record_applied` is called after each change, with the result of
    `apply`.
    """

    def __init__(
        self,
        *,
        endings_kept: int,
        awaited: dict[str, SavedVmi] | None = None,
        names: KubeVirtNames = KUBEVIRT,
        deschedulers: Iterable[str] = (),
    ) -> None:
        self.names = names
        self.awaited: dict[str, SavedVmi] = {} if awaited is None else awaited
        self._endings_kept = endings_kept
        self.kubevirt: KubeVirtSettings | None = None
        self.record_applied: Callable[[Change, Instant, int], None] = lambda *_: None
        self._subscribers: dict[NoticeKind, list[Callable[[Notice], None]]] = {}
        self._load: Load | None = None
        self._objects = objects = ClusterObjects(keep=endings_kept, deschedulers=deschedulers)
        self._vmis, self._vmims, self._launchers = objects.vmis, objects.vmims, objects.launchers
        self.evacuations = EvacuationTracker(
            self._vmis, self._vmims, self._launchers, objects.nodes, objects.evictions
        )
        self.mobilities: Mapping[NodeMobility, int] = objects.vmis.mobilities
        self.drains = self.evacuations.drains
        self.node_index = objects.nodes
        self.budgets = objects.budgets
        self.evictions = objects.evictions
        self._merger = HistoryMerger(self._vmims, self.evacuations, keep=endings_kept)
        self._reasons = ReasonTable(
            self._vmis, self._vmims, self._launchers, objects.nodes, self.evacuations
        )

    def shift(self, step: Seconds) -> None:
        """Move the instants of our clock in each VMI's record: the clock was set by `step`."""
        for record in self._vmis.by_key.values():
            record.changed_at += step
            record.handed_off_at += step
        self._notify(NoticeKind.EVERYTHING)

    def subscribe(self, callback: Callable[[Notice], None], *kinds: NoticeKind) -> None:
        """Call `callback` with every notice of these kinds, while the change is applied."""
        for kind in kinds:
            self._subscribers.setdefault(kind, []).append(callback)

    def apply(self, change: Change, at: Instant) -> int:
        """Apply what was read at `at`; returns how many objects this changed.

        For `Unreadable`: 1 if the object could be read until now.
        """
        changed: int
        match change:
            case Observed():
                changed = self._put(change.fact, change.reasons, at)
            case Removed():
                changed = self._remove(change, at)
            case Listed():
                changed = self._retain(change, at)
            case Unreadable():
                changed = self._record_unreadable(change, at)
            case EvictionAdmitted():
                self._record_admitted(change, at)
                changed = False
            case NodesSeen():
                changed = self._see_nodes(change, at)
        self._update_evacuations(self.evacuations.find_expired(at), at)
        if changed:
            self._load = None
        self.record_applied(change, at, changed)
        return changed

    # Reads

    @property
    def nodes(self) -> Counter[str]:
        """The number of VMIs on each node, without VMIs that have ended."""
        return self._vmis.count_by_node()

    @property
    def platform_updating(self) -> bool:
        """Whether KubeVirt reports VMIs that it still has to update."""
        return self.kubevirt is not None and self.kubevirt.updating

    def keys(self) -> AbstractSet[Key]:
        """The keys of all VMIs."""
        return self._vmis.by_key.keys()

    def count(self, resource: Resource) -> int:
        """The number of objects of a resource."""
        if resource is Resource.KUBEVIRTS:
            return int(self.kubevirt is not None)
        return len(self._objects.of(resource))

    def vmis(self) -> list[Vmi]:
        """All VMIs."""
        return [record.vmi for record in self._vmis.by_key.values()]

    def vmi(self, key: Key) -> Vmi | None:
        """A VMI, or None if there is no VMI of that name."""
        record = self._vmis.by_key.get(key)
        return None if record is None else record.vmi

    def find_present(self, uid: str) -> Vmi | None:
        """The VMI with this UID, or None if it is gone or has ended."""
        record = self._vmis.by_uid.get(uid)
        return None if record is None or record.vmi.finished else record.vmi

    def find_owner(self, vmim: Vmim) -> Vmi | None:
        """The VMI to which a VMIM belongs, or None if it is unknown or gone."""
        record = self._vmis.by_key.get((vmim.namespace, vmim.vmi_name))
        known = self._vmims.find(vmim.namespace, vmim.name)
        binding = Binding(vmim)
        if known is not None and known.vmim.uid == vmim.uid:
            binding = Binding(vmim, known.owner, known.proven)
        return record.vmi if record is not None and bind(binding, record) else None

    def vmim(self, namespace: str, name: str) -> Vmim | None:
        """A VMIM, or None if there is no VMIM of that name."""
        binding = self._vmims.find(namespace, name)
        return None if binding is None else binding.vmim

    def find_pod(self, namespace: str, name: str) -> tuple[Pod, Vmi] | None:
        """A launcher pod and its VMI, or None if either is unknown."""
        pod = self._launchers.pods.get((namespace, name))
        record = None if pod is None else self._vmis.find_owner(pod)
        return None if pod is None or record is None else (pod, record.vmi)

    def is_idle(self, key: Key) -> bool:
        """Whether nothing happens to a VMI, which is true for most VMIs.

        It has no migration, no evacuation and one launcher pod, and is not being deleted. Only the
        rules `platform_update` and `policy` can block such a VMI, and a drain treats it as its
        mobility and budgets say.
        """
        record = self._vmis.by_key.get(key)
        if record is None or record.vmi.finished:
            return True
        vmi = record.vmi
        return (
            vmi.migration is None
            and record.marker is None
            and not vmi.evacuation_node
            and vmi.deleted_at is None
            and vmi.uid not in self._launchers.crowded
            and vmi.uid not in self._launchers.ending
            and not self._vmims.naming(key)
            and not (self.evictions and self.evictions.find(self._launchers.of(vmi)))
        )

    def evidence(self, namespace: str, name: str, trust: Trust) -> Evidence | None:
        """The evidence about one VMI, or None if there is no VMI of that name."""
        record = self._vmis.by_key.get((namespace, name))
        return None if record is None else self._gather(record, trust)

    def all_evidence(self, trust: Trust) -> Iterator[Evidence]:
        """The evidence about every VMI."""
        return (self._gather(record, trust) for record in self._vmis.by_key.values())

    def evacuating(self, trust: Trust) -> Iterator[Evidence]:
        """The evidence about every VMI that is evacuating."""
        return (self._gather(record, trust) for record in self.evacuations)

    def on_node(self, node: str, trust: Trust) -> list[Evidence]:
        """The evidence about every VMI that is on a node and has not ended."""
        records = self._vmis.on_node(node)
        return [self._gather(record, trust) for record in records if not record.vmi.finished]

    def crowded(self, trust: Trust) -> list[Evidence]:
        """The evidence about every VMI that has more than one active launcher pod."""
        records = (self._vmis.by_uid.get(uid) for uid in self._launchers.crowded)
        return [self._gather(record, trust) for record in records if record is not None]

    def reasons(self, vmi: Vmi) -> tuple[Why, ...]:
        """The reasons why a VMI does not move, newest first; see `ReasonTable`.

        If the VMI is not evacuating, it has only the reason word of its condition LiveMigratable.
        """
        return self._reasons.of(vmi)

    def load(self, trust: Trust) -> Load | None:
        """How many migrations run; None if that is unknown (see `Load`).

        Each request needs it, and with 1,000 migrations it takes 1 ms, so it is kept until the next
        change.
        """
        if self.kubevirt is None or not trust.sees_all(Resource.VMIMS, Resource.PODS):
            return None
        if self._load is None:
            running, movers = self._vmims.count_running(self._launchers, self.vmi)
            outbound = {node: len(names) for node, names in movers.items()}
            departures = self._merger.departures.read_newest()
            self._load = Load(running, outbound, self.kubevirt.limits, *departures, movers=movers)
        return self._load

    def uids(self) -> AbstractSet[str]:
        """The UIDs of all VMIs."""
        return self._vmis.by_uid.keys()

    def save(self, uid: str) -> SavedVmi | None:
        """What to write about a VMI into the history file; None if there is nothing."""
        record = self._vmis.by_uid.get(uid)
        return self.awaited.get(uid) if record is None else record.save()

    def _gather(self, record: VmiRecord, trust: Trust) -> Evidence:
        return self._objects.gather_evidence(
            record, trust, platform_updating=self.platform_updating
        )

    # Changes

    def _put(self, fact: Fact, reasons: tuple[Why, ...], at: Instant) -> bool:
        match fact:
            case Vmi():
                resource, changed = Resource.VMIS, self._put_vmi(fact, at)
            case Vmim():
                resource, changed = Resource.VMIMS, self._put_vmim(fact, at)
            case Pod():
                resource, changed = Resource.PODS, self._put_pod(fact, at)
            case KubeVirtSettings():
                return self._set_kubevirt(fact, at)
            case Node():
                return self._put_node(fact, at)
            case Eviction():
                return self._record_eviction(self.evictions.put(fact))
            case _:
                return self.budgets.put(fact)
        key = (fact.namespace, fact.name)
        if self._objects.unreadable.forget(resource, *key) and not changed:
            _, record = self._objects.find(resource, key)
            self._record_evidence(record)
            changed = True
        self._reasons.put(fact, reasons)
        return changed

    def _put_vmi(self, vmi: Vmi, at: Instant) -> bool:
        record, before = self._vmis.by_key.get((vmi.namespace, vmi.name)), None
        if record is not None and record.vmi.uid != vmi.uid:
            self._end(record, at)
            record = None
        if record is None:
            record = self._vmis.add(vmi)
            saved = self.awaited.pop(vmi.uid, None)
            if saved is not None:
                record.restore(saved, keep=self._endings_kept)
        elif record.vmi == vmi:
            record.seen_at = at
            return False
        else:
            before = record.vmi
            self._vmis.update(record, vmi)
        record.changed_at = at
        self._merger.merge_vmi(record, before, at)
        was_evacuating = record.marker is not None
        self.evacuations.update(record, before, at)
        if before is None or (was_evacuating and before.node == vmi.node):
            self._reasons.settle(vmi)
        elif was_evacuating and record.marker is None:
            self._reasons.end(vmi)
        record.seen_at = at
        self._record_evidence(record)
        return True

    def _put_vmim(self, vmim: Vmim, at: Instant) -> bool:
        key = (vmim.namespace, vmim.name)
        binding = self._vmims.find(*key)
        known = None if binding is None else (binding.vmim.uid, binding.vmim.vmi_name)
        if known is not None and known != (vmim.uid, vmim.vmi_name):
            self._remove(Removed(Resource.VMIMS, *key), at)
        elif binding is not None and binding.vmim == vmim:
            return False
        binding = self._vmims.put(vmim)
        record = self._vmis.by_key.get(binding.vmi_key)
        if record is not None:
            if bind(binding, record):
                self._merger.merge_vmim(binding, record, at)
            if vmim.evacuates and self.evacuations.sees_nodes is False:
                self._update_evacuations([record], at)
            if vmim.phase == "Succeeded" and record.marker is None:
                self._reasons.end(record.vmi)
            self._record_evidence(record)
        return True

    def _put_node(self, node: Node, at: Instant) -> bool:
        known = self.node_index.find(node.name) or Node(name=node.name)
        if not self.node_index.put(node, at):
            return False
        self.evacuations.record_node(node.name, at)
        if (known.schedulable, known.taints) != (node.schedulable, node.taints):
            self._update_evacuations(self._vmis.on_node(node.name), at)
        return True

    def _update_evacuations(self, records: Iterable[VmiRecord], at: Instant) -> None:
        """Begin or end evacuations because something other than their VMIs has changed."""
        for record in records:
            if self.evacuations.update(record, None, at):
                self._reasons.settle(record.vmi)
                self._record_evidence(record)
            elif record.marker is not None:  # it may have another date
                self._record_evidence(record)

    def _put_pod(self, pod: Pod, at: Instant) -> bool:
        known = self._launchers.pods.get((pod.namespace, pod.name))
        if known == pod:
            return False
        if known is not None and known.vmi_uid != pod.vmi_uid:
            self._record_evidence(self._vmis.find_owner(known))
        self._launchers.put(pod)
        self._record_pod(pod, at)
        return True

    def _record_eviction(self, eviction: Eviction | None) -> bool:
        """Note an Eviction that was changed or removed; False if there is none."""
        if eviction is None:
            return False
        pod = self._launchers.pods.get((eviction.namespace, eviction.pod))
        if pod is not None and pod.uid == eviction.pod_uid:
            self._record_evidence(self._vmis.find_owner(pod))
        return True

    def _see_nodes(self, change: NodesSeen, at: Instant) -> bool:
        if change.seen is self.evacuations.sees_nodes:
            return False
        self.evacuations.sees_nodes = change.seen
        self._update_evacuations(self._vmis.by_key.values(), at)
        return True

    def _set_kubevirt(self, settings: KubeVirtSettings | None, at: Instant) -> bool:
        if settings == self.kubevirt:
            return False
        was_updating = self.platform_updating
        self.kubevirt = settings
        before, now = self.evacuations.kubevirt, settings or KubeVirtSettings()
        self.evacuations.kubevirt = now
        if (before.drain_taint, before.eviction_strategy) != (
            now.drain_taint,
            now.eviction_strategy,
        ):
            for name in self.node_index.names():
                self.evacuations.record_node(name, at)
            self._update_evacuations(self._vmis.by_key.values(), at)
        if was_updating != self.platform_updating:
            self._notify(NoticeKind.EVERYTHING)
        return True

    def _retain(self, listed: Listed, at: Instant) -> int:
        if listed.resource is Resource.KUBEVIRTS:
            unlisted = [] if listed.names else [Removed(listed.resource, "", "")]
        else:
            unlisted = self._objects.find_unlisted(listed)
        if listed.resource is Resource.NODES and self.node_index.record_list(at):
            self._update_evacuations(self._vmis.by_key.values(), at)
        if listed.resource is Resource.VMIS:
            for uid, saved in [*self.awaited.items()]:
                if listed.namespace in (None, saved.namespace):
                    del self.awaited[uid]
        return sum(self.apply(removed, at) for removed in unlisted)

    def _remove(self, removed: Removed, at: Instant) -> bool:
        resource, key, uid = removed.resource, (removed.namespace, removed.name), removed.uid
        record, binding = self._vmis.by_key.get(key), self._vmims.find(*key)
        pod = self._launchers.pods.get(key)
        match resource:
            case Resource.KUBEVIRTS:
                return self._set_kubevirt(None, at)
            case Resource.NODES:
                gone = self.node_index.remove(removed.name)
                self.evacuations.record_node(removed.name, at)
                self._update_evacuations(self._vmis.on_node(removed.name), at)
                return gone
            case Resource.BUDGETS:
                return self.budgets.remove(*key)
            case Resource.EVICTIONS:
                return self._record_eviction(self.evictions.remove(key))
            case Resource.VMIS if record is not None and uid in ("", record.vmi.uid):
                self._end(record, at)
            case Resource.VMIMS if binding is not None and _may_be(binding.vmim, uid):
                self._vmims.remove_binding(binding)  # its record stays in the history
                self._reasons.remove(binding.vmim, binding.owner, at)
                self._record_evidence(self._vmis.by_key.get(binding.vmi_key))
            case Resource.PODS if pod is not None and _may_be(pod, uid):
                self._launchers.remove(pod)
                owner = self._vmis.find_owner(pod)
                self._reasons.remove(pod, "" if owner is None else owner.vmi.uid, at)
                self._record_pod(pod, at)
            case _:
                return False
        self._objects.unreadable.forget(resource, *key)
        return True

    def _end(self, record: VmiRecord, at: Instant) -> None:
        """Drop a VMI with its history."""
        uid = record.vmi.uid
        self._vmis.remove(record)
        self.evacuations.remove(record, at)
        self._reasons.remove_vmi(record.vmi)
        self._notify(NoticeKind.GONE, record.key, uid)

    def _record_unreadable(self, change: Unreadable, at: Instant) -> bool:
        """Keep the last version of a known object; store a new VMI with its name and UID only."""
        resource, key = change.resource, (change.namespace, change.name)
        is_known, record = self._objects.find(resource, key)
        is_news = is_known and self._objects.unreadable.record(resource, *key, at)
        if is_news:
            self._record_evidence(record)
        is_new_vmi = change.uid and (record is None or record.vmi.uid != change.uid)
        if resource is Resource.VMIS and is_new_vmi:
            bare = Vmi(namespace=key[0], name=key[1], uid=change.uid, migratable_unknown=True)
            self.apply(Observed(bare), at)
        return is_news

    def _record_admitted(self, change: EvictionAdmitted, at: Instant) -> None:
        """Note an eviction's requester if KubeVirt may mark the VMI (`pod-eviction-admitter`)."""
        pod, vmi = self.find_pod(change.namespace, change.pod) or (None, None)
        if pod and vmi and not vmi.evacuation_node and not pod.finished and pod.node == vmi.node:
            self.evacuations.requesters.record(vmi.uid, Requester(at, change.user))

    def _record_pod(self, pod: Pod, at: Instant) -> None:
        self.evacuations.record_launcher(pod.vmi_uid, at)
        self.budgets.record_pod(pod)
        self.evictions.record_pod(pod)
        self._record_evidence(self._vmis.find_owner(pod))

    def _record_evidence(self, record: VmiRecord | None) -> None:
        if record is not None:
            self.evacuations.record_in_drain(record)
            self._notify(NoticeKind.EVIDENCE, record.key, record.vmi.uid)

    def _notify(self, kind: NoticeKind, key: Key = ("", ""), uid: str = "") -> None:
        subscribers = self._subscribers.get(kind)
        if subscribers:
            notice = Notice(kind, key, uid)
            for callback in subscribers:
                callback(notice)


def _may_be(fact: Vmim | Pod, uid: str) -> bool:
    return not uid or not fact.uid or fact.uid == uid
