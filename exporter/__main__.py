"""`python -m exporter`: the only place that touches arguments, signals and the exit code."""

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
from exporter.settings import InvalidSettings, Settings, read_settings


def main() -> int:
    """Run the command that was typed and return its exit code."""
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
    """`record` and `replay`, of a cluster or of one that is made up."""
    if arguments.command == "replay":
        return commands.replay(
            arguments, timer=time.perf_counter, simulate=lambda: simulate(arguments)
        )
    if arguments.scenario is None:
        return commands.record(arguments, clock=time.time)
    lines, _, _ = simulate(arguments)
    return commands.write_recording(arguments.output, lines)


def simulate(arguments: argparse.Namespace) -> tuple[Iterable[bytes], Instant, Seconds]:
    """The lines of the scenario, when it begins and how long it lasts."""
    from exporter.demo.week import BEGAN, Week

    week = Week(arguments.seed, arguments.days)
    return week.lines(), BEGAN.timestamp(), arguments.days * 86_400


def demo(arguments: argparse.Namespace) -> int:
    """`demo`: the main job on a simulated cluster, and that cluster's descheduler asking it."""
    from exporter import app
    from exporter.demo import Demo, shorten_settings
    from exporter.kube.client import Login

    try:
        settings = commands.read_settings_for(arguments)
    except InvalidSettings as invalid:
        return commands.refuse(invalid)
    if arguments.log_level is None and arguments.config is None:
        # Because an event a second would bury the greeting.
        settings = replace(settings, log=replace(settings.log, level="warning"))
    shortened = read_settings(shorten_settings(arguments.speed))
    if settings.policy == Policy():
        settings = replace(settings, policy=shortened.policy)
    if settings.stuck == StuckPolicy():
        settings = replace(settings, stuck=shortened.stuck)
    cluster = Demo(
        lambda: datetime.now(UTC),
        seed=arguments.seed,
        speed=arguments.speed,
        vms=arguments.vms,
        nodes=arguments.nodes,
        progress=lambda built: show_progress(built, arguments.vms),
    )

    async def play(settings: Settings, stop: asyncio.Event) -> None:
        listening: asyncio.Future[app.Listening] = asyncio.get_running_loop().create_future()

        async def play_cluster() -> None:
            urls = await listening
            commands.say(commands.greet(urls, *cluster.example))
            await cluster.run(urls.query[0], stop)

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
            except* Exception as group:  # noqa: BLE001 (told apart again by commands.serve)
                raise group.exceptions[0] from None

    return commands.serve(settings, play)


def show_progress(built: int, vms: int) -> None:
    """Say how far a large simulated cluster is."""
    if built % 1000 == 0:
        commands.say(f"simulated cluster: {built:,} of {vms:,} VMs created")


if __name__ == "__main__":
    sys.exit(main())
