"""The cost of callers without a token: compressed bodies, unfinished requests, connections."""

import asyncio
import gzip
import os
import ssl
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias
from urllib.parse import urlsplit

import aiohttp
import msgspec
import pytest

from exporter.server.http.budget import BUDGET
from tests.cluster import PATIENCE, poll
from tests.cluster.users import open_kubeconfig
from tests.program.waiting import wait_until
from tests.support.admission import PATH
from tests.support.api_servers import SimulatedStage
from tests.support.certificates import write_certificate
from tests.support.program import Program, program
from tests.support.reviews import a_review


Prove: TypeAlias = Callable[[str], None]
Streams: TypeAlias = tuple[asyncio.StreamReader, asyncio.StreamWriter]

MIB = 2**20
SLACK = 32
"""How many freed MiB the memory allocator may keep, as docs/reference.md says."""
AT_ONCE = 50
STRANGER = "127.0.0.2"
REQUEST = b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n"
UNFINISHED = b"GET /livez HTTP/1.1\r\nHost: x\r\n"
REVIEW = msgspec.json.encode(a_review())


@dataclass
class Exporter:
    """The running program, and the open connections of strangers.

    Strangers send no client certificate; our own requests send one that the server's CA signed.
    """

    program: Program
    trust: ssl.SSLContext
    own: ssl.SSLContext
    held: list[Streams] = field(default_factory=list)

    async def open(self, url: str, *, tls: bool = True) -> Streams:
        """Open a stranger's connection, with or without a TLS handshake."""
        parts = urlsplit(url)
        context = self.trust if tls and parts.scheme == "https" else None
        streams = await asyncio.open_connection(
            parts.hostname, parts.port, ssl=context, local_addr=(STRANGER, 0)
        )
        self.held.append(streams)
        return streams

    async def crowd(self, url: str, count: int, *sent: bytes, tls: bool = True) -> None:
        """Open many connections that send these bytes and nothing else."""
        slots = asyncio.Semaphore(AT_ONCE)

        async def send() -> None:
            async with slots:
                # The exporter may close the connection at any time.
                with suppress(OSError, TimeoutError):
                    async with asyncio.timeout(PATIENCE):
                        _, writer = await self.open(url, tls=tls)
                        for part in sent:
                            writer.write(part)
                            await writer.drain()

        await asyncio.gather(*(send() for _ in range(count)))

    async def leave(self) -> None:
        """Close all connections of strangers."""
        for _, writer in self.held:
            writer.transport.abort()
        self.held.clear()

        await wait_until(lambda: self.sockets() < AT_ONCE, what="the end of the connections")

    async def request(self, method: str, url: str, **options: object) -> int:
        """Send a request on a connection of its own; returns the status."""
        connector = aiohttp.TCPConnector(ssl=self.own, force_close=True)
        async with (
            aiohttp.ClientSession(connector=connector) as session,
            session.request(method, url, **options) as response,  # type: ignore[arg-type]
        ):
            await response.read()
            return response.status

    async def review(self) -> int:
        """Send an admission review; returns the status."""
        headers = {"Content-Type": "application/json"}
        return await self.request(
            "POST", self.program.admission + PATH, data=REVIEW, headers=headers
        )

    def resident(self) -> float:
        """The exporter's resident memory in MiB."""
        return self.program.resident() / MIB

    def sockets(self) -> int:
        """How many files and sockets the exporter has open."""
        return len([*Path(f"/proc/{self.program.process.pid}/fd").iterdir()])

    def cpu(self) -> float:
        """The seconds of CPU that the exporter has used."""
        stat = Path(f"/proc/{self.program.process.pid}/stat").read_text(encoding="ascii")
        used = stat.rpartition(")")[2].split()[11:13]
        return sum(map(int, used)) / os.sysconf("SC_CLK_TCK")

    @asynccontextmanager
    async def probed(self) -> AsyncIterator[list[float]]:
        """Ask `/livez` again and again during the block; yields the seconds of each request."""
        took: list[float] = []
        ended = asyncio.Event()

        async def probe() -> None:
            while not ended.is_set():
                began = time.monotonic()
                assert await self.request("GET", self.program.metrics + "/livez") == 200
                took.append(time.monotonic() - began)

        probing = asyncio.create_task(probe())
        try:
            yield took
        finally:
            ended.set()
            await probing


