"""What it costs the exporter to list and follow Evictions, on a real API server."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

import pytest

from exporter.demo.objects import Object, format_time
from tests.cluster import EXPORTER_READS, PODS, VMIS, RealCluster, launcher_pod, vmi
from tests.cluster.eviction_requests import SERVED
from tests.cluster.resources import EVICTIONS
from tests.integration.deploy.server import APPLY
from tests.support.program import Program, program


T = TypeVar("T")
R = TypeVar("R")

REQUESTER, RESPONDER = "example.com/drain", "imperative-eviction.k8s.io/evictor"
NAMESPACE = "asked"
PRESENT = "kubevirt_eviction_exporter_eviction_requests"
MIB = 2**20
AT_ONCE = 20
"""How many objects are written at a time."""
NODES = 100


@dataclass(frozen=True)
class Cost:
    """What a process needs: memory and CPU time until it has listed all, and for a later scrape."""

    memory: int
    start: float
    scrape: float


def observing(mode: str) -> Object:
    """A configuration with this mode."""
    return {"evictionRequests": {"mode": mode}}


async def measure(exporter: Program) -> Cost:
    """Wait until everything is listed, and scrape twice."""
    await exporter.ready()
    await exporter.until("/v1/status", lambda _, body: all(r["synced"] for r in body["resources"]))
    await exporter.sample(PRESENT)
    start = exporter.cpu()
    await exporter.sample(PRESENT)
    return Cost(exporter.resident(), start, exporter.cpu() - start)


def build_eviction(pod: Object) -> Object:
    """An Eviction of a pod as Kubernetes' controller writes it, while its evictor is active."""
    place, now = pod["metadata"], format_time(datetime.now(UTC))
    waits = {"status": "False", "reason": "AwaitingEviction", "message": ""}
    return {
        "apiVersion": EVICTIONS.api_version,
        "kind": EVICTIONS.kind,
        "metadata": {
            "name": f"pod-1-{place['name']}",
            "namespace": place["namespace"],
            "labels": {REQUESTER: "requester", RESPONDER: "responder"},
        },
        "spec": {"target": {"pod": {"name": place["name"], "uid": place["uid"]}}},
        "status": {
            "observedGeneration": 1,
            "requesters": [{"name": REQUESTER, "intent": "Eviction"}],
            "targetResponders": [{"name": RESPONDER, "priority": 100, "state": "Active"}],
            "responders": [{"name": RESPONDER, "startTime": now}],
            "conditions": [
                {"type": kind, "lastTransitionTime": now, **waits}
                for kind in ("Failed", "TargetEvicted")
            ],
        },
    }


async def report(cluster: RealCluster, eviction: Object, message: str) -> None:
    """Write a heartbeat with a message into an Eviction, as its responder does."""
    place = eviction["metadata"]
    heartbeat = format_time(datetime.now(UTC))
    entry = {"name": RESPONDER, "heartbeatTime": heartbeat, "message": message}
    body = {
        "apiVersion": EVICTIONS.api_version,
        "kind": EVICTIONS.kind,
        "metadata": {"name": place["name"]},
        "status": {"responders": [entry]},
    }
    await cluster.admin.request(
        "PATCH",
        f"{EVICTIONS.path(NAMESPACE, place['name'])}/status",
        params={"fieldManager": RESPONDER, "force": "true"},
        data=json.dumps(body),
        headers=APPLY,
    )


async def in_turn(act: Callable[[T], Awaitable[R]], items: Iterable[T]) -> list[R]:
    """Call `act` with each item, a few at a time; returns the results."""
    limit = asyncio.Semaphore(AT_ONCE)

    async def limited(item: T) -> R:
        async with limit:
            return await act(item)

    return await asyncio.gather(*map(limited, items))


@pytest.mark.parametrize(
    ("evictions", "heartbeats"),
    [
        pytest.param(200, 200, id="small"),
        pytest.param(10_000, 5_000, id="soak", marks=[pytest.mark.soak, pytest.mark.timeout(3600)]),
    ],
)
async def test_what_evictions_cost(
    tmp_path: Path, prove: Callable[[str], None], evictions: int, heartbeats: int
) -> None:
    """Evictions of as many VMs cost memory and CPU in proportion; the limits are loose.

    Each VM of the cluster has an Eviction that has not ended. The test prints what they cost.
    """
    async with RealCluster(tmp_path / "cluster", flags=SERVED) as cluster:
        await cluster.namespace(NAMESPACE)
        observer = await cluster.user("observer", (*EXPORTER_READS, EVICTIONS))
        login = ("--kubeconfig", str(cluster.kubeconfig(observer)))

        async def make(number: int) -> Object:
            virtual = vmi(f"vm{number}", NAMESPACE, node=f"n{number % NODES}")
            pod = launcher_pod(await cluster.admin.create(VMIS, virtual))
            made = await cluster.admin.create(PODS, pod)
            return await cluster.admin.create(EVICTIONS, build_eviction(made))

        made = await in_turn(make, range(evictions))
        async with program(tmp_path, *login, config=observing("off")) as exporter:
            off = await measure(exporter)
        async with program(tmp_path, *login, config=observing("observe")) as exporter:
            observe = await measure(exporter)
            assert await exporter.sample(PRESENT, state="Active") == evictions
            spent, began = exporter.cpu(), time.monotonic()
            await in_turn(
                lambda number: report(cluster, made[number % evictions], f"try {number}"),
                range(heartbeats),
            )
            await report(cluster, made[0], "the last")
            await exporter.until(
                f"/v1/vmis/{NAMESPACE}/vm0",
                lambda _, body: body["evictionRequest"]["message"] == "the last",
            )
            spent, lasted = exporter.cpu() - spent, time.monotonic() - began
            grown = exporter.resident() - observe.memory

    memory = observe.memory - off.memory
    prove(
        f"EvictionRequests: {evictions:,} Evictions of as many VMs: RSS {off.memory / MIB:.0f} MiB"
        f" without and {observe.memory / MIB:.0f} MiB with them, CPU until the first scrape"
        f" {off.start:.2f} s and {observe.start:.2f} s, a further scrape {off.scrape * 1000:.0f} ms"
        f" and {observe.scrape * 1000:.0f} ms; {heartbeats / lasted:.0f} changes a second for"
        f" {lasted:.0f} s cost {spent / lasted:.1%} of a core, {spent / heartbeats * 1000:.2f} ms"
        f" each, and {grown / MIB:+.1f} MiB"
    )
    assert memory + grown < 30 * MIB + 4096 * evictions
    assert spent / heartbeats < 0.02
