"""The command `node`: what a drain of a node would do to the VMs on it."""

import json
from collections.abc import Awaitable, Callable
from datetime import datetime

from exporter.cli.client import Exporter, NoSuchNode, decode_answer
from exporter.cli.explain import write_reason
from exporter.cli.layout import BAD, GOOD, Cell, Screen, Sheet
from exporter.engine.evacuations.drain_outcomes import GRAVEST, KEPT, MOVED, DrainOutcome
from exporter.server.api.evacuation_schemas import (
    DrainAnswer,
    DrainProgressAnswer,
    NodeAnswer,
    NodeCandidate,
    NodesAnswer,
    OutlivedPodAnswer,
)
from exporter.text import write_count, write_past, write_span
from exporter.words.evacuations import OUTCOMES


NAMED = 3
"""How many VMs a sentence names."""
BAR = 20
"""The length of the progress bar, in characters."""
QUOTED = 100
"""The longest reason in a sentence, in characters; the table has the whole text."""

ROOM_UNKNOWN = "Whether the other nodes have room is not known here: only the scheduler knows."
_STALE = ("no contact with the API server: this may be out of date.",)


def show_nodes(answer: NodesAnswer, screen: Screen) -> str:
    """What a drain would do to the VMs of each node, in one row per node."""
    sheet = Sheet(screen)
    emptied = sum(node.can_be_emptied for node in answer.nodes)
    others = sum(node.can_be_emptied and node.depends_on_others for node in answer.nodes)
    depends = f", {others} of them only if others move or stop VMs" if others else ""
    nodes = write_count(len(answer.nodes), "node")
    sheet.say(f"{emptied:,} of {nodes} with VMs can be emptied{depends}.")
    sheet.warn(_STALE if answer.stale else ())
    head = ("NODE", "VMS", *(outcome.upper() for outcome in GRAVEST), "AT LEAST", "CAN BE EMPTIED")
    sheet.table(head, [_node_row(node) for node in answer.nodes])
    return sheet.text()


def show_drain(answer: DrainAnswer, screen: Screen) -> str:
    """Whether a node can be emptied, in what time, and what happens to each VM."""
    sheet = Sheet(screen)
    kept = _name([vm for vm in answer.candidates if vm.outcome in KEPT])
    pods = "; ".join(_name_pod(pod, answer.node) for pod in answer.outlived)
    kept = "; ".join(text for text in (kept, pods) if text)
    others = _name([vm for vm in answer.candidates if vm.outcome is DrainOutcome.EXTERNAL])
    if not answer.can_be_emptied:
        sheet.say(answer.node, (" cannot be emptied", BAD), f": {kept}.")
    elif not answer.depends_on_others:
        sheet.say(answer.node, (" can be emptied", GOOD), ".")
    if answer.depends_on_others:
        moves = f": another controller must move or stop {others}."
        sheet.say(answer.node, (" depends on others", BAD), moves)
    if stopped := [vm for vm in answer.candidates if vm.outcome is DrainOutcome.RESTARTS]:
        sheet.say(
            "A drain ", ("stops", BAD), f" {_name(stopped)}, which KubeVirt does not migrate."
        )
    sheet.warn(_STALE if answer.stale else ())
    if answer.schedulable is False:
        at = answer.cordoned_at
        cordoned = "is cordoned"
        if at is not None:
            cordoned = f"has been cordoned since {write_past(at, answer.as_of)}"
        also = f": {', '.join(answer.conditions)}" if answer.conditions else ""
        sheet.say(f"It {cordoned}{also}.")
    if answer.drain is not None:
        sheet.say(f"Drain: {write_progress(answer.drain, answer.as_of)}.")
    if answer.can_be_emptied:
        sheet.say(write_bound(answer))
        if any(vm.outcome in MOVED for vm in answer.candidates):
            sheet.say(ROOM_UNKNOWN)
    sheet.head(f"VMs: {answer.vmis}")
    counts = [(outcome, _count(answer, outcome)) for outcome in GRAVEST]
    sheet.rows(
        [
            (str(outcome), str(count), OUTCOMES[outcome].summary)
            for outcome, count in counts
            if count
        ]
    )
    sheet.head("A drain now")
    candidates = sorted(answer.candidates, key=lambda vm: GRAVEST.index(vm.outcome))
    rows = [
        (
            f"{vm.namespace}/{vm.name}",
            (str(vm.outcome), BAD if vm.outcome in KEPT else ""),
            "?" if vm.last_duration_seconds is None else write_span(vm.last_duration_seconds),
            str(vm.failed_attempts),
            write_why(vm),
        )
        for vm in candidates
    ]
    sheet.table(("VM", "OUTCOME", "LAST TOOK", "FAILED", "WHY"), rows)
    _list_steps(sheet, candidates, answer.outlived)
    return sheet.text()


def _list_steps(
    sheet: Sheet, candidates: list[NodeCandidate], outlived: list[OutlivedPodAnswer]
) -> None:
    """Add what to do about the first VMs and pods that keep the node from being emptied."""
    steps = [vm for vm in candidates if vm.outcome in KEPT and vm.next_step]
    pods_left = [(f"{pod.namespace}/{pod.pod}", pod.next_step) for pod in outlived]
    if steps or pods_left:
        sheet.head("Next steps")
        vms = [(f"{vm.namespace}/{vm.name}", str(vm.next_step)) for vm in steps[:NAMED]]
        sheet.rows([*vms, *pods_left[:NAMED]])
    commands = [*(vm.command for vm in steps), *(pod.command for pod in outlived)]
    for command in list(dict.fromkeys(commands))[:NAMED]:
        sheet.command(str(command))


