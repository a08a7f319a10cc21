"""Runs all reflectors. Knows when the first lists are complete, and which resources are visible."""

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from functools import partial

from exporter.engine.facts.changes import NodesSeen
from exporter.engine.facts.model import Instant, Resource
from exporter.engine.facts.policy import Policy
from exporter.engine.store.store import Store
from exporter.errors import CommandFailed, Exit
from exporter.health import Health, Restart, Watched
from exporter.kube.client import ApiServer
from exporter.kube.watch.feed import NO_OVERRIDES, ChangeListener
from exporter.kube.watch.reflector import KubeVirtMissing, Reflector
from exporter.settings import KubeSettings
from exporter.tasks import keep_running


class NotSynced(CommandFailed):
    """The VMIs could not be listed in time."""

    exit_code = Exit.NOT_SYNCED


@dataclass
class Informers:
    """Runs a reflector for each watch in `health`.

    `settled` is called after every complete list, and when a resource is rejected. `failures`
    counts unexpected exceptions by task.
    """

    api: ApiServer
    store: Store
    health: Health
    settings: KubeSettings
    _: KW_ONLY
    clock: Callable[[], Instant]
    rng: random.Random
    settled: Callable[[], None]
    reflector: type[Reflector] = Reflector
    listener: ChangeListener | None = None
    policy: Policy = NO_OVERRIDES
    failures: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._synced = asyncio.Event()
        self._reflectors = [
            self.reflector(
                self.api,
                watched,
                self.store,
                self.settings,
                clock=self.clock,
                rng=self.rng,
                settled=self._record_settled,
                is_optional=partial(self._is_seen_elsewhere, watched),
                listener=self.listener,
                policy=self.policy,
            )
            for watched in self.health.watched
        ]

    async def run(self) -> None:
        """List and watch everything until cancelled. Raises `NotSynced` or `KubeVirtMissing`."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for reflector in self._reflectors:
                    name = f"watch_{reflector.watched.resource}"
                    fatal = (KubeVirtMissing,)
                    tasks.create_task(keep_running(name, reflector.run, self.failures, fatal=fatal))
                tasks.create_task(self._await_sync())
        except* (NotSynced, KubeVirtMissing) as group:
            raise group.exceptions[0] from None

    async def _await_sync(self) -> None:
        while not self._synced.is_set():
            try:
                async with asyncio.timeout(self.settings.sync_timeout):
                    await self._synced.wait()
            except TimeoutError:
                vmis = self.health.of(Resource.VMIS)
                is_absent = any(watch.restarts[Restart.ABSENT] for watch in vmis)
                if is_absent and self.settings.wait_for_kubevirt:
                    continue
                within = f"within {self.settings.sync_timeout:g} s (kube.syncTimeout)"
                raise self.not_synced(within) from None

    def not_synced(self, limit: str) -> NotSynced:
        """The error for VMIs that were not listed in time, with the reasons."""
        vmis = self.health.of(Resource.VMIS)
        troubles = sorted({watch.trouble for watch in vmis if not watch.synced and watch.trouble})
        why = "; ".join(troubles) or "the list did not end"
        return NotSynced(f"virtualmachineinstances were not synced {limit}: {why}")

    def _is_seen_elsewhere(self, watched: Watched) -> bool:
        """Whether the same resource is visible in another namespace."""
        others = (watch for watch in self.health.of(watched.resource) if watch is not watched)
        return any(other.synced and not other.rejected for other in others)

    def _record_settled(self) -> None:
        """Note that a resource was listed or rejected."""
        health = self.health
        nodes_seen = health.is_seen(Resource.NODES)
        if nodes_seen or health.is_rejected(Resource.NODES):
            self.store.apply(NodesSeen(nodes_seen), self.clock())
        vmis = health.of(Resource.VMIS)
        if health.is_seen(Resource.VMIS) and all(watch.settled for watch in vmis):
            self._synced.set()
        self.settled()
