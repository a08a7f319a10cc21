"""The command `explain`: why a VM may or may not be moved now, and the evidence for that."""

from collections.abc import Sequence
from datetime import datetime

from exporter.cli.layout import BAD, FAINT, GOOD, Cell, Screen, Sheet
from exporter.engine.evacuations.drain_outcomes import MOVED
from exporter.engine.facts.evidence import RequestedThrough
from exporter.engine.facts.model import EndReason, Trigger, WhySource
from exporter.engine.facts.policy import DEFAULT_POLICY, Reason
from exporter.server.api.evacuation_schemas import (
    EvacuationAnswer,
    MoveAnswer,
    ObstructionAnswer,
    PendingAnswer,
    WhyAnswer,
)
from exporter.server.api.schemas import (
    BlockedEvictionAnswer,
    CooldownAnswer,
    MigrationAnswer,
    PolicyAnswer,
    RuleAnswer,
    VmiAnswer,
)
from exporter.text import write_count, write_distance, write_past, write_release, write_span
from exporter.words.evacuations import BY_TAINT, DIVERGED, LEFT_OVER, describe_stuck_move
from exporter.words.verdicts import describe_block, describe_policy


def show_vmi(vmi: VmiAnswer, screen: Screen) -> str:
    """Why a VM may or may not be moved now, and the evidence for that."""
    sheet, evacuation = Sheet(screen), vmi.evacuation
    if evacuation is not None and evacuation.stuck:
        age = write_span(int(evacuation.age_seconds), units=2)
        attempts = evacuation.failed_attempts
        failed = f"; failed attempts: at least {attempts}" if attempts else ""
        sheet.say(
            f"{vmi.namespace}/{vmi.name}",
            (" is stuck", BAD),
            f": its evacuation from {evacuation.evacuation_node_name} was requested"
            f"{_by(evacuation)} {age} ago{failed}.",
        )
        _list_action(sheet, evacuation, vmi.as_of)
        sheet.say()
    _say_stuck_move(sheet, vmi)
    sheet.say(*_judge(vmi))
    sheet.warn(_doubts(vmi))
    if evacuation is None and vmi.obstruction is not None:
        _list_obstruction(sheet, vmi.obstruction, vmi)
    sheet.head("Rules, in the order in which they are checked")
    sheet.rows(
        [(rule.rule, _judge_rule(rule), f"{rule.why} ({rule.checkpoint})") for rule in vmi.rules]
    )
    sheet.head("Cooldown")
    sheet.rows(_cooldown(vmi))
    counted = sum(migration.in_window for migration in vmi.migrations)
    sheet.head(f"Known migrations: {len(vmi.migrations)}, {counted} of them counted")
    by = any(migration.requested_by for migration in vmi.migrations)
    head = ("ENDED", "FROM", "TO", "TOOK", "WHY", *(["BY"] if by else []), "OUTCOME", "COUNTED")
    sheet.rows([_migration(migration, vmi.as_of, by=by) for migration in vmi.migrations], head)
    for pending in vmi.pending_migrations:
        sheet.rows([("not ended", _attempt(pending, vmi.as_of))])
    if evacuation is not None:
        sheet.head(f"Evacuation from {evacuation.evacuation_node_name}")
        sheet.rows(_evacuation(evacuation, vmi.as_of))
        if not evacuation.stuck:
            _list_action(sheet, evacuation, vmi.as_of)
        _say_cancel(sheet, evacuation)
        others = [why for why in evacuation.why if why != evacuation.cause]
        if others:
            sheet.head("What else the cluster says about it, newest first")
            sheet.rows([_why(why, vmi.as_of) for why in others])
    _list_move(sheet, vmi)
    _list_eviction_request(sheet, vmi)
    if vmi.blocked_evictions:
        sheet.head("Requested evictions")
        sheet.rows([_held_eviction(eviction, vmi.as_of) for eviction in vmi.blocked_evictions])
    sheet.head("Based on")
    launcher, pod = "unknown", vmi.launcher
    if pod is not None:
        launcher = f"{pod.name}: {pod.phase}, {'ready' if pod.ready else 'not ready'}"
        launcher += ", eviction-in-progress" if pod.eviction_in_progress else ""
    policy = describe_policy(vmi.policy, write_span)
    contact = "none yet" if vmi.observed_at is None else write_past(vmi.observed_at, vmi.as_of)
    sheet.rows(
        [
            ("runs on", vmi.node or "no node yet"),
            *([("guest", "paused")] if vmi.paused else []),
            *_list_utility_volumes(vmi),
            ("launcher pod", launcher),
            ("last contact", contact),
            ("not watched", ", ".join(vmi.blind_spots) or "nothing"),
            ("policy", f"{vmi.policy.override or DEFAULT_POLICY}: {policy}"),
        ]
    )
    return sheet.text()


