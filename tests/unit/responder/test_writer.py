"""What the responder sends to the API server, and when."""

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, cast

import pytest
from msgspec.structs import replace

from exporter.engine.facts.model import (
    Eviction,
    EvictionRequester,
    KubeVirtSettings,
    Resource,
    Vmi,
)
from exporter.engine.facts.policy import Policy, Reason, StuckPolicy
from exporter.health import Health, Watched
from exporter.kube.client import ApiServer, Overloaded, Unsupported
from exporter.kube.lease import Lease
from exporter.kube.objects.instants import parse_instant
from exporter.responder.writer import HEARTBEAT, MOST_REQUESTS, SHORTEST, Responder
from exporter.settings import EvictionRequestMode, EvictionRequestSettings
from tests.support.builders import NOW, a_pod, a_state, a_vmi
from tests.support.stores import ClockedStore


SETTINGS = EvictionRequestSettings(mode=EvictionRequestMode.RESPOND)


@dataclass
class Server:
    """An API server that keeps what the responder writes, and marks the VM at an eviction."""

    store: ClockedStore
    now: float = NOW
    ahead: float = 0.0
    failure: Exception | None = None
    marks: bool = True
    writes: list[tuple[float, str, dict[str, Any]]] = field(default_factory=list)
    evictions: list[tuple[float, dict[str, Any]]] = field(default_factory=list)

    def read_server_time(self) -> float:
        """The server's clock."""
        return self.now + self.ahead

    async def apply_status(self, _resource: Resource, body: Any, *, manager: str) -> None:
        """Write the entry into the store, as the watch would."""
        assert manager
        if self.failure is not None:
            raise self.failure
        (entry,) = body["status"]["responders"]
        name = body["metadata"]["name"]
        self.writes.append((self.now, name, entry))
        known = next(
            row for row in self.store.evictions.list_turns(SETTINGS.name) if row.name == name
        )
        done = "completionTime" in entry
        self.store.put(
            replace(
                known,
                message=entry["message"],
                heartbeat_at=parse_instant(entry["heartbeatTime"]),
                state="Completed" if done else "Active",
            )
        )

    async def create(self, path: str, body: Any) -> bytes:
        """Refuse an eviction as KubeVirt does, which marks the VMI."""
        self.evictions.append((self.now, body))
        assert path.endswith(f"/pods/{body['metadata']['name']}/eviction")
        if self.marks:
            vmi = self.store.vmi(("shop", "db1"))
            assert vmi is not None
            self.store.put(replace(vmi, evacuation_node="n1", eviction_requested_at=self.now))
        raise Overloaded("429 Eviction triggered evacuation of VMI", 0.0)


class Scene:
    """A responder that holds its Lease, with a store, a server and a clock of the test."""

    def __init__(self) -> None:
        self.store = ClockedStore(now=NOW)
        self.store.put(KubeVirtSettings())
        self.server = Server(self.store)
        self.lease = type("Held", (), {"held": True})()
        watched = [
            Watched(resource, None, synced=True, contact=NOW)
            for resource in (Resource.VMIS, Resource.VMIMS, Resource.PODS, Resource.KUBEVIRTS)
        ]
        self.blocks = Counter[Reason]()
        self.held: list[float] = []
        self.responder = Responder(
            cast("ApiServer", self.server),
            self.store,
            Health(1e9, 1e9, watched),
            Policy(),
            StuckPolicy(),
            SETTINGS,
            cast("Lease", self.lease),
            longest_hold=86_400.0,
            clock=lambda: self.server.now,
            count_hold=lambda _vmi, _verdict, reason, _now: self.blocks.update([reason]),
            record_hold=self.held.append,
            monotonic=lambda: self.server.now,
        )

    def add_vm(self, name: str = "db1", **fields: Any) -> Vmi:
        """A VM, in its cooldown for five minutes, whose Eviction waits for the responder."""
        vmi = a_vmi(
            name=name,
            uid=f"uid-{name}",
            eviction_strategy="LiveMigrate",
            migratable=True,
            **{"migration": a_state(), **fields},
        )
        pod = a_pod(name=f"virt-launcher-{name}", uid=f"pod-{name}", vmi_uid=vmi.uid)
        self.store.put(vmi)
        self.store.put(pod)
        self.store.put(
            Eviction(
                namespace=pod.namespace,
                name=f"pod-1-{pod.name}",
                uid=f"eviction-{name}",
                pod=pod.name,
                pod_uid=pod.uid,
                created=NOW,
                started_at=NOW,
                requesters=(EvictionRequester("example.com/drain", "Eviction"),),
                responders=(SETTINGS.name,),
                responder=SETTINGS.name,
                state="Active",
            )
        )
        return vmi

    async def run(self, seconds: int) -> None:
        """Let the responder work for some seconds."""
        for _ in range(seconds):
            await self.responder.answer_due()
            self.server.now += 1.0
            self.store.now = self.server.now


async def test_a_hold_is_written_at_once_and_then_every_two_minutes() -> None:
    """The whole entry each time, because a field that is left out is deleted or refused."""
    scene = Scene()
    scene.add_vm()
    await scene.run(250)
    assert [at - NOW for at, _, _ in scene.server.writes] == [0.0, HEARTBEAT, 2 * HEARTBEAT]
    for at, _, entry in scene.server.writes:
        assert entry.keys() == {"name", "heartbeatTime", "message", "expectedCompletionTime"}
        assert entry["expectedCompletionTime"] == "2027-01-15T08:05:00Z"
        assert parse_instant(entry["heartbeatTime"]) == at
    assert scene.blocks == {Reason.COOLDOWN: 1}


