"""Two replicas share a history while one is killed, frozen or replaced, or clocks differ."""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from exporter.app import Listening, run
from exporter.kube.login import Login
from exporter.settings import read_settings
from tests.cluster import VMIS, poll, vmi
from tests.cluster.resources import CONFIG_MAPS
from tests.integration.chaos import SEED
from tests.integration.chaos.kept import counted, counted_in, shard_bytes
from tests.integration.chaos.load import load
from tests.integration.chaos.replica import (
    Replica,
    instant,
    replicas,
    until_alike,
    until_event,
    writer_of,
)
from tests.integration.chaos.stream import Stream
from tests.support.api_servers import RealStage
from tests.support.program import ANYWHERE, Program
from tests.support.stored_history import (
    BRISK,
    FAULTS,
    WRITER,
    a_keeper,
    keeping,
    migrate,
    until_counted,
    until_written,
)


Prove: TypeAlias = Callable[[str], None]


def alone(namespace: str, **kube: str) -> dict[str, Any]:
    """The settings of a replica that watches this namespace and stores its history there."""
    return {**keeping(namespace, **kube), "namespaces": [namespace]}


async def shards_in(real: RealStage, namespace: str) -> dict[str, int]:
    """Each VMI's number of migrations in the ConfigMaps. Raises if a shard is damaged."""
    listed = await real.admin.list(CONFIG_MAPS, namespace)
    return {
        uid: migrations
        for raw in shard_bytes(listed["items"]).values()
        for uid, migrations in counted(raw).items()
    }


async def versions_in(real: RealStage, namespace: str) -> dict[str, str]:
    """The resource version of every shard."""
    listed = (await real.admin.list(CONFIG_MAPS, namespace))["items"]
    return {one["metadata"]["name"]: one["metadata"]["resourceVersion"] for one in listed}


@asynccontextmanager
async def playing(stream: Stream) -> AsyncIterator[None]:
    """Run the stream during the block."""

    async def play() -> None:
        while True:
            await stream.play(3)

    task = asyncio.create_task(play())
    try:
        yield
    finally:
        task.cancel()
        done = (await asyncio.gather(task, return_exceptions=True))[0]
        assert isinstance(done, asyncio.CancelledError), done


@pytest.mark.parametrize(
    ("lease", "interval"),
    [
        pytest.param(2, "12s", id="brisk"),
        pytest.param(15, "15s", id="defaults", marks=pytest.mark.soak),
    ],
)
async def test_a_killed_leader_under_load(
    real: RealStage, tmp_path: Path, prove: Prove, lease: int, interval: str
) -> None:
    """After the leader was killed, the other replica writes, and every request is answered."""
    namespace = await real.make_namespace()
    login = ("--kubeconfig", str(await a_keeper(real.cluster, namespace)))
    config = alone(namespace, leaseDuration=f"{lease}s", historyInterval=interval)
    one, other = (Replica(tmp_path, *login, config=config, name=name) for name in "ab")
    unbroken = Replica(tmp_path, *login, config={"namespaces": [namespace]}, name="unbroken")
    stream = Stream(real.admin, namespace, SEED, lasting=3, brief=1)
    await stream.play(5)
    async with replicas(one, other, unbroken):
        leader = await writer_of(one, other)
        standby = other if leader is one else one
        async with load(lambda: (one, other), stream.candidates()) as requests:
            async with playing(stream):
                await poll(lambda: versions_in(real, namespace), what="a first history")
                await leader.kill()
                killed_at, before = time.monotonic(), await versions_in(real, namespace)

                async def has_written() -> bool:
                    return await versions_in(real, namespace) != before

                await poll(has_written, within=4 * lease + 30, what="a write after the kill")
                seconds = time.monotonic() - killed_at
                await poll(lambda: standby.now.sample(WRITER), what="the standby as the writer")
                await leader.start()
                await leader.now.ready()
            await until_alike(one.now, other.now, stream.candidates())
        assert requests["failed"] == 0
        assert requests["retried"] > 0, "no request was sent to the killed leader"
        await until_alike(unbroken.now, standby.now, stream.candidates(brief_alone=True))
        assert await shards_in(real, namespace)
    prove(
        f"leader killed: Lease of {lease} s, history written every {interval}, next write after"
        f" {seconds:.1f} s; {requests['answered']} requests, {requests['retried']} retried, none"
        " failed"
    )
    # A standby polls the Lease every eighth of its duration, and takes it if it has not changed for
    # 0.8 of the duration. The bound is loose, because the machine may be busy;
    # `tests/unit/kube/test_lease.py` tests the exact time.
    assert seconds <= lease + 8


