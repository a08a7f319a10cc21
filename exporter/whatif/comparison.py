"""Shows what policies would have done, side by side: as a table or as JSON."""

from collections.abc import Iterator, Sequence
from io import StringIO
from typing import Any

from msgspec import to_builtins
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from exporter.engine.facts.model import EndReason, Instant, Seconds
from exporter.engine.facts.policy import COOLDOWN_DURATIONS, COOLDOWN_VALUES, Policy, Reason
from exporter.engine.verdicts.rules import list_reasons
from exporter.settings.policy import write_policy
from exporter.text import escape, format_duration, split_span, write_count, write_instant
from exporter.whatif.account import (
    Account,
    Comparison,
    Distribution,
    MigrationCounts,
    StuckEvacuation,
    TimeSeries,
)
from exporter.words.verdicts import REASONS


STUCK_SHOWN = 10
"""How many stuck evacuations the table lists; the JSON has more."""
VMS_SHOWN = 5
"""How many VMs of an exception the table names; the JSON has more."""
PLAIN_WIDTH = 200
"""The width if there is no terminal, in characters: enough for every line."""
UNLIMITED = 1_000


def show(comparison: Comparison, *, width: int | None, colored: bool) -> str:
    """The tables as text; `width` is None if there is no terminal."""
    text = StringIO()
    console = Console(
        file=text,
        width=width or PLAIN_WIDTH,
        force_terminal=colored,
        no_color=not colored,
        highlight=False,
        markup=False,
        emoji=False,
    )
    console.print(
        f"{write_instant(comparison.began)} to {write_instant(comparison.ended)}"
        f" ({_span(comparison.ended - comparison.began)}),"
        f" {write_count(comparison.events, 'event')}, {write_count(comparison.vms, 'VM')}"
    )
    console.print()
    names = [account.contender.name for account in comparison.accounts]
    table = _make_table("", *names, right=names)
    for name, cells in _rows(comparison):
        table.add_row(Text(name, style="" if name.startswith(" ") else "bold"), *map(Text, cells))
    console.print(table)
    console.print()
    console.print("Each column is the recording without the evictions that the policy blocks.")
    if any(account.touched for account in comparison.accounts):
        console.print()
        console.print("Exceptions from the policy, and the VMs to which each applied")
        console.print(_draw_touched(comparison))
    table = _draw_stuck(comparison)
    if table.rows:
        console.print()
        console.print("Stuck evacuations, the longest first")
        # Names and instants are never cut: on a narrow terminal the lines wrap.
        unlimited = console.options.update(width=UNLIMITED)
        console.width = max(console.width, Measurement.get(console, unlimited, table).maximum)
        console.print(table)
    return "".join(f"{line.rstrip()}\n" for line in text.getvalue().splitlines())


def to_json(comparison: Comparison, remarks: Sequence[str] = ()) -> dict[str, Any]:
    """Everything as JSON: instants as RFC 3339, durations in seconds."""
    return {
        "began": write_instant(comparison.began),
        "ended": write_instant(comparison.ended),
        "events": comparison.events,
        "vms": comparison.vms,
        "vmSeconds": round(comparison.vm_seconds, 3),
        "remarks": list(remarks),
        "policies": [_account_json(account, comparison) for account in comparison.accounts],
    }


def share_of(part: float, whole: float) -> float:
    """`part` as a share of `whole`, or 0 if `whole` is 0."""
    return part / whole if whole else 0.0


def _make_table(*columns: str, right: Sequence[str] = ()) -> Table:
    """An empty table; the columns in `right` are aligned to the right."""
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for name in columns:
        table.add_column(name, justify="right" if name in right else "left")
    return table


