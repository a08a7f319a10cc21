"""Each obstacle to an evacuation has one advised action, also while KubeVirt retries."""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from exporter.engine.evacuations.advice import may_cancel
from exporter.engine.evacuations.causes import find_blocker
from exporter.engine.evacuations.conditions import Conditions
from exporter.engine.evacuations.obstacles import Obstacle
from exporter.engine.facts.evidence import Evidence
from exporter.engine.facts.model import EndReason, Node, Outcome, Pod, Resource, Why, WhySource
from exporter.engine.facts.policy import StuckPolicy
from exporter.engine.facts.states import State
from exporter.engine.facts.trust import Trust
from exporter.engine.store.load import Load
from exporter.engine.store.nodes import NodeIndex
from exporter.words.advice import ACTIONS, choose_advice
from exporter.words.commands import write_cancel
from tests.support.builders import NOW, a_running_state, a_state
from tests.unit.engine.evacuations.test_diagnosis import (
    CASES,
    FULL,
    PODS_UNSEEN,
    ROOM,
    SOURCE,
    STALE,
    STARTS,
    a_failed_attempt,
    a_target,
    an_attempt,
    an_evacuation,
    diagnosis,
    started,
    tried,
)


UNKNOWN = Conditions(kubevirt=None, load=None, stuck=StuckPolicy(), trust=Trust(), now=NOW + 120.0)
"""Nothing is known of nodes and of KubeVirt."""
STAYS = Why(WhySource.LIVE_MIGRATABLE, "DisksNotLiveMigratable", "PVC db1 is not shared")
FULL_NODES = Why(WhySource.POD_SCHEDULED, "Unschedulable", "0/3 nodes are available", NOW - 300.0)
SELECTOR = Why(WhySource.POD_SCHEDULED, "NodeSelector", "zone=a")
PULL = Why(WhySource.TARGET_CONTAINER, "ImagePullBackOff", "no such image", NOW - 200.0)
BACKUP = Why(WhySource.MIGRATION_CONDITION, "BackupInProgress", "backup b1 is in progress", NOW)
EARLY = Why(WhySource.FAILED_ATTEMPT, "Scheduling", "after Pending 1s, Scheduling 5m", NOW)
CRASHED = Why(WhySource.TARGET_CONTAINER, "Error", "exit code 1", NOW + 1.0)
NEWER = Why(WhySource.POD_SCHEDULED, "Unschedulable", "0/3 nodes are available", NOW + 60.0)
QUOTA = Why(WhySource.MIGRATION_CONDITION, "migrationRejectedByResourceQuota", "", NOW)
ABORTED = Why(WhySource.FAILED_ATTEMPT, "Running", "Live migration has been aborted", NOW)
LATE = Why(WhySource.FAILED_ATTEMPT, "Running", "qemu crashed", NOW)


def test_what_keeps_a_vm_on_its_node() -> None:
    """The blocker is that the VM is not migratable, else the cause of its last failure."""
    assert find_blocker((LATE, STAYS)) == STAYS
    assert find_blocker((EARLY, PULL)) == PULL
    assert find_blocker(()) is None


CHANGED = replace(an_evacuation(age=7200.0), changed_at=NOW - 5.0)
QUIET_PODS: dict[str, Any] = {"contacts": {Resource.PODS: NOW - 30.0}}


def test_a_quiet_watch_is_no_missing_permission() -> None:
    """While pods have not been read since the VM changed, a known cause keeps its next step."""
    assert diagnosis(CHANGED, **QUIET_PODS).state is State.UNKNOWN
    assert find(CHANGED, **QUIET_PODS) is Obstacle.QUIET
    assert find(CHANGED, (LATE,), **QUIET_PODS) is Obstacle.MIGRATION_ERROR
    assert find(replace(CHANGED, trust=PODS_UNSEEN)) is State.UNKNOWN


FAILING = {"failed": {f"f{number}": NOW - number for number in range(14)}}
STALLED = {"start": NOW - 10_000.0}


