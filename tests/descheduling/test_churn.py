"""Forty VMs under the real descheduler, without verdicts and with them."""

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest

from tests.descheduling.descheduler import (
    Descheduler,
    Limits,
    Verdicts,
    build_policy,
    log_in,
)
from tests.descheduling.ledger import CONTROLLER, Ledger, Rules, recording, write_ledger
from tests.descheduling.world import World, spread
from tests.support.program import Program, program


LAYOUT = spread({"node-1": 12, "node-2": 8, "node-3": 8, "node-4": 8, "node-5": 4})
VMS = [name for names in LAYOUT.values() for name in names]
BATCH = LAYOUT["node-1"][:8]
MOVABLE = LAYOUT["node-1"][:10]
EVERY = 3.0
CHURN = 3
"""The number of evictions inside a cooldown that counts as churn."""
LIMITS = Limits(per_node=12, in_all=24)
"""Higher limits than the shipped ones: during a migration the descheduler may also evict the target
pod, and then counts that eviction as in progress. Two such evictions use up the shipped limit of a
node.
"""
WITHIN = 1200.0
pytestmark = pytest.mark.timeout(2 * WITHIN)
COOLDOWN = {
    "migrationCooldown": "15s",
    "maxMigrationCooldown": "60s",
    "migrationHistoryWindow": "24h",
}
RULES = Rules(base=timedelta(seconds=15), cap=timedelta(seconds=60))
BLOCKED = "Eviction blocked"
BLOCKS = "descheduler_kubevirt_eviction_blocks_total"


@dataclass(frozen=True)
class Run:
    """The effect of some cycles on forty VMs."""

    ledger: Ledger
    cycles: int
    seconds: float
    log: list[dict[str, Any]]

    def blocks(self, **fields: str) -> int:
        """How many blocks with these fields the descheduler's log shows."""
        return sum(one["msg"] == BLOCKED and fields.items() <= one.items() for one in self.log)


@dataclass(frozen=True)
class Story:
    """The runs without and with verdicts, and the sidecar's counts in the second run."""

    without: Run
    asking: Run
    counted: dict[str, float]


Enough = Callable[[int, Ledger], bool]
"""Whether a run may end, by its cycles and what has happened."""


@pytest.fixture(scope="module", params=[11, pytest.param(100, marks=pytest.mark.soak)])
async def story(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Story]:
    """Run forty VMs without verdicts, then with them, each for this many cycles.

    On a slow machine there are more cycles: in the first run until the VMs have churned, and as
    many in the second run.
    """
    cycles = int(request.param)
    folder = tmp_path_factory.mktemp("churn")
    async with World.opened() as world:
        kubeconfig = await log_in(world.control)
        login = ("--kubeconfig", str(world.control.kubeconfig(world.control.exporter)))
        async with program(folder, *login, config={"policy": COOLDOWN}) as exporter:
            await exporter.ready()

            async def run(namespace: str, verdicts: Verdicts | None, enough: Enough) -> Run:
                policy = build_policy(verdicts, limits=LIMITS)
                process = Descheduler(folder / namespace, kubeconfig, policy, interval=EVERY)
                return await _run(world, namespace, process, enough)

            without = await run(
                "churning",
                None,
                lambda ran, ledger: ran >= cycles and len(ledger.too_early(RULES)) >= CHURN,
            )
            assert await _counted(exporter) == {"migration_in_progress": 0, "cooldown": 0}
            asking = await run(
                "asking", Verdicts(exporter.query), lambda ran, _: ran >= without.cycles
            )
            yield Story(without, asking, await _counted(exporter))


async def _run(world: World, namespace: str, process: Descheduler, enough: Enough) -> Run:
    audit = world.control.api.audit
    pinned = set(VMS) - set(MOVABLE)
    async with (
        recording(world.control.admin) as migrations,
        world.vms(namespace, LAYOUT, batch=BATCH, pinned=pinned),
    ):

        async def has_enough() -> bool:
            ledger = write_ledger(namespace, audit, migrations.values())
            return enough(process.cycles, ledger)

        # The descheduler ends between two cycles, so its log has all blocks that the sidecar
        # counted.
        await process.run_until(has_enough, within=WITHIN, what=f"enough of {namespace}")
        await world.at_rest(namespace)
        log = process.said()
        ledger = write_ledger(namespace, audit, migrations.values())
    seconds = (log[-1]["ts"] - log[0]["ts"]) / 1000
    return Run(ledger, process.cycles, seconds, log)


