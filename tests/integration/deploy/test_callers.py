"""Who may read what from an installed exporter: real accounts, roles and TLS."""

import asyncio
import re
import socket
import ssl
import urllib.parse
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import aiohttp
import pytest

from tests.cluster import VMIS, RealCluster, poll, vmi
from tests.generate.manifests import NAME, only, render
from tests.integration.deploy.secured import Caller, installed, runnable, somebody, trust
from tests.integration.deploy.server import account, applied
from tests.support.admission import Pair
from tests.support.documents import CLAIMS, table
from tests.support.program import program


CALLER, SCRAPER = f"{NAME}-caller", f"{NAME}-scraper"
QUESTION = {"candidates": [{"namespace": "default", "name": "asked-about"}]}
REQUESTS = (
    ("query", "POST", "/v1/verdicts"),
    ("query", "GET", "/v1/blocked"),
    ("query", "GET", "/v1/vmis/default/asked-about"),
    ("query", "GET", "/v1/evacuations"),
    ("query", "GET", "/v1/nodes"),
    ("query", "GET", "/v1/status"),
    ("query", "GET", "/metrics"),
    ("query", "GET", "/openapi.json"),
    ("query", "GET", "/"),
    ("query", "GET", "/livez"),
    ("query", "GET", "/readyz"),
    ("query", "GET", "/runbooks"),
    ("metrics", "GET", "/metrics"),
    ("metrics", "GET", "/"),
    ("metrics", "GET", "/v1/blocked"),
    ("metrics", "GET", "/livez"),
    ("metrics", "GET", "/readyz"),
    ("metrics", "GET", "/runbooks"),
)


@pytest.fixture
async def standalone(cluster: RealCluster, pair: Pair, tmp_path: Path) -> AsyncIterator[Caller]:
    """The overlay's exporter with its account and roles, and one VM."""
    await cluster.admin.create(VMIS, vmi("asked-about"))
    async with installed(cluster, tmp_path, pair) as nobody:
        yield nobody
    await cluster.admin.delete(VMIS, "default", "asked-about")


async def statuses(caller: Caller) -> dict[tuple[str, str, str], int]:
    """The status of each request."""
    return {
        (listener, method, path): (
            await caller.ask(
                method,
                getattr(caller.exporter, listener) + path,
                QUESTION if method == "POST" else None,
            )
        )[0]
        for listener, method, path in REQUESTS
    }


async def test_everybody_gets_what_their_role_says(
    cluster: RealCluster, standalone: Caller, prove: Callable[[str], None]
) -> None:
    """Each account gets the HTTP statuses that claims.md lists; no token is logged."""
    async with (
        somebody(cluster, "a-caller", CALLER) as caller,
        somebody(cluster, "a-scraper", SCRAPER) as scraper,
        somebody(cluster, "a-stranger") as stranger,
    ):
        made_up = f"{stranger[:-8]}{'A' * 8}"
        tokens = {"caller": caller, "scraper": scraper, "stranger": stranger, "made up": made_up}

        async def roles_are_in_force() -> bool:
            return (await statuses(standalone.with_token(caller)))[REQUESTS[0]] == 200 and (
                await statuses(standalone.with_token(scraper))
            )["query", "GET", "/metrics"] == 200

        await poll(roles_are_in_force, what="roles in force")
        got = {
            who: await statuses(standalone.with_token(tokens.get(who)))
            for who in ("nobody", *tokens)
        }

    columns = {"nobody": 0, "made up": 0, "stranger": 1, "caller": 2, "scraper": 3}
    promised = {
        (listener, *request.split(" ")): [int(status) for status in statuses_of_all]
        for listener, row, *statuses_of_all in table(CLAIMS, "Answers to each account")
        for request in re.findall("`(.*?)`", row)
    }
    assert list(promised) == list(REQUESTS)
    for who, column in columns.items():
        assert got[who] == {request: promised[request][column] for request in REQUESTS}, who
    for token in tokens.values():
        assert token not in standalone.exporter.output
        assert token.rpartition(".")[2] not in standalone.exporter.output
    for (listener, method, path), status in got["nobody"].items():
        others = [f"{who} {got[who][listener, method, path]}" for who in tokens]
        prove(f"{listener} {method} {path}: nobody {status}, {', '.join(others)}")


