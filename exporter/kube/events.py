"""Writes Kubernetes Events about VMIs, which `kubectl describe vmi` and consoles show.

This needs one verb, `create` on `events` of `events.k8s.io`. Each Event is a new object, and a
later Event of the same episode has the count of the series. With `patch` or `update` we could
increase the count in one object, but then our service account could change every Event of the
cluster.

The name of an Event comes from its episode and the half hour. So the API server itself refuses an
Event that was already written by another replica, or by this replica before a restart.
"""

import asyncio
import hashlib
import math
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import structlog

from exporter.engine.evacuations.conditions import read_conditions
from exporter.engine.evacuations.events import (
    BlockedEpisode,
    Episode,
    EvacuationEpisode,
    EventOutcome,
    EventQueue,
    EventReason,
)
from exporter.engine.facts.model import Instant, Seconds
from exporter.engine.facts.names import KubeVirtNames
from exporter.engine.facts.policy import StuckPolicy
from exporter.engine.store.store import Store
from exporter.health import Health
from exporter.kube.client import Absent, ApiError, ApiServer, Conflict, Denied, Unsupported
from exporter.kube.lease import Lease
from exporter.kube.objects.instants import write_micro_time
from exporter.logs import Throttle
from exporter.words.events import write_blocked, write_ended, write_stuck


CHECKED_EVERY: Seconds = 15.0
"""How often to check for stuck evacuations."""
PAUSE: Seconds = 1.0
SLICE = 100
"""How many evacuations are diagnosed without yielding, which takes about 2 ms."""
CONTROLLER = "kubevirt-eviction-exporter"
LONGEST_NOTE = 1024
"""The most bytes of an Event's note (`pkg/apis/core/validation/events.go`, `NoteLengthLimit`)."""
LONGEST_PREFIX = 200
TYPES_AND_ACTIONS = {
    EventReason.EVACUATION_STUCK: ("Warning", "Evacuate"),
    EventReason.EVACUATION_ENDED: ("Normal", "Evacuate"),
    EventReason.EVICTION_BLOCKED: ("Normal", "Evict"),
}

log = structlog.stdlib.get_logger()


