"""The scenario `week-hand-offs`: where a caller that sees less of KubeVirt decides differently.

Four nodes and twelve VMs, with a KubeVirt that has bug #18087, as before 1.9: if a migration loses
its target after the hand-off and before the copy begins, the VMI shows neither its start nor its
end. The owner of the six busiest VMs moves each of them by hand every four hours, and every second
of these migrations loses its target. The descheduler, which does not ask the exporter, evicts one
of these VMs every five minutes. A node is drained every day at noon. One VM fits on no other node,
so its attempts fail before their hand-off.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from datetime import timedelta

from exporter.demo import objects, webhooks
from exporter.demo.cluster import Cluster
from exporter.demo.controller import Rules
from exporter.demo.objects import Object
from exporter.demo.plan import Fate
from exporter.demo.recorder import ChangeRecorder
from exporter.demo.store import MIGRATIONS
from exporter.demo.week import BEGAN, STEP, WARM_UP, WINDOW


NAMESPACE = "office"
NODES_COUNT = 4
BUSY = tuple(f"busy-{number}" for number in range(1, 7))
IDLE = tuple(f"idle-{number}" for number in range(1, 6))
UNSCHEDULABLE = "unschedulable-1"
COPYING = 60.0
CYCLE = timedelta(minutes=5)
BY_HAND = timedelta(minutes=40)
"""How often one of the six VMs is moved by hand: each of them every four hours."""
DRAINED_AT = timedelta(hours=12)
DRAIN_LASTS = timedelta(hours=1)


class HandOffs:
    """The cluster of a seed, from Monday on. `lines` runs it, and can be called only once."""

    def __init__(self, seed: int = 1, days: float = 7.0) -> None:
        self.days = days
        self._chance = random.Random(f"hand-offs {seed}")
        self.cluster = Cluster(
            BEGAN - WARM_UP,
            self,
            nodes=NODES_COUNT,
            seed=seed,
            window=WINDOW,
            rules=Rules(leaves_zombies=True),
        )
        self._recorder = ChangeRecorder(self.cluster)
        self._cordoned = ""
        self._turns = {"evict": 0, "move": 0, "drain": 0}

    def lines(self) -> Iterator[bytes]:
        """Run the cluster; yields its recording line by line."""
        self._populate()
        self.cluster.step(BEGAN)
        yield from self._recorder.begin()
        self.cluster.every(CYCLE, self._deschedule)
        self.cluster.every(BY_HAND, self._move_by_hand)
        self.cluster.every(timedelta(days=1), self._drain, first=DRAINED_AT)
        now, ends = BEGAN, BEGAN + timedelta(days=self.days)
        while now < ends:
            now = min(now + STEP, ends)
            self.cluster.step(now)
            yield from self._recorder.take()
        yield self._recorder.end()

    def fate(self, vmi: Object, attempt: int) -> Fate:
        """How a VM's migration ends: every second one by hand loses its target."""
        if vmi["metadata"]["name"] == UNSCHEDULABLE:
            return Fate("unschedulable")
        if not objects.evacuated_node(vmi) and attempt % 2:
            return Fate("loses ready target")
        return Fate("succeeds", COPYING)

    def choose_node(self, vmi: Object, free: Sequence[str]) -> str:  # noqa: ARG002
        """Any free node that is not cordoned."""
        return self._chance.choice([host for host in free if host != self._cordoned] or list(free))

    def _populate(self) -> None:
        self.cluster.set_up("kubevirt", NAMESPACE)
        for name in (*BUSY, *IDLE, UNSCHEDULABLE):
            self.cluster.create_vmi(
                objects.build_vmi(NAMESPACE, name, strategy="LiveMigrate", annotations={})
            )

    def _take_turn(self, what: str, names: Sequence[str]) -> str:
        self._turns[what] += 1
        return names[self._turns[what] % len(names)]

    def _deschedule(self) -> None:
        """Evict the next busy VM, and once a day the VM that fits nowhere."""
        name = self._take_turn("evict", BUSY)
        if self._turns["evict"] % 288 == 1:
            name = UNSCHEDULABLE
        self.cluster.evict_vmi(NAMESPACE, name, descheduler=True)

    def _move_by_hand(self) -> None:
        """Migrate the next busy VM, as `virtctl migrate` does, unless it is being moved."""
        vmi = self.cluster.vmi(NAMESPACE, self._take_turn("move", BUSY))
        if vmi is None or objects.evacuated_node(vmi) or objects.is_migrating(vmi):
            return
        migration = webhooks.admit_migration(objects.build_migration(vmi))
        self.cluster.store.create(MIGRATIONS, migration)

    def _drain(self) -> None:
        """Drain the next node, and uncordon it after an hour."""
        host = self._take_turn("drain", self.cluster.nodes)
        self._cordoned = host
        self.cluster.cordon(host)
        for vmi in self._recorder.vmis():
            if vmi["status"].get("nodeName") == host:
                self.cluster.evict_vmi(NAMESPACE, vmi["metadata"]["name"])

        def uncordon() -> None:
            self._cordoned = ""
            self.cluster.uncordon(host)
            for vmi in self._recorder.vmis():
                if objects.evacuated_node(vmi) == host:
                    name = vmi["metadata"]["name"]
                    self.cluster.change_vmi(NAMESPACE, name, webhooks.cancel_evacuation)

        self.cluster.after(DRAIN_LASTS.total_seconds(), uncordon)
