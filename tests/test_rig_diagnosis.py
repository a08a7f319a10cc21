"""What the exporter says while KubeVirt's own controllers evacuate, fail, wait and collect."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from exporter.demo import objects
from tests.cluster.rig import Rig
from tests.program import Program, program


FAILING = "failing/db1"
FAILURES = 4
FAILED_ATTEMPTS = "kubevirt_vmi_evacuation_failed_attempts"
STUCK = "kubevirt_vmi_evacuation_stuck"


@dataclass
class Diary:
    """What was said of one evacuation, by how many of its attempts had failed."""

    states: dict[int, set[str]] = field(default_factory=lambda: defaultdict(set))
    backoffs: dict[int, set[float]] = field(default_factory=lambda: defaultdict(set))
    stuck: dict[int, set[tuple[str, ...]]] = field(default_factory=lambda: defaultdict(set))
    metrics: dict[int, set[float]] = field(default_factory=lambda: defaultdict(set))

    def write(self, told: dict[str, Any]) -> None:
        """One answer of the API."""
        failed = told["failedAttempts"]
        self.states[failed].add(told["state"])
        self.stuck[failed].add(tuple(told["stuckBy"]))
        if told["backoff"] is not None:
            self.backoffs[failed].add(told["backoff"]["seconds"])


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    """KubeVirt's servers and three nodes."""
    async with Rig.opened() as one:
        yield one


async def evacuation(exporter: Program, key: str) -> dict[str, Any] | None:
    """What GET /v1/evacuations says of one VMI."""
    namespace, name = key.split("/")
    status, body = await exporter.get("/v1/evacuations")
    assert status == 200
    told: list[dict[str, Any]] = body["evacuations"]
    return next((e for e in told if (e["namespace"], e["name"]) == (namespace, name)), None)


async def test_each_step_of_an_evacuation_that_fails_and_one_that_succeeds(
    rig: Rig, tmp_path: Path, prove: Callable[[str], None]
) -> None:
    """Counted, explained and measured through KubeVirt's real backoff; cleared by a success."""
    control = rig.cluster.control
    login = ("--kubeconfig", str(control.kubeconfig(control.exporter)))
    async with (
        rig.vmi(FAILING, "crashes", node="node-3"),
        rig.vmi("moved/db1", "succeeds", node="node-1"),
        program(tmp_path, *login) as exporter,
    ):
        await exporter.ready()
        assert await evacuation(exporter, FAILING) is None

        await rig.evict(FAILING)
        keeping = asyncio.create_task(keep_diary(exporter))
        await rig.evict("moved/db1")
        await rig.until("moved/db1", lambda scene: scene.phases == ["Succeeded"])
        await exporter.until(
            "/v1/vmis/moved/db1",
            lambda _, body: body["evacuation"] is None and len(body["migrations"]) == 1,
        )
        verdict = await exporter.until_verdict("moved", "db1", "preEviction", "cooldown")
        assert verdict["migrationsInWindow"] == 1

        scene = await rig.until(
            FAILING,
            lambda scene: scene.phases == ["Failed"] * FAILURES + ["Pending"],
            within=250,
        )
        diary = await asyncio.wait_for(keeping, 30)
        told = await evacuation(exporter, FAILING)
        assert told is not None
        requested = objects.condition(scene.vmi, "EvictionRequested")
        assert requested is not None
        assert told["requestedAt"] == requested["lastTransitionTime"]
        assert (told["source"], told["evacuationNodeName"]) == ("descheduler", "node-3")
        assert told["attempt"]["name"] == scene.vmims[-1]["metadata"]["name"]
        await rig.cluster.cancel_evacuation(
            "db1", "failing", told["cancel"]["body"]["evacuationNodeName"]
        )

        await exporter.until("/v1/evacuations", lambda _, body: body["evacuations"] == [])
        assert await exporter.sample(FAILED_ATTEMPTS, namespace="failing") == 0

    assert sorted(diary.states) == list(range(FAILURES + 1))
    assert {n: diary.backoffs[n] for n in range(1, FAILURES + 1)} == {
        1: {20.0}, 2: {40.0}, 3: {80.0}, 4: {160.0},
    }  # fmt: skip
    for failed in range(1, FAILURES + 1):
        assert "backoff" in diary.states[failed]
        assert diary.stuck[failed] == ({("failures",)} if failed >= 3 else {()})
        assert failed in diary.metrics[failed]
    for failed in range(FAILURES + 1):
        prove(f"rig: {failed} failed: {', '.join(sorted(diary.states[failed]))}")


async def keep_diary(exporter: Program) -> Diary:
    """Ask again and again, until the last failure has been counted and its backoff told."""
    diary = Diary()
    namespace, name = FAILING.split("/")
    while FAILURES not in diary.backoffs:
        told = await evacuation(exporter, FAILING)
        if told is not None:
            diary.write(told)
            value = await exporter.sample(FAILED_ATTEMPTS, namespace=namespace, name=name)
            diary.metrics[int(value)].add(value)
            stuck = await exporter.sample(STUCK, namespace=namespace, name=name)
            assert stuck == (value >= 3)
        await asyncio.sleep(0.3)
    return diary