async def test_a_frozen_holder_comes_back(real: RealStage, tmp_path: Path) -> None:
    """If the leader is frozen, the other replica takes over; later both have the same history."""
    rng = random.Random(SEED)
    namespace = await real.make_namespace()
    login = ("--kubeconfig", str(await a_keeper(real.cluster, namespace)))
    config = alone(namespace, historyInterval="200ms")
    several = [Replica(tmp_path, *login, config=config, name=name) for name in "ab"]
    uids = {}
    for name in ("db", "web", "mail"):
        uids[name] = (await real.admin.create(VMIS, vmi(name, namespace)))["metadata"]["uid"]
    one, other = several
    async with replicas(*several):
        for turn in range(2):
            await migrate_all(real, namespace, uids, ago=1000 - 200 * turn)
            await asyncio.sleep(rng.uniform(0, 0.4))
            during = migrate_all(real, namespace, uids, ago=900 - 200 * turn)
            await change_hands(several, during)
            await until_all_counted(several, namespace, uids, 2 * (turn + 1))
        for replica in several:
            await until_written(replica.now)
        # Change the leader once more, without events that would wake the thawed replica.
        await change_hands(several, asyncio.sleep(0))
        await until_alike(one.now, other.now, [(namespace, name) for name in uids])
        await until_written(one.now)
        assert await shards_in(real, namespace) == dict.fromkeys(uids.values(), 4)
        for replica in several:
            for fault in ("damaged", "not_written", "unknown_version", "too_large"):
                assert await replica.now.sample(FAULTS, fault=fault) == 0


async def change_hands(several: list[Replica], during: Awaitable[None]) -> None:
    """Freeze the holder of the Lease until another replica has it, then thaw it."""
    leader = await writer_of(*several)
    standby = several[1 - several.index(leader)]
    await leader.freeze()
    late = asyncio.create_task(leader.now.sample(WRITER))
    await during
    await poll(lambda: standby.now.sample(WRITER), what="the standby as the writer")
    await until_written(standby.now)
    leader.thaw()
    assert await late == 0, "the thawed replica still reported that it is the writer"
    await until_event(leader.now, "lease_lost")
    assert await writer_of(*several) is standby


async def migrate_all(real: RealStage, namespace: str, names: Iterable[str], *, ago: int) -> None:
    """Write one migration of each VM, which ended this many seconds ago."""
    for name in names:
        await migrate(real.admin, namespace, name, ago=[ago])


async def until_all_counted(
    several: Iterable[Replica], namespace: str, names: Iterable[str], migrations: int
) -> None:
    """Wait until each replica counts this many migrations of each VM."""
    for replica in several:
        for name in names:
            await until_counted(replica.now, namespace, name, migrations)


async def test_a_rolling_update_loses_nothing(real: RealStage, tmp_path: Path) -> None:
    """A rolling update under load loses no request and no migration."""
    namespace = await real.make_namespace()
    login = ("--kubeconfig", str(await a_keeper(real.cluster, namespace)))
    config = alone(namespace)
    serving = [Replica(tmp_path, *login, config=config, name=name) for name in "ab"]
    made = await real.admin.create(VMIS, vmi("db", namespace))
    stream = Stream(real.admin, namespace, SEED, lasting=2, brief=2)
    async with replicas(*serving), AsyncExitStack() as stack:
        await migrate(real.admin, namespace, "db", ago=range(200, 1000, 100))
        for replica in serving:
            await until_counted(replica.now, namespace, "db", 8)
        async with load(lambda: list(serving), stream.candidates()) as requests:
            async with playing(stream):
                for name in "cd":
                    new = Replica(tmp_path, *login, config=config, name=name)
                    await replace(serving, serving[0], new, stack)
                answered = requests["answered"]

                async def is_answered() -> bool:
                    return requests["answered"] > answered + 10

                await poll(is_answered, what="answers of the new replicas")
            for replica in serving:
                await until_counted(replica.now, namespace, "db", 8)
            await until_written((await writer_of(*serving)).now)
            assert (await shards_in(real, namespace))[made["metadata"]["uid"]] == 8
        assert requests["failed"] == 0


async def replace(
    serving: list[Replica], old: Replica, new: Replica, stack: AsyncExitStack
) -> None:
    """Replace a replica as a rolling update does: the new one is ready before the old one ends."""
    stack.push_async_callback(new.close)
    await new.start()
    await new.now.ready()
    serving.remove(old)
    serving.append(new)
    assert await old.now.end() == 0


