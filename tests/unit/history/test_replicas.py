"""Replicas that share a stored history agree in the end, after broken watches and lost answers."""

import asyncio
import json
import random
from base64 import b64decode
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import pytest

from exporter.engine.facts.changes import EvictionAdmitted
from exporter.engine.facts.model import ConfigMap, Resource
from exporter.engine.facts.trust import Trust
from exporter.engine.store.evacuation_ends import EvacuationEnd
from exporter.health import Health, HistoryHealth, Watched
from exporter.history.configmap import ConfigMapWriter
from exporter.history.format import shard_of
from exporter.history.reader import ConfigMapReader
from exporter.history.writer import WriteSignal
from exporter.kube.client import Absent, ApiServer, Conflict, Unreachable
from exporter.kube.lease import Lease
from exporter.settings import ConfigMaps
from tests.support.builders import NAME, NAMESPACE, UID, a_store
from tests.support.stored_history import FixedLease
from tests.support.stores import pending_changes
from tests.unit.history.life import Life, answers_of


INTERVAL = 15.0
PLACE = ConfigMaps("kev", "history")
ROUNDS = 12
"""After the last fault the replicas have this many intervals to agree."""


class ConfigMapServer:
    """ConfigMaps with versions. While `loses` is true, some requests and answers get lost."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.loses = True
        self.bodies: dict[str, dict[str, Any]] = {}
        self.log: list[bytes] = []

    async def read(self, _resource: Resource, _namespace: str, name: str) -> bytes:
        """The ConfigMap, if there is one."""
        self._lose()
        if name not in self.bodies:
            raise Absent("404")
        return json.dumps(self.bodies[name]).encode()

    async def apply(
        self, _resource: Resource, _namespace: str, name: str, body: dict[str, Any], **_: object
    ) -> bytes:
        """Write the ConfigMap if its version is unchanged."""
        self._lose()
        known, wanted = self.bodies.get(name), body["metadata"].get("resourceVersion")
        if wanted is not None and wanted != (known or body | {"metadata": {}})["metadata"].get(
            "resourceVersion"
        ):
            raise Conflict("409")
        version = str(len(self.log) + 1)
        self.bodies[name] = body | {"metadata": body["metadata"] | {"resourceVersion": version}}
        answer = json.dumps(self.bodies[name]).encode()
        self.log.append(answer)
        self._lose()
        return answer

    def _lose(self) -> None:
        if self.loses and self.rng.random() < 0.15:
            raise Unreachable("connection reset")


class Replica:
    """One replica: its store, reader, writer, and the state of its watches."""

    def __init__(self, life: Life, server: ConfigMapServer) -> None:
        self.server = server
        self.connected = True
        self.store = a_store(now=life.now)
        self.lease = FixedLease(held=False)
        self.changes = pending_changes(self.store, window=86_400.0)
        self.vmis = Watched(Resource.VMIS, None, synced=True)
        maps = Watched(Resource.CONFIGMAPS, PLACE.namespace, synced=True)
        status, signal = HistoryHealth(), WriteSignal()
        clock = partial(getattr, life, "now")
        self.reader = ConfigMapReader(self.changes, maps, status, signal, PLACE, clock=clock)
        self.writer = ConfigMapWriter(
            self.changes,
            Health(180.0, 600.0, [self.vmis, maps]),
            status,
            signal,
            cast("ApiServer", server),
            reader=self.reader,
            lease=cast("Lease", self.lease),
            interval=INTERVAL,
            clock=clock,
        )
        status.loaded = True
        self._read = 0

    def list(self, life: Life) -> None:
        """List the cluster again."""
        self.store.now = life.now
        for fact in life.objects():
            self.store.put(fact)
        self.store.retain(Resource.VMIMS, {NAMESPACE: set(life.vmims)}, None)
        self.connected = True

    async def read(self) -> None:
        """Read the events of the ConfigMaps that were not read yet."""
        for answer in self.server.log[self._read :]:
            body = json.loads(answer)
            metadata = body["metadata"]
            data = {key: b64decode(value) for key, value in body["binaryData"].items()}
            version = metadata["resourceVersion"]
            fact = ConfigMap(
                namespace=PLACE.namespace, name=metadata["name"], version=version, data=data
            )
            async with self.reader.lock:
                await self.reader.merge(shard_of(UID), fact)
        self._read = len(self.server.log)


class Trial:
    """Random changes of one VM; each replica misses some of them.

    `is_steady`: the last replica misses nothing. `ended` counts the evacuations that have ended,
    `counted` has the ends that the replicas have counted.
    """

    def __init__(self, seed: int, count: int, *, is_steady: bool = False) -> None:
        self.is_steady = is_steady
        self.ended = 0
        self.counted: list[EvacuationEnd] = []
        self.rng = random.Random(seed)
        self.life = Life(seed)
        self.server = ConfigMapServer(self.rng)
        self.replicas = [self.start() for _ in range(count)]

    def start(self) -> Replica:
        """Start a replica."""
        replica = Replica(self.life, self.server)
        replica.changes.count_end = self.counted.append
        return replica

    async def run(self) -> int:
        """Change the VM, end all faults, and compare the replicas. Returns the number of writes."""
        for replica in self.replicas:
            replica.list(self.life)
        for _ in range(self.rng.randrange(10, 60)):
            self.evict()
            marked = self.life.marked
            self.life.live(*(one.store for one in self.replicas if one.connected))
            self.ended += bool(marked) and not self.life.marked
            if self.rng.random() < 0.05:
                self.rng.choice(self.replicas).lease.held ^= True
            if self.rng.random() < 0.03:
                self.replicas[0] = self.start()
                await self.replicas[0].read()
                self.replicas[0].list(self.life)
            for replica in self.replicas:
                await self.trouble(replica)
        known = await self.settle()
        self.compare(known)
        return len(self.server.log)

    def evict(self) -> None:
        """Let two users evict the VM. The review of each eviction goes to one replica."""
        for user in ("alice", "bob"):
            replica = self.rng.choice(self.replicas)
            change = EvictionAdmitted(NAMESPACE, "virt-launcher-db1-x", user)
            replica.store.apply(change, self.life.now)

    async def trouble(self, replica: Replica) -> None:
        """Break or restore the watch of a replica, or let it read or write, at random."""
        steady = self.replicas[-1] if self.is_steady else None
        if replica is not steady and self.rng.random() < 0.2:
            replica.connected = not replica.connected
            if replica.connected:
                replica.list(self.life)
        if replica.connected:
            replica.vmis.contact = self.life.now
        if self.rng.random() < 0.7:
            await replica.read()
        if self.rng.random() < 0.6:
            await replica.writer.flush()

    async def settle(self) -> set[str]:
        """Run `ROUNDS` intervals without faults; returns the migrations known before them."""
        self.server.loses = False
        for number, replica in enumerate(self.replicas):
            replica.list(self.life)
            replica.lease.held = number == 0
        known = set[str]().union(*map(migrations_of, self.replicas))
        for _ in range(ROUNDS):
            self.written = len(self.server.log)
            self.life.now += INTERVAL
            for replica in self.replicas:
                replica.vmis.contact = self.life.now
                await replica.read()
                await replica.writer.flush()
        return known

    def compare(self, known: set[str]) -> None:
        """Check that all replicas agree, know everything, and write nothing more."""
        expected = answers_of(self.replicas[0].store, self.life.now)
        for replica in self.replicas:
            assert answers_of(replica.store, self.life.now) == expected
            assert migrations_of(replica) == known
            assert replica.changes.unwritten_since is None
        assert len(self.server.log) == self.written


def migrations_of(replica: Replica) -> set[str]:
    """The migrations that a replica knows."""
    evidence = replica.store.evidence(NAMESPACE, NAME, Trust())
    assert evidence is not None
    return set(evidence.history.records())


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("runs", [50, pytest.param(1_000, id="soak", marks=pytest.mark.soak)])
def test_each_evacuation_is_counted_once(
    prove: Callable[[str], None], runs: int, count: int
) -> None:
    """Each end that one replica sees is counted once, whoever holds the Lease and is killed."""
    ended, wrong = 0, dict[int, tuple[int, int]]()
    for seed in range(runs):
        trial = Trial(seed, count, is_steady=True)
        trial.server.loses = False
        asyncio.run(trial.run())
        ended += trial.ended
        if len(trial.counted) != trial.ended:
            wrong[seed] = trial.ended, len(trial.counted)
    assert not wrong, f"by seed: ended and counted: {wrong}"
    assert ended >= runs
    prove(f"{runs} lives with {count} replicas: {ended} evacuations ended, each is counted once")


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("runs", [50, pytest.param(1_000, id="soak", marks=pytest.mark.soak)])
def test_replicas_agree_in_the_end(prove: Callable[[str], None], runs: int, count: int) -> None:
    """All replicas agree in the end, even if each of them missed different events."""
    writes = 0
    for seed in range(runs):
        try:
            writes += asyncio.run(Trial(seed, count).run())
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
    prove(f"{runs} lives with {count} replicas: none ends in disagreement; {writes} writes")


@pytest.mark.parametrize(("seed", "count"), [(125, 2), (281, 3)])
def test_one_replica_missed_that_an_evacuation_ended(seed: int, count: int) -> None:
    """It presumes the next evacuation, which another replica has read. In the end they agree."""
    asyncio.run(Trial(seed, count).run())


@pytest.mark.parametrize(
    ("seed", "count"),
    [
        pytest.param(158, 3, id="presumed"),
        pytest.param(783, 3, id="presumed-twice"),
        pytest.param(937, 3, id="presumed-by-another-replica"),
        pytest.param(537, 2, id="first-seen-in-the-stored-history"),
        pytest.param(462, 3, id="end-seen-late"),
        pytest.param(986, 3, id="two-ends-in-two-writes"),
        pytest.param(244, 3, id="two-ends-in-one-write"),
    ],
)
def test_an_end_that_replicas_see_differently_is_counted_once(seed: int, count: int) -> None:
    """Replicas that learn of an evacuation or its end at other times count each end once."""
    trial = Trial(seed, count, is_steady=True)
    trial.server.loses = False
    asyncio.run(trial.run())
    assert len(trial.counted) == trial.ended
