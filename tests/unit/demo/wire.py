"""A small HTTP client for the API server, and objects for it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from exporter.demo.store import NAMESPACES, ObjectStore
from tests.cluster import PATIENCE
from tests.support.faulty_apiserver import FaultyApiServer

from .facts import NOW


ALL_VMIS = "/apis/kubevirt.io/v1/virtualmachineinstances"
ALL_MIGRATIONS = "/apis/kubevirt.io/v1/virtualmachineinstancemigrations"
ALL_PODS = "/api/v1/pods"
ALL_NODES = "/api/v1/nodes"
VMIS = "/apis/kubevirt.io/v1/namespaces/shop/virtualmachineinstances"
MIGRATIONS = "/apis/kubevirt.io/v1/namespaces/shop/virtualmachineinstancemigrations"
PODS = "/api/v1/namespaces/shop/pods"
STREAMING = {
    "watch": "1",
    "sendInitialEvents": "true",
    "resourceVersionMatch": "NotOlderThan",
    "allowWatchBookmarks": "true",
}


def vmi(name: str, **labels: str) -> dict[str, Any]:
    """A small VMI."""
    return {"metadata": {"name": name, "labels": labels}, "spec": {}, "status": {}}


def pod(name: str, **labels: str) -> dict[str, Any]:
    """A small pod."""
    containers = [{"name": "compute", "image": "launcher"}]
    return {"metadata": {"name": name, "labels": labels}, "spec": {"containers": containers}}


class Answer:
    """One complete answer."""

    def __init__(self, status: int, headers: Any, body: bytes) -> None:
        self.status = status
        self.headers = headers
        self.body = body

    @property
    def json(self) -> dict[str, Any]:
        """The body."""
        decoded: dict[str, Any] = json.loads(self.body)
        return decoded

    @property
    def version(self) -> str:
        """Its resourceVersion."""
        return str(self.json["metadata"]["resourceVersion"])

    @property
    def names(self) -> list[str]:
        """The names of its items."""
        return [item["metadata"]["name"] for item in self.json["items"]]


class Stream:
    """One open watch."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self.response = response

    async def raw(self) -> bytes:
        """The next line."""
        async with asyncio.timeout(PATIENCE):
            return await self.response.content.readline()

    async def next(self) -> dict[str, Any]:
        """The next event."""
        line = await self.raw()
        assert line, "the stream has ended"
        decoded: dict[str, Any] = json.loads(line)
        return decoded

    async def take(self, count: int) -> list[tuple[str, str]]:
        """The type and name of each of the next events."""
        events = [await self.next() for _ in range(count)]
        return [(event["type"], event["object"]["metadata"].get("name", "")) for event in events]

    async def rest(self) -> bytes:
        """All events until the end."""
        async with asyncio.timeout(PATIENCE):
            return await self.response.content.read()


class Client:
    """A client of the server under test."""

    def __init__(self, server: FaultyApiServer, session: aiohttp.ClientSession) -> None:
        self.server = server
        self.session = session

    async def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        headers: dict[str, str] | None = None,
        query: dict[str, str | int] | None = None,
    ) -> Answer:
        """One request."""
        data = None if body is None else json.dumps(body).encode()
        sent = {"Content-Type": "application/json"} | (headers or {})
        async with self.session.request(
            method, self.server.url + path, data=data, params=query, headers=sent
        ) as response:
            return Answer(response.status, response.headers, await response.read())

    async def get(self, path: str, **query: str | int) -> Answer:
        """GET."""
        return await self.ask("GET", path, query=query)

    async def post(self, path: str, body: Any) -> Answer:
        """POST."""
        return await self.ask("POST", path, body)

    async def patch(self, path: str, body: Any) -> Answer:
        """PATCH, with a merge patch."""
        merge = {"Content-Type": "application/merge-patch+json"}
        return await self.ask("PATCH", path, body, headers=merge)

    async def delete(self, path: str, **query: str | int) -> Answer:
        """DELETE."""
        return await self.ask("DELETE", path, query=query)

    @asynccontextmanager
    async def watch(self, path: str, **query: str | int) -> AsyncIterator[Stream]:
        """Open a watch."""
        asked = {"watch": "1"} | query
        async with self.session.get(self.server.url + path, params=asked) as response:
            assert response.status == 200
            yield Stream(response)


def make_store(**settings: Any) -> ObjectStore:
    """A store with one namespace."""
    store = ObjectStore(lambda: NOW, **settings)
    store.create(NAMESPACES, {"metadata": {"name": "shop"}})
    return store


@asynccontextmanager
async def serve(store: ObjectStore | None = None, **settings: Any) -> AsyncIterator[Client]:
    """A server and a client of it."""
    async with (
        FaultyApiServer(store or make_store(), **settings) as server,
        aiohttp.ClientSession() as session,
    ):
        yield Client(server, session)
