"""Logins: the service account of a pod, and the exporter's own namespace."""

from datetime import timedelta
from pathlib import Path

import pytest
from kubernetes_asyncio.config import incluster_config, kube_config
from structlog.testing import capture_logs

from exporter.kube import login
from exporter.kube.login import Login, NoCredentials, find_namespace, log_in
from tests.cluster.users import User, kubeconfig, open_kubeconfig


@pytest.fixture
def token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of a service account's token, as in a pod; every request reads it again."""
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "1")
    monkeypatch.setattr(incluster_config, "TOKEN_REFRESH_PERIOD", timedelta(0))
    authority, file = tmp_path / "ca.crt", tmp_path / "token"
    authority.write_text("a certificate")
    file.write_text("first\n")
    monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", str(authority))
    monkeypatch.setattr(incluster_config, "SERVICE_TOKEN_FILENAME", str(file))
    return file


def _write(file: Path, content: bytes | None) -> None:
    """Write a file; None deletes it."""
    if content is None:
        file.unlink()
    else:
        file.write_bytes(content)


@pytest.mark.parametrize("written", [b"", b"\n", b"se\0cond", b"\xff", None])
async def test_a_new_token_that_cannot_be_used(token: Path, written: bytes | None) -> None:
    """The old token stays in use, one line is logged, and the file is read again."""
    configuration = await log_in(Login())

    async def header() -> str:
        return str((await configuration.auth_settings())["BearerToken"]["value"])

    with capture_logs() as logs:
        assert await header() == "Bearer first"
        _write(token, written)
        assert [await header() for _ in range(3)] == ["Bearer first"] * 3
        _write(token, b"second\n")
        assert await header() == "Bearer second"
    assert [log["event"] for log in logs] == ["token_not_renewed"]


async def test_a_first_token_that_cannot_be_used(
    token: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error says what is wrong with the token."""
    monkeypatch.setattr(kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", f"{token}-none")
    _write(token, b"\n")
    with pytest.raises(NoCredentials, match="the token is empty"):
        await log_in(Login())


@pytest.mark.parametrize("first", ["", "~no-such-user/config", "/no/such/file"])
async def test_a_list_of_kubeconfigs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    """An element of KUBECONFIG that names no file is ignored."""
    file = open_kubeconfig(tmp_path / "config", "http://127.0.0.1:1")
    monkeypatch.setattr(kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", f"{first}:{file}")

    assert (await log_in(Login())).host == "http://127.0.0.1:1"


def test_a_pod_s_namespace_is_that_of_its_service_account(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a pod the namespace is that of the mounted service account."""
    mounted = tmp_path / "namespace"
    mounted.write_text("virt-evictions")
    monkeypatch.setattr(login, "_POD_NAMESPACE", mounted)

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
