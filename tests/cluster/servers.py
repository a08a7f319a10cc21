"""A real etcd and a real kube-apiserver on loopback ports."""

import base64
import json
import signal
import ssl
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Self

import aiohttp

from .audit import POLICY
from .binaries import find_binary
from .polling import poll
from .ports import free_port
from .processes import Process, freeze


_START_SECONDS = 180.0
PROBE = aiohttp.ClientTimeout(total=10)


class Server(ABC):
    """A server process with a port; as a context manager it runs during the block."""

    def __init__(self, process: Process) -> None:
        self._process = process

    @abstractmethod
    async def ready(self) -> bool:
        """Whether the server can serve."""

    @property
    def log(self) -> Path:
        """The file with the server's output, over all restarts."""
        return self._process.log

    @property
    def running(self) -> bool:
        """Whether the process runs; a frozen process counts as running."""
        return self._process.running

    def tail(self) -> str:
        """The name of the server and the end of its log."""
        return self._process.tail()

    async def start(self) -> None:
        """Start the server, and wait until it is ready."""
        self._process.start()
        try:
            await poll(self._ready_or_dead, within=_START_SECONDS, what="ready")
        except TimeoutError as error:
            raise self._process.failure(str(error)) from None

    def kill(self) -> None:
        """End the server at once (SIGKILL); its data stays."""
        self._process.kill()

    async def restart(self) -> None:
        """Kill the server if it runs, and start it on the same port with the same data."""
        self.kill()
        await self.start()

    def freeze(self) -> None:
        """Freeze the server (SIGSTOP); its connections stay open, but no data arrives."""
        freeze(self._process.pid)

    def thaw(self) -> None:
        """Resume a frozen server."""
        self._process.send(signal.SIGCONT)

    async def _ready_or_dead(self) -> bool:
        if not self._process.running:
            reason = "ended while starting"
            raise self._process.failure(reason)
        try:
            return await self.ready()
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            self.kill()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.kill()


async def is_ok(url: str, *, trust: ssl.SSLContext | bool = False) -> bool:
    """Whether a GET without credentials is answered with 200."""
    async with (
        aiohttp.ClientSession(timeout=PROBE) as session,
        session.get(url, ssl=trust) as response,
    ):
        return response.status == 200


class ReadyServer(Server):
    """A server with an endpoint `/-/ready`, as Prometheus and Alertmanager have it.

    Its configuration and its log are `NAME.yaml` and `NAME.log` in the directory.
    """

    def __init__(self, name: str, directory: Path, config: object, *flags: str) -> None:
        port = free_port()
        self.address = f"127.0.0.1:{port}"
        self.url = f"http://{self.address}"
        file = directory / f"{name}.yaml"
        file.write_text(json.dumps(config))
        arguments = [
            str(find_binary(name)),
            f"--config.file={file}",
            f"--web.listen-address={self.address}",
            "--log.level=warn",
            *flags,
        ]
        super().__init__(Process(arguments, directory / f"{name}.log"))

    async def ready(self) -> bool:
        """Whether `/-/ready` answers with status 200."""
        async with (
            aiohttp.ClientSession(timeout=PROBE) as session,
            session.get(f"{self.url}/-/ready") as response,
        ):
            return response.status == 200


class Etcd(Server):
    """A one-member etcd."""

    def __init__(self, directory: Path) -> None:
        self.url = f"http://127.0.0.1:{free_port()}"
        peer = f"http://127.0.0.1:{free_port()}"
        arguments = [
            str(find_binary("etcd")),
            f"--data-dir={directory / 'etcd'}",
            f"--listen-client-urls={self.url}",
            f"--advertise-client-urls={self.url}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
            "--heartbeat-interval=50",
            "--election-timeout=250",
            "--unsafe-no-fsync",
        ]
        super().__init__(Process(arguments, directory / "etcd.log"))

    async def ready(self) -> bool:
        """Whether etcd has elected itself as the leader."""
        return await is_ok(f"{self.url}/health")

    async def advance(self) -> int:
        """Write a key that no API server reads, and return the new revision of the whole store."""
        key = base64.b64encode(b"/test/advance").decode()
        answer = await self._call("kv/put", {"key": key, "value": key})
        return int(answer["header"]["revision"])

    async def compact(self) -> int:
        """Compact to a revision above all earlier revisions; returns the revision."""
        # Two writes: a watch at revision N continues from N + 1, which must be compacted too.
        await self.advance()
        revision = await self.advance()
        await self._call("kv/compaction", {"revision": str(revision), "physical": True})
        return revision

    async def _call(self, method: str, body: dict[str, Any]) -> dict[str, Any]:
        async with (
            aiohttp.ClientSession(raise_for_status=True) as session,
            session.post(f"{self.url}/v3/{method}", json=body) as response,
        ):
            answer: dict[str, Any] = await response.json()
            return answer


