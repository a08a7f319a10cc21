"""The scenarios: healthy times, in which nobody may be called, and faults that must be heard.

A function fills a bench; its docstring is shown in the table. Those named H are healthy. Times are
in hours after the beginning.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

from exporter.counters import ReviewOutcome
from exporter.demo.plan import Fate
from exporter.engine.facts.model import CLUSTER_RESOURCES, Resource
from exporter.engine.facts.policy import Policy
from exporter.health import Restart
from tests.months.bench import Bench, Setup
from tests.months.cluster import HOUR, Vm
from tests.months.replica import Replica


BROKEN = (
    "server error. command Migrate failed: \"LibvirtError(Code=9, Message='operation failed: job "
    "migration out failed')\""
)
STALLED = 48 * HOUR
Fill = Callable[[Bench], None]


@dataclass(frozen=True, slots=True)
class Scenario:
    """A simulated period: its description, the size of the cluster, and what happens in it.

    `lists`: docs/alerts.md lists its notifications.
    """

    about: str
    setup: Setup
    fill: Fill
    lists: bool


SCENARIOS: dict[str, Scenario] = {}


def scenario(hours: float, *, lists: bool = False, **setup: float) -> Callable[[Fill], Fill]:
    """Register a scenario of this many hours under the name of its function."""

    def register(fill: Fill) -> Fill:
        about = (fill.__doc__ or "").strip().rstrip(".")
        size = Setup(days=hours / 24, **setup)  # type: ignore[arg-type]
        SCENARIOS[fill.__name__] = Scenario(about, size, fill, lists)
        return fill

    return register


# Healthy


@scenario(3 * 24)
def H1(bench: Bench) -> None:  # noqa: N802
    """Three days with the plugin: drains, a restart of the exporter and of Prometheus."""
    world = bench.world
    for vm in world.of_size(8)[:6]:
        world.set_strategy(vm, "None")
    owned = world.of_size(8)[10:13]
    for vm in owned:
        world.set_strategy(vm, "External")

    def move_owned() -> None:
        for vm in owned:
            if world.is_leaving(vm):
                _move_external(bench, vm)

    world.every(600.0, move_owned)
    for day in (0, 1, 2):
        world.at((24 * day + 9) * HOUR, lambda day=day: world.drain(world.nodes[day]))  # type: ignore[misc]
    world.at(30 * HOUR, bench.exporter.restart)
    bench.gaps.append((54 * HOUR, 54 * HOUR + 240))


def _move_external(bench: Bench, vm: Vm) -> None:
    bench.world.cancel(vm)
    bench.world.migrate(vm)


@scenario(22)
def H2(bench: Bench) -> None:  # noqa: N802
    """Rolling upgrades of all nodes, one at a time and then three at a time."""
    world = bench.world
    world.at(2 * HOUR, lambda: world.roll(world.nodes, 1))
    world.at(14 * HOUR, lambda: world.roll(world.nodes, 3))


@scenario(14)
def H3(bench: Bench) -> None:  # noqa: N802
    """A KubeVirt upgrade migrates every VM; nodes are drained meanwhile."""
    world = bench.world
    left = list(world.vms.values())

    def update() -> None:
        while left and world.waiting() < 5:
            world.migrate(left.pop(), update=True)

    world.at(2 * HOUR, lambda: world.every(60.0, update))
    world.at(3 * HOUR, lambda: world.drain(world.nodes[6]))
    world.at(5 * HOUR, lambda: world.roll(world.nodes[8:11], 1))


@scenario(34)
def H4(bench: Bench) -> None:  # noqa: N802
    """Forty batch VMs run at night, while some nodes are upgraded."""
    world = bench.world
    batch: list[Vm] = []

    def begin() -> None:
        for number in range(40):
            if len(batch) < 40:
                batch.append(world.add(f"batch-{number}", 16))
            else:
                world.start(batch[number])

    def end() -> None:
        for vm in batch:
            world.stop(vm)

    for day in (0, 1):
        world.at((24 * day + 1) * HOUR, begin)
        world.at((24 * day + 8) * HOUR, end)
    world.at(2 * HOUR, lambda: world.roll(world.nodes[:6], 3))


@scenario(14)
def H5(bench: Bench) -> None:  # noqa: N802
    """One migration in twenty fails once, and one in fifty twice; a rolling upgrade."""
    world = bench.world
    left: dict[tuple[str, str], int] = {}

    def decide(vm: Vm, _target: str) -> Fate | None:
        move = (vm.key, world.node_of(vm))
        if move not in left:
            chance = world.chance.random()
            left[move] = 2 if chance < 0.02 else 1 if chance < 0.07 else 0
        left[move] -= 1
        return Fate("fails", vm.copying / 2, BROKEN) if left[move] >= 0 else None

    world.decide = decide
    world.at(2 * HOUR, lambda: world.roll(world.nodes, 2))


@scenario(18)
def H6(bench: Bench) -> None:  # noqa: N802
    """The API server is away for 2 to 5 minutes six times, slow for 10 twice, and then upgraded."""
    world, exporter = bench.world, bench.exporter

    def go_away(minutes: float, *, lists: bool) -> None:
        exporter.interrupt(CLUSTER_RESOURCES, Restart.UNREACHABLE)
        for after in (20.0, 60.0):
            world.cluster.after(after, lambda: exporter.count_restart(Restart.UNREACHABLE))
        world.cluster.after(60 * minutes, lambda: exporter.resume(lists=lists))

    for number, minutes in enumerate((2, 3, 5, 4, 2.5, 5)):
        world.at(
            (1 + number) * HOUR,
            lambda m=minutes, lists=number % 2 == 0: go_away(m, lists=lists),  # type: ignore[misc]
        )

    def slow_down() -> None:
        exporter.interrupt(CLUSTER_RESOURCES, Restart.NO_PROGRESS)
        for number in range(1, 20):
            world.cluster.after(30.0 * number, lambda: exporter.count_restart(Restart.NO_PROGRESS))
        world.cluster.after(600, lambda: exporter.resume(lists=True))

    def reset() -> None:
        exporter.interrupt(CLUSTER_RESOURCES, Restart.EXPIRED)
        world.cluster.after(8, lambda: exporter.resume(lists=True))

    for hour in (8, 11):
        world.at(hour * HOUR, slow_down)
    for number in range(3):
        world.at(14 * HOUR + 600 * number, reset)
    world.at(0.5 * HOUR, lambda: world.roll(world.nodes[:6], 1))
    world.at(7.5 * HOUR, lambda: world.roll(world.nodes[6:9], 2))


@scenario(20, replicas=2, plugin=False)
def H7(bench: Bench) -> None:  # noqa: N802
    """Two replicas with the webhook: rollouts, another policy, a drain of the exporter's node."""
    world = bench.world

    def roll_out(policy: Policy | None = None, ready: float = 20.0) -> None:
        """A Deployment with maxSurge 1 and maxUnavailable 0."""
        old = [
            target
            for target in bench.targets
            if isinstance(target.scraped, Replica) and target.scraped.up
        ]

        def step() -> None:
            if not old:
                return
            bench.start_replica(policy)
            world.cluster.after(ready, retire)

        def retire() -> None:
            target = old.pop(0)
            assert isinstance(target.scraped, Replica)
            target.scraped.stop()
            # Service discovery notices it later, so some scrapes fail.
            world.cluster.after(25, lambda: bench.targets.remove(target))
            step()

        step()

    other = Policy(migration_cooldown=1800.0)
    world.at(4 * HOUR, roll_out)
    world.at(8 * HOUR, lambda: roll_out(other, 60.0))
    world.at(11 * HOUR, lambda: world.roll(world.nodes[:5], 2))

    def restart_all() -> None:
        for replica in bench.replicas:
            if replica.up:
                replica.restart()

    world.at(17 * HOUR, restart_all)


