"""A real Perses server."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import aiohttp
import yaml

from .binaries import find_binary, find_perses_plugins
from .polling import poll
from .ports import free_port
from .processes import Process


def write_plugins(folder: Path) -> Path:
    """Write the plugins that our dashboards use into the plugin folder of a Perses server."""
    for name, text in json.loads(find_perses_plugins().read_text()).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


@asynccontextmanager
async def serve_perses(directory: Path) -> AsyncIterator[str]:
    """Run an empty Perses server with our plugins; yields its URL."""
    config = directory / "perses.yaml"
    plugins = str(write_plugins(directory / "plugins"))
    settings = {
        "database": {"file": {"folder": str(directory / "perses"), "extension": "json"}},
        # The server loads plugins only if it has a folder for archives, which may be empty.
        "plugin": {"path": plugins, "archive_paths": [plugins]},
        "frontend": {"disable": True},
    }
    config.write_text(yaml.safe_dump(settings))
    address = f"127.0.0.1:{free_port()}"
    server = Process(
        [str(find_binary("perses")), f"--config={config}", f"--web.listen-address={address}"],
        directory / "perses.log",
    )
    server.start()

    async def answers() -> bool:
        if not server.running:
            raise server.failure("ended")
        with suppress(aiohttp.ClientError):
            async with session.get(f"http://{address}/api/v1/projects") as response:
                return response.ok
        return False

    try:
        async with aiohttp.ClientSession() as session:
            await poll(answers, what="Perses answers")
        yield f"http://{address}"
    finally:
        server.kill()
