"""The command `status`: whether the exporter works, what is stuck, and which VMs are blocked."""

from collections.abc import Sequence
from datetime import datetime
from itertools import groupby

from exporter.cli.explain import write_reason
from exporter.cli.layout import BAD, FAINT, GOOD, Cell, Screen, Sheet
from exporter.engine.evacuations.drain_outcomes import GRAVEST
from exporter.server.api.evacuation_schemas import (
    EvacuationAnswer,
    EvacuationsAnswer,
    StuckMove,
)
from exporter.server.api.schemas import (
    BlockedAnswer,
    BlockedVmi,
    HistoryStatus,
    PreventedAnswer,
    ResourceAnswer,
    ResponderStatus,
    StatusAnswer,
)
from exporter.text import write_count, write_distance, write_past, write_release, write_span
from exporter.words.health import HealthLevel, describe_health
from exporter.words.verdicts import REASONS


def show_status(
    status: StatusAnswer,
    evacuations: EvacuationsAnswer | None,
    blocked: BlockedAnswer | None,
    screen: Screen,
) -> str:
    """Whether the exporter works, what is stuck, and which VMs are blocked until when.

    `evacuations` and `blocked` are None if the exporter is not ready.
    """
    sheet = Sheet(screen)
    sheet.say(*_judge(status))
    sheet.warn(_warnings(status))
    sheet.head("Based on")
    sheet.rows(
        [
            ("version", status.version),
            ("history", _history(status.history, status.as_of)),
            *_list_responder(status.responder),
            *(_resource(watch, status.as_of) for watch in status.resources),
        ]
    )
    if status.vmis is not None:
        sheet.head(f"VMs: {status.vmis.known}")
        by_reason = [
            (f"blocked: {reason}", str(n)) for reason, n in status.vmis.blocked.items() if n
        ]
        sheet.rows([("no rule blocks", str(status.vmis.allowed)), *by_reason])
        counts = [(outcome, status.vmis.drain.get(outcome, 0)) for outcome in GRAVEST]
        drained = ", ".join(f"{outcome} {count}" for outcome, count in counts if count)
        if drained:
            sheet.rows([("if their nodes were drained", drained)])
        sheet.rows([("moves prevented by cooldowns", _prevented(status.prevented, status.as_of))])
    if evacuations is not None:
        stuck = [evacuation for evacuation in evacuations.evacuations if evacuation.stuck]
        others = [evacuation for evacuation in evacuations.evacuations if not evacuation.stuck]
        _list_evacuations(sheet, f"Stuck evacuations: {len(stuck)}", stuck)
        if evacuations.stuck_moves:
            _list_moves(sheet, evacuations.stuck_moves, evacuations.as_of)
        _list_evacuations(sheet, f"Other evacuations: {len(others)}", others)
    if blocked is not None:
        rows = _held_vms(blocked)
        sheet.head(f"Blocked VMs: {len(rows)}")
        sheet.table(("VM", "ON", "BECAUSE", "UNTIL"), rows)
    return sheet.text()


def _judge(status: StatusAnswer) -> list[Cell]:
    """The first sentence: whether the exporter works."""
    contact = "not yet"
    if status.observed_at is not None:
        contact = write_distance(status.observed_at, status.as_of)
    level, head, why = describe_health(
        status.staleness,
        contact,
        ready=status.ready,
        waiting_for=status.waiting_for,
        rejected=dict.fromkeys(watch.resource for watch in status.resources if watch.rejected),
    )
    return [(f"{head}: ", GOOD if level is HealthLevel.FULL else BAD), why]


def _warnings(status: StatusAnswer) -> list[str]:
    warnings = [f"{place} cannot be watched: {why}." for place, why in status.blind_spots.items()]
    for watch in status.resources:
        if watch.trouble is not None and watch.rejected is None:
            warnings.append(f"{watch.resource}: {watch.trouble}.")
        if watch.invalid_objects:
            objects = write_count(watch.invalid_objects, "object")
            warnings.append(f"{watch.resource}: {objects} could not be read.")
    if status.history is not None and status.history.trouble is not None:
        warnings.append(f"the history file is not written: {status.history.trouble}.")
    if status.responder is not None and status.responder.trouble is not None:
        warnings.append(f"EvictionRequests are not answered: {status.responder.trouble}.")
    return warnings


