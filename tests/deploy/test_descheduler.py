"""The real descheduler under the rendered roles, with the rendered flags and policy."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.cluster import PODS, VMIS, RealCluster, find_binary, launcher_pod, poll, vmi
from tests.cluster.objects import Object
from tests.cluster.ports import free_port
from tests.cluster.processes import Process
from tests.cluster.resources import NODES, Resource
from tests.deploy.files import NAME, containers, only, render
from tests.deploy.server import account


EVICTED = "Evicted pod"
EVENTS = Resource("events.k8s.io", "v1", "events", "Event")


def arguments(kubeconfig: Path, directory: Path) -> list[str]:
    """The container's flags, its policy's file moved, on a port of its own."""
    objects = render("overlays/sidecar")
    container = containers(only(objects, "Deployment")["spec"]["template"])["descheduler"]
    policy = directory / "policy.yaml"
    policy.write_text(only(objects, "ConfigMap", f"{NAME}-descheduler")["data"]["policy.yaml"])
    flags = [one.replace("/policy-dir/policy.yaml", str(policy)) for one in container["args"]]
    return [
        str(find_binary("descheduler")),
        *flags,
        f"--kubeconfig={kubeconfig}",
        f"--secure-port={free_port()}",
        "--bind-address=127.0.0.1",
    ]


def node(name: str) -> Object:
    """A ready node of four processors for VMs."""
    room = {"cpu": "4", "memory": "8Gi", "pods": "100"}
    return {
        "metadata": {"name": name, "labels": {"kubevirt.io/schedulable": "true"}},
        "status": {
            "capacity": room,
            "allocatable": room,
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    }


@pytest.fixture
async def crowded(cluster: RealCluster) -> AsyncIterator[RealCluster]:
    """One node with three launcher pods of a processor each, and one without any."""
    names = ("a", "b", "c")
    request = {"requests": {"cpu": "1", "memory": "1Gi"}}
    compute = {"name": "compute", "image": "virt-launcher", "resources": request}
    for name in ("n1", "n2"):
        await cluster.admin.create(NODES, node(name))
        # Every node is born with the taint not-ready, which only a controller takes off.
        await cluster.admin.merge(NODES, None, name, {"spec": {"taints": None}})
    for name in names:
        made = await cluster.admin.create(VMIS, vmi(name))
        pod = launcher_pod(made, metadata={"name": name}, spec={"containers": [compute]})
        await cluster.admin.create(PODS, pod)
    yield cluster
    for name in names:
        await cluster.admin.delete(VMIS, "default", name)
    for path in (EVENTS.path("default"), PODS.path("default"), NODES.path()):
        await cluster.admin.send("DELETE", path, json={"gracePeriodSeconds": 0})


async def cycle(cluster: RealCluster, directory: Path, *lacking: str) -> str:
    """What it says until it has evicted a pod and told so in an event, or until it is refused.

    `lacking` is a verb and a resource.
    """
    less = (lacking[0], (lacking[1],)) if lacking else None
    async with account(cluster, "overlays/sidecar", without=less) as user:
        command = arguments(cluster.kubeconfig(user), directory)
        process = Process(command, directory / "descheduler.log")
        process.start()

        async def told() -> bool:
            assert process.running, process.tail()
            said = process.log.read_text()
            events = await cluster.admin.list(EVENTS, "default")
            return (EVICTED in said and bool(events["items"])) or "forbidden" in said

        try:
            await poll(told, within=30, what="an eviction and its event")
        finally:
            process.kill()
    return process.log.read_text()


async def test_a_cycle_under_the_rendered_roles(crowded: RealCluster, tmp_path: Path) -> None:
    """It reads what it needs, evicts, tells so in an event, and is refused nothing."""
    said = await cycle(crowded, tmp_path)

    assert EVICTED in said
    assert "forbidden" not in said
    pods = (await crowded.admin.list(PODS, "default"))["items"]
    assert any("deletionTimestamp" in one["metadata"] for one in pods)


@pytest.mark.parametrize(
    ("verb", "resource"),
    [
        ("watch", "nodes"),
        ("watch", "pods"),
        ("watch", "persistentvolumeclaims"),
        ("create", "pods/eviction"),
        ("create", "events"),
    ],
)
async def test_what_a_cycle_needs(
    crowded: RealCluster, verb: str, resource: str, tmp_path: Path
) -> None:
    """Without it the log says what was refused: the proof above would have seen it."""
    said = await cycle(crowded, tmp_path, verb, resource)

    assert f'cannot {verb} resource \\"{resource}\\"' in said
