"""The files of a release, and the workflows that make them."""

import asyncio
import hashlib
import os
import re
import signal
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from exporter import __version__
from exporter.runbooks import NAMES
from tests.cluster import PATIENCE, find_binary
from tests.generate import REPOSITORY
from tests.generate.manifests import (
    NAME,
    REGISTRY,
    ROOT,
)
from tests.generate.release import CHECKSUMS, find_unpinned
from tests.generate.rules import RULES
from tests.integration.deploy.test_sbom import make
from tests.support.program import ANYWHERE


WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yaml"))
RELEASE = ROOT / ".github/workflows/release.yaml"
FILES = {
    f"{NAME}-{__version__}.tgz",
    f"{NAME.replace('-', '_')}-{__version__}-py3-none-any.whl",
    f"{NAME.replace('-', '_')}-{__version__}.tar.gz",
    "evictions.yaml",
    "install.yaml",
    "kubectl-evictions.tar.gz",
    "rules.yaml",
    "sbom.cdx.json",
    CHECKSUMS,
}


def dry_run(folder: Path) -> str:
    """Run `make release-dry-run`; returns the checksums."""
    make("release-dry-run", folder)
    return (folder / CHECKSUMS).read_text(encoding="ascii")


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of a release."""
    folder = tmp_path_factory.mktemp("dist")
    dry_run(folder)
    return folder


def test_two_runs_are_equal(dist: Path, tmp_path: Path) -> None:
    """Two runs make equal files, and the checksums are right."""
    first = (dist / CHECKSUMS).read_text(encoding="ascii")

    assert dry_run(tmp_path) == first
    assert {path.name for path in dist.iterdir()} == FILES
    for line in first.splitlines():
        digest, _, name = line.partition("  ")
        assert hashlib.sha256((dist / name).read_bytes()).hexdigest() == digest
    print(first)


def test_krew_installs_a_plugin_that_runs(dist: Path, tmp_path: Path) -> None:
    """Krew's manifest has the archive's checksum, and the program in it runs alone."""
    (platform,) = yaml.safe_load((dist / "evictions.yaml").read_text())["spec"]["platforms"]
    packed = dist / platform["uri"].rpartition("/")[2]
    assert hashlib.sha256(packed.read_bytes()).hexdigest() == platform["sha256"]
    assert f"/v{__version__}/" in platform["uri"]
    with tarfile.open(packed) as archive:
        archive.extractall(tmp_path, filter="data")
    program = [sys.executable, "-I", tmp_path / platform["bin"], "--help"]
    output = subprocess.run(program, check=True, capture_output=True, text=True, cwd=tmp_path)
    assert "kubectl evictions explain shop/db1" in output.stdout


def test_the_chart_is_whole_and_names_its_version(dist: Path) -> None:
    """The packed chart has no symbolic links, Helm accepts it, and its image has the tag."""
    packed = dist / f"{NAME}-{__version__}.tgz"
    with tarfile.open(packed) as archive:
        assert all(member.isreg() for member in archive)
    command = [str(find_binary("helm")), "template", NAME, str(packed), "--kube-version", "1.30.0"]
    command += ["--set", "prometheusRule.enabled=true"]
    made = subprocess.run(command, check=True, capture_output=True, text=True)

    assert not made.stderr
    assert f"{REGISTRY}/exporter:{__version__}" in made.stdout
    assert (dist / "rules.yaml").read_text(encoding="utf-8") == RULES.read_text(encoding="utf-8")


def test_install_yaml_is_everything_but_cert_manager(dist: Path) -> None:
    """install.yaml begins with the namespace, and has the exporter with its Certificate."""
    objects = list(yaml.safe_load_all((dist / "install.yaml").read_text(encoding="utf-8")))
    kinds = [document["kind"] for document in objects]

    assert kinds[0] == "Namespace"
    assert {"Deployment", "Certificate", "ConfigMap", "NetworkPolicy"} <= set(kinds)


@pytest.fixture(scope="module")
def installed(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment in which the wheel was installed."""
    folder = tmp_path_factory.mktemp("installed")
    (wheel,) = dist.glob("*.whl")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    command += ["--disable-pip-version-check", "--target", str(folder), str(wheel)]
    subprocess.run(command, check=True)
    return folder


async def test_the_wheel_has_the_command(installed: Path, tmp_path: Path) -> None:
    """The installed command starts the demo, which ends at Ctrl-C."""
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(ANYWHERE))
    demo = await asyncio.create_subprocess_exec(
        *(str(installed / "bin" / NAME), "demo", "--config", str(config)),
        env={**os.environ, "PYTHONPATH": str(installed)},
        cwd=tmp_path,
        stdout=asyncio.subprocess.PIPE,
    )
    assert demo.stdout is not None
    try:
        async with asyncio.timeout(PATIENCE):
            while b"http://127.0.0.1:" not in await demo.stdout.readline():
                assert demo.returncode is None
        demo.send_signal(signal.SIGINT)
        await demo.communicate()
        assert demo.returncode == 0
    finally:
        if demo.returncode is None:
            demo.kill()


def test_the_wheel_has_all_of_the_page(installed: Path) -> None:
    """The wheel has the status page's template, style and script, and each runbook."""
    files = {path.name for path in (installed / "exporter/server/page").iterdir()}
    runbooks = {path.stem for path in (installed / "exporter/runbooks").glob("*.md")}

    assert files >= {"page.html.j2", "page.css", "page.js"}
    assert runbooks == set(NAMES)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_may_do_nothing_by_default(path: Path) -> None:
    """A workflow has no permissions by default, and each job sets its own.

    Each action is pinned to a commit, with its version in a comment.
    """
    text = path.read_text(encoding="utf-8")
    workflow: dict[str, Any] = yaml.safe_load(text)
    uses = re.findall(r"uses: (\S+)(.*)", text)

    assert workflow["permissions"] == {}
    assert all("permissions" in job for job in workflow["jobs"].values())
    assert uses
    for action, comment in uses:
        assert re.fullmatch(r"[\w.-]+/[\w.-]+@[0-9a-f]{40}", action), action
        assert re.fullmatch(r"  # v\d+\.\d+\.\d+", comment), action


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_no_checkout_leaves_its_credentials(path: Path) -> None:
    """No checkout keeps its token for later steps."""
    workflow: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    checkouts = [step for step in steps if step.get("uses", "").startswith("actions/checkout@")]

    assert all(
        checkout.get("with", {}).get("persist-credentials") is False for checkout in checkouts
    )


def test_no_release_without_digests_of_the_base_images() -> None:
    """The workflow refuses base images without a digest, except stages and `scratch`."""
    pinned = f"python:3.11@sha256:{'0' * 64}"
    dockerfile = f"FROM {pinned} AS build\nFROM golang:1.26 AS go\nFROM scratch\n"

    assert find_unpinned(dockerfile) == ["golang:1.26"]
    assert "run: make release-check" in RELEASE.read_text(encoding="utf-8")


def test_signatures_are_verified_by_workflow_and_tag() -> None:
    """Signatures are verified by workflow and tag, because other workflows could sign too."""
    commands = re.findall(r"^cosign verify.*$", (ROOT / "SECURITY.md").read_text(), re.MULTILINE)
    release = RELEASE.relative_to(ROOT)

    assert commands
    assert all(
        f"--certificate-identity {REPOSITORY}/{release}@refs/tags/TAG " in line for line in commands
    )
