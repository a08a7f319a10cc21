"""Which VM moved when, from the audit log and the migrations' timestamps.

Nothing here uses the exporter or its arithmetic.
"""

import asyncio
import re
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path

from exporter.demo import objects
from exporter.demo.objects import Object
from tests.cluster import Client
from tests.cluster.audit import Creation, read_audit
from tests.cluster.resources import VMIMS
from tests.integration.descheduling.descheduler import USER


CONTROLLER = "system:serviceaccount:kubevirt:kubevirt-controller"
_ACCEPTED = re.compile(r'(?<!Evacuation in progress: )Eviction triggered evacuation of VMI "(.+)"')


@dataclass(frozen=True, slots=True)
class Eviction:
    """An eviction by the descheduler that KubeVirt accepted."""

    vm: str
    at: datetime
    warned: bool = False
    """Whether the admission webhook would have denied it."""


@dataclass(frozen=True, slots=True)
class Move:
    """One migration of a VM that has ended."""

    vm: str
    start: datetime
    end: datetime

    @property
    def duration(self) -> timedelta:
        """The duration of the migration."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Rules:
    """The cooldown rule, computed from its definition."""

    base: timedelta
    cap: timedelta

    def effective(self, moves: list[Move]) -> timedelta:
        """The effective cooldown of one VM after these moves in the window, oldest first."""
        doubled = 1 << (len(moves) - 1)
        return min(max(self.base, moves[-1].duration) * doubled, self.cap)


@dataclass
class Ledger:
    """The evictions and migrations of one namespace."""

    namespace: str
    evictions: list[Eviction] = field(default_factory=list)
    refused: list[Creation] = field(default_factory=list)
    """The descheduler's evictions that KubeVirt did not accept as a new request."""
    moves: list[Move] = field(default_factory=list)
    creators: Counter[str] = field(default_factory=Counter)
    """The number of evacuation migrations that each user created."""
    by_hand: Counter[str] = field(default_factory=Counter)
    """The number of other migrations that each user created."""

    def evictions_of(self, vm: str) -> int:
        """How often a VM was evicted."""
        return sum(eviction.vm == vm for eviction in self.evictions)

    def moves_of(self, vm: str) -> list[Move]:
        """The moves of a VM, oldest first."""
        return sorted((move for move in self.moves if move.vm == vm), key=lambda move: move.end)

    def too_early(self, rules: Rules) -> list[tuple[Eviction, Move]]:
        """The evictions inside the cooldown of the VM's earlier moves.

        The audit log has the time at which the API server received an eviction; the verdict follows
        within a second.
        """
        pairs = []
        for eviction in self.evictions:
            before = [move for move in self.moves_of(eviction.vm) if move.end <= eviction.at]
            judged = eviction.at + timedelta(seconds=1)
            if before and judged < before[-1].end + rules.effective(before):
                pairs.append((eviction, before[-1]))
        return pairs

    def moving(self) -> list[Eviction]:
        """The evictions of a VM while its migration ran."""
        return [
            eviction
            for eviction in self.evictions
            # A start time has whole seconds, so the migration that this eviction caused may seem to
            # start before the eviction.
            if any(
                move.start < eviction.at.replace(microsecond=0) and eviction.at < move.end
                for move in self.moves_of(eviction.vm)
            )
        ]


@asynccontextmanager
async def recording(admin: Client) -> AsyncIterator[dict[str, Object]]:
    """Record the last state of every migration during the block, by its UID."""
    listed = await admin.list(VMIMS)
    seen = {migration["metadata"]["uid"]: migration for migration in listed["items"]}

    async def follow() -> None:
        version = listed["metadata"]["resourceVersion"]
        async with admin.watch(VMIMS, resourceVersion=version) as events:
            async for event in events:
                assert event["type"] != "ERROR", event
                seen[event["object"]["metadata"]["uid"]] = event["object"]

    task = asyncio.create_task(follow())
    try:
        yield seen
        if task.done():
            await task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def write_ledger(namespace: str, audit: Path, migrations: Iterable[Object] = ()) -> Ledger:
    """The evictions and migrations of a namespace, from the audit log and the VMIMs."""
    ledger = Ledger(namespace)
    for entry in read_audit(audit):
        if entry.namespace != namespace:
            continue
        if entry.resource == VMIMS.plural:
            is_evacuation = objects.EVACUATION in objects.annotations(entry.made)
            (ledger.creators if is_evacuation else ledger.by_hand)[entry.user] += 1
        elif entry.user == USER:
            _write_eviction(ledger, entry)
    ledger.moves = [
        Move(vmim["spec"]["vmiName"], *instants)
        for vmim in migrations
        if vmim["metadata"]["namespace"] == namespace and (instants := _instants(vmim)) is not None
    ]
    return ledger


def _write_eviction(ledger: Ledger, asked: Creation) -> None:
    accepted = _ACCEPTED.search(asked.message)
    if accepted is None:
        ledger.refused.append(asked)
    else:
        warned = any(note.endswith("/would-deny") for note in asked.notes)
        ledger.evictions.append(Eviction(accepted[1].rpartition("/")[2], asked.at, warned))


def _instants(vmim: Object) -> tuple[datetime, datetime] | None:
    state = objects.state_of(vmim)
    if "endTimestamp" not in state:
        return None
    return objects.parse_time(state["startTimestamp"]), objects.parse_time(state["endTimestamp"])
