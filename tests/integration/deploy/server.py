"""Applying and deleting manifests on a real API server, and the accounts that they create."""

import json
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeAlias

from tests.cluster import Client, RealCluster, User, poll
from tests.generate.manifests import NAME, NAMESPACE, Object, render


APPLY = {"Content-Type": "application/apply-patch+yaml"}
RBAC = ("ServiceAccount", "ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding")
_OF_EVERYBODY = (
    "selfsubjectreviews",
    "selfsubjectaccessreviews",
    "selfsubjectrulesreviews",
    "clustertrustbundles",
)
"""Resources that every service account may use."""

Grants: TypeAlias = set[tuple[str, str, str, str]]
"""Verb, group, resource and name; the name may be empty."""


@dataclass(frozen=True)
class Paths:
    """The paths of each kind, from the API server's discovery."""

    plurals: dict[tuple[str, str], tuple[str, bool]]

    @classmethod
    async def discover(cls, client: Client, objects: Iterable[Object]) -> "Paths":
        """Read the discovery of the API versions of these objects."""
        plurals = {}
        for version in sorted({document["apiVersion"] for document in objects}):
            listed = await client.request("GET", _root(version))
            for resource in listed["resources"]:
                if "/" not in resource["name"]:
                    plurals[version, resource["kind"]] = resource["name"], resource["namespaced"]
        return cls(plurals)

    def of(self, document: Object) -> str:
        """The path of an object."""
        plural, namespaced = self.plurals[document["apiVersion"], document["kind"]]
        place = f"/namespaces/{document['metadata']['namespace']}" if namespaced else ""
        return f"{_root(document['apiVersion'])}{place}/{plural}/{document['metadata']['name']}"


def _root(version: str) -> str:
    return f"/apis/{version}" if "/" in version else f"/api/{version}"


async def apply(client: Client, objects: Iterable[Object], **query: str) -> None:
    """Apply objects like `kubectl apply --server-side`; unknown fields are refused."""
    paths = await Paths.discover(client, objects)
    for document in objects:
        await client.send(
            "PATCH",
            paths.of(document),
            params={"fieldManager": "tests", "fieldValidation": "Strict", **query},
            data=json.dumps(document),
            headers=APPLY,
        )


async def delete(client: Client, objects: Iterable[Object]) -> None:
    """Delete objects like `kubectl delete`."""
    paths = await Paths.discover(client, objects)
    for document in objects:
        await client.send("DELETE", paths.of(document))


@asynccontextmanager
async def applied(client: Client, objects: Iterable[Object]) -> AsyncIterator[None]:
    """Apply the objects, and delete them after the block."""
    await apply(client, objects)
    try:
        yield
    finally:
        await delete(client, objects)


@asynccontextmanager
async def account(
    cluster: RealCluster, folder: str, *, without: tuple[str, tuple[str, ...]] | None = None
) -> AsyncIterator[User]:
    """The exporter's account with an overlay's roles; `without` removes a verb from them."""
    objects = [document for document in render(folder) if document["kind"] in RBAC]
    if without is not None:
        objects = [less(document, *without) for document in objects]
    wanted = _grants(rule for document in objects for rule in bound_rules(objects, document))
    async with applied(cluster.admin, objects):
        user = await cluster.account(NAMESPACE, NAME)
        async with cluster.client(user) as client:

            async def in_force() -> bool:
                may = await granted(client)
                return {grant for grant in may if grant[2] not in _OF_EVERYBODY} == wanted

            await poll(in_force, what="roles in force")
        yield user


def bound_rules(objects: Iterable[Object], role: Object) -> list[Object]:
    """The rules of a role, if one of these objects binds it to the exporter's account."""
    name = role["metadata"]["name"]
    bound = any(
        (document["roleRef"]["kind"], document["roleRef"]["name"]) == (role["kind"], name)
        and NAME in {subject["name"] for subject in document["subjects"]}
        for document in objects
        if "roleRef" in document
    )
    return role.get("rules", []) if bound else []


def less(role: Object, verb: str, resources: tuple[str, ...]) -> Object:
    """The object; if it is a role, without a verb on some resources."""
    if "rules" not in role:
        return role
    rules = [rule for rule in role["rules"] if "nonResourceURLs" in rule]
    for rule in role["rules"]:
        for resource in rule.get("resources", []):
            left = [v for v in rule["verbs"] if resource not in resources or v != verb]
            rules.append({**rule, "resources": [resource], "verbs": left})
    return {**role, "rules": [rule for rule in rules if rule["verbs"]]}


async def granted(client: Client) -> Grants:
    """A user's permissions in the exporter's namespace: verb, group, resource and name."""
    answer = await client.request(
        "POST",
        "/apis/authorization.k8s.io/v1/selfsubjectrulesreviews",
        json={"spec": {"namespace": NAMESPACE}},
    )
    assert not answer["status"]["incomplete"]
    return _grants(answer["status"]["resourceRules"])


def _grants(rules: Iterable[Object]) -> Grants:
    return {
        (verb, group, resource, name)
        for rule in rules
        for verb in rule["verbs"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for name in rule.get("resourceNames") or [""]
    }
