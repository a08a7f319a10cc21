"""The commands of the exporter, run in the tests' own process."""

import asyncio
import sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO

import pytest

from exporter.__main__ import run


async def run_command(*arguments: str, **environment: str) -> tuple[int, str, str]:
    """Run the command in a thread; returns its exit code and what it prints on both streams.

    Meanwhile this process can serve the command's requests.
    """
    out, err = StringIO(), StringIO()

    def execute() -> int:
        try:
            return run()
        except SystemExit as ended:  # argparse refuses the arguments
            return int(ended.code or 0)

    with pytest.MonkeyPatch.context() as patched, redirect_stdout(out), redirect_stderr(err):
        patched.setattr(sys, "argv", ["exporter", *arguments])
        for name, value in environment.items():
            patched.setenv(name, value)
        code = await asyncio.to_thread(execute)
    return code, out.getvalue(), err.getvalue()
