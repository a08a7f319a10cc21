"""The command line: what can be typed, and what each command does and exits with.

Each command imports what it needs when it is run: none waits for another's libraries.
"""

import argparse
import asyncio
import json
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from enum import IntEnum
from functools import partial
from io import StringIO, TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from exporter import __version__
from exporter.model import Instant, Seconds
from exporter.settings import InvalidSettings, Settings, load_settings, parse_duration


if TYPE_CHECKING:
    from exporter.app import Listening
    from exporter.client import Exporter
    from exporter.replay import Comparison
    from exporter.whatif import Source

    _Commands: TypeAlias = argparse._SubParsersAction[argparse.ArgumentParser]  # noqa: SLF001


MOST_DAYS = 3650
"""How long a made-up cluster may go on: a calendar ends somewhere."""


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
    Exit.CANNOT_REPLAY: "there is nothing to play: no recording, an empty one, or no Prometheus",
}


def make_parser() -> argparse.ArgumentParser:
    """The parser of `python -m exporter`."""
    parser = argparse.ArgumentParser(
        prog="python -m exporter",
        description="Tells a KubeVirt cluster which VMs must not be moved now.\n"
        "Without a command it watches the cluster and serves the query API and metrics.",
        epilog="Example:\n  python -m exporter --kubeconfig ~/.kube/config --config exporter.yaml",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=__version__)
    _add_shared(parser, top=True)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    _add_asking(
        commands, "explain", "Why may this VM not be moved now?", "explain shop/db1"
    ).add_argument("vmi", type=_vmi, metavar="NAMESPACE/NAME", help="the VMI's, not its pod's")
    _add_asking(
        commands, "status", "Can this exporter be trusted, what is stuck, who is held?", "status"
    ).add_argument("--all", action="store_true", help="every row of each list, not 20")
    check = _add_command(
        commands, "check", "Is this configuration file valid?", "check --config exporter.yaml"
    )
    check.add_argument("--config", type=Path, required=True, metavar="FILE", help="YAML")
    _add_record(commands)
    _add_replay(commands)
    demo = _add_command(
        commands, "demo", "The same program on a simulated cluster.", "demo --speed 10 --vms 100"
    )
    _add_shared(demo, top=False)
    made = demo.add_argument_group("the simulated cluster")
    made.add_argument("--seed", type=int, default=1, metavar="N", help="what happens (default: 1)")
    made.add_argument(
        "--speed", type=_positive, default=1.0, metavar="X", help="times faster (default: 1)"
    )
    made.add_argument("--vms", type=_count, default=24, metavar="N", help="VMs (default: 24)")
    made.add_argument("--nodes", type=_count, default=4, metavar="N", help="nodes (default: 4)")
    return parser


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
    from exporter.client import understand
    from exporter.terminal import look_at, show_vmi
    from exporter.wire import VmiAnswer

    namespace, name = arguments.vmi

    async def ask(exporter: "Exporter") -> str:
        body = await exporter.read_vmi(namespace, name)
        if arguments.json:
            return _indent(understand(body, dict))
        return show_vmi(understand(body, VmiAnswer), look_at(sys.stdout, os.environ))

    return _ask(arguments, ask)


def status(arguments: argparse.Namespace) -> Exit:
    """`status`: whether the exporter can be trusted, what is stuck and who is held."""
    from exporter.client import understand
    from exporter.terminal import look_at, show_status
    from exporter.wire import BlockedAnswer, EvacuationsAnswer, StatusAnswer

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
        from exporter.kube import Login
        from exporter.recorder import record

        login = Login(kubeconfig=arguments.kubeconfig)
        path, lasts = arguments.output, arguments.lasts
        await record(settings, login, stop, path=path, clock=clock, lasts=lasts)

    return serve(settings, job)


