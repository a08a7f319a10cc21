"""The whole program with KubeVirt under other names, as Deckhouse serves it."""

from pathlib import Path
from typing import Any

import pytest

from exporter.engine.facts.names import KubeVirtNames
from tests.cluster import KUBEVIRTS, PODS, VMIMS, VMIS, Resource, launcher_pod, vmi, vmim
from tests.program.test_program import kubeconfig
from tests.support.api_servers import Stage, rename_resource
from tests.support.program import program


NAMES = KubeVirtNames(
    api_group="internal.virtualization.deckhouse.io",
    resource_prefix="InternalVirtualization",
    label_domain="kubevirt.internal.virtualization.deckhouse.io",
)
SETTINGS = {
    "apiGroup": NAMES.api_group,
    "resourcePrefix": NAMES.resource_prefix,
    "labelDomain": NAMES.label_domain,
}


def renamed(made: dict[str, Any], resource: Resource | None = None) -> dict[str, Any]:
    """An object with the names of its labels, its annotations and its kind."""
    metadata = made["metadata"]
    for part in ("labels", "annotations"):
        pairs = metadata.get(part, {})
        metadata[part] = {NAMES.translate(key): value for key, value in pairs.items()}
    for owner in metadata.get("ownerReferences", ()):
        owner |= {"apiVersion": f"{NAMES.api_group}/v1", "kind": NAMES.translate(owner["kind"])}
    if resource is not None:
        made |= {"apiVersion": resource.api_version, "kind": resource.kind}
    return made


async def test_serves_verdicts_evacuations_and_commands(stage: Stage, tmp_path: Path) -> None:
    """Watches read the renamed resources and labels, and the commands name them."""
    vmis, vmims, kubevirts = (
        rename_resource(resource, NAMES) for resource in (VMIS, VMIMS, KUBEVIRTS)
    )
    login = await stage.rename_kubevirt(NAMES)
    namespace, admin = await stage.make_namespace(), stage.admin
    marked = vmi("db", namespace, status={"evacuationNodeName": "n1"})
    made = await admin.create(vmis, renamed(marked, vmis))
    pod = await admin.create(PODS, renamed(launcher_pod(made)))
    config = {"kubevirt": SETTINGS}
    access = ("--kubeconfig", kubeconfig(login, tmp_path))
    async with program(tmp_path, *access, config=config) as exporter:
        await exporter.ready()
        await exporter.until_verdict(namespace, "db", "filter", "evacuation_in_progress")
        migration = renamed(vmim("m1", namespace, of="db", evacuates="n1"), vmims)
        await admin.create(vmims, migration)
        await exporter.until_verdict(namespace, "db", "filter", "migration_in_progress")
        # A diagnosis needs a contact about each resource since the VMI changed.
        touched = {"metadata": {"annotations": {"touched": "true"}}}
        await admin.merge(PODS, namespace, pod["metadata"]["name"], touched)
        made = {"metadata": {"name": "kubevirt", "namespace": namespace}, "spec": {}}
        await admin.create(kubevirts, renamed(made, kubevirts))
        answer = await exporter.until(
            f"/v1/vmis/{namespace}/db", lambda _, body: body["evacuation"]["state"] != "unknown"
        )

    assert answer["launcher"]["name"].startswith("virt-launcher-db-")
    assert answer["evacuation"]["attempt"]["name"] == "m1"
    assert answer["blindSpots"] == {}
    assert answer["evacuation"]["command"] == (
        f"kubectl -n {namespace} get internalvirtualizationvirtualmachineinstancemigrations"
        f" -l {NAMES.label_domain}/vmi-name=db"
    )


async def test_says_which_resource_is_missing(stage: Stage, tmp_path: Path) -> None:
    """Without such resources, the program ends and names the one that it needs."""
    access = ("--kubeconfig", kubeconfig(stage.login, tmp_path))
    config = {"kubevirt": {"apiGroup": "absent.example", "resourcePrefix": "Own"}}
    async with program(tmp_path, *access, config=config) as exporter:
        code = await exporter.process.wait()

    assert code != 0
    assert "no ownvirtualmachineinstances.absent.example (404)" in exporter.output


@pytest.mark.parametrize(
    ("own", "translated"),
    [
        ("kubectl get kubevirts -A", "kubectl get internalvirtualizationkubevirts -A"),
        (
            "involvedObject.kind=VirtualMachineInstanceMigration",
            "involvedObject.kind=InternalVirtualizationVirtualMachineInstanceMigration",
        ),
        ("-l kubevirt.io=virt-handler", f"-l {NAMES.label_domain}=virt-handler"),
        ("vmi.kubevirt.io/id={name}", "vmi.kubevirt.io/id={name}"),
        ("/apis/subresources.kubevirt.io/v1", "/apis/subresources.kubevirt.io/v1"),
    ],
)
def test_the_names_in_a_text(own: str, translated: str) -> None:
    """Resources, kinds and KubeVirt's own labels are translated, and nothing else."""
    assert NAMES.translate(own) == translated
    assert KubeVirtNames().translate(own) == own
