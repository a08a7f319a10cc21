"""Forty VMs under a descheduler with and without the feature gate EvictionsInBackground."""

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cluster import poll
from tests.cluster.player import Fate
from tests.integration.descheduling.columns import STOCK, WebhookCluster
from tests.integration.descheduling.descheduler import (
    CYCLE_ENDED,
    SHIPPED,
    USER,
    Descheduler,
    Verdicts,
    build_policy,
    log_in,
)
from tests.integration.descheduling.gate import Row, keep
from tests.integration.descheduling.ledger import Ledger, recording, write_ledger
from tests.integration.descheduling.world import World, spread


SPACE = "vms"
LAYOUT = spread({"node-1": 12, "node-2": 8, "node-3": 8, "node-4": 8, "node-5": 4})
EVICTED = "descheduler_pods_evicted_total"
DEFAULT: dict[str, object] = {}
"""The policy that is shipped: a cooldown of 15 minutes."""


@dataclass(frozen=True)
class Size:
    """How long the clusters run, the descheduler's interval, and a migration's duration.

    Each combination of `gates` and `held_by` gets its own cluster.
    """

    seconds: float
    interval: float
    copies: float
    held_by: tuple[str, ...]
    gates: tuple[bool, ...]
    is_kept: bool = False


SMALL = Size(10, 5, 1.2, ("nothing",), (False,))
TEN_MINUTES = Size(
    600, 60, 20, ("nothing", "the plugin", "the webhook"), (True, False), is_kept=True
)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "size",
    [
        pytest.param(SMALL, id="small"),
        pytest.param(TEN_MINUTES, id="ten-minutes", marks=pytest.mark.soak),
    ],
)
async def test_without_its_gate_a_descheduler_reaches_no_limit(
    size: Size, tmp_path: Path, prove: Callable[[str], None]
) -> None:
    """Without the gate the descheduler counts evictions of VMs as failed, and exceeds its limit."""
    async with asyncio.TaskGroup() as group:
        tasks = []
        for gate, held_by in itertools.product(size.gates, size.held_by):
            folder = tmp_path / f"{gate}-{held_by}"
            folder.mkdir()
            tasks.append(group.create_task(_run(folder, size, held_by, gate=gate)))
    rows = [task.result() for task in tasks]
    if size.is_kept:
        keep(rows)
    for row in rows:
        prove(f"descheduling: gate: {row}")

    for row in rows:
        if row.gate:
            assert 0 < row.first_cycle <= SHIPPED.in_all
            assert row.counted["background"] >= row.first_cycle
        else:
            assert row.first_cycle > SHIPPED.in_all
            assert row.counted.get("background", 0) == 0
            assert row.counted["error"] >= row.first_cycle
        if row.held_by != "nothing":
            assert row.most == 1


async def _run(folder: Path, size: Size, held_by: str, *, gate: bool) -> Row:
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        world = await enter(World.opened())
        hooked = WebhookCluster(world, folder, await log_in(world.control))
        migrations = await enter(recording(world.control.admin))
        verdicts = None
        if held_by == "the plugin":
            verdicts = Verdicts((await enter(hooked.asked(DEFAULT))).query)
        elif held_by == "the webhook":
            await enter(hooked.exporter("enforce", USER, policy=DEFAULT))
        # The VMs are not deleted at the end: without the gate their migrations wait for minutes.
        await world.start(SPACE, LAYOUT, fate=Fate(seconds=size.copies))
        process = Descheduler(
            folder / "descheduler",
            hooked.login,
            build_policy(verdicts),
            interval=size.interval,
            binary="descheduler" if verdicts else STOCK,
            gate=gate,
        )
        async with process:
            began = asyncio.get_running_loop().time()

            async def is_over() -> bool:
                elapsed = asyncio.get_running_loop().time() - began
                return elapsed >= size.seconds and process.cycles >= 2

            await poll(is_over, within=2 * size.seconds + 60, what=f"{size.seconds:g} s")
            counts = await process.samples(EVICTED, "result")
            first_ended = process.logged(CYCLE_ENDED)[0]["ts"] / 1000
        ledger = write_ledger(SPACE, world.control.api.audit, migrations.values())
        return _read(ledger, first_ended, counts, held_by, gate=gate)


def _read(
    ledger: Ledger,
    first_ended: float,
    counts: dict[tuple[str, ...], float],
    held_by: str,
    *,
    gate: bool,
) -> Row:
    moves = Counter(move.vm for move in ledger.moves)
    at_once = {row.vm for row in ledger.evictions if row.at.timestamp() <= first_ended}
    return Row(
        gate=gate,
        held_by=held_by,
        first_cycle=len(at_once),
        moved=len(moves),
        migrations=moves.total(),
        most=max(moves.values(), default=0),
        counted={result: int(count) for (result,), count in sorted(counts.items())},
    )
