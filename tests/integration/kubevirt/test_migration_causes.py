"""Why migrations end or hang that KubeVirt's own controllers end, abort or leave unfinished."""

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import pytest

from exporter.demo import objects
from tests.cluster import PODS, VMIMS, poll
from tests.cluster.player import Fate
from tests.cluster.resources import MUTATING_POLICIES, MUTATING_POLICY_BINDINGS
from tests.cluster.rig import Rig
from tests.cluster.versions import PINNED, RUNNING
from tests.integration.kubevirt.test_rig import BY_EVACUATION, PLAYED
from tests.support.program import Program, program


REASON, MESSAGE = "error.type", "error.message"
GATE = "ApplicationAwareQuotaGate"
PINNED_ONLY = pytest.mark.skipif(
    RUNNING["kubevirt"] != PINNED["kubevirt"], reason="recorded with the pinned KubeVirt alone"
)


@dataclass
class Stage:
    """The rig, and the exporter whose log is read."""

    rig: Rig
    exporter: Program

    async def until_line(self, namespace: str) -> dict[str, Any]:
        """Wait for the first line about a migration in a namespace."""

        async def find() -> dict[str, Any] | None:
            lines = self.exporter.events("migration_ended")
            return next((line for line in lines if line["k8s.namespace.name"] == namespace), None)

        return await poll(find, what=f"the end of a migration in {namespace}")

    async def delete_migration(self, namespace: str) -> None:
        """Delete the newest migration in a namespace, which aborts it."""
        scene = await self.rig.look(f"{namespace}/db1")
        await self.rig.cluster.admin.delete(VMIMS, namespace, scene.vmims[-1]["metadata"]["name"])


@pytest.fixture(scope="module")
async def stage(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stage]:
    """KubeVirt's servers, three nodes, and an exporter."""
    async with (
        Rig.opened() as rig,
        program(tmp_path_factory.mktemp("causes"), *rig.login) as exporter,
    ):
        await exporter.ready()
        yield Stage(rig, exporter)


@pytest.fixture
def quote(prove: Callable[[str], None]) -> Callable[[dict[str, Any]], None]:
    """Print the important fields of a log line."""

    def show(line: dict[str, Any]) -> None:
        short = {
            key: value for key, value in line.items() if key.startswith(("error", "kubevirt."))
        }
        wanted = ("kubevirt.migration.phase", "kubevirt.migration.outcome", MESSAGE)
        fields = ", ".join(f"{key.rpartition('.')[2]} {short[key]!r}" for key in wanted)
        prove(f"rig: migration_ended: {line[REASON]}: {fields}")

    return show


@pytest.mark.parametrize(
    ("name", "fate", "reason", "message"),
    [
        pytest.param("none", "succeeds", "none", "", id="none"),
        pytest.param("libvirt", "fails", "libvirt", "virError", id="libvirt"),
        # No kubelet runs here, so nothing reports why the target's container ended.
        pytest.param("crashes", "crashes", "other", "", id="target-before-hand-off"),
        pytest.param(
            "lost", Fate("loses ready target", seconds=2), "target_lost", "", id="target-lost"
        ),
    ],
)
async def test_what_ends_by_itself(
    stage: Stage,
    quote: Callable[[dict[str, Any]], None],
    name: str,
    fate: Any,
    *,
    reason: str,
    message: str,
) -> None:
    """A migration that ends by itself has its reason in the log."""
    namespace = f"ended-{name}"
    async with stage.rig.vmi(f"{namespace}/db1", fate, "succeeds"):
        await stage.rig.evict(f"{namespace}/db1")
        line = await stage.until_line(namespace)
    quote(line)
    assert line[REASON] == reason
    assert message in line[MESSAGE]
    assert (line["kubevirt.migration.outcome"] == "succeeded") is (reason == "none")


async def test_an_aborted_migration(stage: Stage, quote: Callable[[dict[str, Any]], None]) -> None:
    """A VMIM that is deleted while its migration runs is logged as aborted."""
    async with stage.rig.vmi("ended-aborted/db1", "hangs", "succeeds"):
        await stage.rig.evict("ended-aborted/db1")
        await stage.rig.until("ended-aborted/db1", lambda scene: scene.state.get("startTimestamp"))
        await stage.delete_migration("ended-aborted")
        line = await stage.until_line("ended-aborted")
    quote(line)
    assert line[REASON] == "aborted"