def find(evidence: Evidence, why: tuple[Why, ...] = (), **seen: Any) -> State | Obstacle:
    """The obstacle to which the advised action belongs."""
    advice = choose_advice(evidence, diagnosis(evidence, **seen), why, UNKNOWN)
    obstacles = [o for o, a in ACTIONS.items() if a.sentence.partition("{")[0] in advice.sentence]
    assert len(obstacles) == 1
    return obstacles[0]


GOING = Why(WhySource.TARGET_CONTAINER, "Terminating", "virt-launcher-old is being deleted")
ATTACHES: dict[str, Any] = {
    "vmi": {"hotplugs_volumes": True},
    "pods": (SOURCE, a_target(ready=True)),
}
HELD = an_attempt(wait_reason=State.QUOTA)
MOVES = an_evacuation(vmi={"migration": a_running_state()})
ENDS = a_target(deleted_at=NOW + 130.0)
"""A target within its grace period."""
GOES, COPIES = (
    tried(an_attempt(phase="Running"), vmi={"migration": a_running_state()}, pods=(SOURCE, pod))
    for pod in (ENDS, a_target())
)
OLD = 7200.0


@pytest.mark.parametrize(
    ("evidence", "why", "load", "obstacle"),
    [
        (tried(STARTS, age=OLD), (), ROOM, Obstacle.NO_TARGET_POD),
        (tried(STARTS), (), ROOM, Obstacle.NONE),
        (started(node="n2", age=OLD), (), ROOM, Obstacle.TARGET_NOT_STARTED),
        (tried(STARTS, age=OLD, **ATTACHES), (), ROOM, Obstacle.ATTACHMENT),
        (tried(HELD, marker=FAILING), (LATE,), ROOM, State.QUOTA),
        (tried(an_attempt()), (), FULL, State.CAPACITY),
        (an_evacuation(age=OLD), (), ROOM, Obstacle.UNEXPLAINED),
        (MOVES, (), ROOM, Obstacle.NONE),
        (COPIES, (GOING,), ROOM, Obstacle.NONE),
        (GOES, (GOING, LATE), ROOM, Obstacle.TARGET_DELETED),
    ],
    ids=[
        "kubevirt-makes-no-target-pod",
        "has-just-begun",
        "its-target-pod-does-not-start",
        "volumes-are-attached",
        "a-quota-counts-before-earlier-failures",
        "a-queue-is-waited-for",
        "nobody-waits-once-it-is-stuck",
        "memory-is-copied",
        "the-target-of-an-earlier-attempt-is-deleted",
        "its-target-is-deleted-meanwhile",
    ],
)
def test_the_obstacle(
    evidence: Evidence, why: tuple[Why, ...], load: Load, obstacle: State | Obstacle
) -> None:
    """What is missing, and for how long, decides what keeps a VM."""
    assert find(evidence, why, load=load) is obstacle


@pytest.mark.parametrize("evidence", [case for _, case in CASES.values()], ids=CASES)
def test_every_state_has_an_action(evidence: Evidence) -> None:
    """The advice for every situation has one sentence and one command."""
    evacuation = diagnosis(evidence)
    for why in ((), (STAYS, LATE, BACKUP, FULL_NODES, PULL), (SELECTOR,)):
        advice = choose_advice(evidence, evacuation, why, UNKNOWN)
        assert advice.sentence.endswith(".")
        assert ". " not in advice.sentence
        assert "{" not in advice.sentence
        assert "\n" not in advice.command


