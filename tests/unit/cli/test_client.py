"""The client of a running exporter, and its errors."""

import asyncio
import socket
import ssl
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web

from exporter.cli.client import Endpoint, connect, decode_answer, find_url
from exporter.credentials import CannotAsk, InvalidEndpoint
from exporter.server.api.schemas import StatusAnswer, VmiAnswer
from exporter.server.apps import make_metrics_app, make_query_app
from exporter.server.fields import Problem
from tests.cluster.ports import free_port
from tests.support.certificates import write_certificate
from tests.support.serving import serving
from tests.unit.server.api.test_handlers import ServedApi


TOKEN = Path("token")


def answering(
    status: int = 200,
    body: bytes = b"{}",
    media: str = "application/json",
    headers: Mapping[str, str] | None = None,
) -> web.Application:
    """A server that gives all requests the same answer, and keeps the requests in `ASKED`."""
    app = web.Application()

    async def answer(request: web.Request) -> web.Response:
        app[ASKED].append(request)
        return web.Response(status=status, body=body, content_type=media, headers=headers)

    app[ASKED] = []
    app.router.add_route("*", "/{any:.*}", answer)
    return app


ASKED = web.AppKey("ASKED", list[web.Request])


def refusing(status: int, title: str, detail: str) -> web.Application:
    """A server that answers all requests with a problem."""
    body = msgspec.json.encode(Problem(title=title, status=status, detail=detail))
    return answering(status, body, "application/problem+json")


async def read(endpoint: Endpoint, path: str = "/v1/status") -> bytes:
    """Read one answer."""
    async with connect(endpoint) as exporter:
        return await exporter.read(path)


async def trouble(endpoint: Endpoint) -> str:
    """The error of a request that fails."""
    with pytest.raises(CannotAsk) as told:
        await read(endpoint)
    return str(told.value)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"url": "localhost:9810"}, "expected http://HOST:PORT"),
        ({"url": "unix:query.sock"}, "expected http://HOST:PORT"),
        ({"url": "http://me:secret@here"}, "--token-file"),
        ({"url": "http://10.0.0.1:9810", "token_file": TOKEN}, "https, a unix socket or loopback"),
        ({"key_file": Path("key")}, "--cert-file"),
    ],
)
def test_invalid_options_are_refused(options: dict[str, Any], text: str) -> None:
    """The error for invalid options says what is expected, and has no password."""
    with pytest.raises(InvalidEndpoint) as refused:
        Endpoint(**options)

    assert text in str(refused.value)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("url", ["https://exporter.example:9810", "unix:/run/query.sock"])
def test_a_token_may_be_sent_over_tls_and_to_a_socket(url: str) -> None:
    """A token may be sent over TLS and to a unix socket."""
    assert Endpoint(url, token_file=TOKEN).url == url


@pytest.mark.parametrize("slash", ["", "/"], ids=["bare", "slash"])
async def test_asks_over_http(slash: str) -> None:
    """The client returns the API's answer, with or without a slash at the URL's end."""
    api = ServedApi()
    api.cool()
    async with serving(make_query_app(api.service)) as url:
        status = decode_answer(await read(Endpoint(url + slash)), StatusAnswer)
        async with connect(Endpoint(url + slash)) as exporter:
            vmi = decode_answer(await exporter.read_vmi("shop", "db1"), VmiAnswer)

    assert status.ready
    assert vmi.verdicts.pre_eviction.reason == "cooldown"


def test_finds_the_socket_of_its_own_pod(tmp_path: Path) -> None:
    """Without `--url` the client uses the environment's URL, the pod's socket, or loopback."""
    path = tmp_path / "local.sock"
    assert find_url({}, path) == "http://127.0.0.1:9810"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        assert find_url({}, path) == f"unix:{path}"
        assert find_url({"KUBEVIRT_EVICTION_EXPORTER_URL": "http://a"}, path) == "http://a"


@pytest.mark.parametrize("slashes", ["", "//"], ids=["one-slash", "three-slashes"])
async def test_asks_over_a_unix_socket(tmp_path: Path, slashes: str) -> None:
    """`unix:/path` and `unix:///path` are the same."""
    socket = tmp_path / "query.sock"
    async with serving(make_query_app(ServedApi().service), socket=socket):
        answered = await read(Endpoint(f"unix:{slashes}{socket}"))

    assert decode_answer(answered, StatusAnswer).ready


