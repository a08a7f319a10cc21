"""The API's answers for people: as wide as their terminal, or a line each where they are piped.

Nothing that a cluster or an exporter says is taken for markup, and control characters are shown
as escapes: no name can move the cursor or colour a line.
"""

import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import MAXYEAR, datetime, timedelta
from io import StringIO
from itertools import groupby
from shlex import quote
from typing import TextIO, TypeAlias

import msgspec
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from exporter.engine.model import Reason
from exporter.health import Staleness
from exporter.server.schemas import (
    BlockedAnswer,
    BlockedVmi,
    CancelAnswer,
    CheckpointStatus,
    CooldownAnswer,
    EvacuationAnswer,
    EvacuationsAnswer,
    HeldEvictionAnswer,
    LauncherAnswer,
    MigrationAnswer,
    PendingAnswer,
    PolicyAnswer,
    ResourceAnswer,
    RuleAnswer,
    StatusAnswer,
    VmiAnswer,
)
from exporter.text import escape, write_span


Cell: TypeAlias = str | tuple[str, str]
"""Text, or text and its style."""

ROWS = 20
"""How many rows a list has where not all of them are asked for."""
NARROWEST = 40
"""Columns below which nothing could be aligned."""

_ENDLESS = 1_000_000
_GOOD, _BAD, _FAINT = "green", "bold red", "dim"

_HELD = {
    Reason.MIGRATION_IN_PROGRESS: "a migration of it is under way, and that has to end first",
    Reason.EVACUATION_IN_PROGRESS: "it is being evacuated already, and that has to end first",
    Reason.COOLDOWN: "it cools down after its last migration",
}


class Unreadable(ValueError):
    """An answer says what no exporter says; the text has it."""


@dataclass(frozen=True)
class Screen:
    """What is written to: `width` columns, None where lines may be as long as they are."""

    width: int | None = None
    colored: bool = False


def look_at(stream: TextIO | None, environment: Mapping[str, str]) -> Screen:
    """The terminal behind a stream; a file, a pipe or none is plain, and so is NO_COLOR."""
    if stream is None or not stream.isatty():
        return Screen()
    try:
        columns = os.get_terminal_size(stream.fileno()).columns
    except OSError:
        columns = 0
    plain = environment.get("NO_COLOR") or environment.get("TERM", "dumb") == "dumb"
    return Screen(width=max(columns or 80, NARROWEST), colored=not plain)


def show_vmi(vmi: VmiAnswer, screen: Screen) -> str:
    """Why a VM may not be moved now, or that it may, and everything that this rests on.

    Raises Unreadable.
    """
    sheet = _Sheet(screen)
    sheet.say(*_judge(vmi))
    if vmi.evacuation is not None and vmi.evacuation.stuck:
        sheet.say(("Its evacuation is stuck. ", _BAD), vmi.evacuation.next_step)
    sheet.warn(_doubts(vmi))
    sheet.head("Rules, in the order in which they are asked")
    sheet.rows([_rule(rule) for rule in vmi.rules])
    sheet.head("Cooldown")
    sheet.rows(_cooldown(vmi.cooldown, vmi.policy, vmi.as_of))
    counted = sum(one.in_window for one in vmi.migrations)
    sheet.head(f"Migrations on record: {len(vmi.migrations)}, {counted} of them counted")
    sheet.rows([_migration(one, vmi.as_of) for one in vmi.migrations], _MIGRATION_HEAD)
    for pending in vmi.pending_migrations:
        sheet.rows([("not ended", _attempt(pending, vmi.as_of))])
    if vmi.evacuation is not None:
        sheet.head(f"Evacuation from {vmi.evacuation.evacuation_node_name}")
        sheet.rows(_evacuation(vmi.evacuation, vmi.as_of))
        if vmi.evacuation.cancel is not None:
            sheet.rows([("to cancel it (KubeVirt 1.8), run",)])
            sheet.command(write_cancel(vmi.evacuation.cancel))
    if vmi.held_evictions:
        sheet.head("Evictions asked for")
        sheet.rows([_held_eviction(one, vmi.as_of) for one in vmi.held_evictions])
    sheet.head("What this rests on")
    sheet.rows(_evidence(vmi))
    return sheet.text()


