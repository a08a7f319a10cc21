"""Evidence that is outdated or belongs to another object, on both API servers."""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import KUBEVIRTS, PODS, VMIMS, VMIS, launcher_pod, poll, vmi, vmim
from tests.cluster.objects import Object
from tests.cluster.users import open_kubeconfig
from tests.support.api_servers import Stage
from tests.support.builders import rfc3339
from tests.support.evacuation_log import ask_evacuation
from tests.support.program import Program, program
from tests.support.relay import Gate


ALLOWED = "descheduler_kubevirt_vmis"


@asynccontextmanager
async def exporting(
    stage: Stage, directory: Path, *, through: str | None = None
) -> AsyncIterator[Program]:
    """Run the program on this stage; `through` is another address of the server."""
    url = stage.url if through is None else through
    login = stage.login_at(url).kubeconfig or open_kubeconfig(directory / "kubeconfig", url)
    async with program(directory, "--kubeconfig", str(login)) as exporter:
        await exporter.ready()
        yield exporter
        assert await exporter.end() == 0


def requested(node: str, at: float | None, **status: Any) -> Object:
    """The status of a migratable VMI that must leave its node."""
    conditions = [{"type": "LiveMigratable", "status": "True"}]
    if at is not None:
        condition = {"type": "EvictionRequested", "status": "True"}
        conditions.append(condition | {"lastTransitionTime": rfc3339(at)})
    return {"nodeName": node, "evacuationNodeName": node, "conditions": conditions, **status}


async def until_evacuation(exporter: Program, key: str, **fields: object) -> dict[str, Any]:
    """Wait until the evacuation of a VM has these fields; returns it."""

    async def ask() -> dict[str, Any] | None:
        found = await ask_evacuation(exporter, key)
        return found if found is not None and found.items() >= fields.items() else None

    return await poll(ask, what=f"evacuation of {key} with {fields}")


@pytest.mark.parametrize("phase", ["Succeeded", "Failed"])
async def test_a_vmi_that_ends_while_it_evacuates(stage: Stage, tmp_path: Path, phase: str) -> None:
    """The evacuation of a VMI that ended is no longer reported, and no rule blocks the VMI."""
    namespace = await stage.make_namespace()
    node = f"node-of-{namespace}"
    admin = stage.admin
    now = time.time()
    state = {"migrationUid": "m", "startTimestamp": rfc3339(now - 60)}
    status = requested(node, now - 7200, migrationState=state)
    made = await admin.create(VMIS, vmi("db", namespace, node=node, status=status))
    await admin.create(PODS, launcher_pod(made))
    await admin.create(VMIMS, vmim("m", namespace, of="db", evacuates=node))
    await admin.create(VMIS, vmi("web", namespace, node=node))
    async with exporting(stage, tmp_path) as exporter:
        await until_evacuation(exporter, f"{namespace}/db")
        await exporter.until_verdict(namespace, "db", "filter", "migration_in_progress")
        assert await exporter.sample(ALLOWED, node=node) == 2

        await admin.merge(VMIS, namespace, "db", {"status": {"phase": phase}})

        await exporter.until_verdict(namespace, "db", "filter", None)
        assert await ask_evacuation(exporter, f"{namespace}/db") is None
        _, metrics = await exporter.get("/metrics")
        assert f'namespace="{namespace}",name="db"' not in metrics
        assert await exporter.sample(ALLOWED, node=node) == 1
        assert await exporter.sample(ALLOWED, node=node, verdict="allowed") == 1
        _, explained = await exporter.get(f"/v1/vmis/{namespace}/db")
        assert explained["phase"] == phase
        assert explained["evacuation"] is None
        assert not any(rule["blocks"] for rule in explained["rules"])
        verdict = await exporter.verdict(namespace, "db", dryRun=True)
        assert (verdict["known"], verdict["allowed"]) == (True, True)


async def test_an_evacuation_that_is_requested_anew_in_a_gap(stage: Stage, tmp_path: Path) -> None:
    """If a marker is cleared and set again during a gap in the watch, a new evacuation begins."""
    namespace = await stage.make_namespace()
    key = f"{namespace}/db"
    admin = stage.admin
    now = int(time.time())
    await admin.create(VMIS, vmi("db", namespace, status=requested("n1", now - 7200)))
    await admin.create(VMIMS, vmim("old", namespace, of="db", evacuates="n1"))
    failed = {"phase": "Failed", "phaseTransitionTimestamp": rfc3339(now - 3600)}
    status = {"phase": "Failed", "phaseTransitionTimestamps": [failed]}
    await admin.merge_status(VMIMS, namespace, "old", status)
    async with Gate(stage.url) as gate, exporting(stage, tmp_path, through=gate.url) as exporter:
        before = await until_evacuation(exporter, key, failedAttempts=1)
        assert before["requestedAt"] == rfc3339(now - 7200)
        assert before["stuckBy"] == ["age"]

        await gate.shut()
        await admin.merge(VMIS, namespace, "db", {"status": {"evacuationNodeName": ""}})
        await admin.merge(VMIS, namespace, "db", {"status": requested("n1", now - 60)})
        await stage.force_gone()
        gate.open()

        after = await until_evacuation(exporter, key, requestedAt=rfc3339(now - 60))
        assert (after["stuckBy"], after["failedAttempts"]) == ([], 0)


