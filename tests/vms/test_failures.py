"""Evacuations and migrations that fail on real nodes."""

import time
from collections.abc import Callable

import pytest

from exporter.kube.objects.instants import parse_instant
from tests.e2e.asking import Caller
from tests.e2e.cluster import Cluster, Object, wait_for
from tests.e2e.terminal import Terminal
from tests.vms.answers import ask_evacuation, ask_node
from tests.vms.kubevirt import (
    LATE,
    SLOW,
    SPACE,
    Machine,
    name_guest_image,
)


SECONDS = 2.0
"""The tolerance for instants, because KubeVirt writes whole seconds."""


def until_paused(caller: Caller, name: str, failed: int) -> Object:
    """Wait for KubeVirt's backoff after this many failures; returns the evacuation."""

    def find() -> Object | None:
        evacuation = ask_evacuation(caller, name)
        is_there = (
            evacuation
            and evacuation["failedAttempts"] == failed
            and evacuation["state"] == "backoff"
        )
        return evacuation if is_there else None

    return wait_for(find, f"a pause of {name} after {failed} failures") or {}


def until_state(caller: Caller, machine: Machine, state: str) -> None:
    """Wait until the evacuation of a VM is in a state."""
    machine.until(lambda: ask_evacuation(caller, machine.name).get("state") == state, state)


def reasons(caller: Caller, name: str) -> set[str]:
    """The texts of an evacuation's reasons."""
    return {reason["reason"] for reason in ask_evacuation(caller, name).get("why", [])}


def phases(vmim: Object) -> dict[str, float]:
    """When a VMIM entered each of its phases."""
    listed = vmim["status"].get("phaseTransitionTimestamps") or []
    return {
        step["phase"]: parse_instant(step["phaseTransitionTimestamp"]) or 0.0 for step in listed
    }


@pytest.mark.timeout(1800)
def test_a_failing_evacuation(
    caller: Caller,
    machine: Callable[[str], Machine],
    prove: Callable[[str], None],
    quote: Callable[[Object], str],
) -> None:
    """Two failures are shown with their error, and KubeVirt retries no earlier than `nextTryAt`."""
    db = machine("db1")
    db.start("n1", copied=SLOW)
    db.evict()
    pauses = []
    for attempt in (1, 2):
        db.until_copying()
        assert ask_evacuation(caller, "db1")["state"] == "migrating"
        db.kill_qemu("n2")
        now = until_paused(caller, "db1", attempt)
        assert now["cause"]["source"] == "FailedAttempt"
        assert "virError" in now["cause"]["message"]
        assert now["nextStep"].startswith("Read the launcher's log around the error")
        pauses.append(now["backoff"])
        if attempt == 2:
            db.label(copied="fast")
    db.until_moved("n1")

    failed, again, last = db.migrations()
    assert [vmim["status"]["phase"] for vmim in (failed, again, last)] == [
        *("Failed", "Failed", "Succeeded")
    ]
    assert [quote(vmim) for vmim in (failed, again, last)] == ["libvirt", "libvirt", "none"]
    assert [pause["seconds"] for pause in pauses] == [20.0, 40.0]
    waited = []
    for pause, later in zip(pauses, (again, last), strict=True):
        left_pending = phases(later)["Scheduling"]
        announced = parse_instant(pause["nextTryAt"])
        assert announced is not None
        assert left_pending >= announced - SECONDS
        waited.append(f"{left_pending - announced:+.0f}")
    db.until(lambda: not ask_evacuation(caller, "db1"), "over")
    outcomes = [migration["outcome"] for migration in caller.history(SPACE, "db1")]
    assert outcomes == ["failed", "failed", "succeeded"]
    prove(
        f"a failing evacuation: 2 failures, pauses 20 and 40 s, next tries {waited} s beside ours"
    )


