"""Listeners: ports, sockets with their mode, TLS renewal, idle connections."""

import asyncio
import json
import shutil
import socket
import ssl
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from structlog.testing import capture_logs

from exporter.counters import Counters
from exporter.health import Health
from exporter.server.http import listeners
from exporter.server.http.budget import ConnectionBudget
from exporter.server.http.certificates import CannotListen
from exporter.server.http.listeners import Listener
from exporter.settings import AuthSettings, Limits, Tls
from exporter.settings.values import parse_address
from tests.cluster import PATIENCE, poll
from tests.program.test_protocol import serving
from tests.program.waiting import wait_until
from tests.support.certificates import write_certificate


REQUEST = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
OTHER = "127.0.0.2"


def a_listener(*addresses: str, **overrides: Any) -> Listener:
    """A listener with one endpoint that answers ok."""

    async def answer_ok(_: web.Request) -> web.Response:
        return web.Response(text="ok")

    app = web.Application()
    app.router.add_get("/", answer_ok)
    fields: dict[str, Any] = {
        "name": "query",
        "app": app,
        "addresses": tuple(parse_address(address) for address in addresses),
        "tls": Tls(),
        "auth": AuthSettings(),
        "limits": Limits(),
        "budget": ConnectionBudget(Counters()),
        "health": Health(180.0, 600.0),
    } | overrides
    return Listener(**fields)


def a_pair(directory: Path) -> Tls:
    """Write a key pair for localhost."""
    directory.mkdir(exist_ok=True)
    write_certificate(directory, "localhost")
    return Tls(directory / "localhost.crt", directory / "localhost.key")


async def ask(url: str, authority: Path | None = None) -> str:
    """The answer at a URL."""
    connector: aiohttp.BaseConnector
    if url.startswith("unix:"):
        connector, url = aiohttp.UnixConnector(url.removeprefix("unix:")), "http://localhost"
    elif authority is not None:
        connector = aiohttp.TCPConnector(ssl=ssl.create_default_context(cafile=authority))
    else:
        connector = aiohttp.TCPConnector()
    async with aiohttp.ClientSession(connector=connector) as session, session.get(url) as response:
        return await response.text()


