"""A small JSON client of an API server, for one user."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Self

import aiohttp

from .objects import Object
from .resources import Resource
from .users import User


_TIMEOUT = aiohttp.ClientTimeout(total=30)
_STREAM = aiohttp.ClientTimeout(total=None, connect=30)
_MERGE = {"Content-Type": "application/merge-patch+json"}


class ApiError(Exception):
    """An answer that is not a 2xx, with the server's Status object."""

    def __init__(self, code: int, status: Object) -> None:
        super().__init__(f"{code}: {status.get('message')}")
        self.code = code
        self.status = status


class Client:
    """The verbs of the Kubernetes API with plain dictionaries; an async context manager."""

    def __init__(self, url: str, user: User) -> None:
        self._url = url
        self._user = user

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            self._url,
            connector=aiohttp.TCPConnector(ssl=self._user.tls, limit=0),
            headers=self._user.headers,
            timeout=_TIMEOUT,
        )
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._session.close()

    async def get(self, resource: Resource, namespace: str | None, name: str) -> Object:
        """Read one object."""
        return await self.request("GET", resource.path(namespace, name))

    async def list(
        self, resource: Resource, namespace: str | None = None, **query: str | int
    ) -> Object:
        """List the objects; `query` can limit the list."""
        return await self.request("GET", resource.path(namespace), params=query)

    async def create(self, resource: Resource, body: Object) -> Object:
        """Create an object with its status, even if the status is a subresource."""
        namespace = body["metadata"].get("namespace")
        made = await self.request("POST", resource.path(namespace), json=body)
        if not (resource.has_status and body.get("status")):
            return made
        name = made["metadata"]["name"]
        return await self.merge_status(resource, namespace, name, body["status"])

    async def replace(self, resource: Resource, body: Object) -> Object:
        """Replace an object; a stale resourceVersion in it is refused with 409."""
        metadata = body["metadata"]
        path = resource.path(metadata.get("namespace"), metadata["name"])
        return await self.request("PUT", path, json=body)

    async def replace_status(self, resource: Resource, body: Object) -> Object:
        """Replace an object's status, even if the status is a subresource."""
        metadata = body["metadata"]
        path = resource.path(metadata.get("namespace"), metadata["name"])
        status = "/status" if resource.has_status else ""
        return await self.request("PUT", path + status, json=body)

    async def merge(
        self, resource: Resource, namespace: str | None, name: str, patch: Object
    ) -> Object:
        """Merge-patch an object; the server ignores the status if that is a subresource."""
        path = resource.path(namespace, name)
        return await self.request("PATCH", path, json=patch, headers=_MERGE)

    async def merge_status(
        self, resource: Resource, namespace: str | None, name: str, status: Object
    ) -> Object:
        """Merge-patch an object's status, even if the status is a subresource."""
        path = resource.path(namespace, name) + ("/status" if resource.has_status else "")
        return await self.request("PATCH", path, json={"status": status}, headers=_MERGE)

    async def delete(self, resource: Resource, namespace: str | None, name: str) -> Object:
        """Delete an object without a grace period, which only a kubelet would end."""
        path = resource.path(namespace, name)
        return await self.request("DELETE", path, json={"gracePeriodSeconds": 0})

    @asynccontextmanager
    async def watch(
        self, resource: Resource, namespace: str | None = None, **query: str | int
    ) -> AsyncIterator[AsyncIterator[Object]]:
        """Open a watch and yield its events as they come."""
        params = {"watch": "true", **query}
        path = resource.path(namespace)
        async with self._session.get(path, params=params, timeout=_STREAM) as response:
            await _refuse_errors(response)
            yield (json.loads(line) async for line in _lines(response.content))

    async def request(self, method: str, path: str, **arguments: Any) -> Object:
        """Send one request, and return the JSON of its answer."""
        answer: Object = json.loads(await self.send(method, path, **arguments))
        return answer

    async def send(self, method: str, path: str, **arguments: Any) -> bytes:
        """Send one request, and return the body of its answer."""
        async with self._session.request(method, path, **arguments) as response:
            await _refuse_errors(response)
            return await response.read()


async def _lines(stream: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Split a stream into lines of any length; a StreamReader's own iteration has a limit."""
    rest = b""
    async for chunk in stream.iter_any():
        *whole, rest = (rest + chunk).split(b"\n")
        for line in whole:
            yield line


async def _refuse_errors(response: aiohttp.ClientResponse) -> None:
    if not response.ok:
        text = await response.text()
        is_json = response.content_type == "application/json"
        raise ApiError(response.status, json.loads(text) if is_json else {"message": text})
