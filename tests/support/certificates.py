"""Certificates of one test authority, and tokens signed by a key of it."""

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


def write_certificate(
    directory: Path, name: str, *, group: str = "", hosts: Iterable[str] = (), days: int = 30
) -> None:
    """Write NAME.crt and NAME.key, signed by the directory's authority, which the first call makes.

    A server can use the pair on the loopback address and on `hosts`. For Kubernetes a client with
    this pair is the user `name` in `group`.
    """
    if not (directory / "ca.crt").exists():
        _write_authority(directory)
    authority = x509.load_pem_x509_certificate((directory / "ca.crt").read_bytes())
    signer = _read_key(directory / "ca.key")
    subject = [x509.NameAttribute(NameOID.COMMON_NAME, name)]
    if group:
        subject.append(x509.NameAttribute(NameOID.ORGANIZATION_NAME, group))
    key = _write_key(directory / f"{name}.key")
    usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    names = [_general_name(host) for host in ("localhost", "127.0.0.1", *hosts)]
    builder = (
        _builder(x509.Name(subject), authority.subject, key.public_key(), days)
        .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False
        )
    )
    _write(directory / f"{name}.crt", builder.sign(signer, hashes.SHA256()))


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


def _write_authority(directory: Path) -> None:
    key = _write_key(directory / "ca.key")
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test authority")])
    builder = (
        _builder(name, name, key.public_key(), days=30)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(_SIGNS_CERTIFICATES, critical=True)
    )
    _write(directory / "ca.crt", builder.sign(key, hashes.SHA256()))


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    end = now + timedelta(days=days)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(min(now, end) - timedelta(hours=1))
        .not_valid_after(end)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _write_key(path: Path) -> ec.EllipticCurvePrivateKey:
    key = ec.generate_private_key(ec.SECP256R1())
    path.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return key


def _read_key(path: Path) -> ec.EllipticCurvePrivateKey:
    key = serialization.load_pem_private_key(path.read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    return key


def _write(path: Path, certificate: x509.Certificate) -> None:
    path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))


def _encode(value: object) -> str:
    return _base64(json.dumps(value).encode())


def _base64(value: bytes) -> str:
    return base64.urlsafe_b64encode(value).rstrip(b"=").decode()
