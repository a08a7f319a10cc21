"""What each command does, and what it exits with.

Each command imports what it needs when it is run: none waits for another's libraries.
"""

import argparse
import asyncio
import errno
import json
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from enum import IntEnum
from functools import partial
from io import StringIO, TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exporter.engine.model import Instant, Seconds
from exporter.settings import InvalidSettings, Settings, load_settings


if TYPE_CHECKING:
    from exporter.app import Listening
    from exporter.cli.client import Exporter
    from exporter.cli.replay import Source
    from exporter.whatif.replay import Comparison


class Exit(IntEnum):
    """Exit codes; the README's table is held against these."""

    OK = 0
    FAILED = 1
    USAGE = 2
    NOT_SYNCED = 3
    KUBEVIRT_MISSING = 4
    NO_CREDENTIALS = 5
    CANNOT_LISTEN = 6
    CANNOT_KEEP = 7
    CANNOT_ASK = 8
    NO_SUCH_VMI = 9
    CANNOT_RECORD = 10
    CANNOT_REPLAY = 11
    INTERRUPTED = 130


EXIT_MEANINGS = {
    Exit.OK: "ended by SIGTERM or Ctrl-C, the configuration checked is valid, or it was answered",
    Exit.FAILED: "a fault of the exporter itself; the log ends with a traceback",
    Exit.USAGE: "wrong arguments or configuration; every error is named with its path",
    Exit.NOT_SYNCED: "VMIs could not be listed within kube.syncTimeout",
    Exit.KUBEVIRT_MISSING: "the API server knows no VMIs, and kube.waitForKubeVirt is off",
    Exit.NO_CREDENTIALS: "no service account of a pod and no usable kubeconfig",
    Exit.CANNOT_LISTEN: "a listen address is in use or not allowed",
    Exit.CANNOT_KEEP: "the directory of checkpoint: file:... is not there",
    Exit.CANNOT_ASK: "the exporter asked did not answer, or refused to; it is said what helps",
    Exit.NO_SUCH_VMI: "the exporter asked knows no such VMI",
    Exit.CANNOT_RECORD: "the recording or the plot cannot be written; no recording is overwritten",
    Exit.CANNOT_REPLAY: "nothing to play (no recording, an empty one), or nowhere to print it",
    Exit.INTERRUPTED: "given up at Ctrl-C, before there was an answer or a whole file",
}


def check(path: Path) -> Exit:
    """`check`: say what is wrong with a configuration, or that nothing is."""
    try:
        settings = load_settings(path)
    except InvalidSettings as invalid:
        _print_faults(invalid)
        return Exit.USAGE
    for remark in settings.remarks:
        print(f"{path}: {remark}")
    print(f"{path}: valid")
    return Exit.OK


def explain(arguments: argparse.Namespace) -> Exit:
    """`explain`: why a VM may not be moved now, or that it may."""
    from exporter.cli.client import understand
    from exporter.cli.terminal import look_at, show_vmi
    from exporter.server.schemas import VmiAnswer

    namespace, name = arguments.vmi

    async def ask(exporter: "Exporter") -> str:
        body = await exporter.read_vmi(namespace, name)
        if arguments.json:
            return _indent(understand(body, dict))
        return show_vmi(understand(body, VmiAnswer), look_at(sys.stdout, os.environ))

    return _ask(arguments, ask)


def status(arguments: argparse.Namespace) -> Exit:
    """`status`: whether the exporter can be trusted, what is stuck and who is held."""
    from exporter.cli.client import understand
    from exporter.cli.terminal import look_at, show_status
    from exporter.server.schemas import BlockedAnswer, EvacuationsAnswer, StatusAnswer

    async def ask(exporter: "Exporter") -> str:
        body = await exporter.read("/v1/status")
        told = understand(body, StatusAnswer)
        evacuations = await exporter.read("/v1/evacuations") if told.ready else None
        blocked = await exporter.read("/v1/blocked") if told.ready else None
        if arguments.json:
            bodies = {"status": body, "evacuations": evacuations, "blocked": blocked}
            return _indent({name: one and understand(one, dict) for name, one in bodies.items()})
        return show_status(
            told,
            None if evacuations is None else understand(evacuations, EvacuationsAnswer),
            None if blocked is None else understand(blocked, BlockedAnswer),
            look_at(sys.stdout, os.environ),
            everything=arguments.all,
        )

    return _ask(arguments, ask)


