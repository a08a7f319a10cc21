"""Helpers for tests of the stored history: permissions, settings, waiting, past migrations."""

import time
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

from exporter.engine.facts.evidence import Remembered
from exporter.history.format import decode, unseal
from tests.cluster import (
    EXPORTER_READS,
    PATIENCE,
    VMIMS,
    VMIS,
    Client,
    RealCluster,
    Resource,
    User,
    poll,
    vmim,
)
from tests.cluster.access import allow
from tests.cluster.resources import CONFIG_MAPS, LEASES
from tests.support.builders import transitions_json
from tests.support.lives import ended_state
from tests.support.program import Program


NAME = "history"
BRISK = {"historyInterval": "500ms", "leaseDuration": "2s"}
"""`kube` settings with short intervals."""

UNWRITTEN = "kubevirt_eviction_exporter_history_unwritten_timestamp_seconds"
WRITER = "kubevirt_eviction_exporter_history_writer"
VMIS_KEPT = "kubevirt_eviction_exporter_history_vmis"
FAULTS = "kubevirt_eviction_exporter_history_faults_total"

_numbers = count(1)


async def a_keeper(
    cluster: RealCluster, namespace: str, reads: Iterable[Resource] = EXPORTER_READS
) -> Path:
    """A kubeconfig with permission to read the cluster and write the history `NAME`."""
    name = f"keeper-{next(_numbers)}"
    user: User = await cluster.user(name, reads)
    shards = [f"{NAME}-{shard:02d}" for shard in range(64)]
    maps = {"apiGroups": [""], "resources": [CONFIG_MAPS.plural]}
    leases = {"apiGroups": [LEASES.group], "resources": [LEASES.plural]}
    await allow(
        cluster.admin,
        user,
        f"{name}-history",
        {**maps, "verbs": ["list", "watch"]},
        {**maps, "verbs": ["get", "create", "patch"], "resourceNames": shards},
        {**leases, "verbs": ["get", "create", "update"], "resourceNames": [NAME]},
        namespace=namespace,
    )
    return cluster.kubeconfig(user)


class FixedLease:
    """A Lease that is always held, or never."""

    def __init__(self, *, held: bool) -> None:
        self.held = held
        self.changed = lambda: None


def finish(work: Iterator[object]) -> None:
    """Run the generator to its end."""
    deque(work, maxlen=0)


def read_shard(raw: bytes) -> list[Remembered]:
    """The content of a sealed shard. Raises `Damaged` or `UnknownVersion`."""
    return [decode(entry) for entry in unseal(raw)]


def keeping(namespace: str, **kube: str) -> dict[str, Any]:
    """The settings of a replica with the stored history `NAME` in this namespace."""
    return {"history": f"configmap:{namespace}/{NAME}", "kube": {**BRISK, **kube}}


async def count_in_window(exporter: Program, namespace: str, name: str) -> int:
    """The migrations of a VMI in the window; -1 if the VMI is unknown."""
    verdict = await exporter.verdict(namespace, name, dryRun=True)
    return int(verdict["migrationsInWindow"]) if verdict["known"] else -1


async def until_counted(exporter: Program, namespace: str, name: str, migrations: int) -> None:
    """Wait until this many migrations of a VMI are in the window."""

    async def is_so() -> bool:
        return await count_in_window(exporter, namespace, name) == migrations

    await poll(is_so, what=f"{migrations} migrations of {name}")


async def until_written(exporter: Program, *, within: float = PATIENCE) -> None:
    """Wait until the stored history is fully written."""

    async def is_written() -> bool:
        kept = await exporter.sample(VMIS_KEPT)
        return kept > 0 and await exporter.sample(UNWRITTEN) == 0

    await poll(is_written, within=within, what="a stored history")


async def until_fault(exporter: Program, fault: str) -> None:
    """Wait until a fault of the stored history is counted."""

    async def is_counted() -> bool:
        return await exporter.sample(FAULTS, fault=fault) > 0

    await poll(is_counted, what=fault)


async def until_one_writes(*replicas: Program) -> None:
    """Wait until exactly one replica holds the Lease, which a busy machine may renew late."""

    async def is_so() -> bool:
        return sum([await replica.sample(WRITER) for replica in replicas]) == 1

    await poll(is_so, what="one writer")


async def migrate_unseen(admin: Client, namespace: str, name: str, *, ago: float) -> None:
    """Create a VMIM that succeeded `ago` seconds ago, and delete it; the VMI does not show it."""
    made = await admin.create(VMIMS, vmim(f"m{next(_numbers)}", namespace, of=name))
    end = int(time.time()) - ago
    await admin.merge_status(VMIMS, namespace, made["metadata"]["name"], _succeeded(end, {}))
    await admin.delete(VMIMS, namespace, made["metadata"]["name"])


async def migrate(
    admin: Client, namespace: str, name: str, *, ago: Iterable[float], forget: bool = True
) -> None:
    """Create migrations that took ten seconds and ended `ago` seconds ago.

    With `forget` their VMIMs are deleted, so the cluster shows at most the last migration.
    """
    now = int(time.time())
    for seconds in sorted(ago, reverse=True):
        migration = await admin.create(VMIMS, vmim(f"m{next(_numbers)}", namespace, of=name))
        end = now - seconds
        state = ended_state(migration["metadata"]["uid"], end - 10, end)
        final = _succeeded(end, {"migrationState": state})
        made = migration["metadata"]["name"]
        await admin.merge(VMIS, namespace, name, {"status": {"migrationState": state}})
        await admin.merge_status(VMIMS, namespace, made, final)
        if forget:
            await admin.delete(VMIMS, namespace, made)


def _succeeded(end: float, more: dict[str, Any]) -> dict[str, Any]:
    return {
        "phase": "Succeeded",
        "phaseTransitionTimestamps": transitions_json(Scheduled=end - 12, Succeeded=end),
        **more,
    }
