"""Runs a scenario: moves the simulated time, scrapes, and lets Prometheus evaluate the rules."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import IO, Any, Protocol

from exporter.counters import ReviewOutcome
from exporter.demo.controller import Rules
from exporter.engine.facts.policy import Policy
from tests.cluster import find_binary
from tests.generate.rules import RULES
from tests.months.cluster import BEGAN, DAY, Vm, World
from tests.months.descheduler import Descheduler
from tests.months.replica import Replica
from tests.months.truth import Truth
from tests.support.skipped_time import Loop


SUBSTEP = 5.0
LOST = 1 / 200
"""The share of scrapes that fail."""
JOB = "kubevirt-eviction-exporter/kubevirt-eviction-exporter"
NAMESPACE = "kubevirt-eviction-exporter"
ALERTMANAGER = RULES.parent / "alertmanager.yaml"


@dataclass(frozen=True, slots=True)
class Setup:
    """The size of a scenario, and who asks the exporter: the plugin, the webhook or nobody."""

    days: float
    nodes: int = 12
    vms: int = 180
    replicas: int = 1
    plugin: bool = True
    per_hour: float = 4.0
    """How many VMs the descheduler moves in an hour; 0: only those that the scenario names."""
    queues: bool = True
    """Whether KubeVirt makes the VMIMs of a drain at once, as from 1.9 on."""
    interval: float = 60.0
    """Seconds between two scrapes, and between two evaluations."""


class Scraped(Protocol):
    """Something that Prometheus scrapes."""

    name: str
    offset: float
    up: bool

    async def scrape(self) -> bytes:
        """The body of a scrape."""


@dataclass(slots=True, eq=False)
class Target:
    """A target of Prometheus's service discovery."""

    scraped: Scraped
    job: str = JOB
    namespace: str = NAMESPACE


@dataclass(frozen=True, slots=True)
class Fault:
    """What is wrong from `began` to `ended`, and the alerts of which one must fire."""

    about: str
    began: float
    ended: float
    alerts: frozenset[str]


