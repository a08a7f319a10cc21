"""Listeners: bind addresses (TCP with or without TLS, unix sockets) and serve an application."""

import asyncio
import errno
import os
import socket
import stat
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import structlog
from aiohttp import web

from exporter.engine.facts.model import Seconds
from exporter.health import Health
from exporter.logs import Trouble
from exporter.server.http.budget import ConnectionBudget
from exporter.server.http.certificates import CannotListen, Certificates
from exporter.server.http.connections import Connections
from exporter.settings import AuthSettings, Limits, Tls
from exporter.settings.values import Address
from exporter.tasks import keep_running


DRAIN: Seconds = 5.0
"""How long running requests may take at shutdown. aiohttp waits twice, half of this each time."""
CERTIFICATES_READ_EVERY: Seconds = 10.0
BACKLOG = 1024

log = structlog.stdlib.get_logger()


@dataclass(frozen=True)
class Listener:
    """One listener: its application, addresses and limits.

    `failures` counts unexpected exceptions by task.
    """

    name: str
    app: web.Application
    addresses: tuple[Address, ...]
    tls: Tls
    auth: AuthSettings
    limits: Limits
    budget: ConnectionBudget
    health: Health
    failures: Counter[str] = field(default_factory=Counter)

    @asynccontextmanager
    async def served(self) -> AsyncIterator[tuple[str, ...]]:
        """Serve until the `async with` block ends; yields the bound URLs. Raises `CannotListen`."""
        certificates = None
        if self.tls.cert_file is not None:
            certificates = Certificates(self.name, self.tls)
        runner = web.AppRunner(self.app)
        await runner.setup()
        if runner.server is None:
            raise RuntimeError("the runner was not set up")
        connections = Connections(self.name, runner.server, self.limits, self.budget)
        bound: list[socket.socket] = []
        jobs: list[asyncio.Task[None]] = []
        urls: list[str] = []
        try:
            for address in self.addresses:
                listening = await self._bind(address)
                bound += listening
                secured = None if address.path else certificates
                jobs += [
                    self._start("listener", partial(connections.accept, listener, secured))
                    for listener in listening
                ]
                url = f"unix:{Path(address.path)}"
                if not address.path:
                    scheme = "http" if secured is None else "https"
                    port = listening[0].getsockname()[1]
                    url = f"{scheme}://{Address(address.host, port)}"
                urls.append(url)
            if certificates is not None:
                self._record_end(certificates)
                jobs.append(self._start("certificates", partial(self._renew, certificates)))
            yield tuple(urls)
        finally:
            for job in jobs:
                job.cancel()
            await asyncio.gather(*jobs, return_exceptions=True)
            for listener in bound:
                listener.close()
            await connections.close(DRAIN / 2)
            await runner.cleanup()
            _remove_paths(self.addresses[: len(urls)])

    def _start(self, name: str, job: Callable[[], Awaitable[None]]) -> asyncio.Task[None]:
        return asyncio.create_task(keep_running(f"{name}_{self.name}", job, self.failures))

    def _record_end(self, certificates: Certificates) -> None:
        if certificates.not_after is None:
            self.health.certificates.pop(self.name, None)
        else:
            self.health.certificates[self.name] = certificates.not_after

    async def _renew(self, certificates: Certificates) -> None:
        """Reload the TLS files when they change; log each new problem once."""
        trouble = Trouble("certificate_not_renewed")
        while True:
            await asyncio.sleep(CERTIFICATES_READ_EVERY)
            try:
                if certificates.renew():
                    self._record_end(certificates)
                    log.info("certificate_renewed", listener=self.name)
            except CannotListen as error:
                trouble.record(str(error))
            else:
                trouble.end()

    async def _bind(self, address: Address) -> list[socket.socket]:
        """Bind an address. A host name gets one socket per IP address."""
        try:
            if not address.path:
                return await _bind_port(address)
            if await _is_served(address.path):
                raise CannotListen(f"{address}: another process listens there")
            return [_bind_path(Path(address.path), self.auth.socket_mode)]
        except (OSError, UnicodeError) as error:
            if not address.path and getattr(error, "errno", None) == errno.EADDRINUSE:
                raise CannotListen(
                    f"listen.{self.name}: {address} is in use: is another exporter (or `make"
                    f" run`) running? To use another address, set `listen.{self.name}` in a"
                    " --config file, or start the demo with --listen HOST:PORT"
                ) from error
            raise CannotListen(f"{address}: {getattr(error, 'strerror', '') or error}") from error


async def _bind_port(address: Address) -> list[socket.socket]:
    """Bind all IP addresses of a host; port 0 picks one free port for all.

    Raises OSError, or UnicodeError for an invalid host name.
    """
    addresses = await asyncio.get_running_loop().getaddrinfo(
        address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    bound: list[socket.socket] = []
    port = address.port
    try:
        for family, _, _, _, (host, *_) in dict.fromkeys(addresses):
            bound.append(socket.create_server((host, port), family=family, backlog=BACKLOG))
            bound[-1].settimeout(0.0)
            port = bound[-1].getsockname()[1]
    except OSError:
        for listener in bound:
            listener.close()
        raise
    return bound


def _bind_path(path: Path, mode: int) -> socket.socket:
    """Bind a unix socket that nobody else can open before its mode is set.

    A socket that another process has left behind is replaced. Raises OSError.
    """
    if path.exists() and stat.S_ISSOCK(path.stat().st_mode):
        path.unlink()
    listening = socket.socket(socket.AF_UNIX)
    before = os.umask(0o177)
    try:
        listening.bind(str(path))
        path.chmod(mode)
        listening.listen(BACKLOG)
        listening.settimeout(0.0)
    except OSError:
        listening.close()
        raise
    finally:
        os.umask(before)
    return listening


def _remove_paths(addresses: tuple[Address, ...]) -> None:
    for address in addresses:
        if address.path:
            Path(address.path).unlink(missing_ok=True)


async def _is_served(path: str) -> bool:
    """Whether a process still listens on a unix socket, so that we must not replace the socket."""
    try:
        _, writer = await asyncio.open_unix_connection(path)
    except OSError:
        return False
    writer.close()
    return True
