"""virt-handler is down on one node of a migration."""

import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import pytest

from tests.cluster.recording import RECORDED, Scene, cut_node, keep
from tests.cluster.versions import PINNED, RUNNING
from tests.e2e.asking import Caller
from tests.e2e.cluster import Object
from tests.e2e.node import Node
from tests.e2e.terminal import Terminal
from tests.vms.answers import ask_evacuation
from tests.vms.images import LAUNCHER
from tests.vms.kubevirt import Machine
from tests.vms.test_failures import phases, until_state


KEPT = "localhost/kubevirt/kept:1"
"""The name of virt-handler's image while no pod can use it."""


class Side(NamedTuple):
    """Where virt-handler is down (always on n2), where the VM runs, and what is expected."""

    name: str
    source: str
    phase: str
    step: str


SIDES = (
    Side("source", "n2", "TargetReady", "Check virt-handler on the VM's own node n2"),
    Side("target", "n1", "PreparingTarget", "Check the target's virt-handler, on n2"),
)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("side", SIDES, ids=[side.name for side in SIDES])
def test_virt_handler_is_down(
    exporter: tuple[Terminal, Caller],
    machine: Callable[[str], Machine],
    prove: Callable[[str], None],
    side: Side,
) -> None:
    """The step leads to the pod of the virt-handler that is down; once it runs, the VM leaves."""
    terminal, caller = exporter
    db = machine("db1")
    db.start(side.source)
    # It is stopped at first, because the target's launcher needs the image, too.
    db.nodes["n2"].signal("STOP", "virt-handler")
    with without_image(db.nodes["n2"]) as remove:
        db.evict()
        db.until(
            lambda: any(side.phase in phases(vmim) for vmim in db.migrations()), f"in {side.phase}"
        )
        remove()
        db.nodes["n2"].signal("KILL", "virt-handler")
        until_state(caller, db, "migration_stalled")
        now = ask_evacuation(caller, "db1")
        record(db, side.name)
        assert now["stuck"]
        assert "startTimestamp" not in db.state()
        assert list(phases(db.migrations()[0]))[-1] == side.phase
        assert now["nextStep"].startswith(side.step)
        _, pod = terminal.type_unlisted(now["command"]).strip().splitlines()
        name, ready, state, *_ = pod.split()
        assert " n2 " in pod
        assert ready == "0/1"
        assert state in {"ErrImageNeverPull", "CrashLoopBackOff"}
        assert db.node == side.source
    # The kubelet would wait for up to five minutes before it tries again.
    db.cluster.kubectl("-n", "kubevirt", "delete", "pod", name)
    db.until_moved(side.source)
    db.until(lambda: not ask_evacuation(caller, "db1"), "over")
    *_, last = db.migrations()
    assert last["status"]["phase"] == "Succeeded"
    prove(
        f"virt-handler down on the {side.name}: the migration waits in {side.phase};"
        f" {now['command']!r} shows {state} on n2; with its image back, the VM leaves"
    )


@contextmanager
def without_image(node: Node) -> Iterator[Callable[[], None]]:
    """Gives a function that removes virt-handler's image from a node; at the end it is back.

    Without it, the kubelet cannot start virt-handler again.
    """

    def run(*arguments: str) -> None:
        images = ("ctr", "-n", "k8s.io", "images", *arguments)
        subprocess.run(node.command(*images), check=True, capture_output=True)

    run("tag", "--force", LAUNCHER.name, KEPT)
    try:
        yield lambda: run("rm", LAUNCHER.name)
    finally:
        run("tag", "--force", KEPT, LAUNCHER.name)
        run("rm", KEPT)
        # The process is gone, unless the test failed before.
        cont = node.command("pkill", "-CONT", "-x", "virt-handler")
        subprocess.run(cont, check=False)


def record(machine: Machine, side: str) -> None:
    """Record what KubeVirt wrote, or compare it with the recording of this version."""
    if RUNNING["kubevirt"] != PINNED["kubevirt"]:
        return
    cluster = machine.cluster
    scene = Scene(machine.get(), machine.migrations(), sorted(machine.pods(), key=_created))
    (kubevirt,) = cluster.get("-n", "kubevirt", "kubevirts")["items"]
    nodes = [cut_node(node) for node in cluster.get("nodes")["items"]]
    path = RECORDED / f"{RUNNING['kubevirt']}-nodes" / "further" / f"migration_stalled.{side}.json"
    source = f"All of KubeVirt on two real nodes; virt-handler is down on the {side}, n2."
    keep(path, source, scene, {"kubevirt_cr": kubevirt, "others": [], "nodes": nodes})


def _created(document: Object) -> str:
    return str(document["metadata"]["creationTimestamp"])
