"""The whole program as a process, with the simulated or with a real API server."""

import time
from pathlib import Path

from exporter.kube.login import Login
from tests.cluster import PODS, VMIMS, VMIS, launcher_pod, vmi, vmim
from tests.cluster.users import open_kubeconfig
from tests.support.api_servers import Stage
from tests.support.builders import rfc3339
from tests.support.lives import ended_state
from tests.support.program import Program, program


BLOCKS = "descheduler_kubevirt_eviction_blocks_total"
COOLDOWNS = "descheduler_kubevirt_effective_cooldown_seconds"


def kubeconfig(login: Login, directory: Path) -> str:
    """The file of these credentials."""
    return str(login.kubeconfig or open_kubeconfig(directory / "kubeconfig", login.url or ""))


async def test_a_migration_from_request_to_cooldown(stage: Stage, tmp_path: Path) -> None:
    """Every phase of a migration has the right verdict and counts."""
    namespace = await stage.make_namespace()
    admin = stage.admin
    made = await admin.create(VMIS, vmi("db", namespace))
    await admin.create(PODS, launcher_pod(made))
    async with program(tmp_path, "--kubeconfig", kubeconfig(stage.login, tmp_path)) as exporter:
        await exporter.ready()
        await exporter.until_verdict(namespace, "db", "filter", None)

        migration = await admin.create(VMIMS, vmim("m1", namespace, of="db"))
        await exporter.until_verdict(namespace, "db", "filter", "migration_in_progress")

        uid = migration["metadata"]["uid"]
        now = int(time.time())
        handed_off = {"migrationUid": uid, "sourceNode": "n1", "targetNode": "n2"}
        await admin.merge(VMIS, namespace, "db", {"status": {"migrationState": handed_off}})
        await admin.merge_status(VMIMS, namespace, "m1", {"phase": "Scheduled"})
        verdict = await exporter.verdict(namespace, "db", "preEviction", dryRun=True)
        assert verdict["allowed"]
        assert verdict["effectiveCooldownSeconds"] is None

        running = {**handed_off, "startTimestamp": rfc3339(now - 1200)}
        await admin.merge(VMIS, namespace, "db", {"status": {"migrationState": running}})
        await admin.merge_status(VMIMS, namespace, "m1", {"phase": "Running"})
        body = await exporter.until(
            f"/v1/vmis/{namespace}/db",
            lambda _, b: any(r["rule"] == "running_migration" and r["blocks"] for r in b["rules"]),
        )
        assert body["verdicts"]["filter"]["reason"] == "migration_in_progress"
        assert body["verdicts"]["preEviction"]["allowed"]

        before = await counts(exporter, namespace)
        blocked = await exporter.verdict(namespace, "db", "filter")
        assert blocked["reason"] == "migration_in_progress"
        assert blocked["notBefore"] is None
        after = await counts(exporter, namespace)
        assert after == {**before, "migration_in_progress": before["migration_in_progress"] + 1}

        ended = {**running, "endTimestamp": rfc3339(now), "completed": True}
        status = {"migrationState": ended, "nodeName": "n2"}
        await admin.merge(VMIS, namespace, "db", {"status": status})
        final = {"phase": "Succeeded", "migrationState": ended}
        await admin.merge_status(VMIMS, namespace, "m1", final)
        await exporter.until_verdict(namespace, "db", "filter", None)
        await exporter.until_verdict(namespace, "db", "preEviction", "cooldown")

        before = await counts(exporter, namespace)
        verdict = await exporter.verdict(namespace, "db", "preEviction")
        assert verdict["reason"] == "cooldown"
        assert verdict["effectiveCooldownSeconds"] == 1200, "as long as the migration took"
        assert verdict["notBefore"] == rfc3339(now + 1200)
        assert 0 < verdict["retryAfterSeconds"] <= 1200
        assert verdict["migrationsInWindow"] == 1
        after = await counts(exporter, namespace)
        assert after == {**before, "cooldown": before["cooldown"] + 1, "n": before["n"] + 1,
                         "sum": before["sum"] + 1200}  # fmt: skip
        assert await exporter.sample(BLOCKS, namespace=namespace, node="n2") == 1

        await admin.delete(VMIS, namespace, "db")
        await exporter.until(f"/v1/vmis/{namespace}/db", lambda status, _: status == 404)
        assert (await exporter.verdict(namespace, "db"))["mismatch"] == "unknown"
        assert await exporter.end() == 0


