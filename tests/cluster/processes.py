"""A server as a child process that a test can kill, freeze and restart."""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path


_LOG_TAIL = 4_000
_FROZEN_WITHIN = 60.0
"""How long to wait until all threads of a process have stopped; usually it takes microseconds."""


class ServerFailedError(Exception):
    """A server ended, or did not become ready; the message ends with the tail of its log."""


def freeze(pid: int) -> None:
    """Stop a process (SIGSTOP); returns when all its threads have stopped."""
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + _FROZEN_WITHIN
    while {state_of(int(thread.name)) for thread in Path(f"/proc/{pid}/task").iterdir()} != {"T"}:
        if time.monotonic() > deadline:
            message = f"process {pid} still runs {_FROZEN_WITHIN:g} s after SIGSTOP"
            raise TimeoutError(message)
        time.sleep(0.001)


def state_of(pid: int) -> str | None:
    """The kernel's state of a process or thread ("T" is stopped), or None if it has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    return stat.rpartition(")")[2].split()[0]


class Process:
    """One command that can be started repeatedly; its output is appended to a log file."""

    def __init__(
        self, arguments: list[str], log: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        self._arguments = arguments
        self._environment = os.environ | dict(environment or {})
        self.log = log
        self._child: subprocess.Popen[bytes] | None = None

    @property
    def running(self) -> bool:
        """Whether the process runs; a frozen process counts as running."""
        return self._child is not None and self._child.poll() is None

    def start(self) -> None:
        """Start the process, which must not be running."""
        if self.running:
            message = f"{self._arguments[0]} is running already"
            raise RuntimeError(message)
        with self.log.open("ab") as output:
            self._child = subprocess.Popen(
                self._arguments,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self._environment,
                # The hook makes one system call and takes no lock, so it is safe in spite of
                # threads.
                preexec_fn=_die_with_parent if sys.platform == "linux" else None,  # noqa: PLW1509
            )

    def kill(self) -> None:
        """Kill the process, frozen or not, and wait until it has ended."""
        if self._child is not None:
            self._child.kill()
            self._child.wait()

    @property
    def pid(self) -> int:
        """The ID of the process that was started last."""
        return self._started().pid

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the running process."""
        self._started().send_signal(number)

    def _started(self) -> subprocess.Popen[bytes]:
        if self._child is None:
            message = f"{self._arguments[0]} was never started"
            raise RuntimeError(message)
        return self._child

    def failure(self, reason: str) -> ServerFailedError:
        """The error, with the end of the process's log."""
        return ServerFailedError(f"{self._arguments[0]}: {reason}\n{self._end_of_log()}")

    def tail(self) -> str:
        """The end of the process's log."""
        return f"{self._arguments[0]} said last:\n{self._end_of_log()}"

    def _end_of_log(self) -> str:
        return self.log.read_bytes()[-_LOG_TAIL:].decode(errors="replace")


def _die_with_parent() -> None:
    """Let the kernel kill this child if the test run is killed."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
