"""Practice on the demo: kubectl runs the commands that `explain` prints."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from exporter.errors import Exit
from tests.cluster import poll
from tests.cluster.ports import free_port
from tests.integration.alerts.test_runbooks import DEMO_COMMANDS, EVERY_COMMAND, Operator
from tests.support.documents import ROOT
from tests.support.kubectl_plugin import write_plugin


async def shell(command: str, **environment: str) -> str:
    """Run a command that must succeed; returns its output."""
    process = await asyncio.create_subprocess_exec(
        *("bash", "-euo", "pipefail", "-c", command),
        cwd=ROOT,
        env={**os.environ, **environment},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    assert process.returncode == 0, f"{command}\n{output.decode()}"
    return output.decode()


COMMANDS = ("    kubectl ", "    echo ")
"""The beginnings of the commands that `explain` prints."""


@asynccontextmanager
async def practice(tmp_path: Path) -> AsyncIterator[tuple[str, Path]]:
    """A demo at four times its speed: the URL of its exporter, and its kubeconfig."""
    port = free_port(2)
    url = f"http://127.0.0.1:{port}"
    demo = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "exporter", "demo", "--speed", "4"),
        *("--listen", url.removeprefix("http://")),
        cwd=ROOT,
        env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)},
        stdout=asyncio.subprocess.DEVNULL,
    )
    home = tmp_path / f"kubevirt-eviction-exporter-demo-{os.getuid()}"
    folder = home / f"127.0.0.1-{port}"
    try:
        await poll(lambda: _exists(folder / "kubeconfig"), within=120, what="the demo")
        assert (folder / "metrics").read_text() == f"http://127.0.0.1:{port + 1}"
        yield url, folder / "kubeconfig"
    finally:
        demo.terminate()
        await demo.wait()


async def _exists(path: Path) -> bool:
    return await asyncio.to_thread(path.exists)


async def find_stuck(session: aiohttp.ClientSession, url: str) -> list[dict[str, Any]] | None:
    """The stuck evacuations, once there are four."""
    async with session.get(f"{url}/v1/evacuations") as answer:
        evacuations = (await answer.json()).get("evacuations", [])
    evacuations = [evacuation for evacuation in evacuations if evacuation["stuck"]]
    return evacuations if len(evacuations) >= 4 else None


async def find_failing(session: aiohttp.ClientSession, url: str) -> dict[str, Any] | None:
    """A stuck evacuation whose attempts fail, while one runs and three others are stuck."""
    stuck = await find_stuck(session, url) or []
    failing = (row for row in stuck if row["name"].startswith("failing") and row["attempt"])
    return next(failing, None)


def operate_on(vm: dict[str, Any], kubeconfig: Path, tmp_path: Path, url: str) -> Operator:
    """The person who looks after a stuck VM of the demo."""
    write_plugin(tmp_path)
    return Operator(
        kubeconfig,
        tmp_path,
        NAMESPACE=vm["namespace"],
        NAME=vm["name"],
        NODE=vm["evacuationNodeName"],
        ATTEMPT=vm["attempt"]["name"] if vm["attempt"] else "none",
        KUBEVIRT_EVICTION_EXPORTER_URL=url,
        EXPORTER_NAMESPACE="kubevirt-eviction-exporter",
    )


@pytest.mark.timeout(300)
async def test_every_command_of_the_runbooks_can_be_tried(
    tmp_path: Path, prove: Callable[[str], None]
) -> None:
    """All commands work on the demo as they are written, except those marked as for a cluster."""
    async with practice(tmp_path) as (url, kubeconfig), aiohttp.ClientSession() as session:
        find = partial(find_failing, session, url)
        vm = await poll(find, within=120, what="a VM with an attempt among four stuck ones")
        operator = operate_on(vm, kubeconfig, tmp_path, url)
        for command in DEMO_COMMANDS:
            if command.startswith("kubectl taint "):
                await operator.run(command.removesuffix("-") + " --overwrite")
            code, output, complained = await operator.attempt(command)
            while '"$ATTEMPT"' in command and "(NotFound)" in complained:  # the next one runs
                vm = await poll(find, within=120, what="a VM with an attempt")
                operator = operate_on(vm, kubeconfig, tmp_path, url)
                code, output, complained = await operator.attempt(command)
            expected = {Exit.OK, Exit.CANNOT_BE_EMPTIED if " evictions node " in command else 0}
            assert code in expected, f"{command}\n{output}\n{complained}"
            assert output or not command.startswith("kubectl evictions "), command
    marked = len(EVERY_COMMAND) - len(DEMO_COMMANDS)
    prove(f"demo: {len(DEMO_COMMANDS)} commands of the runbooks work, {marked} are for a cluster")
    assert marked < len(EVERY_COMMAND) / 4


@pytest.mark.timeout(300)
async def test_each_stuck_vm_has_an_action_that_can_be_typed(
    tmp_path: Path, prove: Callable[[str], None]
) -> None:
    """For every stuck VM `explain` prints the next step, and commands that work."""
    async with practice(tmp_path) as (url, kubeconfig), aiohttp.ClientSession() as session:
        vms = await poll(partial(find_stuck, session, url), within=120, what="four stuck VMs")
        for vm in vms:
            key = f"{vm['namespace']}/{vm['name']}"
            operator = operate_on(vm, kubeconfig, tmp_path, url)
            explain = f"{sys.executable} -m exporter explain --url {url} {key}"
            text = await shell(explain)
            first, *lines = text.splitlines()
            step = next(line for line in lines if line.startswith("  next step  "))
            commands = [line.strip() for line in lines if line.startswith(COMMANDS)]
            command, cancel = commands[0], commands[-1]
            output = await operator.run(command)
            assert first.startswith(f"{key} is stuck: ")
            assert output.strip(), command
            if cancel != command:  # both are the same if the drain was given up
                await operator.run(cancel)
            is_over = partial(_is_over, session, f"{url}/v1/vmis/{key}", vm["requestedAt"])
            await poll(is_over, what=f"the end of the evacuation of {key}")
            done = (await shell(explain)).splitlines()[0]
            assert not done.startswith(f"{key} is stuck: its evacuation")
            came = "\n".join(output.splitlines()[:8])
            prove(f"{first}\n{step.strip()}\n$ {command}\n{came}\n$ {cancel}\n{done}\n")


async def _is_over(session: aiohttp.ClientSession, vmi: str, requested_at: str) -> bool:
    """Whether the evacuation that was requested at this time is over.

    The VM may stay stuck for an hour, because its last migrations failed, and the demo's
    descheduler may evict it again.
    """
    async with session.get(vmi) as answer:
        evacuation = (await answer.json())["evacuation"]
    return evacuation is None or evacuation["requestedAt"] != requested_at
