"""Which VMs the real descheduler evicts with verdicts, scene by scene.

Pods that cannot be moved overload every node but one. So each VM on such a node is a candidate for
eviction, and only the plugin can block it.
"""

import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from exporter.demo import objects
from tests.cluster import RealCluster, poll
from tests.cluster.kubevirt import NAMESPACE as KUBEVIRT_NAMESPACE
from tests.cluster.recording import Scene
from tests.cluster.resources import KUBEVIRTS, PODS, VMIS
from tests.cluster.versions import is_kubevirt_at_least, since
from tests.integration.descheduling.crowd import fill, run_cycle
from tests.integration.descheduling.descheduler import (
    SHIPPED,
    Bounds,
    Descheduler,
    Verdicts,
    log_in,
)
from tests.integration.descheduling.ledger import CONTROLLER
from tests.integration.descheduling.middleman import Middleman
from tests.integration.descheduling.outages import Outage, killed, slow, stale, unready
from tests.integration.descheduling.stage import LONG, Stage
from tests.integration.descheduling.world import NODES, World
from tests.support.program import program


SMALL = 2**30
BY_ONE = Bounds(20, 72)
"""A node with 64 GiB of ballast is overloaded by four VMs of 8 GiB, but not by three."""
TIMEOUT = 5.0
"""The plugin's timeout in seconds. Even on a busy machine, a cycle takes less than two timeouts."""
BLOCKED_UNANSWERED = "Eviction blocked without a verdict"


@pytest.mark.parametrize("pods", [400, pytest.param(2_000, marks=pytest.mark.soak)])
async def test_a_cycle_over_many_launcher_pods(
    pods: int, tmp_path: Path, prove: Callable[[str], None]
) -> None:
    """A cycle needs one request per blocked pod and per candidate, one list and the long polls.

    Eight nodes are overloaded. A twentieth of the VMs migrate and the rest cool down, so that none
    may be evicted, and the blocked set does not change. So every answer to a long poll is
    "unchanged" after its full wait, and at most one long poll is open when the descheduler ends.
    """
    migrating = pods // 20
    async with RealCluster(tmp_path / "cluster") as cluster:
        login = await log_in(cluster)
        await fill(cluster.admin, pods, migrating=migrating)
        kubeconfig = ("--kubeconfig", str(cluster.kubeconfig(cluster.exporter)))
        socket = f"unix:{tmp_path / 'query.sock'}"
        listen = {"query": ["127.0.0.1:0", socket], "metrics": "127.0.0.1:0"}
        async with program(tmp_path, *kubeconfig, config=LONG | {"listen": listen}) as exporter:
            await exporter.ready()
            # One late answer would open the circuit breaker. Then VMs would be blocked without a
            # request.
            patient = Verdicts(socket, timeout="30s")
            asking = await run_cycle(tmp_path / "with", login, patient, exporter)
            without = await run_cycle(tmp_path / "without", login, None, exporter)
    blocked, waiting = asking.count("filter", "blocked"), asking.count("preEviction")

    assert without.requests == 0
    assert without.evicted > 0
    assert (blocked, waiting) == (migrating, pods - migrating), asking.questions
    assert asking.count("filter") == pods
    assert asking.requests == blocked + waiting == asking.blocks
    unchanged = asking.polls.get("unchanged", 0)
    assert asking.polls in ({"changed": 1}, {"changed": 1, "unchanged": unchanged})
    assert asking.lists == 1
    assert asking.long_polls <= unchanged + 1
    assert asking.evicted == 0
    for name, cycle in (("without", without), ("with", asking)):
        prove(
            f"descheduling: a cycle over {pods} launcher pods, {name} verdicts: "
            f"{cycle.seconds:.2f} s, {cycle.requests:.0f} verdicts asked for, "
            f"{cycle.lists:.0f} lists, {cycle.long_polls:.0f} long polls, {cycle.evicted} evictions"
        )
    prove(
        f"descheduling: of these {blocked} for pods blocked at Filter, {waiting} for "
        f"PreEvictionFilter, {asking.seconds / asking.requests * 1e3:.2f} ms each"
    )


