"""Forecasts the drain of a node: what would happen to each VM if the node were drained now.

A drain evicts every launcher pod of the node. What KubeVirt makes of an eviction
(`pod-eviction-admitter.go`) depends on the VMI's evictionStrategy: its own, else that of the
KubeVirt object (`spec.configuration.evictionStrategy`), else None. The first that applies:

- `stays`: LiveMigrate, and not migratable. KubeVirt refuses the eviction for ever.
- `external`: External. Somebody else must move or stop the VM.
- `restarts`: None (or a value that KubeVirt does not know), or LiveMigrateIfPossible and not
  migratable. The pod is evicted and the VM goes down.
- `waits`: a migration of it is in progress, or KubeVirt's migration limits are reached.
- `leaves`: it is migrated.

Nothing here depends on the clock. The counts of all nodes come from totals that the store
updates with each change, so only VMIs with an unfinished VMIM are visited.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from enum import StrEnum

from msgspec import Struct

from exporter.engine.diagnosis import Load
from exporter.engine.evidence import Evidence
from exporter.engine.model import Instant, KubeVirtSettings, MigrationLimits, Mobility, Seconds, Why
from exporter.engine.store import Store


class DrainOutcome(StrEnum):
    """What a drain of its node would do to a VM; the value in JSON and metrics."""

    LEAVES = "leaves"
    WAITS = "waits"
    RESTARTS = "restarts"
    STAYS = "stays"
    EXTERNAL = "external"


GRAVEST = (
    DrainOutcome.STAYS,
    DrainOutcome.EXTERNAL,
    DrainOutcome.RESTARTS,
    DrainOutcome.WAITS,
    DrainOutcome.LEAVES,
)
"""The outcomes, the gravest first."""
MOVED = (DrainOutcome.LEAVES, DrainOutcome.WAITS)
"""The outcomes of VMs that are migrated."""


class DrainCandidate(Struct, frozen=True, kw_only=True):
    """A VMI of the node and its outcome.

    `reasons` are those of `Store.reasons`; `failed_attempts` is a lower bound, as for evacuations.
    `last_duration` is how long its newest successful migration took, None if that is not known.
    """

    evidence: Evidence
    outcome: DrainOutcome
    reasons: tuple[Why, ...]
    failed_attempts: int
    last_duration: Seconds | None


class Forecast(Struct, frozen=True, kw_only=True):
    """The outcomes of draining one node.

    `at_least` is a lower bound of how long the migrations take, None if nothing is known of that.
    """

    node: str
    outcomes: Mapping[DrainOutcome, int]
    at_least: Seconds | None

    @property
    def vmis(self) -> int:
        """How many VMIs are on the node."""
        return sum(self.outcomes.values())

    @property
    def can_be_emptied(self) -> bool:
        """Whether no VM would stay for ever."""
        return not self.outcomes.get(DrainOutcome.STAYS)


def count_outcomes(store: Store) -> dict[str, Counter[DrainOutcome]]:
    """The number of VMIs by node and outcome, sorted by node."""
    load, settings = store.load(), store.kubevirt
    counts: dict[str, Counter[DrainOutcome]] = {node: Counter() for node in sorted(store.nodes)}
    counts.pop("", None)
    full = set() if load is None else {node for node in counts if load.is_full(node)}

    def outcome(node: str, mobility: Mobility) -> DrainOutcome:
        return _find_outcome(mobility, settings, full=node in full)

    for (node, mobility), vmis in store.mobilities.items():
        if node:
            counts[node][outcome(node, mobility)] += vmis
    for evidence in store.waiting():
        node, mobility = evidence.vmi.node, evidence.vmi.mobility
        if node:
            counts[node][outcome(node, mobility)] -= 1
            counts[node][outcome(node, mobility._replace(migrating=True))] += 1
    return counts


def sum_outcomes(counts: Mapping[str, Counter[DrainOutcome]]) -> Counter[DrainOutcome]:
    """The counts of all nodes together."""
    total: Counter[DrainOutcome] = Counter()
    for outcomes in counts.values():
        total.update(outcomes)
    return total


def forecast_nodes(store: Store, durations: Mapping[str, list[Seconds]]) -> list[Forecast]:
    """The forecast of every node with VMIs, sorted by name.

    `durations`: the results of `find_duration`, by node.
    """
    return [
        Forecast(
            node=node, outcomes=outcomes, at_least=_bound(durations.get(node, ()), store.kubevirt)
        )
        for node, outcomes in count_outcomes(store).items()
    ]


def forecast_node(store: Store, node: str) -> tuple[Forecast, list[DrainCandidate]]:
    """The forecast of one node and its VMIs, sorted by namespace and name."""
    load, settings = store.load(), store.kubevirt
    found = sorted(store.on_node(node), key=lambda one: (one.vmi.namespace, one.vmi.name))
    candidates = [
        DrainCandidate(
            evidence=evidence,
            outcome=find_outcome(evidence, settings, load),
            reasons=store.reasons(evidence.vmi),
            failed_attempts=_count_failures(evidence),
            last_duration=evidence.history.last_duration(),
        )
        for evidence in found
    ]
    durations = [find_duration(evidence, settings) for evidence in found]
    forecast = Forecast(
        node=node,
        outcomes=Counter(one.outcome for one in candidates),
        at_least=_bound((one for one in durations if one is not None), settings),
    )
    return forecast, candidates


def find_outcome(
    evidence: Evidence, settings: KubeVirtSettings | None, load: Load | None
) -> DrainOutcome:
    """What a drain of its node would do to a VMI."""
    full = load is not None and load.is_full(evidence.vmi.node)
    return _find_outcome(_measure_mobility(evidence), settings, full=full)


def find_duration(evidence: Evidence, settings: KubeVirtSettings | None) -> Seconds | None:
    """The expected duration of this VMI's migration in a drain: that of its last success.

    None if that is unknown, if the drain does not migrate it, or if it is migrating already (how
    far that has got is unknown).
    """
    mobility = _measure_mobility(evidence)
    if mobility.migrating or _find_outcome(mobility, settings, full=False) not in MOVED:
        return None
    return evidence.history.last_duration()


def _bound(durations: Iterable[Seconds], settings: KubeVirtSettings | None) -> Seconds | None:
    """A lower bound of the time for migrations of these durations; None without any.

    The longest, or the sum divided by KubeVirt's parallel limit if that is more.
    """
    known = tuple(durations)
    if not known:
        return None
    if settings is None:
        return max(known)
    return max(*known, sum(known) / _count_parallel(settings.limits))


def _count_parallel(limits: MigrationLimits) -> int:
    return max(1, min(limits.cluster, limits.outbound_per_node))


def _measure_mobility(evidence: Evidence) -> Mobility:
    mobility = evidence.vmi.mobility
    return mobility if evidence.unfinished() is None else mobility._replace(migrating=True)


def _find_outcome(
    mobility: Mobility, settings: KubeVirtSettings | None, *, full: bool
) -> DrainOutcome:
    strategy = mobility.strategy or ("" if settings is None else settings.eviction_strategy)
    match strategy:
        case "External":
            return DrainOutcome.EXTERNAL
        case "LiveMigrate" if not mobility.migratable:
            return DrainOutcome.STAYS
        case "LiveMigrate":
            pass
        case "LiveMigrateIfPossible" if mobility.migratable:
            pass
        case _:
            return DrainOutcome.RESTARTS
    return DrainOutcome.WAITS if mobility.migrating or full else DrainOutcome.LEAVES


def _count_failures(evidence: Evidence) -> int:
    """The attempts that failed since the evacuation was requested, else since the last success."""
    if evidence.marker is not None:
        return evidence.marker.failed_since_request()
    succeeded: Instant = evidence.history.newest_success() or 0.0
    failed = (v for v in evidence.vmims if v.phase == "Failed" and not v.aborted)
    return sum((vmim.finished_at or vmim.created or 0.0) >= succeeded for vmim in failed)
