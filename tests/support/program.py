"""The whole program as a process, as a user starts it."""

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from tests.cluster import PATIENCE, poll
from tests.support.documents import ROOT


LINES_SHOWN = 60
"""How many lines of the program's log a failing test shows."""
LEAKS = ("was never awaited", "Unclosed client session", "Unclosed connector")
"""What Python and aiohttp print if a coroutine was not awaited or an HTTP session not closed."""
ANYWHERE = {"listen": {"query": "127.0.0.1:0", "metrics": "127.0.0.1:0"}}


class Program:
    """`python -m exporter`, its log as events, and its two listeners."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path) -> None:
        self.process = process
        self._log = log
        self.query = ""
        self.metrics = ""
        self.admission = ""

    @property
    def output(self) -> str:
        """The program's output so far."""
        return self._log.read_text()

    def events(self, name: str | None = None) -> list[dict[str, Any]]:
        """The events of the log: all events, or only those with this name."""
        # The last line may be incomplete.
        written = self.output.rpartition("\n")[0].splitlines()
        lines = [json.loads(line) for line in written if line.startswith("{")]
        return [line for line in lines if name is None or line["event"] == name]

    async def listening(self) -> None:
        """Wait for the program's `started` event."""

        async def find_started() -> dict[str, Any] | None:
            if self.process.returncode is not None:
                raise RuntimeError(f"ended with {self.process.returncode}:\n{self.output}")
            return next(iter(self.events("started")), None)

        started = await poll(find_started, what="listening")
        self.query, self.metrics = started["query"][0], started["metrics"][0]
        self.admission = next(iter(started["admission"]), "")

    async def ready(self) -> None:
        """Wait until the program is ready."""
        await self.listening()
        await self.until("/readyz", lambda status, _: status == 200)

    async def get(self, path: str) -> tuple[int, Any]:
        """The status and the body of the query listener's answer to a GET."""
        return await _ask("GET", self.query + path)

    async def verdict(
        self, namespace: str, name: str, checkpoint: str | None = None, **fields: object
    ) -> dict[str, Any]:
        """The verdict on one VMI; `fields` go into the request."""
        candidate = {"namespace": namespace, "name": name}
        body: dict[str, object] = {"candidates": [candidate], **fields}
        if checkpoint is not None:
            body["checkpoint"] = checkpoint
        status, answer = await _ask("POST", self.query + "/v1/verdicts", body)
        assert status == 200, answer
        only: dict[str, Any] = answer["verdicts"][0]
        return only

    async def sample(self, metric: str, /, **labels: str) -> float:
        """The sum of a metric's series with these labels in a scrape; 0 if there is none."""
        _, text = await _ask("GET", self.metrics + "/metrics")
        total = 0.0
        for line in text.splitlines():
            series, _, value = line.rpartition(" ")
            if series.split("{")[0] == metric and all(
                f'{key}="{wanted}"' in series for key, wanted in labels.items()
            ):
                total += float(value)
        return total

    async def until(self, path: str, holds: Any, *, within: float = PATIENCE) -> Any:
        """Repeat the GET until `holds(status, body)` is true; returns this body."""

        async def attempt() -> tuple[Any] | None:
            try:
                status, body = await self.get(path)
            except aiohttp.ClientError:
                return None
            return (body,) if holds(status, body) else None

        return (await poll(attempt, within=within, what=path))[0]

    async def until_verdict(
        self, namespace: str, name: str, checkpoint: str, reason: str | None
    ) -> dict[str, Any]:
        """Repeat the request as a dry run until the verdict has this reason."""

        async def attempt() -> dict[str, Any] | None:
            verdict = await self.verdict(namespace, name, checkpoint, dryRun=True)
            return verdict if verdict["known"] and verdict["reason"] == reason else None

        return await poll(attempt, what=f"{namespace}/{name} {reason}")

    def resident(self) -> int:
        """The program's resident memory in bytes."""
        status = Path(f"/proc/{self.process.pid}/status").read_text(encoding="ascii")
        (line,) = (line for line in status.splitlines() if line.startswith("VmRSS:"))
        return int(line.split()[1]) * 1024

    def cpu(self) -> float:
        """The CPU seconds of the program's main thread."""
        ran = Path(f"/proc/{self.process.pid}/schedstat").read_text(encoding="ascii")
        return int(ran.split()[0]) / 1e9

    async def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal and wait for the exit code."""
        if self.process.returncode is None:
            self.process.send_signal(number)
        return await asyncio.wait_for(self.process.wait(), PATIENCE)


@asynccontextmanager
async def program(
    directory: Path,
    *arguments: str,
    config: Mapping[str, object] | None = None,
    environment: Mapping[str, str] | None = None,
    module: str = "exporter",
) -> AsyncIterator[Program]:
    """Run the program during the block, on its own ports. It is killed if it still runs then.

    `module` may be another one that runs the exporter.

    Fails if the program has printed one of `LEAKS`.
    """
    number = time.monotonic_ns()
    file = directory / f"config-{number}.yaml"
    file.write_text(yaml.safe_dump({**ANYWHERE, **(config or {})}))
    log = directory / f"log-{number}.jsonl"
    with log.open("wb") as sink:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-W", "error", "-m", module),
            *("--config", str(file), "--log-format", "json", "--log-level", "info"),
            *arguments,
            cwd=ROOT,
            stdout=sink,
            stderr=asyncio.subprocess.STDOUT,
            env={**os.environ, **(environment or {})},
        )
    running = Program(process, log)
    try:
        yield running
        assert not [leak for leak in LEAKS if leak in running.output]
    except BaseException:
        print(*running.output.splitlines()[-LINES_SHOWN:], sep="\n")  # pytest shows this
        raise
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def _ask(method: str, url: str, body: object = None) -> tuple[int, Any]:
    async with (
        aiohttp.ClientSession() as session,
        session.request(method, url, json=body) as response,
    ):
        text = await response.text()
        if response.content_type.endswith("json"):
            return response.status, json.loads(text)
        return response.status, text