@pytest.fixture(scope="module")
async def stage(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stage]:
    """Four overloaded nodes with pods that cannot move, and a node that accepts no VM."""
    folder = tmp_path_factory.mktemp("scenes")
    async with World.opened() as world, AsyncExitStack() as stack:
        login = await log_in(world.control)
        world.packs = False
        world.closed = {NODES[-1]}
        await world.control.namespace("ballast")
        for node in NODES[:-1]:
            ballast = world.plain_pods("ballast", node, [f"on-{node}"], memory="64Gi", bare=True)
            await stack.enter_async_context(ballast)
        yield Stage(world, login, folder, itertools.count(1))


def _is_copying(scene: Scene) -> bool:
    return "Running" in scene.phases and objects.is_migrating(scene.vmi)


async def test_what_moves_or_has_just_moved_is_left_alone_and_the_others_go_on(
    stage: Stage, prove: Callable[[str], None]
) -> None:
    """VMs that migrate, wait, cool down or evacuate are not evicted; the others are.

    After the sidecar is killed, the plugin still uses its last snapshot. Without verdicts three of
    these four VMs are evicted, and the fourth is already being evacuated.
    """
    names = ["running", "pending", "cooling", "evacuating", "free-1", "free-2"]
    held = set(names[:4])
    world, rig, space = stage.world, stage.world.rig, "states"
    async with world.vms(space, {"node-1": names}, guest=SMALL), stage.exporter() as exporter:
        await exporter.ready()
        rig.player.plan(f"{space}/running", "hangs")
        rig.player.plan(f"{space}/pending", "never bound")
        rig.player.plan(f"{space}/evacuating", "never bound")
        # One after another: KubeVirt lets two VMs leave a node at a time, and the others wait.
        await rig.cluster.migrate("cooling", space)
        await exporter.until_verdict(space, "cooling", "preEviction", "cooldown")
        await rig.cluster.migrate("running", space)
        await rig.until(f"{space}/running", _is_copying)
        await rig.cluster.migrate("pending", space)
        await rig.evict(f"{space}/evacuating", descheduler=False)
        if is_kubevirt_at_least("1.7"):
            await rig.until(f"{space}/evacuating", _is_in_progress)
        else:  # KubeVirt creates no VMIM, or keeps it Pending, while two VMs leave the node
            await exporter.until("/v1/evacuations", _is_waiting_for_a_slot)
        for name in ("running", "pending"):
            await exporter.until_verdict(space, name, "filter", "migration_in_progress")

        async with stage.descheduler(Verdicts(exporter.query)) as asking:
            await _until_evicted(stage, space, 2, by=asking)
            await asking.ran(3)
            evicted = stage.evicted(space)
            exporter.process.kill()
            await asking.ran(2)
            evicted_later = stage.evicted(space)
        held_by = {
            line["vmi"]["name"]
            for line in asking.logged(BLOCKED_UNANSWERED)
            if line["outcome"] == "blocked_by_snapshot"
        }

        async with stage.descheduler(None) as unasking:
            await _until_evicted(stage, space, 5, by=unasking)
        evicted_without = stage.evicted(space)

    assert evicted == evicted_later == {"free-1", "free-2"}
    assert "cooling" in held_by
    assert held & evicted_without == held - {"evacuating"}
    assert set(stage.ledger(space).creators) == {CONTROLLER}
    prove(
        f"descheduling: evicted with verdicts {sorted(evicted)}, without {sorted(evicted_without)}"
    )


