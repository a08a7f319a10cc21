"""Drains with KubeVirt's own virt-api and virt-controller, and the exporter's answers."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

from exporter.demo import objects
from exporter.engine.store.node_drains import DrainEnd
from tests.cluster.player import Fate
from tests.cluster.recording import Scene
from tests.cluster.resources import BUDGETS, NODES
from tests.cluster.rig import Rig
from tests.cluster.versions import is_kubevirt_at_least
from tests.support.evacuation_log import ask_evacuation
from tests.support.program import Program, program


NODE = "node-2"
VM_NAME = "vm.kubevirt.io/name"
SETTINGS = {"stuck": {"after": "20s"}}
Prove = Callable[[str], None]

pytestmark = pytest.mark.skipif(
    not is_kubevirt_at_least("1.7"), reason="before KubeVirt 1.7 nothing says who evacuates a VMI"
)


@dataclass
class Stage:
    """The rig and the exporter that watches it."""

    rig: Rig
    exporter: Program

    async def cordon(self, *, unschedulable: bool = True) -> None:
        """Cordon or uncordon the node, as kubectl does."""
        change = {"spec": {"unschedulable": unschedulable or None}}
        await self.rig.cluster.admin.merge(NODES, None, NODE, change)
        await self.exporter.until(
            f"/v1/nodes/{NODE}",
            lambda status, body: status == 404 or body["schedulable"] is not unschedulable,
        )

    @asynccontextmanager
    async def cordoned(self) -> AsyncIterator[None]:
        """Cordon the node during the block."""
        await self.cordon()
        try:
            yield
        finally:
            await self.cordon(unschedulable=False)

    async def until_drain(self, is_there: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Wait until the drain meets a condition; returns the exporter's answer about the node."""
        drain: dict[str, Any] = await self.exporter.until(
            f"/v1/nodes/{NODE}",
            lambda status, body: status == 200 and body["drain"] and is_there(body["drain"]),
            within=180,
        )
        return drain


@pytest.fixture(scope="module")
async def stage(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stage]:
    """KubeVirt's servers, three nodes, and an exporter."""
    async with (
        Rig.opened() as rig,
        program(tmp_path_factory.mktemp("drains"), *rig.login, config=SETTINGS) as exporter,
    ):
        await exporter.ready()
        yield Stage(rig, exporter)


@pytest.mark.parametrize(
    "minutes",
    [
        pytest.param(0, id="small"),
        pytest.param(10, id="soak", marks=[pytest.mark.soak, pytest.mark.timeout(1800)]),
    ],
)
async def test_a_drain_is_followed_to_its_end(minutes: int, stage: Stage, prove: Prove) -> None:
    """A drain counts VMs, not the moves before it, and its estimate is below three times its time.

    For some minutes before the drain, a descheduler moves two of its VMs away and back.
    """
    rig, keys = stage.rig, [f"followed-{number}/db1" for number in range(6)]
    async with AsyncExitStack() as stack:
        for key in keys:
            await stack.enter_async_context(rig.vmi(key, Fate(seconds=4), node=NODE))
        moves = [move_away_and_back(rig, key, minutes) for key in keys[:2]]
        departures = sum(await asyncio.gather(*moves))
        _, before = await stage.exporter.get(f"/v1/nodes/{NODE}")
        await stack.enter_async_context(stage.cordoned())
        began = time.monotonic()
        for key in keys:
            await rig.evict(key, descheduler=False)
        first = await stage.until_drain(lambda drain: drain["asked"] == len(keys))
        paced = await stage.until_drain(lambda drain: drain["estimateSeconds"] is not None)
        estimated_at = time.monotonic() - began
        drain = paced["drain"]
        for key in keys:
            await rig.until(key, lambda scene: scene.vmi["status"]["nodeName"] != NODE, within=180)
        took = time.monotonic() - began
        await stage.exporter.until(f"/v1/nodes/{NODE}", lambda status, _: status == 404)

    sample = partial(stage.exporter.sample, "kubevirt_eviction_exporter_drains_total")
    assert [await sample(outcome=end) for end in DrainEnd] == [1, 0, 0]
    duration = "kubevirt_eviction_exporter_drain_duration_seconds_sum"
    assert 0 < await stage.exporter.sample(duration) <= took + 1
    prove(
        f"rig: {departures} departures by a descheduler, then a drain of {len(keys)} VMs: asked"
        f" {first['drain']['asked']}; after {estimated_at:.0f} s {drain['left']} had left, one each"
        f" {drain['secondsPerVmi']:.0f} s, {drain['estimateSeconds']:.0f} s to go; took"
        f" {took:.0f} s"
    )
    assert before["drain"] is None
    assert first["schedulable"] is False
    assert (first["drain"]["remaining"], first["drain"]["failing"]) == (len(keys), 0)
    assert drain["left"] + drain["remaining"] == len(keys)
    assert drain["left"] >= 3
    assert estimated_at + drain["estimateSeconds"] < 3 * took


