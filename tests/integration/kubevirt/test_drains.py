"""Drains: the forecasts come true, and a drain that makes progress is not stuck.

The forecasts are for a simulated cluster. Its time passes only between two requests, so the speed
of the machine does not matter. Its drains do what `kubectl drain` does: the node gets no new pod,
and every pod is evicted every 5 seconds. The last test uses KubeVirt's own controllers instead.
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import pytest
from msgspec import Struct

from exporter import app
from exporter.demo import node, objects, plan
from exporter.demo.apiserver import SimulatedApiServer
from exporter.demo.cluster import Cluster
from exporter.demo.objects import Object
from exporter.demo.store import MIGRATIONS
from exporter.kube.login import Login
from exporter.settings import read_settings
from exporter.text import write_span
from tests.cluster import poll
from tests.cluster.player import Fate
from tests.cluster.rig import Rig
from tests.support.program import Program, program


NAMESPACE = "shop"
START = datetime(2027, 1, 15, 8, 0, tzinfo=UTC)
EVICTED_EVERY = 5.0
SETTLED = 10.0
"""After a VM has left, KubeVirt clears its marker within this many seconds."""
ROUNDED = 1.0
"""KubeVirt writes whole seconds, so a duration may be too long by this many seconds."""
HAPPENS = {
    "leaves": "left",
    "waits": "left",
    "restarts": "went down",
    "stays": "is there",
    "external": "is there",
}


class Vm(Struct, frozen=True):
    """A VM, its first node, and the duration of its migrations."""

    name: str
    home: str
    strategy: str = "LiveMigrate"
    migratable: bool = True
    moved_before: bool = False
    fails: int = 0
    seconds: float = 30.0


def make_vms(nodes: Sequence[str], movable: int) -> list[Vm]:
    """Define the VMs of each node: some with a history, and one of each other kind.

    The last node has no VM that stays during a drain.
    """
    chance = random.Random(16)
    made = []
    for home in nodes:
        if home != nodes[-1]:
            made += [
                Vm(f"{home}-pinned", home, migratable=False),
                Vm(f"{home}-foreign", home, "External"),
            ]
        made += [
            Vm(f"{home}-local", home, "None"),
            Vm(f"{home}-device", home, "LiveMigrateIfPossible", migratable=False),
            Vm(f"{home}-new", home, "LiveMigrateIfPossible"),
            Vm(f"{home}-flaky", home, fails=2),
        ]
        made += [
            Vm(f"{home}-vm-{n}", home, moved_before=True, seconds=chance.uniform(20.0, 90.0))
            for n in range(1, movable + 1)
        ]
    return made


class Fleet:
    """The scenario: VMs return to their first node if possible, and never go to a cordoned node."""

    def __init__(self, vms: Sequence[Vm]) -> None:
        self.vms = {vm.name: vm for vm in vms}
        self.cordoned = ""
        self._chance = random.Random(61)

    def fate(self, vmi: Object, attempt: int) -> plan.Fate:
        """The fate of a VM's migration: its duration, and whether it fails."""
        vm = self.vms[vmi["metadata"]["name"]]
        return plan.Fate("fails" if attempt < vm.fails else "succeeds", vm.seconds, "a broken pipe")

    def choose_node(self, vmi: Object, free: Sequence[str]) -> str:
        """Choose the VM's first node, else any free one."""
        home = self.vms[vmi["metadata"]["name"]].home
        open_ = [node for node in free if node != self.cordoned]
        return home if home in open_ else self._chance.choice(open_)


