"""Logins: the service account of a pod, and the exporter's own namespace."""

from pathlib import Path

import pytest
from structlog.testing import capture_logs

from exporter.kube import login
from exporter.kube.kubeconfig import NoCredentials
from exporter.kube.login import Login, find_namespace, log_in
from tests.cluster.users import User, kubeconfig


@pytest.fixture
def token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of a service account's token, as in a pod; every request reads it again."""
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "1")
    monkeypatch.setattr(login, "TOKEN_READ_EVERY", 0.0)
    monkeypatch.setattr(login, "SERVICE_ACCOUNT", tmp_path)
    (tmp_path / "token").write_text("first\n")
    return tmp_path / "token"


def _write(file: Path, content: bytes | None) -> None:
    """Write a file; None deletes it."""
    if content is None:
        file.unlink()
    else:
        file.write_bytes(content)


@pytest.mark.parametrize("written", [b"", b"\n", b"se\0cond", b"\xff", None])
async def test_a_new_token_that_cannot_be_used(token: Path, written: bytes | None) -> None:
    """The old token stays in use, one line is logged, and the file is read again."""
    access = await log_in(Login())

    with capture_logs() as logs:
        assert access.authorize() == {"Authorization": "Bearer first"}
        _write(token, written)
        for _ in range(3):
            assert access.authorize() == {"Authorization": "Bearer first"}
        _write(token, b"second\n")
        assert access.authorize() == {"Authorization": "Bearer second"}
    assert [log["event"] for log in logs] == ["token_not_renewed"]


async def test_a_first_token_that_cannot_be_used(
    token: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error says what is wrong with the token."""
    monkeypatch.setenv("KUBECONFIG", f"{token}-none")
    _write(token, b"\n")
    with pytest.raises(NoCredentials, match="the token is empty"):
        await log_in(Login())


@pytest.mark.parametrize("host", ["10.96.0.1", "fd00::1"])
async def test_a_pod_without_a_ca(token: Path, monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    """Without a CA in the pod the system's are trusted, as by client-go, and a line is logged."""
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", host)
    with capture_logs() as logs:
        access = await log_in(Login())
    assert access.account.server.hostname == host
    assert access.account.authority is None
    assert [log["event"] for log in logs] == ["no_cluster_ca"]
    assert str(token.parent / "ca.crt") in logs[0]["why"]


@pytest.mark.usefixtures("token")
async def test_the_proxies_of_a_pod(monkeypatch: pytest.MonkeyPatch) -> None:
    """The API server's address in a network of NO_PROXY is not sent to the pod's proxy."""
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
    monkeypatch.setenv("HTTPS_PROXY", "proxy.corp.example:3128")
    assert (await log_in(Login())).proxy == "http://proxy.corp.example:3128"
    monkeypatch.setenv("NO_PROXY", ".cluster.local,.svc,10.96.0.0/12")
    assert (await log_in(Login())).proxy is None


def test_a_pod_s_namespace_is_that_of_its_service_account(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a pod the namespace is that of the mounted service account."""
    (tmp_path / "namespace").write_text("virt-evictions")
    monkeypatch.setattr(login, "SERVICE_ACCOUNT", tmp_path)

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
