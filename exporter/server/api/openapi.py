"""The routes of the query API and their OpenAPI document."""

import ast
import inspect
import sys
from functools import cache
from itertools import pairwise
from typing import Any

import msgspec
from msgspec import UNSET, Struct, structs

from exporter import __version__
from exporter.engine.facts.model import Checkpoint
from exporter.engine.facts.policy import PolicyValues
from exporter.server import fields
from exporter.server.api import evacuation_schemas, requests, schemas
from exporter.server.api.evacuation_schemas import (
    DrainAnswer,
    EvacuationsAnswer,
    NodeAnswer,
    NodesAnswer,
)
from exporter.server.api.requests import VerdictRequest
from exporter.server.api.schemas import (
    BlockedAnswer,
    StatusAnswer,
    VerdictsAnswer,
    VmiAnswer,
    VmisAnswer,
)
from exporter.server.fields import LONGEST_NAME, LONGEST_NAMESPACE, Problem
from exporter.words import Stability
from exporter.words.evacuations import OUTCOMES


class Route(Struct, frozen=True, kw_only=True):
    """One endpoint. `name` is its metric label and its operation id.

    `guarded`: it needs a token on a listener with authentication.
    """

    name: str
    path: str
    stability: Stability
    summary: str
    answer: type[Struct] | tuple[str, ...]
    method: str = "GET"
    request: type[Struct] | None = None
    parameters: tuple[dict[str, Any], ...] = ()
    problems: tuple[int, ...] = ()
    not_modified: bool = False
    guarded: bool = True

    @property
    def refusals(self) -> tuple[int, ...]:
        """The HTTP statuses of the problems that the endpoint can answer with."""
        asked = (401, 403, 503) if self.guarded else ()
        return tuple(sorted({405, *asked, *self.problems}))


_SCHEME = "clusterToken"
_STRUCTS = {**vars(schemas), **vars(evacuation_schemas), **vars(requests), **vars(fields)}
_PROBLEMS = {
    400: "The body is not JSON, or does not match the request's headers.",
    401: "The token is missing or unknown.",
    403: "The user may not call this endpoint, or the header Host names another server.",
    404: "There is no such VMI or runbook, or no VMI is on this node.",
    405: "The endpoint does not accept this method; the header Allow lists those that it accepts.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    415: "The body is compressed; send it without Content-Encoding.",
    422: "A field or parameter is wrong; the detail names it.",
    503: "The exporter has not read the cluster yet, is shutting down, or cannot ask the API server"
    " who calls; Retry-After says when to ask again.",
}

_HEADERS = {
    304: ("ETag", "Names the state of the answer, for If-None-Match."),
    401: ("WWW-Authenticate", "How to send a token."),
    405: ("Allow", "The methods that the endpoint accepts."),
    503: ("Retry-After", "In how many seconds to ask again."),
}
"""The header that an answer of this status has, and its meaning; with 304 a 200 has it, too."""

PROBLEMS = (*_PROBLEMS, 500)
"""Every HTTP status of a problem+json: those of the endpoints, and that of an internal error."""


def _describe(name: str, place: str, description: str, **schema: Any) -> dict[str, Any]:
    """A parameter of a route."""
    return {
        "name": name,
        "in": place,
        "required": place == "path",
        "description": description,
        "schema": schema,
    }


def _name_in_path(name: str, description: str, longest: int) -> dict[str, Any]:
    return _describe(name, "path", description, type="string", minLength=1, maxLength=longest)