def test_a_timeout(
    caller: Caller, machine: Callable[[str], Machine], quote: Callable[[Object], str]
) -> None:
    """A migration that times out is a failure with KubeVirt's message.

    Sometimes KubeVirt's proxy closes the connection first. Then the reason is an error of libvirt,
    and the test migrates again.
    """
    db = machine("db1")
    db.start("n1", copied=LATE)
    reason = "libvirt"
    while reason == "libvirt":
        vmim = db.until_ended(db.migrate())
        assert vmim["status"]["phase"] == "Failed"
        reason = quote(vmim)
        db.until(lambda: len(db.pods()) == 1, "one pod")
    assert reason == "timeout_completion"
    assert "has been aborted" in db.state()["failureReason"]
    ends = db.state()["endTimestamp"]
    db.until(lambda: ends in {move["end"] for move in caller.history(SPACE, "db1")}, "on record")
    move = caller.history(SPACE, "db1")[-1]
    assert (move["outcome"], move["end"]) == ("failed", ends)


def test_a_target_that_cannot_pull(
    caller: Caller, machine: Callable[[str], Machine], quote: Callable[[Object], str]
) -> None:
    """If the target has no image, the container's reason is shown; with an image the VM moves."""
    db = machine("db1")
    image = "localhost/rare"
    name_guest_image(db.nodes["n1"], image)
    db.start("n1", image=f"{image}:1")
    db.evict()
    db.until(lambda: "ErrImageNeverPull" in reasons(caller, "db1"), "named")
    now = ask_evacuation(caller, "db1")
    assert now["state"] == "target_not_ready"
    assert now["nextStep"].startswith("Repair what keeps the target pod from starting")
    (vmim,) = db.migrations()
    db.abort(vmim["metadata"]["name"])
    assert quote(vmim) == "image"
    name_guest_image(db.nodes["n2"], image)
    db.until_moved("n1")
    db.until(lambda: not ask_evacuation(caller, "db1"), "over")


def test_an_unschedulable_target_and_the_cancel_line(
    cluster: Cluster,
    caller: Caller,
    terminal: Terminal,
    machine: Callable[[str], Machine],
    quote: Callable[[Object], str],
) -> None:
    """The scheduler's message is shown, and the command from `explain` cancels the evacuation.

    The command does not end the migration that waits for a node, so the test deletes its VMIM.
    """
    db = machine("db1")
    db.start("n1")
    cluster.kubectl("cordon", "n1", "n2")
    try:
        db.until(lambda: ask_node(caller, "n1")["schedulable"] is False, "seen as cordoned")
        db.evict()
        until_state(caller, db, "target_unschedulable")
        now = ask_evacuation(caller, "db1")
        assert "node(s) were unschedulable" in now["cause"]["message"]
        assert now["nextStep"].startswith("Add or open a node that may run the VM")
        assert not now["leftover"]
        cluster.kubectl("uncordon", "n1")
        db.until(lambda: ask_evacuation(caller, "db1")["leftover"], "left over")
        assert ask_evacuation(caller, "db1")["nextStep"].startswith("Cancel the evacuation")
        cancel(cluster, terminal, db)
        db.until(lambda: "evacuationNodeName" not in db.get()["status"], "no longer marked")
        (vmim,) = db.migrations()
        assert vmim["status"]["phase"] == "Scheduling", "the cancel ends no migration"
        db.abort(vmim["metadata"]["name"])
        assert quote(vmim) == "unschedulable"
    finally:
        cluster.kubectl("uncordon", "n1", "n2")
    db.until(lambda: not ask_evacuation(caller, "db1"), "over for the exporter, too")
    assert db.node == "n1"


def cancel(cluster: Cluster, terminal: Terminal, machine: Machine) -> None:
    """Run the command that `explain` prints."""
    name = f"{SPACE}/{machine.name}"
    printed = cluster.exec("python", "-m", "exporter", "explain", name)
    (line,) = [row for row in printed.splitlines() if "/evacuate/cancel" in row]
    terminal.type_unlisted(line.strip().removeprefix("$ "))


