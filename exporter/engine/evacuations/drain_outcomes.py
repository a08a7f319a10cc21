"""What the drain of a node does to one VM.

A drain evicts every launcher pod of the node. How KubeVirt handles an eviction
(`pod-eviction-admitter.go`) depends on the VMI's evictionStrategy: its own, else that of the
KubeVirt object (`spec.configuration.evictionStrategy`), else None. `words.evacuations` says what
each outcome means, and why a VM has it (`Ground`). The first of these that applies counts: `ends`
or `stays` (a deletion, which may hang), `external`, `stays` (not migratable), `fails`, `stays` (a
budget forbids `restarts`), `restarts`, `waits`, `fails` (no other node), `leaves`.
"""

from enum import StrEnum

from msgspec.structs import replace

from exporter.engine.facts.evidence import Evidence
from exporter.engine.facts.model import KubeVirtSettings, Mobility, Seconds


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


class Ground(StrEnum):
    """Why a VM has its outcome."""

    MIGRATES = "migrates"
    MIGRATING = "migrating"
    NO_CONDITION = "no_condition"
    LIMITS = "limits"
    TWO_PODS = "two_pods"
    EVACUATION = "evacuation"
    MOVE = "move"
    STATE = "state"
    NO_NODE = "no_node"
    NO_STRATEGY = "no_strategy"
    IF_POSSIBLE = "if_possible"
    NOT_MIGRATABLE = "not_migratable"
    BUDGET = "budget"
    DELETION_HANGS = "deletion_hangs"
    EXTERNAL = "external"
    DELETED = "deleted"
    POD_DELETED = "pod_deleted"


OUTCOMES = {
    Ground.MIGRATES: DrainOutcome.LEAVES,
    Ground.MIGRATING: DrainOutcome.WAITS,
    Ground.NO_CONDITION: DrainOutcome.WAITS,
    Ground.LIMITS: DrainOutcome.WAITS,
    Ground.TWO_PODS: DrainOutcome.WAITS,
    Ground.EVACUATION: DrainOutcome.FAILS,
    Ground.MOVE: DrainOutcome.FAILS,
    Ground.STATE: DrainOutcome.FAILS,
    Ground.NO_NODE: DrainOutcome.FAILS,
    Ground.NO_STRATEGY: DrainOutcome.RESTARTS,
    Ground.IF_POSSIBLE: DrainOutcome.RESTARTS,
    Ground.NOT_MIGRATABLE: DrainOutcome.STAYS,
    Ground.BUDGET: DrainOutcome.STAYS,
    Ground.DELETION_HANGS: DrainOutcome.STAYS,
    Ground.EXTERNAL: DrainOutcome.EXTERNAL,
    Ground.DELETED: DrainOutcome.ENDS,
    Ground.POD_DELETED: DrainOutcome.ENDS,
}
"""The outcome by its ground."""


def measure_mobility(evidence: Evidence) -> Mobility:
    """The mobility of a VMI; a VMI with an unfinished VMIM counts as migrating."""
    mobility = evidence.vmi.mobility
    return mobility if evidence.unfinished() is None else replace(mobility, migrating=True)


def decide_ground(
    mobility: Mobility,
    settings: KubeVirtSettings | None,
    *,
    waits: Ground | None = None,
    fails: Ground | None = None,
    may_leave: bool = True,
    is_moving: bool | None = None,
) -> Ground:
    """The ground of the outcome without budgets.

    `waits`: why KubeVirt starts no migration of the VMI now. `fails`: why none can succeed.
    `may_leave`: some other node may take the VMI. `is_moving`: a migration has a node to go to; by
    default it has if it is under way.
    """
    strategy = mobility.strategy or ("" if settings is None else settings.eviction_strategy)
    is_moved = strategy == "LiveMigrate" or (
        strategy == "LiveMigrateIfPossible" and mobility.migratable
    )
    has_place = may_leave or (mobility.migrating if is_moving is None else is_moving)
    stops = Ground.IF_POSSIBLE if strategy == "LiveMigrateIfPossible" else Ground.NO_STRATEGY
    grounds = (
        (strategy == "External", Ground.EXTERNAL),
        (strategy == "LiveMigrate" and not mobility.migratable, Ground.NOT_MIGRATABLE),
        (fails is not None, fails),
        (not is_moved, stops),
        (waits in (Ground.TWO_PODS, Ground.NO_CONDITION), waits),
        (not has_place, Ground.NO_NODE),
        (mobility.migrating, Ground.MIGRATING),
        (waits is not None, waits),
    )
    return next((ground for applies, ground in grounds if applies and ground), Ground.MIGRATES)


def find_duration(evidence: Evidence, settings: KubeVirtSettings | None) -> Seconds | None:
    """How long this VMI's migration in a drain should take: as long as its last successful one.

    None if no success is known, if the drain does not migrate the VMI, or if the VMI is already
    migrating, because the progress of that migration is unknown.
    """
    mobility = measure_mobility(evidence)
    outcome = OUTCOMES[decide_ground(mobility, settings)]
    if mobility.migrating or outcome not in MOVED or evidence.vmi.deleted_at is not None:
        return None
    return evidence.history.last_duration()