@pytest.mark.parametrize(
    ("evidence", "why", "obstacle", "cause"),
    [
        ("not-migratable", (SELECTOR, STAYS), State.NOT_MIGRATABLE, STAYS),
        ("unschedulable", (SELECTOR, FULL_NODES), State.TARGET_UNSCHEDULABLE, FULL_NODES),
        ("not-ready", (PULL,), Obstacle.TARGET_NOT_STARTED, PULL),
        ("backup", (BACKUP,), State.BACKUP, BACKUP),
        ("backoff", (LATE,), Obstacle.MIGRATION_ERROR, LATE),
        ("backoff", (ABORTED,), Obstacle.NOT_CONVERGING, ABORTED),
        ("backoff", (QUOTA,), State.QUOTA, QUOTA),
        ("backoff", (EARLY,), Obstacle.UNEXPLAINED, EARLY),
        ("backoff", (EARLY, PULL), Obstacle.TARGET_NOT_STARTED, PULL),
        ("backoff", (EARLY, FULL_NODES), State.TARGET_UNSCHEDULABLE, FULL_NODES),
        ("backoff", (LATE, PULL, FULL_NODES), Obstacle.MIGRATION_ERROR, LATE),
        ("backoff", (CRASHED, LATE), Obstacle.MIGRATION_ERROR, LATE),
        ("backoff", (NEWER, LATE), State.TARGET_UNSCHEDULABLE, NEWER),
        ("backoff", (STAYS, SELECTOR), Obstacle.NONE, None),
        ("nothing-begun", (LATE,), Obstacle.MIGRATION_ERROR, LATE),
        ("nothing-begun", (), Obstacle.NONE, None),
    ],
)
def test_the_cause_decides(
    evidence: str, why: tuple[Why, ...], obstacle: State | Obstacle, cause: Why | None
) -> None:
    """The cause decides the action, and the advice names the cause."""
    _, case = CASES[evidence]

    assert find(case, why) is obstacle
    assert choose_advice(case, diagnosis(case), why, UNKNOWN).cause == cause


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param({"vmi": {"migration": a_running_state()}}, id="migrating"),
        pytest.param({"vmims": (a_failed_attempt(1, 12), an_attempt())}, id="backoff"),
        pytest.param({"vmims": (an_attempt(),)}, id="target-not-ready"),
        pytest.param({"pods": (SOURCE, STALE)}, id="more-active-pods"),
        pytest.param({}, id="no-migration"),
    ],
)
def test_the_action_stays_while_kubevirt_retries(overrides: dict[str, Any]) -> None:
    """After failures the last cause decides the action, also during the next attempt."""
    evidence = an_evacuation(marker=FAILING, **overrides)

    assert find(evidence, (LATE,)) is Obstacle.MIGRATION_ERROR
    assert find(evidence, (EARLY, PULL)) is Obstacle.TARGET_NOT_STARTED
    assert find(evidence) is Obstacle.UNEXPLAINED
    assert find(evidence, (LATE,), load=FULL) is Obstacle.MIGRATION_ERROR


@pytest.mark.parametrize(
    ("took", "obstacle"),
    [
        pytest.param(1.0, Obstacle.TARGET_LOST, id="it-ended-at-once"),
        pytest.param(300.0, Obstacle.TARGET_HANDLER, id="it-waited-for-virt-handler-and-gave-up"),
    ],
)
def test_a_target_pod_that_ended_in_preparing_target(took: float, obstacle: Obstacle) -> None:
    """virt-controller then writes an end that equals the start, and no text (KubeVirt 1.9.0).

    A launcher to which no domain comes gives up after minutes; one that crashes ends at once.
    """
    lost = a_failed_attempt(
        1,
        100.0,
        start=NOW - 100.0,
        end=NOW - 100.0,
        handed_off=True,
        scheduled_at=NOW - 100.0 - took,
    )
    why = Why(WhySource.FAILED_ATTEMPT, "PreparingTarget", "after Pending 1s", NOW - 100.0)

    assert find(an_evacuation(vmims=(lost,)), (why, CRASHED)) is obstacle


@pytest.mark.parametrize(
    ("nodes", "aborted", "is_named"),
    [
        ("n9 n3 n3 n3", False, True),
        ("n3", False, False),
        ("n3 n9 n3 n3", False, False),
        ("n3 n3 n3 n9", False, False),
        ("n3 n3", True, False),
    ],
)
def test_the_node_on_which_the_last_attempts_failed_is_named(
    nodes: str, aborted: bool, is_named: bool
) -> None:
    """After three attempts in a row on one node the advice names it: it may be broken."""
    vmims = [
        a_failed_attempt(number, 1000 - number, target_node=node)
        for number, node in enumerate(nodes.split(), 1)
    ]
    vmims += [a_failed_attempt(9, 1, target_node="n3", aborted=True)] * aborted
    evidence = an_evacuation(marker=FAILING, vmims=tuple(vmims))
    sentence = choose_advice(evidence, diagnosis(evidence), (LATE,), UNKNOWN).sentence
    assert ("failed on" in sentence) is is_named
    assert not is_named or sentence.endswith(
        "; the last 3 attempts failed on n3: if those of other VMs fail there too, cordon it, and"
        " check its virt-handler."
    )


