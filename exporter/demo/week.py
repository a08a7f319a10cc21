"""The scenario `week-pilot`: ten nodes, 148 VMs, and a descheduler without the exporter's plugin.

It has the parameters (and none of the data) of descheduler-sim's scenario of that name: nodes of
128 cores and 2.3 TiB, VMs of five sizes, 10 Gbps, five migrations at once and two per node, and a
descheduler every five minutes. VMs are hot on weekdays from 10 to 18 h, especially on Tuesday.
There are spikes of 15 minutes, a batch from 22 to 6 h that fills memory, and 10 % less load at
weekends. People drain two nodes, move VMs by hand, and recreate some. Three times a day they cancel
old evacuations. Three VMs cannot be moved, each for a different reason.

The simulated cluster runs in virtual time, and its changes are written as a recording.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum

from exporter.demo import objects, webhooks
from exporter.demo.cluster import Cluster
from exporter.demo.objects import Object
from exporter.demo.plan import Fate
from exporter.demo.recorder import ChangeRecorder
from exporter.demo.scenario import BROKEN
from exporter.demo.store import MIGRATIONS


BEGAN = datetime(2026, 1, 5, tzinfo=UTC)
"""A Monday, midnight."""
WARM_UP = timedelta(hours=1)
STEP = timedelta(minutes=1)
WINDOW = 1_000
"""How many changes the store keeps: few, because nothing watches this cluster over HTTP."""
NAMESPACE = "pilot"

NODES_COUNT = 10
NODE_CORES = 128.0
NODE_GIB = 2.3 * 1024
LINK_GBPS = 10.0

SIZES = (
    ("large", 56, 8, 80),
    ("app", 61, 8, 64),
    ("web", 3, 8, 32),
    ("svc", 24, 4, 16),
    ("util", 4, 4, 8),
)
"""Name, number of VMs, cores and GiB."""
DIRTY_MBPS = (50.0, 4000.0)

CYCLE = timedelta(minutes=5)
EVICTIONS = 5
EVICTIONS_PER_NODE = 2
ABOVE_MEAN = 0.10
"""A node this far above the mean is over-utilised (`useDeviationThresholds`, high 10)."""

HOT_HOURS = (10, 18)
"""In these hours of weekdays, one hotspot follows another; on Tuesday each is half as long."""
HOT_LASTS = 2
HOT_LASTS_ON_TUESDAY = 1
HOT_NODES = 2
HOT_NODES_ON_TUESDAY = 3
HOT_VMS = 9
"""How many VMs of a node become hot together."""
WEEKEND = 0.9
SPIKE_HOURS = (8, 20)
SPIKE_LASTS = timedelta(minutes=15)
SPIKES_PER_DAY = 3
BATCH_VMS = 12
BATCH_HOURS = (22, 6)

DOWNTIME_SECONDS = 0.3
"""QEMU's default `downtime-limit`: the last round is copied with the VM stopped."""
MOST_ROUNDS = 30
HAND_HOURS = (10.2, 14.2)
HAND_VMS = 8
CANCEL_HOURS = (9, 13, 17)
CANCEL_AFTER = timedelta(hours=2)
"""The age from which people cancel an evacuation."""
DRAIN_LASTS = timedelta(hours=2)
DRAIN_EVERY = timedelta(minutes=1)


class Immovable(StrEnum):
    """Why a VM cannot be moved."""

    FAILING = "failing"
    """Its migration breaks after its start."""
    UNSCHEDULABLE = "unschedulable"
    """No other node has what it needs."""
    EXTERNAL = "external"
    """Strategy External: its owner should react to the mark, and does not."""


@dataclass(frozen=True, slots=True)
class WeekVm:
    """One VM: its size, its mean load as a share of its cores, and its daily pattern."""

    name: str
    cores: float
    gib: float
    load: float
    dirty_mbps: float
    shift: float
    is_batch: bool = False
    immovable: Immovable | None = None


def make_vms(seed: int) -> list[WeekVm]:
    """The 148 VMs of a seed."""
    chance = random.Random(f"week {seed}")
    low, high = (math.log(mbps) for mbps in DIRTY_MBPS)
    vms = []
    kinds = iter(Immovable)
    for size, count, cores, gib in SIZES:
        for number in range(1, count + 1):
            immovable = next(kinds) if size == "web" else None
            vms.append(
                WeekVm(
                    name=f"{immovable or size}-{number if immovable is None else 1}",
                    cores=cores,
                    gib=gib,
                    load=chance.uniform(0.15, 0.45),
                    dirty_mbps=math.exp(chance.uniform(low, high)),
                    shift=chance.uniform(0.0, math.tau),
                    is_batch=size == "large" and number <= BATCH_VMS,
                    immovable=immovable,
                )
            )
    return vms


