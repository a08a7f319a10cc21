"""Files of the stored history that hang or are no history, shown by the whole program."""

import gzip
import os
import time
from pathlib import Path

import pytest

from tests.cluster import VMIS, poll, vmi
from tests.cluster.users import open_kubeconfig
from tests.support.api_servers import SimulatedStage
from tests.support.program import program
from tests.support.stored_history import BRISK, migrate, until_fault, until_written


CLOSED_WITHIN = 5.0 + 3.0
"""The time limit for the last write, and the time to start and stop on a busy machine."""
HANGING_DISK = """
import os, pathlib, time
fsync = os.fsync
hangs = pathlib.Path(__file__).with_name("hangs")

def wait(descriptor):
    while hangs.exists():
        time.sleep(0.02)
    fsync(descriptor)

os.fsync = wait
"""
HANGING_READ = """
import pathlib, time
read = pathlib.Path.read_bytes

def wait(path):
    if path.name == "history":
        path.with_name("read").touch()
        time.sleep(600)
    return read(path)

pathlib.Path.read_bytes = wait
"""


@pytest.fixture
def login(simulated: SimulatedStage, tmp_path: Path) -> str:
    """A kubeconfig for the simulated cluster."""
    return str(open_kubeconfig(tmp_path / "login", simulated.url))


async def test_a_fifo(simulated: SimulatedStage, tmp_path: Path, login: str) -> None:
    """A FIFO is neither read nor replaced: two faults, and the exporter serves."""
    namespace = await simulated.make_namespace()
    await simulated.admin.create(VMIS, vmi("a", namespace))
    path = tmp_path / "history"
    os.mkfifo(path)
    config = {"history": f"file:{path}", "kube": BRISK}
    async with program(tmp_path, "--kubeconfig", login, config=config) as exporter:
        await exporter.ready()
        await until_fault(exporter, "unreadable")
        await migrate(simulated.admin, namespace, "a", ago=[30])
        await until_fault(exporter, "not_written")
        assert await exporter.end() == 0
    assert path.is_fifo()


async def test_a_write_that_never_returns(
    simulated: SimulatedStage, tmp_path: Path, login: str
) -> None:
    """It is a fault after four intervals; stopping waits 5 s for it. A later write succeeds."""
    namespace = await simulated.make_namespace()
    await simulated.admin.create(VMIS, vmi("a", namespace))
    disk = tmp_path / "disk"
    disk.mkdir()
    (disk / "sitecustomize.py").write_text(HANGING_DISK)
    hangs = disk / "hangs"
    hangs.touch()
    config = {"history": f"file:{tmp_path / 'history'}", "kube": {"historyInterval": "1500ms"}}
    environment = {"PYTHONPATH": str(disk)}
    async with program(
        tmp_path, "--kubeconfig", login, config=config, environment=environment
    ) as exporter:
        await exporter.ready()
        await migrate(simulated.admin, namespace, "a", ago=[30])
        await until_fault(exporter, "not_written")
        hangs.unlink()
        await until_written(exporter)
        hangs.touch()
        await migrate(simulated.admin, namespace, "a", ago=[20])
        began = time.monotonic()
        assert await exporter.end() == 0
        assert time.monotonic() - began < CLOSED_WITHIN, "nothing waits for the thread"
        assert exporter.events("history_not_flushed")


async def test_a_read_that_never_returns(tmp_path: Path, login: str) -> None:
    """SIGTERM ends the program while it reads the file; the file is not replaced."""
    disk = tmp_path / "disk"
    disk.mkdir()
    (disk / "sitecustomize.py").write_text(HANGING_READ)
    path = disk / "history"
    path.write_bytes(b"what was known")
    config = {"history": f"file:{path}"}
    environment = {"PYTHONPATH": str(disk)}
    async with program(
        tmp_path, "--kubeconfig", login, config=config, environment=environment
    ) as exporter:

        async def is_read() -> bool:
            return (disk / "read").exists()

        await poll(is_read, what="a read")
        began = time.monotonic()
        assert await exporter.end() == 0
        assert time.monotonic() - began < CLOSED_WITHIN
    assert path.read_bytes() == b"what was known"


async def test_damage_is_logged_once(tmp_path: Path, login: str) -> None:
    """A file with 200,000 damaged pieces gives one line in the log."""
    path = tmp_path / "history"
    path.write_bytes(gzip.compress(b"", mtime=0)[:8] * 200_000)
    config = {"history": f"file:{path}"}
    async with program(tmp_path, "--kubeconfig", login, config=config) as exporter:
        await exporter.ready()
        await until_fault(exporter, "damaged")
        (line,) = exporter.events("history_fault")
        assert line["fault"] == "damaged"
