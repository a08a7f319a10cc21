"""The watch, with the same tests on the simulated and the real API server."""

import asyncio
import gc
import json
import random
import time
from functools import partial
from typing import Any

import pytest
from aiohttp import web

from exporter.engine.facts.model import (
    DRAIN_TAINT,
    KubeVirtSettings,
    MigrationLimits,
    Node,
    Resource,
    Taint,
)
from exporter.engine.facts.trust import Trust
from exporter.health import Restart, Watched
from exporter.kube.client import ApiServer, Overloaded
from exporter.kube.login import Login
from exporter.kube.objects.kubevirt import Changed, parse_event
from exporter.kube.watch.feed import Listing
from exporter.kube.watch.recovery import ExponentialBackoff
from exporter.kube.watch.reflector import FUTILE_TRIES, Reflector
from tests.cluster import KUBEVIRTS, PODS, VMIMS, VMIS, launcher_pod, vmi, vmim
from tests.cluster.resources import NODES
from tests.support.api_servers import SimulatedStage, Stage
from tests.support.relay import Gate
from tests.support.serving import serving
from tests.support.watching import Paging, following


def _has_moved(watched: Watched, contact: float | None) -> bool:
    return watched.contact != contact


class Brisk(Reflector):
    """A reflector whose pauses are short."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._backoff = ExponentialBackoff(random.Random(1), first=0.01, most=0.1)


@pytest.mark.parametrize(
    ("value", "seconds"),
    [("1", 1.0), ("60", 60.0), ("61", 60.0), ("86400", 60.0), ("9" * 400, 60.0), ("soon", 0.0)],
    ids=["a-second", "a-minute", "more", "a-day", "for-ever", "no-number"],
)
async def test_retry_after_is_believed_up_to_a_minute(value: str, seconds: float) -> None:
    """A Retry-After is respected up to one minute."""

    async def refuse(_request: web.Request) -> web.Response:
        return web.Response(status=429, headers={"Retry-After": value})

    app = web.Application()
    app.router.add_get("/{path:.*}", refuse)
    async with (
        serving(app) as url,
        ApiServer(Login(url=url), read_timeout=5.0) as api,
    ):
        with pytest.raises(Overloaded) as refused:
            await api.list_page(Resource.VMIS, None, limit=1, token="")
    assert refused.value.retry_after == seconds


class TestOnBothServers:
    """The tests for both API servers."""

    async def test_reads_what_was_there_before(self, stage: Stage) -> None:
        """Objects that existed before the start are in the first list."""
        namespace = await stage.make_namespace()
        made = await stage.admin.create(VMIS, vmi("old", namespace))
        await stage.admin.create(VMIMS, vmim("m", namespace, of="old"))
        await stage.admin.create(PODS, launcher_pod(made))
        async with following(stage.login, namespaces=(namespace,)) as watch:
            await watch.ready()
            evidence = watch.store.evidence(namespace, "old", Trust())

        assert evidence is not None
        assert evidence.vmi.node == "n1"
        assert [vmim.name for vmim in evidence.vmims] == ["m"]
        assert evidence.launcher is not None
        assert evidence.launcher.ready

    async def test_the_names_of_a_list_do_not_outlive_it(self, stage: Stage) -> None:
        """The names of a list are freed when the watch begins."""
        namespace = await stage.make_namespace()
        await stage.admin.create(VMIS, vmi("old", namespace))
        async with following(stage.login, namespaces=(namespace,)) as watch:
            await watch.ready()
            lists = [value for value in gc.get_objects() if type(value) is Listing]

        assert lists
        assert all(namespace not in listing.names for listing in lists)

    async def test_follows_creations_changes_and_deletions(self, stage: Stage) -> None:
        """Changes after the list are read by the watch, without another list."""
        namespace = await stage.make_namespace()
        async with following(stage.login, namespaces=(namespace,)) as watch:
            await watch.ready()
            await stage.admin.create(VMIS, vmi("a", namespace))
            await stage.admin.create(VMIS, vmi("b", namespace))
            await watch.knows(namespace, "a", "b")
            await stage.admin.merge(VMIS, namespace, "a", {"status": {"nodeName": "n7"}})
            await watch.until(
                lambda: (vmi := watch.store.vmi((namespace, "a"))) and vmi.node == "n7",
                what="a on n7",
            )
            await stage.admin.delete(VMIS, namespace, "b")
            await watch.knows(namespace, "a")
            assert [vmis.lists for vmis in watch.health.of(Resource.VMIS)] == [1]

    async def test_lists_in_pages_where_asked_to(
        self, stage: Stage, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A list of five objects in pages of two is complete, and the watch continues from it."""
        monkeypatch.setattr("exporter.kube.watch.reflector.PAGE_SIZE", 2)
        namespace = await stage.make_namespace()
        for number in range(5):
            await stage.admin.create(VMIS, vmi(f"v{number}", namespace))
        async with following(stage.login, namespaces=(namespace,), reflector=Paging) as watch:
            await watch.ready()
            assert watch.names(namespace) == {f"v{number}" for number in range(5)}
            await stage.admin.create(VMIS, vmi("later", namespace))
            await watch.until(lambda: "later" in watch.names(namespace), what="later")
            assert [vmis.lists for vmis in watch.health.of(Resource.VMIS)] == [1]

    async def test_lists_anew_when_its_version_is_gone(self, stage: Stage) -> None:
        """After a 410 a new list replaces the objects, so missed deletions are applied."""
        namespace = await stage.make_namespace()
        await stage.admin.create(VMIS, vmi("stays", namespace))
        await stage.admin.create(VMIS, vmi("goes", namespace))
        async with (
            Gate(stage.url) as gate,
            following(stage.login_at(gate.url), namespaces=(namespace,)) as watch,
        ):
            await watch.ready()
            await gate.shut()
            await stage.admin.delete(VMIS, namespace, "goes")
            await stage.admin.create(VMIS, vmi("comes", namespace))
            await stage.force_gone()
            assert watch.names(namespace) == {"stays", "goes"}
            gate.open()
            await watch.knows(namespace, "stays", "comes")
            assert watch.restarts(Resource.VMIS)[Restart.EXPIRED] >= 1
            assert watch.health.of(Resource.VMIS)[0].lists == 2

    async def test_resumes_after_a_long_outage(self, stage: Stage) -> None:
        """After an outage the watch resumes from its last version, without a new list."""
        namespace = await stage.make_namespace()
        await stage.admin.create(VMIS, vmi("gone", namespace))
        async with (
            Gate(stage.url) as gate,
            following(stage.login_at(gate.url), namespaces=(namespace,), reflector=Brisk) as watch,
        ):
            await watch.ready()
            await gate.shut()
            await watch.until(
                lambda: (
                    watch.restarts(Resource.VMIS).get(Restart.UNREACHABLE, 0) > 2 * FUTILE_TRIES
                ),
                what="many failed attempts",
            )
            await stage.admin.create(VMIS, vmi("a", namespace))
            await stage.admin.delete(VMIS, namespace, "gone")
            gate.open()
            await watch.knows(namespace, "a")
            assert Restart.NO_PROGRESS not in watch.restarts(Resource.VMIS)
            assert watch.health.of(Resource.VMIS)[0].lists == 1

    async def test_outlives_a_connection_that_is_half_open(self, stage: Stage) -> None:
        """A connection without data is closed after the read timeout."""
        namespace = await stage.make_namespace()
        async with (
            Gate(stage.url) as gate,
            following(stage.login_at(gate.url), namespaces=(namespace,), read_timeout=1.5) as watch,
        ):
            await watch.ready()
            gate.stall()
            await stage.admin.create(VMIS, vmi("a", namespace))
            await watch.until(
                lambda: watch.restarts(Resource.VMIS).get(Restart.SILENT), what="silence"
            )
            gate.open()
            await watch.knows(namespace, "a")

    async def test_watches_the_named_namespaces_only(self, stage: Stage) -> None:
        """In namespaced mode another namespace's VMIs are not known."""
        mine, other = await stage.make_namespace(), await stage.make_namespace()
        await stage.admin.create(VMIS, vmi("a", mine))
        await stage.admin.create(VMIS, vmi("a", other))
        async with following(stage.login, namespaces=(mine,)) as watch:
            await watch.ready()
            assert watch.names(other) == set()
            assert watch.names(mine) == {"a"}

    async def test_watches_schedulable_nodes_too(self, stage: Stage) -> None:
        """A node that is not cordoned is watched too: a taint may drain it."""
        name = f"{await stage.make_namespace()}-node"
        node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}, "spec": {}}
        await stage.admin.create(NODES, node)
        taint = {"key": DRAIN_TAINT, "effect": "NoSchedule"}
        try:
            async with ApiServer(stage.login, read_timeout=20.0) as api:
                listed = json.loads(await api.list_page(Resource.NODES, None, limit=9, token=""))
                await stage.admin.merge(NODES, None, name, {"spec": {"taints": [taint]}})
                version = listed["metadata"]["resourceVersion"]
                async with (
                    asyncio.timeout(20.0),
                    api.watch(Resource.NODES, None, resource_version=version, seconds=20) as sent,
                ):
                    first = parse_event(Resource.NODES, (await anext(sent))[0])
        finally:
            await stage.admin.delete(NODES, None, name)
        assert isinstance(first, Changed)
        assert first.fact == Node(name=name, taints=(Taint(DRAIN_TAINT),))

    async def test_reads_kubevirts_migration_limits(self, stage: Stage) -> None:
        """The limits of the KubeVirt object are read; missing ones have KubeVirt's defaults."""
        namespace = await stage.make_namespace()
        body = {
            "apiVersion": "kubevirt.io/v1",
            "kind": "KubeVirt",
            "metadata": {"name": "kubevirt", "namespace": namespace},
            "spec": {"configuration": {"migrations": {"parallelMigrationsPerCluster": 9}}},
        }
        await stage.admin.create(KUBEVIRTS, body)
        try:
            async with following(stage.login, namespaces=(namespace,)) as watch:
                await watch.ready()
                expected = KubeVirtSettings(MigrationLimits(9, 2), namespace=namespace)
                assert watch.store.kubevirt == expected
        finally:
            await stage.admin.delete(KUBEVIRTS, namespace, "kubevirt")


