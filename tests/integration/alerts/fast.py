"""A cluster and its exporters on one clock that runs faster than real time."""

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any

from exporter import app
from exporter.kube.login import Login
from exporter.kube.watch.recovery import ExponentialBackoff
from exporter.kube.watch.reflector import Reflector
from exporter.settings import Settings
from tests.support.faulty_apiserver import FaultyDemo


FACTOR = 60.0
"""How many times faster than real time the clock runs."""
SPEED = 0.1
"""The demo's speed at which its waits, on its own clock, are as long as KubeVirt's."""


class Clock:
    """A clock that runs faster than real time."""

    def __init__(self) -> None:
        self._start = time.time()

    def __call__(self) -> float:
        """The current time of this clock."""
        return self._start + (time.time() - self._start) * FACTOR

    def read(self) -> datetime:
        """The current time as a datetime, for the simulated cluster."""
        return datetime.fromtimestamp(self(), UTC)


class QuickReflector(Reflector):
    """The reflector with shorter pauses, to match the fast clock."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._backoff = ExponentialBackoff(random.Random(1), first=0.2 / FACTOR, most=30.0 / FACTOR)


@asynccontextmanager
async def exporting(settings: Settings, demo: FaultyDemo, clock: Clock) -> AsyncIterator[str]:
    """Run the exporter on the demo; yields the URL of its query listener."""
    stop = asyncio.Event()
    listening: asyncio.Future[app.Listening] = asyncio.get_running_loop().create_future()
    running = asyncio.create_task(
        app.run(
            settings,
            Login(url=demo.url),
            stop,
            clock=clock,
            reflector=QuickReflector,
            on_listening=listening.set_result,
        )
    )
    try:
        await asyncio.wait((running, listening), return_when=asyncio.FIRST_COMPLETED)
        yield (await listening).query[0]
    finally:
        stop.set()
        await running
