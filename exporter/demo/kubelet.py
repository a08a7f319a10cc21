"""The scheduler and the kubelets, working on the store; what they write is in `node.py`."""

from __future__ import annotations

from collections.abc import Sequence

from exporter.demo import node, objects
from exporter.demo.actions import Action, ActionQueue
from exporter.demo.client import Client
from exporter.demo.objects import Object
from exporter.demo.plan import Fates, Pace
from exporter.demo.store import NODES, PODS


class Kubelet:
    """Binds, starts and ends the pods of all nodes."""

    def __init__(
        self, client: Client, queue: ActionQueue, fates: Fates, pace: Pace, nodes: Sequence[str]
    ) -> None:
        self._client = client
        self._queue = queue
        self._fates = fates
        self._pace = pace
        self._nodes = nodes
        self._addresses = 0

    def sync(self, pod: Object) -> None:
        """Queue the next step of a pod that has changed."""
        key, pace = objects.key(pod), self._pace
        waiting = objects.phase(pod) == "Pending" and not objects.is_deleting(pod)
        if objects.is_deleting(pod):
            self._after(pace.exit, pod, "gone", lambda: self._remove(key))
        elif waiting and objects.node_of(pod):
            self._after(pace.start_pod, pod, "start", lambda: self._start(key))
        elif waiting and not objects.is_unschedulable(pod):
            self._after(pace.schedule, pod, "bind", lambda: self._bind(key))
        elif node.meets_readiness_gates(pod):
            self._after(pace.ready, pod, "ready", lambda: self._ready(key))

    def exit(self, namespace: str, name: str, phase: str) -> None:
        """Set the final phase of a pod whose launcher exits."""
        pod = self._client.store.find(PODS, namespace, name)
        if pod is not None and not objects.is_final(pod) and not objects.is_deleting(pod):
            self._client.write(PODS, pod, node.finish_pod(pod, phase, self._queue.now))

    def _after(self, seconds: float, pod: Object, step: str, action: Action) -> None:
        self._queue.after(seconds, action, f"{step} {pod['metadata']['uid']}")

    def _bind(self, key: str) -> None:
        pod = self._client.pod(key)
        vmi = None if pod is None else self._client.vmi(objects.owner_key(pod))
        if pod is None or vmi is None or objects.node_of(pod):
            return
        migration_uid = objects.labels(pod).get(objects.MIGRATION_JOB)
        is_refused = (
            migration_uid is not None
            and self._fates.of(vmi, migration_uid).outcome == "unschedulable"
        )
        taken = {
            objects.node_of(other)
            for other in self._client.pods(vmi)
            if not objects.is_final(other)
        }
        free = [host for host in self._nodes if host not in taken and not self._is_cordoned(host)]
        now = self._queue.now
        if is_refused or not free:
            bound = node.leave_unscheduled(pod, len(self._nodes), now)
        else:
            bound = node.bind_pod(pod, self._fates.plan.choose_node(vmi, free), now)
        self._client.write(PODS, pod, bound)

    def _is_cordoned(self, host: str) -> bool:
        node = self._client.store.find(NODES, None, host)
        return node is not None and objects.is_cordoned(node)

    def _start(self, key: str) -> None:
        pod = self._client.pod(key)
        if pod is None or objects.phase(pod) != "Pending" or objects.is_deleting(pod):
            return
        self._addresses = self._addresses % 65_000 + 1
        address = f"10.244.{self._addresses // 250}.{self._addresses % 250 + 1}"
        self._client.write(PODS, pod, node.start_pod(pod, address, self._queue.now))

    def _ready(self, key: str) -> None:
        pod = self._client.pod(key)
        if pod is not None and node.meets_readiness_gates(pod):
            self._client.write(PODS, pod, node.ready_pod(pod, self._queue.now))

    def _remove(self, key: str) -> None:
        if self._client.pod(key) is not None:
            namespace, name = key.split("/")
            self._client.store.delete(PODS, namespace, name, grace=0)