def show_status(
    status: StatusAnswer,
    evacuations: EvacuationsAnswer | None,
    blocked: BlockedAnswer | None,
    screen: Screen,
    *,
    everything: bool,
) -> str:
    """Whether the exporter can be trusted, what is stuck, and who is held until when.

    The other answers are None where it is not ready to give them. `everything`: no list is cut.
    Raises Unreadable.
    """
    sheet = _Sheet(screen)
    sheet.say(*_trust(status))
    sheet.warn(_troubles(status))
    sheet.head("What it rests on")
    sheet.rows(
        [
            ("version", status.version),
            ("checkpoint", _checkpoint(status.checkpoint, status.as_of)),
            *(_resource(one, status.as_of) for one in status.resources),
        ]
    )
    if status.vmis is not None:
        sheet.head(f"VMs: {status.vmis.known}")
        held = [(f"held: {reason}", str(n)) for reason, n in status.vmis.held.items() if n]
        sheet.rows([("may be moved now", str(status.vmis.allowed)), *held])
    most = None if everything else ROWS
    if evacuations is not None:
        stuck = [one for one in evacuations.evacuations if one.stuck]
        others = [one for one in evacuations.evacuations if not one.stuck]
        _list_evacuations(sheet, f"Stuck evacuations: {len(stuck)}", stuck, most)
        _list_evacuations(sheet, f"Other evacuations: {len(others)}", others, most)
    if blocked is not None:
        rows = _held_vms(blocked)
        sheet.head(f"Held VMs: {len(rows)}")
        sheet.rows(rows[:most], _HELD_HEAD)
        sheet.cut(len(rows), most)
    return sheet.text()


def write_cancel(cancel: CancelAnswer) -> str:
    """The request that cancels an evacuation, as a command for a shell."""
    body = msgspec.json.encode(cancel.body).decode()
    verb = {"PUT": "replace", "POST": "create"}.get(cancel.method)
    if verb is None:
        raise Unreadable(f"{cancel.method!r} is no method that kubectl has a verb for")
    return f"echo {quote(body)} | kubectl {verb} --raw {quote(cancel.path)} -f -"


class _Sheet:
    """Text that is put together line by line, for one screen."""

    def __init__(self, screen: Screen) -> None:
        self._file = StringIO()
        self._console = Console(
            file=self._file,
            width=screen.width or _ENDLESS,
            force_terminal=screen.colored,
            color_system="standard" if screen.colored else None,
            no_color=not screen.colored,
            markup=False,
            emoji=False,
            highlight=False,
            legacy_windows=False,
        )

    def text(self) -> str:
        """Everything so far, without the blanks that columns end in."""
        return re.sub(r" +$", "", self._file.getvalue(), flags=re.MULTILINE)

    def say(self, *cells: Cell) -> None:
        """A sentence in pieces."""
        self._console.print(Text.assemble(*(_draw(cell) for cell in cells)))

    def warn(self, sentences: Iterable[str]) -> None:
        """A warning for each."""
        for sentence in sentences:
            self.say(("Warning: ", _BAD), sentence)

    def head(self, text: str, style: str = "bold") -> None:
        """A line that says what follows."""
        self._console.print()
        self.say((text, style))

    def rows(self, rows: Sequence[Sequence[Cell]], head: Sequence[str] = ()) -> None:
        """Aligned columns; what is too long for its column goes on below its beginning."""
        if not rows:
            return
        table = Table.grid(padding=(0, 2, 0, 0))
        for _ in rows[0]:
            table.add_column(overflow="fold")
        if head:
            table.add_row(*(_draw((name, _FAINT)) for name in head))
        for row in rows:
            table.add_row(*(_draw(cell) for cell in row))
        self._console.print(Padding.indent(table, 2))

    def cut(self, count: int, most: int | None) -> None:
        """Say how many rows are not shown."""
        if most is not None and count > most:
            self.rows([((f"and {count - most} more: --all shows them", _FAINT),)])

    def command(self, command: str) -> None:
        """A command on a line of its own, never broken: it is to be copied."""
        self._console.print(Text(f"    {escape(command)}"), soft_wrap=True)


