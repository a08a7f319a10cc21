"""The program `kubectl-evictions`, which makes `kubectl evictions` a command."""

import sys
from pathlib import Path


def write_plugin(folder: Path) -> None:
    """Write the program into a folder, for the PATH of shells in the root of a checkout."""
    program = folder / "kubectl-evictions"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m exporter.cli.kubectl "$@"\n')
    program.chmod(0o755)