@pytest.mark.parametrize("schedulable", [True, False])
def test_a_vm_that_no_other_node_can_take_does_not_wait_for_limits(*, schedulable: bool) -> None:
    """While KubeVirt's limits are full, a VM waits only if it could go somewhere afterwards."""
    nodes = NodeIndex()
    nodes.record_list(NOW)
    for node in (Node(name="n1"), Node(name="n2", schedulable=schedulable)):
        nodes.put(node, NOW)
    evidence = an_evacuation(vmims=(an_attempt(),))
    waiting = diagnosis(evidence, load=FULL)
    advice = choose_advice(evidence, waiting, (), replace(UNKNOWN, nodes=nodes))

    assert waiting.state is State.CAPACITY
    assert advice.sentence.startswith("Wait for other" if schedulable else "Add or open a node")


@pytest.mark.parametrize(
    ("mode", "attempt", "obstacle"),
    [
        ("PostCopy", True, Obstacle.POST_COPY),
        ("PreCopy", True, Obstacle.LONG_COPY),
        ("PreCopy", False, Obstacle.LONG_COPY),
        ("PreCopy-4800", True, Obstacle.STALLED),
        ("PreCopy-12000", True, Obstacle.LONG_COPY),
        ("Paused-4800", True, Obstacle.STALLED),
        ("Paused-6000", True, Obstacle.LONG_COPY),
    ],
)
def test_only_a_copy_beyond_kubevirts_own_limit_is_to_be_aborted(
    mode: str, attempt: bool, obstacle: State | Obstacle
) -> None:
    """A pre-copy that KubeVirt should have ended is to be aborted, and never a post-copy."""
    mode, _, limit = mode.partition("-")
    state = a_running_state(**STALLED, mode=mode, time_limit=float(limit) if limit else None)
    evidence = an_evacuation(
        vmi={"migration": state},
        vmims=(an_attempt(phase="Running"),) if attempt else (),
    )
    evacuation = diagnosis(evidence)

    assert evacuation.state is State.MIGRATION_STALLED
    assert find(evidence) is obstacle
    deletes = " delete virtualmachineinstancemigration kubevirt-evacuation-1"
    assert choose_advice(evidence, evacuation, (), UNKNOWN).command.endswith(deletes) is (
        obstacle is Obstacle.STALLED
    )


ENDING = replace(STALE, deleted_at=NOW - 60.0)


@pytest.mark.parametrize(
    ("pods", "place"),
    [
        pytest.param((SOURCE, ENDING), "virt-launcher-db1-x on n1", id="elsewhere"),
        pytest.param((SOURCE, replace(STALE, node="n1")), "the one on n1", id="both-on-its-node"),
        pytest.param(
            (SOURCE, ENDING, a_target(node="n1", phase="Failed")),
            "virt-launcher-db1-x on n1",
            id="an-ended-one-does-not-run-it",
        ),
    ],
)
def test_more_active_pods_name_the_one_that_runs_the_vm(pods: tuple[Pod, ...], place: str) -> None:
    """With several active pods the action names the pod that must not be deleted."""
    evidence = an_evacuation(pods=pods)
    sentence = choose_advice(evidence, diagnosis(evidence), (), UNKNOWN).sentence

    assert sentence.endswith(f"delete the stale pod, but never {place}, which runs the VM.")