def _draw(cell: Cell) -> Text:
    text, style = (cell, "") if isinstance(cell, str) else cell
    return Text(escape(text), style)


def _judge(vmi: VmiAnswer) -> list[Cell]:
    """The first sentence."""
    name = f"{vmi.namespace}/{vmi.name}"
    verdicts = (vmi.verdicts.filter, vmi.verdicts.pre_eviction)
    verdict = next((one for one in verdicts if one.reason is not None), None)
    if verdict is None or verdict.reason is None:
        if vmi.phase in ("Succeeded", "Failed"):
            return [name, f" has ended ({vmi.phase}): there is nothing to move."]
        if vmi.evacuation is not None:
            node = vmi.evacuation.evacuation_node_name
            return [name, f" is being evacuated from {node} already, and no rule holds it."]
        return [name, (" may be moved now", _GOOD), f": {_why_allowed(vmi)}."]
    why = _HELD[verdict.reason]
    until = ""
    if verdict.not_before is not None:
        release = _release(verdict.not_before)
        until = f", until {release} ({_when(verdict.not_before, vmi.as_of)})"
    return [name, (" may not be moved now", _BAD), f": {why}{until}."]


def _why_allowed(vmi: VmiAnswer) -> str:
    if vmi.cooldown is None:
        return "no rule holds it, and no migration of it is on record to cool down from"
    return (
        f"no rule holds it, and its last cooldown ended {_when(vmi.cooldown.not_before, vmi.as_of)}"
    )


def _doubts(vmi: VmiAnswer) -> list[str]:
    """What makes the answer less than certain."""
    doubts = []
    if vmi.stale:
        heard = "" if vmi.observed_at is None else f" since {_past(vmi.observed_at, vmi.as_of)}"
        doubts.append(f"nothing was heard of the API server{heard}: this may be out of date.")
    for resource, why in vmi.blind_spots.items():
        doubts.append(f"{resource} may not be seen: {why}.")
    return doubts


def _rule(rule: RuleAnswer) -> list[Cell]:
    if rule.blocks:
        said: Cell = ("holds it", _BAD)
    elif not rule.enabled:
        said = ("is off", _FAINT)
    elif rule.silenced:
        said = ("is silent", _BAD)
    else:
        said = ("lets it go", _GOOD)
    return [rule.rule, said, f"{rule.why} ({rule.checkpoint})"]


def _cooldown(
    cooldown: CooldownAnswer | None, policy: PolicyAnswer, as_of: str
) -> list[list[Cell]]:
    if cooldown is None:
        return [["no ended migration to cool down from"]]
    over = _read(cooldown.not_before) <= _read(as_of)
    took = write_span(cooldown.duration_seconds)
    return [
        ["arithmetic", write_arithmetic(cooldown, policy)],
        ["last migration", f"ended {_past(cooldown.ended_at, as_of)}, took {took}"],
        [
            "over since" if over else "until",
            f"{_release(cooldown.not_before)} ({_when(cooldown.not_before, as_of)})",
        ],
    ]


def write_arithmetic(cooldown: CooldownAnswer, policy: PolicyAnswer) -> str:
    """The cooldown as one would write it down: max(15m, 3m12s) x 2^(2-1) = 30m, cap 6h."""
    floor, cap = policy.migration_cooldown_seconds, policy.max_migration_cooldown_seconds
    took = write_span(cooldown.duration_seconds)
    base = f"max({write_span(floor)}, {took})" if floor else f"{took} (no floor)"
    count = cooldown.migrations_in_window
    doubled = f" x 2^({count}-1)" if count else ""
    said = f"{base}{doubled} = {write_span(cooldown.backed_off_seconds)}"
    if not cap:
        return f"{said}, no cap"
    if cooldown.effective_seconds < cooldown.backed_off_seconds:
        return f"{said}, capped at {write_span(cap)}"
    return f"{said}, cap {write_span(cap)}"


_MIGRATION_HEAD = ("ENDED", "TOOK", "OUTCOME", "COUNTED")


