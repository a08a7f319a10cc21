"""The `Status` bodies of a kube-apiserver's refusals (apimachinery `pkg/api/errors/errors.go`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from exporter.demo.objects import Object


TOO_OLD_CONTINUE = (
    "The provided continue parameter is too old to display a consistent list result. You can "
    "start a new list without the continue parameter, or use the continue token in this response "
    "to retrieve the remainder of the results. Continuing with the provided token results in an "
    "inconsistent list - objects that were created, modified, or deleted between the time the "
    "first chunk was returned and now may show up in the list."
)
TOO_OLD_LIST = "The resourceVersion for the provided list is too old."
MODIFIED_SINCE = (
    "the object has been modified; please apply your changes to the latest version and try again"
)


@dataclass(frozen=True, slots=True)
class Resource:
    """One kind of object the server keeps, named as its path and its errors name it."""

    group: str
    version: str
    plural: str
    kind: str
    namespaced: bool = True
    status: bool = False
    """Whether `/status` is a subresource; the VMI has none (KubeVirt `components/crds.go`)."""

    @property
    def api_version(self) -> str:
        """Group and version, as objects write them."""
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def qualified(self) -> str:
        """The plural with its group, as errors write it."""
        return f"{self.plural}.{self.group}" if self.group else self.plural

    @property
    def counts_generations(self) -> bool:
        """Custom resources and, since 1.35, pods."""
        return self.custom or self.plural == "pods"

    @property
    def custom(self) -> bool:
        """Custom resources are unstructured: written with sorted keys and a kind in each item."""
        return bool(self.group)


class Refused(Exception):
    """A request that the API server answers with a failure Status."""

    def __init__(self, status: Object) -> None:
        super().__init__(status["message"])
        self.status = status

    @property
    def code(self) -> int:
        """The HTTP status."""
        return int(self.status["code"])

    @property
    def retry_after(self) -> int | None:
        """Seconds after which to ask again, if the status says."""
        seconds = self.status.get("details", {}).get("retryAfterSeconds")
        return None if seconds is None else int(seconds)


def failure(code: int, reason: str, message: str, details: Object | None = None) -> Object:
    """A failure Status, its fields in the order of the real one."""
    status: Object = {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": message,
        "reason": reason,
    }
    if details is not None:
        status["details"] = details
    status["code"] = code
    return status


def _details(resource: Resource, name: str = "") -> Object:
    details: Object = {}
    if name:
        details["name"] = name
    if resource.group:
        details["group"] = resource.group
    details["kind"] = resource.plural
    return details


def not_found(resource: Resource, name: str) -> Refused:
    """404: no such object."""
    message = f'{resource.qualified} "{name}" not found'
    return Refused(failure(404, "NotFound", message, _details(resource, name)))


def already_exists(resource: Resource, name: str) -> Refused:
    """409: the name is taken."""
    message = f'{resource.qualified} "{name}" already exists'
    return Refused(failure(409, "AlreadyExists", message, _details(resource, name)))


def conflict(resource: Resource, name: str, why: str = MODIFIED_SINCE) -> Refused:
    """409: the object is not as the caller thinks."""
    message = f'Operation cannot be fulfilled on {resource.qualified} "{name}": {why}'
    return Refused(failure(409, "Conflict", message, _details(resource, name)))


def no_such_resource() -> Refused:
    """404: the server's own groups have no such resource."""
    message = "the server could not find the requested resource"
    return Refused(failure(404, "NotFound", message, {}))


def unauthorized() -> Refused:
    """401: no valid credentials."""
    return Refused(failure(401, "Unauthorized", "Unauthorized"))


def forbidden(
    resource: Resource, verb: str, user: str, namespace: str | None, name: str
) -> Refused:
    """403, in the words of RBAC."""
    where = f'in the namespace "{namespace}"' if namespace else "at the cluster scope"
    named = f'{resource.qualified} "{name}"' if name else resource.qualified
    message = (
        f'{named} is forbidden: User "{user}" cannot {verb} resource "{resource.plural}" '
        f'in API group "{resource.group}" {where}'
    )
    return Refused(failure(403, "Forbidden", message, _details(resource, name)))


def bad_request(message: str) -> Refused:
    """400: the request makes no sense."""
    return Refused(failure(400, "BadRequest", message))


def bad_version(message: str, *, watch: bool) -> Refused:
    """A version that is no number: 400 for a list, and for a watch the real server's odd 500."""
    if not watch:
        return bad_request(f"invalid resource version: {message}")
    refused = failure(500, "", message)
    del refused["reason"]
    return Refused(refused)


def expired(message: str, continue_token: str = "") -> Refused:
    """410: what was asked for is forgotten."""
    status = failure(410, "Expired", message)
    if continue_token:
        status["metadata"] = {"continue": continue_token}
    return Refused(status)


def too_old(requested: int, oldest: int) -> Refused:
    """The watch cache's words (`storage/cacher/watch_cache.go: getAllEventsSinceLocked`)."""
    return expired(f"too old resource version: {requested} ({oldest})")


def too_large(requested: int, current: int) -> Refused:
    """504: the version asked for has not been written yet."""
    cause = {"reason": "ResourceVersionTooLarge", "message": "Too large resource version"}
    message = f"Timeout: Too large resource version: {requested}, current: {current}"
    return Refused(failure(504, "Timeout", message, {"causes": [cause], "retryAfterSeconds": 1}))


def invalid(group: str, kind: str, name: str, causes: Sequence[tuple[str, str, str]]) -> Refused:
    """Causes are (reason, field, message), as `field.ErrorList` renders them."""
    told = [f"{field}: {message}" for _, field, message in causes]
    joined = told[0] if len(told) == 1 else f"[{', '.join(told)}]"
    qualified = f"{kind}.{group}" if group else kind
    details: Object = {"name": name} if name else {}
    details |= {"group": group} if group else {}
    details |= {
        "kind": kind,
        "causes": [
            {"reason": reason, "message": message, "field": field}
            for reason, field, message in causes
        ],
    }
    return Refused(failure(422, "Invalid", f'{qualified} "{name}" is invalid: {joined}', details))


def invalid_options(causes: Sequence[tuple[str, str]]) -> Refused:
    """List options refused by `metainternalversion/validation`; causes are (field, message)."""
    forbidden_fields = [
        ("FieldValueForbidden", field, f"Forbidden: {message}") for field, message in causes
    ]
    return invalid("meta.k8s.io", "ListOptions", "", forbidden_fields)


def internal_error(why: str) -> Refused:
    """500: the server itself is at fault."""
    message = f"Internal error occurred: {why}"
    return Refused(failure(500, "InternalError", message, {"causes": [{"message": why}]}))


def unavailable(message: str) -> Refused:
    """503: not now."""
    return Refused(failure(503, "ServiceUnavailable", message))


def success(resource: Resource, name: str, uid: str) -> Object:
    """The answer to a deletion that is done."""
    details = _details(resource, name) | {"uid": uid}
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Success",
        "details": details,
    }
