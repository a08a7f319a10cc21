"""Records the exporter's answers about one evacuation, by the number of failed attempts."""

import asyncio
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from tests.support.program import Program


FAILED_ATTEMPTS = "kubevirt_vmi_evacuation_failed_attempts"


@dataclass
class EvacuationLog:
    """States, backoffs and stuck reasons, by the number of failed attempts."""

    states: dict[int, set[str]] = field(default_factory=lambda: defaultdict(set))
    backoffs: dict[int, set[float]] = field(default_factory=lambda: defaultdict(set))
    stuck: dict[int, set[tuple[str, ...]]] = field(default_factory=lambda: defaultdict(set))
    measured: set[int] = field(default_factory=set)

    def write(self, evacuation: dict[str, Any]) -> None:
        """Add an answer of the API."""
        failed = evacuation["failedAttempts"]
        self.states[failed].add(evacuation["state"])
        self.stuck[failed].add(tuple(evacuation["stuckBy"]))
        if evacuation["backoff"] is not None:
            self.backoffs[failed].add(evacuation["backoff"]["seconds"])


async def ask_evacuation(exporter: Program, key: str) -> dict[str, Any] | None:
    """The evacuation of a VMI ("namespace/name") from GET /v1/evacuations, if any."""
    namespace, name = key.split("/")
    status, body = await exporter.get("/v1/evacuations")
    assert status == 200
    evacuation: list[dict[str, Any]] = body["evacuations"]
    return next((e for e in evacuation if (e["namespace"], e["name"]) == (namespace, name)), None)


async def record_evacuation(exporter: Program, key: str, *, failures: int) -> EvacuationLog:
    """Poll until the backoff after this many failures has been seen."""
    log = EvacuationLog()
    namespace, name = key.split("/")
    while failures not in log.backoffs:
        evacuation = await ask_evacuation(exporter, key)
        if evacuation is not None:
            log.write(evacuation)
            value = await exporter.sample(FAILED_ATTEMPTS, namespace=namespace, name=name)
            log.measured.add(int(value))
        await asyncio.sleep(0.3)
    return log
