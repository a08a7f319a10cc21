"""The stock descheduler and kubectl with the admission webhook, on KubeVirt's controllers."""

import asyncio
import subprocess
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from exporter.demo import objects
from tests.cluster import ApiError, RealCluster, find_binary, poll
from tests.cluster.access import allow
from tests.cluster.audit import Creation
from tests.cluster.resources import NODES as NODE_OBJECTS
from tests.cluster.resources import PODS, VMIS
from tests.descheduling.descheduler import (
    USER,
    Descheduler,
    Verdicts,
    build_policy,
    log_in,
)
from tests.descheduling.ledger import Eviction, Ledger, recording, write_ledger
from tests.descheduling.stage import AMPLE, FULL
from tests.descheduling.test_churn import (
    BATCH,
    COOLDOWN,
    EVERY,
    LAYOUT,
    LIMITS,
    MOVABLE,
    RULES,
    VMS,
    WITHIN,
)
from tests.descheduling.world import NODES, World
from tests.support.admission import (
    EVICTS,
    Answer,
    Evictor,
    admitting,
    configuration,
    make_pair,
    registered,
    versions,
)
from tests.support.program import Program, program


STOCK = "stock-descheduler"
UNHURRIED = {**COOLDOWN, "migrationCooldown": "10m", "maxMigrationCooldown": "1h"}
OURS = "kubevirt-eviction-exporter: VMI "
KUBEVIRTS = "Eviction triggered evacuation of VMI"
REVIEWS = "kubevirt_eviction_exporter_admission_reviews_total"
FAILED_OPEN = "apiserver_admission_webhook_fail_open_count"


@dataclass(frozen=True)
class Run:
    """The effect of some cycles on forty VMs, and the number of reviews by outcome."""

    name: str
    ledger: Ledger
    cycles: int
    seconds: float
    log: list[dict[str, Any]]
    warned: float
    denied: float
    failed_open: float
    """How often the API server had no answer of the webhook within its timeout."""
    noticed: list[tuple[str, datetime]]
    """The VMs whose migrations ended, and when the exporter read each end."""

    @property
    def held(self) -> float:
        """How many evictions the webhook or the plugin denied, or would have denied in `warn`."""
        blocks = sum(bool(one["msg"] == "Eviction blocked") for one in self.log)
        return self.denied + self.warned + blocks

    @property
    def denials(self) -> list[str]:
        """The exporter's denials in the audit log."""
        return [one.message for one in find_denials(self.ledger)]


Story = dict[str, Run]


@dataclass
class WebhookCluster:
    """A cluster, and what webhooks need on it."""

    world: World
    folder: Path
    login: Path

    @property
    def control(self) -> RealCluster:
        """The control plane."""
        return self.world.control

    @asynccontextmanager
    async def exporter(
        self, mode: str, *users: str, policy: Mapping[str, object] = COOLDOWN
    ) -> AsyncIterator[Program]:
        """An exporter whose webhook the API server calls for these users; ready."""
        pair = make_pair(self.folder / "pair")
        config = admitting(pair, mode, *users) | {"policy": policy}
        login = ("--kubeconfig", str(self.control.kubeconfig(self.control.exporter)))
        async with program(self.folder, *login, config=config) as exporter:
            await exporter.ready()
            one = configuration(exporter.admission, pair.authority, users)
            async with registered(self.control, one):
                await self._until_called(exporter, users[0])
                yield exporter

    async def failed_open(self) -> float:
        """How often the API server allowed an eviction because the webhook did not answer."""
        text = (await self.control.admin.send("GET", "/metrics")).decode()
        lines = [line for line in text.splitlines() if line.startswith(FAILED_OPEN)]
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    @asynccontextmanager
    async def asked(self, policy: Mapping[str, object] = COOLDOWN) -> AsyncIterator[Program]:
        """The exporter for the plugin."""
        login = ("--kubeconfig", str(self.control.kubeconfig(self.control.exporter)))
        async with program(self.folder, *login, config={"policy": policy}) as exporter:
            await exporter.ready()
            yield exporter

    async def _until_called(self, exporter: Program, user: str) -> None:
        """Wait until the webhook is called, by the eviction of a pod that does not exist."""
        path = f"{PODS.path('default', 'virt-launcher-nobody')}/eviction"
        body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": "x"}}
        body["metadata"] = {"name": "virt-launcher-nobody", "namespace": "default"}
        async with self.control.client(self.control.certified(user)) as client:

            async def is_called() -> bool:
                try:
                    await client.request("POST", path, json=body)
                except ApiError as error:
                    if error.code != 404:
                        raise
                return await exporter.sample(REVIEWS, outcome="unknown_pod") > 0

            await poll(is_called, what="the webhook called")


