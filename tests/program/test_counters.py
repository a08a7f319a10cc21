"""Counters begin at 0, so that Prometheus sees their first event; with the whole program."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.cluster import VMIMS, VMIS, launcher_pod, poll, vmi, vmim
from tests.cluster.resources import NODES, PODS
from tests.cluster.users import open_kubeconfig
from tests.support.api_servers import SimulatedStage
from tests.support.builders import rfc3339
from tests.support.history_files import migrate
from tests.support.program import Program, program


BLOCKS = "descheduler_kubevirt_eviction_blocks_total"
Labels = tuple[str, ...]


@asynccontextmanager
async def exporting(stage: SimulatedStage, tmp_path: Path) -> AsyncIterator[Program]:
    """An exporter that watches the stage."""
    login = str(open_kubeconfig(tmp_path / "login", stage.url))
    async with program(tmp_path, "--kubeconfig", login) as exporter:
        await exporter.ready()
        yield exporter


async def read_blocks(exporter: Program) -> dict[tuple[str, str], float]:
    """The count of blocks by reason and node; a series that does not exist is not in it."""
    _, text = await exporter.get("/metrics")
    return {
        (sample.labels["reason"], sample.labels["node"]): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == BLOCKS
    }


async def until_blocks(exporter: Program, expected: dict[tuple[str, str], float]) -> None:
    """Wait until these are the counts of blocks."""
    seen: dict[tuple[str, str], float] = {}

    async def is_so() -> bool:
        nonlocal seen
        seen = await read_blocks(exporter)
        return seen == expected

    try:
        await poll(is_so, within=15, what=f"{expected}")
    except TimeoutError:
        assert seen == expected


async def test_a_block_is_exposed_as_0_before_it_is_counted(
    simulated: SimulatedStage, tmp_path: Path
) -> None:
    """As soon as a VM cools down, its counter is 0; its first block makes it 1, at once."""
    namespace = await simulated.make_namespace()
    await simulated.admin.create(VMIS, vmi("db1", namespace))
    async with exporting(simulated, tmp_path) as exporter:
        assert await read_blocks(exporter) == {}
        await migrate(simulated.admin, namespace, "db1", ago=[60.0])
        await until_blocks(exporter, {("cooldown", "n1"): 0})
        assert (await exporter.verdict(namespace, "db1", dryRun=True))["reason"] == "cooldown"
        assert await read_blocks(exporter) == {("cooldown", "n1"): 0}
        assert (await exporter.verdict(namespace, "db1"))["reason"] == "cooldown"
        assert await read_blocks(exporter) == {("cooldown", "n1"): 1}


async def test_what_follows_a_migration_is_foreseen(
    simulated: SimulatedStage, tmp_path: Path
) -> None:
    """While a VM moves, its counters exist for the migration, and for the cooldown on both nodes.

    When it has moved, only the cooldown on the new node is possible, besides what was counted.
    """
    namespace = await simulated.make_namespace()
    made = await simulated.admin.create(VMIS, vmi("db1", namespace))
    await simulated.admin.create(PODS, launcher_pod(made))
    async with exporting(simulated, tmp_path) as exporter:
        moving = await simulated.admin.create(VMIMS, vmim("moving", namespace, of="db1"))
        here = {("migration_in_progress", "n1"): 0.0, ("cooldown", "n1"): 0.0}
        await until_blocks(exporter, here)
        await simulated.admin.create(PODS, launcher_pod(made, node="n2", migration=moving))
        there = {("migration_in_progress", "n2"): 0.0, ("cooldown", "n2"): 0.0}
        await until_blocks(exporter, here | there)
        assert (await exporter.verdict(namespace, "db1"))["reason"] == "migration_in_progress"
        await migrate(simulated.admin, namespace, "db1", ago=[5.0])
        await simulated.admin.merge(VMIS, namespace, "db1", {"status": {"nodeName": "n2"}})
        await simulated.admin.delete(VMIMS, namespace, "moving")
        counted = {("migration_in_progress", "n1"): 1.0}
        await until_blocks(exporter, counted | {("cooldown", "n2"): 0})
        assert (await exporter.verdict(namespace, "db1"))["reason"] == "cooldown"
        assert await read_blocks(exporter) == counted | {("cooldown", "n2"): 1}


async def test_an_evacuation_is_foreseen(simulated: SimulatedStage, tmp_path: Path) -> None:
    """A VM that is asked to leave may be blocked by its evacuation and by what follows."""
    namespace = await simulated.make_namespace()
    made = await simulated.admin.create(VMIS, vmi("db1", namespace))
    await simulated.admin.create(PODS, launcher_pod(made, evicting=True))
    async with exporting(simulated, tmp_path) as exporter:
        marked = {"status": {"evacuationNodeName": "n1"}}
        await simulated.admin.merge(VMIS, namespace, "db1", marked)
        reasons = ("evacuation_in_progress", "migration_in_progress", "cooldown")
        await until_blocks(exporter, {(reason, "n1"): 0 for reason in reasons})
        assert (await exporter.verdict(namespace, "db1"))["reason"] is None


async def test_a_restart_and_a_second_replica(simulated: SimulatedStage, tmp_path: Path) -> None:
    """Each replica, also after a restart, has the series at 0 before its own first block."""
    namespace = await simulated.make_namespace()
    await simulated.admin.create(VMIS, vmi("db1", namespace))
    await migrate(simulated.admin, namespace, "db1", ago=[60.0])
    async with exporting(simulated, tmp_path) as first, exporting(simulated, tmp_path) as other:
        await first.verdict(namespace, "db1")
        assert await read_blocks(first) == {("cooldown", "n1"): 1}
        assert await read_blocks(other) == {("cooldown", "n1"): 0}
        await first.end()
    async with exporting(simulated, tmp_path) as again:
        assert await read_blocks(again) == {("cooldown", "n1"): 0}
        await again.verdict(namespace, "db1")
        assert await read_blocks(again) == {("cooldown", "n1"): 1}


async def test_a_recreated_vm_and_a_node_that_goes_away(
    simulated: SimulatedStage, tmp_path: Path
) -> None:
    """A 0 goes with the VM that could be blocked, and with its node; what was counted stays."""
    namespace = await simulated.make_namespace()
    node = {"apiVersion": "v1", "kind": NODES.kind, "metadata": {"name": "n2"}}
    await simulated.admin.create(NODES, node)
    for name, place in (("db1", "n1"), ("db2", "n2")):
        await simulated.admin.create(VMIS, vmi(name, namespace, node=place))
        await migrate(simulated.admin, namespace, name, ago=[60.0])
    async with exporting(simulated, tmp_path) as exporter:
        await until_blocks(exporter, {("cooldown", "n1"): 0, ("cooldown", "n2"): 0})
        await simulated.admin.delete(VMIS, namespace, "db2")
        await simulated.admin.delete(NODES, None, "n2")
        await until_blocks(exporter, {("cooldown", "n1"): 0})
        await exporter.verdict(namespace, "db1")
        await simulated.admin.delete(VMIS, namespace, "db1")
        await exporter.until(f"/v1/vmis/{namespace}/db1", lambda status, _: status == 404)
        await simulated.next_second()
        await simulated.admin.create(VMIS, vmi("db1", namespace, node="n3"))
        await exporter.until(f"/v1/vmis/{namespace}/db1", lambda status, _: status == 200)
        assert await read_blocks(exporter) == {("cooldown", "n1"): 1}


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


async def test_a_target_without_vms_is_counted_from_0(
    simulated: SimulatedStage, tmp_path: Path
) -> None:
    """The counters of a node exist from the moment at which a migration goes there."""
    namespace = await simulated.make_namespace()
    await simulated.admin.create(VMIS, vmi("db1", namespace))
    async with exporting(simulated, tmp_path) as exporter:
        state = {
            "migrationUid": "m1",
            "sourceNode": "n1",
            "targetNode": "n7",
            "startTimestamp": rfc3339(time.time()),
        }
        await simulated.admin.merge(VMIS, namespace, "db1", {"status": {"migrationState": state}})

        async def is_there() -> bool:
            name = "kubevirt_eviction_exporter_migrations_to_node_total"
            labels = ("node:n7", "outcome:failed")
            return (await read_counters(exporter)).get((name, labels)) == 0

        await poll(is_there, within=15, what="the counters of n7")


PREVENTED = "kubevirt_eviction_exporter_moves_prevented_total"
PREVENTED_SECONDS = "kubevirt_eviction_exporter_prevented_migration_seconds_total"


async def test_a_prevented_move_counts_once_per_cooldown(
    simulated: SimulatedStage, tmp_path: Path
) -> None:
    """However often a VM is asked for, it counts once in each cooldown; the counter begins at 0.

    A replica that starts again counts the present cooldown once more. `/v1/status` has the total.
    """
    namespace = await simulated.make_namespace()
    await simulated.admin.create(VMIS, vmi("db1", namespace))

    async def read(exporter: Program) -> tuple[float | None, float | None]:
        counters = await read_counters(exporter)
        labels = (f"namespace:{namespace}",)
        return counters.get((PREVENTED, labels)), counters.get((PREVENTED_SECONDS, labels))

    async with exporting(simulated, tmp_path) as exporter:
        assert await read(exporter) == (None, None)
        await migrate(simulated.admin, namespace, "db1", ago=[300.0], forget=False)
        await until_begun(exporter, 1, 900)
        assert await read(exporter) == (0, 0)
        for _ in range(3):
            assert (await exporter.verdict(namespace, "db1"))["reason"] == "cooldown"
        assert await read(exporter) == (1, 10)
        await migrate(simulated.admin, namespace, "db1", ago=[100.0], forget=False)
        await until_begun(exporter, 2, 900 + 1800)
        for _ in range(2):
            await exporter.verdict(namespace, "db1")
        assert await read(exporter) == (2, 20)
        _, status = await exporter.get("/v1/status")
        assert status["prevented"].items() >= {"moves": 2, "migrationSeconds": 20.0}.items()
        await exporter.end()
    async with exporting(simulated, tmp_path) as again:
        assert await read(again) == (0, 0)
        for _ in range(2):
            await again.verdict(namespace, "db1")
        assert await read(again) == (1, 10)


BEGUN = "kubevirt_eviction_exporter_cooldown_duration_seconds"
ASKED = "descheduler_kubevirt_effective_cooldown_seconds"


async def read_begun(exporter: Program) -> tuple[float, float]:
    """How many cooldowns have begun, and how long they are together."""
    return await exporter.sample(f"{BEGUN}_count"), await exporter.sample(f"{BEGUN}_sum")


async def until_begun(exporter: Program, cooldowns: float, seconds: float) -> None:
    """Wait for the number of cooldowns that have begun, and for the sum of their lengths."""
    seen = (-1.0, -1.0)

    async def is_so() -> bool:
        nonlocal seen
        seen = await read_begun(exporter)
        return seen == (cooldowns, seconds)

    try:
        await poll(is_so, within=15, what=f"{cooldowns} cooldowns")
    except TimeoutError:
        assert seen == (cooldowns, seconds)


async def test_a_cooldown_is_observed_once(simulated: SimulatedStage, tmp_path: Path) -> None:
    """Each cooldown adds one observation when it begins, however often somebody asks."""
    namespace = await simulated.make_namespace()
    await simulated.admin.create(VMIS, vmi("db1", namespace))
    async with exporting(simulated, tmp_path) as exporter:
        assert await read_begun(exporter) == (0, 0)
        await migrate(simulated.admin, namespace, "db1", ago=[300.0])
        await until_begun(exporter, 1, 900)
        for _ in range(5):
            assert (await exporter.verdict(namespace, "db1"))["reason"] == "cooldown"
        await migrate(simulated.admin, namespace, "db1", ago=[200.0, 100.0])
        await until_begun(exporter, 3, 900 + 1800 + 3600)
        assert await exporter.sample(f"{ASKED}_count") == 5
        await simulated.admin.merge(VMIS, namespace, "db1", {"status": {"nodeName": "n2"}})
        await simulated.admin.delete(VMIS, namespace, "db1")
        await exporter.until(f"/v1/vmis/{namespace}/db1", lambda status, _: status == 404)
        await simulated.next_second()
        await simulated.admin.create(VMIS, vmi("db1", namespace))
        await migrate(simulated.admin, namespace, "db1", ago=[50.0])
        await until_begun(exporter, 4, 900 + 1800 + 3600 + 900)


async def test_a_cooldown_that_began_before_the_start_is_not_observed(
    simulated: SimulatedStage, tmp_path: Path
) -> None:
    """After a restart only later cooldowns are observed; of two replicas, each observes all."""
    namespace = await simulated.make_namespace()
    for name in ("db1", "db2"):
        await simulated.admin.create(VMIS, vmi(name, namespace))
    async with exporting(simulated, tmp_path) as first, exporting(simulated, tmp_path) as other:
        await migrate(simulated.admin, namespace, "db1", ago=[300.0], forget=False)
        for replica in (first, other):
            await until_begun(replica, 1, 900)
        await first.end()
    async with exporting(simulated, tmp_path) as again:
        assert (await again.verdict(namespace, "db1"))["reason"] == "cooldown"
        await migrate(simulated.admin, namespace, "db2", ago=[200.0])
        await until_begun(again, 1, 900)


async def test_the_buckets_fit_the_policy(simulated: SimulatedStage, tmp_path: Path) -> None:
    """Each bucket is a step of the policy or of an exception, up to the longest cooldown."""
    login = str(open_kubeconfig(tmp_path / "login", simulated.url))
    slow = {"name": "slow", "match": {"namespaces": ["db-*"]}, "migrationCooldown": "5h"}
    policy = {"migrationCooldown": "30m", "overrides": [slow]}
    async with program(tmp_path, "--kubeconfig", login, config={"policy": policy}) as exporter:
        await exporter.ready()
        _, text = await exporter.get("/metrics")
    bounds = [
        sample.labels["le"]
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == f"{BEGUN}_bucket"
    ]
    hours = (0.5, 1, 2, 4, 5, 6)
    assert bounds == [*(f"{3600.0 * hour}" for hour in hours), "+Inf"]
