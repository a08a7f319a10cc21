"""Background tasks go on after an unexpected exception."""

import asyncio
from collections import Counter

import pytest
from structlog.testing import capture_logs

from exporter import tasks
from exporter.tasks import keep_running


class Missing(Exception):
    """An exception that ends the program."""


async def test_a_task_goes_on_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception is logged and counted with the task's name, and the job runs again."""
    monkeypatch.setattr(tasks, "FIRST_PAUSE", 0.001)
    failures = Counter[str]()
    raised: list[Exception] = [ValueError("odd"), RecursionError(), Missing()]

    async def job() -> None:
        raise raised.pop(0)

    with capture_logs() as logs, pytest.raises(Missing):
        await keep_running("renewal", job, failures, fatal=(Missing,))

    assert failures == {"renewal": 2}
    assert [(log["event"], log["task"], log["log_level"]) for log in logs] == [
        ("task_failed", "renewal", "error")
    ] * 2
    assert all(log["exc_info"] for log in logs)


async def test_the_pause_after_a_failure_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that fails again and again runs less and less often, down to once a minute."""
    failures, pauses = Counter[str](), list[float]()

    async def sleep(pause: float) -> None:
        pauses.append(pause)
        if len(pauses) == 8:
            raise asyncio.CancelledError

    async def job() -> None:
        assert "lease" in failures
        raise ValueError

    monkeypatch.setattr(asyncio, "sleep", sleep)
    with pytest.raises(asyncio.CancelledError):
        await keep_running("lease", job, failures)

    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60]
