"""Counters begin at 0, so that Prometheus sees their first event; with the whole program."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.cluster import VMIS, poll, vmi
from tests.program.exporting import exporting
from tests.support.api_servers import SimulatedStage
from tests.support.history_files import migrate
from tests.support.program import Program, program


BLOCKS = "descheduler_kubevirt_eviction_blocks_total"
PREVENTED = "kubevirt_eviction_exporter_moves_prevented_total"
PREVENTED_SECONDS = "kubevirt_eviction_exporter_prevented_migration_seconds_total"
BEGUN = "kubevirt_eviction_exporter_cooldown_duration_seconds"
Labels = tuple[str, ...]


async def read_blocks(exporter: Program) -> dict[tuple[str, str], float]:
    """The count of blocks by reason and node; a series that does not exist is not in it."""
    _, text = await exporter.get("/metrics")
    return {
        (sample.labels["reason"], sample.labels["node"]): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == BLOCKS
    }


async def read_begun(exporter: Program) -> tuple[float, float]:
    """How many cooldowns have begun, and how long they are together."""
    return await exporter.sample(f"{BEGUN}_count"), await exporter.sample(f"{BEGUN}_sum")


async def read_counters(exporter: Program) -> dict[tuple[str, Labels], float]:
    """Every counter, and the count of every histogram, by name and labels."""
    _, text = await exporter.get("/metrics")
    return {
        (sample.name, tuple(sorted(map(":".join, sample.labels.items())))): sample.value
        for family in text_string_to_metric_families(text)
        if family.type in ("counter", "histogram") and not family.name.startswith("process_")
        for sample in family.samples
        if not sample.name.endswith(("_bucket", "_sum"))
    }


async def until(read: Callable[[], Awaitable[Any]], expected: object) -> None:
    """Wait until this is read."""
    seen: object = None

    async def is_so() -> bool:
        nonlocal seen
        seen = await read()
        return seen == expected

    with suppress(TimeoutError):
        await poll(is_so, within=15, what=f"{expected}")
    assert seen == expected


async def test_a_block_is_exposed_as_0_before_it_is_counted(
    simulated: SimulatedStage, tmp_path: Path
) -> None:
    """As soon as a VM cools down, its counter is 0; its first block makes it 1, at once.

    So it is again after a restart, when the first list has the cooldown.
    """
    namespace = await simulated.make_namespace()
    await simulated.admin.create(VMIS, vmi("db1", namespace))
    async with exporting(simulated.url, tmp_path) as exporter:
        assert await read_blocks(exporter) == {}
        await migrate(simulated.admin, namespace, "db1", ago=[60.0])
        await until(partial(read_blocks, exporter), {("cooldown", "n1"): 0})
        assert (await exporter.verdict(namespace, "db1", dryRun=True))["reason"] == "cooldown"
        assert await read_blocks(exporter) == {("cooldown", "n1"): 0}
        assert (await exporter.verdict(namespace, "db1"))["reason"] == "cooldown"
        assert await read_blocks(exporter) == {("cooldown", "n1"): 1}
        await exporter.end()
    async with exporting(simulated.url, tmp_path) as again:
        assert await read_blocks(again) == {("cooldown", "n1"): 0}
        await again.verdict(namespace, "db1")
        assert await read_blocks(again) == {("cooldown", "n1"): 1}


@pytest.mark.parametrize("seconds", [5, pytest.param(60, marks=pytest.mark.soak)])
async def test_no_counter_of_the_demo_is_born_above_0(tmp_path: Path, seconds: int) -> None:
    """While the demo moves and blocks VMs all the time, no count is a first sample.

    A migration that begins and is asked about between two scrapes cannot be foreseen.
    """
    late: dict[tuple[str, Labels], float] = {}
    async with program(tmp_path, "demo") as demo:
        await demo.ready()
        known = await read_counters(demo)
        assert known
        until = time.monotonic() + seconds
        blocks = 0.0
        while time.monotonic() < until or blocks <= seconds // 5:
            seen = await read_counters(demo)
            late |= {key: n for key, n in seen.items() if n and key not in known}
            known |= seen
            blocks = sum(n for (name, _), n in known.items() if name == BLOCKS)
            await asyncio.sleep(0.05)  # the scrapes take as much CPU time as the demo
    assert late == {}


async def test_each_cooldown_is_counted_once(simulated: SimulatedStage, tmp_path: Path) -> None:
    """However often a VM is asked for, each cooldown counts once as begun, and once as prevented.

    A replica that starts again counts the present cooldown as prevented once more, but not as
    begun. `/v1/status` has the total. Each bucket is a step of the policy or of an exception.
    """
    namespace = await simulated.make_namespace()
    await simulated.admin.create(VMIS, vmi("db1", namespace))
    slow = {"name": "slow", "match": {"namespaces": ["db-*"]}, "migrationCooldown": "5h"}
    policy = {"overrides": [slow]}

    async def read(exporter: Program) -> tuple[float | None, float | None]:
        counters = await read_counters(exporter)
        labels = (f"namespace:{namespace}",)
        return counters.get((PREVENTED, labels)), counters.get((PREVENTED_SECONDS, labels))

    async with exporting(simulated.url, tmp_path, policy=policy) as exporter:
        assert await read(exporter) == (None, None)
        assert await read_begun(exporter) == (0, 0)
        await migrate(simulated.admin, namespace, "db1", ago=[300.0], forget=False)
        await until(partial(read_begun, exporter), (1, 900))
        assert await read(exporter) == (0, 0)
        for _ in range(3):
            assert (await exporter.verdict(namespace, "db1"))["reason"] == "cooldown"
        assert await read(exporter) == (1, 10)
        await migrate(simulated.admin, namespace, "db1", ago=[100.0], forget=False)
        await until(partial(read_begun, exporter), (2, 900 + 1800))
        for _ in range(2):
            await exporter.verdict(namespace, "db1")
        assert await read(exporter) == (2, 20)
        _, status = await exporter.get("/v1/status")
        assert status["prevented"].items() >= {"moves": 2, "migrationSeconds": 20.0}.items()
        _, text = await exporter.get("/metrics")
        await exporter.end()
    async with exporting(simulated.url, tmp_path) as again:
        assert await read(again) == (0, 0)
        for _ in range(2):
            await again.verdict(namespace, "db1")
        assert await read(again) == (1, 10)
        assert await read_begun(again) == (0, 0)
    bounds = [
        sample.labels["le"]
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == f"{BEGUN}_bucket"
    ]
    hours = (0.25, 0.5, 1, 2, 4, 5, 6)
    assert bounds == [*(f"{3600.0 * hour}" for hour in hours), "+Inf"]
