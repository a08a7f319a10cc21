"""What would these policies have done? Runs the engine on a recording, with the recording's clock.

Each policy has its own `Store`, as a running exporter has, and one pass replays the recording for
all of them. `counterfactual` decides about each recorded eviction and hides what follows from a
blocked one. `vm_totals` and `stuck_timers` count what is left, into an `Account`.

Limits:

- A request that changes nothing is in no recording. Such a request is the eviction of a VMI that is
  already evacuating, so the guard `evacuations` has almost no effect in a replay.
- Nothing reacts to a block. A VM whose eviction is blocked still has its recorded node, pods and
  load, and the descheduler's later choices are as recorded. If evictions were blocked during the
  recording, the recording has fewer evictions. The numbers compare policies under the same demand.
  They do not predict a cluster.
- A Store cannot undo the end of a migration. If the watch of VMIs lags by a whole migration, its
  VMIM finishes before the marker arrives. That migration counts towards the backoff even if the
  policy then blocks the evacuation.
- A `system-critical` VMIM undoes the decision at any time. If a drain joins a descheduler's
  evacuation hours later, the whole evacuation counts as a drain.

The memory depends on the number of policies and of VMs that exist at the same time. Of deleted VMs,
only counts are kept.
"""

from collections.abc import Iterable, Mapping

from msgspec.structs import replace

from exporter.engine.evacuations.ended_migrations import EndedMigration, find_reason
from exporter.engine.facts.changes import (
    Change,
    Key,
    Notice,
    NoticeKind,
    Observed,
    Removed,
)
from exporter.engine.facts.model import (
    EndReason,
    Instant,
    KubeVirtSettings,
    Outcome,
    Pod,
    Resource,
    Seconds,
    Vmi,
    Vmim,
    Why,
    WhySource,
)
from exporter.engine.facts.overrides import OverrideChooser
from exporter.engine.facts.trust import NamespaceTrust, Trust
from exporter.engine.store.store import Store
from exporter.kube.objects.kubevirt import Traits
from exporter.whatif.account import Account, Comparison, Contender, Touched
from exporter.whatif.counterfactual import Counterfactual, find_restart, forget, migration_id
from exporter.whatif.recording import Kind, Recorded
from exporter.whatif.stuck_timers import StuckTimers
from exporter.whatif.vm_totals import VmTotals


_UNSCHEDULABLE = Why(WhySource.POD_SCHEDULED, "Unschedulable")


