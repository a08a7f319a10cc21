"""Certificates for tests of logins: a CA, a server's and a client's, and odd ones."""

from pathlib import Path

from tests.support.certificates import lock_key, write_signed


HOSTS = (
    *("127.0.0.1", "127.9.9.9", "::1", "10.96.0.1", "192.0.2.1", "2001:db8::1"),
    *("localhost", "api.example", "api.corp.example"),
)


def write_certificates(folder: Path, *addresses: str) -> None:
    """Write NAME.crt and NAME.key into the folder; servers may have these IP addresses too.

    `server` and `client` are signed by `ca`; `old-server` by `old-ca`, both without key
    identifiers; `deep-server` by `middle`, which `ca` signed; `alone` by itself. `locked.key` is
    the client's key with a password, and `other` a CA that signed nothing.
    """
    hosts = (*HOSTS, *addresses)
    for name in ("ca", "other"):
        write_signed(folder, name, None, is_authority=True)
    write_signed(folder, "old-ca", None, is_authority=True, has_identifiers=False)
    write_signed(folder, "middle", "ca", is_authority=True)
    write_signed(folder, "server", "ca", hosts=hosts)
    write_signed(folder, "old-server", "old-ca", hosts=hosts, has_identifiers=False)
    write_signed(folder, "deep-server", "middle", hosts=hosts)
    write_signed(folder, "alone", None, hosts=hosts)
    write_signed(folder, "client", "ca")
    lock_key(folder / "client.key", folder / "locked.key", "unknown")