_VMI_PATH = (
    _name_in_path("namespace", "The VMI's namespace.", LONGEST_NAMESPACE),
    _name_in_path("name", "The VMI's name.", LONGEST_NAME),
)
ROUTES: tuple[Route, ...] = (
    Route(
        name="verdicts",
        method="POST",
        path="/v1/verdicts",
        stability=Stability.STABLE,
        summary="May these VMIs be evicted?",
        request=VerdictRequest,
        answer=VerdictsAnswer,
        problems=(400, 408, 413, 415, 422, 503),
    ),
    Route(
        name="blocked",
        path="/v1/blocked",
        stability=Stability.STABLE,
        summary="Every VMI that is blocked now. With wait and If-None-Match, the answer comes when"
        " the set changes.",
        answer=BlockedAnswer,
        parameters=(
            _describe(
                "checkpoint",
                "query",
                "Only the VMIs that this checkpoint blocks. Each checkpoint applies only"
                " some of the rules.",
                type="string",
                enum=[checkpoint.value for checkpoint in Checkpoint],
            ),
            _describe(
                "wait",
                "query",
                "With If-None-Match: the most seconds to wait until the set changes.",
                type="number",
                minimum=0,
                maximum=60,
            ),
            _describe("If-None-Match", "header", "The ETag of the last answer.", type="string"),
        ),
        problems=(422, 503),
        not_modified=True,
    ),
    Route(
        name="vmis",
        path="/v1/vmis",
        stability=Stability.STABLE,
        summary="Which namespaces have a VMI of this name?",
        answer=VmisAnswer,
        parameters=(
            _describe(
                "name",
                "query",
                "The VMI's name; required.",
                type="string",
                minLength=1,
                maxLength=LONGEST_NAME,
            )
            | {"required": True},
        ),
        problems=(422, 503),
    ),
    Route(
        name="vmi",
        path="/v1/vmis/{namespace}/{name}",
        stability=Stability.STABLE,
        summary="Everything known about one VMI: verdicts, what each rule says, migrations.",
        answer=VmiAnswer,
        parameters=_VMI_PATH,
        problems=(404, 422, 503),
    ),
    Route(
        name="evacuations",
        path="/v1/evacuations",
        stability=Stability.STABLE,
        summary="Every evacuation with its diagnosis and the next step, the oldest first.",
        answer=EvacuationsAnswer,
        problems=(503,),
    ),
    Route(
        name="nodes",
        path="/v1/nodes",
        stability=Stability.STABLE,
        summary="What a drain of each node would do to its VMs.",
        answer=NodesAnswer,
        problems=(503,),
    ),
    Route(
        name="node",
        path="/v1/nodes/{node}",
        stability=Stability.STABLE,
        summary="What a drain of one node would do to each VM on it.",
        answer=DrainAnswer,
        parameters=(_name_in_path("node", "The node's name.", LONGEST_NAME),),
        problems=(404, 422, 503),
    ),
    Route(
        name="status",
        path="/v1/status",
        stability=Stability.STABLE,
        summary="The health of this exporter, and how many VMIs it knows. This endpoint also"
        " answers before the exporter is ready.",
        answer=StatusAnswer,
    ),
    Route(
        name="metrics",
        path="/metrics",
        stability=Stability.STABLE,
        summary="Prometheus metrics: text 0.0.4, or OpenMetrics 1.0 if the client accepts it.",
        answer=("text/plain", "application/openmetrics-text"),
    ),
    Route(
        name="livez",
        path="/livez",
        stability=Stability.STABLE,
        summary="200 while the process serves requests.",
        answer=("text/plain",),
        guarded=False,
    ),
    Route(
        name="readyz",
        path="/readyz",
        stability=Stability.STABLE,
        summary="200 when the exporter has read the VMIs of at least one"
        " namespace, and all other resources that verdicts need, except forbidden ones.",
        answer=("text/plain",),
        problems=(503,),
        guarded=False,
    ),
    Route(
        name="openapi",
        path="/openapi.json",
        stability=Stability.STABLE,
        summary="The OpenAPI document of this API.",
        answer=("application/json",),
    ),
    Route(
        name="vm",
        path="/vmis/{namespace}/{name}",
        stability=Stability.STABLE,
        summary="A web page about one VM, with the same information as"
        " GET /v1/vmis/{namespace}/{name}.",
        answer=("text/html",),
        parameters=_VMI_PATH,
        problems=(404, 422, 503),
    ),
    Route(
        name="runbooks",
        stability=Stability.EXPERIMENTAL,
        path="/runbooks",
        summary="The list of the runbooks: a web page, or Markdown if the client accepts it.",
        answer=("text/html", "text/markdown"),
        guarded=False,
    ),
    Route(
        name="runbook",
        stability=Stability.EXPERIMENTAL,
        path="/runbooks/{runbook}",
        summary="A runbook: a web page, or Markdown if the client accepts it.",
        answer=("text/html", "text/markdown"),
        parameters=(_name_in_path("runbook", "The name of its alert.", LONGEST_NAME),),
        problems=(404,),
        guarded=False,
    ),
    Route(
        name="page",
        path="/",
        stability=Stability.STABLE,
        summary="The status page: a web page for people.",
        answer=("text/html",),
    ),
)


