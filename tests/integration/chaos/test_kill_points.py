"""`kill -9` at random points of a stream of migrations loses nothing that was stored."""

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import TypeAlias

import aiohttp
import pytest

from tests.cluster import VMIMS, VMIS, poll, vmi, vmim
from tests.integration.chaos import SEED
from tests.integration.chaos.replica import (
    Replica,
    ask,
    differences,
    replicas,
)
from tests.integration.chaos.stream import Stream
from tests.support.api_servers import RealStage
from tests.support.history_files import BRISK
from tests.support.program import Program


Prove: TypeAlias = Callable[[str], None]

STEPS = 12
"""The number of steps of every VM between two comparisons."""
LATEST = 0.6
"""The most seconds between a step and a kill; the history file is written every half second."""
_marks = count(1)


@dataclass
class Watched:
    """A namespace with replicas that are killed, and one replica that never is."""

    real: RealStage
    namespace: str
    unbroken: Replica
    keepers: list[Replica]
    forgetful: Replica
    promised: dict[tuple[str, str], str] = field(default_factory=dict)

    async def mark(self) -> str:
        """Create a VMI and a VMIM: a replica that has both has seen everything before them."""
        name = f"mark{next(_marks)}"
        await self.real.admin.create(VMIS, vmi(name, self.namespace))
        await self.real.admin.create(VMIMS, vmim(name, self.namespace, of=name))
        return name

    async def unmark(self, name: str) -> None:
        """Delete the VMI and the VMIM of a mark."""
        await self.real.admin.delete(VMIMS, self.namespace, name)
        await self.real.admin.delete(VMIS, self.namespace, name)

    async def acknowledged(self) -> None:
        """Wait until the unbroken replica has seen everything, and the `keepers` have stored it."""
        mark = await self.mark()
        await poll(lambda: self.has_seen(self.unbroken.now, mark), what="seen by the unbroken")
        for keeper in self.keepers:
            await poll(
                lambda k=keeper: self._acknowledges(k, mark),  # type: ignore[misc]
                what=f"acknowledged by {keeper.name}",
            )
        await self.unmark(mark)

    async def _acknowledges(self, keeper: Replica, mark: str) -> bool:
        life = keeper.lives
        try:
            process = keeper.now
            if not await self.has_seen(process, mark):
                return False
            seen_at = (await process.get("/v1/status"))[1]["asOf"]
            # Without a further change, a file that has the mark already is not written again.
            await self.unmark(await self.mark())

            async def is_written_or_dead() -> bool:
                _, body = await process.get("/v1/status")
                return keeper.lives != life or (body["history"]["writtenAt"] or "") > seen_at

            await poll(is_written_or_dead, what="the file written")
        except (aiohttp.ClientError, AssertionError):
            return False
        return keeper.lives == life

    async def has_seen(self, exporter: Program, mark: str) -> bool:
        """Whether this replica has seen a mark."""
        verdict = await exporter.verdict(self.namespace, mark, "filter", dryRun=True)
        return bool(verdict["reason"] == "migration_in_progress")

    async def promise(self, name: str) -> None:
        """Remember the request times that the `keepers` report now: they must not change later."""
        for keeper in self.keepers:
            requested_at = await poll(
                lambda k=keeper: self._requested_at(k, name),  # type: ignore[misc]
                what=f"the evacuation of {name} at {keeper.name}",
            )
            self.promised[keeper.name, name] = requested_at

    async def _requested_at(self, keeper: Replica, name: str) -> str | None:
        try:
            answers = await ask(keeper.now, [(self.namespace, name)])
        except aiohttp.ClientError:
            return None
        evacuation = answers[name].get("evacuation")
        return None if evacuation is None else str(evacuation["requestedAt"])

    async def compare(self, replica: Replica, stream: Stream) -> list[str]:
        """How the answers of a killed replica differ from those of the unbroken one."""
        names = stream.candidates(brief_alone=replica is self.forgetful)
        left, right = await asyncio.gather(ask(self.unbroken.now, names), ask(replica.now, names))
        for name in left:
            evacuation = right[name].get("evacuation")
            if evacuation is None or "evacuation" not in left[name] or stream.is_dated(name):
                continue
            # A request without a date keeps the time when the replica first saw it.
            left[name]["evacuation"]["requestedAt"] = self.promised[replica.name, name]
        return differences(left, right)


