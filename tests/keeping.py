"""What tests of the checkpoint share: who may keep one, and migrations that only memory knows."""

import time
from collections.abc import Iterable
from itertools import count
from pathlib import Path
from typing import Any

from tests.cluster import EXPORTER_READS, VMIMS, VMIS, Client, RealCluster, User, vmim
from tests.cluster.access import binding
from tests.cluster.resources import CLUSTER_ROLES, CONFIG_MAPS, LEASES, ROLE_BINDINGS
from tests.scripts import rfc3339


NAME = "history"
BRISK = {"checkpointInterval": "500ms", "leaseDuration": "2s"}
"""`kube` settings for tests: what takes a quarter of a minute takes a second or two."""

_numbers = count(1)


async def a_keeper(cluster: RealCluster, namespace: str) -> Path:
    """The kubeconfig of a new account that may read the cluster and keep `NAME` in a namespace."""
    name = f"keeper-{next(_numbers)}"
    user: User = await cluster.user(name, EXPORTER_READS)
    shards = [f"{NAME}-{shard:02d}" for shard in range(64)]
    maps = {"apiGroups": [""], "resources": [CONFIG_MAPS.plural]}
    leases = {"apiGroups": [LEASES.group], "resources": [LEASES.plural]}
    role = {
        "apiVersion": CLUSTER_ROLES.api_version,
        "kind": CLUSTER_ROLES.kind,
        "metadata": {"name": f"{name}-checkpoint"},
        "rules": [
            {**maps, "verbs": ["list", "watch"]},
            {**maps, "verbs": ["get", "create", "patch"], "resourceNames": shards},
            {**leases, "verbs": ["get", "create", "update"], "resourceNames": [NAME]},
        ],
    }
    await cluster.admin.create(CLUSTER_ROLES, role)
    bound = binding(f"{name}-checkpoint", user.name, namespace)
    await cluster.admin.create(ROLE_BINDINGS, bound)
    return cluster.kubeconfig(user)


def keeping(namespace: str, **kube: str) -> dict[str, Any]:
    """The settings of a replica that keeps `NAME` in that namespace, brisk unless told."""
    return {"checkpoint": f"configmap:{namespace}/{NAME}", "kube": {**BRISK, **kube}}


async def migrate(
    admin: Client, namespace: str, name: str, *, ago: Iterable[float], forget: bool = True
) -> None:
    """Migrations of a VMI that ended so many seconds ago, each of ten seconds.

    `forget`: their VMIMs are deleted, so that the cluster shows the last one at most.
    """
    now = int(time.time())
    for seconds in sorted(ago, reverse=True):
        migration = await admin.create(VMIMS, vmim(f"m{next(_numbers)}", namespace, of=name))
        end = now - seconds
        state = {
            "migrationUid": migration["metadata"]["uid"],
            "startTimestamp": rfc3339(end - 10),
            "endTimestamp": rfc3339(end),
            "completed": True,
        }
        final = {
            "phase": "Succeeded",
            "migrationState": state,
            "phaseTransitionTimestamps": [
                {"phase": "Scheduled", "phaseTransitionTimestamp": rfc3339(end - 12)},
                {"phase": "Succeeded", "phaseTransitionTimestamp": rfc3339(end)},
            ],
        }
        made = migration["metadata"]["name"]
        await admin.merge(VMIS, namespace, name, {"status": {"migrationState": state}})
        await admin.merge_status(VMIMS, namespace, made, final)
        if forget:
            await admin.delete(VMIMS, namespace, made)