def _migration(one: MigrationAnswer, as_of: str) -> list[Cell]:
    took = "?"
    if one.start is not None and one.end is not None:
        span = _read(one.end) - _read(one.start)
        took = write_span(max(0.0, span.total_seconds()))
    elif one.start is not None:
        took = f"began {_past(one.start, as_of)}"
    style = {"failed": _BAD, "succeeded": _GOOD}.get(one.outcome, "")
    counted = "yes" if one.in_window else "no" if one.handed_off else "no: never handed off"
    ended = "?" if one.end is None else _past(one.end, as_of)
    return [ended, took, (one.outcome, style), counted]


def _attempt(one: PendingAnswer, as_of: str) -> str:
    made = "" if one.created_at is None else f", made {_past(one.created_at, as_of)}"
    return f"{one.name}: {one.phase or 'no phase yet'}{made}"


def _evacuation(one: EvacuationAnswer, as_of: str) -> list[list[Cell]]:
    by = f": stuck by {' and '.join(one.stuck_by)}" if one.stuck else ""
    rows: list[list[Cell]] = [
        ["state", (f"{one.state}{by}", _BAD if one.stuck else "")],
        ["requested", f"{_past(one.requested_at, as_of)}, source {one.source}"],
        [
            "failed attempts",
            f"at least {one.failed_attempts}" if one.failed_attempts else "none seen",
        ],
    ]
    if one.attempt is not None:
        rows.append(["attempt now", _attempt(one.attempt, as_of)])
    if one.backoff is not None:
        pause = f"{write_span(one.backoff.seconds)}, next try"
        rows.append(["KubeVirt pauses", f"{pause} {_when(one.backoff.next_try_at, as_of)}"])
    if one.diverged:
        rows.append(["diverged", "the descheduler believes it over, KubeVirt does not"])
    rows.append(["next step", one.next_step])
    return rows


def _held_eviction(one: HeldEvictionAnswer, as_of: str) -> list[Cell]:
    said: Cell = ("denied", _BAD) if one.denied else "would be denied"
    times = "once" if one.times == 1 else f"{one.times} times, last"
    return [f"by {one.user}", f"{times} {_past(one.at, as_of)}", said, str(one.reason)]


def _evidence(vmi: VmiAnswer) -> list[list[Cell]]:
    heard = "nothing yet" if vmi.observed_at is None else _past(vmi.observed_at, vmi.as_of)
    return [
        ["runs on", vmi.node or "no node yet"],
        ["launcher pod", "not seen" if vmi.launcher is None else _launcher(vmi.launcher)],
        ["heard of API server", heard],
        ["not seen", ", ".join(vmi.blind_spots) or "nothing is hidden"],
    ]


def _launcher(pod: LauncherAnswer) -> str:
    ready = "ready" if pod.ready else "not ready"
    marked = ", eviction-in-progress" if pod.eviction_in_progress else ""
    return f"{pod.name}: {pod.phase}, {ready}{marked}"


def _trust(status: StatusAnswer) -> list[Cell]:
    """The first sentence: whether to believe the rest."""
    heard = "nothing of the API server yet"
    if status.observed_at is not None:
        heard = f"of the API server {_when(status.observed_at, status.as_of)}"
    if not status.ready:
        why = f"waits for {', '.join(status.waiting_for)}" if status.waiting_for else "is ending"
        return [("Not ready: ", _BAD), f"the exporter {why}, and answers no verdicts."]
    match status.staleness:
        case Staleness.FRESH if not status.blind_spots:
            return [("To be trusted: ", _GOOD), f"ready, nothing hidden, heard {heard}."]
        case Staleness.FRESH:
            return [("To be trusted, with blind spots: ", _BAD), f"ready, heard {heard}."]
        case Staleness.STALE:
            return [("Stale: ", _BAD), f"last heard {heard}; what it tells may have changed."]
        case Staleness.DEAD:
            return [("Dead: ", _BAD), f"last heard {heard}; only cooldowns still hold VMs."]


def _troubles(status: StatusAnswer) -> list[str]:
    troubles = [f"{place} may not be seen: {why}." for place, why in status.blind_spots.items()]
    for one in status.resources:
        if one.trouble is not None and one.refused is None:
            troubles.append(f"{one.resource}: {one.trouble}.")
        if one.refused_objects:
            troubles.append(f"{one.resource}: {one.refused_objects} objects could not be read.")
    if status.checkpoint is not None:
        for fault, count in status.checkpoint.faults.items():
            troubles.append(f"checkpoint: {count} x {fault} since the start.")
    return troubles


