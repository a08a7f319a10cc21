"""`make reference` writes the parts of docs/api.md and docs/reference.md that repeat the program.

docs/api.md explains the OpenAPI document. Its endpoints and types are generated, the rest is
written by hand. Its examples are answers of the query API about fixed objects. Every answer is
validated against the OpenAPI document.
"""

import asyncio
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from shlex import quote
from typing import Any, TypeAlias

from msgspec import structs

from exporter.engine.facts.changes import EvictionAdmitted
from exporter.engine.facts.model import CLUSTER_RESOURCES, Why, WhySource
from exporter.engine.facts.policy import PolicyValues
from exporter.engine.verdicts.rules import RULES
from exporter.errors import Exit
from exporter.metrics.exposition import FAMILIES
from exporter.server.api.openapi import ROUTES, Route, read_meanings, write_openapi
from exporter.settings.document import write_key
from exporter.text import format_duration
from exporter.words.evacuations import DRAIN_ENDS, EVACUATION_ENDS, OUTCOMES, STATES
from exporter.words.health import LOSSES
from exporter.words.verdicts import REASONS
from tests.support.builders import NOW, a_pod, a_state, a_vmi, a_vmim, an_ended_vmim
from tests.support.documents import API, REFERENCE, ROOT, read
from tests.unit.server.api.test_handlers import Answer, ServedApi, opened


Json: TypeAlias = dict[str, Any]

NAMES = {"verdicts": "Verdicts", "blocked": "The blocked set", "evacuations": "Evacuations"}
"""The heading of each endpoint that has a chapter with an example answer, by its operation id.

The answers to the other examples are only validated.
"""

CHAPTERS = {
    "DrainOutcome": "drain-outcomes",
    "EndReason": "the-record-of-a-migration",
    "Reason": "reasons",
    "State": "evacuation-states",
}
"""The chapter of docs/reference.md that has the values of a type of words."""

BLIND_SPOT = ROOT / "exporter/runbooks/KubeVirtEvictionExporterBlindSpot.md"
_STATES = [f"| `{state}` | {words.meaning} |" for state, words in STATES.items()]
COMMON = 3
"""A field that is the same in this number of types is described once."""

INCLUDED = 8
"""A type with at least this number of fields, all of which another has, is not repeated there."""

_ENDPOINTS = "| endpoint | what it answers | answer |\n|---|---|---|\n"


@dataclass(frozen=True)
class Example:
    """An example request of an endpoint."""

    path: str
    body: Json | None = None

    @property
    def curl(self) -> str:
        """The request as a command."""
        body = "" if self.body is None else f" -d {quote(json.dumps(self.body))}"
        return f'curl -s "$KUBEVIRT_EVICTION_EXPORTER_URL{self.path}"{body}'


EXAMPLES = {
    "verdicts": Example("/v1/verdicts", {"candidates": [{"namespace": "bank", "name": "churn-1"}]}),
    "blocked": Example("/v1/blocked"),
    "vmis": Example("/v1/vmis?name=churn-1"),
    "vmi": Example("/v1/vmis/bank/churn-1"),
    "evacuations": Example("/v1/evacuations"),
    "nodes": Example("/v1/nodes"),
    "node": Example("/v1/nodes/node-1"),
    "status": Example("/v1/status"),
    "livez": Example("/livez"),
    "readyz": Example("/readyz"),
}
REFUSED = Example("/v1/verdicts", {"candidates": [{"namespace": "bank"}]})


