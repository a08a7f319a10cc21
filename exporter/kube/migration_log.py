"""Logs each migration: a line when it begins, and a line with its whole record when it has ended.

The field names follow OpenTelemetry, as in KubeVirt's VEP 373 (planned for 1.10), so that a query
for KubeVirt's own records finds these too.
"""

import asyncio
from dataclasses import KW_ONLY, dataclass, field

import structlog
from msgspec.structs import replace

from exporter.counters import Counters
from exporter.engine.evacuations.ended_migrations import EndedMigration, NodesLeft, find_reason
from exporter.engine.facts.history import correct_end
from exporter.engine.facts.mappings import put_newest
from exporter.engine.facts.model import (
    Instant,
    Outcome,
    Pod,
    Requester,
    Seconds,
    Trigger,
    Vmi,
    Vmim,
    Why,
)
from exporter.engine.facts.trust import Trust
from exporter.engine.store.requesters import find_requester, find_trigger
from exporter.engine.store.store import Store
from exporter.kube.objects.kubevirt import Changed


WAIT_FOR_STATE: Seconds = 10.0
"""How long a record waits until KubeVirt copies the VMI's `migrationState` to a finished VMIM.
KubeVirt does this in a later write, and never if the VMI has another migration by then."""
REPORTER = "kubevirt-eviction-exporter"
MIGRATIONS_KEPT = 10_000
"""How many target pods, and how many hotplugs, are remembered; the oldest are dropped."""

log = structlog.stdlib.get_logger()


