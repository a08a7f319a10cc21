"""The stuck evacuations under one policy, and when the alert KubeVirtEvacuationStuck would fire.

An evacuation is diagnosed after each event of its VMI. Between events the clock alone can make it
stuck or let the alert fire, so each evacuation has a timer for the next such instant.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heappush, heappushpop

from msgspec import Struct

from exporter.engine.evacuations.diagnosis import Diagnosis, diagnose
from exporter.engine.facts.evidence import Evidence
from exporter.engine.facts.model import Instant, Seconds, Vmi
from exporter.engine.facts.policy import StuckPolicy
from exporter.engine.facts.trust import Trust
from exporter.engine.store.store import Store
from exporter.whatif.account import Stuck, StuckEvacuation


ALERT_FOR: Seconds = 300.0
"""How long an evacuation must be stuck before the alert fires (`for` in the alert)."""
LONGEST_KEPT = 100
"""How many stuck evacuations are listed; those that lasted longest are chosen."""


class _Evacuation(Struct):
    """A running evacuation; at `timer` the clock alone may change its diagnosis."""

    vmi: Vmi
    node: str
    requested_at: Instant
    timer: Instant = math.inf
    stuck_at: Instant | None = None
    diagnosis: Diagnosis | None = None


@dataclass
class StuckTimers:
    """Counts in `stuck` the stuck evacuations among the VMIs of `store`.

    `trust`: what may be believed now.
    """

    policy: StuckPolicy
    store: Store
    stuck: Stuck
    trust: Trust = field(default_factory=Trust)
    _running: dict[str, _Evacuation] = field(default_factory=dict)
    _next_timer: Instant = math.inf
    _longest: list[tuple[Seconds, int, StuckEvacuation]] = field(default_factory=list)

    def advance(self, now: Instant) -> None:
        """Run every timer before `now`, each at its own instant."""
        while self._next_timer < now:
            at = self._next_timer
            for _, evacuation in sorted(self._running.items()):
                if evacuation.timer <= at:
                    vmi = evacuation.vmi
                    evidence = self.store.evidence(vmi.namespace, vmi.name, self.trust)
                    # The limit is not exceeded yet at `at`, but just after it.
                    self._diagnose(vmi.uid, evidence, math.nextafter(at, math.inf), at)
            self._next_timer = min(
                (evacuation.timer for evacuation in self._running.values()), default=math.inf
            )

    def check(self, evidence: Evidence, now: Instant) -> None:
        """A VMI changed: find out whether its evacuation began, ended or became stuck."""
        self._diagnose(evidence.vmi.uid, evidence, now, now)

    def close(self, now: Instant) -> None:
        """The recording is over; evacuations may still run."""
        for uid in list(self._running):
            self.end(uid, now, is_over=False)
        self.stuck.longest = [
            evacuation for _, _, evacuation in sorted(self._longest, reverse=True)
        ]

    def _diagnose(
        self, uid: str, evidence: Evidence | None, now: Instant, reported_at: Instant
    ) -> None:
        load = self.store.load(self.trust)
        diagnosis = None if evidence is None else diagnose(evidence, self.policy, load, now)
        evacuation = self._running.get(uid)
        # The request time of an evacuation never becomes later (`engine.evidence.Marker`), so a
        # later time belongs to another evacuation. A VM that waits in a queue is no longer stuck
        # when the queue moves.
        if evacuation is not None and (
            diagnosis is None
            or diagnosis.node != evacuation.node
            or diagnosis.requested_at > evacuation.requested_at
            or (evacuation.stuck_at is not None and not diagnosis.stuck)
        ):
            self.end(uid, reported_at)
            evacuation = None
        if diagnosis is None or evidence is None:
            return
        if evacuation is None:
            evacuation = self._running[uid] = _Evacuation(
                evidence.vmi, diagnosis.node, diagnosis.requested_at
            )
        evacuation.requested_at = diagnosis.requested_at
        fires_at = math.inf if evacuation.stuck_at is None else evacuation.stuck_at + ALERT_FOR
        if diagnosis.stuck and (evacuation.stuck_at is None or evacuation.timer <= fires_at < now):
            evacuation.stuck_at = (
                reported_at if evacuation.stuck_at is None else evacuation.stuck_at
            )
            evacuation.diagnosis = diagnosis
        timers = self._timers(evidence, diagnosis, evacuation.stuck_at)
        evacuation.timer = min((at for at in timers if at >= now), default=math.inf)
        self._next_timer = min(self._next_timer, evacuation.timer)

    def _timers(
        self, evidence: Evidence, diagnosis: Diagnosis, stuck_at: Instant | None
    ) -> Iterator[Instant]:
        """When the clock alone makes an evacuation stuck, or lets the alert fire."""
        if stuck_at is not None:
            yield stuck_at + ALERT_FOR
            return
        policy, state = self.policy, evidence.vmi.migration
        if diagnosis.due_at is not None:
            yield diagnosis.due_at
        for instant in () if state is None else (state.start, state.end):
            if instant is not None:
                yield instant + policy.migration_timeout

    def end(self, uid: str, now: Instant, *, is_over: bool = True) -> None:
        """Count the VMI's evacuation if it was stuck; `is_over` is false if it still runs."""
        evacuation = self._running.pop(uid, None)
        if evacuation is None or evacuation.stuck_at is None or evacuation.diagnosis is None:
            return
        diagnosis, stuck = evacuation.diagnosis, self.stuck
        fires_at = evacuation.stuck_at + ALERT_FOR
        alerted_at = fires_at if now >= fires_at else None
        stuck.count += 1
        stuck.by_state[diagnosis.state] += 1
        stuck.open_at_end += not is_over
        if alerted_at is not None:
            stuck.alerted += 1
            stuck.minutes_to_alert[int((alerted_at - evacuation.requested_at) // 60)] += 1
            stuck.minutes_alerting[int((now - alerted_at) // 60)] += 1
        entry = StuckEvacuation(
            namespace=evacuation.vmi.namespace,
            name=evacuation.vmi.name,
            evacuation_node_name=evacuation.node,
            source=diagnosis.source,
            requested_at=evacuation.requested_at,
            stuck_at=evacuation.stuck_at,
            alerted_at=alerted_at,
            ended_at=now if is_over else None,
            state=diagnosis.state,
            stuck_by=diagnosis.stuck_by,
        )
        ranked = (now - evacuation.stuck_at, -stuck.count, entry)
        (heappush if len(self._longest) < LONGEST_KEPT else heappushpop)(self._longest, ranked)
