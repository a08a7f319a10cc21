"""Forty VMs on five nodes, with a scheduler that undoes the descheduler's work.

Nodes have allocatable memory, and launcher pods have requests, as in a real cluster. The scheduler
fills nodes, like kube-scheduler with `MostAllocated`. So a VM that leaves a full node goes to the
fullest other node with room, and then this node is too full. Without verdicts the moves never end.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Self

from exporter.demo import objects
from exporter.demo.objects import Object
from tests.cluster import ApiError, RealCluster, Resource, poll
from tests.cluster.player import Fate, Outcome
from tests.cluster.resources import PODS, PRIORITY_CLASSES, VMIMS, VMIS
from tests.cluster.rig import Rig


NODES = ("node-1", "node-2", "node-3", "node-4", "node-5")
ALLOCATABLE = {"cpu": "32", "memory": "128Gi", "pods": "110"}
ROOM = 128 * 2**30
GUEST = 8 * 2**30
BATCH = "batch"
"""The priority class of the VMs that a descheduler evicts first."""
_SETTLES_WITHIN = 120.0
_UNITS = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "k": 10**3, "M": 10**6, "G": 10**9}


@dataclass
class World:
    """A rig whose nodes can be overloaded; with `packs` its scheduler fills nodes."""

    rig: Rig
    packs: bool = True
    closed: set[str] = field(default_factory=set)
    """Nodes to which no VM may migrate."""

    @classmethod
    @asynccontextmanager
    async def opened(cls) -> AsyncIterator[Self]:
        """Create the empty nodes, and the priority class whose VMs are evicted first."""
        async with Rig.opened(audited=True, nodes=NODES, allocatable=ALLOCATABLE) as rig:
            world = cls(rig)
            rig.player.choose = world.choose
            low = {"metadata": {"name": BATCH}, "value": -10, "globalDefault": False}
            await rig.cluster.admin.create(PRIORITY_CLASSES, low)
            yield world

    @property
    def control(self) -> RealCluster:
        """The control plane."""
        return self.rig.cluster.control

    def choose(self, pod: Object, free: Sequence[str]) -> str | None:
        """Schedule a VM: first on its own node, later on the fullest node with room."""
        if objects.MIGRATION_JOB not in objects.labels(pod):
            return next(iter(free), None)
        free = [node for node in free if node not in self.closed]
        if not self.packs:
            return next(iter(free), None)
        used = self.requested()
        wanted = requested_memory(pod)
        fitting = [node for node in free if used[node] + wanted <= ROOM]
        return max(fitting, key=lambda node: used[node], default=None)

    def requested(self) -> Counter[str]:
        """The memory that unfinished pods request, by node."""
        used: Counter[str] = Counter()
        for pod in self.rig.player.pods:
            if not objects.is_final(pod):
                used[objects.node_of(pod)] += requested_memory(pod)
        return used

    @asynccontextmanager
    async def vms(
        self, namespace: str, layout: Mapping[str, Sequence[str]], **options: Any
    ) -> AsyncIterator[list[Object]]:
        """Run these VMs during the block; the options are those of `start`."""
        try:
            yield await self.start(namespace, layout, **options)
        finally:
            await self.clear(namespace)

    async def start(
        self,
        namespace: str,
        layout: Mapping[str, Sequence[str]],
        *,
        batch: Iterable[str] = (),
        pinned: Iterable[str] = (),
        guest: int = GUEST,
        fate: Fate | Outcome = "succeeds",
        **spec: Any,
    ) -> list[Object]:
        """Start these VMs, given by node, and wait until they run.

        `batch`: VMs that are evicted first. `pinned`: VMs whose owner does not want them evicted.
        """
        admin = self.rig.cluster.admin
        await self.rig.cluster.control.namespace(namespace)
        low, kept = set(batch), set(pinned)
        homes = {name: node for node, names in layout.items() for name in names}
        async with asyncio.TaskGroup() as group:
            for name, node in homes.items():
                self.rig.player.place(f"{namespace}/{name}", node)
                self.rig.player.plan(f"{namespace}/{name}", fate)
                notes = {objects.PREFER_NO_EVICTION: "true"} if name in kept else {}
                fields = _spec(guest, BATCH if name in low else None) | spec
                group.create_task(self.rig.cluster.create_vmi(name, namespace, notes, **fields))

        async def running() -> list[Object] | None:
            listed = await admin.list(VMIS, namespace)
            ready = [vmi for vmi in listed["items"] if objects.is_true(vmi, "LiveMigratable")]
            return ready if len(ready) == len(homes) else None

        return await poll(running, within=_SETTLES_WITHIN, what=f"{len(homes)} VMs running")

    async def at_rest(self, namespace: str) -> None:
        """Wait until no VM of a namespace migrates or evacuates."""
        admin = self.rig.cluster.admin

        async def settled() -> bool:
            vmims = (await admin.list(VMIMS, namespace))["items"]
            vmis = (await admin.list(VMIS, namespace))["items"]
            names = {vmi["metadata"]["name"] for vmi in vmis}
            # KubeVirt deletes a VMIM that it created while the VMI was being deleted, but leaves
            # its finalizer (`!vmiExists` in migration.go, 1.6 to 1.9).
            for vmim in vmims:
                is_deleted = "deletionTimestamp" in vmim["metadata"]
                if is_deleted and vmim["spec"]["vmiName"] not in names:
                    with suppress(ApiError):  # KubeVirt may have removed it by now
                        await admin.merge(
                            VMIMS,
                            namespace,
                            vmim["metadata"]["name"],
                            {"metadata": {"finalizers": None}},
                        )
            return all(map(objects.is_final, vmims)) and not any(map(_is_leaving, vmis))

        await poll(settled, within=_SETTLES_WITHIN, what=f"{namespace} at rest")

    async def clear(self, namespace: str) -> None:
        """Delete the VMs of a namespace, and wait until their pods are gone."""
        admin = self.rig.cluster.admin
        for kind in (VMIS, PODS):
            await self._delete_all(kind, namespace)

            async def gone(kind: Resource = kind) -> bool:
                return not (await admin.list(kind, namespace))["items"]

            await poll(gone, within=_SETTLES_WITHIN, what=f"no {kind.plural} in {namespace}")
        # An unfinished migration would count towards the limit on parallel migrations.
        await self.at_rest(namespace)

    async def _delete_all(self, kind: Resource, namespace: str) -> None:
        """Delete all VMIs, as a user does, or all pods, as the garbage collector does."""
        admin = self.rig.cluster.admin

        async def delete(name: str) -> None:
            with suppress(ApiError):
                await admin.delete(kind, namespace, name)

        listed = await admin.list(kind, namespace)
        await asyncio.gather(*(delete(vmim["metadata"]["name"]) for vmim in listed["items"]))

    @asynccontextmanager
    async def plain_pods(
        self, namespace: str, node: str, names: Iterable[str], *, memory: str, bare: bool = False
    ) -> AsyncIterator[None]:
        """Run pods other than VMs on a node during the block."""
        admin = self.rig.cluster.admin
        for name in names:
            await admin.create(PODS, _plain(namespace, name, node, memory, bare=bare))
        try:
            yield
        finally:
            listed = await admin.list(PODS, namespace, labelSelector="app=plain")
            for pod in listed["items"]:
                with suppress(ApiError):  # the descheduler may have evicted the pod
                    await admin.delete(PODS, namespace, pod["metadata"]["name"])


def requested_memory(pod: Object) -> int:
    """The memory that a pod's containers request, in bytes."""
    return sum(
        parse_quantity(container.get("resources", {}).get("requests", {}).get("memory", "0"))
        for container in pod["spec"]["containers"]
    )


