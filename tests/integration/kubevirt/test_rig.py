"""KubeVirt's own virt-api and virt-controller, with simulated nodes."""

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, TypeAlias

import pytest

from exporter.demo import objects
from exporter.demo.objects import Object
from tests.cluster import ApiError, poll
from tests.cluster.player import Fate, Outcome
from tests.cluster.recording import Scene
from tests.cluster.resources import PODS, QUOTAS, VMIMS, VMIS
from tests.cluster.rig import Rig
from tests.cluster.servers import Scheduler
from tests.cluster.versions import OWN_SCHEDULER, RUNNING, is_kubevirt_at_least, since
from tests.support.evacuation_log import (
    FAILED_ATTEMPTS,
    EvacuationLog,
    ask_evacuation,
    record_evacuation,
)
from tests.support.program import Program, program


BY_WEBHOOK = "virt-api's eviction webhook marked the VMI. "
BY_EVACUATION = BY_WEBHOOK + "virt-controller's evacuation controller created the VMIMs. "
PHASES = "virt-controller wrote the VMIM phases, the target pods and the hand-off. "
PLAYED = "Played with the functions of exporter.demo.node: "
FAILING = "failing/db1"
FAILURES = 4
Quote: TypeAlias = Callable[[str, str, str], Awaitable[Object]]
HAS_REQUESTS = is_kubevirt_at_least("1.7")
"""Whether KubeVirt has the condition EvictionRequested, the annotation eviction-source and the
subresource evacuate/cancel.

Before 1.7 the pod has the annotation `eviction-in-progress` only while an attempt runs.
"""
IN_PROGRESS = "true" if HAS_REQUESTS else "kubevirt"


@dataclass
class Stage:
    """The rig, the exporter that watches it, and the exporter's answers about a failing VMI."""

    rig: Rig
    exporter: Program
    diary: "asyncio.Task[EvacuationLog]"


@pytest.fixture(scope="module")
async def stage(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stage]:
    """KubeVirt's servers and three nodes; one VMI fails from the beginning."""
    async with (
        Rig.opened() as rig,
        rig.vmi(FAILING, "crashes", node="node-3"),
        program(tmp_path_factory.mktemp("rig"), *rig.login) as exporter,
    ):
        await exporter.ready()
        await rig.evict(FAILING)
        diary = asyncio.create_task(record_evacuation(exporter, FAILING, failures=FAILURES))
        try:
            yield Stage(rig, exporter, diary)
        finally:
            diary.cancel()
            await asyncio.gather(diary, return_exceptions=True)


@pytest.fixture(scope="module")
def rig(stage: Stage) -> Rig:
    """The rig alone."""
    return stage.rig


@pytest.fixture
def quote(stage: Stage, prove: Callable[[str], None]) -> Quote:
    """Wait until an evacuation is in a state with a reason from a source; returns the reason.

    The reason is printed as KubeVirt or the scheduler wrote it.
    """

    async def ask(key: str, state: str, source: str) -> Object:
        async def find() -> Object | None:
            evacuation = await ask_evacuation(stage.exporter, key)
            if evacuation is None or evacuation["state"] != state:
                return None
            return next((why for why in evacuation["why"] if why["source"] == source), None)

        why = await poll(find, what=f"a reason from {source} for {key}")
        prove(f"rig: {state}: {source} {why['reason']}: {why['message']!r}")
        return why

    return ask


def _is_copying(scene: Scene) -> bool:
    return "Running" in scene.phases and objects.is_migrating(scene.vmi)


def _is_over(scene: Scene) -> bool:
    left = objects.labels(scene.vmi).get(objects.MIGRATION_TARGET_NODE)
    return bool(scene.vmims) and all(map(objects.is_final, scene.vmims)) and left is None


def _held_by(condition: str) -> Callable[[Scene], object]:
    """Whether the first VMIM has this condition."""
    return lambda scene: scene.vmims and objects.is_true(scene.vmims[0], condition)


