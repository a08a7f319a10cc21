"""EvictionRequests on real servers: what the exporter tells of them.

`tests/integration/kubevirt/test_eviction_requests.py` has what Kubernetes and KubeVirt do by
themselves.
"""

import signal
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from exporter.demo.objects import Object, condition, is_final, node_of, parse_time, phase
from exporter.engine.store.evictions import EvictionOutcome, RequesterKind
from tests.cluster import EXPORTER_READS, PATIENCE, PODS, User, poll
from tests.cluster.access import allow
from tests.cluster.eviction_requests import (
    NEEDS_CONTROLLERS,
    Asking,
    condition_of,
    message_of,
    state_of,
)
from tests.cluster.player import Fate
from tests.cluster.recording import Scene
from tests.cluster.resources import EVICTIONS
from tests.cluster.rig import Rig
from tests.generate.manifests import NAME, NAMESPACE, only, render
from tests.integration.alerts.test_practice import shell
from tests.integration.deploy.server import RBAC, applied, apply, granted
from tests.integration.kubevirt.test_node_drains import NODE, Prove, Stage
from tests.support.commands import run_command
from tests.support.program import Program, program


pytestmark = NEEDS_CONTROLLERS

Ends: TypeAlias = Counter[tuple[RequesterKind, EvictionOutcome]]

DRAIN, BALANCE = "example.com/drain", "example.com/descheduler"
SETTINGS = {"evictionRequests": {"mode": "observe", "deschedulers": [BALANCE]}}
PRESENT = "kubevirt_eviction_exporter_eviction_requests"
ENDED = "kubevirt_eviction_exporter_eviction_requests_total"
RESPONDER = "kubevirt-eviction-exporter.io/cooldown"
EVICTOR = "imperative-eviction.k8s.io/evictor"
EVICTED = "TargetEvicted"
COOLDOWN = "60s"
SOON = 20.0
"""Seconds from the end of a cooldown until KubeVirt has marked the VM, on a busy machine."""
FIRST = "First withdraw the EvictionRequest of"


@dataclass
class Ground(Stage):
    """The rig with Kubernetes' controllers of EvictionRequests, and the exporter beside them."""

    asking: Asking

    async def until_vmi(self, key: str, holds: Callable[[dict[str, Any]], object]) -> Any:
        """Wait until the API's answer about a VM meets a condition; returns the answer."""
        return await self.exporter.until(
            f"/v1/vmis/{key}", lambda status, vmi: status == 200 and holds(vmi)
        )

    async def explain(self, key: str) -> str:
        """What `kubectl evictions explain` prints about a VM."""
        _, output, _ = await run_command("explain", "--url", self.exporter.query, key)
        return output

    async def count_ends(self) -> Ends:
        """How many Evictions have ended, by who asked and how."""
        return Counter(
            {
                (kind, outcome): int(
                    await self.exporter.sample(ENDED, requester_kind=kind, outcome=outcome)
                )
                for kind in RequesterKind
                for outcome in EvictionOutcome
            }
        )

    async def until_ended(
        self, before: Ends, kind: RequesterKind, outcome: EvictionOutcome
    ) -> None:
        """Wait until an Eviction has ended since `before`, and see that it ended in this way."""

        async def find() -> Ends:
            return await self.count_ends() - before

        assert await poll(find, what="an Eviction ended") == {(kind, outcome): 1}


@pytest.fixture(scope="module")
async def ground(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Ground]:
    """Servers of Kubernetes 1.38 and KubeVirt, and an exporter that may read Evictions."""
    async with Asking.opened() as asking:
        control = asking.rig.cluster.control
        login = control.kubeconfig(await control.user("observer", (*EXPORTER_READS, EVICTIONS)))
        async with program(
            tmp_path_factory.mktemp("evictions"), "--kubeconfig", str(login), config=SETTINGS
        ) as exporter:
            await exporter.ready()
            yield Ground(asking.rig, exporter, asking)


def read_intents(vmi: dict[str, Any]) -> dict[str, str]:
    """The requesters of a VM's Eviction with their intents; empty without an Eviction."""
    request = vmi["evictionRequest"] or {"requesters": []}
    return {requester["name"]: requester["intent"] for requester in request["requesters"]}


def read_askers(shown: dict[str, Any]) -> set[str]:
    """Who asks for an evacuation or a drain; empty: nobody is known."""
    requester = shown["requestedBy"]
    return set(requester["user"].split(", ")) if requester else set()


