"""Reads a YAML document section by section and collects every fault, with its path."""

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar, get_args, get_origin, get_type_hints

import yaml

from exporter.engine.facts.model import Seconds
from exporter.settings.values import (
    Address,
    parse_addresses,
    parse_boolean,
    parse_count,
    parse_duration,
    parse_member,
    parse_path,
)


T = TypeVar("T")

_NOT_YAML = (yaml.YAMLError, ValueError, LookupError, AttributeError, RecursionError)
"""The errors of PyYAML, and Python's own errors for invalid dates and numbers."""
_STRING = "tag:yaml.org,2002:str"
_PARSERS: dict[Any, Callable[[object], Any]] = {
    bool: parse_boolean,
    int: parse_count,
    Seconds: parse_duration,
    Seconds | None: parse_duration,
    Path | None: parse_path,
    tuple[Address, ...]: parse_addresses,
}
"""The parser for each type of field; `Annotated` names another parser for one field."""
_KEYS = {"client_ca_file": "clientCAFile", "wait_for_kubevirt": "waitForKubeVirt"}
"""The keys that are not simply their field's name in camel case."""


class InvalidSettings(Exception):
    """An invalid configuration or command line, with one line per fault."""

    def __init__(self, faults: list[str]) -> None:
        super().__init__("\n".join(faults))
        self.faults = faults


def read_yaml(path: Path) -> object:
    """The document in a file; an empty file is an empty mapping. Raises `InvalidSettings`."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidSettings([f"{path}: cannot be read: {error}"]) from error
    try:
        document = yaml.load(text, Loader=_UniqueKeys)  # noqa: S506 (a SafeLoader)
    except _NOT_YAML as error:
        raise InvalidSettings([f"{path}: not YAML: {error}"]) from error
    return {} if document is None else document


class _UniqueKeys(yaml.SafeLoader):
    """YAML in which duplicate keys are an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:  # noqa: FBT001, FBT002
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag != _STRING:
                continue
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"duplicate key {key.value!r}", key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)


class Section:
    """One mapping of the document; it collects faults, and notes which keys were read."""

    def __init__(self, path: str, value: object, faults: list[str]) -> None:
        self._path = path
        self._faults = faults
        self._values: Mapping[Any, Any] = value if isinstance(value, Mapping) else {}
        self._left = set(self._values)
        self._known: dict[str, str] = {}
        self._wrong: set[str] = set()
        self.is_broken = value is not None and not isinstance(value, Mapping)
        """True if the value is not a mapping; this fault has been reported already."""
        if self.is_broken:
            self.report("", f"expected a mapping, got {value!r}")

    def section(self, key: str) -> Self:
        """The mapping below a key; an absent mapping is empty."""
        self._expect(key)
        return type(self)(self._at(key), self._values.get(key), self._faults)

    def sections(self, key: str) -> list[Self]:
        """The mappings in the list at a key; an absent list is empty."""
        self._expect(key)
        entries = self._values.get(key)
        if entries is None:
            return []
        if not isinstance(entries, list):
            self.report(key, f"expected a list, got {entries!r}")
            return []
        return [
            type(self)(f"{self._at(key)}[{number}]", one, self._faults)
            for number, one in enumerate(entries)
        ]

    def has(self, key: str) -> bool:
        """Whether this key is set."""
        return self._values.get(key) is not None

    def is_wrong(self, key: str) -> bool:
        """Whether the value of this key was invalid."""
        return key in self._wrong

    def take(self, key: str, parse: Callable[[object], T], default: T) -> T:
        """Parse a value; the default if it is absent, null or invalid."""
        self._expect(key)
        if not self.has(key):
            return default
        try:
            return parse(self._values[key])
        except ValueError as error:
            self.report(key, str(error))
            self._wrong.add(key)
            return default

    def read(self, default: T, *, skip: tuple[str, ...] = ()) -> T:
        """A copy of `default` with the values of this mapping; fields in `skip` are not read."""
        hints = get_type_hints(type(default), include_extras=True)
        values = {name: getattr(default, name) for name in hints}
        for name, hint in hints.items():
            if name not in skip:
                first, *others = name.split("_")
                key = _KEYS.get(name, first + "".join(map(str.capitalize, others)))
                values[name] = self.take(key, _find_parser(hint), values[name])
        return type(default)(**values)

    def renamed(self, key: str, new: str) -> None:
        """Report the old name of a key, if it is used."""
        if key in self._left:
            self._left.discard(key)
            self.report(key, f"it is called {new} now")

    def report(self, key: str, fault: str) -> None:
        """Add a fault of the value at a key."""
        self._faults.append(f"{self._at(key) or 'the configuration'}: {fault}")

    def close(self) -> None:
        """Report unknown keys, each with the nearest known one."""
        for key in sorted(map(str, self._left)):
            near = get_close_matches(key.lower(), self._known, n=1)
            hint = f": did you mean {self._known[near[0]]}?" if near else ""
            self.report(key, f"unknown key{hint}")

    def _expect(self, key: str) -> None:
        self._left.discard(key)
        self._known[key.lower()] = key

    def _at(self, key: str) -> str:
        return ".".join(part for part in (self._path, key) if part)


def _find_parser(hint: Any) -> Callable[[object], Any]:
    if get_origin(hint) is Annotated:
        parse: Callable[[object], Any] = get_args(hint)[1]
        return parse
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return partial(parse_member, hint)
    return _PARSERS[hint]
