"""The drawing of one VM: where it ran, its migrations, its evacuations and its cooldowns."""

from typing import Any

from exporter.engine.facts.model import EndReason, Outcome, Requester, Trigger
from exporter.server.page.lanes import UNKNOWN, Drawing, draw_lanes, name_anchor
from exporter.server.page.timeline import Axis
from exporter.text import to_datetime
from tests.support.builders import (
    NOW,
    a_history,
    a_migration,
    a_policy,
    a_state,
    a_vmi,
    some_evidence,
)
from tests.unit.engine.evacuations.test_diagnosis import an_evacuation
from tests.unit.server.api.test_answers import explained


AXIS = Axis(to_datetime(NOW - 900.0), to_datetime(NOW), to_datetime(NOW + 100.0))
"""Ten seconds are one percent, and now is at 90."""


def a_move(start: float, end: float, **fields: Any) -> Any:
    """A migration from n1 to n2; the times are seconds before now."""
    nodes = {"source_node": "n1", "target_node": "n2"}
    return a_migration(start=NOW - start, end=NOW - end, **{**nodes, **fields})


def drawn(*, node: str = "n2", axis: Axis = AXIS, **migrations: Any) -> Drawing:
    """The drawing of a VM that runs on `node`; its last migration is `last`."""
    last = migrations["last"]
    state = a_state(uid="last", start=last.start, end=last.end, outcome=last.outcome)
    evidence = some_evidence(vmi=a_vmi(migration=state, node=node), history=a_history(**migrations))
    policy = a_policy(migration_cooldown=50.0, max_migration_cooldown=150.0)
    return draw_lanes(explained(evidence, policy), axis)


def places(shapes: tuple[Any, ...]) -> list[tuple[int, float, float]]:
    """Of each shape: its lane, its beginning and its end."""
    return [(shape.lane, shape.bar.x, round(shape.bar.x + shape.bar.width, 2)) for shape in shapes]


def test_a_migration_is_a_bar_on_the_lane_that_the_vm_leaves() -> None:
    """The bar has a connection to the target's lane, and says everything in words."""
    move = a_move(
        300,
        200,
        trigger=Trigger.EVACUATION,
        reason=EndReason.NONE,
        requested_by=Requester(NOW, "alice"),
    )
    drawing = drawn(last=move)

    assert drawing.lanes == ("n1", "n2")
    (bar,) = drawing.migrations
    assert places(drawing.migrations) == [(0, 60.0, 70.0)]
    assert (bar.bar.kind, bar.to, bar.anchor) == ("succeeded", 1, "m-last")
    assert bar.text == (
        "15 Jan 07:55:00 UTC, n1 to n2, took 1 min 40 s, evacuation, by alice: succeeded"
    )


def test_a_line_shows_where_the_vm_ran() -> None:
    """The VM is on the source until a migration has succeeded, and then on the target."""
    failed = a_move(700, 600, outcome=Outcome.FAILED, reason=EndReason.TARGET_LOST)
    drawing = drawn(first=failed, last=a_move(300, 200))

    assert places(drawing.stays) == [(0, 0.0, 70.0), (1, 70.0, 90.0)]
    assert [migration.bar.kind for migration in drawing.migrations] == ["failed", "succeeded"]
    assert drawing.migrations[0].text.endswith("took 1 min 40 s: failed (target_lost)")


def test_a_line_is_missing_where_records_contradict() -> None:
    """If the VM left a node on which no known migration ended, it is not said since when."""
    drawing = drawn(node="n2", first=a_move(700, 600, target_node="n9"), last=a_move(300, 200))

    assert drawing.lanes == ("n1", "n2", "n9")
    assert places(drawing.stays) == [(0, 0.0, 30.0), (1, 70.0, 90.0)]


def test_unknown_nodes_have_a_lane() -> None:
    """A migration of an older history, which has no nodes, is on a lane of its own."""
    drawing = drawn(last=a_move(300, 200, source_node="", target_node=""))

    (bar,) = drawing.migrations
    assert drawing.lanes[bar.lane] == UNKNOWN
    assert bar.to is None


def test_what_ended_before_the_axis_is_left_out() -> None:
    """Nothing is drawn of what ended before the axis begins."""
    old = a_move(5000, 4000, source_node="n7", target_node="n1", trigger=Trigger.EVACUATION)
    drawing = drawn(old=old, last=a_move(300, 200))

    assert drawing.lanes == ("n1", "n2")
    assert len(drawing.migrations) == 1
    assert drawing.evacuations == ()


def test_attempts_that_follow_each_other_are_one_evacuation() -> None:
    """An evacuation is a band on the lane that it empties, from its first to its last attempt."""
    evacuates = {"trigger": Trigger.EVACUATION}
    drawing = drawn(
        older=a_move(1900, 1700, outcome=Outcome.FAILED, **evacuates),
        first=a_move(700, 600, outcome=Outcome.FAILED, **evacuates),
        last=a_move(300, 200, **evacuates),
        axis=Axis(to_datetime(NOW - 1900.0), to_datetime(NOW), to_datetime(NOW + 100.0)),
    )

    assert places(drawing.evacuations) == [(0, 0.0, 10.0), (0, 60.0, 85.0)]
    assert drawing.evacuations[1].text == "evacuation of n1: 2 attempts within 8 min 20 s"


def test_a_success_ends_an_evacuation() -> None:
    """A VM that comes back and is evacuated again has two bands."""
    evacuates = {"trigger": Trigger.EVACUATION}
    back = a_move(500, 490, source_node="n2", target_node="n1", trigger=Trigger.MANUAL)
    drawing = drawn(
        first=a_move(700, 600, **evacuates), back=back, last=a_move(300, 200, **evacuates)
    )

    assert places(drawing.evacuations) == [(0, 20.0, 30.0), (0, 60.0, 70.0)]
    assert [evacuation.text for evacuation in drawing.evacuations] == [
        "evacuation of n1: 1 attempt within 1 min 40 s"
    ] * 2


def test_the_present_evacuation_reaches_until_now() -> None:
    """Its band begins with the request, and has the attempts that have failed."""
    failed = a_move(400, 300, outcome=Outcome.FAILED, trigger=Trigger.EVACUATION)
    vmi = explained(an_evacuation(age=600.0, vmi={"node": "n1"}))
    answer = explained(some_evidence(history=a_history(failed=failed)))
    vmi.migrations = answer.migrations
    drawing = draw_lanes(vmi, AXIS)

    assert places(drawing.evacuations) == [(0, 30.0, 90.0)]
    assert drawing.evacuations[0].text == "evacuation of n1: 1 attempt within 10 min"


def test_each_cooldown_shades_the_time_after_a_migration() -> None:
    """It doubles with each migration in the window, up to the cap; the next one ends it."""
    back = {"source_node": "n2", "target_node": "n1"}
    drawing = drawn(first=a_move(810, 800), second=a_move(510, 500, **back), last=a_move(160, 150))

    assert places(drawing.cooldowns) == [(0, 10.0, 15.0), (0, 40.0, 50.0), (0, 75.0, 90.0)]
    assert [cooldown.text for cooldown in drawing.cooldowns] == [
        "cooldown of 50 s",
        "cooldown of 1 min 40 s",
        "cooldown of 2 min 30 s",
    ]


def test_an_anchor_needs_no_uid() -> None:
    """A row is linked by the UID of the migration, or else by its end."""
    (named, other) = explained(
        some_evidence(history=a_history(m1=a_move(300, 200), **{"": a_move(100, 50)}))
    ).migrations

    assert (name_anchor(named), name_anchor(other)) == ("m-m1", f"m-{NOW - 50:.0f}")