async def test_asks_over_tls_with_its_authority(tmp_path: Path) -> None:
    """Without `--ca-file` the server's CA is not trusted, and the error names the option."""
    write_certificate(tmp_path, "localhost")
    trust = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    trust.load_cert_chain(tmp_path / "localhost.crt", tmp_path / "localhost.key")
    async with serving(make_query_app(ServedApi().service), trust=trust) as url:
        answered = await read(Endpoint(url, ca_file=tmp_path / "ca.crt"))
        untrusted = await trouble(Endpoint(url))
        in_plain = await trouble(Endpoint(url.replace("https", "http")))

    assert decode_answer(answered, StatusAnswer).ready
    assert "is not trusted" in untrusted
    assert "--ca-file" in untrusted
    assert "is it https://?" in in_plain


async def test_proves_itself_by_a_certificate(tmp_path: Path) -> None:
    """With `clientCAFile` a client needs a certificate."""
    for name in ("localhost", "caller"):
        write_certificate(tmp_path, name)
        (tmp_path / "ca.crt").rename(tmp_path / f"{name}-ca.crt")
    trust = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=tmp_path / "caller-ca.crt")
    trust.verify_mode = ssl.CERT_REQUIRED
    trust.load_cert_chain(tmp_path / "localhost.crt", tmp_path / "localhost.key")
    async with serving(make_query_app(ServedApi().service), trust=trust) as url:
        nobody = Endpoint(url, ca_file=tmp_path / "localhost-ca.crt")
        cert, key = tmp_path / "caller.crt", tmp_path / "caller.key"
        answered = await read(replace(nobody, cert_file=cert, key_file=key))
        refused = await trouble(nobody)

    assert decode_answer(answered, StatusAnswer).ready
    assert "does it want a client certificate (--cert-file, --key-file)?" in refused


async def test_a_bad_pair_is_told(tmp_path: Path) -> None:
    """The error for an invalid certificate and key names the options."""
    write_certificate(tmp_path, "one")
    certificate = tmp_path / "one.crt"
    for key, text in ((None, "not PEM, not a matching pair"), (tmp_path / "none", "No such file")):
        told = await trouble(Endpoint("https://localhost:1", cert_file=certificate, key_file=key))

        assert f"--cert-file {certificate}, --key-file {key}: " in told
        assert text in told


async def test_https_to_a_plain_listener_is_explained() -> None:
    """If the URL has https:// but the listener has no TLS, the error suggests http://."""
    async with serving(answering()) as url:
        text = await trouble(Endpoint(url.replace("http", "https")))

    assert "does not speak TLS" in text
    assert "is it http://?" in text


async def test_sends_the_token_of_the_file(tmp_path: Path) -> None:
    """The token is read from the file for each request."""
    (tmp_path / "token").write_text("first\n")
    app = answering()
    async with (
        serving(app) as url,
        connect(Endpoint(url, token_file=tmp_path / "token")) as exporter,
    ):
        await exporter.read("/a")
        (tmp_path / "token").write_text("second")
        await exporter.read("/b")

    assert [request.headers["Authorization"] for request in app[ASKED]] == [
        "Bearer first",
        "Bearer second",
    ]


async def test_files_that_cannot_be_used_are_told(tmp_path: Path) -> None:
    """The error for an unusable file names its option."""
    missing = tmp_path / "missing"
    async with serving(answering()) as url:
        no_token = await trouble(Endpoint(url, token_file=missing))
    no_authority = await trouble(Endpoint("https://localhost:1", ca_file=missing))

    assert f"--token-file {missing} cannot be read: No such file" in no_token
    assert f"--ca-file {missing}: cannot be read: No such file" in no_authority


async def test_nobody_there_is_told(tmp_path: Path) -> None:
    """If nothing listens at the URL, the error names the URL and how to set another one."""
    port = free_port()
    for url in (f"http://127.0.0.1:{port}", f"unix:{tmp_path}/nothing.sock"):
        text = await trouble(Endpoint(url))

        assert f"{url} cannot be reached" in text
        assert "--url URL or KUBEVIRT_EVICTION_EXPORTER_URL" in text


