"""How many migrations run, and KubeVirt's limits on them."""

from collections.abc import Mapping
from typing import NamedTuple

from msgspec import Struct

from exporter.engine.facts.model import Instant, MigrationLimits


RUNNING_PHASES = frozenset({"Scheduling", "Scheduled", "PreparingTarget", "TargetReady", "Running"})
"""The phases that KubeVirt counts towards its limits (`findRunningMigrations`)."""


class Limit(NamedTuple):
    """A limit that is reached: who uses it, and the name of KubeVirt's setting."""

    text: str
    setting: str


class Load(Struct, frozen=True):
    """The running migrations in the cluster and out of each node, and their limits.

    A migration whose VMI has changed its node counts for both nodes, as in KubeVirt, even if it is
    the VMI's next migration. So there may be more than the limit, and texts say only the limit,
    because "3 of 2" looks like an error. The load is known only if all VMIMs, all launcher pods and
    the KubeVirt object are visible. `departures`: when the newest successful migration out of each
    node ended. `newest_success`: when the newest one in the cluster ended. `movers`: the VMIs of
    the running migrations out of each node, as namespace/name, those that are still on it first.
    """

    running: int
    outbound: Mapping[str, int]
    limits: MigrationLimits
    departures: Mapping[str, Instant] = {}
    newest_success: Instant | None = None
    movers: Mapping[str, tuple[str, ...]] = {}

    def is_full(self, node: str) -> bool:
        """Whether KubeVirt would start no migration out of this node now."""
        return (
            self.running >= self.limits.cluster
            or self.outbound.get(node, 0) >= self.limits.outbound_per_node
        )

    def find_limit(self, node: str) -> Limit | None:
        """The limit that keeps KubeVirt from starting a migration out of this node, or None."""
        limits, outbound = self.limits, self.outbound.get(node, 0)
        if outbound >= limits.outbound_per_node:
            most = limits.outbound_per_node
            movers = ", ".join(self.movers.get(node, ())[:most])
            by = f" by {movers}" if movers else ""
            text = f"{node}'s limit of outbound migrations ({most}) is reached{by}"
            return Limit(text, "parallelOutboundMigrationsPerNode")
        if self.running >= limits.cluster:
            text = f"the cluster's limit of migrations ({limits.cluster}) is reached"
            return Limit(text, "parallelMigrationsPerCluster")
        return None

    def find_last_departure(self, node: str) -> Instant | None:
        """When a success last allowed another migration out of this node; None if unknown."""
        cluster_full = self.running >= self.limits.cluster
        return self.newest_success if cluster_full else self.departures.get(node)
