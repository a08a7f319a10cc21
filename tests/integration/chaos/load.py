"""Clients that keep sending requests, like a descheduler that knows two replicas."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from itertools import cycle

import aiohttp

from tests.integration.chaos.replica import Replica


PATIENCE = aiohttp.ClientTimeout(total=20)
_CLIENTS = 3
_PAUSE = 0.02


@asynccontextmanager
async def load(
    replicas: Callable[[], Sequence[Replica]], candidates: Iterable[tuple[str, str]]
) -> AsyncIterator[Counter[str]]:
    """Ask both replicas in turn during the block, and count the requests that were `answered`.

    A request without an answer is sent once to the other replica (`retried`). If that replica does
    not answer either, the request has `failed`.
    """
    counted: Counter[str] = Counter()
    asked = [{"namespace": namespace, "name": name} for namespace, name in candidates]
    async with aiohttp.ClientSession(timeout=PATIENCE) as session:

        async def answered(replica: Replica) -> bool:
            try:
                url = f"{replica.now.query}/v1/verdicts"
                async with session.post(url, json={"candidates": asked, "dryRun": True}) as answer:
                    return answer.status == 200 and len((await answer.json())["verdicts"]) > 0
            except (aiohttp.ClientError, TimeoutError):
                return False

        async def ask(offset: int) -> None:
            for turn in cycle(range(2)):
                await asyncio.sleep(_PAUSE)
                known = replicas()
                first = known[(turn + offset) % len(known)]
                if await answered(first):
                    counted["answered"] += 1
                    continue
                counted["retried"] += 1
                other = next((replica for replica in replicas() if replica is not first), first)
                counted["answered" if await answered(other) else "failed"] += 1

        clients = [asyncio.create_task(ask(number)) for number in range(_CLIENTS)]
        try:
            yield counted
        finally:
            for client in clients:
                client.cancel()
            for done in await asyncio.gather(*clients, return_exceptions=True):
                assert isinstance(done, asyncio.CancelledError), done
