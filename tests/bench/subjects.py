"""The measurements that run in a process of their own: `python -m tests.bench.subjects`.

A subject gets what it needs as arguments, imports everything before it measures, and prints one
line of JSON.
"""

import asyncio
import gc
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self
from uuid import UUID

import aiohttp
import msgspec
from aiohttp import web
from msgspec import Struct
from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.exposition import choose_encoder
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as openmetrics_families,
)
from prometheus_client.parser import text_string_to_metric_families as text_families

from exporter.counters import Counters
from exporter.engine.facts.model import CLUSTER_RESOURCES, Outcome, Resource, Vmi, Vmim
from exporter.engine.facts.policy import Policy, StuckPolicy
from exporter.health import Health, Watched
from exporter.history import HistoryWriter
from exporter.kube.client import ApiServer
from exporter.kube.login import Login
from exporter.kube.watch.reflector import Reflector
from exporter.metrics.exposition import Exposition, sample
from exporter.metrics.family import View
from exporter.settings import KubeSettings
from tests.support.stores import ClockedStore, a_verdict_view


LIST = "?watch=1&allowWatchBookmarks=true&sendInitialEvents=true&resourceVersionMatch=NotOlderThan"
VMIS = "/apis/kubevirt.io/v1/virtualmachineinstances"


def say(**fact: object) -> None:
    """Print one line for the parent process."""
    print(json.dumps(fact), flush=True)


class Timed:
    """Wall and CPU seconds of a block."""

    def __enter__(self) -> Self:
        self._wall, self._cpu = time.perf_counter(), time.process_time()
        self.wall = self.cpu = 0.0
        return self

    def __exit__(self, *_: object) -> None:
        self.wall = time.perf_counter() - self._wall
        self.cpu = time.process_time() - self._cpu


async def follow(url: str, *resources: Resource) -> ClockedStore:
    """A store that the exporter's own watch has filled with these resources."""
    store = ClockedStore(keep=Policy().endings_kept)
    store.hide(*({Resource.VMIMS, Resource.PODS}.difference(resources)))
    async with ApiServer(Login(url=url), read_timeout=60) as api:
        for resource in resources:
            watched = Watched(resource, None)
            news = asyncio.Event()
            reflector = Reflector(
                api, watched, store, KubeSettings(), clock=time.time, rng=random.Random(),
                settled=news.set,
            )  # fmt: skip
            task = asyncio.create_task(reflector.run())
            while not watched.synced:
                await news.wait()
                news.clear()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
    return store


def sync(url: str) -> None:
    """The exporter's first list of the VMIs: connection, lines, decoding, store."""
    with Timed() as timed:
        store = asyncio.run(follow(url, Resource.VMIS))
    say(wall=timed.wall, cpu=timed.cpu, objects=len(store.keys()))


class _FloorState(Struct, gc=False):
    migrationUid: str | None = None  # noqa: N815
    startTimestamp: str | None = None  # noqa: N815
    endTimestamp: str | None = None  # noqa: N815
    completed: bool = False
    failed: bool = False


class _FloorStatus(Struct, gc=False):
    nodeName: str = ""  # noqa: N815
    evacuationNodeName: str = ""  # noqa: N815
    migrationState: _FloorState | None = None  # noqa: N815


class _FloorMetadata(Struct, gc=False):
    name: str = ""
    namespace: str = ""
    uid: str = ""
    creationTimestamp: str | None = None  # noqa: N815
    annotations: dict[str, str] = {}


class _FloorObject(Struct, gc=False):
    metadata: _FloorMetadata
    status: _FloorStatus | None = None


class _FloorEvent(Struct, gc=False):
    type: str
    object: _FloorObject


async def _read_floor(url: str) -> int:
    decode = msgspec.json.Decoder(_FloorEvent).decode
    count, rest = 0, b""
    async with (
        aiohttp.ClientSession(read_bufsize=2**21) as session,
        session.get(url + VMIS + LIST) as response,
    ):
        async for chunk in response.content.iter_any():
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                if decode(line).type == "BOOKMARK":
                    return count
                count += 1
    raise RuntimeError("the list did not end")


def floor(url: str) -> None:
    """Read the same stream with aiohttp on uvloop, and only decode it with msgspec."""
    import uvloop  # noqa: PLC0415 (only the floor needs it)

    with Timed() as timed:
        count = uvloop.run(_read_floor(url))
    say(wall=timed.wall, cpu=timed.cpu, objects=count)


async def _serve_bare(socket: str, length: int) -> None:
    body = b"x" * length
    headers = {"ETag": '"0123456789abcdef0123456789abcdef"', "Cache-Control": "no-cache"}

    async def verdicts(request: web.Request) -> web.Response:
        await request.read()
        return web.Response(body=body, content_type="application/json")

    async def blocked(_request: web.Request) -> web.Response:
        return web.Response(status=304, headers=headers)

    app = web.Application()
    app.router.add_post("/v1/verdicts", verdicts)
    app.router.add_get("/v1/blocked", blocked)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
    await runner.setup()
    await web.UnixSite(runner, socket).start()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[-1][:2]
    say(address=f"{host}:{port}")
    await asyncio.Event().wait()


def bare(socket: str, length: str) -> None:
    """The bare server: aiohttp handlers that answer with prepared bytes."""
    asyncio.run(_serve_bare(socket, int(length)))