async def begin_migration(rig: Rig, key: str) -> Object:
    """Migrate a VM as a user does; returns the target pod."""
    namespace, name = key.split("/")
    await rig.cluster.migrate(name, namespace)
    moving = await rig.until(key, lambda scene: "targetPod" in scene.state)
    target = moving.state["targetPod"]
    return next(pod for pod in moving.pods if pod["metadata"]["name"] == target)


async def test_one_of_two_requesters_withdraws(ground: Ground) -> None:
    """Who still asks is shown for the VM, its evacuation and the drain of its node."""
    key = "er-two/db1"
    async with (
        ground.rig.vmi(key, Fate("hangs"), node=NODE, evictionStrategy="LiveMigrate"),
        ground.cordoned(),
    ):
        before = await ground.count_ends()
        pod = await ground.rig.pod(key)
        balance, _ = [await ground.asking.ask(pod, name) for name in (BALANCE, DRAIN)]
        both = await ground.until_vmi(
            key,
            lambda vmi: (
                len(read_intents(vmi)) == 2
                and vmi["evacuation"]
                and vmi["evictionRequest"]["message"]
            ),
        )
        drain = await ground.until_drain(lambda drain: len(read_askers(drain)) == 2)
        assert await ground.exporter.sample(PRESENT, state="Active") == 1
        output = await ground.explain(key)

        await ground.asking.withdraw(balance)
        vmi = await ground.until_vmi(key, lambda vmi: "Withdrawn" in read_intents(vmi).values())
        left = await ground.until_drain(lambda drain: len(read_askers(drain)) == 1)
        said_then = await ground.explain(key)
        ends = await ground.count_ends() - before

    assert read_intents(both) == {BALANCE: "Eviction", DRAIN: "Eviction"}
    assert "Eviction triggered evacuation" in both["evictionRequest"]["message"]
    assert both["evacuation"]["source"] == "descheduler"
    assert read_askers(both["evacuation"]) == read_askers(drain["drain"]) == {BALANCE, DRAIN}
    assert drain["drain"]["asked"] == 1
    assert f"{BALANCE} (Eviction)" in output
    assert FIRST in output

    assert read_intents(vmi) == {BALANCE: "Withdrawn", DRAIN: "Eviction"}
    assert vmi["evacuation"]["source"] == "other"
    assert read_askers(vmi["evacuation"]) == read_askers(left["drain"]) == {DRAIN}
    assert f"{BALANCE} (Withdrawn)" in said_then
    assert f"{FIRST} {DRAIN}, or Kubernetes asks" in said_then
    assert not ends


async def test_both_withdraw_while_attempts_fail(ground: Ground, prove: Prove) -> None:
    """KubeVirt goes on, which is shown with the command that stops it; then nothing is left."""
    key = "er-nobody/db1"
    async with ground.rig.vmi(key, Fate("fails"), evictionStrategy="LiveMigrate"):
        before = await ground.count_ends()
        pod = await ground.rig.pod(key)
        requests = [await ground.asking.ask(pod, name) for name in (DRAIN, BALANCE)]
        asked = await ground.until_vmi(
            key,
            lambda vmi: (
                len(read_intents(vmi)) == 2
                and vmi["evacuation"]
                and vmi["evacuation"]["failedAttempts"]
            ),
        )
        assert FIRST in await ground.explain(key)
        for request in requests:
            await ground.asking.withdraw(request)
        withdrawn = await ground.until_vmi(
            key, lambda vmi: set(read_intents(vmi).values()) == {"Withdrawn"}
        )
        assert withdrawn["evictionRequest"]["state"] == "Canceled"
        failed = asked["evacuation"]["failedAttempts"]
        going_on = await ground.until_vmi(
            key, lambda vmi: vmi["evacuation"]["failedAttempts"] > failed
        )
        output = await ground.explain(key)
        command = going_on["evacuation"]["cancel"]["command"]
        control = ground.rig.cluster.control
        await shell(command, KUBECONFIG=str(control.kubeconfig(control.administrator)))
        await ground.until_vmi(key, lambda vmi: vmi["evacuation"] is None)
        assert not (await ground.rig.look(key)).marked
        await ground.until_ended(before, RequesterKind.DESCHEDULER, EvictionOutcome.CANCELLED)

    assert going_on["evacuation"]["requestedBy"] is None
    assert f"{DRAIN} (Withdrawn)" in output
    assert f"{BALANCE} (Withdrawn)" in output
    assert command in output
    assert FIRST not in output
    prove(
        f"EvictionRequests: both withdrawn after {failed} failed attempts, KubeVirt went on to"
        f" {going_on['evacuation']['failedAttempts']} until `{command}`"
    )


