"""Who asked for an eviction or a migration, according to the webhook and to the objects."""

from collections import OrderedDict
from collections.abc import Iterable
from enum import StrEnum

from exporter.engine.facts.evidence import (
    ASKED_WITHIN,
    Marker,
    RequestedThrough,
)
from exporter.engine.facts.model import (
    Eviction,
    Instant,
    Priority,
    Requester,
    Seconds,
    Trigger,
    Vmi,
    Vmim,
)


VMIS_KEPT = 5_000
SAME_REQUEST: Seconds = 5.0
"""An attempt that is up to this much older than the request still belongs to it: KubeVirt writes
whole seconds, and may create the VMIM before it sets the condition EvictionRequested."""


class Requesters:
    """The first request for the eviction of each VMI, by UID; it is kept for `ASKED_WITHIN`.

    The admission webhook is called before KubeVirt marks the VMI, so a request may have no effect.
    """

    def __init__(self) -> None:
        self._first: OrderedDict[str, Requester] = OrderedDict()

    def record(self, uid: str, requester: Requester) -> None:
        """Note a request for the eviction of a VMI; the newest `VMIS_KEPT` VMIs are kept."""
        self._prune(requester.at)
        self._first.setdefault(uid, requester)
        if len(self._first) > VMIS_KEPT:
            self._first.popitem(last=False)

    def take(self, uid: str, now: Instant) -> Requester | None:
        """Remove and return the request for a VMI that KubeVirt has just marked."""
        self._prune(now)
        return self._first.pop(uid, None)

    def _prune(self, now: Instant) -> None:
        while self._first and not 0 <= now - next(iter(self._first.values())).at <= ASKED_WITHIN:
            self._first.popitem(last=False)


class Source(StrEnum):
    """Who requested an evacuation, according to its Eviction, its VMIM or its VMI."""

    DESCHEDULER = "descheduler"
    """Priority system-maintenance, or no priority and the annotation
    kubevirt.io/eviction-source."""
    OTHER = "other"
    """Priority system-critical: a drain, or an eviction by anybody else; or a drain by a taint."""
    UNKNOWN = "unknown"
    """There is no priority and no annotation, as always before KubeVirt 1.7."""


def find_source(
    vmi: Vmi, vmims: Iterable[Vmim], marker: Marker, eviction: Eviction | None
) -> Source:
    """Who requested an evacuation: by the Eviction of the VM's pod, or else by the priority of the
    newest attempt since the request.

    The annotation counts only if no attempt has a priority: it may belong to an older request.
    """
    if marker.through is RequestedThrough.TAINT:
        return Source.OTHER
    if eviction is not None and eviction.askers:
        return Source.DESCHEDULER if eviction.by_descheduler else Source.OTHER
    since = marker.requested_at - SAME_REQUEST
    attempts = [
        v
        for v in vmims
        if v.evacuates == marker.node
        and v.priority is not None
        and v.created is not None
        and v.created >= since
    ]
    newest = max(attempts, key=lambda v: (v.created or 0.0, v.name), default=None)
    if newest is not None:
        is_rebalancing = newest.priority is Priority.SYSTEM_MAINTENANCE
        return Source.DESCHEDULER if is_rebalancing else Source.OTHER
    return Source.DESCHEDULER if vmi.evicted_by_descheduler else Source.UNKNOWN


def find_withdrawn(marker: Marker, eviction: Eviction | None) -> tuple[str, ...]:
    """Who asked for an evacuation by EvictionRequests, if all of them have withdrawn.

    KubeVirt must have marked the VMI while they asked, or else somebody else has asked too.
    """
    if (
        marker.through is RequestedThrough.TAINT
        or eviction is None
        or not eviction.is_withdrawn
        or eviction.created is None
        or eviction.failed_at is None
    ):
        return ()
    asked, withdrew = eviction.created - SAME_REQUEST, eviction.failed_at + SAME_REQUEST
    if not asked <= marker.requested_at <= withdrew:
        return ()
    return tuple(requester.name for requester in eviction.requesters)


def find_trigger(vmim: Vmim, vmi: Vmi | None) -> Trigger:
    """Why a VMIM was created; a hotplug is known by its VMI, while the VMIM has not ended."""
    is_update = vmim.trigger is Trigger.WORKLOAD_UPDATE and not vmim.finished
    return Trigger.HOTPLUG if is_update and vmi is not None and vmi.hotplugs else vmim.trigger


def find_requester(vmim: Vmim, marker: Marker | None) -> Requester | None:
    """Who asked for a migration: the user who made the VMIM, or asked for the evacuation.

    `marker` is that of its VMI. KubeVirt itself makes all VMIMs that are not manual.
    """
    if vmim.created is None:
        return None
    if vmim.trigger is Trigger.MANUAL and vmim.modified_by:
        return Requester(vmim.created, vmim.modified_by)
    if marker is None or vmim.evacuates != marker.node:
        return None
    return marker.asked_by if vmim.created >= marker.requested_at - SAME_REQUEST else None
