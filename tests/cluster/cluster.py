"""A control plane with etcd, kube-apiserver, KubeVirt's CRDs and an administrator."""

import asyncio
import json
from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Self

from tests.support.certificates import write_certificate

from .access import grant, reading_rules
from .binaries import find_crds
from .client import ApiError, Client
from .objects import Object, namespace
from .polling import poll
from .resources import (
    BUDGETS,
    CRDS,
    KUBEVIRTS,
    NAMESPACES,
    NODES,
    PODS,
    SERVICE_ACCOUNTS,
    VMIMS,
    VMIS,
    Resource,
)
from .servers import ApiServer, Etcd
from .users import User, kubeconfig


EXPORTER_READS = (VMIS, VMIMS, PODS, KUBEVIRTS, NODES, BUDGETS)

_TOKENS = 'administrator-token,administrator,1,"system:masters"\nexporter-token,exporter,2\n'
_SETTLE_SECONDS = 180.0
_ACCOUNTS = "accounts"


class RealCluster:
    """Real servers with their files in a directory, running inside `async with`.

    Await all methods, also those of `admin`, in the event loop that entered the block. It serves
    the kinds of KubeVirt that the exporter reads; with `all_crds`, which KubeVirt's own servers
    need, every kind. The others cost each API server more than a second of CPU time.
    """

    def __init__(
        self,
        directory: Path,
        *,
        audited: bool = False,
        all_crds: bool = False,
        flags: Iterable[str] = (),
    ) -> None:
        self.directory = directory
        self._all_crds = all_crds
        _write_credentials(directory)
        self.etcd = Etcd(directory)
        self.api = ApiServer(directory, self.etcd, audited=audited, flags=flags)
        authority = directory / "ca.crt"
        self.administrator = User("administrator", authority, token="administrator-token")
        self.exporter = User("exporter", authority, token="exporter-token")
        self.certified_exporter = User(
            "exporter", authority, certificate=directory / "exporter.crt"
        )
        self.admin = self.client(self.administrator)
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self.etcd)
            await stack.enter_async_context(self.api)
            await stack.enter_async_context(self.admin)
            await self._equip()
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._stack.aclose()

    @property
    def url(self) -> str:
        """The API server's URL."""
        return self.api.url

    def client(self, user: User) -> Client:
        """A client for this user, as an async context manager."""
        return Client(self.url, user)

    def kubeconfig(self, user: User) -> Path:
        """Write the kubeconfig file of a user."""
        proof = "certificate" if user.certificate else "token"
        name = f"{user.name.replace(':', '-')}-{proof}.kubeconfig"
        return kubeconfig(self.directory / name, self.url, user)

    async def user(
        self, name: str, reads: Iterable[Resource], namespaces: Sequence[str] = ()
    ) -> User:
        """Create a service account that may list and watch resources, by default everywhere."""
        full_name = f"system:serviceaccount:{_ACCOUNTS}:{name}"
        account = {"metadata": {"name": name, "namespace": _ACCOUNTS}}
        await self.admin.create(SERVICE_ACCOUNTS, account)
        await grant(self.admin, full_name, name, reading_rules(reads), namespaces or (None,))
        return await self.account(_ACCOUNTS, name)

    async def account(self, namespace: str, name: str, *, node: str | None = None) -> User:
        """An existing service account; with `node`, its token is bound to that node."""
        bound = {"kind": NODES.kind, "apiVersion": NODES.api_version, "name": node}
        spec = {"boundObjectRef": bound} if node else {}
        path = f"{SERVICE_ACCOUNTS.path(namespace, name)}/token"
        answer = await self.admin.request("POST", path, json={"spec": spec})
        return User(
            f"system:serviceaccount:{namespace}:{name}",
            self.administrator.authority,
            token=answer["status"]["token"],
        )

    def certified(self, name: str, group: str = "") -> User:
        """A user with this name and group, and a new client certificate."""
        write_certificate(self.directory, name, group=group)
        certificate = self.directory / f"{name}.crt"
        return User(name, self.administrator.authority, certificate=certificate)

    async def namespace(self, name: str) -> str:
        """Create a namespace, and return its name."""
        await self.admin.create(NAMESPACES, namespace(name))
        return name

    async def serve_renamed(self, renamed: Sequence[Resource]) -> None:
        """Serve kinds of KubeVirt a second time, under names that end with KubeVirt's own."""
        for crd in json.loads(find_crds().read_bytes()):
            spec = crd["spec"]
            for resource in renamed:
                if resource.plural.endswith(spec["names"]["plural"]):
                    crd["metadata"]["name"] = f"{resource.plural}.{resource.group}"
                    singular = resource.plural.removesuffix("s")
                    names = {"plural": resource.plural, "singular": singular, "kind": resource.kind}
                    spec |= {
                        "group": resource.group,
                        "names": names | {"listKind": f"{resource.kind}List"},
                    }
                    await self.admin.create(CRDS, crd)
        await poll(self._crds_established, within=_SETTLE_SECONDS, what="CRDs established")

    async def force_gone(self) -> None:
        """Compact the store, so that every earlier resourceVersion is answered with 410 Gone.

        The API server restarts with an empty watch cache. Its store was compacted at a revision
        that no client has seen.
        """
        self.api.kill()
        await self.etcd.compact()
        await self.api.start()
        await self.settle()

    async def settle(self) -> None:
        """
        Wait until everything that the exporter reads can be watched.

        An API server that is ready still answers watches of custom resources with 404 or 429 for
        some tenths of a second. So a test with its own watch calls `settle` after `api.restart()`.
        """
        await poll(self._watchable, within=_SETTLE_SECONDS, what="watches opened")

    async def _equip(self) -> None:
        await self._apply_crds()
        await self.namespace(_ACCOUNTS)
        await grant(self.admin, "exporter", "exporter", reading_rules(EXPORTER_READS))

    async def _apply_crds(self) -> None:
        read = {resource.kind for resource in EXPORTER_READS}
        async with asyncio.TaskGroup() as group:
            for crd in json.loads(find_crds().read_bytes()):
                if self._all_crds or crd["spec"]["names"]["kind"] in read:
                    group.create_task(self.admin.create(CRDS, crd))
        # Watches first, because a list of all CRDs costs the API server much more than a watch.
        await self.settle()
        await poll(self._crds_established, within=_SETTLE_SECONDS, what="CRDs established")

    async def _crds_established(self) -> bool:
        listed = await self.admin.list(CRDS)
        return all(_is_established(crd) for crd in listed["items"])

    async def _watchable(self) -> bool:
        try:
            for resource in EXPORTER_READS:
                async with self.admin.watch(resource):
                    pass
        except ApiError:
            return False
        return True


def _is_established(crd: Object) -> bool:
    conditions = crd["status"]["conditions"] or []
    return any(row["type"] == "Established" and row["status"] == "True" for row in conditions)


def _write_credentials(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name in ("server", "service-account", "aggregator", "exporter"):
        write_certificate(directory, name)
    (directory / "tokens.csv").write_text(_TOKENS)
