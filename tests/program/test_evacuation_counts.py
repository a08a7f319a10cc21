"""Evacuations that ended, as metrics and in the log, with `kill -9` in the middle."""

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster import VMIS, poll, vmi
from tests.cluster.users import open_kubeconfig
from tests.support.api_servers import SimulatedStage
from tests.support.program import Program, program
from tests.support.stored_history import BRISK, until_written


ENDED = "kubevirt_eviction_exporter_evacuations_total"
VMS = [f"db{number}" for number in range(12)]
UNSEEN, HURRIED, CALM = VMS[:4], VMS[4:8], VMS[8:]
"""The VMs whose evacuation ends while no exporter runs, at the kill, and long before it."""


@pytest.mark.parametrize(
    "kills",
    [1, pytest.param(20, id="soak", marks=[pytest.mark.soak, pytest.mark.timeout(3600)])],
)
async def test_each_end_is_counted_once(
    simulated: SimulatedStage, tmp_path: Path, prove: Callable[[str], None], kills: int
) -> None:
    """Metrics and log agree, no end is counted twice, and one that was stored before is not lost.

    If the exporter is killed between the write of an end and its log line, that end is lost. After
    a start it waits a minute before it says that an evacuation ended meanwhile.
    """
    chance = random.Random(54)
    namespace = await simulated.make_namespace()
    login = str(open_kubeconfig(tmp_path / "login", simulated.url))
    config = {"history": f"file:{tmp_path / 'history'}", "kube": BRISK}
    counted: Counter[str] = Counter()

    async def mark(names: list[str], node: str) -> None:
        for name in names:
            status = {"status": {"evacuationNodeName": node}}
            await simulated.admin.merge(VMIS, namespace, name, status)

    for name in VMS:
        await simulated.admin.create(VMIS, vmi(name, namespace))
    for kill in range(kills):
        async with program(tmp_path, "--kubeconfig", login, config=config) as exporter:
            await exporter.ready()
            await until_logged(exporter, counted, UNSEEN, kill)
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
    async with program(tmp_path, "--kubeconfig", login, config=config) as exporter:
        await exporter.ready()
        await until_logged(exporter, counted, UNSEEN, kills)
        assert await exporter.sample(ENDED) == logged(exporter).total()
        counted += logged(exporter)

    lost = sum(kills - counted[name] for name in HURRIED)
    prove(f"{kills} kills: {counted.total()} of {kills * len(VMS)} ends counted, {lost} lost")
    assert all(counted[name] == kills for name in VMS if name not in HURRIED)
    assert all(counted[name] <= kills for name in HURRIED)
    assert lost <= len(HURRIED) * (1 + kills // 20)


def logged(exporter: Program) -> Counter[str]:
    """How many ends of evacuations the program has logged, by VM."""
    return Counter(str(one["kubevirt.vm.name"]) for one in exporter.events("evacuation_ended"))


async def until_logged(
    exporter: Program, earlier: Counter[str], names: list[str], ends: int
) -> None:
    """Wait until this and the earlier programs have logged this number of ends of each VM."""

    async def is_so() -> bool:
        now = earlier + logged(exporter)
        return all(now[name] >= ends for name in names)

    await poll(is_so, what=f"{ends} ends of {names}")
