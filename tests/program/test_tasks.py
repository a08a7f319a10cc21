"""Every background task of the running program goes on after an unexpected exception."""

import asyncio
import re
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any, cast

import aiohttp
import pytest
from structlog.testing import capture_logs

from exporter import app, tasks
from exporter.engine.facts.model import CLUSTER_RESOURCES, Resource
from exporter.kube.login import Login
from exporter.server.api.long_polls import TASK
from exporter.settings import read_settings
from tests.cluster import poll
from tests.program.waiting import wait_until
from tests.support.api_servers import SimulatedStage
from tests.support.certificates import write_certificate
from tests.support.failing import fail, kept_tasks


FAILURES = "kubevirt_eviction_exporter_task_failures_total"
OURS = Path(app.__file__).parent
KEPT = {
    *(f"watch_{resource}" for resource in (*CLUSTER_RESOURCES, Resource.EVICTIONS)),
    *(f"listener_{listener}" for listener in ("query", "metrics", "admission", "local")),
    *("certificates_admission", "history", "lease", "events", "counts"),
}


async def test_every_task_goes_on(
    simulated: SimulatedStage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each task that the program starts is kept running: it fails once, is counted, and goes on."""
    monkeypatch.setattr(tasks, "FIRST_PAUSE", 0.01)
    write_certificate(tmp_path, "localhost")
    pair = {"certFile": f"{tmp_path}/localhost.crt", "keyFile": f"{tmp_path}/localhost.key"}
    settings = read_settings(
        {
            "listen": {
                "query": "127.0.0.1:0",
                "metrics": "127.0.0.1:0",
                "admission": "127.0.0.1:0",
                "local": f"unix:{tmp_path}/local.sock",
            },
            "tls": {"admission": pair},
            "history": f"file:{tmp_path}/history",
            "events": True,
        }
    )
    before = asyncio.all_tasks()
    listening: asyncio.Future[app.Listening] = asyncio.get_running_loop().create_future()
    stop = asyncio.Event()
    with capture_logs() as logs:
        running = asyncio.create_task(
            app.run(settings, Login(url=simulated.url), stop, on_listening=listening.set_result)
        )
        try:
            urls = await listening
            await poll(lambda: is_ready(urls.query[0]), what="ready")
            async with aiohttp.ClientSession(urls.query[0]) as session:
                waiting = asyncio.create_task(wait_for_change(session))
                known = before | {running, waiting}
                for times in (1, 2):
                    await wait_until(partial(starts, known), what="the tasks")
                    for task in own_tasks(known):
                        await wait_until(partial(fail, task), what=f"{task} waits")
                    await poll(partial(have_failed, urls.metrics[0], times), what="the failures")
                waiting.cancel()
        finally:
            stop.set()
            await running

    failed = Counter(log["task"] for log in logs if log["event"] == "task_failed")
    assert failed == Counter(2 * [*KEPT, TASK])


async def is_ready(url: str) -> bool:
    """Whether the exporter is ready."""
    async with aiohttp.ClientSession(url) as session, session.get("/readyz") as answer:
        return answer.status == 200


async def have_failed(url: str, times: int) -> bool:
    """Whether every task has failed this often, according to the metrics."""
    async with aiohttp.ClientSession(url) as session, session.get("/metrics") as answer:
        text = await answer.text()
    counted = re.findall(rf'{FAILURES}\{{task="(\w+)"\}} (\d+)', text)
    return {name for name, count in counted if int(count) == times} == KEPT | {TASK}


async def wait_for_change(session: aiohttp.ClientSession) -> None:
    """Wait for a change of the blocked set, which does not come."""
    async with session.get("/v1/blocked") as answer:
        etag = answer.headers["ETag"]
    async with session.get("/v1/blocked?wait=60", headers={"If-None-Match": etag}) as answer:
        raise AssertionError(await answer.text())


def own_tasks(known: "set[asyncio.Task[Any]]") -> "list[asyncio.Task[Any]]":
    """The other tasks that run our code, without `Informers.run`, which only waits for its own."""
    tasks = {task: cast("Any", task.get_coro()) for task in asyncio.all_tasks() - known}
    return [
        task
        for task, job in tasks.items()
        if hasattr(job, "cr_code")
        and OURS in Path(job.cr_code.co_filename).parents
        and job.__qualname__ != "Informers.run"
    ]


def starts(known: "set[asyncio.Task[Any]]") -> bool:
    """Whether all tasks run: those of `keep_running`, and that of the long poll."""
    kept = kept_tasks()
    others = [task.get_coro() for task in own_tasks(known) if task not in kept]
    names = {getattr(job, "__qualname__", "") for job in others}
    return set(kept.values()) == KEPT and names == {"LongPolls._watch"}