class Replay:
    """Replays events for all contenders at once: `take` each event, then `finish`.

    `events` is the number of events, and `now` the virtual clock: the latest instant of all events
    so far.
    """

    def __init__(self, contenders: Iterable[Contender]) -> None:
        self._vmis: dict[Key, Vmi] = {}
        self._lives_since: dict[Key, Instant] = {}
        self._vmims: dict[Key, Vmim] = {}
        self._unschedulable: set[str] = set()
        self._vmims_by_vmi: dict[Key, dict[str, Vmim]] = {}
        self.now: Instant = 0.0
        self.events = 0
        self._unseen = frozenset({Resource.VMIMS, Resource.PODS})
        self._vms = 0
        self._vm_seconds: Seconds = 0.0
        self._began: Instant | None = None
        self._worlds = [
            _World(contender, self._vmims_by_vmi, self._unseen) for contender in contenders
        ]

    def take(self, event: Recorded) -> None:
        """Replay the next event. If its instant is earlier than the clock, the clock stays."""
        self.events += 1
        self.now = max(self.now, event.at)
        for world in self._worlds:
            world.advance(self.now)
        if self._began is None and event.kind is not Kind.ADDED:
            self._begin()
        match event.fact:
            case Vmi() as vmi:
                self._put_vmi(vmi, event.traits)
            case Vmim() as vmim:
                self._put_vmim(vmim, event.reason)
            case Pod() | KubeVirtSettings() as fact:
                if isinstance(fact, Pod) and fact.migration_uid:
                    if fact.unschedulable:
                        self._unschedulable.add(fact.migration_uid)
                    elif fact.scheduled:
                        self._unschedulable.discard(fact.migration_uid)
                for world in self._worlds:
                    world.apply(Observed(fact))
            case _:
                self._remove(event)
        self._record_visibility(event)

    def _record_visibility(self, event: Recorded) -> None:
        """A resource counts as visible unless its last event is REJECTED."""
        is_rejected = event.kind is Kind.REJECTED
        if event.resource in (Resource.VMIMS, Resource.PODS) and is_rejected != (
            event.resource in self._unseen
        ):
            self._unseen ^= {event.resource}
            for world in self._worlds:
                world.record_trust(Trust(NamespaceTrust(self._unseen)))

    def finish(self) -> Comparison:
        """End the recording and return what each contender would have done."""
        began = self._begin() if self._began is None else self._began
        for since in self._lives_since.values():
            self._vm_seconds += self.now - since
        return Comparison(
            began=began,
            ended=self.now,
            events=self.events,
            vms=self._vms,
            vm_seconds=self._vm_seconds,
            accounts=[world.close() for world in self._worlds],
        )

    def _begin(self) -> Instant:
        """The first lists are complete: time counts from here on."""
        self._began = self.now
        self._lives_since = dict.fromkeys(self._vmis, self.now)
        for world in self._worlds:
            world.begin()
        return self.now

    def _put_vmi(self, vmi: Vmi, traits: Traits | None) -> None:
        key = (vmi.namespace, vmi.name)
        before = self._vmis.get(key)
        if before is not None and before.uid != vmi.uid:
            self._remove_vmi(key, before)
            before = None
        if before is None:
            self._vms += 1
            self._lives_since[key] = self.now
        self._vmis[key] = vmi
        for world in self._worlds:
            world.put_vmi(vmi, None if self._began is None else before, traits)

    def _put_vmim(self, vmim: Vmim, recorded: EndReason) -> None:
        key = (vmim.namespace, vmim.name)
        before = self._vmims.get(key)
        is_new = before is None or before.uid != vmim.uid
        if before is not None:
            self._forget_vmim(before)
        self._vmims[key] = vmim
        owner = (vmim.namespace, vmim.vmi_name)
        self._vmims_by_vmi.setdefault(owner, {})[migration_id(vmim)] = vmim
        vmi = self._vmis.get(owner)
        failure = None
        if vmim.finished and vmim.outcome is Outcome.FAILED:
            why = [_UNSCHEDULABLE] if vmim.uid in self._unschedulable else []
            failure = find_reason(EndedMigration(vmim=vmim), vmi, why)
            if vmim.handed_off and recorded is not EndReason.OTHER:
                failure = recorded
        for world in self._worlds:
            world.put_vmim(vmim, vmi, is_new=is_new)
            if failure is not None:
                world.count_failure(vmim, failure)

    def _remove(self, event: Recorded) -> None:
        if event.kind is not Kind.DELETED or event.resource is None:
            return
        key = (event.namespace, event.name)
        if event.resource is Resource.VMIS:
            gone = self._vmis.get(key)
            if gone is not None and event.uid in ("", gone.uid):
                self._remove_vmi(key, gone)
        elif event.resource is Resource.VMIMS:
            vmim, vmi = self._vmims.pop(key, None), None
            if vmim is not None:
                self._forget_vmim(vmim)
                self._unschedulable.discard(vmim.uid)
                vmi = self._vmis.get((vmim.namespace, vmim.vmi_name))
            for world in self._worlds:
                world.remove_vmim(event, vmim, vmi)
        else:
            for world in self._worlds:
                world.apply(Removed(event.resource, *key, event.uid))

    def _remove_vmi(self, key: Key, vmi: Vmi) -> None:
        del self._vmis[key]
        since = self._lives_since.pop(key)
        if self._began is not None:
            self._vm_seconds += self.now - since
        for world in self._worlds:
            world.remove_vmi(vmi)

    def _forget_vmim(self, vmim: Vmim) -> None:
        owner = (vmim.namespace, vmim.vmi_name)
        vmims = self._vmims_by_vmi.get(owner, {})
        vmims.pop(migration_id(vmim), None)
        if not vmims:
            self._vmims_by_vmi.pop(owner, None)