def test_a_migration_that_is_cancelled(
    caller: Caller, machine: Callable[[str], Machine], quote: Callable[[Object], str]
) -> None:
    """A migration that is cancelled during the copy fails; if cancelled at the end, it succeeds."""
    db = machine("db1")
    db.start("n1", copied=SLOW)
    vmim = db.migrate()
    db.until_copying()
    (aborted,) = db.migrations()
    db.abort(vmim)
    db.until(lambda: db.state().get("endTimestamp"), "aborted")
    assert quote(aborted) == "aborted"
    assert db.node == "n1"
    assert db.state()["failed"]
    db.until(lambda: caller.history(SPACE, "db1"), "on record")
    assert [migration["outcome"] for migration in caller.history(SPACE, "db1")] == ["failed"]
    db.until(lambda: len(db.pods()) == 1, "one pod")

    db.label(copied="fast")
    vmim = db.migrate()
    db.until(lambda: db.state().get("targetNodeDomainReadyTimestamp"), "the VM on the target")
    db.abort(vmim)
    db.until_moved("n1")
    db.until(lambda: len(caller.history(SPACE, "db1")) == 2, "on record")
    assert [move["outcome"] for move in caller.history(SPACE, "db1")] == ["failed", "succeeded"]


def test_a_target_pod_that_is_deleted_while_memory_is_copied(
    cluster: Cluster,
    caller: Caller,
    machine: Callable[[str], Machine],
    quote: Callable[[Object], str],
) -> None:
    """If a target pod is deleted, the migration fails, or the VM ends after `Terminating` shows."""
    db = machine("db1")
    db.start("n1", fill=8, copied=SLOW)
    db.evict()
    db.until_copying()
    (vmim,) = db.migrations()
    cluster.kubectl("-n", SPACE, "delete", "pod", db.state()["targetPod"], "--wait=false")
    seen = set[str]()

    def is_over() -> bool:
        seen.update(reasons(caller, "db1"))
        return db.migrations()[0]["status"]["phase"] in {"Failed", "Succeeded"}

    db.until(is_over, "the migration over")
    if db.until_ended(vmim["metadata"]["name"])["status"]["phase"] == "Succeeded":
        db.until(lambda: db.get()["status"]["phase"] == "Failed", "dead")
        assert "Terminating" in seen
    else:
        assert db.get()["status"]["phase"] == "Running"
    quote(vmim)


@pytest.mark.timeout(2400)
def test_the_node_of_the_target_is_lost_after_the_hand_off(
    cluster: Cluster,
    exporter: tuple[Terminal, Caller],
    machine: Callable[[str], Machine],
    prove: Callable[[str], None],
    quote: Callable[[Object], str],
) -> None:
    """An attempt that never begins is stuck after `stuck.after`, and the next step frees the VM."""
    terminal, caller = exporter
    db = machine("db1")
    db.start("n1")
    lost = db.nodes["n2"]
    lost.signal("STOP", "virt-handler")
    try:
        db.evict()
        db.until(lambda: "PreparingTarget" in phases(db.migrations()[0]), "handed off")
        lost.signal("STOP", "kubelet")
        cluster.kubectl("wait", "--for=condition=Ready=Unknown", "node/n2", "--timeout=300s")
        until_state(caller, db, "migration_stalled")
        now = ask_evacuation(caller, "db1")
        assert now["stuck"]
        assert "startTimestamp" not in db.state()
        assert not ask_node(caller, "n1")["canBeEmptied"]
        assert now["nextStep"].startswith("Bring back or fence n2")
        printed = terminal.type_unlisted(now["command"])
        target = next(row for row in printed.splitlines() if row.startswith("Name:")).split()[1]
        waited = seconds_since_hand_off(db.migrations()[0])

        (vmim,) = db.migrations()
        cluster.kubectl("-n", SPACE, "delete", "pod", target, "--force", "--grace-period=0")
        db.abort(vmim["metadata"]["name"])
        quote(vmim)
        until_state(caller, db, "target_unschedulable")
        assert db.node == "n1"
    finally:
        for program in ("kubelet", "virt-handler"):
            lost.signal("CONT", program)
    db.until_moved("n1")
    db.until(lambda: not ask_evacuation(caller, "db1"), "over")
    prove(
        f"a target's node lost after the hand-off: stuck {waited:.0f} s after it; the pod and the"
        " VMIM deleted, the attempt ends; with the node back, the VM moves"
    )


def seconds_since_hand_off(vmim: Object) -> float:
    """For how long a VMIM waits since its hand-off."""
    return time.time() - phases(vmim)["Scheduled"]