class Drained(Struct):
    """The forecast of a drain, what happened to each VM, and after how many seconds."""

    forecast: Any
    happened: dict[str, str]
    after: dict[str, float]

    @property
    def came_true(self) -> int:
        """The number of forecasts that came true."""
        return sum(
            self.happened[candidate["name"]] == HAPPENS[candidate["outcome"]]
            for candidate in self.forecast["candidates"]
        )

    @property
    def took(self) -> float:
        """The seconds until the last migrated VM had left."""
        moved = (self.after[name] for name, what in self.happened.items() if what == "left")
        return max(moved, default=0.0)

    @property
    def remaining(self) -> int:
        """How many VMs are still on the node."""
        return Counter(self.happened.values())["is there"]

    def table(self) -> str:
        """The result as a table: a row for the node, and below it a row for each VM."""
        told = self.forecast
        bound = told["atLeastSeconds"]
        text = (
            f"drain of {told['node']}: {self.came_true} of {told['vmis']} forecasts came true;"
            f" at least {'?' if bound is None else write_span(round(bound))}, took"
            f" {write_span(self.took)}; can be emptied: {told['canBeEmptied']}, left on it:"
            f" {self.remaining}"
        )
        for candidate in told["candidates"]:
            name, last = candidate["name"], candidate["lastDurationSeconds"]
            when = f"after {write_span(self.after[name])}" if name in self.after else ""
            text += (
                f"\n  {name:16} {candidate['outcome']:9} {self.happened[name]:10}"
                f" last took {'?' if last is None else write_span(last):6} {when}"
            )
        return text


class Story:
    """The cluster with its clock, and the exporter that watches it."""

    def __init__(self, vms: Sequence[Vm], nodes: int) -> None:
        self.fleet = Fleet(vms)
        self.cluster = Cluster(START, self.fleet, nodes=nodes)
        self.now = START
        self._session: aiohttp.ClientSession
        self._url = ""
        self.cluster.set_up("kubevirt", NAMESPACE)

    def read_clock(self) -> float:
        """The cluster's time, for the exporter."""
        return self.now.timestamp()

    async def pass_time(self, seconds: float) -> None:
        """Let the cluster's time pass."""
        self.now += timedelta(seconds=seconds)
        self.cluster.step(self.now)
        await asyncio.sleep(0)

    async def begin(self) -> None:
        """Create the VMs, and migrate some to have a history."""
        for vm in self.fleet.vms.values():
            self.cluster.create_vmi(
                objects.build_vmi(NAMESPACE, vm.name, strategy=vm.strategy, annotations={})
            )
        await self.pass_time(60.0)
        for vm in self.fleet.vms.values():
            if not vm.migratable:
                self.cluster.change_vmi(
                    NAMESPACE, vm.name, lambda vmi: node.set_migratable(vmi, migratable=False)
                )
        moved = [vm for vm in self.fleet.vms.values() if vm.moved_before]
        for _ in range(2):
            for vm in moved:
                self.cluster.evict_vmi(NAMESPACE, vm.name)
            while any(self._vmi(vm.name)["status"].get("evacuationNodeName") for vm in moved):
                await self.pass_time(10.0)
            await self.pass_time(10.0)
        assert all(self._vmi(vm.name)["status"]["nodeName"] == vm.home for vm in moved)

    async def drain(self, name: str, *, under_way: int) -> Drained:
        """Start this many migrations from a node, then drain the node."""
        self.fleet.cordoned = name
        movable = [vm for vm in self.fleet.vms.values() if vm.moved_before and vm.home == name]
        for vm in movable[:under_way]:
            self.cluster.evict_vmi(NAMESPACE, vm.name)
        await self.pass_time(8.0)
        forecast = await self._ask(name)
        names = [candidate["name"] for candidate in forecast["candidates"]]
        before = {name: self._vmi(name)["metadata"]["uid"] for name in names}
        drained = Drained(forecast, dict.fromkeys(names, "is there"), {})
        began = self.now
        # Long enough to migrate all VMs, two at a time, and to retry failed migrations.
        while (self.now - began).total_seconds() < 1200.0 + 60.0 * len(names):
            for vmi in names:
                pod = self.cluster.launcher(NAMESPACE, vmi)
                if pod is not None and objects.node_of(pod) == name:
                    self.cluster.evict(NAMESPACE, pod["metadata"]["name"])
            await self.pass_time(EVICTED_EVERY)
            for vmi, uid in before.items():
                what = self._find_what_happened(vmi, uid, name)
                if what != drained.happened[vmi]:
                    drained.happened[vmi] = what
                    drained.after[vmi] = (self.now - began).total_seconds()
        self.fleet.cordoned = ""
        return drained

    async def estimate(self, name: str) -> tuple[float, float]:
        """Drain a node; returns the estimate when half of the VMs have left, and the true time."""
        self.fleet.cordoned = name
        self.cluster.cordon(name)
        vms = [vm for vm in self.fleet.vms if self._is_on(vm, name)]
        estimated, asked_at = 0.0, self.now
        while left := [vm for vm in vms if self._is_on(vm, name)]:
            for vm in left:
                self.cluster.evict_vmi(NAMESPACE, vm)
            await self.pass_time(EVICTED_EVERY)
            if not estimated and len(left) <= len(vms) / 2:
                progress = (await self._ask(name))["drain"]
                estimated, asked_at = progress["estimateSeconds"], self.now
        self.cluster.uncordon(name)
        self.fleet.cordoned = ""
        return estimated, (self.now - asked_at).total_seconds()

    def _find_what_happened(self, name: str, uid: str, where: str) -> str:
        vmi = self._vmi(name)
        assert vmi["metadata"]["uid"] == uid
        if objects.is_final(vmi):
            return "went down"
        return "is there" if vmi["status"]["nodeName"] == where else "left"

    async def _ask(self, name: str) -> Any:
        """The forecast, once the exporter has seen everything that has happened."""
        there = {vm for vm in self.fleet.vms if self._is_on(vm, name)}
        migrating = {
            migration["spec"]["vmiName"]
            for migration in self.cluster.store.objects(MIGRATIONS)
            if not objects.is_final(migration)
        }

        async def look() -> Any:
            path = f"{self._url}/v1/nodes/{name}"
            async with self._session.get(path) as response:
                told = await response.json()
            seen = {vm["name"] for vm in told.get("candidates", ())}
            waits = {vm["name"] for vm in told.get("candidates", ()) if vm["outcome"] == "waits"}
            return told if seen == there and migrating & there <= waits else None

        return await poll(look, what=f"the forecast of {name}")

    def _is_on(self, vm: str, name: str) -> bool:
        vmi = self._vmi(vm)
        return not objects.is_final(vmi) and vmi["status"].get("nodeName") == name

    def _vmi(self, name: str) -> Object:
        vmi = self.cluster.vmi(NAMESPACE, name)
        assert vmi is not None
        return vmi

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Run the exporter's watch during the block."""
        stop = asyncio.Event()
        listening: asyncio.Future[app.Listening] = asyncio.get_running_loop().create_future()
        nowhere = {"query": "127.0.0.1:0", "metrics": "127.0.0.1:0"}
        async with (
            SimulatedApiServer(self.cluster.store) as server,
            aiohttp.ClientSession() as self._session,
            asyncio.TaskGroup() as tasks,
        ):
            tasks.create_task(
                app.run(
                    read_settings({"listen": nowhere}),
                    Login(url=server.url),
                    stop,
                    clock=self.read_clock,
                    on_listening=listening.set_result,
                )
            )
            self._url = (await listening).query[0]
            try:
                yield
            finally:
                stop.set()


