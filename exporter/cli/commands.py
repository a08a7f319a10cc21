"""The commands, which return an exit code or raise `CommandFailed`.

Each command imports its libraries when it runs, so that it does not load those of other commands.
"""

import argparse
import asyncio
import errno
import gc
import json
import os
import select
import signal
import sys
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING

from exporter.cli.lean_start import lean_imports
from exporter.engine.facts.model import Instant, Seconds
from exporter.errors import CommandFailed, Exit
from exporter.settings import Settings, load_settings
from exporter.settings.document import InvalidSettings
from exporter.text import escape


if TYPE_CHECKING:
    from exporter.app import Listening
    from exporter.cli.client import Exporter
    from exporter.cli.layout import Screen


WATCHED_EVERY: Seconds = 2.0
"""How often `node NAME --watch` reads the drain."""


def explain(arguments: argparse.Namespace) -> Exit:
    """`explain`: print why a VM may or may not be moved now."""
    from exporter.cli.client import decode_answer
    from exporter.cli.explain import show_vmi
    from exporter.cli.layout import detect_terminal
    from exporter.server.api.schemas import VmiAnswer

    namespace, name = arguments.vmi

    async def read_text(exporter: "Exporter") -> tuple[str, Exit]:
        body = await exporter.read_vmi(namespace or await exporter.find_namespace(name), name)
        if arguments.json:
            return _indent(decode_answer(body, dict)), Exit.OK
        screen = detect_terminal(sys.stdout, os.environ)
        return show_vmi(decode_answer(body, VmiAnswer), screen), Exit.OK

    return _ask(arguments, read_text)


def status(arguments: argparse.Namespace) -> Exit:
    """`status`: print whether the exporter works, what is stuck and which VMs are blocked.

    CANNOT_ASK if it is not ready.
    """
    from exporter.cli.client import decode_answer
    from exporter.cli.status import show_status
    from exporter.server.api.evacuation_schemas import EvacuationsAnswer
    from exporter.server.api.schemas import BlockedAnswer, StatusAnswer

    async def read_text(exporter: "Exporter") -> tuple[str, Exit]:
        body = await exporter.read("/v1/status")
        ready = decode_answer(body, dict).get("ready")
        code = Exit.OK if ready else Exit.CANNOT_ASK
        evacuations = await exporter.read("/v1/evacuations") if ready else None
        blocked = await exporter.read("/v1/blocked") if ready else None
        if arguments.json:
            bodies = {"status": body, "evacuations": evacuations, "blocked": blocked}
            answers = {name: body and decode_answer(body, dict) for name, body in bodies.items()}
            return _indent(answers), code
        text = show_status(
            decode_answer(body, StatusAnswer),
            None if evacuations is None else decode_answer(evacuations, EvacuationsAnswer),
            None if blocked is None else decode_answer(blocked, BlockedAnswer),
            _find_screen(arguments),
        )
        return text, code

    return _ask(arguments, read_text)


def node(arguments: argparse.Namespace) -> Exit:
    """`node`: print what a drain of one node, or of each node, would do to the VMs on it.

    OK if the node can be emptied without the help of others, or if no node is named.
    """
    from exporter.cli.client import decode_answer
    from exporter.cli.drain import follow_drain, show_drain, show_nodes
    from exporter.server.api.evacuation_schemas import DrainAnswer, NodesAnswer

    if arguments.watch and arguments.node is None:
        return complain(Exit.USAGE, "--watch needs the NAME of a node")

    async def read_text(exporter: "Exporter") -> tuple[str, Exit]:
        screen, code = _find_screen(arguments), Exit.OK
        if arguments.node is None:
            body = await exporter.read("/v1/nodes")
            if not arguments.json:
                return show_nodes(decode_answer(body, NodesAnswer), screen), code
        elif arguments.watch:
            try:
                end = await follow_drain(
                    exporter,
                    arguments.node,
                    lambda line: _print(f"{line}\n"),
                    pause=_pause,
                    as_json=arguments.json,
                )
            except OSError as error:  # of standard output: requests raise CannotAsk
                return "", _judge_output(error, Exit.CANNOT_ASK)
            return end, code
        else:
            body = await exporter.read_node(arguments.node)
            drain = decode_answer(body, dict)
            if not drain.get("canBeEmptied"):
                code = Exit.CANNOT_BE_EMPTIED
            elif drain.get("dependsOnOthers"):
                code = Exit.DEPENDS_ON_OTHERS
            if not arguments.json:
                return show_drain(decode_answer(body, DrainAnswer), screen), code
        return _indent(decode_answer(body, dict)), code

    return _ask(arguments, read_text)


