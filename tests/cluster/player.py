"""The simulated parts that need nodes: scheduler, kubelets and virt-handlers.

The pure functions of `exporter.demo.node` decide what each of them writes, as in the simulated
cluster. Here the writes go to a real API server, each with its component's own account:
`system:kube-scheduler`, `system:node:NAME`, and KubeVirt's service account `kubevirt-handler` with
a token bound to the node. So RBAC and KubeVirt's webhooks check these writes.

Inside `async with`, a `Player` does by itself what the nodes have to do, as planned for each VMI.
Some outcomes (`hangs`, `never bound`) leave out steps. A test can call the methods for these steps.
"""

import asyncio
import itertools
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal, Self

import aiohttp

from exporter.demo import node as rules
from exporter.demo import objects
from exporter.demo.objects import Object

from .access import binding
from .client import ApiError, Client
from .kubevirt import NAMESPACE, KubeVirtCluster
from .resources import CLUSTER_ROLE_BINDINGS, NODES, PODS, VMIS, Resource


Outcome = Literal[
    "succeeds",
    "fails",  # libvirt fails the migration after its start
    "hangs",  # the migration starts and never ends
    "keeps source",  # the migration succeeds, but its source pod never ends
    "unschedulable",  # no node takes the target pod
    "never bound",  # the scheduler ignores the target pod
    "never ready",  # the target pod is bound, but does not start
    "crashes",  # the target pod fails before it is ready
    "loses target",  # the target pod fails after the hand-off
    "loses ready target",  # the target pod fails after its ports are published
]


_Act = Callable[[Object], Awaitable[object]]
Choice = Callable[[Object, Sequence[str]], str | None]
"""Chooses one of the nodes that may take a pod; None if the pod must wait."""


@dataclass(frozen=True, slots=True)
class Fate:
    """How one migration proceeds and ends."""

    outcome: Outcome = "succeeds"
    seconds: float = 1.2
    """Seconds until the migration has copied the VM, fails, or loses its target.

    The minimum is one second. KubeVirt orders migrations by the second of their creation, so a
    failure and the next attempt within one second would have no backoff.
    """
    reason: str = (
        "virError(Code=9, Domain=10, Message='operation failed: migration failed. Message from the "
        "source host: operation failed: job 'migration out' failed: Unable to write to socket: "
        "Connection reset by peer')"
    )
    """The message of a real libvirt when the target's QEMU was killed."""


@dataclass(frozen=True, slots=True)
class _Step:
    """A step that is due some seconds after an object first needed it."""

    name: str
    after: float
    act: _Act


