"""The query API's bodies: what is asked, what is answered, and their OpenAPI document.

The types decode the requests, encode the answers and make the schemas, so that the three
cannot differ.
"""

import math
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from exporter import __version__
from exporter.evacuation import Cause, Source, State
from exporter.model import Checkpoint, Instant, Mismatch, Outcome, Reason, Seconds


Namespace = Annotated[str, Meta(min_length=1, max_length=63)]
Name = Annotated[str, Meta(min_length=1, max_length=253)]
Uid = Annotated[str, Meta(max_length=128)]
Remark = Annotated[str, Meta(max_length=253)]
InstantText = Annotated[str, Meta(extra_json_schema={"format": "date-time"})]

_LAST_INSTANT = datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC).timestamp()


class Candidate(Struct, rename="camel", gc=False):
    """A VMI that is thought of for eviction; `vmiUid` is the pod's label created-by."""

    namespace: Namespace
    name: Name
    vmi_uid: Uid | None = None
    node: Remark | None = None
    pod: Remark | None = None


class VerdictRequest(Struct, rename="camel"):
    """The candidates, the checkpoint (both where absent), and whether to count the answers.

    null is what a Go client sends for an empty list or an unset field.
    """

    candidates: list[Candidate] | None
    checkpoint: Checkpoint | None = None
    dry_run: bool | None = False


class VerdictAnswer(Struct, rename="camel", kw_only=True, gc=False):
    """The verdict on one candidate."""

    namespace: str
    name: str
    known: bool
    mismatch: Mismatch | None
    allowed: bool
    reason: Reason | None
    not_before: InstantText | None
    retry_after_seconds: float | None
    effective_cooldown_seconds: float | None
    migrations_in_window: int


class VerdictsAnswer(Struct, rename="camel", kw_only=True):
    """One verdict per candidate, in the order asked."""

    as_of: InstantText
    observed_at: InstantText | None
    stale: bool
    verdicts: list[VerdictAnswer]


class BlockedVmi(Struct, rename="camel", kw_only=True, frozen=True, gc=False):
    """A VMI and a checkpoint at which it is blocked."""

    namespace: str
    name: str
    vmi_uid: str
    node: str
    checkpoint: Checkpoint
    reason: Reason
    not_before: InstantText | None


class BlockedAnswer(Struct, rename="camel", kw_only=True):
    """Every VMI that is blocked; what is not in it may be taken as allowed for `maxAgeSeconds`."""

    as_of: InstantText
    stale: bool
    max_age_seconds: float
    blocked: list[BlockedVmi]


class RuleAnswer(Struct, rename="camel", kw_only=True):
    """What one rule says, whether or not an earlier one blocks already."""

    rule: str
    checkpoint: Checkpoint
    reason: Reason
    enabled: bool
    silenced: bool
    blocks: bool
    why: str


class CooldownAnswer(Struct, rename="camel", kw_only=True):
    """effective = min(base * 2^(migrationsInWindow-1), cap); base = max(floor, duration)."""

    ended_at: InstantText
    duration_seconds: float
    migrations_in_window: int
    base_seconds: float
    backed_off_seconds: float
    effective_seconds: float
    not_before: InstantText


class MigrationAnswer(Struct, rename="camel", kw_only=True):
    """One recorded migration; a UID of null: told only by its end."""

    uid: str | None
    start: InstantText | None
    end: InstantText | None
    outcome: str
    handed_off: bool
    in_window: bool


class PendingAnswer(Struct, rename="camel", kw_only=True):
    """A VMIM of this VMI that has not ended."""

    name: str
    uid: str
    phase: str
    created_at: InstantText | None
    handed_off: bool


class LauncherAnswer(Struct, rename="camel", kw_only=True):
    """The VMI's current virt-launcher pod."""

    name: str
    node: str
    phase: str
    ready: bool
    scheduled: bool
    eviction_in_progress: bool


class PolicyAnswer(Struct, rename="camel", kw_only=True):
    """The policy in force; 0 means off."""

    migration_cooldown_seconds: float
    max_migration_cooldown_seconds: float
    migration_history_window_seconds: float
    count_failed_migrations: bool
    guard_pending_migrations: bool
    guard_evacuations: bool


class CheckpointVerdicts(Struct, rename="camel", kw_only=True):
    """The verdict at each checkpoint."""

    filter: VerdictAnswer
    pre_eviction: VerdictAnswer


class BackoffAnswer(Struct, rename="camel", kw_only=True):
    """KubeVirt's present pause before the next attempt."""

    seconds: float
    next_try_at: InstantText


class CancelAnswer(Struct, rename="camel", kw_only=True):
    """The request that cancels an evacuation (KubeVirt 1.8); a running attempt goes on."""

    method: str
    path: str
    body: dict[str, str]