@scenario(20)
def H8(bench: Bench) -> None:  # noqa: N802
    """Three large VMs take 90 minutes to migrate: in a drain, and for the descheduler."""
    world = bench.world
    large = [*world.of_size(256), *world.of_size(128)][:3]
    for vm in large:
        vm.copying = 5400.0
    world.at(2 * HOUR, lambda: world.drain(world.node_of(large[0])))
    for hour in (3, 10, 17):
        world.at(hour * HOUR, lambda: bench.descheduler.evict(large[1]))
    world.at(12 * HOUR, lambda: world.roll({world.node_of(vm) for vm in (large[0], large[2])}, 1))


@scenario(12)
def H9(bench: Bench) -> None:  # noqa: N802
    """The network of migrations is eight times slower for an hour, during a rolling upgrade."""
    world = bench.world

    def slow_down(factor: float) -> None:
        world.slowness = factor

    world.at(2 * HOUR, lambda: world.roll(world.nodes[:8], 2))
    world.at(2.5 * HOUR, lambda: slow_down(8.0))
    world.at(3.5 * HOUR, lambda: slow_down(1.0))


# Faults of VMs, nodes and callers


def fail(*vms: Vm) -> tuple[set[Vm], Callable[[Vm, str], Fate | None]]:
    """These VMs, each of whose migrations fails while it is in the set."""
    broken = set(vms)
    return broken, lambda vm, _target: Fate("fails", 20.0, BROKEN) if vm in broken else None