class ApiServer(Server):
    """A kube-apiserver with RBAC, on a running etcd.

    The directory must have tokens.csv and the key pairs ca, server, aggregator and service-account.
    If `audited`, it writes the requests that `POLICY` selects to the file `audit`. `flags` override
    the other flags.
    """

    def __init__(
        self,
        directory: Path,
        etcd: Etcd,
        *,
        audited: bool = False,
        flags: Iterable[str] = (),
    ) -> None:
        port = free_port()
        self.audit = directory / "audit.jsonl"
        self.url = f"https://127.0.0.1:{port}"
        self.trust = ssl.create_default_context(cafile=directory / "ca.crt")
        arguments = [
            str(find_binary("kube-apiserver")),
            f"--etcd-servers={etcd.url}",
            "--bind-address=127.0.0.1",
            "--advertise-address=127.0.0.1",
            f"--secure-port={port}",
            f"--tls-cert-file={directory / 'server.crt'}",
            f"--tls-private-key-file={directory / 'server.key'}",
            f"--client-ca-file={directory / 'ca.crt'}",
            f"--token-auth-file={directory / 'tokens.csv'}",
            f"--proxy-client-cert-file={directory / 'aggregator.crt'}",
            f"--proxy-client-key-file={directory / 'aggregator.key'}",
            f"--requestheader-client-ca-file={directory / 'ca.crt'}",
            "--requestheader-allowed-names=aggregator",
            "--requestheader-username-headers=X-Remote-User",
            "--requestheader-group-headers=X-Remote-Group",
            "--requestheader-extra-headers-prefix=X-Remote-Extra-",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={directory / 'service-account.crt'}",
            f"--service-account-signing-key-file={directory / 'service-account.key'}",
            "--authorization-mode=RBAC",
            "--disable-admission-plugins=ServiceAccount",
            "--service-cluster-ip-range=10.0.0.0/24",
            "--endpoint-reconciler-type=none",
        ]
        if audited:
            policy = directory / "audit-policy.json"
            policy.write_text(json.dumps(POLICY))
            arguments += [f"--audit-policy-file={policy}", f"--audit-log-path={self.audit}"]
        super().__init__(Process([*arguments, *flags], directory / "kube-apiserver.log"))

    async def ready(self) -> bool:
        """Whether `/readyz` answers 200; it is public once the default roles exist."""
        return await is_ok(f"{self.url}/readyz", trust=self.trust)


class Scheduler(Server):
    """A kube-scheduler with Kubernetes' own default plugins, which logs in with a kubeconfig."""

    def __init__(self, directory: Path, kubeconfig: Path) -> None:
        port = free_port()
        self._url = f"https://127.0.0.1:{port}/healthz"
        arguments = [
            str(find_binary("kube-scheduler")),
            f"--kubeconfig={kubeconfig}",
            f"--authentication-kubeconfig={kubeconfig}",
            f"--authorization-kubeconfig={kubeconfig}",
            f"--cert-dir={directory}",
            "--bind-address=127.0.0.1",
            f"--secure-port={port}",
            "--leader-elect=false",
        ]
        super().__init__(Process(arguments, directory / "kube-scheduler.log"))

    async def ready(self) -> bool:
        """Whether `/healthz`, which is public, answers 200."""
        return await is_ok(self._url)


class ControllerManager(Server):
    """A kube-controller-manager with some of its controllers, each with its own service account.

    The directory must have the key pair `service-account`. `flags` override the other flags.
    """

    def __init__(
        self, directory: Path, kubeconfig: Path, controllers: Iterable[str], flags: Iterable[str]
    ) -> None:
        port = free_port()
        self._url = f"https://127.0.0.1:{port}/healthz"
        arguments = [
            str(find_binary("kube-controller-manager")),
            f"--kubeconfig={kubeconfig}",
            f"--service-account-private-key-file={directory / 'service-account.key'}",
            f"--controllers={','.join(controllers)}",
            "--use-service-account-credentials=true",
            f"--cert-dir={directory / 'kube-controller-manager'}",
            "--bind-address=127.0.0.1",
            f"--secure-port={port}",
            "--leader-elect=false",
        ]
        super().__init__(Process([*arguments, *flags], directory / "kube-controller-manager.log"))

    async def ready(self) -> bool:
        """Whether `/healthz`, which is public, answers 200."""
        return await is_ok(self._url)
