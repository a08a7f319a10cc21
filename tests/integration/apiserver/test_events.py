"""Kubernetes Events on a real API server, as kubectl shows them."""

import asyncio
import re
import signal
import time
from collections import Counter
from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
import pytest

from exporter.app import LEASE
from exporter.engine.evacuations.events import (
    BURST,
    PER_VMI,
    REPEATED_AFTER,
    EventOutcome,
    EventQueue,
    EventReason,
)
from exporter.engine.facts.model import Resource, Why, WhySource
from exporter.engine.facts.policy import Reason, StuckPolicy, Verdict
from exporter.health import Health, Watched
from exporter.kube.client import ApiServer
from exporter.kube.events import EventWriter
from exporter.kube.lease import Lease
from exporter.kube.login import Login
from tests.cluster import (
    EXPORTER_READS,
    PATIENCE,
    PODS,
    VMIMS,
    VMIS,
    Client,
    RealCluster,
    find_binary,
    launcher_pod,
    poll,
    vmi,
    vmim,
)
from tests.cluster.access import allow
from tests.cluster.resources import EVENTS, LEASES
from tests.support.api_servers import RealStage
from tests.support.builders import a_store, a_vmi, rfc3339
from tests.support.program import Program, program


COUNTED = "kubevirt_eviction_exporter_events_total"
STUCK, ENDED, BLOCKED = EventReason
ON = {"events": True, "stuck": {"after": "1s"}}
CREATE = {"apiGroups": ["events.k8s.io"], "resources": ["events"], "verbs": ["create"]}
_numbers = count(1)


async def a_reporter(cluster: RealCluster, namespace: str, *rules: dict[str, Any]) -> str:
    """The kubeconfig of an account that may read the cluster, hold the Lease, and has these rules
    in a namespace.
    """
    name = f"reporter-{next(_numbers)}"
    user = await cluster.user(name, EXPORTER_READS)
    await allow(cluster.admin, user, f"{name}-events", *rules, namespace=namespace)
    lease = {"apiGroups": [LEASES.group], "resources": [LEASES.plural]}
    lease |= {"verbs": ["get", "create", "update"], "resourceNames": [LEASE]}
    await allow(cluster.admin, user, f"{name}-lease", lease, namespace=user.namespace)
    return str(cluster.kubeconfig(user))


