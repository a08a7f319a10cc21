"""The facts of the watched cluster, indexed by what verdicts ask for.

Objects go in as they are listed and watched, in any order and any number of times; `Evidence`
comes out. Reads never change anything. A VMI is its UID: its history goes with it, and a VMI
recreated under the same name starts clean.

A VMIM names only a VMI's name. It belongs to the VMI of that namespace and name if its UID was
ever that VMI's migration UID (proof), or if it was not created before the VMI was (either
creation missing: accepted). Once bound it stays, but for two cases in which the watch of VMIs was
late: proof for another VMI, or a VMI of that name that is younger than the one it was bound to
and older than the VMIM. A VMIM whose VMI is not known yet waits, and a deleted one that was handed
off and has no proof waits too, within a bound: its VMI may be the next one of that name.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from msgspec import Struct

from exporter.engine.diagnosis import RUNNING_PHASES, Load
from exporter.engine.evidence import Evidence, Marker, Remembered
from exporter.engine.history import History, Migration, is_end_key
from exporter.engine.model import (
    ConfigMap,
    Fact,
    Instant,
    MigrationLimits,
    MigrationState,
    Outcome,
    Pod,
    Resource,
    Trigger,
    Vmi,
    Vmim,
)


Key: TypeAlias = tuple[str, str]
"""Namespace and name."""

_MAY_RUN = RUNNING_PHASES | {"Pending"}

WAITING_LIMIT = 1_000
"""For how many VMIs that have not been seen deleted VMIMs are remembered."""


@dataclass(slots=True)
class _Incarnation:
    """A VMI, and what is known of its migrations.

    `proofs` are the migration UIDs that were seen in its `migrationState`, the latest last.
    `seen_at` is when we last heard of it, `marker` what it says of an evacuation. `evidence` is
    what was last put together of it, None once something has changed.
    """

    vmi: Vmi
    history: History = field(default_factory=History)
    proofs: tuple[str, ...] = ()
    marker: Marker | None = None
    seen_at: Instant | None = None
    evidence: Evidence | None = None

    def prove(self, uids: Iterable[str], *, keep: int) -> None:
        """These migration UIDs are this VMI's; the newest `keep` are remembered."""
        new = tuple(dict.fromkeys(reversed(tuple(uids))))[::-1]
        known = tuple(uid for uid in self.proofs if uid not in new)
        self.proofs = (known + new)[-keep:]


class _Claim(Struct, gc=False):
    """A VMIM, and the UID of the VMI that it belongs to ("" while it waits)."""

    vmim: Vmim
    owner: str = ""
    proven: bool = False


class Observer(Protocol):
    """Who keeps something of every VMI, and has to know of which it is not true any more."""

    def note_change(self, key: Key) -> None:
        """There is news of this VMI."""

    def note_end(self, key: Key) -> None:
        """The VMI is gone."""


