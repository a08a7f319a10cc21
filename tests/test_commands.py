"""What can be typed, and what it exits with."""

import argparse
import subprocess
import sys
from pathlib import Path

import pytest

from exporter import __version__
from exporter.commands import EXIT_MEANINGS, Exit, check, parse, read_settings_for


def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """`python -m exporter` with these arguments, to its end."""
    return subprocess.run(
        [sys.executable, "-m", "exporter", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def written(directory: Path, text: str) -> Path:
    """A configuration file."""
    path = directory / "config.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_the_version_is_told() -> None:
    """`--version` tells the version and nothing else."""
    done = run("--version")

    assert (done.returncode, done.stdout) == (0, f"{__version__}\n")


def test_a_valid_configuration_is_called_so(tmp_path: Path) -> None:
    """`check` of a valid file exits with 0."""
    path = written(tmp_path, "policy: {migrationCooldown: 1h30m}\n")
    done = run("check", "--config", str(path))

    assert (done.returncode, done.stdout, done.stderr) == (0, f"{path}: valid\n", "")


def test_every_fault_is_told_with_its_path(tmp_path: Path) -> None:
    """`check` of a bad file exits with 2 and one line per fault."""
    path = written(
        tmp_path,
        """
policy: {migrationCooldown: soon, maxMigrationCooldown: -1h, guards: {evacuation: true}}
listen: {query: nowhere}
stuck: {failedAttempts: 0}
namespaces: shop
checkpoint: somewhere
nonsense: 1
""",
    )
    done = run("check", "--config", str(path))

    assert done.returncode == 2
    assert {line.split(":")[0] for line in done.stderr.splitlines()} == {
        "policy.migrationCooldown",
        "policy.maxMigrationCooldown",
        "policy.guards.evacuation",
        "listen.query",
        "stuck.failedAttempts",
        "namespaces",
        "checkpoint",
        "nonsense",
    }
    assert "Traceback" not in done.stderr


def test_the_main_job_refuses_the_same(tmp_path: Path) -> None:
    """The main job and the demo end with 2 over a bad file, before anything else."""
    path = written(tmp_path, "polcy: {}\n")
    for done in (run("--config", str(path)), run("demo", "--config", str(path))):
        assert (done.returncode, done.stderr) == (2, "polcy: unknown key\n")


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("policy: [", id="broken"),
        pytest.param("policy: &a [*a]", id="endless"),
        pytest.param("- policy", id="list"),
        pytest.param("!!python/object/apply:os.getcwd []", id="code"),
        pytest.param("a: 1\na: 2", id="twice"),
        pytest.param("2001-99-99", id="no-date"),
    ],
)
def test_what_is_no_configuration_is_refused(
    tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Text that is no YAML, or no mapping, is one fault."""
    assert check(written(tmp_path, text)) is Exit.USAGE
    assert capsys.readouterr().err


@pytest.mark.parametrize("name", ["", "missing.yaml"], ids=["directory", "missing"])
def test_a_file_that_cannot_be_read_is_refused(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A directory or a missing file is told as such."""
    assert check(tmp_path / name) is Exit.USAGE
    assert "cannot be read" in capsys.readouterr().err


def test_an_empty_file_is_all_defaults(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing written is nothing wrong."""
    assert check(written(tmp_path, "")) is Exit.OK
    assert "valid" in capsys.readouterr().out


def test_remarks_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What an operator should know of a valid file is told with it."""
    path = written(tmp_path, "policy: {migrationCooldown: 0, migrationHistoryWindow: 24h}")

    assert check(path) is Exit.OK
    out = capsys.readouterr().out
    assert "policy.migrationCooldown: 0 means no floor" in out
    assert "policy.migrationHistoryWindow: 24h" in out


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(["--nonsense"], id="unknown-flag"),
        pytest.param(["explode"], id="unknown-command"),
        pytest.param(["check"], id="check-without-file"),
        pytest.param(["--log-level", "loud"], id="unknown-level"),
        pytest.param(["--log-format", "xml"], id="unknown-format"),
        pytest.param(["demo", "--speed", "0"], id="speed-zero"),
        pytest.param(["demo", "--speed", "fast"], id="speed-in-words"),
        pytest.param(["demo", "--speed", "nan"], id="speed-nan"),
        pytest.param(["demo", "--vms", "0"], id="no-vms"),
        pytest.param(["demo", "--nodes", "-1"], id="negative-nodes"),
        pytest.param(["--config"], id="flag-without-value"),
    ],
)
def test_wrong_arguments_exit_with_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """What cannot be understood is told, with the usage."""
    with pytest.raises(SystemExit) as end:
        parse(arguments)

    assert end.value.code == Exit.USAGE
    assert "usage: python -m exporter" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "format_", "level"),
    [
        pytest.param([], "console", "debug", id="the-file-s"),
        pytest.param(["--log-level", "error"], "console", "error", id="level"),
        pytest.param(["--log-format", "json"], "json", "debug", id="format"),
        pytest.param(["--log-level", "error", "demo"], "console", "error", id="before-demo"),
        pytest.param(["demo", "--log-level", "error"], "console", "error", id="after-demo"),
    ],
)
def test_flags_go_before_the_file(
    tmp_path: Path, arguments: list[str], format_: str, level: str
) -> None:
    """The log flags are stronger than the file, wherever they stand."""
    path = written(tmp_path, "log: {format: console, level: debug}")
    settings = read_settings_for(parse(["--config", str(path), *arguments]))

    assert (settings.log.format, settings.log.level) == (format_, level)


def test_without_a_file_all_is_default() -> None:
    """No `--config`: the defaults."""
    arguments = parse([])
    settings = read_settings_for(arguments)

    assert isinstance(arguments, argparse.Namespace)
    assert str(settings.listen.query[0]) == "127.0.0.1:9810"
    assert str(settings.listen.metrics[0]) == "0.0.0.0:9811"


def test_every_exit_code_has_a_meaning() -> None:
    """The codes are told apart, and 0 to 2 mean what they mean everywhere."""
    assert set(EXIT_MEANINGS) == set(Exit)
    assert len(set(Exit)) == 8
    assert (Exit.OK, Exit.FAILED, Exit.USAGE) == (0, 1, 2)
