"""KubeVirt's own virt-api and virt-controller on a real control plane.

They run under their own service accounts, with the roles, webhooks and API services that KubeVirt's
operator would install for them. `player.py` simulates the parts that need a node.
"""

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Self

import aiohttp

from exporter.demo.objects import (
    DOMAIN,
    MIGRATION_JOB,
    annotations,
    build_kubevirt,
    labels,
    newest_first,
)

from .binaries import find_binary, find_manifests
from .client import ApiError, Client
from .cluster import RealCluster
from .objects import Object
from .polling import poll
from .ports import free_port
from .processes import Process
from .resources import (
    API_SERVICES,
    CLUSTER_ROLE_BINDINGS,
    CLUSTER_ROLES,
    CONFIG_MAPS,
    KUBEVIRTS,
    MUTATING_WEBHOOKS,
    PODS,
    ROLE_BINDINGS,
    ROLES,
    SERVICE_ACCOUNTS,
    SERVICES,
    VALIDATING_WEBHOOKS,
    VMIMS,
    VMIS,
    Resource,
)
from .servers import PROBE, Server, is_ok


NAMESPACE = "kubevirt"
DESCHEDULER = {"requested-by": "sigs.k8s.io/descheduler"}
"""The annotation by which KubeVirt recognises the descheduler's evictions."""

_GUEST: Object = {"domain": {"devices": {}, "memory": {"guest": "64Mi"}}}
_SETTLE_SECONDS = 180.0
# The key pair has its own folder, because KubeVirt reloads the pair at every write to the folder.
_SERVING = "serving"
_PAIR = (("cert", "crt"), ("key", "key"))
_INSTALLED = {
    resource.kind: resource
    for resource in (
        SERVICE_ACCOUNTS,
        CLUSTER_ROLES,
        CLUSTER_ROLE_BINDINGS,
        ROLES,
        ROLE_BINDINGS,
        MUTATING_WEBHOOKS,
        VALIDATING_WEBHOOKS,
        API_SERVICES,
    )
}


class _KubeVirtServer(Server):
    """One of KubeVirt's servers; needs the key pair `server` and a kubeconfig."""

    def __init__(
        self, name: str, directory: Path, kubeconfig: Path, *, pairs: tuple[str, ...]
    ) -> None:
        self.port = free_port()
        self.url = f"https://127.0.0.1:{self.port}"
        certificates = [
            f"--{flag}-{kind}-file={directory / _SERVING / 'server'}.{suffix}"
            for flag in pairs
            for kind, suffix in _PAIR
        ]
        arguments = [
            str(find_binary(name)),
            f"--kubeconfig={kubeconfig}",
            "--listen=127.0.0.1",
            f"--port={self.port}",
            *certificates,
        ]
        environment = {"POD_NAMESPACE": NAMESPACE, "POD_NAME": name, "NODE_NAME": "control-plane"}
        super().__init__(
            Process(arguments, directory / f"{name}.log", environment | {"NAMESPACE": NAMESPACE})
        )


class VirtApi(_KubeVirtServer):
    """KubeVirt's webhooks and subresources."""

    def __init__(self, directory: Path, kubeconfig: Path) -> None:
        super().__init__("virt-api", directory, kubeconfig, pairs=("tls", "handler"))

    async def ready(self) -> bool:
        """Whether it serves its API groups."""
        return await is_ok(f"{self.url}/apis")


class VirtController(_KubeVirtServer):
    """KubeVirt's controllers."""

    def __init__(self, directory: Path, kubeconfig: Path) -> None:
        super().__init__("virt-controller", directory, kubeconfig, pairs=("prom",))

    async def ready(self) -> bool:
        """Whether it is the leader, which starts the controllers."""
        async with (
            aiohttp.ClientSession(timeout=PROBE) as session,
            session.get(f"{self.url}/leader", ssl=False) as response,
        ):
            return response.ok and (await response.json())["apiserver"]["leader"] == "true"


