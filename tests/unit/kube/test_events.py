"""Kubernetes Events: their content, and the results of writing them."""

from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec.structs import replace

from exporter.engine.evacuations.events import REPEATED_AFTER, EventOutcome, EventQueue, EventReason
from exporter.engine.facts.changes import EvictionAdmitted
from exporter.engine.facts.model import EVIDENCE_RESOURCES, Resource, Vmi, Why, WhySource
from exporter.engine.facts.policy import Reason, StuckPolicy, Verdict
from exporter.health import Health, Watched
from exporter.kube.client import (
    Absent,
    ApiError,
    ApiServer,
    Conflict,
    Denied,
    Forbidden,
    Overloaded,
    Silent,
    Unreachable,
    Unsupported,
)
from exporter.kube.events import LONGEST_NOTE, EventWriter
from exporter.kube.lease import Lease
from tests.support.builders import NAMESPACE, NOW, UID, a_pod, a_store, a_vmi, an_evacuating_vmi
from tests.support.stores import ClockedStore
from tests.unit.engine.evacuations import test_events as events


STUCK, ENDED, BLOCKED = EventReason
UNTIL = NOW + 1800.5


class Server:
    """An API server that accepts Events, or answers with an error."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.error: ApiError | None = None

    async def create(self, path: str, body: dict[str, Any]) -> bytes:
        """Accept an Event."""
        if self.error is not None:
            raise self.error
        self.paths.append(path)
        self.events.append(body)
        return b""


class ServedApi:
    """An Event writer with its own server and clock."""

    def __init__(self, store: ClockedStore) -> None:
        self.server = Server()
        self.store = store
        self.outcomes: Counter[tuple[EventReason, EventOutcome]] = Counter()
        self.queue = EventQueue(self.outcomes)
        watches = [
            Watched(resource, None, synced=True, contact=NOW) for resource in EVIDENCE_RESOURCES
        ]
        self.health = Health(180.0, 600.0, watches)
        self.lease = SimpleNamespace(held=True)
        self.now = NOW
        self.writer = EventWriter(
            cast("ApiServer", self.server),
            store,
            self.health,
            StuckPolicy(),
            self.queue,
            cast("Lease", self.lease),
            instance="pod-1",
            clock=lambda: self.now,
        )

    async def after(self, seconds: float) -> list[dict[str, Any]]:
        """Advance the clock, and return the Events that are written then."""
        self.now += seconds
        before = len(self.server.events)
        await self.writer.check()
        await self.writer.write_due()
        return self.server.events[before:]


LEAVING = an_evacuating_vmi(age=2400)


def stuck_store() -> ClockedStore:
    """A store that has known this VMI since the request. Later objects are read at `NOW`."""
    store = a_store(LEAVING, a_pod(), now=NOW - 2400.0)
    store.now = NOW
    return store


def a_hold(**overrides: Any) -> Verdict:
    """A verdict: blocked by a cooldown that ends in half an hour."""
    fields: dict[str, Any] = {"not_before": UNTIL, "released_at": UNTIL, "migrations_in_window": 2}
    return events.a_hold(**(fields | overrides))


async def test_a_held_eviction() -> None:
    """The Event of a blocked eviction has the reason and the end of the cooldown."""
    api = ServedApi(a_store(a_vmi()))
    api.queue.record_blocked(a_vmi(), a_hold(), NOW)

    (event,) = await api.after(0)

    name = event["metadata"].pop("name")
    assert name.startswith("db1.")
    assert api.server.paths == ["/apis/events.k8s.io/v1/namespaces/shop/events"]
    assert event == {
        "apiVersion": "events.k8s.io/v1",
        "kind": "Event",
        "metadata": {"namespace": "shop"},
        "eventTime": "2027-01-15T08:00:00.000000Z",
        "type": "Normal",
        "reason": "EvictionBlocked",
        "action": "Evict",
        "note": (
            "Eviction blocked: cooldown until 2027-01-15T08:30:01Z, migrations in the window: 2"
        ),
        "regarding": {
            "apiVersion": "kubevirt.io/v1",
            "kind": "VirtualMachineInstance",
            "namespace": "shop",
            "name": "db1",
            "uid": UID,
        },
        "reportingController": "kubevirt-eviction-exporter",
        "reportingInstance": "pod-1",
    }


@pytest.mark.parametrize(
    ("reason", "until"),
    [
        (Reason.MIGRATION_IN_PROGRESS, "until the migration ends"),
        (Reason.EVACUATION_IN_PROGRESS, "until the evacuation ends"),
    ],
)
async def test_a_hold_without_an_instant(reason: Reason, until: str) -> None:
    """If the end of the block is not known, the Event says what must end first."""
    api = ServedApi(a_store(a_vmi()))
    api.queue.record_blocked(a_vmi(), a_hold(reason=reason, not_before=None, released_at=None), NOW)

    (event,) = await api.after(0)

    assert event["note"] == f"Eviction blocked: {reason}, {until}"


async def test_a_series_has_another_name_and_a_count() -> None:
    """A repeated Event has the first time, the last time, and the count of the series."""
    api = ServedApi(a_store(a_vmi()))
    hold = a_hold(not_before=NOW + 9000, released_at=NOW + 9000)
    api.queue.record_blocked(a_vmi(), hold, NOW)
    (first,) = await api.after(0)
    api.queue.record_blocked(a_vmi(), hold, NOW + 60)
    api.queue.record_blocked(a_vmi(), hold, NOW + REPEATED_AFTER)

    (again,) = await api.after(REPEATED_AFTER)

    assert "series" not in first
    assert again["eventTime"] == first["eventTime"]
    assert again["series"] == {"count": 3, "lastObservedTime": "2027-01-15T08:30:00.000000Z"}
    assert again["metadata"]["name"] != first["metadata"]["name"]


async def test_a_stuck_evacuation_of_a_known_requester() -> None:
    """The Event of a stuck evacuation names the user who requested it."""
    store = a_store(a_vmi(), a_pod(), now=NOW - 2400.0)
    store.apply(EvictionAdmitted(NAMESPACE, a_pod().name, "alice"), store.now)
    store.put(LEAVING)
    store.now = NOW

    (stuck,) = await ServedApi(store).after(0)

    assert stuck["note"].startswith(
        "Evacuation from n1, requested by alice, is stuck after 40m: no"
    )


async def test_a_stuck_evacuation_and_its_end() -> None:
    """The first Event of a stuck evacuation has its cause; the last Event has the new node."""
    store = stuck_store()
    words = Why(WhySource.POD_SCHEDULED, "Unschedulable", "0/3 nodes are available", NOW)
    other = Why(WhySource.LIVE_MIGRATABLE, "Disks", "not shared")
    store.put(LEAVING, (words, other))
    api = ServedApi(store)

    (stuck,) = await api.after(0)
    store.put(a_vmi(node="n2"))
    (ended,) = await api.after(60)

    assert (stuck["type"], stuck["reason"], stuck["action"]) == (
        "Warning",
        "EvacuationStuck",
        "Evacuate",
    )
    assert stuck["note"].startswith(
        "Evacuation from n1 is stuck after 40m: no_migration, failed attempts: 0. Make room on"
    )
    assert stuck["note"].endswith(
        " (runbook KubeVirtEvacuationStuck#target_unschedulable) PodScheduled: Unschedulable: 0/3"
        " nodes are available LiveMigratable: Disks: not shared"
    )
    assert (ended["type"], ended["reason"]) == ("Normal", "EvacuationEnded")
    assert ended["note"] == (
        "Evacuation from n1 ended after 41m (failed attempts: 0): the VM is now on n2"
    )


@pytest.mark.parametrize(
    ("vmi", "outcome"),
    [
        (a_vmi(), "the VM is still on n1"),
        (replace(LEAVING, phase="Succeeded"), "the VM has stopped"),
    ],
    ids=["cancelled", "stopped"],
)
async def test_other_ends(vmi: Vmi, outcome: str) -> None:
    """The Event at the end of an evacuation says if the VM has stopped or has not moved."""
    api = ServedApi(stuck_store())
    await api.after(0)
    api.store.put(vmi)

    (ended,) = await api.after(60)

    assert ended["note"].endswith(outcome)


async def test_no_end_is_invented() -> None:
    """No Event reports an end if the VM was deleted or its evacuation goes on."""
    gone, external = ServedApi(stuck_store()), ServedApi(stuck_store())
    for api in (gone, external):
        await api.after(0)
    gone.store.remove(Resource.VMIS, "shop", "db1")
    external.store.put(replace(LEAVING, eviction_strategy="External"))

    for api in (gone, external):
        assert await api.after(60) == []
        assert api.outcomes[ENDED, EventOutcome.DROPPED] == 1


async def test_no_event_about_vmis_that_are_dead() -> None:
    """While the VMI watch is dead, no Events about evacuations are written."""
    api = ServedApi(stuck_store())
    (watched,) = api.health.of(Resource.VMIS)
    watched.contact = NOW
    assert [event["reason"] for event in await api.after(0)] == [STUCK]

    for _ in range(4):
        assert await api.after(REPEATED_AFTER) == []

    watched.contact = api.now
    assert [event["reason"] for event in await api.after(1)] == [STUCK]


async def test_a_recreated_vm_is_another() -> None:
    """A recreated VM gets no Event about the earlier VM of its name."""
    api = ServedApi(stuck_store())
    await api.after(0)
    api.store.put(a_vmi(uid="another"))

    assert await api.after(60) == []


async def test_only_the_holder_of_the_lease_reports_evacuations() -> None:
    """Only the replica that holds the Lease writes Events about evacuations."""
    api = ServedApi(stuck_store())
    api.health.watched[0].synced = False
    assert await api.after(0) == []
    api.health.watched[0].synced = True
    api.lease.held = False
    assert await api.after(0) == []
    api.lease.held = True
    assert [event["reason"] for event in await api.after(0)] == [STUCK]
    api.lease.held = False
    api.store.put(a_vmi())
    assert await api.after(60) == []
    api.lease.held = True
    assert await api.after(60) == []


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (Conflict("409"), EventOutcome.EXISTING),
        (Denied("401"), EventOutcome.REJECTED),
        (Forbidden("403"), EventOutcome.REJECTED),
        (Absent("404"), EventOutcome.REJECTED),
        (Unsupported("422"), EventOutcome.REJECTED),
        (Unreachable("500"), EventOutcome.UNREACHABLE),
        (Overloaded("429", 1.0), EventOutcome.UNREACHABLE),
        (Silent("nothing"), EventOutcome.UNREACHABLE),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, ApiError) else str(value),
)
async def test_errors_are_counted(error: ApiError, outcome: EventOutcome) -> None:
    """Failed writes are counted, and repeated later unless the API server rejected the Event."""
    api = ServedApi(a_store(a_vmi()))
    for uid in ("u1", "u2"):
        api.queue.record_blocked(a_vmi(uid=uid), a_hold(), NOW)
    api.server.error = error

    await api.after(0)

    waits = outcome is EventOutcome.UNREACHABLE
    assert api.outcomes == {(BLOCKED, outcome): 1 if waits else 2}
    api.server.error = None
    assert len(await api.after(60)) == (2 if waits else 0)


async def test_a_long_note_is_cut_by_its_bytes() -> None:
    """A long note is cut at the API server's limit in bytes, and no character is broken."""
    store = stuck_store()
    words = (Why(WhySource.POD_SCHEDULED, "Unschedulable", "ü" * 1000, NOW),)
    store.put(LEAVING, words)
    api = ServedApi(store)

    (stuck,) = await api.after(0)

    assert LONGEST_NOTE - 2 <= len(stuck["note"].encode()) <= LONGEST_NOTE
    assert stuck["note"].endswith("ü…")


async def test_the_longest_name() -> None:
    """A long VM name is shortened in the name of the Event, so that this name is valid."""
    name = "a" * 199 + "-" + "b" * 53
    api = ServedApi(a_store(a_vmi(name=name)))
    api.queue.record_blocked(a_vmi(name=name), a_hold(), NOW)

    (event,) = await api.after(0)

    assert event["metadata"]["name"].startswith("a" * 199 + ".")
    assert event["regarding"]["name"] == name


async def test_requested_again_on_the_same_node() -> None:
    """If an evacuation is requested again, an Event reports the end of the first request."""
    api = ServedApi(stuck_store())
    await api.after(0)
    api.store.put(replace(LEAVING, eviction_requested_at=NOW))

    (ended,) = await api.after(60)

    assert ended["reason"] == ENDED
