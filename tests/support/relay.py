"""A TCP relay to an API server that can cut, refuse and stall connections."""

import asyncio
import ssl
from contextlib import suppress
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit


class Gate:
    """`async with Gate(url) as gate` relays connections from `gate.url` to the server at `url`.

    With a folder of certificates the relay has TLS of its own. It connects to the server without
    TLS, or with the context `onward`.
    """

    def __init__(
        self,
        url: str,
        certificates: Path | None = None,
        *,
        certificate: str = "server",
        host: str = "127.0.0.1",
        onward: ssl.SSLContext | None = None,
    ) -> None:
        self._host = host
        self._onward = onward
        parts = urlsplit(url)
        assert parts.hostname is not None
        assert parts.port is not None
        self._scheme = parts.scheme
        self._tls: ssl.SSLContext | None = None
        if certificates is not None:
            self._scheme = "https"
            self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            pair = certificates / f"{certificate}.crt"
            self._tls.load_cert_chain(pair, pair.with_suffix(".key"))
        self._target = (parts.hostname, parts.port)
        self._server: asyncio.Server | None = None
        self._port = 0
        self._links: set[asyncio.Task[None]] = set()
        self._shut = False
        self._flowing = asyncio.Event()
        self._flowing.set()

    @property
    def url(self) -> str:
        """The relay's URL."""
        return f"{self._scheme}://127.0.0.1:{self._port}"

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, self._host, 0, ssl=self._tls)
        self._port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self._server is not None
        self._server.close()
        self._flowing.set()
        await self.cut()

    async def cut(self) -> int:
        """Break every connection, but relay new ones; returns how many were broken."""
        links = list(self._links)
        for link in links:
            link.cancel()
        await asyncio.gather(*links, return_exceptions=True)
        return len(links)

    async def shut(self) -> None:
        """Break every connection, and refuse new ones."""
        self._shut = True
        await self.cut()

    def open(self) -> None:
        """Undo `shut` and `stall`."""
        self._shut = False
        self._flowing.set()

    def stall(self) -> None:
        """Keep connections open but relay no data, as if the server hangs."""
        self._flowing.clear()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._shut:
            writer.transport.abort()
            return
        task = asyncio.current_task()
        assert task is not None
        self._links.add(task)
        try:
            await self._relay(reader, writer)
        except asyncio.CancelledError:
            writer.transport.abort()
        finally:
            self._links.discard(task)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, onward = await asyncio.open_connection(*self._target, ssl=self._onward)
        except OSError:
            writer.transport.abort()
            return
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._pump(reader, onward))
                tasks.create_task(self._pump(there, writer))
        finally:
            onward.transport.abort()

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await source.read(65536):
                await self._flowing.wait()
                sink.write(data)
                await sink.drain()
        sink.close()
