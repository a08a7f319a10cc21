"""The door to the Kubernetes API: credentials, requests and watches as raw bytes, errors by name.

Nothing else imports kubernetes_asyncio. Of that library we use the credentials (in-cluster,
kubeconfig, client certificates, exec plugins, token refresh) and the connection; what it would
decode into models, we hand on as bytes, and so the models are not even imported.
"""

import asyncio
import ssl
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, Self

import aiohttp
import yaml

from exporter.engine.model import Resource, Seconds
from exporter.kube.kubevirt import CHECKPOINT_LABEL, LAUNCHER_SELECTOR, parse_status_message


@contextmanager
def _without_models() -> Iterator[ModuleType]:
    """Import kubernetes_asyncio's modules by their names, and not the 850 that its packages name.

    Because these, a class for each type and group of Kubernetes, are a third of our start (0.3 s)
    and of a small cluster's memory (32 MB). Three packages stand empty while the block lasts; who
    imports them after it has them whole. Yields `kubernetes_asyncio.client`.
    """
    empty: dict[str, ModuleType] = {}
    path: list[str] | None = None
    for name in ("", ".client", ".client.models"):
        package = ModuleType(f"kubernetes_asyncio{name}")
        spec = PathFinder.find_spec(package.__name__, path)
        if spec is None or package.__name__ in sys.modules:
            continue
        package.__spec__, package.__path__ = spec, list(spec.submodule_search_locations or ())
        path = package.__path__
        empty[package.__name__] = sys.modules[package.__name__] = package
    try:
        yield sys.modules["kubernetes_asyncio.client"]
    finally:
        for name in empty:
            del sys.modules[name]


with _without_models() as _client:
    from kubernetes_asyncio.client.api_client import ApiClient
    from kubernetes_asyncio.client.configuration import Configuration

    _client.ApiClient, _client.Configuration = ApiClient, Configuration  # type: ignore[attr-defined]
    from kubernetes_asyncio import config as credentials
    from kubernetes_asyncio.config.config_exception import ConfigException


CONNECT_TIMEOUT: Seconds = 10.0
WRITE_TIMEOUT: Seconds = 10.0
LONGEST_LINE = 16 * 2**20
"""Bytes in one watch event: etcd takes objects of 1.5 MiB, so this much is no event."""
LARGEST_CHUNK = 2**17
"""Bytes read at once, because a list comes in gulps of up to 4 MiB, and nobody is answered while
one is taken in: 14 ms, and now 0.5."""

_PATHS = {
    Resource.VMIS: "/apis/kubevirt.io/v1",
    Resource.VMIMS: "/apis/kubevirt.io/v1",
    Resource.PODS: "/api/v1",
    Resource.KUBEVIRTS: "/apis/kubevirt.io/v1",
    Resource.CONFIGMAPS: "/api/v1",
    Resource.LEASES: "/apis/coordination.k8s.io/v1",
}
_SELECTORS = {
    Resource.PODS: {"labelSelector": LAUNCHER_SELECTOR},
    Resource.CONFIGMAPS: {"labelSelector": CHECKPOINT_LABEL},
}

_FUTURE_VERSION = "Too large resource version"
"""What a server restored from an older state says of a version that it has not reached yet
(apimachinery `api/errors`, `NewTimeoutError` with cause ResourceVersionTooLarge)."""


class ApiError(Exception):
    """The API server, or the way to it, did not give what was asked; the text says why."""


class Expired(ApiError):
    """410, or a version that the server has not reached: only a new list helps."""


class Denied(ApiError):
    """401 or 403: not with these credentials."""


class Absent(ApiError):
    """404: the server knows no such resource."""


class Conflict(ApiError):
    """409: somebody else has written it since, or it exists already."""


class Unsupported(ApiError):
    """400, 413 or 422: the server does not take the request, now or later."""


class Overloaded(ApiError):
    """429 or 503: later, please; `retry_after` as the server said, in seconds, or 0."""

    def __init__(self, why: str, retry_after: Seconds) -> None:
        super().__init__(why)
        self.retry_after = retry_after


class Unreachable(ApiError):
    """No connection, or one that broke, or a 5xx."""


class Silent(ApiError):
    """Nothing was heard for longer than the read timeout: the peer may be dead."""


class NoCredentials(Exception):
    """There is no usable way to log in; the text says what was looked for."""


@dataclass(frozen=True)
class Login:
    """Where credentials come from: a kubeconfig file, or a bare URL of a server without any.

    With neither: the pod's service account if there is one, else the default kubeconfig.
    """

    kubeconfig: Path | None = None
    url: str | None = None


