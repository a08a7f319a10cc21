"""The program beside an API server, as most of these tests need it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from tests.cluster.users import open_kubeconfig
from tests.support.program import Program, program


@asynccontextmanager
async def exporting(url: str, directory: Path, **config: object) -> AsyncIterator[Program]:
    """The program with these settings, from when it is ready."""
    login = str(open_kubeconfig(directory / "login", url))
    async with program(directory, "--kubeconfig", login, config=config) as exporter:
        await exporter.ready()
        yield exporter
