"""The users of the API server, and their kubeconfig files."""

import base64
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml


@dataclass(frozen=True, slots=True)
class User:
    """A user of the API server, with a token or a client certificate."""

    name: str
    authority: Path
    token: str | None = None
    certificate: Path | None = None
    """The file of the certificate; the key is in the same folder."""

    @property
    def namespace(self) -> str:
        """The namespace of a service account; "default" for other users."""
        kind, _, place = self.name.rpartition(":")[0].rpartition(":")
        return place if kind == "system:serviceaccount" else "default"

    @property
    def headers(self) -> dict[str, str]:
        """The headers that authenticate the user."""
        return {"Authorization": f"Bearer {self.token}"} if self.token else {}

    @property
    def authority_data(self) -> str:
        """The CA's certificate, encoded as in Kubernetes objects."""
        return _data(self.authority)

    @property
    def tls(self) -> ssl.SSLContext:
        """The TLS context that trusts the server, with the user's certificate if it has one."""
        context = ssl.create_default_context(cafile=self.authority)
        if self.certificate is not None:
            context.load_cert_chain(self.certificate, self.certificate.with_suffix(".key"))
        return context


def kubeconfig(path: Path, server: str, user: User) -> Path:
    """Write a kubeconfig that contains the certificates, so it needs no other file."""
    cluster = {"server": server, "certificate-authority-data": user.authority_data}
    return _write(path, cluster, user.name, _proof(user), user.namespace)


def open_kubeconfig(path: Path, server: str) -> Path:
    """Write a kubeconfig without credentials, for a server without TLS."""
    return _write(path, {"server": server}, "nobody", {}, "default")


def secure_kubeconfig(
    path: Path, server: str, certificates: Path, proof: Mapping[str, object]
) -> Path:
    """Write a kubeconfig with these credentials, for a server of these certificates."""
    cluster = {"server": server, "certificate-authority": str(certificates / "ca.crt")}
    return _write(path, cluster, "somebody", proof, "default")


def _write(
    path: Path, cluster: dict[str, str], name: str, proof: Mapping[str, object], namespace: str
) -> Path:
    context = {"cluster": "test", "user": name, "namespace": namespace}
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "test", "cluster": cluster}],
        "users": [{"name": name, "user": proof}],
        "contexts": [{"name": "test", "context": context}],
        "current-context": "test",
    }
    path.write_text(yaml.safe_dump(document))
    path.chmod(0o600)
    return path


def _proof(user: User) -> dict[str, str]:
    if user.certificate is None:
        return {"token": user.token or ""}
    return {
        "client-certificate-data": _data(user.certificate),
        "client-key-data": _data(user.certificate.with_suffix(".key")),
    }


def _data(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()