async def test_an_eviction_becomes_an_evacuation_that_succeeds(rig: Rig) -> None:
    """An eviction marks the VMI, KubeVirt migrates it, and the success clears the marker."""
    async with rig.vmi("moved/db1", "hangs"):
        refusal = await rig.evict("moved/db1")
        again = await rig.evict("moved/db1")
        copying = await rig.until("moved/db1", _is_copying)

        triggered = 'Eviction triggered evacuation of VMI "moved/db1"'
        assert refusal.endswith(f"denied the request: {triggered}")
        assert again.endswith(f"denied the request: Evacuation in progress: {triggered}")
        requested = objects.condition(copying.vmi, "EvictionRequested")
        assert (requested is not None) is HAS_REQUESTS
        if requested is not None:
            assert requested["status"] == "True"
            assert requested["lastTransitionTime"]
        assert copying.marked == "node-1"
        annotated = "descheduler" if HAS_REQUESTS else None
        assert objects.annotations(copying.vmi).get(objects.EVICTION_SOURCE) == annotated
        (vmim,) = copying.vmims
        assert vmim["metadata"]["generateName"] == "kubevirt-evacuation-"
        assert objects.annotations(vmim)[objects.EVACUATION] == "node-1"
        assert objects.labels(vmim)[objects.VMI_NAME] == "db1"
        assert vmim["metadata"]["finalizers"] == [objects.MIGRATION_FINALIZER]
        source, target = copying.pods
        assert objects.annotations(source)[objects.EVICTION_IN_PROGRESS] == IN_PROGRESS
        assert objects.EVICTION_IN_PROGRESS not in objects.annotations(target)
        assert objects.annotations(target).get(objects.EVICTION_SOURCE) == annotated
        await rig.record(
            "migrating",
            BY_EVACUATION + PHASES + PLAYED + "scheduler, kubelet, virt-handlers: prepared, "
            "started, and copying ever since.",
            copying,
        )

        rig.player.decide(vmim["metadata"]["uid"], "succeeds")
        moved = await rig.until(
            "moved/db1", lambda scene: _is_over(scene) and objects.active_pods(scene.pods) == 1
        )

        assert moved.phases == ["Succeeded"]
        assert moved.marked == ""
        assert moved.vmi["status"]["nodeName"] == "node-2"
        assert objects.condition(moved.vmi, "EvictionRequested") is None
        assert objects.EVICTION_SOURCE not in objects.annotations(moved.vmi)
        assert moved.vmims[0]["status"]["migrationState"] == moved.state
        assert [objects.phase(pod) for pod in moved.pods] == ["Succeeded", "Running"]
        assert objects.annotations(moved.pods[0])[objects.EVICTION_IN_PROGRESS] == IN_PROGRESS
        await rig.record(
            "succeeded",
            BY_EVACUATION + PHASES + PLAYED + "the target's virt-handler took the VMI over and "
            "cleared evacuationNodeName and eviction-source, the kubelet ended the source pod.",
            moved,
        )


async def test_a_migration_that_libvirt_breaks_leaves_its_instants(rig: Rig, quote: Quote) -> None:
    """A failed migration leaves start, end and message on the VMI; the marker stays."""
    async with rig.vmi("broken/db1", "fails"):
        await rig.evict("broken/db1")
        waiting = await rig.until("broken/db1", lambda scene: scene.phases == ["Failed", "Pending"])

        assert waiting.marked == "node-1"
        assert waiting.state["failed"]
        assert "completed" not in waiting.state
        assert waiting.state["startTimestamp"] <= waiting.state["endTimestamp"]
        assert waiting.vmims[0]["status"]["migrationState"] == waiting.state
        assert waiting.vmims[1]["status"]["migrationState"] == {
            "sourcePod": waiting.pods[0]["metadata"]["name"]
        }
        assert ("MigrationBackoff", "backoff migrating vmi broken/db1") in await rig.events(
            "broken"
        )
        await rig.record(
            "backoff",
            BY_EVACUATION + PHASES + "It holds the second VMIM in Pending, 20 s from the first "
            "one's failure. " + PLAYED + "the source's virt-handler reported the failure.",
            waiting,
        )
        why = await quote("broken/db1", "backoff", "FailedAttempt")

        assert why["reason"] == "Running"
        assert why["message"].startswith(f"{waiting.state['failureReason']} (after Pending ")


async def test_a_deleted_migration_is_aborted_and_followed_without_a_wait(rig: Rig) -> None:
    """Deleting a running migration's VMIM aborts it; the next one starts without a backoff."""
    key = "aborted/db1"
    async with rig.vmi(key, "hangs", "hangs"):
        await rig.evict(key)
        first = await rig.until(key, _is_copying)
        await rig.cluster.admin.delete(VMIMS, "aborted", first.vmims[0]["metadata"]["name"])
        second = await rig.until(
            key, lambda scene: _is_copying(scene) and scene.state != first.state, within=15
        )

        assert len(second.vmims) == 1
        assert second.vmims[0]["metadata"]["uid"] != first.vmims[0]["metadata"]["uid"]
        assert second.state["migrationUid"] == second.vmims[0]["metadata"]["uid"]
        assert second.marked == "node-1"