class Store:
    """Every fact that was read from the cluster.

    `endings_kept` bounds each VMI's history (`Policy.endings_kept`); `sees_all` is false where
    only some namespaces are watched; migrations that ended before `started_at` are not counted.
    `revision` grows with every change that could change an answer. `heard_at` is when what is
    put next was heard: whoever puts sets it, once for many. `finished` counts the migrations that
    ended, once each. `vmims_seen` and `pods_seen` say whether these may be watched at all, `blind`
    in which namespaces they may not. `touched` are the UIDs of the VMIs of which there may be
    something new to remember; it is None, and nothing is noted, where nobody reads and clears it.
    `nodes` counts the VMIs on each node, those that have ended left out, and `observers` are told
    whose evidence has changed, but where that is everybody's: with `vmims_seen`, `pods_seen` or
    `blind`.
    """

    def __init__(
        self, *, endings_kept: int, sees_all: bool = True, started_at: Instant = 0.0
    ) -> None:
        self.revision = 0
        self.heard_at: Instant = 0.0
        self.touched: set[str] | None = None
        self.finished: Counter[tuple[Outcome, Trigger]] = Counter()
        self.nodes: Counter[str] = Counter()
        self.observers: list[Observer] = []
        self._sees_all = sees_all
        self._started_at = started_at
        self._evacuating: dict[str, _Incarnation] = {}
        self._load: tuple[int, Load | None] = (-1, None)
        self.limits: MigrationLimits | None = None
        self.vmims_seen = False
        self.pods_seen = False
        self.blind: Mapping[Resource, frozenset[str]] = {}
        self._sight: tuple[object, ...] = ()
        self._keep = endings_kept
        self._vmis: dict[Key, _Incarnation] = {}
        self._by_uid: dict[str, _Incarnation] = {}
        self._recalled: dict[str, Remembered] = {}
        self._vmims: dict[Key, _Claim] = {}
        self._may_run: dict[Key, _Claim] = {}
        self._claims: dict[Key, list[_Claim]] = {}
        self._waiting: dict[Key, dict[str, _Claim]] = {}
        self._pods: dict[Key, Pod] = {}
        self._launchers: dict[Key, dict[str, Pod]] = {}
        self._targets: Counter[Key] = Counter()

    def __len__(self) -> int:
        return len(self._vmis)

    def keys(self) -> AbstractSet[Key]:
        """Every VMI."""
        return self._vmis.keys()

    def count(self, resource: Resource) -> int:
        """How many objects of a resource are held."""
        match resource:
            case Resource.VMIS:
                return len(self._vmis)
            case Resource.VMIMS:
                return len(self._vmims)
            case Resource.PODS:
                return len(self._pods)
            case Resource.KUBEVIRTS:
                return int(self.limits is not None)
            case Resource.CONFIGMAPS | Resource.LEASES:
                return 0

    def evidence(self, namespace: str, name: str) -> Evidence | None:
        """What is known of one VMI, or None where there is none of that name."""
        incarnation = self._vmis.get((namespace, name))
        return None if incarnation is None else self._evidence(incarnation)

    def evidence_of_pod(self, namespace: str, name: str) -> tuple[Pod, Evidence] | None:
        """A launcher pod and what is known of its VMI, or None where there is none."""
        pod = self._pods.get((namespace, name))
        incarnation = None if pod is None else self._by_uid.get(pod.vmi_uid)
        if pod is None or incarnation is None or incarnation.vmi.namespace != namespace:
            return None
        return pod, self._evidence(incarnation)

    def sees_pods_of(self, namespace: str) -> bool:
        """Whether every launcher pod of a namespace is known."""
        return self.pods_seen and namespace not in self.blind.get(Resource.PODS, ())

    def all_evidence(self) -> Iterator[Evidence]:
        """What is known of every VMI."""
        return map(self._evidence, self._vmis.values())

    def evacuating(self) -> Iterator[Evidence]:
        """What is known of every VMI that is evacuating."""
        return map(self._evidence, self._evacuating.values())

    def load(self) -> Load | None:
        """How many migrations run, or None where not all of them can be seen."""
        revision, load = self._load
        if revision != self.revision:
            load = self._measure_load()
            self._load = (self.revision, load)
        return load

    def put(self, fact: Fact) -> None:
        """An object exists and says this."""
        match fact:
            case Vmi():
                self.put_vmi(fact)
            case Vmim():
                self.put_vmim(fact)
            case Pod():
                self.put_pod(fact)
            case MigrationLimits():
                if fact != self.limits:
                    self.limits = fact
                    self.revision += 1
            case ConfigMap():
                raise TypeError("a checkpoint's ConfigMap is no fact about VMIs")

    def remove(self, resource: Resource, namespace: str, name: str, uid: str = "") -> None:
        """An object is gone."""
        match resource:
            case Resource.VMIS:
                self.remove_vmi(namespace, name, uid)
            case Resource.VMIMS:
                self.remove_vmim(namespace, name, uid)
            case Resource.PODS:
                self.remove_pod(namespace, name, uid)
            case Resource.KUBEVIRTS:
                self.limits = None
                self.revision += 1
            case Resource.CONFIGMAPS | Resource.LEASES:
                pass

    def retain(self, resource: Resource, keys: AbstractSet[Key], namespace: str | None) -> int:
        """A complete list of `namespace` (None: of all) held just these: the others are gone.

        Returns how many were forgotten.
        """
        known: Mapping[Key, object] = {}
        match resource:
            case Resource.VMIS:
                known = self._vmis
            case Resource.VMIMS:
                known = self._vmims
            case Resource.PODS:
                known = self._pods
            case Resource.KUBEVIRTS:
                self.limits = self.limits if keys else None
            case Resource.CONFIGMAPS | Resource.LEASES:
                pass
        gone = [
            key for key in known if key not in keys and (namespace is None or key[0] == namespace)
        ]
        for key in gone:
            self.remove(resource, *key)
        return len(gone)

    def put_vmi(self, vmi: Vmi) -> None:
        """A VMI exists and says this."""
        key = (vmi.namespace, vmi.name)
        incarnation = self._vmis.get(key)
        if incarnation is None or incarnation.vmi.uid != vmi.uid:
            if incarnation is not None:
                self._forget_incarnation(incarnation)
            incarnation = self._vmis[key] = self._by_uid[vmi.uid] = _Incarnation(vmi)
            self._enter_node(vmi)
            migration_uids_changed = True
            before = None
        elif incarnation.vmi == vmi:
            incarnation.seen_at = self.heard_at
            return
        else:
            before = incarnation.vmi
            migration_uids_changed = _migration_uids(before) != _migration_uids(vmi)
            self._leave_node(before)
            self._enter_node(vmi)
            incarnation.vmi = vmi
        self._drop_evidence(incarnation)
        self.revision += 1
        if migration_uids_changed:
            incarnation.prove(_migration_uids(vmi), keep=self._keep)
        if vmi.migration is not None:
            incarnation.history.put(vmi.migration.uid, _told_by_vmi(vmi.migration), keep=self._keep)
        if migration_uids_changed:
            self._bind_all(key, incarnation)
        if before is not None and _is_requested_anew(before, vmi):
            incarnation.marker = None
        self._mark(incarnation)
        incarnation.seen_at = self.heard_at
        recalled = self._recalled.pop(vmi.uid, None)
        if recalled is not None:
            self._recall(incarnation, recalled)
        self._touch(vmi.uid)

    def remove_vmi(self, namespace: str, name: str, uid: str = "") -> None:
        """The VMI is gone, and its history with it. Another UID's deletion is late news."""
        incarnation = self._vmis.get((namespace, name))
        if incarnation is None or (uid and incarnation.vmi.uid != uid):
            return
        del self._vmis[namespace, name]
        self._forget_incarnation(incarnation)
        self.revision += 1

    def put_vmim(self, vmim: Vmim) -> None:
        """A VMIM exists and says this."""
        key = (vmim.namespace, vmim.name)
        claim = self._vmims.get(key)
        if claim is not None and not _is_same(claim.vmim, vmim):
            self.remove_vmim(vmim.namespace, vmim.name)
            claim = None
        if claim is None:
            claim = self._vmims[key] = _Claim(vmim)
            self._claims.setdefault((vmim.namespace, vmim.vmi_name), []).append(claim)
            self._count_finished(vmim)
        elif claim.vmim == vmim:
            return
        elif not claim.vmim.finished:
            self._count_finished(vmim)
        claim.vmim = vmim
        if vmim.phase in _MAY_RUN:
            self._may_run[key] = claim
        else:
            self._may_run.pop(key, None)
        self.revision += 1
        incarnation = self._vmis.get((vmim.namespace, vmim.vmi_name))
        if incarnation is not None:
            self._drop_evidence(incarnation)
            self._bind(claim, incarnation)

    def remove_vmim(self, namespace: str, name: str, uid: str = "") -> None:
        """The VMIM is gone: nothing is pending by it, and what it told of is kept."""
        claim = self._vmims.get((namespace, name))
        if claim is None or (uid and claim.vmim.uid and claim.vmim.uid != uid):
            return
        vmi_key = (namespace, claim.vmim.vmi_name)
        del self._vmims[namespace, name]
        self._may_run.pop((namespace, name), None)
        others = [one for one in self._claims[vmi_key] if one is not claim]
        if others:
            self._claims[vmi_key] = others
        else:
            del self._claims[vmi_key]
        self._drop_evidence(self._vmis.get(vmi_key))
        if claim.vmim.handed_off and not claim.proven:
            self._let_wait(vmi_key, claim)
        self.revision += 1

    def put_pod(self, pod: Pod) -> None:
        """A launcher pod exists and says this."""
        key = (pod.namespace, pod.name)
        known = self._pods.get(key)
        if known == pod:
            return
        if known is not None:
            self._forget_target(known)
            if known.vmi_uid != pod.vmi_uid:
                self._forget_launcher(known)
                self._drop_evidence(self._owner(known))
        self._pods[key] = pod
        if pod.migration_uid:
            self._targets[pod.namespace, pod.migration_uid] += 1
        self._drop_evidence(self._owner(pod))
        self._launchers.setdefault((pod.namespace, pod.vmi_uid), {})[pod.name] = pod
        self._note_launcher(pod.vmi_uid)
        self.revision += 1

    def remove_pod(self, namespace: str, name: str, uid: str = "") -> None:
        """The launcher pod is gone."""
        pod = self._pods.get((namespace, name))
        if pod is None or (uid and pod.uid and pod.uid != uid):
            return
        del self._pods[namespace, name]
        self._forget_target(pod)
        self._forget_launcher(pod)
        self._drop_evidence(self._owner(pod))
        self._note_launcher(pod.vmi_uid)
        self.revision += 1

    def remember(self, uid: str) -> Remembered | None:
        """What is to outlive us of this VMI, or None where there is nothing."""
        incarnation = self._by_uid.get(uid)
        if incarnation is None:
            return self._recalled.get(uid)
        migrations = incarnation.history.records()
        if not migrations and incarnation.marker is None:
            return None
        return Remembered(
            uid=uid,
            namespace=incarnation.vmi.namespace,
            migrations=migrations,
            marker=incarnation.marker,
        )

    def recall(self, remembered: Remembered) -> None:
        """A checkpoint says this of a VMI; it waits where that VMI has not been seen yet."""
        uid = remembered.uid
        incarnation = self._by_uid.get(uid)
        if incarnation is None:
            self._recalled[uid] = remembered
        else:
            self._recall(incarnation, remembered)
        self._touch(uid)

    def recalled(self) -> list[Remembered]:
        """What was recalled of VMIs that have not been seen."""
        return list(self._recalled.values())

    def forget(self, uid: str) -> None:
        """A VMI that was recalled and has not been seen is gone."""
        if self._recalled.pop(uid, None) is not None:
            self._touch(uid)

    def _recall(self, incarnation: _Incarnation, remembered: Remembered) -> None:
        migrations = remembered.migrations
        self._drop_evidence(incarnation)
        incarnation.prove((key for key in migrations if not is_end_key(key)), keep=self._keep)
        changed = [
            incarnation.history.put("" if is_end_key(key) else key, migration, keep=self._keep)
            for key, migration in migrations.items()
        ]
        marker, vmi = incarnation.marker, incarnation.vmi
        told = remembered.marker
        if (
            marker is not None
            and told is not None
            and not told.is_over(vmi, incarnation.history.newest_success())
        ):
            changed.append(marker.join(told))
        if any(changed):
            self._bind_all((vmi.namespace, vmi.name), incarnation)
            self._note_success(incarnation)
            self._note_attempts(incarnation)
            self.revision += 1

    def _touch(self, uid: str) -> None:
        if self.touched is not None:
            self.touched.add(uid)

    def _forget_incarnation(self, incarnation: _Incarnation) -> None:
        uid = incarnation.vmi.uid
        self._leave_node(incarnation.vmi)
        for observer in self.observers:
            observer.note_end((incarnation.vmi.namespace, incarnation.vmi.name))
        self._by_uid.pop(uid, None)
        self._evacuating.pop(uid, None)
        self._touch(uid)

    def _evidence(self, incarnation: _Incarnation) -> Evidence:
        """Put together once per change, because that takes 3 us, and what `cooldown` works out
        of it and keeps with it three times as long.
        """
        if self._sight != (self.vmims_seen, self.pods_seen, self.blind):
            self._sight = (self.vmims_seen, self.pods_seen, self.blind)
            for one in self._vmis.values():
                one.evidence = None
        evidence = incarnation.evidence
        if evidence is None:
            evidence = incarnation.evidence = self._gather(incarnation)
        return evidence

    def _gather(self, incarnation: _Incarnation) -> Evidence:
        vmi = incarnation.vmi
        vmims_seen = self.vmims_seen and not self._is_blind(Resource.VMIMS, vmi)
        pods_seen = self.pods_seen and not self._is_blind(Resource.PODS, vmi)
        claims = self._claims.get((vmi.namespace, vmi.name), ()) if vmims_seen else ()
        return Evidence(
            vmi=vmi,
            history=incarnation.history,
            vmims=tuple(claim.vmim for claim in claims if claim.owner == vmi.uid),
            vmims_seen=vmims_seen,
            launcher=self._launcher(vmi) if pods_seen else None,
            marker=incarnation.marker,
            pods=self._pods_of(vmi) if incarnation.marker is not None and pods_seen else (),
            pods_seen=pods_seen,
        )

    def _drop_evidence(self, incarnation: _Incarnation | None) -> None:
        if incarnation is None:
            return
        incarnation.evidence = None
        for observer in self.observers:
            observer.note_change((incarnation.vmi.namespace, incarnation.vmi.name))

    def _enter_node(self, vmi: Vmi) -> None:
        if not vmi.finished:
            self.nodes[vmi.node] += 1

    def _leave_node(self, vmi: Vmi) -> None:
        if vmi.finished:
            return
        self.nodes[vmi.node] -= 1
        if not self.nodes[vmi.node]:
            del self.nodes[vmi.node]

    def _is_blind(self, resource: Resource, vmi: Vmi) -> bool:
        return vmi.namespace in self.blind.get(resource, ())

    def _pods_of(self, vmi: Vmi) -> tuple[Pod, ...]:
        return tuple(self._launchers.get((vmi.namespace, vmi.uid), {}).values())

    def _owner(self, pod: Pod) -> _Incarnation | None:
        """The VMI that the pod runs: one of the pod's own namespace, whatever its labels say."""
        incarnation = self._by_uid.get(pod.vmi_uid)
        if incarnation is None or incarnation.vmi.namespace != pod.namespace:
            return None
        return incarnation

    def _launcher(self, vmi: Vmi) -> Pod | None:
        """The VMI's current pod: the newest on its node, as KubeVirt's `CurrentVMIPod` has it.

        One that still runs goes before one that has ended, where both are as old.
        """
        pods = self._launchers.get((vmi.namespace, vmi.uid))
        if not pods or not vmi.node:
            return None
        on_node = (pod for pod in pods.values() if pod.node == vmi.node)
        return max(on_node, default=None, key=_currency)

    def _bind_all(self, key: Key, incarnation: _Incarnation) -> None:
        for claim in self._claims.get(key, ()):
            self._bind(claim, incarnation)
        for uid, claim in self._waiting.pop(key, {}).items():
            self._bind(claim, incarnation)
            if not claim.proven:
                self._waiting.setdefault(key, {})[uid] = claim

    def _bind(self, claim: _Claim, incarnation: _Incarnation) -> None:
        vmim, vmi = claim.vmim, incarnation.vmi
        if vmim.uid in incarnation.proofs:
            claim.owner, claim.proven = vmi.uid, True
        elif claim.owner != vmi.uid:
            if claim.proven or not _may_belong(vmim, vmi, moved=bool(claim.owner)):
                return
            claim.owner = vmi.uid
        if vmim.handed_off or claim.proven:
            incarnation.history.put(vmim.uid, _told_by_vmim(vmim), keep=self._keep)
        _note_attempt(incarnation, vmim, self.heard_at)
        self._note_success(incarnation)
        self._touch(vmi.uid)

    def _note_success(self, incarnation: _Incarnation) -> None:
        """VMIMs come in any order: an older attempt may be known before the success after it.

        A success since the first sight ended that evacuation. Where the marker is still there,
        the clearing was missed, and this is a new evacuation.
        """
        marker, vmi = incarnation.marker, incarnation.vmi
        if marker is None or vmi.eviction_requested_at is not None:
            return
        success = incarnation.history.newest_success()
        if success is None:
            return
        if marker.was_left(vmi, success):
            self._begin(incarnation, not_before=success)
        elif marker.note_success(success):
            self._note_attempts(incarnation)

    def _note_attempts(self, incarnation: _Incarnation) -> None:
        """Have every VMIM that is known tell of the evacuation again."""
        vmi = incarnation.vmi
        for claim in self._claims.get((vmi.namespace, vmi.name), ()):
            if claim.owner == vmi.uid:
                _note_attempt(incarnation, claim.vmim, self.heard_at)

    def _mark(self, incarnation: _Incarnation) -> None:
        """Follow the VMI's own word on whether it evacuates, and from which node."""
        vmi, marker = incarnation.vmi, incarnation.marker
        if not vmi.evacuation_node or vmi.finished:
            incarnation.marker = None
            self._evacuating.pop(vmi.uid, None)
            return
        if marker is None or marker.node != vmi.evacuation_node:
            marker = self._begin(
                incarnation,
                not_before=incarnation.seen_at if vmi.eviction_requested_at is None else None,
            )
        if vmi.eviction_requested_at is not None:
            marker.note_request(vmi.eviction_requested_at)
        self._note_success(incarnation)
        self._note_launcher(vmi.uid)

    def _begin(self, incarnation: _Incarnation, *, not_before: Instant | None) -> Marker:
        """Follow a new evacuation from now on."""
        vmi = incarnation.vmi
        marker = incarnation.marker = Marker(
            node=vmi.evacuation_node,
            requested_at=self.heard_at,
            seen_at=self.heard_at,
            not_before=not_before,
        )
        self._evacuating[vmi.uid] = incarnation
        self._note_attempts(incarnation)
        self._note_launcher(vmi.uid)
        return marker

    def _note_launcher(self, vmi_uid: str) -> None:
        """Since when the launcher pod of an evacuating VMI lacks the descheduler's annotation."""
        incarnation = self._evacuating.get(vmi_uid)
        if incarnation is None or incarnation.marker is None:
            return
        launcher = self._launcher(incarnation.vmi)
        if launcher is None or launcher.eviction_in_progress:
            incarnation.marker.lacking_since = None
        elif incarnation.marker.lacking_since is None:
            incarnation.marker.lacking_since = self.heard_at

    def _count_finished(self, vmim: Vmim) -> None:
        ended = vmim.finished_at if vmim.end is None else vmim.end
        if vmim.finished and ended is not None and ended > self._started_at:
            self.finished[vmim.outcome, vmim.trigger] += 1

    def _measure_load(self) -> Load | None:
        """As KubeVirt counts (`findRunningMigrations`): phases, and Pending with a target pod.

        Only VMIMs that may run are looked at, because the finished ones are five for each VMI.
        """
        if not (self._sees_all and self.vmims_seen and self.pods_seen) or self.limits is None:
            return None
        outbound: Counter[str] = Counter()
        running = 0
        for claim in self._may_run.values():
            vmim = claim.vmim
            if vmim.phase == "Pending" and (vmim.namespace, vmim.uid) not in self._targets:
                continue
            running += 1
            incarnation = self._vmis.get((vmim.namespace, vmim.vmi_name))
            if incarnation is not None:
                outbound.update(_source_nodes(incarnation.vmi))
        return Load(running, outbound, self.limits)

    def _let_wait(self, vmi_key: Key, claim: _Claim) -> None:
        waiting = self._waiting.setdefault(vmi_key, {})
        waiting[claim.vmim.uid or claim.vmim.name] = claim
        if len(waiting) > self._keep:
            del waiting[next(iter(waiting))]
        if len(self._waiting) > WAITING_LIMIT:
            del self._waiting[next(iter(self._waiting))]

    def _forget_target(self, pod: Pod) -> None:
        if pod.migration_uid:
            target = (pod.namespace, pod.migration_uid)
            self._targets[target] -= 1
            if not self._targets[target]:
                del self._targets[target]

    def _forget_launcher(self, pod: Pod) -> None:
        owner = (pod.namespace, pod.vmi_uid)
        launchers = self._launchers[owner]
        del launchers[pod.name]
        if not launchers:
            del self._launchers[owner]