@scenario(10)
def F1(bench: Bench) -> None:  # noqa: N802
    """One VM fails for ever: first for the descheduler, and then another one in a drain."""
    world = bench.world
    first, other = world.of_size(8)[0], world.of_size(8)[5]
    broken, world.decide = fail(first, other)
    world.at(1 * HOUR, lambda: world.evict(first, descheduler=True))
    world.at(4 * HOUR, lambda: broken.discard(first))
    bench.expect(
        "a VM of the descheduler",
        1 * HOUR,
        4 * HOUR,
        "KubeVirtEvacuationStuck",
        "KubeVirtEvacuationFailingRepeatedly",
    )
    world.at(5 * HOUR, lambda: world.drain(world.node_of(other)))
    world.at(8 * HOUR, lambda: broken.discard(other))
    bench.expect(
        "a VM of a drain",
        5 * HOUR,
        8 * HOUR,
        "KubeVirtEvacuationStuck",
        "KubeVirtEvacuationFailingRepeatedly",
        "KubeVirtNodeDrainStuck",
    )


@scenario(6)
def F2(bench: Bench) -> None:  # noqa: N802
    """A VM that cannot be migrated holds a drain; KubeVirt does not even mark it."""
    world = bench.world
    vm = world.of_size(8)[3]
    world.set_migratable(vm, migratable=False)
    world.at(1 * HOUR, lambda: world.drain(world.node_of(vm)))
    world.at(4 * HOUR, lambda: world.stop(vm))
    bench.expect("the drain", 1 * HOUR, 4 * HOUR, "KubeVirtNodeDrainStuck")


@scenario(6)
def F2b(bench: Bench) -> None:  # noqa: N802
    """A drain is held by a VM that cannot be migrated, and for its first hour by one that fails."""
    world = bench.world
    node = world.nodes[6]
    failing, staying = [vm for vm in world.on(node) if vm.gib <= 8][:2]
    world.set_migratable(staying, migratable=False)
    broken, world.decide = fail(failing)
    world.at(1 * HOUR, lambda: world.drain(node))
    world.at(2 * HOUR, lambda: broken.discard(failing))
    world.at(4 * HOUR, lambda: world.stop(staying))
    bench.expect("the drain", 1 * HOUR, 4 * HOUR, "KubeVirtNodeDrainStuck")


@scenario(6)
def F3(bench: Bench) -> None:  # noqa: N802
    """No node has room for the VMs of a drained node."""
    world = bench.world
    node, full = world.nodes[5], [True]
    world.decide = lambda vm, _target: (
        Fate("unschedulable") if full[0] and world.node_of(vm) == node else None
    )
    world.at(1 * HOUR, lambda: world.drain(node))

    def make_room() -> None:
        full[0] = False
        # The scheduler tries a pod again that waits for room. Here, its migration begins again.
        for vm in world.on(node):
            world.abort(vm)

    world.at(4 * HOUR, make_room)
    bench.expect(
        "the drain", 1 * HOUR, 4 * HOUR, "KubeVirtNodeDrainStuck", "KubeVirtEvacuationsStuckMany"
    )