async def test_no_pod_event_wakes_the_evacuation_controller(rig: Rig) -> None:
    """If the target pod ends after its migration, the next attempt waits for a Node update."""
    key = "between/db1"
    async with rig.vmi(key, "fails"):
        rig.player.beating.clear()
        # The pod must end after KubeVirt has seen the failure, on a busy machine too.
        rig.player.pace, usual = 2.0, rig.player.pace
        await rig.evict(key)
        between = await rig.until(
            key, lambda scene: _is_over(scene) and objects.active_pods(scene.pods) == 1
        )
        rig.player.pace = usual
        rig.player.beating.set()
        after = await rig.until(key, lambda scene: len(scene.vmims) == 2)

        assert between.phases == ["Failed"]
        assert between.marked == "node-1"
        assert after.phases == ["Failed", "Pending"]
        await rig.record(
            "further/no_migration.between_attempts",
            BY_EVACUATION + PHASES + "It creates the next one at the next event of the node, which "
            "is virt-handler's heartbeat at the latest. " + PLAYED + "the source's virt-handler "
            "reported the failure, after it the kubelet the end of the target pod.",
            between,
        )


async def test_an_unschedulable_target_waits_and_the_evacuation_can_be_cancelled(rig: Rig) -> None:
    """If the target is unschedulable, `evacuate/cancel` clears the marker, but keeps the VMIM."""
    key = "cancelled/db1"
    async with rig.vmi(key, "unschedulable"):
        await rig.evict(key)
        waiting = await rig.until(key, lambda scene: any(map(objects.is_unschedulable, scene.pods)))

        assert waiting.phases == ["Scheduling"]
        assert waiting.state == {}
        await rig.record(
            "target_unschedulable",
            BY_EVACUATION + PHASES + PLAYED + "the scheduler found no node for the target pod.",
            waiting,
        )

        with pytest.raises(ApiError) as refusal:
            await rig.cluster.cancel_evacuation("db1", "cancelled", "node-2")
        assert refusal.value.code == (500 if HAS_REQUESTS else 404)
        if not HAS_REQUESTS:
            return
        await rig.cluster.cancel_evacuation("db1", "cancelled", "node-1")
        cancelled = await rig.until(key, lambda scene: not scene.marked)

        assert cancelled.phases == ["Scheduling"]
        assert objects.condition(cancelled.vmi, "EvictionRequested") is None
        assert objects.EVICTION_IN_PROGRESS not in objects.annotations(cancelled.pods[0])
        assert objects.annotations(cancelled.vmi)[objects.EVICTION_SOURCE] == "descheduler"
        await rig.record(
            "cancelled",
            "As target_unschedulable; then virt-api's evacuate/cancel subresource removed "
            "evacuationNodeName, and virt-controller the condition and the pod's annotation.",
            cancelled,
        )

        await rig.cluster.admin.delete(VMIMS, "cancelled", cancelled.vmims[0]["metadata"]["name"])
        ended = await rig.until(key, lambda scene: len(scene.pods) == 1)

        assert ended.vmims == []


@OWN_SCHEDULER
async def test_the_scheduler_s_own_words(stage: Stage, quote: Quote) -> None:
    """The exporter keeps the scheduler's message about a target pod after the pod is gone."""
    key, rig = "nowhere/db1", stage.rig
    control = rig.cluster.control
    login = control.kubeconfig(control.certified("system:kube-scheduler"))
    home = {"kubernetes.io/hostname": "node-1"}
    async with rig.vmi(key, "never bound", nodeSelector=home):
        async with Scheduler(control.directory, login):
            await rig.evict(key)
            why = await quote(key, "target_unschedulable", "PodScheduled")

        assert why["reason"] == "Unschedulable"
        assert why["message"].startswith("0/3 nodes are available: ")
        assert "didn't match Pod's node affinity/selector" in why["message"]
        evacuation = await ask_evacuation(stage.exporter, key)
        assert evacuation is not None
        assert evacuation["cause"] == why
        assert ("NodeSelector", "kubernetes.io/hostname=node-1") in [
            (reason["reason"], reason["message"]) for reason in evacuation["why"]
        ]

        (attempt,) = await rig.cluster.vmims("db1", "nowhere")
        await rig.cluster.admin.delete(VMIMS, "nowhere", attempt["metadata"]["name"])
        await rig.until(key, lambda scene: scene.vmims and scene.vmims[0] != attempt)
        evacuation = await ask_evacuation(stage.exporter, key)
        assert evacuation is not None
        assert why["message"] in [reason["message"] for reason in evacuation["why"]]


async def test_a_target_that_never_starts_holds_its_migration_in_scheduling(
    rig: Rig, quote: Quote
) -> None:
    """A migration stays in Scheduling while its target pod's containers do not run."""
    async with rig.vmi("unready/db1", "never ready"):
        await rig.evict("unready/db1")
        waiting = await rig.until(
            "unready/db1", lambda scene: len(scene.pods) == 2 and objects.node_of(scene.pods[1])
        )

        assert waiting.phases == ["Scheduling"]
        assert objects.phase(waiting.pods[1]) == "Pending"
        await rig.record(
            "target_not_ready",
            BY_EVACUATION + PHASES + PLAYED + "the scheduler bound the target pod, and no kubelet "
            "has started it.",
            waiting,
        )
        words = {"reason": "ImagePullBackOff", "message": "Back-off pulling image virt-launcher"}
        container = {"name": "compute", "ready": False, "restartCount": 0}
        container |= {"image": "", "imageID": "", "state": {"waiting": words}}
        target, status = waiting.pods[1]["metadata"]["name"], {"containerStatuses": [container]}
        await rig.cluster.admin.merge_status(PODS, "unready", target, status)
        why = await quote("unready/db1", "target_not_ready", "TargetContainer")

        assert {"reason": why["reason"], "message": why["message"]} == words