def _find_screen(arguments: argparse.Namespace) -> "Screen":
    """The terminal; with --all, tables show every row."""
    from exporter.cli.layout import detect_terminal

    screen = detect_terminal(sys.stdout, os.environ)
    return replace(screen, rows=None) if arguments.all else screen


def runbook(arguments: argparse.Namespace) -> Exit:
    """`runbook`: print a runbook or a step, whose text the parser has read."""
    return print_answer(arguments.runbook, Exit.CANNOT_ASK)


QUERIES: dict[str, Callable[[argparse.Namespace], Exit]] = {
    "explain": explain,
    "status": status,
    "node": node,
    "runbook": runbook,
}
"""The commands that print an answer, all but the last of a running exporter."""


def record(arguments: argparse.Namespace, *, clock: Callable[[], Instant]) -> Exit:
    """`record`: write the cluster's watch events to a file, until stopped."""
    from exporter.whatif.recorder import record

    settings = read_settings_for(arguments)

    async def job(stop: asyncio.Event) -> None:
        from exporter.kube.login import Login

        login = Login(kubeconfig=arguments.kubeconfig)
        path, lasts = arguments.output, arguments.lasts
        await record(settings, login, stop, path=path, clock=clock, lasts=lasts)

    return serve(settings, job)


def write_recording(path: Path, lines: Iterable[bytes]) -> Exit:
    """`record --scenario`: write the scenario's lines to a file. Raises `CannotRecord`."""
    from exporter.whatif.recorder import LineFile

    file = LineFile(path)
    try:
        for line in lines:
            file.write(line)
        file.close()
    except BaseException:
        file.discard()
        raise
    print(f"{path}: {file.lines:,} lines, {file.size:,} bytes")
    return Exit.OK


def watch(arguments: argparse.Namespace) -> Exit:
    """Without a command: watch the cluster and serve, until stopped."""
    settings = read_settings_for(arguments)
    with lean_imports():
        from exporter import app
        from exporter.kube.login import Login
        from exporter.memory import map_large_blocks
    login = Login(kubeconfig=arguments.kubeconfig)
    map_large_blocks()

    # While a thread computes, such as the one that packs the history, the event loop waits up to
    # this long for the interpreter lock after each call to a socket. Python's default is 5 ms.
    sys.setswitchinterval(0.0005)
    # Objects that exist when the watches begin, such as modules and each `Table`, are never freed.
    # After `freeze`, the garbage collector does not visit them.
    return serve(
        settings, lambda stop: app.run(settings, login, stop, on_listening=lambda _: gc.freeze())
    )


def read_settings_for(arguments: argparse.Namespace) -> Settings:
    """The settings of --config; log flags take precedence over it. Raises `InvalidSettings`."""
    settings = load_settings(arguments.config)
    return replace(
        settings,
        log=replace(
            settings.log,
            format=arguments.log_format or settings.log.format,
            level=arguments.log_level or settings.log.level,
        ),
    )


def serve(settings: Settings, job: Callable[[asyncio.Event], Awaitable[None]]) -> Exit:
    """Run a job until SIGTERM or SIGINT; log its exception, and return the exit code for it."""
    from exporter.logs import configure_logging, log

    async def run() -> None:
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        await job(stop)

    configure_logging(form=settings.log.format, level=settings.log.level)
    try:
        asyncio.run(run())
    except CommandFailed as failed:
        log.error("stopped", why=str(failed))
        return failed.exit_code
    except Exception:  # noqa: BLE001 (it is logged, and the exit code says so)
        log.exception("failed")
        return Exit.FAILED
    return Exit.OK


class NotInImage(CommandFailed):
    """The command needs a part of the package that the image does not have."""

    exit_code = Exit.USAGE

    def __init__(self, command: str) -> None:
        super().__init__(
            f"{command}: not in this image, which watches a cluster and asks about it. Run it on"
            " your own machine: `pip install .` in a clone of the source"
        )


