"""A shell that runs the commands of the documents."""

import os
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Self


TYPED: list[str] = []
"""Every command of the documents that was typed and succeeded, in order."""
_DONE = "e2e-terminal-done"


class Terminal:
    """A bash that keeps its variables and background jobs until the end of the block."""

    def __init__(self, environment: Mapping[str, str], folder: Path) -> None:
        self._shell = subprocess.Popen(
            ["bash", "--noprofile", "--norc", "-o", "pipefail"],
            cwd=folder,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        os.killpg(self._shell.pid, signal.SIGKILL)
        self._shell.communicate()

    def type(self, command: str) -> str:
        """Run a command of the documents that must succeed; returns its output."""
        output = self.type_unlisted(command)
        TYPED.append(command)
        return output

    def type_unlisted(self, command: str) -> str:
        """
        Run any other command in the same shell.

        For a port-forward in the background it returns when the port is forwarded.
        """
        assert self._shell.stdin
        assert self._shell.stdout
        self._shell.stdin.write(f"{command}\nprintf '\\n{_DONE} %s\\n' $?\n")
        self._shell.stdin.flush()
        is_forward = " port-forward " in command
        printed: list[str] = []
        code = None
        while code is None or (
            is_forward and not any("Forwarding from" in line for line in printed)
        ):
            line = self._shell.stdout.readline()
            assert line, f"{command}: the shell ended\n{''.join(printed)}"
            # An earlier port-forward may end meanwhile, because its pod was replaced.
            assert not (is_forward and line.startswith("error: ")), f"{command}: {line}"
            if line.startswith(_DONE):
                code = int(line.split()[1])
            else:
                printed.append(line)
        output = "".join(printed)
        assert code == 0, f"{command}: exit {code}\n{output}"
        return output.removesuffix("\n")
