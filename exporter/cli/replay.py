"""What would these settings have done? The command `replay`: from where, for whom, and shown how.

Nothing but the answer goes to standard output, and equal input gives equal bytes there; progress,
what could not be read and how long it took go to standard error.
"""

import asyncio
import json
import re
import resource
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from exporter.engine.model import Instant, Seconds
from exporter.kube.kubevirt import stamp
from exporter.settings import InvalidSettings, load_settings
from exporter.whatif import comparison, recording
from exporter.whatif.account import BUILTIN, Comparison, Contender
from exporter.whatif.recording import Faults, Recorded
from exporter.whatif.replay import Replay


if TYPE_CHECKING:
    from exporter.whatif.prometheus import Prometheus


CHUNK = 2**16
PLOT_SUFFIXES = (".png", ".svg")
_NAME = re.compile(r"[\w.-]{1,40}")
SHOWN_EVERY = 2_000
"""Events between two moves of the progress bar."""


class CannotReplay(Exception):
    """There is nothing to play, or nothing to show it with; the text says what helps."""


@dataclass
class Source:
    """Where events come from.

    `whole` is its size and `done` how much of that has been played, given the virtual clock; in
    bytes or in seconds. `remarks` say what is not known of such a source.
    """

    events: Callable[[Faults], Iterable[Recorded]]
    whole: float | None = None
    done: Callable[[Instant], float] = lambda _now: 0.0
    remarks: Sequence[str] = ()
    faults: Faults = field(default_factory=Faults)


def choose_contenders(names: Sequence[str]) -> list[Contender]:
    """The settings to compare: of each NAME=FILE, or built in; none named: all built in.

    Raises `InvalidSettings` with every fault.
    """
    faults: list[str] = []
    chosen: dict[str, Contender] = {}
    for text in names or tuple(BUILTIN):
        name, equals, file = text.partition("=")
        if name in chosen:
            faults.append(f"--policy {text}: the name {name} is there twice")
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
def open_recording(path: Path) -> Iterator[Source]:
    """A file as a source, counted in bytes; `-` is standard input. Raises `CannotReplay`."""
    if str(path) == "-":
        if sys.stdin is None:
            raise CannotReplay("-: there is no standard input")
        yield from_chunks(iter(lambda: sys.stdin.buffer.read(CHUNK), b""))
        return
    try:
        file = path.open("rb")
    except OSError as error:
        raise CannotReplay(f"{path}: {error.strerror}") from error
    with file:
        source = from_chunks(iter(lambda: file.read(CHUNK), b""))
        if file.seekable():  # a pipe has neither a size nor a place in it
            whole = path.stat().st_size
            source = replace(source, whole=whole, done=lambda _now: file.tell())
        yield source


def from_chunks(chunks: Iterable[bytes]) -> Source:
    """The bytes of a recording as a source."""
    return Source(lambda faults: recording.read(recording.split(chunks, faults), faults))


def from_lines(lines: Iterable[bytes], *, began: Instant, lasts: Seconds) -> Source:
    """The lines of a recording as a source, counted in time."""
    return Source(
        lambda faults: recording.read(lines, faults), whole=lasts, done=lambda now: now - began
    )


def from_prometheus(
    prometheus: "Prometheus", began: Instant, ended: Instant, step: Seconds, errors: TextIO
) -> Source:
    """What a Prometheus remembers as a source, read to its end first. Raises `CannotReplay`."""
    from exporter.whatif import prometheus as ranges

    with _progress(errors) as progress:
        task = progress.add_task("reading", total=ended - began, told="")

        def tell(now: Instant) -> None:
            progress.update(task, completed=now - began, told=stamp(now)[:16])

        try:
            spans = asyncio.run(ranges.fetch(prometheus, began, ended, step=step, told=tell))
        except ranges.NoRanges as trouble:
            raise CannotReplay(str(trouble)) from None
    return Source(
        lambda _faults: ranges.tell(spans, began, ended),
        whole=ended - began,
        done=lambda now: now - began,
        remarks=ranges.REMARKS,
    )


def play(source: Source, contenders: Sequence[Contender], errors: TextIO) -> Comparison:
    """Play a source to its end, with a progress bar where `errors` is a terminal.

    Where the end is torn away, it is told there how far it was read.

    Raises `CannotReplay` where it is no recording, an empty one or one that cannot be read.
    """
    replay = Replay(contenders)
    with _progress(errors) as progress:
        task = progress.add_task("playing", total=source.whole, told="")
        try:
            for event in source.events(source.faults):
                replay.take(event)
                if replay.events % SHOWN_EVERY == 0:
                    _show_progress(progress, task, source, replay)
        except recording.UnknownFormat as unknown:
            raise CannotReplay(str(unknown)) from None
        except OSError as error:
            raise CannotReplay(f"the recording cannot be read: {error.strerror}") from error
    if not replay.events:
        faults = source.faults
        told = f": {faults.told[0]}" if faults.told else ": it is torn" if faults.torn else ""
        raise CannotReplay(f"there is no event to play{told}")
    if source.faults.torn:
        print(f"the recording is torn: read to {stamp(replay.now)}", file=errors)
    return replay.finish()


def show(
    found: Comparison,
    source: Source,
    *,
    as_json: bool,
    width: int | None,
    colored: bool,
    out: TextIO,
) -> None:
    """The answer: a table, or JSON."""
    if as_json:
        print(json.dumps(comparison.to_json(found, source.remarks), indent=2), file=out)
        return
    comparison.show(found, out, width=width, colored=colored)
    for remark in source.remarks:
        print(f"\n{remark}", file=out)


def check_plot(path: Path | None) -> None:
    """Raises `CannotReplay` where that plot could not be drawn, before anything is played."""
    if path is None:
        return
    if path.suffix not in PLOT_SUFFIXES:
        raise CannotReplay(f"--plot {path}: expected a name that ends in .png or .svg")
    if find_spec("matplotlib") is None:
        raise CannotReplay(
            "--plot needs Matplotlib: pip install 'kubevirt-eviction-exporter[plot]'"
        )


def tell_faults(faults: Faults, errors: TextIO) -> None:
    """Which lines could not be used."""
    for told in faults.told:
        print(told, file=errors)
    if faults.count > len(faults.told):
        print(f"... and {faults.count - len(faults.told):,} lines more", file=errors)


def tell_cost(found: Comparison, seconds: Seconds, errors: TextIO) -> None:
    """How much was played, how long that took, and the most memory that this process had."""
    days = (found.ended - found.began) / 86_400
    print(
        f"played {days:.3g} days, {found.events:,} events in {seconds:.1f} s,"
        f" {peak_mebibytes():.0f} MiB at most",
        file=errors,
    )


def peak_mebibytes() -> float:
    """The most memory that this process has had (resident).

    Linux counts into `ru_maxrss` what the process was before it became this program, so that there
    the kernel's own high-water mark is read.
    """
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        unit = 1 if sys.platform == "darwin" else 2**10
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20
    mark = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(mark.split()[1]) / 2**10


def _progress(errors: TextIO) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[told]}"),
        TimeRemainingColumn(),
        console=Console(file=errors),
        transient=True,
        disable=not errors.isatty(),
    )


def _show_progress(progress: Progress, task: TaskID, source: Source, replay: Replay) -> None:
    told = f"{stamp(replay.now)[:16]}, {replay.events:,} events"
    progress.update(task, completed=source.done(replay.now), told=told)