class EvacuationAnswer(Struct, rename="camel", kw_only=True):
    """One evacuation. `failedAttempts` is a lower bound; `cancel` is null where it could harm."""

    namespace: str
    name: str
    vmi_uid: str
    node: str
    evacuation_node_name: str
    eviction_strategy: str
    source: Source
    requested_at: InstantText
    age_seconds: float
    state: State
    stuck: bool
    stuck_by: list[Cause]
    failed_attempts: int
    backoff: BackoffAnswer | None
    diverged: bool
    attempt: PendingAnswer | None
    next_step: str
    cancel: CancelAnswer | None


class EvacuationsAnswer(Struct, rename="camel", kw_only=True):
    """Every evacuation, the longest first; `blindSpots` are resources that may not be seen."""

    as_of: InstantText
    observed_at: InstantText | None
    stale: bool
    evacuations: list[EvacuationAnswer]
    blind_spots: dict[str, str]


class VmiAnswer(Struct, rename="camel", kw_only=True):
    """Everything that is known of one VMI."""

    as_of: InstantText
    observed_at: InstantText | None
    stale: bool
    namespace: str
    name: str
    vmi_uid: str
    node: str
    created_at: InstantText | None
    evacuation_node_name: str | None
    evacuation: EvacuationAnswer | None
    verdicts: CheckpointVerdicts
    rules: list[RuleAnswer]
    cooldown: CooldownAnswer | None
    migrations: list[MigrationAnswer]
    pending_migrations: list[PendingAnswer]
    launcher: LauncherAnswer | None
    policy: PolicyAnswer
    blind_spots: dict[str, str]


class Problem(Struct, kw_only=True):
    """An error (RFC 9457, application/problem+json)."""

    title: str
    status: int
    detail: str
    type: str = "about:blank"


class Parameter(Struct, frozen=True, kw_only=True):
    """A path or query parameter of a route."""

    name: str
    place: str
    description: str
    schema: dict[str, Any]


class Route(Struct, frozen=True, kw_only=True):
    """One endpoint: `name` is its metric label and operation id.

    `guarded`: where a listener has authentication, this endpoint asks for it.
    """

    name: str
    method: str
    path: str
    summary: str
    answer: type[Struct] | tuple[str, ...]
    request: type[Struct] | None = None
    parameters: tuple[Parameter, ...] = ()
    problems: tuple[int, ...] = ()
    not_modified: bool = False
    guarded: bool = True

    @property
    def refusals(self) -> tuple[int, ...]:
        """The statuses of every problem that it can answer with."""
        return (*((401, 403) if self.guarded else ()), *self.problems)


_CHECKPOINT_PARAMETER = Parameter(
    name="checkpoint",
    place="query",
    description="Only the entries of this checkpoint.",
    schema={"type": "string", "enum": [c.value for c in Checkpoint]},
)

ROUTES: tuple[Route, ...] = (
    Route(
        name="verdicts",
        method="POST",
        path="/v1/verdicts",
        summary="May these VMIs be evicted?",
        request=VerdictRequest,
        answer=VerdictsAnswer,
        problems=(400, 408, 413, 422, 503),
    ),
    Route(
        name="blocked",
        method="GET",
        path="/v1/blocked",
        summary="Every VMI that is blocked now; with wait and If-None-Match, once that changes.",
        answer=BlockedAnswer,
        parameters=(
            _CHECKPOINT_PARAMETER,
            Parameter(
                name="wait",
                place="query",
                description="With If-None-Match: hold the request until the set changes.",
                schema={"type": "number", "minimum": 0, "maximum": 60},
            ),
            Parameter(
                name="If-None-Match",
                place="header",
                description="The ETag of the last answer.",
                schema={"type": "string"},
            ),
        ),
        problems=(422, 503),
        not_modified=True,
    ),
    Route(
        name="vmi",
        method="GET",
        path="/v1/vmis/{namespace}/{name}",
        summary="Everything known of one VMI: verdicts, each rule's arithmetic, its migrations.",
        answer=VmiAnswer,
        parameters=(
            Parameter(
                name="namespace",
                place="path",
                description="The VMI's namespace.",
                schema={"type": "string", "minLength": 1, "maxLength": 63},
            ),
            Parameter(
                name="name",
                place="path",
                description="The VMI's name.",
                schema={"type": "string", "minLength": 1, "maxLength": 253},
            ),
        ),
        problems=(404, 422, 503),
    ),
    Route(
        name="evacuations",
        method="GET",
        path="/v1/evacuations",
        summary="Every evacuation with its diagnosis and the next step, longest first.",
        answer=EvacuationsAnswer,
        problems=(503,),
    ),
    Route(
        name="metrics",
        method="GET",
        path="/metrics",
        summary="Prometheus metrics: text 0.0.4, or OpenMetrics 1.0 where that is accepted.",
        answer=("text/plain", "application/openmetrics-text"),
    ),
    Route(
        name="livez",
        method="GET",
        path="/livez",
        summary="200 while the process serves requests.",
        answer=("text/plain",),
        guarded=False,
    ),
    Route(
        name="readyz",
        method="GET",
        path="/readyz",
        summary="200 once VMIs are synced and every other resource is synced or refused.",
        answer=("text/plain",),
        problems=(503,),
        guarded=False,
    ),
    Route(
        name="openapi",
        method="GET",
        path="/openapi.json",
        summary="This document.",
        answer=("application/json",),
    ),
    Route(
        name="page",
        method="GET",
        path="/",
        summary="A page for people.",
        answer=("text/html",),
    ),
)


