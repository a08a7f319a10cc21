"""Moves without an evacuation, with KubeVirt's own controllers."""

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from tests.cluster import VMIMS, vmim
from tests.cluster.resources import QUOTAS, VMIS
from tests.cluster.rig import Rig
from tests.support.program import Program, program


SETTINGS = {"stuck": {"after": "20s", "migrationTimeout": "20s"}}
FINALIZER = "example.com/snapshot"
Prove = Callable[[str], None]


@pytest.fixture(scope="module")
async def rig() -> AsyncIterator[Rig]:
    """KubeVirt's servers and three nodes."""
    async with Rig.opened() as rig:
        yield rig


@pytest.fixture(scope="module")
async def exporter(rig: Rig, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Program]:
    """An exporter that watches the rig."""
    async with program(tmp_path_factory.mktemp("moves"), *rig.login, config=SETTINGS) as exporter:
        await exporter.ready()
        yield exporter


async def test_a_user_s_migration_over_quota(rig: Rig, exporter: Program, prove: Prove) -> None:
    """A person's VMIM that a quota refuses is a stuck move, until the quota is raised."""
    admin, hard = rig.cluster.admin, {"hard": {"pods": "1"}}
    quota: dict[str, Any] = {
        "apiVersion": "v1",
        "kind": QUOTAS.kind,
        "metadata": {"name": "one-pod", "namespace": "quota"},
        "spec": hard,
        # No controller counts the pods here, so the test writes the count.
        "status": hard | {"used": {"pods": "1"}},
    }
    async with rig.vmi("quota/db1"):
        await admin.create(QUOTAS, quota)
        await admin.create(VMIMS, vmim("by-hand", "quota", of="db1"))
        vmi_answer = await exporter.until(
            "/v1/vmis/quota/db1",
            lambda status, body: status == 200 and body["move"] and body["move"]["stuck"],
        )
        stuck = await exporter.sample("kubevirt_vmi_migration_stuck", namespace="quota")
        verdict = await exporter.verdict("quota", "db1", dryRun=True)
        await admin.delete(QUOTAS, "quota", "one-pod")
        await exporter.until(
            "/v1/vmis/quota/db1", lambda _, body: body["move"] is None and body["migrations"]
        )

    move = vmi_answer["move"]
    prove(f"rig: a user's migration: {move['state']}, {move['trigger']}; {move['nextStep']}")
    assert (move["state"], move["trigger"]) == ("quota", "manual")
    assert move["nextStep"].startswith("Raise the ResourceQuota")
    assert move["runbook"].startswith("KubeVirtEvacuationStuck#")
    assert (vmi_answer["drain"], vmi_answer["evacuation"]) == ("fails", None)
    assert (stuck, verdict["stuck"]) == (1, True)


async def test_a_deletion_that_hangs(rig: Rig, exporter: Program, prove: Prove) -> None:
    """A VM in deletion whose node does not answer stays, and its evacuation gets stuck."""
    admin, key = rig.cluster.admin, "deleted/db1"
    await rig.cluster.control.namespace("deleted")
    scene = await rig.start(key, node="node-2")
    held = [*scene.vmi["metadata"]["finalizers"], FINALIZER]
    await admin.merge(VMIS, "deleted", "db1", {"metadata": {"finalizers": held}})
    rig.player.turn_off("node-2")
    await admin.delete(VMIS, "deleted", "db1")
    await exporter.until(f"/v1/vmis/{key}", lambda _, body: body["drain"] == "ends")
    await exporter.until(f"/v1/vmis/{key}", lambda _, body: body["drain"] == "stays")
    await rig.drain(key)
    vmi_answer = await exporter.until(
        f"/v1/vmis/{key}", lambda _, body: body["evacuation"] and body["evacuation"]["stuck"]
    )
    _, node = await exporter.get("/v1/nodes/node-2")
    rig.player.turn_on("node-2")
    ended = await rig.until(key, lambda scene: scene.vmi["status"]["phase"] != "Running")
    over = await exporter.until(f"/v1/vmis/{key}", lambda _, body: body["evacuation"] is None)
    await admin.merge(VMIS, "deleted", "db1", {"metadata": {"finalizers": None}})

    now = vmi_answer["evacuation"]
    why = [f"{reason['reason']}: {reason['message']}" for reason in now["why"]]
    prove(f"rig: a deletion that hangs: {now['state']}; {'; '.join(why)}; {now['nextStep']}")
    assert now["state"] == "shutting_down"
    assert FINALIZER in str(why)
    assert now["nextStep"].startswith("Remove what holds the VM's deletion")
    assert (node["canBeEmptied"], over["drain"]) == (False, None)
    assert FINALIZER in ended.vmi["metadata"]["finalizers"]