class KubeVirtCluster:
    """A real control plane with KubeVirt's own servers.

    `control` is the control plane without KubeVirt. Its `admin` is not a service account of
    KubeVirt, so KubeVirt's webhooks treat its writes as those of a user. No pod runs here unless
    there is also a `Player`.
    """

    def __init__(self, control: RealCluster) -> None:
        self.control = control
        self.admin = control.admin
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self.control)
            manifests = json.loads(find_manifests().read_bytes())
            await self._prepare(manifests)
            await self._start(stack)
            await self._register(manifests)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *exc: object) -> None:
        if any(exc):
            print(self.tails())
        await self._stack.aclose()

    def tails(self) -> str:
        """The last log lines of KubeVirt's servers; a failed test prints them."""
        return "\n".join(server.tail() for server in (self.api, self.controller))

    # What users, operators and the descheduler do

    async def create_vmi(
        self,
        name: str,
        namespace: str,
        annotations: Mapping[str, str] | None = None,
        **spec: Any,
    ) -> Object:
        """Create a VMI as a user does; KubeVirt's webhook sets the defaults."""
        metadata = {"name": name, "namespace": namespace, "annotations": dict(annotations or {})}
        body = _written(VMIS, _GUEST | spec, **metadata)
        return await self.admin.create(VMIS, body)

    async def migrate(self, name: str, namespace: str, **annotations: str) -> Object:
        """Create a VMIM, as `virtctl migrate` does."""
        body = _written(
            VMIMS,
            {"vmiName": name},
            generateName="kubevirt-migrate-vm-",
            namespace=namespace,
            annotations=annotations,
        )
        return await self.admin.create(VMIMS, body)

    async def evict(self, pod: Object, *, descheduler: bool = True) -> ApiError | None:
        """Evict a pod; returns the error if the eviction was refused, else None."""
        metadata = pod["metadata"]
        body = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {
                "name": metadata["name"],
                "namespace": metadata["namespace"],
                "annotations": DESCHEDULER if descheduler else {},
            },
        }
        path = f"{PODS.path(metadata['namespace'], metadata['name'])}/eviction"
        try:
            await self.admin.request("POST", path, json=body)
        except ApiError as refusal:
            return refusal
        return None

    async def cancel_evacuation(self, name: str, namespace: str, node: str) -> None:
        """Call the `evacuate/cancel` subresource, through the API server's aggregation layer."""
        await self.admin.send(
            "PUT",
            f"/apis/subresources.kubevirt.io/v1/namespaces/{namespace}"
            f"/virtualmachineinstances/{name}/evacuate/cancel",
            json={"evacuationNodeName": node},
        )

    @asynccontextmanager
    async def configured(self, **configuration: Any) -> AsyncIterator[None]:
        """Change `spec.configuration` of the KubeVirt CR during the block. Waits until KubeVirt's
        servers have read each change.
        """
        before = (await self.cr())["spec"]["configuration"]
        await self._configure(configuration)
        try:
            yield
        finally:
            await self._configure({key: before.get(key) for key in configuration})

    async def _configure(self, configuration: Object) -> None:
        patch = {"spec": {"configuration": configuration}}
        changed = await self.admin.merge(KUBEVIRTS, NAMESPACE, "kubevirt", patch)
        logged = (
            f"config from KubeVirt to resource version '{changed['metadata']['resourceVersion']}'"
        )

        async def is_read() -> bool:
            return all(logged in server.log.read_text() for server in (self.api, self.controller))

        await poll(is_read, within=_SETTLE_SECONDS, what="the KubeVirt CR read")

    @asynccontextmanager
    async def virt_api(self) -> AsyncIterator[Client]:
        """A client with virt-api's account, for writes that virt-api itself does only in a race."""
        account = await self.control.account(NAMESPACE, "kubevirt-apiserver")
        async with self.control.client(account) as client:
            yield client

    # Reading objects

    async def cr(self) -> Object:
        """The KubeVirt CR."""
        return await self.admin.get(KUBEVIRTS, NAMESPACE, "kubevirt")

    async def vmi(self, name: str, namespace: str) -> Object:
        """A VMI."""
        return await self.admin.get(VMIS, namespace, name)

    async def vmims(self, name: str, namespace: str) -> list[Object]:
        """The migrations of a VMI, oldest first."""
        listed = await self._items(VMIMS, namespace)
        return newest_first(vmim for vmim in listed if vmim["spec"]["vmiName"] == name)[::-1]

    async def pods(self, name: str, namespace: str) -> list[Object]:
        """The launcher pods of a VMI, oldest first; of the same second, targets last."""
        listed = await self._items(PODS, namespace)
        mine = [pod for pod in listed if annotations(pod).get(DOMAIN) == name]
        return sorted(mine, key=_order_by_age)

    async def _items(self, resource: Resource, namespace: str) -> list[Object]:
        listed = await self.admin.list(resource, namespace)
        head = {"apiVersion": resource.api_version, "kind": resource.kind}
        return [head | pod for pod in listed["items"]]

    # Installation

    async def _prepare(self, manifests: list[Object]) -> None:
        await self.control.namespace(NAMESPACE)
        authority = (self.control.directory / "ca.crt").read_text()
        bundle = {"metadata": {"name": "kubevirt-ca", "namespace": NAMESPACE}}
        await self.admin.create(CONFIG_MAPS, bundle | {"data": {"ca-bundle": authority}})
        head = {"apiVersion": KUBEVIRTS.api_version, "kind": KUBEVIRTS.kind}
        # Without a phase KubeVirt's servers treat the CR as not yet deployed, and ignore it.
        deployed = {"status": {"phase": "Deployed", "defaultArchitecture": "amd64"}}
        await self.admin.create(KUBEVIRTS, head | build_kubevirt(NAMESPACE) | deployed)
        # RBAC lets a role be bound before it exists.
        async with asyncio.TaskGroup() as group:
            for manifest in manifests:
                if (
                    manifest["kind"] in {"ServiceAccount", "Role", "ClusterRole"}
                    or "roleRef" in manifest
                ):
                    group.create_task(self.admin.create(_INSTALLED[manifest["kind"]], manifest))
        await poll(self._is_proxy_known, within=_SETTLE_SECONDS, what="the aggregator published")

    async def _is_proxy_known(self) -> bool:
        try:
            configuration = await self.admin.get(
                CONFIG_MAPS, "kube-system", "extension-apiserver-authentication"
            )
        except ApiError:
            return False
        return "requestheader-client-ca-file" in configuration["data"]

    async def _start(self, stack: AsyncExitStack) -> None:
        directory = self.control.directory
        (directory / _SERVING).mkdir()
        for _, suffix in _PAIR:
            shutil.copy(directory / f"server.{suffix}", directory / _SERVING)
        accounts = [
            await self.control.account(NAMESPACE, name)
            for name in ("kubevirt-apiserver", "kubevirt-controller")
        ]
        api, controller = [self.control.kubeconfig(account) for account in accounts]
        self.api = VirtApi(directory, api)
        self.controller = VirtController(directory, controller)
        async with asyncio.TaskGroup() as group:
            for server in (self.api, self.controller):
                group.create_task(stack.enter_async_context(server))

    async def _register(self, manifests: list[Object]) -> None:
        """Register webhooks by URL, and API services by a name that resolves to this host."""
        place = {"name": "virt-api", "namespace": NAMESPACE}
        name = {"type": "ExternalName", "externalName": "127.0.0.1"}
        await self.admin.create(SERVICES, {"metadata": place, "spec": name})
        bundle = self.control.administrator.authority_data
        for manifest in manifests:
            for webhook in manifest.get("webhooks", ()):
                path = webhook["clientConfig"]["service"]["path"]
                webhook["clientConfig"] = {"url": self.api.url + path, "caBundle": bundle}
            if manifest["kind"] == API_SERVICES.kind:
                manifest["spec"] |= {"service": place | {"port": self.api.port}}
                manifest["spec"]["insecureSkipTLSVerify"] = True
            if "webhooks" in manifest or manifest["kind"] == API_SERVICES.kind:
                await self.admin.create(_INSTALLED[manifest["kind"]], manifest)
        try:
            await poll(self._admits, within=_SETTLE_SECONDS, what="virt-api asked")
        except TimeoutError:
            print(self.tails())
            raise

    async def _admits(self) -> bool:
        """Whether the API server reaches virt-api's API services and both kinds of webhooks."""
        services = await self.admin.list(API_SERVICES)
        ours = [service for service in services["items"] if service["spec"].get("service")]
        if not all(_is_available(our) for our in ours):
            return False
        trial = {"dryRun": "All"}
        is_completed = False
        vmi = _written(VMIS, _GUEST, generateName="trial-", namespace="default")
        vmim = _written(VMIMS, {"vmiName": "nobody"}, generateName="trial-", namespace="default")
        try:
            made = await self.admin.request("POST", VMIS.path("default"), json=vmi, params=trial)
            is_completed = "finalizers" in made["metadata"]
            await self.admin.request("POST", VMIMS.path("default"), json=vmim, params=trial)
        except ApiError as refusal:
            return is_completed and "does not exist" in str(refusal)
        return False


def _written(resource: Resource, spec: Object, **metadata: Any) -> Object:
    head = {"apiVersion": resource.api_version, "kind": resource.kind}
    return head | {"metadata": metadata, "spec": spec}


def _is_available(service: Object) -> bool:
    conditions = service.get("status", {}).get("conditions", [])
    return any(row["type"] == "Available" and row["status"] == "True" for row in conditions)


def _order_by_age(pod: Object) -> tuple[str, bool]:
    return str(pod["metadata"]["creationTimestamp"]), MIGRATION_JOB in labels(pod)