async def ask() -> dict[str, Answer]:
    """The answers to the examples; `refused` is the answer to `REFUSED`."""
    api = ServedApi()
    node = "node-1"
    moves: Json = {"eviction_strategy": "LiveMigrate", "migratable": True}

    def put_vm(namespace: str, name: str, **fields: Any) -> None:
        place = {"namespace": namespace, "node": node}
        uid = f"uid-of-{name}"
        api.store.put(a_vmi(name=name, uid=uid, **place, **fields))
        pod = {"name": f"virt-launcher-{name}-x", "uid": f"uid-of-pod-of-{name}", "vmi_uid": uid}
        api.store.put(a_pod(**pod, **place))

    put_vm("bank", "churn-1", migration=a_state(uid="m2"), **moves)
    ended = {"uid": "m1", "start": NOW - 5192.0, "end": NOW - 5000.0}
    api.store.put(an_ended_vmim(namespace="bank", vmi_name="churn-1", **ended))
    put_vm("shop", "steady-1", **moves)
    namespace, name = "shop", "unschedulable-1"
    put_vm(namespace, name, **moves)
    read_at, api.store.now = api.store.now, NOW - 119.0
    request = EvictionAdmitted(namespace, f"virt-launcher-{name}-x", "alice")
    api.store.apply(request, NOW - 120.0)
    put_vm(namespace, name, evacuation_node=node, **moves)
    api.store.now = read_at
    attempt = {"name": "evacuation-1", "uid": "m3", "evacuates": node, "phase": "Scheduling"}
    api.store.put(a_vmim(namespace=namespace, vmi_name=name, **attempt))
    target = {"name": f"virt-launcher-{name}-y", "uid": "pod-3", "vmi_uid": f"uid-of-{name}"}
    unschedulable = a_pod(
        **target,
        namespace=namespace,
        node="",
        migration_uid="m3",
        ready=False,
        unschedulable=True,
    )
    api.store.put(unschedulable)
    message = (
        "0/3 nodes are available: 1 Insufficient memory, 2 node(s) didn't match Pod's node"
        " affinity/selector."
    )
    why = Why(WhySource.POD_SCHEDULED, "Unschedulable", message, NOW - 110.0)
    api.store.put(unschedulable, (why,))
    answers = {}
    async with opened(api) as served:
        for name, example in {**EXAMPLES, "refused": REFUSED}.items():
            method = "GET" if example.body is None else "POST"
            options: Json = {} if example.body is None else {"json": example.body}
            answers[name] = await served.ask(method, example.path, **options)
    return answers


def write_api(text: str, document: Json, answers: Mapping[str, Answer]) -> str:
    """The text of docs/api.md, with the current endpoints and types."""
    head, table, rest = text.partition(_ENDPOINTS)
    _, _, conventions = rest.partition("\n\n")
    conventions, heading, _ = conventions.partition("\n## Statuses\n")
    assert heading, "docs/api.md has no table of endpoints, or no chapter about statuses"
    lines = (head + table).splitlines()
    for route in ROUTES:
        operation = document["paths"][route.path][route.method.lower()]
        asked = "&".join(
            f"{parameter['name']}={parameter['name'].upper()}"
            for parameter in operation.get("parameters", ())
            if parameter["in"] == "query" and parameter.get("required")
        )
        name = f"`{route.method} {route.path}{'?' if asked else ''}{asked}`"
        if route.name in NAMES:
            name = f"[{name}](#{_anchor(NAMES[route.name])})"
        lines.append(f"| {name} | {route.summary} | {_body(operation['responses']['200'])} |")
    lines += ["", *conventions.splitlines(), "", *_statuses(document, answers)]
    for route in ROUTES:
        if route.name in NAMES:
            lines += ["", *_endpoint(route, document, answers)]
    lines += ["", *_types(document["components"]["schemas"])]
    return "\n".join(lines) + "\n"


def _statuses(document: Json, answers: Mapping[str, Answer]) -> Iterator[str]:
    """One table of every HTTP status, and an example of an error."""
    operations = [document["paths"][route.path][route.method.lower()] for route in ROUTES]
    meanings = {
        status: response["description"].rstrip(".")
        for operation in operations
        for status, response in operation["responses"].items()
    }
    yield from ("## Statuses", "", "| status | meaning |", "|---|---|")
    for status, meaning in sorted(meanings.items()):
        yield f"| `{status}` | {meaning} |"
    yield from ("", "`/openapi.json` has those of each endpoint. An error names the wrong field:")
    yield from (
        "",
        *_fence("bash", REFUSED.curl),
        "",
        *_fence("json", _indented(answers["refused"])),
    )


