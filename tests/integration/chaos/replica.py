"""The exporter as a process that a test can kill, freeze, restart and ask."""

import asyncio
import signal
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, TypeAlias

import aiohttp

from tests.cluster import PATIENCE, poll
from tests.cluster.processes import freeze, state_of
from tests.support.program import Program, program


CHECKPOINTS = ("filter", "preEviction", None)
Answers: TypeAlias = dict[str, Any]
"""The compared answers about one VMI: three verdicts, and its evacuation if it has one."""


class Down(aiohttp.ClientError):
    """No process is running at the moment."""


class Replica:
    """One replica over all its restarts, with the same settings; `lives` counts the starts."""

    def __init__(
        self, directory: Path, *arguments: str, config: Mapping[str, object], name: str = "replica"
    ) -> None:
        self.name = name
        self.lives = 0
        self._directory = directory
        self._arguments = arguments
        self._config = config
        self._stack = AsyncExitStack()
        self._now: Program | None = None

    @property
    def now(self) -> Program:
        """The running process. Raises `Down` if there is none, because its port may be reused."""
        if self._now is None:
            raise Down(self.name)
        return self._now

    async def start(self) -> Program:
        """Start the process; it listens, but may not be ready yet."""
        starting = program(self._directory, *self._arguments, config=self._config)
        begun = await self._stack.enter_async_context(starting)
        await begun.listening()
        self.lives += 1
        self._now = begun
        return begun

    async def kill(self) -> None:
        """Send SIGKILL, wait until the process has ended, and check its exit code."""
        killed, self._now = self.now, None
        assert await killed.end(signal.SIGKILL) == -signal.SIGKILL
        assert state_of(killed.process.pid) is None

    async def freeze(self) -> None:
        """Freeze the process with SIGSTOP; it keeps its connections and its state."""
        freeze(self.now.process.pid)

    def thaw(self) -> None:
        """Continue the process with SIGCONT."""
        self.now.process.send_signal(signal.SIGCONT)

    async def close(self) -> None:
        """End the process if it still runs."""
        await self._stack.aclose()


@asynccontextmanager
async def replicas(*several: Replica) -> AsyncIterator[None]:
    """Run these replicas during the block; all are ready at its beginning."""
    async with AsyncExitStack() as stack:
        for replica in several:
            stack.push_async_callback(replica.close)
        await asyncio.gather(*(replica.start() for replica in several))
        await asyncio.gather(*(replica.now.ready() for replica in several))
        yield


async def ask(exporter: Program, candidates: Iterable[tuple[str, str]]) -> dict[str, Answers]:
    """The answers about these VMIs, by name, without the fields that change with the time."""
    asked = [{"namespace": namespace, "name": name} for namespace, name in candidates]
    answers: dict[str, Answers] = {candidate["name"]: {} for candidate in asked}
    async with aiohttp.ClientSession(exporter.query, raise_for_status=True) as session:
        for checkpoint in CHECKPOINTS:
            body: dict[str, object] = {"candidates": asked, "dryRun": True}
            if checkpoint is not None:
                body["checkpoint"] = checkpoint
            async with session.post("/v1/verdicts", json=body) as response:
                for verdict in (await response.json())["verdicts"]:
                    del verdict["retryAfterSeconds"]
                    answers[verdict["name"]][f"verdict({checkpoint})"] = verdict
        async with session.get("/v1/evacuations") as response:
            for evacuation in (await response.json())["evacuations"]:
                if (
                    evacuation["name"] in answers
                    and evacuation["namespace"] == asked[0]["namespace"]
                ):
                    compared = ("evacuationNodeName", "requestedAt", "failedAttempts", "stuck")
                    answers[evacuation["name"]]["evacuation"] = {
                        key: evacuation[key] for key in compared
                    }
    return answers


def differences(left: Mapping[str, Answers], other: Mapping[str, Answers]) -> list[str]:
    """The differences between the answers of two replicas, one line each."""
    return [
        f"{name} {key}: {left[name].get(key)} and {other[name].get(key)}"
        for name in left
        for key in sorted(left[name].keys() | other[name].keys())
        if left[name].get(key) != other[name].get(key)
    ]


def instant(text: str) -> float:
    """Convert a timestamp of the API to seconds."""
    return datetime.fromisoformat(text).timestamp()


async def until_alike(
    exporter: Program,
    other: Program,
    candidates: Iterable[tuple[str, str]],
    *,
    within: float = PATIENCE,
) -> dict[str, Answers]:
    """Wait until two replicas answer the same; returns the answers, or fails with what differs."""
    names = list(candidates)
    last: list[str] = []

    async def alike() -> tuple[dict[str, Answers]] | None:
        left, right = await asyncio.gather(ask(exporter, names), ask(other, names))
        last[:] = differences(left, right)
        return None if last else (left,)

    try:
        return (await poll(alike, within=within, what="the same answers"))[0]
    except TimeoutError:
        raise AssertionError("\n".join(["the answers differ:", *last])) from None


async def until_event(
    exporter: Program, name: str, *, within: float = PATIENCE, **fields: object
) -> dict[str, Any]:
    """Wait until the log has an event with this name and these fields; returns the last one."""

    async def find_last() -> dict[str, Any] | None:
        fitting = [e for e in exporter.events(name) if fields.items() <= e.items()]
        return fitting[-1] if fitting else None

    return await poll(find_last, within=within, what=f"{name} {fields} in the log")
