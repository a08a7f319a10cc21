"""Which of the recorded events would have happened under one policy.

A VMI is evicted when its `evacuationNodeName` is set, or changes to another node. The rules judge
the eviction by the evidence just before it.

If the policy allows it, everything that follows happens as recorded. If the policy blocks it, the
evacuation does not happen. Its marker, its VMIMs and the `migrationState` of its migrations are
hidden from the policy's store, so they count towards no later cooldown. Nothing replaces them.

Two kinds of migrations always happen, without a decision. The first are migrations without an
evacuation (by users, or workload updates). The second are those of evacuations with a VMIM of
priority `system-critical` (drains and maintenance). If that VMIM arrives after the marker, as it
often does, the decision is undone. An eviction of unknown source counts as the descheduler's.

The events of VMIs and VMIMs come from two watches, so their order is unknown. A VMIM may arrive
before its marker, and the state of a migration before its VMIM. Until the VMIM is known, the state
counts as part of the blocked evacuation.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from msgspec import Struct
from msgspec.structs import replace

from exporter.engine.facts.changes import Key, Observed, Removed
from exporter.engine.facts.evidence import Evidence
from exporter.engine.facts.history import History
from exporter.engine.facts.model import (
    Fact,
    Instant,
    Outcome,
    Priority,
    Resource,
    Seconds,
    Trigger,
    Vmi,
    Vmim,
)
from exporter.engine.facts.policy import Policy, Reason
from exporter.engine.facts.trust import Trust
from exporter.engine.store.store import Store
from exporter.engine.verdicts.rules import decide_both
from exporter.whatif.account import Account


KEPT_BY_KUBEVIRT = 5
"""How many finished VMIMs of a VM KubeVirt keeps: the newest."""


class _Eviction(Struct):
    """The last eviction of a VMI.

    It is kept while its evacuation runs, and while any migration of the VMI is hidden.
    `node` is "" once the evacuation is over. `needs_permission` is False for a drain. `reason` is
    why the policy blocked it, or None, and `override` the VM's entry of `policy.overrides`.
    `hidden` has the IDs of its hidden migrations (see `migration_id`), `hidden_before` those of
    earlier evictions.
    """

    node: str
    at: Instant
    needs_permission: bool = True
    reason: Reason | None = None
    override: str = ""
    hidden: set[str] = set()
    hidden_before: set[str] = set()

    def hides(self, migration: str) -> bool:
        """Whether a migration did not happen under this policy."""
        return migration in self.hidden or migration in self.hidden_before


@dataclass
class Counterfactual:
    """Puts into `store` what happens under `policy`, and counts its decisions in `account`.

    `recorded_vmims` has the existing VMIMs of the recording by VMI and ID, hidden or not.
    `restarts_every` is that of `Contender`. `now` is the virtual clock, and `trust` what may be
    believed then.
    """

    policy: Policy
    store: Store
    account: Account
    recorded_vmims: Mapping[Key, Mapping[str, Vmim]]
    restarts_every: Seconds
    now: Instant = 0.0
    trust: Trust = field(default_factory=Trust)
    _evictions: dict[str, _Eviction] = field(default_factory=dict)

    def put_vmi(self, vmi: Vmi, before: Vmi | None) -> None:
        """A VMI changed; `before` is None if the VMI is new or in the first list."""
        if before is not None and vmi.evacuation_node not in ("", before.evacuation_node):
            self._decide(vmi)
        eviction = self._evictions.get(vmi.uid)
        if eviction is None:
            self._put(vmi)
            return
        self._hide_new_migration(eviction, vmi, before)
        if vmi.evacuation_node != eviction.node:
            eviction.node = ""
        self._prune(eviction, vmi)
        self._put_visible(vmi, eviction)

    def put_vmim(self, vmim: Vmim, vmi: Vmi | None, *, is_new: bool) -> None:
        """A VMIM of `vmi` was added or changed."""
        eviction = None if vmi is None else self._evictions.get(vmi.uid)
        if vmi is None or eviction is None:
            self._put(vmim)
            return
        if is_new and not _evacuates(vmim, eviction.node):
            # If the state of a migration that is no evacuation was hidden, show it again.
            if vmim.uid in eviction.hidden and vmim.trigger is not Trigger.EVACUATION:
                eviction.hidden.discard(vmim.uid)
                self._put_visible(vmi, eviction)
        elif is_new and vmim.priority is Priority.SYSTEM_CRITICAL and eviction.needs_permission:
            self._take_back(vmi, eviction)
        elif is_new and eviction.reason is not None:
            eviction.hidden.add(migration_id(vmim))
        if not eviction.hides(migration_id(vmim)):
            self._put(vmim)

    def remove_vmim(self, namespace: str, name: str, uid: str, vmi: Vmi | None) -> None:
        """A VMIM of `vmi` was deleted."""
        self._remove(Resource.VMIMS, namespace, name, uid)
        eviction = None if vmi is None else self._evictions.get(vmi.uid)
        if vmi is not None and eviction is not None:
            self._prune(eviction, vmi)

    def remove_vmi(self, vmi: Vmi) -> None:
        """A VMI was deleted."""
        self._remove(Resource.VMIS, vmi.namespace, vmi.name)
        self._evictions.pop(vmi.uid, None)

    def _put(self, fact: Fact) -> None:
        self.store.apply(Observed(fact), self.now)

    def _remove(self, resource: Resource, namespace: str, name: str, uid: str = "") -> None:
        self.store.apply(Removed(resource, namespace, name, uid), self.now)

    def _decide(self, vmi: Vmi) -> None:
        """Decide about a new eviction."""
        former = self._evictions.pop(vmi.uid, None)
        evidence = self.store.evidence(vmi.namespace, vmi.name, self.trust)
        if evidence is None:
            return
        eviction = self._evictions[vmi.uid] = _Eviction(vmi.evacuation_node, self.now)
        if former is not None:
            eviction.hidden_before = former.hidden_before | former.hidden
        # The first VMIM of this evacuation may have arrived before the marker.
        own = [v for v in evidence.vmims if not v.finished and _evacuates(v, vmi.evacuation_node)]
        if any(vmim.priority is Priority.SYSTEM_CRITICAL for vmim in own):
            eviction.needs_permission = False
            self.account.others += 1
            return
        earlier = tuple(vmim for vmim in evidence.vmims if vmim not in own)
        evidence = replace(evidence, vmims=earlier)
        evidence = forget(evidence, self.restarts_every, self.now)
        filtered, pre_eviction, _ = decide_both(evidence, self.policy.of(evidence.vmi), self.now)
        eviction.reason = filtered.reason or pre_eviction.reason
        eviction.override = evidence.vmi.override
        self.account.count_decision(eviction.reason, self.now, override=eviction.override)
        if eviction.reason is not None:
            for vmim in own:
                eviction.hidden.add(migration_id(vmim))
                self._remove(Resource.VMIMS, vmim.namespace, vmim.name)

    def _take_back(self, vmi: Vmi, eviction: _Eviction) -> None:
        """The eviction proves to be a drain: undo the decision and show what it hid."""
        override = eviction.override
        self.account.count_decision(eviction.reason, eviction.at, -1, override=override)
        self.account.others += 1
        eviction.needs_permission, eviction.reason = False, None
        for name, vmim in self._vmims_of(vmi).items():
            if name in eviction.hidden:
                self._put(vmim)
        eviction.hidden.clear()
        self._put_visible(vmi, eviction)

    def _hide_new_migration(self, eviction: _Eviction, vmi: Vmi, before: Vmi | None) -> None:
        """Hide a migration that begins during a blocked evacuation, and may be part of it."""
        state = vmi.migration
        if not eviction.node or eviction.reason is None or state is None or not state.uid:
            return
        known = None if before is None else before.migration
        if known is not None and known.uid == state.uid:
            return
        vmim = self._vmims_of(vmi).get(state.uid)
        if vmim is None or _evacuates(vmim, eviction.node):
            eviction.hidden.add(state.uid)

    def _prune(self, eviction: _Eviction, vmi: Vmi) -> None:
        """Forget hidden migrations that neither a VMIM nor the VMI names any more."""
        named = {*self._vmims_of(vmi), "" if vmi.migration is None else vmi.migration.uid}
        eviction.hidden &= named
        eviction.hidden_before &= named
        if not (eviction.node or eviction.hidden or eviction.hidden_before):
            self._evictions.pop(vmi.uid, None)

    def _vmims_of(self, vmi: Vmi) -> Mapping[str, Vmim]:
        return self.recorded_vmims.get((vmi.namespace, vmi.name), {})

    def _put_visible(self, vmi: Vmi, eviction: _Eviction) -> None:
        """Put the VMI into the store, but neither its marker nor migrations that did not happen."""
        if eviction.node and eviction.reason is not None:
            vmi = replace(
                vmi, evacuation_node="", eviction_requested_at=None, evicted_by_descheduler=False
            )
        if vmi.migration is not None and eviction.hides(vmi.migration.uid):
            known = self.store.vmi((vmi.namespace, vmi.name))
            vmi = replace(
                vmi,
                migration=None if known is None else known.migration,
                other_uids=() if known is None else known.other_uids,
            )
        self._put(vmi)


def migration_id(vmim: Vmim) -> str:
    """The VMIM's UID, or its name if the recording has no UID."""
    return vmim.uid or vmim.name


