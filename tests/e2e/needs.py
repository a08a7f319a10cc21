"""What `make test-e2e` and `make test-vms` need, checked before anything is built.

`python -m tests.e2e.needs [vms]` prints what is missing and the command that installs it. It needs
no virtual environment.
"""

import os
import shutil
import sys
from pathlib import Path


PROGRAMS = {
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
"""The Debian package of each program."""
VMS_PROGRAMS = {"gcc": "gcc libc6-dev", "pkg-config": "pkg-config"}
"""The additional packages for `make test-vms`, which compiles with cgo."""
LIBVIRT = Path("/usr/include/libvirt/libvirt.h")
VMS_MEMORY = 5
"""Memory in GB for two nodes and five VMs, all of which may migrate at once."""
CNI = Path("/usr/lib/cni/ptp")
CGROUP = Path("/sys/fs/cgroup/memory")


def find_missing(target: str = "e2e") -> list[str]:
    """What is missing for a target, each with the command or change that helps."""
    missing = []
    for_vms = target == "vms"
    path = f"{os.environ['PATH']}:/usr/sbin"
    programs = PROGRAMS | VMS_PROGRAMS if for_vms else PROGRAMS
    packages = [name for program, name in programs.items() if not shutil.which(program, path=path)]
    if for_vms and not LIBVIRT.exists():
        packages.append("libvirt-dev")
    if not CNI.exists():
        packages.append("containernetworking-plugins")
    if packages:
        install = f"apt-get install -y --no-install-recommends {' '.join(packages)}"
        missing.append(f"{', '.join(packages)}: {install}")
    if os.geteuid() != 0:
        missing.append(f"root: sudo make test-{target}")
    if not CGROUP.exists():
        missing.append(f"cgroup v1, with the controllers below {CGROUP.parent}")
    if for_vms and _available_memory() < VMS_MEMORY:
        missing.append(f"{VMS_MEMORY} GB of available memory")
    return missing


def _available_memory() -> float:
    """The available memory in GB."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    kibibytes = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    return kibibytes * 1024 / 1e9


def main() -> int:
    """Print what is missing; the exit code is 1 if anything is missing."""
    target = sys.argv[1] if sys.argv[1:] else "e2e"
    missing = find_missing(target)
    for one in missing:
        print(f"make test-{target} needs {one}", file=sys.stderr)
    return bool(missing)


if __name__ == "__main__":
    sys.exit(main())
