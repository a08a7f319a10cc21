"""The shipped rules in a real Prometheus, with a real Alertmanager.

Time runs sixty times faster: the simulated cluster and the exporter read one fast clock, and every
`for`, range and offset of the shipped rules is divided by the same factor. So `stuck.after` is
still half an hour of this clock. Prometheus scrapes the exporter as two replicas, without
honorLabels. It also scrapes two exporters of another cluster, whose VMs have the same names. It
sends alerts to two Alertmanagers: one with a plain configuration, and one with the shipped example.
"""

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from exporter.demo import node, objects, webhooks
from exporter.demo.objects import Object
from exporter.demo.scenario import Scenario
from exporter.demo.store import MIGRATIONS, PODS, VMIS
from exporter.server.admission.handlers import PATH
from exporter.settings import read_settings
from exporter.settings.values import Address
from tests.cluster import poll
from tests.cluster.ports import free_port
from tests.generate.rules import Groups, all_alerts, all_rules, fenced, load_groups, load_runbooks
from tests.integration.alerts import west
from tests.integration.alerts.fast import FACTOR, SPEED, Clock, exporting
from tests.integration.alerts.live import (
    RECEIVERS,
    Alertmanager,
    Prometheus,
    Receiver,
    example_config,
    plain_config,
)
from tests.integration.alerts.scaling import read_duration, scale, write_duration
from tests.support.faulty_apiserver import FaultyDemo
from tests.support.reviews import DESCHEDULER, a_review


ALERTS = all_alerts(load_groups())
LONGEST = read_duration("30m")
"""The longest `for` in this test; the only longer one, of a day, is shortened to it."""
MONITORING = "monitoring"
RESERVED = "node-5"
DRAINED = "node-6"
HOT = ("hot-1", "hot-2", "hot-3")
HELD = tuple(f"held-{number}" for number in range(1, 11))
HOMES = {**dict.fromkeys(HOT, RESERVED), HELD[0]: DRAINED}
"""Nodes that are reserved for these VMs, so that other VMs do not affect their alerts."""
LOST = ("lost-1", "lost-2", "lost-3")
"""VMs whose migrations to one node fail."""
NAMESPACE = "lab"
MOVED = "moved-1"
EAST = "east"
ABSENT = west.ABSENT[0]
CAUSES = {
    (name, cause)
    for name, rule in ALERTS.items()
    for cause in re.findall(r'"cause", "(\w+)"', rule["expr"]) or [None]
} - {
    ("KubeVirtDeschedulerWithoutVerdict", "closed"),
    ("KubeVirtEvictionWebhookFailing", "unavailable"),
}
"""Each alert with each `cause`, except the two that only promtool tests."""
MOVES = 6
COOLDOWN = 3600.0
"""The longest cooldown, in seconds of the fast clock."""


class Play(Scenario):
    """The demo's scenario, and two nodes that are reserved for the VMs of `HOMES`."""

    def choose_node(self, vmi: Object, free: Sequence[str]) -> str:
        home = HOMES.get(vmi["metadata"]["name"], "")
        if home in free:
            return home
        return super().choose_node(
            vmi, [node for node in free if node not in HOMES.values()] or free
        )


