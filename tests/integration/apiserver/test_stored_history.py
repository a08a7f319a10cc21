"""The stored history in a file and in ConfigMaps, by processes on a real API server."""

import asyncio
import json
import signal
import time
from base64 import b64decode
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any, cast

import pytest

from exporter.engine.facts.model import Resource
from exporter.health import Health, HistoryFault, HistoryHealth, Watched
from exporter.history.changes import PendingChanges
from exporter.history.configmap import ConfigMapWriter
from exporter.history.file import HistoryUnwritable, read_files
from exporter.history.format import SHARDS, shard_of
from exporter.history.reader import ConfigMapReader
from exporter.history.writer import WriteSignal
from exporter.kube.client import Absent, ApiServer, Forbidden
from exporter.kube.lease import Lease
from exporter.kube.login import Login
from exporter.kube.objects.kubevirt import HISTORY_LABEL
from exporter.settings import ConfigMaps
from tests.cluster import EXPORTER_READS, VMIMS, VMIS, poll, vmi
from tests.cluster.resources import CONFIG_MAPS
from tests.support.api_servers import RealStage
from tests.support.builders import KEEP, NOW, UID, a_state, a_vmi
from tests.support.lives import ended_state
from tests.support.program import Program, program
from tests.support.stored_history import (
    FAULTS,
    NAME,
    FixedLease,
    a_keeper,
    keeping,
    migrate,
    migrate_unseen,
    read_shard,
    until_counted,
    until_one_writes,
    until_written,
)
from tests.support.stores import ClockedStore, pending_changes, put


async def test_configmaps_outlive_every_process(real: RealStage, tmp_path: Path) -> None:
    """Eight migrations without VMIMs are restored after all replicas were killed."""
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
    assert shard["metadata"]["labels"] == {"kubevirt-eviction-exporter/history": NAME}
    assert set(shard["binaryData"]) == {"history"}
    unhurried = keeping(namespace, leaseDuration="15s")
    async with program(tmp_path, "--kubeconfig", login, config=unhurried) as successor:
        await successor.ready()
        verdict = await successor.verdict(namespace, "db", dryRun=True)
        assert verdict["migrationsInWindow"] == 8
        await until_one_writes(successor)
        assert await successor.end() == 0
        assert successor.events("lease_released")


async def test_the_holder_learns_what_only_a_standby_saw(real: RealStage, tmp_path: Path) -> None:
    """Migrations that only a standby has seen are stored by the holder of the Lease."""
    namespace = await real.make_namespace()
    await real.admin.create(VMIS, vmi("db", namespace))
    without_vmims = [one for one in EXPORTER_READS if one != VMIMS]
    blind = str(await a_keeper(real.cluster, namespace, without_vmims))
    seeing = str(await a_keeper(real.cluster, namespace))
    config = keeping(namespace, leaseDuration="15s")
    async with program(tmp_path, "--kubeconfig", blind, config=config) as holder:
        await holder.ready()
        await until_one_writes(holder)
        async with program(tmp_path, "--kubeconfig", seeing, config=config) as standby:
            await standby.ready()
            for ago in (300, 200, 100):
                await migrate_unseen(real.admin, namespace, "db", ago=ago)
            await until_counted(standby, namespace, "db", 3)
            await until_counted(holder, namespace, "db", 3)
            await until_written(standby)
            await until_one_writes(holder)
            await standby.end(signal.SIGKILL)
        await holder.end(signal.SIGKILL)
    async with program(tmp_path, "--kubeconfig", blind, config=config) as successor:
        await successor.ready()
        assert (await successor.verdict(namespace, "db", dryRun=True))["migrationsInWindow"] == 3


async def test_a_standby_does_nothing_again_for_shards_without_news(
    real: RealStage, tmp_path: Path, prove: Callable[[str], None]
) -> None:
    """Rewritten ConfigMaps without changes cost a standby little CPU."""
    namespace, vmis = await real.make_namespace(), 1_000
    slots = asyncio.Semaphore(20)

    async def migrate_to(number: int, end: float) -> None:
        state = {"migrationState": ended_state(f"m{number}", end - 10, end)}
        async with slots:
            await real.admin.merge(VMIS, namespace, f"db{number}", {"status": state})

    async def touch(shard: int) -> None:
        async with slots:
            name, annotations = f"{NAME}-{shard:02d}", {"touched": str(next(touches))}
            body = {"metadata": {"annotations": annotations}}
            await real.admin.merge(CONFIG_MAPS, namespace, name, body)

    async def create(number: int) -> None:
        async with slots:
            await real.admin.create(VMIS, vmi(f"db{number}", namespace))

    touches, began = count(1), time.time()
    await asyncio.gather(*map(create, range(vmis)))
    await asyncio.gather(*(migrate_to(number, began - 600) for number in range(vmis)))
    login = str(await a_keeper(real.cluster, namespace))
    config = {**keeping(namespace, leaseDuration="60s"), "namespaces": [namespace]}
    async with program(tmp_path, "--kubeconfig", login, config=config) as holder:
        await holder.ready()
        await until_one_writes(holder)
        await until_written(holder)
        async with program(tmp_path, "--kubeconfig", login, config=config) as ours:
            await ours.ready()
            cost = dict[str, float]()
            for what, work in {
                "a rewrite": [touch(shard) for shard in range(SHARDS)],
                "changes": [migrate_to(number, began - 60) for number in range(vmis)],
            }.items():
                before = await until_idle(ours)
                await asyncio.gather(*work)
                cost[what] = await until_idle(ours) - before
            prove(f"a standby with {vmis} VMIs, CPU seconds: {cost}")
            assert cost["a rewrite"] < cost["changes"] / 12


