"""KubeVirt on the e2e cluster: its virt-api and virt-controller, and running launcher pods.

The scheduler and the kubelet are real here. virt-handler is simulated, and so is QEMU: a launcher's
containers run the program `pause` instead.
"""

import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Literal, Self

from exporter.demo import objects
from tests.cluster import PODS, VMIMS, VMIS, RealCluster, User, poll
from tests.cluster.kubevirt import NAMESPACE, KubeVirtCluster
from tests.cluster.player import Player
from tests.cluster.resources import NODES
from tests.e2e.cluster import Cluster, Object
from tests.e2e.node import SERVER
from tests.support.builders import rfc3339


_DEVICES = ("kvm", "tun", "vhost-net")
_FEW = "100"


class RunningCluster(RealCluster):
    """The e2e cluster with the interface that the rig needs; its servers run already."""

    def __init__(self, cluster: Cluster) -> None:
        self.directory = cluster.directory
        authority = self.directory / "ca.crt"
        certificate = self.directory / "admin.crt"
        self.administrator = User("admin", authority, certificate=certificate)
        self.admin = self.client(self.administrator)
        self._stack = AsyncExitStack()

    @property
    def url(self) -> str:
        """The API server's URL."""
        return SERVER

    async def __aenter__(self) -> Self:
        await self._stack.enter_async_context(self.admin)
        return self


class Handlers(Player):
    """Simulates virt-handlers on real nodes; the scheduler and the kubelets are real."""

    async def _sign_in(self, stack: AsyncExitStack) -> None:
        control = self.cluster.control
        self._scheduler = await stack.enter_async_context(control.client(control.administrator))
        for name in self.nodes:
            await self._equip_node(name)
            account = await control.account(NAMESPACE, "kubevirt-handler", node=name)
            self.handlers[name] = await stack.enter_async_context(control.client(account))

    async def _equip_node(self, name: str) -> None:
        """Set the labels and resources of virt-handler's labeller and device plugins on a node."""
        labels = {
            "kubevirt.io/schedulable": "true",
            "machine-type.node.kubevirt.io/q35": "true",
            "cpu-vendor.node.kubevirt.io/Intel": "true",
            "cpu-model-migration.node.kubevirt.io/Skylake-Client-IBRS": "true",
            "host-model-cpu.node.kubevirt.io/Skylake-Client-IBRS": "true",
        }
        await self.cluster.admin.merge(NODES, None, name, {"metadata": {"labels": labels}})
        room = {f"devices.kubevirt.io/{device}": _FEW for device in _DEVICES}
        await self.cluster.admin.request(
            "PATCH",
            f"{NODES.path(None, name)}/status",
            json={"status": {"capacity": room}},
            headers={"Content-Type": "application/merge-patch+json"},
        )

    def _pod_step(self, pod: Object) -> None:
        del pod

    async def finish_pod(self, pod: Object, phase: Literal["Succeeded", "Failed"]) -> Object:
        """Delete the pod, because its containers only wait."""
        del phase
        metadata = pod["metadata"]
        return await self.cluster.admin.delete(PODS, metadata["namespace"], metadata["name"])


@dataclass(frozen=True)
class KubeVirt:
    """KubeVirt on the cluster, with the VM shop/db1 on the node n1."""

    cluster: KubeVirtCluster
    handlers: Handlers

    async def pod(self) -> Object:
        """The VM's first launcher pod."""
        return (await self.cluster.pods("db1", "shop"))[0]

    async def is_marked(self) -> bool:
        """Whether the VM is marked for evacuation."""
        return "evacuationNodeName" in (await self.cluster.vmi("db1", "shop"))["status"]

    async def calm(self) -> None:
        """Cancel the VM's evacuation and migration."""
        if await self.is_marked():
            await self.cluster.cancel_evacuation("db1", "shop", "n1")
        for vmim in await self.cluster.vmims("db1", "shop"):
            await self.cluster.admin.delete(VMIMS, "shop", vmim["metadata"]["name"])

    async def just_moved(self) -> None:
        """Write a migration that ended 30 seconds ago into the VMI's status."""
        now = time.time()
        state = {
            "migrationUid": "m",
            "startTimestamp": rfc3339(now - 60),
            "endTimestamp": rfc3339(now - 30),
            "completed": True,
        }
        vmi = await self.cluster.vmi("db1", "shop")
        head = {"apiVersion": VMIS.api_version, "kind": VMIS.kind}
        await self.handlers.write(
            head | vmi, lambda changed: changed["status"].update(migrationState=state)
        )


@asynccontextmanager
async def installed(cluster: Cluster) -> AsyncIterator[KubeVirt]:
    """Run KubeVirt during the block."""
    async with (
        KubeVirtCluster(RunningCluster(cluster)) as kubevirt,
        Handlers(kubevirt, ["n1"], heartbeat=2.0) as handlers,
    ):
        await kubevirt.create_vmi("db1", "shop")

        async def is_running() -> bool:
            return objects.phase(await kubevirt.vmi("db1", "shop")) == "Running"

        await poll(is_running, within=120, what="shop/db1 running")
        yield KubeVirt(kubevirt, handlers)
