"""The TLS context of a listener, reloaded when its files change.

Certificates are short-lived and renewed in place, for example by cert-manager. Each new connection
uses the newest context that could be loaded; open connections keep their own. A TLS session cannot
be resumed with another context, so every new connection is verified with the present client CA.
"""

import ssl
from contextlib import suppress
from pathlib import Path

from exporter.credentials import no_password
from exporter.engine.facts.model import Instant
from exporter.errors import CommandFailed, Exit
from exporter.settings import MinVersion, Tls
from exporter.settings.values import TLS_1_2_SUITES


_NO_CHECK_TIME = ssl.VerifyFlags(0x200000)
"""OpenSSL's X509_V_FLAG_NO_CHECK_TIME, which Python does not name."""

_VERSIONS = {
    MinVersion.TLS_1_2: ssl.TLSVersion.TLSv1_2,
    MinVersion.TLS_1_3: ssl.TLSVersion.TLSv1_3,
}


class CannotListen(CommandFailed):
    """An address cannot be bound, or TLS files cannot be used; the message says which and why."""

    exit_code = Exit.CANNOT_LISTEN


class Certificates:
    """The TLS context of one listener that has a certificate. Call `renew` regularly.

    `context` is for the next connection. `not_after` is when the certificate in use expires, or
    None if it is not a server certificate, or a client could not load its file.
    """

    def __init__(self, listener: str, tls: Tls) -> None:
        """Raises `CannotListen`."""
        self._listener = listener
        self._tls = tls
        self._version: tuple[tuple[int, int, int], ...] = ()
        self.renew()

    def renew(self) -> bool:
        """Reload the files if they have changed; returns whether they have changed.

        Raises `CannotListen`; then the last context stays in use.
        """
        version = self._read_version()
        if version == self._version:
            return False
        self.context = self._load()
        self.not_after = self._read_not_after()
        self._version = version
        return True

    def _load(self) -> ssl.SSLContext:
        tls = self._tls
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = _VERSIONS[tls.versions.min_version]
        context.set_ciphers(":".join(tls.versions.cipher_suites or TLS_1_2_SUITES))
        context.set_alpn_protocols(["http/1.1"])
        try:
            if tls.cert_file is not None:
                context.load_cert_chain(tls.cert_file, tls.key_file, password=no_password)
            if tls.client_ca_file is not None:
                context.load_verify_locations(tls.client_ca_file)
                context.verify_mode = ssl.CERT_REQUIRED
        except OSError as error:
            files = ", ".join(str(path) for path in self._files())
            raise CannotListen(f"tls.{self._listener}: {files}: {error}") from error
        return context

    def _read_not_after(self) -> Instant | None:
        """Read when the certificate expires, by a TLS handshake in memory.

        The standard library decodes a certificate only for a client that trusts it. This client
        trusts exactly this certificate, even after it has expired. Of a file that a client could
        not load, for example because of an invalid CRL in it, the end is unknown.
        """
        trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        trusting.check_hostname = False
        trusting.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN | _NO_CHECK_TIME
        sent, received = ssl.MemoryBIO(), ssl.MemoryBIO()
        try:
            trusting.load_verify_locations(self._tls.cert_file)
            client = trusting.wrap_bio(received, sent)
            server = self.context.wrap_bio(sent, received, server_side=True)
            for side in (client, server, client):
                with suppress(ssl.SSLWantReadError):
                    side.do_handshake()
            shown = client.getpeercert()
        except (OSError, ValueError):
            return None
        return float(ssl.cert_time_to_seconds(str(shown["notAfter"]))) if shown else None

    def _files(self) -> list[Path]:
        tls = self._tls
        return [p for p in (tls.cert_file, tls.key_file, tls.client_ca_file) if p is not None]

    def _read_version(self) -> tuple[tuple[int, int, int], ...]:
        """A value that changes if a file changes, or if kubelet replaces a symbolic link."""
        try:
            stats = [path.stat() for path in self._files()]
        except OSError as error:
            raise CannotListen(f"tls.{self._listener}: {error.filename}: {error}") from error
        return tuple((stat.st_ino, stat.st_mtime_ns, stat.st_size) for stat in stats)
