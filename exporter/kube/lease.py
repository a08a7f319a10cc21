"""Leader election by a Lease: its holder is the replica that writes Events about evacuations.

The rules are those of client-go (`tools/leaderelection`). The holder renews the Lease. A candidate
takes a Lease that has not changed for long enough. It measures this by its own monotonic clock, so
clocks of different machines are never compared. Every write depends on a resourceVersion. A holder
stops writing well before another replica can take the Lease, even if its process was frozen.

We do not use the leader election of kubernetes_asyncio: it ends at the first connection error,
writes local time as UTC, measures by the wall clock, and does not release the Lease at the end.
"""

import asyncio
import math
import random
import time
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass

import msgspec
import structlog
from msgspec import Struct, field

from exporter.engine.facts.model import Instant, Resource, Seconds
from exporter.errors import MALFORMED
from exporter.kube.client import Absent, ApiError, ApiServer, Conflict, Unsupported
from exporter.kube.objects.instants import write_micro_time
from exporter.kube.objects.wire import Metadata
from exporter.logs import Trouble
from exporter.text import clean


DURATION: Seconds = 15.0
"""As in client-go."""
HELD_FOR = 2 / 3
"""The part of the duration for which a holder relies on its last renewal, as in client-go."""
RENEWED_EVERY = 1 / 3
"""The part of the duration after which the holder renews."""
TAKEN_AFTER = 0.8
"""The part of the duration after which a candidate takes an unchanged Lease. By then its holder
does not write any more (`HELD_FOR`), and the next holder can still write within the duration."""
POLLED_EVERY = 1 / 8
"""The part of the duration after which a candidate polls, and a holder retries a renewal."""

SHORTEST_PAUSE: Seconds = 0.01

log = structlog.stdlib.get_logger()


class _Spec(Struct):
    holderIdentity: str | None = None  # noqa: N815
    leaseDurationSeconds: int | None = None  # noqa: N815
    acquireTime: str | None = None  # noqa: N815
    renewTime: str | None = None  # noqa: N815
    leaseTransitions: int | None = None  # noqa: N815


class _Lease(Struct):
    metadata: Metadata = field(default_factory=Metadata)
    spec: _Spec = field(default_factory=_Spec)


@dataclass
class Lease:
    """A candidate for the Lease `namespace/name`. It may write while `held` is true.

    `monotonic` measures durations, and `wall` gives the times that are written into the Lease.
    """

    api: ApiServer
    namespace: str
    name: str
    _: KW_ONLY
    identity: str
    rng: random.Random
    wall: Callable[[], Instant]
    duration: Seconds = DURATION
    monotonic: Callable[[], Seconds] = time.monotonic

    def __post_init__(self) -> None:
        self._held_until: Seconds | None = None
        self._seen: _Lease | None = None
        self._seen_at: Seconds = 0.0
        self._trouble = Trouble("lease_unreachable", lease=self.name)

    @property
    def held(self) -> bool:
        """Whether this candidate certainly holds the Lease."""
        return self._held_until is not None and self.monotonic() < self._held_until

    async def run(self) -> None:
        """Take and renew the Lease until cancelled."""
        while True:
            try:
                async with asyncio.timeout(self.duration * RENEWED_EVERY):
                    await self._campaign()
            except (ApiError, TimeoutError, *MALFORMED) as error:
                self._trouble.record(str(error) or type(error).__name__)
            else:
                self._trouble.end()
            if self._held_until is not None and not self.held:
                self._lose("not renewed in time")
            is_settled = self.held and not self._trouble
            part = RENEWED_EVERY if is_settled else POLLED_EVERY
            pause = self.duration * part * self.rng.uniform(0.9, 1.0)
            if not is_settled and self._seen is not None and not self._trouble:
                left = self._free_at(self._seen.spec) - self.monotonic()
                pause = min(pause, max(SHORTEST_PAUSE, left))
            await asyncio.sleep(pause)

    async def release(self) -> None:
        """Release the Lease, so that another replica can take it at once."""
        if not self.held:
            return
        self._held_until = None
        try:
            await self._write(_Spec(leaseDurationSeconds=1), self._seen)
        except (ApiError, *MALFORMED) as error:
            log.warning("lease_not_released", why=str(error))
        else:
            log.info("lease_released", lease=self.name)

    async def _campaign(self) -> None:
        """Read the Lease, and take or renew it if that is due."""
        began = self.monotonic()
        try:
            raw = await self.api.read(Resource.LEASES, self.namespace, self.name)
        except Absent:
            await self._take(None, began)
            return
        seen = msgspec.json.decode(raw, type=_Lease)
        if seen != self._seen:
            # Not `began`: another replica may have written the Lease while we waited for the
            # response.
            self._seen, self._seen_at = seen, self.monotonic()
        holder = seen.spec.holderIdentity or ""
        is_free = not holder or self.monotonic() >= self._free_at(seen.spec)
        if holder == self.identity or is_free:
            await self._take(seen, began)
        elif self._held_until is not None:
            self._lose(f"{clean(holder)} has taken it")

    def _free_at(self, spec: _Spec) -> Seconds:
        return self._seen_at + (spec.leaseDurationSeconds or self.duration) * TAKEN_AFTER

    async def _take(self, seen: _Lease | None, began: Seconds) -> None:
        was = seen.spec if seen is not None else _Spec()
        is_renewal = was.holderIdentity == self.identity
        now = write_micro_time(self.wall())
        spec = _Spec(
            holderIdentity=self.identity,
            leaseDurationSeconds=math.ceil(self.duration),
            acquireTime=was.acquireTime if is_renewal else now,
            renewTime=now,
            leaseTransitions=(was.leaseTransitions or 0) + (not is_renewal and seen is not None),
        )
        try:
            await self._write(spec, seen)
        except Conflict:
            if self._held_until is not None and not is_renewal:
                self._lose("another replica took it first")
            return
        newly = not self.held
        self._held_until = began + self.duration * HELD_FOR
        if newly:
            log.info("lease_taken", lease=self.name, holder=self.identity)

    async def _write(self, spec: _Spec, seen: _Lease | None) -> None:
        version = {} if seen is None else {"resourceVersion": seen.metadata.resourceVersion}
        body = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"namespace": self.namespace, "name": self.name} | version,
            "spec": {key: value for key, value in msgspec.structs.asdict(spec).items() if value},
        }
        try:
            raw = await self.api.replace(Resource.LEASES, self.namespace, self.name, body)
        except Unsupported as refusal:
            if seen is None:  # the Lease exists by now, and cannot be replaced without its version
                raise Conflict(str(refusal)) from refusal
            raise
        self._seen, self._seen_at = msgspec.json.decode(raw, type=_Lease), self.monotonic()

    def _lose(self, why: str) -> None:
        self._held_until = None
        log.warning("lease_lost", lease=self.name, why=why)
