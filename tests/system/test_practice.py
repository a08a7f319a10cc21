"""Practice on the demo: kubectl runs the commands that `explain` prints."""

import asyncio
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.cluster import find_binary, poll
from tests.cluster.ports import free_port
from tests.support.program import ROOT


async def shell(command: str, **environment: str) -> str:
    """Run a command that must succeed; returns its output."""
    process = await asyncio.create_subprocess_exec(
        *("bash", "-euo", "pipefail", "-c", command),
        cwd=ROOT,
        env={**os.environ, **environment},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    said, _ = await process.communicate()
    assert process.returncode == 0, f"{command}\n{said.decode()}"
    return said.decode()


COMMANDS = ("    kubectl ", "    echo ")
"""The beginnings of the commands that `explain` prints."""


@pytest.mark.timeout(300)
async def test_each_stuck_vm_has_an_action_that_can_be_typed(
    tmp_path: Path, prove: Callable[[str], None]
) -> None:
    """For every stuck VM `explain` prints the next step, and commands that work."""
    port = free_port(2)
    url = f"http://127.0.0.1:{port}"
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
    path = os.pathsep.join([str(find_binary("kubectl").parent), os.environ["PATH"]])
    demo = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "exporter", "demo", "--speed", "4"),
        *("--listen", url.removeprefix("http://")),
        cwd=ROOT,
        env=environment,
        stdout=asyncio.subprocess.DEVNULL,
    )
    try:
        async with aiohttp.ClientSession() as session:

            async def stuck() -> list[dict[str, Any]] | None:
                try:
                    async with session.get(f"{url}/v1/evacuations") as answer:
                        found = (await answer.json()).get("evacuations", [])
                except aiohttp.ClientError:
                    return None
                found = [one for one in found if one["stuck"]]
                return found if len(found) >= 4 else None

            vms = await poll(stuck, within=120, what="four stuck VMs")
            home = tmp_path / f"kubevirt-eviction-exporter-demo-{os.getuid()}"
            folder = home / f"127.0.0.1-{port}"
            kubeconfig = str(folder / "kubeconfig")
            assert (folder / "metrics").read_text() == f"http://127.0.0.1:{port + 1}"
            for vm in vms:
                key = f"{vm['namespace']}/{vm['name']}"
                explain = f"{sys.executable} -m exporter explain --url {url} {key}"
                text = await shell(explain)
                first, *lines = text.splitlines()
                step = next(one for one in lines if one.startswith("  next step  "))
                commands = [one.strip() for one in lines if one.startswith(COMMANDS)]
                command, cancel = commands[0], commands[-1]
                said = await shell(command, KUBECONFIG=kubeconfig, PATH=path)
                assert first.startswith(f"{key} is stuck: ")
                assert said.strip(), command
                if cancel != command:  # both are the same if the drain was given up
                    await shell(cancel, KUBECONFIG=kubeconfig, PATH=path)
                done = await poll(partial(_is_over, explain, first), what=f"{key} not stuck")
                came = "\n".join(said.splitlines()[:8])
                prove(f"{first}\n{step.strip()}\n$ {command}\n{came}\n$ {cancel}\n{done}\n")
    finally:
        demo.terminate()
        await demo.wait()


async def _is_over(explain: str, stuck: str) -> str | None:
    """The first line of `explain`, once it no longer says that the VM is stuck."""
    first = (await shell(explain)).splitlines()[0]
    return None if first.startswith(stuck.partition(":")[0]) else first
