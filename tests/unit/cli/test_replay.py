"""The command `replay`: sources, policies, and what goes where."""

import errno
import gzip
import os
from collections.abc import Iterator
from io import BytesIO, StringIO, TextIOWrapper
from pathlib import Path
from threading import Thread

import pytest

from exporter.cli import replay as whatif
from exporter.cli.layout import Screen
from exporter.cli.replay import CannotReplay, Source, choose_contenders, open_recording, play
from exporter.engine.model import Policy, Resource, StuckPolicy, Vmi
from exporter.settings import InvalidSettings
from exporter.text import write_instant
from exporter.whatif import recording
from exporter.whatif.account import BUILTIN
from exporter.whatif.recording import Faults, Kind, Recorded
from tests.unit.whatif.test_replay import HOUR, MINUTE, Tale


def lines(events: list[Recorded]) -> bytes:
    """A recording of these events."""
    told = [recording.write_header()]
    for event in events:
        if event.fact is not None and event.resource is not None:
            told.append(recording.write_fact(event.at, event.kind, event.resource, event.fact))
        else:
            told.append(recording.write_note(event.at, event.kind, event.resource))
    return b"".join(told)


def a_recording() -> bytes:
    """One VM, evicted twice within its cooldown."""
    tale = Tale()
    tale.evict(10)
    tale.evict(5 * MINUTE)
    tale.end(HOUR)
    return lines(tale.events)


