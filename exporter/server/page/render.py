"""Renders the status page at `/` and the page of one VM, as HTML without external assets."""

import base64
import hashlib
import math
from collections.abc import Mapping
from datetime import datetime, timedelta
from pathlib import Path
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from msgspec import Struct

from exporter.engine.evacuations.diagnosis import State
from exporter.engine.evacuations.drain_outcomes import GRAVEST, KEPT, DrainOutcome
from exporter.engine.facts.model import Instant, Resource, Seconds
from exporter.engine.verdicts.rules import list_reasons
from exporter.health import Staleness
from exporter.server.api.schemas import (
    MigrationAnswer,
    ResourceAnswer,
    VmiAnswer,
)
from exporter.server.fields import Problem
from exporter.server.page.model import LOSSES, ROWS, PageModel, Sort
from exporter.settings import write_policy
from exporter.text import (
    format_duration,
    split_span,
    to_datetime,
    write_count,
    write_datetime,
)
from exporter.words.verdicts import REASONS


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
_DRAIN_WORDS = {
    DrainOutcome.LEAVES: "would be migrated",
    DrainOutcome.WAITS: "would wait",
    DrainOutcome.FAILS: "would fail to leave",
    DrainOutcome.RESTARTS: "would go down",
    DrainOutcome.STAYS: "would never leave",
    DrainOutcome.EXTERNAL: "would wait for somebody else",
    DrainOutcome.ENDS: "would be deleted anyway",
}
_FOLDER = Path(__file__).parent


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


def render_page(page: PageModel, *, linked: bool) -> str:
    """Render the status page as HTML, with all text escaped.

    `linked`: the page links to the API, because its listener serves the API too.
    """
    vms = page.vms
    shown = () if vms is None else (*vms.evacuations.shown, *(vmi for _, vmi in vms.blocked.shown))
    candidates = [] if page.drained is None else page.drained.candidates
    watched = dict[Resource, list[ResourceAnswer]]()
    for one in page.status.resources:
        watched.setdefault(one.resource, []).append(one)
    axis = measure_axis(shown, page.status.as_of, page.policy.migration_history_window)
    title = "not ready"
    if page.status.vmis is not None and page.status.ready:
        title = f"{page.status.vmis.known - page.status.vmis.allowed} blocked"
        if page.stuck_evacuations:
            title = f"{page.stuck_evacuations} stuck"
    return _PAGE.render(
        page=page,
        status=page.status,
        watched=watched,
        vms=vms,
        filters=page.filters,
        linked=linked,
        verdict=describe_health(page),
        title=title,
        reasons=list_reasons(page.policy),
        settings=write_policy(page.policy),
        drain_rows=sorted(candidates, key=lambda one: GRAVEST.index(one.outcome))[:ROWS],
        **_shared(axis),
    )


def render_vm(vmi: VmiAnswer, *, linked: bool) -> str:
    """Render the page of one VM; `linked` as in `render_page`."""
    window = vmi.policy.migration_history_window
    axis = measure_axis((vmi,), vmi.as_of, window)
    title = f"{vmi.namespace}/{vmi.name}"
    return _VM.render(vmi=vmi, linked=linked, title=title, **_shared(axis))


def render_problem(problem: Problem, now: Instant) -> str:
    """Render the error page for a VM that has no page."""
    return _PROBLEM.render(
        problem=problem, as_of=to_datetime(now), linked=False, title=problem.title
    )


def _shared(axis: Axis) -> dict[str, object]:
    """The variables that the shared parts of both pages use."""
    return {
        "axis": axis,
        "timeline": lambda vmi: draw_timeline(vmi, axis),
        "when": lambda instant: write_time(instant, axis.now),
    }


def describe_health(page: PageModel) -> tuple[str, str]:
    """Whether the page can be trusted: "yes", "mostly", "barely" or "no", and why."""
    status = page.status
    if page.closing:
        return "no", "This process is ending."
    if not status.ready:
        waiting = ", ".join(status.waiting_for) or "the first list"
        return "no", f"Not ready: waiting for {waiting}. Until then, verdict requests get a 503."
    contact = "never"
    if status.observed_at is not None:
        contact = _ago(status.as_of - status.observed_at)
    rejected = ", ".join(dict.fromkeys(one.resource for one in status.resources if one.rejected))
    match status.staleness:
        case Staleness.FRESH if rejected:
            return (
                "mostly",
                f"Synced, last contact {contact}; the exporter may not read {rejected}.",
            )
        case Staleness.FRESH:
            return "yes", f"Synced, last contact {contact}."
        case Staleness.STALE:
            dies = ""
            if page.dies_at is not None:
                left = (page.dies_at - status.as_of).total_seconds()
                dies = f" In {write_duration(left)} only cooldowns still block."
            return "barely", f"Stale: the last contact was {contact}.{dies}"
        case Staleness.DEAD:
            return "no", f"Dead: the last contact was {contact}; only cooldowns still block."


def write_duration(seconds: Seconds) -> str:
    """A duration in its two largest units, as in "1 h 5 min"."""
    parts = split_span(max(0, math.floor(seconds)), 2)
    return " ".join(f"{count} {'min' if unit == 'm' else unit}" for count, unit in parts) or "0 s"


