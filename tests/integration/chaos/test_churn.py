"""Many VMIs are created and deleted; memory and history file only keep existing VMIs."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeAlias

import pytest

from exporter.demo.store import MIGRATIONS
from exporter.demo.store import VMIS as SIMULATED_VMIS
from tests.cluster import poll, vmi, vmim
from tests.cluster.objects import Object
from tests.cluster.users import open_kubeconfig
from tests.support.api_servers import SimulatedStage
from tests.support.history_files import BRISK, read_counts, until_counted
from tests.support.lives import ended_state
from tests.support.program import Program, program


Prove: TypeAlias = Callable[[str], None]

MIB = 2**20
ROOM = 3 * MIB
BATCH = 250
"""After this many VMIs the test pauses, so that the simulated server can answer requests."""


def migrated(name: str, namespace: str, now: float) -> Object:
    """A VMI that has migrated, so that it has a history file."""
    state = ended_state(f"m-{name}", now - 90, now - 60)
    return vmi(name, namespace, status={"migrationState": state})


async def create(stage: SimulatedStage, namespace: str, names: Iterable[str]) -> None:
    """Create these VMIs, each with a VMIM that has succeeded."""
    now = time.time()
    for number, name in enumerate(names):
        stage.server.store.create(SIMULATED_VMIS, migrated(name, namespace, now))
        final = {"phase": "Succeeded"}
        stage.server.store.create(MIGRATIONS, vmim(f"m-{name}", namespace, of=name, status=final))
        if number % BATCH == 0:
            await asyncio.sleep(0)


async def delete(stage: SimulatedStage, namespace: str, names: Iterable[str]) -> None:
    """Delete these VMIs and their VMIMs."""
    for number, name in enumerate(names):
        stage.server.store.delete(SIMULATED_VMIS, namespace, name, 0)
        stage.server.store.delete(MIGRATIONS, namespace, f"m-{name}", 0)
        if number % BATCH == 0:
            await asyncio.sleep(0)


@asynccontextmanager
async def keeping_a_file(stage: SimulatedStage, directory: Path) -> AsyncIterator[Program]:
    """The exporter on the simulated server, with its history file in a file of this directory."""
    login = open_kubeconfig(directory / "simulated.kubeconfig", stage.url)
    config = {"history": f"file:{directory / 'history'}", "kube": BRISK}
    async with program(directory, "--kubeconfig", str(login), config=config) as exporter:
        await exporter.ready()
        yield exporter
        assert await exporter.end() == 0


async def until_keeps(directory: Path, vmis: int) -> None:
    """Wait until the history file has this many VMIs."""

    async def is_so() -> bool:
        return len(read_counts(directory / "history")) == vmis

    await poll(is_so, within=90, what=f"{vmis} VMIs in the history file")


async def test_twenty_thousand_deleted_at_once(simulated: SimulatedStage, tmp_path: Path) -> None:
    """After 20,000 deletions only the remaining VMI is in the answers and the history file."""
    namespace = await simulated.make_namespace()
    names = [f"vm{number}" for number in range(20_000)]
    await create(simulated, namespace, [*names, "stays"])
    async with keeping_a_file(simulated, tmp_path) as exporter:
        await until_keeps(tmp_path, 20_001)
        await delete(simulated, namespace, names)
        await until_keeps(tmp_path, 1)
        await until_counted(exporter, namespace, "stays", 1)
        assert not (await exporter.verdict(namespace, names[-1], dryRun=True))["known"]
        assert list(read_counts(tmp_path / "history").values()) == [1]


@pytest.mark.parametrize(
    ("rounds", "vmis"), [(4, 1_000), pytest.param(40, 5_000, marks=pytest.mark.soak)]
)
@pytest.mark.timeout(3600)
async def test_memory_is_flat_over_a_churn(
    simulated: SimulatedStage, tmp_path: Path, prove: Prove, rounds: int, vmis: int
) -> None:
    """After many rounds in which VMIs are created and deleted, the memory has not grown.

    64 bytes per VMI are allowed, because a leak of a VMI takes more: its UID alone takes 85 bytes.
    A short test allows 3 MiB, because the allocator may keep freed pages.
    """
    namespace = await simulated.make_namespace()
    after: list[int] = []
    async with keeping_a_file(simulated, tmp_path) as exporter:
        before = exporter.resident()
        for turn in range(rounds):
            names = [f"vm{turn}-{number}" for number in range(vmis)]
            await create(simulated, namespace, names)
            await until_keeps(tmp_path, vmis)
            await delete(simulated, namespace, names)
            await until_keeps(tmp_path, 0)
            after.append(exporter.resident())
        assert not read_counts(tmp_path / "history")
    sizes = ", ".join(f"{size / MIB:.0f}" for size in after[:: max(1, rounds // 8)])
    prove(
        f"churn: {rounds} x {vmis} VMIs; RSS {before / MIB:.0f} MiB before, after the rounds"
        f" {sizes}, at the end {after[-1] / MIB:.0f}"
    )

    assert after[-1] <= after[0] + max(ROOM, 64 * rounds * vmis)
