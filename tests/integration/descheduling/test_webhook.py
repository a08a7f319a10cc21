"""Forty VMs under the real descheduler, with the plugin or the webhook, and other evictors.

The controllers are KubeVirt's.
"""

import asyncio
import subprocess
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack

import pytest

from exporter.demo import objects
from tests.cluster import find_binary, poll
from tests.cluster.access import allow
from tests.cluster.resources import NODES as NODE_OBJECTS
from tests.integration.descheduling.columns import (
    BATCH,
    CHURN,
    CHURNING,
    COOLDOWN,
    EVERY,
    MOVABLE,
    OURS,
    REVIEWS,
    RULES,
    STOCK,
    Run,
    WebhookCluster,
    find_denials,
    is_news,
    run_column,
)
from tests.integration.descheduling.descheduler import USER, Descheduler, build_policy, log_in
from tests.integration.descheduling.ledger import CONTROLLER, write_ledger
from tests.integration.descheduling.stage import AMPLE, FULL
from tests.integration.descheduling.world import NODES, World
from tests.support.admission import EVICTS, Evictor, versions


UNHURRIED = {**COOLDOWN, "migrationCooldown": "10m", "maxMigrationCooldown": "1h"}
KUBEVIRTS = "Eviction triggered evacuation of VMI"
Story = dict[str, Run]


@pytest.fixture(scope="module")
async def hooked(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[WebhookCluster]:
    """A cluster of five nodes, and a descheduler's account."""
    folder = tmp_path_factory.mktemp("webhook")
    async with World.opened() as world:
        yield WebhookCluster(world, folder, await log_in(world.control))


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((10, ("warn", "plugin", "enforce")), id="small"),
        pytest.param(
            (100, ("nothing", "plugin", "warn", "enforce")), id="soak", marks=pytest.mark.soak
        ),
    ],
)
async def story(request: pytest.FixtureRequest, hooked: WebhookCluster) -> Story:
    """The columns, each with at least as many cycles as those before it."""
    cycles, columns = request.param
    runs: Story = {}
    for column in columns:
        at_least = max([cycles, *(run.cycles for run in runs.values())])
        runs[column] = await run_column(hooked, column, at_least)
    return runs


@pytest.mark.timeout(6000)
def test_no_vm_moves_inside_its_cooldown(story: Story) -> None:
    """No VM moves inside its cooldown with the webhook in `enforce` or with the plugin."""
    for name, run in story.items():
        early = run.ledger.too_early(RULES)
        if name in ("plugin", "enforce"):
            # The webhook allows the eviction of an evacuating VM until the exporter has read the
            # end of the migration.
            late = [eviction for eviction, _ in early if not is_news(eviction, run)]
            # The API server allows an eviction if the webhook takes more than a second.
            assert len(late) + len(run.ledger.moving()) <= run.failed_open
        else:
            assert early


def test_without_blocks_the_cluster_churns(story: Story) -> None:
    """Without blocks the same VMs move again and again, because the scheduler undoes each move."""
    for ledger in (run.ledger for name, run in story.items() if name in CHURNING):
        assert max(ledger.evictions_of(vm) for vm in BATCH) >= 2
        assert max(len(ledger.moves_of(vm)) for vm in BATCH) >= 2
        assert len(ledger.too_early(RULES)) >= CHURN


def test_what_is_not_blocked_is_not_counted_as_a_block(story: Story) -> None:
    """If nothing blocks, or if the webhook only warns, the exporter counts no block."""
    for run in (run for name, run in story.items() if name in CHURNING):
        assert not any(run.counted.values())


def test_warnings_are_what_would_be_denied(story: Story) -> None:
    """In `warn` every eviction inside a cooldown has the warning, and still happens."""
    run = story["warn"]
    ledger = run.ledger
    early = [eviction for eviction, _ in ledger.too_early(RULES)]

    assert early
    # The API server allows an eviction if our answer takes more than a second, and the exporter
    # reads a migration's end a moment after it is written.
    unwarned = [
        eviction for eviction in early if not eviction.warned and not is_news(eviction, run)
    ]
    assert len(unwarned) <= run.failed_open
    assert run.denied == 0
    assert run.denials == []
    held = {(row.vm, row.at) for row in (*early, *ledger.moving())}
    beyond = [row for row in ledger.evictions if row.warned and (row.vm, row.at) not in held]
    # VMs with a waiting migration have warnings too, but the ledger has only ended migrations.
    assert len(beyond) <= len(early)


def test_every_denial_is_ours_and_counted(story: Story) -> None:
    """The audit log has as many denials as the exporter has counted."""
    run = story["enforce"]

    assert run.denied == len(run.denials) > 0
    assert run.warned == 0
    assert all(denial.code == 429 for denial in find_denials(run.ledger))


