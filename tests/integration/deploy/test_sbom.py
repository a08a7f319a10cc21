"""The bill of materials of `make sbom` lists the packages of the image."""

import json
import re
import shutil
import subprocess
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from exporter import __version__
from tests.support.documents import ROOT


PINNED = ROOT / "requirements/runtime.txt"
_PIN = re.compile(
    r"^([a-z0-9._-]+)==([^\s;]+).*\\\n((?:    --hash=sha256:\S+(?: \\)?\n)+)", re.MULTILINE
)


def pins() -> dict[tuple[str, str], set[str]]:
    """Name and version of each pinned requirement, with its hashes."""
    text = PINNED.read_text(encoding="utf-8")
    pins = {
        (name, version): set(re.findall(r"sha256:([0-9a-f]{64})", hashes))
        for name, version, hashes in _PIN.findall(text)
    }
    assert len(pins) == len(re.findall("^[a-z]", text, re.MULTILINE))
    return pins


def make(target: str, folder: Path, environment: Mapping[str, str] | None = None) -> None:
    """Run a target of the Makefile that writes its files into this folder."""
    program = shutil.which("make")
    assert program
    made = subprocess.run(
        [program, target, "--old-file=.venv/.development", f"DIST={folder}"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 0, made.stderr


@pytest.fixture(scope="module")
def bill(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The output of `make sbom`, which needs no installation and no network."""
    directory = tmp_path_factory.mktemp("dist")
    nowhere = dict.fromkeys(("http_proxy", "https_proxy"), "http://127.0.0.1:1")
    make("sbom", directory, {"PATH": "/usr/bin:/bin", **nowhere})
    assert [path.name for path in directory.iterdir()] == ["sbom.cdx.json"]
    read: dict[str, Any] = json.loads((directory / "sbom.cdx.json").read_text(encoding="utf-8"))
    return read


def test_it_lists_exactly_the_pinned_requirements(bill: dict[str, Any]) -> None:
    """The bill has each pinned requirement with its version and hashes, and nothing else."""
    listed = {
        (component["name"], component["version"]): {
            digest["content"]
            for reference in component["externalReferences"]
            for digest in reference["hashes"]
            if digest["alg"] == "SHA-256"
        }
        for component in bill["components"]
    }

    assert listed == pins()
    assert len(bill["components"]) == len(listed)
    assert {component["purl"] for component in bill["components"]} == {
        f"pkg:pypi/{name}@{version}" for name, version in listed
    }


def test_it_says_of_what_it_is_the_bill(bill: dict[str, Any]) -> None:
    """The bill is CycloneDX, and has the exporter's version and licence."""
    assert bill["bomFormat"] == "CycloneDX"
    about = bill["metadata"]["component"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert (about["name"], about["version"]) == (project["name"], __version__)
    assert about["licenses"][0]["license"]["id"] == project["license"]


def test_every_requirement_is_hashed() -> None:
    """Every requirement has hashes, so that a replaced package is not installed."""
    for path in (ROOT / "requirements").glob("*.txt"):
        text = path.read_text(encoding="utf-8")
        blocks = re.split(r"^(?=[a-z])", text, flags=re.MULTILINE)
        assert all("--hash=sha256:" in block for block in blocks if block.strip())
        assert not re.search(r"^(?:-|\S+ @ )|://", text, re.MULTILINE)
