"""docs/api.md: the OpenAPI document for people, with what a real exporter answers.

`make reference` writes it. The examples are asked of the query API itself, over facts that stand
still, and every answer is held against the document.
"""

import asyncio
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from shlex import quote
from typing import Any, TypeAlias

from exporter.engine.model import Hold
from exporter.server.openapi import ROUTES, Route, write_openapi
from tests.support.builders import NOW, a_pod, a_state, a_vmi, a_vmim, an_ended_vmim
from tests.unit.server.test_api import Answer, Desk, opened


Json: TypeAlias = dict[str, Any]

REFERENCE = Path(__file__).parents[2] / "docs" / "api.md"
NAMES = {
    "verdicts": "Verdicts",
    "blocked": "The blocked set",
    "vmi": "One VMI",
    "evacuations": "Evacuations",
    "status": "Status",
    "metrics": "Metrics",
    "livez": "Liveness",
    "readyz": "Readiness",
    "openapi": "The OpenAPI document",
    "page": "The page",
}
"""The heading of each endpoint, by its operation id."""

_HEAD = """\
# The API

Written by `make reference` from the document that an exporter serves at `/openapi.json`, which is
made of the types that decode its requests and encode its answers. The examples are what a query
listener answered, all of the same facts at the same instant; `$EXPORTER` is its URL.

JSON throughout; names are camelCase, durations seconds, instants RFC 3339 in UTC. Request fields
that are not known are ignored. Every field of an answer is always there, `null` where there is
nothing to tell. An error is `application/problem+json`: [`Problem`](#problem). Where `auth` of the
listener is on, send a token of the cluster: `-H "Authorization: Bearer $TOKEN"`.

To try them, let `make run` (or `python -m exporter demo`) run, and in another terminal:

```bash
export EXPORTER=http://127.0.0.1:9810
```

The VM of the examples is `shop/db1`; the demo has others, of which `bank/churn-1` is one.
"""


@dataclass(frozen=True)
class Example:
    """A request that stands for its endpoint."""

    path: str
    body: Json | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def curl(self) -> str:
        """The request as a person types it."""
        headers = "".join(f" -H {quote(f'{k}: {v}')}" for k, v in self.headers.items())
        body = "" if self.body is None else f" -d {quote(json.dumps(self.body))}"
        return f'curl -s{headers} "$EXPORTER{self.path}"{body}'


EXAMPLES = {
    "verdicts": Example(
        "/v1/verdicts",
        {
            "checkpoint": "preEviction",
            "candidates": [{"namespace": "shop", "name": "db1", "vmiUid": "uid-of-db1"}],
        },
    ),
    "blocked": Example("/v1/blocked?checkpoint=preEviction"),
    "vmi": Example("/v1/vmis/shop/db1"),
    "evacuations": Example("/v1/evacuations"),
    "status": Example("/v1/status"),
    "livez": Example("/livez"),
    "readyz": Example("/readyz"),
}
REFUSED = Example("/v1/verdicts", {"candidates": [{"namespace": "shop"}]})


async def ask() -> dict[str, Answer]:
    """What the examples are answered; `refused` is that of REFUSED."""
    desk = Desk()
    for vmi in (a_vmi(migration=a_state(uid="m2")), a_vmi(name="db2", uid="uid-of-db2")):
        desk.store.put(vmi)
    desk.store.put(a_pod())
    desk.store.put(an_ended_vmim(uid="m1", start=NOW - 5192.0, end=NOW - 5000.0))
    desk.store.put(
        a_vmi(
            name="web1",
            uid="uid-of-web1",
            evacuation_node="n1",
            eviction_strategy="LiveMigrate",
            migratable=True,
        )
    )
    desk.store.put(a_pod(name="virt-launcher-web1-x", uid="pod-2", vmi_uid="uid-of-web1"))
    attempt = {"name": "evacuation-web1", "uid": "m3", "evacuates": "n1", "hold": Hold.QUOTA}
    desk.store.put(a_vmim(vmi_name="web1", **attempt))
    answers = {}
    async with opened(desk) as one:
        for name, example in {**EXAMPLES, "refused": REFUSED}.items():
            method = "GET" if example.body is None else "POST"
            options: Json = {} if example.body is None else {"json": example.body}
            answers[name] = await one.ask(method, example.path, **options)
    return answers


