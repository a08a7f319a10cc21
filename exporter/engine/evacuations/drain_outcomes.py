"""What the drain of a node does to one VM.

A drain evicts every launcher pod of the node. How KubeVirt handles an eviction
(`pod-eviction-admitter.go`) depends on the VMI's evictionStrategy: its own, else that of the
KubeVirt object (`spec.configuration.evictionStrategy`), else None. `words.evacuations` says what
each outcome means. The first of these that applies counts: `ends`, `external`, `stays` (not
migratable), `fails`, `stays` (a budget forbids `restarts`), `restarts`, `waits`, `leaves`.
"""

from enum import StrEnum

from exporter.engine.facts.evidence import Evidence
from exporter.engine.facts.model import KubeVirtSettings, Mobility


class DrainOutcome(StrEnum):
    """What happens to a VM if its node is drained; these are the values in JSON and metrics."""

    LEAVES = "leaves"
    WAITS = "waits"
    FAILS = "fails"
    RESTARTS = "restarts"
    STAYS = "stays"
    EXTERNAL = "external"
    ENDS = "ends"


GRAVEST = (
    DrainOutcome.STAYS,
    DrainOutcome.FAILS,
    DrainOutcome.EXTERNAL,
    DrainOutcome.RESTARTS,
    DrainOutcome.WAITS,
    DrainOutcome.ENDS,
    DrainOutcome.LEAVES,
)
"""The outcomes, the worst first."""


MOVED = (DrainOutcome.LEAVES, DrainOutcome.WAITS)
"""The outcomes of VMs that are migrated."""


KEPT = (DrainOutcome.STAYS, DrainOutcome.FAILS)
"""The outcomes of VMs that keep their node from being emptied."""


def measure_mobility(evidence: Evidence) -> Mobility:
    """The mobility of a VMI; a VMI with an unfinished VMIM counts as migrating."""
    mobility = evidence.vmi.mobility
    return mobility if evidence.unfinished() is None else mobility._replace(migrating=True)


def decide_outcome(
    mobility: Mobility,
    settings: KubeVirtSettings | None,
    *,
    waits: bool = False,
    fails: bool = False,
) -> DrainOutcome:
    """The outcome without budgets; `waits`: KubeVirt starts no migration of the VMI now."""
    strategy = mobility.strategy or ("" if settings is None else settings.eviction_strategy)
    match strategy:
        case "External":
            return DrainOutcome.EXTERNAL
        case "LiveMigrate" if not mobility.migratable:
            return DrainOutcome.STAYS
        case _ if fails:
            return DrainOutcome.FAILS
        case "LiveMigrate":
            pass
        case "LiveMigrateIfPossible" if mobility.migratable:
            pass
        case _:
            return DrainOutcome.RESTARTS
    return DrainOutcome.WAITS if mobility.migrating or waits else DrainOutcome.LEAVES
