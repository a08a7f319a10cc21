"""What a step of the wall clock changes while the API server is away: nothing."""

from pathlib import Path

import pytest

from tests.cluster import PODS, VMIS, launcher_pod, vmi
from tests.cluster.users import open_kubeconfig
from tests.support.api_servers import SimulatedStage
from tests.support.program import Program, program


DAY = 86_400
CLOCK = """
import time
from pathlib import Path

_time, _ahead = time.time, Path({ahead!r})
time.time = lambda: _time() + float(_ahead.read_text())
"""
"""A `sitecustomize` that reads from a file how far the clock is ahead."""


class Machine:
    """A machine whose clock a test can set."""

    def __init__(self, directory: Path) -> None:
        self._ahead = directory / "ahead"
        self.set(0)
        module = directory / "sitecustomize.py"
        module.write_text(CLOCK.format(ahead=str(self._ahead)))
        self.environment = {"PYTHONPATH": str(directory)}

    def set(self, ahead: int) -> None:
        """Set the clock this many seconds ahead of the right time, in one step."""
        new = self._ahead.with_suffix(".new")
        new.write_text(str(ahead))
        new.replace(self._ahead)


async def migrating(stage: SimulatedStage) -> tuple[str, str]:
    """A VMI that migrates."""
    namespace = await stage.make_namespace()
    state = {"migrationState": {"startTimestamp": "2020-01-01T00:00:00Z", "sourceNode": "n1"}}
    made = await stage.admin.create(VMIS, vmi("db1", namespace, status=state))
    await stage.admin.create(PODS, launcher_pod(made))
    return namespace, "db1"


async def until_stepped(exporter: Program) -> None:
    """Wait until the program has noticed the step."""
    await exporter.until("/v1/status", lambda *_: exporter.events("clock_stepped"))


@pytest.mark.parametrize("step", [-DAY, DAY], ids=["back", "forward"])
async def test_evidence_stays_fresh(simulated: SimulatedStage, tmp_path: Path, step: int) -> None:
    """A running migration still blocks: its evidence is as young as before the step."""
    machine = Machine(tmp_path)
    key = await migrating(simulated)
    login = open_kubeconfig(tmp_path / "login", simulated.url)
    arguments = ("--kubeconfig", str(login))
    async with program(tmp_path, *arguments, environment=machine.environment) as exporter:
        await exporter.ready()
        await exporter.until_verdict(*key, "filter", "migration_in_progress")
        simulated.server.freeze()
        machine.set(step)
        await until_stepped(exporter)
        _, status = await exporter.get("/v1/status")
        assert status["staleness"] == "fresh"
        verdict = await exporter.verdict(*key, "filter", dryRun=True)
        assert verdict["reason"] == "migration_in_progress"
        simulated.server.thaw()


@pytest.mark.parametrize("step", [-DAY, DAY], ids=["back", "forward"])
async def test_evidence_dies_in_time(simulated: SimulatedStage, tmp_path: Path, step: int) -> None:
    """Without contact an old migration stops blocking, as if the clock had not been set."""
    machine = Machine(tmp_path)
    key = await migrating(simulated)
    login = open_kubeconfig(tmp_path / "login", simulated.url)
    config = {"kube": {"staleAfter": "3s", "deadAfter": "3s", "readTimeout": "30s"}}
    arguments = ("--kubeconfig", str(login))
    async with program(
        tmp_path, *arguments, config=config, environment=machine.environment
    ) as exporter:
        await exporter.ready()
        simulated.server.freeze()
        machine.set(step)
        await until_stepped(exporter)
        await exporter.until_verdict(*key, "filter", None)
        simulated.server.thaw()