async def test_an_attempt_of_an_older_request_says_nothing_of_who_asked(
    stage: Stage, tmp_path: Path
) -> None:
    """A failed attempt of an earlier drain does not change the source of the next request."""
    namespace = await stage.make_namespace()
    key = f"{namespace}/db"
    admin = stage.admin
    await admin.create(VMIS, vmi("db", namespace))
    await admin.create(VMIMS, vmim("drain", namespace, of="db", evacuates="n1"))
    await admin.merge_status(VMIMS, namespace, "drain", {"phase": "Failed"})
    created = time.time()

    async def is_older() -> bool:
        return time.time() > created + 7

    await poll(is_older, what="the attempt is old")
    by_descheduler = {"metadata": {"annotations": {"kubevirt.io/eviction-source": "descheduler"}}}
    marked = {"status": requested("n1", time.time()), **by_descheduler}
    async with exporting(stage, tmp_path) as exporter:
        await admin.merge(VMIS, namespace, "db", marked)
        await until_evacuation(exporter, key, source="descheduler")

        await admin.create(VMIMS, vmim("next", namespace, of="db", evacuates="n1"))
        await until_evacuation(exporter, key, source="other")


async def test_a_migration_counts_against_the_node_that_it_leaves(
    stage: Stage, tmp_path: Path
) -> None:
    """A VM that has just migrated counts towards its source node's limit until its VMIM ends."""
    namespace = await stage.make_namespace()
    source, target = f"source-of-{namespace}", f"target-of-{namespace}"
    admin = stage.admin
    limits = {"parallelOutboundMigrationsPerNode": 1, "parallelMigrationsPerCluster": 50}
    await admin.create(
        KUBEVIRTS,
        {
            "apiVersion": KUBEVIRTS.api_version,
            "kind": KUBEVIRTS.kind,
            "metadata": {"name": "kubevirt", "namespace": namespace},
            "spec": {"configuration": {"migrations": limits}},
        },
    )
    now = time.time()
    migration = await admin.create(VMIMS, vmim("m", namespace, of="moved"))
    await admin.merge_status(VMIMS, namespace, "m", {"phase": "Running"})
    state = {
        "migrationUid": migration["metadata"]["uid"],
        "sourceNode": source,
        "targetNode": target,
        "startTimestamp": rfc3339(now - 60),
        "endTimestamp": rfc3339(now - 1),
    }
    await admin.create(VMIS, vmi("moved", namespace, node=target, status={"migrationState": state}))
    await admin.create(
        VMIS, vmi("waits", namespace, node=source, status=requested(source, now - 60))
    )
    async with exporting(stage, tmp_path) as exporter:
        await until_evacuation(exporter, f"{namespace}/waits", state="capacity")

        await admin.merge_status(VMIMS, namespace, "m", {"phase": "Succeeded"})
        await until_evacuation(exporter, f"{namespace}/waits", state="no_migration")
    await admin.delete(KUBEVIRTS, namespace, "kubevirt")


async def test_a_pod_of_another_namespace_changes_no_verdict(stage: Stage, tmp_path: Path) -> None:
    """A pod with a VMI's UID in another namespace changes no verdict."""
    namespace, other = await stage.make_namespace(), await stage.make_namespace()
    admin = stage.admin
    made = await admin.create(VMIS, vmi("db", namespace, status=requested("n1", time.time())))
    own = await admin.create(PODS, launcher_pod(made))
    async with exporting(stage, tmp_path) as exporter:
        await exporter.until_verdict(namespace, "db", "filter", "evacuation_in_progress")

        foreign = {"name": "virt-launcher-zz", "namespace": other}
        await admin.create(PODS, launcher_pod(made, evicting=True, metadata=foreign))
        # The watch sends pods in the order of their creation.
        later = await admin.create(VMIS, vmi("later", namespace))
        await admin.create(PODS, launcher_pod(later))
        await exporter.until(
            f"/v1/vmis/{namespace}/later", lambda _, body: body.get("launcher") is not None
        )

        verdict = await exporter.verdict(namespace, "db", "filter", dryRun=True)
        assert verdict["reason"] == "evacuation_in_progress"
        _, explained = await exporter.get(f"/v1/vmis/{namespace}/db")
        assert explained["launcher"]["name"] == own["metadata"]["name"]
