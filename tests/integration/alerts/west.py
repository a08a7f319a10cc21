"""The second cluster of the live alerts: its VMs have the names of the first cluster's VMs.

Its VMs have no problems. Its alerts are about the exporter: replicas, callers, a certificate, and
at the end the absence of all replicas. The metrics of the descheduler and the API server come from
a simulated page.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, TypeAlias

import aiohttp
from aiohttp import web

from exporter.demo.cluster import Cluster
from exporter.demo.objects import Object
from exporter.demo.plan import Fate
from exporter.demo.scenario import Scenario
from exporter.settings import Settings, read_settings
from tests.cluster.ports import free_port
from tests.integration.alerts.fast import FACTOR, SPEED, Clock, exporting
from tests.integration.alerts.live import Receiver
from tests.support.certificates import write_certificate
from tests.support.failing import fail, kept_tasks
from tests.support.faulty_apiserver import FaultyDemo
from tests.support.other_programs import OtherPrograms
from tests.support.serving import serving


WEST = "west"
Cause: TypeAlias = tuple[str, str | None]
"""An alert's name, and its label `cause` if it has one."""
ABSENT = ("KubeVirtEvictionExporterAbsent", "every_replica")
ALONE: set[Cause] = {
    ("KubeVirtEvictionExporterAbsent", "some_replicas"),
    ("KubeVirtDeschedulerDoesNotAsk", None),
    ("KubeVirtDeschedulerWithoutGate", None),
    ("KubeVirtDeschedulerWithoutVerdict", "no_verdict"),
    ("KubeVirtDeschedulerWithoutVerdict", "snapshot_old"),
    ("KubeVirtEvictionWebhookFailing", "call_failed"),
}
"""Alerts that fire while one of two replicas runs, and while callers fail or do not call."""
BESIDE_AN_ODD_ONE: set[Cause] = {
    ("KubeVirtDeschedulerWithoutVerdict", "rejected"),
    ("KubeVirtDeschedulerWithoutVerdict", "unknown_vmi"),
    ("KubeVirtEvictionExporterBlindSpot", "vmis_left_out"),
    ("KubeVirtEvictionExporterCertificateExpiring", None),
    ("KubeVirtEvictionExporterStale", "replicas_differ"),
    ("KubeVirtEvictionExporterStale", "task_failing"),
}
"""Alerts that fire while one replica has other settings and a task that fails, and callers send
invalid requests."""
ALERTS = {ABSENT, *ALONE, *BESIDE_AN_ODD_ONE}
"""The alerts that this cluster causes."""
DAYS_LEFT = 5
ASKS_EVERY = 0.5
STEPS_EVERY = 0.5


class Quiet(Scenario):
    """The VMs of the demo, without the events of the demo."""

    def fate(self, vmi: Object, attempt: int) -> Fate:
        del vmi, attempt
        # The migration takes some seconds of real time, so that Prometheus sees it.
        return Fate("succeeds", 30.0)

    def _queue_events(self, cluster: Cluster, vm: Any) -> None:
        """No events are queued."""

    def _drain(self, cluster: Cluster, vms: list[Any]) -> None:
        """No node is drained."""


