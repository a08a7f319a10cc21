"""Reads the Evictions of lifecycle.k8s.io, which hold who asks that a pod leaves.

Source: `staging/src/k8s.io/api/lifecycle/v1alpha1/types.go` of Kubernetes 1.38, and what its
controllers write.
"""

from sys import intern

from exporter.engine.facts.model import Eviction, EvictionRequester
from exporter.kube.objects import wire
from exporter.kube.objects.facts import NAME_LIMIT, text_of
from exporter.kube.objects.instants import parse_instant
from exporter.text import MESSAGE_LIMIT, clean


REQUESTERS_KEPT = 16
"""Of so many requesters the names are kept; nobody reads more."""
RESPONDERS_KEPT = 12
"""A pod has at most 10 responders of its own, and Kubernetes adds one."""
_HAS_BEGUN = ("Active", "Completed", "Interrupted", "Canceled")


def read_eviction(body: wire.EvictionObject) -> Eviction | str:
    """An Eviction, or why it cannot be used."""
    spec, status = body.spec or wire.EvictionSpec(), body.status or wire.EvictionStatus()
    pod = None if spec.target is None else spec.target.pod
    if pod is None or not pod.name:
        return "spec.target.pod.name: expected the name of a pod, there is none"
    metadata = body.metadata
    turn = _find_turn(status.targetResponders or [])
    entries = {responder.name: responder for responder in status.responders or ()}
    entry = entries.get(turn.name, wire.Responder())
    conditions = {c.type: c for c in status.conditions or () if c.status == "True"}
    failed = conditions.get("Failed")
    return Eviction(
        namespace=intern(metadata.namespace or ""),
        name=metadata.name or "",
        uid=metadata.uid or "",
        pod=pod.name,
        pod_uid=pod.uid or "",
        created=parse_instant(metadata.creationTimestamp),
        requesters=tuple(
            EvictionRequester(
                intern(clean(requester.name, NAME_LIMIT)), intern(clean(requester.intent or ""))
            )
            for requester in (status.requesters or ())[:REQUESTERS_KEPT]
            if requester.name
        ),
        responder=intern(clean(turn.name or "", NAME_LIMIT)),
        state=intern(clean(turn.state or "", NAME_LIMIT)),
        responders=tuple(
            intern(clean(responder.name, NAME_LIMIT))
            for responder in (status.targetResponders or ())[:RESPONDERS_KEPT]
            if responder.name
        ),
        started_at=parse_instant(entry.startTime),
        heartbeat_at=parse_instant(entry.heartbeatTime),
        message=clean(text_of(entry.message), MESSAGE_LIMIT),
        expected_at=parse_instant(entry.expectedCompletionTime),
        evicted="TargetEvicted" in conditions,
        failed="" if failed is None else intern(clean(text_of(failed.reason) or "Failed")),
        failed_at=None if failed is None else parse_instant(failed.lastTransitionTime),
    )


def _find_turn(responders: list[wire.TargetResponder]) -> wire.TargetResponder:
    """The active responder; without one, the last whose turn it was, or else the first."""
    active = (responder for responder in responders if responder.state == "Active")
    begun = [responder for responder in responders if responder.state in _HAS_BEGUN]
    last = begun[-1] if begun else next(iter(responders), wire.TargetResponder())
    return next(active, last)