def test_the_plugin_prevents_every_eviction_of_a_moving_or_cooling_vm(story: Story) -> None:
    """No pod of a VM is evicted while its migration runs, and no VM inside its cooldown.

    Evictions with the answer 201 do not count, because the VM had already left that pod.
    """
    run, ledger = story["plugin"], story["plugin"].ledger

    assert run.cycles >= story["warn"].cycles >= 10
    assert ledger.too_early(RULES) == []
    assert ledger.moving() == []
    assert [eviction for eviction in ledger.refused if eviction.code != 201] == []


def test_the_sidecar_counts_the_blocks_that_the_descheduler_logs(story: Story) -> None:
    """The sidecar's counts of blocks are those of the descheduler's log, by reason."""
    run = story["plugin"]
    logged = Counter(block["reason"] for block in run.blocks)

    assert run.counted == {reason: logged[reason] for reason in run.counted}
    assert sum(run.counted.values()) == len(run.blocks) > 0
    assert logged["cooldown"] >= 5


def test_the_others_go_on(story: Story) -> None:
    """After a block the descheduler evicts other VMs, and later those that have cooled down."""
    plugin, enforce = story["plugin"], story["enforce"]
    denied = find_denials(enforce.ledger)
    first = {
        "plugin": min(block["ts"] / 1000 for block in plugin.blocks),
        "enforce": min(block.at.timestamp() for block in denied),
    }

    for name, at in first.items():
        ledger = story[name].ledger
        assert any(eviction.at.timestamp() > at for eviction in ledger.evictions)
        assert any(ledger.evictions_of(vm) >= 2 for vm in MOVABLE)
    errors = [
        line for line in enforce.log if line["msg"] == "Error evicting pod" and OURS in line["err"]
    ]
    assert len(errors) == len(denied)


def test_nobody_moves_a_vm_whose_owner_forbids_it(story: Story) -> None:
    """The descheduler never evicts VMs whose owner forbids it, with or without our blocks."""
    for run in story.values():
        assert {eviction.vm for eviction in run.ledger.evictions} <= set(MOVABLE)


def test_every_evacuation_was_created_by_virt_controller(story: Story) -> None:
    """In the audit log virt-controller creates all evacuations, one for each accepted eviction."""
    for run in story.values():
        assert run.ledger.creators == {CONTROLLER: len(run.ledger.evictions)}
        assert run.ledger.by_hand == {}


def test_the_columns(story: Story, prove: Callable[[str], None]) -> None:
    """Print the evictions, migrations and blocks of each column, and those of each VM."""
    prove("forty VMs: cycles, s, evictions, VMs, inside a cooldown, migrations, blocks")
    for name, run in story.items():
        ledger = run.ledger
        evicted = {eviction.vm for eviction in ledger.evictions}
        blocks = run.denied + run.warned + len(run.blocks)
        prove(
            f"  {name:8} {run.cycles:>4} {run.seconds:>6.0f} {len(ledger.evictions):>5}"
            f" {len(evicted):>4} {len(ledger.too_early(RULES)):>5} {len(ledger.moves):>5}"
            f" {blocks:>5.0f}"
        )
        assert len(ledger.evictions) == len(ledger.moves)
    prove(f"  VM: evictions, migrations of each of {', '.join(story)}")
    for vm in MOVABLE:
        ledgers = [run.ledger for run in story.values()]
        cells = (
            f"{ledger.evictions_of(vm):>4},{len(ledger.moves_of(vm)):>3}" for ledger in ledgers
        )
        prove(f"  {vm:6} {' '.join(cells)}")


async def test_kubevirt_s_own_words_reach_the_evictor(hooked: WebhookCluster) -> None:
    """The webhook denies the eviction of a cooling VM, and leaves an evacuating VM to KubeVirt."""
    space, user = "words", "words-evictor"
    rig = hooked.world.rig
    async with (
        hooked.world.vms(space, {"node-5": ["one", "two"]}),
        Evictor.made(hooked.control, user, space) as evictor,
    ):
        rig.player.plan(f"{space}/one", "succeeds", "hangs")
        await rig.evict(f"{space}/one", descheduler=False)
        moved = await rig.until(
            f"{space}/one", lambda scene: scene.phases == ["Succeeded"] and not scene.marked
        )
        pod = objects.current_pod(moved.vmi, moved.pods)
        assert pod is not None
        # On a busy machine the exporter takes longer to start than the other tests' cooldown lasts.
        async with hooked.exporter("enforce", user, policy=UNHURRIED) as exporter:
            await exporter.until_verdict(space, "one", "preEviction", "cooldown")
            before = await versions(rig.cluster.admin, space)
            denied = await evictor.evict(pod["metadata"]["name"])
            after = await versions(rig.cluster.admin, space)
            await rig.evict(f"{space}/one", descheduler=False)
            await rig.until(f"{space}/one", lambda scene: scene.marked)

            async def is_known() -> bool:
                answer = await exporter.get(f"/v1/vmis/{space}/one")
                return answer[1]["evacuationNodeName"] is not None

            await poll(is_known, what="the mark known")
            passed = await evictor.evict(pod["metadata"]["name"])
            assert await exporter.sample(REVIEWS, outcome="evacuating") == 1

    assert (denied.code, OURS in denied.message) == (429, True)
    assert before == after
    assert passed.code == 429
    assert KUBEVIRTS in passed.message
    assert OURS not in passed.message


