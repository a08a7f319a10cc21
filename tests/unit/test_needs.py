"""Each target first names what the machine lacks, and an old Go is not used."""

import os
import subprocess
from pathlib import Path

import pytest

from tests import needs


GO = Path(__file__).parents[1] / "tools/go"


def test_a_machine_with_little_memory_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """`make test-integration` names the memory that it needs and the memory that there is."""
    monkeypatch.setattr(needs, "_read_memory", lambda _: 7.8)

    assert "16 GB of memory: this machine has 8 GB" in needs.find_missing("test-integration")


@pytest.mark.parametrize(
    ("memory", "workers"),
    [
        pytest.param(16.0, 5, id="two-cores"),
        pytest.param(1.9, 3, id="two-gibibytes"),
        pytest.param(0.3, 1, id="almost-none"),
        pytest.param(float("inf"), 5, id="not-known"),
    ],
)
def test_so_many_processes_run_the_tests(
    monkeypatch: pytest.MonkeyPatch, memory: float, workers: int
) -> None:
    """A machine with two cores runs five, as far as its memory allows."""
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(needs, "_read_memory", lambda _: memory)

    assert needs.count_workers() == workers


def test_a_machine_with_a_full_disk_is_told_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The disk must have room for what is built, but only until it is built."""
    monkeypatch.setattr(needs, "DISK", 10**6)
    monkeypatch.setattr(needs, "BUILT_LAST", tmp_path / "built")
    assert any("of free disk" in need for need in needs.find_missing("test-integration"))

    (tmp_path / "built").touch()
    assert not any("of free disk" in need for need in needs.find_missing("test-integration"))


def test_skipped_tests_are_named_with_the_missing_program(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Without Chromium the browser's tests are named, and with it they are not."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert any("no chromium on the PATH" in tests for tests in needs.find_skipped("test"))

    put_program(tmp_path / "chromium", "exit")
    assert needs.find_skipped("test") == []


def test_an_old_go_is_not_used(tmp_path: Path) -> None:
    """If the Go on the PATH is older than the modules need, the pinned one is to be installed."""
    put_program(tmp_path / "go", "echo go1.25.9")

    done = run_go_script(tmp_path)

    assert "on the PATH is 1.25.9" in done.stderr
    assert done.returncode


def test_a_new_go_is_used(tmp_path: Path) -> None:
    """If the Go on the PATH is new enough, nothing is installed."""
    put_program(tmp_path / "go", "echo go1.100.0")

    done = run_go_script(tmp_path)

    assert (done.returncode, done.stderr) == (0, "")


def put_program(path: Path, script: str) -> None:
    """Write an executable shell script."""
    path.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    path.chmod(0o755)


def run_go_script(folder: Path) -> "subprocess.CompletedProcess[str]":
    """Run tests/tools/go with the programs of a folder, and with a Python that installs nothing."""
    copy = folder / "tests/tools/go"
    copy.parent.mkdir(parents=True)
    copy.write_bytes(GO.read_bytes())
    copy.chmod(0o755)
    for module in ("tests/tools/shared", "deploy/descheduler"):
        (folder / module).mkdir(parents=True)
        (folder / module / "go.mod").write_text("module m\n\ngo 1.26.5\n", encoding="utf-8")
    environment = {"PATH": f"{folder}:{os.environ['PATH']}", "PYTHON": "false"}
    return subprocess.run([copy], env=environment, capture_output=True, text=True, check=False)