def write_openapi() -> dict[str, Any]:
    """The OpenAPI 3.1 document of `ROUTES`."""
    types = [t for route in ROUTES for t in (route.request, route.answer) if isinstance(t, type)]
    _, components = msgspec.json.schema_components(
        [*types, Problem], ref_template="#/components/schemas/{name}"
    )
    for name, schema in components.items():
        if "description" in schema:
            # Python 3.11 does not remove the indentation of docstrings; Python 3.13 does.
            schema["description"] = inspect.cleandoc(schema["description"])
        if "properties" in schema:
            _describe_fields(schema, _STRUCTS[name])
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
                    "description": "A token of the cluster, if the listener has authentication.",
                }
            },
        },
    }


def _describe_fields(schema: dict[str, Any], struct: type[Struct]) -> None:
    meanings, properties = read_meanings(struct), schema["properties"]
    if issubclass(struct, NodeAnswer):
        meanings |= {outcome: f"VMs that {words.counted}" for outcome, words in OUTCOMES.items()}
    for field in structs.fields(struct):
        key = field.encode_name
        if field.name in meanings:
            properties[key] = {"description": meanings[field.name], **properties[key]}
    if issubclass(struct, PolicyValues):
        # The settings have defaults, but an answer is always written whole.
        schema["required"] = [f.encode_name for f in structs.fields(struct) if f.default != UNSET]
        for value in properties.values():
            value.pop("default", None)


def read_meanings(struct: type[Struct]) -> dict[str, str]:
    """The meaning of each field: the string under it."""
    ours = (parent for parent in struct.__mro__ if parent.__module__.startswith("exporter."))
    bodies = (_read_bodies(parent.__module__)[parent.__name__] for parent in ours)
    return {
        field.target.id: " ".join(ast.literal_eval(below.value).split())
        for body in bodies
        for field, below in pairwise(body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(below, ast.Expr)
    }


@cache
def _read_bodies(module: str) -> dict[str, list[ast.stmt]]:
    """The bodies of the classes in our modules."""
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {node.name: node.body for node in tree.body if isinstance(node, ast.ClassDef)}


def _operation(route: Route) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": route.name,
        "x-stability": route.stability,
        "summary": route.summary,
        "responses": {"200": {"description": "The answer.", "content": _content(route.answer)}},
    }
    if route.parameters:
        operation["parameters"] = list(route.parameters)
    if route.request is not None:
        operation["requestBody"] = {"required": True, "content": _content(route.request)}
    responses = operation["responses"]
    if route.not_modified:
        responses["200"]["headers"] = _describe_header(304)
        responses["304"] = {
            "description": "The set has not changed since that ETag.",
            "headers": _describe_header(304),
        }
    if route.guarded:
        operation["security"] = [{}, {_SCHEME: []}]
    for status in route.refusals:
        responses[str(status)] = {
            "description": _PROBLEMS[status],
            **({"headers": _describe_header(status)} if status in _HEADERS else {}),
            "content": {"application/problem+json": {"schema": _reference(Problem)}},
        }
    return operation


def _describe_header(status: int) -> dict[str, Any]:
    name, meaning = _HEADERS[status]
    return {name: {"description": meaning, "schema": {"type": "string"}}}


def _content(body: type[Struct] | tuple[str, ...]) -> dict[str, Any]:
    if isinstance(body, tuple):
        return {
            media: {"schema": {"type": "object" if media == "application/json" else "string"}}
            for media in body
        }
    return {"application/json": {"schema": _reference(body)}}


def _reference(body: type[Struct]) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{body.__name__}"}
