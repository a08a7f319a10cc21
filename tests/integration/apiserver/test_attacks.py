"""Attacks on the query listener with TLS; a real API server reviews the callers' tokens."""

import asyncio
import json
import ssl
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from io import BytesIO
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.cluster import EXPORTER_READS, PATIENCE, VMIS, User, poll, vmi
from tests.cluster.access import allow
from tests.cluster.resources import SERVICE_ACCOUNTS
from tests.support.api_servers import RealStage
from tests.support.builders import rfc3339
from tests.support.certificates import sign_token, write_certificate
from tests.support.program import Program, program


CONNECTIONS = 500
BODY = 100 * 2**20
HEAD = 10 * 2**20
MIB = 2**20
ROUNDS = 6
LEFT_BEHIND = 10
"""A round of connections must raise the process's memory by less than this many MiB."""
_numbers = count(1)


@dataclass
class Target:
    """The exporter as in a cluster: TLS, tokens, limits."""

    program: Program
    namespace: str
    authority: Path
    caller: User
    rows: list[str] = field(default_factory=list)

    @property
    def trust(self) -> ssl.SSLContext:
        """A TLS context that trusts the exporter's CA."""
        return ssl.create_default_context(cafile=self.authority)

    async def ask(
        self, method: str, path: str, *, token: str | None = None, **options: Any
    ) -> tuple[int, Any]:
        """Send a request; returns the status and the body, which is decoded if it is JSON."""
        headers = {"Authorization": f"Bearer {token}"} if token is not None else {}
        headers |= options.pop("headers", {})
        connector = aiohttp.TCPConnector(ssl=self.trust)
        async with (
            aiohttp.ClientSession(connector=connector, max_line_size=2**16) as session,
            session.request(
                method, self.program.query + path, headers=headers, **options
            ) as response,
        ):
            text = await response.text()
            is_json = response.content_type.endswith("json")
            return response.status, json.loads(text) if is_json else text

    async def send(self, *parts: bytes, pause: float = 0.0) -> bytes:
        """Send these bytes; returns the answer."""
        host, _, port = self.program.query.removeprefix("https://").rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port), ssl=self.trust)
        try:
            for part in parts:
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(pause)
            return await asyncio.wait_for(reader.read(), PATIENCE)
        except ConnectionError:
            return b""
        finally:
            writer.close()

    async def ready(self) -> None:
        """Wait until the exporter is ready."""

        async def is_ready() -> bool:
            return (await self.ask("GET", "/readyz"))[0] == 200

        await poll(is_ready, what="readiness")

    def record(self, attempt: str, answer: str, bound: str) -> None:
        """Add a row to the table."""
        self.rows.append(f"attack: {attempt} | {answer} | {bound}")


async def a_caller(real: RealStage, url: str) -> User:
    """A service account that may get and post a non-resource URL."""
    name = f"attacker-{next(_numbers)}"
    user = await real.cluster.user(name, [])
    rule = {"nonResourceURLs": [url], "verbs": ["get", "post"]}
    await allow(real.admin, user, f"{name}-asks", rule)
    return user


async def a_reviewer(real: RealStage) -> User:
    """The exporter's account, which may read the cluster and create reviews."""
    name = f"reviewer-{next(_numbers)}"
    user = await real.cluster.user(name, EXPORTER_READS)
    await allow(
        real.admin,
        user,
        f"{name}-reviews",
        {
            "apiGroups": ["authentication.k8s.io"],
            "resources": ["tokenreviews"],
            "verbs": ["create"],
        },
        {
            "apiGroups": ["authorization.k8s.io"],
            "resources": ["subjectaccessreviews"],
            "verbs": ["create"],
        },
    )
    return user


def expired(real: RealStage, user: User) -> str:
    """An expired token that this cluster has signed."""
    key = real.cluster.directory / "service-account.key"
    issuer = "https://kubernetes.default.svc"
    return sign_token(key, issuer, user.name, int(time.time()) - 60)


@pytest.fixture(scope="module")
async def target(
    real: RealStage, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Target]:
    """One process for all attacks, so that damage by one attack is noticed in the next."""
    directory = tmp_path_factory.mktemp("attacks")
    write_certificate(directory, "localhost")
    namespace = await real.make_namespace()
    await real.admin.create(VMIS, vmi("db", namespace))
    now = int(time.time())
    state = {
        "migrationUid": "m1",
        "startTimestamp": rfc3339(now - 60),
        "endTimestamp": rfc3339(now),
    }
    await real.admin.merge(VMIS, namespace, "db", {"status": {"migrationState": state}})
    pair = {
        "certFile": str(directory / "localhost.crt"),
        "keyFile": str(directory / "localhost.key"),
    }
    config = {
        "listen": {"query": "0.0.0.0:0", "metrics": "127.0.0.1:0"},
        "tls": {"query": pair},
        "auth": {"query": "kubernetes"},
        "limits": {"connections": CONNECTIONS, "requestTimeout": "1s", "idleTimeout": "10s"},
    }
    login = real.cluster.kubeconfig(await a_reviewer(real))
    async with program(directory, "--kubeconfig", str(login), config=config) as exporter:
        await exporter.listening()
        exporter.query = exporter.query.replace("0.0.0.0", "localhost")  # noqa: S104 (nothing is bound)
        caller = await a_caller(real, "/v1/*")
        attacked = Target(exporter, namespace, directory / "ca.crt", caller)
        await attacked.ready()
        yield attacked


