"""RBAC objects that give a user exactly the listed permissions."""

from collections.abc import Iterable, Sequence

from .client import Client
from .objects import Object
from .polling import poll
from .resources import CLUSTER_ROLE_BINDINGS, CLUSTER_ROLES, ROLE_BINDINGS, Resource
from .users import User


_REVIEWS = "/apis/authorization.k8s.io/v1/subjectaccessreviews"


def role(name: str, rules: Iterable[Object]) -> Object:
    """A ClusterRole with these rules."""
    return {
        "apiVersion": CLUSTER_ROLES.api_version,
        "kind": CLUSTER_ROLES.kind,
        "metadata": {"name": name},
        "rules": list(rules),
    }


def reading_rules(resources: Iterable[Resource]) -> list[Object]:
    """Rules that allow exactly `list` and `watch` on these resources."""
    reads = ["list", "watch"]
    return [{"apiGroups": [r.group], "resources": [r.plural], "verbs": reads} for r in resources]


async def allow(
    admin: Client, user: User, name: str, *rules: Object, namespace: str | None = None
) -> None:
    """Give a user a role with this name and these rules, everywhere or in one namespace."""
    await grant(admin, user.name, name, rules, (namespace,))


async def grant(
    admin: Client,
    user: str,
    name: str,
    rules: Sequence[Object],
    namespaces: Iterable[str | None] = (None,),
) -> None:
    """Bind a user to this role in these namespaces; None stands for all.

    Returns when the API server grants the permissions, which takes a moment because it watches
    roles.
    """
    await admin.create(CLUSTER_ROLES, role(name, rules))
    for namespace in namespaces:
        kind = ROLE_BINDINGS if namespace else CLUSTER_ROLE_BINDINGS
        await admin.create(kind, binding(name, user, namespace))
        for rule in rules:
            await _until_granted(admin, user, rule, namespace)


def binding(role: str, user: str, namespace: str | None = None, *, subject: str = "User") -> Object:
    """Bind a ClusterRole to this user (or `Group`), everywhere or in one namespace."""
    kind = ROLE_BINDINGS if namespace else CLUSTER_ROLE_BINDINGS
    place = {"namespace": namespace} if namespace else {}
    return {
        "apiVersion": kind.api_version,
        "kind": kind.kind,
        "metadata": {"name": role, **place},
        "roleRef": {"apiGroup": kind.group, "kind": CLUSTER_ROLES.kind, "name": role},
        "subjects": [{"apiGroup": kind.group, "kind": subject, "name": user}],
    }


async def _until_granted(admin: Client, user: str, rule: Object, namespace: str | None) -> None:
    """Wait until a user has a rule's permissions; only its last verb and resource are checked."""
    spec: Object = {"user": user}
    if "nonResourceURLs" in rule:
        spec["nonResourceAttributes"] = {
            "path": rule["nonResourceURLs"][-1],
            "verb": rule["verbs"][-1],
        }
    else:
        resource, _, subresource = rule["resources"][-1].partition("/")
        spec["resourceAttributes"] = {
            "namespace": namespace or "",
            "group": rule["apiGroups"][-1],
            "resource": resource,
            "subresource": subresource,
            "name": rule.get("resourceNames", [""])[-1],
            "verb": rule["verbs"][-1],
        }

    async def is_granted() -> bool:
        answer = await admin.request("POST", _REVIEWS, json={"spec": spec})
        return bool(answer["status"]["allowed"])

    await poll(is_granted, what=f"{user} is granted {rule}")