@dataclass
class EventWriter:
    """Writes the due Events of `queue`, one at a time.

    Only the replica that holds `lease` reports evacuations, because replicas may know different
    times of a request. A blocked eviction is reported by the replica that blocked it. `instance` is
    this process's name.
    """

    api: ApiServer
    store: Store
    health: Health
    stuck: StuckPolicy
    queue: EventQueue
    lease: Lease
    _: KW_ONLY
    instance: str
    clock: Callable[[], Instant]
    _logged: Throttle = field(default_factory=lambda: Throttle(len(EventOutcome)))

    async def run(self) -> None:
        """Write Events until cancelled."""
        loop, checked_at = asyncio.get_running_loop(), -math.inf
        while True:
            if loop.time() - checked_at >= CHECKED_EVERY:
                checked_at = loop.time()
                await self.check()
            await self.write_due()
            await asyncio.sleep(PAUSE)

    async def check(self) -> None:
        """Queue Events about stuck evacuations and their ends; drop episodes that are over."""
        now, health = self.clock(), self.health
        for _ in self.queue.prune(now):
            await asyncio.sleep(0)
        if not self.lease.held:
            self.queue.forget_evacuations()
            return
        if not health.ready:
            return
        stuck = set[str]()
        conditions = read_conditions(self.store, self.stuck, health.read_trust(now), now)
        for count, evidence in enumerate(list(self.store.evacuating(conditions.trust)), 1):
            diagnosis = conditions.diagnose(evidence)
            if diagnosis is not None and (diagnosis.stuck or diagnosis.last_seen is not None):
                stuck.add(evidence.vmi.uid)
                if diagnosis.last_seen is None:  # else it is unknown whether it has ended
                    self.queue.record_stuck(evidence.vmi, diagnosis, now)
            if count % SLICE == 0:
                await asyncio.sleep(0)
        self.queue.record_ended(stuck, now)

    async def write_due(self) -> None:
        """Write due Events within the limits. Stop if the API server does not answer."""
        outcome = None
        while outcome is not EventOutcome.UNREACHABLE:
            now = self.clock()
            episode = self.queue.take(now)
            if episode is None:
                return
            outcome = await self._write(episode, now)
            self.queue.record_outcome(episode, outcome, now)

    async def _write(self, episode: Episode, now: Instant) -> EventOutcome:
        note = self._write_note(episode, now)
        if note is None:
            return EventOutcome.DROPPED
        namespace = episode.vmi.namespace
        try:
            await self.api.create(
                f"/apis/events.k8s.io/v1/namespaces/{namespace}/events",
                write_event(episode, note, now, instance=self.instance, names=self.store.names),
            )
        except Conflict:
            return EventOutcome.EXISTING
        except ApiError as error:
            is_refused = isinstance(error, Denied | Absent | Unsupported)
            outcome = EventOutcome.REJECTED if is_refused else EventOutcome.UNREACHABLE
            if self._logged.lets_through(outcome, now):
                log.warning("event_not_written", outcome=str(outcome), why=str(error))
            return outcome
        return EventOutcome.WRITTEN

    def _write_note(self, episode: Episode, now: Instant) -> str | None:
        """The text of an Event; None if its episode is over."""
        if isinstance(episode, BlockedEpisode):
            return write_blocked(episode.verdict)
        trust = self.health.read_trust(now)
        conditions = read_conditions(self.store, self.stuck, trust, now)
        name = episode.vmi.name
        evidence = self.store.evidence(episode.vmi.namespace, name, conditions.trust)
        is_known = evidence is not None and evidence.vmi.uid == episode.vmi.uid
        if evidence is None or not is_known or not isinstance(episode, EvacuationEpisode):
            return None
        if episode.reason is EventReason.EVACUATION_STUCK:
            return write_stuck(
                evidence, episode.diagnosis, self.store.reasons(evidence.vmi), conditions
            )
        if evidence.marker is not None and episode.is_same(evidence.marker):
            return None
        return write_ended(evidence.vmi, episode.diagnosis, ended_at=episode.began)


def write_event(
    episode: Episode,
    note: str,
    now: Instant,
    *,
    instance: str,
    names: KubeVirtNames,
) -> dict[str, Any]:
    """An Event of `events.k8s.io/v1`, which kube-apiserver also serves as a core `v1` Event."""
    vmi = episode.vmi
    key = f"{vmi.uid} {episode.reason} {episode.identify(now)}"
    digest = hashlib.sha256(key.encode()).hexdigest()[:16]
    kind, action = TYPES_AND_ACTIONS[episode.reason]
    encoded = note.encode()
    if len(encoded) > LONGEST_NOTE:
        note = encoded[: LONGEST_NOTE - 3].decode(errors="ignore") + "…"
    event = {
        "apiVersion": "events.k8s.io/v1",
        "kind": "Event",
        "metadata": {
            "namespace": vmi.namespace,
            "name": f"{vmi.name[:LONGEST_PREFIX].rstrip('-.')}.{digest}",
        },
        "eventTime": write_micro_time(episode.began),
        "type": kind,
        "reason": episode.reason,
        "action": action,
        "note": note,
        "regarding": {
            "apiVersion": f"{names.api_group}/v1",
            "kind": names.translate("VirtualMachineInstance"),
            "namespace": vmi.namespace,
            "name": vmi.name,
            "uid": vmi.uid,
        },
        "reportingController": CONTROLLER,
        "reportingInstance": instance,
    }
    if episode.count > 1:
        last = write_micro_time(episode.last)
        event["series"] = {"count": episode.count, "lastObservedTime": last}
    return event