@pytest.mark.parametrize(
    "idle",
    [pytest.param(1_000, id="small"), pytest.param(10_000, id="soak", marks=pytest.mark.soak)],
)
async def test_every_attempt(
    target: Target, real: RealStage, prove: Callable[[str], None], idle: int
) -> None:
    """Each attack is answered and leaves nothing behind, and other callers are still served."""
    before = target.program.resident() // MIB
    await ask_without_permission(target, real)
    await send_too_much(target)
    await send_too_slowly(target)
    await try_unusual_paths(target)
    await send_unknown_nodes(target)
    await hold_connections(target, idle)
    grown = [await grow_by_connections(target, idle)]
    # On a slow machine more handshakes run at once, so the first rounds may still need more memory.
    while grown[-1] >= LEFT_BEHIND and len(grown) < ROUNDS:
        grown.append(await grow_by_connections(target, idle))
    assert grown[-1] < LEFT_BEHIND, f"each round of connections leaves something behind: {grown}"
    status, answer = await verdict(target, target.caller.token or "")
    assert (status, answer["verdicts"][0]["reason"]) == (200, "cooldown")
    after = target.program.resident() // MIB
    for row in target.rows[:-1]:
        prove(row)
    prove(f"attack: memory before {before} MiB, after all attacks {after} MiB")
    log = target.program.output
    assert (target.caller.token or "?") not in log
    assert "Traceback" not in log


async def ask_without_permission(target: Target, real: RealStage) -> None:
    """Requests without a token, or with a bad, expired, revoked or forbidden one, are refused."""
    stranger = await a_caller(real, "/metrics")
    revoked = await a_caller(real, "/v1/*")
    await real.admin.delete(SERVICE_ACCOUNTS, "accounts", revoked.name.rpartition(":")[2])
    for attempt, token, expected in (
        ("no token", None, 401),
        ("a bad token", "eyJhbGciOiJub25lIn0.e30.", 401),
        ("an expired token", expired(real, target.caller), 401),
        ("a deleted account's token", revoked.token, 401),
        ("a valid token without permission", stranger.token, 403),
        ("a valid token with permission", target.caller.token, 200),
    ):
        status, answer = await reviewed(target, token)
        assert status == expected, answer
        if status != 200:
            assert answer["status"] == status
            assert answer["detail"]
            assert token is None or token not in json.dumps(answer)
        target.record(attempt, str(status), "one answer kept for auth.cache, 4096 at most")
    for path in ("/livez", "/readyz"):
        assert (await target.ask("GET", path))[0] == 200


async def send_too_much(target: Target) -> None:
    """Bodies and heads that are too large are refused."""
    token = target.caller.token
    status, problem = await target.ask(
        "POST", "/v1/verdicts", token=token, data=BytesIO(bytes(BODY))
    )
    assert (status, problem["title"]) == (413, "Body too large")
    target.record(f"a body of {BODY // 2**20} MB", "413", "limits.bodyBytes are read")
    status, problem = await target.ask(
        "GET", "/v1/blocked", token=token, headers={"X": "x" * 10_000}
    )
    assert (status, problem["status"]) == (400, 400)
    answer = await target.send(b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"x" * HEAD + b"\r\n\r\n")
    assert answer == b"" or answer.startswith((b"HTTP/1.0 400", b"HTTP/1.1 400"))
    target.record(f"a header of {HEAD // 2**20} MB", "400", "8 kB are read")
    answer = await target.send(b"\x16\x03\x01\x02\x00\x01\x00 nonsense\r\n\r\n")
    assert b" 400 " in answer.splitlines()[0]
    assert b"application/problem+json" in answer
    target.record("bytes that are no HTTP", "400", "nothing")


async def send_too_slowly(target: Target) -> None:
    """Requests whose head or body is never finished are ended after a timeout."""
    assert await target.send(b"GET /v1/blocked HTTP/1.1\r\nHost: x\r\n") == b""
    target.record("a head that never ends", "closed", "limits.idleTimeout")
    head = (
        f"POST /v1/verdicts HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n"
        f"Authorization: Bearer {target.caller.token}\r\n\r\n"
    )
    answer = await target.send(head.encode(), b"{", pause=0.1)
    assert b" 408 " in answer.splitlines()[0]
    target.record("a body that never comes", "408", "limits.requestTimeout")