class Story:
    """Makes each alert of the first cluster fire, and then resolve."""

    def __init__(self, demo: FaultyDemo, receiver: Receiver) -> None:
        self.demo = demo
        self.cluster = demo.cluster
        self.receiver = receiver

    async def move_back_and_forth(self) -> None:
        """Migrate VMs back and forth until two alerts fire, and wait until both have resolved.

        On a busy machine the moves may take too long for the first alert, or the cooldowns may be
        over before the second one fires. Then the VMs are moved again.
        """
        for name in HOT:
            self.cluster.create_vmi(objects.build_vmi(NAMESPACE, name, annotations={}))
        fires = self.receiver.fires
        waiting = {
            asyncio.create_task(fires("KubeVirtVMChurning", name="hot-1")),
            asyncio.create_task(fires("KubeVirtNodeCannotBeRelieved", node=RESERVED)),
        }
        while waiting:
            await asyncio.gather(*(self._move(name) for name in HOT))
            fired, waiting = await asyncio.wait(
                waiting, timeout=COOLDOWN / FACTOR, return_when=asyncio.ALL_COMPLETED
            )
            await asyncio.gather(*fired)
        # The cooldowns end by themselves.
        await self.receiver.resolves("KubeVirtVMChurning", name="hot-1")
        await self.receiver.resolves("KubeVirtNodeCannotBeRelieved")

    async def hold_slots(self) -> None:
        """Evict VMs that cannot be migrated; wait for the alerts about evacuations and drains."""
        for name in HELD:
            self.cluster.create_vmi(objects.build_vmi(NAMESPACE, name, annotations={}))
        for name in HELD:
            await self._until_running(name)
            self.cluster.evict_vmi(NAMESPACE, name, descheduler=True)
            self.cluster.change_vmi(
                NAMESPACE, name, lambda vmi: node.set_migratable(vmi, migratable=False)
            )
        fires = self.receiver.fires
        await fires("KubeVirtEvacuationStuck", name=HELD[0])
        self.cluster.cordon(DRAINED)
        await fires("KubeVirtDeschedulerSlotsHeld", source="descheduler")
        await fires("KubeVirtEvacuationsStuckMany")
        await fires("KubeVirtEvacuationFailingRepeatedly", name="failing-1")
        await fires("KubeVirtEvacuationFailingRepeatedly", name="failing-2")
        (failing,) = [vm for vm in self.demo.scenario.vms if vm.name == "failing-1"]
        losing = asyncio.create_task(self._lose_mark(failing.namespace, failing.name))
        await fires("KubeVirtEvacuationDiverged", name=failing.name)
        losing.cancel()
        await fires("KubeVirtNodeCannotBeEmptied", cause="vms_stay", node=DRAINED)
        await fires("KubeVirtNodeDrainStuck", node=DRAINED)
        for vmi in self._vmis():
            namespace, name = vmi["metadata"]["namespace"], vmi["metadata"]["name"]
            if vmi["status"].get("evacuationNodeName") and name not in HOT:
                self.cluster.change_vmi(namespace, name, webhooks.cancel_evacuation)
            self.cluster.change_vmi(
                namespace, name, lambda vmi: node.set_migratable(vmi, migratable=True)
            )
        resolves = self.receiver.resolves
        await resolves("KubeVirtNodeCannotBeEmptied", cause="vms_stay", node=DRAINED)
        await fires("KubeVirtNodeCannotBeEmptied", cause="cordoned", node=DRAINED)
        self.cluster.uncordon(DRAINED)
        await resolves("KubeVirtEvacuationStuck", name=HELD[0])
        await resolves("KubeVirtDeschedulerSlotsHeld")
        await resolves("KubeVirtEvacuationsStuckMany")
        await resolves("KubeVirtEvacuationFailingRepeatedly")
        await resolves("KubeVirtEvacuationDiverged")
        await resolves("KubeVirtNodeCannotBeEmptied", node=DRAINED)
        await resolves("KubeVirtNodeDrainStuck", node=DRAINED)

    async def refuse_a_permission(self) -> None:
        """Wait for the alert about a missing permission, then grant the permission."""
        await self.receiver.fires(
            "KubeVirtEvictionExporterBlindSpot", cause="forbidden", resource="kubevirts"
        )
        self.demo.server.recover("kubevirts")
        await self.receiver.resolves("KubeVirtEvictionExporterBlindSpot", cause="forbidden")

    async def break_a_watch(self) -> None:
        """Make the watch of a resource fail until the alert fires."""
        self.demo.server.answer("kubevirts", 500, verbs=("watch",))
        self.demo.server.cut("kubevirts")
        await self.receiver.fires(
            "KubeVirtEvictionExporterStale", cause="watch_failing", resource="kubevirts"
        )
        self.demo.server.recover("kubevirts")
        await self.receiver.resolves("KubeVirtEvictionExporterStale", cause="watch_failing")

    async def deny_and_break(self) -> None:
        """Wait for the alert about a missing permission, then break the watch of that resource."""
        await self.refuse_a_permission()
        await self.break_a_watch()

    async def send_invalid_line(self) -> None:
        """Send a watch line that is not an object."""
        assert self.demo.server.inject(b"[]\n", VMIS.plural)
        await self.receiver.fires(
            "KubeVirtEvictionExporterBlindSpot", cause="invalid_objects", resource=VMIS.plural
        )
        await self.receiver.resolves("KubeVirtEvictionExporterBlindSpot", cause="invalid_objects")

    async def lose_the_disk(self, kept: Path) -> None:
        """Rename the directory of the history file; after the alert has fired, create it anew."""
        # A rename is one step; a deletion could fail, because the exporter may be writing a file.
        kept.rename(kept.with_name("lost"))  # noqa: ASYNC240 (a directory of the test's own)
        await self.receiver.fires("KubeVirtEvictionExporterStale", task="history")
        kept.mkdir()  # noqa: ASYNC240 (a directory of the test's own)
        await self.receiver.resolves("KubeVirtEvictionExporterStale", task="history")

    async def call_the_webhook(self, url: str) -> None:
        """Wait for the alert that nobody calls the webhook, then call the webhook."""
        await self.receiver.fires("KubeVirtEvictionWebhookFailing", cause="not_called")
        async with aiohttp.ClientSession() as session, session.post(url, json=a_review()) as asked:
            assert asked.status == 200
        await self.receiver.resolves("KubeVirtEvictionWebhookFailing", cause="not_called")

    async def freeze_server(self) -> None:
        """Freeze the API server until the alert fires."""
        self.demo.server.freeze()
        await self.receiver.fires(
            "KubeVirtEvictionExporterStale", cause="no_contact", resource=VMIS.plural
        )
        self.demo.server.thaw()
        await self.receiver.resolves("KubeVirtEvictionExporterStale", cause="no_contact")

    async def fail_migrations(self) -> None:
        """Send the exporter three VMIMs of a user that have failed, then their deletion."""
        self.cluster.create_vmi(objects.build_vmi(NAMESPACE, MOVED, annotations={}))
        await self._until_running(MOVED)
        failed = {
            "phase": "Failed",
            "phaseTransitionTimestamps": [
                {
                    "phase": "Failed",
                    "phaseTransitionTimestamp": objects.format_time(self.cluster.instant),
                }
            ],
        }
        vmims = [
            {
                "metadata": {
                    "namespace": NAMESPACE,
                    "name": f"by-a-user-{number}",
                    "uid": f"by-a-user-{number}",
                    "creationTimestamp": objects.format_time(self.cluster.instant),
                    "resourceVersion": str(self.demo.server.store.revision),
                    "labels": {"kubevirt.io/vmi-name": MOVED},
                },
                "spec": {"vmiName": MOVED},
                "status": failed,
            }
            for number in range(3)
        ]
        for vmim in vmims:
            self._send("ADDED", vmim)
        await self.receiver.fires("KubeVirtMigrationStuck", name=MOVED)
        for vmim in vmims:
            self._send("DELETED", vmim)
        await self.receiver.resolves("KubeVirtMigrationStuck", name=MOVED)

    async def break_a_target(self) -> None:
        """Send the exporter failed migrations of three VMs to one node."""
        for vm in LOST:
            self.cluster.create_vmi(objects.build_vmi(NAMESPACE, vm, annotations={}))
            await self._until_running(vm)
        at = objects.format_time(self.cluster.instant)
        for number in range(6):
            name = f"to-{RESERVED}-{number}"
            metadata = {
                "namespace": NAMESPACE,
                "name": name,
                "uid": name,
                "creationTimestamp": at,
                "resourceVersion": str(self.demo.server.store.revision),
            }
            state = {
                "migrationUid": name,
                "targetNode": RESERVED,
                "failed": True,
                "startTimestamp": at,
                "endTimestamp": at,
            }
            status = {
                "phase": "Failed",
                "phaseTransitionTimestamps": [{"phase": "Failed", "phaseTransitionTimestamp": at}],
                "migrationState": state,
            }
            vmim = {"metadata": metadata, "spec": {"vmiName": LOST[number % 3]}}
            self._send("ADDED", vmim | {"status": status})
        await self.receiver.fires("KubeVirtTargetNodeFailing", node=RESERVED)
        await self.receiver.resolves("KubeVirtTargetNodeFailing", node=RESERVED)

    def _send(self, kind: str, vmim: Object) -> None:
        line = json.dumps({"type": kind, "object": vmim}).encode() + b"\n"
        assert self.demo.server.inject(line, MIGRATIONS.plural)

    async def _move(self, name: str) -> None:
        await self._until_running(name)
        for _ in range(MOVES):
            self.cluster.evict_vmi(NAMESPACE, name)
            await self._until(
                name, lambda status: not status.get("evacuationNodeName"), "moved away"
            )
        # The number of moves is even, so the VM is back.
        await self._until(name, lambda status: status["nodeName"] == RESERVED, "back")

    async def _until_running(self, name: str) -> None:
        await self._until(name, lambda status: status.get("phase") == "Running", "running")

    async def _until(self, name: str, holds: Any, what: str) -> None:
        async def look() -> bool:
            vmi = self.cluster.vmi(NAMESPACE, name)
            return vmi is not None and bool(holds(vmi["status"]))

        await poll(look, what=f"{name} {what}")

    async def _lose_mark(self, namespace: str, name: str) -> None:
        """Send the exporter the pod without its annotation, as with KubeVirt 1.6.

        This is repeated, because the simulated cluster may send the pod again with its annotation.
        """

        async def marked() -> Object | None:
            pod = self.cluster.launcher(namespace, name)
            return pod if pod and objects.EVICTION_IN_PROGRESS in objects.annotations(pod) else None

        pod = await poll(marked, what=f"{name} marked")
        pod["metadata"]["annotations"].pop(objects.EVICTION_IN_PROGRESS)
        line = json.dumps({"type": "MODIFIED", "object": pod}).encode() + b"\n"
        while True:
            assert self.demo.server.inject(line, PODS.plural)
            await asyncio.sleep(1)

    def _vmis(self) -> list[Object]:
        keys = [(vm.namespace, vm.name) for vm in self.demo.scenario.vms]
        vmis = [self.cluster.vmi(*key) for key in (*keys, *((NAMESPACE, name) for name in HELD))]
        return [vmi for vmi in vmis if vmi is not None]


