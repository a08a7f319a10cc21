"""The simulated API server over HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator

import aiohttp
import pytest

from exporter.demo import store
from tests.support.faulty_apiserver import FaultyApiServer

from .wire import (
    ALL_NODES,
    ALL_PODS,
    ALL_VMIS,
    PODS,
    STREAMING,
    VMIS,
    Client,
    make_store,
    pod,
    serve,
    vmi,
)


pytestmark = pytest.mark.asyncio

RESOURCE = "virtualmachineinstances"


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    """A client of a server with the usual store."""
    async with serve() as one:
        yield one


async def fill(client: Client, count: int) -> None:
    """Create some VMIs."""
    for number in range(count):
        await client.post(VMIS, vmi(f"db{number}"))


class TestObjects:
    """Get, create, update, patch and delete."""

    async def test_one_object_is_created_and_read(self, client: Client) -> None:
        """A created object can be read at its path, with the fields that the server adds."""
        created = await client.post(VMIS, vmi("db1"))
        read = await client.get(f"{VMIS}/db1")

        assert created.status == 201
        assert read.json == created.json
        assert read.json["kind"] == "VirtualMachineInstance"
        assert read.json["metadata"]["namespace"] == "shop"

    async def test_a_missing_object_is_a_status_404(self, client: Client) -> None:
        """For a missing object the answer is a Status 404 that names the resource and its group."""
        answer = await client.get(f"{VMIS}/db1")

        assert answer.status == 404
        assert answer.json == {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": 'virtualmachineinstances.kubevirt.io "db1" not found',
            "reason": "NotFound",
            "details": {"name": "db1", "group": "kubevirt.io", "kind": "virtualmachineinstances"},
            "code": 404,
        }

    async def test_a_namespace_must_exist(self, client: Client) -> None:
        """Creating an object in a missing namespace answers 404 and names the namespace."""
        answer = await client.post(VMIS.replace("shop", "bank"), vmi("db1"))

        assert answer.status == 404
        assert answer.json["message"] == 'namespaces "bank" not found'


class TestLists:
    """Lists, pages and selectors."""

    async def test_a_custom_list_names_the_kind_in_each_item(self, client: Client) -> None:
        """In a list of custom resources the items come before the metadata, and have a kind."""
        await fill(client, 2)
        answer = await client.get(ALL_VMIS)

        assert answer.body.startswith(b'{"apiVersion":"kubevirt.io/v1","items":[{"apiVersion":')
        assert answer.json["metadata"]["continue"] == ""
        assert answer.json["kind"] == "VirtualMachineInstanceList"
        assert answer.names == ["db0", "db1"]

    async def test_pages_show_one_state(self, client: Client) -> None:
        """All pages show the list as it was when the first page was read."""
        await fill(client, 5)
        first = await client.get(ALL_VMIS, limit=2)
        await client.delete(f"{VMIS}/db3")
        await client.post(VMIS, vmi("db9"))
        token = first.json["metadata"]["continue"]
        second = await client.get(ALL_VMIS, **{"limit": 2, "continue": token})
        token = second.json["metadata"]["continue"]
        third = await client.get(ALL_VMIS, **{"limit": 2, "continue": token})

        assert first.json["metadata"]["remainingItemCount"] == 3
        assert first.names + second.names + third.names == ["db0", "db1", "db2", "db3", "db4"]
        assert first.version == second.version == third.version
        assert third.json["metadata"]["continue"] == ""

    async def test_an_expired_page_offers_a_way_on(self, client: Client) -> None:
        """An expired page answers 410, with a token for the rest of the list as it is now."""
        await fill(client, 4)
        first = await client.get(ALL_VMIS, limit=2)
        await client.delete(f"{VMIS}/db2")
        client.server.compact()
        token = first.json["metadata"]["continue"]
        expired = await client.get(ALL_VMIS, **{"limit": 2, "continue": token})
        token = expired.json["metadata"]["continue"]
        rest = await client.get(ALL_VMIS, **{"limit": 2, "continue": token})

        assert expired.status == 410
        assert expired.json["reason"] == "Expired"
        assert expired.json["message"].startswith("The provided continue parameter is too old")
        assert rest.names == ["db3"]

    async def test_version_zero_does_not_page(self, client: Client) -> None:
        """A list with resourceVersion 0 ignores the limit."""
        await fill(client, 3)
        answer = await client.get(ALL_VMIS, limit=1, resourceVersion="0")

        assert len(answer.names) == 3

    @pytest.mark.parametrize(
        ("selector", "names"),
        [
            ("a=1", ["p1", "p2"]),
            ("a==1,b=2", ["p2"]),
            ("a!=1", ["p3"]),
            ("b", ["p2"]),
            ("!b", ["p1", "p3"]),
            ("a in (1, 3)", ["p1", "p2"]),
            ("a notin (1),a", ["p3"]),
        ],
    )
    async def test_labels_select(self, client: Client, selector: str, names: list[str]) -> None:
        """A label selector can compare, list values, or test existence; a comma means "and"."""
        await client.post(PODS, pod("p1", a="1"))
        await client.post(PODS, pod("p2", a="1", b="2"))
        await client.post(PODS, pod("p3", a="2"))
        answer = await client.get(ALL_PODS, labelSelector=selector)

        assert answer.names == names

    async def test_long_answers_are_compressed(self, client: Client) -> None:
        """Answers of 128 KiB or more are compressed if the client accepts that."""
        body = vmi("db1")
        body["metadata"]["annotations"] = {"long": "x" * 200_000}
        await client.post(VMIS, body)
        long = await client.get(ALL_VMIS)
        short = await client.get(ALL_PODS)

        assert long.headers["Content-Encoding"] == "gzip"
        assert long.names == ["db1"]
        assert "Content-Encoding" not in short.headers


class TestWatches:
    """Watches, streaming lists and bookmarks."""

    async def test_past_changes_come_first(self, client: Client) -> None:
        """A watch from an older version first sends the changes since that version."""
        version = (await client.post(VMIS, vmi("db1"))).version
        await client.delete(f"{VMIS}/db1")
        await client.post(VMIS, vmi("db1"))
        async with client.watch(ALL_VMIS, resourceVersion=version) as stream:
            events = await stream.take(2)

        assert events == [("DELETED", "db1"), ("ADDED", "db1")]

    async def test_without_a_version_the_present_comes_first(self, client: Client) -> None:
        """A watch from version 0 or without a version first sends an ADDED for each object."""
        await fill(client, 2)
        for query in ({}, {"resourceVersion": "0"}):
            async with client.watch(ALL_VMIS, **query) as stream:
                assert await stream.take(2) == [("ADDED", "db0"), ("ADDED", "db1")]

    async def test_a_streaming_list_ends_with_a_bookmark(self, client: Client) -> None:
        """A streaming list has every object and then a bookmark with the list's version."""
        await fill(client, 2)
        async with client.watch(ALL_VMIS, **STREAMING) as stream:
            present = await stream.take(2)
            end = await stream.next()
            await client.post(VMIS, vmi("db9"))
            after = await stream.next()

        assert present == [("ADDED", "db0"), ("ADDED", "db1")]
        assert end["type"] == "BOOKMARK"
        assert end["object"]["kind"] == "VirtualMachineInstance"
        assert end["object"]["metadata"]["annotations"] == {"k8s.io/initial-events-end": "true"}
        assert after["object"]["metadata"]["name"] == "db9"
        version = end["object"]["metadata"]["resourceVersion"]
        assert int(version) < int(after["object"]["metadata"]["resourceVersion"])

    async def test_an_old_version_is_an_error_event(self, client: Client) -> None:
        """A watch from a compacted version gets one ERROR event with a Status 410."""
        version = (await client.post(VMIS, vmi("db1"))).version
        await client.post(VMIS, vmi("db2"))
        client.server.compact()
        async with client.watch(ALL_VMIS, resourceVersion=version) as stream:
            event = await stream.next()
            rest = await stream.rest()

        assert event["type"] == "ERROR"
        assert event["object"]["code"] == 410
        assert event["object"]["reason"] == "Expired"
        assert event["object"]["message"] == "too old resource version: 3 (4)"
        assert rest == b""

    async def test_a_watch_from_before_a_restart_is_too_old(self) -> None:
        """After a restart, a watch from an earlier version gets 410."""
        kept = make_store()
        async with serve(kept) as client:
            version = (await client.post(VMIS, vmi("db1"))).version
            await client.post(VMIS, vmi("db2"))
            port = client.server.port
        async with serve(kept, port=port) as client:
            assert client.server.port == port
            async with client.watch(ALL_VMIS, resourceVersion=version) as stream:
                event = await stream.next()

        assert event["object"]["code"] == 410

    async def test_a_selecting_watch_sees_objects_come_and_go(self, client: Client) -> None:
        """An object that begins to match is ADDED; one that no longer matches is DELETED."""
        query = {"labelSelector": "a=1", "resourceVersion": "2"}
        async with client.watch(ALL_PODS, **query) as stream:
            await client.post(PODS, pod("p1"))
            await client.patch(f"{PODS}/p1", {"metadata": {"labels": {"a": "1"}}})
            await client.patch(f"{PODS}/p1", {"metadata": {"labels": {"b": "1"}}})
            last = await client.patch(f"{PODS}/p1", {"metadata": {"labels": {"a": "2"}}})
            events = [await stream.next() for _ in range(3)]

        assert [event["type"] for event in events] == ["ADDED", "MODIFIED", "DELETED"]
        assert events[2]["object"]["metadata"]["labels"] == {"a": "1", "b": "1"}
        assert events[2]["object"]["metadata"]["resourceVersion"] == last.version

    async def test_a_watch_of_cordoned_nodes_sees_them_come_and_go(self, client: Client) -> None:
        """A node is ADDED after a cordon and DELETED after an uncordon."""
        cordoned = {"fieldSelector": "spec.unschedulable=true"}
        await client.post(ALL_NODES, {"metadata": {"name": "n1"}, "spec": {}})
        listed = await client.get(ALL_NODES, **cordoned)
        query = cordoned | {"resourceVersion": listed.version}
        async with client.watch(ALL_NODES, **query) as stream:
            await client.patch(f"{ALL_NODES}/n1", {"spec": {"unschedulable": True}})
            among = await client.get(ALL_NODES, **cordoned)
            await client.patch(f"{ALL_NODES}/n1", {"spec": {"unschedulable": None}})
            events = [await stream.next() for _ in range(2)]

        assert (listed.names, among.names) == ([], ["n1"])
        assert [event["type"] for event in events] == ["ADDED", "DELETED"]

    async def test_a_quiet_stream_gets_bookmarks(self) -> None:
        """A watch that requested bookmarks gets them at their interval."""
        async with serve(bookmark_seconds=0.01) as client:
            query = {"allowWatchBookmarks": "true", "resourceVersion": "2"}
            async with client.watch(ALL_VMIS, **query) as stream:
                version = (await client.post(PODS, pod("p1"))).version
                while (event := await stream.next())["object"]["metadata"][
                    "resourceVersion"
                ] != version:
                    assert event["type"] == "BOOKMARK"

        assert event["type"] == "BOOKMARK"
        assert set(event["object"]["metadata"]) == {"resourceVersion"}

    async def test_a_watch_ends_at_its_timeout(self) -> None:
        """A watch ends after `timeoutSeconds`. It has no bookmarks if it requested none."""
        query = {"timeoutSeconds": "1", "resourceVersion": "2"}
        async with (
            serve(bookmark_seconds=0.01) as client,
            client.watch(ALL_VMIS, **query) as stream,
        ):
            assert await stream.rest() == b""

    async def test_a_watcher_too_slow_for_the_window_is_ended(self) -> None:
        """A watch that is too slow for the window of changes ends without an event."""
        async with (
            serve(make_store(window=5)) as client,
            client.watch(ALL_VMIS, resourceVersion="2") as stream,
        ):
            await client.server.watched(RESOURCE)
            for number in range(50):
                client.server.store.create(
                    store.VMIS, {"metadata": {"namespace": "shop", "name": f"db{number}"}}
                )

            assert await stream.rest() == b""

    async def test_the_end_breaks_open_streams(self) -> None:
        """When the server ends, it breaks its open streams."""
        kept = make_store()
        async with aiohttp.ClientSession() as session:
            async with FaultyApiServer(kept) as server:
                response = await session.get(f"{server.url}{ALL_VMIS}?watch=1&resourceVersion=2")
                await server.watched(RESOURCE)
            with pytest.raises((aiohttp.ClientError, ConnectionError)):
                await response.read()
            response.close()

        assert not kept.listeners
