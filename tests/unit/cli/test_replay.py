"""The command `replay`: sources, policies, and output."""

import errno
import gzip
import os
from io import BufferedReader, BytesIO, StringIO, TextIOWrapper
from pathlib import Path
from threading import Thread

import pytest

from exporter.cli import replay as whatif
from exporter.cli.replay import Input, choose_contenders, open_recording, play
from exporter.engine.facts.policy import Policy, StuckPolicy
from exporter.settings.document import InvalidSettings
from exporter.text import write_instant
from exporter.whatif import recording
from exporter.whatif.account import BUILTIN
from exporter.whatif.recording import CannotReplay, Recorded
from tests.support.replaying import a_file, read_file
from tests.unit.whatif.test_replay import HOUR, MINUTE, Tale


def lines(events: list[Recorded]) -> bytes:
    """A recording of these events."""
    written = [recording.write_header()]
    for event in events:
        body = {} if event.fact is None else {"fact": event.fact}
        written.append(recording.write_event(event.at, event.kind, event.resource, **body))
    return b"".join(written)


def a_recording() -> bytes:
    """A recording of one VM, which is evicted again within its cooldown."""
    tale = Tale()
    tale.evict(10)
    tale.evict(5 * MINUTE)
    tale.end(HOUR)
    return lines(tale.events)


class TestContenders:
    """The choice of the policies."""

    def test_a_file_is_an_exporter_configuration(self, tmp_path: Path) -> None:
        """A policy is read from `policy:` and `stuck:` of an exporter's configuration."""
        file = tmp_path / "exporter.yaml"
        file.write_text(
            "policy: {migrationCooldown: 1h}\nstuck: {after: 10m}\nlog: {level: debug}\n"
        )
        ours, mine = choose_contenders(["ours", f"mine={file}"])

        assert (ours.name, mine.name) == ("ours", "mine")
        assert mine.policy == Policy(migration_cooldown=3600.0)
        assert mine.stuck == StuckPolicy(after=600.0)

    def test_all_faults_are_reported_at_once(self, tmp_path: Path) -> None:
        """All faults of names and files are reported at once."""
        file = tmp_path / "exporter.yaml"
        file.write_text("policy: {migrationCooldown: soon}\n")
        with pytest.raises(InvalidSettings) as refused:
            choose_contenders(["ours", "ours", "theirs", "=x", f"a={file}", f"b={file}.not"])

        assert [fault.split(": ")[0] for fault in refused.value.faults] == [
            "--policy ours",
            "--policy theirs",
            "--policy =x",
            str(file),
            f"{file}.not",
        ]