def record(arguments: argparse.Namespace, *, clock: Callable[[], Instant]) -> Exit:
    """`record`: write what the cluster says to a file, until told to stop."""
    try:
        settings = read_settings_for(arguments)
    except InvalidSettings as invalid:
        return refuse(invalid)

    async def job(settings: Settings, stop: asyncio.Event) -> None:
        from exporter.kube.client import Login
        from exporter.whatif.recorder import record

        login = Login(kubeconfig=arguments.kubeconfig)
        path, lasts = arguments.output, arguments.lasts
        await record(settings, login, stop, path=path, clock=clock, lasts=lasts)

    return serve(settings, job)


def write_recording(path: Path, lines: Iterable[bytes]) -> Exit:
    """`record --scenario`: write a made-up cluster's lines to a file."""
    from exporter.whatif.recorder import CannotRecord, Tape

    try:
        tape = Tape(path)
        try:
            for line in lines:
                tape.write(line)
            tape.close()
        except BaseException:
            tape.discard()
            raise
    except CannotRecord as trouble:
        return _complain(Exit.CANNOT_RECORD, str(trouble))
    except KeyboardInterrupt:
        return _complain(Exit.INTERRUPTED, "given up")
    print(f"{path}: {tape.lines:,} lines, {tape.size:,} bytes")
    return Exit.OK


def replay(
    arguments: argparse.Namespace,
    *,
    timer: Callable[[], Seconds],
    simulate: Callable[[], tuple[Iterable[bytes], Instant, Seconds]],
) -> Exit:
    """`replay`: tell what these settings would have done.

    `simulate` gives the lines of the scenario, its beginning and its length.
    """
    from exporter.cli import replay as whatif

    began = timer()
    try:
        contenders = whatif.choose_contenders(arguments.policy)
        whatif.check_plot(arguments.plot)
        _check_source(arguments)
    except InvalidSettings as invalid:
        return refuse(invalid)
    except whatif.CannotReplay as trouble:
        return _complain(Exit.USAGE, str(trouble))
    text = StringIO()
    try:
        with _open_source(arguments, simulate) as source:
            found = whatif.play(source, contenders, sys.stderr)
            screen = _screen_for(arguments)
            whatif.show(found, source, as_json=arguments.json, out=text, **screen)
            whatif.tell_faults(source.faults, sys.stderr)
        if arguments.plot is not None:
            _draw(found, arguments.plot)
    except whatif.CannotReplay as trouble:
        return _complain(Exit.CANNOT_REPLAY, str(trouble))
    except OSError as error:
        return _complain(Exit.CANNOT_RECORD, f"--plot {arguments.plot}: {error.strerror}")
    except KeyboardInterrupt:
        return _complain(Exit.INTERRUPTED, "given up")
    code = _print_answer(text.getvalue(), Exit.CANNOT_REPLAY)
    if code is Exit.OK:
        whatif.tell_cost(found, timer() - began, sys.stderr)
    return code


def watch(arguments: argparse.Namespace) -> Exit:
    """Without a command: watch the cluster and serve, until told to stop."""
    try:
        settings = read_settings_for(arguments)
    except InvalidSettings as invalid:
        return refuse(invalid)
    return serve(settings, partial(watch_cluster, kubeconfig=arguments.kubeconfig))


