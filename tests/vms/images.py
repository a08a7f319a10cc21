"""The images of the cluster with real VMs: KubeVirt's, a guest's, and ours.

`python -m tests.vms.images` builds the outdated images, as `tests.e2e.images` does for its own.
"""

import json
import shutil
import tarfile
import tempfile
import zlib
from pathlib import Path

from tests.cluster.binaries import find_binary
from tests.cluster.versions import RUNNING
from tests.e2e.images import (
    DESCHEDULER,
    EARLIER,
    EXPORTER,
    FOLDER,
    PAUSE,
    ROOT,
    Image,
    build_file,
    buildah,
    of_binaries,
    run,
    stand_in,
    update,
)


_HERE = Path(__file__).parent
_MODULE = "tests/tools/kubevirt-nodes"
_QEMU = "localhost/qemu:trixie"
_QEMU_PACKAGES = (
    *("qemu-system-x86", "qemu-utils", "seabios", "ovmf", "passt", "swtpm"),
    *("libvirt-daemon", "libvirt-daemon-driver-qemu", "libvirt-daemon-log", "libvirt-clients"),
    *("ca-certificates", "nftables", "iproute2", "procps", "acl", "xorriso", "e2fsprogs"),
    *("xfsprogs", "util-linux", "findutils", "tar", "libcap2-bin"),
)
_KERNEL = "linux-image-cloud-amd64"
_GUEST_INIT = """#!/bin/sh
busybox mkdir -p /proc /dev /fill
busybox mount -t proc proc /proc
busybox mount -t devtmpfs dev /dev
busybox mount -t tmpfs -o size=90% tmpfs /fill
count=$(busybox sed -n 's/.*fill=\\([0-9]*\\).*/\\1/p' /proc/cmdline)
busybox dd if=/dev/urandom of=/fill/memory bs=1M count="$count"
echo filled >/dev/console
while true; do busybox sleep 60; done
"""
"""Fills as many MiB of memory as `fill=` says, and then sleeps; a migration copies this memory."""


def _build_launcher(revision: str) -> None:
    stand_in(_QEMU, _qemu)
    kubevirt = f"kubevirt.io/kubevirt@v{RUNNING['kubevirt']}"
    module = run("go", "list", "-m", "-f={{.Dir}}", kubevirt, folder=ROOT / _MODULE)
    programs = find_binary("virt-launcher").parent
    contexts = {"programs": programs, "tests": _HERE}
    options = [f"--build-context={name}={folder}" for name, folder in contexts.items()]
    file = _HERE / "Dockerfile"
    build_file(LAUNCHER.name, Path(module.strip()), revision, *options, file=file)


def _qemu(folder: Path) -> Path:
    """A Debian with QEMU and libvirt, as an archive."""
    root = folder / "root.tar"
    slim = [f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in ("doc", "man", "locale")]
    include = f"--include={','.join(_QEMU_PACKAGES)}"
    recommends = '--aptopt=APT::Install-Recommends "false"'
    run("mmdebstrap", "--variant=minbase", include, recommends, *slim, "trixie", root)
    return root


def _build_guest(_: str) -> None:
    """Build the guest's image: Debian's kernel and busybox, without a disk."""
    with tempfile.TemporaryDirectory(dir=FOLDER) as name:
        folder = Path(name)
        depends = run("apt-cache", "depends", _KERNEL).split()
        kernel = next(
            name for name in depends if name.startswith("linux-image-") and name != _KERNEL
        )
        run("apt-get", "download", kernel, "busybox-static", folder=folder)
        for package in folder.glob("*.deb"):
            run("dpkg-deb", "--extract", package, folder / "packages")
        root = folder / "root"
        (root / "bin").mkdir(parents=True)
        for program in ("busybox", "sh"):
            shutil.copy(next((folder / "packages").glob("**/bin/busybox")), root / "bin" / program)
        (root / "init").write_text(_GUEST_INIT)
        (root / "init").chmod(0o755)
        pack = "find . | busybox cpio -o -H newc | gzip >../initrd"
        run("env", f"PATH={root}/bin:/usr/bin:/bin", "sh", "-c", pack, folder=root)
        made = buildah("from", "scratch").strip()
        kernel_file = next((folder / "packages/boot").glob("vmlinuz-*"))
        for file in (kernel_file, folder / "initrd"):
            _pad(file)
        buildah("copy", "-q", made, kernel_file, "/boot/vmlinuz")
        buildah("copy", "-q", made, folder / "initrd", "/boot/initrd")
        buildah("config", "--user", "107:107", "--entrypoint", '["/none"]', made)
        buildah("commit", "-q", "--rm", made, GUEST.name)


def _pad(file: Path) -> None:
    """Append zeros, which nobody reads, until the CRC-32 is less than 2**31.

    KubeVirt's CRD has this checksum as an int32. With a greater one virt-handler cannot update the
    VMI: "Checked value must be of type integer with format int32" (`updateChecksumInfo` in vm.go).
    """
    content = file.read_bytes()
    while zlib.crc32(content) >= 2**31:
        content += b"\0"
    file.write_bytes(content)


def digest_name(image: Image) -> str:
    """The name with a digest, by which KubeVirt requests an image on a migration's target."""
    with tarfile.open(image.archive) as archive:
        manifest = archive.extractfile("manifest.json")
        assert manifest
        (described,) = json.load(manifest)
    digest = described["Config"].removesuffix(".json")
    return f"{image.name.rpartition(':')[0]}@sha256:{digest}"


LAUNCHER = Image(
    "localhost/kubevirt/virt-launcher:1",
    [_MODULE, *(f"tests/vms/{name}" for name in ("Dockerfile", "virtqemud", "images.py"))],
    _build_launcher,
)
"""virt-launcher and virt-handler."""
OPERATOR = of_binaries(
    "kubevirt/virt-operator",
    _MODULE.removeprefix("tests/tools/"),
    *("virt-operator", "virt-api", "virt-controller", "virt-exportproxy"),
    user="1001",
)
GUEST = Image("localhost/guest:1", ["tests/vms/images.py"], _build_guest)
IMAGES = (PAUSE, OPERATOR, LAUNCHER, GUEST, EXPORTER, EARLIER, DESCHEDULER)


if __name__ == "__main__":
    update(IMAGES)