@asynccontextmanager
async def running(stage: SimulatedStage, directory: Path, **tls: str) -> AsyncIterator[Exporter]:
    """Run the exporter with TLS on the metrics and the admission listener."""
    write_certificate(directory, "localhost")
    pair = {
        name: str(directory / f"localhost.{end}")
        for name, end in (("certFile", "crt"), ("keyFile", "key"))
    }
    anywhere = "localhost:0"
    config = {
        "listen": {
            "query": "127.0.0.1:0",
            "metrics": anywhere,
            "admission": anywhere,
            "hosts": [PROXY],
        },
        "tls": {"metrics": pair, "admission": pair | tls},
    }
    login = open_kubeconfig(directory / "kubeconfig", stage.url)
    arguments = ("--kubeconfig", str(login))
    async with program(directory, *arguments, config=config) as started:
        await started.listening()
        trust, own = (ssl.create_default_context(cafile=directory / "ca.crt") for _ in range(2))
        own.load_cert_chain(pair["certFile"], pair["keyFile"])
        exporter = Exporter(started, trust, own)
        async with AsyncExitStack() as stack:
            stack.push_async_callback(exporter.leave)

            async def is_ready() -> bool:
                return await exporter.request("GET", started.metrics + "/readyz") == 200

            await poll(is_ready, what="readiness")
            yield exporter


@pytest.fixture
async def exporter(simulated: SimulatedStage, tmp_path: Path) -> AsyncIterator[Exporter]:
    """The exporter, without a client CA."""
    async with running(simulated, tmp_path) as started:
        yield started


SIZES = pytest.mark.parametrize(
    "times", [pytest.param(1, id="small"), pytest.param(10, id="soak", marks=pytest.mark.soak)]
)


@SIZES
async def test_a_compressed_body_is_refused_and_not_inflated(
    exporter: Exporter, prove: Prove, times: int
) -> None:
    """A compressed body gets 415 on every listener, and the connection is closed."""
    bomb = gzip.compress(bytes(240 * MIB))
    before = exporter.cpu()
    targets = [
        (exporter.program.metrics, b"GET /livez"),
        (exporter.program.query, b"POST /v1/verdicts"),
        (exporter.program.admission, b"POST " + PATH.encode()),
    ]
    async with exporter.probed() as took:
        requests = (send_compressed(exporter, *target, bomb) for target in targets * 10 * times)
        answers = Counter(await asyncio.gather(*requests))
    prove(
        f"{answers.total()} gzip bodies of {len(bomb) // 1024} KiB, each 240 MiB when inflated:"
        f" {exporter.cpu() - before:.2f} s of CPU, longest /livez {max(took):.2f} s"
    )
    assert answers == {(b"415", True): answers.total()}


