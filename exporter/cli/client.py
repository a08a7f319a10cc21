"""A client of a running exporter's query API, over http, https or a unix socket.

Error messages say what happened and which option helps.
"""

import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, TypeVar
from urllib.parse import quote, urlencode

import aiohttp
import msgspec

from exporter.credentials import (
    CannotAsk,
    InvalidEndpoint,
    check_url,
    describe,
    make_ssl_context,
    read_token,
)
from exporter.engine.facts.model import Seconds
from exporter.errors import CommandFailed, Exit
from exporter.server.api.schemas import VmisAnswer
from exporter.server.fields import Problem
from exporter.text import clean


T = TypeVar("T")

DEFAULT_URL = "http://127.0.0.1:9810"
"""The default of `listen.query`."""
SOCKET = Path("/run/kubevirt-eviction-exporter/local.sock")
"""`listen.local` of the manifests."""
TIMEOUT: Seconds = 15.0
LARGEST_ANSWER = 64 * 2**20
"""The largest answer that is read, in bytes after decoding."""

_POD_PREFIX = "virt-launcher-"
_POD_HINT = (
    "that is the name of a pod; the name of its VMI is in the pod's annotation kubevirt.io/domain"
)
_EXPECTED = "expected http://HOST:PORT, https://HOST:PORT or unix:/PATH"


class NoSuchVmi(CommandFailed):
    """There is no such VMI."""

    exit_code = Exit.NO_SUCH_VMI


class NoSuchNode(CommandFailed):
    """The exporter knows no VMI on that node."""

    exit_code = Exit.NO_SUCH_NODE


@dataclass(frozen=True)
class Endpoint:
    """The URL of an exporter, and the credentials for it. Raises `InvalidEndpoint`.

    The client certificate `cert_file` may include its key.
    """

    url: str = DEFAULT_URL
    token_file: Path | None = None
    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None

    def __post_init__(self) -> None:
        if self.key_file is not None and self.cert_file is None:
            raise InvalidEndpoint("--key-file: needs --cert-file")
        if not self.socket:
            check_url(self.url, _EXPECTED, with_token=self.token_file is not None)

    @property
    def socket(self) -> str:
        """The path of the unix socket; "" if the URL is not that of a unix socket."""
        scheme, _, path = self.url.partition(":")
        return f"/{path.lstrip('/')}" if scheme == "unix" and path.startswith("/") else ""

    @property
    def base(self) -> str:
        """The URL that paths are appended to."""
        return "http://localhost" if self.socket else self.url.rstrip("/")


def find_url(environment: Mapping[str, str], socket: Path = SOCKET) -> str:
    """The default of --url: from the environment, else the unix socket in the exporter's pod."""
    url = environment.get("KUBEVIRT_EVICTION_EXPORTER_URL")
    return url or (f"unix:{socket}" if socket.is_socket() else DEFAULT_URL)


class Exporter:
    """A connection to an exporter."""

    def __init__(self, endpoint: Endpoint, session: aiohttp.ClientSession) -> None:
        self._endpoint = endpoint
        self._session = session

    async def read_vmi(self, namespace: str, name: str) -> bytes:
        """GET /v1/vmis/{namespace}/{name}. Raises NoSuchVmi."""
        try:
            return await self.read(f"/v1/vmis/{quote(namespace, safe='')}/{quote(name, safe='')}")
        except NoSuchVmi as missing:
            if not name.startswith(_POD_PREFIX):
                raise
            raise NoSuchVmi(f"{missing}: {_POD_HINT}") from None

    async def find_namespace(self, name: str) -> str:
        """The namespace of the only VMI with this name.

        Raises NoSuchVmi if no namespace or more than one has such a VMI.
        """
        body = await self.read(f"/v1/vmis?{urlencode({'name': name})}")
        namespaces = decode_answer(body, VmisAnswer).namespaces
        if not namespaces:
            hint = f": {_POD_HINT}" if name.startswith(_POD_PREFIX) else ""
            raise NoSuchVmi(f"no VMI {name!r} in any namespace{hint}")
        if len(namespaces) > 1:
            choices = ", ".join(f"{namespace}/{name}" for namespace in namespaces)
            raise NoSuchVmi(
                f"{len(namespaces)} namespaces have a VMI {name!r}, choose one: {choices}"
            )
        return namespaces[0]

    async def read_node(self, node: str) -> bytes:
        """GET /v1/nodes/{node}. Raises NoSuchNode."""
        return await self.read(f"/v1/nodes/{quote(node, safe='')}")

    async def read(self, path: str) -> bytes:
        """The JSON of a GET. Raises CannotAsk, NoSuchVmi or NoSuchNode."""
        endpoint = self._endpoint
        try:
            async with self._session.get(
                endpoint.base + path,
                # The token is read for each request, because tokens are rotated.
                headers={"Accept-Encoding": "identity"} | read_token(endpoint.token_file),
                allow_redirects=False,
            ) as response:
                body = await _read_body(endpoint, response)
                if response.status != 200:
                    _raise_for(endpoint, response.status, body)
                if response.content_type != "application/json":
                    raise CannotAsk(
                        f"{endpoint.url} is no exporter: it answered {response.content_type}"
                    )
                return body
        except TimeoutError:
            raise CannotAsk(
                f"{endpoint.url} did not answer within {self._session.timeout.total:g} s: check"
                " that it is the exporter's address, and that no firewall or NetworkPolicy is in"
                " the way"
            ) from None
        except (aiohttp.ClientError, OSError) as error:
            raise CannotAsk(_explain_connection(endpoint, error)) from None


