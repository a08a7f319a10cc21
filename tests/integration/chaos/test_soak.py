"""Everything at once, for a long time: VMs that come and go, callers, and broken API servers."""

import asyncio
import json
import os
import random
import signal
import ssl
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import aiohttp
import pytest

from tests.cluster import poll
from tests.cluster.users import open_kubeconfig
from tests.integration.chaos.callers import Callers, background
from tests.support.api_servers import SimulatedStage
from tests.support.broken_apiservers import BROKEN, ApiServerAddress
from tests.support.certificates import write_certificate
from tests.support.churn import Churn
from tests.support.program import Program, program
from tests.support.reviews import DESCHEDULER


Prove: TypeAlias = Callable[[str], None]

MIB = 2**20
RATE = 250
"""Events a second."""
SEED = 53
RECOVERY = 60.0
"""This many seconds after the faults of the API server end, no watch has trouble."""
THREADS = 1 + min(32, (os.cpu_count() or 1) + 4)
"""The main thread, and those of asyncio's executor, which starts them when it needs them."""
OBJECTS = "kubevirt_eviction_exporter_objects"
PER_VM = ("virtualmachineinstances", "virtualmachineinstancemigrations", "pods")
SLACK = 32 * MIB
"""How many freed bytes the memory allocator may keep, as docs/reference.md says."""
KUBE = {
    "staleAfter": "30s",
    "readTimeout": "5s",
    "watchTimeout": "2m",
    "rejectedRetry": "1s",
    "historyInterval": "2s",
}


@dataclass(frozen=True)
class Size:
    """The seconds of the soak and of its parts, and the number of VMs."""

    seconds: float
    warm_up: float
    names: int
    alive: int
    broken: float
    sound: float
    """How long the API server is sound between two broken ones; 0: the next one follows at once."""
    renewal: float
    report: float
    quiet: float
    """How long nobody calls before a measurement, and how long series are kept."""


SMALL = Size(20, 6, 400, 150, broken=0.6, sound=0, renewal=12, report=10, quiet=3)
FULL = Size(7200, 240, 100_000, 2000, broken=20, sound=40, renewal=60, report=600, quiet=60)


@dataclass(frozen=True)
class Measured:
    """The exporter at one time: bytes, files, threads, tasks, objects, seconds and series."""

    resident: int
    files: int
    threads: int
    tasks: int
    objects: int
    longest_wait: float
    series: frozenset[str]

    def has_no_more_than(self, before: "Measured") -> bool:
        """Whether the series are equal, and nothing else has grown; memory may by `SLACK`."""
        return (
            self.series == before.series
            and self.resident <= before.resident + SLACK
            and self.files <= before.files
            and self.tasks <= before.tasks
            and self.threads <= max(before.threads, THREADS)
        )

    def __str__(self) -> str:
        return (
            f"RSS {self.resident / MIB:.1f} MiB, {self.files} fds, {self.threads} threads,"
            f" {self.tasks} tasks, {self.objects} objects, {len(self.series)} series,"
            f" longest wait {self.longest_wait:.2f} s"
        )