async def until_idle(exporter: Program) -> float:
    """Wait until the process is idle; returns its CPU seconds."""

    async def is_idle() -> bool:
        for path in ("/v1/blocked", "/v1/status"):
            assert (await exporter.get(path))[0] == 200
        before = exporter.cpu()
        await asyncio.sleep(0.5)
        return exporter.cpu() - before < 0.01

    await poll(is_idle, what="an idle exporter")
    return exporter.cpu()


async def test_refused_shards_do_not_keep_the_others_waiting(
    real: RealStage, tmp_path: Path
) -> None:
    """Three immutable ConfigMaps do not prevent the other shards from being written."""
    namespace = await real.make_namespace()
    login = str(await a_keeper(real.cluster, namespace))
    by_shard: dict[int, str] = {}
    while len(by_shard) < 5:
        name = f"db{len(by_shard)}"
        made = await real.admin.create(VMIS, vmi(name, namespace))
        if by_shard.setdefault(shard_of(made["metadata"]["uid"]), name) != name:
            await real.admin.delete(VMIS, namespace, name)
    shards = sorted(by_shard)
    for shard in shards[:3]:
        name, labels = f"{NAME}-{shard:02d}", {HISTORY_LABEL: NAME}
        metadata = {"name": name, "namespace": namespace, "labels": labels}
        frozen = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "immutable": True}
        await real.admin.create(CONFIG_MAPS, frozen)
    for name in by_shard.values():
        await migrate(real.admin, namespace, name, ago=[60])
    config = {**keeping(namespace), "namespaces": [namespace]}
    async with program(tmp_path, "--kubeconfig", login, config=config) as exporter:
        await exporter.ready()

        async def others_are_written() -> bool:
            listed = (await real.admin.list(CONFIG_MAPS, namespace))["items"]
            written = {one["metadata"]["name"] for one in listed if "binaryData" in one}
            return written == {f"{NAME}-{shard:02d}" for shard in shards[3:]}

        await poll(others_are_written, what="the shards that are not refused")
        assert await exporter.sample(FAULTS, fault="not_written")


async def test_a_label_that_was_removed_is_put_back(real: RealStage, tmp_path: Path) -> None:
    """A removed label is restored, because replicas select their ConfigMaps by this label."""
    namespace = await real.make_namespace()
    login = str(await a_keeper(real.cluster, namespace))
    made = await real.admin.create(VMIS, vmi("db", namespace))
    name = f"{NAME}-{shard_of(made['metadata']['uid']):02d}"
    await migrate(real.admin, namespace, "db", ago=[60])
    async with program(tmp_path, "--kubeconfig", login, config=keeping(namespace)) as exporter:
        await exporter.ready()
        await until_written(exporter)
        unlabelled = {"metadata": {"labels": {HISTORY_LABEL: None}}}
        await real.admin.merge(CONFIG_MAPS, namespace, name, unlabelled)

        async def is_labelled() -> bool:
            found = await real.admin.get(CONFIG_MAPS, namespace, name)
            return HISTORY_LABEL in found["metadata"].get("labels", {})

        await poll(is_labelled, what="the label")
        await until_written(exporter)


async def test_without_a_history_only_the_cluster_remembers(
    real: RealStage, tmp_path: Path
) -> None:
    """Without a stored history a new process knows only the last migration."""
    namespace = await real.make_namespace()
    await real.admin.create(VMIS, vmi("db", namespace))
    await migrate(real.admin, namespace, "db", ago=range(100, 900, 100))
    async with program(tmp_path, "--kubeconfig", str(real.login.kubeconfig)) as exporter:
        await exporter.ready()
        assert (await exporter.verdict(namespace, "db"))["migrationsInWindow"] == 1


class Garbled:
    """An API server that answers an apply with something other than a ConfigMap."""

    def __init__(self) -> None:
        self.applied = 0

    async def read(self, *_: object) -> bytes:
        """Raise `Absent`, as there is no ConfigMap yet."""
        raise Absent("404")

    async def apply(self, *_: object, **__: object) -> bytes:
        """Answer with an empty list."""
        self.applied += 1
        return b"[]"


