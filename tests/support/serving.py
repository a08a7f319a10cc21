"""An aiohttp application on its own port during a test."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from ssl import SSLContext

import pytest
from aiohttp import web

from exporter.server.http.problems import Refusal


@asynccontextmanager
async def serving(
    app: web.Application, *, trust: SSLContext | None = None, socket: Path | None = None
) -> AsyncIterator[str]:
    """Serve the application during the block; yields its URL without a slash at the end.

    With `trust` the server has TLS; with `socket` it listens on a unix socket.
    """
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    try:
        if socket is not None:
            await web.UnixSite(runner, socket).start()
            yield f"unix:{socket}"
            return
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=trust).start()
        host, port = runner.addresses[0][:2]
        yield f"http://{host}:{port}" if trust is None else f"https://localhost:{port}"
    finally:
        await runner.cleanup()


@contextmanager
def refused(status: int) -> Iterator[pytest.ExceptionInfo[Refusal]]:
    """Expect a `Refusal` with this status."""
    with pytest.raises(Refusal) as raised:
        yield raised
    assert raised.value.problem.status == status
