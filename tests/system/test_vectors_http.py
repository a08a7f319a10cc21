"""The vectors through a simulated API server and the exporter's HTTP API."""

import asyncio
import random
from datetime import UTC, datetime
from typing import Any

import aiohttp
import pytest

from exporter import app
from exporter.engine.facts.model import Resource
from exporter.kube.login import Login
from exporter.settings import read_settings
from tests.cluster import NAMESPACES, VMIMS, VMIS, namespace, poll, vmi
from tests.support.api_servers import SimulatedStage
from tests.support.builders import NOW
from tests.support.program import ANYWHERE
from tests.unit.engine.verdicts.test_vectors import DIFFERENCES
from tests.vectors import Kind, Probe, Sighting, all_probes


SERVED = {Resource.VMIS: VMIS, Resource.VMIMS: VMIMS}
FIELDS = {
    "filter": ("filter", "allowed"),
    "preEvictionFilter": ("preEviction", "allowed"),
    "effective_cooldown_seconds": ("preEviction", "effectiveCooldownSeconds"),
    "migration_count": ("preEviction", "migrationsInWindow"),
}


@pytest.mark.parametrize("probe", all_probes(), ids=lambda probe: probe.id)
async def test_verdict_over_http(simulated: SimulatedStage, probe: Probe) -> None:
    """For the objects of each test vector, POST /v1/verdicts answers the vector's verdict."""
    difference = DIFFERENCES.get(probe.id)
    expected = dict(probe.expected if difference is None else difference.ours)
    assert await answer(simulated, probe) == expected


async def answer(stage: SimulatedStage, probe: Probe) -> dict[str, Any]:
    """The running exporter's answer to a probe, in the vectors' format."""
    settings = read_settings({"policy": probe.policy, **ANYWHERE})
    sightings = probe.sightings(NOW)
    for name in ("default", "other-ns"):
        await stage.admin.create(NAMESPACES, namespace(name))
    for sighting in sightings:
        if sighting.kind is Kind.LISTED:
            await stage.admin.create(SERVED[sighting.resource], sighting.object)
    bound: asyncio.Future[app.Listening] = asyncio.get_running_loop().create_future()
    stop = asyncio.Event()
    running = asyncio.create_task(
        app.run(
            settings,
            Login(url=stage.url),
            stop,
            clock=lambda: probe.at(NOW),
            rng=random.Random(1),
            on_listening=bound.set_result,
        )
    )
    try:
        url = (await bound).query[0]
        async with aiohttp.ClientSession(url) as session:
            await poll(lambda: _is_ready(session), what="ready")
            for sighting in sightings:
                if sighting.kind is not Kind.LISTED:
                    await _replace(stage, sighting)
            await stage.admin.create(VMIS, vmi("last-of-all"))
            await poll(lambda: _knows(session, "last-of-all"), what="the last VMI")
            return await _ask(session, probe)
    finally:
        stop.set()
        await running


async def _replace(stage: SimulatedStage, sighting: Sighting) -> None:
    served, metadata = SERVED[sighting.resource], sighting.object["metadata"]
    now = await stage.admin.get(served, metadata["namespace"], metadata["name"])
    own = {key: now["metadata"][key] for key in ("uid", "resourceVersion")}
    await stage.admin.replace(served, {**sighting.object, "metadata": {**metadata, **own}})


async def _ask(session: aiohttp.ClientSession, probe: Probe) -> dict[str, Any]:
    namespace, name = probe.candidate or ("default", "no-launcher-of-any-vmi")
    answers = {}
    for checkpoint in ("filter", "preEviction"):
        body = {
            "checkpoint": checkpoint,
            "candidates": [{"namespace": namespace, "name": name}],
        }
        async with session.post("/v1/verdicts", json=body) as response:
            assert response.status == 200
            answered = await response.json()
        assert answered["asOf"].startswith(
            datetime.fromtimestamp(probe.at(NOW), UTC).strftime("%Y-%m-%dT%H:%M:%S")
        )
        answers[checkpoint] = answered["verdicts"][0]
    found = {}
    for field in probe.expected:
        checkpoint, key = FIELDS[field]
        value = answers[checkpoint][key]
        found[field] = ("allow" if value else "deny") if key == "allowed" else value
    return found


async def _is_ready(session: aiohttp.ClientSession) -> bool:
    async with session.get("/readyz") as response:
        return response.status == 200


async def _knows(session: aiohttp.ClientSession, name: str) -> bool:
    async with session.get(f"/v1/vmis/default/{name}") as response:
        return response.status == 200