class Full:
    """An API server with a quota that refuses new ConfigMaps."""

    def __init__(self) -> None:
        self.full = False
        self.applied: dict[str, Any] = {}

    async def read(self, _resource: Resource, _namespace: str, name: str) -> bytes:
        """Read a ConfigMap that was applied."""
        if name not in self.applied:
            raise Absent("404")
        return json.dumps(self.applied[name]).encode()

    async def apply(
        self, _resource: Resource, _namespace: str, name: str, body: dict[str, Any], **_: object
    ) -> bytes:
        """Store an existing ConfigMap, refuse a new one."""
        if self.full and name not in self.applied:
            raise Forbidden("403 exceeded quota: count/configmaps")
        body["metadata"] |= {"resourceVersion": "1", "uid": "u"}
        self.applied[name] = body
        return json.dumps(body).encode()


def a_config_map_writer(
    api: Garbled | Full | ApiServer, namespace: str = "x", uid: str = UID, *, may_write: bool = True
) -> tuple[ConfigMapWriter, PendingChanges, HistoryHealth]:
    """A writer with the history of one VMI, without a watch."""
    store = ClockedStore(keep=KEEP)
    changes = pending_changes(store, window=86_400.0)
    store.put(a_vmi(uid=uid, migration=a_state()))
    watched = Watched(Resource.CONFIGMAPS, namespace, synced=True)
    status = HistoryHealth(find_unwritten=lambda: changes.unwritten_since)
    place, signal = ConfigMaps(namespace, NAME), WriteSignal()
    reader = ConfigMapReader(changes, watched, status, signal, place, clock=lambda: NOW)
    status.loaded = True
    writer = ConfigMapWriter(
        changes,
        Health(180.0, 600.0, [watched]),
        status,
        signal,
        cast("ApiServer", api),
        reader=reader,
        lease=cast("Lease", FixedLease(held=may_write)),
        interval=1.0,
        clock=lambda: NOW,
    )
    return writer, changes, status


async def test_an_answer_that_is_no_config_map() -> None:
    """An invalid answer is counted, and the shard is written again later."""
    api = Garbled()
    writer, changes, status = a_config_map_writer(api)
    await writer.flush()
    assert api.applied == 1
    assert status.faults == {HistoryFault.NOT_WRITTEN: 1}
    assert changes.unwritten == [shard_of(UID)]
    assert status.find_unwritten() == NOW


async def test_a_quota_keeps_no_existing_config_map_waiting() -> None:
    """If a quota allows no new ConfigMap, this is counted, and existing ones are still written."""
    api = Full()
    writer, changes, status = a_config_map_writer(api)
    await writer.flush()
    (name,), before = api.applied, json.dumps(api.applied)
    api.full = True
    for number in range(64):
        put(changes.store, a_vmi(name=f"new-{number}", uid=f"{number}", migration=a_state()))
    again = a_state(uid="again", start=NOW - 60.0, end=NOW - 5.0)
    put(changes.store, a_vmi(uid=UID, migration=again))
    await writer.flush()

    assert list(api.applied) == [name]
    assert json.dumps(api.applied) != before
    assert shard_of(UID) not in changes.unwritten
    assert status.faults == {HistoryFault.NOT_WRITTEN: 1}


@pytest.mark.parametrize("name", ["missing/history", "x" * 256], ids=["no-directory", "too-long"])
async def test_a_file_that_can_never_be_written(tmp_path: Path, name: str) -> None:
    """If the file cannot be written, the start ends with an error that names the file."""
    path = tmp_path / name
    with pytest.raises(HistoryUnwritable, match=f"history: file:{path}: "):
        await read_files(path, {})


async def test_a_shard_that_no_config_map_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard that is too large for a ConfigMap is not sent, and is counted as a fault."""
    monkeypatch.setattr("exporter.history.configmap.LONGEST_SHARD", 10)
    api = Garbled()
    writer, changes, status = a_config_map_writer(api)
    await writer.flush()
    assert api.applied == 0
    assert status.faults == {HistoryFault.TOO_LARGE: 1}
    assert changes.unwritten == [shard_of(UID)]


async def test_a_config_map_that_the_watch_has_not_shown(real: RealStage) -> None:
    """A shard that another replica has just written is merged, not overwritten."""
    namespace = await real.make_namespace()
    shard = shard_of(UID)
    other_uid = next(uid for uid in map(str, count()) if shard_of(uid) == shard)
    login = Login(kubeconfig=real.cluster.kubeconfig(real.cluster.administrator))
    async with ApiServer(login, read_timeout=5) as api:
        for uid in (UID, other_uid):
            writer, changes, status = a_config_map_writer(api, namespace, uid)
            await writer.flush()
            assert (changes.unwritten, status.faults) == ([], {})
    (kept,) = (await real.admin.list(CONFIG_MAPS, namespace))["items"]
    listed = read_shard(b64decode(kept["binaryData"]["history"]))
    assert {remembered.uid for remembered in listed} == {UID, other_uid}
