"""The simulated API server over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest

from exporter.demo import store
from tests.cluster import NAMESPACES, PATIENCE, PODS, VMIS, ApiError, Client, namespace, vmi
from tests.cluster.objects import Object
from tests.support.api_servers import Nobody, SimulatedStage
from tests.support.faulty_apiserver import FaultyApiServer

from .facts import make_store


pytestmark = pytest.mark.asyncio


@pytest.fixture
async def served(simulated: SimulatedStage) -> SimulatedStage:
    """A server with the namespace `shop`."""
    await simulated.admin.create(NAMESPACES, namespace("shop"))
    return simulated


def pod(name: str, **labels: str) -> Object:
    """A small pod."""
    containers = [{"name": "compute", "image": "launcher"}]
    metadata = {"namespace": "shop", "name": name, "labels": labels}
    return {"metadata": metadata, "spec": {"containers": containers}}


async def fill(client: Client, count: int) -> None:
    """Create some VMIs."""
    for number in range(count):
        await client.create(VMIS, vmi(f"db{number}", "shop"))


def names(listed: Object) -> list[str]:
    """The names of the items of a list."""
    return [item["metadata"]["name"] for item in listed["items"]]


def version(seen: Object) -> str:
    """The resourceVersion of an object or a list."""
    return str(seen["metadata"]["resourceVersion"])


async def take(events: AsyncIterator[Object], count: int) -> list[Object]:
    """The next `count` events of a watch, or fewer if the watch ends before."""
    taken: list[Object] = []
    async with asyncio.timeout(PATIENCE):
        while len(taken) < count and (event := await anext(events, None)) is not None:
            taken.append(event)
    return taken


def outline(events: Sequence[Object]) -> list[tuple[str, str]]:
    """The type and name of each event."""
    return [(event["type"], event["object"]["metadata"]["name"]) for event in events]


class TestObjects:
    """Creating and reading single objects."""

    async def test_a_missing_object_is_a_status_404(self, served: SimulatedStage) -> None:
        """For a missing object the answer is a Status 404 that names the resource and its group."""
        with pytest.raises(ApiError) as refused:
            await served.admin.get(VMIS, "shop", "db1")

        assert refused.value.code == 404
        assert refused.value.status == {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": 'virtualmachineinstances.kubevirt.io "db1" not found',
            "reason": "NotFound",
            "details": {"name": "db1", "group": "kubevirt.io", "kind": "virtualmachineinstances"},
            "code": 404,
        }

    async def test_a_namespace_must_exist(self, served: SimulatedStage) -> None:
        """Creating an object in a missing namespace answers 404 and names the namespace."""
        with pytest.raises(ApiError, match=r'^404: namespaces "bank" not found$'):
            await served.admin.create(VMIS, vmi("db1", "bank"))


class TestLists:
    """Lists, pages and selectors."""

    async def test_pages_show_one_state(self, served: SimulatedStage) -> None:
        """All pages show the list as it was when the first page was read."""
        await fill(served.admin, 5)
        pages = [await served.admin.list(VMIS, limit=2)]
        await served.admin.delete(VMIS, "shop", "db3")
        await served.admin.create(VMIS, vmi("db9", "shop"))
        while token := pages[-1]["metadata"]["continue"]:
            pages.append(await served.admin.list(VMIS, **{"limit": 2, "continue": token}))

        assert pages[0]["metadata"]["remainingItemCount"] == 3
        assert list(map(names, pages)) == [["db0", "db1"], ["db2", "db3"], ["db4"]]
        assert len(set(map(version, pages))) == 1

    async def test_an_expired_page_offers_a_way_on(self, served: SimulatedStage) -> None:
        """The answer for an expired page is 410, with a token for the rest of the current list."""
        await fill(served.admin, 4)
        first = await served.admin.list(VMIS, limit=2)
        await served.admin.delete(VMIS, "shop", "db2")
        served.server.compact()
        token = first["metadata"]["continue"]
        with pytest.raises(
            ApiError, match=r"^410: The provided continue parameter is too old"
        ) as e:
            await served.admin.list(VMIS, **{"limit": 2, "continue": token})
        token = e.value.status["metadata"]["continue"]
        rest = await served.admin.list(VMIS, **{"limit": 2, "continue": token})

        assert e.value.status["reason"] == "Expired"
        assert names(rest) == ["db3"]

    async def test_version_zero_does_not_page(self, served: SimulatedStage) -> None:
        """A list with resourceVersion 0 ignores the limit."""
        await fill(served.admin, 3)

        assert len(names(await served.admin.list(VMIS, limit=1, resourceVersion="0"))) == 3

    @pytest.mark.parametrize(
        ("selector", "selected"),
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
    async def test_labels_select(
        self, served: SimulatedStage, selector: str, selected: list[str]
    ) -> None:
        """A label selector can compare, list values, or test existence; a comma means "and"."""
        await served.admin.create(PODS, pod("p1", a="1"))
        await served.admin.create(PODS, pod("p2", a="1", b="2"))
        await served.admin.create(PODS, pod("p3", a="2"))

        assert names(await served.admin.list(PODS, labelSelector=selector)) == selected


class TestWatches:
    """Watches, streaming lists and bookmarks."""

    @pytest.mark.parametrize("restarted", [False, True], ids=["compacted", "restarted"])
    async def test_an_old_version_is_an_error_event(
        self, served: SimulatedStage, restarted: bool
    ) -> None:
        """A watch from a version before a compaction or restart gets one ERROR event, code 410."""
        old = version(await served.admin.create(VMIS, vmi("db1", "shop")))
        await served.admin.create(VMIS, vmi("db2", "shop"))
        if restarted:
            await served.restart()
        else:
            served.server.compact()
        async with served.admin.watch(VMIS, resourceVersion=old) as events:
            (event,) = await take(events, 2)

        assert event["type"] == "ERROR"
        assert event["object"]["code"] == 410
        assert event["object"]["reason"] == "Expired"
        assert event["object"]["message"] == "too old resource version: 3 (4)"

    async def test_a_selecting_watch_sees_objects_come_and_go(self, served: SimulatedStage) -> None:
        """A watch with a selector sends ADDED for a new match, and DELETED when a match ends."""
        async with served.admin.watch(PODS, labelSelector="a=1", resourceVersion="2") as events:
            last = await served.admin.create(PODS, pod("p1"))
            for label in ({"a": "1"}, {"b": "1"}, {"a": "2"}):
                last = await served.admin.merge(PODS, "shop", "p1", {"metadata": {"labels": label}})
            seen = await take(events, 3)

        assert [event["type"] for event in seen] == ["ADDED", "MODIFIED", "DELETED"]
        assert seen[2]["object"]["metadata"]["labels"] == {"a": "1", "b": "1"}
        assert version(seen[2]["object"]) == version(last)

    async def test_a_watcher_too_slow_for_the_window_is_ended(self) -> None:
        """A watch that falls behind the window of stored changes ends without an event."""
        async with (
            FaultyApiServer(make_store(window=5)) as server,
            Client(server.url, Nobody()) as client,
            client.watch(VMIS, resourceVersion="2") as events,
        ):
            await server.watched(VMIS.plural)
            for number in range(50):
                server.store.create(store.VMIS, vmi(f"db{number}", "shop"))

            assert await take(events, 1) == []
