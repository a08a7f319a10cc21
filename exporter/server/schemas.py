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
from exporter.engine.diagnosis import Cause, Source, State
from exporter.engine.model import Checkpoint, Instant, Mismatch, Outcome, Reason, Resource, Seconds
from exporter.health import CheckpointFault, Staleness


Namespace = Annotated[str, Meta(min_length=1, max_length=63)]
Name = Annotated[str, Meta(min_length=1, max_length=253)]
Uid = Annotated[str, Meta(max_length=128)]
Remark = Annotated[str, Meta(max_length=253)]
InstantText = Annotated[str, Meta(extra_json_schema={"format": "date-time"})]


def means(text: str) -> Meta:
    """What a field says, where its name does not say it all; stands in the OpenAPI document."""
    return Meta(description=text)


AsOf = Annotated[InstantText, means("the instant of the answer, by the exporter's clock")]
ObservedAt = Annotated[
    InstantText | None,
    means("the last proof of contact with the API server; null before the first"),
]
Stale = Annotated[
    bool,
    means(
        "nothing was heard of the API server for kube.staleAfter, or a VMI that this is about is in"
        " a namespace that may not be seen any more"
    ),
]
BlindSpots = Annotated[dict[str, str], means("the resources that may not be seen, and why")]

_LAST_INSTANT = datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC).timestamp()


class Candidate(Struct, rename="camel", gc=False):
    """A VMI that is thought of for eviction; `vmiUid` is the pod's label created-by."""

    namespace: Annotated[Namespace, means("the VMI's namespace")]
    name: Annotated[Name, means("the VMI's name: the pod's annotation kubevirt.io/domain")]
    vmi_uid: Annotated[
        Uid | None,
        means("the pod's label kubevirt.io/created-by, not the pod's own UID; absent: any"),
    ] = None
    node: Annotated[Remark | None, means("for the log only")] = None
    pod: Annotated[Remark | None, means("for the log only")] = None


class VerdictRequest(Struct, rename="camel"):
    """The candidates, the checkpoint (both where absent), and whether to count the answers.

    null is what a Go client sends for an empty list or an unset field.
    """

    candidates: Annotated[
        list[Candidate] | None,
        means("the VMIs asked about, at most limits.candidates of them; null: none"),
    ]
    checkpoint: Annotated[
        Checkpoint | None,
        means("filter: may it be a candidate? preEviction: may it be evicted now? absent: both"),
    ] = None
    dry_run: Annotated[bool | None, means("answer without counting it in the metrics")] = False


class VerdictAnswer(Struct, rename="camel", kw_only=True, gc=False):
    """The verdict on one candidate."""

    namespace: Annotated[str, means("as asked")]
    name: Annotated[str, means("as asked")]
    known: Annotated[bool, means("whether there is such a VMI")]
    mismatch: Annotated[
        Mismatch | None,
        means("why it is not known: no VMI of that name, or its UID is another; null where it is"),
    ]
    allowed: Annotated[
        bool,
        means(
            "that no rule holds it at the checkpoint asked about; one that is being evacuated"
            " already can be allowed too: see `evacuation` of GET /v1/vmis/{namespace}/{name}"
        ),
    ]
    reason: Annotated[Reason | None, means("why not; null where it is allowed")]
    not_before: Annotated[
        InstantText | None,
        means("under cooldown: when it is allowed, if nothing else happens"),
    ]
    retry_after_seconds: Annotated[
        float | None,
        means(
            "under cooldown: from asOf to notBefore; else null: nobody knows when a migration or"
            " an evacuation ends, so ask again next cycle, or wait on GET /v1/blocked"
        ),
    ]
    effective_cooldown_seconds: Annotated[
        float | None,
        means("the cooldown after its last migration, over or not; null where none has ended"),
    ]
    migrations_in_window: Annotated[
        int,
        means("ended migrations that count: they double the cooldown, from the second on"),
    ]


class VerdictsAnswer(Struct, rename="camel", kw_only=True):
    """One verdict per candidate, in the order asked."""

    as_of: AsOf
    observed_at: ObservedAt
    stale: Stale
    verdicts: list[VerdictAnswer]


