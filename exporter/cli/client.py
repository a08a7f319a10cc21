"""Asks a running exporter, over http, https or a unix socket, and reads what it answers.

What goes wrong is told to the person who asked: what happened, and which option helps.
"""

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, TypeVar
from urllib.parse import quote

import aiohttp
import msgspec

from exporter.credentials import (
    UnsafeAddress,
    UnusableFile,
    check_address,
    explain,
    read_token,
    read_trust,
)
from exporter.engine.model import Seconds
from exporter.server.schemas import Problem


T = TypeVar("T")

DEFAULT_URL = "http://127.0.0.1:9810"
"""The query listener, where `listen.query` is its default."""
PATIENCE: Seconds = 15.0

_EXPECTED = "expected http://HOST:PORT, https://HOST:PORT or unix:/PATH"


class InvalidPlace(ValueError):
    """No exporter can be asked with these options; the text says which is wrong."""


class CannotAsk(Exception):
    """The exporter did not answer, or not what was asked; the text says why and what helps."""


class NoSuchVmi(Exception):
    """The exporter answered: it knows no such VMI."""


@dataclass(frozen=True)
class Place:
    """Where an exporter is, and how to be let in. Raises InvalidPlace.

    `cert_file` and `key_file` are a client certificate, in one file or in two.
    """

    url: str = DEFAULT_URL
    token_file: Path | None = None
    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None

    def __post_init__(self) -> None:
        if self.key_file is not None and self.cert_file is None:
            raise InvalidPlace("--key-file: expected --cert-file with it")
        if self.socket:
            return
        try:
            check_address(self.url, _EXPECTED, with_token=self.token_file is not None)
        except UnsafeAddress as unsafe:
            raise InvalidPlace(str(unsafe)) from None

    @property
    def socket(self) -> str:
        """The path of a unix socket; "" where it is none."""
        scheme, _, path = self.url.partition(":")
        return f"/{path.lstrip('/')}" if scheme == "unix" and path.startswith("/") else ""

    @property
    def base(self) -> str:
        """What every path is put behind."""
        return "http://localhost" if self.socket else self.url.rstrip("/")


class Exporter:
    """A running exporter that can be asked."""

    def __init__(self, place: Place, session: aiohttp.ClientSession, patience: Seconds) -> None:
        self._place = place
        self._session = session
        self._patience = patience

    async def read_vmi(self, namespace: str, name: str) -> bytes:
        """GET /v1/vmis/{namespace}/{name}. Raises NoSuchVmi."""
        try:
            return await self.read(f"/v1/vmis/{quote(namespace, safe='')}/{quote(name, safe='')}")
        except NoSuchVmi as missing:
            if not name.startswith("virt-launcher-"):
                raise
            hint = "that is a pod's name; its VMI's is its annotation kubevirt.io/domain"
            raise NoSuchVmi(f"{missing}: {hint}") from None

    async def read(self, path: str) -> bytes:
        """The JSON of a GET. Raises CannotAsk or NoSuchVmi."""
        place = self._place
        try:
            async with self._session.get(
                place.base + path,
                # Each time, because tokens are renewed.
                headers=read_token(place.token_file),
                allow_redirects=False,
            ) as response:
                body = await response.read()
                if response.status != 200:
                    _refuse(place, response.status, body)
                if response.content_type != "application/json":
                    raise CannotAsk(
                        f"{place.url} is no exporter: it answered {response.content_type}"
                    )
                return body
        except UnusableFile as unusable:
            raise CannotAsk(str(unusable)) from None
        except TimeoutError:
            raise CannotAsk(
                f"{place.url} did not answer within {self._patience:g} s: is it the exporter's"
                " address, and does nothing hold the connection up on the way?"
            ) from None
        except (aiohttp.ClientError, OSError) as error:
            raise CannotAsk(_explain_connection(place, error)) from None


@asynccontextmanager
async def connect(place: Place, *, patience: Seconds = PATIENCE) -> AsyncIterator[Exporter]:
    """An exporter to ask for the length of the block. Raises CannotAsk.

    `patience`: how long an answer may take, the connection included.
    """
    try:
        trust = read_trust(place.ca_file, place.cert_file, place.key_file)
    except UnusableFile as unusable:
        raise CannotAsk(str(unusable)) from None
    connector = (
        aiohttp.UnixConnector(place.socket) if place.socket else aiohttp.TCPConnector(ssl=trust)
    )
    timeout = aiohttp.ClientTimeout(total=patience)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        yield Exporter(place, session, patience)


def understand(body: bytes, kind: type[T]) -> T:
    """An answer as its type of `wire`. Raises CannotAsk."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CannotAsk(
            f"the answer is not understood ({error}): is the exporter of another version?"
            " --json shows it as it is"
        ) from None


def _refuse(place: Place, status: int, body: bytes) -> NoReturn:
    """Say what an answer that is none means, and what to do about it."""
    try:
        problem = msgspec.json.decode(body, type=Problem)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise CannotAsk(f"{place.url} is no exporter: it answered {status}") from None
    if status == 404 and problem.title == "No such VMI":
        raise NoSuchVmi(problem.detail)
    detail = problem.detail.rstrip(".")
    match status:
        case 401 if place.token_file is None:
            help_ = "give a token with --token-file FILE (kubectl create token makes one)"
        case 401:
            help_ = f"the token of {place.token_file} may have run out"
        case 403:
            help_ = "bind the ClusterRole kubevirt-eviction-exporter-caller to whose token it is"
        case 404:
            help_ = "is it the metrics listener? Ask the query listener, by default port 9810"
        case 503:
            help_ = "try again in a moment"
        case _:
            help_ = ""
    said = f"{place.url} answered {status} {problem.title}: {detail}"
    raise CannotAsk(f"{said}; {help_}" if help_ else said)


def _explain_connection(place: Place, error: Exception) -> str:
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        why = error.certificate_error
        said = why.verify_message if isinstance(why, ssl.SSLCertVerificationError) else str(why)
        return (
            f"{place.url} is not trusted: {said.rstrip('.')}; give its authority with"
            " --ca-file FILE, and a URL with a name that its certificate has"
        )
    if isinstance(error, aiohttp.ClientSSLError):
        return f"{place.url} speaks no TLS that is understood here: is it http://?"
    if isinstance(error, aiohttp.ClientConnectorError):
        return (
            f"{place.url} cannot be reached: {explain(error.os_error)}; is the exporter running"
            " there, or kubectl port-forward? Say where with --url URL or EXPORTER"
        )
    if isinstance(error, aiohttp.ClientConnectionError | ConnectionResetError):
        asked = "is it https://?"
        if place.url.startswith("https"):
            asked = "does it want a client certificate (--cert-file, --key-file)?"
        return f"{place.url} closed the connection without an answer: {asked}"
    return f"{place.url} is no exporter: {explain(error)}"