@scenario(9, per_hour=0.0)
def F4(bench: Bench) -> None:  # noqa: N802
    """A descheduler without its feature gate evicts up to thirty VMs every five minutes."""
    descheduler = bench.descheduler

    def restart(per_hour: float, most: int, *, gate: bool) -> None:
        descheduler.restart(gate=gate)
        descheduler.per_hour, descheduler.most = per_hour, most

    bench.world.at(2 * HOUR, lambda: restart(300.0, 30, gate=False))
    bench.world.at(6 * HOUR, lambda: restart(20.0, 5, gate=True))
    bench.expect("the storm", 2 * HOUR, 6 * HOUR, "KubeVirtDeschedulerWithoutGate")


@scenario(10, plugin=False, per_hour=0.0)
def F5(bench: Bench) -> None:  # noqa: N802
    """Without a plugin, a VM is moved between two nodes every twenty minutes."""
    world = bench.world
    vm = world.of_size(16)[0]
    first, other = world.nodes[0], world.nodes[1]
    world.prefer = lambda moved: (
        (other if world.node_of(vm) == first else first) if moved is vm else None
    )
    began, ended = 1 * HOUR, 7 * HOUR
    world.at(began, lambda: world.every(1200.0, lambda: bench.descheduler.evict(vm), ended))
    bench.expect("the VM", began, ended, "KubeVirtVMChurning")


@scenario(9)
def F6(bench: Bench) -> None:  # noqa: N802
    """All migrations to one node fail, and the scheduler prefers it; another one is drained."""
    world = bench.world
    bad, is_broken = world.nodes[9], [True]
    began, ended = 1 * HOUR, 6 * HOUR

    def is_bad() -> bool:
        return bool(is_broken) and world.now >= began

    def prefer(vm: Vm) -> str | None:
        is_chosen = is_bad() and world.node_of(vm) != bad and world.chance.random() < 0.7
        return bad if is_chosen else None

    world.prefer = prefer
    world.decide = lambda _vm, target: (
        Fate("fails", 15.0, BROKEN) if is_bad() and target == bad else None
    )
    world.at(ended, is_broken.clear)
    world.at(began, lambda: world.drain(world.nodes[4]))
    bench.expect("the target node", began, ended, "KubeVirtTargetNodeFailing")


@scenario(28)
def F7a(bench: Bench) -> None:  # noqa: N802
    """A drain is given up, and its node stays cordoned with VMs for more than a day."""
    world, node = bench.world, bench.world.nodes[7]

    def evict_some() -> None:
        for vm in world.on(node)[:5]:
            world.evict(vm)

    world.at(1 * HOUR, lambda: world.cordon(node))
    world.at(1 * HOUR + 10, evict_some)
    world.at(26.5 * HOUR, lambda: world.uncordon(node))
    bench.expect("the node", 1 * HOUR, 26.5 * HOUR, "KubeVirtNodeCannotBeEmptied")


@scenario(6)
def F7b(bench: Bench) -> None:  # noqa: N802
    """virt-controller is dead, and a node is drained."""
    world = bench.world
    world.at(1 * HOUR - 60, world.cluster.stop_controller)
    world.at(1 * HOUR, lambda: world.drain(world.nodes[8]))
    world.at(4 * HOUR, world.cluster.start_controller)
    bench.expect(
        "the drain", 1 * HOUR, 4 * HOUR, "KubeVirtNodeDrainStuck", "KubeVirtEvacuationsStuckMany"
    )


# Faults of the exporter and of what calls it


