"""VMs of a simulated cluster that are created, evacuated, moved and deleted at a steady rate."""

import asyncio
import random
import time
from collections import deque
from collections.abc import Iterator

from exporter.demo.store import MIGRATIONS, NODES, PODS, VMIS, ObjectStore
from tests.cluster import launcher_pod, vmi, vmim
from tests.cluster.objects import Object
from tests.support.builders import rfc3339
from tests.support.lives import ended_state, transitions


NAMESPACES = tuple(f"ns{number}" for number in range(10))
MACHINES = tuple(f"n{number}" for number in range(20))
TICK = 0.05
FAILING = 0.2
"""The share of migrations that fail."""
CORDONED = 0.05
"""The share of moves before which a node is cordoned or uncordoned."""


class Churn:
    """VMs with names from `names`, of which at most `alive` exist at a time.

    When a VM is deleted, a VM with the next name is created; after the last name the first one
    comes again. `lives` is how many VMs have been created.
    """

    def __init__(self, store: ObjectStore, names: int, alive: int, rng: random.Random) -> None:
        self._store = store
        self._names = names
        self._alive = alive
        self._rng = rng
        self._living: deque[Iterator[None]] = deque()
        self.lives = 0
        for name in MACHINES:
            node = {"metadata": {"name": name}, "spec": {}}
            store.create(NODES, node)

    async def run(self, rate: float, seconds: float) -> None:
        """Write `rate` events a second, for this many seconds."""
        loop = asyncio.get_running_loop()
        began, written = loop.time(), self._store.revision
        while (passed := loop.time() - began) < seconds:
            while self._store.revision - written < passed * rate:
                self._step()
            await asyncio.sleep(TICK)

    async def clear(self) -> None:
        """Delete every VM, and uncordon every node."""
        self._living.clear()
        for resource in (MIGRATIONS, VMIS, PODS):
            for number, key in enumerate([*self._store.caches[resource].entries]):
                namespace, _, name = key.partition("/")
                self._store.delete(resource, namespace, name, 0)
                if number % 100 == 0:
                    await asyncio.sleep(0)
        for name in MACHINES:
            self._store.patch(NODES, None, name, {"spec": {"unschedulable": None}})

    def _step(self) -> None:
        """Write the next event of the VM that has waited longest."""
        if len(self._living) < self._alive:
            life = self._live(self.lives % self._names)
            self.lives += 1
        else:
            life = self._living.popleft()
        if next(life, life) is not life:
            self._living.append(life)

    def _live(self, number: int) -> Iterator[None]:
        """The life of one VM; it yields after each event but the last."""
        store, rng = self._store, self._rng
        name, namespace = f"vm{number}", NAMESPACES[number % len(NAMESPACES)]
        made = store.create(VMIS, vmi(name, namespace, node=rng.choice(MACHINES)))
        yield
        pod = self._create_pod(made)
        yield
        for move in range(rng.choice((1, 1, 2))):
            if rng.random() < CORDONED:
                self._cordon(rng.choice(MACHINES))
                yield
            evacuates = move == 0 and rng.random() < 0.7
            node = made["status"]["nodeName"]
            if evacuates:
                requested = {"type": "EvictionRequested", "status": "True"}
                requested["lastTransitionTime"] = rfc3339(time.time())
                conditions = [*made["status"]["conditions"], requested]
                change = {"evacuationNodeName": node, "conditions": conditions}
                store.patch(VMIS, namespace, name, {"status": change})
                yield
            began = int(time.time())
            migration = store.create(
                MIGRATIONS,
                vmim(f"{name}-m{move}", namespace, of=name, evacuates=node if evacuates else None),
            )
            yield
            target = rng.choice(MACHINES)
            new = self._create_pod(made, target, migration)
            yield
            self._enter(migration, "Scheduled")
            yield
            uid = migration["metadata"]["uid"]
            state = {"migrationUid": uid, "sourceNode": node, "targetNode": target}
            running = state | {"startTimestamp": rfc3339(began)}
            store.patch(VMIS, namespace, name, {"status": {"migrationState": running}})
            yield
            self._enter(migration, "Running")
            yield
            failed = rng.random() < FAILING
            ended = running | ended_state(uid, began, time.time()) | {"failed": failed}
            made = store.get(VMIS, namespace, name)
            status: Object = {"migrationState": ended}
            if not failed:
                kept = [c for c in made["status"]["conditions"] if c["type"] != "EvictionRequested"]
                status |= {"nodeName": target, "evacuationNodeName": None, "conditions": kept}
            made = store.patch(VMIS, namespace, name, {"status": status})
            yield
            self._enter(migration, "Failed" if failed else "Succeeded")
            yield
            pod, old = (pod, new) if failed else (new, pod)
            store.delete(PODS, namespace, old, 0)
            yield
        for move in range(2):
            if store.find(MIGRATIONS, namespace, f"{name}-m{move}") is not None:
                store.delete(MIGRATIONS, namespace, f"{name}-m{move}", 0)
                yield
        store.delete(PODS, namespace, pod, 0)
        yield
        store.delete(VMIS, namespace, name, 0)

    def _create_pod(
        self, made: Object, node: str | None = None, migration: Object | None = None
    ) -> str:
        """Create a launcher pod that runs; returns its name."""
        body = launcher_pod(made, node=node, migration=migration)
        pod: str = self._store.create(PODS, body)["metadata"]["name"]
        namespace = made["metadata"]["namespace"]
        self._store.patch(PODS, namespace, pod, {"status": body["status"]}, subresource=True)
        return pod

    def _enter(self, migration: Object, phase: str) -> None:
        namespace, name = migration["metadata"]["namespace"], migration["metadata"]["name"]
        before = self._store.get(MIGRATIONS, namespace, name).get("status", {})
        times = transitions(before.get("phaseTransitionTimestamps", []), phase, time.time())
        change = {"status": {"phase": phase, **times}}
        self._store.patch(MIGRATIONS, namespace, name, change, subresource=True)

    def _cordon(self, node: str) -> None:
        """Cordon a node, or undo this."""
        spec = self._store.get(NODES, None, node)["spec"]
        change = {"unschedulable": None if spec.get("unschedulable") else True}
        self._store.patch(NODES, None, node, {"spec": change})
