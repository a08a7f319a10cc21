"""The checkpoint as kept: in a file and in ConfigMaps, by processes on a real API server."""

import json
import signal
from base64 import b64decode
from itertools import count
from pathlib import Path
from typing import Any, cast

import pytest

from exporter.checkpoint.changes import PendingChanges
from exporter.checkpoint.configmap import ConfigMapWriter
from exporter.checkpoint.file import CheckpointUnwritable, FileWriter
from exporter.checkpoint.format import seal, shard_of, unseal
from exporter.engine.model import ConfigMap, Resource
from exporter.engine.store import Store
from exporter.health import CheckpointFault, CheckpointHealth, Health, Watched
from exporter.kube.client import Absent, ApiServer, Forbidden, Login
from exporter.kube.lease import Lease
from exporter.settings import ConfigMaps
from tests.cluster import VMIS, vmi
from tests.cluster.resources import CONFIG_MAPS
from tests.support import builders
from tests.support.api_servers import RealStage
from tests.support.builders import KEEP, NAMESPACE, NOW, UID, a_state, a_vmi
from tests.support.checkpoints import (
    NAME,
    a_keeper,
    keeping,
    migrate,
    until_counted,
    until_one_writes,
    until_written,
)
from tests.support.program import program


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
        await until_one_writes(one, other)
        for replica in (one, other):
            await replica.end(signal.SIGKILL)
    kept = {
        m["metadata"]["name"]: m for m in (await real.admin.list(CONFIG_MAPS, namespace))["items"]
    }
    shard = kept[f"{NAME}-{shard_of(made['metadata']['uid']):02d}"]
    assert shard["metadata"]["labels"] == {"kubevirt-eviction-exporter/checkpoint": NAME}
    assert set(shard["binaryData"]) == {"checkpoint"}
    unhurried = keeping(namespace, leaseDuration="15s")
    async with program(tmp_path, "--kubeconfig", login, config=unhurried) as heir:
        await heir.ready()
        verdict = await heir.verdict(namespace, "db", dryRun=True)
        assert verdict["migrationsInWindow"] == 8
        await until_one_writes(heir)
        assert await heir.end() == 0
        assert heir.events("lease_released")


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


class FixedLease:
    """A Lease that is held, or not, for good."""

    def __init__(self, *, held: bool) -> None:
        self.held = held
        self.changed = lambda: None


class Garbled:
    """An API server that takes what is applied, and answers with what is no ConfigMap."""

    def __init__(self) -> None:
        self.applied = 0

    async def read(self, *_: object) -> bytes:
        """There is no ConfigMap yet."""
        raise Absent("404")

    async def apply(self, *_: object, **__: object) -> bytes:
        """Answer garbage."""
        self.applied += 1
        return b"[]"


class Full:
    """An API server with a quota: ConfigMaps that exist are applied, and no new ones."""

    def __init__(self) -> None:
        self.full = False
        self.applied: dict[str, Any] = {}

    async def read(self, _resource: Resource, _namespace: str, name: str) -> bytes:
        """A ConfigMap that was applied."""
        if name not in self.applied:
            raise Absent("404")
        return json.dumps(self.applied[name]).encode()

    async def apply(
        self, _resource: Resource, _namespace: str, name: str, body: dict[str, Any], **_: object
    ) -> bytes:
        """Keep the ConfigMap, or refuse a new one."""
        if self.full and name not in self.applied:
            raise Forbidden("403 exceeded quota: count/configmaps")
        body["metadata"] |= {"resourceVersion": "1", "uid": "u"}
        self.applied[name] = body
        return json.dumps(body).encode()


def a_config_map_writer(
    api: Garbled | Full | ApiServer, namespace: str = "x", uid: str = UID, *, may_write: bool = True
) -> tuple[ConfigMapWriter, PendingChanges, CheckpointHealth]:
    """A writer with one VMI to write of, and no watch."""
    store = Store(endings_kept=KEEP)
    changes = PendingChanges(store, window=86_400.0)
    store.put(a_vmi(uid=uid, migration=a_state()))
    health = Health(180.0, 600.0, [Watched(Resource.CONFIGMAPS, namespace, synced=True)])
    writer = ConfigMapWriter(
        changes,
        health,
        cast("ApiServer", api),
        ConfigMaps(namespace, NAME),
        lease=cast("Lease", FixedLease(held=may_write)),
        interval=1.0,
        clock=lambda: NOW,
    )
    assert health.checkpoint is not None
    return writer, changes, health.checkpoint


