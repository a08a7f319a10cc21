"""Which VMs have series of their own, with the whole program and a simulated API server."""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.cluster import VMIMS, VMIS, poll, vmi, vmim
from tests.cluster.users import open_kubeconfig
from tests.support.api_servers import SimulatedStage
from tests.support.builders import rfc3339, transitions_json
from tests.support.history_files import migrate
from tests.support.program import Program, program


FAILED_TARGET = "kubevirt_vmi_failed_target"
LEFT_OUT = "kubevirt_eviction_exporter_vmis_left_out"
VMS = {"evacuating": 2, "failing": 2, "moving": 2, "cooling": 4}
"""How many VMs of the test have series, by why they have them."""


@asynccontextmanager
async def exporting(
    stage: SimulatedStage, tmp_path: Path, limit: int = 20_000
) -> AsyncIterator[Program]:
    """An exporter with this `limits.vmiSeries`."""
    login = str(open_kubeconfig(tmp_path / "login", stage.url))
    config = {"limits": {"vmiSeries": limit}}
    async with program(tmp_path, "--kubeconfig", login, config=config) as exporter:
        await exporter.ready()
        yield exporter


async def fail(stage: SimulatedStage, namespace: str, name: str, *, target: str) -> None:
    """Let a migration of a VM to the node `target` fail now, after its hand-off."""
    made = await stage.admin.create(VMIMS, vmim(f"to-{target}-{name}", namespace, of=name))
    now = time.time()
    state = {
        "migrationUid": made["metadata"]["uid"],
        "sourceNode": "n1",
        "targetNode": target,
        "startTimestamp": rfc3339(now),
        "endTimestamp": rfc3339(now + 1),
        "completed": True,
        "failed": True,
    }
    phases = transitions_json(Scheduled=now, Running=now, Failed=now + 1)
    final = {"phase": "Failed", "phaseTransitionTimestamps": phases, "migrationState": state}
    await stage.admin.merge_status(VMIMS, namespace, made["metadata"]["name"], final)


async def read_names(exporter: Program) -> dict[str, set[str]]:
    """The VMs that have series, by metric."""
    _, text = await exporter.get("/metrics")
    return {
        family.name: names
        for family in text_string_to_metric_families(text)
        if (
            names := {sample.labels["name"] for sample in family.samples if "name" in sample.labels}
        )
    }


async def is_named(exporter: Program, target: str) -> bool:
    """Whether a VM has a series for this failed target."""
    return await exporter.sample(FAILED_TARGET, target=target) == 1


async def fill(stage: SimulatedStage, namespace: str, exporter: Program) -> None:
    """Make the VMs of `VMS`, and wait until the exporter knows what happens to them."""
    names = [f"{what}-{number}" for what, count in VMS.items() for number in range(count)]
    for name in names:
        await stage.admin.create(VMIS, vmi(name, namespace))
    await exporter.until(f"/v1/vmis/{namespace}/{names[-1]}", lambda status, _: status == 200)
    for name in names:
        match name.split("-")[0]:
            case "evacuating":
                marked = {"status": {"evacuationNodeName": "n1"}}
                await stage.admin.merge(VMIS, namespace, name, marked)
            case "failing":
                await fail(stage, namespace, name, target="n9")
            case "moving":
                await stage.admin.create(VMIMS, vmim(f"of-{name}", namespace, of=name))
            case _:
                await migrate(stage.admin, namespace, name, ago=[60.0])
    await exporter.until_verdict(namespace, names[-1], "preEviction", "cooldown")


@pytest.mark.parametrize("limit", [1, 3, 5, 10, 11])
async def test_one_set_of_vms_has_series(
    simulated: SimulatedStage, tmp_path: Path, limit: int
) -> None:
    """`limits.vmiSeries` admits the same VMs to all metrics, and all others are left out."""
    async with exporting(simulated, tmp_path, limit) as exporter:
        await fill(simulated, await simulated.make_namespace(), exporter)
        total, names = sum(VMS.values()), dict[str, set[str]]()

        async def is_complete() -> bool:
            nonlocal names
            names = await read_names(exporter)
            shown = set().union(*names.values())
            return len(shown) + await exporter.sample(LEFT_OUT) == total

        await poll(is_complete, what=f"{total} VMs with series or left out")

    assert len(set().union(*names.values())) == min(limit, total), names


async def test_a_recreated_vm_starts_without_series(
    simulated: SimulatedStage, tmp_path: Path
) -> None:
    """The series of a failed target ends with its VM, and the next VM of that name has none."""
    namespace = await simulated.make_namespace()
    async with exporting(simulated, tmp_path) as exporter:
        await simulated.admin.create(VMIS, vmi("db1", namespace))
        await exporter.until(f"/v1/vmis/{namespace}/db1", lambda status, _: status == 200)
        await fail(simulated, namespace, "db1", target="n9")
        await poll(lambda: is_named(exporter, "n9"), what="the failed target")
        await simulated.admin.delete(VMIS, namespace, "db1")
        await exporter.until(f"/v1/vmis/{namespace}/db1", lambda status, _: status == 404)
        assert await read_names(exporter) == {}
        await simulated.next_second()
        await simulated.admin.create(VMIS, vmi("db1", namespace))
        await exporter.until(f"/v1/vmis/{namespace}/db1", lambda status, _: status == 200)
        assert await read_names(exporter) == {}
        await fail(simulated, namespace, "db1", target="n8")
        await poll(lambda: is_named(exporter, "n8"), what="the new VM's failed target")
        assert await exporter.sample(FAILED_TARGET, target="n9") == 0


async def test_a_vm_that_has_stopped_has_no_series(
    simulated: SimulatedStage, tmp_path: Path
) -> None:
    """Once its VMI is in a final phase, a VM has no series, also not of a failed target."""
    namespace = await simulated.make_namespace()
    async with exporting(simulated, tmp_path) as exporter:
        await fill(simulated, namespace, exporter)
        for name in set().union(*(await read_names(exporter)).values()):
            await simulated.admin.merge(VMIS, namespace, name, {"status": {"phase": "Succeeded"}})

        async def is_empty() -> bool:
            return not await read_names(exporter)

        await poll(is_empty, what="no series of VMs")
        assert await exporter.sample(LEFT_OUT) == 0