def _name_pod(pod: OutlivedPodAnswer, node: str) -> str:
    where = f"which runs on {pod.node}"
    return (
        f"launcher pod {pod.pod} of {pod.namespace}/{pod.name}, {where}, is still active on {node}"
    )


async def follow_drain(
    exporter: Exporter,
    node: str,
    show: Callable[[str], None],
    *,
    pause: Callable[[], Awaitable[None]],
    as_json: bool = False,
) -> str:
    """Show the progress of a drain whenever it changes, and return how it ended.

    `pause` waits before the next request. `as_json`: show the API's answer as one line of JSON.
    Raises what `Exporter.read_node`, `show` and `pause` raise. After the first answer, NoSuchNode
    means that the drain has ended.
    """
    shown: DrainProgressAnswer | str | None = None
    while True:
        try:
            body = await exporter.read_node(node)
        except NoSuchNode:
            if shown is None:
                raise
            return "" if as_json else f"{node} has no VMs any more.\n"
        answer = decode_answer(body, DrainAnswer)
        line = json.dumps(decode_answer(body, dict)) if as_json else ""
        if answer.drain is None:
            what = "is not being drained" if shown is None else "is not being drained any more"
            end = line or f"{node} {what}; VMs on it: {answer.vmis}."
            return f"{end}\n"
        line = line or write_progress(answer.drain, answer.as_of)
        change = answer.drain if as_json else line
        if change != shown:
            show(line)
            shown = change
        await pause()


def write_progress(drain: DrainProgressAnswer, as_of: datetime) -> str:
    """The progress of a drain in one line, with a bar."""
    done = BAR * drain.left // max(1, drain.asked)
    external = write_count(drain.external, "VM")
    parts = [
        f"[{'#' * done}{'.' * (BAR - done)}] {_count_left(drain)}",
        *([f"{write_count(drain.failing, 'VM')} cannot leave"] if drain.failing else []),
        *([f"another controller must move {external}"] if drain.external else []),
    ]
    if drain.estimate_seconds is not None and drain.seconds_per_vmi is not None:
        left = write_span(round(drain.estimate_seconds), units=2)
        parts.append(f"one every {write_span(round(drain.seconds_per_vmi))}, about {left} to go")
    else:
        idle = (as_of - (drain.last_left_at or drain.since)).total_seconds()
        parts.append(f"no VM has left for {write_span(round(idle), units=2)}")
    return ", ".join(parts)


def _count_left(drain: DrainProgressAnswer) -> str:
    has = "has" if drain.asked == 1 else "have"
    return f"{drain.left:,} of {write_count(drain.asked, 'VM')} {has} left"


def write_bound(answer: DrainAnswer) -> str:
    """The lower bound and how it is computed from the last durations of the VMs that migrate.

    If KubeVirt's limits are reached, the answer does not say which VMs migrate and which wait. Then
    the computed number of parallel migrations may be a fraction; if so, the text leaves it out.
    """
    bound = answer.at_least_seconds
    moved = [vm for vm in answer.candidates if vm.outcome in MOVED]
    starting = [vm for vm in moved if vm.outcome is DrainOutcome.LEAVES] or moved
    known = [vm.last_duration_seconds for vm in starting if vm.last_duration_seconds is not None]
    if bound is None or not known:
        return "How long it takes is unknown: no VM that can migrate now has migrated before."
    text = f"It takes at least {write_span(bound)}: "
    if bound <= max(known):
        text += "the longest of the last migrations took that long"
    else:
        text += f"the last migrations took {write_span(sum(known))} in all"
        parallel = sum(known) / bound
        if abs(parallel - round(parallel)) < 0.01:
            text += f", and KubeVirt runs at most {round(parallel)} at once from a node"
    unknown = len(starting) - len(known)
    if unknown:
        text += f". This ignores VMs without a known migration: {unknown}"
    return f"{text}."


def _name(candidates: list[NodeCandidate]) -> str:
    """The names of the first VMs; for a VM that does not leave, also the outcome and reason."""
    names = []
    for vm in candidates[:NAMED]:
        name = f"{vm.namespace}/{vm.name}"
        if vm.outcome in KEPT:
            failed = f"failed attempts: {vm.failed_attempts}" if vm.failed_attempts else ""
            reasons = "; ".join(text for text in (failed, write_why(vm)) if text)
            short = reasons if len(reasons) <= QUOTED else reasons[: QUOTED - 1] + "…"
            name += f" {vm.outcome}" + (f" ({short})" if short else "")
        names.append(name)
    more = len(candidates) - NAMED
    return ", ".join(names) + (f" and {more} more" if more > 0 else "")


def write_why(vm: NodeCandidate) -> str:
    """Why a VM does not leave: the cause as in `explain`, or the state if nothing has failed."""
    if vm.cause is not None:
        return f"{vm.cause.source}: {write_reason(vm.cause)}"
    is_known = vm.state is not None and vm.outcome in KEPT and not vm.failed_attempts
    if is_known:
        return str(vm.state)
    return "" if vm.outcome is DrainOutcome.LEAVES else vm.reason


def _node_row(node: NodeAnswer) -> list[Cell]:
    unknown = "?" if node.can_be_emptied else "-"
    bound = unknown if node.at_least_seconds is None else write_span(node.at_least_seconds)
    counts = [str(_count(node, outcome)) for outcome in GRAVEST]
    emptied: Cell = ("yes", GOOD)
    if not node.can_be_emptied:
        emptied = ("no", BAD)
    elif node.depends_on_others:
        emptied = "if others act"
    return [node.node, str(node.vmis), *counts, bound, emptied]


def _count(answer: NodeAnswer, outcome: DrainOutcome) -> int:
    return int(getattr(answer, outcome))
