"""Parses single values of the configuration. A ValueError says what a parser expected.

Durations have Go's format (`1h30m`).
"""

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TypeVar

from exporter.credentials import is_loopback
from exporter.engine.facts.model import Seconds


T = TypeVar("T")
E = TypeVar("E", bound=StrEnum)

_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1, "m": 60, "h": 3600}
_DURATION = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|μs|ms|s|m|h)", re.ASCII)
_NUMBER = re.compile(r"\d+(\.\d+)?", re.ASCII)
_DAYS = re.compile(r"(\d{1,6})d", re.ASCII)
_GO_LONGEST: Seconds = (2**63 - 1) / 1e9
_NAMESPACE = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", re.ASCII)
_LABEL = "[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_DOMAIN = re.compile(rf"{_LABEL}(\.{_LABEL})*", re.ASCII)
_PREFIX = re.compile(r"[A-Za-z]{0,63}", re.ASCII)
_LINK = re.compile(r"https?://[^\s/?#]+\S*", re.ASCII)
_PLACE = re.compile(r"\{([^{}]*)\}")

_OPENSSL_NAMES = {
    "TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256": "ECDHE-ECDSA-AES128-GCM-SHA256",
    "TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256": "ECDHE-RSA-AES128-GCM-SHA256",
    "TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384": "ECDHE-ECDSA-AES256-GCM-SHA384",
    "TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384": "ECDHE-RSA-AES256-GCM-SHA384",
    "TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256": "ECDHE-ECDSA-CHACHA20-POLY1305",
    "TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256": "ECDHE-RSA-CHACHA20-POLY1305",
}
"""The cipher suites of TLS 1.2 with forward secrecy and authenticated encryption: Go's name
(KubeVirt's `tlsConfiguration.ciphers`), and OpenSSL's name (OpenShift's TLS profile)."""
TLS_1_2_SUITES = tuple(_OPENSSL_NAMES.values())
"""All supported suites of TLS 1.2: those of OpenShift's profile Intermediate, without its suites
DHE-*, which Go programs do not have either."""
_OF_TLS_1_3 = ("TLS_AES_128_GCM_SHA256", "TLS_AES_256_GCM_SHA384", "TLS_CHACHA20_POLY1305_SHA256")
"""The cipher suites of TLS 1.3, which are always on, as in Go."""


@dataclass(frozen=True)
class Address:
    """An address to listen on: a TCP host and port, or a unix socket's path."""

    host: str = ""
    port: int = 0
    path: str = ""

    def __str__(self) -> str:
        if self.path:
            return f"unix:{self.path}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_local(self) -> bool:
        """Whether only processes on the same machine (or in the same pod) can reach the address."""
        return bool(self.path) or is_loopback(self.host)


def parse_duration(value: object) -> Seconds:
    """A Go duration in seconds."""
    if type(value) is int and value == 0:
        return 0.0
    hint = ""  # what is probably wrong: a missing unit, or days
    if isinstance(value, int | float | str) and _NUMBER.fullmatch(str(value)):
        hint = f": it needs a unit, as in {value}m"
    elif isinstance(value, str) and (days := _DAYS.match(value)):
        hint = f": days are not supported, write {int(days[1]) * 24}h"
    expected = f"expected a duration such as 15m or 1h30m, got {value!r}{hint}"
    if not isinstance(value, str):
        raise ValueError(expected)
    text = value[1:] if value.startswith(("+", "-")) else value
    if text == "0":
        return 0.0
    parts = _DURATION.findall(text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        raise ValueError(expected)
    seconds = round(sum(float(number) * _UNITS[unit] for number, unit in parts), 9)
    if value.startswith("-") and seconds:
        raise ValueError(f"must not be negative, got {value!r}")
    if seconds > _GO_LONGEST:
        raise ValueError(f"longer than any Go duration (292 years), got {value!r}")
    return seconds


def parse_address(value: object) -> Address:
    """`host:port`, `[v6]:port` or `unix:/path`. Raises ValueError."""
    expected = "expected host:port or unix:/path"
    if not isinstance(value, str) or not value.isprintable():
        raise ValueError(f"{expected}, got {value!r}")
    if value.startswith("unix:"):
        path = value.removeprefix("unix:")
        if not path.startswith("/"):
            raise ValueError(f"{expected} with an absolute path, got {value!r}")
        return Address(path=path)
    host, colon, port = value.rpartition(":")
    if not colon or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"{expected}, got {value!r}")
    if host.startswith("[") and host.endswith("]"):
        return Address(host[1:-1], int(port))
    if ":" in host:
        raise ValueError(f"an IPv6 address needs brackets, as in [::1]:9810, got {value!r}")
    return Address(host or "0.0.0.0", int(port))


def parse_addresses(value: object) -> tuple[Address, ...]:
    if not isinstance(value, list):
        return (parse_address(value),)
    if not value:
        raise ValueError("expected at least one address")
    return _each(value, parse_address)


def parse_socket(value: object) -> Address:
    address = parse_address(value)
    if not address.path:
        raise ValueError(f"expected unix:/path, got {value!r}")
    return address


def parse_history(value: object) -> Path | None:
    if value == "none":
        return None
    if isinstance(value, str) and "\0" not in value:
        kind, _, place = value.partition(":")
        if kind == "file" and place.startswith("/") and not place.endswith("/"):
            return Path(place)
        if kind == "configmap":
            raise ValueError(
                "configmap: is not supported any more, because KubeVirt itself keeps the last"
                " migrations of each VM; write none, or file:/path on a volume that outlives the"
                " container"
            )
    raise ValueError(f"expected none or file:/path, got {value!r}")


