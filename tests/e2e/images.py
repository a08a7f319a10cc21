"""The images of the e2e cluster, built by buildah from our own Dockerfiles.

No registry is used. Stand-ins of the same names replace the base images of the Dockerfiles. They
are made from Debian's packages. For `python` and `golang` they are a Debian with its Python, or
with the machine's Go. For distroless they have the same packages as distroless itself.

`python -m tests.e2e.images` writes the outdated images as archives to `.tools/e2e`.
"""

import hashlib
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from exporter import __version__
from tests.cluster.binaries import find_binary
from tests.cluster.versions import RUNNING
from tests.generate.manifests import DESCHEDULER_IMAGE, EXPORTER_IMAGE, REGISTRY


ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".tools" / "e2e"
EARLIER_COMMIT = "c745096"
"""The commit from which a test upgrades."""

PYTHON = "docker.io/library/python:3.13-slim-trixie"
GO = "docker.io/library/golang:1.26-trixie"
DISTROLESS = "gcr.io/distroless/python3-debian13:nonroot"
DISTROLESS_PACKAGES = (
    *("base-files", "ca-certificates", "libc6", "libgcc-s1", "libgomp1", "libssl3t64"),
    *("libstdc++6", "libzstd1", "media-types", "netbase", "tzdata", "libbz2-1.0", "libdb5.3t64"),
    *("libexpat1", "libffi8", "liblzma5", "libncursesw6", "libreadline8t64", "libsqlite3-0"),
    *("libtinfo6", "libuuid1", "zlib1g"),
    *("libpython3.13-minimal", "libpython3.13-stdlib", "python3.13-minimal"),
)
"""The packages of distroless' own `base`, `cc` and `python3`."""
_AUTHORITIES = "/etc/ssl/certs/ca-certificates.crt"
_PATH = "PATH=/usr/local/go/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_GO_CACHES = {
    "GOROOT": "/usr/local/go:ro",
    "GOMODCACHE": "/root/go/pkg/mod",
    "GOCACHE": "/root/.cache/go-build",
}
"""Folders of the machine's Go, and their mount points in the build."""


