"""The stored history in one file."""

import asyncio
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import structlog

from exporter.engine.model import Instant, Seconds
from exporter.health import Health, HistoryFault, HistoryHealth
from exporter.history.changes import PendingChanges
from exporter.history.format import SHARDS, VERSION, Damaged, UnknownVersion, split
from exporter.history.writer import HistoryWriter, WriteSignal, note_fault


log = structlog.stdlib.get_logger()


class HistoryUnwritable(Exception):
    """The configured place can never be written; the message says why."""


def read_file(
    changes: PendingChanges, status: HistoryHealth, path: Path, now: Instant
) -> dict[Path, Path]:
    """Merge what is intact in the file; returns the files of other format versions.

    Each comes with its name as soon as this process writes: one with its version, such as
    `history.v2`, where a program of that version reads it. Raises `HistoryUnwritable`.
    """
    try:
        if not path.parent.is_dir():
            raise HistoryUnwritable(f"history: file:{path}: there is no such directory")
        found = [one for one in (path, _path_of_version(path, VERSION)) if one.exists()]
    except OSError as error:
        raise HistoryUnwritable(f"history: file:{path}: {error}") from error
    others: dict[Path, Path] = {}
    for one in found:
        version = _merge_file(changes, status, one, now)
        if version is not None:
            others[one] = _path_of_version(one, version)
    for _ in changes.encode_changed(now):
        pass  # nobody waits for us yet
    if found:
        log.info("history_read", path=str(path), vmis=len(changes))
    else:
        log.info("history_missing", path=str(path))
    return others


def _merge_file(
    changes: PendingChanges, status: HistoryHealth, path: Path, now: Instant
) -> int | None:
    """Merge the intact shards of a file; returns its format version if that is another one."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        note_fault(status, HistoryFault.UNREADABLE, str(error), path=str(path))
        return None
    for piece in split(raw):
        try:
            for _ in changes.merge(piece, now):
                pass
        except UnknownVersion as unknown:
            name = str(_path_of_version(path, unknown.version))
            fault = HistoryFault.UNKNOWN_VERSION
            note_fault(status, fault, str(unknown), path=str(path), kept=name)
            return unknown.version
        except Damaged as damage:
            note_fault(status, HistoryFault.DAMAGED, str(damage), path=str(path))
    return None


class FileWriter(HistoryWriter):
    """Writes the stored history to one file, which only one process may write.

    The file is replaced atomically: the new content is synced to disk under another name and then
    renamed. Before that, the `others` that `read_file` has found get their names.
    """

    def __init__(
        self,
        changes: PendingChanges,
        health: Health,
        status: HistoryHealth,
        signal: WriteSignal,
        path: Path,
        *,
        others: Mapping[Path, Path],
        interval: Seconds,
        clock: Callable[[], Instant],
    ) -> None:
        super().__init__(changes, health, status, signal, interval=interval, clock=clock)
        self._path = path
        self._others = dict(others)
        self._writing: asyncio.Future[None] | None = None

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
        for path, name in list(self._others.items()):
            path.replace(name)
            del self._others[path]
        part = self._path.with_name(f"{self._path.name}.part")
        try:
            with open(part, "wb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
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
        _path_of_version(self._path, VERSION).unlink(missing_ok=True)


def _path_of_version(path: Path, version: int) -> Path:
    return path.with_name(f"{path.name}.v{version}")