def _resource(watch: ResourceAnswer, as_of: datetime) -> list[Cell]:
    scope = "" if watch.namespace is None else f" in {watch.namespace}"
    place = f"{watch.resource}{scope}"
    if watch.rejected is not None:
        return [place, ("cannot be watched", BAD)]
    if not watch.synced:
        return [place, ("not listed yet", BAD)]
    if watch.contact_at is None:
        return [place, "synced"]
    return [place, f"synced, last contact {write_distance(watch.contact_at, as_of)}"]


def _list_responder(responder: ResponderStatus | None) -> list[tuple[str, str]]:
    if responder is None:
        return []
    turns = "another replica" if responder.turns is None else f"this replica, {responder.turns} now"
    return [("answers EvictionRequests", turns)]


def _history(history: HistoryStatus | None, as_of: datetime) -> str:
    if history is None:
        return "none: after a restart, only migrations that are still in the cluster are known"
    if history.written_at is None:
        return "a file, not written since the start"
    written = write_distance(history.written_at, as_of)
    return f"a file with {write_count(history.vmis, 'VM')}, written {written}"


def _prevented(prevented: PreventedAnswer, as_of: datetime) -> str:
    """How many moves were prevented since the exporter started, and how long they had taken."""
    moves = f"{prevented.moves:,} since the start {write_distance(prevented.since, as_of)}"
    took = write_span(round(prevented.migration_seconds), units=2)
    return f"{moves}, about {took} of migration" if prevented.moves else moves


def _list_evacuations(sheet: Sheet, head: str, evacuations: Sequence[EvacuationAnswer]) -> None:
    """List evacuations, and below them each action with its cause and its VMs.

    The action of the most VMs comes first. The shown command is for the first of these VMs.
    """
    sheet.head(head)
    rows = [
        (
            f"{evacuation.namespace}/{evacuation.name}",
            evacuation.evacuation_node_name,
            write_span(int(evacuation.age_seconds), units=2),
            (str(evacuation.state), BAD if evacuation.stuck else ""),
            str(evacuation.failed_attempts),
        )
        for evacuation in evacuations
    ]
    sheet.table(("VM", "FROM", "AGE", "STATE", "FAILED"), rows)
    alike = dict[tuple[str, str], list[EvacuationAnswer]]()
    for evacuation in evacuations:
        cause = "" if evacuation.cause is None else write_reason(evacuation.cause)
        alike.setdefault((evacuation.next_step, cause), []).append(evacuation)
    groups = sorted(alike.items(), key=lambda group: -len(group[1]))
    for (step, cause), group in groups[: sheet.screen.rows]:
        first = group[0]
        more = "" if len(group) == 1 else f" and {len(group) - 1} more"
        sheet.rows([((f"{first.namespace}/{first.name}{more}:", FAINT), step)])
        if first.stuck:
            sheet.rows([(f"cause: {cause}",)] if cause else [])
            sheet.rows([(f"runbook: {first.runbook}",)])
            sheet.command(first.command)


def _list_moves(sheet: Sheet, moves: Sequence[StuckMove], as_of: datetime) -> None:
    """List the stuck moves of VMs that are not being evacuated, each with its next step."""
    sheet.head(f"Stuck moves without an evacuation: {len(moves)}")
    rows = [
        (
            f"{move.namespace}/{move.name}",
            move.node,
            "?" if move.since is None else write_past(move.since, as_of),
            (f"{move.state} ({move.trigger})", BAD),
            str(move.failed_attempts),
        )
        for move in moves
    ]
    sheet.table(("VM", "ON", "SINCE", "STATE", "FAILED"), rows)
    for move in moves[: sheet.screen.rows]:
        sheet.rows([((f"{move.namespace}/{move.name}:", FAINT), move.next_step)])
        sheet.rows([(f"cause: {write_reason(move.cause)}",)] if move.cause is not None else [])
        sheet.command(move.command)


def _held_vms(blocked: BlockedAnswer) -> list[list[Cell]]:
    """One row per VM: first those with a release time, earliest first, then the others."""
    rows: list[tuple[datetime | None, list[Cell]]] = []
    for (namespace, name), group in groupby(blocked.blocked, lambda vmi: (vmi.namespace, vmi.name)):
        entries: list[BlockedVmi] = list(group)
        because = ", ".join(dict.fromkeys(entry.reason for entry in entries))
        release, until = None, REASONS[entries[0].reason].until
        if len(entries) == 1 and entries[0].not_before is not None:
            release = entries[0].not_before
            until = write_release(release, blocked.as_of)
        rows.append((release, [f"{namespace}/{name}", entries[0].node, because, until]))
    rows.sort(key=lambda row: (row[0] is None, row[0] or blocked.as_of))
    return [row for _, row in rows]
