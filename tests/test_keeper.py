"""The checkpoint as kept: in a file and in ConfigMaps, by processes on a real API server."""

import signal
from pathlib import Path

from exporter.checkpoint import shard_of
from tests.cluster import VMIS, poll, vmi
from tests.cluster.resources import CONFIG_MAPS
from tests.keeping import NAME, a_keeper, keeping, migrate
from tests.program import Program, program
from tests.stages import RealStage


UNWRITTEN = "kubevirt_eviction_exporter_checkpoint_unwritten_timestamp_seconds"
WRITER = "kubevirt_eviction_exporter_checkpoint_writer"
VMIS_KEPT = "kubevirt_eviction_exporter_checkpoint_vmis"
FAULTS = "kubevirt_eviction_exporter_checkpoint_faults_total"


async def until_counted(exporter: Program, namespace: str, name: str, migrations: int) -> None:
    """Wait until that many migrations of a VMI count."""

    async def is_so() -> bool:
        verdict = await exporter.verdict(namespace, name, dryRun=True)
        return bool(verdict["migrationsInWindow"] == migrations)

    await poll(is_so, within=30, what=f"{migrations} migrations of {name}")


async def until_written(exporter: Program) -> None:
    """Wait until nothing waits to be written."""

    async def is_written() -> bool:
        kept = await exporter.sample(VMIS_KEPT)
        return kept > 0 and await exporter.sample(UNWRITTEN) == 0

    await poll(is_written, within=30, what="a checkpoint")


async def test_configmaps_outlive_every_process(real: RealStage, tmp_path: Path) -> None:
    """Eight migrations, their VMIMs gone: killed replicas leave all of them behind."""
    namespace = await real.make_namespace()
    login = str(await a_keeper(real.cluster, namespace))
    config = keeping(namespace)
    made = await real.admin.create(VMIS, vmi("db", namespace))
    async with (
        program(tmp_path, "--kubeconfig", login, config=config) as one,
        program(tmp_path, "--kubeconfig", login, config=config) as other,
    ):
        await one.ready()
        await other.ready()
        await migrate(real.admin, namespace, "db", ago=range(100, 900, 100))
        for replica in (one, other):
            await until_counted(replica, namespace, "db", 8)
            await until_written(replica)
        assert sorted([await one.sample(WRITER), await other.sample(WRITER)]) == [0, 1]
        for replica in (one, other):
            await replica.end(signal.SIGKILL)
    kept = {
        m["metadata"]["name"]: m for m in (await real.admin.list(CONFIG_MAPS, namespace))["items"]
    }
    shard = kept[f"{NAME}-{shard_of(made['metadata']['uid']):02d}"]
    assert shard["metadata"]["labels"] == {"kubevirt-eviction-exporter/checkpoint": NAME}
    assert set(shard["binaryData"]) == {"checkpoint"}
    async with program(tmp_path, "--kubeconfig", login, config=config) as heir:
        await heir.ready()
        verdict = await heir.verdict(namespace, "db", dryRun=True)
        assert verdict["migrationsInWindow"] == 8
        assert await heir.end() == 0
        assert heir.events("lease_released") or not heir.events("lease_taken")


async def test_without_a_checkpoint_only_the_cluster_remembers(
    real: RealStage, tmp_path: Path
) -> None:
    """What makes the test above prove something: with none, one migration is left."""
    namespace = await real.make_namespace()
    await real.admin.create(VMIS, vmi("db", namespace))
    await migrate(real.admin, namespace, "db", ago=range(100, 900, 100))
    async with program(tmp_path, "--kubeconfig", str(real.login.kubeconfig)) as exporter:
        await exporter.ready()
        assert (await exporter.verdict(namespace, "db"))["migrationsInWindow"] == 1
