"""What our HTTP clients share: URL checks, tokens, TLS contexts and errors.

Error messages name the option that helps, and never contain a password.
"""

import ipaddress
import ssl
from pathlib import Path
from urllib.parse import urlsplit

from exporter.errors import CommandFailed, Exit


_URL_IS_VISIBLE = "a URL is visible in the process list: give a token with --token-file"


class CannotAsk(CommandFailed):
    """A server cannot be asked, or gave no usable answer; the message says why and what helps."""

    exit_code = Exit.CANNOT_ASK


class InvalidEndpoint(CannotAsk):
    """The URL or the options of a connection are invalid, or not safe for a token."""

    exit_code = Exit.USAGE


def check_url(url: str, expected: str, *, with_token: bool) -> None:
    """Raises `InvalidEndpoint` if a URL is invalid, or would expose a token.

    `expected` describes a valid URL in the message.
    """
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname or "", parts.port
        host.encode("idna")
    except ValueError as error:
        raise _invalid(url, f"{error}; {expected}") from None
    is_plain = not (parts.username or parts.password or parts.query or parts.fragment)
    if parts.scheme not in {"http", "https"} or not host or not is_plain:
        raise _invalid(url, expected)
    if with_token and parts.scheme == "http" and not is_loopback(host):
        raise InvalidEndpoint(f"{url}: a token is only sent over https, a unix socket or loopback")


def read_token(file: Path | None) -> dict[str, str]:
    """The Authorization header, if there is a token file. Raises `CannotAsk`."""
    if file is None:
        return {}
    try:
        text = file.read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError) as error:
        raise CannotAsk(f"--token-file {file} cannot be read: {describe(error)}") from None
    try:
        return {"Authorization": f"Bearer {trim_token(text)}"}
    except ValueError:
        raise CannotAsk(f"--token-file {file} contains no token") from None


def trim_token(text: str) -> str:
    """The token in a text. Raises `ValueError` if there is none, or no header may contain it."""
    token = text.strip()
    if not token:
        raise ValueError("the token is empty")
    if not token.isascii() or not token.isprintable() or " " in token:
        raise ValueError("the token has a space, a control character or a character beyond ASCII")
    return token


def make_ssl_context(
    ca_file: Path | None, cert_file: Path | None = None, key_file: Path | None = None
) -> ssl.SSLContext | bool:
    """An SSL context with this CA and client certificate; True means the system's default.

    Raises `CannotAsk`.
    """
    if ca_file is None and cert_file is None:
        return True
    option = f"--ca-file {ca_file}"
    try:
        context = ssl.create_default_context(cafile=ca_file)
        if cert_file is not None:
            option = f"--cert-file {cert_file}, --key-file {key_file}"
            context.load_cert_chain(cert_file, key_file, password=no_password)
    except (ssl.SSLError, ValueError):
        raise CannotAsk(f"{option}: not PEM, not a matching pair, or encrypted") from None
    except OSError as error:
        raise CannotAsk(f"{option}: cannot be read: {describe(error)}") from None
    return context


def describe(error: BaseException) -> str:
    """The message of an error without its number, or its type if it has no message."""
    message = error.strerror if isinstance(error, OSError) else None
    return message or str(error) or type(error).__name__


def _invalid(url: str, fault: str) -> InvalidEndpoint:
    """The error for an invalid URL. It omits a URL with an @, because it may contain a password."""
    return InvalidEndpoint(_URL_IS_VISIBLE if "@" in url else f"{url}: {fault}")


def is_loopback(host: str) -> bool:
    """Whether a host name or IP address is that of the loopback interface."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def no_password() -> str:
    """Give no password for an encrypted key, so that OpenSSL does not prompt on the terminal."""
    return ""
