"""A simulated cluster with a few VMs, and every version of its objects."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta

from exporter.demo import objects
from exporter.demo.cluster import Cluster
from exporter.demo.controller import Rules
from exporter.demo.objects import Object
from exporter.demo.plan import Fate, Pace
from exporter.demo.status import ApiResource
from exporter.demo.store import EVICTION_REQUESTS, MIGRATIONS, NAMESPACES, VMIS, decode_body

from .facts import NOW


class Plan:
    """A plan in which all migrations have the same fate and go to the first free node."""

    def __init__(self, fate: Fate) -> None:
        self.given = fate

    def fate(self, vmi: Object, attempt: int) -> Fate:  # noqa: ARG002
        """The given fate."""
        return self.given

    def choose_node(self, vmi: Object, free: Sequence[str]) -> str:  # noqa: ARG002
        """The first free node."""
        return free[0]


def sent(cluster: Cluster, *resources: ApiResource) -> list[Object]:
    """The object of every stored change of these resources."""
    caches = [cluster.store.caches[resource] for resource in resources]
    return [decode_body(change.body) for cache in caches for change in cache.changes]


def ask(cluster: Cluster, name: str, requester: str) -> str:
    """Create this requester's EvictionRequest for the pod of a VM; returns its name."""
    pod = cluster.launcher("shop", name)
    assert pod is not None
    target = {"name": pod["metadata"]["name"], "uid": pod["metadata"]["uid"]}
    made = {
        "metadata": {"namespace": "shop", "name": f"{name}-{requester.partition('/')[2]}"},
        "spec": {"requester": requester, "intent": "Eviction", "target": {"pod": target}},
    }
    request = cluster.store.create(EVICTION_REQUESTS, made)
    return str(request["metadata"]["name"])


def withdraw(cluster: Cluster, request: str) -> None:
    """Withdraw an EvictionRequest."""
    cluster.store.patch(EVICTION_REQUESTS, "shop", request, {"spec": {"intent": "Withdrawn"}})


class Lab:
    """A cluster with running VMs, and all changes in its store."""

    def __init__(
        self,
        *names: str,
        strategy: str = "LiveMigrate",
        rules: Rules | None = None,
        fate: Fate | None = None,
        pace: Pace | None = None,
    ) -> None:
        plan = Plan(fate or Fate())
        self.cluster = Cluster(NOW, plan, rules=rules, pace=pace)
        self.store = self.cluster.store
        self.store.create(NAMESPACES, objects.build_namespace("shop"))
        for name in names:
            self.create(name, strategy)
        self.run(5)

    def create(self, name: str, strategy: str = "LiveMigrate") -> None:
        """Create a VM."""
        self.cluster.create_vmi(objects.build_vmi("shop", name, strategy=strategy, annotations={}))

    def run(self, seconds: float) -> None:
        """Advance the time."""
        self.cluster.step(self.cluster.instant + timedelta(seconds=seconds))

    def until(self, holds: Callable[[], object], within: float = 1000) -> None:
        """Advance the time until `holds()` is true."""
        for _ in range(int(within * 10)):
            if holds():
                return
            self.run(0.1)
        raise AssertionError("it never came to pass")

    def vmi(self, name: str = "db1") -> Object:
        """One VMI."""
        return self.store.get(VMIS, "shop", name)

    def state(self, name: str = "db1") -> Object:
        """The VMI's `migrationState`."""
        return objects.state_of(self.vmi(name))

    def migrations(self, name: str = "db1") -> list[Object]:
        """The VM's migrations, the newest first."""
        migrations = [
            migration
            for migration in self.store.objects(MIGRATIONS)
            if migration["spec"]["vmiName"] == name
        ]
        return objects.newest_first(migrations)

    def phases(self, name: str = "db1") -> list[str]:
        """The phases of the VM's migrations."""
        return [objects.phase(migration) for migration in self.migrations(name)]

    def sent(self, *resources: ApiResource) -> list[Object]:
        """The object of every stored change of these resources."""
        return sent(self.cluster, *resources)
