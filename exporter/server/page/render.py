"""Renders the status page at `/`, the page of one VM and runbooks, without external assets."""

import base64
import hashlib
import re
from collections.abc import Iterator, Mapping
from datetime import datetime
from functools import partial
from pathlib import Path
from urllib.parse import quote
from weakref import proxy

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from exporter.engine.evacuations.drain_outcomes import GRAVEST, KEPT
from exporter.engine.facts.model import Instant, Resource
from exporter.engine.facts.states import State
from exporter.engine.verdicts.rules import list_reasons
from exporter.server.api.schemas import ResourceAnswer, VmiAnswer
from exporter.server.fields import LONGEST_NAME, LONGEST_NAMESPACE, Problem
from exporter.server.page.lanes import draw_lanes, name_anchor
from exporter.server.page.model import PageModel
from exporter.server.page.tables import LONGEST_VM, ROWS, Sort, Step
from exporter.server.page.timeline import (
    Axis,
    choose_axis,
    draw_timeline,
    write_duration,
    write_past,
)
from exporter.settings import Links
from exporter.settings.policy import write_policy
from exporter.text import format_duration, to_datetime, write_count, write_datetime
from exporter.words.evacuations import (
    BY_TAINT,
    DIVERGED,
    LEFT_OVER,
    OUTCOMES,
    describe_delay,
    describe_stuck_move,
)
from exporter.words.health import LOSSES, HealthLevel, describe_health
from exporter.words.verdicts import REASONS, describe_policy


_FOLDER = Path(__file__).parent


def render_page(page: PageModel, links: Links, *, linked: bool) -> Iterator[str]:
    """Render the status page as HTML in many pieces, with all text escaped.

    `linked`: the page links to the API, because its listener serves the API too. Jinja's contexts
    and macros are reference cycles, which only a garbage collection frees. They get weak references
    to the model, because collecting several models takes 10 ms.
    """
    vms = page.vms
    rows = () if vms is None else (*vms.moving.shown, *vms.blocked.shown)
    candidates = [] if page.drained is None else page.drained.candidates
    watched = dict[Resource, list[ResourceAnswer]]()
    for row in page.status.resources:
        watched.setdefault(row.resource, []).append(row)
    axis = choose_axis(
        tuple(vmi for _, vmi in rows), page.status.as_of, page.policy.migration_history_window
    )
    title = "not ready"
    if page.status.ready:
        figures = page.figures
        title = f"{figures.stuck} stuck" if figures.stuck else f"{figures.blocked} blocked"
    yield from _PAGE.generate(
        page=proxy(page),
        status=page.status,
        watched=watched,
        vms=vms and proxy(vms),
        filters=page.filters,
        linked=linked,
        health=judge_health(page),
        title=title,
        reasons=list_reasons(page.policy),
        settings=write_policy(page.policy),
        drain_rows=sorted(candidates, key=lambda candidate: GRAVEST.index(candidate.outcome))[
            :ROWS
        ],
        **_shared(axis, links),
    )


def render_vm(vmi: VmiAnswer, links: Links, *, linked: bool) -> str:
    """Render the page of one VM; `linked` as in `render_page`."""
    window = vmi.policy.migration_history_window
    axis = choose_axis((vmi,), vmi.as_of, window)
    title = f"{vmi.namespace}/{vmi.name}"
    drawing = draw_lanes(vmi, axis)
    templates = {"Grafana": links.grafana, "Console": links.console}
    return _VM.render(
        vmi=vmi,
        linked=linked,
        title=title,
        drawing=drawing,
        elsewhere={
            name: fill_link(template, vmi) for name, template in templates.items() if template
        },
        **_shared(axis, links),
    )


def render_problem(problem: Problem, now: Instant) -> str:
    """Render the error page for a VM that has no page."""
    return _PROBLEM.render(
        problem=problem, as_of=to_datetime(now), linked=False, title=problem.title
    )


def render_runbook(title: str, body: Markup) -> str:
    """Render the page of a runbook, or of the list of them."""
    return _RUNBOOK.render(title=title, body=body, linked=False)