async def test_the_target_pod_of_a_migration(ground: Ground) -> None:
    """A request for the target pod is shown during the migration, and moves the VM on after it."""
    key = "er-target/db1"
    async with ground.rig.vmi(key, Fate(seconds=6), evictionStrategy="LiveMigrate"):
        before = await ground.count_ends()
        target = await begin_migration(ground.rig, key)
        await ground.asking.ask(target, DRAIN)
        asked = await ground.until_vmi(
            key, lambda vmi: vmi["evictionRequest"] and vmi["evictionRequest"]["message"]
        )
        again = await ground.until_vmi(key, lambda vmi: vmi["evacuation"])
        await ground.until_vmi(
            key, lambda vmi: vmi["evacuation"] is None and vmi["evictionRequest"] is None
        )
        await ground.until_ended(before, RequesterKind.OTHER, EvictionOutcome.EVICTED)

    assert asked["evacuation"] is None
    assert asked["move"]["trigger"] == "manual"
    assert again["evacuation"]["evacuationNodeName"] == node_of(target)
    assert read_askers(again["evacuation"]) == {DRAIN}


async def test_an_external_vm(ground: Ground) -> None:
    """That KubeVirt leaves the VM to another controller is said, and who asks for it."""
    key = "er-others/db1"
    async with ground.rig.vmi(key, "hangs", evictionStrategy="External"):
        await ground.asking.ask(await ground.rig.pod(key), DRAIN)
        asked = await ground.until_vmi(
            key, lambda vmi: vmi["evacuation"] and vmi["evictionRequest"]
        )
        output = await ground.explain(key)

    assert asked["evacuation"]["state"] == "external"
    assert read_askers(asked["evacuation"]) == {DRAIN}
    assert asked["evacuation"]["nextStep"] in output
    assert f"{DRAIN} (Eviction)" in output


async def test_a_vm_that_cannot_migrate(ground: Ground) -> None:
    """KubeVirt refuses without marking the VM; its drain counts it as asked, and as failing."""
    key = "er-stays/db1"
    async with (
        ground.rig.vmi(key, node=NODE, evictionStrategy="LiveMigrate") as scene,
        ground.cordoned(),
    ):
        await ground.rig.player.set_migratable(scene.vmi, migratable=False)
        await ground.asking.ask(await ground.rig.pod(key), DRAIN)
        asked = await ground.until_vmi(
            key, lambda vmi: vmi["evictionRequest"] and vmi["evictionRequest"]["message"]
        )
        node = await ground.until_drain(lambda drain: drain["requestedBy"])
        output = await ground.explain(key)

    assert asked["evacuation"] is None
    assert asked["drain"] == "stays"
    assert "is not live-migratable" in asked["evictionRequest"]["message"]
    assert asked["obstruction"]["nextStep"] in output
    assert read_askers(node["drain"]) == {DRAIN}
    assert (node["drain"]["asked"], node["drain"]["failing"]) == (1, 1)


async def test_a_vm_that_an_eviction_stops(ground: Ground) -> None:
    """That the VM would go down is said before; its end counts as evicted."""
    key = "er-stopped/db1"
    async with ground.rig.vmi(key, evictionStrategy="LiveMigrateIfPossible") as scene:
        await ground.rig.player.set_migratable(scene.vmi, migratable=False)
        await ground.until_vmi(key, lambda vmi: vmi["drain"] == "restarts")
        before = await ground.count_ends()
        output = await ground.explain(key)
        pod = await ground.rig.pod(key)
        await ground.asking.ask(pod, DRAIN)
        await ground.rig.until(key, lambda scene: phase(scene.vmi) in {"Failed", "Succeeded"})
        ended = await ground.until_vmi(key, lambda vmi: vmi["phase"] in {"Failed", "Succeeded"})
        await ground.until_ended(before, RequesterKind.OTHER, EvictionOutcome.EVICTED)
        await ground.asking.until(pod, lambda eviction: state_of(eviction, EVICTOR) == "Completed")
        await ground.asking.record("stopped", "A VM that the eviction stopped.", key, pod)

    assert "it goes down" in output
    assert ended["evictionRequest"] is None


@dataclass(frozen=True)
class Responder:
    """The account that may answer EvictionRequests."""

    user: User
    login: tuple[str, str]


