"""EvictionRequests are answered: the whole program beside Kubernetes' controllers, simulated."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from exporter.demo import objects
from exporter.demo.cluster import Cluster
from exporter.demo.controller import Rules
from exporter.demo.eviction_requests import EVICTOR
from exporter.demo.kubectl import DemoApiServer
from exporter.demo.objects import Object
from exporter.demo.plan import Fate, Pace
from exporter.demo.store import EVICTION_REQUESTS, EVICTIONS, MIGRATIONS
from tests.program.exporting import exporting
from tests.program.waiting import wait_until
from tests.unit.demo.lab import ask, withdraw


NAMESPACE = "shop"
RESPONDER = "kubevirt-eviction-exporter.io/cooldown"
BLOCKS = "descheduler_kubevirt_eviction_blocks_total"
HOLDS = "kubevirt_eviction_exporter_eviction_request_hold_seconds_count"
SPEED = 10.0
FAILING = f"/v1/vmis/{NAMESPACE}/failing"


class Fated:
    """A scenario in which the migrations of VMs named `failing…` fail."""

    def fate(self, vmi: Object, attempt: int) -> Fate:
        """The first migration of a VM succeeds; the migrations of a failing one fail after that."""
        name = vmi["metadata"]["name"]
        fails = name.startswith("failing") and attempt > 0
        return Fate("fails" if fails else "succeeds", copying=5.0)

    def choose_node(self, vmi: Object, free: Sequence[str]) -> str:  # noqa: ARG002 (the protocol)
        """The first free node."""
        return min(free)


class Scene:
    """A running cluster with the controllers of EvictionRequests."""

    def __init__(self) -> None:
        self.cluster = Cluster(
            datetime.now(UTC),
            Fated(),
            nodes=3,
            rules=Rules(faster=SPEED),
            pace=Pace(speed=SPEED),
        )
        self.cluster.set_up(NAMESPACE)
        self.cluster.answer_requests(RESPONDER)
        self.server = DemoApiServer(self.cluster)
        self.messages: list[str] = []
        """The messages of our responder, in order."""

    async def step(self) -> None:
        """Run the cluster in real time until cancelled."""
        while True:
            self.cluster.step(datetime.now(UTC))
            self._record_messages()
            await asyncio.sleep(0.02)

    async def start_vm(self, name: str, strategy: str = "LiveMigrate") -> None:
        """Start a VM that can be migrated, and wait until it runs."""
        self.cluster.create_vmi(
            objects.build_vmi(NAMESPACE, name, strategy=strategy, annotations={})
        )
        await wait_until(
            lambda: objects.is_true(self._vmi(name), "LiveMigratable"), what=f"{name} runs"
        )

    async def migrate(self, name: str) -> None:
        """Migrate a VM as a user does, and wait until it has moved."""
        left = self.node_of(name)
        self.cluster.store.create(
            MIGRATIONS,
            {
                "metadata": {"namespace": NAMESPACE, "name": f"move-{name}"},
                "spec": {"vmiName": name},
            },
        )

        def has_ended() -> bool:
            vmim = self.cluster.store.get(MIGRATIONS, NAMESPACE, f"move-{name}")
            return self.node_of(name) != left and objects.is_final(vmim)

        await wait_until(has_ended, what="a migration")

    def ask(self, name: str, requester: str = "example.com/drain") -> str:
        """Create the EvictionRequest of this requester for the VM's pod; returns its name."""
        return ask(self.cluster, name, requester)

    async def until(self, holds: Any, what: str) -> Object:
        """Wait until the only Eviction is so; returns it."""

        def attempt() -> Object | None:
            evictions = [*self.cluster.store.objects(EVICTIONS)]
            return evictions[0] if evictions and holds(evictions[0]) else None

        return await wait_until(attempt, what=what)

    def node_of(self, name: str) -> str:
        """The node of a VM."""
        return str(self._vmi(name)["status"].get("nodeName", ""))

    def marker_of(self, name: str) -> str:
        """The node that KubeVirt evacuates the VM from."""
        return objects.evacuated_node(self._vmi(name))

    def _vmi(self, name: str) -> Object:
        vmi = self.cluster.vmi(NAMESPACE, name)
        assert vmi is not None
        return vmi

    def _record_messages(self) -> None:
        for eviction in self.cluster.store.objects(EVICTIONS):
            message = find_entry(eviction).get("message", "")
            if message and message not in self.messages:
                self.messages.append(message)


