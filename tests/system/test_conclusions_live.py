"""What the exporter concludes while a watch fails or an object is invalid."""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.cluster import PODS, VMIMS, VMIS, launcher_pod, poll, vmi, vmim
from tests.cluster.users import open_kubeconfig
from tests.support.api_servers import SimulatedStage
from tests.support.builders import rfc3339
from tests.support.evacuation_log import ask_evacuation
from tests.support.program import Program, program
from tests.system.test_evidence_live import requested, until_evacuation


STUCK = "kubevirt_vmi_evacuation_stuck"


@asynccontextmanager
async def running(
    stage: SimulatedStage, directory: Path, **config: object
) -> AsyncIterator[Program]:
    """Run the program with this configuration."""
    arguments = ("--kubeconfig", str(open_kubeconfig(directory / "kubeconfig", stage.url)))
    async with program(directory, *arguments, config=config) as exporter:
        await exporter.ready()
        yield exporter
        assert await exporter.end() == 0


def ended_attempt(phase: str, at: float, **state: str) -> dict[str, Any]:
    """The status of a VMIM that was handed off and reached its final phase at this time."""
    entered = [
        {"phase": "Scheduled", "phaseTransitionTimestamp": rfc3339(at - 60)},
        {"phase": phase, "phaseTransitionTimestamp": rfc3339(at)},
    ]
    return {"phase": phase, "phaseTransitionTimestamps": entered, "migrationState": state}


async def test_a_watch_of_vmims_that_fails(simulated: SimulatedStage, tmp_path: Path) -> None:
    """Without a watch of VMIMs the state is `unknown`, but after the hand-off `migrating`."""
    namespace = await simulated.make_namespace()
    admin = simulated.admin
    made = await admin.create(VMIS, vmi("db", namespace))
    await admin.create(PODS, launcher_pod(made))
    async with running(simulated, tmp_path) as exporter:
        simulated.server.answer(VMIMS.plural, 500)
        simulated.server.cut(VMIMS.plural)
        await admin.merge(VMIS, namespace, "db", {"status": requested("n1", time.time())})
        before = await until_evacuation(exporter, f"{namespace}/db")
        assert before["state"] == "unknown"
        assert "virtualmachineinstancemigrations" in before["nextStep"]

        state = {"migrationUid": "m", "sourceNode": "n1", "targetNode": "n2"}
        await admin.merge(VMIS, namespace, "db", {"status": {"migrationState": state}})

        async def handed_off() -> str | None:
            found = await ask_evacuation(exporter, f"{namespace}/db")
            assert found is not None
            return None if found["state"] == "unknown" else found["state"]

        assert await poll(handed_off, what="another state") == "migrating"

        simulated.server.recover()
        await until_evacuation(exporter, f"{namespace}/db", state="zombie_state")


async def test_a_dead_watch_of_vmis(simulated: SimulatedStage, tmp_path: Path) -> None:
    """While the watch of VMIs is dead, a stuck evacuation is `unknown`; `lastSeen` says stuck."""
    namespace = await simulated.make_namespace()
    admin = simulated.admin
    await admin.create(VMIS, vmi("db", namespace, status=requested("n1", time.time() - 7200)))
    kube = {"staleAfter": "2s", "deadAfter": "2s"}
    async with running(simulated, tmp_path, kube=kube) as exporter:
        await until_evacuation(exporter, f"{namespace}/db", stuckBy=["age"])
        assert await exporter.sample(STUCK, name="db") == 1

        simulated.server.answer(VMIS.plural, 500)
        simulated.server.cut(VMIS.plural)

        lost = await until_evacuation(exporter, f"{namespace}/db", state="unknown")
        assert lost["stuckBy"] == []
        assert lost["lastSeen"]["stuck"]
        assert "virtualmachineinstances" in lost["nextStep"]
        assert await exporter.sample(STUCK, name="db") == 0
        assert await exporter.sample("kubevirt_eviction_exporter_stuck_evacuations") == 0

        simulated.server.recover()
        back = await until_evacuation(exporter, f"{namespace}/db", stuckBy=["age"])
        assert back["lastSeen"] is None


async def test_a_migration_whose_vmim_is_final(simulated: SimulatedStage, tmp_path: Path) -> None:
    """A migration without an end time is over once its VMIM has been final for `kube.deadAfter`."""
    namespace = await simulated.make_namespace()
    admin = simulated.admin
    now = time.time()
    migration = await admin.create(VMIMS, vmim("m", namespace, of="db", evacuates="n1"))
    await admin.merge_status(VMIMS, namespace, "m", ended_attempt("Failed", now - 640))
    uid = migration["metadata"]["uid"]
    state = {"migrationUid": uid, "startTimestamp": rfc3339(now - 690)}
    status = requested("n1", now - 700, migrationState=state)
    await admin.create(VMIS, vmi("db", namespace, status=status))
    async with running(simulated, tmp_path) as exporter:
        found = await until_evacuation(exporter, f"{namespace}/db")
        assert found["state"] == "zombie_state"
        verdict = await exporter.verdict(namespace, "db", "filter", dryRun=True)
        assert verdict["allowed"]
        cooling = await exporter.verdict(namespace, "db", "preEviction", dryRun=True)
        assert cooling["reason"] == "cooldown"
        assert 200 < cooling["retryAfterSeconds"] <= 260


async def test_a_vmi_that_cannot_be_read_any_more(
    simulated: SimulatedStage, tmp_path: Path
) -> None:
    """A VMI that becomes unreadable is reported, and its block ends after `kube.deadAfter`."""
    namespace = await simulated.make_namespace()
    admin = simulated.admin
    state = {"migrationUid": "m", "startTimestamp": rfc3339(time.time())}
    await admin.create(VMIS, vmi("db", namespace, status={"migrationState": state}))
    async with running(simulated, tmp_path, kube={"deadAfter": "3s"}) as exporter:
        await exporter.until_verdict(namespace, "db", "filter", "migration_in_progress")

        await admin.merge(VMIS, namespace, "db", {"status": {"nodeName": {"not": "a name"}}})

        await exporter.until(
            f"/v1/vmis/{namespace}/db", lambda _, body: body.get("unreadableSince") is not None
        )
        held = await exporter.verdict(namespace, "db", "filter", dryRun=True)
        assert held["reason"] == "migration_in_progress"
        await exporter.until_verdict(namespace, "db", "filter", None)
        _, explained = await exporter.get(f"/v1/vmis/{namespace}/db")
        assert explained["rules"][0]["silenced"]
        assert not explained["stale"]
        assert exporter.events("object_invalid")[0]["name"] == "db"

        await admin.merge(VMIS, namespace, "db", {"status": {"nodeName": "n1"}})
        await exporter.until_verdict(namespace, "db", "filter", "migration_in_progress")
