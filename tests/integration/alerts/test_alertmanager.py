"""Tests of the example configuration in a real Alertmanager."""

import asyncio
from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import poll
from tests.generate.rules import all_alerts, load_groups
from tests.integration.alerts.live import (
    RECEIVERS,
    Alertmanager,
    Receiver,
    example_config,
    plain_config,
)


ALERTS = all_alerts(load_groups())
STUCK, FAILING, MANY, DRAIN = (
    "KubeVirtEvacuationStuck",
    "KubeVirtEvacuationFailingRepeatedly",
    "KubeVirtEvacuationsStuckMany",
    "KubeVirtNodeDrainStuck",
)
LATER = "KubeVirtNodeCannotBeRelieved"
LAST = "KubeVirtEvictionExporterCertificateExpiring"
ABSENT = "KubeVirtEvictionExporterAbsent"
STALE = "KubeVirtEvictionExporterStale"
VERDICTS = "KubeVirtDeschedulerWithoutVerdict"
DRAINED = 200
"""The number of stuck VMs in the east."""


def firing(alert: str, /, **labels: str) -> dict[str, Any]:
    """An alert as the rules label it."""
    return {"labels": {"alertname": alert, **ALERTS[alert]["labels"], **labels}}


def a_drain() -> list[dict[str, Any]]:
    """Alerts about stuck VMs: many in the east, 40 of one node in the north, and two in the west.

    The evacuation of one VM in the west fails repeatedly.
    """
    vm = {"namespace": "shop", "node": "n1"}
    drained = {"namespace": "shop", "node": "n2", "cluster": "north"}
    return [
        firing(MANY, cluster="east"),
        *(firing(STUCK, cluster="east", name=f"vm{n}", **vm) for n in range(20, DRAINED)),
        *(firing(FAILING, cluster="east", name=f"vm{n}", **vm) for n in range(20)),
        firing(DRAIN, cluster="east", node="n1"),
        firing(DRAIN, cluster="north", node="n2"),
        *(firing(STUCK, name=f"vm{n}", **drained) for n in range(20)),
        *(firing(FAILING, name=f"vm{n}", **drained) for n in range(20, 40)),
        firing(STUCK, cluster="west", name="vm1", **vm),
        firing(FAILING, cluster="west", name="vm0", **vm),
        firing(LATER, cluster="west", node="n1"),
        {"labels": {"alertname": "Watchdog", "cluster": "west"}},
    ]


def exporter_faults() -> list[dict[str, Any]]:
    """Alerts of exporters that are absent (c1, c2) or stale (c3), and of the plugin.

    In c1 and c3 the fault explains one alert of the plugin, in c2 it is one replica of several.
    """
    no_verdict = {"cause": "no_verdict", "outcome": "unavailable"}
    unknown = {"cause": "no_verdict", "outcome": "unknown"}
    return [
        firing(ABSENT, cluster="c1", cause="every_replica"),
        firing(VERDICTS, cluster="c1", **no_verdict),
        firing(VERDICTS, cluster="c1", cause="snapshot_old"),
        firing(VERDICTS, cluster="c1", cause="rejected", status="401"),
        firing(ABSENT, cluster="c2", cause="some_replicas"),
        firing(VERDICTS, cluster="c2", **no_verdict),
        firing(STALE, cluster="c3", cause="no_contact", resource="virtualmachineinstances"),
        firing(VERDICTS, cluster="c3", **no_verdict),
        firing(VERDICTS, cluster="c3", **unknown),
    ]


def named(receiver: Receiver) -> Counter[tuple[str, str]]:
    """The number of firing alerts that a receiver got, by alert and cluster."""
    labels = [alert["labels"] for alert in receiver.received if alert["status"] == "firing"]
    return Counter((label["alertname"], label["cluster"]) for label in labels)


@pytest.mark.timeout(120)
async def test_many_stuck_vms_are_one_notification(
    tmp_path: Path, prove: Callable[[str], None]
) -> None:
    """The example sends one notification for many stuck VMs, and for an exporter that is away."""
    alerts = [*a_drain(), *exporter_faults()]
    async with AsyncExitStack() as stack:
        receivers = [await stack.enter_async_context(Receiver()) for _ in range(5)]
        plain, *routed = receivers
        urls = dict(zip(RECEIVERS, (receiver.url for receiver in routed), strict=True))
        servers = [
            await stack.enter_async_context(Alertmanager(tmp_path / name, config))
            for name, config in (
                ("plain", plain_config(plain.url)),
                ("example", example_config(urls)),
            )
        ]
        await asyncio.gather(*(server.post(alerts) for server in servers))

        await plain.fires("Watchdog")
        for receiver, alert in zip(routed, ("Watchdog", FAILING, MANY, LATER), strict=True):
            await receiver.fires(alert)
        # This alert waits as long as all others. When it arrives, each earlier alert has been sent
        # or is inhibited.
        await asyncio.gather(*(server.post([firing(LAST, cluster="west")]) for server in servers))
        await asyncio.gather(plain.fires(LAST), routed[1].fires(LAST))

        async def has_all() -> bool:
            return named(plain).total() > len(alerts)

        await poll(has_all, what="the plain one has sent everything")
        before, others, virtualization, page, later = (named(receiver) for receiver in receivers)

    for counted in (before, virtualization):
        del counted[LAST, "west"]
    assert before.total() == len(alerts)
    assert others == {("Watchdog", "west"): 1}
    assert later == {(LATER, "west"): 1}
    assert page == {(MANY, "east"): 1}
    assert virtualization == {
        (DRAIN, "north"): 1,
        (FAILING, "west"): 1,
        (STUCK, "west"): 1,
        (ABSENT, "c1"): 1,
        (VERDICTS, "c1"): 1,
        (ABSENT, "c2"): 1,
        (VERDICTS, "c2"): 1,
        (STALE, "c3"): 1,
        (VERDICTS, "c3"): 1,
    }
    sent = (others + virtualization + page + later).total()
    prove(f"alertmanager: {len(alerts)} alerts: {len(alerts)} notifications before, {sent} after")


def test_every_name_in_the_example_is_an_alert() -> None:
    """The example names only alerts that exist, and routes by a label that every alert has."""
    config = example_config(dict.fromkeys(RECEIVERS, ""))
    (route,) = config["route"]["routes"]
    (matcher,) = route["matchers"]
    label, _, value = matcher.partition("=")

    assert all(rule["labels"][label] == value.strip('"') for rule in ALERTS.values())
    for rule in config["inhibit_rules"]:
        matchers = (*rule["source_matchers"], *rule["target_matchers"])
        for matcher in (matcher for matcher in matchers if matcher.startswith("alertname")):
            _, _, value = matcher.partition('"')
            assert set(value.strip('"').split("|")) <= set(ALERTS)
