"""The two API servers of the tests, the real and the simulated one, behind one interface.

Tests write to both servers through the same HTTP client, so that they do not depend on one server.
"""

import asyncio
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path
from typing import Self

from exporter.demo.store import ObjectStore
from exporter.engine.facts.names import KubeVirtNames
from exporter.kube.login import Login
from tests.cluster import (
    EXPORTER_READS,
    KUBEVIRTS,
    NAMESPACES,
    PODS,
    VMIMS,
    VMIS,
    Client,
    RealCluster,
    Resource,
    User,
    namespace,
)
from tests.cluster.resources import BUDGETS, NODES
from tests.cluster.users import kubeconfig
from tests.support.faulty_apiserver import FaultyApiServer


_numbers = count(1)


def rename_resource(resource: Resource, names: KubeVirtNames) -> Resource:
    """One of KubeVirt's resources under other names."""
    return replace(
        resource,
        group=names.api_group,
        plural=f"{names.resource_prefix.lower()}{resource.plural}",
        kind=f"{names.resource_prefix}{resource.kind}",
    )


class Stage(ABC):
    """An API server. `admin` may do everything; `login` has the exporter's permissions."""

    name: str
    admin: Client
    login: Login

    async def make_namespace(self) -> str:
        """A new namespace."""
        name = f"ns-{next(_numbers)}"
        await self.admin.create(NAMESPACES, namespace(name))
        return name

    @abstractmethod
    async def limited_login(self, reads: Iterable[Resource]) -> Login:
        """Credentials that may read these resources and no others."""

    @abstractmethod
    async def rename_kubevirt(self, names: KubeVirtNames) -> Login:
        """Serve KubeVirt's resources under other names; credentials that may read them."""

    @property
    @abstractmethod
    def url(self) -> str:
        """The server's URL."""

    @abstractmethod
    def login_at(self, url: str) -> Login:
        """The exporter's credentials, for the same server at another address."""

    @abstractmethod
    async def next_second(self) -> None:
        """Wait until the server's clock shows the next second."""

    @abstractmethod
    async def restart(self) -> None:
        """Kill the server and start it again with the same data and address."""

    @abstractmethod
    async def force_gone(self) -> None:
        """End the watches, and answer every earlier resourceVersion with 410."""


class RealStage(Stage):
    """etcd and kube-apiserver, built from their sources."""

    name = "real"

    def __init__(self, cluster: RealCluster) -> None:
        self.cluster = cluster
        self.admin = cluster.admin
        self.login = Login(kubeconfig=cluster.kubeconfig(cluster.exporter))

    @property
    def url(self) -> str:
        return self.cluster.api.url

    def login_at(self, url: str) -> Login:
        path = self.cluster.directory / f"gate-{next(_numbers)}.kubeconfig"
        return Login(kubeconfig=kubeconfig(path, url, self.cluster.exporter))

    async def next_second(self) -> None:
        await asyncio.sleep(1 - time.time() % 1)

    async def limited_login(self, reads: Iterable[Resource]) -> Login:
        user = await self.cluster.user(f"limited-{next(_numbers)}", reads)
        return Login(kubeconfig=self.cluster.kubeconfig(user))

    async def rename_kubevirt(self, names: KubeVirtNames) -> Login:
        renamed = [rename_resource(resource, names) for resource in (VMIS, VMIMS, KUBEVIRTS)]
        await self.cluster.serve_renamed(renamed)
        return await self.limited_login((*renamed, PODS, NODES, BUDGETS))

    async def restart(self) -> None:
        await self.cluster.api.restart()
        await self.cluster.settle()

    async def stop(self) -> None:
        """Kill the server."""
        self.cluster.api.kill()

    async def force_gone(self) -> None:
        await self.cluster.force_gone()

    def freeze(self) -> None:
        """Stop answering, but keep every connection open."""
        self.cluster.api.freeze()

    def thaw(self) -> None:
        """Continue after `freeze`."""
        self.cluster.api.thaw()


@dataclass(frozen=True)
class Nobody(User):
    """The user of a server without authentication."""

    name: str = "nobody"
    authority: Path = Path()

    @property
    def tls(self) -> bool:  # type: ignore[override]
        """The default of aiohttp, because the server has no TLS."""
        return True


class SimulatedStage(Stage):
    """The simulated API server of the demo."""

    name = "simulated"

    def __init__(self) -> None:
        self._ahead = timedelta()
        self.server = FaultyApiServer(ObjectStore(self._clock), bookmark_seconds=0.5)

    @property
    def url(self) -> str:
        return self.server.url

    def login_at(self, url: str) -> Login:
        return Login(url=url)

    @classmethod
    @asynccontextmanager
    async def opened(cls) -> AsyncIterator[Self]:
        """A new stage, closed after the block."""
        stage = cls()
        async with stage.server as server, Client(server.url, Nobody()) as admin:
            stage.admin, stage.login = admin, Login(url=server.url)
            yield stage

    async def next_second(self) -> None:
        self._ahead += timedelta(seconds=1)

    def _clock(self) -> datetime:
        return datetime.now(UTC) + self._ahead

    async def limited_login(self, reads: Iterable[Resource]) -> Login:
        for resource in set(EXPORTER_READS) - set(reads):
            self.server.answer(resource.plural, 403)
        return self.login

    async def rename_kubevirt(self, names: KubeVirtNames) -> Login:
        self.server.names = names
        return self.login

    async def restart(self) -> None:
        await self.server.__aexit__(None, None, None)
        await self.server.__aenter__()

    async def force_gone(self) -> None:
        self.server.store.revision += 1  # one that no bookmark has told a client
        self.server.compact()
        await self.restart()


@asynccontextmanager
async def real_stage() -> AsyncIterator[RealStage]:
    """A new control plane in its own directory."""
    with tempfile.TemporaryDirectory(prefix="exporter-cluster-") as directory:
        async with RealCluster(Path(directory)) as cluster:
            yield RealStage(cluster)
