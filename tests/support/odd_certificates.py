"""Certificates for tests, written by openssl: a CA, a server's and a client's, and odd ones."""

import subprocess
from pathlib import Path


HOSTS = (
    "IP:127.0.0.1,IP:127.9.9.9,IP:::1,IP:10.96.0.1,IP:192.0.2.1,IP:2001:db8::1,DNS:localhost,"
    "DNS:api.example,DNS:api.corp.example"
)
_NO_IDENTIFIERS = "subjectKeyIdentifier=none\nauthorityKeyIdentifier=none\n"


def write_certificates(folder: Path, *addresses: str) -> None:
    """Write NAME.crt and NAME.key into the folder; servers may have these IP addresses too.

    `server` and `client` are signed by `ca`; `old-server` by `old-ca`, both without key
    identifiers; `deep-server` by `middle`, which `ca` signed; `alone` by itself. `locked.key` is
    the client's key with a password, and `other` a CA that signed nothing.
    """
    names = ",".join((HOSTS, *(f"IP:{address}" for address in addresses)))
    leaf = f"basicConstraints=CA:FALSE\nsubjectAltName={names}\n"
    for name in ("ca", "other"):
        _sign(folder, name, None, "basicConstraints=critical,CA:TRUE\n")
    _sign(folder, "old-ca", None, "basicConstraints=critical,CA:TRUE\n" + _NO_IDENTIFIERS)
    _sign(folder, "middle", "ca", "basicConstraints=critical,CA:TRUE\n")
    _sign(folder, "server", "ca", leaf)
    _sign(folder, "old-server", "old-ca", leaf + _NO_IDENTIFIERS)
    _sign(folder, "deep-server", "middle", leaf)
    _sign(folder, "alone", None, leaf)
    _sign(folder, "client", "ca", "extendedKeyUsage=clientAuth\n")
    _openssl(
        "pkcs8", "-topk8", "-in", folder / "client.key", "-out", folder / "locked.key",
        "-passout", "pass:unknown",
    )  # fmt: skip


def _sign(folder: Path, name: str, by: str | None, extensions: str) -> None:
    """Write a key and its certificate, which `by` signs, or the key itself."""
    key, request, settings = (folder / f"{name}.{end}" for end in ("key", "csr", "cnf"))
    settings.write_text(f"[v3]\n{extensions}")
    _openssl("ecparam", "-genkey", "-name", "prime256v1", "-noout", "-out", key)
    _openssl("req", "-new", "-key", key, "-subj", f"/CN={name}", "-out", request)
    signer: tuple[str | Path, ...] = ("-signkey", key)
    if by is not None:
        signer = ("-CA", folder / f"{by}.crt", "-CAkey", folder / f"{by}.key", "-CAcreateserial")
    _openssl(
        "x509", "-req", "-in", request, *signer, "-days", "30", "-extfile", settings,
        "-extensions", "v3", "-out", folder / f"{name}.crt",
    )  # fmt: skip


def _openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True)