def write_reference(document: Json, answers: Mapping[str, Answer]) -> str:
    """The whole file."""
    lines = [_HEAD, "| endpoint | what it answers |", "|---|---|"]
    for route in ROUTES:
        link = f"[`{route.method} {route.path}`](#{_anchor(NAMES[route.name])})"
        lines.append(f"| {link} | {route.summary} |")
    for route in ROUTES:
        lines += ["", *_endpoint(route, document, answers)]
    lines += ["", "## Types", "", "What requests and answers are made of, by name."]
    for name, schema in sorted(document["components"]["schemas"].items()):
        lines += ["", f"### {name}", "", *_type(schema)]
        if name == "Problem":
            lines += ["", *_fence("bash", REFUSED.curl)]
            lines += ["", *_fence("json", _indented(answers["refused"]))]
    return "\n".join(lines) + "\n"


def _endpoint(route: Route, document: Json, answers: Mapping[str, Answer]) -> Iterator[str]:
    operation = document["paths"][route.path][route.method.lower()]
    yield from (f"## {NAMES[route.name]}", "", f"`{route.method} {route.path}`", "", route.summary)
    if "parameters" in operation:
        yield from ("", "| parameter | in | type | meaning |", "|---|---|---|---|")
        for one in operation["parameters"]:
            needed = ", required" if one["required"] else ""
            yield (
                f"| `{one['name']}` | {one['in']}{needed} | {_kind(one['schema'])} |"
                f" {one['description']} |"
            )
    if "requestBody" in operation:
        yield from ("", f"The request is a {_body(operation['requestBody'])}.")
    yield from ("", "| status | answer |", "|---|---|")
    for status, response in sorted(operation["responses"].items()):
        body = f": {_body(response)}" if "content" in response else ""
        yield f"| `{status}` | {response['description'].rstrip('.')}{body} |"
    example = EXAMPLES.get(route.name)
    if example is not None:
        answer = answers[route.name]
        is_json = answer.headers["Content-Type"].startswith("application/json")
        text = _indented(answer) if is_json else answer.body.decode().rstrip()
        yield from ("", *_fence("bash", example.curl))
        yield from ("", *_fence("json" if is_json else "text", text))


def _type(schema: Json) -> Iterator[str]:
    yield from schema["description"].split("\n")
    if "enum" in schema:
        yield from ("", "One of " + ", ".join(f"`{value}`" for value in schema["enum"]) + ".")
        return
    yield from ("", "| field | type | meaning |", "|---|---|---|")
    required = set(schema.get("required", ()))
    for name, one in schema["properties"].items():
        optional = "" if name in required else ", optional"
        yield f"| `{name}` | {_kind(one)}{optional} | {one.get('description', '')} |"


def _kind(schema: Json) -> str:
    """A schema in words: `string (1 to 63 characters) or null`."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[`{name}`](#{_anchor(name)})"
    if "anyOf" in schema:
        return " or ".join(_kind(one) for one in schema["anyOf"])
    if "enum" in schema:
        return " or ".join(f"`{value}`" for value in schema["enum"])
    limits = [text.format(schema[key]) for key, text in _LIMITS.items() if key in schema]
    match schema["type"]:
        case "array":
            said = f"list of {_kind(schema['items'])}"
        case "object":
            said = f"object, each value {_kind(schema['additionalProperties'])}"
        case "string" if schema.get("format") == "date-time":
            said = "instant"
        case kind:
            said = str(kind)
    return f"{said} ({' '.join(limits)})" if limits else said


_LIMITS = {
    "minLength": "{} to",
    "maxLength": "{} characters",
    "minimum": "{} to",
    "maximum": "{}",
}


def _body(holder: Json) -> str:
    """What a body is: its type, or its media types where it has none."""
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


def main() -> None:
    """Write the file."""
    REFERENCE.write_text(write_reference(write_openapi(), asyncio.run(ask())), encoding="utf-8")


if __name__ == "__main__":
    main()
