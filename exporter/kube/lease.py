"""Which replica writes the checkpoint: the holder of a Lease in the cluster.

The rules are client-go's (`tools/leaderelection`): a holder renews; the others take the Lease
once they have seen it unchanged for long enough on their own monotonic clock, so that no two
clocks are compared. Every write names the version that it replaces. A holder stops believing
in itself well before the others stop, also where it was frozen in between.

kubernetes_asyncio brings a leader election of its own (`leaderelection`). It is not used: it ends
at the first connection error, writes local time as UTC into the Lease, measures by the wall
clock, and does not give the Lease back at the end.
"""

import asyncio
import random
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import msgspec
import structlog
from msgspec import Struct, field

from exporter.engine.model import Instant, Resource, Seconds
from exporter.kube.client import Absent, ApiError, ApiServer, Conflict, Unsupported
from exporter.logs import Trouble


HELD_FOR = 2 / 3
"""The share of the duration for which a holder believes in its last renewal, as in client-go."""
RENEWED_EVERY = 1 / 3
"""The share of the duration after which the holder renews."""
TAKEN_AFTER = 0.8
"""The share of its duration after which an unchanged Lease is taken: later than its holder stops
believing in it, and so early that the next write comes within the duration."""
LOOKED_EVERY = 1 / 8
"""The share of the duration after which the others look, and a renewal that failed is tried."""

MOMENT: Seconds = 0.01

log = structlog.stdlib.get_logger()


class _Spec(Struct):
    holderIdentity: str | None = None  # noqa: N815
    leaseDurationSeconds: int | None = None  # noqa: N815
    acquireTime: str | None = None  # noqa: N815
    renewTime: str | None = None  # noqa: N815
    leaseTransitions: int | None = None  # noqa: N815


class _Metadata(Struct):
    resourceVersion: str | None = None  # noqa: N815


class _Lease(Struct):
    metadata: _Metadata = field(default_factory=_Metadata)
    spec: _Spec = field(default_factory=_Spec)


class Lease:
    """One candidate for the Lease `namespace/name`; `held` says whether it may write now.

    `changed` is called when it comes or goes. `monotonic` is the clock by which it judges, `wall`
    the one that it writes down for people.
    """

    def __init__(
        self,
        api: ApiServer,
        namespace: str,
        name: str,
        *,
        identity: str,
        duration: Seconds,
        rng: random.Random,
        wall: Callable[[], Instant],
        monotonic: Callable[[], Seconds] = time.monotonic,
    ) -> None:
        self._api = api
        self._namespace = namespace
        self._name = name
        self._identity = identity
        self._duration = duration
        self._rng = rng
        self.changed: Callable[[], None] = _do_nothing
        self._monotonic = monotonic
        self._wall = wall
        self._held_until: Seconds | None = None
        self._seen = _Lease()
        self._seen_at: Seconds | None = None
        self._trouble = Trouble("lease_unreachable", lease=name)

    @property
    def held(self) -> bool:
        """Whether this candidate holds the Lease, for certain."""
        return self._held_until is not None and self._monotonic() < self._held_until

    async def run(self) -> None:
        """Take and renew, for ever."""
        while True:
            try:
                async with asyncio.timeout(self._duration * RENEWED_EVERY):
                    await self._campaign()
            except (ApiError, TimeoutError, msgspec.MsgspecError) as error:
                self._trouble.note(str(error) or type(error).__name__)
            else:
                self._trouble.end()
            if self._held_until is not None and not self.held:
                self._lose("not renewed in time")
            await asyncio.sleep(self._pause())

    def _pause(self) -> Seconds:
        """Until the next renewal, or look: at the latest when the Lease may be taken."""
        if self.held and not self._trouble:
            return self._duration * RENEWED_EVERY * self._rng.uniform(0.9, 1.0)
        look = self._duration * LOOKED_EVERY * self._rng.uniform(0.9, 1.0)
        if self._seen_at is None or self._trouble:
            return look
        return min(look, max(MOMENT, self._free_at(self._seen.spec) - self._monotonic()))

    async def release(self) -> None:
        """Give the Lease back, so that another need not wait for its end."""
        if not self.held:
            return
        self._held_until = None
        try:
            await self._write(_Spec(leaseDurationSeconds=1), self._seen)
        except (ApiError, msgspec.MsgspecError) as error:
            log.warning("lease_not_released", why=str(error))
        else:
            log.info("lease_released", lease=self._name)

    async def _campaign(self) -> None:
        """One look at the Lease, and one attempt to hold it where that is due."""
        began = self._monotonic()
        try:
            seen = await self._read()
        except Absent:
            await self._take(None, began)
            return
        if self._seen_at is None or seen != self._seen:
            # As late as it can be: what was read may have been written while we waited for it.
            self._seen, self._seen_at = seen, self._monotonic()
        if seen.spec.holderIdentity == self._identity or self._is_free(seen.spec):
            await self._take(seen, began)
        elif self._held_until is not None:
            self._lose(f"{seen.spec.holderIdentity} has taken it")

    def _is_free(self, spec: _Spec) -> bool:
        return not spec.holderIdentity or self._monotonic() >= self._free_at(spec)

    def _free_at(self, spec: _Spec) -> Seconds:
        lasts = spec.leaseDurationSeconds or self._duration
        return (self._seen_at or 0.0) + lasts * TAKEN_AFTER

    async def _take(self, seen: _Lease | None, began: Seconds) -> None:
        was = seen.spec if seen is not None else _Spec()
        is_renewal = was.holderIdentity == self._identity
        now = _write_instant(self._wall())
        spec = _Spec(
            holderIdentity=self._identity,
            leaseDurationSeconds=max(1, round(self._duration)),
            acquireTime=was.acquireTime if is_renewal else now,
            renewTime=now,
            leaseTransitions=(was.leaseTransitions or 0) + (not is_renewal and seen is not None),
        )
        try:
            await self._write(spec, seen)
        except Conflict:
            if self._held_until is not None and not is_renewal:
                self._lose("another was faster")
            return
        newly = not self.held
        self._held_until = began + self._duration * HELD_FOR
        if newly:
            log.info("lease_taken", lease=self._name, holder=self._identity)
            self.changed()

    async def _read(self) -> _Lease:
        raw = await self._api.read(Resource.LEASES, self._namespace, self._name)
        return msgspec.json.decode(raw, type=_Lease)

    async def _write(self, spec: _Spec, seen: _Lease | None) -> None:
        metadata: dict[str, Any] = {"namespace": self._namespace, "name": self._name}
        body = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": metadata,
            "spec": {key: value for key, value in msgspec.structs.asdict(spec).items() if value},
        }
        if seen is not None:
            metadata["resourceVersion"] = seen.metadata.resourceVersion
        try:
            raw = await self._api.replace(Resource.LEASES, self._namespace, self._name, body)
        except Unsupported as refusal:
            if seen is None:  # a Lease that exists is not replaced without its version
                raise Conflict(str(refusal)) from refusal
            raise
        self._seen, self._seen_at = msgspec.json.decode(raw, type=_Lease), self._monotonic()

    def _lose(self, why: str) -> None:
        self._held_until = None
        log.warning("lease_lost", lease=self._name, why=why)
        self.changed()


def _do_nothing() -> None:
    pass


def _write_instant(wall: Instant) -> str:
    """A Kubernetes MicroTime."""
    return datetime.fromtimestamp(wall, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
