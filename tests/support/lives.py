"""Creates, migrates and deletes random VMs on an API server, as KubeVirt does.

A `Script` also puts every object that it writes into the store `expected`. A watch without faults
must lead to an equal store. The script's time begins five hours ago, and each step advances it.
"""

import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from exporter.engine.facts.model import Checkpoint, Resource
from exporter.engine.facts.policy import Policy
from exporter.engine.facts.trust import Trust
from exporter.engine.store.store import Store
from exporter.engine.verdicts.rules import evaluate_rules
from exporter.kube.objects.kubevirt import parse_object
from tests.cluster import PODS, VMIMS, VMIS, launcher_pod, vmi, vmim
from tests.cluster import Resource as Served
from tests.support.api_servers import Stage
from tests.support.builders import rfc3339
from tests.support.stores import ClockedStore
from tests.support.verdicts import decide


Object = dict[str, Any]

KEPT_BY_KUBEVIRT = 5
NODES = ("n1", "n2", "n3")
_KINDS = {VMIS: Resource.VMIS, VMIMS: Resource.VMIMS, PODS: Resource.PODS}


def ended_state(uid: str, start: float, end: float) -> Object:
    """The `migrationState` of a migration that succeeded."""
    times = {"startTimestamp": rfc3339(start), "endTimestamp": rfc3339(end)}
    return {"migrationUid": uid, **times, "completed": True}


def transitions(entered: list[Object], phase: str, now: float) -> Object:
    """The earlier phase transitions of a VMIM, and its transition to `phase` now."""
    entry = {"phase": phase, "phaseTransitionTimestamp": rfc3339(now)}
    return {"phaseTransitionTimestamps": [*entered, entry]}


@dataclass
class _Life:
    """One VM: its VMI, launcher pod and VMIMs, oldest first, and the running migration."""

    name: str
    vmi: Object
    pod: Object
    vmims: list[Object] = field(default_factory=list)
    moving: Object | None = None
    target: str = ""
    started: float | None = None


