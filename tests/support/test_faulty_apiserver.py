"""The faults that a test can give the simulated API server."""

import asyncio

import aiohttp
import pytest

from exporter.demo import store
from tests.unit.demo.wire import (
    ALL_MIGRATIONS,
    ALL_PODS,
    ALL_VMIS,
    MIGRATIONS,
    PODS,
    STREAMING,
    VMIS,
    pod,
    serve,
    vmi,
)


pytestmark = pytest.mark.asyncio

RESOURCE = "virtualmachineinstances"


async def test_streaming_lists_can_be_refused() -> None:
    """As a server without WatchList: 422, Invalid, naming the parameter."""
    async with serve() as client:
        client.server.refuse_streaming_lists()
        answer = await client.get(ALL_VMIS, **STREAMING)

    assert answer.status == 422
    assert answer.json["reason"] == "Invalid"
    assert answer.json["message"] == (
        'ListOptions.meta.k8s.io "" is invalid: sendInitialEvents: Forbidden: '
        "sendInitialEvents is forbidden for watch unless the WatchList feature gate is enabled"
    )


@pytest.mark.parametrize("mid_line", [False, True], ids=["between lines", "in a line"])
async def test_streams_can_be_cut(*, mid_line: bool) -> None:
    """A cut stream breaks off for its reader, on request within a line."""
    async with serve() as client, client.watch(ALL_VMIS, resourceVersion="2") as stream:
        await client.server.watched(RESOURCE)
        cut = client.server.cut(mid_line=mid_line)
        with pytest.raises((aiohttp.ClientError, ConnectionError)):
            await stream.rest()

    assert cut == 1


async def test_only_the_named_resource_is_cut() -> None:
    """A fault given to one resource leaves the streams of others alone."""
    async with serve() as client, client.watch(ALL_PODS, resourceVersion="2") as stream:
        await client.server.watched("pods")
        assert client.server.cut(RESOURCE) == 0
        await client.post(PODS, pod("p1"))

        assert await stream.take(1) == [("ADDED", "p1")]


async def test_a_frozen_server_is_silent() -> None:
    """While frozen nothing comes and requests hang; thawed it goes on where it was."""
    async with serve(bookmark_seconds=0.01) as client:
        query = {"allowWatchBookmarks": "true", "resourceVersion": "2"}
        async with client.watch(ALL_VMIS, **query) as stream:
            await client.server.watched(RESOURCE)
            client.server.freeze()
            client.server.store.create(
                store.VMIS, {"metadata": {"namespace": "shop", "name": "db1"}}
            )
            hanging = asyncio.create_task(client.get(ALL_VMIS))
            done, _ = await asyncio.wait([hanging], timeout=0.2)
            assert not done
            client.server.thaw()
            while (event := await stream.next())["type"] == "BOOKMARK":
                pass
            answer = await hanging

    assert event["object"]["metadata"]["name"] == "db1"
    assert answer.names == ["db1"]


@pytest.mark.parametrize(
    ("code", "reason"),
    [(401, "Unauthorized"), (403, "Forbidden"), (500, "InternalError"), (410, "Expired")],
)
async def test_a_resource_can_be_refused(code: int, reason: str) -> None:
    """A refused resource answers with the code's own Status, others as ever."""
    async with serve() as client:
        client.server.answer(RESOURCE, code)
        refused = await client.get(ALL_VMIS)
        other = await client.get(ALL_PODS)
        client.server.recover()
        recovered = await client.get(ALL_VMIS)

    assert (refused.status, refused.json["reason"]) == (code, reason)
    assert (other.status, recovered.status) == (200, 200)


async def test_forbidden_speaks_the_servers_words() -> None:
    """The message names user, verb, resource, group and scope, as RBAC's does."""
    async with serve() as client:
        client.server.answer("virtualmachineinstancemigrations", 403)
        wide = await client.get(ALL_MIGRATIONS)
        narrow = await client.get(MIGRATIONS, watch="1")

    assert wide.json["message"] == (
        'virtualmachineinstancemigrations.kubevirt.io is forbidden: User "system:anonymous" '
        'cannot list resource "virtualmachineinstancemigrations" in API group "kubevirt.io" '
        "at the cluster scope"
    )
    assert narrow.json["message"].endswith('in the namespace "shop"')
    assert "cannot watch resource" in narrow.json["message"]


async def test_a_missing_resource_is_plain() -> None:
    """404 is answered as where the CRD is not installed."""
    async with serve() as client:
        client.server.answer(RESOURCE, 404)
        answer = await client.get(ALL_VMIS)

    assert (answer.status, answer.body) == (404, b"404 page not found\n")


async def test_too_many_requests_says_when_to_return() -> None:
    """429 carries Retry-After, and ends after as many times as were asked for."""
    async with serve() as client:
        client.server.answer(RESOURCE, 429, retry_after=7, times=2)
        answers = [await client.get(ALL_VMIS) for _ in range(3)]

    assert [answer.status for answer in answers] == [429, 429, 200]
    assert answers[0].headers["Retry-After"] == "7"


async def test_refusals_leave_writing_alone() -> None:
    """Refusing what a watcher does still lets a test write the objects."""
    async with serve() as client:
        client.server.answer(RESOURCE, 403)
        created = await client.post(VMIS, vmi("db1"))

    assert created.status == 201


async def test_garbage_can_be_injected() -> None:
    """Raw bytes go into the open streams, between whole lines."""
    async with serve() as client, client.watch(ALL_VMIS, resourceVersion="2") as stream:
        await client.server.watched(RESOURCE)
        injected = client.server.inject(b"{not json}\n", RESOURCE)
        await client.post(VMIS, vmi("db1"))
        garbage = await stream.raw()

        assert await stream.take(1) == [("ADDED", "db1")]

    assert injected == 1
    assert garbage == b"{not json}\n"


async def test_requests_are_remembered() -> None:
    """A test can see what was asked, in order, with its verb and query."""
    async with serve() as client:
        await client.get(ALL_VMIS, limit=5)
        await client.post(VMIS, vmi("db1"))

        seen = [(asked.verb, dict(asked.query)) for asked in client.server.requests]

    assert seen == [("list", {"limit": "5"}), ("create", {})]


async def test_tokens_are_required_if_set() -> None:
    """With tokens set, a request without one of them is unauthorized."""
    async with serve() as client:
        client.server.tokens = {"good"}
        without = await client.get(ALL_VMIS)
        good = await client.ask("GET", ALL_VMIS, headers={"Authorization": "Bearer good"})

    assert without.status == 401
    assert without.json["message"] == "Unauthorized"
    assert good.status == 200