@pytest.fixture(scope="module")
async def hooked(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[WebhookCluster]:
    """A cluster of five nodes, and a descheduler's account."""
    folder = tmp_path_factory.mktemp("webhook")
    async with World.opened() as world:
        yield WebhookCluster(world, folder, await log_in(world.control))


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((8, ("warn", "enforce")), id="small"),
        pytest.param(
            (20, ("nothing", "plugin", "warn", "enforce")), id="soak", marks=pytest.mark.soak
        ),
    ],
)
async def story(request: pytest.FixtureRequest, hooked: WebhookCluster) -> Story:
    """Forty new VMs for each column: in the first until they churn, in the others as long."""
    cycles, columns = request.param
    runs: Story = {}
    for column in columns:
        at_least = max([cycles, *(run.cycles for run in runs.values())])
        # VMs churn only if nothing blocks their evictions.
        churns = int(column in ("nothing", "warn"))
        runs[column] = await _run(hooked, column, at_least, churns)
    return runs


async def _run(hooked: WebhookCluster, column: str, cycles: int, churns: int) -> Run:
    world, namespace = hooked.world, f"column-{column}"
    audit = world.control.api.audit
    pinned = set(VMS) - set(MOVABLE)
    async with AsyncExitStack() as stack:
        failed_open = await hooked.failed_open()
        exporter: Program | None = None
        if column in ("warn", "enforce"):
            exporter = await stack.enter_async_context(hooked.exporter(column, USER))
        elif column == "plugin":
            exporter = await stack.enter_async_context(hooked.asked())
        verdicts = Verdicts(exporter.query) if exporter and column == "plugin" else None
        binary = "descheduler" if verdicts else STOCK
        migrations = await stack.enter_async_context(recording(world.control.admin))
        await stack.enter_async_context(world.vms(namespace, LAYOUT, batch=BATCH, pinned=pinned))
        process = Descheduler(
            hooked.folder / namespace,
            hooked.login,
            build_policy(verdicts, limits=LIMITS),
            interval=EVERY,
            binary=binary,
        )

        async def has_enough() -> bool:
            ledger = write_ledger(namespace, audit, migrations.values())
            comes_back = any(ledger.evictions_of(vm) >= 2 for vm in MOVABLE)
            return (
                process.cycles >= cycles
                and len(ledger.too_early(RULES)) >= churns
                and (column != "enforce" or (comes_back and bool(find_denials(ledger))))
            )

        await process.run_until(has_enough, within=WITHIN, what=f"enough of {namespace}")
        await world.at_rest(namespace)
        log = process.said()
        ledger = write_ledger(namespace, audit, migrations.values())
        warned, denied = [
            0.0 if exporter is None else await exporter.sample(REVIEWS, outcome=outcome)
            for outcome in ("warned", "denied")
        ]
        failed_open = await hooked.failed_open() - failed_open
        noticed = [] if exporter is None else read_ends(exporter, namespace)
    seconds = (log[-1]["ts"] - log[0]["ts"]) / 1000
    return Run(column, ledger, process.cycles, seconds, log, warned, denied, failed_open, noticed)


def find_denials(ledger: Ledger) -> list[Creation]:
    """The evictions that the webhook has denied."""
    return [one for one in ledger.refused if OURS in one.message]


def read_ends(exporter: Program, namespace: str) -> list[tuple[str, datetime]]:
    """The VMs whose migrations ended, and when the exporter's log says that it read each end."""
    return [
        (one["kubevirt.vm.name"], datetime.fromisoformat(one["timestamp"]))
        for one in exporter.events("migration_ended")
        if one["k8s.namespace.name"] == namespace
    ]


def _is_news(eviction: Eviction, run: Run) -> bool:
    """Whether the exporter had read the end of the VM's last migration just before the eviction.

    "Just before" is a second for the plugin, and more for the webhook: the webhook allows the
    eviction of a VM with an `evacuationNodeName`, which a busy machine may clear seconds later.
    """
    just_before = timedelta(seconds=1 if run.name == "plugin" else 5)
    ends = [one.end for one in run.ledger.moves_of(eviction.vm) if one.end <= eviction.at]
    read = [at for vm, at in run.noticed if vm == eviction.vm and at >= ends[-1]]
    return eviction.at - min(read, default=ends[-1]) < just_before


@pytest.mark.timeout(3000)
def test_no_vm_moves_inside_its_cooldown(story: Story) -> None:
    """No VM moves inside its cooldown with the webhook in `enforce` or with the plugin."""
    for name, run in story.items():
        early = run.ledger.too_early(RULES)
        if name in ("plugin", "enforce"):
            # The webhook allows the eviction of an evacuating VM until it has read the end of the
            # migration.
            late = [one for one, _ in early if not _is_news(one, run)]
            # The API server allows an eviction if the webhook takes more than a second.
            assert len(late) + len(run.ledger.moving()) <= run.failed_open
        else:
            assert early