def _endpoint(route: Route, document: Json, answers: Mapping[str, Answer]) -> Iterator[str]:
    operation = document["paths"][route.path][route.method.lower()]
    yield from (f"## {NAMES[route.name]}", "")
    asked = f"`{route.method} {route.path}`"
    if "requestBody" in operation:
        asked += f" with a {_body(operation['requestBody'])}"
    yield f"{asked} answers with {_body(operation['responses']['200'])}."
    beside = [field for field in operation.get("parameters", ()) if field["in"] != "path"]
    if beside:
        yield from ("", "| parameter | in | type | meaning |", "|---|---|---|---|")
    for parameter in beside:
        name, place, meaning = parameter["name"], parameter["in"], parameter["description"]
        yield f"| `{name}` | {place} | {_kind(parameter['schema'])} | {meaning} |"
    yield from ("", *_fence("bash", EXAMPLES[route.name].curl))
    yield from ("", *_fence("json", _indented(answers[route.name])))


def _types(schemas: Json) -> Iterator[str]:
    """The types: a table of words, the fields that many types share, and each other type."""
    words = {name: schema for name, schema in sorted(schemas.items()) if "enum" in schema}
    types = {name: schema for name, schema in sorted(schemas.items()) if "enum" not in schema}
    yield from ("## Types", "", "### Words", "", "| type | meaning | values |", "|---|---|---|")
    for name, schema in words.items():
        meaning = " ".join(schema["description"].split())
        values = ", ".join(f"`{value}`" for value in schema["enum"])
        if name in CHAPTERS:
            values = f"[reference.md](reference.md#{CHAPTERS[name]})"
        yield f"| `{name}` | {meaning} | {values} |"
    common = _common_fields(types.values())
    yield from ("", "### Common fields", "", f"Fields of at least {COMMON} types.", "", *_HEAD)
    for field, kind in sorted(common.items()):
        yield _row(field, kind)
    for name, schema in types.items():
        yield from ("", f"### {name}", "", *schema["description"].split("\n"))
        own = schema["properties"]
        for base in _bases(name, types):
            yield from ("", f"It has all fields of [`{base}`](#{_anchor(base)}).")
            own = {field: own[field] for field in own if field not in types[base]["properties"]}
        shared = [f"`{field}`" for field, kind in own.items() if common.get(field) == kind]
        if shared:
            yield from ("", f"[Common fields](#common-fields): {', '.join(shared)}.")
        rows = [
            _row(field, kind, "" if field in schema.get("required", ()) else ", optional")
            for field, kind in own.items()
            if common.get(field) != kind
        ]
        if rows:
            yield from ("", *_HEAD, *rows)


def _common_fields(types: Iterable[Json]) -> Json:
    """The fields that are the same in at least `COMMON` types."""
    uses = Counter(
        (field, json.dumps(kind))
        for schema in types
        for field, kind in schema["properties"].items()
    )
    return {field: json.loads(kind) for (field, kind), times in uses.items() if times >= COMMON}


def _bases(name: str, types: Json) -> list[str]:
    """The types, if any, whose many fields this type has too."""
    fields = types[name]["properties"].items()
    return [
        other
        for other, schema in types.items()
        if other != name
        and len(schema["properties"]) >= INCLUDED
        and schema["properties"].items() <= fields
    ]


def _row(field: str, kind: Json, optional: str = "") -> str:
    return f"| `{field}` | {_kind(kind)}{optional} | {kind.get('description', '')} |"


WORDS = {name for name, kind in write_openapi()["components"]["schemas"].items() if "enum" in kind}
_HEAD = ("| field | type | meaning |", "|---|---|---|")