async def send_compressed(
    exporter: Exporter, url: str, line: bytes, body: bytes
) -> tuple[bytes, bool]:
    """Send a compressed body; returns the status, and whether the connection was closed."""
    head = b"%s HTTP/1.1\r\nHost: localhost\r\nContent-Encoding: gzip\r\n" % line
    reader, writer = await exporter.open(url)
    writer.write(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    status = (await asyncio.wait_for(reader.readline(), PATIENCE))[9:12]
    try:
        await asyncio.wait_for(reader.read(), 5)
    except ConnectionError:
        pass  # closed before the exporter had read all bytes
    except TimeoutError:
        return status, False
    return status, True


HALF_HEAD = (UNFINISHED, b"X: %s\r\n" % (b"x" * 8000), b"x" * 8000)
HALF_BODY = (
    b"POST %s HTTP/1.1\r\nHost: x\r\n" % PATH.encode(),
    b"Content-Length: 260000\r\n\r\n",
    b" " * 250_000,
)
KINDS: dict[str, dict[str, tuple[bytes, ...]]] = {
    "half heads of 64 x 8 kB": {"metrics": (UNFINISHED, *[b"X: %s\r\n" % (b"x" * 8000)] * 63)},
    "half heads of 16 kB, and half bodies of 250 kB on another listener": {
        "metrics": HALF_HEAD,
        "admission": HALF_BODY,
    },
    "32 requests in one": {
        "metrics": ((UNFINISHED + b"X: %s\r\n" % (b"x" * 8000) + b"\r\n") * 32,) * 2
    },
}


@SIZES
@pytest.mark.parametrize("kind", KINDS)
async def test_what_is_not_a_whole_request_has_one_bound(
    exporter: Exporter, prove: Prove, kind: str, times: int
) -> None:
    """Unfinished requests of all listeners share one memory budget, and their memory is freed."""
    before = most = exporter.resident()
    crowds = asyncio.gather(
        *(
            exporter.crowd(getattr(exporter.program, listener), 495 * times, *sent)
            for listener, sent in KINDS[kind].items()
        )
    )
    while not crowds.done():
        await asyncio.wait([crowds], timeout=0.02)
        most = max(most, exporter.resident())
    assert await exporter.request("GET", exporter.program.metrics + "/livez") == 200
    await exporter.leave()

    with suppress(TimeoutError):
        await wait_until(lambda: exporter.resident() - before < SLACK, what="the memory", within=5)
    after = exporter.resident()
    prove(f"{495 * times} {kind}: {before:.0f} MiB before, {most:.0f} at most, {after:.0f} after")
    assert most - before < BUDGET / MIB + SLACK
    assert after - before < SLACK


@SIZES
@pytest.mark.parametrize("listener", ["metrics", "admission"])
@pytest.mark.parametrize("shakes_hands", [True, False], ids=["tls", "no-handshake"])
async def test_a_crowd_shuts_nobody_out(
    exporter: Exporter, prove: Prove, listener: str, times: int, shakes_hands: bool
) -> None:
    """Probes and reviews are answered although there are more idle connections than allowed."""
    await check_answers(exporter, prove, listener, times, shakes_hands=shakes_hands)


@SIZES
@pytest.mark.parametrize("shakes_hands", [True, False], ids=["tls", "no-handshake"])
async def test_a_crowd_without_client_certificates_shuts_nobody_out(
    simulated: SimulatedStage, tmp_path: Path, prove: Prove, times: int, shakes_hands: bool
) -> None:
    """Many connections without a client certificate do not shut out the API server."""
    authority = str(tmp_path / "ca.crt")
    async with running(simulated, tmp_path, clientCAFile=authority) as exporter:
        reader, writer = await exporter.open(exporter.program.admission)
        writer.write(REQUEST)
        answered = b""
        with suppress(OSError):
            answered = await asyncio.wait_for(reader.read(), PATIENCE)
        assert answered == b""
        await check_answers(exporter, prove, "admission", times, shakes_hands=shakes_hands)


async def check_answers(
    exporter: Exporter, prove: Prove, listener: str, times: int, *, shakes_hands: bool
) -> None:
    """Connect a crowd to a listener, and check that probes and reviews are answered."""
    url = getattr(exporter.program, listener)
    await exporter.crowd(url, 520 * times, tls=shakes_hands)
    answered = 0
    for _ in range(20):
        with suppress(aiohttp.ClientError):
            probe = "/livez" if answered % 2 else "/readyz"
            answered += (
                await exporter.request("GET", exporter.program.metrics + probe) == 200
                and await exporter.review() == 200
            )
    prove(f"{answered} of 20 probes and reviews answered, with {520 * times} idle connections")
    assert answered == 20


FOREIGN = "attacker.example"
PROXY = "exporter.example"
"""The host name of a proxy before the query listener, as in `listen.hosts`."""


async def test_no_web_page_is_answered(exporter: Exporter) -> None:
    """Requests by web pages of other sites or by DNS rebinding are refused; programs are served."""
    query, metrics = exporter.program.query, exporter.program.metrics
    port, verdicts = urlsplit(query).port, f"{query}/v1/verdicts"
    reviews = exporter.program.admission + PATH
    for host in (
        f"127.0.0.1:{port}",
        "localhost:8080",
        "x.localhost",
        "[::1]:9810",
        "127.1.2.3",
        f"{PROXY}:80",
    ):
        assert await exporter.request("GET", f"{query}/v1/status", headers={"Host": host}) == 200
    for host in (FOREIGN, f"{FOREIGN}:{port}", "localhost.example", ""):
        assert await exporter.request("GET", f"{query}/v1/status", headers={"Host": host}) == 403
    for headers in (
        {"Origin": f"https://{FOREIGN}"},
        {"Origin": "null"},
        {"Origin": "http://localhost:3000"},
        {"Sec-Fetch-Site": "cross-site"},
    ):
        asked = {"json": {"candidates": []}, "headers": headers}
        assert await exporter.request("POST", verdicts, **asked) == 403
        assert await exporter.request("GET", f"{metrics}/metrics", headers=headers) == 403
        assert await exporter.request("POST", reviews, data=REVIEW, headers=headers) == 403
    own = {"Origin": f"http://127.0.0.1:{port}", "Sec-Fetch-Site": "same-origin"}
    assert await exporter.request("POST", verdicts, json={"candidates": []}, headers=own) == 200
    headers = {"Host": FOREIGN}
    assert await exporter.request("GET", f"{metrics}/metrics", headers=headers) == 200