async def test_an_external_vmi_is_marked_and_never_migrated(rig: Rig) -> None:
    """A VMI with strategy External gets only the marker, while another VMI is migrated."""
    async with (
        rig.vmi("external/db1", evictionStrategy="External"),
        rig.vmi("later/db1"),
    ):
        refusal = await rig.evict("external/db1")
        await rig.evict("later/db1")
        await rig.until("later/db1", _is_over)
        marked = await rig.until("external/db1", lambda scene: scene.marked)

        assert "Eviction triggered evacuation" in refusal
        assert marked.vmims == []
        assert (objects.EVICTION_IN_PROGRESS in objects.annotations(marked.pods[0])) is HAS_REQUESTS
        await rig.record(
            "external",
            BY_WEBHOOK + "virt-controller wrote the condition and the pod's "
            "annotation, and creates no VMIM.",
            marked,
        )


async def test_a_vmi_that_ceases_to_be_migratable_gets_no_further_migration(
    rig: Rig, quote: Quote
) -> None:
    """A VMI that is no longer migratable gets no further migration."""
    key = "unmigratable/db1"
    async with rig.vmi(key, "hangs"):
        await rig.evict(key)
        copying = await rig.until(key, _is_copying)
        await rig.player.set_migratable(copying.vmi, migratable=False)
        rig.player.decide(copying.vmims[0]["metadata"]["uid"], "fails")
        left = await rig.until(key, _is_over)

        assert left.phases == ["Failed"]
        assert left.marked == "node-1"
        await rig.record(
            "not_migratable",
            BY_EVACUATION + PHASES + "It creates no second one. " + PLAYED + "the virt-handler "
            "judged the VMI not migratable during its migration, then reported the failure.",
            left,
        )
        why = await quote(key, "not_migratable", "LiveMigratable")

        assert why["reason"] == "InterfaceNotLiveMigratable"
        assert "pod network" in why["message"]
        assert why["at"] is None


async def test_a_vmi_that_is_not_migratable_is_not_marked(rig: Rig) -> None:
    """The eviction of a VMI that is not migratable is refused, and sets no marker."""
    async with rig.vmi("pinned/db1") as scene:
        await rig.player.set_migratable(scene.vmi, migratable=False)
        refusal = await rig.evict("pinned/db1")
        after = await rig.look("pinned/db1")

        assert refusal.endswith(
            "VMI db1 is configured with an eviction strategy but is not live-migratable"
        )
        assert not after.marked


async def test_a_source_pod_that_never_ends_blocks_the_next_evacuation(rig: Rig) -> None:
    """While a VMI has two running launcher pods, the evacuation controller creates no VMIM."""
    key = "doubled/db1"
    async with rig.vmi(key, "keeps source"):
        await rig.evict(key)
        moved = await rig.until(key, _is_over)
        refusal = await rig.cluster.evict(moved.pods[0])
        assert refusal is not None
        assert refusal.status["message"].endswith("Eviction request for target Pod")
        await rig.evict(key)
        waiting = await rig.until(key, lambda scene: scene.marked)

        assert waiting.marked == "node-2"
        assert waiting.phases == ["Succeeded"]
        assert [objects.phase(pod) for pod in waiting.pods] == ["Running", "Running"]
        await rig.record(
            "multiple_active_pods",
            BY_EVACUATION
            + PHASES
            + "It creates no VMIM for the second request. "
            + PLAYED
            + "the kubelet never ended the source pod of the migration before.",
            waiting,
        )


async def test_a_lost_target_ends_the_migration_on_the_vmi(rig: Rig) -> None:
    """A target lost after the hand-off leaves a failure with equal start and end on the VMI."""
    key = "lost/db1"
    async with rig.vmi(key, "loses target"):
        await rig.evict(key)
        waiting = await rig.until(key, lambda scene: scene.phases == ["Failed", "Pending"])

        assert waiting.state["failed"]
        assert waiting.state["startTimestamp"] == waiting.state["endTimestamp"]
        reason = "Target pod is down" if is_kubevirt_at_least("1.9") else None
        assert waiting.state.get("failureReason") == reason


