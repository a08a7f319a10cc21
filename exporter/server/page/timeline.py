"""The time axis of a page, and the row that draws one VM on it. Pure."""

import math
from datetime import datetime, timedelta

from msgspec import Struct

from exporter.engine.facts.model import Seconds
from exporter.server.api.schemas import MigrationAnswer, VmiAnswer
from exporter.text import split_span, write_count


SPANS: tuple[Seconds, ...] = tuple(
    60.0 * minutes
    for minutes in (5, 8, 12, 20, 30, 45, 60, 90, 120, 180, 240, 360, 540, 720, 1080, 1440, 2880)
)
"""The possible lengths of a timeline's past. The shortest that includes everything is used."""
AHEAD = 0.06
"""The least future that a timeline shows, as a fraction of its past."""
ROOM = 28.0
"""How much room the label at the end of the axis needs, in percent of the width."""
_DAY: Seconds = 86_400.0


class Bar(Struct, frozen=True):
    """A bar of a timeline; the numbers are in percent of the timeline's width."""

    x: float
    width: float
    kind: str


class Timeline(Struct, frozen=True, kw_only=True):
    """A VM's migrations, failures, cooldown and evacuation request, in percent of the width.

    `label` says the same in words.
    """

    bars: tuple[Bar, ...]
    failures: tuple[float, ...]
    cooldown: Bar | None
    requested: float | None
    label: str


class Axis(Struct, frozen=True):
    """The time axis that all timelines of a page share."""

    since: datetime
    now: datetime
    until: datetime

    def place(self, instant: datetime) -> float:
        """The position of an instant in percent of the width, clamped to the axis."""
        share = (instant - self.since) / (self.until - self.since)
        return round(100 * min(max(share, 0.0), 1.0), 2)

    @property
    def is_labelled(self) -> bool:
        """Whether there is room for a label at the end of the axis."""
        return self.place(self.now) <= 100 - ROOM

    @property
    def past(self) -> Seconds:
        """How much of the past the axis shows."""
        return (self.now - self.since).total_seconds()


def choose_axis(vmis: tuple[VmiAnswer, ...], now: datetime, window: Seconds) -> Axis:
    """The shortest axis that includes everything about these VMs within the history window."""
    begins = [move.start or move.end for vmi in vmis for move in vmi.migrations]
    begins += [vmi.evacuation.requested_at for vmi in vmis if vmi.evacuation is not None]
    releases = [vmi.cooldown.not_before for vmi in vmis if vmi.cooldown is not None]
    window = window or _DAY
    oldest = (now - min([now, *filter(None, begins)])).total_seconds()
    past = timedelta(seconds=min(next((span for span in SPANS if span >= oldest), window), window))
    return Axis(now - past, now, max([now + AHEAD * past, *releases]))


def draw_timeline(vmi: VmiAnswer, axis: Axis) -> Timeline:
    """Draw one VM on the axis, without migrations that ended before the beginning of the axis."""
    seen = [move for move in vmi.migrations if find_span(move, axis.now)[1] >= axis.since]
    failed = [move for move in seen if move.outcome == "failed"]
    cooldown = None
    if vmi.cooldown is not None and vmi.cooldown.not_before > axis.now:
        ends = vmi.cooldown.ended_at, vmi.cooldown.not_before
        cooldown = make_bar(axis, *ends, "cooldown")
    return Timeline(
        bars=tuple(
            make_bar(axis, *find_span(move, axis.now), write_outcome(move)) for move in seen
        ),
        failures=tuple(axis.place(find_span(move, axis.now)[1]) for move in failed),
        cooldown=cooldown,
        requested=(None if vmi.evacuation is None else axis.place(vmi.evacuation.requested_at)),
        label=_label_timeline(vmi, axis, seen=len(seen), failed=len(failed)),
    )


def _label_timeline(vmi: VmiAnswer, axis: Axis, *, seen: int, failed: int) -> str:
    count = write_count(seen, "migration") if seen else "no migration"
    parts = [f"{count} in the last {write_duration(axis.past)}"]
    if failed:
        parts.append(f"{failed} failed")
    if any(move.is_under_way for move in vmi.migrations):
        parts.append("one under way")
    if vmi.evacuation is not None:
        asked = axis.now - vmi.evacuation.requested_at
        parts.append(f"evacuation requested {write_past(asked)}")
    if vmi.cooldown is not None:
        left = (vmi.cooldown.not_before - axis.now).total_seconds()
        if left > 0:
            parts.append(f"cooling down for {write_duration(left)} more")
    return ", ".join(parts)


def find_span(migration: MigrationAnswer, now: datetime) -> tuple[datetime, datetime]:
    """The start and the end of a migration; the end of a running one is now.

    If only one of the two is known, it is used for both.
    """
    start, end = migration.start, migration.end
    if end is None:
        end = now if start is None or migration.is_under_way else start
    return (end if start is None else start), end


def write_outcome(migration: MigrationAnswer) -> str:
    """The outcome of a migration, or "running"."""
    return "running" if migration.is_under_way else migration.outcome


def make_bar(axis: Axis, begin: datetime, end: datetime, kind: str) -> Bar:
    """The bar from one instant to another."""
    x = axis.place(begin)
    return Bar(x, round(max(0.0, axis.place(end) - x), 2), kind)


def write_duration(seconds: Seconds) -> str:
    """A duration in its two largest units, as in "1 h 5 min"."""
    parts = split_span(max(0, math.floor(seconds)), 2)
    return " ".join(f"{count} {'min' if unit == 'm' else unit}" for count, unit in parts) or "0 s"


def write_past(past: timedelta) -> str:
    """How long ago something was, as in "5 min ago"."""
    seconds = past.total_seconds()
    return "now" if seconds < 1 else f"{write_duration(seconds)} ago"