@dataclass(frozen=True)
class Image:
    """One of our images: its sources, and how it is built."""

    name: str
    sources: Sequence[str]
    """Files and folders of the checkout."""
    build: Callable[[str], None]
    """Builds the image; called with the revision."""

    @property
    def archive(self) -> Path:
        """The file of the image."""
        return FOLDER / f"{self.name.rpartition('/')[2].replace(':', '-')}.tar"

    @property
    def revision(self) -> str:
        """The last commit that changed a source."""
        ended = subprocess.run(
            ["git", "log", "-1", "--format=%H", "--", *self.sources],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        return ended.stdout.strip() or "unknown"

    def update(self) -> None:
        """Build the image if its sources have changed."""
        versions = f"{__version__} {RUNNING['kubevirt']}"
        state = f"{_fingerprint(self.sources)} {self.revision} {versions}"
        stamp = self.archive.with_suffix(".stamp")
        if self.archive.exists() and stamp.exists() and stamp.read_text() == state:
            print(f"{self.name}: up to date")
            return
        started = time.monotonic()
        self.build(self.revision)
        stamp.unlink(missing_ok=True)
        self.archive.unlink(missing_ok=True)
        buildah("push", "-q", self.name, f"docker-archive:{self.archive}:{self.name}")
        stamp.write_text(state)
        print(f"{self.name}: built in {time.monotonic() - started:.0f} s")


def buildah(*arguments: str | Path) -> str:
    """Run buildah with its own storage and mount namespace; returns its output."""
    storage: list[str | Path] = ["--root", FOLDER / "storage", "--runroot", FOLDER / "run"]
    return run("unshare", "--mount", "buildah", *storage, "--storage-driver=overlay", *arguments)


def run(*arguments: str | Path, folder: Path = ROOT) -> str:
    """Run a program that must succeed; returns its output."""
    ended = subprocess.run(arguments, capture_output=True, text=True, check=False, cwd=folder)
    if ended.returncode:
        command = " ".join(str(argument) for argument in arguments)
        raise SystemExit(f"{command}\n{ended.stdout}{ended.stderr}")
    return ended.stdout


def _build_exporter(revision: str) -> None:
    stand_in(PYTHON, _debian)
    stand_in(DISTROLESS, _distroless)
    build_file(EXPORTER_IMAGE, ROOT, revision)


def _build_earlier(_: str) -> None:
    """Build the earlier exporter with its own requirements, but with the present Dockerfile."""
    with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
        check_out(EARLIER_COMMIT, Path(folder), "exporter", "requirements")
        for name in ("Dockerfile", ".dockerignore"):
            shutil.copy(ROOT / name, folder)
        build_file(EARLIER.name, Path(folder), EARLIER_COMMIT)


def check_out(commit: str, folder: Path, *paths: str) -> None:
    """Write files of a commit to a folder."""
    archive = folder / "checkout.tar"
    run("git", "archive", f"--output={archive}", commit, *paths)
    run("tar", "-xf", archive, folder=folder)
    archive.unlink()


def _build_descheduler(revision: str) -> None:
    stand_in(PYTHON, _debian)
    stand_in(GO, _golang)
    folders = run("go", "env", *_GO_CACHES).splitlines()
    places = zip(folders, _GO_CACHES.values(), strict=True)
    volumes = [f"--volume={here}:{there}" for here, there in places]
    build_file(DESCHEDULER_IMAGE, ROOT / "deploy/descheduler", revision, *volumes)


def _build_pause(_: str) -> None:
    made = buildah("from", "scratch").strip()
    buildah("copy", "-q", made, find_binary("pause"), "/pause")
    buildah("config", "--entrypoint", '["/pause"]', "--user", "65535:65535", made)
    buildah("commit", "-q", "--rm", made, PAUSE.name)


def _build_launcher(_: str) -> None:
    """Build the launcher's stand-in: its programs have virt-launcher's names, but only wait."""
    made = buildah("from", "scratch").strip()
    for name in ("virt-launcher-monitor", "virt-tail"):
        buildah("copy", "-q", made, find_binary("pause"), f"/usr/bin/{name}")
    buildah("commit", "-q", "--rm", made, LAUNCHER.name)


def of_binaries(name: str, folder: str, *tools: str, user: str = "0") -> Image:
    """An image with tools of tests/tools and a /tmp; it runs the first tool."""

    def build(_: str) -> None:
        made = buildah("from", "scratch").strip()
        with tempfile.TemporaryDirectory(dir=FOLDER) as root:
            (Path(root) / "tmp").mkdir()
            (Path(root) / "tmp").chmod(0o1777)
            buildah("copy", "-q", made, root, "/")
        for tool in tools:
            buildah("copy", "-q", made, find_binary(tool), f"/bin/{tool}")
        buildah("config", "--entrypoint", f'["/bin/{tools[0]}"]', "--user", user, made)
        buildah("commit", "-q", "--rm", made, f"localhost/{name}:1")

    return Image(f"localhost/{name}:1", [f"tests/tools/{folder}"], build)


def build_file(
    image: str, folder: Path, revision: str, *options: str, file: Path | None = None
) -> None:
    """Build a Dockerfile, by default that of the folder; its steps trust the machine's CAs.

    The stand-ins of the base images have no digests, so the Dockerfile's digests are removed.
    """
    dockerfile = FOLDER / "Dockerfile"
    text = (file or folder / "Dockerfile").read_text(encoding="utf-8")
    dockerfile.write_text(re.sub(r"@sha256:[0-9a-f]{64}", "", text), encoding="utf-8")
    made = [f"--build-arg=VERSION={__version__}", f"--build-arg=REVISION={revision}"]
    trust = f"--volume={_AUTHORITIES}:{_AUTHORITIES}:ro"
    here = ["--isolation=chroot", "--network=host", "--pull-never", "--layers", trust]
    buildah("build", *here, *made, *options, "--file", dockerfile, "--tag", image, folder)


def stand_in(image: str, make: Callable[[Path], Path], *config: str) -> None:
    """Make the stand-in of an image, if it is missing, from the files that `make` writes."""
    if image in buildah("images", "--format={{.Name}}:{{.Tag}}").splitlines():
        return
    with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
        root = make(Path(folder))
        made = buildah("from", "scratch").strip()
        buildah("add", "-q", made, root, "/")
        buildah("config", "--env", _PATH, *config, made)
        buildah("commit", "-q", "--rm", made, image)
    print(f"{image}: a stand-in of Debian's packages")


def _debian(folder: Path) -> Path:
    """An archive of Debian with its Python and pip."""
    root = folder / "root.tar"
    link = "--customize-hook=ln -s python3 $1/usr/bin/python"
    packages = "--include=ca-certificates,python3,python3-pip"
    run("mmdebstrap", "--variant=minbase", packages, link, "trixie", root)
    return root


def _golang(folder: Path) -> Path:
    """A Debian in which a build mounts the machine's Go."""
    return _debian(folder)


def _distroless(folder: Path) -> Path:
    """A folder with unpacked packages, but without a shell or a package manager."""
    root = folder / "root"
    download = f"cd /root && apt-get download {' '.join(DISTROLESS_PACKAGES)}"
    hooks = (f"chroot $1 sh -c '{download}'", f"cp $1/root/*.deb {folder}")
    run(
        "mmdebstrap",
        "--variant=apt",
        *(f"--customize-hook={hook}" for hook in hooks),
        *("trixie", "/dev/null"),
    )
    for package in folder.glob("*.deb"):
        run("dpkg-deb", "--extract", package, root)
    for name in ("python", "python3"):
        (root / "usr/bin" / name).symlink_to("python3.13")
    certificates = sorted((root / "usr/share/ca-certificates").rglob("*.crt"))
    authorities = root / _AUTHORITIES.removeprefix("/")
    authorities.write_text("".join(certificate.read_text() for certificate in certificates))
    people = (
        "root:x:0:0:root:/root:/sbin/nologin\nnonroot:x:65532:65532::/home/nonroot:/sbin/nologin\n"
    )
    (root / "etc/passwd").write_text(people)
    return root


def _fingerprint(sources: Sequence[str]) -> str:
    """One hash over files and folders of the checkout, and over this module."""
    digest = hashlib.sha256(Path(__file__).read_bytes())
    for source in sources:
        path = ROOT / source
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.is_file() and "__pycache__" not in file.parts:
                digest.update(str(file.relative_to(ROOT)).encode() + file.read_bytes())
    return digest.hexdigest()


EXPORTER = Image(
    EXPORTER_IMAGE,
    ["Dockerfile", ".dockerignore", "requirements/runtime.txt", "exporter"],
    _build_exporter,
)
DESCHEDULER = Image(DESCHEDULER_IMAGE, ["deploy/descheduler"], _build_descheduler)
PAUSE = Image("localhost/pause:1", ["tests/tools/pause"], _build_pause)
LAUNCHER = Image("docker.io/library/virt-launcher:latest", ["tests/tools/pause"], _build_launcher)
"""The image has the name that virt-controller uses by default."""
EARLIER = Image(f"{REGISTRY}/exporter:earlier", ["Dockerfile"], _build_earlier)
FULL = bool(os.environ.get("FULL"))
"""Whether to run also the tests that take longer."""
OPERATOR = of_binaries("prometheus-operator", "prometheus-3.15", "prometheus-operator")
RELOADER = of_binaries(
    "prometheus-operator-reloader", "prometheus-3.15", "prometheus-config-reloader"
)
PROMETHEUS = of_binaries("prometheus", "shared", "prometheus", "promtool")
ALERTMANAGER = of_binaries("alertmanager", "alertmanager", "alertmanager")
MONITORING = (OPERATOR, RELOADER, PROMETHEUS, ALERTMANAGER)
IMAGES = (PAUSE, LAUNCHER, EXPORTER, DESCHEDULER, EARLIER, *(MONITORING if FULL else ()))


def update(images: Iterable[Image]) -> None:
    """Bring every archive up to date."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for image in images:
        image.update()


if __name__ == "__main__":
    update(IMAGES)