class _Session:
    """An ApiClient that closes when it was replaced and its last user has gone."""

    def __init__(self, client: ApiClient) -> None:
        self.client = client
        self.users = 0
        self.replaced = False


class ApiServer:
    """A connection to one API server. Use as an async context manager."""

    def __init__(self, login: Login, *, read_timeout: Seconds) -> None:
        self._login = login
        self._read_timeout = read_timeout
        self._session: _Session | None = None
        self._logged_in = False
        self._lock = asyncio.Lock()

    async def __aenter__(self) -> Self:
        await self._current()
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.client.close()

    async def list_page(
        self, resource: Resource, namespace: str | None, *, limit: int, token: str
    ) -> bytes:
        """One page of a consistent list. Raises `ApiError`."""
        query = {"limit": str(limit)} | ({"continue": token} if token else {})
        async with self._open(path_of(resource, namespace), _select(resource, query)) as response:
            with _naming_failures(self._read_timeout):
                return await response.read()

    @asynccontextmanager
    async def watch(
        self,
        resource: Resource,
        namespace: str | None,
        *,
        resource_version: str | None,
        seconds: int,
    ) -> AsyncIterator[AsyncIterator[list[bytes]]]:
        """Lines of a watch, in the batches in which they arrive, for `seconds` at most.

        Without a `resource_version` the server streams the list first and ends it with a
        bookmark (`sendInitialEvents`). Raises `ApiError`.
        """
        query = {"watch": "1", "allowWatchBookmarks": "true", "timeoutSeconds": str(seconds)}
        if resource_version is None:
            query |= {"sendInitialEvents": "true", "resourceVersionMatch": "NotOlderThan"}
        else:
            query["resourceVersion"] = resource_version
        async with self._open(path_of(resource, namespace), _select(resource, query)) as response:
            yield self._lines(response)

    async def read(self, resource: Resource, namespace: str, name: str) -> bytes:
        """One object. Raises `ApiError`."""
        return await self._send("GET", path_of(resource, namespace, name))

    async def replace(
        self, resource: Resource, namespace: str, name: str, body: Mapping[str, Any]
    ) -> bytes:
        """The object as replaced, or made where there is none and the body names no version.

        Made like this, and not by a POST, a role can say by which name it may be made. Raises
        `Conflict` where it has another version, `Unsupported` where it exists and the body names
        no version, or `ApiError`.
        """
        return await self._send("PUT", path_of(resource, namespace, name), body=body)

    async def apply(
        self, resource: Resource, namespace: str, name: str, body: Mapping[str, Any], *, owner: str
    ) -> bytes:
        """Server-side apply, as the field manager `owner`; the object as it is then.

        With a `metadata.resourceVersion` in the body only that version is replaced. Raises
        `Conflict` where it is another, or `ApiError`.
        """
        return await self._send(
            "PATCH",
            path_of(resource, namespace, name),
            query={"fieldManager": owner, "force": "true"},
            body=body,
            content_type="application/apply-patch+yaml",
        )

    async def review(self, path: str, body: Mapping[str, Any]) -> bytes:
        """The API server's answer to a TokenReview or a SubjectAccessReview. Raises `ApiError`."""
        return await self._send("POST", path, body=body)

    async def _send(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | None = None,
        content_type: str = "application/json",
    ) -> bytes:
        async with self._open(
            path,
            query or {},
            method=method,
            body=body,
            content_type=content_type,
            within=WRITE_TIMEOUT,
        ) as response:
            with _naming_failures(WRITE_TIMEOUT):
                return await response.read()

    async def renew(self) -> None:
        """Read the credentials again; requests under way finish with the old ones."""
        async with self._lock:
            old = self._session
            self._session = None
            if old is not None:
                old.replaced = True
                await self._leave(old)

    async def _lines(self, response: aiohttp.ClientResponse) -> AsyncIterator[list[bytes]]:
        rest = b""
        with _naming_failures(self._read_timeout):
            async for chunk in response.content.iter_chunked(LARGEST_CHUNK):
                lines, rest = split_lines(rest, chunk)
                if len(rest) > LONGEST_LINE:
                    raise Unreachable(f"a watch event of more than {LONGEST_LINE} bytes")
                if lines:
                    yield lines

    @asynccontextmanager
    async def _open(
        self,
        path: str,
        query: Mapping[str, str],
        *,
        method: str = "GET",
        body: Mapping[str, Any] | None = None,
        content_type: str = "application/json",
        within: Seconds | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        session = await self._current()
        session.users += 1
        try:
            with _naming_failures(within or self._read_timeout):
                response = await session.client.call_api(
                    path,
                    method,
                    {},
                    list(query.items()),
                    {"Accept": "application/json", "Content-Type": content_type},
                    body=body,
                    auth_settings=["BearerToken"],
                    _preload_content=False,
                    _request_timeout=aiohttp.ClientTimeout(
                        total=within, sock_connect=CONNECT_TIMEOUT, sock_read=self._read_timeout
                    ),
                )
            try:
                if response.status not in (200, 201):
                    raise await _failure(response)
                yield response
            finally:
                response.close()
        finally:
            session.users -= 1
            await self._leave(session)

    async def _current(self) -> _Session:
        async with self._lock:
            if self._session is None:
                self._session = _Session(ApiClient(await self._log_in()))
                self._logged_in = True
            return self._session

    async def _log_in(self) -> Configuration:
        """Credentials that have worked once may be missing for a moment: that is retried."""
        try:
            return await log_in(self._login)
        except NoCredentials as error:
            if self._logged_in:
                raise Unreachable(str(error)) from error
            raise

    async def _leave(self, session: _Session) -> None:
        if session.replaced and not session.users:
            await session.client.close()


def path_of(resource: Resource, namespace: str | None, name: str = "") -> str:
    """The URL path of a resource, in one namespace or (None) in all, or of one object."""
    scope = "" if namespace is None else f"/namespaces/{namespace}"
    return f"{_PATHS[resource]}{scope}/{resource}" + (f"/{name}" if name else "")


def _select(resource: Resource, query: Mapping[str, str]) -> dict[str, str]:
    return dict(query) | _SELECTORS.get(resource, {})


def split_lines(rest: bytes, chunk: bytes) -> tuple[list[bytes], bytes]:
    """The complete, non-empty lines of `rest + chunk`, and what is left over."""
    if b"\n" not in chunk:
        return [], rest + chunk
    *lines, rest = (rest + chunk).split(b"\n")
    return [line for line in lines if line.strip()], rest


async def log_in(login: Login) -> Configuration:
    """The client configuration of these credentials. Raises `NoCredentials`."""
    configuration = Configuration()
    if login.url is not None:
        configuration.host = login.url
        return configuration
    if login.kubeconfig is None:
        try:
            credentials.load_incluster_config(  # type: ignore[no-untyped-call]
                client_configuration=configuration
            )
        except ConfigException:
            pass
        else:
            return configuration
    if login.kubeconfig is not None and not login.kubeconfig.is_file():
        raise NoCredentials(f"{login.kubeconfig}: there is no such kubeconfig file")
    where = "the default kubeconfig" if login.kubeconfig is None else str(login.kubeconfig)
    try:
        await credentials.load_kube_config(
            config_file=None if login.kubeconfig is None else str(login.kubeconfig),
            client_configuration=configuration,
            persist_config=False,
        )
    except (ConfigException, OSError, yaml.YAMLError, AssertionError, TypeError, KeyError) as error:
        looked = "" if login.kubeconfig else "no service account of a pod, and "
        raise NoCredentials(f"{looked}{where} cannot be used: {_why(error)}") from error
    return configuration


async def _failure(response: aiohttp.ClientResponse) -> ApiError:
    try:
        message = parse_status_message(await response.read())
    except (aiohttp.ClientError, TimeoutError, OSError):
        message = ""
    why = message or response.reason or ""
    return error_of(response.status, why, retry_after=_retry_after(response))


def error_of(code: int, message: str, *, retry_after: Seconds = 0.0) -> ApiError:
    """The error of a status code, whether it came as HTTP or inside a watch."""
    why = f"{code} {message}".strip()
    if code == 410 or (code == 504 and _FUTURE_VERSION in message):
        return Expired(why)
    if code in (429, 503):
        return Overloaded(why, retry_after)
    return _ERRORS.get(code, Unreachable)(why)


_ERRORS: Mapping[int, type[ApiError]] = {
    401: Denied,
    403: Denied,
    404: Absent,
    409: Conflict,
} | dict.fromkeys((400, 405, 406, 413, 415, 422), Unsupported)


def _retry_after(response: aiohttp.ClientResponse) -> Seconds:
    value = response.headers.get("Retry-After", "")
    return float(value) if value.isascii() and value.isdigit() else 0.0


@contextmanager
def _naming_failures(read_timeout: Seconds) -> Iterator[None]:
    """Turns what the network and TLS raise into `ApiError`."""
    try:
        yield
    except aiohttp.SocketTimeoutError as error:
        raise Silent(f"nothing heard for {read_timeout:g} s") from error
    except (aiohttp.ClientError, ssl.SSLError, TimeoutError, OSError) as error:
        raise Unreachable(_why(error)) from error


def _why(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