async def test_a_ready_target_that_is_lost_leaves_no_zombie_since_1_8(rig: Rig) -> None:
    """Since 1.8 KubeVirt ends a migration on the VMI if its ready target is lost."""
    key = "zombie/db1"
    async with rig.vmi(key, "loses ready target"):
        await rig.evict(key)
        waiting = await rig.until(key, lambda scene: scene.phases == ["Failed", "Pending"])

        assert waiting.state["targetDirectMigrationNodePorts"]
        if is_kubevirt_at_least("1.8"):
            assert waiting.state["failed"]
            assert waiting.state["startTimestamp"] == waiting.state["endTimestamp"]
            return
        assert not {"startTimestamp", "endTimestamp", "failed"} & set(waiting.state)
        await rig.record(
            "zombie_state",
            BY_EVACUATION + PHASES + "It failed the VMIM when the target pod was lost after its "
            "ports were published, and ended nothing on the VMI. " + PLAYED + "the target's "
            "virt-handler published the ports, the kubelet reported the target pod Failed.",
            waiting,
        )


async def test_a_quota_that_refuses_the_target_shows_as_a_condition(rig: Rig, quote: Quote) -> None:
    """If a quota refuses the target pod, the migration stays Pending with a condition."""
    key = "bounded/db1"
    async with rig.vmi(key):
        hard = {"hard": {"pods": "1"}}
        quota: Object = {
            "apiVersion": "v1",
            "kind": QUOTAS.kind,
            "metadata": {"name": "one-pod", "namespace": "bounded"},
            "spec": hard,
            # No controller counts the pods here, so the test writes the count.
            "status": hard | {"used": {"pods": "1"}},
        }
        await rig.cluster.admin.create(QUOTAS, quota)
        await rig.evict(key)
        waiting = await rig.until(key, _held_by("migrationRejectedByResourceQuota"))

        assert waiting.phases == ["Pending"]
        assert len(waiting.pods) == 1
        await rig.record(
            "quota",
            BY_EVACUATION + PHASES + "It wrote the VMIM's condition when kube-apiserver refused "
            "the target pod by a ResourceQuota.",
            waiting,
        )
        why = await quote(key, "quota", "MigrationCondition")

        # KubeVirt writes neither a reason nor a message, so only the condition's type is known.
        assert (why["reason"], why["message"]) == ("migrationRejectedByResourceQuota", "")


async def test_a_full_node_makes_the_next_evacuation_wait(rig: Rig) -> None:
    """At a node's migration limit KubeVirt queues the next VMIM; before 1.9 it creates none.

    With a feature gate, 1.7 and 1.8 queue it too.
    """
    async with (
        rig.vmi("full-1/db1", "hangs"),
        rig.vmi("full-2/db1", "hangs"),
        rig.vmi("full-3/db1"),
    ):
        for key in ("full-1/db1", "full-2/db1"):
            await rig.evict(key)
            await rig.until(key, _is_copying)
        others = [await rig.look("full-1/db1"), await rig.look("full-2/db1")]
        await rig.evict("full-3/db1")
        gates = []
        if not is_kubevirt_at_least("1.9"):
            waiting = await rig.until("full-3/db1", lambda scene: scene.marked)

            assert waiting.vmims == []
            await rig.record(
                "no_migration",
                BY_WEBHOOK + "virt-controller creates no VMIM while two migrations leave the node "
                "(its gate MigrationPriorityQueue is off, as by default).",
                waiting,
                others,
            )
            gates.append("MigrationPriorityQueue")
        if not is_kubevirt_at_least("1.7"):
            return
        async with rig.cluster.configured(developerConfiguration={"featureGates": gates}):
            queued = await rig.until("full-3/db1", lambda scene: scene.vmims)

            assert queued.phases == ["Pending"]
            assert queued.vmims[0]["spec"]["priority"] == "system-maintenance"
            assert len(queued.pods) == 1
            await rig.record(
                "capacity",
                BY_EVACUATION + PHASES + "It queues the VMIM in Pending (before 1.9 with the gate "
                "MigrationPriorityQueue); two other VMIs are leaving the same node.",
                queued,
                others,
            )


async def test_a_mark_that_comes_too_late_stays(rig: Rig) -> None:
    """A VMI marked for a node that it has left keeps the marker without a migration."""
    key = "stale/db1"
    async with rig.vmi(key), rig.cluster.virt_api() as virt_api:
        await rig.evict(key)
        await rig.until(key, _is_over)
        # The webhook reads and patches the VMI in two requests, and the patch checks no
        # precondition.
        late = {
            "metadata": {"annotations": {objects.EVICTION_SOURCE: "descheduler"}},
            "status": {"evacuationNodeName": "node-1"},
        }
        await virt_api.merge(VMIS, "stale", "db1", late)
        marked = await rig.until(
            key,
            lambda scene: (
                scene.marked
                and (objects.condition(scene.vmi, "EvictionRequested") or not HAS_REQUESTS)
            ),
        )

        assert marked.vmi["status"]["nodeName"] == "node-2"
        assert marked.marked == "node-1"
        assert marked.phases == ["Succeeded"]
        assert (objects.EVICTION_IN_PROGRESS in objects.annotations(marked.pods[1])) is HAS_REQUESTS
        await rig.record(
            "stale_marker",
            BY_EVACUATION + PHASES + PLAYED + "the migration. Then the test repeated the webhook's "
            "patch in virt-api's name, as a webhook does that had read the VMI before its end; "
            "virt-controller wrote the condition and the pod's annotation.",
            marked,
        )


