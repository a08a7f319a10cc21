"""Situations from public reports, played to the whole program: what a person reads in each.

The objects are those of the reports (`tests/data/field`, with the sources). Each row has what is
right: fields of the API's answers, and parts of what `explain` and `node` print.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from exporter.cli.drain import ROOM_UNKNOWN
from exporter.demo.objects import build_node
from exporter.demo.store import KUBEVIRTS
from exporter.engine.facts.placement import HOSTNAME
from exporter.errors import Exit
from tests.cluster import poll
from tests.program.exporting import exporting
from tests.support.commands import run_command
from tests.support.faulty_apiserver import FaultyApiServer
from tests.support.field import FIELD, FieldStore, read_steps
from tests.support.program import Program


KUBEVIRT = {
    "metadata": {
        "namespace": "kubevirt",
        "name": "kubevirt",
        "uid": "kubevirt",
        "creationTimestamp": "2026-01-01T00:00:00Z",
    },
    "spec": {},
    "status": {"phase": "Deployed"},
}


class Right(NamedTuple):
    """What is right about one VM: of its evacuation or move, of its drain, and in the texts."""

    drain: str | None
    fields: dict[str, Any]
    explain: tuple[str, ...] = ()
    node: str = ""


def stuck(state: str, *explain: str, drain: str = "fails", **fields: Any) -> Right:
    """A stuck evacuation in this state, from a node that cannot be emptied."""
    evacuation = {"state": state, "stuck": True, **fields}
    return Right(drain, {"evacuation": evacuation}, explain, node="cannot be emptied")


def moved(state: str, *explain: str) -> Right:
    """A stuck move of a VM in this state, on a node that cannot be emptied."""
    return Right("fails", {"move": {"state": state, "stuck": True}}, explain, "cannot be emptied")


RIGHT: dict[str, list[Right]] = {
    "cpu-mismatch-loop-then-uncordon": [
        stuck("target_not_ready", "guest CPU doesn't match specification", "launcher's log"),
        stuck("target_not_ready", "guest CPU doesn't match specification", "evacuate/cancel"),
    ],
    "failure-only-on-the-vmi": [stuck("no_migration", "Read the launcher's log around the error")],
    "hand-off-hangs": [
        stuck(
            "migration_stalled",
            "Terminating: virt-launcher-vm-tgt is being deleted",
            "Bring back or fence n3, the target's node, or force-delete the target pod",
        )
    ],
    "hotplug-attachment-waits": [
        stuck("target_not_ready", "Repair what keeps the target pod from starting"),
        stuck(
            "target_not_ready",
            "Repair the pods that attach the VM's hot-plugged volumes",
            "describe pods -l kubevirt.io=hotplug-disk",
        ),
    ],
    "kubelet-rejects-target": [
        stuck(
            "no_migration",
            "UnexpectedAdmissionError: Pod was rejected: Allocate failed",
            "Repair what keeps the target pod from starting",
            "describe pods",
        )
    ],
    "no-target-pod-is-made": [
        stuck(
            "target_not_ready",
            "KubeVirt has made no target pod, but its limits are free",
            "logs -l kubevirt.io=virt-controller",
        )
    ],
    "quiet-watch-of-pods": [
        stuck("no_migration", "Read the launcher's log around the error of libvirt or QEMU")
    ],
    "rwo-volume-migration-fails": [
        stuck(
            "not_migratable",
            "DisksNotLiveMigratable",
            "none; other migrations of the VM have failed",
            drain="stays",
        )
    ],
    "source-node-dead": [
        stuck("no_migration", "Repair or fence n1", "describe node n1"),
        stuck("migration_stalled", "Repair or fence n1", "describe node n1"),
    ],
    "source-vmim-never-ends": [
        Right("waits", {"move": {"state": "migrating", "stuck": False, "trigger": "manual"}}),
        Right(None, {"evacuation": None, "move": None}, ("has ended (Succeeded)",)),
        Right("waits", {"evacuation": {"state": "migrating", "stuck": False}}),
    ],
    "stale-pod-terminating": [
        stuck(
            "multiple_active_pods",
            "force-delete this pod, but never virt-launcher-vm-src on n1",
        )
    ],
    "still-external": [
        stuck("external", "Let the controller that manages this VM move", drain="external")
    ],
    "taint-drain": [
        stuck(
            "target_unschedulable",
            "the drain taint of the node",
            "Make room on another node",
            requestedThrough="taint",
            failedAttempts=5,
            cancel=None,
        )
    ],
    "taint-stays-after-uncordon": [
        stuck(
            "no_migration",
            "Remove the taint kubevirt.io/drain from n1",
            "kubectl taint nodes n1 kubevirt.io/drain:NoSchedule-",
            leftover=True,
            cancel=None,
        )
    ],
    "target-out-of-memory": [
        stuck(
            "no_migration",
            "OOMKilled: exit code 137",
            "Repair what ended the target pod, such as its memory limit",
        )
    ],
    "users-migration-over-quota": [
        Right(
            "fails",
            {"move": {"state": "quota", "stuck": True, "trigger": "manual"}},
            ("is stuck: its manual migration does not end", "Raise the ResourceQuota"),
            node="cannot be emptied",
        ),
        Right(
            "fails",
            {"move": {"state": "target_unschedulable", "stuck": True}},
            ("3 Insufficient memory",),
            node="cannot be emptied",
        ),
    ],
    "vmi-being-deleted": [
        stuck("shutting_down", "the deletion waits for kubevirt.io", drain="stays"),
        Right("stays", {"evacuation": None}, node="cannot be emptied"),
    ],
    "disk-copy-times-out": [
        moved(
            "backoff",
            "Raise completionTimeoutPerGiB in the KubeVirt object or in a MigrationPolicy",
        )
    ],
    "ended-but-running": [
        moved(
            "ended_not_finished",
            "Read virt-controller's log",
            "the migration has ended and the VM runs on n2",
            "deleting the VMIM does not help",
            "kubectl -n kubevirt logs",
        )
    ],
    "hand-off-refused": [
        stuck(
            "target_not_ready", "Read the VMIM's events (such as FailedHandOver)", failedAttempts=4
        )
    ],
    "handlers-down-elsewhere": [
        stuck(
            "target_unschedulable",
            "Repair virt-handler on n2 and n3: it does not answer",
            "kubectl -n kubevirt get pods -l kubevirt.io=virt-handler",
        )
    ],
    "launcher-preempted": [
        Right(
            "ends",
            {"evacuation": None, "move": None},
            ("PreemptionByScheduler", "and ends within 1h", "in a drain it ends"),
            node="n1 can be emptied",
        )
    ],
    "long-copy-under-way": [
        moved(
            "migration_stalled",
            "Look whether the copy of the VM's memory and disks makes progress",
            "stuck.migrationTimeout is only the exporter's own limit",
        )
    ],
    "not-migratable-strategies": [
        Right(
            "stays",
            {"evacuation": None, "move": None},
            (
                "in a drain it never leaves: it is not migratable",
                "cannot migrate VMI: Backend storage PVC is not RWX",
                "Remove what makes the VM non-migratable, or shut it down",
                ".status.conditions",
            ),
            node="Remove what makes the VM non-migratable",
        )
    ],
    "one-node": [
        Right(
            "fails",
            {"evacuation": None, "move": None},
            ("no other node can take it", "no other node exists"),
            node="kind-control-plane cannot be emptied: default/idle fails",
        )
    ],
    "pod-refused-at-creation": [
        stuck(
            "target_not_ready",
            "Read the VM's events (such as FailedCreate), and virt-controller's log",
            "kubectl -n openshift-cnv logs",
        )
    ],
    "scheduling-gate": [
        stuck(
            "target_gated",
            "Raise the ApplicationAwareResourceQuota of the namespace",
            "the scheduling gate ApplicationAwareQuotaGate, so no node was asked yet",
        )
    ],
    "source-handler-down": [
        stuck(
            "target_not_ready",
            "Check virt-handler on the VM's own node n1 (its pod and its log)",
            "--field-selector spec.nodeName=n1",
            failedAttempts=4,
        )
    ],
    "stale-source-pod": [
        Right(
            "waits",
            {"evacuation": None, "move": None},
            ("it cannot migrate while more than one of its launcher pods is active",),
            node="launcher pod virt-launcher-testvmi-src of default/testvmi, which runs on n2, is",
        )
    ],
    "target-waits-for-volume": [
        stuck(
            "target_not_ready",
            "PodReadyToStartContainers: its network or a volume is not ready",
            "the kubelet's events are on the pod",
            "describe pods",
        )
    ],
    "zombie-before-a-drain": [
        Right("fails", {"evacuation": None, "move": None}, node="KubeVirt never ended the VM's"),
        stuck("zombie_state", "Restart the VM"),
    ],
}


FURTHER = {"users-migration-over-quota": [{"ask": "default/un", "node": "n1"}]}
"""Questions that a report suggests, and that are not in its file."""


@asynccontextmanager
async def playing(directory: Path, store: FieldStore) -> AsyncIterator[Program]:
    """An exporter on an API server with these objects, and a KubeVirt object with its defaults."""
    if not store.caches[KUBEVIRTS].entries:
        store.apply("kubevirts", KUBEVIRT)
    async with (
        FaultyApiServer(store, bookmark_seconds=0.2) as server,
        exporting(server.url, directory) as exporter,
    ):
        yield exporter


async def read(exporter: Program, *words: str) -> tuple[str, int]:
    """What a command prints about this exporter, and its exit code."""
    code, output, _ = await run_command(*words, "--url", exporter.query)
    return output, code


def has(body: Any, right: Right) -> bool:
    """Whether the API's answer about the VM is right."""
    return body["drain"] == right.drain and all(
        body[part] == fields
        if fields is None
        else body[part] is not None and fields.items() <= body[part].items()
        for part, fields in right.fields.items()
    )