def write_recording(path: Path, lines: Iterable[bytes]) -> Exit:
    """`record --scenario`: write a made-up cluster's lines to a file."""
    from exporter.recorder import CannotRecord, Tape

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
        return _complain(Exit.CANNOT_RECORD, "given up")
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
    from exporter import whatif

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
        return _complain(Exit.CANNOT_REPLAY, "given up")
    _print_answer(text.getvalue())
    whatif.tell_cost(found, timer() - began, sys.stderr)
    return Exit.OK


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
    from exporter.kube import Login

    await app.run(settings, Login(kubeconfig=kubeconfig), stop)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The parsed command line; wrong arguments exit with 2."""
    return make_parser().parse_args(arguments)


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
    from exporter.client import DEFAULT_URL, CannotAsk, InvalidPlace, NoSuchVmi, Place, connect
    from exporter.terminal import Unreadable

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
        return _complain(Exit.CANNOT_ASK, "given up")
    _print_answer(text)
    return Exit.OK


def _print_answer(text: str) -> None:
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        print(text, end="", flush=True)
    except BrokenPipeError:  # `| head` has read enough; nothing is left for Python's own flush
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


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
    from exporter import whatif

    if arguments.file is not None:
        return whatif.open_recording(arguments.file)
    if arguments.scenario is not None:
        lines, began, lasts = simulate()
        return nullcontext(whatif.from_lines(lines, began=began, lasts=lasts))
    from exporter.ranges import Prometheus

    place = Prometheus(arguments.prometheus, arguments.token_file, arguments.ca_file)
    told = whatif.from_prometheus(
        place, arguments.began, arguments.ended, arguments.step, sys.stderr
    )
    return nullcontext(told)


def _draw(found: "Comparison", path: Path) -> None:
    """Raises `CannotReplay` or OSError."""
    from exporter import plot, whatif

    try:
        plot.draw(found, path)
    except plot.CannotDraw as trouble:
        raise whatif.CannotReplay(f"--plot {path}: {trouble}") from None


def _screen_for(arguments: argparse.Namespace) -> dict[str, Any]:
    if arguments.json:
        return {"width": None, "colored": False}
    from exporter.terminal import look_at

    screen = look_at(sys.stdout, os.environ)
    return {"width": screen.width, "colored": screen.colored}


def _complain(code: Exit, text: str) -> Exit:
    """Say on standard error why there is no answer; a server's words may hold anything."""
    from exporter.terminal import escape

    print(escape(text), file=sys.stderr)
    return code


def _indent(answer: object) -> str:
    """JSON to be read; what is not ASCII is escaped, control characters too."""
    return f"{json.dumps(answer, indent=2)}\n"


def _failures() -> dict[type[Exception], Exit]:
    """What a job ends with that is no fault of the exporter."""
    from exporter.keeper import CannotKeep
    from exporter.kube import NoCredentials
    from exporter.listeners import CannotListen
    from exporter.recorder import CannotRecord
    from exporter.watch import KubeVirtMissing, NotSynced

    return {
        CannotRecord: Exit.CANNOT_RECORD,
        NotSynced: Exit.NOT_SYNCED,
        KubeVirtMissing: Exit.KUBEVIRT_MISSING,
        NoCredentials: Exit.NO_CREDENTIALS,
        CannotListen: Exit.CANNOT_LISTEN,
        CannotKeep: Exit.CANNOT_KEEP,
    }


async def _with_signals(
    settings: Settings, job: Callable[[Settings, asyncio.Event], Awaitable[None]]
) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await job(settings, stop)


def _add_command(
    commands: "_Commands", name: str, summary: str, example: str
) -> argparse.ArgumentParser:
    """A command with its line in the list of commands and an example below its options."""
    return commands.add_parser(
        name,
        help=summary,
        description=summary,
        epilog=f"Example:\n  python -m exporter {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _add_record(commands: "_Commands") -> None:
    parser = _add_command(
        commands,
        "record",
        "Write what the cluster says to a file that `replay` plays.",
        "record --output cluster.ndjson.gz --for 168h",
    )
    parser.add_argument(
        "--output",
        type=Path,
        required=True,
        metavar="FILE",
        help="the recording, compressed where the name ends in .gz; nothing is overwritten",
    )
    parser.add_argument(
        "--for",
        dest="lasts",
        type=_duration,
        metavar="DURATION",
        help="end by itself after so long, as in 2h30m (default: until Ctrl-C or SIGTERM)",
    )
    _add_scenario(parser)
    _add_shared(parser, top=False)
    parser.add_argument(
        "--kubeconfig", type=Path, metavar="FILE", default=argparse.SUPPRESS, help="credentials"
    )


def _add_replay(commands: "_Commands") -> None:
    parser = _add_command(
        commands,
        "replay",
        "What would these settings have done?",
        "replay --policy ours --policy mine=mine.yaml week.ndjson.gz",
    )
    parser.add_argument(
        "file",
        type=Path,
        nargs="?",
        metavar="FILE",
        help="a recording, or what `kubectl get vmi -A -w -o json --output-watch-events` writes;"
        " plain or gzip, - is standard input",
    )
    parser.add_argument(
        "--policy",
        action="append",
        default=[],
        metavar="NAME[=FILE]",
        help="reference, ours, none, or a name for the policy: and stuck: of a configuration file;"
        " as often as wanted (default: reference, ours and none)",
    )
    parser.add_argument("--json", action="store_true", help="the answer as JSON")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw it too: .png or .svg (needs Matplotlib)"
    )
    _add_scenario(parser)
    asked = parser.add_argument_group("instead of a recording: KubeVirt's metrics in a Prometheus")
    asked.add_argument("--prometheus", metavar="URL", help="its address")
    for flag, name, meaning in (("--from", "began", "first"), ("--to", "ended", "last")):
        asked.add_argument(
            flag, dest=name, type=_instant, metavar="T", help=f"the {meaning} instant, RFC 3339"
        )
    asked.add_argument(
        "--step",
        type=_duration,
        default=60.0,
        metavar="DURATION",
        help="how closely to look (default: 60s)",
    )
    asked.add_argument(
        "--token-file",
        type=Path,
        metavar="FILE",
        help="the bearer token to send; over https or to this machine only",
    )
    asked.add_argument(
        "--ca-file",
        type=Path,
        metavar="FILE",
        help="the authorities of its certificate (default: the system's)",
    )


