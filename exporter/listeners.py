"""Addresses bound and served: TCP with or without TLS, unix sockets with their mode and group."""

import asyncio
import os
import shutil
import socket
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import structlog
from aiohttp import web

from exporter.certificates import Certificates, UnusableCertificate
from exporter.connections import Connections
from exporter.counters import Counters
from exporter.model import Seconds
from exporter.settings import Address, AuthSettings, Limits, Tls


DRAIN: Seconds = 5.0
"""How long requests under way may take to end at shutdown."""
CERTIFICATES_READ_EVERY: Seconds = 10.0
BACKLOG = 1024

log = structlog.stdlib.get_logger()


class CannotListen(Exception):
    """An address cannot be listened on; the text says which and why."""


@dataclass(frozen=True)
class Listener:
    """One of the two listeners: what it serves, where, and to how many. `name` is for people."""

    name: str
    app: web.Application
    addresses: tuple[Address, ...]
    tls: Tls
    auth: AuthSettings
    limits: Limits
    counters: Counters

    @asynccontextmanager
    async def served(self) -> AsyncIterator[tuple[str, ...]]:
        """Serve for the length of the block; the URLs as bound. Raises `CannotListen`."""
        runner = web.AppRunner(
            self.app, access_log=None, shutdown_timeout=DRAIN, handler_cancellation=True
        )
        await runner.setup()
        bound: list[asyncio.Server] = []
        sockets: list[Path] = []
        renewing: asyncio.Task[None] | None = None
        try:
            certificates = self._read_certificates()
            connect = self._connections(runner)
            urls = []
            for address in self.addresses:
                if address.path:
                    bound.append(await self._bind_path(Path(address.path), connect))
                    sockets.append(Path(address.path))
                else:
                    bound.append(await self._bind_port(address, connect, certificates))
                urls.append(_url(address, bound[-1], secure=certificates is not None))
            if certificates is not None:
                renewing = asyncio.create_task(self._renew(certificates))
            yield tuple(urls)
        finally:
            if renewing is not None:
                renewing.cancel()
            for server in bound:
                server.close()
            await runner.cleanup()
            for path in sockets:
                path.unlink(missing_ok=True)

    def _connections(self, runner: web.AppRunner) -> Connections:
        server = runner.server
        if server is None:
            raise RuntimeError("the runner was not set up")
        return Connections(self.name, server, self.limits, self.counters)

    def _read_certificates(self) -> Certificates | None:
        if self.tls.cert_file is None:
            return None
        try:
            return Certificates(self.name, self.tls)
        except UnusableCertificate as error:
            raise CannotListen(str(error)) from error

    async def _renew(self, certificates: Certificates) -> None:
        """Take the files' content when it changes, for ever; trouble is told once."""
        trouble = ""
        while True:
            await asyncio.sleep(CERTIFICATES_READ_EVERY)
            try:
                if certificates.renew():
                    log.info("certificate_renewed", listener=self.name)
                trouble = ""
            except UnusableCertificate as error:
                if str(error) != trouble:
                    log.warning("certificate_not_renewed", why=str(error))
                trouble = str(error)

    async def _bind_port(
        self, address: Address, connect: Connections, certificates: Certificates | None
    ) -> asyncio.Server:
        try:
            return await asyncio.get_running_loop().create_server(
                connect,
                address.host,
                address.port,
                ssl=None if certificates is None else certificates.context,
                backlog=BACKLOG,
            )
        except OSError as error:
            raise CannotListen(f"{address}: {error.strerror or error}") from error

    async def _bind_path(self, path: Path, connect: Connections) -> asyncio.Server:
        if await _is_served(path):
            raise CannotListen(f"unix:{path}: another process listens there")
        try:
            listening = _bind(path, self.auth.socket_mode, self.auth.socket_group)
        except (OSError, LookupError) as error:
            raise CannotListen(f"unix:{path}: {getattr(error, 'strerror', '') or error}") from error
        return await asyncio.get_running_loop().create_unix_server(
            connect, sock=listening, backlog=BACKLOG
        )


def _bind(path: Path, mode: int, group: str | None) -> socket.socket:
    """A unix socket that nobody else may open before it has its mode and group.

    One that a process left behind is replaced. Raises OSError or LookupError.
    """
    if path.exists() and stat.S_ISSOCK(path.stat().st_mode):
        path.unlink()
    listening = socket.socket(socket.AF_UNIX)
    before = os.umask(0o177)
    try:
        listening.bind(str(path))
        if group is not None:
            shutil.chown(path, group=int(group) if group.isdigit() else group)
        path.chmod(mode)
    except (OSError, LookupError):
        listening.close()
        raise
    finally:
        os.umask(before)
    return listening


async def _is_served(path: Path) -> bool:
    """Whether somebody answers on a unix socket: binding would take it from them unasked."""
    try:
        _, writer = await asyncio.open_unix_connection(path)
    except OSError:
        return False
    writer.close()
    return True


def _url(address: Address, server: asyncio.Server, *, secure: bool) -> str:
    if address.path:
        return f"unix:{Path(address.path)}"
    port = address.port or server.sockets[0].getsockname()[1]
    return f"http{'s' if secure else ''}://{Address(address.host, port)}"