@pytest.mark.parametrize(
    ("nodes", "movable"),
    [
        pytest.param(3, 4, id="small"),
        pytest.param(10, 30, id="soak", marks=[pytest.mark.soak, pytest.mark.timeout(1800)]),
    ],
)
async def test_forecasts_come_true(nodes: int, movable: int, prove: Callable[[str], None]) -> None:
    """Each VM's outcome is as forecast, and no drain is faster than its bound."""
    names = [f"node-{number}" for number in range(1, nodes + 1)]
    story = Story(make_vms(names, movable), nodes)
    await story.begin()
    async with story.watched():
        drains = [
            await story.drain(name, under_way=number % 3) for number, name in enumerate(names)
        ]
    for drained in drains:
        prove(drained.table())
    outcomes = Counter(
        candidate["outcome"] for d in drains for candidate in d.forecast["candidates"]
    )
    true, asked = sum(drain.came_true for drain in drains), sum(d.forecast["vmis"] for d in drains)
    prove(f"drains: {true} of {asked} forecasts came true: {dict(outcomes)}")

    assert true == asked
    assert set(outcomes) == set(HAPPENS)
    for drained in drains:
        bound = drained.forecast["atLeastSeconds"]
        assert (bound is not None) == drained.forecast["canBeEmptied"]
        if bound is not None:
            assert drained.took >= bound - ROUNDED * (movable + 2)
    assert [drain.forecast["canBeEmptied"] for drain in drains] == [*[False] * (nodes - 1), True]
    assert [drain.remaining for drain in drains] == [*[2] * (nodes - 1), 0]


