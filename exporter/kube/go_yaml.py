"""YAML as kubectl reads it: bytes in, the values of JSON out.

kubectl turns the first document into JSON with go-yaml v2 (YAML 1.1 without its base-60 numbers and
dates), so `on` is true, and `12:30` and `2026-01-31` are text.
"""

import itertools
import json
import re
from contextlib import suppress
from typing import Any

import yaml


_NOT_YAML = (yaml.YAMLError, ValueError, LookupError, AttributeError, RecursionError, TypeError)
"""The errors of PyYAML, and Python's own errors for wrong tags and characters."""
_TAG = "tag:yaml.org,2002:"
_MOST_VALUES = 1_000_000
"""Nested aliases can stand for more values than fit into memory."""
_PLAIN_SCALARS = (
    ("null", "~|null|Null|NULL|", ["~", "n", "N", ""]),
    (
        "bool",
        "[yYnN]|yes|Yes|YES|no|No|NO|true|True|TRUE|false|False|FALSE|on|On|ON|off|Off|OFF",
        [*"yYnNtTfFoO"],
    ),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9_]*)?)([eE][-+]?[0-9]+)?|0[xX][0-9a-fA-F_]+|0[bo][0-7_]+",
        [*"-+.0123456789"],
    ),
    ("merge", "<<", ["<"]),
)
"""What a scalar without quotes can be besides text: its tag, pattern and first characters."""


class _Loader(yaml.SafeLoader):
    """A loader with the plain scalars above."""


def _read_number(_: yaml.SafeLoader, node: yaml.ScalarNode) -> float:
    """An integer if the text is one, in any of Go's bases; else a float."""
    text = node.value.replace("_", "")
    if re.fullmatch(r"[-+]?0[0-7]+", text):
        return int(text, 8)
    try:
        return int(text, 0)
    except ValueError:
        return float(text)


_Loader.yaml_implicit_resolvers = {}
for _kind, _pattern, _first in _PLAIN_SCALARS:
    _Loader.add_implicit_resolver(f"{_TAG}{_kind}", re.compile(rf"(?:{_pattern})\Z"), _first)
_Loader.yaml_constructors = {
    **yaml.SafeLoader.yaml_constructors,
    f"{_TAG}bool": lambda _, node: node.value[0] in "yYtT" or node.value in ("on", "On", "ON"),
    f"{_TAG}float": _read_number,
}


def read_go_yaml(content: bytes) -> Any:
    """The first document, without the keys whose value is null.

    Raises `ValueError`, which says where the fault is, and has none of the content.
    """
    counted = itertools.count(1)

    def read(value: Any) -> Any:
        """The value with text as keys, and without nulls in mappings."""
        if next(counted) > _MOST_VALUES:
            raise ValueError(f"more than {_MOST_VALUES:,} values: expected fewer aliases (*name)")
        if isinstance(value, dict):
            return {
                key if isinstance(key, str) else str(key).lower(): read(entry)
                for key, entry in value.items()
                if entry is not None
            }
        return [read(entry) for entry in value] if isinstance(value, list) else value

    return read(_read_document(content))


def _read_document(content: bytes) -> object:
    if content.lstrip().startswith(b"{"):
        with suppress(ValueError, RecursionError):
            return json.loads(content)  # PyYAML rejects its tabs
    try:
        loader = _Loader(content)
        return loader.get_data() if loader.check_data() else None  # type: ignore[no-untyped-call]
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = "" if mark is None else f"line {mark.line + 1}, column {mark.column + 1}: "
        raise ValueError(f"{place}expected YAML or JSON") from None
    except _NOT_YAML:
        raise ValueError("expected YAML or JSON") from None
