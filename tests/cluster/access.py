"""The RBAC objects that let a user do what they say, and nothing more."""

from collections.abc import Iterable

from .client import Client
from .objects import Object
from .resources import CLUSTER_ROLE_BINDINGS, CLUSTER_ROLES, ROLE_BINDINGS, Resource
from .users import User


def role(name: str, rules: Iterable[Object]) -> Object:
    """A ClusterRole of these rules."""
    return {
        "apiVersion": CLUSTER_ROLES.api_version,
        "kind": CLUSTER_ROLES.kind,
        "metadata": {"name": name},
        "rules": list(rules),
    }


def reading_role(name: str, resources: Iterable[Resource]) -> Object:
    """A ClusterRole of exactly `list` and `watch` on these resources."""
    reads = ["list", "watch"]
    return role(
        name,
        ({"apiGroups": [r.group], "resources": [r.plural], "verbs": reads} for r in resources),
    )


async def allow(
    admin: Client, user: User, name: str, *rules: Object, namespace: str | None = None
) -> None:
    """Give a user a role of that name with these rules, everywhere or in one namespace."""
    await admin.create(CLUSTER_ROLES, role(name, rules))
    kind = ROLE_BINDINGS if namespace else CLUSTER_ROLE_BINDINGS
    await admin.create(kind, binding(name, user.name, namespace))


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
