"""KubeVirt on the e2e cluster: its own virt-api and virt-controller, and launcher pods that run.

The scheduler and the kubelet are real here. What stays played is virt-handler, and QEMU: in its
place a launcher's containers run the program `pause`.
"""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Literal, Self

from exporter.demo import objects
from tests.cluster import PODS, RealCluster, User, poll
from tests.cluster.kubevirt import NAMESPACE, KubeVirtCluster
from tests.cluster.player import Player
from tests.cluster.resources import NODES
from tests.e2e.cluster import Cluster, Object
from tests.e2e.node import SERVER


_DEVICES = ("kvm", "tun", "vhost-net")
_FEW = "100"


class RunningCluster(RealCluster):
    """The e2e cluster as the rig knows clusters; others have started its servers."""

    def __init__(self, cluster: Cluster) -> None:
        self.directory = cluster.directory
        authority = self.directory / "ca.crt"
        certificate = self.directory / "admin.crt"
        self.administrator = User("admin", authority, certificate=certificate)
        self.admin = self.client(self.administrator)
        self._stack = AsyncExitStack()

    @property
    def url(self) -> str:
        """The API server's."""
        return SERVER

    async def __aenter__(self) -> Self:
        await self._stack.enter_async_context(self.admin)
        return self


class Handlers(Player):
    """virt-handlers on real nodes: pods are bound and run by others."""

    async def _sign_in(self, stack: AsyncExitStack) -> None:
        control = self.cluster.control
        self._scheduler = await stack.enter_async_context(control.client(control.administrator))
        for name in self.nodes:
            await self._equip_node(name)
            account = await control.account(NAMESPACE, "kubevirt-handler", node=name)
            self.handlers[name] = await stack.enter_async_context(control.client(account))

    async def _equip_node(self, name: str) -> None:
        """What virt-handler's labeller and device plugins say of a node."""
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
        """The launcher's containers wait to be ended: delete the pod."""
        del phase
        metadata = pod["metadata"]
        return await self.cluster.admin.delete(PODS, metadata["namespace"], metadata["name"])


@asynccontextmanager
async def installed(cluster: Cluster, *nodes: str) -> AsyncIterator[KubeVirtCluster]:
    """KubeVirt on the nodes for a block."""
    async with (
        KubeVirtCluster(RunningCluster(cluster)) as kubevirt,
        Handlers(kubevirt, nodes, heartbeat=2.0),
    ):
        yield kubevirt


async def run_vmi(kubevirt: KubeVirtCluster, name: str, namespace: str) -> Object:
    """Create a VMI, and wait until its launcher pod and itself run; the pod."""
    await kubevirt.create_vmi(name, namespace)

    async def is_running() -> bool:
        return objects.phase(await kubevirt.vmi(name, namespace)) == "Running"

    await poll(is_running, within=120, what=f"{namespace}/{name} running")
    (pod,) = await kubevirt.pods(name, namespace)
    return pod
