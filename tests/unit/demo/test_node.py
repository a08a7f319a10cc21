"""What nodes write during a migration, compared with KubeVirt's examples."""

from __future__ import annotations

from exporter.demo import controller, node, objects

from .facts import NOW, Play, at, make_pod, make_vmi


def handed_off() -> Play:
    """An evacuation just after the hand-off."""
    play = Play()
    play.hand_off()
    return play


def test_a_failure_looks_like_the_example() -> None:
    """After a failure `completed` is not written, and the VMI stays marked on its node."""
    play = handed_off()
    play.prepare()
    started = node.start_migration(play.vmi, at(25))
    failed = node.fail_migration(started, at(180), node.ABORTED, "Succeeded")
    state = objects.state_of(failed) or {}

    ending = {"endTimestamp": "2026-08-22T10:03:00Z", "failed": True}
    assert state == state | ending | {"failureReason": node.ABORTED, "abortStatus": "Succeeded"}
    assert "completed" not in state
    assert failed["status"]["nodeName"] == failed["status"]["evacuationNodeName"] == "n1"


def test_live_migratable_has_no_transition_time() -> None:
    """virt-handler never sets the transition time of LiveMigratable."""
    for migratable in (True, False):
        vmi = node.set_migratable(make_vmi(), migratable=migratable)
        condition = objects.condition(vmi, "LiveMigratable") or {}

        assert condition["status"] == str(migratable)
        assert condition["lastTransitionTime"] is None


def test_nothing_is_changed_in_place() -> None:
    """Each transition returns a new object and does not change the old one."""
    play = handed_off()
    before = objects.copy(play.vmi)
    node.end_migration(node.start_migration(play.vmi, NOW), NOW)
    node.fail_migration(play.vmi, NOW, "no")
    node.clean_up_target(play.vmi)

    assert play.vmi == before


def test_a_pod_begins_and_ends() -> None:
    """A running pod becomes Ready once virt-controller reports that its VM is not paused."""
    vmi = make_vmi()
    pod = make_pod(vmi)
    assert objects.is_pod_ready(pod)
    assert not objects.is_true(pod, "Ready")
    assert not node.meets_readiness_gates(pod)

    unpaused = controller.sync_pod(vmi, pod, NOW)
    assert node.meets_readiness_gates(unpaused)
    ready = node.ready_pod(unpaused, NOW)
    assert objects.is_true(ready, "Ready")
    assert not node.meets_readiness_gates(ready)

    done = node.finish_pod(ready, "Succeeded", NOW)
    assert not objects.is_pod_ready(done)
    assert (objects.condition(done, "Ready") or {})["status"] == "False"
