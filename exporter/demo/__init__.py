"""A simulated KubeVirt cluster for trying the exporter, with a descheduler that queries it.

This package imports nothing else from the exporter, so a mistake about KubeVirt in the exporter is
not repeated in the simulation.
"""

from __future__ import annotations

import asyncio
import os
import re
import tempfile
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Self

import aiohttp

from exporter.demo.apiserver import SimulatedApiServer
from exporter.demo.cluster import Cluster
from exporter.demo.controller import Rules
from exporter.demo.descheduler import CYCLE_SECONDS, USER, Descheduler
from exporter.demo.kubectl import DemoApiServer
from exporter.demo.plan import Pace
from exporter.demo.scenario import Scenario


__all__ = ["FOLDER", "USER", "Demo", "shorten_settings"]

FOLDER = (
    Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())
    / f"kubevirt-eviction-exporter-demo-{os.getuid()}"
)
"""Each demo writes its kubeconfig and URLs into a folder here, named after the address of its query
listener. The checkout may be read-only."""
SHORTENED = 10.0
"""At speed 1 KubeVirt's built-in waits are shorter by this factor: backoff 2, 4 ... 32 s."""
PAST_SECONDS = 150.0
"""How long the cluster has run before the exporter starts: enough for repeated failures."""
STEP_SECONDS = 0.1
BATCH = 100
"""After this many steps other tasks run, such as the one that stops the demo."""
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
    """The exporter's settings for a speed, as Go durations."""
    return {
        section: {name: f"{seconds / speed:g}s" for name, seconds in settings.items()}
        for section, settings in SETTINGS_SECONDS.items()
    }


def write_places(cluster_url: str, query_url: str, metrics_url: str) -> Path:
    """Write a kubeconfig for the cluster, and the URL of the metrics for `make alerts`.

    Returns the path of the kubeconfig. Raises OSError.
    """
    FOLDER.mkdir(mode=0o700, exist_ok=True)
    if FOLDER.stat().st_uid != os.getuid():
        raise PermissionError(f"{FOLDER} belongs to somebody else")
    # Without colons, because they separate the paths in KUBECONFIG.
    folder = FOLDER / re.sub(r"[^\w.]+", "-", query_url.rpartition("//")[2]).strip("-")
    folder.mkdir(exist_ok=True)
    (folder / "metrics").write_text(metrics_url)
    kubeconfig = folder / "kubeconfig"
    kubeconfig.write_text(
        f"""apiVersion: v1
kind: Config
current-context: demo
clusters: [{{name: demo, cluster: {{server: "{cluster_url}"}}}}]
contexts: [{{name: demo, context: {{cluster: demo, user: demo}}}}]
users: [{{name: demo, user: {{}}}}]
"""
    )
    return kubeconfig


class Demo:
    """A simulated cluster: `async with Demo(clock) as demo` builds it and serves it at `demo.url`.

    `run` then advances its time. With a `responder` the cluster answers EvictionRequests, and new
    pods have this responder. `progress` is called with the number of VMs built so far.
    """

    def __init__(
        self,
        clock: Callable[[], datetime],
        *,
        seed: int = 1,
        speed: float = 1.0,
        vms: int = 24,
        nodes: int = 4,
        responder: str = "",
        progress: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._clock = clock
        self._speed = speed
        self._progress = progress
        self._is_built = False
        self.start = clock()
        self.scenario = Scenario(seed, vms)
        self.cluster = Cluster(
            self.start - timedelta(seconds=PAST_SECONDS / speed),
            self.scenario,
            nodes=nodes,
            seed=seed,
            rules=Rules(faster=SHORTENED * speed),
            pace=Pace(speed=speed, exit=Pace().exit / SHORTENED),
        )
        if responder:
            self.cluster.answer_requests(responder)
        self._exporter_url = ""
        self.server: SimulatedApiServer = DemoApiServer(self.cluster, lambda: self._exporter_url)

    @property
    def example(self) -> tuple[str, str]:
        """Namespace and name of a VM for examples: the first one, which migrates often."""
        vm = self.scenario.vms[0]
        return vm.namespace, vm.name

    @property
    def url(self) -> str:
        """The URL of the cluster's API server."""
        return self.server.url

    def announce(self, query_url: str, metrics_url: str) -> str:
        """Say where the exporter is; returns the path of the demo's kubeconfig.

        If it could not be written, it returns why.
        """
        self._exporter_url = query_url
        try:
            return str(write_places(self.url, query_url, metrics_url))
        except OSError as error:
            return f"(none could be written: {error})"

    async def build(self, stop: asyncio.Event) -> None:
        """Create the VMs and simulate their past. Returns early if `stop` is set."""
        for built, _ in enumerate(self.scenario.populate(self.cluster), 1):
            if built % BATCH == 0:
                self._progress(built)
                await asyncio.sleep(0)
                if stop.is_set():
                    return
        await self._step_to(self.start, stop)
        self._is_built = True

    async def __aenter__(self) -> Self:
        if not self._is_built:
            await self.build(asyncio.Event())
        await self.server.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.server.__aexit__(*exc)

    async def run(
        self, query_url: str | None, stop: asyncio.Event, *, webhook_url: str | None = None
    ) -> None:
        """Run the cluster and its descheduler until `stop` is set.

        The descheduler sends its queries to `query_url` (None: it sends none). `webhook_url` is the
        admission webhook that reviews its evictions.
        """
        async with asyncio.TaskGroup() as tasks:
            running = (
                tasks.create_task(self._keep_stepping(stop)),
                tasks.create_task(self._deschedule(query_url, webhook_url)),
            )
            await stop.wait()
            # Cancelled at once, even during a descheduling cycle, because the exporter ends too.
            for task in running:
                task.cancel()

    async def _keep_stepping(self, stop: asyncio.Event) -> None:
        while True:
            await self._step_to(self._clock(), stop)
            await asyncio.sleep(STEP_SECONDS)

    async def _step_to(self, now: datetime, stop: asyncio.Event) -> None:
        is_done = False
        while not is_done and not stop.is_set():
            is_done = self.cluster.step(now, most=BATCH)
            await asyncio.sleep(0)

    async def _deschedule(self, query_url: str | None, webhook_url: str | None) -> None:
        descheduler = Descheduler(
            self.cluster, self.scenario, query_url, self.start, webhook_url=webhook_url
        )
        async with aiohttp.ClientSession() as session:
            while True:
                await asyncio.sleep(CYCLE_SECONDS / self._speed)
                await descheduler.cycle(session, self._clock())
