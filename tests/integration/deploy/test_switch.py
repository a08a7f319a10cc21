"""One mode can replace another: nothing of the old mode is left, and one descheduler evicts."""

import itertools
import re
import signal
from pathlib import Path

import pytest

from tests.cluster import RealCluster, poll
from tests.cluster.processes import Process
from tests.generate.manifests import PLAIN, only, render
from tests.integration.deploy.server import Paths, account, applied, apply
from tests.integration.deploy.test_descheduler import arguments
from tests.support.documents import ROOT


MODES = ("base", PLAIN, "overlays/sidecar", "overlays/standalone")
LEADS = "Started leading"


@pytest.mark.parametrize(("before", "after"), [*itertools.permutations(MODES, 2)])
async def test_each_can_be_applied_over_any_other(
    cluster: RealCluster, before: str, after: str
) -> None:
    """After a change of mode the Deployment equals that of a new installation."""
    old, new = (only(render(folder), "Deployment") for folder in (before, after))
    path = (await Paths.discover(cluster.admin, [new])).of(new)
    async with applied(cluster.admin, [new]):
        wanted = await cluster.admin.request("GET", path)
    async with applied(cluster.admin, [old]):
        await apply(cluster.admin, [new])
        switched = await cluster.admin.request("GET", path)

    assert switched["spec"] == wanted["spec"]


@pytest.mark.parametrize("before", ["sidecar", "standalone", "admission"])
def test_the_documented_lines_remove_what_a_mode_leaves(before: str) -> None:
    """The documented lines remove everything of the old mode that still has an effect."""
    left = {(row["kind"].lower(), row["metadata"]["name"]) for row in render(f"overlays/{before}")}
    left -= {(row["kind"].lower(), row["metadata"]["name"]) for row in render("base")}
    left = {(kind, name) for kind, name in left if kind not in ("configmap", "clusterrole")}
    text = (ROOT / "docs" / "install.md").read_text()
    lines = re.findall(
        r"^kubectl (?:-n \S+ )?delete (\S+) (\S+) --ignore-not-found$", text, re.MULTILINE
    )
    assert left
    assert left <= {(kind, name) for kinds, name in lines for kind in kinds.split(",")}


async def test_only_one_of_two_deschedulers_evicts(cluster: RealCluster, tmp_path: Path) -> None:
    """With the rendered flags and roles a second descheduler waits until the first has stopped."""
    async with account(cluster, "overlays/sidecar") as user:
        processes = []
        for name in ("first", "second"):
            directory = tmp_path / name
            directory.mkdir()
            command = arguments(cluster.kubeconfig(user), directory)
            processes.append(Process(command, directory / "log"))
        first, second = processes
        try:
            first.start()
            await poll(lambda: _said(first, LEADS), what="the first leads")
            second.start()
            await poll(lambda: _said(second, "New leader elected"), what="the second knows")
            assert LEADS not in second.log.read_text()
            first.send(signal.SIGTERM)
            await poll(lambda: _said(second, LEADS), what="the second leads")
        finally:
            for process in processes:
                process.kill()


async def _said(process: Process, text: str) -> bool:
    assert process.running, process.tail()
    return text in process.log.read_text()
