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
CALLING = "warning"


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
    seed: int, found: Mapping[str, Any], faults: Sequence[Fault], truth: Truth, *, lists: bool
) -> Run:
    """The result of a run, from the evaluator's report; `lists`: with its notifications."""
    firings = [_firing(one) for one in found["firings"]]
    sent = [one | {"at": _minutes(one["at"])} for one in found["notifications"] or []]
    heard = tuple(_hear(firings, sent, faults, place) for place in range(len(faults)))
    calls = Counter(one.alert for one in firings if one.severity == CALLING)
    infos = Counter(one.alert for one in firings if one.severity != CALLING)
    untrue = tuple(error for one in firings for error in _find_errors(one, faults, truth))
    messages = tuple(_message(one) for one in sent if one["kind"] in ("new", "resolved") and lists)
    result = Result(seed, dict(calls), dict(infos), heard, untrue, messages)
    return Run(firings, sent, found["errors"], result)


def _find_errors(firing: Firing, faults: Sequence[Fault], truth: Truth) -> list[str]:
    said = Statement(firing.alert, firing.labels, firing.text, firing.began * 60)
    return find_errors(said, truth, [(one.began, one.ended) for one in faults])


def _message(sent: Mapping[str, Any]) -> Message:
    return Message(sent["at"], sent["alert"], tuple(sent["new"] or ()))


def _minutes(milliseconds: float) -> float:
    return float((milliseconds / 1000 - BEGAN.timestamp()) / 60)


def _firing(found: Mapping[str, Any]) -> Firing:
    labels = found["labels"]
    subjects = (labels.get(one) for one in ("name", "node", "resource", "cause"))
    return Firing(
        found["alert"],
        labels["severity"],
        next((one for one in subjects if one), ""),
        labels,
        _minutes(found["fired"]),
        _minutes(found["resolved"]) if found["resolved"] else float("inf"),
        found["text"],
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
    until = min([ended + AFTERWARDS, *(one.began / 60 for one in faults[place + 1 :])])
    fired = [one for one in firings if began <= one.began < until]
    about = {one.alert for one in fired if one.severity == CALLING} | fault.alerts
    new = [
        one
        for one in sent
        if one["kind"] == "new" and began <= one["at"] < until and one["alert"] in about
    ]
    right = [one["at"] for one in new if one["alert"] in fault.alerts]
    ends = [one.ended for one in fired if one.alert in about]
    subjects = [(one.alert, one.subject) for one in fired if one.alert in about]
    return Heard(
        fault.about,
        min(right) - began if right else None,
        max(ends) - ended if ends else None,
        len(new),
        tuple(dict.fromkeys(one["alert"] for one in new)),
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
    for one in run.firings:
        hours, minutes = divmod(int(one.began), 60)
        lines.append(
            f"    {hours:3}:{minutes:02} for {one.ended - one.began:4.0f} min"
            f" {one.alert} ({one.severity}) {one.subject}"
        )
    lines += [f"  untrue: {one}" for one in run.result.untrue]
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
        seeds = ", ".join(str(one.seed) for one in several)
        if several and not several[0].faults:
            calls = _count(one.calls for one in several)
            infos = _count(one.infos for one in several)
            healthy.append(f"| {name} | {about} | {seeds} | {calls} | {infos} |")
        for place, fault in enumerate(several[0].faults if several else ()):
            heard = [one.faults[place] for one in several]
            shown = f"{about}: {fault.about}" if len(several[0].faults) > 1 else about
            first = sorted({one.alerts[0] for one in heard if one.alerts})
            faults.append(
                f"| {name} | {shown} | {seeds} | {_span([one.after for one in heard])} |"
                f" {', '.join(first)} | {_span([one.sent for one in heard], '')} |"
                f" {_span([one.quiet for one in heard])} |"
            )
    listed = [
        line
        for name, about in abouts.items()
        for one in results.get(name, ())[:1]
        if one.messages
        for line in ("", f"{name}, seed {one.seed}: {about}.", "", *_list_messages(one.messages))
    ]
    return [*healthy, "", *faults, *listed]


def _list_messages(messages: Iterable[Message]) -> list[str]:
    rows = ["| day, time | alert | notification |", "|---|---|---|"]
    for one in messages:
        minutes = int(one.at)
        at = f"{minutes // 1440 + 1}, {minutes % 1440 // 60:02}:{minutes % 60:02}"
        rows.append(f"| {at} | {one.alert} | {'<br>'.join(one.texts) or 'resolved'} |")
    return rows


def _count(several: Iterable[Mapping[str, int]]) -> str:
    total = Counter[str]()
    for one in several:
        total.update(one)
    return ", ".join(f"{alert} {number}" for alert, number in sorted(total.items())) or "none"


def _span(numbers: Sequence[float | None], unit: str = " min") -> str:
    """The range of some numbers, rounded; None: it did not happen."""
    known = sorted(round(one) for one in numbers if one is not None)
    if not known:
        return "never"
    shown = f"{known[0]}" if known[0] == known[-1] else f"{known[0]} to {known[-1]}"
    missing = " or never" if len(known) < len(numbers) else ""
    return f"{shown}{unit}{missing}"