@pytest.fixture
async def responder(ground: Ground) -> AsyncIterator[Responder]:
    """The account of our manifests with its login, and the policy that adds our responder to pods.

    They are removed after the test, because the other tests need pods that have no responder.
    """
    control = ground.rig.cluster.control
    base = render("base")
    await apply(control.admin, [only(base, "Namespace")])
    objects = [document for document in base if document["kind"] in RBAC]
    objects += render("components/eviction-requests")
    async with applied(control.admin, objects):
        user = await control.account(NAMESPACE, NAME)
        trial = {
            "metadata": {"generateName": "trial-", "labels": {"kubevirt.io": "virt-launcher"}},
            "spec": {"containers": [{"name": "compute", "image": "virt-launcher"}]},
        }

        async def is_added() -> Any:
            made = await control.admin.request(
                "POST", PODS.path("default"), json=trial, params={"dryRun": "All"}
            )
            return made["spec"].get("evictionResponders")

        assert await poll(is_added, what="our responder added") == [
            {"name": RESPONDER, "priority": 20000}
        ]

        async def is_permitted() -> bool:
            async with control.client(user) as client:
                verbs = {(verb, resource) for verb, _, resource, _ in await granted(client)}
            return {("patch", "evictions/status"), ("update", "leases")} <= verbs

        await poll(is_permitted, what="our role in force")
        yield Responder(user, ("--kubeconfig", str(control.kubeconfig(user))))


@dataclass
class Held:
    """A VM in its cooldown, with the pod that somebody has asked for."""

    ground: Ground
    key: str
    pod: Object
    request: Object
    not_before: datetime

    async def until(self, holds: Callable[[Object], object]) -> Object:
        """Wait until the pod's Eviction meets a condition; returns it."""
        return await self.ground.asking.until(self.pod, holds)

    async def record(self, name: str, source: str, responder: str) -> None:
        """Record the VM after this responder has completed; see `Asking.record`."""
        await self.until(lambda eviction: state_of(eviction, responder) == "Completed")
        await self.ground.asking.record(name, source, self.key, self.pod)

    async def until_evicted(self) -> float:
        """Wait until KubeVirt has marked the VM; returns how long after the cooldown that was."""
        marked = await self.ground.rig.until(self.key, lambda scene: scene.marked, within=PATIENCE)
        asked = condition(marked.vmi, "EvictionRequested")
        assert asked is not None
        return (parse_time(asked["lastTransitionTime"]) - self.not_before).total_seconds()


async def hold(ground: Ground, exporter: Program, key: str) -> Held:
    """Migrate a VM, ask for it, and wait until the exporter holds it."""
    await exporter.ready()
    namespace, name = key.split("/")
    await ground.rig.cluster.migrate(name, namespace)
    await ground.rig.until(key, lambda scene: scene.phases == ["Succeeded"], within=PATIENCE)
    cooling = await exporter.until(
        f"/v1/vmis/{key}", lambda status, vmi: status == 200 and vmi["cooldown"]
    )
    pod = await ground.rig.pod(key)
    request = await ground.asking.ask(pod, DRAIN)
    not_before = datetime.fromisoformat(cooling["cooldown"]["notBefore"])
    held = Held(ground, key, pod, request, not_before)
    eviction = await held.until(lambda eviction: message_of(eviction, RESPONDER))
    assert state_of(eviction, RESPONDER) == "Active"
    assert f"{key} may not be moved now: it is cooling down" in message_of(eviction, RESPONDER)
    entries = {responder["name"]: responder for responder in eviction["status"]["responders"]}
    expected = parse_time(entries[RESPONDER]["expectedCompletionTime"])
    assert expected == not_before
    assert not (await ground.rig.look(key)).marked
    return held


def responding(cooldown: str, **requests: object) -> dict[str, Any]:
    """A configuration with which the exporter answers EvictionRequests."""
    return {
        "policy": {"migrationCooldown": cooldown},
        "evictionRequests": {"mode": "respond", **requests},
    }


@pytest.mark.usefixtures("responder")
async def test_launchers_alone_have_our_responder(ground: Ground) -> None:
    """The policy adds it to the pods of VMs and of migrations' targets, and to no others."""
    key = "er-policy/db1"
    admin = ground.rig.cluster.admin
    web = {
        "metadata": {"name": "web", "namespace": "er-policy"},
        "spec": {"containers": [{"name": "web", "image": "web"}]},
    }
    async with ground.rig.vmi(key, Fate("hangs"), evictionStrategy="LiveMigrate"):
        launcher = await ground.rig.pod(key)
        target = await begin_migration(ground.rig, key)
        other = await admin.create(PODS, web)

    for virtual in (launcher, target):
        assert virtual["spec"]["evictionResponders"] == [{"name": RESPONDER, "priority": 20000}]
    assert "evictionResponders" not in other["spec"]


