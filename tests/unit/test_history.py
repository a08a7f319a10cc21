"""The history file: what is written, what is read again, and what is damaged."""

import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from exporter.engine.facts.evidence import FAILURES_KEPT, Marker, SavedVmi
from exporter.engine.facts.model import EndReason, Outcome, Requester, Trigger
from exporter.history import SLICE, TASK, HistoryUnwritable, HistoryWriter, read_history
from tests.support.builders import NAMESPACE, NOW, UID, a_migration, a_state, a_vmi
from tests.support.stores import ClockedStore


WINDOW = 86_400.0
HEAD = msgspec.json.encode({"version": 1, "written_at": NOW}) + b"\n"
WHOLE = SavedVmi(
    uid=UID,
    namespace=NAMESPACE,
    migrations={
        "m1": a_migration(
            outcome=Outcome.FAILED,
            source_node="n1",
            trigger=Trigger.EVACUATION,
            reason=EndReason.TARGET_LOST,
            requested_by=Requester(NOW - 60, "alice"),
        ),
        "@1800000000": a_migration(),
    },
    marker=Marker(
        node="n1", requested_at=NOW - 90, seen_at=NOW - 80, failed={"a": NOW - 50}, forgotten=2
    ),
)


def read(path: Path, now: float = NOW) -> tuple[dict[str, SavedVmi], int, list[str]]:
    """What is read from a file, how many failures are counted, and the events in the log."""
    failures = Counter[str]()
    with capture_logs() as logs:
        saved = read_history(path, now=now, window=WINDOW, failures=failures)
    return saved, failures[TASK], [line["event"] for line in logs]


def a_writer(store: ClockedStore, path: Path) -> HistoryWriter:
    """The writer of a store's history, to which all changes are reported."""
    return HistoryWriter(store, path, Counter(), interval=15.0, clock=lambda: NOW)


async def write(path: Path, *saved: SavedVmi) -> HistoryWriter:
    """Write what was saved of VMIs that are not read yet."""
    writer = a_writer(ClockedStore(*saved), path)
    writer.record_change()
    await writer.flush()
    return writer


async def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    """Every field of every VMI is read as it was written, in a file that only we may read."""
    path = tmp_path / "history"
    others = [msgspec.structs.replace(WHOLE, uid=f"uid-{n}") for n in range(2 * SLICE)]
    writer = await write(path, WHOLE, *others)
    assert read(path) == ({saved.uid: saved for saved in (WHOLE, *others)}, 0, ["history_read"])
    assert (writer.status.written_at, writer.status.vmis) == (NOW, 1 + len(others))
    assert path.stat().st_mode & 0o777 == 0o600
    assert not path.with_name("history.part").exists()


async def test_only_what_cannot_be_seen_later_is_written(tmp_path: Path) -> None:
    """A VMI without a migration or an evacuation has no line."""
    store = ClockedStore(now=NOW)
    store.put(a_vmi(migration=a_state(end=NOW - 30)))
    store.put(a_vmi(name="idle", uid="idle"))
    path = tmp_path / "history"
    writer = a_writer(store, path)
    writer.record_change()
    await writer.flush()
    assert read(path)[0].keys() == {UID}


async def test_nothing_is_written_without_a_change(tmp_path: Path) -> None:
    """A file is replaced once for any number of changes."""
    path = tmp_path / "history"
    writer = await write(path, WHOLE)
    path.unlink()
    await writer.flush()
    assert not path.exists()
    writer.record_change()
    await writer.flush()
    assert path.exists()


@pytest.mark.parametrize(("age", "is_used"), [(WINDOW - 1, True), (WINDOW, False)])
async def test_a_file_older_than_the_window(tmp_path: Path, age: float, *, is_used: bool) -> None:
    """A file whose last write is a whole window ago says nothing that still counts."""
    path = tmp_path / "history"
    await write(path, WHOLE)
    saved, failures, events = read(path, NOW + age)
    assert (bool(saved), failures) == (is_used, 0)
    assert events == (["history_read"] if is_used else ["history_too_old"])


