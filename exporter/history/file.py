"""The stored history in one file."""

import asyncio
import os
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from functools import partial
from pathlib import Path

import structlog

from exporter.engine.facts.model import Instant
from exporter.errors import CommandFailed, Exit
from exporter.health import HistoryFault, HistoryHealth
from exporter.history.changes import PendingChanges
from exporter.history.format import SHARDS, VERSION, Damaged, UnknownVersion, seal, split, unseal
from exporter.history.writer import HistoryWriter, note_fault


LONGEST_WRITE = 4
"""After this many intervals, a write that has not returned is a fault."""

log = structlog.stdlib.get_logger()


class HistoryUnwritable(CommandFailed):
    """The history can never be written to the configured path. The message says why."""

    exit_code = Exit.UNUSABLE


async def read_files(path: Path, contents: dict[Path, bytes | OSError]) -> None:
    """Read the files at this path, in a thread, into `contents`: it may hang for ever.

    Raises `HistoryUnwritable`.
    """
    error = await _start_thread(partial(_read_files, path, contents))
    if isinstance(error, OSError):
        raise HistoryUnwritable(f"history: file:{path}: {error}") from error
    if error is not None:
        raise error


def _read_files(path: Path, contents: dict[Path, bytes | OSError]) -> None:
    if not path.parent.is_dir():
        raise HistoryUnwritable(f"history: file:{path}: there is no such directory")
    for one in (path, _path_of_version(path, VERSION)):
        if one.exists():
            try:
                _check_regular(one)
                contents[one] = one.read_bytes()
            except OSError as error:
                contents[one] = error


def merge_files(
    changes: PendingChanges,
    status: HistoryHealth,
    path: Path,
    contents: Mapping[Path, bytes | OSError],
    now: Instant,
) -> dict[Path, Path]:
    """Merge the intact shards of the files. Returns the files of other format versions.

    Each of these files is returned with its new name, and is renamed before this process writes.
    The new name has the version, such as `history.v2`, and a program of that version reads it.
    """
    others: dict[Path, Path] = {}
    for one, content in contents.items():
        if isinstance(content, OSError):
            note_fault(status, HistoryFault.UNREADABLE, str(content), path=str(one))
            continue
        version = _merge_file(changes, status, one, content, now)
        if version is not None:
            others[one] = _path_of_version(one, version)
    for _ in changes.encode_changed(now):
        pass  # without slices, because nothing else runs yet
    if contents:
        log.info("history_read", path=str(path), vmis=len(changes))
    else:
        log.info("history_missing", path=str(path))
    return others


def _merge_file(
    changes: PendingChanges, status: HistoryHealth, path: Path, raw: bytes, now: Instant
) -> int | None:
    """Merge the intact shards of a file; returns its format version if that is not ours."""
    version = None
    why, pieces = "", 0
    for piece in split(raw):
        try:
            for _ in changes.merge(unseal(piece), now):
                pass
        except UnknownVersion as unknown:
            version = unknown.version
            name = str(_path_of_version(path, version))
            fault = HistoryFault.UNKNOWN_VERSION
            note_fault(status, fault, str(unknown), path=str(path), kept=name)
            break
        except Damaged as damage:
            why, pieces = why or str(damage), pieces + 1
    if pieces:  # in one line: there may be as many pieces as the file has bytes
        fault = HistoryFault.DAMAGED
        note_fault(status, fault, why, times=pieces, path=str(path), pieces=pieces)
    return version


def _check_regular(path: Path) -> None:
    """Raises `OSError` if there is something else than a regular file, such as a FIFO."""
    if path.exists() and not path.is_file():
        raise OSError(f"{path} is not a regular file")


@dataclass
class FileWriter(HistoryWriter):
    """Writes the stored history to one file, which only one process may write.

    The file is replaced atomically: the new content is synced to disk under another name and then
    renamed. Before that, the files in `others`, which `merge_files` has found, are renamed.
    """

    path: Path
    _: KW_ONLY
    others: dict[Path, Path]
    _writing: asyncio.Future[Exception | None] | None = None

    async def _write(self) -> None:
        changes = self.changes
        if not changes.unwritten or not await self._has_returned():
            return
        shards: list[list[bytes]] = []
        # Other tasks run after each shard: with 100,000 VMIs, all shards take 60 ms, and noting at
        # the end that all are written takes 23 ms.
        while len(shards) < SHARDS:
            shards.append(changes.entries(len(shards)))
            await asyncio.sleep(0)
        self._writing = _start_thread(partial(self._replace, shards))
        if not await self._has_returned():
            return
        error = self._writing.result()
        if error is not None:
            note_fault(self.status, HistoryFault.NOT_WRITTEN, str(error), path=str(self.path))
            return
        for shard in range(SHARDS):
            changes.note_written(shard)
            await asyncio.sleep(0)

    async def _has_returned(self) -> bool:
        """Wait for the last write, if there is one; a fault if it takes longer than we wait."""
        if self._writing is None:
            return True
        longest = LONGEST_WRITE * self.interval
        done, _ = await asyncio.wait([self._writing], timeout=longest)
        if not done:
            why = f"the write has not returned within {longest:g} s"
            note_fault(self.status, HistoryFault.NOT_WRITTEN, why, path=str(self.path))
        return bool(done)

    def _replace(self, shards: list[list[bytes]]) -> None:
        """Replace the file atomically: after a crash it has the old or the new content."""
        content = b"".join(seal(entries) for entries in shards if entries)
        _check_regular(self.path)
        for path, name in list(self.others.items()):
            path.replace(name)
            del self.others[path]
        part = self.path.with_name(f"{self.path.name}.part")
        try:
            with open(part, "wb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            part.replace(self.path)
        except OSError:
            part.unlink(missing_ok=True)
            raise
        directory = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
        _path_of_version(self.path, VERSION).unlink(missing_ok=True)


def _start_thread(work: Callable[[], None]) -> asyncio.Future[Exception | None]:
    """Run blocking work in a thread; the result is its error.

    The exit of the program does not wait for this thread, as it would with `asyncio.to_thread`.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Exception | None] = loop.create_future()

    def run() -> None:
        error = None
        try:
            work()
        except Exception as raised:  # noqa: BLE001 (it is the result)
            error = raised
        with suppress(RuntimeError):  # the event loop has been closed
            loop.call_soon_threadsafe(done.set_result, error)

    threading.Thread(target=run, name="history", daemon=True).start()
    return done


def _path_of_version(path: Path, version: int) -> Path:
    return path.with_name(f"{path.name}.v{version}")