class TestSources:
    """The sources of events."""

    @pytest.mark.parametrize("zipped", [False, True], ids=["plain", "gzip"])
    def test_a_file_is_played(self, tmp_path: Path, *, zipped: bool) -> None:
        """A file is replayed; its content decides whether it is read as gzip."""
        file = tmp_path / "recording"
        file.write_bytes(gzip.compress(a_recording()) if zipped else a_recording())
        with open_recording(file) as source:
            comparison = play(source, [BUILTIN["ours"]], StringIO())
            assert source.whole == source.done(0.0) == file.stat().st_size

        assert (comparison.accounts[0].allowed, comparison.accounts[0].blocked.total()) == (1, 1)

    def test_standard_input_is_played(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """`-` replays the standard input."""
        monkeypatch.setattr("sys.stdin", TextIOWrapper(a_file(a_recording())))
        with open_recording(Path("-")) as source:
            assert play(source, [BUILTIN["ours"]], StringIO()).accounts[0].asked == 2

    def test_a_named_pipe_is_played(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A named pipe is replayed, as in `replay <(zcat week.ndjson.gz)`."""
        monkeypatch.setattr(whatif, "PROGRESS_EVERY", 1)
        pipe = tmp_path / "pipe"
        os.mkfifo(pipe)
        writer = Thread(target=pipe.write_bytes, args=(a_recording(),))
        writer.start()
        with open_recording(pipe) as source:
            comparison = play(source, [BUILTIN["ours"]], StringIO())
        writer.join()

        assert (source.whole, comparison.accounts[0].asked) == (None, 2)

    def test_missing_standard_input_is_an_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Missing standard input is an error, as in `replay - <&-`."""
        monkeypatch.setattr("sys.stdin", None)
        with pytest.raises(CannotReplay, match="no standard input"), open_recording(Path("-")):
            raise AssertionError("it was opened")

    def test_a_read_error_is_reported(self) -> None:
        """If reading fails, the replay gives an error and no answer."""

        class Broken(BytesIO):
            def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
                if count := super().readinto(buffer):
                    return count
                raise OSError(errno.EIO, "Input/output error")

        source = whatif.from_file(BufferedReader(Broken(a_recording())))
        with pytest.raises(CannotReplay, match="cannot be read: Input/output error"):
            play(source, [BUILTIN["ours"]], StringIO())

    @pytest.mark.parametrize(
        ("body", "why"),
        [
            (b"", "no event to replay"),
            (recording.write_header(), "no event to replay"),
            (b'{"type":"ADDED"}\n', "no event to replay: line 1: no instant"),
            (b'{"items":[]}\n', "neither a recording nor watch events"),
            (b"\x1f\x8bno gzip at all", "damaged gzip"),
            (gzip.compress(a_recording(), mtime=0)[:12], "no event to replay: it is truncated"),
        ],
    )
    def test_a_source_without_events_is_an_error(self, body: bytes, why: str) -> None:
        """A source without events is an error, because it would look like a quiet cluster."""
        with pytest.raises(CannotReplay, match=why):
            play(whatif.from_file(a_file(body)), [BUILTIN["ours"]], StringIO())


def test_bad_lines_are_listed_up_to_a_limit() -> None:
    """Bad lines are listed on standard error up to a limit; the other lines are replayed."""
    source = whatif.from_file(a_file(a_recording() + b"{\n" * 30))
    play(source, [BUILTIN["ours"]], StringIO())
    errors = StringIO()
    whatif.print_faults(source.faults, errors)
    told = errors.getvalue().splitlines()

    assert source.faults.count == 30
    assert len(told) == recording.MAX_MESSAGES + 1
    assert told[-1] == "... and 10 lines more"


@pytest.mark.parametrize("zipped", [False, True], ids=["plain", "gzip"])
def test_a_truncated_recording_is_reported(*, zipped: bool) -> None:
    """A truncated recording is reported, with the instant up to which it was read."""
    whole = a_recording()
    torn = gzip.compress(whole)[:-8] if zipped else whole[:-10]
    last = read_file(torn)[0][-1]
    for body, text in (
        (gzip.compress(whole) if zipped else whole, ""),
        (torn, f"the recording is truncated: read to {write_instant(last.at)}\n"),
    ):
        errors = StringIO()
        play(whatif.from_file(a_file(body)), [BUILTIN["ours"]], errors)

        assert errors.getvalue() == text


def test_no_progress_bar_without_a_terminal() -> None:
    """Without a terminal there is no progress bar."""
    errors = StringIO()
    comparison = play(whatif.from_file(a_file(a_recording())), [BUILTIN["ours"]], errors)
    whatif.print_cost(comparison, 1.25, errors)

    (line,) = errors.getvalue().splitlines()
    assert line.startswith(f"replayed 0.0417 days, {comparison.events} events in 1.2 s, ")
    assert line.endswith(" MiB at most")


def test_a_progress_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal there is a progress bar."""

    class Terminal(StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(whatif, "PROGRESS_EVERY", 1)
    monkeypatch.setenv("TERM", "xterm")
    body, errors = a_recording(), Terminal()
    events, _ = read_file(body)
    source = Input(events, whole=HOUR, done=lambda now: now - events[0].at)
    play(source, [BUILTIN["ours"]], errors)

    assert "replaying" in errors.getvalue()
    assert "events" in errors.getvalue()
