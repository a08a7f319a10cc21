"""What nodes write: new objects, and the conditions of pods."""

from __future__ import annotations

from exporter.demo import controller, node, objects

from .facts import NOW, Play, make_pod, make_vmi


def test_nothing_is_changed_in_place() -> None:
    """Each transition returns a new object and does not change the old one."""
    play = Play()
    play.hand_off()
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