@dataclass
class MigrationLog:
    """Logs and counts migrations. It must note each change before the `store` applies it.

    Migrations that ended before `started_at` are left out. `window` is the policy's history window.
    """

    store: Store
    counters: Counters
    _: KW_ONLY
    started_at: Instant
    window: Seconds
    _nodes_left: NodesLeft = field(default_factory=NodesLeft)
    _targets: dict[str, tuple[str, tuple[Why, ...]]] = field(default_factory=dict)
    _hotplugs: dict[str, None] = field(default_factory=dict)
    _waiting: dict[str, asyncio.TimerHandle] = field(default_factory=dict)

    def record(self, changed: Changed) -> None:
        """Note an object of a list or of a watch."""
        match changed.fact:
            case Vmi() as vmi:
                self._record_begin(vmi)
            case Vmim() as vmim:
                self._record_vmim(vmim, changed)
            case Pod() as pod if pod.migration_uid and pod.ready:
                self._targets.pop(pod.migration_uid, None)
            case Pod() as pod if pod.migration_uid:
                target = (pod.node, changed.reasons)
                put_newest(self._targets, pod.migration_uid, target, most=MIGRATIONS_KEPT)
                if pod.node:
                    self.counters.expect_migration_to(pod.node, pod.created or 0.0)

    def _record_begin(self, vmi: Vmi) -> None:
        state = vmi.migration
        if state is None or not state.running:
            return
        if state.target_node:
            self.counters.expect_migration_to(state.target_node, state.start or 0.0)
        before = self.store.vmi((vmi.namespace, vmi.name))
        if before is None:
            return
        known = before.migration if before.uid == vmi.uid else None
        if known is not None and known.uid == state.uid and (known.running or known.ended):
            return
        log.info(
            "migration_began",
            **{
                "k8s.namespace.name": vmi.namespace,
                "kubevirt.vm.name": vmi.name,
                "kubevirt.migration.uid": state.uid,
                "kubevirt.migration.source_node": vmi.node,
            },
        )

    def _record_vmim(self, vmim: Vmim, changed: Changed) -> None:
        if not vmim.finished:
            vmi = self.store.vmi((vmim.namespace, vmim.vmi_name))
            if find_trigger(vmim, vmi) is Trigger.HOTPLUG:
                put_newest(self._hotplugs, vmim.uid, None, most=MIGRATIONS_KEPT)
            return
        timer = self._waiting.pop(vmim.uid, None)
        if timer is not None:
            timer.cancel()
        else:
            # Not the end by its node's clock, which may differ from ours by minutes.
            end = vmim.finished_at or vmim.end
            if end is None or end <= self.started_at:
                return
            known = self.store.vmim(vmim.namespace, vmim.name)
            if known is not None and known.uid == vmim.uid and known.finished:
                return
        ended = changed.read_end()
        if ended is None:
            return
        if ended.is_whole:
            self._record(ended)
        else:
            loop = asyncio.get_running_loop()
            self._waiting[vmim.uid] = loop.call_later(WAIT_FOR_STATE, self._record, ended)

    def _record(self, ended: EndedMigration) -> None:
        vmim = ended.vmim
        self._waiting.pop(vmim.uid, None)
        vmi = self.store.find_owner(vmim)
        uid = "" if vmi is None else vmi.uid
        target, why = self._targets.pop(vmim.uid, ("", ()))
        trigger = Trigger.HOTPLUG if vmim.uid in self._hotplugs else vmim.trigger
        self._hotplugs.pop(vmim.uid, None)
        source = ended.source_node or vmim.evacuates
        succeeded = vmim.outcome is Outcome.SUCCEEDED
        if not source and vmi is not None and not succeeded:
            source = vmi.node
        ended = replace(ended, source_node=source, target_node=ended.target_node or target)
        reason = find_reason(ended, vmi, why)
        self.counters.migrations[vmim.outcome, trigger, reason] += 1
        if ended.target_node:
            ended_at = correct_end(vmim.end, vmim.finished_at) or 0.0
            self.counters.count_migration_to(ended.target_node, uid, vmim.outcome, ended_at)
        if succeeded:
            # The time in the queue does not help to predict the next migration.
            seconds = sum(seconds for phase, seconds in ended.phases if phase != "Pending")
            self.counters.migration_durations[trigger].observe(seconds)
            moved = (uid, ended.source_node, ended.target_node)
            if self._nodes_left.record(*moved, vmim.finished_at or 0.0, self.window):
                self.counters.returned_migrations += 1
        message = ended.message or next((reason.message for reason in why if reason.message), "")
        duration = ended.duration
        requester = self._find_requester(vmim)
        log.info(
            "migration_ended",
            **{
                "k8s.namespace.name": vmim.namespace,
                "k8s.object.kind": "VirtualMachineInstanceMigration",
                "k8s.object.name": vmim.name,
                # The reasons of KubeVirt's own Events about a VMIM.
                "k8s.event.reason": "SuccessfulMigration" if succeeded else "FailedMigration",
                "k8s.event.reporter.name": REPORTER,
                "kubevirt.operation.type": "migration",
                "kubevirt.operation.phase": "completed" if succeeded else "failed",
                "kubevirt.vm.name": vmim.vmi_name,
                "kubevirt.vmi.uid": uid,
                "kubevirt.migration.name": vmim.name,
                "kubevirt.migration.uid": vmim.uid,
                "kubevirt.migration.source_node": ended.source_node,
                "kubevirt.migration.target_node": ended.target_node,
                "kubevirt.migration.trigger": str(trigger),
                "kubevirt.migration.mode": ended.mode,
                "kubevirt.migration.phase": ended.phase,
                "kubevirt.migration.phase_seconds": dict(ended.phases),
                "kubevirt.migration.outcome": vmim.outcome.name.lower(),
                "kubevirt.operation.duration_ms": None
                if duration is None
                else int(duration * 1000),
                "error.type": str(reason),
                "error.message": message,
                "user.name": "" if requester is None else requester.user,
            },
        )

    def _find_requester(self, vmim: Vmim) -> Requester | None:
        """Who asked for a migration, as the history has it, or the VMIM itself says."""
        evidence = self.store.evidence(vmim.namespace, vmim.vmi_name, Trust())
        if evidence is None:
            return find_requester(vmim, None)
        known = evidence.history.find(vmim.uid, vmim.end).requested_by
        return known or find_requester(vmim, evidence.marker)
