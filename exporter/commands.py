"""The command line: what can be typed, and what each command does and exits with."""

import argparse
import asyncio
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from enum import IntEnum
from pathlib import Path

import structlog

from exporter import __version__, app
from exporter.keeper import CannotKeep
from exporter.kube import Login, NoCredentials
from exporter.listeners import CannotListen
from exporter.logs import configure_logging
from exporter.settings import InvalidSettings, Settings, load_settings
from exporter.watch import KubeVirtMissing, NotSynced


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


EXIT_MEANINGS = {
    Exit.OK: "ended by SIGTERM or Ctrl-C, or the configuration checked is valid",
    Exit.FAILED: "a fault of the exporter itself; the log ends with a traceback",
    Exit.USAGE: "wrong arguments or configuration; every error is named with its path",
    Exit.NOT_SYNCED: "VMIs could not be listed within kube.syncTimeout",
    Exit.KUBEVIRT_MISSING: "the API server knows no VMIs, and kube.waitForKubeVirt is off",
    Exit.NO_CREDENTIALS: "no service account of a pod and no usable kubeconfig",
    Exit.CANNOT_LISTEN: "a listen address is in use or not allowed",
    Exit.CANNOT_KEEP: "the directory of checkpoint: file:... is not there",
}

_FAILURES = {
    NotSynced: Exit.NOT_SYNCED,
    KubeVirtMissing: Exit.KUBEVIRT_MISSING,
    NoCredentials: Exit.NO_CREDENTIALS,
    CannotListen: Exit.CANNOT_LISTEN,
    CannotKeep: Exit.CANNOT_KEEP,
}

log = structlog.stdlib.get_logger()


def make_parser() -> argparse.ArgumentParser:
    """The parser of `python -m exporter`."""
    parser = argparse.ArgumentParser(
        prog="python -m exporter",
        description="Tells a KubeVirt cluster which VMs must not be moved now.",
        epilog="Without a command it watches the cluster and serves the query API and metrics.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    _add_shared(parser, top=True)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    check = commands.add_parser("check", help="check a configuration file and exit")
    check.add_argument("--config", type=Path, required=True, metavar="FILE")
    demo = commands.add_parser("demo", help="the same program on a simulated cluster")
    _add_shared(demo, top=False)
    demo.add_argument("--seed", type=int, default=1, help="what happens (default: 1)")
    demo.add_argument("--speed", type=_positive, default=1.0, help="times faster (default: 1)")
    demo.add_argument("--vms", type=_count, default=24, help="how many VMs (default: 24)")
    demo.add_argument("--nodes", type=_count, default=4, help="how many nodes (default: 4)")
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
    configure_logging(form=settings.log.format, level=settings.log.level)
    try:
        asyncio.run(_with_signals(settings, job))
    except tuple(_FAILURES) as failure:
        log.error("stopped", why=str(failure))  # noqa: TRY400
        return _FAILURES[type(failure)]
    except Exception:
        log.exception("failed")
        return Exit.FAILED
    return Exit.OK


async def watch_cluster(
    settings: Settings, stop: asyncio.Event, *, kubeconfig: Path | None
) -> None:
    """The main job."""
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


def greet(listening: app.Listening, namespace: str, name: str) -> str:
    """What the demo says first: where it is, and three things to try."""
    query = listening.query[0]
    metrics = listening.metrics[0].replace("//0.0.0.0:", "//127.0.0.1:")
    body = f'{{"candidates": [{{"namespace": "{namespace}", "name": "{name}"}}]}}'
    return f"""
A simulated KubeVirt cluster, and the exporter watching it.

  query API  {query}
  metrics    {metrics}/metrics
  page       {metrics}/

Three things to try, from another terminal:

  # who must not be moved now, and until when
  curl -s {query}/v1/blocked
  # why
  curl -s {query}/v1/vmis/{namespace}/{name}
  # may this one be evicted?
  curl -s {query}/v1/verdicts -d '{body}'

Ctrl-C ends it.
"""


async def _with_signals(
    settings: Settings, job: Callable[[Settings, asyncio.Event], Awaitable[None]]
) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await job(settings, stop)


def _add_shared(parser: argparse.ArgumentParser, *, top: bool) -> None:
    """Options of the main job and of the demo; a command's own silence overrides nothing."""
    absent = None if top else argparse.SUPPRESS
    parser.add_argument(
        "--config", type=Path, metavar="FILE", default=absent, help="YAML; without: defaults"
    )
    if top:
        parser.add_argument(
            "--kubeconfig",
            type=Path,
            metavar="FILE",
            help="credentials; without: the pod's service account, else the default kubeconfig",
        )
    parser.add_argument("--log-format", choices=("json", "console"), default=absent)
    parser.add_argument(
        "--log-level", choices=("debug", "info", "warning", "error"), default=absent
    )


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError("must be more than 0")
    return value


def _print_faults(invalid: InvalidSettings) -> None:
    for fault in invalid.faults:
        print(fault, file=sys.stderr)