def _rows(comparison: Comparison) -> Iterator[tuple[str, list[str]]]:
    accounts = comparison.accounts
    policies = [account.contender.policy for account in accounts]

    def each(cell: Any) -> list[str]:
        return [cell(account) for account in accounts]

    yield from _policy_rows(policies)
    yield "", each(lambda _: "")
    yield "Evictions requested", each(lambda a: f"{a.asked:,}")
    yield "  allowed", each(lambda a: _part(a.allowed, a.asked))
    yield "  blocked", each(lambda a: _part(a.blocked.total(), a.asked))
    possible = {reason for policy in policies for reason in list_reasons(policy)}
    for reason, words in REASONS.items():
        if reason in possible:
            yield f"    {words.name}", each(lambda a, r=reason: f"{a.blocked[r]:,}")
    yield "Evictions of drains, not judged", each(lambda a: f"{a.others:,}")
    yield "Migrations that happened", each(lambda a: f"{a.migrations.ended:,}")
    yield "  of them failed", each(lambda a: f"{a.migrations.failed:,}")
    failed = {reason for account in accounts for reason in account.migrations.reasons}
    if failed:
        yield "Attempts that failed", each(lambda a: f"{a.migrations.reasons.total():,}")
    for cause in EndReason:
        if cause in failed:
            yield f"  {cause}", each(lambda a, c=cause: f"{a.migrations.reasons[c]:,}")
    yield from _migrations_per_vm([account.migrations for account in accounts])
    yield "Time under cooldown", each(lambda a: _span(a.cooldown_seconds))
    whole = comparison.vm_seconds
    yield "  of all VMs' time", each(lambda a: f"{share_of(a.cooldown_seconds, whole):.2%}")
    yield "VMs that reached the cap", each(lambda a: f"{a.vms_at_cap:,}")
    yield "Stuck evacuations found", each(lambda a: f"{a.stuck.count:,}")
    yield "  of them alerted", each(lambda a: f"{a.stuck.alerted:,}")
    for name, pick in (
        ("request to alert", lambda a: a.stuck.minutes_to_alert),
        ("alert to end", lambda a: a.stuck.minutes_alerting),
    ):
        yield f"  {name}: half within", each(lambda a, p=pick: _minutes(p(a), 0.5))
        yield f"  {name}: longest", each(lambda a, p=pick: _minutes(p(a), 1.0))


def _policy_rows(policies: list[Policy]) -> Iterator[tuple[str, list[str]]]:
    """The values of the policies: all durations in one row."""
    durations = [COOLDOWN_VALUES[field].label for field in COOLDOWN_DURATIONS]
    yield ", ".join(durations).capitalize(), [_write_durations(policy) for policy in policies]
    for field, words in COOLDOWN_VALUES.items():
        if field not in COOLDOWN_DURATIONS:
            yield words.label.capitalize(), ["yes" if getattr(p, field) else "no" for p in policies]
    guards = [write_policy(policy)["guards"] for policy in policies]
    for key in guards[0]:
        yield f"Guard {key}", ["on" if guard[key] else "off" for guard in guards]


def _migrations_per_vm(counts: list[MigrationCounts]) -> Iterator[tuple[str, list[str]]]:
    """How often VMs migrated, and apart from them the VMs whose migrations all failed."""
    moved, failing = [count.per_vm for count in counts], [count.per_failing_vm for count in counts]
    yield "VMs that migrated", [f"{per_vm.total():,}" for per_vm in moved]
    yield "  per VM: mean", [f"{per_vm.mean:.1f}" for per_vm in moved]
    for name, share in (("half have at most", 0.5), ("99 % have at most", 0.99)):
        yield f"  per VM: {name}", [f"{per_vm.quantile(share):,}" for per_vm in moved]
    yield "  per VM: most", [f"{max(per_vm, default=0):,}" for per_vm in moved]
    if any(failing):
        yield "VMs whose migrations all failed", [f"{per_vm.total():,}" for per_vm in failing]
        sums = [sum(number * vms for number, vms in per_vm.items()) for per_vm in failing]
        yield "  their migrations", [f"{count:,}" for count in sums]


def _draw_stuck(comparison: Comparison) -> Table:
    """Each stuck evacuation once, with the policies under which it was stuck; longest first."""
    table = _make_table("VM", "from", "requested", "alert after", "lasted", "at the alert", "in")
    stays: dict[tuple[str, str, Instant], tuple[StuckEvacuation, list[str]]] = {}
    for account in comparison.accounts:
        for stuck in account.stuck.longest:
            key = (stuck.namespace, stuck.name, stuck.stuck_at)
            stays.setdefault(key, (stuck, []))[1].append(account.contender.name)

    def lasted(entry: tuple[StuckEvacuation, list[str]]) -> Seconds:
        stuck = entry[0]
        return (comparison.ended if stuck.ended_at is None else stuck.ended_at) - stuck.requested_at

    for stuck, names in sorted(stays.values(), key=lasted, reverse=True)[:STUCK_SHOWN]:
        after = None if stuck.alerted_at is None else stuck.alerted_at - stuck.requested_at
        table.add_row(
            Text(escape(f"{stuck.namespace}/{stuck.name}")),
            Text(escape(stuck.evacuation_node_name)),
            write_instant(stuck.requested_at),
            "none" if after is None else _span(after),
            "not over" if stuck.ended_at is None else _span(stuck.ended_at - stuck.requested_at),
            f"{stuck.state}, {stuck.source}",
            Text("all" if len(names) == len(comparison.accounts) else ", ".join(names)),
        )
    return table


