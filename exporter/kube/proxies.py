"""Which proxy a request needs: the environment's variables by Go's rules (`httpproxy`)."""

import ipaddress
import re
from collections.abc import Mapping
from contextlib import suppress
from urllib.parse import SplitResult, urlsplit


PROXY_SCHEMES = ("http", "https")
_DEFAULT_PORTS = {"http": "80", "https": "443"}
_NETWORK = re.compile(r"[^/]+/\d{1,3}", re.ASCII)
_BRACKETED = re.compile(r"\[(?P<host>[^\]]*)\](:(?P<port>\d*))?", re.ASCII)
_Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def find_proxy(url: SplitResult, environment: Mapping[str, str]) -> str | None:
    """The proxy for this URL, if the environment names one and NO_PROXY does not exclude the URL.

    A value that is no URL is ignored, as Go does. Raises `ValueError` for a proxy that we cannot
    use; the message has no part of the value.
    """
    name = f"{url.scheme.upper()}_PROXY"
    value = environment.get(name) or environment.get(name.lower()) or ""
    proxy = _parse_proxy(value)
    excluded = environment.get("NO_PROXY") or environment.get("no_proxy") or ""
    if proxy is None or not _needs_proxy(url, excluded):
        return None
    try:
        return check_proxy(proxy)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def check_proxy(url: SplitResult | None) -> str:
    """The URL of a proxy that we can use. Raises `ValueError`, also for what is no URL."""
    if url is None:
        raise ValueError("expected a URL")
    if url.scheme.startswith("socks"):
        raise ValueError("SOCKS proxies are not supported: expected an http or https proxy")
    if url.scheme not in PROXY_SCHEMES or not url.hostname:
        raise ValueError("expected a URL with the scheme http or https and a host")
    return url.geturl()


def split_url(text: str) -> SplitResult | None:
    """The parts of a URL, or None if it is none."""
    if any(c <= " " or c == "\x7f" for c in text):
        return None
    try:
        parts = urlsplit(text)
        _ = parts.hostname, parts.port
    except ValueError:
        return None
    return parts


def _parse_proxy(value: str) -> SplitResult | None:
    """The proxy in a variable: a URL, or a host with or without a port."""
    if not value:
        return None
    parts = split_url(value)
    if parts is None or not parts.scheme or not parts.netloc:
        return split_url(f"http://{value}")
    return parts


def _needs_proxy(url: SplitResult, excluded: str) -> bool:
    """Whether no entry of NO_PROXY matches the URL; loopback never needs a proxy."""
    host = url.hostname or ""
    port = str(url.port or _DEFAULT_PORTS[url.scheme])
    address = _parse_address(host)
    if host == "localhost" or (address is not None and address.is_loopback):
        return False
    entries = [entry.strip().lower() for entry in excluded.split(",")]
    return not any(_matches(entry, host, port, address) for entry in entries if entry)


def _matches(entry: str, host: str, port: str, address: _Address | None) -> bool:
    """Whether an entry of NO_PROXY matches: *, a network, an address or a domain, with a port."""
    if entry == "*":
        return True
    if _NETWORK.fullmatch(entry):
        with suppress(ValueError):
            return address is not None and address in ipaddress.ip_network(entry, strict=False)
    name, wanted = _split_port(entry)
    if not name or (wanted and wanted != port):
        return False
    excluded = _parse_address(name)
    if excluded is not None or address is not None:
        return excluded == address
    name = name.removeprefix("*")
    return host.endswith(name) if name.startswith(".") else f".{host}".endswith(f".{name}")


def _split_port(entry: str) -> tuple[str, str]:
    """An entry's host, and its port or an empty text."""
    bracketed = _BRACKETED.fullmatch(entry)
    if bracketed is not None:
        return bracketed["host"], bracketed["port"] or ""
    if entry.count(":") == 1:
        host, _, port = entry.partition(":")
        return host, port
    return entry, ""


def _parse_address(text: str) -> _Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None