async def move_away_and_back(rig: Rig, key: str, minutes: int) -> int:
    """Evict a VM as a descheduler does until it is back on the node; returns its departures."""
    ends, departures = time.monotonic() + minutes * 60, 0
    while departures == 0 or time.monotonic() < ends:
        for _ in ("away", "back"):
            source = (await rig.look(key)).vmi["status"]["nodeName"]
            await rig.evict(key)
            await rig.until(key, lambda scene: is_moved(scene, source), within=180)  # noqa: B023
        departures += 1
    return departures


def is_moved(scene: Scene, source: str) -> bool:
    """Whether the VM has left the node, and its old launcher pod has ended."""
    unfinished = [pod for pod in scene.pods if not objects.is_final(pod)]
    return scene.vmi["status"]["nodeName"] != source and len(unfinished) == 1


async def test_a_drain_that_is_given_up_leaves_an_evacuation(stage: Stage, prove: Prove) -> None:
    """A stuck drain is reported; the uncordon ends it, and its evacuation is `leftover`."""
    rig, exporter, key = stage.rig, stage.exporter, "given-up/db1"
    async with rig.vmi(key, "never ready", node=NODE):
        async with stage.cordoned():
            await rig.evict(key, descheduler=False)
            stuck = await stage.until_drain(lambda drain: drain["failing"] == 1)
            assert not (await ask_evacuation(exporter, key) or {})["leftover"]
            assert await exporter.sample("kubevirt_node_drain_stuck", node=NODE) == 1
            assert await exporter.sample("kubevirt_node_drain_failing_vmis", node=NODE) == 1
        evacuation = await exporter.until(
            "/v1/evacuations", lambda _, body: any(row["leftover"] for row in body["evacuations"])
        )
        (leftover,) = evacuation["evacuations"]
        prove(f"rig: after the uncordon: {leftover['nextStep']}")
        assert leftover["command"] == leftover["cancel"]["command"]
        await exporter.until(f"/v1/nodes/{NODE}", lambda _, body: body["drain"] is None)
        namespace, name = key.split("/")
        node = leftover["cancel"]["body"]["evacuationNodeName"]
        await rig.cluster.cancel_evacuation(name, namespace, node)
        await exporter.until("/v1/evacuations", lambda _, body: not body["evacuations"])

    assert stuck["schedulable"] is False


BUDGETED = {
    "restarts": {"evictionStrategy": "None"},
    "restarts-too": {"evictionStrategy": "LiveMigrateIfPossible"},
    "leaves": {"evictionStrategy": "LiveMigrate"},
    "external": {"evictionStrategy": "External"},
}
"""VMs by namespace, each with a budget that allows no disruption of its pod."""