@scenario(15)
def F8(bench: Bench) -> None:  # noqa: N802
    """The exporter is down, loses its permission for VMIMs, and its watch of VMIs is silent."""
    world, exporter = bench.world, bench.exporter
    target = next(target for target in bench.targets if target.scraped is exporter)
    world.at(1 * HOUR, exporter.stop)
    world.at(2.5 * HOUR, exporter.start)
    bench.expect("it is down", 1 * HOUR, 2.5 * HOUR, "KubeVirtEvictionExporterAbsent")

    def vanish() -> None:
        exporter.stop()
        bench.targets.remove(target)

    def return_() -> None:
        exporter.start()
        bench.targets.append(target)

    world.at(4 * HOUR, vanish)
    world.at(5.5 * HOUR, return_)
    bench.expect("its target is gone", 4 * HOUR, 5.5 * HOUR, "KubeVirtEvictionExporterAbsent")
    world.at(7 * HOUR, lambda: exporter.forbid(Resource.VMIMS))
    world.at(9 * HOUR, lambda: exporter.list_again(Resource.VMIMS))
    bench.expect("VMIMs are forbidden", 7 * HOUR, 9 * HOUR, "KubeVirtEvictionExporterBlindSpot")
    world.at(11 * HOUR, lambda: exporter.interrupt([Resource.VMIS]))
    world.at(12 * HOUR, lambda: exporter.resume(lists=True))
    bench.expect("the watch is silent", 11 * HOUR, 12 * HOUR, "KubeVirtEvictionExporterStale")


@scenario(13, replicas=2, plugin=False)
def F8r(bench: Bench) -> None:  # noqa: N802
    """One of two replicas is down, misses some VMs, and then both watches of VMIs are silent."""
    world, (_, other) = bench.world, bench.replicas
    world.at(1 * HOUR, other.stop)
    world.at(2.5 * HOUR, other.start)
    bench.expect("one is down", 1 * HOUR, 2.5 * HOUR, "KubeVirtEvictionExporterAbsent")

    def miss() -> None:
        vms = [vm for vm in world.vms.values() if vm.namespace == "tenant-0"]
        other.lose("tenant-0", [vm.name for vm in vms])

    world.at(5 * HOUR, miss)
    world.at(6.5 * HOUR, lambda: other.list_again(Resource.VMIS))
    bench.expect("they differ", 5 * HOUR, 6.5 * HOUR, "KubeVirtEvictionExporterStale")
    for replica in bench.replicas:
        world.at(9 * HOUR, lambda present=replica: present.interrupt([Resource.VMIS]))  # type: ignore[misc]
        world.at(10 * HOUR, lambda present=replica: present.resume(lists=True))  # type: ignore[misc]
    bench.expect("the watches are silent", 9 * HOUR, 10 * HOUR, "KubeVirtEvictionExporterStale")


class ApiServer:
    """An API server, and how many of its calls of the webhook failed."""

    name = "kube-apiserver-0"
    offset = 17.0
    up = True

    def __init__(self) -> None:
        self.failed = 0

    async def scrape(self) -> bytes:
        """The body of a scrape; without a failed call there is no series."""
        name = "apiserver_admission_webhook_fail_open_count"
        webhook = 'name="evictions.kubevirt-eviction-exporter.io",type="validating"'
        return f"{name}{{{webhook}}} {self.failed}\n".encode() if self.failed else b""


@scenario(18, replicas=2, plugin=False)
def F10(bench: Bench) -> None:  # noqa: N802
    """The webhook is not called, has no data, and then its calls fail; each repair is tried."""
    world, api = bench.world, ApiServer()
    bench.add(api, job="apiserver", namespace="default")
    alert = "KubeVirtEvictionWebhookFailing"

    def call(*, called: bool) -> None:
        bench.calls_webhook = called

    def answer(outcome: ReviewOutcome | None) -> None:
        bench.review_outcome = lambda: outcome

    world.at(2 * HOUR, lambda: call(called=False))
    world.at(5 * HOUR, lambda: call(called=True))
    bench.expect("it is not called", 2 * HOUR, 5 * HOUR, alert)
    world.at(8 * HOUR, lambda: answer(ReviewOutcome.UNAVAILABLE))
    world.at(10 * HOUR, lambda: answer(None))
    bench.expect("it has no data", 8 * HOUR, 10 * HOUR, alert)

    def review(vm: Vm) -> bool:
        if 13 * HOUR <= world.now < 15 * HOUR:
            api.failed += 1
            return True
        return bench.review(vm)

    bench.descheduler.webhook = review
    bench.expect("its calls fail", 13 * HOUR, 15 * HOUR, alert)
    for hour in (5, 10, 15):
        world.at(hour * HOUR + 60, lambda: bench.descheduler.evict(world.of_size(4)[0]))