async def kubectl(cluster: RealCluster, *arguments: str) -> str:
    """Run kubectl; returns its output."""
    process = await asyncio.create_subprocess_exec(
        find_binary("kubectl"),
        "--kubeconfig",
        cluster.kubeconfig(cluster.administrator),
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    printed, complaint = await process.communicate()
    assert process.returncode == 0, complaint.decode()
    return printed.decode()


async def events(admin: Client, namespace: str) -> list[dict[str, Any]]:
    """The Events of a namespace as the core API serves them, oldest first."""
    listed: list[dict[str, Any]] = (await admin.list(EVENTS, namespace))["items"]
    return sorted(listed, key=lambda event: str(event["eventTime"]))


async def until_reported(admin: Client, namespace: str, *reasons: EventReason) -> list[Any]:
    """Wait until the namespace has Events of these reasons and no others."""

    async def reported() -> list[Any] | None:
        written = await events(admin, namespace)
        return written if sorted(event["reason"] for event in written) == sorted(reasons) else None

    within = PATIENCE + PER_VMI
    return await poll(reported, what=f"Events {reasons}", within=within)


async def until_counted(
    exporter: Program, reason: EventReason, outcome: EventOutcome, least: int = 1
) -> None:
    """Wait until this many Events had this outcome."""

    async def is_so() -> bool:
        return await exporter.sample(COUNTED, reason=reason, outcome=outcome) >= least

    await poll(is_so, what=f"{least} {reason} {outcome}")


def cooling(name: str, namespace: str) -> dict[str, Any]:
    """A VM whose migration ended ten seconds ago."""
    now = int(time.time())
    state = {"migrationUid": f"m-{name}", "startTimestamp": rfc3339(now - 20)}
    state["endTimestamp"] = rfc3339(now - 10)
    return vmi(name, namespace, status={"migrationState": state})


async def a_stuck_vm(admin: Client, namespace: str, name: str) -> None:
    """A VM that must leave its node, and a target pod that fits on no other node."""
    made = await admin.create(VMIS, vmi(name, namespace, status={"evacuationNodeName": "n1"}))
    await admin.create(PODS, launcher_pod(made))
    migration = await admin.create(VMIMS, vmim(f"of-{name}", namespace, of=name, evacuates="n1"))
    target = launcher_pod(made, migration=migration)
    why = {
        "type": "PodScheduled",
        "status": "False",
        "reason": "Unschedulable",
        "message": "0/3 nodes are available: 3 Insufficient memory.",
    }
    del target["spec"]["nodeName"]
    target["status"] = {"phase": "Pending", "conditions": [why]}
    await admin.create(PODS, target)


async def test_kubectl_shows_them(
    real: RealStage, tmp_path: Path, prove: Callable[[str], None]
) -> None:
    """Kubectl shows the Events of a stuck evacuation, its end, and a blocked eviction."""
    namespace = await real.make_namespace()
    login = await a_reporter(real.cluster, namespace, CREATE)
    await a_stuck_vm(real.admin, namespace, "db1")
    await real.admin.create(VMIS, cooling("db2", namespace))
    config = {**ON, "namespaces": [namespace]}

    async with program(tmp_path, "--kubeconfig", login, config=config) as exporter:
        await exporter.ready()
        await exporter.until_verdict(namespace, "db2", "preEviction", "cooldown")
        verdict = await exporter.verdict(namespace, "db2")
        await until_reported(real.admin, namespace, STUCK, BLOCKED)
        described = await kubectl(real.cluster, "-n", namespace, "describe", "vmi", "db1")
        await real.admin.merge(
            VMIS, namespace, "db1", {"status": {"evacuationNodeName": None, "nodeName": "n2"}}
        )
        await until_reported(real.admin, namespace, STUCK, ENDED, BLOCKED)
        shown = [
            await kubectl(real.cluster, "-n", namespace, "events", "--for", f"vmi/{name}")
            for name in ("db1", "db2")
        ]
        assert await exporter.end() == 0

    for text in (described.partition("\nEvents:")[2], *shown):
        prove(text)
    row = r"\s+Warning\s+EvacuationStuck\s+\d+s\s+kubevirt-eviction-exporter\s+(.*)"
    stuck = re.search(row, described)
    assert stuck is not None
    assert (
        "target_unschedulable, failed attempts: 0. Add or open a node that may run the VM"
        in stuck[1]
    )
    assert (
        "PodScheduled: Unschedulable: 0/3 nodes are available: 3 Insufficient memory." in stuck[1]
    )
    assert re.search(r"Normal\s+EvacuationEnded.*n1 ended after .*: the VM is now on n2", shown[0])
    until = verdict["notBefore"][:16]
    assert re.search(
        rf"Normal\s+EvictionBlocked.*Eviction blocked: cooldown until {until}", shown[1]
    )


async def test_replicas_write_each_event_once(real: RealStage, tmp_path: Path) -> None:
    """Only the holder of the Lease reports evacuations, so each Event exists once."""
    namespace = await real.make_namespace()
    login = await a_reporter(real.cluster, namespace, CREATE)
    config = {**ON, "namespaces": [namespace]}
    async with (
        program(tmp_path, "--kubeconfig", login, config=config) as exporter,
        program(tmp_path, "--kubeconfig", login, config=config) as other,
    ):
        await exporter.ready()
        await other.ready()

        async def elected() -> bool:
            return bool(exporter.events("lease_taken") or other.events("lease_taken"))

        await poll(elected, what="a holder of the Lease")
        holder, standby = (exporter, other) if exporter.events("lease_taken") else (other, exporter)
        await a_stuck_vm(real.admin, namespace, "db1")
        await real.admin.create(VMIS, cooling("db2", namespace))
        await until_counted(holder, STUCK, EventOutcome.WRITTEN)
        assert [await standby.sample(COUNTED, outcome=outcome) for outcome in EventOutcome] == [
            0
        ] * 5
        for replica, outcome in (
            (standby, EventOutcome.WRITTEN),
            (holder, EventOutcome.EXISTING),
        ):
            await replica.until_verdict(namespace, "db2", "preEviction", "cooldown")
            await replica.verdict(namespace, "db2")
            await until_counted(replica, BLOCKED, outcome)
        await holder.end(signal.SIGKILL)
        await until_counted(standby, STUCK, EventOutcome.EXISTING)
        await until_reported(real.admin, namespace, STUCK, BLOCKED)


async def test_a_series_as_kubectl_shows_it(real: RealStage, prove: Callable[[str], None]) -> None:
    """For a series, kubectl shows the count and the age; the longest name and note are accepted."""
    namespace = await real.make_namespace()
    now = time.time() - 7200
    held = a_vmi(namespace=namespace, uid="u1")
    hold = Verdict(
        known=True, reason=Reason.COOLDOWN, not_before=now + 9000, released_at=now + 9000
    )
    leaving = a_vmi(
        namespace=namespace,
        name="x" * 199 + "." + "y" * 53,
        uid="u2",
        evacuation_node="n1",
        eviction_requested_at=now - 4000,
    )
    store = a_store(leaving, now=now)
    store.put(leaving, (Why(WhySource.LIVE_MIGRATABLE, "Disks", "ü" * 1024),))
    health = Health(180, 600, [Watched(Resource.VMIS, None, synced=True)])
    queue, lease = EventQueue(Counter()), cast("Lease", SimpleNamespace(held=True))
    login = Login(kubeconfig=real.cluster.kubeconfig(real.cluster.administrator))
    async with ApiServer(login, read_timeout=20) as api:
        writer = EventWriter(
            api, store, health, StuckPolicy(), queue, lease, instance="pod-1", clock=lambda: now
        )
        for _ in range(3):
            queue.record_blocked(held, hold, now)
            await writer.check()
            await writer.write_due()
            now += REPEATED_AFTER

    written = await events(real.admin, namespace)
    shown = await kubectl(real.cluster, "-n", namespace, "events", "--for", f"vmi/{held.name}")

    prove(shown)
    sizes = Counter((event["reason"], len(event["message"].encode()) > 1000) for event in written)
    assert sizes == {(BLOCKED, False): 3, (STUCK, True): 3}
    counts = [event.get("series", {}).get("count") for event in written if event["reason"] == STUCK]
    assert sorted(counts, key=str) == [2, 3, None]
    assert re.search(r"\(x3 over 12\dm\)\s+Normal\s+EvictionBlocked", shown)


async def test_by_default_there_are_none(real: RealStage, tmp_path: Path) -> None:
    """Without the setting no Event is written, and the metric is absent."""
    namespace = await real.make_namespace()
    login = await a_reporter(real.cluster, namespace, CREATE)
    await real.admin.create(VMIS, cooling("db1", namespace))

    async with program(tmp_path, "--kubeconfig", login) as exporter:
        await exporter.ready()
        await exporter.until_verdict(namespace, "db1", "preEviction", "cooldown")
        assert not (await exporter.verdict(namespace, "db1"))["allowed"]
        async with (
            aiohttp.ClientSession() as session,
            session.get(exporter.metrics + "/metrics") as answer,
        ):
            assert not re.search(rf"^{COUNTED}{{", await answer.text(), re.MULTILINE)

    assert await events(real.admin, namespace) == []


@pytest.mark.parametrize(
    ("vms", "seconds"),
    [
        pytest.param(300, 5, id="small"),
        pytest.param(10_000, 60, id="soak", marks=[pytest.mark.soak, pytest.mark.timeout(1200)]),
    ],
)
async def test_a_flood_is_bounded(
    real: RealStage, tmp_path: Path, vms: int, seconds: int, prove: Callable[[str], None]
) -> None:
    """If all VMs are blocked at once, 100 Events are written, and then one per second."""
    namespace = await real.make_namespace()
    login = await a_reporter(real.cluster, namespace, CREATE)
    names = [f"vm{n}" for n in range(vms)]
    limit = asyncio.Semaphore(20)

    async def make(name: str) -> None:
        async with limit:
            await real.admin.create(VMIS, cooling(name, namespace))

    config = {"events": True, "namespaces": [namespace]}
    async with program(tmp_path, "--kubeconfig", login, config=config) as exporter:
        await exporter.ready()
        await asyncio.gather(*map(make, names))

        async def known() -> bool:
            status, body = await exporter.get("/v1/blocked?checkpoint=preEviction")
            return status == 200 and len(body["blocked"]) == vms

        await poll(known, what="all held")
        before, began = exporter.resident(), time.monotonic()
        blocked, longest = 0, 0.0
        async with aiohttp.ClientSession() as session:
            while time.monotonic() - began < seconds:
                asked = time.monotonic()
                for start in range(0, vms, 5000):
                    candidates = [
                        {"namespace": namespace, "name": name}
                        for name in names[start : start + 5000]
                    ]
                    body = {"candidates": candidates}
                    async with session.post(f"{exporter.query}/v1/verdicts", json=body) as answer:
                        verdicts = (await answer.json())["verdicts"]
                    blocked += sum(not verdict["allowed"] for verdict in verdicts)
                longest = max(longest, time.monotonic() - asked)
                await asyncio.sleep(0.5)
        written = await exporter.sample(COUNTED, reason=BLOCKED, outcome=EventOutcome.WRITTEN)
        took, grown = time.monotonic() - began, exporter.resident() - before
        there = len(await events(real.admin, namespace))
        assert await exporter.end() == 0

    assert blocked >= vms
    assert BURST <= written <= there <= BURST + took + 10
    prove(
        f"{vms:,} VMs held at once, {blocked:,} blocked answers in {took:.0f} s: {written:.0f}"
        f" Events, RSS {before / 2**20:.0f} MiB and {grown / 2**20:+.1f} MiB, the slowest round of"
        f" verdicts {longest:.2f} s"
    )