@dataclass
class Bench:
    """The world of one run with its exporters, its descheduler and its Prometheus."""

    seed: int
    setup: Setup
    faults: list[Fault] = field(default_factory=list)
    gaps: list[tuple[float, float]] = field(default_factory=list)
    """From when to when Prometheus does not run."""
    lost: float = LOST

    def __post_init__(self) -> None:
        setup = self.setup
        rules = Rules(queues=setup.queues)
        self.world = World(self.seed, setup.nodes, setup.vms, rules)
        self.truth = Truth(self.world.cluster.store, lambda: self.world.now)
        self.replicas: list[Replica] = []
        self.targets: list[Target] = []
        for _ in range(setup.replicas):
            self.start_replica()
        plugin = self.replicas[0] if setup.plugin else None
        webhook = self.review if setup.replicas > 1 else None
        self.descheduler = Descheduler(self.world, setup.per_hour, plugin=plugin, webhook=webhook)
        self.add(self.descheduler, job="descheduler", namespace="kube-system")
        self.review_outcome: Callable[[], ReviewOutcome | None] = lambda: None
        """What the webhook answers instead of its verdict."""
        self.calls_webhook = True

    @property
    def exporter(self) -> Replica:
        """The first replica."""
        return self.replicas[0]

    def start_replica(self, policy: Policy | None = None) -> Target:
        """Start another replica, and scrape it."""
        replica = Replica(
            self.world,
            f"exporter-{len(self.replicas) + 1}",
            policy=policy,
            webhook=self.setup.replicas > 1,
        )
        self.replicas.append(replica)
        replica.polls = self.setup.plugin
        replica.start()
        return self.add(replica)

    def add(self, scraped: Scraped, *, job: str = JOB, namespace: str = NAMESPACE) -> Target:
        """Scrape something from now on."""
        target = Target(scraped, job, namespace)
        self.targets.append(target)
        return target

    def review(self, vm: Vm) -> bool:
        """The webhook's answer about an eviction, if the API server calls it."""
        up = [replica for replica in self.replicas if replica.up]
        if not up or not self.calls_webhook:
            return True
        replica = self.world.chance.choice(up)
        outcome = self.review_outcome()
        if outcome is None:
            allows = replica.allows(vm.namespace, vm.name)
            outcome = ReviewOutcome.ALLOWED if allows else ReviewOutcome.DENIED
        reviews = replica.counters.reviews
        if reviews is not None:
            reviews[outcome] += 1
        return outcome is not ReviewOutcome.DENIED

    def expect(self, about: str, began: float, ended: float, *alerts: str) -> None:
        """Say that something is wrong during this time, and which alerts may say so."""
        self.faults.append(Fault(about, began, ended, frozenset(alerts)))

    # Time

    def run(self, rules: Path = RULES, keep: Path | None = None) -> dict[str, Any]:
        """Run the scenario, and return what the evaluator has written.

        All samples are kept in the folder `keep`, if there is one.
        """
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "report.json"
            command = [
                str(find_binary("alert-months")),
                f"-rules={rules}",
                f"-alertmanager={ALERTMANAGER}",
                f"-tsdb={folder}/tsdb",
                f"-report={report}",
                f"-interval={self.setup.interval:g}s",
                *([f"-keep={keep}"] if keep else []),
            ]
            with subprocess.Popen(command, stdin=subprocess.PIPE) as evaluator:
                assert evaluator.stdin is not None
                with evaluator.stdin as stream, asyncio.Runner(loop_factory=Loop) as runner:
                    runner.run(self._run(stream))
            assert evaluator.returncode == 0, "the evaluator failed"
            answer: dict[str, Any] = json.loads(report.read_text())
            return answer

    async def _run(self, stream: IO[bytes]) -> None:
        interval, chance = self.setup.interval, random.Random(f"scrapes {self.seed}")
        known: list[Target] = []
        began = 0.0
        while began < self.setup.days * DAY:
            ended = began + interval
            for target in sorted(self.targets, key=lambda target: target.scraped.offset):
                await self._advance(began + target.scraped.offset * interval / 30)
                is_lost = chance.random() < self.lost
                if target not in self.targets or self._is_down(ended):
                    continue
                body = await target.scraped.scrape() if target.scraped.up and not is_lost else None
                stream.write(_head("scrape", self._stamp(), target, body))
                stream.write(body or b"")
            await self._advance(ended)
            up = sum(replica.up for replica in self.replicas)
            self.truth.up.append((ended, up, sum(target.job == JOB for target in self.targets)))
            for target in [target for target in known if target not in self.targets]:
                stream.write(_head("gone", self._stamp(), target, None))
            known = list(self.targets)
            if any(end <= ended < end + interval for _, end in self.gaps):
                stream.write(b"restart %d\n" % self._stamp())
            if not self._is_down(ended):
                stream.write(b"evaluate %d\n" % self._stamp())
            began = ended

    def _is_down(self, seconds: float) -> bool:
        return any(begin <= seconds < end for begin, end in self.gaps)

    def _stamp(self) -> int:
        return int(self.world.cluster.instant.timestamp() * 1000)

    async def _advance(self, seconds: float) -> None:
        """Move the time in small steps, so that the exporter's timers fire in between."""
        until = round(seconds, 3)  # the cluster counts in microseconds
        while self.world.now < until:
            now = min(self.world.now + SUBSTEP, until)
            await asyncio.sleep(now - self.world.now)
            self.world.cluster.step(BEGAN + timedelta(seconds=now))


def _head(what: str, at: int, target: Target, body: bytes | None) -> bytes:
    """A line for the evaluator: what happened when to which target, and the length of its body."""
    length = -1 if body is None else len(body)
    where = f"{target.job} {target.namespace} {target.scraped.name}"
    return f"{what} {at} {where} {length}\n".encode()