@pytest.mark.parametrize("points", [12, pytest.param(200, marks=pytest.mark.soak)])
@pytest.mark.timeout(3600)
async def test_a_killed_process_answers_as_one_that_never_was(
    real: RealStage, tmp_path: Path, prove: Prove, points: int
) -> None:
    """After each kill a replica gives the same answers as a replica that was never killed.

    One killed replica has a history file, and one has none. For the latter only the brief VMs are
    compared.
    """
    killed, happened = await kill_often(real, tmp_path, points=points, seed=SEED)
    lines = ", ".join(f"{times} {what}" for what, times in sorted(happened.items()))
    prove(f"kill points: {sum(killed.values())} {dict(killed)}, seed {SEED}, none differs; {lines}")

    assert sum(killed.values()) >= points
    assert happened["VMIM deleted"]
    assert happened["attempt failed"]


async def kill_often(
    real: RealStage, directory: Path, *, points: int, seed: int
) -> tuple[Counter[str], Counter[str]]:
    """Kill replicas this often; returns the kills by replica, and the stream's steps by kind."""
    rng = random.Random(seed)
    namespace = await real.make_namespace()
    login = ("--kubeconfig", str(real.login.kubeconfig))
    alone = {"namespaces": [namespace], "kube": BRISK}

    def replica(name: str, **config: object) -> Replica:
        return Replica(directory, *login, config={**alone, **config}, name=name)

    watched = Watched(
        real,
        namespace,
        unbroken=replica("unbroken"),
        keepers=[replica("file", history=f"file:{directory / 'history'}")],
        forgetful=replica("none"),
    )
    stream = Stream(
        real.admin,
        namespace,
        seed,
        acknowledge=watched.acknowledged,
        marked=watched.promise,
    )
    victims = [*watched.keepers, watched.forgetful]
    killed: Counter[str] = Counter()
    async with replicas(watched.unbroken, *victims):
        while sum(killed.values()) < points:
            begin = stream.steps
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(stream.play(STEPS))
                for victim in victims:
                    at, after = (
                        begin + rng.randrange(STEPS * len(stream.candidates())),
                        rng.uniform(0, LATEST),
                    )
                    tasks.create_task(kill_at(stream, victim, at, after))
            killed.update(victim.name for victim in victims)
            await quiet(watched, victims)
            for victim in victims:
                await equal(watched, victim, stream, f"seed {seed}, step {stream.steps}")
    return killed, stream.happened


async def kill_at(stream: Stream, victim: Replica, step: int, after: float) -> None:
    """Kill a process some time after a step of the stream, and restart it at once."""

    async def reached() -> bool:
        return stream.steps >= step

    await poll(reached, within=600, what=f"step {step}")
    await asyncio.sleep(after)
    await victim.kill()
    await victim.start()


async def quiet(watched: Watched, victims: list[Replica]) -> None:
    """Wait until every process has seen all events."""
    mark = await watched.mark()
    for replica in (watched.unbroken, *victims):
        await replica.now.ready()
        await poll(
            lambda r=replica: watched.has_seen(r.now, mark),  # type: ignore[misc]
            what=f"{replica.name} has seen everything",
        )
    await watched.unmark(mark)


async def equal(watched: Watched, victim: Replica, stream: Stream, when: str) -> None:
    """Compare the answers up to three times, because a cooldown may end between two requests."""
    differences: list[str] = []
    for _ in range(3):
        differences = await watched.compare(victim, stream)
        if not differences:
            return
    raise AssertionError("\n".join([f"{victim.name}, {when}:", *differences]))
