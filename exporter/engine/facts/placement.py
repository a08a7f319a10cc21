"""Which nodes may run a pod, as far as labels, fields and taints say (`kube-scheduler`).

Room, volumes and the affinity to other pods are not known here, so a node that `Placement.accepts`
may still be refused by the scheduler, but never the other way round.
"""

from collections.abc import Mapping
from typing import NamedTuple

from msgspec import Struct


NO_SCHEDULE, NO_EXECUTE = "NoSchedule", "NoExecute"
"""The effects of taints that keep pods away."""
UNSCHEDULABLE = "node.kubernetes.io/unschedulable"
"""The taint of an unschedulable node (`k8s.io/api/core/v1/well_known_taints.go`)."""
HOSTNAME = "kubernetes.io/hostname"
BY_DEFAULT = frozenset({"node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"})
"""Kubernetes lets every pod tolerate these taints with the effect NoExecute for five minutes."""


class Requirement(NamedTuple):
    """One requirement on labels or fields; `operator` is that of a selector or a node affinity."""

    key: str
    operator: str
    values: tuple[str, ...]

    def is_met(self, labels: Mapping[str, str]) -> bool:
        """Whether an object with these labels is selected (apimachinery `labels/selector.go`)."""
        match self.operator:
            case "In":
                return labels.get(self.key) in self.values
            case "NotIn":
                return labels.get(self.key) not in self.values
            case "Exists":
                return self.key in labels
            case "DoesNotExist":
                return self.key not in labels
            case "Gt" | "Lt":
                return self._compare(labels.get(self.key))
            case _:
                return False

    def _compare(self, value: str | None) -> bool:
        try:
            number, (bound,) = int(value or ""), map(int, self.values)
        except ValueError:
            return False
        return number > bound if self.operator == "Gt" else number < bound


class Toleration(NamedTuple):
    """One toleration of a pod; an empty `key` or `effect` stands for all."""

    key: str
    operator: str
    value: str
    effect: str

    def covers(self, key: str, value: str, effect: str) -> bool:
        """Whether it tolerates a taint (`ToleratesTaint`); an unknown operator may do so."""
        if self.effect not in ("", effect) or self.key not in ("", key):
            return False
        return self.operator not in ("", "Equal") or (bool(self.key) and self.value == value)


class Term(NamedTuple):
    """One term of a required node affinity; an empty term matches no node."""

    labels: tuple[Requirement, ...]
    fields: tuple[Requirement, ...]

    def matches(self, name: str, labels: Mapping[str, str]) -> bool:
        """Whether a node of this name with these labels matches."""
        if not self.labels and not self.fields:
            return False
        fields = {"metadata.name": name}
        return all(label.is_met(labels) for label in self.labels) and all(
            field.is_met(fields) for field in self.fields
        )


class Placement(Struct, frozen=True, gc=False):
    """What a VM requires of a node: many VMs share one value.

    `selector` is its nodeSelector, `terms` its required node affinity: one of them must match, and
    None means that it has none.
    """

    selector: tuple[tuple[str, str], ...] = ()
    terms: tuple[Term, ...] | None = None
    tolerations: tuple[Toleration, ...] = ()

    @property
    def hostname(self) -> str:
        """The only node's label `kubernetes.io/hostname` that the selector allows; "" for any."""
        return dict(self.selector).get(HOSTNAME, "")

    def tolerates(self, key: str, value: str, effect: str) -> bool:
        """Whether the pod may be scheduled in spite of a taint."""
        if effect == NO_EXECUTE and key in BY_DEFAULT:
            return True
        return any(toleration.covers(key, value, effect) for toleration in self.tolerations)

    def matches(self, name: str, labels: tuple[tuple[str, str], ...]) -> bool:
        """Whether the selector and the affinity allow a node of this name with these labels."""
        if not all(pair in labels for pair in self.selector):
            return False
        if self.terms is None:
            return True
        pairs = dict(labels)
        return any(term.matches(name, pairs) for term in self.terms)
