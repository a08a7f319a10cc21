"""The errors of kube-apiserver as `Status` objects (apimachinery `pkg/api/errors/errors.go`)."""

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
class ApiResource:
    """A resource of the API, named as in its path and in errors."""

    group: str
    version: str
    plural: str
    kind: str
    namespaced: bool = True
    status: bool = False
    """Whether `/status` is a subresource; the VMI has none (KubeVirt `components/crds.go`)."""

    @property
    def api_version(self) -> str:
        """Group and version, as in `apiVersion`."""
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def qualified(self) -> str:
        """Plural and group, as in errors."""
        return f"{self.plural}.{self.group}" if self.group else self.plural

    @property
    def counts_generations(self) -> bool:
        """Whether objects have `metadata.generation`: custom resources and, since 1.35, pods."""
        return self.custom or self.plural == "pods"

    @property
    def custom(self) -> bool:
        """Whether a CRD defines it. If so, keys are sorted, and each item of a list has a kind."""
        return self.group == "kubevirt.io"


class StatusError(Exception):
    """A failure Status, as an exception."""

    def __init__(self, status: Object) -> None:
        super().__init__(status["message"])
        self.status = status

    @property
    def code(self) -> int:
        """The HTTP status."""
        return int(self.status["code"])

    @property
    def retry_after(self) -> int | None:
        """Seconds to wait before a retry, if the Status has them."""
        seconds = self.status.get("details", {}).get("retryAfterSeconds")
        return None if seconds is None else int(seconds)


def failure(code: int, reason: str, message: str, details: Object | None = None) -> Object:
    """A failure Status, with its fields in the order of the real one."""
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


def details_of(resource: ApiResource, name: str = "") -> Object:
    """The `details` of a Status about a resource or an object."""
    details: Object = {}
    if name:
        details["name"] = name
    if resource.group:
        details["group"] = resource.group
    details["kind"] = resource.plural
    return details


def not_found(resource: ApiResource, name: str) -> StatusError:
    """404: the object does not exist."""
    message = f'{resource.qualified} "{name}" not found'
    return StatusError(failure(404, "NotFound", message, details_of(resource, name)))


def already_exists(resource: ApiResource, name: str) -> StatusError:
    """409: an object with this name exists."""
    message = f'{resource.qualified} "{name}" already exists'
    return StatusError(failure(409, "AlreadyExists", message, details_of(resource, name)))


def conflict(resource: ApiResource, name: str, why: str = MODIFIED_SINCE) -> StatusError:
    """409: the object has changed, or a precondition failed."""
    message = f'Operation cannot be fulfilled on {resource.qualified} "{name}": {why}'
    return StatusError(failure(409, "Conflict", message, details_of(resource, name)))


def no_such_resource() -> StatusError:
    """404: a built-in group has no such resource."""
    message = "the server could not find the requested resource"
    return StatusError(failure(404, "NotFound", message, {}))


def bad_request(message: str) -> StatusError:
    """400: the request is malformed."""
    return StatusError(failure(400, "BadRequest", message))


def expired(message: str, continue_token: str = "") -> StatusError:
    """410: the requested version has been compacted."""
    status = failure(410, "Expired", message)
    if continue_token:
        status["metadata"] = {"continue": continue_token}
    return StatusError(status)


def too_old(requested: int, oldest: int) -> StatusError:
    """410 of the watch cache (`storage/cacher/watch_cache.go: getAllEventsSinceLocked`)."""
    return expired(f"too old resource version: {requested} ({oldest})")


def too_large(requested: int, current: int) -> StatusError:
    """504: the requested version does not exist yet."""
    cause = {"reason": "ResourceVersionTooLarge", "message": "Too large resource version"}
    message = f"Timeout: Too large resource version: {requested}, current: {current}"
    return StatusError(
        failure(504, "Timeout", message, {"causes": [cause], "retryAfterSeconds": 1})
    )


def invalid(
    group: str, kind: str, name: str, causes: Sequence[tuple[str, str, str]]
) -> StatusError:
    """422; causes are (reason, field, message), rendered as `field.ErrorList` does."""
    texts = [f"{field}: {message}" for _, field, message in causes]
    joined = texts[0] if len(texts) == 1 else f"[{', '.join(texts)}]"
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
    return StatusError(
        failure(422, "Invalid", f'{qualified} "{name}" is invalid: {joined}', details)
    )


def success(details: Object | None = None) -> Object:
    """A success Status."""
    status: Object = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"}
    return status if details is None else status | {"details": details}
