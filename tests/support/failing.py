"""Makes a running background task fail."""

import asyncio
from inspect import getcoroutinelocals
from typing import Any, cast

from exporter.tasks import keep_running


class Boom(Exception):
    """An error that nobody expects."""


def kept_tasks() -> "dict[asyncio.Task[Any], str]":
    """The tasks of this process that `keep_running` runs, with their names."""
    tasks = {task: cast("Any", task.get_coro()) for task in asyncio.all_tasks()}
    return {
        task: getcoroutinelocals(job)["name"]
        for task, job in tasks.items()
        if getattr(job, "cr_code", None) is keep_running.__code__
    }


def fail(task: "asyncio.Task[Any]") -> bool:
    """Raise `Boom` where the task waits; False if it pauses, or is about to go on."""
    if getattr(cast("Any", task.get_coro()).cr_await, "__qualname__", "") in {"", "sleep"}:
        return False
    waits_for = cast("Any", task)._fut_waiter  # noqa: SLF001 (there is no public way)
    assert isinstance(waits_for, asyncio.Future)
    if isinstance(waits_for, asyncio.Task):
        return fail(waits_for)
    if waits_for.done():
        return False
    waits_for.set_exception(Boom())
    return True
