"""The command `replay`: opens the source, reads the policies, runs the replay, prints.

Only the answer goes to standard output, and equal input gives equal bytes there. Progress, bad
lines and the cost go to standard error.
"""

import argparse
import asyncio
import json
import os
import re
import resource
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from io import BufferedReader
from pathlib import Path
from typing import TextIO, cast

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from exporter.cli.commands import print_answer
from exporter.cli.layout import Screen, detect_terminal
from exporter.credentials import CannotAsk
from exporter.engine.facts.model import Instant, Seconds
from exporter.errors import Exit
from exporter.settings import load_settings
from exporter.settings.document import InvalidSettings
from exporter.text import write_count, write_instant
from exporter.whatif import comparison, recording
from exporter.whatif.account import BUILTIN, DEFAULT, Comparison, Contender
from exporter.whatif.recording import CannotReplay, Faults, Recorded
from exporter.whatif.replay import Replay


_NAME = re.compile(r"[\w.-]{1,40}")
PROGRESS_EVERY = 2_000
"""Events between two updates of the progress bar."""


@dataclass
class Input:
    """Events to replay, and the faults that are found while they are read.

    For the progress bar, `whole` is the size of the source, and `done` returns how much has been
    replayed at an instant of the virtual clock. Both are in bytes, or both in seconds. `remarks`
    say what the source lacks.
    """

    events: Iterable[Recorded]
    faults: Faults = field(default_factory=Faults)
    whole: float | None = None
    done: Callable[[Instant], float] = lambda _now: 0.0
    remarks: Sequence[str] = ()


def replay(
    arguments: argparse.Namespace,
    *,
    timer: Callable[[], Seconds],
    simulate: Callable[[], tuple[Iterable[bytes], Instant, Seconds]],
) -> Exit:
    """`replay`: print what these policies would have done.

    Raises `InvalidSettings` or `CannotReplay`.

    `simulate` returns the scenario's lines, its beginning and its length.
    """
    began = timer()
    contenders = choose_contenders(arguments.policy)
    with _open_source(arguments, simulate) as source:
        result = play(source, contenders, sys.stderr)
        screen = Screen() if arguments.json else detect_terminal(sys.stdout, os.environ)
        text = show_comparison(result, source, as_json=arguments.json, screen=screen)
        print_faults(source.faults, sys.stderr)
    code = print_answer(text, Exit.CANNOT_REPLAY)
    if code is Exit.OK:
        print_cost(result, timer() - began, sys.stderr)
    return code


def choose_contenders(names: Sequence[str]) -> list[Contender]:
    """The policies to compare: built-in names or NAME=FILE; by default those of `DEFAULT`.

    Raises `InvalidSettings` with every fault.
    """
    faults: list[str] = []
    chosen: dict[str, Contender] = {}
    for text in names or DEFAULT:
        name, equals, file = text.partition("=")
        if name in chosen:
            faults.append(f"--policy {text}: the name {name} is used twice")
        elif not equals and name in BUILTIN:
            chosen[name] = BUILTIN[name]
        elif not _NAME.fullmatch(name) or not file:
            known = ", ".join(BUILTIN)
            faults.append(f"--policy {text}: expected NAME=FILE, or one of {known}")
        else:
            try:
                settings = load_settings(Path(file))
            except InvalidSettings as invalid:
                faults += [
                    fault if fault.startswith(file) else f"{file}: {fault}"
                    for fault in invalid.faults
                ]
            else:
                chosen[name] = Contender(name=name, policy=settings.policy, stuck=settings.stuck)
    if faults:
        raise InvalidSettings(faults)
    return list(chosen.values())


@contextmanager
def open_recording(path: Path) -> Iterator[Input]:
    """Open a recording; `-` is standard input. Progress counts bytes. Raises `CannotReplay`."""
    if str(path) == "-":
        if sys.stdin is None:
            raise CannotReplay("-: there is no standard input")
        yield from_file(cast("BufferedReader", sys.stdin.buffer))
        return
    try:
        file = path.open("rb")
    except OSError as error:
        raise CannotReplay(f"{path}: {error.strerror}") from error
    with file:
        source = from_file(file)
        if file.seekable():  # a pipe has neither a size nor a position
            source = replace(source, whole=path.stat().st_size, done=lambda _now: file.tell())
        yield source


def from_file(file: BufferedReader) -> Input:
    """A source from the file of a recording."""
    faults = Faults()
    return Input(recording.read(recording.split(file, faults), faults), faults)