class _Within(Program):
    """The exporter within this process, without signals and without a log of its own."""

    def __init__(self, listening: Listening) -> None:
        self.query, self.metrics = listening.query[0], listening.metrics[0]


@asynccontextmanager
async def in_process(
    login: Path, config: dict[str, Any], clock: Callable[[], float]
) -> AsyncIterator[Program]:
    """Run the exporter within this process, with a clock of its own."""
    stop, listening = asyncio.Event(), asyncio.get_running_loop().create_future()
    settings = read_settings({**ANYWHERE, **config})
    running = asyncio.create_task(
        run(
            settings,
            Login(kubeconfig=login),
            stop,
            clock=clock,
            on_listening=listening.set_result,
        )
    )
    asking = _Within(await listening)
    try:
        await asking.until("/readyz", lambda status, _: status == 200)
        yield asking
    finally:
        stop.set()
        await running


async def test_clocks_that_differ(real: RealStage) -> None:
    """Two replicas whose clocks differ by three seconds report the same `notBefore` and cooldown.

    Only the values that come from a replica's own clock differ, by about three seconds.
    """
    namespace = await real.make_namespace()
    login = await a_keeper(real.cluster, namespace)
    await real.admin.create(VMIS, vmi("db", namespace))
    await real.admin.create(VMIS, vmi("web", namespace))
    apart = 3.0
    async with (
        in_process(login, alone(namespace), time.time) as one,
        in_process(login, alone(namespace), lambda: time.time() + apart) as ahead,
    ):
        await migrate(real.admin, namespace, "db", ago=[100, 200, 300])
        evacuated = {"status": {"evacuationNodeName": "n1"}}
        await real.admin.merge(VMIS, namespace, "web", evacuated)
        for exporter in (one, ahead):
            await until_counted(exporter, namespace, "db", 3)
        left, right = await asyncio.gather(
            *(e.verdict(namespace, "db", dryRun=True) for e in (one, ahead))
        )
        assert left["notBefore"] == right["notBefore"]
        assert left["effectiveCooldownSeconds"] == right["effectiveCooldownSeconds"] == 3600
        assert abs(left["retryAfterSeconds"] - right["retryAfterSeconds"]) == pytest.approx(
            apart, abs=1
        )
        evacuations = [
            await e.until("/v1/evacuations", lambda _, body: body["evacuations"])
            for e in (one, ahead)
        ]
        early, late = (instant(answer["evacuations"][0]["requestedAt"]) for answer in evacuations)
        assert 0 <= late - early < apart + 1


async def test_a_clock_that_jumps(real: RealStage, tmp_path: Path) -> None:
    """If the clock jumps, the verdicts follow the new time, and the stored history is kept."""
    namespace = await real.make_namespace()
    login = await a_keeper(real.cluster, namespace)
    path = tmp_path / "history"
    config = {"namespaces": [namespace], "kube": BRISK, "history": f"file:{path}"}
    made = await real.admin.create(VMIS, vmi("db", namespace))
    hour = 3600.0
    ahead = 0.0
    async with in_process(login, config, lambda: time.time() + ahead) as exporter:
        await migrate(real.admin, namespace, "db", ago=[100, 200])
        await until_counted(exporter, namespace, "db", 2)
        before = await exporter.verdict(namespace, "db", dryRun=True)
        assert (before["reason"], before["effectiveCooldownSeconds"]) == ("cooldown", 1800)
        await until_written(exporter)

        ahead = hour
        assert (await exporter.verdict(namespace, "db", dryRun=True))["allowed"]
        await migrate(real.admin, namespace, "db", ago=[50])
        await until_counted(exporter, namespace, "db", 3)

        ahead = -hour
        # The ends are now further in the future than clocks may differ, so they do not count.
        await until_counted(exporter, namespace, "db", 0)
        assert (await exporter.verdict(namespace, "db", dryRun=True))["allowed"]
        await migrate(real.admin, namespace, "db", ago=[40])
        await real.admin.create(VMIS, vmi("web", namespace))
        await exporter.until(f"/v1/vmis/{namespace}/web", lambda status, _: status == 200)

        ahead = 0.0
        await until_counted(exporter, namespace, "db", 4)
        after = await exporter.verdict(namespace, "db", dryRun=True)
        assert (after["reason"], after["effectiveCooldownSeconds"]) == ("cooldown", 7200)
        await until_written(exporter)
    assert counted_in(path)[made["metadata"]["uid"]] == 4