class Player:
    """Simulates the nodes of a `KubeVirtCluster`, and everything that runs on them.

    Enter it after the cluster, and exit it before the cluster. `plan` sets the fates of a VMI's
    migrations, and `place` sets the node on which the VMI starts. A VMI without a plan starts on
    the first node that is free for it, and each of its migrations succeeds.
    """

    def __init__(
        self,
        cluster: KubeVirtCluster,
        nodes: Sequence[str] = ("node-1", "node-2", "node-3"),
        *,
        pace: float = 0.1,
        leaves_after: float = 9.0,
        heartbeat: float = 60.0,
        allocatable: Mapping[str, str] | None = None,
        choose: Choice | None = None,
    ) -> None:
        self.cluster = cluster
        self.nodes = list(nodes)
        self.allocatable = dict(allocatable or {})
        """The allocatable resources of each node; by default the nodes have none."""
        self.choose = choose or _choose_first
        """Chooses among the nodes that are free for a pod; the node set by `place` comes first."""
        self.pace = pace
        """Seconds that a small step takes: binding, starting, preparing."""
        self.leaves_after = leaves_after
        """
        Seconds from the end of a migration to the end of the launcher pod that is not used any
        more, 8 to 11 on real nodes. Until then KubeVirt creates no further VMIM.
        """
        self.heartbeat = heartbeat
        """Seconds between a virt-handler's heartbeats on its node, 60 to 132 in a real cluster.

        No pod event triggers the evacuation controller. So if a target pod ends after its failed
        migration, the next attempt waits for the next event of the node.
        """
        self.beating = asyncio.Event()
        """While this event is cleared, no virt-handler sends heartbeats."""
        self.beating.set()
        self._off: set[str] = set()
        self.handlers: dict[str, Client] = {}
        """The client of each node's virt-handler."""
        self._plans: dict[str, Iterator[Fate]] = defaultdict(lambda: itertools.repeat(Fate()))
        self._fates: dict[str, Fate] = {}
        self._homes: dict[str, str] = {}
        self._seen: dict[str, dict[str, Object]] = {"pods": {}, VMIS.plural: {}}
        self._since: dict[tuple[str, str], float] = {}
        self._acted: dict[tuple[str, str], str] = {}
        self._changed = asyncio.Event()
        self._addresses = itertools.count(1)
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            await self._sign_in(stack)
            await stack.enter_async_context(self._playing())
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._stack.aclose()

    # The plan

    def plan(self, vmi: str, *fates: Fate | Outcome) -> None:
        """Set the fates of a VMI's next migrations ("namespace/name"); the last one repeats."""
        whole = [fate if isinstance(fate, Fate) else Fate(fate) for fate in fates]
        self._plans[vmi] = itertools.chain(whole, itertools.repeat(whole[-1]))

    def place(self, vmi: str, node: str) -> None:
        """Set the node on which a VMI ("namespace/name") starts."""
        self._homes[vmi] = node

    def turn_off(self, node: str) -> None:
        """From now on the node's kubelet does nothing."""
        self._off.add(node)

    def turn_on(self, node: str) -> None:
        """The node's kubelet goes on, and at once does what it has not done."""
        self._off.remove(node)
        self._changed.set()

    def decide(self, migration_uid: str, fate: Fate | Outcome) -> None:
        """Change the fate of one migration, even if it has begun."""
        self._fates[migration_uid] = fate if isinstance(fate, Fate) else Fate(fate)
        self._changed.set()

    def fate(self, migration_uid: str, vmi: str) -> Fate:
        """The fate of a migration, taken from the plan at the first call."""
        if migration_uid not in self._fates:
            self._fates[migration_uid] = next(self._plans[vmi])
        return self._fates[migration_uid]

    @property
    def pods(self) -> list[Object]:
        """All pods, as last seen."""
        return list(self._seen[PODS.plural].values())

    # Scheduler

    async def bind(self, pod: Object, node: str) -> None:
        """Bind a pod to a node."""
        metadata = pod["metadata"]
        target = {"apiVersion": "v1", "kind": NODES.kind, "name": node}
        body = {
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": {"name": metadata["name"], "namespace": metadata["namespace"]},
            "target": target,
        }
        path = f"{PODS.path(metadata['namespace'], metadata['name'])}/binding"
        await self._scheduler.request("POST", path, json=body)

    async def leave_unscheduled(self, pod: Object) -> Object:
        """Mark the pod as unschedulable."""
        refused = rules.leave_unscheduled(pod, len(self.nodes), _now())
        return await self._scheduler.replace_status(PODS, refused)

    # Kubelets

    async def start_pod(self, pod: Object) -> Object:
        """Run a bound pod."""
        number = next(self._addresses)
        address = f"10.244.{number // 250}.{number % 250 + 1}"
        return await self._kubelet(pod, rules.start_pod(pod, address, _now()))

    async def ready_pod(self, pod: Object) -> Object:
        """Set a pod's readiness gates to true."""
        return await self._kubelet(pod, rules.ready_pod(pod, _now()))

    async def finish_pod(self, pod: Object, phase: Literal["Succeeded", "Failed"]) -> Object:
        """End a pod's container."""
        return await self._kubelet(pod, rules.finish_pod(pod, phase, _now()))

    async def remove_pod(self, pod: Object) -> None:
        """Remove a pod whose deletion was requested."""
        metadata = pod["metadata"]
        kubelet = self._kubelets[objects.node_of(pod)]
        await kubelet.delete(PODS, metadata["namespace"], metadata["name"])

    async def _kubelet(self, pod: Object, after: Object) -> Object:
        return await self._kubelets[objects.node_of(pod)].replace_status(PODS, after)

    # virt-handlers

    async def run_vmi(self, vmi: Object, *, migratable: bool = True) -> Object:
        """Run the domain of a scheduled VMI."""
        return await self._source(vmi, rules.run_vmi(vmi, _now(), migratable=migratable))

    async def set_migratable(self, vmi: Object, *, migratable: bool) -> Object:
        """Update the VMI's condition LiveMigratable."""
        return await self._source(vmi, rules.set_migratable(vmi, migratable=migratable))

    async def prepare_target(self, vmi: Object) -> Object:
        """Report that the target is ready to receive the migration."""
        ports = {"40001": 0, "40002": 49152}
        return await self._target(vmi, rules.prepare_target(vmi, "10.244.0.20", ports))

    async def start_migration(self, vmi: Object) -> Object:
        """Report that the migration has started."""
        return await self._source(vmi, rules.start_migration(vmi, _now()))

    async def ready_domain(self, vmi: Object) -> Object:
        """Report that the domain runs on the target."""
        return await self._target(vmi, rules.ready_domain(vmi, _now()))

    async def end_migration(self, vmi: Object) -> Object:
        """Hand the VMI over to the target node, and clear its eviction marker."""
        return await self._target(vmi, rules.end_migration(vmi, _now()))

    async def begin_abort(self, vmi: Object) -> Object:
        """Report that the abort has begun."""
        return await self._source(vmi, rules.begin_abort(vmi))

    async def fail_migration(
        self, vmi: Object, reason: str, abort_status: str | None = None
    ) -> Object:
        """Report that the migration failed in libvirt."""
        failed = rules.fail_migration(vmi, _now(), reason, abort_status)
        return await self._source(vmi, failed)

    async def write(self, vmi: Object, change: Callable[[Object], None]) -> Object:
        """Change a VMI as its node's virt-handler does."""
        return await self._source(vmi, objects.changed(vmi, change))

    async def _source(self, vmi: Object, after: Object) -> Object:
        return await self.handlers[vmi["status"]["nodeName"]].replace(VMIS, after)

    async def _target(self, vmi: Object, after: Object) -> Object:
        target = objects.state_of(vmi)["targetNode"]
        return await self.handlers[target].replace(VMIS, after)

    def _by_target(self, change: Callable[[Object], Object]) -> _Act:
        """A step in which the target's virt-handler changes the VMI."""
        return lambda vmi: self._target(vmi, change(vmi))

    # Automatic steps

    async def _sign_in(self, stack: AsyncExitStack) -> None:
        """Create the nodes, and log in as each component that acts on them."""
        control = self.cluster.control
        admin = control.admin

        async def enter(client: Client) -> Client:
            return await stack.enter_async_context(client)

        for name in self.nodes:
            await admin.create(NODES, _node(name, self.allocatable))
            # A new node has the taint not-ready, which the node controller would remove.
            await admin.merge(NODES, None, name, {"spec": {"taints": None}})
        await admin.create(CLUSTER_ROLE_BINDINGS, _KUBELETS)
        scheduler = control.certified("system:kube-scheduler")
        self._scheduler = await enter(control.client(scheduler))
        self._kubelets: dict[str, Client] = {}
        for name in self.nodes:
            kubelet = control.certified(f"system:node:{name}", "system:nodes")
            handler = await control.account(NAMESPACE, "kubevirt-handler", node=name)
            self._kubelets[name] = await enter(control.client(kubelet))
            self.handlers[name] = await enter(control.client(handler))

    @asynccontextmanager
    async def _playing(self) -> AsyncIterator[None]:
        tasks = [
            asyncio.create_task(self._watch(self._scheduler, PODS)),
            asyncio.create_task(self._watch(self.handlers[self.nodes[0]], VMIS)),
            asyncio.create_task(self._beat()),
            asyncio.create_task(self._work()),
        ]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
        for error in ended:
            if not isinstance(error, asyncio.CancelledError) and error is not None:
                raise error

    async def _watch(self, client: Client, resource: Resource) -> None:
        """Watch the objects, and resume after every broken connection."""
        head = {"apiVersion": resource.api_version, "kind": resource.kind}
        while True:
            with suppress(aiohttp.ClientError, ApiError, _Gone):
                listed = await client.list(resource)
                documents = {item["metadata"]["uid"]: head | item for item in listed["items"]}
                self._seen[resource.plural] = documents
                self._changed.set()
                version = listed["metadata"]["resourceVersion"]
                async with client.watch(resource, resourceVersion=version) as events:
                    async for event in events:
                        self._notice(documents, event)
            await asyncio.sleep(self.pace)

    def _notice(self, documents: dict[str, Object], event: Object) -> None:
        seen = event["object"]
        if event["type"] == "ERROR":
            raise _Gone
        uid = seen["metadata"]["uid"]
        if event["type"] == "DELETED":
            documents.pop(uid, None)
        else:
            documents[uid] = seen
        self._changed.set()

    async def _beat(self) -> None:
        """Send the heartbeats of virt-handler."""
        while True:
            await self.beating.wait()
            for name, handler in self.handlers.items():
                with suppress(aiohttp.ClientError, ApiError):
                    await handler.merge(NODES, None, name, {"metadata": _heartbeat()})
            await asyncio.sleep(self.heartbeat)

    async def _work(self) -> None:
        while True:
            self._changed.clear()
            wait = await self._act()
            with suppress(TimeoutError):
                async with asyncio.timeout(wait):
                    await self._changed.wait()

    async def _act(self) -> float | None:
        """Run the steps that are due; returns the seconds until the next one, or None."""
        waits: list[float] = []
        asked: set[tuple[str, str]] = set()
        for step, seen in [*self._steps()]:
            uid, version = seen["metadata"]["uid"], seen["metadata"]["resourceVersion"]
            key = (uid, step.name)
            asked.add(key)
            if self._acted.get(key) == version:
                continue
            wait = self._since.setdefault(key, time.monotonic()) + step.after - time.monotonic()
            if wait > 0:
                waits.append(wait)
                continue
            self._acted[key] = version
            try:
                await step.act(seen)
            except aiohttp.ClientError:
                # The API server does not answer: try again later.
                del self._acted[key]
                waits.append(self.pace)
            except ApiError as refusal:
                if refusal.code not in _OVERTAKEN:
                    raise
        self._since = {key: since for key, since in self._since.items() if key in asked}
        self._acted = {key: version for key, version in self._acted.items() if key in asked}
        return min(waits, default=None)

    def _steps(self) -> Iterator[tuple[_Step, Object]]:
        """The steps that the current objects need."""
        for pod in self._seen[PODS.plural].values():
            step = self._pod_step(pod)
            if step is not None and objects.node_of(pod) not in self._off:
                yield step, pod
        for vmi in self._seen[VMIS.plural].values():
            for step in self._vmi_steps(vmi):
                yield step, vmi

    def _pod_step(self, pod: Object) -> _Step | None:
        key = f"{pod['metadata']['namespace']}/{objects.annotations(pod).get(objects.DOMAIN, '')}"
        job = objects.labels(pod).get(objects.MIGRATION_JOB)
        fate = self.fate(job, key) if job else Fate()
        is_bound = bool(objects.node_of(pod))
        if objects.is_deleting(pod):
            return _Step("remove", self.pace, self.remove_pod) if is_bound else None
        if objects.phase(pod) != "Pending":
            is_due = rules.meets_readiness_gates(pod)
            return _Step("ready", self.pace, self.ready_pod) if is_due else None
        if not is_bound:
            return self._schedule(pod, key, fate.outcome)
        if fate.outcome == "never ready":
            return None
        if fate.outcome == "crashes":
            return _Step("crash", fate.seconds, lambda pod: self.finish_pod(pod, "Failed"))
        return _Step("start", self.pace, self.start_pod)

    def _schedule(self, pod: Object, key: str, outcome: Outcome) -> _Step | None:
        if outcome == "never bound":
            return None
        node = None if outcome == "unschedulable" else self._free_node(pod, key)
        if node is not None:
            return _Step("bind", self.pace, lambda pod: self.bind(pod, node))
        if objects.is_unschedulable(pod):
            return None
        return _Step("refuse", self.pace, self.leave_unscheduled)

    def _free_node(self, pod: Object, key: str) -> str | None:
        """A node without an unfinished pod of this VMI."""
        owner = objects.labels(pod).get(objects.CREATED_BY)
        taken = {
            objects.node_of(other)
            for other in self._seen[PODS.plural].values()
            if objects.labels(other).get(objects.CREATED_BY) == owner
            and not objects.is_final(other)
        }
        home = self._homes.get(key)
        ordered = dict.fromkeys([home, *self.nodes] if home else self.nodes)
        return self.choose(pod, [node for node in ordered if node not in taken])

    def _vmi_steps(self, vmi: Object) -> Iterator[_Step]:
        if objects.is_deleting(vmi):
            return
        if objects.phase(vmi) == "Scheduled":
            yield _Step("run", self.pace, self.run_vmi)
        state = objects.state_of(vmi)
        if not state or objects.phase(vmi) != "Running":
            return
        job = str(state["migrationUid"])
        fate = self.fate(job, objects.key(vmi))
        if "endTimestamp" in state:
            yield from self._after_end(vmi, state, job)
        elif "targetNodeDomainReadyTimestamp" in state:
            yield _Step(f"end {job}", self.pace, self.end_migration)
        elif state.get("abortStatus"):
            yield _Step(f"aborted {job}", self.pace, self._abort)
        elif state.get("abortRequested"):
            yield _Step(f"abort {job}", self.pace, self.begin_abort)
        elif "startTimestamp" in state:
            yield from self._copying(state, job, fate)
        else:
            yield self._preparing(state, job, fate)

    def _preparing(self, state: Object, job: str, fate: Fate) -> _Step:
        is_prepared = "targetNodeAddress" in state
        if fate.outcome == ("loses ready target" if is_prepared else "loses target"):
            return _Step(f"lose {job}", fate.seconds, self._lose_target)
        if not is_prepared:
            return _Step(f"prepare {job}", self.pace, self.prepare_target)
        return _Step(f"begin {job}", self.pace, self.start_migration)

    def _copying(self, state: Object, job: str, fate: Fate) -> Iterator[_Step]:
        if not state.get("targetNodeDomainDetected"):
            yield _Step(f"detect {job}", self.pace, self._by_target(rules.detect_domain))
        elif fate.outcome == "fails":
            fail = lambda vmi: self.fail_migration(vmi, fate.reason)  # noqa: E731
            yield _Step(f"fail {job}", fate.seconds, fail)
        elif fate.outcome != "hangs":
            yield _Step(f"ready {job}", fate.seconds, self.ready_domain)

    def _after_end(self, vmi: Object, state: Object, job: str) -> Iterator[_Step]:
        failed = bool(state.get("failed"))
        if not failed and not state.get("completed"):
            yield _Step(f"finalise {job}", self.pace, self._by_target(rules.finalise_migration))
        elif objects.MIGRATION_TARGET_NODE in objects.labels(vmi):
            yield _Step(f"clean {job}", self.pace, self._by_target(rules.clean_up_target))
        if self.fate(job, objects.key(vmi)).outcome == "keeps source":
            return
        left = self._pod(state.get("targetPod" if failed else "sourcePod"), vmi)
        if left is not None and not objects.is_final(left):
            phase = rules.phase_of_failed_target(vmi) if failed else "Succeeded"
            yield _Step(f"exit {job}", self.leaves_after, lambda _: self._exit(left, phase))

    async def _abort(self, vmi: Object) -> None:
        await self.fail_migration(vmi, rules.ABORTED, "Succeeded")

    async def _lose_target(self, vmi: Object) -> None:
        target = self._pod(objects.state_of(vmi)["targetPod"], vmi)
        if target is not None:
            await self._exit(target, "Failed")

    async def _exit(self, pod: Object, phase: Literal["Succeeded", "Failed"]) -> None:
        if not objects.is_final(pod) and not objects.is_deleting(pod):
            await self.finish_pod(pod, phase)

    def _pod(self, name: str | None, vmi: Object) -> Object | None:
        place = (vmi["metadata"]["namespace"], name)
        for pod in self._seen[PODS.plural].values():
            if (pod["metadata"]["namespace"], pod["metadata"]["name"]) == place:
                return pod
        return None


