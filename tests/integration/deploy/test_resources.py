"""A measurement shows that the memory request of the pods is enough."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster import NAMESPACES, PODS, VMIMS, VMIS, launcher_pod, namespace, vmi, vmim
from tests.cluster.users import open_kubeconfig
from tests.generate.manifests import containers, pod_templates, render
from tests.support.api_servers import SimulatedStage
from tests.support.builders import rfc3339
from tests.support.program import program


VMS = 1000
MIGRATIONS = 2
"""How many migrations each VM has."""
AS_LARGE_AS_REAL_ONES = {"annotations": {"padding": "x" * 6000}}


async def populate(stage: SimulatedStage) -> None:
    """Create VMs with pods and migrations, as large as KubeVirt's own objects."""
    now = int(time.time())
    at_once = asyncio.Semaphore(20)

    async def make(name: str) -> None:
        async with at_once:
            made = await stage.admin.create(VMIS, vmi(name, "many", metadata=AS_LARGE_AS_REAL_ONES))
            await stage.admin.create(PODS, launcher_pod(made, metadata=AS_LARGE_AS_REAL_ONES))
            for number in range(MIGRATIONS):
                phases = [
                    {"phase": phase, "phaseTransitionTimestamp": rfc3339(now - 3600 * (number + 1))}
                    for phase in ("Scheduled", "Succeeded")
                ]
                status = {"phase": "Succeeded", "phaseTransitionTimestamps": phases}
                migration = vmim(f"{name}-{number}", "many", of=name, status=status)
                await stage.admin.create(VMIMS, migration)

    await stage.admin.create(NAMESPACES, namespace("many"))
    await asyncio.gather(*(make(f"vm-{number}") for number in range(VMS)))


def peak_mebibytes(process: int) -> float:
    """The peak memory of a process."""
    status = Path(f"/proc/{process}/status").read_text(encoding="utf-8")
    (peak,) = (line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(peak.split()[1]) / 1024


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux tells memory in /proc")
async def test_the_request_holds_a_thousand_vms(
    simulated: SimulatedStage, tmp_path: Path, prove: Callable[[str], None]
) -> None:
    """With a thousand VMs the exporter stays below its memory request."""
    exporter = containers(pod_templates(render("base"))[0])["exporter"]
    requested = int(exporter["resources"]["requests"]["memory"].removesuffix("Mi"))
    await populate(simulated)

    async with program(
        tmp_path,
        *("--kubeconfig", str(open_kubeconfig(tmp_path / "kubeconfig", simulated.url))),
        environment={"PYTHONMALLOC": "pymalloc"},
    ) as running:
        await running.ready()
        objects = "kubevirt_eviction_exporter_objects"
        assert await running.sample(objects, resource=VMIMS.plural) == VMS * MIGRATIONS
        peak = peak_mebibytes(running.process.pid)

    prove(f"memory with {VMS} VMs and {VMS * MIGRATIONS} migrations: {peak:.0f} MiB at most")
    assert peak < requested