class BlockedVmi(Struct, rename="camel", kw_only=True, frozen=True, gc=False):
    """A VMI and a checkpoint at which it is blocked."""

    namespace: str
    name: str
    vmi_uid: str
    node: Annotated[str, means("the node that it runs on")]
    checkpoint: Annotated[Checkpoint, means("at which it is blocked")]
    reason: Annotated[Reason, means("why")]
    not_before: Annotated[InstantText | None, means("as in a verdict; null but for a cooldown")]


class BlockedAnswer(Struct, rename="camel", kw_only=True):
    """Every VMI that is blocked; what is not in it may be taken as allowed for `maxAgeSeconds`."""

    as_of: AsOf
    stale: Stale
    max_age_seconds: Annotated[
        float,
        means("for how long a caller may take what is not in the set as allowed"),
    ]
    blocked: Annotated[
        list[BlockedVmi],
        means(
            "sorted by namespace, name and checkpoint; a VMI can be in it once for each checkpoint"
        ),
    ]


class RuleAnswer(Struct, rename="camel", kw_only=True):
    """What one rule says, whether or not an earlier one blocks already."""

    rule: Annotated[str, means("its name")]
    checkpoint: Annotated[Checkpoint, means("at which it is asked")]
    reason: Annotated[Reason, means("the reason that it gives where it blocks")]
    enabled: Annotated[bool, means("false: policy.guards switches it off")]
    silenced: Annotated[
        bool,
        means(
            "true: it has no say, because a resource that it needs was not heard of for too long"
        ),
    ]
    blocks: Annotated[bool, means("whether it blocks now")]
    why: Annotated[str, means("what it saw, in words")]


class CooldownAnswer(Struct, rename="camel", kw_only=True):
    """effective = min(base * 2^(migrationsInWindow-1), cap); base = max(floor, duration)."""

    ended_at: Annotated[InstantText, means("when the last migration ended")]
    duration_seconds: Annotated[float, means("how long it took; 0 where that is unknown")]
    migrations_in_window: Annotated[int, means("how many ended ones count")]
    base_seconds: Annotated[float, means("the longer of the floor and the duration")]
    backed_off_seconds: Annotated[
        float,
        means("the base, doubled for each further migration in the window"),
    ]
    effective_seconds: Annotated[float, means("that, or the cap where it is shorter")]
    not_before: Annotated[InstantText, means("endedAt plus effectiveSeconds")]


class MigrationAnswer(Struct, rename="camel", kw_only=True):
    """One recorded migration; a UID of null: told only by its end."""

    uid: Annotated[str | None, means("the VMIM's UID; null: told only by its end")]
    start: Annotated[InstantText | None, means("null: not known")]
    end: Annotated[InstantText | None, means("null: it has not ended, or nobody knows when")]
    outcome: Annotated[str, means("succeeded, failed or unknown")]
    handed_off: Annotated[bool, means("whether it got as far as a target pod; others never count")]
    in_window: Annotated[
        bool,
        means("whether it counts: handed off, and ended inside policy.migrationHistoryWindow"),
    ]


class PendingAnswer(Struct, rename="camel", kw_only=True):
    """A VMIM of this VMI that has not ended."""

    name: Annotated[str, means("the VMIM's name")]
    uid: Annotated[str, means("the VMIM's UID")]
    phase: Annotated[str, means("as KubeVirt writes it; empty: none yet")]
    created_at: Annotated[InstantText | None, means("when the VMIM was made")]
    handed_off: Annotated[bool, means("whether it has got as far as a target pod")]


class LauncherAnswer(Struct, rename="camel", kw_only=True):
    """The VMI's current virt-launcher pod."""

    name: Annotated[str, means("the pod's name")]
    node: Annotated[str, means("empty: not scheduled yet")]
    phase: Annotated[str, means("as Kubernetes writes it")]
    ready: Annotated[bool, means("its condition Ready")]
    scheduled: Annotated[bool, means("its condition PodScheduled")]
    eviction_in_progress: Annotated[
        bool,
        means("whether it has the annotation eviction-in-progress: the descheduler counts it"),
    ]


class PolicyAnswer(Struct, rename="camel", kw_only=True):
    """The policy in force; 0 means off."""

    migration_cooldown_seconds: Annotated[float, means("the floor of a cooldown")]
    max_migration_cooldown_seconds: Annotated[float, means("the cap of a cooldown")]
    migration_history_window_seconds: Annotated[
        float,
        means("for how long an ended migration counts"),
    ]
    count_failed_migrations: Annotated[bool, means("whether failed ones count too")]
    guard_pending_migrations: Annotated[bool, means("whether an unfinished VMIM blocks")]
    guard_evacuations: Annotated[
        bool,
        means("whether an evacuation that nobody else counts blocks"),
    ]


