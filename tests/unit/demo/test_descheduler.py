"""The simulated descheduler, with a fake exporter."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from structlog.testing import capture_logs

from exporter.demo import objects
from exporter.demo.cluster import Cluster
from exporter.demo.descheduler import Descheduler
from exporter.demo.scenario import Scenario
from exporter.demo.store import VMIS
from tests.support.serving import serving

from .facts import NOW, at


pytestmark = pytest.mark.asyncio

Decide = Callable[[dict[str, Any]], list[bool] | int]


class Exporter:
    """A fake exporter that answers as configured, and records the requests."""

    def __init__(self, decide: Decide) -> None:
        self.decide = decide
        self.asked: list[dict[str, Any]] = []

    async def answer(self, request: web.Request) -> web.Response:
        """Answer one request."""
        asked = await request.json()
        self.asked.append(asked)
        decided = self.decide(asked)
        if isinstance(decided, int):
            return web.Response(status=decided, headers={"Retry-After": "1"})
        return web.json_response({"verdicts": [{"allowed": allowed} for allowed in decided]})


class Trial:
    """A cluster whose descheduler asks this exporter."""

    def __init__(self, exporter: Exporter, url: str, session: aiohttp.ClientSession) -> None:
        self.scenario = Scenario(1, 24)
        self.cluster = Cluster(NOW, self.scenario)
        for _ in self.scenario.populate(self.cluster):
            pass
        self.cluster.step(at(5))
        self.exporter = exporter
        self.session = session
        self.descheduler = Descheduler(self.cluster, self.scenario, url, NOW)

    async def cycle(self) -> int:
        """One cycle of the descheduler."""
        return await self.descheduler.cycle(self.session, self.cluster.instant)

    @property
    def marked(self) -> list[str]:
        """The VMs that are marked for eviction."""
        return [
            vmi["metadata"]["name"]
            for vmi in self.cluster.store.objects(VMIS)
            if objects.evacuated_node(vmi)
        ]


def allow_all(asked: dict[str, Any]) -> list[bool]:
    """Allow every candidate."""
    return [True] * len(asked["candidates"])


@asynccontextmanager
async def trial(decide: Decide = allow_all) -> AsyncIterator[Trial]:
    """A descheduler with its own fake exporter."""
    exporter = Exporter(decide)
    app = web.Application()
    app.router.add_post("/v1/verdicts", exporter.answer)
    async with serving(app) as url, aiohttp.ClientSession() as session:
        yield Trial(exporter, url, session)


async def test_it_asks_twice() -> None:
    """A cycle asks at `filter` about all pods of a node, then at `preEviction` about one pod."""
    async with trial() as tried:
        evicted = await tried.cycle()
        asked = tried.exporter.asked

    assert asked[0]["checkpoint"] == "filter"
    assert len(asked[0]["candidates"]) > 1
    assert asked[1]["checkpoint"] == "preEviction"
    assert len(asked[1]["candidates"]) == 1
    assert evicted == len(tried.marked) > 0


@pytest.mark.parametrize("checkpoint", ["filter", "preEviction"])
async def test_it_obeys(checkpoint: str) -> None:
    """A pod that is blocked at either checkpoint is not evicted."""

    def refuse(asked: dict[str, Any]) -> list[bool]:
        return [asked["checkpoint"] != checkpoint] * len(asked["candidates"])

    async with trial(refuse) as tried:
        assert await tried.cycle() == 0
        assert tried.marked == []


async def test_it_leaves_evicting_and_steady_pods_alone() -> None:
    """Pods whose eviction is in progress, and pods of steady VMs, are not candidates."""
    async with trial() as tried:
        await tried.cycle()
        tried.cluster.step(at(5.5))
        names = {
            objects.annotations(pod)[objects.DOMAIN]
            for node in tried.cluster.nodes
            for pod in tried.descheduler.candidates(node, at(5.5))
        }

    assert names
    assert not names & set(tried.marked)
    assert not any(name.startswith("steady") for name in names)


async def test_an_exporter_that_is_not_ready() -> None:
    """After a 503 nothing is evicted. The outage is logged once, and the next cycle asks again."""
    async with trial(lambda _: 503) as tried:
        with capture_logs() as logs:
            first = await tried.cycle()
            second = await tried.cycle()
            tried.exporter.decide = allow_all
            third = await tried.cycle()

    assert (first, second) == (0, 0)
    assert third > 0
    assert [line["event"] for line in logs] == [
        "verdicts_unavailable",
        "verdicts_available",
    ]


async def test_too_few_verdicts_are_no_answer() -> None:
    """After an answer with too few verdicts nothing is evicted."""
    async with trial(lambda _: [True]) as tried:
        with capture_logs():
            assert await tried.cycle() == 0


async def test_a_stock_one_asks_nobody() -> None:
    """Without an exporter the descheduler evicts every pod that it picks, without a request."""
    async with trial(lambda asked: [False] * len(asked["candidates"])) as tried:
        stock = Descheduler(tried.cluster, tried.scenario, None, NOW)
        evicted = await stock.cycle(tried.session, tried.cluster.instant)

    assert evicted == len(tried.marked) > 0
    assert tried.exporter.asked == []


@pytest.mark.parametrize("allowed", [True, False])
async def test_its_evictions_go_through_the_webhook(allowed: bool) -> None:
    """The webhook reviews each eviction. A denial is logged once per VM."""
    asked: list[dict[str, Any]] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(await request.json())
        status = {} if allowed else {"status": {"code": 429, "message": "cooldown"}}
        return web.json_response({"response": {"uid": "x", "allowed": allowed, **status}})

    app = web.Application()
    app.router.add_post("/v1/evictions", answer)
    async with trial() as tried, serving(app) as url:
        stock = Descheduler(tried.cluster, tried.scenario, None, NOW, webhook_url=url)
        with capture_logs() as logs:
            evicted = [
                await stock.cycle(tried.session, tried.cluster.instant)
                for _ in range(1 if allowed else 2)
            ]

    pods = {review["request"]["name"] for review in asked}
    assert all(pod.startswith("virt-launcher-") for pod in pods)
    assert (sum(evicted) > 0) is allowed
    assert len(tried.marked) == sum(evicted)
    assert [line["error"] for line in logs] == (
        [] if allowed else ["denied by the webhook: cooldown"] * len(pods)
    )


async def test_a_webhook_that_is_not_there_lets_evictions_pass() -> None:
    """If the webhook does not answer, evictions are allowed, as with `failurePolicy: Ignore`."""
    async with trial() as tried:
        nobody = "http://127.0.0.1:1"
        stock = Descheduler(tried.cluster, tried.scenario, None, NOW, webhook_url=nobody)
        with capture_logs() as logs:
            evicted = await stock.cycle(tried.session, tried.cluster.instant)

    assert evicted > 0
    assert {line["event"] for line in logs} == {"webhook_failed_open"}
