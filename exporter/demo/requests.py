"""What an API request asks for: verb and resource from its path, selectors and list options.

No I/O. An invalid request gets its error here, in the words of kube-apiserver.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from exporter.demo import status
from exporter.demo.status import ApiResource
from exporter.demo.store import NODES, RESOURCES, UNSCHEDULABLE_FIELD, StoredObject


VERBS = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}

_RESOURCES_BY_PATH = {
    (resource.group, resource.version, resource.plural): resource for resource in RESOURCES
}


@dataclass(frozen=True, slots=True)
class RequestInfo:
    """One request for a resource, as parsed from its method, path and query."""

    verb: str
    resource: ApiResource
    namespace: str | None
    name: str
    subresource: str
    query: Mapping[str, str]

    @property
    def has_unknown_subresource(self) -> bool:
        """Whether it names a subresource that the resource does not have."""
        return bool(self.subresource) and not (
            self.subresource == "status" and self.resource.status
        )


@dataclass(frozen=True, slots=True)
class Selector:
    """A label and field selector; an empty one selects everything."""

    labels: tuple[Callable[[Mapping[str, str]], bool], ...] = ()
    name: str | None = None
    namespace: str | None = None

    @property
    def is_empty(self) -> bool:
        """Whether it selects neither by labels nor by name."""
        return not self.labels and self.name is None

    def matches(self, key: str, labels: Mapping[str, str] | None) -> bool:
        """Whether it selects an object by key and labels; `labels` is None if it was deleted."""
        if labels is None or not self._matches_key(key):
            return False
        return all(requirement(labels) for requirement in self.labels)

    def matches_entry(self, entry: StoredObject) -> bool:
        """Whether it selects a stored object."""
        # Reading labels means decoding the object, so only do it for label selectors.
        return self._matches_key(entry.key) and (
            not self.labels or self.matches(entry.key, entry.labels)
        )

    def _matches_key(self, key: str) -> bool:
        namespace, _, name = key.rpartition("/")
        if self.namespace is not None and namespace != self.namespace:
            return False
        return self.name is None or name == self.name


def parse_request(method: str, path: str, query: Mapping[str, str]) -> RequestInfo | None:
    """Parse a request; None if the real server serves no such path."""
    match path.strip("/").split("/"):
        case ["api", version, *rest]:
            group = ""
        case ["apis", group, version, *rest]:
            pass
        case _:
            return None
    namespace: str | None = None
    match rest:
        case ["namespaces", inside, _, *_] if rest[2:] != ["status"]:
            namespace, rest = inside, rest[2:]
    plural, name, subresource, *more = [*rest, "", "", ""][: max(3, len(rest))]
    resource = _RESOURCES_BY_PATH.get((group, version, plural))
    if resource is None or more or (namespace is not None and not resource.namespaced):
        return None
    if method == "GET":
        watching = not name and is_true(query.get("watch"))
        verb = "watch" if watching else "get" if name else "list"
    elif method in VERBS and (method == "POST") != bool(name):
        verb = VERBS[method]
    else:
        return None
    if resource.namespaced and namespace is None and (name or verb == "create"):
        return None
    return RequestInfo(verb, resource, namespace, name, subresource, query)


def parse_selector(request: RequestInfo) -> Selector:
    """Parse the query's label selector and its field selector.

    Fields can be `metadata.name`, `metadata.namespace` and a node's `spec.unschedulable`.
    """
    terms = filter(None, re.split(r",(?![^(]*\))", request.query.get("labelSelector", "")))
    requirements = tuple(_parse_requirement(term.strip()) for term in terms)
    name, namespace = None, request.namespace
    for term in filter(None, request.query.get("fieldSelector", "").split(",")):
        field, _, value = term.partition("=")
        if field == "metadata.name":
            name = value.lstrip("=")
        elif field == "metadata.namespace" and request.namespace is None:
            namespace = value.lstrip("=")
        elif field == UNSCHEDULABLE_FIELD and request.resource is NODES:
            requirements += (_parse_requirement(term),)
        else:
            raise status.bad_request(f"field label not supported: {field}")
    return Selector(requirements, name, namespace)


def _parse_requirement(term: str) -> Callable[[Mapping[str, str]], bool]:
    if members := re.fullmatch(r"(\S+) (in|notin) \(([^()]*)\)", term):
        label, operator, values = members.groups()
        chosen = {value.strip() for value in values.split(",")}
        return lambda labels: (labels.get(label) in chosen) == (operator == "in")
    if " " in term or "(" in term:
        raise status.bad_request(f"unable to parse requirement: {term}")
    if "!=" in term:
        label, _, unwanted = term.partition("!=")
        return lambda labels: labels.get(label) != unwanted
    if "=" in term:
        label, _, wanted = term.partition("=")
        wanted = wanted.removeprefix("=")
        return lambda labels: labels.get(label) == wanted
    if term.startswith("!"):
        return lambda labels: term[1:] not in labels
    return lambda labels: term in labels


def parse_revision(query: Mapping[str, str]) -> int | None:
    """Parse the query's `resourceVersion`; None if it has none."""
    given = query.get("resourceVersion", "")
    if not given:
        return None
    if not given.isdecimal():
        raise status.bad_request(f"invalid resource version: {given}")
    return int(given)


def is_true(value: str | None) -> bool:
    """Whether a query parameter is true, as Go's `strconv.ParseBool` reads it."""
    return value in ("1", "true", "True", "t", "T", "TRUE")