async def test_no_heartbeat_is_before_the_turn() -> None:
    """The server refuses one before `startTime`; the time that we know may be two seconds late."""
    scene = Scene()
    scene.add_vm()
    scene.server.ahead = -2.0
    await scene.run(1)
    ((_, _, entry),) = scene.server.writes
    assert parse_instant(entry["heartbeatTime"]) == NOW


async def test_after_the_hold_the_vm_is_evicted_and_followed() -> None:
    """With the UID of the pod as precondition, and the names of those who ask."""
    scene = Scene()
    scene.add_vm()
    await scene.run(330)
    ((at, eviction),) = scene.server.evictions
    assert at == NOW + 300.0
    assert eviction["deleteOptions"] == {"preconditions": {"uid": "pod-db1"}}
    assert eviction["metadata"]["annotations"] == {
        "kubevirt-eviction-exporter.io/requesters": "example.com/drain"
    }
    assert scene.server.writes[-1][2]["message"].startswith("shop/db1 leaves n1: ")
    assert scene.held == [300.0]


async def test_a_refused_eviction_is_asked_for_again_after_longer_pauses() -> None:
    """Its message says how it was refused."""
    scene = Scene()
    scene.server.marks = False
    scene.add_vm(migration=None)
    await scene.run(120)
    assert [at - NOW for at, _ in scene.server.evictions] == [0.0, 15.0, 45.0, 105.0]
    assert scene.server.writes[-1][2]["message"] == (
        "If shop/db1 is evicted, it is migrated. Its eviction was refused: 429 Eviction triggered"
        " evacuation of VMI"
    )


async def test_another_message_waits_for_20_seconds() -> None:
    """A state that flaps is not written each second."""
    scene = Scene()
    vmi = scene.add_vm()
    await scene.run(5)
    scene.store.put(replace(vmi, evacuation_node="n1", eviction_requested_at=NOW))
    await scene.run(30)
    assert [at - NOW for at, _, _ in scene.server.writes] == [0.0, SHORTEST]


async def test_the_heartbeat_is_by_the_servers_clock_and_never_goes_back() -> None:
    """A clock of ours that is ahead would make the server refuse the next correct heartbeat."""
    scene = Scene()
    scene.server.ahead = -25.0
    scene.add_vm()
    (eviction,) = scene.store.evictions.list_turns(SETTINGS.name)
    scene.store.put(replace(eviction, started_at=NOW - 30.0))
    await scene.run(1)
    assert parse_instant(scene.server.writes[0][2]["heartbeatTime"]) == NOW - 25.0
    scene.server.ahead = -200.0
    await scene.run(130)
    assert parse_instant(scene.server.writes[1][2]["heartbeatTime"]) == NOW - 25.0


async def test_the_next_process_goes_on_without_a_write() -> None:
    """What another process has written counts, also in the counter of blocks."""
    first, scene = Scene(), Scene()
    first.add_vm()
    await first.run(1)
    scene.add_vm()
    (written,) = first.store.evictions.list_turns(SETTINGS.name)
    scene.store.put(written)
    scene.server.now = NOW + 60.0
    await scene.run(70)
    assert [at - NOW for at, _, _ in scene.server.writes] == [HEARTBEAT]
    assert not scene.blocks


@pytest.mark.parametrize("lost", ["lease", "contact"])
async def test_fail_open(lost: str) -> None:
    """Without the Lease, or before everything is read, nothing is written."""
    scene = Scene()
    scene.add_vm()
    if lost == "lease":
        scene.lease.held = False
    else:
        scene.responder.health.of(Resource.VMIS)[0].synced = False
    await scene.run(60)
    assert scene.server.writes == []
    assert scene.responder.status.turns is None


async def test_a_refusal_of_the_server_is_said() -> None:
    """A schema that is not ours: the status says why, until a write succeeds."""
    scene = Scene()
    scene.add_vm()
    scene.server.failure = Unsupported("422 status.responders: unknown field")
    await scene.run(2)
    assert scene.responder.status.trouble == "422 status.responders: unknown field"
    scene.server.failure = None
    await scene.run(30)
    assert scene.responder.status.trouble == ""


@pytest.mark.parametrize(
    "holds", [pytest.param(50, id="small"), pytest.param(1000, id="soak", marks=pytest.mark.soak)]
)
async def test_many_holds(holds: int, prove: Callable[[str], None]) -> None:
    """At most ten requests a second, and each hold is written long before Kubernetes gives up."""
    scene = Scene()
    for number in range(holds):
        scene.add_vm(f"db{number}", migration=a_state(start=NOW - 3_600.0, end=NOW - 60.0))
    await scene.run(600)
    times = defaultdict[str, list[float]](lambda: [NOW])
    for at, name, _ in scene.server.writes:
        times[name].append(at)
    seconds = Counter(at for at, _, _ in scene.server.writes)
    gaps = [after - before for row in times.values() for before, after in pairwise(row)]
    prove(
        f"{holds} holds for 600 s: {len(scene.server.writes)} heartbeats, at most"
        f" {max(seconds.values())} a second, and {max(gaps):g} s between two of one hold"
    )
    assert len(times) == holds
    assert max(seconds.values()) <= MOST_REQUESTS
    assert max(gaps) <= 2 * HEARTBEAT
