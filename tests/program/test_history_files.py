"""The history file outlives the process, and whatever is wrong with it does no harm."""

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.cluster import VMIS, poll, vmi
from tests.cluster.objects import Object
from tests.cluster.users import open_kubeconfig
from tests.program.exporting import exporting
from tests.support.api_servers import SimulatedStage
from tests.support.history_files import (
    BRISK,
    count_in_window,
    migrate,
    read_counts,
    saved_vmi,
    until_counted,
    until_failure,
    until_saved,
    write_history,
)
from tests.support.program import Program, program


KNOWN = 8
"""The number of migrations that only the history file has."""


class Scene:
    """A cluster with one VM, and the history file of an exporter."""

    def __init__(self, stage: SimulatedStage, namespace: str, made: Object, path: Path) -> None:
        self.stage = stage
        self.namespace = namespace
        self.made = made
        self.uid: str = made["metadata"]["uid"]
        self.path = path

    @asynccontextmanager
    async def exporter(self, history: str | None = None, **kube: str) -> AsyncIterator[Program]:
        """A process during the block."""
        config = {"history": history or f"file:{self.path}", "kube": {**BRISK, **kube}}
        async with exporting(self.stage.url, self.path.parent, **config) as exporter:
            yield exporter

    async def migrate(self, *ago: int) -> None:
        """Migrate the VM, so long ago, and delete the VMIMs."""
        await migrate(self.stage.admin, self.namespace, "db", ago=ago)

    async def until_counted(self, exporter: Program, migrations: int) -> None:
        """Wait until the exporter counts this many migrations of the VM."""
        await until_counted(exporter, self.namespace, "db", migrations)

    async def has_evacuation(self) -> bool:
        """Whether the history file has an evacuation."""
        return b'"requested_at"' in await asyncio.to_thread(self.path.read_bytes)


@pytest.fixture
async def scene(simulated: SimulatedStage, tmp_path: Path) -> Scene:
    """A VM without a migration, and no history file yet."""
    namespace = await simulated.make_namespace()
    made = await simulated.admin.create(VMIS, vmi("db", namespace))
    return Scene(simulated, namespace, made, tmp_path / "history")


async def test_a_killed_process_knows_what_was_written(scene: Scene) -> None:
    """After `kill -9` nothing is lost that is older than `kube.historyInterval`."""
    async with scene.exporter() as exporter:
        await scene.migrate(*range(100, 900, 100))
        await scene.until_counted(exporter, KNOWN)
        await scene.stage.admin.merge(
            VMIS, scene.namespace, "db", {"status": {"evacuationNodeName": "n1"}}
        )
        asked = await exporter.until("/v1/evacuations", lambda _, body: body["evacuations"])
        await until_saved(scene.path, scene.uid, KNOWN)
        await poll(scene.has_evacuation, what="the evacuation in the file")
        await exporter.end(signal.SIGKILL)
    async with scene.exporter() as successor:
        assert await count_in_window(successor, scene.namespace, "db") == KNOWN
        answer = await successor.until("/v1/evacuations", lambda _, body: body["evacuations"])
        assert answer["evacuations"][0]["requestedAt"] == asked["evacuations"][0]["requestedAt"]


async def test_the_last_changes_are_written_at_the_end(scene: Scene) -> None:
    """SIGTERM writes what the interval has not written yet."""
    async with scene.exporter(historyInterval="1h") as exporter:
        await scene.migrate(300, 200, 100)
        await scene.until_counted(exporter, 3)
        assert read_counts(scene.path) == {}
        assert await exporter.end() == 0
    assert read_counts(scene.path) == {scene.uid: 3}


async def test_without_a_file_only_the_cluster_remembers(scene: Scene) -> None:
    """Without a history file a new process knows only the migrations that the cluster shows."""
    await scene.migrate(*range(100, 900, 100))
    async with scene.exporter("none") as exporter:
        assert await count_in_window(exporter, scene.namespace, "db") == 1


async def test_a_write_that_was_torn(scene: Scene) -> None:
    """What a killed process has not finished writing is neither read nor in the way."""
    write_history(scene.path, saved_vmi(scene.made, KNOWN))
    part = scene.path.with_name("history.part")
    part.write_bytes(scene.path.read_bytes()[:99])
    async with scene.exporter() as exporter:
        await scene.until_counted(exporter, KNOWN)
        await scene.migrate(30)
        await until_saved(scene.path, scene.uid, KNOWN + 1)
    assert not part.exists()


async def test_a_damaged_file(scene: Scene) -> None:
    """A damaged file is logged and counted; the exporter serves, and writes a valid file."""
    write_history(scene.path, saved_vmi(scene.made, KNOWN))
    scene.path.write_bytes(scene.path.read_bytes()[:-20])
    async with scene.exporter() as exporter:
        await until_failure(exporter, "history_damaged")
        await scene.migrate(30)
        await until_saved(scene.path, scene.uid, 1)
        assert await exporter.end() == 0


async def test_a_full_disk(scene: Scene) -> None:
    """A write that fails is counted and leaves the old file; the next one succeeds."""
    write_history(scene.path, saved_vmi(scene.made, KNOWN))
    scene.path.with_name("history.part").symlink_to("/dev/full")
    async with scene.exporter() as exporter:
        await until_failure(exporter, "history_not_written")
        (line,) = exporter.events("history_not_written")
        assert "No space left" in line["why"]
        await until_saved(scene.path, scene.uid, KNOWN)
        await scene.migrate(30)
        await until_saved(scene.path, scene.uid, KNOWN + 1)
        _, status = await exporter.get("/v1/status")
        assert (status["history"]["vmis"], status["history"]["trouble"]) == (1, None)


async def test_there_is_no_such_directory(simulated: SimulatedStage, tmp_path: Path) -> None:
    """A path that can never be written ends the program with an error that names it."""
    login = str(open_kubeconfig(tmp_path / "login", simulated.url))
    config = {"history": f"file:{tmp_path}/none/history"}
    async with program(tmp_path, "--kubeconfig", login, config=config) as exporter:
        assert await exporter.process.wait() == 7
        assert "there is no such directory" in exporter.output
