"""`python -m exporter`: runs the command, handles signals and returns the exit code.

Modules that take long to import are imported inside functions, so that a signal during the import
is handled too.
"""

import signal
import sys
from collections.abc import Iterable
from types import FrameType
from typing import TYPE_CHECKING, NoReturn


if TYPE_CHECKING:
    import argparse
    import asyncio

    from exporter.engine.facts.model import Instant, Seconds
    from exporter.settings import Settings


class TerminatedBySignal(KeyboardInterrupt):
    """SIGTERM ends the program like Ctrl-C, until a command installs its own handler."""


def main() -> int:
    """Run the command of the command line and return its exit code."""
    signal.signal(signal.SIGTERM, _terminate)
    try:
        return run()
    except KeyboardInterrupt as interrupt:
        # If Ctrl-C interrupted `exec` of a string, as in `dataclass`, Python 3.11 would end itself
        # by SIGINT instead of with our exit code.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        by_sigterm = isinstance(interrupt, TerminatedBySignal)
        print(f"stopped by {'SIGTERM' if by_sigterm else 'Ctrl-C'}", file=sys.stderr)
        return 128 + (signal.SIGTERM if by_sigterm else signal.SIGINT)


def run() -> int:
    """Choose and run the command."""
    from exporter.cli import arguments as commandline
    from exporter.cli import commands
    from exporter.errors import CommandFailed

    arguments = commandline.parse(sys.argv[1:])
    try:
        match arguments.command:
            case "check":
                from exporter.cli.check import check

                return check(arguments.config, arguments.explained, arguments.kubeconfig)
            case "explain" | "status" | "node" | "runbook" as name:
                return commands.QUERIES[name](arguments)
            case "record" | "replay":
                return play_back(arguments)
            case "demo":
                return demo(arguments)
            case _:
                return commands.watch(arguments)
    except CommandFailed as failed:
        failure = failed
    except ModuleNotFoundError as missing:
        if not (missing.name or "").startswith(("exporter.demo", "exporter.whatif")):
            raise
        failure = commands.NotInImage(arguments.command)
    return commands.fail(failure)


def play_back(arguments: "argparse.Namespace") -> int:
    """Run the command `record` or `replay`, for a real cluster or for the scenario."""
    import time

    from exporter.cli import commands

    if arguments.command == "replay":
        from exporter.cli.replay import replay

        return replay(arguments, timer=time.perf_counter, simulate=lambda: simulate(arguments))
    if arguments.scenario is None:
        return commands.record(arguments, clock=time.time)
    lines, _, _ = simulate(arguments)
    return commands.write_recording(arguments.output, lines)


def simulate(arguments: "argparse.Namespace") -> "tuple[Iterable[bytes], Instant, Seconds]":
    """The lines of the scenario's recording, its beginning and its length."""
    from exporter.demo.hand_offs import HandOffs
    from exporter.demo.week import BEGAN, Week

    scenario = HandOffs if arguments.scenario == "week-hand-offs" else Week
    week = scenario(arguments.seed, arguments.days)
    return week.lines(), BEGAN.timestamp(), arguments.days * 86_400


def demo(arguments: "argparse.Namespace") -> int:
    """Run the command `demo`: the exporter and the simulated cluster that it watches."""
    import asyncio
    from datetime import UTC, datetime

    from exporter import app
    from exporter.cli import commands
    from exporter.demo import Demo
    from exporter.kube.login import Login

    settings = suit_demo(commands.read_settings_for(arguments), arguments)
    cluster = Demo(
        lambda: datetime.now(UTC),
        seed=arguments.seed,
        speed=arguments.speed,
        vms=arguments.vms,
        nodes=arguments.nodes,
        responder=settings.eviction_requests.name if arguments.eviction_requests else "",
        progress=lambda built: show_progress(built, arguments.vms),
    )

    async def play(stop: "asyncio.Event") -> None:
        listening: asyncio.Future[app.Listening] = asyncio.get_running_loop().create_future()

        async def play_cluster() -> None:
            urls = await listening
            kubeconfig = cluster.announce(urls.query[0], urls.metrics[0])
            answers = arguments.eviction_requests
            greeting = commands.greet(urls, *cluster.example, kubeconfig, answers_requests=answers)
            commands.say(greeting)
            await cluster.run(
                urls.query[0] if arguments.evictor == "plugin" else None,
                stop,
                webhook_url=None if arguments.evictor == "none" else urls.admission[0],
            )

        await cluster.build(stop)
        if stop.is_set():
            return
        async with cluster:
            try:
                async with asyncio.TaskGroup() as tasks:
                    playing = tasks.create_task(play_cluster())
                    try:
                        login = Login(url=cluster.url)
                        await app.run(settings, login, stop, on_listening=listening.set_result)
                    finally:
                        playing.cancel()
            except* Exception as group:  # noqa: BLE001 (commands.serve handles each kind)
                raise group.exceptions[0] from None

    return commands.serve(settings, play)


def suit_demo(settings: "Settings", arguments: "argparse.Namespace") -> "Settings":
    """The settings for the demo: shorter waits, its own listeners, fewer log lines."""
    from dataclasses import replace

    from exporter.demo import USER, shorten_settings
    from exporter.engine.facts.policy import Policy, StuckPolicy
    from exporter.settings import (
        AdmissionMode,
        AdmissionSettings,
        EvictionRequestMode,
        LogSettings,
        read_settings,
    )
    from exporter.settings.values import Address

    if arguments.eviction_requests:
        requests = replace(
            settings.eviction_requests, mode=EvictionRequestMode.RESPOND, cancel=True
        )
        settings = replace(settings, eviction_requests=requests)
    if arguments.log_level is None and settings.log.level == LogSettings().level:
        # A log line every second would hide the greeting.
        settings = replace(settings, log=replace(settings.log, level="warning"))
    shortened = read_settings(shorten_settings(arguments.speed))
    if settings.policy == Policy():
        settings = replace(settings, policy=shortened.policy)
    if settings.stuck == StuckPolicy():
        settings = replace(settings, stuck=shortened.stuck)
    if arguments.listen is not None:
        query = arguments.listen
        metrics = replace(query, port=query.port and query.port + 1)
        listen = replace(settings.listen, query=(query,), metrics=(metrics,))
        settings = replace(settings, listen=listen)
    if arguments.evictor != "none" and not settings.listen.admission:
        # Without TLS, which no configuration file may set: only the demo calls this listener.
        listen = replace(settings.listen, admission=(Address("127.0.0.1", 0),))
        mode = AdmissionMode.ENFORCE if arguments.evictor == "webhook" else AdmissionMode.WARN
        admission = AdmissionSettings(mode, (USER,), observe=True)
        settings = replace(settings, listen=listen, admission=admission)
    return settings


def show_progress(built: int, vms: int) -> None:
    """Print how many VMs of a large simulated cluster have been created."""
    from exporter.cli import commands

    if built % 1000 == 0:
        commands.say(f"simulated cluster: {built:,} of {vms:,} VMs created")


def _terminate(_number: int, _frame: FrameType | None) -> NoReturn:
    raise TerminatedBySignal


if __name__ == "__main__":
    sys.exit(main())
