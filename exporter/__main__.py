"""`python -m exporter`: parse the arguments, run the command, return the exit code."""

import argparse
import asyncio
import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime

from exporter.cli import arguments as commandline
from exporter.cli import commands
from exporter.engine.model import Instant, Policy, Seconds, StuckPolicy
from exporter.settings import (
    Address,
    AdmissionMode,
    AdmissionSettings,
    InvalidSettings,
    Settings,
    read_settings,
)


def main() -> int:
    """Run the command and return its exit code."""
    arguments = commandline.parse(sys.argv[1:])
    match arguments.command:
        case "check":
            return commands.check(arguments.config)
        case "explain":
            return commands.explain(arguments)
        case "status":
            return commands.status(arguments)
        case "record" | "replay":
            return play_back(arguments)
        case "demo":
            return demo(arguments)
        case _:
            return commands.watch(arguments)


def play_back(arguments: argparse.Namespace) -> int:
    """`record` and `replay`, of a real or a simulated cluster."""
    if arguments.command == "replay":
        return commands.replay(
            arguments, timer=time.perf_counter, simulate=lambda: simulate(arguments)
        )
    if arguments.scenario is None:
        return commands.record(arguments, clock=time.time)
    lines, _, _ = simulate(arguments)
    return commands.write_recording(arguments.output, lines)


def simulate(arguments: argparse.Namespace) -> tuple[Iterable[bytes], Instant, Seconds]:
    """A scenario's lines, when it begins and how long it lasts."""
    from exporter.demo.week import BEGAN, Week

    week = Week(arguments.seed, arguments.days)
    return week.lines(), BEGAN.timestamp(), arguments.days * 86_400


def demo(arguments: argparse.Namespace) -> int:
    """`demo`: the exporter on a simulated cluster, with a descheduler that queries it."""
    from exporter import app
    from exporter.demo import USER, Demo, shorten_settings
    from exporter.kube.client import Login

    try:
        settings = commands.read_settings_for(arguments)
    except InvalidSettings as invalid:
        return commands.refuse(invalid)
    if arguments.log_level is None and arguments.config is None:
        # One log line per second would bury the greeting.
        settings = replace(settings, log=replace(settings.log, level="warning"))
    shortened = read_settings(shorten_settings(arguments.speed))
    if settings.policy == Policy():
        settings = replace(settings, policy=shortened.policy)
    if settings.stuck == StuckPolicy():
        settings = replace(settings, stuck=shortened.stuck)
    if arguments.evictor == "webhook" and not settings.listen.admission:
        # Without TLS, which a configuration file could not set: only the demo calls it.
        listen = replace(settings.listen, admission=(Address("127.0.0.1", 0),))
        admission = AdmissionSettings(AdmissionMode.ENFORCE, (USER,))
        settings = replace(settings, listen=listen, admission=admission)
    cluster = Demo(
        lambda: datetime.now(UTC),
        seed=arguments.seed,
        speed=arguments.speed,
        vms=arguments.vms,
        nodes=arguments.nodes,
    )

    async def play(settings: Settings, stop: asyncio.Event) -> None:
        listening: asyncio.Future[app.Listening] = asyncio.get_running_loop().create_future()

        async def play_cluster() -> None:
            urls = await listening
            commands.say(commands.greet(urls, *cluster.example))
            asks = arguments.evictor == "plugin"
            held = arguments.evictor == "webhook"
            await cluster.run(
                urls.query[0] if asks else None,
                stop,
                webhook_url=urls.admission[0] if held else None,
            )

        async with cluster:
            try:
                async with asyncio.TaskGroup() as tasks:
                    playing = tasks.create_task(play_cluster())
                    try:
                        login = Login(url=cluster.url)
                        await app.run(settings, login, stop, on_listening=listening.set_result)
                    finally:
                        playing.cancel()
            except* Exception as group:  # noqa: BLE001 (commands.serve handles it)
                raise group.exceptions[0] from None

    return commands.serve(settings, play)


if __name__ == "__main__":
    sys.exit(main())