async def try_unusual_paths(target: Target) -> None:
    """No spelling of a path avoids the permission check or reaches something outside the API."""
    token = target.caller.token
    for path in (
        "/v1/../metrics",
        "/v1/%2e%2e/metrics",
        "//metrics",
        "/metrics/",
        "/METRICS",
        "/v1/vmis/../../metrics",
        "/v1/vmis/%2e%2e/%2e%2e%2fmetrics",
        "/v1/vmis/a%00b/c",
        "/v1/vmis/" + "a" * 64 + "/b",
        "/v1/vmis/a/b%0d%0aSet-Cookie:x=1",
    ):
        request = f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
        answer = await target.send(f"{request}Authorization: Bearer {token}\r\n\r\n".encode())
        status = int(answer.split()[1])
        assert status in (400, 403, 404, 422), path
        assert b"descheduler_kubevirt" not in answer
        assert b"Set-Cookie" not in answer.partition(b"\r\n\r\n")[0]
    target.record(
        "path tricks (.., %2e, //, NUL, CR LF, 64 characters)", "400, 403, 404 or 422", "-"
    )


async def send_unknown_nodes(target: Target) -> None:
    """Names that a caller invents create no series and no log line."""
    candidates = [
        {"namespace": target.namespace, "name": "db", "node": f"made-up-{n}", "pod": "x\nforged"}
        for n in range(500)
    ]
    candidates += [{"namespace": f"made-up-{n}", "name": "x", "node": "y"} for n in range(500)]
    series = await count_series(target)
    status, answer = await target.ask(
        "POST", "/v1/verdicts", token=target.caller.token, json={"candidates": candidates}
    )
    assert (status, len(answer["verdicts"])) == (200, 1000)
    text = (await scrape(target))[1]
    assert "made-up" not in text
    assert await count_series(target) <= series + 2, "a block of the VM's own node, a request"
    assert "\nforged" not in target.program.output
    target.record("1,000 invented nodes and namespaces", "200", "no series and no log line each")


async def hold_connections(target: Target, idle: int) -> None:
    """If there are too many idle connections, some are closed, and the process stays up."""
    host, _, port = target.program.query.removeprefix("https://").rpartition(":")
    before = target.program.resident() // MIB
    before_blocked = await rejected_connections(target)
    opened: list[asyncio.StreamWriter] = []
    try:
        for _ in range(idle // 100):
            made = await asyncio.gather(
                *(asyncio.open_connection(host, int(port)) for _ in range(100)),
                return_exceptions=True,
            )
            opened += [pair[1] for pair in made if not isinstance(pair, BaseException)]
        held = target.program.resident() // MIB

        async def most_are_refused() -> bool:
            return await rejected_connections(target) - before_blocked >= idle - CONNECTIONS - 100

        await poll(most_are_refused, what="connections closed for others")
        refused = await rejected_connections(target)
    finally:
        for writer in opened:
            writer.close()
    target.record(
        f"{idle} idle connections, {CONNECTIONS} allowed",
        f"{refused:.0f} closed for newer ones, the others after limits.idleTimeout",
        f"{held - before} MiB while held, by the handshakes' buffers",
    )

    async def is_served() -> bool:
        try:
            return (await verdict(target, target.caller.token))[0] == 200
        except aiohttp.ClientError:
            return False

    await poll(is_served, what="a verdict after the connections")


async def grow_by_connections(target: Target, idle: int) -> int:
    """Open another round of idle connections; returns by how many MiB the process has grown."""
    before = target.program.resident()
    await hold_connections(target, idle)
    return (target.program.resident() - before) // MIB


async def verdict(target: Target, token: str | None) -> tuple[int, Any]:
    """Ask for the verdict on the VM, as a dry run."""
    candidates = [{"namespace": target.namespace, "name": "db"}]
    body = {"candidates": candidates, "dryRun": True}
    return await target.ask("POST", "/v1/verdicts", token=token, json=body)


async def reviewed(target: Target, token: str | None) -> tuple[int, Any]:
    """Like `verdict`, but repeated while a busy API server does not answer the review in time."""

    async def attempt() -> tuple[int, Any] | None:
        status, answer = await verdict(target, token)
        return None if status == 503 else (status, answer)

    return await poll(attempt, what="a review of the caller")


async def scrape(target: Target) -> tuple[int, str]:
    """Read the metrics from the plain listener on loopback."""
    async with (
        aiohttp.ClientSession() as session,
        session.get(target.program.metrics + "/metrics") as response,
    ):
        return response.status, await response.text()


async def count_series(target: Target) -> int:
    """How many series a scrape has."""
    text = (await scrape(target))[1]
    return sum(not line.startswith("#") for line in text.splitlines())


async def rejected_connections(target: Target) -> float:
    """How many connections of the query listener were closed to make room for others."""
    name = "kubevirt_eviction_exporter_rejected_connections_total"
    return await target.program.sample(name, listener="query")
