"""Random lives of a cluster: every answer says the same of evacuations, drains and VMs.

Two replicas watch a cluster in which nodes are cordoned and tainted, VMs are evicted by everybody,
migrations succeed and fail, replicas restart, and clocks are wrong or set. After each step all
answers of both replicas are compared with each other and with what the cluster really did.
"""

import random
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import cast

import pytest
from aiohttp import web
from msgspec import Struct, field
from msgspec.structs import replace

from exporter.app import build_service
from exporter.cli.explain import show_vmi
from exporter.counters import Counters
from exporter.engine.evacuations.drain_outcomes import DrainOutcome
from exporter.engine.facts.changes import Listed, NodesSeen, Observed, Removed
from exporter.engine.facts.evidence import SavedVmi
from exporter.engine.facts.model import (
    DRAIN_TAINT,
    Checkpoint,
    Fact,
    KubeVirtSettings,
    MigrationState,
    Node,
    Outcome,
    Priority,
    Resource,
    Taint,
    Trigger,
    Vmi,
    Vmim,
)
from exporter.engine.store.store import Store
from exporter.health import Health, list_watches
from exporter.server.api.schemas import VmiAnswer
from exporter.server.page.handlers import answer_page
from exporter.settings import Limits, Settings
from exporter.words.evacuations import LEFT_OVER
from tests.support.builders import NOW
from tests.unit.cli.answers import PIPED


