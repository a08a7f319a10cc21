"""The exporter over TLS, configured as in its overlay, for callers with and without a token."""

import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp

from tests.cluster import RealCluster, poll
from tests.cluster.access import binding
from tests.cluster.resources import CLUSTER_ROLE_BINDINGS, SERVICE_ACCOUNTS
from tests.generate.manifests import NAMESPACE, Object, config_of, render
from tests.integration.deploy.server import account
from tests.support.admission import Pair
from tests.support.program import ANYWHERE, Program, program


def trust(pair: Pair) -> ssl.SSLContext:
    """A TLS context that trusts only the pair's CA."""
    return ssl.create_default_context(cafile=pair.authority)


def runnable(folder: str, pair: Pair) -> Object:
    """An overlay's configuration, with paths that a test may use."""
    return playable(config_of(render(folder)), pair)


def playable(config: Object, pair: Pair) -> Object:
    """A configuration, with paths that a test may use."""
    config = {**config, **ANYWHERE, "history": f"file:{pair.key.parent}/history"}
    if "tls" not in config:
        return config
    files = {"certFile": str(pair.certificate), "keyFile": str(pair.key)}
    assert all(listener.keys() == files.keys() for listener in config["tls"].values())
    config["tls"] = dict.fromkeys(config["tls"], files)
    # Without a cache, changed roles have effect at once.
    config["auth"] = {**config["auth"], "cache": "0"}
    return config


@dataclass(frozen=True)
class Caller:
    """A client over TLS, with or without a token; `host` is the expected server name."""

    exporter: Program
    trust: ssl.SSLContext
    token: str = ""
    host: str | None = None

    def with_token(self, token: str | None) -> "Caller":
        """The same client with another token."""
        return replace(self, token=token or "")

    async def ask(self, method: str, url: str, body: object = None) -> tuple[int, Any]:
        """The status and the body of an answer, decoded if it is JSON."""
        headers = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        async with (
            aiohttp.ClientSession(headers=headers) as session,
            session.request(
                method, url, json=body, ssl=self.trust, server_hostname=self.host
            ) as response,
        ):
            text = await response.text()
            is_json = response.content_type.endswith("json")
            return response.status, json.loads(text) if is_json else text

    async def ready(self) -> None:
        """Wait until the readiness probe of the metrics listener succeeds."""
        await self.exporter.listening()

        async def is_ready() -> bool:
            return (await self.ask("GET", f"{self.exporter.metrics}/readyz"))[0] == 200

        await poll(is_ready, what="/readyz")

    async def sample(self, metric: str, **labels: str) -> float:
        """The sum of a metric's series with these labels in a scrape."""
        status, text = await self.ask("GET", f"{self.exporter.metrics}/metrics")
        assert status == 200, text
        lines = [line.rpartition(" ") for line in text.splitlines()]
        return sum(
            float(value)
            for series, _, value in lines
            if series.split("{")[0] == metric
            and all(f'{key}="{wanted}"' in series for key, wanted in labels.items())
        )


@asynccontextmanager
async def installed(
    cluster: RealCluster,
    directory: Path,
    pair: Pair,
    folder: str = "overlays/standalone",
    *,
    without: tuple[str, tuple[str, ...]] | None = None,
) -> AsyncIterator[Caller]:
    """Run an overlay's exporter with its account and roles; yields a client without a token."""
    async with (
        account(cluster, folder, without=without) as user,
        program(
            directory,
            *("--kubeconfig", str(cluster.kubeconfig(user))),
            config=runnable(folder, pair),
        ) as exporter,
    ):
        nobody = Caller(exporter, trust(pair))
        await nobody.ready()
        yield nobody


@asynccontextmanager
async def somebody(cluster: RealCluster, name: str, *roles: str) -> AsyncIterator[str]:
    """The token of a new account with these ClusterRoles."""
    await cluster.admin.create(
        SERVICE_ACCOUNTS, {"metadata": {"name": name, "namespace": NAMESPACE}}
    )
    user = await cluster.account(NAMESPACE, name)
    for role in roles:
        await cluster.admin.create(
            CLUSTER_ROLE_BINDINGS,
            {**binding(role, user.name), "metadata": {"name": f"{name}-{role}"}},
        )
    try:
        yield user.token or ""
    finally:
        for role in roles:
            await cluster.admin.delete(CLUSTER_ROLE_BINDINGS, None, f"{name}-{role}")
        await cluster.admin.delete(SERVICE_ACCOUNTS, NAMESPACE, name)