def _add_scenario(parser: argparse.ArgumentParser) -> None:
    made = parser.add_argument_group("instead of a cluster: a made-up one")
    made.add_argument(
        "--scenario", choices=("week-pilot",), help="ten nodes, 148 VMs, a week from Monday on"
    )
    made.add_argument("--seed", type=int, default=1, metavar="N", help="what happens (default: 1)")
    made.add_argument("--days", type=_days, default=7.0, metavar="X", help="how long (default: 7)")


def _add_asking(
    commands: "_Commands", name: str, summary: str, example: str
) -> argparse.ArgumentParser:
    """A command that asks a running exporter."""
    parser = _add_command(commands, name, summary, example)
    parser.add_argument("--json", action="store_true", help="the API's own answer")
    asked = parser.add_argument_group("the exporter that is asked")
    asked.add_argument(
        "--url",
        help="its query listener: http://HOST:PORT, https://HOST:PORT or unix:/PATH"
        " (default: $EXPORTER, else http://127.0.0.1:9810)",
    )
    asked.add_argument(
        "--token-file",
        type=Path,
        metavar="FILE",
        help="the bearer token to send; over https, a unix socket or to this machine only",
    )
    asked.add_argument(
        "--ca-file",
        type=Path,
        metavar="FILE",
        help="the authorities of its certificate (default: the system's)",
    )
    asked.add_argument(
        "--cert-file", type=Path, metavar="FILE", help="the certificate that it wants of a caller"
    )
    asked.add_argument(
        "--key-file", type=Path, metavar="FILE", help="that certificate's key (default: its file)"
    )
    return parser


def _add_shared(parser: argparse.ArgumentParser, *, top: bool) -> None:
    """Options of the main job and of the demo; a command's own silence overrides nothing."""
    absent = None if top else argparse.SUPPRESS
    told = parser.add_argument_group("configuration")
    told.add_argument(
        "--config", type=Path, metavar="FILE", default=absent, help="YAML; without: defaults"
    )
    if top:
        told.add_argument(
            "--kubeconfig",
            type=Path,
            metavar="FILE",
            help="credentials; without: the pod's service account, else the default kubeconfig",
        )
    told.add_argument(
        "--log-format",
        choices=("json", "console"),
        default=absent,
        help="over log.format (default: by whether it is a terminal)",
    )
    told.add_argument(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        default=absent,
        help="over log.level (default: info)",
    )


def _vmi(text: str) -> tuple[str, str]:
    namespace, _, name = text.partition("/")
    if not namespace or not name or "/" in name or name in (".", "..") or not text.isprintable():
        raise argparse.ArgumentTypeError(f"{text!r}: expected NAMESPACE/NAME")
    return namespace, name


def _duration(text: str) -> Seconds:
    try:
        seconds = parse_duration(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if not seconds:
        raise argparse.ArgumentTypeError("must be longer than 0")
    return seconds


def _instant(text: str) -> Instant:
    from exporter.kubevirt import parse_instant

    instant = parse_instant(text)
    if instant is None:
        raise argparse.ArgumentTypeError(
            f"expected an instant such as 2026-01-05T10:00:00Z, got {text!r}"
        )
    return instant


def _count(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number, at least 1")
    return value


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number, more than 0")
    return value


def _days(text: str) -> float:
    value = _positive(text)
    if value > MOST_DAYS:
        raise argparse.ArgumentTypeError(f"{text!r}: at most {MOST_DAYS:,} days")
    return value


def _print_faults(invalid: InvalidSettings) -> None:
    for fault in invalid.faults:
        print(fault, file=sys.stderr)