async def test_a_refusal_says_who_and_what(cluster: RealCluster, standalone: Caller) -> None:
    """A refusal is a problem+json with the account's name and the path, but without the token."""
    url = f"{standalone.exporter.query}/v1/blocked"
    async with somebody(cluster, "a-stranger") as token:
        status, problem = await standalone.with_token(token).ask("GET", url)

    assert status == 403
    assert problem["detail"] == (
        f"system:serviceaccount:{NAME}:a-stranger may not get the non-resource URL /v1/blocked"
    )
    assert token not in str(problem)


@pytest.mark.parametrize("resource", ["tokenreviews", "subjectaccessreviews"])
async def test_both_reviews_are_needed(
    cluster: RealCluster, resource: str, pair: Pair, tmp_path: Path
) -> None:
    """If one of the two review permissions is missing, requests get a 503, and the log says why."""
    async with (
        somebody(cluster, "a-caller", CALLER) as token,
        installed(cluster, tmp_path, pair, without=("create", (resource,))) as nobody,
    ):
        url = f"{nobody.exporter.query}/v1/verdicts"
        status, problem = await nobody.with_token(token).ask("POST", url, QUESTION)

        (event,) = nobody.exporter.events("callers_not_reviewed")

    assert (status, problem["title"]) == (503, "API server unavailable")
    assert resource in event["why"]
    assert resource not in problem["detail"], "a stranger learns nothing of the cluster"


async def test_only_tls_of_1_2_or_newer_is_answered(standalone: Caller) -> None:
    """A request without TLS fails, and so does the handshake of a client with TLS 1.1."""
    for secure in (standalone.exporter.query, standalone.exporter.metrics):
        async with aiohttp.ClientSession() as session:
            with pytest.raises(aiohttp.ClientError):
                await session.get(secure.replace("https:", "http:") + "/v1/blocked")
    url = urllib.parse.urlsplit(standalone.exporter.query)

    def shake_hands(version: ssl.TLSVersion) -> str | None:
        client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
        client.set_ciphers("ALL:@SECLEVEL=0")
        client.minimum_version = client.maximum_version = version
        address = (url.hostname, url.port)
        with socket.create_connection(address) as plain, client.wrap_socket(plain) as shaken:
            return shaken.version()

    for version in (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3):
        assert await asyncio.to_thread(shake_hands, version)
    with (
        pytest.warns(DeprecationWarning, match="TLSv1_1 is deprecated"),
        pytest.raises(ssl.SSLError),
    ):
        await asyncio.to_thread(shake_hands, ssl.TLSVersion.TLSv1_1)


async def test_the_sidecar_asks_on_its_socket_and_prometheus_over_tls(
    cluster: RealCluster, pair: Pair, tmp_path: Path
) -> None:
    """Requests on the pod's socket need no token; requests to the metrics listener do."""
    config = runnable("overlays/sidecar", pair)
    query = tmp_path / "query.sock"
    config["listen"] = {**config["listen"], "query": f"unix:{query}"}
    monitoring = render("overlays/monitoring")
    scraper = [only(monitoring, kind, SCRAPER) for kind in ("ServiceAccount", "ClusterRoleBinding")]
    async with (
        account(cluster, "overlays/sidecar") as user,
        applied(cluster.admin, scraper),
        program(tmp_path, "--kubeconfig", str(cluster.kubeconfig(user)), config=config) as exporter,
    ):
        nobody = Caller(exporter, trust(pair))
        await nobody.ready()
        async with (
            aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(query))) as session,
            session.get("http://exporter/v1/blocked") as response,
        ):
            assert response.status == 200
        assert (await nobody.ask("GET", f"{exporter.metrics}/metrics"))[0] == 401

        prometheus = await cluster.account(NAME, SCRAPER)
        scraping = nobody.with_token(prometheus.token)

        async def is_let_in() -> bool:
            return (await scraping.ask("GET", f"{exporter.metrics}/metrics"))[0] == 200

        await poll(is_let_in, what="metrics for Prometheus's account")
        assert query.stat().st_mode & 0o777 == 0o660