def _shared(axis: Axis, links: Links) -> dict[str, object]:
    """The variables that the shared parts of both pages use."""
    return {
        "axis": axis,
        "timeline": lambda vmi: draw_timeline(vmi, axis),
        "when": lambda instant: write_time(instant, axis.now),
        "runbook_url": partial(link_runbook, links.runbooks or "/runbooks/{alert}"),
    }


def link_runbook(template: str, runbook: str) -> str:
    """The URL of a step of a runbook."""
    name, _, step = runbook.partition("#")
    return f"{template.format(alert=name)}#{step}"


def name_step_anchor(step: Step) -> str:
    """The id of a next step on the page, which stays the same for as long as the step is there."""
    kind = "stuck" if step.stuck else "moving"
    return re.sub(r"\W+", "_", f"{kind}_{step.runbook}_{step.title}")


def fill_link(template: str, vmi: VmiAnswer) -> str:
    """A URL of the settings for one VM."""
    places = {"namespace": vmi.namespace, "name": vmi.name, "node": vmi.node}
    return template.format_map({name: quote(place, safe="") for name, place in places.items()})


def judge_health(page: PageModel) -> tuple[HealthLevel, str, str]:
    """How far the page can be trusted, in words, and why."""
    status, contact = page.status, "never"
    if status.observed_at is not None:
        contact = write_past(status.as_of - status.observed_at)
    level, head, why = describe_health(
        status.staleness,
        contact,
        ready=status.ready and not page.closing,
        waiting_for=() if page.closing else status.waiting_for,
        rejected=dict.fromkeys(row.resource for row in status.resources if row.rejected),
    )
    if level is HealthLevel.BARELY and page.dies_at is not None:
        left = (page.dies_at - status.as_of).total_seconds()
        why += f" In {write_duration(left)} only cooldowns still block."
    return level, head, why


def write_time(moment: datetime | None, now: datetime) -> Markup:
    """An instant as HTML, relative to now and in UTC."""
    if moment is None:
        return Markup('<span class="none">never</span>')
    left = (moment - now).total_seconds()
    far = f"in {write_duration(left)}" if left >= 1 else write_past(now - moment)
    label = moment.strftime("%H:%M:%S" if moment.date() == now.date() else "%d %b %H:%M")
    return Markup(
        '<time datetime="{}"><span class="far">{}</span> <span class="at">{} UTC</span></time>'
    ).format(write_datetime(moment), far, label)


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
    "anchor": name_anchor,
    "step_anchor": name_step_anchor,
    "delay": lambda move: (
        describe_delay(move.state, move.failed_attempts) if move.stuck else move.state
    ),
    "cooldown": partial(describe_policy, write=write_duration),
    "stuck_move": lambda move: describe_stuck_move(move.trigger, move.failed_attempts),
    "path": lambda vmi: f"/vmis/{quote(vmi.namespace, safe='')}/{quote(vmi.name, safe='')}",
    "moment": lambda moment: Markup('<time datetime="{}">{} UTC</time>').format(
        write_datetime(moment), moment.replace(microsecond=0, tzinfo=None)
    ),
}
_STYLE, _SCRIPT = _read("page.css"), _read("page.js")
_TEMPLATES.globals |= {
    "style": Markup(_STYLE),  # noqa: S704 (our own file)
    "script": Markup(_SCRIPT),  # noqa: S704 (same)
    "losses": {resource: lost.replace("`", "") for resource, lost in LOSSES.items()},
    "states": State,
    "reason_words": REASONS,
    "sorts": Sort,
    "longest": {"vm": LONGEST_VM, "namespace": LONGEST_NAMESPACE, "node": LONGEST_NAME},
    "outcomes": GRAVEST,
    "kept": KEPT,
    "outcome_words": OUTCOMES,
    "by_taint": BY_TAINT,
    "left_over": LEFT_OVER,
    "diverged": DIVERGED,
}
_COMPILED = {name: _TEMPLATES.get_template(name) for name in _TEMPLATES.list_templates(["j2"])}
"""All templates, compiled in the thread that imports this module. The last step of a compilation
holds the interpreter's lock, so no verdict is answered meanwhile: 1 ms for 2 kB of a template."""
_PAGE, _VM, _PROBLEM, _RUNBOOK = (
    _COMPILED[f"{name}.html.j2"] for name in ("page", "vm", "problem", "runbook")
)
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