def fail(failed: CommandFailed) -> Exit:
    """Print why the command failed, with one line per fault, and return its exit code."""
    faults = failed.faults if isinstance(failed, InvalidSettings) else [escape(str(failed))]
    for fault in faults:
        print(fault, file=sys.stderr)
    return failed.exit_code


def say(text: str) -> None:
    """Print at once; print nothing if the reader (such as `head`) has ended."""
    with suppress(OSError):
        _print(f"{text}\n")


def greet(
    listening: "Listening", namespace: str, name: str, kubeconfig: str, *, answers_requests: bool
) -> str:
    """What the demo prints first: its URLs, and three things to try."""
    query = listening.query[0]
    metrics = listening.metrics[0].replace("//0.0.0.0:", "//127.0.0.1:")
    body = f'{{"candidates": [{{"namespace": "{namespace}", "name": "{name}"}}]}}'
    python = name_python()
    more = """
Kubernetes' controllers of EvictionRequests are simulated, too; what to try is in
docs/eviction-requests.md.
"""
    return f"""
A simulated KubeVirt cluster, and the exporter watching it.

  query API  {query}
  metrics    {metrics}/metrics
  page       {query}/

Three things to try, from another terminal in this directory:

  # which VMs must not be moved now, and until when
  {python} -m exporter status --url {query}
  # why
  {python} -m exporter explain --url {query} {namespace}/{name}
  # may this one be evicted?
  curl -s {query}/v1/verdicts -d '{body}'

The commands in the answers of `explain` and in the runbooks work on this cluster after
  export KUBECONFIG={kubeconfig}
except those below "# on a real cluster only".
{more if answers_requests else ""}
Ctrl-C ends it.
"""


def _ask(
    arguments: argparse.Namespace, read_text: Callable[["Exporter"], Awaitable[tuple[str, Exit]]]
) -> Exit:
    """Query the exporter that the arguments name, print the answer, and return its exit code.

    Raises `CannotAsk`, `NoSuchVmi` or `NoSuchNode`.
    """
    from exporter.cli.client import Endpoint, connect, find_url
    from exporter.credentials import CannotAsk

    async def answer() -> tuple[str, Exit]:
        async with connect(endpoint) as exporter:
            return await read_text(exporter)

    try:
        endpoint = Endpoint(
            arguments.url or find_url(os.environ),
            token_file=arguments.token_file,
            ca_file=arguments.ca_file,
            cert_file=arguments.cert_file,
            key_file=arguments.key_file,
        )
        text, code = asyncio.run(answer())
    except RecursionError:
        raise CannotAsk("the answer is nested too deeply: is this an exporter?") from None
    printed = print_answer(text, Exit.CANNOT_ASK)
    return code if printed is Exit.OK else printed


def print_answer(text: str, failure: Exit) -> Exit:
    """Print an answer; if standard output fails, print why and return `failure`."""
    if sys.stdout is None:
        return complain(failure, "there is no standard output for the answer")
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        _print(text)
    except OSError as error:
        return _judge_output(error, failure)
    return Exit.OK


def name_python() -> str:
    """The path of this Python: absolute or relative, whichever is shorter."""
    return min(sys.executable, os.path.relpath(sys.executable), key=len)


def complain(code: Exit, text: str) -> Exit:
    """Print to standard error why there is no answer, with control characters escaped."""
    print(escape(text), file=sys.stderr)
    return code


def _print(text: str) -> None:
    """Print and flush. Raises OSError; any output after that is discarded."""
    try:
        print(text, end="", flush=True)
    except OSError:
        # Otherwise Python's own flush at exit fails again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise


def _judge_output(error: OSError, failure: Exit) -> Exit:
    """OK if the reader of standard output, such as `head`, has ended; else print why."""
    if error.errno == errno.EPIPE:
        return Exit.OK
    return complain(failure, f"standard output: {error.strerror}")


async def _pause() -> None:
    """Wait before the drain is read again. Raises OSError if nobody reads standard output."""
    await asyncio.sleep(WATCHED_EVERY)
    output = select.poll()
    output.register(sys.stdout, 0)
    if output.poll(0):
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


def _indent(answer: object) -> str:
    """Indented JSON; anything but printable ASCII is escaped."""
    return f"{json.dumps(answer, indent=2)}\n"
