"""Which blocked evictions may be counted soon, so that their counters can exist as 0 before.

Prometheus's `increase` does not see the first count of a counter that did not exist before.
"""

from collections import Counter
from collections.abc import Iterable
from typing import TypeAlias

from exporter.engine.facts.evidence import Evidence
from exporter.engine.facts.mappings import add_to_count
from exporter.engine.facts.policy import Reason


BlockLabels: TypeAlias = tuple[Reason, str, str]
"""The reason of a block, and the node and the namespace of the VMI."""

_NOTHING: frozenset[BlockLabels] = frozenset()


def foresee_blocks(evidence: Evidence, reasons: Iterable[Reason]) -> frozenset[BlockLabels]:
    """The blocks of a VMI by its present `reasons`, and those that follow if nobody intervenes.

    A VMI that moves or is to leave its node is blocked by its migration, and then cools down, here
    or on the target's node.
    """
    vmi, state = evidence.vmi, evidence.vmi.migration
    foreseen, nodes = {*reasons}, {vmi.node}
    is_running = state is not None and not state.ended
    if not vmi.finished and (
        is_running or evidence.marker is not None or evidence.unfinished() is not None
    ):
        foreseen |= {Reason.MIGRATION_IN_PROGRESS, Reason.COOLDOWN}
        nodes |= {pod.node for pod in evidence.pods if not pod.finished and pod.node}
        if state is not None and is_running and state.target_node:
            nodes.add(state.target_node)
    if not foreseen:
        return _NOTHING
    labels = {(reason, node, vmi.namespace) for reason in foreseen for node in nodes}
    if evidence.marker is not None:
        labels.add((Reason.EVACUATION_IN_PROGRESS, vmi.node, vmi.namespace))
    return frozenset(labels)


class ForeseenBlocks:
    """The foreseen blocks of all VMIs, each once; those that were foreseen first come first."""

    def __init__(self) -> None:
        self._vmis: Counter[BlockLabels] = Counter()

    def replace(self, before: frozenset[BlockLabels], after: frozenset[BlockLabels]) -> None:
        """Replace the foreseen blocks of one VMI."""
        if before == after:
            return
        self._vmis.update(sorted(after - before))
        for labels in before - after:
            add_to_count(self._vmis, labels, -1)

    def read(self) -> tuple[BlockLabels, ...]:
        """The foreseen blocks of all VMIs."""
        return tuple(self._vmis)