async def test_a_vm_in_its_cooldown(
    ground: Ground, responder: Responder, tmp_path: Path, prove: Prove
) -> None:
    """It is held with reason and time, then evicted, and the message follows it until it leaves."""
    key = "er-held/db1"
    async with (
        ground.rig.vmi(key, Fate(), Fate(seconds=10), evictionStrategy="LiveMigrate"),
        program(tmp_path, *responder.login, config=responding(COOLDOWN)) as exporter,
    ):
        held = await hold(ground, exporter, key)
        await ground.asking.record("held", "A VM in its cooldown.", key, held.pod)
        late = await held.until_evicted()
        leaving = await held.until(lambda eviction: "leaves" in message_of(eviction, RESPONDER))
        await ground.asking.record("followed", "The same VM, while it migrates.", key, held.pod)
        left = await held.until(lambda eviction: condition_of(eviction, EVICTED)[0] == "True")
        done = await held.until(lambda eviction: state_of(eviction, RESPONDER) != "Active")
        await ground.asking.record("completed", "The same VM has left its node.", key, held.pod)

    output = message_of(leaving, RESPONDER)
    assert 0 <= late < SOON
    assert state_of(leaving, EVICTOR) == "Inactive"
    assert f"{key} leaves" in output
    assert condition_of(left, EVICTED) == ("True", "PodTerminal")
    assert state_of(done, RESPONDER) == "Completed"
    assert state_of(done, EVICTOR) == "Inactive"
    assert message_of(done, RESPONDER).startswith(f"{key} has left ")
    prove(f"EvictionRequests: evicted {late:.0f} s after the cooldown, then said: {output}")


async def test_kubernetes_evicts_after_a_hold(
    ground: Ground, responder: Responder, tmp_path: Path
) -> None:
    """With `evict: false` the exporter only holds the VM until the end of its cooldown."""
    key = "er-handed-over/db1"
    async with (
        ground.rig.vmi(key, Fate(), Fate(seconds=6), evictionStrategy="LiveMigrate"),
        program(tmp_path, *responder.login, config=responding(COOLDOWN, evict=False)) as exporter,
    ):
        held = await hold(ground, exporter, key)
        late = await held.until_evicted()
        evicting = await held.until(
            lambda eviction: "triggered evacuation" in message_of(eviction, EVICTOR)
        )
        left = await held.until(lambda eviction: condition_of(eviction, EVICTED)[0] == "True")
        await held.record("handed-over", "A VM whose hold ended, evicted by Kubernetes.", EVICTOR)

    assert 0 <= late < SOON
    assert state_of(evicting, RESPONDER) == "Completed"
    assert condition_of(left, EVICTED) == ("True", "PodTerminal")


async def test_a_successor_goes_on_with_a_hold(
    ground: Ground, responder: Responder, tmp_path: Path
) -> None:
    """If the exporter is killed during a hold, the next one evicts when the cooldown is over."""
    key = "er-inherited/db1"
    config = responding(COOLDOWN)
    async with ground.rig.vmi(key, Fate(), Fate(seconds=6), evictionStrategy="LiveMigrate"):
        async with program(tmp_path, *responder.login, config=config) as exporter:
            held = await hold(ground, exporter, key)
            await exporter.end(signal.SIGKILL)
        async with program(tmp_path, *responder.login, config=config):
            late = await held.until_evicted()
            left = await held.until(lambda eviction: condition_of(eviction, EVICTED)[0] == "True")
            await held.record("inherited", "Held by two processes, one after the other.", RESPONDER)

    assert 0 <= late < SOON
    assert state_of(left, EVICTOR) == "Inactive"


