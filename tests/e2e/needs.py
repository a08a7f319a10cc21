"""What `make e2e` needs of the machine, checked before anything is built.

`python -m tests.e2e.needs` names what is missing and the command that installs it. It runs before
there is a virtual environment.
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
"""By program, the Debian package that has it."""
CNI = Path("/usr/lib/cni/ptp")
CGROUP = Path("/sys/fs/cgroup/memory")


def find_missing() -> list[str]:
    """Say what is missing, each with its remedy; nothing if all is there."""
    missing = []
    path = f"{os.environ['PATH']}:/usr/sbin"
    packages = [name for program, name in PROGRAMS.items() if not shutil.which(program, path=path)]
    if not CNI.exists():
        packages.append("containernetworking-plugins")
    if packages:
        install = f"apt-get install -y --no-install-recommends {' '.join(packages)}"
        missing.append(f"{', '.join(packages)}: {install}")
    if os.geteuid() != 0:
        missing.append("root: sudo make e2e")
    if not CGROUP.exists():
        missing.append(f"cgroup v1, with the controllers below {CGROUP.parent}")
    return missing


def main() -> int:
    """Print what is missing; the exit code is 1 if anything is."""
    missing = find_missing()
    for one in missing:
        print(f"make e2e needs {one}", file=sys.stderr)
    return bool(missing)


if __name__ == "__main__":
    sys.exit(main())