class West:
    """The cluster with two exporters. The second starts later, at first with other settings."""

    def __init__(self, directory: Path, clock: Clock, receiver: Receiver) -> None:
        self._directory = directory
        self._clock = clock
        self._receiver = receiver
        self._others = OtherPrograms()
        self._demo = FaultyDemo(clock.read, speed=SPEED, nodes=2)
        self._demo.server.bookmark_seconds = 60.0 / FACTOR
        self._demo.scenario = self._demo.cluster.fates.plan = Quiet(vms=6)
        self._ports = {"c": free_port(), "d": free_port()}

    @asynccontextmanager
    async def served(self) -> AsyncIterator[list[dict[str, Any]]]:
        """Run the cluster; yields the targets for Prometheus."""
        application = web.Application()
        application.router.add_get("/metrics", self._others.answer)
        async with self._demo, serving(application) as page:
            stepping = asyncio.create_task(self._keep_stepping())
            addresses = {
                **{instance: f"127.0.0.1:{port}" for instance, port in self._ports.items()},
                "others": page.removeprefix("http://"),
            }
            try:
                yield [
                    {
                        "targets": [address],
                        "labels": {
                            "instance": instance,
                            "namespace": "monitoring",
                            "cluster": WEST,
                        },
                    }
                    for instance, address in addresses.items()
                ]
            finally:
                stepping.cancel()

    async def play(self) -> None:
        """Make each alert of this cluster fire, and then resolve it."""
        async with AsyncExitStack() as first:
            url = await first.enter_async_context(self._exporter("c"))
            await self._run_alone()
            asking = asyncio.create_task(self._ask(url))
            try:
                await self._run_beside_an_odd_one(url)
                async with self._exporter("d"):
                    await self._resolve(*ALONE, *BESIDE_AN_ODD_ONE)
            finally:
                asking.cancel()
        await self._fire(ABSENT)
        async with self._exporter("c"), self._exporter("d"):
            await self._resolve(ABSENT)

    async def _run_alone(self) -> None:
        """Make `ALONE` fire: one of two replicas runs, and callers fail or do not call."""
        for vm in self._demo.scenario.vms[3:]:
            self._demo.cluster.evict_vmi(vm.namespace, vm.name, descheduler=True)
        await self._fire(*ALONE)
        self._others.broken = False

    async def _run_beside_an_odd_one(self, url: str) -> None:
        """Make `BESIDE_AN_ODD_ONE` fire: a replica has other settings, and requests are invalid."""
        for vm in self._demo.scenario.vms[:3]:
            self._demo.cluster.evict_vmi(vm.namespace, vm.name)
        write_certificate(self._directory, "odd", days=DAYS_LEFT)
        odd = {
            "policy": {"migrationCooldown": "4h", "maxMigrationCooldown": "8h"},
            "limits": {"vmiSeries": 1},
            "tls": {
                "query": {
                    "certFile": str(self._directory / "odd.crt"),
                    "keyFile": str(self._directory / "odd.key"),
                }
            },
        }
        tasks = asyncio.create_task(self._ask_nonsense(url)), asyncio.create_task(fail_renewal())
        try:
            async with self._exporter("d", odd):
                await self._fire(*BESIDE_AN_ODD_ONE)
        finally:
            for task in tasks:
                task.cancel()

    @asynccontextmanager
    async def _exporter(
        self, instance: str, odd: Mapping[str, Any] | None = None
    ) -> AsyncIterator[str]:
        address = f"127.0.0.1:{self._ports[instance]}"
        settings: Settings = read_settings(
            {"listen": {"query": "127.0.0.1:0", "metrics": address}, **(odd or {})}
        )
        async with exporting(settings, self._demo, self._clock) as url:
            yield url

    async def _keep_stepping(self) -> None:
        while True:
            self._demo.cluster.step(self._clock.read())
            await asyncio.sleep(STEPS_EVERY)

    async def _ask(self, url: str) -> None:
        """Ask for the blocked VMs, as the plugin does."""
        async with aiohttp.ClientSession(url) as session:
            while True:
                async with session.get("/v1/blocked"):
                    await asyncio.sleep(ASKS_EVERY)

    async def _ask_nonsense(self, url: str) -> None:
        """Ask about an unknown VM, and send an invalid body."""
        nobody = {"candidates": [{"namespace": "shop", "name": "nobody"}]}
        async with aiohttp.ClientSession(url) as session:
            while True:
                async with session.post("/v1/verdicts", json=nobody) as answer:
                    assert answer.status == 200
                async with session.post("/v1/verdicts", json=[]) as answer:
                    assert answer.status == 422
                await asyncio.sleep(ASKS_EVERY)

    async def _fire(self, *alerts: Cause) -> None:
        await asyncio.gather(*(self._receiver.fires(*alert, cluster=WEST) for alert in alerts))

    async def _resolve(self, *alerts: Cause) -> None:
        await asyncio.gather(*(self._receiver.resolves(*alert, cluster=WEST) for alert in alerts))


async def fail_renewal() -> None:
    """Let the task that renews certificates fail, again and again."""
    while True:
        for task, name in kept_tasks().items():
            if name.startswith("certificates"):
                fail(task)
        await asyncio.sleep(ASKS_EVERY)
