"""Reads a YAML document section by section and collects every fault, with its path."""

import re
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar, get_args, get_origin, get_type_hints

import yaml

from exporter.engine.facts.model import Seconds
from exporter.engine.facts.policy import write_camel_case
from exporter.errors import CommandFailed, Exit
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
_TAG = "tag:yaml.org,2002:"
_STRING = f"{_TAG}str"
_MOST_ALIASES = 10
"""A document with a few more nested aliases can stand for more values than fit into memory."""
_INTEGER = "0|[1-9][0-9]*"
_PLAIN_SCALARS = (
    ("null", "~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", "true|True|TRUE|false|False|FALSE", [*"tTfF"]),
    ("int", rf"[-+]?({_INTEGER})|0o[0-7]+|0x[0-9a-fA-F]+", [*"-+0123456789"]),
    (
        "float",
        rf"[-+]?(({_INTEGER})(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?|[-+]?\.(?i:inf)|\.(?i:nan)",
        [*"-+.0123456789"],
    ),
    ("merge", "<<", ["<"]),
)
"""What a scalar without quotes can be besides text: its tag, pattern and first characters.

This is the core schema of YAML 1.2 with the merge key, except that a number with a leading 0 is
text: YAML 1.1 reads 0777 as 511, and YAML 1.2 as 777.
"""
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


class InvalidSettings(CommandFailed):
    """An invalid configuration or command line, with one line per fault."""

    exit_code = Exit.USAGE

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
        document = yaml.load(text, Loader=_Loader)  # noqa: S506 (a SafeLoader)
    except InvalidSettings as invalid:
        raise InvalidSettings([f"{path}: {fault}" for fault in invalid.faults]) from None
    except _NOT_YAML as error:
        raise InvalidSettings([f"{path}: not YAML: {error}"]) from error
    return {} if document is None else document


class _Loader(yaml.SafeLoader):
    """YAML with the plain scalars above; duplicate keys and many aliases are errors."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._aliases = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            self._aliases += 1
            if self._aliases > _MOST_ALIASES:
                line = self.line + 1
                fault = f"line {line}: more than {_MOST_ALIASES} aliases (*name): write the values"
                raise InvalidSettings([f"{fault} instead"])
        return super().compose_node(parent, index)

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


_Loader.yaml_implicit_resolvers = {}
for _kind, _pattern, _first in _PLAIN_SCALARS:
    _Loader.add_implicit_resolver(f"{_TAG}{_kind}", re.compile(rf"(?:{_pattern})\Z"), _first)


class Section:
    """One mapping of the document; it collects faults, and notes which keys were read."""

    def __init__(
        self,
        path: str,
        value: object,
        faults: list[str],
        places: dict[str, set[str]] | None = None,
    ) -> None:
        self._path = path
        self._faults = faults
        self._places: dict[str, set[str]] = {} if places is None else places
        """Where each key that was read is in the document, such as policy.guards."""
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
        return type(self)(self._at(key), self._values.get(key), self._faults, self._places)

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
            type(self)(f"{self._at(key)}[{number}]", entry, self._faults, self._places)
            for number, entry in enumerate(entries)
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
                values[name] = self.take(write_key(name), _find_parser(hint), values[name])
        return type(default)(**values)

    def report(self, key: str, fault: str) -> None:
        """Add a fault of the value at a key."""
        self._faults.append(f"{self._at(key) or 'the configuration'}: {fault}")

    def close(self) -> None:
        """Report unknown keys, each with the nearest known one."""
        for key in sorted(map(str, self._left)):
            near = self._find_near(key)
            self.report(key, f"unknown key: did you mean {near}?" if near else "unknown key")

    def _find_near(self, key: str) -> str | None:
        """The key of this name in a section, if this key lacks its section; else the only known
        key that has every word of this key, else the one spelt most like it.
        """
        places = self._places.get(key, set())
        if not self._path and len(places) == 1:
            return next(iter(places))
        words = _split_words(key)
        longer = [known for known in self._known.values() if words and words <= _split_words(known)]
        if len(longer) == 1:
            return longer[0]
        near = get_close_matches(key.lower(), self._known, n=1)
        return self._known[near[0]] if near else None

    def _expect(self, key: str) -> None:
        self._left.discard(key)
        self._known[key.lower()] = key
        if "[" not in self._path:  # An entry of a list has the keys of a section.
            self._places.setdefault(key, set()).add(self._at(key))

    def _at(self, key: str) -> str:
        return ".".join(part for part in (self._path, key) if part)


def write_key(name: str) -> str:
    """The key of a field of the settings."""
    return _KEYS.get(name) or write_camel_case(name)


def _split_words(key: str) -> set[str]:
    """The words of a key in camel case or snake case, in lower case."""
    return {word.lower() for word in re.findall("[A-Za-z][a-z]*", key)}


def _find_parser(hint: Any) -> Callable[[object], Any]:
    if get_origin(hint) is Annotated:
        parse: Callable[[object], Any] = get_args(hint)[1]
        return parse
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return partial(parse_member, hint)
    return _PARSERS[hint]
