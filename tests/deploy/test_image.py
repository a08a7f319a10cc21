"""The Dockerfile's steps, run in an empty folder without a container engine."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path

import pytest

from tests.deploy.test_sbom import pins


ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")


def instructions(name: str) -> list[str]:
    """The arguments of every instruction with this name, continuation lines joined."""
    joined = re.sub(r"\\\n\s*", "", DOCKERFILE)
    lines = [line for line in joined.splitlines() if line.startswith(f"{name} ")]
    return [line.removeprefix(f"{name} ") for line in lines]


def test_it_runs_the_program_as_nobody() -> None:
    """The entry point is the module in exec form, and the user is numeric and not root."""
    assert json.loads(instructions("ENTRYPOINT")[0]) == ["python", "-m", "exporter"]
    user, group = instructions("USER")[0].split(":")
    assert int(user) > 0
    assert int(group) > 0


def test_only_what_is_copied_is_sent() -> None:
    """.dockerignore allows only the files that COPY needs."""
    copied = {line.split()[0] for line in instructions("COPY") if not line.startswith("--from")}
    ignore = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    allowed = {line[1:] for line in ignore if line.startswith("!")}

    assert ignore[0] == "*"
    assert copied == allowed
    assert all((ROOT / path).exists() for path in copied)


def test_what_is_installed_fits_the_python_that_runs_it() -> None:
    """Packages are installed by the Python of Debian 13, as in the distroless image."""
    bases = [line.split()[0].partition("@")[0] for line in instructions("FROM")]
    assert bases == ["python:3.13-slim-trixie", "gcr.io/distroless/python3-debian13:nonroot"]


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file system that the steps create, in a directory."""
    root = tmp_path_factory.mktemp("image")
    shutil.copytree(
        ROOT / "exporter", root / "exporter", ignore=shutil.ignore_patterns("__pycache__")
    )
    for step in instructions("RUN"):
        for command in step.split("&&"):
            words = [
                word.replace("/requirements.txt", str(ROOT / "requirements/runtime.txt"))
                if word == "/requirements.txt"
                else re.sub("^/", f"{root}/", word)
                for word in shlex.split(command)
            ]
            if words[0] == "python":
                words[0] = sys.executable
            subprocess.run(words, check=True, capture_output=True)
    shutil.copytree(root / "packages", root / "app")
    shutil.copytree(root / "exporter", root / "app/exporter")
    return root


def run(image: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the entry point as in the image, without this checkout on the path."""
    entry = json.loads(instructions("ENTRYPOINT")[0])
    return subprocess.run(
        [sys.executable, "-S", *entry[1:], *arguments],
        cwd=image / "app",
        env={"PATH": "/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_its_steps_make_a_program_that_runs(image: Path) -> None:
    """With only the pinned requirements installed, the program starts and answers."""
    answer = run(image, "--version")
    assert (answer.returncode, answer.stderr) == (0, "")
    assert re.fullmatch(r"\d+\.\d+\.\d+\n", answer.stdout)


def test_it_needs_no_writable_file_system(image: Path) -> None:
    """The program writes no file to its directory."""
    before = sorted(image.joinpath("app").rglob("*"))
    config = image / "config.yaml"
    config.write_text("policy: {migrationCooldown: 15m}\n", encoding="utf-8")
    answer = run(image, "check", "--config", str(config))
    assert answer.returncode == 0, answer.stderr
    assert sorted(image.joinpath("app").rglob("*")) == before


def test_it_has_what_the_bill_of_materials_lists(image: Path) -> None:
    """Only the pinned requirements are installed, as `make sbom` lists them."""
    found = {
        (re.sub(r"[-_.]+", "-", one.name).lower(), one.version)
        for one in distributions(path=[str(image / "app")])
    }

    assert found <= pins().keys()
    assert {name for name, _ in found} >= {"aiohttp", "msgspec", "structlog"}
