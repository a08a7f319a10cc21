"""The README's way to an installation: every command and the program run as they are written."""

import asyncio
import os
import re
import sys
import textwrap
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.cluster import NAMESPACES, VMIS, ApiError, RealCluster, find_binary, namespace, vmi
from tests.cluster.objects import Object
from tests.deploy.files import ADDITIONS, NAME, NAMESPACE, OVERLAYS, ROOT, chart, render
from tests.deploy.server import Paths, apply
from tests.program import Program, program
from tests.scripts import rfc3339
from tests.test_readme import bare, chapter, table


TEXT = chapter("Put it beside your descheduler")
SECTIONS = dict(re.findall(r"^### (.*?)\n(.*?)(?=^### |\Z)", TEXT, re.DOTALL | re.MULTILINE))


def fenced(section: str, language: str) -> list[str]:
    """The fences of one language in a section, as they would be pasted."""
    found = re.findall(
        rf"^ *```{language}\n(.*?)^ *```$", SECTIONS[section], re.DOTALL | re.MULTILINE
    )
    return [textwrap.dedent(one) for one in found]


def commands(section: str) -> list[str]:
    """The shell commands of a section, in order."""
    return [line for block in fenced(section, "bash") for line in block.splitlines()]


@pytest.fixture(scope="module")
async def exporter(
    fresh: RealCluster, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Program]:
    """The exporter at the end of the port-forward, and one VM that has just been moved."""
    await fresh.namespace("shop")
    now = int(time.time())
    ended = {"migrationUid": "m", "startTimestamp": rfc3339(now - 60)}
    ended["endTimestamp"] = rfc3339(now - 30)
    await fresh.admin.create(VMIS, vmi("db1", "shop", status={"migrationState": ended}))
    await fresh.admin.create(VMIS, vmi("web", "shop"))
    kubeconfig = str(fresh.kubeconfig(fresh.exporter))
    async with program(tmp_path_factory.mktemp("exporter"), "--kubeconfig", kubeconfig) as exporter:
        await exporter.ready()
        yield exporter


async def shell(command: str, **environment: str) -> str:
    """What a command prints; it has to succeed."""
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
    """Nobody runs pods here: every Deployment says that its pods are up."""
    for one in (await cluster.admin.request("GET", "/apis/apps/v1/deployments"))["items"]:
        replicas = one["spec"]["replicas"]
        counts = ("replicas", "updatedReplicas", "readyReplicas", "availableReplicas")
        status = dict.fromkeys(counts, replicas) | {
            "observedGeneration": one["metadata"]["generation"]
        }
        path = f"/apis/apps/v1/namespaces/{one['metadata']['namespace']}/deployments"
        await cluster.admin.request(
            "PATCH",
            f"{path}/{one['metadata']['name']}/status",
            json={"status": status},
            headers={"Content-Type": "application/merge-patch+json"},
        )


async def uninstall(cluster: RealCluster) -> None:
    """Delete all that any of our folders makes but the namespace, which nobody would empty here."""
    for folder in (*OVERLAYS, *ADDITIONS):
        paths = await Paths.discover(cluster.admin, render(folder))
        for one in render(folder):
            if one["kind"] != "Namespace":
                with suppress(ApiError):
                    await cluster.admin.send("DELETE", paths.of(one))


def stock_descheduler() -> Object:
    """The Deployment that step 2 stops."""
    labels = {"app": "descheduler"}
    pod = {"containers": [{"name": "descheduler", "image": "descheduler"}]}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "descheduler", "namespace": "kube-system"},
        "spec": {
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    }


def test_the_folders_are_those_of_deploy() -> None:
    """The table has every folder that can be applied, once."""
    rows = [line for line in TEXT.split("### ")[0].splitlines() if line.startswith("| `")]
    told = [bare(row.split("|")[1].strip()) for row in rows]

    assert sorted(told) == sorted(f"deploy/{folder}" for folder in (*OVERLAYS, *ADDITIONS))
    assert all((ROOT / folder / "kustomization.yaml").exists() for folder in told)


@pytest.mark.parametrize("section", ["Stock Kubernetes", "OpenShift", "A caller of your own"])
def test_there_are_five_steps(section: str) -> None:
    """One to five, and no more."""
    steps = re.findall(r"^(\d)\. ", SECTIONS[section], re.MULTILINE)

    assert steps == ["1", "2", "3", "4", "5"]


def test_the_files_named_are_there() -> None:
    """Every file and folder of ours that the text names exists."""
    named = set(re.findall(r"`((?:deploy/|Dockerfile)[\w./-]*)`", TEXT))

    assert named
    assert all((ROOT / one).exists() for one in named), named


@pytest.mark.parametrize("section", list(SECTIONS))
async def test_every_command_runs_as_written(
    fresh: RealCluster, exporter: Program, section: str, tmp_path: Path
) -> None:
    """Against a real API server; the pods, the port-forward and the chart's address are played."""
    kubectl, helm = find_binary("kubectl"), find_binary("helm")
    if section == "Stock Kubernetes":
        await apply(fresh.admin, [stock_descheduler()])
    if section == "A caller of your own":
        await fresh.admin.create(NAMESPACES, namespace("my-tools"))
    environment = {
        "KUBECONFIG": str(fresh.kubeconfig(fresh.administrator)),
        "PATH": os.pathsep.join([str(kubectl.parent), str(helm.parent), os.environ["PATH"]]),
        "EXPORTER": exporter.query,
        **{f"HELM_{kind}_HOME": str(tmp_path) for kind in ("CACHE", "CONFIG", "DATA")},
    }
    played = ("kubectl -n kubevirt-eviction-exporter port-forward ", "export EXPORTER=")

    for command in commands(section):
        if command.startswith(played):
            assert "9810" in command
            continue
        await play_controllers(fresh)
        typed = re.sub(r"descheduler/descheduler --version \S+", str(chart()), command)
        output = await shell(typed, **environment)
        if command.startswith("curl"):
            assert "db1" in output or "descheduler_kubevirt" in output
    await uninstall(fresh)


async def test_the_caller_prints_what_may_be_moved(exporter: Program) -> None:
    """The program of step 5 leaves out the VM that has just been moved; unheard, it does not."""
    (text,) = fenced("A caller of your own", "python")

    async def run(url: str) -> tuple[str, str]:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-W", "error", "-c", text),
            env={**os.environ, "EXPORTER": url},
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        output, errors = await process.communicate(b"shop/db1\nshop/web\n")
        assert process.returncode == 0, errors
        return output.decode(), errors.decode()

    assert await run(exporter.query) == ("shop/web\n", "")
    unheard = await run("http://127.0.0.1:1")
    assert unheard[0] == "shop/db1\nshop/web\n"
    assert "not asked" in unheard[1]


def test_the_caller_is_short() -> None:
    """About twenty lines that somebody would paste."""
    (text,) = fenced("A caller of your own", "python")

    assert len([line for line in text.splitlines() if line.strip()]) <= 21


def test_the_places_are_the_manifests() -> None:
    """Namespace, Service and labels in the text are those that are rendered."""
    objects = "".join(str(one) for one in render("overlays/standalone"))

    assert f"http://{NAME}.{NAMESPACE}:9810" in TEXT
    for label in re.findall(r"kubevirt-eviction-exporter/(?:caller|scraper)(?==true)", TEXT):
        assert f"'{label}': 'true'" in objects
    assert table("Put it beside your descheduler")