@since("1.8", "backup of a running VMI")
async def test_a_backup_holds_a_migration_back(rig: Rig, quote: Quote) -> None:
    """While a backup of the VMI runs, its migration is Pending with a condition."""
    key = "copied/db1"
    async with rig.vmi(key) as scene:

        def back_up(vmi: Object) -> None:
            backup = {"backupName": "nightly", "startTimestamp": "2026-01-01T00:00:00Z"}
            vmi["status"]["changedBlockTracking"] = {"state": "Enabled", "backupStatus": backup}

        await rig.player.write(scene.vmi, back_up)
        await rig.evict(key)
        waiting = await rig.until(key, _held_by("migrationBlockedByBackup"))

        assert waiting.phases == ["Pending"]
        await rig.record(
            "backup",
            BY_EVACUATION + PHASES + "It wrote the VMIM's condition. The test wrote the VMI's "
            "changedBlockTracking, in a virt-handler's name.",
            waiting,
        )
        why = await quote(key, "backup", "MigrationCondition")

        assert (why["reason"], "nightly" in why["message"]) == ("BackupInProgress", True)


@since("1.8", "utility volumes")
async def test_utility_volumes_hold_a_migration_back(rig: Rig, quote: Quote) -> None:
    """While utility volumes are attached the migration is Pending with a condition."""
    key = "utility/db1"
    gates = {"featureGates": ["UtilityVolumes"]}
    async with rig.cluster.configured(developerConfiguration=gates), rig.vmi(key):
        async with rig.cluster.virt_api() as virt_api:
            volumes = [{"name": "scratch", "claimName": "scratch", "type": "MemoryDump"}]
            await virt_api.merge(VMIS, "utility", "db1", {"spec": {"utilityVolumes": volumes}})
        await rig.evict(key)
        waiting = await rig.until(key, _held_by("migrationBlockedByUtilityVolumes"))

        assert waiting.phases == ["Pending"]
        await rig.record(
            "utility_volumes",
            BY_EVACUATION + PHASES + "It wrote the VMIM's condition. The test added the utility "
            "volume in virt-api's name; there is no such claim.",
            waiting,
        )
        why = await quote(key, "utility_volumes", "MigrationCondition")

        assert why["reason"] == "UtilityVolumesPresent"
        assert why["message"].startswith("Migration is waiting for utility volumes to detach.")


async def test_five_finished_migrations_are_kept(rig: Rig) -> None:
    """Of seven manual migrations the newest five are kept."""
    key = "collected/db1"
    async with rig.vmi(key, "crashes"):
        made = []
        for _ in range(7):
            migration = await rig.cluster.migrate("db1", "collected")
            made.append(migration["metadata"]["uid"])
            await rig.until(key, _is_over)
        scene = await rig.until(key, lambda scene: len(scene.vmims) == 5)

        assert scene.phases == ["Failed"] * 5
        assert {vmim["metadata"]["uid"] for vmim in scene.vmims} == set(made[-5:])


async def test_each_failure_doubles_the_wait_for_the_next_attempt(
    rig: Rig, prove: Callable[[str], None]
) -> None:
    """Four failures in a row are 20, 40 and 80 s apart, and the fifth attempt waits 160 s."""
    scene = await rig.until(
        FAILING, lambda scene: scene.phases == ["Failed"] * 4 + ["Pending"], within=200
    )

    waits = [
        _instant(later, "Scheduling") - _instant(earlier, "Failed")
        for earlier, later in zip(scene.vmims, scene.vmims[1:-1], strict=False)
    ]
    for wait, seconds in zip(waits, (20, 40, 80), strict=True):
        assert timedelta(seconds=seconds - 1) <= wait < timedelta(seconds=2 * seconds)
    measured = ", ".join(f"{wait.total_seconds():g}" for wait in waits)
    prove(f"rig: KubeVirt {RUNNING['kubevirt']}: waits after each of three failures: {measured} s")
    for failed in scene.vmims[:-1]:
        assert list(failed["status"]["migrationState"]) == ["sourcePod"]
        assert "finalizers" not in failed["metadata"]
    assert scene.state == {}
    assert scene.marked == "node-3"
    await rig.record(
        "further/backoff.fourth",
        BY_EVACUATION + PHASES + "It holds the fifth VMIM in Pending, 160 s from the fourth "
        "one's failure. " + PLAYED + "the kubelet reported each target pod Failed before it was "
        "ready, so nothing was handed off.",
        scene,
    )


