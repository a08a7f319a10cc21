"""A load-aware descheduler, as its metrics and the cluster see it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

from tests.months.cluster import HOUR, Vm, World
from tests.months.replica import Replica


CYCLE = 300.0
LARGEST_GIB = 128
OUTCOMES = (
    "allowed",
    "cooldown",
    "migration_in_progress",
    "evacuation_in_progress",
    "unavailable",
    "stale",
    "unknown",
    "unnamed",
)


class Descheduler:
    """Every five minutes it may evict some busy VMs of one node, `per_hour` on average.

    It asks `plugin` about all VMs and again before each eviction, and the API server asks
    `webhook`. Without the feature gate EvictionsInBackground (`gate`) it counts each eviction of a
    VM as an error and does not know how many are in progress.
    """

    name = "descheduler-0"
    offset = 11.0
    up = True

    def __init__(
        self,
        world: World,
        per_hour: float,
        *,
        plugin: Replica | None = None,
        webhook: Callable[[Vm], bool] | None = None,
    ) -> None:
        self.per_hour = per_hour
        self.most = 5
        self.gate = True
        self.webhook = webhook
        self._world = world
        self._plugin = plugin
        self._loops = 0
        self._evicted = Counter[str]()
        self._verdicts = dict.fromkeys(OUTCOMES, 0)
        self._answered = world.now
        self._busy = {vm.key: world.chance.paretovariate(1.2) for vm in world.vms.values()}
        world.every(CYCLE, self._cycle)

    def _cycle(self) -> None:
        world, chance = self._world, self._world.chance
        self._loops += 1
        self._filter(len(world.vms))
        wanted = min(_poisson(chance.random(), self.per_hour * CYCLE / HOUR), self.most)
        if self.gate:
            leaving = sum(world.is_leaving(vm, by_descheduler=True) for vm in world.vms.values())
            wanted -= leaving
        free = [node for node in world.nodes if node not in world.cordoned]
        if wanted <= 0 or not free:
            return
        here = [vm for vm in world.on(chance.choice(free)) if vm.gib <= LARGEST_GIB]
        for vm in sorted(here, key=lambda vm: -self._busy.get(vm.key, 1.0) * chance.random()):
            if wanted > 0 and not (self.gate and world.is_leaving(vm)):
                wanted -= self.evict(vm)

    def restart(self, *, gate: bool) -> None:
        """Restart it with the feature gate or without; its counters begin anew."""
        self.gate, self._loops = gate, 0
        self._evicted.clear()
        self._verdicts = dict.fromkeys(OUTCOMES, 0)

    def _filter(self, vms: int) -> None:
        """Ask the plugin about all VMs, as each run does before it evicts any."""
        if self._plugin is not None:
            self._verdicts["allowed" if self._plugin.up else "unavailable"] += vms

    def evict(self, vm: Vm) -> bool:
        """Evict a VM if the plugin and the webhook allow it."""
        plugin = self._plugin
        if plugin is not None:
            if not plugin.up:
                self._verdicts["unavailable"] += 1
            elif plugin.allows(vm.namespace, vm.name):
                self._verdicts["allowed"] += 1
            else:
                self._verdicts["cooldown"] += 1
                return False
        if self.webhook is not None and not self.webhook(vm):
            self._evicted["error"] += 1
            return False
        message = self._world.evict(vm, descheduler=True)
        is_marked = message.startswith("Eviction triggered")
        if is_marked or not self.gate:
            self._evicted["background" if self.gate else "error"] += 1
        return is_marked

    async def scrape(self) -> bytes:
        """The body of a scrape; a counter without events has no series."""
        lines = [f"descheduler_loop_duration_seconds_count {self._loops}"]
        lines += [
            f'descheduler_pods_evicted_total{{result="{result}",strategy="LowNodeUtilization"}} {n}'
            for result, n in self._evicted.items()
        ]
        if self._plugin is not None:
            if self._plugin.up:
                self._answered = self._world.cluster.instant.timestamp() - 3
            lines.append(f"descheduler_kubevirt_snapshot_timestamp_seconds {self._answered}")
            name = 'descheduler_kubevirt_verdicts_total{checkpoint="preEviction",outcome='
            lines += [f'{name}"{outcome}"}} {n}' for outcome, n in self._verdicts.items()]
        return "".join(f"{line}\n" for line in lines).encode()


def _poisson(chance: float, mean: float) -> int:
    """How many events happen if `mean` are expected."""
    number, share = 0, math.exp(-mean)
    total = share
    while chance > total and number < 1000:
        number += 1
        share *= mean / number
        total += share
    return number
