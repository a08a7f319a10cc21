"""The API client: certificates, and the number of connections."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import yaml
from aiohttp import web

from exporter.engine.facts.model import Resource
from exporter.kube import client, plugin
from exporter.kube.client import ApiServer, Unconnected, Unreachable
from exporter.kube.kubeconfig import NoCredentials
from exporter.kube.login import Login
from tests.cluster import PATIENCE
from tests.cluster.users import open_kubeconfig
from tests.support.serving import serving


def _write_ca(file: Path, data: str | None) -> None:
    """Write a kubeconfig with this CA, or without one."""
    document = yaml.safe_load(file.read_text())
    cluster = document["clusters"][0]["cluster"]
    cluster.pop("certificate-authority-data", None)
    if data is not None:
        cluster["certificate-authority-data"] = data
    file.write_text(yaml.safe_dump(document))


NO_PEM = "aGFsZiBhIGNlcnRpZmljYXRl"
BROKEN = pytest.mark.parametrize("data", [NO_PEM, "%"], ids=["no-pem", "no-base64"])


@BROKEN
async def test_a_broken_ca_is_no_credential(tmp_path: Path, data: str) -> None:
    """An invalid CA raises an error that names the kubeconfig."""
    file = open_kubeconfig(tmp_path / "kubeconfig", "https://127.0.0.1:1")
    _write_ca(file, data)
    with pytest.raises(NoCredentials, match=str(file)):
        async with ApiServer(Login(kubeconfig=file), read_timeout=1.0) as api:
            await api.log_in()


@BROKEN
async def test_a_ca_that_is_being_replaced_is_read_again(tmp_path: Path, data: str) -> None:
    """After a login, an invalid CA is a temporary error."""
    file = open_kubeconfig(tmp_path / "kubeconfig", "https://127.0.0.1:1")
    async with ApiServer(Login(kubeconfig=file), read_timeout=1.0) as api:
        await api.log_in()
        _write_ca(file, data)
        await api.renew()
        with pytest.raises(Unreachable, match=str(file)):
            await api.read(Resource.LEASES, "shop", "lease")
        _write_ca(file, None)
        with pytest.raises(Unconnected):
            await api.read(Resource.LEASES, "shop", "lease")


async def test_each_watch_has_a_connection() -> None:
    """Connections are not limited; with 110 watches open, another request still succeeds."""
    over = asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        if "watch" in request.query:
            await over.wait()
        return response

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    async with (
        serving(app) as url,
        ApiServer(Login(url=url), read_timeout=5.0) as api,
        AsyncExitStack() as stack,
    ):
        async with asyncio.timeout(PATIENCE):
            for _ in range(110):
                watch = api.watch(Resource.VMIS, "shop", resource_version="1", seconds=60)
                await stack.enter_async_context(watch)
            assert await api.read(Resource.LEASES, "shop", "lease") == b""
        over.set()


async def test_other_tasks_run_while_a_list_streams() -> None:
    """Other tasks run after each batch of a watch, even if the next batch is already here."""
    line, turns = b'{"type": "ADDED"}\n', 0
    seen: list[int] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(line * (2 * client.LARGEST_CHUNK // len(line)))
        return response

    async def turn() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    async with serving(app) as url, ApiServer(Login(url=url), read_timeout=5.0) as api:
        other = asyncio.create_task(turn())
        async with api.watch(Resource.VMIS, "shop", resource_version="1", seconds=60) as batches:
            async for lines in batches:
                assert len(lines) <= client.LARGEST_BATCH
                seen.append(turns)
        other.cancel()
    assert len(seen) >= 2 * client.LARGEST_CHUNK // len(line) // client.LARGEST_BATCH
    assert len(set(seen)) == len(seen), "two batches were read in the same turn"


async def test_an_error_without_end() -> None:
    """Of an error's body, only the first bytes are read; the status is known without it."""
    sent = 0

    async def answer(request: web.Request) -> web.StreamResponse:
        nonlocal sent
        response = web.StreamResponse(status=500, reason="Broken")
        await response.prepare(request)
        while True:
            await response.write(bytes(client.LONGEST_ERROR))
            sent += client.LONGEST_ERROR

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    async with serving(app) as url, ApiServer(Login(url=url), read_timeout=5.0) as api:
        with pytest.raises(Unreachable, match="500 Broken"):
            await api.read(Resource.LEASES, "shop", "lease")
    assert sent < 2**26, "what fits into buffers"


@pytest.mark.timeout(20)
@pytest.mark.parametrize("steps", range(10))
async def test_a_session_that_ends_as_its_login_ends(steps: int) -> None:
    """A session may be dropped in the same step of the event loop in which its login ended.

    The request that waited for this login then begins another one.
    """

    async def read(steps: int, *, renew: bool) -> None:
        for _ in range(steps):
            await asyncio.sleep(0)
        if renew:
            await api.renew()
        with pytest.raises(Unconnected):
            await api.read(Resource.LEASES, "shop", "lease")

    async with ApiServer(Login(url="http://127.0.0.1:1"), read_timeout=1.0) as api:
        await asyncio.gather(
            *(read(other, renew=renew) for other in range(steps + 1) for renew in (False, True))
        )


async def test_requests_wait_for_the_same_login(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests that begin during a login share it; a request that gives up does not end it."""
    monkeypatch.setattr(plugin, "LOGIN_TIMEOUT", 1.0)
    calls = tmp_path / "calls"
    file = open_kubeconfig(tmp_path / "kubeconfig", "https://127.0.0.1:1")
    document = yaml.safe_load(file.read_text())
    document["users"][0]["user"] = {
        "exec": {
            "apiVersion": "client.authentication.k8s.io/v1",
            "command": "sh",
            "interactiveMode": "Never",
            "args": ["-c", f"echo called >> {calls}; sleep 60"],
        }
    }
    file.write_text(yaml.safe_dump(document))

    async def read(patience: float) -> None:
        async with asyncio.timeout(patience):
            await api.read(Resource.LEASES, "shop", "lease")

    async with ApiServer(Login(kubeconfig=file), read_timeout=1.0) as api:
        requests = (read(patience) for patience in (0.1, PATIENCE, PATIENCE))
        first, *others = await asyncio.gather(*requests, return_exceptions=True)
    assert isinstance(first, TimeoutError)
    assert [type(other) for other in others] == [Unconnected, Unconnected]
    assert calls.read_text() == "called\n"