def test_a_shell_runs_what_is_printed(tmp_path: Path) -> None:
    """Names in the advised commands are quoted, so that a shell passes them on unchanged."""
    kubectl = tmp_path / "kubectl"
    kubectl.write_text('#!/bin/sh\nfor one in "$@"; do echo "$one"; done; cat\n')
    kubectl.chmod(0o755)
    odd = "n'1 $(id)"
    evidence = an_evacuation(vmi={"name": odd, "migratable": False})
    command = choose_advice(evidence, diagnosis(evidence), (), UNKNOWN).command
    ran = [
        subprocess.run(
            ["sh", "-c", line],
            env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
            input="",
            capture_output=True,
            text=True,
            check=True,
        ).stdout.splitlines()
        for line in (command, write_cancel("shop", odd, odd))
    ]

    assert ran[0][3] == odd
    assert ran[1][-1] == f'{{"evacuationNodeName":"{odd}"}}'
    assert ran[1][2].endswith(f"/virtualmachineinstances/{odd}/evacuate/cancel")


@pytest.mark.parametrize(
    ("state", "may"),
    [
        pytest.param(None, True, id="nothing-runs"),
        pytest.param(a_running_state(mode="PreCopy"), True, id="pre-copy"),
        pytest.param(a_running_state(mode="PostCopy"), False, id="post-copy"),
        pytest.param(a_state(mode="PostCopy"), True, id="post-copy-ended"),
    ],
)
def test_may_cancel(state: Any, may: bool) -> None:
    """A migration in post-copy may not be cancelled."""
    assert may_cancel(an_evacuation(vmi={"migration": state})) is may


LOST = Why(WhySource.FAILED_ATTEMPT, "TargetReady", "Target pod is down (after Pending 2s)", NOW)
KILLED = Why(WhySource.TARGET_CONTAINER, "OOMKilled", "exit code 137", NOW + 1.0)
SILENT = Why(WhySource.NODE, "SourceNodeUnknown", "the kubelet of n1 does not answer")
BARE = Why(WhySource.FAILED_ATTEMPT, "", "virError(Code=9): CPU is not compatible", NOW)


@pytest.mark.parametrize(
    ("case", "why", "obstacle", "cause"),
    [
        pytest.param("no-vmim", (KILLED, LOST), Obstacle.TARGET_LOST, KILLED, id="target-killed"),
        pytest.param("no-vmim", (LOST,), Obstacle.TARGET_LOST, LOST, id="target-lost"),
        pytest.param("no-vmim", (SILENT, LOST), Obstacle.SOURCE_SILENT, SILENT, id="source-dead"),
        pytest.param("no-vmim", (BARE,), Obstacle.MIGRATION_ERROR, BARE, id="libvirt-on-the-vmi"),
        pytest.param("hangs", (GOING,), Obstacle.STALE_POD, GOING, id="stale-pod-hangs"),
        pytest.param("ends", (GOING,), State.MULTIPLE_ACTIVE_PODS, None, id="stale-pod-still-ends"),
    ],
)
def test_lost_and_silent_places(
    case: str, why: tuple[Why, ...], obstacle: State | Obstacle, cause: Why | None
) -> None:
    """What is known of pods and nodes decides the next step of a stuck evacuation."""
    others = {
        "hangs": (replace(STALE, deleted_at=NOW),),
        "ends": (replace(STALE, deleted_at=NOW + 100.0),),
    }
    evidence = an_evacuation(age=9000, pods=(SOURCE, *others.get(case, ())))

    assert find(evidence, why) is obstacle
    assert choose_advice(evidence, diagnosis(evidence), why, UNKNOWN).cause == cause


def test_a_vm_that_was_lost_in_post_copy_has_to_be_restarted() -> None:
    """After a failure in post-copy half of the VM's memory is gone, unless a new attempt runs."""
    failed = a_state(outcome=Outcome.FAILED, failure=EndReason.POST_COPY_LOST, mode="PostCopy")
    lost, again = (
        an_evacuation(vmi={"migration": failed}, vmims=vmims) for vmims in ((), (an_attempt(),))
    )

    assert find(lost, (BARE,)) is Obstacle.POST_COPY_LOST
    assert find(again, (BARE,)) is not Obstacle.POST_COPY_LOST