def copy_seconds(gib: float, dirty_mbps: float, gbps: float) -> float:
    """Seconds of a pre-copy migration: each round sends what the previous one left dirty.

    D is the dirty rate, R the bandwidth and M the memory. Round i sends M (D/R)^i. Rounds 0 to n
    take M/R (1 - (D/R)^(n+1)) / (1 - D/R). The rounds end when the rest fits the downtime (Clark et
    al., "Live Migration of Virtual Machines", NSDI 2005; the closed form: Liu et al., HPDC 2011).
    """
    memory = gib * 2**30 * 8
    rate = gbps * 1e9
    ratio = min(dirty_mbps * 1e6 / rate, 0.95)
    rest = rate * DOWNTIME_SECONDS
    rounds = 0 if memory <= rest else math.ceil(math.log(rest / memory) / math.log(ratio))
    rounds = min(rounds, MOST_ROUNDS)
    return memory / rate * (1 - ratio ** (rounds + 1)) / (1 - ratio)


class Week:
    """The cluster of a seed, from Monday on. `lines` runs it, and can be called only once."""

    def __init__(self, seed: int = 1, days: float = 7.0) -> None:
        self.vms = {vm.name: vm for vm in make_vms(seed)}
        self.days = days
        self.evictions = 0
        """Evictions by the descheduler."""
        self.cluster = Cluster(BEGAN - WARM_UP, self, nodes=NODES_COUNT, seed=seed, window=WINDOW)
        self._seed = seed
        self._chance = random.Random(f"events of week {seed}")
        self._placed: dict[str, str] = {}
        self._hot: dict[str, datetime] = {}
        self._cordoned: set[str] = set()
        self._recorder = ChangeRecorder(self.cluster)

    def lines(self) -> Iterator[bytes]:
        """Run the cluster; yields its recording line by line."""
        self._populate()
        self.cluster.step(BEGAN)
        yield from self._recorder.begin()
        self._plan()
        ends = BEGAN + timedelta(days=self.days)
        now = BEGAN
        while now < ends:
            now = min(now + STEP, ends)
            self.cluster.step(now)
            yield from self._recorder.take()
        yield self._recorder.end()

    # The cluster's plan

    def fate(self, vmi: Object, attempt: int) -> Fate:  # noqa: ARG002 (all attempts are alike)
        """How a VM's migration ends."""
        vm = self.vms[vmi["metadata"]["name"]]
        if vm.immovable is Immovable.UNSCHEDULABLE:
            return Fate("unschedulable")
        sharing = min(1 + self._leaving(objects.evacuated_node(vmi)), EVICTIONS_PER_NODE)
        seconds = copy_seconds(vm.gib, self.dirty_mbps(vm), LINK_GBPS / sharing)
        if vm.immovable is Immovable.FAILING:
            return Fate("fails", seconds / 2, BROKEN)
        return Fate("succeeds", seconds)

    def choose_node(self, vmi: Object, free: Sequence[str]) -> str:
        """The node with the least requested memory (`LeastAllocated`), whatever its load."""
        name = vmi["metadata"]["name"]
        requested = dict.fromkeys(free, 0.0)
        for other, host in self._placed.items():
            if host in requested and other != name:
                requested[host] += self.vms[other].gib
        hosts = [host for host in free if host not in self._cordoned] or list(free)
        chosen = min(hosts, key=lambda host: requested[host] + self._chance.uniform(0.0, 100.0))
        self._placed[name] = chosen
        return chosen

    # Loads

    def load(self, vm: WeekVm, now: datetime) -> float:
        """How many cores a VM uses."""
        share = vm.load * (1 + 0.1 * math.sin(math.tau * _hour(now) / 24 + vm.shift))
        if now.weekday() >= 5:
            share *= WEEKEND
        if self._hot.get(vm.name, now) > now:
            share = 0.9 + 0.1 * math.sin(vm.shift)
        return min(share, 1.0) * vm.cores

    def memory(self, vm: WeekVm, now: datetime) -> float:
        """How many GiB of memory a VM uses."""
        return vm.gib * (0.95 if _runs_batch(vm, now) else 0.55)

    def dirty_mbps(self, vm: WeekVm) -> float:
        """How fast a VM dirties memory: at the highest rate during its batch."""
        return DIRTY_MBPS[1] if _runs_batch(vm, self.cluster.instant) else vm.dirty_mbps

    def node_shares(self, now: datetime) -> dict[str, tuple[float, float]]:
        """The share of its cores and of its memory that each node uses."""
        used = {host: [0.0, 0.0] for host in self.cluster.nodes}
        for name, host in self._placed.items():
            used[host][0] += self.load(self.vms[name], now) / NODE_CORES
            used[host][1] += self.memory(self.vms[name], now) / NODE_GIB
        return {host: (cores, memory) for host, (cores, memory) in used.items()}

    # The descheduler

    def _deschedule(self) -> None:
        """One cycle of LowNodeUtilization, without the exporter's plugin."""
        now = self.cluster.instant
        self._locate()
        shares = self.node_shares(now)
        means = [sum(share[i] for share in shares.values()) / len(shares) for i in (0, 1)]
        if not any(s[0] < means[0] and s[1] < means[1] for s in shares.values()):
            return
        leaving = {host: self._leaving(host) for host in shares}
        left = EVICTIONS - sum(leaving.values())
        for host in sorted(shares, key=lambda name: max(shares[name]), reverse=True):
            above = [shares[host][i] - means[i] for i in (0, 1)]
            budget = min(EVICTIONS_PER_NODE - leaving[host], left)
            if max(above) > ABOVE_MEAN and budget > 0:
                left -= self._relieve(host, above, budget, now)

    def _relieve(self, host: str, above: Sequence[float], budget: int, now: datetime) -> int:
        """Evict the heaviest VMs until the node is below the threshold."""
        by_cores = above[0] >= above[1]
        excess = max(above) - ABOVE_MEAN

        def weight(vm: WeekVm) -> float:
            return self.load(vm, now) / NODE_CORES if by_cores else self.memory(vm, now) / NODE_GIB

        here = [self.vms[name] for name, placed in self._placed.items() if placed == host]
        evicted = 0
        for vm in sorted(here, key=weight, reverse=True):
            if evicted == budget or excess <= 0:
                break
            pod = self.cluster.launcher(NAMESPACE, vm.name)
            if pod is None or objects.EVICTION_IN_PROGRESS in objects.annotations(pod):
                continue
            answer = self.cluster.evict(NAMESPACE, pod["metadata"]["name"], descheduler=True)
            if "Eviction triggered evacuation" in answer.message:
                evicted += 1
                excess -= weight(vm)
        self.evictions += evicted
        return evicted

    def _locate(self) -> None:
        """Note the node of each VM."""
        for name in self.vms:
            vmi = self.cluster.vmi(NAMESPACE, name)
            where = "" if vmi is None else vmi["status"].get("nodeName", "")
            if where:
                self._placed[name] = where

    def _leaving(self, host: str) -> int:
        """Count the VMs that are being evacuated from a node."""
        return sum(objects.evacuated_node(vmi) == host for vmi in self._recorder.vmis())

    # People

    def _populate(self) -> None:
        self.cluster.set_up("kubevirt", "default", NAMESPACE)
        for vm in self.vms.values():
            self._create(vm)

    def _create(self, vm: WeekVm) -> None:
        strategy = "External" if vm.immovable is Immovable.EXTERNAL else "LiveMigrate"
        self.cluster.create_vmi(
            objects.build_vmi(NAMESPACE, vm.name, strategy=strategy, annotations={})
        )

    def _plan(self) -> None:
        """Queue everything that happens."""
        self.cluster.every(CYCLE, self._deschedule)
        for day in range(math.ceil(self.days)):
            midnight = timedelta(days=day)
            weekday = (BEGAN + midnight).weekday()
            # Each day has a generator, so that a shorter scenario is the beginning of a longer one.
            chance = random.Random(f"day {day} of week {self._seed}")
            lasts, nodes = (
                (HOT_LASTS_ON_TUESDAY, HOT_NODES_ON_TUESDAY)
                if weekday == 1
                else (HOT_LASTS, HOT_NODES)
            )
            for hour in range(*HOT_HOURS, lasts) if weekday < 5 else ():
                heat = self._heater(nodes, timedelta(hours=lasts))
                self._at(midnight + timedelta(hours=hour), heat)
            for _ in range(SPIKES_PER_DAY):
                at = timedelta(hours=chance.uniform(*SPIKE_HOURS))
                self._at(midnight + at, self._heater(1, SPIKE_LASTS))
            for by_hand in HAND_HOURS if weekday < 5 else ():
                self._at(midnight + timedelta(hours=by_hand), self._relieve_by_hand)
            for hour in CANCEL_HOURS:
                self._at(midnight + timedelta(hours=hour), self._cancel_stuck)
        self._at(timedelta(days=2, hours=20), lambda: self._drain_node_of(Immovable.UNSCHEDULABLE))
        self._at(timedelta(days=3, hours=3), self._recreate)
        self._at(timedelta(days=5, hours=7), lambda: self._drain_node_of(Immovable.FAILING))

    def _at(self, offset: timedelta, action: Callable[[], None]) -> None:
        if offset < timedelta(days=self.days):
            seconds = (BEGAN + offset - self.cluster.instant).total_seconds()
            self.cluster.after(seconds, action)

    def _heater(self, nodes: int, lasts: timedelta) -> Callable[[], None]:
        """An action that makes some VMs of each of `nodes` nodes hot."""

        def heat() -> None:
            self._locate()
            for host in self._chance.sample(self.cluster.nodes, nodes):
                here = sorted(name for name, placed in self._placed.items() if placed == host)
                for name in self._chance.sample(here, min(HOT_VMS, len(here))):
                    self._hot[name] = self.cluster.instant + lasts

        return heat

    def _relieve_by_hand(self) -> None:
        """Somebody migrates the heaviest VMs of the busiest node, as `virtctl migrate` does.

        KubeVirt lets two VMs leave at once. The others wait, and the descheduler may evict them
        too.
        """
        self._locate()
        now = self.cluster.instant
        shares = self.node_shares(now)
        host = max(shares, key=lambda name: shares[name][0])
        here = [self.vms[name] for name, placed in self._placed.items() if placed == host]
        heaviest = sorted(here, key=lambda vm: self.load(vm, now), reverse=True)
        for vm in heaviest[:HAND_VMS]:
            vmi = self.cluster.vmi(NAMESPACE, vm.name)
            if vmi is None or objects.evacuated_node(vmi) or objects.is_migrating(vmi):
                continue
            migration = webhooks.admit_migration(objects.build_migration(vmi))
            self.cluster.store.create(MIGRATIONS, migration)

    def _cancel_stuck(self) -> None:
        """Somebody cancels old evacuations."""
        for vmi in self._recorder.vmis():
            requested = objects.condition(vmi, "EvictionRequested")
            if requested is None:
                continue
            since = objects.parse_time(requested["lastTransitionTime"])
            if self.cluster.instant - since > CANCEL_AFTER:
                self._cancel(vmi["metadata"]["name"])

    def _cancel(self, name: str) -> None:
        self.cluster.change_vmi(NAMESPACE, name, webhooks.cancel_evacuation)

    def _drain_node_of(self, immovable: Immovable) -> None:
        """Somebody drains the node of this immovable VM, and uncordons it after two hours."""
        self._locate()
        host = next(self._placed[vm.name] for vm in self.vms.values() if vm.immovable is immovable)
        until = self.cluster.instant + DRAIN_LASTS
        self._cordoned.add(host)

        def drain() -> None:
            self._locate()
            here = [name for name, placed in self._placed.items() if placed == host]
            if self.cluster.instant >= until:
                self._cordoned.discard(host)
                for name in here:
                    self._cancel(name)
                return
            for name in here:
                self.cluster.evict_vmi(NAMESPACE, name)
            self.cluster.after(DRAIN_EVERY.total_seconds(), drain)

        drain()

    def _recreate(self) -> None:
        """Somebody recreates the small VMs."""
        for vm in self.vms.values():
            if vm.name.startswith("util"):
                self.cluster.recreate_vmi(NAMESPACE, vm.name, functools.partial(self._create, vm))


def _hour(now: datetime) -> float:
    return now.hour + now.minute / 60


def _runs_batch(vm: WeekVm, now: datetime) -> bool:
    return vm.is_batch and not BATCH_HOURS[1] <= _hour(now) < BATCH_HOURS[0]