async def test_outlives_a_restart_and_a_compaction_of_the_server(
    stage: Stage, tmp_path: Path
) -> None:
    """After a restart and a compaction (410) of the API server, the verdicts stay right."""
    namespace = await stage.make_namespace()
    admin = stage.admin
    now = int(time.time())
    state = ended_state("m-1", now - 100, now - 40)
    await admin.create(VMIS, vmi("a", namespace, status={"migrationState": state}))
    await admin.create(VMIS, vmi("b", namespace))
    async with program(tmp_path, "--kubeconfig", kubeconfig(stage.login, tmp_path)) as exporter:
        await exporter.ready()
        first = await exporter.until_verdict(namespace, "a", "preEviction", "cooldown")

        await stage.restart()
        await admin.delete(VMIS, namespace, "b")
        await exporter.until(f"/v1/vmis/{namespace}/b", lambda status, _: status == 404)
        # The deletion may have been seen in a list. What is created now comes by the watch.
        await admin.create(VMIS, vmi("d", namespace))
        await exporter.until(f"/v1/vmis/{namespace}/d", lambda status, _: status == 200)

        await stage.force_gone()
        await admin.create(VMIS, vmi("c", namespace))
        await exporter.until(f"/v1/vmis/{namespace}/c", lambda status, _: status == 200)
        broke = exporter.events("watch_broke")
        assert any(event["kind"] == "expired" and "410" in event["why"] for event in broke)

        last = await exporter.verdict(namespace, "a", "preEviction", dryRun=True)
        assert last["notBefore"] == first["notBefore"] == rfc3339(now - 40 + 900)
        assert last["migrationsInWindow"] == 1
        assert await exporter.end() == 0


async def test_runs_on_list_and_watch_of_vmis_alone(stage: Stage, tmp_path: Path) -> None:
    """With permission for VMIs only, the exporter reports each other resource once and goes on."""
    login = await stage.limited_login([VMIS])
    async with program(tmp_path, "--kubeconfig", kubeconfig(login, tmp_path)) as exporter:
        await exporter.ready()
        await exporter.until("/v1/status", lambda _, body: len(body["blindSpots"]) == 5)
        # Nobody has asked for Evictions, so nobody is warned that they cannot be seen.
        rejected = exporter.events("resource_rejected")
        refused = [event["resource"] for event in rejected if event["level"] == "warning"]
        assert sorted(refused) == sorted(
            [VMIMS.plural, PODS.plural, "kubevirts", "nodes", "poddisruptionbudgets"]
        )
        missing = "kubevirt_eviction_exporter_permission_missing"
        assert await exporter.sample(missing, resource=PODS.plural) == 1
        assert await exporter.sample(missing, resource=VMIS.plural) == 0


async def test_takes_the_kubeconfig_of_the_environment(stage: Stage, tmp_path: Path) -> None:
    """The exporter finds its kubeconfig through KUBECONFIG, as kubectl does."""
    async with program(
        tmp_path, environment={"KUBECONFIG": kubeconfig(stage.login, tmp_path)}
    ) as exporter:
        await exporter.ready()


async def counts(exporter: Program, namespace: str) -> dict[str, float]:
    """The number of blocks by reason, and the count and sum of the cooldowns."""
    by_reason = {
        reason: await exporter.sample(BLOCKS, reason=reason, namespace=namespace)
        for reason in ("migration_in_progress", "evacuation_in_progress", "cooldown")
    }
    return {
        **by_reason,
        "n": await exporter.sample(COOLDOWNS + "_count"),
        "sum": await exporter.sample(COOLDOWNS + "_sum"),
    }
