"""What Kubernetes' own controllers of EvictionRequests do with VMs, without our responder."""

from collections.abc import AsyncIterator

import pytest

from exporter.demo.objects import phase
from tests.cluster.eviction_requests import (
    NEEDS_CONTROLLERS,
    Asking,
    condition_of,
    message_of,
    state_of,
)
from tests.cluster.player import Fate


pytestmark = NEEDS_CONTROLLERS

EVICTOR = "imperative-eviction.k8s.io/evictor"
DRAIN, UPGRADE = "example.com/drain", "example.com/upgrade"
EVICTED, FAILED = "TargetEvicted", "Failed"
IN_PROGRESS = "Evacuation in progress"


@pytest.fixture(scope="module")
async def asking() -> AsyncIterator[Asking]:
    """Servers of Kubernetes 1.38 and KubeVirt, and three nodes."""
    async with Asking.opened() as opened:
        yield opened


async def test_a_request_moves_a_vm(asking: Asking) -> None:
    """KubeVirt's webhook turns the evictor's attempt into an evacuation, whose end ends it all."""
    key = "er-moved/db1"
    async with asking.rig.vmi(key, Fate(seconds=6), evictionStrategy="LiveMigrate"):
        pod = await asking.rig.pod(key)
        await asking.ask(pod, DRAIN)
        refused = await asking.until(
            pod, lambda eviction: IN_PROGRESS in message_of(eviction, EVICTOR)
        )
        assert condition_of(refused, FAILED) == ("False", "AwaitingEviction")
        await asking.record("moving", "A VM that is asked for, while it migrates.", key, pod)
        left = await asking.until(pod, lambda row: condition_of(row, EVICTED)[0] == "True")
        assert condition_of(left, EVICTED) == ("True", "PodTerminal")
        await asking.until(pod, lambda eviction: state_of(eviction, EVICTOR) == "Completed")
        await asking.record("left", "The same VM after its migration.", key, pod)


async def test_nothing_stops_kubevirt(asking: Asking) -> None:
    """One of two requesters may withdraw; after the last one KubeVirt still goes on."""
    key = "er-withdrawn/db1"
    async with asking.rig.vmi(key, Fate("fails", 1.2), evictionStrategy="LiveMigrate"):
        pod = await asking.rig.pod(key)
        first, second = [await asking.ask(pod, name) for name in (DRAIN, UPGRADE)]
        await asking.rig.until(key, lambda scene: "Failed" in scene.phases)
        await asking.until(
            pod,
            lambda eviction: (
                message_of(eviction, EVICTOR) and len(eviction["status"]["requesters"]) == 2
            ),
        )
        await asking.withdraw(first)
        await asking.until(
            pod,
            lambda eviction: (
                {"name": DRAIN, "intent": "Withdrawn"} in eviction["status"]["requesters"]
            ),
        )
        await asking.record("one-withdrawn", "One of two requesters withdrew.", key, pod)
        await asking.withdraw(second)
        cancelled = await asking.until(pod, lambda row: condition_of(row, FAILED)[0] == "True")
        assert condition_of(cancelled, FAILED) == ("True", "CanceledDueToNoRequesters")
        assert state_of(cancelled, EVICTOR) == "Canceled"
        vmims = len((await asking.rig.look(key)).vmims)
        going_on = await asking.rig.until(key, lambda scene: len(scene.vmims) > vmims)
        assert going_on.marked
        await asking.record("withdrawn", "Both withdrew, and KubeVirt goes on.", key, pod)


async def test_a_target_pod_is_moved_on(asking: Asking) -> None:
    """A request for the target pod of a migration moves the VM again after its end."""
    key = "er-target/db1"
    async with asking.rig.vmi(key, Fate(seconds=6), evictionStrategy="LiveMigrate"):
        await asking.rig.cluster.migrate("db1", "er-target")
        moving = await asking.rig.until(key, lambda scene: "targetPod" in scene.state)
        name = moving.state["targetPod"]
        (target,) = [pod for pod in moving.pods if pod["metadata"]["name"] == name]
        await asking.ask(target, DRAIN)
        await asking.until(target, lambda eviction: message_of(eviction, EVICTOR))
        await asking.record("target", "The target pod of a migration is asked for.", key, target)
        again = await asking.rig.until(key, lambda scene: len(scene.vmims) == 2)
        assert again.phases[0] == "Succeeded"


@pytest.mark.parametrize(
    ("case", "strategy", "migratable", "texts"),
    [
        ("external", "External", True, "evacuation of VMI|Evacuation in progress"),
        ("not-migratable", "LiveMigrate", False, "is not live-migratable"),
    ],
)
async def test_a_request_that_never_ends(
    asking: Asking, case: str, strategy: str, migratable: bool, texts: str
) -> None:
    """The evictor tries for ever where KubeVirt does not move a VM; nothing says that it fails."""
    key = f"er-{case}/db1"
    async with asking.rig.vmi(key, "hangs", evictionStrategy=strategy) as scene:
        if not migratable:
            await asking.rig.player.set_migratable(scene.vmi, migratable=False)
        pod = await asking.rig.pod(key)
        await asking.ask(pod, DRAIN)
        refused = await asking.until(
            pod,
            lambda eviction: any(
                text in message_of(eviction, EVICTOR) for text in texts.split("|")
            ),
        )
        assert condition_of(refused, FAILED) == ("False", "AwaitingEviction")
        await asking.record(case, f"A VM with {strategy} that KubeVirt does not move.", key, pod)


async def test_a_killed_vm_counts_as_evicted(asking: Asking) -> None:
    """LiveMigrateIfPossible without a possible migration: the VM is stopped, said as a success."""
    key = "er-killed/db1"
    async with asking.rig.vmi(key, "hangs", evictionStrategy="LiveMigrateIfPossible") as scene:
        await asking.rig.player.set_migratable(scene.vmi, migratable=False)
        pod = await asking.rig.pod(key)
        await asking.ask(pod, DRAIN)
        gone = await asking.until(pod, lambda row: condition_of(row, EVICTED)[0] == "True")
        assert condition_of(gone, EVICTED)[1] in {"PodDeleted", "PodTerminal"}
        await asking.rig.until(key, lambda scene: phase(scene.vmi) in {"Failed", "Succeeded"})