class TestContenders:
    """Whose settings are compared."""

    def test_all_that_are_built_in_where_none_is_named(self) -> None:
        """Reference, ours and none."""
        assert choose_contenders([]) == list(BUILTIN.values())

    def test_a_file_is_read_as_the_exporter_s_own_configuration(self, tmp_path: Path) -> None:
        """`policy:` and `stuck:` count, and the rest may stand there."""
        file = tmp_path / "exporter.yaml"
        file.write_text(
            "policy: {migrationCooldown: 1h}\nstuck: {after: 10m}\nlog: {level: debug}\n"
        )
        ours, mine = choose_contenders(["ours", f"mine={file}"])

        assert (ours.name, mine.name) == ("ours", "mine")
        assert mine.policy == Policy(migration_cooldown=3600.0)
        assert mine.stuck == StuckPolicy(after=600.0)

    def test_every_fault_is_told_at_once(self, tmp_path: Path) -> None:
        """Of names and of files, each with where it stands."""
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
    """Where events come from."""

    @pytest.mark.parametrize("zipped", [False, True], ids=["plain", "gzip"])
    def test_a_file_is_played(self, tmp_path: Path, *, zipped: bool) -> None:
        """Compressed or not, by its content and not by its name."""
        file = tmp_path / "recording"
        file.write_bytes(gzip.compress(a_recording()) if zipped else a_recording())
        with open_recording(file) as source:
            found = play(source, [BUILTIN["ours"]], StringIO())
            assert source.whole == source.done(0.0) == file.stat().st_size

        assert (found.accounts[0].allowed, found.accounts[0].refused_in_all) == (1, 1)

    def test_standard_input_is_played(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """`-`, as in `kubectl ... | python -m exporter replay -`."""
        monkeypatch.setattr("sys.stdin", TextIOWrapper(BytesIO(a_recording())))
        with open_recording(Path("-")) as source:
            assert play(source, [BUILTIN["ours"]], StringIO()).accounts[0].asked == 2

    def test_a_pipe_with_a_name_is_played(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As in `replay <(zcat week.ndjson.gz)`: how far it is cannot be told, and need not."""
        monkeypatch.setattr(whatif, "PROGRESS_EVERY", 1)
        pipe = tmp_path / "pipe"
        os.mkfifo(pipe)
        writer = Thread(target=pipe.write_bytes, args=(a_recording(),))
        writer.start()
        with open_recording(pipe) as source:
            found = play(source, [BUILTIN["ours"]], StringIO())
        writer.join()

        assert (source.whole, found.accounts[0].asked) == (None, 2)

    def test_no_standard_input_is_told(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """As in `replay - <&-`."""
        monkeypatch.setattr("sys.stdin", None)
        with pytest.raises(CannotReplay, match="no standard input"), open_recording(Path("-")):
            raise AssertionError("it was opened")

    def test_a_file_that_cannot_be_read_on_is_told(self) -> None:
        """What was read of it before is no answer."""

        def chunks() -> Iterator[bytes]:
            yield a_recording()
            raise OSError(errno.EIO, "Input/output error")

        with pytest.raises(CannotReplay, match="cannot be read: Input/output error"):
            play(whatif.from_chunks(chunks()), [BUILTIN["ours"]], StringIO())

    def test_a_file_that_is_not_there_is_told(self, tmp_path: Path) -> None:
        """With the system's reason."""
        with (
            pytest.raises(CannotReplay, match="No such file"),
            open_recording(tmp_path / "none"),
        ):
            raise AssertionError("it was opened")

    @pytest.mark.parametrize(
        ("body", "why"),
        [
            (b"", "no event to play"),
            (recording.write_header(), "no event to play"),
            (b'{"type":"ADDED"}\n', "no event to play: line 1: no instant"),
            (b'{"items":[]}\n', "neither a recording nor watch events"),
            (b"\x1f\x8bnothing", "damaged gzip"),
            (gzip.compress(a_recording(), mtime=0)[:12], "no event to play: it is truncated"),
        ],
    )
    def test_what_cannot_be_played_is_told(self, body: bytes, why: str) -> None:
        """An empty answer would look like a quiet cluster."""
        with pytest.raises(CannotReplay, match=why):
            play(whatif.from_chunks([body]), [BUILTIN["ours"]], StringIO())


def test_bad_lines_are_told_by_number_and_the_rest_by_count() -> None:
    """On standard error, beside an answer that rests on the others."""
    source = whatif.from_chunks([a_recording(), b"{\n" * 30])
    play(source, [BUILTIN["ours"]], StringIO())
    errors = StringIO()
    whatif.print_faults(source.faults, errors)
    told = errors.getvalue().splitlines()

    assert source.faults.count == 30
    assert len(told) == recording.MAX_MESSAGES + 1
    assert told[-1] == "... and 10 lines more"


@pytest.mark.parametrize("zipped", [False, True], ids=["plain", "gzip"])
def test_a_torn_recording_is_told(*, zipped: bool) -> None:
    """How far the answer reaches; a whole one has nothing to tell."""
    whole = a_recording()
    torn = gzip.compress(whole)[:-8] if zipped else whole[:-10]
    *_, last = recording.read(recording.split([torn]), Faults())
    for body, said in (
        (gzip.compress(whole) if zipped else whole, ""),
        (torn, f"the recording is truncated: read to {write_instant(last.at)}\n"),
    ):
        errors = StringIO()
        play(whatif.from_chunks([body]), [BUILTIN["ours"]], errors)

        assert errors.getvalue() == said


def test_no_bar_where_there_is_no_terminal() -> None:
    """A log file gets what it cost, and no bar."""
    errors = StringIO()
    found = play(whatif.from_chunks([a_recording()]), [BUILTIN["ours"]], errors)
    whatif.print_cost(found, 1.25, errors)

    (line,) = errors.getvalue().splitlines()
    assert line.startswith(f"played 0.0417 days, {found.events} events in 1.2 s, ")
    assert line.endswith(" MiB at most")


def test_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """How far it is, by what the source counts in, and the virtual clock."""

    class Terminal(StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(whatif, "PROGRESS_EVERY", 1)
    monkeypatch.setenv("TERM", "xterm")
    body, errors = a_recording(), Terminal()
    events = list(recording.read(recording.split([body]), Faults()))
    source = Source(lambda _faults: events, whole=HOUR, done=lambda now: now - events[0].at)
    play(source, [BUILTIN["ours"]], errors)

    assert "playing" in errors.getvalue()
    assert "events" in errors.getvalue()


def test_remarks_of_a_source_stand_below_its_answer() -> None:
    """What is not known of it is not left out of what is shown."""
    source = whatif.from_chunks([a_recording()])
    source.remarks = ("Nobody knows who asked.",)
    found = play(source, [BUILTIN["ours"]], StringIO())
    out = StringIO()
    whatif.show(found, source, as_json=False, screen=Screen(), out=out)

    assert out.getvalue().endswith("\nNobody knows who asked.\n")


def test_a_plot_is_refused_before_anything_is_played(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its suffix, and whether Matplotlib is there."""
    whatif.check_plot(None)
    whatif.check_plot(Path("week.svg"))
    with pytest.raises(CannotReplay, match=r"ends in \.png or \.svg"):
        whatif.check_plot(Path("week.jpg"))
    monkeypatch.setattr(whatif, "find_spec", lambda _name: None)
    with pytest.raises(CannotReplay, match=r"python -m pip install matplotlib$"):
        whatif.check_plot(Path("week.png"))


def test_a_tale_is_recorded_as_it_is_told() -> None:
    """The recording that these tests play says what its events say."""
    tale = Tale()
    tale.evict(10)
    faults = Faults()
    read = list(recording.read(recording.split([lines(tale.events)]), faults))

    assert read == tale.events
    assert {event.resource for event in read} == {Resource.VMIS, Resource.VMIMS, Resource.PODS}
    assert any(event.kind is Kind.ADDED and isinstance(event.fact, Vmi) for event in read)