async def _scrape(url: str, repeats: int) -> dict[str, Any]:
    store = await follow(url, Resource.VMIS, Resource.VMIMS)
    health = Health(
        180, 600, [Watched(resource, None, synced=True) for resource in CLUSTER_RESOURCES]
    )
    now = time.time()
    for watched in health.watched:
        watched.contact = now
    policy = Policy()
    view = View(
        store=store, verdicts=a_verdict_view(store, policy), health=health, counters=Counters(),
        policy=policy, stuck=StuckPolicy(), vmi_series=20_000, now=now,
    )  # fmt: skip
    ours = Exposition(lambda: view, process=False)
    registry, series = _plain_gauges(view)
    formats = (("text", ""), ("openmetrics", "application/openmetrics-text; version=1.0.0"))
    facts: dict[str, Any] = {"series": series}
    with Timed() as first:
        await ours.render("")
    facts["first"] = first.cpu
    gc.collect()
    for name, accept in formats:
        encode, _ = choose_encoder(accept)
        times: dict[str, list[float]] = {"ours": [], "theirs": []}
        parts, expected = [b""], b""
        for _ in range(repeats):
            with Timed() as timed:
                parts, _ = await ours.render(accept)
            times["ours"].append(timed.cpu)
            with Timed() as timed:
                expected = encode(registry)
            times["theirs"].append(timed.cpu)
        facts[name] = times
        body = b"".join(parts)
        facts[f"{name}_equal"] = _per_vmi(body, name) == _per_vmi(expected, name)
        facts[f"{name}_bytes"] = len(body)
    return facts


def scrape(url: str, repeats: str) -> None:
    """Measure our exposition and prometheus_client's gauges in turn, with the same samples."""
    say(**asyncio.run(_scrape(url, int(repeats))))


def _plain_gauges(view: View) -> tuple[CollectorRegistry, int]:
    """The per-VMI samples of a view in ordinary gauges of prometheus_client."""
    registry, series = CollectorRegistry(), 0
    gauges: dict[str, Gauge] = {}
    for family, samples in sample(view):
        for row in samples if family.name.startswith("kubevirt_vmi_") else ():
            if family.name not in gauges:
                gauges[family.name] = Gauge(
                    family.name, family.help_line, family.labels, registry=registry
                )
            gauges[family.name].labels(*row.labels).set(row.value)
            series += 1
    return registry, series


def _per_vmi(body: bytes, form: str) -> dict[str, Any]:
    """The per-VMI samples of an exposition, as prometheus_client's own parser reads them."""
    text = body.decode()
    read = openmetrics_families if form == "openmetrics" else text_families
    return {
        family.name: (family.documentation, family.type, sorted(map(repr, family.samples)))
        for family in read(text)
        if family.name.startswith("kubevirt_vmi_") and family.samples
    }


class LoopTimer:
    """The longest callback of the event loop inside the block, in CPU seconds.

    A callback never waits, so this is also its duration on an idle processor.
    """

    def __enter__(self) -> Self:
        self.longest = 0.0
        self._run = run = asyncio.Handle._run  # noqa: SLF001 (no other place to time a callback)

        def timed(handle: asyncio.Handle) -> None:
            began = time.thread_time()
            run(handle)
            self.longest = max(self.longest, time.thread_time() - began)

        asyncio.Handle._run = timed  # type: ignore[assignment,method-assign]  # noqa: SLF001
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.Handle._run = self._run  # type: ignore[method-assign]  # noqa: SLF001


def migrated(vmis: int) -> Iterator[Vmim]:
    """The VMIMs of three ended migrations of each VMI."""
    now = float(int(time.time()))
    for number in range(3 * vmis):
        end = now - 60 - number % 3 * 3600
        yield Vmim(
            namespace=f"team-{number // 3 % 50}", name=f"m{number}", uid=str(UUID(int=number)),
            vmi_name=f"vm-{number // 3}", created=end - 60, phase="Succeeded", start=end - 30,
            end=end, finished=True, finished_at=end, outcome=Outcome.SUCCEEDED, handed_off=True,
        )  # fmt: skip


async def _history(vmis: int) -> dict[str, float]:
    store = ClockedStore(keep=Policy().endings_kept)
    for number in range(vmis):
        uid = str(UUID(int=number << 64))
        store.put(Vmi(namespace=f"team-{number % 50}", name=f"vm-{number}", uid=uid, node="n1"))
    for vmim in migrated(vmis):
        store.put(vmim)
    gc.collect()
    with TemporaryDirectory() as directory:
        path = Path(directory) / "history"
        writer = HistoryWriter(store, path, Counter(), interval=15.0, clock=time.time)
        writer.record_change()
        began = time.process_time()
        with LoopTimer() as timer:
            await writer.flush()
        cpu, size = time.process_time() - began, path.stat().st_size
    return {"longest": timer.longest, "cpu": cpu, "bytes": size}


def history(vmis: str) -> None:
    """A process that has listed everything writes its history file."""
    say(**asyncio.run(_history(int(vmis))))


SUBJECTS: dict[str, Callable[..., None]] = {
    "sync": sync,
    "floor": floor,
    "bare": bare,
    "scrape": scrape,
    "history": history,
}

if __name__ == "__main__":
    SUBJECTS[sys.argv[1]](*sys.argv[2:])