def parse_quantity(text: str) -> int:
    """A Kubernetes quantity without a fraction, as a number."""
    for unit, factor in _UNITS.items():
        if text.endswith(unit):
            return int(text.removesuffix(unit)) * factor
    return int(text)


def spread(counts: Mapping[str, int]) -> dict[str, list[str]]:
    """Names for this many VMs on each node: `vm-01` and so on."""
    numbers = iter(range(1, 1 + sum(counts.values())))
    return {
        node: [f"vm-{next(numbers):02}" for _ in range(count)] for node, count in counts.items()
    }


def _is_leaving(vmi: Object) -> bool:
    is_handed = objects.MIGRATION_TARGET_NODE in objects.labels(vmi)
    return is_handed or objects.is_migrating(vmi) or bool(objects.evacuated_node(vmi))


def _spec(guest: int, priority_class: str | None) -> Object:
    spec: Object = {"domain": {"devices": {}, "memory": {"guest": str(guest)}}}
    return spec | ({"priorityClassName": priority_class} if priority_class else {})


def _plain(namespace: str, name: str, node: str, memory: str, *, bare: bool) -> Object:
    owner = {"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "web", "uid": name}
    resources = {"requests": {"cpu": "1", "memory": memory}}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": namespace,
            "labels": {"app": "plain"},
            "ownerReferences": [] if bare else [owner],
        },
        "spec": {
            "nodeName": node,
            "containers": [{"name": "web", "image": "web", "resources": resources}],
        },
    }
