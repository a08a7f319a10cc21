"""The command line's arguments."""

import argparse
import re
import shlex

import pytest

from exporter.cli.arguments import make_parser, parse
from exporter.errors import Exit


@pytest.mark.parametrize(
    "arguments",
    [
        "--nonsense",
        "--config",
        "--log-level loud",
        "--log-format xml",
        "explode",
        "check",
        "explain ..",
        "check --config x --explain db1",
        "explain a/b/c",
        "explain /b",
        "explain a/..",
        "explain ../status",
        "explain a/\udcff",
        "node a/b",
        "node ..",
        "demo --speed 0",
        "demo --speed fast",
        "demo --speed nan",
        "demo --vms 0",
        "demo --vms 20001",
        "demo --nodes -1",
        "demo --listen nowhere",
        "demo --listen unix:/a",
        "record",
        "record --output x --for soon",
        "record --output x --for 0",
        "replay --from monday",
        "replay --scenario month",
        "replay --scenario week-pilot --days 1e300",
    ],
)
def test_wrong_arguments_exit_with_2(arguments: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The parser exits with 2 for invalid arguments, and shows the usage."""
    with pytest.raises(SystemExit) as end:
        parse(arguments.split())

    assert end.value.code == Exit.USAGE
    assert "usage: python -m exporter" in capsys.readouterr().err


def list_parsers() -> dict[str, argparse.ArgumentParser]:
    """The parser of each command by its name; the name of the main job is ""."""
    parser = make_parser()
    subparsers = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))  # noqa: SLF001 (argparse lists them nowhere else)
    (commands,) = subparsers
    return {"": parser, **commands.choices}


PARSERS = list_parsers()


@pytest.mark.parametrize("command", PARSERS)
def test_the_help_has_an_example_that_can_be_typed(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each command's `--help` fits 80 columns and ends with a valid example."""
    monkeypatch.setenv("COLUMNS", "80")
    text = PARSERS[command].format_help()
    example = re.search(r"Example:\n  python -m exporter(.*)", text)

    assert example is not None
    assert parse(shlex.split(example[1])).command == (command or None)
    assert max(len(line) for line in text.splitlines()) <= 80