@pytest.mark.soak
@pytest.mark.timeout(1800)
async def test_without_a_successor_kubernetes_goes_on(
    ground: Ground, responder: Responder, tmp_path: Path, prove: Prove
) -> None:
    """If the exporter is killed during a hold and does not return, its turn ends after 20 minutes.

    The time is a constant of Kubernetes, which no option shortens, so the test waits for it.
    """
    key = "er-orphaned/db1"
    async with ground.rig.vmi(key, Fate(), Fate(seconds=6), evictionStrategy="LiveMigrate"):
        async with program(tmp_path, *responder.login, config=responding("1h")) as exporter:
            held = await hold(ground, exporter, key)
            await exporter.end(signal.SIGKILL)
        passed = await ground.asking.until(
            held.pod, lambda eviction: state_of(eviction, EVICTOR) == "Active", within=1500
        )
        instant = datetime.now(UTC)
        left = await held.until(lambda eviction: condition_of(eviction, EVICTED)[0] == "True")
        await held.record("passed-over", "Held by a process that was killed.", EVICTOR)

    (entry,) = [entry for entry in passed["status"]["responders"] if entry["name"] == RESPONDER]
    silent = (instant - parse_time(entry["heartbeatTime"])).total_seconds()
    assert state_of(passed, RESPONDER) == "Interrupted"
    assert condition_of(left, EVICTED) == ("True", "PodTerminal")
    assert 1170 < silent < 1320
    prove(f"EvictionRequests: passed over {silent:.0f} s after the last heartbeat, then evicted")


async def test_a_target_pod_is_moved_once(
    ground: Ground, responder: Responder, tmp_path: Path
) -> None:
    """A request for the target pod of a migration waits for its end, and for the cooldown."""
    key = "er-arriving/db1"
    async with (
        ground.rig.vmi(key, Fate(seconds=10), evictionStrategy="LiveMigrate"),
        program(tmp_path, *responder.login, config=responding("40s")) as exporter,
    ):
        await exporter.ready()
        target = await begin_migration(ground.rig, key)
        await ground.asking.ask(target, DRAIN)
        waiting = await ground.asking.until(target, lambda row: message_of(row, RESPONDER))
        cooling = await ground.asking.until(
            target, lambda eviction: "cooling down" in message_of(eviction, RESPONDER)
        )
        scene = await ground.rig.look(key)
        source = "The target pod of a migration, held after it."
        await ground.asking.record("arrived", source, key, target)

    assert "migration" in message_of(waiting, RESPONDER)
    assert state_of(cooling, RESPONDER) == "Active"
    assert not scene.marked
    assert scene.phases == ["Succeeded"]


async def test_withdrawn_requests_stop_kubevirt(
    ground: Ground, responder: Responder, tmp_path: Path
) -> None:
    """With `cancel`, KubeVirt's marker goes when all have withdrawn, and no VMIM follows."""
    key, other = "er-cancelled/db1", "er-going-on/db1"
    subresource = "virtualmachineinstances/evacuate"
    rule = {
        "apiGroups": ["subresources.kubevirt.io"],
        "resources": [subresource, f"{subresource}/cancel"],
        "verbs": ["update"],
    }
    control = ground.rig.cluster.control
    await allow(control.admin, responder.user, "canceller", rule)
    async with (
        ground.rig.vmi(key, Fate("fails"), evictionStrategy="LiveMigrate"),
        program(tmp_path, *responder.login, config=responding("0s", cancel=True)) as exporter,
    ):
        pod = await ground.rig.pod(key)
        requests = [await ground.asking.ask(pod, name) for name in (DRAIN, BALANCE)]
        await ground.rig.until(key, lambda scene: "Failed" in scene.phases, within=PATIENCE)
        for request in requests:
            await ground.asking.withdraw(request)
        await until_cancelled(exporter)
        stopped = await ground.rig.until(key, has_stopped, within=PATIENCE)
        # Meanwhile KubeVirt goes on with another VM, so it would have gone on with this one.
        async with ground.rig.vmi(other, Fate("fails"), evictionStrategy="LiveMigrate"):
            await ground.rig.evict(other)
            await ground.rig.until(other, lambda scene: len(scene.vmims) > 1, within=PATIENCE)
        later = await ground.rig.look(key)
        await ground.asking.record("cancelled", "All withdrew, and we told KubeVirt.", key, pod)

    assert not later.marked
    assert later.phases == stopped.phases


async def until_cancelled(exporter: Program) -> None:
    """Wait until the exporter has cancelled an evacuation."""

    async def find() -> list[dict[str, Any]]:
        return exporter.events("evacuation_cancelled")

    (event,) = await poll(find, what="an evacuation cancelled")
    assert set(event["withdrawn"]) == {DRAIN, BALANCE}


def has_stopped(scene: Scene) -> bool:
    """Whether a VM is not to leave its node any more, and all of its migrations have ended."""
    return not scene.marked and all(map(is_final, scene.vmims))
