"""The client for the Kubernetes API: sends requests, opens watches, classifies errors.

Responses are returned as bytes. The module `sessions` logs in, and provides the connections.
"""

import asyncio
import ssl
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from email.utils import parsedate_to_datetime
from typing import Any, Self

import aiohttp

from exporter.engine.facts.model import Instant, Resource, Seconds
from exporter.engine.facts.names import KUBEVIRT, KubeVirtNames
from exporter.errors import ExporterError
from exporter.kube.kubeconfig import NoCredentials
from exporter.kube.login import Login, why_of
from exporter.kube.objects.kubevirt import LAUNCHER_SELECTOR, parse_status_message
from exporter.kube.sessions import Sessions
from exporter.text import clean


CONNECT_TIMEOUT: Seconds = 10.0
WRITE_TIMEOUT: Seconds = 10.0
"""The time limit of a request about one object."""
WATCH_GRACE: Seconds = 5.0
"""How much longer than its `timeoutSeconds` a watch may last."""
LONGEST_RETRY_AFTER: Seconds = 60.0
"""The longest pause that is accepted from `Retry-After`: a longer pause would delay a watch."""
LONGEST_LINE = 16 * 2**20
"""The most bytes in one watch event: etcd accepts objects of up to 1.5 MiB."""
LONGEST_ERROR = 2**16
"""The most bytes that are read of the body of an error."""
JSON = "application/json"
USER_AGENT = "kubevirt-eviction-exporter"
LARGEST_CHUNK = 2**17
"""The most bytes read at once."""
LARGEST_BATCH = 32
"""The most lines in a batch. Processing them blocks the event loop for 1 ms, or for 9 ms if each is
a migration to log. With smaller reads or batches the first list takes up to 15 % more time."""

_KUBEVIRT_RESOURCES = frozenset({Resource.VMIS, Resource.VMIMS, Resource.KUBEVIRTS})
_PATHS = {
    Resource.PODS: "/api/v1",
    Resource.NODES: "/api/v1",
    Resource.BUDGETS: "/apis/policy/v1",
    Resource.EVICTIONS: "/apis/lifecycle.k8s.io/v1alpha1",
    Resource.LEASES: "/apis/coordination.k8s.io/v1",
}

_FUTURE_VERSION = "Too large resource version"
"""An API server that was restored from a backup answers this to a newer resourceVersion
(apimachinery `api/errors`, `NewTimeoutError` with cause ResourceVersionTooLarge)."""


class ApiError(ExporterError):
    """A request failed; the message says why. It may be the server's, so it is bounded."""

    def __init__(self, why: str) -> None:
        super().__init__(clean(why))


class Expired(ApiError):
    """410, or the server has not reached this resourceVersion: a new list is needed."""


class Denied(ApiError):
    """401 or 403: the server does not accept the credentials, or they lack a permission."""


class Forbidden(Denied):
    """403: authenticated, but not authorized."""


class Absent(ApiError):
    """404: there is no such resource or object."""


class Conflict(ApiError):
    """409: another client has changed the object, or the object exists already."""


class Unsupported(ApiError):
    """400, 405, 406, 413, 415 or 422: the server will never accept this request."""


class Overloaded(ApiError):
    """429 or 503: try again after `retry_after` seconds (0 if the server gave none)."""

    def __init__(self, why: str, retry_after: Seconds) -> None:
        super().__init__(why)
        self.retry_after = retry_after


class Unreachable(ApiError):
    """No connection, a broken connection, or a 5xx."""


class Unconnected(Unreachable):
    """There was no connection, or it was closed before an answer."""


class Untrusted(Unreachable):
    """TLS failed: one side does not trust the other's certificate."""


class Silent(ApiError):
    """Nothing was received within the read timeout: the peer may be dead."""


