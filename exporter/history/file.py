"""The stored history in one file."""

import asyncio
import os
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

import structlog

from exporter.engine.facts.model import Instant
from exporter.health import HistoryFault, HistoryHealth
from exporter.history.changes import PendingChanges
from exporter.history.format import SHARDS, VERSION, Damaged, UnknownVersion, split
from exporter.history.writer import HistoryWriter, note_fault


log = structlog.stdlib.get_logger()


class HistoryUnwritable(Exception):
    """The history can never be written to the configured path. The message says why."""


def read_file(
    changes: PendingChanges, status: HistoryHealth, path: Path, now: Instant
) -> dict[Path, Path]:
    """Merge the intact shards of the file. Returns the files of other format versions.

    Each of these files is returned with its new name, and is renamed before this process writes.
    The new name has the version, such as `history.v2`, and a program of that version reads it.
    Raises `HistoryUnwritable`.
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
        pass  # without slices, because nothing else runs yet
    if found:
        log.info("history_read", path=str(path), vmis=len(changes))
    else:
        log.info("history_missing", path=str(path))
    return others


def _merge_file(
    changes: PendingChanges, status: HistoryHealth, path: Path, now: Instant
) -> int | None:
    """Merge the intact shards of a file; returns its format version if that is not ours."""
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


@dataclass
class FileWriter(HistoryWriter):
    """Writes the stored history to one file, which only one process may write.

    The file is replaced atomically: the new content is synced to disk under another name and then
    renamed. Before that, the files in `others`, which `read_file` has found, are renamed.
    """

    path: Path
    _: KW_ONLY
    others: dict[Path, Path]
    _writing: asyncio.Future[None] | None = None

    async def _write(self) -> None:
        changes = self.changes
        if not changes.unwritten:
            return
        content = bytearray()
        for shard in range(SHARDS):
            if not changes.is_empty(shard):
                content += changes.seal(shard)
                await asyncio.sleep(0)  # let other tasks run: a shard of 1,500 VMIs takes 1 ms
        try:
            if self._writing is not None:
                await asyncio.wait([self._writing])
            self._writing = asyncio.ensure_future(asyncio.to_thread(self._replace, bytes(content)))
            await asyncio.shield(self._writing)
        except OSError as error:
            note_fault(self.status, HistoryFault.NOT_WRITTEN, str(error), path=str(self.path))
            return
        for shard in range(SHARDS):
            changes.note_written(shard)

    def _replace(self, content: bytes) -> None:
        """Replace the file atomically: after a crash it has the old or the new content."""
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


def _path_of_version(path: Path, version: int) -> Path:
    return path.with_name(f"{path.name}.v{version}")