def test_every_report_is_played() -> None:
    """Each file of `tests/data/field` has its row."""
    assert set(RIGHT) == {path.stem for path in FIELD.glob("*.json")}


@pytest.mark.parametrize("name", RIGHT)
async def test_a_report_is_answered(name: str, tmp_path: Path) -> None:
    """At each question of the report, API, metrics, `explain` and `node` say what is right."""
    store = FieldStore()
    questions = chain(store.play(name), FURTHER.get(name, ()))
    first = next(questions)
    async with playing(tmp_path, store) as exporter:
        asked, rights = first, iter(RIGHT[name])
        while asked:
            await answer(exporter, asked, next(rights))
            asked = next(questions, {})
        assert next(rights, None) is None, "each row of RIGHT is asked"


def name_vm(ask: str | list[str]) -> str:
    """The VM that a question is about, as namespace/name."""
    if isinstance(ask, list):
        return "/".join(ask)
    return ask if "/" in ask else "default/vm"


async def answer(exporter: Program, asked: dict[str, Any], right: Right) -> None:
    """Check the answers to one question."""
    vm = name_vm(asked["ask"])
    seen: Any = None

    async def is_right() -> bool:
        nonlocal seen
        _, seen = await exporter.get(f"/v1/vmis/{vm}")
        return has(seen, right)

    try:
        await poll(is_right, what=vm)
    except TimeoutError:
        assert seen["drain"] == right.drain
        for part, fields in right.fields.items():
            assert seen[part] == fields
        raise
    namespace, name = vm.split("/")
    for part, metric in (
        ("evacuation", "kubevirt_vmi_evacuation_stuck"),
        ("move", "kubevirt_vmi_migration_stuck"),
    ):
        is_stuck = seen[part] is not None and seen[part]["stuck"]
        assert await exporter.sample(metric, namespace=namespace, name=name) == float(is_stuck)
    verdict = await exporter.verdict(namespace, name, dryRun=True)
    trouble = seen["evacuation"] or seen["move"]
    assert verdict["stuck"] == bool(trouble and trouble["stuck"])
    explained, _ = await read(exporter, "explain", vm)
    for part in right.explain:
        assert part in explained
    assert "ENDED  TOOK  OUTCOME  COUNTED\n  ?      ?" not in explained
    assert "permission" not in explained
    if "node" in asked:
        forecast, code = await read(exporter, "node", asked["node"])
        assert right.node in forecast
        assert (code == Exit.CANNOT_BE_EMPTIED) is ("cannot be emptied" in forecast)


