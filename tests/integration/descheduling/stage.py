"""The cluster of the scenes, on which deschedulers and exporters start and stop."""

import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.cluster.audit import read_audit
from tests.cluster.users import kubeconfig
from tests.integration.descheduling.descheduler import (
    USER,
    Bounds,
    Descheduler,
    Limits,
    Verdicts,
    build_policy,
)
from tests.integration.descheduling.ledger import Ledger, write_ledger
from tests.integration.descheduling.world import World
from tests.support.program import Program, program


EVERY = 1.5
FULL = Bounds(20, 30)
AMPLE = Limits(per_node=10, in_all=20)
LONG = {"policy": {"migrationCooldown": "1h"}}


@dataclass
class Stage:
    """The cluster, the kubeconfigs of descheduler and exporter, and a folder for their files."""

    world: World
    kubeconfig: Path
    folder: Path
    numbers: "itertools.count[int]"

    def descheduler(
        self, verdicts: Verdicts | None, *, bounds: Bounds = FULL, limits: Limits = AMPLE
    ) -> Descheduler:
        """A descheduler that has not started yet."""
        policy = build_policy(verdicts, bounds=bounds, limits=limits)
        folder = self.folder / f"descheduler-{next(self.numbers)}"
        return Descheduler(folder, self.kubeconfig, policy, interval=EVERY)

    @asynccontextmanager
    async def exporter(self, url: str | None = None, **config: Any) -> AsyncIterator[Program]:
        """Start an exporter with a long cooldown and its own API server URL; do not wait for it."""
        control = self.world.control
        file = self.folder / f"exporter-{next(self.numbers)}.kubeconfig"
        login = kubeconfig(file, url or control.api.url, control.exporter)
        arguments = ("--kubeconfig", str(login))
        async with program(self.folder, *arguments, config=LONG | config) as running:
            yield running

    def ledger(self, namespace: str) -> Ledger:
        """The evictions and migrations of a namespace."""
        return write_ledger(namespace, self.world.control.api.audit)

    def evicted(self, namespace: str) -> set[str]:
        """The VMs of a namespace that the descheduler has evicted."""
        return {eviction.vm for eviction in self.ledger(namespace).evictions}

    def evicted_pods(self, namespace: str) -> set[str]:
        """The pods of a namespace that the descheduler has evicted, without those of VMs."""
        return {
            entry.name
            for entry in read_audit(self.world.control.api.audit)
            if (entry.namespace, entry.user, entry.code) == (namespace, USER, 201)
        }