@asynccontextmanager
async def connect(endpoint: Endpoint, *, max_wait: Seconds = TIMEOUT) -> AsyncIterator[Exporter]:
    """A connection until the `async with` block ends. Raises `CannotAsk`.

    Each request, including its connection, may take `max_wait`.
    """
    context = make_ssl_context(endpoint.ca_file, endpoint.cert_file, endpoint.key_file)
    connector = (
        aiohttp.UnixConnector(endpoint.socket)
        if endpoint.socket
        else aiohttp.TCPConnector(ssl=context)
    )
    timeout = aiohttp.ClientTimeout(total=max_wait)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        yield Exporter(endpoint, session)


def decode_answer(body: bytes, kind: type[T]) -> T:
    """Decode an answer of the API. Raises `CannotAsk`."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CannotAsk(
            f"the answer cannot be decoded ({error}): is the exporter of another version?"
            " --json prints it unchanged"
        ) from None


async def _read_body(endpoint: Endpoint, response: aiohttp.ClientResponse) -> bytes:
    """The decoded body. Raises `CannotAsk` if it is larger than `LARGEST_ANSWER`."""
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > LARGEST_ANSWER:
            raise CannotAsk(
                f"{endpoint.url} is no exporter: its answer is larger than"
                f" {LARGEST_ANSWER // 2**20} MiB"
            )
    return bytes(body)


def _raise_for(endpoint: Endpoint, status: int, body: bytes) -> NoReturn:
    """Explain an answer other than 200."""
    try:
        problem = msgspec.json.decode(body, type=Problem)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise CannotAsk(f"{endpoint.url} is no exporter: it answered {status}") from None
    if status == 404 and problem.title == "No such VMI":
        raise NoSuchVmi(clean(problem.detail))
    if status == 404 and problem.title == "No such node":
        raise NoSuchNode(clean(problem.detail))
    detail = clean(problem.detail).rstrip(".")
    match status:
        case 401 if endpoint.token_file is None:
            help_ = "give a token with --token-file FILE (kubectl create token makes one)"
        case 401:
            help_ = f"the token of {endpoint.token_file} may have expired"
        case 403 if problem.title == "Unknown host":
            help_ = "ask it by one of these names with --url"
        case 403:
            help_ = "bind the ClusterRole kubevirt-eviction-exporter-caller to the token's account"
        case 404:
            help_ = "is it the metrics listener? Use the query listener, by default port 9810"
        case 503:
            help_ = "try again in a moment"
        case _:
            help_ = ""
    message = f"{endpoint.url} answered {status} {clean(problem.title)}: {detail}"
    raise CannotAsk(f"{message}; {help_}" if help_ else message)


def _explain_connection(endpoint: Endpoint, error: Exception) -> str:
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        why = error.certificate_error
        trouble = why.verify_message if isinstance(why, ssl.SSLCertVerificationError) else str(why)
        return (
            f"{endpoint.url} is not trusted: {trouble.rstrip('.')}; give its CA with"
            " --ca-file FILE, and use a host name that is in its certificate"
        )
    if isinstance(error, aiohttp.ClientSSLError):
        return f"{endpoint.url} does not speak TLS: is it http://?"
    if isinstance(error, aiohttp.ClientConnectorError):
        return (
            f"{endpoint.url} cannot be reached: {describe(error.os_error)}; is the exporter running"
            " there, or kubectl port-forward? Set its address with --url URL or"
            " KUBEVIRT_EVICTION_EXPORTER_URL"
        )
    if isinstance(error, aiohttp.ClientConnectionError | ConnectionResetError):
        hint = "is it https://?"
        if endpoint.url.startswith("https"):
            hint = "does it want a client certificate (--cert-file, --key-file)?"
        return f"{endpoint.url} closed the connection without an answer: {hint}"
    return f"{endpoint.url} is no exporter: {describe(error)}"