async def test_exceptions_are_held_for_their_own_time(
    stage: Stage, prove: Callable[[str], None]
) -> None:
    """A VM has the policy for its label (30 s), for its priority class (never) or for all VMs."""
    world, rig, space = stage.world, stage.world.rig, "exceptions"
    names = ["brief", "never", "long", "free"]
    overrides = [
        {"name": "never", "match": {"priorityClasses": ["bat*"]}, "block": True},
        {
            "name": "brief",
            "match": {"namespaces": [space], "vmiLabels": {"tier": "bri*"}},
            "migrationCooldown": "30s",
            "migrationHistoryWindow": "0s",
        },
    ]
    policy = {"migrationCooldown": "1h", "overrides": overrides}
    async with (
        world.vms(space, {"node-1": names}, batch=["never"], guest=SMALL),
        stage.exporter(policy=policy) as exporter,
    ):
        await exporter.ready()
        labels = {"metadata": {"labels": {"tier": "brief"}}}
        await rig.cluster.admin.merge(VMIS, space, "brief", labels)
        await exporter.until_verdict(space, "never", "preEviction", "policy")
        await rig.cluster.migrate("long", space)
        await exporter.until_verdict(space, "long", "preEviction", "cooldown")
        await rig.cluster.migrate("brief", space)
        held = await exporter.until_verdict(space, "brief", "preEviction", "cooldown")
        async with stage.descheduler(Verdicts(exporter.query)) as asking:
            await _until_evicted(stage, space, 2, by=asking, within=90)
            await asking.ran(3)
        # Only the first reason of each VM: after an eviction the VM's migration blocks it, too.
        blocks = reversed(asking.logged("Eviction blocked"))
        blocked = {block["vmi"]["name"]: block["reason"] for block in blocks}
        moved = stage.ledger(space).evictions
        _, explained = await exporter.get(f"/v1/vmis/{space}/brief")

    assert explained["policy"]["override"] == "brief"
    assert held["effectiveCooldownSeconds"] == 30
    assert blocked | {"free": "cooldown"} == dict.fromkeys(names, "cooldown") | {"never": "policy"}
    assert {move.vm for move in moved} == {"brief", "free"}
    released = datetime.fromisoformat(held["notBefore"])
    waited = min(move.at for move in moved if move.vm == "brief") - released
    # The audit log has the time at which an eviction was received; the verdict follows in a second.
    assert waited > -timedelta(seconds=1)
    prove(
        f"descheduling: an exception of 30 s is evicted {waited.total_seconds():.1f} s after its"
        " release, with VMs of an hour and of block: true beside it that stay"
    )


async def test_nothing_is_moved_while_kubevirt_updates(stage: Stage) -> None:
    """Nothing is evicted while virt-controller counts an outdated VM.

    The test makes a VM outdated, because virt-controller would correct a false count. A VM is
    outdated if its launcher pod has another image than virt-controller would use. virt-controller
    counts outdated VMs when the KubeVirt object changes.
    """
    world, space = stage.world, "updating"
    rig = world.rig

    async def run_image(image: str) -> str:
        """Change the launcher image of the first VM; returns the old one."""
        pod = (await rig.look(f"{space}/one")).pods[0]
        containers = pod["spec"]["containers"]
        (before,) = (
            container["image"] for container in containers if container["name"] == "compute"
        )
        changed = [
            row | ({"image": image} if row["name"] == "compute" else {}) for row in containers
        ]
        patch = {"spec": {"containers": changed}}
        await rig.cluster.admin.merge(PODS, space, pod["metadata"]["name"], patch)
        await rig.until(
            f"{space}/one",
            lambda scene: scene.vmi["status"]["launcherContainerImageVersion"] == image,
        )
        note = {"metadata": {"annotations": {"changed-for": image}}}
        await rig.cluster.admin.merge(KUBEVIRTS, KUBEVIRT_NAMESPACE, "kubevirt", note)
        return str(before)

    guarded = {"migrationCooldown": "1h", "guards": {"platformUpdate": True}}
    async with (
        world.vms(space, {"node-1": ["one", "two"]}, guest=SMALL),
        stage.exporter(policy=guarded) as exporter,
    ):
        await exporter.ready()
        image = await run_image("launcher:of-the-last-version")
        for name in ("one", "two"):
            await exporter.until_verdict(space, name, "filter", "platform_update")
        async with stage.descheduler(Verdicts(exporter.query)) as asking:
            await asking.ran(3)
            during = stage.evicted(space)
            counted = (await rig.cluster.cr())["status"]["outdatedVirtualMachineInstanceWorkloads"]
            await run_image(image)
            await _until_evicted(stage, space, 2, by=asking)

    assert counted == 1
    assert during == set()


async def test_a_migration_that_began_since_the_snapshot(
    stage: Stage, prove: Callable[[str], None]
) -> None:
    """A VM that began to migrate after the descheduler's snapshot is not evicted."""
    world, rig, space = stage.world, stage.world.rig, "lag"
    async with (
        world.vms(space, {"node-1": ["moving", "free"]}, guest=SMALL),
        stage.exporter() as exporter,
    ):
        await exporter.ready()
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"{exporter.query}/v1/blocked") as answer,
        ):
            before, etag = await answer.read(), answer.headers["ETag"]

        def hold_back(request: web.Request, _: bytes) -> web.Response | None:
            if request.path != "/v1/blocked":
                return None
            headers = {"ETag": etag}
            return web.Response(body=before, content_type="application/json", headers=headers)

        rig.player.plan(f"{space}/moving", "hangs")
        await rig.cluster.migrate("moving", space)
        await rig.until(f"{space}/moving", _is_copying)
        await exporter.until_verdict(space, "moving", "filter", "migration_in_progress")
        async with Middleman(exporter.query) as middle:
            middle.tamper = hold_back
            verdicts = Verdicts(middle.url, timeout="20s")
            async with stage.descheduler(verdicts) as asking:
                await _until_evicted(stage, space, 1, by=asking)
                await asking.ran(3)
                questions = await asking.samples(
                    "descheduler_kubevirt_verdicts_total", "checkpoint", "outcome"
                )
        evicted = stage.evicted(space)

    assert evicted == {"free"}
    assert questions["filter", "blocked"] == 0, "the snapshot does not show the migration"
    assert questions["preEviction", "blocked"] > 0
    prove(f"descheduling: migration since the snapshot, evicted: {sorted(evicted)}")