@pytest.mark.parametrize(
    ("nodes", "rounds"),
    [
        pytest.param(3, 1, id="small"),
        pytest.param(5, 4, id="soak", marks=[pytest.mark.soak, pytest.mark.timeout(1800)]),
    ],
)
async def test_estimates_beside_what_drains_took(
    nodes: int, rounds: int, prove: Callable[[str], None]
) -> None:
    """The median error of the estimate, halfway through a drain, is below 60 %."""
    chance = random.Random(34)
    names = [f"node-{number}" for number in range(1, nodes + 1)]
    story = Story(
        [
            Vm(f"{home}-vm-{n}", home, seconds=chance.uniform(20.0, 90.0))
            for home in names
            for n in range(12)
        ],
        nodes,
    )
    await story.begin()
    async with story.watched():
        measured = [await story.estimate(name) for _ in range(rounds) for name in names]
    errors = sorted(abs(estimated - took) / took for estimated, took in measured)
    pairs = ", ".join(f"{estimated:.0f}/{took:.0f}" for estimated, took in measured)
    prove(f"estimates of {len(errors)} drains, seconds: {pairs}: median error {median(errors):.0%}")

    assert median(errors) < 0.6


@pytest.mark.parametrize("vms", [14, pytest.param(20, marks=pytest.mark.soak)])
async def test_a_queue_that_moves_is_not_stuck(
    tmp_path: Path, prove: Callable[[str], None], vms: int
) -> None:
    """A drain that migrates its VMs, two at a time, is stuck only after it has stopped."""
    after = 30.0
    left, left_at, waited = vms, 0.0, 0.0

    async def read(exporter: Program) -> list[dict[str, Any]]:
        status, body = await exporter.get("/v1/evacuations")
        assert status == 200
        evacuations: list[dict[str, Any]] = body["evacuations"]
        return evacuations

    async with Rig.opened() as rig:
        await rig.cluster.control.namespace("queue")
        keys = [f"queue/vm-{number}" for number in range(1, vms + 1)]
        await asyncio.gather(*(rig.start(key, Fate(seconds=7.0)) for key in keys))
        config = {"stuck": {"after": f"{after:g}s"}}
        async with program(tmp_path, *rig.login, config=config) as exporter:
            await exporter.ready()
            for key in keys:
                await rig.evict(key, descheduler=False)
            left_at = time.monotonic()

            async def is_mostly_gone() -> bool:
                nonlocal left, left_at, waited
                evacuations, now = await read(exporter), time.monotonic()
                if len(evacuations) < left:
                    left, left_at = len(evacuations), now
                ages = [row["ageSeconds"] for row in evacuations if row["state"] == "capacity"]
                waited = max([waited, *ages])
                if now - left_at < after - SETTLED:
                    assert [row for row in evacuations if row["stuck"]] == []
                return left <= 6

            await poll(is_mostly_gone, within=900.0, what=f"{vms - 6} VMs moved")
            assert waited > after
            for key in keys:
                rig.player.plan(key, "hangs")

            async def is_stuck() -> list[dict[str, Any]]:
                evacuations = await read(exporter)
                waiting = [row for row in evacuations if row["state"] == "capacity"]
                hanging = len(evacuations) - len(waiting) == 2
                return evacuations if hanging and all(row["stuck"] for row in waiting) else []

            evacuations = await poll(is_stuck, within=300.0, what="the queue stuck")
    states = Counter(f"{row['state']}{', stuck' * row['stuck']}" for row in evacuations)
    prove(
        f"rig: {vms - left} of {vms} VMs moved, none stuck, though VMs waited up to {waited:.0f} s"
        f" with stuck.after {after:g}s; the queue stopped: {dict(states)}"
    )
    assert set(states) == {"migrating", "capacity, stuck"}
