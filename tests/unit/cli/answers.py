"""Answers of the API that the tests of `explain`, `status` and their layout share."""

import re
from collections import Counter
from typing import Any

from exporter.cli.layout import Screen
from exporter.cli.status import show_status
from exporter.counters import PreventedMoves
from exporter.engine.evacuations.conditions import Conditions
from exporter.engine.evacuations.drain import Snapshot
from exporter.engine.evacuations.drain_outcomes import DrainOutcome
from exporter.engine.facts.evidence import Evidence
from exporter.engine.facts.model import Checkpoint, EndReason, Requester, Trigger, Why
from exporter.engine.facts.policy import Policy, Reason, StuckPolicy
from exporter.engine.facts.states import State
from exporter.engine.verdicts.rules import list_reasons
from exporter.health import Health
from exporter.server.api.answers import EvacuationList, describe_status
from exporter.server.api.schemas import (
    BlockedAnswer,
    BlockedVmi,
)
from exporter.text import to_datetime, to_optional_datetime
from tests.support.builders import (
    NOW,
    a_history,
    a_migration,
    a_state,
    a_vmi,
    some_evidence,
)
from tests.unit.engine.evacuations.test_diagnosis import an_attempt, an_evacuation
from tests.unit.server.api.test_answers import some_health


PIPED = Screen()
WHOLE = Screen(rows=None)
NARROW = Screen(width=80)
COLORED = Screen(width=80, colored=True)
COLORS = re.compile(r"\x1b\[[0-9;]*m")


def cooling() -> Evidence:
    """A VM that was moved twice; the second migration took 3m12s and ended ten minutes ago."""
    return some_evidence(
        vmi=a_vmi(migration=a_state(uid="m2", start=NOW - 792.0)),
        history=a_history(
            m1=a_migration(start=NOW - 4000.0, end=NOW - 3900.0),
            m2=a_migration(
                start=NOW - 792.0,
                source_node="n2",
                target_node="n1",
                trigger=Trigger.EVACUATION,
                reason=EndReason.NONE,
                requested_by=Requester(NOW - 800.0, "alice"),
            ),
        ),
    )


def stuck(**vmi: Any) -> Evidence:
    """A VM whose evacuation was requested two hours ago and waits for a ResourceQuota."""
    return an_evacuation(
        age=7200.0,
        vmims=(an_attempt(wait_reason=State.QUOTA),),
        vmi=vmi,
        marker={"failed": {"f1": NOW - 900.0}},
    )


def held(name: str, reason: Reason = Reason.COOLDOWN, until: float | None = None) -> BlockedVmi:
    """An entry of the blocked set."""
    cools = reason is Reason.COOLDOWN
    return BlockedVmi(
        namespace="shop",
        name=name,
        vmi_uid=name,
        node="n1",
        checkpoint=Checkpoint.PRE_EVICTION if cools else Checkpoint.FILTER,
        reason=reason,
        not_before=to_optional_datetime(until),
    )


def status_of(
    *evacuating: Evidence,
    blocked: tuple[BlockedVmi, ...] = (),
    health: Health | None = None,
    screen: Screen = PIPED,
    now: float = NOW,
    why: tuple[Why, ...] = (),
    prevented: PreventedMoves | None = None,
) -> str:
    """The output of `status` for these evacuations, blocked VMs and health."""
    health = health or some_health()
    status = describe_status(
        health,
        vmis=100,
        drain={DrainOutcome.LEAVES: 98, DrainOutcome.STAYS: 2},
        blocked=Counter(vmi.reason for vmi in blocked),
        reasons=list_reasons(Policy()),
        prevented=prevented or PreventedMoves(),
        started_at=NOW - 7_200.0,
        now=now,
    )
    conditions = Conditions(
        kubevirt=None,
        load=None,
        stuck=StuckPolicy(),
        trust=health.read_trust(now),
        now=now,
    )
    snapshot = Snapshot(
        conditions=conditions, mobilities={}, unsettled=evacuating, guarded=(), drains={}
    )
    evacuation_list = EvacuationList(snapshot, health, reasons=lambda _vmi: why)
    for _ in evacuation_list:
        pass
    evacuations = evacuation_list.answer()
    answer = BlockedAnswer(
        as_of=to_datetime(now), stale=False, max_age_seconds=90.0, blocked=list(blocked)
    )
    ready = status.ready
    return show_status(status, evacuations if ready else None, answer if ready else None, screen)