def shorten_day(groups: Groups) -> Groups:
    """Shorten each `for` that is longer than `LONGEST`; the rules are already scaled."""
    for rule in all_rules(groups):
        if read_duration(rule.get("for", "")) > LONGEST / FACTOR:
            rule["for"] = write_duration(LONGEST / FACTOR)
    return groups


@asynccontextmanager
async def playing(demo: FaultyDemo, query: str) -> AsyncIterator[None]:
    """Run the cluster and its descheduler."""
    stop = asyncio.Event()
    task = asyncio.create_task(demo.run(query, stop))
    try:
        yield
    finally:
        stop.set()
        await task


async def until_ready(query: str) -> None:
    """Wait until an exporter has read the cluster."""

    async def is_ready() -> bool:
        async with aiohttp.ClientSession() as session, session.get(f"{query}/readyz") as answer:
            return answer.status == 200

    await poll(is_ready, what="ready")


class Played:
    """A finished run: the notifications of the receivers, and its Prometheus.

    `routed` is what the second Alertmanager sent, by receiver.
    """

    def __init__(
        self,
        receiver: Receiver,
        routed: dict[str, Receiver],
        prometheus: Prometheus,
        seconds: float,
    ) -> None:
        self.received = receiver.received
        self.routed = {name: receiver.received for name, receiver in routed.items()}
        self.prometheus = prometheus
        self.seconds = seconds