def _migration_uids(vmi: Vmi) -> tuple[str, ...]:
    own = (vmi.migration.uid,) if vmi.migration is not None and vmi.migration.uid else ()
    return own + vmi.other_uids


def _is_requested_anew(before: Vmi, vmi: Vmi) -> bool:
    """Whether KubeVirt's condition says that the evacuation was cleared and requested again.

    A condition that was not there before says nothing: KubeVirt 1.7 adds it to older requests.
    """
    known, requested = before.eviction_requested_at, vmi.eviction_requested_at
    return known is not None and (requested is None or requested > known)


def _source_nodes(vmi: Vmi) -> set[str]:
    """The nodes that KubeVirt counts a migration of this VMI against (`evacuation.go`).

    Both its node and the source of its last hand-off, even where that migration is an older one.
    """
    state = vmi.migration
    return {vmi.node} if state is None or not state.source_node else {vmi.node, state.source_node}


def _note_attempt(incarnation: _Incarnation, vmim: Vmim, heard_at: Instant) -> None:
    """What an evacuation VMIM tells of the request and of the attempts since."""
    marker = incarnation.marker
    if marker is None or vmim.evacuates != marker.node:
        return
    if incarnation.vmi.eviction_requested_at is None and vmim.created is not None:
        succeeded = incarnation.history.newest_success()
        since = [instant for instant in (marker.not_before, succeeded) if instant is not None]
        if all(vmim.created > instant for instant in since):
            marker.note_request(vmim.created)
    if vmim.phase == "Failed" and not vmim.aborted:
        ends = (vmim.finished_at, vmim.end, vmim.created, heard_at)
        marker.note_failure(vmim.uid or vmim.name, next(end for end in ends if end is not None))


def _is_same(one: Vmim, other: Vmim) -> bool:
    return one.uid == other.uid and one.vmi_name == other.vmi_name


def _may_belong(vmim: Vmim, vmi: Vmi, *, moved: bool) -> bool:
    """Whether the creations allow it.

    A VMIM that was bound to an older VMI of that name moves only where it is younger than this
    one, or as old to the second and unfinished: what has finished was the older one's.
    """
    if vmim.created is None or vmi.created is None:
        return not moved
    if vmim.created == vmi.created:
        return not (moved and vmim.finished)
    return vmim.created > vmi.created


def _told_by_vmi(state: MigrationState) -> Migration:
    return Migration(start=state.start, end=state.end, outcome=state.outcome, handed_off=True)


def _told_by_vmim(vmim: Vmim) -> Migration:
    return Migration(
        start=vmim.start,
        end=vmim.end,
        finished_at=vmim.finished_at,
        outcome=vmim.outcome,
        handed_off=vmim.handed_off,
    )


def _currency(pod: Pod) -> tuple[float, bool, str]:
    return (pod.created or 0.0, not pod.finished, pod.name)
