"""A simulated KubeVirt cluster to try the exporter on, and the descheduler that asks it.

An independent model: it imports nothing of the exporter, so that the exporter's reading of
KubeVirt and the model of it cannot share a mistake.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Self

import aiohttp

from exporter.demo.apiserver import SimulatedApiServer
from exporter.demo.cluster import Cluster, Pace
from exporter.demo.controller import Rules
from exporter.demo.descheduler import CYCLE_SECONDS, USER, Descheduler
from exporter.demo.scenario import Scenario


__all__ = ["USER", "Demo", "shorten_settings"]

SHORTENED = 10.0
"""How much faster than KubeVirt's own its built-in waits are at speed 1: backoff 2, 4 ... 32 s."""
PAST_SECONDS = 150.0
"""How much has happened before the exporter looks: enough for failures to have piled up."""
STEP_SECONDS = 0.1
SETTINGS_SECONDS = {
    "policy": {
        "migrationCooldown": 20.0,
        "maxMigrationCooldown": 160.0,
        "migrationHistoryWindow": 1200.0,
    },
    "stuck": {"after": 60.0, "migrationTimeout": 300.0},
    "kube": {"retryBackoff": 20.0 / SHORTENED},
}


def shorten_settings(speed: float = 1.0) -> dict[str, dict[str, str]]:
    """The exporter's settings that fit a speed, as Go durations."""
    return {
        section: {name: f"{seconds / speed:g}s" for name, seconds in settings.items()}
        for section, settings in SETTINGS_SECONDS.items()
    }


class Demo:
    """A simulated cluster: `async with Demo(clock) as demo` serves it at `demo.url`.

    `run` plays it, until told to stop.
    """

    def __init__(
        self,
        clock: Callable[[], datetime],
        *,
        seed: int = 1,
        speed: float = 1.0,
        vms: int = 24,
        nodes: int = 4,
    ) -> None:
        self._clock = clock
        self._speed = speed
        self.start = clock()
        self.scenario = Scenario(seed, vms)
        self.cluster = Cluster(
            self.start - timedelta(seconds=PAST_SECONDS / speed),
            self.scenario,
            nodes=nodes,
            seed=seed,
            rules=Rules(faster=SHORTENED * speed),
            pace=Pace(speed=speed),
        )
        self.server = SimulatedApiServer(self.cluster.store)

    @property
    def example(self) -> tuple[str, str]:
        """Namespace and name of a VM that is worth looking at: the first, which churns."""
        vm = self.scenario.vms[0]
        return vm.namespace, vm.name

    @property
    def url(self) -> str:
        """Where the cluster's API server listens."""
        return self.server.url

    async def __aenter__(self) -> Self:
        self.scenario.populate(self.cluster)
        self.cluster.step(self.start)
        await self.server.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.server.__aexit__(*exc)

    async def run(
        self, query_url: str | None, stop: asyncio.Event, *, webhook_url: str | None = None
    ) -> None:
        """Play the cluster and its descheduler until `stop` is set.

        The descheduler asks at `query_url`; None: it asks nobody. `webhook_url`: the admission
        webhook that its evictions go through.
        """
        async with asyncio.TaskGroup() as tasks:
            playing = (
                tasks.create_task(self._step()),
                tasks.create_task(self._deschedule(query_url, webhook_url)),
            )
            await stop.wait()
            # At once, in the middle of a cycle too: who is asked is ending as well.
            for task in playing:
                task.cancel()

    async def _step(self) -> None:
        while True:
            self.cluster.step(self._clock())
            await asyncio.sleep(STEP_SECONDS)

    async def _deschedule(self, query_url: str | None, webhook_url: str | None) -> None:
        descheduler = Descheduler(
            self.cluster, self.scenario, query_url, self.start, webhook_url=webhook_url
        )
        async with aiohttp.ClientSession() as session:
            while True:
                await asyncio.sleep(CYCLE_SECONDS / self._speed)
                await descheduler.cycle(session, self._clock())