@pytest.fixture(scope="module")
async def played(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Played]:
    """One run for all the tests of this module."""
    directory = tmp_path_factory.mktemp("alerts")
    clock = Clock()
    port, webhook = free_port(), Address("127.0.0.1", free_port())
    settings = read_settings(
        {
            "policy": {"maxMigrationCooldown": f"{COOLDOWN:g}s"},
            "admission": {"users": [DESCHEDULER]},
            "listen": {"query": "127.0.0.1:0", "metrics": f"127.0.0.1:{port}"},
            "history": f"file:{directory / 'kept' / 'history'}",
            "kube": {
                "syncTimeout": "10m",
                "rejectedRetry": "5s",
                "staleAfter": "1h",
                "historyInterval": "250ms",
            },
        }
    )
    settings = replace(settings, listen=replace(settings.listen, admission=(webhook,)))
    demo = FaultyDemo(clock.read, speed=SPEED, nodes=6)
    demo.server.bookmark_seconds = 60.0 / FACTOR
    demo.scenario = demo.cluster.fates.plan = Play()
    targets = [
        {
            "targets": [f"127.0.0.1:{port}"],
            "labels": {
                "instance": replica,
                "namespace": MONITORING,
                "node": "infra-1",
                "cluster": EAST,
            },
        }
        for replica in ("a", "b")
    ]
    (directory / "kept").mkdir()
    started = time.monotonic()
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        receiver = await enter(Receiver())
        routed = {name: await enter(Receiver()) for name in RECEIVERS}
        plain = Alertmanager(directory / "plain", plain_config(receiver.url))
        urls = {name: receiver.url for name, receiver in routed.items()}
        example = Alertmanager(directory / "example", example_config(urls))
        managers = [(await enter(manager)).address for manager in (plain, example)]
        other = west.West(directory, clock, receiver)
        targets += await enter(other.served())
        rules = shorten_day(scale(load_groups(), FACTOR))
        prometheus = await enter(
            Prometheus(directory, rules, targets=targets, alertmanagers=managers)
        )
        await enter(demo)
        await receiver.fires(ABSENT, cause="every_replica")
        demo.server.answer("kubevirts", 403)
        demo.server.refuse_streaming_lists()
        demo.server.freeze()
        async with exporting(settings, demo, clock) as query, playing(demo, query):
            await receiver.fires(
                "KubeVirtEvictionExporterStale", cause="not_synced", resource=VMIS.plural
            )
            demo.server.thaw()
            await receiver.resolves("KubeVirtEvictionExporterStale", cause="not_synced")
            await receiver.resolves(ABSENT, cause="every_replica")
            # A failed scrape on a busy machine resolves these alerts too, so the exporter is asked
            # as well.
            await until_ready(query)
            story = Story(demo, receiver)
            await story.freeze_server()
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(story.deny_and_break())
                tasks.create_task(story.send_invalid_line())
                tasks.create_task(story.call_the_webhook(f"http://{webhook}{PATH}"))
                tasks.create_task(story.lose_the_disk(directory / "kept"))
                tasks.create_task(story.move_back_and_forth())
                tasks.create_task(story.hold_slots())
                tasks.create_task(story.fail_migrations())
                tasks.create_task(story.break_a_target())
                tasks.create_task(other.play())
            yield Played(receiver, routed, prometheus, time.monotonic() - started)