def read_settings_for(arguments: argparse.Namespace) -> Settings:
    """The settings of these arguments, the log flags over the file's. Raises InvalidSettings."""
    settings = load_settings(arguments.config)
    return replace(
        settings,
        log=replace(
            settings.log,
            format=arguments.log_format or settings.log.format,
            level=arguments.log_level or settings.log.level,
        ),
    )


def serve(
    settings: Settings,
    job: Callable[[Settings, asyncio.Event], Awaitable[None]],
) -> Exit:
    """Run a job until SIGTERM or SIGINT, and turn what it raises into an exit code."""
    from exporter.logs import configure_logging, log

    configure_logging(form=settings.log.format, level=settings.log.level)
    try:
        asyncio.run(_with_signals(settings, job))
    except tuple(_failures()) as failure:
        log.error("stopped", why=str(failure))
        return _failures()[type(failure)]
    except Exception:  # noqa: BLE001 (the log has it, and the exit code)
        log.exception("failed")
        return Exit.FAILED
    return Exit.OK


async def watch_cluster(
    settings: Settings, stop: asyncio.Event, *, kubeconfig: Path | None
) -> None:
    """The main job."""
    from exporter import app
    from exporter.kube.client import Login

    await app.run(settings, Login(kubeconfig=kubeconfig), stop)


def refuse(invalid: InvalidSettings) -> Exit:
    """Say on standard error what is wrong with the configuration."""
    _print_faults(invalid)
    return Exit.USAGE


def say(text: str) -> None:
    """Print for a person, at once."""
    print(text, flush=True)


def greet(listening: "Listening", namespace: str, name: str) -> str:
    """What the demo says first: where it is, and three things to try."""
    query = listening.query[0]
    metrics = listening.metrics[0].replace("//0.0.0.0:", "//127.0.0.1:")
    body = f'{{"candidates": [{{"namespace": "{namespace}", "name": "{name}"}}]}}'
    python = os.path.relpath(sys.executable)
    return f"""
A simulated KubeVirt cluster, and the exporter watching it.

  query API  {query}
  metrics    {metrics}/metrics
  page       {query}/

Three things to try, from another terminal in this directory:

  # who must not be moved now, and until when
  {python} -m exporter status --url {query}
  # why
  {python} -m exporter explain --url {query} {namespace}/{name}
  # may this one be evicted?
  curl -s {query}/v1/verdicts -d '{body}'

Ctrl-C ends it.
"""


def _ask(arguments: argparse.Namespace, ask: Callable[["Exporter"], Awaitable[str]]) -> Exit:
    """Ask the exporter that the arguments name, and print what `ask` makes of it."""
    from exporter.cli.client import DEFAULT_URL, CannotAsk, InvalidPlace, NoSuchVmi, Place, connect
    from exporter.cli.terminal import Unreadable

    async def answer() -> str:
        async with connect(place) as exporter:
            return await ask(exporter)

    url = arguments.url or os.environ.get("EXPORTER") or DEFAULT_URL
    try:
        place = Place(
            url,
            token_file=arguments.token_file,
            ca_file=arguments.ca_file,
            cert_file=arguments.cert_file,
            key_file=arguments.key_file,
        )
        text = asyncio.run(answer())
    except InvalidPlace as invalid:
        return _complain(Exit.USAGE, str(invalid))
    except NoSuchVmi as missing:
        return _complain(Exit.NO_SUCH_VMI, str(missing))
    except CannotAsk as trouble:
        return _complain(Exit.CANNOT_ASK, str(trouble))
    except Unreadable as trouble:
        why = f"{url} is no exporter of this version: {trouble}; --json shows its answer as it is"
        return _complain(Exit.CANNOT_ASK, why)
    except KeyboardInterrupt:
        return _complain(Exit.INTERRUPTED, "given up")
    return _print_answer(text, Exit.CANNOT_ASK)