class CheckpointVerdicts(Struct, rename="camel", kw_only=True):
    """The verdict at each checkpoint."""

    filter: Annotated[VerdictAnswer, means("may its pod be a candidate at all?")]
    pre_eviction: Annotated[VerdictAnswer, means("may it be evicted right now?")]


class BackoffAnswer(Struct, rename="camel", kw_only=True):
    """KubeVirt's present pause before the next attempt."""

    seconds: Annotated[float, means("the whole pause")]
    next_try_at: Annotated[InstantText, means("when it ends")]


class CancelAnswer(Struct, rename="camel", kw_only=True):
    """The request that cancels an evacuation (KubeVirt 1.8); a running attempt goes on."""

    method: Annotated[str, means("the HTTP method")]
    path: Annotated[str, means("on the API server")]
    body: Annotated[dict[str, str], means("as JSON; it must equal what is stored")]


class EvacuationAnswer(Struct, rename="camel", kw_only=True):
    """One evacuation. `failedAttempts` is a lower bound; `cancel` is null where it could harm."""

    namespace: str
    name: str
    vmi_uid: str
    node: Annotated[str, means("the node that it runs on")]
    evacuation_node_name: Annotated[str, means("the node that it is to leave")]
    eviction_strategy: Annotated[str, means("the VMI's own; empty: the cluster's default")]
    source: Annotated[
        Source,
        means(
            "who asked, by the priority of this request's newest VMIM (system-maintenance:"
            " `descheduler`, system-critical: `other`), else by the VMI's annotation"
            " kubevirt.io/eviction-source (`descheduler`); `unknown`: neither is to be seen, as"
            " always before KubeVirt 1.7"
        ),
    ]
    requested_at: Annotated[InstantText, means("the earliest that is known")]
    age_seconds: Annotated[float, means("from requestedAt to asOf")]
    state: Annotated[State, means("what holds it up")]
    stuck: Annotated[bool, means("whether somebody should look")]
    stuck_by: Annotated[list[Cause], means("by which measures it is stuck; empty: it is not")]
    failed_attempts: Annotated[int, means("since it was requested; a lower bound")]
    backoff: Annotated[
        BackoffAnswer | None,
        means("KubeVirt's present pause; null: none, or not known"),
    ]
    diverged: Annotated[
        bool,
        means("KubeVirt still evacuates, and the descheduler believes it over"),
    ]
    attempt: Annotated[PendingAnswer | None, means("the VMIM under way; null: none")]
    next_step: Annotated[str, means("what a person can do")]
    cancel: Annotated[
        CancelAnswer | None,
        means("the request that cancels it; null where that could harm the VM"),
    ]


class EvacuationsAnswer(Struct, rename="camel", kw_only=True):
    """Every evacuation, the longest first; `blindSpots` are resources that may not be seen."""

    as_of: AsOf
    observed_at: ObservedAt
    stale: Stale
    evacuations: list[EvacuationAnswer]
    blind_spots: BlindSpots


class HeldEvictionAnswer(Struct, rename="camel", kw_only=True):
    """An eviction that the admission webhook held, or in mode `warn` would have held."""

    user: Annotated[str, means("who asked for it, as the review says")]
    at: Annotated[InstantText, means("the last time")]
    times: Annotated[int, means("how often this user has asked and was held")]
    reason: Annotated[Reason, means("why, the last time")]
    denied: Annotated[bool, means("false: admission.mode is warn, so the eviction went on")]


