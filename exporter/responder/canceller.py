"""Cancels evacuations whose requesters have withdrawn: KubeVirt itself goes on for ever.

KubeVirt's marker is removed once for each Eviction. A VMIM that exists already is left to end.
"""

import asyncio
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass

import structlog

from exporter.engine.evacuations.advice import may_cancel
from exporter.engine.evacuations.conditions import read_conditions
from exporter.engine.evacuations.diagnosis import Diagnosis
from exporter.engine.facts.evidence import Evidence
from exporter.engine.facts.model import Instant, Seconds
from exporter.engine.facts.policy import StuckPolicy
from exporter.engine.store.store import Store
from exporter.health import Health
from exporter.kube.client import Absent, ApiError, ApiServer, Conflict
from exporter.kube.lease import Lease
from exporter.logs import Trouble
from exporter.words.commands import write_cancel_path


PAUSE: Seconds = 1.0
RETRY: Seconds = 60.0
"""The pause after a request that failed."""

log = structlog.stdlib.get_logger()


@dataclass
class Canceller:
    """Cancels, while `lease` is held, what nobody asks for any more."""

    api: ApiServer
    store: Store
    health: Health
    stuck: StuckPolicy
    lease: Lease
    _: KW_ONLY
    clock: Callable[[], Instant]
    monotonic: Callable[[], Seconds] = time.monotonic

    def __post_init__(self) -> None:
        self._not_before: dict[str, Seconds] = {}
        """When to try again, by the Eviction's UID; never, if it was cancelled."""
        self._trouble = Trouble("evacuation_not_cancelled")

    async def run(self) -> None:
        """Cancel until cancelled."""
        while True:
            await self.cancel_withdrawn()
            await asyncio.sleep(PAUSE)

    async def cancel_withdrawn(self) -> None:
        """Cancel each evacuation whose requesters have withdrawn, unless that is done."""
        if not (self.lease.held and self.health.ready):
            return
        withdrawn = [*self._find_withdrawn()]
        uids = {uid for uid, _, _ in withdrawn}
        self._not_before = {uid: at for uid, at in self._not_before.items() if uid in uids}
        for uid, evidence, diagnosis in withdrawn:
            if self.monotonic() >= self._not_before.get(uid, -math.inf):
                self._not_before[uid] = self.monotonic() + RETRY
                if await self._cancel(evidence, diagnosis):
                    self._not_before[uid] = math.inf

    def _find_withdrawn(self) -> Iterator[tuple[str, Evidence, Diagnosis]]:
        now = self.clock()
        conditions = read_conditions(self.store, self.stuck, self.health.read_trust(now), now)
        for evidence in [*self.store.evacuating(conditions.trust)]:
            eviction = evidence.eviction
            if eviction is None or not eviction.is_withdrawn or not may_cancel(evidence):
                continue
            diagnosis = conditions.diagnose(evidence)
            if diagnosis is None or diagnosis.last_seen is not None or diagnosis.tainted:
                continue
            if diagnosis.leftover and diagnosis.withdrawn:
                yield eviction.uid, evidence, diagnosis

    async def _cancel(self, evidence: Evidence, diagnosis: Diagnosis) -> bool:
        vmi, attempt = evidence.vmi, diagnosis.attempt
        body = {"evacuationNodeName": diagnosis.node}
        try:
            await self.api.put(write_cancel_path(vmi.namespace, vmi.name), body)
        except (Absent, Conflict):
            return True  # the VMI is gone, or its marker is
        except ApiError as error:
            self._trouble.record(f"{vmi.namespace}/{vmi.name}: {error}")
            return False
        self._trouble.end()
        log.info(
            "evacuation_cancelled",
            namespace=vmi.namespace,
            name=vmi.name,
            node=diagnosis.node,
            withdrawn=diagnosis.withdrawn,
            still_running="" if attempt is None else attempt.name,
        )
        return True
