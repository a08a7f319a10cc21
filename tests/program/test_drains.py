"""What the whole program calls a drain, a left-over, a duration and a full limit."""

import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import poll
from tests.program.exporting import exporting
from tests.program.test_field import KUBEVIRT, read
from tests.program.waiting import wait_until
from tests.support.builders import rfc3339
from tests.support.faulty_apiserver import FaultyApiServer
from tests.support.field import FieldStore
from tests.support.program import Program


Object = dict[str, Any]

DAY = 86_400.0
BRISK = {"historyInterval": "500ms"}
LEFT = "kubevirt_eviction_exporter_drains_total"
STUCK = "kubevirt_node_drain_stuck"
TOOK = "kubevirt_eviction_exporter_drain_duration_seconds_sum"


def ago(seconds: float) -> str:
    """The time `seconds` ago; a negative number is a time ahead."""
    return rfc3339(float(int(time.time() - seconds)))


def a_node(name: str = "n1", *, closed_by: str = "", since: float = 0.0) -> Object:
    """A node that is open, or closed by a `cordon`, a `taint` or `both`, `since` seconds ago."""
    taints = []
    if closed_by in ("cordon", "both"):
        taints.append({"key": "node.kubernetes.io/unschedulable"})
    if closed_by in ("taint", "both"):
        taints.append({"key": "kubevirt.io/drain"})
    for taint in taints:
        taint |= {"effect": "NoSchedule", "timeAdded": ago(since)}
    is_cordoned = closed_by in ("cordon", "both")
    spec = {"taints": taints} | ({"unschedulable": True} if is_cordoned else {})
    return {"metadata": {"name": name, "uid": name}, "spec": spec, "status": {}}


def a_vmi(
    name: str = "db1",
    *,
    uid: str = "",
    node: str = "n1",
    evicted: float | None = None,
    state: Object | None = None,
) -> Object:
    """A running VM; `evicted`: how many seconds ago somebody evicted it from its node."""
    conditions = [{"type": "LiveMigratable", "status": "True"}]
    status: Object = {"phase": "Running", "nodeName": node, "conditions": conditions}
    if evicted is not None:
        status["evacuationNodeName"] = node
        requested = {"type": "EvictionRequested", "status": "True"}
        conditions.append(requested | {"lastTransitionTime": ago(evicted)})
    if state is not None:
        status["migrationState"] = state
    metadata = {"namespace": "shop", "name": name, "uid": uid or f"u-{name}"}
    metadata |= {"creationTimestamp": ago(2 * DAY)}
    return {"metadata": metadata, "spec": {"evictionStrategy": "LiveMigrate"}, "status": status}


def a_vmim(
    name: str, of: str = "db1", *, phases: dict[str, float], evacuates: str = "", **spec: str
) -> Object:
    """A migration; `phases` has how many seconds ago it entered each phase."""
    entered = [
        {"phase": phase, "phaseTransitionTimestamp": ago(since)} for phase, since in phases.items()
    ]
    metadata: Object = {"namespace": "shop", "name": name, "uid": name}
    metadata |= {"creationTimestamp": ago(max(phases.values()))}
    if evacuates:
        metadata["annotations"] = {"kubevirt.io/evacuationMigration": evacuates}
    status = {"phase": list(phases)[-1], "phaseTransitionTimestamps": entered}
    return {"metadata": metadata, "spec": {"vmiName": of, **spec}, "status": status}


def by_a_person(evicted: float) -> Object:
    """An attempt that says that a person evicted db1 from n1."""
    phases = {"Pending": evicted - 1.0}
    return a_vmim("evac-1", phases=phases, evacuates="n1", priority="system-critical")


class Cluster(FieldStore):
    """The objects of a cluster."""

    def put(self, *bodies: Object) -> None:
        """Create or replace objects."""
        for body in bodies:
            spec = body["spec"]
            kind = "virtualmachineinstances" if "evictionStrategy" in spec else "nodes"
            is_vmim = "vmiName" in spec
            self.apply("virtualmachineinstancemigrations" if is_vmim else kind, body)


@asynccontextmanager
async def exporters(
    directory: Path, cluster: Cluster, count: int = 1, **config: object
) -> AsyncIterator[list[Program]]:
    """Some exporters that watch the cluster during the block."""
    cluster.apply("kubevirts", KUBEVIRT)
    async with (
        FaultyApiServer(cluster, bookmark_seconds=0.2) as server,
        AsyncExitStack() as stack,
    ):
        yield [
            await stack.enter_async_context(exporting(server.url, directory, **config))
            for _ in range(count)
        ]


async def drain_of(exporter: Program, node: str = "n1") -> Any:
    """The drain of a node, or None."""
    _, body = await exporter.get(f"/v1/nodes/{node}")
    return body["drain"]


async def until_drained(exporter: Program, *, drained: bool = True) -> Any:
    """Wait until n1 is drained, or no more."""

    async def is_so() -> bool:
        return (await drain_of(exporter) is not None) is drained

    await poll(is_so, what=f"drained: {drained}")
    return await drain_of(exporter)


async def until_evacuating(exporter: Program, *, leftover: bool) -> None:
    """Wait until one VM is evacuated, as a left-over or not."""
    await exporter.until(
        "/v1/evacuations",
        lambda _, body: [row["leftover"] for row in body["evacuations"]] == [leftover],
    )