@pytest.mark.parametrize(
    "outage", [killed, slow, unready, stale], ids=lambda outage: outage.__name__
)
@pytest.mark.parametrize("ignorable", [False, True], ids=["not_ignorable", "ignorable"])
async def test_a_sidecar_that_fails(
    stage: Stage,
    outage: Callable[[Stage], AbstractAsyncContextManager[Outage]],
    ignorable: bool,
    prove: Callable[[str], None],
) -> None:
    """If the sidecar fails, VMs are evicted only if the plugin's argument `ignorable` is true.

    Other pods are evicted in both cases, and a cycle takes less than two timeouts.
    """
    world = stage.world
    space = f"outage-{next(stage.numbers)}"
    vms, pods = {"vm-1", "vm-2"}, {"web-1", "web-2"}
    async with (
        world.vms(space, {"node-1": sorted(vms)}, guest=SMALL),
        world.plain_pods(space, "node-2", sorted(pods), memory="1Gi"),
        outage(stage) as failing,
    ):
        verdicts = Verdicts(failing.url, ignorable=ignorable, timeout=f"{TIMEOUT:g}s")
        async with stage.descheduler(verdicts) as descheduler:
            await _until(
                lambda: stage.evicted_pods(space) == pods and descheduler.cycles >= 2,
                what="two cycles",
            )
            without = await descheduler.sample(
                "descheduler_kubevirt_verdicts_total", outcome="unavailable"
            ) + await descheduler.sample("descheduler_kubevirt_verdicts_total", outcome="stale")
        evicted = stage.evicted(space)
        longest = max(descheduler.durations())

    assert without > 0
    assert evicted == (vms if ignorable else set())
    assert longest < 2 * TIMEOUT
    prove(
        f"descheduling: sidecar {outage.__name__}, ignorable {ignorable}: {len(evicted)} of 2 VMs "
        f"and 2 of 2 plain pods evicted, longest cycle {longest:.2f} s, "
        f"{failing.asked} verdicts asked for"
    )


@pytest.mark.parametrize("asking", [False, True], ids=["without_verdicts", "with_verdicts"])
async def test_the_target_pod_of_a_vm_that_is_leaving(stage: Stage, asking: bool) -> None:
    """Without verdicts the descheduler evicts a target pod, and keeps counting it as under way.

    KubeVirt answers the eviction of any pod of a marked VMI with the message by which the
    descheduler recognises an eviction under way. But a target pod does not end after that.
    """
    rig, space = stage.world.rig, f"target-{'with' if asking else 'without'}"
    vm = f"{space}-vm"
    key = f"{space}/{vm}"
    async with (
        stage.world.vms(space, {"node-1": [vm]}, guest=SMALL),
        stage.exporter() as exporter,
    ):
        await exporter.ready()
        rig.player.plan(key, "hangs")
        await rig.evict(key, descheduler=False)
        copying = await rig.until(key, _is_copying)
        await exporter.until_verdict(space, vm, "filter", "migration_in_progress")
        async with stage.descheduler(Verdicts(exporter.query) if asking else None) as process:
            await process.ran(2)
            rig.player.decide(copying.vmims[0]["metadata"]["uid"], "succeeds")
            await rig.until(key, _has_left)
            await process.ran(3)
            under_way = process.under_way
        # An eviction with the answer 201 is of the source pod, which the VM has left by then.
        evicted = {row.name for row in stage.ledger(space).refused if row.code != 201}

    targets = {
        pod["metadata"]["name"]
        for pod in copying.pods
        if objects.MIGRATION_JOB in objects.labels(pod)
    }
    assert len(targets) == 1
    assert evicted == (set() if asking else targets)
    assert under_way == (0 if asking else 1)