def find_entry(eviction: Object, responder: str = RESPONDER) -> Any:
    """What a responder has written into an Eviction."""
    entries = eviction["status"].get("responders", [])
    return next((entry for entry in entries if entry["name"] == responder), {})


def find_state(eviction: Object, responder: str = RESPONDER) -> str:
    """The state of a responder."""
    turns = eviction["status"].get("targetResponders", [])
    return next((str(turn["state"]) for turn in turns if turn["name"] == responder), "")


def has_failed(vm: Any) -> bool:
    """Whether an attempt to move the VM has failed."""
    return bool(vm["evacuation"] and vm["evacuation"]["failedAttempts"])


def is_true(condition: str) -> Any:
    """Whether a condition of an Eviction is true."""
    return lambda eviction: any(
        entry["type"] == condition and entry["status"] == "True"
        for entry in eviction["status"].get("conditions", [])
    )


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    """A cluster that runs during the test."""
    scene = Scene()
    async with scene.server:
        stepping = asyncio.create_task(scene.step())
        yield scene
        stepping.cancel()
        await asyncio.wait([stepping])


def exporter_of(scene: Scene, folder: Path, **requests: object) -> Any:
    """The program, which answers the EvictionRequests of a scene."""
    config: dict[str, object] = {
        "evictionRequests": {"mode": "respond", **requests},
        "policy": {"migrationCooldown": "6s", "maxMigrationCooldown": "6s"},
        "kube": {"retryBackoff": "2s"},
    }
    return exporting(scene.server.url, folder, **config)


async def test_a_vm_in_its_cooldown_is_held_and_then_evicted(scene: Scene, tmp_path: Path) -> None:
    """Held with reason and time, evicted when the cooldown is over, followed until it has left."""
    await scene.start_vm("db1")
    async with exporter_of(scene, tmp_path) as exporter:
        await scene.migrate("db1")
        left = scene.node_of("db1")
        scene.ask("db1")
        second = scene.ask("db1", "example.com/upgrade")
        held = await scene.until(lambda eviction: "message" in find_entry(eviction), "a hold")
        withdraw(scene.cluster, second)
        assert (await exporter.get("/v1/status"))[1]["responder"]["turns"] == 1
        ended = await scene.until(is_true("TargetEvicted"), "the end")
        blocks = await exporter.sample(BLOCKS, reason="cooldown", namespace=NAMESPACE)
        holds = await exporter.sample(HOLDS)
    entry = find_entry(held)
    assert entry["expectedCompletionTime"] > entry["heartbeatTime"]
    assert entry["message"].startswith(
        f"{NAMESPACE}/db1 may not be moved now: it is cooling down after its last migration, until "
    )
    assert scene.node_of("db1") != left
    assert find_state(ended) == "Completed"
    assert not find_entry(ended, EVICTOR), "Kubernetes' own responder had nothing to do"
    assert (blocks, holds) == (1, 1)


async def test_kubernetes_evicts_after_the_hold(scene: Scene, tmp_path: Path) -> None:
    """With `evict: false` the responder completes after its hold."""
    await scene.start_vm("db1")
    async with exporter_of(scene, tmp_path, evict=False):
        await scene.migrate("db1")
        scene.ask("db1")
        await scene.until(lambda eviction: "message" in find_entry(eviction), "a hold")
        ended = await scene.until(is_true("TargetEvicted"), "the end")
    assert find_state(ended) == "Completed"
    assert "Eviction triggered evacuation" in find_entry(ended, EVICTOR)["message"]


