"""Failed attempts of an evacuation lengthen the cooldown, and `explain` says so."""

import time
from pathlib import Path

import pytest

from exporter.errors import Exit
from tests.cluster import VMIMS, VMIS, vmi, vmim
from tests.cluster.users import open_kubeconfig
from tests.support.api_servers import SimulatedStage
from tests.support.builders import rfc3339, transitions_json
from tests.support.commands import run_command
from tests.support.program import program


@pytest.mark.parametrize(
    ("counts", "cooldown", "text"),
    [
        (True, "= 8h, capped at 6h", "6 migrations, 5 of them failed attempts of one evacuation"),
        (False, "= 15m, cap 6h", "1 migration\n"),
    ],
)
async def test_explain_names_the_failures_that_count(
    simulated: SimulatedStage, tmp_path: Path, *, counts: bool, cooldown: str, text: str
) -> None:
    """Five failed attempts of an evacuation and its success are six hours, unless set otherwise."""
    admin, namespace = simulated.admin, await simulated.make_namespace()
    await admin.create(VMIS, vmi("db1", namespace))
    began = time.time() - 600
    for attempt in range(6):
        is_last, name = attempt == 5, f"evacuation-{attempt}"
        made = await admin.create(VMIMS, vmim(name, namespace, of="db1", evacuates="n1"))
        start, end = began + 60 * attempt, began + 60 * attempt + 30
        state = {
            "migrationUid": made["metadata"]["uid"],
            "sourceNode": "n1",
            "targetNode": "n2",
            "startTimestamp": rfc3339(start),
            "endTimestamp": rfc3339(end),
            "completed": True,
            "failed": not is_last,
        }
        phase = "Succeeded" if is_last else "Failed"
        phases = transitions_json(Scheduled=start, Running=start, **{phase: end})
        final = {"phase": phase, "phaseTransitionTimestamps": phases, "migrationState": state}
        await admin.merge_status(VMIMS, namespace, name, final)
        await admin.merge(VMIS, namespace, "db1", {"status": {"migrationState": state}})
    login = str(open_kubeconfig(tmp_path / "login", simulated.url))
    config = {"policy": {"countFailedMigrations": counts}}
    async with program(tmp_path, "--kubeconfig", login, config=config) as exporter:
        await exporter.ready()
        code, out, _ = await run_command("explain", "--url", exporter.query, f"{namespace}/db1")

    assert code == Exit.OK
    assert cooldown in out
    assert text in out