def _resource(one: ResourceAnswer, as_of: str) -> list[Cell]:
    place = str(one.resource) if one.namespace is None else f"{one.resource} in {one.namespace}"
    heard = "" if one.contact_at is None else f", heard {_when(one.contact_at, as_of)}"
    if one.refused is not None:
        return [place, ("may not be seen", _BAD)]
    return [place, f"synced{heard}" if one.synced else ("not listed yet", _BAD)]


def _checkpoint(kept: CheckpointStatus | None, as_of: str) -> str:
    if kept is None:
        return "none: a restart knows what the cluster still shows"
    who = "written by this process" if kept.writes else "written by another replica"
    if kept.unwritten_since is not None:
        who += f", changes unwritten since {_past(kept.unwritten_since, as_of)}"
    elif kept.writes and kept.written_at is not None:
        who += f", as it should be {_when(kept.written_at, as_of)}"
    return f"{kept.vmis} VMs, {kept.bytes:,} bytes, {who}"


_EVACUATION_HEAD = ("VM", "FROM", "AGE", "STATE", "FAILED")


def _list_evacuations(
    sheet: _Sheet, head: str, found: Sequence[EvacuationAnswer], most: int | None
) -> None:
    """The evacuations, and below them what to do, once for all of a state to which it applies."""
    shown = found[:most]
    sheet.head(head)
    sheet.rows([_evacuation_row(one) for one in shown], _EVACUATION_HEAD)
    sheet.cut(len(found), most)
    steps = dict.fromkeys((str(one.state), one.next_step) for one in shown)
    sheet.rows([((f"{state}:", _FAINT), step) for state, step in steps])


def _evacuation_row(one: EvacuationAnswer) -> list[Cell]:
    return [
        f"{one.namespace}/{one.name}",
        one.evacuation_node_name,
        write_span(int(one.age_seconds), units=2),
        (str(one.state), _BAD if one.stuck else ""),
        str(one.failed_attempts),
    ]


_HELD_HEAD = ("VM", "ON", "BECAUSE", "UNTIL")


def _held_vms(blocked: BlockedAnswer) -> list[list[Cell]]:
    """One row for each VM: those that the clock releases by when it does, then the others."""
    dated: list[tuple[datetime, list[Cell]]] = []
    others: list[list[Cell]] = []
    for (namespace, name), group in groupby(blocked.blocked, lambda one: (one.namespace, one.name)):
        entries: list[BlockedVmi] = list(group)
        because = ", ".join(dict.fromkeys(entry.reason for entry in entries))
        row: list[Cell] = [f"{namespace}/{name}", entries[0].node, because]
        release = entries[-1].not_before
        if release is None or len(entries) > 1:
            others.append([*row, "that has ended"])
        else:
            until = f"{_release(release)} ({_when(release, blocked.as_of)})"
            dated.append((_read(release), [*row, until]))
    dated.sort(key=lambda one: one[0])
    return [row for _, row in dated] + others


def _read(instant: str) -> datetime:
    try:
        moment = datetime.fromisoformat(instant)
    except ValueError:
        raise Unreadable(f"{instant!r} is no instant") from None
    if moment.tzinfo is None:
        raise Unreadable(f"{instant!r} is no instant without its zone")
    return moment


def _write(moment: datetime) -> str:
    return f"{moment:%Y-%m-%dT%H:%M:%SZ}"


def _release(instant: str) -> str:
    """The next whole second: who comes then is not too early."""
    moment = _read(instant)
    if moment.microsecond and moment.year < MAXYEAR:
        moment += timedelta(seconds=1)
    return _write(moment)


def _past(instant: str, as_of: str) -> str:
    """An instant with how long ago it was."""
    return f"{_write(_read(instant))} ({_when(instant, as_of)})"


def _when(instant: str, as_of: str) -> str:
    """How far an instant is from the answer's own, in its two greatest units."""
    seconds = (_read(instant) - _read(as_of)).total_seconds()
    span = write_span(math.ceil(abs(seconds)) if seconds > 0 else int(abs(seconds)), units=2)
    return f"in {span}" if seconds > 0 else f"{span} ago"
