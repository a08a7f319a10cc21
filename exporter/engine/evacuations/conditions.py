"""What decides the diagnoses and the drain outcomes of VMIs, apart from their own evidence."""

from msgspec import Struct

from exporter.engine.evacuations.diagnosis import Diagnosis, Move, diagnose, diagnose_move
from exporter.engine.facts.evidence import Evidence
from exporter.engine.facts.model import DRAIN_TAINT, Instant, KubeVirtSettings, Resource
from exporter.engine.facts.names import KUBEVIRT, KubeVirtNames
from exporter.engine.facts.placement import Placement
from exporter.engine.facts.policy import StuckPolicy
from exporter.engine.facts.trust import Trust
from exporter.engine.store.budgets import Budgets
from exporter.engine.store.load import Load
from exporter.engine.store.nodes import NodeIndex
from exporter.engine.store.store import Store


class Conditions(Struct, frozen=True, kw_only=True):
    """Everything that decides the outcomes of VMIs, apart from their own evidence.

    `nodes` is None if nodes cannot be read. `budgets` is None if it is unknown what budgets allow.
    `names`: under which names the cluster serves KubeVirt.
    """

    kubevirt: KubeVirtSettings | None
    load: Load | None
    stuck: StuckPolicy
    trust: Trust
    now: Instant
    nodes: NodeIndex | None = None
    budgets: Budgets | None = None
    names: KubeVirtNames = KUBEVIRT

    def diagnose(self, evidence: Evidence) -> Diagnosis | None:
        """The diagnosis of a VMI, or None if it is not evacuating."""
        if evidence.marker is None:
            return None
        return diagnose(
            evidence,
            self.stuck,
            self.load,
            self.now,
            contacts=self.trust.contacts_of(evidence.vmi.namespace),
            nodes=self.nodes,
            drain_taint=self.drain_taint,
        )

    def diagnose_move(self, evidence: Evidence) -> Move | None:
        """The move of a VMI that is not evacuating, or None if it is not being moved."""
        if evidence.marker is not None or all(v.phase == "Succeeded" for v in evidence.vmims):
            return None
        return diagnose_move(
            evidence,
            self.stuck,
            self.load,
            self.now,
            contacts=self.trust.contacts_of(evidence.vmi.namespace),
            nodes=self.nodes,
        )

    @property
    def drain_taint(self) -> str:
        """The key of the taint that makes KubeVirt evacuate a node."""
        return DRAIN_TAINT if self.kubevirt is None else self.kubevirt.drain_taint

    def find_budget(self, evidence: Evidence) -> str:
        """The budget that forbids the eviction of a VMI's pod; "" if none is known."""
        return "" if self.budgets is None else self.budgets.find(evidence.launcher)

    def may_leave(self, node: str, placement: Placement) -> bool:
        """Whether some other node may take a VMI of this node, as far as nodes are known."""
        return self.nodes is None or self.nodes.may_leave(node, placement)

    def is_full(self, node: str) -> bool:
        """Whether KubeVirt is known to start no migration out of this node now."""
        if self.load is None or not self.load.is_full(node):
            return False
        return self.trust.believes(Resource.VMIMS, Resource.PODS)


def read_conditions(store: Store, stuck: StuckPolicy, trust: Trust, now: Instant) -> Conditions:
    """The conditions at `now`."""
    return Conditions(
        kubevirt=store.kubevirt,
        load=store.load(trust),
        stuck=stuck,
        trust=trust,
        now=now,
        nodes=store.node_index if trust.believes(Resource.NODES) else None,
        budgets=store.budgets if trust.believes(Resource.BUDGETS) else None,
        names=store.names,
    )