def expected_clusters(alert: west.Cause) -> set[str | None]:
    """The clusters that an alert must name; before the first scrape it names none (None)."""
    if alert == west.ABSENT:
        return {None, west.WEST}
    if alert == ("KubeVirtEvictionExporterStale", "task_failing"):
        return {EAST, west.WEST}  # in `EAST` the history loses its disk
    return {west.WEST} if alert in west.ALERTS else {EAST}


@pytest.mark.timeout(1500)
@pytest.mark.parametrize(("name", "cause"), sorted(CAUSES, key=str))
async def test_alert_fires_and_resolves(
    played: Played, name: str, cause: str | None, prove: Callable[[str], None]
) -> None:
    """Each cause of each shipped alert sends a notification when it begins and when it ends."""
    notifications = [
        alert
        for alert in played.received
        if (alert["labels"]["alertname"], alert["labels"].get("cause")) == (name, cause)
    ]
    labels = [
        notification["labels"]
        for notification in notifications
        if notification["status"] == "firing"
    ]

    assert {notification["status"] for notification in notifications} == {"firing", "resolved"}
    clusters = {label.get("cluster") for label in labels}
    # If the machine is so busy that no scrape succeeds, the alert fires for `EAST`, too.
    assert clusters - ({EAST} if name == ABSENT else set()) == expected_clusters((name, cause))
    rule = ALERTS[name]
    for label in labels:
        own = {**rule["labels"], **({"vm": label["name"]} if "vm" in rule["labels"] else {})}
        assert own.items() <= label.items()
        assert label["namespace"]
        assert not label.keys() & {"instance", "job"}
    for notification in notifications:
        step = notification["labels"].get("cause", "")
        runbook = rule["annotations"]["runbook_url"].replace("{{$labels.cause}}", step)
        assert notification["annotations"]["runbook_url"] == runbook
        assert "<no value>" not in json.dumps(notification["annotations"])
        assert "error" not in notification["annotations"]["description"]
    prove(f"alerts: {name} fired and resolved: {notifications[0]['annotations']['description']}")


