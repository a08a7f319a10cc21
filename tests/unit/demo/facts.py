"""Objects at some point of an evacuation, for tests of the simulated controllers."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from exporter.demo import controller, node, objects, webhooks
from exporter.demo.objects import Object
from exporter.demo.store import NAMESPACES, ObjectStore


NOW = datetime(2026, 8, 22, 10, 0, 0, tzinfo=UTC)
RULES = controller.Rules()


def at(seconds: float) -> datetime:
    """The time this many seconds after the start."""
    return NOW + timedelta(seconds=seconds)


def make_store(**settings: Any) -> ObjectStore:
    """A store with one namespace."""
    store = ObjectStore(lambda: NOW, **settings)
    store.create(NAMESPACES, {"metadata": {"name": "shop"}})
    return store


def given(made: Object, uid: str, *, name: str | None = None, created: float = 0) -> Object:
    """An object as the API server returns it."""
    metadata = made["metadata"] | {
        "uid": uid,
        "creationTimestamp": objects.format_time(at(created)),
    }
    metadata["name"] = name or metadata.get("name") or metadata["generateName"] + uid[:5]
    return made | {"metadata": metadata}


def make_vmi(name: str = "db1", *, strategy: str = "LiveMigrate", on: str = "n1") -> Object:
    """A running VMI."""
    vmi = objects.build_vmi("shop", name, strategy=strategy, annotations={})
    vmi = given(vmi, f"vmi-{name}")
    vmi["status"] |= {"phase": "Scheduled", "nodeName": on}
    vmi["metadata"]["labels"][objects.NODE_NAME] = on
    return node.run_vmi(vmi, NOW)


def make_pod(
    vmi: Object, uid: str = "aaaaa", *, on: str = "n1", migration: Object | None = None
) -> Object:
    """A ready launcher pod."""
    pod = given(objects.build_launcher_pod(vmi, migration), uid)
    pod["status"] = {"phase": "Pending"}
    return node.start_pod(node.bind_pod(pod, on, NOW), "10.0.0.1", NOW)


def evict(vmi: Object, pod: Object, *, descheduler: bool = True) -> Object:
    """The VMI after a request to evict its pod."""
    marked = webhooks.admit_eviction(vmi, pod, descheduler=descheduler).vmi
    assert marked is not None
    return controller.sync_vmi(marked, [pod], NOW)


def make_evacuation(vmi: Object, uid: str = "m1", *, created: float = 0) -> Object:
    """A VMIM of the evacuation controller after its first reconcile."""
    migration = given(objects.build_evacuation(vmi), uid, created=created)
    migration = webhooks.admit_migration(migration)
    view = controller.MigrationView(migration, vmi)
    observed = controller.reconcile_migration(view, at(created), RULES).migration
    assert observed is not None
    return observed


def through(migration: Object, *phases: str, start: float = 0) -> Object:
    """A migration that has gone through these phases, one second each."""
    for second, phase in enumerate(phases):
        migration = controller.set_phase(migration, phase, at(start + second))
    return migration


class Play:
    """One evacuation of one VMI. The test starts each reconcile."""

    def __init__(self, **rules: Any) -> None:
        self.rules = controller.Rules(**rules)
        vmi = make_vmi()
        self.pods = [make_pod(vmi)]
        self.vmi = evict(vmi, self.pods[0])
        self.migration = make_evacuation(self.vmi)
        self.now = NOW

    @property
    def state(self) -> Object:
        """The VMI's `migrationState`."""
        return objects.state_of(self.vmi)

    def reconcile(self, times: int = 1) -> controller.Writes:
        """Reconcile the migration and apply what the controller writes."""
        writes = controller.Writes()
        for _ in range(times):
            self.now += timedelta(seconds=1)
            siblings = [self.migration]
            view = controller.MigrationView(self.migration, self.vmi, self.pods, siblings)
            writes = controller.reconcile_migration(view, self.now, self.rules)
            self.vmi = writes.vmi or self.vmi
            self.migration = writes.migration or self.migration
            if writes.create_pod is not None:
                pod = given(writes.create_pod, "bbbbb", created=1)
                self.pods.append(pod | {"status": {"phase": "Pending"}})
            for gone in writes.delete_pods:
                self.pods.remove(gone)
        return writes

    def lose_target(self) -> None:
        """Make the target pod fail."""
        self.pods[1] = node.finish_pod(self.pods[1], "Failed", self.now)

    def hand_off(self) -> None:
        """Make the target pod ready on another node, and reconcile until the hand-off is done."""
        self.reconcile(3)
        bound = node.bind_pod(self.pods[1], "n2", self.now)
        self.pods[1] = node.start_pod(bound, "10.0.0.2", self.now)
        self.reconcile(2)

    def prepare(self) -> None:
        """Report that the target is ready for the copy."""
        self.vmi = node.prepare_target(self.vmi, "10.1.2.3", {"40001": 0})

    def start(self) -> None:
        """Report that the copy has begun."""
        self.vmi = node.detect_domain(node.start_migration(self.vmi, self.now))

    @property
    def phases(self) -> list[str]:
        """The phases that the VMIM has entered."""
        entries = self.migration["status"]["phaseTransitionTimestamps"]
        return [entry["phase"] for entry in entries]
