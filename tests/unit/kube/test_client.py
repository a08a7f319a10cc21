"""The API client: the exporter's own namespace, certificates, and the number of connections."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import yaml
from aiohttp import web

from exporter.engine.facts.model import Resource
from exporter.kube import client
from exporter.kube.client import (
    ApiServer,
    Login,
    NoCredentials,
    Unconnected,
    Unreachable,
    find_namespace,
)
from tests.cluster import PATIENCE
from tests.cluster.users import User, kubeconfig, open_kubeconfig
from tests.support.serving import serving


def test_a_pod_s_namespace_is_that_of_its_service_account(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a pod the namespace is that of the mounted service account."""
    mounted = tmp_path / "namespace"
    mounted.write_text("virt-evictions")
    monkeypatch.setattr(client, "_POD_NAMESPACE", mounted)

    assert find_namespace(Login()) == "virt-evictions"


def test_else_it_is_that_of_the_kubeconfig_s_context(tmp_path: Path) -> None:
    """Outside a pod the namespace is that of the kubeconfig's context, else "default"."""
    authority = tmp_path / "ca.crt"
    authority.write_text("")
    name = "system:serviceaccount:virt-evictions:exporter"
    file = kubeconfig(tmp_path / "kubeconfig", "https://127.0.0.1:1", User(name, authority))

    assert find_namespace(Login(kubeconfig=file)) == "virt-evictions"
    file.write_text(file.read_text().replace("    namespace: virt-evictions\n", ""))
    assert find_namespace(Login(kubeconfig=file)) == "default"


def test_a_server_without_credentials_has_the_default_one() -> None:
    """For a server without credentials the namespace is "default"."""
    assert find_namespace(Login(url="http://127.0.0.1:1")) == "default"


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
        async with ApiServer(Login(kubeconfig=file), read_timeout=1.0):
            pass


@BROKEN
async def test_a_ca_that_is_being_replaced_is_read_again(tmp_path: Path, data: str) -> None:
    """After a login, an invalid CA is a temporary error."""
    file = open_kubeconfig(tmp_path / "kubeconfig", "https://127.0.0.1:1")
    async with ApiServer(Login(kubeconfig=file), read_timeout=1.0) as api:
        _write_ca(file, data)
        await api.renew()
        with pytest.raises(Unreachable, match=str(file)):
            await api.read(Resource.CONFIGMAPS, "shop", "history")
        _write_ca(file, None)
        with pytest.raises(Unconnected):
            await api.read(Resource.CONFIGMAPS, "shop", "history")


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
            assert await api.read(Resource.CONFIGMAPS, "shop", "history") == b""
        over.set()
