"""A running watch for tests, with its store and health."""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from exporter.engine.facts.changes import NoticeKind
from exporter.engine.facts.model import Instant, Resource
from exporter.engine.facts.policy import Policy, Verdict
from exporter.engine.facts.trust import Trust
from exporter.engine.store.store import Store
from exporter.health import Health, list_watches
from exporter.kube.client import ApiServer
from exporter.kube.login import Login
from exporter.kube.watch.informers import Informers
from exporter.kube.watch.reflector import Reflector
from exporter.settings import KubeSettings
from tests.cluster import PATIENCE
from tests.support.verdicts import decide


QUICK = KubeSettings(sync_timeout=PATIENCE, read_timeout=20.0, rejected_retry=0.3)


class Paging(Reflector):
    """A reflector that never asks for a streamed list."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._streams_lists = False


@dataclass
class Following:
    """A running watch, its store and its health; `changes` is notified of every change."""

    store: Store
    health: Health
    running: "asyncio.Task[None]"
    changes: asyncio.Condition

    async def until(
        self, condition: Callable[[], object], *, what: str, wait: float = PATIENCE
    ) -> None:
        """Wait until the condition holds; it is checked after every change."""
        deadline = time.monotonic() + wait
        while not condition():
            if self.running.done():
                await self.running
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what}: not within {wait:g} s; {self.health}")
            async with self.changes:
                try:
                    async with asyncio.timeout(0.1):
                        await self.changes.wait()
                except TimeoutError:
                    pass

    async def ready(self) -> None:
        """Wait until every resource is synced or forbidden."""
        await self.until(lambda: self.health.ready, what="ready")

    async def knows(self, namespace: str, *names: str) -> None:
        """Wait until exactly these VMIs of a namespace are known."""
        wanted = set(names)
        await self.until(
            lambda: self.names(namespace) == wanted,
            what=f"VMIs {sorted(wanted)} in {namespace}",
        )

    def names(self, namespace: str) -> set[str]:
        """The names of the known VMIs in a namespace."""
        known = (evidence.vmi for evidence in self.store.all_evidence(Trust()))
        return {vmi.name for vmi in known if vmi.namespace == namespace}

    def verdict(self, namespace: str, name: str, now: Instant) -> Verdict | None:
        """The verdict under the default policy."""
        evidence = self.store.evidence(namespace, name, self.health.read_trust(now))
        return None if evidence is None else decide(evidence, Policy(), now)

    def restarts(self, resource: Resource) -> dict[str, int]:
        """How often the watches of a resource have restarted, by reason."""
        counted: dict[str, int] = {}
        for watched in self.health.of(resource):
            for reason, times in watched.restarts.items():
                counted[str(reason)] = counted.get(str(reason), 0) + times
        return counted

    def invalid_objects(self, resource: Resource) -> int:
        """The number of objects of a resource that could not be read."""
        return sum(watch.invalid_objects for watch in self.health.of(resource))


@asynccontextmanager
async def following(
    login: Login,
    *,
    namespaces: tuple[str, ...] = (),
    settings: KubeSettings = QUICK,
    reflector: type[Reflector] = Reflector,
    **changed: object,
) -> AsyncIterator[Following]:
    """Watch during the block; `changed` overrides single `settings`."""
    kube = replace(settings, **changed)  # type: ignore[arg-type]
    store = Store(endings_kept=Policy().endings_kept)
    health = Health(kube.stale_after, kube.dead_after, list_watches(namespaces))
    condition = asyncio.Condition()
    notifying: set[asyncio.Task[None]] = set()

    async def wake_waiting() -> None:
        async with condition:
            condition.notify_all()

    def notify() -> None:
        task = asyncio.get_running_loop().create_task(wake_waiting())
        notifying.add(task)
        task.add_done_callback(notifying.discard)

    store.subscribe(lambda _: notify(), *NoticeKind)
    async with ApiServer(login, read_timeout=kube.read_timeout) as api:
        watch = Informers(
            api,
            store,
            health,
            kube,
            clock=time.time,
            settled=notify,
            rng=random.Random(1),
            reflector=reflector,
        )
        running = asyncio.create_task(watch.run())
        try:
            yield Following(store, health, running, condition)
        finally:
            running.cancel()
            await asyncio.gather(running, *notifying, return_exceptions=True)
