"""The JSON schema of the configuration, for the chart: every key of the settings with its type."""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from exporter.settings import read_settings
from exporter.settings.document import InvalidSettings, Section
from exporter.settings.values import (
    parse_address,
    parse_addresses,
    parse_boolean,
    parse_cipher_suites,
    parse_count,
    parse_domain,
    parse_duration,
    parse_file_mode,
    parse_history,
    parse_labels,
    parse_name,
    parse_names,
    parse_namespaces,
    parse_path,
    parse_positive_duration,
    parse_prefix,
    parse_responder,
    parse_runbook_link,
    parse_socket,
    parse_timeout,
    parse_vm_link,
)


Schema = dict[str, Any]
T = TypeVar("T")

_DURATION = r"(0|((\d+(\.\d*)?|\.\d+)(ns|us|µs|μs|ms|s|m|h))+)$"
_TEXT: Schema = {"type": "string", "minLength": 1}
_SOCKET: Schema = {"type": "string", "pattern": "^unix:/"}
_ADDRESS: Schema = {"type": "string", "pattern": r"^(unix:/.*|.*:\d{1,5})$"}
_LINK: Schema = {"type": "string", "pattern": "^https?://"}
_TEXTS: Schema = {"type": "array", "items": _TEXT}
SCHEMAS: dict[Callable[..., Any], Schema] = {
    parse_duration: {"anyOf": [{"type": "string", "pattern": rf"^[-+]?{_DURATION}"}, {"const": 0}]},
    parse_positive_duration: {"type": "string", "pattern": rf"^\+?{_DURATION}"},
    parse_timeout: {"type": "string", "pattern": rf"^\+?{_DURATION}"},
    parse_boolean: {"type": "boolean"},
    parse_count: {"type": "integer", "minimum": 1},
    parse_address: _ADDRESS,
    parse_addresses: {"anyOf": [_ADDRESS, {"type": "array", "items": _ADDRESS, "minItems": 1}]},
    parse_socket: _SOCKET,
    parse_history: {"type": "string", "pattern": "^(none|file:/.+)$"},
    parse_namespaces: {"type": "array", "items": {"type": "string", "maxLength": 63}},
    parse_names: _TEXTS,
    parse_cipher_suites: _TEXTS,
    parse_labels: {"type": "object", "additionalProperties": {"type": "string"}},
    parse_name: _TEXT,
    parse_path: _TEXT,
    parse_domain: {"type": "string", "pattern": r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"},
    parse_prefix: {"type": "string", "pattern": "^[A-Za-z]{0,63}$"},
    parse_responder: {"type": "string", "pattern": r"^[^/]+\.[^/]+/[A-Za-z0-9._-]{1,63}$"},
    parse_file_mode: {"type": "string", "pattern": "^0?[0-7]{3}$"},
    parse_runbook_link: _LINK,
    parse_vm_link: _LINK,
}
"""The values that each parser accepts; some parsers refuse more than a schema can say."""


def build_schema() -> Schema:
    """The schema of the whole configuration; unknown keys are refused."""
    root: Schema = {}

    class Recorder(Section):
        """Notes each key that is read, with its parser."""

        def take(self, key: str, parse: Callable[[object], T], default: T) -> T:
            _place(root, self._at(key), _describe(parse))
            return super().take(key, parse, default)

        def sections(self, key: str) -> list["Recorder"]:
            return [Recorder(f"{self._at(key)}[]", {}, [])]

    with suppress(InvalidSettings):
        read_settings({}, Recorder)
    return root


def _describe(parse: Callable[..., Any]) -> Schema:
    if isinstance(parse, partial):
        return {"enum": [str(choice) for choice in parse.args[0]]}
    return SCHEMAS[parse]


def _place(root: Schema, path: str, schema: Schema) -> None:
    """Add a key at a path such as `policy.overrides[].match.namespaces`."""
    *parents, key = path.split(".")
    at = root
    for parent in ("", *parents):
        name = parent.removesuffix("[]")
        if name:
            at = at["properties"].setdefault(name, {})
        if parent.endswith("[]"):
            at.setdefault("type", "array")
            at = at.setdefault("items", {})
        at.setdefault("type", "object")
        at.setdefault("additionalProperties", False)
        at.setdefault("properties", {})
    at["properties"][key] = schema
