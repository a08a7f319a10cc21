"""The memory of scrapers that read one answer and keep their connection open."""

import asyncio
import time
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import TypeAlias

import aiohttp
import pytest

from exporter.demo.store import VMIS
from tests.cluster import vmi
from tests.program.exporting import exporting
from tests.program.waiting import wait_until
from tests.support.api_servers import SimulatedStage
from tests.support.lives import ended_state
from tests.support.program import Program


Prove: TypeAlias = Callable[[str], None]

MIB = 2**20
SLACK = 32
"""How many freed MiB the memory allocator may keep, as docs/reference.md says."""
OBJECTS = "kubevirt_eviction_exporter_objects"
ENCODINGS = ("identity", "gzip")
SOAK = (pytest.mark.soak, pytest.mark.timeout(1200))


@pytest.mark.parametrize(
    ("vmis", "scrapers"),
    [
        pytest.param(2_000, 80, id="small"),
        pytest.param(2_000, 300, id="crowd", marks=SOAK),
        pytest.param(20_000, 80, id="many-vmis", marks=SOAK),
        pytest.param(20_000, 300, id="crowd-many-vmis", marks=SOAK),
    ],
)
async def test_an_answer_that_was_read_takes_no_memory(
    simulated: SimulatedStage, tmp_path: Path, prove: Prove, vmis: int, scrapers: int
) -> None:
    """An idle connection does not keep the answer that its caller has read."""
    namespace, now = await simulated.make_namespace(), time.time()
    for number in range(vmis):
        status = {"migrationState": ended_state(f"m-{number}", now - 30, now)}
        simulated.server.store.create(VMIS, vmi(f"vm-{number}", namespace, status=status))
    async with exporting(simulated.url, tmp_path) as exporter, AsyncExitStack() as idle:
        assert await exporter.sample(OBJECTS, resource=VMIS.plural) == vmis
        before = most = exporter.resident() / MIB
        scraping = asyncio.gather(
            *(scrape_once(exporter, idle, ENCODINGS[number % 2]) for number in range(scrapers))
        )
        while not scraping.done():
            await asyncio.wait([scraping], timeout=0.02)
            most = max(most, exporter.resident() / MIB)
        size = max(scraping.result()) / MIB

        with suppress(TimeoutError):
            await wait_until(
                lambda: exporter.resident() / MIB - before < SLACK, what="the memory", within=5
            )
        after = exporter.resident() / MIB
        prove(
            f"{scrapers} idle scrapers of {vmis} VMIs ({size:.1f} MiB):"
            f" {before:.0f} MiB before, {most:.0f} at most, {after:.0f} after"
        )
        assert after - before < SLACK


async def scrape_once(exporter: Program, idle: AsyncExitStack, encoding: str) -> int:
    """Scrape, and keep the connection open until the stack ends; returns the bytes received."""
    connector = aiohttp.TCPConnector(keepalive_timeout=600)
    session = await idle.enter_async_context(
        aiohttp.ClientSession(connector=connector, auto_decompress=False)
    )
    headers = {"Accept-Encoding": encoding}
    received = 0
    async with session.get(exporter.metrics + "/metrics", headers=headers) as response:
        assert response.status == 200
        async for part in response.content.iter_any():
            received += len(part)
    return received
