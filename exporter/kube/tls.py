"""TLS contexts that trust what client-go trusts. Certificates and keys are loaded from memory."""

import base64
import binascii
import os
import re
import ssl
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from exporter.credentials import no_password
from exporter.kube.account import Account
from exporter.kube.kubeconfig import NoCredentials


_CERTIFICATE = re.compile(
    rb"-----BEGIN CERTIFICATE-----\s(?P<body>[^:-]*)-----END CERTIFICATE-----"
)


def make_context(account: Account) -> ssl.SSLContext:
    """The TLS context for the account's server. Raises `NoCredentials`.

    As for client-go, a certificate needs no key identifiers, which Python 3.13 demands, and the CA
    may be an intermediate one, or the server's own certificate.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    if not account.verifies:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    elif account.authority is None:
        context.load_default_certs()
    elif not trust(context, account.authority):
        raise NoCredentials(f"{account.cluster_at}: certificate-authority: expected PEM")
    if account.certificate is not None and account.key is not None:
        load_certificate(context, account.certificate, account.key, account.user_at)
    return context


def trust(context: ssl.SSLContext, authority: bytes) -> bool:
    """Trust each certificate in the PEM; whether there is one that can be read."""
    is_found = False
    for match in _CERTIFICATE.finditer(authority):
        with suppress(binascii.Error, ssl.SSLError, ValueError):
            context.load_verify_locations(cadata=base64.b64decode(match["body"]))
            is_found = True
    return is_found


def load_certificate(context: ssl.SSLContext, certificate: bytes, key: bytes, where: str) -> None:
    """Use a client certificate and its key, both PEM. Raises `NoCredentials`."""
    with _as_file(certificate) as certificate_path, _as_file(key) as key_path:
        try:
            context.load_cert_chain(certificate_path, key_path, password=no_password)
        except (OSError, ValueError):
            expected = "expected PEM, a key without a password, and that they are a pair"
            keys = "client-certificate, client-key"
            raise NoCredentials(f"{where}: {keys}: {expected}") from None


@contextmanager
def _as_file(content: bytes) -> Iterator[str]:
    """The path of a file with this content, which exists during the block.

    On Linux it is in memory: a pod has no disk that it may write.
    """
    is_in_memory = hasattr(os, "memfd_create")
    with (
        os.fdopen(os.memfd_create("credentials"), "wb")
        if is_in_memory
        else tempfile.NamedTemporaryFile()
    ) as file:
        file.write(content)
        file.flush()
        yield f"/proc/self/fd/{file.fileno()}" if is_in_memory else file.name