async def test_a_damaged_line_loses_only_its_own_vmi(tmp_path: Path) -> None:
    """The other lines are read; the damage is counted and logged once."""
    path = tmp_path / "history"
    await write(path, WHOLE, *(msgspec.structs.replace(WHOLE, uid=uid) for uid in "abc"))
    lines = path.read_bytes().splitlines()
    lines[1], lines[2] = lines[1][:-1], lines[2].replace(b'"n1"', b"1")
    path.write_bytes(b"\n".join(lines))
    saved, failures, events = read(path)
    assert (set(saved), failures) == ({"b", "c"}, 1)
    assert events == ["history_damaged", "history_read"]


def too_many_failures() -> bytes:
    """The line of a VMI with more failed attempts than are ever kept."""
    failed = {str(number): NOW for number in range(FAILURES_KEPT + 1)}
    marker = {"node": "n1", "requested_at": NOW, "failed": failed}
    return msgspec.json.encode({"uid": UID, "namespace": NAMESPACE, "marker": marker})


@pytest.mark.parametrize(
    "line",
    [
        pytest.param(b"[" * 100_000, id="nested"),
        pytest.param(b'{"uid": "\xff"}', id="no-utf-8"),
        pytest.param(b'{"uid": 7, "namespace": ""}', id="wrong-type"),
        pytest.param(b"null", id="null"),
        pytest.param(too_many_failures(), id="too-many-failures"),
    ],
)
def test_each_kind_of_damage(tmp_path: Path, line: bytes) -> None:
    """Whatever a line contains is survived."""
    path = tmp_path / "history"
    path.write_bytes(HEAD + line + b"\n")
    assert read(path) == ({}, 1, ["history_damaged", "history_read"])


def _make_fifo(path: Path) -> None:
    os.mkfifo(path)


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda path: path.write_bytes(b""), id="empty"),
        pytest.param(lambda path: path.write_bytes(b"\x1f\x8b\x08garbage"), id="garbage"),
        pytest.param(lambda path: path.write_bytes(HEAD.replace(b"1,", b"2,")), id="version"),
        pytest.param(lambda path: path.symlink_to("/proc/self/mem"), id="unreadable"),
        pytest.param(Path.mkdir, id="directory"),
        pytest.param(_make_fifo, id="fifo"),
    ],
)
async def test_a_file_that_is_no_history(tmp_path: Path, spoil: Callable[[Path], Any]) -> None:
    """It is counted and logged, and replaced by the next write, unless it is a directory."""
    path = tmp_path / "history"
    spoil(path)
    assert read(path) == ({}, 1, ["history_not_read"])
    with capture_logs() as logs:
        writer = await write(path, WHOLE)
    if path.is_dir():
        assert [line["event"] for line in logs] == ["history_not_written"]
        assert (writer.failures[TASK], writer.status.trouble != "") == (1, True)
    else:
        assert read(path)[0] == {UID: WHOLE}


def test_no_file_yet(tmp_path: Path) -> None:
    """A missing file is no failure."""
    assert read(tmp_path / "history") == ({}, 0, ["history_missing"])


def test_no_directory(tmp_path: Path) -> None:
    """Without the directory the program cannot start."""
    with pytest.raises(HistoryUnwritable, match="there is no such directory"):
        read(tmp_path / "none" / "history")


async def test_a_write_that_fails(tmp_path: Path) -> None:
    """A write that fails leaves the old file, is counted and logged once, and is tried again."""
    path = tmp_path / "history"
    writer = await write(path, WHOLE)
    (tmp_path / "history.part").mkdir()
    writer.record_change()
    with capture_logs() as logs:
        await writer.flush()
        await writer.flush()
    assert [line["event"] for line in logs] == ["history_not_written"]
    assert (writer.failures[TASK], read(path)[0]) == (2, {UID: WHOLE})
    (tmp_path / "history.part").rmdir()
    await writer.flush()
    assert (writer.failures[TASK], writer.status.trouble) == (2, "")
