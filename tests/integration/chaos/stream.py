"""A stream of migrations and evacuations, as KubeVirt writes them.

The timestamps of a VM lie a constant time in the past. No two events of a VM have the same second,
so the history file, which has whole seconds, can distinguish them. Before the stream deletes the
only object that shows an event, it awaits `acknowledge`, so that the event is stored. If a replica
is killed before that, it may lose the event by design.

Brief VMs have at most the five VMIMs that KubeVirt keeps, and none is deleted before the VM. So
nothing about brief VMs may be lost, even without a history file.
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from exporter.demo.objects import drop_condition
from tests.cluster import VMIMS, VMIS, Client, vmi, vmim
from tests.support.builders import rfc3339
from tests.support.lives import KEPT_BY_KUBEVIRT, NODES, transitions


Object = dict[str, Any]

LAGS = (0, 0, 40, 3_000, 20_000, 80_000)
"""The seconds by which a VM's timestamps lie in the past; each VM has one of these values."""


@dataclass
class _Life:
    """One VM.

    `loose` is true while only `migrationState` shows the last migration, which is not stored yet.
    `abandoned` has the nodes from which an evacuation was cancelled. A replica that missed the
    cancellation mistakes the next evacuation from that node for the cancelled one, unless the
    request has a date.
    """

    name: str
    rng: random.Random
    brief: bool
    lag: int
    vmi: Object
    ripe_at: float
    vmims: list[Object] = field(default_factory=list)
    moving: Object | None = None
    is_attempt: bool = False
    target: str = ""
    loose: bool = False
    cancelled: bool = False
    abandoned: set[str] = field(default_factory=set)

    @property
    def evacuates(self) -> str | None:
        """The node that the VM is to leave."""
        node: str | None = self.vmi["status"].get("evacuationNodeName")
        return node

    @property
    def finished(self) -> list[Object]:
        """The VM's VMIMs that have ended, oldest first."""
        return [vmim for vmim in self.vmims if vmim is not self.moving]


async def _at_once() -> None:
    """Return at once, because there is no stored history to wait for."""