async def test_kubectl_drain(hooked: WebhookCluster, prove: Callable[[str], None]) -> None:
    """An unlisted user can drain a node at once, a listed user only after the cooldown."""
    space, rig = "drained", hooked.world.rig
    admin = rig.cluster.admin
    logins = {}
    for name in ("listed", "unlisted"):
        user = hooked.control.certified(f"drain-{name}")
        daemons = {"apiGroups": ["apps"], "resources": ["daemonsets"], "verbs": ["get"]}
        await allow(admin, user, user.name, *EVICTS, daemons)
        logins[name] = hooked.control.kubeconfig(user)

    async def drain(name: str, node: str) -> tuple[float, list[str]]:
        """Drain a node; returns the seconds that it took, and the errors."""
        began = asyncio.get_running_loop().time()
        process = await asyncio.create_subprocess_exec(
            *(str(find_binary("kubectl")), "--kubeconfig", str(logins[name]), "drain", node),
            *("--pod-selector", "kubevirt.io=virt-launcher", "--ignore-daemonsets"),
            *("--delete-emptydir-data", "--force", "--timeout=100s"),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        output = (await process.communicate())[0].decode()
        assert process.returncode == 0, output
        await admin.merge(NODE_OBJECTS, None, node, {"spec": {"unschedulable": None}})
        errors = [line for line in output.splitlines() if line.startswith("error")]
        return asyncio.get_running_loop().time() - began, errors

    async with hooked.world.vms(space, {"node-1": ["vm-1"]}):
        rig.player.plan(f"{space}/vm-1", "succeeds")
        async with hooked.exporter("enforce", "drain-listed") as exporter:
            free, _ = await drain("listed", "node-1")
            await exporter.until_verdict(space, "vm-1", "preEviction", "cooldown")
            node = await _node_of(hooked, space)
            waited, errors = await drain("listed", node)
            await exporter.until_verdict(space, "vm-1", "preEviction", "cooldown")
            node = await _node_of(hooked, space)
            passed, others = await drain("unlisted", node)

    held = [line for line in errors if OURS in line]
    assert held
    assert all("will retry after 5s" in line for line in (*errors, *others))
    assert all(
        OURS in line or KUBEVIRTS in line or "Evacuation in progress" in line for line in errors
    )
    assert not any(OURS in line for line in others)
    prove(
        f"kubectl drain of a VM's node: no cooldown {free:.0f} s; listed and cooling down"
        f" {waited:.0f} s, held {len(held)} times; unlisted and cooling down {passed:.0f} s"
    )


async def _node_of(hooked: WebhookCluster, space: str) -> str:
    scene = await hooked.world.rig.look(f"{space}/vm-1")
    return str(scene.vmi["status"]["nodeName"])


async def test_the_target_pod_of_an_evacuation_holds_no_slot(hooked: WebhookCluster) -> None:
    """The webhook denies evictions of a target pod, so these do not count as under way."""
    world, rig, key = hooked.world, hooked.world.rig, "leaving/one"
    world.packs, world.closed = False, {NODES[-1]}
    await hooked.control.namespace("ballast")
    async with AsyncExitStack() as stack:
        for node in NODES[:-1]:
            ballast = world.plain_pods("ballast", node, [f"on-{node}"], memory="64Gi", bare=True)
            await stack.enter_async_context(ballast)
        await stack.enter_async_context(world.vms("leaving", {"node-1": ["one"]}, guest=2**30))
        rig.player.plan(key, "hangs")
        await rig.evict(key, descheduler=False)
        await rig.until(
            key, lambda scene: "Running" in scene.phases and objects.is_migrating(scene.vmi)
        )
        exporter = await stack.enter_async_context(hooked.exporter("enforce", USER))
        process = Descheduler(
            hooked.folder / "leaving",
            hooked.login,
            build_policy(None, bounds=FULL, limits=AMPLE),
            interval=EVERY,
            binary=STOCK,
        )
        async with process:
            await process.ran(3)
            under_way = process.under_way
        denied = await exporter.sample(REVIEWS, outcome="denied")
        ledger = write_ledger("leaving", hooked.control.api.audit)
    world.packs, world.closed = True, set()

    assert denied == len(ledger.refused) > 0
    assert all(OURS in eviction.message for eviction in ledger.refused)
    assert all("migration_in_progress" in eviction.message for eviction in ledger.refused)
    # Only the eviction of the VM's own pod is under way: KubeVirt has annotated this pod.
    assert under_way == 1