@scenario(8)
def F11(bench: Bench) -> None:  # noqa: N802
    """A drain is given up and its node is uncordoned, but one VM keeps failing to leave it."""
    world = bench.world
    vm = world.of_size(8)[0]
    _, world.decide = fail(vm)

    def drain() -> None:
        node = world.node_of(vm)
        world.drain(node, gives_up=2400)
        world.cluster.after(2400, lambda: world.uncordon(node))

    world.at(1 * HOUR, drain)
    world.at(5 * HOUR, lambda: world.cancel(vm))
    world.at(5 * HOUR, lambda: world.abort(vm))
    bench.expect(
        "the VM",
        1 * HOUR + 2400,
        5 * HOUR,
        "KubeVirtEvacuationStuck",
        "KubeVirtEvacuationFailingRepeatedly",
    )


@scenario(11)
def F12(bench: Bench) -> None:  # noqa: N802
    """A migration makes no progress: one of the descheduler, and then one of a drain."""
    world = bench.world
    first, other = world.of_size(8)[4:6]
    stalled = {first}
    world.decide = lambda vm, _target: Fate("succeeds", STALLED) if vm in stalled else None

    def abort(vm: Vm) -> None:
        stalled.discard(vm)
        world.abort(vm)

    world.at(1 * HOUR, lambda: world.evict(first, descheduler=True))
    world.at(4 * HOUR, lambda: abort(first))
    bench.expect("one of the descheduler", 1 * HOUR, 4 * HOUR, "KubeVirtEvacuationStuck")
    # Not before, because the descheduler may move this VM too.
    world.at(6 * HOUR, lambda: stalled.add(other))
    world.at(6 * HOUR, lambda: world.drain(world.node_of(other)))
    world.at(9 * HOUR, lambda: abort(other))
    bench.expect(
        "one of a drain",
        6 * HOUR,
        9 * HOUR,
        "KubeVirtEvacuationStuck",
        "KubeVirtNodeDrainStuck",
    )


@scenario(12)
def F13(bench: Bench) -> None:  # noqa: N802
    """One node's clock is ten minutes fast, another one's is 40 minutes slow; a rolling upgrade."""
    world = bench.world
    skews = {world.nodes[2]: timedelta(minutes=10), world.nodes[3]: timedelta(minutes=-40)}
    world.at(1 * HOUR, lambda: world.cluster.skews.update(skews))
    world.at(2 * HOUR, lambda: world.roll(world.nodes[:6], 2))
    world.at(10 * HOUR, world.cluster.skews.clear)


@scenario(6, per_hour=0.0, queues=False)
def F14(bench: Bench) -> None:  # noqa: N802
    """Others' migrations of 15 minutes fill KubeVirt's limits, and a drain starves."""
    world = bench.world
    large = [vm for vm in world.vms.values() if vm.gib >= 32]
    by_hand: set[Vm] = set()
    began, ended = 0.5 * HOUR, 4 * HOUR
    node = world.nodes[3]
    large = [vm for vm in large if world.node_of(vm) != node]

    def decide(vm: Vm, _target: str) -> Fate | None:
        if vm not in by_hand:
            return None
        by_hand.discard(vm)
        return Fate("succeeds", world.chance.uniform(600, 1200))

    def move() -> None:
        waiting = len(by_hand) if began <= world.now < ended else 10
        for vm in world.chance.sample(large, 10 - min(waiting, 10)):
            if not world.is_leaving(vm) and not world.is_migrating(vm):
                by_hand.add(vm)
                world.migrate(vm)

    def stop() -> None:
        for vm in large:
            world.abort(vm)

    world.decide = decide
    world.every(5.0, move, ended)
    world.at(ended + 10, stop)
    world.at(1 * HOUR, lambda: world.drain(node))
    bench.expect("the drain", 1 * HOUR, ended, "KubeVirtNodeDrainStuck")


