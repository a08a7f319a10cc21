"""Certificates, keys, and tokens for tests."""

import base64
import json
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID


_SIGNS_CERTIFICATES = x509.KeyUsage(
    key_cert_sign=True,
    digital_signature=False,
    content_commitment=False,
    key_encipherment=False,
    data_encipherment=False,
    key_agreement=False,
    crl_sign=False,
    encipher_only=False,
    decipher_only=False,
)
_USAGES = (ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH)


def write_certificate(
    directory: Path, name: str, *, group: str = "", hosts: Iterable[str] = (), days: int = 30
) -> None:
    """Write NAME.crt and NAME.key, signed by the directory's authority, which the first call makes.

    A server can use the pair on the loopback address and on `hosts`. For Kubernetes a client with
    this pair is the user `name` in `group`.
    """
    if not (directory / "ca.crt").exists():
        write_signed(directory, "ca", None, is_authority=True)
    hosts = ("localhost", "127.0.0.1", *hosts)
    write_signed(directory, name, "ca", group=group, hosts=hosts, days=days)


def write_signed(
    directory: Path,
    name: str,
    by: str | None,
    *,
    is_authority: bool = False,
    has_identifiers: bool = True,
    group: str = "",
    hosts: Iterable[str] = (),
    days: int = 30,
) -> None:
    """Write NAME.crt and NAME.key, signed by the pair `by` of the directory, or by itself.

    `has_identifiers`: the certificate has the key identifiers that Python 3.13 demands.
    """
    key = _write_key(directory / f"{name}.key")
    subject = [x509.NameAttribute(NameOID.COMMON_NAME, name)]
    if group:
        subject.append(x509.NameAttribute(NameOID.ORGANIZATION_NAME, group))
    signer, issuer = key, x509.Name(subject)
    if by is not None:
        signer = _read_key(directory / f"{by}.key")
        issuer = x509.load_pem_x509_certificate((directory / f"{by}.crt").read_bytes()).subject
    now = datetime.now(UTC)
    end = now + timedelta(days=days)
    builder = (
        x509.CertificateBuilder()
        .subject_name(x509.Name(subject))
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(min(now, end) - timedelta(hours=1))
        .not_valid_after(end)
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
    )
    if is_authority:
        builder = builder.add_extension(_SIGNS_CERTIFICATES, critical=True)
    else:
        builder = builder.add_extension(x509.ExtendedKeyUsage(_USAGES), critical=False)
    names = [_general_name(host) for host in hosts]
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    if has_identifiers:
        own = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
        of_signer = x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key())
        builder = builder.add_extension(own, critical=False).add_extension(
            of_signer, critical=False
        )
    certificate = builder.sign(signer, hashes.SHA256())
    (directory / f"{name}.crt").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))


def lock_key(key: Path, locked: Path, password: str) -> None:
    """Write a copy of a key that needs a password."""
    lock = serialization.BestAvailableEncryption(password.encode())
    locked.write_bytes(_encode_key(_read_key(key), lock))


def sign_token(key: Path, issuer: str, subject: str, expires: int) -> str:
    """A service account's token (a JWT, ES256), as a kube-apiserver with this key signs it."""
    claims = {
        "iss": issuer,
        "sub": subject,
        "aud": [issuer],
        "exp": expires,
        "iat": expires - 3600,
        "nbf": expires - 3600,
    }
    text = f"{_encode({'alg': 'ES256', 'typ': 'JWT'})}.{_encode(claims)}"
    der = _read_key(key).sign(text.encode(), ec.ECDSA(hashes.SHA256()))
    signature = b"".join(number.to_bytes(32, "big") for number in decode_dss_signature(der))
    return f"{text}.{_base64(signature)}"


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _write_key(path: Path) -> ec.EllipticCurvePrivateKey:
    key = ec.generate_private_key(ec.SECP256R1())
    path.write_bytes(_encode_key(key, serialization.NoEncryption()))
    return key


def _encode_key(
    key: ec.EllipticCurvePrivateKey, lock: serialization.KeySerializationEncryption
) -> bytes:
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, lock)


def _read_key(path: Path) -> ec.EllipticCurvePrivateKey:
    key = serialization.load_pem_private_key(path.read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    return key


def _encode(value: object) -> str:
    return _base64(json.dumps(value).encode())


def _base64(value: bytes) -> str:
    return base64.urlsafe_b64encode(value).rstrip(b"=").decode()