async def test_the_exporter_tells_every_step_of_it(
    stage: Stage, prove: Callable[[str], None]
) -> None:
    """The exporter shows each failed attempt, until the evacuation is cancelled."""
    scene = await stage.rig.until(
        FAILING, lambda scene: scene.phases == ["Failed"] * FAILURES + ["Pending"], within=200
    )
    diary = await asyncio.wait_for(asyncio.shield(stage.diary), 30)
    evacuation = await ask_evacuation(stage.exporter, FAILING)
    requested = objects.condition(scene.vmi, "EvictionRequested")

    assert sorted(diary.states) == list(range(FAILURES + 1))
    assert {failed: diary.backoffs[failed] for failed in range(1, FAILURES + 1)} == {
        1: {20.0},
        2: {40.0},
        3: {80.0},
        4: {160.0},
    }
    for failed in range(1, FAILURES + 1):
        assert "backoff" in diary.states[failed]
        assert diary.stuck[failed] == ({("failures",)} if failed >= 3 else {()})
    assert diary.measured == set(range(FAILURES + 1))
    reported = ", ".join(f"{wait:g}" for n in range(1, FAILURES + 1) for wait in diary.backoffs[n])
    prove(
        f"rig: KubeVirt {RUNNING['kubevirt']}: pauses before the next attempt, as the exporter "
        f"reports them: {reported} s"
    )
    for failed, states in sorted(diary.states.items()):
        prove(f"rig: after {failed} real failures: {', '.join(sorted(states))}")
    assert evacuation is not None
    assert evacuation["state"] == "backoff"
    assert evacuation["attempt"]["name"] == scene.vmims[-1]["metadata"]["name"]
    begun = (
        scene.vmims[0]["metadata"]["creationTimestamp"]
        if requested is None
        else requested["lastTransitionTime"]
    )
    # The marker is set a moment before the condition, and the exporter may see the marker alone.
    earlier = datetime.fromisoformat(begun) - datetime.fromisoformat(evacuation["requestedAt"])
    # A creation time is rounded down, and is not used if the VMI was seen unmarked after it.
    least = timedelta(seconds=-1) if requested is None else timedelta(0)
    assert least <= earlier <= timedelta(seconds=3)
    age = "first attempt" if requested is None else "condition EvictionRequested"
    prove(
        f"rig: KubeVirt {RUNNING['kubevirt']}: the evacuation's age counts from the "
        f"{age}, its source is {evacuation['source']}"
    )

    (failed, *_) = (reason for reason in evacuation["why"] if reason["source"] == "FailedAttempt")
    assert failed["reason"] == "Scheduling"
    assert failed["message"].startswith("after Pending ")
    prove(f"rig: backoff: FailedAttempt {failed['reason']}: {failed['message']!r}")

    namespace, name = FAILING.split("/")
    if not HAS_REQUESTS:
        assert evacuation["source"] == "unknown"
        await stage.exporter.until(
            f"/v1/vmis/{FAILING}", lambda _, body: body["evacuation"]["diverged"], within=180
        )
        return
    assert evacuation["source"] == "descheduler"
    assert not evacuation["diverged"]
    node = evacuation["cancel"]["body"]["evacuationNodeName"]
    await stage.rig.cluster.cancel_evacuation(name, namespace, node)
    await stage.exporter.until(f"/v1/vmis/{FAILING}", lambda _, body: body["evacuation"] is None)
    assert await stage.exporter.sample(FAILED_ATTEMPTS, namespace=namespace) == 0


async def test_the_verdicts_at_hand_off(stage: Stage, prove: Callable[[str], None]) -> None:
    """Between hand-off and start the unfinished VMIM blocks at `filter`, and no cooldown applies.

    If the target is lost after the hand-off, the cooldown counts both migrations, even if KubeVirt
    writes no end time to the VMI.
    """
    key = "handed/db1"
    async with stage.rig.vmi(key, "succeeds", Fate("loses ready target", seconds=10)):
        await stage.rig.evict(key)
        moved = await stage.rig.until(key, _is_over)
        before = await stage.exporter.until_verdict("handed", "db1", "preEviction", "cooldown")
        assert await ask_evacuation(stage.exporter, key) is None
        await stage.rig.evict(key)
        handed = await stage.rig.until(
            key,
            lambda scene: (
                "targetDirectMigrationNodePorts" in scene.state
                and scene.state["migrationUid"] != moved.state["migrationUid"]
            ),
        )
        assert not {"startTimestamp", "endTimestamp"} & set(handed.state)
        await stage.exporter.until_verdict("handed", "db1", "filter", "migration_in_progress")
        await stage.exporter.until_verdict("handed", "db1", "preEviction", None)
        lost = await stage.rig.until(key, lambda scene: "Failed" in scene.phases)
        after = await stage.exporter.until_verdict("handed", "db1", "preEviction", "cooldown")

        assert (before["migrationsInWindow"], after["migrationsInWindow"]) == (1, 2)
        ended = "ended on the VMI" if "endTimestamp" in lost.state else "left as a zombie"
        prove(
            f"rig: KubeVirt {RUNNING['kubevirt']}: during the hand-off, filter answers "
            f"migration_in_progress and preEviction allows; after the target was lost ({ended}), "
            "preEviction answers cooldown with 2 migrations"
        )