@dataclass
class Soak:
    """The exporter, its API server, and the VMs in it."""

    exporter: Program
    stage: SimulatedStage
    address: ApiServerAddress
    churn: Churn
    size: Size
    measurements: Path
    say: Prove
    broken: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    slowest_recovery: float = 0.0

    async def break_in_turn(self) -> None:
        """Replace the API server by each of the broken ones in turn, and wait for recovery."""
        loop = asyncio.get_running_loop()
        while True:
            for name, answer in BROKEN.items():
                self.address.broken = answer
                self.stage.server.cut()
                await asyncio.sleep(self.size.broken)
                self.broken[name] += 1
                if not self.size.sound:
                    continue
                await self.address.repair()
                began = loop.time()
                try:
                    await self.until_recovered(name)
                except TimeoutError as late:
                    self.problems.append(str(late))
                self.slowest_recovery = max(self.slowest_recovery, loop.time() - began)
                await asyncio.sleep(self.size.sound)

    async def until_recovered(self, after: str) -> None:
        """Wait until no watch has trouble, and all have had contact."""

        async def is_sound() -> bool:
            _, state = await self.exporter.get("/v1/status")
            return state["staleness"] == "fresh" and not any(
                watch["trouble"] for watch in state["resources"]
            )

        await poll(is_sound, within=RECOVERY, what=f"recovery from an API server that {after}")

    async def report(self, callers: Callers) -> None:
        """Print a line of measurements again and again."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        while True:
            await asyncio.sleep(self.size.report - (loop.time() - began) % self.size.report)
            measured = await self.measure()
            self.say(
                f"soak: {loop.time() - began:.0f} s: {measured}; slowest answer"
                f" {callers.slowest:.2f} s, slowest recovery {self.slowest_recovery:.1f} s,"
                f" {self.stage.server.store.revision} events, {self.churn.lives} VMs,"
                f" {self.broken.total()} broken servers, {callers.answered.total()} answers"
            )
            callers.slowest = self.slowest_recovery = 0.0

    async def measure(self) -> Measured:
        """Measure the exporter."""
        process = Path(f"/proc/{self.exporter.process.pid}")
        self.measurements.unlink(missing_ok=True)
        self.exporter.process.send_signal(signal.SIGUSR1)

        async def is_written() -> bool:
            return self.measurements.exists()

        await poll(is_written, what="a measurement")
        own = json.loads(self.measurements.read_text())
        async with (
            aiohttp.ClientSession() as session,
            session.get(self.exporter.metrics + "/metrics") as answer,
        ):
            text = await answer.text()
        return Measured(
            self.exporter.resident(),
            len([*(process / "fd").iterdir()]),
            len([*(process / "task").iterdir()]),
            own["tasks"],
            own["objects"],
            own["longest_wait"],
            frozenset(line.rpartition(" ")[0] for line in text.splitlines() if line[0] != "#"),
        )

    async def until_gone(self) -> None:
        """Delete every VM, and wait until the exporter has no object of them."""
        await self.churn.clear()

        async def is_gone() -> bool:
            counts = {await self.exporter.sample(OBJECTS, resource=resource) for resource in PER_VM}
            _, status = await self.exporter.get("/v1/status")
            return counts == {0} and not status["history"]["vmis"]

        await poll(is_gone, what="the end of the VMs")
        await asyncio.sleep(self.size.quiet)

    async def until_as(self, before: Measured) -> Measured:
        """Wait until the exporter is as it was before; returns the last measurement.

        After a line without end, 50 MB more stayed for two minutes in one of ten runs: about as
        long as `watchTimeout`, after which every watch has ended.
        """
        now = before

        async def is_so() -> bool:
            nonlocal now
            now = await self.measure()
            return now.has_no_more_than(before)

        try:
            await poll(is_so, within=200.0, what=f"a return to {before}")
        except TimeoutError as late:
            stay, gone = sorted(now.series - before.series), sorted(before.series - now.series)
            self.problems.append(f"{late}; series that stay: {stay[:9]}, that are gone: {gone[:9]}")
        return now


async def renew(directory: Path, seconds: float, renewed: Counter[str]) -> None:
    """Renew the certificate of the admission listener again and again."""
    while True:
        await asyncio.sleep(seconds)
        await asyncio.to_thread(write_certificate, directory, "localhost")
        renewed["certificates"] += 1


@pytest.mark.parametrize(
    "size",
    [
        pytest.param(SMALL, id="small", marks=pytest.mark.timeout(300)),
        pytest.param(FULL, id="soak", marks=[pytest.mark.soak, pytest.mark.timeout(9000)]),
    ],
)
async def test_everything_at_once(
    simulated: SimulatedStage, tmp_path: Path, prove: Prove, size: Size
) -> None:
    """After all VMs have gone, the exporter has the memory, files, tasks and series of before.

    Meanwhile each broken API server was in the place of the sound one, every caller was answered,
    and no task failed.
    """

    def say(line: str) -> None:
        prove(line)
        print(time.strftime("%H:%M:%S"), line, flush=True)

    rng = random.Random(SEED)
    write_certificate(tmp_path, "localhost")
    trust = ssl.create_default_context(cafile=tmp_path / "ca.crt")
    trust.check_hostname = False
    config = {
        "listen": dict.fromkeys(("query", "metrics", "admission"), "127.0.0.1:0"),
        "tls": {
            "admission": {
                "certFile": f"{tmp_path}/localhost.crt",
                "keyFile": f"{tmp_path}/localhost.key",
            }
        },
        "admission": {"mode": "enforce", "users": [DESCHEDULER], "observe": True},
        "history": f"file:{tmp_path / 'history'}",
        "kube": KUBE,
    }
    measurements = tmp_path / "measurements"
    churn = Churn(simulated.server.store, size.names, size.alive, rng)
    renewed: Counter[str] = Counter()
    async with ApiServerAddress(simulated.url).opened() as address:
        login = open_kubeconfig(tmp_path / "kubeconfig", address.url)
        environment = {"MEASUREMENTS": str(measurements), "SERIES_KEPT_FOR": f"{size.quiet:g}"}
        async with program(
            tmp_path,
            *("--kubeconfig", str(login)),
            config=config,
            environment=environment,
            module="tests.support.measured",
        ) as exporter:
            await exporter.ready()
            await exporter.get("/v1/vmis/ns0/none")  # for a series of the status 404
            soak = Soak(exporter, simulated, address, churn, size, measurements, say)
            callers = Callers(exporter, trust, rng, size.names)
            say(f"soak: before the first VM: {await soak.measure()}")

            async with callers.calling(simulated.server.store):
                await churn.run(RATE, size.warm_up)
            await soak.until_gone()
            before = await soak.measure()
            say(f"soak: after the warm-up: {before}")

            async with (
                callers.calling(simulated.server.store),
                background(
                    soak.break_in_turn(),
                    soak.report(callers),
                    renew(tmp_path, size.renewal, renewed),
                ),
            ):
                await churn.run(RATE, size.seconds)
                while set(soak.broken) != set(BROKEN):
                    await churn.run(RATE, 1.0)
            await address.repair()
            await soak.until_recovered("was broken")
            await soak.until_gone()
            after = await soak.until_as(before)
            say(f"soak: at the end: {after}")
            say(
                f"soak: {simulated.server.store.revision} events, {churn.lives} VMs,"
                f" {dict(callers.answered)}, {renewed['certificates']} certificates,"
                f" {soak.broken.total()} broken API servers, {len(exporter.output)} bytes of log"
            )
            assert await exporter.end() == 0
            assert not soak.problems
            assert not callers.failed
            assert len(exporter.events("certificate_renewed")) >= renewed["certificates"] > 0
            assert not [line for line in exporter.events() if line.get("exception")]
