"""The simulated cluster: KubeVirt's controllers and the nodes work on one store.

This is a discrete-event simulation: each action happens at its own instant, so the result does not
depend on how often `step` is called. The controllers watch the store as informers do, so they react
to the changes that API clients make too.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta

from exporter.demo import objects, webhooks
from exporter.demo.actions import Action, ActionQueue
from exporter.demo.client import Client
from exporter.demo.controller import Rules
from exporter.demo.eviction_requests import EvictionControllers
from exporter.demo.kubelet import Kubelet
from exporter.demo.objects import Object
from exporter.demo.plan import Fates, Pace, Plan
from exporter.demo.status import ApiResource
from exporter.demo.store import (
    KUBEVIRTS,
    MIGRATIONS,
    NAMESPACES,
    NODES,
    PODS,
    VMIS,
    Change,
    ObjectStore,
    decode_body,
)
from exporter.demo.virt_controller import VirtController
from exporter.demo.virt_handler import VirtHandler
from exporter.demo.webhooks import Eviction


REQUESTS_EVERY = timedelta(seconds=0.2)
"""How often the controllers of EvictionRequests look at them."""


class Cluster:
    """A cluster with its store; `step` advances its time."""

    def __init__(
        self,
        start: datetime,
        plan: Plan,
        *,
        nodes: int = 4,
        seed: int = 1,
        rules: Rules | None = None,
        pace: Pace | None = None,
        window: int = 10_000,
    ) -> None:
        self.rules = rules or Rules()
        self.pace = pace or Pace()
        self.nodes = [f"node-{number}" for number in range(1, nodes + 1)]
        self.fates = Fates(plan)
        self._queue = ActionQueue(start, self.pace.speed)
        self.store = ObjectStore(lambda: self.instant, seed, window)
        self._client = Client(self.store)
        self._kubelet = Kubelet(self._client, self._queue, self.fates, self.pace, self.nodes)
        self.skews: dict[str, timedelta] = {}
        """By how much the clock of a node is fast."""
        self._virt_handler = VirtHandler(
            self._client,
            self._queue,
            self.fates,
            self.pace,
            self._kubelet,
            seed=seed,
            skews=self.skews,
        )
        self._virt_controller = VirtController(
            self._client, self._queue, self.fates, self.pace, self.rules
        )
        self._requests = EvictionControllers(self.store, self.evict)
        self._observed = dict.fromkeys((VMIS, MIGRATIONS, PODS), 0)
        """Per resource: the revision up to which its changes have been noticed."""

    # Time

    @property
    def instant(self) -> datetime:
        """The simulated time."""
        return self._queue.now

    def step(self, now: datetime, most: int | None = None) -> bool:
        """Run the actions that are due, at most `most` of them; False if some are left."""
        self._observe()
        done = 0
        while action := self._queue.pop(now):
            action()
            self._observe()
            done += 1
            if done == most:
                return False
        self._queue.advance(now)
        return True

    def after(self, seconds: float, action: Action) -> None:
        """Run an action after `seconds`, divided by the speed."""
        self._queue.after(seconds, action)

    def every(self, interval: timedelta, action: Action, *, first: timedelta | None = None) -> None:
        """Run an action at each interval; the first time after `first`, or after one interval."""

        def again() -> None:
            action()
            self.after(interval.total_seconds(), again)

        self.after((first or interval).total_seconds(), again)

    # Callers: users, operators, the descheduler

    def answer_requests(self, responder: str) -> None:
        """Begin to answer EvictionRequests; new launcher pods get this responder."""
        self._client.responder = responder
        self.every(REQUESTS_EVERY, self._requests.reconcile)

    def set_up(self, *namespaces: str) -> None:
        """Create these namespaces, the nodes and the KubeVirt object."""
        for name in namespaces:
            self.store.create(NAMESPACES, objects.build_namespace(name))
        for name in self.nodes:
            self.store.create(NODES, objects.build_node(name))
        self.store.create(KUBEVIRTS, objects.build_kubevirt())

    def create_vmi(self, vmi: Object) -> Object:
        """Create a VMI, as a user does."""
        created = self.store.create(VMIS, vmi)
        # Read the change at once: the changes of many VMIs would not fit into the store's window.
        self._observe()
        return created

    def delete_vmi(self, namespace: str, name: str) -> None:
        """Delete a VMI, if it exists."""
        if self.vmi(namespace, name) is not None:
            self.store.delete(VMIS, namespace, name)

    def recreate_vmi(self, namespace: str, name: str, create: Action) -> None:
        """Delete a VMI, and create it again once it is gone."""

        def create_once_gone() -> None:
            if self.vmi(namespace, name) is None:
                create()
            else:
                self.after(1.0, create_once_gone)

        self.delete_vmi(namespace, name)
        self.after(1.0, create_once_gone)

    def vmi(self, namespace: str, name: str) -> Object | None:
        """A VMI, if it exists."""
        return self.store.find(VMIS, namespace, name)

    def launcher(self, namespace: str, name: str) -> Object | None:
        """The current pod of a VMI."""
        vmi = self.vmi(namespace, name)
        return None if vmi is None else objects.current_pod(vmi, self._client.pods(vmi))

    def cordon(self, name: str) -> bool:
        """Make a node unschedulable; False if somebody has done that already."""
        node = self.store.get(NODES, None, name)
        if node["spec"].get("unschedulable"):
            return False
        self._client.write(NODES, node, objects.cordon(node, self.instant))
        return True

    def uncordon(self, name: str) -> None:
        """Make a node schedulable again."""
        node = self.store.get(NODES, None, name)
        self._client.write(NODES, node, objects.uncordon(node))

    def evict(self, namespace: str, pod_name: str, *, descheduler: bool = False) -> Eviction:
        """Evict a pod, through the API server and KubeVirt's webhook."""
        pod = self.store.find(PODS, namespace, pod_name)
        if pod is None:
            return Eviction(404, f'pods "{pod_name}" not found')
        vmi = self._client.vmi(objects.owner_key(pod))
        if vmi is None:
            return Eviction(429, "kubevirt failed getting the vmi")
        answer = webhooks.admit_eviction(vmi, pod, descheduler=descheduler)
        if answer.vmi is not None:
            self._client.write(VMIS, vmi, answer.vmi)
        if answer.code == 200:
            self.store.delete(PODS, namespace, pod_name)
        return answer

    def evict_vmi(self, namespace: str, name: str, *, descheduler: bool = False) -> Eviction | None:
        """Evict a VMI's current pod, if it has one."""
        pod = self.launcher(namespace, name)
        if pod is None:
            return None
        return self.evict(namespace, pod["metadata"]["name"], descheduler=descheduler)

    def change_vmi(self, namespace: str, name: str, change: Callable[[Object], Object]) -> None:
        """Change a VMI directly, without a controller."""
        vmi = self.vmi(namespace, name)
        if vmi is not None:
            self._client.write(VMIS, vmi, change(vmi))

    def stop_controller(self) -> None:
        """Stop virt-controller: no object of KubeVirt is reconciled."""
        self._virt_controller.stop_reconciling()

    def start_controller(self) -> None:
        """Start virt-controller again."""
        self._virt_controller.start_reconciling()

    # Informers

    def _observe(self) -> None:
        for resource in self._observed:
            changes = self.store.caches[resource].changes_since(self._observed[resource])
            if changes is None:
                raise RuntimeError(f"{resource.plural}: changes were dropped before they were read")
            for change in changes:
                self._observed[resource] = change.revision
                self._notice(resource, change)

    def _notice(self, resource: ApiResource, change: Change) -> None:
        seen = decode_body(change.body)
        is_gone = change.kind == "DELETED"
        owner = change.key if resource is VMIS else objects.owner_key(seen)
        if resource is VMIS:
            if is_gone:
                self._virt_handler.forget(seen)
            else:
                self._virt_handler.sync(seen)
        else:
            self._client.record(resource, owner, change.key, is_gone=is_gone)
            if resource is MIGRATIONS:
                self._virt_controller.record_migration(change.key, seen, is_gone=is_gone)
            elif not is_gone:
                self._kubelet.sync(seen)
        self._virt_controller.enqueue(owner, is_gone=resource is VMIS and is_gone)
