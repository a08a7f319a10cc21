"""TLS of a listener: renewal, client certificates, sessions and expiry."""

import asyncio
import shutil
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from aiohttp import web

from exporter.counters import Counters
from exporter.server.http.certificates import CannotListen, Certificates
from exporter.settings import MinVersion, Tls, TlsVersions
from tests.cluster import PATIENCE
from tests.program import test_protocol
from tests.support.certificates import lock_key, write_certificate


REQUEST = b"GET / HTTP/1.0\r\n\r\n"


def a_pair(directory: Path, name: str = "localhost") -> Path:
    """Write a key pair for a name, signed by the directory's CA."""
    directory.mkdir(exist_ok=True)
    write_certificate(directory, name)
    return directory


def tls_of(directory: Path, *, callers: Path | None = None, name: str = "localhost") -> Tls:
    """The TLS settings for a directory's key pair."""
    return Tls(directory / f"{name}.crt", directory / f"{name}.key", callers)


async def answer_ok(_: web.BaseRequest) -> web.Response:
    """Answer ok."""
    return web.Response(text="ok")


@asynccontextmanager
async def serving(certificates: Certificates) -> AsyncIterator[int]:
    """Run a server that answers ok; yields its port."""
    async with test_protocol.serving(Counters(), answer_ok, certificates) as (_, port):
        yield port


def trusting(directory: Path, client: Path | None = None) -> ssl.SSLContext:
    """A TLS context that trusts a directory's CA, with a client certificate if given."""
    context = ssl.create_default_context(cafile=directory / "ca.crt")
    context.check_hostname = False
    if client is not None:
        context.load_cert_chain(client / "client.crt", client / "client.key")
    return context