async def _counted(exporter: Program) -> dict[str, float]:
    reasons = ("migration_in_progress", "cooldown")
    return {reason: await exporter.sample(BLOCKS, reason=reason) for reason in reasons}


def test_without_verdicts_the_cluster_churns(story: Story) -> None:
    """Without verdicts the same VMs move again and again: the scheduler undoes each eviction."""
    ledger = story.without.ledger

    assert max(ledger.evictions_of(vm) for vm in BATCH) >= 2
    assert max(len(ledger.moves_of(vm)) for vm in BATCH) >= 2
    assert len(ledger.too_early(RULES)) >= CHURN


def test_with_verdicts_no_vm_moves_inside_its_cooldown(story: Story) -> None:
    """With verdicts no VM is evicted inside its cooldown."""
    ledger = story.asking.ledger

    assert story.asking.cycles >= story.without.cycles >= 10
    assert ledger.too_early(RULES) == []
    assert story.asking.blocks(reason="cooldown") >= 5


def test_with_verdicts_no_vm_is_told_to_leave_while_it_moves(story: Story) -> None:
    """No pod of a VM is evicted between the start and the end of its migration.

    An eviction with the answer 201 was of a pod that its VM had left.
    """
    ledger = story.asking.ledger

    assert ledger.moving() == []
    assert [one for one in ledger.refused if one.code != 201] == []


def test_with_verdicts_the_others_go_on(story: Story) -> None:
    """While some VMs cool down, others are evicted; VMs that have cooled down are evicted again."""
    ledger = story.asking.ledger
    first_block = min(one["ts"] / 1000 for one in story.asking.log if one["msg"] == BLOCKED)

    assert any(one.at.timestamp() > first_block for one in ledger.evictions)
    assert any(ledger.evictions_of(vm) >= 2 for vm in MOVABLE)


def test_nobody_moves_a_vm_whose_owner_forbids_it(story: Story) -> None:
    """The descheduler's own rules still apply together with our plugin."""
    for run in (story.without, story.asking):
        assert {one.vm for one in run.ledger.evictions} <= set(MOVABLE)


def test_every_evacuation_was_created_by_virt_controller(story: Story) -> None:
    """By the audit log virt-controller created all evacuations, one for each eviction."""
    for run in (story.without, story.asking):
        assert run.ledger.creators == {CONTROLLER: len(run.ledger.evictions)}
        assert run.ledger.by_hand == {}


def test_the_sidecar_counts_the_blocks_that_the_descheduler_logs(story: Story) -> None:
    """The sidecar's counts of blocks are those of the descheduler's log, by reason."""
    logged = {reason: story.asking.blocks(reason=reason) for reason in story.counted}

    assert story.counted == logged
    assert sum(story.counted.values()) == story.asking.blocks() > 0


def test_the_table(story: Story, prove: Callable[[str], None]) -> None:
    """The table has the evictions and migrations of each VM, without and with verdicts."""
    runs = (story.without, story.asking)
    rows = [
        (vm, *(len(each) for run in runs for each in _of(run.ledger, vm)))
        for vm in VMS
        if any(each for run in runs for each in _of(run.ledger, vm))
    ]
    totals = ("all", *(sum(column) for column in list(zip(*rows, strict=True))[1:]))
    for run, name in zip(runs, ("without", "with"), strict=True):
        early, repeated = run.ledger.too_early(RULES), _repeated(run.ledger)
        prove(
            f"descheduling: {name} verdicts {run.cycles} cycles in {run.seconds:.0f} s: "
            f"{len(run.ledger.evictions)} evictions of {len(_evicted(run.ledger))} VMs, "
            f"{repeated} of one that had moved, {len(early)} inside a cooldown"
        )
    prove(f"descheduling: blocks logged = counted by the sidecar: {story.counted}")
    prove("  VM     evictions without, with   migrations without, with")
    for vm, evictions, moves, fewer, left in (*rows, totals):
        prove(f"  {vm:6} {evictions:>17} {fewer:>5} {moves:>20} {left:>5}")

    assert totals[1] == totals[2]
    assert totals[3] == totals[4]


def _of(ledger: Ledger, vm: str) -> tuple[list[object], list[object]]:
    return [one for one in ledger.evictions if one.vm == vm], [*ledger.moves_of(vm)]


def _evicted(ledger: Ledger) -> set[str]:
    return {one.vm for one in ledger.evictions}


def _repeated(ledger: Ledger) -> int:
    return len(ledger.evictions) - len(_evicted(ledger))