class _Gone(Exception):
    """A watch has ended with an ERROR event."""


# Another writer was faster, or the object is gone. The watch will show the current state.
_OVERTAKEN = {404, 409}
_CPU: Mapping[str, str] = {
    "cpu-vendor.node.kubevirt.io/Intel": "true",
    "cpu-model-migration.node.kubevirt.io/Skylake-Client-IBRS": "true",
    "host-model-cpu.node.kubevirt.io/Skylake-Client-IBRS": "true",
}
"""CPU labels as virt-handler sets them; a target pod selects nodes with the source's labels."""
_KUBELETS = binding("system:node", "system:nodes", subject="Group")
_KUBELETS["metadata"]["name"] = "kubelets"


def _choose_first(_pod: Object, free: Sequence[str]) -> str | None:
    return next(iter(free), None)


def _node(name: str, allocatable: Mapping[str, str]) -> Object:
    def equip(made: Object) -> None:
        made["metadata"] |= _heartbeat()
        made["metadata"]["labels"] |= _CPU
        if allocatable:
            ready = {"type": "Ready", "status": "True", "reason": "KubeletReady"}
            room = dict(allocatable)
            made["status"] = {"capacity": room, "allocatable": room, "conditions": [ready]}

    return objects.changed(objects.build_node(name), equip)


def _heartbeat() -> Object:
    return {"annotations": {"kubevirt.io/heartbeat": objects.format_time(_now())}}


def _now() -> datetime:
    return datetime.now(UTC)
