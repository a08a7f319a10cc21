"""Which namespace the exporter takes for its own."""

from pathlib import Path

import pytest

from exporter.kube import client
from exporter.kube.client import Login, find_namespace
from tests.cluster.users import User, kubeconfig


def test_a_pod_s_namespace_is_that_of_its_service_account(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the kubelet mounts it."""
    mounted = tmp_path / "namespace"
    mounted.write_text("virt-evictions")
    monkeypatch.setattr(client, "_POD_NAMESPACE", mounted)

    assert find_namespace(Login()) == "virt-evictions"


def test_else_it_is_that_of_the_kubeconfig_s_context(tmp_path: Path) -> None:
    """As for kubectl: "default" where the context names none."""
    authority = tmp_path / "ca.crt"
    authority.write_text("")
    name = "system:serviceaccount:virt-evictions:exporter"
    file = kubeconfig(tmp_path / "kubeconfig", "https://127.0.0.1:1", User(name, authority))

    assert find_namespace(Login(kubeconfig=file)) == "virt-evictions"
    file.write_text(file.read_text().replace("    namespace: virt-evictions\n", ""))
    assert find_namespace(Login(kubeconfig=file)) == "default"


def test_a_server_without_credentials_has_the_default_one() -> None:
    """The demo's."""
    assert find_namespace(Login(url="http://127.0.0.1:1")) == "default"