class Stream:
    """Runs random steps in one namespace; `happened` counts them by kind.

    `marked` is called with the VM's name after an eviction request without a date. The date
    of such a request is the time when a replica first sees it.
    """

    def __init__(
        self,
        admin: Client,
        namespace: str,
        seed: int,
        *,
        lasting: int = 4,
        brief: int = 3,
        acknowledge: Callable[[], Awaitable[None]] = _at_once,
        marked: Callable[[str], Awaitable[None]] | None = None,
    ) -> None:
        self._admin = admin
        self._namespace = namespace
        self._acknowledge = acknowledge
        self._marked = marked
        self._lives: dict[str, _Life] = {}
        self._free_at: dict[str, float] = {}
        self._serial = 0
        self.lasting = [f"lasting{number}" for number in range(lasting)]
        self.brief = [f"brief{number}" for number in range(brief)]
        self._rngs = {name: random.Random(f"{seed} {name}") for name in self.lasting + self.brief}
        self.steps = 0
        self.happened: Counter[str] = Counter()

    def candidates(self, *, brief_alone: bool = False) -> list[tuple[str, str]]:
        """The VMIs to ask about, whether they exist at the moment or not."""
        names = self.brief if brief_alone else self.lasting + self.brief
        return [(self._namespace, name) for name in names]

    def is_dated(self, name: str) -> bool:
        """Whether the VMI has the time at which its evacuation was requested."""
        life = self._lives.get(name)
        return life is None or any(
            c["type"] == "EvictionRequested" for c in life.vmi["status"]["conditions"]
        )

    async def play(self, steps: int) -> None:
        """Run this many random steps for every VM."""
        async with asyncio.TaskGroup() as tasks:
            for name in self._rngs:
                tasks.create_task(self._play(name, steps))

    async def _play(self, name: str, steps: int) -> None:
        for _ in range(steps):
            await self._step(name)
            self.steps += 1

    async def _step(self, name: str) -> None:
        life = self._lives.get(name)
        if life is None:
            await asyncio.sleep(max(0.0, self._free_at.get(name, 0.0) - time.time()))
            await self._begin_life(name)
            return
        await asyncio.sleep(max(0.0, life.ripe_at - time.time()))
        if life.moving is not None:
            await self._go_on(life)
        elif life.loose:
            await self._acknowledge()
            life.loose = False
        elif len(life.finished) > KEPT_BY_KUBEVIRT:
            await self._tidy(life)
        elif self._has_lived(life):
            await self._end_life(life)
        elif life.evacuates and life.rng.random() < 0.1:
            await self._cancel(life)
        elif not life.evacuates and life.rng.random() < 0.3:
            await self._mark(life)
        else:
            await self._begin_move(life)

    def _has_lived(self, life: _Life) -> bool:
        if life.brief:
            return len(life.finished) >= KEPT_BY_KUBEVIRT
        return life.rng.random() < 0.03

    async def _begin_life(self, name: str) -> None:
        rng = self._rngs[name]
        made = await self._admin.create(VMIS, vmi(name, self._namespace, node=rng.choice(NODES)))
        lag, brief = rng.choice(LAGS), name in self.brief
        self._lives[name] = _Life(name, rng, brief, lag, made, _next_second())
        self.happened["began"] += 1

    async def _end_life(self, life: _Life) -> None:
        del self._lives[life.name]
        await self._admin.delete(VMIS, self._namespace, life.name)
        for migration in life.vmims:
            await self._delete(migration)
        self._free_at[life.name] = _next_second()
        self.happened["died"] += 1

    async def _tidy(self, life: _Life) -> None:
        """Delete all finished VMIMs but the newest five, as KubeVirt does."""
        await self._acknowledge()
        for migration in life.finished[:-KEPT_BY_KUBEVIRT]:
            life.vmims.remove(migration)
            await self._delete(migration)
            self.happened["VMIM deleted"] += 1

    async def _mark(self, life: _Life) -> None:
        """Request an eviction with a date, as KubeVirt does since 1.7, or without one."""
        again = life.vmi["status"]["nodeName"] in life.abandoned
        dated = life.rng.random() < 0.5 or life.brief or again
        if life.cancelled:
            # The replicas must see the cancellation now, because nothing shows it later.
            await self._acknowledge()
            life.cancelled = False
        status = life.vmi["status"]
        status["evacuationNodeName"] = status["nodeName"]
        if dated:
            condition = {
                "type": "EvictionRequested",
                "status": "True",
                "lastTransitionTime": rfc3339(time.time()),
            }
            status["conditions"] = [*status["conditions"], condition]
        await self._replace(life)
        life.ripe_at = _next_second()
        self.happened["evacuation requested"] += 1
        if not dated:
            await self._acknowledge()
            if self._marked is not None:
                await self._marked(life.name)
            # An attempt that ends in the same second as this request might not count.
            life.ripe_at = _next_second()

    async def _cancel(self, life: _Life) -> None:
        life.abandoned.add(life.vmi["status"]["nodeName"])
        self._unmark(life)
        await self._replace(life)
        life.cancelled = True
        life.ripe_at = _next_second()
        self.happened["evacuation cancelled"] += 1

    def _unmark(self, life: _Life) -> None:
        life.vmi["status"].pop("evacuationNodeName", None)
        drop_condition(life.vmi, "EvictionRequested")

    async def _begin_move(self, life: _Life) -> None:
        self._serial += 1
        life.is_attempt = bool(life.evacuates)
        name = f"{life.name}-{self._serial}"
        body = vmim(name, self._namespace, of=life.name, evacuates=life.evacuates)
        body["status"] |= transitions([], "Pending", self._now(life))
        life.moving = await self._admin.create(VMIMS, body)
        life.vmims.append(life.moving)
        others = [node for node in NODES if node != life.vmi["status"]["nodeName"]]
        life.target = life.rng.choice(others)

    async def _go_on(self, life: _Life) -> None:
        """Take the next step of the running migration."""
        assert life.moving is not None
        phase, chance = life.moving["status"]["phase"], life.rng.random()
        uid = life.moving["metadata"]["uid"]
        if phase == "Pending" and chance < (0.5 if life.is_attempt else 0.1):
            await self._finish(life, "Failed")
            self.happened["attempt failed"] += life.is_attempt
        elif phase == "Pending":
            await self._advance(life, "Scheduled")
            nodes = {"sourceNode": life.vmi["status"]["nodeName"], "targetNode": life.target}
            life.vmi["status"]["migrationState"] = {"migrationUid": uid, **nodes}
            await self._replace(life)
            self.happened["handed off"] += 1
        elif phase == "Scheduled":
            took = life.rng.choice((20, 400, 1_500))
            state = life.vmi["status"]["migrationState"]
            state["startTimestamp"] = rfc3339(self._now(life) - took)
            await self._replace(life)
            await self._advance(life, "Running")
        elif chance < 0.15 and not life.brief:
            await self._delete(life.moving)
            life.vmims.remove(life.moving)
            await self._end_move(life, failed=True)
            life.moving, life.loose = None, True
            self.happened["VMIM deleted under way"] += 1
        else:
            await self._end_move(life, failed=chance > 0.75)

    async def _end_move(self, life: _Life, *, failed: bool) -> None:
        status = life.vmi["status"]
        state = status["migrationState"]
        state |= {"endTimestamp": rfc3339(self._now(life)), "completed": True}
        if failed:
            state["failed"] = True
        else:
            status["nodeName"] = life.target
            self._unmark(life)
        await self._replace(life)
        life.ripe_at = _next_second()
        self.happened["failed" if failed else "succeeded"] += 1
        if life.moving in life.vmims:
            self.happened["attempt failed"] += failed and life.is_attempt
            await self._finish(life, "Failed" if failed else "Succeeded", state)

    async def _finish(self, life: _Life, phase: str, state: Object | None = None) -> None:
        await self._advance(life, phase, state)
        life.moving = None
        life.ripe_at = _next_second()

    async def _advance(self, life: _Life, phase: str, state: Object | None = None) -> None:
        moving = life.moving
        assert moving is not None
        entered = moving["status"]["phaseTransitionTimestamps"]
        status = {"phase": phase, **transitions(entered, phase, self._now(life))}
        if state is not None:
            status["migrationState"] = state
        name = moving["metadata"]["name"]
        changed = await self._admin.merge_status(VMIMS, self._namespace, name, status)
        life.vmims[life.vmims.index(moving)] = life.moving = changed

    async def _replace(self, life: _Life) -> None:
        life.vmi = await self._admin.replace(VMIS, life.vmi)

    async def _delete(self, migration: Object) -> None:
        await self._admin.delete(VMIMS, self._namespace, migration["metadata"]["name"])

    def _now(self, life: _Life) -> float:
        """The VM's current time. Attempts have no lag, because eviction requests have none."""
        return time.time() - (0 if life.is_attempt else life.lag)


def _next_second() -> float:
    return float(int(time.time()) + 1)