def _kind(schema: Json) -> str:
    """A schema in words: `string (1 to 63 characters)?`. The ? means that it may be null."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[`{name}`](#{'words' if name in WORDS else _anchor(name)})"
    if "anyOf" in schema:
        kinds = [_kind(variant) for variant in schema["anyOf"] if variant != {"type": "null"}]
        return " or ".join(kinds) + ("?" if len(kinds) < len(schema["anyOf"]) else "")
    if "enum" in schema:
        return " or ".join(f"`{value}`" for value in schema["enum"])
    limits = [text.format(schema[key]) for key, text in _LIMITS.items() if key in schema]
    match schema["type"]:
        case "array":
            words = f"list of {_kind(schema['items'])}"
        case "object":
            words = f"object, each value {_kind(schema['additionalProperties'])}"
        case "string" if schema.get("format") == "date-time":
            words = "instant"
        case kind:
            words = str(kind)
    return f"{words} ({' '.join(limits)})" if limits else words


_LIMITS = {
    "minLength": "{} to",
    "maxLength": "{} characters",
    "minimum": "{} to",
    "maximum": "{}",
}


def _body(holder: Json) -> str:
    """The type of a body, or its media types if it has none."""
    kinds = []
    for media, content in holder["content"].items():
        schema = content["schema"]
        kinds.append(_kind(schema) if "$ref" in schema else f"`{media}`")
    return " or ".join(kinds)


def _anchor(heading: str) -> str:
    return heading.lower().replace(" ", "-")


def _indented(answer: Answer) -> str:
    return json.dumps(answer.json, indent=2)


def _fence(language: str, text: str) -> tuple[str, ...]:
    return (f"```{language}", text, "```")


def fill_tables(text: str) -> str:
    """The text of docs/reference.md, with the current values of the program in its tables."""
    text = re.sub(r"(\| `policy\.(?!overrides).*\n)+", "".join(_write_policy(text)), text)
    checkpoints = {rule.reason: rule.checkpoint for rule in RULES}
    reasons = [
        f"| `{reason}` | `{checkpoints[reason]}` | {words.meaning} |"
        for reason, words in REASONS.items()
    ]
    exits = [f"| `{code.value}` | {code.meaning} |" for code in Exit]
    metrics = [
        f"| `{family.name}` | {family.type}"
        f" | {', '.join(f'`{label}`' for label in family.labels) or 'none'} | {family.stability}"
        f" | {family.help} |"
        for family in FAMILIES
    ]
    endpoints = [f"| `{route.method} {route.path}` | {route.stability} |" for route in ROUTES]
    tables = {
        "Stability": endpoints,
        "Exit codes": exits,
        "Reasons": reasons,
        "Evacuation states": _STATES,
        "Drain outcomes": [
            f"| `{outcome}` | {words.meaning} |" for outcome, words in OUTCOMES.items()
        ],
        "Drains": [
            *(f"| drains | `{end}` | {meaning} |" for end, meaning in DRAIN_ENDS.items()),
            *(f"| evacuations | `{end}` | {meaning} |" for end, meaning in EVACUATION_ENDS.items()),
        ],
        "Metrics": metrics,
    }
    for heading, rows in tables.items():
        text = _fill(text, heading, rows)
    return text


def fill_losses(text: str) -> str:
    """The text of the runbook about blind spots, with what is lost without each resource."""
    return _fill(
        text, "Impact", [f"| `{resource}` | {LOSSES[resource]} |" for resource in CLUSTER_RESOURCES]
    )


def _write_policy(text: str) -> Iterator[str]:
    """The rows of the settings in `policy` and `policy.guards`; their stability is in the text."""
    meanings = read_meanings(PolicyValues)
    stability = dict(
        re.findall(r"^\| `policy\.([\w.]+)` \| `[^`]*` \| (\w+) \|", text, re.MULTILINE)
    )
    for field in structs.fields(PolicyValues):
        guard, default = field.name.removeprefix("guard_"), field.default
        key = f"{'guards.' if guard != field.name else ''}{write_key(guard)}"
        shown = str(default).lower() if isinstance(default, bool) else format_duration(default)
        if key != "block":
            cells = (f"`policy.{key}`", f"`{shown}`", stability.get(key, ""), meanings[field.name])
            yield f"| {' | '.join(cells)} |\n"


def _fill(text: str, heading: str, rows: list[str]) -> str:
    """The text with these rows in the first table below a heading."""
    match = re.search(
        rf"^## {heading}\n[^|]*\|.*\n\|[-|]+\|\n((?:\|.*\n)*)", text, flags=re.MULTILINE
    )
    if match is None:
        raise ValueError(f"there is no table below ## {heading}")
    return text[: match.start(1)] + "".join(f"{row}\n" for row in rows) + text[match.end(1) :]


def main() -> None:
    """Write both files."""
    text = write_api(read(API), write_openapi(), asyncio.run(ask()))
    API.write_text(text, encoding="utf-8")
    REFERENCE.write_text(fill_tables(read(REFERENCE)), encoding="utf-8")
    BLIND_SPOT.write_text(fill_losses(read(BLIND_SPOT)), encoding="utf-8")


if __name__ == "__main__":
    main()
