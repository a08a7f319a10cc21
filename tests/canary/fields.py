"""Compares the fields that the exporter decodes with an OpenAPI schema."""

import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from exporter.kube.objects import wire


Schema = Mapping[str, Any]

_TYPES: Mapping[Any, str] = {
    str: "string",
    bytes: "string",
    bool: "boolean",
    int: "integer",
    # Timestamps, and strings that are not decoded.
    Any: "string",
    msgspec.Raw: "string",
}
_DECODED_LATER: Mapping[tuple[type, str], Any] = {
    (wire.VmiSpec, "nodeSelector"): dict[str, str],
    (wire.VmiSpec, "affinity"): wire.Affinity,
    (wire.VmiSpec, "tolerations"): list[wire.Toleration],
    (wire.VmiSpec, "utilityVolumes"): list[wire.Named],
    (wire.PodSpec, "nodeSelector"): dict[str, str],
    (wire.VmimSpec, "addedNodeSelector"): dict[str, str],
    (wire.PodStatus, "initContainerStatuses"): list[wire.Container],
    (wire.PodStatus, "containerStatuses"): list[wire.Container],
}


def read_paths(decoded: Any) -> dict[str, str]:
    """The field paths of a struct of `kube.objects.wire`, each with its type in OpenAPI."""
    return dict(_walk(decoded, ""))


def find_faults(
    paths: Mapping[str, str], schema: Schema, schemas: Mapping[str, Schema]
) -> list[str]:
    """Every path that `schema` lacks or has with another type; a `$ref` refers to `schemas`."""
    faults = []
    for path, expected in paths.items():
        kind = _find_type(schema, path, schemas)
        if kind is None:
            faults.append(f"{path} is gone")
        elif kind != expected:
            faults.append(f"{path} is of type {kind}, expected {expected}")
    return faults


def _walk(expected: Any, path: str) -> Iterator[tuple[str, str]]:
    expected = _without_none(expected)
    if typing.get_origin(expected) is list:
        yield path, "array"
        yield from _walk(typing.get_args(expected)[0], f"{path}[]")
    elif typing.get_origin(expected) is dict:
        yield path, "object"
    elif isinstance(expected, type) and issubclass(expected, msgspec.Struct):
        if path:
            yield path, "object"
        for field in msgspec.structs.fields(expected):
            later = _DECODED_LATER.get((expected, field.name), field.type)
            yield from _walk(later, f"{path}.{field.encode_name}".removeprefix("."))
    else:
        yield path, _TYPES[expected]


def _without_none(expected: Any) -> Any:
    if isinstance(expected, types.UnionType):
        (expected,) = (arg for arg in typing.get_args(expected) if arg is not types.NoneType)
    return expected


def _find_type(schema: Schema, path: str, schemas: Mapping[str, Schema]) -> str | None:
    for part in path.replace("[]", ".[]").split("."):
        inner = schema.get("items") if part == "[]" else schema.get("properties", {}).get(part)
        if inner is None:
            return None
        schema = _resolve(inner, schemas)
    # A quantity may be an integer, too, and is read as either.
    is_quantity = schema.get("x-kubernetes-int-or-string")
    return "string" if is_quantity else str(schema.get("type"))


def _resolve(schema: Schema, schemas: Mapping[str, Schema]) -> Schema:
    for part in schema.get("allOf", ()):
        schema = {**schema, **_resolve(part, schemas)}
    if "$ref" in schema:
        return _resolve(schemas[schema["$ref"].rpartition("/")[2]], schemas)
    return schema