async def test_a_vm_that_would_be_stopped_is_left_to_kubernetes(
    scene: Scene, tmp_path: Path
) -> None:
    """The exporter never evicts a VM without a strategy; the message says what happens."""
    await scene.start_vm("cache", strategy="None")
    async with exporter_of(scene, tmp_path) as exporter:
        scene.ask("cache")
        await scene.until(lambda row: find_state(row, EVICTOR) == "Active", "Kubernetes' turn")
        asked = exporter.events("eviction_asked_for")
    assert scene.messages == [
        f"If {NAMESPACE}/cache is evicted, it goes down: its strategy is None."
    ]
    assert asked == []


async def test_what_is_withdrawn_is_cancelled(scene: Scene, tmp_path: Path) -> None:
    """Withdrawn in the middle of failing attempts: KubeVirt's marker goes, and stays away."""
    await scene.start_vm("failing")
    await scene.migrate("failing")
    async with exporter_of(scene, tmp_path, cancel=True) as exporter:
        request = scene.ask("failing")
        await exporter.until(FAILING, lambda _, vm: has_failed(vm))
        withdraw(scene.cluster, request)
        await wait_until(lambda: not scene.marker_of("failing"), what="no marker")
        cancelled = await wait_until(
            lambda: exporter.events("evacuation_cancelled"), what="the log"
        )
        evacuations = (await exporter.get("/v1/evacuations"))[1]["evacuations"]
    assert cancelled[0]["withdrawn"] == ["example.com/drain"]
    assert evacuations == []


async def test_what_is_withdrawn_is_said(scene: Scene, tmp_path: Path) -> None:
    """The message follows the evacuation. Withdrawn, it is left over, also after the deletion."""
    await scene.start_vm("failing")
    await scene.migrate("failing")
    async with exporter_of(scene, tmp_path) as exporter:
        request = scene.ask("failing")
        await exporter.until(FAILING, lambda _, vm: has_failed(vm))
        followed = await scene.until(
            lambda eviction: "leaves" in find_entry(eviction).get("message", ""), "the state"
        )
        asked = (await exporter.get(FAILING))[1]["evacuation"]
        withdraw(scene.cluster, request)
        left = await exporter.until(FAILING, lambda _, vm: (vm["evacuation"] or {}).get("leftover"))
        scene.cluster.store.delete(EVICTION_REQUESTS, NAMESPACE, request)
        await wait_until(lambda: not [*scene.cluster.store.objects(EVICTIONS)], what="no Eviction")
        deleted = await exporter.until(FAILING, lambda _, vm: vm["evacuation"] is not None)
    step, node = left["evacuation"]["nextStep"], left["evacuation"]["evacuationNodeName"]
    assert find_entry(followed)["message"].startswith(f"{NAMESPACE}/failing leaves {node}: ")
    assert "First withdraw the EvictionRequest of example.com/drain" in asked["cancel"]["needs"]
    assert step.startswith(
        "Cancel the evacuation: example.com/drain asked for it by an EvictionRequest, and nobody"
        " asks any more"
    )
    assert "virtualmachineinstances/evacuate/cancel" in left["evacuation"]["cancel"]["needs"]
    assert left["evacuation"]["command"] == left["evacuation"]["cancel"]["command"]
    assert deleted["evacuation"]["leftover"]


async def test_another_process_goes_on_with_a_hold(scene: Scene, tmp_path: Path) -> None:
    """A hold outlives the process that began it, and is counted once."""
    await scene.start_vm("db1")
    await scene.migrate("db1")
    (tmp_path / "next").mkdir()
    async with exporter_of(scene, tmp_path) as exporter:
        scene.ask("db1")
        await scene.until(lambda eviction: "message" in find_entry(eviction), "a hold")
        await exporter.end()
    async with exporter_of(scene, tmp_path / "next") as exporter:
        ended = await scene.until(is_true("TargetEvicted"), "the end")
        blocks = await exporter.sample(BLOCKS, reason="cooldown", namespace=NAMESPACE)
    assert find_state(ended) == "Completed"
    assert sum("may not be moved now" in message for message in scene.messages) == 1
    assert blocks == 0
