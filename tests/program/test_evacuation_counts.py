"""Evacuations that ended, as metrics and in the log, with `kill -9` in the middle."""

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster import VMIS, poll, vmi
from tests.program.exporting import exporting
from tests.support.api_servers import SimulatedStage
from tests.support.history_files import BRISK, until_written
from tests.support.program import Program


ENDED = "kubevirt_eviction_exporter_evacuations_total"
VMS = [f"db{number}" for number in range(12)]
UNSEEN, HURRIED, CALM = VMS[:4], VMS[4:8], VMS[8:]
"""The VMs whose evacuation ends while no exporter runs (nobody sees that), at the kill, and long
before it."""


@pytest.mark.parametrize(
    "kills",
    [1, pytest.param(20, id="soak", marks=[pytest.mark.soak, pytest.mark.timeout(3600)])],
)
async def test_each_end_is_counted_once(
    simulated: SimulatedStage, tmp_path: Path, prove: Callable[[str], None], kills: int
) -> None:
    """Metrics and log agree, and each end that the exporter saw is counted once."""
    chance = random.Random(54)
    namespace = await simulated.make_namespace()
    config = {"history": f"file:{tmp_path / 'history'}", "kube": BRISK}
    counted: Counter[str] = Counter()

    async def mark(names: list[str], node: str) -> None:
        for name in names:
            status = {"status": {"evacuationNodeName": node}}
            await simulated.admin.merge(VMIS, namespace, name, status)

    for name in VMS:
        await simulated.admin.create(VMIS, vmi(name, namespace))
    for kill in range(kills):
        async with exporting(simulated.url, tmp_path, **config) as exporter:
            await mark(VMS, "n1")
            await exporter.until(
                "/v1/evacuations", lambda _, body: len(body["evacuations"]) == len(VMS)
            )
            await until_written(exporter)
            await mark(CALM, "")
            await until_logged(exporter, counted, CALM, kill + 1)
            assert await exporter.sample(ENDED) == logged(exporter).total()
            await mark(HURRIED, "")
            await asyncio.sleep(chance.uniform(0.0, 1.0))
            exporter.process.kill()
            await exporter.process.wait()
            counted += logged(exporter)
        await mark(UNSEEN, "")
    async with exporting(simulated.url, tmp_path, **config) as exporter:
        await until_written(exporter)
        assert not logged(exporter)

    prove(f"{kills} kills: {counted.total()} of {kills * len(VMS)} ends counted")
    assert all(counted[name] == kills for name in CALM)
    assert all(counted[name] <= kills for name in HURRIED)
    assert not any(counted[name] for name in UNSEEN)


def logged(exporter: Program) -> Counter[str]:
    """How many ends of evacuations the program has logged, by VM."""
    return Counter(str(event["kubevirt.vm.name"]) for event in exporter.events("evacuation_ended"))


async def until_logged(
    exporter: Program, earlier: Counter[str], names: list[str], ends: int
) -> None:
    """Wait until this and the earlier programs have logged this number of ends of each VM."""

    async def is_so() -> bool:
        now = earlier + logged(exporter)
        return all(now[name] >= ends for name in names)

    await poll(is_so, what=f"{ends} ends of {names}")