async def test_which_vms_a_budget_stops(stage: Stage, prove: Prove) -> None:
    """A PodDisruptionBudget stops the eviction of VMs that would restart, and of no others."""
    rig, outputs = stage.rig, {}
    keys = {name: f"budget-{name}/db1" for name in BUDGETED}
    async with AsyncExitStack() as stack:
        for name, spec in BUDGETED.items():
            scene = await stack.enter_async_context(rig.vmi(keys[name], node=NODE, **spec))
            if name == "restarts-too":
                await rig.player.set_migratable(scene.vmi, migratable=False)
            labels = objects.labels(scene.pods[0])
            await rig.cluster.admin.create(
                BUDGETS,
                {
                    "apiVersion": BUDGETS.api_version,
                    "kind": BUDGETS.kind,
                    "metadata": {"namespace": f"budget-{name}", "name": "none"},
                    "spec": {
                        "maxUnavailable": 0,
                        "selector": {"matchLabels": {VM_NAME: labels[VM_NAME]}},
                    },
                },
            )
            # The disruption controller would write this, but does not run here.
            await rig.cluster.admin.merge_status(
                BUDGETS,
                f"budget-{name}",
                "none",
                {
                    "status": {
                        **dict.fromkeys(("currentHealthy", "desiredHealthy", "expectedPods"), 1),
                        "disruptionsAllowed": 0,
                        "observedGeneration": 1,
                    }
                },
            )
        forecast = await stage.exporter.until(
            f"/v1/nodes/{NODE}",
            lambda status, body: status == 200 and (body["stays"], body["vmis"]) == (2, 4),
        )
        for name, key in keys.items():
            outputs[name] = await rig.drain(key)
        await rig.until(keys["leaves"], lambda scene: scene.vmi["status"]["nodeName"] != NODE)

    outcomes = {
        candidate["namespace"].removeprefix("budget-"): (candidate["outcome"], candidate["cause"])
        for candidate in forecast["candidates"]
    }
    for name, (outcome, _) in outcomes.items():
        words = outputs[name].rpartition("denied the request: ")[2]
        prove(f"rig: budget of 0: {name:12} forecast {outcome:8}: {words[:90]}")
    for name in ("restarts", "restarts-too"):
        outcome, cause = outcomes[name]
        assert outcome == "stays"
        assert (cause["source"], cause["reason"]) == ("PodDisruptionBudget", "none")
        assert "disruption budget" in outputs[name]
    assert (outcomes["leaves"][0], outcomes["external"][0]) == ("leaves", "external")
    assert all("Eviction triggered evacuation" in outputs[name] for name in ("leaves", "external"))


async def test_somebody_moves_an_external_vm(stage: Stage, prove: Prove) -> None:
    """Migrations of a VM with strategy External count as attempts, until one succeeds."""
    rig, exporter, key = stage.rig, stage.exporter, "external/db1"
    namespace, name = key.split("/")
    states = []
    async with rig.vmi(key, "fails", "fails", "succeeds", node=NODE, evictionStrategy="External"):
        await rig.evict(key, descheduler=False)
        for attempt in range(3):
            waiting = await exporter.until(
                f"/v1/vmis/{key}", partial(_waits_for_others, failed=attempt)
            )
            states.append(waiting["evacuation"]["state"])
            made = await rig.cluster.migrate(name, namespace)
            moving = await exporter.until(
                f"/v1/vmis/{key}",
                partial(_is_attempt, made["metadata"]["uid"]),
            )
            states.append((moving["evacuation"] or {}).get("state", "over"))
            await rig.until(key, partial(_has_finished, attempt + 1))
        await exporter.until(f"/v1/vmis/{key}", lambda _, body: body["evacuation"] is None)

    prove(f"rig: External, moved by somebody: {', '.join(states)}")
    assert states[::2] == ["external"] * 3


def _waits_for_others(_: int, vmi: dict[str, Any], *, failed: int) -> bool:
    evacuation = vmi["evacuation"]
    return bool(
        evacuation and evacuation["state"] == "external" and evacuation["failedAttempts"] == failed
    )


def _is_attempt(uid: str, _: int, vmi: dict[str, Any]) -> bool:
    evacuation = vmi["evacuation"]
    return evacuation is None or (
        evacuation["attempt"] is not None and evacuation["attempt"]["uid"] == uid
    )


def _has_finished(attempts: int, scene: Scene) -> bool:
    return sum(phase in ("Failed", "Succeeded") for phase in scene.phases) >= attempts