@scenario(7)
def F15(bench: Bench) -> None:  # noqa: N802
    """Five VMs that always fail hold the five slots of the descheduler."""
    world = bench.world
    vms = world.of_size(8)[0:15:3]
    broken: set[Vm] = set()
    world.decide = lambda vm, _: Fate("fails", 20.0, BROKEN) if vm in broken else None
    world.at(1 * HOUR - 1, lambda: broken.update(vms))
    for number, vm in enumerate(vms):
        world.at(
            1 * HOUR + 300 * number,
            lambda vm=vm: world.evict(vm, descheduler=True),  # type: ignore[misc]
        )
    world.at(5 * HOUR, broken.clear)
    bench.expect("the slots", 1 * HOUR + 1200, 5 * HOUR, "KubeVirtDeschedulerSlotsHeld")


@scenario(10)
def F16(bench: Bench) -> None:  # noqa: N802
    """A person's migrations of a VM fail one after the other; that of another VM stops halfway."""
    world = bench.world
    failing, stopped = world.of_size(8)[7:9]
    broken = {failing}

    def decide(vm: Vm, _target: str) -> Fate | None:
        if vm not in broken:
            return None
        return Fate("fails", 20.0, BROKEN) if vm is failing else Fate("succeeds", STALLED)

    def abort() -> None:
        broken.discard(stopped)
        world.abort(stopped)

    world.decide = decide
    world.at(1 * HOUR, lambda: world.every(300.0, lambda: world.migrate(failing), 3 * HOUR))
    world.at(3 * HOUR - 200, lambda: broken.discard(failing))
    bench.expect("it fails", 1 * HOUR, 3 * HOUR, "KubeVirtMigrationStuck")
    world.at(5 * HOUR - 1, lambda: broken.add(stopped))
    world.at(5 * HOUR, lambda: world.migrate(stopped))
    world.at(8 * HOUR, abort)
    bench.expect("it stops", 5 * HOUR, 8 * HOUR, "KubeVirtMigrationStuck")


@scenario(10)
def F17(bench: Bench) -> None:  # noqa: N802
    """Two VMs have moved, but a hotplug hangs, so KubeVirt does not finish their migrations."""
    world = bench.world
    drained, moved = world.of_size(8)[10:12]
    alert = "KubeVirtMigrationStuck"

    def plug(vm: Vm, *, hangs: bool) -> None:
        world.plug_cpus(vm, hangs=hangs)

    world.at(1 * HOUR - 60, lambda: plug(drained, hangs=True))
    world.at(1 * HOUR, lambda: world.evict(drained, descheduler=True))
    world.at(4 * HOUR, lambda: plug(drained, hangs=False))
    bench.expect("of an evacuation", 1 * HOUR, 4 * HOUR, alert)
    world.at(6 * HOUR - 60, lambda: plug(moved, hangs=True))
    world.at(6 * HOUR, lambda: world.migrate(moved))
    world.at(9 * HOUR, lambda: plug(moved, hangs=False))
    bench.expect("of a person", 6 * HOUR, 9 * HOUR, alert)


@scenario(28 * 24, nodes=6, vms=60, lists=True)
def M1(bench: Bench) -> None:  # noqa: N802
    """Four ordinary weeks with three drains; during the second one a VM fails for two hours."""
    world = bench.world
    for day, node in ((3, world.nodes[1]), (10, world.nodes[4]), (19, world.nodes[2])):
        world.at((24 * day + 9) * HOUR, lambda node=node: world.drain(node))  # type: ignore[misc]
    began = (24 * 10 + 9) * HOUR
    broken: set[Vm] = set()
    world.decide = lambda vm, _: Fate("fails", 20.0, BROKEN) if vm in broken else None
    world.at(began - 1, lambda: broken.add(world.on(world.nodes[4])[0]))
    world.at(began + 2 * HOUR, broken.clear)
    bench.expect("the drain", began, began + 2 * HOUR, "KubeVirtNodeDrainStuck")
