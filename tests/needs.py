"""What a target of the Makefile needs of the machine, checked before anything is built.

`python -m tests.needs TARGET` prints what is missing, with the command that installs it, and which
tests are skipped on this machine. It needs no virtual environment.
"""

import os
import shutil
import sys
from pathlib import Path


ROOT = Path(__file__).parents[1]
NODE_PROGRAMS = {
    "buildah": "buildah",
    "containerd": "containerd",
    "curl": "curl",
    "ip": "iproute2",
    "iptables": "iptables",
    "mmdebstrap": "mmdebstrap",
    "openssl": "openssl",
    "runc": "runc",
    "unshare": "util-linux",
}
"""The Debian package of each program that a node needs."""
VMS_PROGRAMS = {"gcc": "gcc libc6-dev", "pkg-config": "pkg-config"}
"""The additional packages for real VMs, whose programs are compiled with cgo."""
LIBVIRT = Path("/usr/include/libvirt/libvirt.h")
CNI = Path("/usr/lib/cni/ptp")
CGROUP = Path("/sys/fs/cgroup/memory")
VMS_MEMORY = 5
"""Memory in GB for two nodes and five VMs, all of which may migrate at once."""
MEMORY = 15
"""Memory in GB for the real servers of six tests at a time; a machine "with 16 GB" tells more."""
WORKER_MEMORY = 0.6
"""Memory in GB for one process of `make test` and the programs that its tests start."""
DISK = 14
"""Disk in GB for the tools and for the caches of Go."""
BUILT_LAST = ROOT / ".tools/bin/etcd"
OPTIONAL = {
    "test": {"chromium": "tests/program/test_browser.py"},
    "test-integration": {
        "gcc": "the race detector on the descheduler's plugin",
        "curl": "the commands of the runbooks and of the installation",
        "chromium": "the dashboards as Grafana's libraries draw them",
        "npm": "the dashboards as Grafana's libraries draw them, and their types",
    },
}
"""For each target the programs without which some tests are skipped, with these tests."""


def find_missing(target: str) -> list[str]:
    """What a target cannot do without, each with the command or change that helps."""
    if target == "test":
        return []
    if target == "test-integration":
        missing = []
        memory = _read_memory("MemTotal")
        if memory < MEMORY:
            missing.append(f"16 GB of memory: this machine has {memory:.0f} GB")
        disk = min(shutil.disk_usage(place).free for place in (ROOT, Path.home())) / 1e9
        if disk < DISK and not BUILT_LAST.exists():
            missing.append(f"{DISK} GB of free disk to build its servers: {disk:.0f} GB are free")
        return missing
    return _find_missing_of_a_node(target)


def find_skipped(target: str) -> list[str]:
    """Which tests of a target are skipped on this machine, and what they need."""
    programs = OPTIONAL.get(target, {})
    return [
        f"{tests} (no {program} on the PATH)"
        for program, tests in programs.items()
        if not shutil.which(program)
    ]


def count_workers() -> int:
    """How many processes run `make test`: five for two cores, because tests often wait.

    With little memory there are fewer: each needs `WORKER_MEMORY`.
    """
    cores = (os.cpu_count() or 1) * 5 // 2
    return max(1, int(min(cores, _read_memory("MemAvailable") / WORKER_MEMORY)))


def _find_missing_of_a_node(target: str) -> list[str]:
    missing = []
    for_vms = target.endswith("vms")
    path = f"{os.environ['PATH']}:/usr/sbin"
    programs = NODE_PROGRAMS | VMS_PROGRAMS if for_vms else NODE_PROGRAMS
    packages = [name for program, name in programs.items() if not shutil.which(program, path=path)]
    if for_vms and not LIBVIRT.exists():
        packages.append("libvirt-dev")
    if not CNI.exists():
        packages.append("containernetworking-plugins")
    if packages:
        install = f"apt-get install -y --no-install-recommends {' '.join(packages)}"
        missing.append(f"{', '.join(packages)}: {install}")
    if os.geteuid() != 0:
        missing.append(f"root: sudo make {target}")
    if not CGROUP.exists():
        missing.append(f"cgroup v1, with the controllers below {CGROUP.parent}")
    if for_vms and _read_memory("MemAvailable") < VMS_MEMORY:
        missing.append(f"{VMS_MEMORY} GB of available memory")
    return missing


def _read_memory(field: str) -> float:
    """A field of Linux's /proc/meminfo in GB; infinite elsewhere."""
    place = Path("/proc/meminfo")
    if not place.exists():
        return float("inf")
    lines = place.read_text().splitlines()
    kibibytes = next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))
    return kibibytes * 1024 / 1e9


def main() -> int:
    """Print what is missing and skipped; the exit code is 1 if anything is missing."""
    (target,) = sys.argv[1:]
    missing = find_missing(target)
    for need in missing:
        print(f"make {target} needs {need}", file=sys.stderr)
    for tests in find_skipped(target):
        print(f"make {target} skips {tests}", file=sys.stderr)
    return bool(missing)


if __name__ == "__main__":
    sys.exit(main())
