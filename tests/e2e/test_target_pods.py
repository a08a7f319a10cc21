"""What a real kubelet writes about a target pod that cannot start, and what the exporter says."""

from collections.abc import Callable
from pathlib import Path

from exporter.demo import objects
from tests.cluster import NAMESPACES, VMIS, namespace, poll
from tests.cluster.recording import Scene, record
from tests.cluster.resources import CONFIG_MAPS, NODES
from tests.e2e.cluster import Cluster, Object
from tests.e2e.kubevirt import KubeVirt
from tests.support.program import program


HERE = "volumes"
SPEC: Object = {
    "domain": {
        "devices": {"disks": [{"name": "notes", "disk": {}}]},
        "memory": {"guest": "64Mi"},
    },
    "volumes": [{"name": "notes", "configMap": {"name": "notes"}}],
}
MACHINE = "pc-q35-10.0"
"""The machine of a running VM; its target pod wants a node with this label of virt-handler."""
SANDBOX = "PodReadyToStartContainers"


async def test_a_target_pod_that_waits_for_a_volume(
    cluster: Cluster, kubevirt: KubeVirt, tmp_path: Path, prove: Callable[[str], None]
) -> None:
    """The kubelet says PodInitializing of each container; the pod's condition says what is wrong.

    The test binds the target pod to the only node, because the scheduler would not.
    """
    admin = kubevirt.cluster.admin
    await admin.create(NAMESPACES, namespace(HERE))
    notes = {"metadata": {"name": "notes", "namespace": HERE}, "data": {"a": "b"}}
    await admin.create(CONFIG_MAPS, {"apiVersion": "v1", "kind": "ConfigMap"} | notes)
    await kubevirt.cluster.create_vmi("db1", HERE, **SPEC)

    async def is_running() -> bool:
        vmi = await kubevirt.cluster.vmi("db1", HERE)
        return objects.phase(vmi) == "Running" and objects.is_true(vmi, "LiveMigratable")

    async def label_node(machine: str | None) -> None:
        labels = {f"machine-type.node.kubevirt.io/{MACHINE}": machine and "true"}
        await admin.merge(NODES, None, "n1", {"metadata": {"labels": labels}})

    async def find_target() -> Object | None:
        pods = await kubevirt.cluster.pods("db1", HERE)
        return next((pod for pod in pods if objects.labels(pod).get(objects.MIGRATION_JOB)), None)

    async def find_waiting() -> Object | None:
        target = await find_target() or {}
        waits = (objects.condition(target, SANDBOX) or {}).get("status") == "False"
        return target if waits and target["status"].get("containerStatuses") else None

    await label_node(MACHINE)
    try:
        await poll(is_running, what="the VM running")
        (launcher,) = await kubevirt.cluster.pods("db1", HERE)
        await admin.delete(CONFIG_MAPS, HERE, "notes")
        assert await kubevirt.cluster.evict(launcher) is not None
        target = await poll(find_target, what="the target pod")
        await kubevirt.handlers.bind(target, "n1")
        target = await poll(find_waiting, what="the target pod waiting for its volume")
        vmi = await kubevirt.cluster.vmi("db1", HERE)
        # Ready follows the launcher's probes, which is not what is recorded here.
        objects.drop_condition(vmi, "Ready")
        launcher, target = await kubevirt.cluster.pods("db1", HERE)
        # virt-controller writes it to the newest pod on the VM's node: here the target, unless both
        # pods were created in the same second.
        objects.drop_condition(target, objects.UNPAUSED)
        scene = Scene(vmi, await kubevirt.cluster.vmims("db1", HERE), [launcher, target])
        login = ("--kubeconfig", str(cluster.kubeconfig))
        async with program(tmp_path, *login) as exporter:
            await exporter.ready()
            _, seen = await exporter.get(f"/v1/vmis/{HERE}/db1")
    finally:
        await admin.delete(VMIS, HERE, "db1")
        await label_node(None)

    await record(
        kubevirt.cluster,
        "further/target_not_ready.volume",
        "virt-api's eviction webhook marked the VMI, virt-controller made the target pod, and a "
        "real kubelet waits for the ConfigMap of its volume, which was deleted. The virt-handler "
        "and the decision of the scheduler were simulated.",
        scene,
    )
    names = [row["name"] for row in target["spec"]["initContainers"]]
    waiting = {row["state"]["waiting"]["reason"] for row in target["status"]["containerStatuses"]}
    (why,) = (row for row in seen["evacuation"]["why"] if row["source"] == "TargetPod")
    assert names
    assert waiting == {"PodInitializing"}
    assert seen["evacuation"]["state"] == "target_not_ready"
    assert why["reason"] == SANDBOX
    prove(
        f"kubelet: a target pod with the init containers {', '.join(names)} that waits for a "
        f"volume: {', '.join(waiting)}; the exporter: {why['reason']}: {why['message']!r}"
    )