def _has_left(scene: Scene) -> bool:
    """Whether the VM runs on its target and its source launcher has ended."""
    running = [pod for pod in scene.pods if pod["status"]["phase"] == "Running"]
    return scene.phases == ["Succeeded"] and not scene.marked and len(running) == 1


def _is_in_progress(scene: Scene) -> bool:
    pod = objects.current_pod(scene.vmi, scene.pods)
    return pod is not None and objects.EVICTION_IN_PROGRESS in objects.annotations(pod)


def _is_waiting_for_a_slot(_: int, body: Any) -> bool:
    return any(
        "limit of outbound migrations (2) is reached" in row["nextStep"]
        for row in body["evacuations"]
    )


LEAVING: dict[str, Callable[[Scene], object]] = {
    "external": lambda scene: scene.marked and not scene.vmims and _is_in_progress(scene),
    "pending": lambda scene: scene.phases == ["Scheduling"] and _is_in_progress(scene),
    "running": lambda scene: _is_copying(scene) and _is_in_progress(scene),
}
MARKS_EXTERNAL = "1.7"
"""From this KubeVirt version on, the pod of an External VM gets `eviction-in-progress` too."""
if not is_kubevirt_at_least(MARKS_EXTERNAL):
    del LEAVING["external"]


@pytest.fixture(scope="module")
async def leaving(stage: Stage) -> dict[str, dict[str, set[str]]]:
    """Three nodes have one VM too many each, and one VM of each node is leaving.

    Returns the other VMs that were evicted, by the leaving VM's state, without and with verdicts.
    """
    world, rig = stage.world, stage.world.rig
    world.closed = set(NODES) - {"node-4"}
    async with AsyncExitStack() as stack:
        for node, state in zip(NODES, LEAVING, strict=False):
            # The names are unique: KubeVirt counts a node's migrations by name in all namespaces.
            leaving, rest = f"{state}-leaving", [f"{state}-{number}" for number in range(3)]
            strategy = "External" if state == "external" else "LiveMigrate"
            layout = {node: [leaving, *rest]}
            vms = world.vms(state, layout, batch=[leaving], evictionStrategy=strategy)
            await stack.enter_async_context(vms)
            rig.player.plan(f"{state}/{leaving}", "never bound" if state == "pending" else "hangs")
            await rig.evict(f"{state}/{leaving}", descheduler=False)
        exporter = await stack.enter_async_context(stage.exporter())
        await exporter.ready()
        for state, is_there in LEAVING.items():
            await rig.until(f"{state}/{state}-leaving", is_there)
        moved: dict[str, dict[str, set[str]]] = {state: {} for state in LEAVING}
        for name, verdicts in (("without", None), ("with", Verdicts(exporter.query))):
            async with stage.descheduler(verdicts, bounds=BY_ONE, limits=SHIPPED) as process:
                await process.ran(3)
            for state, others in moved.items():
                others[name] = stage.evicted(state)
    return moved


@pytest.mark.parametrize(
    "state",
    [
        pytest.param(
            "external", marks=since(MARKS_EXTERNAL, "eviction-in-progress on an External VM's pod")
        ),
        "pending",
        "running",
    ],
)
def test_a_vm_that_is_leaving_makes_no_other_one_leave(
    leaving: dict[str, dict[str, set[str]]], state: str, prove: Callable[[str], None]
) -> None:
    """While one VM leaves a node, no other VM of that node is evicted.

    The descheduler counts a pod with `eviction-in-progress` as gone, if the plugin allows the pod.
    """
    assert leaving[state]["without"] == set()
    assert leaving[state]["with"] == set()
    evicted = {name: len(vms) for name, vms in leaving[state].items()}
    prove(f"descheduling: one VM leaving ({state}), other VMs moved by then: {evicted}")


async def _until_evicted(
    stage: Stage, space: str, vms: int, *, by: Descheduler, within: float = 40.0
) -> None:
    def are_evicted() -> bool:
        return len(stage.evicted(space)) >= vms

    try:
        await _until(are_evicted, what=f"{vms} VMs evicted", within=within)
    except TimeoutError:
        print(by.tail())
        raise


async def _until(holds: Callable[[], bool], *, what: str, within: float = 40.0) -> None:
    async def attempt() -> bool:
        return holds()

    await poll(attempt, within=within, what=what)