def _draw_touched(comparison: Comparison) -> Table:
    counts = ("VMs", "evictions allowed", "blocked")
    table = _make_table("policy", "exception", *counts, "first VMs", right=counts)
    for account in comparison.accounts:
        for touched in account.touched.values():
            first = ", ".join(touched.first_vms[:VMS_SHOWN])
            table.add_row(
                Text(escape(account.contender.name)),
                Text(escape(touched.name)),
                *(f"{count:,}" for count in (touched.vms, touched.allowed, touched.blocked)),
                Text(escape(first + (", …" if touched.vms > VMS_SHOWN else ""))),
            )
    return table


def _account_json(account: Account, comparison: Comparison) -> dict[str, Any]:
    stuck_counts, migrations = account.stuck, account.migrations
    policy, stuck = account.contender.policy, account.contender.stuck
    return {
        "name": account.contender.name,
        "policy": write_policy(policy),
        "overrides": to_builtins(list(account.touched.values())),
        "stuckPolicy": {
            "after": stuck.after,
            "failedAttempts": stuck.failed_attempts,
            "migrationTimeout": stuck.migration_timeout,
            "external": stuck.external,
        },
        "evictions": {
            "asked": account.asked,
            "allowed": account.allowed,
            "blocked": {reason: account.blocked[reason] for reason in Reason},
            "notAsked": account.others,
        },
        "migrations": {
            "ended": migrations.ended,
            "failed": migrations.failed,
            "failedAttempts": dict(sorted(migrations.reasons.items())),
            "perVm": _distribution_json(migrations.per_vm),
            "perFailingVm": _distribution_json(migrations.per_failing_vm),
        },
        "cooldown": {
            "seconds": round(account.cooldown_seconds, 3),
            "share": round(share_of(account.cooldown_seconds, comparison.vm_seconds), 6),
            "vmsAtCap": account.vms_at_cap,
        },
        "stuck": {
            "found": stuck_counts.count,
            "alerted": stuck_counts.alerted,
            "openAtEnd": stuck_counts.open_at_end,
            "byState": dict(sorted(stuck_counts.by_state.items())),
            "minutesToAlert": _distribution_json(stuck_counts.minutes_to_alert),
            "minutesAlerting": _distribution_json(stuck_counts.minutes_alerting),
            # All numbers of a stuck evacuation are instants.
            "longest": [
                {
                    key: write_instant(value) if isinstance(value, float) else value
                    for key, value in to_builtins(evacuation).items()
                }
                for evacuation in stuck_counts.longest
            ],
        },
        "overTime": {
            "allowed": _series_json(account.allowed_over_time),
            "blocked": _series_json(account.blocked_over_time),
            "cooldownSeconds": _series_json(account.cooling_over_time),
        },
    }


def _distribution_json(observed: Distribution) -> dict[str, Any]:
    return {
        "count": observed.total(),
        "mean": round(observed.mean, 3),
        "p50": observed.quantile(0.5),
        "p99": observed.quantile(0.99),
        "max": max(observed, default=0),
        "counts": {str(value): times for value, times in sorted(observed.items())},
    }


def _series_json(series: TimeSeries) -> dict[str, Any]:
    return {"binSeconds": series.width, "bins": [round(amount, 3) for amount in series.bins]}


def _write_durations(policy: Policy) -> str:
    if policy.max_migration_cooldown and policy.max_migration_cooldown < 1:
        return "none"
    return " ".join(format_duration(getattr(policy, field)) for field in COOLDOWN_DURATIONS)


def _part(part: int, whole: int) -> str:
    return f"{part:,} ({share_of(part, whole):.0%})"


def _minutes(observed: Distribution, share: float) -> str:
    return _span(observed.quantile(share) * 60.0) if observed else "-"


def _span(seconds: Seconds) -> str:
    """A duration in its two largest units."""
    return " ".join(f"{count}{unit}" for count, unit in split_span(round(seconds), 2)) or "0s"
