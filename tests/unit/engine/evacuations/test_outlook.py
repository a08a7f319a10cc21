"""What a drain would do to one VM if no other node can take it, or if its pod is being deleted."""

from typing import Any

import pytest
from msgspec.structs import replace

from exporter.engine.evacuations.conditions import Conditions
from exporter.engine.evacuations.drain_outcomes import Ground
from exporter.engine.evacuations.outlook import explain_no_node, judge
from exporter.engine.facts.evidence import Evidence
from exporter.engine.facts.model import KubeVirtSettings, Node, WhySource
from exporter.engine.facts.placement import Placement
from exporter.engine.facts.policy import StuckPolicy
from exporter.engine.store.nodes import NodeIndex
from tests.support.builders import (
    NOW,
    a_cordon,
    a_pod,
    a_running_state,
    a_vmi,
    a_vmim,
    some_evidence,
)
from tests.support.stores import a_trust
from tests.unit.engine.evacuations.test_diagnosis import an_evacuation


def beside(*nodes: Node, **overrides: Any) -> Conditions:
    """Conditions with the nodes n1 and these."""
    index = NodeIndex()
    index.record_list(NOW)
    for node in (Node(name="n1"), *nodes):
        index.put(node, NOW)
    fields = {
        "kubevirt": KubeVirtSettings(eviction_strategy="LiveMigrate"),
        "load": None,
        "stuck": StuckPolicy(),
        "trust": a_trust(),
        "now": NOW,
        "nodes": index,
    }
    return Conditions(**(fields | overrides))


CLOSED = a_cordon(name="n2")


def a_vm(*vmims: Any, pods: tuple[Any, ...] = (), **vmi: Any) -> Evidence:
    """Evidence of a migratable VM on n1."""
    launcher = a_pod()
    subject = a_vmi(**({"migratable": True} | vmi))
    return some_evidence(vmi=subject, launcher=launcher, vmims=vmims, pods=(launcher, *pods))


def ground_of(evidence: Evidence, *nodes: Node) -> Ground:
    """The ground of the outcome of a VM that is not being evacuated."""
    return judge(evidence, beside(*nodes), None).ground


SCHEDULING = a_vmim(phase="Scheduling")
TARGET = a_pod(name="target", uid="target", node="n2", migration_uid="m1")


@pytest.mark.parametrize(
    ("evidence", "ground"),
    [
        pytest.param(a_vm(), Ground.NO_NODE, id="idle"),
        pytest.param(a_vm(migration=a_running_state()), Ground.MIGRATING, id="copies"),
        pytest.param(a_vm(SCHEDULING), Ground.NO_NODE, id="no-target"),
        pytest.param(a_vm(SCHEDULING, pods=(TARGET,)), Ground.MIGRATING, id="target-has-a-node"),
        pytest.param(
            a_vm(SCHEDULING, pods=(replace(TARGET, migration_uid="m9"),)),
            Ground.TWO_PODS,
            id="another-target",
        ),
        pytest.param(
            a_vm(a_vmim(phase="Scheduled", handed_off=True)), Ground.MIGRATING, id="handed-off"
        ),
    ],
)
def test_a_migration_that_has_a_node_needs_no_other(evidence: Evidence, ground: Ground) -> None:
    """Without an open node a VM fails, unless its migration has its node already."""
    assert ground_of(evidence, CLOSED) is ground
    assert ground_of(a_vm(), Node(name="n2")) is Ground.MIGRATES


def test_only_an_own_target_pod_gives_the_migration_a_node() -> None:
    """The pod of an earlier migration that has ended its life is not where this one goes."""
    earlier = replace(TARGET, migration_uid="m0", phase="Failed")
    assert ground_of(a_vm(SCHEDULING, pods=(earlier,)), CLOSED) is Ground.NO_NODE


def test_the_reason_names_each_other_node() -> None:
    """What the VM's selector excludes and what is cordoned is said of each node."""
    vm = a_vm(placement=Placement(selector=(("zone", "a"),)))
    why = explain_no_node(vm, beside(CLOSED, Node(name="n3")))
    assert (why.source, why.reason) == (WhySource.NODE, "NoOtherNode")
    assert why.message == ("n2 is cordoned, n3 does not have the labels that the VM requires")
    assert explain_no_node(vm, beside(nodes=None)).message == ""


def test_it_is_unknown_whether_a_new_vm_is_migratable() -> None:
    """A VM without the condition LiveMigratable waits for it, unless it is migrating."""
    fields: dict[str, Any] = {"migratable": False, "migratable_unknown": True}
    assert ground_of(a_vm(**fields), Node(name="n2")) is Ground.NO_CONDITION
    moving = a_vm(migration=a_running_state(), **fields)
    assert ground_of(moving, Node(name="n2")) is Ground.MIGRATING


@pytest.mark.parametrize(
    ("own", "ago", "ground"),
    [
        pytest.param(Node(name="n1"), 0.0, Ground.POD_DELETED, id="now"),
        pytest.param(Node(name="n1"), 1800.0, Ground.POD_DELETED, id="just-in-time"),
        pytest.param(Node(name="n1"), 1801.0, Ground.DELETION_HANGS, id="late"),
        pytest.param(
            Node(name="n1", is_ready=False, is_silent=True), 0.0, Ground.MIGRATES, id="silent-node"
        ),
    ],
)
def test_a_pod_that_is_being_deleted_ends(own: Node, ago: float, ground: Ground) -> None:
    """A VM ends with its own pod within `stuck.after`, but a silent node ends no pod."""
    launcher = a_pod(deleted_at=NOW - ago)
    evidence = some_evidence(vmi=a_vmi(migratable=True), launcher=launcher, pods=(launcher,))
    assert ground_of(evidence, own, Node(name="n2")) is ground


@pytest.mark.parametrize(("failures", "ground"), [(2, Ground.MIGRATES), (3, Ground.EVACUATION)])
def test_an_evacuation_that_fails_again_and_again_fails(failures: int, ground: Ground) -> None:
    """From `stuck.failedAttempts` on, an evacuation is forecast to fail."""
    failed = {f"f{number}": NOW - 30.0 * number for number in range(failures)}
    evidence = an_evacuation(age=600.0, marker={"failed": failed})
    conditions = beside(Node(name="n2"))
    diagnosis = conditions.diagnose(evidence)
    assert diagnosis is not None
    outlook = judge(evidence, conditions, diagnosis)
    assert outlook.ground is ground
    assert outlook.diagnosis is diagnosis
