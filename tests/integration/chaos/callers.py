"""Callers of every kind, which call the exporter again and again."""

import asyncio
import random
import ssl
import time
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from exporter.demo.store import PODS, ObjectStore
from tests.support.admission import PATH
from tests.support.churn import NAMESPACES
from tests.support.program import Program
from tests.support.reviews import a_review


LONGEST = aiohttp.ClientTimeout(total=60)
ANSWERS = (200, 304, 404)


@dataclass
class Callers:
    """The callers of the exporter, and what they were answered."""

    exporter: Program
    trust: ssl.SSLContext
    rng: random.Random
    names: int
    answered: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    slowest: float = 0.0

    @asynccontextmanager
    async def calling(self, store: ObjectStore) -> AsyncIterator[None]:
        """Let all callers call during the block."""
        jobs = [self.scrape(), self.ask(), self.leave(), *(self.review(store) for _ in range(2))]
        jobs += [self.wait_for_change() for _ in range(5)]
        async with background(*jobs):
            yield

    async def scrape(self) -> None:
        """Scrape."""
        while True:
            await self._ask("GET", self.exporter.metrics + "/metrics", "scrape")
            await asyncio.sleep(5)

    async def ask(self) -> None:
        """Ask for verdicts as a descheduler does."""
        while True:
            body = {"candidates": [self._candidate() for _ in range(100)]}
            await self._ask("POST", self.exporter.query + "/v1/verdicts", "verdicts", json=body)
            for path in ("evacuations", "status", "vmis/{namespace}/{name}"):
                url = f"{self.exporter.query}/v1/" + path.format_map(self._candidate())
                await self._ask("GET", url, path)
            await asyncio.sleep(3)

    async def wait_for_change(self) -> None:
        """Wait for a change of the blocked set, again and again."""
        etag = ""
        async with aiohttp.ClientSession(timeout=LONGEST) as session:
            while True:
                headers = {"If-None-Match": etag} if etag else {}
                url = f"{self.exporter.query}/v1/blocked?wait=30"
                with self._counting("long poll") as counted:
                    async with session.get(url, headers=headers) as answer:
                        await answer.read()
                        etag = answer.headers.get("ETag", "")
                        counted.append(answer.status)
                await asyncio.sleep(self.rng.uniform(1, 3))

    async def leave(self) -> None:
        """Ask for everything, and leave before the answer."""
        while True:
            for path in ("/v1/blocked", "/v1/blocked?wait=30", "/v1/evacuations"):
                host, _, port = self.exporter.query.removeprefix("http://").rpartition(":")
                _, writer = await asyncio.open_connection(host, int(port))
                writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
                await writer.drain()
                writer.transport.abort()
                self.answered["left"] += 1
            await asyncio.sleep(3)

    async def review(self, store: ObjectStore) -> None:
        """Send reviews of evictions of launcher pods, each on a new connection."""
        connector = aiohttp.TCPConnector(ssl=self.trust, force_close=True)
        async with aiohttp.ClientSession(connector=connector, timeout=LONGEST) as session:
            while True:
                keys = store.caches[PODS].keys
                if keys:
                    namespace, _, name = self.rng.choice(keys).partition("/")
                    sent = a_review(name=name, namespace=namespace)
                    url = self.exporter.admission + PATH
                    await self._ask("POST", url, "review", session=session, json=sent)
                await asyncio.sleep(0.2)

    def _candidate(self) -> dict[str, str]:
        number = self.rng.randrange(self.names)
        return {"namespace": NAMESPACES[number % len(NAMESPACES)], "name": f"vm{number}"}

    async def _ask(
        self,
        method: str,
        url: str,
        what: str,
        *,
        session: aiohttp.ClientSession | None = None,
        **options: Any,
    ) -> None:
        if session is None:
            async with aiohttp.ClientSession(timeout=LONGEST) as own:
                await self._ask(method, url, what, session=own, **options)
            return
        began = time.perf_counter()
        with self._counting(what) as counted:
            async with session.request(method, url, **options) as answer:
                await answer.read()
                counted.append(answer.status)
        self.slowest = max(self.slowest, time.perf_counter() - began)

    @contextmanager
    def _counting(self, what: str) -> Iterator[list[int]]:
        """Count the request of the block, which adds the status of its answer to the list."""
        statuses: list[int] = []
        try:
            yield statuses
        except TimeoutError:
            self.answered[f"{what} too late"] += 1
        except (aiohttp.ClientError, OSError) as error:
            self.failed[f"{what}: {error!r}"] += 1
        for status in statuses:
            if status in ANSWERS:
                self.answered[what] += 1
            else:
                self.failed[f"{what}: {status}"] += 1


@asynccontextmanager
async def background(*jobs: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run the jobs during the block; an exception of one of them ends the block."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(job) for job in jobs]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