class VmiAnswer(Struct, rename="camel", kw_only=True):
    """Everything that is known of one VMI."""

    as_of: AsOf
    observed_at: ObservedAt
    stale: Stale
    namespace: str
    name: str
    vmi_uid: str
    node: Annotated[str, means("the node that it runs on; empty: none yet")]
    phase: Annotated[
        str,
        means("KubeVirt's phase; Succeeded or Failed: the VM has ended, nothing is left to move"),
    ]
    created_at: InstantText | None
    evacuation_node_name: Annotated[str | None, means("the node that it is to leave; null: none")]
    evacuation: Annotated[EvacuationAnswer | None, means("null: it is not being evacuated")]
    verdicts: CheckpointVerdicts
    rules: Annotated[
        list[RuleAnswer],
        means("in the order in which they are asked; the first that blocks gives the reason"),
    ]
    cooldown: Annotated[
        CooldownAnswer | None,
        means("the arithmetic, whether or not it is over; null where no migration has ended"),
    ]
    migrations: Annotated[list[MigrationAnswer], means("by their end, the oldest first")]
    pending_migrations: Annotated[list[PendingAnswer], means("its VMIMs that have not ended")]
    launcher: Annotated[LauncherAnswer | None, means("null: not seen")]
    held_evictions: Annotated[
        list[HeldEvictionAnswer],
        means(
            "the last evictions of it that this replica's admission webhook held, newest first,"
            " one for each user; forgotten at a restart"
        ),
    ]
    policy: Annotated[PolicyAnswer, means("in force")]
    blind_spots: BlindSpots


class ResourceAnswer(Struct, rename="camel", kw_only=True):
    """One resource that the exporter watches, in one namespace or in all."""

    resource: Annotated[Resource, means("its plural")]
    namespace: Annotated[str | None, means("null: all of them")]
    synced: Annotated[bool, means("whether a whole list has been read")]
    refused: Annotated[
        str | None, means("why the API server does not let it be seen; null: it does")
    ]
    trouble: Annotated[str | None, means("what went wrong last; null since it went well")]
    contact_at: Annotated[InstantText | None, means("the last event, bookmark or list")]
    refused_objects: Annotated[int, means("objects that could not be read since the start")]


class CheckpointStatus(Struct, rename="camel", kw_only=True):
    """How keeping the checkpoint goes."""

    writes: Annotated[bool, means("whether this process is the one that writes it")]
    written_at: Annotated[InstantText | None, means("when it last was as it should be, by us")]
    unwritten_since: Annotated[InstantText | None, means("null: everything is written")]
    vmis: Annotated[int, means("VMIs of which it holds something")]
    bytes: Annotated[int, means("the size of what it holds")]
    faults: Annotated[
        dict[CheckpointFault, int], means("what went wrong since the start; 0 left out")
    ]


class VmiCounts(Struct, rename="camel", kw_only=True):
    """How many VMIs there are, and what is said of them."""

    known: Annotated[int, means("those that have not ended (phase Succeeded or Failed)")]
    allowed: Annotated[int, means("those that no rule holds at either checkpoint")]
    held: Annotated[dict[Reason, int], means("those that are held, by their first reason")]


class StatusAnswer(Struct, rename="camel", kw_only=True):
    """Whether this exporter can be trusted, and how much it holds."""

    version: str
    as_of: AsOf
    observed_at: ObservedAt
    staleness: Annotated[
        Staleness, means("dead: for so long that only cooldowns, which run out alone, still hold")
    ]
    ready: Annotated[bool, means("whether it answers verdicts")]
    waiting_for: Annotated[list[str], means("what is to be listed before it is ready")]
    resources: list[ResourceAnswer]
    blind_spots: BlindSpots
    checkpoint: Annotated[CheckpointStatus | None, means("null: none is kept")]
    vmis: Annotated[VmiCounts | None, means("null until it is ready")]


class Problem(Struct, kw_only=True):
    """An error (RFC 9457, application/problem+json)."""

    title: Annotated[str, means("what kind of error")]
    status: Annotated[int, means("the HTTP status")]
    detail: Annotated[str, means("what was wrong, where, and what was expected")]
    type: Annotated[str, means("always about:blank: title and status say it")] = "about:blank"


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
        name="status",
        method="GET",
        path="/v1/status",
        summary="Whether this exporter can be trusted, and how many VMIs it holds; ready or not.",
        answer=StatusAnswer,
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
        summary="200 once VMIs are synced in one namespace at least, and everything else is synced"
        " or refused.",
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
    fraction, second = math.modf(min(max(instant, 0.0), _LAST_INSTANT))
    micro = round(fraction * 1e6)
    if micro == 10**6:
        second, micro = second + 1.0, 0
    return f"{_write_second(second)}.{micro:06}Z" if micro else f"{_write_second(second)}Z"


@lru_cache(maxsize=2**12)
def _write_second(second: float) -> str:
    """Kept, because each answer tells two instants, mostly of this second: 2 us without, 0.5 so."""
    moment = datetime.fromtimestamp(second, tz=UTC)
    return moment.isoformat(timespec="seconds").removesuffix("+00:00")


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
