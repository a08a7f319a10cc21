"""The shipped admission webhook on a real API server, and users who evict."""

import base64
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from tests.cluster import PODS, VMIMS, VMIS, Client, RealCluster, User, launcher_pod, poll, vmi
from tests.cluster.access import allow
from tests.cluster.objects import Object
from tests.cluster.resources import MUTATING_WEBHOOKS
from tests.support.certificates import write_certificate
from tests.support.documents import ROOT
from tests.support.lives import ended_state
from tests.support.program import Program


MANIFEST = ROOT / "deploy/components/admission/webhook.yaml"
PATH = "/v1/evictions"
TIMEOUT = 1.0
"""The webhook's `timeoutSeconds`."""
EVICTIONS = "kubevirt_eviction_exporter_request_duration_seconds_count"
EVICTS: tuple[Object, ...] = (
    {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list"]},
    {"apiGroups": [""], "resources": ["pods/eviction"], "verbs": ["create"]},
    {"apiGroups": [""], "resources": ["nodes"], "verbs": ["get", "list", "patch"]},
)


@dataclass(frozen=True)
class Pair:
    """The files of a serving certificate for 127.0.0.1, its key and its CA."""

    certificate: Path
    key: Path
    authority: Path


def make_pair(directory: Path) -> Pair:
    """A key pair signed by its own CA."""
    directory.mkdir(parents=True, exist_ok=True)
    write_certificate(directory, "tls")
    return Pair(directory / "tls.crt", directory / "tls.key", directory / "ca.crt")


def admitting(pair: Pair, mode: str, *users: str) -> dict[str, Any]:
    """The configuration of an exporter with the admission webhook."""
    anywhere = "127.0.0.1:0"
    return {
        "listen": {"query": anywhere, "metrics": anywhere, "admission": anywhere},
        "tls": {"admission": {"certFile": str(pair.certificate), "keyFile": str(pair.key)}},
        "admission": {"mode": mode, "users": [*users]},
    }


def configuration(url: str, authority: Path, users: Iterable[str] | None) -> Object:
    """The shipped webhook configuration with this URL, for these users or for all users."""
    configuration: Object = yaml.safe_load(MANIFEST.read_text(encoding="utf-8"))
    (webhook,) = configuration["webhooks"]
    assert webhook["timeoutSeconds"] == TIMEOUT
    bundle = base64.b64encode(authority.read_bytes()).decode()
    webhook["clientConfig"] = {"url": url + PATH, "caBundle": bundle}
    listed = webhook["matchConditions"][-1]
    assert listed["name"] == "listed-users"
    if users is None:
        webhook["matchConditions"].remove(listed)  # as in components/admission-observe
        return configuration
    names = ", ".join(f"'{user}'" for user in users)
    listed["expression"] = f"request.userInfo.username in [{names}]"
    return configuration


@asynccontextmanager
async def registered(cluster: RealCluster, configured: Object) -> AsyncIterator[None]:
    """Register the webhook configuration during the block."""
    await cluster.admin.create(MUTATING_WEBHOOKS, configured)
    try:
        yield
    finally:
        await cluster.admin.delete(MUTATING_WEBHOOKS, None, configured["metadata"]["name"])


@dataclass(frozen=True)
class Answer:
    """The answer to one eviction, and its duration."""

    code: int
    body: Object
    headers: Mapping[str, str]
    seconds: float

    @property
    def message(self) -> str:
        """The server's message."""
        return str(self.body.get("message", ""))


@dataclass
class Evictor:
    """A user who evicts pods, with an HTTP session."""

    user: User
    url: str
    namespace: str
    session: aiohttp.ClientSession

    @classmethod
    @asynccontextmanager
    async def made(
        cls, cluster: RealCluster, name: str, namespace: str
    ) -> AsyncIterator["Evictor"]:
        """Create the user, who may evict and drain."""
        user = cluster.certified(name)
        await allow(cluster.admin, user, name, *EVICTS)
        async with cls.opened(cluster, user, namespace) as evictor:
            yield evictor

    @classmethod
    @asynccontextmanager
    async def opened(
        cls, cluster: RealCluster, user: User, namespace: str
    ) -> AsyncIterator["Evictor"]:
        """A client for an existing user."""
        connector = aiohttp.TCPConnector(ssl=user.tls, limit=0)
        async with aiohttp.ClientSession(
            cluster.api.url, connector=connector, headers=user.headers
        ) as session:
            yield cls(user, cluster.api.url, namespace, session)

    async def evict(self, pod: str, *, dry_run: bool = False, query: bool = False) -> Answer:
        """Evict a pod; a dry run is requested by the Eviction's options or by the query."""
        body: Object = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": pod, "namespace": self.namespace},
        }
        if dry_run:
            body["deleteOptions"] = {"dryRun": ["All"]}
        path = f"{PODS.path(self.namespace, pod)}/eviction"
        began = time.perf_counter()
        async with self.session.post(
            path, json=body, params={"dryRun": "All"} if query else {}
        ) as response:
            answer = await response.json()
            seconds = time.perf_counter() - began
            return Answer(response.status, answer, response.headers, seconds)

    async def until_called(self, exporter: Program, pod: str) -> None:
        """Wait until the API server calls the webhook."""
        before = await exporter.sample(EVICTIONS, endpoint="evictions")

        async def is_called() -> bool:
            await self.evict(pod, dry_run=True)
            return await exporter.sample(EVICTIONS, endpoint="evictions") > before

        await poll(is_called, within=20, what="the webhook called")


async def add_vm(admin: Client, namespace: str, name: str, *, held: bool) -> str:
    """Create a running VMI and its pod; if `held`, it has just migrated. Returns the pod's name."""
    now = time.time()
    status = {"migrationState": ended_state(f"m-{name}", now - 30, now)} if held else {}
    made = await admin.create(VMIS, vmi(name, namespace, status=status))
    pod = await admin.create(PODS, launcher_pod(made))
    return str(pod["metadata"]["name"])


async def versions(admin: Client, namespace: str) -> dict[str, str]:
    """The resourceVersion of every VMI, VMIM and pod of a namespace, by kind and name."""
    versions = {}
    for resource in (VMIS, VMIMS, PODS):
        for document in (await admin.list(resource, namespace))["items"]:
            metadata = document["metadata"]
            versions[f"{resource.plural}/{metadata['name']}"] = metadata["resourceVersion"]
    return versions
