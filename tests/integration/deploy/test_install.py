"""Every command of the installation documents, and the caller's program, run as written."""

import asyncio
import base64
import os
import re
import shutil
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import pytest

from tests.cluster import NAMESPACES, VMIS, ApiError, RealCluster, find_binary, namespace, vmi
from tests.cluster.objects import Object
from tests.generate.manifests import (
    ADDITIONS,
    NAME,
    NAMESPACE,
    OVERLAYS,
    ROOT,
    TLS_SECRET,
    chart,
    render,
)
from tests.integration.deploy.secured import Caller, runnable, trust
from tests.integration.deploy.server import Paths
from tests.support.admission import Pair
from tests.support.documents import DEPLOY, INSTALL, bare, chapters, code_blocks, read
from tests.support.lives import ended_state
from tests.support.program import Program, program


OWN_CALLER = "A caller of your own"
FIVE_LINES = "In at most five lines"
OWN_OVERLAY = "An overlay of your own"
UPGRADE = "Upgrade, and change of mode"
UNINSTALL = "Uninstall"
TYPED_ELSEWHERE = {OWN_CALLER, FIVE_LINES, OWN_OVERLAY, UPGRADE, UNINSTALL}
SECRET = f"/api/v1/namespaces/{NAMESPACE}/secrets/{TLS_SECRET}"
SECTIONS = {**chapters(INSTALL), **chapters(DEPLOY)}


def fenced(section: str, language: str) -> list[str]:
    """The code blocks of one language in a section, as a reader would paste them."""
    return code_blocks(SECTIONS[section], language)


def commands(section: str) -> list[str]:
    """The shell commands of a section, in order."""
    return [line for block in fenced(section, "bash") for line in block.splitlines()]


TYPED = [
    section
    for section in SECTIONS
    if section not in TYPED_ELSEWHERE and any("kubectl" in command for command in commands(section))
]
"""The sections that install something, except those that have tests of their own."""


@pytest.fixture(scope="module")
async def exporter(
    fresh: RealCluster, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Program]:
    """The exporter behind the port-forward; two of its three VMs have just been migrated."""
    await fresh.namespace("shop")
    ended = ended_state("m", time.time() - 60, time.time() - 30)
    for name, place in (("db1", "shop"), ("churn-1", await fresh.namespace("bank"))):
        await fresh.admin.create(VMIS, vmi(name, place, status={"migrationState": ended}))
    await fresh.admin.create(VMIS, vmi("web", "shop"))
    kubeconfig = str(fresh.kubeconfig(fresh.exporter))
    async with program(tmp_path_factory.mktemp("exporter"), "--kubeconfig", kubeconfig) as exporter:
        await exporter.ready()
        yield exporter