@asynccontextmanager
async def connected(
    url: str, peer: str = "127.0.0.1"
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A raw connection to a port, from this address."""
    host, _, port = url.rpartition("//")[2].rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port), local_addr=(peer, 0))
    try:
        yield reader, writer
    finally:
        writer.close()


async def test_every_address_is_served(tmp_path: Path) -> None:
    """All TCP and unix addresses are served until the listener ends; port 0 means any free port."""
    path = tmp_path / "q.sock"
    async with a_listener("127.0.0.1:0", f"unix:{path}", "localhost:0").served() as urls:
        assert urls[1] == f"unix:{path}"
        assert [await ask(url) for url in urls] == ["ok"] * 3
    assert not path.exists()
    with pytest.raises(aiohttp.ClientError):
        await ask(urls[0])


@pytest.mark.parametrize("mode", [0o600, 0o660])
async def test_the_mode_of_a_socket(tmp_path: Path, mode: int) -> None:
    """A unix socket gets the configured mode, independent of the umask."""
    path = tmp_path / "q.sock"
    auth = AuthSettings(socket_mode=mode)
    async with a_listener(f"unix:{path}", auth=auth).served():
        assert stat.S_IMODE(path.stat().st_mode) == mode


@pytest.mark.parametrize(
    ("address", "why"),
    [
        pytest.param("foo..bar:9810", r"foo\.\.bar:9810: ", id="no-name"),
        pytest.param(f"{'x' * 64}:9810", f"{'x' * 64}:9810: ", id="too-long-a-name"),
        pytest.param("192.0.2.1:9810", r"192\.0\.2\.1:9810: Cannot assign", id="not-ours"),
        pytest.param("unix:/no/q.sock", r"unix:/no/q\.sock: No such file", id="no-directory"),
    ],
)
async def test_where_it_cannot_listen(address: str, why: str) -> None:
    """An invalid host, a foreign address or a missing directory is an error with the address."""
    with pytest.raises(CannotListen, match=why):
        async with a_listener(address).served():
            pass


async def test_a_socket_that_was_left_behind(tmp_path: Path) -> None:
    """The socket file of a killed process is replaced; a socket in use or a plain file is not."""
    path = tmp_path / "q.sock"
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(path))
    left.close()
    async with a_listener(f"unix:{path}").served() as urls:
        assert await ask(urls[0]) == "ok"
        with pytest.raises(CannotListen, match="another process listens there"):
            async with a_listener(f"unix:{path}").served():
                pass
        assert await ask(urls[0]) == "ok"
    path.write_text("precious")
    with pytest.raises(CannotListen):
        async with a_listener(f"unix:{path}").served():
            pass
    assert path.read_text() == "precious"


async def test_a_caller_that_does_not_read_its_answer() -> None:
    """A client that does not read its answer is disconnected."""

    async def answer(_: web.BaseRequest) -> web.Response:
        answered.set()
        return web.Response(body=bytes(2**26))

    answered = asyncio.Event()
    async with serving(Counters(), answer, request_timeout=0.5) as (connections, port):
        with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as caller:
            caller.sendall(REQUEST)
            async with asyncio.timeout(PATIENCE):
                await answered.wait()

            await wait_until(
                lambda: not connections.http.connections, what="an end of the connection"
            )


async def test_a_port_that_is_taken() -> None:
    """The error for a port in use names the address and the setting."""
    async with a_listener("127.0.0.1:0").served() as urls:
        address = urls[0].removeprefix("http://")
        with pytest.raises(CannotListen, match=f"^listen.metrics: {address} is in use: .*--listen"):
            async with a_listener(address, name="metrics").served():
                pass


async def test_tls_on_ports_and_not_on_sockets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ports have TLS and sockets do not; a renewed certificate is used, and an error is logged
    once.
    """
    monkeypatch.setattr(listeners, "CERTIFICATES_READ_EVERY", 0.05)
    tls, other = a_pair(tmp_path / "a"), a_pair(tmp_path / "b")
    assert tls.cert_file is not None
    assert tls.key_file is not None
    authorities = [tmp_path / "a" / "ca.crt", tmp_path / "b" / "ca.crt"]
    with capture_logs() as logs:
        async with a_listener("localhost:0", f"unix:{tmp_path / 's'}", tls=tls).served() as urls:
            assert urls[0].startswith("https://localhost:")
            assert await ask(urls[0], authorities[0]) == "ok"
            assert await ask(urls[1]) == "ok"
            tls.cert_file.write_text("garbage")
            await wait_until(
                lambda: logged(logs, "certificate_not_renewed"), what="the error in the log"
            )
            assert await ask(urls[0], authorities[0]) == "ok"
            shutil.copy(str(other.cert_file), tls.cert_file)
            shutil.copy(str(other.key_file), tls.key_file)
            await wait_until(
                lambda: logged(logs, "certificate_renewed"), what="the renewal in the log"
            )
            assert await ask(urls[0], authorities[1]) == "ok"
    events = [log["event"] for log in logs]
    assert events.count("certificate_renewed") == 1
    assert events.count("certificate_not_renewed") <= 2, "once per error, not per attempt"


BAD_LIST = "-----BEGIN X509 CRL-----\nMAA=\n-----END X509 CRL-----\n"
"""A block of a PEM file that only OpenSSL's `load_verify_locations` reads, and refuses."""


async def test_a_block_that_no_client_can_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pair with an invalid CRL in its file is served, and later pairs are too."""
    monkeypatch.setattr(listeners, "CERTIFICATES_READ_EVERY", 0.05)
    tls, odd, good = (a_pair(tmp_path / name) for name in ("first", "odd", "good"))
    assert odd.cert_file is not None
    with odd.cert_file.open("a") as file:
        file.write(BAD_LIST)
    health = Health(180.0, 600.0)
    async with a_listener("localhost:0", tls=tls, health=health).served() as urls:
        assert set(health.certificates) == {"query"}
        for pair, known in ((odd, set()), (good, {"query"})):
            shutil.copy(str(pair.cert_file), str(tls.cert_file))
            shutil.copy(str(pair.key_file), str(tls.key_file))
            authority = str(pair.cert_file).replace("localhost", "ca")
            await poll(partial(answers_ok, urls[0], Path(authority)), what="the new pair")
            assert set(health.certificates) == known


async def answers_ok(url: str, authority: Path) -> bool:
    """Whether the listener answers with a certificate of this CA."""
    try:
        return await ask(url, authority) == "ok"
    except aiohttp.ClientError:
        return False


def logged(logs: list[Any], event: str) -> bool:
    """Whether this event was logged."""
    return any(log["event"] == event for log in logs)


async def test_idle_connections_are_closed() -> None:
    """Connections without a complete request are closed after the idle timeout."""
    limits = Limits(idle_timeout=1.0)
    async with a_listener("127.0.0.1:0", limits=limits).served() as urls:
        for sent in (b"", b"GET / HTTP/1.1\r\nHost:", REQUEST):
            async with connected(urls[0]) as (reader, writer):
                writer.write(sent)
                answer = await asyncio.wait_for(reader.read(), PATIENCE)
            assert answer.endswith(b"ok") is sent.endswith(b"\r\n\r\n")


async def test_no_more_connections_than_allowed() -> None:
    """Beyond the limit, the peer with the most connections loses the one that is idle longest."""
    counters = Counters()
    limits = Limits(connections=3)
    async with a_listener(
        "127.0.0.1:0", limits=limits, budget=ConnectionBudget(counters)
    ).served() as urls:
        url = urls[0]
        async with (
            connected(url) as first,
            connected(url) as second,
            connected(url, OTHER) as third,
        ):
            first[1].write(REQUEST)
            await asyncio.wait_for(first[0].readuntil(b"ok"), PATIENCE)
            async with connected(url) as (reader, writer):
                assert await asyncio.wait_for(second[0].read(), PATIENCE) == b""
                assert counters.rejected_connections == {"query": 1}
                for source, sink in ((reader, writer), first, third):
                    sink.write(REQUEST)
                    await asyncio.wait_for(source.readuntil(b"ok"), PATIENCE)


@pytest.mark.parametrize(
    "sent",
    [
        b"nonsense\r\n\r\n",
        b"GET / HTTP/1.1\r\nX: " + b"x" * 9000 + b"\r\n\r\n",
        b"GET /" + b"x" * 9000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 200 + b"\r\n",
        b"GET / HTTP/1.1\r\nX: " + b"x" * 20_000 + b"\r\n\r\n",
    ],
    ids=["no-http", "a-long-header", "a-long-path", "many-headers", "a-header-beyond-the-head"],
)
async def test_what_is_no_http(sent: bytes) -> None:
    """A request that is not valid HTTP gets a problem+json, and its connection is closed."""
    async with a_listener("127.0.0.1:0").served() as urls, connected(urls[0]) as (reader, writer):
        writer.write(sent)
        answer = await asyncio.wait_for(reader.read(), PATIENCE)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b" 400 " in head.splitlines()[0]
    assert b"application/problem+json" in head
    assert b'"status":400' in body
    assert b"Traceback" not in body
    problem = json.loads(body)
    assert problem["detail"] != problem["title"], "it says what is wrong"
    assert not problem["detail"].endswith(":")
    assert b"\r\nServer: kubevirt-eviction-exporter\r\n" in head


HALF_A_BODY = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 100000000\r\n\r\n"


async def test_an_early_answer_reads_no_further(tmp_path: Path) -> None:
    """An early answer reaches the client, and the exporter does not read the rest of the body."""
    tls = a_pair(tmp_path)
    trust = ssl.create_default_context(cafile=tmp_path / "ca.crt")
    async with a_listener("localhost:0", tls=tls).served() as urls:
        port = int(urls[0].rpartition(":")[2])
        reader, writer = await asyncio.open_connection("localhost", port, ssl=trust)
        sent = 0

        async def send() -> None:
            nonlocal sent
            while sent < 10**8:
                writer.write(bytes(10**5))
                await writer.drain()
                sent += 10**5

        writer.write(HALF_A_BODY)
        sending = asyncio.create_task(send())
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), PATIENCE)
        with suppress(ConnectionError):
            await asyncio.wait_for(sending, PATIENCE)
        writer.transport.abort()
    assert b" 405 " in head.splitlines()[0]
    assert b"\r\nConnection: close\r\n" in head
    assert sent < 3 * 10**7


@pytest.mark.parametrize(("size", "answer"), [(15_000, b" 200 "), (17_000, b" 431 ")])
@pytest.mark.parametrize("pipelined", [b"", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"])
async def test_heads_are_bounded_in_all(size: int, answer: bytes, pipelined: bytes) -> None:
    """The first line and the headers together have a limit."""
    headers = b"X: %s\r\n" % (b"x" * (size // 3)) * 3
    sent = pipelined + b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n" + headers + b"\r\n"
    async with a_listener("127.0.0.1:0").served() as urls, connected(urls[0]) as (reader, writer):
        writer.write(sent)
        answered = await asyncio.wait_for(reader.read(), PATIENCE)
    assert answer in answered.replace(b"HTTP/1.0", b"HTTP/1.1").rpartition(b"HTTP/1.1")[2]


async def test_no_version_is_told() -> None:
    """The header `Server` has no version."""
    async with (
        a_listener("127.0.0.1:0").served() as urls,
        aiohttp.ClientSession() as session,
        session.get(urls[0]) as answer,
    ):
        assert answer.headers["Server"] == "kubevirt-eviction-exporter"