def parse_namespaces(value: object) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise ValueError(f"expected a list of namespaces, got {value!r}")
    return tuple(dict.fromkeys(_each(value, parse_namespace)))


def parse_namespace(value: object) -> str:
    if not isinstance(value, str) or not _NAMESPACE.fullmatch(value):
        raise ValueError(f"expected the name of a namespace, got {value!r}")
    return value


def _each(values: list[object], parse: Callable[[object], T]) -> tuple[T, ...]:
    """Parse every value; one ValueError names all invalid values."""
    parsed, wrong = [], []
    for value in values:
        try:
            parsed.append(parse(value))
        except ValueError as error:
            wrong.append(str(error))
    if wrong:
        raise ValueError("; ".join(wrong))
    return tuple(parsed)


def parse_runbook_link(value: object) -> str:
    """A template of the URL of any runbook."""
    return _parse_link(value, ("alert",))


def parse_vm_link(value: object) -> str:
    """A template of a URL about one VM."""
    return _parse_link(value, ("namespace", "name", "node"))


def _parse_link(value: object, names: tuple[str, ...]) -> str:
    places = ", ".join(f"{{{name}}}" for name in names)
    if not isinstance(value, str) or not _LINK.fullmatch(value):
        raise ValueError(f"expected an http or https URL, which may have {places}, got {value!r}")
    names_used = _PLACE.findall(value)
    if wrong := [name for name in names_used if name not in names]:
        raise ValueError(f"expected only {places} in braces, got {{{wrong[0]}}}")
    if "{" in (rest := _PLACE.sub("", value)) or "}" in rest:
        raise ValueError(f"has a single brace: write %7B for {{ and %7D for }}, got {value!r}")
    return value


def parse_positive_duration(value: object) -> Seconds:
    seconds = parse_duration(value)
    if not seconds:
        raise ValueError(f"must be longer than 0, got {value!r}")
    return seconds


def parse_timeout(value: object) -> Seconds:
    """A duration in which a request to another machine can be answered."""
    seconds = parse_positive_duration(value)
    if seconds < 0.1:
        raise ValueError(f"must be at least 100ms, got {value!r}")
    return seconds


def parse_boolean(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"expected true or false, got {value!r}")
    return value


def parse_count(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"expected a whole number of at least 1, got {value!r}")
    return value


def parse_names(value: object) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise ValueError(f"expected a list of names, got {value!r}")
    return tuple(dict.fromkeys(_each(value, parse_name)))


def parse_labels(value: object) -> tuple[tuple[str, str], ...]:
    if not isinstance(value, dict):
        raise ValueError(f"expected labels such as {{tier: gold}}, got {value!r}")
    if wrong := [text for pair in value.items() for text in pair if not isinstance(text, str)]:
        raise ValueError(f"expected strings, got {wrong[0]!r}: put it in quotes")
    return tuple(value.items())


def parse_name(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"expected a name, got {value!r}")
    return value


def parse_domain(value: object) -> str:
    """A domain such as that of an API group."""
    if not isinstance(value, str) or len(value) > 253 or not _DOMAIN.fullmatch(value):
        raise ValueError(f"expected a domain such as kubevirt.io, got {value!r}")
    return value


def parse_responder(value: object) -> str:
    """The name of a responder; Kubernetes keeps those under k8s.io for itself."""
    domain, slash, name = value.partition("/") if isinstance(value, str) else ("", "", "")
    is_valid = slash and _DOMAIN.fullmatch(domain) and re.fullmatch("[A-Za-z0-9._-]{1,63}", name)
    if not is_valid or f".{domain}".endswith((".k8s.io", ".kubernetes.io")):
        raise ValueError(
            f"expected a name with a domain of its own, such as example.com/hold, got {value!r}"
        )
    return str(value)


def parse_prefix(value: object) -> str:
    """The beginning of the names of kinds."""
    if not isinstance(value, str) or not _PREFIX.fullmatch(value):
        raise ValueError(f"expected letters such as InternalVirtualization, got {value!r}")
    return value


def parse_path(value: object) -> Path:
    if not isinstance(value, str) or not value or "\0" in value:
        raise ValueError(f"expected the path of a file, got {value!r}")
    return Path(value)


def parse_cipher_suites(value: object) -> tuple[str, ...]:
    """The suites of TLS 1.2 by OpenSSL's names; those of TLS 1.3 are always on, and left out."""
    parsed = tuple(_OPENSSL_NAMES.get(name, name) for name in parse_names(value))
    known = {*TLS_1_2_SUITES, *_OF_TLS_1_3}
    if unknown := [name for name in parsed if name not in known]:
        expected = ", ".join((*_OPENSSL_NAMES, *_OF_TLS_1_3))
        raise ValueError(f"{unknown[0]} is not one of the supported suites: {expected}")
    return tuple(name for name in parsed if name not in _OF_TLS_1_3)


def parse_file_mode(value: object) -> int:
    expected = f'expected a file mode such as "0660", in quotes, got {value!r}'
    if not isinstance(value, str) or not re.fullmatch("0?[0-7]{3}", value, re.ASCII):
        raise ValueError(expected)
    return int(value, 8)


def parse_one_of(*choices: str) -> Callable[[object], str]:
    return partial(parse_choice, choices)


def parse_choice(choices: Collection[str], value: object) -> str:
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"expected one of {', '.join(choices)}, got {value!r}")
    return value


def parse_member(enum: type[E], value: object) -> E:
    return enum(parse_choice([*enum], value))