def from_prometheus(arguments: argparse.Namespace, errors: TextIO) -> Input:
    """A source from the metrics in a Prometheus, which are all read now. Raises `CannotReplay`."""
    from exporter.whatif import prometheus as metrics

    server = metrics.Prometheus(
        arguments.prometheus, arguments.cluster, arguments.token_file, arguments.ca_file
    )
    began, ended = arguments.began, arguments.ended
    with _progress(errors) as progress:
        task = progress.add_task("reading", total=ended - began, status="")

        def show_progress(now: Instant) -> None:
            progress.update(task, completed=now - began, status=write_instant(now)[:16])

        try:
            spans = asyncio.run(
                metrics.fetch(server, began, ended, step=arguments.step, progress=show_progress)
            )
        except CannotAsk as trouble:
            raise CannotReplay(str(trouble)) from None
    return Input(
        metrics.to_events(spans, began, ended),
        whole=ended - began,
        done=lambda now: now - began,
        remarks=metrics.REMARKS,
    )


def play(source: Input, contenders: Sequence[Contender], errors: TextIO) -> Comparison:
    """Replay a source, with a progress bar if `errors` is a terminal.

    If the recording is truncated, a line on `errors` says how far it was read. Raises
    `CannotReplay` if the source is no recording, has no events or cannot be read.
    """
    replay = Replay(contenders)
    with _progress(errors) as progress:
        task = progress.add_task("replaying", total=source.whole, status="")
        try:
            for event in source.events:
                replay.take(event)
                if replay.events % PROGRESS_EVERY == 0:
                    status = f"{write_instant(replay.now)[:16]}, {replay.events:,} events"
                    progress.update(task, completed=source.done(replay.now), status=status)
        except OSError as error:
            raise CannotReplay(f"the recording cannot be read: {error.strerror}") from error
    if not replay.events:
        faults = source.faults
        why = ": it is truncated" if faults.truncated else ""
        if faults.messages:
            why = f": {faults.messages[0]}"
        raise CannotReplay(f"there is no event to replay{why}")
    if source.faults.truncated:
        print(f"the recording is truncated: read to {write_instant(replay.now)}", file=errors)
    return replay.finish()


def show_comparison(result: Comparison, source: Input, *, as_json: bool, screen: Screen) -> str:
    """The answer as tables or as JSON."""
    if as_json:
        return json.dumps(comparison.to_json(result, source.remarks), indent=2) + "\n"
    tables = comparison.show(result, width=screen.width, colored=screen.colored)
    return tables + "".join(f"\n{remark}\n" for remark in source.remarks)


def print_faults(faults: Faults, errors: TextIO) -> None:
    """Print which lines could not be used."""
    for message in faults.messages:
        print(message, file=errors)
    if faults.count > len(faults.messages):
        more = write_count(faults.count - len(faults.messages), "line")
        print(f"... and {more} more", file=errors)


def print_cost(result: Comparison, seconds: Seconds, errors: TextIO) -> None:
    """Print how much was replayed, how long that took, and the peak memory."""
    days = (result.ended - result.began) / 86_400
    print(
        f"replayed {days:.3g} days, {write_count(result.events, 'event')} in {seconds:.1f} s,"
        f" {peak_mebibytes():.0f} MiB at most",
        file=errors,
    )


def peak_mebibytes() -> float:
    """The peak resident memory of this process.

    On Linux, `ru_maxrss` includes memory from before this process executed this program. So the
    kernel's high-water mark is read instead.
    """
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        unit = 1 if sys.platform == "darwin" else 2**10
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20
    mark = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(mark.split()[1]) / 2**10


@contextmanager
def _open_source(
    arguments: argparse.Namespace,
    simulate: Callable[[], tuple[Iterable[bytes], Instant, Seconds]],
) -> Iterator[Input]:
    """Open the source. Raises `InvalidSettings` unless the arguments name exactly one."""
    given = (arguments.file, arguments.scenario, arguments.prometheus)
    if sum(source is not None for source in given) != 1:
        raise InvalidSettings(["expected one of FILE, --scenario and --prometheus"])
    if arguments.file is not None:
        with open_recording(arguments.file) as source:
            yield source
    elif arguments.scenario is not None:
        lines, began, lasts = simulate()
        faults = Faults()
        events = recording.read(lines, faults)
        yield Input(events, faults, whole=lasts, done=lambda now: now - began)
    elif arguments.began is None or arguments.ended is None or arguments.began >= arguments.ended:
        raise InvalidSettings(["--prometheus: expected --from and --to, and --to must be later"])
    elif arguments.step < 1:
        raise InvalidSettings(["--step: must be at least 1s"])
    else:
        yield from_prometheus(arguments, sys.stderr)


def _progress(errors: TextIO) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[status]}"),
        TimeRemainingColumn(),
        console=Console(file=errors),
        transient=True,
        disable=not errors.isatty(),
    )
