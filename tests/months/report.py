"""What the evaluator has found, as the person who is called would count it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from tests.months.bench import Fault
from tests.months.cluster import BEGAN
from tests.months.truth import Statement, Truth, find_errors


AFTERWARDS = 240.0
"""What happens within these minutes after the end of a fault still belongs to the fault."""


@dataclass(frozen=True, slots=True)
class Firing:
    """An alert that fired, in minutes; `ended` is infinite if it still fires."""

    alert: str
    severity: str
    subject: str
    labels: Mapping[str, str]
    began: float
    ended: float
    text: str


class Heard(msgspec.Struct, frozen=True):
    """What somebody heard about a fault, in minutes after its beginning and after its end.

    `sent` counts the notifications that something new fires. `again` counts how often an alert
    about the same subject fired again.
    """

    about: str
    after: float | None
    quiet: float | None
    sent: int
    alerts: tuple[str, ...]
    again: int


class Message(msgspec.Struct, frozen=True):
    """A notification: minutes since the beginning, the alert, and the texts; none: it is over."""

    at: float
    alert: str
    texts: tuple[str, ...]


class Result(msgspec.Struct, frozen=True):
    """The result of a scenario with one seed: how often each alert fired, and each fault.

    `untrue` says what was not true in the texts. `messages` is empty if they are not listed.
    """

    seed: int
    calls: dict[str, int]
    infos: dict[str, int]
    faults: tuple[Heard, ...]
    untrue: tuple[str, ...]
    messages: tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class Run:
    """All firings and notifications of a scenario, and the errors of rules."""

    firings: Sequence[Firing]
    notifications: Sequence[Mapping[str, Any]]
    errors: Mapping[str, str]
    result: Result


def read(
    seed: int, report: Mapping[str, Any], faults: Sequence[Fault], truth: Truth, *, lists: bool
) -> Run:
    """The result of a run, from the evaluator's report; `lists`: with its notifications."""
    firings = [_firing(firing) for firing in report["firings"]]
    sent = [row | {"at": _minutes(row["at"])} for row in report["notifications"] or []]
    heard = tuple(_hear(firings, sent, faults, place) for place in range(len(faults)))
    calls = Counter(firing.alert for firing in firings if firing.severity != "info")
    infos = Counter(firing.alert for firing in firings if firing.severity == "info")
    untrue = tuple(error for firing in firings for error in _find_errors(firing, faults, truth))
    messages = tuple(_message(row) for row in sent if row["kind"] in ("new", "resolved") and lists)
    result = Result(seed, dict(calls), dict(infos), heard, untrue, messages)
    return Run(firings, sent, report["errors"], result)


def _find_errors(firing: Firing, faults: Sequence[Fault], truth: Truth) -> list[str]:
    claim = Statement(firing.alert, firing.labels, firing.text, firing.began * 60)
    return find_errors(claim, truth, [(fault.began, fault.ended) for fault in faults])


def _message(sent: Mapping[str, Any]) -> Message:
    return Message(sent["at"], sent["alert"], tuple(sent["new"] or ()))


def _minutes(milliseconds: float) -> float:
    return float((milliseconds / 1000 - BEGAN.timestamp()) / 60)


def _firing(fired: Mapping[str, Any]) -> Firing:
    labels = fired["labels"]
    subjects = (labels.get(label) for label in ("name", "node", "resource", "cause"))
    return Firing(
        fired["alert"],
        labels["severity"],
        next((subject for subject in subjects if subject), ""),
        labels,
        _minutes(fired["fired"]),
        _minutes(fired["resolved"]) if fired["resolved"] else float("inf"),
        fired["text"],
    )


def _hear(
    firings: Iterable[Firing],
    sent: Iterable[Mapping[str, Any]],
    faults: Sequence[Fault],
    place: int,
) -> Heard:
    """What was heard from the beginning of a fault until the next one begins."""
    fault = faults[place]
    began, ended = fault.began / 60, fault.ended / 60
    until = min([ended + AFTERWARDS, *(fault.began / 60 for fault in faults[place + 1 :])])
    fired = [firing for firing in firings if began <= firing.began < until]
    about = {firing.alert for firing in fired if firing.severity != "info"} | fault.alerts
    new = [
        row
        for row in sent
        if row["kind"] == "new" and began <= row["at"] < until and row["alert"] in about
    ]
    right = [row["at"] for row in new if row["alert"] in fault.alerts]
    ends = [firing.ended for firing in fired if firing.alert in about]
    subjects = [(firing.alert, firing.subject) for firing in fired if firing.alert in about]
    return Heard(
        fault.about,
        min(right) - began if right else None,
        max(ends) - ended if ends else None,
        len(new),
        tuple(dict.fromkeys(row["alert"] for row in new)),
        len(subjects) - len(set(subjects)),
    )