async def test_an_answer_that_is_no_config_map() -> None:
    """It is counted and the shard waits to be written again; nothing ends."""
    api = Garbled()
    writer, changes, told = a_config_map_writer(api)
    await writer.flush()
    assert api.applied == 1
    assert told.faults == {CheckpointFault.NOT_WRITTEN: 1}
    assert changes.changed == {shard_of(UID)}
    assert told.unwritten_since == NOW


async def test_a_quota_keeps_no_existing_config_map_waiting() -> None:
    """A shard that cannot be created is counted, and those that exist are written on."""
    api = Full()
    writer, changes, told = a_config_map_writer(api)
    await writer.flush()
    (name,), before = api.applied, json.dumps(api.applied)
    api.full = True
    for number in range(64):
        changes.store.put(a_vmi(name=f"new-{number}", uid=f"{number}", migration=a_state()))
    again = a_state(uid="again", start=NOW - 60.0, end=NOW - 5.0)
    changes.store.put(a_vmi(uid=UID, migration=again))
    await writer.flush()

    assert list(api.applied) == [name]
    assert json.dumps(api.applied) != before
    assert shard_of(UID) not in changes.changed
    assert told.faults == {CheckpointFault.NOT_WRITTEN: 1}


async def test_a_replica_that_lags_behind_the_writer() -> None:
    """It reads the ConfigMap before its own watch: nothing is unwritten once that caught up."""
    writer, changes, told = a_config_map_writer(Garbled(), may_write=False)
    await writer.flush()
    without_it = {"checkpoint": seal([])}
    writer.put(
        ConfigMap(namespace="x", name=f"{NAME}-{shard_of(UID):02d}", version="1", data=without_it)
    )
    assert told.unwritten_since == NOW
    changes.store.remove(Resource.VMIS, NAMESPACE, builders.NAME)
    await writer.flush()
    assert told.unwritten_since is None


@pytest.mark.parametrize("name", ["missing/history", "x" * 256], ids=["no-directory", "too-long"])
def test_a_file_that_can_never_be_written(tmp_path: Path, name: str) -> None:
    """The start ends with the file that the configuration names."""
    changes = PendingChanges(Store(endings_kept=KEEP), window=86_400.0)
    path = tmp_path / name
    writer = FileWriter(changes, Health(180.0, 600.0), path, interval=1.0, clock=lambda: NOW)
    with pytest.raises(CheckpointUnwritable, match=f"checkpoint: file:{path}: "):
        writer.read()


async def test_a_shard_that_no_config_map_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not even sent, and counted once for each attempt to write."""
    monkeypatch.setattr("exporter.checkpoint.configmap.LONGEST_SHARD", 10)
    api = Garbled()
    writer, changes, told = a_config_map_writer(api)
    await writer.flush()
    assert api.applied == 0
    assert told.faults == {CheckpointFault.TOO_LARGE: 1}
    assert changes.changed == {shard_of(UID)}


async def test_a_config_map_that_the_watch_has_not_shown(real: RealStage) -> None:
    """What another replica wrote into it is joined, not overwritten."""
    namespace = await real.make_namespace()
    shard = shard_of(UID)
    other_uid = next(uid for uid in map(str, count()) if shard_of(uid) == shard)
    login = Login(kubeconfig=real.cluster.kubeconfig(real.cluster.administrator))
    async with ApiServer(login, read_timeout=5) as api:
        for uid in (UID, other_uid):
            writer, changes, told = a_config_map_writer(api, namespace, uid)
            await writer.flush()
            assert (changes.changed, told.faults) == (set(), {})
    (kept,) = (await real.admin.list(CONFIG_MAPS, namespace))["items"]
    listed = unseal(b64decode(kept["binaryData"]["checkpoint"]))
    assert {remembered.uid for remembered in listed} == {UID, other_uid}