def _list_utility_volumes(vmi: VmiAnswer) -> list[tuple[str, str]]:
    names = ", ".join(vmi.utility_volumes)
    return [("utility volumes", f"{names}: KubeVirt does not migrate the VM")] if names else []


def _waits_for_itself(vmi: VmiAnswer) -> bool:
    """Whether a drain would move the VM a little later, without anybody's help."""
    return vmi.drain in MOVED and vmi.obstruction is not None and vmi.obstruction.next_step is None


def _say_stuck_move(sheet: Sheet, vmi: VmiAnswer) -> None:
    if vmi.move is not None and vmi.move.stuck:
        sheet.say(
            f"{vmi.namespace}/{vmi.name}",
            (" is stuck", BAD),
            f": {describe_stuck_move(vmi.move.trigger, vmi.move.failed_attempts)}.",
        )
        _list_action(sheet, vmi.move, vmi.as_of)
        sheet.say()


def _say_cancel(sheet: Sheet, evacuation: EvacuationAnswer) -> None:
    """Add what cancels the evacuation, unless it is the next step's command."""
    if evacuation.cancel is not None:
        sheet.rows([("to cancel it", evacuation.cancel.needs)])
        if evacuation.cancel.command != evacuation.command:
            sheet.command(evacuation.cancel.command)


def _list_eviction_request(sheet: Sheet, vmi: VmiAnswer) -> None:
    """Add who asks by EvictionRequests, since when, and what the active responder says."""
    request = vmi.eviction_request
    if request is None:
        return
    since = "" if request.since is None else f", since {write_past(request.since, vmi.as_of)}"
    asked = ", ".join(f"{requester.name} ({requester.intent})" for requester in request.requesters)
    rows = [("asked by", f"{asked or 'nobody any more'}{since}")]
    if request.responder:
        rows.append(("responder", f"{request.responder}, {request.state}"))
    if request.state == "Active":
        if request.message:
            rows.append(("it says", request.message))
        if request.expected_completion_time is not None:
            end = write_distance(request.expected_completion_time, vmi.as_of)
            rows.append(("expected end", end))
    sheet.head("EvictionRequests for its pod")
    sheet.rows(rows)


def _list_move(sheet: Sheet, vmi: VmiAnswer) -> None:
    if vmi.move is None:
        return
    sheet.head("Move without an evacuation")
    sheet.rows(_move(vmi.move, vmi.as_of))
    if not vmi.move.stuck:
        _list_action(sheet, vmi.move, vmi.as_of)
    sheet.rows([_why(why, vmi.as_of) for why in vmi.move.why if why != vmi.move.cause])


def _move(move: MoveAnswer, as_of: datetime) -> list[list[Cell]]:
    since = "unknown" if move.since is None else write_past(move.since, as_of)
    return [
        ["state", (f"{move.state}{': stuck' if move.stuck else ''}", BAD if move.stuck else "")],
        ["began", f"{since}, trigger {move.trigger}"],
        ["failed attempts", _count_failed(move)],
    ]


def _count_failed(action: EvacuationAnswer | MoveAnswer) -> str:
    """The failed attempts; failures of other migrations, such as volume updates, do not count."""
    if action.failed_attempts:
        return f"at least {action.failed_attempts}"
    if any(why.source is WhySource.FAILED_ATTEMPT for why in action.why):
        return "none; other migrations of the VM have failed"
    return "none known"


def _list_action(sheet: Sheet, action: EvacuationAnswer | MoveAnswer, as_of: datetime) -> None:
    """Add the cause, the next step, the runbook, and the first command."""
    rows: list[list[Cell]] = []
    if action.cause is not None:
        source, when, text = _why(action.cause, as_of)
        rows.append(["cause", f"{source}, {when}: {text}"])
    rows += [["next step", action.next_step], ["runbook", action.runbook]]
    sheet.rows(rows)
    sheet.command(action.command)


def _list_obstruction(sheet: Sheet, obstruction: ObstructionAnswer, vmi: VmiAnswer) -> None:
    """Add what a drain would do, why, and what to do, unless a stuck move has said so already."""
    if vmi.move is not None and vmi.move.stuck and vmi.move.next_step == obstruction.next_step:
        return
    is_held = any(v.reason for v in (vmi.verdicts.filter, vmi.verdicts.pre_eviction))
    is_said = not is_held and not _waits_for_itself(vmi)
    rows: list[list[Cell]] = [] if is_said else [["in a drain", f"it {obstruction.reason}"]]
    if obstruction.cause is not None:
        source, when, text = _why(obstruction.cause, vmi.as_of)
        rows.append(["cause", f"{source}, {when}: {text}"])
    if obstruction.next_step is not None:
        rows += [["next step", obstruction.next_step], ["runbook", obstruction.runbook or ""]]
    sheet.rows(rows)
    if obstruction.command is not None:
        sheet.command(obstruction.command)


