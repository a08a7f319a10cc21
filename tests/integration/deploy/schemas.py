"""JSON schemas of everything that an API server serves, from its own OpenAPI document."""

import json
import re
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from tests.cluster import find_binary
from tests.generate.manifests import Object


KINDS = "x-kubernetes-group-version-kind"
_REFERENCE = "#/definitions/"


def find_faults(objects: Iterable[Object], openapi: Object, folder: Path) -> Object:
    """The faults that kubeconform finds in objects, with an API server's schemas."""
    schemas, file = folder / "schemas", folder / "objects.yaml"
    if not schemas.exists():
        schemas.mkdir()
        write_schemas(openapi, schemas)
    file.write_text(yaml.safe_dump_all(objects))
    command = [str(find_binary("kubeconform")), "-strict", "-summary", "-output", "json"]
    command += ["-schema-location", _find_in(schemas), str(file)]
    checked = subprocess.run(command, check=False, capture_output=True, text=True)
    summary: Object = json.loads(checked.stdout)
    return summary


def _find_in(folder: Path) -> str:
    return f"{folder}/{{{{.ResourceKind}}}}{{{{.KindSuffix}}}}.json"


def write_schemas(openapi: Object, folder: Path) -> None:
    """Write one file per kind."""
    definitions = {name: _strict(schema) for name, schema in openapi["definitions"].items()}
    references = {
        name: re.findall(rf'"\$ref": "{_REFERENCE}([^"]+)"', json.dumps(schema))
        for name, schema in definitions.items()
    }
    for name, schema in openapi["definitions"].items():
        for kind in schema.get(KINDS, []):
            group = kind["group"].split(".")[0]
            suffix = f"-{group}-{kind['version']}" if group else f"-{kind['version']}"
            document = {
                "$ref": _REFERENCE + name,
                "definitions": {key: definitions[key] for key in _reachable(name, references)},
            }
            path = folder / f"{kind['kind'].lower()}{suffix.lower()}.json"
            path.write_text(json.dumps(document))


def _strict(schema: Any) -> Any:
    """The schema without Kubernetes' extensions; it refuses unknown fields."""
    if isinstance(schema, list):
        return [_strict(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("format") == "int-or-string" or schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    made = {key: _strict(value) for key, value in schema.items()}
    if "properties" in made and not schema.get("x-kubernetes-preserve-unknown-fields"):
        made.setdefault("additionalProperties", False)
    return made


def _reachable(name: str, references: Mapping[str, list[str]]) -> set[str]:
    """The definition itself, and all definitions to which it refers, directly or indirectly."""
    reached: set[str] = set()
    waiting = [name]
    while waiting:
        definition = waiting.pop()
        if definition not in reached:
            reached.add(definition)
            waiting += references[definition]
    return reached
