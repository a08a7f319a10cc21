"""The ways in which the sidecar can fail."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from aiohttp import web

from tests.integration.descheduling.middleman import VERDICTS, Middleman
from tests.integration.descheduling.stage import Stage
from tests.support.relay import Gate


@dataclass
class Outage:
    """A sidecar that fails or will fail, and the relay in front of it."""

    middle: Middleman

    @property
    def url(self) -> str:
        """The URL that the descheduler uses."""
        return self.middle.url

    @property
    def asked(self) -> int:
        """How many verdicts were requested."""
        return self.middle.requests[VERDICTS]


@asynccontextmanager
async def killed(stage: Stage) -> AsyncIterator[Outage]:
    """A sidecar that is killed by the first request for a verdict."""
    async with stage.exporter() as exporter:
        await exporter.ready()
        async with Middleman(exporter.query) as middle:

            def kill(request: web.Request) -> None:
                if request.path == VERDICTS and exporter.process.returncode is None:
                    exporter.process.kill()

            middle.on_request = kill
            yield Outage(middle)


@asynccontextmanager
async def slow(stage: Stage) -> AsyncIterator[Outage]:
    """A sidecar that no longer answers after the first request for a verdict."""
    async with stage.exporter() as exporter:
        await exporter.ready()
        async with Gate(exporter.query) as gate, Middleman(gate.url) as middle:

            def stall(request: web.Request) -> None:
                if request.path == VERDICTS:
                    gate.stall()

            middle.on_request = stall
            yield Outage(middle)


@asynccontextmanager
async def unready(stage: Stage) -> AsyncIterator[Outage]:
    """A sidecar that waits for its first sync, and answers 503."""
    async with Gate(stage.world.control.api.url) as gate:
        gate.stall()
        async with stage.exporter(gate.url) as exporter:
            await exporter.listening()
            async with Middleman(exporter.query) as middle:
                yield Outage(middle)


@asynccontextmanager
async def stale(stage: Stage) -> AsyncIterator[Outage]:
    """A sidecar that has lost its connection to the API server, and reports stale data."""
    async with Gate(stage.world.control.api.url) as gate:
        kube = {"staleAfter": "1s", "deadAfter": "10m"}
        async with stage.exporter(gate.url, kube=kube) as exporter:
            await exporter.ready()
            gate.stall()
            await exporter.until("/v1/blocked", lambda _, body: body["stale"])
            async with Middleman(exporter.query) as middle:
                yield Outage(middle)
