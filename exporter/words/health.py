"""Whether the exporter can be trusted, in words, and what it lacks without a resource."""

from collections.abc import Collection, Iterable
from enum import StrEnum

from exporter.engine.facts.model import Resource
from exporter.health import Staleness


LOSSES = {
    Resource.VMIS: "new VMs and migrations; after `kube.deadAfter`, known migrations and"
    " evacuations no longer block in that namespace",
    Resource.VMIMS: "pending migrations, failed attempts, and most states of an evacuation",
    Resource.PODS: "`policy.guards.evacuations`, diverged evacuations, and the states that depend"
    " on pods",
    Resource.KUBEVIRTS: "the state `capacity`, the guard `platformUpdate`, and the cluster's"
    " default `evictionStrategy`",
    Resource.NODES: "whether a node is cordoned or tainted, left-over evacuations, and some stuck"
    " drains",
    Resource.BUDGETS: "which VMs stay in a drain because a PodDisruptionBudget forbids their"
    " eviction",
    Resource.EVICTIONS: "who asks by EvictionRequests that a VM leaves, and what responders say",
    Resource.LEASES: "Events about evacuations: they are not written",
}
"""What does not work if a resource is forbidden; Markdown."""


class HealthLevel(StrEnum):
    """How far the exporter's answers can be trusted."""

    FULL = "yes"
    MOSTLY = "mostly"
    BARELY = "barely"
    NONE = "no"


def describe_health(
    staleness: Staleness,
    contact: str,
    *,
    ready: bool,
    waiting_for: Iterable[str],
    rejected: Collection[str],
) -> tuple[HealthLevel, str, str]:
    """How far the answers can be trusted, that in one or two words, and why.

    `contact` says when the last contact with the API server was. `waiting_for` is what the exporter
    must read before it is ready; empty: it is stopping. `rejected` has the resources that it may
    not read.
    """
    if not ready:
        awaited = ", ".join(waiting_for)
        why = f"waiting for {awaited}" if awaited else "stopping"
        return HealthLevel.NONE, "Not ready", f"the exporter is {why}, and gives no verdicts."
    match staleness:
        case Staleness.FRESH if rejected:
            lacking = ", ".join(rejected)
            why = f"the exporter may not read {lacking}; last contact {contact}."
            return HealthLevel.MOSTLY, "Mostly healthy", why
        case Staleness.FRESH:
            why = f"ready, all resources visible, last contact {contact}."
            return HealthLevel.FULL, "Healthy", why
        case Staleness.STALE:
            why = f"last contact {contact}; answers may be out of date."
            return HealthLevel.BARELY, "Stale", why
        case Staleness.DEAD:
            why = f"last contact {contact}; only cooldowns still block VMs."
            return HealthLevel.NONE, "Dead", why