def write_time(moment: datetime | None, now: datetime) -> Markup:
    """An instant as HTML, relative to now and in UTC."""
    if moment is None:
        return Markup('<span class="none">never</span>')
    left = (moment - now).total_seconds()
    far = f"in {write_duration(left)}" if left >= 1 else _ago(now - moment)
    label = moment.strftime("%H:%M:%S" if moment.date() == now.date() else "%d %b %H:%M")
    return Markup(
        '<time datetime="{}"><span class="far">{}</span> <span class="at">{} UTC</span></time>'
    ).format(write_datetime(moment), far, label)


def measure_axis(vmis: tuple[VmiAnswer, ...], now: datetime, window: Seconds) -> Axis:
    """The shortest axis that includes everything about these VMs within the history window."""
    begins = [one.start or one.end for vmi in vmis for one in vmi.migrations]
    begins += [vmi.evacuation.requested_at for vmi in vmis if vmi.evacuation is not None]
    releases = [vmi.cooldown.not_before for vmi in vmis if vmi.cooldown is not None]
    window = window or _DAY
    oldest = (now - min([now, *filter(None, begins)])).total_seconds()
    past = timedelta(seconds=min(next((span for span in SPANS if span >= oldest), window), window))
    return Axis(now - past, now, max([now + AHEAD * past, *releases]))


def draw_timeline(vmi: VmiAnswer, axis: Axis) -> Timeline:
    """Draw one VM on the axis, without migrations that ended before the beginning of the axis."""
    seen = [one for one in vmi.migrations if _span(one, axis.now)[1] >= axis.since]
    failed = [one for one in seen if one.outcome == "failed"]
    cooldown = None
    if vmi.cooldown is not None and vmi.cooldown.not_before > axis.now:
        ends = vmi.cooldown.ended_at, vmi.cooldown.not_before
        cooldown = _bar(axis, *ends, "cooldown")
    return Timeline(
        bars=tuple(
            _bar(axis, *_span(one, axis.now), "running" if _is_under_way(one) else one.outcome)
            for one in seen
        ),
        failures=tuple(axis.place(_span(one, axis.now)[1]) for one in failed),
        cooldown=cooldown,
        requested=(None if vmi.evacuation is None else axis.place(vmi.evacuation.requested_at)),
        label=_label_timeline(vmi, axis, seen=len(seen), failed=len(failed)),
    )


def _label_timeline(vmi: VmiAnswer, axis: Axis, *, seen: int, failed: int) -> str:
    count = write_count(seen, "migration") if seen else "no migration"
    parts = [f"{count} in the last {write_duration(axis.past)}"]
    if failed:
        parts.append(f"{failed} failed")
    if any(_is_under_way(one) for one in vmi.migrations):
        parts.append("one under way")
    if vmi.evacuation is not None:
        asked = axis.now - vmi.evacuation.requested_at
        parts.append(f"evacuation requested {_ago(asked)}")
    if vmi.cooldown is not None:
        left = (vmi.cooldown.not_before - axis.now).total_seconds()
        if left > 0:
            parts.append(f"cooling down for {write_duration(left)} more")
    return ", ".join(parts)


def _span(migration: MigrationAnswer, now: datetime) -> tuple[datetime, datetime]:
    """The start and the end of a migration; the end of a running one is now.

    If only one of the two is known, it is used for both.
    """
    start, end = migration.start, migration.end
    if end is None:
        end = now if start is None or _is_under_way(migration) else start
    return (end if start is None else start), end


def _is_under_way(migration: MigrationAnswer) -> bool:
    """Whether a migration is still running. A failed one may have no end either."""
    return migration.end is None and migration.outcome == "unknown"


def _bar(axis: Axis, begin: datetime, end: datetime, kind: str) -> Bar:
    x = axis.place(begin)
    return Bar(x, round(max(0.0, axis.place(end) - x), 2), kind)


def _ago(past: timedelta) -> str:
    seconds = past.total_seconds()
    return "now" if seconds < 1 else f"{write_duration(seconds)} ago"


def _read(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8").strip()


def _hash(text: str) -> str:
    """The hash of an inline script or style for the Content-Security-Policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


_TEMPLATES = Environment(
    loader=FileSystemLoader(_FOLDER),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    auto_reload=False,
)
_TEMPLATES.filters |= {
    "counted": write_count,
    "duration": write_duration,
    "setting": format_duration,
    "path": lambda vmi: f"/vmis/{quote(vmi.namespace, safe='')}/{quote(vmi.name, safe='')}",
    "moment": lambda moment: Markup('<time datetime="{}">{} UTC</time>').format(
        write_datetime(moment), moment.replace(microsecond=0, tzinfo=None)
    ),
}
_STYLE, _SCRIPT = _read("page.css"), _read("page.js")
_TEMPLATES.globals |= {
    "style": Markup(_STYLE),  # noqa: S704 (our own file)
    "script": Markup(_SCRIPT),  # noqa: S704 (same)
    "losses": LOSSES,
    "states": State,
    "reason_words": REASONS,
    "sorts": Sort,
    "outcomes": GRAVEST,
    "kept": KEPT,
    "drain_words": _DRAIN_WORDS,
}
_PAGE, _VM, _PROBLEM = (
    _TEMPLATES.get_template(f"{name}.html.j2") for name in ("page", "vm", "problem")
)
"""The templates are compiled at import, because that takes 50 ms."""
PAGE_HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": "; ".join(
        (
            "default-src 'none'",
            f"style-src {_hash(_STYLE)}",
            f"script-src {_hash(_SCRIPT)}",
            "img-src data:",
            "connect-src 'self'",
            "form-action 'self'",
            "base-uri 'none'",
            "frame-ancestors 'none'",
        )
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
"""The response headers of the pages: a browser may load nothing external."""