NO_ANSWERS = {
    "no-token": (refusing(401, "Unauthenticated", "no token"), "--token-file FILE"),
    "no-role": (refusing(403, "Not allowed", "no"), "-exporter-caller"),
    "no-such-host": (refusing(403, "Unknown host", "Host: expected localhost"), "with --url"),
    "nobody-to-ask": (
        refusing(503, "API server unavailable", "the API server is away"),
        "the API server is away; try again",
    ),
    "fault": (refusing(500, "Internal error", "its log says why"), "its log"),
    "a-page": (answering(body=b"<html>", media="text/html"), "is no exporter"),
    "other-json": (answering(404, b"{}"), "is no exporter: it answered 404"),
    "bytes": (answering(500, b"\xff"), "is no exporter: it answered 500"),
    "redirect": (
        answering(302, headers={"Location": "http://elsewhere.example/"}),
        "is no exporter: it answered 302",
    ),
}


@pytest.mark.parametrize(("app", "text"), NO_ANSWERS.values(), ids=NO_ANSWERS)
async def test_an_unusable_answer_is_explained(app: web.Application, text: str) -> None:
    """The error for an unusable answer says what is wrong or what to do."""
    async with serving(app) as url:
        assert text in await trouble(Endpoint(url))


async def test_a_token_that_is_refused_is_told(tmp_path: Path) -> None:
    """The error for a rejected token says that the token may have expired."""
    (tmp_path / "token").write_text("old")
    async with serving(refusing(401, "Unauthenticated", "unknown token")) as url:
        text = await trouble(Endpoint(url, token_file=tmp_path / "token"))

    assert "may have expired" in text


async def test_an_exporter_that_is_not_ready_is_told() -> None:
    """Before the first sync the error says what the exporter waits for."""
    api = ServedApi()
    api.health.watched[0].synced = False
    async with serving(make_query_app(api.service)) as url, connect(Endpoint(url)) as exporter:
        with pytest.raises(CannotAsk, match="503 Not synced yet: waiting for virtualmachine"):
            await exporter.read("/v1/blocked")


async def test_the_metrics_listener_is_recognized() -> None:
    """If the URL is that of the metrics listener, the error says to use the query listener."""
    async with serving(make_metrics_app(ServedApi().service)) as url:
        assert "Use the query listener" in await trouble(Endpoint(url))


async def test_a_name_is_no_path() -> None:
    """Names are percent-encoded in the URL."""
    app = answering()
    async with serving(app) as url, connect(Endpoint(url)) as exporter:
        await exporter.read_vmi("a/../b", "c?d#e%2F")

    assert app[ASKED][0].raw_path == "/v1/vmis/a%2F..%2Fb/c%3Fd%23e%252F"


async def test_a_server_without_http_is_named() -> None:
    """The error for a server that does not speak HTTP says that the server is no exporter."""

    async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"SSH-2.0-OpenSSH_9.2\r\n\r\n")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(greet, "127.0.0.1", 0) as other:
        url = f"http://127.0.0.1:{other.sockets[0].getsockname()[1]}"
        assert f"{url} is no exporter: " in await trouble(Endpoint(url))


async def test_no_answer_is_an_error_after_the_timeout() -> None:
    """If a server does not answer, the request fails after the timeout."""

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async with await asyncio.start_server(listen, "127.0.0.1", 0) as silent:
        url = f"http://127.0.0.1:{silent.sockets[0].getsockname()[1]}"
        async with connect(Endpoint(url), max_wait=0.2) as exporter:
            with pytest.raises(CannotAsk, match=r"did not answer within 0.2 s"):
                await exporter.read("/v1/status")


@pytest.mark.parametrize("body", [b"{}", b"[", b"\xff"], ids=["fields", "json", "bytes"])
def test_what_is_not_understood_is_told(body: bytes) -> None:
    """The error for an answer that cannot be decoded suggests another version of the exporter."""
    with pytest.raises(CannotAsk, match="another version"):
        decode_answer(body, StatusAnswer)