async def ask(port: int, context: ssl.SSLContext) -> bytes:
    """The server's answer. Raises ssl.SSLError or OSError if the handshake fails."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    try:
        writer.write(REQUEST)
        return (await reader.read()).rpartition(b"\r\n")[2]
    finally:
        writer.close()


def resume(
    port: int, context: ssl.SSLContext, session: ssl.SSLSession | None
) -> tuple[bytes, ssl.SSLSession | None]:
    """Ask in a TLS session; returns the answer and the session for the next connection."""
    with (
        socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as plain,
        context.wrap_socket(plain, session=session) as secured,
    ):
        secured.sendall(REQUEST)
        with secured.makefile("rb") as answer:
            body = answer.read().rpartition(b"\r\n")[2]
        return body, secured.session


async def try_to_ask(port: int, context: ssl.SSLContext) -> bytes:
    """The answer, or "" if the handshake fails; with TLS 1.3 the client notices this only later."""
    try:
        return await ask(port, context)
    except (ssl.SSLError, OSError):
        return b""


async def test_old_versions_and_other_suites_are_refused(tmp_path: Path) -> None:
    """A client needs TLS of at least `tls.minVersion`, and for TLS 1.2 one of the suites.

    The default suites have authenticated encryption, so the third client is never accepted.
    """
    files = a_pair(tmp_path / "a")
    old, other, weak = (trusting(files) for _ in range(3))
    for context, suite in (
        (old, "ECDHE-ECDSA-AES256-GCM-SHA384"),
        (other, "CHACHA20"),
        (weak, "ECDHE-ECDSA-AES256-SHA384"),
    ):
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        context.set_ciphers(suite)
    suites = TlsVersions(cipher_suites=("ECDHE-ECDSA-AES256-GCM-SHA384",))
    for versions, accepted in (
        (TlsVersions(), {old, other}),
        (suites, {old}),
        (TlsVersions(MinVersion.TLS_1_3), set()),
    ):
        certificates = Certificates("query", replace(tls_of(files), versions=versions))
        async with serving(certificates) as port:
            for context in (old, other, weak):
                answer = await try_to_ask(port, context)
                assert answer == (b"ok" if context in accepted else b""), versions
            assert await ask(port, trusting(files)) == b"ok"


async def test_renewed_in_place(tmp_path: Path) -> None:
    """After a renewal the next handshake on the same socket uses the new key pair."""
    files, other = a_pair(tmp_path / "a"), a_pair(tmp_path / "b")
    certificates = Certificates("query", tls_of(files))
    async with serving(certificates) as port:
        assert await ask(port, trusting(files)) == b"ok"
        assert not certificates.renew()
        for name in ("localhost.crt", "localhost.key"):
            shutil.copy(other / name, files / name)
        assert certificates.renew()
        assert await ask(port, trusting(other)) == b"ok"
        with pytest.raises(ssl.SSLError):
            await ask(port, trusting(files))


async def test_a_bad_renewal_changes_nothing(tmp_path: Path) -> None:
    """After an invalid renewal the old key pair stays in use; the error names the file."""
    files = a_pair(tmp_path / "a")
    certificates = Certificates("query", tls_of(files))
    async with serving(certificates) as port:
        (files / "localhost.crt").write_text("garbage")
        with pytest.raises(CannotListen, match=r"tls.query: .*localhost.crt"):
            certificates.renew()
        (files / "localhost.crt").unlink()
        with pytest.raises(CannotListen, match="No such file"):
            certificates.renew()
        assert await ask(port, trusting(files)) == b"ok"


async def test_callers_show_a_certificate(tmp_path: Path) -> None:
    """With a client CA, callers without a certificate that it signed are refused."""
    files, callers = a_pair(tmp_path / "a"), a_pair(tmp_path / "c", "client")
    stranger = a_pair(tmp_path / "d", "client")
    certificates = Certificates("query", tls_of(files, callers=callers / "ca.crt"))
    async with serving(certificates) as port:
        assert await ask(port, trusting(files, callers)) == b"ok"
        for wrong in (None, stranger):
            assert await try_to_ask(port, trusting(files, wrong)) == b""
        shutil.copy(stranger / "ca.crt", callers / "ca.crt")
        assert certificates.renew()
        assert await ask(port, trusting(files, stranger)) == b"ok"


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_a_session_ends_with_the_authority(tmp_path: Path, version: ssl.TLSVersion) -> None:
    """A renewed client CA ends TLS sessions, because OpenSSL does not verify resumed ones again."""
    files, callers = a_pair(tmp_path / "a"), a_pair(tmp_path / "c", "client")
    stranger = a_pair(tmp_path / "d", "client")
    certificates = Certificates("query", tls_of(files, callers=callers / "ca.crt"))
    context = trusting(files, callers)
    context.maximum_version = version
    async with serving(certificates) as port:
        body, session = await asyncio.to_thread(resume, port, context, None)
        assert (body, session is None) == (b"ok", False)
        shutil.copy(stranger / "ca.crt", callers / "ca.crt")
        assert certificates.renew()
        try:
            body, _ = await asyncio.to_thread(resume, port, context, session)
        except OSError:
            body = b""
        assert body == b""


async def test_an_encrypted_key_is_no_key(tmp_path: Path) -> None:
    """An encrypted key is an error; OpenSSL does not ask for its password on the terminal."""
    files = a_pair(tmp_path)
    key = files / "locked.key"
    lock_key(files / "localhost.key", key, "secret")
    load = f"Certificates('query', Tls(Path('{files}/localhost.crt'), Path('{key}')))"
    code = (
        "from pathlib import Path; from exporter.settings import Tls\n"
        f"from exporter.server.http.certificates import Certificates; {load}"
    )
    begun = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, stdin=subprocess.PIPE, stderr=subprocess.PIPE
    )
    async with asyncio.timeout(PATIENCE):
        assert begun.stderr is not None
        errors = await begun.stderr.read()
        await begun.wait()
    assert b"CannotListen: tls.query:" in errors
    assert b"pass phrase" not in errors


@pytest.mark.parametrize("missing", ["localhost.crt", "localhost.key", "ca.crt"])
def test_files_that_make_no_tls(tmp_path: Path, missing: str) -> None:
    """At the start an invalid key pair or CA is an error that names the listener and the files."""
    files = a_pair(tmp_path / "a")
    (files / missing).write_text("garbage")
    with pytest.raises(CannotListen, match=r"tls.metrics: .*localhost.key"):
        Certificates("metrics", tls_of(files, callers=files / "ca.crt"))


@pytest.mark.parametrize("days", [5, -1])
def test_says_when_it_ends(tmp_path: Path, days: int) -> None:
    """The reported expiry is exact, also for an expired certificate or with a client CA."""
    write_certificate(tmp_path, "localhost", days=days)
    alone = Certificates("query", tls_of(tmp_path))
    with_callers = Certificates("query", tls_of(tmp_path, callers=tmp_path / "ca.crt"))

    assert alone.not_after == pytest.approx(time.time() + days * 86_400, abs=60)
    assert with_callers.not_after == alone.not_after


def test_a_renewed_one_ends_later(tmp_path: Path) -> None:
    """After a renewal the reported expiry is that of the new certificate."""
    write_certificate(tmp_path, "localhost", days=5)
    certificates = Certificates("query", tls_of(tmp_path))
    assert certificates.not_after is not None
    before = certificates.not_after
    write_certificate(tmp_path, "localhost", days=50)

    assert certificates.renew()
    assert certificates.not_after == pytest.approx(before + 45 * 86_400, abs=60)
