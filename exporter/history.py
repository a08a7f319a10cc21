"""The history file: what KubeVirt deletes, so that a process that starts again still knows it.

The cluster itself stores the history: KubeVirt keeps the last migration of each VM and its five
newest finished VMIMs. The file adds the older migrations, and the requests and failed attempts of
the evacuations that are going on. It is read once, at the start, if it is younger than the history
window, and replaced at the end of each interval with a change. Nothing depends on it: whatever is
wrong with it is logged and counted as a failure of the task `history`.

Its first line is a `Head`, and each other line a `SavedVmi`, in JSON.
"""

import asyncio
import os
import stat
from collections import Counter
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import BinaryIO, Literal

import msgspec
import structlog
from msgspec import Struct

from exporter.engine.facts.evidence import SavedVmi
from exporter.engine.facts.model import Instant, Seconds
from exporter.engine.store.store import Store
from exporter.errors import MALFORMED, CommandFailed, Exit
from exporter.health import HistoryHealth
from exporter.logs import Trouble


VERSION: Literal[1] = 1
"""The version of the format; a file of another version is not read."""
TASK = "history"
"""The name under which failures are counted."""
SLICE = 200
"""How many VMIs are encoded and written at once, which takes about 1 ms."""

_encoder = msgspec.json.Encoder()
log = structlog.stdlib.get_logger()


class HistoryUnwritable(CommandFailed):
    """The history can never be written to the configured path. The message says why."""

    exit_code = Exit.UNUSABLE


class Head(Struct):
    """The first line of the file: the version of its format, and when it was written."""

    written_at: Instant
    version: Literal[1]


def read_history(
    path: Path, *, now: Instant, window: Seconds, failures: Counter[str]
) -> dict[str, SavedVmi]:
    """What the file has of each VMI, by UID; nothing if it is older than `window`.

    A line that cannot be read loses only its own VMI. Raises `HistoryUnwritable`.
    """
    if not path.parent.is_dir():
        raise HistoryUnwritable(f"history: file:{path}: there is no such directory")
    try:
        head, lines = _read_lines(path)
    except FileNotFoundError:
        log.info("history_missing", path=str(path))
        return {}
    except (OSError, *MALFORMED) as error:
        failures[TASK] += 1
        log.warning("history_not_read", path=str(path), why=str(error))
        return {}
    if now - head.written_at >= window:
        log.info("history_too_old", path=str(path), age=round(now - head.written_at))
        return {}
    decoder, saved, damaged = msgspec.json.Decoder(SavedVmi), dict[str, SavedVmi](), list[str]()
    for line in lines:
        try:
            vmi = decoder.decode(line)
        except MALFORMED as error:
            damaged.append(str(error))
        else:
            saved[vmi.uid] = vmi
    if damaged:
        failures[TASK] += 1
        log.warning("history_damaged", path=str(path), lines=len(damaged), why=damaged[0])
    log.info("history_read", path=str(path), vmis=len(saved))
    return saved


@dataclass
class HistoryWriter:
    """Replaces the file at `path`, at most once per `interval`; only one process may do that.

    `record_change` must be called after each change of the store.
    """

    store: Store
    path: Path
    failures: Counter[str]
    _: KW_ONLY
    interval: Seconds
    clock: Callable[[], Instant]
    status: HistoryHealth = field(default_factory=HistoryHealth)

    def __post_init__(self) -> None:
        self._changes = self._written = 0
        self._trouble = Trouble("history_not_written", path=str(self.path))

    def record_change(self, _: object = None) -> None:
        """Write the file at the end of this interval."""
        self._changes += 1

    async def run(self) -> None:
        """Write the changes of each interval, until cancelled."""
        while True:
            await self.flush()
            await asyncio.sleep(self.interval)

    async def flush(self) -> None:
        """Write the file now, if the store has changed since the last write."""
        changes = self._changes
        if changes == self._written:
            return
        try:
            await self._replace()
        except OSError as error:
            self.failures[TASK] += 1
            self.status.trouble = str(error)
            self._trouble.record(self.status.trouble)
        else:
            self._written, self.status.trouble = changes, ""
            self._trouble.end()

    async def _replace(self) -> None:
        """Replace the file atomically: a process that is killed leaves the old or the new one."""
        store, now = self.store, self.clock()
        lines, vmis = [_encode_line(Head(now, VERSION))], 0
        part = self.path.with_name(f"{self.path.name}.part")
        try:
            with await asyncio.to_thread(_open_private, part) as file:
                for count, uid in enumerate((*store.uids(), *store.awaited), 1):
                    saved = store.save(uid)
                    if saved is not None:
                        lines.append(_encode_line(saved))
                        vmis += 1
                    if count % SLICE == 0:
                        await asyncio.to_thread(file.writelines, lines)
                        lines.clear()
                await asyncio.to_thread(file.writelines, lines)
                file.flush()
                await asyncio.to_thread(os.fsync, file.fileno())
            # The kernel frees the old file's blocks meanwhile: 10 ms for 44 MB.
            await asyncio.to_thread(part.replace, self.path)
        finally:
            part.unlink(missing_ok=True)
        self.status.written_at, self.status.vmis = now, vmis


def _read_lines(path: Path) -> tuple[Head, list[bytes]]:
    """The first line of the file, and the others. Raises `OSError` or an error of `MALFORMED`."""
    if not stat.S_ISREG(path.stat().st_mode):  # a FIFO would hang
        raise OSError(f"{path} is not a regular file")
    head, *lines = path.read_bytes().splitlines() or [b""]
    return msgspec.json.decode(head, type=Head), lines


def _encode_line(value: Struct) -> bytes:
    return _encoder.encode(value) + b"\n"


def _open_private(path: Path) -> BinaryIO:
    """Open a new file that only this user may read."""
    return open(path, "wb", opener=lambda name, flags: os.open(name, flags, 0o600))
