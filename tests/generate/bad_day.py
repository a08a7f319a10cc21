"""A bad day of a small cluster, with the day before it, for the pictures of the dashboards.

The plugin and the webhook work. A drain is stuck, because one of its VMs fails to migrate, and a
script moves two VMs again and again.
"""

import math
import random
from pathlib import Path

from exporter.demo.plan import Fate
from tests.cluster.servers import ReadyServer
from tests.months.bench import Bench, Setup
from tests.months.cluster import BEGAN, HOUR, World
from tests.months.scenarios import BROKEN


SETUP = Setup(days=2, nodes=6, vms=60, replicas=2)
SHOWN_AT = SETUP.days * 24 * HOUR
NOW = BEGAN.timestamp() + SHOWN_AT - 40
"""The time of the pictures, in seconds since 1970: just after the exporters were scraped."""


class NodeExporters:
    """The node_exporters of all nodes, on one page: more load by day, and one overloaded node."""

    name = "node-exporters"
    offset = 23.0
    up = True

    def __init__(self, world: World) -> None:
        self._world = world
        self._chance = random.Random("load")
        self._seen = world.now
        self._idle = dict.fromkeys(world.nodes, 0.0)
        self._waiting = dict.fromkeys(world.nodes, 0.0)

    async def scrape(self) -> bytes:
        """The body of a scrape."""
        passed, self._seen = self._world.now - self._seen, self._world.now
        daily = 0.2 * math.sin(2 * math.pi * (self._seen / HOUR - 8) / 24)
        lines = []
        for number, node in enumerate(self._world.nodes):
            extra = 0.25 if number == 0 else 0.0
            load = min(0.4 + extra + daily + self._chance.gauss(0, 0.03), 1.0)
            self._idle[node] += passed * (1 - load)
            self._waiting[node] += passed * max(load - 0.6, 0.0)
            waiting = self._waiting[node]
            instance = f'instance="{node}:9100"'
            lines += [
                f'node_uname_info{{{instance},nodename="{node}"}} 1',
                f'node_cpu_seconds_total{{{instance},cpu="0",mode="idle"}} {self._idle[node]}',
                f"node_pressure_cpu_waiting_seconds_total{{{instance}}} {waiting}",
                f"node_pressure_memory_waiting_seconds_total{{{instance}}} {waiting / 8}",
            ]
        return "".join(f"{line}\n" for line in lines).encode()


def record(folder: Path) -> tuple[str, str]:
    """Simulate both days, and keep its samples in this new folder.

    Returns the namespace and the name of the VM that fails.
    """
    bench = Bench(1, SETUP, lost=0.0)
    world = bench.world
    for replica in bench.replicas:
        replica.counts = True
    bench.add(NodeExporters(world), job="node-exporter", namespace="monitoring")
    for hour, node in ((9, 1), (14, 4), (33, 2)):
        world.at(hour * HOUR, lambda node=node: world.drain(world.nodes[node]))  # type: ignore[misc]
    failing, *_ = world.of_size(8)
    for vm in world.of_size(4)[:2]:
        world.at(
            SHOWN_AT - 9 * HOUR,
            lambda vm=vm: world.every(2400.0, lambda: world.migrate(vm)),  # type: ignore[misc]
        )
    world.decide = lambda vm, _: (
        Fate("fails", 20.0, BROKEN) if vm is failing and world.now > SHOWN_AT - 3 * HOUR else None
    )
    world.at(SHOWN_AT - 2 * HOUR, lambda: world.drain(world.node_of(failing)))
    bench.run(keep=folder)
    return failing.namespace, failing.name


def serve_samples(folder: Path) -> ReadyServer:
    """A Prometheus that serves recorded samples; as a context manager it runs during the block."""
    kept = ("--storage.tsdb.retention.time=100y", f"--storage.tsdb.path={folder}")
    return ReadyServer("prometheus", folder.parent, {}, *kept)
