"""Two candidates for a Lease on a real API server: only one of them holds it at a time."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from structlog.testing import capture_logs

from exporter.kube.client import ApiServer
from exporter.kube.lease import Lease
from exporter.kube.login import Login
from tests.cluster import poll
from tests.cluster.resources import LEASES
from tests.support.api_servers import RealStage
from tests.support.builders import NOW


NAME = "writer"
DURATION = 6.0


class Candidate:
    """A candidate for the Lease."""

    def __init__(self, lease: Lease) -> None:
        self.lease = lease
        self._task: asyncio.Task[None] | None = None

    def campaign(self) -> None:
        """Start, or resume after a pause."""
        self._task = asyncio.create_task(self.lease.run())

    async def pause(self) -> None:
        """Stop, like a frozen process."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def until(self, *, held: bool) -> None:
        """Wait until the candidate holds the Lease, or until it does not."""

        async def is_so() -> bool:
            return self.lease.held is held

        await poll(is_so, what=f"held is {held}")


@asynccontextmanager
async def candidate(real: RealStage, namespace: str, identity: str) -> AsyncIterator[Candidate]:
    """A candidate that does not campaign yet."""
    cluster = real.cluster
    login = Login(kubeconfig=cluster.kubeconfig(cluster.administrator))
    async with ApiServer(login, read_timeout=5) as api:
        lease = Lease(
            api,
            namespace,
            NAME,
            identity=identity,
            duration=DURATION,
            rng=random.Random(1),
            wall=lambda: NOW + asyncio.get_running_loop().time(),
            changed=lambda: None,
            monotonic=asyncio.get_running_loop().time,
        )
        made = Candidate(lease)
        try:
            yield made
        finally:
            await made.pause()


async def spec_of(real: RealStage, namespace: str) -> dict[str, Any]:
    """The spec of the Lease in the cluster."""
    spec: dict[str, Any] = (await real.admin.get(LEASES, namespace, NAME))["spec"]
    return spec


async def test_the_second_waits_and_takes_over(real: RealStage) -> None:
    """The second candidate takes the Lease after the first has stopped renewing it."""
    namespace = await real.make_namespace()
    async with candidate(real, namespace, "one") as one, candidate(real, namespace, "two") as two:
        one.campaign()
        await one.until(held=True)
        two.campaign()
        await two.until(held=False)
        await one.pause()
        await two.until(held=True)
        assert not one.lease.held, "the first gave up the Lease before the second took it"
        spec = await spec_of(real, namespace)
        assert (spec["holderIdentity"], spec["leaseTransitions"]) == ("two", 1)

        one.campaign()
        with capture_logs() as logs:
            await two.pause()
            await one.until(held=True)
        events = [log["event"] for log in logs if log["event"] != "lease_unreachable"]
        assert events == ["lease_lost", "lease_taken"]