def write_instant(instant: Instant) -> str:
    """RFC 3339 in UTC: whole seconds where they are whole, else microseconds."""
    moment = datetime.fromtimestamp(min(max(instant, 0.0), _LAST_INSTANT), tz=UTC)
    text = moment.isoformat(timespec="microseconds" if moment.microsecond else "seconds")
    return f"{text.removesuffix('+00:00')}Z"


@lru_cache(maxsize=2**14)
def write_release(instant: Instant) -> str:
    """`write_instant`, never earlier than the instant: who asks again then is not too early.

    Kept, because a cooldown's end stays and is told in every answer until then: 5 us each time.
    """
    text = write_instant(instant)
    moment = datetime.fromisoformat(text)
    if moment.timestamp() < min(instant, _LAST_INSTANT):
        return write_instant((moment + timedelta(microseconds=1)).timestamp())
    return text


def write_optional_release(instant: Instant | None) -> str | None:
    """`write_release`, or null where there is none."""
    return None if instant is None else write_release(instant)


def write_optional_instant(instant: Instant | None) -> str | None:
    """`write_instant`, or null where there is none."""
    return None if instant is None else write_instant(instant)


def round_seconds(seconds: Seconds | None) -> Seconds | None:
    """Seconds to the millisecond, which is more than any clock here is worth."""
    return None if seconds is None else round(seconds, 3)


def round_up_seconds(seconds: Seconds | None) -> Seconds | None:
    """Seconds to the next millisecond: who waits that long has waited long enough."""
    return None if seconds is None else math.ceil(seconds * 1000) / 1000


def write_outcome(outcome: Outcome) -> str:
    """The outcome's name as the API and the metrics write it."""
    return outcome.name.lower()


def write_openapi() -> dict[str, Any]:
    """The OpenAPI 3.1 document of `ROUTES`."""
    types = [t for route in ROUTES for t in (route.request, route.answer) if isinstance(t, type)]
    _, components = msgspec.json.schema_components(
        [*types, Problem], ref_template="#/components/schemas/{name}"
    )
    paths: dict[str, dict[str, Any]] = {}
    for route in ROUTES:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "KubeVirt eviction exporter",
            "version": __version__,
            "summary": "Which VMs must not be moved now, and why.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {
                _SCHEME: {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "A token of the cluster, where auth of the listener is on.",
                }
            },
        },
    }


def _operation(route: Route) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": route.name,
        "summary": route.summary,
        "responses": {"200": {"description": "The answer.", "content": _content(route.answer)}},
    }
    if route.parameters:
        operation["parameters"] = [
            {
                "name": parameter.name,
                "in": parameter.place,
                "required": parameter.place == "path",
                "description": parameter.description,
                "schema": parameter.schema,
            }
            for parameter in route.parameters
        ]
    if route.request is not None:
        operation["requestBody"] = {"required": True, "content": _content(route.request)}
    responses = operation["responses"]
    if route.not_modified:
        responses["304"] = {"description": "Nothing has changed since that ETag."}
    if route.guarded:
        operation["security"] = [{}, {_SCHEME: []}]
    for status in route.refusals:
        responses[str(status)] = {
            "description": _PROBLEMS[status],
            "content": {"application/problem+json": {"schema": _reference(Problem)}},
        }
    return operation


def _content(body: type[Struct] | tuple[str, ...]) -> dict[str, Any]:
    if isinstance(body, tuple):
        return {
            media: {"schema": {"type": "object" if media == "application/json" else "string"}}
            for media in body
        }
    return {"application/json": {"schema": _reference(body)}}


def _reference(body: type[Struct]) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{body.__name__}"}


_SCHEME = "clusterToken"
_PROBLEMS = {
    400: "The body is not JSON.",
    401: "Nobody knows who this is.",
    403: "It is known who this is, and they may not.",
    408: "The body did not come in time.",
    404: "There is no such VMI.",
    413: "The body is too large.",
    422: "A field or parameter is wrong; the detail names it.",
    503: "Not synced yet; Retry-After says when to ask again.",
}