class _World:
    """One contender's store, and what is counted from it."""

    def __init__(
        self,
        contender: Contender,
        recorded_vmims: Mapping[Key, Mapping[str, Vmim]],
        hidden: frozenset[Resource],
    ) -> None:
        self._store = Store(endings_kept=contender.policy.endings_kept)
        self._account = Account(
            contender=contender,
            touched={entry.name: Touched(entry.name) for entry in contender.policy.overrides},
        )
        self._counterfactual = Counterfactual(
            contender.policy,
            self._store,
            self._account,
            recorded_vmims,
            contender.restarts_every,
        )
        self._restarts_every = contender.restarts_every
        self._totals = VmTotals(contender.policy, self._account)
        self._timers = StuckTimers(contender.stuck, self._store, self._account.stuck)
        self._chooser = OverrideChooser(contender.policy)
        self._overrides: dict[str, str] = {}
        self._reasons: dict[str, EndReason] = {}
        self._has_begun = False
        self.record_trust(Trust(NamespaceTrust(hidden)))
        self._now: Instant = 0.0
        self._notices: list[Notice] = []
        self._store.subscribe(self._notices.append, NoticeKind.EVIDENCE)

    def begin(self) -> None:
        """The first lists are complete: count from here on."""
        self._has_begun = True
        for series in self._account.series:
            series.began = self._now
        for evidence in list(self._store.all_evidence(self._trust)):
            self._count(evidence.vmi)

    def advance(self, now: Instant) -> None:
        """Move the clock to the next event."""
        self._notices.clear()
        self._timers.advance(now)
        before, self._now = self._now, now
        self._counterfactual.now = now
        if self._has_begun and find_restart(self._restarts_every, now) > before:
            for evidence in list(self._store.all_evidence(self._trust)):
                self._count(evidence.vmi)

    def record_trust(self, trust: Trust) -> None:
        """Note what may be believed from now on."""
        self._trust = self._counterfactual.trust = self._timers.trust = trust

    def apply(self, change: Change) -> None:
        """Apply a change that does not depend on the policy."""
        self._store.apply(change, self._now)

    def put_vmi(self, vmi: Vmi, before: Vmi | None, traits: Traits | None) -> None:
        """A recorded VMI changed. Without traits its namespace chooses its override."""
        labels = {} if traits is None else traits.read_labels()
        priority_class = "" if traits is None else traits.priority_class
        chosen = self._chooser.choose(vmi.namespace, labels, priority_class)
        if chosen and self._overrides.get(vmi.uid) != chosen:
            self._account.touched[chosen].add(f"{vmi.namespace}/{vmi.name}")
        self._overrides[vmi.uid] = chosen
        self._counterfactual.put_vmi(self._override(vmi), before)
        self._count_changes(vmi)

    def put_vmim(self, vmim: Vmim, vmi: Vmi | None, *, is_new: bool) -> None:
        """A recorded VMIM of `vmi` was added or changed."""
        vmi = None if vmi is None else self._override(vmi)
        self._counterfactual.put_vmim(vmim, vmi, is_new=is_new)
        self._count_changes(vmi)

    def count_failure(self, vmim: Vmim, reason: EndReason) -> None:
        """A recorded VMIM has failed. Unless this policy hides it, its last reason counts."""
        migration = migration_id(vmim)
        known = self._reasons.get(migration)
        if known is None and (
            not self._has_begun or self._store.vmim(vmim.namespace, vmim.name) is None
        ):
            return
        counted = self._account.migrations.reasons
        if known is not None:
            counted[known] -= 1
            if not counted[known]:
                del counted[known]
        self._reasons[migration] = reason
        counted[reason] += 1

    def remove_vmim(self, event: Recorded, vmim: Vmim | None, vmi: Vmi | None) -> None:
        """A recorded VMIM of `vmi` was deleted; its failure stays counted."""
        if vmim is not None:
            self._reasons.pop(migration_id(vmim), None)
        vmi = None if vmi is None else self._override(vmi)
        self._counterfactual.remove_vmim(event.namespace, event.name, event.uid, vmi)
        self._count_changes(vmi)

    def remove_vmi(self, vmi: Vmi) -> None:
        """A recorded VMI was deleted."""
        self._counterfactual.remove_vmi(vmi)
        self._overrides.pop(vmi.uid, None)
        self._totals.complete(vmi.uid, self._now)
        self._timers.end(vmi.uid, self._now)

    def close(self) -> Account:
        """End the recording and return what was counted."""
        self._totals.close(self._now)
        self._timers.close(self._now)
        for series in self._account.series:
            series.find_or_make_bin(self._now)
        return self._account

    def _override(self, vmi: Vmi) -> Vmi:
        """The VMI with the name of its entry in this policy's `overrides`."""
        chosen = self._overrides.get(vmi.uid, "")
        return replace(vmi, override=chosen) if chosen else vmi

    def _count_changes(self, vmi: Vmi | None) -> None:
        """Count what an event has changed in the store's evidence about this VMI."""
        if vmi is not None and self._notices:
            self._count(vmi)

    def _count(self, vmi: Vmi) -> None:
        evidence = self._store.evidence(vmi.namespace, vmi.name, self._trust)
        if evidence is None:
            return
        self._totals.count_migration(evidence.vmi)
        if self._has_begun:
            known = forget(evidence, self._restarts_every, self._now)
            self._totals.measure_cooldown(known, self._now)
            self._timers.check(evidence, self._now)