def _evacuates(vmim: Vmim, node: str) -> bool:
    """Whether a VMIM was created to evacuate that node."""
    return vmim.trigger is Trigger.EVACUATION and vmim.evacuates == node != ""


def find_restart(every: Seconds, now: Instant) -> Instant:
    """The last restart of a caller that restarts at each multiple of `every`; -inf for 0."""
    return now // every * every if every else -math.inf


def forget(evidence: Evidence, every: Seconds, now: Instant) -> Evidence:
    """What a caller that restarts each `every` seconds still knows of a VMI; with 0, all of it.

    The caller keeps its history only in memory, as the reference plugin does. While it runs, it
    counts every migration that ends, failed or not. When it starts, it counts the VMIMs that
    KubeVirt still has and that succeeded. (An attempt that failed before its hand-off takes one of
    the places that KubeVirt has for finished VMIMs, too. That is ignored here, so the caller knows
    at most this much.)
    """
    restarted_at = find_restart(every, now)
    records = evidence.history.records()
    older = sorted(
        (record.known_end, key)
        for key, record in records.items()
        if record.known_end is not None and record.known_end <= restarted_at
    )
    if not older:
        return evidence
    lost = {key for _, key in older[:-KEPT_BY_KUBEVIRT]}
    lost.update(key for _, key in older if records[key].outcome is not Outcome.SUCCEEDED)
    kept = {key: record for key, record in records.items() if key not in lost}
    return replace(evidence, history=History(kept, evidence.history.revision + len(lost)))