class TestOnTheSimulatedServer:
    """Faults that a real server does not have."""

    async def test_pages_where_streaming_lists_are_refused(self, simulated: SimulatedStage) -> None:
        """Without the WatchList feature, a streaming list is tried once; then pages are used."""
        namespace = await simulated.make_namespace()
        await simulated.admin.create(VMIS, vmi("a", namespace))
        simulated.server.refuse_streaming_lists()
        async with following(simulated.login) as watch:
            await watch.ready()
            assert watch.names(namespace) == {"a"}
            asked = [row for row in simulated.server.requests if row.resource.plural == VMIS.plural]
            streamed = [row for row in asked if "sendInitialEvents" in row.query]
            assert len(streamed) == 1
            assert any("limit" in request.query for request in asked)

    @pytest.mark.parametrize(
        "line",
        [
            b'{"type":"BOOKMARK","object":{"metadata":{"resourceVersion":"9"}}}\n',
            b'{"type":"MODIFIED","object":{"metadata":{"name":"x","uid":"u"}}}\n',
            b'{"type":"DELETED","object":{"metadata":{"name":"x","uid":"u"}}}\n',
        ],
        ids=["bookmark", "modified", "deleted"],
    )
    async def test_pages_where_streaming_lists_are_ignored(
        self, simulated: SimulatedStage, line: bytes
    ) -> None:
        """If a server ignores `sendInitialEvents`, objects are listed in pages."""

        async def ignore(request: web.Request) -> web.StreamResponse:
            if "sendInitialEvents" not in request.query:
                raise web.HTTPTemporaryRedirect(simulated.url + str(request.rel_url))
            response = web.StreamResponse()
            await response.prepare(request)
            await response.write(line)
            await asyncio.sleep(60)
            return response

        namespace = await simulated.make_namespace()
        await simulated.admin.create(VMIS, vmi("a", namespace))
        app = web.Application()
        app.router.add_get("/{path:.*}", ignore)
        async with (
            serving(app) as url,
            following(Login(url=url)) as watch,
        ):
            await watch.ready()
            assert watch.names(namespace) == {"a"}

    async def test_opening_a_watch_is_no_contact(self, simulated: SimulatedStage) -> None:
        """A watch that opens and fails at once does not count as contact; a list follows later."""
        tries: list[tuple[str, float | None]] = []

        async def err(request: web.Request) -> web.StreamResponse:
            if "watch" not in request.query or VMIS.plural not in request.path:
                raise web.HTTPTemporaryRedirect(simulated.url + str(request.rel_url))
            if "sendInitialEvents" in request.query:
                return web.json_response({"message": "no"}, status=400)
            contact = watch.health.of(Resource.VMIS)[0].contact
            tries.append((request.query["resourceVersion"], contact))
            status = {"kind": "Status", "code": 500, "message": "no", "reason": "InternalError"}
            return web.Response(text=json.dumps({"type": "ERROR", "object": status}) + "\n")

        namespace = await simulated.make_namespace()
        app = web.Application()
        app.router.add_get("/{path:.*}", err)
        async with (
            serving(app) as url,
            following(Login(url=url), reflector=Brisk) as watch,
        ):
            await watch.ready()
            await simulated.admin.create(VMIS, vmi("a", namespace))
            await watch.knows(namespace, "a")
            await watch.until(lambda: len(tries) > FUTILE_TRIES, what="tries after a second list")
            first = [attempt for attempt in tries if attempt[0] == tries[0][0]]
            assert FUTILE_TRIES - 1 <= len(first) <= FUTILE_TRIES
            assert set(first) == {tries[0]}, "the contact is that of the list"
            assert watch.restarts(Resource.VMIS)[Restart.NO_PROGRESS] >= 1

    async def test_a_line_is_progress(self, simulated: SimulatedStage) -> None:
        """A watch that breaks often, but gets events each time, needs no new list."""
        async with following(simulated.login, reflector=Brisk) as watch:
            await watch.ready()
            vmis = watch.health.of(Resource.VMIS)[0]
            for _ in range(FUTILE_TRIES + 2):
                await simulated.server.watched(VMIS.plural)
                contact = vmis.contact
                await watch.until(partial(_has_moved, vmis, contact), what="a bookmark")
                simulated.server.cut(VMIS.plural)
            await simulated.server.watched(VMIS.plural)
            assert vmis.lists == 1
            assert watch.restarts(Resource.VMIS) == {Restart.UNREACHABLE: FUTILE_TRIES + 2}

    async def test_credentials_that_are_refused_lose_no_namespace(
        self, simulated: SimulatedStage
    ) -> None:
        """After a 401 no namespace is given up."""
        namespaces = (await simulated.make_namespace(), await simulated.make_namespace())
        async with following(
            simulated.login, namespaces=namespaces, reflector=Brisk, rejected_retry=60.0
        ) as watch:
            await watch.ready()
            simulated.server.answer(VMIS.plural, 401)
            simulated.server.cut(VMIS.plural)
            await watch.until(
                lambda: watch.restarts(Resource.VMIS).get(Restart.DENIED, 0) >= 20, what="401s"
            )
            assert not watch.health.lost_namespaces

    async def test_the_last_namespace_is_not_given_up(self, simulated: SimulatedStage) -> None:
        """If every namespace is forbidden, the last one is still tried."""
        namespaces = (await simulated.make_namespace(), await simulated.make_namespace())
        async with following(
            simulated.login, namespaces=namespaces, reflector=Brisk, rejected_retry=60.0
        ) as watch:
            await watch.ready()
            simulated.server.answer(VMIS.plural, 403)
            simulated.server.cut(VMIS.plural)
            await watch.until(lambda: watch.health.lost_namespaces, what="a loss")
            before = watch.restarts(Resource.VMIS)[Restart.DENIED]
            await watch.until(
                lambda: watch.restarts(Resource.VMIS)[Restart.DENIED] > before + 9, what="tries"
            )
            assert len(watch.health.lost_namespaces) == 1
            assert watch.health.ready

    async def test_knows_of_a_vmi_whose_status_cannot_be_read(
        self, simulated: SimulatedStage
    ) -> None:
        """A VMI with an invalid status is known, and its eviction is allowed."""
        namespace = await simulated.make_namespace()
        body = vmi("odd", namespace)
        body["status"]["migrationState"] = "oops"
        await simulated.admin.create(VMIS, body)
        async with following(simulated.login) as watch:
            await watch.ready()
            verdict = watch.verdict(namespace, "odd", time.time())
            assert verdict is not None
            assert verdict.allowed
            assert watch.invalid_objects(Resource.VMIS) == 1

    async def test_refuses_garbage_and_goes_on(self, simulated: SimulatedStage) -> None:
        """Invalid lines are counted and the watch goes on."""
        namespace = await simulated.make_namespace()
        async with following(simulated.login) as watch:
            await watch.ready()
            await simulated.server.watched(VMIS.plural)
            for line in (
                b"this is not JSON\n",
                b'{"type":"SHRUGGED","object":{"metadata":{"name":"x"}}}\n',
                b'{"type":"ADDED"}\n',
                b"[]\n\n\xff\xfe\n",
            ):
                simulated.server.inject(line, VMIS.plural)
            await simulated.admin.create(VMIS, vmi("a", namespace))
            await watch.knows(namespace, "a")
            assert watch.invalid_objects(Resource.VMIS) == 5
            assert watch.restarts(Resource.VMIS) == {}

    async def test_resumes_a_stream_cut_in_the_middle_of_a_line(
        self, simulated: SimulatedStage
    ) -> None:
        """An unfinished line of a broken stream is ignored, and later objects are still read."""
        namespace = await simulated.make_namespace()
        async with following(simulated.login) as watch:
            await watch.ready()
            await simulated.server.watched(VMIS.plural)
            assert simulated.server.cut(VMIS.plural, mid_line=True) == 1
            await simulated.admin.create(VMIS, vmi("a", namespace))
            await watch.knows(namespace, "a")
            assert watch.invalid_objects(Resource.VMIS) == 0

    async def test_waits_as_long_as_an_overloaded_server_asks(
        self, simulated: SimulatedStage
    ) -> None:
        """A 429 is retried after its Retry-After."""
        simulated.server.answer(VMIS.plural, 429, retry_after=1, times=1)
        began = time.monotonic()
        async with following(simulated.login) as watch:
            await watch.ready()
            assert time.monotonic() - began >= 1
            assert watch.restarts(Resource.VMIS) == {Restart.OVERLOADED: 1}

    async def test_retries_a_server_that_fails(self, simulated: SimulatedStage) -> None:
        """A 500 is retried after a pause."""
        simulated.server.answer(VMIS.plural, 500, times=2)
        async with following(simulated.login) as watch:
            await watch.ready()
            assert watch.restarts(Resource.VMIS) == {Restart.UNREACHABLE: 2}

    async def test_sees_what_is_permitted_later(self, simulated: SimulatedStage) -> None:
        """A forbidden resource is tried again, and used once it is permitted."""
        simulated.server.answer(PODS.plural, 403)
        async with following(simulated.login, rejected_retry=0.1) as watch:
            await watch.ready()
            assert watch.health.is_rejected(Resource.PODS)
            simulated.server.recover(PODS.plural)
            await watch.until(lambda: watch.health.is_seen(Resource.PODS), what="pods seen")
            assert not watch.health.is_rejected(Resource.PODS)

    async def test_believes_no_passing_refusal(self, simulated: SimulatedStage) -> None:
        """After two 404 answers during the start, VMIMs are still read."""
        simulated.server.answer(VMIMS.plural, 404, times=2)
        async with following(simulated.login) as watch:
            await watch.ready()
            assert watch.health.is_seen(Resource.VMIMS)

    async def test_waits_for_kubevirt_where_told_to(self, simulated: SimulatedStage) -> None:
        """With `kube.waitForKubeVirt` the watch waits longer for VMIs than the sync timeout."""
        simulated.server.answer(VMIS.plural, 404)
        async with following(simulated.login, wait_for_kubevirt=True, sync_timeout=0.5) as watch:
            await watch.until(
                lambda: watch.restarts(Resource.VMIS).get(Restart.ABSENT, 0) >= 5, what="404s"
            )
            simulated.server.recover()
            await watch.ready()
