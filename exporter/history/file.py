"""The stored history in one file."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import structlog

from exporter.engine.model import Instant, Seconds
from exporter.health import Health, HistoryFault, HistoryHealth
from exporter.history.changes import PendingChanges
from exporter.history.format import SHARDS, VERSION, Damaged, UnknownVersion, split
from exporter.history.writer import HistoryWriter, note_fault


log = structlog.stdlib.get_logger()


class HistoryUnwritable(Exception):
    """The configured place can never be written; the message says why."""


class FileWriter(HistoryWriter):
    """Writes the stored history to one file, which only one process may write.

    The file is replaced atomically: the new content is synced to disk under another name and then
    renamed. A file of another format version is renamed before that, to a name with its version
    such as `history.v2`, where a program of that version reads it.
    """

    def __init__(
        self,
        changes: PendingChanges,
        health: Health,
        status: HistoryHealth,
        path: Path,
        *,
        interval: Seconds,
        clock: Callable[[], Instant],
    ) -> None:
        super().__init__(changes, health, status, interval=interval, clock=clock)
        self._path = path
        self._left_for_us = _path_of_version(path, VERSION)
        self._to_rename: dict[Path, Path] = {}
        self._writing: asyncio.Future[None] | None = None
        self._status.may_write = lambda: True

    def read(self) -> None:
        """Read what is intact in the file. Raises `HistoryUnwritable`."""
        try:
            if not self._path.parent.is_dir():
                raise HistoryUnwritable(f"history: file:{self._path}: there is no such directory")
            found = [path for path in (self._path, self._left_for_us) if path.exists()]
        except OSError as error:
            raise HistoryUnwritable(f"history: file:{self._path}: {error}") from error
        for path in found:
            self._read(path)
        for _ in self._changes.encode_touched(self._clock()):
            pass  # nobody waits for us yet
        if not found:
            log.info("history_missing", path=str(self._path))
            return
        log.info("history_read", path=str(self._path), vmis=len(self._changes))
        self.note_change()

    def _read(self, path: Path) -> None:
        try:
            raw = path.read_bytes()
        except OSError as error:
            note_fault(self._status, HistoryFault.UNREADABLE, str(error), path=str(path))
            return
        for piece in split(raw):
            try:
                for _ in self._changes.merge(piece, self._clock()):
                    pass
            except UnknownVersion as unknown:
                kept = _path_of_version(path, unknown.version)
                note_fault(
                    self._status,
                    HistoryFault.UNKNOWN_VERSION,
                    str(unknown),
                    path=str(path),
                    kept=str(kept),
                )
                self._to_rename[path] = kept
                return
            except Damaged as damage:
                note_fault(self._status, HistoryFault.DAMAGED, str(damage), path=str(path))

    async def _write(self) -> None:
        changes = self._changes
        if not changes.unwritten:
            return
        content = bytearray()
        for shard in range(SHARDS):
            if not changes.is_empty(shard):
                content += changes.seal(shard)
                await asyncio.sleep(0)  # let others run: a shard of 1,500 VMIs takes 1 ms
        try:
            if self._writing is not None:
                await asyncio.wait([self._writing])
            self._writing = asyncio.ensure_future(asyncio.to_thread(self._replace, bytes(content)))
            await asyncio.shield(self._writing)
        except OSError as error:
            note_fault(self._status, HistoryFault.NOT_WRITTEN, str(error), path=str(self._path))
            return
        for shard in range(SHARDS):
            changes.note_written(shard)

    def _replace(self, content: bytes) -> None:
        """Replace the file atomically and durably: after a crash it is the old or the new one."""
        for path, kept in list(self._to_rename.items()):
            path.replace(kept)
            del self._to_rename[path]
        part = self._path.with_name(f"{self._path.name}.part")
        try:
            with open(part, "wb", opener=_open_private) as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            part.replace(self._path)
        except OSError:
            part.unlink(missing_ok=True)
            raise
        directory = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
        self._left_for_us.unlink(missing_ok=True)


def _path_of_version(path: Path, version: int) -> Path:
    return path.with_name(f"{path.name}.v{version}")


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
