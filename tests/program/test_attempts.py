"""Failed attempts are counted beyond the five that KubeVirt keeps."""

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime

from exporter.demo import Demo
from exporter.engine.evacuations.diagnosis import diagnose
from exporter.engine.facts.model import Resource
from exporter.engine.facts.policy import StuckPolicy
from exporter.engine.facts.trust import Trust
from exporter.engine.store.store import Store
from exporter.kube.login import Login
from tests.support.watching import following


FAILING = ("lab", "failing-1")
KEPT_BY_KUBEVIRT = 5


async def test_twelve_failures_while_five_are_kept(prove: Callable[[str], None]) -> None:
    """Twelve more failures are counted, while at most five failed VMIMs exist."""
    demo = Demo(lambda: datetime.now(UTC), seed=1, speed=20.0)
    stop = asyncio.Event()
    most_seen = 0
    async with demo, following(Login(url=demo.url)) as watch:
        await watch.ready()
        first = _failed(watch.store)
        playing = asyncio.create_task(demo.run("http://127.0.0.1:1", stop))

        def counted() -> bool:
            nonlocal most_seen
            evidence = watch.store.evidence(*FAILING, Trust())
            assert evidence is not None
            failed = [vmim for vmim in evidence.vmims if vmim.phase == "Failed"]
            most_seen = max(most_seen, len(failed))
            return _failed(watch.store) >= first + 12

        await watch.until(counted, what="twelve more failures", wait=60.0)
        stop.set()
        await playing
        # The newest failure appears a moment before KubeVirt deletes the oldest.
        assert most_seen <= KEPT_BY_KUBEVIRT + 1
        assert first == KEPT_BY_KUBEVIRT
        assert watch.invalid_objects(Resource.VMIMS) == 0
    prove(f"attempts: {first + 12} failures counted, {most_seen} failed VMIMs at most at a time")


def _failed(store: Store) -> int:
    evidence = store.evidence(*FAILING, Trust())
    assert evidence is not None
    diagnosis = diagnose(evidence, StuckPolicy(), store.load(Trust()), 0.0)
    assert diagnosis is not None
    return diagnosis.failed_attempts