def _print_answer(text: str, refusal: Exit) -> Exit:
    """Print an answer; where standard output is closed or full, say so and end with `refusal`."""
    if sys.stdout is None:
        return _complain(refusal, "there is no standard output for the answer")
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        print(text, end="", flush=True)
    except OSError as error:
        # Nothing is left for Python's own flush.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno != errno.EPIPE:  # where `| head` has read enough
            return _complain(refusal, f"standard output: {error.strerror}")
    return Exit.OK


def _check_source(arguments: argparse.Namespace) -> None:
    """Raises `InvalidSettings` where the arguments name not one source, or only a part of one."""
    given = (arguments.file, arguments.scenario, arguments.prometheus)
    if sum(source is not None for source in given) != 1:
        raise InvalidSettings(["expected one of FILE, --scenario and --prometheus"])
    if arguments.prometheus is None:
        return
    if arguments.began is None or arguments.ended is None or arguments.began >= arguments.ended:
        raise InvalidSettings(["--prometheus: expected --from and, later than it, --to"])
    if arguments.step < 1:
        raise InvalidSettings(["--step: must be at least 1s"])


def _open_source(
    arguments: argparse.Namespace,
    simulate: Callable[[], tuple[Iterable[bytes], Instant, Seconds]],
) -> "AbstractContextManager[Source]":
    from exporter.cli import replay as whatif

    if arguments.file is not None:
        return whatif.open_recording(arguments.file)
    if arguments.scenario is not None:
        lines, began, lasts = simulate()
        return nullcontext(whatif.from_lines(lines, began=began, lasts=lasts))
    from exporter.whatif.prometheus import Prometheus

    place = Prometheus(arguments.prometheus, arguments.token_file, arguments.ca_file)
    told = whatif.from_prometheus(
        place, arguments.began, arguments.ended, arguments.step, sys.stderr
    )
    return nullcontext(told)


def _draw(found: "Comparison", path: Path) -> None:
    """Raises `CannotReplay` or OSError."""
    from exporter.cli import replay as whatif
    from exporter.whatif import plot

    try:
        plot.draw(found, path)
    except plot.CannotDraw as trouble:
        raise whatif.CannotReplay(f"--plot {path}: {trouble}") from None


def _screen_for(arguments: argparse.Namespace) -> dict[str, Any]:
    if arguments.json:
        return {"width": None, "colored": False}
    from exporter.cli.terminal import look_at

    screen = look_at(sys.stdout, os.environ)
    return {"width": screen.width, "colored": screen.colored}


def _complain(code: Exit, text: str) -> Exit:
    """Say on standard error why there is no answer; a server's words may hold anything."""
    from exporter.text import escape

    print(escape(text), file=sys.stderr)
    return code


def _indent(answer: object) -> str:
    """JSON to be read; what is not ASCII is escaped, control characters too."""
    return f"{json.dumps(answer, indent=2)}\n"


def _failures() -> dict[type[Exception], Exit]:
    """What a job ends with that is no fault of the exporter."""
    from exporter.checkpoint.file import CheckpointUnwritable
    from exporter.kube.client import NoCredentials
    from exporter.kube.informers import NotSynced
    from exporter.kube.reflector import KubeVirtMissing
    from exporter.server.listeners import CannotListen
    from exporter.whatif.recorder import CannotRecord

    return {
        CannotRecord: Exit.CANNOT_RECORD,
        NotSynced: Exit.NOT_SYNCED,
        KubeVirtMissing: Exit.KUBEVIRT_MISSING,
        NoCredentials: Exit.NO_CREDENTIALS,
        CannotListen: Exit.CANNOT_LISTEN,
        CheckpointUnwritable: Exit.CANNOT_KEEP,
    }


async def _with_signals(
    settings: Settings, job: Callable[[Settings, asyncio.Event], Awaitable[None]]
) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await job(settings, stop)


def _print_faults(invalid: InvalidSettings) -> None:
    for fault in invalid.faults:
        print(fault, file=sys.stderr)
