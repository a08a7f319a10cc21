"""Builds the files of a release. The same commit always results in the same bytes.

`python -m tests.generate.release FOLDER` (`make release-dry-run`) writes the wheel and the source
distribution, the chart, install.yaml, and the rules. It also writes the checksums of all files in
the folder. `--check` (`make release-check`) fails if a base image is not pinned by its digest. The
images, signatures and attestations are made by .github/workflows/release.yaml, which needs a
registry.
"""

import gzip
import hashlib
import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory

import yaml

from tests.cluster.binaries import find_binary
from tests.generate.manifests import CHART, ROOT, overlay
from tests.generate.rules import RULES
from tests.matrix.pairs import TESTED, Pair, Result, read_results


CHECKSUMS = "SHA256SUMS"
LICENSE = ROOT / "LICENSE"
KREW = ROOT / "deploy/krew/evictions.yaml"
DOCKERFILES = (ROOT / "Dockerfile", ROOT / "deploy/descheduler/Dockerfile")


def build_packages(folder: Path, epoch: int) -> None:
    """Write the wheel and the source distribution."""
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    environment = {**os.environ, "SOURCE_DATE_EPOCH": str(epoch)}
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)


def build_chart(folder: Path, epoch: int) -> None:
    """Write the chart as one file."""
    with TemporaryDirectory() as directory:
        command = [str(find_binary("helm")), "package", str(CHART), "--destination", directory]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        (packed,) = Path(directory).glob("*.tgz")
        (folder / packed.name).write_bytes(pack_again(packed.read_bytes(), epoch))


def pack_again(archive: bytes, epoch: int) -> bytes:
    """The same .tgz with one time for all its files, because Helm writes the current time."""
    tar, packed = io.BytesIO(), io.BytesIO()
    with (
        tarfile.open(fileobj=io.BytesIO(archive)) as read,
        tarfile.open(fileobj=tar, mode="w", format=tarfile.PAX_FORMAT) as written,
    ):
        for member in read.getmembers():
            member.mtime = epoch
            member.pax_headers = {}
            written.addfile(member, read.extractfile(member))
    with gzip.GzipFile(filename="", fileobj=packed, mode="wb", mtime=epoch) as compressed:
        compressed.write(tar.getvalue())
    return packed.getvalue()


def build_manifests(folder: Path) -> None:
    """Write `base` with cert-manager's certificate into one file, and the rules beside it."""
    objects = overlay(resources=["base"], components=["components/cert-manager"])
    (folder / "install.yaml").write_text(
        "# kubectl apply --server-side -f install.yaml; it needs cert-manager.\n"
        + yaml.safe_dump_all(objects),
        encoding="utf-8",
    )
    shutil.copy(RULES, folder)


def build_plugin(folder: Path, epoch: int) -> None:
    """Write kubectl's plugin as an archive for Krew, and Krew's manifest with its checksum."""
    program = b"#!/usr/bin/env python3\n" + (ROOT / "exporter/cli/kubectl.py").read_bytes()
    tar = io.BytesIO()
    with tarfile.open(fileobj=tar, mode="w", format=tarfile.PAX_FORMAT) as written:
        for name, body in {"kubectl-evictions": program, "LICENSE": LICENSE.read_bytes()}.items():
            member = tarfile.TarInfo(name)
            member.size, member.mtime, member.mode = len(body), epoch, 0o755
            written.addfile(member, io.BytesIO(body))
    packed = gzip.compress(tar.getvalue(), mtime=epoch)
    (folder / "kubectl-evictions.tar.gz").write_bytes(packed)
    manifest = KREW.read_text(encoding="utf-8")
    digest = hashlib.sha256(packed).hexdigest()
    (folder / "evictions.yaml").write_text(
        manifest.replace('sha256: ""', f"sha256: {digest}"), encoding="utf-8"
    )


def write_checksums(folder: Path) -> None:
    """Write checksums in the format of `sha256sum --check`."""
    files = sorted(path for path in folder.iterdir() if path.name != CHECKSUMS)
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files]
    (folder / CHECKSUMS).write_text("".join(lines), encoding="ascii")


def find_unpinned(dockerfile: str) -> list[str]:
    """The base images of a Dockerfile that are not pinned by their digest."""
    images = re.findall(r"^FROM (\S+)", dockerfile, re.MULTILINE)
    pinned = re.compile(r"\S+@sha256:[0-9a-f]{64}")
    return [image for image in images if image != "scratch" and not pinned.fullmatch(image)]


def find_stale(rows: Iterable[Result]) -> list[str]:
    """A sentence about each row of docs/versions.md whose files have changed since its run."""
    stale = []
    for row in rows:
        if row.unbuilt:
            continue
        versions = ", ".join(f"{part} {version}" for part, version in row.versions.items())
        changed = _find_changed(row.commit)
        if changed is None:
            reason = f"commit {row.commit or 'unknown'} is not in this history"
        elif changed:
            reason = f"{changed[0]} and {len(changed) - 1} more files changed after {row.commit}"
        else:
            continue
        only = next(iter((Pair(row.versions).changed or row.versions).values()))
        stale.append(f"{versions}: {reason}: run make matrix ONLY={only}")
    return stale


def _find_changed(commit: str) -> list[str] | None:
    """The tested files that differ from a commit; None if git does not know the commit."""
    command = ["git", "-C", str(ROOT), "diff", "--name-only", commit, "HEAD", "--", *TESTED]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    return done.stdout.splitlines() if commit and done.returncode == 0 else None


def check() -> None:
    """Exit with an error that names stale rows of the versions, and base images without digest."""
    if stale := find_stale(read_results()):
        sys.exit("docs/versions.md has stale rows:\n" + "\n".join(stale))
    unpinned = {
        reference for path in DOCKERFILES for reference in find_unpinned(path.read_text("utf-8"))
    }
    if unpinned:
        sys.exit(
            f"not pinned by digest: {', '.join(sorted(unpinned))}. Append @ and the digest to each;"
            " Dependabot then renews it. This command prints the digest:"
            " docker buildx imagetools inspect IMAGE --format '{{.Manifest.Digest}}'"
        )


def main(folder: Path) -> None:
    """Write everything into the folder."""
    command = ["git", "-C", str(ROOT), "log", "-1", "--format=%ct"]
    epoch = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    build_packages(folder, epoch)
    build_chart(folder, epoch)
    build_manifests(folder)
    build_plugin(folder, epoch)
    write_checksums(folder)
    print((folder / CHECKSUMS).read_text(encoding="ascii"), end="")


if __name__ == "__main__":
    if sys.argv[1:] == ["--check"]:
        check()
    else:
        main(Path(sys.argv[1]))
