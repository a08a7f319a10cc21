"""The demo shows the main states of evacuations within its first minutes."""

import asyncio
import re
from collections.abc import Callable
from pathlib import Path

from exporter.demo import shorten_settings
from exporter.engine.facts.states import State
from tests.support.program import program


SPEED = 5.0
MAIN = {
    State.EXTERNAL,
    State.MIGRATING,
    State.NOT_MIGRATABLE,
    State.BACKOFF,
    State.TARGET_UNSCHEDULABLE,
    State.CAPACITY,
}
_STATE = re.compile(r'^kubevirt_vmi_evacuation_state\{.*state="(\w+)"\} 1\.0$', re.MULTILINE)


async def test_every_main_state_is_seen(tmp_path: Path, prove: Callable[[str], None]) -> None:
    """Each main state is in GET /v1/evacuations and in /metrics, and some evacuations are stuck."""
    listed: set[str] = set()
    measured: set[str] = set()
    stuck: set[str] = set()
    config = dict(shorten_settings(SPEED))
    async with program(tmp_path, "demo", "--speed", f"{SPEED:g}", config=config) as exporter:
        await exporter.ready()
        async with asyncio.timeout(120):
            while not (listed >= MAIN and measured >= MAIN):
                _, body = await exporter.get("/v1/evacuations")
                listed |= {row["state"] for row in body["evacuations"]}
                stuck |= {row["name"] for row in body["evacuations"] if row["stuck"]}
                _, text = await exporter.get("/metrics")
                measured |= set(_STATE.findall(text))
                await asyncio.sleep(0.2)
        assert await exporter.end() == 0

    assert {"failing-1", "unschedulable-1", "pinned-1"} <= stuck
    assert "external-1" not in stuck
    prove(f"demo: states seen: {', '.join(sorted(listed))}; stuck: {', '.join(sorted(stuck))}")