@pytest.mark.timeout(1500)
async def test_alerts_name_the_vm_and_not_the_exporter(played: Played) -> None:
    """Without honorLabels an alert still has the VM's namespace and node."""
    stuck = [
        alert
        for alert in played.received
        if alert["labels"]["alertname"] == "KubeVirtEvacuationStuck"
        and alert["labels"]["name"] == HELD[0]
    ]

    assert {alert["labels"]["namespace"] for alert in stuck} == {NAMESPACE}
    assert {alert["labels"]["exported_namespace"] for alert in stuck} == {NAMESPACE}
    assert not {alert["labels"]["node"] for alert in stuck} & {"infra-1", ""}
    assert "Failed attempts: 0." in stuck[0]["annotations"]["description"]


@pytest.mark.timeout(1500)
async def test_alert_fires_in_its_cluster_alone(
    played: Played, prove: Callable[[str], None]
) -> None:
    """Each alert is of one cluster, although both clusters have VMs with the same names."""
    clusters: dict[str, set[str | None]] = {}
    for alert in played.received:
        labels = dict(alert["labels"])
        cluster = labels.pop("cluster", None)
        if labels["alertname"] != ABSENT:
            clusters.setdefault(json.dumps(labels, sort_keys=True), set()).add(cluster)
    prove(f"alerts: {len(clusters)} different alerts, each of one cluster")

    assert {len(some) for some in clusters.values()} == {1}


@pytest.mark.timeout(1500)
async def test_example_sends_less(played: Played, prove: Callable[[str], None]) -> None:
    """The example configuration sends fewer notifications about stuck evacuations."""
    about = {
        "KubeVirtEvacuationStuck",
        "KubeVirtEvacuationFailingRepeatedly",
        "KubeVirtEvacuationsStuckMany",
    }
    sent = played.routed["virtualization"] + played.routed["virtualization-page"]
    before, after = (
        sum(
            notification["status"] == "firing" and notification["labels"]["alertname"] in about
            for notification in notifications
        )
        for notifications in (played.received, sent)
    )
    prove(f"alerts: {before} notifications about stuck evacuations, {after} with the example")

    assert 0 < after < before
    assert not played.routed["others"]
    severities = {
        receiver: {row["labels"]["severity"] for row in rows}
        for receiver, rows in played.routed.items()
        if rows
    }
    assert severities == {
        "virtualization-page": {"critical"},
        "virtualization": {"warning"},
        "virtualization-later": {"info"},
    }


@pytest.mark.timeout(1500)
async def test_prometheus_evaluated_every_rule_without_an_error(
    played: Played, prove: Callable[[str], None]
) -> None:
    """Prometheus evaluates every rule without an error."""
    answer = await played.prometheus.ask("rules")
    rules = [rule for group in answer["groups"] for rule in group["rules"]]

    assert len(rules) == len(all_rules(load_groups()))
    assert {(rule["health"], rule.get("lastError", "")) for rule in rules} == {("ok", "")}
    prove(
        f"alerts: {len(rules)} rules in a real Prometheus for {played.seconds:.0f} s,"
        f" each for, range and offset divided by {FACTOR:g}; {len(played.received)} messages"
    )


@pytest.mark.timeout(1500)
async def test_queries_of_the_runbooks_are_answered(played: Played) -> None:
    """Prometheus evaluates each query of the runbooks without an error."""
    queries = {query for text in load_runbooks().values() for query in fenced(text, "promql")}
    for query in queries:
        answer = await played.prometheus.ask("query", query=query)
        assert answer["resultType"] == "vector"