NAMESPACE = "shop"
NODES = ("n1", "n2", "n3")
VMS = tuple(f"db{number}" for number in range(5))
SERIES = 3
"""`limits.vmiSeries`: fewer than there are VMs."""
LONGEST_IDLE = 4 * 1800.0
"""Without a departure for four times `stuck.after`, a drain is stuck whatever its VMs do."""
STEPS = 100
"""How many steps a life has."""
PRIORITIES = {
    "person": Priority.SYSTEM_CRITICAL,
    "descheduler": Priority.SYSTEM_MAINTENANCE,
    "nobody knows": None,
}
_SERIES = re.compile(r"^(\w+)(?:\{(.*)\})? (\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')


class Replica:
    """One exporter; `ahead` is how far its clock is ahead of the true time."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self.ahead = 0.0
        self.left_behind: set[str] = set()
        """The nodes whose uncordon it saw while they kept their taint."""
        self.start()

    def now(self) -> float:
        """The time by its own clock."""
        return self._world.time + self.ahead

    def start(self, saved: dict[str, SavedVmi] | None = None) -> None:
        """Start the process, which lists the cluster; `saved` is its stored history."""
        settings = Settings(limits=Limits(vmi_series=SERIES))
        self.store = Store(endings_kept=settings.policy.endings_kept, awaited=saved)
        self.health = Health(180.0, 600.0, list_watches(()), None)
        self.service = build_service(
            settings, self.store, self.health, counters=Counters(), events=None, clock=self.now
        )
        self.left_behind.clear()
        kinds = [*self._world.kinds()]
        self._world.chance.shuffle(kinds)
        for resource, facts in kinds:
            names = defaultdict[str, set[str]](set)
            for fact in facts:
                names[getattr(fact, "namespace", "")].add(getattr(fact, "name", ""))
                self.store.apply(Observed(fact), self.now())
            self.store.apply(Listed(resource, names, None), self.now())
        self.store.apply(NodesSeen(seen=True), self.now())

    def set_clock(self, step: float) -> None:
        """Set its clock."""
        self.ahead += step
        self.store.shift(step)
        self.health.shift(step)

    def is_closed(self, node: str) -> bool:
        """Whether it has to take this node for cordoned or tainted."""
        fact = self._world.nodes[node]
        return not fact.schedulable or (bool(fact.taints) and node not in self.left_behind)


class World(Struct):
    """The cluster. `server_ahead` and `node_ahead` are how far its clocks are ahead."""

    chance: random.Random
    time: float = NOW
    server_ahead: float = 0.0
    node_ahead: dict[str, float] = field(default_factory=dict)
    is_modern: bool = True
    nodes: dict[str, Node] = field(
        default_factory=lambda: {name: Node(name=name) for name in NODES}
    )
    vmis: dict[str, Vmi] = field(default_factory=dict)
    vmims: dict[str, Vmim] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    """Who asked for the evacuation of each VM."""
    copied: dict[str, float] = field(default_factory=dict)
    """The longest time that a migration of a VM took, from Scheduled to its end, by UID."""
    replicas: list[Replica] = field(default_factory=list)
    serial: int = 0

    def kinds(self) -> Iterator[tuple[Resource, list[Fact]]]:
        """All objects by resource."""
        yield Resource.KUBEVIRTS, [KubeVirtSettings()]
        yield Resource.NODES, [*self.nodes.values()]
        yield Resource.VMIS, [*self.vmis.values()]
        yield Resource.VMIMS, [*self.vmims.values()]
        yield Resource.PODS, []
        yield Resource.BUDGETS, []

    def write(self, fact: Vmi | Vmim | Node) -> None:
        """Write an object, which each replica reads."""
        match fact:
            case Vmi():
                self.vmis[fact.name] = fact
            case Vmim():
                self.vmims[fact.name] = fact
            case Node():
                self._record_uncordon(fact)
                self.nodes[fact.name] = fact
        for replica in self.replicas:
            replica.store.apply(Observed(fact), replica.now())

    def delete(self, resource: Resource, name: str) -> None:
        """Delete an object."""
        for replica in self.replicas:
            replica.store.apply(Removed(resource, NAMESPACE, name), replica.now())

    def step(self) -> str:
        """Do something at random; says what it was."""
        self.time += self.chance.choice((1.0, 5.0, 30.0, 400.0, 2000.0, 9000.0))
        act = self.chance.choice(_ACTS)
        act(self)
        return act.__name__

    def server_now(self) -> float:
        """The time by the control plane's clock, in whole seconds."""
        return float(int(self.time + self.server_ahead))

    def _record_uncordon(self, node: Node) -> None:
        known = self.nodes[node.name]
        for replica in self.replicas:
            if not known.schedulable and node.schedulable and node.taints == known.taints:
                replica.left_behind.add(node.name)
            elif not node.schedulable or node.taints != known.taints:
                replica.left_behind.discard(node.name)

    # What happens

    def create(self) -> None:
        """Create a VM, perhaps under the name of one that is gone."""
        missing = [name for name in VMS if name not in self.vmis]
        if missing:
            self.serial += 1
            vmi = Vmi(
                namespace=NAMESPACE,
                name=self.chance.choice(missing),
                uid=f"vmi-{self.serial}",
                created=self.server_now(),
                node=self.chance.choice(NODES),
                eviction_strategy=self.chance.choice(("LiveMigrate", "LiveMigrate", "External")),
                migratable=self.chance.random() < 0.8,
                phase="Running",
            )
            self.write(vmi)

    def end(self) -> None:
        """Delete a VM with its migrations."""
        if vmi := self._choose():
            del self.vmis[vmi.name]
            self.delete(Resource.VMIS, vmi.name)
            for vmim in [vmim for vmim in self.vmims.values() if vmim.vmi_name == vmi.name]:
                del self.vmims[vmim.name]
                self.delete(Resource.VMIMS, vmim.name)

    def cordon(self) -> None:
        """Cordon a node, or uncordon it."""
        node = self.nodes[self.chance.choice(NODES)]
        is_dated = node.schedulable and self.chance.random() < 0.8
        at = self.server_now() if is_dated else None
        self.write(replace(node, schedulable=not node.schedulable, cordoned_at=at))

    def taint(self) -> None:
        """Add the drain taint to a node, or remove it."""
        node = self.nodes[self.chance.choice(NODES)]
        at = self.server_now() if self.chance.random() < 0.5 else None
        self.write(replace(node, taints=() if node.taints else (Taint(DRAIN_TAINT, at),)))

    def evict(self) -> None:
        """Somebody evicts a VM."""
        if (vmi := self._choose()) and not vmi.evacuation_node:
            source = self.sources[vmi.uid] = self.chance.choice([*PRIORITIES])
            by_descheduler = self.is_modern and source == "descheduler"
            at = self.server_now() if self.is_modern else None
            self.write(
                replace(
                    vmi,
                    evacuation_node=vmi.node,
                    eviction_requested_at=at,
                    evicted_by_descheduler=by_descheduler,
                )
            )

    def cancel(self) -> None:
        """Somebody cancels an evacuation."""
        if (vmi := self._choose()) and vmi.evacuation_node:
            self.write(replace(vmi, evacuation_node="", eviction_requested_at=None))

    def attempt(self) -> None:
        """KubeVirt tries to evacuate a VM, or goes on with that."""
        vmi = self._choose()
        if vmi is None:
            return
        going = (v for v in self.vmims.values() if v.vmi_name == vmi.name and not v.finished)
        vmim = next(going, None)
        if vmim is None:
            if vmi.evacuation_node or self.nodes[vmi.node].taints:
                self._begin(vmi)
        elif vmim.phase == "Pending":
            self._hand_off(vmi, vmim)
        else:
            self._finish(vmi, vmim)

    def forget(self) -> None:
        """KubeVirt deletes the oldest migration that has ended, but never the VM's last one."""
        last = {vmi.migration.uid for vmi in self.vmis.values() if vmi.migration is not None}
        ended = (vmim for vmim in self.vmims.values() if vmim.finished and vmim.uid not in last)
        oldest = next(ended, None)
        if oldest is not None:
            del self.vmims[oldest.name]
            self.delete(Resource.VMIMS, oldest.name)

    def restart(self) -> None:
        """Restart a replica, half of the times with what its stored history had."""
        replica = self.chance.choice(self.replicas)
        keeps = self.chance.random() < 0.5
        entries = {vmi.uid: replica.store.save(vmi.uid) for vmi in self.vmis.values() if keeps}
        replica.start({uid: entry for uid, entry in entries.items() if entry is not None})

    def set_clock(self) -> None:
        """Set a replica's clock."""
        step = self.chance.choice((-3600.0, -40.0, 40.0, 3600.0))
        self.chance.choice(self.replicas).set_clock(step)

    def _choose(self) -> Vmi | None:
        return self.chance.choice([*self.vmis.values()]) if self.vmis else None

    def _begin(self, vmi: Vmi) -> None:
        self.serial += 1
        source = self.sources.get(vmi.uid, "person") if vmi.evacuation_node else "person"
        vmim = Vmim(
            namespace=NAMESPACE,
            name=f"evac-{self.serial}",
            uid=f"evac-{self.serial}",
            vmi_name=vmi.name,
            created=self.server_now(),
            phase="Pending",
            evacuates=vmi.node,
            trigger=Trigger.EVACUATION,
            priority=PRIORITIES[source] if self.is_modern else None,
        )
        self.write(vmim)

    def _hand_off(self, vmi: Vmi, vmim: Vmim) -> None:
        scheduled_at = self.server_now()
        self.write(replace(vmim, phase="Running", handed_off=True, scheduled_at=scheduled_at))
        target = self.chance.choice([name for name in NODES if name != vmi.node])
        state = MigrationState(
            uid=vmim.uid,
            start=float(int(self.time + self.node_ahead[vmi.node])),
            source_node=vmi.node,
            target_node=target,
        )
        self.write(replace(vmi, migration=state))

    def _finish(self, vmi: Vmi, vmim: Vmim) -> None:
        state = vmi.migration
        if state is None or state.uid != vmim.uid or vmim.scheduled_at is None:
            return
        outcome = self.chance.choice((Outcome.SUCCEEDED, Outcome.FAILED))
        end = float(int(self.time + self.node_ahead[state.target_node]))
        ended = replace(state, ended=True, end=end, outcome=outcome)
        vmi = replace(vmi, migration=ended)
        if outcome is Outcome.SUCCEEDED:
            vmi = replace(
                vmi, node=state.target_node, evacuation_node="", eviction_requested_at=None
            )
        self.write(vmi)
        self.time += self.chance.choice((0.0, 2.0, 7200.0))
        finished_at = self.server_now()
        took = finished_at - vmim.scheduled_at
        self.copied[vmi.uid] = max(took, self.copied.get(vmi.uid, 0.0))
        self.write(
            replace(
                vmim,
                phase="Succeeded" if outcome is Outcome.SUCCEEDED else "Failed",
                finished=True,
                finished_at=finished_at,
                start=state.start,
                end=end,
                outcome=outcome,
            )
        )


_ACTS: tuple[Callable[[World], None], ...] = (
    *(World.create,) * 3,
    World.end,
    *(World.cordon,) * 3,
    World.taint,
    *(World.evict,) * 4,
    World.cancel,
    *(World.attempt,) * 10,
    World.forget,
    World.restart,
    World.set_clock,
)


def a_world(seed: int) -> World:
    """A cluster with two replicas, by KubeVirt 1.6 or 1.9, perhaps with wrong clocks."""
    chance = random.Random(seed)
    ahead = {name: chance.choice((0.0, 0.0, 7200.0, -2700.0)) for name in NODES}
    world = World(chance, node_ahead=ahead, is_modern=chance.random() < 0.7)
    world.server_ahead = chance.choice((0.0, 0.0, 600.0))
    world.replicas += [Replica(world), Replica(world)]
    return world


async def read(replica: Replica) -> SimpleNamespace:
    """All answers of a replica at one instant."""
    now, service = replica.now(), replica.service
    for watched in replica.health.watched:
        watched.synced, watched.contact = True, now
    snapshot = await service.take_snapshot()
    evacuations = await service.describe_evacuations(snapshot)
    count = await service.count_outcomes(snapshot)
    forecasts = await service.forecast_nodes(count, {})
    status = service.describe_status({}, count.counts, now).vmis
    assert status is not None
    parts, _ = await service.render_metrics("")
    series = [
        (name, dict(_LABEL.findall(labels)), float(value))
        for name, labels, value in _SERIES.findall(b"".join(parts).decode())
    ]
    request = cast("web.Request", SimpleNamespace(query={}))
    page = (await answer_page(service, request, named=True, linked=True)).text
    vmis = {key[1]: service.describe_vmi(*key, now) for key in replica.store.keys()}  # noqa: SIM118
    return SimpleNamespace(
        now=now,
        status=status,
        blocked=(await service.blocked.read(None)).entries,
        evacuations=evacuations.evacuations,
        forecasts={forecast.node: forecast for forecast in forecasts},
        nodes={node: service.describe_node(node, now) for node in replica.store.nodes if node},
        vmis={name: vmi for name, vmi in vmis.items() if vmi is not None},
        series=series,
        page=page or "",
    )


class Findings(list[str]):
    """What one answer says and another does not."""

    def compare(self, what: str, answer: object, other: object) -> None:
        """Note a difference."""
        if answer != other:
            self.append(f"{what}: {answer!r} and {other!r}")

    def expect(self, what: str, *, holds: bool) -> None:
        """Note what does not hold."""
        if not holds:
            self.append(f"not so: {what}")


async def find_contradictions(world: World, replica: Replica) -> list[str]:
    """What one answer of a replica says and another does not, or the cluster did not."""
    answers, findings = await read(replica), Findings()
    compare_vms(answers, world, findings)
    compare_drains(answers, replica, findings)
    compare_series(answers, world, findings)
    return findings


def compare_vms(answers: SimpleNamespace, world: World, findings: Findings) -> None:
    """What the answers say of single VMs."""
    findings.compare("VMs in /v1/vmis and in the cluster", answers.vmis.keys(), world.vmis.keys())
    blocked = {(o.name, o.checkpoint): (o.reason, o.not_before) for o in answers.blocked}
    evacuating = {evacuation.name: evacuation for evacuation in answers.evacuations}
    for name, vmi in answers.vmis.items():
        findings.compare(f"{name}, alone and in the list", vmi.evacuation, evacuating.get(name))
        for checkpoint, verdict in (
            (Checkpoint.FILTER, vmi.verdicts.filter),
            (Checkpoint.PRE_EVICTION, vmi.verdicts.pre_eviction),
        ):
            held = blocked.get((name, checkpoint), (None, None))
            findings.compare(f"{name} at {checkpoint}", (verdict.reason, verdict.not_before), held)
            is_leaving, is_stuck = vmi.evacuation is not None, _is_stuck(vmi)
            findings.compare(f"{name} leaves", verdict.evacuating, is_leaving)
            findings.compare(f"{name} stuck", verdict.stuck, is_stuck)
        is_left = vmi.evacuation is not None and vmi.evacuation.leftover
        findings.compare(f"{name} left over", LEFT_OVER in show_vmi(vmi, PIPED), is_left)
        if vmi.cooldown is not None:
            took, most = vmi.cooldown.duration_seconds, world.copied.get(vmi.vmi_uid, 0.0)
            findings.expect(f"{name} took {took} s, at most {most}", holds=took <= most)
    left = sum(evacuation.leftover for evacuation in answers.evacuations)
    findings.compare("left over on the page", answers.page.count('data-field="leftover"'), left)


def _is_stuck(vmi: VmiAnswer) -> bool:
    trouble = vmi.evacuation or vmi.move
    return trouble is not None and trouble.stuck


def compare_drains(answers: SimpleNamespace, replica: Replica, findings: Findings) -> None:
    """What the answers say of drains."""
    evacuating = {evacuation.name: evacuation for evacuation in answers.evacuations}
    drained = Counter(
        evacuation.node
        for evacuation in answers.evacuations
        if not evacuation.leftover
        and evacuation.node == evacuation.evacuation_node_name
        and (replica.is_closed(evacuation.node) or evacuation.source == "other")
    )
    gauges = {
        (name.removeprefix("kubevirt_node_drain_"), labels["node"]): value
        for name, labels, value in answers.series
        if name.startswith("kubevirt_node_drain_")
    }
    outcomes: dict[str, DrainOutcome] = {}
    for node, answer in answers.nodes.items():
        drain, forecast = answer.drain, answers.forecasts[node].progress
        kept = [vm for vm in answer.candidates if vm.outcome in ("stays", "fails")]
        refused = [vm for vm in kept if vm.name not in evacuating]
        remaining = drained[node] + len(refused) * replica.is_closed(node)
        findings.compare(f"VMs in the drain of {node}", drain.remaining if drain else 0, remaining)
        for metric, value, listed in (
            ("remaining_vmis", drain and drain.remaining, forecast and forecast.remaining),
            ("left_vmis", drain and drain.left, forecast and forecast.left),
            ("failing_vmis", drain and drain.failing, forecast and forecast.failing),
            (
                "started_timestamp_seconds",
                drain and drain.since.timestamp(),
                forecast and forecast.since,
            ),
            ("stuck", gauges.get(("stuck", node)), forecast and float(forecast.stuck)),
        ):
            findings.compare(f"{metric} of {node}", gauges.get((metric, node)), value)
            findings.compare(f"{metric} of {node} in the list", listed, value)
        if forecast is not None and forecast.stuck:
            idle = answers.now - max(forecast.since, forecast.last_left_at or 0.0)
            stuck = any(
                evacuation.stuck for evacuation in answers.evacuations if evacuation.node == node
            )
            is_right = stuck or bool(kept) or idle >= LONGEST_IDLE
            findings.expect(f"{node} is stuck for a reason", holds=is_right)
        outcomes |= {vm.name: vm.outcome for vm in answer.candidates}
    drains = {name: vmi.drain for name, vmi in answers.vmis.items() if vmi.node}
    findings.compare("outcomes of VMs and of nodes", drains, outcomes)
    counts = dict.fromkeys(DrainOutcome, 0) | Counter(outcomes.values())
    findings.compare("outcomes of VMs and of the status", answers.status.drain, counts)
    findings.compare("VMs of the status", answers.status.known, len(outcomes))
    findings.compare(
        "drains of other nodes", {node for _, node in gauges} - answers.nodes.keys(), set()
    )


def compare_series(answers: SimpleNamespace, world: World, findings: Findings) -> None:
    """Which VMs have series."""
    shown = {
        labels["name"]
        for _, labels, _ in answers.series
        if labels.get("namespace") == NAMESPACE and "name" in labels
    }
    findings.expect(f"{len(shown)} VMs have series, at most {SERIES}", holds=len(shown) <= SERIES)
    findings.compare("series of VMs that are gone", shown - world.vmis.keys(), set())
    lacking = {evacuation.name for evacuation in answers.evacuations} - shown
    findings.expect(f"{lacking} have series", holds=not lacking or len(shown) == SERIES)


@pytest.mark.parametrize(
    "states",
    [
        pytest.param(40, id="small"),
        pytest.param(100_000, id="soak", marks=[pytest.mark.soak, pytest.mark.timeout(6 * 3600)]),
    ],
)
async def test_no_two_answers_disagree(states: int, prove: Callable[[str], None]) -> None:
    """At every instant all answers agree on what is left over, drained, stuck and has series."""
    seen = seed = 0
    while seen < states:
        world, steps = a_world(seed), list[str]()
        for _ in range(STEPS):
            steps.append(world.step())
            for replica in world.replicas:
                wrong = await find_contradictions(world, replica)
                assert not wrong, f"seed {seed}, after {len(steps)} steps, {steps[-3:]}: {wrong}"
                seen += 1
        seed += 1
    prove(f"{seen:,} states of {seed} clusters, none disagrees with itself")
