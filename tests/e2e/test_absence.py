"""A cluster leaves nothing on the machine, even if it is killed. This test runs first."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.cluster import wait_for
from tests.e2e.images import ROOT


CGROUPS = Path("/sys/fs/cgroup")
SERVERS = {"containerd", "etcd", "kube-apiserver", "kubelet", "pause", "unshare"}


def left_behind() -> dict[str, set[str]]:
    """What a cluster could leave: processes, mounts, cgroups, links and firewall rules."""
    processes = {
        read(path.with_name("comm"))
        for path in Path("/proc").glob("[0-9]*/cgroup")
        if "eviction-exporter-e2e" in read(path)
        or "tests/e2e/node/supervise" in read(path.with_name("cmdline"))
    }
    listed = {
        "links": ["ip", "-brief", "link"],
        "filter": ["iptables-save"],
        "namespaces": ["ip", "netns", "list"],
        "cgroups": ["find", str(CGROUPS), "-name", "eviction-exporter-e2e-*", "-prune"],
    }
    return {
        "processes": processes,
        "mounts": set(Path("/proc/self/mounts").read_text().splitlines()),
        **{name: output(*command) for name, command in listed.items()},
    }


def read(path: Path) -> str:
    """The text of a file; empty if the file no longer exists."""
    try:
        return path.read_text()
    except OSError:
        return ""


def output(*command: str) -> set[str]:
    """The output of a program, without counters and dates."""
    # `find` fails if a folder is removed meanwhile.
    ended = subprocess.run(command, capture_output=True, text=True, check=command[0] != "find")
    return {line for line in ended.stdout.splitlines() if not line.startswith("#")}


def start(directory: Path) -> subprocess.Popen[str]:
    """Start a cluster with a running pod in another process."""
    directory.mkdir()
    trial = subprocess.Popen(
        [sys.executable, "-m", "tests.e2e.trial", directory],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert trial.stdout
    assert trial.stdout.readline() == "running\n", trial.communicate()
    return trial


@pytest.mark.timeout(600)
def test_nothing_is_left(tmp_path: Path, prove: Callable[[str], None]) -> None:
    """After two runs of a cluster nothing is left; the second run is killed."""
    before = left_behind()

    trial = start(tmp_path / "ended")
    during = left_behind()
    trial.communicate()
    assert trial.returncode == 0
    assert left_behind() == before

    with start(tmp_path / "killed") as trial:
        trial.kill()
        trial.communicate()
    wait_for(lambda: left_behind() == before, f"as before; but {left_behind()}")

    assert {name.strip() for name in during["processes"]} >= SERVERS
    assert not before["processes"]
    assert len(during["cgroups"] - before["cgroups"]) > 8
    assert during["links"] == before["links"]
    assert during["filter"] == before["filter"]
    prove("two clusters, one of them killed: no process, mount, cgroup, link or firewall rule left")