DRAINED: dict[str, tuple[str, Outcome, bool]] = {
    "leaves": ("LiveMigrate", "succeeds", True),
    "waits": ("LiveMigrate", "hangs", True),
    "restarts": ("None", "succeeds", True),
    "restarts-too": ("LiveMigrateIfPossible", "succeeds", False),
    "stays": ("LiveMigrate", "succeeds", False),
    "external": ("External", "succeeds", True),
}
"""VMs by namespace: the strategy, the outcome of migrations, and whether the VM is migratable."""


async def test_a_drain_does_what_was_forecast(stage: Stage, prove: Callable[[str], None]) -> None:
    """KubeVirt handles each VM of a drained node as the exporter has forecast."""
    rig, exporter, node = stage.rig, stage.exporter, "node-2"
    keys = {name: f"drained-{name}/db1" for name in DRAINED}

    async with AsyncExitStack() as stack:
        for name, (strategy, fate, migratable) in DRAINED.items():
            # The VM that leaves has migrated before, so that a duration is known.
            home = "node-1" if name == "leaves" else node
            scene = await stack.enter_async_context(
                rig.vmi(keys[name], fate, node=home, evictionStrategy=strategy)
            )
            if not migratable:
                await rig.player.set_migratable(scene.vmi, migratable=False)
        rig.player.place(keys["leaves"], node)
        await rig.evict(keys["leaves"])
        await rig.until(keys["leaves"], lambda scene: _is_over(scene) and not scene.marked)
        await rig.evict(keys["waits"])
        copying = await rig.until(keys["waits"], _is_copying)
        expected = {f"drained-{name}": name.removesuffix("-too") for name in DRAINED}
        forecast = await exporter.until(
            f"/v1/nodes/{node}",
            lambda status, body: (
                status == 200
                and {row["namespace"]: row["outcome"] for row in body["candidates"]} == expected
            ),
        )
        began = time.monotonic()
        (left,) = (vm for vm in forecast["candidates"] if vm["outcome"] == "leaves")

        took, refusals = {}, {}
        for name, key in keys.items():
            refusals[name] = await rig.drain(key)
        await rig.until(keys["leaves"], lambda scene: not _is_on(scene, node))
        took["leaves"] = time.monotonic() - began
        for name in ("restarts", "restarts-too"):
            await rig.until(keys[name], lambda scene: objects.is_final(scene.vmi))
            took[name] = time.monotonic() - began
        rig.player.decide(copying.vmims[0]["metadata"]["uid"], "succeeds")
        await rig.until(keys["waits"], lambda scene: not _is_on(scene, node))
        took["waits"] = time.monotonic() - began
        remaining = await exporter.until(f"/v1/nodes/{node}", lambda _, body: body["vmis"] == 2)
        code, output = await _run_node(exporter, node)

    for candidate in forecast["candidates"]:
        name = candidate["namespace"].removeprefix("drained-")
        when = f"gone after {took[name]:.1f} s" if name in took else "is there"
        last = candidate["lastDurationSeconds"]
        prove(
            f"rig: {name:12} forecast {candidate['outcome']:8} {when:18} last took"
            f" {'?' if last is None else f'{last:g} s':4}"
            f" {refusals[name].rpartition('denied the request: ')[2] or 'evicted'}"
        )
    prove(f"rig: drain of {node}: `node`: {output}")
    assert forecast["atLeastSeconds"] is None
    assert took["leaves"] >= left["lastDurationSeconds"] - 1.0
    assert {candidate["outcome"] for candidate in remaining["candidates"]} == {"stays", "external"}
    assert refusals["stays"].endswith("but is not live-migratable")
    assert (code, refusals["restarts"], refusals["restarts-too"]) == (12, "", "")
    assert (forecast["canBeEmptied"], remaining["canBeEmptied"]) == (False, False)


def _is_on(scene: Scene, node: str) -> bool:
    return bool(scene.vmi["status"]["nodeName"] == node)


async def _run_node(exporter: Program, node: str) -> tuple[int | None, str]:
    """The exit code and the first line of `python -m exporter node`."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "exporter", "node", "--url", exporter.query, node),
        stdout=asyncio.subprocess.PIPE,
    )
    out, _ = await process.communicate()
    return process.returncode, out.decode().splitlines()[0]


def _instant(vmim: Object, phase: str) -> Any:
    at = objects.transition(vmim, phase)
    assert at is not None
    return at
