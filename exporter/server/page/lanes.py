"""Draws where a VM ran, and each of its moves: a lane for each node, and time from left to right.

The VM is a line on the lane of its node. A migration is a bar on the lane that the VM leaves, with
a connection to the lane of the target. Behind them, an evacuation is a band on the lane that it
empties, and a cooldown shades all lanes. Pure.
"""

from collections.abc import Iterator
from datetime import datetime, timedelta

from msgspec import Struct

from exporter.engine.facts.history import Ending
from exporter.engine.facts.model import EndReason, Outcome, Trigger
from exporter.engine.verdicts.cooldown import list_cooldowns
from exporter.server.api.schemas import MigrationAnswer, VmiAnswer
from exporter.server.page.timeline import (
    Axis,
    Bar,
    find_span,
    make_bar,
    write_duration,
    write_outcome,
)
from exporter.text import to_datetime, write_count


UNKNOWN = "unknown node"
_ONE_EVACUATION = timedelta(minutes=15)
"""Attempts that are farther apart belong to different evacuations. During an evacuation, KubeVirt
tries again at least every 11 minutes: a backoff of 320 s, and 300 s for an unschedulable pod."""


class Shape(Struct, frozen=True, kw_only=True):
    """A bar on the lane `lane`, with the same in words.

    `to` is the lane that a migration leads to, and `anchor` the id of its row in the table.
    """

    bar: Bar
    text: str = ""
    lane: int = 0
    to: int | None = None
    anchor: str = ""


class Drawing(Struct, frozen=True, kw_only=True):
    """The names of the lanes, from top to bottom, and the shapes on them."""

    lanes: tuple[str, ...]
    cooldowns: tuple[Shape, ...]
    evacuations: tuple[Shape, ...]
    stays: tuple[Shape, ...]
    migrations: tuple[Shape, ...]


class _Evacuation(Struct):
    """The migrations of one evacuation, as far as they are known, and from when to when."""

    node: str
    begin: datetime
    end: datetime
    attempts: int


def draw_lanes(vmi: VmiAnswer, axis: Axis) -> Drawing:
    """Draw one VM; what ended before the beginning of the axis is left out."""
    moves = sorted(vmi.migrations, key=lambda one: find_span(one, axis.now))
    lanes: dict[str, int] = {}

    def lane(node: str | None) -> int:
        return lanes.setdefault(node or UNKNOWN, len(lanes))

    stays = tuple(
        Shape(bar=make_bar(axis, begin, end, "stay"), lane=lane(node))
        for node, begin, end in _find_stays(vmi, moves, axis)
        if end >= axis.since
    )
    migrations = tuple(
        Shape(
            bar=make_bar(axis, *find_span(one, axis.now), write_outcome(one)),
            text=_describe(one),
            lane=lane(one.source_node),
            to=lane(one.target_node) if one.target_node else None,
            anchor=name_anchor(one),
        )
        for one in moves
        if find_span(one, axis.now)[1] >= axis.since
    )
    evacuations = tuple(
        Shape(
            bar=make_bar(axis, one.begin, one.end, "evacuation"),
            text=f"evacuation of {one.node}: {write_count(one.attempts, 'attempt')}"
            f" within {write_duration((one.end - one.begin).total_seconds())}",
            lane=lane(one.node),
        )
        for one in _find_evacuations(vmi, moves, axis.now)
        if one.end >= axis.since
    )
    cooldowns = tuple(
        Shape(
            bar=make_bar(axis, begin, end, "cooldown"), text=f"cooldown of {write_duration(length)}"
        )
        for begin, end, length in _find_cooldowns(vmi)
        if end >= axis.since
    )
    return Drawing(
        lanes=tuple(lanes),
        cooldowns=cooldowns,
        evacuations=evacuations,
        stays=stays,
        migrations=migrations,
    )


def name_anchor(migration: MigrationAnswer) -> str:
    """The id of a migration's row, which stays the same for as long as the row is there."""
    end = "" if migration.end is None else f"{migration.end.timestamp():.0f}"
    return f"m-{migration.uid or end}"


def _describe(one: MigrationAnswer) -> str:
    """A migration in words."""
    where = f"{one.source_node or UNKNOWN} to {one.target_node or UNKNOWN}"
    began = one.start or one.end
    parts = [where if began is None else f"{began:%d %b %H:%M:%S} UTC, {where}"]
    if one.start is not None and one.end is not None:
        parts.append(f"took {write_duration((one.end - one.start).total_seconds())}")
    if one.trigger is not None:
        parts.append(one.trigger)
    if one.requested_by is not None:
        parts.append(f"by {one.requested_by.user}")
    reason = "" if one.reason in (None, EndReason.NONE) else f" ({one.reason})"
    return f"{', '.join(parts)}: {write_outcome(one)}{reason}"


def _find_stays(
    vmi: VmiAnswer, moves: list[MigrationAnswer], axis: Axis
) -> Iterator[tuple[str | None, datetime, datetime]]:
    """On which node the VM was, from when to when; nothing where two records contradict."""
    begin = max(axis.since, vmi.created_at or axis.since)
    arrived: str | None = None
    for one in moves:
        if one.outcome != "succeeded":
            continue
        end = find_span(one, axis.now)[1]
        if one.source_node and arrived in (None, one.source_node):
            yield one.source_node, begin, end
        begin, arrived = end, one.target_node
    if vmi.node and arrived in (None, vmi.node):
        yield vmi.node, begin, axis.now


def _find_evacuations(
    vmi: VmiAnswer, moves: list[MigrationAnswer], now: datetime
) -> list[_Evacuation]:
    """The evacuations: each has its failed attempts, and perhaps the one that succeeded."""
    found: list[_Evacuation] = []
    is_open = False
    for one in moves:
        if one.trigger is not Trigger.EVACUATION or not one.source_node:
            continue
        begin, end = find_span(one, now)
        last = found[-1] if found and is_open else None
        if last and last.node == one.source_node and begin - last.end <= _ONE_EVACUATION:
            last.end = end
            last.attempts += 1
        else:
            found.append(_Evacuation(one.source_node, begin, end, 1))
        is_open = one.outcome != "succeeded"
    present = vmi.evacuation
    if present is not None:
        attempts = 0
        if found and is_open and found[-1].end >= present.requested_at:
            attempts = found.pop().attempts
        found.append(_Evacuation(present.evacuation_node_name, present.requested_at, now, attempts))
    return found


def _find_cooldowns(vmi: VmiAnswer) -> Iterator[tuple[datetime, datetime, float]]:
    """Each cooldown with its length in seconds, by the policy in force; the next one ends it."""
    endings = [
        Ending(
            end=one.end.timestamp(),
            start=None if one.start is None else one.start.timestamp(),
            outcome=Outcome[one.outcome.upper()],
        )
        for one in vmi.migrations
        if one.end is not None and one.handed_off
    ]
    found = [(to_datetime(end), length) for end, length in list_cooldowns(endings, vmi.policy)]
    if vmi.cooldown is not None:
        present = vmi.cooldown.ended_at
        found = [one for one in found if one[0] < present]
        found.append((present, (vmi.cooldown.not_before - present).total_seconds()))
    for place, (begin, length) in enumerate(found, start=1):
        end = begin + timedelta(seconds=length)
        yield begin, min([end, *(following for following, _ in found[place:])]), length
