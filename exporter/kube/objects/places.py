"""Reads nodes, and what VMs require of a node.

Nodes share their labels' pairs, and VMs with the same requirements share one `Placement`.
"""

from functools import lru_cache
from sys import intern

import msgspec

from exporter.engine.facts.model import Node, Taint
from exporter.engine.facts.placement import (
    NO_EXECUTE,
    NO_SCHEDULE,
    UNSCHEDULABLE,
    Placement,
    Requirement,
    Term,
    Toleration,
)
from exporter.errors import MALFORMED
from exporter.kube.objects import wire
from exporter.kube.objects.instants import parse_instant


MAINTENANCE = frozenset(
    {"DrainInProgress", "Drained", "MaintenanceInProgress", "MaintenancePlanned"}
)
"""The conditions of a node about a present, past or planned drain (Kubernetes 1.37, KEP-5683)."""
SCHEDULABLE = "kubevirt.io/schedulable"
"""A node with this label and the value "false" takes no VM; virt-handler sets it to "true"."""
_SELECTOR = msgspec.json.Decoder(dict[str, str] | None).decode
_AFFINITY = msgspec.json.Decoder(wire.Affinity | None).decode
_TOLERATIONS = msgspec.json.Decoder(list[wire.Toleration] | None).decode


def read_node(body: wire.NodeObject) -> Node:
    """A node."""
    spec = body.spec or wire.NodeSpec()
    cordons = [taint.timeAdded for taint in spec.taints or () if taint.key == UNSCHEDULABLE]
    conditions = (body.status and body.status.conditions) or []
    met = {c.type for c in conditions if c.status == "True"}
    ready = next((c for c in conditions if c.type == "Ready"), None)
    silent = ready if ready is not None and ready.status == "Unknown" else None
    labels = body.metadata.labels or {}
    return Node(
        name=intern(body.metadata.name or ""),
        schedulable=not spec.unschedulable,
        cordoned_at=parse_instant(next(iter(cordons), None)) if spec.unschedulable else None,
        taints=_read_taints(spec, NO_SCHEDULE),
        evicting=_read_taints(spec, NO_EXECUTE),
        conditions=tuple(sorted(MAINTENANCE & met)),
        is_ready=ready is None or ready.status == "True",
        is_silent=silent is not None,
        silent_since=None if silent is None else parse_instant(silent.lastTransitionTime),
        takes_vms=labels.get(SCHEDULABLE) != "false",
        labels=tuple(
            _share_pair(key, value) for key, value in labels.items() if isinstance(value, str)
        ),
    )


def _read_taints(spec: wire.NodeSpec, effect: str) -> tuple[Taint, ...]:
    return tuple(
        Taint(intern(taint.key), parse_instant(taint.timeAdded), intern(taint.value or ""))
        for taint in spec.taints or ()
        if taint.key and taint.key != UNSCHEDULABLE and taint.effect == effect
    )


@lru_cache(maxsize=65_536)
def _share_pair(key: str, value: str) -> tuple[str, str]:
    """The same tuple for all nodes with this label."""
    return intern(key), intern(value)


def read_placement(spec: wire.VmiSpec) -> Placement:
    """What a VMI requires of a node; what cannot be read is not required."""
    if not (spec.nodeSelector or spec.affinity or spec.tolerations):
        return _ANYWHERE
    return _parse_placement(bytes(spec.nodeSelector), bytes(spec.affinity), bytes(spec.tolerations))


_ANYWHERE = Placement()


@lru_cache(maxsize=4096)
def _parse_placement(selector: bytes, affinity: bytes, tolerations: bytes) -> Placement:
    try:
        pairs = _SELECTOR(selector) if selector else None
        wanted = _AFFINITY(affinity) if affinity else None
        tolerated = _TOLERATIONS(tolerations) if tolerations else None
    except MALFORMED:
        return _ANYWHERE
    nodes = None if wanted is None else wanted.nodeAffinity
    required = nodes and nodes.requiredDuringSchedulingIgnoredDuringExecution
    return Placement(
        selector=tuple(sorted((pairs or {}).items())),
        terms=None
        if not required
        else tuple(
            Term(_read_expressions(term.matchExpressions), _read_expressions(term.matchFields))
            for term in required.nodeSelectorTerms or ()
        ),
        tolerations=tuple(
            Toleration(
                toleration.key or "",
                toleration.operator or "",
                toleration.value or "",
                toleration.effect or "",
            )
            for toleration in tolerated or ()
        ),
    )


def _read_expressions(expressions: list[wire.Expression] | None) -> tuple[Requirement, ...]:
    return tuple(
        Requirement(expression.key, expression.operator, tuple(expression.values or ()))
        for expression in expressions or ()
    )