CORDONED = {"spec": {"unschedulable": True}}


@pytest.mark.parametrize(
    ("others", "selector", "sentence"),
    [
        pytest.param([], {}, "no other node exists", id="one-node"),
        pytest.param([CORDONED] * 2, {}, "n2 is cordoned, n3 is cordoned", id="all-cordoned"),
        pytest.param(
            [{}],
            {HOSTNAME: "kind-control-plane"},
            "n2 does not have the labels that the VM requires",
            id="one-pinned-vm",
        ),
        pytest.param([CORDONED, {}], {}, "", id="one-open-node"),
    ],
)
async def test_node_knows_whether_there_is_a_node_to_go_to(
    others: list[dict[str, Any]], selector: dict[str, str], sentence: str, tmp_path: Path
) -> None:
    """`node` exits with 12 and names the VM and the reason if no other node can take it, else 0."""
    store = FieldStore()
    for step in read_steps("one-node", store.clock().timestamp()):
        if "ask" in step or "testvm" in step["object"]["metadata"]["name"]:
            continue
        if step["apply"] == "virtualmachineinstances":
            step["object"]["spec"]["nodeSelector"] = selector
        if step["apply"] != "virtualmachineinstancemigrations":
            store.apply(step["apply"], step["object"])
    for number, node in enumerate(others, 2):
        store.apply("nodes", {**build_node(f"n{number}"), **node})
    async with playing(tmp_path, store) as exporter:
        output, code = await read(exporter, "node", "kind-control-plane")
    if sentence:
        assert output.startswith("kind-control-plane cannot be emptied: default/idle fails (")
        assert f"none can take it: {sentence}." in output
        assert code == Exit.CANNOT_BE_EMPTIED
    else:
        assert output.startswith("kind-control-plane can be emptied.")
        assert ROOM_UNKNOWN in " ".join(output.split())
        assert code == Exit.OK
