"""`python -m exporter`: the only place that touches arguments, signals and the exit code."""

import asyncio
import sys
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial

from exporter import app, commands
from exporter.demo import Demo, shorten_settings
from exporter.kube import Login
from exporter.model import Policy, StuckPolicy
from exporter.settings import InvalidSettings, Settings, read_settings


def main() -> int:
    """Run the command that was typed and return its exit code."""
    arguments = commands.parse(sys.argv[1:])
    if arguments.command == "check":
        return commands.check(arguments.config)
    try:
        settings = commands.read_settings_for(arguments)
    except InvalidSettings as invalid:
        return commands.refuse(invalid)
    if arguments.command == "demo":
        demo = Demo(
            lambda: datetime.now(UTC),
            seed=arguments.seed,
            speed=arguments.speed,
            vms=arguments.vms,
            nodes=arguments.nodes,
        )
        shortened = read_settings(shorten_settings(arguments.speed))
        if settings.policy == Policy():
            settings = replace(settings, policy=shortened.policy)
        if settings.stuck == StuckPolicy():
            settings = replace(settings, stuck=shortened.stuck)
        return commands.serve(settings, partial(play, demo=demo))
    return commands.serve(
        settings, partial(commands.watch_cluster, kubeconfig=arguments.kubeconfig)
    )


async def play(settings: Settings, stop: asyncio.Event, *, demo: Demo) -> None:
    """`demo`: the main job on a simulated cluster, and that cluster's descheduler asking it."""
    listening: asyncio.Future[app.Listening] = asyncio.get_running_loop().create_future()

    async def play_cluster() -> None:
        urls = await listening
        commands.say(commands.greet(urls, *demo.example))
        await demo.run(urls.query[0], stop)

    async with demo:
        try:
            async with asyncio.TaskGroup() as tasks:
                playing = tasks.create_task(play_cluster())
                try:
                    login = Login(url=demo.url)
                    await app.run(settings, login, stop, on_listening=listening.set_result)
                finally:
                    playing.cancel()
        except* Exception as group:  # noqa: BLE001 (told apart again by commands.serve)
            raise group.exceptions[0] from None


if __name__ == "__main__":
    sys.exit(main())
