"""The access of the simulated controllers to objects, with an index of the objects by VMI."""

from __future__ import annotations

from collections.abc import Sequence

from exporter.demo import objects
from exporter.demo.objects import Object
from exporter.demo.status import ApiResource
from exporter.demo.store import MIGRATIONS, PODS, VMIS, ObjectStore


class Client:
    """Reads and writes the store as a controller does; `record` keeps its index up to date."""

    def __init__(self, store: ObjectStore) -> None:
        self.store = store
        self.responder = ""
        """The responder to EvictionRequests that a MutatingAdmissionPolicy adds to new pods."""
        # Dictionaries, not sets: their order is the same in every process.
        self._keys: dict[ApiResource, dict[str, dict[str, None]]] = {MIGRATIONS: {}, PODS: {}}
        """For each resource, and for each VMI's key: the keys of its objects."""

    def record(self, resource: ApiResource, owner: str, key: str, *, is_gone: bool) -> None:
        """Add a migration or pod to its VMI's index, or remove it."""
        index = self._keys[resource]
        if not is_gone:
            index.setdefault(owner, {})[key] = None
            return
        index.get(owner, {}).pop(key, None)
        if not index.get(owner):
            index.pop(owner, None)

    def vmi(self, key: str) -> Object | None:
        """A VMI, if it exists."""
        return self.store.find(VMIS, *key.split("/"))

    def migration(self, key: str) -> Object | None:
        """A migration, if it exists."""
        return self.store.find(MIGRATIONS, *key.split("/"))

    def pod(self, key: str) -> Object | None:
        """A pod, if it exists."""
        return self.store.find(PODS, *key.split("/"))

    def migration_keys(self, owner: str) -> Sequence[str]:
        """The keys of a VMI's migrations."""
        return tuple(self._keys[MIGRATIONS].get(owner, {}))

    def migrations(self, owner: str) -> list[Object]:
        """The migrations that name this VMI."""
        migrations = map(self.migration, self.migration_keys(owner))
        return [migration for migration in migrations if migration is not None]

    def pods(self, vmi: Object) -> list[Object]:
        """The pods of a VMI, without those of an earlier VMI with the same name."""
        keys = self._keys[PODS].get(objects.key(vmi), {})
        present = map(self.pod, keys)
        uid = vmi["metadata"]["uid"]
        return [pod for pod in present if pod and objects.labels(pod)[objects.CREATED_BY] == uid]

    def create_pod(self, pod: Object) -> None:
        """Create a launcher pod."""
        if self.responder:
            entry = {"name": self.responder, "priority": 20_000}
            pod = objects.changed(pod, lambda body: body["spec"].update(evictionResponders=[entry]))
        self.store.create(PODS, pod)

    def delete(self, resource: ApiResource, obj: Object) -> None:
        """Delete an object."""
        self.store.delete(resource, obj["metadata"]["namespace"], obj["metadata"]["name"])

    def write(self, resource: ApiResource, before: Object, after: Object) -> None:
        """Write what has changed: first a status subresource, in its own request, like KubeVirt."""
        after = objects.changed(after, lambda obj: obj["metadata"].pop("resourceVersion", None))
        if resource.status and after.get("status") != before.get("status"):
            self.store.update(resource, after, subresource=True)
        rest = {field: value for field, value in after.items() if field != "status"}
        was = {field: value for field, value in before.items() if field != "status"}
        was["metadata"] = {**was["metadata"]}
        was["metadata"].pop("resourceVersion", None)
        if rest != was or not resource.status:
            self.store.update(resource, after)
