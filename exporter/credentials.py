"""What a client shows to whom it asks: a token, and whom it trusts.

A fault is told by the option that helps, and never repeats a password.
"""

import ipaddress
import ssl
from pathlib import Path
from urllib.parse import urlsplit


_SHOWN = "a URL shows among the processes: give a token with --token-file"


class UnsafeAddress(ValueError):
    """Nobody can be asked there, or not with a token; the text says why."""


class UnusableFile(Exception):
    """A file holds no token, no authority or no pair; the text names its option."""


def check_address(url: str, expected: str, *, with_token: bool) -> None:
    """Raises `UnsafeAddress` where a URL is not as `expected`, or a token could be overheard."""
    fault = _find_fault(url, expected)
    if fault:  # a URL that cannot be taken apart may have a password anywhere before an @
        raise UnsafeAddress(_SHOWN if "@" in url else f"{url}: {fault}")
    parts = urlsplit(url)
    if with_token and parts.scheme == "http" and not _is_loopback(parts.hostname or ""):
        raise UnsafeAddress(
            f"{url}: a token is sent over https, a unix socket or to this machine only"
        )


def read_token(file: Path | None) -> dict[str, str]:
    """The header that says who asks; none without a file. Raises `UnusableFile`."""
    if file is None:
        return {}
    try:
        token = file.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UnusableFile(f"--token-file {file} cannot be read: {explain(error)}") from None
    if not token or not token.isprintable() or " " in token:
        raise UnusableFile(f"--token-file {file} holds no token")
    return {"Authorization": f"Bearer {token}"}


def read_trust(
    ca_file: Path | None, cert_file: Path | None = None, key_file: Path | None = None
) -> ssl.SSLContext | bool:
    """Whom to trust, and a certificate to show; True is as the system does.

    Raises `UnusableFile`.
    """
    if ca_file is None and cert_file is None:
        return True
    option = f"--ca-file {ca_file}"
    try:
        trust = ssl.create_default_context(cafile=ca_file)
        if cert_file is not None:
            option = f"--cert-file {cert_file}, --key-file {key_file}"
            trust.load_cert_chain(cert_file, key_file, password=_ask_nobody)
    except (ssl.SSLError, ValueError):
        raise UnusableFile(f"{option}: not in PEM, not a pair, or locked by a password") from None
    except OSError as error:
        raise UnusableFile(f"{option}: cannot be read: {explain(error)}") from None
    return trust


def explain(error: BaseException) -> str:
    """An error in the system's words, without its number; its name where it has none."""
    said = error.strerror if isinstance(error, OSError) else None
    return said or str(error) or type(error).__name__


def _find_fault(url: str, expected: str) -> str:
    """What is wrong with a URL; "" where nothing is."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname or "", parts.port
        host.encode("idna")
    except ValueError as error:
        return f"{error}; {expected}"
    is_plain = not (parts.username or parts.password or parts.query or parts.fragment)
    return "" if parts.scheme in {"http", "https"} and host and is_plain else expected


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _ask_nobody() -> str:
    """The password of a locked key: none, where OpenSSL would ask the terminal."""
    return ""