def format_run(name: str, run: Run) -> list[str]:
    """Lines for a terminal."""
    lines = [f"{name}, seed {run.result.seed}"]
    for heard in run.result.faults:
        after = "never" if heard.after is None else f"after {heard.after:.0f} min"
        quiet = "" if heard.quiet is None else f", quiet {heard.quiet:+.0f} min"
        lines.append(
            f"  {heard.about}: heard {after}{quiet}; {heard.sent} notifications:"
            f" {', '.join(heard.alerts) or 'none'}; fired again: {heard.again}"
        )
    for firing in run.firings:
        hours, minutes = divmod(int(firing.began), 60)
        lines.append(
            f"    {hours:3}:{minutes:02} for {firing.ended - firing.began:4.0f} min"
            f" {firing.alert} ({firing.severity}) {firing.subject}"
        )
    lines += [f"  untrue: {error}" for error in run.result.untrue]
    lines += [f"  error: {rule}: {error}" for rule, error in run.errors.items()]
    return lines


def format_table(abouts: Mapping[str, str], results: Mapping[str, Sequence[Result]]) -> list[str]:
    """The tables of docs/alerts.md: healthy scenarios, faults, and listed notifications."""
    healthy = ["| | healthy | seeds | warnings | info |", "|---|---|---|---|---|"]
    faults = [
        "| | fault | seeds | first alert after | first alert | notifications | alerts end after |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, about in abouts.items():
        several = results.get(name, ())
        seeds = ", ".join(str(result.seed) for result in several)
        if several and not several[0].faults:
            calls = _count(result.calls for result in several)
            infos = _count(result.infos for result in several)
            healthy.append(f"| {name} | {about} | {seeds} | {calls} | {infos} |")
        for place, fault in enumerate(several[0].faults if several else ()):
            heard = [result.faults[place] for result in several]
            shown = f"{about}: {fault.about}" if len(several[0].faults) > 1 else about
            first = sorted({hearing.alerts[0] for hearing in heard if hearing.alerts})
            faults.append(
                f"| {name} | {shown} | {seeds} | {_span([hearing.after for hearing in heard])} |"
                f" {', '.join(first)} | {_span([hearing.sent for hearing in heard], '')} |"
                f" {_span([hearing.quiet for hearing in heard])} |"
            )
    listed = [
        line
        for name, about in abouts.items()
        for result in results.get(name, ())[:1]
        if result.messages
        for line in (
            "",
            f"{name}, seed {result.seed}: {about}.",
            "",
            *_list_messages(result.messages),
        )
    ]
    return [*healthy, "", *faults, *listed]


def _list_messages(messages: Iterable[Message]) -> list[str]:
    rows = ["| day, time | alert | notification |", "|---|---|---|"]
    for message in messages:
        minutes = int(message.at)
        at = f"{minutes // 1440 + 1}, {minutes % 1440 // 60:02}:{minutes % 60:02}"
        rows.append(f"| {at} | {message.alert} | {'<br>'.join(message.texts) or 'resolved'} |")
    return rows


def _count(several: Iterable[Mapping[str, int]]) -> str:
    total = Counter[str]()
    for counts in several:
        total.update(counts)
    return ", ".join(f"{alert} {number}" for alert, number in sorted(total.items())) or "none"


def _span(numbers: Sequence[float | None], unit: str = " min") -> str:
    """The range of some numbers, rounded; None: it did not happen."""
    known = sorted(round(number) for number in numbers if number is not None)
    if not known:
        return "never"
    shown = f"{known[0]}" if known[0] == known[-1] else f"{known[0]} to {known[-1]}"
    missing = " or never" if len(known) < len(numbers) else ""
    return f"{shown}{unit}{missing}"