class ApiServer:
    """A connection to one API server. Use as an async context manager."""

    def __init__(
        self,
        login: Login,
        *,
        read_timeout: Seconds,
        names: KubeVirtNames = KUBEVIRT,
        clock: Callable[[], Instant] = time.time,  # noqa: TID251 (credentials expire by it)
    ) -> None:
        self.names = names
        self._clock = clock
        self._read_timeout = read_timeout
        self._sessions = Sessions(login, clock)
        self._server_ahead: Seconds = 0.0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._sessions.close()

    async def log_in(self) -> None:
        """Log in now. A login that takes too long is tried again before the first request.

        Raises `NoCredentials`.
        """
        with suppress(TimeoutError):
            await self._sessions.current()

    async def list_page(
        self, resource: Resource, namespace: str | None, *, limit: int, token: str, name: str = ""
    ) -> bytes:
        """Read one page of a consistent list. With `name`, the list has this object only.

        Raises `ApiError`.
        """
        query = {"limit": str(limit)} | self._select(resource)
        if token:
            query["continue"] = token
        if name:
            query["fieldSelector"] = f"metadata.name={name}"
        path = self._path_of(resource, namespace)
        body = await self._send("GET", path, query=query, within=None)
        return self.names.restore([body])[0]

    @asynccontextmanager
    async def watch(
        self,
        resource: Resource,
        namespace: str | None,
        *,
        resource_version: str | None,
        seconds: int,
    ) -> AsyncIterator[AsyncIterator[list[bytes]]]:
        """Watch for at most `seconds`. Yields the lines in batches of up to `LARGEST_BATCH`.

        If the server does not end the watch, it is ended here `WATCH_GRACE` later.
        Without a `resource_version` the server first streams the list and ends it with a
        bookmark (`sendInitialEvents`). Raises `ApiError`.
        """
        query = {"watch": "1", "allowWatchBookmarks": "true", "timeoutSeconds": str(seconds)}
        query |= self._select(resource)
        if resource_version is None:
            query |= {"sendInitialEvents": "true", "resourceVersionMatch": "NotOlderThan"}
        else:
            query["resourceVersion"] = resource_version
        async with self._open("GET", self._path_of(resource, namespace), query) as response:
            yield self._lines(response, seconds + WATCH_GRACE)

    async def read(self, resource: Resource, namespace: str, name: str) -> bytes:
        """Read one object. Raises `ApiError`."""
        return await self._send("GET", self._path_of(resource, namespace, name))

    async def replace(
        self, resource: Resource, namespace: str, name: str, body: Mapping[str, Any]
    ) -> bytes:
        """PUT an object. Without a resourceVersion in the body, this creates the object.

        A Role can restrict a PUT to one name, but not a POST. Raises `Conflict` if the object has
        another version, `Unsupported` if it exists and the body has no version, or another
        `ApiError`.
        """
        return await self._send("PUT", self._path_of(resource, namespace, name), body=body)

    async def create(self, path: str, body: Mapping[str, Any]) -> bytes:
        """POST a review or an Event.

        Raises `Conflict` if an object of that name exists, or another `ApiError`.
        """
        return await self._send("POST", path, body=body)

    async def apply_status(
        self, resource: Resource, body: Mapping[str, Any], *, manager: str
    ) -> None:
        """Apply the status of an object on the server (server-side apply), as `manager`.

        The server deletes the fields that `manager` has applied before and that are not in `body`.
        Raises `Conflict` if the object has another UID, or another `ApiError`.
        """
        place = body["metadata"]
        await self._send(
            "PATCH",
            self._path_of(resource, place["namespace"], place["name"]) + "/status",
            query={"fieldManager": manager, "force": "true"},
            body=body,
            content="application/apply-patch+yaml",
        )

    async def put(self, path: str, body: Mapping[str, Any]) -> None:
        """PUT to a subresource that is an action. Raises `ApiError`.

        virt-api 1.9.0 refuses `evacuate/cancel` with 406 if the client accepts only JSON.
        """
        await self._send("PUT", path, body=body, accept="*/*")

    def read_server_time(self) -> Instant:
        """The server's time by its last answer, at most two seconds late and never ahead.

        Before the first answer it is that of this machine.
        """
        return self._clock() + self._server_ahead

    def _select(self, resource: Resource) -> dict[str, str]:
        """The selector of a list or watch: of pods, only virt-launchers."""
        if resource is not Resource.PODS:
            return {}
        return {"labelSelector": self.names.translate(LAUNCHER_SELECTOR)}

    def _path_of(self, resource: Resource, namespace: str | None, name: str = "") -> str:
        """The URL path of a resource, or of one object. Namespace None means all namespaces."""
        place, plural = _PATHS.get(resource, ""), str(resource)
        if resource in _KUBEVIRT_RESOURCES:
            place = f"/apis/{self.names.api_group}/v1"
            plural = self.names.write_resource(resource)
        scope = "" if namespace is None else f"/namespaces/{namespace}"
        return f"{place}{scope}/{plural}" + (f"/{name}" if name else "")

    async def _send(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] = {},
        body: Mapping[str, Any] | None = None,
        content: str = JSON,
        accept: str = JSON,
        within: Seconds | None = WRITE_TIMEOUT,
    ) -> bytes:
        async with self._open(
            method, path, query, body, content=content, accept=accept, within=within
        ) as response:
            with _translating_errors(within or self._read_timeout):
                return await response.read()

    async def renew(self) -> None:
        """Load the credentials again. Running requests finish with the old ones."""
        await self._sessions.renew()

    async def _lines(
        self, response: aiohttp.ClientResponse, seconds: Seconds
    ) -> AsyncIterator[list[bytes]]:
        """Read lines until the response ends, for at most `seconds`."""
        ends_at = asyncio.get_running_loop().time() + seconds
        rest = b""
        with _translating_errors(self._read_timeout):
            while True:
                limit = asyncio.timeout_at(ends_at)
                try:
                    async with limit:
                        chunk = await response.content.read(LARGEST_CHUNK)
                except TimeoutError:
                    if limit.expired():
                        return
                    raise
                if not chunk:
                    return
                lines, rest = split_lines(rest, chunk)
                if len(rest) > LONGEST_LINE:
                    raise Unreachable(f"a watch event has more than {LONGEST_LINE} bytes")
                lines = self.names.restore(lines)
                for start in range(0, len(lines), LARGEST_BATCH):
                    yield lines[start : start + LARGEST_BATCH]
                    await asyncio.sleep(0)  # `read` does not wait if more has arrived

    @asynccontextmanager
    async def _open(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        body: Mapping[str, Any] | None = None,
        *,
        content: str = JSON,
        accept: str = JSON,
        within: Seconds | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        try:
            session = await self._sessions.current()
        except (TimeoutError, NoCredentials) as error:
            if self._sessions.logins == 1 and isinstance(error, NoCredentials):
                raise  # later, during a rotation, the files may be incomplete
            raise Unconnected(str(error)) from error
        session.users += 1
        try:
            with _translating_errors(within or self._read_timeout, Unconnected):
                response = await session.client.request(
                    method,
                    session.access.account.server.geturl() + path,
                    dict(query),
                    {
                        "Accept": accept,
                        "Content-Type": content,
                        "User-Agent": USER_AGENT,
                        **session.access.authorize(),
                    },
                    body=body,
                    _preload_content=False,
                    _request_timeout=aiohttp.ClientTimeout(
                        total=within, sock_connect=CONNECT_TIMEOUT, sock_read=self._read_timeout
                    ),
                )
            try:
                self._read_date(response)
                if response.status not in (200, 201):
                    raise await _failure(response)
                yield response
            finally:
                if response.connection is not None and response.connection.transport is not None:
                    # `close` would wait, after the program's end too, for the server's end of TLS.
                    response.connection.transport.abort()
                response.close()
        except Untrusted:
            # The CA may have been rotated. The next request reads the new CA from our files.
            await self._sessions.renew(distrusted=session)
            raise
        finally:
            session.users -= 1
            await self._sessions.close_unused(session)

    def _read_date(self, response: aiohttp.ClientResponse) -> None:
        """Compare our clock with the server's: `Date` has whole seconds, and is from before now."""
        with suppress(ValueError):
            date = parsedate_to_datetime(response.headers.get("Date", ""))
            self._server_ahead = date.timestamp() - self._clock()


def split_lines(rest: bytes, chunk: bytes) -> tuple[list[bytes], bytes]:
    """Split `rest + chunk` into its complete, non-empty lines and the remaining bytes."""
    if b"\n" not in chunk:
        return [], rest + chunk
    *lines, rest = (rest + chunk).split(b"\n")
    return [line for line in lines if line.strip()], rest


async def _failure(response: aiohttp.ClientResponse) -> ApiError:
    try:
        body = await response.content.readexactly(LONGEST_ERROR)
    except asyncio.IncompleteReadError as whole:
        body = whole.partial
    except (aiohttp.ClientError, TimeoutError, OSError):
        body = b""
    why = parse_status_message(body) or response.reason or ""
    value = response.headers.get("Retry-After", "")
    seconds = float(value) if value.isascii() and value.isdigit() else 0.0
    return error_of(response.status, why, retry_after=min(seconds, LONGEST_RETRY_AFTER))


def error_of(code: int, message: str, *, retry_after: Seconds = 0.0) -> ApiError:
    """The error for a status code of an HTTP response or of a watch's ERROR event."""
    why = f"{code} {message}".strip()
    if code == 504 and _FUTURE_VERSION in message:
        return Expired(why)
    if code in (429, 503):
        return Overloaded(why, retry_after)
    return _ERRORS.get(code, Unreachable)(why)


_ERRORS: Mapping[int, type[ApiError]] = {
    401: Denied,
    403: Forbidden,
    404: Absent,
    409: Conflict,
    410: Expired,
} | dict.fromkeys((400, 405, 406, 413, 415, 422), Unsupported)


@contextmanager
def _translating_errors(
    read_timeout: Seconds, unreachable: type[Unreachable] = Unreachable
) -> Iterator[None]:
    """Turn network and TLS exceptions into `ApiError`."""
    try:
        yield
    except aiohttp.SocketTimeoutError as error:
        raise Silent(f"nothing received for {read_timeout:g} s") from error
    except (aiohttp.ClientSSLError, ssl.SSLError) as error:
        raise Untrusted(why_of(error)) from error
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise unreachable(why_of(error)) from error