@PINNED_ONLY
async def test_a_gated_target_pod(stage: Stage, prove: Callable[[str], None]) -> None:
    """A scheduling gate on the target pod is named, with its owner and the step."""
    key, rig = "gated/db1", stage.rig
    async with rig.vmi(key, "never bound"):
        await add_gates(rig, "gated")
        await rig.evict(key)
        waiting = await rig.until(
            key, lambda scene: len(scene.pods) == 2 and scene.phases == ["Scheduling"]
        )
        await rig.record(
            "target_gated",
            BY_EVACUATION + "A MutatingAdmissionPolicy gave the target pod the scheduling gate of "
            "the application-aware quota, and kube-apiserver wrote the pod's condition.",
            waiting,
        )
        body = await stage.exporter.until(
            f"/v1/vmis/{key}",
            lambda _, body: body["evacuation"] and body["evacuation"]["state"] == "target_gated",
        )
        evacuation = body["evacuation"]

    assert evacuation["cause"]["reason"] == "SchedulingGated"
    assert evacuation["cause"]["message"] == GATE
    assert evacuation["nextStep"].startswith("Raise the ApplicationAwareResourceQuota")
    prove(f"rig: target_gated: {evacuation['cause']['message']!r}: {evacuation['nextStep']}")


@PINNED_ONLY
async def test_a_hotplug_that_hangs_holds_an_ended_migration(
    stage: Stage, prove: Callable[[str], None]
) -> None:
    """KubeVirt does not finish the VMIM, and deleting it hangs until the hotplug is over."""
    key, rig = "plugging/db1", stage.rig
    change = {"type": "HotVCPUChange", "status": "True", "lastProbeTime": None}
    change |= {"lastTransitionTime": None, "message": "CPUs are being plugged"}
    async with rig.vmi(key) as scene:
        await rig.player.write(scene.vmi, lambda vmi: objects.set_condition(vmi, change))
        await rig.evict(key)
        ended = await rig.until(
            key,
            lambda scene: scene.state.get("completed") and objects.active_pods(scene.pods) == 1,
        )

        assert ended.phases == ["Running"]
        assert ended.marked == ""
        played = PLAYED + "a virt-handler said that a hotplug of CPUs goes on, and the migration "
        await rig.record(
            "further/ended_not_finished.hotplug",
            BY_EVACUATION + played + "succeeded. virt-controller leaves the VMIM Running.",
            ended,
        )
        name = ended.vmims[0]["metadata"]["name"]
        await rig.cluster.admin.delete(VMIMS, "plugging", name)
        deleted = await rig.until(key, lambda scene: objects.is_deleting(scene.vmims[0]))
        await rig.record(
            "further/ended_not_finished.deleted",
            BY_EVACUATION + played + "succeeded. The VMIM was deleted, and waits for its finalizer "
            "and for virt-controller, which leaves it Running.",
            deleted,
        )
        (left,) = deleted.vmims
        assert objects.phase(left) == "Running"
        assert left["metadata"]["finalizers"] == [objects.MIGRATION_FINALIZER]
        prove(
            f"rig: KubeVirt {RUNNING['kubevirt']}: HotVCPUChange keeps the VMIM of a migration that"
            f" has ended Running; deleted, it waits for {left['metadata']['finalizers'][0]}"
        )
        await rig.player.write(
            deleted.vmi, lambda vmi: objects.drop_condition(vmi, "HotVCPUChange")
        )
        await rig.until(key, lambda scene: not scene.vmims)


async def add_gates(rig: Rig, namespace: str) -> None:
    """From now on each new target pod in a namespace has a scheduling gate."""
    gate = f'Object.spec.schedulingGates{{name: "{GATE}"}}'
    add = f'[JSONPatch{{op: "add", path: "/spec/schedulingGates", value: [{gate}]}}]'
    is_target = {"key": objects.MIGRATION_JOB, "operator": "Exists"}
    rule = {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"]}
    spec = {
        "failurePolicy": "Fail",
        "reinvocationPolicy": "Never",
        "matchConstraints": {
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}},
            "objectSelector": {"matchExpressions": [is_target]},
            "resourceRules": [rule | {"resources": ["pods"]}],
        },
        "mutations": [{"patchType": "JSONPatch", "jsonPatch": {"expression": add}}],
    }
    for resource, body in (
        (MUTATING_POLICIES, spec),
        (MUTATING_POLICY_BINDINGS, {"policyName": "gates"}),
    ):
        head = {"apiVersion": resource.api_version, "kind": resource.kind}
        await rig.cluster.admin.create(
            resource, head | {"metadata": {"name": "gates"}, "spec": body}
        )
    pod = {
        "apiVersion": PODS.api_version,
        "kind": PODS.kind,
        "metadata": {"generateName": "trial-", "labels": {objects.MIGRATION_JOB: "trial"}},
        "spec": {"containers": [{"name": "compute", "image": "virt-launcher"}]},
    }

    async def is_gated() -> bool:
        made = await rig.cluster.admin.request(
            "POST", PODS.path(namespace), json=pod, params={"dryRun": "All"}
        )
        return bool(made["spec"].get("schedulingGates"))

    await poll(is_gated, what="new target pods gated")
