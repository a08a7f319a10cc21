"""A server that answers every request, and notes how it came: TLS, proxy, headers."""

import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


_ANSWER = b'{"kind":"Status","apiVersion":"v1","status":"Success"}'


@dataclass
class Capture:
    """The requests so far, as mappings; `certificate` names the server's files."""

    folder: Path
    certificate: str = "server"
    requests: list[dict[str, Any]] = field(default_factory=list)
    proxied: list[dict[str, Any]] = field(default_factory=list)
    port: int = 0

    def serve(self, listener: socket.socket) -> None:
        """Accept connections until the listener is closed."""
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            connection.settimeout(10)
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with suppress(OSError, ssl.SSLError), connection:
            self._converse(connection, {})

    def _converse(self, connection: socket.socket, seen: dict[str, Any]) -> None:
        """Answer the requests of a connection; `seen` is what is known about it."""
        if connection.recv(1, socket.MSG_PEEK) == b"\x16":
            connection = self._wrap(connection, seen)
        with connection:
            while head := _read_head(connection):
                line, *fields = head.split("\r\n")
                headers = [(name.lower(), value) for name, _, value in _split(fields)]
                method, target, _ = line.split(" ", 2)
                target = target.split("?")[0]
                if method == "CONNECT" or target.startswith("http://"):
                    self.proxied.append(
                        {"target": target, **_read_headers(headers, ("proxy-authorization",))}
                        | ({"tls": True} if "tls" in seen else {})
                    )
                if method == "CONNECT":
                    if "tls" in seen:
                        return  # TLS in TLS is not needed to see what the proxy was asked
                    connection.sendall(b"HTTP/1.1 200 Connected\r\n\r\n")
                    self._converse(connection, {**seen, "proxy": True})
                    return
                impersonation = sorted(
                    f"{name}: {value}" for name, value in headers if name.startswith("impersonate-")
                )
                self.requests.append(
                    {
                        **seen,
                        "path": target,
                        **_read_headers(headers, ("authorization",)),
                        **({"impersonation": impersonation} if impersonation else {}),
                    }
                )
                length = str(len(_ANSWER)).encode()
                connection.sendall(
                    b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: "
                    + length + b"\r\n\r\n" + _ANSWER
                )  # fmt: skip

    def _wrap(self, connection: socket.socket, seen: dict[str, Any]) -> socket.socket:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(
            self.folder / f"{self.certificate}.crt", self.folder / f"{self.certificate}.key"
        )
        context.load_verify_locations(self.folder / "ca.crt")
        context.verify_mode = ssl.CERT_OPTIONAL
        context.sni_callback = lambda _, name, __: seen.update({"sni": name} if name else {})
        secured = context.wrap_socket(connection, server_side=True)
        seen["tls"] = True
        peer: Any = secured.getpeercert()
        if peer:
            seen["certificate"] = dict(part[0] for part in peer["subject"])["commonName"]
        return secured


@contextmanager
def capturing(folder: Path, certificate: str = "server") -> Iterator[Capture]:
    """Serve on a port of 127.0.0.1 during the block."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        capture = Capture(folder, certificate, port=listener.getsockname()[1])
        threading.Thread(target=capture.serve, args=(listener,), daemon=True).start()
        yield capture
        listener.shutdown(socket.SHUT_RDWR)


def _read_head(connection: socket.socket) -> str:
    """The head of a request without a body, or an empty text at the end."""
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        part = connection.recv(1)
        if not part:
            return ""
        head += part
    return head[:-4].decode("utf-8", "replace")


def _split(fields: list[str]) -> Iterator[tuple[str, str, str]]:
    for line in fields:
        yield line.partition(": ")


def _read_headers(headers: list[tuple[str, str]], names: tuple[str, ...]) -> dict[str, str]:
    return {name: value for name, value in headers if name in names}
