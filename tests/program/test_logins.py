"""Logins that hang or give what is no token, shown by the whole program."""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import TypeAlias

import pytest

from tests.cluster import PATIENCE
from tests.cluster.users import secure_kubeconfig
from tests.program.waiting import wait_until
from tests.support.api_servers import SimulatedStage
from tests.support.program import Program, program
from tests.support.relay import Gate


API_VERSION = "client.authentication.k8s.io/v1"
PLUGIN = """#!/bin/sh
cd "$(dirname "$0")"
echo $$ >> pids
[ -e hangs ] && sleep 600
cat answer
"""


LoginFile: TypeAlias = Callable[[Mapping[str, object]], Path]


@pytest.fixture
async def log_in_with(
    simulated: SimulatedStage, certificates: Path, tmp_path: Path
) -> AsyncIterator[LoginFile]:
    """Writes a kubeconfig whose user has these credentials, for the simulated API server."""
    async with Gate(simulated.url, certificates) as gate:
        yield lambda proof: secure_kubeconfig(tmp_path / "login", gate.url, certificates, proof)


class Plugin:
    """A login plugin that gives the token `good`, and hangs while its file `hangs` exists."""

    def __init__(self, directory: Path) -> None:
        self.hangs, self._pids = directory / "hangs", directory / "pids"
        self.answer = directory / "answer"
        credential = {
            "apiVersion": API_VERSION,
            "kind": "ExecCredential",
            "status": {"token": "good"},
        }
        self.answer.write_text(json.dumps(credential))
        script = directory / "plugin"
        script.write_text(PLUGIN)
        script.chmod(0o700)
        self.proof = {
            "exec": {
                "apiVersion": API_VERSION,
                "command": str(script),
                "interactiveMode": "Never",
            }
        }

    @property
    def calls(self) -> list[int]:
        """The process ID of each call."""
        return [int(pid) for pid in self._pids.read_text().split()] if self._pids.exists() else []

    def running(self) -> list[int]:
        """The processes of the plugin, and their children, that still run."""
        groups = set(self.calls)
        pids = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = stat.read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[2]) in groups and fields[0] != "Z":
                pids.append(int(stat.parent.name))
        return pids


async def _until_called(plugin: Plugin, before: int) -> None:
    await wait_until(lambda: len(plugin.calls) > before, what="another login")


async def _until_ended(plugin: Plugin) -> None:
    """Wait until no process of the plugin runs: after a SIGKILL each needs a moment to end."""
    await wait_until(lambda: not plugin.running(), what="the end of the plugin's processes")


async def _until_logged(exporter: Program, text: str) -> None:
    await wait_until(
        lambda: any(text in event["why"] for event in exporter.events("watch_broke")), what=text
    )


async def test_a_plugin_that_hangs(
    simulated: SimulatedStage, log_in_with: LoginFile, tmp_path: Path
) -> None:
    """A login ends after 10 s, is logged and tried again; SIGTERM ends it and its processes."""
    plugin = Plugin(tmp_path)
    login = log_in_with(plugin.proof)
    simulated.server.tokens = ["good"]
    plugin.hangs.touch()
    async with program(tmp_path, "--kubeconfig", str(login)) as exporter:
        await _until_logged(exporter, "took more than 10 s")
        plugin.hangs.unlink()
        await exporter.ready()
        await _until_ended(plugin)

        plugin.hangs.touch()
        before = len(plugin.calls)
        simulated.server.tokens = ["another"]
        simulated.server.cut()
        await _until_called(plugin, before)
        assert await exporter.end() == 0
    await _until_ended(plugin)


async def test_sigterm_during_the_first_login(log_in_with: LoginFile, tmp_path: Path) -> None:
    """SIGTERM ends the program while the first login hangs."""
    plugin = Plugin(tmp_path)
    plugin.hangs.touch()
    login = log_in_with(plugin.proof)
    async with program(tmp_path, "--kubeconfig", str(login)) as exporter:
        await _until_called(plugin, 0)
        began = os.times().elapsed
        assert await exporter.end() == 0
        assert os.times().elapsed - began < 5.0
    await _until_ended(plugin)


@pytest.mark.parametrize(
    "written", ["go\0od", "go\r\nod", "\n", ""], ids=["nul", "crlf", "blank", "empty"]
)
async def test_a_file_without_a_token(
    simulated: SimulatedStage, log_in_with: LoginFile, tmp_path: Path, written: str
) -> None:
    """At the start it is an error; later it is logged, and the file is read again."""
    token = tmp_path / "token"
    token.write_text(written, newline="")
    login = log_in_with({"tokenFile": str(token)})
    simulated.server.tokens = ["good", "new"]
    async with program(tmp_path, "--kubeconfig", str(login)) as exporter:
        assert await exporter.process.wait() == 5
        (stopped,) = exporter.events("stopped")
        assert str(login) in stopped["why"]
        assert "token" in stopped["why"]
    token.write_text("good")
    async with program(tmp_path, "--kubeconfig", str(login)) as exporter:
        await exporter.ready()
        token.write_text(written, newline="")
        simulated.server.tokens = ["new"]
        simulated.server.cut()
        await _until_logged(exporter, "token")
        token.write_text("new")
        await exporter.until(
            "/v1/status", lambda _, seen: not any(row["trouble"] for row in seen["resources"])
        )


async def test_a_nested_answer_of_a_plugin(log_in_with: LoginFile, tmp_path: Path) -> None:
    """An answer that cannot be decoded is an error with a message."""
    plugin = Plugin(tmp_path)
    plugin.answer.write_text("[" * 100_000)
    login = log_in_with(plugin.proof)
    async with program(tmp_path, "--kubeconfig", str(login)) as exporter:
        assert await exporter.process.wait() == 5
        (stopped,) = exporter.events("stopped")
        assert str(login) in stopped["why"]


async def test_an_endless_answer_of_a_plugin(log_in_with: LoginFile, tmp_path: Path) -> None:
    """A plugin that writes without end is ended, and the memory for its answer is bounded."""
    plugin = Plugin(tmp_path)
    plugin.answer.unlink()
    plugin.answer.symlink_to("/dev/zero")
    login = log_in_with(plugin.proof)
    async with program(tmp_path, "--kubeconfig", str(login)) as exporter:
        async with asyncio.timeout(PATIENCE):
            assert await exporter.process.wait() == 5
        (stopped,) = exporter.events("stopped")
        assert "wrote more than 1048576 bytes" in stopped["why"]
    await _until_ended(plugin)


@pytest.mark.parametrize("which", ["token", "login"])
async def test_a_file_whose_read_never_ends(
    log_in_with: LoginFile, tmp_path: Path, which: str
) -> None:
    """A FIFO as `tokenFile` or kubeconfig is an error with its path."""
    token = tmp_path / "token"
    token.write_text("good")
    login = log_in_with({"tokenFile": str(token)})
    (tmp_path / which).unlink()
    os.mkfifo(tmp_path / which)
    async with program(tmp_path, "--kubeconfig", str(login)) as exporter:
        async with asyncio.timeout(PATIENCE):
            assert await exporter.process.wait() == 5
        (stopped,) = exporter.events("stopped")
        assert f"{tmp_path / which} is not a regular file" in stopped["why"]
