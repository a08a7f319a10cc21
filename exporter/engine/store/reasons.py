"""The reasons why evacuations do not progress, as the cluster objects give them.

Reasons come with objects: a VMI, its VMIMs and their target pods. A later version of an object
replaces its reasons. The reasons of a deleted VMIM or pod are kept until the evacuation is over:
KubeVirt deletes a target pod that cannot be scheduled, and while the next attempt waits it has no
target pod that could give the reason.

Only VMIs that are evacuating or otherwise moved have reasons, so an idle VMI costs no memory. There
are two exceptions. An idle VMI that is not live-migratable has the reason word of its condition
LiveMigratable. An attempt and its target pod may be read before their VMI, before its marker, or
before the taint of its node.
"""

from collections.abc import Iterator, Sequence
from typing import TypeAlias

from msgspec.structs import replace

from exporter.engine.facts.mappings import Table
from exporter.engine.facts.model import Instant, Pod, Vmi, Vmim, Why, WhySource
from exporter.engine.store.launchers import LauncherIndex
from exporter.engine.store.migrations import VmimIndex
from exporter.engine.store.nodes import NodeIndex
from exporter.engine.store.tracker import EvacuationTracker
from exporter.engine.store.vmi_record import VmiIndex


FEWEST_FAILURES = 2
"""A VMI with this many failed VMIMs has the reasons of its attempts, even without a request."""
REASONS_SHOWN = 8
"""An evacuation has at most this many reasons."""
NODE_SELECTOR, ADDED_NODE_SELECTOR = SELECTORS = ("NodeSelector", "AddedNodeSelector")
"""The reason words of the node selectors of a VMI and of an attempt (source PodScheduled)."""
SOURCE_SILENT, TARGET_SILENT = "SourceNodeUnknown", "TargetNodeUnknown"
"""The reason words of nodes that do not answer: the VM's own, and the target pod's."""
TERMINATING = "Terminating"
"""The reason word of a target pod that runs and is being deleted (source TargetContainer)."""

_Object: TypeAlias = tuple[type, str, str]


