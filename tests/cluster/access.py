"""The RBAC objects that let a user read, and nothing more."""

from collections.abc import Iterable

from .objects import Object
from .resources import CLUSTER_ROLE_BINDINGS, CLUSTER_ROLES, ROLE_BINDINGS, Resource


def reading_role(name: str, resources: Iterable[Resource]) -> Object:
    """A ClusterRole of exactly `list` and `watch` on these resources."""
    return {
        "apiVersion": CLUSTER_ROLES.api_version,
        "kind": CLUSTER_ROLES.kind,
        "metadata": {"name": name},
        "rules": [
            {"apiGroups": [one.group], "resources": [one.plural], "verbs": ["list", "watch"]}
            for one in resources
        ],
    }


def binding(role: str, user: str, namespace: str | None = None) -> Object:
    """Bind a ClusterRole to the user of that name, everywhere or in one namespace."""
    kind = ROLE_BINDINGS if namespace else CLUSTER_ROLE_BINDINGS
    place = {"namespace": namespace} if namespace else {}
    return {
        "apiVersion": kind.api_version,
        "kind": kind.kind,
        "metadata": {"name": role, **place},
        "roleRef": {"apiGroup": kind.group, "kind": CLUSTER_ROLES.kind, "name": role},
        "subjects": [{"apiGroup": kind.group, "kind": "User", "name": user}],
    }