class Script:
    """Runs random steps in one namespace; `expected` is the store of a watch without faults."""

    def __init__(self, stage: Stage, namespace: str, seed: int, *, vms: int = 3) -> None:
        self._stage = stage
        self._admin = stage.admin
        self._namespace = namespace
        self._rng = random.Random(seed)
        self._now = float(int(time.time()) - 5 * 3600)
        self._lives: dict[str, _Life] = {}
        self._names = [f"vm{number}" for number in range(vms)]
        self._serial = 0
        self.expected = ClockedStore(keep=Policy().endings_kept)

    @property
    def now(self) -> float:
        """The script's time, at which verdicts are compared."""
        return self._now

    @property
    def namespace(self) -> str:
        """The script's namespace."""
        return self._namespace

    async def play(self, steps: int) -> None:
        """Run some steps; each step changes one VM."""
        for _ in range(steps):
            self._now += self._rng.choice((1, 20, 90, 400))
            await self._step(self._rng.choice(self._names))

    async def mark(self, label: str) -> tuple[str, str, str]:
        """Create one more object of each kind. If a watch has sent them, it has sent everything
        before.
        """
        made = await self._create(VMIS, vmi(label, self._namespace))
        await self._create(VMIMS, vmim(label, self._namespace, of=label))
        pod = await self._create(PODS, launcher_pod(made))
        return label, label, str(pod["metadata"]["name"])

    async def _step(self, name: str) -> None:
        life = self._lives.get(name)
        if life is None:
            await self._begin_life(name)
        elif self._rng.random() < 0.12:
            await self._end_life(life)
        elif life.moving is None:
            await self._rng.choice((self._begin_move, self._begin_move, self._mark_eviction))(life)
        else:
            await self._go_on(life)

    async def _begin_life(self, name: str) -> None:
        """Start a VM in a new second, because a real VM is not recreated within one second."""
        node = self._rng.choice(NODES)
        await self._stage.next_second()
        made = await self._create(VMIS, vmi(name, self._namespace, node=node))
        await self._stage.next_second()
        pod = await self._create(PODS, launcher_pod(made, node=node))
        self._lives[name] = _Life(name, made, pod)

    async def _end_life(self, life: _Life) -> None:
        """Delete a VMI, and then its VMIMs and its pod, as KubeVirt does."""
        del self._lives[life.name]
        await self._delete(VMIS, life.vmi)
        for migration in life.vmims:
            await self._delete(VMIMS, migration)
        await self._delete(PODS, life.pod)

    async def _mark_eviction(self, life: _Life) -> None:
        node = life.vmi["status"]["nodeName"]
        life.vmi["status"]["evacuationNodeName"] = node
        life.vmi = await self._replace(VMIS, life.vmi)
        if self._rng.random() < 0.5:
            annotation = "descheduler.alpha.kubernetes.io/eviction-in-progress"
            life.pod["metadata"]["annotations"][annotation] = "true"
            life.pod = await self._replace(PODS, life.pod)

    async def _begin_move(self, life: _Life) -> None:
        self._serial += 1
        body = vmim(f"{life.name}-{self._serial}", self._namespace, of=life.name)
        body["status"] = {"phase": "Pending", **transitions([], "Pending", self._now)}
        life.moving = await self._create(VMIMS, body)
        life.vmims.append(life.moving)
        life.target = self._rng.choice(NODES)

    async def _go_on(self, life: _Life) -> None:
        """Do the next step of a running migration, in KubeVirt's order."""
        assert life.moving is not None
        phase = life.moving["status"]["phase"]
        if phase in ("Pending", "Scheduling") and self._rng.random() < 0.15:
            await self._finish(life, "Failed")
        elif phase == "Pending":
            await self._advance(life, "Scheduling")
        elif phase == "Scheduling":
            await self._advance(life, "Scheduled")
            await self._put_state(
                life,
                {
                    "migrationUid": life.moving["metadata"]["uid"],
                    "sourceNode": life.vmi["status"]["nodeName"],
                    "targetNode": life.target,
                },
            )
        elif phase == "Scheduled":
            await self._advance(life, "Running")
            state = life.vmi["status"]["migrationState"]
            await self._put_state(life, {**state, "startTimestamp": rfc3339(self._now)})
        else:
            await self._end_move(life)

    async def _end_move(self, life: _Life) -> None:
        failed = self._rng.random() < 0.3
        state = {
            **life.vmi["status"]["migrationState"],
            "endTimestamp": rfc3339(self._now),
            "completed": True,
        }
        if failed:
            state["failed"] = True
        else:
            life.vmi["status"]["nodeName"] = life.target
            life.vmi["status"].pop("evacuationNodeName", None)
        await self._put_state(life, state)
        if not failed:
            await self._delete(PODS, life.pod)
            life.pod = await self._create(PODS, launcher_pod(life.vmi, node=life.target))
        self._now += 2
        await self._finish(life, "Failed" if failed else "Succeeded", migrationState=state)

    async def _finish(self, life: _Life, phase: str, **more: Object) -> None:
        """End a migration, and delete its older VMIMs that KubeVirt does not keep."""
        await self._advance(life, phase, **more)
        life.moving = None
        finished = [
            migration
            for migration in life.vmims
            if migration["status"]["phase"] in ("Succeeded", "Failed")
        ]
        for migration in finished[:-KEPT_BY_KUBEVIRT]:
            life.vmims.remove(migration)
            await self._delete(VMIMS, migration)

    async def _advance(self, life: _Life, phase: str, **more: Object) -> None:
        """Let a migration enter a phase; `more` are further fields of its status."""
        moving = life.moving
        assert moving is not None
        entered = moving["status"].get("phaseTransitionTimestamps", [])
        status = {"phase": phase, **transitions(entered, phase, self._now), **more}
        changed = await self._admin.merge_status(
            VMIMS, self._namespace, moving["metadata"]["name"], status
        )
        self._expect(VMIMS, changed)
        life.vmims[life.vmims.index(moving)] = changed
        life.moving = changed

    async def _put_state(self, life: _Life, state: Object) -> None:
        life.vmi["status"]["migrationState"] = state
        life.vmi = await self._replace(VMIS, life.vmi)

    async def _create(self, served: Served, body: Object) -> Object:
        made = await self._admin.create(served, body)
        self._expect(served, made)
        return made

    async def _replace(self, served: Served, body: Object) -> Object:
        changed = await self._admin.replace(served, body)
        self._expect(served, changed)
        return changed

    async def _delete(self, served: Served, body: Object) -> None:
        name = body["metadata"]["name"]
        await self._admin.delete(served, self._namespace, name)
        self.expected.remove(_KINDS[served], self._namespace, name)

    def _expect(self, served: Served, body: Object) -> None:
        self.expected.put(parse_object(_KINDS[served], msgspec.json.encode(body)).fact)


def compare(expected: ClockedStore, seen: Store, namespace: str, now: float) -> list[str]:
    """The differences between the verdicts of two stores in one namespace."""
    policy = Policy()
    names = sorted(
        {e.vmi.name for e in expected.all_evidence() if e.vmi.namespace == namespace}
        | {e.vmi.name for e in seen.all_evidence(Trust()) if e.vmi.namespace == namespace}
    )
    differences = []
    for name in names:
        evidence = expected.evidence(namespace, name)
        other = seen.evidence(namespace, name, Trust())
        if evidence is None or other is None:
            differences.append(f"{name}: {'not expected' if evidence is None else 'not seen'}")
            continue
        differences += [
            f"{name} at {at}: {what} {left!r}, seen {right!r}"
            for at in (now, now + 600, now + 7200)
            for what, answer in _questions(policy, at)
            if (left := answer(evidence)) != (right := answer(other))
        ]
    return differences


def _questions(policy: Policy, at: float) -> Iterable[tuple[str, Callable[[Any], object]]]:
    for checkpoint in (None, *Checkpoint):
        yield (
            f"verdict({checkpoint})",
            lambda e, c=checkpoint: decide(e, policy, at, checkpoint=c),  # type: ignore[misc]
        )
    yield "rules", lambda e: evaluate_rules(e, policy, at)