async def check_left_over(exporter: Program) -> None:
    """Every answer says that the evacuation of db1 is left over, and that n1 has no drain."""
    await until_evacuating(exporter, leftover=True)
    assert await drain_of(exporter) is None
    _, text = await exporter.get("/metrics")
    assert [line for line in text.splitlines() if line.startswith("kubevirt_node_drain_")] == []
    assert 'data-field="leftover"' in (await exporter.get("/"))[1]
    explained, _ = await read(exporter, "explain", "shop/db1")
    assert "left over" in explained


@pytest.mark.parametrize(
    ("closed_by", "clock_ahead", "replicas"),
    [("cordon", 0.0, 1), ("taint", 0.0, 1), ("both", 0.0, 1), ("cordon", 900.0, 2)],
)
async def test_a_left_over_is_no_drain(
    tmp_path: Path, closed_by: str, clock_ahead: float, replicas: int
) -> None:
    """After an uncordon, what KubeVirt still evacuates is in no drain, until the next cordon.

    So it is if the control plane's clock is ahead, if the taint stays, after a restart, and in each
    replica. A VM that is recreated under the name has no evacuation.
    """
    cluster, evicted = Cluster(), -2.0 - clock_ahead
    config: Object = {"kube": BRISK}
    if replicas == 1:
        config["history"] = f"file:{tmp_path / 'history'}"
    cluster.put(a_node(), a_node("n2"), a_vmi())
    async with exporters(tmp_path, cluster, replicas, **config) as running:
        asked_at = time.time() + 2.0
        closed = a_node(closed_by=closed_by, since=-2.0)
        cluster.put(closed, a_vmi(evicted=evicted), by_a_person(evicted))
        for exporter in running:
            assert (await until_drained(exporter))["remaining"] == 1
            # The exporter may see the cordon, and even its end, before the eviction.
            await until_evacuating(exporter, leftover=False)
        taint_left = {**closed, "spec": {"taints": closed["spec"]["taints"][1:]}}
        cluster.put(taint_left if closed_by == "both" else a_node())
        for exporter in running:
            await check_left_over(exporter)
        if replicas == 2:
            await check_next_cordon(cluster, running)
        else:
            await running[0].end()
    if replicas == 1:
        # A restart after the request, which is dated two seconds ahead.
        await wait_until(lambda: time.time() > asked_at, what="the time of the request")
        async with exporters(tmp_path, cluster, **config) as (exporter,):
            await check_left_over(exporter)


async def check_next_cordon(cluster: Cluster, running: list[Program]) -> None:
    """The next cordon takes over what is left over, and its end leaves it over again."""
    cluster.put(a_node(closed_by="cordon", since=10.0))
    for exporter in running:
        drain = await until_drained(exporter)
        assert (drain["remaining"], drain["since"] >= ago(90.0)) == (1, True)
    cluster.put(a_node())
    for exporter in running:
        await check_left_over(exporter)
    cluster.put(a_vmi(uid="another"))
    for exporter in running:
        await exporter.until("/v1/evacuations", lambda _, body: body["evacuations"] == [])


@pytest.mark.parametrize("closed_by", ["cordon", "taint"])
async def test_a_drain_begins_with_its_cordon(tmp_path: Path, closed_by: str) -> None:
    """A cordon inherits no age from a VM that hangs since yesterday."""
    cluster = Cluster()
    cluster.put(a_node(), a_node("n2"), a_vmi(evicted=DAY), by_a_person(DAY), a_vmi("db2"))
    async with exporters(tmp_path, cluster) as (exporter,):
        cluster.put(a_node(closed_by=closed_by, since=10.0))
        assert (await until_drained(exporter))["since"] >= ago(60.0)
    async with exporters(tmp_path, cluster) as (exporter,):
        assert (await until_drained(exporter))["since"] >= ago(60.0)
        assert await exporter.sample(STUCK, node="n1") == 0
        cluster.put(a_vmi(node="n2"), a_vmi("db2", node="n2"))
        await until_counted(exporter, 1)
        assert 0 < await exporter.sample(TOOK) < 600


async def until_counted(exporter: Program, drains: int) -> None:
    """Wait until `drains` drains are counted as succeeded."""

    async def is_so() -> bool:
        return await exporter.sample(LEFT, outcome="succeeded") == drains

    await poll(is_so, what=f"{drains} drains")


async def test_a_copy_takes_as_long_as_one_clock_says(tmp_path: Path) -> None:
    """A slow clock of the source makes no cooldown and no bound longer, also after a restart."""
    cluster, ahead = Cluster(), -2700.0
    state = {
        "migrationUid": "m1",
        "sourceNode": "n2",
        "targetNode": "n1",
        "startTimestamp": ago(100.0 - ahead),
        "endTimestamp": ago(60.0),
        "completed": True,
    }
    vmim = a_vmim("m1", phases={"Pending": 109.0, "Scheduled": 105.0, "Succeeded": 58.0})
    vmim["status"]["migrationState"] = state
    cluster.put(a_node(), a_node("n2"), a_vmi(state=state), vmim)
    history = f"file:{tmp_path / 'history'}"
    for _ in range(2):  # the second time with a stored history
        async with exporters(tmp_path, cluster, history=history, kube=BRISK) as (exporter,):
            verdict = await exporter.verdict("shop", "db1", "preEviction")
            assert verdict["effectiveCooldownSeconds"] == 900.0
            _, vmi = await exporter.get("/v1/vmis/shop/db1")
            took = vmi["cooldown"]["durationSeconds"]
            assert 40.0 <= took <= 50.0
            _, node = await exporter.get("/v1/nodes/n1")
            assert node["atLeastSeconds"] == node["candidates"][0]["lastDurationSeconds"] == took
            explained, _ = await read(exporter, "explain", "shop/db1")
            assert f"{took:.0f}s" in explained
            await exporter.end()