async def shell(command: str, **environment: str) -> str:
    """Run a command that must succeed; returns what it prints."""
    process = await asyncio.create_subprocess_shell(
        command,
        cwd=ROOT,
        env={**os.environ, **environment},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    output, errors = await process.communicate()
    assert process.returncode == 0, f"{command}: {errors.decode()}"
    return output.decode()


async def play_controllers(cluster: RealCluster) -> None:
    """Mark every Deployment as available, because no pods run here."""
    for deployment in (await cluster.admin.request("GET", "/apis/apps/v1/deployments"))["items"]:
        replicas = deployment["spec"]["replicas"]
        counts = ("replicas", "updatedReplicas", "readyReplicas", "availableReplicas")
        status = dict.fromkeys(counts, replicas) | {
            "observedGeneration": deployment["metadata"]["generation"]
        }
        path = f"/apis/apps/v1/namespaces/{deployment['metadata']['namespace']}/deployments"
        await cluster.admin.request(
            "PATCH",
            f"{path}/{deployment['metadata']['name']}/status",
            json={"status": status},
            headers={"Content-Type": "application/merge-patch+json"},
        )


async def uninstall(cluster: RealCluster) -> None:
    """Delete the objects of all folders except the namespace, which no controller would remove."""
    with suppress(ApiError):
        await cluster.admin.send("DELETE", SECRET)
    for folder in (*OVERLAYS, *ADDITIONS):
        paths = await Paths.discover(cluster.admin, render(folder))
        for document in render(folder):
            if document["kind"] != "Namespace":
                with suppress(ApiError):
                    await cluster.admin.send("DELETE", paths.of(document))


def test_the_folders_are_those_of_deploy() -> None:
    """The table has every folder of deploy/ that can be applied, exactly once."""
    rows = re.findall(r"^\|.*\| (`deploy/[^|]*`) \|$", read(INSTALL), re.MULTILINE)
    folders = [bare(row) for row in rows]

    assert sorted(folders) == sorted(f"deploy/{folder}" for folder in (*OVERLAYS, *ADDITIONS))
    assert all((ROOT / folder / "kustomization.yaml").exists() for folder in folders)


class Reader:
    """A user who types the documents' commands into one shell."""

    def __init__(self, cluster: RealCluster, directory: Path) -> None:
        self._cluster = cluster
        kubectl, helm = find_binary("kubectl"), find_binary("helm")
        self.environment = {
            "KUBECONFIG": str(cluster.kubeconfig(cluster.administrator)),
            "TMPDIR": str(directory),
            "PATH": os.pathsep.join([str(kubectl.parent), str(helm.parent), os.environ["PATH"]]),
            **{f"HELM_{kind}_HOME": str(directory) for kind in ("CACHE", "CONFIG", "DATA")},
        }
        self.forwarded = ""

    async def follow(self, section: str, forward: Callable[[], Awaitable[str]]) -> None:
        """Run every command of a section; `forward` simulates kubectl port-forward."""
        for command in commands(section):
            if " port-forward " in command:
                assert command.endswith(" 19810:9810 &")
                self.forwarded = await forward()
            elif command.startswith("export KUBEVIRT_EVICTION_EXPORTER_URL="):
                assert re.sub("[0-9]+$", "19810", self.forwarded) == command.partition("=")[2]
                self.environment["KUBEVIRT_EVICTION_EXPORTER_URL"] = self.forwarded
            elif command.startswith("curl") and not shutil.which("curl"):
                pytest.skip(f"there is no curl for: {command}")
            else:
                output = await self.type(command)
                if command.startswith("curl"):
                    expected = (
                        "db1",
                        '"churn-1","known":true',
                        "descheduler_kubevirt",
                        '"evacuations"',
                    )
                    assert any(text in output for text in expected)

    async def type(self, command: str) -> str:
        """Run a command with simulated controllers; later commands see what it exports."""
        await play_controllers(self._cluster)
        typed = re.sub(r"descheduler/descheduler --version \S+", str(chart()), command)
        if typed.startswith("export "):
            name = typed.removeprefix("export ").partition("=")[0]
            typed = f'{typed}; printf %s "${name}"'
            self.environment[name] = await shell(typed, **self.environment)
            return ""
        return await shell(typed, **self.environment)


def mounted(secret: Object, directory: Path) -> Pair:
    """The Secret's key pair, as the kubelet writes it to a volume."""
    directory.mkdir()
    for name, text in secret["data"].items():
        (directory / name).write_bytes(base64.b64decode(text))
    return Pair(*(directory / name for name in ("tls.crt", "tls.key", "ca.crt")))


@pytest.mark.parametrize("section", TYPED)
async def test_every_command_runs_as_written(
    fresh: RealCluster, exporter: Program, section: str, tmp_path: Path
) -> None:
    """Every command runs as written on a real API server; pods and port-forward are simulated."""
    reader = Reader(fresh, tmp_path)

    async def forward() -> str:
        return exporter.query

    await reader.follow(section, forward)
    await uninstall(fresh)


async def test_a_caller_of_one_s_own_is_answered(
    fresh: RealCluster, exporter: Program, tmp_path: Path
) -> None:
    """All commands from the certificate on run as written, and the caller's program gets answers.

    The program leaves out the VM that has just been moved. Without an answer it lists both VMs.
    """
    await exporter.ready()  # the exporter knows the VMs
    await fresh.admin.create(NAMESPACES, namespace("my-tools"))
    reader = Reader(fresh, tmp_path)
    async with AsyncExitStack() as running:

        async def forward() -> str:
            pair = mounted(await fresh.admin.request("GET", SECRET), tmp_path / "mounted")
            user = await fresh.account(NAMESPACE, NAME)
            installed = await running.enter_async_context(
                program(
                    tmp_path,
                    *("--kubeconfig", str(fresh.kubeconfig(user))),
                    config=runnable("overlays/standalone", pair),
                )
            )
            await Caller(installed, trust(pair), host=f"{NAME}.{NAMESPACE}.svc").ready()
            return installed.query.replace("127.0.0.1", "localhost")

        await reader.follow("A certificate first", forward)
        await reader.follow(OWN_CALLER, forward)

        (text,) = fenced(OWN_CALLER, "python")
        assert await run(text, reader.environment) == ("shop/web\n", "")
        for wrong in (
            {"KUBEVIRT_EVICTION_EXPORTER_URL": "https://localhost:1"},
            {"CALLER": str(tmp_path)},
        ):
            answered, complaint = await run(text, {**reader.environment, **wrong})
            assert answered == "shop/db1\nshop/web\n"
            assert "not asked" in complaint
    await uninstall(fresh)


async def run(text: str, environment: Mapping[str, str]) -> tuple[str, str]:
    """Run the caller's program; returns its standard output and standard error."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-W", "error", "-c", text),
        env={**os.environ, **environment},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    output, errors = await process.communicate(b"shop/db1\nshop/web\n")
    assert process.returncode == 0, errors
    return output.decode(), errors.decode()
