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
    moves = sorted(vmi.migrations, key=lambda move: find_span(move, axis.now))
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
            bar=make_bar(axis, *find_span(move, axis.now), write_outcome(move)),
            text=_describe(move),
            lane=lane(move.source_node),
            to=lane(move.target_node) if move.target_node else None,
            anchor=name_anchor(move),
        )
        for move in moves
        if find_span(move, axis.now)[1] >= axis.since
    )
    evacuations = tuple(
        Shape(
            bar=make_bar(axis, evacuation.begin, evacuation.end, "evacuation"),
            text=f"evacuation of {evacuation.node}: {write_count(evacuation.attempts, 'attempt')}"
            f" within {write_duration((evacuation.end - evacuation.begin).total_seconds())}",
            lane=lane(evacuation.node),
        )
        for evacuation in _find_evacuations(vmi, moves, axis.now)
        if evacuation.end >= axis.since
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


def _describe(move: MigrationAnswer) -> str:
    """A migration in words."""
    where = f"{move.source_node or UNKNOWN} to {move.target_node or UNKNOWN}"
    began = move.start or move.end
    parts = [where if began is None else f"{began:%d %b %H:%M:%S} UTC, {where}"]
    if move.start is not None and move.end is not None:
        parts.append(f"took {write_duration((move.end - move.start).total_seconds())}")
    if move.trigger is not None:
        parts.append(move.trigger)
    if move.requested_by is not None:
        parts.append(f"by {move.requested_by.user}")
    reason = "" if move.reason in (None, EndReason.NONE) else f" ({move.reason})"
    return f"{', '.join(parts)}: {write_outcome(move)}{reason}"


def _find_stays(
    vmi: VmiAnswer, moves: list[MigrationAnswer], axis: Axis
) -> Iterator[tuple[str | None, datetime, datetime]]:
    """On which node the VM was, from when to when; nothing where two records contradict."""
    begin = max(axis.since, vmi.created_at or axis.since)
    arrived: str | None = None
    for move in moves:
        if move.outcome != "succeeded":
            continue
        end = find_span(move, axis.now)[1]
        if move.source_node and arrived in (None, move.source_node):
            yield move.source_node, begin, end
        begin, arrived = end, move.target_node
    if vmi.node and arrived in (None, vmi.node):
        yield vmi.node, begin, axis.now


def _find_evacuations(
    vmi: VmiAnswer, moves: list[MigrationAnswer], now: datetime
) -> list[_Evacuation]:
    """The evacuations: each has its failed attempts, and perhaps the one that succeeded."""
    evacuations: list[_Evacuation] = []
    is_open = False
    for move in moves:
        if move.trigger is not Trigger.EVACUATION or not move.source_node:
            continue
        begin, end = find_span(move, now)
        last = evacuations[-1] if evacuations and is_open else None
        if last and last.node == move.source_node and begin - last.end <= _ONE_EVACUATION:
            last.end = end
            last.attempts += 1
        else:
            evacuations.append(_Evacuation(move.source_node, begin, end, 1))
        is_open = move.outcome != "succeeded"
    present = vmi.evacuation
    if present is not None:
        attempts = 0
        if evacuations and is_open and evacuations[-1].end >= present.requested_at:
            attempts = evacuations.pop().attempts
        evacuations.append(
            _Evacuation(present.evacuation_node_name, present.requested_at, now, attempts)
        )
    return evacuations


def _find_cooldowns(vmi: VmiAnswer) -> Iterator[tuple[datetime, datetime, float]]:
    """Each cooldown with its length in seconds, by the policy in force; the next one ends it."""
    endings = [
        Ending(
            end=migration.end.timestamp(),
            start=None if migration.start is None else migration.start.timestamp(),
            outcome=Outcome[migration.outcome.upper()],
        )
        for migration in vmi.migrations
        if migration.end is not None and migration.handed_off
    ]
    cooldowns = [(to_datetime(end), length) for end, length in list_cooldowns(endings, vmi.policy)]
    if vmi.cooldown is not None:
        present = vmi.cooldown.ended_at
        cooldowns = [cooldown for cooldown in cooldowns if cooldown[0] < present]
        cooldowns.append((present, (vmi.cooldown.not_before - present).total_seconds()))
    for place, (begin, length) in enumerate(cooldowns, start=1):
        end = begin + timedelta(seconds=length)
        yield begin, min([end, *(following for following, _ in cooldowns[place:])]), length