def test_warnings_are_what_would_be_denied(story: Story) -> None:
    """In `warn` every eviction inside a cooldown has the warning, and still happens."""
    run = story["warn"]
    ledger = run.ledger
    early = [eviction for eviction, _ in ledger.too_early(RULES)]

    assert early
    # The API server allows an eviction if our answer takes more than a second, and the exporter
    # reads a migration's end a moment after it is written.
    unwarned = [one for one in early if not one.warned and not _is_news(one, run)]
    assert len(unwarned) <= run.failed_open
    assert run.denied == 0
    assert run.denials == []
    held = {(one.vm, one.at) for one in (*early, *ledger.moving())}
    beyond = [one for one in ledger.evictions if one.warned and (one.vm, one.at) not in held]
    # VMs with a waiting migration have warnings too, but the ledger has only ended migrations.
    assert len(beyond) <= len(early)


def test_every_denial_is_ours_and_counted(story: Story) -> None:
    """The audit log has as many denials as the exporter has counted."""
    run = story["enforce"]

    assert run.denied == len(run.denials) > 0
    assert run.warned == 0
    assert all(one.code == 429 for one in find_denials(run.ledger))


def test_a_denied_vm_is_not_marked(story: Story) -> None:
    """A denial creates no evacuation: each evacuation has an accepted eviction."""
    ledger = story["enforce"].ledger

    assert sum(ledger.creators.values()) == len(ledger.evictions)
    assert ledger.by_hand == {}


def test_the_others_go_on(story: Story) -> None:
    """After a denial the descheduler evicts other VMs, and later those that have cooled down."""
    run = story["enforce"]
    denied = find_denials(run.ledger)
    first = min(one.at for one in denied)

    assert any(one.at > first for one in run.ledger.evictions)
    assert any(run.ledger.evictions_of(vm) >= 2 for vm in MOVABLE)
    errors = [one for one in run.log if one["msg"] == "Error evicting pod" and OURS in one["err"]]
    assert len(errors) == len(denied)


def test_the_columns(story: Story, prove: Callable[[str], None]) -> None:
    """Print the evictions, migrations and denials of each column."""
    prove("stock descheduler, forty VMs: cycles, s, evictions, VMs, inside a cooldown, VMIMs, held")
    for name, run in story.items():
        ledger = run.ledger
        prove(
            f"  {name:8} {run.cycles:>4} {run.seconds:>6.0f} {len(ledger.evictions):>5}"
            f" {len({one.vm for one in ledger.evictions}):>4} {len(ledger.too_early(RULES)):>5}"
            f" {sum(ledger.creators.values()):>5}"
            f" {run.held:>5.0f}"
        )
        assert sum(ledger.creators.values()) == len(ledger.evictions)


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


async def test_an_exception_is_denied_for_its_own_time(hooked: WebhookCluster) -> None:
    """A VM with a cooldown of 30 s is allowed while one of ten minutes is still denied."""
    space, user = "own-time", "own-time-evictor"
    rig, admin = hooked.world.rig, hooked.world.rig.cluster.admin
    brief = {"name": "brief", "match": {"vmiLabels": {"tier": "brief"}}, "migrationCooldown": "30s"}
    names = ("brief", "long")
    async with (
        hooked.world.vms(space, {"node-5": names}),
        Evictor.made(hooked.control, user, space) as evictor,
        hooked.exporter("enforce", user, policy=UNHURRIED | {"overrides": [brief]}) as exporter,
    ):
        labels = {"metadata": {"labels": {"tier": "brief"}}}
        await admin.merge(VMIS, space, "brief", labels)

        async def evict(name: str) -> Answer:
            pod = await rig.pod(f"{space}/{name}")
            return await evictor.evict(pod["metadata"]["name"])

        for name in names:
            await rig.cluster.migrate(name, space)
            await rig.until(f"{space}/{name}", lambda scene: scene.phases == ["Succeeded"])
        await exporter.until_verdict(space, "long", "preEviction", "cooldown")
        held = await exporter.until_verdict(space, "brief", "preEviction", "cooldown")
        denied = [await evict(name) for name in names]
        await exporter.until_verdict(space, "brief", "preEviction", None)
        later = [await evict(name) for name in names]

    assert held["effectiveCooldownSeconds"] == 30
    assert [OURS in one.message for one in denied] == [True, True]
    assert [KUBEVIRTS in one.message for one in later] == [True, False]
    assert OURS in later[1].message


async def test_kubectl_drain(hooked: WebhookCluster, prove: Callable[[str], None]) -> None:
    """A drain by an unlisted user passes at once; by a listed one after the cooldown."""
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
        said = (await process.communicate())[0].decode()
        assert process.returncode == 0, said
        await admin.merge(NODE_OBJECTS, None, node, {"spec": {"unschedulable": None}})
        errors = [line for line in said.splitlines() if line.startswith("error")]
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
    """The webhook denies the eviction of a target pod, so it does not count as under way."""
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
    assert all(OURS in one.message for one in ledger.refused)
    assert all("migration_in_progress" in one.message for one in ledger.refused)
    # The one under way is the VM's own pod, which has KubeVirt's annotation.
    assert under_way == 1