def write_reason(why: WhyAnswer) -> str:
    """The reason in one word, and its message."""
    return ": ".join(part for part in (why.reason, why.message) if part)


def _judge(vmi: VmiAnswer) -> list[Cell]:
    """Whether the VM may be moved now."""
    name = f"{vmi.namespace}/{vmi.name}"
    for verdict in (vmi.verdicts.filter, vmi.verdicts.pre_eviction):
        if verdict.reason is not None:
            until = None
            if verdict.not_before is not None:
                until = write_release(verdict.not_before, vmi.as_of)
            why = describe_block(verdict.reason, until)
            return [name, (" may not be moved now", BAD), f": {why}."]
    if vmi.phase in ("Succeeded", "Failed"):
        return [name, f" has ended ({vmi.phase}): there is nothing to move."]
    if vmi.evacuation is not None:
        node = vmi.evacuation.evacuation_node_name
        return [name, f" is already being evacuated from {node}, and no rule blocks it."]
    if vmi.obstruction is not None and not _waits_for_itself(vmi):
        return [
            name,
            (" is blocked by no rule", GOOD),
            f", but in a drain it {vmi.obstruction.reason}.",
        ]
    why = "it has no known migration to cool down from"
    if vmi.cooldown is not None:
        why = f"its last cooldown ended {write_distance(vmi.cooldown.not_before, vmi.as_of)}"
    return [name, (" may be moved now", GOOD), f": no rule blocks it, and {why}."]


def _doubts(vmi: VmiAnswer) -> list[str]:
    """The reasons why the answer is uncertain."""
    doubts = []
    if vmi.stale:
        since = f" since {write_past(vmi.observed_at, vmi.as_of)}" if vmi.observed_at else ""
        doubts.append(f"no contact with the API server{since}: this may be out of date.")
    if vmi.unreadable_since is not None:
        since = write_past(vmi.unreadable_since, vmi.as_of)
        doubts.append(f"its VMI, VMIM or pod has been unreadable since {since}: see the log.")
    for resource, why in vmi.blind_spots.items():
        doubts.append(f"{resource} cannot be watched: {why}.")
    return doubts


def _judge_rule(rule: RuleAnswer) -> Cell:
    if rule.blocks:
        return ("blocks it", BAD)
    if not rule.enabled:
        return ("is off", FAINT)
    return ("is silent", BAD) if rule.silenced else ("allows it", GOOD)


def _cooldown(vmi: VmiAnswer) -> list[list[Cell]]:
    cooldown, as_of = vmi.cooldown, vmi.as_of
    if cooldown is None:
        return [[rule.why] for rule in vmi.rules if rule.rule == Reason.COOLDOWN]
    over = cooldown.not_before <= as_of
    took = write_span(cooldown.duration_seconds)
    return [
        ["arithmetic", write_arithmetic(cooldown, vmi.policy)],
        ["counted", count_migrations([vmim for vmim in vmi.migrations if vmim.in_window])],
        ["last migration", f"ended {write_past(cooldown.ended_at, as_of)}, took {took}"],
        ["over since" if over else "until", write_release(cooldown.not_before, as_of)],
    ]


def count_migrations(counted: Sequence[MigrationAnswer]) -> str:
    """The migrations that count, oldest first, in words: 6 migrations, 5 of them failed attempts of
    one evacuation. The failures in a row of evacuations from one node are of one evacuation.
    """
    failed = [migration for migration in counted if migration.outcome == "failed"]
    attempts = evacuations = 0
    leaves = ""
    for migration in counted:
        if migration.outcome == "failed" and migration.trigger is Trigger.EVACUATION:
            node = migration.source_node or "?"
            attempts, evacuations = attempts + 1, evacuations + (node != leaves)
            leaves = node
        elif migration.outcome != "failed":
            leaves = ""
    parts = [write_count(len(counted), "migration")]
    if attempts:
        whose = "one evacuation" if evacuations == 1 else f"{evacuations} evacuations"
        kind = "a failed attempt" if attempts == 1 else "failed attempts"
        parts.append(f"{attempts} of them {kind} of {whose}")
    if others := len(failed) - attempts:
        parts.append(f"{others} of them failed otherwise")
    return ", ".join(parts)