class ReasonTable:
    """The reasons by object, and for each evacuation the reasons of its deleted objects."""

    def __init__(
        self,
        vmis: VmiIndex,
        vmims: VmimIndex,
        launchers: LauncherIndex,
        nodes: NodeIndex,
        evacuations: EvacuationTracker,
    ) -> None:
        self._vmis = vmis
        self._vmims = vmims
        self._launchers = launchers
        self._nodes = nodes
        self._evacuations = evacuations
        self._present = Table[_Object, tuple[Why, ...]]()
        self._past = Table[str, tuple[Why, ...]]()

    def of(self, vmi: Vmi) -> tuple[Why, ...]:
        """The reasons of a VMI, newest first; those without a date apply now and come first.

        Attempts that ended before the evacuation was requested give no reasons. Node selectors
        are reasons only if a target cannot be scheduled. A node that does not answer is a reason.
        """
        since = self._evacuations.find_request(vmi.uid)
        objects = [_key(vmi)]
        objects += [_key(vmim) for vmim in self._vmims.owned_by(vmi)]
        present = [why for key in objects for why in self._present.get(key, ())]
        launcher = self._launchers.current(vmi)
        targets = {vmim.uid for vmim in self._vmims.owned_by(vmi) if vmim.phase != "Succeeded"}
        for pod in self._launchers.of(vmi):
            # The deletion of the VM's own pod ends the VM; that of another pod does not.
            is_own = pod is launcher and pod.migration_uid not in targets
            hidden = WhySource.TARGET_CONTAINER if is_own else WhySource.DELETION
            present += [why for why in self._present.get(_key(pod), ()) if why.source is not hidden]
        failed = WhySource.FAILED_ATTEMPT
        reasons = [why for why in present if why.source is not failed or _is_since(why, since)]
        reasons += [why for why in self._past.get(vmi.uid, ()) if _is_since(why, since)]
        unscheduled = WhySource.POD_SCHEDULED
        if all(why.source is not unscheduled or why.reason in SELECTORS for why in reasons):
            reasons = [why for why in reasons if why.source is not unscheduled]
        return (*self._find_silent(vmi), *_newest(reasons))[:REASONS_SHOWN]

    def _find_silent(self, vmi: Vmi) -> Iterator[Why]:
        """A reason for each node of the VMI's pods that does not answer, the VMI's own first."""
        pods = {pod.node for pod in self._launchers.of(vmi) if not pod.finished}
        places = {vmi.node: SOURCE_SILENT} | dict.fromkeys(sorted(pods - {vmi.node}), TARGET_SILENT)
        for name, reason in places.items():
            node = self._nodes.find(name)
            if node is not None and node.is_silent:
                message = f"the kubelet of {name} does not answer"
                yield Why(WhySource.NODE, reason, message, node.silent_since)

    def put(self, fact: Vmi | Vmim | Pod, reasons: tuple[Why, ...]) -> None:
        """Replace the reasons of an object that is in the store."""
        if reasons and self._may_hold(fact):
            self._present[_key(fact)] = reasons
        elif self._present:
            self._present.pop(_key(fact), None)

    def remove(self, fact: Vmim | Pod, owner: str, now: Instant) -> None:
        """Remove a VMIM or pod, but keep its reasons while the VMI with the UID `owner` evacuates.

        Its deletion is over, and no reason any more. `owner` is "" if that VMI is not known. A
        reason without a date gets the date `now`, because it applied until now.
        """
        reasons = [why for why in self._present.pop(_key(fact), ()) if not _is_deletion(why)]
        if reasons and self._is_moving(owner):
            dated = (why if why.at is not None else replace(why, at=now) for why in reasons)
            self._past[owner] = _newest([*dated, *self._past.get(owner, ())])

    def remove_vmi(self, vmi: Vmi) -> None:
        """Remove a deleted VMI."""
        self._present.pop(_key(vmi), None)
        self._past.pop(vmi.uid, None)

    def end(self, vmi: Vmi) -> None:
        """Drop the reasons of an evacuation that is over, or of a move that has succeeded."""
        self._past.pop(vmi.uid, None)
        for attempt in self._list_attempts(vmi):
            if attempt.finished:
                self._present.pop(_key(attempt), None)

    def settle(self, vmi: Vmi) -> None:
        """Drop the reasons that a VMI which is not moving does not need.

        They are those of attempts that were read before it, or of an evacuation that was cancelled.
        """
        if self._past and not self._is_moving(vmi.uid):
            self._past.pop(vmi.uid, None)
        for attempt in self._list_attempts(vmi):
            if not self._may_hold(attempt):
                self._present.pop(_key(attempt), None)

    def _list_attempts(self, vmi: Vmi) -> tuple[Vmim | Pod, ...]:
        if not self._present:
            return ()  # the usual case for every VMI of the first list
        return *self._vmims.owned_by(vmi), *self._launchers.of(vmi)

    def _may_hold(self, fact: Vmi | Vmim | Pod) -> bool:
        if isinstance(fact, Vmi):
            return True
        if isinstance(fact, Pod):
            is_early = bool(fact.migration_uid) and fact.vmi_uid not in self._vmis.by_uid
            return is_early or not fact.finished or self._is_moving(fact.vmi_uid)
        binding = self._vmims.find(fact.namespace, fact.name)
        owner = "" if binding is None else binding.owner
        nodes_come = self._evacuations.sees_nodes is None
        is_early = not owner or (bool(fact.evacuates) and nodes_come)
        return is_early or not fact.finished or self._is_moving(owner)

    def _is_moving(self, uid: str) -> bool:
        """Whether a VMI is evacuating, has an unfinished VMIM, or fails again and again."""
        if uid in self._evacuations:
            return True
        record = self._vmis.by_uid.get(uid)
        if record is None:
            return False
        return self._vmims.failing[record.key] >= FEWEST_FAILURES or any(
            not binding.vmim.finished for binding in self._vmims.naming(record.key)
        )


def _key(fact: Vmi | Vmim | Pod) -> _Object:
    return type(fact), fact.namespace, fact.name


def _is_deletion(why: Why) -> bool:
    """Whether a reason is that a pod or a VM is being deleted."""
    return why.source is WhySource.DELETION or why.reason == TERMINATING


def _is_since(why: Why, since: Instant | None) -> bool:
    return since is None or why.at is None or why.at >= since


def _newest(reasons: Sequence[Why]) -> tuple[Why, ...]:
    """The newest reasons, without repetitions.

    A message that each attempt repeats is listed once, with its newest date. KubeVirt writes a
    failure both to the VMI and to the VMIM, so only the longer message is listed. Node selectors
    follow the scheduler's message that they explain.
    """
    judged = max(
        (why.at or 0.0 for why in reasons if why.source is WhySource.POD_SCHEDULED), default=0.0
    )

    def recency(why: Why) -> tuple[bool, Instant, int]:
        if why.reason in SELECTORS:
            return False, judged, -1
        return why.at is None, why.at or 0.0, len(why.message)

    distinct = dict[tuple[object, ...], Why]()
    for why in sorted(reasons, key=recency, reverse=True):
        failed = why.source is WhySource.FAILED_ATTEMPT
        distinct.setdefault((why.at,) if failed else (why.source, why.reason, why.message), why)
    return tuple(distinct.values())[:REASONS_SHOWN]