def write_arithmetic(cooldown: CooldownAnswer, policy: PolicyAnswer) -> str:
    """The cooldown as a formula: max(15m, 3m12s) x 2^(2-1) = 30m, cap 6h.

    The policy says only what the cooldown does not show: a floor or a cap that had no effect.
    """
    is_slow = cooldown.base_seconds == cooldown.duration_seconds
    floor = policy.migration_cooldown if is_slow else cooldown.base_seconds
    took = write_span(cooldown.duration_seconds)
    base = f"max({write_span(floor)}, {took})" if floor else f"{took} (no floor)"
    count = cooldown.migrations_in_window
    doubled = f" x 2^({count}-1)" if count else ""
    formula = f"{base}{doubled} = {write_span(cooldown.backed_off_seconds)}"
    if cooldown.effective_seconds < cooldown.backed_off_seconds:
        return f"{formula}, capped at {write_span(cooldown.effective_seconds)}"
    cap = policy.max_migration_cooldown
    return f"{formula}, cap {write_span(cap)}" if cap else f"{formula}, no cap"


def _migration(vmim: MigrationAnswer, as_of: datetime, *, by: bool) -> list[Cell]:
    """The row of a migration; `by`: with the user who requested it."""
    took = "?"
    if vmim.start is not None and vmim.end is not None:
        took = write_span(max(0.0, (vmim.end - vmim.start).total_seconds()))
    elif vmim.start is not None:
        took = f"began {write_past(vmim.start, as_of)}"
    style = {"failed": BAD, "succeeded": GOOD}.get(vmim.outcome, "")
    counted = "yes" if vmim.in_window else "no" if vmim.handed_off else "no: never handed off"
    ended = "?" if vmim.end is None else write_past(vmim.end, as_of)
    failed = "" if vmim.reason in (None, EndReason.NONE) else f": {vmim.reason}"
    user = [vmim.requested_by.user if vmim.requested_by else "?"] if by else []
    where = [vmim.source_node or "?", vmim.target_node or "?"]
    outcome = (vmim.outcome + failed, style)
    return [ended, *where, took, vmim.trigger or "?", *user, outcome, counted]


def _attempt(vmim: PendingAnswer, as_of: datetime) -> str:
    made = "" if vmim.created_at is None else f", created {write_past(vmim.created_at, as_of)}"
    return f"{vmim.name}: {vmim.phase or 'no phase yet'}{made}"


def _evacuation(evacuation: EvacuationAnswer, as_of: datetime) -> list[list[Cell]]:
    stuck = f": stuck by {' and '.join(evacuation.stuck_by)}" if evacuation.stuck else ""
    when = write_past(evacuation.requested_at, as_of)
    rows: list[list[Cell]] = [
        ["state", (f"{evacuation.state}{stuck}", BAD if evacuation.stuck else "")],
        ["requested", f"{when}{_by(evacuation)}, source {evacuation.source}"],
        ["failed attempts", _count_failed(evacuation)],
    ]
    if evacuation.requested_through is RequestedThrough.TAINT:
        rows.append(["requested through", BY_TAINT])
    if evacuation.attempt is not None:
        rows.append(["current attempt", _attempt(evacuation.attempt, as_of)])
    if evacuation.mode is not None:
        rows.append(["copies memory in", f"mode {evacuation.mode}"])
    if (backoff := evacuation.backoff) is not None:
        next_try = write_distance(backoff.next_try_at, as_of)
        rows.append(["KubeVirt waits", f"{write_span(backoff.seconds)}, next try {next_try}"])
    if evacuation.leftover:
        rows.append(["left over", LEFT_OVER])
    if evacuation.diverged:
        rows.append(["diverged", DIVERGED])
    return rows


def _by(evacuation: EvacuationAnswer) -> str:
    """The user who requested an evacuation, if that user is known."""
    return "" if evacuation.requested_by is None else f" by {evacuation.requested_by.user}"


def _why(why: WhyAnswer, as_of: datetime) -> tuple[str, str, str]:
    when = "now" if why.at is None else write_past(why.at, as_of)
    return why.source, when, write_reason(why)


def _held_eviction(eviction: BlockedEvictionAnswer, as_of: datetime) -> list[Cell]:
    outcome: Cell = (eviction.outcome, BAD if eviction.denied else "")
    times = "once" if eviction.times == 1 else f"{eviction.times} times, last"
    when = write_past(eviction.at, as_of)
    return [f"by {eviction.user}", f"{times} {when}", outcome, str(eviction.reason)]
